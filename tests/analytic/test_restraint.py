"""A learned clock that ran far past all data is slowed down, and is the same process afterwards."""

from __future__ import annotations

import copy
import math
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
        by = process.restrain()
        slower = process.D[-1, -1] / D[-1, -1]
        assert slower.item() == pytest.approx(diffusion.FASTEST / 2000.0, rel=1e-6)
        assert by == pytest.approx(slower.item(), rel=1e-12)
        torch.testing.assert_close(process.Q, slower * Q, rtol=1e-14, atol=0)
        torch.testing.assert_close(process.D, slower * D, rtol=1e-13, atol=1e-14 * D.max().item())
        for given, kernel in zip(("x", "state"), kernels, strict=True):
            again = process.transition(s / slower, given=given)
            near: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}  # ∫‖A‖ of a thousand, rounded
            torch.testing.assert_close(again.propagator, kernel.propagator, **near)
            torch.testing.assert_close(again.covariance, kernel.covariance, **near)
    assert stiffness(process) == pytest.approx(diffusion.FASTEST, rel=1e-6)
    assert process.restrain() == 1


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
        assert process.restrain() == 1
        assert all(torch.equal(before[name], v) for name, v in process.state_dict().items())


def test_rates_of_their_own() -> None:
    """Q and D are slowed down alike, by what both clocks come to."""
    rates: dict[str, Any] = {"rate": ornstein.Linear(0.1, 20.0), "learn_rates": "separate"}
    process = hurried(ornstein.learned(2, seed=1, **rates), 800.0)
    Q, D, before = process.Q.detach(), process.D.detach(), stiffness(process)
    assert process.restrain() < 1
    slower = diffusion.FASTEST / before
    torch.testing.assert_close(process.Q.detach(), slower * Q, rtol=1e-6, atol=0)
    torch.testing.assert_close(process.D.detach(), slower * D, rtol=1e-6, atol=0)
    assert stiffness(process) == pytest.approx(diffusion.FASTEST, rel=1e-6)


@pytest.mark.parametrize(("of_x", "of_v"), [(0.6, 380.0), (380.0, 0.3)], ids=["x", "v"])
def test_no_slower_than_all_variables_can_bear(of_x: float, of_v: float) -> None:
    """One is fast, and the other needs all its time to forget: left as it is, to the last bit.

    It would cost up to 0.09 bits/dim: v far from the prior, or x.
    """
    process = uneven(of_x, of_v)
    before = {name: value.clone() for name, value in process.state_dict().items()}
    assert stiffness(process) > 1.5 * diffusion.FASTEST and distance(process) < 1e-4
    assert process.restrain() == 1
    assert all(torch.equal(before[name], v) for name, v in process.state_dict().items())
    assert distance(process) < 1e-4
    assert distance(slowed(process)) > 1e-3  # what it would have been


def uneven(of_x: float, of_v: float) -> ornstein.Diffusion:
    """D of x and of v, and next to no coupling."""
    process = ornstein.learned(1)
    with torch.no_grad():
        process.make_Q.raw.copy_(torch.tensor([[0.0, 0.0], [0.02, 0.0]]))
        process.make_D.raw.copy_(torch.tensor([of_x, of_v]).sqrt())
    process.replan()
    return process


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("rates", ["no", "separate"])
def test_as_slow_as_all_variables_can_bear(rates: str) -> None:
    """Of two that are fast the slower one decides, and has as much left as it may, just."""
    process = uneven(2.0, 60.0)
    if rates == "separate":  # the same, on two clocks
        known: Any = ornstein.learned(1, rate=ornstein.Linear(0.1, 20.0), learn_rates=rates)
        known.load_state_dict({**known.state_dict(), **only_matrices(process)})
        process = known
        process.replan()
    before, D = stiffness(process), process.D.detach()
    by = process.restrain()
    # e^(−2 D τ) of x, whose D is the smallest, at the horizon, τ = 10.05
    least = -math.log(diffusion.SPENT) / (2 * 2.0 * 10.05)
    assert least * (1 - 1e-3) <= by < least * 1.02  # seven halvings of log 4.7
    assert diffusion.FASTEST < stiffness(process) == pytest.approx(by * before, rel=1e-6)
    torch.testing.assert_close(process.D.detach(), by * D, rtol=1e-12, atol=0)
    assert distance(process) < 1e-6
    assert process.restrain() == 1  # it is at the edge, and stays


def only_matrices(process: ornstein.Diffusion) -> dict[str, torch.Tensor]:
    """Q and D of a state."""
    return {n: v for n, v in process.state_dict().items() if n.startswith(("make_Q", "make_D"))}


def distance(process: ornstein.Diffusion) -> float:
    """KL(q(y_T|x) ‖ π) in nats for each number of x, of variance ¼."""
    with torch.no_grad():
        kernel = process.transition(process.horizon)
        S, r = torch.linalg.inv(process.prior_covariance), kernel.response
        square = kernel.covariance + 0.25 * torch.outer(r, r)
        logs = torch.logdet(kernel.covariance) + torch.logdet(S)
        return ((S @ square).trace() - process.n_vars - logs).item() / 2


def slowed(process: ornstein.Diffusion) -> ornstein.Diffusion:
    """A copy whose ∫‖A‖ is FASTEST."""
    return hurried(copy.deepcopy(process), diffusion.FASTEST)


@pytest.mark.parametrize("size", [1e154, math.inf, math.nan])
@pytest.mark.parametrize("n_aux", [0, 1])
def test_what_is_not_finite_is_left_to_others(n_aux: int, size: float) -> None:
    process = ornstein.learned(n_aux)
    with torch.no_grad():
        process.make_D.raw.fill_(size)
    assert process.restrain() == 1
    torch.testing.assert_close(
        process.make_D.raw.detach(), torch.full((n_aux + 1,), size, dtype=F64), equal_nan=True
    )


def test_an_error_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    process = hurried(ornstein.learned(1), 1000.0)
    before = {name: value.clone() for name, value in process.state_dict().items()}

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no kernel")

    monkeypatch.setattr(process, "transition", fails)
    assert process.restraint() == process.restrain() == 1  # what it would be can't be told
    assert all(torch.equal(before[name], v) for name, v in process.state_dict().items())


def test_one_that_can_still_be_solved_goes_on() -> None:
    """Past 4096, which no new plan may have, with the panels it has; and with the same ones."""
    process = uneven(0.6, 400.0)
    with torch.no_grad():
        plan = process.plan()
        process.make_D.raw.copy_(torch.tensor([0.6, 430.0]).sqrt())
        assert stiffness(process) > 4096
        assert process.restraint() == process.restrain() == 1  # v can bear it, and x can't
        assert torch.equal(process.plan(), plan)
        kernel = process.transition(0.5)
        assert bool(kernel.covariance.isfinite().all())
        again = ornstein.learned(1)  # from a checkpoint
        again.load_state_dict(process.state_dict())
        again.follow(plan)
        assert torch.equal(again.transition(0.5).covariance, kernel.covariance)
    with pytest.raises(ValueError, match="too stiff"):
        process.replan()


def test_what_nobody_could_open_is_not_kept(tmp_path: Path) -> None:
    """It is trained on with the panels it has, and ends where it is to be saved or looked at."""
    for look in (replace(QUIET, save_every=4), replace(QUIET, valid_every=4, save_every=2)):
        folder = tmp_path / str(look.save_every)
        options = replace(training(9), watch=look)
        with pytest.raises(Diverged) as caught:
            for step in fit(model(uneven(0.6, 400.0)), examples(), options, folder=folder):
                if step.number == 3:
                    with torch.no_grad():
                        for process in (step.model.process, step.averaged.process):
                            process.make_D.raw.copy_(torch.tensor([0.6, 430.0]).sqrt())
        text = str(caught.value)
        assert text.startswith("step 4: ") and "too stiff" in text
        last = "is that of step 2." if look.valid_every else "There is no checkpoint yet."
        assert text.endswith(last)


def test_what_can_not_be_copied_is_left_alone() -> None:
    """Held for gradients, as inside a step; released, it is slowed down."""
    process = hurried(ornstein.learned(1), 1000.0)
    process.hold()
    assert process.restraint() == 1
    process.release()
    assert process.restraint() < 1


@pytest.mark.parametrize("by", [0.0, -1.0, math.inf, math.nan])
def test_by_what_it_cannot_be(by: float) -> None:
    process = ornstein.learned(1)
    before = {name: value.clone() for name, value in process.state_dict().items()}
    with pytest.raises(ValueError, match=r"by=.*expected a finite number > 0"):
        process.restrain(by)
    assert all(torch.equal(before[name], v) for name, v in process.state_dict().items())


def test_by_what_another_copy_was() -> None:
    """Every process follows the first, and so does a running mean, which is not trained."""
    first = hurried(ornstein.learned(2, seed=3), 1500.0)
    second = copy.deepcopy(first).requires_grad_(False)
    assert second.restrain() == 1
    by = first.restrain()
    assert second.restrain(by) == by == pytest.approx(diffusion.FASTEST / 1500.0, rel=1e-6)
    for kernel in ("Q", "D"):
        assert torch.equal(getattr(first, kernel), getattr(second, kernel))


@pytest.mark.parametrize("what", ["make_Q", "make_D"])
def test_what_is_not_trained_stays(what: str) -> None:
    process = hurried(ornstein.learned(1, learn_v0_variance=True), 1000.0)
    getattr(process, what).raw.requires_grad_(False)
    assert process.learned and process.restrain() == 1
    getattr(process, what).raw.requires_grad_(True)
    assert process.restrain() < 1


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


def training(steps: int, ema: float = 0.9) -> Training:
    """Rates at which noise alone moves Q and D far in a hundred steps."""
    optimiser = Optimiser(process_lr=0.1, warmup=0)
    return Training(steps=steps, batch=8, watch=QUIET, ema=ema, optimiser=optimiser)


def examples() -> torch.Tensor:
    return 1 + 2 * torch.randn(64, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("soon")
def test_training_keeps_a_clock_from_running_away() -> None:
    with pytest.warns(UserWarning, match=f"step {LOOK}: the clock of 'learned-1'"):
        steps = fit(model(), examples(), training(LOOK + 5))
        seen = [stiffness(step.model.process) for step in steps]
    assert min(seen[:LOOK]) > 1.5 * diffusion.FASTEST
    assert max(seen[LOOK:]) < 1.5 * diffusion.FASTEST
    seen = []
    with pytest.warns(UserWarning, match="slowed down") as told:
        for step in fit(model(), examples(), training(2 * LOOK + 60)):
            if step.number == LOOK + 50:
                hurried(step.model.process, 300.0)
            seen.append(stiffness(step.model.process))
            last = step.averaged
    for look in (LOOK, 2 * LOOK):  # slowed down twice
        assert seen[look] < 1.5 * diffusion.FASTEST < seen[look - 1]
    assert sum("slowed down" in str(one.message) for one in told) == 1  # and said once
    assert stiffness(last.process) < 3 * diffusion.FASTEST  # a mean of steps before and after
    assert bool(ornstein.elbo(last, examples(), random=0).nats.isfinite().all())


@pytest.mark.usefixtures("soon")
@pytest.mark.filterwarnings("ignore:step .*slowed down")
@pytest.mark.parametrize(("before", "after"), [(110.0, 110.0), (600.0, 128.0)])
def test_the_mean_is_slowed_down_by_its_own_clock(before: float, after: float) -> None:
    """However slow it is when the process, which is slowed down to less than half, is looked at."""
    for step in fit(model(), examples(), training(LOOK + 1, ema=0.999)):
        if step.number == LOOK:
            assert stiffness(step.model.process) > 2 * diffusion.FASTEST
            hurried(step.averaged.process, before)
    assert stiffness(step.model.process) == pytest.approx(diffusion.FASTEST, rel=0.02)  # a step on
    assert stiffness(step.averaged.process) == pytest.approx(after, rel=0.02)


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
