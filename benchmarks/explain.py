"""The figures of docs/bits-per-dim.md, on data whose truth is known, as JSON.

python -m benchmarks.explain [--out results.json] [--picture docs/images/bits.png]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ornstein
from ornstein import viz
from ornstein.provenance import provenance

BIN = 2 / 256
F64 = torch.float64


class Zero(nn.Module):
    """Leaves the Gaussian answer as it is."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return torch.zeros_like(x)


def bits(nats: Tensor | float) -> float:
    return float(nats) / math.log(2)


# ---------------------------------------------------------------- closed forms


def bins() -> list[dict[str, float]]:
    """What the reconstruction costs, and what a network loses that does not know of bins."""
    rows = []
    for part in (1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2):
        table = ornstein.Discrete(256).table(torch.tensor(BIN * part, dtype=F64))
        cost = -bits(table[128])
        blind = cost - math.log2(part * math.sqrt(2 * math.pi * math.e))
        rows.append({"part": part, "reconstruction": cost, "lost": blind})
    return rows


def tweedie_gap() -> dict[str, Any]:
    """The gap of the paper's decoder for Gaussian data of deviation ½ and the exact score."""
    rows: dict[str, Any] = {}
    for name in ("vpsde", "psld", "malda", "cld", "alda"):
        process = ornstein.PRESETS[name]()
        V, gap = gap_at(process, BIN / 6)
        rows[name] = {
            "time": float(process.time_of_noise(BIN / 6)),
            "width": V.diagonal().sqrt()[1:].tolist(),
            "v0": process.auxiliary.factor().square().sum(-1)[1:].sqrt().tolist(),
            "gap": gap,
        }
    return rows


def gap_at(process: ornstein.Process, noise: float) -> tuple[Tensor, float]:
    """The decoder's covariance at a noise level, and its gap in bits per coordinate."""
    kernel = process.transition(process.time_of_noise(noise), given="state")
    root = torch.linalg.solve(kernel.propagator, kernel.cholesky)
    V = root @ root.T
    start = process.auxiliary.factor().square().sum(-1)
    start[0] = 0.25
    rho = torch.linalg.eigvals(V / start[:, None]).real
    return V, bits((rho.log1p() - rho / (1 + rho)).sum() / 2)


def alda_tight() -> float:
    """The noise level below which that gap is less than 0.01 bits/dim for ALDA."""
    low, high = 1e-12, BIN / 6
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gap_at(ornstein.alda(), middle)[1] < 0.01 else (low, middle)
    return low


def peaked() -> float:
    """What the decoder loses at half a bin by taking four levels for equally likely, in bits."""
    law = torch.tensor([0.97, 0.01, 0.01, 0.01], dtype=F64)
    centres = ornstein.Discrete(4).pixels.centres()
    sigma = 0.25  # of bins of width ½
    x = torch.linspace(-4, 4, 80_001, dtype=F64)[:, None]
    density = law * torch.exp(-((x - centres) ** 2) / (2 * sigma**2)) / math.sqrt(2 * math.pi)
    logs = -((x - centres) ** 2) / (2 * sigma**2)
    more = (logs + law.log()).log_softmax(-1) - logs.log_softmax(-1)
    return bits((density / sigma * more).sum() * 1e-4)


def truncation() -> dict[str, Any]:
    """What a time means in noise, and a noise in time."""
    rows = {}
    for name, make in ornstein.PRESETS.items():
        process = make()
        rows[name] = {
            "noise": float(process.transition(1e-3).snr.rsqrt()),
            "time": float(process.time_of_noise(BIN / 6)),
            "last": float(process.transition(process.horizon).snr.log()),
        }
    return rows


# ---------------------------------------------------------------- by sampling


def one_draw(count: int) -> dict[str, dict[str, float]]:
    """Standard deviation of one draw, in bits, for one coordinate of Gaussian data."""
    ways: dict[str, Any] = {
        "Information": lambda m, x: ornstein.elbo(m, x, times=_free(ornstein.Information)),
        "LogSNR": lambda m, x: ornstein.elbo(m, x, times=_free(ornstein.LogSNR)),
        "Importance": lambda m, x: ornstein.elbo(m, x, times=_free(ornstein.Importance)),
        "Uniform": lambda m, x: ornstein.elbo(m, x, times=_free(ornstein.Uniform)),
        "given the state": lambda m, x: ornstein.elbo(
            m, x, times=_free(ornstein.Information), given="state"
        ),
        "mism": lambda m, x: ornstein.mism(m, x, times=_free(ornstein.Information)),
    }
    rows: dict[str, dict[str, float]] = {}
    for name in ("vpsde", "cld", "alda"):
        model = ornstein.ScoreModel(
            Zero(),
            ornstein.PRESETS[name](),
            ornstein.Continuous(),
            data_std=0.5,
            truncation=ornstein.NoiseLevel(BIN / 6),
        )
        rows[name] = {}
        for way, draw in ways.items():
            torch.manual_seed(0)
            x = 0.5 * torch.randn(16, 1, dtype=F64).repeat_interleave(count // 16, 0)
            with torch.no_grad():
                values = torch.cat([draw(model, part).nats for part in x.split(20_000)])
            rows[name][way] = bits(values.reshape(16, -1).var(1).mean().sqrt())
    return rows


def _free(kind: Any) -> ornstein.Times:
    times: ornstein.Times = kind(spread="independent")
    return times


def rounded(examples: int) -> dict[str, Any]:
    """Gaussian pixels of deviation 40, rounded to levels, and the Gaussian answer alone."""
    generator = torch.Generator().manual_seed(0)
    x = (128 + 40 * torch.randn(examples, 64, generator=generator)).round().clamp(0, 255).byte()
    counts = torch.bincount(x.flatten().long(), minlength=256).to(F64)
    share = counts[counts > 0] / counts.sum()
    mean, std = ornstein.Discrete(256).moments(x)

    def run(name: str, part: float, likelihood: ornstein.Likelihood) -> ornstein.Evaluation:
        model = ornstein.ScoreModel(
            Zero(),
            ornstein.PRESETS[name](),
            likelihood,
            data_mean=mean,
            data_std=std,
            truncation=ornstein.NoiseLevel(BIN * part),
        )
        return ornstein.evaluate(model, x, draws=16, batch_size=16_384, quiet=True)

    record: dict[str, Any] = {"entropy": float(-(share * share.log2()).sum()), "examples": examples}
    for name, part in (("sixth", 1 / 6), ("half", 1 / 2)):
        result = run("vpsde", part, ornstein.Discrete(256))
        record[name] = [result.bits_per_dim, result.standard_error]
    base = run("vpsde", 1 / 6, ornstein.Tweedie(256))
    for name in ("cld", "alda"):
        record[f"tweedie, {name} − vpsde"] = list(
            run(name, 1 / 6, ornstein.Tweedie(256)).difference(base)
        )
    return record


LAW = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=F64)


class OfLevels(nn.Module):
    """The noise of independent pixels with this law, at the centres of their bins."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        centres = ornstein.Discrete(4).pixels.centres()
        sigma, x = (-logsnr / 2).exp()[:, None, None], x[..., None]
        weight = (LAW.log() - (x - centres) ** 2 / (2 * sigma**2)).softmax(-1)
        return (weight * (x - centres) / sigma).sum(-1)


class OfDequantised(nn.Module):
    """The same for pixels that are spread evenly over their bins: −σ ∇ log of the density."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        edges = torch.linspace(-1, 1, 5, dtype=F64)
        sigma = (-logsnr / 2).exp()[:, None, None]
        t = (x[..., None] - edges) / sigma  # of the five edges
        below, above = t[..., 1:], t[..., :-1]
        # log of Φ(above) − Φ(below) on the side where neither is near one
        turned = below > 0
        low, high = torch.where(turned, -above, below), torch.where(turned, -below, above)
        logs = torch.special.log_ndtr(high)
        logs = logs + torch.log(-torch.expm1(torch.special.log_ndtr(low) - logs))
        total = (LAW.log() + logs).logsumexp(-1)
        jumps = torch.nn.functional.pad(LAW, (1, 1)).diff()  # of the density at the edges
        normal = torch.exp(-(t**2) / 2 - total[..., None]) / math.sqrt(2 * math.pi)
        return -(jumps * normal).sum(-1)


def four_levels(draws: int) -> dict[str, Any]:
    """Bits/dim above the truth, for each bound and the exact denoiser for either."""
    generator = torch.Generator().manual_seed(0)
    x = torch.multinomial(LAW, 100 * 64, replacement=True, generator=generator).reshape(100, 64)
    cost = -LAW.log2()[x].mean(1)
    record: dict[str, Any] = {}
    for name in ("vpsde", "cld"):
        for network in (OfLevels(), OfDequantised()):
            for likelihood in (ornstein.Discrete(4), ornstein.Tweedie(4)):
                model = ornstein.ScoreModel(
                    network, ornstein.PRESETS[name](), likelihood, precondition=False
                )
                result = ornstein.evaluate(model, x, draws=draws, batch_size=8192, quiet=True)
                excess = result.per_example - cost
                key = f"{name}, {type(network).__name__}, {likelihood.name}"
                record[key] = [float(excess.mean()), float(excess.std()) / 10]
    return record


def picture(path: Path) -> None:
    """Where two networks lose their bits on the four levels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.multinomial(LAW, 200 * 64, replacement=True, generator=generator).reshape(200, 64)
    found = {}
    names = {"knows the levels": OfLevels(), "knows them dequantised": OfDequantised()}
    for name, network in names.items():
        model = ornstein.ScoreModel(
            network, ornstein.vpsde(), ornstein.Discrete(4), precondition=False
        )
        found[name] = ornstein.evaluate(model, x, draws=64, batch_size=8192, quiet=True)
    viz.save(viz.bits(found), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--quick", action="store_true", help="few draws, to try it out")
    args = parser.parse_args()
    torch.set_default_dtype(F64)
    if args.picture:
        picture(args.picture)
    part = 50 if args.quick else 1
    record = {
        "bins": bins(),
        "tweedie gap": tweedie_gap(),
        "alda tight below": alda_tight(),
        "peaked": peaked(),
        "truncation": truncation(),
        "one draw": one_draw(400_000 // part),
        "rounded": rounded(2000 // part),
        "four levels": four_levels(128 // (part // 10 or 1)),
        "provenance": provenance(),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
