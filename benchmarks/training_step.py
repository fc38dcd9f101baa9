"""Where the time of a training step goes: the data pipeline, the network, the optimiser, averages.

    python -m benchmarks.training_step [--out results.json] [--quick] [--device cpu]

A step is what the training loop does: examples, loss and gradients, clipping and Adam, the running
mean. Its parts are timed in alternation with whole steps, round after round, and the median of the
per-round ratios is reported, so that a noisy machine disturbs both. The data pipeline is timed over
whole epochs, so that the shuffling of each is in it; it should take 5 % of a step at most. On a GPU
it is timed alone, to its end, for data on the GPU and for data that stays on the host. That is the
most that it can cost, since the host works while the GPU does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ornstein
from ornstein import compiling
from ornstein.data import Dataset, Split, Stream, load
from ornstein.provenance import provenance
from ornstein.training import Experiment, fit, preset
from ornstein.training.average import Average
from ornstein.training.loss import Loss
from ornstein.training.state import State

LIMIT = 0.05  # what the data pipeline may take of a step
Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Something to train."""

    name: str
    experiment: Experiment
    data: Dataset


def images(count: int, shape: tuple[int, ...]) -> Dataset:
    """Random pixels: how long a step takes does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator)
    return Dataset("random", Split(x), Split(x[:0]), Split(x[:0]), 256, "drawn")


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Small networks for a CPU, the large one for a GPU."""
    digits, mnist, cifar = (preset(name) for name in ("digits", "mnist", "cifar10"))
    if device.type == "cuda":
        count = 10_000 if quick else 50_000
        return [Case("35.7 M U-Net, CIFAR-sized, batch 128", cifar, images(count, (3, 32, 32)))]
    # a step with the preset's batch takes too long on one thread; the ratio does not depend on it
    small = replace(mnist, training=replace(mnist.training, batch=16 if quick else 64))
    count = 10_000 if quick else 60_000
    return [
        Case("unet-tiny, digits, batch 64", digits, load("digits")),
        Case(
            f"unet-small, MNIST-sized, batch {small.training.batch}",
            small,
            images(count, (1, 28, 28)),
        ),
    ]


# ---------------------------------------------------------------------------------- a step


class Steps:
    """The parts of a training step, by themselves and together."""

    def __init__(self, case: Case, device: torch.device, resident: bool) -> None:
        training = case.experiment.training
        self.batch, self.position = training.batch, 0
        model = case.experiment.build(case.data, device).train()
        limit = 2**62 if resident else 0
        self.stream = Stream(case.data.train.x, training.seed, device, training.flips, limit)
        narrow = training.precision == "bfloat16"
        self.loss = Loss(model, training.objective, training.seed, narrow)
        self.average = Average(model, training.ema)
        self.state = State(self.loss, self.average, training)
        self.call = compiling.compiled(self.loss) if device.type == "cuda" else self.loss
        self.device, self.model = device, model
        self.given = self.take()

    def take(self) -> Tensor:
        """The next examples."""
        x = self.stream.take(self.position, self.batch)
        self.position += self.batch
        return x

    def epoch(self) -> None:
        """All examples of an epoch, in an order that is new."""
        for _ in range(self.takes):
            self.take()

    @property
    def takes(self) -> int:
        """Batches in an epoch."""
        return max(1, len(self.stream) // self.batch)

    def gradients(self, x: Tensor) -> None:
        """Loss and gradients."""
        self.state.optimiser.zero_grad(set_to_none=True)
        index = torch.arange(self.position, self.position + len(x), device=self.device)
        self.call(x, index)[0].backward()

    def step(self) -> None:
        """A whole step."""
        self.gradients(self.take())
        self.optimise()
        self.mean()

    def step_given(self) -> None:
        """A whole step on examples that are there already."""
        self.gradients(self.given)
        self.optimise()
        self.mean()

    def optimise(self) -> None:
        """Clipping, and Adam."""
        self.state.clip_and_step(self.state.numbers())

    def mean(self) -> None:
        """The running mean of all weights."""
        self.average.update(0.001)


# ---------------------------------------------------------------------------------- measuring


def timed(work: Work, repeats: int, cuda: bool) -> float:
    """Seconds per call, until the device is done."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def race(
    works: dict[str, tuple[Work, int]], cuda: bool, rounds: int, budget: float
) -> dict[str, float]:
    """Seconds of each, and "A / B" to the first, B: medians over rounds.

    A work comes with how many of the thing that is counted one call does.
    """
    repeats = {}
    for name, (work, _) in works.items():
        for _ in range(3):
            work()
        repeats[name] = max(1, int(budget / max(timed(work, 1, cuda), 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, (work, count) in works.items():
            times[name].append(timed(work, repeats[name], cuda) / count)
    found = {name: statistics.median(values) for name, values in times.items()}
    first = next(iter(works))
    for name in list(works)[1:]:
        ratios = [a / b for a, b in zip(times[name], times[first], strict=True)]
        found[f"{name} / {first}"] = statistics.median(ratios)
    return found


def on_cpu(case: Case, rounds: int) -> dict[str, Any]:
    """All parts of a step; and a step of `fit` itself, to see that these are its parts."""
    device = torch.device("cpu")
    steps = Steps(case, device, resident=True)
    training = case.experiment.training
    watch = replace(training.watch, log_every=10**9, valid_every=0, sample_every=0)
    fitting = fit(
        case.experiment.build(case.data),
        case.data,
        replace(training, steps=10**9, watch=watch),
    )
    s = torch.linspace(0.01, 1, steps.batch, dtype=torch.float64)
    x = steps.given.float()
    process = ornstein.cld()
    found = race(
        {
            "step": (steps.step, 1),
            "data": (steps.epoch, steps.takes),
            "loss and gradients": (lambda: steps.gradients(steps.given), 1),
            "clipping and Adam": (steps.optimise, 1),
            "running mean": (steps.mean, 1),
            "a CLD kernel and its sample": (lambda: process.transition(s).sample(x), 1),
            "step of fit": (lambda: next(fitting), 1),
        },
        False,
        rounds,
        budget=0.2,
    )
    fitting.close()
    return {"part of data": found["data / step"], **found}


def on_cuda(case: Case, rounds: int) -> dict[str, Any]:
    """How much longer steps get by their data, on the GPU or on the host."""
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    near, far = (Steps(case, device, resident) for resident in (True, False))
    found = race(
        {
            "step on one batch": (near.step_given, 1),
            "step, data on the GPU": (near.step, 1),
            "step, data on the host": (far.step, 1),
            "data on the GPU": (near.epoch, near.takes),
            "data on the host": (far.epoch, far.takes),
            "clipping and Adam": (near.optimise, 1),
            "running mean": (near.mean, 1),
        },
        True,
        rounds,
        budget=1.0,
    )
    parts = {  # at most: the host may work on it while the GPU is busy
        f"part of data on the {where}": found[f"data on the {where} / step on one batch"]
        for where in ("GPU", "host")
    }
    return {**parts, "examples per second": near.batch / found["step, data on the GPU"], **found}


def run(device: torch.device, quick: bool) -> dict[str, dict[str, Any]]:
    """All cases on one device."""
    rounds = 3 if quick else 9
    measure = on_cuda if device.type == "cuda" else on_cpu
    return {case.name: measure(case, rounds) for case in cases(device, quick)}


def show(device: str, result: dict[str, dict[str, Any]]) -> None:
    """A table on the screen."""
    print(f"\n{device}")
    for name, figures in result.items():
        print(f"  {name}")
        for what, value in figures.items():
            if what.startswith("part of"):
                verdict = "" if value <= LIMIT else f"   more than {LIMIT:.0%}"
                print(f"    {what:44s} {value:9.2%}{verdict}")
            elif what == "examples per second":
                print(f"    {what:44s} {value:9,.0f}")
            else:
                shown = f"{value:9.4f} ×" if " / " in what else f"{value * 1e3:9.4f} ms"
                print(f"    {what:44s} {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a look")
    parser.add_argument("--device", choices=("all", "cpu", "cuda"), default="all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"provenance": provenance(), "limit": LIMIT}
    if options.device in ("all", "cpu"):
        record["cpu, one thread"] = run(torch.device("cpu"), options.quick)
        show("cpu, one thread", record["cpu, one thread"])
    if options.device in ("all", "cuda") and torch.cuda.is_available():
        record["cuda"] = run(torch.device("cuda"), options.quick)
        show(torch.cuda.get_device_name(), record["cuda"])
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
