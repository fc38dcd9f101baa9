"""Solvers of the reverse equation, dy = (A y − GGᵀ score) ds + G dB̄ with score = −L_s⁻ᵀ ε̂.

From s to an earlier t, h = s − t:

    Ancestral           y_t = r_t x̂ + M ε̂ + N ξ, the Gaussian q(y_t | y_s, x) with x̂ in place of x:
                        the step of Ho et al. (2020) for any number of variables, exact for a
                        single data point, whatever the step
    EulerMaruyama       y_t = y_s − h (A y_s − GGᵀ score) + √h G ξ
    Splitting           the reverse equation of a Gaussian law N(0, C), exactly, from the middle of
                        one step to the middle of the next; there, h GGᵀ(score + C⁻¹y) at once.
                        With C the prior's this is the symmetric splitting of Dockhorn et al.
                        (2022), SSCS, for any number of variables
    PredictorCorrector  an ancestral step, then y_t ← r_t x̂ + L_t (ρ ε̂ + √(1 − ρ²) ξ): Langevin
                        dynamics at that time, with Σ_t for its mass, exact for a single point

Both Gaussian steps are reversed by one orthogonal reduction: if (y_s, y_t) is the left matrix times
noise, and C_s = F_s F_sᵀ is the covariance of y_s,

    [ L_{s|t}  Φ F_t ]   [ F_s  0 ]
    [    0      F_t  ] = [  M   N ] · (orthonormal rows),    y_t | y_s = M F_s⁻¹ y_s + N ξ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ornstein.linalg import lq
from ornstein.process import TOLERANCE, Process
from ornstein.sampling.grids import Grid, whole
from ornstein.sampling.solvers import Route, Start, Step, Table, TableSolver, rows

Reference = Literal["data", "prior"]


@dataclass(frozen=True)
class Ancestral(TableSolver):
    """The Gaussian posterior of the earlier state, given this one and x̂."""

    def table(self, route: Route) -> Table:
        data, M, N = _ancestral(route)
        return Table(tuple(map(Step, rows(data), rows(M), N)))


@dataclass(frozen=True)
class EulerMaruyama(TableSolver):
    """The plain step of the reverse equation: for comparison, and for very many steps.

    By default even in log SNR: where the noise is large, its steps must be short to be stable.
    """

    steps: int = 1000
    grid: Grid = "logsnr"

    def table(self, route: Route) -> Table:
        process, late = route.process, route.grid[:-1]
        h = (late - route.grid[1:])[:, None, None]
        L, r = route.kernel.cholesky[:-1], route.kernel.response[:-1].unsqueeze(-1)
        moved = torch.eye(process.n_vars).to(L) - h * process.drift(late)
        pull = torch.linalg.solve_triangular(L.mT, process.diffusion(late), upper=True, left=False)
        noise, fresh = moved @ L - h * pull, h.sqrt() * process.noise_factor(late)
        return Table(tuple(map(Step, rows((moved @ r).squeeze(-1)), rows(noise), fresh)))


@dataclass(frozen=True)
class Splitting(TableSolver):
    """Gaussian dynamics solved exactly, and kicks by what the score adds to them.

    reference: whose dynamics: those of Gaussian "data" of the data's mean square, which every
        process has, or of the "prior", for processes that leave their prior as it is.
    """

    grid: Grid = "logsnr"
    reference: Reference = "data"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference not in ("data", "prior"):
            raise ValueError(f"reference={self.reference!r}; expected 'data' or 'prior'.")

    def looks(self, grid: Tensor) -> Tensor:
        return torch.cat([(grid[:-1] + grid[1:]) / 2, grid[-1:]])

    def table(self, route: Route) -> Table:
        process, middle = route.process, route.times[:-1]
        factor = self._factors(route)  # at T, then at all looks
        times = torch.cat([route.grid[:1], route.times])
        M, N = reversed_step(process, times[:-1], times[1:], factor[:-1], factor[1:])
        state = _right_solve(M, factor[:-1])  # y_s ↦ E[y_t | y_s]
        L, r = route.kernel.cholesky[:-1], route.kernel.response[:-1].unsqueeze(-1)
        GG, h = process.diffusion(middle), -route.grid.diff()[:, None, None]
        inverse = torch.linalg.solve_triangular(factor[1:-1], GG.mT, upper=False)
        pulled = torch.linalg.solve_triangular(factor[1:-1].mT, inverse, upper=True).mT  # GGᵀC⁻¹
        kicked = torch.eye(process.n_vars).to(L) + h * pulled
        pull = torch.linalg.solve_triangular(L.mT, GG, upper=True, left=False)
        noise, data = state[1:] @ (kicked @ L - h * pull), state[1:] @ kicked @ r
        steps = map(Step, rows(data.squeeze(-1)), rows(noise), N[1:])
        return Table(tuple(steps), Start(state[0], N[0]))

    def _factors(self, route: Route) -> Tensor:
        """F with F Fᵀ the covariance of the reference: (m + 2, K, K)."""
        process = route.process
        if self.reference == "prior":
            _check_stationary(process)
            prior = process.prior_factor
            return prior.expand(len(route.times) + 1, -1, -1)
        first = process.transition(route.grid[:1])
        L = torch.cat([first.cholesky, route.kernel.cholesky])
        r = torch.cat([first.response, route.kernel.response])
        return lq(torch.cat([L, route.scale * r.unsqueeze(-1)], -1))[0]


@dataclass(frozen=True)
class PredictorCorrector(TableSolver):
    """Ancestral steps, each followed by Langevin steps at the same time.

    corrections: how many after each step. strength: how much noise they replace, together, per
        unit of the log SNR λ that the step gained: ρ = exp(−strength·Δλ/corrections).
    """

    steps: int = 50
    corrections: int = 1
    strength: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self.corrections, "corrections", 1)
        if not (isinstance(self.strength, (int, float)) and 0 < self.strength < math.inf):
            raise ValueError(f"strength={self.strength!r}; expected a positive number, such as 1.")

    @property
    def looks_per_step(self) -> int:
        return 1 + self.corrections

    def looks(self, grid: Tensor) -> Tensor:
        return torch.cat([grid[:1], grid[1:].repeat_interleave(1 + self.corrections)])

    def table(self, route: Route) -> Table:
        every = slice(None, None, 1 + self.corrections)
        kernel = route.process.transition(route.times[every])
        data, M, N = _ancestral(Route(route.process, route.grid, route.grid, kernel, route.scale))
        gained = kernel.logsnr.diff()[:, None, None]
        keep, L = (-self.strength / self.corrections * gained).exp(), kernel.cholesky[1:]
        fresh = (1 - keep.square()).sqrt() * L
        predicted = map(Step, rows(data), rows(M), N)
        corrected = map(Step, rows(data), rows(keep * L), fresh)
        steps: list[Step] = []
        for one, other in zip(predicted, corrected, strict=True):
            steps += [one, *[other] * self.corrections]
        return Table(tuple(steps))


# ---------------------------------------------------------------- Gaussian steps back


def _ancestral(route: Route) -> tuple[Tensor, Tensor, Tensor]:
    """r_t, M and N of every step: (n, K), (n, K, K) each."""
    factor = route.kernel.cholesky
    M, N = reversed_step(route.process, route.grid[:-1], route.grid[1:], factor[:-1], factor[1:])
    return route.kernel.response[1:], M, N


def reversed_step(
    process: Process, late: Tensor, early: Tensor, known: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    """M and N, from the factors of y's law at both times: (n, K, K) each."""
    K = process.n_vars
    # not by process.transition: it would refuse short steps of processes in which noise takes
    # a long way to the data, for digits of L_{s|t} that are nothing next to L_s
    between = process.between(early, late)
    upper = torch.cat([between.cholesky, between.propagator @ own], -1)
    lower = torch.cat([torch.zeros_like(own), own], -1)
    factor, _ = lq(torch.cat([upper, lower], -2))
    found = torch.linalg.solve_triangular(known, factor[:, :K, :K], upper=False).detach()
    off = (found - torch.eye(K).to(found)).abs().amax((-2, -1))
    if not bool((off <= TOLERANCE).all()):  # what counts, and what makes the law of y_t right
        which = int(off.nan_to_num(math.inf).argmax())
        raise ValueError(
            f"the step of {process.name!r} from s = {late[which].item():.6g} has lost its "
            f"digits: L_s is off by {off[which].item():.1e}, expected at most {TOLERANCE:g}. "
            "Truncate the model later (model.with_truncation)."
        )
    return factor[:, K:, :K], factor[:, K:, K:]


def _right_solve(matrix: Tensor, factor: Tensor) -> Tensor:
    """matrix · factor⁻¹ of a lower factor."""
    return torch.linalg.solve_triangular(factor, matrix, upper=False, left=False)


def _check_stationary(process: Process) -> None:
    """Raise unless the process leaves its prior as it is."""
    times = process.horizon * torch.linspace(0.05, 1, 8).to(process.prior_covariance)
    A, P = process.drift(times), process.prior_covariance
    rest, GG = A @ P + P @ A.mT + process.diffusion(times), process.diffusion(times)
    if not bool(rest.abs().amax() <= TOLERANCE * GG.abs().amax()):
        raise ValueError(
            f"Splitting(reference='prior') can't take {process.name!r}, whose law moves away from "
            "its prior; expected a process with a stationary law (ornstein.Diffusion). Use "
            "reference='data', which takes every process."
        )
