"""An experiment in a user's words: data, process, model and training as typed options.

`Experiment.build(data)` makes the model. `preset(name)` is a whole experiment for a data set, from
which a command line or a file changes what it wants to. What was resolved is kept with the run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ornstein.data import Dataset
from ornstein.score import ScoreModel
from ornstein.training.choices import Data, Diffusing, Modelling
from ornstein.training.options import Optimiser, Training, Watch
from ornstein.training.records import from_record, to_record
from ornstein.training.run import complete


@dataclass(frozen=True)
class Experiment:
    """All of it."""

    data: Data = field(default_factory=Data)
    process: Diffusing = field(default_factory=Diffusing)
    model: Modelling = field(default_factory=Modelling)
    training: Training = field(default_factory=Training)

    def build(self, data: Dataset, device: torch.device | None = None) -> ScoreModel:
        """The model with fresh weights, which depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.training.seed)
            model = self.model.build(data, self.process.build(self.training.seed))
        return model if device is None else model.to(device)

    def to_record(self) -> dict[str, Any]:
        """For JSON."""
        return to_record(self)

    @staticmethod
    def from_record(record: Any, base: Experiment | None = None) -> Experiment:
        """From JSON; what it leaves out is as in the base, or as its data's preset has it."""
        if base is None and isinstance(record, dict) and isinstance(record.get("data"), dict):
            base = preset(str(record["data"].get("data", "digits")))
        return from_record(Experiment, record, base)

    @staticmethod
    def read(path: str | Path, base: Experiment | None = None) -> Experiment:
        """From a JSON file."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} can't be read ({error}); expected a JSON file with options, such as the "
                "config.json of a run."
            ) from error
        if isinstance(record, dict) and record.get("library") == "ornstein":
            raise ValueError(
                f"{path} describes a saved model; expected options, such as the config.json of the "
                "run that it comes from."
            )
        if isinstance(record, dict) and isinstance(record.get("experiment"), dict):
            record = record["experiment"]  # the config of a run
            if isinstance(record.get("model"), dict):
                complete(record["model"])
        try:
            return Experiment.from_record(record, base)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


# ---------------------------------------------------------------- presets


def preset(name: str) -> Experiment:
    """An experiment for a data set: a named one, or sensible options for another."""
    found = _PRESETS.get(name, _PRESETS["images"])
    return replace(found, data=replace(found.data, data=name))


def _experiment(optimiser: Optimiser, watch: Watch, **training: Any) -> Experiment:
    return Experiment(training=Training(optimiser=optimiser, watch=watch, **training))


_SMALL = Watch(log_every=50, valid_every=250, valid_examples=150, sample_every=500)
_USUAL = Watch(log_every=100, valid_every=2000, valid_examples=2000, sample_every=2000)
_TOY = _experiment(
    Optimiser(lr=2e-3, decay="cosine", clip=1.0),
    Watch(log_every=100, valid_every=1000, valid_examples=2000, sample_every=1000, samples=1024),
    steps=5000,
    batch=512,
    ema=0.995,
)
_GREY = _experiment(
    Optimiser(lr=1e-3, decay="cosine", warmup=500), _USUAL, steps=40_000, batch=256, ema=0.9995
)
_COLOUR = _experiment(
    Optimiser(lr=2e-4, decay="constant", warmup=1000),
    _USUAL,
    steps=120_000,
    batch=128,
    ema=0.9999,
    precision="bfloat16",
)
_PRESETS: dict[str, Experiment] = {
    "digits": _experiment(
        Optimiser(lr=4e-3, decay="cosine", warmup=50), _SMALL, steps=1500, batch=64, ema=0.99
    ),
    "mnist": _GREY,
    "fashion_mnist": _GREY,
    "cifar10": _COLOUR,
    "imagenet32": replace(_COLOUR, training=replace(_COLOUR.training, steps=300_000)),
    "images": _experiment(
        Optimiser(lr=5e-4, decay="cosine", warmup=500), _USUAL, steps=20_000, batch=128, ema=0.9995
    ),
    **dict.fromkeys(("moons", "rings", "checkerboard", "swissroll", "mixture"), _TOY),
}
