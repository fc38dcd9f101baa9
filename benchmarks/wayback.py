"""Learn the way back: processes and times for solvers with few evaluations, as JSON.

    python -m benchmarks.wayback [--model FOLDER] [--jobs 2] [--out benchmarks/results/wayback.json]

For every solver, number of evaluations and number of auxiliary variables the process and the times
are learned on the spectrum of the embedded digits; then 2,000 digits are sampled from a trained
channel model, and compared with the training digits in the features of a classifier. Beside it: the
best preset on its best rule, by the same closed form. Without --model one is trained first, as
`ornstein train` does. What is done is written at once; repeating the command goes on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ornstein
from ornstein import (
    Ancestral,
    EulerMaruyama,
    Exponential,
    Heun,
    PredictorCorrector,
    ScoreModel,
    Spectrum,
    Splitting,
    quality,
)
from ornstein.files import write_text
from ornstein.provenance import provenance
from ornstein.sampling import TableSolver
from ornstein.training import fit, preset
from ornstein.wayback.learning import PRESETS, best_preset

SOLVERS: dict[str, TableSolver] = {
    "exponential-1": Exponential(order=1),
    "exponential-2": Exponential(order=2),
    "exponential-3": Exponential(order=3),
    "exponential-noise-2": Exponential(order=2, extrapolate="noise"),
    "sde-2": Exponential(order=2, stochasticity=1.0),
    "heun": Heun(),
    "ancestral": Ancestral(),
    "splitting": Splitting(),
    "corrector": PredictorCorrector(),
    "euler": EulerMaruyama(),
}
TWICE = ("exponential-1", "exponential-2", "heun", "ancestral")  # learned in both metrics
EVALUATIONS = (5, 10, 20)
SAMPLES = 2000
ITERATIONS = 100
WIDE = "deviations 0.003–4"


def spectrum_of(name: str, model: ScoreModel) -> tuple[Spectrum, float]:
    """And the noise level at its end."""
    if name == WIDE:
        return Spectrum.given(torch.logspace(math.log10(0.003), math.log10(4), 24)), 1e-5
    data = ornstein.data.load("digits")
    level = model.truncation.standard_error  # type: ignore[union-attr]
    return Spectrum.of(data.train.x, model.likelihood), level


def one(job: dict[str, Any], folder: str, cache: str) -> dict[str, Any]:
    """Learn, and sample."""
    torch.set_num_threads(1)
    model = ScoreModel.from_pretrained(folder)
    spectrum, level = spectrum_of(job["spectrum"], model)
    solver = SOLVERS[job["solver"]].within(job["evaluations"])
    began = time.perf_counter()
    if job["n_aux"] is None:
        name, rule, error = best_preset(spectrum, solver, job["metric"], level)  # type: ignore[arg-type]
        process = next(
            make() for group in PRESETS.values() for make in group if make.__name__ == name
        )
        found: dict[str, Any] = {"error": error, "process": name, "rule": rule}
        used = replace(solver, grid=rule)
    else:
        way = ornstein.learn_process(
            spectrum,
            solver,  # type: ignore[arg-type]
            n_aux=job["n_aux"],
            metric=job["metric"],
            noise_level=level,
            iterations=ITERATIONS,
        )
        process, used = way.process, way.solver
        found = {
            "error": way.error,
            "times": list(way.solver.grid),
            "Q": way.process.Q.tolist(),
            "D": way.process.D.tolist(),
        }
    found["seconds"] = time.perf_counter() - began
    if job["spectrum"] == "digits":
        found.update(measured(model.with_process(process), used, cache))
    return {**job, **found}


def measured(model: ScoreModel, solver: Any, cache: str) -> dict[str, Any]:
    """How near its samples are to the training digits."""
    data = ornstein.data.load("digits")
    try:
        x = ornstein.sample(model, SAMPLES, solver, batch_size=500)
    except ValueError as error:  # a solver that runs away
        return {"refused": str(error)}
    figures = quality.measure(x, data, quality.classifier(data, 0, folder=cache)).figures
    return {
        "frechet": figures.frechet,
        "frechet_error": figures.frechet_error,
        "sliced_wasserstein": figures.sliced_wasserstein,
        "sliced_wasserstein_error": figures.sliced_wasserstein_error,
    }


def jobs() -> list[dict[str, Any]]:
    """The long ones first."""
    found = []
    for evaluations in reversed(EVALUATIONS):
        for solver in SOLVERS:
            for n_aux in (2, 1, 0, None):
                metrics = ("relative", "wasserstein") if solver in TWICE else ("relative",)
                for metric in metrics:
                    found.append(("digits", solver, evaluations, n_aux, metric))
        for n_aux in (2, 1, 0, None):
            found.append((WIDE, "exponential-1", evaluations, n_aux, "relative"))
    keys = ("spectrum", "solver", "evaluations", "n_aux", "metric")
    return [dict(zip(keys, values, strict=True)) for values in found]


def trained(folder: Path) -> None:
    """A channel model of the digits, as `ornstein train` makes it."""
    options = preset("digits")
    data = options.data.load()
    model = options.build(data)
    for step in fit(model, data, options.training):
        model = step.averaged
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a saved channel model of the digits")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--cache", default="runs/benchmarks")
    parser.add_argument("--out", default="benchmarks/results/wayback.json")
    parser.add_argument("--only", help="solvers, separated by commas")
    args = parser.parse_args()
    cache, out = Path(args.cache), Path(args.out)
    folder = Path(args.model or cache / "digits")
    if not (folder / "config.json").exists():
        trained(folder)
    data = ornstein.data.load("digits")
    features = quality.classifier(data, 0, folder=cache)
    floor = quality.measure(data.test.x, data, features).figures
    record: dict[str, Any] = {"rows": []}
    if out.exists():
        record = json.loads(out.read_text())
    record |= {
        "samples": SAMPLES,
        "iterations": ITERATIONS,
        "classifier": features.accuracy,
        "test": {"examples": len(data.test.x), "frechet": floor.frechet},
    }
    keys = ("spectrum", "solver", "evaluations", "n_aux", "metric")
    done = [[row[key] for key in keys] for row in record["rows"]]
    left = [job for job in jobs() if [job[key] for key in keys] not in done]
    if args.only:
        left = [job for job in left if job["solver"] in args.only.split(",")]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        waiting = [pool.submit(one, job, str(folder), str(cache)) for job in left]
        for future in concurrent.futures.as_completed(waiting):
            row = future.result()
            record["rows"].append(row)
            record["provenance"] = provenance()
            write_text(out, json.dumps(record, indent=1, ensure_ascii=False))
            shown = {key: row.get(key) for key in (*keys, "error", "frechet", "seconds")}
            print(
                " ".join(
                    f"{value:.4g}" if isinstance(value, float) else str(value)
                    for value in shown.values()
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
