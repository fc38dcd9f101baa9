"""All processes side by side: what each keeps of the data, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ornstein.diagnostics import Diagnosis
from ornstein.viz import style
from ornstein.viz.style import INK, QUIET, Line
from ornstein.viz.summary import numbered

SIZE = 11.0


def overview(diagnoses: Sequence[Diagnosis], title: str = "") -> Figure:
    """Signal-to-noise, distance to the prior, use of the auxiliary variables, conditioning."""
    if not diagnoses:
        raise ValueError("overview was given no diagnosis; expected one or more.")
    names = numbered([diagnosis.name for diagnosis in diagnoses])
    diagnoses = [replace(d, name=name) for d, name in zip(diagnoses, names, strict=True)]
    figure = style.blank(12.0, 9.0)
    (snr, distance), (information, condition) = figure.subplots(2, 2)
    figure.subplots_adjust(
        left=0.05, right=0.985, bottom=0.055, top=0.885, wspace=0.13, hspace=0.27
    )
    title = title or f"{len(diagnoses)} diffusions through their exact transition kernels"
    figure.text(0.018, 0.967, title, fontsize=17, weight="bold", color=INK, va="center")
    key = "solid: with auxiliary variables,  dashed: the data alone"
    figure.text(0.985, 0.965, key, fontsize=SIZE, color=QUIET, va="center", ha="right")

    style.dress(snr, "Signal-to-noise about x", "dB", SIZE)
    decibels = [style.decibel(d.snr.cpu().numpy()) for d in diagnoses]
    snr.set_ylim(-60, min(140.0, max(10.0, *(curve.max() for curve in decibels))))
    snr.axhline(0, color=QUIET, linewidth=0.8)
    _draw(snr, diagnoses, decibels)

    style.dress(distance, "Distance to the prior", "KL(q(yₛ) ‖ π), nats per coordinate", SIZE)
    distance.set_yscale("log")
    distance.set_ylim(1e-12, 30)
    _draw(distance, diagnoses, [d.distance.cpu().numpy() for d in diagnoses], linear=True)

    several = [d for d in diagnoses if d.n_vars > 1]
    style.dress(information, "Auxiliary information", "I(x; vₛ), nats per coordinate", SIZE)
    most = max([1e-3, *(float(d.auxiliary_information.max()) for d in several)])
    information.set_ylim(0, 1.12 * most)
    used = [d.auxiliary_information.cpu().numpy() for d in diagnoses]
    _draw(information, diagnoses, used, several, linear=True)

    style.dress(condition, "Condition number of L", "given x", SIZE)
    condition.set_yscale("log")
    worst = max([100.0, *(float(d.condition.max()) for d in several)])
    condition.set_ylim(0.6, 4 * worst)
    _draw(condition, diagnoses, [d.condition.cpu().numpy() for d in diagnoses], several)

    for axes in (information, condition):
        axes.set_xlabel("time s", fontsize=SIZE - 1, color=QUIET, loc="right", labelpad=1)
    return figure


def _draw(
    axes: Axes,
    diagnoses: Sequence[Diagnosis],
    values: Sequence[style.Curve],
    shown: Sequence[Diagnosis] | None = None,
    linear: bool = False,
) -> None:
    """One line per process, each always in its own colour."""
    times = [d.times.cpu().numpy() for d in diagnoses]
    longest = max(times, key=lambda t: float(t[-1]))
    (style.linear_time if linear else style.log_time)(axes, longest)
    colours = style.of_processes([d.name for d in diagnoses])
    lines = []
    for i, diagnosis in enumerate(diagnoses):
        if shown is not None and not any(diagnosis is d for d in shown):
            continue
        dash = style.DASHED if diagnosis.n_vars == 1 else style.SOLID
        lines.append(Line(times[i], values[i], diagnosis.name, colours[i], dash, 2.0))
    style.draw(axes, lines, SIZE)
