"""`ornstein inspect`: look at processes before spending a GPU on one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ornstein import PRESETS
from ornstein.cli import naming
from ornstein.cli.looking import look

HELP = """Look at one process or several: a table, a page of plots for each, and JSON.

processes: vpsde, subvpsde, vesde, cld, psld, alda, malda, learned-1, learned-2, …, learned-cld, …;
a folder is that of a run or of a saved model, whose process it is; all is every preset and
learned-2

examples:
  ornstein inspect cld
  ornstein inspect all
  ornstein inspect vpsde alda learned-2 --data-variance 1
  ornstein inspect runs/learned vpsde
  ornstein inspect --Q '[[0,-1],[1,0]]' --D '[[0,0],[0,1]]'
  ornstein inspect --Q ... --D ... --rate-q 5 5 --rate-d 0.1 10"""

ALL = (*PRESETS, "learned-2")

# the hint would say "(default: None)"; what None means is in the help of each
Names = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="NAME ...", help_behavior_hint=""),
]
Ends = Annotated[
    tuple[float, float] | None, tyro.conf.arg(metavar="START END", help_behavior_hint="")
]
Json = Annotated[str | None, tyro.conf.arg(metavar="JSON", help_behavior_hint="")]


@dataclass(frozen=True)
class Inspect:
    """Look at one process or several."""

    names: Names = ()
    """Presets, learned-N or learned-PRESET (or with -full), folders of runs, or all."""
    Q: Json = None
    """Skew-symmetric matrix of a process of your own, as nested lists."""
    D: Json = None
    """Its positive semi-definite matrix."""
    S: Json = None
    """The inverse of its stationary covariance (default: the identity)."""
    v0_variance: Json = None
    """Variance of v at time 0: a number, one for each, or a matrix (default: 0.04)."""
    rate: Ends = None
    """Linear rate, its value at time 0 and at the horizon (default: 0.1 20)."""
    rate_q: Ends = None
    """The same for Q alone, with --Q (default: that of --rate)."""
    rate_d: Ends = None
    """The same for D alone, with --D (default: that of --rate)."""
    horizon: float = 1.0
    """The time at which every process ends."""
    data_variance: float = 0.25
    """Variance of the data per coordinate (0.25 is typical of images in [-1, 1])."""
    data_mean: float = 0.0
    """Mean of the data per coordinate."""
    out: Path = Path("runs/inspect")
    """Folder for the pictures and the numbers (JSON)."""

    def run(self) -> None:
        names = [each for name in self.names for each in (ALL if name == "all" else (name,))]
        processes = [naming.process(name, self.rate, self.horizon) for name in names]
        if self.Q is not None and self.D is not None:
            own = naming.own(
                self.Q,
                self.D,
                self.S,
                self.rate,
                self.rate_q,
                self.rate_d,
                self.v0_variance,
                self.horizon,
            )
            processes.append(own)
        elif any(value is not None for value in (self.Q, self.D, self.S)):
            raise ValueError(
                "a process of your own needs both --Q and --D (and --S if its prior is not "
                "N(0, 1)); give both, for example --Q '[[0,-1],[1,0]]' --D '[[0,0],[0,1]]'."
            )
        elif any(value is not None for value in (self.rate_q, self.rate_d, self.v0_variance)):
            raise ValueError(
                "--rate-q, --rate-d and --v0-variance go with --Q and --D; for presets use --rate."
            )
        if not processes:
            raise ValueError(
                "nothing to inspect; name a preset, for example `ornstein inspect cld`, or give "
                "--Q and --D."
            )
        look(processes, self.data_variance, self.data_mean, self.out)
