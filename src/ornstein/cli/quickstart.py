"""`ornstein quickstart`: the whole zoo at a glance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ornstein
from ornstein.cli import naming
from ornstein.cli.looking import look

HELP = """Look at every preset, a process to be learned, and one written as two matrices.

examples:
  ornstein quickstart
  ornstein quickstart --out pictures"""


@dataclass(frozen=True)
class Quickstart:
    """Look at the whole zoo."""

    data_variance: float = 0.25
    """Variance of the data per coordinate (0.25 is typical of images in [-1, 1])."""
    data_mean: float = 0.0
    """Mean of the data per coordinate."""
    out: Path = Path("runs/quickstart")
    """Folder for the pictures and the numbers (JSON)."""

    def run(self) -> None:
        processes = [naming.preset(name) for name in [*ornstein.PRESETS, "learned-2"]]
        processes.append(naming.own("[[0,-1],[1,0]]", "[[0,0],[0,1]]"))
        look(processes, self.data_variance, self.data_mean, self.out)
