"""Published sets fetched from where they are published, checked, and written whole or not at all.

A file is read into memory, compared with its length and MD5, and only then written under its name.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ornstein import files

ATTEMPTS, PAUSE, TIMEOUT = 3, 1.0, 30.0  # seconds
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Progress:
    """How much of a file has come; `total` is None where the server does not say."""

    file: str
    done: int
    total: int | None


Watcher = Callable[[Progress], None]


@dataclass(frozen=True)
class Origin:
    """Where a set is published: an address, and its files with their MD5."""

    base: str
    md5: dict[str, str]


ORIGINS = {
    "mnist": Origin(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion_mnist": Origin(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": Origin(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ),
}


def fetch_set(name: str, folder: Path, watch: Watcher | None = None) -> None:
    """The files of a published set that the folder has not got yet."""
    if name not in ORIGINS:
        raise ValueError(
            f"{name} can't be fetched without an account; expected its files in {folder}. Sign up "
            "at https://image-net.org, where they are under Download."
        )
    origin = ORIGINS[name]
    for file, md5 in origin.md5.items():
        if not (folder / file).exists():
            fetch(origin.base + file, folder / file, md5, watch)


def fetch(url: str, path: Path, md5: str | None = None, watch: Watcher | None = None) -> None:
    """One file; several attempts are made before giving up."""
    from http.client import HTTPException

    content = b""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            content = _received(url, path.name, watch)
            break
        except (OSError, HTTPException) as error:  # of urllib, sockets and TLS
            refused = 400 <= getattr(error, "code", 0) < 500  # asking again would not help
            if refused or attempt == ATTEMPTS:
                raise ValueError(
                    f"{url} could not be fetched ({error}; attempt {attempt} of {ATTEMPTS}); "
                    "expected a working connection. Run the same again later, or put the file "
                    f"into {path.parent} by hand."
                ) from error
            time.sleep(PAUSE * attempt)
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 is not None and found != md5:
        raise ValueError(
            f"{url} has the MD5 {found} ({len(content)} bytes); expected {md5}. Nothing was kept. "
            f"Run the same again, or put the right file into {path.parent} by hand."
        )
    files.write_bytes(path, content)


def _received(url: str, name: str, watch: Watcher | None) -> bytes:
    """The whole content of an address."""
    from urllib.request import Request, urlopen

    request = Request(url, headers={"User-Agent": "ornstein"})
    with urlopen(request, timeout=TIMEOUT) as answer:
        length = answer.headers.get("Content-Length")
        total = int(length) if length is not None else None
        content = bytearray()
        while block := answer.read(_BLOCK):
            content += block
            if watch is not None:
                watch(Progress(name, len(content), total))
    if total is not None and len(content) != total:
        raise OSError(f"the connection ended after {len(content)} of {total} bytes")
    return bytes(content)
