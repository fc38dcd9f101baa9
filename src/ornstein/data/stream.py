"""Training examples as a function of a position in an endless stream.

With N examples, position p shows example order(p // N)[p mod N], where order(epoch) is a
permutation that depends on (seed, epoch) alone. So every epoch shows each example once, batches
may be cut in any way and by any number of processes, and a run that was interrupted goes on with
exactly the examples that it would have seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ornstein.data.sets import shuffled
from ornstein.draws import Counted

RESIDENT = 4 * 2**30  # bytes
_KEPT = 2  # orders to remember: a batch may lie across the end of an epoch


class Stream:
    """Examples x, (N, *shape), in an order that is shuffled anew in every epoch.

    Data of at most `resident` bytes moves to the device once; more stays where it is, and batches
    are copied. With `flips`, an image is mirrored left-right by a fair coin that is a function of
    (seed, position).
    """

    def __init__(
        self,
        x: Tensor,
        seed: int,
        device: torch.device | str = "cpu",
        flips: bool = False,
        resident: int = RESIDENT,
    ) -> None:
        if not isinstance(x, Tensor) or x.dim() < 1 or not len(x):
            raise ValueError(f"x is {_kind(x)}; expected a tensor of examples (N, *shape), N ≥ 1.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}; expected a whole number.")
        if flips and x.dim() != 4:
            raise ValueError(
                f"flips=True with x of shape {tuple(x.shape)}; expected images (N, C, H, W). "
                "Leave flips out for other data."
            )
        self.seed, self.flips, self.device = seed, flips, torch.device(device)
        self.resident = x.numel() * x.element_size() <= resident
        self.x = x.to(self.device) if self.resident else x
        self._orders: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """The number of positions in an epoch."""
        return len(self.x)

    def epoch(self, position: int) -> float:
        """How often the data has been seen before this position."""
        return position / len(self.x)

    def take(self, first: int, count: int) -> Tensor:
        """The examples at positions first … first + count − 1: (count, *shape) on the device.

        Nothing is read back from the device.
        """
        if first < 0 or count < 0:
            raise ValueError(f"take({first}, {count}); expected a position and a number ≥ 0.")
        batch = self.rows(first, count)
        return self.mirrored(batch, torch.arange(first, first + count, device=self.device))

    def rows(self, first: int, count: int, out: Tensor | None = None) -> Tensor:
        """The same without flips; into `out`, a batch on the device, if it is given."""
        total, parts, place = len(self.x), [], first
        while place < first + count:
            epoch, start = divmod(place, total)
            part = self._order(epoch)[start : start + first + count - place]
            parts.append(part)
            place += len(part)
        if len(parts) == 1:
            return self._gathered(parts[0], out)
        rows = torch.cat(parts) if parts else torch.arange(0, device=self.x.device)  # (count,)
        return self._gathered(rows, out)

    def mirrored(self, batch: Tensor, positions: Tensor) -> Tensor:
        """A batch of `rows` at these positions, with the flips that are due: like batch."""
        if not self.flips:
            return batch
        coin = Counted(self.seed, positions).uniform("flip", ()) < 0.5
        return torch.where(coin[:, None, None, None], batch.flip(-1), batch)

    def _gathered(self, rows: Tensor, out: Tensor | None) -> Tensor:
        """These examples, on the device."""
        if self.x.device == self.device:
            return torch.index_select(self.x, 0, rows, out=out)
        if self.x.device.type != "cpu" or self.device.type != "cuda":
            moved = self.x.index_select(0, rows).to(self.device)
            return moved if out is None else out.copy_(moved)
        # torch keeps pinned memory until the copy is over, then uses it again
        batch = torch.empty((len(rows), *self.x.shape[1:]), dtype=self.x.dtype, pin_memory=True)
        torch.index_select(self.x, 0, rows, out=batch)
        if out is None:
            return batch.to(self.device, non_blocking=True)
        return out.copy_(batch, non_blocking=True)

    def _order(self, epoch: int) -> Tensor:
        """Which example comes when in an epoch, where the examples are: (N,)."""
        if epoch not in self._orders:
            while len(self._orders) >= _KEPT:
                del self._orders[next(iter(self._orders))]  # the oldest
            where = self.x.device
            self._orders[epoch] = shuffled(len(self.x), self.seed, "order", epoch, where)
        return self._orders[epoch]


def _kind(x: Any) -> str:
    return f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
