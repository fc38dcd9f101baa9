"""What `inspect` and `quickstart` share: diagnose, print the table, write pictures and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ornstein
from ornstein import Process, viz
from ornstein.diagnostics import diagnose
from ornstein.provenance import provenance


def look(processes: Sequence[Process], variance: float, mean: float, out: Path) -> None:
    """Diagnose the processes; a table on the terminal, pictures and numbers in the folder."""
    out.mkdir(parents=True, exist_ok=True)  # before the work, so that a bad folder costs nothing
    console = Console()
    diagnoses = []
    with console.status("diagnosing …"):
        for process in processes:
            diagnoses.append(diagnose(process, variance, mean, times(process.horizon)))
    summaries = [viz.summarise(diagnosis) for diagnosis in diagnoses]
    console.print(table(summaries, variance, mean), "")
    files = []
    with console.status("drawing …"):
        stems = _stems([diagnosis.name for diagnosis in diagnoses])
        if len(diagnoses) > 1:
            files.append(viz.save(viz.overview(diagnoses), out / "overview.png"))
        for stem, diagnosis in zip(stems, diagnoses, strict=True):
            files.append(viz.save(viz.page(diagnosis), out / f"{stem}.png"))
    origin = {
        "ornstein": ornstein.__version__,
        **provenance(),
        "data": {"variance": variance, "mean": mean},
    }
    rows = [dataclasses.asdict(summary) for summary in summaries]
    drawn = {stem: viz.curves(each) for stem, each in zip(stems, diagnoses, strict=True)}
    files.append(_write(out / "figures.json", {**origin, "processes": rows}, indent=2))
    files.append(_write(out / "curves.json", {**origin, "curves": drawn}))
    for file in files:
        console.print(f"wrote {file}", style="dim", highlight=False, soft_wrap=True)


def _write(path: Path, record: dict[str, Any], indent: int | None = None) -> Path:
    text = json.dumps(record, indent=indent, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def times(horizon: float) -> Tensor:
    """Where to look: evenly on a logarithmic scale for short times, on a linear one for long."""
    short = torch.logspace(-5, 0, 300, dtype=torch.float64)
    long = torch.linspace(0, 1, 201, dtype=torch.float64)[1:]
    return horizon * torch.cat([short, long]).clamp(max=1.0).unique()


def table(summaries: Sequence[viz.Summary], variance: float, mean: float) -> Table:
    """One row per process."""
    rows = Table(
        title=f"Data of variance {variance:g} and mean {mean:g} per coordinate",
        title_justify="left",
        caption=(
            "sharp until: x is known to a sixth of an 8-bit pixel bin\n"
            "forgotten at: 99 % of any start is gone\n"
            "I(x; v): the most that the auxiliary variables ever tell about x"
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    rows.add_column("process", style="bold", no_wrap=True)
    for head in (
        "K",
        "one\nclock",
        "slowest\nrate",
        "prior gap\nbits/dim",
        "sharp\nuntil s",
        "forgotten\nat s",
        "I(x; v)\nnats",
        "worst\ncondition",
    ):
        rows.add_column(head, justify="right", no_wrap=True)
    for each in summaries:
        rows.add_row(
            each.name,
            str(each.n_vars),
            {True: "yes", False: "no", None: "–"}[each.commutes],
            "–" if each.slowest_rate is None else f"{each.slowest_rate:.2f}",
            f"{each.prior_gap_bits:.1e}",
            "never" if each.sharp_until is None else f"{each.sharp_until:.1e}",
            "never" if each.forgotten_at is None else f"{each.forgotten_at:.2f}",
            "–" if each.n_vars == 1 else f"{each.auxiliary_information:.3f}",
            f"{each.condition:.1e}",
        )
    return rows


def _stems(names: Sequence[str]) -> list[str]:
    """File names without surprises, no two alike."""
    stems: list[str] = []
    for name in names:
        stem = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "process"
        taken, count = {*stems, "overview"}, 2
        unique = stem
        while unique in taken:
            unique, count = f"{stem}-{count}", count + 1
        stems.append(unique)
    return stems
