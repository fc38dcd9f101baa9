"""The stream of training examples: every epoch a permutation, however it is cut."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from ornstein.data import Stream

IMAGES = torch.arange(7 * 3 * 2 * 4, dtype=torch.uint8).reshape(7, 3, 2, 4)


def orders(seed: int, total: int, epochs: int) -> Tensor:
    """Which example is shown when: (epochs, total)."""
    return Stream(torch.arange(total), seed).take(0, epochs * total).reshape(epochs, total)


@pytest.mark.parametrize("total", [1, 2, 17, 1000])
def test_every_epoch_shows_each_example_once(total: int) -> None:
    found = orders(3, total, 5)
    assert (found.sort(1).values == torch.arange(total)).all()
    if total == 1000:  # the chance that two of them are equal is 1/1000!
        assert len({tuple(row.tolist()) for row in found}) == 5


@given(st.integers(1, 30), st.integers(0, 100), st.lists(st.integers(0, 70), max_size=6))
@settings(max_examples=60, deadline=None)
def test_it_does_not_matter_how_it_is_cut(total: int, first: int, counts: list[int]) -> None:
    x = torch.arange(total)
    whole = Stream(x, 5).take(0, first + sum(counts))[first:]
    other, parts = Stream(x, 5), []
    for count in counts:
        parts.append(other.take(first, count))
        first += count
    assert torch.equal(torch.cat([x[:0], *parts]), whole)


def test_positions_in_any_order() -> None:
    stream = Stream(torch.arange(11), 1)
    forward = [stream.take(p, 1).item() for p in range(100)]
    back = [stream.take(p, 1).item() for p in reversed(range(100))]
    assert forward == back[::-1]


def test_the_order_never_changes() -> None:
    # a run that is resumed by another version must go on with the same examples
    assert orders(0, 10, 2).tolist() == [
        [0, 7, 5, 3, 9, 6, 4, 1, 2, 8],
        [2, 9, 4, 5, 6, 3, 7, 1, 0, 8],
    ]
    assert not torch.equal(orders(0, 50, 1), orders(1, 50, 1))


def test_all_orders_are_equally_likely() -> None:
    # 24 permutations of 4, over 6000 epochs; and each with the one before it
    places = torch.tensor([64, 16, 4, 1])
    found = (orders(8, 4, 6000) * places).sum(1)
    counts = torch.unique(found, return_counts=True)[1].double()
    assert len(counts) == 24
    assert ((counts - 250).square() / 250).sum() < chi2.ppf(1 - 1e-6, 23)
    first = orders(8, 4, 6000)[:, 0]
    pairs = torch.bincount(4 * first[:-1] + first[1:], minlength=16).double()
    mean = 5999 / 16
    assert ((pairs - mean).square() / mean).sum() < chi2.ppf(1 - 1e-6, 15)


def test_examples_come_as_they_are() -> None:
    x = torch.randn(9, 2)
    stream = Stream(x, 4)
    shown = Stream(torch.arange(9), 4).take(5, 30)
    assert torch.equal(stream.take(5, 30), x[shown])
    assert Stream(IMAGES, 4).take(0, 3).dtype == torch.uint8
    assert stream.take(12, 0).shape == (0, 2)
    assert len(stream) == 9
    assert stream.epoch(0) == 0 and stream.epoch(9) == 1 and stream.epoch(12) == 12 / 9


def test_flips_are_mirrors_by_a_fair_coin() -> None:
    count = 10_000
    plain, flipped = Stream(IMAGES, 2), Stream(IMAGES, 2, flips=True)
    before, after = plain.take(0, count), flipped.take(0, count)
    same = (after == before).flatten(1).all(1)
    mirrored = (after == before.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert abs(mirrored.double().mean() - 0.5) < 5 * 0.5 / count**0.5
    shown = Stream(torch.arange(7), 2).take(0, count)
    for example in range(7):  # of each example by itself, and in every place of the epoch
        assert abs(mirrored[shown == example].double().mean() - 0.5) < 5 * 0.5 / 1400**0.5
        assert abs(mirrored[example::7].double().mean() - 0.5) < 5 * 0.5 / 1400**0.5
    parts = [flipped.take(p, 13) for p in range(0, 130, 13)]
    assert torch.equal(torch.cat(parts), after[:130])
    other = Stream(IMAGES, 3, flips=True).take(0, count)
    assert not torch.equal(other, after)


def test_where_the_data_is_does_not_matter(tmp_path: Path) -> None:
    x = torch.randint(0, 256, (50, 4, 4, 3), dtype=torch.uint8)
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c")).permute(0, 3, 1, 2)
    here = x.permute(0, 3, 1, 2).contiguous()
    wanted = Stream(here, 6, flips=True).take(30, 90)
    for stream in (
        Stream(here, 6, flips=True, resident=0),
        Stream(here, 6, flips=True, resident=here.numel()),
        Stream(here, 6, flips=True, resident=here.numel() - 1),
        Stream(mapped, 6, flips=True),
    ):
        assert torch.equal(stream.take(30, 90), wanted)


def test_memory_does_not_grow() -> None:
    stream = Stream(torch.arange(100), 0)

    def held() -> int:
        gc.collect()
        return sum(o.numel() for o in gc.get_objects() if type(o) is Tensor)

    stream.take(0, 1000)
    before = held()
    for epoch in range(10, 300):
        stream.take(100 * epoch + 50, 100)
    assert held() <= before


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"take\(-1, 4\); expected"):
        Stream(IMAGES, 0).take(-1, 4)
    with pytest.raises(ValueError, match=r"flips=True .* \(5, 2\); expected images"):
        Stream(torch.zeros(5, 2), 0, flips=True)
    with pytest.raises(ValueError, match=r"of shape \(0, 2\); expected"):
        Stream(torch.zeros(0, 2), 0)
    with pytest.raises(ValueError, match=r"seed=0\.5; expected a whole number"):
        Stream(IMAGES, 0.5)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [0, 2**30])
def test_on_a_gpu(resident: int) -> None:
    x = torch.randint(0, 256, (1000, 3, 8, 8), dtype=torch.uint8)
    wanted = Stream(x, 9, flips=True).take(700, 2500)
    stream = Stream(x, 9, "cuda", flips=True, resident=resident)
    assert stream.resident == (resident > 0)
    stream.take(0, 8)
    torch.cuda.set_sync_debug_mode("error")  # nothing waits for the device
    try:
        found = [stream.take(first, 100) for first in range(700, 3200, 100)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(part.is_cuda for part in found)
    assert torch.equal(torch.cat(found).cpu(), wanted)
