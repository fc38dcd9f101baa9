"""The figures in the docs are those of the result files, and each file says where it was made."""

from __future__ import annotations

import json

import pytest

from benchmarks import page

FILES = sorted(page.RESULTS.glob("*.json"))


def test_pages_are_what_the_results_say() -> None:
    assert (page.ROOT / "docs" / "benchmarks.md").read_text() == page.page()
    assert (page.ROOT / "docs" / "bits-per-dim.md").read_text() == page.explained()
    assert (page.ROOT / "README.md").read_text() == page.readme()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_say_where_they_were_made(path: page.Path) -> None:
    record = json.loads(path.read_text())["provenance"]
    assert {"date", "python", "torch", "system", "cpu", "commit"} <= set(record)
    assert len(record["commit"]) == 12 and int(record["commit"], 16) >= 0  # a commit, unchanged
