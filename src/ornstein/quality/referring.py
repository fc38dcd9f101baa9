"""What samples are compared with: a split of the data, its features and floor, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ornstein.data import Dataset
from ornstein.data.sets import shuffled
from ornstein.quality.classifier import classifier, labelled
from ornstein.quality.distances import (
    DIRECTIONS,
    NEIGHBOURS,
    frechet_with_error,
    kernel_distance,
    precision_recall,
    sliced_wasserstein_with_error,
)
from ornstein.quality.features import Features, Raw, Scale
from ornstein.sampling.grids import whole

SplitName = Literal["train", "valid", "test"]
Kind = Literal["classifier", "raw", "none"]
KINDS = ("classifier", "raw", "none")
#: where the examples for a floor come from
OTHER: dict[str, SplitName] = {"train": "test", "valid": "test", "test": "valid"}
MOST = 50_000  # examples of the reference, as for published FID

Tell = Callable[[str], None]  # what is being done


@dataclass(frozen=True)
class Figures:
    """Of one set against the reference; None where there are no features."""

    sliced_wasserstein: float
    sliced_wasserstein_error: float | None  # standard errors, None where there are too few
    frechet: float | None = None
    frechet_error: float | None = None
    kernel_distance: float | None = None
    kernel_distance_error: float | None = None
    precision: float | None = None
    recall: float | None = None

    def shown(self, name: str) -> str:
        """One of them, with its error where that is known."""
        return shown(getattr(self, name), getattr(self, f"{name}_error", None))


def shown(value: float | None, error: float | None = None) -> str:
    """As many digits as two of the error's, else three."""
    if value is None:
        return "—"
    if error is not None and error > 0:
        places = max(1 - math.floor(math.log10(error)), 0)
        return f"{value:.{places}f} ± {error:.{places}f}" if places < 7 else f"{value:.2g}"
    return f"{value:.3g}"


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
    neighbours: int
    directions: int

    @staticmethod
    def of(
        data: Dataset,
        n: int,
        features: Features | Kind | None = None,
        *,
        split: SplitName = "train",
        seed: int = 0,
        neighbours: int = NEIGHBOURS,
        directions: int = DIRECTIONS,
        most: int = MOST,
        folder: str | Path | None = None,
        device: torch.device | str = "cpu",
        tell: Tell | None = None,
    ) -> Reference:
        """The same as `measure` takes; seed is that of the classifier and of the directions."""
        where, told = torch.device(device), tell or (lambda text: None)
        check_samples(data.train.x[:1], data, split)
        whole(neighbours, "neighbours", 1)
        whole(most, "most", 1)
        scale = Scale.of(data)
        using = features_of(features, data, scale, seed, folder, where, told)
        real, held = chosen(getattr(data, split).x, most), chosen(getattr(data, OTHER[split]).x, n)
        matched = min(len(real), n)
        if matched <= neighbours and using is not None:
            raise ValueError(
                f"{n} samples and {len(real)} examples are too few for {neighbours} neighbours; "
                f"expected more than {neighbours} of both. Take more samples."
            )
        counted = counting(told, "features of the data")
        vectors = None if using is None else using.all(real, where, counted)
        enough = len(held) > neighbours
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
        found = Reference(data, against, scale, flat, using, vectors, seed, neighbours, directions)
        if not enough:
            return found
        told("figures of held-out data")
        return replace(found, against=replace(against, floor=found.figures(held)))

    def figures(self, samples: Tensor) -> Figures:
        """Of one set of samples, (n, *shape)."""
        check_samples(samples, self.data, self.against.split)
        where = self.flat.device
        own = self.scale(samples.to(where)).flatten(1)
        value, error = sliced_wasserstein_with_error(own, self.flat, self.directions, self.seed)
        found = Figures(value, known(error))
        if self.features is None or self.vectors is None:
            return found
        mine = self.features.all(samples, where)
        few = self.vectors[: self.against.matched]
        return with_features(found, mine, self.vectors, few, self.neighbours)


def usual_features(data: Dataset) -> Kind:
    """What is compared where nobody says otherwise."""
    if labelled(data):
        return "classifier"
    return "none" if len(data.shape) == 3 else "raw"


def features_of(
    given: Features | Kind | None,
    data: Dataset,
    scale: Scale,
    seed: int,
    folder: str | Path | None,
    where: torch.device,
    told: Tell,
) -> Features | None:
    kind = usual_features(data) if given is None else given
    if isinstance(kind, Features):
        return kind
    if kind == "classifier":
        watch = counting(told, "training a classifier: step")
        return classifier(data, seed, folder=folder, device=where, watch=watch)
    if kind == "raw":
        return Raw(scale)
    if kind == "none":
        return None
    raise ValueError(
        f"features={given!r}; expected one of {', '.join(KINDS)}, or features such as "
        "ornstein.quality.inception(data)."
    )


def with_features(
    found: Figures, vectors: Tensor, reference: Tensor, few: Tensor, neighbours: int
) -> Figures:
    """With the figures that are about features."""
    distance, distance_error = frechet_with_error(vectors, reference)
    kernel, kernel_error = kernel_distance(vectors, few)
    precision, recall = precision_recall(few, vectors, neighbours)
    return replace(
        found,
        frechet=distance,
        frechet_error=known(distance_error),
        kernel_distance=kernel,
        kernel_distance_error=known(kernel_error),
        precision=precision,
        recall=recall,
    )


def known(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def chosen(x: Tensor, count: int) -> Tensor:
    """The first of a fixed order, since files may be sorted; the same for every seed."""
    return x[shuffled(len(x), 0, "quality", device=x.device)[:count]]


def counting(told: Tell, what: str) -> Callable[[int, int], None]:
    return lambda done, total: told(f"{what} {done:,}/{total:,}")


def check_samples(samples: Tensor, data: Dataset, split: str) -> None:
    if split not in OTHER:
        raise ValueError(f"split={split!r}; expected train, valid or test.")
    if not len(getattr(data, split)):
        raise ValueError(f"{data.name!r} has no {split} split; expected one. Choose another split.")
    kind = "real numbers" if data.levels is None else f"whole numbers 0 … {data.levels - 1}"
    wanted = f"a tensor (n, {', '.join(map(str, data.shape))}) of {kind}, like {data.name!r}"
    if not isinstance(samples, Tensor):
        raise ValueError(f"samples were given as {type(samples).__name__}; expected {wanted}.")
    if samples.dim() < 1 or tuple(samples.shape[1:]) != data.shape or not len(samples):
        raise ValueError(f"samples have the shape {tuple(samples.shape)}; expected {wanted}.")
    if samples.is_complex() or samples.dtype == torch.bool:
        raise ValueError(f"samples are {samples.dtype}; expected {wanted}.")
    if data.levels is None:
        if not bool(samples.isfinite().all()):
            raise ValueError(f"samples hold NaN or infinite numbers; expected {wanted}.")
        return
    if samples.is_floating_point():
        raise ValueError(
            f"samples are {samples.dtype}; expected {wanted}. likelihood.restore(x) makes pixels "
            "of the numbers that diffuse."
        )
    low, high = int(samples.min()), int(samples.max())
    if low < 0 or high >= data.levels:
        raise ValueError(f"samples go from {low} to {high}; expected {wanted}.")
