"""What `inspect` and `quickstart` share: diagnose, print the table, write pictures and JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import ornstein
from ornstein import Process, diagnose, viz
from ornstein.provenance import provenance

NARROWEST = 79


def look(processes: Sequence[Process], variance: float, mean: float, out: Path) -> None:
    """Diagnose the processes; a table on the terminal, pictures and numbers in the folder."""
    out.mkdir(parents=True, exist_ok=True)  # before the work, so that a bad folder costs nothing
    console = Console()
    console.width = max(console.width, NARROWEST)  # the table would lose its first column
    names = viz.numbered([process.name for process in processes])
    with console.status("diagnosing …"):
        diagnoses = [
            dataclasses.replace(diagnose(process, variance, mean), name=name)
            for process, name in zip(processes, names, strict=True)
        ]
    summaries = [viz.summarise(diagnosis) for diagnosis in diagnoses]
    console.print(table(summaries, variance, mean), "")
    files = []
    with console.status("drawing …"):
        stems = [re.sub(r"[^\w.-]+", "-", name).strip("-.") for name in names]
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


def table(summaries: Sequence[viz.Summary], variance: float, mean: float) -> Table:
    """One row per process."""
    rows = Table(
        title=f"Data of variance {variance:g} and mean {mean:g} per coordinate",
        title_justify="left",
        caption=(
            "sharp until: x is known to a sixth of an 8-bit pixel bin\n"
            "gone at: 99 % of any start is forgotten\n"
            "I(x; v): the most that the auxiliary variables ever tell about x\n"
            "—: not between the first time looked at and the horizon, or not defined"
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    rows.add_column("process", style="bold", overflow="fold", min_width=9)
    for head in (
        "K",
        "one\nclock",
        "slowest\nrate",
        "prior gap\nbits/dim",
        "sharp\nuntil s",
        "gone\nat s",
        "I(x; v)\nnats",
        "worst\ncondition",
    ):
        rows.add_column(head, justify="right", no_wrap=True)
    for each in summaries:
        rows.add_row(
            each.name,
            str(each.n_vars),
            {True: "yes", False: "no", None: "—"}[each.commutes],
            "—" if each.slowest_rate is None else f"{each.slowest_rate:.2f}",
            each.gap_text(),
            "—" if each.sharp_until is None else f"{each.sharp_until:.1e}",
            "—" if each.forgotten_at is None else f"{each.forgotten_at:.2f}",
            "—" if each.n_vars == 1 else f"{each.auxiliary_information:.3f}",
            f"{each.condition:.1e}",
        )
    return rows
