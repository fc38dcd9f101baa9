"""`sample`: numbered samples, each a function of the seed and of its own number."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.diagnostics import prior_gap
from ornstein.draws import Counted
from ornstein.ledger import agree, any_failed, processes
from ornstein.sampling.grids import whole
from ornstein.sampling.solvers import Solver
from ornstein.sampling.stochastic import Ancestral
from ornstein.sampling.way import Walk, Way
from ornstein.score import ScoreModel
from ornstein.transition import mix

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

    solver: Ancestral() by default; the network is asked solver.evaluations times.
    seed, start: the samples have the numbers start … start + n − 1, and sample i is a function of
        (seed, i): not of the batch size, nor of how many processes share the work. Under
        torch.distributed each of them makes a part, and all of them get the whole.
    shape: of one example; needed where the network does not say (`network.layout.shape`).
    device: where the samples are put, by default the model's.
    batch_size: at a time; halved where the device has not enough memory for it.
    callback: is called after each look at the model, for each batch.
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
            grid = solver.times(model, sizes)
            way = Way.of(model, grid, sizes, solver.looks(grid))
            job = _Job(way, solver.prepare(way), _prior(model), seed, callback, raw)
            own = torch.cat([job.empty(), *job.batches(mine, batch_size)])
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

    def batches(self, numbers: range, size: int) -> Iterator[Tensor]:
        """All of them; a batch too large for the device's memory is tried again by halves."""
        while numbers:
            try:
                found = self.samples(numbers[:size])
            except torch.OutOfMemoryError as error:
                size = min(size, len(numbers)) // 2
                if size == 0:
                    raise
                warnings.warn(
                    f"not enough memory ({str(error).splitlines()[0]}); going on with {size} "
                    "samples at a time",
                    stacklevel=3,
                )
                continue
            numbers = numbers[size:]
            yield found

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
    whole(n, "n", 1)
    whole(start, "start", 0)
    whole(batch_size, "batch_size", 1)


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
