"""The histogram's answer, on independent pixels, where there is nothing more to know.

A pixel is at x_k with probability P_k. At the noise σ, x̃ = x_k + σε says D_k(σ) nats about it,
D_k = E log N(x̃; x_k, σ²)/Σ_j P_j N(x̃; x_j, σ²), from D_k(∞) = 0 to D_k(0) = −log P_k; between two
noises it changes by ½∫ E[(x_k − x̂)² | x_k]/σ² dλ. So the bound of a network that returns zero is
known: for a pixel at x_k it is E log P(k | x̃_ε) − D_k(σ_ε) + D_k(σ_T) − KL(q(y_T|x_k) ‖ π).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from mpmath import mp
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, kl_divergence

import ornstein
from ornstein import (
    Discrete,
    NoiseLevel,
    Process,
    ScoreModel,
    Tweedie,
    elbo,
    histogram,
    residuals,
)
from ornstein.answers import View, contract, expand
from ornstein.data import Dataset, Split
from ornstein.histogram import Histogram
from ornstein.networks import MLP
from ornstein.terms import channel_error, joint_error
from ornstein.training.choices import Modelling
from ornstein.training.experiment import Experiment
from ornstein.training.records import differences
from ornstein.training.run import _about_histograms, _decisive
from tests.analytic.test_bound_gaussian import deviation, made, rows
from tests.analytic.test_bound_gaussian import seed as seed  # a fixture
from tests.analytic.test_bound_identities import LEARNED, EvenInLog, mismatch
from tests.test_errors import message, says

F64, LEVELS, DIMS, BOTH = torch.float64, 16, 4, ["channel", "joint"]
PLAIN, LOGIT = Discrete(LEVELS), Discrete(LEVELS, logit=0.05)
CENTRES = PLAIN.pixels.centres()
ONE, THREE = (0,), (0, 5, 11)  # laws of one channel, or of each of three
SIGMAS = torch.tensor([1e-4, 3e-3, 0.02, 0.06, 0.2, 1.0, 30.0, 1e3, 1e6], dtype=F64)
COUNTS = torch.tensor([3, 0.5, 1e-9, 7, 1e6, 2, 2, 1, 40, 1e-4, 5, 5, 1, 9, 0.5, 3], dtype=F64)


def law(seed: int = 0) -> Tensor:
    """Probabilities of the levels: all kinds, and a spike."""
    P = torch.rand(LEVELS, dtype=F64, generator=torch.Generator().manual_seed(seed)) ** 2 + 0.05
    P[seed] = 2 * P.sum()
    return P / P.sum()


def drawn(*shape: int, laws: tuple[int, ...] = ONE) -> Tensor:
    """Independent pixels: (examples, *rest), and with several laws (examples, laws, *rest)."""
    P, generator = torch.stack([law(i) for i in laws]), torch.Generator().manual_seed(1)
    x = torch.multinomial(P, math.prod(shape), True, generator=generator)
    return x.reshape(-1, *shape).movedim(0, 1) if len(laws) > 1 else x.reshape(shape)


def zero(entries: int) -> Any:
    """A network: zero for the first entries of axis 1."""
    return lambda x, logsnr: torch.zeros_like(x[:, :entries])


def model_of(process: Process, parametrisation: Any = "channel", **options: Any) -> ScoreModel:
    """For vectors: a network that returns zero, or a random one with a gain."""
    variables = process.n_vars if parametrisation == "joint" else None
    network = MLP((DIMS,), variables, 2, width=16, depth=1).to(F64)
    nn.init.normal_(network.leave.weight, std=options.pop("gain", 0.0))
    options = {"likelihood": PLAIN, "histogram": law(), "data_std": 0.6, **options}
    return ScoreModel(network, process, parametrisation=parametrisation, data_mean=0.1, **options)


def of_all_levels(dtype: torch.dtype) -> Tensor:
    """x̃ of each level, with noise: (sigmas, levels)."""
    noise = torch.linspace(-3, 3, LEVELS, dtype=F64)[torch.randperm(LEVELS)]
    return (CENTRES + SIGMAS[:, None] * noise).to(dtype)


@pytest.mark.parametrize(("dtype", "near"), [(F64, 1e-12), (torch.float32, 2e-4)])
def test_fifty_digits(dtype: torch.dtype, near: float) -> None:
    """Exponents up to 1e3 decide and are rounded; x̂ too, and below eps nothing is known of √v."""
    x, sigmas, least = of_all_levels(dtype), SIGMAS.to(dtype), torch.finfo(dtype).eps
    seen = Histogram(CENTRES, COUNTS).seen(x, sigmas)
    values = (seen.mean, seen.deviation, seen.beyond(seen.x_noisy), seen.scale)
    levels = list(zip(COUNTS.tolist(), CENTRES.tolist(), strict=True))
    for i, j in np.ndindex(*x.shape):
        with mp.workdps(50):
            sigma, place = mp.mpf(sigmas[i].item()), mp.mpf(x[i, j].item())
            w = [n * mp.exp(-(((place - c) / sigma) ** 2) / 2) for n, c in levels]
            mean = mp.fdot(w, CENTRES.tolist()) / mp.fsum(w)
            v = mp.fsum(p * (c - mean) ** 2 for p, (_, c) in zip(w, levels, strict=True))
            root = mp.sqrt(max(v / mp.fsum(w), mp.mpf(histogram.LEAST)))
            told = [float(t) for t in (mean, root, (place - mean) / sigma, root / sigma)]
        for value, truth, unit in zip(values, told, (1, 1, sigma, sigma), strict=True):
            room = near * min(1, abs(truth) + near) + least / float(unit)
            assert abs(value[i, j].item() - truth) <= room


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_derivatives(dtype: torch.dtype) -> None:
    """x̂ = x̃ + σ² d log p_σ/dx̃ and dx̂/dx̃ = v/σ², to rounding; all are finite where v is 0."""
    x, sigmas = of_all_levels(dtype).requires_grad_(), SIGMAS.to(dtype).requires_grad_()
    seen, sigma = Histogram(CENTRES, COUNTS).seen(x, sigmas), sigmas.detach()[:, None]
    square, eps = (seen.scale**2).detach(), torch.finfo(dtype).eps
    away = (x.unsqueeze(-1) - CENTRES.to(dtype)) / sigma.unsqueeze(-1)
    log_density = (COUNTS.log().to(dtype) - away.square() / 2).logsumexp(-1)
    (score,) = torch.autograd.grad(log_density.sum(), x)
    assert bool(((x + sigma**2 * score - seen.mean).abs() <= eps * (500 * sigma + 5000)).all())
    (slope,) = torch.autograd.grad(seen.mean.sum(), x, retain_graph=True)
    assert bool(((slope - square).abs() <= eps * (5e4 * square + 50 / sigma)).all())
    assert float(seen.deviation.detach().min()) == pytest.approx(histogram.LEAST**0.5)
    for value in seen.extras(model_of(made("vpsde")).moments):
        first = torch.autograd.grad(value.sum(), (x, sigmas), create_graph=True)
        second = torch.autograd.grad(sum(g.sum() for g in first), (x, sigmas), retain_graph=True)
        assert all(bool(g.isfinite().all()) for g in (*first, *second))


@pytest.mark.parametrize("logsnr", [-600.0, -150.0, 60.0, 110.0, 150.0])
def test_any_noise_is_safe(logsnr: float) -> None:
    """In float32: x̃ says nothing, or x is at the level that is nearest."""
    model = ScoreModel(zero(LEVELS), made("vpsde"), PLAIN, histogram=law())
    x, truth = (CENTRES + 0.01, CENTRES) if logsnr > 0 else (1e30 * CENTRES, law() @ CENTRES)
    assert torch.allclose(model.denoise(x.float()[None], logsnr), truth.float(), atol=1e-6)
    x = x.float()[None].clamp(-9, 9)
    assert torch.equal(model.denoise(x, 600.0), x)  # where float32 has no such σ


def quadrature() -> tuple[Tensor, Tensor]:
    """Of expectations under a standard normal."""
    node, weight = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(500))
    return 9 * node, 9 * weight * torch.exp(-((9 * node) ** 2) / 2) / math.sqrt(2 * math.pi)


def test_information_is_the_integral_of_the_error() -> None:
    """½∫E(x_k − x̂)²/σ² dλ = −log P_k of every level, by quadrature, and ½∫E v/σ² dλ = H."""
    logsnr, (e, density) = torch.linspace(-30, 14, 177, dtype=F64), quadrature()
    sigma = (-logsnr / 2).exp()
    seen = Histogram(CENTRES, 7 * law()).seen(CENTRES[:, None] + sigma[:, None, None] * e, sigma)
    error = ((seen.mean - CENTRES[:, None]) / sigma[:, None, None]).square() @ density
    left = (seen.scale.square() @ density) @ law()
    nats, left = (torch.trapezoid(value, logsnr, dim=0) / 2 for value in (error, left))
    assert torch.allclose(nats, -law().log(), rtol=0, atol=1e-6)
    assert float(left) == pytest.approx(-float(law() @ law().log()), abs=1e-6)


def test_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, whole or in parts, with a graph or without."""
    x, sigma = torch.randn(7, 3, 2, 2), torch.rand(7) + 0.01
    known = Histogram(CENTRES, torch.rand(3, 1, 1, LEVELS) + 0.1)
    whole, spy = known.seen(x, sigma), mock.Mock(side_effect=known._few)
    monkeypatch.setattr(known, "_few", spy)
    for most in (1, 3 * 12 * LEVELS):
        monkeypatch.setattr(histogram, "AT_ONCE", {"cpu": most, "cuda": most})
        seen = known.seen(x, sigma)
        assert torch.equal(seen.mean, whole.mean) and torch.equal(seen.scale, whole.scale)
    assert [len(call.args[0]) for call in spy.call_args_list] == [*[1] * 7, 3, 3, 1]
    at = x.clone().requires_grad_()
    found = []
    for most in (1, 2**30):  # in parts whose weights are formed twice, and whole
        monkeypatch.setattr(histogram, "AT_ONCE", {"cpu": most, "cuda": most})
        seen = known.seen(at, sigma)
        (first,) = torch.autograd.grad((seen.mean * seen.scale).sum(), at, create_graph=True)
        found.append((seen.mean, first, *torch.autograd.grad(first.sin().sum(), at)))
    for part, all_ in zip(*found, strict=True):
        assert torch.allclose(part, all_, rtol=1e-12, atol=1e-12)


MANY = 256
FINE = Discrete(MANY).pixels
#: in bins: from far below one to as many as there are
BINS = torch.tensor([1e-4, 0.02, 0.1, 0.3, 0.5, 0.9, 1.5, 3, 6, 12, 40, 300], dtype=F64)


def of_many_levels(channels: int) -> tuple[Histogram, Tensor, Tensor]:
    """Rare levels and common ones; pixels of all channels seen in noise, also outside; σ."""
    generator = torch.Generator().manual_seed(channels)
    counts = torch.rand(channels, MANY, dtype=F64, generator=generator) ** 6 + 1e-3
    counts[:, 3], sigma = 40.0, BINS * 2 / MANY
    noise = torch.randn(len(BINS), channels, 20, 9, dtype=F64, generator=generator)
    x = FINE.centres()[torch.randint(MANY, noise.shape, generator=generator)]
    x = x + noise * sigma[:, None, None, None]
    x[..., 0, 0], x[..., 0, 1], x[..., 0, 2] = -1.7, 3.0, FINE.edges()[MANY // 2] + 1e-3
    shape = (MANY,) if channels == 1 else (channels, 1, 1, MANY)
    return Histogram(FINE.centres(), counts.reshape(shape), FINE.edges()), x, sigma


@pytest.mark.parametrize("even", [False, True], ids=["levels", "bins"])
@pytest.mark.parametrize("channels", [1, 3])
def test_levels_that_are_near_are_enough(
    channels: int, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding: with all levels, in float64, which has fifty digits for a witness above."""
    known, x, sigma = of_many_levels(channels)
    known = known.spread(even)
    for dtype, rough in ((F64, 3e-12), (torch.float32, 2e-4)):
        own, noise = x.to(dtype), sigma.to(dtype)
        spy = mock.Mock(side_effect=known._around)
        monkeypatch.setattr(known, "_around", spy)
        near = known.seen(own, noise)
        assert {call.args[2] for call in spy.call_args_list} >= {2, 4, 8, 16}
        monkeypatch.setattr(histogram, "MANY", MANY + 1)
        spy.reset_mock()
        whole = known.seen(own.double(), noise.double())
        spy.assert_not_called()
        monkeypatch.undo()
        rounded = torch.finfo(dtype).eps * own.abs() / noise[:, None, None, None]  # x̃ itself
        for one, other in (
            (near.beyond(near.x_noisy), whole.beyond(whole.x_noisy)),
            (near.scale, whole.scale),
        ):
            assert bool(((one - other).abs() <= rough * (1 + other.abs()) + rounded).all())


def test_gradients_from_levels_that_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Central moments of the near levels give the slopes that all levels give; twice, too."""
    known, x, sigma = of_many_levels(1)
    found = []
    for many in (histogram.MANY, MANY + 1):
        monkeypatch.setattr(histogram, "MANY", many)
        at, noise = x.clone().requires_grad_(), sigma.clone().requires_grad_()
        seen = known.seen(at, noise)
        value = (seen.mean * seen.x_noisy + seen.deviation).sum()
        first = torch.autograd.grad(value, (at, noise), create_graph=True)
        again = torch.autograd.grad(first[0].sin().sum() + first[1].sin().sum(), (at, noise))
        found.append([*first, *again])
    for one, other in zip(*found, strict=True):
        size = other.abs().amax(tuple(range(1, other.dim())), keepdim=True)
        assert bool(((one - other).abs() <= 1e-9 * (1 + size)).all())


def test_one_noise_for_all_is_each_its_own() -> None:
    known, x, _ = of_many_levels(3)
    for even in (False, True):
        one, each = torch.tensor([0.01], dtype=F64), torch.full((len(x),), 0.01, dtype=F64)
        found = [known.spread(even).seen(x, sigma) for sigma in (one, each)]
        torch.testing.assert_close(found[0].mean, found[1].mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[0].scale, found[1].scale, rtol=1e-9, atol=1e-9)


def test_in_a_transform_nothing_is_chosen() -> None:
    """torch.func.vmap over examples: as without it."""
    known, x, sigma = of_many_levels(1)
    for even in (False, True):
        moments = known.spread(even).seen

        def guess(x: Tensor, sigma: Tensor, moments: Any = moments) -> Tensor:
            return moments(x[None], sigma[None]).mean[0]

        wanted = moments(x, sigma).mean
        torch.testing.assert_close(torch.func.vmap(guess)(x, sigma), wanted, rtol=1e-9, atol=1e-9)


def test_many_levels_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of near levels is not made where it is larger than all weights may be."""
    centres = torch.linspace(-1, 1, 2**14, dtype=F64)
    known, sigma = Histogram(centres, torch.ones(2**14)), torch.tensor([1e-5, 0.02], dtype=F64)
    spy = mock.Mock(side_effect=known._around)
    monkeypatch.setattr(known, "_around", spy)
    known.seen(torch.zeros(2, 5, dtype=F64), sigma)
    (call,) = spy.call_args_list  # of the first example alone
    assert len(call.args[1]) == 1 and 2**14 * (2 * call.args[2] + 1) <= histogram.AT_ONCE["cpu"]


def test_what_is_no_number_stays_none() -> None:
    """A pixel that is NaN or infinite; its neighbours are what they are."""
    known, x, sigma = of_many_levels(1)
    x[:, 0, 5, 5], x[:, 0, 6, 6] = math.nan, math.inf
    mean = known.seen(x, sigma).mean
    assert bool(mean[:, 0, 5, 5].isnan().all())
    x[:, 0, 5, 5] = x[:, 0, 6, 6] = 0.0
    again = known.seen(x, sigma).mean
    here = torch.ones(20, 9, dtype=torch.bool)
    here[5, 5] = here[6, 6] = False
    assert torch.equal(mean[..., here], again[..., here])


def information(P: Tensor, centres: Tensor, sigma: Tensor | float) -> Tensor:
    """D_k(σ): (levels,)."""
    e, density = quadrature()
    away = (centres[:, None] - centres).unsqueeze(1) / sigma + e.unsqueeze(-1)  # (k, nodes, j)
    return (-(e**2) / 2 - (P.log() - away.square() / 2).logsumexp(-1)) @ density


def bound_of_levels(process: Process, likelihood: Discrete, P: Tensor) -> Tensor:
    """Of one pixel at each level, for a network that returns zero: (levels,)."""
    centres, sigma = likelihood.pixels.centres(), likelihood.pixels.finest() / 6
    kernel = process.transition(process.horizon)
    prior = MultivariateNormal(torch.zeros(process.n_vars, dtype=F64), process.prior_covariance)
    last = MultivariateNormal(centres[:, None] * kernel.response, scale_tril=kernel.cholesky)
    error = information(P, centres, sigma) - information(P, centres, kernel.snr.rsqrt())
    decoded = information(torch.full_like(P, 1 / LEVELS), centres, sigma) - math.log(LEVELS)
    return decoded - error - kl_divergence(last, prior)


@pytest.mark.parametrize("parametrisation", BOTH)
@pytest.mark.parametrize("name", ["vpsde", "cld", "alda"])
@pytest.mark.parametrize(("likelihood", "laws"), [(PLAIN, ONE), (LOGIT, ONE), (PLAIN, THREE)])
def test_zero_is_exact(name: str, likelihood: Discrete, laws: Any, parametrisation: Any) -> None:
    """The bound is what it must be within draw errors, and that is −log₂ P within 0.01 bits."""
    x, process = drawn(512, 2, 2, laws=laws).reshape(512, -1, 2, 2), made(name)
    P, channel = torch.stack([law(i) for i in laws]), torch.arange(len(laws))[:, None, None]
    network = zero(process.n_vars if parametrisation == "joint" else len(laws))
    moments, counts = likelihood.moments(x), P.reshape(-1, 1, 1, LEVELS)
    model = ScoreModel(network, process, likelihood, parametrisation, *moments, histogram=counts)
    found = ornstein.evaluate(model, x, draws=64, quiet=True)
    bounds = torch.stack([bound_of_levels(process, likelihood, p) for p in P])
    truth, exact = (-float(v[channel, x].mean()) / math.log(2) for v in (bounds, P.log()))
    assert abs(found.bits_per_dim - truth) <= 4 * found.draw_error <= 0.1
    assert 0 <= truth - exact <= 0.01


@pytest.mark.parametrize("name", ["vpsde", "cld", "malda", "alda", "random-7"])
def test_joint_is_channel(name: str) -> None:
    """The same errors of every draw, K = 1 … 4, from the truncation to the horizon."""
    process, x = made(name), PLAIN.values(drawn(64, DIMS), None, F64)
    channel, joint = (model_of(process, p) for p in BOTH)
    first = channel.truncation.time(process)
    kernel = process.transition(first * (1 / first) ** torch.linspace(0, 1, 64, dtype=F64))
    view, eps = View.of(kernel), torch.randn(64, process.n_vars, DIMS, dtype=F64)
    error = channel_error(channel, x, contract(view.direction, eps), view.logsnr)
    found = joint_error(joint, kernel, view, x, eps)
    assert torch.allclose(found, expand(view.direction, error), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gain", [0.0, 0.3])
@pytest.mark.parametrize("parametrisation", BOTH)
@pytest.mark.parametrize("name", ["vpsde", "cld", "malda"])
def test_implicit_is_explicit(name: str, parametrisation: str, gain: float, seed: int) -> None:
    """Stein's identity, of x̂ and √v too: the difference over noise has mean zero."""
    x, model = drawn(512, DIMS), model_of(made(name), parametrisation, gain=gain)
    found = (f(model, x, draws=32, random=rows(x, seed)).nats for f in (elbo, ornstein.mism))
    number, error = deviation(*(nats.detach() for nats in found))
    assert error <= 0.3 and abs(number) <= 3.5


@pytest.mark.parametrize("loss", [elbo, ornstein.mism])
@pytest.mark.parametrize("parametrisation", BOTH)
def test_gradients(parametrisation: str, loss: Any) -> None:
    """In a learned process and in the network, against central differences: relative 1e-5."""
    model = model_of(LEARNED["v0"](), parametrisation, gain=0.3, truncation=NoiseLevel(0.1))
    options = {"x": drawn(6, DIMS), "draws": 2, "times": EvenInLog(), "random": 5}
    assert mismatch(lambda: loss(model, **options).nats.mean(), [*model.named_parameters()]) <= 1e-5


@pytest.mark.parametrize("parametrisation", BOTH)
@pytest.mark.parametrize("name", ["vpsde", "cld", "malda", "coupled-v0"])
def test_answers(name: str, parametrisation: str) -> None:
    """∇ log Σ P_k N(y; r x_k, Σ) by autograd; networks add ς/√(ς²+σ²)·theirs; all are one."""
    near = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-5)  # y was whitened
    process = made(name)
    s = process.time_of_noise(torch.tensor([0.01, 0.03, 0.1, 0.5, 2.0], dtype=F64)).detach()
    kernel, x = process.transition(s), PLAIN.values(drawn(len(s), DIMS), None, F64)
    view = View.of(kernel, process.noise_factor(s))
    eps = torch.randn(len(s), process.n_vars, DIMS, dtype=F64)
    y = kernel.sample(x, noise=eps)[0].requires_grad_()
    means = CENTRES[:, None] * kernel.response[:, None, :]  # (B, levels, K)
    parts = MultivariateNormal(means, scale_tril=kernel.cholesky[:, None])
    mixed = MixtureSameFamily(Categorical(law().expand(len(s), -1)), parts)
    (score,) = torch.autograd.grad(sum(mixed.log_prob(y[..., i]).sum() for i in range(DIMS)), y)
    exact, model = (model_of(process, parametrisation, gain=gain) for gain in (0.0, 0.3))
    near(exact.noise(y, s), -kernel.cholesky.mT @ score)
    direction, sigma, along = view.direction, view.sigma[:, None], contract(view.direction, eps)
    heard: list[tuple[Tensor, Tensor]] = []
    model.network.register_forward_hook(lambda _, given, out: heard.append((given[0], out)))
    x_noisy, noise, data = x + sigma * along, model.noise(y, s), model.estimate(y, s)
    seen, (given, out) = Histogram(CENTRES, law()).seen(x_noisy, view.sigma), heard[0]
    told = (seen.mean - 0.1) / 0.6, seen.deviation / 0.6, (x_noisy - seen.mean) / sigma, seen.scale
    near(given.reshape(len(s), -1, DIMS)[:, -4:], torch.stack(told, 1))
    open_ = out * (0.6 / torch.hypot(sigma, torch.tensor(0.6))).reshape(-1, *[1] * (out.dim() - 1))
    added = open_ if out.dim() > 2 else expand(direction, open_)
    near(noise - exact.noise(y, s), added)
    near(kernel.noise_to_score(noise), model.score(y, s))
    near((x_noisy - data) / sigma, view.read(noise - (eps - expand(direction, along))))
    if parametrisation == "joint":
        near(eps - noise, joint_error(model, kernel, view, x, eps))
        near(*(model.joint_residual(y, kernel, view, at) for at in (None, x_noisy)))
        return
    near(noise, eps + expand(direction, model.predict(x_noisy, view.logsnr) - along))
    near(data, model.denoise(x_noisy, view.logsnr))
    other = model.with_process(made("alda"))
    assert torch.equal(other.denoise(x_noisy, 1.0), model.denoise(x_noisy, 1.0))


@pytest.mark.parametrize("parametrisation", BOTH)
def test_saved_and_loaded(parametrisation: str, tmp_path: Path) -> None:
    """Bit for bit, in either type; a model without a histogram has none."""
    models = [model_of(made("cld"), parametrisation, gain=0.3).to(k) for k in (F64, torch.float32)]
    models += [model_of(made("cld"), parametrisation, features=[1.0, 2.0], histogram=None)]
    for model, shape in zip(models, ([LEVELS], [LEVELS], None), strict=True):
        model.eval().save_pretrained(tmp_path)
        again = ScoreModel.from_pretrained(tmp_path)
        assert model.describe().get("histogram") == again.describe().get("histogram") == shape
        assert again.histogram is None or torch.equal(again.histogram.logs, law().log())
        assert torch.equal(*(elbo(m, drawn(6, DIMS), random=3).nats for m in (model, again)))


def test_what_is_no_histogram() -> None:
    def build(counts: Any, likelihood: Any = PLAIN, **options: Any) -> str:
        options |= {"histogram": counts, "likelihood": likelihood}
        return message(lambda: model_of(made("cld"), **options))

    says(build(torch.ones(3, 8)), "(3, 8)", "16 levels", "likelihood.histogram(x)")
    for bad in (0.0, -2.0):
        counts = law().index_fill(0, torch.tensor([3]), bad)
        says(build(counts), f"an entry {bad:g}", "positive", "likelihood.histogram(x)")
    for other in (ornstein.Continuous(), Tweedie(LEVELS)):
        says(build(law(), other), repr(other), "Discrete(levels)", "Leave the histogram out")
    says(build(law(), precondition=False), "precondition=False", "one of the two")
    says(message(lambda: Tweedie(None).histogram(torch.randn(5, 2))), "levels")
    for channels in (1, 2):  # of data; else one would be taken for three, without a word
        given, x = law().expand(3, 1, 1, LEVELS), drawn(2, channels, 3, 3)
        model = ScoreModel(zero(channels), made("cld"), PLAIN, histogram=given)
        text = message(functools.partial(elbo, model, x))
        says(text, "(3, 1, 1, 16)", f"(2, {channels}, 3, 3)", "per_channel=True")


def images(levels: int = LEVELS) -> Dataset:
    """Three channels of different laws."""
    split = Split(drawn(30, 8, 8, laws=THREE).to(torch.uint8 if levels <= 256 else torch.int32))
    return Dataset("drawn", split, split, split, levels, "drawn")


@pytest.mark.parametrize("parametrisation", BOTH)
def test_a_fresh_model_begins_with_the_histogram(parametrisation: Any) -> None:
    """Counts and a half of the levels of each channel; the network adds nothing yet."""
    x, process = images().train.x, made("cld")
    counts = torch.tensor([[(c == k).sum() for k in range(LEVELS)] for c in x.transpose(0, 1)])
    assert torch.equal(PLAIN.histogram(x), counts.sum(0).to(F64) + 0.5)
    counts = counts.to(F64).reshape(3, 1, 1, LEVELS) + 0.5
    assert torch.equal(PLAIN.histogram(x.to(torch.uint16), per_channel=True), counts)
    fresh = Modelling(parametrisation).build(images(), process).eval()
    network, moments = zero(2 if parametrisation == "joint" else 3), PLAIN.moments(x, True)
    wanted = ScoreModel(network, process, PLAIN, parametrisation, *moments, histogram=counts)
    assert torch.equal(*(elbo(m, x[:8], random=2).nats for m in (fresh, wanted)))


def test_where_there_is_a_histogram() -> None:
    """Of pixels at up to 256 levels, unless it is not wanted; else waves, unless they are not."""

    def built(levels: int = LEVELS, **options: Any) -> tuple[list[int] | None, int, int]:
        model: Any = Modelling(**options).build(images(levels), made("vpsde"))
        found = model.describe()
        return found.get("histogram"), len(found["features"]), model.network.layout.features

    assert built() == ([3, 1, 1, 16], 0, 2) and built(256) == ([3, 1, 1, 256], 0, 2)
    assert built(bins="on") == ([3, 1, 1, 16], 2, 4) and built(per_channel=False) == ([16], 0, 2)
    assert built(histogram=False) == built(257) == built(likelihood="tweedie") == (None, 2, 2)
    assert built(histogram=False, bins="off") == built(257, bins="off") == (None, 0, 0)


@pytest.mark.parametrize("kind", ["discrete", "tweedie"])
@pytest.mark.parametrize("old", [False, True])
def test_a_run_is_known_again(kind: Any, old: bool, tmp_path: Path) -> None:
    """Its config builds its model; the same command goes on if it would build that one, too."""
    now, then = (Experiment(model=Modelling(likelihood=kind, histogram=h)) for h in (True, not old))
    asked = then.to_record()
    if old:  # from before there was a choice
        del asked["model"]["histogram"], asked["model"]["bins_of"]
        asked["model"]["bins"] = True
    (path := tmp_path / "config.json").write_text(
        json.dumps({"experiment": asked}), encoding="utf-8"
    )
    models = [e.build(images()).describe() for e in (Experiment.read(path), then, now)]
    assert models[0] == models[1]
    both = ((asked, models[1]), (now.to_record(), models[2]))
    kept, again = (_decisive({"training": {}, "experiment": r, "model": m}) for r, m in both)
    assert (kept == again) == (models[1] == models[2])
    told = "goes on with --no-histogram" in _about_histograms(differences(kept, again))
    assert told == (old and kind == "discrete")
    assert not _about_histograms(differences(again, kept))


# ---------------------------------------------------------------- dequantised


@pytest.mark.parametrize("sigma", [1e-4, 3e-3, 0.03, 0.2, 2.0])
def test_anywhere_in_a_bin(sigma: float) -> None:
    """Uniform in each bin: integrals over each of them with thirty digits, inside and outside."""
    edges = PLAIN.pixels.edges()
    x = torch.cat(
        [CENTRES + 0.03, edges + 0.4 * sigma, edges[[0, -1]] + sigma * torch.tensor([-4, 4])]
    )
    spread = Histogram(CENTRES, COUNTS, edges).spread()
    seen = spread.seen(x[None], torch.tensor([sigma], dtype=F64))
    for i, place in enumerate(x.tolist()):
        with mp.workdps(30):
            ends = [(mp.mpf(e) - place) / sigma for e in edges.tolist()]
            mass = [mp.ncdf(b) - mp.ncdf(a) for a, b in itertools.pairwise(ends)]
            first = [mp.npdf(a) - mp.npdf(b) for a, b in itertools.pairwise(ends)]
            second = [
                a * mp.npdf(a) - b * mp.npdf(b) + m
                for a, b, m in zip(ends, ends[1:], mass, strict=False)
            ]
            total, one, two = (mp.fdot(COUNTS.tolist(), v) for v in (mass, first, second))
            shift, v = one / total, two / total - (one / total) ** 2
            told = float(place + sigma * shift), float(sigma * mp.sqrt(v))
        wide = sigma > histogram.WIDE * 2 / LEVELS  # where it does not matter
        near = 1e-9 if not wide else 1e-3 * told[1]
        assert abs(seen.mean[0, i].item() - told[0]) <= near
        assert abs(seen.deviation[0, i].item() - told[1]) <= near


def test_where_in_its_bin_does_not_matter_in_much_noise() -> None:
    """At the width from which on levels are enough."""
    sigma = torch.tensor([histogram.WIDE * 2 / LEVELS * f for f in (1 - 1e-9, 1 + 1e-9)], dtype=F64)
    seen = Histogram(CENTRES, law()).spread().seen(torch.full((2, 1), 1.7, dtype=F64), sigma)
    assert abs(float((seen.x_noisy - seen.mean).diff(dim=0)) / sigma[0].item()) < 1e-4


def test_dequantised_pixels_have_an_answer_of_their_own() -> None:
    """A zero network under the paper's bound is the exact denoiser of dequantised pixels."""
    x, process, tweedie = drawn(40, DIMS), made("vpsde"), Tweedie(LEVELS)
    known = Histogram(CENTRES, law(), PLAIN.pixels.edges()).spread()

    class Exact(nn.Linear):  # whose weight says that it computes in float64
        def forward(self, x_noisy: Tensor, logsnr: Tensor) -> Tensor:
            seen = known.seen(x_noisy, (-logsnr / 2).exp())
            return (seen.x_noisy - seen.mean) / seen.sigma

    model = model_of(process)
    plain = ScoreModel(Exact(1, 1), process, PLAIN, precondition=False, truncation=model.truncation)
    values = [
        elbo(m.double(), x, likelihood=tweedie, draws=8, times=EvenInLog(), random=rows(x, 0))
        for m in (model, plain)
    ]
    assert torch.allclose(values[0].samples, values[1].samples, rtol=1e-5, atol=1e-5)
    assert model.seeing(PLAIN) is model and model.seeing(tweedie).seeing(tweedie).histogram.even


@pytest.mark.parametrize("parametrisation", BOTH)
@pytest.mark.parametrize("name", ["vpsde", "cld", "malda", "alda"])
def test_the_papers_bound_is_tight_where_it_is_not_truncated(
    name: str, parametrisation: Any
) -> None:
    """Independent pixels, dequantised, have log P(x) bits: a zero network gets them, whatever the
    process. Truncated at a sixth of a bin, the same model seems to lose nearly four bits."""
    x, process = drawn(2500, DIMS), getattr(ornstein, name)()
    model, options = model_of(process, parametrisation), {"likelihood": Tweedie(LEVELS)}
    exact = -law()[x].log2().mean().item()
    sixth = NoiseLevel(2 / LEVELS / 6)
    found = ornstein.evaluate(model, x, draws=8, quiet=True, **options)
    coarse = ornstein.evaluate(model, x, draws=1, quiet=True, truncation=sixth, **options)
    lost = {"alda": 0.12}.get(name, 1e-3)  # by the truncation, in closed form next to nothing
    assert -4 * found.draw_error <= found.bits_per_dim - exact <= lost + 4 * found.draw_error
    assert found.draw_error < 0.035
    assert coarse.bits_per_dim - exact > {"vpsde": 0.1, "alda": 3.5}.get(name, 1.2)
    level = model.truncation_for(Tweedie(LEVELS))
    assert isinstance(level, NoiseLevel) and level.standard_error >= process.least_noise()
    assert float(process.time_of_noise(process.least_noise())) > 0
    assert model.truncation_for(PLAIN) == model.truncation
    own = model.with_truncation(NoiseLevel(0.01))
    assert own.truncation_for(Tweedie(LEVELS)) == NoiseLevel(0.01)


def test_a_network_of_levels_is_left_out_inside_a_bin() -> None:
    """In much noise it is as it was; in little, only the closed form is left."""
    process = made("vpsde")
    model, empty = model_of(process, gain=1.0), model_of(process)
    even, none = (m.seeing(Tweedie(LEVELS)) for m in (model, empty))
    x = torch.linspace(-0.9, 0.9, DIMS, dtype=F64).expand(3, DIMS)
    sigma = torch.tensor([1e3, 0.35 * 2 / LEVELS, 1e-3], dtype=F64)
    added, all_ = (
        m.predict(x, -2 * sigma.log()) - n.predict(x, -2 * sigma.log())
        for m, n in ((even, none), (model, empty))
    )
    assert torch.allclose(added[0], all_[0], rtol=1e-6, atol=1e-12)  # the same histogram, nearly
    assert bool((added[2] == 0).all()) and bool((all_[2] != 0).all())
    assert bool((added[1].abs() > 0.01).all())


@pytest.mark.parametrize("parametrisation", BOTH)
def test_a_network_that_is_left_out_is_not_asked(
    parametrisation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the paper's bound: the same numbers, bit for bit, from half of the calls."""
    x, process = drawn(50, DIMS), made("cld")
    model = model_of(process, parametrisation, gain=1.0)
    level, calls = model.truncation_for(Tweedie(LEVELS)), []
    model.network.register_forward_hook(lambda *_: calls.append(1))

    def found() -> Any:
        options: Any = {"likelihood": Tweedie(LEVELS), "truncation": level}
        return elbo(model, x, draws=4, random=rows(x, 0), **options)

    quick, few = found(), len(calls)
    monkeypatch.setattr(residuals, "in_graph", lambda: True)  # where nothing can be read
    slow = found()
    assert few == 1 and len(calls) - few == 2
    assert torch.equal(quick.samples, slow.samples) and bool((quick.errors != 0).any())
