"""Φ and L of a process on one clock τ: dy = A y dτ + G dB with A and G constant.

Cut [0, τ_T] into panels of width w, ‖wA‖ ≤ 2, and write u ∈ [0, 1] for the place in one. There

    Φ(u) = Σ_k X_k uᵏ,  X_k = (wA)ᵏ/k!,

and the noise gathered since the panel's start is ∫₀ᵘ F Fᵀ with F(r) = Φ(r) G. Expanding F in the
orthonormal Legendre polynomials of [0, u] makes of the integral a *finite sum of squares*:

    ∫₀ᵘ F Fᵀ = Σ_j C_j C_jᵀ,   C_j = √(wu) Σ_{k≥j} uᵏ X_k G ⟨rᵏ, P̂_j⟩ = O(uʲ).

The columns C_j shrink like uʲ *by construction*, so the orthogonal reduction of `linalg.lq` keeps
the relative accuracy of the tiny directions of a hypoelliptic process at short times. (Columns at
quadrature nodes are all of one size and nearly parallel; a covariance formed first is worse.)

At the start of the i-th panel Φ is the i-th power of Φ(1) =: Φ₁, and L has the columns Φ₁ʲ L₁ of
the i panels before it. All times of a batch share X, C's coefficients and this table: per time
there is one small product with the powers of u and one reduction, on a GPU a single kernel where no
gradient is wanted (`gpu`). For a fixed process the table is kept; for a learned one it is rebuilt,
and the gradient of all of it is written out below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ornstein import gpu
from ornstein.linalg import (
    EPS,
    Tables,
    matrix_powers,
    matrix_powers_vjp,
    orthogonal_reduction,
    powers,
    powers_vjp,
    product,
    reduction_vjp,
    zero_where_undefined,
)

DEGREE = 24  # of the power series: 2²⁵/25! = 2e-18
COLUMNS = 10  # Legendre columns per noise: the first left out is 7e-9 of the first, squared in Σ
NODES = 16  # Gauss nodes where quadrature is used: exact to degree 31
DRIFT_DEGREE = 8  # of the polynomial that stands for a varying drift on a panel
STIFFNESS = 2.0  # ‖wA‖ that panels are planned for …
STIFFNESS_LIMIT = 3.0  # … and the largest at which the series still has 1e-13
MOST_PANELS = 2048
CHUNK = 128  # panels whose factors are found at a time where no gradient is wanted


def constants(device: torch.device) -> Tables:
    """The constants of the series on a device."""
    return Tables.on(device, DEGREE, COLUMNS, NODES, DRIFT_DEGREE)


def panel_count(stiffness: float, headroom: float = 1.0) -> int:
    """A power of two of panels for a total ∫‖A‖ of `stiffness`."""
    if stiffness > STIFFNESS * MOST_PANELS:
        raise ValueError(
            f"the process is too stiff: ∫‖A‖ over its horizon is {stiffness:.3g}; expected at most "
            f"{STIFFNESS * MOST_PANELS:g}. It has forgotten everything long before: end its clock "
            "earlier (smaller rates or horizon)."
        )
    if not math.isfinite(stiffness):
        raise ValueError(
            f"the matrices of the process have size {stiffness:g}; expected finite numbers. Look "
            "for a parameter that is NaN or infinite."
        )
    panels = max(0, math.ceil(math.log2(max(stiffness * headroom / STIFFNESS, 1.0))))
    return min(2**panels, MOST_PANELS)


@dataclass(frozen=True)
class Solved:
    """A solution at a batch of times."""

    propagator: Tensor  # (B, K, K)
    cholesky: Tensor  # (B, K, K)
    error: Tensor  # (B,) relative rounding error of diag L


@dataclass(frozen=True)
class Table:
    """What all times share."""

    width: Tensor  # ()
    X: Tensor  # (degree + 1, K, K)
    spread: Tensor  # (degree + 1, K·P·R): the coefficients of C
    past: Tensor  # (n, K, 2K): Φ | L at the panels' starts
    error: Tensor  # (n,) of that L

    @property
    def sizes(self) -> tuple[int, int]:
        """K and P·R."""
        K = self.X.shape[-1]
        return K, self.spread.shape[-1] // K

    def parts(self) -> list[Tensor]:
        """What it takes to look a time up, as `gpu.look_up` wants it."""
        width = torch.stack([self.width, 1 / self.width])
        return [width, self.X, self.spread, self.past, self.error]


@dataclass(frozen=True)
class Rows:
    """What else the gradient of a table needs."""

    whole: Tensor  # (1, K, K): L₁
    whole_rows: Tensor  # (1, K, P·R)
    past_rows: Tensor  # (n - 1, K, n·K)
    generator_powers: Tensor  # (degree + 1, K, K)


@dataclass(frozen=True)
class Clock:
    """The solution as a function of the clock."""

    drift: Tensor  # (K, K)
    G: Tensor  # (K, R)
    total: Tensor  # ()
    count: int
    earlier: Tensor  # see `earlier`
    constants: Tables
    table: Table | None = None  # kept where nothing about the process is learned, or for a while
    fits: Tensor | None = None  # kept too
    parts: list[Tensor] | None = None  # of the table, without gradient
    span: Tensor | None = None  # (a, b, horizon, tolerance) where τ = s(a + b s): see `guarded`

    @property
    def sound(self) -> Tensor:
        """Whether the panels still fit the matrices: ()."""
        if self.fits is not None:
            return self.fits
        stiffness = torch.linalg.vector_norm(self.drift.detach()) * self.total.detach() / self.count
        return stiffness <= STIFFNESS_LIMIT

    def kept(self, span: Tensor | None = None) -> Clock:
        """The same with its table computed once; NaN if its panels do not fit."""
        table, sound = _tabulate(self.drift, self.G, self.total, self, False)[0], self.sound
        table = replace(table, past=torch.where(sound, table.past, math.nan))
        return replace(self, table=table, fits=sound, parts=table.parts(), span=span)

    def tabulated(self) -> Clock:
        """The same with its table computed once, and its gradient with it."""
        if self.table is not None:
            return self
        table = self._tabulated()
        with torch.no_grad():
            return replace(self, table=table, fits=self.sound, parts=table.parts())

    def at(self, tau: Tensor, initial: Tensor | None) -> Solved:
        """tau: (B,); initial: (K, R), a factor of the covariance at 0, None for a known state."""
        inputs = self.drift, self.G, self.total, tau, initial
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            table = self._tabulated() if self.table is None else self.table
            moves = self.total.requires_grad or tau.requires_grad
            parts = table.width, table.X, table.spread, table.past, table.error
            return Solved(*_LookUp.apply(*parts, tau, initial, moves))  # type: ignore[no-untyped-call]
        table = self.table or _tabulate(self.drift, self.G, self.total, self, False)[0]
        if gpu.looks_up(tau, *table.sizes, initial):
            return Solved(*gpu.look_up(tau, None, self.parts or table.parts(), initial, EPS))
        found = _look_up(table, tau, initial, False)
        return Solved(found.Phi, found.L, found.error)

    def _tabulated(self) -> Table:
        """With a gradient where one is wanted."""
        inputs = self.drift, self.G, self.total
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
            return Table(*_Tabulate.apply(*inputs, self))  # type: ignore[no-untyped-call]
        return _tabulate(*inputs, self, False)[0]

    def guarded(self, s: Tensor, initial: Tensor | None) -> Solved | None:
        """The same at times s, (B,), NaN where it would be wrong; None if one kernel can't do it.

        For fixed processes, inside graphs.
        """
        if self.table is None or self.parts is None or self.span is None:
            return None
        learned = s.requires_grad or (initial is not None and initial.requires_grad)
        if learned or not gpu.looks_up(s, *self.table.sizes, initial):
            return None
        return Solved(*gpu.look_up(s, self.span, self.parts, initial, EPS))


def _tabulate(
    drift: Tensor, G: Tensor, total: Tensor, clock: Clock, with_rows: bool
) -> tuple[Table, Rows]:
    K, count, const = drift.shape[-1], clock.count, clock.constants
    width = total / count
    ladder = matrix_powers(drift * width, DEGREE + 1)
    X = ladder * const.inverse_factorials[:, None, None]
    spread = (product(X, G).unsqueeze(2) * const.moments[:, None, :, None]).flatten(1)
    whole, whole_rows, error = orthogonal_reduction(
        (spread.sum(0) * width.sqrt()).reshape(1, K, -1)
    )
    Phi = matrix_powers(X.sum(0), count)
    columns = product(Phi, whole).transpose(0, 1).reshape(1, K, -1)
    factors, past_rows = [columns.new_zeros(1, K, K)], columns
    chunk = count if with_rows else CHUNK  # the rows are for the gradient, and large
    for first in range(0, count - 1, chunk):
        last = min(first + chunk, count - 1)
        mask = clock.earlier[first:last, :, : (last + 1) * K]
        later, past_rows, _ = orthogonal_reduction(columns[..., : (last + 1) * K] * mask, with_rows)
        factors.append(later)
    past = torch.cat([Phi, torch.cat(factors)], -1)
    errors = torch.cat([torch.zeros_like(error), error.expand(count - 1)])
    rows = Rows(whole, whole_rows, past_rows, ladder)
    return Table(width, X, spread, past, errors), rows


def earlier(count: int, K: int, device: torch.device) -> Tensor:
    """Which columns of all panels lie before the second, third, … one: (n - 1, 1, n·K)."""
    steps = torch.arange(count, device=device)
    return (steps[1:, None] > steps).repeat_interleave(K, -1).unsqueeze(-2)


@dataclass(frozen=True)
class _Places:
    """Φ, L and error at places of the clock, and what the gradient needs of them."""

    Phi: Tensor  # (B, K, K)
    L: Tensor  # (B, K, K)
    error: Tensor  # (B,)
    rows: Tensor  # (B, K, N)
    ratio: Tensor  # (B,) the clock in panels
    u: Tensor  # (B,)
    index: Tensor  # (B,)
    ladder: Tensor  # (B, degree + 1)
    local: Tensor  # (B, K, K)
    root: Tensor  # (B, 1)
    fresh: Tensor  # (B, K, P·R)


def _look_up(table: Table, tau: Tensor, initial: Tensor | None, with_rows: bool) -> _Places:
    """`gpu.look_up` in tensor operations."""
    count, K = table.past.shape[:2]
    ratio = tau / table.width
    # u ∈ (0, 1]: a panel's end is its own, since √u has no slope at 0; a time that is NaN is on the
    # first panel, and u is NaN
    index = torch.where(ratio > 0, (ratio.ceil() - 1).clamp(max=count - 1), 0.0)
    u, index = ratio - index, index.long()
    ladder = powers(u, DEGREE)
    local = (ladder @ table.X.flatten(1)).reshape(-1, K, K)
    root = (u * table.width).sqrt().unsqueeze(-1)
    fresh = (ladder @ table.spread * root).unflatten(-1, (K, -1))
    moved = product(local, table.past[index])  # (B, K, 2K)
    Phi = moved[..., :K].contiguous()
    columns = [moved[..., K:], fresh]
    if initial is not None:
        columns.insert(0, product(Phi, initial))
    L, rows, error = orthogonal_reduction(torch.cat(columns, -1), with_rows)
    if initial is None:
        error = torch.maximum(error, table.error[index])
    return _Places(Phi, L, error, rows, ratio, u, index, ladder, local, root, fresh)


class _LookUp(torch.autograd.Function):
    """(table, τ, L₀) -> (Φ, L, error) with its gradient: one node instead of a hundred."""

    @staticmethod
    def forward(
        ctx: Any,
        width: Tensor,
        X: Tensor,
        spread: Tensor,
        past: Tensor,
        error: Tensor,
        tau: Tensor,
        initial: Tensor | None,
        moves: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        at = _look_up(Table(width, X, spread, past, error), tau, initial, True)
        ctx.given_x, ctx.moves = initial is not None, moves
        places = at.ratio, at.u, at.index, at.ladder, at.local, at.root, at.fresh
        ctx.save_for_backward(width, X, spread, past, initial, *places, at.Phi, at.L, at.rows)
        ctx.mark_non_differentiable(at.error)
        return at.Phi, at.L, at.error

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gPhi: Tensor, gL: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        width, X, spread, past, initial, *places, Phi, L, rows = ctx.saved_tensors
        ratio, u, index, ladder, local, root, fresh = places
        K = X.shape[-1]
        columns = reduction_vjp(L, rows, gL)
        gInitial = None
        if ctx.given_x:
            gStart, columns = columns.split(
                [initial.shape[-1], columns.shape[-1] - initial.shape[-1]], -1
            )
            gPhi = gPhi + product(gStart, initial.mT)
            if ctx.needs_input_grad[6]:
                gInitial = (Phi.mT @ gStart).sum(0)
        gMoved = torch.cat([gPhi, columns[..., :K]], -1)
        gLocal = (gMoved @ past[index].mT).flatten(1)
        gFresh = columns[..., K:]
        gScaled = gFresh.flatten(1) * root
        gTau = gWidth = gX = gSpread = gPast = None
        if ctx.moves:  # the clock itself: times, or a learned rate
            gLength = zero_where_undefined((gFresh * fresh).sum((-2, -1)) / (2 * u * width))
            gLadder = gScaled @ spread.mT + gLocal @ X.flatten(1).mT
            gTau = powers_vjp(ladder, gLadder) / width + gLength
            gWidth = (gLength * u - gTau * ratio).sum()
        if ctx.needs_input_grad[1]:
            gX = (ladder.mT @ gLocal).reshape(X.shape)
            gSpread = ladder.mT @ gScaled
            gPast = torch.zeros_like(past).index_add_(0, index, product(local.mT, gMoved))
        return gWidth, gX, gSpread, gPast, None, gTau, gInitial, None


class _Tabulate(torch.autograd.Function):
    """(A, G, τ_T) -> the table, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, drift: Tensor, G: Tensor, total: Tensor, clock: Clock
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        table, rows = _tabulate(drift, G, total, clock, True)
        ctx.clock, ctx.rows, ctx.learned_rate = clock, rows, total.requires_grad
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(drift, G, table.width, table.X, table.spread, table.past)
        ctx.mark_non_differentiable(table.error)
        return table.width, table.X, table.spread, table.past, table.error

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any,
        gWidth: Tensor | None,
        gX: Tensor | None,
        gSpread: Tensor | None,
        gPast: Tensor | None,
        _: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        drift, G, width, X, spread, past = ctx.saved_tensors
        rows, const, count, K = ctx.rows, ctx.clock.constants, ctx.clock.count, drift.shape[-1]
        if gX is None or gSpread is None or gPast is None:  # nothing was looked up
            return None, None, None, None
        gPowers, gFactor = gPast.split(K, -1)
        powers_of_Phi, factor, scale = past[..., :K], past[..., K:], width.sqrt()
        gRoot: Tensor | float = 0.0
        if count > 1:
            gColumns = reduction_vjp(factor[1:], rows.past_rows, gFactor[1:])
            gColumns = (gColumns * ctx.clock.earlier).sum(0)
            gBlocks = gColumns.reshape(K, count, K).transpose(0, 1)
            gPowers = gPowers + product(gBlocks, rows.whole.mT)
            gWhole = product(powers_of_Phi.mT, gBlocks).sum(0, keepdim=True)
            gSum = reduction_vjp(rows.whole, rows.whole_rows, gWhole).reshape(-1)
            gRoot = (gSum * spread.sum(0)).sum()
            gSpread = gSpread + gSum * scale
            gX = gX + matrix_powers_vjp(powers_of_Phi, gPowers)
        gNoise = (
            gSpread.reshape(DEGREE + 1, K, -1, G.shape[-1]) * const.moments[:, None, :, None]
        ).sum(2)
        gG = product(X.mT, gNoise).sum(0)
        gX = (gX + product(gNoise, G.mT)) * const.inverse_factorials[:, None, None]
        gGenerator = matrix_powers_vjp(rows.generator_powers, gX)
        gTotal = None
        if ctx.learned_rate:
            gTotal = ((gGenerator * drift).sum() + gRoot / (2 * scale)) / count
            gTotal = gTotal if gWidth is None else gTotal + gWidth / count
        return gGenerator * width, gG, gTotal, None
