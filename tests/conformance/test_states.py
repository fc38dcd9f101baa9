"""What happens to a process over its life: loaded, moved, learned out of its plan, put on edges."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Diffusion, FromRate, Linear, LinearSDE, Monotone
from tests.conformance.zoo import TURN

F64 = torch.float64
ONE = [[0.0, 0.0], [0.0, 1.0]]


class Wave(nn.Module):
    """A rate that swings faster and faster as its one parameter is learned."""

    def __init__(self, size: float = 5.0, lift: float = 1.5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=F64))
        self.size, self.lift = size, lift

    def forward(self, s: Tensor) -> Tensor:
        return self.size * (self.lift + torch.sin(self.w * s))

    def integral(self, s: Tensor) -> Tensor:
        return self.size * (self.lift * s + (1 - torch.cos(self.w * s)) / self.w)


class Halved(nn.Module):
    def __init__(self, wave: Wave) -> None:
        super().__init__()
        self.wave = wave

    def forward(self, s: Tensor) -> Tensor:
        return -0.5 * self.wave(s)


# ------------------------------------------------------------------ gradients on edges


@pytest.mark.parametrize("s, start", [(1.0, 0.25), (1.0, 0.0), (0.5, 0.25)])
def test_gradient_of_two_clocks_on_panel_edges(s: float, start: float) -> None:
    """dΦ/ds = AΦ and dΦ/dr = −ΦA hold where s or the start is the end of a panel."""
    process = Diffusion(TURN, ONE, rate_q=5.0, rate_d=Linear(0.1, 10.0))
    edges = process._edges.tolist()
    if s != 1.0:
        s, start = edges[len(edges) // 2], edges[len(edges) // 4]
    end = torch.tensor([s], dtype=F64, requires_grad=True)
    begin = torch.tensor([start], dtype=F64, requires_grad=True)
    Phi = process.transition(end, "state", start=begin).propagator
    at_end, at_begin = torch.autograd.grad(Phi.sum(), [end, begin])
    forward = (process.drift(end.detach()) @ Phi.detach()).sum()
    backward = -(Phi.detach() @ process.drift(begin.detach())).sum()
    assert torch.allclose(at_end.squeeze(), forward, rtol=1e-10)
    assert torch.allclose(at_begin.squeeze(), backward, rtol=1e-10)


def test_gradient_of_vesde_between_two_times() -> None:
    """d Var/ds is the diffusion, at the horizon too."""
    process = ornstein.vesde()
    s = torch.tensor([1.0], dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(process.transition(s, "state", start=0.2).covariance.sum(), s)
    assert torch.allclose(slope, process.diffusion(s.detach()).flatten(), rtol=1e-10)


# ------------------------------------------------------------------ learned out of the plan


def test_matrices_that_learn_to_swing_are_planned_anew() -> None:
    """After a step the panels may be too wide to see the drift: the kernel notices by itself."""
    wave = Wave()
    process = LinearSDE(Halved(wave), wave, [[1.0]])
    s = torch.tensor([0.3, 0.5, 1.0], dtype=F64)
    for w in (1.0, 30.0, 60.0):
        with torch.no_grad():
            wave.w.fill_(w)
            kernel = process.transition(s, "state")
            tau = wave.integral(s)
        assert torch.allclose(kernel.propagator.flatten(), torch.exp(-tau / 2), rtol=1e-9)
        assert torch.allclose(kernel.covariance.flatten(), -torch.expm1(-tau), rtol=1e-9)


def test_rates_that_learn_to_swing() -> None:
    """Two clocks, one of them learned: equal to a process built with that rate from the start."""
    wave = Wave()
    process = Diffusion(TURN, ONE, rate_q=3.0, rate_d=FromRate(wave))
    with torch.no_grad():
        wave.w.fill_(40.0)
        fresh = Diffusion(TURN, ONE, rate_q=3.0, rate_d=FromRate(copy.deepcopy(wave)))
        found, wanted = process.transition(0.7), fresh.transition(0.7)
    assert torch.allclose(found.propagator, wanted.propagator, rtol=1e-9)
    assert torch.allclose(found.cholesky, wanted.cholesky, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rate_q", [None, 3.0])
def test_a_rate_that_learns_to_be_negative_is_refused(rate_q: float | None) -> None:
    wave = Wave()
    process = Diffusion(TURN, ONE, rate=FromRate(wave), rate_q=rate_q)
    process.transition(0.5)
    wave.lift = -0.9
    with pytest.raises(ValueError, match=r"the rate is -.* expected a positive"):
        process.transition(0.5)


def test_a_rate_that_outgrows_its_quadrature_is_refused() -> None:
    wave = Wave()
    process = Diffusion(TURN, ONE, rate=FromRate(wave))
    with torch.no_grad():
        wave.w.fill_(300.0)
    with pytest.raises(ValueError, match="could not integrate"):
        process.transition(0.5)


def test_parameters_that_a_process_cannot_see_are_refused() -> None:
    hidden = torch.tensor(2.0, dtype=F64, requires_grad=True)
    with pytest.raises(ValueError, match=r"requires a gradient.*nn\.Module"):
        Diffusion(TURN, ONE, rate=lambda s: hidden * (1 + s))
    with pytest.raises(ValueError, match=r"requires a gradient.*nn\.Module"):
        LinearSDE(lambda s: -hidden * (1 + s), lambda s: 1 + s, [[1.0]])


def test_subvpsde_owns_its_schedule() -> None:
    schedule = Monotone()
    process = ornstein.subvpsde(rate=schedule)
    assert any(p is schedule.logits for p in process.parameters())
    with torch.no_grad():
        schedule.logits[0] = 3.0
    s = torch.tensor([0.5], dtype=F64)
    tau = schedule.integral(s)
    assert torch.allclose(process.transition(s).propagator.flatten(), torch.exp(-tau / 2))


# ------------------------------------------------------------------ loading


def test_loading_other_matrices_renews_everything() -> None:
    source, target = ornstein.cld(mass=1.0), ornstein.cld()
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.prior_covariance, source.prior_covariance)
    assert torch.equal(target.transition(0.3).cholesky, source.transition(0.3).cholesky)


@pytest.mark.parametrize(
    "source, target",
    [
        (lambda: ornstein.cld(rate=Linear(1.0, 5.0)), ornstein.cld),
        (lambda: ornstein.vesde(sigma_max=10.0), ornstein.vesde),
        (lambda: ornstein.vpsde(rate=3.0), lambda: ornstein.vpsde(rate=4.0)),
    ],
)
def test_loading_into_other_rates_is_refused(source, target) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuntimeError, match=r"has \(.*expected the same\. Build it with"):
        target().load_state_dict(source().state_dict())


def test_loading_after_materialising_from_meta() -> None:
    source = ornstein.learned(1, learn_rates="separate")
    with torch.no_grad():
        source.rate_q.logits.copy_(torch.linspace(-1, 1, 8, dtype=F64))
    target = ornstein.learned(1, learn_rates="separate", seed=5).to("meta").to_empty(device="cpu")
    target.load_state_dict(source.state_dict())
    found, wanted = target.transition(0.3).cholesky, source.transition(0.3).cholesky
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)  # other panels, other rounding


def test_a_float32_state_is_widened() -> None:
    source = ornstein.learned(1)
    state = {name: value.float() for name, value in source.state_dict().items()}
    state["rate_q.pinned"] = source.state_dict()["rate_q.pinned"]  # 0.1 is not a float32
    state["rate_d.pinned"] = source.state_dict()["rate_d.pinned"]
    target = ornstein.learned(1, seed=3)
    target.load_state_dict(state, assign=True)
    assert target.make_Q.raw.dtype == F64
    assert torch.allclose(target.Q, source.Q, rtol=1e-6)
    target.transition(0.3)


# ------------------------------------------------------------------ modes


def test_a_table_kept_in_inference_mode_meets_autograd() -> None:
    process = ornstein.cld()
    with torch.inference_mode():
        process.replan()
        process.transition(0.5)
    s = torch.tensor([0.5], dtype=F64, requires_grad=True)
    (slope,) = torch.autograd.grad(process.transition(s).logdet.sum(), s)
    with torch.no_grad():
        high, low = (process.transition(0.5 + h).logdet for h in (1e-5, -1e-5))
    assert torch.allclose(slope, (high - low) / 2e-5, rtol=1e-6)


def test_a_default_device_is_not_the_process_s_business() -> None:
    with torch.device("meta"):
        process = ornstein.learned(2, learn_rates="separate")
        preset = ornstein.alda()
    assert torch.equal(preset.transition(0.3).cholesky, ornstein.alda().transition(0.3).cholesky)
    process.transition(0.3)


# ------------------------------------------------------------------ the first instant, long clocks


def test_at_time_zero_there_are_samples_but_no_density() -> None:
    kernel = ornstein.cld().transition(torch.tensor([0.0, 0.5]))
    x = torch.randn(2, 3, dtype=F64)
    y, _ = kernel.sample(x)
    assert torch.equal(y[0, 0], x[0])
    for call in (
        lambda: kernel.score(y, x),
        lambda: kernel.log_prob(y, x),
        lambda: kernel.snr,
        lambda: kernel.logdet,
    ):
        with pytest.raises(ValueError, match=r"at s = 0 .* Expected s > 0"):
            call()


def test_short_steps_of_a_learned_clock_keep_their_digits() -> None:
    """∫ᵣˢ b over 1e-9, where the difference of two clocks has seven digits left."""
    process = ornstein.learned(0, learn_rates="shared")
    with torch.no_grad():
        process.rate_d.logits.copy_(torch.linspace(-1, 1, 8, dtype=F64))
    kernel = process.transition(0.5 + 1e-9, "state", start=0.5)
    step = (0.5 + 1e-9) - 0.5
    exact = (process.diffusion(0.5).squeeze() * step).sqrt()
    assert torch.allclose(kernel.cholesky.squeeze(), exact, rtol=1e-7)  # the rate moves by 1e-8
    between = process.rate_d.between(torch.tensor(0.5, dtype=F64), torch.tensor(0.75, dtype=F64))
    whole = process.rate_d.integral(torch.tensor([0.5, 0.75], dtype=F64)).diff()
    assert torch.allclose(between, whole.squeeze(), rtol=1e-13)


def test_a_very_long_clock() -> None:
    """A thousand panels: the prior is reached; past the limit the message says what to do."""
    process = ornstein.cld(rate=300.0)
    kernel = process.transition(1.0)
    assert torch.allclose(kernel.covariance, process.prior_covariance, rtol=1e-12)
    short = ornstein.cld(rate=300.0).transition(1 / 300.0).cholesky
    assert torch.allclose(short, ornstein.cld(rate=1.0).transition(1.0).cholesky, rtol=1e-12)
    with pytest.raises(ValueError, match=r"too stiff.*end its clock earlier"):
        ornstein.cld(rate=3000.0)


def test_an_empty_batch_has_a_gradient() -> None:
    process = ornstein.learned(1)
    kernel = process.transition(torch.zeros(0, dtype=F64))
    grads = torch.autograd.grad(kernel.cholesky.sum(), list(process.parameters()))
    assert all(not g.any() for g in grads)
