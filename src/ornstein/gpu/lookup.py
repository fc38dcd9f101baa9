"""Φ and L at a batch of times from the kept table of a `clock`: one kernel, a program per time.

The formulas of `clock`: the panel and the place u in it, both polynomials in u by Horner's rule,
the columns, their reduction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ornstein.gpu.launching import on_device_of, operator, padded, triton, usable

MOST_VARIABLES = 8  # loops over variables are unrolled
LARGEST = 1024  # entries of the padded columns

if triton is not None:
    import triton.language as tl

    from ornstein.gpu.reduction import reflection

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _look_up(  # type: ignore[no-untyped-def]
        clock,
        span,
        width,
        X,
        spread,
        past,
        past_errors,
        initial,
        propagator,
        lower,
        errors,
        count,
        eps,
        DEGREE: tl.constexpr,
        K: tl.constexpr,
        N0: tl.constexpr,  # columns of the initial factor …
        M: tl.constexpr,  # … and of the noise on this panel
        KP: tl.constexpr,
        NP: tl.constexpr,
        GIVEN_X: tl.constexpr,
        SPANNED: tl.constexpr,
    ):
        b = tl.program_id(0).to(tl.int64)
        k, n = tl.arange(0, KP), tl.arange(0, NP)
        r, c = k[:, None], n[None, :]
        s = tl.load(clock + b).to(tl.float64)
        tau = s
        if SPANNED:
            tau = s * (tl.load(span) + tl.load(span + 1) * s)
            horizon, tolerance = tl.load(span + 2), tl.load(span + 3)
        ratio = tau * tl.load(width + 1)
        panel = tl.where(ratio > 0, tl.minimum(tl.ceil(ratio) - 1.0, count - 1.0), 0.0)
        u = ratio - panel  # NaN for a time that is NaN, which is on the first panel
        before = past + panel.to(tl.int64) * (2 * K * K)
        # columns of W: Φ L₀ | Φ(u) L at the panel's start | noise since then
        at = c - (N0 + K)
        fresh = (r < K) & (at >= 0) & (at < M)
        C = tl.zeros([KP, NP], tl.float64)
        for power in tl.static_range(DEGREE, -1, -1):
            place = spread + power * (K * M) + r * M + at
            C = C * u + tl.load(place, mask=fresh, other=0.0)
        Phi = tl.zeros([KP, NP], tl.float64)
        W = tl.zeros([KP, NP], tl.float64)
        for m in tl.static_range(K):
            local = tl.zeros([KP], tl.float64)  # the m-th column of Φ(u)
            for power in tl.static_range(DEGREE, -1, -1):
                local = local * u + tl.load(X + (power * K + k) * K + m, mask=k < K, other=0.0)
            older = (n >= N0) & (n < N0 + K)
            row = tl.load(before + m * (2 * K) + K + n - N0, mask=older, other=0.0)
            for j in tl.static_range(K if N0 > 0 else 0):
                part = tl.load(initial + j * N0 + n, mask=n < N0, other=0.0)
                row += tl.load(before + m * (2 * K) + j) * part
            W += local[:, None] * row[None, :]
            turn = tl.load(before + m * (2 * K) + n, mask=n < K, other=0.0)
            Phi += local[:, None] * turn[None, :]
        # the root last: it has a slow path, and no load is moved across that
        W += C * tl.sqrt(u * tl.load(width))
        bound = tl.abs(W)
        L = tl.zeros([KP, NP], tl.float64)
        error = tl.sum(tl.zeros([KP], tl.float64), 0)
        for i in tl.static_range(K):
            W, bound, column, lost, _v, _sign, _scale = reflection(W, bound, k, n, i)
            L = tl.where(c == i, column[:, None], L)
            error = tl.where((lost > error) | (lost != lost), lost, error)
        error = tl.sqrt(error) * eps
        if not GIVEN_X:
            older_error = tl.load(past_errors + panel.to(tl.int64))
            error = tl.where(older_error > error, older_error, error)
        if SPANNED:  # never a wrong kernel: NaN
            good = (s >= 0) & (s <= horizon) & (error <= tolerance)
            Phi = tl.where(good, Phi, float("nan"))
            L = tl.where(good, L, float("nan"))
            error = tl.where(good, error, float("nan"))
        inside = (r < K) & (c < K)
        tl.store(propagator + b * K * K + r * K + c, Phi, mask=inside)
        tl.store(lower + b * K * K + r * K + c, L, mask=inside)
        tl.store(errors + b, error)


def looks_up(clock: Tensor, K: int, noise: int, initial: Tensor | None) -> bool:
    """Whether `look_up` can take K variables and so many columns of noise."""
    N = (0 if initial is None else initial.shape[-1]) + K + noise
    return usable(clock) and K <= MOST_VARIABLES and padded(K) * padded(N) <= LARGEST


def look_up(
    clock: Tensor, span: Tensor | None, table: list[Tensor], initial: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Φ, L and error at places of a clock, (B,); table: see `Table.parts`.

    With span = (a, b, horizon, tolerance), `clock` holds times s and τ = s(a + b s); what is
    outside the horizon or has a larger error is NaN.
    """
    Phi, L, error = torch.ops.ornstein.look_up(clock, span, table, initial, eps)
    return Phi, L, error


def _run_look_up(
    clock: Tensor, span: Tensor | None, table: list[Tensor], initial: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    clock, table = clock.contiguous(), [t.contiguous() for t in table]
    Phi, L, error = out = _like_look_up(clock, span, table, initial, eps)
    K, M = table[1].shape[-1], table[2].shape[-1] // table[1].shape[-1]
    N0 = 0 if initial is None else initial.shape[-1]
    unused = table[0]  # a pointer that is never followed
    start = unused if initial is None or N0 == 0 else initial.contiguous()
    degree, count = table[1].shape[0] - 1, table[3].shape[0]
    sizes = (degree, K, N0, M, padded(K), padded(N0 + K + M))
    flags = (initial is not None, span is not None)
    bounds = unused if span is None else span
    options: dict[str, Any] = {"num_warps": 1}
    with on_device_of(clock):
        _look_up[(clock.shape[0],)](
            clock, bounds, *table, start, *out, count, eps, *sizes, *flags, **options
        )
    return Phi, L, error


def _like_look_up(
    clock: Tensor, span: Tensor | None, table: list[Tensor], initial: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    B, K = clock.shape[0], table[1].shape[-1]
    like = table[1]
    return like.new_empty(B, K, K), like.new_empty(B, K, K), like.new_empty(B)


operator(
    "look_up(Tensor clock, Tensor? span, Tensor[] table, Tensor? initial, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    _run_look_up,
    _like_look_up,
)
