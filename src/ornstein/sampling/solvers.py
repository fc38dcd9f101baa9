"""Solvers: from the prior to data, along the reverse of the process.

A solver goes from T down to ε on a grid of times. At every one of them the model is asked for
x̂ = E[x | y_s], and ε̂ = L_s⁻¹(y_s − r_s x̂) is what is then left as noise. From s to an earlier t

    Ancestral       y_t = r_t x̂ + M ε̂ + N ξ, the Gaussian q(y_t | y_s, x) with x̂ in place of x:
                    the step of Ho et al. (2020) for any number of variables. Given x, (y_s, y_t)
                    is r x plus the left matrix times noise, and an orthogonal reduction gives

                        [ L_{s|t}  Φ L_t ]   [ L_s  0 ]
                        [    0      L_t  ] = [  M   N ] · (orthonormal rows);

                    exact for a single data point, whatever the step
    EulerMaruyama   y_t = y_s − h (A y_s − GGᵀ score) + √h G ξ,  score = −L_s⁻ᵀ ε̂,  h = s − t

and ξ is new noise. The sample is x̂ at ε, as data. Every sample has its own noise, a function of
the seed and of its number. The state is float64, since whitening it cancels; the network gets its
own type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.linalg import orthogonal_reduction
from ornstein.process import TOLERANCE
from ornstein.sampling.way import GRIDS, Grid, Noise, Seen, Stop, Walk, Way, whole
from ornstein.transition import mix


@dataclass(frozen=True)
class Solver(ABC):
    """How to go back: on which times, and what is done between them."""

    steps: int = 100
    grid: Grid = "information"

    def __post_init__(self) -> None:
        whole(self.steps, "steps", 1)
        if self.grid not in GRIDS:
            raise ValueError(f"grid={self.grid!r}; expected one of {', '.join(GRIDS)}.")

    @abstractmethod
    def prepare(self, way: Way) -> Walk:
        """Compute what all samples share; what is returned takes a batch along the way."""


@dataclass(frozen=True)
class Moves:
    """The steps of a linear solver: y_t = state·y_s + data·x̂ + noise·ε̂ + fresh·ξ."""

    state: Tensor | None  # (n, K, K)
    data: Tensor | None  # (n, K)
    noise: Tensor  # (n, K, K)
    fresh: Tensor  # (n, K, R)

    def step(self, i: int, y: Tensor, seen: Seen, new: Tensor) -> Tensor:
        """From time i to the next one: (B, K, d)."""
        one = slice(i, i + 1)
        onto = mix(self.noise[one], seen.noise)
        if self.data is not None:
            onto = mix(self.data[one].unsqueeze(-1), seen.x.unsqueeze(1), onto)
        if self.state is not None:
            onto = mix(self.state[one], y, onto)
        return mix(self.fresh[one], new, onto)


class LinearSolver(Solver):
    """One look at the model in each step, and a step that is linear in what was seen."""

    @abstractmethod
    def moves(self, way: Way) -> Moves:
        """The matrices of all steps."""

    def prepare(self, way: Way) -> Walk:
        moves = self.moves(way)

        def walk(y: Tensor, draw: Noise) -> Iterator[Stop]:
            for i in range(len(moves.noise)):
                seen = way.look(i, y)
                y = moves.step(i, y, seen, draw("step", i + 1, moves.fresh.shape[-1]))
                yield Stop(y, seen.x)

        return walk


@dataclass(frozen=True)
class Ancestral(LinearSolver):
    """The Gaussian posterior of the earlier state, given this one and x̂."""

    def moves(self, way: Way) -> Moves:
        process, known, own = way.model.process, way.kernel.cholesky[:-1], way.kernel.cholesky[1:]
        K = process.n_vars
        # not by process.transition: it would refuse short steps of processes in which noise takes
        # a long way to the data, for digits of L_{s|t} that are nothing next to L_s
        between = process.between(way.times[1:], way.times[:-1])
        upper = torch.cat([between.cholesky, between.propagator @ own], -1)
        lower = torch.cat([torch.zeros_like(own), own], -1)
        factor, _, _ = orthogonal_reduction(torch.cat([upper, lower], -2), with_rows=False)
        found = torch.linalg.solve_triangular(known, factor[:, :K, :K], upper=False)
        off = (found - torch.eye(K).to(found)).abs().amax((-2, -1))
        if not bool((off <= TOLERANCE).all()):  # what counts, and what makes the law of y_t right
            which = int(off.nan_to_num(math.inf).argmax())
            raise ValueError(
                f"the step of {process.name!r} from s = {way.times[which].item():.6g} has lost its "
                f"digits: L_s is off by {off[which].item():.1e}, expected at most {TOLERANCE:g}. "
                "Truncate the model later (model.with_truncation)."
            )
        M, N = factor[:, K:, :K], factor[:, K:, K:]
        return Moves(state=None, data=way.kernel.response[1:], noise=M, fresh=N)


@dataclass(frozen=True)
class EulerMaruyama(LinearSolver):
    """The plain step of the reverse equation: for comparison, and for very many steps.

    By default even in log SNR: where the noise is large, its steps must be short to be stable.
    """

    steps: int = 1000
    grid: Grid = "logsnr"

    def moves(self, way: Way) -> Moves:
        process, late = way.model.process, way.times[:-1]
        h = (late - way.times[1:])[:, None, None]
        drift, noise = process.drift(late), process.diffusion(late)
        factor = way.kernel.cholesky[:-1].mT
        pull = torch.linalg.solve_triangular(factor, noise, upper=True, left=False)  # GGᵀ L⁻ᵀ
        return Moves(
            state=torch.eye(process.n_vars).to(drift) - h * drift,
            data=None,
            noise=-h * pull,
            fresh=h.sqrt() * process.noise_factor(late),
        )
