"""The training step of the quick start in two checkouts of this repository, against each other.

    python -m benchmarks.checkouts OTHER [--out results.json] [--rounds 15]

OTHER is a folder with another state of the repository (git worktree add OTHER COMMIT). Each state
trains in a process of its own, on one thread; they take turns, and the medians over rounds of
(this / other) are reported, so that a noisy machine disturbs both. Losses must be the same, unless
the other state's models have no histogram yet and this one's have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from ornstein.provenance import provenance

HERE = Path(__file__).resolve().parents[1]
STEPS = 20  # of a turn
WITHOUT = {"histogram": False, "bins": "on"}  # as models were before they had a histogram
CASES = {
    "channel, VPSDE": ("channel", "vpsde", WITHOUT),
    "channel, VPSDE, with its histogram": ("channel", "vpsde", {}),
    "joint, learned K = 2, with its histogram": ("joint", "learned-1", {}),
}
Case = tuple[str, str, dict[str, Any]]  # parametrisation, process, options of the model here

WORKER = """
import json, sys, time
from dataclasses import replace
import torch
from ornstein.training import Watch, fit, preset
torch.set_num_threads(1)
base = preset("digits")
histogram = hasattr(base.model, "histogram")
watch = Watch(log_every=10**9, valid_every=0, sample_every=0)
experiment = replace(
    base,
    process=replace(base.process, process=sys.argv[2]),
    model=replace(
        base.model,
        parametrisation=sys.argv[1],
        **{name: value for name, value in json.loads(sys.argv[3]).items() if histogram},
    ),
    training=replace(base.training, steps=10**9, watch=watch),
)
data = experiment.data.load()
torch.manual_seed(0)
steps = fit(experiment.build(data), data, experiment.training)
for _ in range(5):
    loss = next(steps).loss
print(loss, int(histogram), flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    for _ in range(int(line)):
        next(steps)
    print(time.perf_counter() - began, flush=True)
"""


class Worker:
    """One state of the repository, training when it is its turn."""

    def __init__(self, tree: Path, case: Case) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        parametrisation, process, model = case
        command = [sys.executable, "-c", WORKER, parametrisation, process, json.dumps(model)]
        pipe = subprocess.PIPE
        self.process: Any = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree
        )
        loss, histogram = self.process.stdout.readline().split()
        self.loss, self.histogram = float(loss), bool(int(histogram))

    def turn(self) -> float:
        """Seconds of a step."""
        self.process.stdin.write(f"{STEPS}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline()) / STEPS

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def race(other: Path, case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of a step in both, and of the ratios."""
    this, that = Worker(HERE, case), Worker(other, case)
    same = case[2] == WITHOUT or that.histogram
    if same and abs(this.loss - that.loss) > 1e-4 * abs(that.loss):
        raise ValueError(f"after 5 steps the losses are {this.loss:g} here, {that.loss:g} there")
    pairs = [(this.turn(), that.turn()) for _ in range(rounds)]
    this.close()
    that.close()
    ours, theirs = zip(*pairs, strict=True)
    return {
        "this": statistics.median(ours),
        "other": statistics.median(theirs),
        "this / other": statistics.median(a / b for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    other = options.other.resolve()
    git = ["git", "-C", str(other), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    record: dict[str, Any] = {"provenance": provenance(), "other": commit}
    for name, case in CASES.items():
        record[name] = found = race(other, case, options.rounds)
        print(f"{name:24s} this / other {found['this / other']:.3f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
