"""x̂ and v of `histogram`: all levels of a pixel are summed over in registers.

The weights w_k ∝ P_k exp(−(x̃ − x_k)²/2σ²) are as many as pixels times levels, and are never
written down. Sums are of distances to the likeliest level, so that nothing cancels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ornstein.gpu.launching import on_device_of, operator, triton, usable

TILE = 256  # pixels of a program
ROOT = math.sqrt(math.log2(math.e) / 2)  # exp(−z²/2) = 2^−(ROOT z)²

if triton is not None:
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _levels(  # type: ignore[no-untyped-def]
        x,
        sigma,
        centres,
        logs,
        mean,
        variance,
        pixels,  # of a channel
        step,  # from the logs of one channel to those of the next; 0 where all share them
        LEVELS: tl.constexpr,
        TILE: tl.constexpr,
        ROOT: tl.constexpr,
    ):
        b, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
        n = tl.program_id(2) * TILE + tl.arange(0, TILE)
        inside = n < pixels
        place = (b * tl.num_programs(1) + channel) * pixels + n
        seen = tl.load(x + place, mask=inside, other=0.0)
        sharp = ROOT / tl.load(sigma + b)
        logs += channel * step
        best, mode = seen * 0 - float("inf"), seen * 0
        for k in range(LEVELS):
            centre = tl.load(centres + k)
            away = (seen - centre) * sharp
            size = tl.load(logs + k) - away * away
            mode = tl.where(size > best, centre, mode)
            best = tl.maximum(size, best)
        zeroth, first, second = seen * 0, seen * 0, seen * 0
        for k in range(LEVELS):
            centre = tl.load(centres + k)
            away = (seen - centre) * sharp
            weight = tl.exp2(tl.load(logs + k) - away * away - best)
            far = centre - mode
            zeroth += weight
            first += weight * far
            second += weight * far * far
        shift = first / zeroth
        tl.store(mean + place, mode + shift, mask=inside)
        tl.store(variance + place, second / zeroth - shift * shift, mask=inside)


def weighs(x: Tensor) -> bool:
    """Whether `weighed` can take these."""
    return usable(x) and x.dtype == torch.float32


def weighed(x: Tensor, sigma: Tensor, centres: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """x̂ and v, without gradient: like x, (B, channels, pixels).

    sigma: (B,). centres: (levels,). logs: log₂ P, (channels or 1, levels). All float32.
    """
    mean, variance = torch.ops.ornstein.weighed(x, sigma, centres, logs)
    return mean, variance


def _run(x: Tensor, sigma: Tensor, centres: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = _like(x, sigma, centres, logs)
    B, channels, pixels = x.shape
    step = logs.shape[1] if logs.shape[0] > 1 else 0
    with on_device_of(x):
        _levels[(B, channels, -(-pixels // TILE))](
            x.contiguous(),
            sigma.contiguous(),
            centres.contiguous(),
            logs.contiguous(),
            mean,
            variance,
            pixels,
            step,
            len(centres),
            TILE,
            ROOT,
            num_warps=4,
        )
    return mean, variance


def _like(x: Tensor, sigma: Tensor, centres: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


operator(
    "weighed(Tensor x, Tensor sigma, Tensor centres, Tensor logs) -> (Tensor, Tensor)", _run, _like
)
