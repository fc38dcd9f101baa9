"""A learned clock may run far past the point where nothing is left of the data.

At log SNR −103 the variance that the data still explains is less than the smallest float32, and at
−470 the third power of its noise is more than the largest float64. Both ends count for nothing, in
the bound and in its gradient: what float32 says about the process must be what float64 says.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ornstein
from ornstein.networks import MLP
from ornstein.process import Process

F64 = torch.float64
LEVELS, DIMS, BATCH = 16, 4, 64


def far(turning: float, n_aux: int, fast: float = 26.5) -> Process:
    """A process of two clocks, x's much the faster; all else hears of x by so little."""
    process = ornstein.learned(n_aux=n_aux)
    with torch.no_grad():
        roots = torch.tensor([fast] + [4.0] * n_aux, dtype=F64).sqrt()
        process.make_D.raw.copy_(roots)
        process.make_Q.raw.zero_()
        process.make_Q.raw[0, 1] = turning
    process.replan()
    return process


def model(process: Process, parametrisation: Any, known: bool, kind: torch.dtype) -> Any:
    torch.manual_seed(0)
    likelihood = ornstein.Discrete(LEVELS)
    x = torch.randint(LEVELS, (500, DIMS), generator=torch.Generator().manual_seed(1)).byte()
    mean, std = likelihood.moments(x)
    joint = parametrisation == "joint"
    features = 4 if known else 0  # waves of one bin and of two, and a histogram
    network = MLP((DIMS,), process.n_vars if joint else None, features=features, width=16, depth=2)
    with torch.no_grad():
        for p in network.parameters():  # the last layer begins at zero
            p.add_(0.1 * torch.randn(p.shape))
    return ornstein.ScoreModel(
        network.to(kind),
        copy.deepcopy(process),
        likelihood,
        parametrisation,
        data_mean=mean,
        data_std=std,
        features="bins" if known else None,
        features_of="x" if joint and known else "z",
        histogram=likelihood.histogram(x) if known else None,
    ), x[:BATCH]


def gradient(process: Process, parametrisation: Any, known: bool, kind: torch.dtype) -> Tensor:
    """Of the bound, in all parameters of the process, over a few batches."""
    made, x = model(process, parametrisation, known, kind)
    for seed in range(4):
        ornstein.elbo(made, x, draws=4, random=seed).bits_per_dim.mean().backward()
    found = [p.grad for p in made.process.parameters() if p.grad is not None]
    return torch.cat([g.flatten() for g in found])


@pytest.mark.parametrize("known", [False, True], ids=["gaussian", "histogram and waves"])
@pytest.mark.parametrize("n_aux", [1, 2])
@pytest.mark.parametrize("turning", [1e-2, 1e-5, 1e-9, 1e-12])
def test_float32_says_what_float64_says(turning: float, n_aux: int, known: bool) -> None:
    process = far(turning, n_aux)
    assert process.transition(1.0).logsnr < -90
    one, two = (gradient(process, "joint", known, kind) for kind in (torch.float32, F64))
    assert bool(one.isfinite().all())
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4 * two.norm().item())


def test_a_channel_model_too() -> None:
    process = far(0.0, 1)
    assert process.transition(1.0).logsnr < -500
    one, two = (gradient(process, "channel", True, kind) for kind in (torch.float32, F64))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4 * two.norm().item())


@pytest.mark.parametrize("fast", [5.0, 26.5, 60.0, 100.0])
def test_the_view_of_x_has_unit_length_and_a_gradient(fast: float) -> None:
    """â is a unit vector and σ = 1/‖a‖ wherever float64 has a; beyond, x is gone."""
    process = far(0.0, 1, fast)
    kernel = process.transition(torch.tensor([1e-3, 0.1, 0.5, 1.0], dtype=F64))
    view = ornstein.answers.View.of(kernel)
    there = kernel.signal[:, 0] > 1e-150
    ones = torch.linalg.vector_norm(view.direction, dim=-1)
    torch.testing.assert_close(ones[there], torch.ones_like(ones[there]), rtol=1e-15, atol=0)
    torch.testing.assert_close(view.sigma[there], 1 / kernel.signal[there, 0], rtol=1e-14, atol=0)
    view.sigma.clamp(max=1e30).sum().backward(retain_graph=True)
    view.direction.sum().backward(retain_graph=True)
    view.logsnr.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in process.parameters())


def test_a_clock_that_is_not_a_number_gives_a_kernel_that_is_none() -> None:
    """An index can't be NaN: on a GPU it would end the whole program."""
    process = far(1e-2, 1)
    solution = process._build()
    clock = torch.tensor([math.nan, 1.0, math.nan], dtype=F64)
    for wanted in (True, False):
        with torch.set_grad_enabled(wanted):
            solved = solution.at(clock, None)
        assert solved.propagator.isnan().flatten(1).all(1).tolist() == [True, False, True]
        assert solved.cholesky.isnan().flatten(1).any(1).tolist() == [True, False, True]
