"""How much of a sampling run is not the network: ratios within one run, as JSON.

    python -m benchmarks.overhead [--batch 32] [--out benchmarks/results/overhead.json]

50 steps with the U-Net of MNIST (1.1 M parameters, random weights), from nothing to pixels: tables
of the solver, whitening, mixing, noise and pixels are on one side, the calls of the network on the
other.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ornstein
from ornstein.files import write_text
from ornstein.networks import UNet
from ornstein.provenance import provenance

SOLVERS: dict[str, ornstein.Solver] = {
    "exponential-2": ornstein.Exponential(50, order=2),
    "exponential-3, stochastic": ornstein.Exponential(50, order=3, stochasticity=1.0),
    "ancestral": ornstein.Ancestral(50),
    "heun": ornstein.Heun(25),
    "splitting": ornstein.Splitting(50),
    "euler": ornstein.EulerMaruyama(50),
}


class Timed(nn.Module):
    """A network that remembers how long it was at work."""

    def __init__(self, network: UNet) -> None:
        super().__init__()
        self.network, self.layout = network, network.layout
        self.seconds, self.calls = 0.0, 0

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        began = time.perf_counter()
        found: Tensor = self.network(x, logsnr)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--processes", nargs="*", default=["vpsde", "cld", "alda"])
    parser.add_argument("--out", default="benchmarks/results/overhead.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    network = Timed(UNet.small((1, 28, 28), features=2))
    rows: list[dict[str, Any]] = []
    for name in args.processes:
        model = ornstein.ScoreModel(
            network,
            ornstein.PRESETS[name](),
            ornstein.Discrete(256),
            data_std=0.6,
            features="bins",
        )
        ornstein.sample(model, 1, ornstein.Exponential(1))  # what is done once only
        for title, solver in SOLVERS.items():
            network.seconds, network.calls = 0.0, 0
            began = time.perf_counter()
            ornstein.sample(model, args.batch, solver, batch_size=args.batch)
            total = time.perf_counter() - began
            rows.append(
                {
                    "process": name,
                    "solver": title,
                    "calls": network.calls,
                    "outside": 1 - network.seconds / total,
                }
            )
            print(f"{name:6s} {title:26s} {network.calls} calls, {rows[-1]['outside']:.2%} outside")
    record = {"batch": args.batch, "rows": rows, "provenance": provenance()}
    write_text(Path(args.out), json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
