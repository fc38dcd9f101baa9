"""Data: an embedded default, toys, published sets, and files of one's own.

`load` gives a `Dataset` of three splits; a `Stream` shows its training examples in an endless
order that can be entered at any position.
"""

from ornstein.data import toys
from ornstein.data.fetching import Progress
from ornstein.data.loading import NAMES, load
from ornstein.data.sets import Dataset, Split
from ornstein.data.stream import Stream

__all__ = ["NAMES", "Dataset", "Progress", "Split", "Stream", "load", "toys"]
