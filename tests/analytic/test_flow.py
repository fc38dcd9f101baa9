"""`ProbabilityFlow`: exact where data is Gaussian, of its method's order elsewhere, for every K."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Continuous, Exponential, NoiseLevel, ProbabilityFlow, Process, ScoreModel
from ornstein.sampling import Solver, Way, flow
from ornstein.sampling.flow import METHODS
from ornstein.sampling.frames import Frames
from tests.analytic.test_bound_mixture import Residual, ResidualJoint, mixture
from tests.analytic.test_exponential import PROCESSES

F64 = torch.float64
MEAN, STD = 0.3, 0.5
LEVEL = 5e-3  # where the models are truncated


class Zero(nn.Module):
    """Leaves the Gaussian answer as it is."""

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Known(nn.Module):
    """N(MEAN, STD²) for a model that takes its data for N(1, 0.03²): there is much to solve."""

    mean, std = 1.0, 0.03

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.kind = nn.Parameter(torch.zeros((), dtype=F64))  # so that samples are float64

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        self.calls += 1
        sigma = (-logsnr / 2).exp().unsqueeze(-1)
        wide = (self.std**2 + sigma**2).sqrt()
        x_noisy = self.mean + wide * x
        noise = sigma * (x_noisy - MEAN) / (STD**2 + sigma**2)
        return (noise - sigma * x / wide) * wide / self.std


def gaussian(process: Process) -> ScoreModel:
    """The exact model of N(MEAN, STD²), whose network adds nothing."""
    cut = NoiseLevel(LEVEL)
    return ScoreModel(Zero(), process, Continuous(), data_mean=MEAN, data_std=STD, truncation=cut)


def misjudged(process: Process) -> ScoreModel:
    """The exact model of the same data, whose network has all to add."""
    cut = NoiseLevel(LEVEL)
    return ScoreModel(
        Known(),
        process,
        Continuous(),
        data_mean=Known.mean,
        data_std=Known.std,
        truncation=cut,
    )


def went(model: ScoreModel, solver: Solver, y: Tensor) -> Tensor:
    """x from y_T: (B, d)."""
    grid = solver.times(model, y.shape[2:])
    way = Way.of(model, grid, y.shape[2:], solver.looks(grid))
    *_, stop = solver.prepare(way)(y, lambda purpose, step, rows: torch.zeros(len(y), rows, 1))
    return way.look(len(way.times) - 1, stop.y).x


def mapped(model: ScoreModel, solver: Solver) -> Tensor:
    """A solver as a map from the prior's noise to x, affine here: offset and row, (1 + K,)."""
    K = model.process.n_vars
    prior = torch.linalg.cholesky(model.process.prior_covariance)
    start = torch.cat([torch.zeros(1, K, dtype=F64), prior.mT]).unsqueeze(-1)
    x = went(model, solver, start)[:, 0]
    return torch.cat([x[:1], x[1:] - x[0]])


def geometric(model: ScoreModel, steps: int) -> tuple[float, ...]:
    """Times even in log s, so that all steps are alike."""
    last, first = float(model.truncation.time(model.process)), model.process.horizon
    return tuple(first * (last / first) ** (i / steps) for i in range(steps + 1))


# ---------------------------------------------------------------- coordinates


@pytest.mark.parametrize("name", PROCESSES)
def test_coordinates(name: str) -> None:
    """M V solves the Gaussian flow, d(MV)/ds = (A + ½GGᵀC⁻¹) M V, and MVVᵀMᵀ = C.

    The derivative by differences of fourth order, in log s.
    """
    model, process = gaussian(PROCESSES[name]), PROCESSES[name]
    frames = Frames(model, (1,), model.truncation.time(process))
    h = 1e-4
    for part in (0.02, 0.3, 0.6, 0.98):
        place = frames.first + part * (frames.last - frames.first)
        near = [frames.at(place + i * h).state[0] for i in (-2, -1, 1, 2)]
        slope = (near[0] - 8 * near[1] + 8 * near[2] - near[3]) / (12 * h)
        s = torch.tensor(place, dtype=F64).exp()
        kernel, state = process.transition(s), frames.at(place).state[0]
        r = kernel.response.unsqueeze(-1)
        C = kernel.covariance + STD**2 * r @ r.mT
        size = C.diagonal().sqrt()
        assert ((state @ state.mT - C) / size / size[:, None]).abs().max() < 1e-11
        field = process.drift(s) + torch.linalg.solve(C, process.diffusion(s)).mT / 2
        wanted = s * field @ state
        assert ((slope - wanted) / size[:, None]).abs().max() < 1e-6 * (1 + s * field.norm())


@pytest.mark.parametrize("name", PROCESSES)
def test_states_come_back(name: str) -> None:
    model, process = gaussian(PROCESSES[name]), PROCESSES[name]
    frames = Frames(model, (3,), model.truncation.time(process))
    kernel = process.transition(model.truncation.time(process))
    x, noise = torch.randn(4, 3, dtype=F64), torch.randn(4, process.n_vars, 3, dtype=F64)
    y, _ = kernel.sample(x, noise=noise)
    frame = frames.at(frames.first)
    u = frames.into(y, frame)
    # to the rounding of the largest entries, of which the others are differences
    assert (frames.state(u, frame) - y).abs().max() < 1e-12 * y.abs().max()
    # y − r m has lost the digits of the small entries of L
    torch.testing.assert_close(frames.drawn(x, noise, frame), u, rtol=1e-9, atol=1e-9)
    expected = model.estimate(y, model.truncation.time(process)).flatten(1)
    torch.testing.assert_close(frames.estimate(u, frame), expected, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- Gaussian data


@cache
def truth(name: str) -> Tensor:
    """The exact map of Gaussian data, by one step; checked below against another solver."""
    return mapped(gaussian(PROCESSES[name]), ProbabilityFlow(1))


@cache
def fine(name: str) -> Tensor:
    """The same map, by many small steps of a network that has all to add."""
    model = misjudged(PROCESSES[name])
    return mapped(model, ProbabilityFlow(grid=geometric(model, 160), method="dopri8"))


@pytest.mark.parametrize("name", PROCESSES)
def test_one_step_is_exact_for_gaussian_data(name: str) -> None:
    """Whatever the method: the map of many steps of another solver, which converges to it."""
    model = gaussian(PROCESSES[name])
    for method in METHODS:
        found = mapped(model, ProbabilityFlow(2, method=method))  # type: ignore[arg-type]
        torch.testing.assert_close(found, truth(name), rtol=1e-10, atol=1e-10)
    fine, finer = (mapped(model, Exponential(n, order=3)) for n in (160, 640))
    off = (fine - truth(name)).abs().max()
    assert (finer - truth(name)).abs().max() < min(5e-5, off / 3)


@pytest.mark.parametrize(
    ("method", "order", "steps"),
    [
        ("euler", 1, 400),
        ("midpoint", 2, 200),
        pytest.param("heun2", 2, 200, marks=pytest.mark.long),
        pytest.param("heun3", 3, 100, marks=pytest.mark.long),
        ("bosh3", 3, 100),
        ("rk4", 4, 100),
        ("dopri5", 5, 80),  # past the first steps, and far from rounding (1e-13) on any processor
    ],
)
@pytest.mark.parametrize("name", ["vpsde", "cld", "alda"])
def test_order_of_convergence(name: str, method: str, order: int, steps: int) -> None:
    """K = 1, 2, 3: the error falls with the power of the method's order.

    The power that two halvings show has an error in proportion to the step: it is taken off. The
    map of fine steps, which has the roundings of these, is what they go to; it is the exact one.
    """
    model, errors = misjudged(PROCESSES[name]), []
    limit = fine(name)
    assert torch.linalg.vector_norm(limit - truth(name)) < 5e-12  # about 1e-12, all rounding
    for n in (steps // 2, steps, 2 * steps):
        solver = ProbabilityFlow(grid=geometric(model, n), method=method)  # type: ignore[arg-type]
        errors.append(torch.linalg.vector_norm(mapped(model, solver) - limit))
    coarser, finer = (math.log2(a / b) for a, b in itertools.pairwise(errors))
    assert order - 0.2 < 2 * finer - coarser < order + 0.4  # no slower, and not of the next order


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda"])
def test_the_eighth_order(name: str) -> None:
    """Of dopri8, seen between the first steps that resolve anything and rounding."""
    model = misjudged(PROCESSES[name])
    errors = [
        torch.linalg.vector_norm(
            mapped(model, ProbabilityFlow(grid=geometric(model, n), method="dopri8")) - truth(name)
        )
        for n in (20, 40)
    ]
    assert math.log2(errors[0] / errors[1]) > 7


# ---------------------------------------------------------------- steps that are chosen


@pytest.mark.parametrize(
    "name",
    [
        "vpsde",
        "cld",
        "learned-2",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("vesde", "malda")),
    ],
)
def test_smaller_tolerances_smaller_errors(name: str) -> None:
    """In proportion, within a factor of 30, and with steps that only rise."""
    model = misjudged(PROCESSES[name])
    counts = []
    for tolerance in (1e-3, 1e-5, 1e-7):
        solver = ProbabilityFlow(rtol=tolerance, atol=tolerance)
        error = (mapped(model, solver) - truth(name)).abs().max() / STD
        assert error < 30 * tolerance
        counts.append(len(solver.times(model, (1,))) - 1)
    assert counts == sorted(counts) and counts[-1] > counts[0]


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
def test_a_mixture_goes_where_fine_steps_go(parametrisation: str) -> None:
    """Two dimensions, three modes, CLD; both parametrisations."""
    data, process = mixture(2), PROCESSES["cld"]
    network = Residual(data) if parametrisation == "channel" else ResidualJoint(data, process)
    mean, std = data.moments()
    model = ScoreModel(
        network,
        process,
        Continuous(),
        parametrisation,  # type: ignore[arg-type]
        data_mean=mean,
        data_std=std,
        truncation=NoiseLevel(0.02),
    )
    y = torch.linalg.cholesky(process.prior_covariance) @ torch.randn(8, 2, 2, dtype=F64)
    fine = went(model, ProbabilityFlow(30, method="dopri8"), y)
    assert (went(model, ProbabilityFlow(rtol=1e-6, atol=1e-6), y) - fine).abs().max() < 1e-4
    assert fine.std() > 0.5  # it has gone somewhere


def test_one_step_per_state_is_enough_for_gaussian_data() -> None:
    """The error is zero: the first step that is tried, and then the rest of the way."""
    for process in PROCESSES.values():
        assert len(ProbabilityFlow().times(gaussian(process), (1,))) <= 5


# ---------------------------------------------------------------- as a solver


@pytest.mark.parametrize("method", METHODS)
def test_evaluations_are_counted(method: str) -> None:
    model = misjudged(PROCESSES["cld"])
    assert isinstance(model.network, Known)
    solver = ProbabilityFlow(7, method=method)  # type: ignore[arg-type]
    ornstein.sample(model, 3, solver, shape=(2,))
    assert model.network.calls == solver.evaluations
    for budget in (20, 50):
        limited = solver.within(budget)
        assert limited.evaluations is not None
        assert budget - limited.looks_per_step < limited.evaluations <= budget


def test_chosen_steps_are_counted_too() -> None:
    model = misjudged(PROCESSES["cld"])
    assert isinstance(model.network, Known)
    solver = ProbabilityFlow()
    assert solver.evaluations is None
    grid = solver.times(model, (2,))
    model.network.calls = 0
    went(model, ProbabilityFlow(grid=tuple(grid.tolist())), torch.randn(3, 2, 2, dtype=F64))
    assert model.network.calls == 6 * (len(grid) - 1) + 2
    assert solver.within(100).evaluations == 98


@pytest.mark.parametrize("solver", [ProbabilityFlow(), ProbabilityFlow(5, method="rk4")])
def test_a_sample_does_not_depend_on_its_batch(solver: ProbabilityFlow) -> None:
    """To the last bit, for a network that acts on each number by itself."""
    model = misjudged(PROCESSES["malda"])
    whole = ornstein.sample(model, 7, solver, shape=(3,), seed=5)
    assert whole.dtype == F64
    part = ornstein.sample(model, 3, solver, shape=(3,), seed=5, start=3, batch_size=2)
    assert torch.equal(part, whole[3:6])


def test_samples_have_the_law_of_the_data() -> None:
    """4,000 samples: three standard errors."""
    model = misjudged(PROCESSES["cld"])
    x = ornstein.sample(model, 4000, ProbabilityFlow(), shape=(1,))
    assert abs(float(x.mean()) - MEAN) < 3 * STD / math.sqrt(4000)
    assert abs(float(x.std()) - STD) < 3 * STD / math.sqrt(2 * 4000)


def test_a_network_that_fails_is_named() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return torch.where(logsnr[:, None] > 0, math.nan, x)

    model = ScoreModel(Bad(), PROCESSES["vpsde"], Continuous())
    for solver in (ProbabilityFlow(), ProbabilityFlow(5)):
        with pytest.raises(ValueError, match="not finite at s = 0"):
            ornstein.sample(model, 2, solver, shape=(1,))


def test_tolerances_below_rounding_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network whose output is rounded has no derivative to follow."""
    monkeypatch.setattr(flow, "MOST_STEPS", 100)

    class Rounded(nn.Module):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return (x.sin() * 50).round() / 50

    model = ScoreModel(Rounded(), PROCESSES["vpsde"], Continuous())
    with pytest.raises(ValueError, match="can't be solved with rtol=1e-11"):
        ProbabilityFlow(rtol=1e-11, atol=1e-11).times(model, (4,))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "rk45"}, "method='rk45'; expected one of euler, "),
        ({"method": "euler"}, "does not estimate its error; expected steps="),
        ({"rtol": -1e-3}, "rtol=-0.001; expected a positive number"),
        ({"atol": 0}, "atol=0; expected a positive number"),
        ({"atol": math.nan}, "atol=nan"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 3, "grid": "even"}, "grid='even'"),
    ],
)
def test_mistakes(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProbabilityFlow(**options)  # type: ignore[arg-type]
