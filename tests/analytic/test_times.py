"""Proposals for times: every one of them integrates any smooth function exactly.

The mean over u is taken on a midpoint grid of N points, not by chance. For a function of bounded
variation V the midpoint rule is off by at most V/2N, and V is read off the same grid (times two,
for what lies between the points): that is the tolerance, and it goes to zero with the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import (
    Adaptive,
    Counted,
    Discrete,
    Importance,
    LogSNR,
    NoiseLevel,
    Process,
    ScoreModel,
    Times,
    Uniform,
    elbo,
)
from ornstein.times import Information, Span
from tests.conformance.zoo import ZOO

F64 = torch.float64
NOISE = 2e-3  # standard error of x at the start of the span
NODES = 256  # of the tables of the library
FEW = ["vpsde", "vesde", "cld", "alda", "learned-2-full", "cosine-against-linear", "linear-sde"]

# functions of a time t ∈ [0, 1] (parts of the horizon) and their integrals
Smooth = tuple[Callable[[Tensor], Tensor], Callable[[float], float]]
FUNCTIONS: list[Smooth] = [
    (torch.ones_like, lambda t: t),
    (lambda t: t, lambda t: t**2 / 2),
    (lambda t: torch.cos(7 * t), lambda t: math.sin(7 * t) / 7),
    (lambda t: torch.exp(-5 * t), lambda t: -math.exp(-5 * t) / 5),
    (lambda t: 1 / t, lambda t: math.log(t)),
    (lambda t: t.rsqrt(), lambda t: 2 * math.sqrt(t)),
]


def grid(count: int) -> Tensor:
    """Midpoints of [0, 1): (count,)."""
    return (torch.arange(count, dtype=F64) + 0.5) / count


def span_of(process: Process, noise: float = NOISE) -> Span:
    """From a noise level to the horizon, for data of another size than one."""
    with torch.no_grad():
        return Span(process, process.time_of_noise(noise), 0.6)


def trained(base: Times) -> Adaptive:
    """An adaptive proposal that has seen a loss with a bump."""
    times = Adaptive(base, bins=16, decay=0.9)
    for _ in range(20):
        u = grid(640)
        place, factor = times.reshape(u)
        times.observe(u, factor * (0.2 + torch.exp(-((place - 0.3) ** 2) / 0.01)))
    assert float(times.density().max()) > 2.5
    return times


PROPOSALS: dict[str, Callable[[], Times]] = {
    "uniform": Uniform,
    "importance": Importance,
    "importance of vpsde": lambda: Importance(ornstein.vpsde(horizon=3.0)),
    "log snr": LogSNR,
    "information": Information,
    "adaptive": Adaptive,
    "trained on uniform": lambda: trained(Uniform()),
    "trained on importance": lambda: trained(Importance()),
    "trained on log snr": lambda: trained(LogSNR()),
    "trained on information": lambda: trained(Information()),
}


def check_integrals(times: Times, span: Span, count: int) -> float:
    """Integrate everything; the largest error relative to its tolerance."""
    s, weight = times.place(grid(count), span)
    T, start = span.process.horizon, float(span.start)
    assert s.shape == weight.shape == (count,) and s.dtype == weight.dtype == F64
    assert not s.requires_grad and not weight.requires_grad
    assert float(s.min()) >= start and float(s.max()) <= T
    assert bool((s.diff() >= 0).all())
    assert bool((weight > 0).all()) and bool(weight.isfinite().all())
    worst = 0.0
    for function, integral in FUNCTIONS:
        values = weight * function(s / T)
        expected = T * (integral(1.0) - integral(start / T))
        variation = float(values.diff().abs().sum()) + float(values.abs().max())
        tolerance = variation / count + 1e-13 * abs(expected)
        worst = max(worst, abs(float(values.mean()) - expected) / tolerance)
    return worst


@pytest.mark.parametrize("name", ZOO)
def test_unbiased_on_the_zoo(name: str) -> None:
    """The proposals that ask the process, for all processes."""
    process = ZOO[name]()
    for times in (Importance(), LogSNR(), Information()):
        assert check_integrals(times, span_of(process), 4096) <= 1.0


@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("name", FEW)
def test_unbiased(name: str, proposal: str) -> None:
    span = span_of(ZOO[name]())
    assert check_integrals(PROPOSALS[proposal](), span, 4096) <= 1.0


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_the_error_goes_to_zero(proposal: str) -> None:
    """2¹⁹ points: what they integrate to is right to 1e-4, in relative terms."""
    span, times = span_of(ZOO["cld"]()), PROPOSALS[proposal]()
    s, weight = times.place(grid(2**19), span)
    for function, integral in FUNCTIONS:
        expected = integral(1.0) - integral(float(span.start))
        assert math.isclose(float((weight * function(s)).mean()), expected, rel_tol=1e-4)


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 0.5])
def test_unbiased_for_any_start(noise: float) -> None:
    for name in ("vpsde", "alda"):
        for proposal in ("importance", "log snr", "information", "importance of vpsde"):
            span = span_of(ZOO[name](), noise)
            assert check_integrals(PROPOSALS[proposal](), span, 4096) <= 1.0


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_the_ends_of_u(proposal: str) -> None:
    """u = 0 is the start, and the largest u below one does not pass the horizon."""
    for name in ("cld", "horizon"):
        span, times = span_of(ZOO[name]()), PROPOSALS[proposal]()
        u = torch.tensor([0.0, 1 - 2.0**-53], dtype=F64)
        s, weight = times.place(u, span)
        assert math.isclose(float(s[0]), float(span.start), rel_tol=1e-12)
        assert s[1] <= span.process.horizon
        assert math.isclose(float(s[1]), span.process.horizon, rel_tol=1e-9)
        assert bool((weight > 0).all())


# ---------------------------------------------------------------- densities


def half_trace(process: Process, s: Tensor) -> Tensor:
    """½tr(Σ⁻¹GGᵀ)."""
    with torch.no_grad():
        kernel = process.transition(s)
        inner = torch.cholesky_solve(process.diffusion(s), kernel.cholesky)
        return torch.diagonal(inner, dim1=-2, dim2=-1).sum(-1) / 2


def loginterval(start: Tensor, horizon: float, count: int) -> tuple[Tensor, Tensor]:
    """Gauss–Legendre nodes and weights for ∫ds over [start, T], in panels even in log s."""
    node, weight = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(8))
    edges = torch.linspace(float(start.log()), math.log(horizon), count + 1, dtype=F64)
    half = edges.diff().unsqueeze(-1) / 2
    logs = (edges[:-1, None] + edges[1:, None]) / 2 + half * node
    return logs.exp().flatten().clamp(max=horizon), (half * weight * logs.exp()).flatten()


STEEP = {"rate-cosine": 2.0, "learned-separate-rates": 0.15, "rate-monotone": 0.15}


@pytest.mark.parametrize("name", ZOO)
def test_importance_density(name: str) -> None:
    """½tr(Σ⁻¹GGᵀ) over its integral, within what it varies by inside one cell of the table.

    Its 257 nodes are even in log s: a density like s is 2 to 3 % off inside a cell of 0.05. Rates
    that rise steeply at the end, as the cosine's, are resolved no better than that.
    """
    process = ZOO[name]()
    span = span_of(process)
    s, weight = Importance().place(grid(2000), span)
    nodes, ds = loginterval(span.start, process.horizon, 400)
    total = float((half_trace(process, nodes) * ds).sum())
    width = (math.log(process.horizon) - float(span.start.log())) / NODES
    near = s.unsqueeze(-1) * torch.linspace(-width, width, 9, dtype=F64).exp()
    near = near.clamp(float(span.start), process.horizon)
    around = half_trace(process, near.flatten()).reshape(near.shape) * near / total
    found = s / weight  # the density in log s
    assert bool((found >= around.amin(1) * (1 - 1e-3)).all())
    assert bool((found <= around.amax(1) * (1 + 1e-3)).all())
    expected = half_trace(process, s) * s / total
    assert float((found / expected - 1).abs().max()) < STEEP.get(name, 0.06)
    # and on the average it is right up to the grid of places
    assert abs(float((expected / found).mean()) - 1) < 1e-3


@pytest.mark.parametrize("name", FEW)
def test_importance_of_another_process(name: str) -> None:
    """VPSDE's density for all processes, as the paper has it."""
    span, vpsde = span_of(ZOO[name]()), ornstein.vpsde()
    s, weight = Importance(vpsde).place(grid(2000), span)
    nodes, ds = loginterval(span.start, 1.0, 400)
    expected = half_trace(vpsde, s) / float((half_trace(vpsde, nodes) * ds).sum())
    assert float((1 / (weight * expected) - 1).abs().max()) < 0.06


@pytest.mark.parametrize("name", ZOO)
def test_log_snr_is_even(name: str) -> None:
    """A draw's λ is where u says, up to one cell of the table; exactly so at the ends."""
    process = ZOO[name]()
    span, u = span_of(process), grid(2000)
    with torch.no_grad():
        s = LogSNR().place(u, span)[0]
        high, low = (process.transition(t).snr.log() for t in (span.start, process.horizon))
        place = (high - process.transition(s).snr.log()) / (high - low)
        node = torch.linspace(float(span.start.log()), math.log(process.horizon), NODES + 1)
        node = node.to(F64).exp().clamp(float(span.start), process.horizon)
        shares = -process.transition(node).snr.log().diff() / (high - low)
    cell = (torch.searchsorted(node, s) - 1).clamp(0, NODES - 1)
    around = torch.stack([shares[(cell + j).clamp(0, NODES - 1)] for j in (-1, 0, 1)])
    # inside a cell λ is interpolated, where it is curved: off by less than the cell's own share
    assert bool(((place - u).abs() <= 0.5 * around.amax(0) + 1e-6).all())


def test_log_snr_exactly() -> None:
    """In λ directly: even, and the weight is the length of the interval."""
    low, high = torch.tensor(-10.0, dtype=F64), torch.tensor(13.0, dtype=F64)
    logsnr, weight = LogSNR().place_logsnr(grid(1000), low, high, 1.0)
    assert torch.allclose(logsnr, 13 - 23 * grid(1000), rtol=1e-15)
    assert torch.equal(weight, torch.full((1000,), 23.0, dtype=F64))
    assert float(LogSNR().place_logsnr(torch.zeros(1, dtype=F64), low, high, 1.0)[0]) == 13.0


IN_LOGSNR = ["log snr", "information", "adaptive", "trained on log snr", "trained on information"]


@pytest.mark.parametrize("proposal", IN_LOGSNR)
@pytest.mark.parametrize("ends", [(-10.0, 13.0), (-1.0, 20.0), (-30.0, -2.0)])
def test_unbiased_in_log_snr(proposal: str, ends: tuple[float, float]) -> None:
    low, high = (torch.tensor(e, dtype=F64) for e in ends)
    times, count = PROPOSALS[proposal](), 2**15
    placed = times.place_logsnr(grid(count), low, high, 0.6)
    assert placed is not None
    logsnr, weight = placed
    assert float(logsnr.min()) >= ends[0] and float(logsnr.max()) <= ends[1]
    assert bool((weight > 0).all()) and bool((logsnr.diff() <= 0).all())
    for function, integral in (
        (torch.ones_like, lambda v: v),
        (lambda v: torch.sin(v / 3), lambda v: -3 * math.cos(v / 3)),
        (torch.sigmoid, lambda v: math.log1p(math.exp(v))),
    ):
        values = weight * function(logsnr)
        variation = float(values.diff().abs().sum()) + float(values.abs().max())
        error = abs(float(values.mean()) - (integral(ends[1]) - integral(ends[0])))
        assert error <= variation / count


@pytest.mark.parametrize("proposal", IN_LOGSNR)
def test_gradient_in_the_ends(proposal: str) -> None:
    """d/d(high) of ∫f dλ is f(high), although places are drawn without a gradient."""
    low = torch.tensor(-4.0, dtype=F64, requires_grad=True)
    high = torch.tensor(7.0, dtype=F64, requires_grad=True)
    logsnr, weight = PROPOSALS[proposal]().place_logsnr(grid(2**15), low, high, 0.6)
    value = (weight * torch.sin(logsnr / 3)).mean()
    found = torch.autograd.grad(value, [low, high])
    # jumps of the weight between cells: 1/N of the variation, as above
    assert math.isclose(float(found[0]), -math.sin(-4.0 / 3), abs_tol=2e-3)
    assert math.isclose(float(found[1]), math.sin(7.0 / 3), abs_tol=2e-3)


@pytest.mark.parametrize("data_std", [0.05, 0.6, 4.0])
def test_information_density(data_std: float) -> None:
    """A tenth even in λ, the rest ∝ d/dλ ½log(1 + ς²e^λ), up to a cell of 0.09 in λ."""
    low, high = torch.tensor(-10.0, dtype=F64), torch.tensor(13.0, dtype=F64)
    logsnr, weight = Information().place_logsnr(grid(4000), low, high, data_std)

    def known(v: Tensor) -> Tensor:
        return torch.nn.functional.softplus(v + 2 * math.log(data_std))

    slope = torch.sigmoid(logsnr + 2 * math.log(data_std))
    expected = 0.1 / 23 + 0.9 * slope / (known(high) - known(low))
    assert float((1 / (weight * expected) - 1).abs().max()) < 0.05


def test_information_is_the_same_in_both() -> None:
    """Drawn in s and drawn in λ, a place means the same up to one cell of either table."""
    process = ZOO["cld"]()
    span, u = span_of(process), grid(500)
    s, _ = Information().place(u, span)
    low, high = (process.transition(t).snr.log() for t in (process.horizon, span.start))
    logsnr, _ = Information().place_logsnr(u, low, high, span.data_std)
    # a cell of 0.03 in log s is 0.1 in λ at the start, 0.8 at the end
    assert float((process.transition(s).snr.log() - logsnr).abs().max()) < 1.0
    assert float((process.transition(s).snr.log() - logsnr).abs().mean()) < 0.05


# ---------------------------------------------------------------- adaptive


def test_reshape_starts_as_the_identity() -> None:
    place, factor = Adaptive(bins=7).reshape(grid(100))
    assert torch.allclose(place, grid(100), rtol=0, atol=1e-15)
    assert torch.allclose(factor, torch.ones(100, dtype=F64), rtol=1e-14)


def test_reshape_is_a_bijection() -> None:
    """Rising from 0 to 1 without gaps, with the slope that the factor says."""
    times = trained(LogSNR())
    u = torch.arange(2**14, dtype=F64) / 2**14
    place, factor = times.reshape(u)
    assert float(place[0]) == 0 and float(place[-1]) < 1
    assert bool((place.diff() > 0).all())
    assert math.isclose(float(place[-1] + factor[-1] / 2**14), 1.0, rel_tol=1e-9)
    slope = place.diff() * 2**14
    smooth = (place * times.bins).long().diff() == 0  # both points in one bin
    assert torch.allclose(slope[smooth], factor[:-1][smooth], rtol=1e-9)
    # the largest place below one stays below one
    last, _ = times.reshape(torch.tensor([1 - 2.0**-53], dtype=F64))
    assert float(last) < 1


def test_factor_is_one_over_the_density() -> None:
    times = trained(LogSNR())
    place, factor = times.reshape(grid(5000))
    density = times.density()[(place * times.bins).long()]
    assert torch.allclose(factor, 1 / density, rtol=1e-12)
    assert math.isclose(float(times.density().mean()), 1.0, rel_tol=1e-14)
    assert float(times.density().min()) >= times.floor


@pytest.mark.parametrize("floor", [0.1, 0.5, 1.0])
def test_observe_finds_the_root_second_moment(floor: float) -> None:
    """The density becomes floor + (1 − floor)·root of E[loss²] per bin, over its mean.

    The loss is seen through the density in force, which changes from one call to the next.
    """
    times = Adaptive(bins=8, decay=0.8, floor=floor)
    root = torch.tensor([1.0, 2, 5, 3, 1, 0.5, 0.1, 0], dtype=F64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        u = grid(800)
        place, factor = times.reshape(u)
        sign = torch.where(torch.rand(800, generator=generator) < 0.5, 0.5, 1.5).to(F64)
        size = root[(place * 8).long()] * sign / math.sqrt(1.25)  # E[size²] = root²
        times.observe(u, factor * size)
    expected = floor + (1 - floor) * root / root.mean()
    # nine calls are remembered, of fifty or so draws per bin: 1.5 % of a second moment
    assert torch.allclose(times.density(), expected, rtol=0.1)


def test_observe_knows_what_it_has_seen() -> None:
    """A bin that was never seen counts as much as the largest one; NaN is not heard."""
    times = Adaptive(bins=4, decay=0.5, floor=0.1)
    u = torch.tensor([0.1, 0.3, 0.6], dtype=F64)
    times.observe(u, torch.tensor([1.0, 3.0, math.nan], dtype=F64))
    assert times.seen.tolist() == [0.5, 0.5, 0, 0]
    expected = 0.1 + 0.9 * torch.tensor([1.0, 3, 3, 3], dtype=F64) / 2.5
    assert torch.allclose(times.density(), expected, rtol=1e-12)
    # a bin that hears nothing forgets nothing
    before = times.second.clone()
    times.observe(u[:1], torch.tensor([2.0], dtype=F64))
    assert torch.equal(times.second[1:], before[1:]) and times.second[0] != before[0]


def test_a_loss_of_zero_leaves_it_even() -> None:
    times = Adaptive(bins=4)
    times.observe(grid(40), torch.zeros(40, dtype=F64))
    assert torch.equal(times.density(), torch.ones(4, dtype=F64))


def test_adaptive_has_less_variance() -> None:
    """Of a loss with a bump: what the reshaping is for."""
    even, shaped = LogSNR(), trained(LogSNR())
    low, high = torch.tensor(0.0, dtype=F64), torch.tensor(1.0, dtype=F64)
    spread = []
    for times in (even, shaped):
        logsnr, weight = times.place_logsnr(grid(2**14), low, high, 1.0)
        values = weight * (0.2 + torch.exp(-((1 - logsnr - 0.3) ** 2) / 0.01))
        spread.append(float(values.std()))
    assert spread[1] < 0.5 * spread[0]


class Little(nn.Module):
    """A network that says something."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return 0.1 * torch.sin(3 * x)


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
def test_adaptive_in_a_bound(parametrisation: str) -> None:
    """It learns while it trains, is frozen by eval(), and its state can be kept."""
    model = ScoreModel(Little(), ZOO["cld"](), Discrete(16), parametrisation)  # type: ignore[arg-type]
    x = torch.randint(16, (64, 5), dtype=torch.uint8)
    base = LogSNR() if parametrisation == "channel" else Importance()
    times = Adaptive(base, bins=8)
    elbo(model, x, times=times)
    assert not torch.equal(times.density(), torch.ones(8, dtype=F64))
    times.eval()
    before = {name: value.clone() for name, value in times.state_dict().items()}
    first = elbo(model, x, times=times, random=Counted(0, torch.arange(64)))
    second = elbo(model, x, times=times, random=Counted(0, torch.arange(64)))
    assert all(torch.equal(times.state_dict()[name], before[name]) for name in before)
    assert torch.equal(first.nats, second.nats)
    other = Adaptive(base, bins=8)
    other.load_state_dict(times.state_dict())
    other.eval()
    third = elbo(model, x, times=other, random=Counted(0, torch.arange(64)))
    assert torch.equal(first.nats, third.nats)
    for a, b in zip(times.reshape(grid(50)), other.reshape(grid(50)), strict=True):
        assert torch.equal(a, b)


def test_a_proposal_does_not_change_the_bound() -> None:
    """All proposals estimate one number: 2¹³ draws for one example agree within four errors."""
    model = ScoreModel(Little(), ZOO["cld"](), Discrete(16), truncation=NoiseLevel(0.02))
    x, count = torch.randint(16, (1, 6), dtype=torch.uint8), 2**13
    means, errors = [], []
    for make in PROPOSALS.values():
        times = make().eval()
        times.spread = "independent"
        bound = elbo(model, x, draws=count, times=times, random=Counted(1, torch.arange(1)))
        means.append(float(bound.nats))
        errors.append(float(bound.errors.std()) / math.sqrt(count))
    for i in range(1, len(means)):
        assert abs(means[i] - means[0]) < 4 * math.hypot(errors[i], errors[0])
