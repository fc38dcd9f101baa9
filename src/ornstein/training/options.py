"""Options of a training run as typed, frozen values: what is optimised, how, and what is kept.

`Training` holds the others. Everything that decides the numbers of a run is in it, and they are
a function of these options, the data and the model: not of the machine's clock, the number of
processes or an interruption. What may change between two starts of one run is in `Watch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch

from ornstein.compiling import wanted
from ornstein.draws import SPREADS, Spread
from ornstein.transition import Given

_CHECKING = ContextVar("checking", default=True)


class Checked:
    """Options that check themselves as soon as they are made."""

    def __post_init__(self) -> None:
        if _CHECKING.get():
            self.check()

    def check(self) -> None:
        """Raise a ValueError for an option that can't be meant."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """For a parser that would wrap the message of a check into its own; check afterwards."""
    before = _CHECKING.set(False)
    try:
        yield
    finally:
        _CHECKING.reset(before)


def check_all(options: object) -> None:
    """Check options and all that are inside them."""
    for field_ in dataclasses.fields(options):  # type: ignore[arg-type]
        value = getattr(options, field_.name)
        if dataclasses.is_dataclass(value):
            check_all(value)
    if isinstance(options, Checked):
        options.check()


Loss = Literal["elbo", "mism", "score_matching", "noise_prediction"]
Proposal = Literal["natural", "information", "importance", "logsnr", "uniform", "adaptive"]


@dataclass(frozen=True)
class Objective(Checked):
    """What is minimised."""

    objective: Loss = "elbo"
    """The bound by denoising or by implicit score matching, or one of the simpler losses."""
    draws: int = 1
    """Times per example and step."""
    times: Proposal = "natural"
    """Where times are drawn; natural is what suits the model."""
    spread: Spread = "stratified"
    """How the times of a batch are spread."""
    given: Given = "x"
    """What the kernel is given: x alone, or all variables at time 0."""

    def check(self) -> None:
        _among(self, "objective", ("elbo", "mism", "score_matching", "noise_prediction"))
        _among(
            self,
            "times",
            ("natural", "information", "importance", "logsnr", "uniform", "adaptive"),
        )
        _among(self, "spread", SPREADS)
        _among(self, "given", ("x", "state"))
        _whole(self, "draws", 1)
        if self.given == "state" and self.objective == "mism":
            raise ValueError(
                "given='state' with objective='mism', which integrates the auxiliary variables "
                "out; expected given='x', or another objective."
            )

    @property
    def bound(self) -> bool:
        """Whether it is a bound, in bits per dimension, with parts."""
        return self.objective in ("elbo", "mism")


@dataclass(frozen=True)
class Optimiser(Checked):
    """How it is minimised."""

    optimiser: Literal["adamw", "adam"] = "adamw"
    """AdamW, or Adam (whose weight decay is part of the gradient)."""
    lr: float = 1e-3
    """Learning rate of the network."""
    process_lr: float = 1e-2
    """Learning rate of the process, if it is learned."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Memory of the first and the second moment."""
    weight_decay: float = 0.0
    """Of the network's weights; a process is never decayed."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for none."""
    warmup: int = 100
    """Steps over which the learning rates rise."""
    decay: Literal["constant", "cosine"] = "constant"
    """What the learning rates do after that."""
    final: float = 0.0
    """With cosine: their last value, as a part of the largest."""

    def check(self) -> None:
        _among(self, "optimiser", ("adamw", "adam"))
        _among(self, "decay", ("constant", "cosine"))
        for name in ("lr", "process_lr"):
            _number(self, name, 0.0, math.inf, open_low=True)
        for name in ("weight_decay", "clip"):
            _number(self, name, 0.0, math.inf)
        _number(self, "final", 0.0, 1.0)
        _whole(self, "warmup", 0)
        betas = self.betas
        good = isinstance(betas, tuple) and len(betas) == 2
        good = good and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas)
        if not good:
            raise ValueError(f"betas={betas!r}; expected two numbers in [0, 1), such as 0.9, 0.99.")

    def factor(self, step: int, steps: int) -> float:
        """By which learning rates are multiplied at a step, from 0: warm-up, then the decay."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.decay == "constant":
            return rise
        part = min(1.0, max(0, step - self.warmup) / max(1, steps - self.warmup))
        return rise * (self.final + (1 - self.final) * (1 + math.cos(math.pi * part)) / 2)


@dataclass(frozen=True)
class Watch(Checked):
    """What is looked at and kept along the way. None of it changes the numbers of a run."""

    log_every: int = 50
    """Steps between two lines of metrics."""
    valid_every: int = 1000
    """Steps between two looks at the validation split; 0 for none."""
    valid_examples: int = 1000
    """At most so many of its examples."""
    valid_draws: int = 2
    """Times per example."""
    sample_every: int = 1000
    """Steps between two sample grids, always from the same noise; 0 for none."""
    samples: int = 64
    """Samples in a grid."""
    sample_steps: int = 100
    """Steps of its sampler."""
    quality_every: int = 0
    """Steps between two looks at the samples' quality, which takes its time; 0 for none."""
    quality_samples: int = 1000
    """Samples that are compared with the training data then."""
    quality_steps: int = 20
    """Steps of their sampler."""
    save_minutes: float = 5.0
    """Minutes between two checkpoints: what may be lost at most."""
    save_every: int = 0
    """Steps between two checkpoints; 0 leaves it to the minutes."""
    keep: int = 2
    """How many checkpoints to keep, besides the best on validation."""

    def check(self) -> None:
        for name in ("valid_every", "sample_every", "quality_every", "save_every"):
            _whole(self, name, 0)
        for name in ("log_every", "valid_examples", "valid_draws", "samples", "sample_steps"):
            _whole(self, name, 1)
        _whole(self, "quality_samples", 8)
        _whole(self, "quality_steps", 1)
        _whole(self, "keep", 1)
        _number(self, "save_minutes", 0.0, math.inf)


@dataclass(frozen=True)
class Training(Checked):
    """A whole run."""

    steps: int = 10_000
    """Steps of the optimiser."""
    batch: int = 128
    """Examples per step, over all processes and parts."""
    accumulate: int = 1
    """Parts that a process does its share of the batch in, to save memory."""
    ema: float = 0.999
    """Memory of the averages of all parameters, network and process; 0 for none."""
    seed: int = 0
    """Of everything random: weights, order, times, noise, dropout."""
    flips: bool = False
    """Mirror training images left-right at random."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the network's arithmetic; weights and kernels keep theirs."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the training step, and one CUDA graph of it; auto is on for CUDA."""
    objective: Objective = field(default_factory=Objective)
    optimiser: Optimiser = field(default_factory=Optimiser)
    watch: Watch = field(default_factory=Watch)

    def check(self) -> None:
        for name in ("steps", "batch", "accumulate"):
            _whole(self, name, 1)
        _whole(self, "seed", None)
        _number(self, "ema", 0.0, 1.0, open_high=True)
        if not isinstance(self.flips, bool):
            raise ValueError(f"flips={self.flips!r}; expected True or False.")
        for name, kind in (("objective", Objective), ("optimiser", Optimiser), ("watch", Watch)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}; expected ornstein.{kind.__name__}(…)."
                )
        _among(self, "precision", ("float32", "bfloat16"))
        _among(self, "compile", ("auto", "on", "off"))
        if self.compile == "on" and self.objective.objective == "mism":
            raise ValueError(
                "compile='on' with objective='mism', which takes derivatives of derivatives; "
                "torch.compile has none. Expected compile='off' or 'auto'."
            )

    def compiled_on(self, device: torch.device) -> bool:
        """Whether the step is compiled on this device."""
        return self.objective.objective != "mism" and wanted(self.compile, device)


# ---------------------------------------------------------------- checks


def _among(options: object, name: str, known: tuple[str, ...]) -> None:
    value = getattr(options, name)
    if value not in known:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(known)}.")


def _whole(options: object, name: str, least: int | None) -> None:
    value = getattr(options, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}; expected a whole number.")
    if least is not None and value < least:
        raise ValueError(f"{name}={value!r}; expected a whole number ≥ {least}.")


def _number(
    options: object,
    name: str,
    low: float,
    high: float,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    value = getattr(options, name)
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    good = good and (low < value if open_low else low <= value)
    good = good and (value < high if open_high or math.isinf(high) else value <= high)
    if not good:
        most = "" if math.isinf(high) else f" and {'<' if open_high else '≤'} {high:g}"
        raise ValueError(
            f"{name}={value!r}; expected a number {'>' if open_low else '≥'} {low:g}{most}."
        )
