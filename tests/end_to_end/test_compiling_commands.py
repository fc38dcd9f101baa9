"""--compile and --precision of the commands that ask a network: what they say, write and keep."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ornstein.compiling import MESSAGE
from tests.training_helpers import Said

RUN = "runs/digits-channel-vpsde"
FEW = ("--steps", "3")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without its compiler."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


def samples(path: Path) -> np.ndarray:
    with np.load(path) as file:
        return file["samples"]


def test_samples(tiny_here: Path, said: Said, traced: None) -> None:
    """The same pixels, compiled or not; and the message only where something is compiled."""
    for how in ("auto", "on", "off"):
        code, out, err = said(
            "sample", RUN, "--n", "9", *FEW, "--out", f"{how}.npz", "--compile", how
        )
        assert code == 0, err
        assert (MESSAGE in out) == (how == "on")
        assert "9 samples under vpsde in" in out
    found = [samples(tiny_here / f"{how}.npz") for how in ("auto", "on", "off")]
    assert (found[0] == found[2]).all()
    # float32 sums in another order may take a number over a level's edge
    assert abs(found[0].astype(int) - found[1]).max() <= 1 and (found[0] == found[1]).mean() > 0.99


def test_samples_in_bfloat16(tiny_here: Path, said: Said) -> None:
    """A file of their own, and levels next to those of float32."""
    for more in ((), ("--precision", "bfloat16")):
        code, _, err = said("sample", RUN, "--n", "4", *FEW, *more)
        assert code == 0, err
    names = sorted(path.name for path in (tiny_here / RUN / "samples").glob("vpsde*.png"))
    assert names == ["vpsde-steps3-bfloat16.png", "vpsde-steps3.png"]


def test_bits(tiny_here: Path, said: Said, traced: None) -> None:
    options = ("evaluate", RUN, "--limit", "20", "--draws", "2")
    figures = {}
    for name, more in {
        "off": ("--compile", "off"),
        "on": ("--compile", "on", "--out", "on"),
        "bfloat16": ("--precision", "bfloat16"),
    }.items():
        code, out, err = said(*options, *more)
        assert code == 0, err
        assert (MESSAGE in out) == (name == "on")
        folder = Path("on") if name == "on" else Path(RUN) / "evaluations"
        file = [p for p in folder.glob("*.json") if ("bfloat16" in p.name) == (name == "bfloat16")]
        figures[name] = json.loads(file[0].read_text(encoding="utf-8"))["bits_per_dim"]
    assert abs(figures["on"] - figures["off"]) <= 1e-5
    assert 0 < abs(figures["bfloat16"] - figures["off"]) <= 0.05


def test_quality_and_compare(tiny_here: Path, said: Said, traced: None) -> None:
    """Passed on; a comparison of another precision is another comparison."""
    few = ("--n", "12", "--features", "none")
    code, out, err = said("quality", RUN, *few, *FEW, "--compile", "on", "--precision", "bfloat16")
    assert code == 0, err
    assert MESSAGE in out
    (file,) = (Path(RUN) / "quality").glob("*.json")
    assert "bfloat16" in file.name
    made = json.loads(file.read_text(encoding="utf-8"))["sampling"]
    assert made["precision"] == "bfloat16"
    points = ("compare", RUN, *few, "--solver", "ancestral", "--evaluations", "3")
    code, out, err = said(*points, "--compile", "on", "--precision", "bfloat16")
    assert code == 0, err
    assert MESSAGE in out
    code, out, err = said(*points)
    assert code == 2 and "another comparison" in err and "bfloat16" in err
    code, out, err = said(*points, "--precision", "bfloat16")  # how does not matter
    assert code == 0 and "all 1 points are there already" in out and MESSAGE not in out


@pytest.mark.parametrize("command", ["sample", "evaluate", "quality", "compare"])
def test_mistakes(tiny_here: Path, said: Said, command: str) -> None:
    for option in ("--compile", "--precision"):
        code, out, err = said(command, RUN, option, "yes")
        assert code == 2 and option in out + err
