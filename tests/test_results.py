"""The figures in the docs are those of the result files, and each file says where it was made.

What the pages say in words about solvers and ways back is held to the same files.
"""

from __future__ import annotations

import json
import math
from math import hypot
from typing import Any

import pytest
import torch

import ornstein
from benchmarks import page, results_page, speed_page, way_page
from benchmarks.way_results import FEW, Figure, Results, sliced, ways
from ornstein.bench import Ceilings, Check, Figures, Line, Part, Table
from ornstein.reproduce import recipe
from ornstein.reproduce.results import outdated
from ornstein.reproduce.running import Setting, errands

FILES = sorted([*page.RESULTS.glob("*.json"), *(page.ROOT / "results").glob("*.json")])
SAMPLING = ("solvers.md", "way-back.md")


def test_pages_are_what_the_results_say() -> None:
    assert (page.ROOT / "docs" / "benchmarks.md").read_text() == page.page()
    assert (page.ROOT / "docs" / "bits-per-dim.md").read_text() == page.explained()
    assert (page.ROOT / "README.md").read_text() == page.readme()


@pytest.mark.parametrize("name", SAMPLING)
def test_pages_about_sampling_are_what_the_results_say(name: str) -> None:
    assert (page.ROOT / "docs" / name).read_text() == page.about_sampling(name)


def test_the_page_about_speed_is_what_the_results_say() -> None:
    text = (page.ROOT / "docs" / "speed.md").read_text()
    assert text == page.about_speed()
    places = [found[2] for found in way_page.PLACE.finditer(text)]
    assert sorted(places) == sorted(speed_page.NAMES)


def test_figures_about_speed(tmp_path: page.Path) -> None:
    """Every number of a file, and where nothing was measured the page says so."""
    lines = (Line("ours", 0.02, 1.0, 128, 4e12, 1e9), Line("theirs", 0.05, 2.5, 128, 4e12))
    part = Part(
        (Table("training step", "× ours", lines, notes=("a note",)),),
        (Check("fast", 1.2, 1.05), Check("often", 250.0, 200, most=False)),
        {"date": "2026-01-01", "commit": "0123456789ab"},
    )
    origin = {"gpu": "a GPU", "torch": "2", "python": "3"}
    top = Ceilings(8e14, 4e12, "a product", "a copy")
    found = Figures("cuda", "diffusers 1", False, top, {"step": part}, origin)
    text = "".join(f"<!-- figures: {n} -->\n<!-- end of figures -->\n" for n in speed_page.NAMES)
    shown = speed_page.filled(text, found, None, tmp_path / "none.png")
    assert "| ours | 20 | 6,400 | 200 | 1 |\n| theirs | 50 | 2,560 | 80 | 2.5 |" in shown
    assert "| fast | 1.2 | ≤ 1.05 | **no** |\n| often | 250 | ≥ 200 | yes |" in shown
    assert "(a note)" in shown and "(a GPU, PyTorch 2, Python 3; 2026-01-01, commit" in shown
    assert (
        shown.count(speed_page.MISSING) == 8
    )  # five parts, the picture, the CPU, the state before
    assert speed_page.filled(shown, found, None, tmp_path / "none.png") == shown


def test_the_page_of_results_is_what_the_results_say() -> None:
    places = []
    for name in results_page.PAGES:
        text = (page.ROOT / "docs" / name).read_text()
        assert text == page.about_results(name)
        places += [found[2] for found in way_page.PLACE.finditer(text)]
    assert sorted(places) == sorted(results_page.NAMES)


def test_runs_of_one_recipe() -> None:
    """Their means and one deviation; another recipe of the same name, or a single run, is left."""

    def run(recipe: str, bits: float, seed: int, steps: int = 10) -> dict[str, object]:
        return {
            "recipe": recipe,
            "parametrisation": "joint",
            "process": recipe,
            "experiment": {"training": {"seed": seed, "steps": steps}},
            "figures": [{"look": "discrete", "bits_per_dim": bits, "prior": 0.0}],
            "provenance": {"cpu": "a CPU", "torch": "2", "date": "today", "commit": "0"},
        }

    one = run("cld", 1.0, 0)
    one["figures"] = [*one["figures"], {"look": "discrete", "bits_per_dim": 7.0, "prior": 0.0}]  # type: ignore[misc]
    first = {"runs": [one, run("cld", 1.2, 1), run("alda", 2.0, 0)]}
    again = {"runs": [run("cld", 1.4, 0), run("cld", 9.0, 0, steps=20), run("vpsde", 3.0, 0)]}
    found = {"t": first, "t-repeat": again, "other": again}
    lines = list(results_page.repeats(found, "t", "discrete"))
    assert lines[2:4] == ["| joint, cld | 3 | 1.0000, 1.2000, 1.4000 | 1.2000 |", ""]
    assert "of all of these together: 0.2000." in lines[4]
    assert list(results_page.repeats({"t": again}, "t", "discrete")) == []


def test_settings_beside_the_first() -> None:
    """Means over seeds; the error of a difference is one run's deviation, by how many there are."""

    def run(about: str, bits: float, seed: int, prior: float = 0.0) -> dict[str, Any]:
        return {
            "recipe": about,
            "about": about,
            "variables": 2,
            "experiment": {"training": {"seed": seed}},
            "figures": [
                {
                    "look": "discrete-valid",
                    "bits_per_dim": bits,
                    "prior": prior,
                    "examples": 5,
                    "draw_error": bits / 100,
                }
            ],
            "provenance": {"cpu": "a CPU", "torch": "2", "date": "today", "commit": "0"},
        }

    runs = [("a", 1.0), ("a", 1.2), ("b", 2.1), ("b", 1.9), ("b", 2.0), ("c", 3.0)]
    record: dict[str, Any] = {"title": "T", "about": "It.", "command": "c --only a"}
    under_way = {**run("b", 0.0, 7), "figures": []}
    record["runs"] = [*(run(a, b, i) for i, (a, b) in enumerate(runs)), under_way]
    lines = list(results_page.settings(record))
    # deviations ∓0.1 of a, +0.1, −0.1 and 0 of b, one run of c: √(0.04/3) = 0.11547
    assert lines[0] == "T. It. `c`"
    assert lines[4:7] == [
        "| a | 2 | 2 | 1.0000, 1.2000 | 1.1000 |  |",
        "| b | 2 | 3 | 2.1000, 1.9000, 2.0000 | 2.0000 | +0.90 ± 0.11 |",  # √(1/2 + 1/3)
        "| c | 2 | 1 | 3.0000 | 3.0000 | +1.90 ± 0.14 |",  # √(1/2 + 1)
    ]
    assert "same 5 examples" in lines[8] and "all of these together, is 0.1155;" in lines[8]
    assert "up to 0.0300 in a figure" in lines[8]

    # while it is made: nothing, then single runs, of which no deviation is known
    assert list(results_page.settings({**record, "runs": [under_way]})) == []
    lines = list(results_page.settings({**record, "runs": [record["runs"][i] for i in (0, 2)]}))
    assert lines[5].endswith("| 2.1000 | 2.1000 | +1.1000 |")
    assert "can't be said of single runs. Not in the figures is the error" in lines[7]

    # enough runs of each: √(0.1²/4 + 0.2²/4), and prior parts that differ
    runs = [("a", x) for x in (1.0, 1.1, 1.2, 1.1)] + [("b", x) for x in (2.0, 2.2, 2.4, 2.2)]
    record["runs"] = [run(a, b, i, 0.1 if a == "b" else 0.0) for i, (a, b) in enumerate(runs)]
    lines = list(results_page.settings(record))
    assert lines[2].endswith("| mean | of it, prior part | minus the first |")
    assert lines[4].endswith("| 1.1000 | 0.0000 |  |")
    deviations = [math.sqrt(0.02 / 3), 2 * math.sqrt(0.02 / 3)]
    error = math.hypot(*deviations) / 2
    assert lines[5].endswith(f"| 2.2000 | 0.1000 | +1.100 ± {error:.3f} |")
    assert f"is {deviations[0]:.4f} to {deviations[1]:.4f}; errors" in lines[7]


def test_headlines_are_of_one_network() -> None:
    """Its figures under all processes, from the least to the most, with the largest error."""
    figures = [("discrete", 3.0, 0.01), ("discrete", 2.5, 0.02), ("tweedie", 4.0, 0.03)]
    channel = {
        "name": "channel",
        "complete": True,
        "parameters": 2_000_000,
        "seconds": 90.0,
        "figures": [
            {"look": look, "process": name, "bits_per_dim": bits, "standard_error": error}
            for look, bits, error in figures
            for name in results_page.UNDER
        ],
        "provenance": {"cpu": "a CPU", "gpu": "a GPU"},
    }
    other = {**channel, "name": "joint-cld"}
    lines = list(
        results_page.headlines({"cifar10": {"runs": [other, channel]}, "mnist": {"runs": []}})
    )
    assert lines[2:] == [
        "| CIFAR-10, 2.0 M weights | 2.5000 to 3.0000 ± 0.0200 | 4.0000 to 4.0000 ± 0.0300 | 3.07 "
        "| 1.5 min, a GPU |"
    ]


def test_half_of_a_curve() -> None:
    """By bits in bins, whose widths differ: linear inside one."""
    for bits, edges, where in (
        ([1.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0], 2.0),
        ([1.0, 1.0], [0.0, 1.0, 3.0], 1.0),
        ([0.0, 4.0, 1.0], [-9.0, 0.0, 2.0, 3.0], 1.25),
        ([3.0], [1.0, 5.0], 3.0),
    ):
        assert results_page.half({"bits": bits, "logsnr": edges}) == pytest.approx(where, abs=1e-12)
    figures = {"look": "discrete", "diffusion": 3.0, "standard_error": 0.1}
    curve = {"bits": [1.0, 2.0], "logsnr": [0.0, 2.0, 6.0]}
    run = {"name": "channel", "figures": [{**figures, "curve": curve}], "data": {"levels": 256}}
    *_, row = results_page.halves({"mnist": {"runs": [{**run, "name": "other"}, run]}})
    bins = [math.exp(-at / 2) * 128 for at in (3.0, 0.0)]
    assert row == (
        f"| MNIST | 3.00 ± 0.10 | 3.0, {bins[0]:.1f} bins | 0.50 | 0.0, {bins[1]:.1f} bins |"
    )


@pytest.mark.parametrize(
    "name",
    [
        "mnist",
        "mnist-short",
        "starts-short",
        "cifar10",
        "digits",
        "answers",
        "tuning",
        "damping",
        "paper-digits",
        "paper-short",
    ],
)
def test_tables_are_of_the_recipes_as_they_are(name: str) -> None:
    """So that nothing leaves a table when the rest of it is made; a new option must not do that."""
    todo = errands(recipe.plan(name), Setting(page.ROOT / "runs"))
    assert outdated(todo, page.ROOT / "results" / f"{name}.json") == []


def test_a_table_that_is_not_finished() -> None:
    """What is there is shown, and a headline waits."""
    figure = {"look": "discrete", "process": "cld", "bits_per_dim": 3.0, "standard_error": 0.01}
    run = {
        "name": "channel",
        "complete": False,
        "parametrisation": "joint",
        "process": "cld",
        "variables": 2,
        "parameters": 2_000_000,
        "paper": 3.11,
        "figures": [figure],
    }
    record = {"runs": [run]}
    last = list(results_page.efficiency(record))[-1]
    assert last == "| joint, cld | 2 | 2.0 M | 3.000 ± 0.010 |  | 3.11 |"
    assert list(results_page.headlines({"cifar10": record})) == []
    with pytest.raises(ValueError, match="not under vpsde"):
        list(results_page.headlines({"cifar10": {"runs": [{**run, "complete": True}]}}))


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("o r t --only a b --device cpu", "o r t --device cpu"),
        ("o r t --jobs 2 --only a", "o r t --jobs 2"),
        ("o r t --through train --only a b --jobs 2", "o r t --jobs 2"),
        ("o r t", "o r t"),
    ],
)
def test_the_command_of_the_whole(typed: str, shown: str) -> None:
    record = {"title": "T", "about": "It.", "command": typed}
    assert results_page.heading(record) == f"T. It. `{shown}`"


def test_every_figure_has_its_place() -> None:
    pages = [page.ROOT / "docs" / name for name in SAMPLING] + [page.ROOT / "README.md"]
    places = [found[2] for path in pages for found in way_page.PLACE.finditer(path.read_text())]
    assert sorted(places) == sorted([*way_page.FIGURES, *results_page.README])


def test_a_wrong_figure_is_seen(results: Results) -> None:
    text = (page.ROOT / "docs" / "solvers.md").read_text()
    figure = str(results.ruled("digits", "vpsde", "sde-2", 10))
    assert figure in text
    assert way_page.filled(text.replace(figure, "0.01 ± 0.01"), results) == text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_say_where_they_were_made(path: page.Path) -> None:
    record = json.loads(path.read_text())["provenance"]
    assert {"date", "python", "torch", "system", "cpu", "commit"} <= set(record)
    assert len(record["commit"]) == 12 and int(record["commit"], 16) >= 0  # a commit, unchanged


# ---------------------------------------------------------------- what the pages say in words


@pytest.fixture(scope="module")
def results() -> Results:
    return page.results()


def known(found: Figure | None) -> Figure:
    assert found is not None
    return found


def as_good(one: Figure, other: Figure, errors: float = 1) -> bool:
    """Within the standard error of the difference, or so many of them."""
    return one.value - other.value < errors * hypot(one.error, other.error)


def test_the_recommended_solvers(results: Results) -> None:
    for count in (10, 20):
        for process in ("vpsde", "cld", "learned-1"):
            assert results.best("digits", process, count).solver == "sde-2"
    for process in ("vpsde", "cld"):
        best_of_few = results.best("mnist", process, 10).solver
        assert best_of_few in ("exponential-2", "exponential-3")
        for count in (20, 50, 100):
            assert results.best("mnist", process, count).solver == "sde-2"
    for process in ("vpsde", "learned-1"):
        assert results.best("digits", process, 5).solver == "exponential-2"
    for count in (50, 100):
        best = results.best("digits", "vpsde", count)
        every = [
            known(results.ruled("digits", "vpsde", s, count)) for s in results.solvers("digits")
        ]
        assert sum(as_good(one, best) for one in every) >= 9  # of 11: "most solvers agree"


def test_which_process(results: Results) -> None:
    for count in FEW:
        cld = results.best("digits", "cld", count).value
        assert results.best("digits", "vpsde", count).value < cld
        assert results.best("digits", "learned-1", count).value < cld


def test_few_evaluations_against_many(results: Results) -> None:
    for process in ("vpsde", "cld", "learned-1"):
        many = known(results.ruled("digits", process, "euler", 500))
        assert as_good(results.shortest(process), many)
    for process in ("vpsde", "cld"):
        many = known(results.ruled("mnist", process, "euler", 500))
        assert not as_good(results.shortest(process, "mnist"), many)


def test_times_for_cld(results: Results) -> None:
    for solver in way_page.TIMED:
        for count in FEW:
            cld = known(results.learned(solver, count, "times:cld"))
            own = results.sampled(solver, count, "0")
            if count == 5:
                assert cld.value > own.value
            else:
                behind = count == 10 and solver in ("exponential-1", "heun")
                assert as_good(cld, own, errors=2) != behind


def test_the_grid_of_mnist(results: Results) -> None:
    labels = [p["label"] for p in results.mnist["points"] if p["solver"] != "euler"]
    assert not any("grid='information'" in label for label in labels), labels


def test_large_errors_take_a_short_way(results: Results) -> None:
    def ends(solver: str) -> list[float]:
        row = results.row(solver, 10, "0")
        assert row is not None
        process = ornstein.Diffusion(Q=[[0.0]], D=row["D"])
        times = torch.tensor([row["times"][0], row["times"][-1]], dtype=torch.float64)
        return process.transition(times).logsnr.tolist()

    begins, stops = ends("exponential-2")
    for solver in ("ancestral", "splitting", "corrector", "euler"):
        begin, stop = ends(solver)
        assert begins < begin and stop < stops


def test_the_two_figures_differ_about_short_ways(results: Results) -> None:
    frechet = min(ways(results), key=lambda solver: results.sampled(solver, 5, "0").value)
    order = [solver for _, solver in sliced(results, 5)]
    assert frechet == "euler" and order.index("euler") >= len(order) // 2
    assert order[0] == "exponential-2"


def test_a_short_way_of_cld_can_be_worse(results: Results) -> None:
    for solver in way_page.TIMED:
        ruled = known(results.ruled("digits", "cld", solver, 5))
        learned = known(results.learned(solver, 5, "times:cld"))
        assert (learned.value > ruled.value) == (solver in ("exponential-1", "heun")), solver
