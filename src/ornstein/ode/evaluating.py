"""Bits per dimension of a data set by the probability flow, beside the bound's of `evaluation`.

The steps of the flow are chosen on the first examples and kept; an example's draws and probes are a
function of (seed, example). So its figure depends neither on its batch nor on who computes it: what
is interrupted goes on where it was, and several processes share the examples.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ornstein import compiling
from ornstein.draws import Counted
from ornstein.evaluation import Result, with_error, without_nan
from ornstein.examples import Source, marks_of
from ornstein.files import write_arrays
from ornstein.ledger import UNREADABLE, Ledger, Rows, agree, gathered, processes
from ornstein.likelihood import Likelihood
from ornstein.ode.likelihood import Flow, OdeBound
from ornstein.ode.volume import Path, Trace
from ornstein.sampling.flow import PILOT, Method
from ornstein.sampling.grids import whole
from ornstein.score import ScoreModel
from ornstein.terms import Bound
from ornstein.truncation import Truncation
from ornstein.work import Work

FORMAT = 1  # of the files that such an evaluation leaves behind


@dataclass(frozen=True)
class Cost:
    """What an evaluation will take."""

    evaluations: int  # of the network, for each draw
    backward: int  # passes in each of them
    draws: int
    examples: int  # that are left to do
    seconds: float

    @property
    def line(self) -> str:
        many = (
            f"{self.draws} draws of {self.examples:,}" if self.draws > 1 else f"{self.examples:,}"
        )
        plural = "es" if self.backward > 1 else ""
        return (
            f"{self.evaluations} network evaluations, each with {self.backward} backward "
            f"pass{plural}, for each of {many} examples: about {_duration(self.seconds)}"
        )


@dataclass(frozen=True)
class OdeEvaluation(Result):
    """Bits per dimension of a data set by the flow, an upper bound; the parts are costs too."""

    bits_per_dim: float
    standard_error: float  # over examples, draws and probes
    prior: float
    flow: float  # with what weighing the draws costs
    reconstruction: float
    examples: int
    draws: int
    probes: int  # 0 where the trace is exact
    evaluations: int  # of the network, for each draw
    method: str
    rtol: float
    atol: float
    dims: int
    bound: str
    process: str
    parametrisation: str
    truncation: str
    density: bool  # whether the data is real-valued, so that this is a density's
    per_example: Tensor  # (N,) float64, bits/dim
    marks: Tensor  # (N,) a checksum of each example

    @property
    def line(self) -> str:
        """The result in one honest line."""
        kind = "of a density " if self.density else ""
        trace = "exact trace" if not self.probes else f"{self.probes} probe{_s(self.probes)}"
        return (
            f"{with_error(self.bits_per_dim, self.standard_error)} bits/dim {kind}"
            f"({self.bound}, {self.process}, {self.parametrisation}; truncated at "
            f"{self.truncation}; {self.draws} draw{_s(self.draws)}, {trace}, {self.evaluations} "
            f"network evaluations × {self.examples} example{_s(self.examples)})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the examples, for JSON."""
        record = {k: v for k, v in asdict(self).items() if not isinstance(v, Tensor)}
        return without_nan(record)


def evaluate_ode(
    model: ScoreModel,
    data: Tensor | Iterable[Any],
    *,
    draws: int = 1,
    trace: Trace = "auto",
    probes: int | None = None,
    method: Method = "dopri5",
    rtol: float | None = None,
    atol: float | None = None,
    likelihood: Likelihood | None = None,
    truncation: Truncation | None = None,
    batch_size: int = 256,
    limit: int | None = None,
    seed: int = 0,
    folder: str | FilePath | None = None,
    save_every: float = 30.0,
    on_cost: Callable[[Cost], None] | None = None,
    quiet: bool = False,
) -> OdeEvaluation:
    """Bits per dimension of a data set by the probability flow: estimate ± standard error.

    Prints what it will cost, and one line with the result. TF32 is off. data, limit, folder and
    save_every are those of `evaluate`, draws to atol those of `ode_likelihood`.
    batch_size: examples times draws at a time; the result does not depend on it.
    on_cost: is told the cost before the work begins, in one process.
    """
    if not isinstance(model, ScoreModel):
        raise ValueError(
            f"model was given as {type(model).__name__}; expected ornstein.ScoreModel(network, "
            "process)."
        )
    for name, value in (("draws", draws), ("batch_size", batch_size), ("limit", limit)):
        if value is not None or name != "limit":
            whole(value, name, 1)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}; expected a whole number.")
    flow = Flow(model, draws, trace, probes, method, rtol, atol, likelihood, truncation)
    was_training = {module: module.training for module in model.modules()}
    generator = torch.random.get_rng_state()  # a loader may draw from it
    model.eval()
    try:
        with torch.no_grad(), compiling.arithmetic("float32"):
            work = _Evaluating(flow, Source(data, limit), seed, batch_size, folder, save_every)
            if work.store.first_process and (on_cost is not None or not quiet):
                cost = work.cost()
                if on_cost is not None:
                    on_cost(cost)
                if not quiet:
                    print(cost.line)
            result = work.result()
    finally:
        torch.random.set_rng_state(generator)
        for module, training in was_training.items():
            module.training = training
    if work.store.first_process:
        if work.store.folder is not None:
            result.save(work.store.folder / "result.json", settings=work.settings)
        if not quiet:
            print(result.line)
    return result


class _Evaluating:
    """The examples, what is done of them, and how to do the rest."""

    def __init__(
        self,
        flow: Flow,
        source: Source,
        seed: int,
        batch_size: int,
        folder: str | FilePath | None,
        save_every: float,
    ) -> None:
        model = flow.model
        self.flow, self.source, self.seed, self.batch_size = flow, source, seed, batch_size
        self.likelihood = model.likelihood if flow.likelihood is None else flow.likelihood
        self.truncation = model.truncation if flow.truncation is None else flow.truncation
        self.where = model.process.device
        work = Work(model, "x", self.likelihood, self.truncation, seed, flow.draws, batch_size)
        options = ("trace", "probes", "method", "rtol", "atol")
        settings = {key: getattr(flow, key) for key in options}
        known = {**work.settings(source, None), "format": FORMAT, "times": "flow"}
        self.settings = {**known, **settings}
        self.store = Ledger(folder, self.settings, save_every)
        self.size = max(1, batch_size // flow.draws)
        self.head = source.head(max(PILOT, self.size))
        self.store.left(0, 0, marks_of(self.head), keep=True)  # nobody may see others
        self.path = self._path()

    def _path(self) -> Path:
        """The steps: those of the folder, or chosen on the first examples."""
        file = None if self.store.folder is None else self.store.folder / "steps.npz"
        if file is not None and file.exists():
            try:
                with np.load(file) as archive:
                    times = torch.from_numpy(archive["times"]).to(self.where)
            except UNREADABLE as error:
                raise ValueError(
                    f"{file} can't be read ({error}); expected the steps of an evaluation. Delete "
                    "its folder and repeat the command."
                ) from error
            return Path(times, self.flow.method)
        path = self.flow.path(self.head[:PILOT].to(self.where))
        if file is not None and self.store.first_process:
            write_arrays(file, {"times": path.times.cpu().numpy()})
        return path

    def cost(self) -> Cost:
        """From one look at as many states as will be looked at together."""
        x = self.head[: self.size].to(self.where)
        passes, seconds = self.flow.timed(x, self.path)
        done = self.store.done.get(0)
        total = sum(len(batch) for _, batch in self.source.batches(self.batch_size))
        left = total - (0 if done is None else int(done.sum()))
        looks = self.path.evaluations * self.flow.draws * left
        share = seconds / (len(x) * self.flow.draws) / processes()[1]
        return Cost(self.path.evaluations, passes, self.flow.draws, left, looks * share)

    def result(self) -> OdeEvaluation:
        """Do what is left, and sum it up."""
        count, seen = 0, 0
        rank, world = processes()
        with self.store.flushed(self.where):
            for number, (first, batch) in enumerate(self.source.batches(self.batch_size)):
                count = first + len(batch)
                marks = marks_of(batch)
                left = self.store.left(0, first, marks)
                seen = zlib.crc32(marks.tobytes(), seen)  # everybody must see the same data
                if number % world != rank or not len(left):
                    continue
                for chunk in left.split(self.size):
                    index = first + chunk
                    random = Counted(self.seed, index.to(self.where))
                    found = self.flow.bound(batch[chunk].to(self.where), random, self.path)
                    self.store.add(0, index, marks[chunk.numpy()], _as_row(found))
        if not agree([count, seen], self.where):
            raise ValueError(
                "the processes were given different data; expected the same loader in each of "
                "them, unshuffled: examples are shared out here. Don't use a DistributedSampler."
            )
        rows = self.store.rows.part(0, count)
        return self._summary(gathered(rows, self.flow.draws, self.where).ordered(), count)

    def _summary(self, rows: Rows, n: int) -> OdeEvaluation:
        """A pure function of the rows of n examples, which are in order."""
        if len(rows.index) != n:
            raise ValueError(
                f"{n - len(rows.index)} of {n} examples are missing from this evaluation; expected "
                "every process to see the same loader. Delete its folder to start anew."
            )
        scale, model = -1 / (rows.dims * math.log(2)), self.flow.model
        bits = scale * (rows.prior + rows.diffusion + rows.reconstruction)
        exact, (rtol, atol) = self.flow.exact(rows.dims), self.flow.tolerances(rows.dims)
        return OdeEvaluation(
            bits_per_dim=float(bits.mean()),
            standard_error=float(bits.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan,
            prior=float(scale * rows.prior.mean()),
            flow=float(scale * rows.diffusion.mean()),
            reconstruction=float(scale * rows.reconstruction.mean()),
            examples=n,
            draws=self.flow.draws,
            probes=0 if exact else self.flow.counted(rows.dims),
            evaluations=self.path.evaluations + self.flow.asks_again(self.likelihood),
            method=self.flow.method,
            rtol=rtol,
            atol=atol,
            dims=rows.dims,
            bound=f"{self.likelihood.name}, flow",
            process=model.process.name,
            parametrisation=model.parametrisation,
            truncation=str(self.truncation),
            density=self.likelihood.density,
            per_example=torch.from_numpy(bits),
            marks=torch.from_numpy(rows.mark[:n].astype(np.int64)),
        )


def _as_row(found: OdeBound) -> Bound:
    """For the ledger, which knows bounds that are sampled in time; nothing is, here."""
    nothing = torch.full_like(found.samples, math.nan)
    return Bound(
        nats=found.nats,
        prior=found.prior,
        diffusion=found.flow + found.weighting,
        reconstruction=found.reconstruction,
        dims=found.dims,
        name=found.name,
        samples=found.samples,
        logsnr=nothing,
        errors=nothing,
    )


def _s(count: int) -> str:
    return "s" if count > 1 else ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
