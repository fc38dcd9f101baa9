"""Results at a glance: bits per dimension with errors on the left, samples on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ornstein.evaluation import Evaluation
from ornstein.viz import style
from ornstein.viz.images import grid
from ornstein.viz.style import COLOURS, INK, QUIET

SIZE = 10.5


def gallery(
    groups: Mapping[str, Sequence[tuple[str, Evaluation]]],
    samples: Mapping[str, Tensor],
    levels: int,
    title: str,
    below: str = "",
) -> Figure:
    """Evaluations in groups, each of a colour, and a picture of samples for every name given."""
    figure = style.blank(12.0, 5.2)
    columns = max(1, len(samples))
    ratios = [1.5, *[1.0] * columns]
    axes = figure.subplots(1, 1 + columns, width_ratios=ratios, squeeze=False)[0]
    figure.subplots_adjust(left=0.105, right=0.985, bottom=0.16, top=0.79, wspace=0.08)
    figure.text(0.018, 0.935, title, fontsize=15, weight="bold", color=INK, va="center")
    figure.text(0.018, 0.045, below, fontsize=SIZE - 1, color=QUIET, va="center")
    _dots(axes[0], groups)
    for box, (name, images) in zip(axes[1:], samples.items(), strict=False):
        box.imshow(grid(images[:30], levels, columns=5, gap=6), interpolation="nearest")
        box.set_title(name, loc="left", fontsize=SIZE, color=INK, weight="bold", pad=7)
        box.set_axis_off()
    for box in axes[1 + len(samples) :]:
        box.set_axis_off()
    return figure


def _dots(axes: Axes, groups: Mapping[str, Sequence[tuple[str, Evaluation]]]) -> None:
    """One line for every evaluation."""
    style.dress(axes, "Bits per dimension", "± standard error", SIZE)
    row, ticks, names = 0.0, [], []
    for i, (group, found) in enumerate(groups.items()):
        axes.text(
            0.0, row - 0.8, group, fontsize=SIZE - 1, color=COLOURS[i], weight="bold",
            transform=axes.get_yaxis_transform(), va="center",
        )  # fmt: skip
        for name, evaluation in found:
            value, error = evaluation.bits_per_dim, evaluation.standard_error
            axes.errorbar(value, row, xerr=error, fmt="o", color=COLOURS[i], capsize=3, ms=5)
            axes.annotate(
                f"{value:.3f}", (value, row), (0, 6), textcoords="offset points",
                fontsize=SIZE - 2, color=INK, ha="center",
            )  # fmt: skip
            ticks.append(row)
            names.append(name)
            row += 1.0
        row += 1.0
    axes.set_yticks(ticks, names, fontsize=SIZE, color=INK)
    axes.set_ylim(row - 1.4, -1.4)
    axes.margins(x=0.18)
