"""Random numbers: a counter's bits against a reference, and the laws of what is made of them.

Every test is a fixed computation on fixed seeds. Where a law is tested, the threshold is stated as
a number of standard errors, or as the probability with which a right generator would exceed it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ornstein import Counted, Draws, Generated
from ornstein.draws import SPREADS, Spread

F64 = torch.float64
CPU = torch.device("cpu")
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
SALT = 0x5851F42D4C957F2D
ALPHA = 1e-4  # of the tests of laws: a right generator fails one of them once in 10⁴ seeds


def indices(*values: int) -> Tensor:
    """Examples by their indices."""
    return torch.tensor(values, dtype=torch.int64)


def counted(seed: int, size: int) -> Counted:
    """The examples 0 … size − 1."""
    return Counted(seed, torch.arange(size))


def generated(seed: int, size: int) -> Generated:
    return Generated(size, CPU, torch.Generator().manual_seed(seed))


Maker = Callable[[int, int], Draws]
MAKERS = pytest.mark.parametrize("make", [counted, generated])


# ---------------------------------------------------------------- the bits


def splitmix(z: int) -> int:
    """The output function of SplitMix64, in whole numbers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def counter(n: int) -> int:
    """Different for different n: an odd multiple of n, some of whose bits are turned over."""
    return ((n ^ SALT) * GOLDEN) & MASK


def reference_bits(seed: int, index: int, purpose: str, count: int) -> list[int]:
    """SplitMix64's function of counters: of (seed, purpose), then of examples, then of numbers."""
    stream = splitmix((seed * GOLDEN + zlib.crc32(purpose.encode())) & MASK)
    key = splitmix((stream + counter(index)) & MASK)
    return [splitmix((key + counter(j)) & MASK) for j in range(count)]


def test_the_reference() -> None:
    """The published first outputs of SplitMix64 with seed 1234567."""
    state, found = 1234567, []
    for _ in range(3):
        state = (state + GOLDEN) & MASK
        found.append(splitmix(state))
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**40 + 7, -3, 2**63, 2**64 + 5])
@pytest.mark.parametrize("purpose", ["noise", "places", "dequantise", "σ"])
def test_bits(seed: int, purpose: str) -> None:
    numbers = [0, 1, 2, 59999, 2**40 + 3]
    found = Counted(seed, indices(*numbers))._bits(purpose, 7)
    expected = [reference_bits(seed, i, purpose, 7) for i in numbers]
    assert [[int(b) & MASK for b in row] for row in found] == expected


def test_uniform_from_bits() -> None:
    """The upper 53 bits, so that 1 is never reached and 0 is."""
    found = counted(3, 5).uniform("dequantise", (2, 3))
    for i in range(5):
        bits = reference_bits(3, i, "dequantise", 6)
        assert found[i].flatten().tolist() == [(b >> 11) / 2**53 for b in bits]
    assert found.dtype == F64 and found.shape == (5, 2, 3)


def test_normal_from_bits() -> None:
    """Box and Muller: radius from the upper 32 bits, angle from the lower; pairs side by side."""
    found = counted(3, 4).normal("noise", (5,), F64)
    for i in range(4):
        expected: list[float] = []
        for b in reference_bits(3, i, "noise", 3):
            radius = math.sqrt(-2 * math.log1p(-(b >> 32) / 2**32))
            angle = 2 * math.pi * (b & 0xFFFFFFFF) / 2**32
            expected += [radius * math.cos(angle), radius * math.sin(angle)]
        assert found[i].tolist() == pytest.approx(expected[:5], rel=1e-14, abs=1e-14)


# ---------------------------------------------------------------- of an example, not of its batch


def of_one(draws: Draws) -> list[Tensor]:
    """One of everything, for each example: (size, ...)."""
    everything = [
        draws.uniform("a", (3, 2)),
        draws.normal("b", (5,), F64),
        draws.normal("b", (5,), torch.float32),
        draws.signs("c", (4,), F64),
    ]
    for spread in SPREADS:
        everything += [draws.places(count, spread) for count in (1, 2, 5)]  # type: ignore[arg-type]
    return everything


def test_an_example_is_the_same_in_every_batch() -> None:
    """Alone, in any order, in any company, bit for bit."""
    whole = of_one(counted(11, 20))
    for batch in ([7], [3, 7], [7, 3, 19, 0], [7, 7, 7], list(range(19, -1, -1))):
        part = of_one(Counted(11, indices(*batch)))
        for all_, some in zip(whole, part, strict=True):
            assert torch.equal(all_[torch.tensor(batch)], some)


def test_reproducible() -> None:
    """The same seed gives the same numbers, whatever was drawn before."""
    first, second = counted(5, 4), counted(5, 4)
    second.normal("noise", (100,), F64)
    torch.rand(17)
    for a, b in zip(of_one(first), of_one(second), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(of_one(generated(5, 4)), of_one(generated(5, 4)), strict=True):
        assert torch.equal(a, b)


def test_more_draws_begin_with_the_same() -> None:
    """A longer shape continues a shorter one."""
    draws = counted(5, 4)
    short, long = (draws.normal("noise", (n, 6), F64) for n in (2, 5))
    assert torch.equal(long[:, :2], short)
    short, long = (draws.uniform("noise", (n, 6)) for n in (2, 5))
    assert torch.equal(long[:, :2], short)


def test_empty_batch() -> None:
    for draws in (Counted(0, torch.zeros(0, dtype=torch.int64)), generated(0, 0)):
        for tensor in of_one(draws):
            assert tensor.shape[0] == 0


# ---------------------------------------------------------------- laws


def pooled(values: Tensor) -> np.ndarray:
    return values.to(F64).flatten().numpy()


@MAKERS
def test_uniform_law(make: Maker) -> None:
    u = pooled(make(1, 400).uniform("dequantise", (500,)))
    assert u.min() >= 0 and u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > ALPHA
    # the lowest bits are uniform too
    fine = (u * 2**20) % 1
    assert stats.kstest(fine, "uniform").pvalue > ALPHA


@MAKERS
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_normal_law(make: Maker, dtype: torch.dtype) -> None:
    """KS, and each moment up to the fourth within four standard errors."""
    drawn = make(2, 400).normal("noise", (500,), dtype)
    assert drawn.dtype == dtype and drawn.shape == (400, 500)
    z = pooled(drawn)
    assert stats.kstest(z, "norm").pvalue > ALPHA
    # (moment, its expectation, its variance) of a standard normal
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = abs((z**power).mean() - mean) / math.sqrt(variance / len(z))
        assert error < 4.0
    assert 4.2 < np.abs(z).max() < 6.7  # of 2·10⁵; 32 bits of radius end at 6.66


def test_normal_is_normal_within_pairs() -> None:
    """Box and Muller's two halves are each normal, and independent of each other."""
    z = counted(3, 300).normal("noise", (600,), F64).reshape(-1, 2).numpy()
    for half in z.T:
        assert stats.kstest(half, "norm").pvalue > ALPHA
    count = len(z)
    for first, second in ((z[:, 0], z[:, 1]), (z[:, 0] ** 2 - 1, z[:, 1] ** 2 - 1)):
        product = first * second
        assert abs(product.mean()) < 4 * product.std() / math.sqrt(count)
    angle = np.arctan2(z[:, 1], z[:, 0]) / (2 * math.pi) % 1
    assert stats.kstest(angle, "uniform").pvalue > ALPHA


@MAKERS
def test_signs(make: Maker) -> None:
    """−1 and 1 only, in balance within four standard errors."""
    signs = make(4, 300).signs("probe", (400,), torch.float32)
    assert signs.dtype == torch.float32
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 4 / math.sqrt(signs.numel())
    per_example = signs.sum(1) / 20  # each a standard normal
    assert stats.kstest(pooled(per_example), "norm").pvalue > 1e-6  # 400 steps are not quite smooth


def test_types_agree() -> None:
    """float32 is float64 rounded: the angle at 2⁻²² of 2π, times a radius of at most 6.7."""
    draws = counted(5, 50)
    wide, narrow = (draws.normal("noise", (200,), kind) for kind in (F64, torch.float32))
    assert (wide - narrow).abs().max().item() < 6.7 * 2 * math.pi * 2.0**-23
    half = draws.normal("noise", (200,), torch.bfloat16)
    assert half.dtype == torch.bfloat16


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard errors."""
    x, y = pooled(a), pooled(b)
    return float(abs(np.corrcoef(x, y)[0, 1]) * math.sqrt(len(x)))


def test_streams_are_uncorrelated() -> None:
    """Neighbouring seeds, indices, purposes and positions: below four standard errors."""
    base = counted(0, 200)
    z = base.normal("noise", (400,), F64)
    for purpose in ("end", "probe", "noisf", "end, across"):
        assert correlation(z, base.normal(purpose, (400,), F64)) < 4
    for seed in (1, 2, -1, 256, 2**32):
        assert correlation(z, counted(seed, 200).normal("noise", (400,), F64)) < 4
    for shift in (1, 2, 200, 2**20):
        other = Counted(0, torch.arange(200) + shift).normal("noise", (400,), F64)
        assert correlation(z, other) < 4
    for lag in (1, 2, 3):
        assert correlation(z[:, :-lag], z[:, lag:]) < 4
        assert correlation(z[:-lag], z[lag:]) < 4
        assert correlation(z[:, :-lag] ** 2, z[:, lag:] ** 2) < 4
    assert correlation(base.uniform("noise", (400,)), base.uniform("places", (400,))) < 4


def test_no_two_streams_are_equal() -> None:
    """Of 4 seeds, 5 purposes and 2000 examples all 64-bit words differ."""
    words = [
        counted(seed, 2000)._bits(purpose, 2).flatten()
        for seed in range(4)
        for purpose in ("noise", "places", "end", "dequantise", "probe")
    ]
    everything = torch.cat(words)
    assert len(everything.unique()) == len(everything)  # a chance of 2·10⁻¹⁰ for random words


def test_purposes_do_not_move_each_other() -> None:
    """For a counter the order of the calls does not matter."""
    one, two = counted(1, 3), counted(1, 3)
    a = one.uniform("a", (4,)), one.uniform("b", (4,))
    b = two.uniform("b", (4,)), two.uniform("a", (4,))
    assert torch.equal(a[0], b[1]) and torch.equal(a[1], b[0])


# ---------------------------------------------------------------- places


@MAKERS
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_place_is_uniform(make: Maker, spread: Spread, count: int) -> None:
    """Over seeds, for each example and each draw by itself."""
    seeds, size = 800, 3
    places = torch.stack([make(seed, size).places(count, spread) for seed in range(seeds)])
    assert places.shape == (seeds, size, count) and places.dtype == F64
    assert float(places.min()) >= 0 and float(places.max()) < 1
    for example in range(size):
        for draw in range(count):
            # up to 24 of these per case, over 24 cases: one in 10⁶ each
            values = places[:, example, draw].numpy()
            assert stats.kstest(values, "uniform").pvalue > 1e-6


@MAKERS
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_one_draw_per_stratum(make: Maker, count: int) -> None:
    """Each of the n-ths of [0, 1) holds exactly one of an example's n draws."""
    for seed in range(20):
        places = make(seed, 33).places(count, "stratified")
        strata = (places * count).long().sort(1).values
        assert torch.equal(strata, torch.arange(count).expand(33, count))
        # in fact they are a lattice: equal distances, also around the end
        gaps = places.sort(1).values
        gaps = torch.cat([gaps, gaps[:, :1] + 1], 1).diff()
        assert torch.allclose(gaps, torch.full_like(gaps, 1 / count), rtol=0, atol=1e-14)


@MAKERS
@pytest.mark.parametrize("count", [1, 4])
def test_strata_over_examples(make: Maker, count: int) -> None:
    """All draws of a batch together fill [0, 1) evenly: far more so than independent ones.

    The largest gap of N even points with one uniform point in each N-th is below 2/N, that of
    multiples of the golden ratio below 3/N, that of N independent points about log(N)/N.
    """
    size = 250
    for seed in range(5):
        u = make(seed, size).places(count, "stratified").flatten().sort().values
        gaps = torch.cat([u, u[:1] + 1]).diff()
        assert gaps.max().item() <= 3.0 / (size * count)
        # and the mean of a smooth function over them is right to about 1/N
        mean = torch.cos(2 * math.pi * u).mean().item()
        assert abs(mean) < 4 / (size * count)


@MAKERS
@pytest.mark.parametrize("count", [2, 4, 10])
def test_antithetic_pairs(make: Maker, count: int) -> None:
    """Draw j and draw j + n/2 sum to one."""
    places = make(1, 30).places(count, "antithetic")
    half = count // 2
    sums = places[:, :half] + places[:, half:]
    assert torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-15)
    assert len(places[:, :half].flatten().unique()) == 30 * half


@MAKERS
def test_antithetic_odd_counts(make: Maker) -> None:
    """Of three draws, two are a pair."""
    places = make(1, 30).places(3, "antithetic")
    assert torch.allclose(places[:, 0] + places[:, 2], torch.ones(30, dtype=F64), atol=1e-15)


@MAKERS
@pytest.mark.parametrize("size", [8, 9])
def test_antithetic_examples(make: Maker, size: int) -> None:
    """With one draw each, examples are pairs."""
    places = make(1, size).places(1, "antithetic").flatten()
    sums = places[0 : 2 * (size // 2) : 2] + places[1::2]
    assert torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-15)


@MAKERS
def test_independent_places(make: Maker) -> None:
    """No relation between examples or draws."""
    places = make(3, 400).places(50, "independent")
    assert stats.kstest(pooled(places), "uniform").pvalue > ALPHA
    assert correlation(places[:-1], places[1:]) < 4
    assert correlation(places[:, :-1], places[:, 1:]) < 4


def test_places_of_seeds_are_unrelated() -> None:
    """The turn of a lattice differs from seed to seed."""
    turns = torch.stack([counted(seed, 1).places(1, "stratified")[0, 0] for seed in range(1000)])
    assert stats.kstest(pooled(turns), "uniform").pvalue > ALPHA
    assert correlation(turns[:-1], turns[1:]) < 4


def test_places_are_unrelated_to_noise() -> None:
    """The time of an example says nothing about its noise, nor about its dequantisation."""
    draws = counted(0, 20000)
    for spread in SPREADS:
        u = draws.places(1, spread).flatten()  # type: ignore[arg-type]
        for wave in (torch.cos(2 * math.pi * u), u - 0.5):
            assert correlation(wave, draws.normal("noise", (), F64)) < 4
            assert correlation(wave, draws.normal("noise", (), F64).square()) < 4
            assert correlation(wave, draws.uniform("dequantise", ())) < 4


def test_a_generator_moves_on() -> None:
    """Two calls with one torch generator differ; the global one is used where none is given."""
    generator = torch.Generator().manual_seed(0)
    first = Generated(3, CPU, generator).uniform("a", (2,))
    second = Generated(3, CPU, generator).uniform("a", (2,))
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    first = Generated(3, CPU).normal("a", (2,), F64)
    torch.manual_seed(7)
    assert torch.equal(first, Generated(3, CPU).normal("a", (2,), F64))
