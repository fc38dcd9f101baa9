"""Group normalisation and what surrounds it, on a GPU in one pass over the image.

    y = drop(silu(γ (x + shift − μ)/√(v + eps) + β)),      μ, v over a group's channels and places

Written out in tensor operations each of these reads and writes the whole image. Here a program
takes some groups of one example: it reads x, finds μ and v, reads it again while it is still in the
cache, and writes y. The backward pass does the same with x and the gradient. Images lie in memory
with the channels last. Statistics are float32, by sums about a pivot, so that nothing cancels.

Which values are dropped is a hash of (seed, place), so that the backward pass can ask again.
`plain` is the same in tensor operations; compiled networks on a GPU with Triton use the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton: CPU builds, other platforms
    triton = None

HALVES = (torch.bfloat16, torch.float16)
KINDS = (*HALVES, torch.float32)
COLUMNS = 32  # channels of a program, about
LARGE = 512  # places of an image that is read in larger pieces
Statistics = tuple[Tensor, Tensor, Tensor]


def usable(x: Tensor, norm: nn.GroupNorm) -> bool:
    """Whether the kernels can take this image, (N, C, H, W), in a compiled network."""
    return (
        triton is not None
        and torch.compiler.is_compiling()
        and x.is_cuda
        and x.dtype in KINDS
        and x.numel() > 0
        and norm.num_channels // norm.num_groups <= 256
    )


def norm_act(
    x: Tensor,
    norm: nn.GroupNorm,
    shift: Tensor | None = None,
    silu: bool = True,
    drop: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """y as above: (N, C, H, W). shift: (N, C); seed: () int64, needed where drop > 0."""
    y: Tensor = _forward(
        x,
        shift,
        norm.weight,
        norm.bias,
        seed if drop else None,
        norm.num_groups,
        norm.eps,
        silu,
        drop,
    )[0]
    return y


def plain(
    x: Tensor,
    norm: nn.GroupNorm,
    shift: Tensor | None = None,
    silu: bool = True,
    drop: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """The same in tensor operations."""
    h = norm(x if shift is None else x + shift[:, :, None, None])
    h = F.silu(h) if silu else h
    if not drop:
        return h
    if seed is None:
        return F.dropout(h, drop)
    return torch.where(kept(h, drop, seed), h / (1 - drop), 0.0)


def kept(x: Tensor, drop: float, seed: Tensor) -> Tensor:
    """Which values stay: bool, like x. (H and W before C: places as they lie in memory.)"""
    N, C, H, W = x.shape
    place = torch.arange(x.numel(), device=x.device).reshape(N, H, W, C).permute(0, 3, 1, 2)
    return _mixed(place & 0xFFFFFFFF, seed) >= _threshold(drop)


def _threshold(drop: float) -> int:
    return min(round(drop * 2**32), 2**32 - 1)


def _mixed(place: Tensor, seed: Tensor) -> Tensor:
    """32 random bits, of which the upper ones are good: all that is asked of them here."""
    most = 0xFFFFFFFF
    h = ((place + (seed & most)) * 0x9E3779B1) & most
    h = h ^ (h >> 15) ^ ((seed >> 32) & most)
    return (h * 0x846CA68B) & most


# ---------------------------------------------------------------- the kernels

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _keep(place, low, high, threshold):  # type: ignore[no-untyped-def]
        h = (place.to(tl.uint32) + low) * 0x9E3779B1
        h = h ^ (h >> 15) ^ high
        return h * 0x846CA68B >= threshold

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _tanh(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
        if FAST:  # one instruction, good to 2⁻¹¹: more than a half type can tell
            t = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            t = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
        return t

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _read(pointer, at, p, inside, P: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
        if EVEN:
            v = tl.load(pointer + at).to(tl.float32)
        else:
            v = tl.load(pointer + at, mask=(p < P)[:, None] & inside[None, :], other=0.0)
            v = v.to(tl.float32)
        return v

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _norm_forward(  # type: ignore[no-untyped-def]
        x, shift, gamma, beta, seed, y, mean, rstd,
        eps, scale, threshold,
        C: tl.constexpr, P: tl.constexpr,
        CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, GP: tl.constexpr, PB: tl.constexpr,
        SHIFT: tl.constexpr, SILU: tl.constexpr, DROP: tl.constexpr, EVEN: tl.constexpr,
        FAST: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        n, block = tl.program_id(1), tl.program_id(0)
        columns = tl.arange(0, CB)
        inside = columns < GB * CG
        c = block * GB * CG + columns
        base = n.to(tl.int64) * (P * C)
        x += base
        y += base
        member = (columns[:, None] // CG == tl.arange(0, GP)[None, :]) & inside[:, None]
        pivot = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
        first = tl.zeros([PB, CB], tl.float32)
        second = tl.zeros([PB, CB], tl.float32)
        for start in tl.range(0, P, PB, num_stages=STAGES):
            p = start + tl.arange(0, PB)
            v = _read(x, p[:, None] * C + c[None, :], p, inside, P, EVEN) - pivot[None, :]
            if not EVEN:
                v = tl.where((p < P)[:, None] & inside[None, :], v, 0.0)
            first += v
            second += v * v
        sums = tl.sum(first, 0)
        move = tl.zeros([CB], tl.float32)
        if SHIFT:
            move = tl.load(shift + n * C + c, mask=inside, other=0.0).to(tl.float32)
        local = sums / P
        spread = tl.sum(second, 0) - sums * local  # Σ (v − mean of the channel)²
        local += pivot + move
        mu = tl.sum(tl.where(member, local[:, None], 0.0), 0) / CG  # (GP,)
        mu_c = tl.sum(tl.where(member, mu[None, :], 0.0), 1)  # (CB,)
        apart = spread + P * (local - mu_c) * (local - mu_c)
        variance = tl.sum(tl.where(member, apart[:, None], 0.0), 0) / (CG * P)
        r = 1.0 / tl.sqrt(variance + eps)
        r_c = tl.sum(tl.where(member, r[None, :], 0.0), 1)
        groups = tl.arange(0, GP)
        to = n * (C // CG) + block * GB + groups
        tl.store(mean + to, mu, mask=groups < GB)
        tl.store(rstd + to, r, mask=groups < GB)
        g = tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32) * r_c
        b = tl.load(beta + c, mask=inside, other=0.0).to(tl.float32) + (move - mu_c) * g
        if SILU:
            g, b = g * 0.5, b * 0.5
        low = tl.zeros([], tl.uint32)
        high = tl.zeros([], tl.uint32)
        if DROP:
            bits = tl.load(seed)
            low, high = bits.to(tl.uint32) + base.to(tl.uint32), (bits >> 32).to(tl.uint32)
        for start in tl.range(0, P, PB, num_stages=STAGES):
            p = start + tl.arange(0, PB)
            at = p[:, None] * C + c[None, :]
            v = _read(x, at, p, inside, P, EVEN) * g[None, :] + b[None, :]
            if SILU:  # v is half of what it was: silu(2v) = v + v tanh v
                v = v + v * _tanh(v, FAST)
            if DROP:
                v = tl.where(_keep(at, low, high, threshold), v * scale, 0.0)
            if EVEN:
                tl.store(y + at, v)
            else:
                tl.store(y + at, v, mask=(p < P)[:, None] & inside[None, :])

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _through(  # type: ignore[no-untyped-def]
        d, v, half, b, at, low, high, threshold,
        SILU: tl.constexpr, DROP: tl.constexpr, FAST: tl.constexpr,
    ):  # fmt: skip
        # back to the normalised image, up to the factor `through` of the caller
        if DROP:
            d = tl.where(_keep(at, low, high, threshold), d, 0.0)
        if SILU:  # silu′(2z) is ½(1 + t)(1 + z(1 − t)), t = tanh z
            z = v * half[None, :] + b[None, :]
            t = _tanh(z, FAST)
            d = (d + d * t) * (1.0 + z * (1.0 - t))
        return d

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _norm_backward(  # type: ignore[no-untyped-def]
        grad, x, shift, gamma, beta, seed, mean, rstd, dx, dgamma, dbeta, dshift,
        scale, threshold,
        C: tl.constexpr, P: tl.constexpr,
        CG: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, GP: tl.constexpr, PB: tl.constexpr,
        SHIFT: tl.constexpr, SILU: tl.constexpr, DROP: tl.constexpr, EVEN: tl.constexpr,
        FAST: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        n, block = tl.program_id(1), tl.program_id(0)
        columns = tl.arange(0, CB)
        inside = columns < GB * CG
        c = block * GB * CG + columns
        base = n.to(tl.int64) * (P * C)
        x += base
        grad += base
        dx += base
        member = (columns[:, None] // CG == tl.arange(0, GP)[None, :]) & inside[:, None]
        group = n * (C // CG) + block * GB + columns // CG
        r = tl.load(rstd + group, mask=inside, other=0.0)
        centre = -tl.load(mean + group, mask=inside, other=0.0)
        if SHIFT:
            centre += tl.load(shift + n * C + c, mask=inside, other=0.0).to(tl.float32)
        centre = centre * r  # x̂ = r x + centre
        g = tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(beta + c, mask=inside, other=0.0).to(tl.float32) * 0.5
        half = g * 0.5
        through = 0.5 if SILU else 1.0  # what sums of dz are to be multiplied by
        if DROP:
            through = through * scale
        low = tl.zeros([], tl.uint32)
        high = tl.zeros([], tl.uint32)
        if DROP:
            bits = tl.load(seed)
            low, high = bits.to(tl.uint32) + base.to(tl.uint32), (bits >> 32).to(tl.uint32)
        plain = tl.zeros([PB, CB], tl.float32)  # dz
        along = tl.zeros([PB, CB], tl.float32)  # dz x̂
        total = tl.zeros([PB, CB], tl.float32)  # x̂
        for start in tl.range(0, P, PB, num_stages=STAGES):
            p = start + tl.arange(0, PB)
            at = p[:, None] * C + c[None, :]
            v = _read(x, at, p, inside, P, EVEN) * r[None, :] + centre[None, :]
            d = _read(grad, at, p, inside, P, EVEN)
            d = _through(d, v, half, b, at, low, high, threshold, SILU, DROP, FAST)
            plain += d
            along += d * v
            if SHIFT:
                if not EVEN:
                    v = tl.where((p < P)[:, None] & inside[None, :], v, 0.0)
                total += v
        flat, tilt = tl.sum(plain, 0) * through, tl.sum(along, 0) * through
        tl.store(dgamma + n * C + c, tilt, mask=inside)
        tl.store(dbeta + n * C + c, flat, mask=inside)
        count = CG * P
        flats = tl.sum(tl.where(member, (g * flat)[:, None], 0.0), 0) / count
        tilts = tl.sum(tl.where(member, (g * tilt)[:, None], 0.0), 0) / count
        flat_c = tl.sum(tl.where(member, flats[None, :], 0.0), 1) * r
        tilt_c = tl.sum(tl.where(member, tilts[None, :], 0.0), 1) * r
        if SHIFT:
            back = r * g * flat - P * flat_c - tl.sum(total, 0) * tilt_c
            tl.store(dshift + n * C + c, back, mask=inside)
        g = g * r * through
        for start in tl.range(0, P, PB, num_stages=STAGES):
            p = start + tl.arange(0, PB)
            at = p[:, None] * C + c[None, :]
            v = _read(x, at, p, inside, P, EVEN) * r[None, :] + centre[None, :]
            d = _read(grad, at, p, inside, P, EVEN)
            d = _through(d, v, half, b, at, low, high, threshold, SILU, DROP, FAST)
            d = d * g[None, :] - flat_c[None, :] - v * tilt_c[None, :]
            if EVEN:
                tl.store(dx + at, d)
            else:
                tl.store(dx + at, d, mask=(p < P)[:, None] & inside[None, :])


def _sizes(C: int, P: int, groups: int, backward: bool) -> dict[str, int]:
    """How an image is cut into programs, whole groups each, and read; measured on an H200."""
    CG = C // groups
    GB = 1
    while GB * 2 * CG <= COLUMNS and groups % (GB * 2) == 0:
        GB *= 2
    CB = 1 << (GB * CG - 1).bit_length()
    rows, warps, stages = (32, 2, 1) if P < LARGE else (64, 4, 3) if backward else (128, 8, 1)
    PB = min(rows, 1 << (P - 1).bit_length())
    return {
        "C": C, "P": P, "CG": CG, "GB": GB, "CB": CB, "GP": 1 << GB.bit_length(), "PB": PB,
        "EVEN": CB == GB * CG and P % PB == 0,  # no masks
        "STAGES": stages, "num_warps": warps,
    }  # fmt: skip


def _last(x: Tensor) -> Tensor:
    """With the channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("ornstein::norm_act", mutates_args=())
def _forward(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    drop: float,
) -> Statistics:
    x = _last(x)
    N, C, H, W = x.shape
    y = torch.empty_like(x)
    mean = torch.empty((N, groups), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    sizes = _sizes(C, H * W, groups, False)
    grid = (groups // sizes["GB"], N)
    shift = None if shift is None else shift.contiguous()
    _norm_forward[grid](
        x, x if shift is None else shift, weight, bias, x if seed is None else seed, y, mean, rstd,
        eps, 1 / (1 - drop), _threshold(drop),
        **sizes, SHIFT=shift is not None, SILU=silu, DROP=drop > 0, FAST=x.dtype in HALVES,
    )  # fmt: skip
    return y, mean, rstd


@_forward.register_fake
def _(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    drop: float,
) -> Statistics:
    mean = torch.empty((x.shape[0], groups), dtype=torch.float32, device=x.device)
    return torch.empty_like(x, memory_format=torch.channels_last), mean, torch.empty_like(mean)


@torch.library.custom_op("ornstein::norm_act_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    drop: float,
) -> tuple[Tensor, Tensor]:
    grad, x = _last(grad), _last(x)
    N, C, H, W = x.shape
    dx = torch.empty_like(x)
    parts = torch.empty((3, N, C), dtype=torch.float32, device=x.device)
    sizes = _sizes(C, H * W, groups, True)
    grid = (groups // sizes["GB"], N)
    shift = None if shift is None else shift.contiguous()
    _norm_backward[grid](
        grad, x, x if shift is None else shift, weight, bias, x if seed is None else seed,
        mean, rstd, dx, parts[0], parts[1], parts[2],
        1 / (1 - drop), _threshold(drop),
        **sizes, SHIFT=shift is not None, SILU=silu, DROP=drop > 0, FAST=x.dtype in HALVES,
    )  # fmt: skip
    return dx, parts


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    drop: float,
) -> tuple[Tensor, Tensor]:
    parts = torch.empty((3, *x.shape[:2]), dtype=torch.float32, device=x.device)
    return torch.empty_like(x, memory_format=torch.channels_last), parts


def _keep_for_later(ctx: Any, inputs: tuple[Any, ...], output: Statistics) -> None:
    x, shift, weight, bias, seed, groups, _, silu, drop = inputs
    ctx.save_for_backward(x, shift, weight, bias, seed, output[1], output[2])
    ctx.options = groups, silu, drop


def _pull(ctx: Any, grad: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
    x, shift, weight, bias, seed, mean, rstd = ctx.saved_tensors
    groups, silu, drop = ctx.options
    dx, parts = _backward(grad, x, shift, weight, bias, seed, mean, rstd, groups, silu, drop)
    moved = None if shift is None else parts[2].to(shift.dtype)
    dgamma, dbeta = parts[:2].sum(1)
    return (
        dx, moved, dgamma.to(weight.dtype), dbeta.to(bias.dtype),
        None, None, None, None, None,
    )  # fmt: skip


_forward.register_autograd(_pull, setup_context=_keep_for_later)
