"""What is looked at along the way: metrics, the validation split, samples, and signs of trouble."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from ornstein.compiling import Compile
from ornstein.data import Dataset
from ornstein.diffusion import Diffusion
from ornstein.evaluation import Evaluation, evaluate
from ornstein.ledger import any_failed
from ornstein.quality import Features, Quality, classifier, measure, usual_features
from ornstein.sampling import Ancestral, Exponential, sample
from ornstein.training.keeping import Keeper
from ornstein.training.options import Training
from ornstein.training.state import State
from ornstein.training.step import Step
from ornstein.training.stopping import Diverged

WINDOW = 50  # steps over which a loss is averaged to see whether it runs away …
RUNAWAY = 10.0  # … which it has if it is so many times its smallest, and above its first


class Watcher:
    """Looks at a run as its options ask for."""

    def __init__(self, data: Dataset, training: Training, state: State, keeper: Keeper) -> None:
        self.data, self.training, self.state, self.keeper = data, training, state, keeper
        self.average, self.model = state.average, state.model
        self.features: Features | None = None  # for the samples' quality, made when first needed

    def look(self, step: Step) -> tuple[Step, bool]:
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
            if self._due(watch.quality_every):
                step = replace(step, quality=self._quality(step.number))
        return step, valid and state.best is not None and state.best["step"] == step.number

    def _compile(self) -> Compile:
        """Of a look: never where the run is told not to, and else only where it is worth it."""
        return "off" if self.training.compile == "off" else "auto"

    def _due(self, every: int) -> bool:
        """Whether something that is done every so many steps, and after the last, is due."""
        done = self.state.step
        return every > 0 and (done % every == 0 or done == self.training.steps)

    def _check(self) -> None:
        """Raise if the steps since the last check are no good."""
        bad = self.state.first_bad()
        if any_failed(bad is not None, self.model.process.device):
            if bad is None:
                raise Diverged("another process of this run has diverged; see its message")
            raise Diverged(self.state.explained(*bad) + self.keeper.last_good())
        if self.state.ran_away(WINDOW, RUNAWAY):
            raise Diverged(
                f"step {self.state.step}: the mean of the last steps is {self.state.recent:.4g}, "
                f"more than {RUNAWAY:g} times the smallest so far, {self.state.smallest:.4g}; the "
                "run has diverged. Lower the learning rate." + self.keeper.last_good()
            )

    def _log(self, step: Step) -> dict[str, Any]:
        mean, state = self.state.mean_loss(), self.state
        line: dict[str, Any] = {"step": step.number, **mean}
        if self.training.objective.bound:
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
        self.keeper.note(line)
        return line

    def _validate(self, done: int) -> Evaluation:
        watch = self.training.watch
        found = evaluate(
            self.keeper.settled(self.state),
            self.data.valid.x[: watch.valid_examples],
            draws=watch.valid_draws,
            batch_size=max(256, self.training.batch),
            seed=self.training.seed,
            quiet=True,
            compile=self._compile(),
        )
        best = self.state.best
        if best is None or found.bits_per_dim < best["bits_per_dim"]:
            self.state.best = {
                "step": done,
                "bits_per_dim": found.bits_per_dim,
                "standard_error": _known(found.standard_error),
            }
        self.keeper.note(
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
                batch_size=max(64, self.training.batch),
                compile=self._compile(),
            )
        except ValueError as error:  # pictures are no reason to stop a run
            warnings.warn(f"no samples at step {self.state.step}: {error}", stacklevel=2)
            return None

    def _quality(self, done: int) -> Quality | None:
        """How near samples are to the training data; measured by the first process."""
        watch, model = self.training.watch, self.keeper.settled(self.state)
        try:
            samples = sample(
                model,
                watch.quality_samples,
                Exponential(watch.quality_steps),
                seed=self.training.seed,
                shape=self.data.shape,
                batch_size=max(256, self.training.batch),
                compile=self._compile(),
            )
            if not self.keeper.first_process:
                return None
            if self.features is None and usual_features(self.data) == "classifier":
                self.features = classifier(self.data, device=samples.device)
            found = measure(samples, self.data, self.features)
        except ValueError as error:  # no reason to stop a run, either
            warnings.warn(f"no quality at step {self.state.step}: {error}", stacklevel=2)
            return None
        figures, floor = asdict(found.figures), found.floor
        line = {f"quality_{name}": value for name, value in figures.items() if value is not None}
        if floor is not None and floor.frechet is not None:
            line["quality_frechet_floor"] = floor.frechet
        self.keeper.note({"step": done, **line})
        return found


def _known(value: float) -> float | None:
    """For JSON, which has no NaN: the standard error of a single example, for one."""
    return value if math.isfinite(value) else None
