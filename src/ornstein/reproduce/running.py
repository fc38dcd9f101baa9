"""The runs of a table: each is a chain of commands, several of them side by side.

Every command is one that could be typed: `ornstein train`, then `ornstein evaluate` for each
figure, then `ornstein sample`. All of them go on where they were stopped, so the whole does, too.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ornstein.files import write_text
from ornstein.reproduce.recipe import Plan, Planned, Recipe

LOG, DONE, TABLE = "log.txt", "done.json", "table"
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

    def typed(self) -> list[str]:
        """The commands as one would type them."""
        return [f"ornstein {shlex.join(command)}" for command in self.commands]

    def finished(self) -> int:
        """Commands that are done."""
        path = self.folder / DONE
        if not path.is_file():
            return 0
        done = json.loads(path.read_text(encoding="utf-8"))
        same = [list(a) == b for a, b in zip(self.commands, done, strict=False)]
        return same.index(False) if False in same else len(same)

    def finish(self, count: int) -> None:
        """Note that so many are done."""
        write_text(self.folder / DONE, json.dumps(self.commands[:count], indent=1))

    def looks(self) -> dict[str, Path]:
        """The folders of the figures, by their titles."""
        return {one.title: self.folder / TABLE / one.title for one in self.recipe.evaluate}

    def pictures(self) -> dict[str, Path]:
        """The grids of samples."""
        return {g.title: self.folder / TABLE / f"{g.title}.png" for g in self.recipe.sample}


def errands(plan: Plan, setting: Setting) -> list[Errand]:
    """What there is to do for a table."""
    found = []
    for planned, given in zip(plan.run, plan.recipes, strict=True):
        recipe = given.smoke() if setting.smoke else given
        for seed in planned.seeds:
            name = planned.recipe + (f"-seed{seed}" if len(planned.seeds) > 1 else "")
            found.append(_errand(name, recipe, planned, seed, setting))
    return found


def _errand(name: str, recipe: Recipe, planned: Planned, seed: int, setting: Setting) -> Errand:
    folder = setting.runs / name
    train = ["train", "--recipe", recipe.source, "--seed", str(seed), "--out", str(folder)]
    train += setting.options("data", "data_folder", "device")
    commands = [[*train, "--smoke"] if setting.smoke else train]
    bare = Errand(name, recipe, planned, seed, folder, ())
    for bits, place in zip(recipe.evaluate, bare.looks().values(), strict=True):
        command = ["evaluate", str(folder), "--out", str(place), *bits.arguments()]
        commands.append([*command, *setting.options("device")])
    for grid, place in zip(recipe.sample, bare.pictures().values(), strict=True):
        command = ["sample", str(folder), "--out", str(place), *grid.arguments()]
        commands.append([*command, *setting.options("device")])
    return Errand(name, recipe, planned, seed, folder, tuple(map(tuple, commands)))


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


@dataclass
class Pool:
    """Does errands, so many at a time.

    tell: is told of every beginning and end, with the errand and a word.
    """

    jobs: int
    until: float = float("inf")  # time.monotonic
    tell: Callable[[Errand, str], None] = lambda errand, word: None
    failed: dict[str, str] = field(default_factory=dict)  # by name, what was said last
    received: int = 0  # a signal

    def do(self, errands: Sequence[Errand]) -> None:
        """All of them; a failure does not keep the others from being done."""
        waiting, doing = [e for e in errands if e.finished() < len(e.commands)], list[Doing]()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in before:
                signal.signal(number, self._receive)
            while waiting or doing:
                while waiting and len(doing) < self.jobs and not self._over():
                    doing.append(self._begun(waiting.pop(0)))
                if self._over():
                    raise Stopped(self._why(), self.received)
                time.sleep(PAUSE)
                doing = [after for one in doing if (after := self._looked(one)) is not None]
        finally:
            _end(doing)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        self.received = number

    def _over(self) -> bool:
        return bool(self.received) or time.monotonic() > self.until

    def _why(self) -> str:
        return signal.Signals(self.received).name if self.received else "the time is over"

    def _begun(self, errand: Errand) -> Doing:
        number = errand.finished()
        self.tell(errand, errand.commands[number][0])
        return Doing(errand, number, self._started(errand, number))

    def _started(self, errand: Errand, number: int) -> subprocess.Popen[bytes]:
        errand.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if self.jobs > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        command = errand.commands[number]
        with (errand.folder / LOG).open("ab") as log:
            log.write(f"\n$ ornstein {shlex.join(command)}\n".encode())
            log.flush()
            return subprocess.Popen(
                [sys.executable, "-m", "ornstein", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a signal reaches them through here, and once
            )

    def _looked(self, one: Doing) -> Doing | None:
        """The same, or its next command; None when it is done."""
        code = one.process.poll()
        if code is None:
            return one
        errand = one.errand
        if code:
            self.failed[errand.name] = _last_line(errand.folder / LOG)
            self.tell(errand, "failed")
            return None
        errand.finish(one.number + 1)
        if one.number + 1 == len(errand.commands):
            self.tell(errand, "done")
            return None
        return self._begun(errand)


def _end(doing: Sequence[Doing]) -> None:
    """Let all of them save and leave."""
    for one in doing:
        one.process.terminate()
    until = time.monotonic() + GRACE
    for one in doing:
        try:
            one.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
