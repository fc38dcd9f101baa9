"""The examples of an evaluation, in a fixed order, with their numbers and a checksum of each."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Source:
    """Examples in a fixed order, with their numbers."""

    def __init__(self, data: Tensor | Iterable[Any], limit: int | None) -> None:
        data = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
        self.data, self.limit = data, limit
        self.shape: torch.Size | None = None
        if not isinstance(data, Tensor) and not isinstance(data, Iterable):
            raise ValueError(
                f"data was given as {type(data).__name__}; expected a tensor (N, *shape) or a "
                "loader of batches."
            )
        if isinstance(data, Iterator):
            raise ValueError(
                "data is an iterator, which can be read only once; expected a tensor or a loader, "
                "such as a torch DataLoader or a list of batches."
            )

    def batches(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """The number of the first example, and the batch, on the CPU or where it was."""
        done = 0
        parts: Iterable[Any]
        parts = self.data.split(size) if isinstance(self.data, Tensor) else self.data
        for part in parts:
            x = part[0] if isinstance(part, (tuple, list)) and len(part) else part
            if not isinstance(x, Tensor):
                raise ValueError(
                    f"the loader gave a batch of type {type(part).__name__}; expected a tensor "
                    "(batch, *data), or a tuple or list that begins with one."
                )
            if self.shape is None:
                self.shape = x.shape[1:]
            if x.shape[1:] != self.shape:
                raise ValueError(
                    f"the loader gave examples of shape {tuple(x.shape[1:])} after others of shape "
                    f"{tuple(self.shape)}; expected one shape. Evaluate them apart."
                )
            if self.limit is not None:
                x = x[: self.limit - done]
            if len(x):
                yield done, x
            done += len(x)
            if self.limit is not None and done >= self.limit:
                return
        if not done:
            raise ValueError("the data is empty; expected at least one example.")

    def head(self, count: int) -> Tensor:
        """The first examples."""
        parts, found = [], 0
        for _, x in self.batches(count):
            parts.append(x[: count - found])
            found += len(parts[-1])
            if found == count:
                break
        return torch.cat(parts)


def marks_of(batch: Tensor) -> np.ndarray:
    """A checksum of each example: (B,) uint32."""
    rows = (as_bytes(row) for row in batch.detach().cpu())
    return np.array([zlib.crc32(row) for row in rows], dtype=np.uint32)


def as_bytes(value: Tensor) -> bytes:
    """As they are in memory; numpy does not know all types."""
    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.copy_(value.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()
