"""The oracle against closed forms, against itself and against an independent integrator."""

from __future__ import annotations

import numpy as np
import pytest
from mpmath import mp
from scipy.integrate import solve_ivp

from tests.truth import commuting, propagator_error, rates_drift, relative, varying

CHAIN_Q = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, -2.0], [0.0, 2.0, 0.0]])
CHAIN_D = np.diag([0.0, 0.0, 1.5])
CHAIN_S = np.array([[1.0, 0.25, 0.0], [0.25, 4.0, 0.5], [0.0, 0.5, 2.0]])
GIVEN_X = np.array([[0.0, 0.0, 0.0], [0.0, 0.5, 0.125], [0.0, 0.125, 0.25]])


def chain(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, D, S of a chain that is driven at its last variable only."""
    links = np.arange(1.0, size)
    Q = np.diag(links, -1) - np.diag(links, 1)
    D = np.zeros((size, size))
    D[-1, -1] = 1.0
    return Q, D, np.eye(size)


@pytest.mark.parametrize("tau", [1e-9, 1e-3, 0.7, 30.0])
def test_vpsde_closed_form(tau: float) -> None:
    phi, lower = commuting([[0.0]], [[0.5]], [[1.0]], tau, [[0.0]])
    assert relative(phi, [[np.exp(-tau / 2)]]) < 4e-16
    assert relative(lower, [[np.sqrt(-np.expm1(-tau))]]) < 4e-16


def test_worked_example() -> None:
    phi, _ = commuting([[0.0, -1.0], [1.0, 0.0]], np.eye(2), np.eye(2), 0.1)
    assert np.round(phi[:, 0], 4).tolist() == [0.9003, -0.0903]


def test_no_time_leaves_the_start() -> None:
    start = np.diag([0.0, 4.0])
    Q, D, S = chain(2)
    results = [
        commuting(Q, D, S, 0.0, start),
        varying(*rates_drift(Q, D, S, lambda r: 1, lambda r: 1), 0.0, start),
    ]
    for phi, lower in results:
        assert phi.tolist() == np.eye(2).tolist()
        assert lower.tolist() == np.diag([0.0, 2.0]).tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_time_law_of_a_chain(size: int) -> None:
    """The variable m links from the noise has variance 2 c^2 tau^(2m+1) / ((2m+1) m!^2) at first.

    Here c is the product of the m links on the way to it.
    """
    tau = 1e-6
    _, lower = commuting(*chain(size), tau)
    m = size - 1
    links = np.prod(np.arange(1.0, size))
    law = links * np.sqrt(2 * tau ** (2 * m + 1) / (2 * m + 1)) / np.prod(np.arange(1.0, m + 1))
    assert abs(lower[0, 0] / law - 1) < 1e-5
    again = commuting(*chain(size), tau, digits=400)
    assert relative(np.diag(lower), np.diag(again[1])) == 0.0


@pytest.mark.parametrize("tau", [1e-3, 1.0, 60.0])
def test_precision_does_not_matter(tau: float) -> None:
    """Up to a norm of about 500 for tau A, more digits change nothing."""
    args = (CHAIN_Q, CHAIN_D, CHAIN_S, tau, GIVEN_X)
    phi, lower = commuting(*args)
    more_phi, more_lower = commuting(*args, digits=600)
    assert np.array_equal(phi, more_phi)
    assert np.array_equal(lower, more_lower)


@pytest.mark.parametrize("s", [1e-5, 0.1, 1.0])
@pytest.mark.parametrize("start", [None, GIVEN_X])
def test_varying_meets_commuting(s: float, start: np.ndarray | None) -> None:
    """Under the linear rate 0.25 + 4 r the clock is 0.25 s + 2 s^2."""

    def rate(r: mp.mpf) -> mp.mpf:
        return 0.25 + 4 * r

    drift, diffusion = rates_drift(CHAIN_Q, CHAIN_D, CHAIN_S, rate, rate)
    phi, lower = varying(drift, diffusion, s, start)
    with mp.workdps(200):
        tau = 0.25 * mp.mpf(s) + 2 * mp.mpf(s) ** 2
    truth_phi, truth_lower = commuting(CHAIN_Q, CHAIN_D, CHAIN_S, tau, start)
    assert propagator_error(phi, truth_phi) < 2.3e-16
    assert relative(np.diag(lower), np.diag(truth_lower)) < 2.3e-16
    assert np.allclose(lower, truth_lower, rtol=1e-15, atol=0.0)


def test_varying_meets_an_ordinary_integrator() -> None:
    Q, D, S = [[0.0, -1.0], [1.0, 0.0]], np.diag([0.0, 2.0]), np.array([[1.0, 0.0], [0.0, 4.0]])
    start, s = np.diag([0.0, 0.04]), 0.5

    def b_d(r: float) -> float:
        return 1 + 3 * r

    phi, lower = varying(*rates_drift(Q, D, S, lambda r: mp.exp(2 * r), b_d), s, start)

    def slope(r: float, y: np.ndarray) -> np.ndarray:
        drift = -(np.exp(2 * r) * np.array(Q) + b_d(r) * D) @ S
        forward, sigma = y.reshape(2, 2, 2)
        flow = drift @ sigma
        return np.concatenate([drift @ forward, flow + flow.T + 2 * b_d(r) * D]).ravel()

    y0 = np.concatenate([np.eye(2), start]).ravel()
    end = solve_ivp(slope, (0.0, s), y0, method="DOP853", rtol=1e-12, atol=1e-15).y[:, -1]
    want_phi, want_sigma = end.reshape(2, 2, 2)
    assert propagator_error(phi, want_phi) < 1e-10
    assert relative(np.diag(lower), np.diag(np.linalg.cholesky(want_sigma))) < 1e-10


def test_varying_refuses_what_it_cannot_resolve() -> None:
    drift, diffusion = rates_drift([[0.0]], [[0.5]], [[1.0]], lambda r: 1, lambda r: mp.sqrt(r))
    with pytest.raises(ArithmeticError):
        varying(drift, diffusion, 0.5)
    with pytest.raises(ValueError, match="outside"):
        varying(drift, diffusion, 1.5)


def test_singular_or_lopsided_input_is_refused() -> None:
    with pytest.raises(ArithmeticError):
        commuting(np.zeros((2, 2)), np.diag([0.0, 1.0]), np.eye(2), 1.0)
    with pytest.raises(ValueError, match="skew"):
        commuting([[0.0, 1.0], [1.0, 0.0]], np.eye(2), np.eye(2), 1.0)


def test_errors() -> None:
    assert relative([1.0, 0.0], [2.0, 0.0]) == 0.5
    assert relative([1.0, 1.0], [1.0, 0.0]) == np.inf
    assert propagator_error([[1.0, 0.0]], [[2.0, 0.0]]) == 0.5
