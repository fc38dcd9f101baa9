"""Pixels, numbers and tables, against 50-digit quadrature and finite differences."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from mpmath import mp
from torch import Tensor

from ornstein import Continuous, Discrete, Likelihood, Tweedie
from ornstein.likelihood import Pixels, bits_per_dim

F64 = torch.float64
MAPS = [None, 0.05]
LEVELS = [2, 5, 16, 256]
REACH = 12  # standard deviations of the oracle's integral; what lies beyond is less than 1e-31
STEP = 32  # nodes per standard deviation


def number(value: float) -> Tensor:
    """() float64."""
    return torch.tensor(value, dtype=F64)


def truth(centres: list[float], k: int, sigma: float, step: int = STEP) -> float:
    """E log P(k | x_k + σε) by the trapezoidal rule, in 50 digits.

    The integrand is analytic and falls like a Gaussian: the rule converges exponentially, with an
    error of exp(−2π·step·distance to the nearest singularity), weighted by the density there.
    """
    with mp.workdps(50):
        s, h = mp.mpf(sigma), mp.one / step
        near = [c for c in centres if c != centres[k] and abs(c - centres[k]) < 36 * sigma]
        away = [(mp.mpf(centres[k]) - mp.mpf(c)) / s for c in near]
        odds = [mp.exp(a * REACH - a * a / 2) for a in away]  # of each level, at ε = −reach
        falls = [mp.exp(-a * h) for a in away]
        density, ratio = mp.exp(-(mp.mpf(REACH) ** 2) / 2), mp.exp(REACH * h - h * h / 2)
        total = mp.zero
        for _ in range(2 * REACH * step + 1):
            total += mp.log1p(mp.fsum(odds)) * density
            odds = [o * f for o, f in zip(odds, falls, strict=True)]
            density, ratio = density * ratio, ratio * mp.exp(-h * h)
        return float(-total * h / mp.sqrt(2 * mp.pi))


# ---------------------------------------------------------------- the table


def test_the_oracle() -> None:
    """The trapezoidal rule against adaptive quadrature, and against itself with twice the nodes."""
    centres, sigma = [-0.75, -0.25, 0.25, 0.75], 0.11
    with mp.workdps(50):
        s = mp.mpf(sigma)

        def integrand(e: mp.mpf) -> mp.mpf:
            away = [(mp.mpf(centres[1]) - mp.mpf(c)) / s for c in centres]
            total = mp.fsum(mp.exp(-a * (a / 2 + e)) for a in away)
            return mp.log(total) * mp.exp(-e * e / 2) / mp.sqrt(2 * mp.pi)

        adaptive = -float(mp.quad(integrand, [-REACH, -5, -2, 0, 2, 5, REACH]))
    assert math.isclose(truth(centres, 1, sigma), adaptive, rel_tol=1e-15)
    for part in (0.05, 0.14):
        once, twice = (truth(centres, 0, 0.5 * part, step) for step in (STEP, 2 * STEP))
        assert abs(once - twice) <= 1e-17


@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("levels", LEVELS)
def test_table(levels: int, logit: float | None) -> None:
    """To 1e-11; what is left, 6e-14, is the 192 nodes of the library's quadrature."""
    likelihood = Discrete(levels, logit)
    centres = likelihood.pixels.centres().tolist()
    parts = (1 / 20, 1 / 8, 1 / 6, 1 / 3, 1.0) + ((4.0,) if levels < 256 else (2.5,))
    for part in parts:
        sigma = likelihood.pixels.finest() * part
        table = likelihood.table(number(sigma))
        assert table.shape == (levels,) and table.dtype == F64
        for k in {0, 1, levels // 2, levels - 1} if part < 1 else {0, levels // 2}:
            assert abs(table[k].item() - truth(centres, k, sigma)) <= 1e-11


@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("levels", LEVELS)
def test_table_is_symmetric(levels: int, logit: float | None) -> None:
    """Level k and level −k are mirror images; the levels' own rounding is 1e-16 of a unit."""
    likelihood = Discrete(levels, logit)
    table = likelihood.table(number(likelihood.pixels.finest() / 3))
    # a table falls with σ at a rate of about one per σ, and x_k is rounded at 1e-16 / σ
    assert torch.allclose(table, table.flip(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("levels", [2, 5, 16])
def test_gradient_of_the_table(levels: int, logit: float | None) -> None:
    """Five-point differences: their error is h⁴ ≈ 1e-11 of the fifth derivative."""
    likelihood = Discrete(levels, logit)
    for part in (1 / 7, 1 / 3, 1.0, 4.0):
        sigma = likelihood.pixels.finest() * part
        for k in (0, levels // 2):
            at = number(sigma).requires_grad_()
            (found,) = torch.autograd.grad(likelihood.table(at)[k], at)
            h = sigma * 2e-3
            value = [likelihood.table(number(sigma + j * h))[k].item() for j in (-2, -1, 1, 2)]
            expected = (value[0] - 8 * value[1] + 8 * value[2] - value[3]) / (12 * h)
            assert math.isclose(found.item(), expected, rel_tol=1e-6, abs_tol=1e-8)


@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("levels", LEVELS)
def test_table_between_its_ends(levels: int, logit: float | None) -> None:
    """From 0 (no noise hides nothing) to −log(levels) (all levels alike), never above 0."""
    likelihood = Discrete(levels, logit)
    bin_ = likelihood.pixels.finest()
    tables = torch.stack([likelihood.table(number(bin_ * 4.0**j)) for j in range(-3, 2)])
    assert bool((tables <= 0).all())
    assert bool((tables.diff(dim=0) <= 1e-15).all())  # more noise never helps
    assert tables[0].abs().max().item() < 1e-200  # σ = bin/64: exp(−32²/2)
    wide = likelihood.table(number(1e4))
    # to first order in 1/σ², −½ Σ_j (x_j − x_k)²/σ² / levels − …: of order 1e-7
    assert torch.allclose(wide, torch.full_like(wide, -math.log(levels)), rtol=0, atol=1e-6)


def test_cached_tables_are_the_same() -> None:
    """A number for σ is looked up, a tensor is not; both agree, and so does the second call."""
    likelihood = Discrete(16)
    x = torch.arange(16, dtype=torch.uint8).reshape(2, 2, 4)
    sigma = likelihood.noise_level(1.0)
    fresh = likelihood.reconstruction(x, number(sigma))
    first, second = (likelihood.reconstruction(x, sigma) for _ in range(2))
    expected = likelihood.table(number(sigma)).reshape(2, 8).sum(1)
    for found in (fresh, first, second):
        assert torch.equal(found, expected)
    assert len(likelihood._tables) == 1
    with torch.inference_mode():
        Discrete.reconstruction(likelihood, x, 2 * sigma)
    weight = torch.ones((), dtype=F64, requires_grad=True)
    (weight * likelihood.reconstruction(x, 2 * sigma).sum()).backward()  # was kept as usual
    for j in range(200):
        likelihood.reconstruction(x, sigma * (1 + j))
    assert len(likelihood._tables) <= 66  # does not grow without bound


def test_reconstruction_sums_over_coordinates() -> None:
    likelihood = Discrete(5, 0.05)
    x = torch.randint(5, (7, 2, 3))
    found = likelihood.reconstruction(x, 0.3)
    assert found.shape == (7,) and found.dtype == F64
    table = likelihood.table(number(0.3))
    expected = torch.tensor([sum(float(table[k]) for k in row.flatten()) for row in x], dtype=F64)
    assert torch.allclose(found, expected, rtol=1e-14)


def test_sixteen_bits() -> None:
    """65536 levels at little noise; interior levels are those of any other number of levels."""
    likelihood = Discrete(65536)
    start = time.process_time()
    table = likelihood.table(number(likelihood.pixels.finest() / 10))
    assert time.process_time() - start < 20.0  # far more than it takes, far less than all pairs
    expected = truth([-2.0, -1.0, 0.0, 1.0, 2.0], 2, 1 / 10)
    # x_k is rounded at 2⁻⁵³, that is 1e-11 of a bin, and the table is steep where it is small
    assert torch.allclose(table[2:-2], torch.full_like(table[2:-2], expected), rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("logit", MAPS)
def test_sixteen_bits_at_the_default_noise(logit: float | None) -> None:
    """As above, with the noise that a model truncates at; a window of 17 levels has all that count.

    x_k is rounded at 2⁻⁵³ of 3, that is 1e-11 of a bin and less of the value.
    """
    likelihood = Discrete(65536, logit)
    sigma = likelihood.noise_level(1.0)
    table, centres = likelihood.table(number(sigma)), likelihood.pixels.centres().tolist()
    for k in (0, 1, 20000, 32768, 65535):
        first = max(0, k - 8)
        window = centres[first : k + 9]
        assert abs(table[k].item() - truth(window, k - first, sigma)) <= 1e-10


# ---------------------------------------------------------------- the map


@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("levels", [*LEVELS, 3, 65536])
def test_centres(levels: int, logit: float | None) -> None:
    """The formulas of the page, their symmetry, and the smallest distance between two of them."""
    pixels = Pixels(levels, logit)
    place = (np.arange(levels) + 0.5) / levels
    if logit is None:
        expected = 2 * place - 1
    else:
        p = logit + (1 - 2 * logit) * place
        expected = np.log(p) - np.log1p(-p)
    centres = pixels.centres().numpy()
    np.testing.assert_allclose(centres, expected, rtol=0, atol=1e-15 * max(1, abs(expected[0])))
    assert np.all(np.diff(centres) > 0)
    # a difference of two numbers of size up to three
    assert math.isclose(pixels.finest(), np.diff(expected).min(), rel_tol=1e-15 * 16 * levels)
    assert pixels.finest() <= np.diff(centres).min() * (1 + 1e-15 * 16 * levels)


@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_values_of_pixels(logit: float | None, dtype: torch.dtype) -> None:
    """Every level has its own number, in order, in both types; bytes are mapped in float32."""
    x = torch.arange(256).to(dtype).reshape(1, 256)
    likelihood = Discrete(256, logit)
    centres = likelihood.pixels.centres()
    for kind in (torch.float32, F64):
        values = likelihood.values(x, None, kind)
        assert values.dtype == kind and values.shape == x.shape
        assert bool((values.diff() > 0).all())
        exact = kind == F64 and dtype != torch.uint8
        # 2⁻²⁴ of the largest number, 2.9 for the logit map, and the logit's own few roundings
        tolerance = 1e-15 if exact else 2.0**-22 * 3
        assert torch.allclose(values[0].to(F64), centres, rtol=0, atol=tolerance)


@pytest.mark.parametrize("levels", [5, 100, 200])
def test_values_of_bytes(levels: int) -> None:
    """They are mapped in float32, whatever type is asked for: to 2⁻²⁴ of numbers up to 3."""
    x = torch.arange(levels).reshape(1, levels)
    for logit in MAPS:
        likelihood = Discrete(levels, logit)
        values = likelihood.values(x.to(torch.uint8), None, F64)[0]
        assert torch.allclose(values, likelihood.pixels.centres(), rtol=0, atol=2.0**-22 * 3)


@pytest.mark.parametrize("logit", MAPS)
def test_sixteen_bits_are_distinct(logit: float | None) -> None:
    x = torch.arange(65536).reshape(1, -1)
    for kind in (torch.float32, F64):
        assert bool((Discrete(65536, logit).values(x, None, kind).diff() > 0).all())


@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("levels", LEVELS)
def test_log_jacobian(levels: int, logit: float | None) -> None:
    """exp(log_jacobian) = dx/dk: central differences in u, whose error is h² ≈ 1e-10."""
    likelihood = Tweedie(levels, logit)
    x = torch.arange(levels).reshape(-1, 1)
    for u in (0.05, 0.5, 0.93):
        places = torch.full((levels, 1), u, dtype=F64)
        h = 1e-5
        up, down = (likelihood.values(x, places + sign * h, F64) for sign in (1, -1))
        slope = (up - down).flatten() / (2 * h)
        found = likelihood.log_jacobian(x, places)
        assert found.shape == (levels,) and found.dtype == F64
        assert torch.allclose(found.exp(), slope, rtol=1e-7)


def test_log_jacobian_sums_over_coordinates() -> None:
    likelihood = Tweedie(16, 0.05)
    x, u = torch.randint(16, (3, 2, 4)), torch.rand(3, 2, 4, dtype=F64)
    total = likelihood.log_jacobian(x, u)
    single = likelihood.log_jacobian(x.reshape(-1, 1), u.reshape(-1, 1)).reshape(3, 8).sum(1)
    assert torch.allclose(total, single, rtol=1e-14)


@pytest.mark.parametrize("logit", MAPS)
def test_volume_of_all_bins(logit: float | None) -> None:
    """∫ dx/dk over all levels is the length of the interval that they fill."""
    likelihood = Tweedie(256, logit)
    x = torch.arange(256).reshape(-1, 1)
    nodes = (torch.arange(64, dtype=F64) + 0.5) / 64
    length = sum(likelihood.log_jacobian(x, u.expand(256, 1)).exp().sum() for u in nodes) / 64
    ends = [-1.0, 1.0] if logit is None else [math.log(logit / (1 - logit)) * s for s in (1, -1)]
    # the midpoint rule with 64·256 nodes: second derivative (1/0.05²) times h²/24
    assert math.isclose(float(length), ends[1] - ends[0], rel_tol=1e-7)


def test_nothing_to_dequantise() -> None:
    x = torch.randn(3, 4)
    for likelihood in (Continuous(), Tweedie(None)):
        assert not likelihood.dequantised
        assert torch.equal(likelihood.values(x, None, F64), x.to(F64))
        assert torch.equal(likelihood.log_jacobian(x, None), torch.zeros(3, dtype=F64))
    pixels = torch.randint(16, (3, 4))
    assert not Discrete(16).dequantised and Tweedie(16).dequantised
    assert torch.equal(Discrete(16).log_jacobian(pixels, None), torch.zeros(3, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("levels", LEVELS)
def test_dequantised_values(levels: int, logit: float | None, dtype: torch.dtype) -> None:
    """Rising in k + u, between the bin's edges, with the centre at u = ½."""
    likelihood = Tweedie(levels, logit)
    x = torch.arange(levels).reshape(1, -1)
    parts = [torch.full((1, levels), u, dtype=dtype) for u in (0.0, 0.25, 0.5, 0.75)]
    values = torch.stack([likelihood.values(x, u, dtype)[0] for u in parts], 1)  # (levels, 4)
    assert bool((values.flatten().diff() > 0).all())
    rounding = 1e-15 if dtype == F64 else 2.0**-21
    centres = likelihood.pixels.centres().to(dtype)
    assert torch.allclose(values[:, 2], centres, rtol=0, atol=rounding * 3)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("levels", [*LEVELS, 65536])
def test_places_stay_below_one(levels: int, dtype: torch.dtype) -> None:
    """The largest u that a bound ever uses leaves the last pixel inside [0, 1)."""
    u = torch.tensor([[1 - 2.0**-20]], dtype=dtype)
    place = Tweedie(levels)._place(torch.tensor([[levels - 1]]), u)
    assert 0 <= place.item() < 1
    assert Tweedie(levels)._place(torch.tensor([[0]]), torch.zeros(1, 1, dtype=dtype)).item() == 0


# ---------------------------------------------------------------- moments, spaces, names


@pytest.mark.parametrize("logit", MAPS)
@pytest.mark.parametrize("kind", [Discrete, Tweedie])
def test_moments_of_pixels(kind: type[Discrete] | type[Tweedie], logit: float | None) -> None:
    """Against numpy, population form, over everything; at the centre of each bin."""
    x = torch.randint(256, (50, 3, 4, 4), dtype=torch.uint8)
    place = (x.numpy().astype(float) + 0.5) / 256
    if logit is None:
        values = 2 * place - 1
    else:
        p = logit + (1 - 2 * logit) * place
        values = np.log(p / (1 - p))
    mean, std = (float(v) for v in kind(256, logit).moments(x))
    # bytes are mapped in float32: 2400 roundings of 2⁻²⁴ that average out
    assert math.isclose(mean, values.mean(), abs_tol=1e-7)
    assert math.isclose(std, values.std(), rel_tol=1e-7)
    exact = [float(v) for v in kind(256, logit).moments(x.long())]
    assert exact == pytest.approx([values.mean(), values.std()], abs=1e-12)


@pytest.mark.parametrize("likelihood", [Continuous(), Tweedie(None)])
def test_moments_of_numbers(likelihood: Likelihood) -> None:
    x = 3 + 0.5 * torch.randn(1000, 7)
    mean, std = (float(v) for v in likelihood.moments(x))
    wide = x.numpy().astype(np.float64)
    assert math.isclose(mean, wide.mean(), rel_tol=1e-12)
    assert math.isclose(std, wide.std(), rel_tol=1e-12)


SPACES: list[tuple[Likelihood, str]] = [
    (Discrete(256), "256"),
    (Tweedie(256), "256"),
    (Discrete(16), "16"),
    (Tweedie(16), "16"),
    (Discrete(256, 0.05), "256, logit"),
    (Tweedie(256, 0.05), "256, logit"),
    (Tweedie(256, 0.1), "256, other logit"),
    (Continuous(), "numbers"),
    (Tweedie(None), "numbers"),
]


@pytest.mark.parametrize("mine", SPACES, ids=lambda pair: repr(pair[0]))
@pytest.mark.parametrize("other", SPACES, ids=lambda pair: repr(pair[0]))
def test_same_space(mine: tuple[Likelihood, str], other: tuple[Likelihood, str]) -> None:
    """Levels and map must agree, the bound need not; pixels are never numbers."""
    assert mine[0].same_space(other[0]) is (mine[1] == other[1])


def test_noise_level() -> None:
    """A sixth of the finest bin for pixels, a thousandth of the spread for numbers."""
    for kind in (Discrete, Tweedie):
        assert kind(256).noise_level(7.0) == pytest.approx(2 / 256 / 6, rel=1e-12)
        for levels in (5, 16):
            for logit in MAPS:
                centres = kind(levels, logit).pixels.centres()
                finest = centres.diff().min().item()
                assert kind(levels, logit).noise_level(1.0) == pytest.approx(finest / 6, rel=1e-12)
    for likelihood in (Continuous(), Tweedie(None)):
        assert likelihood.noise_level(7.0) == pytest.approx(7e-3, rel=1e-12)


def test_names() -> None:
    assert [lik.name for lik in (Discrete(), Tweedie(), Tweedie(logit=0.1), Continuous())] == [
        "discrete",
        "tweedie",
        "tweedie-logit",
        "continuous",
    ]
    shown = [repr(lik) for lik in (Discrete(16, 0.05), Tweedie(None), Continuous())]
    assert shown == ["Discrete(16, logit=0.05)", "Tweedie(None)", "Continuous()"]


def test_bits_per_dim() -> None:
    nats = torch.tensor([-8 * math.log(2) * 12, 0.0], dtype=F64)
    assert bits_per_dim(nats, 12).tolist() == pytest.approx([8.0, 0.0])
