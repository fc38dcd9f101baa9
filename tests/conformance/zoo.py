"""The processes that every test of `test_process` runs on: list a new one here and it is tested."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
    Process,
)

Factory = Callable[[], Process]

TURN = [[0.0, -1.0], [1.0, 0.0]]
TWO_NOISES = [[0.5, 0.2], [0.2, 0.7]]
FULL_S = [[1.5, 0.3, -0.2], [0.3, 0.8, 0.1], [-0.2, 0.1, 2.0]]
THREE_Q = [[0.0, -1.1, 0.4], [1.1, 0.0, -0.8], [-0.4, 0.8, 0.0]]
THREE_D = [[0.9, 0.1, -0.3], [0.1, 0.6, 0.2], [-0.3, 0.2, 0.8]]


def moved(process: Process, seed: int = 1, size: float = 0.3) -> Process:
    """The same process with its parameters moved away from where they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in process.parameters():
            step = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(size * step)
    process.replan()
    return process


def turning_and_slowing() -> LinearSDE:
    """Two variables whose drift and noise both change with time; no stationary law."""

    def drift(s: Tensor) -> Tensor:
        one = torch.ones_like(s)
        rows = [-1 - 2 * s, 2 + torch.sin(3 * s), -1 - s**2, -2 * one + s]
        return torch.stack(rows, -1).reshape(*s.shape, 2, 2)

    def diffusion(s: Tensor) -> Tensor:
        rows = [1 + s, 0.3 * s, 0.3 * s, 2 - torch.cos(2 * s)]
        return torch.stack(rows, -1).reshape(*s.shape, 2, 2)

    return LinearSDE(
        drift, diffusion, [[1.0, 0.1], [0.1, 0.8]], v0_variance=0.3, v0_coupling=0.2, name="turning"
    )


class Gain(nn.Module):
    """A drift with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, s: Tensor) -> Tensor:
        return -self.gain * (1 + s)


def linear_with_parameter() -> LinearSDE:
    """One variable, drift learned by a module of the user's own."""
    return LinearSDE(Gain(), lambda s: 1 + s**2, 1.0, name="learned drift")


ZOO: dict[str, Factory] = {
    **ornstein.PRESETS,
    "cld-underdamped": lambda: ornstein.cld(damping=0.3),
    "cld-overdamped": lambda: ornstein.cld(damping=5.0),
    "learned-0": lambda: moved(ornstein.learned(0)),
    "learned-1": lambda: moved(ornstein.learned(1)),
    "learned-2": lambda: moved(ornstein.learned(2)),
    "learned-3": lambda: moved(ornstein.learned(3)),
    "learned-1-full": lambda: moved(ornstein.learned(1, full=True)),
    "learned-2-full": lambda: moved(ornstein.learned(2, full=True)),
    "learned-3-full": lambda: moved(ornstein.learned(3, full=True), size=0.15),
    "learned-shared-rate": lambda: moved(ornstein.learned(1, learn_rates="shared")),
    "learned-separate-rates": lambda: moved(ornstein.learned(2, learn_rates="separate")),
    "learned-v0": lambda: moved(
        ornstein.learned(2, learn_v0_variance=True, learn_v0_coupling=True, v0_coupling=[0.3, -0.2])
    ),
    "learned-full-S": lambda: moved(ornstein.learned(2, full=True, S=FULL_S)),
    "rate-cosine": lambda: Diffusion(TURN, TWO_NOISES, rate=Cosine()),
    "rate-constant": lambda: Diffusion(TURN, TWO_NOISES, rate=Constant(6.0)),
    "rate-number": lambda: Diffusion(TURN, TWO_NOISES, rate=6.0),
    "rate-monotone": lambda: moved(Diffusion(TURN, TWO_NOISES, rate=Monotone(Linear(0.1, 12.0)))),
    "rate-from-rate": lambda: Diffusion(
        TURN, TWO_NOISES, rate=FromRate(lambda s: 2 + 3 * torch.sin(2 * s) ** 2)
    ),
    "rate-from-integral": lambda: Diffusion(
        TURN, TWO_NOISES, rate=FromIntegral(lambda s: 4 * torch.expm1(s))
    ),
    "linear-against-constant": lambda: Diffusion(
        TURN, TWO_NOISES, rate_q=Linear(0.1, 10.0), rate_d=Constant(4.0)
    ),
    "constant-against-linear": lambda: Diffusion(
        TURN, [[0.0, 0.0], [0.0, 1.0]], rate_q=Constant(5.0), rate_d=Linear(0.1, 10.0)
    ),
    "cosine-against-linear": lambda: Diffusion(
        THREE_Q, THREE_D, FULL_S, rate_q=Cosine(4.0), rate_d=Linear(0.1, 12.0)
    ),
    "full-S": lambda: Diffusion(THREE_Q, THREE_D, FULL_S, v0_variance=[[0.2, 0.05], [0.05, 0.1]]),
    "coupled-v0": lambda: Diffusion(THREE_Q, THREE_D, v0_coupling=[0.5, -0.4]),
    "horizon": lambda: Diffusion(TURN, TWO_NOISES, rate=Linear(0.1, 5.0, horizon=3.0), horizon=3.0),
    "horizon-two-clocks": lambda: Diffusion(
        TURN,
        TWO_NOISES,
        rate_q=Constant(2.0, horizon=3.0),
        rate_d=Linear(0.1, 5.0, horizon=3.0),
        horizon=3.0,
    ),
    "linear-sde": turning_and_slowing,
    "linear-sde-learned": linear_with_parameter,
}
