"""Identities of the bound that hold for any network: here small ones, random or just trained.

implicit = explicit      E½‖ε − ε̂‖² = E[½d + ½‖ε̂‖² − σ∇·ε̂], exactly or with probes
proposals                where the times are drawn changes the variance alone
given the state          knowing v₀ changes the variance alone
gradients                autograd against differences, in the process and in the network
the paper's losses       against scores, kernels and states taken one by one
channel invariance       one network has one likelihood under every process, up to the prior
                         and the end of log SNR
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import (
    Adaptive,
    Bound,
    Continuous,
    Counted,
    Discrete,
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
    elbo,
    mism,
    noise_prediction,
    score_matching,
)
from ornstein.draws import SPREADS, Draws, Spread
from ornstein.score import KnownNoise
from ornstein.times import Span
from ornstein.truncation import Truncation
from tests.analytic.test_bound_gaussian import (
    MEAN,
    PARAMETRISATIONS,
    STD,
    Zero,
    deviation,
    examples,
    gaussian_model,
    made,
    random_process,
    rows,
    truth,
)
from tests.analytic.test_bound_gaussian import seed as seed  # a fixture
from tests.conformance.zoo import ZOO, moved

F64 = torch.float64
SOME = ["vpsde", "cld", "malda", "learned-v0", "random-6"]


class Small(nn.Module):
    """A network of any shape of data, random, smooth, float64."""

    def __init__(self, size: int, width: int = 16, seed: int = 0, gain: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = (size + 3, width), (width, width), (width, size)
        self.layers = nn.ModuleList(nn.Linear(*pair, dtype=F64) for pair in sizes)
        with torch.no_grad():
            for layer in self.layers:
                for parameter in layer.parameters():
                    fan = layer.weight.shape[1]
                    noise = torch.randn(parameter.shape, dtype=F64, generator=generator)
                    parameter.copy_(gain * noise / math.sqrt(fan))

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        t = logsnr.unsqueeze(-1) / 6
        h = torch.cat([x.flatten(1), t, t.sin(), t.cos()], 1)
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
        return self.layers[-1](h).reshape(x.shape)


def small_model(
    process: Process,
    parametrisation: str = "channel",
    truncation: Truncation | None = None,
    likelihood: Likelihood | None = None,
    precondition: bool = True,
    dims: int = 2,
    known_noise: KnownNoise = "guessed",
) -> ScoreModel:
    """A random network of two-dimensional data."""
    size = dims * (process.n_vars if parametrisation == "joint" else 1)
    return ScoreModel(
        Small(size),
        process,
        Continuous() if likelihood is None else likelihood,
        parametrisation,  # type: ignore[arg-type]
        data_mean=0.2,
        data_std=0.8,
        truncation=NoiseLevel(0.05) if truncation is None else truncation,
        precondition=precondition,
        known_noise=known_noise,
    )


def data(count: int, dims: int = 2, seed: int = 0) -> Tensor:
    """Anything: the identities hold for every x."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dims, dtype=F64, generator=generator)


# ---------------------------------------------------------------- (a) implicit and explicit


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize(
    ("name", "precondition"),
    [
        *((name, True) for name in SOME),
        # without the Gaussian answer σ∇·ε̂ grows with σ: processes that end before it is large
        ("linear-sde", False),
        ("constant-against-linear", False),
    ],
)
def test_implicit_is_explicit(
    name: str, precondition: bool, parametrisation: str, seed: int
) -> None:
    """Stein's identity: the same times and noises, whose difference has mean zero.

    One standard error is about 0.15 nats. Hutchinson's probes only add to the scatter.
    """
    process, x = made(name), data(640)
    model = small_model(process, parametrisation, precondition=precondition)
    with torch.no_grad():
        first = elbo(model, x, draws=4, random=rows(x, seed))
        exact = mism(model, x, draws=4, divergence="exact", random=rows(x, seed))
        assert torch.equal(first.logsnr, exact.logsnr)
        number, error = deviation(first.nats, exact.nats)
        assert error <= 0.8 and abs(number) <= 3
        for how in ("rademacher", "gaussian"):
            probed = mism(model, x, draws=4, divergence=how, random=rows(x, seed))  # type: ignore[arg-type]
            assert torch.equal(probed.logsnr, exact.logsnr)
            number, error = deviation(probed.nats, exact.nats)
            assert 0 < error <= 0.8 and abs(number) <= 3
        automatic = mism(model, x, draws=4, random=rows(x, seed))
        assert torch.equal(automatic.nats, exact.nats)


def test_probes_are_taken_where_coordinates_are_many(seed: int) -> None:
    """'auto' on 33 coordinates is 'rademacher'."""
    x = data(8, 33)
    model = small_model(made("vpsde"), dims=33)
    found, expected = (
        mism(model, x, divergence=how, random=rows(x, seed)).nats  # type: ignore[arg-type]
        for how in ("auto", "rademacher")
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("name", SOME)
def test_control_has_mean_zero(name: str, parametrisation: str, seed: int) -> None:
    """So that any part of it may be taken off, also one that depends on x and on the time."""
    process, x = made(name), data(512)
    model = small_model(process, parametrisation)
    with torch.no_grad():
        bound = elbo(model, x, draws=4, random=rows(x, seed), control=True)
        for part in (torch.ones_like(bound.errors), torch.sigmoid(bound.logsnr + x[:, :1])):
            number, error = deviation(bound.controlled(part).nats, bound.nats)
            assert 0 < error <= 0.5 and abs(number) <= 3


@pytest.mark.parametrize("loss", [elbo, mism], ids=["explicit", "implicit"])
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_inference_mode(parametrisation: str, loss: Callable[..., Bound]) -> None:
    """The same numbers without autograd, and with it afterwards: a divergence is never left out."""
    x = data(8)
    for likelihood in (Continuous(), Tweedie(None)):
        model = small_model(made("cld"), parametrisation, likelihood=likelihood)
        if loss is mism:
            with torch.inference_mode(), pytest.raises(ValueError, match="no derivative"):
                mism(model, x)
            continue
        with torch.inference_mode():
            found = loss(model, x, random=rows(x, 1)).nats.clone()
        expected = loss(model, x, random=rows(x, 1)).nats
        assert torch.allclose(found, expected, rtol=1e-12, atol=0)
        expected.mean().backward()
        assert all(p.grad is not None for p in model.network.parameters())


# ---------------------------------------------------------------- (b) proposals


def trained(times: Adaptive, model: ScoreModel, x: Tensor, seed: int) -> Adaptive:
    """After a look at some batches; then it stays as it is."""
    times.train()
    with torch.no_grad():
        for i in range(8):
            elbo(model, x, draws=4, times=times, random=torch.Generator().manual_seed(seed + i))
    return times.eval()


PROPOSALS: dict[str, Callable[[Spread], Times]] = {
    "uniform": lambda spread: Uniform(spread),
    "importance": lambda spread: Importance(spread=spread),
    "importance-vpsde": lambda spread: Importance(ornstein.vpsde(), spread),
    "logsnr": lambda spread: LogSNR(spread),
    "information": lambda spread: Information(spread=spread),
    "adaptive": lambda spread: Adaptive(spread=spread),
    "adaptive-importance": lambda spread: Adaptive(Importance(), bins=16, spread=spread),
}


def repeated(
    call: Callable[[torch.Generator], Tensor], seed: int, count: int = 24
) -> tuple[float, float]:
    """Mean and standard error of the mean over independent calls."""
    means = torch.stack(
        [call(torch.Generator().manual_seed(seed + i)).mean() for i in range(count)]
    )
    return float(means.mean()), float(means.std()) / math.sqrt(count)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize(("name", "parametrisation"), [("cld", "channel"), ("random-6", "joint")])
def test_proposals(name: str, parametrisation: str, proposal: str, spread: str, seed: int) -> None:
    """Gaussian data, ε integrated out: nothing but the times is drawn, and the truth is known.

    The draws are three, so that pairs don't come out even. Examples are independent of each other,
    but for the spread over a whole batch: there the calls are.
    """
    process, x = made(name), examples(33)
    model = gaussian_model(process, parametrisation, level=0.1)
    times = PROPOSALS[proposal](spread)  # type: ignore[arg-type]
    if isinstance(times, Adaptive):
        trained(times, model, x, seed)
    with torch.no_grad():
        if spread == "stratified":
            mean, error = repeated(
                lambda g: mism(model, x, draws=3, times=times, random=g).nats, seed, 32
            )
            number = (mean - float(truth(process, x).mean())) / error
        else:
            x = x.repeat(32, 1)
            random = torch.Generator().manual_seed(seed)
            bound = mism(model, x, draws=3, times=times, random=random)
            number, error = deviation(bound.nats, truth(process, x))
    assert error <= 0.5
    assert abs(number) <= 3


@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("name", ["vpsde", "cld", "vesde", "random-3"])
def test_weights_turn_means_into_integrals(name: str, proposal: str) -> None:
    """∫ds and ∫ds/s over the span, ∫dλ and ∫λ²dλ between its ends, by the mean over 20,000 places.

    The midpoint rule of a smooth map, but for the kinks between a table's nodes: 1e-3.
    """
    process = made(name)
    times = PROPOSALS[proposal]("independent")
    if isinstance(times, Adaptive):
        trained(times, gaussian_model(process, level=0.1), examples(32), 1)
    u = (torch.arange(20000, dtype=F64) + 0.5) / 20000
    with torch.no_grad():
        start = process.time_of_noise(0.1)
        s, weight = times.place(u, Span(process, start, 0.8))
        assert bool((s >= start).all() & (s <= process.horizon).all() & (s.diff() > 0).all())
        length = process.horizon - float(start)
        assert math.isclose(float(weight.mean()), length, rel_tol=1e-3)
        length = math.log(process.horizon / float(start))
        assert math.isclose(float((weight / s).mean()), length, rel_tol=1e-3)
        low, high = process.transition(process.horizon).snr.log(), torch.tensor(4.6, dtype=F64)
        placed = times.place_logsnr(u, low, high, 0.8)
        if placed is not None:
            logsnr, weight = placed
            assert bool((logsnr >= low).all() & (logsnr <= high).all())
            assert math.isclose(float(weight.mean()), float(high - low), rel_tol=1e-3)
            square = float(((weight * logsnr).square() / weight).mean())
            assert math.isclose(square, float(high**3 - low**3) / 3, rel_tol=1e-3)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("count", [1, 4])
def test_spreads_of_a_network(spread: str, count: int, seed: int) -> None:
    """Any network: each spread, from a generator and counted, against many independent draws."""
    process, x = made("malda"), data(32)
    model = small_model(process)
    with torch.no_grad():
        many = x.repeat(2000, 1)
        generator = torch.Generator().manual_seed(seed)
        reference = elbo(model, many, times=LogSNR("independent"), random=generator).nats
        least = float(reference.std()) / math.sqrt(len(many))
        times = LogSNR(spread)  # type: ignore[arg-type]
        for draw in (lambda g: g, lambda g: Counted(g.initial_seed(), torch.arange(len(x)))):
            mean, error = repeated(
                lambda g, draw=draw: elbo(model, x, draws=count, times=times, random=draw(g)).nats,
                seed,
                48,
            )
            assert abs(mean - float(reference.mean())) <= 3 * math.hypot(error, least)


class Peak(nn.Module):
    """Wrong in a narrow range of log SNR."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return (40 * torch.exp(-((logsnr - 2) ** 2) / 0.05))[:, None] * torch.ones_like(x)


def test_adaptive_lowers_the_variance(seed: int) -> None:
    """Of a peaked loss: by a factor of ten in the standard error, and unbiased."""
    process, x = made("cld"), data(64)
    model = ScoreModel(Peak(), process, Continuous(), truncation=NoiseLevel(0.05))
    for base in (LogSNR("independent"), Importance(spread="independent")):
        times = trained(Adaptive(base, spread="independent"), model, x, seed)
        before = times.second.clone()
        with torch.no_grad():
            many = x.repeat(40, 1)
            plain, found = (
                elbo(model, many, draws=4, times=t, random=torch.Generator().manual_seed(i)).nats
                for i, t in ((seed, base), (seed + 1, times))
            )
        assert torch.equal(times.second, before)  # evaluation leaves it alone
        assert float(found.std()) <= 0.35 * float(plain.std())
        error = math.hypot(float(plain.std()), float(found.std())) / math.sqrt(len(many))
        assert abs(float(found.mean() - plain.mean())) <= 3 * error


# ---------------------------------------------------------------- (c) given the state


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("name", ["cld", "malda", "learned-v0", "random-6", "random-3"])
def test_given_the_state(name: str, parametrisation: str, seed: int) -> None:
    """The same expectation, of a larger variance."""
    process, x = made(name), data(512)
    model = small_model(process, parametrisation, NoiseLevel(0.1))
    with torch.no_grad():
        hybrid = elbo(model, x, draws=8, random=rows(x, seed))
        state = elbo(model, x, draws=8, given="state", random=rows(x, seed + 1))
    number, error = deviation(hybrid.nats, state.nats)
    assert error <= 1.5 and abs(number) <= 3


# ---------------------------------------------------------------- (d) gradients


class EvenInLog(Times):
    """Even in log s: the places move with ε just as the library's gradient says they do."""

    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        start = span.start.detach()
        length = math.log(span.process.horizon) - start.log()
        s = (start.log() + u * length).exp().clamp(max=span.process.horizon)
        return s, s * length


LEARNED: dict[str, Callable[[], Process]] = {
    "diagonal": lambda: moved(ornstein.learned(2)),
    "full": lambda: moved(ornstein.learned(2, full=True)),
    "shared-rate": lambda: moved(ornstein.learned(1, learn_rates="shared")),
    "separate-rates": lambda: moved(ornstein.learned(2, learn_rates="separate")),
    "v0": lambda: moved(
        ornstein.learned(
            2, full=True, learn_v0_variance=True, learn_v0_coupling=True, v0_coupling=[0.3, -0.2]
        )
    ),
    "linear-sde": ZOO["linear-sde-learned"],
}


@dataclass(frozen=True)
class Case:
    """Something to differentiate, whose random places don't depend on the process."""

    loss: Callable[[ScoreModel, Tensor, Draws], Tensor]
    truncation: Truncation
    likelihood: Likelihood
    parametrisation: str = "joint"
    known_noise: KnownNoise = "guessed"

    def model(self, process: Process) -> ScoreModel:
        return small_model(
            process,
            self.parametrisation,
            self.truncation,
            self.likelihood,
            known_noise=self.known_noise,
        )


def of(loss: Callable[..., object], **options: object) -> Callable[..., Tensor]:
    """The mean of a bound or of a loss."""

    def value(model: ScoreModel, x: Tensor, random: Draws) -> Tensor:
        found = loss(model, x, draws=2, random=random, **options)
        return (found if isinstance(found, Tensor) else found.nats).mean()  # type: ignore[attr-defined]

    return value


def squared(s: Tensor) -> Tensor:
    return s * s


LEVEL, TIME = NoiseLevel(0.1), FixedTime(0.03)
VP = ornstein.vpsde()
CASES: dict[str, Case] = {
    "elbo-continuous-level": Case(of(elbo, times=EvenInLog()), LEVEL, Continuous()),
    "elbo-continuous-time": Case(of(elbo, times=Uniform()), TIME, Continuous()),
    "elbo-discrete-level": Case(of(elbo, times=EvenInLog()), LEVEL, Discrete(16)),
    "elbo-discrete-time": Case(of(elbo, times=Importance(VP)), TIME, Discrete(16)),
    "elbo-tweedie-level": Case(of(elbo, times=EvenInLog()), LEVEL, Tweedie(16, logit=0.05)),
    "elbo-tweedie-time": Case(of(elbo, times=Uniform()), TIME, Tweedie(None)),
    "elbo-state-level": Case(of(elbo, times=EvenInLog(), given="state"), LEVEL, Continuous()),
    "told-elbo-level": Case(of(elbo, times=EvenInLog()), LEVEL, Discrete(16), known_noise="told"),
    "told-elbo-tweedie-time": Case(
        of(elbo, times=Uniform()), TIME, Tweedie(None), known_noise="told"
    ),
    "told-elbo-state-time": Case(
        of(elbo, times=Uniform(), given="state"), TIME, Continuous(), known_noise="told"
    ),
    "told-mism-level": Case(of(mism, times=EvenInLog()), LEVEL, Continuous(), known_noise="told"),
    "mism-level": Case(of(mism, times=EvenInLog()), LEVEL, Continuous()),
    "mism-time": Case(of(mism, times=Uniform(), divergence="rademacher"), TIME, Discrete(16)),
    "matching-level": Case(of(score_matching, times=EvenInLog()), LEVEL, Continuous()),
    "matching-time": Case(
        of(score_matching, times=Uniform(), weighting=squared), TIME, Continuous()
    ),
    "noise-level": Case(of(noise_prediction, times=EvenInLog()), LEVEL, Continuous()),
    "noise-state-time": Case(
        of(noise_prediction, times=Uniform(), given="state"), TIME, Continuous()
    ),
    "channel-elbo-logsnr-level": Case(of(elbo, times=LogSNR()), LEVEL, Discrete(16), "channel"),
    "channel-elbo-logsnr-time": Case(of(elbo, times=LogSNR()), TIME, Discrete(16), "channel"),
    "channel-elbo-level": Case(of(elbo, times=EvenInLog()), LEVEL, Tweedie(None), "channel"),
    "channel-mism-logsnr-time": Case(of(mism, times=LogSNR()), TIME, Continuous(), "channel"),
    "channel-mism-level": Case(of(mism, times=EvenInLog()), LEVEL, Continuous(), "channel"),
    "channel-matching-time": Case(
        of(score_matching, times=Uniform()), TIME, Continuous(), "channel"
    ),
}


def batch_for(likelihood: Likelihood, count: int = 6) -> Tensor:
    """A few examples of its kind."""
    if isinstance(likelihood, Discrete) or getattr(likelihood, "levels", None) is not None:
        return (torch.arange(2 * count).reshape(count, 2) * 5) % 16
    return data(count)


def mismatch(
    value: Callable[[], Tensor], parameters: list[tuple[str, nn.Parameter]], step: float = 1e-3
) -> float:
    """Autograd against Richardson's central differences: the worst parameter's relative error.

    Each parameter is moved along a random direction; the error is relative to the size of its
    gradient. One that cancels, as of rates between fixed ends, is known to 1e-16 of the others.
    """
    gradients = torch.autograd.grad(value(), [p for _, p in parameters])
    rounding = 1e-11 * max(float(gradient.norm()) for gradient in gradients)  # 1e-16 / 1e-5
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    with torch.no_grad():
        for (_, parameter), gradient in zip(parameters, gradients, strict=True):
            direction = torch.randn(parameter.shape, dtype=F64, generator=generator)
            direction /= direction.norm()
            start, found = parameter.clone(), []
            for h in (step, 2 * step):
                ends = []
                for sign in (1, -1):
                    parameter.copy_(start + sign * h * direction)
                    ends.append(float(value()))
                found.append((ends[0] - ends[1]) / (2 * h))
            parameter.copy_(start)
            derivative = (4 * found[0] - found[1]) / 3
            error = abs(derivative - float((gradient * direction).sum()))
            worst = max(worst, error / (float(gradient.norm()) + rounding + 1e-12))
    return worst


GRADIENTS = [
    *((kind, case) for kind in ("v0",) for case in CASES),
    ("diagonal", "elbo-continuous-level"),
    ("diagonal", "elbo-tweedie-time"),
    ("full", "elbo-discrete-level"),
    ("full", "mism-level"),
    ("shared-rate", "elbo-continuous-level"),
    ("shared-rate", "noise-level"),
    ("shared-rate", "channel-elbo-logsnr-level"),
    ("separate-rates", "elbo-discrete-time"),
    ("separate-rates", "elbo-continuous-level"),
    ("separate-rates", "channel-elbo-logsnr-time"),
    ("linear-sde", "elbo-continuous-level"),
    ("linear-sde", "channel-mism-level"),
]


@pytest.mark.parametrize(("kind", "case"), GRADIENTS)
def test_gradient_in_the_process(kind: str, case: str) -> None:
    """Where the random places don't depend on the process, draws and all: relative 1e-5.

    A proposal is without gradient. So the difference is taken with those that depend on the process
    through ε alone, and with ε in the way the library's gradient moves times: s ↦ s(ε/ε₀)^part,
    even in log s. In log SNR the places move with its two ends.
    """
    this, process = CASES[case], LEARNED[kind]()
    model = this.model(process)
    x = batch_for(this.likelihood)
    random = Counted(5, torch.arange(len(x)))
    parameters = list(process.named_parameters())
    assert mismatch(lambda: this.loss(model, x, random), parameters) <= 1e-5


@pytest.mark.parametrize(
    "case",
    [
        "elbo-continuous-level",
        "elbo-tweedie-level",
        "elbo-state-level",
        "mism-level",
        "matching-time",
        "noise-level",
        "told-elbo-level",
        "told-elbo-tweedie-time",
        "channel-elbo-logsnr-level",
        "channel-mism-logsnr-time",
        "channel-elbo-level",
    ],
)
def test_gradient_in_the_network(case: str) -> None:
    """With a fixed process, to the same 1e-5."""
    this = CASES[case]
    model = this.model(made("cld"))
    x = batch_for(this.likelihood)
    random = Counted(5, torch.arange(len(x)))
    parameters = list(model.network.named_parameters())
    assert mismatch(lambda: this.loss(model, x, random), parameters) <= 1e-5


@pytest.mark.parametrize(
    ("parametrisation", "times"),
    [
        *(("joint", times) for times in (Uniform(), Importance(), LogSNR(), Information())),
        *(("channel", times) for times in (Uniform(), LogSNR(), Information())),
    ],
    ids=str,
)
@pytest.mark.parametrize("truncation", [NoiseLevel(0.3), FixedTime(0.15)], ids=str)
def test_gradient_of_detached_proposals(
    parametrisation: str, truncation: Truncation, times: Times, seed: int
) -> None:
    """Unbiased for all of them: Gaussian data, whose bound is a closed form at every φ.

    The gradient along the true one, over independent calls: one standard error is a few percent.
    With a noise level ε moves with φ, and so do the times.
    """
    process = LEARNED["v0"]()
    x = examples(32)
    model = ScoreModel(
        Zero(),
        process,
        Continuous(),
        parametrisation,  # type: ignore[arg-type]
        data_mean=MEAN,
        data_std=STD,
        truncation=truncation,
    )
    parameters = list(process.parameters())
    expected = torch.autograd.grad(truth(process, x).mean(), parameters)
    size = math.sqrt(sum(float(g.square().sum()) for g in expected))

    def slope(g: torch.Generator) -> Tensor:
        bound = mism(model, x, draws=4, times=times, random=g)
        found = torch.autograd.grad(bound.nats.mean(), parameters)
        return torch.stack([(a * b).sum() for a, b in zip(found, expected, strict=True)]).sum()

    mean, error = repeated(slope, seed, 24)
    assert error <= 0.1 * size**2
    assert abs(mean - size**2) <= 3 * error


# ---------------------------------------------------------------- (e) the paper's losses by hand


def by_hand(
    model: ScoreModel, x: Tensor, draws: int, times: Times, given: str, random: Draws
) -> tuple[Tensor, ...]:
    """Scores of the model and of the kernel at the states that a loss looks at, and their times.

    s, 1/density, s_θ, s_φ, and L of the kernel that is given.
    """
    process, shape = model.process, tuple(x.shape[1:])
    K = process.n_vars
    span = Span(process, model.truncation.time(process), model.data_std)
    s, weight = times.place(random.places(draws, times.spread).flatten(), span)
    x = x.repeat_interleave(draws, 0)

    def normal(*variables: int) -> Tensor:
        return random.normal("noise", (draws, *variables, *shape), F64).flatten(0, 1)

    if given == "x":
        kernel = process.transition(s)
        origin = x
        if model.parametrisation == "joint":
            eps = normal(K)
        else:  # only the noise that hides x is drawn; the rest may be anything
            direction = (kernel.signal / kernel.snr.sqrt().unsqueeze(-1))[:, :, None]
            other = torch.randn(len(x), K, *shape, dtype=F64)
            eps = other + direction * (normal() - (direction * other).sum(1)).unsqueeze(1)
    else:
        kernel = process.transition(s, given="state")
        inner = normal(2 * K - 1)
        eps, start = inner[:, :K], process.auxiliary.factor() @ inner[:, K:]
        origin = process.auxiliary.direction()[:, None] * x.unsqueeze(1) + start
    y, _ = kernel.sample(origin, noise=eps)
    return s, weight, model.score(y, s), kernel.score(y, origin), kernel.cholesky


@pytest.mark.parametrize("weighting", [None, squared], ids=["plain", "weighted"])
@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("name", SOME)
def test_losses_by_hand(
    name: str, parametrisation: str, given: str, weighting: Callable[[Tensor], Tensor] | None
) -> None:
    """∫λ‖s_θ − s_φ‖², ∫λ‖ε̂ − ε‖² and ½∫‖s_θ − s_φ‖²_GGᵀ under the same random numbers."""
    process, x, draws = made(name), data(7), 3
    for times in (Uniform(), Importance(), Information()):
        model = small_model(process, parametrisation, NoiseLevel(0.1))
        options = {"draws": draws, "times": times, "given": given}

        def random() -> Counted:
            return Counted(11, torch.arange(len(x)))

        with torch.no_grad():
            s, weight, ours, theirs, L = by_hand(model, x, draws, times, given, random())
            rest = ours - theirs
            lam = weight if weighting is None else weight * weighting(s)

            def mean(values: Tensor) -> Tensor:
                return values.reshape(len(x), draws).mean(1)

            expected = mean(lam * rest.square().sum((1, 2)))
            found = score_matching(model, x, weighting=weighting, random=random(), **options)  # type: ignore[arg-type]
            assert torch.allclose(found, expected, rtol=1e-8, atol=1e-12)
            expected = mean(lam * (L.mT @ rest).square().sum((1, 2)))
            found = noise_prediction(model, x, weighting=weighting, random=random(), **options)  # type: ignore[arg-type]
            assert torch.allclose(found, expected, rtol=1e-8, atol=1e-12)
            direct = isinstance(times, (LogSNR, Information)) and given == "x"
            if weighting is None and not direct:
                half = process.noise_factor(s).mT @ rest
                errors = (weight * half.square().sum((1, 2)) / 2).reshape(len(x), draws)
                found = elbo(model, x, random=random(), **options).errors  # type: ignore[arg-type]
                assert torch.allclose(found, errors, rtol=1e-8, atol=1e-12)


def normal_log_prob(rest: Tensor, factor: Tensor) -> Tensor:
    """log N(rest; 0, F Fᵀ) over coordinates, F any square root: (B,) from (B, K, d)."""
    K, d = rest.shape[1:]
    white = torch.linalg.solve(factor, rest)
    volume = torch.linalg.slogdet(factor)[1] + K / 2 * math.log(2 * math.pi)
    return -white.square().sum((1, 2)) / 2 - d * volume


@pytest.mark.parametrize("precondition", [True, False])
@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("name", SOME)
def test_reconstructions_by_hand(
    name: str, parametrisation: str, precondition: bool, seed: int
) -> None:
    """E log N(x; x̂, σ²ς²/(σ²+ς²)), and the paper's E[log p(y₀|y_ε) − log q(y_ε|y₀)] + entropies.

    At a truncation so late that the network matters. One standard error is about 0.02 nats.
    """
    process, x, draws = made(name), data(512), 16
    model = small_model(process, parametrisation, NoiseLevel(0.5), precondition=precondition)
    K, s = process.n_vars, process.time_of_noise(0.5)
    kernel, known = process.transition(s), process.transition(s, given="state")
    root, direction = process.auxiliary.factor(), process.auxiliary.direction()
    with torch.no_grad():
        found = [
            elbo(model, x, draws=draws, likelihood=how, random=rows(x, seed)).reconstruction
            for how in (Continuous(), Tweedie(None))
        ]
        generator = torch.Generator().manual_seed(seed + 1)
        many = x.repeat_interleave(draws, 0)
        v = torch.randn(len(many), K - 1, 2, dtype=F64, generator=generator)
        y0 = direction[:, None] * many.unsqueeze(1) + root @ v
        y, eps = known.sample(y0, generator=generator)
        score = model.score(y, s)
        # y + Σ·score = r E[x|y]: whitened a E[x|y], along a in the metric of the bound, C
        told = torch.linalg.solve_triangular(kernel.cholesky, y, upper=False)
        told = told + kernel.cholesky.mT @ score
        W = torch.linalg.solve_triangular(kernel.cholesky, process.noise_factor(s), upper=False)
        weight = W @ W.mT @ kernel.signal
        guess = (weight[:, None] * told).sum(1) / (weight @ kernel.signal)
        width = torch.tensor(0.25 * 0.64 / (0.25 + 0.64), dtype=F64)
        decoded = normal_log_prob((many - guess).unsqueeze(1), width.sqrt().reshape(1, 1))
        expected = [decoded.reshape(-1, draws).mean(1)]
        mean = torch.linalg.solve(known.propagator, y + known.covariance @ score)
        back = torch.linalg.solve(known.propagator, known.cholesky)
        logs = normal_log_prob(y0 - mean, back) - normal_log_prob(
            known.cholesky @ eps, known.cholesky
        )
        entropy = torch.linalg.slogdet(root[1:])[1] - kernel.logdet / 2
        entropy = entropy - math.log(2 * math.pi * math.e) / 2  # K − 1 variables against K
        expected.append(logs.reshape(-1, draws).mean(1) + 2 * entropy)
    for one, other in zip(found, expected, strict=True):
        number, error = deviation(one, other)
        assert error <= 0.1 and abs(number) <= 3


# ---------------------------------------------------------------- (f) channel invariance


class InTime(Information):
    """Looked up in s, so that kernels are used where log SNR alone would do."""

    def place_logsnr(self, *_: object) -> None:  # type: ignore[override]
        return None


def pixels(count: int, seed: int) -> Tensor:
    """Eight pixels of 16 levels: steps of a walk between two walls."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-2, 3, (count, 8), generator=generator)
    start = torch.randint(3, 13, (count, 1), generator=generator)
    return (start + steps.cumsum(1)).clamp(0, 15)


@pytest.fixture(scope="module")
def denoiser() -> ScoreModel:
    """One small network, 300 steps of Adam under VPSDE."""
    torch.manual_seed(0)
    mean, std = Discrete(16).moments(pixels(4096, 1))
    model = ScoreModel(
        Small(8, width=64), made("vpsde"), Discrete(16), data_mean=mean, data_std=std
    )
    optimiser = torch.optim.Adam(model.network.parameters(), lr=3e-3)
    for step in range(300):
        loss = elbo(model, pixels(128, step)).bits_per_dim.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


INVARIANT = ["vpsde", "cld", "psld", "alda", "malda", *(f"random {i}" for i in range(20))]


def invariant(name: str) -> Process:
    """Presets, and random processes other than those of the other tests."""
    if name.startswith("random "):
        return random_process(int(name.removeprefix("random ")), seed=17)
    return made(name)


def test_training_helps(denoiser: ScoreModel) -> None:
    """So that what is invariant is not only the Gaussian answer."""
    x = pixels(512, 999)
    zero = ScoreModel(
        Zero(),
        made("vpsde"),
        Discrete(16),
        data_mean=denoiser.moments.mean,
        data_std=denoiser.moments.std,
    )
    with torch.no_grad():
        found, before = (
            elbo(m, x, draws=16, random=rows(x, 0)).bits_per_dim.mean() for m in (denoiser, zero)
        )
    assert float(found) < float(before) - 0.1


def without_prior(
    denoiser: ScoreModel, process: Process, x: Tensor, draws: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Nats without the prior part: the bound's, and by definition, with no process but for λ_T.

    reconstruction − ½∫_{λ_T}^{λ_ε} E‖ε − ε̂(x + σε, λ)‖² dλ
    """
    bound = elbo(
        denoiser.with_process(process), x, draws=draws, times=InTime(), random=rows(x, seed)
    )
    low = process.transition(process.horizon).snr.log()
    high = torch.full_like(low, -2 * math.log(denoiser.truncation.standard_error))  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(seed + 1)
    values = ((2 * x.to(F64) + 1) / 16 - 1).repeat_interleave(draws, 0)
    # the densest where there is something to see: λ of a logistic law, cut off at both ends
    first, last = torch.sigmoid(low / 3), torch.sigmoid(high / 3)
    step = torch.arange(draws, dtype=F64).repeat(len(x))
    u = (step + torch.rand(len(step), dtype=F64, generator=generator)) / draws
    part = first + u * (last - first)
    logsnr, weight = 3 * torch.logit(part), 3 * (last - first) / (part * (1 - part))
    noise = torch.randn(values.shape, dtype=F64, generator=generator)
    noisy = values + (-logsnr / 2).exp()[:, None] * noise
    error = (noise - denoiser.predict(noisy, logsnr)).square().sum(1) / 2
    expected = bound.reconstruction - (weight * error).reshape(len(x), draws).mean(1)
    return bound.nats - bound.prior, expected


@pytest.mark.parametrize("name", INVARIANT)
def test_channel_invariance(denoiser: ScoreModel, name: str, seed: int) -> None:
    """What is left without the prior is a function of the last log SNR alone.

    One standard error is about 0.03 bits per dimension.
    """
    with torch.no_grad():
        found, expected = without_prior(denoiser, invariant(name), pixels(256, 999), 48, seed)
    number, error = deviation(found / (8 * math.log(2)), expected / (8 * math.log(2)))
    assert error <= 0.06
    assert abs(number) <= 3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if i < 12 else pytest.mark.long)
        for i, name in enumerate(INVARIANT)
    ],
)
def test_channel_invariance_closely(denoiser: ScoreModel, name: str, seed: int) -> None:
    """The same to a standard error of about 0.012 bits per dimension."""
    with torch.no_grad():
        found, expected = without_prior(denoiser, invariant(name), pixels(1024, 998), 100, seed)
    number, error = deviation(found / (8 * math.log(2)), expected / (8 * math.log(2)))
    assert error <= 0.02
    assert abs(number) <= 3
