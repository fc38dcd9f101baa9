"""The kernel against multiprecision arithmetic: Φ and the diagonal of L, entry by entry.

The bounds are those the library promises: 1e-10 where the noise is of full rank and for every
preset, 1e-8 where it enters through one variable only or the rates differ. Rounding alone gives
about 1e-15 times the stiffness τ‖A‖ for Φ, so there is room; the bounds are promises, not fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from mpmath import mp

import ornstein
from ornstein import Constant, Cosine, Diffusion, Linear
from tests.families import Drawn, draw, kernel_error, truth
from tests.truth import propagator_error, relative

PROMISED = 1e-10
PROMISED_HYPOELLIPTIC = 1e-8
TIMES = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.37, 1.0)
STIFFNESS = (1.0, 10.0, 100.0)
STATIONARY_PRESETS = ("vpsde", "cld", "psld", "alda", "malda")


def chain(K: int, links: np.ndarray | None = None) -> Drawn:
    """Neighbours coupled, noise in the last variable only."""
    links = np.ones(K - 1) if links is None else links
    D = np.zeros((K, K))
    D[-1, -1] = 1.0
    return Drawn(np.diag(links, -1) - np.diag(links, 1), D, np.eye(K))


# ------------------------------------------------------------------ presets


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize("name", STATIONARY_PRESETS)
def test_presets(name: str, given: str) -> None:
    process = ornstein.PRESETS[name]()
    for s in TIMES:
        assert kernel_error(process, s, given) <= PROMISED, f"s = {s}"


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ornstein.cld(damping=0.2),
        lambda: ornstein.cld(damping=7.0),
        lambda: ornstein.cld(mass=4.0, rate=Constant(3.0)),
        lambda: ornstein.alda(L=3.0, gamma=0.7, xi=1.1),
        lambda: ornstein.malda(L=0.5, gamma=2.0),
        lambda: ornstein.psld(gamma=0.04, nu=4.01),
        lambda: ornstein.vpsde(rate=Cosine()),
        lambda: ornstein.cld(rate=Linear(0.1, 20.0, horizon=2.5), horizon=2.5),
    ],
    ids=["underdamped", "overdamped", "heavy", "alda", "malda", "psld", "cosine", "horizon"],
)
def test_presets_with_other_constants(make: Callable[[], Diffusion], given: str) -> None:
    process = make()
    for s in (*TIMES, process.horizon):
        assert kernel_error(process, s, given) <= PROMISED, f"s = {s}"


@pytest.mark.parametrize("horizon", [1.0, 3.0])
def test_vesde(horizon: float) -> None:
    """Σ = σ_min²((σ_max/σ_min)^(2s/T) − 1), Φ = 1."""
    process = ornstein.vesde(0.01, 50.0, horizon=horizon)
    for s in (*TIMES, horizon):
        kernel = process.transition(s)
        with mp.workdps(40):
            growth = mp.mpf(50) / mp.mpf(0.01)
            variance = mp.mpf(0.01) ** 2 * (growth ** (2 * mp.mpf(s) / mp.mpf(horizon)) - 1)
            lower = float(mp.sqrt(variance))
        assert relative(kernel.cholesky, [[lower]]) <= PROMISED, f"s = {s}"
        assert kernel.propagator.item() == 1.0


def test_subvpsde() -> None:
    """Φ = exp(−½∫b), Σ = (1 − exp(−∫b))²."""
    process = ornstein.subvpsde()
    for s in TIMES:
        kernel = process.transition(s)
        with mp.workdps(40):
            tau = mp.mpf(s) * (mp.mpf(0.1) + (20 - mp.mpf(0.1)) / 2 * mp.mpf(s))
            phi, lower = float(mp.exp(-tau / 2)), float(-mp.expm1(-tau))
        assert relative(kernel.propagator, [[phi]]) <= PROMISED, f"s = {s}"
        assert relative(kernel.cholesky, [[lower]]) <= PROMISED, f"s = {s}"


def test_vpsde() -> None:
    """Φ = exp(−½∫b), Σ = 1 − exp(−∫b)."""
    process = ornstein.vpsde()
    for s in TIMES:
        kernel = process.transition(s)
        with mp.workdps(40):
            tau = mp.mpf(s) * (mp.mpf(0.1) + (20 - mp.mpf(0.1)) / 2 * mp.mpf(s))
            phi, lower = float(mp.exp(-tau / 2)), float(mp.sqrt(-mp.expm1(-tau)))
        assert relative(kernel.propagator, [[phi]]) <= 1e-14, f"s = {s}"  # τ/2 = 5 roundings of ½ε
        assert relative(kernel.cholesky, [[lower]]) <= 1e-14, f"s = {s}"


def test_numbers_are_taken_as_they_are() -> None:
    """Lists of Python numbers are float64 and stay so: the last bit of 0.3 and of 1/3 is kept."""
    process = Diffusion(
        [[0.0, -0.3], [0.3, 0.0]],
        [[0.1, 0.0], [0.0, 1 / 3]],
        [[1.1, 0.2], [0.2, 0.7]],
        v0_variance=0.04,
        v0_coupling=0.6,
    )
    assert process.Q.tolist() == [[0.0, -0.3], [0.3, 0.0]]
    assert process.D.tolist() == [[0.1, 0.0], [0.0, 1 / 3]]
    assert process.S.tolist() == [[1.1, 0.2], [0.2, 0.7]]
    assert process.auxiliary.coupling.tolist() == [0.6]
    assert process.auxiliary.factor().tolist() == [[0.0], [math.sqrt(0.04)]]
    assert ornstein.cld(damping=0.3).D[1, 1].item() == 0.3
    assert ornstein.learned(1, v0_variance=0.1).auxiliary.factor()[1, 0].item() == math.sqrt(0.1)


# ------------------------------------------------------------------ random, one clock


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize("noise", ["full", "diagonal"])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
def test_random_processes_of_full_rank(K: int, noise: str, given: str) -> None:
    rng = np.random.default_rng([K, noise == "full", given == "x"])
    for full_S in (False, True):
        for stiffness in STIFFNESS:
            process = draw(rng, K, noise, full_S, stiffness).process()
            for s in TIMES[::2]:
                assert kernel_error(process, s, given) <= PROMISED, (full_S, stiffness, s)


@pytest.mark.parametrize("noise", ["last", "one"])
@pytest.mark.parametrize("K", [2, 3, 4, 5])
def test_random_hypoelliptic_given_x(K: int, noise: str) -> None:
    rng = np.random.default_rng([10, K, noise == "one"])
    for full_S in (False, True):
        for stiffness in STIFFNESS:
            process = draw(rng, K, noise, full_S, stiffness).process()
            for s in (1e-4, 1e-3, 1e-2, 0.1, 1.0):
                error = kernel_error(process, s, "x")
                assert error <= PROMISED_HYPOELLIPTIC, (full_S, stiffness, s)


@pytest.mark.parametrize("noise", ["last", "one"])
@pytest.mark.parametrize("K", [2, 3])
def test_random_hypoelliptic_given_state(K: int, noise: str) -> None:
    rng = np.random.default_rng([20, K, noise == "one"])
    for full_S in (False, True):
        for stiffness in STIFFNESS:
            process = draw(rng, K, noise, full_S, stiffness).process()
            for s in (1e-3, 1e-2, 0.1, 1.0):
                error = kernel_error(process, s, "state")
                assert error <= PROMISED_HYPOELLIPTIC, (full_S, stiffness, s)


def test_noise_along_one_direction() -> None:
    """D = g gᵀ of whole numbers, which float64 holds exactly: rank one, not on an axis."""
    rng = np.random.default_rng(30)
    g = np.array([1.0, -2.0, 2.0])
    for _ in range(4):
        raw = rng.standard_normal((3, 3))
        process = Diffusion(raw - raw.T, np.outer(g, g), np.eye(3))
        # given the state all entries of L are of one size and its diagonal is not: float64 itself
        # holds the last of them to ε/(τ‖A‖)², so the shorter times are left to given x
        for given, times in (("x", (1e-4, 1e-2, 0.1, 1.0)), ("state", (0.1, 1.0))):
            for s in times:
                assert kernel_error(process, s, given) <= PROMISED_HYPOELLIPTIC, (s, given)


# ------------------------------------------------------------------ rates that differ


RATES = {
    "linear-constant": lambda: (Linear(0.1, 20.0), Constant(5.0)),
    "constant-linear": lambda: (Constant(5.0), Linear(0.1, 10.0)),
    "cosine-linear": lambda: (Cosine(), Linear(0.1, 20.0)),
    "linear-cosine": lambda: (Linear(0.1, 10.0), Cosine(4.0)),
    "falling-rising": lambda: (Linear(8.0, 0.5), Linear(0.5, 8.0)),
}
LONG = [("cosine-linear", "state"), ("linear-cosine", "state")]


@pytest.mark.parametrize(
    ("rates", "given"),
    [
        pytest.param(rates, given, marks=[pytest.mark.long] if (rates, given) in LONG else [])
        for rates in RATES
        for given in ("x", "state")
    ],
)
def test_rates_that_do_not_commute(rates: str, given: str) -> None:
    """Full-rank and hypoelliptic processes of two and three variables under two clocks."""
    rng = np.random.default_rng([40, *map(ord, rates)])
    rate_q, rate_d = RATES[rates]()
    cases = [
        (draw(rng, 2, "full", full_S=True, stiffness=30.0), (1e-5, 1e-2, 1.0)),
        (draw(rng, 3, "diagonal", stiffness=100.0), (1e-5, 1e-2, 1.0)),
        (draw(rng, 2, "last", stiffness=30.0), (1e-3, 0.1, 0.9)),
        (draw(rng, 3, "one", stiffness=10.0), (1e-3, 0.1, 0.9)),
    ]
    for drawn, times in cases:
        process = drawn.process(rate_q=rate_q, rate_d=rate_d)
        assert not process.commutes
        for s in times:
            assert kernel_error(process, s, given) <= 1e-8, (drawn, s)


@pytest.mark.parametrize("given", ["x", "state"])
def test_langevin_with_two_clocks(given: str) -> None:
    """The matrices of CLD and ALDA with b_q ≠ b_d, where the paper's formula fails (below)."""
    pair = {"rate_q": Constant(5.0), "rate_d": Linear(0.1, 10.0)}
    for name in ("cld", "alda"):
        preset = ornstein.PRESETS[name]()
        process = Diffusion(preset.Q, preset.D, preset.S, v0_variance=0.01, **pair)
        for s in (1e-4, 1e-3, 1e-2, 0.1, 1.0):
            assert kernel_error(process, s, given) <= 1e-8, (name, s)


def test_the_exponential_of_the_integral_is_not_the_propagator() -> None:
    """The paper's formula, b_q = 5, b_d from 0.1 to 10: off by up to 0.05 x in z, 0.13 x in v."""
    process = Diffusion(
        [[0, -1], [1, 0]], [[0, 0], [0, 1]], rate_q=Constant(5.0), rate_d=Linear(0.1, 10.0)
    )
    s = torch.linspace(0.01, 1.0, 100, dtype=torch.float64)
    turned, lost = 5.0 * s, 0.1 * s + 4.95 * s**2  # the integrals of the rates
    A = process.Q * turned[:, None, None] + process.D * lost[:, None, None]
    off = torch.linalg.matrix_exp(-A @ process.S) - process.transition(s).propagator
    assert off[:, :, 0].abs().amax(0).tolist() == pytest.approx([0.045, 0.126], abs=5e-4)
    assert off[0].abs().max() < 1e-3  # rates have hardly moved apart


# ------------------------------------------------------------------ what float64 can't hold


@pytest.mark.parametrize("full_S", [False, True])
def test_a_factor_that_float64_cannot_hold_is_refused(full_S: bool) -> None:
    """Every variable coupled to every other one, noise in the last: five sizes, mixed by Q."""
    process = draw(np.random.default_rng(60), 5, "last", full_S).process()
    with pytest.raises(ValueError, match=r"s = 1e-05 has lost \d+ of 16 digits.*larger s"):
        process.transition(1e-5, given="state")
    with pytest.raises(ValueError, match=r"s = 1e-05 has lost \d+ of 16 digits"):
        process.transition(torch.tensor([0.5, 1e-5, 1.0]), given="state")  # one of a batch
    assert kernel_error(process, 1.0, "state") <= PROMISED_HYPOELLIPTIC
    assert kernel_error(process, 1e-4, "x") <= PROMISED_HYPOELLIPTIC


@pytest.mark.parametrize("links", [None, np.array([0.7, 1.9, 1.2, 0.4])])
def test_a_chain_of_neighbours_is_held(links: np.ndarray | None) -> None:
    """Each row of the factor has its own size then: L₁₁ is 2e-29 at s = 1e-5, to all digits."""
    process = chain(5, links).process()
    for s in TIMES:
        assert kernel_error(process, s, "state") <= PROMISED, f"s = {s}"


def never_noise(count: int, seed: int) -> tuple[int, int, float]:
    """How many random factors came back, how many were refused, and the worst that came back."""
    rng = np.random.default_rng(seed)
    returned, refused, worst = 0, 0, 0.0
    for index in range(count):
        K = 3 + index % 3
        stiffness = float(10 ** rng.uniform(-1, 2))
        if index % 4 == 0:
            drawn = chain(K, rng.uniform(0.2, 3.0, K - 1))
        else:
            drawn = draw(rng, K, "last" if index % 2 else "one", bool(index % 5), stiffness)
        process = drawn.process()
        for s in 10 ** rng.uniform(-5, 0, 3):
            try:
                kernel = process.transition(float(s), given="state")
            except ValueError as error:
                assert "digits" in str(error)
                refused += 1
                continue
            phi, lower = truth(process, float(s), "state")
            diagonal = relative(np.diagonal(kernel.cholesky.numpy()), np.diagonal(lower))
            worst = max(worst, diagonal, propagator_error(kernel.propagator, phi))
            returned += 1
    return returned, refused, worst


def test_what_is_returned_is_never_noise() -> None:
    returned, refused, worst = never_noise(150, seed=50)
    assert worst <= PROMISED_HYPOELLIPTIC
    assert returned >= 100 and refused >= 50  # both sides of the line were visited


def test_noise_of_low_rank_is_never_noise() -> None:
    """D of rank two in four variables, whole numbers that float64 holds, in no one's coordinates.

    A factor of D that takes rounding for a third direction would be wrong at short times.
    """
    raw = np.random.default_rng(1).standard_normal((4, 4))
    returned = 0
    for seed in (0, 1, 2, 50, 93, 295, 521, 613):
        root = np.random.default_rng([seed, 2]).integers(-3, 4, (4, 2)).astype(float)
        process = Diffusion(raw - raw.T, root @ root.T)
        for s in (1e-4, 1e-3, 1e-2, 0.1, 1.0):
            try:
                error = kernel_error(process, s, "state")
            except ValueError as refusal:
                assert "digits" in str(refusal)
                continue
            assert error <= PROMISED_HYPOELLIPTIC, (seed, s)
            returned += 1
    assert returned >= 16


@pytest.mark.long
def test_what_is_returned_is_never_noise_at_length() -> None:
    returned, refused, worst = never_noise(6000, seed=51)
    assert worst <= PROMISED_HYPOELLIPTIC
    assert returned >= 4000 and refused >= 2000


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize("s", [1e-4, 0.1])
def test_gradient_with_respect_to_time(s: float, given: str) -> None:
    """d log L_ii / ds for ALDA, against differences of the oracle.

    Central differences with steps h, h/2, h/4 and two Richardson steps: error O(h⁶), below 1e-10
    at h = 0.02 for a power law; the oracle's rounding adds 1e-16/h = 2e-14.
    """
    process = ornstein.alda()
    slopes = []
    for h in (0.02, 0.01, 0.005):
        high, low = s * (1 + h), s * (1 - h)
        up, down = (np.log(np.diagonal(truth(process, at, given)[1])) for at in (high, low))
        slopes.append((up - down) / (high - low))
    first = [(4 * b - a) / 3 for a, b in pairwise(slopes)]
    expected = (16 * first[1] - first[0]) / 15
    time = torch.tensor(s, dtype=torch.float64, requires_grad=True)
    diagonal = process.transition(time, given=given).cholesky.diagonal()  # type: ignore[arg-type]
    for i in range(3):
        (slope,) = torch.autograd.grad(diagonal[i].log(), time, retain_graph=True)
        assert math.isclose(float(slope), expected[i], rel_tol=1e-9), i
