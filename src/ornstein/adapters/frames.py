"""What a denoiser from elsewhere wants to be asked, and what its answer means.

With ᾱ = SNR/(1 + SNR) = sigmoid(λ), a = √ᾱ and s = √(1 − ᾱ), x + σε becomes z = a x + s ε, and

    v = a ε − s x,     x = a z − s v,     ε = a v + s z.

Every kind of model is linear in this frame: it is given scale·z and its time, and its output o
means v̂ = output·o + input·z with four numbers that depend on λ alone.

    steps     z at steps t with a table of ᾱ_t; o is ε, x or v
    noise     (x + σε)/√(σ² + ς²) at log(σ)/4; o by the preconditioning of EDM, data of size ς
    flow      (1 − u) x + u ε at a multiple of u = 1/(1 + √SNR); o is ε − x

A model knows noise of some sizes only. Outside of them it answers as follows; a bound stays valid,
as it does for any answer, and only gets looser.

    more noise     it is asked about z at the last step, and x̂ is kept: ε̂ is wrong by a/s times
                   the error of x̂, which vanishes as the noise grows
    less noise     it is asked about x̃ at the first step, σ₀, and the score is kept:
                   ε̂(x̃, σ) = σ/σ₀·ε̂(x̃, σ₀). It fades to the answer zero, which is right for a
                   density and costs half a nat for each unit of λ; a kept x̂ would cost without
                   limit, since its error is divided by σ
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ornstein.schedules import Float64Module

Steps = Literal["fractional", "nearest"]
PREDICTIONS = ("epsilon", "sample", "v_prediction")
FLOWS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
PRECONDITIONED = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")


@dataclass(frozen=True)
class Question:
    """How to ask a model about z at some log SNR: (B,) each, float64."""

    scale: Tensor  # the model is given scale·z …
    time: Tensor  # … and this
    output: Tensor  # v̂ = output·(the model's output) + input·z
    input: Tensor


def amplitudes(logsnr: Tensor) -> tuple[Tensor, Tensor]:
    """a = √ᾱ and s = √(1 − ᾱ)."""
    return (logsigmoid(logsnr) / 2).exp(), (logsigmoid(-logsnr) / 2).exp()


class Frame(Float64Module, ABC):
    """What one kind of model wants to be asked."""

    lowest: float  # log SNR of the most noise that the model knows …
    highest: float  # … and of the least

    @abstractmethod
    def known(self, logsnr: Tensor) -> Question:
        """The question at noise that the model knows: (B,) float64."""

    def question(self, logsnr: Tensor) -> Question:
        """The question at any log SNR; outside, the score or x̂ of the nearer end is kept."""
        inside = logsnr.clamp(self.lowest, self.highest)
        found = self.known(inside)
        (a, s), (own_a, own_s) = amplitudes(logsnr), amplitudes(inside)
        # with less noise: z at σ₀ is nearer·z, and ε̂ is multiplied by σ/σ₀
        nearer = (own_a / a).clamp(max=1)
        gain = nearer * ((inside - logsnr) / 2).clamp(max=0).exp()
        # with more: v̂ = (a z − x̂)/s, where x̂ = a₁z − s₁v̂₁ by the last step
        gain = gain * (own_s / s).clamp(max=1)
        shift = s / a * (nearer**2 - 1) + (a - own_a).clamp(max=0) / s
        return Question(
            scale=found.scale * nearer,
            time=found.time,
            output=found.output * gain,
            input=found.input * gain * nearer + shift,
        )


class Table(Frame):
    """Steps 0 … T − 1 with log SNR from a table; between them a fractional step, or the nearest.

    At a log SNR of the table both are exact. Between, the fractional step is linear in log SNR; the
    nearest one is asked about z as it is, and its v̂ is kept.
    """

    table: Tensor

    def __init__(self, alphas: Tensor, prediction: str, steps: Steps) -> None:
        """alphas: ᾱ of each step. Ends without any noise, or any signal, are left out."""
        super().__init__()
        ratio = alphas.detach().to("cpu", torch.float64).flatten()
        inside = (ratio > 0) & (ratio < 1)
        logsnr = torch.logit(ratio[inside])
        whole = bool(torch.isfinite(ratio).all() and (ratio.diff() < 0).all())
        if len(logsnr) < 2 or not whole or ratio.min() < 0 or ratio.max() > 1:
            raise ValueError(
                f"the scheduler's alphas_cumprod are {_shown(ratio)}; expected two steps or more, "
                "falling, from 1 or less to 0 or more. Check its betas."
            )
        self.first = int((ratio == 1).sum())
        self.register_buffer("table", logsnr, persistent=False)
        self.highest, self.lowest = logsnr[0].item(), logsnr[-1].item()
        self.prediction, self.steps = prediction, steps

    def known(self, logsnr: Tensor) -> Question:
        right = torch.searchsorted(-self.table, -logsnr.contiguous(), right=True)
        right = right.clamp(1, len(self.table) - 1)
        near, far = self.table[right - 1], self.table[right]
        step = right - 1 + (near - logsnr) / (near - far)
        if self.steps == "nearest":
            step = step.round().long()
            logsnr = self.table[step]
        a, s = amplitudes(logsnr)
        one, zero = torch.ones_like(a), torch.zeros_like(a)
        if self.prediction == "epsilon":
            output, passed = 1 / a, -s / a
        elif self.prediction == "sample":
            output, passed = -1 / s, a / s
        else:
            output, passed = one, zero
        return Question(one, step + self.first, output, passed)


class Noise(Frame):
    """Preconditioned as in EDM (Karras et al. 2022), with data of size ς: no steps."""

    def __init__(self, smallest: float, largest: float, data: float, sign: float) -> None:
        super().__init__()
        self.highest, self.lowest = -2 * math.log(smallest), -2 * math.log(largest)
        self.data, self.sign = data, sign

    def known(self, logsnr: Tensor) -> Question:
        sigma = (-logsnr / 2).exp()
        wide = torch.hypot(sigma, torch.full_like(sigma, self.data))
        scale = torch.hypot(sigma, torch.ones_like(sigma)) / wide
        return Question(
            scale=scale,
            time=-logsnr / 8,  # log(σ)/4
            output=-self.sign * self.data * scale,
            input=sigma / wide / wide * (1 - self.data**2),
        )


class Flow(Frame):
    """Straight lines from data to noise, for every u between 0 and 1."""

    highest, lowest = math.inf, -math.inf

    def __init__(self, steps: float) -> None:
        super().__init__()
        self.steps = steps

    def known(self, logsnr: Tensor) -> Question:
        scale = (logsigmoid(logsnr / 2) - logsigmoid(logsnr) / 2).exp()  # (1 − u)/a
        time = self.steps * torch.sigmoid(-logsnr / 2)
        return Question(scale, time, scale, torch.tanh(logsnr / 4))


def frame_of(scheduler: Any, steps: Steps = "fractional") -> Frame:
    """What models that were trained with this scheduler of `diffusers` want to be asked."""
    if steps not in ("fractional", "nearest"):
        raise ValueError(f"steps={steps!r}; expected 'fractional' or 'nearest'.")
    name, config = type(scheduler).__name__, getattr(scheduler, "config", None)
    if not isinstance(config, Mapping):
        raise ValueError(
            f"the scheduler was given as {name}; expected the one that the model was trained with, "
            "such as diffusers.DDPMScheduler()."
        )
    if _is_a(scheduler, FLOWS) and not config.get("invert_sigmas"):
        _no_steps(name, steps)
        return Flow(float(config["num_train_timesteps"]))
    prediction = config.get("prediction_type")
    if _is_a(scheduler, PRECONDITIONED):
        _no_steps(name, steps)
        sign = {"epsilon": 1.0, "v_prediction": -1.0}
        found = _checked_prediction(name, prediction, tuple(sign))
        smallest, largest = float(config["sigma_min"]), float(config["sigma_max"])
        return Noise(smallest, largest, float(config["sigma_data"]), sign[found])
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if not isinstance(alphas, Tensor) or config.get("timestep_type") == "continuous":
        raise ValueError(
            f"{name} has no table of steps that is understood here; expected a scheduler with "
            f"alphas_cumprod, such as DDPMScheduler, or one of {', '.join(FLOWS + PRECONDITIONED)}."
        )
    return Table(alphas, _checked_prediction(name, prediction, PREDICTIONS), steps)


def _checked_prediction(name: str, prediction: Any, known: tuple[str, ...]) -> str:
    if not isinstance(prediction, str) or prediction not in known:
        raise ValueError(
            f"the {name} has prediction_type={prediction!r}; expected one of {', '.join(known)}, "
            "whichever the model was trained for. Build the scheduler with it."
        )
    return prediction


def _no_steps(name: str, steps: Steps) -> None:
    if steps != "fractional":
        raise ValueError(
            f"steps={steps!r} with {name}, whose model takes any time; expected 'fractional'. "
            "Leave steps out."
        )


def _is_a(scheduler: Any, names: tuple[str, ...]) -> bool:
    """By name, so that nothing is imported."""
    return any(cls.__name__ in names for cls in type(scheduler).__mro__)


def _shown(ratio: Tensor) -> str:
    numbers = [f"{v:g}" for v in ratio.tolist()]
    return ", ".join(numbers if len(numbers) < 7 else [*numbers[:3], "…", *numbers[-3:]]) or "none"
