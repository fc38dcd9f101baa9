"""MNIST, Fashion-MNIST, CIFAR-10 and ImageNet32, from the files that they are published as.

    idx      big-endian: 0, 0, type 8, number of axes, their lengths, then the bytes
    binary   CIFAR-10: records of a label and 3 · 32 · 32 bytes, channel by channel
    .npz     packed by others, and ImageNet32, (N, 3072) channel by channel with labels from 1

The pickled version of CIFAR-10 is never opened.
"""

from __future__ import annotations

import gzip
import struct
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ornstein.data import arrays, fetching
from ornstein.data.arrays import Piece, member, opened, reading
from ornstein.data.sets import Found

IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
RECORD = 1 + 3 * 32 * 32
FIRST_LABELS = {  # by which to tell apart two sets whose files have the same names
    "mnist": (5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
    "fashion_mnist": (9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
}
MOST = {"mnist": 5_000, "fashion_mnist": 5_000, "cifar10": 5_000, "imagenet32": 10_000}  # valid
SUBFOLDERS = {
    "mnist": ("MNIST/raw",),
    "fashion_mnist": ("FashionMNIST/raw",),
    "cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "imagenet32": (),
}
NAMES = tuple(MOST)


@dataclass(frozen=True)
class Form:
    """A way in which a set is kept: files that belong together, and what reads them."""

    files: tuple[str, ...]
    read: Callable[[Sequence[Path]], Found]
    zipped: bool = False  # each may have .gz at the end

    def there(self, place: Path) -> list[Path]:
        """Those of the files that are in a folder."""
        found = []
        for name in self.files:
            names = (name, name + ".gz") if self.zipped else (name,)
            found += [place / name for name in names if (place / name).is_file()][:1]
        return found


def read_published(
    name: str, folder: Path, download: bool = False, watch: fetching.Watcher | None = None
) -> Found:
    """The files of a set in a folder, or in one that is usual for it; fetched first if wanted."""
    places = [folder / name, *(folder / other for other in SUBFOLDERS[name]), folder]
    found = _look(name, places)
    if found is None and download:
        fetching.fetch_set(name, folder / name, watch)
        found = _look(name, places)
    if found is None:
        raise ValueError(_missing(name, places))
    return found


def _look(name: str, places: Sequence[Path]) -> Found | None:
    for place in places:
        for form in FORMS[name]:
            if len(paths := form.there(place)) == len(form.files):
                return form.read(paths)
    return None


def _missing(name: str, places: Sequence[Path]) -> str:
    """What was looked for, what is there of it, and what to do."""
    forms = " or ".join(
        ", ".join(form.files) + (" (each with or without .gz)" if form.zipped else "")
        for form in FORMS[name]
    )
    text = f"{name} is not in {', '.join(str(place) for place in places)}; expected {forms}."
    for place in places:
        for form in FORMS[name]:
            there = {path.name.removesuffix(".gz") for path in form.there(place)}
            if there and len(form.files) > 1:
                lacking = [file for file in form.files if file not in there]
                text += f" {place} lacks {', '.join(lacking)}."
    if name == "cifar10" and any(_pickled(place) for place in places):
        text += (
            " The Python version that is there is pickled and never opened, since a pickle can "
            "run any code; use the binary version, cifar-10-binary.tar.gz."
        )
    origin = fetching.ORIGINS.get(name)
    if origin is None:
        return text + (
            " It can't be fetched without an account: sign up at https://image-net.org, where it "
            f"is under Download, and unpack all eleven files into {places[0]}."
        )
    return text + (
        f" Have them fetched with download=True (--download), put {', '.join(origin.md5)} from "
        f"{origin.base} into {places[0]}, or say where they are with folder= (--data-folder) or "
        "ORNSTEIN_DATA."
    )


def _pickled(place: Path) -> bool:
    return (place / "cifar-10-python.tar.gz").exists() or (place / "data_batch_1").exists()


# ---------------------------------------------------------------- idx


def _idx_of(name: str) -> Callable[[Sequence[Path]], Found]:
    def read(paths: Sequence[Path]) -> Found:
        labels = idx(paths[1], 1)
        pieces = {
            "train": [Piece(paths[0], idx(paths[0], 3)[:, None], labels)],
            "test": [Piece(paths[2], idx(paths[2], 3)[:, None], idx(paths[3], 1))],
        }
        for other, known in FIRST_LABELS.items():
            if other != name and tuple(labels[: len(known)]) == known:
                raise ValueError(
                    f"{paths[0].parent} has the files of {other}, whose names are the same; "
                    f"expected those of {name}. Keep them in folders {other} and {name}."
                )
        return arrays.joined(pieces, str(paths[0].parent))

    return read


def idx(path: Path, axes: int) -> np.ndarray:
    """The bytes of an idx file, unzipped if its name ends with .gz."""
    with reading(path):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    start = 4 + 4 * axes
    magic = bytes((0, 0, 8, axes))
    if content[:4] != magic or len(content) < start:
        raise ValueError(
            f"{path} begins with {content[:4].hex(' ') or 'nothing'}; expected {magic.hex(' ')}, "
            f"an idx file of bytes with {axes} axes. Delete it and fetch it again."
        )
    shape = struct.unpack(f">{axes}I", content[4:start])
    expected = start + int(np.prod(shape, dtype=np.uint64))
    if len(content) != expected:
        raise ValueError(
            f"{path} has {len(content)} bytes, unzipped; expected {expected} for the shape {shape} "
            "that it states. Delete it and fetch it again."
        )
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape)


# ---------------------------------------------------------------- CIFAR-10


def _binary(paths: Sequence[Path]) -> Found:
    contents = {}
    for path in paths:
        with reading(path):
            contents[path] = path.read_bytes()
    return _records(contents, str(paths[0].parent))


def _archive(paths: Sequence[Path]) -> Found:
    """The archive as it is fetched: members are read, nothing is unpacked."""
    contents, path = {}, paths[0]
    with reading(path), tarfile.open(path, "r:gz") as archive:
        for entry in archive:
            name = Path(entry.name).name
            if entry.isfile() and name in BATCHES and (file := archive.extractfile(entry)):
                contents[path / name] = file.read()
    if lacking := [name for name in BATCHES if path / name not in contents]:
        raise ValueError(
            f"{path} has no {', '.join(lacking)}; expected the binary version of CIFAR-10. Delete "
            "it and fetch it again."
        )
    return _records({path / name: contents[path / name] for name in BATCHES}, str(path))


def _records(contents: dict[Path, bytes], source: str) -> Found:
    """The batches, of which the last one is the test set."""
    most = max(len(content) for content in contents.values())
    pieces: dict[str, list[Piece]] = {"train": [], "test": []}
    for number, (path, content) in enumerate(contents.items()):
        if len(content) % RECORD or not content or (len(content) != most and number < 5):
            raise ValueError(
                f"{path} has {len(content)} bytes; expected a multiple of {RECORD}, one label and "
                f"3072 pixels each, and {most} as in the largest batch. Delete it and fetch it "
                "again."
            )
        rows = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
        if rows[:, 0].max() > 9:
            raise ValueError(
                f"{path} has the label {rows[:, 0].max()}; expected 0 … 9. Delete it and fetch it "
                "again."
            )
        split = "test" if number == 5 else "train"
        pieces[split].append(Piece(path, rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]))
    return arrays.joined(pieces, source)


# ---------------------------------------------------------------- .npz


def _packed(paths: Sequence[Path]) -> Found:
    """One .npz with all splits."""
    return arrays.read_file(paths[0])


def _shards(paths: Sequence[Path]) -> Found:
    return arrays.read_shards(paths, str(paths[0].parent))


def _imagenet(paths: Sequence[Path]) -> Found:
    """Ten batches for training; the published validation set is the test set."""
    pieces: dict[str, list[Piece]] = {"train": [], "test": []}
    for path in paths:
        with opened(path) as file:
            x, labels = member(file, path, "data"), member(file, path, "labels")
        if x.dtype != np.uint8 or x.shape[1:] != (3072,):
            raise ValueError(
                f"{path} has data of type {x.dtype}, shape {x.shape}; expected uint8 (N, 3072)."
            )
        if len(labels) and not 1 <= labels.min() <= labels.max() <= 1000:
            raise ValueError(
                f"{path} has labels {labels.min()} … {labels.max()}; expected 1 … 1000, as "
                "published."
            )
        split = "train" if path.name.startswith("train") else "test"
        labels = labels.astype(np.int64) - 1
        pieces[split].append(Piece(path, x.reshape(-1, 3, 32, 32), labels))
    found = arrays.joined(pieces, str(paths[0].parent))
    note = "test is the published validation set"
    return Found(found.splits, found.levels, found.source, (*found.notes, note))


FORMS = {
    "mnist": (Form(IDX, _idx_of("mnist"), zipped=True), Form(("mnist.npz",), _packed)),
    "fashion_mnist": (
        Form(IDX, _idx_of("fashion_mnist"), zipped=True),
        Form(("fashion_mnist.npz",), _packed),
    ),
    "cifar10": (
        Form(BATCHES, _binary),
        Form(("cifar-10-binary.tar.gz",), _archive),
        Form((*(f"cifar10-train-{i}.npz" for i in range(5)), "cifar10-test.npz"), _shards),
    ),
    "imagenet32": (
        Form((*(f"train_data_batch_{i}.npz" for i in range(1, 11)), "val_data.npz"), _imagenet),
    ),
}
