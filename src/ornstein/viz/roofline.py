"""The roofline: what pieces of work achieve, against what the machine could at their intensity."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from ornstein import bench
from ornstein.bench import Figures
from ornstein.viz import style
from ornstein.viz.style import COLOURS, INK, QUIET, Line

SIZE = 10.5
MARGIN = 4.0  # on all sides, as a factor
MARKS = ("o", "s", "^", "D", "v", "p")


def roofline(found: Figures, title: str = "") -> Figure:
    """FLOPs per second against FLOPs per byte, under the measured ceilings."""
    points = _once(found.points())
    if not points:
        raise ValueError(
            "none of these figures has FLOPs and bytes; expected one of the parts step, rest or "
            "kernel."
        )
    top, slope = found.ceilings.flops, found.ceilings.bytes
    x = np.array([line.flops / line.bytes for line in points])
    y = np.array([line.flops / line.seconds for line in points])
    low, high = min(x.min(), top / slope) / MARGIN, max(x.max(), top / slope) * MARGIN
    figure = style.blank(8.4, 5.2)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.975, bottom=0.11, top=0.82)
    title = title or "How near to what the machine can do"
    figure.text(0.024, 0.945, title, fontsize=14, weight="bold", color=INK, va="center")
    about = f"{_machine(found)}; ceilings: {found.ceilings.matmul}, {found.ceilings.copy}"
    figure.text(0.024, 0.885, about, fontsize=SIZE - 1.5, color=QUIET, va="center")
    style.dress(axes, "", "", SIZE)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(y.min(), low * slope) / 2, top * MARGIN)
    axes.set_ylabel("FLOP/s", fontsize=SIZE - 1, color=QUIET)
    axes.set_xlabel("FLOPs per byte", fontsize=SIZE - 1, color=QUIET, loc="right")
    corner = top / slope
    slant, flat = np.array([low, corner]), np.array([corner, high])
    lines = [
        Line(slant, slope * slant, _rate(slope, "B/s"), INK),
        Line(flat, np.full(2, top), _rate(top, "FLOP/s"), INK),
    ]
    style.draw(axes, lines, SIZE - 1)
    for i, point in enumerate(points):
        axes.plot(
            x[i],
            y[i],
            MARKS[i % len(MARKS)],
            color=COLOURS[i % len(COLOURS)],
            markersize=8,
            markeredgecolor="white",
            zorder=3,
            label=f"{point.name}: {y[i] / min(top, slope * x[i]):.0%} of the roof",
        )
    axes.legend(loc="lower right", frameon=False, fontsize=SIZE - 1, labelcolor=INK)
    return figure


def _once(points: list[bench.Line]) -> list[bench.Line]:
    """The first of each name: the smaller batch."""
    found: dict[str, bench.Line] = {}
    for line in points:
        found.setdefault(line.name, line)
    return list(found.values())


def _machine(found: Figures) -> str:
    return found.provenance["gpu" if found.device == "cuda" else "cpu"]


def _rate(value: float, unit: str) -> str:
    """788 TFLOP/s."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
