"""What a network is told, and what it adds to the answer that is known without it.

Beyond the Gaussian answer (`answers`), with x̃ = x + σ ε_∥ and data N(m, ς²), a model says

    channel   h + ς/√(ς²+σ²)·network((x̃ − m)/√(ς²+σ²), λ)
    joint     â h + ς/√(ς²+σ²)·network((y − r m)/√(r²ς² + diag Σ), λ)

where h = (x̂_Gauss − x̂)/σ is what a histogram sees beyond the Gaussian, and 0 without one. For
dequantised pixels the network is left out where noise is smaller than a bin. Beside its state the
network gets further entries of axis 1: sines and cosines of x̃ or of the noised data, and what the
histogram sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ornstein.answers import (
    LARGEST,
    GaussianAnswer,
    Moments,
    NoAnswer,
    View,
    contract,
    expand,
    over,
)
from ornstein.histogram import Histogram
from ornstein.likelihood import Discrete, Likelihood, OfPixels
from ornstein.linalg import in_graph
from ornstein.transition import Transition

FADED = 0.35  # bins; noise below which a network that has seen levels alone is left out

Network = Callable[[Tensor, Tensor], Any]  # of a normalised state and log SNR


@dataclass(frozen=True)
class Residual:
    """A network that adds to an answer, with all that it is told."""

    network: Network
    variables: int | None  # that a joint model predicts; None for a channel model
    moments: Moments
    frequencies: tuple[float, ...]  # of the sines and cosines
    of_x: bool  # whether a joint model's are of x̃, not of the noised data
    histogram: Histogram | None
    precondition: bool  # whether there is an answer to add to

    def channel(self, x_noisy: Tensor, logsnr: Tensor, answer: GaussianAnswer | NoAnswer) -> Tensor:
        """Of the noise in x̃: (B, *shape)."""
        if isinstance(answer, NoAnswer):
            return self._call(x_noisy, self._waves(x_noisy, logsnr), logsnr)
        state, extras = answer.normalised(x_noisy), self._waves(x_noisy, logsnr)
        if self.histogram is None:
            return answer.scale * self._call(state, extras, logsnr)
        sigma = (-logsnr / 2).exp()
        beyond, more = self._beyond(self.histogram, x_noisy, sigma, answer)
        scale = _trusted(answer.scale, self.histogram, sigma)
        return beyond + self._added(scale, state, [*extras, *more], logsnr)

    def joint(self, y: Tensor, kernel: Transition, view: View, x_noisy: Tensor | None) -> Tensor:
        """Of the noise in all variables: (B, K, *shape); x̃ is found from y where it is None."""
        if x_noisy is None and (self.histogram is not None or (self.frequencies and self.of_x)):
            white = kernel.noise(y.to(torch.float64), torch.zeros_like(y[:, 0]).double())
            along = contract(view.direction, white)
            x_noisy = along * over(view.sigma.clamp(max=LARGEST), along)
        if x_noisy is not None:
            x_noisy = x_noisy.to(torch.promote_types(y.dtype, torch.float32))
        raw = x_noisy if self.of_x and x_noisy is not None else y[:, 0]
        extras = self._waves(raw, view.logsnr)
        if not self.precondition:
            return self._call(y, [extra.unsqueeze(1) for extra in extras], view.logsnr)
        state = _normalised(y, kernel, self.moments)
        answer = GaussianAnswer.of(self.moments, view.sigma, y[:, 0])
        beyond = None
        if self.histogram is not None and x_noisy is not None:
            beyond, more = self._beyond(self.histogram, x_noisy, view.sigma, answer)
            beyond, extras = beyond.to(y.dtype), [*extras, *more]
        extras = [extra.unsqueeze(1) for extra in extras]
        scale = answer.scale.expand_as(y[:, 0])
        if self.histogram is not None:
            scale = _trusted(scale, self.histogram, view.sigma)
        guess = self._added(scale.unsqueeze(1), state, extras, view.logsnr)
        return guess if beyond is None else guess + expand(view.direction, beyond)

    # ---------------------------------------------------------------- what the network is told

    def _beyond(
        self, histogram: Histogram, x_noisy: Tensor, sigma: Tensor, answer: GaussianAnswer
    ) -> tuple[Tensor, list[Tensor]]:
        """The noise that a histogram sees beyond this answer, and what the network is told."""
        seen = histogram.seen(x_noisy.to(data_dtype(self.network)), sigma)
        return seen.beyond(answer.data(x_noisy)).to(x_noisy.dtype), seen.extras(self.moments)

    def _waves(self, raw: Tensor, logsnr: Tensor) -> list[Tensor]:
        """Sines and cosines of x̃, or of the noised data: (B, *shape) each."""
        damped = self.histogram is not None or (self.variables is not None and self.of_x)
        waves: list[Tensor] = []
        for frequency in self.frequencies:
            wide = raw.to(torch.promote_types(raw.dtype, torch.float32))
            angle = wide.clamp(-(LARGEST**0.5), LARGEST**0.5) * frequency
            both = [angle.sin(), angle.cos()]
            waves += [_damped(wave, frequency, logsnr) for wave in both] if damped else both
        return waves

    # ---------------------------------------------------------------- the network

    def _added(
        self, scale: Tensor, state: Tensor, extras: Sequence[Tensor], logsnr: Tensor
    ) -> Tensor:
        """What the network adds: like `state`. It is not asked where nothing is left of it, as at
        the end of dequantised pixels, which would be every second time."""
        fading = self.histogram is not None and self.histogram.even
        if fading and not in_graph() and not bool(scale.any()):
            return torch.zeros_like(state)
        return scale * self._call(state, extras, logsnr)

    def _call(self, state: Tensor, extras: Sequence[Tensor], logsnr: Tensor) -> Tensor:
        """The network on its normalised input, checked: like `state`."""
        inputs = torch.cat([state, *(e.to(state.dtype) for e in extras)], 1) if extras else state
        kind = _network_dtype(self.network) or state.dtype
        output = self._ask(inputs.to(kind), logsnr.to(torch.promote_types(kind, torch.float32)))
        if not isinstance(output, Tensor) or output.shape != state.shape:
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"the network returned {found} for an input of shape {tuple(inputs.shape)}; "
                f"expected {tuple(state.shape)}, "
                + (
                    "the data's own shape."
                    if self.variables is None
                    else f"noise for all {self.variables} variables (parametrisation='joint')."
                )
            )
        return output.to(state.dtype)

    def _ask(self, inputs: Tensor, logsnr: Tensor) -> Any:
        try:
            return self.network(inputs, logsnr)
        except RuntimeError as error:
            if "dtype" in str(error) and inputs.dtype != logsnr.dtype:
                raise ValueError(
                    f"the network failed on an input of type {inputs.dtype} and log SNR of type "
                    f"{logsnr.dtype} ({error}); log SNR stays float32, since half types blur it. "
                    "Expected a network that embeds it first and casts the embedding to its own "
                    "type; or keep the network in float32 and use torch.autocast."
                ) from error
            raise


def _normalised(y: Tensor, kernel: Transition, moments: Moments) -> Tensor:
    """(y − r m)/√(r²ς² + diag Σ): (B, K, *shape)."""
    x, response = y[:, 0], kernel.response.to(y.dtype)
    mean, std = moments.mean.to(y.dtype), moments.std.to(y.dtype)
    spread = kernel.cholesky.square().sum(-1).to(y.dtype)
    centred = y - expand(response, mean.expand_as(x))
    wide = (expand(response.square(), (std**2).expand_as(x)) + over(spread, y)).sqrt()
    return centred / wide


def _trusted(scale: Tensor, histogram: Histogram, sigma: Tensor) -> Tensor:
    """The scale of what a network adds, where it knows something.

    Levels are all that it was trained on. Of dequantised pixels, seen so clearly that their place
    in a bin shows, it knows nothing, and the closed form everything.
    """
    if not histogram.even:
        return scale
    return scale * over((-((FADED * histogram.width / sigma) ** 2) / 2).exp(), scale)


def _damped(wave: Tensor, frequency: float, logsnr: Tensor) -> Tensor:
    """A wave of x̃, faded out where noise is longer than it, by exp(−(fσ)²/8).

    It says nothing there, and its derivative by σ, which a learned process sees, would grow.
    """
    size = (-((frequency**2) / 8) * (-logsnr).exp()).exp()
    return wave * over(size, wave, wave.dtype)


def data_dtype(network: Network) -> torch.dtype:
    """The type of the data's numbers outside a network: at least float32."""
    found = _network_dtype(network)
    if found is None:
        return torch.get_default_dtype()
    return torch.float32 if found.itemsize < 4 else found


def _network_dtype(network: Network) -> torch.dtype | None:
    if not isinstance(network, nn.Module):
        return None
    kinds = (p.dtype for p in network.parameters() if p.is_floating_point())
    return next(kinds, None)


# ---------------------------------------------------------------- as users ask for it


def as_frequencies(
    given: Sequence[float] | str | None, likelihood: Likelihood
) -> tuple[float, ...]:
    """The frequencies of these features."""
    if given is None:
        return ()
    if given == "bins":
        if not isinstance(likelihood, OfPixels) or likelihood.density:
            raise ValueError(
                "features='bins' needs pixels; expected likelihood=Discrete(levels) or "
                "Tweedie(levels). Give frequencies, or leave features out."
            )
        width = likelihood.pixels.finest()
        return (math.pi / width, 2 * math.pi / width)
    try:
        frequencies = () if isinstance(given, str) else tuple(float(f) for f in given)
    except (TypeError, ValueError):
        frequencies = ()
    if not frequencies or not all(math.isfinite(f) for f in frequencies):
        raise ValueError(
            f"features={given!r}; expected 'bins', a list of finite frequencies, or None."
        )
    return frequencies


def as_histogram(
    given: Tensor | None, likelihood: Likelihood, precondition: bool
) -> Histogram | None:
    """The histogram with these counts, where there can be one."""
    if given is None:
        return None
    if not isinstance(likelihood, Discrete):
        raise ValueError(
            f"a histogram was given with {likelihood!r}; expected Discrete(levels), whose "
            "pixels are at the numbers of their levels. Leave the histogram out."
        )
    if not precondition:
        raise ValueError(
            "a histogram was given with precondition=False, which leaves all answers to the "
            "network; expected one of the two."
        )
    pixels = likelihood.pixels
    return Histogram(pixels.centres(), given, pixels.edges())
