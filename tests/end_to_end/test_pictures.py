"""What is on the pages: few enough lines and names to read, axes that end where sense does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ornstein
from ornstein import viz
from ornstein.viz import style
from ornstein.viz.bits import PARTS


def panel(figure: Figure, title: str) -> Axes:
    """The axes under a title."""
    return next(axes for axes in figure.axes if title in axes.get_title(loc="left"))


def labels(axes: Axes) -> list[str]:
    """The words inside a panel, its unit aside."""
    return [text.get_text() for text in axes.texts if text.get_path_effects()]


@pytest.mark.parametrize("n_aux", [4, 9, 20])
def test_many_variables_stay_readable(n_aux: int) -> None:
    figure = viz.page(ornstein.diagnose(ornstein.learned(n_aux)))
    for axes in figure.axes:
        assert len(labels(axes)) <= 8
        assert len(set(labels(axes))) == len(labels(axes))
    propagator = panel(figure, "Propagator")
    assert len(propagator.lines) == 2 * (n_aux + 1) - 1 + 1  # Φ's column, its diagonal, and zero
    assert "z←z" in labels(propagator)


def test_the_largest_responses_have_the_names() -> None:
    diagnosis = ornstein.diagnose(ornstein.learned(12))
    size = diagnosis.propagator[:, 1:, 0].abs().amax(0)
    subscripts = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
    largest = (size.argsort(descending=True)[:7] + 1).tolist()
    expected = {"z←z", *(f"v{str(i).translate(subscripts)}←z" for i in largest)}
    assert set(labels(panel(viz.page(diagnosis), "Propagator"))) == expected


def test_no_two_lines_of_the_propagator_look_alike() -> None:
    axes = panel(viz.page(ornstein.diagnose(ornstein.learned(3))), "Propagator")
    looks = [(line.get_color(), str(line._dash_pattern)) for line in axes.lines]
    assert len(looks) == 17  # sixteen entries and the line at zero
    assert len(set(looks)) == 17


def test_axes_end_where_sense_does() -> None:
    figure = viz.page(ornstein.diagnose(ornstein.cld(rate=ornstein.Linear(30.0, 300.0))))
    assert -140 < panel(figure, "Signal-to-noise").get_ylim()[0] <= -120
    memory = panel(figure, "Memory")
    assert memory.get_ylim()[0] >= 1e-16
    (level,) = [text for text in memory.texts if text.get_text() == "1 %"]
    assert level.get_window_extent().y1 < memory.bbox.y1  # below the title


def test_a_condition_beyond_float64_is_drawn(tmp_path: Path) -> None:
    diagnosis = ornstein.diagnose(ornstein.cld())
    steep = replace(diagnosis, condition=torch.logspace(30, 0, len(diagnosis.times)).double())
    for figure in (viz.page(steep), viz.overview([diagnosis, steep])):
        viz.save(figure, tmp_path / "steep.png")
        low, high = panel(figure, "Condition").get_ylim()
        assert low < 1
        assert 1e30 < high < 1e32
        ticks = panel(figure, "Condition").get_yticks()
        assert np.count_nonzero((ticks > low) & (ticks < high)) < 20


def test_processes_of_one_name_are_told_apart() -> None:
    pair = [ornstein.diagnose(ornstein.cld(mass=mass)) for mass in (0.25, 1.0)]
    assert labels(panel(viz.overview(pair), "Distance")) == ["cld (1)", "cld (2)"]


def test_no_two_processes_share_a_colour() -> None:
    """Known ones keep their own; others have what is left, as long as there is any."""
    known = style.PROCESSES
    assert len(set(known.values())) == len(known) < len(style.COLOURS)
    assert {*ornstein.PRESETS, "learned-1", "learned-2"} == set(known)
    assert style.of_processes([*reversed(known)]) == [*reversed(known.values())]
    names = ["a", "cld", "b", "vpsde", "cld", *"cdefg"]
    found = style.of_processes(names)
    assert (found[1], found[3]) == (known["cld"], known["vpsde"])
    assert len(set(found)) == len(names) == len(style.COLOURS)
    assert set(style.of_processes([str(i) for i in range(40)])) == set(style.COLOURS)
    first, second = style.of_processes(["cld (1)", "cld (2)"])
    assert first == known["cld"] != second


def test_the_overview_has_each_process_in_its_colour() -> None:
    names = ("malda", "vpsde", "alda", "cld")
    figure = viz.overview([ornstein.diagnose(ornstein.PRESETS[name]()) for name in names])
    for axes in figure.axes:
        found = {t.get_text(): t.get_color() for t in axes.texts if t.get_path_effects()}
        assert found and found == {name: style.PROCESSES[name] for name in found}


# ---------------------------------------------------------------- evaluations


def evaluated(count: int, draws: int) -> ornstein.Evaluation:
    """Gaussian data and its own answer."""

    class Zero(torch.nn.Module):
        def forward(self, x: torch.Tensor, logsnr: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x)

    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    model = ornstein.ScoreModel(Zero(), ornstein.cld(), ornstein.Continuous())
    return ornstein.evaluate(model, x, draws=draws, quiet=True)


@pytest.mark.parametrize("count, draws", [(32, 8), (1, 1)])
def test_bits_show_the_curve_and_the_parts(count: int, draws: int, tmp_path: Path) -> None:
    """The area under the curve is the diffusion; also where errors are not known."""
    result = evaluated(count, draws)
    figure = viz.bits({"zero": result, "again": result})
    (line, _) = panel(figure, "Denoising error").lines
    widths = result.curve.logsnr.diff().numpy()
    assert float(np.sum(line.get_ydata() * widths)) == pytest.approx(result.diffusion, rel=1e-6)
    words = [text.get_text() for text in panel(figure, "Parts").texts]
    assert any(f"zero:  {result.bits_per_dim:.3f}" in text for text in words)
    key = panel(figure, "Parts").get_xlabel()
    seen = {part for part in PARTS if getattr(result, part) > 0.002 * result.bits_per_dim}
    assert {part for part in PARTS if part in key} == seen
    assert viz.save(figure, tmp_path / "bits.png").stat().st_size > 10_000


def test_no_evaluation_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="expected one or more"):
        viz.bits({})
