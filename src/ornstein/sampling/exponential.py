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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ornstein.linalg import semidefinite_factor
from ornstein.process import Process
from ornstein.sampling.collocation import collocated, gauss_rule
from ornstein.sampling.solvers import Route, Step, Table, TableSolver, rows

LENGTH = 0.5  # of a panel, measured by the size of what is integrated
MOST_PANELS = 256
LOOK = 33  # times at which that size is looked at, in each step


@dataclass(frozen=True)
class Exponential(TableSolver):
    """Linear part exact, the model's estimate extrapolated; deterministic unless told otherwise.

    order: 1 is DDIM (gDDIM for two variables); 2 and 3 extrapolate over as many looks.
    extrapolate: "data" takes x̂, as DPM-Solver++ does, "noise" takes ε̂, as DEIS does. They agree
        for the first order.
    stochasticity: η as above: 0 is the probability flow, 1 the reverse equation.
    """

    steps: int = 50
    order: Literal[1, 2, 3] = 2
    stochasticity: float = 0.0
    extrapolate: Literal["data", "noise"] = "data"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in (1, 2, 3):
            raise ValueError(f"order={self.order!r}; expected 1, 2 or 3.")
        eta = self.stochasticity
        if not (isinstance(eta, (int, float)) and 0 <= eta < math.inf):
            raise ValueError(f"stochasticity={eta!r}; expected a number ≥ 0, such as 0 or 1.")
        if self.extrapolate not in ("data", "noise"):
            raise ValueError(f"extrapolate={self.extrapolate!r}; expected 'data' or 'noise'.")
        if self.extrapolate == "noise" and eta > 0:
            raise ValueError(
                f"extrapolate='noise' with stochasticity={eta!r}; expected 0, since the noise of a "
                "stochastic step is new. Use extrapolate='data'."
            )

    def table(self, route: Route) -> Table:
        kernel, eta = route.kernel, float(self.stochasticity)
        late, early = route.grid[:-1], route.grid[1:]
        L, r = kernel.cholesky[1:], kernel.response[1:]
        nodes = _nodes(kernel.logsnr, self.order)
        if self.extrapolate == "noise":
            return _of_noise(route.process, late, early, L, r, nodes)
        V, q = turned(route.process, late, early, eta, nodes)
        past = (L @ q).unbind(-1)
        data = rows(r - sum(past, start=torch.zeros_like(r)), *past)
        fresh: Sequence[Tensor | None] = [None] * len(late)
        if eta > 0:
            fresh = (L @ semidefinite_factor(torch.eye(len(r.mT)).to(V) - V @ V.mT)).unbind(0)
        return Table(tuple(map(Step, data, rows(L @ V), fresh)))


@dataclass(frozen=True)
class Heun(TableSolver):
    """The trapezoidal rule on the probability flow, y' = r'x̂ + R'η̂: two looks a step, order 2.

    With R = L V as above and η̂ = V⁻¹ε̂ (the noise in a frame that turns with the flow), both x̂ and
    η̂ would stand still for a single data point. The first look predicts by standing still, the
    second one is averaged with it; for VESDE this is the sampler of Karras et al. (2022).
    """

    steps: int = 25

    @property
    def looks_per_step(self) -> int:
        return 2

    def looks(self, grid: Tensor) -> Tensor:
        return torch.cat([grid[:1], grid[1:].repeat_interleave(2)])

    def table(self, route: Route) -> Table:
        late, early = route.grid[:-1], route.grid[1:]
        L, r = route.kernel.cholesky[::2], route.kernel.response[::2]
        V, _ = turned(route.process, late, early, 0.0, late.new_zeros(len(late), 1))
        R, back = L[1:] @ V, V.mT  # V is orthogonal
        predicted = map(Step, rows(r[1:]), rows(R), [None] * len(late))
        # y_s + ½(r_t − r_s)(x̂_s + x̂_t) + ½(R_t − R_s)(ε̂_s + V⁻¹ε̂_t) with y_s = r_s x̂_s + L_s ε̂_s
        data = rows((r[1:] - r[:-1]) / 2, (r[1:] + r[:-1]) / 2)
        noise = rows((R - L[:-1]) @ back / 2, (R + L[:-1]) / 2)
        corrected = map(Step, data, noise, [None] * len(late))
        pairs = zip(predicted, corrected, strict=True)
        return Table(tuple(step for pair in pairs for step in pair))


def _of_noise(
    process: Process, late: Tensor, early: Tensor, L: Tensor, r: Tensor, nodes: Tensor
) -> Table:
    """y_t = r_t x̂₀ + L_t [V ε̂₀ + Σ_j P_j (V_j ε̂_j − ε̂₀)], V_j from the look j to this one."""
    V, P = turned_noise(process, late, early, nodes)
    newest, past = L @ V, list[Tensor]()
    frame = torch.eye(V.shape[-1]).to(V).expand_as(V)
    for j in range(P.shape[1]):
        # from one look further back: V of the step that led to this one, and of those before
        frame = frame @ torch.cat([V.new_zeros(1 + j, *V.shape[1:]), V[: len(V) - 1 - j]])[: len(V)]
        weight = L @ P[:, j]
        newest, past = newest - weight, [*past, weight @ frame]
    return Table(tuple(map(Step, rows(r), rows(newest, *past), [None] * len(late))))


def _nodes(logsnr: Tensor, order: int) -> Tensor:
    """λ of the looks that each step knows, the newest first: (n, order), NaN where none is."""
    n = len(logsnr) - 1
    columns = []
    for back in range(order):
        gap = logsnr.new_full((min(back, n),), math.nan)
        columns.append(torch.cat([gap, logsnr[: n - len(gap)]]))
    return torch.stack(columns, 1)


def turned_noise(
    process: Process, late: Tensor, early: Tensor, nodes: Tensor
) -> tuple[Tensor, Tensor]:
    """V and P_j of every step: (n, K, K), (n, order − 1, K, K).

    With ε̂ in place of x̂ the flow is z' = (K − ½W) z + ½W V η̂, and V, P₁, … solve one equation.
    """
    n, K, extra = len(late), process.n_vars, nodes.shape[1] - 1
    start = torch.cat([torch.eye(K), torch.zeros(extra * K, K)]).to(late).expand(n, -1, -1)

    def field(places: Tensor) -> tuple[Tensor, Tensor]:
        turn, W, _, logsnr = _field(process, places)
        shares = _lagrange(logsnr, nodes).unbind(-1)
        zero = torch.zeros_like(W)
        lines = [torch.cat([turn, *[zero] * extra], -1)]
        for j, share in enumerate(shares):
            own = [turn - W / 2 if i == j else zero for i in range(extra)]
            lines.append(torch.cat([share[..., None, None] * W / 2, *own], -1))
        wide = torch.cat(lines, -2)
        return wide, wide.new_zeros(*wide.shape[:-1], K)

    found = _solved(process, late, early, 1.0, start, field)
    return found[:, :K], found[:, K:].unflatten(1, (extra, K))


def turned(
    process: Process, late: Tensor, early: Tensor, eta: float, nodes: Tensor
) -> tuple[Tensor, Tensor]:
    """V and q of every step, by collocation: (n, K, K), (n, K, order − 1)."""
    n, K, extra = len(late), process.n_vars, nodes.shape[1] - 1
    start = torch.cat([torch.eye(K), torch.zeros(K, extra)], -1).to(late).expand(n, -1, -1)  # V | q

    def field(places: Tensor) -> tuple[Tensor, Tensor]:
        turn, W, pull, logsnr = _field(process, places)
        push = -(1 + eta**2) / 2 * pull.unsqueeze(-1) * _lagrange(logsnr, nodes).unsqueeze(-2)
        return turn + eta**2 / 2 * W, torch.cat([torch.zeros_like(W), push], -1)

    found = _solved(process, late, early, eta, start, field)
    return found[..., :K], found[..., K:]


Field = Callable[[Tensor], tuple[Tensor, Tensor]]  # log s (n, p) -> F (n, p, N, N), b (n, p, N, M)


def _solved(
    process: Process, late: Tensor, early: Tensor, eta: float, start: Tensor, field: Field
) -> Tensor:
    """Y at the end of every step, where dY/dlog s = F Y + b: (n, N, M)."""
    rule, low, high = gauss_rule(late.device), early.log(), late.log()
    panels = _panels(process, low.detach(), high.detach(), eta)
    width, number = (high - low) / panels, torch.arange(panels).to(low)
    first = high.unsqueeze(-1) - width.unsqueeze(-1) * number
    places = first.unsqueeze(-1) - width[:, None, None] * rule.nodes  # (n, P, p), going back
    F, b = (part.unflatten(1, (panels, -1)) for part in field(places.flatten(1)))
    back = -width[:, None, None, None, None]
    moved, pushed = collocated(back * F, back * b, rule)
    answer = start
    for panel in range(panels):
        answer = moved[:, panel] @ answer + pushed[:, panel]
    return answer


def _field(process: Process, places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """At places log s: sK and sW, (…, K, K); sWa, (…, K); and log SNR, (…)."""
    s = places.exp().clamp(max=process.horizon)
    kernel = process.transition(s)
    L, A = kernel.cholesky, process.drift(s)
    inside = torch.linalg.solve_triangular(L, A @ L, upper=False)
    G = torch.linalg.solve_triangular(L, process.noise_factor(s), upper=False)
    W, scale = G @ G.mT, s[..., None, None]
    upper = (inside + W / 2).triu(1)
    pull = (W @ kernel.signal.unsqueeze(-1)).squeeze(-1)
    return scale * (upper - upper.mT), scale * W, s.unsqueeze(-1) * pull, kernel.logsnr


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
                both = (known[:, j] & known[:, k]).unsqueeze(-1)
                gap = torch.where(both, safe[:, None, j] - safe[:, None, k], 1.0)
                value = torch.where(both, value * (at - safe[:, None, k]) / gap, value)
        parts.append(torch.where(known[:, None, j], value, 0.0))
    return torch.stack(parts, -1) if parts else at.new_zeros(*at.shape, 0)


def _panels(process: Process, low: Tensor, high: Tensor, eta: float) -> int:
    """How many panels the longest step needs."""
    part = torch.linspace(0, 1, LOOK, dtype=torch.float64, device=low.device)
    with torch.no_grad():
        turn, W, _, _ = _field(process, low[:, None] + (high - low)[:, None] * part)
    size = torch.linalg.matrix_norm(turn + eta**2 / 2 * W).mean(-1) * (high - low)
    wanted = max(size.max().item(), (high - low).max().item() / 2) / LENGTH
    if not wanted <= MOST_PANELS:
        raise ValueError(
            f"a step of {process.name!r} is too long to be solved exactly: it would take "
            f"{wanted:.0f} panels, at most {MOST_PANELS}. Take more steps, or a smaller "
            "stochasticity."
        )
    return max(1, math.ceil(wanted))
