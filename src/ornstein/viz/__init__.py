"""Pictures and figures of a process, from its `Diagnosis`. Nothing here shows or prints."""

from ornstein.viz.compare import overview
from ornstein.viz.page import page
from ornstein.viz.style import save
from ornstein.viz.summary import Summary, curves, numbered, summarise

__all__ = ["Summary", "curves", "numbered", "overview", "page", "save", "summarise"]
