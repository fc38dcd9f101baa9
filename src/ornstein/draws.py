"""Where random numbers come from: a generator, or a function of (seed, example, purpose).

`Generated` takes them from a torch generator, which is fast and right for training alone.
`Counted` hashes a counter (SplitMix64), so that the numbers of an example depend on the seed and
on its own index only: not on the batch it is in, the device, or the number of processes. What is
interrupted can go on, and what is split over machines adds up to the same figure.

Times are places u ∈ [0, 1), one per draw, each uniform by itself, together spread over [0, 1):

    independent   no relation
    stratified    draw j of n of an example in its own n-th, and shifted evenly over the examples
    antithetic    in pairs u and 1 − u
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from ornstein.linalg import constant_in_graphs

Spread = Literal["independent", "stratified", "antithetic"]
WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
SPREADS = ("independent", "stratified", "antithetic")

_STEP = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio, odd
_SALT = 0x5851F42D4C957F2D
_GOLDEN, _SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1


class Draws(ABC):
    """Random numbers for a batch of examples; `purpose` keeps different uses apart."""

    size: int
    device: torch.device

    @abstractmethod
    def uniform(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        """In [0, 1), float64: (size, *shape)."""

    @abstractmethod
    def normal(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Standard normal: (size, *shape)."""

    @abstractmethod
    def _turn(self) -> Tensor:
        """A uniform number shared by all examples: ()."""

    @abstractmethod
    def _shift(self) -> Tensor:
        """Places of the examples, evenly in [0, 1): (size,)."""

    @abstractmethod
    def _mirrored(self) -> Tensor:
        """Uniform places of pairs of examples, u and 1 − u: (size,)."""

    def signs(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """−1 or 1 with equal probability: (size, *shape)."""
        return torch.where(self.uniform(purpose, shape) < 0.5, -1.0, 1.0).to(dtype)

    def places(self, count: int, spread: Spread) -> Tensor:
        """Places of `count` draws for each example: (size, count) float64."""
        if spread == "stratified":
            step = torch.arange(count, dtype=torch.float64, device=self.device)
            # each example has its own place inside a stratum of width 1/count
            return ((self._shift().unsqueeze(-1) + step) / count + self._turn()) % 1.0
        if spread == "antithetic" and count == 1:
            return self._mirrored().unsqueeze(-1)
        if spread == "antithetic":
            half = self.uniform("places", ((count + 1) // 2,))
            return torch.cat([half, 1 - half], -1)[:, :count].clamp(max=1 - 2**-53)
        return self.uniform("places", (count,))


class Generated(Draws):
    """From a torch generator, or the global one."""

    def __init__(
        self, size: int, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        self.size, self.device, self.generator = size, device, generator

    def uniform(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        return self._rand(self.size, *shape)

    def normal(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(
            (self.size, *shape), dtype=dtype, device=self.device, generator=self.generator
        )

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, device=self.device, generator=self.generator)

    def _shift(self) -> Tensor:
        order = torch.arange(self.size, dtype=torch.float64, device=self.device)
        return (order + self._rand(self.size)) / max(self.size, 1)

    def _turn(self) -> Tensor:
        return self._rand(1)[0]

    def _mirrored(self) -> Tensor:
        half = self._rand((self.size + 1) // 2)
        return torch.stack([half, 1 - half], -1).flatten()[: self.size].clamp(max=1 - 2**-53)


class Counted(Draws):
    """A function of the seed and each example's index: (size,) whole numbers.

    Further rounds with the same seed have other numbers, and their stratified places go between
    those of the rounds before.
    """

    def __init__(self, seed: int, index: Tensor, round: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}; expected a whole number.")
        if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in WHOLE:
            raise ValueError(
                f"index={index!r}; expected the examples' numbers, a tensor (size,) of whole "
                "numbers, such as torch.arange(size)."
            )
        self.size, self.device = index.shape[0], index.device
        self.seed, self.round, self.index = seed, round, index.to(torch.int64)

    def uniform(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        return _unit(self._bits(purpose, math.prod(shape)), 11).reshape(self.size, *shape)

    def normal(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        bits = self._bits(purpose, (count + 1) // 2)
        radius = (-2 * torch.log1p(-_unit(bits, 32))).sqrt().to(dtype)
        angle = ((bits & 0xFFFFFFFF).to(torch.float64) * (2 * math.pi * 2.0**-32)).to(dtype)
        pair = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
        return pair.flatten(1)[:, :count].reshape(self.size, *shape)

    def _bits(self, purpose: str, count: int) -> Tensor:
        """64 random bits each: (size, count)."""
        stream = torch.full((), _stream(self.seed, self.round, purpose), device=self.device)
        key = _mix(_mix(stream) + _counter(self.index))  # one per example
        steps = torch.arange(count, dtype=torch.int64, device=self.device)
        return _mix(key.unsqueeze(-1) + _counter(steps))

    def _turn(self) -> Tensor:
        whole = Counted(self.seed, torch.zeros(1, dtype=torch.int64, device=self.device))
        return whole.uniform("turn", ())[0]

    def _shift(self) -> Tensor:
        # multiples of irrational numbers fill [0, 1) evenly, whatever the number of examples
        return (self.index.to(torch.float64) * _GOLDEN + self.round * _SILVER) % 1.0

    def _mirrored(self) -> Tensor:
        u = Counted(self.seed, self.index // 2, self.round).uniform("places", ())
        return torch.where(self.index % 2 == 0, u, 1 - u).clamp(max=1 - 2**-53)


@constant_in_graphs
def _stream(seed: int, round: int, purpose: str) -> int:
    """Where the numbers for a purpose begin."""
    return _signed(seed * _STEP + (round << 32) + zlib.crc32(purpose.encode()))


def _signed(value: int) -> int:
    """A whole number modulo 2⁶⁴ as torch's int64 holds it."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _counter(n: Tensor) -> Tensor:
    """Different for different n. The first step is one that no compiler takes for an index."""
    return (n ^ _signed(_SALT)) * _signed(_STEP)


def _shifted(z: Tensor, by: int) -> Tensor:
    """z >> by with zeros coming in."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix(z: Tensor) -> Tensor:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014); products wrap around."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _unit(bits: Tensor, drop: int) -> Tensor:
    """The upper 64 − drop bits as a number in [0, 1), float64."""
    return _shifted(bits, drop).to(torch.float64) * 2.0 ** (drop - 64)
