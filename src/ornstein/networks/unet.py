"""The U-Net of Ho et al. (2020), with log SNR in place of the step number.

Residual blocks of two 3×3 convolutions with group normalisation, self-attention where the image is
small, skips from every block on the way down to its twin on the way up. With the defaults and three
channels it has the paper's number of parameters: 35,746,307, and 6,915 more for each auxiliary
variable of a joint model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ornstein import parts
from ornstein.networks import fused
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
        process's n_vars for a joint one. features: how many the model adds (a histogram counts
        as 2). attention: heights of the image at which blocks attend.
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
        )  # as a sequence, since that is how its parameters are named in files
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
        shifts = self._shifts(self.embed(logsnr))
        flat = self.layout.flat(x)
        h = _conv(self.enter, flat.contiguous(memory_format=torch.channels_last))
        kept = [h]
        for part in self.down:
            h = part(h) if isinstance(part, Shrink) else part(h, next(shifts))
            kept.append(h)
        for part in self.middle:
            h = part(h, next(shifts))
        for part in self.up:
            if isinstance(part, Grow):
                h = part(h, kept[-1].shape[-2:])
            else:
                h = part(torch.cat([_laid(h), _laid(kept.pop())], 1), next(shifts))
        norm, _, last = self.leave
        return self.layout.restored(_conv(last, _normed(h, norm)))  # type: ignore[arg-type]

    def _shifts(self, time: Tensor) -> Iterator[Tensor]:
        """What each stage is shifted by, (B, channels), all of them by one product."""
        path = (*self.down, *self.middle, *self.up)
        stages = [part for part in path if isinstance(part, Stage)]
        weight = torch.cat([stage.time.weight for stage in stages])
        bias = torch.cat([stage.time.bias for stage in stages])
        sizes = [stage.time.out_features for stage in stages]
        return iter(F.linear(time, weight, bias).split(sizes, -1))


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

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        conv, drop = self.conv1, self.dropout.p if self.training else 0.0
        h = F.conv2d(_normed(x, self.norm1), conv.weight, None, padding=1)
        h = _normed(h, self.norm2, shift + _bias(conv), drop=drop)
        h = self.skip(x) + self.conv2(h)
        return h if self.attention is None else self.attention(h)


class Attention(nn.Module):
    """Every place looks at every other, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.query, self.key, self.value = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.leave = _quiet(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = _normed(x, self.norm, silu=False).flatten(2).mT  # (B, HW, C)
        parts = (self.query, self.key, self.value)
        weight = torch.cat([part.weight for part in parts]).flatten(1)
        bias = torch.cat([_bias(part) for part in parts])
        q, k, v = F.linear(h, weight, bias).unsqueeze(1).chunk(3, -1)  # (B, 1, HW, C)
        h = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        h = F.linear(h, self.leave.weight.flatten(1), self.leave.bias)
        return x + h.mT.unflatten(-1, x.shape[-2:])


class Shrink(nn.Module):
    """Half the size; odd sizes round up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (x.shape[-1] % 2, 1, x.shape[-2] % 2, 1)))


class Grow(nn.Module):
    """The size of the skip that comes next."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, size: Sequence[int]) -> Tensor:
        if not (torch.compiler.is_compiling() and x.is_cuda):
            return self.conv(F.interpolate(x, size=tuple(size), mode="nearest"))
        # the same, with a gradient that is a sum in place of scattered additions
        twice = _laid(x)[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
        twice = twice.flatten(4).flatten(2, 3)[:, :, : size[0], : size[1]]
        return self.conv(twice.contiguous(memory_format=torch.channels_last))


def _normed(
    x: Tensor,
    norm: nn.GroupNorm,
    shift: Tensor | None = None,
    silu: bool = True,
    drop: float = 0.0,
) -> Tensor:
    """Shifted, normalised, bent and dropped, by one kernel where there is one."""
    if not fused.usable(x, norm):
        return fused.plain(x, norm, shift, silu, drop)
    seed = torch.randint(2**62, (), device=x.device) if drop else None
    return fused.norm_act(x, norm, shift, silu, drop, seed)


class _Laid(torch.autograd.Function):
    """The identity; its gradient has the channels last, without gaps, as convolutions want it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous(memory_format=torch.channels_last)


def _laid(x: Tensor) -> Tensor:
    """For what was joined: a part of the whole's gradient would be copied by each convolution."""
    if not (torch.compiler.is_compiling() and x.is_cuda):
        return x
    laid: Tensor = _Laid.apply(x)  # type: ignore[no-untyped-call]
    return laid


def _conv(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """A 3×3 convolution to or from few channels: on a GPU padded to a multiple of eight."""
    if not (torch.compiler.is_compiling() and x.is_cuda):
        out: Tensor = layer(x)
        return out
    more, wide = -x.shape[1] % 8, -layer.out_channels % 8
    weight = F.pad(layer.weight, (0, 0, 0, 0, 0, more, 0, wide))
    out = F.conv2d(F.pad(x, (0, 0, 0, 0, 0, more)), weight, None, padding=1)
    return out[:, : layer.out_channels] + _bias(layer).to(out.dtype)[:, None, None]


def _bias(layer: nn.Conv2d) -> Tensor:
    return layer.bias  # type: ignore[return-value]


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
