"""Exponential integrators for any process: what is linear is solved exactly, x̂ is extrapolated.

Between no noise (η = 0, the probability flow) and the reverse equation (η = 1) lies the family

    dy = [A y + ½(1 + η²) GGᵀΣ⁻¹(y − r x̂)] ds + η G dB̄,

all with the right law for a single data point. Whitened, z = L⁻¹y, a = L⁻¹r and W = L⁻¹GGᵀL⁻ᵀ,

    dz = [(K + ½η² W) z − ½(1 + η²) W a x̂] ds + …,       K = H⁺ − H⁺ᵀ,   H = L⁻¹AL + ½W,

where H⁺ is what is strictly above the diagonal: L̇ takes away the rest, and K is skew. For η = 0 and
a single data point the noise therefore only turns, y_t = r_t x + L_t V ε with V orthogonal: this is
DDIM for one variable and gDDIM for two (Song et al. 2021; Zhang et al. 2023), here for any number.
From s to t the estimates x̂_j of this look and those before it are extrapolated in λ = log SNR:

    y_t = r_t x̂₀ + L_t [V ε̂ + Σ_j q_j (x̂_j − x̂₀) + N ξ],      N Nᵀ = 1 − V Vᵀ

V and q solve linear equations, by collocation at Gauss points on panels even in log s. Orders 1, 2
and 3 take one look a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ornstein.linalg import gauss_legendre, semidefinite_factor
from ornstein.process import Process
from ornstein.sampling.solvers import Solver
from ornstein.sampling.way import Grid, Noise, Stop, Walk, Way
from ornstein.transition import mix

NODES = 6  # Gauss points of a panel: errors of the 12th power of its length
LENGTH = 0.5  # of a panel, measured by the size of what is integrated
MOST_PANELS = 256
LOOK = 33  # times at which that size is looked at, in each step


@dataclass(frozen=True)
class Exponential(Solver):
    """Linear part exact, the estimate of x extrapolated; deterministic unless told otherwise."""

    steps: int = 50
    grid: Grid = "information"
    order: Literal[1, 2, 3] = 2
    stochasticity: float = 0.0  # η: 0 is the probability flow, 1 the reverse equation

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in (1, 2, 3):
            raise ValueError(f"order={self.order!r}; expected 1, 2 or 3.")
        eta = self.stochasticity
        if not (isinstance(eta, (int, float)) and 0 <= eta < math.inf):
            raise ValueError(f"stochasticity={eta!r}; expected a number ≥ 0, such as 0 or 1.")

    def prepare(self, way: Way) -> Walk:
        turns = Turns.of(way, self.order, float(self.stochasticity))

        def walk(y: Tensor, draw: Noise) -> Iterator[Stop]:
            past: list[Tensor] = []  # estimates, the newest first
            for i in range(len(turns.noise)):
                seen, one = way.look(i, y), slice(i, i + 1)
                y = mix(turns.noise[one], seen.noise)
                y = mix(turns.data[one].unsqueeze(-1), seen.x.unsqueeze(1), y)
                for j, before in enumerate(past):
                    weight = turns.past[one, j].unsqueeze(-1)
                    y = mix(weight, (before - seen.x).unsqueeze(1), y)
                if turns.fresh is not None:
                    new = draw("step", i + 1, turns.fresh.shape[-1])
                    y = mix(turns.fresh[one], new, y)
                past = [seen.x, *past][: self.order - 1]
                yield Stop(y, seen.x)

        return walk


@dataclass(frozen=True)
class Turns:
    """The matrices of all steps."""

    noise: Tensor  # (n, K, K) L_t V
    data: Tensor  # (n, K) r_t
    past: Tensor  # (n, order − 1, K) L_t q_j; zero where there is no such look yet
    fresh: Tensor | None  # (n, K, K) L_t N

    @staticmethod
    def of(way: Way, order: int, eta: float) -> Turns:
        """For the times of a way."""
        late, early = way.times[:-1], way.times[1:]
        factor = way.kernel.cholesky[1:]
        V, q = turned(way.model.process, late, early, eta, _nodes(way.view.logsnr, order))
        fresh = None
        if eta > 0:
            eye = torch.eye(V.shape[-1]).to(V)
            fresh = factor @ semidefinite_factor(eye - V @ V.mT)
        return Turns(
            noise=factor @ V,
            data=way.kernel.response[1:],
            past=(factor @ q).mT,
            fresh=fresh,
        )


def _nodes(logsnr: Tensor, order: int) -> Tensor:
    """λ of the looks that each step knows, the newest first: (n, order), NaN where none is."""
    n = len(logsnr) - 1
    columns = []
    for back in range(order):
        gap = logsnr.new_full((min(back, n),), math.nan)
        columns.append(torch.cat([gap, logsnr[: n - len(gap)]]))
    return torch.stack(columns, 1)


def turned(
    process: Process, late: Tensor, early: Tensor, eta: float, nodes: Tensor
) -> tuple[Tensor, Tensor]:
    """V and q of every step, by collocation: (n, K, K), (n, K, order − 1)."""
    rule = _rule(late.device)
    low, high = early.log(), late.log()
    panels = _panels(process, low, high, eta)
    n, K, extra = len(late), process.n_vars, nodes.shape[1] - 1
    answer = torch.cat(
        [torch.eye(K).to(late).expand(n, K, K), late.new_zeros(n, K, extra)], -1
    )  # V | q
    width = (high - low) / panels
    for panel in range(panels):
        start = high - panel * width
        places = start.unsqueeze(-1) - width.unsqueeze(-1) * rule.nodes  # (n, p), going back
        field, push, logsnr = _field(process, places, eta)
        bent = push.unsqueeze(-1) * _lagrange(logsnr, nodes).unsqueeze(-2)  # (n, p, K, extra)
        answer = _collocated(answer, field, bent, width, rule)
    return answer[..., :K], answer[..., K:]


@dataclass(frozen=True)
class Rule:
    """Collocation at Gauss points of [0, 1]."""

    nodes: Tensor  # (p,)
    inner: Tensor  # (p, p) integrals of the polynomials from 0 to each node
    weights: Tensor  # (p,) … and to 1


@cache
def _rule(device: torch.device) -> Rule:
    nodes, weights = (np.asarray(v) for v in gauss_legendre(NODES))
    powers = np.arange(NODES)
    basis = np.linalg.inv(nodes[:, None] ** powers)  # columns: coefficients of the polynomials
    inner = (nodes[:, None] ** (powers + 1) / (powers + 1)) @ basis
    return Rule(*(torch.from_numpy(v.copy()).to(device) for v in (nodes, inner, weights)))


def _collocated(answer: Tensor, field: Tensor, bent: Tensor, width: Tensor, rule: Rule) -> Tensor:
    """One panel of Y' = −(F Y + [0 | b]) over a place in [0, 1], times its width: (n, K, K + e)."""
    n, p, K, _ = field.shape
    force = torch.cat([bent.new_zeros(n, p, K, K), bent], -1)
    start = answer.unsqueeze(1)
    # slopes k_i = −w (F_i (Y + Σ_j inner_ij k_j) + b_i)
    h = width[:, None, None, None]
    right = -h * (field @ start + force)
    matrix = torch.einsum("ij,niab->niajb", rule.inner, field) * width[:, None, None, None, None]
    eye = torch.eye(p * K).to(matrix)
    system = eye + matrix.reshape(n, p * K, p * K)
    slopes = torch.linalg.solve(system, right.reshape(n, p * K, -1)).reshape(n, p, K, -1)
    return answer + torch.einsum("i,nikc->nkc", rule.weights, slopes)


def _field(process: Process, places: Tensor, eta: float) -> tuple[Tensor, Tensor, Tensor]:
    """At places log s: s(K + ½η²W), (…, K, K); −½(1 + η²) s W a, (…, K); and log SNR, (…)."""
    s = places.exp().clamp(max=process.horizon)
    kernel = process.transition(s)
    L, A = kernel.cholesky, process.drift(s)
    inside = torch.linalg.solve_triangular(L, A @ L, upper=False)
    G = torch.linalg.solve_triangular(L, process.noise_factor(s), upper=False)
    W = G @ G.mT
    upper = (inside + W / 2).triu(1)
    scale = s[..., None, None]
    field = scale * (upper - upper.mT + eta**2 / 2 * W)
    pull = (W @ kernel.signal.unsqueeze(-1)).squeeze(-1)
    return field, -(1 + eta**2) / 2 * scale[..., 0] * pull, kernel.logsnr


def _lagrange(at: Tensor, nodes: Tensor) -> Tensor:
    """Polynomials that are 1 at one of the earlier looks and 0 at the others: (n, p, order − 1).

    Steps that know fewer looks extrapolate from those they know.
    """
    known = nodes.isfinite()
    safe = torch.where(known, nodes, 0.0)
    parts = []
    for j in range(1, nodes.shape[1]):
        value = torch.ones_like(at)
        for k in range(nodes.shape[1]):
            if k != j:
                ratio = (at - safe[:, None, k]) / (safe[:, None, j] - safe[:, None, k])
                value = torch.where(known[:, None, k], value * ratio, value)
        parts.append(torch.where(known[:, None, j], value, 0.0))
    return torch.stack(parts, -1) if parts else at.new_zeros(*at.shape, 0)


def _panels(process: Process, low: Tensor, high: Tensor, eta: float) -> int:
    """How many panels the longest step needs."""
    part = torch.linspace(0, 1, LOOK, dtype=torch.float64, device=low.device)
    field, _, _ = _field(process, low[:, None] + (high - low)[:, None] * part, eta)
    size = torch.linalg.matrix_norm(field).mean(-1) * (high - low)
    wanted = max(size.max().item(), (high - low).max().item() / 2) / LENGTH
    if not wanted <= MOST_PANELS:
        raise ValueError(
            f"a step of {process.name!r} is too long to be solved exactly: it would take "
            f"{wanted:.0f} panels, at most {MOST_PANELS}. Take more steps, or a smaller "
            "stochasticity."
        )
    return max(1, math.ceil(wanted))
