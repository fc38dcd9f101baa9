"""Grids: that they fall, that they are what they say, and how one's own times are given.

"curvature" promises the local error of a first-order step. Here that error is found from its
definition: the step y ↦ r_t x̂ + R_t R_s⁻¹(y − r_s x̂), x̂ = ς²rᵀC⁻¹y, against the exact flow of
Gaussian data, both as matrices (`turned_flow` of `test_solvers`), for a short step h. Its root mean
square over y_s, in units of C_t, is h² times a number, whose mean square over all widths ς of data
is the fourth power of `curvature`, divided by 16: the step's error is ½h²·½GGᵀΣ⁻¹r x̂'.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ornstein
from ornstein import FixedTime, NoiseLevel, Process, ScoreModel
from ornstein.sampling import (
    GRIDS,
    Ancestral,
    EulerMaruyama,
    Exponential,
    Heun,
    PredictorCorrector,
    Splitting,
    grid_times,
    sample,
)
from ornstein.sampling.grids import FLOOR, SPREADS, curvature
from tests.analytic.test_bound_gaussian import made
from tests.analytic.test_sampling import NAMES, SPREAD, Elementwise, gaussian, pixels_model
from tests.analytic.test_solvers import (
    carried,
    flow_map,
    from_prior,
    model_for,
    process_of,
    turned_flow,
)
from tests.test_errors import message, says

F64 = torch.float64
SOLVERS = [Ancestral, EulerMaruyama, Exponential, Heun, PredictorCorrector, Splitting]


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    """Nothing here is differentiated."""
    with torch.no_grad():
        yield


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", NAMES)
def test_grids(name: str, grid: Any) -> None:
    """From exactly T to exactly ε; even in what they say they are even in."""
    process = made(name)
    model = gaussian(process)
    for steps in (1, 2, 37):
        times = grid_times(model, steps, grid)
        assert times.shape == (steps + 1,)
        assert bool((times.diff() < 0).all())
        assert float(times[0]) == process.horizon
        assert torch.equal(times[-1], model.truncation.time(process))
    logsnr = process.transition(times).logsnr
    known = torch.nn.functional.softplus(logsnr + 2 * math.log(SPREAD))
    shares = [share(v) for v in (logsnr, known, times, times.sqrt())]
    if grid == "information":  # by a table of 256 nodes
        assert float((0.2 * shares[0] + 0.8 * shares[1] - 1 / 37).abs().max()) <= 2e-4
    elif grid != "curvature":
        even = shares[{"logsnr": 0, "uniform": 2, "quadratic": 3}[grid]]
        assert float((even - 1 / 37).abs().max()) <= 1e-10


def share(values: Tensor) -> Tensor:
    """Of each step in the whole."""
    return values.diff() / (values[-1] - values[0])


def test_rules_in_closed_form() -> None:
    """VPSDE: λ = −log(e^{τ} − 1), τ = 0.1 s + 9.95 s²."""
    model = gaussian(made("vpsde"), truncation=FixedTime(1e-3))
    part = torch.arange(11, dtype=F64) / 10
    ends = [math.sqrt(1.0), math.sqrt(1e-3)]
    expected = {
        "uniform": 1 - part * (1 - 1e-3),
        "quadratic": (ends[0] + part * (ends[1] - ends[0])) ** 2,
    }
    first, last = (-math.log(math.expm1(0.1 * s + 9.95 * s**2)) for s in (1.0, 1e-3))
    tau = torch.log1p((-(first + part * (last - first))).exp())
    expected["logsnr"] = ((0.01 + 4 * 9.95 * tau).sqrt() - 0.1) / (2 * 9.95)
    for grid, times in expected.items():
        found = grid_times(model, 10, grid)  # type: ignore[arg-type]
        assert float((found / times - 1).abs().max()) <= 1e-10


def test_a_grid_that_does_not_fall() -> None:
    model = pixels_model(made("vpsde")).with_truncation(FixedTime(1 - 1e-15))
    says(message(lambda: grid_times(model, 100, "uniform")), "do not all go back", "fewer steps")


# ---------------------------------------------------------------- curvature


def local_error(process: Process, s: float, h: float, spread: float) -> float:
    """The mean square of the error of one step, over h⁴."""
    t = s - h
    late, early = (process.transition(torch.tensor(at, dtype=F64)) for at in (s, t))
    r, r_t = late.response.numpy(), early.response.numpy()
    C, C_t = (
        k.covariance.numpy() + spread**2 * np.outer(k.response.numpy(), k.response.numpy())
        for k in (late, early)
    )
    still = turned_flow(process, s, t, 0.0, 8)  # for x̂ that stands still
    exact = turned_flow(process, s, t, spread, 8)
    gain = spread**2 * np.linalg.solve(C, r)
    step = np.outer(r_t, gain) + still @ (np.eye(len(r)) - np.outer(r, gain))
    off = step - exact
    return float(np.trace(np.linalg.solve(C_t, off @ C @ off.T))) / h**4


@pytest.mark.parametrize("name", ["vpsde", "vesde", "cld", "psld", "alda", "malda", "coupled-3"])
def test_curvature_is_the_local_error(name: str) -> None:
    """The same factor at all times, 1/16; what is linear in h is taken away.

    Much later than σ = 10 the error is nothing but rounding, since nothing is known of x there.
    """
    process = process_of(name)
    levels = torch.tensor([10.0, 4.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05], dtype=F64)
    times = process.time_of_noise(levels)
    found = curvature(process, times, SPREAD)
    # from the least noise of these times to the data's own width
    spreads = np.geomspace(0.05, SPREAD, SPREADS)
    for s, number in zip(times.tolist(), found.tolist(), strict=True):
        one, two = (
            np.mean([local_error(process, s, h * s, spread) for spread in spreads])
            for h in (2e-3, 1e-3)
        )
        ratio = 16 * (2 * two - one) / number**4
        print(f"{name} s = {s:.3g}: {ratio:.5f}")
        assert abs(ratio - 1) <= 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_shares_out_the_curvature(name: str) -> None:
    """Each step has the same part of ∫curvature ds and of λ, by 0.8 and 0.2; on a fine mesh.

    The rule's own table has 257 nodes even in λ. They are far apart in s where λ stands still:
    one step of MALDA has 2 % less than its part there, one of random-15 24 %.
    """
    process = made(name)
    model = gaussian(process, truncation=NoiseLevel(0.01))
    n = 23
    times = grid_times(model, n, "curvature")
    mesh = torch.cat(
        [torch.linspace(a, b, 200, dtype=F64)[:-1] for a, b in pairwise(times)] + [times[-1:]]
    )
    density = curvature(process, mesh, SPREAD)
    mass = ((density[1:] + density[:-1]) / 2 * -mesh.diff()).reshape(n, -1).sum(1)
    parts = (1 - FLOOR) * mass / mass.sum() + FLOOR * share(process.transition(times).logsnr)
    assert float((n * parts - 1).abs().max()) <= (0.25 if name == "random-15" else 0.025)


def test_curvature_is_worth_it() -> None:
    """On the data that it is made for, first-order steps do better than evenly in s."""
    for name in ("vpsde", "cld", "alda"):
        start, exact = from_prior(process_of(name)), flow_map(name)
        error = {
            grid: np.linalg.norm(
                carried(model_for(name), Exponential(40, grid, order=1), start) - exact
            )
            for grid in ("uniform", "curvature")
        }
        assert error["curvature"] < error["uniform"]


# ---------------------------------------------------------------- one's own times

OWN = (1.0, 0.6, 0.25, 0.1, 0.02)


@pytest.mark.parametrize("solver", SOLVERS)
def test_own_times(solver: Any) -> None:
    """A tuple, a list or a tensor; the number of steps is theirs, and so are the looks."""
    for given in (OWN, list(OWN), torch.tensor(OWN, dtype=F64)):
        one = solver(grid=given)
        assert one.steps == 4 and one.grid == OWN and one == solver(steps=99, grid=OWN)
        assert one.evaluations == 4 * one.looks_per_step + 1
        hash(one)
    model = pixels_model(made("cld"))
    assert torch.equal(one.times(model, (2,)), torch.tensor(OWN, dtype=F64))
    network = model.network
    assert isinstance(network, Elementwise)
    sample(model, 1, one, shape=(2,))
    assert len(network.seen) == one.evaluations
    text = message(lambda: one.within(20))
    says(text, "given as 5 times", "'curvature'")


def test_own_times_are_those_of_a_rule() -> None:
    """The same samples, whether the rule is named or its times are given."""
    model = pixels_model(made("alda"))
    times = grid_times(model, 9, "curvature")
    for solver in (Ancestral, Splitting, Heun):
        named = sample(model, 3, solver(9, "curvature"), shape=(2,), raw=True)
        assert torch.equal(named, sample(model, 3, solver(grid=times), shape=(2,), raw=True))


def test_a_horizon_that_is_met_up_to_rounding() -> None:
    model = pixels_model(made("vpsde"))
    times = Ancestral(grid=(1 + 3e-10, 0.5, 0.1)).times(model, (2,))
    assert float(times[0]) == 1.0


@pytest.mark.parametrize(
    "grid",
    [
        (),
        (1.0,),
        (1.0, 0.5, 0.5),
        (1.0, 0.2, 0.5),
        (0.1, 0.5, 1.0),
        (1.0, 0.5, 0.0),
        (1.0, 0.5, -0.1),
        (1.0, math.nan, 0.1),
        (math.nan, 0.5, 0.1),
        (math.inf, 0.5, 0.1),
        (1.0, "0.5", 0.1),
        torch.tensor([1.0, 1.0, 0.5]),
        torch.tensor([[1.0, 0.5], [0.4, 0.3]]),
        torch.tensor(1.0),
        0.5,
        None,
        "even",
    ],
)
def test_times_that_are_none(grid: Any) -> None:
    for solver in SOLVERS:
        text = message(lambda solver=solver: solver(grid=grid))
        says(text, "grid=", "uniform", "curvature", "two or more", "fall from the horizon")


def test_times_from_elsewhere() -> None:
    """They begin at the horizon, where the prior is."""
    for name, grid in (("cld", (0.9, 0.5, 0.1)), ("vpsde", (2.0, 1.0, 0.1))):
        model = pixels_model(made(name))
        for solver in SOLVERS:
            text = message(lambda m=model, s=solver, g=grid: sample(m, 1, s(grid=g), shape=(2,)))
            says(text, f"begins at s = {grid[0]:g}", f"the horizon of '{name}'", "s = 1")
    longer = pixels_model(ornstein.vpsde(rate=5.0, horizon=2.0))
    assert sample(longer, 1, Ancestral(grid=(2.0, 1.0, 0.1)), shape=(2,)).shape == (1, 2)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [0, -3, 2.5, True, None])
def test_steps_that_are_none(solver: Any, steps: Any) -> None:
    says(message(lambda: solver(steps)), f"steps={steps!r}", "whole number ≥ 1")


def test_one_model_with_another_width_has_other_times() -> None:
    """ "information" and "curvature" know how wide the data are; the others don't."""
    process = made("vpsde")
    wide, narrow = (
        ScoreModel(Elementwise(), process, data_std=std, truncation=FixedTime(1e-3))
        for std in (1.0, 0.05)
    )
    for grid in GRIDS:
        same = torch.equal(grid_times(wide, 9, grid), grid_times(narrow, 9, grid))  # type: ignore[arg-type]
        assert same == (grid in ("uniform", "quadratic", "logsnr"))
