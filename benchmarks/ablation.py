"""What a published figure of ALDA owes to its kernel, its truncation, its times and its network.

    python -m benchmarks.ablation --data mnist --data-folder DATA --steps 6000 [--process alda]
        [--device cuda] [--jobs 8] [--out results/ablation.json] [--cases none,time] [--smoke]

Joint models with the network and the optimiser of the data's preset, each trained with one flaw
(see `benchmarks.flaws`) in its loss, or with several, or with none. Then, on the test split,

- sound: the bound of the library, exact kernel, truncated at a noise level: what the trained
  network is worth;
- reported: the bound term by term with the flaws of its training on: what would have been reported;
  the tweedie bound also with states in float32;
- alone (of the case `none`): the model trained without flaws, reported with each of them.

`kernel` counts how often the factor failed. The rate is the paper's, 0.1 to 10: with one of 20 at
the end the formula in float32 fails at the horizon as well. The case `recipe` has all flaws, the
logit map, Var v₀ = 0.01 and γ = ξ = 1, and no features of bins.

Every case is a process of its own and leaves a file next to --out; those that are there are kept.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ornstein
from benchmarks.flaws import (
    BATCH,
    EPSILON,
    Flaws,
    InFloat32,
    Written,
    cholesky,
    sources,
    times_of,
    with_flaws,
    written,
)
from ornstein.data import Dataset
from ornstein.evaluation import with_error, without_nan
from ornstein.files import write_text
from ornstein.likelihood import Likelihood
from ornstein.provenance import provenance
from ornstein.training import Diverged, Experiment, preset
from ornstein.training.choices import Diffusing
from ornstein.training.loop import Job

CASES = {
    "none": Flaws(),
    "kernel": Flaws(kernel=True),
    "time": Flaws(time=True),
    "density": Flaws(density=True),
    "kernel-time": Flaws(kernel=True, time=True),
    "three": Flaws(kernel=True, time=True, density=True),
    "plain": Flaws(plain=True),
    "recipe": Flaws(kernel=True, time=True, density=True, plain=True, scaled=True),
}
ALONE = ("kernel", "time", "density", "kernel-time", "three")
WORDS = {
    "none": "nothing",
    "kernel": "float32 kernel, jitter",
    "time": f"truncated at s = {EPSILON:g}",
    "density": "VPSDE's density of times",
    "kernel-time": "float32 kernel, jitter, s = 0.001",
    "three": "all three",
    "plain": "network predicts the noise outright",
    "recipe": "all of these, logit map, γ = ξ = 1",
}
RATE = (0.1, 10.0)
PLAIN_ALDA: dict[str, Any] = {  # γ = ξ = L = 1
    "process": "own",
    "Q": ((0.0, -1.0, 0.0), (1.0, 0.0, -1.0), (0.0, 1.0, 0.0)),
    "D": ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 1.0)),
}
LOGIT, V0 = 0.05, 0.01  # of the recipe
ROUNDED = "tweedie, float32 states"


# ---------------------------------------------------------------- one case


def experiment(options: argparse.Namespace, case: str) -> Experiment:
    """The options of a run, as they are without flaws."""
    base, recipe = preset(options.data), case == "recipe"
    process = Diffusing(process=options.process, rate=RATE)
    if recipe:
        own = PLAIN_ALDA if options.process == "alda" else {}
        process = replace(process, v0_variance=V0, **own)
    model = replace(base.model, parametrisation="joint", histogram=False)
    if recipe:
        model = replace(model, logit=LOGIT, bins="off")
    watch = replace(base.training.watch, sample_every=0, valid_every=0)
    training = replace(base.training, steps=options.steps, seed=options.seed, watch=watch)
    if CASES[case].kernel:  # whose factor is tried out on the host
        training = replace(training, compile="off")
    if options.batch is not None:
        training = replace(training, batch=options.batch)
    if options.smoke:
        model = replace(model, network="unet-tiny", width=8, multipliers=(1, 1), attention=())
    data = replace(base.data, data_folder=options.data_folder)
    return replace(base, data=data, process=process, model=model, training=training)


def build(
    run: Experiment, data: Dataset, flaws: Flaws, device: torch.device
) -> ornstein.ScoreModel:
    """The model with fresh weights and a sound process."""
    model = run.build(data, device)
    model.precondition = not flaws.plain
    return model


def train(
    run: Experiment, data: Dataset, flaws: Flaws, device: torch.device
) -> tuple[ornstein.ScoreModel, dict[str, Any]]:
    """The averaged network in a model with a sound process, and how it was trained."""
    sound = build(run, data, flaws, device)
    model = with_flaws(sound, flaws)
    job = Job(model, data, run.training, None, None)
    if flaws.kernel or flaws.density:
        times = times_of(sound, flaws)
        times.spread = run.training.objective.spread
        job.loss.times = times
    begun, losses, step = time.monotonic(), [], None
    every = max(1, run.training.steps // 20)
    for step in job.steps():
        if step.number % every == 0:
            losses.append(round(step.loss, 4))
    if step is None:
        raise RuntimeError("no step was done")
    found = build(run, data, flaws, device)
    found.network.load_state_dict(step.averaged.network.state_dict())
    note = {"seconds": round(time.monotonic() - begun, 1), "losses": losses}
    return found.eval(), note


def likelihoods(model: ornstein.ScoreModel) -> dict[str, Likelihood]:
    """Bounds on the pixels that this model was trained on, and one with states in float32."""
    known = model.likelihood
    if not isinstance(known, ornstein.Discrete):
        raise ValueError(f"the model has {known!r}; expected Discrete: choose data of pixels.")
    tweedie = ornstein.Tweedie(known.pixels.levels, known.pixels.logit)
    return {"discrete": known, "tweedie": tweedie, ROUNDED: tweedie}


def sound(model: ornstein.ScoreModel, x: Tensor, draws: int, seed: int) -> dict[str, Any]:
    """The library's bound."""
    found = ornstein.evaluate(model, x, draws=draws, seed=seed, quiet=True).to_dict()
    found.pop("curve")
    return found


def reported(
    model: ornstein.ScoreModel, x: Tensor, flaws: Flaws, draws: int, seed: int
) -> dict[str, Any]:
    """The bounds of a sound model with flaws switched on, term by term."""
    flawed, times = with_flaws(model, flaws), times_of(model, flaws)
    record: dict[str, Any] = {}
    for name, likelihood in likelihoods(model).items():
        torch.manual_seed(seed)
        also = flaws.scaled, name == ROUNDED
        rows = [
            [written(flawed, part, likelihood, times, *also) for part in x.split(BATCH)]
            for _ in range(draws)
        ]
        record[name] = summary(rows, x[0].numel())
        if isinstance(flawed.process, InFloat32):
            record[name] |= jittered(flawed.process, rows)
    return record


def summary(rows: list[list[Written]], dims: int) -> dict[str, Any]:
    """Bits/dim of draws × batches: mean, errors, parts."""

    def bits(name: str) -> Tensor:
        """(draws, N)."""
        found = [torch.cat([getattr(batch, name) for batch in row]) for row in rows]
        return -torch.stack(found) / (dims * math.log(2))

    values = bits("nats")
    draws, count = values.shape
    each = values.mean(0)
    one = values.var(0).mean().sqrt().item() if draws > 1 else math.nan
    return {
        "bits_per_dim": each.mean().item(),
        "standard_error": each.std().item() / math.sqrt(count),
        "median": each.median().item(),
        "deviation of one draw": one,
        "draw_error": one / math.sqrt(draws * count),
        "draws": draws,
        "examples": count,
        "parts": {name: bits(name).mean().item() for name in ("prior", "known", "error", "end")},
    }


def jittered(process: InFloat32, rows: list[list[Written]]) -> dict[str, Any]:
    """How often jitter was needed: by a draw itself, or by one of its batch."""
    batches = [batch.s for row in rows for batch in row]
    failed = [process.fails(s) for s in batches]
    added = [cholesky(process.covariance32(s))[1] for s in batches]
    return {
        "draws that failed": torch.cat(failed).double().mean().item(),
        "batches with jitter": sum(any_ > 0 for any_ in added) / len(added),
        "largest jitter": max(added),
    }


def kernel_facts(model: ornstein.ScoreModel) -> dict[str, Any]:
    """Where the factor fails, and what jitter does to the noise on x."""
    sound, flawed = model.process, InFloat32(model.process).to(model.process.device)
    times = torch.logspace(-5, 0, 5001, dtype=torch.float64, device=sound.device) * sound.horizon
    record: dict[str, Any] = {"sound ε": model.truncation.time(sound).item()}
    for given in ("x", "state"):
        failed = flawed.fails(times, given)
        good, bad = times[~failed], times[failed]
        record[f"given {given}"] = {
            "smallest time without": good[0].item() if len(good) else None,
            "last time with": bad[-1].item() if len(bad) else None,
            "part of 0.001 … 0.01 that fails": failed[2000:3001].double().mean().item(),
            "fails at 0.001": bool(flawed.fails(times[2000:2001], given)),
        }
    sigma = sound.transition(EPSILON).snr.rsqrt().item()
    near = torch.linspace(EPSILON, 1.1 * EPSILON, BATCH, dtype=torch.float64, device=sound.device)
    with_jitter = flawed.transition(near).snr[0].rsqrt().item()
    record["σ at 0.001"] = {"sound": sigma, "in a batch": with_jitter}
    return record


def one(options: argparse.Namespace, case: str) -> dict[str, Any]:
    """Train and evaluate a case."""
    begun, flaws, device = time.monotonic(), CASES[case], torch.device(options.device)
    run = experiment(options, case)
    data = run.data.load()
    x = data.test.x[: options.examples].to(device)
    record: dict[str, Any] = {"case": case, "flaws": flaws.names(), "settings": settings(options)}
    record |= {"batch": run.training.batch, "command": command()}
    try:
        model, record["training"] = train(run, data, flaws, device)
    except Diverged as error:
        return {**record, "diverged": str(error), "provenance": provenance()}
    draws, seed = options.draws, options.seed
    record["parameters"] = sum(p.numel() for p in model.network.parameters())
    record["kernel"] = kernel_facts(model)
    record["sound"] = sound(model, x, draws, seed)
    record["reported"] = reported(model, x, flaws, draws, seed)
    if case == "none":
        record["alone"] = {name: reported(model, x, CASES[name], draws, seed) for name in ALONE}
    record["seconds"] = round(time.monotonic() - begun, 1)
    return without_nan({**record, "provenance": provenance()})


# ---------------------------------------------------------------- all of them


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What must be equal for a file to be kept."""
    names = ("data", "process", "steps", "seed", "batch", "draws", "examples", "smoke")
    return {**{name: getattr(options, name) for name in names}, "sources": sources()}


def command() -> str:
    return " ".join(["python -m benchmarks.ablation", *sys.argv[1:]])


def path_of(options: argparse.Namespace, case: str) -> Path:
    out: Path = options.out
    return out.with_name(f"{out.stem}-{case}.json")


def kept(options: argparse.Namespace, case: str) -> dict[str, Any] | None:
    """A case that is there already."""
    path = path_of(options, case)
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record["settings"] != settings(options):
        raise ValueError(
            f"{path} was made with {record['settings']}, not {settings(options)}; expected the "
            "same options to go on. Delete it, or choose another --out."
        )
    return record


def gathered(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, so many side by side."""
    names = options.cases.split(",")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ValueError(f"--cases has {unknown}; expected some of {', '.join(CASES)}.")

    def run(case: str) -> dict[str, Any]:
        found = kept(options, case)
        if found is None:
            child = [sys.executable, "-m", "benchmarks.ablation", *sys.argv[1:], "--one", case]
            subprocess.run(child, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
            found = kept(options, case)
            print(f"{case}: done", flush=True)
        if found is None:
            raise RuntimeError(f"{case} left no file")
        return found

    jobs = options.jobs or (1 if options.device == "cpu" else len(names))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        cases = dict(zip(names, pool.map(run, names), strict=True))
    record = {"settings": settings(options), "rate": RATE, "cases": cases}
    return {**record, "command": command(), "provenance": provenance()}


def rows(record: dict[str, Any]) -> list[str]:
    """The figures as Markdown, bits/dim."""
    lines = [
        f"| trained with | its worth | reported, discrete | tweedie | {ROUNDED} | one draw |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    cases = record["cases"]
    for name, case in cases.items():
        if "diverged" in case:
            lines.append(f"| {WORDS[name]} | diverged | | | | |")
            continue
        lines.append(f"| {WORDS[name]} | {_figure(case['sound'])} | {_figures(case['reported'])} |")
    if "alone" in cases.get("none", {}):
        lines += [
            "",
            f"| trained with nothing, reported with | discrete | tweedie | {ROUNDED} | one draw |",
            "| --- | --- | --- | --- | --- |",
            f"| nothing | {_figures(cases['none']['reported'])} |",
        ]
        lines += [f"| {WORDS[k]} | {_figures(v)} |" for k, v in cases["none"]["alone"].items()]
    return lines


SHORT = ("none", "time", "kernel", "density")


def short(records: dict[str, dict[str, Any]]) -> list[str]:
    """The suspects alone, on each data set, which the keys name."""
    heads = ["", *(f"{name}, {what}" for name in records for what in ("its worth", "reported"))]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for case in SHORT:
        cells = [WORDS[case]]
        for record in records.values():
            found = record["cases"][case]
            cells += [_figure(found["sound"]), _figure(found["reported"]["discrete"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figures(found: dict[str, Any]) -> str:
    """All bounds, and the standard deviation of one draw of the first."""
    one_draw = found["discrete"]["deviation of one draw"]
    bounds = [_figure(found[name]) for name in ("discrete", "tweedie", ROUNDED)]
    return " | ".join([*bounds, "" if one_draw is None else f"±{one_draw:.2g}"])


def _figure(found: dict[str, Any]) -> str:
    value, error = found["bits_per_dim"], found["standard_error"]
    return "not finite" if value is None or error is None else with_error(value, error)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-folder")
    parser.add_argument("--process", default="alda")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, help="default: that of the data's preset")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--examples", type=int, help="of the test split; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, help="side by side; default: 1 on a CPU, else all")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=Path("results/ablation.json"))
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny network")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        small = {"data": "digits", "steps": 3, "draws": 2, "examples": 8, "device": "cpu"}
        vars(options).update(small)
    return options


def main() -> None:
    options = parsed()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.one:
        record = one(options, options.one)
        write_text(path_of(options, options.one), json.dumps(record, indent=1) + "\n")
        return
    record = gathered(options)
    write_text(options.out, json.dumps(record, indent=1) + "\n")
    print("\n".join(rows(record)))


if __name__ == "__main__":
    main()
