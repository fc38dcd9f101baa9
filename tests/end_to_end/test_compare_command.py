"""`ornstein compare` as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ornstein import Ancestral, Exponential, cld
from ornstein.cli.solving import VARIANTS
from ornstein.data import load
from ornstein.quality.comparing import compare
from ornstein.training.opening import open_model
from tests.training_helpers import Said

RUN = "runs/digits-channel-vpsde"
QUICK = ("--n", "24", "--solver", "ancestral", "exponential-2", "--evaluations", "3", "5")


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    return found


def test_figures_are_those_of_the_library(tiny_here: Path, cache: Path, said: Said) -> None:
    """Costs first, then a line for each point, a table and the files; repeated, nothing is made."""
    code, out, err = said("compare", RUN, *QUICK)
    assert code == 0, err
    # (3 + 5) evaluations of each of two solvers
    assert "4 points of 24 samples: 384 network evaluations, " in out.splitlines()[0]
    folder = tiny_here / RUN / "compare"
    read = result(folder)
    assert (folder / "comparison.png").read_bytes()[1:4] == b"PNG"
    assert f"wrote {Path(RUN)}/compare/comparison.json" in out
    solvers = {"ancestral": Ancestral(), "exponential-2": Exponential(order=2)}
    opened = open_model(RUN)
    data = load("digits")
    alone = compare(opened.model, data, solvers, (3, 5), n=24, cache=cache / "ornstein")
    assert len(alone.points) == len(read["points"]) == 4
    for point, record in zip(alone.points, read["points"], strict=True):
        assert point.figures is not None
        assert record["figures"] == json.loads(json.dumps(vars(point.figures)))
        assert record["label"] == point.label and record["seconds"] > 0
        shown = point.figures.shown("frechet")
        assert f"{point.process}, {point.solver}, {point.made}: Fréchet distance {shown}" in out
    assert read["step"] == 5 and read["figure"] == "frechet"
    assert read["data_set"]["fingerprint"] == data.fingerprint
    assert alone.against.floor is not None and alone.against.floor.shown("frechet") in out
    again = said("compare", RUN, *QUICK)
    assert again[0] == 0 and "all 4 points are there already" in again[1]
    table = out[out.index("Fréchet distance of 24 samples") :]
    assert again[1].endswith(table) and result(folder) == read


def test_processes_figures_and_other_folders(tiny_here: Path, said: Said) -> None:
    """Both rows of a process; a number of evaluations more is added to what is there."""
    quick = ("--n", "24", "--solver", "exponential-1", "heun", "--evaluations")
    more = ("--process", "vpsde", "cld", "--figure", "sliced_wasserstein", "--out", "found")
    code, out, err = said("compare", RUN, *quick, "2", "3", *more)
    assert code == 0, err
    read = result(tiny_here / "found")
    assert [(p["process"], p["solver"], p["made"]) for p in read["points"]] == [
        ("vpsde", "exponential-1", 2),
        ("vpsde", "exponential-1", 3),
        ("vpsde", "heun", 3),
        ("cld", "exponential-1", 2),
        ("cld", "exponential-1", 3),
        ("cld", "heun", 3),
    ]
    assert "left out: heun with 2 evaluations" in out and "sliced Wasserstein of 24" in out
    model = open_model(RUN).model
    alone = compare(
        model, load("digits"), {"heun": VARIANTS["heun"]}, (3,), processes={"cld": cld()}, n=24,
        features="none",
    )  # fmt: skip
    figure = read["points"][-1]["figures"]["sliced_wasserstein"]
    assert alone.points[0].value("sliced_wasserstein") == figure
    code, out, err = said("compare", RUN, *quick, "3", "4", *more)
    assert code == 0 and "4 points of 24 samples (4 more are there already)" in out
    assert result(tiny_here / "found")["points"][2] == read["points"][2]


def test_mistakes_are_one_line(tiny_here: Path, said: Said) -> None:
    """And cost nothing: no file is written."""
    for args, words in (
        (("--solver", "exponental-2"), "Perhaps you meant exponential-2"),
        (("--evaluations", "1"), "evaluations=1"),
        (("--process", "cldd"), "cldd"),
        (("--n", "0"), "n=0"),
    ):
        code, _, err = said("compare", RUN, *args)
        assert code == 2 and len(err.splitlines()) == 1 and words in err, err
    assert not (tiny_here / RUN / "compare").exists()
    said("compare", RUN, *QUICK)
    code, _, err = said("compare", RUN, *QUICK, "--n", "25")
    assert code == 2 and "n: 24 there, 25 now" in err and "another folder" in err


def test_help_names_all_solvers(said: Said) -> None:
    code, out, _ = said("compare", "--help")
    listed = re.sub(r"-1, -2, -3", "-1, exponential-2, exponential-3", out)
    assert code == 0 and all(name in listed for name in VARIANTS)


def test_a_figure_that_is_not_there_costs_nothing(tiny_here: Path, said: Said) -> None:
    code, _, err = said("compare", RUN, "--features", "none", "--figure", "frechet")
    assert code == 2 and "--figure frechet needs features" in err
    assert not (tiny_here / RUN / "compare").exists()
