"""Where the bits go: the parts of an evaluation, and its diffusion over log SNR."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ornstein.evaluation import Evaluation
from ornstein.viz import style
from ornstein.viz.style import COLOURS, INK, QUIET, Line

SIZE = 10.5
PARTS = ("prior", "diffusion", "reconstruction")
SHADES = {"prior": 0.95, "diffusion": 0.55, "reconstruction": 0.25}
WORDS = ("dark", "middle", "light")
SEEN = 0.002  # of the longest bar: a part that is shorter has no name


def bits(evaluations: Mapping[str, Evaluation], title: str = "") -> Figure:
    """Left: bits/dim per unit of log SNR, with their errors. Right: the parts, and their sum."""
    if not evaluations:
        raise ValueError("bits was given no evaluation; expected one or more, by name.")
    figure = style.blank(12.0, 4.6)
    curve, parts = figure.subplots(1, 2, width_ratios=[1.7, 1.0])
    figure.subplots_adjust(left=0.05, right=0.985, bottom=0.12, top=0.79, wspace=0.16)
    title = title or "Where the bits are lost"
    figure.text(0.018, 0.935, title, fontsize=15, weight="bold", color=INK, va="center")
    _curves(curve, evaluations)
    _parts(parts, evaluations)
    return figure


def _curves(axes: Axes, evaluations: Mapping[str, Evaluation]) -> None:
    style.dress(axes, "Denoising error over log SNR", "bits/dim per unit of log SNR", SIZE)
    lines, ends = [], []
    for i, (name, evaluation) in enumerate(evaluations.items()):
        curve = evaluation.curve
        edges = curve.logsnr.numpy()
        width = np.diff(edges)
        height, error = curve.bits.numpy() / width, curve.errors.numpy() / width
        middle = (edges[1:] + edges[:-1]) / 2
        colour = COLOURS[i % len(COLOURS)]
        known = np.isfinite(error)
        band = (height - error)[known], (height + error)[known]
        axes.fill_between(middle[known], *band, color=colour, alpha=0.2, linewidth=0)
        lines.append(Line(middle, height, name, colour, style.SOLID, 2.0))
        seen = middle[np.cumsum(np.abs(height)) > 1e-3 * np.abs(height).sum()]
        ends.append((float(seen[0]) - 1 if len(seen) else edges[0], float(edges[-1])))
    axes.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))
    top = max(float(line.y.max()) for line in lines)
    axes.set_ylim(min(0.0, *(float(line.y.min()) for line in lines)), 1.12 * max(top, 1e-9))
    axes.set_xlabel("log SNR: noise …  data", fontsize=SIZE - 1, color=QUIET, loc="right")
    style.draw(axes, lines, SIZE)


def _parts(axes: Axes, evaluations: Mapping[str, Evaluation], words: Sequence[str] = WORDS) -> None:
    style.dress(axes, "Parts of the bound", "bits/dim ± standard error", SIZE)
    widest, bars = 0.0, []
    for i, (name, evaluation) in enumerate(evaluations.items()):
        row, left = -i, 0.0
        for part in PARTS:
            value = max(float(getattr(evaluation, part)), 0.0)
            axes.barh(row, value, 0.5, left, color=COLOURS[i % len(COLOURS)], alpha=SHADES[part])
            bars.append((part, value))
            left += value
        widest = max(widest, left)
        error = evaluation.standard_error
        total = f"{evaluation.bits_per_dim:.3f}" + (f" ± {error:.3f}" if error > 0 else "")
        axes.text(0, row + 0.3, f"{name}:  {total}", fontsize=SIZE - 1, color=INK, va="bottom")
    axes.set_ylim(-len(evaluations) + 0.4, 0.9)
    axes.set_xlim(0, 1.05 * widest if math.isfinite(widest) and widest > 0 else 1.0)
    axes.set_yticks([])
    key = named_parts(bars, widest, words)
    axes.set_xlabel(key, fontsize=SIZE - 1, color=QUIET, loc="right")


def named_parts(
    bars: Sequence[tuple[str, float]], longest: float, words: Sequence[str] = WORDS
) -> str:
    """Which shade is which part, of the parts that can be seen: (part, length) of each bar."""
    seen = [p for p in PARTS if any(p == q and abs(v) >= SEEN * longest > 0 for q, v in bars)]
    if len(seen) < 2:
        return "".join(seen)
    shades = words if len(seen) == len(PARTS) else (words[0], words[-1])
    return ",  ".join(f"{shade}: {part}" for shade, part in zip(shades, seen, strict=True))
