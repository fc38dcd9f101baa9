"""Laws on the plane: data that needs no file, and whose density is partly known.

    mixture        8 Gaussians of spread 0.1 on a circle of radius 1.4
    rings          radius 0.5, 1 or 1.5 with a spread of 0.05, every angle
    checkerboard   uniform on the 8 dark squares of a board of 4 × 4, of side ¾
    moons          two half circles of radius 1 that interlock, with noise of 0.05
    swissroll      a spiral of 1½ turns, with noise of 0.05

All lie around the origin, between −2 and 2 or so. Example i of a split is a function
of (seed, split, i); no random generator of torch or numpy is involved.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ornstein.data.sets import Dataset, Split
from ornstein.draws import Counted

SIZES = {"train": 20_000, "valid": 2_000, "test": 2_000}
RADIUS, SPREAD, PARTS = 1.4, 0.1, 8  # of the mixture
RINGS, THICKNESS = (0.5, 1.0, 1.5), 0.05
SIDE, BOARD = 0.75, 4  # of the checkerboard
NOISE = 0.05  # of moons and swissroll

Drawn = tuple[Tensor, Tensor | None]  # (N, 2), (N,)


def toy(name: str, seed: int, valid: int | None = None) -> Dataset:
    """One of these laws as a data set."""
    sizes = SIZES if valid is None else SIZES | {"valid": valid}
    splits = {}
    for number, (split, count) in enumerate(sizes.items()):
        x, labels = TOYS[name](Counted(seed, torch.arange(count), number))
        splits[split] = Split(x.to(torch.float32), labels)
    source = f"drawn by ornstein.data.toys, seed {seed}"
    return Dataset(name, splits["train"], splits["valid"], splits["test"], None, source)


def mixture(draws: Counted) -> Drawn:
    """8 Gaussians on a circle."""
    part = _choice(draws, PARTS)
    return _centres()[part] + SPREAD * draws.normal("toy noise", (2,), torch.float64), part


def mixture_log_density(x: Tensor) -> Tensor:
    """log p of `mixture`, exact: (N, 2) -> (N,) float64."""
    away = x.to(torch.float64).unsqueeze(-2) - _centres().to(x.device)  # (N, 8, 2)
    logs = -0.5 * (away / SPREAD).square().sum(-1)
    return torch.logsumexp(logs, -1) - math.log(PARTS * 2 * math.pi * SPREAD**2)


def rings(draws: Counted) -> Drawn:
    """Three circles with a Gaussian radius."""
    ring = _choice(draws, len(RINGS))
    radius = torch.tensor(RINGS, dtype=torch.float64)[ring]
    radius = radius + THICKNESS * draws.normal("toy noise", (), torch.float64)
    return radius.unsqueeze(-1) * _direction(2 * math.pi * draws.uniform("toy angle", ())), ring


def rings_log_density(x: Tensor) -> Tensor:
    """log p of `rings`, exact: (N, 2) -> (N,) float64."""
    radius = x.to(torch.float64).norm(dim=-1, keepdim=True)
    means = torch.tensor(RINGS, dtype=torch.float64, device=x.device)
    # a point is reached by its radius, and by minus its radius from the other side
    away = torch.cat([radius - means, radius + means], -1) / THICKNESS  # (N, 6)
    logs = torch.logsumexp(-0.5 * away.square(), -1)
    constant = math.log(len(RINGS) * THICKNESS * math.sqrt(2 * math.pi) * 2 * math.pi)
    return logs - constant - radius.squeeze(-1).log()


def checkerboard(draws: Counted) -> Drawn:
    """Uniform on the dark squares."""
    square = _choice(draws, BOARD * BOARD // 2)
    row = square // (BOARD // 2)
    column = 2 * (square % (BOARD // 2)) + row % 2
    corner = torch.stack([column, row], -1) - BOARD / 2
    return SIDE * (corner + draws.uniform("toy place", (2,))), square


def checkerboard_log_density(x: Tensor) -> Tensor:
    """log p of `checkerboard`, exact; −inf on the light squares: (N, 2) -> (N,) float64."""
    place = (x.to(torch.float64) / SIDE + BOARD / 2).floor()
    dark = ((place >= 0) & (place < BOARD)).all(-1) & (place.sum(-1) % 2 == 0)
    inside = -math.log(BOARD * BOARD / 2 * SIDE**2)
    return torch.where(dark, inside, -math.inf)


def moons(draws: Counted) -> Drawn:
    """Two half circles."""
    moon = _choice(draws, 2)
    arc = _direction(math.pi * draws.uniform("toy angle", ()))
    other = torch.tensor([1.0, 0.5], dtype=torch.float64) - arc
    middle = torch.tensor([0.5, 0.25], dtype=torch.float64)
    x = torch.where(moon.unsqueeze(-1) == 0, arc, other) - middle
    return x + NOISE * draws.normal("toy noise", (2,), torch.float64), moon


def swissroll(draws: Counted) -> Drawn:
    """A spiral; angles are drawn so that each piece of it is about as likely as it is long."""
    low, high = 1.5 * math.pi, 4.5 * math.pi
    angle = (low**2 + (high**2 - low**2) * draws.uniform("toy angle", ())).sqrt()
    x = (angle / (2.25 * math.pi)).unsqueeze(-1) * _direction(angle)
    return x + NOISE * draws.normal("toy noise", (2,), torch.float64), None


TOYS: dict[str, Callable[[Counted], Drawn]] = {
    "moons": moons,
    "rings": rings,
    "checkerboard": checkerboard,
    "swissroll": swissroll,
    "mixture": mixture,
}


def _choice(draws: Counted, count: int) -> Tensor:
    """One of 0 … count − 1 each, with equal probability: (N,) int64."""
    return (draws.uniform("toy part", ()) * count).long()


def _direction(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def _centres() -> Tensor:
    """Of the mixture: (8, 2) float64."""
    return RADIUS * _direction(2 * math.pi * torch.arange(PARTS, dtype=torch.float64) / PARTS)
