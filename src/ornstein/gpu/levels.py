"""The moments of `histogram`: all levels of a pixel are summed over in registers.

The weights w_k ∝ P_k exp(−(x̃ − x_k)²/2σ²) are as many as pixels times levels, and are never
written down. Sums are of distances to the likeliest level, so that nothing cancels. Where levels
are evenly spaced and σ is small, only those near x̃ are looked at: all others weigh less than
2^−BITS of the likeliest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ornstein.gpu.launching import on_device_of, operator, padded, triton, usable

TILE = 512  # pixels of a program
ROOT = math.sqrt(math.log2(math.e) / 2)  # exp(−z²/2) = 2^−(ROOT z)²
BITS = 30.0

if triton is not None:
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _added(  # type: ignore[no-untyped-def]
        weight, far, s0, s1, s2, s3, s4, FOUR: tl.constexpr
    ):
        """Σ w, Σ w d, … Σ w d⁴ with one more level."""
        part = weight * far
        s0 += weight
        s1 += part
        s2 += part * far
        if FOUR:
            cube = part * far * far
            s3 += cube
            s4 += cube * far
        return s0, s1, s2, s3, s4

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _over_all(  # type: ignore[no-untyped-def]
        seen, sharp, centres, logs, LEVELS: tl.constexpr, FOUR: tl.constexpr
    ):
        """The likeliest level, and sums over all."""
        best, mode = seen * 0 - float("inf"), seen * 0
        for k in range(LEVELS):
            centre = tl.load(centres + k)
            away = (seen - centre) * sharp
            size = tl.load(logs + k) - away * away
            mode = tl.where(size > best, centre, mode)
            best = tl.maximum(size, best)
        s0, s1, s2, s3, s4 = seen * 0, seen * 0, seen * 0, seen * 0, seen * 0
        for k in range(LEVELS):
            centre = tl.load(centres + k)
            away = (seen - centre) * sharp
            weight = tl.exp2(tl.load(logs + k) - away * away - best)
            far = centre - mode
            s0, s1, s2, s3, s4 = _added(weight, far, s0, s1, s2, s3, s4, FOUR)
        return mode, s0, s1, s2, s3, s4

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _over_near(  # type: ignore[no-untyped-def]
        seen, sharp, centres, logs, step, reach, LEVELS: tl.constexpr, FOUR: tl.constexpr
    ):
        """The same, over levels that are at most `reach` from the nearest one."""
        place = (seen - tl.load(centres)) / step + 0.5
        # nothing, as infinity, is somewhere
        nearest = tl.minimum(tl.maximum(place, 0.0), LEVELS - 1.0).to(tl.int32)
        off, long = (seen - tl.load(centres + nearest)) * sharp, step * sharp
        best, mode = seen * 0 - float("inf"), seen * 0
        for j in range(-reach, reach + 1):
            k = nearest + j
            away = off - j * long
            log = tl.load(logs + k, mask=(k >= 0) & (k < LEVELS), other=-float("inf"))
            size = log - away * away
            mode = tl.where(size > best, j, mode)
            best = tl.maximum(size, best)
        s0, s1, s2, s3, s4 = seen * 0, seen * 0, seen * 0, seen * 0, seen * 0
        for j in range(-reach, reach + 1):
            k = nearest + j
            away = off - j * long
            log = tl.load(logs + k, mask=(k >= 0) & (k < LEVELS), other=-float("inf"))
            weight = tl.exp2(log - away * away - best)
            far = (j - mode) * step
            s0, s1, s2, s3, s4 = _added(weight, far, s0, s1, s2, s3, s4, FOUR)
        mode = tl.load(centres + nearest + mode.to(tl.int32))
        return mode, s0, s1, s2, s3, s4

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _levels(  # type: ignore[no-untyped-def]
        x,
        sigma,
        centres,
        logs,
        out,  # (2 or 4, B, channels, pixels)
        pixels,  # of a channel
        stride,  # from the logs of one channel to those of the next; 0 where all share them
        LEVELS: tl.constexpr,
        PADDED: tl.constexpr,
        EVEN: tl.constexpr,
        FOUR: tl.constexpr,
        TILE: tl.constexpr,
        ROOT: tl.constexpr,
        BITS: tl.constexpr,
    ):
        b, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
        n = tl.program_id(2) * TILE + tl.arange(0, TILE)
        inside = n < pixels
        place = (b * tl.num_programs(1) + channel) * pixels + n
        seen = tl.load(x + place, mask=inside, other=0.0)
        sharp = ROOT / tl.load(sigma + b)
        logs += channel * stride
        reach = LEVELS
        step = sharp * 0
        if EVEN:
            step = (tl.load(centres + LEVELS - 1) - tl.load(centres)) / (LEVELS - 1)
            k = tl.arange(0, PADDED)
            least = tl.min(tl.load(logs + k, mask=k < LEVELS, other=0.0))
            wide = tl.sqrt(BITS - least) / (step * sharp)  # levels
            reach = tl.minimum(wide, LEVELS * 1.0).to(tl.int32) + 2
        if 2 * reach + 1 < LEVELS:
            mode, s0, s1, s2, s3, s4 = _over_near(
                seen, sharp, centres, logs, step, reach, LEVELS, FOUR
            )
        else:
            mode, s0, s1, s2, s3, s4 = _over_all(seen, sharp, centres, logs, LEVELS, FOUR)
        shift, square = s1 / s0, s2 / s0
        variance = tl.maximum(square - shift * shift, 0.0)
        size = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * pixels
        tl.store(out + place, mode + shift, mask=inside)
        tl.store(out + size + place, variance, mask=inside)
        if FOUR:
            cube, fourth = s3 / s0, s4 / s0
            third = cube - shift * (3 * square - 2 * shift * shift)
            fourth -= shift * (4 * cube - shift * (6 * square - 3 * shift * shift))
            tl.store(out + 2 * size + place, third, mask=inside)
            tl.store(out + 3 * size + place, tl.maximum(fourth, 0.0), mask=inside)


def weighs(x: Tensor) -> bool:
    """Whether `weighed` can take these."""
    return usable(x) and x.dtype == torch.float32


def weighed(
    x: Tensor, sigma: Tensor, centres: Tensor, logs: Tensor, even: bool = False, four: bool = False
) -> Tensor:
    """Mean and central moments, without gradient: (2, *x.shape), or (4, *x.shape) up to the fourth.

    x: (B, channels, pixels). sigma: (B,). centres: (levels,), from low to high; even: whether they
    are evenly spaced. logs: log₂ P, (channels or 1, levels). All float32.
    """
    found: Tensor = torch.ops.ornstein.weighed(x, sigma, centres, logs, even, four)
    return found


def _run(x: Tensor, sigma: Tensor, centres: Tensor, logs: Tensor, even: bool, four: bool) -> Tensor:
    out = _like(x, sigma, centres, logs, even, four)
    B, channels, pixels = x.shape
    levels = len(centres)
    with on_device_of(x):
        _levels[(B, channels, -(-pixels // TILE))](
            x.contiguous(),
            sigma.contiguous(),
            centres.contiguous(),
            logs.contiguous(),
            out,
            pixels,
            levels if logs.shape[0] > 1 else 0,
            levels,
            padded(levels),
            even and levels > 1,
            four,
            TILE,
            ROOT,
            BITS,
            num_warps=4,
        )
    return out


def _like(
    x: Tensor, sigma: Tensor, centres: Tensor, logs: Tensor, even: bool, four: bool
) -> Tensor:
    return x.new_empty((4 if four else 2, *x.shape))


operator(
    "weighed(Tensor x, Tensor sigma, Tensor centres, Tensor logs, bool even, bool four) -> Tensor",
    _run,
    _like,
)
