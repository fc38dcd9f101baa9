"""What becomes of joint models, and of processes that are learned, if known noise costs nothing.

    python -m benchmarks.reading [--seeds 0 1] [--jobs 2] [--out results/reading.json]

The bound of a joint model charges for errors in noise that was known (`benchmarks.known_noise`),
unless the model is told: known_noise="told", of the same network only what it says about x. Here
the same recipes are trained both ways, and both are then reported by what was said about x. Of a
learned process Q and D are reported as well: does it keep couplings that it would otherwise let go?
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.known_noise import looked_at
from benchmarks.way_page import tabled
from ornstein import fit
from ornstein.files import write_text
from ornstein.provenance import provenance
from ornstein.reproduce import recipe

Record = dict[str, Any]
RECIPES = ("digits/joint-malda", "digits/joint-learned-1", "digits/joint-learned-2")
WAYS = ("guessed", "told")
DRAWS, ROUNDS = 4, 16


def trained(name: str, way: str, seed: int) -> Record:
    """One run, and what its averaged model is worth on the test split."""
    torch.set_num_threads(1)
    found = recipe.read(name).experiment
    found = replace(
        found,
        model=replace(found.model, known_noise=way),  # type: ignore[arg-type]
        training=replace(found.training, seed=seed),
    )
    data = found.data.load()
    best = found.build(data)
    for step in fit(best, data, found.training):
        best = step.averaged
    best.known_noise = "guessed"  # of either, what it would cost
    figures = looked_at(best.eval(), data.test.x, DRAWS, ROUNDS)
    process = best.process
    return {
        "recipe": name,
        "way": way,
        "seed": seed,
        "steps": found.training.steps,
        "variables": process.n_vars,
        "Q": process.Q.tolist(),  # type: ignore[operator,union-attr]
        "D": process.D.tolist(),  # type: ignore[operator,union-attr]
        "bits_per_dim": figures["bits_per_dim"][0],
        "known": figures["known"][0],
        "read": figures["bits_per_dim"][0] - figures["known"][0],
    }


def _coupling(run: Record) -> float:
    """Of x with all other variables: ‖(Q₁₂, Q₁₃, …)‖."""
    return math.hypot(*run["Q"][0][1:])


def rows(record: Record) -> list[str]:
    """A table in Markdown."""
    titles = ["", "known noise", "bits/dim, told", "mean", "known noise, if charged"]
    titles += ["coupling of x", "D of x", "D of the others"]
    listed = []
    for name in dict.fromkeys(run["recipe"] for run in record["runs"]):
        for way in WAYS:
            runs = [r for r in record["runs"] if r["recipe"] == name and r["way"] == way]
            if not runs:
                continue
            bits = [run["read"] for run in runs]
            others = [", ".join(f"{r['D'][i][i]:.2g}" for i in range(1, len(r["D"]))) for r in runs]
            listed.append(
                [
                    name.split("/")[-1],
                    way,
                    ", ".join(f"{b:.4f}" for b in bits),
                    f"{mean(bits):.4f}",
                    ", ".join(f"{run['known']:.1e}" for run in runs),
                    ", ".join(f"{_coupling(run):.2g}" for run in runs),
                    ", ".join(f"{run['D'][0][0]:.2g}" for run in runs),
                    "; ".join(others),
                ]
            )
    return list(tabled(titles, listed))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked = [(n, w, s) for s in options.seeds for n in options.recipes for w in WAYS]
    record: Record = {
        "command": shlex.join(["python", "-m", "benchmarks.reading", *sys.argv[1:]]),
        "runs": [],
        "draws": DRAWS * ROUNDS,
        "provenance": provenance(),
    }
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for run in pool.map(trained, *zip(*asked, strict=True)):
            record["runs"].append(run)
            print(run["recipe"], run["way"], run["seed"], f"{run['read']:.4f}", flush=True)
            if options.out:  # what is done stays
                write_text(options.out, json.dumps(record, indent=1) + "\n")
    print("\n".join(rows(record)))


if __name__ == "__main__":
    main()
