"""One page about one process: what it does to the data, to the noise, and to what is known of x."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ornstein.diagnostics import Diagnosis
from ornstein.viz import style
from ornstein.viz.style import COLOURS, FAINT, INK, QUIET, Curve, Line
from ornstein.viz.summary import FLOOR, FORGOTTEN, Summary, summarise

DASHES = (style.SOLID, style.DASHED, style.DOTTED, style.MIXED)
ALL = len(DASHES)  # up to here every entry of a matrix is drawn, beyond it what concerns the data
LOWEST = -120.0  # decibels; what is below says nothing more
MOST = 8  # variables with a name and a colour; the rest are grey


def page(diagnosis: Diagnosis, title: str | None = None) -> Figure:
    """Φ, Σ, signal-to-noise, convergence to the prior, memory, and how v is used."""
    one = diagnosis.n_vars == 1
    rows = 2 if one else 3
    figure = style.blank(13.0, 3.05 * rows + 0.95)
    grid = figure.subplots(rows, 3)
    top = 1 - 1.12 / figure.get_figheight()
    figure.subplots_adjust(
        left=0.045,
        right=0.985,
        bottom=0.52 / figure.get_figheight(),
        top=top,
        wspace=0.17,
        hspace=0.42,
    )
    cells = list(grid.flat)
    _heading(figure, cells[0], title or diagnosis.name, summarise(diagnosis))
    panels = [_propagator, _spread, _snr, _convergence, _memory]
    if not one:
        panels[2:2] = [_correlation]
        panels += [_auxiliary, _condition]
    for panel, axes in zip(panels, cells[1:], strict=True):
        panel(axes, diagnosis)
    for axes in grid[-1]:
        axes.set_xlabel("time s", fontsize=9, color=QUIET, loc="right", labelpad=2)
    return figure


def variable(index: int, n_vars: int) -> str:
    """z for the data, v or v₁, v₂ … for the auxiliary variables."""
    if index == 0:
        return "z"
    return (
        "v"
        if n_vars == 2
        else "v" + str(index).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
    )


def _colours(diagnosis: Diagnosis) -> dict[int, str]:
    """The variables that have a name and a colour: z and those that respond most to it."""
    response = np.abs(_array(diagnosis.propagator)[:, 1:, 0]).max(0)
    order = np.argsort(-response, kind="stable") + 1
    named = sorted([0, *order[: MOST - 1].tolist()])
    return dict(zip(named, COLOURS, strict=False))


def _line(x: Curve, y: Curve, label: str, colour: str | None) -> Line:
    """A line with its name, or a thin grey one where there is no colour for it."""
    return Line(x, y, label, colour) if colour else Line(x, y, "", FAINT, width=0.8)


def _heading(figure: Figure, axes: Axes, title: str, summary: Summary) -> None:
    """The name over the page and the figures in the first cell."""
    y = 1 - 0.42 / figure.get_figheight()
    figure.text(0.02, y, title, fontsize=19, weight="bold", color=INK, va="center")
    kind = (
        "1 variable: the data"
        if summary.n_vars == 1
        else (f"{summary.n_vars} variables: the data z and {summary.n_vars - 1} auxiliary")
    )
    figure.text(0.985, y, kind, fontsize=11, color=QUIET, va="center", ha="right")
    axes.set_axis_off()
    facts = [
        ("prior gap at the horizon", f"{summary.gap_text('.2g')} bits/dim"),
        ("x sharp to ⅙ pixel until", _time(summary.sharp_until)),
        ("99 % of any start gone by", _time(summary.forgotten_at)),
        ("slowest rate", _number(summary.slowest_rate)),
        ("one clock for Q and D", {True: "yes", False: "no", None: "—"}[summary.commutes]),
    ]
    if summary.n_vars > 1:
        facts += [
            ("most that v tells of x", f"{summary.auxiliary_information:.2g} nats"),
            ("worst condition of L", f"{summary.condition:.1e}"),
        ]
    step = 1 / len(facts)
    for i, (what, value) in enumerate(facts):
        height = 1 - (i + 0.5) * step
        axes.text(0.0, height, what, fontsize=10.5, color=QUIET, va="center")
        axes.text(
            0.93, height, value, fontsize=11.5, color=INK, va="center", ha="right", weight="bold"
        )
        if i:
            axes.plot([0.0, 0.93], [1 - i * step] * 2, color=style.GRID, linewidth=0.8)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def _propagator(axes: Axes, diagnosis: Diagnosis) -> None:
    times, K = _array(diagnosis.times), diagnosis.n_vars
    unit = "E[row] per unit of column at time 0"
    if K > ALL:
        unit = "response to z, dashed: to itself"
    style.dress(axes, "Propagator Φ(s)", unit if K > 1 else "")
    start = np.eye(K)[None]
    x, entries = np.append(0.0, times), np.concatenate([start, _array(diagnosis.propagator)])
    colours = _colours(diagnosis)
    if K > ALL:
        lines = [Line(x, entries[:, i, i], "", FAINT, style.DASHED, 0.8) for i in range(1, K)]
        lines += [
            _line(x, entries[:, i, 0], f"{variable(i, K)}←z", colours.get(i)) for i in range(K)
        ]
    else:
        lines = [
            Line(
                x,
                entries[:, i, j],
                f"{variable(i, K)}←{variable(j, K)}" if K > 1 else "",
                colours[i],
                DASHES[j],
            )
            for i in range(K)
            for j in range(K)
            if i == j or entries[:, i, j].any()
        ]
    low = min(0.0, *(float(line.y.min()) for line in lines))
    high = max(1.0, *(float(line.y.max()) for line in lines))
    margin = 0.06 * (high - low)
    style.linear_time(axes, times)
    axes.set_ylim(low - margin, high + margin)
    axes.axhline(0, color=QUIET, linewidth=0.8)
    style.draw(axes, lines, 9.5 if K < 3 else 8.5)


def _spread(axes: Axes, diagnosis: Diagnosis) -> None:
    times, K = _array(diagnosis.times), diagnosis.n_vars
    style.dress(axes, "Noise given x", "standard deviations √Σᵢᵢ")
    deviations = np.sqrt(np.diagonal(_array(diagnosis.covariance), axis1=-2, axis2=-1))
    style.log_time(axes, times)
    axes.set_yscale("log")
    axes.set_ylim(max(1e-12, deviations.min() / 2), deviations.max() * 2.5)
    colours = _colours(diagnosis)
    style.draw(
        axes,
        [
            _line(times, deviations[:, i], variable(i, K) if K > 1 else "", colours.get(i))
            for i in range(K)
        ],
    )


def _correlation(axes: Axes, diagnosis: Diagnosis) -> None:
    times, K = _array(diagnosis.times), diagnosis.n_vars
    style.dress(axes, "Correlations given x", "of the noises" if K <= ALL else "of z with each v")
    covariance = _array(diagnosis.covariance)
    deviations = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    correlations = covariance / deviations[:, :, None] / deviations[:, None, :]
    if K > ALL:
        colours = _colours(diagnosis)
        lines = [
            _line(times, correlations[:, i, 0], f"z, {variable(i, K)}", colours.get(i))
            for i in range(1, K)
        ]
    else:
        pairs = [(i, j) for i in range(K) for j in range(i)]
        lines = [
            Line(times, correlations[:, i, j], f"{variable(j, K)}, {variable(i, K)}", colour)
            for (i, j), colour in zip(pairs, COLOURS, strict=False)
        ]
    most = max(float(np.abs(line.y).max()) for line in lines)
    style.linear_time(axes, times)
    axes.set_ylim(*np.array([-1.08, 1.08]) * (1.0 if most > 0.4 else max(0.01, 1.4 * most)))
    axes.axhline(0, color=QUIET, linewidth=0.8)
    style.draw(axes, lines, 9.5 if K < 3 else 8.5)


def _snr(axes: Axes, diagnosis: Diagnosis) -> None:
    style.dress(axes, "Signal-to-noise about x", "dB")
    times, decibel = _array(diagnosis.times), style.decibel(_array(diagnosis.snr))
    style.log_time(axes, times)
    low, high = max(LOWEST, float(decibel.min())), max(0.0, float(decibel.max()))
    axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    axes.axhline(0, color=QUIET, linewidth=0.8)
    style.draw(axes, [Line(times, decibel, "", COLOURS[0])])


def _convergence(axes: Axes, diagnosis: Diagnosis) -> None:
    style.dress(axes, "Convergence to the prior", "nats per coordinate")
    times = _array(diagnosis.times)
    gap, distance = _array(diagnosis.prior_gap), _array(diagnosis.distance)
    style.linear_time(axes, times)
    axes.set_yscale("log")
    lines = [Line(times, gap, "prior gap  E KL(q(y|x) ‖ π)", COLOURS[0])]
    lowest = gap.min()
    if distance.max() > FLOOR:
        lines.append(Line(times, distance, "distance  KL(q(y) ‖ π)", COLOURS[1]))
        lowest = min(lowest, distance.min())
    else:
        axes.text(
            0.03,
            0.05,
            "distance  KL(q(y) ‖ π) = 0 at all times",
            transform=axes.transAxes,
            color=COLOURS[1],
            fontsize=9.5,
        )
    axes.set_ylim(max(FLOOR, lowest / 30), max(10.0, gap.max() * 3))
    style.draw(axes, lines)


def _memory(axes: Axes, diagnosis: Diagnosis) -> None:
    style.dress(axes, "Memory of the start", "‖Φ‖ in the prior's metric")
    times, memory = _array(diagnosis.times), _array(diagnosis.memory)
    style.linear_time(axes, times)
    axes.set_yscale("log")
    axes.set_ylim(max(FLOOR, min(1e-3, memory.min() / 2)), 2)
    level = Line(times, np.full_like(times, FORGOTTEN), f"{100 * FORGOTTEN:g} %", QUIET, width=0.8)
    style.draw(axes, [level, Line(times, memory, "", COLOURS[0])])


def _auxiliary(axes: Axes, diagnosis: Diagnosis) -> None:
    style.dress(axes, "Auxiliary information I(x; v)", "nats per coordinate")
    times, information = _array(diagnosis.times), _array(diagnosis.auxiliary_information)
    style.linear_time(axes, times)
    axes.set_ylim(0, max(1e-3, 1.12 * information.max()))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    style.draw(axes, [Line(times, information, "", COLOURS[2])])


def _condition(axes: Axes, diagnosis: Diagnosis) -> None:
    style.dress(axes, "Condition number of L", "given x")
    times, condition = _array(diagnosis.times), _array(diagnosis.condition)
    style.log_time(axes, times)
    axes.set_yscale("log")
    axes.set_ylim(0.7, max(30.0, 3 * condition[np.isfinite(condition)].max(initial=1.0)))
    style.draw(axes, [Line(times, condition, "", COLOURS[3])])


def _array(tensor: Tensor) -> Curve:
    return np.asarray(tensor.detach().cpu().numpy(), dtype=np.float64)


def _time(value: float | None) -> str:
    return "—" if value is None else f"s = {value:.2g}"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.3g}"
