"""Lines that lie on each other take turns, so that none of them hides the others.

Wherever k lines are less than about their width apart, the way along the first of them is cut into
short pieces, and the pieces are drawn by the k lines in turn. Elsewhere a line is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from ornstein.viz.style import DPI, Curve, Line, track

PIECE = 7.7  # points
NEAR = 0.75  # of a line's width: so near, one would hide the other
STEP = 2.0  # pixels


def take_turns(axes: Axes, lines: Sequence[Line]) -> None:
    """Lay pieces over lines that are drawn, where some coincide; for limits that are set."""
    scale = DPI / 72  # pixels of a point
    tracks = [track(axes, line, STEP) for line in lines]
    for i, (line, own) in enumerate(zip(lines, tracks, strict=True)):
        found = [_nearest(own, other) for other in tracks]
        near = np.stack([gap < NEAR * scale * line.width for gap, _ in found])  # (k, n)
        near[i] = True
        way = np.stack([place for _, place in found])  # (k, n): how far along each of the lines
        first = np.take_along_axis(way, near.argmax(0)[None], 0)[0]
        turn = np.floor(first / (PIECE * scale)) % near.sum(0)
        mine = (turn == near[:i].sum(0)) & (near.sum(0) > 1)
        pieces = [axes.transData.inverted().transform(own[run]) for run in _runs(mine)]
        if pieces:
            look = {"colors": line.colour, "linewidths": line.width, "linestyles": line.dash}
            over = LineCollection(pieces, capstyle="butt", zorder=2.6, **look)
            axes.add_collection(over, autolim=False)


def _nearest(points: Curve, other: Curve) -> tuple[Curve, Curve]:
    """How far points are from another line, and where on its way: (n, 2), (m, 2) -> 2 × (n,)."""
    if not len(other):
        return np.full(len(points), np.inf), np.zeros(len(points))
    gaps = np.hypot(*(np.subtract.outer(points[:, i], other[:, i]) for i in (0, 1)))
    return gaps.min(1), STEP * gaps.argmin(1)


def _runs(chosen: Curve) -> list[slice]:
    """Where the same is chosen on and on, each run with the point after it."""
    steps = np.diff(np.concatenate([[0], chosen.astype(int), [0]]))
    starts, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return [slice(a, b + 1) for a, b in zip(starts, ends, strict=True)]
