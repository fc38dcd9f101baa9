"""`measure`: how near samples are to data, with the same figures for new data beside them.

All distances but the kernel's are too large for a finite number of samples, and precision and
recall are never 1. What a figure can come to is its *floor*: the same figure for as many held-out
examples in place of the samples. Samples that are as good as data are at the floor, within errors;
below it, they may be repeating the reference.

The reference is the training split, as is usual for FID. Fréchet and sliced Wasserstein distance
use all of it. Precision, recall and the kernel distance use as many of its examples as there are
samples, since reach depends on density.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ornstein.data import Dataset
from ornstein.files import write_text
from ornstein.provenance import provenance
from ornstein.quality.distances import DIRECTIONS, NEIGHBOURS
from ornstein.quality.features import Features
from ornstein.quality.referring import (
    MOST,
    Against,
    Figures,
    Kind,
    Reference,
    SplitName,
    Tell,
    check_samples,
)


@dataclass(frozen=True)
class Quality(Against):
    """How near samples are to data: their figures, and what they were compared with."""

    figures: Figures
    samples: int
    neighbours: int
    directions: int
    seed: int

    @property
    def line(self) -> str:
        """The result in one honest line."""
        found, floor = self.figures, self.floor
        parts = []
        for name, word in WORDS.items():
            if getattr(found, name) is not None:
                beside = "" if floor is None else f" (data: {floor.shown(name)})"
                parts.append(f"{word} {found.shown(name)}{beside}")
        where = "" if self.features == "none" else f"; in features of {self.title}"
        held = f"; data: {self.floor_samples} of {self.floor_split}" if floor else ""
        return (
            f"{', '.join(parts)} ({self.samples} samples against {self.real} of {self.data} "
            f"{self.split}{held}{where})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)

    def save(self, path: str | Path, **more: Any) -> None:
        """Write it as JSON, with versions, machine and commit."""
        record = {**self.to_dict(), **more, "provenance": provenance()}
        write_text(Path(path), json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False))

    def __str__(self) -> str:
        return self.line


#: the figures, as people call them
WORDS = {
    "frechet": "Fréchet distance",
    "kernel_distance": "kernel distance",
    "precision": "precision",
    "recall": "recall",
    "sliced_wasserstein": "sliced Wasserstein",
}


def measure(
    samples: Tensor,
    data: Dataset,
    features: Features | Kind | None = None,
    *,
    split: SplitName = "train",
    seed: int = 0,
    neighbours: int = NEIGHBOURS,
    directions: int = DIRECTIONS,
    most: int = MOST,
    folder: str | Path | None = None,
    device: torch.device | str | None = None,
    tell: Tell | None = None,
) -> Quality:
    """How near samples, (n, *shape) like the data's examples, are to a split of the data.

    features: "classifier" trains a small one on the labels, or finds it in `folder`; "raw" takes
        the data itself; "none" leaves only the sliced Wasserstein distance; or a value such as
        `inception(data)`. By default a classifier where there are labels. Without labels, vectors
        are compared as they are, and images by sliced Wasserstein alone: neighbours in pixels are
        not neighbours to the eye.
    split: the reference. Held-out examples of another split give the floor.
    seed: of the classifier and of the directions; most: examples of the reference at most.
    device: where to compute, by default where the samples are.
    """
    check_samples(samples, data, split)
    reference = Reference.of(
        data,
        len(samples),
        features,
        split=split,
        seed=seed,
        neighbours=neighbours,
        directions=directions,
        most=most,
        folder=folder,
        device=samples.device if device is None else device,
        tell=tell,
    )
    if tell is not None:
        tell("figures of the samples")
    return Quality(
        figures=reference.figures(samples),
        samples=len(samples),
        neighbours=neighbours,
        directions=directions,
        seed=seed,
        **vars(reference.against),
    )
