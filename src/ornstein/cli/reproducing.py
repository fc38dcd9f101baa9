"""`ornstein reproduce`: a table of the paper, end to end, from its recipes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.markup import escape

from ornstein import viz
from ornstein.cli.reading import NoHint
from ornstein.cli.words import of_time
from ornstein.data import Dataset
from ornstein.files import write_text
from ornstein.reproduce import auxiliary, recipe, runtime
from ornstein.reproduce.results import collected, outdated, table, unreadable, where
from ornstein.reproduce.running import DONE, Errand, Pool, Setting, Stopped, Verb, cores, errands
from ornstein.reproduce.timing import duration
from ornstein.training import Interrupted
from ornstein.training.choices import Data
from ornstein.training.distribution import device_of
from ornstein.training.run import read_metrics

HELP = """Rebuild a table of the paper: train all of its models, evaluate them, and write the table.

tables:
  mnist           bits/dim of MNIST, one channel model and six joint ones
  mnist-short     the same in a short training, for a CPU
  paper           joint models of MNIST by the paper's own bound
  paper-short     the same in a short training, for a CPU
  paper-digits    the same on the digits, for a CPU, with five seeds
  starts          learned processes of MNIST that start from CLD and from ALDA
  starts-short    the same in a short training, for a CPU
  told            joint models of MNIST that are told what noise is known
  cifar10         bits/dim of CIFAR-10, and samples
  imagenet32      bits/dim of ImageNet at 32 × 32, of the published files
  tinyimagenet32  the same, for a folder with few images (--data)
  digits          bits/dim of the embedded digits, for a CPU: minutes, no downloads
  answers         what a network is added to, on the digits
  tuning          how a learned process is set up, on the digits
  damping         how CLD and ALDA are damped, on the digits
  runtime         what it costs to find the kernel automatically
  auxiliary       whether the auxiliary variables know anything of the data

or a folder of your own, with recipes and a table.toml. Every run is a chain of commands that could
be typed (--dry-run shows them). What is interrupted goes on when the command is repeated.

examples:
  ornstein reproduce digits
  ornstein reproduce mnist --data-folder data --dry-run
  ornstein reproduce mnist --data-folder data --jobs 4
  ornstein reproduce cifar10 --data-folder data --only channel
  ornstein reproduce mnist --data-folder data --smoke"""

Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class Reproduce:
    """Rebuild a table of the paper."""

    table: Annotated[str, tyro.conf.Positional]
    """Which."""
    data_folder: Annotated[str | None, NoHint] = None
    """Where the files of the data set are (default: $ORNSTEIN_DATA, or data)."""
    data: Annotated[str | None, NoHint] = None
    """Other data of the same shape than the recipes name."""
    download: Flag = False
    """Fetch the data set if it is not there."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")] = ()
    """Only these runs of the table, begun in this order."""
    runs: Annotated[Path | None, NoHint] = None
    """Folder for the runs (default: runs/reproduce/TABLE)."""
    out: Path = Path("results")
    """Folder for the results."""
    jobs: Annotated[int | None, NoHint] = None
    """Runs side by side (default: what the table says, on such a machine; else 1)."""
    minutes: Annotated[float | None, NoHint] = None
    """Stop after so long; the same command goes on."""
    through: Verb = "evaluate"
    """Stop after this: the rest may be done later, or where the runs were copied to."""
    smoke: Flag = False
    """All of it in miniature, to see that it runs: minutes on a CPU, figures that mean nothing."""
    dry_run: Flag = False
    """Print what would be done, and stop."""
    device: Annotated[str | None, NoHint] = None
    """cpu, cuda or cuda:N (default: CUDA where there is one)."""

    def run(self) -> None:
        console = Console(highlight=False, soft_wrap=True)
        if self.table in MEASURES:
            self._measure(console)
            return
        whole = recipe.plan(self.table, tuple(MEASURES))
        plan = self._chosen(whole)
        device = device_of(self.device)
        setting = self._setting(plan)
        todo, all_ = errands(plan, setting), errands(whole, setting)
        jobs = self.jobs or plan.jobs_on(device.type, cores())
        console.print(f"[bold]{escape(plan.title)}[/bold]: {len(todo)} runs, {jobs} side by side")
        if plan.minutes is not None and not (self.smoke or self.only):
            about = f"on {plan.machine}, {plan.jobs} side by side, about {plan.minutes:g} min"
            console.print(about, style="dim")
        self._foretell(plan, todo, device, console)
        if self.dry_run:
            for errand in todo:
                console.print(f"\n{errand.name}: {errand.recipe.about}", style="bold")
                for line in errand.typed()[: errand.count_through(self.through)]:
                    console.print(escape(line), style="dim")
            console.print("\nnothing was done (--dry-run)", style="dim")
            return
        self._keep_outdated(whole, all_, console)
        until = float("inf") if self.minutes is None else time.monotonic() + 60 * self.minutes

        def tell(errand: Errand, word: str) -> None:
            with contextlib.suppress(OSError, SystemExit):  # a terminal or a pipe that is closed
                console.print(_said(errand, word))
            if word in ("evaluate", "sample", "done"):  # one more command has ended
                self._save(whole, all_)  # whatever happens to the others

        pool = Pool(jobs, until, tell, self.through)
        stopped: Stopped | None = None
        try:
            pool.do(todo, setting.runs)
        except Stopped as error:
            stopped = error
        self._write(whole, all_, console)  # of all runs, whichever were asked for now
        if stopped is not None and stopped.signal:
            done = sum(errand.finished() for errand in todo)
            raise Interrupted(done, stopped.signal, what="command")
        if stopped is not None:
            console.print(f"{stopped}; repeat the command to go on", style="bold")
        elif self.through != "evaluate" and any(e.finished() < len(e.commands) for e in todo):
            console.print("the rest waits for this command without --through", style="bold")
        if pool.failed:
            lines = "\n  ".join(f"{name}: {said}" for name, said in pool.failed.items())
            raise ValueError(f"{len(pool.failed)} of {len(todo)} runs failed:\n  {lines}")

    def _measure(self, console: Console) -> None:
        """A table that needs no training."""
        given = self.only or self.data is not None or self.data_folder is not None
        if given or self.through != "evaluate":
            raise ValueError(
                f"{self.table} has no runs and no data; expected no --only, --data, --data-folder "
                "or --through with it."
            )
        if self.dry_run:
            console.print(f"{self.table}: a minute or two (--dry-run)", style="dim")
            return
        measure, rows = MEASURES[self.table]
        record = {**measure(self), "command": self._typed(), "smoke": self.smoke}
        name = self.table + ("-smoke" if self.smoke else "")
        write_text(self.out / f"{name}.json", json.dumps(record, indent=1, allow_nan=False))
        write_text(self.out / f"{name}.md", "\n".join(rows(record)) + "\n")
        if self.table == "auxiliary":
            viz.save(viz.auxiliary_used(record), self.out / f"{name}.png")
        console.print("\n".join(rows(record)), markup=False)
        console.print(f"wrote {self.out / name}.json and .md", style="dim")

    def _auxiliary(self) -> dict[str, Any]:
        """Presets, the paper's examples, and learned processes that are there."""
        processes = auxiliary.known()
        for file in (self.out / f"{name}.json" for name in recipe.tables()):
            processes |= auxiliary.of_results(file)
        found = sorted((self.runs or Path("runs/reproduce")).glob(f"**/{DONE}"))
        processes |= auxiliary.of_runs(done.parent for done in found)
        return auxiliary.auxiliary(processes, VARIANCE)

    def _chosen(self, plan: recipe.Plan) -> recipe.Plan:
        """Only the runs that were asked for, in the order in which they were."""
        known = [planned.recipe for planned in plan.run]
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"--minutes {self.minutes}; expected a number > 0.")
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"--jobs {self.jobs}; expected a whole number ≥ 1.")
        for name in self.only:
            if name not in known:
                raise ValueError(f"--only {name}; expected some of {', '.join(known)}.")
        if not self.only:
            return plan
        kept = [known.index(name) for name in dict.fromkeys(self.only)]
        return replace(
            plan,
            run=tuple(plan.run[i] for i in kept),
            recipes=tuple(plan.recipes[i] for i in kept),
        )

    def _setting(self, plan: recipe.Plan) -> Setting:
        usual = Path("runs") / ("reproduce-smoke" if self.smoke else "reproduce") / plan.name
        data = self.data
        if data is not None and Path(data).exists():
            data = f".{os.sep}{os.path.relpath(data)}"  # a path, whatever it is called
        return Setting(self.runs or usual, data, self.data_folder, self.device, self.smoke)

    def _load(self, plan: recipe.Plan) -> Dataset:
        """Find out that the data is there, and fetch it once and not in every run: the first's."""
        first, *others = dict.fromkeys(self._placed(one.experiment.data) for one in plan.recipes)
        found = first.load()
        for other in others:
            other.load()
        return found

    def _placed(self, data: Data) -> Data:
        """What a recipe names, as it was asked for here."""
        fetched = (self.download or data.download) and not self.dry_run
        name = data.data if self.data is None else self.data
        folder = data.data_folder if self.data_folder is None else self.data_folder
        return replace(data, data=name, data_folder=folder, download=fetched)

    def _foretell(
        self, plan: recipe.Plan, todo: list[Errand], device: torch.device, console: Console
    ) -> None:
        """Is it meant for such a machine, is the data there, and how long does it take here."""
        if plan.own and plan.cores is None and device.type == "cpu" and not self.smoke:
            short = f"{plan.name}-short"
            other = f": `ornstein reproduce {short}` is for a CPU"
            other = other if short in recipe.tables() else ""
            console.print(f"this table is made for a GPU{other}", style="bold")
        if self.dry_run and self.smoke:
            return
        try:
            data = self._load(plan)
        except ValueError as error:
            if not self.dry_run:
                raise
            said = f"how long it takes here can't be told: {error}"
            console.print(said, style="dim", markup=False)
            return
        if self.smoke or (device.type == "cuda" and not self.dry_run):
            return  # a trial would keep memory that the runs need
        console.print("a few steps are tried", style="dim")
        took = duration(todo, data, device, self.through)
        if not took.whole:
            return
        parts = f"training {of_time(took.training)}, samples and figures {of_time(took.looking)}"
        more = "; compiled it is faster" if took.compiled else ""
        one = ", one run after the other," if device.type == "cuda" else ""
        about = f"here, on {device}{one} about {of_time(took.whole)}: {parts}{more}"
        console.print(about, style="dim")
        gc.collect()  # what was tried holds on to itself

    def _typed(self) -> str:
        """This command."""
        words = ["ornstein", "reproduce", self.table]
        for option in fields(self)[1:]:
            value = getattr(self, option.name)
            if value == option.default:
                continue
            words.append(f"--{option.name.replace('_', '-')}")
            listed = value if isinstance(value, tuple) else [value]
            words += [] if value is True else [str(one) for one in listed]
        return shlex.join(words)

    def _keep_outdated(self, plan: recipe.Plan, todo: list[Errand], console: Console) -> None:
        """A copy of results that can't stay in the table."""
        path = self.out / f"{self._name(plan)}.json"
        names, wrong = outdated(todo, path), unreadable(path)
        if not (names or wrong):
            return
        kept = _copied(path, path.with_name(f"{path.stem}-before.json"))
        said = (
            f"{path} can't be read ({wrong}). It is written anew; {kept} keeps what it was."
            if wrong
            else f"{path} has runs of recipes that have changed since: {', '.join(names)}. They "
            f"leave the table; {kept} keeps them."
        )
        console.print(said, markup=False)

    def _save(self, plan: recipe.Plan, todo: list[Errand]) -> dict[str, Any]:
        """What is there by now, as a record and as a table."""
        base = self.out / self._name(plan)
        path = base.with_name(f"{base.name}.json")
        record = collected(plan, todo, self._typed(), self.smoke, path)
        if record["runs"]:
            write_text(path, json.dumps(record, indent=1, allow_nan=False))
            rows = [f"# {plan.title}", "", plan.about, "", *table(record), "", f"({where(record)})"]
            write_text(base.with_name(f"{base.name}.md"), "\n".join(rows) + "\n")
        for path, copy in self._samples(plan, todo):
            shutil.copyfile(path, copy)
        return record

    def _samples(self, plan: recipe.Plan, todo: list[Errand]) -> list[tuple[Path, Path]]:
        """The pictures that are there, in the folders of the runs and with the results."""
        return [
            (path, self.out / f"{self._name(plan)}-{errand.name}-{title}.png")
            for errand in todo
            for title, path in errand.pictures_done().items()
        ]

    def _name(self, plan: recipe.Plan) -> str:
        return plan.name + ("-smoke" if self.smoke else "")

    def _write(self, plan: recipe.Plan, todo: list[Errand], console: Console) -> None:
        name, record = self._name(plan), self._save(plan, todo)
        if not record["runs"]:
            console.print("there is nothing to write yet", style="dim")
            return
        pictures = _drawn(record, self.out / name)
        pictures += [copy.name for _, copy in self._samples(plan, todo)]
        console.print("\n".join(table(record)), markup=False)
        files = ", ".join([f"{name}.json", f"{name}.md", *pictures])
        console.print(f"wrote {files} to {self.out}", style="dim")


#: what is measured without runs, and its lines of Markdown
MEASURES: dict[str, tuple[Callable[[Reproduce], dict[str, Any]], Callable[..., list[str]]]] = {
    "runtime": (lambda it: runtime.runtime(device_of(it.device), it.smoke), runtime.rows),
    "auxiliary": (lambda it: it._auxiliary(), auxiliary.rows),
}
VARIANCE = 0.25  # of data in [−1, 1], about


def _copied(path: Path, to: Path) -> Path:
    """A copy of a file, at this path or the first of NAME-2, NAME-3, … that holds nothing else."""
    content = path.read_bytes()
    stems = itertools.chain([to.stem], (f"{to.stem}-{n}" for n in itertools.count(2)))
    places = map(to.with_stem, stems)
    copy = next(one for one in places if not one.exists() or one.read_bytes() == content)
    if not copy.exists():
        shutil.copyfile(path, copy)
    return copy


def _drawn(record: dict[str, Any], base: Path) -> list[str]:
    """Pictures of a table, where there are figures: their names."""
    drawn = viz.pictures_of(record).items()
    return [viz.save(figure, Path(f"{base}-{what}.png")).name for what, figure in drawn]


def _said(errand: Errand, word: str) -> str:
    """One line of progress."""
    doing = {"train": "training", "evaluate": "evaluating", "sample": "sampling"}.get(word, word)
    line = f"{time.strftime('%H:%M:%S')}  {errand.name:28s} {doing}"
    if word in ("done", "evaluate") and (errand.folder / "metrics.jsonl").is_file():
        valid = [m for m in read_metrics(errand.folder) if "valid_bits_per_dim" in m]
        line += f", valid {valid[-1]['valid_bits_per_dim']:.4f}" if valid else ""
    return line + (
        f", see {os.path.relpath(errand.folder / 'log.txt')}" if word == "failed" else ""
    )
