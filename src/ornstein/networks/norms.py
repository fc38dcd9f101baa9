"""Triton kernels of `fused`: a norm and what surrounds it, forward and backward.

A program takes some groups of channels of one example: it goes over the image twice, the second
time mostly in the cache. EVEN: no masks are needed. FAST: half types, which do not tell an exact
tanh from that of one instruction.
"""

from __future__ import annotations

import torch

from ornstein.gpu import triton

HALVES = (torch.bfloat16, torch.float16)
KINDS = (*HALVES, torch.float32)
COLUMNS = 32  # channels of a program, about
LARGE = 512  # places of an image that is read in larger pieces


def sizes(C: int, P: int, groups: int, backward: bool) -> dict[str, int]:
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


if triton is not None:
    import triton.language as tl

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
    def norm_forward(  # type: ignore[no-untyped-def]
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
    def norm_backward(  # type: ignore[no-untyped-def]
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
