"""The law of a solver's samples on Gaussian data, in closed form.

Along an axis of the data, N(m, ς²), the exact model answers x̂ = p x̃ + (1 − p) m with
p = ς²/(ς² + σ²), so that every state of a `Table` is linear in m and in the noises: y = Y n. Their
coefficients Y are sent along the way, for all axes at once, and the samples are N(μ, s²) with μ the
coefficient of m and s the norm of the others. What it costs is K×K algebra: no network, no samples.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ornstein.answers import View
from ornstein.likelihood import PART_OF_THE_SPREAD
from ornstein.linalg import safe_sqrt
from ornstein.process import Process
from ornstein.sampling import Route, Table, TableSolver
from ornstein.sampling.grids import ruled_times
from ornstein.wayback.spectrum import Spectrum

Metric = Literal["relative", "path", "wasserstein"]


@dataclass(frozen=True, eq=False)
class SampleLaw:
    """What a solver makes of a spectrum: samples are N(mean, std²) along each axis."""

    spectrum: Spectrum
    noise_level: float  # what is smaller does not count
    mean: Tensor  # (N,)
    std: Tensor  # (N,)
    states: Tensor  # (m + 1, N) how far the law of the state is from its own, at every look

    def error(self, metric: Metric = "path") -> Tensor:
        """How far the samples' law is from the data's: ().

        relative: root mean square over the axes of (s − ς, μ − m)/√(ς² + noise_level²); all axes
            count alike that the noise at the end does not hide.
        path: the same, and the error of the state's law at all looks on the way, in units of that
            law: errors of single steps can't be played off against each other.
        wasserstein: the Wasserstein-2 (Fréchet) distance between the two Gaussians, over that of
            the data to its mean; the large axes count.
        """
        check_metric(metric)
        own, weight = self.spectrum, self.spectrum.weight
        off = (self.std - own.std).square() + (self.mean - own.mean).square()
        if metric == "wasserstein":
            return ((weight * off).sum() / (weight * own.std.square()).sum()).sqrt()
        off = off / (own.std.square() + self.noise_level**2)
        if metric == "path":
            off = off + self.states.square().sum(0)
        return ((weight * off).sum() / weight.sum()).sqrt()


def sample_law(
    process: Process,
    solver: TableSolver,
    spectrum: Spectrum,
    noise_level: float | None = None,
) -> SampleLaw:
    """Mean and standard deviation of the samples of a solver, of Gaussian data.

    noise_level: the standard error of x at which a grid that is a rule ends, that of a model's
        truncation; by default a thousandth of the data.
    """
    check_table(solver)
    level = checked_level(spectrum, noise_level)
    process = on_cpu(process)
    grid = solver_times(process, solver, spectrum, level)
    return law_of(process, solver, grid, spectrum, level)


def checked_level(spectrum: Spectrum, given: float | None) -> float:
    """The noise at the end; if nobody says otherwise, a thousandth of the data."""
    if given is None:
        return PART_OF_THE_SPREAD * spectrum.spread
    if not (isinstance(given, (int, float)) and 0 < given < math.inf):
        raise ValueError(
            f"noise_level={given!r}; expected a positive number in units of the data, such as that "
            "of a model: model.truncation.standard_error."
        )
    return float(given)


def on_cpu(process: Process) -> Process:
    """The process, or a copy of it on the CPU, where these small matrices are quicker."""
    return process if process.device.type == "cpu" else copy.deepcopy(process).cpu()


def solver_times(
    process: Process, solver: TableSolver, spectrum: Spectrum, noise_level: float
) -> Tensor:
    """The grid of a solver without a model: (n + 1,)."""
    if isinstance(solver.grid, tuple):
        return torch.tensor(solver.grid, dtype=torch.float64)
    last = process.time_of_noise(noise_level).detach().reshape(1)
    return ruled_times(process, last, solver.steps, solver.grid, spectrum.spread).detach()


def law_of(
    process: Process, solver: TableSolver, grid: Tensor, spectrum: Spectrum, noise_level: float
) -> SampleLaw:
    """The same on a grid, differentiable in it and in the process."""
    times = solver.looks(grid)
    kernel = process.transition(times)
    route = Route(process, grid, times, kernel, spectrum.scale)
    return SampleLaw(spectrum, noise_level, *_sent(solver.table(route), route, spectrum))


def _sent(table: Table, route: Route, spectrum: Spectrum) -> tuple[Tensor, Tensor, Tensor]:
    """μ and s of the samples along every axis: (N,) each; and the states' errors, (m + 1, N)."""
    L, a, view = route.kernel.cholesky, route.kernel.signal, View.of(route.kernel)
    square = spectrum.std.square().unsqueeze(-1)  # (N, 1)
    known = square / (square + view.sigma.square())  # (N, m + 1)
    signals = spectrum.std[:, None, None] * a.unsqueeze(-1).unsqueeze(1)  # (m + 1, N, K, 1)
    own = torch.linalg.cholesky(torch.eye(L.shape[-1]).to(L) + signals @ signals.mT)
    errors: list[Tensor] = []

    def look(i: int, Y: Tensor) -> tuple[Tensor, Tensor]:
        """x̂: (N, C), and ε̂: (N, K, C), as coefficients; column 0 is m's."""
        white = torch.linalg.solve_triangular(L[i], Y, upper=False)
        shift = (white[..., :1] - a[i].unsqueeze(-1)) * spectrum.mean[:, None, None]
        parts = torch.cat([shift, white[..., 1:]], -1)  # of the state, in units of Σ …
        parts = torch.linalg.solve_triangular(own[i], parts, upper=False)  # … and of its own law
        off = parts[..., 1:] @ parts[..., 1:].mT - torch.eye(L.shape[-1]).to(L)
        square_off = off.square().sum((-2, -1)) / 4 + parts[..., 0].square().sum(-1)
        errors.append(safe_sqrt(square_off))
        noisy = view.sigma[i] * (view.direction[i] @ white)
        x = known[:, i, None] * noisy
        x = torch.cat([x[:, :1] + 1 - known[:, i, None], x[:, 1:]], -1)
        return x, white - a[i].unsqueeze(-1) * x.unsqueeze(-2)

    N, K = len(square), L.shape[-1]
    prior = route.process.prior_factor
    Y = torch.nn.functional.pad(prior, (1, 0)).expand(N, K, K + 1)
    if table.start is not None:
        Y = _with_new(table.start.state @ Y, table.start.fresh)
    past: list[tuple[Tensor, Tensor]] = []
    window = table.window
    for i, step in enumerate(table.steps):
        past = [look(i, Y), *past][:window]
        size = Y.shape[-1]
        past = [(_wide(x, size), _wide(noise, size)) for x, noise in past]
        Y = torch.zeros_like(Y)
        for weight, (_, noise) in zip(step.noise, past, strict=False):
            Y = Y + weight @ noise
        for weight, (x, _) in zip(step.data, past, strict=False):
            Y = Y + weight.unsqueeze(-1) * x.unsqueeze(-2)
        Y = Y if step.fresh is None else _with_new(Y, step.fresh)
    x, _ = look(len(table.steps), Y)
    std = torch.linalg.vector_norm(x[:, 1:], dim=-1)
    return x[:, 0] * spectrum.mean, std, torch.stack(errors)


def _with_new(Y: Tensor, fresh: Tensor) -> Tensor:
    """Coefficients of noise that was not there before, as further columns."""
    return torch.cat([Y, fresh.expand(len(Y), *fresh.shape)], -1)


def _wide(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - values.shape[-1]))


def check_table(solver: object) -> None:
    if not isinstance(solver, TableSolver):
        given = solver.__name__ if isinstance(solver, type) else repr(solver)
        raise ValueError(
            f"solver={given} has no closed form on Gaussian data; expected Ancestral, Exponential, "
            "Heun, Splitting, PredictorCorrector or EulerMaruyama, for example "
            "ornstein.Exponential(steps=10)."
        )


def check_metric(metric: object) -> None:
    if metric not in get_args(Metric):
        raise ValueError(f"metric={metric!r}; expected one of {', '.join(get_args(Metric))}.")
