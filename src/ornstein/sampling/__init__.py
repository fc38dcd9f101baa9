"""Sampling: solvers as small values, and one function that drives them.

`Ancestral`, `EulerMaruyama`, `Splitting` and `PredictorCorrector` solve the reverse equation,
`Heun` and `ProbabilityFlow` its probability flow, `Exponential` everything between; all of them
along any process. `sample` numbers and seeds its samples.
"""

from ornstein.sampling.exponential import Exponential, Heun
from ornstein.sampling.flow import ProbabilityFlow
from ornstein.sampling.grids import GRIDS, Grid, grid_times
from ornstein.sampling.sampler import SamplingStep, sample
from ornstein.sampling.solvers import Route, Solver, Start, Step, Table, TableSolver
from ornstein.sampling.stochastic import Ancestral, EulerMaruyama, PredictorCorrector, Splitting
from ornstein.sampling.way import Seen, Way

__all__ = [
    "GRIDS",
    "Ancestral",
    "EulerMaruyama",
    "Exponential",
    "Grid",
    "Heun",
    "PredictorCorrector",
    "ProbabilityFlow",
    "Route",
    "SamplingStep",
    "Seen",
    "Solver",
    "Splitting",
    "Start",
    "Step",
    "Table",
    "TableSolver",
    "Way",
    "grid_times",
    "sample",
]
