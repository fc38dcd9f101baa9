"""Samples per second at equal network evaluations, for several solvers, against a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ornstein.bench.counting import network_cost
from ornstein.bench.figures import Check, Part, Table, lines_of, notes_of
from ornstein.bench.racing import Race, Work
from ornstein.bench.sizes import Setting, cost_of, stirred
from ornstein.bench.stock import Stock, StockSampling
from ornstein.sampling import Ancestral, EulerMaruyama, Exponential, Heun, Solver, Splitting, sample

EVALUATIONS = 50
LEAST_GAIN = 3.0  # over the stock loop, on a GPU
FIRST = "exponential-2"
SOLVERS: dict[str, Solver] = {  # by the names that `ornstein compare` knows them by
    FIRST: Exponential(order=2),
    "sde-2": Exponential(order=2, stochasticity=1.0),
    "ancestral": Ancestral(),
    "heun": Heun(),
    "splitting": Splitting(),
    "euler": EulerMaruyama(),
}


@dataclass(frozen=True)
class Size:
    """How many samples by the first solver and by each of the others, and how they are made."""

    n: int
    others: int
    batch: int
    evaluations: int = EVALUATIONS

    @staticmethod
    def of(setting: Setting) -> Size:
        if setting.cuda:
            return Size(1000, 1000, 500) if setting.quick else Size(10_000, 1000, 500)
        return Size(8, 8, 8, 10) if setting.quick else Size(16, 16, 16)


def sampling(setting: Setting) -> Part:
    """Images per second, from nothing to pixels; the plain loop is timed on one batch.

    Those that make fewer than the first are told as if they had made as many.
    """
    device, size = setting.device, Size.of(setting)
    case = setting.large(size.batch) if setting.cuda else setting.digits(size.batch)
    model = case.experiment.build(case.data, device).eval()
    network: Any = model.network
    stirred(network)
    forward = cost_of(network, size.n, False, passes=1).flops
    rival = Stock(network, case.data.shape[0])
    loop = f"{rival.name}, plain loop, eager"  # second, in case that time runs out
    works: dict[str, Work] = {}
    made = {loop: size.batch}
    flops = {loop: size.evaluations * network_cost(rival, rival.inputs, size.n, 4, 1).flops}
    for name, usual in SOLVERS.items():
        solver = usual.within(size.evaluations)
        for title, options in _ways(name, setting.cuda).items():
            made[title] = size.others if works else size.n
            works[title] = partial(
                sample, model, made[title], solver, batch_size=size.batch, **options
            )
            flops[title] = forward * (solver.evaluations or 0)
        works.setdefault(loop, StockSampling(rival, size.batch, size.evaluations, device))
    found = setting.race(works, budget=0, rounds=2 if setting.cuda else 3, warm=1)
    found = _scaled(found, {name: size.n / count for name, count in made.items()})
    first = next(iter(works))
    to = loop if loop in found.times else first
    table = Table(
        f"sampling, {case.name}, {size.n:,} images by {size.batch}, {size.evaluations} evaluations",
        "× the time of the plain loop" if to == loop else f"× the time of {to}",
        lines_of(found, to, size.n, flops=flops),
        notes=notes_of(found) if size.n == size.others else (_fewer(size), *notes_of(found)),
    )
    checks: tuple[Check, ...] = ()
    if setting.cuda and to == loop:
        gain = Check(f"images per second, {first} / {loop}", found.ratio(loop, first), LEAST_GAIN)
        checks = (replace(gain, most=False),)
    return Part((table,), checks)


def _fewer(size: Size) -> str:
    return f"the first makes them all, the others {size.others:,}, the plain loop {size.batch:,}"


def _ways(name: str, cuda: bool) -> dict[str, dict[str, Any]]:
    """How a solver's network is asked: on a GPU compiled, one of them in TF32 too."""
    if not cuda:
        return {name: {}}
    kinds = ("bfloat16", "tf32") if name == FIRST else ("bfloat16",)
    return {f"{name}, {kind}": {"compile": "on", "precision": kind} for kind in kinds}


def _scaled(found: Race, factors: Mapping[str, float]) -> Race:
    """As if each had made so many times as much."""
    times = {
        name: tuple(factors[name] * seconds for seconds in taken)
        for name, taken in found.times.items()
    }
    return replace(found, times=times)
