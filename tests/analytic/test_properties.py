"""Properties that hold for every Q, D, S and rate, over inputs that hypothesis looks for."""

from __future__ import annotations

import math

import numpy as np
import scipy.linalg
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ornstein import Constant, Cosine, Diffusion, Linear, Schedule

F64 = torch.float64

# derandomised: the same examples on every machine; no deadline: machines differ
steady = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Floats of a range."""
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


rates = st.one_of(
    st.builds(Constant, numbers(0.1, 10.0)),
    st.builds(Linear, numbers(0.05, 5.0), numbers(0.05, 20.0)),
    st.builds(Cosine, numbers(0.5, 10.0), numbers(0.005, 0.2)),
)


@st.composite
def processes(draw: st.DrawFn, one_clock: bool = False) -> Diffusion:
    """A process of up to five variables: full or diagonal D of full rank, S full or the identity.

    S and D keep their smallest eigenvalues above 0.05, so that what the tests compare is
    well-conditioned; hypoelliptic processes have their own tests against multiprecision.
    """
    K = draw(st.integers(1, 5))

    def matrix() -> np.ndarray:
        return draw(arrays(np.float64, (K, K), elements=numbers(-1.0, 1.0)))

    raw, root = matrix(), matrix()
    Q = raw - raw.T
    if draw(st.booleans()):
        D = root @ root.T + 0.05 * np.eye(K)
    else:
        D = np.diag(np.abs(np.diagonal(root)) + 0.05)
    S = np.eye(K)
    if draw(st.booleans()):
        lower = matrix()
        S = lower @ lower.T + 0.2 * np.eye(K)
    first: Schedule = draw(rates)
    second: Schedule = first if one_clock or draw(st.booleans()) else draw(rates)
    coupling = draw(numbers(-1.0, 1.0)) if K > 1 else None
    return Diffusion(
        Q,
        (D + D.T) / 2,
        (S + S.T) / 2,
        rate_q=first,
        rate_d=second,
        v0_variance=draw(numbers(0.01, 1.0)),
        v0_coupling=coupling,
    )


def size(matrix: torch.Tensor) -> float:
    """The largest entry."""
    return float(matrix.abs().max())


@steady
@given(processes(), numbers(0.01, 0.45), numbers(0.5, 1.0))
def test_semigroup(process: Diffusion, s: float, t: float) -> None:
    """Φ(t,0) = Φ(t,s)Φ(s,0) and Chapman–Kolmogorov for Σ, given x."""
    first = process.transition(s)
    second = process.transition(t, "state", start=s)
    whole = process.transition(t)
    product = second.propagator @ first.propagator
    scale = size(second.propagator) * size(first.propagator)
    # rounding, times the stiffness (at most about 300 here)
    assert size(product - whole.propagator) <= 1e-11 * scale
    covariance = second.propagator @ first.covariance @ second.propagator.mT + second.covariance
    assert size(covariance - whole.covariance) <= 1e-11 * max(size(whole.covariance), 1.0)


@steady
@given(processes(), numbers(0.02, 0.9))
def test_log_determinant_identity(process: Diffusion, s: float) -> None:
    """d/ds log|Σ| = 2 tr A + tr(Σ⁻¹GGᵀ), the slope by autograd."""
    time = torch.tensor(s, dtype=F64, requires_grad=True)
    kernel = process.transition(time)
    (slope,) = torch.autograd.grad(kernel.logdet, time)
    with torch.no_grad():
        noise = torch.linalg.cholesky(process.diffusion(s))
        white = torch.linalg.solve_triangular(kernel.cholesky, noise, upper=False)
        trace = 2 * float(process.drift(s).trace())
    gain = float(white.square().sum())
    # the two parts cancel near the prior: 1e-9 of their size
    assert abs(float(slope) - trace - gain) <= 1e-9 * (abs(trace) + gain)


@steady
@given(processes())
def test_signal_to_noise_falls(process: Diffusion) -> None:
    """Noise added never tells more about x: SNR decreases, by −aᵀL⁻¹GGᵀL⁻ᵀa."""
    s = torch.linspace(0.01, 0.97, 17, dtype=F64, requires_grad=True)
    kernel = process.transition(s)
    snr = kernel.snr
    # once it has fallen by fifteen decades it is rounding: compare above that
    seen = snr.detach() > 1e-13 * float(snr.detach().max())
    later = snr.detach()[1:] < snr.detach()[:-1]
    assert bool((later | ~seen[1:]).all())
    (slope,) = torch.autograd.grad(snr.sum(), s)
    with torch.no_grad():
        a = kernel.signal.unsqueeze(-1)
        back = torch.linalg.solve_triangular(kernel.cholesky.mT, a, upper=True)  # L⁻ᵀa
        expected = -(back.mT @ process.diffusion(s) @ back)[:, 0, 0]
    assert torch.allclose(slope[seen], expected[seen], rtol=1e-6, atol=0.0)


@steady
@given(processes(), numbers(0.001, 1.0))
def test_prior_is_invariant(process: Diffusion, s: float) -> None:
    """N(0, S⁻¹) stays itself, at any time and for any pair of rates."""
    prior = process.prior_covariance
    kernel = process.transition(s, "state")
    after = kernel.propagator @ prior @ kernel.propagator.mT + kernel.covariance
    assert size(after - prior) <= 1e-11 * size(prior)


@steady
@given(processes(one_clock=True), numbers(0.01, 1.0))
def test_one_clock_is_an_exponential(process: Diffusion, s: float) -> None:
    """Φ = exp(−τ(Q + D)S), scipy's exponential (torch's own is off by 8e-12 for small matrices)."""
    tau = float(process.rate_d.integral(torch.tensor(s, dtype=F64)))
    generator = -tau * ((process.Q + process.D) @ process.S).numpy()
    gap = process.transition(s).propagator.numpy() - scipy.linalg.expm(generator)
    # both round each squaring: ε times the stiffness, and Φ of size one at most √cond S ≈ 10
    assert np.abs(gap).max() <= 1e-14 * (1 + np.linalg.norm(generator)) * 10


@steady
@given(processes(), numbers(0.05, 1.0), numbers(0.1, 10.0))
def test_units_of_the_variables_do_not_matter(process: Diffusion, s: float, unit: float) -> None:
    """Measuring the auxiliary variables in another unit u: L becomes diag(1, u, …)·L."""
    K = process.n_vars
    c = torch.ones(K, dtype=F64)
    c[1:] = unit
    other = Diffusion(
        c[:, None] * process.Q * c,
        c[:, None] * process.D * c,
        process.S / c[:, None] / c,
        rate_q=process.rate_q,
        rate_d=process.rate_d,
        v0_variance=(unit**2) * (process.auxiliary.root @ process.auxiliary.root.mT),
    )
    ours, theirs = process.transition(s), other.transition(s)
    assert torch.allclose(theirs.cholesky, c[:, None] * ours.cholesky, rtol=1e-9, atol=1e-12 * unit)
    assert math.isclose(
        float(theirs.logdet),
        float(ours.logdet) + 2 * (K - 1) * math.log(unit),
        rel_tol=1e-9,
        abs_tol=1e-10,
    )
