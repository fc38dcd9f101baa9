"""The orthogonal reduction of `linalg` as one kernel: a program per matrix, all in registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ornstein.gpu.launching import on_device_of, operator, padded, triton, usable

LARGEST = 8192  # entries of a padded matrix that fit the registers of a program


def fits(columns: Tensor) -> bool:
    """Whether the kernel can take these columns: (..., K, N)."""
    K, N = columns.shape[-2:]
    return columns.is_cuda and usable(columns) and padded(K) * padded(N) <= LARGEST


if triton is not None:
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def reflection(W, bound, k, n, i: tl.constexpr):  # type: ignore[no-untyped-def]
        """Row i by a reflection from the right: W, bound, i-th column of L, error², reflector.

        One root and one division: each has a slow path that nothing is moved across.
        """
        r, c = k[:, None], n[None, :]
        here = (r == i) & (c >= i)
        row = tl.sum(tl.where(here, W, 0.0), 0)
        sums = tl.sum(tl.where(here, bound, 0.0), 0)
        norm = tl.sqrt(tl.sum(row * row, 0))
        size2 = tl.sum(sums * sums, 0)
        first = tl.sum(tl.where(n == i, row, 0.0), 0)
        sign = tl.where(first < 0, -1.0, 1.0)
        pivot = first + sign * norm
        half = norm * tl.abs(pivot)
        scale = tl.where(half > 0, 1.0 / half, 0.0)
        v = tl.where(n == i, pivot, row)
        f = tl.where(k > i, tl.sum(W * v[None, :], 1) * scale, 0.0)
        W = W - f[:, None] * v[None, :]
        bound = bound + tl.abs(f)[:, None] * sums[None, :]
        below = -sign * tl.sum(tl.where(c == i, W, 0.0), 1)
        column = tl.where(k == i, norm, tl.where(k > i, below, 0.0))
        inverse = tl.abs(pivot) * scale  # 1/norm
        lost = tl.where((size2 > 0) & (half <= 0), float("inf"), size2 * inverse * inverse)
        return W, bound, column, lost, v, sign, scale

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _reduce(  # type: ignore[no-untyped-def]
        columns,
        lower,
        rows,
        signs,
        errors,
        N,
        eps,
        K: tl.constexpr,
        KP: tl.constexpr,
        NP: tl.constexpr,
        WITH_ROWS: tl.constexpr,
    ):
        b = tl.program_id(0).to(tl.int64)
        k, n = tl.arange(0, KP), tl.arange(0, NP)
        r, c = k[:, None], n[None, :]
        inside = (r < K) & (c < N)
        W = tl.load(columns + b * K * N + r * N + c, mask=inside, other=0.0)
        bound = tl.abs(W)
        error = tl.sum(tl.zeros([KP], tl.float64), 0)
        for i in tl.static_range(K):
            W, bound, column, lost, v, sign, scale = reflection(W, bound, k, n, i)
            tl.store(lower + b * K * K + k * K + i, column, mask=k < K)
            error = tl.where((lost > error) | (lost != lost), lost, error)
            if WITH_ROWS:  # the reflectors wait where the rows will be
                tl.store(rows + b * K * N + i * N + n, v, mask=n < N)
                tl.store(signs + b * 2 * K + i, sign)
                tl.store(signs + b * 2 * K + K + i, scale)
        tl.store(errors + b, tl.sqrt(error) * eps)
        if WITH_ROWS:
            tl.debug_barrier()
            sign = tl.load(signs + b * 2 * K + k, mask=k < K, other=0.0)
            R = tl.where(r == c, -sign[:, None], 0.0)
            for j in tl.static_range(K):
                v = tl.load(rows + b * K * N + (K - 1 - j) * N + n, mask=n < N, other=0.0)
                scale = tl.load(signs + b * 2 * K + K + (K - 1 - j))
                R = R - (tl.sum(R * v[None, :], 1) * scale)[:, None] * v[None, :]
            tl.debug_barrier()
            tl.store(rows + b * K * N + r * N + c, R, mask=inside)


def reduce(columns: Tensor, with_rows: bool, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """L, orthonormal rows (empty unless wanted) and the error estimate of columns: (..., K, N)."""
    lower, rows, errors = torch.ops.ornstein.reduced(columns, with_rows, eps)
    return lower, rows, errors


def _run(columns: Tensor, with_rows: bool, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    columns = columns.contiguous()
    lower, rows, errors = _like(columns, with_rows, eps)
    K, N = columns.shape[-2:]
    count = columns.numel() // (K * N)
    signs = columns.new_empty(count, 2 * K)
    KP, NP = padded(K), padded(N)
    options: dict[str, Any] = {"num_warps": 1 if KP * NP <= 512 else 4}
    with on_device_of(columns):
        _reduce[(count,)](
            columns, lower, rows, signs, errors, N, eps, K, KP, NP, with_rows, **options
        )
    return lower, rows, errors


def _like(columns: Tensor, with_rows: bool, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    batch, K = columns.shape[:-2], columns.shape[-2]
    rows = columns.new_empty(columns.shape if with_rows else (0,))
    return columns.new_empty(*batch, K, K), rows, columns.new_empty(batch)


operator(
    "reduced(Tensor columns, bool with_rows, float eps) -> (Tensor, Tensor, Tensor)", _run, _like
)
