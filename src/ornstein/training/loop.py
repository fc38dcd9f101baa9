"""The training loop: `for step in ornstein.fit(model, data, training): …`

A step takes the next `batch` places of an endless stream of examples. The order of the examples,
their times and their noise are functions of (seed, place), dropout of (seed, step, process). So a
run is reproducible from its options alone: interrupted and resumed, or shared by several processes,
it computes the same numbers.

    examples → loss → gradients (averaged over processes) → clipped → Adam → running mean

`running` does that, on a GPU as one graph. With a folder the loop also keeps what a run needs to go
on (`keeping`); it looks at metrics, the validation split and samples now and then (`watching`).
Nothing is printed.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import warnings
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ornstein.data import Dataset, Split, Stream
from ornstein.diagnostics import prior_gap
from ornstein.ledger import any_failed, processes
from ornstein.score import ScoreModel
from ornstein.training.average import Average
from ornstein.training.distribution import share
from ornstein.training.keeping import Keeper
from ornstein.training.loss import Loss
from ornstein.training.options import Training
from ornstein.training.running import Runner
from ornstein.training.state import State
from ornstein.training.step import Step
from ornstein.training.stopping import Diverged, Interrupted, Signals
from ornstein.training.watching import Watcher

FAR, TOO_FAR = 0.05, 20.0  # bits/dim between y_T and the prior


def fit(
    model: ScoreModel,
    data: Dataset | Tensor,
    training: Training | None = None,
    *,
    folder: str | Path | None = None,
    record: Mapping[str, Any] | None = None,
) -> Generator[Step, None, None]:
    """Train a model in place, one step at a time; iterate over it.

    data: a Dataset, or a tensor of training examples (N, *shape).
    folder: of the run; the same call goes on where it was. SIGINT and SIGTERM save and raise
        `Interrupted`; leaving the loop early saves too. A run that is finished already hands out
        its last step once more, and with it its model.
    record: how model and data were made, to be kept and compared in the run's config.
    """
    job = Job(model, data, training or Training(), folder, record)
    steps = job.steps()
    # a loop that was left by an error may live until the interpreter ends, too late to save
    atexit.register(_close, weakref.ref(steps))
    return steps


def _close(steps: weakref.ref[Generator[Step, None, None]]) -> None:
    """Let a loop save, if it is still there."""
    left = steps()
    if left is not None:
        left.close()


class Job:
    """One call of fit."""

    def __init__(
        self,
        model: ScoreModel,
        data: Dataset | Tensor,
        training: Training,
        folder: str | Path | None,
        record: Mapping[str, Any] | None,
    ) -> None:
        if not isinstance(model, ScoreModel):
            raise ValueError(
                f"fit got a model of type {type(model).__name__}; expected "
                "ornstein.ScoreModel(network, process)."
            )
        if not isinstance(training, Training):
            raise ValueError(
                f"fit got training={training!r}; expected ornstein.Training(steps=…, batch=…)."
            )
        self.model, self.training = model, training
        self.data = data if isinstance(data, Dataset) else _only_training(data)
        self.device = model.process.device
        self.rank, self.world = processes()
        share(training.batch, training.accumulate)  # refuses what can't be shared
        model.check_data(self.data.train.x[:2].to(self.device), model.likelihood)
        if training.objective.times == "adaptive" and self.world > 1:
            raise ValueError(
                "times='adaptive' learns from what one process sees, and there are "
                f"{self.world}; expected another proposal, such as 'natural'."
            )
        _check_prior(model)
        self.keeper = Keeper(folder, model, self.data, training, record)
        self.stream = Stream(self.data.train.x, training.seed, self.device, training.flips)
        objective = training.objective
        self.loss = Loss(model, objective, training.seed, training.precision == "bfloat16")
        self.average = Average(model, training.ema)
        self.state = State(self.loss, self.average, training)
        self.watcher = Watcher(self.data, training, self.state, self.keeper)
        self.runner = Runner(self.loss, self.state, self.average, self.stream, training)

    # ---------------------------------------------------------------- the loop

    def steps(self) -> Generator[Step, None, None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.keeper.locked())
            signals = Signals()
            if self.keeper.run is not None:
                stack.enter_context(signals.listening())
            self.keeper.resume(self.state)
            was_training = self.model.training
            stack.callback(lambda: self.model.train(was_training))
            if self.state.step >= self.training.steps:  # hand out its model once more
                yield self._done(self.state.rate(self.training.steps - 1))
            while self.state.step < self.training.steps:
                step, improved = self.watcher.look(self.step())
                try:
                    yield step
                except GeneratorExit:  # the user left the loop
                    self.keeper.leave(self.state)
                    raise
                # only now, so that what the user makes of a step is never skipped on resuming
                with self.state.aside():
                    if self.keeper.due(self.state, improved):
                        self.keeper.save(self.state)
                    self._stop_if_told(signals)

    def step(self) -> Step:
        """One step of the optimiser."""
        state, options = self.state, self.training
        if not self.model.training:  # the user may have looked at it in between
            self.model.train()
        torch.manual_seed(_mixed(options.seed, state.step, self.rank))  # dropout
        try:
            row = self.runner.step()
        except ValueError as error:
            if state.step == 0:
                raise  # the user's data or model
            left = self.keeper.last_good()
            raise Diverged(f"step {state.step + 1}: {error}{left}") from error
        rate = state.rate(state.step)
        state.step += 1
        state.heard(self._everyones(row))
        return self._done(rate)

    def _done(self, rate: float) -> Step:
        """What there is to say after a step."""
        state = self.state
        return Step(
            number=state.step,
            total=self.training.steps,
            epoch=self.stream.epoch(state.step * self.training.batch),
            learning_rate=rate,
            model=self.model,
            averaged=self.average.model,
            values=state.last,
            checkpoint=state.checkpoint,
        )

    def _everyones(self, values: Tensor) -> Tensor:
        """The means over all processes; the worst error is this process's own."""
        if self.world > 1:
            means = values[:4].clone()
            torch.distributed.all_reduce(means)
            values = torch.cat([means / self.world, values[4:]])
        return values

    def _stop_if_told(self, signals: Signals) -> None:
        often = self.device.type == "cpu" or self.state.step % self.training.watch.log_every == 0
        told = bool(signals.received)
        if self.world > 1 and self.keeper.run is not None:
            told = often and any_failed(told, self.device)  # all stop after the same step
        if told:
            number = signals.received or 15
            if self.state.saved != self.state.step:
                self.keeper.save(self.state)
            raise Interrupted(self.state.step, number)


def _check_prior(model: ScoreModel) -> None:
    """Data that the process can't bring to its prior: far off is refused, a little is told."""
    process, moments = model.process, model.moments
    with torch.no_grad():
        power = (moments.mean**2 + moments.std**2).mean()
        prior = process.prior_factor
        gap = prior_gap(process.transition(process.horizon), prior, power).item() / math.log(2)
    if gap > TOO_FAR:
        raise ValueError(
            f"{process.name!r} leaves data of mean {moments.mean.mean().item():.3g} and standard "
            f"deviation {model.data_std:.3g} at {gap:.3g} bits/dim from its prior, which no "
            "network can win back. Expected data of about the prior's size: standardise it, or "
            "choose faster rates."
        )
    if gap > FAR and not process.learned:
        warnings.warn(
            f"{process.name!r} ends {gap:.2g} bits/dim from its prior, which no network can win "
            "back; faster rates, or standardised data, would.",
            stacklevel=4,
        )


def _only_training(x: Tensor) -> Dataset:
    """A tensor of examples as a data set without other splits."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"fit got data of type {type(x).__name__}; expected a Dataset (ornstein.data.load) or "
            "a tensor of examples, (N, *shape)."
        )
    nothing = Split(x[:0], None)
    levels = None if x.is_floating_point() else 256
    return Dataset("given", Split(x, None), nothing, nothing, levels, "given", "")


def _mixed(seed: int, step: int, rank: int) -> int:
    """A seed for torch's own generator."""
    return (seed * 0x9E3779B1 + step * 0x85EBCA77 + rank * 0xC2B2AE3D + 1) % 2**63
