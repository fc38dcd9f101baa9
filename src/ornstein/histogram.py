"""What the histogram of pixels says about a pixel that is seen in noise.

Of independent pixels that are at the number x_k with probability P_k, one that is seen as
x̃ = x + σ ε is at x_k with probability w_k ∝ P_k exp(−(x̃ − x_k)²/2σ²). So the best guess is
x̂ = Σ w_k x_k, and what stays open has the variance v = Σ w_k (x_k − x̂)². A network that adds to
this answer starts from the entropy of the histogram, and is never asked how long a bin is.

Dequantised pixels are anywhere in their bins, [e_k, e_{k+1}]. Their x̂ and v (`spread`) come from
the same sums over truncated normals, with ρ_k = P_k/(e_{k+1} − e_k) and z_k = (e_k − x̃)/σ:
S₀ = Σ ρ_k ΔΦ(z_k), S₁ = −Σ ρ_k Δφ(z_k), S₂ = −Σ ρ_k Δ(zφ)(z_k), x̂ = x̃ + σ S₁/S₀ and
v = σ²(1 + S₂/S₀ − (S₁/S₀)²). With a logit map it is an approximation: bins are even in k, not in x.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ornstein import gpu
from ornstein.answers import LARGEST, Moments, over
from ornstein.linalg import in_graph, in_transform
from ornstein.matrices import as_float64
from ornstein.schedules import Float64Module

FEATURES = 2  # as many as these, of two entries each, is what a network is told of it
AT_ONCE = {"cpu": 2**18, "cuda": 2**27}  # weights formed together where nothing fuses them
LEAST = 1e-30  # variance below which a pixel is known
SHARPEST = 1e-9  # standard error of x from which on float32 sees no noise, and weights stay
SMALLEST = 1e-35  # what float32 can be divided by
FAR = 20.0  # standard deviations that a network is told of at most
WIDE = 30.0  # bins, from which on it does not matter where in its bin a pixel is
MANY = 64  # levels, from which on a CPU looks at those near x̃ alone where all others weigh nothing
SLACK = 10  # bits of precision that what is left out stays below
ANYWHERE = -1  # in place of a reach: all levels, and it does not matter where in its bin a pixel is


Formula = Callable[..., tuple[Tensor, ...]]  # of x̃ and σ


@dataclass(frozen=True)
class Seen:
    """x̃, x̂ and the deviation √v, (B, *shape), and σ, (B, 1, …)."""

    x_noisy: Tensor
    mean: Tensor
    deviation: Tensor
    sigma: Tensor

    @property
    def scale(self) -> Tensor:
        """√v/σ: how much of the noise is still open."""
        return self.deviation / self.sigma

    def beyond(self, gaussian: Tensor) -> Tensor:
        """The noise that this answer sees more than one whose guess of x is this one."""
        return (gaussian - self.mean) / self.sigma

    def extras(self, moments: Moments) -> list[Tensor]:
        """For the network: the guess and its deviation, in units of the data and of the noise."""
        centre, unit = (value.to(self.mean.dtype) for value in (moments.mean, moments.std))
        return [
            (self.mean - centre) / unit,
            self.deviation / unit,
            ((self.x_noisy - self.mean) / self.sigma).clamp(-FAR, FAR),
            self.scale.clamp(max=FAR),
        ]


class Histogram(Float64Module):
    """How often each level occurs: (levels,), or (C, 1, …, levels) for each channel."""

    centres: Tensor
    edges: Tensor
    logs: Tensor
    even = False  # whether pixels are spread evenly over their bins

    def __init__(self, centres: Tensor, counts: Tensor, edges: Tensor | None = None) -> None:
        """centres: the numbers of the levels, (levels,). edges: of their bins, (levels + 1,)."""
        super().__init__()
        found = as_float64(counts, "histogram")
        if found.dim() == 0 or found.shape[-1] != len(centres):
            raise ValueError(
                f"histogram of shape {tuple(found.shape)}; expected one number for each of the "
                f"{len(centres)} levels on the last axis. likelihood.histogram(x) gives it."
            )
        if not bool((found > 0).all()):
            raise ValueError(
                f"histogram has an entry {found.min().item():g}; expected how often each level "
                "occurs, a positive number even where none was seen. likelihood.histogram(x) "
                "gives it."
            )
        edges = _between(centres) if edges is None else edges
        gaps = centres.diff()  # as float64 has them
        self.regular = bool(((gaps - gaps.mean()).abs() <= 1e-9 * gaps.mean()).all())
        wide, self.step = edges.diff(), gaps.mean().item()
        self.width = wide.max().item()  # of a bin
        self.regular_edges = bool(((wide - self.step).abs() <= 1e-9 * self.step).all())
        self.register_buffer("centres", centres.to(found), persistent=False)
        self.register_buffer("edges", edges.to(found), persistent=False)
        self.register_buffer("logs", (found / found.sum(-1, keepdim=True)).log())

    def spread(self, even: bool = True) -> Histogram:
        """The same for pixels that are anywhere in their bins, or else at their levels."""
        other = copy.copy(self)
        other.even = even
        return other

    def seen(self, x_noisy: Tensor, sigma: Tensor) -> Seen:
        """What x̃ says at standard errors sigma, (B,)."""
        kind = torch.promote_types(x_noisy.dtype, torch.float32)
        x, width = x_noisy.to(kind), over(sigma.clamp(SMALLEST, LARGEST), x_noisy, kind)
        mean, variance = self._moments(x, width.clamp(min=SHARPEST))
        return Seen(x, mean, variance.clamp(min=LEAST).sqrt(), width)

    def _moments(self, x: Tensor, sigma: Tensor) -> tuple[Tensor, ...]:
        """x̂ and v."""
        graph = torch.is_grad_enabled() and (x.requires_grad or sigma.requires_grad)
        fused = gpu.weighs(x) and self._by_channel(x) and not self.even
        if not fused and (self.even or not graph or in_graph()):
            return self._all(self._few, x, sigma, graph)
        with torch.no_grad():
            found = self._fused(x, sigma, graph) if fused else self._all(self._four, x, sigma)
        if not graph:
            return found
        compiled = torch.compiler.is_compiling()  # where nothing is differentiated twice
        formula = None if compiled else functools.partial(self._in_parts, self._few)
        mean, variance = _Known.apply(x, sigma, formula, *found)  # type: ignore[no-untyped-call]
        return mean, variance

    def _fused(self, x: Tensor, sigma: Tensor, four: bool) -> tuple[Tensor, ...]:
        """x̂, v and, if wanted, the third and fourth central moment by `gpu.weighed`."""
        rows = (self.logs / math.log(2)).to(x.dtype).reshape(-1, len(self.centres))
        centres, channels = self.centres.to(x.dtype), x.reshape(len(x), len(rows), -1)
        found = gpu.weighed(channels, sigma.flatten(), centres, rows, self.regular, four)
        return found.reshape(-1, *x.shape).unbind()

    def _all(
        self, few: Formula, x: Tensor, sigma: Tensor, graph: bool = False
    ) -> tuple[Tensor, ...]:
        """A formula for all examples: on a CPU, of the levels near x̃ where they are enough."""
        if len(sigma) == 1:  # for all
            sigma = sigma.expand(len(x), *sigma.shape[1:])
        if graph or not self._can_choose(x, sigma):
            return self._in_parts(few, x, sigma)
        found: list[Tensor] = []
        reaches = self._reaches(sigma.flatten(), x.dtype)
        for reach in reaches.unique().tolist():
            here = (reaches == reach).nonzero().flatten()
            if reach == ANYWHERE:
                formula, levels = self.spread(False)._few, len(self.centres)
            else:
                formula = functools.partial(few, reach=reach)
                levels = 2 * reach + 1 if reach else len(self.centres)
            part = self._in_parts(formula, x[here], sigma[here], levels)
            found = found or [torch.empty_like(x) for _ in part]
            for whole, value in zip(found, part, strict=True):
                whole[here] = value
        return tuple(found)

    def _can_choose(self, x: Tensor, sigma: Tensor) -> bool:
        """Whether examples can be looked at one by one, and there are levels to leave out."""
        plain = x.device.type == "cpu" and not in_graph() and not in_transform()
        alike = self.regular and (self.regular_edges or not self.even) and self._by_channel(x)
        return plain and alike and len(self.centres) >= MANY and 0 < len(x) == sigma.numel()

    def _reaches(self, sigma: Tensor, kind: torch.dtype) -> Tensor:
        """How many levels on each side of the nearest one count: a power of 2, or 0 for all.

        m steps away a level's Gaussian is exp(−(m² − m) h²/2σ²) of the nearest one's, at most. What
        is left out weighs less than rounding, even if levels near x̃ are as rare as they come.
        """
        rare = float((self.logs.amax(-1) - self.logs.amin(-1)).max())
        nats = 2 * rare - math.log(torch.finfo(kind).eps) + SLACK * math.log(2)
        reach = 0.5 + (0.25 + 2 * nats * (sigma.double() / self.step).square()).sqrt()
        reach = 2 ** reach.clamp(min=2).log2().ceil()
        few = 4 * reach < len(self.centres)
        few &= self.logs.numel() * (2 * reach + 1) <= AT_ONCE["cpu"]  # of `_around`
        found = torch.where(few, reach, 0.0).long()
        if self.even:
            found = torch.where(sigma > WIDE * self.width, ANYWHERE, found)
        return found

    def _in_parts(
        self, few: Formula, x: Tensor, sigma: Tensor, levels: int | None = None
    ) -> tuple[Tensor, ...]:
        """A formula that forms all weights at once, for as many examples as they fit."""
        most = AT_ONCE.get(x.device.type, AT_ONCE["cuda"])
        size = max(1, most // ((levels or len(self.centres)) * max(1, x[:1].numel())))
        if in_graph() or len(x) <= size:
            return few(x, sigma)
        if torch.is_grad_enabled() and (x.requires_grad or sigma.requires_grad):
            # weights are formed anew on the way back, a part at a time
            few = functools.partial(checkpoint, few, use_reentrant=False, preserve_rng_state=False)
        found = [few(*part) for part in zip(x.split(size), sigma.split(size), strict=True)]
        return tuple(torch.cat(values) for values in zip(*found, strict=True))

    def _by_channel(self, x: Tensor) -> bool:
        """Whether the histogram is one for all, or one for each channel."""
        own, dims = self.logs.shape[:-1], x.dim() - 1
        return own.numel() == 1 or own == (x.shape[1], *[1] * (dims - 1))

    def _four(self, x: Tensor, sigma: Tensor, reach: int = 0) -> tuple[Tensor, ...]:
        """x̂ and the second, third and fourth central moment, of pixels at their levels."""
        weight, mean, far = self._weighed(x, sigma, reach)
        powers = [weight * far.square()]
        powers += [powers[0] * far, powers[0] * far.square()]
        return mean, *(power.sum(-1) for power in powers)

    def _few(self, x: Tensor, sigma: Tensor, reach: int | None = None) -> tuple[Tensor, ...]:
        """x̂ and v. reach: levels on each side of the nearest one, 0 for all; None for all, where
        what is done can't depend on values."""
        if not self.even:
            weight, mean, far = self._weighed(x, sigma, reach or 0)
            return mean, (weight * far.square()).sum(-1)
        edges, density = self._bins(x, reach or 0)
        z = (edges - x.unsqueeze(-1)) / sigma.unsqueeze(-1).double()
        tail, height = (
            torch.erfc(z.abs() / 2**0.5) / 2,
            (-z.square() / 2).exp() / math.sqrt(math.tau),
        )
        inside = (z[..., :-1] < 0) & (z[..., 1:] >= 0)  # the bin of x̃: from one tail to the other
        mass = torch.where(z < 0, tail, -tail).diff() + inside
        tiny = torch.finfo(torch.float64).tiny
        zeroth = (density * mass).sum(-1).clamp(min=tiny)
        shift = -(density * height.diff()).sum(-1) / zeroth
        second = 1 - (density * (z * height).diff()).sum(-1) / zeroth
        found = x + sigma * shift, sigma.double().square() * (second - shift.square())
        # where it does not matter, or x̃ is so far outside that no mass is left
        wide = (sigma > WIDE * self.edges.diff().max()) | (zeroth <= tiny)
        if reach is not None and not bool(wide.any()):
            mean, variance = (value.to(x.dtype) for value in found)
            return mean, variance
        mean, variance = (
            torch.where(wide, rough, fine.to(x.dtype))
            for rough, fine in zip(self.spread(False)._few(x, sigma, reach), found, strict=True)
        )
        return mean, variance

    def _weighed(self, x: Tensor, sigma: Tensor, reach: int) -> tuple[Tensor, Tensor, Tensor]:
        """w, x̂, and how far from it each level is: (B, *shape, levels)."""
        centres, logs = self.centres.to(x.dtype), self.logs.to(x.dtype)
        base, away = torch.zeros((), dtype=x.dtype, device=x.device), x
        if reach:
            nearest = self._nearest(x)
            base, logs = centres[nearest], self._around(logs, nearest, reach, -math.inf)
            away, centres = x - base, self._steps(reach).to(x.dtype)
        weight = logs - ((away.unsqueeze(-1) - centres) / sigma.unsqueeze(-1)).square() / 2
        weight = weight.softmax(-1)
        mean = (weight * centres).sum(-1)
        return weight, base + mean, centres - mean.unsqueeze(-1)

    def _bins(self, x: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Edges of bins, (…, levels + 1), and how densely they are filled, (…, levels)."""
        density = self.logs.exp() / self.edges.diff()
        if not reach:
            return self.edges, density
        nearest, steps = self._nearest(x), self._steps(reach)
        first = self.edges[nearest].unsqueeze(-1)
        more = torch.cat([steps, steps[-1:] + self.step])
        return first + more, self._around(density, nearest, reach, 0.0)

    # ---------------------------------------------------------------- levels near x̃

    def _nearest(self, x: Tensor) -> Tensor:
        """The nearest of evenly spaced levels: its number."""
        number = ((x - self.centres[0].item()) / self.step).round()
        number = number.nan_to_num(0.0)  # x̃ itself stays NaN
        return number.clamp(0, len(self.centres) - 1).long()

    def _steps(self, reach: int) -> Tensor:
        """From a level to those around it."""
        return self.step * torch.arange(-reach, reach + 1).to(self.centres)

    def _around(self, values: Tensor, nearest: Tensor, reach: int, outside: float) -> Tensor:
        """Of the levels around these, for each channel its own; where there is none, `outside`."""
        rows = values.reshape(-1, values.shape[-1])
        channels = torch.arange(len(rows), device=rows.device) * rows.shape[-1]
        at = nearest + channels.reshape(-1, *[1] * (nearest.dim() - 2))
        padded = functional.pad(rows, (reach, reach), value=outside)
        table = padded.unfold(-1, 2 * reach + 1, 1).flatten(0, 1)  # a row for each level
        return functional.embedding(at, table.contiguous())


class _Known(torch.autograd.Function):
    """x̂ and v that were found already, with their gradient, which central moments give.

    Weights move by dw_k/w_k = u_k dx̃/σ² + (u_k² − 2δu_k) dσ/σ³ and a constant, where u = x_k − x̂
    and δ = x̃ − x̂. So dx̂ = v dx̃/σ² + (μ₃ − 2δv) dσ/σ³ and
    dv = μ₃ dx̃/σ² + (μ₄ − v² − 2δμ₃) dσ/σ³.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sigma: Tensor,
        formula: Formula | None,
        mean: Tensor,
        variance: Tensor,
        third: Tensor,
        fourth: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """formula: of x̂ and v, for derivatives of the gradient."""
        ctx.formula = formula
        ctx.save_for_backward(x, sigma, mean, variance, third, fourth)
        return mean.clone(), variance.clone()

    @staticmethod
    def backward(ctx: Any, gMean: Tensor, gVariance: Tensor) -> tuple[Tensor | None, ...]:
        x, sigma, mean, variance, third, fourth = ctx.saved_tensors
        if ctx.formula is not None and torch.is_grad_enabled():  # to be differentiated again
            found = ctx.formula(x, sigma)
            wanted = [value for value in (x, sigma) if value.requires_grad]
            slopes = iter(torch.autograd.grad(found, wanted, (gMean, gVariance), create_graph=True))
            gX, gSigma = (next(slopes) if v.requires_grad else None for v in (x, sigma))
            return gX, gSigma, None, None, None, None, None
        # in units of σ, of which float32 has no fourth power
        off, two = (x - mean) / sigma, variance / sigma / sigma
        three, four = third / sigma / sigma / sigma, fourth / sigma / sigma / sigma / sigma
        gVariance = gVariance * sigma
        gX = gMean * two + gVariance * three
        along = gMean * (three - 2 * off * two)
        along = along + gVariance * (four - two.square() - 2 * off * three)
        return gX, along.sum_to_size(sigma.shape), None, None, None, None, None


def _between(centres: Tensor) -> Tensor:
    """Half-way between levels, and as far beyond the first and the last."""
    inner = (centres[1:] + centres[:-1]) / 2
    return torch.cat([2 * centres[:1] - inner[:1], inner, 2 * centres[-1:] - inner[-1:]])
