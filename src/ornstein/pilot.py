"""A look at the first examples before an evaluation, with draws of their own.

What is found stays fixed for all others, so that nothing is biased by it:

- where to look. Stratified over many examples, a stretch of time adds to the error what the loss
  varies *within* it, over noise and examples. So an `Adaptive` proposal is told the variance in its
  bins, not the second moment; a little of the latter guards against bins calm by chance;
- how much of the control variate (`Bound.controlled`) to take: a regression in groups of log SNR.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.terms import Bound
from ornstein.times import Adaptive, Span, Times

EXAMPLES = 256
DRAWS = 8
BINS = 32  # of the proposal
GROUPS = 24  # of the regression
CAUTION = 0.02  # part of the second moment

Look = Callable[[Tensor, Tensor, Times], Bound]  # examples, their numbers, and where to look


@dataclass(frozen=True)
class Control:
    """How much of the control variate to take, by log SNR."""

    edges: Tensor  # (groups − 1,) rising
    parts: Tensor  # (groups,)

    def __call__(self, logsnr: Tensor) -> Tensor:
        return self.parts[torch.bucketize(logsnr, self.edges)]


class Heard(Times):
    """Another proposal that remembers what it hears."""

    def __init__(self, base: Times) -> None:
        super().__init__(base.spread)
        self.base = base
        self.places: list[Tensor] = []

    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        return self.base.place(u, span)

    def place_logsnr(
        self, u: Tensor, low: Tensor, high: Tensor, data_std: float
    ) -> tuple[Tensor, Tensor] | None:
        return self.base.place_logsnr(u, low, high, data_std)

    def observe(self, u: Tensor, size: Tensor) -> None:
        self.places.append(u.cpu())


def fit(look: Look, x: Tensor, base: Times, size: int) -> dict[str, Tensor]:
    """Ask `look` about x, so many examples at a time: what `proposal` and `Control` need."""
    heard = Heard(base)
    bounds = [look(x[index], index, heard) for index in torch.arange(len(x)).split(size)]
    errors, control, logsnr = (
        torch.cat([getattr(b, key).flatten() for b in bounds]).cpu()
        for key in ("errors", "control", "logsnr")
    )
    groups = [g for g in logsnr.argsort(stable=True).chunk(GROUPS) if len(g)]
    parts = torch.stack([_regression(errors[g], control[g]) for g in groups])
    firsts = torch.stack([logsnr[g[0]] for g in groups])
    beta = Control(firsts[1:], parts)
    loss = (errors - beta(logsnr) * control) / bounds[0].dims
    bins = (torch.cat(heard.places) * BINS).long().clamp(max=BINS - 1)
    count = torch.bincount(bins, minlength=BINS).to(torch.float64)
    mean, second = (
        torch.bincount(bins, weights=v, minlength=BINS) / count.clamp(min=1)
        for v in (loss, loss**2)
    )
    variance = (second - mean**2).clamp(min=0) * count / (count - 1).clamp(min=1)
    return {
        "second": variance + CAUTION * second,
        "seen": (count > 0).to(torch.float64),
        "edges": beta.edges,
        "parts": beta.parts,
    }


def _regression(errors: Tensor, control: Tensor) -> Tensor:
    """The part of the control that errors follow, drawn a little towards none: ()."""
    square = control.square().sum()
    together = ((errors - errors.mean()) * control).sum()
    part = together / square.clamp(min=1e-300) * len(errors) / (len(errors) + 4)
    return part.clamp(-0.5, 1.5).nan_to_num(0.0)


def proposal(found: dict[str, Tensor], base: Times, device: torch.device) -> Adaptive:
    """The fitted proposal, which learns no more."""
    fitted = Adaptive(base, bins=BINS).to(device)
    fitted.second.copy_(found["second"])
    fitted.seen.copy_(found["seen"])
    return fitted.eval()
