"""The way back: its times, the kernels there, and what the model makes of a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ornstein.answers import View
from ornstein.score import ScoreModel
from ornstein.times import Information, LogSNR
from ornstein.transition import Transition

Grid = Literal["information", "logsnr", "uniform"]
GRIDS = ("information", "logsnr", "uniform")
FLOOR = 0.2  # the part of the grid "information" that is even in log SNR


class Spread(Protocol):
    """What a solver says about its times."""

    @property
    def steps(self) -> int: ...

    @property
    def grid(self) -> Grid: ...


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
    times: Tensor  # (n + 1,) float64, falling from T to ε
    kernel: Transition  # at these times
    view: View

    @staticmethod
    def of(model: ScoreModel, times: Tensor, shape: Sequence[int]) -> Way:
        """Along these times."""
        kernel = model.process.transition(times)
        return Way(model, tuple(shape), times, kernel, View.of(kernel))

    def look(self, number: int, y: Tensor) -> Seen:
        """Ask the model about states (B, K, d) at the time of this number."""
        one = slice(number, number + 1)
        kernel = replace(
            self.kernel,
            propagator=self.kernel.propagator[one],
            cholesky=self.kernel.cholesky[one],
            error=self.kernel.error[one],
        )
        view = View(self.view.direction[one], self.view.sigma[one], self.view.logsnr[one])
        white = whitened(kernel.cholesky, y)
        wide, state = white.unflatten(-1, self.shape), y.unflatten(-1, self.shape)
        x = self.model.estimate_from(wide, state, kernel, view.expand(len(y))).flatten(1)
        signal = (view.direction / view.sigma.unsqueeze(-1)).unsqueeze(-1)  # (1, K, 1)
        return Seen(x, torch.addcmul(white, signal, x.unsqueeze(1), value=-1))


def grid_times(model: ScoreModel, steps: int, grid: Grid) -> Tensor:
    """From the horizon to the model's truncation: (steps + 1,) float64, falling.

    "information" goes evenly through what y_s knows about Gaussian data, with a part that is even
    in log SNR; "logsnr" and "uniform" are even in log SNR and in s.
    """
    process = model.process
    last = model.truncation.time(process).detach().reshape(1)
    first = torch.full_like(last, process.horizon)
    part = torch.arange(1, steps, dtype=torch.float64, device=last.device) / steps
    if grid == "uniform":
        inner = last + part * (first - last)
    else:
        proposal = LogSNR() if grid == "logsnr" else Information(FLOOR)
        low, high = process.transition(torch.cat([first, last])).logsnr
        logsnr, _ = proposal.place_logsnr(part, low, high, model.data_std)
        inner = process.time_of_noise((-logsnr / 2).exp())
    times = torch.cat([first, inner.flip(0), last])
    if not bool((times.diff() < 0).all()):
        raise ValueError(
            f"{steps} steps of the grid {grid!r} from s = {process.horizon:g} to the truncation at "
            f"s = {last.item():g} do not all go back in time; expected falling times. Take fewer "
            "steps, another grid, or truncate the model earlier (model.with_truncation)."
        )
    return times


def whitened(factor: Tensor, y: Tensor) -> Tensor:
    """L⁻¹y by substitution, one number like another in every batch: (1, K, K), (B, K, d)."""
    rows: list[Tensor] = []
    for i in range(y.shape[1]):
        rest = y[:, i]
        for j, known in enumerate(rows):
            rest = torch.addcmul(rest, factor[:, i, j, None], known, value=-1)
        rows.append(rest / factor[:, i, i, None])
    return torch.stack(rows, 1)


def whole(value: object, name: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}; expected a whole number ≥ {least}.")
