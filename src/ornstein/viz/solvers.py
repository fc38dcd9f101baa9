"""Quality against network evaluations: one line per solver, one panel per process.

Points of one number of evaluations stand a little beside each other, so that all errors are seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from ornstein.quality import WORDS
from ornstein.quality.comparison import MORE, Comparison, FigureName, Point
from ornstein.viz import style
from ornstein.viz.style import COLOURS, INK, QUIET, Curve

SIZE = 10.5
WIDTH, HEIGHT = 4.0, 3.5  # inches of a panel among others
ALONE = (8.4, 5.2)  # of a single one
ACROSS = 3  # panels in a row
HEAD, LINE = 1.2, 0.23  # inches above the panels, and more of them for each line of the legend
DECADES = 4  # above the least value that a panel shows; what is higher is cut off
APART = 2.6  # points between solvers of the same evaluations
MARKS = ("o", "s", "^", "D", "v", "<", ">", "p", "h", "8")
LETTER, KEY = 0.092, 0.62  # inches of a letter of the legend, and of a line in it


def solvers(found: Comparison, figure: FigureName | None = None, title: str = "") -> Figure:
    """A figure of samples against network evaluations, with errors and that of held-out data."""
    name = found.figure if figure is None else figure
    known = [value for point in found.points if (value := point.value(name)) is not None]
    if not known:
        raise ValueError(
            f"no point of this comparison has a figure {name!r}; expected some that were measured."
        )
    processes = list(dict.fromkeys(point.process for point in found.points))
    names = list(dict.fromkeys(point.solver for point in found.points))
    across = 2 if len(processes) == 4 else min(len(processes), ACROSS)
    down = -(-len(processes) // across)
    wide = max(WIDTH * across, ALONE[0])
    frame = _Frame(found, name, known, names)
    keys = frame.keys()
    columns = _columns([str(key.get_label()) for key in keys], wide - 0.4)
    head = HEAD + LINE * (-(-len(keys) // columns))
    high = (ALONE[1] - HEAD if len(processes) == 1 else HEIGHT * down) + head
    canvas = style.blank(wide, high)
    cells = canvas.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    canvas.subplots_adjust(
        left=0.62 / wide,
        right=1 - 0.2 / wide,
        bottom=0.6 / high,
        top=1 - head / high,
        wspace=0.07,
        hspace=0.22,
    )
    word = WORDS[name]
    title = title or f"{word[0].upper()}{word[1:]} against network evaluations"
    left = 0.2 / wide
    canvas.text(left, 1 - 0.33 / high, title, fontsize=14, weight="bold", color=INK, va="center")
    note = frame.about()
    canvas.text(left, 1 - 0.64 / high, note, fontsize=SIZE - 0.5, color=QUIET, va="center")
    _legend(canvas, keys, columns, left, 1 - 0.82 / high)
    for number, axes in enumerate(cells.flat):
        if number >= len(processes):
            axes.set_visible(False)
            continue
        frame.draw(axes, processes[number])
        if number + across >= len(processes):  # nothing is below
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("network evaluations", fontsize=SIZE - 1, color=QUIET, loc="right")
    return canvas


@dataclass(frozen=True)
class _Frame:
    """What the panels share."""

    found: Comparison
    name: FigureName
    known: list[float]  # all values
    names: list[str]  # of the solvers

    def about(self) -> str:
        """What is shown, in one line."""
        against = self.found.against
        reference = f"{against.real:,} of {against.data} {against.split}"
        better = "more" if self.name in MORE else "less"
        cut = "; higher values are cut off" if self._range()[2] else ""
        errors = any(point.error(self.name) for point in self.found.points)
        samples = f"{self.found.samples:,} samples against {reference}"
        return f"{samples}{', ± standard error' if errors else ''}; {better} is better{cut}"

    def keys(self) -> list[Line2D]:
        """The legend: solvers, and what held-out data comes to."""
        found = [
            Line2D(
                [],
                [],
                color=COLOURS[i % len(COLOURS)],
                marker=MARKS[i % len(MARKS)],
                markersize=5.6,
                markeredgecolor="white",
                linewidth=1.7,
                label=name,
            )
            for i, name in enumerate(self.names)
        ]
        if (floor := self._floor()) is not None:
            dashed = {"color": QUIET, "linewidth": 1.2, "linestyle": style.DASHED}
            found.append(Line2D([], [], label=f"held-out data, {floor[0]:.3g}", **dashed))  # type: ignore[arg-type]
        return found

    def draw(self, axes: Axes, process: str) -> None:
        """One panel."""
        style.dress(axes, process, size=SIZE)
        self._scales(axes)
        if (floor := self._floor()) is not None:
            value, error = floor
            band = (value - error, value + error)
            axes.axhspan(*band, color=QUIET, alpha=0.12, linewidth=0, zorder=1)
            axes.axhline(value, color=QUIET, linewidth=1.2, linestyle=style.DASHED, zorder=1.5)
        for place, solver in enumerate(self.names):
            x, y, errors = _track(self.found.lines.get((process, solver), ()), self.name)
            colour, mark = COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)]
            beside = APART * (place - (len(self.names) - 1) / 2) / 72
            moved = ScaledTranslation(beside, 0, axes.figure.dpi_scale_trans)
            at = axes.transData + moved
            low = y - errors if self.name in MORE else np.maximum(y - errors, 1e-3 * y)
            axes.vlines(x, low, y + errors, color=colour, linewidth=1.1, alpha=0.6, transform=at)
            axes.plot(
                x,
                y,
                color=colour,
                linewidth=1.7,
                marker=mark,
                markersize=5.2,
                markeredgecolor="white",
                markeredgewidth=0.7,
                solid_capstyle="round",
                transform=at,
                zorder=3,
            )

    def _range(self) -> tuple[float, float, bool]:
        """The ends of the y-axis, and whether anything is beyond them."""
        floor = self._floor()
        values = [*self.known, *([] if floor is None else [floor[0], floor[0] - floor[1]])]
        if self.name in MORE:
            return max(0.0, min(values) - 0.06), min(1.02, max(values) + 0.06), False
        values += [v + (p.error(self.name) or 0.0) for p in self.found.points
                   if (v := p.value(self.name)) is not None]  # fmt: skip
        positive = [value for value in values if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        top = min(high, low * 10**DECADES)
        span = max(top / low, 2.0)
        return low / span**0.07, top * span**0.07, high > top

    def _scales(self, axes: Axes) -> None:
        """Both logarithmic, but for shares; with plain numbers."""
        axes.set_xscale("log")
        counts = self.found.evaluations
        made = [p.made for p in self.found.points if p.value(self.name) is not None]
        least, most = min([*counts, *made]), max([*counts, *made])
        margin = max(most / least, 2.0) ** 0.05
        axes.set_xlim(least / margin, most * margin)
        _ticked(axes, "x", [float(count) for count in counts])
        low, high, _ = self._range()
        if self.name not in MORE:
            axes.set_yscale("log")
            _ticked(axes, "y", _plain(low, high))
        axes.set_ylim(low, high)
        if self.name in MORE:  # no share is larger than 1
            axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= 1])

    def _floor(self) -> tuple[float, float] | None:
        """What held-out data comes to, and its error."""
        floor = self.found.against.floor
        value = None if floor is None else getattr(floor, self.name)
        if value is None:
            return None
        return value, getattr(floor, f"{self.name}_error", None) or 0.0


def _track(points: tuple[Point, ...], name: str) -> tuple[Curve, Curve, Curve]:
    """Evaluations, values and errors of the points that have them."""
    known = [
        (point.made, value, point.error(name) or 0.0)
        for point in points
        if (value := point.value(name)) is not None
    ]
    x, y, errors = np.array(sorted(known), dtype=np.float64).reshape(-1, 3).T
    return x, y, errors


def _plain(low: float, high: float) -> list[float]:
    """1, 2, 5 of each decade, or only the first where there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1, 2, 5) if high / low < 2000 else (1,)
    ticks = [lead * 10.0**decade for decade in decades for lead in leads]
    return [tick for tick in ticks if low <= tick <= high]


def _ticked(axes: Axes, which: str, ticks: list[float]) -> None:
    """Only these ticks, as plain numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([f"{tick:,.12g}" for tick in ticks]))
    axis.set_minor_locator(NullLocator())


def _columns(words: list[str], wide: float) -> int:
    """How many columns of a legend fit; it is filled column by column, the first ones more."""
    for columns in range(len(words), 1, -1):
        parts = np.array_split(np.array(words, dtype=object), columns)
        if sum(KEY + LETTER * max(map(len, part)) for part in parts) <= wide:
            return columns
    return 1


def _legend(canvas: Figure, keys: list[Line2D], columns: int, left: float, top: float) -> None:
    """One word for each colour, above all panels."""
    canvas.legend(
        handles=keys,
        loc="upper left",
        bbox_to_anchor=(left, top),
        ncols=columns,
        frameon=False,
        fontsize=SIZE,
        labelcolor="linecolor",
        handlelength=1.9,
        handletextpad=0.5,
        columnspacing=1.5,
        borderpad=0,
        borderaxespad=0,
    )
