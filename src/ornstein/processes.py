"""The zoo: each preset is a few lines of matrices.

| preset | K | where it is from |
| --- | --- | --- |
| `vpsde` | 1 | variance preserving (Song et al. 2021) |
| `subvpsde`, `vesde` | 1 | sub-variance preserving, variance exploding (Song et al. 2021) |
| `cld` | 2 | Langevin dynamics with any damping (Dockhorn et al. 2022: critical) |
| `psld` | 2 | noise on both variables (Pandey & Mandt 2023) |
| `alda`, `malda` | 3 | third-order Langevin (Singhal et al. 2023, after Mou et al. 2021) |
| `learned` | any | Q, D, and if wanted the rates and the law of v₀, are parameters |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ornstein.diffusion import Diffusion, LinearSDE, Rate
from ornstein.matrices import Matrix, Semidefinite, Skew, Vector
from ornstein.parts import Record, described, part
from ornstein.process import Process
from ornstein.schedules import (
    Float64Module,
    Linear,
    Monotone,
    Schedule,
    as_schedule,
    positive_number,
    rebuilt_rate,
)

V0 = 0.04  # Var v₀ as a fraction of its stationary variance, where a preset is not told otherwise


def vpsde(rate: Rate | None = None, horizon: float = 1.0) -> Diffusion:
    """dy = −½b y ds + √b dB, with prior N(0, 1)."""
    return Diffusion([[0.0]], [[0.5]], rate=rate, horizon=horizon, name="vpsde")


def subvpsde(rate: Rate | None = None, horizon: float = 1.0) -> LinearSDE:
    """VPSDE's mean with less noise: GGᵀ = b (1 − exp(−2∫b)), prior N(0, 1)."""
    schedule = as_schedule(Linear(horizon=horizon) if rate is None else rate, horizon)
    drift, diffusion = _SubVPDrift(schedule), _SubVPDiffusion(schedule)
    return LinearSDE(drift, diffusion, [[1.0]], horizon=horizon, name="subvpsde")


@part("subvpsde-drift")
class _SubVPDrift(Float64Module):
    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule

    def forward(self, s: Tensor) -> Tensor:
        return -0.5 * self.schedule.rate(s)

    def describe(self) -> Record:
        return {"schedule": described(self.schedule)}

    @classmethod
    def rebuild(cls, fields: Record) -> _SubVPDrift:
        return cls(rebuilt_rate(fields["schedule"], "the rate"))


@part("subvpsde-diffusion")
class _SubVPDiffusion(_SubVPDrift):
    def forward(self, s: Tensor) -> Tensor:
        return self.schedule.rate(s) * -torch.expm1(-2 * self.schedule.integral(s))


def vesde(sigma_min: float = 0.01, sigma_max: float = 50.0, horizon: float = 1.0) -> LinearSDE:
    """No drift; the noise grows so that σ(s) = σ_min (σ_max/σ_min)^(s/T); prior N(0, σ_max²)."""
    low, high = positive_number(sigma_min, "sigma_min"), positive_number(sigma_max, "sigma_max")
    if not low < high:
        raise ValueError(
            f"vesde got sigma_min={low:g} and sigma_max={high:g}; expected sigma_min < sigma_max."
        )
    diffusion = _VEDiffusion(low, high, positive_number(horizon, "horizon"))
    return LinearSDE(_Still(), diffusion, [[high**2]], horizon=horizon, name="vesde")


@part("no-drift")
class _Still(Float64Module):
    def forward(self, s: Tensor) -> Tensor:
        return torch.zeros_like(s)

    def describe(self) -> Record:
        return {}

    @classmethod
    def rebuild(cls, fields: Record) -> _Still:
        return cls(**fields)


@part("vesde-diffusion")
class _VEDiffusion(Float64Module):
    def __init__(self, low: float, high: float, horizon: float) -> None:
        super().__init__()
        self.low, self.growth = low, 2 * math.log(high / low) / horizon
        self._pin(sigma_min=low, sigma_max=high, horizon=horizon)
        self._arguments = {"low": low, "high": high, "horizon": horizon}

    def forward(self, s: Tensor) -> Tensor:
        return self.low**2 * self.growth * torch.exp(self.growth * s)

    def describe(self) -> Record:
        return dict(self._arguments)

    @classmethod
    def rebuild(cls, fields: Record) -> _VEDiffusion:
        return cls(**fields)


def cld(
    mass: float = 0.25,
    damping: float | None = None,
    rate: Rate | None = None,
    v0_variance: float | Matrix | None = None,
    horizon: float = 1.0,
) -> Diffusion:
    """Langevin dynamics: Q couples position and velocity, D = diag(0, Γ), S = diag(1, 1/M).

    damping is Γ, by default the critical 2√M; v0_variance is Var v₀, by default 0.04·M.
    """
    M = positive_number(mass, "mass")
    Gamma = 2 * math.sqrt(M) if damping is None else positive_number(damping, "damping")
    return Diffusion(
        [[0.0, -1.0], [1.0, 0.0]],
        [[0.0, 0.0], [0.0, Gamma]],
        S=[[1.0, 0.0], [0.0, 1 / M]],
        rate=rate,
        v0_variance=V0 * M if v0_variance is None else v0_variance,
        horizon=horizon,
        name="cld",
    )


def psld(
    mass: float = 0.25,
    gamma: float = 0.01,
    nu: float | None = None,
    rate: Rate | None = None,
    v0_variance: float | Matrix | None = None,
    horizon: float = 1.0,
) -> Diffusion:
    """CLD with noise Γ on the data too: D = ½diag(Γ, Mν), by default critical, ν = Γ + 2/√M."""
    M = positive_number(mass, "mass")
    Gamma = positive_number(gamma, "gamma")
    friction = Gamma + 2 / math.sqrt(M) if nu is None else positive_number(nu, "nu")
    return Diffusion(
        [[0.0, -0.5], [0.5, 0.0]],
        [[0.5 * Gamma, 0.0], [0.0, 0.5 * M * friction]],
        S=[[1.0, 0.0], [0.0, 1 / M]],
        rate=rate,
        v0_variance=V0 * M if v0_variance is None else v0_variance,
        horizon=horizon,
        name="psld",
    )


def alda(
    L: float = 1.0,
    gamma: float | None = None,
    xi: float | None = None,
    rate: Rate | None = None,
    v0_variance: float | Vector | Matrix | None = None,
    horizon: float = 1.0,
) -> Diffusion:
    """Third-order Langevin dynamics: noise enters v₂ only and reaches the data through v₁.

    gamma couples v₁ and v₂, xi damps v₂. By default both are critical: the three eigenvalues of
    the drift coincide at −√(3/L), the fastest return without oscillation.
    """
    ell = positive_number(L, "L")
    g = math.sqrt(8 / ell) / ell if gamma is None else positive_number(gamma, "gamma")
    damping = 3 * math.sqrt(3 / ell) if xi is None else positive_number(xi, "xi")
    return Diffusion(
        [[0.0, -1 / ell, 0.0], [1 / ell, 0.0, -g], [0.0, g, 0.0]],
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, damping / ell]],
        S=[[1.0, 0.0, 0.0], [0.0, ell, 0.0], [0.0, 0.0, ell]],
        rate=rate,
        v0_variance=V0 / ell if v0_variance is None else v0_variance,
        horizon=horizon,
        name="alda",
    )


def malda(
    L: float = 1.0,
    gamma: float | None = None,
    rate: Rate | None = None,
    v0_variance: float | Vector | Matrix | None = None,
    horizon: float = 1.0,
) -> Diffusion:
    """ALDA with both auxiliary variables coupled to the data and both noisy.

    gamma couples v₁ and v₂; by default √(1/L − 1/9)/L, for which all modes decay equally fast
    (while L < 27/4; for L ≥ 9 it is 0).
    """
    ell = positive_number(L, "L")
    if gamma is None:
        g = math.sqrt(max(1 / ell - 1 / 9, 0.0)) / ell
    else:
        g = positive_number(gamma, "gamma")
    return Diffusion(
        [[0.0, -1 / ell, -1 / ell], [1 / ell, 0.0, -g], [1 / ell, g, 0.0]],
        [[0.0, 0.0, 0.0], [0.0, 1 / ell, 0.0], [0.0, 0.0, 1 / ell]],
        S=[[1.0, 0.0, 0.0], [0.0, ell, 0.0], [0.0, 0.0, ell]],
        rate=rate,
        v0_variance=V0 / ell if v0_variance is None else v0_variance,
        horizon=horizon,
        name="malda",
    )


def learned(
    n_aux: int = 1,
    full: bool = False,
    S: Matrix | None = None,
    rate: Rate | None = None,
    learn_rates: Literal["no", "shared", "separate"] = "no",
    v0_variance: float | Vector | Matrix = V0,
    v0_coupling: float | Vector | None = None,
    learn_v0_variance: bool = False,
    learn_v0_coupling: bool = False,
    horizon: float = 1.0,
    seed: int = 0,
) -> Diffusion:
    """A process to be learned: Q = Q̃ − Q̃ᵀ, D = D̃D̃ᵀ (diagonal, or full), S fixed.

    Starts as VPSDE on every variable (D = ½) with a random rotation between them (from seed).
    learn_rates: "shared" learns one clock for Q and D, "separate" one each; both keep their ends.
    """
    if not isinstance(n_aux, int) or n_aux < 0:
        raise ValueError(f"learned got n_aux={n_aux!r}; expected a whole number ≥ 0.")
    if learn_rates not in ("no", "shared", "separate"):
        raise ValueError(
            f"learned got learn_rates={learn_rates!r}; expected 'no', 'shared' or 'separate'."
        )
    K = n_aux + 1
    generator = torch.Generator(device="cpu").manual_seed(seed)
    raw_Q = 0.5 * torch.randn(K, K, dtype=torch.float64, generator=generator, device="cpu")
    raw_D = torch.full((K,), math.sqrt(0.5), dtype=torch.float64, device="cpu")
    base = as_schedule(Linear(horizon=horizon) if rate is None else rate, horizon)
    rate_q = rate_d = base if learn_rates == "no" else Monotone(base)
    if learn_rates == "separate":
        rate_q = Monotone(base)
    return Diffusion(
        Skew(raw_Q),
        Semidefinite(torch.diag(raw_D) if full else raw_D),
        S=S,
        rate=base,
        rate_q=rate_q,
        rate_d=rate_d,
        v0_variance=v0_variance,
        v0_coupling=v0_coupling,
        learn_v0_variance=learn_v0_variance,
        learn_v0_coupling=learn_v0_coupling,
        horizon=horizon,
        name=f"learned-{n_aux}" + ("-full" if full else ""),
    )


PRESETS: dict[str, Callable[..., Process]] = {
    "vpsde": vpsde,
    "subvpsde": subvpsde,
    "vesde": vesde,
    "cld": cld,
    "psld": psld,
    "alda": alda,
    "malda": malda,
}
