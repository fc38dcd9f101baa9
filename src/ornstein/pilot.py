"""A look at the first examples before an evaluation, with draws of their own.

What is found stays fixed for all others, so that nothing is biased by it:

- how much of the control variate (`Bound.controlled`) to take: a regression in groups of log SNR;
- what error to expect at which time: a line in each bin of a proposal. Its integral is known, so a
  draw is only asked for what it finds above or below it;
- where to look: a stretch of time adds to the error of the mean what losses differ *from that line*
  in it, over noise and examples. So the proposal is told this variance, not the second moment. Time
  in which all is known in advance, as below a bin's width for dequantised pixels, costs few draws.
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
CAUTION = 2  # looks of the average variance that are added to those of a bin, calm by chance or not
SHY = 4  # looks without any effect that are added to those of a regression

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


class Fitted(Adaptive):
    """What was found: a proposal that knows what to expect, and how much of a control to take."""

    level: Tensor  # (bins,) nats per dimension in the middle of each
    slope: Tensor  # (bins,) over its width

    def __init__(self, base: Times, found: dict[str, Tensor], device: torch.device) -> None:
        super().__init__(base, bins=BINS)
        for name in ("second", "seen", "level", "slope"):
            self.register_buffer(name, found[name].to(device))
        self.control = Control(found["edges"].to(device), found["parts"].to(device))
        self.eval()  # it learns no more

    @property
    def mean(self) -> float:
        """What is expected in all."""
        return float(self.level.mean())

    def line(self, place: Tensor) -> Tensor:
        """What is expected at places of the base."""
        at = (place * self.bins).long().clamp(max=self.bins - 1)
        return self.level[at] + self.slope[at] * (place * self.bins - at - 0.5)

    def excess(self, u: Tensor) -> Tensor:
        """What is expected of a weighted error at even places u, above its mean."""
        place, factor = self.reshape(u)
        return factor * self.line(place) - self.level.mean()


def fit(look: Look, x: Tensor, base: Times, size: int) -> dict[str, Tensor]:
    """Ask `look` about x, so many examples at a time: what `Fitted` needs."""
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
    return {"edges": beta.edges, "parts": beta.parts, **_lines(torch.cat(heard.places), loss)}


def _lines(places: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """A line through the losses of each bin, and their variance about it.

    A bin that nobody has seen is expected to be like the others. A loss that is no number, of a
    network that fails, tells nothing here.
    """
    places, loss = (t[loss.isfinite()] for t in (places, loss))
    bins = (places * BINS).long().clamp(max=BINS - 1)
    inside = places * BINS - bins - 0.5

    def summed(values: Tensor) -> Tensor:
        return torch.bincount(bins, weights=values, minlength=BINS)

    count = summed(torch.ones_like(loss))
    middle, mean = (summed(v) / count.clamp(min=1) for v in (inside, loss))
    away = inside - middle[bins]
    square = summed(away * away)
    slope = summed(away * (loss - mean[bins])) / square.clamp(min=1e-300) * count / (count + SHY)
    slope = torch.where(count > 2, slope, 0.0)
    rest = summed((loss - mean[bins] - slope[bins] * away) ** 2)
    free = (count - 1 - (count > 2).to(count)).clamp(min=0)
    average, seen = rest.sum() / free.sum().clamp(min=1), count > 0
    level = mean - slope * middle
    return {
        "second": (rest + CAUTION * average) / (free + CAUTION),
        "seen": seen.to(torch.float64),
        "level": torch.where(seen, level, level.sum() / seen.sum().clamp(min=1)),
        "slope": slope,
    }


def _regression(errors: Tensor, control: Tensor) -> Tensor:
    """The part of the control that errors follow, drawn a little towards none: ()."""
    square = control.square().sum()
    together = ((errors - errors.mean()) * control).sum()
    part = together / square.clamp(min=1e-300) * len(errors) / (len(errors) + SHY)
    return part.clamp(-0.5, 1.5).nan_to_num(0.0)
