"""Thousands of random processes, from the time where x is known to 1e-4 up to the last: none fails.

Each has up to five variables, full or diagonal noise (some of it zero), a stiffness τ‖A‖ between
1 and 100, one clock or two. Given x, its kernel must exist, be finite, have a positive diagonal,
and agree with the long-time formula Σ = S⁻¹ + Φ(Σ₀ − S⁻¹)Φᵀ, which is exact at all times and
loses only absolute digits at short ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from ornstein import Constant, Cosine, Diffusion, Linear, Schedule
from tests.families import Drawn, draw

STANDARD_ERROR = 1e-4  # of x given y_s, at the first time
# Σ and the formula are both sums of products of size ‖S⁻¹‖, rounded some hundred times, after up
# to 100 units of stiffness; the columns that stand for the noise of a panel are cut at 4e-12.
TOLERANCE = 1e-11


@dataclass
class Tally:
    """What was seen."""

    processes: int = 0
    kernels: int = 0
    worst: float = 0.0
    first: float = 1.0  # the earliest time that was asked for
    failures: list[str] = field(default_factory=list)


def random_rate(rng: np.random.Generator) -> Schedule:
    """A rate whose clock ends near ten."""
    kind = rng.integers(3)
    if kind == 0:
        return Constant(float(rng.uniform(5.0, 15.0)))
    if kind == 1:
        return Linear(float(rng.uniform(0.05, 2.0)), float(rng.uniform(10.0, 25.0)))
    return Cosine(float(rng.uniform(5.0, 10.0)))


def random_process(rng: np.random.Generator, index: int) -> Diffusion:
    """The index decides the kind, the generator everything else."""
    K = 1 + index % 5
    noise = "full" if index % 2 else "diagonal"
    drawn = draw(rng, K, noise, bool(rng.integers(2)), stiffness=float(10 ** rng.uniform(0, 2)))
    if noise == "diagonal" and K > 1 and rng.integers(2):
        kept = rng.integers(2, size=K)
        kept[rng.integers(K)] = 1  # noise in one variable at least reaches all of them through Q
        drawn = Drawn(drawn.Q, drawn.D * kept, drawn.S)
    first = random_rate(rng)
    second = first if index % 4 < 2 else random_rate(rng)
    variance = float(10 ** rng.uniform(-2, 0))
    return drawn.process(rate_q=first, rate_d=second, v0_variance=variance)


def first_time(process: Diffusion) -> float:
    """Where the standard error of x is 1e-4, from above, to a tenth of a decade."""

    def known_better(s: float) -> bool:
        return float(process.transition(s).snr) ** -0.5 < STANDARD_ERROR

    for decade in range(1, 16):
        if known_better(10.0**-decade):
            break
    low, high = -float(decade), 1.0 - decade
    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (middle, high) if known_better(10**middle) else (low, middle)
    return 10**high


def visit(count: int, seed: int) -> Tally:
    """Build and check that many."""
    tally = Tally()
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        try:
            process = random_process(rng, index)
            start = first_time(process)
            s = torch.logspace(np.log10(start), 0, 8, dtype=torch.float64).clamp(max=1.0)
            kernel = process.transition(s)
        except Exception as error:  # every kind is a failure here, and is reported with its index
            tally.failures.append(f"{index}: {type(error).__name__}: {error}")
            continue
        tally.processes += 1
        tally.kernels += len(s)
        tally.first = min(tally.first, start)
        L, Phi, prior = kernel.cholesky, kernel.propagator, process.prior_covariance
        if not bool(torch.isfinite(L).all() and torch.isfinite(Phi).all()):
            tally.failures.append(f"{index}: not finite")
            continue
        if not bool((L.diagonal(dim1=-2, dim2=-1) > 0).all()):
            tally.failures.append(f"{index}: a diagonal entry is not positive")
        initial = process.auxiliary.factor() @ process.auxiliary.factor().mT
        formula = prior + Phi @ (initial - prior) @ Phi.mT
        gap = float((kernel.covariance - formula).abs().max() / prior.abs().max())
        tally.worst = max(tally.worst, gap)
        if not gap <= TOLERANCE:
            tally.failures.append(f"{index}: off the long-time formula by {gap:.1e}")
    return tally


def test_three_hundred_processes() -> None:
    tally = visit(300, seed=70)
    assert not tally.failures, "\n".join(tally.failures[:10])
    assert tally.processes == 300 and tally.first < 1e-4


PARTS = [
    pytest.param(part, marks=pytest.mark.slow if part < 1 else pytest.mark.long)
    for part in range(10)
]


@pytest.mark.parametrize("part", PARTS)
def test_ten_thousand_processes(part: int) -> None:
    tally = visit(1000, seed=71 + part)
    assert not tally.failures, "\n".join(tally.failures[:10])
    assert tally.processes == 1000
