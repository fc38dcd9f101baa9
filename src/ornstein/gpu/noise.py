"""y = r x + L ε in one pass: ε is drawn on the way, x is read once, y and ε are written once.

The noise is that of Philox, four numbers for each count, keyed by 64 bits of torch's own generator,
and Box and Muller's transform of it; numbered by (example, variable, coordinate), so that it does
not depend on how the work is cut up.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ornstein.gpu.launching import on_device_of, operator, padded, triton, usable

MOST_VARIABLES = 4  # that the kernel is written out for
TILE = 1024  # coordinates of a program
QUARTER = math.pi / 2
KINDS = (torch.float32, torch.bfloat16, torch.float16)

if triton is not None:
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _turned(bits, QUARTER: tl.constexpr):  # type: ignore[no-untyped-def]
        """A point of the unit circle: two bits say the quarter, the others where in it."""
        x = (bits << 2).to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-32 * QUARTER)
        z = x * x  # |x| ≤ π/4: the series end below a rounding
        sin = x * (1 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880)))))
        cos = 1 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320))))
        cos = (cos.to(tl.uint32, bitcast=True) ^ (bits & 0x80000000)).to(tl.float32, bitcast=True)
        swap = (bits & 0x40000000) != 0
        first, second = tl.where(swap, sin, cos), tl.where(swap, cos, sin)
        return first, second

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _radius(bits):  # type: ignore[no-untyped-def]
        """√(−2 log u) for u = (bits + ½)/2³²: at most 6.8."""
        u = bits.to(tl.float32) * 2.0**-32 + 2.0**-33
        return tl.sqrt(-1.3862943611198906 * tl.log2(u))  # −2 log 2

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _drawn(  # type: ignore[no-untyped-def]
        seed, b, j: tl.constexpr, tile, TILE: tl.constexpr, QUARTER: tl.constexpr
    ):
        """Standard normal noise of variable j of example b: Philox, then Box and Muller."""
        q = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)  # four at a time
        zero = q * 0
        first, second, third, fourth = tl.philox(seed, q, zero + b.to(tl.uint32), zero + j, zero)
        near, far = _radius(first), _radius(third)
        a, b_ = _turned(second, QUARTER)
        c, d = _turned(fourth, QUARTER)
        pairs = tl.join(tl.join(near * a, far * c), tl.join(near * b_, far * d))
        return pairs.reshape([TILE])

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _write(  # type: ignore[no-untyped-def]
        i: tl.constexpr,
        own,
        e0,
        e1,
        e2,
        x,
        origin,
        Phi,
        direction,
        L,
        y,
        noise,
        d,
        inside,
        K: tl.constexpr,
        STATE: tl.constexpr,
    ):
        """Variable i of y and ε; e0 … are the noises before its own."""
        first = tl.load(Phi + i * K)
        if STATE:
            m = x * first.to(tl.float32)
            for j in tl.static_range(1, K):
                other = tl.load(origin + j * d, mask=inside, other=0.0).to(tl.float32)
                m += other * tl.load(Phi + i * K + j).to(tl.float32)
        else:
            response = first * tl.load(direction)
            for j in tl.static_range(1, K):
                response += tl.load(Phi + i * K + j) * tl.load(direction + j)
            m = x * response.to(tl.float32)
        if i > 0:
            m += tl.load(L + i * K).to(tl.float32) * e0
        if i > 1:
            m += tl.load(L + i * K + 1).to(tl.float32) * e1
        if i > 2:
            m += tl.load(L + i * K + 2).to(tl.float32) * e2
        m += tl.load(L + i * K + i).to(tl.float32) * own
        tl.store(noise + i * d, own, mask=inside)
        tl.store(y + i * d, m, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _noised(  # type: ignore[no-untyped-def]
        origin,
        Phi,
        direction,
        L,
        seed,
        y,
        noise,
        d,
        step,  # from the matrices of one example to those of the next; 0 where all share them
        K: tl.constexpr,
        STATE: tl.constexpr,
        TILE: tl.constexpr,
        QUARTER: tl.constexpr,
    ):
        b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
        n = tile * TILE + tl.arange(0, TILE)
        inside = n < d
        Phi, L = Phi + b * step, L + b * step
        y, noise = y + b * K * d + n, noise + b * K * d + n
        origin += b * (K if STATE else 1) * d + n
        key = tl.load(seed)
        x = tl.load(origin, mask=inside, other=0.0).to(tl.float32)
        kept = noise.dtype.element_ty  # y is made of ε as it is returned
        # written out for at most four variables: old versions of Triton have no lists
        e = _drawn(key, b, 0, tile, TILE, QUARTER).to(kept).to(tl.float32)
        _write(0, e, e, e, e, x, origin, Phi, direction, L, y, noise, d, inside, K, STATE)
        if K > 1:
            f = _drawn(key, b, 1, tile, TILE, QUARTER).to(kept).to(tl.float32)
            _write(1, f, e, e, e, x, origin, Phi, direction, L, y, noise, d, inside, K, STATE)
        if K > 2:
            g = _drawn(key, b, 2, tile, TILE, QUARTER).to(kept).to(tl.float32)
            _write(2, g, e, f, f, x, origin, Phi, direction, L, y, noise, d, inside, K, STATE)
        if K > 3:
            h = _drawn(key, b, 3, tile, TILE, QUARTER).to(kept).to(tl.float32)
            _write(3, h, e, f, g, x, origin, Phi, direction, L, y, noise, d, inside, K, STATE)


def draws(origin: Tensor, variables: int) -> bool:
    """Whether `noised` can take this origin."""
    return usable(origin) and origin.dtype in KINDS and variables <= MOST_VARIABLES


def noised(
    origin: Tensor,
    Phi: Tensor,
    direction: Tensor,
    L: Tensor,
    state: bool,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """y = Φ m₀ + L ε and its new noise ε, both (B, K, d).

    origin: the state m₀, (B, K, d), or x, (B, d), with m₀ = direction·x. Φ, L: (B or 1, K, K).
    """
    if generator is None:
        # an `empty` for each call keeps compilers from taking two draws for one
        seed = torch.ops.ornstein.seed(torch.empty(1, dtype=torch.int64, device=origin.device))
    else:
        seed = _any(origin.device, generator)
    y, noise = torch.ops.ornstein.noised(origin, Phi, direction, L, seed, state)
    return y, noise


def _any(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """64 random bits: (1,)."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), device=device, generator=generator)


def _run_noised(
    origin: Tensor, Phi: Tensor, direction: Tensor, L: Tensor, seed: Tensor, state: bool
) -> tuple[Tensor, Tensor]:
    y, noise = _like_noised(origin, Phi, direction, L, seed, state)
    B, K, d = y.shape
    origin, Phi, L = origin.contiguous(), Phi.contiguous(), L.contiguous()
    tile = max(128, min(TILE, padded(d)))
    step = K * K if Phi.shape[0] > 1 else 0
    options: dict[str, Any] = {"num_warps": tile // 128}  # four coordinates a thread
    with on_device_of(origin):
        _noised[(B, -(-d // tile))](
            origin,
            Phi,
            direction.contiguous(),
            L,
            seed,
            y,
            noise,
            d,
            step,
            K,
            state,
            tile,
            QUARTER,
            **options,
        )
    return y, noise


def _like_noised(
    origin: Tensor, Phi: Tensor, direction: Tensor, L: Tensor, seed: Tensor, state: bool
) -> tuple[Tensor, Tensor]:
    shape = origin.shape[0], L.shape[-1], origin.shape[-1]
    return origin.new_empty(shape), origin.new_empty(shape)


operator(
    "noised(Tensor origin, Tensor Phi, Tensor direction, Tensor L, Tensor seed, bool state) "
    "-> (Tensor, Tensor)",
    _run_noised,
    _like_noised,
)
operator("seed(Tensor place) -> Tensor", lambda place: _any(place.device), torch.empty_like)
