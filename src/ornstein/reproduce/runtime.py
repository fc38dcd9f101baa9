"""The paper's table of run times, measured again: the kernel and a sample for 256 images.

Three ways to q(y_s | x): derived by hand (CLD only), ours, and the paper's algorithm, which is

    exp [[∫A, ∫GGᵀ], [0, −∫Aᵀ]] (Σ₀; I) = (C; H),      Σ = C H⁻¹,      then Cholesky, in float64.

The last two are sampled by the same code, so that they differ in the kernel alone. Beside them a
copy of what they return, the least that any of them can take. The published seconds are of another
machine; the ratios within one run are what can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ornstein import compiling
from ornstein.bench.kernels import by_hand, sampled_by_hand
from ornstein.bench.racing import Race, Work, captured, race
from ornstein.bench.sizes import tidy
from ornstein.diffusion import Diffusion
from ornstein.processes import alda, cld
from ornstein.provenance import provenance
from ornstein.reproduce.results import row
from ornstein.transition import Transition

BY_HAND, AUTOMATIC, PAPER = "derived by hand", "automatic", "the paper's algorithm"
COPY = "copy of y and ε"
SHAPES = {"cifar10": (3, 32, 32), "mnist": (1, 28, 28)}
BATCH, FEW = 256, 8  # images; few of them to see that it runs
ROUNDS, BUDGET = 21, 0.1  # of them, and seconds for each way in each
CALLS = 16  # in a graph: as inside a step, where it is one of many
AGREE = 1e-8  # the most by which mean and covariance may differ: C H⁻¹ cancels at long times
#: seconds, as published
PUBLISHED = {
    "cifar10": {BY_HAND: 0.027, AUTOMATIC: 0.029},
    "mnist": {BY_HAND: 0.0062, AUTOMATIC: 0.007},
}

Sampled = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# ---------------------------------------------------------------- the paper's algorithm


def paper_kernel(process: Diffusion, s: Tensor) -> Transition:
    """q(y_s | x) by one exponential of a 2K×2K block and one inverse, for times (B,)."""
    if not process.commutes:
        raise ValueError(
            f"the rates of {process.name!r} are not proportional, and exp(∫A) is not the "
            "propagator then; expected one clock. Use process.transition(s)."
        )
    Q, D, S, K = process.Q, process.D, process.S, process.n_vars
    turned, damped = (rate.integral(s)[:, None, None] for rate in (process.rate_q, process.rate_d))
    A, noise = -(turned * Q + damped * D) @ S, 2 * damped * D  # both integrated
    block = torch.cat([torch.cat([A, noise], 2), torch.cat([torch.zeros_like(A), -A.mT], 2)], 1)
    flow = torch.linalg.matrix_exp(block)
    root = process.auxiliary.factor()
    start = torch.cat([root @ root.mT, torch.eye(K, dtype=root.dtype, device=root.device)])
    C, H = (flow @ start).chunk(2, 1)
    covariance = C @ torch.linalg.inv(H)
    return Transition(
        propagator=flow[:, :K, :K],
        cholesky=torch.linalg.cholesky((covariance + covariance.mT) / 2),
        direction=process.auxiliary.direction(),
        given="x",
        error=torch.zeros_like(s),  # nobody looks
    )


# ---------------------------------------------------------------- the table


def runtime(device: torch.device, smoke: bool = False) -> dict[str, Any]:
    """Time all ways on this device; with `smoke` a few images and rounds, to see that it runs."""
    batch, rounds = (FEW, 3) if smoke else (BATCH, ROUNDS)
    budget = 0.01 if smoke else BUDGET
    processes = (cld().to(device), alda().to(device))
    agreement = {process.name: agree(process, batch, device) for process in processes}
    lines = []
    for process in processes:
        for data in SHAPES:
            for graph in (False, True) if device.type == "cuda" else (False,):
                works = _works(process, data, batch, device, graph)
                calls = CALLS if graph else 1
                found = race(works, device, rounds, budget, warm=5)
                lines.append(_line(process.name, data, graph, _per_call(found, calls)))
                tidy(device)
    return {
        "device": device.type,
        "smoke": smoke,
        "batch": batch,
        "rounds": rounds,
        "lines": lines,
        "agreement": agreement,
        "published": PUBLISHED,
        "provenance": provenance(),
    }


def agree(process: Diffusion, batch: int, device: torch.device) -> dict[str, float]:
    """The largest difference of each other way from ours, in E[y|x]/x and in Σ."""
    s = _times(process, batch, device)
    kernel, paper = process.transition(s), paper_kernel(process, s)
    others = {PAPER: (paper.response, paper.covariance)}
    if process.name == "cld":
        response, factor = by_hand(s)
        others[BY_HAND] = response, factor @ factor.mT
    worst = {}
    for name, (response, covariance) in others.items():
        apart = kernel.response - response, kernel.covariance - covariance
        worst[name] = max(float(each.abs().max()) for each in apart)
        if not worst[name] < AGREE:
            raise ValueError(
                f"the kernel of {process.name!r} and that of {name} differ by {worst[name]:g}; "
                f"expected less than {AGREE:g}. They are not of the same process."
            )
    return worst


def _times(process: Diffusion, batch: int, device: torch.device) -> Tensor:
    """Times over the horizon, away from where the other ways fail."""
    return process.horizon * torch.linspace(0.02, 1, batch, dtype=torch.float64, device=device)


def _works(
    process: Diffusion, data: str, batch: int, device: torch.device, graph: bool
) -> dict[str, Work]:
    """What races: plain calls as a user makes them, or compiled and captured in a CUDA graph."""
    s = _times(process, batch, device)
    x = torch.randn(batch, *SHAPES[data], device=device)
    source = torch.randn(2, batch, process.n_vars, *SHAPES[data], device=device)
    target = torch.empty_like(source)
    ways: dict[str, Sampled] = {AUTOMATIC: lambda s, x: process.transition(s).sample(x)}
    if process.name == "cld":
        ways = {BY_HAND: sampled_by_hand, **ways}
    if graph:  # the paper's reads norms on the host, and can't be captured
        ways = {name: compiling.compiled(way, fullgraph=True) for name, way in ways.items()}
    else:
        ways[PAPER] = lambda s, x: paper_kernel(process, s).sample(x)
    works: dict[str, Work] = {name: _bound(way, s, x) for name, way in ways.items()}
    works[COPY] = lambda: target.copy_(source)
    return {name: captured(work, device, CALLS) for name, work in works.items()} if graph else works


def _bound(way: Sampled, s: Tensor, x: Tensor) -> Work:
    return lambda: way(s, x)


def _per_call(found: Race, calls: int) -> Race:
    """The times of one call where a work makes several."""
    times = {name: tuple(t / calls for t in took) for name, took in found.times.items()}
    return replace(found, times=times)


def _line(process: str, data: str, graph: bool, found: Race) -> dict[str, Any]:
    names = list(found.times)
    return {
        "process": process,
        "data": data,
        "how": "compiled, in a CUDA graph" if graph else "plain calls",
        "seconds": {name: found.seconds(name) for name in names},
        "ratios": {name: {other: found.ratio(name, other) for other in names} for name in names},
    }


# ---------------------------------------------------------------- for people


def rows(record: dict[str, Any]) -> list[str]:
    """The lines of a Markdown table: milliseconds, then ratios within the run, then the paper's."""
    ways = (BY_HAND, AUTOMATIC, PAPER, COPY)
    ratios = ((AUTOMATIC, BY_HAND), (PAPER, BY_HAND), (PAPER, AUTOMATIC), (AUTOMATIC, COPY))
    heads = ["", *(f"{way}, ms" for way in ways), *(f"{a} / {b}" for a, b in ratios)]
    table = [row(heads), row(["---"] + ["---:"] * (len(heads) - 1))]
    for line in record["lines"]:
        title = f"{line['process'].upper()}, {line['data']}, {line['how']}"
        seconds = [_shown(line["seconds"].get(way), 1e3) for way in ways]
        within = [_shown(line["ratios"].get(a, {}).get(b)) for a, b in ratios]
        table.append(row([title, *seconds, *within]))
    for data, seconds in record["published"].items():
        took = [_shown(seconds.get(way), 1e3) for way in ways]
        # what the paper calls automated is its own algorithm
        took[1], took[2] = "", took[1]
        slower = _shown(seconds[AUTOMATIC] / seconds[BY_HAND])
        table.append(row([f"published: CLD, {data}", *took, "", slower, "", ""]))
    return table


def _shown(value: float | None, unit: float = 1.0) -> str:
    """Three digits, or nothing."""
    if value is None or not math.isfinite(value):
        return ""
    scaled = unit * value
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"
