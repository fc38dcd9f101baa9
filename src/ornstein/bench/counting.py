"""Arithmetic and memory traffic, counted from shapes, and the ceilings of a machine, measured.

FLOPs are those of convolutions and matrix products, two for a multiplication with its addition; a
training step takes three times the forward pass (values, gradients to inputs, gradients to
weights). Bytes are the least that must move: every product reads its two factors once and writes
its result once, and what stands between two products is fused into them. The roofline,

    rate ≤ min(ceiling of FLOPs, intensity × ceiling of bytes),      intensity = FLOPs / bytes,

uses ceilings that are measured in the same run: one large matrix product, one large copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ornstein.bench.racing import race

TRAINING = 3  # forward passes that a forward and a backward pass come to
# of a weight: the norm 2, clipping 1, two moments 3 + 4, the update 6, the running mean 3
OPTIMISER_FLOPS = 19
# numbers that move for a weight: its gradient twice (norm, update); weight, both moments and mean
OPTIMISER_MOVES = 2 + 2 * 4


@dataclass(frozen=True)
class Cost:
    """What a piece of work needs."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches at best."""

    flops: float  # per second
    bytes: float  # per second, read and written
    matmul: str  # of what, in words
    copy: str


class _Traffic(TorchDispatchMode):
    """Counts the numbers that products read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.numbers += sum(t.numel() for t in _tensors((args, out)))
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def network_cost(
    network: nn.Module,
    inputs: Callable[[int], tuple[Tensor, ...]],
    batch: int,
    width: int,
    passes: int = TRAINING,
) -> Cost:
    """Of a network; inputs(n) are those for n examples, width: bytes of a number.

    Counted for one example and for two, by shapes alone and in the plain form of the network:
    activations grow with the batch, weights do not.
    """
    plain = copy.deepcopy(network).to("meta").eval()
    one, two = (_counted(plain, inputs(n)) for n in (1, 2))
    flops = one[0] + (two[0] - one[0]) * (batch - 1)
    numbers = one[1] + (two[1] - one[1]) * (batch - 1)
    return Cost(passes * flops, passes * width * numbers)


def _counted(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """FLOPs and numbers of a forward pass."""
    counter, traffic = FlopCounterMode(display=False), _Traffic()
    # attention as two products: its fused form is not counted on every device
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter, traffic:
        network(*(each.to("meta") for each in inputs))
    return counter.get_total_flops(), traffic.numbers


def optimiser_cost(parameters: int) -> Cost:
    """Clipping, Adam and the running mean of so many float32 weights."""
    return Cost(OPTIMISER_FLOPS * parameters, 4 * OPTIMISER_MOVES * parameters)


def sample_cost(batch: int, variables: int, size: int, width: int = 4) -> Cost:
    """y = r x + L ε for a batch: x is read, y and ε are written; drawing ε is not counted."""
    per_number = sum(2 * k + 3 for k in range(variables))  # row k: k + 2 products, k + 1 sums
    moves = 1 + 2 * variables
    return Cost(batch * size * per_number, width * batch * size * moves)


def ceilings(device: torch.device, quick: bool = False) -> Ceilings:
    """Of this machine: a large product of matrices, a large copy."""
    cuda = device.type == "cuda"
    size, kind = (8192, torch.bfloat16) if cuda else (512 if quick else 1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    count = 2**30 if cuda else 2**27  # bytes; larger than most caches
    source = torch.zeros(count // 4, device=device)
    target = torch.empty_like(source)
    found = race(
        {"product": lambda: a @ b, "copy": lambda: target.copy_(source)},
        device,
        rounds=3 if quick else 7,
        budget=0.1,
    )
    name = str(kind).removeprefix("torch.")
    return Ceilings(
        flops=2 * size**3 / found.seconds("product"),
        bytes=2 * count / found.seconds("copy"),
        matmul=f"{name} product of {size:,}×{size:,} matrices",
        copy=f"copy of {count // 2**20:,} MiB",
    )
