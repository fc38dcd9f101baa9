"""The way back: from the prior to data, along the reverse of the process.

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
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ornstein.diagnostics import prior_gap
from ornstein.draws import Counted
from ornstein.ledger import agree, any_failed, processes
from ornstein.linalg import orthogonal_reduction
from ornstein.process import TOLERANCE
from ornstein.score import ScoreModel, View
from ornstein.times import Information, LogSNR
from ornstein.transition import Transition, mix

Grid = Literal["information", "logsnr", "uniform"]
GRIDS = ("information", "logsnr", "uniform")
FLOOR = 0.2  # the part of the grid "information" that is even in log SNR
MOST_GAP = 0.1  # nats per coordinate between y_T and the prior that samples may start from


@dataclass(frozen=True)
class SamplingStep:
    """What a callback sees after a step; the tensors are the sampler's own, not copies."""

    number: int  # 1 … total
    total: int
    s: float  # the time that was reached
    y: Tensor  # (B, K, *shape) float64, the state there
    x: Tensor  # (B, *shape) float64, the estimate of x that the step was made with
    samples: range  # their numbers


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
        white = _whitened(kernel.cholesky, y)
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


# ---------------------------------------------------------------- solvers


@dataclass(frozen=True)
class Solver(ABC):
    """How to go back: on which times, and what is done between them."""

    steps: int = 100
    grid: Grid = "information"

    def __post_init__(self) -> None:
        _whole(self.steps, "steps", 1)
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
        between = process._from(process._solution(eager=True), way.times[1:], way.times[:-1])
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


# ---------------------------------------------------------------- what users call


def sample(
    model: ScoreModel,
    n: int = 16,
    solver: Solver | None = None,
    seed: int = 0,
    *,
    shape: Sequence[int] | None = None,
    start: int = 0,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    callback: Callable[[SamplingStep], None] | None = None,
    raw: bool = False,
) -> Tensor:
    """n samples as data: (n, *shape), pixels for a likelihood of pixels.

    solver: Ancestral() by default; the network is called solver.steps + 1 times.
    seed, start: the samples have the numbers start … start + n − 1, and sample i is a function of
        (seed, i): not of the batch size, nor of how many processes share the work. Under
        torch.distributed each of them makes a part, and all of them get the whole.
    shape: of one example; needed where the network does not say (`network.layout.shape`).
    device: where the samples are put, by default the model's.
    callback: is called after each step of each batch.
    raw: the numbers that diffuse, not turned back into data.
    """
    solver = Ancestral() if solver is None else solver
    _check(model, n, solver, seed, start, batch_size)
    sizes = _data_shape(model, shape)
    rank, world = processes()
    where = model.process.device
    target = where if device is None else _device(device)
    settings = repr((n, solver, seed, sizes, start, raw))
    if not agree([zlib.crc32(settings.encode())], where):
        raise ValueError(
            "the processes were asked for different samples; expected the same arguments in each "
            "of them: the samples are shared out here. Pass the same n, seed and start."
        )
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    mine = range(start + n * rank // world, start + n * (rank + 1) // world)
    failed = True
    try:
        with torch.no_grad():
            way = Way.of(model, grid_times(model, solver.steps, solver.grid), sizes)
            job = _Job(way, solver.prepare(way), _prior(model), seed, callback, raw)
            parts = [
                job.samples(mine[first : first + batch_size])
                for first in range(0, len(mine), batch_size)
            ]
            own = torch.cat([job.empty(), *parts])
        failed = False
    finally:
        for module, training in was_training.items():
            module.training = training
        others = any_failed(failed, where)
    if others:
        raise RuntimeError("another process of this sampling failed; see its message")
    return _gathered(own, n, world).to(target)


@dataclass(frozen=True)
class _Job:
    """Samples by their numbers."""

    way: Way
    walk: Walk
    prior: Tensor  # (K, K), the factor of its covariance
    seed: int
    callback: Callable[[SamplingStep], None] | None
    raw: bool

    def samples(self, numbers: range) -> Tensor:
        """One batch, as data."""
        way, times = self.way, self.way.times.tolist()
        index = torch.arange(numbers.start, numbers.stop, device=self.prior.device)
        size = math.prod(way.shape)

        def draw(purpose: str, step: int, rows: int) -> Tensor:
            return Counted(self.seed, index, step).normal(purpose, (rows, size), torch.float64)

        y = mix(self.prior.unsqueeze(0), draw("prior", 0, len(self.prior)))
        finite: list[Tensor] = []
        for number, stop in enumerate(self.walk(y, draw), 1):
            y = stop.y
            self._note(finite, stop.x, times)
            if self.callback is not None:
                state, x = y.unflatten(-1, way.shape), stop.x.unflatten(-1, way.shape)
                total = len(times) - 1
                self.callback(SamplingStep(number, total, times[number], state, x, numbers))
        x = way.look(len(times) - 1, y).x
        self._note(finite, x, times)
        self._refuse(finite, 0, times)
        return self._data(x.unflatten(-1, way.shape))

    def empty(self) -> Tensor:
        """No samples, of the right type."""
        return self._data(self.prior.new_zeros((0, *self.way.shape)))

    def _data(self, x: Tensor) -> Tensor:
        data = x if self.raw else self.way.model.likelihood.restore(x)
        return data.to(self.way.model.dtype) if data.is_floating_point() else data

    def _note(self, finite: list[Tensor], x: Tensor, times: list[float]) -> None:
        """Remember whether all is well; a GPU is asked at the end only, so that it never waits."""
        finite.append(x.isfinite().all())
        if x.device.type == "cpu":
            self._refuse(finite[-1:], len(finite) - 1, times)

    def _refuse(self, finite: list[Tensor], first: int, times: list[float]) -> None:
        good = torch.stack(finite)
        if not bool(good.all()):
            step, total = first + int(good.logical_not().nonzero()[0, 0]), len(times) - 1
            raise ValueError(
                f"the model's estimate of x is not finite in step {min(step + 1, total)} of "
                f"{total}, at s = {times[step]:.6g}; expected finite numbers. Look for NaN in the "
                "network's weights and for overflow in its type; EulerMaruyama may need more steps."
            )


def _whitened(factor: Tensor, y: Tensor) -> Tensor:
    """L⁻¹y by substitution, one number like another in every batch: (1, K, K), (B, K, d)."""
    rows: list[Tensor] = []
    for i in range(y.shape[1]):
        rest = y[:, i]
        for j, known in enumerate(rows):
            rest = torch.addcmul(rest, factor[:, i, j, None], known, value=-1)
        rows.append(rest / factor[:, i, i, None])
    return torch.stack(rows, 1)


def _prior(model: ScoreModel) -> Tensor:
    """The factor of the prior's covariance, if y_T comes anywhere near it: (K, K)."""
    process, moments = model.process, model.moments
    factor = torch.linalg.cholesky(process.prior_covariance)
    second = (moments.mean.square() + moments.std.square()).mean()
    gap = prior_gap(process.transition(process.horizon), factor, second).item()
    if not gap <= MOST_GAP:
        raise ValueError(
            f"{process.name!r} does not reach its prior: at s = {process.horizon:g} the state is "
            f"{gap:.3g} nats per coordinate away from it, expected at most {MOST_GAP:g}. Use a "
            "longer horizon or a faster rate, or give the prior that the process arrives at."
        )
    return factor


def _gathered(own: Tensor, n: int, world: int) -> Tensor:
    """The samples of all processes, as numbers: nothing is pickled."""
    if world == 1:
        return own
    nccl = torch.distributed.get_backend() == "nccl"
    own = own if nccl else own.cpu()
    shares = [n * (rank + 1) // world - n * rank // world for rank in range(world)]
    padded = own.new_zeros((max(shares), *own.shape[1:]))
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in shares]
    torch.distributed.all_gather(everyone, padded)
    return torch.cat([part[:count] for part, count in zip(everyone, shares, strict=True)])


# ---------------------------------------------------------------- checks


def _whole(value: object, name: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}; expected a whole number ≥ {least}.")


def _check(
    model: object, n: int, solver: object, seed: object, start: int, batch_size: int
) -> None:
    if not isinstance(model, ScoreModel):
        raise ValueError(
            f"sample got {type(model).__name__}; expected a ScoreModel, that is a network and a "
            "process: ornstein.ScoreModel(network, process, likelihood)."
        )
    if not isinstance(solver, Solver):
        given = solver.__name__ if isinstance(solver, type) else repr(solver)
        raise ValueError(
            f"solver={given}; expected a solver, for example ornstein.Ancestral(steps=100)."
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}; expected a whole number.")
    _whole(n, "n", 1)
    _whole(start, "start", 0)
    _whole(batch_size, "batch_size", 1)


def _device(given: torch.device | str) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={given!r}; expected where to put the samples, such as 'cpu' or 'cuda'."
        ) from error


def _data_shape(model: ScoreModel, given: Sequence[int] | None) -> tuple[int, ...]:
    """The shape of one example: what was given, or what the network says."""
    if given is None:
        inner = getattr(model.network, "module", None)  # where it is wrapped
        layouts = (getattr(network, "layout", None) for network in (model.network, inner))
        given = next((layout.shape for layout in layouts if layout is not None), None)
        if given is None:
            raise ValueError(
                f"the network, {type(model.network).__name__}, does not say which shape the data "
                "has; expected shape=, that of one example. Pass for example shape=(3, 32, 32)."
            )
    sizes = tuple(given) if isinstance(given, Sequence) else ()
    if not sizes or not all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes
    ):
        raise ValueError(
            f"shape={given!r}; expected the shape of one example, without the batch, for example "
            "(3, 32, 32) or (2,)."
        )
    nothing = torch.zeros((0, *sizes), dtype=torch.float64, device=model.process.device)
    model.check_data(model.likelihood.restore(nothing), model.likelihood)  # do the moments fit?
    return sizes
