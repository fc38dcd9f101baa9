"""What a data set is here: three splits in memory, and how a split is held out of another.

Which examples are held out is a function of (seed, number of examples) alone: they are ordered by
a hash of their numbers, and the first of that order go. A split that is held out stays in that
order, so that its first n examples are a fair sample; what is left keeps the order of the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ornstein.draws import Counted

SHARE = 10  # one in so many is held out where nobody says otherwise …
MOST = 5_000  # … for validation at most so many
_CHUNK = 1 << 26  # bytes that a pass over the data has in hand


@dataclass(frozen=True, eq=False)
class Split:
    """Examples, (N, C, H, W) uint8 for images, (N, d) float32 for vectors; labels (N,) int64."""

    x: Tensor
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        if self.labels is not None and self.labels.shape != self.x.shape[:1]:
            raise ValueError(
                f"{len(self.x)} examples came with labels of shape {tuple(self.labels.shape)}; "
                "expected one label for each."
            )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | Tensor) -> Split:
        """Some of the examples."""
        return Split(self.x[rows], None if self.labels is None else self.labels[rows])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Three splits of one kind of data; `levels` is None where the data is real-valued."""

    name: str
    train: Split
    valid: Split
    test: Split
    levels: int | None
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        if not len(self.train):
            raise ValueError(f"the training split of {self.name} is empty; expected examples.")
        for split, there in (("valid", self.valid), ("test", self.test)):
            if there.x.shape[1:] != self.shape or there.x.dtype != self.train.x.dtype:
                raise ValueError(
                    f"{self.name}: examples are {_kind(self.train.x)} in train and "
                    f"{_kind(there.x)} in {split}; expected one shape and type in all splits."
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example: (C, H, W) or (d,)."""
        return tuple(self.train.x.shape[1:])

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a SHA-256 over the examples, by which to know them again."""
        found = hashlib.sha256()
        for split in (self.train, self.valid, self.test):
            found.update(f"{tuple(split.x.shape)} {split.x.dtype} ".encode())
            for rows in split.x.split(chunk(split.x[:1].nbytes)):
                plain = rows.cpu().contiguous().flatten()
                found.update(plain.view(torch.uint8).numpy() if len(plain) else b"")
        return found.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """What it is, for JSON."""
        return {
            "name": self.name,
            "sizes": {
                "train": len(self.train),
                "valid": len(self.valid),
                "test": len(self.test),
            },
            "shape": list(self.shape),
            "levels": self.levels,
            "source": self.source,
            "note": self.note,
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True, eq=False)
class Found:
    """What files hold: the splits "train", "valid", "test", or all in one, "whole"."""

    splits: Mapping[str, Split]
    levels: int | None
    source: str
    notes: tuple[str, ...] = field(default=())


def completed(
    found: Found, name: str, *, valid: int | None, seed: int, most: int = MOST
) -> Dataset:
    """A data set with all three splits: those that the files lack are held out of train."""
    splits, notes = dict(found.splits), list(found.notes)
    if "whole" in splits:
        splits = {"train": splits["whole"]}
    if "train" not in splits:
        raise ValueError(
            f"{found.source} has {' and '.join(splits)} but no training split; expected train."
        )
    if valid is not None and "valid" in splits:
        raise ValueError(
            f"valid={valid} was given, but {found.source} has a validation split of "
            f"{len(splits['valid'])} already; leave valid= out."
        )
    total = len(splits["train"])
    wanted = {
        "test": max(1, total // SHARE),
        "valid": valid if valid is not None else max(1, min(most, total // SHARE)),
    }
    wanted = {split: count for split, count in wanted.items() if split not in splits}
    if wanted:
        if sum(wanted.values()) >= total:
            raise ValueError(
                f"{found.source} has {total} examples for training, of which "
                f"{' and '.join(f'{n} for {split}' for split, n in wanted.items())} are to be held "
                "out; expected some to be left. Use more data, or hold fewer out (valid)."
            )
        splits |= held_out(splits["train"], wanted, seed)
        if "test" in wanted:
            notes.append(
                f"no test split in the files: {wanted['test']} examples were held out for it"
            )
    return Dataset(
        name,
        splits["train"],
        splits["valid"],
        splits["test"],
        found.levels,
        found.source,
        "; ".join(notes),
    )


def held_out(whole: Split, counts: Mapping[str, int], seed: int) -> dict[str, Split]:
    """`counts` examples for each name, and the rest as "train"; the tensors of `whole` are used up.

    The rest is moved together in place: a large set is never in memory twice.
    """
    order, splits, done = shuffled(len(whole), seed, "split"), {}, 0
    for name, count in counts.items():
        splits[name] = whole[order[done : done + count]]
        done += count
    kept = order[done:].sort().values
    labels = None if whole.labels is None else whole.labels[kept]
    step = chunk(whole.x[:1].numpy().nbytes)
    for first in range(0, len(kept), step):
        rows = kept[first : first + step]  # rows[i] ≥ first + i: what is read was not overwritten
        whole.x[first : first + len(rows)] = whole.x[rows]
    splits["train"] = Split(whole.x[: len(kept)], labels)
    return splits


def shuffled(
    count: int, seed: int, purpose: str, epoch: int = 0, device: torch.device | None = None
) -> Tensor:
    """The numbers below `count` in an order that is a function of the others: (count,)."""
    numbers = torch.arange(count, device=device)
    keys = Counted(seed, numbers, epoch).uniform(purpose, ())
    return keys.argsort(stable=True)  # equal keys, if ever, in the same order on every device


def chunk(row: int) -> int:
    """How many examples of `row` bytes to look at in one go."""
    return max(1, _CHUNK // max(row, 1))


def check_count(valid: Any) -> None:
    """`valid` must be a number of examples."""
    if isinstance(valid, bool) or not isinstance(valid, int) or valid < 0:
        raise ValueError(f"valid={valid!r}; expected a number of examples ≥ 0.")


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
