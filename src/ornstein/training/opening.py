"""A trained model from wherever it is: a run, one of its checkpoints, or a saved model."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ornstein.score import ScoreModel
from ornstein.training.checkpoints import Checkpoints, saved
from ornstein.training.experiment import Experiment
from ornstein.training.run import CONFIG, read_config

Which = Literal["best", "last"]


@dataclass(frozen=True)
class Opened:
    """A model and where it comes from."""

    model: ScoreModel
    folder: Path  # of the weights
    run: Path | None  # the run that it belongs to
    step: int | None
    experiment: Experiment | None  # how it was made, where that is known
    data: dict[str, Any] | None  # what it was trained on, as described then

    @property
    def name(self) -> str:
        """A short name for it."""
        return (self.run or self.folder).name


def open_model(
    path: str | Path, which: Which = "best", device: torch.device | None = None
) -> Opened:
    """The averaged model of a run (its best on validation, or its last), or a saved model."""
    given = Path(path)
    if (given / "checkpoints").is_dir():
        folder = _chosen(given, which)
        return _opened(folder, given, device)
    if (given / "state.json").exists() and given.parent.name == "checkpoints":
        return _opened(given, given.parent.parent, device)
    if given.is_dir() and (given / CONFIG).exists() and (given / "metrics.jsonl").exists():
        raise ValueError(
            f"{given} is a run without a checkpoint; expected one that has trained for a while. "
            "Repeat its command."
        )
    here = given.parent != Path(".") and (given.parent.is_dir() or given.parts[0] == "runs")
    if not given.exists() and here:  # not a name on the Hub
        raise ValueError(
            f"there is no {given}; expected the folder of a run, of one of its checkpoints, or of "
            f"a saved model.{_others(given.parent, given.name)}"
        )
    if given.is_dir() and not (given / "model.safetensors").exists():
        raise ValueError(
            f"{given} holds neither a run nor a saved model; expected a folder that `ornstein "
            f"train` or save_pretrained wrote.{_others(given, '')}"
        )
    return Opened(ScoreModel.from_pretrained(path, device=device), given, None, None, None, None)


def _others(folder: Path, near: str) -> str:
    """The runs in a folder, those that are spelt alike first."""
    found = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    close = difflib.get_close_matches(near, found, n=3)
    if close:
        return f" Perhaps you meant {' or '.join(str(folder / name) for name in close)}."
    return f" {folder} has {', '.join(found[:10])}." if found else ""


def _chosen(run: Path, which: Which) -> Path:
    latest = Checkpoints(run / "checkpoints").latest_saved()
    if latest is None:
        raise ValueError(
            f"{run} has no checkpoint yet; expected a run that has trained for a while. Repeat its "
            "command."
        )
    best = latest.state.get("best")
    if which == "best" and best is not None:
        folder = run / "checkpoints" / f"step-{best['step']:08d}"
        try:
            saved(folder)
            return folder
        except ValueError as error:
            warnings.warn(
                f"{folder}, the best checkpoint, is damaged ({error}); using the last one, of step "
                f"{latest.step}.",
                stacklevel=3,
            )
    return latest.folder


def _opened(folder: Path, run: Path, device: torch.device | None) -> Opened:
    found = saved(folder)
    record = read_config(run) if (run / CONFIG).exists() else {}
    known = record.get("experiment")
    return Opened(
        model=ScoreModel.from_pretrained(folder, device=device),
        folder=folder,
        run=run,
        step=found.step,
        experiment=None if known is None else Experiment.from_record(known),
        data=record.get("data"),
    )
