"""`ornstein quickstart`: what it writes, that it can be repeated, what its figures must show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ornstein
from ornstein.cli import main
from ornstein.training.opening import open_model

RUNS = ("channel", "joint-vpsde", "joint-learned-1")
ZOO = ("vpsde", "cld", "alda", "malda", "random")


def found(out: Path, run: str, process: str) -> dict[str, Any]:
    """One evaluation of a quick start, of as many draws as it was asked for."""
    (path,) = (out / run / "evaluations").glob(f"test-{process}-draws*.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick start of few steps: everything is there, nothing is good."""
    out = tmp_path_factory.mktemp("quick") / "start"
    assert main(["quickstart", "--steps", "20", "--draws", "2", "--out", str(out)]) == 0
    return out


def test_everything_is_written(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in RUNS:
        assert (short / run / "metrics.jsonl").stat().st_size > 0
        assert open_model(short / run, "last").step == (20 if run == "channel" else 10)
    for process in ZOO:
        assert found(short, "channel", process)["process"] == process
        with Image.open(short / "channel" / "samples" / f"{process}.png") as picture:
            pixels = np.asarray(picture)
        assert pixels.shape == (6 * 49 + 1, 8 * 49 + 1, 3)  # 48 digits, six times their size
    report = (short / "report.html").read_text(encoding="utf-8")
    for run, process in [("channel", "cld"), ("joint-learned-1", "learned-1")]:
        assert f"{found(short, run, process)['bits_per_dim']:.3f}"[:-1] in report
    with Image.open(short / "overview.png") as picture:
        assert min(picture.size) > 500


def test_evaluations_are_those_of_the_saved_models(short: Path) -> None:
    model = open_model(short / "channel", "last").model
    data = ornstein.data.load("digits")
    again = ornstein.evaluate(
        model.with_process(ornstein.cld()), data.test.x, draws=2, seed=0, quiet=True
    )
    assert again.bits_per_dim == found(short, "channel", "cld")["bits_per_dim"]


def test_samples_are_those_of_the_saved_models(short: Path) -> None:
    model = open_model(short / "channel", "last").model.with_process(ornstein.cld())
    images = ornstein.sample(model, 48, ornstein.Ancestral(60), seed=0)
    with Image.open(short / "channel" / "samples" / "cld.png") as picture:
        pixels = np.asarray(picture)[1::6, 1::6, 0]  # one pixel of each block, gaps included
    with_gaps = np.asarray(ornstein_grid(images))[1::6, 1::6, 0]
    assert np.array_equal(pixels, with_gaps)


def ornstein_grid(images: torch.Tensor) -> np.ndarray:
    from ornstein import viz

    return viz.grid(images, 17)


def test_repeating_it_changes_nothing(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {run: (short / run / "metrics.jsonl").read_text() for run in RUNS}
    figures = {p: found(short, "channel", p)["bits_per_dim"] for p in ZOO}
    assert main(["quickstart", "--steps", "20", "--draws", "2", "--out", str(short)]) == 0
    assert {run: (short / run / "metrics.jsonl").read_text() for run in RUNS} == before
    assert {p: found(short, "channel", p)["bits_per_dim"] for p in ZOO} == figures
    assert main(["quickstart", "--steps", "30", "--out", str(short)]) == 2
    said = capsys.readouterr().err
    assert "training.steps: before 20, now 30" in said


@pytest.mark.long
def test_what_the_figures_must_show(tmp_path: Path) -> None:
    """One channel model is the same under every process; a learned process is not worse than the
    best fixed one (VPSDE: benchmarks/results/digits.json has the others)."""
    out = tmp_path / "start"
    assert main(["quickstart", "--steps", "700", "--draws", "8", "--out", str(out)]) == 0
    base = found(out, "channel", "vpsde")
    assert base["bits_per_dim"] < 2.2  # uniform pixels: log2(17) = 4.09
    for process in ZOO[1:]:
        pair = found(out, "channel", process)["pair"]
        prior = found(out, "channel", process)["prior"] - base["prior"]
        assert abs(pair["difference"] - prior) < 3 * pair["standard_error"], process
        assert math.isclose(prior, 0.0, abs_tol=2e-3)
    pair = found(out, "joint-learned-1", "learned-1")["pair"]
    assert pair["difference"] < 3 * pair["standard_error"]
