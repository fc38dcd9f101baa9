"""Arrays of one's own: .npz and .npy files, and folders of them, as splits.

    integers (N, H, W), (N, H, W, C), (N, C, H, W)    images with levels
    integers (N, d)                                   vectors with levels
    floats, of any of these shapes                    real-valued data

An axis of length 4 or less is the one of the channels; where that leaves a doubt, the file says
which it is, by an array `layout` of "NHWC" or "NCHW". uint8 has 256 levels; other integers have as
many as their largest value says, unless an array `levels` says it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ornstein.data.sets import Found, Split, chunk

SPLITS = {
    "train": ("train", "x_train"),
    "valid": ("valid", "val", "x_valid", "x_val"),
    "test": ("test", "x_test"),
}
LABELS = {
    "train": ("train_labels", "y_train"),
    "valid": ("valid_labels", "val_labels", "y_valid", "y_val"),
    "test": ("test_labels", "y_test"),
}
WHOLE, WHOLE_LABELS = ("x", "images", "data"), ("labels", "y")
LAYOUTS = ("NHWC", "NCHW")
MANY = 65_536  # levels; a table with an entry for each is made later
_CHANNELS = 4
_WORD = re.compile(r"(?:^|[-_. ])(train|valid|validation|val|test)(?=$|[-_. \d])", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Piece:
    """An array of a file, with the axes (N, C, H, W) or (N, d)."""

    path: Path
    x: np.ndarray
    labels: np.ndarray | None
    levels: int | None = None


Pieces = Mapping[str, list[Piece]]


def read_file(path: Path) -> Found:
    """One .npz or .npy file."""
    return joined(_npy(path) if path.suffix.lower() == ".npy" else _npz(path), str(path))


def read_shards(paths: Sequence[Path], source: str) -> Found:
    """Several files with one array each; train, valid or test in their names says which split."""
    words = {path: _WORD.findall(path.stem) for path in paths}
    unnamed = [path for path, word in words.items() if not word]
    if unnamed and len(unnamed) < len(paths):
        named = next(path for path in paths if path not in unnamed)
        raise ValueError(
            f"{named.name} names its split but {unnamed[0].name} does not; expected train, valid "
            f"or test in the names of all files in {source}, or of none."
        )
    pieces: dict[str, list[Piece]] = {}
    for path in sorted(paths, key=natural):
        split = {"val": "valid", "validation": "valid"}.get(
            word := words[path][-1].lower() if words[path] else "whole", word
        )
        found = _npy(path) if path.suffix.lower() == ".npy" else _npz(path)
        if set(found) != {"whole"}:
            raise ValueError(
                f"{path} has arrays for {' and '.join(found)}; expected one array, named x, images "
                "or data, in each file of a folder. Load that file by itself."
            )
        pieces.setdefault(split, []).extend(found["whole"])
    return joined(pieces, source)


def natural(path: Path) -> list[tuple[int, str]]:
    """A key by which part-2 comes before part-10."""
    return [(int(word or -1), other) for word, other in re.findall(r"(\d+)|(\D+)", str(path))]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a decoder raises says which file it is about."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a damaged file fails in many ways, each library has its own
        said = f"{type(error).__name__}: {error}"
        if "Object arrays" in said:
            said = "it holds Python objects, which are never unpickled here"
        elif "pickle" in said:  # numpy's advice about a file that it does not know
            said = "it is no array file"
        raise ValueError(
            f"{path} can't be read ({said}); expected a whole file. It is "
            "damaged, or not what its name says: delete it, and fetch or write it again."
        ) from error


# ---------------------------------------------------------------- files


def _npy(path: Path) -> Pieces:
    """A .npy file stays on the disk until its examples are asked for."""
    with reading(path):
        x = np.load(path, mmap_mode="c", allow_pickle=False)
    if not isinstance(x, np.ndarray):
        raise ValueError(f"{path} holds several arrays; expected one. Name it .npz.")
    return {"whole": [Piece(path, _arranged(x, None, path), None)]}


def _npz(path: Path) -> Pieces:
    """All splits of an .npz file."""
    with opened(path) as file:
        layout = str(member(file, path, "layout")) if "layout" in file.files else None
        levels = None
        if "levels" in file.files:
            with reading(path):
                levels = int(file["levels"])
        names = {split: _first(file.files, known) for split, known in SPLITS.items()}
        if not any(names.values()):
            names = {"whole": _first(file.files, WHOLE)}
        labels = {**LABELS, "whole": WHOLE_LABELS}
        pieces: dict[str, list[Piece]] = {}
        for split, name in names.items():
            if name is not None:
                label = _first(file.files, labels[split])
                x = _arranged(member(file, path, name), layout, path)
                about = None if label is None else member(file, path, label)
                pieces[split] = [Piece(path, x, about, levels)]
        if not pieces:
            raise ValueError(
                f"{path} has the arrays {', '.join(file.files) or '(none)'}; expected train, valid "
                "and test, or one array named x, images or data."
            )
    return pieces


def opened(path: Path) -> Any:
    """An .npz file, whose arrays are read when they are asked for."""
    with reading(path):
        file = np.load(path, allow_pickle=False)
    if isinstance(file, np.ndarray):
        raise ValueError(f"{path} holds a single array; expected an archive. Name it .npy.")
    return file


def member(file: Any, path: Path, name: str) -> np.ndarray:
    """An array of an open .npz file."""
    with reading(path):
        return np.asarray(file[name])


def _first(there: Sequence[str], known: Sequence[str]) -> str | None:
    return next((name for name in known if name in there), None)


def _arranged(x: np.ndarray, layout: str | None, path: Path) -> np.ndarray:
    """A view with the axes (N, C, H, W) or (N, d)."""
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"{path} has layout={layout!r}; expected {' or '.join(LAYOUTS)}.")
    if x.ndim == 2:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim != 4:
        raise ValueError(
            f"{path} has an array of shape {x.shape}; expected (N, d) for vectors, or (N, H, W), "
            "(N, H, W, C) or (N, C, H, W) for images."
        )
    first, last = x.shape[1] <= _CHANNELS, x.shape[3] <= _CHANNELS
    if layout is None and first == last:
        raise ValueError(
            f"{path} has an array of shape {x.shape}, whose channels may be the second axis or the "
            'last; save it as .npz with an array that says it, layout=np.array("NHWC") or '
            'layout=np.array("NCHW").'
        )
    return x if layout == "NCHW" or (layout is None and first) else x.transpose(0, 3, 1, 2)


# ---------------------------------------------------------------- numbers


def joined(pieces: Pieces, source: str) -> Found:
    """The splits as tensors. Pieces are let go one by one, so that memory holds the data once."""
    every = [piece for split in pieces.values() for piece in split]
    for piece in every:
        if piece.x.shape[1:] != every[0].x.shape[1:]:
            raise ValueError(
                f"{piece.path} has examples of shape {piece.x.shape[1:]} after others of shape "
                f"{every[0].x.shape[1:]}; expected one shape."
            )
    kinds = {"f" if piece.x.dtype.kind == "f" else "i" for piece in every}
    odd = [piece for piece in every if piece.x.dtype.kind not in "fiub"]
    if odd or len(kinds) > 1:
        types = sorted({str(piece.x.dtype) for piece in odd or every})
        raise ValueError(
            f"{source} has arrays of type {' and '.join(types)}; expected whole numbers (uint8 for "
            "images) in all splits, or floats in all."
        )
    levels: int | None = None
    notes: list[str] = []
    dtype: np.dtype[Any] = np.dtype(np.float32)
    if kinds == {"f"}:
        for piece in every:
            _check_real(piece)
    else:
        levels, notes = _levels(every)
        dtype = np.dtype(np.uint8) if levels <= 256 else np.dtype(np.int32)
    del every
    splits = {}
    for split, parts in pieces.items():
        splits[split], more = _tensors(parts, dtype)
        notes += [note for note in more if note not in notes]
    return Found(splits, levels, source, tuple(notes))


def _tensors(parts: list[Piece], dtype: np.dtype[Any]) -> tuple[Split, list[str]]:
    """One split, and what there is to say about it; the list is emptied."""
    labels, notes = _labels(parts)
    x = parts[0].x
    if len(parts) == 1 and x.dtype == dtype and (isinstance(x, np.memmap) or x.flags.c_contiguous):
        parts.clear()
        return Split(torch.from_numpy(x), labels), notes
    total = sum(len(piece.x) for piece in parts)
    whole, done = np.empty((total, *x.shape[1:]), dtype), 0
    del x
    while parts:
        piece = parts.pop(0)
        whole[done : done + len(piece.x)] = piece.x
        done += len(piece.x)
    return Split(torch.from_numpy(whole), labels), notes


def _labels(parts: Sequence[Piece]) -> tuple[torch.Tensor | None, list[str]]:
    """(N,) int64, if all have whole labels."""
    if any(piece.labels is None for piece in parts):
        return None, []
    found = []
    for piece in parts:
        labels = np.asarray(piece.labels)
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1 or labels.dtype.kind not in "iub":
            return None, [f"labels of type {labels.dtype}, shape {labels.shape} are not used"]
        if len(labels) != len(piece.x):
            raise ValueError(
                f"{piece.path} has {len(piece.x)} examples and {len(labels)} labels; expected as "
                "many of both."
            )
        found.append(labels.astype(np.int64))
    return torch.from_numpy(np.concatenate(found)), []


def _levels(every: Sequence[Piece]) -> tuple[int, list[str]]:
    """How many values a pixel can have, and a word about how that is known."""
    low, high = 0, 0
    for piece in every:
        if piece.x.size:
            low, high = min(low, int(piece.x.min())), max(high, int(piece.x.max()))
    if low < 0:
        raise ValueError(
            f"{every[0].path} has whole numbers down to {low}; expected levels from 0. Shift them, "
            "or store real-valued data as floats."
        )
    given = {piece.levels for piece in every if piece.levels is not None}
    if len(given) > 1:
        raise ValueError(f"the files say that levels are {sorted(given)}; expected one number.")
    if given:
        levels = given.pop()
        if not 2 <= levels <= MANY or high >= levels:
            raise ValueError(
                f"{every[0].path} has levels={levels} and values up to {high}; expected 2 … {MANY} "
                "levels, more than the largest value."
            )
        return levels, [f"{levels} levels, as the file says"]
    if all(piece.x.dtype == np.uint8 for piece in every):
        return 256, []
    if high >= MANY:
        raise ValueError(
            f"{every[0].path} has whole numbers up to {high}; expected less than {MANY}. Use "
            "coarser levels, or store them as floats for real-valued data."
        )
    return max(high + 1, 2), [f"{max(high + 1, 2)} levels, since the largest value is {high}"]


def _check_real(piece: Piece) -> None:
    """Floats must be finite, fit float32, and not be pixels in disguise."""
    step = chunk(piece.x[:1].nbytes)
    for first in range(0, len(piece.x), step):
        with np.errstate(over="ignore"):
            rows = piece.x[first : first + step].astype(np.float32)
        good = np.isfinite(rows).reshape(len(rows), -1).all(1)
        if not good.all():
            raise ValueError(
                f"{piece.path}: example {first + int(np.argmin(good))} has a value that is NaN, "
                "infinite or too large for float32; expected finite numbers. Leave such examples "
                "out, or rescale the data."
            )
    some = piece.x[:: max(1, len(piece.x) // 64)].astype(np.float64)
    for scaled, what, slack in (
        (some, "k", 0.0),
        (some * 255, "k/255", 1e-3),
        ((some + 1) * 127.5, "k/127.5 − 1", 1e-3),
    ):
        inside = not slack or (scaled.min(initial=0) > -0.5 and scaled.max(initial=0) < 255.5)
        if some.size and inside and (np.abs(scaled - scaled.round()) <= slack).all():
            raise ValueError(
                f"{piece.path} has floats that are all {what} for whole k; expected levels as "
                "whole numbers. A density of such data has no bound. Store k itself, as uint8."
            )
