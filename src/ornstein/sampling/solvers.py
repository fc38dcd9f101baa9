"""What a solver is: a grid of times, and a table of what is done between them.

At a time s the model is asked for x̂ = E[x | y_s], and ε̂ = L_s⁻¹(y_s − r_s x̂) is what is then left
as noise; the state is r_s x̂ + L_s ε̂ again. So every solver that is linear between two looks is a
table: the state at the next look is a fixed combination of what was seen at this one and before,

    y_next = Σ_j (data_j x̂_j + noise_j ε̂_j) + fresh ξ,      j = 0 the newest, ξ new noise,

and the sample is x̂ at the last look, at ε, which is the mean of the data there. A table depends on
the process and the grid alone. On Gaussian data x̂ is linear too, and the law of the samples a
closed form (`wayback`). The state is float64, since whitening it cancels; the network gets its
own type. Every sample has its own noise, a function of the seed and of its number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ornstein.process import Process
from ornstein.sampling.grids import Grid, as_grid, grid_times, whole
from ornstein.sampling.way import Noise, Seen, Stop, Walk, Way
from ornstein.score import ScoreModel
from ornstein.transition import Transition, mix

#: as commands and recipes call them
SolverName = Literal[
    "ancestral", "exponential", "sde-2", "heun", "flow", "splitting", "corrector", "euler"
]


@dataclass(frozen=True)
class Solver(ABC):
    """How to go back: on which times, and what is done between them.

    grid: a rule's name, or the times themselves, which then say how many steps there are.
    """

    steps: int = 100
    grid: Grid = "curvature"

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", as_grid(self.grid))
        if isinstance(self.grid, tuple):
            object.__setattr__(self, "steps", len(self.grid) - 1)
        whole(self.steps, "steps", 1)

    @property
    def evaluations(self) -> int | None:
        """How often the network is asked for a sample; None where that is not known before."""
        return self.looks_per_step * self.steps + 1

    @property
    def looks_per_step(self) -> int:
        """Each of them is a network evaluation; one more gives the sample."""
        return 1

    def within(self, evaluations: int) -> Solver:
        """The same solver with as many steps as so many network evaluations allow."""
        whole(evaluations, "evaluations", 1 + self.looks_per_step)
        if isinstance(self.grid, tuple):
            raise ValueError(
                f"the grid is given as {len(self.grid)} times; expected a rule such as "
                "'curvature', which can make any number of steps."
            )
        return replace(self, steps=(evaluations - 1) // self.looks_per_step)

    def times(self, model: ScoreModel, shape: Sequence[int]) -> Tensor:
        """The grid for a model: (n + 1,) float64, falling."""
        return grid_times(model, self.steps, self.grid)

    def looks(self, grid: Tensor) -> Tensor:
        """When the model is asked, the last time included: (m + 1,)."""
        return grid

    @abstractmethod
    def prepare(self, way: Way) -> Walk:
        """Compute what all samples share; what is returned takes a batch along the way."""


@dataclass(frozen=True)
class Route:
    """What the table of a solver is made from."""

    process: Process
    grid: Tensor  # (n + 1,)
    times: Tensor  # (m + 1,) of the looks
    kernel: Transition  # given x, at these times
    scale: float  # root mean square of the data


@dataclass(frozen=True)
class Step:
    """From one look to the next, the newest look first: weights of the last few."""

    data: Tensor  # (W, K)
    noise: Tensor  # (V, K, K)
    fresh: Tensor | None  # (K, R)

    def __call__(self, seen: Sequence[Seen], new: Tensor | None) -> Tensor:
        """The next state: (B, K, d)."""
        y = mix(self.noise[:1], seen[0].noise)
        for weight, look in zip(self.noise[1:], seen[1:], strict=False):
            y = mix(weight.unsqueeze(0), look.noise, y)
        for weight, look in zip(self.data, seen, strict=False):
            y = mix(weight[None, :, None], look.x.unsqueeze(1), y)
        if self.fresh is not None and new is not None:
            y = mix(self.fresh.unsqueeze(0), new, y)
        return y


@dataclass(frozen=True)
class Start:
    """From y_T to the first look, where that is later: y = state·y_T + fresh·ξ."""

    state: Tensor  # (K, K)
    fresh: Tensor  # (K, R)


@dataclass(frozen=True)
class Table:
    """All steps of a solver."""

    steps: tuple[Step, ...]
    start: Start | None = None

    @property
    def window(self) -> int:
        """How many looks a step remembers."""
        return max(max(len(step.data), len(step.noise)) for step in self.steps)


class TableSolver(Solver):
    """One look at the model, then a step that is linear in what was seen; and so on."""

    @abstractmethod
    def table(self, route: Route) -> Table:
        """The matrices of all steps, differentiable in the process and the grid."""

    def prepare(self, way: Way) -> Walk:
        moments = way.model.moments
        scale = (moments.mean.square() + moments.std.square()).mean().sqrt().item()
        table = self.table(Route(way.model.process, way.grid, way.times, way.kernel, scale))
        window = table.window

        def walk(y: Tensor, draw: Noise) -> Iterator[Stop]:
            if (start := table.start) is not None:
                first = draw("start", 0, start.fresh.shape[-1])
                y = mix(start.fresh.unsqueeze(0), first, mix(start.state.unsqueeze(0), y))
            past: list[Seen] = []
            for i, step in enumerate(table.steps):
                past = [way.look(i, y), *past][:window]
                new = None if step.fresh is None else draw("step", i + 1, step.fresh.shape[-1])
                y = step(past, new)
                yield Stop(y, past[0].x)

        return walk


def rows(*parts: Tensor) -> tuple[Tensor, ...]:
    """(n, K, …) each: n times a stack of one per look, newest first: (W, K, …)."""
    return torch.stack(parts, 1).unbind(0)
