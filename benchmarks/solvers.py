"""Which solver, how many steps: quality against network evaluations on trained models, as JSON.

    python -m benchmarks.solvers digits --model FOLDER --learned FOLDER [--device cuda] [--out …]
    python -m benchmarks.solvers mnist --model FOLDER --data-folder data --device cuda

Every solver with 5 to 100 network evaluations and Euler–Maruyama with up to 500, on one channel
model under VPSDE, CLD and a process that was learned by a joint model (digits). Samples are
compared with the training data in the features of a classifier. Models come from `ornstein train`
with its presets; without --model those of the digits are trained first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ornstein
from ornstein import EulerMaruyama, Process, ScoreModel, quality
from ornstein.cli.solving import VARIANTS
from ornstein.files import write_text
from ornstein.provenance import provenance
from ornstein.quality.comparing import compare
from ornstein.training import fit, preset

EVALUATIONS = (5, 10, 20, 50, 100)
LONG = (200, 500)  # for Euler–Maruyama
SAMPLES = {"digits": 2000, "mnist": 5000}
MNIST = ("ancestral", "exponential-1", "exponential-2", "exponential-3", "sde-2", "heun", "euler")


def trained(folder: Path, **how: Any) -> None:
    """A model of the digits, as `ornstein train` makes it."""
    base = preset("digits")
    options = replace(
        base,
        process=replace(base.process, process=how.get("process", "vpsde")),
        model=replace(base.model, parametrisation=how.get("parametrisation", "channel")),
    )
    data = options.data.load()
    model = options.build(data)
    for step in fit(model, data, options.training):
        model = step.averaged
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=("digits", "mnist"))
    parser.add_argument("--model", help="a saved channel model")
    parser.add_argument("--learned", help="a saved joint model whose process was learned")
    parser.add_argument("--data-folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", default="runs/benchmarks")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--evaluations", type=int, nargs="*", default=EVALUATIONS)
    parser.add_argument("--long", type=int, nargs="*", default=LONG)
    parser.add_argument("--out")
    args = parser.parse_args()
    cache = Path(args.cache)
    out = Path(args.out or f"benchmarks/results/solvers-{args.data}.json")
    folder = Path(args.model or cache / args.data)
    if not (folder / "config.json").exists():
        trained(folder)
    data = ornstein.data.load(args.data, folder=args.data_folder)
    model = ScoreModel.from_pretrained(folder, device=args.device)
    processes: dict[str, Process] = {"vpsde": ornstein.vpsde(), "cld": ornstein.cld()}
    if args.data == "digits":
        other = Path(args.learned or cache / "digits-learned")
        if not (other / "config.json").exists():
            trained(other, process="learned-1", parametrisation="joint")
        found = ScoreModel.from_pretrained(other).process.requires_grad_(False)
        processes["learned-1"] = found
    processes = {name: process.to(args.device) for name, process in processes.items()}
    names = VARIANTS if args.data == "digits" else MNIST
    solvers = {name: VARIANTS[name] for name in names}
    features = quality.classifier(data, 0, folder=cache, device=torch.device(args.device))
    common: dict[str, Any] = {
        "processes": processes,
        "n": args.samples or SAMPLES[args.data],
        "features": features,
        "batch_size": 2500,
        "callback": lambda point: print(
            point.process, point.solver, point.made, point.figures, flush=True
        ),
    }
    tables = []
    for chosen, counts in ((solvers, args.evaluations), ({"euler": EulerMaruyama()}, args.long)):
        if counts:
            tables.append(compare(model, data, chosen, counts, **common))
    record = tables[0].to_dict()
    for table in tables[1:]:
        record["points"] += table.to_dict()["points"]
    record["provenance"] = provenance()
    write_text(out, json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False))


if __name__ == "__main__":
    main()
