"""The training loop: `for step in ornstein.fit(model, data, training): …`

A step takes the next `batch` places of an endless stream of examples. The order of the examples,
their times and their noise are functions of (seed, place), dropout of (seed, step, process). So a
run is reproducible from its options alone: interrupted and resumed, or shared by several processes,
it computes the same numbers.

    examples → loss → gradients (averaged over processes) → clipped → Adam → running mean

With a folder the loop also keeps what a run needs to go on, and looks at the validation split and
at samples from fixed noise now and then. Nothing is printed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import time
import warnings
import weakref
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ornstein import sharing
from ornstein.data import Dataset, Split, Stream
from ornstein.diagnostics import prior_gap
from ornstein.diffusion import Diffusion
from ornstein.evaluation import Evaluation, evaluate
from ornstein.ledger import agree, any_failed, processes
from ornstein.parts import described
from ornstein.sampling import Ancestral, sample
from ornstein.score import ScoreModel
from ornstein.training.average import Average
from ornstein.training.checkpoints import Checkpoint, Checkpoints
from ornstein.training.distribution import share, unsynchronised, wrapped
from ornstein.training.loss import VALUES, Loss
from ornstein.training.options import Training
from ornstein.training.records import differences, to_record
from ornstein.training.run import Run
from ornstein.training.state import State
from ornstein.training.stopping import Diverged, Interrupted, Signals

BOUNDS = ("elbo", "mism")
WINDOW = 50  # steps over which a loss is averaged to see whether it runs away …
FAR, TOO_FAR = 0.05, 20.0  # bits/dim between y_T and the prior
RUNAWAY = 10.0  # … which it has if it is so many times its smallest, and above its first


@dataclass(frozen=True)
class Step:
    """What one step of the optimiser did. Numbers are read from the device when asked for."""

    number: int  # of steps done so far
    total: int
    epoch: float  # of the training split, so far
    learning_rate: float
    model: ScoreModel  # as it is trained …
    averaged: ScoreModel  # … and the running mean of it, which is the one to use
    values: Tensor  # (6,) on the device, see `loss.VALUES`
    metrics: dict[str, Any] | None = None  # means since the last such line, where one was due
    validation: Evaluation | None = None  # of the averaged model, where a look was due
    samples: Tensor | None = None  # of the averaged model, where a grid was due
    checkpoint: Path | None = None  # the newest; that of this step is written after it

    @property
    def loss(self) -> float:
        """What is minimised: bits/dim where it is a bound."""
        return self.values[0].item()

    @property
    def parts(self) -> dict[str, float]:
        """Prior, diffusion and reconstruction in bits/dim."""
        return dict(zip(VALUES[1:4], self.values[1:4].tolist(), strict=True))


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
        `Interrupted`; leaving the loop early saves too.
    record: how model and data were made, to be kept and compared in the run's config.
    """
    job = _Job(model, data, training or Training(), folder, record)
    steps = job.steps()
    # a loop that was left by an error may live until the interpreter ends, too late to save
    atexit.register(_close, weakref.ref(steps))
    return steps


def _close(steps: weakref.ref[Generator[Step, None, None]]) -> None:
    """Let a loop save, if it is still there."""
    left = steps()
    if left is not None:
        left.close()


def run_record(
    model: ScoreModel,
    data: Dataset,
    training: Training,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What decides a run, as its config keeps it."""
    record: dict[str, Any] = {} if given is None else {"experiment": dict(given)}
    record["training"] = to_record(training)
    try:
        record["model"] = described(model)
    except ValueError:  # a network or a process of the user's own
        record["model"] = {"network": type(model.network).__name__}
    record["data"] = data.describe()
    return record


class _Job:
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
        self.micro = share(training.batch, training.accumulate)
        model.check_data(self.data.train.x[:2].to(self.device), model.likelihood)
        if training.objective.times == "adaptive" and self.world > 1:
            raise ValueError(
                "times='adaptive' learns from what one process sees, and there are "
                f"{self.world}; expected another proposal, such as 'natural'."
            )
        _check_prior(model)
        self.run = None if folder is None else Run(Path(folder))
        self.checkpoints = (
            None
            if folder is None
            else Checkpoints(Path(folder) / "checkpoints", training.watch.keep)
        )
        self.record: dict[str, Any] = {}
        if self.run is not None:
            self.record = run_record(model, self.data, training, record)
            self.run.check(self.record)
        self.stream = Stream(self.data.train.x, training.seed, self.device, training.flips)
        objective = training.objective
        self.loss = Loss(model, objective, training.seed, training.precision == "bfloat16")
        self.average = Average(model, training.ema)
        self.state = State(self.loss, self.average, training)
        self.step_loss = self._prepared()

    def _prepared(self) -> nn.Module:
        """The loss, shared over processes and compiled as asked for."""
        loss = wrapped(self.loss, self.device, unused=self.world > 1 and self._some_unused())
        how = self.training.compile
        if how == "on" or (how == "auto" and self.device.type == "cuda"):
            loss = torch.compile(loss)  # type: ignore[assignment]
            self.compiled = True
        else:
            self.compiled = False
        return loss

    def _some_unused(self) -> bool:
        """Whether the loss leaves out a parameter, such as a learned rate that cancels."""
        x = self.stream.take(0, 1)
        self.loss(x, torch.zeros(1, dtype=torch.int64, device=self.device))[0].backward()
        unused = any(p.grad is None for p in self.model.parameters() if p.requires_grad)
        self.model.zero_grad(set_to_none=True)
        return unused

    # ---------------------------------------------------------------- the loop

    def steps(self) -> Generator[Step, None, None]:
        lock = self.run.locked() if self.run is not None and self.rank == 0 else None
        with contextlib.ExitStack() as stack:
            if lock is not None:
                stack.enter_context(lock)
            signals = Signals()
            if self.run is not None:
                stack.enter_context(signals.listening())
            self._resume()
            was_training = self.model.training
            stack.callback(lambda: self.model.train(was_training))
            self.model.train()
            while self.state.step < self.training.steps:
                step, improved = self._watched(self._step())
                try:
                    yield step
                except GeneratorExit:  # the user left the loop
                    self._leave()
                    raise
                # only now, so that what the user makes of a step is never skipped on resuming
                with self.state.aside():
                    if self._save_due(step.number, improved):
                        self._save()
                    self._stop_if_told(signals)

    def _step(self) -> Step:
        """One step of the optimiser."""
        state, options = self.state, self.training
        torch.manual_seed(_mixed(options.seed, state.step, self.rank))  # dropout
        optimiser = state.optimiser
        optimiser.zero_grad(set_to_none=True)
        first = state.step * options.batch + self.rank * self.micro * options.accumulate
        values = torch.zeros(len(VALUES), dtype=torch.float64, device=self.device)
        try:
            for part in range(options.accumulate):
                start = first + part * self.micro
                x = self.stream.take(start, self.micro)
                index = torch.arange(start, start + self.micro, device=self.device)
                last = part == options.accumulate - 1
                with unsynchronised(self.step_loss, not last):
                    loss, told = self.step_loss(x, index)
                    (loss / options.accumulate).backward()
                values = _merged(values, told, part)
        except ValueError as error:
            if state.step == 0:
                raise  # the user's data or model
            raise Diverged(f"step {state.step + 1}: {error}{self._last_good()}") from error
        rate = state.clip_and_step()
        self.average.update(state.step)
        state.step += 1
        if self.compiled and self.model.process.learned and state.step % 100 == 0:
            self.model.process.replan()  # inside a graph it can't see that it has outgrown
        state.heard(self._everyones(values))
        return Step(
            number=state.step,
            total=options.steps,
            epoch=self.stream.epoch(state.step * options.batch),
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

    # ---------------------------------------------------------------- along the way

    def _watched(self, step: Step) -> tuple[Step, bool]:
        """Do what is due after this step; whether it is the best so far on validation."""
        watch, state = self.training.watch, self.state
        valid = self._due(watch.valid_every) and len(self.data.valid) > 0
        samples, log = self._due(watch.sample_every), self._due(watch.log_every)
        if valid or samples or log or state.step % WINDOW == 0:
            self._check()
        if log:
            step = replace(step, metrics=self._log(step))
        with state.aside():
            if valid:
                step = replace(step, validation=self._validate(step.number))
            if samples:
                step = replace(step, samples=self._samples())
        return step, valid and state.best is not None and state.best["step"] == step.number

    def _due(self, every: int) -> bool:
        """Whether something that is done every so many steps, and after the last, is due."""
        done = self.state.step
        return every > 0 and (done % every == 0 or done == self.training.steps)

    def _check(self) -> None:
        """Raise if the steps since the last check are no good."""
        bad = self.state.first_bad()
        if any_failed(bad is not None, self.device):
            if bad is None:
                raise Diverged("another process of this run has diverged; see its message")
            raise Diverged(self._explained(*bad) + self._last_good())
        if self.state.ran_away(WINDOW, RUNAWAY):
            raise Diverged(
                f"step {self.state.step}: the mean of the last steps is {self.state.recent:.4g}, "
                f"more than {RUNAWAY:g} times the smallest so far, {self.state.smallest:.4g}; the "
                "run has diverged. Lower the learning rate." + self._last_good()
            )

    def _log(self, step: Step) -> dict[str, Any]:
        mean, state = self.state.mean_loss(), self.state
        line: dict[str, Any] = {"step": step.number, **mean}
        if self.training.objective.objective in BOUNDS:
            line["bits_per_dim"] = line.pop("loss")
        line["epoch"], line["learning_rate"] = round(step.epoch, 4), step.learning_rate
        line.update(state.gradient_norms())
        process = self.model.process
        if process.learned and isinstance(process, Diffusion):
            line["Q"] = process.Q.detach().cpu().tolist()
            line["D"] = process.D.detach().cpu().tolist()
        line["seconds"] = round(state.seconds(), 3)
        line["examples_per_second"] = round(state.speed(self.training.batch), 2)
        state.forget()
        if self.run is not None and self.rank == 0:
            self.run.note(line)
        return line

    def _validate(self, done: int) -> Evaluation:
        watch = self.training.watch
        found = evaluate(
            self.average.settle(),
            self.data.valid.x[: watch.valid_examples],
            draws=watch.valid_draws,
            batch_size=max(256, self.micro),
            seed=self.training.seed,
            quiet=True,
        )
        best = self.state.best
        if best is None or found.bits_per_dim < best["bits_per_dim"]:
            self.state.best = {
                "step": done,
                "bits_per_dim": found.bits_per_dim,
                "standard_error": _known(found.standard_error),
            }
        if self.run is not None and self.rank == 0:
            self.run.note(
                {
                    "step": done,
                    "valid_bits_per_dim": found.bits_per_dim,
                    "valid_standard_error": _known(found.standard_error),
                    "valid_prior": found.prior,
                    "valid_diffusion": found.diffusion,
                    "valid_reconstruction": found.reconstruction,
                }
            )
        return found

    def _samples(self) -> Tensor | None:
        """From fixed noise; None, with a warning, where the process can't be sampled from."""
        watch = self.training.watch
        try:
            return sample(
                self.average.settle(),
                watch.samples,
                Ancestral(watch.sample_steps),
                seed=self.training.seed,
                shape=self.data.shape,
                batch_size=max(64, self.micro),
            )
        except ValueError as error:  # pictures are no reason to stop a run
            warnings.warn(f"no samples at step {self.state.step}: {error}", stacklevel=2)
            return None

    # ---------------------------------------------------------------- keeping

    def _save_due(self, done: int, improved: bool) -> bool:
        if self.run is None or self.rank != 0:
            return False
        watch = self.training.watch
        if improved or done == self.training.steps:
            return True
        if watch.save_every:
            return done % watch.save_every == 0
        return time.monotonic() - self.state.saved_at > 60 * watch.save_minutes

    def _save(self) -> None:
        """Write a checkpoint of good numbers; by the first process alone."""
        if self.checkpoints is None or self.rank != 0:
            return
        state = self.state
        bad = state.first_bad()
        if bad is not None:
            raise Diverged(self._explained(*bad) + self._last_good())
        best = state.best
        figures = None
        if best is not None and best["step"] == state.step:
            figures = {**best, "split": "validation", "bound": self.model.likelihood.name}
        path = self.checkpoints.save(
            state.step,
            self.average.settle(),
            state.tensors(),
            state.record(),
            None if best is None else best["step"],
            figures,
            self.data.describe(),
        )
        state.saved_at, state.saved, state.checkpoint = time.monotonic(), state.step, path

    def _resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        found: Checkpoint | None = None
        if self.checkpoints is not None:
            found = self.checkpoints.latest()
            if found is not None:
                self._check_same(found)
                self.state.restore(found)
            if not agree([self.state.step], self.device):
                raise ValueError(
                    "the processes found different checkpoints; expected one folder that all of "
                    "them see. Put the run on a shared disk."
                )
            if self.run is not None and self.rank == 0:
                self.run.begin(self.record, self.state.step)
        self.state.started()

    def _check_same(self, found: Checkpoint) -> None:
        """A checkpoint that was copied here from a run of another model is refused."""
        own = json.loads(json.dumps(self.record["model"]))
        known = own.pop("kind", None) is not None  # nothing is known of a class of the user's own
        changed = differences(sharing.read(found.folder).model, own) if known else []
        if changed:
            lines = "\n  ".join(changed)
            raise ValueError(
                f"{found.folder} is of another model:\n  {lines}\nExpected the network and the "
                "process of this run. Remove what was copied here from another one."
            )

    def _stop_if_told(self, signals: Signals) -> None:
        often = self.device.type == "cpu" or self.state.step % self.training.watch.log_every == 0
        told = bool(signals.received)
        if self.world > 1 and self.run is not None:
            told = often and any_failed(told, self.device)  # all stop after the same step
        if told:
            number = signals.received or 15
            if self.state.saved != self.state.step:
                self._save()
            raise Interrupted(self.state.step, number)

    def _leave(self) -> None:
        """Save what is good and not saved yet."""
        state = self.state
        if self.run is not None and state.saved != state.step and state.first_bad() is None:
            self._save()

    # ---------------------------------------------------------------- explaining

    def _explained(self, number: int, values: Tensor) -> str:
        """What went wrong at a step."""
        told = dict(zip(VALUES, values.tolist(), strict=True))
        line = f"step {number}: the loss is {told['loss']:g}, not a number to go on with"
        logsnr = told["worst_logsnr"]
        if self.training.objective.objective in BOUNDS and math.isfinite(logsnr):
            line += f"; its largest error ({told['worst_error']:g} bits/dim) is at log SNR "
            line += f"{logsnr:.3f}{self.state.conditioning(logsnr)}"
        return line + ". Lower the learning rate, or clip more."

    def _last_good(self) -> str:
        self.state.broken = True
        if self.checkpoints is None:
            return ""
        steps = [step for step, _ in self.checkpoints.all()]
        if not steps:
            return " There is no checkpoint yet."
        return f" The last good checkpoint is that of step {steps[-1]}."


def _merged(values: Tensor, told: Tensor, part: int) -> Tensor:
    """Means over the parts of a step so far; of the worst error the largest."""
    means = values[:4] + (told[:4] - values[:4]) / (part + 1)
    worse = (told[4] >= values[4]) | ~told[4].isfinite() if part else torch.ones_like(told[4]) > 0
    return torch.cat([means, torch.where(worse, told[4:], values[4:])])


def _check_prior(model: ScoreModel) -> None:
    """Data that the process can't bring to its prior: far off is refused, a little is told."""
    process, moments = model.process, model.moments
    with torch.no_grad():
        power = (moments.mean**2 + moments.std**2).mean()
        prior = torch.linalg.cholesky(process.prior_covariance)
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


def _known(value: float) -> float | None:
    """For JSON, which has no NaN: the standard error of a single example, for one."""
    return value if math.isfinite(value) else None


def _mixed(seed: int, step: int, rank: int) -> int:
    """A seed for torch's own generator."""
    return (seed * 0x9E3779B1 + step * 0x85EBCA77 + rank * 0xC2B2AE3D + 1) % 2**63
