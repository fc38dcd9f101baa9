"""A run is a folder: what was asked for, what came out, and how to go on.

    config.json      resolved options, the model, the data, versions and commit of the first start
    starts.jsonl     one line per start: step, versions, machine, commit
    metrics.jsonl    one line per `log_every` steps; validation lines between them
    checkpoints/     see `checkpoints`
    samples/         pictures of samples from fixed noise

Repeating a command goes on with its run. Other options in the same folder are refused, with the
difference. A lock keeps two processes from writing to one run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ornstein.files import locked, write_text
from ornstein.provenance import provenance
from ornstein.training.records import differences

FORMAT = 1
CONFIG, METRICS, STARTS, LOCK = "config.json", "metrics.jsonl", "starts.jsonl", "run.lock"
# what may differ between two starts of a run, since no number depends on it
FREE = ("watch", "compile")


class Run:
    """The folder of a run, as the one process sees it that writes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ---------------------------------------------------------------- options

    def check(self, record: dict[str, Any]) -> bool:
        """Whether there is such a run already; one with other options is refused."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file; expected a folder for the run.")
        if not (self.folder / CONFIG).exists() or not self._has_checkpoint():
            return False  # nothing that could be lost
        before = read_config(self.folder)
        old, new = _decisive(before), _decisive(record)
        extended = _may_extend(old, new)
        if extended:
            old["training"]["steps"] = new["training"]["steps"]
        changed = differences(old, new)
        if changed:
            lines = "\n  ".join(changed)
            raise ValueError(
                f"{self.folder} holds a run with other options:\n  {lines}\nExpected the same ones "
                f"to go on with it. Repeat them, or use another folder.{_about_steps(changed)}"
                f"{_about_histograms(changed)}"
            )
        return True

    def _has_checkpoint(self) -> bool:
        return any((self.folder / "checkpoints").glob("step-*"))

    def begin(self, record: dict[str, Any], step: int) -> None:
        """Note a start, and forget metrics of steps that are about to be done again."""
        where = provenance()
        self._clear()
        path = self.folder / CONFIG
        known = path.exists() and self._has_checkpoint()
        before = read_config(self.folder) if known else {"provenance": where}
        kept = {"format": FORMAT, **record, "provenance": before["provenance"]}
        write_text(path, json.dumps(kept, indent=1, ensure_ascii=False))
        lines = [line for line in self.metrics() if line["step"] <= step]
        write_text(self.folder / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
        self._append(STARTS, {"step": step, **where})

    def _clear(self) -> None:
        """Remove what a killed process left half-written; the lock says that nobody writes."""
        for place in (self.folder, self.folder / "checkpoints", self.folder / "samples"):
            for part in place.glob("*.part"):
                if part.is_dir():
                    shutil.rmtree(part)
                else:
                    part.unlink()

    # ---------------------------------------------------------------- metrics

    def note(self, line: dict[str, Any]) -> None:
        """One more line of metrics."""
        self._append(METRICS, line)

    def metrics(self) -> list[dict[str, Any]]:
        """All lines that are whole."""
        return read_metrics(self.folder)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    # ---------------------------------------------------------------- one writer

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """For as long as this process writes; the lock goes away with the process."""
        refusal = (
            f"another process is training in {self.folder}; expected one at a time. Wait for it or "
            "stop it, or use another folder."
        )
        with locked(self.folder / LOCK, refusal):
            yield


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a run."""
    path = folder / CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or "training" not in record:
            raise ValueError("it has no training options")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} can't be read ({error}); expected the config of a run, as `ornstein train` "
            "writes it."
        ) from error
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {record.get('format')!r} and this version reads {FORMAT}; "
            "use the version that wrote it."
        )
    experiment = record.get("experiment")
    if isinstance(experiment, dict) and isinstance(experiment.get("model"), dict):
        complete(experiment["model"])
    return record


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of metrics that are whole; the last one may have been cut off."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _decisive(record: dict[str, Any]) -> dict[str, Any]:
    """What decides the numbers of a run."""
    kept = {k: v for k, v in record.items() if k not in ("format", "provenance")}
    kept = json.loads(json.dumps(kept))  # as a file would have it, and a copy
    kept["training"] = {k: v for k, v in kept["training"].items() if k not in FREE}
    if isinstance(kept.get("data"), dict):  # wherever it is: its fingerprint says what it is
        kept["data"] = {
            k: v for k, v in kept["data"].items() if k not in ("name", "source", "note")
        }
    if isinstance(kept.get("experiment"), dict):  # says the same again, in the user's words
        for part, free in (
            ("training", (*FREE, "steps")),
            ("data", ("data", "data_folder", "download")),
        ):
            again = kept["experiment"].get(part, {})
            kept["experiment"][part] = {k: v for k, v in again.items() if k not in free}
    _of_before(kept)
    return kept


def _of_before(kept: dict[str, Any]) -> None:
    """A record from before there was a choice of features, or a histogram, is of the only kind."""
    experiment, model = kept.get("experiment"), kept.get("model")
    asked = experiment.get("model") if isinstance(experiment, dict) else None
    joint = False
    if isinstance(model, dict) and model.get("parametrisation") == "joint":
        joint = True
        if model.get("features"):
            model.setdefault("features_of", "z")
    if isinstance(asked, dict):
        complete(asked)
        if isinstance(model, dict):  # what came of them
            asked["histogram"], asked["bins"] = "histogram" in model, bool(model.get("features"))
        if not joint:
            del asked["bins_of"]  # which is about joint models


def complete(asked: dict[str, Any]) -> None:
    """Say of a model's options what went without saying before there was a choice."""
    if "histogram" not in asked:
        asked["histogram"], asked["bins"] = False, "on" if asked.get("bins", True) else "off"
    asked.setdefault("bins_of", "z")
    asked.setdefault("known_noise", "guessed")


def _about_steps(changed: list[str]) -> str:
    if not any(line.startswith("training.steps:") for line in changed):
        return ""
    return (
        " A run may get more steps, not fewer, and only with decay='constant': a cosine would have "
        "had other learning rates from the start."
    )


def _about_histograms(changed: list[str]) -> str:
    if "experiment.model.histogram: before False, now True" not in changed:
        return ""
    return " A run from before models had a histogram goes on with --no-histogram."


def _may_extend(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a run may get more steps: with a constant learning rate nothing else changes."""
    before, now = old["training"], new["training"]
    constant = before["optimiser"]["decay"] == now["optimiser"]["decay"] == "constant"
    return constant and isinstance(now["steps"], int) and now["steps"] >= before["steps"]
