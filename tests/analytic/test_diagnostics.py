"""The figures of a process before it is used, against explicit Gaussians."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

import ornstein
from ornstein import Constant, Diffusion, Process
from ornstein.diagnostics import auxiliary_information, diagnose, prior_gap
from tests.conformance.zoo import ZOO

F64 = torch.float64
NAMES = ["vpsde", "vesde", "cld", "malda", "learned-2-full", "coupled-v0", "full-S", "linear-sde"]
TURN = [[0.0, -1.0], [1.0, 0.0]]


@pytest.fixture(params=NAMES)
def process(request: pytest.FixtureRequest) -> Process:
    """Some of the zoo."""
    return ZOO[request.param]()


def times_of(process: Process) -> torch.Tensor:
    """Times at which every covariance is well-conditioned."""
    return process.horizon * torch.tensor([0.05, 0.2, 0.6, 1.0], dtype=F64)


def normal(mean: torch.Tensor, covariance: torch.Tensor) -> MultivariateNormal:
    """A Gaussian of K variables."""
    return MultivariateNormal(mean, covariance_matrix=covariance)


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (0.7, 0.3), (0.0, 0.0)])
def test_prior_gap(process: Process, mean: float, variance: float) -> None:
    """E_x KL(q(y_s|x) ‖ π): a quadratic in x, so that two values of x give its mean exactly."""
    found = diagnose(process, variance, mean, times_of(process))
    prior = normal(torch.zeros(process.n_vars, dtype=F64), process.prior_covariance)
    for i, s in enumerate(times_of(process)):
        kernel = process.transition(s)
        covariance, response = kernel.covariance.detach(), kernel.response.detach()
        spread = math.sqrt(variance)
        gaps = [
            float(kl_divergence(normal(response * x, covariance), prior))
            for x in (mean - spread, mean + spread)
        ]
        # torch's KL cancels parts of order |log-det|: absolute 1e-12 of those
        assert math.isclose(float(found.prior_gap[i]), sum(gaps) / 2, rel_tol=1e-9, abs_tol=1e-11)
    assert found.final_gap == float(found.prior_gap[-1])


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (0.7, 0.3)])
def test_distance_to_the_prior(process: Process, mean: float, variance: float) -> None:
    """KL of the marginal of y_s for Gaussian data."""
    found = diagnose(process, variance, mean, times_of(process))
    prior = normal(torch.zeros(process.n_vars, dtype=F64), process.prior_covariance)
    for i, s in enumerate(times_of(process)):
        kernel = process.transition(s)
        response = kernel.response.detach()
        covariance = kernel.covariance.detach() + variance * torch.outer(response, response)
        expected = float(kl_divergence(normal(response * mean, covariance), prior))
        assert math.isclose(float(found.distance[i]), expected, rel_tol=1e-9, abs_tol=1e-11)


def test_distance_vanishes_without_cancelling() -> None:
    """VPSDE from N(0, 1 + δ): the marginal variance is 1 + δα, and KL ≈ (δα)²/4, here 1e-13."""
    process = ornstein.vpsde()
    s = torch.tensor([0.5, 1.0], dtype=F64)
    delta = 1e-3
    found = diagnose(process, data_variance=1 + delta, times=s)
    for i, time in enumerate((0.5, 1.0)):
        alpha = math.exp(-time * (0.1 + 9.95 * time))
        expected = 0.5 * (delta * alpha - math.log1p(delta * alpha))
        # the square of a deviation from one: ε/(δα) of it is lost
        assert abs(float(found.distance[i]) - expected) <= 1e-15


def test_signal_to_noise_is_the_precision_of_least_squares(process: Process) -> None:
    """Weighted least squares of x from y = r x + noise: Var x̂ = 1/SNR, by numpy's lstsq."""
    found = diagnose(process, times=times_of(process))
    for i, s in enumerate(times_of(process)):
        kernel = process.transition(s)
        root = np.linalg.cholesky(kernel.covariance.detach().numpy())
        design = np.linalg.solve(root, kernel.response.detach().numpy())[:, None]
        estimator = np.linalg.lstsq(design, np.eye(len(root)), rcond=None)[0]  # white noise to x̂
        variance = float((estimator @ estimator.T)[0, 0])
        assert math.isclose(float(found.snr[i]), 1 / variance, rel_tol=1e-8)


@pytest.mark.parametrize("variance", [1.0, 0.2])
def test_information_in_the_auxiliary_variables(process: Process, variance: float) -> None:
    """I(x; v) = ½ log(|Cov x|·|Cov v|/|Cov (x, v)|) of the joint Gaussian."""
    found = diagnose(process, variance, times=times_of(process)).auxiliary_information
    for i, s in enumerate(times_of(process)):
        kernel = process.transition(s)
        if process.n_vars == 1:
            assert float(found[i]) == 0.0
            continue
        r, noise = kernel.response.detach()[1:], kernel.covariance.detach()[1:, 1:]
        v = noise + variance * torch.outer(r, r)
        top = torch.cat([torch.tensor([variance], dtype=F64), variance * r])
        joint = torch.cat([top[None], torch.cat([variance * r[:, None], v], 1)])
        expected = 0.5 * (math.log(variance) + float(torch.logdet(v)) - float(torch.logdet(joint)))
        assert math.isclose(float(found[i]), expected, rel_tol=1e-8, abs_tol=1e-13)


def test_unused_auxiliary_variables() -> None:
    """A diagonal Q + D never tells v about x; a coupling at the start or a rotation does."""
    still = Diffusion(np.zeros((2, 2)), np.eye(2))
    assert not diagnose(still).uses_auxiliary
    assert diagnose(Diffusion(TURN, np.eye(2))).uses_auxiliary
    assert diagnose(Diffusion(np.zeros((2, 2)), np.eye(2), v0_coupling=0.5)).uses_auxiliary
    assert not diagnose(ornstein.vpsde()).uses_auxiliary
    mixed = Diffusion(np.zeros((2, 2)), [[1.0, 0.5], [0.5, 1.0]])  # through D alone
    assert diagnose(mixed).uses_auxiliary


def test_memory(process: Process) -> None:
    """The largest part of a start that is left, in units of the prior: a singular value."""
    found = diagnose(process, times=times_of(process))
    values, vectors = torch.linalg.eigh(process.prior_covariance)
    root = vectors @ torch.diag(values.sqrt()) @ vectors.mT  # symmetric: same singular values
    for i, s in enumerate(times_of(process)):
        Phi = process.transition(s).propagator.detach()
        expected = torch.linalg.svdvals(torch.linalg.inv(root) @ Phi @ root)[0]
        assert math.isclose(float(found.memory[i]), float(expected), rel_tol=1e-10)


def test_memory_of_a_stationary_process_falls() -> None:
    """‖Φ(t,s)‖ ≤ 1 in the prior's metric, whatever Q does."""
    for name in ("cld-underdamped", "alda", "full-S", "cosine-against-linear"):
        memory = diagnose(ZOO[name]()).memory
        assert float(memory.max()) <= 1 + 1e-14
        assert bool((memory.diff() <= 1e-14).all())


def test_condition(process: Process) -> None:
    found = diagnose(process, times=times_of(process))
    for i, s in enumerate(times_of(process)):
        values = torch.linalg.svdvals(process.transition(s).cholesky.detach())
        assert math.isclose(float(found.condition[i]), float(values[0] / values[-1]), rel_tol=1e-9)


def test_curves_are_those_of_the_kernel(process: Process) -> None:
    """And the default grid runs to the end of the horizon."""
    found = diagnose(process)
    assert float(found.times[-1]) == process.horizon
    assert 0 < float(found.times[0]) <= 1.01e-5 * process.horizon
    assert bool((found.times.diff() >= 0).all())
    kernel = process.transition(found.times)
    assert torch.equal(found.propagator, kernel.propagator.detach())
    assert torch.equal(found.covariance, kernel.covariance.detach())
    assert not found.snr.requires_grad


def test_times_read_off_the_curves() -> None:
    """VPSDE with a constant rate: SNR = 1/(e^τ − 1), memory e^(−τ/2)."""
    process = ornstein.vpsde(rate=Constant(12.0))
    found = diagnose(process, times=torch.linspace(1e-4, 1, 20001, dtype=F64))
    step = 5e-5  # of the grid, between whose points both are found
    noisy = math.log1p(0.1**2) / 12  # the standard error √(e^τ − 1) is 0.1
    assert abs((found.time_of_noise(0.1) or 0.0) - noisy) <= step
    forgotten = 2 * math.log(100) / 12
    assert abs((found.forgotten_at(0.01) or 0.0) - forgotten) <= step
    assert found.forgotten_at(1e-9) is None
    assert found.time_of_noise(1e9) is None


def test_stationary_law() -> None:
    """Slowest rates by hand: VPSDE ½; critically damped CLD 1/√M, ALDA √(3/L)."""
    cases = {
        "vpsde": (ornstein.vpsde(), 0.5),
        "cld": (ornstein.cld(mass=0.25), 2.0),
        "alda": (ornstein.alda(L=1.0), math.sqrt(3.0)),
        "turning": (Diffusion(TURN, 0.3 * np.eye(2)), 0.3),
    }
    for name, (process, rate) in cases.items():
        found = diagnose(process)
        assert found.stationary is True and found.commutes is True
        # a double or triple eigenvalue is only known to ε^(1/2) or ε^(1/3)
        assert math.isclose(found.slowest_rate or 0.0, rate, rel_tol=2e-5), name
    assert diagnose(ZOO["cosine-against-linear"]()).commutes is False
    general = diagnose(ornstein.vesde())
    assert general.stationary is None and general.commutes is None
    assert general.slowest_rate is None


def test_defaults_are_critical() -> None:
    """The constants of ALDA and MALDA: equal decay of all modes, and no choice decays faster."""
    for name, spread in (("alda", 1e-4), ("malda", 1e-7)):  # ε^(1/3) for a triple eigenvalue
        process = ornstein.PRESETS[name]()
        values = torch.linalg.eigvals((process.Q + process.D) @ process.S).real
        assert float(values.max() - values.min()) <= spread * float(values.mean())


def test_parts_can_be_called_alone() -> None:
    """prior_gap and auxiliary_information on a kernel of any shape of times."""
    process = ornstein.cld()
    s = torch.rand(2, 3, dtype=F64)
    prior = torch.linalg.cholesky(process.prior_covariance)
    kernel, flat = process.transition(s), process.transition(s.flatten())
    assert torch.allclose(prior_gap(kernel, prior, 1.0).flatten(), prior_gap(flat, prior, 1.0))
    assert torch.allclose(
        auxiliary_information(kernel, 1.0).flatten(), auxiliary_information(flat, 1.0)
    )
