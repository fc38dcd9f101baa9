"""What a pilot finds stays true: its expectation has the mean it says, and nothing is lost by it.

An evaluation takes what the pilot expects at a time from what a draw finds there. That is free of
bias if the mean over places is known exactly, whatever was expected, and it is of use if what is
left of the spread over examples is their own.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ornstein
from ornstein import Information, LogSNR, Tweedie, pilot
from tests.analytic.test_evaluate import gaussian, normals
from tests.analytic.test_histogram import LEVELS, drawn, law, model_of

F64 = torch.float64


def fitted(seed: int) -> pilot.Fitted:
    """Any levels, slopes and variances, some of them zero, with a bin that nobody has seen."""
    random = torch.Generator().manual_seed(seed)
    found = {
        name: torch.randn(pilot.BINS, dtype=F64, generator=random)
        for name in ("second", "level", "slope")
    }
    found["second"] = found["second"].clamp(min=0) ** 3
    found["seen"] = torch.ones(pilot.BINS, dtype=F64).index_fill(0, torch.tensor([seed]), 0.0)
    found |= {"edges": torch.zeros(0, dtype=F64), "parts": torch.zeros(1, dtype=F64)}
    return pilot.Fitted(LogSNR(), found, torch.device("cpu"))


def cells(times: pilot.Fitted) -> tuple[Tensor, Tensor]:
    """Two places in each cell, which integrate a line exactly, and their weights."""
    edges = torch.cat([torch.zeros(1, dtype=F64), times.density().cumsum(0)]) / times.bins
    width = edges.diff()
    inside = torch.tensor([0.5 - 1 / math.sqrt(12), 0.5 + 1 / math.sqrt(12)], dtype=F64)
    return (edges[:-1, None] + width[:, None] * inside).flatten(), (width / 2).repeat_interleave(2)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_expected_has_the_mean_it_says(seed: int) -> None:
    times = fitted(seed)
    u, weight = cells(times)
    assert (weight @ times.excess(u)).item() == pytest.approx(0, abs=1e-12)
    place = (torch.arange(64 * pilot.BINS, dtype=F64) + 0.5) / (64 * pilot.BINS)
    assert times.line(place).mean().item() == pytest.approx(times.mean)


def test_lines_are_found() -> None:
    """Losses on a line in each bin: the line, up to its caution, and next to no variance."""
    u = (torch.arange(4096, dtype=F64) + 0.5) / 4096
    at = (u * pilot.BINS).long()
    found = pilot._lines(u, 3 + at + 2 * (u * pilot.BINS - at - 0.5))
    count = 4096 / pilot.BINS
    assert torch.allclose(found["level"], 3 + torch.arange(pilot.BINS, dtype=F64))
    assert torch.allclose(found["slope"], torch.full_like(found["slope"], 2 * count / (count + 4)))
    assert found["second"].max() < 0.01
    # places that were never seen are expected to be like the others, and looked at like the largest
    few = pilot._lines(u[:1], u[:1] + 5)
    assert few["seen"].sum() == 1 and bool((few["level"] == u[0] + 5).all())
    assert bool((few["slope"] == 0).all()) and bool(few["second"].isfinite().all())


def test_losses_that_are_no_numbers_tell_nothing() -> None:
    u = (torch.arange(4096, dtype=F64) + 0.5) / 4096
    found = pilot._lines(u, 3 + u)
    bad = torch.tensor([math.inf, -math.inf, math.nan], dtype=F64)
    again = pilot._lines(torch.cat([u[:3], u]), torch.cat([bad, 3 + u]))
    assert all(torch.equal(found[key], again[key]) for key in found)
    none = pilot._lines(u[:3], bad)
    assert all(bool(none[key].isfinite().all()) for key in none) and none["seen"].sum() == 0


@pytest.mark.parametrize(("count", "draws"), [(1, 4), (1, 16), (3, 4), (4, 1)])
def test_few_examples_are_not_biased(count: int, draws: int) -> None:
    """The pilot's places have nothing to do with those of the evaluation, not even their turn."""
    x, model = normals(count, 2), gaussian()
    exact = ornstein.evaluate(model, x, draws=8192, times=Information(), quiet=True)
    found = [ornstein.evaluate(model, x, draws=draws, seed=s, quiet=True) for s in range(200)]
    bits = torch.tensor([one.bits_per_dim for one in found], dtype=F64)
    away = bits.mean().item() - exact.bits_per_dim
    assert abs(away) < 3 * bits.std().item() / math.sqrt(len(bits))


def nothing(places: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Expect nothing, and look everywhere."""
    one = torch.ones(pilot.BINS, dtype=F64)
    return {"second": one, "seen": one, "level": 0 * one, "slope": 0 * one}


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
@pytest.mark.parametrize("name", ["vpsde", "cld", "alda"])
def test_the_standard_error_is_of_examples_and_noise_alone(
    name: str, parametrisation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Independent pixels, dequantised: the integral begins at a millionth of a bin, where times
    differ much and examples not at all. What is left are log P(x) of the examples, and the draws.
    """
    x = drawn(1000, 4)
    model, exact = model_of(getattr(ornstein, name)(), parametrisation), -law()[x].log2().mean(1)
    found = ornstein.evaluate(model, x, draws=4, likelihood=Tweedie(LEVELS), quiet=True)
    monkeypatch.setattr(pilot, "_lines", nothing)
    even = ornstein.evaluate(model, x, draws=4, likelihood=Tweedie(LEVELS), quiet=True)
    least = exact.std().item() / math.sqrt(len(x))
    assert found.standard_error == pytest.approx(math.hypot(least, found.draw_error), rel=0.1)
    assert even.standard_error > 1.2 * found.standard_error
    assert abs(found.bits_per_dim - even.bits_per_dim) < 3 * math.hypot(
        found.draw_error, even.draw_error
    )
