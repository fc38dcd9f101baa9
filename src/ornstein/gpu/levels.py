"""The moments of `histogram`: all levels of a pixel are summed over in registers.

The weights w_k ∝ P_k exp(−(x̃ − x_k)²/2σ²) are as many as pixels times levels, and are never
written down. Sums are of distances to the likeliest level, so that nothing cancels. Evenly spaced
levels are looked at once, in distances to the one nearest to x̃, and again only where digits were
lost; if σ is small, only near ones are: all others weigh less than 2^−BITS of the likeliest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ornstein.gpu.launching import on_device_of, operator, padded, triton, usable

TILE = 512  # pixels of a program
ROOT = math.sqrt(math.log2(math.e) / 2)  # exp(−z²/2) = 2^−(ROOT z)²
BITS = 30.0  # by which a level must weigh less to be left out
MOST = 100.0  # by which levels may differ where the likeliest is not looked for first
CLOSE = 1e-3  # of a distance squared, the least variance that a difference of such squares gives
FAR = 1e15  # standard deviations

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
    def _about(  # type: ignore[no-untyped-def]
        centre, slope, bend, nearest, logs, reach, LEVELS: tl.constexpr, FOUR: tl.constexpr
    ):
        """Sums over evenly spaced levels, of steps from `centre`, itself so far from the nearest.

        A level j steps from the nearest one has the weight P 2^(j(slope − j bend)), in units of
        the nearest one's Gaussian.
        """
        middle = nearest.to(tl.float32)
        s0, s1, s2, s3, s4 = slope * 0, slope * 0, slope * 0, slope * 0, slope * 0
        if 2 * reach + 1 < LEVELS:
            for i in range(-reach, reach + 1):
                k = nearest + i
                log = tl.load(logs + k, mask=(k >= 0) & (k < LEVELS), other=-float("inf"))
                j = slope * 0 + i
                weight = tl.exp2(j * (slope - j * bend) + log)
                s0, s1, s2, s3, s4 = _added(weight, j - centre, s0, s1, s2, s3, s4, FOUR)
        else:
            for k in range(LEVELS):
                j = k - middle
                weight = tl.exp2(j * (slope - j * bend) + tl.load(logs + k))
                s0, s1, s2, s3, s4 = _added(weight, j - centre, s0, s1, s2, s3, s4, FOUR)
        return s0, s1, s2, s3, s4

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _over_even(  # type: ignore[no-untyped-def]
        seen, sharp, centres, logs, least, LEVELS: tl.constexpr, FOUR: tl.constexpr,
        BITS: tl.constexpr, CLOSE: tl.constexpr, FAR: tl.constexpr,
    ):  # fmt: skip
        """A level near x̃, and sums over those that can weigh anything."""
        begin = tl.load(centres)
        step = (tl.load(centres + LEVELS - 1) - begin) / (LEVELS - 1)
        long = step * sharp
        reach = tl.minimum(tl.sqrt(BITS - least) / long, LEVELS * 1.0).to(tl.int32) + 2
        place = tl.where(seen == seen, (seen - begin) / step + 0.5, 0.0)
        nearest = tl.minimum(tl.maximum(place, 0.0), LEVELS - 1.0).to(tl.int32)
        origin = tl.load(centres + nearest)
        off = tl.minimum(tl.maximum((seen - origin) * sharp, -FAR), FAR)
        # half a step at most, whatever rounding did to the choice of the nearest
        off = tl.where(nearest < LEVELS - 1, tl.minimum(off, long / 2), off)
        off = tl.where(nearest > 0, tl.maximum(off, -long / 2), off)
        slope = tl.where(seen == seen, 2 * off * long, seen)
        bend = long * long
        s0, s1, s2, s3, s4 = _about(0.0, slope, bend, nearest, logs, reach, LEVELS, FOUR)
        shift = s1 / s0
        poor = s2 / s0 - shift * shift < CLOSE * shift * shift
        if tl.max(poor.to(tl.int32), 0) > 0:  # digits went: once more, of distances to the mean
            s0, s1, s2, s3, s4 = _about(shift, slope, bend, nearest, logs, reach, LEVELS, FOUR)
        else:
            shift = shift * 0
        square = step * step
        origin += shift * step
        return origin, s0, s1 * step, s2 * square, s3 * square * step, s4 * square * square

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
        FOUR: tl.constexpr,
        TILE: tl.constexpr,
        ROOT: tl.constexpr,
        BITS: tl.constexpr,
        MOST: tl.constexpr,
        CLOSE: tl.constexpr,
        FAR: tl.constexpr,
    ):
        b, channel = tl.program_id(0).to(tl.int64), tl.program_id(1)
        n = tl.program_id(2) * TILE + tl.arange(0, TILE)
        inside = n < pixels
        place = (b * tl.num_programs(1) + channel) * pixels + n
        seen = tl.load(x + place, mask=inside, other=0.0)
        sharp = ROOT / tl.load(sigma + b)
        logs += channel * stride
        k = tl.arange(0, PADDED)
        least = tl.min(tl.load(logs + k, mask=k < LEVELS, other=0.0), 0)
        if least > -MOST:
            mode, s0, s1, s2, s3, s4 = _over_even(
                seen, sharp, centres, logs, least, LEVELS, FOUR, BITS, CLOSE, FAR
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
            four,
            TILE,
            ROOT,
            BITS,
            MOST if even and levels > 1 else -1.0,  # else always the other way
            CLOSE,
            FAR,
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
