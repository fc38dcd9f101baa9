"""The kernel against 80-digit arithmetic: worst relative errors of Φ and diag L, as JSON.

    python -m benchmarks.accuracy [--out results.json] [--draws 40]

Beside ours stand two usual ways in the same float64: `formed` makes Σ first and factors it after
(S⁻¹ + Φ(Σ₀ − S⁻¹)Φᵀ, exact on paper), `textbook` is the 2K×2K block exponential, Σ = C H⁻¹.
Where Cholesky fails, or ours refuses, there is no answer, and that is counted. Run from the root
of the checkout: the oracle lives with the tests.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ornstein
from benchmarks.transition import textbook
from ornstein import Constant, Cosine, Diffusion, Linear
from ornstein.provenance import provenance
from tests.families import draw, truth
from tests.truth import propagator_error, relative

TIMES = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0)
Case = tuple[Diffusion, str, float]
Way = Callable[[Diffusion, float, str], tuple[Tensor, Tensor]]


def ours(process: Diffusion, s: float, given: str) -> tuple[Tensor, Tensor]:
    """The library's kernel."""
    kernel = process.transition(s, given=given)  # type: ignore[arg-type]
    return kernel.propagator, kernel.cholesky


def formed(process: Diffusion, s: float, given: str) -> tuple[Tensor, Tensor]:
    """Σ in closed form, then Cholesky."""
    tau = process.rate_d.integral(torch.tensor(s, dtype=torch.float64))
    Phi = torch.linalg.matrix_exp(-tau * (process.Q + process.D) @ process.S)
    start = process.auxiliary.factor() if given == "x" else torch.zeros_like(Phi)
    prior = process.prior_covariance
    Sigma = prior + Phi @ (start @ start.mT - prior) @ Phi.mT
    return Phi, torch.linalg.cholesky(Sigma)


def block(process: Diffusion, s: float, given: str) -> tuple[Tensor, Tensor]:
    """The textbook way."""
    Phi, L = textbook(process, torch.tensor([s], dtype=torch.float64), given)
    return Phi[0], L[0]


def error(way: Way, case: Case, true: tuple[np.ndarray, np.ndarray]) -> float:
    """Relative error of one way in one case, infinite where its Cholesky fails."""
    process, given, s = case
    try:
        Phi, L = way(process, s, given)
    except torch.linalg.LinAlgError:
        return math.inf
    diagonal = np.diagonal(L.detach().numpy())
    if not np.isfinite(diagonal).all():
        return math.inf
    return max(
        propagator_error(Phi.detach().numpy(), true[0]), relative(diagonal, np.diagonal(true[1]))
    )


def worst(cases: Iterable[Case], rivals: bool) -> dict[str, float | int]:
    """Of each way: the worst error where it gave an answer, and how often it gave none."""
    ways: dict[str, Way] = {"ours": ours}
    if rivals:
        ways |= {"formed": formed, "textbook": block}
    errors: dict[str, list[float]] = {name: [] for name in ways}
    for case in cases:
        true = truth(case[0], case[2], case[1])
        for name, way in ways.items():
            try:
                errors[name].append(error(way, case, true))
            except ValueError as problem:  # refused with a message, rather than guessed
                if "digits" not in str(problem):
                    raise
                errors[name].append(math.inf)
    result: dict[str, float | int] = {"cases": len(errors["ours"])}
    for name, values in errors.items():
        answered = [value for value in values if math.isfinite(value)]
        result[f"{name}, worst"] = max(answered, default=0.0)
        result[f"{name}, without answer"] = len(values) - len(answered)
    return result


def presets(given: str) -> Iterable[Case]:
    for name in ("vpsde", "cld", "psld", "alda", "malda"):
        process = ornstein.PRESETS[name]()
        assert isinstance(process, Diffusion)
        yield from ((process, given, s) for s in TIMES)


def random(
    noise: tuple[str, ...],
    given: str,
    sizes: tuple[int, ...],
    times: tuple[float, ...],
    draws: int,
) -> Iterable[Case]:
    rng = np.random.default_rng(7)
    for i in range(draws):
        kind, K = noise[i % len(noise)], sizes[i % len(sizes)]
        stiffness = (1.0, 5.0, 30.0, 100.0)[i // 4 % 4]
        process = draw(rng, K, kind, full_S=bool(i % 2), stiffness=stiffness).process()
        yield from ((process, given, s) for s in times)


def two_clocks(given: str, draws: int) -> Iterable[Case]:
    rng = np.random.default_rng(8)
    rates = [
        (Linear(0.1, 20.0), Constant(5.0)),
        (Constant(5.0), Linear(0.1, 10.0)),
        (Cosine(), Linear(0.1, 20.0)),
        (Linear(0.1, 10.0), Cosine(4.0)),
    ]
    for i in range(draws):
        kind = ("full", "diagonal", "last")[i % 3]
        drawn = draw(rng, 2 + i % 2, kind, full_S=bool(i % 2), stiffness=(10.0, 50.0)[i % 2])
        rate_q, rate_d = rates[i % len(rates)]
        process = drawn.process(rate_q=rate_q, rate_d=rate_d)
        times = (1e-3, 0.1, 1.0) if kind == "last" else (1e-5, 1e-2, 1.0)
        yield from ((process, given, s) for s in times)


def run(draws: int) -> dict[str, dict[str, float | int]]:
    """All families; the keys say what was drawn."""
    many = (2, 3, 4, 5)
    full, one = ("full", "diagonal"), ("last", "one")
    result = {}
    for given in ("x", "state"):
        result[f"presets, given {given}, s ≥ 1e-5"] = worst(presets(given), True)
        result[f"random, noise in all variables, K ≤ 5, given {given}, s ≥ 1e-5"] = worst(
            random(full, given, many, TIMES, draws), True
        )
        result[f"random rates that differ, K ≤ 3, given {given}"] = worst(
            two_clocks(given, max(4, draws // 3)), False
        )
    result["random, noise in one variable, K ≤ 5, given x, s ≥ 1e-4"] = worst(
        random(one, "x", many, TIMES[1:], draws), True
    )
    result["random, noise in one variable, K = 3, given state, s ≥ 1e-3"] = worst(
        random(one, "state", (3,), TIMES[2:], draws), True
    )
    result["random, noise in one variable, K ≤ 5, given state, s ≥ 1e-5"] = worst(
        random(one, "state", many, TIMES, draws), True
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="where to write the JSON")
    parser.add_argument("--draws", type=int, default=40, help="random processes per family")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = run(options.draws)
    for name, figures in result.items():
        print(name)
        for what, value in figures.items():
            shown = f"{value:10.1e}" if isinstance(value, float) else f"{value:10d}"
            print(f"    {what:26s} {shown}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"provenance": provenance(), "stiffness": "1 to 100", "errors": result}
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
