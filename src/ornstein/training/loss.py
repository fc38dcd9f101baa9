"""One part of a training step as a module: examples in, a loss and its parts out.

A module, so that it can be compiled and shared over processes as one. The noise of an example is a
function of the seed and of its place in the run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ornstein.draws import Counted
from ornstein.objectives import elbo, mism, noise_prediction, score_matching
from ornstein.score import ScoreModel
from ornstein.terms import Bound, natural_times
from ornstein.times import Adaptive, Importance, Information, LogSNR, Times, Uniform
from ornstein.training.options import Objective

#: what a part of a step tells; the first is minimised, the last two say where the error is largest
VALUES = ("loss", "prior", "diffusion", "reconstruction", "worst_error", "worst_logsnr")


class Loss(nn.Module):
    """The objective of a model as it is trained, in bits per dimension where it is a bound."""

    def __init__(self, model: ScoreModel, objective: Objective, seed: int, narrow: bool) -> None:
        super().__init__()
        self.model, self.objective, self.seed = model, objective, seed
        self.narrow = narrow  # whether the network computes in bfloat16
        self.times = proposal(model, objective)

    def settle(self) -> None:
        """Before a first call: a fixed process finds where it is cut off, and keeps it for all."""
        with torch.no_grad():
            self.model.truncation.time(self.model.process)

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, (), and VALUES, (6,) without gradient; index: (B,) places in the run."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.narrow):
            self.model.process.hold()
            try:
                return self._forward(x, index)
            finally:
                self.model.process.release()

    def _forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        random = Counted(self.seed, index)
        if self.objective.bound:
            bound = self._bound(x, random)
            scale = -1 / (bound.dims * math.log(2))
            parts = [bound.prior, bound.diffusion, bound.reconstruction]
            means = [scale * part.mean() for part in parts]
            errors, at = bound.errors.flatten(), bound.logsnr.flatten()
            sizes = errors.abs().nan_to_num(math.inf, math.inf, math.inf)
            worst = sizes.argmax().reshape(1)  # (an index without axes would be read on the host)
            loss = bound.bits_per_dim.mean()
            told = [loss, *means, -scale * errors[worst].sum(), at[worst].sum()]
        else:
            dims = math.prod(x.shape[1:])
            loss = self._simple(x, random).mean() / dims
            told = [loss, *[torch.zeros_like(loss)] * 5]
        return loss, torch.stack([value.detach() for value in told])

    def _bound(self, x: Tensor, random: Counted) -> Bound:
        options = self.objective
        if options.objective == "mism":
            return mism(self.model, x, draws=options.draws, times=self.times, random=random)
        return elbo(self.model, x, **self._asked(random))

    def _simple(self, x: Tensor, random: Counted) -> Tensor:
        predict_noise = self.objective.objective == "noise_prediction"
        loss = noise_prediction if predict_noise else score_matching
        return loss(self.model, x, **self._asked(random))

    def _asked(self, random: Counted) -> dict[str, Any]:
        """What all but the implicit bound are told."""
        options = self.objective
        return {
            "draws": options.draws,
            "times": self.times,
            "given": options.given,
            "random": random,
        }


def proposal(model: ScoreModel, objective: Objective) -> Times:
    """Where times are drawn."""
    if objective.times == "natural":
        natural = natural_times(model, objective.given)
        natural.spread = objective.spread
        return natural
    makers: dict[str, type[Times]] = {
        "information": Information,
        "importance": Importance,
        "logsnr": LogSNR,
        "uniform": Uniform,
        "adaptive": Adaptive,
    }
    return makers[objective.times](spread=objective.spread)
