"""Learn the way back: processes and times for solvers with few evaluations, as JSON.

    python -m benchmarks.wayback [--model FOLDER] [--jobs 2] [--out benchmarks/results/wayback.json]

For every solver and number of evaluations: the times are learned for processes as they are, and
the process with them, for 0, 1 and 2 auxiliary variables, on the spectrum of the embedded digits;
then 2,000 digits are sampled from a trained channel model, and compared with the training digits in
the features of a classifier. Beside it: the best preset on its best rule, by the same closed form.
Without --model one is trained first, as `ornstein train` does. With --mnist also times for a model
of MNIST. What is done is written at once; repeating the command goes on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import ornstein
from benchmarks.solvers import trained
from ornstein import (
    Ancestral,
    EulerMaruyama,
    Exponential,
    Heun,
    PredictorCorrector,
    Process,
    ScoreModel,
    Spectrum,
    Splitting,
    quality,
)
from ornstein.data import Dataset
from ornstein.files import write_text
from ornstein.provenance import provenance
from ornstein.sampling import TableSolver
from ornstein.wayback.learning import best_preset

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
WITH_AUXILIARY = ("exponential-1", "exponential-2", "sde-2", "heun", "ancestral", "splitting")
ALONE = ("exponential-1", "exponential-2", "heun", "ancestral")  # the samples' law alone, too
TIMED = ("exponential-1", "exponential-2", "exponential-3", "sde-2", "heun", "ancestral")
EVALUATIONS = (5, 10, 20)
SAMPLES = {"digits": 2000, "mnist": 5000}
ITERATIONS = 60
WIDE = "deviations 0.003–4"
KEYS = ("spectrum", "solver", "evaluations", "way", "metric")


@dataclass(frozen=True)
class Place:
    """Where models and files are."""

    models: dict[str, str]
    data_folder: str | None
    cache: str
    device: str


def one(job: dict[str, Any], place: Place) -> dict[str, Any]:
    """Learn, and sample."""
    torch.set_num_threads(1)
    name = job["spectrum"]
    model = ScoreModel.from_pretrained(place.models["digits" if name == WIDE else name])
    if name == WIDE:
        spectrum = Spectrum.given(torch.logspace(math.log10(0.003), math.log10(4), 24))
        level = 1e-5
    else:
        data = ornstein.data.load(name, folder=place.data_folder)
        spectrum = Spectrum.of(data.train.x[:10_000], model.likelihood)
        level = model.truncation.standard_error  # type: ignore[union-attr]
    solver = SOLVERS[job["solver"]].within(job["evaluations"])
    began = time.perf_counter()
    process: Process
    if job["way"] == "preset":
        best, rule, error = best_preset(spectrum, solver, job["metric"], level)  # type: ignore[arg-type]
        process, used = ornstein.PRESETS[best](), replace(solver, grid=rule)  # type: ignore[arg-type]
        found: dict[str, Any] = {"error": error, "process": best, "rule": rule}
    else:
        fixed = {"times:vpsde": ornstein.vpsde, "times:cld": ornstein.cld}.get(job["way"])
        kept = None if fixed is None else fixed()
        if job["way"] == "times:learned-1":
            kept = ScoreModel.from_pretrained(place.models["digits-learned"]).process
            kept = kept.requires_grad_(False)
        way = ornstein.learn_process(
            spectrum,
            solver,  # type: ignore[arg-type]
            n_aux=int(job["way"]) if kept is None else 0,
            process=kept,
            metric=job["metric"],
            smoothness=0.3 if job["metric"] == "path" else 0.0,
            noise_level=level,
            iterations=ITERATIONS,
        )
        process, used = way.process, way.solver
        found = {"error": way.error, "times": list(used.grid)}
        if kept is None and isinstance(process, ornstein.Diffusion):
            found |= {"Q": process.Q.tolist(), "D": process.D.tolist()}
    found["seconds"] = time.perf_counter() - began
    if name != WIDE:
        device = place.device if name == "mnist" else "cpu"
        under = model.with_process(process).to(device)
        found.update(measured(under, used, data, place.cache))
    return {**job, **found}


def measured(model: ScoreModel, solver: Any, data: Dataset, cache: str) -> dict[str, Any]:
    """How near its samples are to the training data."""
    try:
        x = ornstein.sample(model, SAMPLES[data.name], solver, batch_size=500)
    except ValueError as error:  # a solver that runs away
        return {"refused": str(error)}
    features = quality.classifier(data, 0, folder=cache, device=x.device)
    figures = quality.measure(x, data, features).figures
    return {
        "frechet": figures.frechet,
        "frechet_error": figures.frechet_error,
        "sliced_wasserstein": figures.sliced_wasserstein,
        "sliced_wasserstein_error": figures.sliced_wasserstein_error,
    }


def jobs(mnist: bool) -> list[dict[str, Any]]:
    """The long ones first."""
    found: list[tuple[Any, ...]] = []
    for e in reversed(EVALUATIONS):
        for solver in WITH_AUXILIARY:
            found += [("digits", solver, e, way, "path") for way in ("2", "1")]
        found += [("digits", solver, e, "2", "relative") for solver in ALONE]
        for solver in TIMED:
            found += [("digits", solver, e, f"times:{way}", "path") for way in ("cld", "learned-1")]
            if mnist and e > 5:
                found += [("mnist", solver, e, f"times:{way}", "path") for way in ("cld", "vpsde")]
        found += [(WIDE, "exponential-1", e, way, "relative") for way in ("2", "1", "0", "preset")]
        for solver in SOLVERS:
            found += [("digits", solver, e, way, "path") for way in ("0", "preset")]
        found += [("digits", solver, e, "0", "relative") for solver in ALONE]
    return [dict(zip(KEYS, values, strict=True)) for values in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a saved channel model of the digits")
    parser.add_argument("--learned", help="a saved joint model of the digits, process learned")
    parser.add_argument("--mnist", help="a saved channel model of MNIST")
    parser.add_argument("--data-folder")
    parser.add_argument("--device", default="cpu", help="for MNIST")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--cache", default="runs/benchmarks")
    parser.add_argument("--out", default="benchmarks/results/wayback.json")
    parser.add_argument("--only", help="solvers, separated by commas")
    args = parser.parse_args()
    out = Path(args.out)
    models = {
        "digits": args.model or f"{args.cache}/digits",
        "digits-learned": args.learned or f"{args.cache}/digits-learned",
    }
    for name, how in (
        ("digits", {}),
        ("digits-learned", {"process": "learned-1", "parametrisation": "joint"}),
    ):
        if not (Path(models[name]) / "config.json").exists():
            trained(Path(models[name]), **how)
    if args.mnist:
        models["mnist"] = args.mnist
    place = Place(models, args.data_folder, args.cache, args.device)
    for name in ("digits", "mnist") if args.mnist else ("digits",):  # once for all jobs
        data = ornstein.data.load(name, folder=args.data_folder)
        quality.classifier(data, 0, folder=args.cache, device=torch.device(args.device))
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": []}
    record |= {"samples": SAMPLES, "iterations": ITERATIONS}
    done = [[row[key] for key in KEYS] for row in record["rows"]]
    left = [job for job in jobs(bool(args.mnist)) if [job[key] for key in KEYS] not in done]
    if args.only:
        left = [job for job in left if job["solver"] in args.only.split(",")]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        waiting = [pool.submit(one, job, place) for job in left]
        for future in concurrent.futures.as_completed(waiting):
            row = future.result()
            record["rows"].append(row)
            record["provenance"] = provenance()
            write_text(out, json.dumps(record, indent=1, ensure_ascii=False))
            shown = [row.get(key) for key in (*KEYS, "error", "frechet", "seconds")]
            print(*(f"{v:.4g}" if isinstance(v, float) else v for v in shown), flush=True)


if __name__ == "__main__":
    main()
