"""The way back, where its law is known.

For Gaussian data and a network that returns zero everything is affine: y_ε and x̂ are affine
functions of the noises of all steps. `law` sends one sample along for each unit of noise, so that
mean and variance of the samples are sums, without any Monte Carlo. For a single data point the
ancestral step has the exact law of y_t. What else is here: 50-digit arithmetic for its matrices,
mixtures with the best denoiser, and what must not matter, compared sample by sample.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp
from torch import Tensor, nn

import ornstein
from ornstein import (
    Continuous,
    Discrete,
    Likelihood,
    LinearSDE,
    NoiseLevel,
    Process,
    ScoreModel,
    Tweedie,
)
from ornstein.diagnostics import prior_gap
from ornstein.networks import MLP, UNet
from ornstein.sampling import (
    Ancestral,
    EulerMaruyama,
    Route,
    SamplingStep,
    Solver,
    Table,
    TableSolver,
    Way,
    grid_times,
    sample,
)
from tests.analytic.test_bound_gaussian import MEAN, STD, Zero, gaussian_model, made
from tests.analytic.test_bound_gaussian import seed as seed  # a fixture
from tests.analytic.test_bound_mixture import (
    Exact,
    ExactJoint,
    Mixture,
    Residual,
    ResidualJoint,
    mixture,
    model_of,
)
from tests.families import clock, draw, start_covariance
from tests.test_errors import message, says

ROOT = Path(__file__).resolve().parents[2]
F64 = torch.float64
PRESETS = list(ornstein.PRESETS)
SOME = ["learned-1", "learned-2-full", "learned-separate-rates", "coupled-v0", "full-S"]
RANDOM = ["random-1", "random-2", "random-6", "random-9", "random-10", "random-15"]
NAMES = [*PRESETS, *SOME, *RANDOM]
CENTRE, SPREAD = 0.3, 0.5  # of Gaussian data


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    """Nothing here is differentiated."""
    with torch.no_grad():
        yield


def gaussian(process: Process, parametrisation: str = "channel", **options: Any) -> ScoreModel:
    """The exact model of N(CENTRE, SPREAD²)."""
    return ScoreModel(
        Zero(),
        process,
        Continuous(),
        parametrisation,  # type: ignore[arg-type]
        data_mean=CENTRE,
        data_std=SPREAD,
        **options,
    )


def long_way(K: int) -> Process:
    """Noise reaches the data through K − 1 other variables: short steps have tiny factors."""
    drawn = draw(np.random.default_rng(K), K, noise="last", stiffness=40.0)
    return drawn.process(v0_variance=0.04)


def way_of(model: ScoreModel, solver: Solver) -> Way:
    """As `sample` makes it, for data of one number."""
    grid = solver.times(model, (1,))
    return Way.of(model, grid, (1,), solver.looks(grid))


def table_of(solver: TableSolver, way: Way) -> Table:
    """The matrices of a solver along a way, as it makes them itself."""
    mean, std = way.model.moments.mean, way.model.moments.std
    scale = float((mean**2 + std**2).mean().sqrt())
    return solver.table(Route(way.model.process, way.grid, way.times, way.kernel, scale))


def stacked(table: Table) -> tuple[Tensor, Tensor, Tensor]:
    """data (n, K), noise (n, K, K) and fresh (n, K, R) of steps that know one look each."""
    assert table.start is None and table.window == 1
    data, noise = (torch.stack([getattr(s, k)[0] for s in table.steps]) for k in ("data", "noise"))
    return data, noise, torch.stack([step.fresh for step in table.steps])


def law(model: ScoreModel, solver: TableSolver) -> tuple[float, float]:
    """Mean and variance of the samples of an affine model, in closed form."""
    way, y = arrived(model, solver)
    x = way.look(len(way.times) - 1, y).x[:, 0]
    return float(x[0]), float((x[1:] - x[0]).square().sum())


def arrived(model: ScoreModel, solver: TableSolver) -> tuple[Way, Tensor]:
    """The way, and y_ε without any noise, then with one unit of each: (1 + M, K, 1)."""
    way, K = way_of(model, solver), model.process.n_vars
    table = table_of(solver, way)
    asked = {("start", 0): table.start.fresh if table.start else None}
    asked |= {("step", i): step.fresh for i, step in enumerate(table.steps, 1)}
    sizes = {key: fresh.shape[-1] for key, fresh in asked.items() if fresh is not None}
    size = 1 + K + sum(sizes.values())  # no noise at all, then one unit of each
    y = torch.zeros(size, K, 1, dtype=F64)
    y[1 : 1 + K, :, 0] = torch.linalg.cholesky(model.process.prior_covariance).mT
    firsts = dict(zip(sizes, np.cumsum([1 + K, *sizes.values()]), strict=False))

    def unit(purpose: str, step: int, rows: int) -> Tensor:
        noise = torch.zeros(size, rows, 1, dtype=F64)
        first = firsts.pop((purpose, step))  # each of them once
        noise[first : first + rows, :, 0] = torch.eye(rows, dtype=F64)
        return noise

    for stop in solver.prepare(way)(y, unit):
        y = stop.y
    assert not firsts
    return way, y


def extrapolated(values: list[float]) -> float:
    """The limit of v(n), v(2n), v(4n) with errors in 1/n and 1/n²."""
    one, two, four = values
    return (one - 6 * two + 8 * four) / 3


# ---------------------------------------------------------------- x̂


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
@pytest.mark.parametrize("name", NAMES)
def test_estimate_of_gaussian_data(name: str, parametrisation: str) -> None:
    """m + ς²rᵀ(Σ + ς²r rᵀ)⁻¹(y − r m), by least squares on [L ςr]; y at any place."""
    process = made(name)
    model = gaussian_model(process, parametrisation)
    s = process.horizon * torch.tensor([0.03, 0.3, 0.7, 1.0], dtype=F64)
    kernel = process.transition(s)
    y, _ = kernel.sample(MEAN + STD * torch.randn(len(s), 4, dtype=F64))
    found = model.estimate(y, s)
    for i in range(len(s)):
        for j in range(4):
            L, r = kernel.cholesky[i], kernel.response[i]
            both = torch.cat([L, (STD[j] * r)[:, None]], 1)  # y = r m + both·(ε, x₀)
            least = torch.linalg.lstsq(both, y[i, :, j] - r * MEAN[j], driver="gelsd").solution
            # rounding of y, whitened, is what both sides can differ by
            rounding = 1e-14 * float((torch.linalg.inv(L).abs() @ y[i, :, j].abs()).max())
            away = float((found[i, j] - (MEAN[j] + STD[j] * least[-1])).abs())
            assert away <= 1e-11 + rounding * float(STD[j])


@pytest.mark.parametrize("name", ["vpsde", "vesde", "cld", "alda", "malda", "random-2"])
def test_estimate_of_a_mixture(name: str) -> None:
    """All four kinds of model against the density of y_s: r x̂ = y + Σ∇log q_s(y), whitened."""
    data, process = mixture(2), made(name)
    s = process.time_of_noise(torch.tensor([0.05, 0.3, 1.0, 1.6], dtype=F64)).repeat_interleave(8)
    kernel = process.transition(s)
    y, _ = kernel.sample(data.sample(len(s)))
    white = torch.linalg.solve_triangular(kernel.cholesky, y, upper=False)
    signal = kernel.signal.unsqueeze(-1)
    left = white - data.state_noise(y, kernel)  # a x̂
    expected = (signal * left).sum(1) / kernel.snr[:, None]
    assert float((left - signal * expected.unsqueeze(1)).abs().max()) <= 1e-7  # nothing beside a
    for network, kind in [
        (Exact(data), "channel"),
        (Residual(data), "channel"),
        (ExactJoint(data, process), "joint"),
        (ResidualJoint(data, process), "joint"),
    ]:
        found = model_of(data, process, network, kind).estimate(y, s)
        assert float((found - expected).abs().max()) <= 1e-8


def test_only_what_hides_x_is_asked_of_a_joint_network() -> None:
    """A guess across â, as the bound measures it, changes the score, not x̂; one along â by σ."""
    process, s = made("alda"), 0.4
    kernel = process.transition(s)
    direction = kernel.signal / kernel.snr.sqrt()
    W = torch.linalg.solve_triangular(kernel.cholesky, process.noise_factor(s), upper=False)
    across = torch.linalg.cross(W @ W.mT @ direction, torch.tensor([0.3, -1.0, 0.5], dtype=F64))
    y, _ = kernel.sample(torch.randn(5, 2, dtype=F64))

    class Off(nn.Module):
        def __init__(self, by: Tensor) -> None:
            super().__init__()
            self.by = by

        def forward(self, z: Tensor, logsnr: Tensor) -> Tensor:
            return self.by[:, None].expand_as(z)

    def models(by: Tensor) -> ScoreModel:
        return ScoreModel(Off(by), process, Continuous(), "joint", precondition=False)

    none, aside, along = (models(by) for by in (0 * across, across, direction))
    assert float((aside.estimate(y, s) - none.estimate(y, s)).abs().max()) <= 1e-13
    assert float((aside.score(y, s) - none.score(y, s)).abs().max()) > 0.1
    moved = none.estimate(y, s) - along.estimate(y, s)
    assert float((moved * kernel.snr.sqrt() - 1).abs().max()) <= 1e-12


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
def test_estimate_where_nothing_is_left_of_x(parametrisation: str) -> None:
    """σ = 2e7 at CLD's horizon: x̃ − σ ε̂ would cancel to nothing in float32, and lose 1e-9 here."""
    model = gaussian(made("cld"), parametrisation)
    y = torch.randn(64, 2, 3, dtype=F64)
    assert float((model.estimate(y, 1.0) - CENTRE).abs().max()) <= 1e-6  # ς²/σ is 1.3e-8
    assert float((model.estimate(y.float(), 1.0) - CENTRE).abs().max()) <= 1e-6
    if parametrisation == "channel":
        noisy = 2e7 * torch.randn(64, 3)
        assert float((model.denoise(noisy, -33.5) - CENTRE).abs().max()) <= 1e-6


def test_estimate_where_float64_has_no_name_for_the_noise() -> None:
    """exp(−250) of x is left: x̃ is beyond float32, its normal form is not."""
    process = ornstein.vpsde(rate=500.0)

    class Linear(nn.Module):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return 0.25 * x

    model = ScoreModel(Linear(), process, Continuous(), data_mean=CENTRE, data_std=SPREAD)
    y = torch.randn(64, 1, 3, dtype=F64)
    expected = CENTRE - SPREAD * 0.25 * y[:, 0]  # x̃/σ is y, and σ·scale is ς
    assert float((model.estimate(y, 1.0) - expected).abs().max()) <= 1e-12
    found = sample(model, 4, Ancestral(20, "uniform"), shape=(3,))
    assert found.isfinite().all()


# ---------------------------------------------------------------- numbers back to data


def likelihoods(levels: int) -> list[Likelihood]:
    """All maps of pixels."""
    maps = [None, 0.05, 1e-3]
    return [kind(levels, logit) for kind in (Discrete, Tweedie) for logit in maps]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_restore_is_the_inverse(dtype: torch.dtype) -> None:
    few = [*range(2, 140), 255, 256, 257, 511, 1000, 1024, 4095, 4096, 30001, 65535, 65536]
    for levels in few:
        k = torch.arange(levels).reshape(1, -1)
        half = torch.full(k.shape, 0.5, dtype=F64)
        for likelihood in likelihoods(levels):
            x = likelihood.values(k, half if likelihood.dequantised else None, dtype)
            found = likelihood.restore(x)
            assert found.dtype == (torch.uint8 if levels <= 256 else torch.int32)
            assert torch.equal(found.long(), k), f"{likelihood!r} in {dtype}"


@pytest.mark.parametrize("logit", [None, 0.05])
def test_restore_undoes_dequantisation(logit: float | None) -> None:
    for levels in (2, 7, 256, 5000):
        likelihood = Tweedie(levels, logit)
        k = torch.arange(levels).repeat(40, 1)
        u = torch.rand(k.shape, dtype=F64)
        u[0], u[1] = 0.0, 1 - 2.0**-24
        assert torch.equal(likelihood.restore(likelihood.values(k, u, F64)).long(), k)


@pytest.mark.parametrize("logit", [None, 0.05, 0.4])
def test_restore_finds_the_nearest_level(logit: float | None) -> None:
    likelihood = Discrete(37, logit)
    centres = likelihood.pixels.centres()
    x = 1.6 * centres.abs().max() * (2 * torch.rand(50, 100, dtype=F64) - 1)  # beyond the ends too
    nearest = (x.unsqueeze(-1) - centres).abs().argmin(-1)
    assert torch.equal(likelihood.restore(x).long(), nearest)


def test_restore_of_real_numbers() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(Continuous().restore(x), x)
    assert torch.equal(Tweedie(None).restore(x), x)
    says(message(lambda: Discrete(256).restore(x / 0)), "NaN or infinite", "pixels")
    says(message(lambda: Discrete(256).restore(x.byte())), "uint8", "floating point")


# ---------------------------------------------------------------- the ancestral step


@pytest.mark.parametrize("name", [*NAMES, "long-4", "long-5"])
def test_one_step_is_exact_for_a_single_point(name: str) -> None:
    """From N(r_s x, Σ_s) to N(r_t x, Σ_t), over short and long ways; in the metric of Σ_t."""
    process, x0 = (long_way(int(name[-1])) if name.startswith("long") else made(name)), -0.7

    class Known(nn.Module):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return (x - x0) * (logsnr / 2).exp().unsqueeze(-1)

    model = ScoreModel(Known(), process, Continuous(), precondition=False)
    K, T = process.n_vars, process.horizon
    early = float(process.time_of_noise(1e-3))
    times = torch.tensor([1, 0.999, 0.5, 0.49, 0.2, 0.1, 0.09, 0.05], dtype=F64) * T
    times = torch.cat([times[times > 2 * early], torch.tensor([1.5, 1.49, 1.0], dtype=F64) * early])
    way = Way.of(model, times, (1,))
    L, r = way.kernel.cholesky, way.kernel.response
    table, eye = table_of(Ancestral(), way), torch.eye(K, dtype=F64)
    none, one = torch.zeros(1, K, dtype=F64), torch.zeros(K, K, dtype=F64)
    new = torch.cat([none, one, eye]).unsqueeze(-1)  # no noise, that of y_s, that of the step
    for i in range(len(times) - 1):
        y = (r[i] * x0 + torch.cat([none, L[i].mT, one])).unsqueeze(-1)
        found = table.steps[i]([way.look(i, y)], new).squeeze(-1)
        white = torch.linalg.solve_triangular(L[i + 1], (found - r[i + 1] * x0).mT, upper=False)
        assert float(white[:, 0].abs().max()) <= 1e-10  # the mean
        columns = white[:, 1:] - white[:, :1]
        assert float((columns @ columns.mT - eye).abs().max()) <= 1e-10


def test_the_step_of_ho_et_al() -> None:
    """VPSDE: the posterior of DDPM (their equations 6 and 7), in ᾱ alone."""
    model = gaussian(made("vpsde"))
    way = way_of(model, Ancestral(50, "information"))
    data, noise, fresh = stacked(table_of(Ancestral(), way))
    bar = way.kernel.response[:, 0].square()  # ᾱ
    late, early = bar[:-1], bar[1:]
    alpha = late / early
    beta = 1 - alpha
    of_x, of_y = early.sqrt() * beta / (1 - late), alpha.sqrt() * (1 - early) / (1 - late)
    variance = (1 - early) / (1 - late) * beta
    # ε̂ = (y − √ᾱ x̂)/√(1 − ᾱ)
    gain = noise[:, 0, 0] / (1 - late).sqrt()
    for found, expected in [
        (gain, of_y),
        (data[:, 0] - gain * late.sqrt(), of_x),
        (fresh[:, 0, 0].square(), variance),
    ]:
        assert float((found / expected - 1).abs().max()) <= 1e-9  # 1 − ᾱ cancels


def posterior(process: ornstein.Diffusion, s: float, t: float) -> tuple[mp.matrix, ...]:
    """L_t, M and N from covariances in the precision in force."""
    Q, D, S = (mp.matrix(m.tolist()) for m in (process.Q, process.D, process.S))
    rest = mp.inverse(S)

    def phi(tau: mp.mpf) -> mp.matrix:
        return mp.expm(-tau * (Q + D) * S, method="taylor")

    def covariance(time: float) -> mp.matrix:
        forward = phi(clock(process.rate_d, time))
        return rest + forward * (start_covariance(process) - rest) * forward.T

    between = phi(clock(process.rate_d, s) - clock(process.rate_d, t))
    early, late = covariance(t), mp.cholesky(covariance(s))
    M = early * between.T * mp.inverse(late).T
    return mp.cholesky(early), M, mp.cholesky(early - M * M.T)


@pytest.mark.parametrize("name", ["cld", "psld", "alda", "malda"])
def test_the_step_against_fifty_digits(name: str) -> None:
    """M and NNᵀ in the metric of Σ_t, and each part of the noise that is added.

    At s = 1e-3, much earlier than samples are cut off, ALDA's L itself is good to 3e-11 there.
    """
    process = made(name)
    model = gaussian(process)
    full = grid_times(model, 1000, "information")
    pairs = [full[-2:], full[-40:-38], full[500:502], full[:2], full[[0, -1]], full[[700, 900]]]
    small = torch.tensor([1e-2, 0.99e-2, 1e-3, 0.9e-3], dtype=F64)
    for times in [*pairs, small[:2], small[1:3], small[2:]]:
        _, *found = stacked(table_of(Ancestral(), Way.of(model, times, (1,))))
        with mp.workdps(60):
            L, M, N = posterior(process, *times.tolist())
            inverse = mp.inverse(L)
            noise, fresh = (mp.matrix(m[0].tolist()) for m in found)
            allowed = 1e-10 if times[0] <= 1e-2 else 1e-14
            assert _largest(inverse * (noise - M)) <= allowed
            assert _largest(inverse * (fresh * fresh.T - N * N.T) * inverse.T) <= allowed
            assert max(abs(fresh[i, i] / N[i, i] - 1) for i in range(process.n_vars)) <= 1e-7


def _largest(matrix: mp.matrix) -> mp.mpf:
    return max(abs(entry) for entry in matrix)


@pytest.mark.parametrize("K", [4, 5])
def test_steps_that_the_kernel_itself_refuses(K: int) -> None:
    """L_{s|t} has lost all digits of its least direction; M and NNᵀ have not."""
    process = long_way(K)
    way = way_of(gaussian(process), Ancestral(1000))
    says(
        message(lambda: process.transition(way.times[:-1], "state", start=way.times[1:])),
        "has lost",
    )
    _, *found = stacked(table_of(Ancestral(), way))
    for i in (0, 300, 700, 999):
        with mp.workdps(120):
            L, M, N = posterior(process, *way.times[i : i + 2].tolist())
            inverse = mp.inverse(L)
            noise, fresh = (mp.matrix(m[i].tolist()) for m in found)
            assert _largest(inverse * (noise - M)) <= 1e-13
            assert _largest(inverse * (fresh * fresh.T - N * N.T) * inverse.T) <= 1e-13


# ---------------------------------------------------------------- Gaussian data


@pytest.mark.parametrize("name", NAMES[:-1])
def test_ancestral_law_converges_with_order_one(name: str) -> None:
    """The variance lacks O(1/n); what is left after extrapolation is O(n⁻³) and the prior's gap.

    The mean is exact but for the prior, which has mean zero: a difference of two Gaussian laws by
    δ standard deviations is δ²/2 nats, and no step can make it larger.
    """
    process = made(name)
    model, factor = gaussian(process), torch.linalg.cholesky(process.prior_covariance)
    gap = prior_gap(process.transition(process.horizon), factor, CENTRE**2 + SPREAD**2)
    laws = [law(model, Ancestral(n)) for n in (50, 100, 200)]
    for mean, _ in laws:
        assert abs(mean - CENTRE) <= SPREAD * math.sqrt(2 * float(gap)) + 1e-12
    errors = [variance / SPREAD**2 - 1 for _, variance in laws]
    assert 1.75 <= errors[0] / errors[1] <= 2.0 and 1.85 <= errors[1] / errors[2] <= 2.0
    assert abs(extrapolated(errors)) <= 3e-3


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
@pytest.mark.parametrize("name", ["vpsde", "cld", "alda", "learned-2-full", "random-2"])
def test_samples_have_the_law_of_the_solver(name: str, parametrisation: str, seed: int) -> None:
    """Mean and variance over samples and coordinates: 20 figures, each within four errors."""
    model = gaussian(made(name), parametrisation)
    solver = Ancestral(12)
    mean, variance = law(model, solver)
    x = sample(model, 400, solver, seed=seed, shape=(5, 10)).to(F64).flatten()
    assert abs(float(x.mean()) - mean) <= 4 * math.sqrt(variance / len(x))
    found = float((x - mean).square().mean())
    assert abs(found / variance - 1) <= 4 * math.sqrt(2 / len(x))


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda"])
def test_many_steps_give_the_data(name: str, seed: int) -> None:
    """Means and variances of all coordinates, each with its own mean and width."""
    model = gaussian_model(made(name), times=8, level=1e-3)
    x = sample(model, 250, Ancestral(600), seed=seed, shape=(32,)).to(F64).reshape(-1, 8, 4)
    count = x.shape[0] * x.shape[1]
    z = ((x - MEAN) / STD).flatten(0, 1)
    assert float(z.mean(0).abs().max()) <= 3 / math.sqrt(count)
    # 600 steps lack 2 % of the variance, by the law above
    assert float((z.square().mean(0) - 0.98).abs().max()) <= 3 * math.sqrt(2 / count)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *((name, "logsnr") for name in ("vpsde", "subvpsde", "cld", "alda", "malda")),
        ("psld", "uniform"),
        ("alda", "uniform"),
    ],
)
def test_euler_maruyama_has_weak_order_one(name: str, grid: Any) -> None:
    model = gaussian(made(name), truncation=NoiseLevel(0.02))
    laws = [law(model, EulerMaruyama(n, grid)) for n in (200, 400, 800)]
    for k, goal in enumerate((CENTRE, SPREAD**2)):
        values = [moment[k] / goal for moment in laws]
        first, second = values[0] - values[1], values[1] - values[2]
        assert 1.7 <= first / second <= 2.4
        assert abs(extrapolated(values) - 1) <= 3e-3


def test_euler_maruyama_is_the_formula() -> None:
    """y − h(A y − GGᵀ score) + √h G ξ with the score of the model, for every variable."""
    data, process = mixture(3), made("alda")
    model = model_of(data, process, Exact(data))
    times = torch.tensor([0.5, 0.47], dtype=F64)
    way = Way.of(model, times, (3,))
    y, _ = process.transition(times[:1]).sample(data.sample(2))
    table = table_of(EulerMaruyama(), way)
    s, h = times[:1], times[0] - times[1]
    G = process.noise_factor(s)
    xi = torch.randn(2, G.shape[-1], 3, dtype=F64)
    drift = process.drift(s) @ y - process.diffusion(s) @ model.score(y, float(s))
    expected = y - h * drift + h.sqrt() * G @ xi
    found = table.steps[0]([way.look(0, y)], xi)
    assert float((found - expected).abs().max()) <= 1e-12


# ---------------------------------------------------------------- mixtures


@pytest.mark.parametrize(
    ("name", "kind"), [("vpsde", Exact), ("cld", Residual), ("alda", Exact), ("cld", ExactJoint)]
)
def test_a_mixture_in_the_plane(name: str, kind: Callable[..., nn.Module], seed: int) -> None:
    """Weights, means and covariances of three modes, within the samples' errors."""
    means = torch.tensor([[-2.0, 0.0], [1.5, 1.5], [1.5, -2.0]], dtype=F64)
    weights, stds = torch.tensor([0.5, 0.2, 0.3], dtype=F64), torch.tensor([0.2, 0.4, 0.3])
    data, process = Mixture(weights, means, stds.to(F64)), made(name)
    joint = issubclass(kind, ExactJoint)  # type: ignore[arg-type]
    network = kind(data, process) if joint else kind(data)
    model = model_of(data, process, network, "joint" if joint else "channel")
    n = 300 if joint else 1500
    x = sample(model, n, Ancestral(200), seed=seed, shape=(2,)).to(F64)
    which = torch.cdist(x, means).argmin(1)
    for k in range(3):
        mine, p, std = x[which == k], float(weights[k]), float(stds[k])
        count = len(mine)
        assert abs(count / n - p) <= 3 * math.sqrt(p * (1 - p) / n)
        assert float((mine.mean(0) - means[k]).abs().max()) <= 3.5 * std / math.sqrt(count)
        # the step's bias narrows a mode by about 3 % of its variance
        spread = (mine - means[k]).square().mean(0) / std**2
        assert float((spread - 0.97).abs().max()) <= 3.5 * math.sqrt(2 / count)


# ---------------------------------------------------------------- what must not matter


class Elementwise(nn.Module):
    """A network that treats each number by itself, so that samples can be compared bit by bit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.seen: list[int] = []
        self.modes: list[bool] = []

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.modes.append(self.training)
        return self.scale * torch.tanh(x)


def pixels_model(process: Process | None = None, parametrisation: str = "channel") -> ScoreModel:
    """Of pixels with 16 levels."""
    process = made("alda") if process is None else process
    return ScoreModel(Elementwise(), process, Discrete(16), parametrisation, data_std=0.6)  # type: ignore[arg-type]


STEPS = Ancestral(12)


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
def test_batches_do_not_matter(parametrisation: str) -> None:
    model = pixels_model(parametrisation=parametrisation)
    whole, some, single = (
        sample(model, 9, STEPS, seed=4, shape=(2, 3), batch_size=size) for size in (9, 4, 1)
    )
    assert whole.dtype == torch.uint8 and whole.shape == (9, 2, 3)
    assert len(whole.flatten().unique()) > 8
    assert torch.equal(whole, some) and torch.equal(whole, single)
    raw = [
        sample(model, 9, STEPS, seed=4, shape=(2, 3), batch_size=size, raw=True) for size in (9, 2)
    ]
    assert torch.equal(raw[0], raw[1]) and raw[0].dtype == torch.float32
    assert torch.equal(Discrete(16).restore(raw[0]), whole)


@pytest.mark.parametrize("solver", [STEPS, EulerMaruyama(40)])
def test_samples_have_numbers(solver: Solver) -> None:
    model = pixels_model()
    whole = sample(model, 8, solver, shape=(5,))
    assert torch.equal(whole[3:5], sample(model, 2, solver, shape=(5,), start=3))
    assert not torch.equal(whole, sample(model, 8, solver, shape=(5,), start=8))
    assert not torch.equal(whole, sample(model, 8, solver, shape=(5,), seed=1))
    assert torch.equal(whole, sample(model, 8, solver, shape=(5,)))


def test_a_network_that_mixes() -> None:
    """Convolutions and normalisations round differently in other batches, and by no more."""
    torch.manual_seed(3)
    network = UNet.tiny((1, 8, 8))
    nn.init.normal_(network.leave[-1].weight, std=0.05)  # type: ignore[arg-type]
    model = ScoreModel(network, made("cld"), Discrete(4), data_mean=-0.2, data_std=0.7)
    whole = sample(model, 5, Ancestral(8))  # the shape is the network's
    assert whole.shape == (5, 1, 8, 8)
    assert torch.equal(whole, sample(model, 5, Ancestral(8), batch_size=2))
    one, two = (sample(model, 5, Ancestral(8), batch_size=size, raw=True) for size in (5, 2))
    assert float((one - two).abs().max()) <= 1e-5


def test_the_model_is_left_as_it_was() -> None:
    """Called in evaluation mode, steps + 1 times, without gradients; and restored."""
    model = pixels_model()
    model.train()
    model.moments.eval()
    network = model.network
    assert isinstance(network, Elementwise)
    with torch.enable_grad():
        x = sample(model, 5, STEPS, shape=(2,), batch_size=3, raw=True)
    assert not x.requires_grad
    assert network.seen == [3] * 13 + [2] * 13 and not any(network.modes)
    assert model.training and network.training and not model.moments.training


def test_samples_do_not_touch_the_generator() -> None:
    before = torch.random.get_rng_state()
    sample(pixels_model(), 2, STEPS, shape=(2,))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_learned_process_can_train_after_it() -> None:
    """Nothing that is kept has lost its gradient."""
    process = ornstein.learned(1)
    model = pixels_model(process)
    sample(model, 2, STEPS, shape=(2,))
    with torch.enable_grad():
        loss = ornstein.elbo(model, torch.randint(16, (4, 2))).nats.mean()
        loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("likelihood", [Discrete(300), Tweedie(256, 0.05), Continuous()])
def test_types_of_data(likelihood: Likelihood) -> None:
    model = ScoreModel(Elementwise(), made("vpsde"), likelihood, data_std=0.6)
    found = sample(model, 3, STEPS, shape=(4,), device="cpu")
    wanted = {300: torch.int32, 256: torch.uint8}
    levels = getattr(getattr(likelihood, "pixels", None), "levels", 0)
    assert found.dtype == wanted.get(levels, torch.float32) and found.device.type == "cpu"
    likelihood.check(found)


def test_the_callback_sees_every_step() -> None:
    model, seen = pixels_model(), []
    whole = sample(model, 5, STEPS, shape=(2, 3), batch_size=3, callback=seen.append, raw=True)
    assert [step.number for step in seen] == 2 * [*range(1, 13)]
    assert {step.total for step in seen} == {12}
    assert [step.samples for step in seen] == 12 * [range(3)] + 12 * [range(3, 5)]
    times = grid_times(model, 12, STEPS.grid).tolist()
    assert [step.s for step in seen] == 2 * times[1:]
    for step in (seen[11], seen[23]):
        assert step.y.shape == (len(step.samples), 3, 2, 3)
        last = model.estimate(step.y, step.s)
        assert (
            float((last.float() - whole[step.samples[0] : step.samples[-1] + 1]).abs().max()) < 1e-6
        )
    # the estimate is the one that the step was made with
    again = model.estimate(seen[4].y, seen[4].s)
    assert float((again - seen[5].x).abs().max()) <= 1e-6
    with pytest.raises(FrozenInstanceError):
        seen[0].number = 3


def test_solvers_are_values() -> None:
    assert Ancestral() == Ancestral(100, "curvature") != Ancestral(50)
    assert len({Ancestral(), Ancestral(100), EulerMaruyama()}) == 2
    assert EulerMaruyama() == EulerMaruyama(1000, "logsnr")


# ---------------------------------------------------------------- two processes


def one_of_two(rank: int, folder: str) -> None:
    """Sample as one of two processes; write down what was found and said."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    model = pixels_model()
    found = {
        "whole": sample(model, 7, STEPS, seed=4, shape=(2, 3), batch_size=2),
        "single": sample(model, 1, STEPS, seed=4, shape=(2, 3)),
        "raw": sample(model, 4, STEPS, seed=4, shape=(2, 3), raw=True, start=2),
    }
    said = []

    def fails(step: SamplingStep) -> None:
        if rank == 1:
            raise KeyboardInterrupt

    for options in ({"seed": rank}, {"callback": fails}):
        try:
            sample(model, 4, STEPS, shape=(2,), **options)  # type: ignore[arg-type]
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            said.append(f"{type(error).__name__} {error}")
    np.savez(f"{folder}/rank-{rank}.npz", said=said, **{k: v.numpy() for k, v in found.items()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_make_what_one_does(tmp_path: Path) -> None:
    """… a single sample too, which only one of them can make; and they fail together."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    source = Path(ornstein.__file__).resolve().parents[1]
    paths = os.pathsep.join([str(source), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment["PYTHONIOENCODING"] = "utf-8"
    if sys.platform == "linux":  # they meet without a network
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    both = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import {__name__} as here; here.one_of_two({rank}, {str(tmp_path)!r})",
            ],
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    model = pixels_model()
    whole = sample(model, 7, STEPS, seed=4, shape=(2, 3))
    raw = sample(model, 4, STEPS, seed=4, shape=(2, 3), raw=True, start=2)
    for rank in range(2):
        with np.load(tmp_path / f"rank-{rank}.npz") as found:
            assert found["whole"].dtype == np.uint8
            assert np.array_equal(found["whole"], whole.numpy())
            assert np.array_equal(found["single"], whole[:1].numpy())
            assert np.array_equal(found["raw"], raw.numpy())
            other, failed = found["said"].tolist()
        says(other, "ValueError", "different samples", "same n, seed and start")
        if rank == 0:
            assert failed.startswith("RuntimeError another process")
        else:
            assert failed.startswith("KeyboardInterrupt")


# ---------------------------------------------------------------- mistakes


def test_mistakes_are_named() -> None:
    model = pixels_model()

    def asked(*given: Any, **options: Any) -> str:
        return message(lambda: sample(model, *given, **{"shape": (2,), **options}))

    says(asked(0), "n=0", "whole number ≥ 1")
    says(asked(2.0), "n=2.0")
    says(asked(2, Ancestral), "solver=Ancestral;", "Ancestral(steps=100)")
    says(asked(2, "ancestral"), "solver='ancestral'")
    says(asked(2, None, 0.5), "seed=0.5", "whole number")
    says(asked(2, start=-1), "start=-1")
    says(asked(2, batch_size=0), "batch_size=0")
    says(asked(2, device="nowhere"), "device='nowhere'")
    says(asked(2, shape=None), "Elementwise", "shape=(3, 32, 32)")
    says(asked(2, shape=()), "shape=()", "without the batch")
    says(asked(2, shape=(2, -1)), "shape=(2, -1)")
    says(asked(2, shape=7), "shape=7")
    says(message(lambda: sample(nn.Linear(1, 1), 2)), "Linear", "ScoreModel")  # type: ignore[arg-type]
    says(message(lambda: Ancestral(0)), "steps=0")
    says(message(lambda: Ancestral(10, "even")), "grid='even'", "uniform")  # type: ignore[arg-type]


def test_a_shape_that_does_not_fit() -> None:
    model = ScoreModel(MLP((3,), width=8), made("vpsde"), Discrete(4), data_mean=torch.zeros(3))
    assert sample(model, 2, STEPS).shape == (2, 3)
    says(message(lambda: sample(model, 2, STEPS, shape=(4,))), "data_mean", "(3,)")

    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return self.module(x, logsnr)

    wrapped = ScoreModel(Wrapped(model.network), made("vpsde"), Discrete(4))
    assert sample(wrapped, 2, STEPS).shape == (2, 3)


def test_a_network_that_breaks_down() -> None:
    """The step and the time are named; other steps' are not blamed."""
    process = made("vpsde")

    class Breaks(nn.Module):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return torch.where(logsnr[:, None] > 2, math.nan, torch.zeros_like(x))

    model = ScoreModel(Breaks(), process, Discrete(16), data_std=0.6)
    times = grid_times(model, 12, STEPS.grid)
    step = int((process.transition(times).logsnr <= 2).sum())  # the first look that fails
    text = message(lambda: sample(model, 3, STEPS, shape=(2,)))
    says(text, f"in step {step + 1} of 12", f"s = {times[step].item():.6g}", "not finite")


def test_a_prior_that_is_not_reached() -> None:
    slow = ornstein.vpsde(rate=0.5)
    says(
        message(lambda: sample(pixels_model(slow), 2, STEPS, shape=(2,))),
        "does not reach its prior",
        "longer horizon",
    )
    elsewhere = LinearSDE(lambda s: -5 + 0 * s, lambda s: 10 + 0 * s, 4.0, name="elsewhere")
    says(message(lambda: sample(pixels_model(elsewhere), 2, STEPS, shape=(2,))), "'elsewhere'")
