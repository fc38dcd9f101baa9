"""Every solver against mathematics: that it converges, how fast, and what it does exactly.

On Gaussian data N(m, ς²) the estimate is affine, x̂ = m + ς²aᵀ(w − a m)/(1 + ς²‖a‖²) with w = L⁻¹y,
and so is every solver: `carried` takes columns of noise along a table, without the model and
without Monte Carlo. Started from the law of y_T itself, the samples of an exact solver have the
mean m and the variance ς⁴/(ς² + σ_ε²), which is that of E[x | y_ε]. A deterministic solver is
compared as a map from y_T to x. The exact flow is y_t − r_t m = F_t U F_s⁻¹(y_s − r_s m), where
F Fᵀ = C is the covariance of y and U is orthogonal,

    U' = (H⁺ − H⁺ᵀ) U,     H⁺ the part of F⁻¹AF + ½F⁻¹GGᵀF⁻ᵀ that is strictly above the diagonal,

since C' = AC + CAᵀ + GGᵀ; `turned_flow` solves it. ς = 0 is a single data point.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Continuous, Discrete, NoiseLevel, Process, ScoreModel
from ornstein.diagnostics import prior_gap
from ornstein.sampling import (
    Ancestral,
    EulerMaruyama,
    Exponential,
    Heun,
    PredictorCorrector,
    SamplingStep,
    Splitting,
    TableSolver,
    Way,
    sample,
)
from tests.analytic.test_bound_gaussian import Zero, made
from tests.analytic.test_bound_gaussian import seed as seed  # a fixture
from tests.analytic.test_bound_mixture import Exact, Mixture, model_of
from tests.analytic.test_sampling import (
    CENTRE,
    SPREAD,
    Elementwise,
    gaussian,
    law,
    pixels_model,
    table_of,
    way_of,
)
from tests.families import draw
from tests.test_errors import message, says

F64 = torch.float64
Array = Any
Make = Callable[[int], TableSolver]  # by its number of steps

FIRST: dict[str, Make] = {  # of weak order 1
    "ancestral": Ancestral,
    "euler": EulerMaruyama,
    "splitting": Splitting,
    "splitting-prior": lambda n: Splitting(n, reference="prior"),
    "corrected": PredictorCorrector,
    "corrected-weakly": lambda n: PredictorCorrector(n, strength=0.05),
    "corrected-often": lambda n: PredictorCorrector(n, corrections=3, strength=1.0),
    "exponential-1-half": lambda n: Exponential(n, order=1, stochasticity=0.5),
    "exponential-1-full": lambda n: Exponential(n, order=1, stochasticity=1.0),
}
SECOND: dict[str, Make] = {  # of weak order 2
    "exponential-2-half": lambda n: Exponential(n, order=2, stochasticity=0.5),
    "exponential-2-full": lambda n: Exponential(n, order=2, stochasticity=1.0),
}
THIRD: dict[str, Make] = {
    "exponential-3-half": lambda n: Exponential(n, order=3, stochasticity=0.5),
    "exponential-3-full": lambda n: Exponential(n, order=3, stochasticity=1.0),
}
FLOWS: dict[str, tuple[Make, int]] = {  # deterministic, with their order
    "heun": (Heun, 2),
    "exponential-1": (lambda n: Exponential(n, order=1), 1),
    "exponential-2": (lambda n: Exponential(n, order=2), 2),
    "exponential-3": (lambda n: Exponential(n, order=3), 3),
    "exponential-1-noise": (lambda n: Exponential(n, order=1, extrapolate="noise"), 1),
    "exponential-2-noise": (lambda n: Exponential(n, order=2, extrapolate="noise"), 2),
    "exponential-3-noise": (lambda n: Exponential(n, order=3, extrapolate="noise"), 3),
}
SOLVERS: dict[str, Make] = {**FIRST, **SECOND, **THIRD, **{k: v[0] for k, v in FLOWS.items()}}
ORDERS = {**dict.fromkeys(FIRST, 1), **dict.fromkeys([*SECOND, *THIRD], 2)}  # of the variance
ORDERS |= {name: order for name, (_, order) in FLOWS.items()}

PRESETS = [name for name in ornstein.PRESETS if not name.startswith("learned")]
LEARNED = ["learned-1-full", "learned-2-full", "learned-separate-rates"]  # away from their start
COUPLED = ["coupled-1", "coupled-2", "coupled-3", "coupled-4"]
MOVES = ("vesde", "subvpsde")  # away from their priors
SOME = [*PRESETS, "learned-2-full", "coupled-4"]
OTHERS = ["learned-1-full", "coupled-2"]


def slow(values: Iterable[Any]) -> list[Any]:
    """Parameters for a longer run."""
    return [pytest.param(v, marks=pytest.mark.slow) for v in values]


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    """Nothing here is differentiated."""
    with torch.no_grad():
        yield


@cache
def process_of(name: str) -> Process:
    """As in the other tests; "coupled-K" has a full D, and a Q that couples all variables."""
    if name.startswith("coupled-"):
        K = int(name[-1])
        drawn = draw(np.random.default_rng([7, K, 3]), K, noise="full", stiffness=25.0)
        return drawn.process(v0_variance=0.04)
    return made(name)


def model_for(name: str) -> ScoreModel:
    """The exact model of Gaussian data, cut off at a fiftieth of its width."""
    return gaussian(process_of(name), truncation=NoiseLevel(0.01))


# ---------------------------------------------------------------- closed forms


def carried(model: ScoreModel, solver: TableSolver, start: Array) -> Array:
    """x̂ of columns that begin as y_T, the first of them the mean: (1 + M,) from (K, 1 + M).

    Noise comes in as new columns; those without a mean only count by their square, and are put
    together where they are many.
    """
    way = way_of(model, solver)
    table = table_of(solver, way)
    window, signal = table.window, way.kernel.signal.numpy()
    K, white = signal.shape[-1], np.linalg.inv(way.kernel.cholesky.numpy())
    gain = SPREAD**2 * signal / (1 + SPREAD**2 * (signal**2).sum(-1, keepdims=True))

    def look(number: int, y: Array) -> Array:
        """x̂ and ε̂ below each other: (1 + K, 1 + M)."""
        w = white[number] @ y
        x = gain[number] @ w
        x[0] += CENTRE * (1 - gain[number] @ signal[number])
        return np.concatenate([x[None], w - np.outer(signal[number], x)])

    def added(state: Array, new: Tensor) -> Array:
        """y and the looks, with the columns of new noise in y."""
        more = np.zeros((len(state), new.shape[-1]))
        more[:K] = new.numpy()
        state = np.concatenate([state, more], 1)
        if state.shape[1] > 4 * len(state):
            rest = np.linalg.qr(state[:, 1:].T, mode="r").T
            state = np.concatenate([state[:, :1], rest], 1)
        return state

    state = start
    if table.start is not None:
        state = added(table.start.state.numpy() @ state, table.start.fresh)
    for i, step in enumerate(table.steps):
        seen = np.concatenate([look(i, state[:K]), state[K : K + (window - 1) * (1 + K)]])
        looks = seen.reshape(-1, 1 + K, seen.shape[1])
        y = np.einsum("jk,jm->km", step.data[: len(looks)].numpy(), looks[: len(step.data), 0])
        y = y + np.einsum(
            "jkl,jlm->km", step.noise[: len(looks)].numpy(), looks[: len(step.noise), 1:]
        )
        state = np.concatenate([y, seen])
        if step.fresh is not None:
            state = added(state, step.fresh)
    return look(len(table.steps), state[:K])[0]


def from_prior(process: Process) -> Array:
    """Mean and columns of the prior: (K, 1 + K)."""
    factor = torch.linalg.cholesky(process.prior_covariance).numpy()
    return np.concatenate([np.zeros((len(factor), 1)), factor], 1)


def from_truth(process: Process) -> Array:
    """Mean and columns of y_T itself: (K, 2 + K)."""
    kernel = process.transition(process.horizon)
    r = kernel.response.numpy()[:, None]
    return np.concatenate([CENTRE * r, kernel.cholesky.numpy(), SPREAD * r], 1)


def smooth(solver: TableSolver) -> TableSolver:
    """On a smooth grid: that of curvature is interpolated in a table of a few hundred times, and
    orders are asked of more steps than that."""
    return replace(solver, grid="information") if solver.grid == "curvature" else solver


def moments(model: ScoreModel, solver: TableSolver) -> tuple[float, float]:
    """How far mean and variance of the samples are from the truth, the variance relatively."""
    x = carried(model, smooth(solver), from_truth(model.process))
    return float(x[0]) - CENTRE, float((x[1:] ** 2).sum()) / truth_of(model) - 1


def truth_of(model: ScoreModel) -> float:
    """The variance of E[x | y_ε]."""
    noise = 1 / model.process.transition(model.truncation.time(model.process)).snr.item()
    return SPREAD**4 / (SPREAD**2 + noise)


def turned_flow(process: Process, s: float, t: float, spread: float, panels: int = 2000) -> Array:
    """The exact flow from s to t on data N(m, spread²), as a matrix for y − r m: (K, K).

    Magnus' method of order 4 on panels even in log s, at two numbers of panels, so that the error
    of order 4 can be taken away.
    """
    rough, fine = (_turns(process, s, t, spread, n) for n in (panels, 2 * panels))
    assert float(np.abs(fine - rough).max()) <= 1e-6
    turn = fine + (fine - rough) / 15
    late, early = (_factor(process, torch.tensor(at, dtype=F64), spread).numpy() for at in (s, t))
    return early @ turn @ np.linalg.inv(late)


def _factor(process: Process, s: Tensor, spread: float) -> Tensor:
    """F with F Fᵀ = spread² r rᵀ + Σ, positive on the diagonal."""
    kernel = process.transition(s)
    both = torch.cat([kernel.cholesky, spread * kernel.response.unsqueeze(-1)], -1)
    upper = torch.linalg.qr(both.mT)[1]
    return (upper * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-1)).mT


def _turns(process: Process, s: float, t: float, spread: float, panels: int) -> Array:
    h = (math.log(t) - math.log(s)) / panels
    place = math.log(s) + h * (torch.arange(panels, dtype=F64)[:, None] + 0.5)
    place = place + h * math.sqrt(3) / 6 * torch.tensor([-1.0, 1.0], dtype=F64)
    times = place.exp()
    F = _factor(process, times, spread)
    inside = torch.linalg.solve_triangular(F, process.drift(times) @ F, upper=False)
    noise = torch.linalg.solve_triangular(F, process.noise_factor(times), upper=False)
    upper = (inside + noise @ noise.mT / 2).triu(1)
    one, two = (times[..., None, None] * (upper - upper.mT)).unbind(1)
    steps = h / 2 * (one + two) + math.sqrt(3) / 12 * h**2 * (two @ one - one @ two)
    turn = np.eye(process.n_vars)
    for step in torch.linalg.matrix_exp(steps).numpy():
        turn = step @ turn
    return turn


@cache
def flow_map(name: str) -> Array:
    """The exact map from the prior's standard normal numbers to x̂: offset and row, (1 + K,)."""
    return flow_map_of(model_for(name))


def flow_map_of(model: ScoreModel) -> Array:
    process = model.process
    last = model.truncation.time(process)
    flow = turned_flow(process, process.horizon, last.item(), SPREAD)
    kernel = process.transition(last)
    C = SPREAD**2 * torch.outer(kernel.response, kernel.response) + kernel.covariance
    # ς²C⁻¹r by the formula of rank one, which needs no C⁻¹
    inverse = torch.linalg.solve_triangular(kernel.cholesky.mT, kernel.signal[:, None], upper=True)
    gain = SPREAD**2 * inverse[:, 0] / (1 + SPREAD**2 * kernel.snr)
    assert torch.allclose(C @ gain, SPREAD**2 * kernel.response, rtol=1e-6, atol=1e-9)
    row = gain.numpy() @ flow
    start = from_prior(process)
    start[:, 0] -= CENTRE * process.transition(process.horizon).response.numpy()
    x = row @ start
    x[0] += CENTRE
    return x


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["vpsde", "alda", "coupled-3"])
def test_the_closed_form_is_what_the_solver_does(name: str, solver: str) -> None:
    """`law` sends one sample along for every unit of noise, through the model."""
    model, made_solver = model_for(name), SOLVERS[solver](13)
    x = carried(model, made_solver, from_prior(model.process))
    mean, variance = law(model, made_solver)
    assert abs(float(x[0]) - mean) <= 1e-12
    assert abs(float((x[1:] ** 2).sum()) / variance - 1) <= 1e-11


@pytest.mark.parametrize("name", [*PRESETS, *LEARNED, *COUPLED])
def test_the_flow_has_the_right_law(name: str) -> None:
    """The truth that deterministic solvers are held against carries C_T to C_ε."""
    process = process_of(name)
    last = model_for(name).truncation.time(process)
    flow = turned_flow(process, process.horizon, last.item(), SPREAD)
    late, early = (
        _factor(process, torch.as_tensor(s, dtype=F64), SPREAD).numpy()
        for s in (process.horizon, last)
    )
    white = np.linalg.solve(early, flow @ late)
    assert np.abs(white @ white.T - np.eye(len(white))).max() <= 1e-9


# ---------------------------------------------------------------- to the law of the data


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", [*SOME, *slow(OTHERS)])
def test_samples_get_the_law_of_gaussian_data(name: str, solver: str) -> None:
    """At n and 2n steps; what is left after the error of their order is taken away is O(n⁻²).

    That is 0.6 % of the variance for DDIM on CLD with 100 steps, and less for all others.
    Euler–Maruyama begins with 800: the learned processes have drifts of size 100, and its steps
    must be shorter than that.
    """
    make, model = SOLVERS[solver], model_for(name)
    if name in MOVES and solver == "splitting-prior":
        text = message(lambda: moments(model, make(5)))
        says(text, "reference='prior'", repr(name), "reference='data'")
        return
    n = 800 if solver == "euler" else 100
    (mean, variance), (mean2, variance2) = (moments(model, make(k)) for k in (n, 2 * n))
    power = 2 ** ORDERS[solver]
    assert abs(variance2) <= max(0.6 * abs(variance), 1e-3)
    assert abs((power * variance2 - variance) / (power - 1)) <= 6e-3
    if solver.startswith(("euler", "splitting")):
        assert abs(2 * mean2 - mean) <= 1e-3
    else:
        assert abs(mean2) <= 1e-12


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda", "coupled-4"])
def test_samples_start_from_the_prior(name: str) -> None:
    """… and lose by it no more than its own gap: δ standard deviations are δ²/2 nats."""
    model, x = model_for(name), flow_map(name)
    process, factor = model.process, torch.linalg.cholesky(model.process.prior_covariance)
    gap = prior_gap(process.transition(process.horizon), factor, CENTRE**2 + SPREAD**2)
    assert abs(float(x[0]) - CENTRE) <= SPREAD * math.sqrt(2 * float(gap)) + 1e-9
    truth = truth_of(model)
    assert abs(float((x[1:] ** 2).sum()) / truth - 1) <= 2 * math.sqrt(float(gap)) + 1e-9


# ---------------------------------------------------------------- a single data point

POINT = -0.7


def point_model(name: str) -> ScoreModel:
    """Of data that are as good as one point: x̂ − x is less than 1e-8 of x̃ − x for σ ≥ 1e-5."""
    return ScoreModel(Zero(), process_of(name), Continuous(), data_mean=POINT, data_std=1e-9)


def walked(
    model: ScoreModel, solver: TableSolver, grid: Tensor, y: Tensor, noise: float = 1.0
) -> list[Tensor]:
    """States at all times of a grid that begins anywhere, from y: (B, K, 1) each."""
    way = Way.of(model, grid, (1,), solver.looks(grid))
    generator = torch.Generator().manual_seed(5)

    def new(purpose: str, step: int, rows: int) -> Tensor:
        return noise * torch.randn(len(y), rows, 1, dtype=F64, generator=generator)

    return [y, *(stop.y for stop in solver.prepare(way)(y, new))]


EXPONENTIALS = {
    f"{order}-{kind}-{eta:g}": Exponential(1, order=order, extrapolate=kind, stochasticity=eta)  # type: ignore[arg-type]
    for order in (1, 2, 3)
    for kind, eta in (("data", 0.0), ("data", 0.5), ("data", 1.0), ("noise", 0.0))
}
EXACTLY = ["vpsde", "vesde", "cld", "psld", "alda", "malda", "learned-2-full", *COUPLED]


@pytest.mark.parametrize("solver", EXPONENTIALS)
@pytest.mark.parametrize("name", EXACTLY)
def test_one_step_from_anywhere_lands_on_a_single_point(name: str, solver: str) -> None:
    """From y_s of the right law and from any other state; by the sample, and by the state itself.

    Two states on either side of r_s x land on either side of r_t x: halfway x̃ is x, without the
    network. Each is off by no more standard deviations than before, if no noise comes in.
    """
    model, process = point_model(name), process_of(name)
    end = process.time_of_noise(1e-5)
    kernel = process.transition(end)
    for s in process.horizon * torch.tensor([1.0, 0.7, 0.3, 0.1, 0.03], dtype=F64):
        at, noise = process.transition(s), torch.randn(8, process.n_vars, 1, dtype=F64)
        noise[4:] *= 30  # nothing that q(y_s | x) would give
        away = at.cholesky @ torch.cat([noise, -noise])
        states = POINT * at.response[:, None] + away
        grid = torch.stack([s, end])
        *_, last = walked(model, EXPONENTIALS[solver], grid, states)
        assert float((Way.of(model, grid, (1,)).look(1, last).x - POINT).abs().max()) <= 1e-6
        *_, last = walked(model, EXPONENTIALS[solver], grid, states, noise=0.0)
        white = torch.linalg.solve_triangular(kernel.cholesky, last, upper=False).squeeze(-1)
        found = white @ kernel.signal / kernel.snr - POINT  # x̃ − x
        assert float((found[:8] + found[8:]).abs().max()) <= 1e-6
        off = torch.linalg.vector_norm(noise, dim=(1, 2)).repeat(2)
        assert bool((found.abs() <= 1e-5 * (1 + 1e-6) * off + 1e-12).all())


@pytest.mark.parametrize("solver", [k for k in EXPONENTIALS if k.endswith("-0")] + ["heun"])
@pytest.mark.parametrize("name", EXACTLY)
def test_steps_are_the_exact_flow_of_a_single_point(name: str, solver: str) -> None:
    """y_t − r_t x = R_t R_s⁻¹(y_s − r_s x) at every time of any grid, in the metric of Σ_t.

    `Heun` predicts with this flow: its first look of a step is there.
    """
    model, process = point_model(name), process_of(name)
    T = process.horizon
    times = T * torch.tensor([1.0, 0.6, 0.55, 0.2, 0.1], dtype=F64)
    made_solver = Heun(1) if solver == "heun" else EXPONENTIALS[solver]
    y = process.transition(times[0]).cholesky @ torch.randn(4, process.n_vars, 1, dtype=F64)
    states = walked(model, made_solver, times, y)
    if solver == "heun":
        states = states[:2]
    start = states[0] - POINT * process.transition(times[0]).response[:, None]
    for s, state in zip(times[1:], states[1:], strict=False):
        kernel = process.transition(s)
        flow = torch.from_numpy(turned_flow(process, T, s.item(), 0.0, 1000))
        away = state - POINT * kernel.response[:, None] - flow @ start
        white = torch.linalg.solve_triangular(kernel.cholesky, away, upper=False)
        assert float(white.abs().max()) <= 1e-8


# ---------------------------------------------------------------- a mixture in the plane

MEANS = torch.tensor([[-2.0, 0.0], [1.5, 1.5], [1.5, -2.0]], dtype=F64)
WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=F64)
WIDTHS = torch.tensor([0.2, 0.4, 0.3], dtype=F64)
ENOUGH: dict[str, TableSolver] = {  # steps that make the bias small next to the samples' error
    "ancestral": Ancestral(300),
    "euler": EulerMaruyama(600),
    "splitting": Splitting(400),
    "splitting-prior": Splitting(400, reference="prior"),
    "corrected": PredictorCorrector(120),
    "corrected-often": PredictorCorrector(80, corrections=3, strength=1.0),
    "heun": Heun(50),
    "exponential-1": Exponential(250, order=1),
    "exponential-2": Exponential(100),
    "exponential-3": Exponential(100, order=3),
    "exponential-2-noise": Exponential(200, extrapolate="noise"),
    "exponential-3-noise": Exponential(200, order=3, extrapolate="noise"),
    "exponential-1-half": Exponential(250, order=1, stochasticity=0.5),
    "exponential-2-half": Exponential(100, stochasticity=0.5),
    "exponential-2-full": Exponential(100, stochasticity=1.0),
    "exponential-3-full": Exponential(100, order=3, stochasticity=1.0),
}
QUICK = ["vpsde", "alda", "learned-2-full"]  # in turn, one for each solver
SHORT = {(QUICK[i % 3], solver) for i, solver in enumerate(ENOUGH)}
# each solver on three others in turn, so that each process has several solvers
AMONG = [*PRESETS, *LEARNED, *COUPLED]
PAIRS = sorted(
    SHORT | {(AMONG[(i + 3 * j) % len(AMONG)], s) for i, s in enumerate(ENOUGH) for j in range(3)}
)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id="-".join(pair), marks=() if pair in SHORT else pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_samples_get_the_law_of_a_mixture(pair: tuple[str, str], seed: int) -> None:
    """Weights, means and covariances of three modes, each within four standard errors."""
    name, solver = pair
    if name in MOVES and solver == "splitting-prior":
        pytest.skip("has no stationary law")
    data = Mixture(WEIGHTS, MEANS, WIDTHS)
    model = model_of(data, process_of(name), Exact(data))
    n = 2000
    x = sample(model, n, ENOUGH[solver], seed=seed, shape=(2,), batch_size=n).to(F64)
    which = torch.cdist(x, MEANS).argmin(1)
    for k, (weight, width) in enumerate(zip(WEIGHTS.tolist(), WIDTHS.tolist(), strict=True)):
        mine = (x[which == k] - MEANS[k]) / width
        count = len(mine)
        assert abs(count / n - weight) <= 4 * math.sqrt(weight * (1 - weight) / n)
        assert float(mine.mean(0).abs().max()) <= 4 / math.sqrt(count)
        covariance = mine.mT @ mine / count
        assert float((covariance.diagonal() - 1).abs().max()) <= 4 * math.sqrt(2 / count)
        assert abs(float(covariance[0, 1])) <= 4 / math.sqrt(count)


# ---------------------------------------------------------------- looks, and how they are counted

FEW: dict[str, TableSolver] = {name: make(5) for name, make in SOLVERS.items()}
FEW |= {"corrected-4": PredictorCorrector(3, corrections=4), "heun-1": Heun(1)}


@pytest.mark.parametrize("solver", FEW)
def test_evaluations_are_counted(solver: str) -> None:
    """As many calls of the network as the solver says; and `within` goes as far as it can."""
    model, one = pixels_model(made("cld")), FEW[solver]
    network = model.network
    assert isinstance(network, Elementwise)
    sample(model, 3, one, shape=(2,), batch_size=2)
    assert network.seen == [2] * one.evaluations + [1] * one.evaluations
    for evaluations in range(1 + one.looks_per_step, 30):
        most = one.within(evaluations)
        assert type(most) is type(one) and most.grid == one.grid
        assert most.evaluations <= evaluations < most.evaluations + one.looks_per_step
        if evaluations == 17:
            network.seen.clear()
            sample(model, 1, most, shape=(2,))
            assert len(network.seen) == most.evaluations
    text = message(lambda: one.within(one.looks_per_step))
    says(text, f"evaluations={one.looks_per_step}", f"≥ {1 + one.looks_per_step}")


@pytest.mark.parametrize("solver", FEW)
def test_the_callback_sees_every_look(solver: str) -> None:
    model, one = pixels_model(made("cld")), FEW[solver]
    seen: list[SamplingStep] = []
    whole = sample(model, 3, one, shape=(2,), batch_size=2, callback=seen.append, raw=True)
    looks, count = one.looks(one.times(model, (2,))).tolist(), one.evaluations - 1
    assert [step.number for step in seen] == 2 * [*range(1, count + 1)]
    assert {step.total for step in seen} == {count}
    assert [step.s for step in seen] == 2 * looks[1:]
    assert [step.samples for step in seen] == count * [range(2)] + count * [range(2, 3)]
    for step in (seen[count - 1], seen[-1]):
        last = model.estimate(step.y, step.s).float()
        assert float((last - whole[step.samples.start : step.samples.stop]).abs().max()) <= 1e-6
    # each estimate is that of the state before it
    for before, after in pairwise(seen[:count]):
        assert float((model.estimate(before.y, before.s) - after.x).abs().max()) <= 1e-6


@pytest.mark.parametrize("solver", FEW)
def test_a_sample_does_not_know_its_batch(solver: str) -> None:
    model, one = pixels_model(made("alda")), FEW[solver]
    if solver == "euler":
        one = EulerMaruyama(80)
    whole, some, single = (
        sample(model, 7, one, seed=4, shape=(2, 3), batch_size=size, raw=True) for size in (7, 3, 1)
    )
    assert torch.equal(whole, some) and torch.equal(whole, single)
    assert torch.equal(whole[2:5], sample(model, 3, one, seed=4, shape=(2, 3), start=2, raw=True))
    other = sample(model, 7, one, seed=5, shape=(2, 3), raw=True)
    assert bool((whole != other).any(-1).any(-1).all())


# ---------------------------------------------------------------- too little memory


class Small(nn.Module):
    """A device that has room for a few examples only."""

    def __init__(self, room: int, after: int = 0) -> None:
        super().__init__()
        self.room, self.after = room, after
        self.asked: list[int] = []

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        self.asked.append(len(x))
        if len(x) > self.room and len(self.asked) > self.after:
            raise torch.OutOfMemoryError("no room for it\nand more lines")
        return 0.3 * torch.tanh(x)


@pytest.mark.parametrize("solver", ["ancestral", "splitting", "heun", "exponential-2-full"])
def test_a_batch_that_is_too_large_is_halved(solver: str) -> None:
    """10 → 5 → 2, from the batch on that failed; the samples are those of small batches."""
    network, one = Small(3), FEW[solver]
    model = ScoreModel(network, made("cld"), Discrete(16), data_std=0.6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = sample(model, 11, one, seed=2, shape=(2,), batch_size=10, raw=True)
    said = [str(warning.message) for warning in caught]
    assert [text for text in said if "memory" in text] == [
        f"not enough memory (no room for it); going on with {size} samples at a time"
        for size in (5, 2)
    ]
    looks = one.evaluations
    assert network.asked == [10, 5, *[2] * (5 * looks), *[1] * looks]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = sample(model, 11, one, seed=2, shape=(2,), batch_size=1, raw=True)
    assert torch.equal(found, small)


def test_memory_that_runs_out_on_the_way() -> None:
    """In the third look: the batch is begun again, and what was drawn is drawn again."""
    network = Small(2, after=2)
    model = ScoreModel(network, made("vpsde"), Discrete(16), data_std=0.6)
    with pytest.warns(UserWarning, match="going on with 2 samples"):
        found = sample(model, 4, Ancestral(5), shape=(2,), raw=True)
    assert network.asked == [4] * 3 + [2] * 12
    assert torch.equal(found, sample(model, 4, Ancestral(5), shape=(2,), batch_size=2, raw=True))


def test_a_single_sample_that_is_too_large() -> None:
    """Nothing is left to halve: the error is the device's own, and the model as it was."""
    network = Small(0)
    model = ScoreModel(network, made("vpsde"), Discrete(16), data_std=0.6).train()
    with (
        pytest.warns(UserWarning, match="going on with 1 samples"),
        pytest.raises(torch.OutOfMemoryError, match="no room"),
    ):
        sample(model, 3, Ancestral(5), shape=(2,))
    assert network.asked == [3, 1] and model.training and network.training


def test_solvers_know_their_mistakes() -> None:
    says(message(lambda: Splitting(5, reference="noise")), "reference='noise'", "'prior'")  # type: ignore[arg-type]
    says(message(lambda: PredictorCorrector(5, corrections=0)), "corrections=0", "≥ 1")
    says(message(lambda: PredictorCorrector(5, corrections=1.5)), "corrections=1.5")  # type: ignore[arg-type]
    for strength in (0.0, -1.0, math.inf, math.nan):
        says(message(lambda s=strength: PredictorCorrector(5, strength=s)), "strength=", "positive")
    says(message(lambda: Heun(0)), "steps=0", "≥ 1")
    text = message(lambda: Exponential(5, extrapolate="noise", stochasticity=0.5))
    says(text, "extrapolate='noise'", "stochasticity=0.5", "extrapolate='data'")
    says(message(lambda: Exponential(5, extrapolate="score")), "extrapolate='score'", "'noise'")  # type: ignore[arg-type]
    says(message(lambda: Exponential(5, stochasticity=math.nan)), "stochasticity=nan")
