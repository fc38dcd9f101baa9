"""A running mean of all parameters, network and process alike.

    θ̄ ← m θ̄ + (1 − m) θ,        m = min(memory, (1 + n)/(10 + n)) after n steps,

so that the first steps are forgotten quickly. It is a model of its own: the trained one is never
overwritten.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ornstein.score import ScoreModel


class Average:
    """The averaged model; with memory 0 it is the trained one itself."""

    def __init__(self, model: ScoreModel, memory: float) -> None:
        self.source, self.memory = model, memory
        self.model = model
        if memory > 0:
            self.model = copy.deepcopy(model).requires_grad_(False).eval()
        pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
        # parameters of one type and device are averaged in one call
        self.groups: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for mean, new in pairs if memory > 0 else ():
            self.groups.setdefault((mean.dtype, mean.device), []).append((mean, new))

    def part(self, done: int) -> float:
        """Of the new weights, after a step before which `done` were taken: 1 − m."""
        return 1 - min(self.memory, (1 + done) / (10 + done))

    @torch.no_grad()
    def update(self, part: float) -> None:
        """After a step."""
        for group in self.groups.values():
            means, news = zip(*group, strict=True)
            torch._foreach_lerp_(list(means), list(news), part)

    @torch.no_grad()
    def settle(self) -> ScoreModel:
        """The averaged model, ready to be used: buffers as they are now, panels that fit."""
        if self.memory > 0:
            for mean, new in zip(self.model.buffers(), self.source.buffers(), strict=True):
                mean.copy_(new)
            self.model.process.replan()
        return self.model
