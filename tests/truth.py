"""Multiprecision reference values for linear diffusions, used only by the tests.

One data coordinate carries y = (z, v_1 .. v_{K-1}) with dy = A(s) y ds + G(s) dB, where
A = -(b_q Q + b_d D) S and G G^T = 2 b_d D.  With the propagator Phi(s, r),

    Sigma(s) = Phi Sigma0 Phi^T + int_0^s Phi(s, r) G G^T(r) Phi(s, r)^T dr,    L L^T = Sigma.

On one clock tau = int b (b_q = b_d = b) the law S^-1 is stationary, hence Phi = e^{-tau (Q+D) S}
and Sigma = S^-1 + Phi (Sigma0 - S^-1) Phi^T.  Other rates are integrated piece by piece: A and
G G^T are replaced by Chebyshev interpolants, and the linear equations are solved by power series.
Inputs are exact binary numbers; results are rounded to float64 once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import Any, TypeAlias

import numpy as np
from mpmath import mp
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
Matrix: TypeAlias = list[list[Any]]  # rows of mpf, or of fixed-point integers
Curve: TypeAlias = Callable[[Any], Any]  # mpf -> mp matrix
Rate: TypeAlias = Callable[[Any], Any]  # mpf -> mpf

DIGITS = 80  # default working precision
SPARE = 30  # digits that must survive the conditioning of Sigma
MOST_DIGITS = 3000
AGREEMENT = 1e-18  # what two independent integrations must agree to
LONGEST_STEP = 8  # largest norm of A over one step, times its width
NODES = (16, 32, 64)


def commuting(
    Q: ArrayLike,
    D: ArrayLike,
    S: ArrayLike,
    tau: Any,
    sigma0: ArrayLike | None = None,
    digits: int = DIGITS,
) -> tuple[Array, Array]:
    """Phi and L after the clock tau, for rates that share one clock (sigma0 None: zero)."""
    q, d, s = _exact(Q), _exact(D), _exact(S)
    start = _start(sigma0, len(s))
    if not _symmetric(q, -1) or not all(map(_symmetric, (d, s, start))):
        raise ValueError("Q must be exactly skew and D, S, sigma0 exactly symmetric")
    time = _scalar(tau)
    if time < 0:
        raise ValueError("tau must not be negative")
    if time == 0:
        with mp.workdps(digits):
            return np.eye(len(s)), _rounded(_cholesky(start))
    while digits <= MOST_DIGITS:
        # A contracts in the norm of S, so Phi can only lose what its determinant decays by.
        decay = float(time) * sum(float(_dot(*rows)) for rows in zip(d, s, strict=True)) / len(s)
        with mp.workdps(digits + 10 + int(0.44 * decay)):
            phi = _expm(_scaled(-time, _product(_add(q, d), s)))
            final = _inverse_spd(s)
            gap = _add(start, _scaled(-1, final))
            sigma = _add(final, _product(_product(phi, gap), _transpose(phi)))
            size = max(_largest(final), _largest(gap) * max(1, _largest(phi)) ** 2)
            lower, lost = _factor(sigma, size)
            if lost is not None and digits - lost >= SPARE:
                return _rounded(phi), _rounded(lower)
        digits = 2 * digits if lost is None else max(lost + SPARE + 5, digits + 10)
    raise ArithmeticError("Sigma is singular, or too close to it")


def varying(
    drift: Curve,
    diffusion: Curve,
    s: Any,
    sigma0: ArrayLike | None = None,
    horizon: Any = 1,
    digits: int = DIGITS,
) -> tuple[Array, Array]:
    """Phi and L at time s in [0, horizon], where drift is A and diffusion is G G^T (analytic)."""
    end = _scalar(s)
    if not 0 <= end <= horizon:
        raise ValueError(f"s = {s} lies outside [0, {horizon}]")
    with mp.workdps(digits):
        start = _start(sigma0, len(_entries(drift(end))))
        if not _symmetric(start):
            raise ValueError("sigma0 must be exactly symmetric")
        if end == 0:
            return np.eye(len(start)), _rounded(_cholesky(start))
    goal = max(45, digits - 35)  # digits that the interpolants and the series are taken to
    while goal <= MOST_DIGITS:
        with mp.workdps(max(digits, goal + 15 + int(0.77 * NODES[-1]))):
            phi, sigma, size, spread = _march(drift, diffusion, [mp.zero, end], start, goal)
            lower, lost = _factor(sigma, size)
            if lost is not None:
                lost = max(lost, _decades(spread / _largest(phi)))
            if lost is not None and goal - lost >= SPARE:
                cuts = [mp.zero, end * mp.mpf("0.38"), end]
                phi2, sigma2, _, _ = _march(drift, diffusion, cuts, start, goal + 8)
                lower2 = _cholesky(sigma2)
                _agree(phi, phi2, lower, lower2)
                return _rounded(phi2), _rounded(lower2)
        goal = 2 * goal if lost is None else max(lost + SPARE + 5, goal + 10)
    raise ArithmeticError("Sigma is singular, or too close to it")


def rates_drift(
    Q: ArrayLike, D: ArrayLike, S: ArrayLike, b_q: Rate, b_d: Rate
) -> tuple[Curve, Curve]:
    """The callables A(r) = -(b_q Q + b_d D) S and G G^T(r) = 2 b_d D, out of two rates."""
    with mp.workdps(400):  # products of float64 entries, in effect without rounding
        s, noise = mp.matrix(_exact(S)), mp.matrix(_exact(D))
        turn, pull = -(mp.matrix(_exact(Q)) * s), -(noise * s)

    def drift(r: Any) -> Any:
        """A at time r."""
        return turn * mp.mpf(b_q(r)) + pull * mp.mpf(b_d(r))

    def diffusion(r: Any) -> Any:
        """G G^T at time r."""
        return noise * (2 * mp.mpf(b_d(r)))

    return drift, diffusion


def relative(a: ArrayLike, b: ArrayLike) -> float:
    """Largest entry of |a - b| / |b|; an entry that is zero in b must be zero in a."""
    found, truth = _floats(a), _floats(b)
    gap = np.abs(found - truth)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.max(np.where(gap == 0, 0.0, gap / np.abs(truth))))


def propagator_error(a: ArrayLike, b: ArrayLike) -> float:
    """Largest |a - b| over the largest |b|."""
    found, truth = _floats(a), _floats(b)
    gap, size = float(np.max(np.abs(found - truth))), float(np.max(np.abs(truth)))
    return gap / size if size else float("inf" if gap else 0)


# Conversions.


def _floats(x: Any) -> Array:
    """A float64 array of an array, nested lists or a tensor."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x, dtype=np.float64)


def _entries(x: Any) -> Matrix:
    """Rows of an mp matrix."""
    return [[x[i, j] for j in range(x.cols)] for i in range(x.rows)]


def _exact(x: Any) -> Matrix:
    """Rows of mpf that equal the float64 entries (mp matrices pass as they are)."""
    if isinstance(x, mp.matrix):
        rows = _entries(x)
    else:
        with mp.workprec(53):
            rows = [[mp.mpf(float(e)) for e in row] for row in np.atleast_2d(_floats(x))]
    if any(len(row) != len(rows) for row in rows):
        raise ValueError("a square matrix is needed")
    return rows


def _start(sigma0: Any, size: int) -> Matrix:
    """The initial covariance, zero where none is given."""
    rows = _exact(np.zeros((size, size)) if sigma0 is None else sigma0)
    if len(rows) != size:
        raise ValueError(f"sigma0 must be {size} by {size}")
    return rows


def _scalar(x: Any) -> Any:
    """The number x as an mpf, exactly (an mpf passes as it is)."""
    if isinstance(x, mp.mpf):
        return x
    with mp.workprec(53):
        return mp.mpf(float(x))


def _rounded(x: Matrix) -> Array:
    """The float64 array nearest to x."""
    with mp.workprec(53):
        return np.array([[float(+e) for e in row] for row in x], dtype=np.float64)


# Small dense algebra on rows of mpf, at the precision in force.


def _dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """The inner product over the shorter length, rounded once."""
    return mp.fdot(zip(a, b, strict=False))


def _product(a: Matrix, b: Matrix) -> Matrix:
    """The matrix product."""
    columns = _transpose(b)
    return [[_dot(row, column) for column in columns] for row in a]


def _scaled(c: Any, a: Matrix) -> Matrix:
    """The multiple c a."""
    return [[c * x for x in row] for row in a]


def _add(a: Matrix, b: Matrix) -> Matrix:
    """The sum."""
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def _transpose(a: Matrix) -> Matrix:
    """The transpose."""
    return [list(column) for column in zip(*a, strict=True)]


def _identity(size: int) -> Matrix:
    """The unit matrix."""
    return [[mp.mpf(i == j) for j in range(size)] for i in range(size)]


def _symmetric(a: Matrix, sign: int = 1) -> bool:
    """Whether a equals sign times its transpose, exactly."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i + 1)]
    return all(a[i][j] == a[j][i] if sign > 0 else a[i][j] + a[j][i] == 0 for i, j in pairs)


def _largest(a: Matrix) -> Any:
    """The largest modulus of an entry."""
    return max(abs(x) for row in a for x in row)


def _norm(a: Matrix) -> Any:
    """The maximal row sum."""
    return max(mp.fsum(row, absolute=True) for row in a)


def _decades(x: Any) -> int:
    """How many decades x stands above one."""
    return max(0, int(mp.ceil(mp.log10(x))))


def _expm(a: Matrix) -> Matrix:
    """e^a by a Taylor series of a / 2^k that is then squared k times."""
    halvings = max(0, mp.mag(_norm(a)) + int(1.5 * mp.prec**0.5) // 2) if _largest(a) else 0
    with mp.workprec(mp.prec + 2 * halvings + 20):
        small = _scaled(mp.ldexp(1, -halvings), a)
        total = term = _identity(len(a))
        order = 0
        while _largest(term) > mp.eps:
            order += 1
            term = _scaled(mp.one / order, _product(term, small))
            total = _add(total, term)
        for _ in range(halvings):
            total = _product(total, total)
    return total


def _cholesky(a: Matrix) -> Matrix:
    """The lower factor; a zero pivot passes only where its whole column is zero."""
    size = len(a)
    lower = _scaled(mp.zero, a)
    for j in range(size):
        rest = [a[i][j] - _dot(lower[i][:j], lower[j][:j]) for i in range(j, size)]
        if rest[0] <= 0 and any(rest):
            raise ArithmeticError("not positive definite at this precision")
        root = mp.sqrt(rest[0])
        for i in range(j, size):
            lower[i][j] = rest[i - j] / root if root else mp.zero
    return lower


def _inverse_lower(lower: Matrix) -> Matrix:
    """The inverse of a lower triangular matrix."""
    inverse = _identity(len(lower))
    for i, row in enumerate(lower):
        for j in range(i + 1):
            known = _dot(row[:i], [inverse[k][j] for k in range(i)])
            inverse[i][j] = (inverse[i][j] - known) / row[i]
    return inverse


def _inverse_spd(a: Matrix) -> Matrix:
    """The inverse of a positive definite matrix."""
    inverse = _inverse_lower(_cholesky(a))
    return _product(_transpose(inverse), inverse)


def _factor(sigma: Matrix, size: Any) -> tuple[Matrix, int | None]:
    """The Cholesky factor and the digits it loses if sigma has errors of size times epsilon."""
    try:
        lower = _cholesky(sigma)
        inverse = _inverse_lower(lower)
    except ArithmeticError:
        return sigma, None
    return lower, _decades(size * mp.fsum((x for row in inverse for x in row), squared=True))


# Integration under general rates.


def _agree(phi: Matrix, phi2: Matrix, lower: Matrix, lower2: Matrix) -> None:
    """Raise where two integrations differ in Phi or in the diagonal of L."""
    apart = _largest(_add(phi, _scaled(-1, phi2))) / _largest(phi2)
    for i, row in enumerate(lower):
        apart = max(apart, abs(row[i] / lower2[i][i] - 1))
    if not apart <= AGREEMENT:
        raise ArithmeticError(f"two integrations differ by {mp.nstr(apart, 3)}")


def _march(
    drift: Curve, diffusion: Curve, cuts: Sequence[Any], start: Matrix, goal: int
) -> tuple[Matrix, Matrix, Any, Any]:
    """Phi, Sigma, the largest size Sigma took and the product of the norms of the steps."""
    phi, sigma = _identity(len(start)), start
    size, spread = _largest(start), mp.one
    pending = list(pairwise(cuts))[::-1]
    while pending:
        left, right = pending.pop()
        step = _step(drift, diffusion, left, right - left, goal)
        if step is None:
            if right - left < mp.ldexp(cuts[-1], -30):
                raise ArithmeticError(f"the coefficients are not analytic near {mp.nstr(left)}")
            middle = (left + right) / 2
            pending += [(middle, right), (left, middle)]
            continue
        forward, gained, bound = step
        phi = _product(forward, phi)
        sigma = _add(_product(_product(forward, sigma), _transpose(forward)), gained)
        size = max(size, bound, _largest(sigma))
        spread *= max(_norm(forward), mp.eps)
    return phi, sigma, size, spread


def _step(
    drift: Curve, diffusion: Curve, left: Any, width: Any, goal: int
) -> tuple[Matrix, Matrix, Any] | None:
    """Phi, Sigma and a bound over one step, or None where the step is too long."""
    ends = (drift(left), drift(left + width / 2), drift(left + width))
    if max(_norm(_entries(a)) for a in ends) * width > LONGEST_STEP:
        return None
    pull = _interpolant(drift, left, width, goal)
    noise = _interpolant(diffusion, left, width, goal) if pull else None
    if not pull or not noise:
        return None
    # The series run in fixed point: an integer n stands for n / 2^prec.
    slopes = [
        [[x << pull[1] if pull[1] > 0 else x >> -pull[1] for x in r] for r in a] for a in pull[0]
    ]
    unit = [[int(x) << mp.prec for x in row] for row in _identity(len(slopes[0]))]
    phi = _series(slopes, unit, [], goal)
    sigma = _series(slopes, [[0] * len(unit) for _ in unit], noise[0], goal)
    scale = mp.ldexp(1, noise[1])
    return _floating(phi, mp.one), _floating(sigma, scale), scale


def _floating(a: Matrix, scale: Any) -> Matrix:
    """The matrix that fixed-point entries stand for, times scale."""
    return _scaled(mp.ldexp(scale, -mp.prec), a)


def _series(pull: list[Matrix], first: Matrix, noise: list[Matrix], goal: int) -> Matrix:
    """X(1) for X' = A X (noise empty) or X' = A X + X A^T + H, with A, H polynomials on [0, 1]."""
    size, degree, prec = len(first), len(pull) - 1, mp.prec
    small = (1 << prec) // 10 ** (goal + 5)
    # Row i of A_0, A_1, .. laid end to end, to be met by column j of X_k, X_{k-1}, ..
    rows = [[x for a in pull for x in a[i]] for i in range(size)]
    columns = _transpose(first)
    total, quiet, k = first, 0, 0
    while quiet <= min(degree, 10) + 2 or k <= len(noise):
        term = [[sum(map(mul, row, column)) >> prec for column in columns] for row in rows]
        if noise:
            term = _add(term, _transpose(term))
            term = _add(term, noise[k]) if k < len(noise) else term
        k += 1
        term = [[x // k for x in row] for row in term]
        total = _add(total, term)
        quiet = quiet + 1 if _largest(term) <= small else 0
        columns = [[r[j] for r in term] + columns[j][: size * degree] for j in range(size)]
    return total


def _interpolant(f: Curve, left: Any, width: Any, goal: int) -> tuple[list[Matrix], int] | None:
    """Power coefficients of u -> width f(left + width u) on [0, 1], None if out of reach.

    They are in fixed point, after division by the power of two that is returned with them.
    """
    small = (1 << mp.prec) // 10 ** (goal + 5)
    values: dict[int, list[Any]] = {}
    size = 0
    for nodes in NODES:
        points, weights, powers = _chebyshev(nodes, mp.prec)
        for j, u in enumerate(points):
            key = j * NODES[-1] // nodes
            if key not in values:
                rows = _entries(f(left + width * u))
                size = len(rows)
                values[key] = [width * x for row in rows for x in row]
        sample = [values[key] for key in sorted(values)]
        largest = _largest(sample)
        power = int(mp.mag(largest)) if largest else 0
        fixed = [[int(mp.ldexp(x, mp.prec - power)) for x in entry] for entry in _transpose(sample)]
        terms = [[sum(map(mul, row, entry)) >> mp.prec for entry in fixed] for row in weights]
        sizes = [max(map(abs, term)) for term in terms]
        tail = max(sizes[-4:])
        if tail <= small:
            break
        # Terms that keep falling at this pace must get there with the most nodes at hand.
        reach = (tail.bit_length() - mp.prec) * NODES[-1] // nodes
        if reach > small.bit_length() - mp.prec or nodes == NODES[-1]:
            return None
    used = max((k for k, x in enumerate(sizes) if x > small), default=0) + 1
    columns = _transpose(terms[:used])
    flat = [[sum(map(mul, powers[i], column)) for column in columns] for i in range(used)]
    return [[row[i * size : (i + 1) * size] for i in range(size)] for row in flat], power


@lru_cache(maxsize=32)
def _chebyshev(nodes: int, prec: int) -> tuple[list[Any], Matrix, Matrix]:
    """Lobatto points on [0, 1], values -> Chebyshev terms (fixed point), terms -> powers."""
    with mp.workprec(prec + 10):
        circle = [mp.cospi(mp.mpf(j) / nodes) for j in range(2 * nodes)]
        points = [(1 - circle[j]) / 2 for j in range(nodes + 1)]
        full = [int(mp.ldexp(2 * c / nodes, prec)) for c in circle]
    halved = (0, nodes)
    weights = [
        [
            full[(nodes - j) * k % (2 * nodes)] >> ((j in halved) + (k in halved))
            for j in range(nodes + 1)
        ]
        for k in range(nodes + 1)
    ]
    # The shifted polynomials obey T_{k+1} = (4 u - 2) T_k - T_{k-1}, T_0 = 1, T_1 = 2 u - 1.
    shifted = [[1] + [0] * nodes, [-1, 2] + [0] * (nodes - 1)]
    for _ in range(nodes - 1):
        before, last = shifted[-2:]
        moved = [0, *last[:-1]]
        shifted.append([4 * m - 2 * x - b for m, x, b in zip(moved, last, before, strict=True)])
    return points, weights, _transpose(shifted)
