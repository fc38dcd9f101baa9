"""What a loop hands out after every step of the optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ornstein.evaluation import Evaluation
from ornstein.quality import Quality
from ornstein.score import ScoreModel
from ornstein.training.loss import VALUES


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
    quality: Quality | None = None  # of its samples, where that was asked for and due
    checkpoint: Path | None = None  # the newest; that of this step is written after it

    @property
    def loss(self) -> float:
        """What is minimised: bits/dim where it is a bound."""
        return self.values[0].item()

    @property
    def parts(self) -> dict[str, float]:
        """Prior, diffusion and reconstruction in bits/dim."""
        return dict(zip(VALUES[1:4], self.values[1:4].tolist(), strict=True))
