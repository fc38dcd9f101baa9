"""Group normalisation and what surrounds it, on a GPU in one pass over the image.

    y = drop(silu(γ (x + shift − μ)/√(v + eps) + β)),      μ, v over a group's channels and places

Written out in tensor operations each of these reads and writes the whole image. Here a program
takes some groups of one example: it reads x, finds μ and v, reads it again while it is still in the
cache, and writes y. The backward pass does the same with x and the gradient. Images lie in memory
with the channels last. Statistics are float32, by sums about a pivot, so that nothing cancels.

Which values are dropped is a hash of (seed, place), so that the backward pass can ask again.
`plain` is the same in tensor operations; compiled networks on a GPU with Triton use the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ornstein.gpu import triton
from ornstein.networks import norms

Statistics = tuple[Tensor, Tensor, Tensor]


def usable(x: Tensor, norm: nn.GroupNorm) -> bool:
    """Whether the kernels can take this image, (N, C, H, W), in a compiled network."""
    return (
        triton is not None
        and torch.compiler.is_compiling()
        and x.is_cuda
        and x.dtype in norms.KINDS
        and x.numel() > 0
        and x.shape[0] < 2**16  # programs along an axis of the grid
        and norm.num_channels // norm.num_groups <= 256
    )


def norm_act(
    x: Tensor,
    norm: nn.GroupNorm,
    shift: Tensor | None = None,
    silu: bool = True,
    drop: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """y as above: (N, C, H, W). shift: (N, C); seed: () int64, needed where drop > 0."""
    y: Tensor = _forward(
        x,
        shift,
        norm.weight,
        norm.bias,
        seed if drop else None,
        norm.num_groups,
        norm.eps,
        silu,
        drop,
    )[0]
    return y


def plain(
    x: Tensor,
    norm: nn.GroupNorm,
    shift: Tensor | None = None,
    silu: bool = True,
    drop: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """The same in tensor operations."""
    h = norm(x if shift is None else x + shift[:, :, None, None])
    h = F.silu(h) if silu else h
    if not drop:
        return h
    if seed is None:
        return F.dropout(h, drop)
    return torch.where(kept(h, drop, seed), h / (1 - drop), 0.0)


def kept(x: Tensor, drop: float, seed: Tensor) -> Tensor:
    """Which values stay: bool, like x. (H and W before C: places as they lie in memory.)"""
    N, C, H, W = x.shape
    place = torch.arange(x.numel(), device=x.device).reshape(N, H, W, C).permute(0, 3, 1, 2)
    return _mixed(place & 0xFFFFFFFF, seed) >= _threshold(drop)


def _threshold(drop: float) -> int:
    return min(round(drop * 2**32), 2**32 - 1)


def _mixed(place: Tensor, seed: Tensor) -> Tensor:
    """32 random bits, of which the upper ones are good: all that is asked of them here."""
    most = 0xFFFFFFFF
    h = ((place + (seed & most)) * 0x9E3779B1) & most
    h = h ^ (h >> 15) ^ ((seed >> 32) & most)
    return (h * 0x846CA68B) & most


# ---------------------------------------------------------------- operators of torch


def _last(x: Tensor) -> Tensor:
    """With the channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("ornstein::norm_act", mutates_args=())
def _forward(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    drop: float,
) -> Statistics:
    x = _last(x)
    N, C, H, W = x.shape
    y = torch.empty_like(x)
    mean = torch.empty((N, groups), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    sizes = norms.sizes(C, H * W, groups, False)
    grid = (groups // sizes["GB"], N)
    shift = None if shift is None else shift.contiguous()
    norms.norm_forward[grid](
        x, x if shift is None else shift, weight, bias, x if seed is None else seed, y, mean, rstd,
        eps, 1 / (1 - drop), _threshold(drop),
        **sizes, SHIFT=shift is not None, SILU=silu, DROP=drop > 0, FAST=x.dtype in norms.HALVES,
    )  # fmt: skip
    return y, mean, rstd


@_forward.register_fake
def _(
    x: Tensor, shift: object, weight: object, bias: object, seed: object, groups: int, *_: object
) -> Statistics:
    mean = torch.empty((x.shape[0], groups), dtype=torch.float32, device=x.device)
    return torch.empty_like(x, memory_format=torch.channels_last), mean, torch.empty_like(mean)


@torch.library.custom_op("ornstein::norm_act_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    silu: bool,
    drop: float,
) -> tuple[Tensor, Tensor]:
    grad, x = _last(grad), _last(x)
    N, C, H, W = x.shape
    dx = torch.empty_like(x)
    parts = torch.empty((3, N, C), dtype=torch.float32, device=x.device)
    sizes = norms.sizes(C, H * W, groups, True)
    grid = (groups // sizes["GB"], N)
    shift = None if shift is None else shift.contiguous()
    norms.norm_backward[grid](
        grad, x, x if shift is None else shift, weight, bias, x if seed is None else seed,
        mean, rstd, dx, parts[0], parts[1], parts[2],
        1 / (1 - drop), _threshold(drop),
        **sizes, SHIFT=shift is not None, SILU=silu, DROP=drop > 0, FAST=x.dtype in norms.HALVES,
    )  # fmt: skip
    return dx, parts


@_backward.register_fake
def _(grad: Tensor, x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    parts = torch.empty((3, *x.shape[:2]), dtype=torch.float32, device=x.device)
    return torch.empty_like(x, memory_format=torch.channels_last), parts


def _keep_for_later(ctx: Any, inputs: tuple[Any, ...], output: Statistics) -> None:
    x, shift, weight, bias, seed, groups, _, silu, drop = inputs
    ctx.save_for_backward(x, shift, weight, bias, seed, output[1], output[2])
    ctx.options = groups, silu, drop


def _pull(ctx: Any, grad: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
    x, shift, weight, bias, seed, mean, rstd = ctx.saved_tensors
    groups, silu, drop = ctx.options
    dx, parts = _backward(grad, x, shift, weight, bias, seed, mean, rstd, groups, silu, drop)
    moved = None if shift is None else parts[2].to(shift.dtype)
    dgamma, dbeta = parts[:2].sum(1)
    return (
        dx, moved, dgamma.to(weight.dtype), dbeta.to(bias.dtype),
        None, None, None, None, None,
    )  # fmt: skip


_forward.register_autograd(_pull, setup_context=_keep_for_later)
