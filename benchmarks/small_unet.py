"""A small convolutional U-Net for measuring on small images; the time input is log SNR."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions around a skip, the second scaled and shifted by the time."""

    def __init__(self, inside: int, outside: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1)
        )
        self.norm = nn.GroupNorm(8, outside, affine=False)
        self.time = nn.Linear(embedding, 2 * outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        scale, shift = self.time(embedding)[..., None, None].chunk(2, 1)
        h = self.norm(self.first(x)) * (1 + scale) + shift
        return self.skip(x) + self.second(nn.functional.silu(h))


class SmallUNet(nn.Module):
    """(B, *axes, H, W) and log SNR to (B, *axes of the output, H, W)."""

    def __init__(
        self, inputs: int, shape: tuple[int, ...], widths: tuple[int, ...] = (32, 64, 96)
    ) -> None:
        super().__init__()
        self.shape, embedding = shape, 128  # shape: of the output without the batch
        outputs = math.prod(shape[:-2])
        self.embed = nn.Sequential(
            nn.Linear(64, embedding), nn.SiLU(), nn.Linear(embedding, embedding), nn.SiLU()
        )
        frequencies = torch.exp(torch.linspace(math.log(0.05), math.log(5.0), 32))
        self.register_buffer("frequencies", frequencies)
        self.enter = nn.Conv2d(inputs, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = widths[0]
        for width in widths:
            self.down.append(Block(before, width, embedding))
            before = width
        self.middle = Block(before, before, embedding)
        for width in reversed(widths):
            self.up.append(Block(before + width, width, embedding))
            before = width
        self.leave = nn.Sequential(
            nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, outputs, 3, padding=1)
        )
        nn.init.zeros_(self.leave[-1].weight)
        nn.init.zeros_(self.leave[-1].bias)

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        angle = logsnr[:, None] * self.frequencies
        embedding = self.embed(torch.cat([angle.sin(), angle.cos()], 1).to(self.enter.weight.dtype))
        h = self.enter(x.flatten(1, -3))
        kept = []
        for i, block in enumerate(self.down):
            h = block(h if i == 0 else nn.functional.avg_pool2d(h, 2), embedding)
            kept.append(h)
        h = self.middle(h, embedding)
        for block in self.up:
            skip = kept.pop()
            if h.shape[-1] != skip.shape[-1]:
                h = nn.functional.interpolate(h, size=skip.shape[-2:], mode="nearest")
            h = block(torch.cat([h, skip], 1), embedding)
        return self.leave(h).reshape(len(x), *self.shape)
