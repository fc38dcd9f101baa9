"""`sample`: numbered samples, each a function of the seed and of its own number.

On a GPU the network is captured (`compiling`). From the second of several batches on, the whole way
back is one CUDA graph, a function of the samples' numbers: nothing is launched one by one.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ornstein import compiling
from ornstein.compiling import Captured, Compile, Precision, Quick
from ornstein.diagnostics import prior_gap
from ornstein.draws import Counted
from ornstein.ledger import agree, any_failed, processes
from ornstein.sampling.grids import whole
from ornstein.sampling.solvers import Solver, TableSolver
from ornstein.sampling.stochastic import Ancestral
from ornstein.sampling.way import Walk, Way
from ornstein.score import ScoreModel
from ornstein.transition import mix

MOST_GAP = 0.1  # nats per coordinate between y_T and the prior that samples may start from
USUAL = 256  # samples at a time on a CPU
MOST = 1024  # on a GPU, beyond which they are no faster
MOST_STEPS = 256  # of a way back that is captured as a whole
EVEN = 8  # batches on a GPU are a multiple of this


@dataclass(frozen=True)
class SamplingStep:
    """What a callback sees after a step; the tensors are the sampler's own, not copies."""

    number: int  # 1 … total
    total: int
    s: float  # the time that was reached
    y: Tensor  # (B, K, *shape) float64, the state there
    x: Tensor  # (B, *shape) float64, the estimate of x that the step was made with
    samples: range  # their numbers


def sample(
    model: ScoreModel,
    n: int = 16,
    solver: Solver | None = None,
    seed: int = 0,
    *,
    shape: Sequence[int] | None = None,
    start: int = 0,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    callback: Callable[[SamplingStep], None] | None = None,
    raw: bool = False,
    compile: Compile = "auto",
    precision: Precision = "auto",
) -> Tensor:
    """n samples as data: (n, *shape), pixels for a likelihood of pixels.

    solver: Ancestral() by default; the network is asked solver.evaluations times.
    seed, start: the samples have the numbers start … start + n − 1, and sample i is a function of
        (seed, i): not of the batch size, nor of how many processes share the work. Under
        torch.distributed each of them makes a part, and all of them get the whole.
    shape: of one example; needed where the network does not say (`network.layout.shape`).
    device: where the samples are put, by default the model's.
    batch_size: at most so many at a time, by default 256, and on a GPU what its memory allows, up
        to 1024; halved where the device has not enough memory for it.
    callback: is called after each look at the model, for each batch.
    raw: the numbers that diffuse, not turned back into data.
    compile: the network, by torch.compile; "auto" does on CUDA where there is much to do, and
        captures CUDA graphs in any case; "off" does neither.
    precision: of the network's arithmetic. "auto" leaves it as it is, "float32" and "tf32" turn
        TF32 off and on, "bfloat16" computes in it; all else stays float64.
    """
    solver = Ancestral() if solver is None else solver
    _check(model, n, solver, seed, start, batch_size)
    compiling.check_precision(precision)
    rows = n * (solver.evaluations or USUAL)
    compiling.wanted(compile, model.process.device, rows)  # which says what is wrong
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
        with torch.no_grad(), compiling.arithmetic(precision):
            grid = solver.times(model, sizes)
            way = Way.of(model, grid, sizes, solver.looks(grid))
            size = _batch(way, len(mine), batch_size, compile)
            quick = compiling.quick(model.network, size, where, compile, precision, rows)
            if quick is not None:
                way = replace(way, model=compiling.with_network(model, quick))
            job = _Job(way, solver.prepare(way), _prior(model), seed, callback, raw, quick)
            whole = isinstance(solver, TableSolver) and callback is None
            whole = whole and compile != "off" and where.type == "cuda" and len(grid) <= MOST_STEPS
            own = torch.cat([job.empty(), *job.batches(mine, size, whole)])
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
    quick: Quick | None  # the network, where it is not asked as it is

    def batches(self, numbers: range, size: int, whole: bool) -> Iterator[Tensor]:
        """All of them; a batch too large for the device's memory is tried again by halves.

        whole: whether the way back of a batch may be captured.
        """
        graph = Captured(self.walked, warm=0, possible=False)  # the first batch is its warm-up
        while numbers:
            try:
                found = self.samples(numbers[:size], size, graph)
            except torch.OutOfMemoryError as error:
                size = min(size, len(numbers)) // 2
                if size == 0:
                    raise
                warnings.warn(
                    f"not enough memory ({str(error).splitlines()[0]}); going on with {size} "
                    "samples at a time",
                    stacklevel=3,
                )
                graph.possible = False  # which may be what was too much
                graph.forget()
                if self.quick is not None:
                    self.quick.resize(size)
                continue
            numbers = numbers[size:]
            if whole and len(numbers) > size:  # worth it if two batches are left
                # tried once, unless the network alone could not be captured
                graph.possible, whole = self.quick is None or self.quick.captured, False
                if self.quick is not None:  # its own graph is not needed any more
                    self.quick.resize(size)
            yield found

    def samples(self, numbers: range, size: int, graph: Captured) -> Tensor:
        """One batch, as data."""
        if graph.possible:  # filled up by the last of them
            index = self._index(range(numbers.start, numbers.start + size))
            x, finite = graph(index.clamp(max=numbers.stop - 1))
        else:
            x, finite = self.walked(self._index(numbers), numbers)
        self._refuse(finite, 0)
        return self._data(x[: len(numbers)].unflatten(-1, self.way.shape))

    def walked(self, index: Tensor, numbers: range | None = None) -> tuple[Tensor, Tensor]:
        """The way back of the samples with these numbers: (B, d), and whether each look was finite.

        numbers: the same on the host, for the callback.
        """
        way, size = self.way, math.prod(self.way.shape)

        def draw(purpose: str, step: int, rows: int) -> Tensor:
            return Counted(self.seed, index, step).normal(purpose, (rows, size), torch.float64)

        y = mix(self.prior.unsqueeze(0), draw("prior", 0, len(self.prior)))
        finite: list[Tensor] = []
        total = len(way.times) - 1
        for number, stop in enumerate(self.walk(y, draw), 1):
            y = stop.y
            self._note(finite, stop.x)
            if self.callback is not None and numbers is not None:
                state, x = y.unflatten(-1, way.shape), stop.x.unflatten(-1, way.shape)
                s = self.times[number]
                self.callback(SamplingStep(number, total, s, state, x, numbers))
        x = way.look(total, y).x
        self._note(finite, x)
        return x, torch.stack(finite)

    def _index(self, numbers: range) -> Tensor:
        return torch.arange(numbers.start, numbers.stop, device=self.prior.device)

    @cached_property
    def times(self) -> list[float]:
        """Of the looks, on the host."""
        return self.way.times.tolist()

    def empty(self) -> Tensor:
        """No samples, of the right type."""
        return self._data(self.prior.new_zeros((0, *self.way.shape)))

    def _data(self, x: Tensor) -> Tensor:
        data = x if self.raw else self.way.model.likelihood.restore(x)
        return data.to(self.way.model.dtype) if data.is_floating_point() else data

    def _note(self, finite: list[Tensor], x: Tensor) -> None:
        """Remember whether all is well; a GPU is asked at the end only, so that it never waits."""
        finite.append(x.isfinite().all())
        if x.device.type == "cpu":
            self._refuse(finite[-1].unsqueeze(0), len(finite) - 1)

    def _refuse(self, good: Tensor, first: int) -> None:
        if not bool(good.all()):
            step, total = first + int(good.logical_not().nonzero()[0, 0]), len(self.times) - 1
            raise ValueError(
                f"the model's estimate of x is not finite in step {min(step + 1, total)} of "
                f"{total}, at s = {self.times[step]:.6g}; expected finite numbers. Look for NaN in "
                "the network's weights and for overflow in its type; EulerMaruyama may need more "
                "steps."
            )


def _batch(way: Way, n: int, given: int | None, compile: Compile) -> int:
    """Samples at a time. Where batches are filled up to one size, they are about equal."""
    device, size = way.grid.device, given
    on_cpu = device.type != "cuda"
    if size is None and on_cpu:
        size = USUAL
    elif size is None:
        K, d = way.model.process.n_vars, math.prod(way.shape)
        last = len(way.times) - 1
        start = torch.zeros(compiling.FEW, K, d, dtype=torch.float64, device=device)
        size = compiling.largest_batch(lambda few: way.look(last, start[:few]), device, MOST)
    return size if compile == "off" or (on_cpu and compile == "auto") else evenly(n, size)


def evenly(n: int, most: int) -> int:
    """The size of as few batches as will do, at most so many in each."""
    each = -(-n // -(-n // most)) if n else 1
    return min(most, -(-each // EVEN) * EVEN)


def _prior(model: ScoreModel) -> Tensor:
    """The factor of the prior's covariance, if y_T comes anywhere near it: (K, K)."""
    process, moments = model.process, model.moments
    factor = process.prior_factor
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


def _check(
    model: object, n: int, solver: object, seed: object, start: int, batch_size: int | None
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
    whole(n, "n", 1)
    whole(start, "start", 0)
    whole(1 if batch_size is None else batch_size, "batch_size", 1)


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
