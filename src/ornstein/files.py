"""Files that are whole or not there: each is written under another name, synced, then renamed.

A name that a reader may look for never belongs to a half-written file, whatever happens: an
exception, a full disk, a killed process. `whole_folder` does the same for a folder of files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
from torch import Tensor


@contextlib.contextmanager
def locked(path: Path, refusal: str) -> Iterator[int | None]:
    """A lock that goes away with its processes: the handle, which children may inherit.

    refusal: what a ValueError says if somebody has it. Windows has other locks; it goes without.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield None
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(refusal) from error
        yield handle
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """A text file that ends with a newline, unless it is empty."""
    whole = text.rstrip("\n") + "\n" if text else ""
    _replace(path, lambda part: part.write_text(whole, encoding="utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """A file of these bytes."""
    _replace(path, lambda part: part.write_bytes(content))


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """An .npz file of these arrays."""

    def write(part: Path) -> None:
        with part.open("wb") as file:
            np.savez(file, **arrays)

    _replace(path, write)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of these tensors."""
    content = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}

    def write(part: Path) -> None:
        try:
            safetensors.torch.save_file(content, part)
        except safetensors.SafetensorError as error:  # it does not tell a full disk apart
            raise OSError(f"{path} can't be written ({error})") from error

    _replace(path, write)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU."""
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} can't be read ({error}); expected a whole safetensors file."
        ) from error


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that gets its name when it is complete; one of that name is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        for file in part.iterdir():
            _sync(file)
        _sync(part)
        if path.exists():  # a folder can't be renamed onto another one
            shutil.rmtree(path)
        os.replace(part, path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write(part)
        _sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    """Make sure that it is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
