"""`ornstein report`: compare runs in one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ornstein import viz
from ornstein.files import write_text
from ornstein.training.reading import read_runs

HELP = """Compare runs in one self-contained HTML file: curves, bits/dim, Q and D, samples.

examples:
  ornstein report runs/digits-channel-vpsde
  ornstein report runs/* --out report.html --title 'Learned against fixed'"""


@dataclass(frozen=True)
class Report:
    """Compare runs in one HTML file."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Folders of runs."""
    out: Path = Path("report.html")
    """The file to write."""
    title: str = "Comparison of runs"
    """Its title."""

    def run(self) -> None:
        if not self.runs:
            raise ValueError("no run was named; expected folders that `ornstein train` wrote.")
        if self.out.is_dir():
            raise ValueError(f"--out {self.out} is a folder; expected the name of an HTML file.")
        console = Console(highlight=False, soft_wrap=True)
        found = read_runs(self.runs)
        with console.status("drawing …"):
            text = viz.report(found, title=self.title)
        write_text(self.out, text)
        console.print(f"wrote {self.out}", style="dim")
