"""`evaluate` where the cost is known: the estimate, its two errors, its parts and its curve.

Pixels are independent with a known law P, so E[x|x̃] is a softmax over levels, and the model with
it is exact. What its bound then lacks of log P(x) is known level by level: the decoder at the
truncation knows no P, and the way back starts from π instead of q_T,

    bound(x) = Σ_pixels log P(k) + E[log P(k|y_ε) − log Q(k|y_ε)] + E[log π(y_T) − log q_T(y_T)].

Gaussian data with a network that returns zero has a known error at each λ = log SNR: with u = e^−λ
and δ = x − m it is (ς⁴ + uδ²)/(ς² + u)², which the curve integrates bin by bin.

A figure is compared with the truth in units of its own error. With fixed seeds such a test always
ends the same way; three standard errors leave room for whoever changes the random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import (
    Adaptive,
    Continuous,
    Discrete,
    Evaluation,
    FixedTime,
    Importance,
    Information,
    Likelihood,
    LogSNR,
    NoiseLevel,
    Process,
    ScoreModel,
    Times,
    Tweedie,
    Uniform,
    evaluate,
)

F64 = torch.float64
LAW = torch.tensor([0.02, 0.3, 0.05, 0.13, 0.2, 0.01, 0.04, 0.25], dtype=F64)
PIXELS = Discrete(len(LAW))
SPREAD = 0.6  # about the standard deviation of such pixels; it only places the draws
STD = 0.7  # of the Gaussian data
SEEDS = 100


class Known(nn.Module):
    """The noise in x̃ for independent pixels of a known law."""

    def __init__(self, likelihood: Discrete, law: Tensor) -> None:
        super().__init__()
        self.centres, self.logs = likelihood.pixels.centres(), law.log()

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        sigma = (-logsnr.to(F64) / 2).exp().reshape(-1, *[1] * (x.dim() - 1))
        away = (x.to(F64).unsqueeze(-1) - self.centres) / sigma.unsqueeze(-1)
        mean = (self.logs - away**2 / 2).softmax(-1) @ self.centres
        return (x - mean) / sigma


class Zero(nn.Module):
    """Knows nothing but the Gaussian answer around it."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Bent(nn.Module):
    """A network that is wrong everywhere, for one variable or for all."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return 0.3 * torch.tanh(x)


def known(process: Process | None = None) -> ScoreModel:
    """The exact model of the pixels."""
    process = ornstein.vpsde() if process is None else process
    network = Known(PIXELS, LAW)
    return ScoreModel(network, process, PIXELS, data_std=SPREAD, precondition=False)


def gaussian(process: Process | None = None) -> ScoreModel:
    """The exact model of N(0, STD²)."""
    process = ornstein.vpsde() if process is None else process
    return ScoreModel(Zero(), process, Continuous(), data_std=STD)


def pixels(count: int, dims: int, seed: int = 0, law: Tensor = LAW) -> Tensor:
    """Examples of a law: (count, dims)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(law, count * dims, True, generator=generator).reshape(count, dims)


def normals(count: int, dims: int, seed: int = 0) -> Tensor:
    """Examples of N(0, STD²)."""
    return STD * torch.randn(count, dims, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ the truth


def over_noise() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of an expectation over a standard normal."""
    node, weight = np.polynomial.legendre.leggauss(400)
    node, weight = 9 * node, 9 * weight
    return node, weight * np.exp(-(node**2) / 2) / math.sqrt(2 * math.pi)


def log_normal(y: np.ndarray, mean: np.ndarray | float, std: float) -> np.ndarray:
    return -(((y - mean) / std) ** 2) / 2 - math.log(std) - math.log(2 * math.pi) / 2


def decoder_gap(sigma: float) -> np.ndarray:
    """E[log P(k|y_ε) with all levels alike − log P(k|y_ε)] for every level: (levels,)."""
    node, weight = over_noise()
    centres, law = PIXELS.pixels.centres().numpy(), LAW.numpy()
    x = centres[:, None] + sigma * node  # (level, node)
    logs = log_normal(x[..., None], centres, sigma)
    own = np.log(law)[:, None] - np.logaddexp.reduce(logs + np.log(law), -1)
    return -((np.logaddexp.reduce(logs, -1) + own) @ weight)


def prior_gap(process: Process) -> np.ndarray:
    """E[log π(y_T) − log q_T(y_T)] for every level, of a process of one variable: (levels,)."""
    assert process.n_vars == 1
    kernel = process.transition(process.horizon)
    signal, std = kernel.response.item(), kernel.cholesky.item()
    node, weight = over_noise()
    centres = PIXELS.pixels.centres().numpy()
    y = signal * centres[:, None] + std * node
    logs = log_normal(y[..., None], signal * centres, std) + np.log(LAW.numpy())
    prior = log_normal(y, 0.0, math.sqrt(process.prior_covariance.item()))
    return (prior - np.logaddexp.reduce(logs, -1)) @ weight


def cost(x: Tensor, sigma: float, process: Process) -> Tensor:
    """What the exact model's bound costs each example: (N,) bits/dim."""
    nats = LAW.log().numpy() + decoder_gap(sigma) + prior_gap(process)
    return -torch.from_numpy(nats)[x].mean(1) / math.log(2)


def curve_truth(edges: Tensor, x: Tensor) -> np.ndarray:
    """Bits/dim of Gaussian data in each bin: (bins,)."""
    node, weight = np.polynomial.legendre.leggauss(40)
    half = np.diff(edges.numpy())[:, None] / 2
    logsnr = (edges.numpy()[:-1, None] + half) + half * node
    u, square = np.exp(-logsnr), x.to(F64).square().mean().item()
    error = (STD**4 + u * square) / (STD**2 + u) ** 2
    return (0.5 * error * half) @ weight / math.log(2)


def sigma_of(model: ScoreModel) -> float:
    assert isinstance(model.truncation, NoiseLevel)
    return model.truncation.standard_error


# ------------------------------------------------------------------ the estimate


@pytest.mark.parametrize("name", ["vpsde", "subvpsde", "vesde"])
def test_the_estimate_is_the_cost(name: str) -> None:
    model = known(ornstein.PRESETS[name]())
    x = pixels(512, 12)
    truth = cost(x, sigma_of(model), model.process)
    found = evaluate(model, x, draws=8, quiet=True)
    paired = found.per_example - truth
    assert abs(paired.mean()) < 3 * paired.std() / math.sqrt(len(x))
    assert abs(found.bits_per_dim - truth.mean()) < 3 * found.draw_error
    assert found.draw_error < 0.06  # so that this says something
    plain = -LAW.log2()[x].mean().item()
    assert 0 < truth.mean() - plain < 0.01  # the bound is nearly tight


@pytest.mark.parametrize("name", ["cld", "alda", "malda"])
def test_the_estimate_is_the_cost_with_auxiliary_variables(name: str) -> None:
    """What the prior costs is between nothing and its KL, which is small."""
    model = known(ornstein.PRESETS[name]())
    x = pixels(512, 12)
    nats = LAW.log().numpy() + decoder_gap(sigma_of(model))
    truth = -torch.from_numpy(nats)[x].mean(1) / math.log(2)
    found = evaluate(model, x, draws=8, quiet=True)
    paired = found.per_example - truth
    assert abs(paired.mean()) < 3 * paired.std() / math.sqrt(len(x)) + found.prior
    assert 0 < found.prior < 0.01


@pytest.mark.parametrize("times", [None, LogSNR(), Importance()], ids=["fitted", "λ", "s"])
def test_parts_and_bins_sum_to_the_whole(times: Times | None) -> None:
    found = evaluate(known(ornstein.cld()), pixels(64, 6), times=times, quiet=True)
    parts = found.prior + found.diffusion + found.reconstruction
    assert parts == pytest.approx(found.bits_per_dim, rel=1e-12)
    assert found.curve.bits.sum().item() == pytest.approx(found.diffusion, rel=1e-12)
    assert found.per_example.mean().item() == pytest.approx(found.bits_per_dim, rel=1e-12)


def test_bins_sum_to_the_diffusion_given_the_state() -> None:
    """As `Curve` says; here a part of the diffusion is a closed form."""
    found = evaluate(known(ornstein.cld()), pixels(64, 6), given="state", quiet=True)
    assert found.curve.bits.sum().item() == pytest.approx(found.diffusion, rel=1e-12)


def test_examples_are_in_order() -> None:
    """The cost of an example rises with its size, by more than its draws differ."""
    x = torch.linspace(0.5, 3, 6).unsqueeze(-1).expand(6, 256).contiguous()
    found = evaluate(gaussian(), x, draws=64, quiet=True)
    assert torch.equal(found.per_example.argsort(), torch.arange(6))
    turned = evaluate(gaussian(), x.flip(0), draws=64, quiet=True)
    assert torch.equal(turned.per_example.argsort(), torch.arange(6).flip(0))


@pytest.mark.parametrize(
    ("times", "name"),
    [(None, "vpsde"), (LogSNR(), "cld"), (Importance(), "cld")],
    ids=["fitted", "λ", "s"],
)
def test_the_curve_is_the_integral_of_each_bin(times: Times | None, name: str) -> None:
    x = normals(256, 4)
    model = gaussian(ornstein.PRESETS[name]())
    found = evaluate(model, x, draws=16, times=times, curve_bins=12, quiet=True)
    truth = curve_truth(found.curve.logsnr, x)
    assert np.abs((found.curve.bits.numpy() - truth) / found.curve.errors.numpy()).max() < 3


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda"])
def test_what_is_expected_is_put_into_the_right_bin(name: str) -> None:
    """Many examples have small errors; deviations are still of their size, in forty bins."""
    x = normals(1500, 16)
    found = evaluate(gaussian(ornstein.PRESETS[name]()), x, draws=8, quiet=True)
    truth = curve_truth(found.curve.logsnr, x)
    away = (found.curve.bits.numpy() - truth) / found.curve.errors.numpy()
    assert len(away) == 40 and np.sqrt(np.mean(away**2)) < 1.35  # 1, known to 11 %


@pytest.mark.parametrize("truncation", [None, NoiseLevel(0.05), FixedTime(0.01)], ids=str)
def test_the_curve_spans_the_bound(truncation: NoiseLevel | FixedTime | None) -> None:
    model, x = gaussian(), normals(16, 2)
    found = evaluate(model, x, truncation=truncation, curve_bins=7, quiet=True)
    start = (model.truncation if truncation is None else truncation).time(model.process)
    ends = [model.process.transition(s).snr.log().item() for s in (model.process.horizon, start)]
    edges = found.curve.logsnr
    assert edges[[0, -1]].tolist() == pytest.approx(ends, rel=1e-9)
    assert bool((edges.diff() > 0).all())
    assert found.curve.bits.shape == found.curve.errors.shape == (7,)


def test_mere_noise_is_one_bin_of_the_curve() -> None:
    """Twice as long as usual, CLD ends at a log SNR of −72; its bits are all above −8."""
    x = normals(256, 4)
    found = evaluate(gaussian(ornstein.cld(horizon=2.0)), x, draws=16, curve_bins=12, quiet=True)
    edges, truth = found.curve.logsnr, curve_truth(found.curve.logsnr, x)
    assert edges[0] < -72 and -9 < edges[1] < -4
    assert edges[1:].diff().numpy() == pytest.approx((edges[-1] - edges[1]).item() / 11)
    assert np.abs((found.curve.bits.numpy() - truth) / found.curve.errors.numpy()).max() < 3
    assert truth[0] < 0.001 * truth.sum()
    assert found.curve.bits.sum().item() == pytest.approx(found.diffusion, rel=1e-12)


# ------------------------------------------------------------------ the errors


def size_of_error(model: ScoreModel, x: Tensor, truth: float, **options: object) -> float:
    """Root mean square over seeds of (estimate − truth)/draw_error."""
    away = []
    for seed in range(SEEDS):
        found = evaluate(model, x, seed=seed, quiet=True, **options)  # type: ignore[arg-type]
        away.append((found.bits_per_dim - truth) / found.draw_error)
    return float(np.sqrt(np.mean(np.square(away))))


ERRORS = [
    pytest.param(None, {"draws": 4}, id="fitted"),
    pytest.param(Information(), {"draws": 2}, id="two-draws"),
    pytest.param(LogSNR(), {"draws": 4}, id="λ"),
    pytest.param(Information(spread="independent"), {"draws": 4}, id="independent"),
    pytest.param(
        Information(), {"draws": 1, "target_error": 1e-9, "max_draws": 4}, id="passes-of-one"
    ),
    pytest.param(
        Information(),
        {"draws": 2, "target_error": 1e-9, "max_draws": 6},
        id="passes-of-two",
        marks=pytest.mark.slow,
    ),
    pytest.param(Importance(), {"draws": 4}, id="s", marks=pytest.mark.slow),
    pytest.param(Uniform(), {"draws": 8}, id="uniform", marks=pytest.mark.slow),
    pytest.param(None, {"draws": 16}, id="many-draws", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("times", "options"), ERRORS)
def test_the_error_of_draws_is_honest(times: Times | None, options: dict[str, object]) -> None:
    """Not too small, and not so large that it says nothing.

    Independent draws have an error of size 1, which 100 seeds know to 7 %; others a smaller one.
    """
    model, x = known(), pixels(64, 12)
    truth = cost(x, sigma_of(model), model.process).mean().item()
    assert 0.2 < size_of_error(model, x, truth, times=times, **options) < 1.2


@pytest.mark.parametrize(
    "options",
    [{"draws": 2}, {"draws": 4}, {"draws": 1, "target_error": 1e-9, "max_draws": 4}],
    ids=["two", "four", "passes-of-one"],
)
def test_the_error_of_antithetic_draws_is_honest(options: dict[str, object]) -> None:
    """u and 1 − u agree where the integrand is symmetric, and then say nothing about their error.

    Pixels of two levels cost something around one λ only: a bump, here in the middle of the span.
    An error that a single pair can't know may be NaN.
    """
    law, likelihood = torch.tensor([0.5, 0.5], dtype=F64), Discrete(2)
    model = ScoreModel(
        Known(likelihood, law),
        ornstein.vpsde(),
        likelihood,
        data_std=0.5,
        precondition=False,
        truncation=NoiseLevel(math.exp(-6.2)),
    )
    x, times = pixels(16, 256, law=law), LogSNR(spread="antithetic")
    found = [
        evaluate(model, x, seed=seed, times=times, quiet=True, **options)  # type: ignore[arg-type]
        for seed in range(SEEDS)
    ]
    claimed = np.mean([f.draw_error**2 for f in found])
    if not math.isnan(claimed):
        assert math.sqrt(np.mean([(f.bits_per_dim - 1) ** 2 for f in found]) / claimed) < 1.2


def redrawn(times: Times | None, draws: int) -> Iterator[Evaluation]:
    """The same evaluation of ever new data."""
    for seed in range(SEEDS):
        yield evaluate(
            known(), pixels(64, 12, seed), seed=seed, times=times, draws=draws, quiet=True
        )


@pytest.mark.parametrize(
    ("times", "draws"), [(None, 4), (Information(), 1)], ids=["fitted", "one-draw"]
)
def test_the_standard_error_covers_the_mean_over_all_data(times: Times | None, draws: int) -> None:
    """95 % of ± 2 standard errors do, if it is exact; of 100 between 90 % and all."""
    model = known()
    everything = torch.arange(len(LAW)).unsqueeze(-1)
    truth = (cost(everything, sigma_of(model), model.process) @ LAW).item()
    away = [(f.bits_per_dim - truth) / f.standard_error for f in redrawn(times, draws)]
    assert 0.9 <= np.mean(np.abs(away) < 2) <= 1


def test_the_errors_of_the_curve_cover_the_data_given() -> None:
    """Over seeds, for the same data: a bin's error is not too small."""
    x, away = normals(64, 2), []
    for seed in range(40):
        found = evaluate(
            gaussian(), x, seed=seed, draws=16, times=LogSNR(), curve_bins=6, quiet=True
        )
        truth = curve_truth(found.curve.logsnr, x)
        away.append((found.curve.bits.numpy() - truth) / found.curve.errors.numpy())
    assert np.sqrt(np.mean(np.square(away))) < 1.1


def test_the_errors_of_the_curve_cover_the_mean_over_all_data() -> None:
    """Many draws of few examples: a standard error knows that they share their examples."""
    whole = torch.full((1, 1), STD)  # whose square is the mean
    away = []
    for seed in range(40):
        x = normals(64, 2, seed)  # of few, skewed ones even the right error has long tails
        found = evaluate(
            gaussian(), x, seed=seed, draws=64, times=LogSNR(), curve_bins=8, quiet=True
        )
        truth = curve_truth(found.curve.logsnr, whole)
        away.append((found.curve.bits.numpy() - truth) / found.curve.errors.numpy())
    # of size 1 if they do, which 40 redraws know to 11 %
    assert np.sqrt(np.mean(np.square(away), 0)).max() < 1.35


def test_a_bin_that_was_never_seen_has_no_error_of_zero() -> None:
    found = evaluate(gaussian(), normals(8, 2), draws=1, times=LogSNR(), curve_bins=40, quiet=True)
    assert not bool((found.curve.errors == 0).any())


def test_many_passes_over_few_examples_have_an_honest_error() -> None:
    """Places of further passes go between those before, so that neighbours see all that is left."""
    x, found = normals(8, 32), []
    options: dict[str, Any] = {"draws": 1, "target_error": 1e-9, "max_draws": 24, "quiet": True}
    for seed in range(40):
        found.append(evaluate(gaussian(), x, seed=seed, times=LogSNR(), **options))
    real = np.std([result.bits_per_dim for result in found])
    claimed = np.sqrt(np.mean([result.draw_error**2 for result in found]))
    assert 0.6 <= real / claimed <= 1.35  # 40 seeds know it to 11 %


def test_one_draw_has_no_error_of_draws() -> None:
    found = evaluate(known(), pixels(16, 6), draws=1, quiet=True)
    assert math.isnan(found.draw_error)
    assert found.draws == 1
    assert "from draws alone" not in found.line
    assert "1 draw × 16 examples" in found.line
    assert "nan" not in found.line


def test_passes_of_one_draw_have_one() -> None:
    found = evaluate(known(), pixels(16, 6), draws=1, target_error=1e-9, max_draws=5, quiet=True)
    assert found.draws == 5
    assert 0 < found.draw_error < 1
    assert "from draws alone" in found.line


# ------------------------------------------------------------------ no proposal matters


PROPOSALS: dict[str, Times | None] = {
    "fitted": None,
    "uniform": Uniform(),
    "importance": Importance(),
    "of another": Importance(ornstein.vpsde()),
    "logsnr": LogSNR(),
    "information": Information(),
    "independent": Information(spread="independent"),
    "antithetic": Information(spread="antithetic"),
    "adaptive": Adaptive(LogSNR(), bins=8),
}
LIKELIHOODS: dict[str, Likelihood] = {
    "discrete": Discrete(8),
    "tweedie": Tweedie(8),
    "logit": Tweedie(8, logit=0.05),
    "continuous": Continuous(),
}


def over_seeds(model: ScoreModel, x: Tensor, seeds: int, **options: object) -> tuple[float, float]:
    """Mean and standard error of the mean."""
    found = [
        evaluate(model, x, seed=seed, quiet=True, **options).bits_per_dim  # type: ignore[arg-type]
        for seed in range(seeds)
    ]
    return float(np.mean(found)), float(np.std(found, ddof=1) / math.sqrt(seeds))


def check_all_agree(found: dict[str, tuple[float, float]]) -> None:
    """Each pair within three standard errors of its difference."""
    for one, (mean, error) in found.items():
        for other, (second, its_error) in found.items():
            size = math.hypot(error, its_error)
            assert abs(mean - second) < 3 * size, f"{one} and {other}: {mean} and {second}, ±{size}"


QUICK = [("discrete", "channel")]
OTHERS = [
    (likelihood, parametrisation)
    for likelihood in LIKELIHOODS
    for parametrisation in ("channel", "joint")
    if (likelihood, parametrisation) not in QUICK
]


@pytest.mark.parametrize(
    ("likelihood", "parametrisation"),
    [
        *QUICK,
        *(
            pytest.param(*case, marks=pytest.mark.slow if "joint" in case else pytest.mark.long)
            for case in OTHERS
        ),
    ],
)
def test_every_proposal_has_the_same_mean(likelihood: str, parametrisation: str) -> None:
    kind = LIKELIHOODS[likelihood]
    x = normals(16, 3) if isinstance(kind, Continuous) else pixels(16, 3)
    model = ScoreModel(
        Bent(),
        ornstein.cld(),
        kind,
        parametrisation,  # type: ignore[arg-type]
        data_std=SPREAD,
        truncation=NoiseLevel(0.04),
    )
    found = {
        name: over_seeds(model, x, 16, times=times, draws=6) for name, times in PROPOSALS.items()
    }
    found["given the state"] = over_seeds(model, x, 16, given="state", draws=6)
    check_all_agree(found)


@pytest.mark.parametrize("likelihood", ["discrete", "tweedie", "continuous"])
def test_channel_and_joint_have_the_same_mean(likelihood: str) -> None:
    """Where both networks return zero, both models give the Gaussian answer."""
    kind = LIKELIHOODS[likelihood]
    x = normals(16, 3) if isinstance(kind, Continuous) else pixels(16, 3)
    level = NoiseLevel(0.04)
    found = {
        name: over_seeds(
            ScoreModel(Zero(), ornstein.cld(), kind, name, data_std=SPREAD, truncation=level), x, 12
        )
        for name in ("channel", "joint")
    }
    check_all_agree(found)
