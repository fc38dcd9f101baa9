"""Where a figure was measured: versions, machine and commit, for every JSON we write."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import numpy
import torch

FIGURES = ("results", "benchmarks/results", "docs")  # of a checkout


def provenance() -> dict[str, str]:
    """A flat record of what ran, on what, and when."""
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
        record["cuda"] = str(torch.version.cuda)
    return record


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    """ORNSTEIN_COMMIT if it is set, else this checkout's, marked where files differ from it.

    Figures don't count: a table that is under way writes them.
    """
    if "ORNSTEIN_COMMIT" in os.environ:  # for copies of a checkout without its history
        return os.environ["ORNSTEIN_COMMIT"]
    folder = Path(__file__).resolve().parent
    status = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]
    try:
        head = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            [*status, "--", ":/", *(f":(top,exclude){place}" for place in FIGURES)],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "not a git checkout"
    return head + (" with changes" if changed else "")
