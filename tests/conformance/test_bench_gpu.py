"""`ornstein bench` on a GPU: what is captured is what was written, and a part is measured."""

from __future__ import annotations

import pytest
import torch

from ornstein.bench import bench, captured, race

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)


def test_a_captured_work_is_the_work() -> None:
    """Three calls to warm up, the capture, which computes nothing, and as many replays as calls."""
    count = torch.zeros((), device=GPU)
    work = captured(lambda: count.add_(1), GPU)
    for _ in range(5):
        work()
    assert count.item() == 3 + 5


def test_twice_the_copies_take_twice_as_long() -> None:
    source = torch.zeros(2**28, device=GPU)  # 1 GiB, so that launching does not matter
    target = torch.empty_like(source)

    def once() -> None:
        target.copy_(source)

    def twice() -> None:
        once()
        once()

    found = race({"twice": twice, "once": once}, GPU, rounds=5, budget=0.02)
    assert found.ratio("twice", "once") == pytest.approx(2.0, rel=0.05)


def test_the_kernel_is_measured() -> None:
    part = bench(GPU, ("kernel",), quick=True).parts["kernel"]
    by_hand, copy = part.checks
    assert 0.05 < by_hand.value < 20 and copy.value > 0.5  # nothing is faster than half a copy
