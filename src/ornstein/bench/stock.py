"""A stock rival: the U-Net of `diffusers`, trained and sampled as its own examples do.

    y = √ᾱ x + √(1 − ᾱ) ε,     ‖ε̂(y, t) − ε‖²,     backward, clipping, AdamW

Where diffusers is missing our own U-Net stands in, not compiled, and the figures say so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ornstein.networks import UNet

STEPS = 1000  # of the stock's time


class Stock(nn.Module):
    """(B, C, H, W) and step numbers to noise, by a U-Net of the size of ours."""

    def __init__(self, network: UNet, channels: int) -> None:
        super().__init__()
        self.network, self.name = _built(network.describe(), channels)
        self.shape = (channels, *network.layout.shape[1:])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        found = self.network(x, t)
        return found if isinstance(found, Tensor) else found.sample

    def inputs(self, n: int) -> tuple[Tensor, ...]:
        """For n examples, on the CPU."""
        return torch.randn(n, *self.shape), torch.arange(n)


def stock_name() -> str:
    """diffusers and its version, or plain."""
    diffusers = _diffusers()
    return "plain" if diffusers is None else f"diffusers {diffusers.__version__}"


def _diffusers() -> Any:
    """The module, if it is there and all that its U-Net needs."""
    try:
        module = importlib.import_module("diffusers")
        _ = module.UNet2DModel  # loaded only now
    except (ImportError, RuntimeError):  # it wraps what it can't import
        return None
    return module


def _built(size: dict[str, Any], channels: int) -> tuple[nn.Module, str]:
    """The same widths, blocks, attention and dropout; one head, as in Ho et al. (2020)."""
    name, diffusers = stock_name(), _diffusers()
    if diffusers is None:
        own = {**size, "shape": [channels, *size["shape"][1:]], "variables": None, "features": 0}
        return UNet(**own), name
    widths = tuple(size["width"] * m for m in size["multipliers"])
    height, attends = size["shape"][-2], []
    for _ in widths:
        attends.append(height in size["attention"])
        height = (height + 1) // 2
    network: nn.Module = diffusers.UNet2DModel(
        sample_size=tuple(size["shape"][-2:]),
        in_channels=channels,
        out_channels=channels,
        layers_per_block=size["blocks"],
        block_out_channels=widths,
        down_block_types=tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in attends),
        up_block_types=tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)),
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        norm_eps=1e-6,
        norm_num_groups=min(32, size["width"] // 4),
        attention_head_dim=widths[-1],
        dropout=size["dropout"],
    )
    return network, name


class StockStep:
    """A training step on a batch that is there already."""

    def __init__(self, network: Stock, x: Tensor, narrow: bool, compiled: bool = False) -> None:
        self.x, self.narrow, self.device = x, narrow, x.device
        network = network.to(x.device).train()
        if compiled:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.x = x.contiguous(memory_format=torch.channels_last)
        self.parameters = list(network.parameters())
        self.optimiser = torch.optim.AdamW(self.parameters, lr=2e-4, fused=compiled or None)
        self.call: Callable[..., Tensor] = network
        if compiled:
            self.call = torch.compile(network, mode="reduce-overhead", dynamic=False)
        self.signal, self.noise = (level.to(x.device) for level in _levels())

    def __call__(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)  # first: graphs write to their memory again
        t = torch.randint(STEPS, (len(self.x),), device=self.device)
        noise = torch.randn_like(self.x)
        signal, level = (table[t].view(-1, 1, 1, 1) for table in (self.signal, self.noise))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.narrow):
            found = self.call(signal * self.x + level * noise, t)
            loss = nn.functional.mse_loss(found.float(), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()


class StockSampling:
    """A batch of samples by DDIM in a plain loop, float32."""

    def __init__(self, network: Stock, n: int, evaluations: int, device: torch.device) -> None:
        self.network, self.n, self.device = network.to(device).eval(), n, device
        self.times = torch.linspace(STEPS - 1, 0, evaluations + 1).round().long().tolist()
        self.signal, self.noise = (level.tolist() for level in _levels())

    @torch.no_grad()
    def __call__(self) -> Tensor:
        y = torch.randn(self.n, *self.network.shape, device=self.device)
        for here, there in zip(self.times[:-1], self.times[1:], strict=True):
            noise = self.network(y, torch.full((self.n,), here, device=self.device))
            x = (y - self.noise[here] * noise) / self.signal[here]
            y = self.signal[there] * x.clamp(-1, 1) + self.noise[there] * noise
        return ((y.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def _levels() -> tuple[Tensor, Tensor]:
    """√ᾱ and √(1 − ᾱ) of every step, with the linear β of Ho et al. (2020)."""
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64), 0)
    return kept.sqrt().float(), (1 - kept).sqrt().float()
