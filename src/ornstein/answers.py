"""What is known about the noise before any network is asked.

Given x, y_s = r x + L ε. Whitened, L⁻¹y = a x + ε, and only the part along â = a/‖a‖ knows x: it is
x̃ = x + σ ε_∥ with σ = 1/‖a‖ (`View`). For Gaussian data N(m, ς²) the best guess of ε_∥ is
g = σ(x̃ − m)/(ς² + σ²) (`GaussianAnswer`), in ratios that can't overflow.

A joint model guesses all of ε. Its bound weighs an error e by ‖e‖²_C with C = L⁻¹GGᵀL⁻ᵀ, of as low
a rank as the noise: in CLD and ALDA one number out of K is trained, and the others are whatever
they happen to be. What such a guess says about ε_∥ is read in the same metric, as ρ = mᵀe with
m = Câ/(âᵀCâ): then â ρ is the nearest to e of all that x could explain, and

    ‖e‖²_C = (âᵀCâ) ρ² + ‖e − â ρ‖²_C,

of which the last is an error in noise that was known. Read along â itself, e would be mixed with
what nobody trained. (Where âᵀCâ is next to nothing beside tr C, x stands still, no part of a guess
is trained, and m goes over to â.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ornstein.linalg import lower_solve
from ornstein.matrices import as_float64
from ornstein.schedules import Float64Module
from ornstein.transition import LEAST_SNR, Transition

LARGEST = 1e30  # standard error that float32 should see; beyond it x is gone from any type
LEAST_SHARE = 1e-3  # âᵀCâ/tr C, below which x stands still, and nothing is trained to be read


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
    reading: Tensor | None = None  # (B, K) m, by which a guess of all noise is read; m·â = 1

    def expand(self, size: int) -> View:
        """One view for a whole batch."""
        K, numbers = self.direction.shape[-1], self.logsnr.dim()
        return self._each(lambda v: v.expand(size, K) if v.dim() > numbers else v.expand(size))

    def part(self, some: slice) -> View:
        """The views of some of the times."""
        return self._each(lambda value: value[some])

    def read(self, guess: Tensor) -> Tensor:
        """What a guess of the noise in all variables, (B, K, *shape), says of ε_∥: (B, *shape)."""
        if self.reading is None:
            raise ValueError(
                "this view was made from a kernel alone, and a joint model is to be read; expected "
                "one that knows the noise. Make it by View.of(kernel, process.noise_factor(s))."
            )
        return contract(self.reading, guess)

    def with_reading(self, W: Tensor) -> View:
        """With m = Câ/(âᵀCâ), C = WWᵀ; â where C has next to nothing to say along it."""
        seen = W.mT @ self.direction.unsqueeze(-1)  # (B, R, 1)
        size, whole = seen.square().sum((-2, -1)), W.square().sum((-2, -1))
        share = size / (LEAST_SHARE * whole.clamp(min=LEAST_SNR))
        trained = (W @ seen).squeeze(-1) / size.clamp(min=LEAST_SNR).unsqueeze(-1)
        m = torch.lerp(self.direction, trained, share.clamp(max=1.0).unsqueeze(-1))
        return replace(self, reading=m)

    def _each(self, change: Callable[[Tensor], Tensor]) -> View:
        reading = None if self.reading is None else change(self.reading)
        return View(change(self.direction), change(self.sigma), change(self.logsnr), reading)

    @staticmethod
    def of(kernel: Transition, noise: Tensor | None = None) -> View:
        """From a kernel given x, and G(s), (B, K, R), where a joint model is to be read."""
        signal = kernel.signal
        snr = signal.square().sum(-1).clamp(min=LEAST_SNR)
        # by its largest entry first: the derivative of SNR^(-1/2) is SNR^(-3/2), which overflows
        largest = signal.detach().abs().amax(-1).clamp(min=LEAST_SNR**0.5)
        part = signal / largest.unsqueeze(-1)
        root = part.square().sum(-1).clamp(min=1.0).rsqrt()
        direction = part * root.unsqueeze(-1)
        view = View(direction, root / largest, snr.log())
        return view if noise is None else view.with_reading(lower_solve(kernel.cholesky, noise))


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
