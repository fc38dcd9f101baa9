"""What joint models pay for noise that they were told, and how their estimates are read.

    ornstein reproduce digits --jobs 2 --device cpu
    python -m benchmarks.known_noise runs/reproduce/digits [--out results/known.json]

Whitened, a state is L⁻¹y = a x + ε, and of the noise ε only the part along â = a/‖a‖ hides x; the
rest is known from y. A joint network says all of ε nevertheless. Its bound weighs an error e by
C = L⁻¹GGᵀL⁻ᵀ, and splits (see `ornstein.answers`) into what is wrong about x and what is wrong
about noise that was known:

    ‖e‖²_C = (âᵀCâ) ρ² + ‖e − âρ‖²_C

Here for every joint model in a folder of runs: its bound, the second part, and what the bound would
be with the guess taken along â itself, which is not how it was trained. All with the same draws.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ornstein
from benchmarks.way_page import tabled
from ornstein import objectives
from ornstein.answers import View, contract, expand
from ornstein.draws import Counted
from ornstein.evaluation import with_error
from ornstein.files import write_text
from ornstein.provenance import provenance
from ornstein.score import ScoreModel
from ornstein.terms import joint_error
from ornstein.training.opening import open_model
from ornstein.training.run import CONFIG
from ornstein.transition import Transition

Record = dict[str, Any]
ROUNDING, SMALL = 1e-9, 1e-4  # bits/dim
TITLES = {
    "bits_per_dim": "bits/dim, discrete",
    "known": "of it in noise that was known",
    "along": "guesses taken along â, minus the first",
}


def taken_along(
    model: ScoreModel, kernel: Transition, view: View, x: Tensor, eps: Tensor
) -> Tensor:
    """The error of a model whose guess is replaced by its part along â."""
    return expand(
        view.direction, contract(view.direction, joint_error(model, kernel, view, x, eps))
    )


@torch.no_grad()
def looked_at(model: ScoreModel, x: Tensor, draws: int, rounds: int) -> Record:
    """Of one joint model: means over the examples with their errors, bits/dim."""
    index = torch.arange(len(x), device=x.device)
    bits: dict[str, list[Tensor]] = {name: [] for name in TITLES}
    for number in range(rounds):
        random: Any = {"draws": draws, "random": Counted(0, index, number)}
        bound = ornstein.elbo(model, x, control=True, **random)
        with mock.patch.object(objectives, "joint_error", taken_along):
            other = ornstein.elbo(model, x, **random)
        if bound.known is None:
            raise ValueError("a channel model guesses no noise that is known; expected a joint one")
        bits["bits_per_dim"].append(bound.bits_per_dim)
        bits["known"].append(bound.known.mean(1) / (bound.dims * math.log(2)))
        bits["along"].append(other.bits_per_dim - bound.bits_per_dim)
    found = {name: torch.stack(values).mean(0) for name, values in bits.items()}
    return {
        name: [value.mean().item(), value.std().item() / math.sqrt(len(value))]
        for name, value in found.items()
    }


def looked_at_run(folder: Path, draws: int, rounds: int) -> Record | None:
    """The same for the model of a run, on its test split; None for a channel model."""
    opened = open_model(folder)
    if opened.model.parametrisation != "joint" or opened.experiment is None:
        return None
    model, process = opened.model, opened.model.process
    found = looked_at(model, opened.experiment.data.load().test.x, draws, rounds)
    D = getattr(process, "D", None)
    return {
        "name": folder.name,
        "process": process.name,
        "variables": process.n_vars,
        "rank": process.noise_factor(0.5).shape[-1],
        "D": None if D is None else D.tolist(),
        **found,
    }


def _shown(value: float, error: float) -> str:
    if abs(value) < ROUNDING:
        return "0"
    return f"{value:.1e}" if abs(value) < SMALL else with_error(value, error)


def rows(record: Record) -> list[str]:
    """A table in Markdown."""
    titles = ["", "K", "variables that noise enters", *TITLES.values()]
    listed = []
    for run in record["runs"]:
        told = [_shown(*run[name]) for name in TITLES]
        listed.append([run["name"], str(run["variables"]), str(run["rank"]), *told])
    return list(tabled(titles, listed))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folders = sorted(path.parent for path in options.runs.glob(f"*/{CONFIG}"))
    found = [looked_at_run(folder, options.draws, options.rounds) for folder in folders]
    kept = [one for one in found if one is not None]
    if not kept:
        raise SystemExit(f"{options.runs} has no run of a joint model; expected one or more.")
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.known_noise", *sys.argv[1:]]),
        "runs": kept,
        "draws": options.draws * options.rounds,
        "seed": 0,
        "provenance": provenance(),
    }
    print("\n".join(rows(record)))
    if options.out:
        write_text(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
