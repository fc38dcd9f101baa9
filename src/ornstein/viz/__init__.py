"""Pictures of a `Diagnosis` or an `Evaluation`, and figures. Nothing here shows or prints."""

from ornstein.viz.bits import bits
from ornstein.viz.compare import overview
from ornstein.viz.page import page
from ornstein.viz.style import save
from ornstein.viz.summary import Summary, curves, numbered, summarise

__all__ = ["Summary", "bits", "curves", "numbered", "overview", "page", "save", "summarise"]
