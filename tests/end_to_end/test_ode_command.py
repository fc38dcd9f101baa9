"""`ornstein evaluate --ode` as a user types it: the figures of the library, and what they cost."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import ornstein
from ornstein.data import load
from ornstein.ode import evaluate_ode
from ornstein.training.opening import open_model
from tests import training_helpers as helpers
from tests.training_helpers import QUIET, TINY, Said, run

TRAIN = ("train", *TINY, *QUIET, "--steps", "6", "--log-every", "2", "--warmup", "0")
RUN = "runs/digits-channel-vpsde"
COMMAND = ("evaluate", RUN, "--limit", "12", "--draws", "2", "--ode")


pytestmark = pytest.mark.usefixtures("terminal")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in it."""
    folder = tmp_path_factory.mktemp("ode")
    found = run(*TRAIN, cwd=folder)
    assert found.code == 0, found.err
    return folder / "runs"


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own, with a copy of the run."""
    shutil.copytree(trained, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results(folder: Path) -> dict[str, Any]:
    """JSON files of an evaluation, by process."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {record["process"]: record for record in found}


def test_the_flow_beside_the_bound(here: Path, said: Said) -> None:
    """Under two processes: the library's figures in the table and in JSON, and their difference."""
    code, out, err = said(*COMMAND, "--ode-limit", "6", "--process", "vpsde", "cld")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines if "±" in line)
    found, opened, x = results(here / RUN / "evaluations"), open_model(RUN), load("digits").test.x
    assert set(found) == {"vpsde", "cld"}
    for name, record in found.items():
        model = opened.model.with_process(ornstein.PRESETS[name]())
        truth = evaluate_ode(model, x, limit=6, quiet=True)
        bound = ornstein.evaluate(model, x, draws=2, limit=12, quiet=True)
        ode = record["ode"]
        assert ode["bits_per_dim"] == pytest.approx(truth.bits_per_dim, rel=1e-9)
        assert ode["standard_error"] == pytest.approx(truth.standard_error, rel=1e-6)
        assert (ode["examples"], ode["draws"], ode["probes"]) == (6, 1, 1)
        difference, error = truth.difference(bound)
        assert ode["difference"]["difference"] == pytest.approx(difference, rel=1e-6)
        assert ode["difference"]["standard_error"] == pytest.approx(error, rel=1e-6)
        assert record["bits_per_dim"] == pytest.approx(bound.bits_per_dim, rel=1e-9)
        (cost,) = [line for line in lines if line.startswith(f"{name}, probability flow: ")]
        assert f"{truth.evaluations} network evaluations" in cost
        assert re.search(r"6 examples: about [0-9]+ (s|min)$", cost)
        place = next(i for i, line in enumerate(lines) if line.startswith(f"{name} "))
        row = lines[place + 1]
        assert row.startswith("  by the flow")
        assert f"{truth.bits_per_dim:.4f} ± {truth.standard_error:.4f}" in row
        assert f"{difference:+.4f}" in row


def test_it_may_be_repeated(here: Path, said: Said) -> None:
    """The second time it costs nothing, and other options are another evaluation."""
    command = (*COMMAND, "--ode-limit", "4")
    first, again = said(*command), said(*command)
    assert first[0] == again[0] == 0
    assert "for each of 4 examples" in first[1] and "for each of 0 examples" in again[1]
    assert [line for line in first[1].splitlines() if "by the flow" in line] == [
        line for line in again[1].splitlines() if "by the flow" in line
    ]
    several = said(*command, "--ode-draws", "3")
    assert several[0] == 0 and "3 draws of 4 examples" in several[1]
    record = results(here / RUN / "evaluations")["vpsde"]["ode"]
    assert (record["draws"], record["probes"]) == (3, 2)


def test_two_processes_find_what_one_does(here: Path) -> None:
    for count, out in ((1, "one"), (2, "two")):
        command = (*COMMAND, "--ode-limit", "6", "--batch-size", "2", "--out", out)
        for process in helpers.together(*command, cwd=here, count=count):
            found = process.wait()
            assert (found.code, found.err) == (0, "")
    (one,), (two,) = (results(here / out).values() for out in ("one", "two"))
    for key in ("bits_per_dim", "standard_error", "prior", "flow", "reconstruction"):
        assert two["ode"][key] == pytest.approx(one["ode"][key], rel=1e-6)
    assert two["ode"]["examples"] == 6


@pytest.mark.parametrize("option", [("--ode-draws", "2"), ("--ode-limit", "3")])
def test_options_of_the_flow_need_it(option: tuple[str, str], here: Path, said: Said) -> None:
    code, _, err = said("evaluate", RUN, *option)
    assert code == 2
    assert "add --ode, or leave them out" in err
