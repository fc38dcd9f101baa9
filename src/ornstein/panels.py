"""Φ and L of a process whose matrices vary in time: power series on panels of s.

`clock` explains the method; here A(s) does not commute with itself, so that on a panel

    Φ(t+wu, t) = Σ_k X_k uᵏ,    Φ(t+wu, t)⁻¹ = Σ_k Y_k uᵏ,    (k+1) X_{k+1} = Σ_j a_j X_{k−j}

for wA = Σ_j a_j uʲ (interpolated), and Y solves the transposed equation. The noise since t is
Φ(u) [∫₀ᵘ F Fᵀ] Φ(u)ᵀ with F = Φ⁻¹G, again in Legendre columns that shrink like uʲ. Where the noise
has one scalar rate they are multiplied by the Cholesky factor of the rate's Gram matrix in these
polynomials (smooth or not, it is well-conditioned); where GGᵀ is any function of time, columns at
Gauss nodes are used. Earlier panels enter through Φ and L at the panel's start, found once for all
times by a logarithmic scan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ornstein.clock import DEGREE, DRIFT_DEGREE, STIFFNESS_LIMIT, Solved
from ornstein.linalg import Tables, lq, power_series, powers, safe_sqrt, semidefinite_factor

RESOLUTION = 1e-8  # the most that may be left out of a drift or diffusion on a panel
WIDEST = 64  # panels' worth of columns kept before they are reduced in the scan


@dataclass(frozen=True)
class Series:
    """The local power series of n panels: Φ = Σ X_k uᵏ, Φ⁻¹ = Σ Y_k uᵏ."""

    start: Tensor  # (n,) clock at the panels' left ends
    width: Tensor  # (n,)
    forward: Tensor  # (n, degree + 1, K, K): X
    backward: Tensor  # (n, degree + 1, K, K): Y


@dataclass(frozen=True)
class Places:
    """Points of the clock inside their panels."""

    index: Tensor  # (B,)
    ladder: Tensor  # (B, degree + 1) powers of u
    start: Tensor  # (B,) the panel's start
    length: Tensor  # (B,) clock since then
    propagator: Tensor  # (B, K, K) Φ since then


class Local(Protocol):
    """How a process moves inside one panel."""

    def locate(self, clock: Tensor) -> Places:
        """Panel and place in it of each value of the clock: (B,)."""
        ...

    def columns(self, at: Places) -> Tensor:
        """N with N Nᵀ = ∫ Φ GGᵀ Φᵀ from the panel's start to the place: (B, K, N)."""
        ...

    def resolution(self) -> Tensor:
        """What the panels may leave unresolved of the noise, relatively: ()."""
        ...


def _places(series: Series, index: Tensor, u: Tensor) -> Places:
    """Places u in the panels of these indices, both (B,)."""
    ladder, K = powers(u, DEGREE), series.forward.shape[-1]
    Phi = (ladder.unsqueeze(-1) * series.forward[index].flatten(2)).sum(-2)
    length = series.width[index] * u
    return Places(index, ladder, series.start[index], length, Phi.reshape(-1, K, K))


def _locate(series: Series, clock: Tensor) -> Places:
    # u ∈ (0, 1]. Not searchsorted: compiled for CUDA, torch 2.11 forgets where a slice starts.
    index = (clock.detach().unsqueeze(-1) > series.start[1:]).sum(-1)
    return _places(series, index, (clock - series.start[index]) / series.width[index])


@dataclass(frozen=True)
class Rated:
    """A any function of s, GGᵀ = rate(s)·ĜĜᵀ with one scalar rate."""

    series: Series
    F: Tensor  # (n, K·R, degree + 1): the power series of Φ⁻¹Ĝ
    rate: Callable[[Tensor], Tensor]
    table: Tables

    def locate(self, clock: Tensor) -> Places:
        return _locate(self.series, clock)

    def columns(self, at: Places) -> Tensor:
        """Legendre coefficients of Φ⁻¹Ĝ on [0, u], times the factor of ∫ rate P̂_i P̂_j, which is
        triangular, so that the columns still shrink."""
        table = self.table
        rate = self.rate(at.start.unsqueeze(-1) + at.length.unsqueeze(-1) * table.nodes)
        gram = (table.at_nodes * rate.unsqueeze(-2)) @ table.at_nodes.mT
        factor = torch.linalg.cholesky_ex(gram).L  # (B, P, P), condition ≤ that of the rate
        terms = self.F[at.index] * at.ladder.unsqueeze(-2)  # (B, K·R, degree + 1)
        columns = (terms @ table.moments) @ factor * safe_sqrt(at.length)[:, None, None]
        K = at.propagator.shape[-1]
        return at.propagator @ columns.unflatten(-2, (K, -1)).flatten(-2)

    def resolution(self) -> Tensor:
        """The rate is part of the drift, which is checked."""
        return self.series.width.new_zeros(())


@dataclass(frozen=True)
class General:
    """A and GGᵀ any functions of s."""

    series: Series
    diffusion: Callable[[Tensor], Tensor]
    table: Tables

    def locate(self, clock: Tensor) -> Places:
        return _locate(self.series, clock)

    def columns(self, at: Places) -> Tensor:
        """√weight Φ G at Gauss nodes."""
        table, (B, K) = self.table, at.propagator.shape[:2]
        N = table.nodes.shape[0]
        times = at.start.unsqueeze(-1) + at.length.unsqueeze(-1) * table.nodes  # (B, N)
        G = semidefinite_factor(self.diffusion(times))  # (B, N, K, K)
        ladder = at.ladder.unsqueeze(-2) * powers(table.nodes, DEGREE)  # (B, N, degree + 1)
        backward = (ladder @ self.series.backward.flatten(2)[at.index]).reshape(B, N, K, K)
        scale = (safe_sqrt(at.length).unsqueeze(-1) * table.weights.sqrt())[..., None, None]
        columns = (scale * (backward @ G)).transpose(-3, -2).flatten(-2)
        return at.propagator @ columns

    def resolution(self) -> Tensor:
        series, table = self.series, self.table
        times = series.start.unsqueeze(-1) + series.width.unsqueeze(-1) * table.lobatto
        values = self.diffusion(times).detach().flatten(2)  # (n, q + 1, K·K)
        return _unresolved(values, table) / values.abs().amax().clamp(min=1e-300)


@dataclass(frozen=True)
class Panels:
    """Φ(·, 0) and the factor, at any place of the clock."""

    local: Local
    past: Tensor  # (n, K, 2K): Φ from 0 to the panels' left ends | L given the state, there
    error: Tensor  # (n,) of that factor
    sound: Tensor  # () whether the panels are short enough for the matrices

    def at(self, clock: Tensor, initial: Tensor | None) -> Solved:
        """clock: (B,); initial: (K, R), a factor of the covariance at 0, None for a known state."""
        at = self.local.locate(clock)
        K = self.past.shape[-2]
        moved = at.propagator @ self.past[at.index]  # (B, K, 2K)
        Phi, columns = moved[..., :K], [moved[..., K:], self.local.columns(at)]
        if initial is not None:
            columns.insert(0, Phi @ initial)
        L, error = lq(torch.cat(columns, -1))
        if initial is None:
            error = torch.maximum(error, self.error[at.index])
        return Solved(Phi, L, error)


Noise = Callable[[Series, Tables], Local]  # what makes of a series a way to move inside panels


def rated(G: Tensor, rate: Callable[[Tensor], Tensor]) -> Noise:
    """Noise GGᵀ = rate(s)·ĜĜᵀ."""

    def local(series: Series, table: Tables) -> Local:
        F = (series.backward @ G).flatten(2).mT.contiguous()
        return Rated(series, F, rate, table)

    return local


def general(diffusion: Callable[[Tensor], Tensor]) -> Noise:
    """Noise GGᵀ(s)."""
    return lambda series, table: General(series, diffusion, table)


def varying(
    drift: Callable[[Tensor], Tensor], noise: Noise, edges: Tensor, table: Tables
) -> Panels:
    """A and G functions of s, on the panels between the given edges: (n + 1,)."""
    series, sound = _solve(drift, edges[:-1], edges[1:] - edges[:-1], table)
    local, n = noise(series, table), edges.shape[0] - 1
    Phi, columns, error = _whole(series, local)
    K = Phi.shape[-1]
    eye = torch.eye(K, dtype=Phi.dtype, device=Phi.device)
    step = 1
    while step < n:  # windows of panels that double in length
        before = torch.cat([torch.zeros_like(columns[:step]), columns[:-step]])
        columns = torch.cat([columns, Phi @ before], -1)
        Phi = Phi @ torch.cat([eye.expand(step, K, K), Phi[:-step]])
        step *= 2
        if columns.shape[-1] > WIDEST * K:
            columns = lq(columns)[0]
    past = torch.cat([torch.cat([eye[None], Phi[:-1]]), _after_first(columns[:-1])], -1)
    error = torch.cat([torch.zeros_like(error[:1]), torch.cummax(error, 0).values[:-1]])
    return Panels(local, past, error, sound & (local.resolution() <= RESOLUTION))


def between(
    drift: Callable[[Tensor], Tensor],
    noise: Noise,
    edges: Tensor,
    start: Tensor,
    end: Tensor,
    table: Tables,
) -> Solved:
    """From start to end given the state at start, each (B,), for A and G functions of s.

    Each pair gets the panels of `edges` clipped to its interval (n a power of two).
    """
    start, end = start.unsqueeze(-1), end.unsqueeze(-1)
    clipped = torch.where(
        edges >= end, end, edges
    )  # (min and max would halve the gradient of a tie)
    clipped = torch.where(clipped <= start, start, clipped)
    series, _ = _solve(drift, clipped[:, :-1].flatten(), clipped.diff(dim=-1).flatten(), table)
    sizes = (clipped.shape[0], edges.shape[0] - 1)
    Phi, columns, error = (t.unflatten(0, sizes) for t in _whole(series, noise(series, table)))
    while Phi.shape[1] > 1:  # pairs of neighbours, the later one after the earlier
        later = Phi[:, 1::2]
        columns = torch.cat([columns[:, 1::2], later @ columns[:, 0::2]], -1)
        Phi = later @ Phi[:, 0::2]
    L, last = lq(columns[:, 0])
    return Solved(Phi[:, 0], L, torch.maximum(last, error.amax(-1)))


def _solve(
    drift: Callable[[Tensor], Tensor], start: Tensor, width: Tensor, table: Tables
) -> tuple[Series, Tensor]:
    """Interpolate wA on each panel and solve Φ′ = AΦ in powers of u; also whether that is sound."""
    A = drift(start.unsqueeze(-1) + width.unsqueeze(-1) * table.lobatto)  # (n, q + 1, K, K)
    values = (A * width[:, None, None, None]).flatten(2)
    K, n = A.shape[-1], A.shape[0]
    a = table.interpolation @ values  # coefficients of 1, u, …
    a = a + table.interpolation @ (values - table.vandermonde @ a)  # and what rounding left out
    a = a.unflatten(-1, (K, K))
    X = power_series(torch.cat([a, -a.mT]), DEGREE)  # Φ⁻¹ solves the transposed equation
    stiffness = torch.linalg.vector_norm(values.detach(), dim=-1).amax()
    sound = (stiffness <= STIFFNESS_LIMIT) & (_unresolved(values.detach(), table) <= RESOLUTION)
    return Series(start, width, X[:n], X[n:].mT), sound


def _unresolved(values: Tensor, table: Tables) -> Tensor:
    """The largest last Chebyshev coefficient of functions known at Lobatto nodes: (n, q + 1, m)."""
    return (table.interpolation[-1] @ values).abs().amax() / 2 ** (2 * DRIFT_DEGREE - 1)


def _whole(series: Series, local: Local) -> tuple[Tensor, Tensor, Tensor]:
    """Φ, L and its error over each whole panel: (n, K, K), (n, K, K), (n,)."""
    index = torch.arange(series.start.shape[0], device=series.start.device)
    at = _places(series, index, torch.ones_like(series.start))
    L, error = lq(local.columns(at))
    return at.propagator, L, error


def _after_first(columns: Tensor) -> Tensor:
    """Factors at the starts of all panels: zero, then those of columns, (n - 1, K, N)."""
    K = columns.shape[-2]
    zero = columns.new_zeros(1, K, K)
    return torch.cat([zero, lq(columns)[0]]) if columns.shape[0] else zero
