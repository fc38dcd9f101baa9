"""What `evaluate`, `sample` and `inspect` share: models and processes by what a user types."""

from __future__ import annotations

from dataclasses import replace

from ornstein.cli import naming
from ornstein.data import Dataset
from ornstein.score import ScoreModel
from ornstein.training.experiment import Data
from ornstein.training.opening import Opened


def under(model: ScoreModel, name: str) -> ScoreModel:
    """A channel model under another process, by its name."""
    if name in ("own", model.process.name):
        return model
    return model.with_process(naming.process(name, device=model.process.device))


def data_of(opened: Opened, given: str | None, folder: str | None) -> Dataset:
    """The data that was asked for, or that the model was trained on."""
    known = None if opened.experiment is None else opened.experiment.data
    if given is not None:
        known = Data(data=given)
    if known is None:
        raise ValueError(
            f"{opened.folder} does not say where its data is; expected --data with a named set, a "
            "file or a folder."
        )
    if folder is not None:
        known = replace(known, data_folder=folder)
    data = known.load()
    before = opened.data or {}
    if given is None and before.get("fingerprint") not in (None, data.describe()["fingerprint"]):
        raise ValueError(
            f"the data of {known.data!r} is not what {opened.name} was trained on; its splits "
            "would be mixed up. Expected the same files; or give --data to use other data on "
            "purpose."
        )
    return data
