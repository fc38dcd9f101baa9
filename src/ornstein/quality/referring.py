"""Data that many sets of samples are compared with: its features and its floor are computed once.

`measure` does the same for a single set; the figures agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ornstein.data import Dataset
from ornstein.quality.distances import DIRECTIONS, NEIGHBOURS, sliced_wasserstein_with_error
from ornstein.quality.features import Features, Scale
from ornstein.quality.measuring import (
    MOST,
    OTHER,
    Figures,
    Kind,
    SplitName,
    Tell,
    check_samples,
    chosen,
    features_of,
    known,
    with_features,
)


@dataclass(frozen=True)
class Against:
    """What samples were compared with."""

    floor: Figures | None  # of held-out data in place of samples; None where there is too little
    floor_samples: int  # as many as samples, or all there are
    real: int  # examples of the reference
    matched: int  # … of them for precision, recall and the kernel distance
    data: str
    split: str
    floor_split: str
    features: str
    title: str  # of the features, with what is known about them
    space: str  # of the sliced Wasserstein distance
    accuracy: float | None  # of a classifier on test labels

    @staticmethod
    def read(record: dict[str, Any]) -> Against:
        """From what JSON holds."""
        floor = record["floor"]
        return Against(**{**record, "floor": None if floor is None else Figures(**floor)})


@dataclass(frozen=True, eq=False)
class Reference:
    """A split of a data set, ready for sets of n samples."""

    data: Dataset
    against: Against
    scale: Scale
    flat: Tensor  # (N, d) the examples
    features: Features | None
    vectors: Tensor | None  # (N, F) their features
    seed: int

    @staticmethod
    def of(
        data: Dataset,
        n: int,
        features: Features | Kind | None = None,
        *,
        split: SplitName = "train",
        seed: int = 0,
        folder: str | Path | None = None,
        device: torch.device | str = "cpu",
        tell: Tell | None = None,
    ) -> Reference:
        """The same as `measure` takes; seed is that of the classifier and of the directions."""
        where, told = torch.device(device), tell or (lambda text: None)
        check_samples(data.train.x[:1], data, split)
        scale = Scale.of(data)
        using = features_of(features, data, scale, seed, folder, where, told)
        real, held = (chosen(getattr(data, name).x, count) for name, count in
                      ((split, MOST), (OTHER[split], n)))  # fmt: skip
        matched = min(len(real), n)
        if matched <= NEIGHBOURS and using is not None:
            raise ValueError(
                f"{n} samples and {len(real)} examples are too few for {NEIGHBOURS} neighbours; "
                f"expected more than {NEIGHBOURS} of both. Take more samples."
            )
        told("features of the data")
        vectors = None if using is None else using.all(real, where)
        enough = len(held) > NEIGHBOURS
        against = Against(
            floor=None,
            floor_samples=len(held) if enough else 0,
            real=len(real),
            matched=matched,
            data=data.name,
            split=split,
            floor_split=OTHER[split],
            features="none" if using is None else using.name,
            title="" if using is None else using.title,
            space=scale.title,
            accuracy=None if using is None else using.accuracy,
        )
        flat = scale(real.to(where)).flatten(1)
        found = Reference(data, against, scale, flat, using, vectors, seed)
        if not enough:
            return found
        told("figures of held-out data")
        return replace(found, against=replace(against, floor=found.figures(held)))

    def figures(self, samples: Tensor) -> Figures:
        """Of one set of samples, (n, *shape)."""
        check_samples(samples, self.data, self.against.split)
        where = self.flat.device
        own = self.scale(samples.to(where)).flatten(1)
        value, error = sliced_wasserstein_with_error(own, self.flat, DIRECTIONS, self.seed)
        found = Figures(value, known(error))
        if self.features is None or self.vectors is None:
            return found
        mine = self.features.all(samples, where)
        few = self.vectors[: self.against.matched]
        return with_features(found, mine, self.vectors, few, NEIGHBOURS)
