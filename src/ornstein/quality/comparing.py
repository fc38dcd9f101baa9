"""`compare`: quality against network evaluations, for several solvers on one trained model.

Every solver goes back within each number of network evaluations, under one process or several, and
makes n samples of the same seed. A point of the comparison is the figures of these samples against
one reference, whose features and floor are computed once. With `learn`, also under the process and
times that are learned for each solver and number (`wayback.learn_process`).

A folder keeps what is done: settings.json, against.json and a file for each point, all of them
whole or not there. The same call goes on from there; more solvers, processes and numbers of
evaluations may be added later, everything else must stay.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ornstein.compiling import Compile, Precision, check_precision
from ornstein.data import Dataset
from ornstein.ledger import processes as ranks
from ornstein.process import Process
from ornstein.quality.comparison import Comparison, LeftOut, Point
from ornstein.quality.costing import Cost, cost
from ornstein.quality.distances import DIRECTIONS, NEIGHBOURS
from ornstein.quality.features import Features
from ornstein.quality.keeping import SETTINGS, Kept
from ornstein.quality.referring import (
    OTHER,
    Against,
    Kind,
    Reference,
    SplitName,
    Tell,
    chosen,
    usual_features,
)
from ornstein.sampling import Ancestral, SamplingStep, Solver, TableSolver, sample
from ornstein.sampling.grids import whole
from ornstein.score import ScoreModel
from ornstein.sharing import name_or_description
from ornstein.truncation import ends
from ornstein.wayback import LearnedWay, Spectrum, learn_process
from ornstein.wayback.learning import EXAMPLES
from ornstein.work import fingerprint, kernel_print, network_print

FORMAT = 1  # of the files of a point
EVALUATIONS = (5, 10, 20, 50, 100)
LEARNED = {"learned-0": 0, "learned-1": 1, "learned-2": 2}  # auxiliary variables of each
LEARN_MOST = 30  # evaluations up to which ways are learned; with more it takes long, gains little
AGAINST = "against.json"


@dataclass(frozen=True)
class Job:
    """A point that is to be made."""

    process: str
    solver: str
    evaluations: int
    within: Solver
    n_aux: int | None = None  # of a way that is learned

    @property
    def made(self) -> int:
        """Network evaluations for each sample."""
        return self.within.evaluations or 0


def compare(
    model: ScoreModel,
    data: Dataset,
    solvers: Mapping[str, Solver],
    evaluations: Sequence[int] = EVALUATIONS,
    *,
    processes: Mapping[str, Process] | None = None,
    learn: bool = False,
    n: int = 1000,
    seed: int = 0,
    features: Features | Kind | None = None,
    split: SplitName = "train",
    batch_size: int | None = None,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    compile: Compile = "auto",
    precision: Precision = "auto",
    tell: Tell | None = None,
    callback: Callable[[Point], None] | None = None,
) -> Comparison:
    """Quality against network evaluations, for several solvers by their names.

    processes: to put a channel model under, by their names; by default the model's own.
    learn: also under what is learned for a solver: a process of no, one and two auxiliary
        variables, and its times. Only for channel models and solvers that are tables.
    n, seed: of the samples of every point; features, split: as in `measure`.
    folder: where to keep what is done; the same call goes on from there. cache: of classifiers.
    batch_size, compile, precision: as in `sample`.
    tell: is told what is being done; callback: is called with each new point, when it is kept.
    """
    work = Work(
        model,
        data,
        solvers,
        evaluations,
        processes=processes,
        learn=learn,
        n=n,
        seed=seed,
        features=features,
        split=split,
        batch_size=batch_size,
        folder=folder,
        cache=cache,
        compile=compile,
        precision=precision,
    )
    return work.run(tell, callback)


@dataclass(frozen=True, eq=False)
class Work:
    """A comparison that is to be made: what `compare` was given, checked."""

    model: ScoreModel
    data: Dataset
    solvers: Mapping[str, Solver]
    evaluations: Sequence[int] = EVALUATIONS
    processes: Mapping[str, Process] | None = None
    learn: bool = False
    n: int = 1000
    seed: int = 0
    features: Features | Kind | None = None
    split: SplitName = "train"
    batch_size: int | None = None
    folder: str | Path | None = None
    cache: str | Path | None = None
    compile: Compile = "auto"
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def named(self) -> Mapping[str, Process]:
        """The processes by their names."""
        own = self.model.process
        return {own.name: own} if self.processes is None else self.processes

    @cached_property
    def _planned(self) -> tuple[list[Job], list[LeftOut]]:
        jobs: list[Job] = []
        left: list[LeftOut] = []
        for name, solver in self.solvers.items():
            found = []
            for count in sorted(set(self.evaluations)):
                try:
                    found.append(Job("", name, count, solver.within(count)))
                except ValueError as error:
                    left.append(LeftOut(name, count, str(error)))
            jobs += [replace(job, process=process) for process in self.named for job in found]
            if not self.learn:
                continue
            if not isinstance(solver, TableSolver):
                left.append(LeftOut(name, None, "not learned: no closed form on Gaussian data"))
                continue
            for job in found:
                if job.evaluations > LEARN_MOST:
                    why = f"not learned: more than {LEARN_MOST} evaluations"
                    left.append(LeftOut(name, job.evaluations, why))
                    continue
                jobs += [replace(job, process=way, n_aux=a) for way, a in LEARNED.items()]
        if not jobs:
            reasons = "; ".join(f"{one.solver}: {one.why}" for one in left)
            raise ValueError(f"no solver can do with so few evaluations ({reasons}) Allow more.")
        order = [*self.named, *LEARNED]
        jobs.sort(key=lambda job: order.index(job.process))  # stable
        return jobs, left

    @property
    def jobs(self) -> list[Job]:
        """All points, by process, solver and number of evaluations."""
        return self._planned[0]

    @property
    def left(self) -> list[Job]:
        """Those that are not in the folder."""
        self._kept.check(self.settings())
        done = self._done()
        return [job for job in self.jobs if job not in done]

    def cost(self) -> Cost:
        """Of the points that are left; a network evaluation is timed. None of it is learning."""
        total = sum(job.made for job in self.left)
        if total == 0:
            return Cost(self.n, 0, 0.0)
        shape, solver = self.data.shape, Ancestral(steps=max(1, total - 1))
        return cost(
            self.model,
            self.n,
            solver,
            shape=shape,
            batch_size=self.batch_size,
            precision=self.precision,
        )

    @property
    def most_rows(self) -> int:
        """Examples through the network for the largest point that is left."""
        return self.n * max((job.made for job in self.left), default=0)

    def run(
        self, tell: Tell | None = None, callback: Callable[[Point], None] | None = None
    ) -> Comparison:
        """Make what is left."""
        told = tell or (lambda text: None)
        self._kept.check(self.settings())
        done = self._done()
        against = self._kept.read(AGAINST, "the reference of a comparison", Against.read)
        left = [job for job in self.jobs if job not in done]
        if left or against is None:
            reference = Reference.of(
                self.data,
                self.n,
                self.features,
                split=self.split,
                folder=self.cache,
                device=self.model.process.device,
                tell=told,
            )
            against = reference.against
            self._kept.keep(SETTINGS, self.settings())
            self._kept.keep(AGAINST, asdict(against))
        for job in left:
            done[job] = self._point(job, reference, tell)
            self._kept.keep(self._file(job), asdict(done[job]))
            if callback is not None:
                callback(done[job])
        points = tuple(done[job] for job in self.jobs)
        left_out = tuple(self._planned[1])
        return Comparison(points, left_out, against, self.n, self.seed, self.settings())

    # ---------------------------------------------------------------- a point

    def _point(self, job: Job, reference: Reference, tell: Tell | None) -> Point:
        told = tell or (lambda text: None)
        title = f"{job.process}, {job.solver}, {job.made} evaluations"
        found = Point(
            job.process, job.solver, repr(job.within), job.evaluations, job.made, None, None
        )
        try:
            model, solver = self.under(self.named.get(job.process)), job.within
            if job.n_aux is not None:
                told(f"{title}: learning the way back")
                way = self._learned(job)
                model, solver = self.under(way.process.to(self.model.process.device)), way.solver
                found = replace(found, label=repr(solver), way=_described(way))
            began = time.perf_counter()
            samples = self._samples(model, solver, title, tell)
        except ValueError as error:  # a solver that diverges is not the end of the others
            if ranks()[1] > 1:
                raise
            return replace(found, note=str(error))
        finite = bool(samples.isfinite().all())  # which waits for the device
        found = replace(found, seconds=time.perf_counter() - began)
        if not finite:
            return replace(found, note="the samples are too large for their type")
        told(f"{title}: measuring")
        try:
            figures = reference.figures(samples)
        except ValueError as error:
            return replace(found, note=str(error))
        if not all(math.isfinite(value) for value in asdict(figures).values() if value is not None):
            return replace(found, note="the samples are too far off to be measured")
        return replace(found, figures=figures)

    def _samples(self, model: ScoreModel, solver: Solver, title: str, tell: Tell | None) -> Tensor:
        def stepped(step: SamplingStep) -> None:
            if tell is not None:
                where = f"look {step.number}/{step.total}"
                tell(f"{title}: {step.samples.stop:,} of {self.n:,} samples, {where}")

        return sample(
            model,
            self.n,
            solver,
            self.seed,
            shape=self.data.shape,
            batch_size=self.batch_size,
            callback=None if tell is None else stepped,
            compile=self.compile,
            precision=self.precision,
        )

    def under(self, process: Process | None) -> ScoreModel:
        """The model with this process."""
        if process is None or process is self.model.process:
            return self.model
        here = self.model.process.device
        if process.device != here:
            process = copy.deepcopy(process).to(here)
        return self.model.with_process(process)

    def _learned(self, job: Job) -> LearnedWay:
        if not isinstance(job.within, TableSolver) or job.n_aux is None:
            raise ValueError(f"{job.within!r} can't be learned; expected a solver that is a table.")
        level = math.exp(-ends(self.model.truncation, self.model.process)[1].item() / 2)
        with torch.enable_grad():
            return learn_process(self._spectrum, job.within, n_aux=job.n_aux, noise_level=level)

    @cached_property
    def _spectrum(self) -> Spectrum:
        return Spectrum.of(chosen(self.data.train.x, EXAMPLES), self.model.likelihood)

    # ---------------------------------------------------------------- the folder

    def settings(self) -> dict[str, Any]:
        """What must not change when a comparison goes on."""
        model = self.model
        features = usual_features(self.data) if self.features is None else self.features
        return {
            "format": FORMAT,
            "model": fingerprint(model),
            "network": network_print(model.network)
            + ("" if self.precision == "auto" else f", {self.precision}"),
            "parametrisation": model.parametrisation,
            "precondition": bool(model.precondition),
            "likelihood": repr(model.likelihood),
            "truncation": repr(model.truncation),
            "data": f"{self.data.name} {self.data.fingerprint}",
            "split": self.split,
            "features": features if isinstance(features, str) else features.title,
            "neighbours": NEIGHBOURS,
            "directions": DIRECTIONS,
            "n": self.n,
            "seed": self.seed,
            **model.choices(),
        }

    @property
    def _kept(self) -> Kept:
        return Kept(None if self.folder is None else Path(self.folder))

    def _done(self) -> dict[Job, Point]:
        """The points that are in the folder."""
        found = {
            job: self._kept.read(self._file(job), "a point of a comparison", Point.read)
            for job in self.jobs
        }
        return {job: point for job, point in found.items() if point is not None}

    def _file(self, job: Job) -> str:
        """Its name: a few words for people, and a checksum of what they leave out."""
        about: list[Any] = [job.process, job.solver, repr(job.within), job.evaluations]
        if job.n_aux is None:
            process = self.named[job.process]
            about += [fingerprint(process), kernel_print(process)]
        mark = hashlib.blake2b(json.dumps(about).encode(), digest_size=4).hexdigest()
        words = re.sub(r"[^\w.]+", "-", f"{job.process}-{job.solver}")
        return f"points/{words}-{job.evaluations}-{mark}.json"


# ---------------------------------------------------------------- small tools


def _described(way: LearnedWay) -> dict[str, Any]:
    """How a way was learned, for JSON."""
    return {
        "error": way.error,
        "metric": way.metric,
        "wasserstein": way.law.error("wasserstein").item(),
        "preset": way.preset,
        "preset_grid": way.grid,
        "preset_error": way.preset_error,
        "process": name_or_description(way.process),
        "times": list(way.solver.grid),
    }


def _check(work: Work) -> None:
    model, data = work.model, work.data
    if not isinstance(model, ScoreModel):
        raise ValueError(
            f"model was given as {type(model).__name__}; expected ornstein.ScoreModel(network, "
            "process)."
        )
    if not isinstance(data, Dataset):
        raise ValueError(
            f"data was given as {type(data).__name__}; expected a data set with its splits, such "
            "as ornstein.data.load('digits')."
        )
    _check_named(work.solvers, Solver, "solvers", "{'ddim': ornstein.Exponential(order=1)}")
    _check_named(work.named, Process, "processes", "{'cld': ornstein.cld()}")
    if taken := sorted(set(work.named) & set(LEARNED)) if work.learn else []:
        raise ValueError(f"the name {taken[0]!r} is for what is learned; expected another one.")
    if not work.evaluations:
        raise ValueError("no number of evaluations was given; expected some, such as (10, 20, 50).")
    for count in work.evaluations:
        whole(count, "evaluations", 2)
    whole(work.n, "n", 2)
    whole(1 if work.batch_size is None else work.batch_size, "batch_size", 1)
    check_precision(work.precision)
    if isinstance(work.seed, bool) or not isinstance(work.seed, int):
        raise ValueError(f"seed={work.seed!r}; expected a whole number.")
    if work.split not in OTHER:
        raise ValueError(f"split={work.split!r}; expected train, valid or test.")
    if model.parametrisation != "channel":
        if work.learn:
            raise ValueError(
                f"a joint model belongs to its process ({model.process.name!r}), and none can be "
                "learned for it; expected parametrisation='channel', or learn=False."
            )
        for process in work.named.values():
            work.under(process)  # which says what is wrong
    model.check_data(data.train.x[:1].to(model.process.device), model.likelihood)


def _check_named(given: object, kind: type, what: str, example: str) -> None:
    good = isinstance(given, Mapping) and len(given) > 0
    if good and isinstance(given, Mapping):
        good = all(isinstance(k, str) and isinstance(v, kind) for k, v in given.items())
    if not good:
        raise ValueError(f"{what}={given!r}; expected some by their names, such as {example}.")
