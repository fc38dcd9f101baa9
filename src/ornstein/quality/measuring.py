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
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ornstein.data import Dataset
from ornstein.data.sets import shuffled
from ornstein.files import write_text
from ornstein.provenance import provenance
from ornstein.quality.classifier import classifier, labelled
from ornstein.quality.distances import (
    DIRECTIONS,
    NEIGHBOURS,
    frechet_with_error,
    kernel_distance,
    precision_recall,
    sliced_wasserstein_with_error,
    whole,
)
from ornstein.quality.features import Features, Raw, Scale

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


@dataclass(frozen=True)
class Quality:
    """How near samples are to data."""

    figures: Figures
    floor: Figures | None  # the same for held-out data; None where there is too little
    samples: int
    floor_samples: int  # as many, or all there are
    real: int  # examples of the reference
    matched: int  # … of them for precision, recall and the kernel distance
    data: str
    split: str
    floor_split: str
    features: str
    title: str  # of the features, with what is known about them
    space: str  # of the sliced Wasserstein distance
    accuracy: float | None  # of a classifier on test labels
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


def shown(value: float | None, error: float | None = None) -> str:
    """As many digits as two of the error's, else three."""
    if value is None:
        return "—"
    if error is not None and error > 0:
        places = max(1 - math.floor(math.log10(error)), 0)
        return f"{value:.{places}f} ± {error:.{places}f}" if places < 7 else f"{value:.2g}"
    return f"{value:.3g}"


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
    whole(neighbours, "neighbours", 1)
    whole(most, "most", 1)
    where = samples.device if device is None else torch.device(device)
    told = tell or (lambda text: None)
    scale = Scale.of(data)
    using = features_of(features, data, scale, seed, folder, where, told)
    real = chosen(getattr(data, split).x, most)
    held = chosen(getattr(data, OTHER[split]).x, len(samples))
    matched = min(len(real), len(samples))
    if min(matched, len(samples)) <= neighbours and using is not None:
        raise ValueError(
            f"{len(samples)} samples and {len(real)} examples are too few for {neighbours} "
            f"neighbours; expected more than {neighbours} of both. Take more samples."
        )
    enough = len(held) > neighbours

    told("sliced Wasserstein distance")
    flat = scale(real.to(where)).flatten(1)
    sliced = [
        sliced_wasserstein_with_error(scale(x.to(where)).flatten(1), flat, directions, seed)
        for x in (samples, held)[: 1 + enough]
    ]
    found = [Figures(value, known(error)) for value, error in sliced]
    if using is not None:
        reference = using.all(real, where, _counting(told, "features of the data"))
        for place, x in enumerate((samples, held)[: 1 + enough]):
            name = "held-out data" if place else "samples"
            vectors = using.all(x, where, _counting(told, f"features of {name}"))
            told(f"distances of {name}")
            few = reference[:matched]
            found[place] = with_features(found[place], vectors, reference, few, neighbours)
    return Quality(
        figures=found[0],
        floor=found[1] if enough else None,
        samples=len(samples),
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
        neighbours=neighbours,
        directions=directions,
        seed=seed,
    )


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
        watch = _counting(told, "training a classifier: step")
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


def _counting(told: Tell, what: str) -> Callable[[int, int], None]:
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
