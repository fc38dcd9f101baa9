"""What is known about the noise before any network is asked.

Given x, y_s = r x + L ε. Whitened, L⁻¹y = a x + ε, and only the part along â = a/‖a‖ knows x: it is
x̃ = x + σ ε_∥ with σ = 1/‖a‖ (`View`). For Gaussian data N(m, ς²) the best guess of ε_∥ is
g = σ(x̃ − m)/(ς² + σ²) (`GaussianAnswer`), in ratios that can't overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ornstein.matrices import as_float64
from ornstein.schedules import Float64Module
from ornstein.transition import LEAST_SNR, Transition

LARGEST = 1e30  # standard error that float32 should see; beyond it x is gone from any type


class Moments(Float64Module):
    """Mean and standard deviation of the data: numbers, or tensors that broadcast to it."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor | float, std: Tensor | float) -> None:
        super().__init__()
        self.register_buffer("mean", as_float64(mean, "data_mean"))
        self.register_buffer("std", as_float64(std, "data_std"))
        if not bool((self.std > 0).all()):
            raise ValueError(
                f"data_std has an entry {self.std.min().item():g}; expected the data's standard "
                "deviation, a positive number, or one per channel. likelihood.moments(x) gives it."
            )
        self.scale = self._scale()  # on the host, since a proposal for times asks for it

    def _scale(self) -> float:
        return self.std.square().mean().sqrt().item()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if not self.std.is_meta:
            self.scale = self._scale()


@dataclass(frozen=True)
class View:
    """What a kernel given x says about x: (B,) and (B, K), float64."""

    direction: Tensor  # (B, K) â, the part of the whitened noise that hides x
    sigma: Tensor  # (B,) standard error of x
    logsnr: Tensor  # (B,)

    def expand(self, size: int) -> View:
        """One view for a whole batch."""
        K = self.direction.shape[-1]
        return View(
            self.direction.expand(size, K), self.sigma.expand(size), self.logsnr.expand(size)
        )

    @staticmethod
    def of(kernel: Transition) -> View:
        """From a kernel given x."""
        signal = kernel.signal
        snr = signal.square().sum(-1).clamp(min=LEAST_SNR)
        # by its largest entry first: the derivative of SNR^(-1/2) is SNR^(-3/2), which overflows
        largest = signal.detach().abs().amax(-1).clamp(min=LEAST_SNR**0.5)
        part = signal / largest.unsqueeze(-1)
        root = part.square().sum(-1).clamp(min=1.0).rsqrt()
        return View(part * root.unsqueeze(-1), root / largest, snr.log())


@dataclass(frozen=True)
class GaussianAnswer:
    """What is right for Gaussian data N(m, ς²), in ratios that can't overflow.

    p = ς²/(ς²+σ²) and q = 1 − p are taken in float64 and broadcast to the data: (B, *moments).
    """

    p: Tensor
    q: Tensor
    gain: Tensor  # σ/(ς²+σ²)
    unit: Tensor  # 1/√(ς²+σ²)
    mean: Tensor
    std: Tensor

    @staticmethod
    def of(moments: Moments, sigma: Tensor, like: Tensor) -> GaussianAnswer:
        """At standard errors sigma: (B,), for data like this."""
        width, std = over(sigma.clamp(max=LARGEST), like, torch.float64), moments.std
        unit = torch.hypot(width, std).reciprocal()
        p, q = (std * unit) ** 2, (width * unit) ** 2
        parts = (p, q, width * unit * unit, unit, moments.mean, std)
        return GaussianAnswer(*(t.to(like.dtype) for t in parts))

    def noise(self, x_noisy: Tensor) -> Tensor:
        """g = E[ε_∥ | x̃] = σ(x̃ − m)/(ς²+σ²)."""
        return self.gain * (x_noisy - self.mean)

    def data(self, x_noisy: Tensor) -> Tensor:
        """E[x | x̃] = x̃ − σ g, without cancellation where there is much noise."""
        return self.p * x_noisy + self.q * self.mean

    def error(self, x: Tensor, noise: Tensor) -> Tensor:
        """ε_∥ − g at x̃ = x + σ ε_∥, without cancellation."""
        return self.p * noise - self.gain * (x - self.mean)

    def square(self, x: Tensor) -> Tensor:
        """E(ε_∥ − g)² over the noise."""
        return self.p * (self.p + self.q * ((x - self.mean) / self.std) ** 2)

    def size(self, x: Tensor) -> Tensor:
        """E g² over the noise."""
        return self.q * (self.q + self.p * ((x - self.mean) / self.std) ** 2)

    def slope(self, x: Tensor) -> Tensor:
        """σ dg/dx̃."""
        return self.q.expand_as(x)

    def normalised(self, x_noisy: Tensor) -> Tensor:
        """(x̃ − m)/√(ς²+σ²)."""
        return self.unit * (x_noisy - self.mean)

    @property
    def scale(self) -> Tensor:
        """ς/√(ς²+σ²), the deviation of ε_∥ given x̃."""
        return self.std * self.unit  # not √p, which float32 has lost long before


@dataclass(frozen=True)
class NoAnswer:
    """The same without preconditioning: nothing is known beforehand."""

    def noise(self, x_noisy: Tensor) -> Tensor:
        return torch.zeros_like(x_noisy)

    def data(self, x_noisy: Tensor) -> Tensor:
        return x_noisy

    def error(self, x: Tensor, noise: Tensor) -> Tensor:
        return noise

    def square(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def size(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def slope(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


# ---------------------------------------------------------------- (B,) and (B, K) over the data


def over(value: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(B,) or (B, K) as something that multiplies a tensor of the data's size, in its type."""
    return value.to(dtype or like.dtype).reshape(*value.shape, *[1] * (like.dim() - value.dim()))


def expand(vector: Tensor, data: Tensor) -> Tensor:
    """(B, K) times (B, *shape): (B, K, *shape)."""
    return over(vector, data.unsqueeze(1)) * data.unsqueeze(1)


def contract(vector: Tensor, state: Tensor) -> Tensor:
    """Σ_k vector[:, k] state[:, k]: (B, *shape)."""
    return (over(vector, state) * state).sum(1)
