"""What tests of commands share: a terminal, what a command says, and a tiny trained run."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest

from tests import training_helpers as helpers
from tests.training_helpers import QUIET, TINY, Said, run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 80 columns; and a command may print warnings its own way, but only for itself."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("ORNSTEIN_COMMIT", "0123456789ab")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture
def said(terminal: None, capsys: pytest.CaptureFixture[str]) -> Said:
    """Exit code and words of a command, in this process."""

    def say(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = helpers.ornstein(*args)
        out, err = capsys.readouterr()
        return code, out, err

    return say


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/digits-channel-vpsde, hardly trained."""
    folder = tmp_path_factory.mktemp("tiny")
    found = run("train", *TINY, *QUIET, "--steps", "5", cwd=folder)
    assert found.code == 0, found.err
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first command leaves its classifier for the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny_here(
    tiny_runs: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder of this test's own, with a copy of the tiny run in it."""
    shutil.copytree(tiny_runs / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return tmp_path
