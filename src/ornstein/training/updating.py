"""The end of a step: the gradients' norms, clipping, Adam and the running mean.

    c = min(1, most/‖g‖),   m ← β₁m + (1 − β₁)cg,   v ← β₂v + (1 − β₂)(cg)²
    θ ← θ − η/(1 − β₁ⁿ) · m/(√(v/(1 − β₂ⁿ)) + e),   θ̄ ← θ̄ + w(θ − θ̄)

On a GPU with Triton two kernels do it for all parameters at once: one adds up squares, one reads
θ, g, m, v, θ̄ and writes four of them back, each once. They take the numbers that change (η, n, w)
from the device, so that they can be part of a CUDA graph. Elsewhere torch's own Adam does it. The
moments are kept in its state in either case, and a checkpoint does not know which one it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ornstein.gpu import triton
from ornstein.training.average import Average
from ornstein.training.options import Optimiser

BLOCK = 4096  # numbers of a program
KINDS = (torch.float32, torch.float64)

if triton is not None:
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _place(pointer, at, kind: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
        return tl.multiple_of(tl.load(pointer).to(kind) + at, 4 * VECTOR)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _squares(  # type: ignore[no-untyped-def]
        gradients, sizes, owner, first, out,
        WIDE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    ):  # fmt: skip
        b = tl.program_id(0)
        t = tl.load(owner + b)
        at = tl.multiple_of(tl.load(first + b), BLOCK) + tl.arange(0, BLOCK).to(tl.int64)
        kind = tl.pointer_type(tl.float64) if WIDE else tl.pointer_type(tl.float32)
        here = at < tl.multiple_of(tl.load(sizes + t), VECTOR)
        v = tl.load(_place(gradients + t, at, kind, VECTOR), mask=here, other=0.0)
        tl.store(out + b, tl.sum(v * v, 0).to(tl.float64))

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _adam(  # type: ignore[no-untyped-def]
        pointers, gradients, sizes, owner, first, norm, numbers, count,
        most,
        beta1: tl.constexpr, beta2: tl.constexpr, eps: tl.constexpr, decay: tl.constexpr,
        RATE: tl.constexpr, WIDE: tl.constexpr, APART: tl.constexpr, MEAN: tl.constexpr,
        BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    ):  # fmt: skip
        b = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is still near
        t = tl.load(owner + b)
        at = tl.multiple_of(tl.load(first + b), BLOCK) + tl.arange(0, BLOCK).to(tl.int64)
        here = at < tl.multiple_of(tl.load(sizes + t), VECTOR)
        kind = tl.pointer_type(tl.float64) if WIDE else tl.pointer_type(tl.float32)
        weight = _place(pointers + t, at, kind, VECTOR)
        m1 = _place(pointers + count + t, at, kind, VECTOR)
        m2 = _place(pointers + 2 * count + t, at, kind, VECTOR)
        average = _place(pointers + 3 * count + t, at, kind, VECTOR)
        gradient = _place(gradients + t, at, kind, VECTOR)
        work = tl.float64 if WIDE else tl.float32
        rate = tl.load(numbers + RATE).to(work)
        first_power = tl.load(numbers + 2).to(work)  # 1 − β₁ⁿ
        second_root = tl.load(numbers + 3).to(work)  # √(1 − β₂ⁿ)
        part = tl.load(numbers + 4).to(work)
        clip = tl.minimum(most / (tl.load(norm) + 1e-6), 1.0).to(work)
        w = tl.load(weight, mask=here)
        g = tl.load(gradient, mask=here) * clip
        if APART:
            w = w * (1.0 - rate * decay)
        else:
            g = g + decay * w
        m = tl.load(m1, mask=here)
        m = m + (1.0 - beta1) * (g - m)
        v = beta2 * tl.load(m2, mask=here) + (1.0 - beta2) * g * g
        w = w - rate / first_power * m / (tl.sqrt(v) / second_root + eps)
        tl.store(weight, w, mask=here)
        tl.store(m1, m, mask=here)
        tl.store(m2, v, mask=here)
        if MEAN:
            e = tl.load(average, mask=here)
            tl.store(average, e + part * (w - e), mask=here)


@dataclass(frozen=True)
class Numbers:
    """What changes from step to step, for the host to work out: five float64."""

    rates: tuple[float, ...]  # of the groups, one or two
    done: int  # steps before this one
    part: float  # of the new weights in the mean

    def listed(self, options: Optimiser) -> list[float]:
        """As the kernels read them."""
        n, (beta1, beta2) = self.done + 1, options.betas
        rates = [*self.rates, 0.0][:2]
        return [*rates, 1 - beta1**n, math.sqrt(1 - beta2**n), self.part]


class Some:
    """Parameters that one kernel takes: of one type, all or none in steps of four numbers."""

    def __init__(self, parameters: list[nn.Parameter], state: Any, means: dict[int, Tensor]):
        self.parameters = parameters
        device = parameters[0].device
        rows = []
        for p in parameters:
            kept = state[p]
            if "exp_avg" not in kept:
                kept["step"] = torch.zeros((), dtype=torch.float32, device=device)
                kept["exp_avg"], kept["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            mean = means.get(id(p), p)
            rows.append([t.data_ptr() for t in (p, kept["exp_avg"], kept["exp_avg_sq"], mean)])
        self.averaged = all(id(p) in means for p in parameters)
        self.wide = parameters[0].dtype == torch.float64
        pointers, sizes = torch.tensor(rows), torch.tensor([p.numel() for p in parameters])
        self.even = not self.wide and bool((sizes % 4 == 0).all() & (pointers % 16 == 0).all())
        blocks = (sizes + BLOCK - 1) // BLOCK
        owner = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
        begin = torch.cumsum(blocks, 0) - blocks
        first = (torch.arange(int(blocks.sum())) - begin[owner]) * BLOCK
        self.pointers = pointers.mT.contiguous().to(device)  # (4, T)
        self.sizes, self.owner, self.first = (t.to(device) for t in (sizes, owner, first))
        self.gradients = torch.zeros_like(self.sizes)  # pointers, see `point`
        self.squares = torch.zeros(len(owner), dtype=torch.float64, device=device)

    def places(self) -> list[int]:
        """Where the gradients are now."""
        for p in self.parameters:
            if p.grad is None:  # a parameter that the loss does not depend on
                p.grad = torch.zeros_like(p)
            elif not _alike(p, p.grad):  # torch sees to it where it adds a gradient up
                raise RuntimeError("a gradient lies otherwise in memory than its parameter")
        return [p.grad.data_ptr() for p in self.parameters]  # type: ignore[union-attr]

    def point(self) -> None:
        """Tell the kernels."""
        self.gradients.copy_(torch.tensor(self.places()), non_blocking=True)

    def vector(self) -> int:
        """How many numbers may be read at a time."""
        return 4 if self.even and all(place % 16 == 0 for place in self.places()) else 1

    def add_squares(self, vector: int) -> Tensor:
        """‖g‖²: ()."""
        _squares[(len(self.owner),)](
            self.gradients, self.sizes, self.owner, self.first, self.squares,
            WIDE=self.wide, BLOCK=BLOCK, VECTOR=vector, num_warps=8,
        )  # fmt: skip
        return self.squares.sum()

    def use(
        self, norm: Tensor, numbers: Tensor, which: int, group: dict[str, Any], vector: int,
        options: Optimiser,
    ) -> None:  # fmt: skip
        """Move the parameters by their clipped gradients, and the means by them."""
        most = options.clip if options.clip > 0 else math.inf
        _adam[(len(self.owner),)](
            self.pointers, self.gradients, self.sizes, self.owner, self.first, norm, numbers,
            len(self.sizes), most, *options.betas, group["eps"], group["weight_decay"],
            RATE=which, WIDE=self.wide, APART=options.optimiser == "adamw", MEAN=self.averaged,
            BLOCK=BLOCK, VECTOR=vector, num_warps=8,
        )  # fmt: skip


class Group:
    """Parameters of one learning rate, whose gradients are clipped together."""

    def __init__(self, which: int, group: dict[str, Any], state: Any, means: dict[int, Tensor]):
        self.which, self.group = which, group
        even = [p for p in group["params"] if p.numel() % 4 == 0]
        odd = [p for p in group["params"] if p.numel() % 4]
        self.parts = [Some(some, state, means) for some in (even, odd) if some]

    def use(self, numbers: Tensor, options: Optimiser) -> Tensor:
        """The norm before clipping: ()."""
        vectors = [part.vector() for part in self.parts]
        pairs = list(zip(self.parts, vectors, strict=True))
        norm = torch.stack([part.add_squares(vector) for part, vector in pairs]).sum().sqrt()
        for part, vector in pairs:
            part.use(norm, numbers, self.which, self.group, vector, options)
        return norm


class Update:
    """Clipping, Adam and the running mean in kernels."""

    def __init__(self, optimiser: torch.optim.Optimizer, average: Average, options: Optimiser):
        self.options = options
        means = {id(new): mean for group in average.groups.values() for mean, new in group}
        self.groups = [
            Group(number, group, optimiser.state, means)
            for number, group in enumerate(optimiser.param_groups)
        ]

    def point(self) -> None:
        """After a backward pass whose gradients are in new places."""
        for group in self.groups:
            for part in group.parts:
                part.point()

    def use(self, numbers: Tensor) -> Tensor:
        """The gradients' norms before clipping: (groups,)."""
        return torch.stack([group.use(numbers, self.options) for group in self.groups])


def usable(optimiser: torch.optim.Optimizer) -> bool:
    """Whether the kernels can take these parameters: dense, on a GPU, of one type in a group."""
    if triton is None:
        return False
    for group in optimiser.param_groups:
        kinds = {p.dtype for p in group["params"]}
        dense = all(_dense(p) and p.is_cuda for p in group["params"])
        if len(kinds) != 1 or kinds.isdisjoint(KINDS) or not dense:
            return False
    return True


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether both lie in memory in the same order."""
    strides = zip(one.stride(), other.stride(), one.shape, strict=True)
    return all(a == b or length == 1 for a, b, length in strides)


def _dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a stretch of memory, in whatever order."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return True
