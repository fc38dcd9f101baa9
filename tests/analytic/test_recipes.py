"""Recipes are what they say: every file reads, names its figure in the paper, keeps its size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ornstein
from ornstein import Diffusion
from ornstein.data import Dataset, Split
from ornstein.files import write_text
from ornstein.reproduce import recipe
from ornstein.reproduce.recipe import Bits, Grid, plan, read
from ornstein.reproduce.running import Errand, Setting, errands
from ornstein.training import preset
from tests.test_errors import message, says

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "mnist-short": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "imagenet32": (3, 32, 32),
    "tinyimagenet32": (3, 32, 32),
}
WEIGHTS = {
    "mnist": 1_120_000,
    "mnist-short": 1_120_000,
    "cifar10": 35_800_000,
    "imagenet32": 35_800_000,
    "tinyimagenet32": 35_800_000,
}
#: Table 1 of the paper
PAPER = {
    "mnist": {
        "joint-vpsde": 1.26,
        "joint-learned-1": 1.28,
        "joint-learned-2": 1.33,
        "joint-cld": 1.35,
        "joint-malda": 1.65,
        "joint-alda": 124.60,
    },
    "starts": {"from-cld": 1.28, "from-alda": 1.33},  # learned, K = 2 and 3
    "told": {"malda": 1.65, "learned-1": 1.28, "learned-2": 1.33},
    "paper": {"vpsde": 1.26, "cld": 1.35, "malda": 1.65, "learned-1": 1.28},
    "cifar10": {
        "joint-vpsde": 3.20,
        "joint-learned-1": 3.07,
        "joint-cld": 3.11,
        "joint-malda": 3.13,
    },
}
PAPER["mnist-short"] = PAPER["mnist"]


def blank(name: str) -> Dataset:
    """Two images of a data set's shape."""
    x = torch.stack([torch.zeros(SHAPES[name]), torch.full(SHAPES[name], 15)]).byte()
    split = Split(x)
    return Dataset(name, split, split, split, 17 if name == "digits" else 256, "drawn")


BY_THE_PAPERS_BOUND = ("paper", "paper-digits", "paper-short")


def test_every_file_is_a_recipe_or_a_table() -> None:
    files = sorted((ROOT / "recipes").glob("*/*.toml"))
    assert {f"{path.parent.name}/{path.stem}" for path in files} == {
        *recipe.names(),
        *(f"{name}/table" for name in recipe.tables()),
    }
    assert recipe.tables() == sorted(
        [
            *SHAPES,
            "answers",
            "damping",
            *BY_THE_PAPERS_BOUND,
            "starts",
            "starts-short",
            "told",
            "tuning",
        ]
    )


@pytest.mark.parametrize("name", recipe.names())
def test_a_recipe_is_in_its_table_once(name: str) -> None:
    table, short = name.split("/")
    assert [planned.recipe for planned in plan(table).run].count(short) == 1


@pytest.mark.parametrize("name", [n for n in recipe.names() if n.split("/")[0] in SHAPES])
def test_a_recipe_says_what_it_is(name: str) -> None:
    found, (table, short) = read(name), name.split("/")
    experiment = found.experiment
    assert Path(experiment.data.data).name == table.removesuffix("-short")
    if short == "channel":
        assert experiment.model.parametrisation == "channel"
    else:
        assert experiment.model.parametrisation == "joint"
        assert short == f"joint-{experiment.process.process}"
    looks = [one.bound for one in found.evaluate]
    assert looks[:2] == ["discrete", "tweedie"]  # ours, and the paper's
    assert all(one.split == "test" and one.limit is None for one in found.evaluate)
    assert experiment.training.seed == 0  # the table has the seeds


def test_answers_differ_by_what_a_network_is_added_to() -> None:
    found = {one.name.split("/")[1]: one.experiment for one in plan("answers").recipes}
    models = {name: experiment.build(blank("digits")) for name, experiment in found.items()}
    begun = {name: (m.histogram is not None, len(m.features)) for name, m in models.items()}
    assert begun == {
        "gaussian": (False, 0),
        "waves": (False, 2),
        "histogram": (True, 0),
        "both": (True, 2),
    }
    same = replace(found["gaussian"].model, histogram=True, bins="auto")
    assert all(replace(e.model, histogram=True, bins="auto") == same for e in found.values())
    assert len({str(e.training) + str(e.process) + str(e.data) for e in found.values()}) == 1


def test_damping_is_what_the_recipes_say() -> None:
    """The part of Γ, or of γ and ξ, beside the presets, and nothing else."""
    models = {
        one.name.split("/")[1]: one.experiment.process.build() for one in plan("damping").recipes
    }
    for name, process in models.items():
        known = getattr(ornstein, name.partition("-")[0])()
        assert isinstance(process, Diffusion) and isinstance(known, Diffusion)
        assert torch.equal(process.S, known.S)
        assert torch.equal(process.auxiliary.factor(), known.auxiliary.factor())
        factor = {"cld-light": 0.5, "cld-heavy": 2.0, "alda-heavy": 2.0}.get(name, 1.0)
        if name == "alda-light":
            assert process.Q.tolist() == [[0, -1, 0], [1, 0, -1], [0, 1, 0]]
            assert process.D.tolist() == torch.diag(torch.tensor([0.0, 0, 1])).tolist()
        else:
            assert torch.allclose(process.Q, known.Q, rtol=1e-9, atol=0)
            assert torch.allclose(process.D, factor * known.D, rtol=1e-9, atol=0)


@pytest.mark.parametrize("table", BY_THE_PAPERS_BOUND)
def test_processes_of_the_authors_code(table: str) -> None:
    """CLD of mass 1, damped critically; MALDA with ones in Q and twos in D; S = I throughout."""
    found = {name: read(f"{table}/{name}").experiment.process.build() for name in ("cld", "malda")}
    known = ornstein.cld(mass=1.0, rate=ornstein.Linear(0.1, 10.0), v0_variance=0.01)
    cld, malda = found["cld"], found["malda"]
    assert isinstance(cld, Diffusion) and isinstance(malda, Diffusion)
    for name in ("Q", "D", "S"):
        assert torch.equal(getattr(cld, name), getattr(known, name))
    for s in (1e-3, 1.0):
        assert torch.equal(cld.transition(s).cholesky, known.transition(s).cholesky)
    assert malda.Q.tolist() == [[0, -1, -1], [1, 0, -1], [1, 1, 0]]
    assert malda.D.diag().tolist() == [0, 2, 2] and malda.D.count_nonzero() == 2
    assert torch.equal(malda.S, torch.eye(3, dtype=torch.float64))
    assert torch.equal(malda.auxiliary.factor()[1:], 0.1 * torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("other", ["cld", "malda"])
def test_as_little_noise_as_another_has(other: str) -> None:
    """VPSDE is cut off where the other's noise at s = 0.001 is: its SNR is the same."""
    found = {one.name: one.experiment for one in plan("paper-digits").recipes}
    level = found[f"paper-digits/vpsde-as-{other}"].model.noise_level
    first = found[f"paper-digits/{other}"]
    assert first.model.fixed_time == 1e-3 and level is not None
    snr = first.process.build().transition(1e-3).snr.item()
    assert snr**-0.5 == pytest.approx(level, rel=1e-4)


@pytest.mark.parametrize("name", sorted(PAPER))
def test_figures_of_the_paper(name: str) -> None:
    found = {one.recipe: one.paper for one in plan(name).run if one.paper is not None}
    assert found == PAPER[name]
    seeds = {one.recipe: one.seeds for one in plan(name).run}
    if name.startswith("mnist"):
        assert all(len(seeds[f"joint-learned-{n}"]) >= 2 for n in (1, 2))
    if name in ("starts", "told"):
        assert all(len(several) >= 2 for several in seeds.values())


@pytest.mark.parametrize("short", [one.recipe for one in plan("mnist").run])
def test_the_short_table_is_the_whole_one_but_for_its_budget(short: str) -> None:
    here, there = read(f"mnist-short/{short}"), read(f"mnist/{short}")
    assert replace(here.experiment, training=there.experiment.training) == there.experiment
    given, usual = here.experiment.training, there.experiment.training
    assert 100 * given.steps * given.batch < usual.steps * usual.batch  # images
    assert [replace(one, draws=8) for one in here.evaluate] == list(there.evaluate)


def test_the_short_table_of_starts() -> None:
    """It is the whole one but for the budget, which is that of MNIST's short one."""
    short, whole, usual = plan("starts-short"), plan("starts"), read("mnist-short/joint-cld")
    assert [(one.recipe, one.seeds) for one in short.run] == [
        (one.recipe, one.seeds) for one in whole.run
    ]
    for here, there in zip(short.recipes, whole.recipes, strict=True):
        assert here.experiment == replace(there.experiment, training=usual.experiment.training)
        assert here.evaluate == usual.evaluate[:1]


@pytest.mark.parametrize(("start", "usual"), [("cld", "learned-1"), ("alda", "learned-2")])
def test_starts_differ_by_where_a_process_starts(start: str, usual: str) -> None:
    """From MNIST's runs with as many variables, so that the two tables can be read together."""
    here, there = read(f"starts/from-{start}"), read(f"mnist/joint-{usual}")
    assert here.experiment.process.process == f"learned-{start}"
    assert here.evaluate == there.evaluate
    same = replace(here.experiment, process=there.experiment.process)
    assert same == there.experiment
    variables = [found.experiment.process.build().n_vars for found in (here, there)]
    assert variables[0] == variables[1]


@pytest.mark.parametrize("name", ["vpsde", "cld", "malda", "learned-1"])
def test_the_papers_own_bound(name: str) -> None:
    """All that its authors set, and the network and budget of MNIST's table."""
    here, there = read(f"paper/{name}").experiment, read(f"mnist/joint-{name}").experiment
    assert (here.data, here.training) == (there.data, there.training)
    model = here.model
    assert (model.parametrisation, model.likelihood, model.logit) == ("joint", "tweedie", 0.05)
    assert (model.fixed_time, model.histogram, model.bins) == (1e-3, False, "off")
    process = here.process.build()
    assert isinstance(process, Diffusion)
    s = torch.linspace(0, 1, 5, dtype=torch.float64)
    torch.testing.assert_close(process.rate_d.rate(s), 0.1 + 9.9 * s)
    root = process.auxiliary.root
    torch.testing.assert_close(root @ root.mT, 0.01 * torch.eye(len(root), dtype=torch.float64))
    (look,) = read(f"paper/{name}").evaluate
    assert (look.bound, look.fixed_time) == ("tweedie", 1e-3)


@pytest.mark.parametrize("name", ["malda", "learned-1", "learned-2"])
def test_told_differs_by_what_is_told(name: str) -> None:
    here, there = read(f"told/{name}"), read(f"mnist/joint-{name}")
    told = replace(there.experiment.model, known_noise="told")
    assert here.experiment == replace(there.experiment, model=told)
    assert here.evaluate == there.evaluate


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_networks_are_no_larger_than_the_papers(name: str) -> None:
    for one in plan(name).recipes:
        model = one.experiment.build(blank(name), torch.device("meta"))
        count = sum(p.numel() for p in model.network.parameters())
        assert 0.99 * WEIGHTS[name] < count <= WEIGHTS[name], (one.name, count)


def test_a_recipe_differs_from_its_preset_by_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'about = "mine"\n[data]\ndata = "mnist"\n[process]\nprocess = "cld"\nrate = [0.1, 10]\n'
        '[training]\nsteps = 7\n[training.optimiser]\nlr = 0.5\n[[evaluate]]\nbound = "tweedie"\n'
        "fixed_time = 1e-5\n[[sample]]\nn = 9\n"
    )
    found, usual = read(path), preset("mnist")
    assert found.name == "mine" and found.about == "mine"
    assert found.experiment.process.rate == (0.1, 10.0)
    assert found.experiment.training.steps == 7
    assert found.experiment.training.optimiser.lr == 0.5
    assert found.experiment.training.batch == usual.training.batch
    assert found.experiment.training.optimiser.decay == usual.training.optimiser.decay
    assert found.evaluate == (Bits("tweedie", fixed_time=1e-5),)
    assert found.evaluate[0].title == "tweedie-time0.00001"
    assert found.sample == (Grid(n=9),)


@pytest.mark.parametrize("name", ["mnist/joint-learned-1", "cifar10/joint-malda"])
def test_smoke_changes_the_size_alone(name: str) -> None:
    whole = read(name)
    small = whole.smoke()
    assert small.experiment.training.steps == 3
    for part in ("data", "process"):
        assert getattr(small.experiment, part) == getattr(whole.experiment, part)
    for option in ("parametrisation", "likelihood", "logit", "bins", "noise_level"):
        assert getattr(small.experiment.model, option) == getattr(whole.experiment.model, option)
    assert [one.bound for one in small.evaluate] == [one.bound for one in whole.evaluate]
    data = blank(name.split("/")[0])
    count = sum(p.numel() for p in small.experiment.build(data).network.parameters())
    assert count < 40_000


def test_runs_side_by_side() -> None:
    """As many as a table says, on a machine of the kind that it is made for."""
    gpu, cpu = plan("mnist"), plan("mnist-short")
    assert [gpu.jobs_on(device, 16) for device in ("cuda", "cpu")] == [9, 1]
    assert [cpu.jobs_on("cuda", 16), cpu.jobs_on("cpu", 16), cpu.jobs_on("cpu", 1)] == [1, 2, 1]
    assert (gpu.machine, cpu.machine) == ("one H200", "2 cores")


def test_commands_of_a_table(tmp_path: Path) -> None:
    found = {e.name: e for e in errands(plan("mnist"), Setting(tmp_path, data_folder="data"))}
    assert {"channel", "joint-learned-1", "joint-learned-1-seed1"} <= set(found)
    first, *rest = found["joint-learned-1-seed1"].typed()
    folder = tmp_path / "joint-learned-1-seed1"
    assert first == (
        f"ornstein train --recipe mnist/joint-learned-1 --seed 1 --out {folder} --data-folder data"
    )
    assert [line.split()[1] for line in rest] == ["evaluate", "evaluate"]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("about = 3", ["about=3", "expected a line"]),
        ('[data]\ndata = "mnist"', ["about=None", "expected a line"]),
        ('about = "a"\n[trainin]\nsteps = 3', ["unknown option 'trainin'", "'training'"]),
        ('about = "a"\n[training]\nsteps = "many"', ["training.steps='many'", "whole number"]),
        ('about = "a"\n[[evaluate]]\nbound = "best"', ["evaluate[0].bound='best'", "discrete"]),
        ('about = "a"\n[[evaluate]]\ndraws = 0', ["draws=0", "≥ 1"]),
        ('about = "a"\nevaluate = 3', ["evaluate=3", "[[evaluate]]"]),
        ('about = "a"\n[[sample]]\nsteps = 0', ["steps=0", "≥ 1"]),
        ('about = "a', ["can't be read", "expected a TOML file"]),
        ('about = "a"\n[[evaluate]]\nprocess = ["cdl"]', ["process='cdl'", "meant 'cld'"]),
        ('about = "a"\n' + 2 * "[[evaluate]]\n", ["two [[evaluate]] are both 'own'", "once"]),
        ('about = "a"\n[[sample]]\nsolver = "euclid"', ["solver='euclid'", "euler"]),
        (
            'about = "a"\n[[evaluate]]\nfixed_time = 1e-3\nnoise_level = 1e-3',
            ["noise_level and fixed_time"],
        ),
        (
            'about = "a"\n[model]\nparametrisation = "joint"\n[[sample]]\nprocess = "cld"',
            ["belongs to its process", "cld"],
        ),
    ],
)
def test_mistakes_in_a_recipe(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    says(message(lambda: read(path)), "mine.toml", *words)


def test_a_folder_of_the_same_name_hides_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.chdir(tmp_path)
    assert plan("mnist").title == "Bits per dimension of MNIST"
    (tmp_path / "table.toml").write_text('title = "Mine"\n[[run]]\nrecipe = "a"\n')
    (tmp_path / "a.toml").write_text('about = "a"\n[data]\ndata = "moons"\n')
    found = plan(".")
    assert found.name == tmp_path.name
    assert found.recipes[0].smoke().experiment.model.network == "natural"  # points have no U-Net


def test_what_a_run_rests_on(tmp_path: Path) -> None:
    """Done is what was done with this recipe and has left its files."""
    (tmp_path / "table.toml").write_text('title = "T"\n[[run]]\nrecipe = "a"\n')
    text = 'about = "a"\n[training]\nsteps = 5\n[[evaluate]]\nbound = "discrete"\n'
    (tmp_path / "a.toml").write_text(text)

    def errand(device: str | None = None) -> Errand:
        (found,) = errands(plan(tmp_path), Setting(tmp_path / "runs", device=device))
        return found

    one = errand()
    one.folder.mkdir(parents=True)
    (one.folder / "config.json").write_text("{}")
    one.finish(2)
    assert one.finished() == 1  # there is no figure
    place = one.looks()["discrete"]
    place.mkdir(parents=True)
    (place / "x.json").write_text("{}")
    assert one.finished() == 2 == errand("cpu").finished()
    (tmp_path / "a.toml").write_text(text.replace("discrete", "tweedie"))
    assert errand().finished() == 1
    (tmp_path / "a.toml").write_text(text + "draws = 9\n")
    assert errand().finished() == 1
    (tmp_path / "a.toml").write_text(text.replace("5", "6"))
    assert errand().finished() == 0
    (tmp_path / "a.toml").write_text(text.replace('"a"', '"b"') + "[training.watch]\nkeep = 3\n")
    assert errand().finished() == 2  # neither words nor what is watched
    (one.folder / "done.json").write_text("nonsense")
    assert errand().finished() == 0


def test_a_picture_comes_before_the_figures(tmp_path: Path) -> None:
    """It takes seconds, and is there even if the evaluation is cut off; what both rest on stays."""
    (tmp_path / "table.toml").write_text('title = "T"\n[[run]]\nrecipe = "a"\n')
    text = 'about = "a"\n[[evaluate]]\nbound = "discrete"\n[[evaluate]]\nbound = "tweedie"\n'
    (tmp_path / "a.toml").write_text(text + "[[sample]]\nsteps = 5\n")
    (one,) = errands(plan(tmp_path), Setting(tmp_path / "runs"))
    assert [command[0] for command in one.commands] == ["train", "sample", "evaluate", "evaluate"]
    one.folder.mkdir(parents=True)
    (one.folder / "config.json").write_text("{}")
    one.finish(3)
    assert one.finished() == 1 and one.looks_done() == []
    (picture,) = one.pictures().values()
    picture.parent.mkdir()
    picture.write_bytes(b"")
    assert one.finished() == 2 and one.looks_done() == []
    one.looks()["discrete"].mkdir()
    (one.looks()["discrete"] / "x.json").write_text("{}")
    assert one.finished() == 3 and one.looks_done() == ["discrete"]
    write_text(one.folder / "done.json", json.dumps([one.keys[i] for i in (0, 2, 1)]))
    assert one.finished() == 3 and one.looks_done() == ["discrete"]  # of a run from before
    last = (0, 2, 3, 1)  # as it was when pictures came last
    order: dict[str, Any] = {
        n: tuple(getattr(one, n)[i] for i in last) for n in ("commands", "keys")
    }
    assert replace(one, **order).rests_on() == one.rests_on()
    assert replace(one, keys=(*one.keys[:-1], "other")).rests_on() != one.rests_on()


def test_unknown_names() -> None:
    says(message(lambda: read("mnist/joint-cd")), "'mnist/joint-cd'", "'mnist/joint-cld'", "path")
    says(message(lambda: plan("mnst")), "'mnst'", "'mnist'", "table.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('title = "t"', ["no [[run]]"]),
        ('[[run]]\nrecipe = "a"', ["no title"]),
        ('title = "t"\n[[run]]\npaper = 1.0', ["no recipe"]),
        ('title = "t"\n[[run]]\nrecipe = "a"\nseeds = []', ["seeds=[]"]),
        ('title = "t"\n[[run]]\nrecipe = "a"\nseeds = [1, 1]', ["seeds=[1, 1]", "each once"]),
        ('title = "t"\njobs = 0\n[[run]]\nrecipe = "a"', ["jobs=0", "≥ 1"]),
        ('title = "t"\ncores = 0\n[[run]]\nrecipe = "a"', ["cores=0", "≥ 1"]),
        ('title = "t"\n' + 2 * '[[run]]\nrecipe = "a"\n', ["'a' is there twice"]),
        ('title = "t"\n[[run]]\nrecipe = "a"', ["no recipe", "a.toml"]),
    ],
)
def test_mistakes_in_a_table(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(text)
    says(message(lambda: plan(tmp_path)), *words)
