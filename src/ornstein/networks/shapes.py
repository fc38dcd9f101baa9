"""What networks share: how a model's input becomes theirs and back, and the time as features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SLOWEST, FASTEST = 0.03, 8.0  # of the waves over log SNR, which goes from about −30 to 15


@dataclass(frozen=True)
class Layout:
    """The axes of a channel model, (B, C·(1 + 2f), …), or of a joint one, (B, K + 2f, C, …).

    f frequencies add 2f entries, their sines and cosines, to axis 1 of the input; a histogram adds
    as many as two of them.
    """

    shape: tuple[int, ...]  # of the data
    variables: int | None  # K of a joint model, None for a channel model
    features: int  # f

    @staticmethod
    def of(shape: Sequence[int], variables: int | None, features: int, axes: int) -> Layout:
        """Checked: the data must have so many axes."""
        sizes = tuple(shape)
        if len(sizes) != axes or not all(isinstance(n, int) and n > 0 for n in sizes):
            wanted = "(channels, height, width)" if axes == 3 else "(size,)"
            raise ValueError(
                f"shape={tuple(shape)!r}; expected {wanted}, the data's shape without the batch."
            )
        if variables is not None and (not isinstance(variables, int) or variables < 1):
            raise ValueError(
                f"variables={variables!r}; expected None for a channel model, or process.n_vars "
                "for a joint one."
            )
        if not isinstance(features, int) or features < 0:
            raise ValueError(
                f"features={features!r}; expected how many the model adds: 2 for "
                "features='bins', 2 for a histogram, 4 for both, or how many frequencies."
            )
        return Layout(sizes, variables, features)

    @property
    def inputs(self) -> int:
        """Entries of the first axis, all variables and features counted."""
        return self.shape[0] * ((self.variables or 1) + 2 * self.features)

    @property
    def outputs(self) -> int:
        return self.shape[0] * (self.variables or 1)

    def flat(self, x: Tensor) -> Tensor:
        """Variables and channels as one axis."""
        joined = x if self.variables is None else x.flatten(1, 2)
        if joined.shape[1:] != (self.inputs, *self.shape[1:]):
            raise ValueError(
                f"the network was given {tuple(x.shape)} and was built for data of shape "
                f"{self.shape}, variables={self.variables} and {self.features} features; expected "
                f"{self.inputs} entries before the axes {self.shape[1:]}. Build it with features= "
                "as many as the model has (2 for 'bins', 2 for a histogram, 4 for both)."
            )
        return joined

    def restored(self, h: Tensor) -> Tensor:
        """The variables on an axis of their own again."""
        return h if self.variables is None else h.unflatten(1, (self.variables, self.shape[0]))


def check_sizes(
    width: int,
    dropout: float,
    blocks: int = 1,
    depth: int = 1,
    multipliers: Sequence[int] = (1,),
) -> None:
    """Raise for sizes that no network can have."""
    for name, value in (("blocks", blocks), ("depth", depth)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}; expected a whole number ≥ 1.")
    if isinstance(width, bool) or not isinstance(width, int) or width < 4 or width % 2:
        raise ValueError(f"width={width!r}; expected an even whole number ≥ 4.")
    if not len(multipliers) or not all(isinstance(m, int) and m > 0 for m in multipliers):
        raise ValueError(
            f"multipliers={tuple(multipliers)!r}; expected one whole number ≥ 1 for each "
            "resolution, such as (1, 2, 2)."
        )
    if not (isinstance(dropout, (int, float)) and 0 <= dropout < 1):
        raise ValueError(f"dropout={dropout!r}; expected a number in [0, 1).")


class Embedding(nn.Module):
    """log SNR as waves of many lengths, and two layers on top: (B,) to (B, outside)."""

    frequencies: Tensor

    def __init__(self, waves: int, outside: int) -> None:
        super().__init__()
        steps = torch.linspace(math.log(SLOWEST), math.log(FASTEST), waves // 2)
        self.register_buffer("frequencies", steps.exp(), persistent=False)
        self.first, self.second = nn.Linear(waves, outside), nn.Linear(outside, outside)

    def forward(self, logsnr: Tensor) -> Tensor:
        angle = logsnr.to(torch.float32).unsqueeze(-1) * self.frequencies.to(torch.float32)
        waves = torch.cat([angle.sin(), angle.cos()], -1).to(self.first.weight.dtype)
        return nn.functional.silu(self.second(nn.functional.silu(self.first(waves))))
