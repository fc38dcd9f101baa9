"""A learned clock that ran far past all data is slowed down, and is the same process afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ornstein
from ornstein import Optimiser, ScoreModel, Training, Watch, diffusion, fit
from ornstein.networks import MLP
from ornstein.processes import STARTS
from ornstein.training import Diverged

F64 = torch.float64
QUIET = Watch(log_every=1000, valid_every=0, sample_every=0, save_minutes=1e6)
LOOK = ornstein.training.running.LOOK


def stiffness(process: Any) -> float:
    """∫‖A‖ over the horizon, by quadrature."""
    s = torch.linspace(0, process.horizon, 20001, dtype=F64)
    with torch.no_grad():
        return torch.trapezoid(torch.linalg.matrix_norm(process.drift(s)), s).item()


def hurried(process: ornstein.Diffusion, to: float) -> ornstein.Diffusion:
    """A learned process with Q and D multiplied, so that ∫‖A‖ is this."""
    by = to / stiffness(process)
    with torch.no_grad():
        process.make_Q.raw.mul_(by)
        process.make_D.raw.mul_(by**0.5)
    process.replan()
    return process


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
@pytest.mark.parametrize("start", STARTS)
def test_it_is_the_same_process_on_a_slower_clock(start: str, full: bool) -> None:
    first = ornstein.processes.PRESETS[start](rate=ornstein.Constant(2.0))
    process = hurried(ornstein.learned(start=first, full=full), 2000.0)
    Q, D = process.Q.detach(), process.D.detach()
    s = torch.tensor([1e-5, 1e-3, 0.01, 0.05], dtype=F64)
    with torch.no_grad():
        kernels = [process.transition(s, given=given) for given in ("x", "state")]
        assert process.restrain()
        slower = process.D[-1, -1] / D[-1, -1]
        assert slower.item() == pytest.approx(diffusion.FASTEST / 2000.0, rel=1e-6)
        torch.testing.assert_close(process.Q, slower * Q, rtol=1e-14, atol=0)
        torch.testing.assert_close(process.D, slower * D, rtol=1e-13, atol=1e-14 * D.max().item())
        for given, kernel in zip(("x", "state"), kernels, strict=True):
            again = process.transition(s / slower, given=given)
            near: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}  # ∫‖A‖ of a thousand, rounded
            torch.testing.assert_close(again.propagator, kernel.propagator, **near)
            torch.testing.assert_close(again.covariance, kernel.covariance, **near)
    assert stiffness(process) == pytest.approx(diffusion.FASTEST, rel=1e-6)
    assert not process.restrain()


def test_what_is_slow_enough_is_left_alone() -> None:
    """Every preset, learned ones as they begin, and what has matrices that are not learned."""
    quick = ornstein.Constant(1e3)
    fixed = ornstein.Diffusion([[0.0, -1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]], rate=quick)
    still = ornstein.learned(0)
    with torch.no_grad():
        still.make_D.raw.zero_()
    for process in (
        fixed,
        still,
        *(make() for make in ornstein.processes.PRESETS.values()),
        *(ornstein.learned(start=ornstein.processes.PRESETS[name]()) for name in STARTS),
        *(ornstein.learned(n, full=True) for n in (0, 1, 2, 4)),
    ):
        before = {name: value.clone() for name, value in process.state_dict().items()}
        assert not process.restrain()
        assert all(torch.equal(before[name], v) for name, v in process.state_dict().items())


def test_rates_of_their_own() -> None:
    """Q and D are slowed down alike, by what both clocks come to."""
    rates: dict[str, Any] = {"rate": ornstein.Linear(0.1, 20.0), "learn_rates": "separate"}
    process = hurried(ornstein.learned(2, seed=1, **rates), 800.0)
    Q, D, before = process.Q.detach(), process.D.detach(), stiffness(process)
    assert process.restrain()
    slower = diffusion.FASTEST / before
    torch.testing.assert_close(process.Q.detach(), slower * Q, rtol=1e-6, atol=0)
    torch.testing.assert_close(process.D.detach(), slower * D, rtol=1e-6, atol=0)
    assert stiffness(process) == pytest.approx(diffusion.FASTEST, rel=1e-6)


def test_no_slower_than_x_can_bear() -> None:
    """v alone is fast, and x needs all its time: left as it is, to the last bit."""
    process = ornstein.learned(1)
    with torch.no_grad():
        process.make_Q.raw.copy_(torch.tensor([[0.0, 0.0], [0.3, 0.0]]))
        process.make_D.raw.copy_(torch.tensor([0.6, 80.0]).sqrt())
    process.replan()
    before = {name: value.clone() for name, value in process.state_dict().items()}
    at_end = process.transition(1.0).snr.item()
    assert stiffness(process) > 1.5 * diffusion.FASTEST and at_end < 1e-4
    assert not process.restrain()
    assert all(torch.equal(before[name], v) for name, v in process.state_dict().items())
    assert process.transition(1.0).snr.item() == at_end


@pytest.mark.parametrize("what", ["make_Q", "make_D"])
def test_what_is_not_trained_stays(what: str) -> None:
    process = hurried(ornstein.learned(1, learn_v0_variance=True), 1000.0)
    getattr(process, what).raw.requires_grad_(False)
    assert process.learned and not process.restrain()
    getattr(process, what).raw.requires_grad_(True)
    assert process.restrain()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower limit, whose processes are solved in less time."""
    monkeypatch.setattr(diffusion, "FASTEST", 128.0)


def model(process: ornstein.Diffusion | None = None) -> ScoreModel:
    """A joint model with a fast clock: 4096 is the most that can be solved, and is slow to be."""
    torch.manual_seed(5)
    process = hurried(ornstein.learned(1), 300.0) if process is None else process
    network = MLP((3,), process.n_vars, 0, 16, 1)
    return ScoreModel(network, process, ornstein.Continuous(), "joint", 1.0, 2.0)


def training(steps: int) -> Training:
    """Rates at which noise alone moves Q and D far in a hundred steps."""
    optimiser = Optimiser(process_lr=0.1, warmup=0)
    return Training(steps=steps, batch=8, watch=QUIET, ema=0.9, optimiser=optimiser)


def examples() -> torch.Tensor:
    return 1 + 2 * torch.randn(64, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("soon")
def test_training_keeps_a_clock_from_running_away() -> None:
    with pytest.warns(UserWarning, match=f"step {LOOK}: the clock of 'learned-1'"):
        steps = fit(model(), examples(), training(LOOK + 5))
        seen = [stiffness(step.model.process) for step in steps]
    assert min(seen[:LOOK]) > 1.5 * diffusion.FASTEST
    assert max(seen[LOOK:]) < 1.5 * diffusion.FASTEST
    with pytest.warns(UserWarning, match="slowed down"):
        last = [step.averaged for step in fit(model(), examples(), training(LOOK + 60))][-1]
    assert stiffness(last.process) < 3 * diffusion.FASTEST  # a mean of steps before and after
    assert bool(ornstein.elbo(last, examples(), random=0).nats.isfinite().all())


def test_a_clock_that_ran_away_between_two_looks_is_said_to_be() -> None:
    """What was saved before is still there; see the tests of runs."""
    process = hurried(ornstein.learned(start=ornstein.psld()), 3900.0)
    faster = replace(training(50).optimiser, process_lr=1.0)
    with pytest.raises(Diverged, match="too stiff"):
        for _ in fit(model(process), examples(), replace(training(50), optimiser=faster)):
            pass


@pytest.mark.usefixtures("soon")
@pytest.mark.filterwarnings("ignore:step .*slowed down")
def test_a_run_that_stops_there_goes_on_alike(tmp_path: Path) -> None:
    """Interrupted right before the look that slows the clock down, and right after."""
    whole = [step.loss for step in fit(model(), examples(), training(LOOK + 6))]
    for stop in (LOOK, LOOK + 1):
        folder = tmp_path / str(stop)
        found: list[float] = []
        for goal in (stop, LOOK + 6):
            steps = fit(model(), examples(), training(LOOK + 6), folder=folder)
            for step in steps:
                found.append(step.loss)
                if step.number == goal:
                    steps.close()
                    break
        assert found == whole
