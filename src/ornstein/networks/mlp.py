"""A residual network of linear layers, for vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ornstein.networks.shapes import Embedding, Layout, check_sizes
from ornstein.parts import Record, part


@part("mlp")
class MLP(nn.Module):
    """Vectors and log SNR to noise of the data's shape, or of all variables'."""

    def __init__(
        self,
        shape: Sequence[int],
        variables: int | None = None,
        features: int = 0,
        width: int = 256,
        depth: int = 3,
        dropout: float = 0.0,
    ) -> None:
        """
        shape: of the data, (size,). variables: None for a channel model, the process's n_vars for a
        joint one. features: how many the model adds (a histogram counts as 2). depth: residual
        blocks.
        """
        super().__init__()
        check_sizes(width=width, depth=depth, dropout=dropout)
        self.layout = Layout.of(shape, variables, features, axes=1)
        self.embed = Embedding(64, width)
        self.enter = nn.Linear(self.layout.inputs, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, self.layout.outputs)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        self._arguments = {
            "shape": list(shape),
            "variables": variables,
            "features": features,
            "width": width,
            "depth": depth,
            "dropout": dropout,
        }

    def describe(self) -> Record:
        return dict(self._arguments)

    @classmethod
    def rebuild(cls, fields: Record) -> MLP:
        return cls(**fields)

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        time = self.embed(logsnr)
        h = self.enter(self.layout.flat(x))
        for block in self.blocks:
            h = block(h, time)
        return self.layout.restored(self.leave(F.silu(self.norm(h))))


class Block(nn.Module):
    """Two layers around a skip, scaled and shifted by the time."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.time = nn.Linear(width, 2 * width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time).chunk(2, -1)
        h = torch.addcmul(shift, self.norm(x), 1 + scale)
        return x + self.second(self.dropout(F.silu(self.first(h))))
