"""Checkpoints: folders that are whole or not there, and know if they were damaged since.

    checkpoints/step-00001000/
        config.json, model.safetensors, README.md    the averaged model: from_pretrained loads it
        training.safetensors                         trained weights and the optimiser's moments
        state.json                                   the step, what else must go on, checksums

The newest that is undamaged is used. The last few are kept, and the best on validation. Only to go
on with the training takes `training.safetensors`, three quarters of it all: a run that was copied
without these files can be evaluated and sampled.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ornstein.files import digest, read_tensors, whole_folder, write_tensors, write_text
from ornstein.score import ScoreModel

FORMAT = 1
STATE, WEIGHTS = "state.json", "training.safetensors"


@dataclass(frozen=True)
class Saved:
    """One whose averaged model was found whole."""

    folder: Path
    step: int
    state: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint(Saved):
    """One that was read and found whole."""

    tensors: dict[str, Tensor]


Found = TypeVar("Found", bound=Saved)


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(
        self,
        step: int,
        averaged: ScoreModel,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        best: int | None,
        figures: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write one, then remove those that are no longer needed; `best` is a step to keep."""
        target = self.folder / f"step-{step:08d}"
        with whole_folder(target) as part:
            averaged.save_pretrained(part, figures=figures, data=data)
            write_tensors(part / WEIGHTS, tensors)
            sums = {file.name: digest(file) for file in sorted(part.iterdir())}
            record = {"format": FORMAT, "step": step, **state, "files": sums}
            record["checksum"] = _checksum(record)
            write_text(part / STATE, json.dumps(record, indent=1, allow_nan=False))
        kept = {path for number, path in self.all() if number <= step}
        kept = set(sorted(kept)[-self.keep :])
        for number, path in self.all():  # a later one is damaged, else it would have been used
            if path not in kept and (number != best or number > step):
                shutil.rmtree(path)
        return target

    def all(self) -> list[tuple[int, Path]]:
        """Steps and folders, oldest first, whole or not."""
        found = []
        for path in self.folder.glob("step-*"):
            name = re.fullmatch(r"step-(\d{8,})", path.name)
            if name and path.is_dir():
                found.append((int(name[1]), path))
        return sorted(found)

    def latest(self) -> Checkpoint | None:
        """The newest that is whole; a damaged one is passed over with a warning."""
        return self._newest(read)

    def latest_saved(self) -> Saved | None:
        """The same of those whose averaged model is whole."""
        return self._newest(saved)

    def _newest(self, reading: Callable[[Path], Found]) -> Found | None:
        damaged = []
        for number, path in reversed(self.all()):
            try:
                found = reading(path)
            except (ValueError, OSError) as error:
                damaged.append(path.name)
                warnings.warn(
                    f"{path} is damaged ({error}); going on with the checkpoint before it.",
                    stacklevel=3,
                )
                continue
            if found.step != number:
                raise ValueError(f"{path} says it is of step {found.step}; was it renamed?")
            return found
        if damaged:
            raise ValueError(
                f"all checkpoints in {self.folder} are damaged ({', '.join(damaged)}); expected "
                "one that is whole. Restore one from a copy, or use another folder to start anew."
            )
        return None


def read(path: Path) -> Checkpoint:
    """A checkpoint, checked against its checksums."""
    state = _state(path)
    _check(path, state, state["files"])
    return Checkpoint(path, state["step"], state, read_tensors(path / WEIGHTS))


def saved(path: Path) -> Saved:
    """What is known about its averaged model, checked likewise; nothing is read for training."""
    state = _state(path)
    _check(path, state, [name for name in state["files"] if name != WEIGHTS])
    return Saved(path, state["step"], state)


def _check(path: Path, state: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        file = path / name
        if not file.exists():
            needed = ", without which it can't be trained on" if name == WEIGHTS else ""
            raise ValueError(f"{name} is missing{needed}")
        if digest(file) != state["files"][name]:
            raise ValueError(f"{name} is not what was written")


def _checksum(record: Mapping[str, Any]) -> str:
    """Of the state itself, which holds those of the other files."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{STATE} can't be read ({error})") from error
    if not isinstance(state, dict) or not isinstance(state.get("files"), dict):
        raise ValueError(f"{STATE} is not that of a checkpoint")
    if state.pop("checksum", None) != _checksum(state):
        raise ValueError(f"{STATE} is not what was written")
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{STATE} has format {state.get('format')!r} and this version reads {FORMAT}"
        )
    return state
