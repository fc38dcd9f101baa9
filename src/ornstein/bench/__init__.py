"""How fast it is on this machine: steps, kernels and samples, as ratios measured in one run.

Nothing here prints.
"""

from ornstein.bench.counting import Ceilings, Cost, network_cost, optimiser_cost, sample_cost
from ornstein.bench.figures import Check, Figures, Line, Part, Table
from ornstein.bench.racing import Race, captured, race, timed
from ornstein.bench.running import PARTS, bench

__all__ = [
    "PARTS",
    "Ceilings",
    "Check",
    "Cost",
    "Figures",
    "Line",
    "Part",
    "Race",
    "Table",
    "bench",
    "captured",
    "network_cost",
    "optimiser_cost",
    "race",
    "sample_cost",
    "timed",
]
