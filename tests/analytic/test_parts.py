"""A part that was described, written as JSON and built again is the same part, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ornstein
from ornstein import (
    Constant,
    Continuous,
    Cosine,
    Diffusion,
    Discrete,
    FixedTime,
    FromIntegral,
    FromRate,
    Likelihood,
    Linear,
    LinearSDE,
    Monotone,
    NoiseLevel,
    Process,
    Schedule,
    Tweedie,
)
from ornstein.matrices import Fixed, Semidefinite, Skew
from ornstein.networks import MLP, UNet
from ornstein.parts import KINDS, described, part, rebuilt
from tests.conformance.zoo import FULL_S, THREE_D, THREE_Q, TURN, TWO_NOISES, ZOO, moved
from tests.test_errors import message, says

F64 = torch.float64
TIMES = torch.tensor([1e-4, 0.013, 0.3, 0.77, 1.0], dtype=F64)
CODE = ("rate-from-rate", "rate-from-integral", "linear-sde", "linear-sde-learned")

PROCESSES: dict[str, Callable[[], Process]] = {
    **{name: make for name, make in ZOO.items() if name not in CODE},
    "learned-full-separate": lambda: moved(
        ornstein.learned(1, full=True, learn_rates="separate", rate=Cosine(6.0)), size=0.1
    ),
    "learned-everything": lambda: moved(
        ornstein.learned(
            2,
            full=True,
            S=FULL_S,
            learn_rates="shared",
            v0_variance=[[0.2, 0.05], [0.05, 0.1]],
            v0_coupling=[0.3, -0.2],
            learn_v0_variance=True,
            learn_v0_coupling=True,
        ),
        size=0.1,
    ),
    "half-learned": lambda: moved(Diffusion(TURN, Semidefinite(torch.eye(2, dtype=F64)))),
    "learned-turn": lambda: moved(Diffusion(Skew(torch.tensor(TURN, dtype=F64)), TWO_NOISES)),
    "one-noise-learned": lambda: moved(  # D̃ has two columns for three variables
        Diffusion(THREE_Q, Semidefinite(torch.tensor(THREE_D, dtype=F64)[:, :2])), size=0.1
    ),
    "subvpsde-learned": lambda: moved(ornstein.subvpsde(rate=Monotone(Linear(0.1, 12.0), 4))),
    "subvpsde-constant": lambda: ornstein.subvpsde(rate=7.0),
    "vesde-narrow": lambda: ornstein.vesde(0.02, 3.0, horizon=2.0),
    "cld-one-rate": lambda: ornstein.cld(mass=0.3, damping=1.7, rate=Linear(1 / 3, 7.1)),
    "low-rank-float32": lambda: Diffusion(TURN, low_rank(2)),
}


def low_rank(K: int) -> Tensor:
    """D of rank one in float32, whose rounding leaves an eigenvalue a little below zero."""
    column = torch.tensor([[1.0], [0.3]])[:K]
    D = column @ column.T
    D[0, 0] -= 1e-7
    return D


def again(thing: object, base: type = object) -> Any:
    """The part once it has been a line of text."""
    return rebuilt(json.loads(json.dumps(described(thing), allow_nan=False)), "it", base)


def same_kernels(one: Process, other: Process, times: Tensor) -> None:
    """Equal in every bit."""
    for conditions in ({"given": "x"}, {"given": "state"}, {"given": "state", "start": 1e-5}):
        at = times[1:] if conditions["given"] == "state" else times
        found, wanted = (p.transition(at, **conditions) for p in (one, other))  # type: ignore[arg-type]
        assert torch.equal(found.propagator, wanted.propagator)
        assert torch.equal(found.cholesky, wanted.cholesky)
        assert torch.equal(found.direction, wanted.direction)
    assert torch.equal(one.drift(times), other.drift(times))
    assert torch.equal(one.diffusion(times), other.diffusion(times))
    assert torch.equal(one.prior_covariance, other.prior_covariance)
    assert torch.equal(one.log_volume(times), other.log_volume(times))


def gradients(process: Process, times: Tensor) -> dict[str, Tensor]:
    """Of a number that depends on all of the kernel, by the names of the parameters."""
    kernel = process.transition(times)
    total = (kernel.cholesky.sin().sum() + kernel.response.cos().sum()).requires_grad_()
    names, parameters = zip(*process.named_parameters(), strict=True)
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return {n: torch.zeros(()) if g is None else g for n, g in zip(names, found, strict=True)}


# ------------------------------------------------------------------ processes


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_is_built_again(name: str) -> None:
    process = PROCESSES[name]()
    other = again(process, Process)
    times = TIMES * process.horizon
    if not process.learned:  # all of it is in the description
        same_kernels(other, process, times)
    other.load_state_dict(process.state_dict())
    assert list(other.state_dict()) == list(process.state_dict())
    assert (other.name, other.n_vars, other.horizon) == (
        process.name,
        process.n_vars,
        process.horizon,
    )
    same_kernels(other, process, times)
    assert described(other) == described(process)
    assert type(other) is type(process)


@pytest.mark.parametrize("name", [n for n, make in PROCESSES.items() if make().learned])
def test_what_is_learned_is_learned_again(name: str) -> None:
    """The same parameters by the same names, tied where they were, with the same gradients."""
    process = PROCESSES[name]()
    other = again(process, Process)
    other.load_state_dict(process.state_dict())
    found, wanted = gradients(other, TIMES), gradients(process, TIMES)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert any(bool(g.any()) for g in wanted.values())


def test_one_rate_stays_one() -> None:
    shared, apart = (again(ornstein.learned(1, learn_rates=how)) for how in ("shared", "separate"))
    assert shared.rate_q is shared.rate_d
    assert apart.rate_q is not apart.rate_d
    assert apart.rate_q.base is apart.rate_d.base  # as `learned` makes them
    two = again(Diffusion(TURN, TWO_NOISES, rate_q=Linear(), rate_d=Linear()))
    assert two.rate_q is not two.rate_d
    assert two.ratio == 1.0
    sub = again(ornstein.subvpsde(rate=Monotone()))
    assert sub._drift_function.schedule is sub._diffusion_function.schedule
    assert len(list(sub.parameters())) == 1


def test_a_description_of_what_is_learned_has_no_numbers() -> None:
    """They change while it trains, and the description stays: a run is known by it."""
    process = ornstein.learned(2, learn_v0_variance=True, learn_v0_coupling=True)
    before = described(process)
    assert described(moved(process)) == before


def test_a_description_of_loaded_matrices_is_new() -> None:
    process, other = ornstein.cld(mass=1.0), ornstein.cld()
    other.load_state_dict(process.state_dict())
    assert described(other) == described(process)


def test_a_process_on_a_cast_model_keeps_its_digits() -> None:
    process = ornstein.cld(mass=1 / 3).half()
    assert described(process)["S"] == [[1.0, 0.0], [0.0, 1 / (1 / 3)]]


@st.composite
def matrices(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a process with any Q, D, S, rates and law of v₀."""
    K = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    raw, factor, root = normal(K, K), normal(K, K), normal(K, K)
    v0 = normal(K - 1, K - 1)
    number = st.floats(0.05, 9.0)
    rate = st.one_of(
        st.builds(Constant, number),
        st.builds(Linear, number, number),
        st.builds(Cosine, number, st.floats(0.004, 0.1)),
    )
    arguments: dict[str, Any] = {
        "Q": raw - raw.mT,
        "D": factor @ factor.mT / K,
        "S": root @ root.mT / K + torch.eye(K, dtype=F64),
        "v0_variance": v0 @ v0.mT,
        "v0_coupling": normal(K - 1),
    }
    if draw(st.booleans()):
        return {**arguments, "rate": draw(rate)}
    return {**arguments, "rate_q": draw(rate), "rate_d": draw(rate)}


@settings(max_examples=25, deadline=None)
@given(arguments=matrices())
def test_any_matrices_are_built_again(arguments: dict[str, Any]) -> None:
    try:
        process = Diffusion(**arguments)
    except ValueError:  # too stiff, or nearly singular
        assume(False)
    other = again(process, Process)
    assert torch.equal(other.auxiliary.root, process.auxiliary.root)
    assert torch.equal(other.auxiliary.coupling, process.auxiliary.coupling)
    for found, wanted in zip(other.state_dict().items(), process.state_dict().items(), strict=True):
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])
    at = torch.tensor([0.2, 0.6, 1.0], dtype=F64)
    assert torch.equal(other.transition(at).cholesky, process.transition(at).cholesky)
    assert torch.equal(other.transition(at).propagator, process.transition(at).propagator)


# ------------------------------------------------------------------ rates


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.1, 10.0))
def test_rates_keep_every_digit(first: float, second: float, horizon: float) -> None:
    s = horizon * torch.linspace(0, 1, 7, dtype=F64)
    for rate in (
        Constant(first, horizon),
        Linear(first, second, horizon),
        Cosine(min(first, 20.0), 0.004 + min(second, 0.1), horizon),
        Monotone(Linear(first, second, horizon), degree=3),
    ):
        other = again(rate, Schedule)
        assert type(other) is type(rate)
        assert torch.equal(other.rate(s), rate.rate(s))
        assert torch.equal(other.integral(s), rate.integral(s))


# ------------------------------------------------------------------ code of one's own


class Wave(nn.Module):
    """A rate of the user's own, with a number and a parameter."""

    def __init__(self, lift: float) -> None:
        super().__init__()
        self.lift = lift
        self.size = nn.Parameter(torch.tensor(2.0, dtype=F64))

    def forward(self, s: Tensor) -> Tensor:
        return self.size * (self.lift + torch.sin(s))

    def describe(self) -> dict[str, Any]:
        return {"lift": self.lift}

    @classmethod
    def rebuild(cls, fields: dict[str, Any]) -> Wave:
        return cls(**fields)


class Falling(nn.Module):
    """A drift around a wave."""

    def __init__(self, wave: Wave) -> None:
        super().__init__()
        self.wave = wave

    def forward(self, s: Tensor) -> Tensor:
        return -0.5 * self.wave(s)

    def describe(self) -> dict[str, Any]:
        return {"wave": described(self.wave)}

    @classmethod
    def rebuild(cls, fields: dict[str, Any]) -> Falling:
        return cls(rebuilt(fields["wave"], "the wave", Wave))


class Squared(Falling):
    """Noise around a wave."""

    def forward(self, s: Tensor) -> Tensor:
        return self.wave(s) ** 2


@pytest.fixture
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "test-wave", Wave)
    monkeypatch.setitem(KINDS, "test-falling", Falling)
    monkeypatch.setitem(KINDS, "test-squared", Squared)


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Diffusion(TURN, TWO_NOISES, rate=FromRate(Wave(1.5), nodes=48)),
        lambda: two_rates_of_one(Wave(1.5)),
        lambda: one_wave(Wave(1.5)),
        lambda: LinearSDE(Wave(-3.0), Wave(1.5), 1.0),
        lambda: turned_inside_out(Wave(1.5)),
    ],
    ids=["a rate", "two rates of one function", "a drift around the noise", "two", "the reverse"],
)
def test_listed_code_of_ones_own(make: Callable[[], Process]) -> None:
    process = moved(make(), size=0.1)
    other = again(process, Process)
    other.load_state_dict(process.state_dict())
    same_kernels(other, process, TIMES)
    found, wanted = gradients(other, TIMES), gradients(process, TIMES)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def two_rates_of_one(wave: Wave) -> Diffusion:
    """Two schedules that learn one function."""
    return Diffusion(TURN, TWO_NOISES, rate_q=FromRate(wave), rate_d=FromRate(wave))


def one_wave(wave: Wave) -> LinearSDE:
    """The noise is a module inside the drift."""
    return LinearSDE(Falling(wave), wave, 1.0)


def turned_inside_out(wave: Wave) -> LinearSDE:
    """The drift is a module inside the noise."""
    return LinearSDE(wave, Squared(wave), 1.0)


@pytest.mark.parametrize("name", CODE)
def test_code_of_ones_own_says_what_to_do(name: str) -> None:
    process = ZOO[name]()
    said = message(lambda: described(process))
    says(said, "code of your own", "parts.part(name)", "from_pretrained(folder, process=process)")


@pytest.mark.parametrize(
    "rate, what",
    [
        (FromRate(lambda s: 1 + s), "the rate of FromRate"),
        (FromIntegral(lambda s: s + s**2), "the clock of FromIntegral"),
        (Monotone(FromRate(lambda s: 1 + s)), "the rate of FromRate"),
    ],
    ids=["rate", "integral", "inside"],
)
def test_functions_are_not_described(rate: Schedule, what: str) -> None:
    says(message(lambda: described(rate)), what, "<lambda>", "process=process")


def test_classes_of_ones_own_are_not_taken_for_ours() -> None:
    """A subclass may do anything, so that its parent's name would be a lie."""

    class Other(UNet):
        pass

    class Turned(Skew):
        pass

    says(message(lambda: described(Other.tiny())), "Other can't be described", "part(name)")
    process = Diffusion(Turned(torch.tensor(TURN, dtype=F64)), TWO_NOISES)
    says(message(lambda: described(process)), "Turned can't be described")


def test_a_name_belongs_to_one_class() -> None:
    class Mine:
        pass

    says(message(lambda: part("unet")(Mine)), "'unet' is taken by UNet", "Mine")
    assert KINDS["unet"] is UNet


# ------------------------------------------------------------------ everything else


@pytest.mark.parametrize(
    "likelihood",
    [
        Discrete(),
        Discrete(5, logit=0.03),
        Tweedie(),
        Tweedie(16, logit=1 / 7),
        Tweedie(None),
        Continuous(),
    ],
    ids=repr,
)
def test_likelihoods(likelihood: Likelihood) -> None:
    other = again(likelihood, Likelihood)
    assert type(other) is type(likelihood)
    assert repr(other) == repr(likelihood)
    assert other.same_space(likelihood)
    assert other.noise_level(0.37) == likelihood.noise_level(0.37)
    assert other.name == likelihood.name


@pytest.mark.parametrize("truncation", [NoiseLevel(1 / 3), FixedTime(1e-3 / 3)], ids=str)
def test_truncations(truncation: NoiseLevel | FixedTime) -> None:
    assert again(truncation) == truncation


@pytest.mark.parametrize(
    "make, x",
    [
        (lambda: UNet.tiny(), (2, 1, 8, 8)),
        (lambda: UNet.tiny((3, 6, 7), variables=2, features=1, dropout=0.25), (2, 4, 3, 6, 7)),
        (lambda: UNet((1, 8, 8), None, 0, 8, (1, 3), 2, (8, 4), 0.1), (2, 1, 8, 8)),
        (lambda: MLP((5,), 3, 2, 16, 2, 0.5), (2, 7, 5)),
        (lambda: MLP([5]), (2, 5)),
    ],
    ids=["tiny", "joint", "own sizes", "mlp joint", "mlp"],
)
def test_networks(make: Callable[[], nn.Module], x: tuple[int, ...]) -> None:
    network = make()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    other = again(network, nn.Module)
    assert repr(other) == repr(network)  # dropout, which weights don't show, as well
    other.load_state_dict(network.state_dict())
    y, logsnr = torch.randn(x), torch.randn(2)
    assert torch.equal(other.eval()(y, logsnr), network.eval()(y, logsnr))


def test_small_is_a_plain_unet() -> None:
    assert described(UNet.small()) == {
        "kind": "unet",
        "shape": [1, 28, 28],
        "variables": None,
        "features": 0,
        "width": 32,
        "multipliers": [1, 2, 2],
        "blocks": 1,
        "attention": [7, 8],
        "dropout": 0.0,
    }


def test_fixed_matrices_are_taken_as_they_are() -> None:
    """What a description holds was checked when it was given, in the type that it had then."""
    D = low_rank(2)
    assert float(torch.linalg.eigvalsh(((D + D.T) / 2).to(F64))[0]) < -1e-9  # not in float64
    process = Diffusion(TURN, D)
    says(message(lambda: Diffusion(TURN, process.D.tolist())), "eigenvalue")
    assert torch.equal(Diffusion(TURN, Fixed(process.D)).D, process.D)


@pytest.mark.parametrize(
    "record, words",
    [
        ({"kind": "unett"}, ["'unett'", "Perhaps you meant 'unet'"]),
        ({"kind": "discrete"}, ["'discrete'", "unet"]),
        ({"kind": "unet", "shape": [1, 8, 8], "size": 3}, ["'unet'", "size"]),
        ({"kind": "unet"}, ["'unet'", "shape"]),
        ({"shape": [1, 8, 8]}, ["'kind'"]),
        ("unet", ["'unet'", "'kind'"]),
        ({"kind": ["unet"]}, ["'kind'"]),
    ],
    ids=str,
)
def test_descriptions_of_nothing(record: Any, words: list[str]) -> None:
    text = message(lambda: rebuilt(record, "the network", nn.Module))
    assert "the network" in text
    for word in words:
        assert word in text
