"""Batched K×K algebra in float64: the factor of a sum of squares, and what is built on it.

Every covariance of a linear diffusion is a sum of squares, Σ = W Wᵀ, of columns that are cheap to
write down. Its Cholesky factor is read off an orthogonal reduction of W itself,

    W = [L 0] H_K ⋯ H_1        (Householder reflections from the right),

so that Σ is never formed and nothing is ever added to its diagonal. Where the columns of W shrink
geometrically (`panels` arranges that) the reduction keeps the *relative* accuracy of every entry
of L, however small. A running bound of the rounding errors comes with the factor: the caller
learns how many digits are left instead of receiving noise.

On a GPU and under `torch.compile` nothing here reads a value back to the host, calls LAPACK on the
way forward, or has a shape that depends on data, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ornstein import gpu

EPS = 2.0**-52
WRITTEN_OUT = 4  # rows up to which a compiled solution is written out
T = TypeVar("T")


def in_graph() -> bool:
    """Whether values can't be read: traced by torch.compile, or captured in a CUDA graph."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def in_transform() -> bool:
    """Whether a transform of torch.func is at work, where what is done can't depend on values."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def constant_in_graphs(function: T) -> T:
    """What torch.compiler.assume_constant_result does, without importing the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _reflect(columns: Tensor, with_rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    """L, orthonormal rows and error bound by reflections written out; no LAPACK, no host."""
    K, N = columns.shape[-2:]
    W, bound = columns.clone(), columns.abs()  # bound: size of the sums that were rounded
    diagonal, errors, signs, reflectors = [], [], [], []
    for i in range(K):
        row = W[..., i, i:]  # (..., N - i)
        norm = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        size = torch.linalg.vector_norm(bound[..., i, i:], dim=-1, keepdim=True)
        sign = torch.where(row[..., :1] < 0, -1.0, 1.0).to(row)
        # H = I − v vᵀ·scale with v = row + sign·norm·e₀; a row of zeros is left alone
        pivot = row[..., :1] + sign * norm
        half = norm * pivot.abs()
        scale = torch.where(half > 0, 1.0 / half, torch.zeros_like(half)).unsqueeze(-1)
        v = torch.cat([pivot, row[..., 1:]], -1).unsqueeze(-2)
        f = (W[..., i + 1 :, i:] * v).sum(-1, keepdim=True) * scale  # (..., K - i - 1, 1)
        W[..., i + 1 :, i:].addcmul_(f, v, value=-1)
        bound[..., i + 1 :, i:].addcmul_(f.abs(), bound[..., i, i:].unsqueeze(-2))
        diagonal.append(norm)
        errors.append(torch.where(size > 0, size / norm, size))  # 0 for a row of zeros
        signs.append(-sign)
        reflectors.append((v, scale))
    flips = torch.cat(signs, -1)
    L = torch.tril(W[..., :K], -1) * flips.unsqueeze(-2) + torch.diag_embed(torch.cat(diagonal, -1))
    error = EPS * torch.cat(errors, -1).amax(-1)
    if not with_rows:
        return L, columns.new_zeros(0), error
    # columns = L · rows with rows the first K of diag(flips) H_K ⋯ H_1
    rows = torch.nn.functional.pad(torch.diag_embed(flips), (0, N - K))
    for i in reversed(range(K)):
        v, scale = reflectors[i]
        f = (rows[..., i:] * v).sum(-1, keepdim=True) * scale
        rows[..., i:].addcmul_(f, v, value=-1)
    return L, rows, error


def _lapack(columns: Tensor, with_rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same from LAPACK's reflections, ten times faster on a CPU, where L is far from singular.

    The product of L_kk/‖row k‖ bounds what rounding can do; where it is small, `_reflect` decides.
    """
    Q, R = torch.linalg.qr(columns.mT, mode="reduced" if with_rows else "r")
    diagonal = torch.diagonal(R, dim1=-2, dim2=-1)
    share = (diagonal / torch.linalg.vector_norm(R, dim=-2)).prod(-1).abs()
    if not bool((share > 1e-6).all()):
        return _reflect(columns, with_rows)
    flips = diagonal.sign().unsqueeze(-2)
    return torch.tril(R.mT * flips), (Q * flips).mT if with_rows else Q, EPS / share


def orthogonal_reduction(columns: Tensor, with_rows: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """columns = L · rows with L lower triangular, rows orthonormal; and L's relative error.

    columns: (..., K, N), N ≥ K -> (..., K, K), (..., K, N), (...). Gradient: `reduction_vjp`.
    Without with_rows the rows may be left out (an empty tensor).
    """
    if gpu.fits(columns):
        return gpu.reduce(columns, with_rows, EPS)
    if columns.is_cuda or torch.compiler.is_compiling():  # the compiler fuses it
        return _reflect(columns, with_rows)
    return _lapack(columns, with_rows)


def reduction_vjp(L: Tensor, rows: Tensor, grad: Tensor) -> Tensor:
    """The gradient to the columns, from that to L. A row of zeros (s = 0) has none."""
    # dL = L tril½(X + Xᵀ), X = L⁻¹ dW rowsᵀ
    inner = torch.tril(product(L.mT, grad))
    inner = inner + torch.tril(inner, -1).mT
    left = lower_solve(L, inner, turned=True)
    return _product(zero_where_undefined(left), rows)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for small a and long rows of b; on a CPU the batched product is slow for few rows."""
    if a.is_cuda or a.shape[-1] > 4:
        return product(a, b)
    b = b.contiguous()
    out = a[..., :1] * b[..., :1, :]
    for j in range(1, a.shape[-1]):
        out.addcmul_(a[..., j : j + 1], b[..., j : j + 1, :])
    return out


class _LQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        L, rows, error = orthogonal_reduction(columns, ctx.needs_input_grad[0])
        ctx.save_for_backward(L, rows)
        ctx.mark_non_differentiable(error)
        return L, error

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        L, rows = ctx.saved_tensors
        return reduction_vjp(L, rows, grad)


def lq(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factor L (positive diagonal) of columns·columnsᵀ, and its relative rounding error.

    columns: (..., K, N), N ≥ K -> L: (..., K, K), error: (...), an estimate for diag L.
    """
    L, error = _LQ.apply(columns)  # type: ignore[no-untyped-call]
    return L, error


def zero_where_undefined(x: Tensor) -> Tensor:
    """0 in place of NaN and ±∞: gradients at the very start of time."""
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def semidefinite_factor(matrix: Tensor) -> Tensor:
    """C with C Cᵀ = matrix for a positive semi-definite one, rank-deficient allowed: (..., K, K).

    Cholesky by columns. The pivot is always the variable of which the largest share is unexplained
    so far, and it ends where that share is rounding: the remaining columns are zero.
    """
    K = matrix.shape[-1]
    own = torch.diagonal(matrix, dim1=-2, dim2=-1)
    rest, columns = matrix, []
    for _ in range(K):
        left = torch.diagonal(rest, dim1=-2, dim2=-1)
        share = torch.where(own > 0, left / own, 0.0).detach()
        best = share.argmax(-1, keepdim=True)  # (..., 1)
        used = share.gather(-1, best) > 32 * K * EPS
        root = torch.where(used, left.gather(-1, best), 1.0).sqrt()
        row = rest.gather(-2, best.unsqueeze(-1).expand(*best.shape, K)).squeeze(-2)
        column = torch.where(used, row / root, 0.0).scatter(-1, best, root * used)
        columns.append(column)
        # the pivot's row and column are done with: exactly zero from here on
        keep = torch.ones_like(row).scatter(-1, best, 0.0)
        rest = rest - column.unsqueeze(-1) * column.unsqueeze(-2)
        rest = rest * keep.unsqueeze(-1) * keep.unsqueeze(-2)
    return torch.stack(columns, -1)


def lower_solve(L: Tensor, right: Tensor, turned: bool = False) -> Tensor:
    """L⁻¹ right, or L⁻ᵀ right if `turned`, for a lower triangular L: (..., K, M).

    Written out where it is compiled for a GPU, so that it becomes part of what surrounds it.
    """
    if L.is_cuda and L.shape[-1] <= WRITTEN_OUT and torch.compiler.is_compiling():
        return written_out(L, right, turned)
    return torch.linalg.solve_triangular(L.mT if turned else L, right, upper=turned)


def written_out(L: Tensor, right: Tensor, turned: bool) -> Tensor:
    """The same row by row."""
    K = L.shape[-1]
    known: dict[int, Tensor] = {}
    for i in reversed(range(K)) if turned else range(K):
        row = right[..., i, :]
        for j, other in known.items():
            entry = L[..., j, i, None] if turned else L[..., i, j, None]
            row = row - entry * other
        known[i] = row / L[..., i, i, None]
    return torch.stack([known[i] for i in range(K)], -2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of small matrices, (..., M, K) and (..., K, N).

    Written out where it is compiled for a GPU, so that it becomes part of what surrounds it.
    """
    if a.is_cuda and a.shape[-1] <= WRITTEN_OUT and torch.compiler.is_compiling():
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
    return a @ b


def lower_inverse(L: Tensor) -> Tensor:
    """L⁻¹ of a lower triangular L: (..., K, K)."""
    return lower_solve(L, torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L))


def powers(u: Tensor, degree: int) -> Tensor:
    """1, u, u², … up to the degree: (...,) -> (..., degree + 1)."""
    ladder: Tensor = _Powers.apply(u, degree)  # type: ignore[no-untyped-call]
    return ladder


def powers_vjp(ladder: Tensor, grad: Tensor) -> Tensor:
    """The gradient to u, from that to its powers."""
    k = torch.arange(1, ladder.shape[-1], dtype=ladder.dtype, device=ladder.device)
    return ((grad[..., 1:] * ladder[..., :-1]) @ k.unsqueeze(-1)).squeeze(-1)


class _Powers(torch.autograd.Function):
    """(The derivative of `cumprod` would look for zeros on the host.)"""

    @staticmethod
    def forward(ctx: Any, u: Tensor, degree: int) -> Tensor:
        ladder = torch.cumprod(u.unsqueeze(-1).expand(*u.shape, degree), -1)
        ladder = torch.nn.functional.pad(ladder, (1, 0), value=1.0)
        ctx.save_for_backward(ladder)
        return ladder

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return powers_vjp(ctx.saved_tensors[0], grad), None


class _Sqrt(torch.autograd.Function):
    """√x whose gradient at 0 is zero, not infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return zero_where_undefined(grad / (2 * root))


def safe_sqrt(x: Tensor) -> Tensor:
    """√x for x ≥ 0, with gradient zero at x = 0."""
    root: Tensor = _Sqrt.apply(x)  # type: ignore[no-untyped-call]
    return root


def matrix_powers(A: Tensor, count: int) -> Tensor:
    """A⁰ … A^(count−1): (K, K) -> (count, K, K). No gradient: see `matrix_powers_vjp`."""
    if gpu.raises(A, count):
        return gpu.raised(A, count)
    ladder = torch.stack([torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), A])
    square = A
    while ladder.shape[0] < count:  # the powers below 2ᵐ, times the 2ᵐ-th
        square = square @ square
        ladder = torch.cat([ladder, ladder @ square])
    return ladder[:count]


def matrix_powers_vjp(ladder: Tensor, grad: Tensor) -> Tensor:
    """Σ_{i,j} (Aⁱ)ᵀ G_{i+j+1} (Aʲ)ᵀ, the gradient to A: a Hankel matrix and two products."""
    n, K = ladder.shape[0] - 1, ladder.shape[-1]
    padded = torch.nn.functional.pad(grad[1:], (0, 0, 0, 0, 0, n)).contiguous()
    hankel = padded.as_strided((n, K, n, K), (K * K, K, K * K, 1))  # G_{i+j+1}, no copy
    inner = hankel.reshape(n * K, n * K) @ ladder[:n].mT.reshape(n * K, K)
    return ladder[:n].reshape(n * K, K).mT @ inner


class _PowerSeries(torch.autograd.Function):
    """Both recursions run over blocks that lie one below the other: a step is one product."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, degree: int) -> Tensor:  # (n, q + 1, K, K)
        n, width, K = a.shape[0], a.shape[1], a.shape[-1]
        rows = a.transpose(1, 2).reshape(n, K, width * K)  # a_0 | a_1 | …
        # X_degree … X_1 X_0 0 … 0, so that X_k, X_{k−1}, … follow each other downwards
        X = a.new_zeros(n, (degree + width) * K, K)
        X[:, degree * K : (degree + 1) * K] = torch.eye(K, dtype=a.dtype, device=a.device)
        for k in range(degree):
            at = (degree - k) * K
            block, below = X[:, at - K : at], X[:, at : at + width * K]
            block.baddbmm_(rows, below, beta=0, alpha=1 / (k + 1))
        ctx.save_for_backward(rows, X)
        ctx.sizes = (n, width, K, degree)
        return X[:, : (degree + 1) * K].reshape(n, degree + 1, K, K).flip(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, X = ctx.saved_tensors
        n, width, K, degree = ctx.sizes
        # λ_k = (ḡ_k + Σ_j a_jᵀ λ_{k+1+j})/k, stored as λ_1 … λ_degree 0 … 0
        down = rows.reshape(n, K, width, K).permute(0, 3, 2, 1).reshape(n, K, width * K)
        lam = grad.new_zeros(n, (degree + width) * K, K)
        lam[:, : degree * K] = grad[:, 1:].reshape(n, degree * K, K)
        for k in range(degree, 0, -1):
            at = k * K
            block, below = lam[:, at - K : at], lam[:, at : at + width * K]
            block.baddbmm_(down, below, beta=1 / k, alpha=1 / k)
        # ā_j = Σ_k λ_{k+1} X_{k−j}ᵀ: slide along X, whose blocks run from high to low k
        left = lam[:, : degree * K].reshape(n, degree, K, K).flip(1)
        left = left.permute(0, 2, 1, 3).reshape(n, K, degree * K)
        turned = X.reshape(n, degree + width, K, K).mT.contiguous()
        grads = [
            left @ turned[:, 1 + j : 1 + j + degree].reshape(n, degree * K, K) for j in range(width)
        ]
        return torch.stack(grads, 1), None


def power_series(a: Tensor, degree: int) -> Tensor:
    """X_0 … X_degree with X(0) = I, X′ = (Σ_j a_j uʲ) X: (n, q + 1, K, K) -> (n, degree + 1, K, K).

    (k + 1) X_{k+1} = Σ_j a_j X_{k−j}.
    """
    X: Tensor = _PowerSeries.apply(a, degree)  # type: ignore[no-untyped-call]
    return X


# ---------------------------------------------------------------- constants, computed exactly


@cache
def inverse_factorials(degree: int) -> np.ndarray:
    """1/k! for k = 0 … degree."""
    return np.array([float(Fraction(1, math.factorial(k))) for k in range(degree + 1)])


@cache
def legendre_moments(degree: int, count: int) -> np.ndarray:
    """⟨uᵏ, P̂ⱼ⟩ on [0, 1] for the orthonormal Legendre polynomials: (degree + 1, count).

    √(2j+1) k!² / ((k−j)! (k+j+1)!), zero for j > k: the coefficients of a power series.
    """
    table = np.zeros((degree + 1, count))
    for k in range(degree + 1):
        for j in range(min(k, count - 1) + 1):
            ratio = Fraction(
                math.factorial(k) ** 2, math.factorial(k - j) * math.factorial(k + j + 1)
            )
            table[k, j] = math.sqrt(2 * j + 1) * float(ratio)
    return table


@cache
def gauss_legendre(count: int) -> np.ndarray:
    """Nodes and weights of Gauss–Legendre quadrature on [0, 1]: (2, count)."""
    x, w = np.polynomial.legendre.leggauss(count)
    return np.stack([(x + 1) / 2, w / 2])


@cache
def legendre_at_nodes(count: int, nodes: int) -> np.ndarray:
    """√wᵢ P̂ⱼ(xᵢ) at the Gauss nodes, orthonormal rows: (count, nodes)."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    rows = [
        math.sqrt(2 * j + 1) * np.polynomial.legendre.Legendre.basis(j)(x) for j in range(count)
    ]
    return np.stack(rows) * np.sqrt(w / 2)


@cache
def lobatto_nodes(degree: int) -> np.ndarray:
    """Chebyshev–Lobatto points of [0, 1], both ends included: (degree + 1,)."""
    return (1 - np.cos(np.pi * np.arange(degree + 1) / degree)) / 2


@cache
def interpolation(degree: int) -> np.ndarray:
    """Values at `lobatto_nodes` -> coefficients of 1, u, …, u^degree: (degree + 1, degree + 1).

    Inverted in rational arithmetic: the Vandermonde matrix is ill-conditioned.
    """
    n = degree + 1
    nodes = [Fraction(float(x)) for x in lobatto_nodes(degree)]
    rows = [
        [x**k for k in range(n)] + [Fraction(int(i == j)) for j in range(n)]
        for i, x in enumerate(nodes)
    ]
    for i in range(n):
        pivot = next(r for r in range(i, n) if rows[r][i] != 0)
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [a / rows[i][i] for a in rows[i]]
        for r in range(n):
            if r != i and rows[r][i] != 0:
                rows[r] = [a - rows[r][i] * b for a, b in zip(rows[r], rows[i], strict=True)]
    return np.array([[float(a) for a in row[n:]] for row in rows])


@dataclass(frozen=True)
class Tables:
    """The constants above as float64 tensors on one device."""

    degree: int
    inverse_factorials: Tensor  # (degree + 1,)
    moments: Tensor  # (degree + 1, columns)
    nodes: Tensor  # (nodes,)
    weights: Tensor  # (nodes,)
    at_nodes: Tensor  # (columns, nodes)
    lobatto: Tensor  # (drift_degree + 1,)
    vandermonde: Tensor  # (drift_degree + 1, drift_degree + 1)
    interpolation: Tensor  # its inverse

    @staticmethod
    def on(device: torch.device, degree: int, columns: int, nodes: int, drift: int) -> Tables:
        """Copy the tables of these sizes to a device."""

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        x, w = gauss_legendre(nodes)
        return Tables(
            degree=degree,
            inverse_factorials=put(inverse_factorials(degree)),
            moments=put(legendre_moments(degree, columns)),
            nodes=put(x),
            weights=put(w),
            at_nodes=put(legendre_at_nodes(columns, nodes)),
            lobatto=put(lobatto_nodes(drift)),
            vandermonde=put(np.vander(lobatto_nodes(drift), increasing=True)),
            interpolation=put(interpolation(drift)),
        )
