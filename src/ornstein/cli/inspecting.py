"""`ornstein inspect`: look at processes before spending a GPU on one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ornstein.cli import naming
from ornstein.cli.looking import look

HELP = """Look at one process or several: a table, a page of plots for each, and JSON.

examples:
  ornstein inspect cld
  ornstein inspect vpsde alda learned-2 --data-variance 1
  ornstein inspect --Q '[[0,-1],[1,0]]' --D '[[0,0],[0,1]]'
  ornstein inspect --Q ... --D ... --rate-q 5 5 --rate-d 0.1 10"""

Ends = Annotated[tuple[float, float] | None, tyro.conf.arg(metavar="START END")]
Json = Annotated[str | None, tyro.conf.arg(metavar="JSON")]


@dataclass(frozen=True)
class Inspect:
    """Look at one process or several."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME ...")] = ()
    """Presets: vpsde, subvpsde, vesde, cld, psld, alda, malda, or
    learned-N with N auxiliary variables (learned-N-full for a full D)."""
    Q: Json = None
    """Skew-symmetric matrix of a process of your own, as nested lists."""
    D: Json = None
    """Its positive semi-definite matrix."""
    S: Json = None
    """The inverse of its stationary covariance; the identity if left out."""
    rate: Ends = None
    """Linear rate, its value at time 0 and at the horizon (0.1 20 if left out)."""
    rate_q: Ends = None
    """The same for Q alone, with --Q."""
    rate_d: Ends = None
    """The same for D alone, with --D."""
    data_variance: float = 0.25
    """Variance of the data per coordinate (0.25 is typical of images in [-1, 1])."""
    data_mean: float = 0.0
    """Mean of the data per coordinate."""
    out: Path = Path("runs/inspect")
    """Folder for the pictures and the numbers (JSON)."""

    def run(self) -> None:
        processes = [naming.preset(name, self.rate) for name in self.names]
        if self.Q is not None and self.D is not None:
            processes.append(
                naming.own(self.Q, self.D, self.S, self.rate, self.rate_q, self.rate_d)
            )
        elif any(value is not None for value in (self.Q, self.D, self.S)):
            raise ValueError(
                "a process of your own needs both --Q and --D (and --S if its prior is not "
                "N(0, 1)); give both, for example --Q '[[0,-1],[1,0]]' --D '[[0,0],[0,1]]'."
            )
        elif self.rate_q is not None or self.rate_d is not None:
            raise ValueError("--rate-q and --rate-d go with --Q and --D; for presets use --rate.")
        if not processes:
            raise ValueError(
                "nothing to inspect; name a preset, for example `ornstein inspect cld`, or give "
                "--Q and --D."
            )
        look(processes, self.data_variance, self.data_mean, self.out)
