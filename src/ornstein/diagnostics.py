"""What a researcher wants to know about a process before spending a GPU on it.

All of it is exact, from the transition given x. With r = Φ(1, c), Σ = L Lᵀ and data of mean m and
variance ς² per coordinate:

    signal-to-noise    SNR(s) = rᵀΣ⁻¹r, the standard error of x from y_s is SNR^(-1/2)
    prior gap          E_x KL(q(y_s|x) ‖ π) = ½[tr(Σπ⁻¹Σ) + rᵀΣπ⁻¹r (ς²+m²) − K + log|Σπ|/|Σ|]
    distance to prior  KL(N(r m, Σ + r rᵀς²) ‖ π), zero when y_s has forgotten the data
    memory             ‖Σπ^(-1/2) Φ Σπ^(1/2)‖₂, the largest part of any start that is left at s
    auxiliary use      I(x; v_s) = ½ log(1 + ς² r_vᵀ Σ_vv⁻¹ r_v) for Gaussian data (paper, app. B):
                       zero at all times when (Q + D)S is diagonal and v₀ does not depend on x
    condition          ratio of the largest and smallest singular value of L
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.diffusion import Diffusion
from ornstein.linalg import lower_inverse, lower_solve
from ornstein.matrices import as_float64
from ornstein.process import Process
from ornstein.transition import Transition


@dataclass(frozen=True)
class Diagnosis:
    """Curves over time (n,) and the figures read off them; nats per data coordinate."""

    name: str
    n_vars: int
    times: Tensor
    propagator: Tensor  # (n, K, K)
    covariance: Tensor  # (n, K, K) given x
    snr: Tensor
    prior_gap: Tensor  # E_x KL(q(y_s|x) ‖ π)
    distance: Tensor  # KL(q(y_s) ‖ π) for Gaussian data
    memory: Tensor
    auxiliary_information: Tensor  # I(x; v_s)
    condition: Tensor
    commutes: bool | None  # None where there are no rates to compare
    slowest_rate: float | None  # smallest real part of the eigenvalues of −A on its one clock
    stationary: bool | None  # whether N(0, S⁻¹) is the only stationary law

    @property
    def final_gap(self) -> float:
        """Prior part of the bound at the horizon, nats per coordinate."""
        return float(self.prior_gap[-1])

    @property
    def uses_auxiliary(self) -> bool:
        """Whether any auxiliary variable ever depends on the data."""
        return bool((self.auxiliary_information > 0).any())

    def time_of_noise(self, standard_error: float) -> float | None:
        """The first time at which x is known no better than this, or None off the grid."""
        if not standard_error > 0:
            raise ValueError(f"standard_error={standard_error!r}; expected a positive number.")
        return _crossing(self.times, self.snr, standard_error**-2)

    def forgotten_at(self, part: float = 0.01) -> float | None:
        """The time from which on at most this part of any start is left, or None."""
        later = self.memory.flip(0).cummax(0).values.flip(0)  # it may swing below and back
        return _crossing(self.times, later, part)


def _crossing(times: Tensor, falling: Tensor, level: float) -> float | None:
    """Where a falling curve crosses a level, by interpolation in both logarithms, or None."""
    below = (falling <= level).nonzero()
    if not len(below) or int(below[0, 0]) == 0:
        return None
    i = int(below[0, 0])
    t, f = times[i - 1 : i + 1].log(), falling[i - 1 : i + 1].log()
    return float(torch.exp(t[0] + (math.log(level) - f[0]) / (f[1] - f[0]) * (t[1] - t[0])))


def diagnose(
    process: Process,
    data_variance: float = 1.0,
    data_mean: float = 0.0,
    times: Tensor | None = None,
) -> Diagnosis:
    """Look at a process over time: by default 499 times, from 1e-5 to all of the horizon."""
    if not isinstance(process, Process):
        raise ValueError(
            f"diagnose got {type(process).__name__}; expected a process, for example "
            "ornstein.cld()."
        )
    if not (
        all(isinstance(v, (int, float)) and math.isfinite(v) for v in (data_variance, data_mean))
        and data_variance >= 0
    ):
        raise ValueError(
            f"data_variance={data_variance!r}, data_mean={data_mean!r}; expected a finite mean "
            "and a finite variance ≥ 0, per data coordinate."
        )
    if times is None:
        log = torch.logspace(-5, 0, 300, dtype=torch.float64, device="cpu")
        even = torch.linspace(0, 1, 201, dtype=torch.float64, device="cpu")[1:-1]
        times = process.horizon * torch.cat([log[:-1], even, torch.ones_like(log[-1:])])
    times = as_float64(times, "times").reshape(-1).sort().values.to(process.device)
    with torch.no_grad():
        kernel = process.transition(times, given="x")
        prior = process.prior_factor
        rate, stationary = _stationary_law(process)
        return Diagnosis(
            name=process.name,
            n_vars=process.n_vars,
            times=times,
            propagator=kernel.propagator,
            covariance=kernel.covariance,
            snr=kernel.snr,
            prior_gap=prior_gap(kernel, prior, data_variance + data_mean**2),
            distance=_distance(kernel, prior, data_variance, data_mean),
            memory=_memory(kernel, prior),
            auxiliary_information=auxiliary_information(kernel, data_variance),
            condition=_condition(kernel),
            commutes=process.commutes if isinstance(process, Diffusion) else None,
            slowest_rate=rate,
            stationary=stationary,
        )


def prior_gap(kernel: Transition, prior: Tensor, second_moment: float | Tensor) -> Tensor:
    """E_x KL(q(y_s|x) ‖ N(0, prior·priorᵀ)), nats per coordinate; prior lower triangular."""
    spread = lower_solve(prior, kernel.cholesky)
    shift = lower_solve(prior, kernel.response.unsqueeze(-1))
    logs = 2 * torch.diagonal(spread, dim1=-2, dim2=-1).log().sum(-1)
    # x − 1 − log x summed by its parts would cancel near the prior: gather it entry by entry
    diagonal = torch.diagonal(spread, dim1=-2, dim2=-1)
    own = ((diagonal - 1) * (diagonal + 1)).sum(-1) - logs
    mixed = torch.tril(spread, -1).square().sum((-2, -1))
    return 0.5 * (own + mixed + second_moment * shift.square().sum((-2, -1)))


def auxiliary_information(kernel: Transition, data_variance: float) -> Tensor:
    """I(x; v_s) in nats per coordinate for Gaussian data: (...). Zero for K = 1."""
    if kernel.cholesky.shape[-1] == 1:
        return torch.zeros_like(kernel.error)
    rows = kernel.cholesky[..., 1:, :]  # Σ_vv = rows rowsᵀ
    _, R = torch.linalg.qr(rows.mT)
    response = kernel.response[..., 1:].unsqueeze(-1)
    white = lower_solve(R.mT, response)
    return 0.5 * torch.log1p(data_variance * white.square().sum((-2, -1)))


def _distance(kernel: Transition, prior: Tensor, variance: float, mean: float) -> Tensor:
    """KL(q(y_s) ‖ π) for Gaussian data."""
    extra = kernel.response.unsqueeze(-1) * math.sqrt(variance)
    _, R = torch.linalg.qr(torch.cat([kernel.cholesky, extra], -1).mT)
    signs = torch.diagonal(R, dim1=-2, dim2=-1).sign()
    marginal = Transition(
        propagator=kernel.propagator,
        cholesky=R.mT * signs.unsqueeze(-2),
        direction=kernel.direction,
        given="x",
        error=kernel.error,
    )
    return prior_gap(marginal, prior, mean**2)


def _condition(kernel: Transition) -> Tensor:
    """‖L‖‖L⁻¹‖: the inverse of a triangular matrix keeps its digits where an SVD loses them."""
    inverse = lower_inverse(kernel.cholesky)
    return torch.linalg.matrix_norm(kernel.cholesky, 2) * torch.linalg.matrix_norm(inverse, 2)


def _memory(kernel: Transition, prior: Tensor) -> Tensor:
    """The norm of Φ in the metric of the prior."""
    inside = lower_solve(prior, kernel.propagator @ prior)
    return torch.linalg.matrix_norm(inside, 2)


def _stationary_law(process: Process) -> tuple[float | None, bool | None]:
    """The slowest rate on the clock (None with two), and whether the law is unique."""
    if not isinstance(process, Diffusion):
        return None, None
    ratio = 1.0 if process.ratio is None else process.ratio
    values = torch.linalg.eigvals((ratio * process.Q + process.D) @ process.S)
    slowest = float(values.real.min())
    unique = slowest > 1e-13 * float(values.abs().max())
    return (None if process.ratio is None else slowest), unique
