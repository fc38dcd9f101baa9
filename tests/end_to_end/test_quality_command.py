"""`ornstein quality` as a user types it."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ornstein import Ancestral, Exponential, cld, sample
from ornstein.data import load
from ornstein.quality import fidelity, measure
from ornstein.training.opening import open_model
from tests import training_helpers as helpers
from tests.training_helpers import QUIET, TINY, run

RUN = "runs/digits-channel-vpsde"
QUICK = ("--n", "24", "--steps", "3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run."""
    folder = tmp_path_factory.mktemp("quality")
    found = run("train", *TINY, *QUIET, "--steps", "5", cwd=folder)
    assert found.code == 0, found.err
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first command leaves its classifier for the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(runs: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own, with a copy of the run in it."""
    shutil.copytree(runs / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("ORNSTEIN_COMMIT", "0123456789ab")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    return tmp_path


Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Exit code and words of a command, in this process."""

    def say(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = helpers.ornstein(*args)
        out, err = capsys.readouterr()
        return code, out, err

    return say


def only(folder: Path) -> dict[str, Any]:
    """The one result in a folder."""
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_figures_are_those_of_the_library(here: Path, cache: Path, said: Said) -> None:
    """First the costs, then the table; the classifier is trained by the first command only."""
    code, out, err = said("quality", RUN, *QUICK)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert re.match(r"24 samples under vpsde, 4 network evaluations each: (about|less)", lines[0])
    first = [line for line in lines if "classifier of digits is trained, once" in line]
    assert len(list((cache / "ornstein").iterdir())) == 1
    data, model = load("digits"), open_model(RUN).model
    samples = sample(model, 24, Ancestral(steps=3))
    truth = measure(samples, data, folder=cache / "ornstein")
    record = only(here / RUN / "quality")
    assert record["figures"] == truth.to_dict()["figures"]
    assert record["floor"] == truth.to_dict()["floor"]
    assert record["accuracy"] > 0.95
    assert record["sampling"]["evaluations"] == 4 and record["step"] == 5
    for word in ("Fréchet distance", "kernel distance", "precision", "recall", "new data"):
        assert word in out
    assert truth.figures.shown("frechet") in out and "24 samples against 1,347" in out
    assert truth.floor is not None and truth.floor.shown("frechet") in out
    again = said("quality", RUN, *QUICK)[1]
    assert "is trained, once" not in again
    # the same but for times, and for what the first one says about the classifier
    tables = [text[text.index("24 samples against") :] for text in (out, again)]
    assert tables[0] == tables[1]
    assert len(first) <= 1


def test_other_process_solver_and_split(here: Path, said: Said) -> None:
    options = ("--process", "cld", "--solver", "exponential", "--steps", "4", "--n", "20")
    code, out, err = said("quality", RUN, *options, "--split", "test", "--features", "raw")
    assert (code, err) == (0, "")
    model = open_model(RUN).model.with_process(cld())
    samples = sample(model, 20, Exponential(steps=4))
    truth = measure(samples, load("digits"), "raw", split="test")
    record = only(here / RUN / "quality")
    assert record["figures"] == truth.to_dict()["figures"]
    assert (record["split"], record["floor_split"]) == ("test", "valid")
    assert "20 examples of valid" in out


def test_samples_from_a_file(here: Path, said: Said) -> None:
    assert said("sample", RUN, "--n", "30", "--steps", "2", "--out", "s.npz")[0] == 0
    options = ("--samples", "s.npz", "--features", "none", "--out", "deep/q.json")
    code, out, err = said("quality", RUN, *options, "--n", "25")
    assert (code, err) == (0, "")
    with np.load("s.npz") as file:
        samples = torch.from_numpy(file["samples"])[:25]
    record = only(here / "deep")
    truth = measure(samples, load("digits"), "none")
    assert record["figures"] == truth.to_dict()["figures"]
    assert record["figures"]["frechet"] is None and "Fréchet" not in out
    assert "network evaluations" not in out


def test_default_number_is_what_was_held_out(here: Path, said: Said) -> None:
    assert said("quality", RUN, "--steps", "1", "--features", "none")[0] == 0
    record = only(here / RUN / "quality")
    assert record["samples"] == record["floor_samples"] == 300


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--n", "3"), ("--n 3", "at least 4")),
        (("--weights", "w.pth"), ("--weights", "--fid")),
        (("--fid",), ("torch-fidelity", "ornstein[fidelity]")),
        (("--out", "q.png"), ("q.png", ".json")),
        (("--samples", "no.npz"), ("no.npz", "ornstein sample")),
        (("--samples", "s.npz", "--steps", "3"), ("there already", "--process")),
        (("--order", "2"), ("--order", "exponential")),
    ],
    ids=lambda value: " ".join(value) if str(value[0]).startswith("--") else "",
)
def test_mistakes_cost_nothing(
    options: tuple[str, ...],
    words: tuple[str, ...],
    here: Path,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fidelity, "installed", lambda: False)
    code, out, err = said("quality", RUN, *options)
    assert code == 2, err
    for word in words:
        assert word in err, err
    assert out == "" and not (here / RUN / "quality").exists()


def test_other_arrays_are_refused(here: Path, said: Said) -> None:
    np.savez(here / "other.npz", x=np.zeros(3))
    code, _, err = said("quality", RUN, "--samples", "other.npz")
    assert code == 2 and "holds x" in err and "'samples'" in err


def test_two_processes_share_the_samples(here: Path) -> None:
    """As torchrun starts them: the figures of one, written once."""
    out = ("--features", "none", "--n", "21", "--steps", "2", "--out")
    ended = [each.wait() for each in helpers.together("quality", RUN, *out, "two.json", cwd=here)]
    assert [each.code for each in ended] == [0, 0], ended[0].err
    assert "wrote" in ended[0].out and ended[1].out == ""
    assert run("quality", RUN, *out, "one.json", cwd=here).code == 0
    two, one = (json.loads((here / f"{name}.json").read_text()) for name in ("two", "one"))
    assert two["figures"] == one["figures"]
