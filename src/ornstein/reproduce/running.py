"""The runs of a table: each is a chain of commands, several of them side by side.

Every command is one that could be typed: `ornstein train`, then `ornstein sample`, since a picture
is there in seconds, then `ornstein evaluate` for each figure. All of them go on where they were
stopped, so the whole does, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ornstein.files import locked, write_text
from ornstein.reproduce.recipe import Bits, Grid, Plan, Planned, Recipe
from ornstein.score import CLEAR
from ornstein.training.run import FREE

LOG, DONE, TABLE, LOCK = "log.txt", "done.json", "table", "reproduce.lock"
#: that end it, saved: interrupted, told to stop, or its terminal closed
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
Verb = Literal["train", "sample", "evaluate"]
VERBS: tuple[Verb, ...] = ("train", "sample", "evaluate")  # in the order of a chain
PAUSE = 0.2  # seconds between two looks at what is running
GRACE = 60.0  # seconds that a command has to save and leave


@dataclass(frozen=True)
class Setting:
    """Where and how; the same for all runs."""

    runs: Path
    data: str | None = None  # other data than the recipes', of the same shape
    data_folder: str | None = None
    device: str | None = None
    smoke: bool = False

    def options(self, *names: str) -> list[str]:
        """Those that are given, for a command line."""
        given = {name: getattr(self, name) for name in names}
        pairs = [(f"--{n.replace('_', '-')}", v) for n, v in given.items() if v is not None]
        return [word for pair in pairs for word in pair]


@dataclass(frozen=True)
class Errand:
    """One run of a table, with all that is found out about it."""

    name: str
    recipe: Recipe
    planned: Planned
    seed: int
    folder: Path
    commands: tuple[tuple[str, ...], ...]  # after `ornstein`
    keys: tuple[str, ...]  # what each of them rests on: done with another key, it is done again

    def typed(self) -> list[str]:
        """The commands as one would type them."""
        return [f"ornstein {shlex.join(command)}" for command in self.commands]

    def count_through(self, last: Verb) -> int:
        """How many commands there are up to those of this kind."""
        return sum(VERBS.index(command[0]) <= VERBS.index(last) for command in self.commands)

    def finished(self) -> int:
        """Commands that are done, and whose files are there, up to the first that is not."""
        return [*self._done(), False].index(False)

    def finish(self, count: int) -> None:
        """Note that so many are done. What comes after them stays, unless it was trained anew."""
        after = [key for key in self.keys[count:] if key in self._noted()] if count > 1 else []
        write_text(self.folder / DONE, json.dumps([*self.keys[:count], *after], indent=1))

    def _done(self) -> list[bool]:
        """Of each command, in whatever order they were done; none before it is trained."""
        noted = self._noted()
        found = [
            key in noted and there() for key, there in zip(self.keys, self._there(), strict=True)
        ]
        return found if found[:1] == [True] else [False] * len(found)

    def _noted(self) -> list[str]:
        """The keys of what was done."""
        path = self.folder / DONE
        if not path.is_file():
            return []
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        return found if isinstance(found, list) else []  # damaged: all is asked again, in no time

    def rests_on(self) -> str:
        """A short word for all of its recipe that its figures rest on, in whatever order."""
        named = zip((command[0] for command in self.commands), self.keys, strict=True)
        ordered = sorted(named, key=lambda one: ("train", "evaluate", "sample").index(one[0]))
        return hashlib.sha256("\n".join(key for _, key in ordered).encode()).hexdigest()[:16]

    def looks_done(self) -> list[str]:
        """The titles of the figures that are there."""
        done = self._done()[1 + len(self.recipe.sample) :]
        return [title for title, there in zip(self.looks(), done, strict=True) if there]

    def looks(self) -> dict[str, Path]:
        """The folders of the figures, by their titles."""
        return {one.title: self.folder / TABLE / one.title for one in self.recipe.evaluate}

    def files(self, look: str) -> dict[str, Path]:
        """Figures of a look, by the process that was asked for, in the recipe's order."""
        listed = next(one.process for one in self.recipe.evaluate if one.title == look)
        found = {(_figure(path) or {}).get("asked"): path for path in _jsons(self.looks()[look])}
        return {name: found[name] for name in listed or ("own",) if name in found}

    def pictures(self) -> dict[str, Path]:
        """The grids of samples."""
        return {g.title: self.folder / TABLE / f"{g.title}.png" for g in self.recipe.sample}

    def pictures_done(self) -> dict[str, Path]:
        """Those that are there."""
        found = zip(self.pictures().items(), self._done()[1:], strict=False)
        return {title: path for (title, path), there in found if there}

    def figures(self) -> int:
        """How many there will be."""
        return sum(len(one.process) or 1 for one in self.recipe.evaluate)

    def _there(self) -> list[Callable[[], bool]]:
        """Whether the files of each command are there."""
        found: list[Callable[[], bool]] = [(self.folder / "config.json").is_file]
        found += [path.is_file for path in self.pictures().values()]
        for bits, place in zip(self.recipe.evaluate, self.looks().values(), strict=True):
            found.append(partial(_has, place, len(bits.process) or 1))
        return found


def _has(folder: Path, count: int) -> bool:
    """So many figures, none of them damaged."""
    found = _jsons(folder)
    return len(found) == count and all(_figure(path) is not None for path in found)


def _jsons(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def _figure(path: Path) -> dict[str, Any] | None:
    """What is in the file of a figure; None where it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def errands(plan: Plan, setting: Setting) -> list[Errand]:
    """What there is to do for a table."""
    found = []
    for planned, given in zip(plan.run, plan.recipes, strict=True):
        recipe = given.smoke() if setting.smoke else given
        for seed in planned.seeds:
            name = planned.recipe + (f"-seed{seed}" if seed else "")
            found.append(_errand(name, recipe, planned, seed, setting))
    return found


def _errand(name: str, recipe: Recipe, planned: Planned, seed: int, setting: Setting) -> Errand:
    folder = setting.runs / name
    train = ["train", "--recipe", recipe.source, "--seed", str(seed), "--out", str(folder)]
    train += setting.options("data", "data_folder", "device")
    commands = [[*train, "--smoke"] if setting.smoke else train]
    keys = [json.dumps([_decisive(recipe), seed, setting.data], sort_keys=True)]
    bare = Errand(name, recipe, planned, seed, folder, (), ())
    asked: list[tuple[str, Bits | Grid, Path]] = [
        *(("sample", one, bare.pictures()[one.title]) for one in recipe.sample),
        *(("evaluate", one, bare.looks()[one.title]) for one in recipe.evaluate),
    ]
    for verb, one, place in asked:
        command = [verb, str(folder), "--out", str(place), *one.arguments()]
        commands.append([*command, *setting.options("device")])
        keys.append(shlex.join([verb, *one.arguments()]) + _rule(one))
    return Errand(name, recipe, planned, seed, folder, tuple(map(tuple, commands)), tuple(keys))


def _rule(one: Bits | Grid) -> str:
    """How a bound is evaluated where its options leave that open: a figure by another is another's.

    Without a truncation of its own `tweedie` begins at a part of a bin (score.CLEAR).
    """
    if isinstance(one, Grid) or one.bound != "tweedie":
        return ""
    return f" from {CLEAR:g} bins" if one.noise_level is one.fixed_time is None else ""


#: options that came later, as they were before there was a choice: runs from then are still theirs
#: (training/run.py, `complete`, says the same of the options that a run was begun with)
LATER = {("model", "known_noise"): "guessed"}


def _decisive(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe a trained model rests on."""
    record = recipe.experiment.to_record()
    for (part, name), before in LATER.items():
        if record[part][name] == before:
            del record[part][name]
    training = {k: v for k, v in record["training"].items() if k not in FREE}
    return {**record, "training": training}


# ---------------------------------------------------------------- doing them


class Stopped(Exception):
    """Told to stop, or out of time; what is done stays."""

    def __init__(self, why: str, number: int = 0) -> None:
        self.signal = number
        super().__init__(why)


@dataclass
class Doing:
    """An errand under way."""

    errand: Errand
    number: int  # of the command
    process: subprocess.Popen[bytes]
    said: int  # bytes of the log before it


@dataclass
class Pool:
    """Does errands, so many at a time.

    tell: is told of every beginning and end, with the errand and a word.
    through: the last of their commands that are wanted.
    """

    jobs: int
    until: float = float("inf")  # time.monotonic
    tell: Callable[[Errand, str], None] = lambda errand, word: None
    through: Verb = "evaluate"
    failed: dict[str, str] = field(default_factory=dict)  # by name, what was said last
    doing: list[Doing] = field(default_factory=list)
    received: int = 0  # a signal
    _lock: int | None = None

    def do(self, errands: Sequence[Errand], folder: Path) -> None:
        """All of them; a failure does not keep the others from being done."""
        waiting = [
            errand for errand in errands if errand.finished() < errand.count_through(self.through)
        ]
        before = {number: signal.getsignal(number) for number in SIGNALS}
        with self._alone(folder):
            try:
                for number in before:
                    signal.signal(number, self._receive)
                while waiting or self.doing:
                    while waiting and len(self.doing) < self.jobs and not self._over():
                        self._begin(waiting.pop(0))
                    if self._over():
                        raise Stopped(self._why(), self.received)
                    time.sleep(PAUSE)
                    for one in list(self.doing):
                        self._look(one)
            finally:
                self._end()
                for number, handler in before.items():
                    signal.signal(number, handler)

    @contextlib.contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """A lock that the commands inherit: one that outlives this process holds it, too."""
        refusal = (
            f"another process is at work in {folder}: an `ornstein reproduce`, or a command that "
            "one left behind. Expected one at a time: wait for it or stop it."
        )
        with locked(folder / LOCK, refusal) as self._lock:
            yield

    def _receive(self, number: int, frame: object) -> None:
        self.received = number

    def _over(self) -> bool:
        return bool(self.received) or time.monotonic() > self.until

    def _why(self) -> str:
        return signal.Signals(self.received).name if self.received else "the time is over"

    def _begin(self, errand: Errand) -> None:
        """Its next command."""
        number = errand.finished()
        command = errand.commands[number]
        self.tell(errand, command[0])
        errand.folder.mkdir(parents=True, exist_ok=True)
        if command[0] == "evaluate":  # figures of other options; their draws stay, and are used
            for path in Path(command[command.index("--out") + 1]).glob("*.json"):
                path.unlink()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if self.jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // self.jobs)))
        with (errand.folder / LOG).open("ab") as log:
            log.write(f"\n$ ornstein {shlex.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "ornstein", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a signal reaches them through here, and once
                pass_fds=() if self._lock is None else (self._lock,),
            )
            self.doing.append(Doing(errand, number, process, log.tell()))

    def _look(self, one: Doing) -> None:
        """At its end note it, and begin its next command."""
        code = one.process.poll()
        if code is None:
            return
        self.doing.remove(one)
        errand = one.errand
        if code:
            self.failed[errand.name] = _said(errand.folder / LOG, one.said, code)
            self.tell(errand, "failed")
            return
        errand.finish(one.number + 1)
        if errand.finished() <= one.number:
            self.failed[errand.name] = f"`ornstein {errand.commands[one.number][0]}` left no file"
            self.tell(errand, "failed")
        elif errand.finished() >= errand.count_through(self.through):
            self.tell(errand, "done")
        else:
            self._begin(errand)

    def _end(self) -> None:
        """Let all of them save and leave."""
        for one in self.doing:
            one.process.terminate()
        for one in self.doing:
            with contextlib.suppress(OSError):  # nobody to tell: its terminal is closed
                self.tell(one.errand, "stopping")
        until = time.monotonic() + GRACE
        for one in self.doing:
            try:
                one.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
        self.doing.clear()


def cores() -> int:
    """Of this machine, that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _said(path: Path, start: int, code: int) -> str:
    """What a command that failed had to say, from its error on."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = path.read_bytes()[start:].decode(errors="replace").splitlines()
    lines = [line for line in lines if line.strip()]
    places = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    found = lines[places[-1] :] if places else lines[-1:]
    return "\n    ".join(found).removeprefix("error: ") or f"exit code {code}"
