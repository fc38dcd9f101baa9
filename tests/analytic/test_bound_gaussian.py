"""The bound on Gaussian data, where all of it is known.

Data N(m, ς²) per coordinate and a network that returns zero: the model's score is the true one, and
so is its decoder. What is left of the bound's gap is that the way back starts from π instead of
q_T = N(r m, Σ + r rᵀς²):

    bound(x) = log p(x) + E_{q(y_T|x)}[log π(y_T) − log q_T(y_T)],
    and over the data E log p − KL(q_T ‖ π).

The denoising error is known too: with u = σ², δ = x − m, and from λ = −log u

    ½∫ (ς⁴ + uδ²)/(ς² + u)² dλ = ½[log u/(ς² + u) + ς²/(ς² + u) − δ²/(ς² + u)] from u_ε to u_T.

`Tweedie` decodes y₀ by N(E[y₀|y_ε], V), V = Φ⁻¹Σ_sΦ⁻ᵀ with Σ_s the covariance given the state. The
posterior has that mean and the precision C₀⁻¹ + V⁻¹, C₀ = Cov y₀. The difference of the two logs
over q(y₀, y_ε|x) is the gap, ½[log|I + C₀⁻¹V| − tr C₀⁻¹R(x)], R(x) = E[(y₀ − E[y₀|y_ε])²|x]; over
the data it is the KL of the two Gaussians.
"""

from __future__ import annotations

import math
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

import ornstein
from ornstein import (
    Constant,
    Continuous,
    Discrete,
    Generated,
    Importance,
    Linear,
    LogSNR,
    NoiseLevel,
    Process,
    ScoreModel,
    Tweedie,
    elbo,
    mism,
)
from ornstein.draws import Spread
from tests.conformance.zoo import ZOO
from tests.families import draw

F64 = torch.float64
MEAN = torch.tensor([0.3, -1.2, 0.0, 2.0], dtype=F64)
STD = torch.tensor([0.7, 1.6, 1.0, 0.25], dtype=F64)
LARGE = 16  # times as many coordinates, where an average over noise is wanted
PARAMETRISATIONS = ["channel", "joint"]
RANDOM = 12
NAMES = [*ZOO, *(f"random-{i}" for i in range(RANDOM))]
SOME = ["vpsde", "cld", "alda", "malda", "vesde", "coupled-v0", "learned-v0", "full-S", "random-7"]


class Zero(nn.Module):
    """A network that knows nothing but the Gaussian answer around it."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return torch.zeros_like(x)


def random_process(index: int, seed: int = 0) -> Process:
    """K = 1 … 4, noise in all variables or in one, one clock or two, v₀ of any law."""
    rng = np.random.default_rng([seed, index])
    K = 1 + index % 4
    noise = ("full", "full", "diagonal", "last")[index // 4 % 4]
    drawn = draw(rng, K, noise=noise, full_S=index % 3 == 0, stiffness=rng.uniform(15, 40))
    root = rng.standard_normal((K - 1, K - 1)) + 2 * np.eye(K - 1)
    options: dict[str, object] = {"v0_variance": 0.05 * root @ root.T}
    if index % 5 < 2:
        options["v0_coupling"] = 0.5 * rng.standard_normal(K - 1)
    if index % 2:
        options |= {"rate_q": Constant(8.0), "rate_d": Linear(0.5, 18.0)}
    return drawn.process(**options)


class Rows(Generated):
    """Each example's times spread evenly, one example independent of the other.

    (The library spreads the examples too. Then they depend on each other, and their scatter says
    little about the error of their mean.)
    """

    def places(self, count: int, spread: Spread) -> Tensor:
        step = torch.arange(count, dtype=F64)
        return (step + self.uniform("places", (count,))) / count


def rows(x: Tensor, seed: int) -> Rows:
    """For a batch."""
    return Rows(len(x), x.device, torch.Generator().manual_seed(seed))


@cache
def made(name: str) -> Process:
    """A process of the zoo, or a random one; built once, never changed."""
    if name.startswith("random-"):
        return random_process(int(name.removeprefix("random-")))
    return ZOO[name]()


@pytest.fixture(params=NAMES)
def process(request: pytest.FixtureRequest) -> Process:
    """All of the zoo, and random processes."""
    return made(request.param)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """One of its own for each test, so that they don't share their luck."""
    return zlib.crc32(request.node.name.encode())


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    """Nothing here is differentiated."""
    with torch.no_grad():
        yield


def gaussian_model(
    process: Process, parametrisation: str = "channel", times: int = 1, level: float | None = None
) -> ScoreModel:
    """The exact model of the data."""
    return ScoreModel(
        Zero(),
        process,
        Continuous(),
        parametrisation,  # type: ignore[arg-type]
        data_mean=MEAN.repeat(times),
        data_std=STD.repeat(times),
        truncation=None if level is None else NoiseLevel(level),
    )


def examples(count: int, times: int = 1, seed: int = 0) -> Tensor:
    """Of the data: (count, 4·times)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 4 * times, dtype=F64, generator=generator)
    return MEAN.repeat(times) + STD.repeat(times) * noise


def in_nats(mean: Tensor, covariance: Tensor, of_mean: Tensor, of_covariance: Tensor) -> Tensor:
    """E log N(y; of_mean, of_covariance) over y ~ N(mean, covariance): (...)."""
    K = covariance.shape[-1]
    inverse = torch.linalg.inv(of_covariance)
    away = (mean - of_mean).unsqueeze(-1)
    square = (away.mT @ inverse @ away).squeeze(-1).squeeze(-1)
    trace = (inverse * covariance).sum((-2, -1))
    return -0.5 * (K * math.log(2 * math.pi) + torch.logdet(of_covariance) + trace + square)


def truth(process: Process, x: Tensor) -> Tensor:
    """log p(x) + E_{q(y_T|x)}[log π − log q_T]: (B,)."""
    kernel = process.transition(process.horizon)
    mean, std = MEAN.repeat(x.shape[1] // 4), STD.repeat(x.shape[1] // 4)
    r, sigma = kernel.response, kernel.covariance
    marginal = sigma + (std**2)[:, None, None] * torch.outer(r, r)  # (d, K, K)
    at, centre = x.unsqueeze(-1) * r, mean.unsqueeze(-1) * r
    prior = in_nats(at, sigma, torch.zeros_like(r), process.prior_covariance)
    own = in_nats(at, sigma, centre, marginal)
    return (Normal(mean, std).log_prob(x) + prior - own).sum(1)


def denoising_error(process: Process, x: Tensor, sigma: float) -> Tensor:
    """½∫ E‖ε_∥ − ε̂_∥‖² dλ from σ at the truncation to the horizon: (B,)."""
    repeat = x.shape[1] // 4
    spread, away = STD.repeat(repeat) ** 2, (x - MEAN.repeat(repeat)) ** 2

    def primitive(u: Tensor) -> Tensor:
        wide = spread + u
        return 0.5 * ((u / wide).log() + (spread - away) / wide)

    last = 1 / process.transition(process.horizon).snr
    return (primitive(last) - primitive(torch.full_like(last, sigma**2))).sum(1)


def level_of(model: ScoreModel) -> float:
    """σ at the truncation."""
    return model.truncation.standard_error  # type: ignore[union-attr]


def deviation(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Of the mean over independent examples: in standard errors, and that error itself."""
    rest = found - expected
    error = float(rest.std()) / math.sqrt(len(rest))
    return float(rest.mean()) / error, error


# ---------------------------------------------------------------- closed forms


def test_truth_over_the_data(process: Process) -> None:
    """E log p − KL(q_T ‖ π): truth(x) is quadratic in x, so that m ± ς give its mean exactly."""
    x = torch.stack([MEAN - STD, MEAN + STD])
    found = float(truth(process, x).mean())
    kernel = process.transition(process.horizon)
    prior = MultivariateNormal(torch.zeros(process.n_vars, dtype=F64), process.prior_covariance)
    expected = 0.0
    for mean, std in zip(MEAN, STD, strict=True):
        r = kernel.response
        marginal = MultivariateNormal(r * mean, kernel.covariance + std**2 * torch.outer(r, r))
        expected += float(-Normal(mean, std).entropy() - kl_divergence(marginal, prior))
    assert math.isclose(found, expected, rel_tol=1e-10, abs_tol=1e-10)


def test_prior_is_minus_the_divergence(process: Process) -> None:
    """−Σ KL(q(y_T|x) ‖ π) over the coordinates, for every likelihood."""
    x = examples(3)
    kernel = process.transition(process.horizon)
    prior = MultivariateNormal(torch.zeros(process.n_vars, dtype=F64), process.prior_covariance)

    def divergence(values: Tensor) -> Tensor:
        given = MultivariateNormal(
            values.unsqueeze(-1) * kernel.response, covariance_matrix=kernel.covariance
        )
        return -kl_divergence(given, prior).sum(1)

    for model in (gaussian_model(process, p) for p in PARAMETRISATIONS):
        for likelihood in (Continuous(), Tweedie(None)):
            found = elbo(model, x, likelihood=likelihood).prior
            assert torch.allclose(found, divergence(x), rtol=1e-10, atol=1e-10)
    pixels = torch.tensor([[0, 3, 9, 15], [7, 8, 1, 2]])
    found = elbo(ScoreModel(Zero(), process, Discrete(16)), pixels).prior
    values = (2 * pixels.to(F64) + 1) / 16 - 1
    assert torch.allclose(found, divergence(values.to(torch.float32).to(F64)), 1e-10, 1e-10)


@pytest.mark.parametrize("level", [None, 0.05])
def test_parts_add_up_to_the_truth(process: Process, level: float | None) -> None:
    """Nothing is sampled here: prior + the closed form of the error + reconstruction = truth."""
    x = examples(5)
    for parametrisation in PARAMETRISATIONS:
        model = gaussian_model(process, parametrisation, level=level)
        bound = elbo(model, x)
        error = denoising_error(process, x, level_of(model))
        found = bound.prior - error + bound.reconstruction
        # parts of a few hundred nats where the prior is reached to 1e-14
        assert torch.allclose(found, truth(process, x), rtol=1e-10, atol=1e-9)


def test_implicit_errors_one_by_one(process: Process) -> None:
    """In log SNR ε is integrated out exactly: each error is range·½Σ(ς⁴ + σ²δ²)/(ς² + σ²)²."""
    x, model = examples(4), gaussian_model(process)
    bound = mism(model, x, draws=8, times=LogSNR())
    low = process.transition(process.horizon).snr.log()
    high = -2 * math.log(level_of(model))
    sigma2 = (-bound.logsnr).exp().unsqueeze(-1)  # (B, draws, 1)
    away = ((x - MEAN) ** 2).unsqueeze(1)
    expected = ((STD**4 + sigma2 * away) / (STD**2 + sigma2) ** 2).sum(-1) / 2
    assert torch.allclose(bound.errors, (high - low) * expected, rtol=1e-11, atol=1e-12)
    assert bool((bound.logsnr >= low).all() & (bound.logsnr <= high).all())


def test_sums_and_units() -> None:
    """nats = prior + diffusion + reconstruction; bits/dim = −nats/(d log 2)."""
    process = made("cld")
    x, pixels = examples(6), torch.randint(0, 16, (6, 2, 3))
    model = gaussian_model(process)
    of_pixels = ScoreModel(Zero(), process, Discrete(16))
    bounds = [
        elbo(model, x, draws=3),
        mism(model, x, draws=2),
        elbo(model, x, draws=3, given="state"),
        elbo(model, x, likelihood=Tweedie(None)),
        elbo(of_pixels, pixels, draws=2),
        mism(of_pixels, pixels),
        elbo(of_pixels, pixels, likelihood=Tweedie(16)),
        elbo(ScoreModel(Zero(), process, Tweedie(16, logit=0.05)), pixels),
    ]
    for bound in bounds:
        assert torch.allclose(bound.nats, bound.prior + bound.diffusion + bound.reconstruction)
        assert torch.equal(bound.bits_per_dim, -bound.nats / (bound.dims * math.log(2)))
        assert bound.nats.shape == (6,) and bound.nats.dtype == F64
        assert bound.errors.shape == bound.logsnr.shape and len(bound.errors) == 6
    assert [b.dims for b in bounds] == [4, 4, 4, 4, 6, 6, 6, 6]
    for bound in (b for b in bounds if "state" not in b.name):
        assert torch.allclose(bound.diffusion, -bound.errors.mean(1))
    assert len({b.name for b in bounds}) == 7  # the two elbos of pixels by Tweedie differ, too


# ---------------------------------------------------------------- sampled


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_explicit(process: Process, parametrisation: str, seed: int) -> None:
    """L^mdsm: one standard error is about 0.04 nats per coordinate."""
    x = examples(64, LARGE)
    model = gaussian_model(process, parametrisation, LARGE)
    bound = elbo(model, x, draws=16, random=rows(x, seed))
    number, error = deviation(bound.nats, truth(process, x))
    assert error <= 0.1 * bound.dims
    assert abs(number) <= 3


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_implicit(process: Process, parametrisation: str, seed: int) -> None:
    """L^mism has no noise but the times: one standard error is 3 to 30 mnats per coordinate.

    Those are the default's for a channel model, and the paper's for a joint one.
    """
    x = examples(64)
    model = gaussian_model(process, parametrisation)
    times = Importance() if parametrisation == "joint" else None
    bound = mism(model, x, draws=32, times=times, random=rows(x, seed))
    number, error = deviation(bound.nats, truth(process, x))
    assert error <= 0.15 * bound.dims  # joint, overdamped CLD; the next is 0.04
    assert abs(number) <= 3


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_control_is_all_of_the_noise(process: Process, parametrisation: str, seed: int) -> None:
    """Without it L^mdsm is L^mism, draw by draw: here the network's error is the Gaussian's."""
    x = examples(5)
    model = gaussian_model(process, parametrisation)
    for times in (None, Importance()):
        bound = elbo(model, x, draws=4, times=times, random=rows(x, seed), control=True)
        expected = mism(model, x, draws=4, times=times, random=rows(x, seed))
        found = bound.controlled(torch.ones_like(bound.errors))
        size = float(bound.errors.max())
        assert torch.allclose(found.errors, expected.errors, rtol=1e-10, atol=1e-12 * size)
        assert torch.allclose(found.nats, expected.nats, rtol=1e-10, atol=1e-12 * size)


@pytest.mark.slow
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("name", [*SOME, "cld-overdamped", "random-5", "learned-separate-rates"])
def test_implicit_closely(name: str, parametrisation: str, seed: int) -> None:
    """To a standard error of 0.1 mnats per coordinate, 0.5 for the worst."""
    process, x = made(name), examples(16)
    bound = mism(gaussian_model(process, parametrisation), x, draws=2000, random=rows(x, seed))
    number, error = deviation(bound.nats, truth(process, x))
    assert error <= 1e-3 * bound.dims
    assert abs(number) <= 3


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("name", SOME)
def test_given_the_state(name: str, parametrisation: str, seed: int) -> None:
    """v₀ known and drawn: the same expectation."""
    process, x = made(name), examples(64, LARGE)
    model = gaussian_model(process, parametrisation, LARGE, level=0.01)
    bound = elbo(model, x, draws=32, given="state", random=rows(x, seed))
    number, error = deviation(bound.nats, truth(process, x))
    assert error <= 0.2 * bound.dims
    assert abs(number) <= 3


class Nothing(Zero):
    """Zero with a parameter, whose type is the model's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("end", [20.0, 30.0, 60.0, 120.0])
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_past_forgetting(end: float, dtype: torch.dtype, parametrisation: str, seed: int) -> None:
    """CLD that runs on: log SNR ends at −33, −53, −111, −230, σ at 1e7 … 1e50.

    Nothing is left to be learned there, and nothing may overflow.
    """
    process = ornstein.cld(rate=Linear(0.1, end))
    x = examples(64).to(dtype)
    model = ScoreModel(
        Nothing(dtype),
        process,
        Continuous(),
        parametrisation,  # type: ignore[arg-type]
        data_mean=MEAN,
        data_std=STD,
        truncation=NoiseLevel(0.01),
    )
    for loss in (elbo, mism):
        bound = loss(model, x, draws=64, random=rows(x, seed))
        number, error = deviation(bound.nats, truth(process, x.to(F64)))
        assert error <= 1 and abs(number) <= 3


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_no_signal_left(parametrisation: str) -> None:
    """SNR at the horizon below the smallest number: the bound, or what is wrong, but no NaN."""
    process, x = ornstein.cld(rate=Linear(0.1, 400.0)), examples(4)
    model = gaussian_model(process, parametrisation, level=0.01)
    for loss in (elbo, mism):
        try:
            bound = loss(model, x)
        except ValueError as error:
            assert "nan" not in str(error)
        else:
            assert bool(bound.nats.isfinite().all())


# ---------------------------------------------------------------- Tweedie's decoder


def decoder_covariance(process: Process, s: Tensor) -> Tensor:
    """V = Φ⁻¹Σ_sΦ⁻ᵀ: (K, K)."""
    known = process.transition(s, given="state")
    root = torch.linalg.solve(known.propagator, known.cholesky)
    return root @ root.mT


def tweedie_gap(process: Process, x: Tensor, s: Tensor) -> Tensor:
    """What the Gaussian of the wrong covariance loses, given x: (B,)."""
    V, eye = decoder_covariance(process, s), torch.eye(process.n_vars, dtype=F64)
    start, direction = process.auxiliary.factor(), process.auxiliary.direction()
    given_x, along = start @ start.mT, torch.outer(direction, direction)
    W = torch.linalg.inv(given_x + (STD**2)[:, None, None] * along)  # C₀⁻¹: (4, K, K)
    kept = torch.linalg.inv(eye + V @ W)  # of y₀ in its posterior mean
    moved = kept @ V @ W
    noise = (W * (moved @ given_x @ moved.mT + kept @ V @ kept.mT)).sum((-2, -1))
    shift = (W * (moved @ along @ moved.mT)).sum((-2, -1))
    away = (x.reshape(len(x), -1, 4) - MEAN) ** 2
    return (torch.logdet(eye + W @ V) - noise - shift * away).sum((1, 2)) / 2


def tweedie_divergence(process: Process, s: Tensor) -> float:
    """Σ KL(q(y₀|y_ε) ‖ N(same mean, V)) over the four coordinates."""
    V = decoder_covariance(process, s)
    start, direction = process.auxiliary.factor(), process.auxiliary.direction()
    zero = torch.zeros(process.n_vars, dtype=F64)
    total = 0.0
    for std in STD:
        C0 = start @ start.mT + std**2 * torch.outer(direction, direction)
        posterior = C0 - C0 @ torch.linalg.solve(C0 + V, C0)
        total += float(
            kl_divergence(
                MultivariateNormal(zero, (posterior + posterior.mT) / 2),
                MultivariateNormal(zero, V),
            )
        )
    return total


@pytest.mark.parametrize("name", ["vpsde", "cld", "malda", "coupled-v0", "full-S", "random-7"])
def test_tweedie_gap_is_a_divergence(name: str) -> None:
    """Over the data: E_x gap(x) = KL; again quadratic in x. At a time where V is well-scaled."""
    process = made(name)
    s = process.time_of_noise(0.2)
    found = float(tweedie_gap(process, torch.stack([MEAN - STD, MEAN + STD]), s).mean())
    assert found > 0
    assert math.isclose(found, tweedie_divergence(process, s), rel_tol=1e-6)


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_tweedie(process: Process, parametrisation: str, seed: int) -> None:
    """The reconstruction, with its gap: standard errors of 1e-4 nats per coordinate or less."""
    x, model = examples(64, 4), gaussian_model(process, parametrisation, 4)
    bound = elbo(model, x, likelihood=Tweedie(None), random=rows(x, seed))
    gap = tweedie_gap(process, x, model.truncation.time(process))
    rest = truth(process, x) - bound.prior + denoising_error(process, x, level_of(model))
    number, error = deviation(bound.reconstruction, rest - gap)
    assert error <= 1e-4 * bound.dims
    assert abs(number) <= 3


def test_tweedie_is_loose_where_noise_is_indirect() -> None:
    """ALDA, default truncation: v₀ can't be told from y_ε by a Gaussian of covariance V."""
    x = examples(64)
    gaps = {}
    for name in ("vpsde", "cld", "alda"):
        process = made(name)
        time = gaussian_model(process).truncation.time(process)
        gaps[name] = float(tweedie_gap(process, x, time).mean()) / 4
    assert gaps["vpsde"] < 1e-5 < 0.1 < gaps["cld"] < gaps["alda"]
    assert gaps["alda"] > 0.5


@pytest.mark.parametrize("name", ["vpsde", "cld", "malda", "alda", "coupled-v0", "random-7"])
def test_tweedie_gap_vanishes_with_the_truncation(name: str) -> None:
    """At earlier times it falls, towards zero: the bound and the closed form alike."""
    process, x = made(name), examples(32, 4)
    gaps = []
    for level in (1e-2, 1e-3, 1e-4, 1e-6):
        model = gaussian_model(process, times=4, level=level)
        bound = elbo(model, x, likelihood=Tweedie(None))
        rest = truth(process, x) - bound.prior + denoising_error(process, x, level)
        gap = tweedie_gap(process, x, model.truncation.time(process))
        number, error = deviation(rest - bound.reconstruction, gap)
        assert abs(number) <= 3 or error * abs(number) <= 1e-7  # nats, rounding of V
        gaps.append(float(gap.mean()) / bound.dims)
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[3] < 0.05 * gaps[0]
