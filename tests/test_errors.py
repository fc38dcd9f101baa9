"""A user's mistake is a ValueError that says what was given, what is expected and how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ornstein
from ornstein import (
    Constant,
    Cosine,
    Diffusion,
    FromIntegral,
    FromRate,
    Linear,
    LinearSDE,
    Monotone,
)
from ornstein.diagnostics import diagnose

TURN = [[0.0, -1.0], [1.0, 0.0]]
ONE = [[1.0, 0.0], [0.0, 1.0]]
LAST = [[0.0, 0.0], [0.0, 1.0]]
NAN = float("nan")


def message(function: Callable[[], Any]) -> str:
    """What the ValueError says."""
    with pytest.raises(ValueError) as caught:
        function()
    return str(caught.value)


def says(text: str, *words: str) -> None:
    """All the words are there, and what is expected is among them."""
    assert "xpected" in text, text
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


# ------------------------------------------------------------------ matrices


def test_Q_not_skew() -> None:
    text = message(lambda: Diffusion([[0.0, 1.0], [1.0, 0.0]], ONE))
    says(text, "Q is not skew-symmetric", "reaches 2", "[[0.0, 1.0], [1.0, 0.0]]", "Q̃ − Q̃ᵀ")
    says(message(lambda: Diffusion([[0.5, -1.0], [1.0, 0.0]], ONE)), "skew", "reaches 1")


def test_D_indefinite() -> None:
    text = message(lambda: Diffusion(TURN, [[1.0, 0.0], [0.0, -0.5]]))
    says(text, "D has the eigenvalue -0.5", "positive semi-definite", "M Mᵀ")
    # positive on its diagonal, negative in another direction
    says(message(lambda: Diffusion(TURN, [[1.0, 2.0], [2.0, 1.0]])), "D has the eigenvalue -1")


def test_D_not_symmetric() -> None:
    text = message(lambda: Diffusion(TURN, [[1.0, 0.3], [0.0, 1.0]]))
    says(text, "D is not symmetric", "reaches 0.3", "(D + Dᵀ)/2")


def test_S_singular_or_worse() -> None:
    says(message(lambda: Diffusion(TURN, ONE, LAST)), "S has the eigenvalue 0", "full rank")
    text = message(lambda: Diffusion(TURN, ONE, [[1.0, 0.0], [0.0, -1.0]]))
    says(text, "S has the eigenvalue -1", "positive definite")
    says(message(lambda: Diffusion(TURN, ONE, [[1.0, 0.5], [0.0, 1.0]])), "S is not symmetric")


def test_shapes_that_differ() -> None:
    says(message(lambda: Diffusion(TURN, np.eye(3))), "Q is 2×2", "D is 3×3")
    says(message(lambda: Diffusion(TURN, ONE, np.eye(3))), "Q is 2×2", "S is 3×3")
    text = message(lambda: Diffusion(np.zeros((2, 3)), ONE))
    says(text, "Q has shape (2, 3)", "(K, K)")
    says(message(lambda: Diffusion(TURN, [1.0, 1.0])), "D has shape (2,)", "(K, K)")
    says(message(lambda: Diffusion(np.zeros((0, 0)), np.zeros((0, 0)))), "Q has shape (0, 0)")


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_not_a_number(bad: float) -> None:
    says(message(lambda: Diffusion([[0.0, bad], [-bad, 0.0]], ONE)), "Q has an entry", "finite")
    says(message(lambda: Diffusion(TURN, [[bad, 0.0], [0.0, 1.0]])), "D has an entry", "finite")
    says(message(lambda: Diffusion(TURN, ONE, [[bad, 0.0], [0.0, 1.0]])), "S has an entry")
    says(message(lambda: Diffusion(TURN, ONE, v0_variance=bad)), "v0_variance", "finite")
    says(message(lambda: Diffusion(TURN, ONE, v0_coupling=bad)), "v0_coupling", "finite")
    says(message(lambda: ornstein.cld(mass=bad)), "mass", "positive, finite")


def test_ragged_lists_and_strings() -> None:
    says(message(lambda: Diffusion([[0.0, -1.0], [1.0]], ONE)), "Q was given as list", "numbers")
    says(message(lambda: Diffusion("turn", ONE)), "Q was given as str", "numbers")
    says(message(lambda: Diffusion(TURN, [["a", "b"], ["c", "d"]])), "D was given as list")
    says(message(lambda: Diffusion(TURN, None)), "D was given as NoneType")  # type: ignore[arg-type]
    says(message(lambda: ornstein.cld(mass="heavy")), "mass", "'heavy'")  # type: ignore[arg-type]


def test_complex_matrices() -> None:
    text = message(lambda: Diffusion(np.array(TURN) * 1j, ONE))
    says(text, "Q")


# ------------------------------------------------------------------ stationary laws


def test_a_frozen_variable() -> None:
    text = message(lambda: Diffusion(np.zeros((2, 2)), [[1.0, 0.0], [0.0, 0.0]]))
    says(text, "variable 1 is frozen", "row 1 of Q + D is zero", "couple the variable")
    Q = [[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    text = message(lambda: Diffusion(Q, np.diag([0.0, 1.0, 0.0])))
    says(text, "variable 2 is frozen")


def test_an_undamped_block_that_turns() -> None:
    """Variables 1 and 2 turn about each other for ever; no row of Q + D is zero."""
    Q = [[0.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]]
    text = message(lambda: Diffusion(Q, np.diag([1.0, 0.0, 0.0])))
    says(text, "never damped", "add noise in D")
    # the same, hidden in other coordinates
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    turned = rotation @ np.array(Q) @ rotation.T
    D = rotation @ np.diag([1.0, 0.0, 0.0]) @ rotation.T
    text = message(lambda: Diffusion((turned - turned.T) / 2, (D + D.T) / 2))
    says(text, "never damped")


def test_a_combination_that_is_frozen() -> None:
    """D of rank one and Q = 0: the direction (1, −1) never moves though no row is zero."""
    text = message(lambda: Diffusion(np.zeros((2, 2)), [[1.0, 1.0], [1.0, 1.0]]))
    says(text, "never damped", "0.707")


# ------------------------------------------------------------------ rates


def test_negative_rates() -> None:
    says(message(lambda: Diffusion(TURN, ONE, rate=-1.0)), "-1", "positive")
    says(message(lambda: Diffusion(TURN, ONE, rate=0.0)), "0", "positive")
    says(message(lambda: Constant(-2.0)), "constant rate", "-2", "positive")
    says(message(lambda: Linear(-0.1, 20.0)), "start of a linear rate", "-0.1", "positive")
    says(message(lambda: Linear(0.1, -20.0)), "end of a linear rate", "-20", "positive")
    says(message(lambda: Cosine(total=-1.0)), "total", "-1", "positive")
    text = message(lambda: Diffusion(TURN, ONE, rate=lambda s: 0.499 - s))
    says(text, "the rate is -", "at s = 0.5", "positive", "floor")
    text = message(lambda: FromIntegral(lambda s: s * (1 - s)))
    says(text, "the rate is", "at s = 0.5", "positive")
    says(message(lambda: ornstein.vpsde(rate=lambda s: s * NAN)), "the rate is nan", "finite")
    says(message(lambda: Linear(NAN, 1.0)), "start of a linear rate", "nan")


def test_rates_of_other_kinds() -> None:
    text = message(lambda: Diffusion(TURN, ONE, rate="linear"))  # type: ignore[arg-type]
    says(text, "given as str", "ornstein.Linear(0.1, 20.0)", "positive number")
    text = message(lambda: FromRate(lambda s: s[:3]))
    says(text, "shape (257,) to (3,)", "same shape")
    text = message(lambda: FromRate(lambda s: (s > 0.3217).double() + 0.5))
    says(text, "could not integrate", "Raise nodes=", "FromIntegral")
    text = message(lambda: FromIntegral(lambda s: s + 0.25))
    says(text, "τ(0) = 0.25", "Subtract")
    says(message(lambda: Monotone(degree=0)), "degree=0", "≥ 1")


def test_a_rate_that_is_no_function_of_tensors() -> None:
    def scalar(s: Any) -> float:
        return 1.0 if s < 0.5 else 2.0

    says(message(lambda: FromRate(scalar)), "rate function", "tensor of times")


def test_horizons_that_differ() -> None:
    text = message(lambda: Diffusion(TURN, ONE, rate=Linear(0.1, 20.0, horizon=2.0)))
    says(text, "runs to 2", "the process to 1", "horizon=")
    says(message(lambda: ornstein.vpsde(horizon=-1.0)), "horizon", "-1", "positive")
    says(message(lambda: Linear(horizon=0.0)), "horizon", "positive")


# ------------------------------------------------------------------ presets and v₀


def test_constants_of_presets() -> None:
    says(message(lambda: ornstein.cld(mass=-1.0)), "mass", "-1", "positive")
    says(message(lambda: ornstein.cld(damping=0.0)), "damping", "0", "positive")
    says(message(lambda: ornstein.alda(L=0.0)), "L was given as 0", "positive")
    says(message(lambda: ornstein.alda(xi=-1.0)), "xi", "positive")
    says(message(lambda: ornstein.malda(gamma=-1.0)), "gamma", "positive")
    says(message(lambda: ornstein.psld(nu=-1.0)), "nu", "positive")
    text = message(lambda: ornstein.vesde(sigma_min=2.0, sigma_max=1.0))
    says(text, "sigma_min=2", "sigma_max=1", "sigma_min < sigma_max")
    says(message(lambda: ornstein.learned(n_aux=-1)), "n_aux=-1", "≥ 0")
    says(message(lambda: ornstein.learned(n_aux=1.5)), "n_aux=1.5")  # type: ignore[arg-type]
    text = message(lambda: ornstein.learned(learn_rates="both"))  # type: ignore[arg-type]
    says(text, "learn_rates='both'", "'separate'")


def test_law_of_v0() -> None:
    says(message(lambda: Diffusion(TURN, ONE, v0_variance=-0.1)), "v0_variance", "-0.1")
    text = message(lambda: Diffusion(TURN, ONE, v0_variance=[0.1, 0.2]))
    says(text, "v0_variance has shape (2, 2)", "(1, 1)")
    text = message(lambda: Diffusion(TURN, ONE, v0_coupling=[0.1, 0.2]))
    says(text, "v0_coupling has shape (2,)", "(1,)")
    text = message(lambda: ornstein.learned(1, v0_variance=0.0, learn_v0_variance=True))
    says(text + " expected", "must start positive", "v0_variance=0.04")


# ------------------------------------------------------------------ general processes


def test_general_processes() -> None:
    def two(s: torch.Tensor) -> torch.Tensor:
        return -torch.eye(2, dtype=torch.float64).expand(*s.shape, 2, 2)

    def noise(s: torch.Tensor) -> torch.Tensor:
        return torch.eye(2, dtype=torch.float64).expand(*s.shape, 2, 2)

    says(message(lambda: LinearSDE(two, noise, np.eye(3))), "drift maps", "(65, 3, 3)")
    says(message(lambda: LinearSDE(two, two, np.eye(2))), "diffusion(0)", "eigenvalue -1")
    says(message(lambda: LinearSDE(two, noise, [[1.0, 0.0], [0.0, 0.0]])), "prior_covariance")
    says(message(lambda: LinearSDE(two, lambda s: NAN * noise(s), np.eye(2))), "diffusion", "NaN")
    says(message(lambda: LinearSDE(lambda s: two(s[:, 0]), noise, np.eye(2))), "drift failed")
    says(message(lambda: LinearSDE(lambda s: 1.0, noise, np.eye(2))), "drift")  # type: ignore
    says(message(lambda: LinearSDE(3.0, noise, np.eye(2))), "drift")  # type: ignore[arg-type]

    def kinked(s: torch.Tensor) -> torch.Tensor:
        return two(s) * (1 + 5 * (s > 0.3217).double())[..., None, None]

    text = message(lambda: LinearSDE(kinked, noise, np.eye(2)))
    says(text, "did not converge", "smooth")


# ------------------------------------------------------------------ times


@pytest.mark.parametrize("name", ["cld", "vesde"])
def test_times_outside_the_horizon(name: str) -> None:
    process = ornstein.PRESETS[name]()
    for bad, shown in ((1.5, "1.5"), (-0.1, "-0.1"), (NAN, "nan"), (float("inf"), "inf")):
        text = message(lambda bad=bad: process.transition(bad))
        says(text, f"s = {shown}", "0 ≤ s ≤ 1", "horizon=")
        batch = torch.tensor([0.5, bad, 0.1], dtype=torch.float64)
        says(message(lambda batch=batch: process.transition(batch)), f"s = {shown}")
    says(message(lambda: process.transition(0.5, "state", start=-0.1)), "start = -0.1", "0 ≤ start")


def test_times_of_other_kinds() -> None:
    process = ornstein.cld()
    says(message(lambda: process.transition("soon")), "s", "times")  # type: ignore[arg-type]
    says(message(lambda: process.transition(None)), "s", "times")  # type: ignore[arg-type]


def test_matrices_outside_the_horizon() -> None:
    for process in (ornstein.cld(), ornstein.vesde()):
        for matrix in (process.drift, process.diffusion):
            says(message(lambda f=matrix: f(5.0)), "s = 5", "0 ≤ s ≤ 1", "horizon=")
            says(message(lambda f=matrix: f(NAN)), "s = nan", "0 ≤ s ≤ 1")


def test_unknown_given() -> None:
    process = ornstein.cld()
    text = message(lambda: process.transition(0.5, given="y"))  # type: ignore[arg-type]
    says(text, "given='y'", "'x'", "'state'")


def test_starts() -> None:
    process = ornstein.cld()
    text = message(lambda: process.transition(0.5, "x", start=0.1))
    says(text, "given='x' with start=0.1", "given='state'")
    says(message(lambda: process.transition(0.2, "state", start=0.5)), "0.5", "start ≤ s")
    start, s = torch.tensor([0.1, 0.6]), torch.tensor([0.5, 0.5])
    says(message(lambda: process.transition(s, "state", start=start)), "0.6", "start ≤ s")
    text = message(lambda: process.transition(s, "state", start=torch.zeros(3)))
    says(text, "start has shape (3,)", "s (2,)", "equal shapes")


# ------------------------------------------------------------------ data


def test_batches_that_do_not_fit() -> None:
    kernel = ornstein.cld().transition(torch.tensor([0.1, 0.5, 0.9]))
    x, y = torch.zeros(2, 4), torch.zeros(2, 2, 4)
    for call in (
        lambda: kernel.sample(x),
        lambda: kernel.mean(x),
        lambda: kernel.score(y, x),
        lambda: kernel.log_prob(y, x),
    ):
        says(message(call), "(2, 4)", "(3,)", "one time per example")
    x = torch.zeros(3, 4)
    text = message(lambda: kernel.score(torch.zeros(3, 3, 4), x))
    says(text, "y has shape (3, 3, 4)", "(3, 2, 4)")
    says(message(lambda: kernel.log_prob(torch.zeros(3, 4), x)), "y has shape (3, 4)")
    text = message(lambda: kernel.sample(x, noise=torch.zeros(3, 4)))
    says(text, "noise has shape (3, 4)", "(3, 2, 4)")
    says(message(lambda: kernel.sample(torch.zeros(()))), "shape ()")


def test_noise_that_does_not_fit() -> None:
    kernel = ornstein.cld().transition(torch.tensor([0.1, 0.5, 0.9]))
    text = message(lambda: kernel.noise_to_score(torch.zeros(3, 3, 4)))
    says(text, "(3, 3, 4)")


def test_states_that_do_not_fit() -> None:
    kernel = ornstein.cld().transition(0.5, "state")
    text = message(lambda: kernel.sample(torch.zeros(3, 4)))
    says(text, "(3, 4)", "(batch, 2, *data)", "given='x'")
    says(message(lambda: kernel.sample(torch.zeros(3))), "(3,)", "(batch, 2, *data)")
    for name in ("signal", "snr"):
        text = message(lambda name=name: getattr(kernel, name))
        says(text + " expected", "given the state", "given='x'")


def test_times_with_axes_are_not_for_sampling() -> None:
    kernel = ornstein.cld().transition(torch.full((2, 3), 0.5))
    says(message(lambda: kernel.sample(torch.zeros(2, 4))), "(2, 3)", "Flatten the times")


def test_integer_data() -> None:
    kernel = ornstein.cld().transition(0.5)
    pixels = torch.zeros(2, 4, dtype=torch.uint8)
    says(message(lambda: kernel.sample(pixels)), "torch.uint8", "floating point", "Scale")
    says(message(lambda: kernel.mean(pixels.long())), "torch.int64", "floating point")
    y = torch.zeros(2, 2, 4)
    says(message(lambda: kernel.score(y, pixels)), "torch.uint8", "floating point")
    says(message(lambda: kernel.log_prob(y, pixels)), "torch.uint8", "floating point")
    says(message(lambda: kernel.score(y.long(), torch.zeros(2, 4))), "torch.int64")


def test_data_that_is_no_tensor() -> None:
    kernel = ornstein.cld().transition(0.5)
    says(message(lambda: kernel.sample([[0.0, 1.0]])), "list", "tensor")  # type: ignore[arg-type]
    text = message(lambda: kernel.sample(np.zeros((2, 4))))  # type: ignore[arg-type]
    says(text, "ndarray", "tensor")


def test_a_parameter_that_is_not_a_number() -> None:
    process = ornstein.learned(1)
    with torch.no_grad():
        next(process.parameters()).fill_(NAN)
    says(message(lambda: process.transition(0.5)), "learned-1", "not a number", "NaN")


def test_diagnosis_of_bad_data() -> None:
    says(message(lambda: diagnose(ornstein.cld(), data_variance=-1.0)), "data_variance=-1.0")
    says(message(lambda: diagnose(ornstein.cld(), data_mean=NAN)), "data_mean=nan", "finite")
