"""The quality of samples along a training run: off unless asked for, and it changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ornstein
from ornstein import Exponential, fit, quality
from ornstein.cli import main
from ornstein.training import preset
from ornstein.training.reading import read_run

STEPS = 4


def run(folder: Path | None, **watch: int) -> list[ornstein.Step]:
    base = preset("digits")
    options = replace(base.training.watch, log_every=2, valid_every=0, sample_every=0, **watch)
    training = replace(base.training, steps=STEPS, batch=8, seed=3, watch=options)
    data = base.data.load()
    torch.manual_seed(0)
    return list(fit(base.build(data), data, training, folder=folder))


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert all(step.quality is None for step in run(None))


def test_it_measures_what_measure_does_and_leaves_the_run_alone(tmp_path: Path) -> None:
    """The same figures as by hand from the averaged model, in metrics.jsonl too; same losses."""
    plain = run(None)
    watched = run(tmp_path / "run", quality_every=2, quality_samples=40, quality_steps=3)
    assert [step.loss for step in watched] == [step.loss for step in plain]
    assert [step.number for step in watched if step.quality is not None] == [2, 4]
    data, last = ornstein.data.load("digits"), watched[-1]
    x = ornstein.sample(last.averaged, 40, Exponential(3), seed=3, shape=data.shape)
    by_hand = quality.measure(x, data)
    assert last.quality is not None and last.quality.figures == by_hand.figures
    lines = [json.loads(s) for s in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "quality_frechet" in line]
    assert [line["step"] for line in found] == [2, 4]
    assert found[-1]["quality_frechet"] == by_hand.figures.frechet
    summary = read_run(tmp_path / "run")
    assert len(summary.training) == 2 and not summary.validation  # they are no lines of metrics


def test_the_command_says_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--steps", "2", "--batch", "8", "--quality-every", "2"]
    options += ["--quality-samples", "16", "--quality-steps", "2"]
    assert main(["train", "--data", "digits", "--out", "run", *options]) == 0
    said = capsys.readouterr().out
    assert "quality of 16 samples at 3 network evaluations, 1 times: about" in said
    assert "Fréchet distance" in said
    assert main(["train", "--data", "digits", "--out", "other", "--quality-samples", "2"]) == 2
    assert "quality_samples" in capsys.readouterr().err.replace("-", "_")
