"""What states in float32 cost the tweedie bound: bits/dim by process and truncation, no network.

    python -m benchmarks.rounding --data mnist cifar10 --data-folder DATA [--out rounding.json]

The bound decodes y₀ from y_ε by a Gaussian whose deviation in z shrinks like s^(5/2) for ALDA and
s^(3/2) for CLD and MALDA. Float32 holds z to about 1e-7·|z|: where that is more than the deviation,
the decoder is asked for the density of a rounding error (`benchmarks.flaws`, `rounded`). With a
score of zero nothing else is left of the term, which then depends on the data and the process
alone. Kernels are exact, data goes through the logit map, Var v₀ = 0.01, the rate is 0.1 to 10.

It is the spacing of float32 that counts, twice as large from 2 to 4 as from 1 to 2, so that data
sets differ: the black pixels of MNIST are at −2.9. How much they differ depends little on the
constants, which the published figures are silent about; `ratios` compares it with what ALDA's
published figures are above those of VPSDE, and `matched` finds between which truncations rounding
costs just that: more than one, since the cost falls with time in jumps that go up as well. Beside
it stands the last time at which the paper's kernel given x, in float32, has no Cholesky factor.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ornstein
from benchmarks.flaws import InFloat32, in_float32
from ornstein.files import write_text
from ornstein.process import Process
from ornstein.provenance import provenance
from ornstein.training.choices import Data

TIMES = (0.001, 0.002, 0.005, 0.008, 0.01, 0.012, 0.02, 0.05, 0.1)
LOGIT, V0 = 0.05, 0.01
WITHIN = (0.004, 0.05)  # times at which rounding costs ALDA more, and less, than any figure
STEPS = 400  # even in the logarithm between them
ABOVE = {"mnist": 124.60 - 1.26, "cifar10": 29.43 - 3.20, "imagenet32": 33.08 - 3.70}  # published


def processes() -> dict[str, Process]:
    """With the paper's rate and law of v₀."""
    usual: dict[str, Any] = {"rate": ornstein.Linear(0.1, 10.0), "v0_variance": V0}
    return {
        "vpsde": ornstein.vpsde(usual["rate"]),
        "cld": ornstein.cld(mass=1.0, **usual),
        "malda": ornstein.malda(**usual),
        "alda": ornstein.alda(**usual),
        "alda, γ = ξ = 1": ornstein.alda(gamma=1.0, xi=1.0, **usual),
    }


def cost(process: Process, x: Tensor, s: float, seed: int = 0) -> tuple[float, float]:
    """Bits/dim that rounding adds at this truncation, and the error over examples."""
    K, d = process.n_vars, x[0].numel()
    known = process.transition(torch.full((len(x),), s, dtype=torch.float64), given="state")
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randn((len(x), 2 * K - 1, *x.shape[1:]), generator=generator)
    nats = in_float32(known, process.auxiliary.factor(), x, inner, torch.zeros_like(inner[:, :K]))
    bits = -nats / (d * math.log(2))
    return bits.mean().item(), bits.std().item() / math.sqrt(len(bits))


def matched(process: Process, x: Tensor, above: float, seed: int = 0) -> tuple[float, float]:
    """The first and the last truncation at which the cost of rounding crosses this.

    Next to each other if the cost falls steadily. Found among STEPS that are even in log s.
    """
    early, late = map(math.log10, WITHIN)
    times = torch.logspace(early, late, STEPS, dtype=torch.float64)
    more = torch.tensor([cost(process, x, s, seed)[0] > above for s in times.tolist()])
    if bool(more.all()) or not bool(more.any()):
        raise ValueError(
            f"rounding costs {process.name!r} {'more' if bool(more[0]) else 'less'} than {above:g} "
            f"bits/dim at all times from {WITHIN[0]:g} to {WITHIN[1]:g}; expected a crossing. "
            "Widen WITHIN, or ask for another cost."
        )
    first, last = sorted((times[~more].min().item(), times[more].max().item()))
    return first, last


def unfactored(process: Process) -> float | None:
    """The last time at which the kernel given x, in float32, has no factor; None if it always has.

    Of 400 times in each factor of ten, from 10⁻⁴ to 1.
    """
    times = torch.logspace(-4, 0, 1601, dtype=torch.float64)
    failed = times[InFloat32(process).fails(times)]
    return failed.max().item() if len(failed) else None


def dequantised(pixels: Tensor, levels: int, seed: int = 0) -> Tensor:
    """Pixels as the paper's bound sees them, in float32."""
    u = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(seed))
    return ornstein.Tweedie(levels, LOGIT).values(pixels, u, torch.float32)


def looked_at(x: Tensor, seed: int = 0) -> dict[str, dict[str, list[float]]]:
    """All processes at all times."""
    return {
        name: {f"{s:g}": list(cost(process, x, s, seed)) for s in TIMES}
        for name, process in processes().items()
    }


def rows(record: dict[str, Any]) -> list[str]:
    """Markdown: one line for each data set and process."""
    lines = ["| data | process | " + " | ".join(f"s = {s:g}" for s in TIMES) + " |"]
    lines.append("| --- " * (2 + len(TIMES)) + "|")
    for data, found in record["bits_per_dim"].items():
        for name, costs in found.items():
            figures = [f"{costs[f'{s:g}'][0]:.2g}" for s in TIMES]
            lines.append(f"| {data} | {name} | " + " | ".join(figures) + " |")
    return lines


def ratios(record: dict[str, Any]) -> list[str]:
    """Markdown: ALDA's costs against those of CIFAR-10, and the published ones."""
    found = record["bits_per_dim"]
    names = [name for name in ABOVE if name in found]
    if "cifar10" not in names:
        return []
    lines = ["| times CIFAR-10's | " + " | ".join(names) + " |"]
    lines.append("| --- " * (1 + len(names)) + "|")
    published = [f"{ABOVE[name] / ABOVE['cifar10']:.2f}" for name in names]
    lines.append("| published, above VPSDE | " + " | ".join(published) + " |")
    for s in TIMES:
        base, error = found["cifar10"]["alda"][f"{s:g}"]
        if base > 10 * error:  # where there is a cost at all
            part = [f"{found[name]['alda'][f'{s:g}'][0] / base:.2f}" for name in names]
            lines.append(f"| rounding at s = {s:g} | " + " | ".join(part) + " |")
    return ["", *lines]


def times(record: dict[str, Any]) -> list[str]:
    """Markdown: between which truncations rounding costs as much as was published."""
    found = record["matched"]
    if not found:
        return []
    heads = [f"{name}, +{ABOVE[name]:.2f}" for name in found]
    heads = ["rounding costs what was published at s =", *heads, "no factor in float32 up to s ="]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for name in next(iter(found.values())):
        cells = [" to ".join(f"{s:.4f}" for s in at[name]) for at in found.values()]
        last = record["unfactored"][name]
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if last is None else f'{last:.4f}'} |")
    return ["", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["digits"])
    parser.add_argument("--data-folder")
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    alike: dict[str, Any] = {}
    aldas = {name: process for name, process in processes().items() if name.startswith("alda")}
    for name in options.data:
        data = Data(data=name, data_folder=options.data_folder).load()
        if data.levels is None:
            raise ValueError(f"{name} has no pixels; expected images, such as mnist or cifar10.")
        known = [other for other in ABOVE if Path(name).stem.startswith(other)]
        x = dequantised(data.test.x[: options.examples], data.levels)
        found[known[0] if known else Path(name).stem] = looked_at(x)
        if known:
            alike[known[0]] = {n: list(matched(p, x, ABOVE[known[0]])) for n, p in aldas.items()}
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.rounding", *sys.argv[1:]]),
        "bits_per_dim": found,
        "matched": alike,
        "unfactored": {name: unfactored(process) for name, process in aldas.items()},
        "examples": options.examples,
        "seed": 0,
        "provenance": provenance(),
    }
    print("\n".join([*rows(record), *ratios(record), *times(record)]))
    if options.out:
        write_text(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
