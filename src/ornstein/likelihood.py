"""From data to the numbers that diffuse, and back: what the bound is a bound on.

Pixels k = 0 … levels − 1 become numbers x_k, by centring, x = (2k + 1)/levels − 1 ∈ (−1, 1), or by
the logit map x = logit(α + (1 − 2α)(k + ½)/levels). With σ the standard error of x at the time ε
where the process is truncated, the last part of a bound, the reconstruction, is

    Discrete     E log P(k | y_ε) with P(k | y_ε) ∝ N(y_ε; r x_k, Σ) ∝ exp(−(x̃ − x_k)²/2σ²), and
                 x̃ = x + σ ε: a function of k and σ alone, so that it is a table, not a sample
    Tweedie      the paper's: k + u, u ~ U[0, 1), is real-valued data, decoded with all auxiliary
                 variables by Gaussians (appendix "Valid ELBO with truncation"); adds log|dx/dk|
    Continuous   E log N(x; x̂, σ²ς²/(σ² + ς²)) for real-valued x, ς the data's standard deviation

Only `Discrete` and `Tweedie(levels)` are about log P of pixels; the other two are log-densities.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ornstein.linalg import constant_in_graphs, gauss_legendre, in_graph
from ornstein.parts import Record, part

PART_OF_A_BIN = 1 / 6  # standard error of x at the truncation, where levels set the scale …
PART_OF_THE_SPREAD = 1e-3  # … and where only the data's standard deviation does
REACH = 8.5  # standard deviations over which an expectation is integrated
QUADRATURE = 192  # nodes of that integral: exact to 1e-14 for the functions here


def _normal_quadrature() -> tuple[Tensor, Tensor]:
    """Nodes and weights of expectations under a standard normal."""
    node, weight = (torch.from_numpy(v.copy()) for v in gauss_legendre(QUADRATURE))
    eps = REACH * (2 * node - 1)
    return eps, weight * 2 * REACH * torch.exp(-(eps**2) / 2) / math.sqrt(2 * math.pi)


_NORMAL = _normal_quadrature()


class Likelihood(ABC):
    """How data becomes real numbers, and which bound is meant."""

    name: str  #: of the bound, as it is printed

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Raise a ValueError if this is not a batch of such data."""

    @abstractmethod
    def values(self, x: Tensor, u: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The numbers that diffuse: (B, *shape); u in [0, 1) where it is dequantised."""

    @abstractmethod
    def restore(self, x: Tensor) -> Tensor:
        """Data again from the numbers that diffuse, the inverse of `values`: (B, *shape)."""

    @abstractmethod
    def log_jacobian(self, x: Tensor, u: Tensor | None) -> Tensor:
        """log|dx/dk|, of these numbers by the data, summed over coordinates: (B,) float64."""

    @abstractmethod
    def same_space(self, other: Likelihood) -> bool:
        """Whether a network trained under the other sees the same numbers."""

    @abstractmethod
    def noise_level(self, data_std: float) -> float:
        """The standard error of x to truncate at, if nobody says otherwise."""

    @property
    def dequantised(self) -> bool:
        """Whether `values` needs uniform noise."""
        return False

    @property
    def density(self) -> bool:
        """Whether the data is real-valued, so that the bound is on a density."""
        return False

    def moments(self, x: Tensor, per_channel: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the numbers that diffuse: (), or (C, 1, …) per channel."""
        self.check(x)
        u = torch.full(x.shape, 0.5, dtype=torch.float64, device=x.device)
        values = self.values(x, u if self.dequantised else None, torch.float64)
        axes = [i for i in range(x.dim()) if not (per_channel and i == 1)]
        mean, std = values.mean(axes, keepdim=True), values.std(axes, correction=0, keepdim=True)
        if not bool((std > 0).all()):
            raise ValueError(
                "the data is constant, so that its standard deviation is 0; expected data that "
                "vary" + (" in every channel." if per_channel else ". Give more of them.")
            )
        shape = mean.shape[1:] if per_channel else ()
        return mean.reshape(shape), std.reshape(shape)


@dataclass(frozen=True)
class Pixels:
    """The map between levels and numbers."""

    levels: int
    logit: float | None

    def __post_init__(self) -> None:
        if isinstance(self.levels, bool) or not isinstance(self.levels, int) or self.levels < 2:
            raise ValueError(f"levels={self.levels!r}; expected a whole number ≥ 2, such as 256.")
        if self.logit is not None and not (
            isinstance(self.logit, (int, float)) and 0 < self.logit < 0.5
        ):
            raise ValueError(
                f"logit={self.logit!r}; expected None (centring) or the margin α of the map "
                "logit(α + (1 − 2α)p), between 0 and 0.5, such as 0.05."
            )

    def at(self, place: Tensor) -> Tensor:
        """x of a place between 0 and 1."""
        if self.logit is None:
            return 2 * place - 1
        return torch.logit(self.logit + (1 - 2 * self.logit) * place)

    def log_slope(self, place: Tensor) -> Tensor:
        """log dx/dk, where k = levels·place."""
        if self.logit is None:
            return torch.full_like(place, math.log(2 / self.levels))
        p = self.logit + (1 - 2 * self.logit) * place
        return math.log((1 - 2 * self.logit) / self.levels) - p.log() - (1 - p).log()

    def centres(self, device: torch.device | None = None) -> Tensor:
        """x_k of all levels: (levels,) float64."""
        k = torch.arange(self.levels, dtype=torch.float64, device=device)
        return self.at((k + 0.5) / self.levels)

    def edges(self, device: torch.device | None = None) -> Tensor:
        """Where bins end: (levels + 1,) float64."""
        k = torch.arange(self.levels + 1, dtype=torch.float64, device=device)
        return self.at(k / self.levels)

    def between(self, x: Tensor, edges: Tensor) -> Tensor:
        """The levels of numbers, told apart by edges: of the type that pixels are stored in."""
        if not x.is_floating_point() or not bool(x.isfinite().all()):
            raise ValueError(
                "the numbers to turn into pixels are "
                + ("NaN or infinite in places" if x.is_floating_point() else f"of type {x.dtype}")
                + "; expected finite numbers in floating point, as a model estimates them."
            )
        small = torch.uint8 if self.levels <= 256 else torch.int32
        kind = small if self.levels <= 2**31 else torch.int64
        return torch.bucketize(x.to(torch.float64), edges, right=True).to(kind)

    def finest(self) -> float:
        """The smallest distance between two levels."""
        middle = self.levels // 2
        near = torch.tensor([middle - 0.5, middle + 0.5], dtype=torch.float64) / self.levels
        return float(self.at(near).diff())

    def check(self, x: Tensor) -> None:
        _check_tensor(x)
        if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
            raise ValueError(
                f"the data has type {x.dtype}; expected whole pixels of an integer type, "
                f"0 … {self.levels - 1}. Pass the pixels as they are stored (uint8), not scaled; "
                "for real-valued data use likelihood=ornstein.Continuous()."
            )
        if in_graph() or not x.numel() or _holds(x.dtype, self.levels):
            return
        low, high = (int(v) for v in x.to(torch.int64).aminmax())
        if low < 0 or high >= self.levels:
            fix = f"Set levels={max(high + 1, 2)}, or quantise the data."
            raise ValueError(
                f"the data has pixels from {low} to {high}; expected 0 … {self.levels - 1} for "
                f"{self.levels} levels. "
                + (fix if low >= 0 else "Shift them to begin at 0, or read them as unsigned.")
            )


class OfPixels(Likelihood):
    """What the two bounds on log P(pixels) share."""

    pixels: Pixels

    def check(self, x: Tensor) -> None:
        self.pixels.check(x)

    def same_space(self, other: Likelihood) -> bool:
        return isinstance(other, OfPixels) and not other.density and self.pixels == other.pixels

    def histogram(self, x: Tensor, per_channel: bool = False) -> Tensor:
        """How often each level occurs, plus ½: (levels,), or (C, 1, …, levels) per channel.

        The half is for levels that these data happen not to have.
        """
        if self.density:
            raise ValueError(f"{self!r} has no levels to count; expected Discrete(levels).")
        self.check(x)
        levels = self.pixels.levels
        rows = x.transpose(0, 1).flatten(1) if per_channel else x.flatten().unsqueeze(0)
        counts = torch.stack([row.long().bincount(minlength=levels) for row in rows])
        shape = (x.shape[1], *[1] * (x.dim() - 2), levels) if per_channel else (levels,)
        return counts.to(torch.float64).reshape(shape) + 0.5

    def noise_level(self, data_std: float) -> float:
        return self.pixels.finest() * PART_OF_A_BIN


@part("discrete")
class Discrete(OfPixels):
    """log P(x) of pixels, decoded from y_ε without dequantisation or auxiliary variables."""

    name = "discrete"

    def __init__(self, levels: int = 256, logit: float | None = None) -> None:
        self.pixels = Pixels(levels, logit)
        self._tables: dict[tuple[float, torch.device], Tensor] = {}

    def values(self, x: Tensor, u: Tensor | None, dtype: torch.dtype) -> Tensor:
        exact = torch.promote_types(_exact(x), dtype)
        return self.pixels.at((x.to(exact) + 0.5) / self.pixels.levels).to(dtype)

    def restore(self, x: Tensor) -> Tensor:
        """The level whose number is nearest."""
        centres = self.pixels.centres(x.device)
        return self.pixels.between(x, (centres[1:] + centres[:-1]) / 2)

    def log_jacobian(self, x: Tensor, u: Tensor | None) -> Tensor:
        return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)

    def reconstruction(self, x: Tensor, sigma: Tensor | float) -> Tensor:
        """E log P(x | y_ε), summed over coordinates; one sigma: (B,) float64."""
        table = self.table(sigma) if isinstance(sigma, Tensor) else self.kept(sigma, x.device)
        return table[x.long()].flatten(1).sum(1)

    @constant_in_graphs
    def kept(self, sigma: float, device: torch.device) -> Tensor:
        """The table of a standard error that stays the same; made once, outside of any graph."""
        if (sigma, device) not in self._tables:
            if len(self._tables) > 64:
                self._tables.clear()
            with torch.no_grad():
                number = torch.full((), sigma, dtype=torch.float64, device=device)
                self._tables[sigma, device] = self.table(number)
        return self._tables[sigma, device]

    def table(self, sigma: Tensor) -> Tensor:
        """E log P(k | x_k + σε) for every level k: (levels,) float64, with gradient in σ.

        The sum over levels inside the expectation stops where a level is farther off than
        anything that float64 could notice.
        """
        centres, levels = self.pixels.centres(sigma.device), self.pixels.levels
        width = levels - 1 if in_graph() else self._reach(centres, sigma.item())
        eps, density = (v.to(sigma.device) for v in _NORMAL)
        offsets = torch.arange(-width, width + 1, device=sigma.device)
        rows, step = [], max(1, 2**18 // (len(offsets) * QUADRATURE))
        for first in range(0, levels, step):
            k = torch.arange(first, min(first + step, levels), device=sigma.device)
            other = k.unsqueeze(-1) + offsets
            inside = (other >= 0) & (other < levels)
            away = (centres[k].unsqueeze(-1) - centres[other.clamp(0, levels - 1)]) / sigma
            # log N(x̃; x_other) − log N(x̃; x_k) at x̃ = x_k + σ·eps
            logs = -away.unsqueeze(-1) * (away.unsqueeze(-1) / 2 + eps)
            logs = torch.where(inside.unsqueeze(-1), logs, -math.inf)
            rows.append(-(torch.logsumexp(logs, 1) * density).sum(-1))
        return torch.cat(rows)

    def _reach(self, centres: Tensor, sigma: float) -> int:
        """How many levels away another one can still be seen."""
        last, far, width = self.pixels.levels - 1, 2 * (REACH + 9) * sigma, 1
        while width < last and bool((centres[width:] - centres[:-width]).min() < far):
            width = min(2 * width, last)
        return width

    def describe(self) -> Record:
        return {"levels": self.pixels.levels, "logit": self.pixels.logit}

    @classmethod
    def rebuild(cls, fields: Record) -> Discrete:
        return cls(**fields)

    def __repr__(self) -> str:
        return _repr("Discrete", self.pixels.levels, self.pixels.logit)


@part("tweedie")
class Tweedie(OfPixels):
    """The paper's bound: uniform dequantisation, then Gaussians decode all variables.

    With levels=None the data is real-valued and stays as it is.
    """

    def __init__(self, levels: int | None = 256, logit: float | None = None) -> None:
        if levels is None and logit is not None:
            raise ValueError(
                f"levels=None with logit={logit!r}; expected levels for the logit map. Give them, "
                "or transform real-valued data yourself."
            )
        self.levels, self.logit = levels, logit
        if levels is not None:
            self.pixels = Pixels(levels, logit)
        self.name = "tweedie" if logit is None else "tweedie-logit"

    @property
    def dequantised(self) -> bool:
        return self.levels is not None

    @property
    def density(self) -> bool:
        return self.levels is None

    def check(self, x: Tensor) -> None:
        if self.levels is None:
            _check_real(x)
        else:
            super().check(x)

    def values(self, x: Tensor, u: Tensor | None, dtype: torch.dtype) -> Tensor:
        return x.to(dtype) if u is None else self.pixels.at(self._place(x, u)).to(dtype)

    def restore(self, x: Tensor) -> Tensor:
        """The level from which these numbers were dequantised, whatever u was."""
        if self.levels is None:
            return x
        k = torch.arange(1, self.levels, dtype=torch.float64, device=x.device)
        return self.pixels.between(x, self.pixels.at(k / self.levels))

    def log_jacobian(self, x: Tensor, u: Tensor | None) -> Tensor:
        if u is None:
            return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
        return self.pixels.log_slope(self._place(x, u)).to(torch.float64).flatten(1).sum(1)

    def same_space(self, other: Likelihood) -> bool:
        if self.levels is None:
            return other.density
        return super().same_space(other)

    def noise_level(self, data_std: float) -> float:
        if self.levels is None:
            return data_std * PART_OF_THE_SPREAD
        return super().noise_level(data_std)

    def _place(self, x: Tensor, u: Tensor) -> Tensor:
        return (x.to(torch.float64) + u) / self.pixels.levels  # float32 would round up to 1

    def describe(self) -> Record:
        return {"levels": self.levels, "logit": self.logit}

    @classmethod
    def rebuild(cls, fields: Record) -> Tweedie:
        return cls(**fields)

    def __repr__(self) -> str:
        return _repr("Tweedie", self.levels, self.logit)


@part("continuous")
class Continuous(Likelihood):
    """log-density of real-valued data, as it is."""

    name = "continuous"
    density = True

    def check(self, x: Tensor) -> None:
        _check_real(x)

    def values(self, x: Tensor, u: Tensor | None, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def restore(self, x: Tensor) -> Tensor:
        return x

    def log_jacobian(self, x: Tensor, u: Tensor | None) -> Tensor:
        return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)

    def same_space(self, other: Likelihood) -> bool:
        return other.density

    def noise_level(self, data_std: float) -> float:
        return data_std * PART_OF_THE_SPREAD

    def describe(self) -> Record:
        return {}

    @classmethod
    def rebuild(cls, fields: Record) -> Continuous:
        return cls(**fields)

    def __repr__(self) -> str:
        return "Continuous()"


def bits_per_dim(nats: Tensor, dims: int) -> Tensor:
    """−nats / (dims·log 2): what a coordinate costs in bits if log p = nats."""
    return -nats / (dims * math.log(2))


# ---------------------------------------------------------------- checks


def _check_tensor(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(
            f"the data was given as {type(x).__name__}; expected a torch tensor of shape "
            "(batch, *data). Convert it with torch.as_tensor."
        )
    if x.dim() < 2:
        raise ValueError(
            f"the data has shape {tuple(x.shape)}; expected (batch, *data), with at least one axis "
            "after the batch. Add one with x.unsqueeze(-1) or x.unsqueeze(0)."
        )
    if math.prod(x.shape[1:]) == 0:
        raise ValueError(
            f"the data has shape {tuple(x.shape)}, examples without coordinates; expected at least "
            "one number in each."
        )


def _check_real(x: Any) -> None:
    _check_tensor(x)
    if not x.is_floating_point():
        raise ValueError(
            f"the data has type {x.dtype}; expected real numbers in floating point. For whole "
            "pixels use likelihood=ornstein.Discrete(levels)."
        )
    if not in_graph() and not bool(torch.isfinite(x).all()):
        raise ValueError("the data has entries that are NaN or infinite; expected finite numbers.")


def _holds(dtype: torch.dtype, levels: int) -> bool:
    """Whether a type can't hold anything but levels."""
    limits = torch.iinfo(dtype)
    return limits.min >= 0 and limits.max < levels


def _exact(x: Tensor) -> torch.dtype:
    """A type that holds the levels: float32 for bytes, else float64."""
    return torch.float32 if x.dtype in (torch.uint8, torch.int8) else torch.float64


def _repr(name: str, levels: int | None, logit: float | None) -> str:
    return f"{name}({levels}" + ("" if logit is None else f", logit={logit:g}") + ")"
