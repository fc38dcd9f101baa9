"""The commit that a figure is said to be of, in a real repository."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from ornstein import provenance


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_figures_are_no_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a table writes while it is under way does not mark its next runs; code does."""
    monkeypatch.delenv("ORNSTEIN_COMMIT", raising=False)
    code = tmp_path / "src" / "ornstein" / "provenance.py"
    files = [tmp_path / name for name in ("results/a.json", "docs/a.md", "recipes/a.toml")]
    for path in (code, *files):
        path.parent.mkdir(parents=True)
        path.write_text("1\n")
    shutil.copyfile(provenance.__file__, code)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    spec = importlib.util.spec_from_file_location("copied", code)
    assert spec is not None and spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)

    def said() -> str:
        found: str = copied.provenance()["commit"]
        return found

    assert said() == head
    for path in files[:2]:
        path.write_text("2\n")
    assert said() == head
    files[2].write_text("2\n")
    assert said() == f"{head} with changes"
    monkeypatch.setenv("ORNSTEIN_COMMIT", "0123456789ab")
    assert said() == "0123456789ab"
