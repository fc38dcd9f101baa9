"""The automatic kernel against formulas derived by hand, the paper's, and scipy's integrator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from mpmath import mp
from scipy.integrate import solve_ivp

import ornstein
from ornstein import Constant, Cosine, Diffusion, Linear, LinearSDE, Process
from ornstein.diagnostics import auxiliary_information
from tests.conformance.zoo import ZOO

TIMES = (1e-5, 1e-3, 0.05, 0.3, 1.0)


def linear_clock(s: float) -> mp.mpf:
    """∫ of Linear(0.1, 20)."""
    return mp.mpf(s) * (mp.mpf(0.1) + (20 - mp.mpf(0.1)) / 2 * mp.mpf(s))


def lower(xx: mp.mpf, xv: mp.mpf, vv: mp.mpf) -> np.ndarray:
    """Cholesky factor of a 2×2 matrix."""
    first = mp.sqrt(xx)
    return np.array([[float(first), 0.0], [float(xv / first), float(mp.sqrt(vv - xv**2 / xx))]])


def assert_equal(process: Process, s: float, given: str, Phi: np.ndarray, L: np.ndarray) -> None:
    """Φ to 1e-12 of its largest entry, entries of L to 1e-10 and 1e-13 of their row."""
    kernel = process.transition(s, given)  # type: ignore[arg-type]
    found = kernel.propagator.numpy()
    assert np.abs(found - Phi).max() <= 1e-12 * np.abs(Phi).max(), s
    size = np.linalg.norm(L, axis=1, keepdims=True)
    diagonal = np.diagonal(kernel.cholesky.numpy())
    assert np.allclose(diagonal, np.diagonal(L), rtol=1e-10, atol=0.0), s
    assert (np.abs(kernel.cholesky.numpy() - L) <= 1e-10 * np.abs(L) + 1e-13 * size).all(), s


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize("mass", [0.25, 1.0, 3.0])
def test_critically_damped_langevin(mass: float, given: str) -> None:
    """With ω = 1/√M the generator is −ω + N, N² = 0, so that its exponential is a line in τ:

    Φ = e^(−ωτ) [[1 + ωτ, ω²τ], [−τ, 1 − ωτ]],     E = e^(−2ωτ), σ₀ = Var v₀,
    Σ_xx = 1 − E(1 + 2ωτ + 2ω²τ² − σ₀ω⁴τ²)
    Σ_xv = E τ (1 + ωτ − (1 − ωτ)(1 − σ₀ω²))
    Σ_vv = M − E(τ² + (M − σ₀)(1 − ωτ)²).
    """
    process = ornstein.cld(mass=mass)
    for s in TIMES:
        with mp.workdps(80):
            tau, omega = linear_clock(s), 1 / mp.sqrt(mp.mpf(mass))
            start = mp.mpf(0.04 * mass) if given == "x" else mp.zero
            decay, E = mp.exp(-omega * tau), mp.exp(-2 * omega * tau)
            plus, minus = 1 + omega * tau, 1 - omega * tau
            Phi = np.array(
                [
                    [float(decay * plus), float(decay * omega**2 * tau)],
                    [float(-decay * tau), float(decay * minus)],
                ]
            )
            xx = 1 - E * (1 + 2 * omega * tau + (2 * omega**2 - start * omega**4) * tau**2)
            xv = E * tau * (plus - minus * (1 - start * omega**2))
            vv = mp.mpf(mass) - E * (tau**2 + (mp.mpf(mass) - start) * minus**2)
            L = lower(xx, xv, vv)
        assert_equal(process, s, given, Phi, L)


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize(("mass", "damping"), [(0.25, 0.3), (0.25, 3.0), (2.0, 1.0), (0.5, 9.0)])
def test_langevin_of_any_damping(mass: float, damping: float, given: str) -> None:
    """With g = Γ/2M and ρ = √(g² − 1/M), real or imaginary: Φ = e^(−gτ)[cosh ρτ + sinh ρτ/ρ·N]."""
    process = ornstein.cld(mass=mass, damping=damping)
    for s in TIMES:
        with mp.workdps(90):
            tau, M = linear_clock(s), mp.mpf(mass)
            g = mp.mpf(damping) / (2 * M)
            rho = mp.sqrt(mp.mpc(g**2 - 1 / M))
            C = mp.re(mp.cosh(rho * tau)) * mp.exp(-g * tau)
            H = mp.re(mp.sinh(rho * tau) / rho) * mp.exp(-g * tau)
            a, b, c, d = C + g * H, H / M, -H, C - g * H  # N = [[g, 1/M], [−1, −g]]
            left = mp.mpf(0.04 * mass if given == "x" else 0.0) - M  # Var v₀ − M
            xx = 1 - a**2 + left * b**2
            xv = -a * c + left * b * d
            vv = M - c**2 + left * d**2
            Phi, L = np.array([[float(a), float(b)], [float(c), float(d)]]), lower(xx, xv, vv)
        assert_equal(process, s, given, Phi, L)


def block_exponential(
    drift: np.ndarray, noise: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The paper's factorisation: (C, H) = exp([[A, GGᵀ], [0, −Aᵀ]]) (Σ₀, 1), Σ = C H⁻¹."""
    K = len(drift)
    block = np.block([[drift, noise], [np.zeros((K, K)), -drift.T]])
    both = scipy.linalg.expm(block) @ np.vstack([start, np.eye(K)])
    return scipy.linalg.expm(drift), both[:K] @ np.linalg.inv(both[K:])


@pytest.mark.parametrize("name", ["vpsde", "cld", "psld", "malda", "learned-2-full", "full-S"])
def test_block_exponential_of_the_paper(name: str) -> None:
    """In a mild regime, τ‖A‖ of order one, where its inverse costs a few digits only."""
    process = ZOO[name]()
    assert isinstance(process, Diffusion)
    start = (process.auxiliary.factor() @ process.auxiliary.factor().mT).detach().numpy()
    Q, D, S = (m.detach().numpy() for m in (process.Q, process.D, process.S))
    for s in (0.1, 0.3):
        tau = float(process.rate_d.integral(torch.tensor(s, dtype=torch.float64)))
        for given, sigma0 in (("x", start), ("state", np.zeros_like(start))):
            Phi, Sigma = block_exponential(-tau * (Q + D) @ S, 2 * tau * D, sigma0)
            kernel = process.transition(s, given)  # type: ignore[arg-type]
            assert np.allclose(kernel.propagator.detach().numpy(), Phi, rtol=0, atol=1e-12)
            assert np.allclose(kernel.covariance.detach().numpy(), Sigma, rtol=0, atol=1e-11)


def test_worked_example_of_the_paper() -> None:
    """Appendix B: a turning process sends x into v; without Q nothing ever arrives there."""
    turning = Diffusion([[0.0, -1.0], [1.0, 0.0]], np.eye(2), rate=Constant(1.0), v0_variance=0.04)
    kernel = turning.transition(0.1)
    exact = math.exp(-0.1) * np.array([math.cos(0.1), -math.sin(0.1)])
    assert np.allclose(kernel.response.numpy(), exact, rtol=1e-14, atol=0)
    assert [round(float(r), 4) for r in kernel.response] == [0.9003, -0.0903]
    mean = kernel.mean(torch.tensor([[2.0]], dtype=torch.float64))
    assert np.allclose(mean.numpy().ravel(), 2 * exact, rtol=1e-14, atol=0)
    # I(x; v) = ½ log(1 + r_v²/Σ_vv), Σ_vv = 1 − e^(−0.2)(1 − 0.04 cos² 0.1) by hand
    variance = 1 - math.exp(-0.2) * (1 - 0.04 * math.cos(0.1) ** 2)
    information = 0.5 * math.log1p(exact[1] ** 2 / variance)
    assert math.isclose(float(auxiliary_information(kernel, 1.0)), information, rel_tol=1e-12)
    assert information > 0.01
    still = Diffusion(np.zeros((2, 2)), np.eye(2), rate=Constant(1.0), v0_variance=0.04)
    for s in (0.01, 0.1, 1.0):
        assert float(auxiliary_information(still.transition(s), 1.0)) == 0.0


def integrate(process: Process, s: float, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Φ and Σ by an adaptive Runge–Kutta method of order eight on Φ′ = AΦ and Lyapunov's ODE."""
    K = process.n_vars

    def slope(r: float, y: np.ndarray) -> np.ndarray:
        drift = process.drift(float(r)).detach().numpy()
        noise = process.diffusion(float(r)).detach().numpy()
        Phi, Sigma = y.reshape(2, K, K)
        flow = drift @ Sigma
        return np.stack([drift @ Phi, flow + flow.T + noise]).ravel()

    y0 = np.stack([np.eye(K), start]).ravel()
    end = solve_ivp(slope, (0.0, s), y0, method="DOP853", rtol=1e-12, atol=1e-14).y[:, -1]
    return end.reshape(2, K, K)[0], end.reshape(2, K, K)[1]


TWO_CLOCKS = {
    "linear-constant": (Linear(0.1, 10.0), Constant(4.0)),
    "constant-linear": (Constant(5.0), Linear(0.1, 10.0)),
    "cosine-linear": (Cosine(4.0), Linear(0.1, 12.0)),
}


@pytest.mark.parametrize("rates", TWO_CLOCKS)
def test_two_clocks_against_an_integrator(rates: str) -> None:
    """Where exp(∫A) is not the propagator."""
    rate_q, rate_d = TWO_CLOCKS[rates]
    cld, three = ornstein.cld(), ZOO["full-S"]()
    assert isinstance(three, Diffusion)
    for Q, D, S in ((cld.Q, cld.D, cld.S), (three.Q, three.D, three.S)):
        process = Diffusion(Q, D, S, rate_q=rate_q, rate_d=rate_d)
        start = (process.auxiliary.factor() @ process.auxiliary.factor().mT).numpy()
        for s in (0.2, 0.8):
            Phi, Sigma = integrate(process, s, start)
            kernel = process.transition(s)
            # the integrator's global error: rtol 1e-12 times some hundred steps
            assert np.abs(kernel.propagator.numpy() - Phi).max() < 1e-9
            assert np.abs(kernel.covariance.numpy() - Sigma).max() < 1e-9


def test_the_naive_exponential_is_wrong_for_two_clocks() -> None:
    """exp(∫A) misses Φ by 0.1 and more (so that the test above has something to see)."""
    cld = ornstein.cld()
    process = Diffusion(cld.Q, cld.D, cld.S, rate_q=Constant(5.0), rate_d=Linear(0.1, 10.0))
    s = torch.linspace(0.1, 1.0, 10, dtype=torch.float64)
    tau_q, tau_d = process.rate_q.integral(s), process.rate_d.integral(s)
    naive = [
        scipy.linalg.expm(-((a * process.Q + b * process.D) @ process.S).numpy())
        for a, b in zip(tau_q, tau_d, strict=True)
    ]
    gap = np.abs(np.stack(naive) - process.transition(s).propagator.numpy()).max()
    assert gap > 0.1


def test_general_process_against_an_integrator() -> None:
    process = ZOO["linear-sde"]()
    assert isinstance(process, LinearSDE)
    start = (process.auxiliary.factor() @ process.auxiliary.factor().mT).numpy()
    for s in (0.1, 0.5, 1.0):
        Phi, Sigma = integrate(process, s, start)
        kernel = process.transition(s)
        assert np.abs(kernel.propagator.numpy() - Phi).max() < 1e-10
        assert np.abs(kernel.covariance.numpy() - Sigma).max() < 1e-10


def test_a_diffusion_written_as_a_general_process() -> None:
    """CLD by its matrices, and by functions of time that know nothing of its structure."""
    cld = ornstein.cld()
    general = LinearSDE(cld.drift, cld.diffusion, cld.prior_covariance, v0_variance=0.01)
    s = torch.tensor([1e-2, 0.1, 0.5, 1.0], dtype=torch.float64)
    ours, theirs = cld.transition(s), general.transition(s)
    assert torch.allclose(ours.propagator, theirs.propagator, rtol=0, atol=1e-11)
    assert torch.allclose(ours.cholesky, theirs.cholesky, rtol=1e-9, atol=1e-13)
