"""Pictures of samples: grids of images, scatter plots of vectors.

In a grid level k of n is shown as grey 255 k/(n − 1), rounded, and a pixel as a square of whole
pixels, so that what is seen is what was sampled.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from ornstein.files import write_bytes
from ornstein.viz import style
from ornstein.viz.style import COLOURS, Curve

SMALLEST = 48  # pixels: an image is enlarged until its longer side has as many
GAP = 225  # the grey between images
MOST = 10_000  # points of a scatter plot
BINS = 60

Pixels = NDArray[np.uint8]


def grid(
    x: Tensor | NDArray[Any],
    levels: int = 256,
    columns: int | None = None,
    gap: int = 1,
    scale: int | None = None,
) -> Pixels:
    """Images (N, C, H, W) with values 0 … levels − 1 as one picture, row by row: (H, W, 3) uint8.

    One channel is grey, three are colours; of two the first is shown, of more the first three.
    gap: pixels between the images and around them. scale: by which an image is enlarged, the
    smallest whole number that makes its longer side 48 pixels or more unless it is given.
    """
    images = _array(x)
    _check_grid(images, levels, columns, gap, scale)
    n, channels, height, width = images.shape
    k = np.arange(levels, dtype=np.int64)
    shades = ((2 * 255 * k + levels - 1) // (2 * (levels - 1))).astype(np.uint8)  # halves go up
    shown = shades[(images[:, :3] if channels >= 3 else images[:, :1]).astype(np.intp)]
    shown = np.broadcast_to(shown, (n, 3, height, width)).transpose(0, 2, 3, 1)
    scale = scale or math.ceil(SMALLEST / max(height, width))
    shown = shown.repeat(scale, 1).repeat(scale, 2)  # (N, H, W, 3)
    columns = min(columns or _columns(n), n)
    rows = math.ceil(n / columns)
    down, across = height * scale + gap, width * scale + gap
    canvas = np.full((rows * down + gap, columns * across + gap, 3), GAP, dtype=np.uint8)
    for i, image in enumerate(shown):
        top, left = gap + i // columns * down, gap + i % columns * across
        canvas[top : top + height * scale, left : left + width * scale] = image
    return canvas


def _columns(n: int) -> int:
    """About as many columns as rows, without a gap in the last row where that can be."""
    least = math.ceil(math.sqrt(n))
    return next((c for c in range(least, 2 * least) if n % c == 0), least)


def save_image(array: NDArray[Any], path: str | Path) -> Path:
    """Write (H, W, 3) or (H, W) uint8 as a PNG that is whole or not there."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.shape[2:] or (3,)) != (3,):
        raise ValueError(
            f"an image of shape {array.shape} and type {array.dtype} was given; expected (H, W, 3) "
            "or (H, W) uint8, as viz.grid makes it."
        )
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(array)).save(content, format="PNG", optimize=True)
    target = Path(path)
    write_bytes(target, content.getvalue())
    return target


def as_png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(
        content, format="png", dpi=style.DPI, facecolor="white", metadata={"Software": None}
    )
    return content.getvalue()


def scatter(samples: Tensor | NDArray[Any], data: Tensor | NDArray[Any] | None = None) -> Figure:
    """Vectors by their first two coordinates, or a histogram of a single one; data on the left.

    Both sides have the frame of the data, where there is data, and as many points.
    """
    points = _vectors(samples, "samples")
    sides = [("samples", points, COLOURS[0])]
    if data is not None and len(data):
        real = _vectors(data, "data")[: len(points)]
        if real.shape[1] != points.shape[1]:
            raise ValueError(
                f"samples have {points.shape[1]} coordinates and data {real.shape[1]}; expected "
                "as many in both."
            )
        sides.insert(0, ("data", real, style.INK))
    figure = style.blank(4.3 * len(sides) + 0.3, 4.5)
    cells = figure.subplots(1, len(sides), squeeze=False)[0]
    figure.subplots_adjust(left=0.1 / len(sides) + 0.02, right=0.985, bottom=0.07, top=0.91)
    frame = _frame(sides[0][1])
    for axes, (name, shown, colour) in zip(cells, sides, strict=True):
        style.dress(axes, name, _unit(shown, frame))
        (_histogram if shown.shape[1] == 1 else _points)(axes, shown, frame, colour)
    top = max(axes.get_ylim()[1] for axes in cells)
    if points.shape[1] == 1:
        for axes in cells:
            axes.set_ylim(0, top)
    return figure


def picture(
    samples: Tensor | NDArray[Any],
    levels: int | None,
    path: str | Path,
    data: Tensor | NDArray[Any] | None = None,
) -> Path:
    """Write samples as a PNG: a grid if they are images, else a scatter plot beside the data.

    levels: how many values a pixel can have; None for real numbers, which in images are shown from
    their 1 % to their 99 % quantile. Images are shown without the data.
    """
    array = _array(samples)
    if array.ndim != 4:
        write_bytes(Path(path), as_png(scatter(array, data)))
        return Path(path)
    if levels is not None:
        return save_image(grid(array, levels), path)
    finite = array[np.isfinite(array)]
    low, high = np.quantile(finite, (0.01, 0.99)) if finite.size else (0.0, 1.0)
    part = np.nan_to_num((array - low) / max(high - low, 1e-30), nan=0.0)
    return save_image(grid((255 * part.clip(0, 1)).round().astype(np.uint8)), path)


# ---------------------------------------------------------------- vectors


def _points(axes: Axes, points: Curve, frame: Curve, colour: str) -> None:
    size = float(np.clip(6000 / max(len(points), 1), 1.5, 14))
    axes.scatter(points[:, 0], points[:, 1], s=size, c=colour, alpha=0.5, linewidths=0)
    axes.set_xlim(frame[0, 0], frame[1, 0])
    axes.set_ylim(frame[0, 1], frame[1, 1])
    axes.set_box_aspect(1)


def _histogram(axes: Axes, points: Curve, frame: Curve, colour: str) -> None:
    edges = list(np.linspace(frame[0, 0], frame[1, 0], BINS + 1))
    axes.hist(points[:, 0], edges, density=True, color=colour, alpha=0.6)
    axes.set_xlim(edges[0], edges[-1])


def _frame(points: Curve) -> Curve:
    """Low and high of each coordinate, with a margin: (2, d). A few far points may be outside."""
    if not len(points):
        return np.stack([-np.ones(points.shape[1]), np.ones(points.shape[1])])
    low, high = np.quantile(points, (0.002, 0.998), axis=0)
    margin = 0.12 * (high - low) + 1e-9
    return np.stack([low - margin, high + margin])


def _unit(points: Curve, frame: Curve) -> str:
    """What is not seen is told."""
    seen = points[:, :2]
    outside = int(((seen < frame[0, :2]) | (seen > frame[1, :2])).any(1).sum())
    text = f"{len(points):,} points" + (f", {outside:,} outside" if outside else "")
    if points.shape[1] == 1:
        return f"density, {text}"
    return text + (f", 2 of {points.shape[1]} coordinates" if points.shape[1] > 2 else "")


def _vectors(x: Tensor | NDArray[Any], name: str) -> Curve:
    """(N, d) float64, finite rows only: one that is not can't be drawn."""
    array = _array(x)
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(
            f"{name} of shape {array.shape} can't be drawn as points; expected vectors, (N, d)."
        )
    points = array[:MOST].astype(np.float64)
    return points[np.isfinite(points).all(1)]


# ---------------------------------------------------------------- checks


def _array(x: Any) -> NDArray[Any]:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)


def _check_grid(images: NDArray[Any], levels: Any, columns: Any, gap: Any, scale: Any) -> None:
    counts = {"levels": (levels, 2), "gap": (gap, 0)}
    counts |= {} if columns is None else {"columns": (columns, 1)}
    counts |= {} if scale is None else {"scale": (scale, 1)}
    for name, (value, least) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}; expected a whole number ≥ {least}.")
    if images.ndim != 4 or 0 in images.shape:
        raise ValueError(
            f"images of shape {images.shape} were given; expected (N, C, H, W) with at least one."
        )
    if images.dtype.kind not in "iub":
        raise ValueError(
            f"images of type {images.dtype} were given; expected whole numbers from 0 to "
            f"{levels - 1}. viz.picture draws real numbers."
        )
    low, high = int(images.min()), int(images.max())
    if low < 0 or high >= levels:
        raise ValueError(
            f"images have values from {low} to {high}; expected 0 to {levels - 1} for "
            f"levels={levels}."
        )
