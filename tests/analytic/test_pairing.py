"""Figures compared example by example, against the library's own pairing and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ornstein
from ornstein import Discrete, ScoreModel
from ornstein.networks import MLP
from ornstein.reproduce import pairing


def evaluated(folder: Path, name: str, seed: int, count: int = 12) -> ornstein.Evaluation:
    """A model that knows nothing, whose rows are kept as `ornstein evaluate` does."""
    torch.manual_seed(seed)
    model = ScoreModel(MLP((3,), width=8), ornstein.cld(), Discrete(8), data_std=0.5)
    for p in model.network.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randint(8, (count, 3), generator=torch.Generator().manual_seed(0))
    found = ornstein.evaluate(
        model, x, draws=2, target_error=1e-9, max_draws=6, folder=folder / name, quiet=True
    )
    found.save(folder / f"{name}.json")
    return found


def test_it_is_the_paired_difference(tmp_path: Path) -> None:
    """Of several passes; the error is that of the difference, not of its two sides."""
    one, other = evaluated(tmp_path, "one", 1), evaluated(tmp_path, "other", 2)
    assert one.draws == 6  # three passes
    found = pairing.difference(
        *(pairing.read(tmp_path / f"{name}.json") for name in ("one", "other"))
    )
    assert found is not None
    apart, error = one.difference(other)
    assert apart != 0
    assert found["difference"] == pytest.approx(apart, abs=1e-12)
    assert found["standard_error"] == pytest.approx(error, rel=1e-12)
    assert found["examples"] == 12


def test_what_can_not_be_paired(tmp_path: Path) -> None:
    """Rows that are elsewhere, and other examples."""
    evaluated(tmp_path, "one", 1)
    evaluated(tmp_path, "fewer", 1, count=11)
    one, fewer = (pairing.read(tmp_path / f"{name}.json") for name in ("one", "fewer"))
    assert one is not None and fewer is not None
    assert pairing.read(tmp_path / "missing.json") is None
    assert pairing.difference(one, None) is None
    assert pairing.difference(one, fewer) is None
    other = pairing.Bits(one.bits, one.marks[::-1].copy())
    assert pairing.difference(one, other) is None


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-0.00353, 0.00042, "−0.00353 ± 0.00042"),
        (0.0101, 0.0099, "+0.0101 ± 0.0099"),
        (1.26, 0.3, "+1.26 ± 0.30"),
        (12.3, 4.0, "+12.3 ± 4.0"),
        (-0.00002, 0.0019, "+0.0000 ± 0.0019"),
        (0.0, 0.0, "0"),
    ],
)
def test_two_digits_of_the_error(value: float, error: float, text: str) -> None:
    assert pairing.shown({"difference": value, "standard_error": error}) == text


def test_one_example_has_no_error() -> None:
    one, other = (pairing.Bits(np.array([v]), np.array([7])) for v in (1.5, 1.25))
    found = pairing.difference(one, other)
    assert found == {"difference": 0.25, "standard_error": None, "examples": 1}
    assert pairing.shown(found) == "+0.2500" and pairing.shown(None) == ""


def test_figures_alone() -> None:
    """The same examples by the data's fingerprint, and the error of both draws."""
    base = {"examples": 9, "split": "test", "data": {"fingerprint": "ab"}}
    one = {**base, "bits_per_dim": 1.5, "draw_error": 0.03}
    other = {**base, "bits_per_dim": 1.25, "draw_error": 0.04}
    found = pairing.difference_of_figures(one, other)
    assert found is not None
    assert found == {"difference": 0.25, "draw_error": pytest.approx(0.05), "examples": 9}
    assert pairing.shown(found) == "+0.250 ± 0.050 (draws)"
    itself = pairing.difference_of_figures(one, dict(one))
    assert itself is not None and pairing.shown(itself) == "0"
    unknown = pairing.difference_of_figures({**one, "draw_error": None}, other)
    assert unknown is not None and pairing.shown(unknown) == "+0.2500"
    for change in ({"examples": 8}, {"split": "valid"}, {"data": {"fingerprint": "cd"}}):
        assert pairing.difference_of_figures(one, {**other, **change}) is None
    for data in (None, {}):  # it is not known which they were
        assert pairing.difference_of_figures({**one, "data": data}, {**other, "data": data}) is None
