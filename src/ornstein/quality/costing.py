"""What a measurement costs, before it starts: a little of it is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ornstein.compiling import Precision
from ornstein.data import Dataset
from ornstein.quality.classifier import EXAMPLES, Classifier, Network, usual_steps
from ornstein.quality.features import Features, Scale
from ornstein.sampling import Ancestral, Solver, sample
from ornstein.sampling.sampler import USUAL
from ornstein.score import ScoreModel


@dataclass(frozen=True)
class Cost:
    """How long samples will take, about."""

    samples: int
    evaluations: int | None  # of the network for each of them; None where a solver decides
    seconds: float | None  # of all of them; None likewise


def cost(
    model: ScoreModel,
    n: int,
    solver: Solver | None = None,
    *,
    shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    precision: Precision = "auto",
) -> Cost:
    """Of n samples: those of one batch are taken back in a single step, which is timed.

    Nothing is compiled for it; what is compiled is faster.
    """
    solver = Ancestral() if solver is None else solver
    evaluations = solver.evaluations
    if evaluations is None:
        return Cost(n, None, None)
    quick, size = Ancestral(steps=1), USUAL if batch_size is None else batch_size
    batch = min(n, size)
    options: dict[str, Any] = {"batch_size": size, "compile": "off", "precision": precision}

    def once(count: int) -> float:
        began = time.perf_counter()
        sample(model, count, quick, shape=shape, **options).cpu()  # which waits for it
        return time.perf_counter() - began

    once(1)  # what is done once only
    asked = quick.evaluations or 1
    return Cost(n, evaluations, once(batch) / asked / batch * n * evaluations)


def features_cost(features: Features, x: torch.Tensor, n: int, device: torch.device) -> float:
    """Seconds for the features of n examples, from those of a few."""
    few = x[: features.batch]
    features.all(few[:1], device).cpu()  # what is done once only
    began = time.perf_counter()
    features.all(few, device).cpu()
    return (time.perf_counter() - began) / len(few) * n


def classifier_cost(data: Dataset, device: torch.device) -> float:
    """Seconds to train a classifier: a step is about three times what its features take."""
    with torch.random.fork_rng(devices=[]):
        blank = Classifier(Network(data.shape, 2).to(device), Scale.of(data), 2)
    count = 3 * EXAMPLES * usual_steps(data)
    return features_cost(blank, data.train.x, count, device)
