"""Where a bound is cut off: times from noise levels, and the volumes and factors it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from mpmath import mp
from scipy.integrate import quad
from torch import Tensor

import ornstein
from ornstein import Cosine, Diffusion, FixedTime, Linear, LinearSDE, NoiseLevel, Process
from tests.conformance.zoo import ZOO
from tests.families import clock, draw

F64 = torch.float64
TARGETS = torch.tensor([1e-5, 1e-4, 1e-3, 2e-3, 1e-2, 0.1, 0.3, 0.5], dtype=F64)
LEARNED = [name for name in ZOO if ZOO[name]().learned]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No graph of another test is reused."""
    yield
    torch._dynamo.reset()


def noise_at(process: Process, s: Tensor | float) -> Tensor:
    """SNR^(-1/2)."""
    with torch.no_grad():
        return process.transition(s).snr.rsqrt()


def largest(process: Process) -> float:
    """The standard error of x at the horizon."""
    return float(noise_at(process, process.horizon))


# ---------------------------------------------------------------- the time of a noise level


@pytest.mark.parametrize("name", ZOO)
def test_time_of_noise(name: str) -> None:
    """The noise there is the target, to 1e-12: a slope of log σ in log s up to 4, times 1e-15."""
    process = ZOO[name]()
    top = largest(process)
    within = TARGETS[top * (1 - 1e-6) > TARGETS]
    s = process.time_of_noise(within).detach()
    assert s.shape == within.shape and s.dtype == F64
    assert bool((s > 0).all()) and bool((s < process.horizon).all()) and bool((s.diff() > 0).all())
    assert float((noise_at(process, s) / within - 1).abs().max()) <= 1e-12
    for target in TARGETS[len(within) :].tolist():
        with pytest.raises(ValueError, match=rf"{target:g} can't be met.*to {top:.3g} at"):
            process.time_of_noise(target)


@pytest.mark.parametrize("name", ["vpsde", "malda", "cld-underdamped", "rate-cosine"])
def test_every_noise_level_there_is(name: str) -> None:
    """All that a process passes through, right up to the horizon, and where its noise hardly grows.

    The slope of log σ in log s reaches 20 near the horizon: 1e-12 leaves room for that.
    """
    process = ZOO[name]()
    top = largest(process)
    even = torch.logspace(-5, math.log10(top), 400, dtype=F64)[:-1]
    near = top * (1 - torch.logspace(-9, -1, 17, dtype=F64))
    for targets in (even, near):
        found = noise_at(process, process.time_of_noise(targets).detach())
        assert float((found / targets - 1).abs().max()) <= 1e-12


def test_against_closed_forms() -> None:
    """VPSDE: σ² = e^τ − 1. VESDE: σ² = σ_min²(r^{2s} − 1)."""
    targets = TARGETS.numpy()
    tau = np.log1p(targets**2)
    # 9.95 s² + 0.1 s = τ, without cancellation
    expected = 2 * tau / (0.1 + np.sqrt(0.01 + 4 * 9.95 * tau))
    found = ornstein.vpsde().time_of_noise(TARGETS)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-13)
    expected = np.log1p((targets / 0.01) ** 2) / (2 * math.log(5000.0))
    np.testing.assert_allclose(
        ornstein.vesde().time_of_noise(TARGETS).numpy(), expected, rtol=1e-13
    )


def test_too_much_and_too_little_noise() -> None:
    """Refused, with the range that there is."""
    for name in ("vpsde", "cld", "alda", "vesde", "linear-sde"):
        process = ZOO[name]()
        top = largest(process)
        for bad in (top * 1.001, 1e12):
            with pytest.raises(
                ValueError, match=rf"by '{process.name}'.*{re.escape(f'{top:.3g}')} at"
            ):
                process.time_of_noise(bad)
        with pytest.raises(ValueError, match=r"1e-60 can't be met.*Expected a number between"):
            process.time_of_noise(1e-60)
        mixed = torch.tensor([0.1, 1e12, 0.2], dtype=F64)
        with pytest.raises(ValueError, match=r"1e\+12 can't be met"):
            process.time_of_noise(mixed)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_noise_that_is_no_noise(bad: float) -> None:
    with pytest.raises(ValueError, match="expected a positive, finite number"):
        ornstein.cld().time_of_noise(bad)
    with pytest.raises(ValueError, match="expected a positive, finite number"):
        ornstein.cld().time_of_noise(torch.tensor([0.1, bad], dtype=F64))


def test_shapes() -> None:
    """Any shape in, the same shape out; numbers are ()."""
    process = ornstein.cld()
    grid = torch.logspace(-3, -1, 6, dtype=F64)
    flat = process.time_of_noise(grid)
    assert torch.equal(process.time_of_noise(grid.reshape(2, 3)), flat.reshape(2, 3))
    assert torch.equal(process.time_of_noise(grid.reshape(6, 1, 1)), flat.reshape(6, 1, 1))
    for i in range(6):
        single = process.time_of_noise(float(grid[i]))
        assert single.shape == () and math.isclose(float(single), float(flat[i]), rel_tol=1e-14)
    assert process.time_of_noise(torch.zeros(0, dtype=F64)).shape == (0,)
    narrow = process.time_of_noise(grid.to(torch.float32))
    assert narrow.dtype == F64 and torch.allclose(narrow, flat, rtol=1e-6)


def test_many_random_processes() -> None:
    """Noise in one variable, or in all; up to five of them, mild or stiff."""
    rng = np.random.default_rng(0)
    targets = torch.tensor([1e-4, 1e-3, 1e-2, 0.2], dtype=F64)
    for index in range(60):
        noise = ("full", "diagonal", "one", "last")[index % 4]
        K = 1 + index % (5 if noise in ("full", "diagonal") else 3)
        drawn = draw(rng, K, noise, bool(index % 2), stiffness=float(10 ** rng.uniform(0.5, 2)))
        process = drawn.process(v0_variance=0.1)
        within = targets[targets < largest(process)]
        s = process.time_of_noise(within)
        assert bool(((noise_at(process, s) / within - 1).abs() <= 1e-12).all())


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", LEARNED)
def test_gradient_in_the_parameters(name: str) -> None:
    """Against central differences: h² of a few, and 1e-14/h of rounding; 1e-6 for both."""
    process = ZOO[name]()
    targets = torch.tensor([2e-3, 0.05, 0.5], dtype=F64)
    weights = torch.tensor([1.0, 0.5, 0.25], dtype=F64) / process.time_of_noise(targets).detach()
    value = (weights * process.time_of_noise(targets)).sum()  # in relative terms
    parameters = list(process.parameters())
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    h = 1e-5
    for parameter, gradient in zip(parameters, found, strict=True):
        flat = parameter.detach().reshape(-1)
        for i in {0, flat.numel() - 1}:
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    flat[i] += sign * h
                    ends.append(float((weights * process.time_of_noise(targets)).sum()))
                    flat[i] -= sign * h
            expected = (ends[0] - ends[1]) / (2 * h)
            value_ = 0.0 if gradient is None else float(gradient.reshape(-1)[i])
            assert math.isclose(value_, expected, rel_tol=1e-6, abs_tol=1e-7)


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda", "learned-2-full", "linear-sde"])
def test_gradient_in_the_target(name: str) -> None:
    process = ZOO[name]()
    targets = torch.tensor([1e-3, 0.02, 0.4], dtype=F64, requires_grad=True)
    (found,) = torch.autograd.grad(process.time_of_noise(targets).sum(), targets)
    with torch.no_grad():
        up, down = (process.time_of_noise(targets * (1 + sign * 1e-5)) for sign in (1, -1))
    expected = (up - down) / (2e-5 * targets.detach())
    assert torch.allclose(found, expected, rtol=1e-6)


def test_gradients_only_where_wanted() -> None:
    process, fixed = ZOO["learned-1"](), ornstein.cld()
    assert process.time_of_noise(0.1).requires_grad
    assert not fixed.time_of_noise(0.1).requires_grad
    with torch.no_grad():
        assert not process.time_of_noise(0.1).requires_grad
    # the value is not moved by what carries the gradient
    with torch.no_grad():
        plain = process.time_of_noise(0.1)
    found = process.time_of_noise(0.1).detach()
    assert math.isclose(float(found), float(plain), rel_tol=1e-15)


def test_the_noise_stays_where_it_is() -> None:
    """σ(ε(θ), θ) is the target for all θ: the two gradients cancel."""
    process = ZOO["learned-2-full"]()
    sigma = process.transition(process.time_of_noise(0.01)).snr.rsqrt()
    gradients = torch.autograd.grad(sigma, list(process.parameters()), allow_unused=True)
    # of order 0.01 each before they cancel
    assert all(g is None or float(g.abs().max()) <= 1e-12 for g in gradients)


# ---------------------------------------------------------------- compiled


def check_compiled(name: str, backend: str) -> None:
    """The same times and gradients, and NaN where there is no such time."""
    process = ZOO[name]()
    compiled = torch.compile(process.time_of_noise, fullgraph=True, backend=backend)
    targets = torch.tensor([1e-4, 1e-2, 0.3], dtype=F64)
    plain, found = process.time_of_noise(targets), compiled(targets)
    assert torch.allclose(found, plain, rtol=1e-12)
    parameters = list(process.parameters())
    if parameters:
        expected = torch.autograd.grad(plain.log().sum(), parameters, allow_unused=True)
        gradients = torch.autograd.grad(found.log().sum(), parameters, allow_unused=True)
        for a, b in zip(expected, gradients, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-8, atol=1e-12)
    outside = torch.tensor([1e-60, 1e-2, 1e12], dtype=F64)
    assert compiled(outside).isnan().tolist() == [True, False, True]


def test_compiled() -> None:
    check_compiled("learned-0", "eager")


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("learned-1", "eager", marks=pytest.mark.slow),
        pytest.param("cld", "aot_eager", marks=pytest.mark.long),
    ],
)
def test_compiled_processes(name: str, backend: str) -> None:
    check_compiled(name, backend)


# ---------------------------------------------------------------- volumes and factors


@pytest.mark.parametrize("name", ZOO)
def test_log_volume_of_the_zoo(name: str) -> None:
    """log|Φ|, where Φ is well-conditioned enough to have a determinant: 1e-10 is its condition."""
    process = ZOO[name]()
    s = process.horizon * torch.tensor([0.0, 1e-3, 0.02, 0.1, 0.25], dtype=F64)
    with torch.no_grad():
        found = process.log_volume(s)
        propagator = process.transition(s, given="state").propagator
    assert found.shape == s.shape and found.dtype == F64
    expected = torch.linalg.slogdet(propagator)[1]
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert float(found[0]) == 0


@pytest.mark.parametrize("stiffness", [10.0, 300.0, 3000.0])
def test_log_volume_when_stiff(stiffness: float) -> None:
    """−∫b_d·tr(DS) in 50 digits, where Φ itself is rounding."""
    rng = np.random.default_rng(1)
    for K, rate in ((2, Linear(0.1, 20.0)), (3, Cosine(9.0)), (4, Linear(0.5, 3.0))):
        drawn = draw(rng, K, "full", True, stiffness=stiffness)
        process = drawn.process(rate=rate)
        for s in (1e-6, 0.3, 1.0):
            with mp.workdps(50):
                D, S = mp.matrix(drawn.D.tolist()), mp.matrix(drawn.S.tolist())
                trace = mp.fsum((D * S)[i, i] for i in range(K))
                expected = float(-clock(rate, s) * trace)
            assert math.isclose(float(process.log_volume(s)), expected, rel_tol=1e-13)


def test_log_volume_of_two_clocks() -> None:
    """Q turns and does not change the volume, whatever its rate."""
    process = ZOO["cosine-against-linear"]()
    assert isinstance(process, Diffusion)
    trace = float(torch.trace(process.D @ process.S))
    for s in (0.01, 0.4, 1.0):
        expected = -trace * (0.1 * s + 11.9 * s * s / 2)
        assert math.isclose(float(process.log_volume(s)), expected, rel_tol=1e-13)


def stiff_sde() -> LinearSDE:
    """A drift that varies by orders of magnitude, and changes sign."""

    def drift(s: Tensor) -> Tensor:
        rows = [-60 * torch.exp(-9 * s), 2 + 0 * s, -3 + 0 * s, 4 - 15 * s**2]
        return torch.stack(rows, -1).reshape(*s.shape, 2, 2)

    def diffusion(s: Tensor) -> Tensor:
        return torch.eye(2, dtype=F64).expand(*s.shape, 2, 2) * (1 + s[..., None, None])

    return LinearSDE(drift, diffusion, [[1.0, 0.0], [0.0, 1.0]])


@pytest.mark.parametrize("name", ["subvpsde", "vesde", "linear-sde", "linear-sde-learned", "stiff"])
def test_log_volume_of_general_processes(name: str) -> None:
    """∫tr A against scipy, at times inside all panels and on their edges."""
    process = stiff_sde() if name == "stiff" else ZOO[name]()
    assert isinstance(process, LinearSDE)

    def trace(s: float) -> float:
        return float(torch.trace(process.drift(s).detach()))

    edges = process._edges[:: max(1, len(process._edges) // 6)].tolist()
    s = torch.tensor([1e-8, 0.013, 0.4, 0.77, *edges[1:], 1.0], dtype=F64)
    found = process.log_volume(s).detach()
    for at, value in zip(s.tolist(), found.tolist(), strict=True):
        expected = quad(trace, 0, at, epsabs=1e-13, epsrel=1e-13, limit=200)[0]
        assert math.isclose(value, expected, rel_tol=1e-11, abs_tol=1e-12)
    assert torch.equal(process.log_volume(s.reshape(-1, 1)).detach(), found.reshape(-1, 1))


def test_gradient_of_the_volume() -> None:
    """d/ds log|Φ| = tr A, and d/dθ by differences."""
    for name in ("cld", "learned-2-full", "linear-sde", "linear-sde-learned"):
        process = ZOO[name]()
        s = torch.tensor([0.02, 0.31, 0.9], dtype=F64, requires_grad=True)
        (found,) = torch.autograd.grad(process.log_volume(s).sum(), s)
        expected = torch.diagonal(process.drift(s.detach()), dim1=-2, dim2=-1).sum(-1)
        assert torch.allclose(found, expected.detach(), rtol=1e-9)
    process = ZOO["linear-sde-learned"]()
    (gain,) = process.parameters()
    (found,) = torch.autograd.grad(process.log_volume(0.5), gain)
    assert math.isclose(float(found), -(0.5 + 0.125), rel_tol=1e-12)  # −g∫(1 + s)


@pytest.mark.parametrize("name", ZOO)
def test_noise_factor(name: str) -> None:
    """G Gᵀ is the diffusion, with no more columns than variables."""
    process = ZOO[name]()
    s = process.horizon * torch.tensor([[0.0, 1e-4, 0.1], [0.5, 0.9, 1.0]], dtype=F64)
    with torch.no_grad():
        G, expected = process.noise_factor(s), process.diffusion(s)
    K = process.n_vars
    assert G.shape[:-1] == (2, 3, K) and G.shape[-1] <= K and G.dtype == F64
    scale = expected.abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    assert float(((G @ G.mT - expected) / scale).abs().max()) <= 1e-14
    assert process.noise_factor(0.3 * process.horizon).shape == (K, G.shape[-1])


def test_slope_of_the_noise_level() -> None:
    """dSNR/ds = −‖Gᵀ L⁻ᵀ a‖², the identity that the search goes by."""
    for name in ("cld", "alda", "learned-2-full", "linear-sde", "vesde"):
        process = ZOO[name]()
        s = process.horizon * torch.tensor([0.05, 0.3, 0.8], dtype=F64)
        with torch.no_grad():
            kernel, h = process.transition(s), 1e-5 * s
            G = process.noise_factor(s)
            white = torch.linalg.solve_triangular(kernel.cholesky, G, upper=False)
            found = -(white.mT @ kernel.signal.unsqueeze(-1)).square().sum((-2, -1))
            up, down = (process.transition(s + sign * h).snr for sign in (1, -1))
        assert torch.allclose(found, (up - down) / (2 * h), rtol=1e-6)


# ---------------------------------------------------------------- the two kinds


def test_noise_level() -> None:
    level = NoiseLevel(0.01)
    assert str(level) == "standard error 0.01"
    assert level == NoiseLevel(0.01) and hash(level) == hash(NoiseLevel(0.01))
    for name in ("vpsde", "cld", "alda", "learned-2"):
        process = ZOO[name]()
        s = level.time(process)
        assert s.shape == () and s.dtype == F64
        assert math.isclose(float(noise_at(process, s.detach())), 0.01, rel_tol=1e-12)
        assert s.requires_grad == process.learned
    # the times differ by orders of magnitude, which is the point
    times = [float(level.time(ZOO[name]())) for name in ("vpsde", "alda")]
    assert times[1] > 50 * times[0]


def test_fixed_time() -> None:
    fixed = FixedTime(1e-3)
    assert str(fixed) == "s = 0.001"
    for name in ("vpsde", "cld", "learned-2", "horizon"):
        s = fixed.time(ZOO[name]())
        assert s.shape == () and s.dtype == F64 and float(s) == 1e-3 and not s.requires_grad
    assert float(FixedTime(2.0).time(ZOO["horizon"]())) == 2.0


@pytest.mark.parametrize("late", [1.0, 1.5])
def test_fixed_time_after_the_end(late: float) -> None:
    with pytest.raises(ValueError, match=rf"at s = {late:g}, and 'cld' ends at 1; expected an ear"):
        FixedTime(late).time(ornstein.cld())


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "early", None])
def test_bad_truncations(bad: object) -> None:
    for kind, word in ((NoiseLevel, "standard_error"), (FixedTime, "s was")):
        with pytest.raises(ValueError, match=f"{word}.*expected a positive"):
            kind(bad)  # type: ignore[arg-type]
