"""At which times the loss is looked at, and the weight that makes it unbiased there.

A loss integrates over s ∈ [ε, T], or over λ = log SNR. A proposal turns places u ∈ [0, 1) into
times and says by what to multiply the integrand, 1/density; the mean is then the integral.

    Uniform       even in s
    Importance    density ∝ ½tr(Σ⁻¹GGᵀ), the mean of the integrand for a network that knows nothing;
                  its CDF is ½log|Σ_s| − ∫tr A, a closed form for every process
    LogSNR        even in λ, where the weight of a channel model is constant
    Information   density ∝ the rate at which y_s forgets Gaussian data of variance ς²: its CDF is
                  I(x; y_s) = ½log(1 + ς²SNR), the mean of the integrand for a model that knows the
                  Gaussian answer; with a part that is even in λ
    Adaptive      any of these, reshaped by the second moment of the loss as it was seen so far

A CDF is looked up at the nodes of a table. Between two of them the density is even in log s, and
this density, not the one it approximates, is the one that is divided by: no table is too coarse to
be unbiased.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ornstein.draws import SPREADS, Spread
from ornstein.process import Process

NODES = 256


@dataclass(frozen=True)
class Span:
    """The times of a bound: from ε, where the data is decoded, to the horizon."""

    process: Process
    start: Tensor  # () float64, ε
    data_std: float = 1.0


class Times(nn.Module, ABC):
    """A proposal for times, and how the draws of a batch are spread over it."""

    def __init__(self, spread: Spread = "stratified") -> None:
        super().__init__()
        if spread not in SPREADS:
            raise ValueError(f"spread={spread!r}; expected one of {', '.join(SPREADS)}.")
        self.spread: Spread = spread

    @abstractmethod
    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Times and weights, 1/density in s, both without gradient: (B,) from u: (B,)."""

    def place_logsnr(
        self, u: Tensor, low: Tensor, high: Tensor, data_std: float
    ) -> tuple[Tensor, Tensor] | None:
        """log SNR between its ends, and 1/density there: (B,) from u: (B,).

        None for proposals that only know times.
        """
        return None

    def observe(self, u: Tensor, size: Tensor) -> None:
        """Hear about the weighted loss at places u: both (B,)."""

    def extra_repr(self) -> str:
        return f"spread={self.spread!r}"


class Uniform(Times):
    """Even in s."""

    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        start = span.start.detach()
        length = span.process.horizon - start
        return start + u * length, length.expand_as(u)


class Importance(Times):
    """∝ ½tr(Σ⁻¹GGᵀ) of the process itself, or of another one that is given."""

    def __init__(self, process: Process | None = None, spread: Spread = "stratified") -> None:
        super().__init__(spread)
        if process is not None and not isinstance(process, Process):
            raise ValueError(
                f"Importance got {process!r}; expected a process, for example ornstein.vpsde(), or "
                "None for the model's own."
            )
        self.process = process

    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        return _from_table(u, span, self._clock)

    def _clock(self, s: Tensor, process: Process) -> Tensor:
        used = process if self.process is None else self.process
        return used.transition(s).logdet / 2 - used.log_volume(s)


class LogSNR(Times):
    """Even in log SNR."""

    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        return _from_table(u, span, lambda s, process: -process.transition(s).logsnr)

    def place_logsnr(
        self, u: Tensor, low: Tensor, high: Tensor, data_std: float
    ) -> tuple[Tensor, Tensor]:
        return high + u * (low - high), (high - low).expand_as(u)  # u = 0 is the earliest time


class Information(Times):
    """∝ the rate at which y_s forgets Gaussian data of the model's data_std; a part even in λ."""

    def __init__(self, floor: float = 0.1, spread: Spread = "stratified") -> None:
        super().__init__(spread)
        self.floor = _part(floor, "floor")

    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        def clock(s: Tensor, process: Process) -> Tensor:
            return self._clock(process.transition(s).logsnr, span.data_std)

        return _from_table(u, span, clock)

    def place_logsnr(
        self, u: Tensor, low: Tensor, high: Tensor, data_std: float
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            part = torch.arange(NODES + 1, dtype=torch.float64, device=u.device) / NODES
            clock = self._clock(high + part * (low - high), data_std)
            cell, inside, mass = _cells(u, clock.diff())
            place = (cell + inside) / NODES
        return high + place * (low - high), (high - low) / (NODES * mass)

    def _clock(self, logsnr: Tensor, data_std: float) -> Tensor:
        """From 0 at the first of these to 1 at the last, λ falling."""
        known = torch.nn.functional.softplus(logsnr + 2 * math.log(data_std))
        parts = [(v[0] - v) / (v[0] - v[-1]) for v in (logsnr, known)]
        return self.floor * parts[0] + (1 - self.floor) * parts[1]

    def extra_repr(self) -> str:
        return f"floor={self.floor:g}, {super().extra_repr()}"


class Adaptive(Times):
    """Another proposal, reshaped in bins of its places.

    The best density is ∝ the root of the loss's second moment. That is kept per bin as a running
    mean while the module is in training mode, and stays as it is in evaluation mode. A part of the
    density, `floor`, is left even, so that no bin is ever forgotten.
    """

    second: Tensor
    seen: Tensor

    def __init__(
        self,
        base: Times | None = None,
        bins: int = 64,
        decay: float = 0.99,
        floor: float = 0.1,
        spread: Spread = "stratified",
    ) -> None:
        super().__init__(spread)
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ValueError(f"bins={bins!r}; expected a whole number ≥ 1.")
        if not (isinstance(decay, (int, float)) and 0 < decay < 1):
            raise ValueError(f"decay={decay!r}; expected a number between 0 and 1.")
        if base is not None and not isinstance(base, Times):
            raise ValueError(
                f"base={base!r}; expected another proposal, for example ornstein.LogSNR(), or None."
            )
        _part(floor, "floor")
        self.base = Information() if base is None else base
        self.bins, self.decay, self.floor = bins, decay, floor
        self.register_buffer("second", torch.zeros(bins, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(bins, dtype=torch.float64))

    def density(self) -> Tensor:
        """The density over places of the base, per bin: (bins,), of mean one."""
        known = self.seen > 0
        root = (self.second / self.seen.clamp(min=1e-300)).sqrt()
        # a bin not seen yet counts as much as the largest seen
        root = torch.where(known, root, torch.where(known, root, 0.0).amax())
        total = root.sum()
        shape = torch.where(total > 0, root / total.clamp(min=1e-300), 1 / self.bins) * self.bins
        return self.floor + (1 - self.floor) * shape

    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        place, factor = self.reshape(u)
        s, weight = self.base.place(place, span)
        return s, weight * factor

    def place_logsnr(
        self, u: Tensor, low: Tensor, high: Tensor, data_std: float
    ) -> tuple[Tensor, Tensor] | None:
        place, factor = self.reshape(u)
        found = self.base.place_logsnr(place, low, high, data_std)
        return None if found is None else (found[0], found[1] * factor)

    def reshape(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Places of the base from even ones, and 1/density there: (B,) each."""
        cell, inside, mass = _cells(u, self.density().to(u.device))
        place = ((cell + inside) / self.bins).clamp(max=1 - 2**-53)
        return place, 1 / (mass * self.bins)

    @torch.no_grad()
    def observe(self, u: Tensor, size: Tensor) -> None:
        """Of the weighted loss at places u (before reshaping): both (B,)."""
        if not self.training:
            return
        place, factor = self.reshape(u)
        bin_ = (place * self.bins).long().clamp(max=self.bins - 1)
        bin_, factor, size = (t.to(self.second.device) for t in (bin_, factor, size))
        value = (size.to(self.second.dtype) / factor).square()  # in the base's measure
        good = value.isfinite()
        count = torch.zeros_like(self.seen).index_add_(0, bin_, good.to(self.seen))
        total = torch.zeros_like(self.seen).index_add_(0, bin_, torch.where(good, value, 0.0))
        keep = torch.where(count > 0, self.decay, 1.0)  # a bin forgets only when it hears
        self.second.mul_(keep).add_((1 - self.decay) * total / count.clamp(min=1))
        self.seen.mul_(keep).add_((1 - self.decay) * (count > 0))

    def extra_repr(self) -> str:
        return (
            f"bins={self.bins}, decay={self.decay:g}, floor={self.floor:g}, {super().extra_repr()}"
        )


def _from_table(
    u: Tensor, span: Span, clock: Callable[[Tensor, Process], Tensor]
) -> tuple[Tensor, Tensor]:
    """Times even in a rising function of s that is known at nodes."""
    process = span.process
    with torch.no_grad():
        start = span.start.detach().reshape(1)
        even = torch.linspace(0, 1, NODES // 2 + 1, dtype=torch.float64, device=u.device)[1:-1]
        length = math.log(process.horizon) - start.log()
        inner = torch.cat([start * (length * even).exp(), start + (process.horizon - start) * even])
        last = torch.full_like(start, process.horizon)
        nodes = torch.cat([start, inner.sort().values, last])  # even in log s, and even in s
        logs = nodes.log()
        cell, part, mass = _cells(u, clock(nodes, process).diff())
        width = logs[cell + 1] - logs[cell]
        s = torch.minimum((logs[cell] + part * width).exp(), last).maximum(start)
        return s, s * width / mass


def _cells(u: Tensor, rise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cell that u falls into, its place in it, and the cell's probability: (B,) each.

    The cells' shares, rise, need not sum to one. Whatever rounding did, all can be drawn.
    """
    rise = rise.clamp(min=1e-6 * rise.sum() / rise.shape[0])
    edges = torch.cat([rise.new_zeros(1), rise.cumsum(0)]) / rise.sum()
    cell = (torch.searchsorted(edges, u, right=True) - 1).clamp(0, rise.shape[0] - 1)
    mass = edges[cell + 1] - edges[cell]
    return cell, ((u - edges[cell]) / mass).clamp(0.0, 1.0), mass


def _part(value: float, name: str) -> float:
    if not (isinstance(value, (int, float)) and 0 < value <= 1):
        raise ValueError(f"{name}={value!r}; expected 0 < {name} ≤ 1, so that all times are seen.")
    return float(value)
