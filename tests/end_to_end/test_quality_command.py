"""`ornstein quality` as a user types it."""

from __future__ import annotations

import json
import re
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
from tests.training_helpers import Said, run

RUN = "runs/digits-channel-vpsde"
QUICK = ("--n", "24", "--steps", "3")


def only(folder: Path) -> dict[str, Any]:
    """The one result in a folder."""
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_figures_are_those_of_the_library(tiny_here: Path, cache: Path, said: Said) -> None:
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
    record = only(tiny_here / RUN / "quality")
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


def test_other_process_solver_and_split(tiny_here: Path, said: Said) -> None:
    options = ("--process", "cld", "--solver", "exponential", "--steps", "4", "--n", "20")
    code, out, err = said("quality", RUN, *options, "--split", "test", "--features", "raw")
    assert (code, err) == (0, "")
    model = open_model(RUN).model.with_process(cld())
    samples = sample(model, 20, Exponential(steps=4))
    truth = measure(samples, load("digits"), "raw", split="test")
    record = only(tiny_here / RUN / "quality")
    assert record["figures"] == truth.to_dict()["figures"]
    assert (record["split"], record["floor_split"]) == ("test", "valid")
    assert "20 examples of valid" in out


def test_samples_from_a_file(tiny_here: Path, said: Said) -> None:
    assert said("sample", RUN, "--n", "30", "--steps", "2", "--out", "s.npz")[0] == 0
    options = ("--samples", "s.npz", "--features", "none", "--out", "deep/q.json")
    code, out, err = said("quality", RUN, *options, "--n", "25")
    assert (code, err) == (0, "")
    with np.load("s.npz") as file:
        samples = torch.from_numpy(file["samples"])[:25]
    record = only(tiny_here / "deep")
    truth = measure(samples, load("digits"), "none")
    assert record["figures"] == truth.to_dict()["figures"]
    assert record["figures"]["frechet"] is None and "Fréchet" not in out
    assert "network evaluations" not in out


def test_default_number_is_what_was_held_out(tiny_here: Path, said: Said) -> None:
    assert said("quality", RUN, "--steps", "1", "--features", "none")[0] == 0
    record = only(tiny_here / RUN / "quality")
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
    tiny_here: Path,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fidelity, "installed", lambda: False)
    code, out, err = said("quality", RUN, *options)
    assert code == 2, err
    for word in words:
        assert word in err, err
    assert out == "" and not (tiny_here / RUN / "quality").exists()


def test_other_arrays_are_refused(tiny_here: Path, said: Said) -> None:
    np.savez(tiny_here / "other.npz", x=np.zeros(3))
    code, _, err = said("quality", RUN, "--samples", "other.npz")
    assert code == 2 and "holds x" in err and "'samples'" in err


def test_two_processes_share_the_samples(tiny_here: Path) -> None:
    """As torchrun starts them: the figures of one, written once."""
    out = ("--features", "none", "--n", "21", "--steps", "2", "--out")
    ended = [
        each.wait() for each in helpers.together("quality", RUN, *out, "two.json", cwd=tiny_here)
    ]
    assert [each.code for each in ended] == [0, 0], ended[0].err
    assert "wrote" in ended[0].out and ended[1].out == ""
    assert run("quality", RUN, *out, "one.json", cwd=tiny_here).code == 0
    two, one = (json.loads((tiny_here / f"{name}.json").read_text()) for name in ("two", "one"))
    assert two["figures"] == one["figures"]
