"""Where a solver stops on the way back: a rule, or the times themselves.

    uniform       even in s
    quadratic     even in √s: closer together where there is little noise
    logsnr        even in λ = log SNR
    information   even in what y_s knows about Gaussian data, with a part that is even in λ
    curvature     by how fast the estimate turns along the flow (below), with such a part too

"curvature" spreads the error of a first-order exponential step evenly. On Gaussian data N(0, ς²)
the flow is y' = (A + ½GGᵀC⁻¹) y with C = ς²rrᵀ + Σ, the estimate is x̂ = gᵀy with g = ς²C⁻¹r, and a
step h makes the error ½h² ½GGᵀΣ⁻¹r x̂'. Measured in units of the state's own law, and over all ς
from the truncation's noise to the data's spread, its root mean square is a closed form of the
kernel; steps are as close as the square root of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from ornstein.process import Process
from ornstein.score import ScoreModel
from ornstein.times import Information, LogSNR

Rule = Literal["information", "logsnr", "uniform", "quadratic", "curvature"]
Grid = Rule | tuple[float, ...]
GRIDS = cast(tuple[Rule, ...], get_args(Rule))
FLOOR = 0.2  # the part of "information" and "curvature" that is even in log SNR
LOOKS = 257  # times at which the curvature is looked at: so many even in λ, and in s
SPREADS = 9  # standard deviations of data that it is averaged over
SLACK = 1e-9  # of the horizon, within which a given grid may begin


def as_grid(given: object) -> Grid:
    """A rule's name, or times as a tuple of numbers that fall."""
    if isinstance(given, str):
        if given in GRIDS:
            return given
    elif isinstance(given, (Sequence, Tensor, np.ndarray)):
        listed = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
        times = tuple(listed) if isinstance(listed, Sequence) else ()
        if len(times) > 1 and all(
            isinstance(s, (int, float, np.floating)) and s > 0 for s in times
        ):
            falling = all(late > early for late, early in pairwise(times))
            if falling and math.isfinite(times[0]):
                return tuple(float(s) for s in times)
    shown = f"'{given}'" if isinstance(given, str) else f"{given!r}"
    raise ValueError(
        f"grid={shown}; expected one of {', '.join(GRIDS)}, or the times themselves: two or more "
        "positive numbers that fall from the horizon, such as (1.0, 0.4, 0.1, 0.001)."
    )


def grid_times(model: ScoreModel, steps: int, grid: Grid) -> Tensor:
    """From the horizon to the model's truncation, or as given: (steps + 1,) float64, falling."""
    process = model.process
    if isinstance(grid, tuple):
        return _given(process, grid)
    last = model.truncation.time(process).detach().reshape(1)
    times = ruled_times(process, last, steps, grid, model.data_std)
    if not bool((times.diff() < 0).all()):
        raise ValueError(
            f"{steps} steps of the grid {grid!r} from s = {process.horizon:g} to the truncation at "
            f"s = {last.item():g} do not all go back in time; expected falling times. Take fewer "
            "steps, another grid, or truncate the model earlier (model.with_truncation)."
        )
    return times


def ruled_times(process: Process, last: Tensor, steps: int, grid: str, data_std: float) -> Tensor:
    """From the horizon to `last`, (1,), by a rule: (steps + 1,)."""
    first = torch.full_like(last, process.horizon)
    part = torch.arange(1, steps, dtype=torch.float64, device=last.device) / steps
    if grid == "uniform":
        inner = last + part * (first - last)
    elif grid == "quadratic":
        inner = (last.sqrt() + part * (first.sqrt() - last.sqrt())) ** 2
    elif grid == "curvature":
        inner = _by_curvature(process, first, last, part, data_std)
    else:
        proposal = LogSNR() if grid == "logsnr" else Information(FLOOR)
        low, high = process.transition(torch.cat([first, last])).logsnr
        logsnr, _ = proposal.place_logsnr(part, low, high, data_std)
        inner = process.time_of_noise((-logsnr / 2).exp())
    return torch.cat([first, inner.flip(0), last])


def _given(process: Process, grid: tuple[float, ...]) -> Tensor:
    times = torch.tensor(grid, dtype=torch.float64, device=process.device)
    if abs(grid[0] - process.horizon) > SLACK * process.horizon:
        raise ValueError(
            f"the grid begins at s = {grid[0]:g}; expected the horizon of {process.name!r}, "
            f"s = {process.horizon:g}, where its prior is."
        )
    times[0] = process.horizon
    return times


# ---------------------------------------------------------------- the curvature of the kernel


def _by_curvature(
    process: Process, first: Tensor, last: Tensor, part: Tensor, data_std: float
) -> Tensor:
    """The inner times, rising: (steps − 1,)."""
    low, high = process.transition(torch.cat([first, last])).logsnr
    logsnr = torch.lerp(low, high, torch.linspace(0, 1, LOOKS).to(low))
    inner = process.time_of_noise((-logsnr[1:-1] / 2).exp())
    even = torch.lerp(last, first, torch.linspace(0, 1, LOOKS).to(last))  # where λ stands still
    times = torch.unique(torch.cat([inner, even])).flip(0)
    density = curvature(process, times, data_std)  # of steps, in s
    mass = (density[1:] + density[:-1]) / 2 * -times.diff()
    gained = process.transition(times).logsnr.diff().clamp(min=0)
    share = (1 - FLOOR) * mass / mass.sum() + FLOOR * gained / gained.sum()
    reached = torch.nn.functional.pad(share.cumsum(0), (1, 0))
    place = (1 - part).flip(0)  # from the horizon on
    after = torch.searchsorted(reached, place).clamp(1, len(times) - 1)
    inside = (place - reached[after - 1]) / (reached[after] - reached[after - 1])
    found = torch.lerp(times[after - 1].log(), times[after].log(), inside).exp()
    return found.flip(0)


def curvature(process: Process, times: Tensor, data_std: float) -> Tensor:
    """√(the local error of a first-order step / h²), as above: (n,)."""
    kernel = process.transition(times)
    L = kernel.cholesky
    A = torch.linalg.solve_triangular(L, process.drift(times) @ L, upper=False)
    G = torch.linalg.solve_triangular(L, process.noise_factor(times), upper=False)
    W, a = G @ G.mT, kernel.signal.unsqueeze(-1)  # all of it whitened by L, which is fixed here
    least = kernel.snr.max().rsqrt()
    spreads = torch.logspace(
        math.log10(least.item()), math.log10(data_std), SPREADS, dtype=torch.float64
    )
    total = torch.zeros_like(times)
    for spread in spreads.tolist():
        C = torch.eye(L.shape[-1]).to(L) + spread**2 * a @ a.mT
        solved = torch.linalg.solve(C, torch.cat([a, W @ a], -1))
        g = spread**2 * solved[..., :1]
        # g' = −C⁻¹C'g + ς²C⁻¹A a and x̂' = (g' + Bᵀg)ᵀy with B = A + ½WC⁻¹
        C_dot = A @ C + C @ A.mT + W
        moved = torch.linalg.solve(C, spread**2 * A @ a - C_dot @ g)
        moved = moved + A.mT @ g + torch.linalg.solve(C, W @ g) / 2
        turn = (moved.mT @ C @ moved)[..., 0, 0]
        lever = ((W @ a).mT @ solved[..., 1:])[..., 0, 0]
        total = total + turn * lever
    return (total / SPREADS).clamp(min=0) ** 0.25


def whole(value: object, name: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}; expected a whole number ≥ {least}.")
