"""The solvers against those of others: `diffusers`, and formulas from the papers, step by step.

A scheduler of `diffusers` goes along a table of ᾱ. VPSDE with a constant rate b has ᾱ(s) = e^{−bs},
so that it meets any falling ᾱ at the times −log(ᾱ)/b; b is chosen for the first of them to be the
horizon. Both sides get one network, one table and one noise, in float64 as far as the peer lets it
be: its multistep solvers round their states to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from torch import Tensor, nn

import ornstein
from ornstein import Continuous, Diffusion, Process, ScoreModel
from ornstein.adapters import from_diffusers
from ornstein.sampling import Ancestral, Exponential, Heun, Splitting, TableSolver, Way
from tests.analytic.test_bound_mixture import Exact, mixture
from tests.analytic.test_sampling import CENTRE, SPREAD, arrived, gaussian
from tests.equivalence.test_diffusers import SHAPE, ddpm, relative, unet
from tests.families import clock

diffusers = pytest.importorskip("diffusers")
pytestmark = [  # the peer's own
    pytest.mark.filterwarnings("ignore:__array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.algorithm_types dpmsolver:FutureWarning"),
]

F64 = torch.float64
STEPS = [999, 940, 870, 800, 700, 610, 500, 380, 300, 210, 130, 70, 30, 9]  # Heun's


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """A small U-Net with random weights, in float64."""
    torch.manual_seed(0)
    return unet().double()


def noise_of(count: int = 2) -> Tensor:
    return torch.randn(count, *SHAPE, dtype=F64, generator=torch.Generator().manual_seed(4))


def vpsde_of(alphas: Tensor) -> tuple[Process, tuple[float, ...]]:
    """A VPSDE that has the first ᾱ at its horizon, and its times of all of them."""
    rate = -math.log(alphas[0])
    return ornstein.vpsde(rate=rate), tuple((-alphas.log() / rate).tolist())


def walked(
    model: ScoreModel,
    solver: TableSolver,
    y: Tensor,
    noise: Callable[[int], Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The states at all looks but the last, those that follow, and the sample: K = 1 only."""
    grid = solver.times(model, SHAPE)
    way = Way.of(model, grid, SHAPE, solver.looks(grid))

    def draw(purpose: str, step: int, rows: int) -> Tensor:
        assert noise is not None and rows == 1
        return noise(step).flatten(1).unsqueeze(1)

    states = [y.flatten(1).unsqueeze(1)]
    states += [stop.y for stop in solver.prepare(way)(states[0], draw)]
    x = way.look(len(way.times) - 1, states[-1]).x
    return [state[:, 0].unflatten(-1, SHAPE) for state in states], x.unflatten(-1, SHAPE)


def compared(
    network: nn.Module,
    scheduler: Any,
    solver: dict[str, Any],
    noise: Callable[[int], Tensor] | None = None,
) -> float:
    """The largest relative difference from the peer, over all states and the sample."""
    steps, alphas = exactly(scheduler)
    process, times = vpsde_of(alphas)
    model = from_diffusers(network, ddpm(exact=True), process, likelihood=Continuous())
    states, x = walked(model, Exponential(grid=times, **solver), noise_of(), noise)
    z, errors = noise_of(), []
    for i, step in enumerate(steps):
        errors.append(relative(states[i], z))
        answer = network(z, torch.full((len(z),), step)).sample
        if i == len(steps) - 1:
            a = alphas[i]
            errors.append(relative(x, (z - (1 - a).sqrt() * answer) / a.sqrt()))
        else:
            fresh = {} if noise is None else {"variance_noise": noise(i + 1)}
            z = scheduler.step(answer, step, z, **fresh).prev_sample
    return max(errors)


def exactly(scheduler: Any) -> tuple[list[int], Tensor]:
    """Its steps, and ᾱ there; its table is put in float64."""
    scheduler.set_timesteps(16)
    steps = scheduler.timesteps.tolist()
    a = scheduler.alphas_cumprod.double()[steps]
    scheduler.sigmas = torch.cat([((1 - a) / a).sqrt(), torch.zeros(1, dtype=F64)])
    return steps, a


# ---------------------------------------------------------------- diffusers


@pytest.mark.parametrize("extrapolate", ["data", "noise"])
def test_order_one_is_ddim(network: nn.Module, extrapolate: str) -> None:
    """`DDIMScheduler`, whose step goes to a ᾱ that is found from its own number of steps."""
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=True)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = torch.ones((), dtype=F64)
    scheduler.set_timesteps(20)
    steps = scheduler.timesteps.tolist()
    process, times = vpsde_of(scheduler.alphas_cumprod[steps])
    model = from_diffusers(network, ddpm(exact=True), process, likelihood=Continuous())
    solver = Exponential(grid=times, order=1, extrapolate=extrapolate)  # type: ignore[arg-type]
    _, x = walked(model, solver, noise_of())
    z = noise_of()
    for step in steps:
        answer = network(z, torch.full((len(z),), step)).sample
        z = scheduler.step(answer, step, z, eta=0.0).prev_sample
    assert len(steps) == 20
    assert relative(x, z) <= 1e-8  # 1e-4 is asked for; the network is in float64


@pytest.mark.parametrize("order", [1, 2])
def test_extrapolated_data_are_dpm_solver_pp(network: nn.Module, order: int) -> None:
    """ "heun" integrates the line through two estimates, as we do; "midpoint" puts e^λ in front."""
    options = {"algorithm_type": "dpmsolver++", "lower_order_final": False}
    heun = diffusers.DPMSolverMultistepScheduler(solver_order=order, solver_type="heun", **options)
    assert compared(network, heun, {"order": order}) <= 1e-5
    if order == 2:
        other = diffusers.DPMSolverMultistepScheduler(solver_order=2, **options)
        assert compared(network, other, {"order": 2}) > 1e-3


@pytest.mark.parametrize("order", [1, 2])
def test_with_all_noise_it_is_sde_dpm_solver_pp(network: nn.Module, order: int) -> None:
    """η = 1, the same noise in every step."""
    scheduler = diffusers.DPMSolverMultistepScheduler(
        solver_order=order,
        solver_type="heun",
        algorithm_type="sde-dpmsolver++",
        lower_order_final=False,
    )

    def noise(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(2, *SHAPE, dtype=F64, generator=generator)

    options = {"order": order, "stochasticity": 1.0}
    assert compared(network, scheduler, options, noise) <= 1e-5


def third_order(network: nn.Module, steps: list[int], a: Tensor, share: float) -> list[Tensor]:
    """DPM-Solver++ with three estimates, by its formula, in float64: all states.

    With u = (λ − λ_s)/h the parabola through them is m₀ + D₁u + D₂u², and the integral of e^λu² is
    twice (½ − 1/h + (1 − e^{−h})/h²) e^{λ_t}.
    """
    alpha, sigma = a.sqrt(), (1 - a).sqrt()
    lam = (alpha / sigma).log()
    z, states, seen = noise_of(), [noise_of()], []
    for i in range(len(steps) - 1):
        answer = network(z, torch.full((len(z),), steps[i])).sample
        seen = [(z - sigma[i] * answer) / alpha[i], *seen][:3]
        h = lam[i + 1] - lam[i]
        away = [(lam[i] - lam[i - j]) / h for j in range(1, len(seen))]  # of the looks before
        D1, D2 = torch.zeros_like(z), torch.zeros_like(z)
        if len(seen) > 1:
            D1 = (seen[0] - seen[1]) / away[0]
        if len(seen) > 2:
            before = (seen[1] - seen[2]) / (away[1] - away[0])
            D2 = (D1 - before) / away[1]
            D1 = D1 + away[0] * D2
        line = alpha[i + 1] * (torch.expm1(-h) / h + 1)
        bow = alpha[i + 1] * (1 - 2 / h - 2 * torch.expm1(-h) / h**2)
        z = sigma[i + 1] / sigma[i] * z - alpha[i + 1] * torch.expm1(-h) * seen[0]
        z = z + line * D1 + share * bow * D2
        states.append(z)
    return states


def test_the_third_order_of_dpm_solver_pp(network: nn.Module) -> None:
    """Ours integrates the parabola through three estimates; theirs takes half of its last term."""
    scheduler = diffusers.DPMSolverMultistepScheduler(
        solver_order=3, solver_type="heun", algorithm_type="dpmsolver++", lower_order_final=False
    )
    steps, alphas = exactly(scheduler)
    process, times = vpsde_of(alphas)
    model = from_diffusers(network, ddpm(exact=True), process, likelihood=Continuous())
    found, _ = walked(model, Exponential(grid=times, order=3), noise_of())
    whole, half = (third_order(network, steps, alphas, share) for share in (1.0, 0.5))
    assert max(map(relative, found, whole)) <= 1e-8
    z = noise_of()
    for step, expected in zip(steps[:-1], half[1:], strict=True):
        answer = network(z, torch.full((len(z),), step)).sample
        z = scheduler.step(answer, step, z).prev_sample
        assert relative(z, expected) <= 1e-5
    assert relative(half[-1], whole[-1]) > 1e-4


@pytest.mark.parametrize("order", [1, 2, 3])
def test_extrapolated_noise_is_deis(network: nn.Module, order: int) -> None:
    """Polynomials in log ρ = −λ/2, integrated exactly: all three orders are the same."""
    scheduler = diffusers.DEISMultistepScheduler(solver_order=order, lower_order_final=False)
    options = {"order": order, "extrapolate": "noise"}
    assert compared(network, scheduler, options) <= 1e-5


def test_extrapolated_noise_is_dpm_solver(network: nn.Module) -> None:
    """… of order 2, with the exact integral of its line."""
    scheduler = diffusers.DPMSolverMultistepScheduler(
        solver_order=2,
        algorithm_type="dpmsolver",
        solver_type="heun",
        lower_order_final=False,
        final_sigmas_type="sigma_min",
    )
    options = {"order": 2, "extrapolate": "noise"}
    assert compared(network, scheduler, options) <= 1e-5


def test_ancestral_is_ddpm(network: nn.Module) -> None:
    """`DDIMScheduler` with η = 1, which takes the posterior's variance, and one noise."""
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=True)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = torch.ones((), dtype=F64)
    scheduler.set_timesteps(10)
    steps = scheduler.timesteps.tolist()
    process, times = vpsde_of(scheduler.alphas_cumprod[steps])
    model = from_diffusers(network, ddpm(exact=True), process, likelihood=Continuous())

    def noise(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(2, *SHAPE, dtype=F64, generator=generator)

    _, x = walked(model, Ancestral(grid=times), noise_of(), noise)
    z = noise_of()
    for i, step in enumerate(steps, 1):
        answer = network(z, torch.full((len(z),), step)).sample
        z = scheduler.step(answer, step, z, eta=1.0, variance_noise=noise(i)).prev_sample
    assert relative(x, z) <= 1e-7


# ---------------------------------------------------------------- Heun in σ


def vesde_of(sigma: Tensor) -> tuple[Process, tuple[float, ...]]:
    """A VESDE that has the first σ at its horizon, and its times of all of them."""
    low = 0.01
    high = math.hypot(low, sigma[0])
    times = torch.log1p((sigma / low) ** 2) / (2 * math.log(high / low))
    return ornstein.vesde(low, high), tuple(times.tolist())


def test_heun_on_vesde_is_that_of_edm() -> None:
    """x ← x + Δσ(d + d′)/2 with d = (x − D(x; σ))/σ (Karras et al. 2022, algorithm 1), ρ = 7."""
    data = mixture(3)
    part = torch.linspace(0, 1, 19, dtype=F64)
    sigma = (80 ** (1 / 7) + part * (0.01 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    process, times = vesde_of(sigma)
    model = ScoreModel(Exact(data), process, Continuous(), precondition=False)
    start = sigma[0] * torch.randn(50, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    grid = Heun(grid=times).times(model, (3,))
    way = Way.of(model, grid, (3,), Heun(grid=times).looks(grid))
    states = [stop.y[:, 0] for stop in Heun(grid=times).prepare(way)(start.unsqueeze(1), None)]  # type: ignore[arg-type]

    def slope(x: Tensor, s: Tensor) -> Tensor:
        return data.noise(x, s.expand(len(x)))

    x = start
    for i in range(18):
        step, d = sigma[i + 1] - sigma[i], slope(x, sigma[i])
        guess = x + step * d
        assert float((states[2 * i] - guess).abs().max()) <= 1e-6
        x = x + step * (d + slope(guess, sigma[i + 1])) / 2
        assert float((states[2 * i + 1] - x).abs().max()) <= 1e-6
    last = way.look(len(way.times) - 1, states[-1].unsqueeze(1)).x
    assert float((last - (x - sigma[-1] * slope(x, sigma[-1]))).abs().max()) <= 1e-6


def test_heun_on_vesde_is_that_of_diffusers(network: nn.Module) -> None:
    """`HeunDiscreteScheduler`: its last step, to σ = 0, is our last look."""
    scheduler = diffusers.HeunDiscreteScheduler(beta_start=0.0001, beta_end=0.02)
    scheduler.set_timesteps(timesteps=STEPS)
    table = ddpm(exact=True)
    a = table.alphas_cumprod[STEPS]
    sigma = ((1 - a) / a).sqrt()
    assert relative(scheduler.sigmas[[0, *range(1, 26, 2)]], sigma) <= 1e-5
    twice = torch.cat([sigma[:1], sigma[1:].repeat_interleave(2), torch.zeros(1, dtype=F64)])
    scheduler.sigmas = twice
    process, times = vesde_of(sigma)
    model = from_diffusers(network, table, process, likelihood=Continuous())
    start = sigma[0] * noise_of()
    _, x = walked(model, Heun(grid=times), start)
    z = start
    for i, step in enumerate(scheduler.timesteps.tolist()):
        scaled = z / (twice[i] ** 2 + 1).sqrt()
        answer = network(scaled, torch.full((len(z),), step)).sample
        z = scheduler.step(answer, scheduler.timesteps[i], z).prev_sample
    assert relative(x, z) <= 1e-8


# ---------------------------------------------------------------- the splitting for CLD


class Langevin:
    """CLD and Gaussian data by hand: propagators as matrix exponentials, one clock."""

    def __init__(self, process: Diffusion) -> None:
        self.rate = process.rate_d
        self.Q, self.D, self.S = (m.numpy() for m in (process.Q, process.D, process.S))
        self.prior = np.linalg.inv(self.S)
        root = process.auxiliary.factor().numpy()
        self.start = root @ root.T  # Cov(y₀ | x)

    def clock(self, s: float) -> float:
        return float(clock(self.rate, s))

    def law(self, s: float) -> tuple[Any, Any]:
        """Mean and covariance of y_s."""
        forward = expm(-self.clock(s) * (self.Q + self.D) @ self.S)
        given = self.prior + forward @ (self.start - self.prior) @ forward.T
        return CENTRE * forward[:, 0], given + SPREAD**2 * np.outer(forward[:, 0], forward[:, 0])

    def half(self, mean: Any, covariance: Any, s: float, t: float) -> tuple[Any, Any]:
        """The reversed Ornstein–Uhlenbeck process from s to t, whose drift is (Q − D) S."""
        back = expm((self.clock(s) - self.clock(t)) * (self.Q - self.D) @ self.S)
        return back @ mean, self.prior + back @ (covariance - self.prior) @ back.T

    def kick(self, mean: Any, covariance: Any, s: float, h: float) -> tuple[Any, Any]:
        """y + h GGᵀ(∇log q_s(y) + S y), an Euler step of the rest."""
        own_mean, own = self.law(s)
        GG = 2 * float(self.rate.rate(torch.tensor(s, dtype=F64))) * self.D
        inverse = np.linalg.inv(own)
        step = np.eye(2) + h * GG @ (self.S - inverse)
        return step @ mean + h * GG @ inverse @ own_mean, step @ covariance @ step.T


@pytest.mark.parametrize("grid", ["uniform", "logsnr", "quadratic"])
@pytest.mark.parametrize("name", ["cld", "psld"])
def test_splitting_by_the_prior_is_sscs(name: str, grid: Any) -> None:
    """Half a step of the linear part, a step of the score in the middle, half a step: in law.

    (Dockhorn et al. 2022, algorithm 1, for CLD.) Closed form against closed form.
    """
    process = ornstein.PRESETS[name]()
    assert isinstance(process, Diffusion)
    model = gaussian(process, truncation=ornstein.NoiseLevel(0.05))
    solver = Splitting(25, grid, reference="prior")
    way, y = arrived(model, solver)
    peer = Langevin(process)
    mean, covariance = np.zeros(2), peer.prior
    times = way.grid.tolist()
    for s, t in pairwise(times):
        middle = (s + t) / 2
        mean, covariance = peer.half(mean, covariance, s, middle)
        mean, covariance = peer.kick(mean, covariance, middle, s - t)
        mean, covariance = peer.half(mean, covariance, middle, t)
    columns = (y[1:] - y[:1]).squeeze(-1)
    found = (columns.mT @ columns).numpy()
    size = np.sqrt(np.diag(covariance))
    assert np.abs((y[0, :, 0].numpy() - mean) / size).max() <= 1e-9
    assert np.abs((found - covariance) / np.outer(size, size)).max() <= 1e-9
