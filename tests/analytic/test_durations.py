"""How long a table will take: counted by hand, with steps of a known length."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ornstein.data import Dataset, Split
from ornstein.reproduce import timing
from ornstein.reproduce.recipe import plan
from ornstein.reproduce.running import Errand, Setting, errands
from ornstein.training import fit
from ornstein.training.estimating import Estimate

A = """about = "a"
[training]
steps = 10
batch = 40
[training.watch]
valid_every = 5
valid_examples = 30
valid_draws = 2
[[evaluate]]
bound = "discrete"
draws = 3
process = ["vpsde", "cld"]
[[evaluate]]
bound = "tweedie"
draws = 4
limit = 5
[[sample]]
n = 6
steps = 7
"""
B = """about = "b"
[training]
steps = 100
batch = 8
[training.watch]
valid_every = 0
[[evaluate]]
draws = 1
limit = 1000
split = "valid"
"""
TRAINED = 10 * 40 + (10 // 5) * 20 * 2 / 3, 100 * 8  # 20 validation examples: not 30
FIGURES = (2 * 50 * 3, 5 * 4), (20,)  # 50 test examples
SAMPLES = 6 * 7
SECOND = 0.01  # for each image of a step


@pytest.fixture
def data() -> Dataset:
    x = torch.arange(50, dtype=torch.uint8).reshape(50, 1, 1, 1).expand(-1, 1, 8, 8) % 17
    split = Split(x.contiguous())
    return Dataset("digits", split, Split(split.x[:20]), split, 17, "drawn")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps take a known time; the batches that were tried."""
    found: list[int] = []

    def estimate(model: Any, data: Dataset, training: Any) -> Estimate:
        found.append(training.batch)
        return Estimate(1, 0, 1, 1, 1, SECOND * training.batch, training.batch)

    monkeypatch.setattr(timing, "estimate", estimate)
    return found


def both(folder: Path) -> list[Errand]:
    (folder / "table.toml").write_text(
        'title = "T"\n[[run]]\nrecipe = "a"\n[[run]]\nrecipe = "b"\nseeds = [0, 1]\n'
    )
    (folder / "a.toml").write_text(A)
    (folder / "b.toml").write_text(B)
    return errands(plan(folder), Setting(folder / "runs"))


def test_counted_by_hand(tmp_path: Path, data: Dataset, tried: list[int]) -> None:
    todo, cpu = both(tmp_path), torch.device("cpu")
    found = timing.duration(todo, data, cpu)
    assert tried == [16]  # a few examples are enough on a CPU
    images = TRAINED[0] + 2 * TRAINED[1]
    assert found.training == pytest.approx(SECOND * images, rel=1e-12)
    asked = SAMPLES + sum(FIGURES[0]) + 2 * FIGURES[1][0]
    assert found.looking == pytest.approx(SECOND * asked / 3, rel=1e-12)
    assert found.whole == found.training + found.looking and not found.compiled
    assert timing.duration(todo[1:], data, cpu).training == pytest.approx(SECOND * 2 * TRAINED[1])
    assert tried == [16, 8]
    sampled = timing.duration(todo, data, cpu, "sample")
    assert sampled.looking == pytest.approx(SECOND * SAMPLES / 3, rel=1e-12)
    assert timing.duration(todo, data, cpu, "train") == replace(found, looking=0.0)


def test_what_is_done_takes_no_time(tmp_path: Path, data: Dataset, tried: list[int]) -> None:
    (one, *_), cpu = both(tmp_path), torch.device("cpu")
    one.folder.mkdir(parents=True)
    (one.folder / "config.json").write_text("{}")
    one.finish(1)
    found = timing.duration([one], data, cpu)
    assert found.training == 0
    assert found.looking == pytest.approx(SECOND * (SAMPLES + sum(FIGURES[0])) / 3, rel=1e-12)
    (picture,) = one.pictures().values()
    picture.parent.mkdir()
    picture.write_bytes(b"")
    for name in ("vpsde", "cld"):
        place = one.looks()["discrete"]
        place.mkdir(exist_ok=True)
        (place / f"{name}.json").write_text(json.dumps({"asked": name}))
    one.finish(3)
    found = timing.duration([one], data, cpu)
    assert found.looking == pytest.approx(SECOND * FIGURES[0][1] / 3, rel=1e-12)
    before = len(tried)
    assert timing.duration([one], data, cpu, "sample").whole == 0 and len(tried) == before


def test_what_is_trained_in_part(tmp_path: Path, data: Dataset, tried: list[int]) -> None:
    """Steps up to the last checkpoint are done."""
    (_, one, _), cpu = both(tmp_path), torch.device("cpu")
    steps = fit(
        one.recipe.experiment.build(data), data, one.recipe.experiment.training, folder=one.folder
    )
    for step in steps:
        if step.number == 30:
            steps.close()
            break
    assert timing.duration([one], data, cpu).training == pytest.approx(SECOND * 70 * 8, rel=1e-12)


def test_it_is_measured(tmp_path: Path, data: Dataset) -> None:
    """With steps of this machine: more than nothing, and of two like runs twice that of one."""
    todo, cpu = both(tmp_path), torch.device("cpu")
    found = timing.duration(todo[1:], data, cpu)
    assert found.looking / found.training == pytest.approx(20 / 800 / 3, rel=1e-9)
    assert 0 < found.whole < 3600
