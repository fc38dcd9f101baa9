"""Linear equations Y' = F Y + b on a unit interval, by collocation at Gauss points."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ornstein.linalg import gauss_legendre

NODES = 6  # Gauss points of an interval: errors of the 12th power of its length


@dataclass(frozen=True)
class Quadrature:
    """Gauss points of [0, 1]."""

    nodes: Tensor  # (p,)
    inner: Tensor  # (p, p) integrals of the polynomials of the points, from 0 to each of them …
    weights: Tensor  # (p,) … and to 1


@cache
def gauss_rule(device: torch.device) -> Quadrature:
    """The rule on a device."""
    nodes, weights = (np.asarray(v) for v in gauss_legendre(NODES))
    powers = np.arange(NODES)
    basis = np.linalg.inv(nodes[:, None] ** powers)  # columns: coefficients of the polynomials
    inner = (nodes[:, None] ** (powers + 1) / (powers + 1)) @ basis
    with torch.inference_mode(False):  # kept, and used where gradients are needed, too
        return Quadrature(*(torch.from_numpy(v.copy()).to(device) for v in (nodes, inner, weights)))


def collocated(F: Tensor, b: Tensor | None, rule: Quadrature) -> tuple[Tensor, Tensor]:
    """Y(1) = M Y(0) + c from F (…, p, N, N) and b (…, p, N, C) at the nodes: M, c.

    For a skew F, M is orthogonal.
    """
    *batch, p, N, _ = F.shape
    # slopes k_i = F_i (Y + Σ_j inner_ij k_j) + b_i
    right = F if b is None else torch.cat([F, b], -1)
    matrix = torch.einsum("ij,...iab->...iajb", rule.inner, F).reshape(*batch, p * N, p * N)
    system = torch.eye(p * N).to(matrix) - matrix
    slopes = torch.linalg.solve(system, right.reshape(*batch, p * N, -1))
    gained = torch.einsum("i,...ikc->...kc", rule.weights, slopes.reshape(*batch, p, N, -1))
    return torch.eye(N).to(gained) + gained[..., :N], gained[..., N:]
