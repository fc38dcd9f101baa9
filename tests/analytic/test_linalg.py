"""The factor of a sum of squares against multiprecision, its own error estimate, and the tables."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from mpmath import mp
from torch import Tensor

from ornstein.linalg import (
    gauss_legendre,
    interpolation,
    inverse_factorials,
    legendre_at_nodes,
    legendre_moments,
    lobatto_nodes,
    lower_inverse,
    lq,
    powers,
    safe_sqrt,
    semidefinite_factor,
)

F64 = torch.float64
DIGITS = 250  # columns shrink to 1e-8⁴ and are squared: 64 decades, and room


def exact_factor(W: np.ndarray) -> Any:
    """The Cholesky factor of W Wᵀ in the precision in force."""
    columns = mp.matrix(W.tolist())
    return mp.cholesky(columns * columns.T)


def diagonal_error(L: Tensor, truth: Any) -> float:
    """Largest relative error of the diagonal."""
    with mp.workdps(DIGITS):
        return max(float(abs(mp.mpf(float(L[i, i])) / truth[i, i] - 1)) for i in range(L.shape[0]))


def graded(rng: np.random.Generator, K: int, N: int, h: float) -> np.ndarray:
    """Columns that shrink like hʲ, every row with a part in each of them."""
    return rng.standard_normal((K, N)) * h ** np.arange(N)


# ------------------------------------------------------------------ lq


@pytest.mark.parametrize("N", [5, 7, 16])
def test_factor_of_any_columns(N: int) -> None:
    """L Lᵀ = W Wᵀ, lower, positive; numpy's factor agrees, and a batch is a loop."""
    W = torch.randn(4, 3, 5, N, dtype=F64)
    L, error = lq(W)
    assert torch.equal(L, torch.tril(L)) and error.shape == (4, 3)
    assert bool((L.diagonal(dim1=-2, dim2=-1) > 0).all())
    # rounding of sums of N terms, times the condition of the worst draw
    assert torch.allclose(L @ L.mT, W @ W.mT, rtol=1e-13, atol=1e-13)
    with mp.workdps(DIGITS):
        assert diagonal_error(L[1, 2], exact_factor(W[1, 2].numpy())) <= 1e-13
    single, _ = lq(W[1, 2])
    assert torch.allclose(single, L[1, 2], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("h", [1e-1, 1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_graded_columns_and_the_estimate(K: int, h: float) -> None:
    """Rows that all see the large columns: L_ii = O(hⁱ) is what is left of entries of order one,

    so that float64 keeps ε/h^(K−1) at best. The estimate must know: it is never below a tenth of
    the true error, and where it promises digits they are there.
    """
    for seed in range(20):
        W = graded(np.random.default_rng([seed, K]), K, 3 * K, h)
        L, estimate = lq(torch.from_numpy(W))
        with mp.workdps(DIGITS):
            error = diagonal_error(L, exact_factor(W))
        assert float(estimate) >= 0.1 * min(error, 1.0), seed
        # and it is no scarecrow: the loss h^−(K−1), and some hundreds for unlucky draws
        assert float(estimate) <= 1e4 * 2.0**-52 * h ** (1 - K), seed


@pytest.mark.parametrize("h", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_a_staircase_keeps_every_digit(K: int, h: float) -> None:
    """Row i starts at column K−1−i, as for a chain: nothing cancels, however small the entry.

    The first row is then of size h^(K−1), 1e-32 at the end, and relative accuracy is full.
    """
    for seed in range(10):
        rng = np.random.default_rng([seed, K, 7])
        W = graded(rng, K, 3 * K, h)
        for i in range(K):
            W[i, : K - 1 - i] = 0.0
        L, estimate = lq(torch.from_numpy(W))
        with mp.workdps(DIGITS):
            truth = exact_factor(W)
            error = diagonal_error(L, truth)
        # entries of order one on the stairs: a few hundred roundings for unlucky draws
        assert error <= 1e-12, seed
        assert error / 10 <= float(estimate) <= 1e-9, seed


def test_scaling_of_rows_is_free() -> None:
    """L(diag(c)·W) = diag(c)·L(W): units of the variables cost nothing."""
    W = torch.from_numpy(graded(np.random.default_rng(3), 4, 12, 1e-2))
    c = torch.tensor([1e-12, 1e6, 1.0, 1e-30], dtype=F64)
    L, error = lq(W)
    scaled, scaled_error = lq(c[:, None] * W)
    assert torch.allclose(scaled / c[:, None], L, rtol=1e-8, atol=0.0)
    assert torch.allclose(scaled_error, error, rtol=1e-3, atol=0.0)


def test_gradient_of_the_factor() -> None:
    """torch's own check, for columns well away from singular."""
    W = torch.randn(2, 3, 7, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: lq(w)[0], (W,), eps=1e-6, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("h", [1e-2, 1e-4, 1e-8])
def test_gradient_on_graded_columns(h: float) -> None:
    """d log L_ii along a random relative change of W, against differences in 250 digits."""
    K, N = 3, 9
    for seed in range(4):
        rng = np.random.default_rng([seed, 11])
        W = graded(rng, K, N, h)
        for i in range(K):
            W[i, : K - 1 - i] = 0.0
        change = W * rng.standard_normal(W.shape)
        with mp.workdps(DIGITS):
            step = mp.mpf(10) ** -60
            base, direction = mp.matrix(W.tolist()), mp.matrix(change.tolist())
            up, down = base + step * direction, base - step * direction
            high, low = mp.cholesky(up * up.T), mp.cholesky(down * down.T)
            slopes = [float(mp.log(high[i, i] / low[i, i]) / (2 * step)) for i in range(K)]
        columns = torch.from_numpy(W).requires_grad_()
        L, _ = lq(columns)
        for i in range(K):
            (grad,) = torch.autograd.grad(L[i, i].log(), columns, retain_graph=True)
            found = float((grad * torch.from_numpy(change)).sum())
            assert math.isclose(found, slopes[i], rel_tol=1e-10, abs_tol=1e-10), (seed, i)


def test_rows_of_zeros() -> None:
    """A variable that has no noise yet: its row of L is zero, and L Lᵀ = W Wᵀ all the same."""
    W = torch.randn(3, 6, dtype=F64)
    for place in range(3):
        holed = W.clone()
        holed[place] = 0.0
        holed.requires_grad_()
        L, error = lq(holed)
        assert torch.equal(L[place], torch.zeros(3, dtype=F64))
        assert torch.allclose(L @ L.mT, (holed @ holed.mT).detach(), rtol=1e-14, atol=1e-14)
        assert float(error) < 1e-12
        (grad,) = torch.autograd.grad(L.sum(), holed)
        assert bool(torch.isfinite(grad).all())
    none, error = lq(torch.zeros(2, 4, dtype=F64))
    assert torch.equal(none, torch.zeros(2, 2, dtype=F64))


def test_not_a_number_is_not_hidden() -> None:
    """A NaN among the columns shows in the estimate, so that it can be refused."""
    W = torch.randn(2, 3, 6, dtype=F64)
    W[1, 2, 4] = math.nan
    _, error = lq(W)
    assert float(error[0]) < 1e-10
    assert not float(error[1]) <= 1.0


# ------------------------------------------------------------------ smaller pieces


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_semidefinite_factor(rank: int) -> None:
    """C Cᵀ = M for whole numbers (exact in float64) of every rank, with K − rank zero columns."""
    for seed in range(200):
        rng = np.random.default_rng([seed, rank])
        root = rng.integers(-3, 4, (4, rank)).astype(float)
        matrix = torch.from_numpy(root @ root.T)
        C = semidefinite_factor(matrix)
        assert torch.allclose(C @ C.mT, matrix, rtol=0.0, atol=1e-13 * float(matrix.max() + 1))
        zero = int((~C.any(0)).sum())
        assert zero == 4 - np.linalg.matrix_rank(root)


def test_semidefinite_factor_has_no_tiny_columns() -> None:
    """What rounding leaves of a zero pivot is not noise: √ε would be 1e-8 of it."""
    g = torch.tensor([0.3, -0.7, 1.1], dtype=F64)
    C = semidefinite_factor(torch.outer(g, g))
    (column,) = C[:, C.any(0)].mT  # one, the others are exactly zero
    assert torch.allclose(column.abs(), g.abs(), rtol=1e-15, atol=0.0)
    assert torch.allclose(C @ C.mT, torch.outer(g, g), rtol=1e-15, atol=0.0)
    zero = semidefinite_factor(torch.zeros(2, 2, dtype=F64))
    assert torch.equal(zero, torch.zeros(2, 2, dtype=F64))


def test_semidefinite_factor_of_a_definite_matrix() -> None:
    """The square is the matrix, and so is its gradient."""
    root = torch.randn(3, 3, 4, dtype=F64)
    matrix = root @ root.mT
    C = semidefinite_factor(matrix)
    assert torch.allclose(C @ C.mT, matrix, rtol=1e-13, atol=1e-14)

    def squared(raw: Tensor) -> Tensor:
        factor = semidefinite_factor(raw @ raw.mT)
        return factor @ factor.mT  # the columns' order is free, their squares are not

    raw = torch.randn(3, 4, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(squared, (raw,), eps=1e-6, atol=1e-6, rtol=1e-5)


def test_lower_inverse() -> None:
    L = torch.tril(torch.randn(4, 3, 3, dtype=F64)) + 3 * torch.eye(3, dtype=F64)
    eye = torch.eye(3, dtype=F64).expand(4, 3, 3)
    assert torch.allclose(lower_inverse(L) @ L, eye, rtol=0.0, atol=1e-14)


def test_powers() -> None:
    """1, u, u², …, and the gradient also at u = 0."""
    u = torch.tensor([0.0, 0.5, -2.0, 1.0], dtype=F64, requires_grad=True)
    ladder = powers(u, 5)
    expected = torch.stack([u.detach() ** k for k in range(6)], -1)
    assert torch.equal(ladder, expected)
    assert torch.autograd.gradcheck(lambda v: powers(v, 5), (u,), eps=1e-6, atol=1e-7, rtol=1e-6)


def test_safe_sqrt() -> None:
    x = torch.tensor([0.0, 4.0], dtype=F64, requires_grad=True)
    root = safe_sqrt(x)
    assert root.tolist() == [0.0, 2.0]
    (grad,) = torch.autograd.grad(root.sum(), x)
    assert grad.tolist() == [0.0, 0.25]


# ------------------------------------------------------------------ tables


def shifted_legendre(j: int) -> list[Fraction]:
    """Coefficients of P_j(2u − 1), by the recurrence, in whole numbers."""
    previous, now = [Fraction(0)], [Fraction(1)]
    for n in range(j):
        doubled = [Fraction(0), *(2 * c for c in now)]
        line = [d - (now[i] if i < len(now) else 0) for i, d in enumerate(doubled)]
        older = previous + [Fraction(0)] * (len(line) - len(previous))
        previous = now
        now = [
            (Fraction(2 * n + 1) * a - Fraction(n) * b) / (n + 1)
            for a, b in zip(line, older, strict=True)
        ]
    return now


def test_moments_are_exact() -> None:
    """⟨uᵏ, P̂ⱼ⟩ = √(2j+1) ∫₀¹ uᵏ P_j(2u−1) du, the integral in rational numbers."""
    table = legendre_moments(24, 12)
    for j in range(12):
        coefficients = shifted_legendre(j)
        for k in range(25):
            exact = sum(c / (k + i + 1) for i, c in enumerate(coefficients))
            expected = math.sqrt(2 * j + 1) * float(exact)
            assert math.isclose(table[k, j], expected, rel_tol=4e-16, abs_tol=0.0), (k, j)
            if j > k:
                assert exact == 0 and table[k, j] == 0.0


@pytest.mark.parametrize("degree", [3, 8])
def test_interpolation_is_exact(degree: int) -> None:
    """The values of uᵏ at the points give the k-th unit vector: checked in rational numbers."""
    table = interpolation(degree)
    nodes = [Fraction(float(x)) for x in lobatto_nodes(degree)]
    size = np.abs(table).max()
    for k in range(degree + 1):
        for i in range(degree + 1):
            value = sum(Fraction(float(table[i, m])) * x**k for m, x in enumerate(nodes))
            # each entry was rounded once: (degree + 1)/2 roundings of the largest
            assert abs(float(value) - (i == k)) <= (degree + 1) * 2.0**-53 * size, (i, k)


def test_lobatto_points() -> None:
    for degree in (3, 8):
        points = lobatto_nodes(degree)
        assert points[0] == 0.0 and points[-1] == 1.0
        exact = [math.sin(math.pi * i / (2 * degree)) ** 2 for i in range(degree + 1)]
        assert np.allclose(points, exact, rtol=0.0, atol=2e-16)


@pytest.mark.parametrize("count", [12, 24, 64])
def test_quadrature_is_exact_for_polynomials(count: int) -> None:
    """Σ wᵢ xᵢᵏ = 1/(k+1) up to k = 2·count − 1."""
    x, w = gauss_legendre(count)
    for k in (0, 1, count, 2 * count - 1):
        assert math.isclose(math.fsum(w * x**k), 1 / (k + 1), rel_tol=1e-13), k


def test_polynomials_at_the_nodes_are_orthonormal() -> None:
    rows = legendre_at_nodes(12, 24)
    # numpy's nodes are good to 1e-16, and P₁₁ has slopes up to 66 there
    assert np.allclose(rows @ rows.T, np.eye(12), rtol=0.0, atol=1e-13)


def test_inverse_factorials() -> None:
    assert inverse_factorials(24).tolist() == [1 / math.factorial(k) for k in range(25)]
