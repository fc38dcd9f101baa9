"""Where kernels can run, and how they become operators of torch, opaque to its compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language  # which a mere folder of that name has not
except ImportError:  # no Triton: CPU builds, other platforms
    triton = None

__all__ = ["on_device_of", "operator", "padded", "triton", "usable"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels on the CPU

_operators = torch.library.Library("ornstein", "FRAGMENT")


def usable(tensor: Tensor) -> bool:
    """Whether kernels can run where this tensor lives."""
    return triton is not None and tensor.numel() > 0 and (tensor.is_cuda or INTERPRETED)


def padded(size: int) -> int:
    """The next power of two."""
    return max(2, 1 << (size - 1).bit_length())


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device: make it that of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def operator(schema: str, run: Callable[..., Any], like: Callable[..., Any]) -> None:
    """Give torch an operator, `torch.ops.ornstein.NAME`; `like` makes outputs of the same shapes.

    It has no gradient: callers see to it that none is wanted.
    """
    name = schema.split("(")[0]
    if hasattr(torch.ops.ornstein, name):  # imported anew: torch keeps the first
        return
    _operators.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _operators.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ornstein::{name}", like, lib=_operators)
