"""Several training processes that share a card, or the cores of a CPU: all their steps per second.

The parent starts `python -m ornstein.bench.scaling`, waits until every process has compiled and
warmed up, and lets them go at once; each steps for a few seconds and says how many it made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import IO

import torch

from ornstein.bench.figures import Line, Part, Table
from ornstein.bench.sizes import Case, Setting

READY, GO = "ready", "go"


def scaling(setting: Setting) -> Part:
    """Steps per second of 1, 2, 4 … processes together."""
    most = 2 if setting.quick else 8 if setting.cuda else min(4, max(2, os.cpu_count() or 1))
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    seconds = 1.0 if setting.quick else 5.0 if setting.cuda else 3.0
    case = setting.small()
    lines: list[Line] = []
    notes = ["a step takes so long over all processes"]
    for count in counts:
        name = f"{count} processes" if count > 1 else "1 process"
        if setting.out_of_time():
            notes.append(f"left out: {name} (out of time)")
            continue
        setting.tell(name)
        try:
            rate = together(setting, count, case.batch, seconds)
        except RuntimeError as error:  # more than the memory holds, perhaps
            notes.append(f"left out: {name} ({error})")
            break
        ratio = rate * lines[0].seconds if lines else 1.0
        lines.append(Line(name, 1 / rate, ratio, 1))
    table = Table(
        f"processes that share the {'GPU' if setting.cuda else 'CPU'}, {case.name}, "
        f"batch {case.batch}",
        "× the steps of one process",
        tuple(lines),
        "steps",
        notes=tuple(notes),
    )
    return Part((table,))


def together(setting: Setting, count: int, batch: int, seconds: float) -> float:
    """Steps per second of so many processes at once."""
    device = str(setting.device)
    asked = {"device": device, "quick": setting.quick, "batch": batch, "seconds": seconds}
    workers = [Worker.started(asked) for _ in range(count)]
    try:
        for worker in workers:
            worker.heard(READY)
        for worker in workers:
            worker.told(GO)
        found = [json.loads(worker.heard("{")) for worker in workers]
    finally:
        for worker in workers:
            worker.ended()
    return float(sum(each["steps"] / each["seconds"] for each in found))


@dataclass(frozen=True)
class Worker:
    """A training process, seen from its parent."""

    process: subprocess.Popen[str]
    errors: IO[str]  # a file: a pipe that nobody reads would stop it

    @staticmethod
    def started(asked: dict[str, object]) -> Worker:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if asked["device"] == "cpu":
            environment["OMP_NUM_THREADS"] = "1"  # a core for each
        errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "ornstein.bench.scaling", json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        return Worker(process, errors)

    def told(self, word: str) -> None:
        pipe = _pipe(self.process.stdin)
        pipe.write(f"{word}\n")
        pipe.flush()

    def heard(self, begin: str) -> str:
        """The next line that begins so."""
        for line in _pipe(self.process.stdout):
            if line.startswith(begin):
                return line
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"a training process failed: {said[-1]}")

    def ended(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("a training process has no pipe to this one")
    return stream


def work(case: Case, device: torch.device, seconds: float) -> dict[str, float]:
    """Steps of one process, after a warm-up; waits for the word."""
    job = case.job(device)
    for _ in range(6 if device.type == "cuda" else 2):
        job.step()
    _done(device)
    print(READY, flush=True)
    sys.stdin.readline()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(10 if device.type == "cuda" else 1):
            job.step()
            steps += 1
        _done(device)
    return {"steps": steps, "seconds": time.perf_counter() - began}


def _done(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    where = torch.device(asked["device"])
    if where.type == "cpu":
        torch.set_num_threads(1)
    here = replace(Setting(where), quick=asked["quick"])
    print(json.dumps(work(here.small(asked["batch"]), where, asked["seconds"])), flush=True)
