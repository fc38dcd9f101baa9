"""The Gaussian surrogate of a data set: its mean and the standard deviations along its axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.likelihood import Likelihood
from ornstein.matrices import Vector, as_float64

ROUNDING = 1e-7  # of the largest standard deviation: below it, a covariance's root is rounding


@dataclass(frozen=True, eq=False)
class Spectrum:
    """N(mean, C) in the axes of C; directions in which the data does not vary are left out."""

    std: Tensor  # (N,) float64, falling
    mean: Tensor  # (N,) the data's mean along these axes
    weight: Tensor  # (N,) how many directions each stands for
    scale: float  # root mean square of the data, of the directions that are left out, too
    spread: float  # its standard deviation over all coordinates: what a model calls data_std

    @staticmethod
    def of(data: Tensor, likelihood: Likelihood) -> Spectrum:
        """Of the numbers that diffuse: data (n, *shape) under a likelihood."""
        likelihood.check(data)
        half = torch.full(data.shape, 0.5, dtype=torch.float64, device=data.device)
        values = likelihood.values(data, half if likelihood.dequantised else None, torch.float64)
        flat = values.flatten(1)
        if len(flat) < 2:
            raise ValueError(f"a spectrum of {len(flat)} example; expected two or more.")
        mean = flat.mean(0)
        square, axes = torch.linalg.eigh(torch.cov(flat.mT, correction=0).reshape(2 * [len(mean)]))
        square, axes = square.flip(0), axes.flip(1)
        keep = square > (ROUNDING**2) * square[0]
        if not bool(keep.any()):
            raise ValueError("the data is constant; expected data that vary.")
        std, along = square[keep].sqrt().cpu(), (axes.mT @ mean)[keep].cpu()
        scale, spread = flat.square().mean().sqrt().item(), flat.std(correction=0).item()
        return Spectrum(std, along, torch.ones_like(std), scale, spread)

    @staticmethod
    def given(std: Vector, mean: Vector | None = None) -> Spectrum:
        """From standard deviations, and means along the same axes (zero if they are left out)."""
        numbers = as_float64(std, "std").reshape(-1)
        if not len(numbers) or not bool((numbers > 0).all()):
            raise ValueError(f"std={std!r}; expected one or more positive standard deviations.")
        means = torch.zeros_like(numbers) if mean is None else as_float64(mean, "mean").reshape(-1)
        if means.shape != numbers.shape:
            raise ValueError(
                f"{len(means)} means for {len(numbers)} standard deviations; expected one each."
            )
        order = numbers.argsort(descending=True)
        square = (numbers.square() + means.square()).mean().item()
        spread = math.sqrt(square - means.mean().item() ** 2)
        numbers, means = numbers[order], means[order]
        return Spectrum(numbers, means, torch.ones_like(numbers), math.sqrt(square), spread)

    def brief(self, count: int = 32) -> Spectrum:
        """At most so many directions, each standing for others of about its standard deviation."""
        if len(self.std) <= count:
            return self
        place = self.std.log()
        part = (place[0] - place) / (place[0] - place[-1]).clamp(min=1e-12)
        group = (part * count).long().clamp(max=count - 1)
        _, group = torch.unique(group, return_inverse=True)
        size = int(group.max()) + 1

        def total(values: Tensor) -> Tensor:
            return torch.zeros(size, dtype=torch.float64).index_add(0, group, values)

        weight = total(self.weight)
        std = (total(self.weight * place) / weight).exp()
        mean = (total(self.weight * self.mean.square()) / weight).sqrt()
        return Spectrum(std, mean, weight, self.scale, self.spread)
