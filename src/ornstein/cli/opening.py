"""What `evaluate` and `sample` share: models under processes, and data, by what a user types."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ornstein.cli import naming
from ornstein.data import Dataset
from ornstein.likelihood import OfPixels
from ornstein.parts import described
from ornstein.process import Process
from ornstein.score import ScoreModel
from ornstein.training.choices import Data
from ornstein.training.opening import Opened


def under(model: ScoreModel, name: str) -> ScoreModel:
    """A channel model under another process, by its name; own is the one it has."""
    if name == "own" or (model.process.learned and name == model.process.name):
        return model
    other = naming.process(name, device=model.process.device)
    if model.parametrisation == "joint" and _same(model.process, other):
        return model
    return model.with_process(other)


def _same(first: Process, second: Process) -> bool:
    """Whether two processes describe themselves equally."""
    try:
        return described(first) == described(second)
    except ValueError:  # functions of the user's own
        return False


@dataclass(frozen=True)
class Found:
    """Data for a trained model."""

    data: Dataset
    other: bool  # than what the model was trained on, or that is not known


def data_of(opened: Opened, given: str | None, folder: str | None) -> Found:
    """The data that was asked for, split as in the run, or what the model was trained on."""
    known = None if opened.experiment is None else opened.experiment.data
    if given is not None:
        known = Data(data=given) if known is None else replace(known, data=given)
    if known is None:
        raise ValueError(
            f"{opened.folder} does not say where its data is; expected --data with a named set, a "
            "file or a folder."
        )
    if folder is not None:
        known = replace(known, data_folder=folder)
    data = known.load()
    before = (opened.data or {}).get("fingerprint")
    other = before != data.fingerprint
    if other and given is None and before is not None:
        raise ValueError(
            f"the data of {known.data!r} is not what {opened.name} was trained on; its splits "
            "would be mixed up. Expected the same files; or give --data to use other data on "
            "purpose."
        )
    likelihood = opened.model.likelihood
    levels = likelihood.pixels.levels if isinstance(likelihood, OfPixels) else None
    if levels != data.levels:
        raise ValueError(
            f"{data.name!r} has {_levels(data.levels)} and {opened.name} was made for "
            f"{_levels(levels)}; expected the same."
        )
    return Found(data, other)


def _levels(count: int | None) -> str:
    return "real numbers" if count is None else f"pixels of {count} levels"
