"""The U-Net of Ho et al. (2020), with log SNR in place of the step number.

Residual blocks of two 3×3 convolutions with group normalisation, self-attention where the image is
small, skips from every block on the way down to its twin on the way up. With the defaults and three
channels it has the paper's number of parameters: 35,746,307, and 6,915 more for each auxiliary
variable of a joint model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ornstein import parts
from ornstein.networks.shapes import Embedding, Layout, check_sizes


@parts.part("unet")
class UNet(nn.Module):
    """Images and log SNR to noise of the data's shape, or of all variables'."""

    def __init__(
        self,
        shape: Sequence[int],
        variables: int | None = None,
        features: int = 0,
        width: int = 128,
        multipliers: Sequence[int] = (1, 2, 2, 2),
        blocks: int = 2,
        attention: Sequence[int] = (16,),
        dropout: float = 0.1,
    ) -> None:
        """
        shape: of the data, (channels, height, width). variables: None for a channel model, the
        process's n_vars for a joint one. features: how many frequencies the model adds.
        attention: heights of the image at which blocks attend.
        """
        super().__init__()
        check_sizes(width=width, blocks=blocks, multipliers=multipliers, dropout=dropout)
        self.layout = Layout.of(shape, variables, features, axes=3)
        inputs, outputs = self.layout.inputs, self.layout.outputs
        self.embed = Embedding(width, 4 * width)
        self.enter = nn.Conv2d(inputs, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        size, channels, kept = shape[-2], width, [width]
        sizes = []
        for level, multiplier in enumerate(multipliers):
            for _ in range(blocks):
                self.down.append(
                    Stage(channels, width * multiplier, 4 * width, dropout, size in attention)
                )
                channels = width * multiplier
                kept.append(channels)
            sizes.append(size)
            if level < len(multipliers) - 1:
                self.down.append(Shrink(channels))
                kept.append(channels)
                size = (size + 1) // 2
        self.middle = nn.ModuleList(
            [
                Stage(channels, channels, 4 * width, dropout, True),
                Stage(channels, channels, 4 * width, dropout, False),
            ]
        )
        for level, multiplier in reversed(list(enumerate(multipliers))):
            for _ in range(blocks + 1):
                self.up.append(
                    Stage(
                        channels + kept.pop(),
                        width * multiplier,
                        4 * width,
                        dropout,
                        sizes[level] in attention,
                    )
                )
                channels = width * multiplier
            if level:
                self.up.append(Grow(channels))
        self.leave = nn.Sequential(
            _norm(channels), nn.SiLU(), _quiet(nn.Conv2d(channels, outputs, 3, padding=1))
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._arguments = {
            "shape": list(shape),
            "variables": variables,
            "features": features,
            "width": width,
            "multipliers": list(multipliers),
            "blocks": blocks,
            "attention": list(attention),
            "dropout": dropout,
        }

    def describe(self) -> parts.Record:
        return dict(self._arguments)

    @classmethod
    def rebuild(cls, fields: parts.Record) -> UNet:
        return cls(**fields)

    @classmethod
    def small(
        cls,
        shape: Sequence[int] = (1, 28, 28),
        variables: int | None = None,
        features: int = 0,
        dropout: float = 0.0,
    ) -> UNet:
        """About 1.1 million parameters, for images such as MNIST's."""
        return cls(shape, variables, features, 32, (1, 2, 2), 1, (7, 8), dropout)

    @classmethod
    def tiny(
        cls,
        shape: Sequence[int] = (1, 8, 8),
        variables: int | None = None,
        features: int = 0,
        dropout: float = 0.0,
    ) -> UNet:
        """About 0.2 million parameters, for images of 8×8."""
        return cls(shape, variables, features, 16, (1, 2), 1, (4,), dropout)

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        time = self.embed(logsnr)
        h = self.enter(self.layout.flat(x).contiguous(memory_format=torch.channels_last))
        kept = [h]
        for part in self.down:
            h = part(h, time)
            kept.append(h)
        for part in self.middle:
            h = part(h, time)
        for part in self.up:
            if isinstance(part, Grow):
                h = part(h, kept[-1].shape[-2:])
            else:
                h = part(torch.cat([h, kept.pop()], 1), time)
        return self.layout.restored(self.leave(h))


class Stage(nn.Module):
    """A residual block, shifted by the time, and attention after it where that is wanted."""

    def __init__(
        self, inside: int, outside: int, embedding: int, dropout: float, attends: bool
    ) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(embedding, outside)
        self.norm2, self.dropout = _norm(outside), nn.Dropout(dropout)
        self.conv2 = _quiet(nn.Conv2d(outside, outside, 3, padding=1))
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()
        self.attention = Attention(outside) if attends else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(time)[:, :, None, None]
        h = self.skip(x) + self.conv2(self.dropout(F.silu(self.norm2(h))))
        return h if self.attention is None else self.attention(h)


class Attention(nn.Module):
    """Every place looks at every other, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.query, self.key, self.value = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.leave = _quiet(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).flatten(2).mT for f in (self.query, self.key, self.value))  # (B, HW, C)
        h = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))
        return x + self.leave(h.squeeze(1).mT.reshape(x.shape))


class Shrink(nn.Module):
    """Half the size; odd sizes round up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.conv(F.pad(x, (x.shape[-1] % 2, 1, x.shape[-2] % 2, 1)))


class Grow(nn.Module):
    """The size of the skip that comes next."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, size: Sequence[int]) -> Tensor:
        return self.conv(F.interpolate(x, size=tuple(size), mode="nearest"))


def _norm(channels: int) -> nn.GroupNorm:
    """Groups of four channels at least: normalising a single one would undo the time's shift."""
    groups = next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0 and channels >= 4 * g)
    return nn.GroupNorm(groups, channels, eps=1e-6)


def _quiet(layer: nn.Conv2d) -> nn.Conv2d:
    """Starts by adding nothing."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
