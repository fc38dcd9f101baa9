"""I, A, A², … of a small matrix by one program: each is a product in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from ornstein.gpu.launching import on_device_of, operator, padded, triton, usable

LARGEST = 8  # rows of a matrix
MOST = 64  # powers: of more, doubling takes fewer steps

if triton is not None:
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _powers(  # type: ignore[no-untyped-def]
        matrix, out, count, K: tl.constexpr, KP: tl.constexpr
    ):
        k = tl.arange(0, KP)
        place, inside = k[:, None] * K + k[None, :], (k[:, None] < K) & (k[None, :] < K)
        A = tl.load(matrix + place, mask=inside, other=0.0)
        power = tl.where(k[:, None] == k[None, :], A * 0 + 1.0, 0.0)
        for i in range(count):
            tl.store(out + i * K * K + place, power, mask=inside)
            power = tl.sum(power[:, :, None] * A[None, :, :], 1)


def raises(matrix: Tensor, count: int) -> bool:
    """Whether `raised` can take this matrix, (K, K), and is the faster way."""
    return usable(matrix) and matrix.shape[-1] <= LARGEST and count <= MOST


def raised(matrix: Tensor, count: int) -> Tensor:
    """A⁰ … A^(count−1), without gradient: (K, K) -> (count, K, K)."""
    found: Tensor = torch.ops.ornstein.raised(matrix, count)
    return found


def _run(matrix: Tensor, count: int) -> Tensor:
    out, K = _like(matrix, count), matrix.shape[-1]
    with on_device_of(matrix):
        _powers[(1,)](matrix.contiguous(), out, count, K, padded(K), num_warps=1)
    return out


def _like(matrix: Tensor, count: int) -> Tensor:
    return matrix.new_empty((count, *matrix.shape))


operator("raised(Tensor matrix, int count) -> Tensor", _run, _like)
