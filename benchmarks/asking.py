"""How fast a network is asked, by samples and by evaluations: ratios within one run, as JSON.

    python -m benchmarks.asking [--size cifar10] [--n 10000] [--out benchmarks/results/asking.json]

Each way of asking is tried twice: the first time shows what it takes to start (compilation,
capture), the second what it takes then. Rates are compared with the first way, by default eager
mode in torch's own float32. Sizes: cifar10 (35.7 M parameters), mnist (1.1 M), digits (0.1 M).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ornstein
from ornstein.files import write_text
from ornstein.networks import UNet
from ornstein.provenance import provenance

NETWORKS: dict[str, Callable[[], UNet]] = {
    "cifar10": lambda: UNet((3, 32, 32), features=2),
    "mnist": lambda: UNet.small((1, 28, 28), features=2),
    "digits": lambda: UNet.tiny((1, 8, 8), features=2),
}
WAYS = {
    "eager": {"compile": "off", "precision": "auto"},
    "captured": {"compile": "auto", "precision": "auto"},
    "compiled": {"compile": "on", "precision": "auto"},
    "eager, bfloat16": {"compile": "off", "precision": "bfloat16"},
    "compiled, bfloat16": {"compile": "on", "precision": "bfloat16"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="cifar10", choices=NETWORKS)
    parser.add_argument("--n", type=int, default=10_000, help="samples")
    parser.add_argument("--evaluations", type=int, default=50)
    parser.add_argument("--examples", type=int, default=2000, help="of an evaluation, by 8 draws")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batch", type=int, default=None, help="default: what memory allows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--process", default="cld")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    network = NETWORKS[args.size]()
    nn.init.normal_(network.leave[-1].weight, std=0.02)  # type: ignore[arg-type]
    process = getattr(ornstein, args.process)()
    model = ornstein.ScoreModel(network, process, data_std=0.5, features="bins")
    model = model.to(args.device).eval()
    x = torch.randint(256, (args.examples, *network.layout.shape), dtype=torch.uint8)
    solver = ornstein.Exponential(order=2).within(args.evaluations)
    works: dict[str, Callable[[dict[str, Any]], Any]] = {
        "samples": lambda how: ornstein.sample(model, args.n, solver, **how),
        "bits": lambda how: ornstein.evaluate(model, x, draws=8, quiet=True, **how),
    }
    amounts = {"samples": args.n, "bits": args.examples}
    rows: list[dict[str, Any]] = []
    for work, run in works.items():
        truth: Any = None
        for name in args.ways:
            how = {**WAYS[name], "batch_size": args.batch}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, first = timed(partial(run, how))
                found, seconds = timed(partial(run, how))
            truth = found if truth is None else truth
            row: dict[str, Any] = {
                "work": work,
                "way": name,
                "first_seconds": first,
                "seconds": seconds,
                "per_second": amounts[work] / seconds,
                "off": apart(found, truth),
                "warnings": sorted({str(w.message).splitlines()[0] for w in caught}),
            }
            eager = next((r for r in rows if r["work"] == work), row)
            row["ratio"] = eager["seconds"] / seconds
            rows.append(row)
            print(
                f"{work:8s} {name:20s} {row['per_second']:10.1f}/s  {row['ratio']:5.2f}×  "
                f"first {first:6.1f} s  off {row['off']:.2g}  {'; '.join(row['warnings'])}",
                flush=True,
            )
    if args.out is not None:
        record = {"arguments": vars(args), "rows": rows, "provenance": provenance()}
        write_text(Path(args.out), json.dumps(record, indent=1))


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and seconds until the device is done."""
    began = time.perf_counter()
    found = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - began


def apart(found: Any, truth: Any) -> float:
    """Bits/dim, or the mean difference of pixels."""
    if isinstance(found, Tensor):
        return float((found.float() - truth.float()).abs().mean())
    return abs(found.bits_per_dim - truth.bits_per_dim)


if __name__ == "__main__":
    main()
