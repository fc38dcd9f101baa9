"""The paper's tables as pictures: where the bits are, what v knows, our bounds beside theirs.

Each is a function of records as files have them: evaluations, `reproduce.auxiliary`, and rows of
bounds, which `bars_of` and `evaluations_of` take from the record of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from ornstein.evaluation import Evaluation, with_error
from ornstein.reproduce.recipe import plain
from ornstein.reproduce.results import worded
from ornstein.viz import style
from ornstein.viz.bits import PARTS, SHADES, named_parts
from ornstein.viz.curves import evaluated
from ornstein.viz.style import COLOURS, INK, QUIET, Line
from ornstein.viz.turns import take_turns

SIZE = 10.5
WIDE = 3.0  # narrowest bins of a picture: wider ones are shown as what they are
FAR = 3.0  # medians from which on a figure stands behind a break of the axis
LITTLE = 0.01  # of the largest: less is not shown
NO_NOISE = 1e-4  # a standard error that is near none
GONE = 1e-2  # nats: where all of y knows less, shares of it are not shown
LETTER, GAP = 0.075, 0.12  # inches of a letter of a number, and of the break of the axis
MARKS = ("o", "s", "^", "v")
PUBLISHED = "the paper"
OF = "Bits per dimension of "  # how titles of most tables begin

Record = Mapping[str, Any]


# ---------------------------------------------------------------- where the bits are


def where_bits(records: Mapping[str, Record], title: str = "") -> Figure:
    """Bits/dim per unit of log SNR for each evaluation, a panel a parametrisation; the parts.

    Where lines coincide they take turns; bins much wider than others' are pale steps.
    """
    found = evaluated(records, "where_bits")
    kinds = list(dict.fromkeys(one.parametrisation for one in found.values()))
    processes = list(dict.fromkeys(one.process for one in found.values()))
    colours = dict(zip(processes, style.of_processes(processes), strict=True))
    wide_bins = WIDE * min(_bin(one) for one in found.values())
    high = max(4.6, 1.5 + 0.5 * len(found))
    wide = 2.4 + 4.8 * (len(kinds) + 1)
    figure = style.blank(wide, high)
    *panels, parts = figure.subplots(1, len(kinds) + 1, width_ratios=[*[1.25] * len(kinds), 1.0])
    figure.subplots_adjust(
        left=0.55 / wide, right=1 - 0.2 / wide, bottom=0.55 / high, top=1 - 0.95 / high, wspace=0.14
    )
    _heading(figure, title or "Where the bits are lost")
    groups = [{n: one for n, one in found.items() if one.parametrisation == k} for k in kinds]
    drawn = [_lines(group, colours, wide_bins) for group in groups]
    for axes, kind, group, lines in zip(panels, kinds, groups, drawn, strict=True):
        _spread(axes, group, lines, f"Denoising error, {kind}" if kind else "Denoising error")
    low = min(axes.get_ylim()[0] for axes in panels)
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes, lines in zip(panels, drawn, strict=True):
        axes.set_ylim(low, top)  # one scale for all, before names are put beside lines
        style.draw(axes, lines, SIZE)
        take_turns(axes, [line for line in lines if line.alpha == 1])
    _stacks(parts, found, colours)
    return figure


def pictures_of(record: Record) -> dict[str, Figure]:
    """The pictures of a table, by what is in them; none where it has no figures yet."""
    looks = [figure["look"] for run in record["runs"] for figure in run["figures"]]
    found = {}
    if looks:
        found["bits"] = bound_bars(bars_of(record), record["title"])
    if "discrete" in looks:
        found["where"] = where_bits(evaluations_of(record, "discrete"), _lost(record["title"]))
    return found


def _lost(title: str) -> str:
    """A heading from the title of a table."""
    data = title.removeprefix(OF)
    where = f"Where the bits of {data} are lost"
    return where if title.startswith(OF) else f"{title}: where the bits are lost"


def evaluations_of(record: Record, look: str | None = None) -> dict[str, Record]:
    """The evaluations in the record of a table, by name; of one look, by default the first."""
    looks = [figure["look"] for run in record["runs"] for figure in run["figures"]]
    if not looks or (look is not None and look not in looks):
        have = ", ".join(dict.fromkeys(looks)) or "none"
        raise ValueError(f"look={look!r} is not in this record; expected one of its looks: {have}.")
    found: dict[str, Record] = {}
    for run in record["runs"]:
        for figure in run["figures"]:
            if figure["look"] == (look or looks[0]):
                whole = {**figure, "parametrisation": run["parametrisation"]}
                found[_name(run, figure["process"], found)] = whole
    return found


def _bin(one: Evaluation) -> float:
    """Log SNR of most bins; mere noise may be a single one."""
    return float(np.median(np.diff(one.curve.logsnr.numpy())))


def _lines(
    found: Mapping[str, Evaluation], colours: Mapping[str, str], wide_bins: float
) -> list[Line]:
    """One for each evaluation, at the middles of its bins; runs of one process are told apart.

    Between the middles of wide bins a line would show what nobody has measured: they are steps.
    """
    processes, lines = [one.process for one in found.values()], []
    for i, (name, one) in enumerate(found.items()):
        name = name.removeprefix(f"{one.parametrisation}, ")  # which the panel says
        edges = one.curve.logsnr.numpy()
        height, colour = one.curve.bits.numpy() / np.diff(edges), colours[one.process]
        if _bin(one) > wide_bins:
            x, y = np.repeat(edges, 2)[1:-1], np.repeat(height, 2)
            lines.append(Line(x, y, f"{name} (wide bins)", colour, style.SOLID, 1.0, 0.6))
            continue
        again = one.process in processes[:i]  # by another seed, say
        dash: style.Dash = (0, (1.2, 1.2)) if again else style.SOLID
        lines.append(Line((edges[1:] + edges[:-1]) / 2, height, name, colour, dash, 2.2))
    return lines


def _spread(axes: Axes, found: Mapping[str, Evaluation], lines: Sequence[Line], title: str) -> None:
    """The frame of a panel and the bands of its errors."""
    style.dress(axes, title, "bits/dim per unit of log SNR", SIZE)
    starts = []
    for line, one in zip(lines, found.values(), strict=True):
        error = one.curve.errors.numpy() / np.diff(one.curve.logsnr.numpy())
        error = np.repeat(error, len(line.x) // len(error))  # a step has two points
        known = np.isfinite(error)
        band = (line.y - error)[known], (line.y + error)[known]
        pale = 0.18 if len(lines) < 4 else 0.5 / len(lines)
        axes.fill_between(line.x[known], *band, color=line.colour, alpha=pale, linewidth=0)
        spent = np.cumsum(np.abs(line.y))
        starts.append(float(line.x[int(np.argmax(spent >= 1e-3 * spent[-1]))]) - 1)
    axes.set_xlim(min(starts), max(float(one.curve.logsnr[-1]) for one in found.values()))
    top = max(float(line.y.max()) for line in lines)
    low = min(0.0, *(float(line.y.min()) for line in lines))
    axes.set_ylim(low, 1.15 * max(top, 1e-9))
    axes.set_xlabel("log SNR: much noise …  little", fontsize=SIZE - 1, color=QUIET, loc="right")


def _stacks(axes: Axes, found: Mapping[str, Evaluation], colours: Mapping[str, str]) -> None:
    """The parts of each bound on each other; what is negative goes to the left of zero."""
    style.dress(axes, "Parts of the bound", "bits/dim ± standard error", SIZE)
    ends, bars, longest = [0.0], [], 0.0
    for i, (name, one) in enumerate(found.items()):
        reach = {True: 0.0, False: 0.0}  # on either side
        for part in PARTS:
            value = float(getattr(one, part))
            side = value >= 0
            axes.barh(-i, value, 0.42, reach[side], color=colours[one.process], alpha=SHADES[part])
            reach[side] += value
            bars.append((part, value))
        ends += reach.values()
        longest = max(longest, reach[True] - reach[False])
        words = f"{name}:  {with_error(one.bits_per_dim, one.standard_error)}"
        axes.text(
            reach[False],
            0.26 - i,
            words,
            fontsize=SIZE - 1,
            color=INK,
            va="bottom",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
    if min(ends) < 0:
        axes.axvline(0, color=QUIET, linewidth=0.8)
    span = max(ends) - min(ends) or 1.0
    axes.set_xlim(min(ends) - 0.02 * span, max(ends) + 0.05 * span)
    axes.set_ylim(0.35 - len(found), 0.85)
    axes.set_yticks([])
    key = named_parts(bars, longest)
    axes.set_xlabel(key, fontsize=SIZE - 1, color=QUIET, loc="right")


# ---------------------------------------------------------------- auxiliary variables


def auxiliary_used(record: Record, title: str = "") -> Figure:
    """What v_s knows of x over time, and its share in what all of y_s knows; if it is not zero.

    Left out: what could not be told from zero beside the rest, and shares in next to nothing.
    """
    several = {n: one for n, one in record["processes"].items() if one["n_vars"] > 1}
    if not several:
        raise ValueError(
            "none of these processes has auxiliary variables; expected one with K ≥ 2, for example "
            "ornstein.cld()."
        )
    known = {name: np.array(one["information"]) for name, one in several.items()}
    adds = {name: _share(one) for name, one in several.items()}
    idle = set(_idle(known)) & set(_idle(adds))
    shown = {name: one for name, one in several.items() if name not in idle}
    colours = dict(zip(shown, style.of_processes(list(shown)), strict=True))
    figure = style.blank(12.0, 4.9)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.05, right=0.985, bottom=0.115, top=0.79, wspace=0.13)
    _heading(figure, title or "Do the auxiliary variables know the data?")
    data = f"Gaussian data of variance {record['data_variance']:.3g}"
    figure.text(0.02, 0.873, data, fontsize=SIZE - 0.5, color=QUIET, va="center")
    style.dress(left, "What v alone knows", "I(x; vₛ), nats per coordinate", SIZE)
    style.dress(right, "What v adds to z", "I(x; vₛ | zₛ) as a share of I(x; yₛ)", SIZE)
    for axes, curves in ((left, known), (right, adds)):
        _timed(axes, {name: curves[name] for name in shown}, shown, colours)
    return figure


def _idle(curves: Mapping[str, style.Curve]) -> list[str]:
    """Those that could not be told from zero in one picture with the others."""
    most = {name: float(np.nan_to_num(curve).max()) for name, curve in curves.items()}
    return [name for name, one in most.items() if one <= LITTLE * max(most.values())]


def _share(one: Record) -> style.Curve:
    """added / whole, as long as anything is known at all."""
    added, whole = np.array(one["added"]), np.array(one["whole"])
    return np.where(whole > GONE, added / np.maximum(whole, GONE), math.nan)


def _timed(
    axes: Axes,
    values: Mapping[str, style.Curve],
    records: Mapping[str, Record],
    colours: Mapping[str, str],
) -> None:
    """Over parts of the horizon, those that are not zero throughout."""
    lines = [Line(np.array([0.0, 1.0]), np.zeros(2), "", QUIET, style.SOLID, 0.8)]
    for name, curve in values.items():
        times = np.array(records[name]["times"])
        if np.nan_to_num(curve).any():
            lines.append(Line(times / times[-1], curve, name, colours[name], style.SOLID, 2.0))
    most = max(float(np.nanmax(line.y)) for line in lines)
    axes.set_ylim(-0.03 * (most or 1.0), 1.1 * (most or 1.0))
    axes.set_xlim(0, 1)
    axes.set_xlabel("time s / T", fontsize=SIZE - 1, color=QUIET, loc="right", labelpad=1)
    style.draw(axes, lines, SIZE)


# ---------------------------------------------------------------- bounds


def bound_bars(rows: Sequence[Record], title: str = "") -> Figure:
    """Bits/dim ± standard error of our bounds beside the published figure, model by model.

    A row has a `name`, `published` (or None), and `bounds`: by name, each with bits_per_dim and
    standard_error. Figures far from the rest stand behind a break of the axis.
    """
    values = [value for row in rows for value, _ in _figures(row).values()]
    if not values:
        raise ValueError("bound_bars was given no figure; expected rows with bounds or published.")
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["bounds"]))
    kinds += [PUBLISHED] if any(row["published"] is not None for row in rows) else []
    limit = FAR * float(np.median(values)) if float(np.median(values)) > 0 else math.inf
    far = [value for value in values if value > limit]
    rooms = [LETTER * _longest(rows, limit, near) for near in (True, False)]
    step = 0.19 * len(kinds) + 0.16  # inches of a model
    wide = 8.8
    columns = len(kinds)
    while columns > 1 and _width([_words(kind) for kind in kinds], columns) > wide - 0.3:
        columns -= 1
    more = 0.24 * (math.ceil(len(kinds) / columns) - 1)  # inches of further lines of the legend
    high = 1.75 + more + step * len(rows)
    figure = style.blank(wide, high)
    panels = list(figure.subplots(1, 1 + bool(far), squeeze=False)[0])
    left = 0.4 + 0.085 * max(len(str(row["name"])) for row in rows)
    beyond = rooms[1] + (0.6 if len(set(far)) < 2 else 1.1) if far else 0.0
    widths = [wide - 0.25 - left - (beyond + GAP if far else 0.0), beyond]
    for axes, start, width in zip(panels, (left, wide - 0.25 - beyond), widths, strict=False):
        axes.set_position((start / wide, 0.55 / high, width / wide, 1 - (1.7 + more) / high))
    _heading(figure, title or "Bits per dimension, upper bounds")
    looks = _looks(kinds)
    for axes, near, width, room in zip(panels, (True, False), widths, rooms, strict=False):
        style.dress(axes, "", "", SIZE)
        axes.grid(False, axis="y")
        for i, row in enumerate(rows):
            if i % 2:
                axes.axhspan(-i - 0.5, -i + 0.5, color=style.GRID, alpha=0.45, linewidth=0)
            _marks(axes, row, i, looks, limit, near)
        axes.set_ylim(0.5 - len(rows), 0.5)
        axes.set_yticks([])
        _range(axes, [_on(row, limit, near) for row in rows], width, room)
    panels[0].set_yticks([-i for i in range(len(rows))], [str(row["name"]) for row in rows])
    panels[0].tick_params(axis="y", labelsize=SIZE, labelcolor=INK)
    panels[0].set_xlabel("bits/dim", fontsize=SIZE - 1, color=QUIET, loc="right")
    if far:
        panels[1].set_xlabel("(axis broken)", fontsize=SIZE - 1, color=QUIET, loc="right")
        _broken(*panels)
    figure.legend(
        handles=[
            Line2D([], [], linestyle="", label=_words(kind), **look) for kind, look in looks.items()
        ],
        loc="upper left",
        bbox_to_anchor=(0.12 / wide, 1 - 0.62 / high),
        ncols=columns,
        frameon=False,
        fontsize=SIZE,
        labelcolor=INK,
        handletextpad=0.2,
        columnspacing=1.1,
    )
    return figure


def _width(words: Sequence[str], columns: int) -> float:
    """Inches of a legend, which is filled column by column, the first ones more."""
    parts = np.array_split(np.array(words, dtype=object), columns)
    return sum(0.42 + 1.15 * LETTER * max(map(len, part)) for part in parts)


def bars_of(record: Record) -> list[Record]:
    """The rows of `bound_bars` from the record of a table: one for each run and process."""
    rows: dict[str, Record] = {}
    for run in record["runs"]:
        for process in dict.fromkeys(figure["process"] for figure in run["figures"]):
            own = [figure for figure in run["figures"] if figure["process"] == process]
            bounds = {
                _kind(figure): {k: figure[k] for k in ("bits_per_dim", "standard_error")}
                for figure in own
                if figure["bits_per_dim"] is not None
            }
            name = _name(run, process, rows)
            rows[name] = {"name": name, "published": run["paper"], "bounds": bounds}
    return list(rows.values())


def _kind(figure: Record) -> str:
    """Its look, and where the paper's bound is truncated if the look leaves that to the model."""
    bound, *rest = figure["look"].split("-")
    if bound != "tweedie" or any(part.startswith(("time", "level")) for part in rest):
        return str(figure["look"])
    what, _, value = str(figure.get("truncation") or "").rpartition(" ")
    if what == "s =" or (what == "standard error" and float(value) > NO_NOISE):
        rest.insert(0, f"{'time' if what == 's =' else 'level'}{plain(float(value))}")
    return "-".join([bound, *rest])


def _figures(row: Record) -> dict[str, tuple[float, float]]:
    """Values and errors, by kind."""
    found = {}
    for kind, bound in row["bounds"].items():
        error = bound["standard_error"]
        found[kind] = float(bound["bits_per_dim"]), float(error or 0.0)
    if row["published"] is not None:
        found[PUBLISHED] = float(row["published"]), 0.0
    return {kind: (v, e if math.isfinite(e) else 0.0) for kind, (v, e) in found.items()}


def _on(row: Record, limit: float, near: bool) -> dict[str, tuple[float, float]]:
    """The figures of a row on one side of the break."""
    return {k: (v, e) for k, (v, e) in _figures(row).items() if (v <= limit) == near}


def _longest(rows: Sequence[Record], limit: float, near: bool) -> int:
    """Letters of the longest number on one side of the break."""
    found = [_number(k, *f) for row in rows for k, f in _on(row, limit, near).items()]
    return max(map(len, found), default=0)


def _number(kind: str, value: float, error: float) -> str:
    return f"{value:.2f}" if kind == PUBLISHED else with_error(value, error)


def _range(
    axes: Axes, shown: Sequence[dict[str, tuple[float, float]]], width: float, room: float
) -> None:
    """Limits and ticks such that the numbers have room on the right; both in inches."""
    ends = [(v - e, v + e) for row in shown for v, e in row.values()]
    first, last = min(low for low, _ in ends), max(high for _, high in ends)
    inch = (last - first) / max(width - room - 0.5, 0.3) or 0.1 * abs(last) or 1.0
    low, high = first - 0.25 * inch, last + (room + 0.25) * inch
    spread = MaxNLocator(max(2, round(width))).tick_values(low, high)
    ticks = [tick for tick in spread if low + 0.2 * inch < tick < high - 0.15 * inch]
    axes.set_xlim(low, high)
    axes.set_xticks(ticks if last > first else [round(first)])


def _words(kind: str) -> str:
    """A kind of bound as the legend has it; the paper's, with where it is truncated."""
    if kind == PUBLISHED:
        return "the paper, as published"
    bound = kind.partition("-")[0]
    rest = [part for part in worded(kind).split(", ") if part not in ("", bound)]
    if bound != "tweedie":
        return ", ".join([f"ours, {bound} bound", *rest])
    cut = [part for part in rest if part.startswith("from ")]
    where = cut[0] if cut else "near no noise (tweedie)"
    return ", ".join([f"ours, the paper's bound {where}", *(p for p in rest if p not in cut)])


def _looks(kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A mark for each kind; the paper's is hollow."""
    looks: dict[str, dict[str, Any]] = {}
    for i, kind in enumerate(kinds):
        colour = QUIET if kind == PUBLISHED else COLOURS[i % len(COLOURS)]
        looks[kind] = {
            "marker": "D" if kind == PUBLISHED else MARKS[i % len(MARKS)],
            "color": colour,
            "markerfacecolor": "white" if kind == PUBLISHED else colour,
            "markersize": 5.5 if kind == PUBLISHED else 6.5,
        }
    return looks


def _marks(axes: Axes, row: Record, place: int, looks: Record, limit: float, near: bool) -> None:
    """The marks of a model below each other, with their numbers, on this side of the break."""
    shown = _on(row, limit, near)
    for j, (kind, look) in enumerate(looks.items()):
        if kind not in shown:
            continue
        value, error = shown[kind]
        y = -place + 0.5 - (j + 0.75) / (len(looks) + 0.5)
        if error:
            axes.hlines(y, value - error, value + error, color=look["color"], linewidth=1.4)
        axes.plot(value, y, zorder=3, **look)
        axes.annotate(
            _number(kind, value, error),
            (value + error, y),
            (7, 0),
            textcoords="offset points",
            fontsize=SIZE - 2,
            color=look["color"],
            va="center_baseline",
        )


def _broken(left: Axes, right: Axes) -> None:
    """Two slanted strokes where the axis is broken."""
    for axes, x in ((left, 1.0), (right, 0.0)):
        axes.plot(
            [x],
            [0.0],
            transform=axes.transAxes,
            marker=[(-1, -1.6), (1, 1.6)],
            markersize=9,
            color=QUIET,
            clip_on=False,
            zorder=6,
        )


# ---------------------------------------------------------------- small tools


def _heading(figure: Figure, title: str) -> None:
    wide, high = figure.get_size_inches()
    figure.text(
        0.24 / wide, 1 - 0.33 / high, title, fontsize=15, weight="bold", color=INK, va="center"
    )


def _name(run: Record, process: str | None, taken: Mapping[str, object]) -> str:
    """Parametrisation and process of a run, its seed, and its own name where that is not enough."""
    seed = f", seed {run['seed']}" if run.get("seed") else ""
    name = f"{run['parametrisation']}, {process}{seed}"
    return f"{name} ({run['name']})" if name in taken else name
