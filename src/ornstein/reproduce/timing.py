"""How long the runs of a table take on this machine, before they are begun.

A few steps of the first run are tried, and the others are taken to cost as much for each image,
since networks of a table are of one size. A pass forward is a third of a step, about: a step goes
back, too. Passes that a bound makes twice, or leaves out, are counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ornstein.data import Dataset
from ornstein.reproduce.running import VERBS, Errand, Verb
from ornstein.training.checkpoints import Checkpoints
from ornstein.training.estimating import FEW, estimate

FORWARD = 1 / 3  # of a step


@dataclass(frozen=True)
class Duration:
    """Seconds of what is still to be done, one run after the other."""

    training: float
    looking: float  # samples and figures
    compiled: bool  # the runs will be, and the steps that were tried were not

    @property
    def whole(self) -> float:
        return self.training + self.looking


def duration(
    errands: Sequence[Errand], data: Dataset, device: torch.device, through: Verb = "evaluate"
) -> Duration:
    """Measured with a few steps of the first of them; data: what that is trained on."""
    left = [errand for errand in errands if errand.finished() < errand.count_through(through)]
    trained = sum(_trained(errand, data) for errand in left)
    looked = sum(_looked(errand, data, through) for errand in left)
    if not left:
        return Duration(0.0, 0.0, False)
    experiment = errands[0].recipe.experiment
    training = experiment.training
    few = min(FEW, training.batch)  # a CPU is as fast with a few, and a whole step may be minutes
    tried = training if device.type == "cuda" else replace(training, batch=few, accumulate=1)
    each = estimate(experiment.build(data, device), data, tried).seconds_per_step / tried.batch
    return Duration(each * trained, each * FORWARD * looked, training.compiled_on(device))


def _trained(errand: Errand, data: Dataset) -> float:
    """Images of its training that are left, and of its looks at validation as parts of one."""
    if errand.finished():
        return 0.0
    training = errand.recipe.experiment.training
    watch = training.watch
    done = max((step for step, _ in Checkpoints(errand.folder / "checkpoints").all()), default=0)
    left = max(training.steps - done, 0)
    looks = left / watch.valid_every if watch.valid_every else 0.0
    looked = looks * min(watch.valid_examples, len(data.valid)) * watch.valid_draws
    return left * training.batch + FORWARD * looked


def _looked(errand: Errand, data: Dataset, through: Verb) -> int:
    """How often the network is asked about an image, for samples and figures."""
    count, recipe = 0, errand.recipe
    if VERBS.index(through) >= VERBS.index("sample"):
        asked = {grid.title: grid.n * grid.steps for grid in recipe.sample}
        count += sum(n for title, n in asked.items() if title not in errand.pictures_done())
    if VERBS.index(through) >= VERBS.index("evaluate"):
        for bits in recipe.evaluate:
            if bits.title not in errand.looks_done():
                examples = len(getattr(data, bits.split))
                number = examples if bits.limit is None else min(bits.limit, examples)
                count += number * bits.draws * (len(bits.process) or 1)
    return count
