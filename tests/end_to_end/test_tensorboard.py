"""TensorBoard is an extra: what would be written to it, and what is said without it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest

from ornstein.cli import main

OPTIONS = [
    *("train", "--data", "digits", "--process", "learned-1", "--parametrisation", "joint"),
    *("--steps", "4", "--batch", "4", "--log-every", "2", "--valid-every", "4"),
    *("--valid-examples", "4", "--sample-every", "0", "--tensorboard"),
]


class Writer:
    """Stands in for torch.utils.tensorboard.SummaryWriter."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.closed = folder, {}, False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def close(self) -> None:
        self.closed = True


def test_events_are_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    run = tmp_path / "run"
    assert main([*OPTIONS, "--out", str(run)]) == 0
    (writer,) = Writer.made
    assert writer.folder == str(run / "tensorboard")
    assert writer.closed
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "bits_per_dim" in line]
    assert [line["step"] for line in trained] == [2, 4]
    for line in trained:
        for name in ("bits_per_dim", "prior", "diffusion", "learning_rate"):
            assert writer.scalars[f"train/{name}", line["step"]] == line[name]
        assert writer.scalars["process/Q12", line["step"]] == line["Q"][0][1]
        assert writer.scalars["process/D22", line["step"]] == line["D"][1][1]
    (valid,) = [line for line in lines if "valid_bits_per_dim" in line]
    assert writer.scalars["valid/bits_per_dim", 4] == valid["valid_bits_per_dim"]


def test_without_it_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main([*OPTIONS, "--out", str(tmp_path / "run")]) == 2
    assert "ornstein[tensorboard]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
