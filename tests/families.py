"""Random processes for the tests, and their true kernels.

`Drawn` holds the matrices of a random process in numpy, so that the oracle and the library start
from the same numbers. `truth` reads the matrices and rates of a `Diffusion` and hands them to the
oracle of `tests.truth`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpmath import mp

import ornstein
from ornstein import Constant, Cosine, Diffusion, Linear, Schedule
from tests.truth import commuting, propagator_error, rates_drift, relative, varying

MpRate = Callable[[Any], Any]


@dataclass(frozen=True)
class Drawn:
    """The matrices of a random process: (K, K) each."""

    Q: np.ndarray
    D: np.ndarray
    S: np.ndarray

    def process(self, **options: Any) -> Diffusion:
        """The library's process of these matrices."""
        return Diffusion(self.Q, self.D, self.S, **options)


def draw(
    rng: np.random.Generator,
    K: int,
    noise: str = "full",
    full_S: bool = False,
    stiffness: float | None = None,
    total: float = 10.05,
) -> Drawn:
    """A random process: noise 'full', 'diagonal', 'last' or 'one' (in one random variable).

    With `stiffness`, Q and D are scaled so that total·‖(Q + D)S‖ is that; `total` is the clock at
    the horizon, by default that of Linear(0.1, 20).
    """
    raw = rng.standard_normal((K, K))
    Q = raw - raw.T
    if noise == "full":
        root = rng.standard_normal((K, K + 1))
        D = root @ root.T / K
    elif noise == "diagonal":
        D = np.diag(rng.uniform(0.1, 2.0, K))
    else:
        D = np.zeros((K, K))
        place = K - 1 if noise == "last" else int(rng.integers(K))
        D[place, place] = rng.uniform(0.5, 3.0)
    S = np.eye(K)
    if full_S:
        root = rng.standard_normal((K, K + 2))
        S = root @ root.T / K + 0.2 * np.eye(K)
    if stiffness is not None:
        scale = stiffness / (total * float(np.linalg.norm((Q + D) @ S)))
        Q, D = Q * scale, D * scale
    D, S = (D + D.T) / 2, (S + S.T) / 2
    return Drawn(Q, D, S)


def clock(schedule: Schedule, s: float) -> Any:
    """∫₀ˢ b in the precision in force."""
    t = mp.mpf(float(s))
    if isinstance(schedule, Constant):
        return mp.mpf(schedule.value) * t
    if isinstance(schedule, Linear):
        start, end = mp.mpf(schedule.start), mp.mpf(schedule.end)
        return t * (start + (end - start) / (2 * mp.mpf(schedule.horizon)) * t)
    if isinstance(schedule, Cosine):
        first, slope = _angles(schedule)
        return -2 * mp.log(mp.cos(first + slope * t) / mp.cos(first))
    raise TypeError(f"no closed form here for {schedule!r}")


def rate(schedule: Schedule) -> MpRate:
    """b in the precision in force."""
    if isinstance(schedule, Constant):
        return lambda r: mp.mpf(schedule.value)
    if isinstance(schedule, Linear):
        start, end, T = schedule.start, schedule.end, schedule.horizon
        return lambda r: mp.mpf(start) + (mp.mpf(end) - mp.mpf(start)) / mp.mpf(T) * r
    if isinstance(schedule, Cosine):

        def tangent(r: Any) -> Any:
            first, slope = _angles(schedule)
            return 2 * slope * mp.tan(first + slope * r)

        return tangent
    raise TypeError(f"no closed form here for {schedule!r}")


def _angles(schedule: Cosine) -> tuple[Any, Any]:
    """The first angle of a cosine schedule and how fast it turns."""
    offset = mp.mpf(schedule.offset)
    first = offset / (1 + offset) * mp.pi / 2
    last = mp.acos(mp.cos(first) * mp.exp(-mp.mpf(schedule.total) / 2))
    return first, (last - first) / mp.mpf(schedule.horizon)


def truth(process: Diffusion, s: float, given: str) -> tuple[np.ndarray, np.ndarray]:
    """Φ and L of a process at time s, from multiprecision arithmetic."""
    Q, D, S = (m.detach().numpy() for m in (process.Q, process.D, process.S))
    sigma0 = start_covariance(process) if given == "x" else None
    ratio = _ratio(process.rate_q, process.rate_d)
    if ratio is None and Q.any():
        curves = rates_drift(Q, D, S, rate(process.rate_q), rate(process.rate_d))
        return varying(*curves, s, sigma0, horizon=process.horizon)
    with mp.workdps(400):
        turn = mp.matrix(Q.tolist()) * (1 if ratio is None else ratio)
        tau = clock(process.rate_d, s)
        return commuting(turn, D, S, tau, sigma0)


def start_covariance(process: ornstein.Process) -> Any:
    """Cov(y₀ | x) as the square of the factor that the process uses: a matrix of mpf."""
    root = process.auxiliary.factor().detach().numpy()
    with mp.workdps(400):
        columns = mp.matrix(root.tolist()) if root.size else mp.zeros(len(root), 1)
        return columns * columns.T


def _ratio(first: Schedule, second: Schedule) -> Any:
    """first / second where both are multiples of one rate, else None."""
    if first is second:
        return mp.one
    if isinstance(first, Constant) and isinstance(second, Constant):
        return mp.mpf(first.value) / mp.mpf(second.value)
    return None


def kernel_error(process: Diffusion, s: float, given: str) -> float:
    """Largest relative error of diag L and of Φ (against its largest entry) at time s."""
    kernel = process.transition(s, given=given)  # type: ignore[arg-type]
    phi, lower = truth(process, s, given)
    return max(
        propagator_error(kernel.propagator, phi),
        relative(np.diagonal(kernel.cholesky.detach().numpy()), np.diagonal(lower)),
    )
