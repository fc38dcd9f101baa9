"""Folders of image files as splits, and images made smaller or grey.

    folder/*.png                      one set, split by the seed
    folder/cat/*.png, folder/dog/…    the same with labels: the number of the sorted class name
    folder/train/…, valid/…, test/…   given splits, each of either form

Files are read in the order of their paths. Pillow reads them, and is imported only then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ornstein.data.arrays import reading
from ornstein.data.sets import Found, Split, chunk

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm"}
SPLITS = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}
_BLOCK = 64  # files that a thread takes at a time
_GREY = ("1", "L", "LA")
_COLOUR = ("RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "LAB", "HSV")
_ORIENTATION = 0x0112  # the EXIF field; 5 … 8 are lying on their side
_LUMA = (19595, 38470, 7471)  # of 65536: 0.299, 0.587 and 0.114, as Pillow rounds them


@dataclass(frozen=True)
class Header:
    """What a file says about its image before the pixels are decoded."""

    width: int
    height: int
    grey: bool


def is_image(name: str) -> bool:
    """By its name; hidden files are left alone."""
    return os.path.splitext(name)[1].lower() in ENDINGS and not name.startswith(".")


def images_in(folder: Path) -> list[Path]:
    """All image files of a folder and the folders in it, sorted."""
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if is_image(name)]
    return sorted(found)


def read_folder(folder: Path, size: int | None = None, grey: bool = False) -> Found:
    """The image files of a folder."""
    groups, notes = _groups(folder)
    everything = [path for paths in groups.values() for path in paths]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        blocks = pool.map(partial(_headers, everything), _starts(everything))
        headers = [header for block in blocks for header in block]
        if size is None:
            _check_sizes(everything, headers)
        mode = "L" if grey or all(header.grey for header in headers) else "RGB"
        height, width = (size, size) if size else (headers[0].height, headers[0].width)
        channels = 1 if mode == "L" else 3
        splits, classes = {}, _classes(folder, groups)
        for split, paths in groups.items():
            x = torch.empty((len(paths), channels, height, width), dtype=torch.uint8)
            for first, pixels in pool.map(partial(_block, paths, mode, size), _starts(paths)):
                x.numpy()[first : first + len(pixels)] = pixels
            splits[split] = Split(x, _labels(paths, _root(folder, split, groups), classes))
    if classes:
        more = " …" if len(classes) > 20 else ""
        notes.append(f"{len(classes)} classes: {', '.join(classes[:20])}{more}")
    return Found(splits, 256, str(folder), tuple(notes))


def refitted(x: Tensor, size: int | None, grey: bool) -> Tensor:
    """Images (N, C, H, W) uint8 as one channel, and cropped and resized to a square."""
    if grey and x.shape[1] == 3:
        weights = torch.tensor(_LUMA, dtype=torch.int32).reshape(1, 3, 1, 1)
        parts = x.split(chunk(4 * x[:1].numel()))
        sums = (((part * weights).sum(1, keepdim=True) + 0x8000) >> 16 for part in parts)
        x = torch.cat([part.to(torch.uint8) for part in sums])
    elif grey and x.shape[1] != 1:
        raise ValueError(f"grey=True for images of {x.shape[1]} channels; expected 3, or 1.")
    if size is None or x.shape[2:] == (size, size):
        return x
    from PIL import Image

    if x.shape[1] not in (1, 3):
        raise ValueError(f"size={size} for images of {x.shape[1]} channels; expected 1 or 3.")
    found = np.empty((len(x), x.shape[1], size, size), np.uint8)
    for row, image in zip(found, x.permute(0, 2, 3, 1).numpy(), strict=True):
        pixels = np.ascontiguousarray(image[..., 0] if x.shape[1] == 1 else image)
        row[:] = _planes(fitted(Image.fromarray(pixels), size))
    return torch.from_numpy(found)


def fitted(image: Image, size: int | None) -> Image:
    """The largest square in the middle, resized without aliasing."""
    if size is None or image.size == (size, size):
        return image
    from PIL import Image as pillow

    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), pillow.Resampling.LANCZOS, box=box)


# ---------------------------------------------------------------- files


def _groups(folder: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """The image files of each split, and what was left out."""
    everything = images_in(folder)
    if not everything:
        raise ValueError(
            f"{folder} has no image files; expected some of {', '.join(sorted(ENDINGS))}, in it, "
            "in folders by class, or in train, valid and test."
        )
    groups: dict[str, list[Path]] = {}
    for path in everything:
        first = path.relative_to(folder).parts[0]
        groups.setdefault(first if first in SPLITS else "whole", []).append(path)
    if "train" not in groups:
        return {"whole": everything}, []  # valid and test may be classes by these names
    notes = []
    if left := groups.pop("whole", []):
        notes.append(f"{len(left)} images outside of train, valid and test are not used")
    names = [name for name in groups if SPLITS[name] == "valid"]
    if len(names) > 1:
        raise ValueError(f"{folder} has the folders {' and '.join(names)}; expected one of them.")
    return {SPLITS[name]: paths for name, paths in groups.items()}, notes


def _root(folder: Path, split: str, groups: dict[str, list[Path]]) -> Path:
    """The folder of a split, under whichever name it goes."""
    if split == "whole":
        return folder
    return folder / groups[split][0].relative_to(folder).parts[0]


def _classes(folder: Path, groups: dict[str, list[Path]]) -> list[str]:
    """The sorted names of the class folders; none if the images are not in such."""
    paths = {split: groups[split] for split in groups}
    names: dict[str, set[str | None]] = {}
    for split, those in paths.items():
        root = _root(folder, split, groups)
        names[split] = {_class(path, root) for path in those}
        if None in names[split] and len(names[split]) > 1:
            beside = next(path for path in those if _class(path, root) is None)
            raise ValueError(
                f"{beside} stands beside folders of images in {root}; expected all images in "
                "folders by class, or none."
            )
    known = names.get("train", names.get("whole", set()))
    for split, those_names in names.items():
        if other := those_names - known:
            there = ", ".join(str(name) for name in sorted(other, key=str) if name) or "no classes"
            raise ValueError(
                f"{_root(folder, split, groups)} has {there}, which train has not; expected the "
                "classes of train in every split."
            )
    return sorted(name for name in known if name is not None)


def _class(path: Path, root: Path) -> str | None:
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else None


def _labels(paths: Sequence[Path], root: Path, classes: Sequence[str]) -> Tensor | None:
    """(N,) int64: the number of each file's class."""
    if not classes:
        return None
    number = {name: i for i, name in enumerate(classes)}
    return torch.tensor([number[_class(path, root) or ""] for path in paths])


def _starts(paths: Sequence[Path]) -> range:
    return range(0, len(paths), _BLOCK)


def _headers(paths: Sequence[Path], first: int) -> list[Header]:
    return [_header(path) for path in paths[first : first + _BLOCK]]


def _block(
    paths: Sequence[Path], mode: str, size: int | None, first: int
) -> tuple[int, list[np.ndarray]]:
    return first, [_pixels(path, mode, size) for path in paths[first : first + _BLOCK]]


def _header(path: Path) -> Header:
    from PIL import Image

    with reading(path), Image.open(path) as image:
        width, height = image.size
        mode = image.mode
        if image.getexif().get(_ORIENTATION, 1) >= 5:
            width, height = height, width
    if mode not in _GREY + _COLOUR:
        raise ValueError(
            f"{path} has pixels of mode {mode}, of more than 8 bits; expected 8 bits a channel. "
            "Convert it, or save such images as an .npz of whole numbers."
        )
    return Header(width, height, mode in _GREY)


def _check_sizes(paths: Sequence[Path], headers: Sequence[Header]) -> None:
    first = headers[0]
    for path, header in zip(paths, headers, strict=True):
        if (header.width, header.height) != (first.width, first.height):
            raise ValueError(
                f"{path} is {header.width} × {header.height} pixels, but {paths[0]} is "
                f"{first.width} × {first.height}; expected one size. Have them cropped and resized "
                f"to a square with size=, such as size={min(first.width, first.height)}."
            )


def _pixels(path: Path, mode: str, size: int | None) -> np.ndarray:
    """The pixels of a file, upright and without alpha: (C, H, W)."""
    from PIL import Image, ImageOps

    with reading(path), Image.open(path) as image:
        return _planes(fitted(ImageOps.exif_transpose(image).convert(mode), size))


def _planes(image: Image) -> np.ndarray:
    """(C, H, W) uint8."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
