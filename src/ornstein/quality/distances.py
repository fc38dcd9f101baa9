"""How far two sets of vectors are apart: four figures, all in float64.

    Fréchet              ‖m₁ − m₂‖² + tr(C₁ + C₂ − 2(C₁^½ C₂ C₁^½)^½), between Gaussians with the
                         sets' means and covariances (Heusel et al. 2017)
    kernel distance      E k(a, a') + E k(b, b') − 2 E k(a, b), k(u, v) = (u·v/F + 1)³, estimated
                         without bias (Bińkowski et al. 2018)
    precision, recall    the share of samples within reach of the data, and of the data within
                         reach of the samples; a point reaches its k-th nearest neighbour
                         (Kynkäänniemi et al. 2019)
    sliced Wasserstein   root mean square over directions θ of W₂(θ·a, θ·b), which is exact in one
                         dimension: quantile against quantile

No covariance is formed for the first. With centred sets = Q R √(n − 1), C = RᵀR, and

    tr(C₁ + C₂ − 2(C₁^½ C₂ C₁^½)^½) = min over orthogonal O of ‖R₁ − O R₂‖²,   O = U Vᵀ of R₁ R₂ᵀ

which can't be negative, does not cancel, and needs no more vectors than there are.

Errors are the jackknife's: the figure again without one sample or one group of them, the reference
fixed. They say how far another set of samples may be off, and nothing of the bias, which a figure
for data of the same number shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.draws import Counted
from ornstein.sampling.grids import whole

NEIGHBOURS = 3
DIRECTIONS = 512
FEW = 64  # of them for an error
GROUPS = 10  # that a jackknife leaves out in turn
_CHUNK = 1 << 24  # numbers that are in hand at a time, 128 MiB


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of a set, the latter as RᵀR."""

    mean: Tensor  # (F,)
    R: Tensor  # (r, F), at most as many rows as vectors

    @staticmethod
    def of(x: Tensor) -> Gaussian:
        """Of vectors: (N, F)."""
        F = x.shape[1]
        mean = torch.stack([rows.sum(0) for rows in _rows(x, F)]).sum(0) / len(x)
        R = mean.new_zeros(0, F)
        for rows in _rows(x, F):
            R = torch.linalg.qr(torch.cat([R, rows - mean]), mode="r")[1]
        return Gaussian(mean, R / math.sqrt(len(x) - 1))

    def distance(self, other: Gaussian) -> float:
        """Squared Fréchet distance."""
        rows = max(len(self.R), len(other.R))
        mine, its = (
            torch.cat([R, R.new_zeros(rows - len(R), R.shape[1])]) for R in (self.R, other.R)
        )
        U, _, Vh = torch.linalg.svd(mine @ its.mT)
        apart = (mine - U @ Vh @ its).square().sum()
        return ((self.mean - other.mean).square().sum() + apart).item()


def frechet(a: Tensor, b: Tensor) -> float:
    """Squared Fréchet distance between Gaussians fitted to two sets: (N, F), (M, F)."""
    _check(a, b, least=2)
    return Gaussian.of(a).distance(Gaussian.of(b))


def frechet_with_error(samples: Tensor, real: Tensor) -> tuple[float, float]:
    """The same, and its standard error over samples."""
    _check(samples, real, least=2)
    reference = Gaussian.of(real)
    without = [Gaussian.of(samples[kept]).distance(reference) for kept in _groups(samples)]
    return Gaussian.of(samples).distance(reference), _jackknife(without)


def kernel_distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Unbiased kernel distance between the laws of two sets, and its standard error.

    The error is the jackknife's over both sets. It is never too small on average (Efron and Stein
    1981), and up to √2 too large where the laws are equal. The distance may come out negative.
    """
    _check(a, b, least=3)
    n, m = len(a), len(b)
    of_a, own_a = _kernel_sums(a, a)
    of_b, own_b = _kernel_sums(b, b)
    across, _ = _kernel_sums(a, b)
    back, _ = _kernel_sums(b, a)
    of_a, of_b = of_a - own_a, of_b - own_b  # nobody is compared with itself
    aa, bb, ab = of_a.sum(), of_b.sum(), across.sum()
    value = aa / (n * (n - 1)) + bb / (m * (m - 1)) - 2 * ab / (n * m)
    # the same without one of a, and without one of b
    less_a = (aa - 2 * of_a) / ((n - 1) * (n - 2)) + bb / (m * (m - 1))
    less_a = less_a - 2 * (ab - across) / ((n - 1) * m)
    less_b = aa / (n * (n - 1)) + (bb - 2 * of_b) / ((m - 1) * (m - 2))
    less_b = less_b - 2 * (ab - back) / (n * (m - 1))
    square = (n - 1) * less_a.var(correction=0) + (m - 1) * less_b.var(correction=0)
    return value.item(), square.sqrt().item()


def _kernel_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j k(a_i, b_j), and k(a_i, a_i): (N,), (N,)."""
    F, other = a.shape[1], b.to(torch.float64)
    sums, own = [], []
    for rows in _rows(a, max(F, len(b))):
        sums.append(_cube(rows @ other.mT / F + 1).sum(1))
        own.append(_cube(rows.square().sum(1) / F + 1))
    return torch.cat(sums), torch.cat(own)


def _cube(x: Tensor) -> Tensor:
    return x * x * x  # ten times as fast as a power


def precision_recall(real: Tensor, fake: Tensor, k: int = NEIGHBOURS) -> tuple[float, float]:
    """Shares of fake that are near real, and of real that are near fake: (N, F), (M, F).

    They are meant for sets of about one size: the more there are of one, the shorter its reach.
    """
    whole(k, "k", 1)
    _check(real, fake, least=k + 1)
    return _covered(real, fake, k), _covered(fake, real, k)


def _covered(centres: Tensor, points: Tensor, k: int) -> float:
    """The share of points that are within reach of some centre."""
    others, wanted = centres.to(torch.float64), points.to(torch.float64)
    inside = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for rows in _rows(centres, max(centres.shape[1], len(centres), len(points))):
        # the nearest is the centre itself
        reach = _apart(rows, others).kthvalue(k + 1, 1).values
        inside |= (_apart(rows, wanted) <= reach.unsqueeze(1)).any(0)
    return inside.to(torch.float64).mean().item()


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Distances, from differences: equal points are at exactly 0."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def sliced_wasserstein(a: Tensor, b: Tensor, directions: int = DIRECTIONS, seed: int = 0) -> float:
    """Sliced Wasserstein-2 distance between two sets: (N, d), (M, d).

    The directions are a function of (seed, d); direction i does not depend on how many there are.
    A shift by δ is at ‖δ‖/√d, on the mean over directions.
    """
    _check(a, b, least=1)
    return _sliced(a, b, [slice(None)], directions, seed)[0]


def sliced_wasserstein_with_error(
    samples: Tensor, real: Tensor, directions: int = DIRECTIONS, seed: int = 0
) -> tuple[float, float]:
    """The same, and its standard error over samples, the directions fixed."""
    _check(samples, real, least=1)
    value = sliced_wasserstein(samples, real, directions, seed)
    few = min(directions, FEW)  # directions share most of the error, and sorting is what takes time
    return value, _jackknife(_sliced(samples, real, _groups(samples), few, seed))


def _sliced(
    a: Tensor, b: Tensor, parts: Sequence[slice | Tensor], directions: int, seed: int
) -> list[float]:
    """Of each of these parts of a from all of b."""
    whole(directions, "directions", 1)
    d, total = a.shape[1], [0.0] * len(parts)
    for first in range(0, directions, step := max(1, _CHUNK // max(len(a), len(b), d))):
        index = torch.arange(first, min(first + step, directions), device=a.device)
        theta = Counted(seed, index).normal("direction", (d,), torch.float64)
        theta = theta / theta.norm(dim=1, keepdim=True)
        mine, other = _projected(a, theta), _projected(b, theta).sort(1).values
        for i, part in enumerate(parts):
            total[i] += _squared(mine[:, part].sort(1).values, other).sum().item()
    return [math.sqrt(value / directions) for value in total]


def _projected(x: Tensor, theta: Tensor) -> Tensor:
    """Along each direction: (directions, N)."""
    return torch.cat([theta @ rows.mT for rows in _rows(x, x.shape[1])], 1)


def _squared(a: Tensor, b: Tensor) -> Tensor:
    """∫₀¹ (F_a⁻¹ − F_b⁻¹)² du of sorted samples, exactly: (D, N), (D, M) -> (D,)."""
    n, m = a.shape[1], b.shape[1]
    if n == m:
        return (a - b).square().mean(1)
    # quantiles jump at i/n and at j/m: whole numbers in units of 1/nm
    steps = torch.cat([torch.arange(n, device=a.device) * m, torch.arange(m, device=a.device) * n])
    edges = steps.unique()  # sorted, from 0
    width = torch.cat([edges, edges.new_tensor([n * m])]).diff().to(torch.float64) / (n * m)
    return (a[:, edges // m] - b[:, edges // n]).square() @ width


# ---------------------------------------------------------------- small tools


def _groups(x: Tensor) -> list[Tensor]:
    """All rows but those of one group, for each group; none where there are too few.

    Groups are drawn: what comes in an order, classes in turn for one, must not go group by group.
    """
    number = torch.arange(len(x), device=x.device)
    place = Counted(0, number).uniform("group", ()).argsort().argsort()
    count = min(GROUPS, len(x) // 2)
    return [number[place % count != i] for i in range(count)] if count >= 2 else []


def _jackknife(without: Sequence[float]) -> float:
    """The standard error of a figure, from those without one of the groups; NaN if none is."""
    if not without:
        return math.nan
    values = torch.tensor(without, dtype=torch.float64)
    return math.sqrt((len(values) - 1) * values.var(correction=0).item())


def _rows(x: Tensor, width: int) -> Iterator[Tensor]:
    """Some rows at a time, in float64."""
    for rows in x.split(max(1, _CHUNK // width)):
        yield rows.to(torch.float64)


def _check(a: Tensor, b: Tensor, least: int) -> None:
    for x in (a, b):
        if not isinstance(x, Tensor) or x.dim() != 2 or not x.shape[1]:
            given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"a set of vectors was given as {given}; expected a tensor (N, F). Flatten images "
                "with x.flatten(1)."
            )
        if len(x) < least:
            raise ValueError(
                f"a set has {len(x)} vector{'' if len(x) == 1 else 's'}; expected at least {least} "
                "for this figure. Take more samples."
            )
        if x.is_complex() or not bool(x.isfinite().all()):
            raise ValueError("a set has numbers that are NaN or infinite; expected finite ones.")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"vectors of {a.shape[1]} and of {b.shape[1]} numbers can't be compared; expected the "
            "same features of both sets."
        )
    if a.device != b.device:
        raise ValueError(f"the sets are on {a.device} and {b.device}; expected one device.")
