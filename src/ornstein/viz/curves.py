"""Curves of training runs: bits per dimension over steps and time, their parts, Q and D.

Thin lines are means over the training steps since the line before, with the weights of the moment.
Points are the averaged model on the validation split, ± one standard error. A frame leaves out the
high values that a run begins with, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from ornstein.evaluation import Curve as Spread
from ornstein.evaluation import Evaluation
from ornstein.training.reading import RunSummary
from ornstein.viz import style
from ornstein.viz.bits import PARTS
from ornstein.viz.bits import _curves as draw_spread
from ornstein.viz.bits import _parts as draw_shares
from ornstein.viz.page import variable
from ornstein.viz.style import COLOURS, FAINT, INK, QUIET, Curve, Line
from ornstein.viz.summary import numbered

Against = Literal["step", "seconds"]

WIDTH, HEIGHT = 5.4, 3.5  # inches of one panel
SIZE = 10.0
NAMED = 8  # entries of a matrix with a name; the rest are grey
WRITTEN = 6  # variables up to which the numbers are written into a matrix
DASHES = (style.SOLID, style.DASHED, style.DOTTED, style.MIXED)
SIDES = ("logsnr", "bits", "errors")
NUMBERS = ("bits_per_dim", "standard_error", "draw_error", *PARTS)
TEXTS = ("bound", "process", "parametrisation", "truncation")
UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True)
class Track:
    """Some numbers of a run along the way."""

    x: Curve
    y: Curve
    errors: Curve  # NaN where unknown

    def __len__(self) -> int:
        return len(self.x)


# ---------------------------------------------------------------- over a run


def training(
    runs: Sequence[RunSummary], against: Sequence[Against] = ("step", "seconds")
) -> Figure:
    """Bits/dim of training and validation, a panel for each of `against`; then simpler losses."""
    if not runs:
        raise ValueError("training was given no run; expected one or more, from read_runs.")
    lines = [line for run in runs for line in run.training]
    simple = any("loss" in line for line in lines)
    bound = any("bits_per_dim" in line for line in lines) or any(run.validation for run in runs)
    bound = bound or not simple  # an empty frame rather than none
    rows = [key for key, there in (("bits_per_dim", bound), ("loss", simple)) if there]
    figure = style.blank(WIDTH * len(against), HEIGHT * len(rows))
    cells = figure.subplots(len(rows), len(against), squeeze=False)
    _arrange(figure)
    for axes_row, key in zip(cells, rows, strict=True):
        for axes, along in zip(axes_row, against, strict=True):
            _progress(axes, runs, key, along)
    return figure


def parts(run: RunSummary) -> Figure:
    """Prior, diffusion and reconstruction in bits/dim over the steps of one run."""
    figure = style.blank(WIDTH, HEIGHT)
    axes = figure.subplots()
    _arrange(figure)
    thin = [_trained(run, part, "step") for part in PARTS]
    points = [_validated(run, part, "step") for part in PARTS]
    cut = _frame(axes, [*thin, *points])
    style.dress(axes, "Parts of the bound", "bits/dim" + cut, SIZE)
    _steps(axes, [*thin, *points])
    _draw(axes, PARTS, thin, points)
    return figure


def _progress(axes: Axes, runs: Sequence[RunSummary], key: str, against: Against) -> None:
    """One panel: a quantity of all runs over steps or time."""
    thin = [_trained(run, key, against) for run in runs]
    nothing = Track(*np.empty((3, 0)))
    points = [_validated(run, key, against) if key == "bits_per_dim" else nothing for run in runs]
    every = [*thin, *points]
    if against == "seconds":
        unit, every = _timed(axes, every)
        thin, points = every[: len(runs)], every[len(runs) :]
        title = "over time"
    else:
        unit, title = "", "over steps"
        _steps(axes, every)
    cut = _frame(axes, every)
    named = "Bits/dim" if key == "bits_per_dim" else "Loss"
    style.dress(axes, f"{named} {title}", ("lower is better" + cut), SIZE)
    if unit:
        axes.set_xlabel(f"{unit} of training", fontsize=SIZE - 1, color=QUIET, loc="right")
    _draw(axes, [plain(run.name) for run in runs], thin, points)


def _draw(axes: Axes, names: Sequence[str], thin: Sequence[Track], points: Sequence[Track]) -> None:
    """Thin lines, points with their errors, and one label for the two of them."""
    if not any(len(track) for track in (*thin, *points)):
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, color=QUIET,
                  ha="center", va="center", fontsize=SIZE)  # fmt: skip
        axes.set_xticks([])
        axes.set_yticks([])
        return
    lines = []
    for i, (name, one, other) in enumerate(zip(names, thin, points, strict=True)):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        alone = not len(other)
        if len(one) and not alone:
            axes.plot(one.x, one.y, color=colour, linestyle=dash, linewidth=0.9, alpha=0.45)
        main = one if alone else other
        if len(main):
            lines.append(Line(main.x, main.y, name, colour, dash, 1.2 if alone else 1.8))
        if len(main) == 1 or not alone:
            axes.plot(main.x, main.y, "o", color=colour, markersize=3.5, zorder=3)
        known = np.isfinite(other.errors)
        if known.any():
            y, error = other.y[known], other.errors[known]
            axes.vlines(other.x[known], y - error, y + error, color=colour, linewidth=1.2)
    style.draw(axes, lines, SIZE)


def _trained(run: RunSummary, key: str, against: Against) -> Track:
    lines = [(_number(line.get(against)), _number(line.get(key))) for line in run.training]
    return _track([(x, y, math.nan) for x, y in lines])


def _validated(run: RunSummary, key: str, against: Against) -> Track:
    """Validation has no clock of its own: its time is that of the training lines around it."""
    error = "valid_standard_error" if key == "bits_per_dim" else ""
    clock = _trained(run, "seconds", "step")
    found = []
    for line in run.validation:
        x = _number(line.get("step"))
        if against == "seconds":
            x = float(np.interp(x, clock.x, clock.y)) if len(clock) else math.nan
        found.append((x, _number(line.get(f"valid_{key}")), _number(line.get(error))))
    return _track(found)


def _track(rows: Sequence[tuple[float, float, float]]) -> Track:
    x, y, errors = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    known = np.isfinite(x) & np.isfinite(y)
    return Track(x[known], y[known], errors[known])


def _number(value: Any) -> float:
    """A number, or NaN where there is none."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if good else math.nan


# ---------------------------------------------------------------- frames


def _arrange(figure: Figure) -> None:
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.55 / width,
        right=1 - 0.12 / width,
        bottom=0.5 / height,
        top=1 - 0.42 / height,
        wspace=0.16,
        hspace=0.32,
    )


def _frame(axes: Axes, tracks: Sequence[Track]) -> str:
    """Set the vertical limits to where most of the values are; a word if some are above."""
    values = [track.y for track in tracks if len(track)]
    if not values:
        return ""
    low = min(float(y.min()) for y in values)
    most = max(float(y.max()) for y in values)
    high = max(float(np.quantile(y, 0.8)) for y in values)
    high = max(high, low + 1e-9 * max(1.0, abs(low)))
    margin = 0.08 * (high - low)
    if most <= high + 4 * margin:  # little would be cut
        high = most
    axes.set_ylim(low - margin, high + margin)
    return ", some values above the frame" if most > high + margin else ""


def _steps(axes: Axes, tracks: Sequence[Track]) -> None:
    """A linear axis of steps from 0."""
    last = max((float(track.x.max()) for track in tracks if len(track)), default=1.0)
    axes.set_xlim(0, max(last, 1.0) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("steps", fontsize=SIZE - 1, color=QUIET, loc="right")


def _timed(axes: Axes, tracks: Sequence[Track]) -> tuple[str, list[Track]]:
    """The same in a unit of time that suits all of them."""
    last = max((float(track.x.max()) for track in tracks if len(track)), default=1.0)
    size, unit = next((size, unit) for least, size, unit in UNITS if last >= least)
    axes.set_xlim(0, max(last / size, 1e-9) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return unit, [Track(track.x / size, track.y, track.errors) for track in tracks]


def plain(name: str) -> str:
    """A name for a picture: not too long, and with no mathematics in it."""
    if len(name) > 34:
        name = f"{name[:20]}…{name[-13:]}"
    return name.replace("$", r"\$")


# ---------------------------------------------------------------- learned matrices


def matrices(run: RunSummary) -> Figure:
    """Q and D of a learned process: their entries over steps, and the last ones in full."""
    lines = [line for line in run.training if "Q" in line and "D" in line]
    if not lines:
        raise ValueError(
            f"the run {run.name!r} has no Q and D in its metrics; expected a run whose process is "
            "learned, and that has trained for a while."
        )
    steps = np.array([line["step"] for line in lines], dtype=np.float64)
    Q, D = (np.array([line[name] for line in lines], dtype=np.float64) for name in "QD")
    K = Q.shape[-1]
    upper = [(i, j) for i in range(K) for j in range(i + 1, K)]
    some = [(i, j) for i, j in upper if D[:, i, j].any()]
    rows = [("Q", Q, upper)] if upper else []
    rows.append(("D", D, [(i, i) for i in range(K)] + some))
    figure = style.blank(WIDTH, 2.75 * len(rows) + 0.2)
    cells = figure.subplots(len(rows), 2, squeeze=False, width_ratios=[1.9, 1.0])
    _arrange(figure)
    figure.subplots_adjust(wspace=0.3, hspace=0.36)
    for (left, right), (name, values, entries) in zip(cells, rows, strict=True):
        _entries(left, name, steps, values, entries)
        _matrix(right, f"{name} at step {int(steps[-1]):,}", values[-1])
    cells[-1][0].set_xlabel("steps", fontsize=SIZE - 1, color=QUIET, loc="right")
    return figure


def _entries(
    axes: Axes, name: str, steps: Curve, values: Curve, entries: Sequence[tuple[int, int]]
) -> None:
    K = values.shape[-1]
    style.dress(axes, f"Entries of {name}", "above the diagonal" if name == "Q" else "", SIZE)
    order = sorted(entries, key=lambda entry: -abs(values[-1, entry[0], entry[1]]))
    colours = dict(zip(sorted(order[:NAMED], key=entries.index), COLOURS, strict=False))
    lines = []
    for i, j in entries:
        title = variable(i, K) if i == j else f"{variable(i, K)}, {variable(j, K)}"
        colour = colours.get((i, j))
        dash = style.DASHED if name == "D" and i != j else style.SOLID
        lines.append(
            Line(steps, values[:, i, j], title if colour else "", colour or FAINT, dash,
                 1.8 if colour else 0.8)
        )  # fmt: skip
    low, high = (float(end([line.y for line in lines])) for end in (np.min, np.max))
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.08 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    _steps(axes, [Track(line.x, line.y, line.y) for line in lines])
    axes.set_xlabel("")
    axes.axhline(0, color=QUIET, linewidth=0.8)
    if len(steps) == 1:
        for line in lines:
            axes.plot(line.x, line.y, "o", color=line.colour, markersize=3.5)
    style.draw(axes, lines, SIZE)


def _matrix(axes: Axes, title: str, matrix: Curve) -> None:
    """A small heat map with its numbers: blue is positive, orange negative."""
    K = len(matrix)
    style.dress(axes, title, size=SIZE)
    axes.grid(False)
    largest = max(float(np.abs(matrix).max()), 1e-30)
    places = max(0, 2 - max(-2, math.floor(math.log10(largest))))  # three digits of the largest
    for i in range(K):
        for j in range(K):
            value = float(matrix[i, j])
            colour = COLOURS[0] if value > 0 else COLOURS[1]
            strength = 0.5 * abs(value) / largest  # pale enough for ink to be read on it
            axes.add_patch(Rectangle((j, K - 1 - i), 1, 1, facecolor=colour, alpha=strength))
            if K <= WRITTEN:
                near = round(value, places) + 0.0  # no minus before a zero
                text = "0" if value == 0 else f"{near:.{places}f}".replace("-", "−")
                axes.text(j + 0.5, K - 0.5 - i, text, ha="center", va="center", color=INK,
                          fontsize=SIZE - (0.5 if K < 4 else 2.5))  # fmt: skip
    for line in range(K + 1):
        axes.plot([0, K], [line, line], color=style.GRID, linewidth=0.8)
        axes.plot([line, line], [0, K], color=style.GRID, linewidth=0.8)
    axes.set_xlim(0, K)
    axes.set_ylim(0, K)
    names = [variable(i, K) for i in range(K)]
    axes.set_xticks(np.arange(K) + 0.5, names)
    axes.set_yticks(K - 0.5 - np.arange(K), names)
    axes.tick_params(axis="both", length=0)
    axes.spines["bottom"].set_visible(False)
    axes.set_aspect("equal", anchor="NW")


# ---------------------------------------------------------------- evaluations


def where(evaluations: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Bits/dim per unit of log SNR, from evaluations as their files have them, by name."""
    figure = style.blank(WIDTH, HEIGHT)
    axes = figure.subplots()
    _arrange(figure)
    draw_spread(axes, evaluated(evaluations, "where"))
    return figure


def shares(evaluations: Mapping[str, Mapping[str, Any]]) -> Figure:
    """How prior, diffusion and reconstruction add up to the bound, for each evaluation."""
    figure = style.blank(WIDTH, max(HEIGHT, 0.92 + 0.52 * len(evaluations)))
    axes = figure.subplots()
    _arrange(figure)
    figure.subplots_adjust(left=0.04)
    words = ("strong", "middle", "faint")  # on dark paper what is pale is dark
    draw_shares(axes, evaluated(evaluations, "shares"), words)
    return figure


def drawable(record: Mapping[str, Any]) -> bool:
    """Whether a record has all that `where` and `shares` show."""
    curve = record.get("curve")
    if not isinstance(curve, dict) or any(math.isnan(_number(record.get(p))) for p in PARTS):
        return False
    sides = [curve.get(name) for name in SIDES]
    if not all(isinstance(side, list) for side in sides):
        return False
    edges, heights, errors = (len(side or ()) for side in sides)
    known = math.isfinite(_number(record.get("bits_per_dim")))
    return known and edges == heights + 1 == errors + 1 > 1


def evaluated(evaluations: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Evaluation]:
    """As values again, without what files leave out."""
    bad = [title for title, record in evaluations.items() if not drawable(record)]
    if bad or not evaluations:
        raise ValueError(
            f"{name} was given {', '.join(map(repr, bad)) or 'no evaluation'}; expected records "
            "as Evaluation.to_dict makes them, by name."
        )
    found = {}
    titles = numbered([plain(title) for title in evaluations])
    for title, record in zip(titles, evaluations.values(), strict=True):
        sides = {k: [_number(v) for v in record["curve"][k]] for k in SIDES}
        values: dict[str, Any] = {k: _number(record.get(k)) for k in NUMBERS}
        values |= {k: int(record.get(k) or 0) for k in ("examples", "draws", "dims")}
        values |= {k: str(record.get(k, "")) for k in TEXTS}
        found[title] = Evaluation(
            **values,
            density=bool(record.get("density")),
            per_example=torch.empty(0),
            marks=torch.empty(0),
            curve=Spread(**{k: torch.tensor(v, dtype=torch.float64) for k, v in sides.items()}),
        )
    return found
