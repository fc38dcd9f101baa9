"""A recipe: a whole experiment in one small file, from the data to the figures wanted of it.

    about = "MNIST, joint, CLD"            what it is, in a line
    [data] [process] [model] [training]    options of `ornstein train`, where they differ from the
                                           preset of the data
    [[evaluate]]                           options of `ornstein evaluate`: a bound, processes, draws
    [[sample]]                             options of `ornstein sample`: a grid of samples

A recipe of the package has a name, such as mnist/joint-cld; one of your own is a path. `smoke` is
the same in miniature: a tiny network, a few steps, a few examples, for a test that all of it runs.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ornstein import truncation
from ornstein.data.toys import TOYS
from ornstein.processes import PRESETS
from ornstein.sampling.solvers import SolverName
from ornstein.training import Experiment
from ornstein.training.choices import as_learned, hint_of
from ornstein.training.options import Checked
from ornstein.training.records import from_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve()
#: of an installed package, and of a checkout
FOLDERS = (HERE.parents[1] / "recipes", HERE.parents[3] / "recipes")
TABLE = "table"  # a file of this name lists what belongs to a table

T = TypeVar("T")


@dataclass(frozen=True)
class Bits(Checked):
    """Figures in bits per dimension."""

    bound: Literal["own", "discrete", "tweedie"] = "own"
    process: tuple[str, ...] = ()
    split: Literal["test", "valid", "train"] = "test"
    draws: int = 8
    limit: int | None = None
    fixed_time: float | None = None
    noise_level: float | None = None

    def check(self) -> None:
        for name in ("draws", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r}; expected a whole number ≥ 1.")
        truncation.chosen(self.noise_level, self.fixed_time)  # which says what is wrong
        for name in self.process:
            known = name in PRESETS or as_learned(name) is not None
            if not known and not Path(name).exists():
                raise ValueError(
                    f"process={name!r}; expected a preset, learned-N, learned-PRESET or the folder "
                    f"of a run.{hint_of(name)}"
                )

    @property
    def title(self) -> str:
        """A folder's name."""
        where = "" if self.fixed_time is None else f"time{plain(self.fixed_time)}"
        level = "" if self.noise_level is None else f"level{plain(self.noise_level)}"
        split = "" if self.split == "test" else self.split
        return "-".join(part for part in (self.bound, where, level, split) if part)

    def arguments(self) -> list[str]:
        """For `ornstein evaluate`."""
        found = ["--bound", self.bound, "--split", self.split, "--draws", str(self.draws)]
        for option in ("limit", "fixed_time", "noise_level"):
            value = getattr(self, option)
            if value is not None:
                found += [f"--{option.replace('_', '-')}", str(value)]
        return [*found, "--process", *self.process] if self.process else found


@dataclass(frozen=True)
class Grid(Checked):
    """A picture of samples."""

    n: int = 64
    process: str | None = None
    solver: SolverName = "ancestral"
    steps: int = 500
    seed: int = 0

    def check(self) -> None:
        for name in ("n", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected a whole number ≥ 1.")

    @property
    def title(self) -> str:
        """A file's name."""
        seed = f"seed{self.seed}" if self.seed else None
        return "-".join(filter(None, (self.process, self.solver, str(self.steps), seed)))

    def arguments(self) -> list[str]:
        """For `ornstein sample`."""
        found = ["--n", str(self.n), "--solver", self.solver, "--steps", str(self.steps)]
        found += ["--seed", str(self.seed)]
        return found if self.process is None else [*found, "--process", self.process]


@dataclass(frozen=True)
class Recipe:
    """An experiment, and what is to be found out."""

    name: str
    source: str  # what --recipe takes: the name, or the path of one that is not the package's
    about: str
    experiment: Experiment
    evaluate: tuple[Bits, ...] = ()
    sample: tuple[Grid, ...] = ()

    def check(self) -> None:
        """What would be found out only after training."""
        kinds: dict[str, tuple[Bits | Grid, ...]]
        kinds = {"evaluate": self.evaluate, "sample": self.sample}
        for kind, listed in kinds.items():
            titles = [one.title for one in listed]
            for title in titles:
                if titles.count(title) > 1:
                    raise ValueError(
                        f"two [[{kind}]] are both {title!r}; expected each of them once."
                    )
        joint = self.experiment.model.parametrisation == "joint"
        asked = [
            *(p for one in self.evaluate for p in one.process),
            *(g.process for g in self.sample),
        ]
        if joint and any(asked):
            raise ValueError(
                f"a joint model belongs to its process; expected no process in [[evaluate]] and "
                f"[[sample]], and there are {', '.join(filter(None, asked))}."
            )

    def smoke(self) -> Recipe:
        """The same in miniature."""
        before = self.experiment
        training = before.training
        optimiser = replace(training.optimiser, warmup=min(1, training.optimiser.warmup))
        watch = replace(
            training.watch, log_every=1, valid_every=2, valid_examples=4, sample_every=0
        )
        watch = replace(watch, valid_draws=1, quality_every=0)
        training = replace(training, steps=3, batch=4, accumulate=1, precision="float32")
        training = replace(training, optimiser=optimiser, watch=watch)
        model = replace(before.model, blocks=None, attention=None, dropout=None, depth=None)
        if before.data.data in TOYS or before.model.network == "mlp":
            model = replace(model, width=8)
        else:
            model = replace(model, network="unet-tiny", width=8, multipliers=(1, 1))
        return replace(
            self,
            experiment=replace(before, model=model, training=training),
            evaluate=tuple(replace(one, draws=2, limit=4) for one in self.evaluate),
            sample=tuple(replace(one, n=2, steps=2) for one in self.sample),
        )


def read(name: str | Path) -> Recipe:
    """A recipe by its name or path."""
    path = find(name)
    record = _toml(path)
    about = record.pop("about", None)
    if not isinstance(about, str):
        raise ValueError(f"{path}: about={about!r}; expected a line that says what it is.")
    try:
        recipe = Recipe(
            name=_name(path),
            source=_name(path) if _own(path) else str(path.resolve()),
            about=about,
            evaluate=_listed(Bits, record.pop("evaluate", []), "evaluate"),
            sample=_listed(Grid, record.pop("sample", []), "sample"),
            experiment=Experiment.from_record(record),
        )
        recipe.check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return recipe


@dataclass(frozen=True)
class Planned(Checked):
    """A recipe in a table, once for each seed."""

    recipe: str
    seeds: tuple[int, ...] = (0,)
    paper: float | None = None  # bits per dimension that the paper reports

    def check(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"seeds={list(self.seeds)}; expected one or more whole numbers, each once."
            )


@dataclass(frozen=True)
class Plan:
    """A table: runs that belong together."""

    name: str
    title: str
    about: str
    run: tuple[Planned, ...]
    jobs: int = 1  # runs that the machine does side by side
    minutes: float | None = None  # that all of it takes there, about
    cores: int | None = None  # of the CPU that it is made for; None for a GPU
    own: bool = False  # one of the package's
    recipes: tuple[Recipe, ...] = field(default=(), repr=False)  # of the runs

    @property
    def machine(self) -> str:
        """What `jobs` and `minutes` are of; of a user's table it may be anything."""
        gpu = "one H200" if self.own else "its machine"
        return gpu if self.cores is None else f"{self.cores} cores"

    def jobs_on(self, device: str, cores: int) -> int:
        """How many runs side by side: the table's, on a machine of its kind; elsewhere one."""
        if self.cores is None:
            return self.jobs if device == "cuda" else 1
        return min(self.jobs, cores) if device == "cpu" else 1


def plan(name: str | Path, others: Sequence[str] = ()) -> Plan:
    """A table by its name, or by the path of its folder; others: names that would do as well."""
    places = [Path(name).expanduser().resolve(), *(folder / name for folder in FOLDERS)]
    folder = next((place for place in places if (place / f"{TABLE}.toml").is_file()), None)
    if folder is None:
        known = sorted([*tables(), *others])
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Perhaps you meant {close[0]!r}." if close else ""
        raise ValueError(
            f"there is no table {str(name)!r}; expected one of {', '.join(known)}, or a folder "
            f"with recipes and a {TABLE}.toml.{hint}"
        )
    path = folder / f"{TABLE}.toml"
    record = _toml(path)
    try:
        runs = _listed(Planned, record.pop("run", []), "run")
        if not runs:
            raise ValueError("there is no [[run]]; expected one for each recipe of the table.")
        known = [one.recipe for one in runs]
        for recipe in known:
            if known.count(recipe) > 1:
                raise ValueError(f"{recipe!r} is there twice; expected one [[run]], with seeds.")
        bare = from_record(_Heading, record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    recipes = tuple(read(folder / f"{one.recipe}.toml") for one in runs)
    return Plan(folder.name, run=runs, recipes=recipes, own=_own(path), **vars(bare))


@dataclass(frozen=True)
class _Heading(Checked):
    title: str
    about: str = ""
    jobs: int = 1
    minutes: float | None = None
    cores: int | None = None

    def check(self) -> None:
        for name, given in (("jobs", self.jobs), ("cores", self.cores)):
            if given is not None and given < 1:
                raise ValueError(f"{name}={given}; expected a whole number ≥ 1.")


# ---------------------------------------------------------------- files


def names() -> list[str]:
    """All recipes of the package."""
    found = [path for folder in FOLDERS for path in folder.glob("*/*.toml")]
    return sorted({_name(path) for path in found if path.stem != TABLE})


def tables() -> list[str]:
    """All tables of the package."""
    return sorted({path.parent.name for f in FOLDERS for path in f.glob(f"*/{TABLE}.toml")})


def find(name: str | Path) -> Path:
    """The file of a recipe."""
    path = Path(name).expanduser()
    if path.suffix == ".toml" and path.is_file():
        return path
    for folder in FOLDERS:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    close = difflib.get_close_matches(str(name), names(), n=1)
    hint = f" Perhaps you meant {close[0]!r}." if close else ""
    raise ValueError(
        f"there is no recipe {str(name)!r}; expected the path of a .toml file, or one of "
        f"{', '.join(names())}.{hint}"
    )


def plain(number: float) -> str:
    """Without an exponent, and its minus sign."""
    return f"{number:.15f}".rstrip("0").rstrip(".")


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}" if _own(path) else path.stem


def _own(path: Path) -> bool:
    """Whether it is one of the package's."""
    return any(path.is_relative_to(folder) for folder in FOLDERS)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a mistake in the file is a ValueError too
        raise ValueError(f"{path} can't be read ({error}); expected a TOML file.") from error


def _listed(kind: type[T], records: Any, where: str) -> tuple[T, ...]:
    if not isinstance(records, list):
        raise ValueError(f"{where}={records!r}; expected [[{where}]], once for each.")
    return tuple(from_record(kind, one, None, f"{where}[{i}]") for i, one in enumerate(records))
