"""Where the diffusion is cut off on the data's side: at a noise level, or at a time.

A bound decodes the data from y_ε. How much noise there is at a given ε differs by many orders of
magnitude between processes, so the natural choice is the standard error of x given y_ε,
σ = SNR(ε)^(-1/2): `NoiseLevel(σ)` solves for ε, for each process and, while it is being learned,
in each call. `FixedTime(ε)` is the usual way, for comparison. The bound is valid for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.parts import Record, part
from ornstein.process import Process
from ornstein.schedules import positive_number
from ornstein.transition import Transition


@part("noise-level")
@dataclass(frozen=True)
class NoiseLevel:
    """Truncate where x is known up to this standard error, in units of the numbers that diffuse."""

    standard_error: float

    def __post_init__(self) -> None:
        positive_number(self.standard_error, "standard_error")

    def time(self, process: Process) -> Tensor:
        """ε for this process: () float64."""
        return process.time_of_noise(self.standard_error)

    def describe(self) -> Record:
        return {"standard_error": float(self.standard_error)}

    @classmethod
    def rebuild(cls, fields: Record) -> NoiseLevel:
        return cls(**fields)

    def __str__(self) -> str:
        return f"standard error {self.standard_error:.3g}"


@part("fixed-time")
@dataclass(frozen=True)
class FixedTime:
    """Truncate at this time."""

    s: float

    def __post_init__(self) -> None:
        positive_number(self.s, "s")

    def time(self, process: Process) -> Tensor:
        """ε for this process: () float64."""
        if not self.s < process.horizon:
            raise ValueError(
                f"the bound is truncated at s = {self.s:g}, and {process.name!r} ends at "
                f"{process.horizon:g}; expected an earlier time, such as 0.001."
            )
        return torch.full((), float(self.s), dtype=torch.float64, device=process.device)

    def describe(self) -> Record:
        return {"s": float(self.s)}

    @classmethod
    def rebuild(cls, fields: Record) -> FixedTime:
        return cls(**fields)

    def __str__(self) -> str:
        return f"s = {self.s:.3g}"


Truncation = NoiseLevel | FixedTime


def chosen(noise_level: float | None, fixed_time: float | None) -> Truncation | None:
    """What options ask for: one of the two, or neither."""
    if noise_level is not None and fixed_time is not None:
        raise ValueError(
            "noise_level and fixed_time were both given; expected one way to truncate."
        )
    if noise_level is not None:
        return NoiseLevel(noise_level)
    return None if fixed_time is None else FixedTime(fixed_time)


def ends(
    truncation: Truncation, process: Process, last: Transition | None = None
) -> tuple[Tensor, Tensor]:
    """log SNR at the horizon and at the truncation: () each; `last`: the kernel there, if known."""
    last = process.transition(process.horizon) if last is None else last
    if isinstance(truncation, NoiseLevel):  # needs no time
        level = -2 * math.log(truncation.standard_error)
        return last.logsnr, torch.full_like(last.logsnr, level)
    return last.logsnr, process.transition(truncation.time(process)).logsnr


def check_truncation(given: object) -> Truncation:
    """What was given, if it is a truncation."""
    if not isinstance(given, (NoiseLevel, FixedTime)):
        raise ValueError(
            f"truncation={given!r}; expected ornstein.NoiseLevel(standard_error) or "
            "ornstein.FixedTime(s)."
        )
    return given
