"""Data as users have it: the embedded set, toys, published files, their own, and fetched ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ornstein import data
from ornstein.data import Dataset, fetching, sets, toys
from tests import data_files
from tests.data_files import BATCHES, labels, pixels, save, write_idx

REAL = Path(os.environ.get("ORNSTEIN_DATA", "data"))


def rows(x: Tensor) -> list[bytes]:
    """Each example as bytes."""
    return [row.numpy().tobytes() for row in x.contiguous()]


def together(dataset: Dataset) -> list[bytes]:
    """All examples of all splits, sorted."""
    return sorted(rows(torch.cat([dataset.train.x, dataset.valid.x, dataset.test.x])))


def held_from_train(dataset: Dataset, x: np.ndarray, y: np.ndarray) -> bool:
    """Whether train and valid are x without overlap, train in order, labels still with them."""
    number = {row.tobytes(): i for i, row in enumerate(x)}
    train, valid = ([number[row] for row in rows(s.x)] for s in (dataset.train, dataset.valid))
    assert dataset.train.labels is not None and dataset.valid.labels is not None
    assert dataset.train.labels.tolist() == y[train].tolist()
    assert dataset.valid.labels.tolist() == y[valid].tolist()
    return sorted(train + valid) == list(range(len(x))) and train == sorted(train)


# ---------------------------------------------------------------- digits


def test_digits_are_the_published_numbers() -> None:
    digits = data.load("digits")
    assert digits.describe() == {
        "name": "digits",
        "sizes": {"train": 1347, "valid": 150, "test": 300},
        "shape": [1, 8, 8],
        "levels": 17,
        "source": digits.source,
        "note": "",
        "fingerprint": "9187140ab223f5c2",
    }
    with np.load(Path(data.__file__).with_name("digits.npz")) as file:
        table = np.concatenate([file["images"].reshape(-1, 64), file["labels"][:, None]], 1)
    page = Path(data.__file__).with_name("digits.md").read_text(encoding="utf-8")
    assert hashlib.sha256(table.tobytes()).hexdigest() in page
    assert together(digits) == sorted(row[:64].tobytes() for row in table)
    # what the repository says of its test file: how many there are of each digit
    assert np.bincount(table[:, 64]).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (table.min(), table.max()) == (0, 16)


def test_digits_are_balanced_and_apart() -> None:
    digits = data.load("digits")
    assert len(set(together(digits))) == 1797
    every = torch.cat([s.labels for s in (digits.train, digits.valid, digits.test)])  # type: ignore[misc]
    share = torch.bincount(every) / len(every)
    for split in (digits.train, digits.valid, digits.test):
        assert split.labels is not None
        assert (torch.bincount(split.labels) - share * len(split)).abs().max() <= 1
    number = dict(zip(rows(digits.train.x), digits.train.labels, strict=True))  # type: ignore[arg-type]
    more = data.load("digits", valid=200, seed=5)
    assert rows(more.test.x) == rows(digits.test.x)  # whatever the seed is
    assert rows(more.valid.x)[:150] == rows(digits.valid.x)
    assert all(
        number[row] == y for row, y in zip(rows(more.train.x), more.train.labels, strict=True)
    )  # type: ignore[arg-type]


# ---------------------------------------------------------------- toys

GRID = torch.linspace(-2.5, 2.5, 1001, dtype=torch.float64)
CELL = float(GRID[1] - GRID[0])
PLANE = torch.cartesian_prod(GRID[:-1], GRID[:-1]) + CELL / 2  # middles of cells


@pytest.mark.parametrize("name", ["mixture", "rings", "checkerboard"])
def test_densities_of_toys_are_those_of_their_draws(name: str) -> None:
    log_density = getattr(toys, f"{name}_log_density")
    p = log_density(PLANE).exp()
    # the midpoint rule; board and cells have common edges, and the rest is smooth and far inside
    assert abs(p.sum().item() * CELL**2 - 1) < 1e-6
    x = data.load(name, seed=3).train.x
    for function in (  # integrals by the grid against means of draws
        lambda v: v[:, 0],
        lambda v: v.square().sum(1),
        lambda v: (3 * v[:, 0]).sin() * (2 * v[:, 1] - 1).cos(),
        lambda v: ((v[:, 0] > 0.3) & (v[:, 1] < 0.9)).double(),
    ):
        mean = (p * function(PLANE)).sum() * CELL**2
        found = function(x.double())
        assert abs(found.mean() - mean) < 5 * found.std() / len(x) ** 0.5 + 1e-3
    entropy = -(p * torch.where(p > 0, p.log(), 0)).sum() * CELL**2
    surprise = -log_density(x)
    assert abs(surprise.mean() - entropy) < 5 * surprise.std() / len(x) ** 0.5 + 1e-6


def test_entropies_in_closed_form() -> None:
    x = data.load("mixture").train.x
    # parts that are 10 spreads apart: log 8 + log 2πeσ²
    closed = math.log(8) + math.log(2 * math.pi * math.e * 0.1**2)
    surprise = -toys.mixture_log_density(x)
    assert abs(surprise.mean() - closed) < 5 * surprise.std() / len(x) ** 0.5
    # next to the middle, the inner ring comes from both sides: 2 N(½; 0, 0.05²) / (3 · 2πr)
    normal = -(0.5**2) / (2 * 0.05**2) - math.log(0.05 * math.sqrt(2 * math.pi))
    middle = math.log(2) + normal - math.log(3 * 2 * math.pi * 1e-9)
    found = toys.rings_log_density(torch.tensor([[1e-9, 0.0]], dtype=torch.float64))
    assert abs(found.item() - middle) < 1e-9
    board = toys.checkerboard_log_density(data.load("checkerboard").train.x)
    assert (board == -math.log(4.5)).all()


def test_moons_and_swissroll_lie_where_they_should() -> None:
    moons = data.load("moons")
    x, y = moons.train.x.double() + torch.tensor([0.5, 0.25]), moons.train.labels
    assert y is not None
    upper, lower = x[y == 0], torch.tensor([1.0, 0.5]) - x[y == 1]
    for arc in (upper, lower):  # both are the upper half circle, with noise of 0.05
        assert (arc.norm(dim=1) - 1).abs().max() < 6 * 0.05
        assert arc[:, 1].min() > -6 * 0.05
        assert abs(arc[:, 1].mean() - 2 / math.pi) < 0.02
    roll = data.load("swissroll").train.x.double()
    radius, angle = roll.norm(dim=1), torch.atan2(roll[:, 1], roll[:, 0])
    turns = (radius * 2.25 * math.pi - angle) / (2 * math.pi)  # whole on the spiral
    assert ((turns - turns.round()).abs() / 2.25 * 2).max() < 1  # noise, far from the next turn
    assert (turns - turns.round()).std() < 0.1


@pytest.mark.parametrize("name", toys.TOYS)
def test_toys_are_functions_of_the_seed(name: str) -> None:
    first, again, other = data.load(name), data.load(name), data.load(name, seed=1)
    assert [len(s) for s in (first.train, first.valid, first.test)] == [20_000, 2_000, 2_000]
    assert first.shape == (2,) and first.levels is None and first.train.x.dtype == torch.float32
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert not torch.equal(first.valid.x, first.test.x)
    small = data.load(name, valid=100)
    assert torch.equal(small.train.x, first.train.x) and torch.equal(small.test.x, first.test.x)
    assert torch.equal(small.valid.x, first.valid.x[:100])


# ---------------------------------------------------------------- MNIST


@pytest.mark.parametrize("place", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files(tmp_path: Path, place: str, zipped: bool) -> None:
    content = write_idx(tmp_path / place, zipped)
    mnist = data.load("mnist", folder=tmp_path, valid=6)
    assert mnist.shape == (1, 28, 28) and mnist.levels == 256 and len(mnist.valid) == 6
    assert torch.equal(mnist.test.x[:, 0], torch.from_numpy(content["t10k-images-idx3-ubyte"]))
    assert mnist.test.labels is not None
    assert mnist.test.labels.tolist() == content["t10k-labels-idx1-ubyte"].tolist()
    train = content["train-images-idx3-ubyte"]
    assert held_from_train(mnist, train, content["train-labels-idx1-ubyte"])
    same = data.load("mnist", folder=tmp_path, valid=6, seed=9)
    assert same.fingerprint == mnist.fingerprint  # published sets are split by a seed of their own
    assert len(data.load("mnist", folder=tmp_path).valid) == 4  # a tenth, of the real one 5,000


def test_idx_files_of_the_other_set(tmp_path: Path) -> None:
    content = write_idx(tmp_path)
    known = np.array([5, 0, 4, 1, 9, 2, 1, 3, 1, 4], np.uint8)  # how MNIST's labels begin
    content["train-labels-idx1-ubyte"][:10] = known
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(data_files.idx(content["train-labels-idx1-ubyte"]))
    data.load("mnist", folder=tmp_path)
    with pytest.raises(ValueError, match="has the files of mnist, whose names are the same"):
        data.load("fashion_mnist", folder=tmp_path)


def test_damaged_idx_files(tmp_path: Path) -> None:
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    wanted = rf"{path} has {len(whole) - 100} bytes.*expected {len(whole)} .*fetch it again"
    with pytest.raises(ValueError, match=wanted):
        data.load("mnist", folder=tmp_path)
    path.write_bytes(b"<html>" + whole)
    with pytest.raises(ValueError, match="begins with 3c 68 74 6d; expected 00 00 08 03"):
        data.load("mnist", folder=tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="begins with nothing"):
        data.load("mnist", folder=tmp_path)
    path.unlink()
    zipped = gzip.compress(whole)
    for content in (zipped[:-500], b"not zipped", zipped[:2000] + b"\0" * 99 + zipped[2099:]):
        (tmp_path / f"{path.name}.gz").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path}\.gz can't be read .*delete it"):
            data.load("mnist", folder=tmp_path)
    (tmp_path / f"{path.name}.gz").unlink()
    with pytest.raises(ValueError, match=r"lacks train-images-idx3-ubyte.*download=True"):
        data.load("mnist", folder=tmp_path)


@pytest.mark.parametrize("keras", [False, True])
def test_packed_mnist(tmp_path: Path, keras: bool) -> None:
    names = ("x_train", "y_train", "x_test", "y_test")
    names = names if keras else ("train", "train_labels", "test", "test_labels")
    values = (pixels(30, 28, 28), labels(30), pixels(8, 28, 28, seed=2), labels(8, seed=2))
    np.savez(tmp_path / "mnist.npz", **dict(zip(names, values, strict=True)))  # type: ignore[arg-type]
    mnist = data.load("mnist", folder=tmp_path)
    assert torch.equal(mnist.test.x[:, 0], torch.from_numpy(values[2]))
    assert held_from_train(mnist, values[0], values[1]) and len(mnist.valid) == 3


def test_the_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "fashion_mnist")
    monkeypatch.setenv("ORNSTEIN_DATA", str(tmp_path))
    assert data.load("fashion-mnist").name == "fashion_mnist"


def published_md5(x: Tensor, y: Tensor) -> str:
    """Of the CIFAR-10 batch with these records."""
    table = torch.cat([y.to(torch.uint8).unsqueeze(1), x.flatten(1)], 1)
    return hashlib.md5(table.numpy().tobytes()).hexdigest()


@pytest.mark.skipif(not (REAL / "mnist.npz").exists(), reason="needs mnist.npz in ORNSTEIN_DATA")
def test_the_real_mnist() -> None:
    mnist = data.load("mnist", folder=REAL)
    assert [len(s) for s in (mnist.train, mnist.valid, mnist.test)] == [55_000, 5_000, 10_000]
    file = data_files.idx(mnist.test.x[:, 0].numpy())
    assert hashlib.md5(file).hexdigest() == "2646ac647ad5339dbf082846283269ea"  # t10k, unzipped
    assert not set(rows(mnist.train.x)) & set(rows(mnist.valid.x))


@pytest.mark.skipif(
    not (REAL / "cifar10-test.npz").exists(), reason="needs CIFAR-10 in ORNSTEIN_DATA"
)
def test_the_real_cifar10() -> None:
    cifar = data.load("cifar10", folder=REAL)
    assert [len(s) for s in (cifar.train, cifar.valid, cifar.test)] == [45_000, 5_000, 10_000]
    assert cifar.test.labels is not None
    md5 = published_md5(cifar.test.x, cifar.test.labels)
    assert md5 == "803d5f7f4d78ea53de84dbe85f74fb6d"  # of test_batch.bin


# ---------------------------------------------------------------- CIFAR-10, ImageNet32


@pytest.mark.parametrize("form", ["binary", "archive", "shards"])
def test_cifar10_in_all_forms(tmp_path: Path, form: str) -> None:
    x, y, content = data_files.cifar()
    if form == "binary":
        (tmp_path / "cifar-10-batches-bin").mkdir()
        for name, batch in content.items():
            (tmp_path / "cifar-10-batches-bin" / name).write_bytes(batch)
    elif form == "archive":
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(data_files.archive(content))
    else:
        parts = [*(f"train-{i}" for i in range(5)), "test"]
        for i, part in enumerate(parts):
            some = slice(4 * i, 4 * i + 4)
            images = x[some].transpose(0, 2, 3, 1)
            np.savez(tmp_path / f"cifar10-{part}.npz", images=images, labels=y[some])
    cifar = data.load("cifar10", folder=tmp_path)
    assert cifar.shape == (3, 32, 32) and cifar.levels == 256
    assert torch.equal(cifar.test.x, torch.from_numpy(x[20:]))
    assert cifar.test.labels is not None and cifar.test.labels.tolist() == y[20:].tolist()
    assert held_from_train(cifar, x[:20], y[:20])
    assert cifar.train.x.is_contiguous()
    if form == "archive":
        assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_damaged_cifar10(tmp_path: Path) -> None:
    content = data_files.cifar()[2]
    for name, batch in content.items():
        (tmp_path / name).write_bytes(batch)
    path = tmp_path / BATCHES[2]
    for broken in (content[BATCHES[2]][:-1], content[BATCHES[2]][:-3073], b""):
        path.write_bytes(broken)
        wanted = rf"{path} has {len(broken)} bytes; expected a multiple of 3073, .* and 12292 "
        with pytest.raises(ValueError, match=wanted):
            data.load("cifar10", folder=tmp_path)
    path.write_bytes(b"\x0b" + content[BATCHES[2]][1:])
    with pytest.raises(ValueError, match="has the label 11; expected 0 … 9"):
        data.load("cifar10", folder=tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"lacks data_batch_3\.bin"):
        data.load("cifar10", folder=tmp_path)
    zipped = data_files.archive(content)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(zipped[: len(zipped) // 2])
    with pytest.raises(ValueError, match=rf"{archive} can't be read .*delete it"):
        data.load("cifar10", folder=tmp_path)
    del content[BATCHES[5]]
    archive.write_bytes(data_files.archive(content))
    with pytest.raises(ValueError, match=r"has no test_batch\.bin; expected the binary version"):
        data.load("cifar10", folder=tmp_path)


def test_pickled_cifar10_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"pickled and never opened.*cifar-10-binary\.tar\.gz"):
        data.load("cifar10", folder=tmp_path)


def write_imagenet(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ten batches of 3 and a validation set of 3, with labels from 1."""
    x, y = pixels(33, 3, 32, 32), np.arange(1, 1001, 31)[:33]
    names = [*(f"train_data_batch_{i}" for i in range(1, 11)), "val_data"]
    for i, name in enumerate(names):
        some = slice(3 * i, 3 * i + 3)
        extra = {"mean": np.zeros(3072)} if i < 10 else {}
        np.savez(folder / f"{name}.npz", data=x[some].reshape(3, -1), labels=y[some], **extra)
    return x, y


def test_imagenet32(tmp_path: Path) -> None:
    x, y = write_imagenet(tmp_path)
    found = data.load("imagenet32", folder=tmp_path, valid=4)
    assert torch.equal(found.test.x, torch.from_numpy(x[30:]))
    assert found.test.labels is not None and found.test.labels.tolist() == (y[30:] - 1).tolist()
    assert held_from_train(found, x[:30], y[:30] - 1)
    assert "published validation set" in found.note
    path = tmp_path / "train_data_batch_10.npz"
    np.savez(path, data=x[:3].reshape(3, -1), labels=np.array([0, 1, 2]))
    with pytest.raises(ValueError, match=rf"{path} has labels 0 … 2; expected 1 … 1000"):
        data.load("imagenet32", folder=tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"{path} can't be read .*delete it"):
        data.load("imagenet32", folder=tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"lacks train_data_batch_10\.npz\..*image-net\.org"):
        data.load("imagenet32", folder=tmp_path)
    with pytest.raises(ValueError, match=r"account.*image-net"):
        data.load("imagenet32", folder=tmp_path, download=True)


# ---------------------------------------------------------------- arrays of one's own


LAYOUTS = {
    "grey": ((40, 9, 7), None, (1, 9, 7)),
    "last": ((40, 9, 7, 3), None, (3, 9, 7)),
    "first": ((40, 3, 9, 7), None, (3, 9, 7)),
    "last, grey": ((40, 9, 7, 1), None, (1, 9, 7)),
    "named last": ((40, 3, 4, 3), "NHWC", (3, 3, 4)),
    "named first": ((40, 3, 4, 3), "NCHW", (3, 4, 3)),
    "many channels": ((40, 9, 7, 12), "NHWC", (12, 9, 7)),
    "vectors": ((40, 12), None, (12,)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["uint8", "float32"])
@pytest.mark.parametrize("ending", ["npz", "npy"])
def test_layouts(tmp_path: Path, name: str, kind: str, ending: str) -> None:
    shape, layout, wanted = LAYOUTS[name]
    x = pixels(*shape) if kind == "uint8" else np.random.default_rng(0).normal(size=shape)
    x = x.astype(kind)
    path = tmp_path / f"mine.{ending}"
    if ending == "npy" and layout is not None:
        np.save(path, x)
        with pytest.raises(ValueError, match=r"may be the second axis or the last.*layout="):
            data.load(path)
        return
    if ending == "npy":
        np.save(path, x)
    else:
        np.savez(path, x=x, **({} if layout is None else {"layout": np.array(layout)}))
    found = data.load(path)
    assert found.name == "mine" and found.shape == wanted
    assert found.levels == (256 if kind == "uint8" else None)
    assert [len(s) for s in (found.train, found.valid, found.test)] == [32, 4, 4]
    planes = x[:, None] if x.ndim == 3 else x
    if wanted != planes.shape[1:]:
        planes = np.moveaxis(planes, 3, 1)
    assert together(found) == sorted(row.tobytes() for row in planes)
    kept = set(rows(found.train.x))
    assert rows(found.train.x) == [r for r in (row.tobytes() for row in planes) if r in kept]


def test_one_array_is_split_by_the_seed(tmp_path: Path) -> None:
    x, y = pixels(200, 6, 6), labels(200)
    np.savez(tmp_path / "a.npz", images=x, labels=y)
    first, again, other = (data.load(tmp_path / "a.npz", seed=s) for s in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert [len(s) for s in (first.train, first.valid, first.test)] == [160, 20, 20]
    assert "no test split" in first.note
    number = {row.tobytes(): i for i, row in enumerate(x)}
    for split in (first.train, first.valid, first.test):
        assert split.labels is not None
        assert split.labels.tolist() == [y[number[row]] for row in rows(split.x)]
    more = data.load(tmp_path / "a.npz", valid=50)
    assert rows(more.test.x) == rows(first.test.x) and len(more.train) == 130
    assert rows(more.valid.x)[:20] == rows(first.valid.x)
    none = data.load(tmp_path / "a.npz", valid=0)
    assert len(none.valid) == 0 and none.describe()["sizes"] == {
        "train": 180,
        "valid": 0,
        "test": 20,
    }


def test_large_sets_are_split_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pixels(500, 6, 6), labels(500)
    np.savez(tmp_path / "a.npz", train=x, train_labels=y, test=x[:5])
    whole = data.load(tmp_path / "a.npz")
    monkeypatch.setattr(sets, "_CHUNK", 7 * 36)  # seven examples at a time
    found = data.load(tmp_path / "a.npz")
    assert held_from_train(found, x, y) and len(found.valid) == 50
    assert found.fingerprint == whole.fingerprint
    real = np.random.default_rng(0).normal(size=(500, 2))
    real[321, 1] = np.inf
    np.save(tmp_path / "b.npy", real)
    with pytest.raises(ValueError, match="example 321 has a value"):
        data.load(tmp_path / "b.npy")
    grey = data.load(tmp_path / "a.npz", size=6, grey=True)
    assert grey.fingerprint == whole.fingerprint


def test_splits_that_the_file_gives(tmp_path: Path) -> None:
    parts = {
        "train": pixels(9, 5, 5),
        "val": pixels(4, 5, 5, seed=1),
        "test": pixels(3, 5, 5, seed=2),
    }
    np.savez(tmp_path / "a.npz", **parts)  # type: ignore[arg-type]
    found = data.load(tmp_path / "a.npz")
    for split, x in zip((found.train, found.valid, found.test), parts.values(), strict=True):
        assert torch.equal(split.x[:, 0], torch.from_numpy(x)) and split.labels is None
    assert found.note == ""
    with pytest.raises(ValueError, match=r"valid=2 was given, but .* has a validation split of 4"):
        data.load(tmp_path / "a.npz", valid=2)
    np.savez(tmp_path / "b.npz", train=parts["train"], test=pixels(3, 5, 6))
    with pytest.raises(ValueError, match=r"shape \(1, 5, 6\) after others of shape \(1, 5, 5\)"):
        data.load(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", test=parts["test"])
    with pytest.raises(ValueError, match="has test but no training split"):
        data.load(tmp_path / "c.npz")


@pytest.mark.parametrize(
    ("kind", "high", "levels", "stored"),
    [
        ("int64", 16, 17, torch.uint8),
        ("uint16", 255, 256, torch.uint8),
        (">i4", 999, 1000, torch.int32),
        ("bool", 1, 2, torch.uint8),
    ],
)
def test_levels_of_other_integers(
    tmp_path: Path, kind: str, high: int, levels: int, stored: torch.dtype
) -> None:
    x = np.random.default_rng(0).integers(0, high, (50, 4, 5)).astype(kind)
    x[7, 1, 1] = high
    np.savez(tmp_path / "a.npz", data=x)
    found = data.load(tmp_path / "a.npz")
    assert found.levels == levels and found.train.x.dtype == stored
    assert f"{levels} levels, since the largest value is {high}" in found.note
    numbers = torch.cat([found.train.x, found.valid.x, found.test.x]).to(torch.int64)
    assert numbers.flatten().bincount().tolist() == np.bincount(x.astype(int).ravel()).tolist()


def test_levels_that_the_file_says(tmp_path: Path) -> None:
    x = pixels(20, 4, 5) // 16
    np.savez(tmp_path / "a.npz", x=x, levels=16)
    assert data.load(tmp_path / "a.npz").levels == 16
    np.savez(tmp_path / "b.npz", x=x, levels=15)
    with pytest.raises(ValueError, match="levels=15 and values up to 15; expected"):
        data.load(tmp_path / "b.npz")


def test_floats_become_float32(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 2))
    for kind in ("float64", ">f8", "float16"):
        np.save(tmp_path / "a.npy", x.astype(kind))
        found = data.load(tmp_path / "a.npy")
        wanted = x.astype(kind).astype(np.float32)
        assert together(found) == sorted(row.tobytes() for row in wanted)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (pixels(20, 4, 4, 4), r"shape \(20, 4, 4, 4\), whose channels may be .*layout="),
        (pixels(20, 9, 9, 9), r"shape \(20, 9, 9, 9\), whose channels may be .*layout="),
        (pixels(20), r"shape \(20,\); expected \(N, d\)"),
        (pixels(20, 2, 2, 2, 2), r"shape \(20, 2, 2, 2, 2\); expected"),
        (pixels(20, 3, 3).astype(int) - 200, "whole numbers down to -"),
        (pixels(20, 3, 3).astype(int) * 1000, "whole numbers up to .*; expected less than 65536"),
        (pixels(20, 3, 3) / 255, "floats that are all k/255 for whole k.*uint8"),
        ((pixels(20, 9) / 127.5 - 1).astype("float32"), "floats that are all k/127.5 − 1"),
        (pixels(20, 9).astype("float32"), "floats that are all k for whole k"),
        (np.full((20, 2), 1j), "arrays of type complex128; expected whole numbers"),
        (np.array([[0.1, 0.2]] * 6 + [[np.nan, 0.3]]), "example 6 has a value that is NaN"),
        (np.array([[0.1, 0.2]] * 6 + [[1e39, 0.3]]), "example 6 .* too large for float32"),
        (pixels(1, 3, 3), "has 1 examples for training, of which .* are to be held out"),
    ],
)
def test_arrays_that_are_refused(tmp_path: Path, x: np.ndarray, message: str) -> None:
    for path in (tmp_path / "a.npz", tmp_path / "a.npy"):
        if path.suffix == ".npz":
            np.savez(path, x=x)
        else:
            np.save(path, x)
        with pytest.raises(ValueError, match=message):
            data.load(path)


def test_files_that_are_not_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=pixels(50, 9, 9))
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes((whole[middle] ^ 1,)) + whole[middle + 1 :]
    for content in (whole[:-200], flipped, b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path} can't be read .*delete it"):
            data.load(path)
    np.savez(path, x=np.array([{"a": 1}], dtype=object))  # would be unpickled
    with pytest.raises(ValueError, match=rf"{path} can't be read .*unpickled"):
        data.load(path)
    np.savez(path, pictures=pixels(9, 3, 3))
    with pytest.raises(ValueError, match="has the arrays pictures; expected train, valid"):
        data.load(path)
    np.savez(path, x=pixels(9, 3, 3), labels=labels(8))
    with pytest.raises(ValueError, match="has 9 examples and 8 labels"):
        data.load(path)
    np.savez(path, x=pixels(9, 3, 3), labels=np.ones((9, 10)))
    assert data.load(path).train.labels is None
    assert "labels of type float64, shape (9, 10) are not used" in data.load(path).note
    np.save(tmp_path / "b.npy", pixels(50, 9, 9))
    path = tmp_path / "b.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{path} can't be read .*delete it"):
        data.load(path)
    with zipfile.ZipFile(tmp_path / "c.npy", "w") as file:
        file.writestr("x.npy", b"")
    with pytest.raises(ValueError, match=r"several arrays; expected one. Name it \.npz"):
        data.load(tmp_path / "c.npy")


def test_a_folder_of_shards(tmp_path: Path) -> None:
    x, y = pixels(120, 6, 6, 3), labels(120)
    for i in range(12):  # the third comes before the eleventh
        some = slice(10 * i, 10 * i + 10)
        np.savez(tmp_path / f"faces-train-{i}.npz", images=x[some], labels=y[some])
    np.savez(tmp_path / "faces-test.npz", images=x[:7], labels=y[:7])
    found = data.load(tmp_path)
    planes = x.transpose(0, 3, 1, 2)
    assert torch.equal(found.test.x, torch.from_numpy(planes[:7].copy()))
    assert held_from_train(found, planes, y) and len(found.valid) == 12
    np.savez(tmp_path / "other.npz", images=x[:3])
    with pytest.raises(ValueError, match=r"names its split but other\.npz does not"):
        data.load(tmp_path)
    (tmp_path / "other.npz").unlink()
    np.savez(tmp_path / "faces-train-12.npz", images=x[:3, :5])
    with pytest.raises(ValueError, match=r"faces-train-12\.npz has examples of shape \(3, 5, 6\)"):
        data.load(tmp_path)
    np.savez(tmp_path / "faces-train-12.npz", train=x[:3], test=x[:2])
    with pytest.raises(ValueError, match=r"arrays for train and test; expected one array"):
        data.load(tmp_path)


def test_arrays_on_disk_stay_there(tmp_path: Path) -> None:
    x = pixels(64, 5, 5, 3)
    for split in ("train", "valid", "test"):
        np.save(tmp_path / f"{split}.npy", x)
    found = data.load(tmp_path)
    before = rows(found.train.x)
    with (tmp_path / "train.npy").open("r+b") as file:  # seen, hence it is no copy
        file.seek(-75, os.SEEK_END)
        file.write(bytes(75))
    assert not found.train.x[-1].any() and rows(found.train.x)[:-1] == before[:-1]
    found.train.x[0] = 0  # but nothing is ever written to the user's file
    assert np.array_equal(np.load(tmp_path / "train.npy")[0], x[0])


# ---------------------------------------------------------------- folders of images


def test_images_in_a_folder(tmp_path: Path) -> None:
    x = pixels(20, 6, 9, 3)
    for i in range(20):
        save(tmp_path / f"{i:02}.{('png', 'bmp', 'PNG')[i % 3]}", x[i])
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden.png").write_text("nor this")
    found = data.load(str(tmp_path))
    assert found.shape == (3, 6, 9) and found.levels == 256 and found.train.labels is None
    planes = x.transpose(0, 3, 1, 2)
    assert together(found) == sorted(row.tobytes() for row in planes)
    train = [row.tobytes() for row in planes if row.tobytes() in set(rows(found.train.x))]
    assert rows(found.train.x) == train  # sorted by path


def test_splits_and_classes_from_folders(tmp_path: Path) -> None:
    x, wanted = pixels(18, 5, 5), {}
    for i in range(18):
        split, name = ("train", "val", "test")[i // 6], ("dog", "cat", "eel")[i % 3]
        save(tmp_path / split / name / f"{i}.png", x[i])
        wanted[x[i].tobytes()] = (split, ("cat", "dog", "eel").index(name))
    found = data.load(tmp_path)
    assert found.shape == (1, 5, 5)  # grey files stay grey
    assert found.note == "3 classes: cat, dog, eel"
    for name, split in (("train", found.train), ("val", found.valid), ("test", found.test)):
        assert split.labels is not None and len(split) == 6
        for row, label in zip(rows(split.x), split.labels.tolist(), strict=True):
            assert wanted.pop(row) == (name, label)
    assert not wanted
    save(tmp_path / "test" / "fox" / "a.png", x[0])
    with pytest.raises(ValueError, match="test has fox, which train has not"):
        data.load(tmp_path)
    save(tmp_path / "train" / "a.png", x[0])
    with pytest.raises(ValueError, match=r"a\.png stands beside folders of images"):
        data.load(tmp_path)


def test_alpha_palettes_grey_and_orientation(tmp_path: Path) -> None:
    x = pixels(8, 6, 3)
    save(tmp_path / "a.png", np.concatenate([x, pixels(8, 6, 1, seed=1)], 2))  # with alpha
    save(tmp_path / "b.png", x)
    save(tmp_path / "c.png", np.full((8, 6), 77, np.uint8))  # grey among colours
    Image.fromarray(x // 200 * 255).quantize(8).save(tmp_path / "d.png")  # a palette
    turned = Image.fromarray(np.rot90(x).copy())  # 6 says: turn it right to see it
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "e.png", exif=exif)
    found = data.load(tmp_path, valid=0)
    every = set(rows(torch.cat([found.train.x, found.test.x])))
    plane = np.ascontiguousarray(x.transpose(2, 0, 1))
    palette = np.ascontiguousarray((x // 200 * 255).transpose(2, 0, 1))
    flat = np.full((3, 8, 6), 77, np.uint8)
    assert every == {plane.tobytes(), palette.tobytes(), flat.tobytes()}
    grey = data.load(tmp_path, valid=0, grey=True)
    wanted = np.asarray(Image.fromarray(x).convert("L"))
    assert grey.shape == (1, 8, 6) and wanted.tobytes() in rows(
        torch.cat([grey.train.x, grey.test.x])
    )


def test_sizes(tmp_path: Path) -> None:
    for i in range(4):
        save(tmp_path / f"{i}.png", pixels(8, 8, 3, seed=i))
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 200  # the middle third
    odd = save(tmp_path / "5.png", wide)
    wanted = rf"{odd} is 24 × 8 pixels, but .*0\.png is 8 × 8; expected one size.*size=8"
    with pytest.raises(ValueError, match=wanted):
        data.load(tmp_path)
    found = data.load(tmp_path, size=8, valid=0)
    every = rows(torch.cat([found.train.x, found.test.x]))
    assert bytes([200]) * 3 * 64 in every  # cropped, nothing of the sides
    assert pixels(8, 8, 3, seed=2).transpose(2, 0, 1).tobytes() in every  # untouched
    small = data.load(tmp_path, size=2, valid=0)
    assert small.shape == (3, 2, 2)


def test_resizing_does_not_alias(tmp_path: Path) -> None:
    # a board of single black and white pixels is grey from afar, not black or white
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    for i in range(3):
        save(tmp_path / "pictures" / f"{i}.png", board)
    np.savez(tmp_path / "a.npz", x=np.stack([board] * 3))
    for path in (tmp_path / "pictures", tmp_path / "a.npz"):
        x = data.load(path, size=8).train.x
        assert (x.to(torch.int32) - 127).abs().max() <= 8


def test_arrays_are_refitted_as_files_are(tmp_path: Path) -> None:
    x = pixels(10, 9, 14, 3)
    np.savez(tmp_path / "a.npz", x=x)
    for i in range(10):
        save(tmp_path / "pictures" / f"{i}.png", x[i])
    for options in ({"grey": True}, {"size": 6}):
        one = data.load(tmp_path / "a.npz", **options)  # type: ignore[arg-type]
        two = data.load(tmp_path / "pictures", **options)  # type: ignore[arg-type]
        assert one.fingerprint == two.fingerprint and one.shape == two.shape
    many = pixels(3, 256, 256, 3)  # colours enough to see the last digit of a weight
    np.savez(tmp_path / "c.npz", train=many[:1], valid=many[1:2], test=many[2:])
    wanted = np.asarray(Image.fromarray(many[0]).convert("L"))
    assert np.array_equal(data.load(tmp_path / "c.npz", grey=True).train.x[0, 0], wanted)
    np.savez(tmp_path / "b.npz", x=x[..., :2])
    with pytest.raises(ValueError, match="grey=True for images of 2 channels"):
        data.load(tmp_path / "b.npz", grey=True)
    with pytest.raises(ValueError, match="size=3, grey=False for digits; expected neither"):
        data.load("digits", size=3)


def test_damaged_images(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / f"{i}.jpg", pixels(40, 40, 3))
    path = tmp_path / "1.jpg"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"GIF89a nonsense", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path} can't be read"):
            data.load(tmp_path)
    path.unlink()
    Image.fromarray(pixels(40, 40).astype(np.uint16) * 200).save(tmp_path / "3.png")
    with pytest.raises(ValueError, match=r"3\.png has pixels of mode I;16.*8 bits"):
        data.load(tmp_path)


# ---------------------------------------------------------------- fetching


@pytest.fixture
def nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and no proxy on the way to this machine."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetching, "PAUSE", 0.0)


def origin_of(base: str, content: dict[str, bytes]) -> fetching.Origin:
    """Where these files are, with their MD5."""
    return fetching.Origin(base, {n: hashlib.md5(c).hexdigest() for n, c in content.items()})


@pytest.mark.usefixtures("nearby")
def test_fetching_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "server", zipped=True)
    content = {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    seen: list[data.Progress] = []
    with data_files.serving(content) as server:
        monkeypatch.setitem(fetching.ORIGINS, "mnist", origin_of(server.base, content))
        with pytest.raises(ValueError, match=r"mnist is not in .*download=True"):
            data.load("mnist", folder=tmp_path / "here")
        server.busy["train-labels-idx1-ubyte.gz"] = 2  # two attempts fail, the third does not
        found = data.load("mnist", folder=tmp_path / "here", download=True, watch=seen.append)
        assert len(server.asked) == 6
        data.load("mnist", folder=tmp_path / "here", download=True)
        (tmp_path / "here" / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
        data.load("mnist", folder=tmp_path / "here", download=True)
        assert server.asked[6:] == ["t10k-labels-idx1-ubyte.gz"]  # what is there is not asked for
    assert found.fingerprint == data.load("mnist", folder=tmp_path / "server").fingerprint
    there = {path.name: path.read_bytes() for path in (tmp_path / "here" / "mnist").iterdir()}
    assert there == content
    last = {progress.file: progress for progress in seen}
    assert {n: (p.done, p.total) for n, p in last.items()} == {
        name: (len(c), len(c)) for name, c in content.items()
    }


@pytest.mark.usefixtures("nearby")
def test_fetching_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, batches = data_files.cifar()
    content = {"cifar-10-binary.tar.gz": data_files.archive(batches)}
    with data_files.serving(content) as server:
        monkeypatch.setitem(fetching.ORIGINS, "cifar10", origin_of(server.base, content))
        found = data.load("cifar10", folder=tmp_path, download=True)
    assert torch.equal(found.test.x, torch.from_numpy(x[20:]))


@pytest.mark.usefixtures("nearby")
def test_what_goes_wrong_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with data_files.serving({"a.bin": b"x" * 5000, "b.bin": b"y"}) as server:
        server.cut.add("a.bin")
        with pytest.raises(
            ValueError, match=r"ended after 2500 of 5000 bytes.*again later.*by hand"
        ):
            fetching.fetch(server.base + "a.bin", path)
        assert server.asked == ["a.bin"] * fetching.ATTEMPTS
        assert not list(tmp_path.iterdir())
        server.cut.clear()
        right = hashlib.md5(b"x" * 5000).hexdigest()
        with pytest.raises(ValueError, match=rf"has the MD5 {right} .*expected {'0' * 32}"):
            fetching.fetch(server.base + "a.bin", path, "0" * 32)
        assert not list(tmp_path.iterdir())
        with pytest.raises(ValueError, match=r"c\.bin could not be fetched .*404.*attempt 1 of 3"):
            fetching.fetch(server.base + "c.bin", path)

        def stop(progress: data.Progress) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fetching.fetch(server.base + "a.bin", path, right, stop)
        assert not list(tmp_path.iterdir())
        fetching.fetch(server.base + "a.bin", path, right)
        assert path.read_bytes() == b"x" * 5000
    with pytest.raises(ValueError, match=r"could not be fetched .*attempt 3 of 3"):
        fetching.fetch(server.base + "b.bin", path)  # nobody answers any more
    assert path.read_bytes() == b"x" * 5000


# ---------------------------------------------------------------- names


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORNSTEIN_DATA", raising=False)
    assert set(data.NAMES) >= {"digits", "moons", "mnist", "fashion_mnist", "cifar10", "imagenet32"}
    with pytest.raises(ValueError, match=r"no data set 'mnits'.*Perhaps you meant 'mnist'"):
        data.load("mnits")
    with pytest.raises(ValueError, match=r"there is no mine\.npz, seen from"):
        data.load("mine.npz")
    with pytest.raises(ValueError, match=r"cifar10 is not in data/cifar10, .*kriz/ into data/cif"):
        data.load("cifar10")
    with pytest.raises(ValueError, match=r"neither \.npz or \.npy files nor images"):
        data.load(tmp_path)
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"a\.csv is a file of an unknown kind"):
        data.load("a.csv")
    np.savez(tmp_path / "mine.npz", x=pixels(30, 2, 2))
    save(tmp_path / "a.png", pixels(2, 2))
    with pytest.raises(ValueError, match=r"has arrays \(mine\.npz\) and images \(a\.png\)"):
        data.load(tmp_path)
    for options, message in (
        ({"valid": -1}, "valid=-1; expected a number of examples"),
        ({"valid": 27}, "has 30 examples for training, of which .* are to be held out"),
        ({"seed": 0.5}, r"seed=0\.5; expected a whole number"),
        ({"size": 0}, "size=0; expected the side"),
    ):
        with pytest.raises(ValueError, match=message):
            data.load("mine.npz", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="valid=1497 leaves nothing of the 1497 digits"):
        data.load("digits", valid=1497)


def test_fingerprints_know_the_data_again(tmp_path: Path) -> None:
    x = pixels(30, 4, 4)
    np.savez(tmp_path / "a.npz", train=x[:20], valid=x[20:25], test=x[25:])
    np.savez_compressed(tmp_path / "b.npz", train=x[:20], valid=x[20:25], test=x[25:])
    first = data.load(tmp_path / "a.npz")
    assert first.fingerprint == data.load(tmp_path / "b.npz").fingerprint
    assert json.loads(json.dumps(first.describe())) == first.describe()
    found = {first.fingerprint}
    for place in (0, 22, 29):  # one pixel, in any split
        other = x.copy()
        other[place, 1, 2] ^= 1
        np.savez(tmp_path / "c.npz", train=other[:20], valid=other[20:25], test=other[25:])
        found.add(data.load(tmp_path / "c.npz").fingerprint)
    np.savez(tmp_path / "c.npz", train=x[:19], valid=x[19:25], test=x[25:])
    found.add(data.load(tmp_path / "c.npz").fingerprint)  # the same bytes, cut elsewhere
    assert len(found) == 5


def test_importing_is_quick() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import ornstein.data; "
        "print([n for n in ('PIL', 'urllib.request', 'http.client', 'torchvision') "
        "if n in set(sys.modules) - before])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
