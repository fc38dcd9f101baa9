"""The automatic kernel against its rivals, measured in one run: ratios on the screen, JSON on disk.

    python -m benchmarks.transition [--out results.json] [--quick] [--sample]

Rivals: (a) the CLD kernel derived by hand, (b) the textbook way, `torch.linalg.matrix_exp` of the
2K×2K block followed by `torch.linalg.cholesky`. Contenders are timed in alternation, round after
round, and the median of the per-round ratios is reported, so that a noisy machine disturbs both.
On a GPU each is captured in a CUDA graph where it can be, and times are of replays.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import ornstein
from ornstein import compiling, gpu
from ornstein.bench.kernels import by_hand, sampled_by_hand
from ornstein.clock import Clock
from ornstein.gpu import noise
from ornstein.provenance import provenance

CIFAR = (3, 32, 32)
Work = Callable[[], object]


# ---------------------------------------------------------------------------------- the rivals


def textbook(process: ornstein.Diffusion, s: Tensor, given: str = "x") -> tuple[Tensor, Tensor]:
    """exp of [[A, GGᵀ], [0, −Aᵀ]]·τ applied to (Σ₀, I), Σ = C H⁻¹, then Cholesky; float64."""
    Q, D, S, K = process.Q, process.D, process.S, process.n_vars
    tau = process.rate_d.integral(s)
    A, noise = -(Q + D) @ S, 2 * D
    top = torch.cat([A, noise], 1)
    bottom = torch.cat([torch.zeros_like(A), -A.mT], 1)
    block = torch.linalg.matrix_exp(tau[:, None, None] * torch.cat([top, bottom]))
    start = process.auxiliary.factor() * (given == "x")
    start = torch.cat([start @ start.mT, torch.eye(K, dtype=A.dtype, device=A.device)])
    C, H = (block @ start).chunk(2, 1)
    Sigma = torch.linalg.solve(H, C, left=False)
    return block[:, :K, :K], torch.linalg.cholesky((Sigma + Sigma.mT) / 2)


# ---------------------------------------------------------------------------------- measuring


def captured(work: Work) -> Work:
    """The same work as a replayed CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def timed(work: Work, repeats: int, cuda: bool) -> float:
    """Seconds per call."""
    if cuda:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
    begin_s = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - begin_s) / repeats


def race(works: dict[str, Work], cuda: bool, rounds: int, budget: float = 0.02) -> dict[str, float]:
    """Median seconds per call of each, and under "A / B" the median of the per-round ratios."""
    repeats = {}
    for name, work in works.items():
        for _ in range(5):
            work()
        repeats[name] = max(1, int(budget / max(timed(work, 3, cuda), 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(timed(work, repeats[name], cuda))
    result = {name: statistics.median(t) for name, t in times.items()}
    first = next(iter(works))
    for name in list(works)[1:]:
        ratios = [a / b for a, b in zip(times[first], times[name], strict=True)]
        result[f"{first} / {name}"] = statistics.median(ratios)
    return result


def times_for(batch: int, device: torch.device) -> Tensor:
    """Times spread over the horizon, away from where the textbook way fails."""
    generator = torch.Generator().manual_seed(0)
    s = 0.02 + 0.98 * torch.rand(batch, dtype=torch.float64, generator=generator)
    return s.to(device)


def backward_of(process: ornstein.Diffusion, kernel: Callable[[], tuple[Tensor, Tensor]]) -> Work:
    """Forward, then the gradient of a sum of squares to all parameters."""
    parameters = list(process.parameters())

    def work() -> object:
        Phi, L = kernel()
        return torch.autograd.grad(Phi.square().sum() + L.square().sum(), parameters)

    return work


def kernel_of(process: ornstein.Diffusion, s: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """The automatic kernel as (Φ, L)."""

    def work() -> tuple[Tensor, Tensor]:
        kernel = process.transition(s)
        return kernel.propagator, kernel.cholesky

    return work


# ---------------------------------------------------------------------------------- the races


def race_hand_derived(device: torch.device, rounds: int, batch: int = 256) -> dict[str, float]:
    """Transition and sample of CIFAR-shaped images for CLD."""
    cuda = device.type == "cuda"
    process, s = ornstein.cld().to(device), times_for(batch, device)
    x = torch.randn(batch, *CIFAR, device=device)
    response, factor = by_hand(s)
    kernel = process.transition(s)
    worst = max(
        float((kernel.response - response).abs().max()),
        float((kernel.cholesky - factor).abs().max()),
    )
    if worst > 1e-8:  # the formula by hand cancels at short times: 7e-10 at s = 0.02
        raise ValueError(f"the hand-derived kernel differs by {worst:g}; expected < 1e-8.")
    works: dict[str, Work] = {
        "automatic": lambda: process.transition(s).sample(x),
        "hand-derived": lambda: sampled_by_hand(s, x),
    }
    if cuda:
        torch._dynamo.reset()
        compiled = compiling.compiled(lambda s, x: process.transition(s).sample(x), fullgraph=True)
        compiled_by_hand = compiling.compiled(sampled_by_hand, fullgraph=True)
        works = {"automatic, compiled": lambda: compiled(s, x), **works}
        works["hand-derived, compiled"] = lambda: compiled_by_hand(s, x)
        # the least that any of them can do: write y, and write y and its noise
        source = torch.randn(2, batch, 2, *CIFAR, device=device)
        out = torch.empty_like(source)
        works["copy of y"] = lambda: out[0].copy_(source[0])
        works["copy of y and its noise"] = lambda: out.copy_(source)
        works = {name: captured(work) for name, work in works.items()}
    return race(works, cuda, rounds)


def race_matrices(device: torch.device, rounds: int, batch: int = 256) -> dict[str, float]:
    """The matrices of CLD alone, without a sample."""
    cuda = device.type == "cuda"
    process, s = ornstein.cld().to(device), times_for(batch, device)
    automatic = kernel_of(process, s)
    works: dict[str, Work] = {"automatic": automatic, "hand-derived": lambda: by_hand(s)}
    if cuda:
        torch._dynamo.reset()
        compiled = compiling.compiled(automatic, fullgraph=True)
        compiled_by_hand = compiling.compiled(by_hand, fullgraph=True)
        works = {"automatic, compiled": compiled, **works}
        works["hand-derived, compiled"] = lambda: compiled_by_hand(s)
        works = {name: captured(work) for name, work in works.items()}
    return race(works, cuda, rounds)


def race_parts(
    device: torch.device, rounds: int, batch: int = 256, shape: tuple[int, ...] = CIFAR
) -> dict[str, float]:
    """The kernels that a transition and its sample are made of, each by itself; for tuning."""
    process, s = ornstein.cld().to(device), times_for(batch, device)
    x, q = torch.randn(batch, math.prod(shape), device=device), process.transition(s)
    solution, initial = process._solution(True), process.auxiliary.factor()
    assert isinstance(solution, Clock)
    tau, seed = process._clock(s), torch.zeros(1, dtype=torch.int64, device=device)
    works: dict[str, Work] = {
        "look_up": lambda: solution.at(tau, initial),
        "seed": lambda: torch.ops.ornstein.seed(seed),
    }
    operands = x, q.propagator, q.direction, q.cholesky, seed, False
    for tile in (256, 512, 1024, 2048):

        def work(tile: int = tile) -> object:
            noise.TILE = tile
            return torch.ops.ornstein.noised(*operands)

        works[f"noised, {tile} coordinates a program"] = work
    usual = noise.TILE
    if device.type == "cuda":
        works = {name: captured(work) for name, work in works.items()}
    found = race(works, device.type == "cuda", rounds)
    noise.TILE = usual
    return {name: figure for name, figure in found.items() if " / " not in name}


def race_textbook(
    device: torch.device, rounds: int, n_aux: int, batch: int, full: bool = False
) -> dict[str, dict[str, float]]:
    """A learned kernel, forward and forward + backward, against the textbook way."""
    cuda = device.type == "cuda"
    torch._dynamo.reset()  # each race compiles its own process, and there is a limit to how many
    process = ornstein.learned(n_aux, full=full).to(device)
    s = times_for(batch, device)
    automatic = kernel_of(process, s)

    def rival() -> tuple[Tensor, Tensor]:
        return textbook(process, s)

    with torch.no_grad():  # (no graph may stay alive on this stream before a capture)
        for ours, theirs in zip(automatic(), rival(), strict=True):
            worst = float((ours - theirs).abs().max())
            if worst > 1e-9:
                raise ValueError(f"the textbook kernel differs by {worst:g}; expected < 1e-9.")

    def no_grad(work: Work) -> Work:
        def inner() -> object:
            with torch.no_grad():
                return work()

        return inner

    forward: dict[str, Work] = {"automatic": no_grad(automatic), "textbook": no_grad(rival)}
    both: dict[str, Work] = {
        "automatic": backward_of(process, automatic),
        "textbook": backward_of(process, rival),
    }
    if cuda:  # the textbook way reads norms on the host and can't be captured
        compiled = compiling.compiled(automatic, fullgraph=True)
        forward = {"automatic, compiled": captured(no_grad(compiled)), **forward}
        both = {"automatic, compiled": captured(backward_of(process, compiled)), **both}
        forward["automatic"] = captured(forward["automatic"])
        both["automatic"] = captured(both["automatic"])
    return {
        "forward": race(forward, cuda, rounds),
        "forward + backward": race(both, cuda, rounds),
    }


def race_rates(device: torch.device, rounds: int, batch: int = 128) -> dict[str, dict[str, float]]:
    """Separate rates for Q and D against one, for a fixed process and for a learned one."""
    cuda = device.type == "cuda"
    s = times_for(batch, device)
    cld = ornstein.cld()
    fixed = {
        "separate rates": ornstein.Diffusion(
            cld.Q, cld.D, cld.S, rate_q=ornstein.Constant(5.0), rate_d=ornstein.Linear(0.1, 10.0)
        ).to(device),
        "one rate": cld.to(device),
    }
    learned = {
        "separate rates": ornstein.learned(2, learn_rates="separate").to(device),
        "one rate": ornstein.learned(2, learn_rates="shared").to(device),
    }
    races: dict[str, dict[str, Work]] = {
        "fixed, forward": {n: kernel_of(p, s) for n, p in fixed.items()},
        "learned, forward + backward": {
            n: backward_of(p, kernel_of(p, s)) for n, p in learned.items()
        },
    }
    if cuda:
        races = {r: {n: captured(w) for n, w in works.items()} for r, works in races.items()}
    return {name: race(works, cuda, rounds) for name, works in races.items()}


def run(device: torch.device, quick: bool, sample: bool = False) -> dict[str, object]:
    """All races on one device, or those of the transition and its sample."""
    rounds = 5 if quick else 21
    result: dict[str, object] = {
        "CLD, 256 CIFAR images, transition + sample": race_hand_derived(device, rounds),
        "CLD, batch 256, transition alone": race_matrices(device, rounds),
    }
    if device.type == "cuda" and gpu.triton is not None:
        result["CLD, the kernels of these"] = race_parts(device, rounds)
    if sample:
        return result
    cases = [(2, 128, False)]
    if not quick:
        cases += [
            (1, 128, False),
            (3, 128, False),
            (2, 1024, False),
            (2, 128, True),
            (4, 128, True),
        ]
    for n_aux, batch, full in cases:
        name = f"learned K = {n_aux + 1}{' full D' if full else ''}, batch {batch}"
        for part, figures in race_textbook(device, rounds, n_aux, batch, full).items():
            result[f"{name}, {part}"] = figures
    for part, figures in race_rates(device, rounds).items():
        result[f"separate rates, {part}"] = figures
    return result


def show(device: str, result: dict[str, object]) -> None:
    """A table on the screen."""
    print(f"\n{device}")
    for name, figures in result.items():
        print(f"  {name}")
        assert isinstance(figures, dict)
        for what, value in figures.items():
            unit = f"{value:8.3f} ×" if " / " in what else f"{value * 1e3:8.4f} ms"
            print(f"    {what:34s} {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="where to write the JSON")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a look")
    parser.add_argument("--device", choices=("all", "cpu", "cuda"), default="all")
    parser.add_argument("--sample", action="store_true", help="only CLD's transition and sample")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, object] = {"provenance": provenance()}
    if options.device in ("all", "cpu"):
        record["cpu, one thread"] = run(torch.device("cpu"), options.quick, options.sample)
        show("cpu, one thread", record["cpu, one thread"])  # type: ignore[arg-type]
    if options.device in ("all", "cuda") and torch.cuda.is_available():
        record["cuda graphs"] = run(torch.device("cuda"), options.quick, options.sample)
        show(torch.cuda.get_device_name(), record["cuda graphs"])  # type: ignore[arg-type]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
