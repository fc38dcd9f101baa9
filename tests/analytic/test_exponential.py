"""`Exponential`: exact for a single data point, and of its order on Gaussian data, for every K."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Ancestral, Exponential, Process, ScoreModel
from ornstein.sampling import Table, TableSolver
from tests.analytic.test_sampling import stacked, table_of, way_of
from tests.analytic.test_solvers import flow_map_of

F64 = torch.float64
MEAN, STD = 0.3, 0.5

PROCESSES: dict[str, Process] = {
    "vpsde": ornstein.vpsde(),
    "vesde": ornstein.vesde(),
    "cld": ornstein.cld(),
    "psld": ornstein.psld(),
    "alda": ornstein.alda(),
    "malda": ornstein.malda(),
    "learned-2": ornstein.learned(2, full=True, seed=3).requires_grad_(False),
    "two clocks": ornstein.Diffusion(
        [[0, -1], [1, 0]], [[0.1, 0], [0, 1]], rate_q=ornstein.Linear(1, 5)
    ),
}


class Zero(nn.Module):
    """Leaves the Gaussian answer as it is."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Point(nn.Module):
    """Knows the only data point there is, 0.7."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return (x - 0.7) * (logsnr.to(x.dtype) / 2).exp()[:, None]


def gaussian(process: Process) -> ScoreModel:
    """The exact model of Gaussian data."""
    return ScoreModel(Zero(), process, ornstein.Continuous(), data_mean=MEAN, data_std=STD)


def mapped(model: ScoreModel, solver: TableSolver) -> Tensor:
    """A deterministic solver as a map from y_T to x, affine here: offset and row, (1 + K,).

    The row is that of the prior's standard normal numbers.
    """
    way, K = way_of(model, solver), model.process.n_vars
    prior = torch.linalg.cholesky(model.process.prior_covariance)
    start = torch.cat([torch.zeros(1, K, dtype=F64), prior.mT]).unsqueeze(-1)
    *_, stop = solver.prepare(way)(start, lambda purpose, step, rows: torch.zeros(K + 1, rows, 1))
    x = way.look(len(way.times) - 1, stop.y).x[:, 0]
    return torch.cat([x[:1], x[1:] - x[0]])


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    """Nothing here is differentiated."""
    with torch.no_grad():
        yield


def noises(table: Table) -> Tensor:
    """What multiplies ε̂ of the newest look: (n, K, K)."""
    return torch.stack([step.noise[0] for step in table.steps])


@pytest.mark.parametrize("name", PROCESSES)
def test_without_noise_it_only_turns(name: str) -> None:
    """V is orthogonal: L_t V has the covariance of y_t."""
    solver = Exponential(12, order=1)
    way = way_of(gaussian(PROCESSES[name]), solver)
    table = table_of(solver, way)
    noise = noises(table)
    found = noise @ noise.mT
    deviation = way.kernel.covariance[1:].diagonal(dim1=-2, dim2=-1).sqrt()
    scale = deviation[:, :, None] * deviation[:, None, :]
    assert ((found - way.kernel.covariance[1:]) / scale).abs().max() < 1e-11
    assert all(step.fresh is None for step in table.steps)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_a_single_point_keeps_its_law(name: str, eta: float) -> None:
    """Whatever the step: Cov(L_t V ε + L_t N ξ) = Σ_t."""
    solver = Exponential(4, order=1, stochasticity=eta)
    way = way_of(gaussian(PROCESSES[name]), solver)
    table = table_of(solver, way)
    noise = noises(table)
    found = noise @ noise.mT
    if eta > 0:
        _, _, fresh = stacked(table)
        found = found + fresh @ fresh.mT
    white = torch.linalg.solve_triangular(way.kernel.cholesky[1:], found, upper=False)
    white = torch.linalg.solve_triangular(way.kernel.cholesky[1:], white.mT, upper=False)
    assert (white - torch.eye(white.shape[-1]).to(white)).abs().max() < 1e-10


@pytest.mark.parametrize("name", PROCESSES)
def test_full_noise_is_the_ancestral_step(name: str) -> None:
    """q(y_t | y_s, x) is the reverse equation of a single point, solved."""
    process = PROCESSES[name]
    if name == "vesde":
        process = ornstein.vesde(sigma_max=5.0)
    way = way_of(gaussian(process), Ancestral(25))
    data, noise, fresh = stacked(table_of(Exponential(25, order=1, stochasticity=1.0), way))
    other_data, other_noise, other_fresh = stacked(table_of(Ancestral(25), way))
    L = way.kernel.cholesky[1:]

    def white(matrix: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(L, matrix, upper=False)

    assert (white(noise) - white(other_noise)).abs().max() < 1e-9
    assert torch.equal(data, other_data)
    own, other = white(fresh), white(other_fresh)
    assert (own @ own.mT - other @ other.mT).abs().max() < 1e-9


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_one_step_lands_on_a_single_point(name: str, order: int) -> None:
    """From anywhere, for a model that knows the point."""
    model = ScoreModel(
        Point(), PROCESSES[name], ornstein.Continuous(), data_std=STD, precondition=False
    )
    for steps in (1, 5):
        solver = Exponential(steps, order=order)
        found = ornstein.sample(model, 4, solver, shape=(1,), raw=True, seed=1)
        assert (found.double() - 0.7).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((name, order) for name in PROCESSES if name != "vesde" for order in (1, 2)),
        *((name, 3) for name in ("vpsde", "cld", "psld", "alda", "learned-2")),
    ],
)
def test_order_of_convergence(name: str, order: int) -> None:
    """The map from noise to data converges to the exact one with the power of its order.

    Left out: the third order where the state at the horizon still knows something of x, so that
    the first two steps, which know fewer looks, leave an error of order 2 (two clocks), or where
    log SNR stands still at times (MALDA), see `test_solver_orders`; and VESDE, whose samples keep
    the mean of their noise.
    """
    model = gaussian(PROCESSES[name])
    exact = torch.from_numpy(flow_map_of(model))
    errors = [
        torch.linalg.vector_norm(mapped(model, Exponential(n, "information", order)) - exact)
        for n in (320, 640)
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.2)
    variance = exact[1:].square().sum().item()
    assert variance == pytest.approx(STD**2, rel=0.03)  # the prior is not met exactly
    assert exact[0].item() == pytest.approx(MEAN, rel=0.08)


def test_on_vpsde_it_is_ddim() -> None:
    """y_t = α_t x̂ + σ_t ε̂ (Song et al. 2021), by the closed form of VPSDE."""
    process = PROCESSES["vpsde"]
    solver = Exponential(7, order=1)
    way = way_of(gaussian(process), solver)
    table = table_of(solver, way)
    integral = 0.1 * way.times + (20 - 0.1) / 2 * way.times**2
    alpha, sigma = (-integral / 2).exp()[1:], (-(-integral).expm1()).sqrt()[1:]
    data = torch.stack([step.data[0] for step in table.steps])
    torch.testing.assert_close(data[:, 0], alpha, rtol=1e-12, atol=0)
    torch.testing.assert_close(noises(table)[:, 0, 0], sigma, rtol=1e-12, atol=0)


def test_on_vpsde_the_second_order_is_the_multistep_of_dpm_solver() -> None:
    """x̂ extrapolated in λ, the weight in closed form: with α/σ = e^{λ/2} and h = λ_t − λ_s,
    y_t = … + (α_t (1 − e^{−h/2}) − …) of a linear x̂ in λ (Lu et al. 2022, data prediction)."""
    solver = Exponential(9, order=2)
    way = way_of(gaussian(PROCESSES["vpsde"]), solver)
    steps = table_of(solver, way).steps
    lam = way.view.logsnr
    for i in range(1, 9):
        start, end, before = lam[i].item(), lam[i + 1].item(), lam[i - 1].item()
        sigma = way.kernel.cholesky[i + 1, 0, 0].item()
        # σ_t ∫ ½ e^{λ/2} ℓ(λ) dλ with ℓ = (λ − λ_s)/(λ_{s'} − λ_s)
        h = end - start
        moment = math.exp(end / 2) * (h - 2) + 2 * math.exp(start / 2)
        weight = steps[i].data[1, 0].item()
        assert weight == pytest.approx(sigma * moment / (before - start), rel=1e-9)
        # x̂ of now has the rest of α_t
        response = way.kernel.response[i + 1, 0].item()
        assert steps[i].data[0, 0].item() == pytest.approx(response - weight, rel=1e-9)


def test_samples_are_seeded_one_by_one() -> None:
    model = gaussian(PROCESSES["cld"])
    solver = Exponential(6, order=2, stochasticity=0.7)
    whole = ornstein.sample(model, 6, solver, shape=(3,), seed=5)
    part = ornstein.sample(model, 2, solver, shape=(3,), seed=5, start=3, batch_size=1)
    torch.testing.assert_close(part, whole[3:5], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": 4}, "order=4; expected 1, 2 or 3"),
        ({"stochasticity": -1.0}, "stochasticity=-1.0; expected a number ≥ 0"),
        ({"steps": 0}, "steps=0"),
        ({"grid": "even"}, "grid='even'"),
    ],
)
def test_mistakes(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Exponential(**options)  # type: ignore[arg-type]
