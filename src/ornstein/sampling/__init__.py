"""Sampling: solvers as small values, and one function that drives them.

`Ancestral`, `Exponential` and `EulerMaruyama` go back along any process; `sample` numbers and
seeds its samples.
"""

from ornstein.sampling.exponential import Exponential
from ornstein.sampling.sampler import SamplingStep, sample
from ornstein.sampling.solvers import Ancestral, EulerMaruyama, LinearSolver, Moves, Solver
from ornstein.sampling.way import GRIDS, Grid, Way, grid_times

__all__ = [
    "GRIDS",
    "Ancestral",
    "EulerMaruyama",
    "Exponential",
    "Grid",
    "LinearSolver",
    "Moves",
    "SamplingStep",
    "Solver",
    "Way",
    "grid_times",
    "sample",
]
