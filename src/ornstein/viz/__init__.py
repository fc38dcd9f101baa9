"""Pictures of processes, evaluations, samples and training runs; a report of runs as one page.

Nothing here shows or prints.
"""

from ornstein.viz.bits import bits
from ornstein.viz.compare import overview
from ornstein.viz.curves import matrices, parts, shares, training, where
from ornstein.viz.gallery import gallery
from ornstein.viz.html import Section, Table, measured
from ornstein.viz.images import grid, picture, save_image, scatter
from ornstein.viz.page import page
from ornstein.viz.paper import (
    auxiliary_used,
    bars_of,
    bound_bars,
    evaluations_of,
    pictures_of,
    where_bits,
)
from ornstein.viz.report import report
from ornstein.viz.solvers import solvers
from ornstein.viz.style import save
from ornstein.viz.summary import Summary, curves, numbered, summarise

__all__ = [
    "Section",
    "Summary",
    "Table",
    "auxiliary_used",
    "bars_of",
    "bits",
    "bound_bars",
    "curves",
    "evaluations_of",
    "gallery",
    "grid",
    "matrices",
    "measured",
    "numbered",
    "overview",
    "page",
    "parts",
    "picture",
    "pictures_of",
    "report",
    "save",
    "save_image",
    "scatter",
    "shares",
    "solvers",
    "summarise",
    "training",
    "where",
    "where_bits",
]
