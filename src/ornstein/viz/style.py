"""One look for every picture: quiet axes, colours that all eyes can tell apart, direct labels.

Figures are made without pyplot, so nothing global is touched and no window ever opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, LogLocator
from numpy.typing import NDArray

DPI = 150
INK, QUIET, FAINT, GRID = "#1f2328", "#656d76", "#b1b8c0", "#e6e8eb"
# the palette of Okabe and Ito without its yellow, which white paper swallows, then three of Tol's
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#4d4d4d",
    "#882255",
    "#999933",
    "#332288",
)
# known processes have the same in every picture that colours by process; the commonest first
PROCESSES = {
    "vpsde": COLOURS[0],
    "cld": COLOURS[1],
    "malda": COLOURS[2],
    "alda": COLOURS[3],
    "learned-1": COLOURS[4],
    "learned-2": COLOURS[5],
    "psld": COLOURS[7],
    "subvpsde": COLOURS[8],
    "vesde": COLOURS[9],
}
SOLID = "-"
DASHED = (0, (4.5, 1.8))
DOTTED = (0, (1.2, 1.6))
MIXED = (0, (6.0, 1.6, 1.2, 1.6))

STEP = 4.0  # pixels between the points at which a line is seen when labels are placed

Curve = NDArray[np.float64]
Dash = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Line:
    """A curve with the words that stand next to it."""

    x: Curve
    y: Curve
    label: str
    colour: str
    dash: Dash = SOLID
    width: float = 1.8
    alpha: float = 1.0  # of the curve; its words are not pale


def of_processes(names: Sequence[str]) -> list[str]:
    """A colour for each process: a known one's own, and to the others what is left.

    No two have the same while colours last. Of "cld (1)" and "cld (2)" the first has cld's.
    """
    plain = [name.partition(" (")[0] for name in names]
    own = [None if name in plain[:i] else PROCESSES.get(name) for i, name in enumerate(plain)]
    left = [colour for colour in COLOURS if colour not in PROCESSES.values()]
    left += [colour for colour in reversed(PROCESSES.values()) if colour not in own]
    others = cycle(left)
    return [colour or next(others) for colour in own]


def blank(width: float, height: float) -> Figure:
    """An empty white figure (inches) that can be measured and saved."""
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> Path:
    """Write a PNG; its folder is made where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})
    return path


def dress(axes: Axes, title: str, unit: str = "", size: float = 9.5) -> None:
    """Title on the left with its unit in grey, light grid, no box."""
    head = axes.set_title(title, loc="left", fontsize=size + 1, color=INK, weight="bold", pad=7)
    if unit:
        axes.annotate(
            unit,
            xy=(1, 0),
            xycoords=head,
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=size - 0.5,
            color=QUIET,
            va="bottom",
        )
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.tick_params(which="both", length=0, labelsize=size - 1, labelcolor=QUIET)
    axes.tick_params(axis="x", which="major", length=3, color=QUIET)


def decibel(ratio: Curve) -> Curve:
    """10 log₁₀, and something very low where a signal is gone altogether."""
    return 10 * np.log10(np.maximum(ratio, 1e-300))


def log_time(axes: Axes, times: Curve) -> None:
    """A logarithmic time axis over all of the times."""
    axes.set_xscale("log")
    axes.set_xlim(times[0], times[-1])
    axes.xaxis.set_major_locator(LogLocator(10, numticks=12))


def linear_time(axes: Axes, times: Curve) -> None:
    """A linear time axis from 0 to the horizon, five ticks."""
    axes.set_xlim(0, times[-1])
    axes.xaxis.set_major_locator(FixedLocator(list(np.linspace(0, times[-1], 5))))


def draw(axes: Axes, lines: Sequence[Line], size: float = 9.5) -> None:
    """Plot the lines inside the limits that are set, and write each label beside its line."""
    for line in lines:
        above = 1.9 if line.colour == FAINT else 2 if line.dash == SOLID else 2.5
        axes.plot(
            line.x,
            line.y,
            color=line.colour,
            linestyle=line.dash,
            linewidth=line.width,
            alpha=line.alpha,
            solid_capstyle="round",
            zorder=above,  # a broken line shows what it covers
        )
    axes.minorticks_off()
    _label(axes, lines, size)


def _label(axes: Axes, lines: Sequence[Line], size: float) -> None:
    """Write every label where its own line is near and everything else is far."""
    named = [(line, track(axes, line)) for line in lines if line.label]
    named = [(line, track) for line, track in named if len(track)]
    if not named:
        return
    nameless = [track(axes, line) for line in lines if not line.label]
    tracks = [track for _, track in named] + _crowd(nameless)
    boxes: list[Curve] = []  # (left, bottom, right, top) of the labels written so far
    for line, own in named:
        text = axes.text(
            0.5,
            0.5,
            line.label,
            color=line.colour,
            fontsize=size,
            ha="center",
            va="center",
            transform=axes.transAxes,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            zorder=5,
        )
        extent = text.get_window_extent()
        half = np.array([extent.width / 2, extent.height / 2])
        others = [track for track in tracks if track is not own]
        place = _place(own, others, boxes, half, np.array(axes.bbox.extents))
        text.set_position(tuple(axes.transAxes.inverted().transform(place)))
        boxes.append(np.concatenate([place - half, place + half]))


def track(axes: Axes, line: Line, step: float = STEP) -> Curve:
    """The part of a line inside the axes, in pixels, a point every few of them: (n, 2)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        points = axes.transData.transform(np.stack([line.x, line.y], -1))
    points = points[np.isfinite(points).all(-1)]
    if len(points) < 2:
        return points
    left, bottom, right, top = axes.bbox.extents
    points[:, 1] = points[:, 1].clip(bottom - 50, top + 50)
    walked = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    places = np.arange(0, walked[-1], step)
    dense = np.stack([np.interp(places, walked, points[:, i]) for i in (0, 1)], -1)
    x, y = dense.T
    return dense[(x >= left) & (x <= right) & (y >= bottom) & (y <= top)]


def _crowd(tracks: Sequence[Curve]) -> list[Curve]:
    """All of these as at most one track, a point for each small square that any of them meets."""
    points = np.concatenate([np.empty((0, 2)), *tracks])
    return [STEP * np.unique(np.round(points / STEP), axis=0)] if len(points) else []


def _place(own: Curve, others: list[Curve], boxes: list[Curve], half: Curve, frame: Curve) -> Curve:
    """The centre of a label of this half size: beside its own line, clear of the rest."""
    up, aside = np.array([0, half[1] + 4]), np.array([half[0] + 7, 0])
    corners = [
        np.array([sx * (half[0] + 3), sy * (half[1] + 1)]) for sx in (1, -1) for sy in (1, -1)
    ]
    near_own = own[::2]
    spots = np.concatenate([near_own + shift for shift in (up, -up, aside, -aside, *corners)])
    inside = ((spots - half >= frame[:2] + 3) & (spots + half <= frame[2:] - 3)).all(-1)
    spots = spots[inside] if inside.any() else near_own
    near = _distance(spots, own, half)
    cost = 3.0 * (near < 2) + 0.1 * np.abs(near - 5)
    for track in others:
        distance = _distance(spots, track, half)
        cost += np.exp(-distance / 15) + 2.0 * (distance < 3)
    for box in boxes:
        middle, size = (box[:2] + box[2:]) / 2, (box[2:] - box[:2]) / 2
        distance = _distance(spots, middle[None], half + size)
        cost += np.exp(-distance / 15) + 6.0 * (distance < 4)
    return spots[int(np.argmin(cost))]


def _distance(spots: Curve, points: Curve, half: Curve) -> Curve:
    """From boxes around the spots to the nearest of the points: (n, 2), (m, 2) -> (n,)."""
    gaps = [np.abs(np.subtract.outer(spots[:, i], points[:, i])) - half[i] for i in (0, 1)]
    x, y = (np.maximum(gap, 0, out=gap) for gap in gaps)
    return np.sqrt((x * x + y * y).min(-1))
