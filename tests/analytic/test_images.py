"""Pictures of samples: every pixel is where it should be and has the grey that it should have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ornstein import viz
from ornstein.viz.images import GAP


def read(path: Path) -> np.ndarray:
    """A PNG as (H, W, 3)."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


# ---------------------------------------------------------------- grids


def test_seventeen_levels() -> None:
    x = torch.arange(17).reshape(17, 1, 1, 1)
    shown = viz.grid(x, levels=17, columns=17, gap=0, scale=1)
    expected = [0, 16, 32, 48, 64, 80, 96, 112, 128, 143, 159, 175, 191, 207, 223, 239, 255]
    assert shown.shape == (1, 17, 3)
    assert shown.dtype == np.uint8
    for channel in range(3):
        assert shown[0, :, channel].tolist() == expected


@settings(max_examples=60, deadline=None)
@given(levels=st.integers(2, 65_536), part=st.floats(0, 1))
def test_every_level_is_the_nearest_grey(levels: int, part: float) -> None:
    k = round(part * (levels - 1))
    x = np.full((1, 1, 1, 1), k, dtype=np.int64)
    grey = int(viz.grid(x, levels, gap=0, scale=1)[0, 0, 0])
    assert abs(2 * (levels - 1) * grey - 2 * 255 * k) <= levels - 1  # in whole numbers: exact


def test_256_levels_are_the_pixels_themselves() -> None:
    x = torch.randint(256, (1, 3, 5, 7), dtype=torch.uint8)
    shown = viz.grid(x, gap=0, scale=1)
    assert np.array_equal(shown, x[0].permute(1, 2, 0).numpy())


def test_places_and_gaps() -> None:
    """Five images of 2 × 3 in rows of two, enlarged three times, with gaps of four pixels."""
    x = torch.randint(256, (5, 3, 2, 3), dtype=torch.uint8)
    shown = viz.grid(x, columns=2, gap=4, scale=3)
    assert shown.shape == (3 * (6 + 4) + 4, 2 * (9 + 4) + 4, 3)
    seen = np.zeros(shown.shape[:2], dtype=bool)
    for i in range(5):
        for row in range(6):
            for column in range(9):
                y, z = 4 + (i // 2) * 10 + row, 4 + (i % 2) * 13 + column
                assert shown[y, z].tolist() == x[i, :, row // 3, column // 3].tolist()
                seen[y, z] = True
    assert (shown[~seen] == GAP).all()  # the gaps, and the empty last place


@pytest.mark.parametrize(
    "shape, scale", [((8, 8), 6), ((28, 28), 2), ((32, 32), 2), ((48, 20), 1), ((64, 64), 1)]
)
def test_small_images_are_enlarged(shape: tuple[int, int], scale: int) -> None:
    shown = viz.grid(torch.zeros(1, 1, *shape, dtype=torch.uint8), gap=0)
    assert shown.shape == (shape[0] * scale, shape[1] * scale, 3)


@pytest.mark.parametrize("channels, kept", [(1, [0, 0, 0]), (2, [0, 0, 0]), (4, [0, 1, 2])])
def test_channels(channels: int, kept: list[int]) -> None:
    x = torch.randint(256, (1, channels, 4, 4), dtype=torch.uint8)
    shown = viz.grid(x, gap=0, scale=1)
    assert np.array_equal(shown, x[0, kept].permute(1, 2, 0).numpy())


def test_truth_values_are_black_and_white() -> None:
    x = torch.tensor([[[[True, False]]]])
    assert viz.grid(x, 2, gap=0, scale=1)[0, :, 0].tolist() == [255, 0]


def test_a_grid_is_about_square() -> None:
    x = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    assert viz.grid(x).shape == (8 * 49 + 1, 8 * 49 + 1, 3)


@pytest.mark.parametrize(
    "x, options, message",
    [
        (torch.zeros(4, 8, 8).byte(), {}, r"expected \(N, C, H, W\)"),
        (torch.zeros(0, 1, 8, 8).byte(), {}, "at least one"),
        (torch.rand(1, 1, 2, 2), {}, "expected whole numbers"),
        (torch.full((1, 1, 2, 2), 17), {"levels": 17}, "expected 0 to 16"),
        (torch.full((1, 1, 2, 2), -1), {}, "from -1 to -1"),
        (torch.zeros(1, 1, 2, 2).byte(), {"levels": 1}, "levels=1"),
        (torch.zeros(1, 1, 2, 2).byte(), {"scale": 0}, "scale=0"),
        (torch.zeros(1, 1, 2, 2).byte(), {"columns": 1.5}, "columns=1.5"),
        (torch.zeros(1, 1, 2, 2).byte(), {"gap": -1}, "gap=-1"),
    ],
)
def test_mistakes_are_explained(x: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        viz.grid(x, **options)


# ---------------------------------------------------------------- files


def test_a_png_is_read_back_as_it_was(tmp_path: Path) -> None:
    array = viz.grid(torch.randint(17, (12, 3, 8, 8)), levels=17)
    path = viz.save_image(array, tmp_path / "new" / "grid.png")
    assert np.array_equal(read(path), array)
    assert [file.name for file in path.parent.iterdir()] == ["grid.png"]


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    for array in (np.zeros((4, 4)), np.zeros((4, 4, 2), np.uint8), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match=r"expected \(H, W, 3\)"):
            viz.save_image(array, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_picture_of_images(tmp_path: Path) -> None:
    x = torch.randint(17, (10, 1, 8, 8))
    path = viz.picture(x, 17, tmp_path / "x.png", data=torch.zeros(3, 1, 8, 8))
    assert np.array_equal(read(path), viz.grid(x, 17))


def test_picture_of_real_valued_images(tmp_path: Path) -> None:
    """Their 1 % and 99 % quantiles become black and white, what lies between is linear."""
    x = torch.linspace(-3, 5, 101).reshape(1, 1, 1, 101)
    shown = read(viz.picture(x, None, tmp_path / "x.png"))
    values = np.linspace(-3, 5, 101).clip(-3 + 0.08, 5 - 0.08)
    expected = np.round(255 * (values + 2.92) / 7.84)
    assert np.abs(shown[1, 1:102, 0].astype(int) - expected).max() <= 1  # float32 data


# ---------------------------------------------------------------- vectors


def test_scatter_shows_the_points() -> None:
    data, samples = torch.randn(300, 2), torch.randn(200, 2)
    figure = viz.scatter(samples, data)
    left, right = figure.axes
    for axes, points, title in ((left, data[:200], "data"), (right, samples, "samples")):
        assert axes.get_title(loc="left") == title
        drawn = np.asarray(axes.collections[0].get_offsets())
        assert np.array_equal(drawn, points.double().numpy())
    assert left.get_xlim() == right.get_xlim()
    assert left.get_ylim() == right.get_ylim()


def test_points_outside_the_frame_are_counted() -> None:
    data = torch.rand(500, 2)
    samples = torch.cat([torch.rand(40, 2), torch.full((3, 2), 50.0)])
    words = [text.get_text() for text in viz.scatter(samples, data).axes[1].texts]
    assert words == ["43 points, 3 outside"]


def test_one_coordinate_is_a_histogram() -> None:
    x = torch.randn(2000, 1)
    (axes,) = viz.scatter(x).axes
    area = sum(bar.get_height() * bar.get_width() for bar in axes.patches)
    assert area == pytest.approx(1.0, abs=1e-9)


def test_picture_of_vectors(tmp_path: Path) -> None:
    for d in (1, 2, 5):
        path = viz.picture(torch.randn(50, d), None, tmp_path / f"{d}.png", torch.randn(0, d))
        assert read(path).std() > 5  # something is drawn


def test_scatter_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(ValueError, match="expected vectors"):
        viz.scatter(torch.randn(3))
    with pytest.raises(ValueError, match="3 coordinates and data 2"):
        viz.scatter(torch.randn(3, 3), torch.randn(3, 2))
