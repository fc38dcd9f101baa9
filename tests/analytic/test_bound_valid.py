"""The bound is one: on data of known entropy no network, process or truncation gets below it.

Examples are drawn from a law with known P(x), so that −log₂P(x) of the very same examples is what
a bound must not beat: compared example by example, the data's own variance cancels. A bound may
fall below by chance, by three standard errors of that difference at most.

Where pixels are independent, or a Markov chain, the best denoiser is a closed form. With it the
discrete bound is as tight as its parts allow, and these are one-dimensional integrals:

    bits − H = KL(q(y_T) ‖ π) + E KL(P(k | y_ε) ‖ flat P(k | y_ε)),   per pixel,

the prior's part and the decoder's, which does not know the pixels' own law.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import (
    Adaptive,
    Bound,
    Counted,
    Discrete,
    FixedTime,
    Importance,
    Likelihood,
    NoiseLevel,
    Process,
    ScoreModel,
    Times,
    Tweedie,
    elbo,
    mism,
)
from ornstein.likelihood import Pixels
from ornstein.truncation import Truncation
from tests.conformance.zoo import ZOO
from tests.families import draw

F64 = torch.float64
PMF4 = (0.1, 0.55, 0.05, 0.3)
PMF16 = tuple((1 + 9 * math.sin(1.3 * k) ** 2) / 88.5 for k in range(16))
SIZE = 12.0  # of the integrals over ε, in standard deviations
BINS = [1 / 20, 1 / 6, 1 / 2, 2.0]  # truncations, in bins


# ---------------------------------------------------------------- data of known law


@dataclass(frozen=True)
class Known:
    """Examples and what each of them costs."""

    x: Tensor  # (B, *shape) pixels
    nats: Tensor  # (B,) log P(x)
    levels: int

    def bits(self) -> Tensor:
        """−log₂ P(x) per pixel: (B,)."""
        return -self.nats / (self.x[0].numel() * math.log(2))


def normalised(weights: tuple[float, ...]) -> Tensor:
    pmf = torch.tensor(weights, dtype=F64)
    return pmf / pmf.sum()


def independent(weights: tuple[float, ...], size: int, dims: int = 8, seed: int = 0) -> Known:
    """Pixels that are drawn one by one."""
    generator, pmf = torch.Generator().manual_seed(seed), normalised(weights)
    x = torch.multinomial(pmf, size * dims, True, generator=generator).reshape(size, dims)
    return Known(x, pmf.log()[x].sum(1), len(pmf))


CHAIN = torch.tensor(
    [[0.8, 0.1, 0.05, 0.05], [0.2, 0.7, 0.05, 0.05], [0.0, 0.1, 0.85, 0.05], [0.3, 0.0, 0.0, 0.7]],
    dtype=F64,
)
FIRST = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=F64)


def chained(size: int, dims: int = 8, seed: int = 0) -> Known:
    """A Markov chain along the pixels."""
    generator = torch.Generator().manual_seed(seed)
    states = [torch.multinomial(FIRST, size, True, generator=generator)]
    nats = FIRST.log()[states[0]]
    for _ in range(dims - 1):
        rows = CHAIN[states[-1]]
        states.append(torch.multinomial(rows, 1, generator=generator).squeeze(1))
        nats = nats + rows.gather(1, states[-1].unsqueeze(1)).squeeze(1).log()
    return Known(torch.stack(states, 1), nats, 4)


def uniform_bytes(size: int, dims: int = 16, seed: int = 0) -> Known:
    """Noise of eight bits a pixel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (size, dims), dtype=torch.uint8, generator=generator)
    return Known(x, torch.full((size,), -dims * math.log(256), dtype=F64), 256)


# ---------------------------------------------------------------- networks


class Zero(nn.Module):
    """Nothing on top of the Gaussian answer."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Mixer(nn.Module):
    """A small MLP of so many numbers at a time, and of the time; wide awake from the start."""

    def __init__(self, dims: int, gain: float = 1.5, seed: int = 0) -> None:
        super().__init__()
        self.dims = dims
        self.into, self.out = nn.Linear(dims + 2, 48), nn.Linear(48, dims)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(gain * noise / math.sqrt(parameter.shape[-1]))

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        groups = x.reshape(len(x), -1, self.dims)
        time = torch.stack([logsnr / 8, torch.sin(logsnr / 2)], -1).unsqueeze(1)
        inside = torch.cat([groups, time.expand(*groups.shape[:2], 2)], -1)
        return self.out(torch.nn.functional.silu(self.into(inside))).reshape(x.shape)


class InFloat64(nn.Module):
    """A network without weights that wants float64."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Parameter(torch.zeros((), dtype=F64), requires_grad=False)


class Points(InFloat64):
    """The best denoiser of independent pixels: E[ε | x̃] of a law on points."""

    def __init__(self, points: Tensor, pmf: Tensor) -> None:
        super().__init__()
        self.points, self.logs = points, pmf.log()

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        away = (x.unsqueeze(-1) - self.points) * widen(logsnr.div(2).exp(), x).unsqueeze(-1)
        chance = torch.softmax(self.logs - away.square() / 2, -1)
        return (chance * away).sum(-1)


class Chain(InFloat64):
    """The best denoiser of the Markov chain: forwards and backwards along the pixels."""

    def __init__(self, points: Tensor) -> None:
        super().__init__()
        self.points = points

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        away = (x.unsqueeze(-1) - self.points) * widen(logsnr.div(2).exp(), x).unsqueeze(-1)
        seen = -away.square() / 2  # (B, d, levels)
        log, dims = CHAIN.log(), x.shape[1]
        before, after = [FIRST.log() + seen[:, 0]], [torch.zeros_like(seen[:, 0])]
        for j in range(1, dims):
            before.append(torch.logsumexp(before[-1].unsqueeze(-1) + log, 1) + seen[:, j])
            after.append(torch.logsumexp(log + (seen[:, dims - j] + after[-1]).unsqueeze(1), -1))
        logs = torch.stack(before, 1) + torch.stack(after[::-1], 1)
        return (torch.softmax(logs, -1) * away).sum(-1)


class Flat(InFloat64):
    """The best denoiser of dequantised independent pixels, centred: a density of steps."""

    def __init__(self, pmf: Tensor) -> None:
        super().__init__()
        self.pmf = pmf
        self.edges = 2 * torch.arange(len(pmf) + 1, dtype=F64) / len(pmf) - 1

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        away = (self.edges - x.unsqueeze(-1)) * widen(logsnr.div(2).exp(), x).unsqueeze(-1)
        density = torch.exp(-away.square() / 2) / math.sqrt(2 * math.pi)
        mass = (torch.special.ndtr(away).diff() * self.pmf).sum(-1).clamp(min=1e-300)
        return (density.diff() * self.pmf).sum(-1) / mass


def fine_points(pixels: Pixels, pmf: Tensor, parts: int) -> Points:
    """The same for any map, with each bin as many points: best while σ is wider than their gaps."""
    place = (torch.arange(len(pmf) * parts, dtype=F64) + 0.5) / (len(pmf) * parts)
    return Points(pixels.at(place), pmf.repeat_interleave(parts) / parts)


class Joint(nn.Module):
    """A channel model's answer for all variables; the time is found from its noise level."""

    def __init__(self, model: ScoreModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
        s = self.model.process.time_of_noise((-logsnr / 2).exp())
        return self.model.noise(y, s)


class Preconditioned(InFloat64):
    """What a network must return on top of the Gaussian answer for another one's answer."""

    def __init__(self, answer: nn.Module, mean: float, std: float) -> None:
        super().__init__()
        self.answer, self.mean, self.std = answer, mean, std

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        sigma = widen((-logsnr / 2).exp(), x)
        wide = (self.std**2 + sigma**2).sqrt()
        noisy = x * wide + self.mean
        return wide / self.std * (self.answer(noisy, logsnr) - sigma * x / wide)


def widen(value: Tensor, like: Tensor) -> Tensor:
    """(B,) over the data."""
    return value.reshape(-1, *[1] * (like.dim() - 1))


# ---------------------------------------------------------------- processes


def random_process(seed: int, K: int, noise: str) -> Process:
    """A random one, with noise in all variables or in one."""
    drawn = draw(np.random.default_rng(seed), K, noise, True, stiffness=25.0)
    return drawn.process(v0_variance=0.1, name=f"random-{seed}")


PROCESSES: dict[str, Callable[[], Process]] = {
    **ornstein.PRESETS,
    **{name: ZOO[name] for name in ("learned-0", "learned-1", "learned-2", "learned-2-full")},
    **{name: ZOO[name] for name in ("coupled-v0", "linear-sde", "cosine-against-linear")},
    "random-2": lambda: random_process(1, 2, "last"),
    "random-3": lambda: random_process(2, 3, "full"),
}


@cache
def process_of(name: str) -> Process:
    return PROCESSES[name]()


# ---------------------------------------------------------------- comparing


def bound_of(
    model: ScoreModel,
    x: Tensor,
    draws: int,
    given: str = "x",
    implicit: bool = False,
    times: Times | None = None,
    seed: int = 7,
) -> Bound:
    random = Counted(seed, torch.arange(len(x)))
    with torch.no_grad():
        if implicit:
            return mism(model, x, draws=draws, times=times, random=random)
        return elbo(model, x, draws=draws, times=times, given=given, random=random)  # type: ignore[arg-type]


def fitted(model: ScoreModel, x: Tensor, **options: object) -> Adaptive:
    """A proposal for times that knows where this model errs, then fixed: many times fewer draws."""
    base = Importance() if options.get("given") == "state" else None
    if model.parametrisation == "joint":
        base = Importance()
    times = Adaptive(base, bins=32, decay=0.9)
    for seed in range(6):
        bound_of(model, x[:64], 16, times=times, seed=100 + seed, **options)  # type: ignore[arg-type]
    return times.eval()


def excess(
    model: ScoreModel, data: Known, draws: int = 4, fit: bool = False, **options: object
) -> tuple[float, float]:
    """Mean of bits_per_dim + log₂P(x)/dims over the examples, and its standard error.

    The draws of an example are strata of one lattice, so that the error is, if anything, too large.
    """
    times = fitted(model, data.x, **options) if fit else None
    bound = bound_of(model, data.x, draws, times=times, **options)  # type: ignore[arg-type]
    difference = bound.bits_per_dim - data.bits()
    assert bool(difference.isfinite().all())
    return float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))


def check_valid(model: ScoreModel, data: Known, **options: object) -> None:
    mean, error = excess(model, data, **options)  # type: ignore[arg-type]
    assert mean >= -3 * error, f"{mean:.4f} ± {error:.4f} bits/dim below the entropy"


def model_of(
    network: nn.Module,
    process: Process,
    likelihood: Likelihood,
    data: Known,
    truncation: Truncation | None,
    parametrisation: str = "channel",
    precondition: bool = True,
) -> ScoreModel:
    mean, std = likelihood.moments(data.x)
    return ScoreModel(
        network,
        process,
        likelihood,
        parametrisation,  # type: ignore[arg-type]
        mean,
        std,
        truncation,
        precondition=precondition,
    )


# ---------------------------------------------------------------- the tight value, by quadrature


def log_sums(points: Tensor, log_weights: Tensor, pmf: Tensor, sigma: float) -> float:
    """Σ_k p_k E log Σ_j w_j exp(−(x̃ − x_j)²/2σ² + ε²/2) at x̃ = x_k + σε.

    By the trapezoidal rule, which converges exponentially: to 1e-12 with this step.
    """
    eps = torch.linspace(-SIZE, SIZE, 241, dtype=F64)
    density = torch.exp(-eps.square() / 2) / math.sqrt(2 * math.pi) * (eps[1] - eps[0])
    total = 0.0
    for point, chance in zip(points, pmf, strict=True):
        away = ((point - points) / sigma).unsqueeze(-1)  # (levels, 1)
        logs = torch.logsumexp(log_weights.unsqueeze(-1) - away * (away / 2 + eps), 0)
        total += float(chance * (logs * density).sum())
    return total


def prior_part(process: Process, power: float) -> float:
    """E KL(q(y_T|x) ‖ π) per pixel, with E x² = power: the formula for two Gaussians."""
    with torch.no_grad():
        kernel = process.transition(process.horizon)
        precision = torch.linalg.inv(process.prior_covariance)
        response, covariance = kernel.response, kernel.covariance
        fit = torch.trace(precision @ covariance) + power * (response @ precision @ response)
        volume = torch.logdet(process.prior_covariance) - torch.logdet(covariance)
    return float(fit - process.n_vars + volume) / 2


def tight_excess(model: ScoreModel, pmf: Tensor) -> float:
    """What the discrete bound with the best denoiser costs above the entropy: bits per pixel."""
    process, likelihood = model.process, model.likelihood
    assert isinstance(likelihood, Discrete)
    points, flat = likelihood.pixels.centres(), torch.zeros(len(pmf), dtype=F64)
    with torch.no_grad():
        ends = [model.truncation.time(process), process.horizon]
        first, last = (float(process.transition(s).snr.rsqrt()) for s in ends)
    # E log q(y|x)/q(y) at either end, and E log P(k | y_ε) of the flat decoder
    known = [-log_sums(points, pmf.log(), pmf, sigma) for sigma in (first, last)]
    decoder = -log_sums(points, flat, pmf, first)
    prior = prior_part(process, float((pmf * points.square()).sum()))
    nats = -prior + known[1] - known[0] + decoder
    return (-nats + float((pmf * pmf.log()).sum())) / math.log(2)


def check_tight(model: ScoreModel, data: Known, pmf: Tensor, **options: object) -> None:
    mean, error = excess(model, data, **options)  # type: ignore[arg-type]
    expected = tight_excess(model, pmf)
    assert expected >= -1e-12
    assert abs(mean - expected) <= 3 * error, f"{mean:.4f} ± {error:.4f}, not {expected:.4f}"


def best(process: Process, likelihood: Discrete, data: Known, pmf: Tensor, cut: Truncation):
    """The discrete bound's best model of independent pixels."""
    network = Points(likelihood.pixels.centres(), pmf)
    return model_of(network, process, likelihood, data, cut, precondition=False)


def cuts(likelihood: Discrete | Tweedie) -> list[Truncation]:
    """From a twentieth of a bin to two of them, and two times."""
    finest = likelihood.pixels.finest()
    return [*(NoiseLevel(finest * part) for part in BINS), FixedTime(1e-3), FixedTime(0.03)]


def test_the_quadrature() -> None:
    """Of two points with σ → 0 and σ → ∞: one bit is known, or none."""
    points, half = torch.tensor([-1.0, 1.0], dtype=F64), torch.full((2,), 0.5, dtype=F64)
    for sigma, bits in ((0.02, 1.0), (1e5, 0.0)):
        known = -log_sums(points, half.log(), half, sigma) / math.log(2)
        assert math.isclose(known, bits, abs_tol=1e-9)
    table = Discrete(4).table(torch.tensor(0.13, dtype=F64))
    pmf, zeros = normalised(PMF4), torch.zeros(4, dtype=F64)
    found = -log_sums(Discrete(4).pixels.centres(), zeros, pmf, 0.13)
    assert math.isclose(found, float((table * pmf).sum()), rel_tol=1e-11)


@pytest.mark.parametrize("name", PROCESSES)
def test_tight_for_every_process(name: str) -> None:
    """The best denoiser of pixels with four levels: no better than the quadrature, and no worse."""
    data, likelihood, pmf = independent(PMF4, 256), Discrete(4), normalised(PMF4)
    for cut in cuts(likelihood)[1::2]:
        check_tight(best(process_of(name), likelihood, data, pmf, cut), data, pmf, draws=16)


@pytest.mark.parametrize("name", PROCESSES)
def test_parts(name: str) -> None:
    """Prior and reconstruction are closed forms: exact to rounding, example by example."""
    data, likelihood, pmf = independent(PMF4, 5), Discrete(4), normalised(PMF4)
    dims, points = data.x.shape[1], likelihood.pixels.centres()
    for cut in cuts(likelihood)[1::4]:
        model = best(process_of(name), likelihood, data, pmf, cut)
        bound = bound_of(model, data.x, 2)
        with torch.no_grad():
            sigma = model.process.transition(cut.time(model.process)).snr.rsqrt()
        flat, zeros = torch.eye(4, dtype=F64), torch.zeros(4, dtype=F64)
        table = torch.tensor([-log_sums(points, zeros, row, float(sigma)) for row in flat])
        for i in range(5):
            prior = dims * prior_part(model.process, float(points[data.x[i]].square().mean()))
            assert math.isclose(float(bound.prior[i]), -prior, rel_tol=1e-7, abs_tol=1e-9)
            ending = float(table[data.x[i]].sum())
            assert math.isclose(float(bound.reconstruction[i]), ending, rel_tol=1e-6, abs_tol=1e-9)
        total = bound.prior + bound.diffusion + bound.reconstruction
        assert torch.allclose(bound.nats, total, rtol=1e-12)


@pytest.mark.parametrize("name", ["vpsde", "cld"])
def test_tight_with_many_draws(name: str) -> None:
    """The same with standard errors of 0.004 to 0.01 bits a pixel."""
    data, likelihood, pmf = independent(PMF4, 2048), Discrete(4), normalised(PMF4)
    for cut in cuts(likelihood):
        model = best(process_of(name), likelihood, data, pmf, cut)
        check_tight(model, data, pmf, draws=24, fit=True)


@pytest.mark.parametrize("logit", [None, 0.05])
@pytest.mark.parametrize("name", ["vpsde", "cld", "learned-2-full"])
def test_tight_with_sixteen_levels(name: str, logit: float | None) -> None:
    data, likelihood, pmf = independent(PMF16, 256), Discrete(16, logit), normalised(PMF16)
    for cut in cuts(likelihood)[:3]:
        model = best(process_of(name), likelihood, data, pmf, cut)
        check_tight(model, data, pmf, draws=16, fit=True)


def check_other_ways(name: str, size: int, draws: int) -> None:
    """Given the state, by implicit score matching, preconditioned, and for all variables."""
    data, likelihood, pmf = independent(PMF4, size), Discrete(4), normalised(PMF4)
    cut = NoiseLevel(likelihood.pixels.finest() / 6)
    model = best(process_of(name), likelihood, data, pmf, cut)
    check_tight(model, data, pmf, draws=draws, fit=True, given="state")
    network = Preconditioned(model.network, *likelihood.moments(data.x))
    scaled = model_of(network, model.process, likelihood, data, cut)
    check_tight(scaled, data, pmf, draws=draws, fit=True)
    check_tight(scaled, data, pmf, draws=draws // 2, fit=True, implicit=True)
    joint = model_of(Joint(model), model.process, likelihood, data, cut, "joint", False)
    check_tight(joint, data, pmf, draws=draws, fit=True)
    check_tight(joint, data, pmf, draws=draws, fit=True, given="state")


@pytest.mark.parametrize("name", ["vpsde", "cld", "learned-2-full"])
def test_tight_in_other_ways(name: str) -> None:
    """To 0.015 bits a pixel."""
    check_other_ways(name, 384, 16)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("alda", "random-3")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("malda", "coupled-v0")),
    ],
)
def test_tight_in_other_ways_with_many_draws(name: str) -> None:
    """To 0.006 bits a pixel."""
    check_other_ways(name, 2048, 24)


def test_tight_for_a_markov_chain() -> None:
    """Pixels that know each other: between the entropy and what prior and decoder may cost."""
    data, likelihood = chained(256), Discrete(4)
    points = likelihood.pixels.centres()
    power = float(points[data.x].square().mean())
    for name in ("vpsde", "cld", "alda", "random-3"):
        for part in (1 / 20, 1 / 6):
            sigma = likelihood.pixels.finest() * part
            model = model_of(
                Chain(points),
                process_of(name),
                likelihood,
                data,
                NoiseLevel(sigma),
                precondition=False,
            )
            mean, error = excess(model, data, draws=16)
            decoder = float(likelihood.reconstruction(data.x, sigma).mean()) / data.x.shape[1]
            most = (prior_part(process_of(name), power) - decoder) / math.log(2)
            assert -3 * error <= mean <= most + 3 * error


def test_eight_bits_of_noise() -> None:
    """Uniform bytes cost eight bits: with either bound, and hardly more with the best denoiser."""
    data, pmf = uniform_bytes(64), torch.full((256,), 1 / 256, dtype=F64)
    for name, part in (("vpsde", 1 / 6), ("cld", 1.0)):
        cut, likelihood = NoiseLevel(part * 2 / 256), Discrete(256)
        check_tight(best(process_of(name), likelihood, data, pmf, cut), data, pmf, draws=4)
    everything = torch.ones(1, dtype=F64)
    for name in ("vpsde", "vesde", "cld", "alda", "learned-2"):
        for part in BINS:
            cut, likelihood = NoiseLevel(part * 2 / 256), Tweedie(256)
            model = model_of(
                Flat(everything), process_of(name), likelihood, data, cut, precondition=False
            )
            mean, error = excess(model, data, draws=16)
            assert mean >= -3 * error
            if name in ("vpsde", "vesde"):  # no auxiliary variables to decode
                assert mean <= 0.05 + 3 * error  # steps at the ends, which no Gaussian follows


def test_tweedie_with_the_best_denoiser() -> None:
    """The paper's bound of dequantised pixels: valid where a model can know everything there is."""
    data, pmf = independent(PMF4, 128), normalised(PMF4)
    for name in ("vpsde", "psld", "malda", "learned-2-full", "coupled-v0", "random-2"):
        process = process_of(name)
        for cut in cuts(Tweedie(4)):
            model = model_of(Flat(pmf), process, Tweedie(4), data, cut, precondition=False)
            check_valid(model, data, draws=8)


@pytest.mark.parametrize("name", ["vpsde", "learned-1", "learned-2-full", "coupled-v0"])
def test_tweedie_gets_tight(name: str) -> None:
    """With noise in all variables and little of it at the end, dequantised pixels cost H as well.

    What is left is what Gaussians lose at the steps of the density: of order σ/bin.
    """
    data, pmf = independent(PMF4, 768), normalised(PMF4)
    for part in (1 / 20, 1 / 100):
        cut = NoiseLevel(0.5 * part)
        model = model_of(Flat(pmf), process_of(name), Tweedie(4), data, cut, precondition=False)
        mean, error = excess(model, data, draws=32, fit=True)
        assert -3 * error <= mean <= 1.5 * part + 3 * error


@pytest.mark.parametrize("name", ["vpsde", "learned-2"])
def test_tweedie_with_the_logit_map(name: str) -> None:
    """The same through the logit map, whose volume counts."""
    data, pmf, likelihood = independent(PMF4, 128), normalised(PMF4), Tweedie(4, 0.05)
    network = fine_points(likelihood.pixels, pmf, 64)
    for part, most in ((1 / 20, 0.1), (1.0, 20.0)):
        cut = NoiseLevel(part * likelihood.pixels.finest())
        model = model_of(network, process_of(name), likelihood, data, cut, precondition=False)
        mean, error = excess(model, data, draws=8, fit=True)
        assert -3 * error <= mean <= most + 3 * error


# ---------------------------------------------------------------- networks that know less


SOURCES: dict[str, Callable[[int], Known]] = {
    "four levels": lambda size: independent(PMF4, size),
    "sixteen levels": lambda size: independent(PMF16, size),
    "chain": chained,
}


@cache
def trained(source: str, kind: str, name: str, parametrisation: str) -> nn.Module:
    """A network after 100 steps on other data of the same law; of single pixels, or of all."""
    data = SOURCES[source](1024)
    data = Known(data.x[256:], data.nats[256:], data.levels)
    process, likelihood = process_of(name), likelihood_of(kind, data.levels)
    variables = process.n_vars if parametrisation == "joint" else 1
    network = Mixer(8 * variables if source == "chain" else variables, gain=0.5)
    model = model_of(network, process, likelihood, data, None, parametrisation)
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        batch = data.x[(128 * step) % 768 :][:128]
        loss = elbo(model, batch, draws=2, random=generator).bits_per_dim.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network.requires_grad_(False)


def likelihood_of(kind: str, levels: int) -> Discrete | Tweedie:
    if kind == "discrete":
        return Discrete(levels)
    return Tweedie(levels, 0.05 if kind == "tweedie-logit" else None)


KINDS = ["discrete", "tweedie", "tweedie-logit"]


def networks(data: Known, process: Process, parametrisation: str) -> list[nn.Module]:
    """One that knows nothing, and one that is wrong."""
    variables = process.n_vars if parametrisation == "joint" else 1
    return [Zero(), Mixer(data.x.shape[1] * variables)]


def check_case(source: str, kind: str, name: str, parametrisation: str, cut: int) -> None:
    """All networks on one combination; cut is an index into `cuts`."""
    data = SOURCES[source](256)
    process, likelihood = process_of(name), likelihood_of(kind, data.levels)
    for network in networks(data, process, parametrisation):
        truncation = cuts(likelihood)[cut]
        model = model_of(network, process, likelihood, data, truncation, parametrisation)
        check_valid(model, data, draws=2)


NAMES = list(PROCESSES)
ROUND = [
    (list(SOURCES)[i % 3], KINDS[(i // 3 + i) % 3], NAMES[i % len(NAMES)], ("channel", "joint")[j])
    for i in range(2 * len(NAMES))
    for j in range(2)
]


@pytest.mark.parametrize(("source", "kind", "name", "parametrisation"), ROUND)
def test_valid_for_any_network(source: str, kind: str, name: str, parametrisation: str) -> None:
    """Every process with every bound and both parametrisations, at two truncations each."""
    first = NAMES.index(name) % 3
    for cut in (first, 3 + first):
        check_case(source, kind, name, parametrisation, cut)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "parametrisation",
    [
        pytest.param("channel", marks=pytest.mark.long),
        pytest.param("joint", marks=pytest.mark.slow),
    ],
)
def test_valid_for_all_combinations(source: str, kind: str, parametrisation: str) -> None:
    for name in PROCESSES:
        for cut in range(6):
            check_case(source, kind, name, parametrisation, cut)


TRAINED = [
    ("four levels", "discrete", "vpsde", "channel"),
    ("chain", "discrete", "vpsde", "channel"),
    ("chain", "tweedie", "vpsde", "channel"),
    ("chain", "discrete", "cld", "joint"),
]


@pytest.mark.parametrize(("source", "kind", "name", "parametrisation"), TRAINED)
def test_valid_after_training(source: str, kind: str, name: str, parametrisation: str) -> None:
    """A channel network under all processes, a joint one under its own."""
    network = trained(source, kind, name, parametrisation)
    data = SOURCES[source](256)
    likelihood = likelihood_of(kind, data.levels)
    plain = model_of(Zero(), process_of(name), likelihood, data, None, parametrisation)
    others = PROCESSES if parametrisation == "channel" else [name]
    for other in others:
        for cut in (None, *cuts(likelihood)[1:4:2]):
            model = model_of(network, process_of(other), likelihood, data, cut, parametrisation)
            check_valid(model, data)
    # it has learned something, so that the bound is not valid for want of trying
    model = model_of(network, process_of(name), likelihood, data, None, parametrisation)
    assert excess(model, data)[0] < 0.95 * excess(plain, data)[0]


@pytest.mark.parametrize("given", ["x", "state"])
def test_valid_given_the_state(given: str) -> None:
    data = chained(256)
    for name in ("cld", "malda", "learned-2-full"):
        for kind in ("discrete", "tweedie"):
            likelihood = likelihood_of(kind, 4)
            for parametrisation in ("channel", "joint"):
                for network in networks(data, process_of(name), parametrisation):
                    model = model_of(
                        network, process_of(name), likelihood, data, None, parametrisation
                    )
                    check_valid(model, data, given=given)


def test_valid_by_implicit_score_matching() -> None:
    data = chained(128)
    for name in ("vpsde", "cld", "learned-2"):
        for parametrisation in ("channel", "joint"):
            for network in networks(data, process_of(name), parametrisation):
                model = model_of(
                    network, process_of(name), Discrete(4), data, None, parametrisation
                )
                check_valid(model, data, implicit=True)


def test_valid_at_absurd_truncations() -> None:
    """So early that numbers round: a bound may get loose there, never better than the entropy."""
    data, pmf = independent(PMF4, 128), normalised(PMF4)
    points = Points(Discrete(4).pixels.centres(), pmf)
    for name in ("vpsde", "cld", "alda", "learned-2-full"):
        for cut in (NoiseLevel(1e-5), FixedTime(1e-8), FixedTime(1e-15)):
            for likelihood, network in ((Discrete(4), points), (Tweedie(4), Flat(pmf))):
                model = model_of(
                    network, process_of(name), likelihood, data, cut, precondition=False
                )
                check_valid(model, data, draws=8)


def test_the_right_law_is_the_best() -> None:
    """A denoiser for another law costs more: at least the divergence between the two laws.

    Its model is valid too, so that its bits exceed the cross-entropy, not only the entropy.
    """
    data, likelihood = independent(PMF4, 256), Discrete(4)
    right, wrong = normalised(PMF4), normalised((0.4, 0.2, 0.2, 0.2))
    cross = Known(data.x, wrong.log()[data.x].sum(1), 4)
    for name in ("vpsde", "malda"):
        cut = NoiseLevel(0.5 / 20)
        model = best(process_of(name), likelihood, data, wrong, cut)
        mean, error = excess(model, cross, draws=16)
        divergence = float((right * (right / wrong).log()).sum()) / math.log(2)
        assert divergence > 0.2
        # equal to the cross-entropy up to the prior's part, of order 1e-4 here
        assert -3 * error <= mean <= 3 * error + 1e-3
