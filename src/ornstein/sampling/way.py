"""The way back: its times, the kernels there, and what the model makes of a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ornstein.answers import View
from ornstein.score import ScoreModel
from ornstein.transition import Transition


@dataclass(frozen=True)
class Seen:
    """What the model makes of a state."""

    x: Tensor  # (B, d) x̂
    noise: Tensor  # (B, K, d) ε̂


@dataclass(frozen=True)
class Stop:
    """Where a step has led, and the estimate that it was made with."""

    y: Tensor  # (B, K, d)
    x: Tensor  # (B, d)


Noise = Callable[[str, int, int], Tensor]  # (purpose, step, rows) -> (B, rows, d) standard normal
Walk = Callable[[Tensor, Noise], Iterator[Stop]]  # from y_T, one stop at each further time


@dataclass(frozen=True)
class Way:
    """The times of the way back and the kernels given x there, computed once for all samples."""

    model: ScoreModel
    shape: tuple[int, ...]  # of the data
    grid: Tensor  # (n + 1,) float64, falling from T to ε
    times: Tensor  # (m + 1,) at which the model is asked; the sample is its last answer
    kernel: Transition  # at these times
    view: View

    @staticmethod
    def of(
        model: ScoreModel, grid: Tensor, shape: Sequence[int], times: Tensor | None = None
    ) -> Way:
        """Along this grid, looking at its times or at others."""
        times = grid if times is None else times
        kernel = model.process.transition(times)
        return Way(model, tuple(shape), grid, times, kernel, model.view(kernel, times))

    def look(self, number: int, y: Tensor) -> Seen:
        """Ask the model about states (B, K, d) at the time of this number."""
        one = slice(number, number + 1)
        kernel = replace(
            self.kernel,
            propagator=self.kernel.propagator[one],
            cholesky=self.kernel.cholesky[one],
            error=self.kernel.error[one],
        )
        view = self.view.part(one)
        white = whitened(kernel.cholesky, y)
        wide, state = white.unflatten(-1, self.shape), y.unflatten(-1, self.shape)
        x = self.model.estimate_from(wide, state, kernel, view.expand(len(y))).flatten(1)
        signal = (view.direction / view.sigma.unsqueeze(-1)).unsqueeze(-1)  # (1, K, 1)
        return Seen(x, torch.addcmul(white, signal, x.unsqueeze(1), value=-1))


def whitened(factor: Tensor, y: Tensor) -> Tensor:
    """L⁻¹y by substitution, one number like another in every batch: (1, K, K), (B, K, d)."""
    rows: list[Tensor] = []
    for i in range(y.shape[1]):
        rest = y[:, i]
        for j, known in enumerate(rows):
            rest = torch.addcmul(rest, factor[:, i, j, None], known, value=-1)
        rows.append(rest / factor[:, i, i, None])
    return torch.stack(rows, 1)
