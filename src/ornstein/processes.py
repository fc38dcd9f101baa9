"""The zoo: each preset is a few lines of matrices.

| preset | K | where it is from |
| --- | --- | --- |
| `vpsde` | 1 | variance preserving (Song et al. 2021) |
| `subvpsde`, `vesde` | 1 | sub-variance preserving, variance exploding (Song et al. 2021) |
| `cld` | 2 | Langevin dynamics with any damping (Dockhorn et al. 2022: critical) |
| `psld` | 2 | noise on both variables (Pandey & Mandt 2023) |
| `alda`, `malda` | 3 | third-order Langevin (Singhal et al. 2023, after Mou et al. 2019) |
| `learned` | any | Q, D, and if wanted the rates and the law of v₀, are parameters |
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ornstein.diffusion import Diffusion, LinearSDE, Rate
from ornstein.linalg import semidefinite_factor
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
    proportion,
    rebuilt_rate,
)

V0 = 0.04  # Var v₀ as a fraction of its stationary variance, where a preset is not told otherwise
LEAST = 1e-3  # noise where a start has none, as a fraction of its largest


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
    n_aux: int | None = None,
    full: bool = False,
    S: Matrix | None = None,
    rate: Rate | None = None,
    learn_rates: Literal["no", "shared", "separate"] = "no",
    v0_variance: float | Vector | Matrix | None = None,
    v0_coupling: float | Vector | None = None,
    learn_v0_variance: bool = False,
    learn_v0_coupling: bool = False,
    horizon: float | None = None,
    seed: int = 0,
    start: Diffusion | None = None,
) -> Diffusion:
    """A process to be learned: Q = Q̃ − Q̃ᵀ, D = D̃D̃ᵀ (diagonal, or full), S fixed.

    Starts as VPSDE on every variable (D = ½) with a random rotation between them (from seed); or
    from another process, whose Q, D and whatever is not given it takes over (seed is not used).
    Where that has no noise it starts with a thousandth of its largest: a D̃ of 0 has no gradient,
    and would stay. n_aux: 1 by default, or that of start.
    learn_rates: "shared" learns one clock for Q and D, "separate" one each; both keep their ends.
    """
    if learn_rates not in ("no", "shared", "separate"):
        raise ValueError(
            f"learned got learn_rates={learn_rates!r}; expected 'no', 'shared' or 'separate'."
        )
    if start is None:
        begin = _at_random(1 if n_aux is None else n_aux, rate, horizon, seed)
    else:
        begin = _at(start, n_aux, full, rate, horizon)
    raw_D = begin.raw_D
    return Diffusion(
        Skew(begin.raw_Q),
        Semidefinite(torch.diag(raw_D) if full and raw_D.dim() == 1 else raw_D),
        S=begin.S if S is None else S,
        v0_variance=begin.v0_variance if v0_variance is None else v0_variance,
        v0_coupling=begin.v0_coupling if v0_coupling is None else v0_coupling,
        learn_v0_variance=learn_v0_variance,
        learn_v0_coupling=learn_v0_coupling,
        horizon=begin.horizon,
        name=f"learned-{begin.name}" + ("-full" if full else ""),
        **begin.clocks(learn_rates),
    )


@dataclass(frozen=True)
class _Begin:
    """What a learned process begins with."""

    raw_Q: Tensor
    raw_D: Tensor
    rate_q: Schedule
    rate_d: Schedule
    horizon: float
    name: str
    S: Tensor | None = None
    v0_variance: float | Tensor = V0
    v0_coupling: Tensor | None = None

    def clocks(self, learn: str) -> dict[str, Schedule]:
        if learn == "shared" and proportion(self.rate_q, self.rate_d) != 1.0:
            raise ValueError(
                f"learn_rates='shared', but Q and D of {self.name!r} run on clocks of their own; "
                "expected learn_rates='separate', or one rate= for both."
            )
        if learn == "no":
            return {"rate_q": self.rate_q, "rate_d": self.rate_d}
        rate_d = Monotone(self.rate_d)
        return {"rate_q": rate_d if learn == "shared" else Monotone(self.rate_q), "rate_d": rate_d}


def _at_random(n_aux: int, rate: Rate | None, horizon: float | None, seed: int) -> _Begin:
    if not isinstance(n_aux, int) or n_aux < 0:
        raise ValueError(f"learned got n_aux={n_aux!r}; expected a whole number ≥ 0.")
    K, length = n_aux + 1, 1.0 if horizon is None else horizon
    generator = torch.Generator(device="cpu").manual_seed(seed)
    raw_Q = 0.5 * torch.randn(K, K, dtype=torch.float64, generator=generator, device="cpu")
    raw_D = torch.full((K,), math.sqrt(0.5), dtype=torch.float64, device="cpu")
    clock = as_schedule(Linear(horizon=length) if rate is None else rate, length)
    return _Begin(raw_Q, raw_D, clock, clock, length, str(n_aux))


def _at(
    start: Diffusion, n_aux: int | None, full: bool, rate: Rate | None, horizon: float | None
) -> _Begin:
    """With the matrices of another process; a little noise where it has none."""
    if not isinstance(start, Diffusion):
        raise ValueError(
            f"learned got start={getattr(start, 'name', start)!r}; expected a process with Q and "
            "D, such as ornstein.cld() or a Diffusion of your own."
        )
    if n_aux not in (None, start.n_vars - 1):
        raise ValueError(
            f"learned got n_aux={n_aux!r} and a start with {start.n_vars - 1} auxiliary variables; "
            "expected as many. Leave n_aux out."
        )
    if horizon is not None and not math.isclose(positive_number(horizon, "horizon"), start.horizon):
        raise ValueError(
            f"learned got horizon={horizon!r} and a start that runs to {start.horizon:g}; expected "
            "the same. Leave horizon out, or give it to start."
        )
    begin = copy.deepcopy(start).cpu()
    rate_q, rate_d = begin.rate_q, begin.rate_d
    if rate is not None:
        rate_q = rate_d = as_schedule(rate, begin.horizon)
    elif any(True for clock in (rate_q, rate_d) for _ in clock.parameters()):
        raise ValueError(
            f"learned got a start whose rates are learned, {start.name!r}; expected fixed ones. "
            "Give rate=, for example Linear(0.1, 20.0)."
        )
    D, law = begin.D.detach(), begin.auxiliary
    own = D.diagonal()
    if not full and bool((D - torch.diag(own)).any()):
        raise ValueError(
            f"learned got a start whose D is not diagonal, {start.name!r}; expected full=True."
        )
    least = LEAST * own.max()
    raw_D = _with_noise(D, least) if full else torch.where(own > 0, own, least).sqrt()
    factor = law.factor().detach()[1:]
    return _Begin(
        begin.Q.detach().tril(),
        raw_D,
        rate_q,
        rate_d,
        begin.horizon,
        begin.name,
        begin.S,
        factor @ factor.mT,
        law.coupling.detach(),
    )


def _with_noise(D: Tensor, least: Tensor) -> Tensor:
    """C with C Cᵀ = D, and so much noise in every direction in which D has none: (K, K)."""
    C = semidefinite_factor(D)
    rank = int((C != 0).any(0).sum())  # columns of zeros come last
    empty = torch.linalg.svd(C).U[:, rank:]  # orthogonal to all that C has
    return torch.cat([C[:, :rank], least.sqrt() * empty], 1)


PRESETS: dict[str, Callable[..., Process]] = {
    "vpsde": vpsde,
    "subvpsde": subvpsde,
    "vesde": vesde,
    "cld": cld,
    "psld": psld,
    "alda": alda,
    "malda": malda,
}
STARTS = ("vpsde", "cld", "psld", "alda", "malda")  # those with Q and D, to learn from
