"""`compare` where the answer is known.

On Gaussian data and with a network that returns zero, every table solver's samples are Gaussian
with a mean and a standard deviation in closed form (`sample_law`). The Fréchet distance of a point
is then known, up to what a finite number of samples adds, and so is the floor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ornstein
from ornstein import (
    Ancestral,
    Continuous,
    EulerMaruyama,
    Exponential,
    Heun,
    NoiseLevel,
    ProbabilityFlow,
    ScoreModel,
    Solver,
    Spectrum,
    sample,
    sample_law,
)
from ornstein.data import Dataset, Split
from ornstein.draws import Counted
from ornstein.quality import measure
from ornstein.quality.comparing import LEARN_MOST, LEARNED, Work, compare
from ornstein.quality.comparison import Comparison, Point
from ornstein.sampling import Route, Table, TableSolver, grid_times
from ornstein.viz.solvers import solvers as picture
from tests.analytic.test_bound_gaussian import Zero
from tests.test_errors import message, says

CENTRE, SPREAD, LEVEL = 0.3, 0.5, 1e-3
N = 1000
TWO = {"ancestral": Ancestral(), "ddim": Exponential(order=1)}


def gaussian_data(count: int = N, labels: bool = False) -> Dataset:
    """Vectors of two numbers from N(CENTRE, SPREAD²)."""

    def split(number: int, size: int) -> Split:
        x = Counted(7, torch.arange(size), number).normal("data", (2,), torch.float64)
        return Split((CENTRE + SPREAD * x).float(), (x[:, 0] > 0).long() if labels else None)

    return Dataset("gaussian", split(0, count), split(1, 16), split(2, N), None, "drawn")


@pytest.fixture(scope="module")
def data() -> Dataset:
    return gaussian_data()


@pytest.fixture(scope="module")
def few() -> Dataset:
    """For what is not about the figures."""
    return gaussian_data(80)


def exact(process: ornstein.Process | None = None, **options: Any) -> ScoreModel:
    """The model that is right for this data."""
    own = ornstein.vpsde() if process is None else process
    moments: Any = {"data_mean": CENTRE, "data_std": SPREAD, "truncation": NoiseLevel(LEVEL)}
    return ScoreModel(Zero(), own, Continuous(), **moments, **options)


def small(data: Dataset, solvers: Any = TWO, **options: Any) -> Comparison:
    """A quick one."""
    given: Any = {"evaluations": (3, 6), "n": 64, "features": "raw", **options}
    return compare(exact(), data, solvers, **given)


def timeless(found: Comparison) -> str:
    """All of it, less what no two runs share."""
    points = tuple(replace(p, seconds=None if p.seconds is None else 0.0) for p in found.points)
    return json.dumps(replace(found, points=points).to_dict())


def distance(process: ornstein.Process, solver: TableSolver, data: Dataset) -> float:
    """The Fréchet distance of a solver's law to the reference, in its standard deviations."""
    times = tuple(grid_times(exact(process), solver.steps, solver.grid).tolist())
    law = sample_law(process, replace(solver, grid=times), Spectrum.given([SPREAD], [CENTRE]))
    x = data.train.x.double()
    mean, std = x.mean(0), x.std(0, correction=0)
    apart = (law.mean - mean).square() + (law.std - std).square()
    return (apart / std.square()).sum().item()


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("name", ["vpsde", "cld"])
def test_points_are_what_the_closed_form_says(name: str, data: Dataset) -> None:
    """For few evaluations far from the data, for many at the floor."""
    process = ornstein.PRESETS[name]()
    named: dict[str, TableSolver] = {
        "ancestral": Ancestral(),
        "sde": Exponential(order=2, stochasticity=1.0),
        "heun": Heun(),
    }
    found = compare(
        exact(),
        data,
        named,
        (4, 150),
        processes={name: process},
        n=N,
    )
    floor = found.against.floor
    assert floor is not None and floor.frechet is not None
    assert [p.evaluations for p in found.points] == 3 * [4, 150]
    for point in found.points:
        solver = named[point.solver].within(point.evaluations)
        assert isinstance(solver, TableSolver)
        assert point.made == solver.evaluations and point.process == name
        truth = distance(process, solver, data)
        value, error = point.value("frechet"), point.error("frechet")
        assert value is not None and error is not None
        # mean and standard deviation of n samples are off by 1/n and 1/2n of the variance, in
        # each of two coordinates; and rotations of a sample covariance add as much again
        bias = 4 / N
        assert abs(value - truth) < 5 * error + bias, (point, truth)
        if point.evaluations == 150:  # as good as new data
            slack = 5 * (error + (floor.frechet_error or 0.0)) + bias
            assert abs(value - floor.frechet) < slack
    far, near, *_ = (p.value("frechet") for p in found.points)
    assert far is not None and near is not None and far > 10 * near


def test_a_point_is_what_measure_says(data: Dataset) -> None:
    """The same numbers as sample and measure alone, floor and all."""
    found = compare(exact(), data, TWO, (5,), n=200, seed=3)
    for point in found.points:
        x = sample(exact(), 200, TWO[point.solver].within(5), 3, shape=(2,))
        alone = measure(x, data)
        assert point.figures == alone.figures and found.against.floor == alone.floor
        about = asdict(found.against)
        assert {k: v for k, v in alone.to_dict().items() if k in about} == about
        assert point.label == repr(TWO[point.solver].within(5)) and point.made == 5
    assert found.figure == "frechet" and found.samples == 200


def test_without_features_only_sliced_wasserstein(data: Dataset) -> None:
    found = small(data, features="none")
    assert found.figure == "sliced_wasserstein"
    assert all(p.value("frechet") is None and p.value("sliced_wasserstein") for p in found.points)


def test_a_classifier_is_trained_once(tmp_path: Path) -> None:
    """And is the one that measure finds."""
    labelled = gaussian_data(600, labels=True)
    told: list[str] = []
    found = small(labelled, features="classifier", cache=tmp_path, tell=told.append)
    last = "training a classifier: step 250/250"
    assert told.count(last) == 1 and len(list(tmp_path.glob("classifier-*"))) == 1
    x = sample(exact(), 64, TWO["ddim"].within(6), 0, shape=(2,))
    assert found.points[-1].figures == measure(x, labelled, folder=tmp_path).figures


def test_the_best_point() -> None:
    """Less of a distance, more of a share; None is never the best."""
    figures = [(2.0, 0.9), (1.0, 0.5), (None, None)]
    points = []
    for i, (apart, share) in enumerate(figures):
        made = ornstein.quality.Figures(1.0, None, frechet=apart, recall=share)
        points.append(Point("p", f"s{i}", "", 10, 10, None if apart is None else made, 1.0))
    against = small(gaussian_data(64)).against
    found = Comparison(tuple(points), (), against, 64, 0, {})
    assert found.best(10).solver == "s1" and found.best(10, "recall").solver == "s0"
    says(message(lambda: found.best(20)), "20", "frechet", "10")


# ---------------------------------------------------------------- learned ways


def test_learned_ways_are_sampled_as_learned(data: Dataset) -> None:
    """Each is at the distance of its own law, and nearer than the process it began with."""
    found = compare(exact(), data, {"ancestral": Ancestral()}, (3,), n=N, learn=True)
    plain, *ways = found.points
    assert [p.process for p in ways] == list(LEARNED)
    before = plain.value("frechet")
    for point, n_aux in zip(ways, LEARNED.values(), strict=True):
        assert point.way is not None and point.made == 3 and "grid=(1.0, " in point.label
        assert len(point.way["process"]["Q"]["value"]) == 1 + n_aux
        assert point.way["error"] < point.way["preset_error"]
        value, error = point.value("frechet"), point.error("frechet")
        assert value is not None and error is not None and before is not None
        # two coordinates of deviation 1: the distance is 2·(relative Wasserstein distance)²
        assert abs(value - 2 * point.way["wasserstein"] ** 2) < 5 * error + 4 / N
        assert value < before


def test_what_can_not_be_learned_is_named(data: Dataset) -> None:
    flow = ProbabilityFlow(steps=1, method="euler")
    named = {"ddim": Exponential(order=1), "flow": flow}
    work = Work(exact(), data, named, (3, LEARN_MOST + 1), learn=True)
    learned = [job for job in work.jobs if job.n_aux is not None]
    assert {(job.solver, job.evaluations) for job in learned} == {("ddim", 3)}
    assert len(work.jobs) == 4 + 3
    joint = exact(parametrisation="joint")
    says(message(lambda: compare(joint, data, TWO, (3,), learn=True)), "joint", "learn=False")
    says(message(lambda: compare(joint, data, TWO, (3,), processes={"cld": ornstein.cld()})))
    names = {"learned-1": ornstein.cld()}
    says(message(lambda: compare(exact(), data, TWO, processes=names, learn=True)), "'learned-1'")


# ---------------------------------------------------------------- what fails


@dataclass(frozen=True)
class Exploding(Ancestral):
    """Every step far too long."""

    def table(self, route: Route) -> Table:
        found = super().table(route)
        steps = (replace(step, noise=step.noise * 1e200) for step in found.steps)
        return Table(tuple(steps))


@dataclass(frozen=True)
class Large(Ancestral):
    """The samples are finite, but not in float32."""

    def table(self, route: Route) -> Table:
        *steps, last = super().table(route).steps
        return Table((*steps, replace(last, noise=last.noise * 1e60)))


def test_what_diverges_is_noted(few: Dataset) -> None:
    """The others are what they are alone."""
    found = small(few, {"bad": Exploding(), "large": Large(), **TWO})
    assert timeless(replace(found, points=found.points[4:])) == timeless(small(few))
    for point in found.points[:2]:
        assert point.figures is None and point.value("frechet") is None
        assert "not finite in step" in point.note
    for point in found.points[2:4]:
        assert point.figures is None and "too large" in point.note
    assert found.best(3).solver in TWO


def test_too_few_evaluations_are_left_out(few: Dataset) -> None:
    found = small(few, {"heun": Heun(), "ddim": Exponential(order=1)}, evaluations=(2, 6))
    assert [(p.solver, p.evaluations, p.made) for p in found.points] == [
        ("heun", 6, 5),
        ("ddim", 2, 2),
        ("ddim", 6, 6),
    ]
    (left,) = found.left_out
    assert (left.solver, left.evaluations) == ("heun", 2) and "≥ 3" in left.why
    says(message(lambda: small(few, {"heun": Heun()}, evaluations=(2,))), "heun", "≥ 3")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"solvers": {}}, ("solvers={}",)),
        ({"solvers": Ancestral()}, ("solvers=Ancestral", "names")),
        ({"solvers": {"a": Ancestral}}, ("solvers=",)),
        ({"evaluations": ()}, ("no number of evaluations",)),
        ({"evaluations": (1, 5)}, ("evaluations=1", "≥ 2")),
        ({"evaluations": (2.5,)}, ("evaluations=2.5",)),
        ({"n": 1}, ("n=1",)),
        ({"n": 3}, ("3 samples", "neighbours")),
        ({"seed": 0.5}, ("seed=0.5",)),
        ({"split": "all"}, ("split='all'", "train")),
        ({"features": "deep"}, ("features='deep'", "classifier")),
        ({"processes": {"cld": ornstein.cld}}, ("processes=",)),
    ],
)
def test_mistakes(wrong: dict[str, Any], words: tuple[str, ...], few: Dataset) -> None:
    given: dict[str, Any] = {"solvers": TWO, "evaluations": (3,), "n": 64, **wrong}
    says(message(lambda: compare(exact(), few, **given)), *words)


def test_other_kinds_of_mistakes(few: Dataset) -> None:
    says(message(lambda: compare(Zero(), data, TWO)), "Zero", "ScoreModel")  # type: ignore[arg-type]
    says(message(lambda: compare(exact(), few.train.x, TWO)), "Tensor")  # type: ignore[arg-type]


# ---------------------------------------------------------------- a folder


class Enough(Exception):
    """Somebody stops."""


def stopping(after: int) -> Callable[[Point], None]:
    seen: list[Point] = []

    def told(point: Point) -> None:
        seen.append(point)
        if len(seen) == after:
            raise Enough

    return told


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_comparison_goes_on(after: int, few: Dataset, tmp_path: Path) -> None:
    """What comes out is what comes out of one go, with a folder or without."""
    with pytest.raises(Enough):
        small(few, folder=tmp_path / "a", callback=stopping(after))
    kept = {p: p.read_text() for p in (tmp_path / "a" / "points").iterdir()}
    assert len(kept) == after
    new: list[Point] = []
    again = small(few, folder=tmp_path / "a", callback=new.append)
    assert len(new) == 4 - after and list(again.points[after:]) == new
    assert all(path.read_text() == text for path, text in kept.items())
    assert timeless(again) == timeless(small(few, folder=tmp_path / "b")) == timeless(small(few))
    assert names(tmp_path / "a") == names(tmp_path / "b")
    # nothing is left to do, and nothing is computed: not even features of the data
    told: list[str] = []
    assert small(few, folder=tmp_path / "a", tell=told.append) == again and told == []


def test_a_comparison_can_grow(few: Dataset, tmp_path: Path) -> None:
    """More solvers, numbers and processes; what is there is not made again."""
    small(few, folder=tmp_path)
    new: list[Point] = []
    more: dict[str, Solver] = {**TWO, "euler": EulerMaruyama()}
    both = {"vpsde": ornstein.vpsde(), "cld": ornstein.cld()}
    options: Any = {"evaluations": (3, 6, 8), "processes": both, "folder": tmp_path}
    found = small(few, more, **options, callback=new.append)
    assert len(found.points) == 18 and len(new) == 14
    assert timeless(found) == timeless(small(few, more, **{**options, "folder": None}))
    # the same names for others are others
    other = {**TWO, "ancestral": Ancestral(grid="uniform")}
    small(few, other, folder=tmp_path, callback=new.append)
    assert [p.solver for p in new[14:]] == 2 * ["ancestral"]
    slower = {"vpsde": ornstein.vpsde(rate=ornstein.Linear(0.1, 10.0))}
    small(few, folder=tmp_path, processes=slower, callback=new.append)
    assert len(new) == 16 + 4


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("n", 65, "n: 64 there, 65 now"),
        ("seed", 1, "seed: 0 there, 1 now"),
        ("features", "none", "features: 'raw' there, 'none' now"),
        ("split", "test", "split: 'train' there, 'test' now"),
    ],
)
def test_other_settings_are_refused(
    option: str, value: Any, words: str, few: Dataset, tmp_path: Path
) -> None:
    small(few, folder=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    text = message(lambda: small(few, folder=tmp_path, **{option: value}))
    says(text, str(tmp_path), words, "another folder")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_another_model_or_other_data_are_refused(few: Dataset, tmp_path: Path) -> None:
    small(few, folder=tmp_path)
    wider = exact()
    wider.moments.std.mul_(2)
    options: Any = {"evaluations": (3,), "n": 64, "folder": tmp_path}
    says(message(lambda: compare(wider, few, TWO, **options)), "model: ")
    later = exact().with_truncation(NoiseLevel(0.1))
    says(message(lambda: compare(later, few, TWO, **options)), "truncation: ", "0.1")
    says(message(lambda: compare(exact(), gaussian_data(100), TWO, **options)), "data: 'gaussian")


def test_a_damaged_file_is_named(few: Dataset, tmp_path: Path) -> None:
    small(few, folder=tmp_path)
    (file, *_) = sorted((tmp_path / "points").iterdir())
    whole = json.loads(file.read_text())
    for text in ("", "[]", "{}", json.dumps({**whole, "figures": {"colour": 1}})):
        file.write_text(text)
        says(message(lambda: small(few, folder=tmp_path)), str(file), "Delete this file")
    file.unlink()
    new: list[Point] = []
    small(few, folder=tmp_path, callback=new.append)
    assert len(new) == 1 and replace(new[0], seconds=0) == replace(Point.read(whole), seconds=0)


def test_cost_counts_what_is_left(few: Dataset, tmp_path: Path) -> None:
    """5 + 9 evaluations of Heun for 6 and 10; once they are there, nothing."""
    work = Work(exact(), few, {"heun": Heun()}, (6, 10), n=64, folder=tmp_path)
    guess = work.cost()
    assert (guess.samples, guess.evaluations) == (64, 14)
    assert guess.seconds is not None and guess.seconds > 0
    assert not names(tmp_path)
    work.run()
    assert work.left == [] and work.cost().evaluations == 0


def test_the_file_says_where_it_was_made(few: Dataset, tmp_path: Path) -> None:
    found = small(few)
    found.save(tmp_path / "c.json", figure="frechet")
    read = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert read["provenance"]["torch"] == str(torch.__version__) and read["figure"] == "frechet"
    assert [Point.read(point) for point in read["points"]] == list(found.points)
    assert read["settings"]["data"] == f"gaussian {few.fingerprint}"
    assert read["against"] == asdict(found.against)


# ---------------------------------------------------------------- the picture


def drawn(found: Comparison, **options: Any) -> tuple[Any, list[Any]]:
    """The figure, and its panels."""
    figure = picture(found, **options)
    figure.canvas.draw()
    return figure, [axes for axes in figure.axes if axes.get_visible()]


def curves(axes: Any) -> list[Tensor]:
    """The points that lines go through."""
    lines = [line for line in axes.get_lines() if line.get_linestyle() == "-"]
    found = (torch.tensor(np.asarray(line.get_xydata())) for line in lines)
    return [points for points in found if len(points)]


def test_the_picture_shows_the_points(few: Dataset) -> None:
    """Each line at (evaluations made, figure), the floor, plain numbers on the axis."""
    found = small(few, {"heun": Heun(), **TWO}, evaluations=(3, 6, 20))
    figure, (axes,) = drawn(found)
    lines = curves(axes)
    for line, points in zip(lines, found.lines.values(), strict=True):
        truth = [[p.made, p.value("frechet")] for p in points]
        assert torch.equal(line, torch.tensor(truth, dtype=torch.float64))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["3", "6", "20"]
    floor = found.against.floor
    assert floor is not None
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["heun", "ancestral", "ddim", f"held-out data, {floor.frechet:.3g}"]
    low, high = axes.get_ylim()
    values = [p.value("frechet") or math.nan for p in found.points]
    assert low < min(values) and max(values) < high


def test_panels_share_their_axes(few: Dataset) -> None:
    """One for each process; what diverged is missing, and a far value is cut off."""
    both = {"vpsde": ornstein.vpsde(), "cld": ornstein.cld()}
    far = {"far": Large(), "bad": Exploding(), **TWO}
    found = small(few, far, processes=both)
    _, (first, second) = drawn(found)
    assert first.get_ylim() == second.get_ylim() and first.get_title(loc="left") == "vpsde"
    assert len(curves(first)) == len(curves(second)) == 2
    assert drawn(found, figure="recall")[1][0].get_yscale() == "linear"
    says(message(lambda: picture(small(few, {"bad": Exploding()}))), "frechet")
