"""`learn_process`: the process and the times that suit a solver with few evaluations.

Without loss of generality S = 1 (auxiliary variables can be scaled), and one clock, since only the
times of the looks matter to a table. What is learned: Q, D = D̃D̃ᵀ, the variance of v₀, and the times
s_0 = T, log s_i = log s_{i−1} − exp(θ_i), the last one included. The error of the samples' law on
Gaussian data (`sample_law`) is a smooth function of these few numbers; it is minimised by BFGS from
several starts: every preset with so many variables, and a random process, each on its best rule.

Real data is not Gaussian, and errors that cancel for Gaussian data don't for others. Three things
keep the result honest: the law of the state must be right at every look (the metric "path"), times
are smooth (second differences of θ cost) and end above the noise level, and a process must come
near its prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ornstein.diagnostics import prior_gap
from ornstein.diffusion import Diffusion
from ornstein.linalg import semidefinite_factor
from ornstein.matrices import Semidefinite, Skew
from ornstein.process import Process
from ornstein.processes import alda, cld, malda, psld, vpsde
from ornstein.sampling import GRIDS, TableSolver
from ornstein.sampling.grids import Rule, whole
from ornstein.schedules import Linear
from ornstein.score import ScoreModel
from ornstein.truncation import ends
from ornstein.wayback.law import (
    Metric,
    SampleLaw,
    check_metric,
    check_table,
    checked_level,
    law_of,
    on_cpu,
    sample_law,
    solver_times,
)
from ornstein.wayback.spectrum import Spectrum

PRESETS: dict[int, tuple[Callable[[], Diffusion], ...]] = {
    1: (vpsde,),
    2: (cld, psld),
    3: (alda, malda),
}
TURN = 0.5  # size of a random start's Q
GENTLE = 1e-4  # Armijo's: the part of the promised decrease that a step must bring
SHORTEST = 1e-10
EXAMPLES = 10_000  # that a spectrum is taken of
FAINT = 0.03  # of D̃, in a variable that has no noise of its own
WALL = 20.0  # how steeply the cost rises beyond what is allowed


@dataclass(frozen=True, eq=False)
class LearnedWay:
    """A process and the times that suit a solver: for model.with_process(way.process)."""

    process: Process
    solver: TableSolver  # with the learned times as its grid
    law: SampleLaw
    metric: Metric
    error: float
    preset: str  # the best start, a preset on a rule, …
    grid: str
    preset_error: float  # … and its error


def learn_process(
    spectrum: Spectrum,
    solver: TableSolver,
    steps: int | None = None,
    *,
    n_aux: int = 0,
    metric: Metric = "path",
    noise_level: float | None = None,
    process: Process | None = None,
    smoothness: float = 0.3,
    most_gap: float = 0.09,
    directions: int = 32,
    iterations: int = 200,
    seed: int = 0,
) -> LearnedWay:
    """The process and the times for a solver and a number of steps, on Gaussian data.

    spectrum: of the data that is to be sampled, Spectrum.of(data, likelihood).
    steps: of the solver, by default what it says; solver.within(evaluations) counts for you.
    n_aux: auxiliary variables of the process; 0 learns VPSDE's speed and times.
    process: one that stays as it is, so that only the times are learned.
    noise_level: the standard error of x at which a model is truncated, and smaller things do not
        count; by default a thousandth of the data.
    smoothness: how much uneven times cost; 0 for the least error on Gaussian data.
    most_gap: nats per coordinate between y_T and the prior; `sample` accepts 0.1.
    directions: to how many the spectrum is condensed. iterations: at most, from each start.
    """
    check_table(solver)
    check_metric(metric)
    whole(n_aux, "n_aux", 0)
    whole(directions, "directions", 1)
    whole(iterations, "iterations", 1)
    if not (isinstance(most_gap, (int, float)) and most_gap > 0):
        raise ValueError(f"most_gap={most_gap!r}; expected a positive number of nats.")
    if not (isinstance(smoothness, (int, float)) and smoothness >= 0):
        raise ValueError(f"smoothness={smoothness!r}; expected a number ≥ 0.")
    if process is not None and not isinstance(process, Process):
        raise ValueError(
            f"process was given as {type(process).__name__}; expected a process, for example "
            "ornstein.cld(), or None."
        )
    if not isinstance(spectrum, Spectrum):
        raise ValueError(
            f"spectrum was given as {type(spectrum).__name__}; expected ornstein.Spectrum.of(data, "
            "likelihood), or Spectrum.given(standard_deviations)."
        )
    solver = solver if steps is None else replace(solver, steps=steps)
    brief = spectrum.brief(directions)
    level = checked_level(spectrum, noise_level)
    found: list[tuple[float, _Trial, str, Rule, float]] = []
    starts = _starts(n_aux, seed) if process is None else [(on_cpu(process), process.name)]
    for start, name in starts:
        rule, first = _best_rule(start, solver, brief, metric, level)
        if rule is None:
            continue
        times = solver_times(start, replace(solver, grid=rule), brief, level)
        trial = _Trial(start, times, process is None)
        aim = _Aim(solver, brief, metric, level, smoothness, most_gap)
        error = _minimise(trial, aim, iterations)
        found.append((error, trial, name, rule, first))
    if not found:
        raise ValueError(
            f"{solver!r} gives no finite law on any preset and rule; expected a solver that is "
            "stable with so few steps. Take more steps."
        )
    _, trial, _, _, _ = min(found, key=lambda one: one[0])
    _, _, name, rule, first = min(found, key=lambda one: one[4])
    with torch.no_grad():
        learned, grid = trial.frozen(), tuple(trial.times().tolist())
        final = replace(solver, grid=grid)
        law = sample_law(learned, final, spectrum, level)
        learned = learned if process is None else process
    return LearnedWay(learned, final, law, metric, law.error(metric).item(), name, rule, first)


def learn_times(
    model: ScoreModel, data: Tensor, solver: TableSolver, *, metric: Metric = "path"
) -> LearnedWay:
    """Times for a solver on a trained model, whose process stays as it is: way.solver has them.

    data: examples like those it was trained on, for their spectrum; ten thousand are enough.
    """
    if not isinstance(model, ScoreModel):
        raise ValueError(
            f"model was given as {type(model).__name__}; expected ornstein.ScoreModel(network, "
            "process)."
        )
    check_table(solver)
    model.likelihood.check(data)
    spectrum = Spectrum.of(data[:: max(1, len(data) // EXAMPLES)], model.likelihood)
    level = math.exp(-ends(model.truncation, model.process)[1].item() / 2)
    with torch.enable_grad():
        return learn_process(
            spectrum, solver, process=model.process, metric=metric, noise_level=level
        )


def best_preset(
    spectrum: Spectrum,
    solver: TableSolver,
    metric: Metric = "path",
    noise_level: float | None = None,
) -> tuple[str, str, float]:
    """The preset and the rule with the smallest error for a solver, and the error."""
    found = []
    for make in (make for group in PRESETS.values() for make in group):
        rule, error = _best_rule(make(), solver, spectrum, metric, noise_level)
        found.append((error, make.__name__, rule or "no rule"))
    error, name, best = min(found)
    return name, best, error


# ---------------------------------------------------------------- what is learned


class _Trial(nn.Module):
    """A process and its times as free numbers."""

    def __init__(self, start: Process, times: Tensor, free: bool) -> None:
        super().__init__()
        self.gaps = nn.Parameter((-times.log().diff()).log())
        self.process = _freed(start) if free and isinstance(start, Diffusion) else start
        self.free = free

    def numbers(self) -> list[nn.Parameter]:
        """What is learned."""
        own = [p for p in self.process.parameters() if p.requires_grad] if self.free else []
        return [self.gaps, *own]

    def unevenness(self) -> Tensor:
        """Mean square of the second differences of the logarithms of the gaps."""
        return self.gaps.diff(n=2).square().sum() / max(len(self.gaps) - 2, 1)

    def times(self) -> Tensor:
        """T first: (n + 1,)."""
        horizon = self.gaps.new_full((1,), self.process.horizon)
        return torch.cat([horizon, horizon * (-self.gaps.exp().cumsum(0)).exp()])

    def frozen(self) -> Process:
        """The process with its numbers as they are now, which can be saved and shared."""
        own = self.process
        if not self.free or not isinstance(own, Diffusion):
            return own
        factor = own.auxiliary.factor()[1:]
        return Diffusion(
            own.Q.detach(),
            own.D.detach(),
            rate=own.rate_d,
            v0_variance=(factor @ factor.mT).detach() if len(factor) else 0.04,
            horizon=own.horizon,
            name=own.name,
        )


def _freed(start: Diffusion) -> Diffusion:
    """The same process with S = 1, Q, D and the variance of v₀ as parameters."""
    root = torch.linalg.cholesky(start.S)  # y' = rootᵀ y has S = 1
    first = root[1:, 1:].mT @ start.auxiliary.root
    return Diffusion(
        Skew((root.mT @ start.Q @ root / 2).contiguous()),
        Semidefinite(_full(root.mT @ start.D @ root)),
        rate=start.rate_d,
        v0_variance=first @ first.mT if len(first) else 0.04,
        learn_v0_variance=len(first) > 0,
        horizon=start.horizon,
        name=f"way-back-{start.n_vars - 1}",
    )


def _full(D: Tensor) -> Tensor:
    """D̃ with D̃D̃ᵀ ≈ D, and a faint noise where there is none: there its gradient would vanish."""
    factor = semidefinite_factor(D).clone()
    quiet = (D.diagonal() == 0).nonzero().flatten().tolist()
    empty = (factor.abs().amax(0) == 0).nonzero().flatten().tolist()
    for row, column in zip(quiet, empty, strict=False):
        factor[row, column] = FAINT
    return factor


def _starts(n_aux: int, seed: int) -> Iterator[tuple[Diffusion, str]]:
    for make in PRESETS.get(1 + n_aux, ()):
        yield make(), make.__name__
    if n_aux == 0:
        return
    generator = torch.Generator(device="cpu").manual_seed(seed)
    K = 1 + n_aux
    raw = torch.randn(K, K, dtype=torch.float64, generator=generator, device="cpu") * TURN
    half = torch.eye(K, dtype=torch.float64, device="cpu") / 2
    yield Diffusion(raw - raw.mT, half, v0_variance=1.0, rate=Linear()), "vpsde"


@dataclass(frozen=True)
class _Aim:
    """What is minimised."""

    solver: TableSolver
    spectrum: Spectrum
    metric: Metric
    noise_level: float
    smoothness: float
    most_gap: float

    def __call__(self, trial: _Trial) -> Tensor:
        law = law_of(trial.process, self.solver, trial.times(), self.spectrum, self.noise_level)
        cost = law.error(self.metric).log() + self.smoothness * trial.unevenness()
        cost = cost + self._too_clean(trial)
        return cost + _too_far(trial.process, self.spectrum, self.most_gap) if trial.free else cost

    def _too_clean(self, trial: _Trial) -> Tensor:
        """What it costs to look below the noise level, where nothing counts and no network was."""
        least = trial.process.transition(trial.times()[-1:]).logsnr[0]
        return WALL * (least / 2 + math.log(self.noise_level)).clamp(min=0).square()


def _too_far(process: Process, spectrum: Spectrum, most: float) -> Tensor:
    """What a process pays for not reaching its prior."""
    prior = process.prior_factor
    second = torch.tensor(spectrum.scale**2, dtype=torch.float64)
    gap = prior_gap(process.transition(process.horizon), prior, second)
    return WALL * (gap / most - 1).clamp(min=0).square()


def _best_rule(
    process: Process,
    solver: TableSolver,
    spectrum: Spectrum,
    metric: Metric,
    noise_level: float | None,
) -> tuple[Rule | None, float]:
    """The rule on which a solver does best with a process."""
    best: tuple[Rule | None, float] = (None, math.inf)
    for rule in GRIDS:
        try:
            with torch.no_grad():
                law = sample_law(process, replace(solver, grid=rule), spectrum, noise_level)
            error = law.error(metric).item()
        except ValueError:  # a step that is too long, or a rule that a process can't take
            continue
        if error < best[1]:
            best = rule, error
    return best


# ---------------------------------------------------------------- BFGS


def _minimise(trial: _Trial, aim: _Aim, iterations: int) -> float:
    """Move the trial to a minimum; what a process refuses counts as infinite. The cost."""
    parameters = trial.numbers()

    def put(flat: Tensor) -> None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(flat, parameters)

    def look(flat: Tensor) -> tuple[float, Tensor]:
        put(flat)
        try:
            value = aim(trial)
            slopes = torch.autograd.grad(value, parameters, allow_unused=True)
        except ValueError:
            return math.inf, flat
        parts = [
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters, slopes, strict=True)
        ]
        slope = nn.utils.parameters_to_vector(parts).detach()
        finite = bool(value.isfinite()) and bool(slope.isfinite().all())
        return (value.item() if finite else math.inf), slope

    at = nn.utils.parameters_to_vector(parameters).detach().clone()
    value, slope = look(at)
    kept = [(value, at)]
    shape = torch.eye(len(at), dtype=torch.float64, device="cpu")  # of the inverse Hessian
    for _ in range(iterations):
        direction = -shape @ slope
        promise = (direction @ slope).item()
        if not promise < 0:
            shape = torch.eye(len(at), dtype=torch.float64, device="cpu")
            direction, promise = -slope, -(slope @ slope).item()
        length = min(1.0, 1.0 / max(direction.norm().item(), 1e-300))
        new, new_slope = math.inf, slope
        while length > SHORTEST:
            new, new_slope = look(at + length * direction)
            if new <= value + GENTLE * length * promise:
                break
            length /= 2
        else:
            break
        move, turn = length * direction, new_slope - slope
        gained = value - new
        at, value, slope = at + move, new, new_slope
        curvature = (move @ turn).item()
        if curvature > 1e-12 * (move.norm() * turn.norm()).item():
            left = torch.eye(len(at), dtype=torch.float64, device="cpu")
            left = left - torch.outer(move, turn) / curvature
            shape = left @ shape @ left.mT + torch.outer(move, move) / curvature
        kept.append((value, at))
        if gained < 1e-7:
            break
    for value, at in reversed(kept):  # the last one that is a process on its own, too
        put(at)
        try:
            trial.frozen()
        except ValueError:
            continue
        return value
    return math.inf
