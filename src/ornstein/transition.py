"""The Gaussian q(y_s | ·): y_s = Φ m₀ + L ε for every data coordinate.

Given the state, m₀ = y_0. Given x alone ("hybrid"), m₀ = (x, c·x): the auxiliary variables are
integrated out, v₀ ~ N(c·x, Σ_v), and their variance is part of L Lᵀ. The K×K matrices are float64
and shared by all coordinates; tensors of the data's size keep the type they came in.

State tensors are (B, K, *shape), data (B, *shape).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ornstein import gpu
from ornstein.linalg import in_graph, lower_inverse, lower_solve, product

Given = Literal["x", "state"]
LEAST_SNR = 1e-300


@dataclass(frozen=True)
class Transition:
    """q(y_s | x) or q(y_s | y_start) for a batch of times."""

    propagator: Tensor  # (..., K, K) float64, Φ
    cholesky: Tensor  # (..., K, K) float64, L, lower triangular, positive diagonal (for s > 0)
    direction: Tensor  # (K,) float64: E[y_0 | x] = direction · x, that is (1, c)
    given: Given
    error: Tensor  # (...) relative rounding error of diag L

    @property
    def covariance(self) -> Tensor:
        """Σ = L Lᵀ: (..., K, K). For looking at: every computation here uses L itself."""
        return self.cholesky @ self.cholesky.mT

    @property
    def logdet(self) -> Tensor:
        """log|Σ| per data coordinate: (...)."""
        self._check_spread()
        return 2 * torch.diagonal(self.cholesky, dim1=-2, dim2=-1).log().sum(-1)

    @property
    def response(self) -> Tensor:
        """E[y_s | x] / x = Φ·(1, c): (..., K)."""
        return product(self.propagator, self.direction.unsqueeze(-1)).squeeze(-1)

    @property
    def signal(self) -> Tensor:
        """a = L⁻¹Φ(1, c), so that L⁻¹y_s = a·x + ε: (..., K). Kernels given x."""
        self._only_given_x("signal")
        self._check_spread()
        response = self.response.unsqueeze(-1)
        return lower_solve(self.cholesky, response).squeeze(-1)

    @property
    def snr(self) -> Tensor:
        """‖a‖² = 1/Var(x estimated from y_s): the signal-to-noise ratio about x, (...)."""
        return self.signal.square().sum(-1)

    @property
    def logsnr(self) -> Tensor:
        """log SNR, (...); where nothing of x is left that float64 can hold, about −690."""
        return self.snr.clamp(min=LEAST_SNR).log()

    def mean(self, origin: Tensor) -> Tensor:
        """E[y_s | origin]: data (B, *shape) given x, state (B, K, *shape) given the state."""
        flat, shape = self._flatten_origin(origin)
        if self.given == "x":
            mean = self._like(self.response, flat).unsqueeze(-1) * flat.unsqueeze(-2)
        else:
            mean = mix(self._like(self.propagator, flat), flat)
        return mean.reshape(shape).to(origin.dtype)

    def sample(
        self,
        origin: Tensor,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y_s ~ q(· | origin) and the standard normal noise that made it, each (B, K, *shape)."""
        flat, shape = self._flatten_origin(origin)
        if noise is None and self._drawn_in_one(origin):
            matrices = self._batched(self.propagator), self.direction, self._batched(self.cholesky)
            own = _flat(origin, 1 if self.given == "x" else 2)  # in the type it came in
            y, noise = gpu.noised(own, *matrices, self.given == "state", generator)
            return y.reshape(shape), noise.reshape(shape)
        if noise is None:
            noise = torch.randn(
                shape, dtype=origin.dtype, device=origin.device, generator=generator
            )
        else:
            self._check(noise, "noise", shape)
        eps = _flat(noise, 2).to(flat.dtype)
        if self.given == "x":
            y = self._like(self.response, flat).unsqueeze(-1) * flat.unsqueeze(-2)
        else:
            y = mix(self._like(self.propagator, flat), flat)
        y = mix(self._like(self.cholesky, flat), eps, y, lower=True)
        return y.reshape(shape).to(origin.dtype), noise

    def noise(self, y: Tensor, origin: Tensor) -> Tensor:
        """ε = L⁻¹(y − mean), in float64 inside: (B, K, *shape)."""
        return self._whiten(y, origin).reshape(y.shape).to(y.dtype)

    def noise_to_score(self, noise: Tensor) -> Tensor:
        """−L⁻ᵀ ε, the score where the noise is known; no cancellation in any type."""
        self._check_spread()
        K = self.cholesky.shape[-1]
        self._check(noise, "noise", (*noise.shape[:1], K, *noise.shape[2:]))
        flat = _flat(noise, 2).to(_working(noise.dtype))
        matrix = self._like(-lower_inverse(self.cholesky).mT, flat)
        return mix(matrix, flat).reshape(noise.shape).to(noise.dtype)

    def score(self, y: Tensor, origin: Tensor) -> Tensor:
        """∇_y log q(y | origin) = −Σ⁻¹(y − mean), in float64 inside: (B, K, *shape)."""
        matrix = self._batched(-lower_inverse(self.cholesky).mT)
        return mix(matrix, self._whiten(y, origin)).reshape(y.shape).to(y.dtype)

    def log_prob(self, y: Tensor, origin: Tensor) -> Tensor:
        """log q(y | origin) summed over coordinates, float64: (B,)."""
        eps = self._whiten(y, origin)  # (B, K, d)
        K, d = eps.shape[1], eps.shape[2]
        constant = d * (K / 2 * math.log(2 * math.pi))
        return -0.5 * eps.square().sum((1, 2)) - 0.5 * d * self.logdet - constant

    # ------------------------------------------------------------------ shapes and types

    def _drawn_in_one(self, origin: Tensor) -> bool:
        """Whether noise and y can be made by one kernel: on a GPU, where no gradient is wanted."""
        parts = origin, self.propagator, self.direction, self.cholesky
        if torch.is_grad_enabled() and any(t.requires_grad for t in parts):
            return False
        return gpu.draws(origin, self.direction.shape[0]) and origin.device == self.cholesky.device

    def _whiten(self, y: Tensor, origin: Tensor) -> Tensor:
        self._check_spread()
        flat, shape = self._flatten_origin(origin)
        self._check(y, "y", shape)
        flat = flat.to(torch.float64)
        if self.given == "x":
            mean = self._batched(self.response).unsqueeze(-1) * flat.unsqueeze(-2)
        else:
            mean = mix(self._batched(self.propagator), flat)
        rest = y.to(torch.float64).reshape(mean.shape) - mean
        return lower_solve(self._batched(self.cholesky), rest)

    def _flatten_origin(self, origin: Tensor) -> tuple[Tensor, torch.Size]:
        """The origin as (B, d) or (B, K, d) in its working type, and the shape of the state."""
        K, batch = self.cholesky.shape[-1], self.cholesky.shape[:-2]
        _check_floating(origin, "the batch")
        if len(batch) > 1:
            raise ValueError(
                f"this kernel has times of shape {tuple(batch)}; expected one time per example, "
                "(B,), or a single one. Flatten the times before sampling."
            )
        if origin.dim() < 1 or (batch and batch[0] not in (1, origin.shape[0])):
            raise ValueError(
                f"the batch has shape {tuple(origin.shape)} and the kernel {tuple(batch)} times; "
                "expected one time per example, or a single time for all of them."
            )
        work = origin.to(_working(origin.dtype))
        if self.given == "x":
            shape = torch.Size((origin.shape[0], K, *origin.shape[1:]))
            return _flat(work, 1), shape
        if origin.dim() < 2 or origin.shape[1] != K:
            raise ValueError(
                f"the state has shape {tuple(origin.shape)}; expected (batch, {K}, *data) with "
                f"the {K} variables on the second axis. For data alone use given='x'."
            )
        return _flat(work, 2), origin.shape

    def _check(self, tensor: Tensor, what: str, shape: Sequence[int]) -> None:
        _check_floating(tensor, what)
        batch = self.cholesky.shape[:-2]
        if len(batch) > 1:
            raise ValueError(
                f"this kernel has times of shape {tuple(batch)}; expected one time per example, "
                "(B,), or a single one. Flatten the times first."
            )
        if tensor.shape != torch.Size(shape) or (batch and batch[0] not in (1, tensor.shape[0])):
            wanted = torch.Size((batch[0] if batch else shape[0], *shape[1:]))
            raise ValueError(
                f"{what} has shape {tuple(tensor.shape)}; expected {tuple(wanted)}, that is "
                "(batch, variables, *data)."
            )

    def _check_spread(self) -> None:
        """A density needs L to have an inverse; at s = 0 the kernel is a point."""
        diagonal = torch.diagonal(self.cholesky.detach(), dim1=-2, dim2=-1)
        if not in_graph() and bool((diagonal == 0).any()):
            raise ValueError(
                "the kernel at s = 0 (or s = start) is a point: it has samples, but no density, "
                "score or signal-to-noise. Expected s > 0; start a little later."
            )

    def _batched(self, matrix: Tensor) -> Tensor:
        """A single kernel's matrix gets a batch axis of one."""
        return matrix if self.cholesky.dim() == 3 else matrix.unsqueeze(0)

    def _like(self, matrix: Tensor, data: Tensor) -> Tensor:
        return self._batched(matrix).to(data.dtype)

    def _only_given_x(self, what: str) -> None:
        if self.given != "x":
            raise ValueError(
                f"{what} is defined for a kernel given x; this one is given the state. Call "
                "process.transition(s, given='x')."
            )


def _check_floating(tensor: Tensor, what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{what} was given as {type(tensor).__name__}; expected a torch tensor. Convert it "
            "with torch.as_tensor."
        )
    if not tensor.is_floating_point():
        raise ValueError(
            f"{what} has type {tensor.dtype}; expected floating point. Scale integer pixels to "
            "real values first."
        )


def _flat(tensor: Tensor, axes: int) -> Tensor:
    """All axes after the first ones as one, also for an empty batch."""
    return tensor.reshape(*tensor.shape[:axes], math.prod(tensor.shape[axes:]))


def _working(dtype: torch.dtype) -> torch.dtype:
    """The type that d-sized arithmetic is done in: half types are widened."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def mix(matrix: Tensor, state: Tensor, onto: Tensor | None = None, lower: bool = False) -> Tensor:
    """Σ_j matrix[:, i, j] state[:, j] (+ onto, which is used up): (B, K, d).

    Elementwise, not as a matrix product: K is small, so that a pass per variable is as fast, and
    reduced precision modes of matrix units can't touch it. `lower` skips zeros above the diagonal.
    """
    tracked = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (matrix, state, onto)
    )
    tracked = tracked or torch.compiler.is_compiling()  # (slices written in place do not fuse)
    y, first = (onto, 0) if onto is not None else (matrix[:, :, 0, None] * state[:, :1], 1)
    for j in range(first, matrix.shape[-1]):
        column, row = matrix[:, :, j, None], state[:, j : j + 1]
        if tracked:
            y = torch.addcmul(y, column, row)
        else:
            top = j if lower else 0
            y[:, top:].addcmul_(column[:, top:], row)
    return y
