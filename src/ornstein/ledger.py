"""What an evaluation has done so far: rows in memory, on disk, and over several processes.

A row is one example in one pass. A folder holds settings.json, pilot.npz and rows-*.npz; files
are only added to it, each of them whole or not at all. Under `torch.distributed` every process has
rows of its own; they are brought together as plain numbers.
"""

from __future__ import annotations

import contextlib
import json
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ornstein.files import write_arrays, write_text
from ornstein.terms import Bound


@dataclass(frozen=True)
class Rows:
    """One row per example and pass."""

    number: np.ndarray  # (n,) the pass
    index: np.ndarray  # (n,)
    mark: np.ndarray  # (n,) checksum of the example
    prior: np.ndarray  # (n,) nats, as the next two
    diffusion: np.ndarray
    reconstruction: np.ndarray
    known: np.ndarray  # (n,) of the diffusion, see `Bound.known`; NaN where there is none
    samples: np.ndarray  # (n, draws), as the next two
    logsnr: np.ndarray
    errors: np.ndarray
    dims: int

    def part(self, number: int, count: int) -> Rows:
        """Passes up to this one, of the first examples."""
        return self._at((self.number <= number) & (self.index < count))

    def ordered(self) -> Rows:
        """By pass and example, so that sums do not depend on who did what when."""
        return self._at(np.lexsort((self.index, self.number)))

    def _at(self, which: np.ndarray) -> Rows:
        return replace(self, **{key: getattr(self, key)[which] for key in (*ONE, *MANY)})


ONE = ("number", "index", "mark", "prior", "diffusion", "reconstruction", "known")
PILOT = ("second", "seen", "level", "slope", "edges", "parts")
MANY = ("samples", "logsnr", "errors")


class Ledger:
    """Rows in memory and, where there is one, in a folder."""

    def __init__(self, folder: str | Path | None, settings: dict[str, Any], every: float) -> None:
        self.rank, self.world = processes()
        self.first_process = self.rank == 0
        self.folder = None if folder is None else Path(folder)
        self.every, self.saved_at = every, time.monotonic()
        self.dims = 0
        self.parts: list[dict[str, np.ndarray]] = []  # of this process
        self.unsaved: list[dict[str, np.ndarray]] = []
        self.marks = np.full(0, -1, dtype=np.int64)  # by example; −1 where it was not seen yet
        self.done: dict[int, np.ndarray] = {}  # by pass: whether each example is done
        if self.folder is not None:
            self._open(settings)

    def _open(self, settings: dict[str, Any]) -> None:
        folder = self._where()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "settings.json"
        if path.exists():
            before = _read_settings(path)
            changed = [
                f"{key}: {before.get(key)!r} there, {settings.get(key)!r} now"
                for key in dict.fromkeys([*settings, *before])
                if before.get(key) != settings.get(key)
            ]
            if changed:
                raise ValueError(
                    f"{folder} holds another evaluation ({'; '.join(changed)}); expected the same "
                    "model and options to go on with it. Use another folder, or delete this one."
                )
        elif self.first_process:
            write_text(path, json.dumps(settings, indent=1))
        for file in sorted(folder.glob("rows-*.npz")):
            self._load(file)
        _barrier()

    def _load(self, file: Path) -> None:
        with _reading(file, "rows of an evaluation"), np.load(file) as archive:
            keys = (*(key for key in ONE if key != "known"), *MANY, "dims")
            part = {key: archive[key] for key in keys}
            nothing = np.full(len(part["index"]), np.nan)
            part["known"] = archive.get("known", nothing)  # older files have none
        self.dims = int(part.pop("dims"))
        for number in np.unique(part["number"]).tolist():
            rows = np.flatnonzero(part["number"] == number)
            rows = rows[~self._done(number, part["index"][rows])]  # a row may be in two files
            fresh = {key: value[rows] for key, value in part.items()}
            self._note(number, fresh)
            if self.first_process:  # the others need to know only what is done
                self.parts.append(fresh)

    def _done(self, number: int, index: np.ndarray) -> np.ndarray:
        """Whether these examples are done in this pass."""
        size = int(index.max(initial=-1)) + 1
        self.done[number] = _grown(self.done.get(number, np.zeros(0, dtype=bool)), size, False)
        return self.done[number][index]

    def _note(self, number: int, part: dict[str, np.ndarray]) -> None:
        index = part["index"]
        self._done(number, index)
        self.done[number][index] = True
        self.marks = _grown(self.marks, len(self.done[number]), -1)
        self.marks[index] = part["mark"]

    def left(self, number: int, first: int, marks: np.ndarray, keep: bool = False) -> Tensor:
        """Which examples of a batch are still to do in this pass; their data must not change."""
        index = np.arange(first, first + len(marks))
        self.marks = _grown(self.marks, first + len(marks), -1)
        known = self.marks[index]
        other = index[(known >= 0) & (known != marks)]
        if len(other):
            raise ValueError(
                f"example {other[0]} is not what it was before; expected the same examples in the "
                "same order in every pass. Turn off shuffling and random augmentation in the "
                "loader, or use another folder for other data."
            )
        if keep:
            self.marks[index] = marks
        return torch.from_numpy(np.flatnonzero(~self._done(number, index)))

    @contextlib.contextmanager
    def flushed(self, device: torch.device) -> Iterator[None]:
        """Whatever happens, write what is done; and if one process fails, all of them stop."""
        failed = True
        try:
            yield
            failed = False
        finally:
            self.flush()
            others = any_failed(failed, device)
        if others and not failed:
            raise RuntimeError("another process of this evaluation failed; see its message")

    def add(self, number: int, index: Tensor, marks: np.ndarray, bound: Bound) -> None:
        values = {
            "number": torch.full_like(index, number),
            "index": index,
            **{key: getattr(bound, key) for key in (*ONE[3:-1], *MANY)},
            "known": torch.full_like(bound.prior, torch.nan)
            if bound.known is None
            else bound.known.mean(1),
        }
        part = {key: value.cpu().numpy() for key, value in values.items()}
        bad = ~np.isfinite(part["samples"]).all(1)
        if bad.any():
            which = int(part["index"][bad][0])
            raise ValueError(
                f"the bound of example {which} is not a number; expected finite noise from the "
                "network. Look for NaN in its weights, or overflow in its type."
            )
        part["mark"] = marks
        self.dims = bound.dims
        self._note(number, part)
        self.parts.append(part)
        self.unsaved.append(part)
        if self.folder is not None and time.monotonic() - self.saved_at > self.every:
            self.flush()

    def flush(self) -> None:
        """Write what is new to the disk."""
        if self.folder is None or not self.unsaved:
            return
        part = _joined(self.unsaved)
        taken = [int(f.stem[-6:]) for f in self.folder.glob(f"rows-{self.rank:04d}-??????.npz")]
        path = self.folder / f"rows-{self.rank:04d}-{max(taken, default=-1) + 1:06d}.npz"
        write_arrays(path, {**part, "dims": np.int64(self.dims)})
        self.unsaved, self.saved_at = [], time.monotonic()

    @property
    def rows(self) -> Rows:
        part = _joined(self.parts) if self.parts else {}
        self.parts = [part] if part else []  # so that it is not joined again
        return Rows(**part, dims=self.dims) if part else _empty()

    def pilot(self) -> dict[str, Tensor] | None:
        """What was found out from the first examples."""
        path = None if self.folder is None else self.folder / "pilot.npz"
        if path is None or not path.exists():
            return None
        with _reading(path, "the pilot of an evaluation"), np.load(path) as archive:
            return {key: torch.from_numpy(archive[key]) for key in PILOT}

    def keep_pilot(self, found: dict[str, Tensor]) -> None:
        if self.folder is not None and self.first_process:
            arrays = {key: found[key].cpu().numpy() for key in PILOT}
            write_arrays(self.folder / "pilot.npz", arrays)

    def _where(self) -> Path:
        if self.folder is None:
            raise ValueError("this evaluation is not kept in a folder")
        return self.folder


UNREADABLE = (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile)


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Name the file that can't be read, and what to do about it."""
    try:
        yield
    except UNREADABLE as error:
        raise ValueError(
            f"{path} can't be read ({error}); expected {what}. Delete this file and repeat the "
            "command: only what it held is computed again."
        ) from error


def _read_settings(path: Path) -> dict[str, Any]:
    with _reading(path, "the settings of an evaluation"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    return settings


def _grown(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    """At least this long."""
    if size <= len(array):
        return array
    more = np.full(max(size, 2 * len(array)) - len(array), fill, dtype=array.dtype)
    return np.concatenate([array, more])


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([part[key] for part in parts]) for key in (*ONE, *MANY)}


def _empty() -> Rows:
    none, some = np.zeros(0), np.zeros((0, 1))
    whole = none.astype(np.int64)
    return Rows(whole, whole, whole, none, none, none, none, some, some, some, 0)


# ---------------------------------------------------------------- processes


def processes() -> tuple[int, int]:
    """Rank and number of processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _barrier() -> None:
    if processes()[1] > 1:
        torch.distributed.barrier()


def _device(device: torch.device) -> torch.device:
    """Where tensors must be to be exchanged."""
    return device if torch.distributed.get_backend() == "nccl" else torch.device("cpu")


def any_failed(failed: bool, device: torch.device) -> bool:
    """Whether any process failed."""
    if processes()[1] == 1:
        return failed
    flag = torch.tensor([float(failed)], device=_device(device))
    torch.distributed.all_reduce(flag)
    return bool(flag.item() > 0)


def agree(numbers: list[int], device: torch.device) -> bool:
    """Whether all processes have the same numbers."""
    if processes()[1] == 1:
        return True
    own = torch.tensor(numbers, dtype=torch.int64, device=_device(device))
    low, high = own.clone(), own.clone()
    torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX)
    return bool((low == high).all())


def gathered(rows: Rows, draws: int, device: torch.device) -> Rows:
    """The rows of all processes, as numbers: nothing is pickled."""
    if processes()[1] == 1:
        return rows
    columns = [np.asarray(getattr(rows, key), dtype=np.float64)[:, None] for key in ONE]
    columns += [getattr(rows, key) if len(rows.index) else np.zeros((0, draws)) for key in MANY]
    where = _device(device)
    table = torch.from_numpy(np.concatenate(columns, 1)).to(where)
    sizes = [torch.zeros(2, dtype=torch.int64, device=where) for _ in range(processes()[1])]
    own = torch.tensor([len(table), rows.dims], dtype=torch.int64, device=where)
    torch.distributed.all_gather(sizes, own)
    longest = max(int(size[0]) for size in sizes)
    padded = torch.nn.functional.pad(table, (0, 0, 0, longest - len(table)))
    tables = [torch.zeros_like(padded) for _ in sizes]
    torch.distributed.all_gather(tables, padded.contiguous())
    whole = torch.cat([t[: int(s[0])] for t, s in zip(tables, sizes, strict=True)]).cpu().numpy()
    one = {key: whole[:, i] for i, key in enumerate(ONE)}
    for key in ONE[:3]:
        one[key] = one[key].astype(np.int64)
    width = len(ONE)
    many = {
        key: whole[:, width + i * draws : width + (i + 1) * draws] for i, key in enumerate(MANY)
    }
    return Rows(**one, **many, dims=max(int(size[1]) for size in sizes))
