"""Small files as the published sets have them, a folder of images, and a server to fetch from."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(count: int, classes: int = 10, seed: int = 0) -> np.ndarray:
    """Random labels from 0."""
    return np.random.default_rng(seed + 1).integers(0, classes, count, dtype=np.uint8)


def idx(x: np.ndarray) -> bytes:
    """An idx file of bytes."""
    return bytes((0, 0, 8, x.ndim)) + struct.pack(f">{x.ndim}I", *x.shape) + x.tobytes()


def write_idx(folder: Path, zipped: bool = False, side: int = 28) -> dict[str, np.ndarray]:
    """The four files of MNIST with 40 and 10 images, and what is in them."""
    content = {
        "train-images-idx3-ubyte": pixels(40, side, side),
        "train-labels-idx1-ubyte": labels(40),
        "t10k-images-idx3-ubyte": pixels(10, side, side, seed=7),
        "t10k-labels-idx1-ubyte": labels(10, seed=7),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, x in content.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(x)))
        else:
            (folder / name).write_bytes(idx(x))
    return content


def cifar(count: int = 4) -> tuple[np.ndarray, np.ndarray, dict[str, bytes]]:
    """Images (6·count, 3, 32, 32), labels, and the six batches that hold them."""
    x, y = pixels(6 * count, 3, 32, 32), labels(6 * count)
    rows = np.concatenate([y[:, None], x.reshape(len(x), -1)], 1)
    parts = [rows[i * count : (i + 1) * count].tobytes() for i in range(6)]
    return x, y, dict(zip(BATCHES, parts, strict=True))


def archive(content: dict[str, bytes]) -> bytes:
    """A .tar.gz as CIFAR-10 comes in, with files that nobody asked for."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in {"batches.meta.txt": b"airplane\n", **content}.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def save(path: Path, x: np.ndarray, **options: int) -> Path:
    """An image file of an array (H, W) or (H, W, C)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(x).save(path, **options)
    return path


class _Handler(BaseHTTPRequestHandler):
    """Serves a dict; `cut` names lose their second half, `busy` ones fail that often first."""

    def __init__(self, server: Server, *args: object) -> None:
        self.content = server
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.content.asked.append(name)
        if name not in self.content.files:
            self.send_error(404)
            return
        if self.content.busy.get(name, 0):
            self.content.busy[name] -= 1
            self.send_error(503)
            return
        data = self.content.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if name in self.content.cut else data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Server:
    """What is served, what was asked for, and what goes wrong."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, list[str]()
        self.cut, self.busy = set[str](), dict[str, int]()
        self.base = ""


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    """A server on this machine, at `base`."""
    content = Server(files)
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, content))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    content.base = f"http://127.0.0.1:{http.server_address[1]}/"
    try:
        yield content
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
