"""Rates and their integrals: closed forms, quadrature, 50 digits; ends, growth and proportion."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from mpmath import mp
from scipy.integrate import quad
from torch import Tensor

import ornstein
from ornstein import (
    Constant,
    Cosine,
    Diffusion,
    FromIntegral,
    FromRate,
    Linear,
    Monotone,
    Schedule,
)
from ornstein.schedules import proportion
from tests.families import clock, rate

F64 = torch.float64
TURN = [[0.0, -1.0], [1.0, 0.0]]
ONE = [[1.0, 0.0], [0.0, 1.0]]


def random_monotone(seed: int, base: Schedule | None = None, degree: int = 8) -> Monotone:
    """A learned clock with parameters of size one."""
    schedule = Monotone(base, degree)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        schedule.logits.copy_(torch.randn(degree, generator=generator, dtype=F64))
    return schedule


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "constant": lambda: Constant(3.0),
    "linear": lambda: Linear(0.1, 20.0),
    "linear-falling": lambda: Linear(5.0, 0.5, horizon=2.0),
    "cosine": Cosine,
    "cosine-short": lambda: Cosine(total=2.0, offset=0.1, horizon=3.0),
    "monotone": lambda: random_monotone(0),
    "monotone-cosine": lambda: random_monotone(1, Cosine(4.0), degree=5),
    "from-rate": lambda: FromRate(lambda s: 1 + torch.sin(3 * s) ** 2, horizon=2.0),
    "from-integral": lambda: FromIntegral(lambda s: s + s**3, horizon=2.0),
}


@pytest.fixture(params=list(SCHEDULES))
def schedule(request: pytest.FixtureRequest) -> Schedule:
    """Each schedule in turn."""
    return SCHEDULES[request.param]()


def at(schedule: Schedule, *fractions: float) -> Tensor:
    """Times as fractions of the horizon."""
    return schedule.horizon * torch.tensor(fractions, dtype=F64)


# ------------------------------------------------------------------ every schedule


def test_integral_is_the_integral_of_the_rate(schedule: Schedule) -> None:
    """scipy's adaptive quadrature, asked for 1e-12."""

    def value(r: float) -> float:
        return float(schedule.rate(torch.tensor(r, dtype=F64)))

    for fraction in (1e-3, 0.1, 0.5, 0.9, 1.0):
        s = fraction * schedule.horizon
        expected, _ = quad(value, 0.0, s, epsabs=0.0, epsrel=1e-12, limit=200)
        found = float(schedule.integral(torch.tensor(s, dtype=F64)))
        assert math.isclose(found, expected, rel_tol=1e-11), fraction


def test_rate_is_the_slope_of_the_integral(schedule: Schedule) -> None:
    """By autograd, which is exact to rounding; numerical integration gives ten digits."""
    s = at(schedule, 0.01, 0.2, 0.5, 0.8, 0.99).requires_grad_()
    (slope,) = torch.autograd.grad(schedule.integral(s).sum(), s)
    assert torch.allclose(schedule.rate(s), slope, rtol=1e-10, atol=0.0)


def test_rates_have_gradients(schedule: Schedule) -> None:
    """b and τ and ∫ᵣˢ b with respect to the times, by torch's own check."""
    s, r = at(schedule, 0.3, 0.9).requires_grad_(), at(schedule, 0.1, 0.7).requires_grad_()
    assert torch.autograd.gradcheck(schedule.rate, (s,), eps=1e-6, atol=1e-6, rtol=1e-6)
    assert torch.autograd.gradcheck(schedule.between, (r, s), eps=1e-6, atol=1e-6, rtol=1e-6)


def test_rate_is_positive_and_the_clock_rises(schedule: Schedule) -> None:
    s = schedule.horizon * torch.linspace(0, 1, 1001, dtype=F64)
    assert bool((schedule.rate(s)[1:-1] > 0).all())
    assert bool((schedule.integral(s).diff() > 0).all())
    assert float(schedule.integral(torch.zeros((), dtype=F64))) == 0.0


def test_shapes_and_types(schedule: Schedule) -> None:
    """Elementwise: a value does not depend on the shape it came in."""
    s = schedule.horizon * torch.rand(2, 3, dtype=F64)
    for function in (schedule.rate, schedule.integral):
        assert function(s).shape == (2, 3) and function(s).dtype == F64
        assert torch.allclose(function(s)[1, 2], function(s[1, 2]), rtol=1e-15, atol=0.0)
    assert torch.allclose(
        schedule.between(torch.zeros_like(s), s), schedule.integral(s), rtol=1e-14, atol=0.0
    )


def test_parts_add_up(schedule: Schedule) -> None:
    """∫ₐᵇ + ∫ᵇᶜ = ∫ₐᶜ."""
    a, b, c = at(schedule, 0.05, 0.4), at(schedule, 0.2, 0.7), at(schedule, 0.9, 1.0)
    parts = schedule.between(a, b) + schedule.between(b, c)
    assert torch.allclose(parts, schedule.between(a, c), rtol=1e-12, atol=0.0)


def test_rates_without_gradients(schedule: Schedule) -> None:
    """The same value under no_grad, for times that carry a gradient, views or not."""
    s = at(schedule, 0.2, 0.6).requires_grad_()
    expected = schedule.rate(s).detach()
    with torch.no_grad():
        for times in (s, s.reshape(-1), s.detach()):
            assert torch.equal(schedule.rate(times).detach(), expected)


# ------------------------------------------------------------------ closed forms in 50 digits


@pytest.mark.parametrize("name", ["constant", "linear", "linear-falling", "cosine", "cosine-short"])
def test_closed_forms(name: str) -> None:
    """Cosine ends near π/2, where cos a = 7e-3 and a rounding of 1e-16 weighs 3e-14."""
    schedule = SCHEDULES[name]()
    for fraction in (1e-6, 1e-3, 0.1, 0.5, 0.9, 1.0):
        s = fraction * schedule.horizon
        time = torch.tensor(s, dtype=F64)
        with mp.workdps(50):
            tau, b = float(clock(schedule, s)), float(rate(schedule)(mp.mpf(s)))
        assert math.isclose(float(schedule.integral(time)), tau, rel_tol=1e-13), fraction
        assert math.isclose(float(schedule.rate(time)), b, rel_tol=1e-12), fraction


def test_cosine_reaches_its_total() -> None:
    """exp(−τ) = cos²a/cos²a₀ ends where it was told to."""
    for total in (1.0, 10.05, 20.0):
        schedule = Cosine(total)
        end = float(schedule.integral(torch.ones((), dtype=F64)))
        # acos near π/2: ε/cos a = ε·e^(total/2)
        assert math.isclose(end, total, rel_tol=4e-16 * math.exp(total / 2))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "from-rate"])
def test_a_short_interval_does_not_cancel(name: str) -> None:
    """∫ᵣˢ b for s − r = 1e-9 keeps its digits, where a difference of integrals would lose nine."""
    schedule = SCHEDULES[name]()
    r = torch.tensor(0.5, dtype=F64)
    s = r + 1e-9
    with mp.workdps(60):
        left, right = mp.mpf(float(r)), mp.mpf(float(s))
        if name == "from-rate":
            # ∫ 1 + sin²3s = 3s/2 − sin(6s)/12
            truth = 3 * (right - left) / 2 - (mp.sin(6 * right) - mp.sin(6 * left)) / 12
        else:
            truth = clock(schedule, float(s)) - clock(schedule, float(r))
        expected = float(truth)
    # s − r is exact; what is left is the rounding of the rate itself
    assert math.isclose(float(schedule.between(r, s)), expected, rel_tol=1e-13)


# ------------------------------------------------------------------ the learned clock


@pytest.mark.parametrize("seed", range(8))
def test_a_learned_clock_keeps_its_ends(seed: int) -> None:
    """τ(0) and τ(T) of the base, equal to the last bit, whatever the parameters."""
    for base in (Linear(0.1, 20.0), Linear(0.3, 7.0, horizon=1.7), Cosine(), Constant(3.3)):
        schedule = random_monotone(seed, base, degree=2 + seed)
        with torch.no_grad():
            schedule.logits.mul_(1 + seed)
        ends = at(schedule, 0.0, 1.0)
        assert float(schedule.integral(ends)[0]) == 0.0
        assert float(schedule.integral(ends)[1]) == float(base.integral(ends)[1])
        grid = schedule.horizon * torch.linspace(0, 1, 401, dtype=F64)
        assert bool((schedule.integral(grid).diff() > 0).all())
        assert bool((schedule.rate(grid)[1:] > 0).all())


def test_a_learned_clock_starts_as_its_base() -> None:
    for base in (Linear(0.1, 20.0), Cosine(3.0), Constant(2.0, horizon=4.0)):
        schedule = Monotone(base)
        s = base.horizon * torch.linspace(0, 1, 101, dtype=F64)
        assert torch.allclose(schedule.integral(s), base.integral(s), rtol=1e-14, atol=1e-15)
        assert torch.allclose(schedule.rate(s), base.rate(s), rtol=1e-13, atol=1e-14)


def test_a_learned_clock_has_gradients() -> None:
    """Of rate and integral with respect to the parameters; none at the two ends."""
    schedule = random_monotone(3)
    s = torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=F64)

    def values(logits: Tensor) -> tuple[Tensor, Tensor]:
        rate, integral = (
            torch.func.functional_call(_Method(schedule, name), {"inner.logits": logits}, s)
            for name in ("rate", "integral")
        )
        return rate, integral

    logits = schedule.logits.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(values, (logits,), eps=1e-6, atol=1e-7, rtol=1e-6)
    (ends,) = torch.autograd.grad(schedule.integral(s[[0, 3]]).sum(), schedule.logits)
    assert float(ends.abs().max()) <= 1e-14  # the ends do not move: rounding of τ_T = 10


class _Method(torch.nn.Module):
    """One method of a schedule as a module's forward."""

    def __init__(self, inner: Schedule, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, s: Tensor) -> Tensor:
        return getattr(self.inner, self.name)(s)


# ------------------------------------------------------------------ functions of the user's own


def test_both_ways_of_giving_a_function() -> None:
    """b = 2 + cos s by its values, by its integral, and in closed form."""
    by_rate = FromRate(lambda s: 2 + torch.cos(s))
    by_integral = FromIntegral(lambda s: 2 * s + torch.sin(s))
    s = torch.linspace(0.01, 1, 50, dtype=F64)
    exact = 2 * s + torch.sin(s)
    assert torch.allclose(by_rate.integral(s), exact, rtol=1e-14, atol=0.0)
    assert torch.equal(by_integral.integral(s), exact)
    assert torch.allclose(by_integral.rate(s), 2 + torch.cos(s), rtol=1e-14, atol=0.0)
    ours = Diffusion(TURN, ONE, rate=lambda s: 2 + torch.cos(s)).transition(s)
    theirs = Diffusion(TURN, ONE, rate=by_integral).transition(s)
    assert torch.allclose(ours.cholesky, theirs.cholesky, rtol=1e-12, atol=1e-15)
    assert torch.allclose(ours.propagator, theirs.propagator, rtol=1e-12, atol=1e-15)


def test_parameters_of_a_function_are_learned() -> None:
    """A module as rate: its parameter is found and has the gradient of the closed form."""

    class Growth(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.power = torch.nn.Parameter(torch.tensor(0.7, dtype=F64))

        def forward(self, s: Tensor) -> Tensor:
            return torch.exp(self.power * s)

    process = ornstein.vpsde(rate=Growth())
    assert process.learned
    (parameter,) = process.parameters()
    mean = process.transition(0.5).propagator[0, 0]
    (found,) = torch.autograd.grad(mean, parameter)
    # τ = (e^{ps} − 1)/p, dτ/dp = (ps e^{ps} − e^{ps} + 1)/p², d e^{−τ/2} = −½ e^{−τ/2} dτ
    p, s = 0.7, 0.5
    tau = math.expm1(p * s) / p
    slope = (p * s * math.exp(p * s) - math.expm1(p * s)) / p**2
    assert math.isclose(float(mean), math.exp(-tau / 2), rel_tol=1e-13)
    assert math.isclose(float(found), -0.5 * math.exp(-tau / 2) * slope, rel_tol=1e-12)


# ------------------------------------------------------------------ proportion


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [
        (Linear(0.1, 20.0), Linear(0.05, 10.0), 2.0),
        (Linear(0.1, 20.0), Linear(0.1, 20.0), 1.0),
        (Constant(3.0), Constant(2.0), 1.5),
        (Linear(2.0, 2.0), Constant(4.0), 0.5),
        (Cosine(), Cosine(), 1.0),
    ],
)
def test_proportional_rates_are_recognised(first: Schedule, second: Schedule, ratio: float) -> None:
    found = proportion(first, second)
    assert found is not None and math.isclose(found, ratio, rel_tol=1e-15)
    process = Diffusion(TURN, ONE, rate_q=first, rate_d=second)
    assert process.commutes
    # on one clock, Φ = exp(−τ_d(ratio·Q + D)) = e^(−τ_d)(cos, sin)(ratio·τ_d)
    s = torch.tensor(0.3, dtype=F64)
    tau = float(second.integral(s))
    expected = [math.exp(-tau) * math.cos(ratio * tau), -math.exp(-tau) * math.sin(ratio * tau)]
    found_column = process.transition(s).propagator[:, 0].tolist()
    assert all(abs(a - b) <= 1e-14 for a, b in zip(found_column, expected, strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Linear(0.1, 20.0), Constant(5.0)),
        (Linear(0.1, 20.0), Linear(0.1, 10.0)),
        (Cosine(), Linear(0.1, 20.0)),
        (Cosine(3.0), Cosine(4.0)),
        (Monotone(), Monotone()),
    ],
)
def test_other_rates_are_not_taken_for_proportional(first: Schedule, second: Schedule) -> None:
    assert proportion(first, second) is None
    assert not Diffusion(TURN, ONE, rate_q=first, rate_d=second).commutes


def test_one_schedule_twice_is_one_clock() -> None:
    shared = Monotone()
    assert proportion(shared, shared) == 1.0
    assert Diffusion(TURN, ONE, rate=shared).commutes
    assert Diffusion([[0.0]], [[1.0]], rate_q=Constant(1.0), rate_d=Linear()).commutes  # no Q
