"""What samples are compared in: numbers that say something about them.

    Raw          the data itself: pixels from −1 to 1, or coordinates in units of their spread
    Classifier   the last layer but one of a small network that was trained on the labels
    Inception    the same of a large network for photographs, through torch-fidelity

Each is a value that turns examples into vectors, (N, *shape) -> (N, F), and says what it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.data import Dataset

Watch = Callable[[int, int], None]  # how much is done, and of how much


class Features(ABC):
    """Examples as vectors."""

    name: str
    batch: int = 512  # examples at a time

    @property
    @abstractmethod
    def title(self) -> str:
        """What they are, in a few words."""

    @property
    def accuracy(self) -> float | None:
        """Share of test labels that they predict, where there are such."""
        return None

    @abstractmethod
    def of(self, x: Tensor) -> Tensor:
        """A batch of examples as vectors: (B, *shape) -> (B, F)."""

    def all(self, x: Tensor, device: torch.device, watch: Watch | None = None) -> Tensor:
        """Of any number of examples: (N, F) on the device."""
        found: list[Tensor] = []
        with torch.no_grad():
            for number, part in enumerate(x.split(self.batch)):
                found.append(self.of(part.to(device)))
                if watch is not None:
                    watch(number * self.batch + len(part), len(x))
        return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Scale:
    """Data as numbers of order 1: (N, *shape) -> float32 of the same shape."""

    levels: int | None
    mean: Tensor  # of the training data, (*shape); only for real-valued data
    std: Tensor

    @staticmethod
    def of(data: Dataset) -> Scale:
        """From the training examples."""
        if data.levels is not None:
            return Scale(data.levels, torch.zeros(()), torch.ones(()))
        x = data.train.x.to(torch.float64)
        std = x.std(0, correction=0)
        std = torch.where(std > 0, std, 1.0)  # a coordinate that never changes
        return Scale(None, x.mean(0).to(torch.float32), std.to(torch.float32))

    def __call__(self, x: Tensor) -> Tensor:
        numbers = x.to(torch.float32)
        if self.levels is not None:
            return numbers * (2 / (self.levels - 1)) - 1
        return (numbers - self.mean.to(x.device)) / self.std.to(x.device)

    @property
    def title(self) -> str:
        """What the numbers are."""
        return "standard deviations" if self.levels is None else "pixels from −1 to 1"


@dataclass(frozen=True, eq=False)
class Raw(Features):
    """The data itself."""

    scale: Scale
    name = "raw"

    @property
    def title(self) -> str:
        return f"the data itself, {self.scale.title}"

    def of(self, x: Tensor) -> Tensor:
        return self.scale(x).flatten(1)
