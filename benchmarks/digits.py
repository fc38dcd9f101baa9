"""Fixed against learned processes on the embedded digits, trained the paper's way, as JSON.

    python -m benchmarks.digits [--steps 1000] [--seeds 2] [--jobs 16] [--out results.json]

Joint models of every preset and two learned processes, one after another or side by side on CPU
cores, with the options of `ornstein quickstart`; each on the 300 test images, and its difference to
VPSDE of the same seed, paired image by image. A channel model at the same budget is put under all
presets.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ornstein
from ornstein.provenance import provenance
from ornstein.training import Experiment, fit, preset

FIXED = ("vpsde", "psld", "cld", "malda", "alda")
LEARNED = ("learned-1", "learned-2")
DRAWS = 16


def experiment(parametrisation: Any, process: str, steps: int, seed: int) -> Experiment:
    """The options of one run."""
    base = preset("digits")
    watch = replace(base.training.watch, sample_every=0, valid_every=0)
    return replace(
        base,
        process=replace(base.process, process=process),
        model=replace(base.model, parametrisation=parametrisation),
        training=replace(base.training, steps=steps, seed=seed, watch=watch),
    )


def one(name: str, steps: int, seed: int, out: Path) -> None:
    """Train and evaluate one model; all numbers of its test images go to a file."""
    torch.set_num_threads(1)
    kind, process = name.split(":")
    options = experiment(kind, process, steps, seed)
    data = options.data.load()
    model = options.build(data)
    trained = model
    for step in fit(model, data, options.training):
        trained = step.averaged
    names = FIXED if kind == "channel" else (process,)
    found: dict[str, Any] = {}
    for under in names:
        one_model = (
            trained.with_process(ornstein.PRESETS[under]()) if kind == "channel" else trained
        )
        result = ornstein.evaluate(one_model, data.test.x, draws=DRAWS, seed=seed, quiet=True)
        found[under] = {**result.to_dict(), "per_example": result.per_example.tolist()}
        found[under].pop("curve")
    record: dict[str, Any] = {
        "found": found,
        "parameters": sum(p.numel() for p in model.network.parameters()),
    }
    if process in LEARNED:
        record["Q"], record["D"] = trained.process.Q.tolist(), trained.process.D.tolist()  # type: ignore[attr-defined]
    out.write_text(json.dumps(record))


def paired(first: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """other − first on the same images, and its standard error."""
    a, b = torch.tensor(first["per_example"]), torch.tensor(other["per_example"])
    gap = (b - a).double()
    return {"difference": gap.mean().item(), "error": gap.std().item() / len(gap) ** 0.5}


def gathered(steps: int, seeds: int, jobs: int) -> dict[str, Any]:
    """All runs, side by side."""
    names = ["channel:vpsde", *(f"joint:{name}" for name in (*FIXED, *LEARNED))]
    todo = [(name, seed) for seed in range(seeds) for name in names]
    with tempfile.TemporaryDirectory() as folder:

        def run(item: tuple[str, int]) -> dict[str, Any]:
            name, seed = item
            out = Path(folder) / f"{name.replace(':', '-')}-{seed}.json"
            command = [
                sys.executable,
                "-m",
                "benchmarks.digits",
                "--one",
                name,
                "--seed",
                str(seed),
            ]
            command += ["--steps", str(steps), "--out", str(out)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            subprocess.run(command, check=True, env=environment)
            print(f"{name}, seed {seed}: done", flush=True)
            record: dict[str, Any] = json.loads(out.read_text())
            return record

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            records = list(pool.map(run, todo))
    by_item = dict(zip(todo, records, strict=True))
    rows = []
    for name, seed in todo:
        record = by_item[name, seed]
        kind = name.split(":")[0]
        reference = by_item["channel:vpsde" if kind == "channel" else "joint:vpsde", seed]
        for process, found in record["found"].items():
            row = {
                "parametrisation": kind,
                "process": process,
                "seed": seed,
                "parameters": record["parameters"],
                **{k: found[k] for k in ("bits_per_dim", "standard_error", "draw_error", "prior")},
            }
            row["to_vpsde"] = paired(reference["found"]["vpsde"], found)
            row |= {k: record[k] for k in ("Q", "D") if k in record}
            rows.append(row)
    return {"steps": steps, "batch": preset("digits").training.batch, "draws": DRAWS, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--one")
    parser.add_argument("--out", type=Path, default=Path("digits.json"))
    options = parser.parse_args()
    if options.one:
        one(options.one, options.steps, options.seed, options.out)
        return
    found = gathered(options.steps, options.seeds, options.jobs)
    for row in found["rows"]:
        gap = row["to_vpsde"]
        print(
            f"{row['parametrisation']:8s} {row['process']:10s} seed {row['seed']}  "
            f"{row['bits_per_dim']:.4f} ± {row['standard_error']:.4f}  "
            f"{gap['difference']:+.4f} ± {gap['error']:.4f}"
        )
    options.out.write_text(json.dumps({**found, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
