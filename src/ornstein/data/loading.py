"""`load`: data by its name, or by the path of a file or folder."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from ornstein.data import arrays, pictures, published
from ornstein.data.digits import digits
from ornstein.data.fetching import Watcher
from ornstein.data.sets import Dataset, Found, Split, check_count, completed
from ornstein.data.toys import TOYS, toy

NAMES = ("digits", *TOYS, *published.NAMES)
ARRAYS = (".npz", ".npy")
_SEED = 0  # of what is held out of published sets, whatever the user's seed is


def load(
    name_or_path: str | Path,
    *,
    folder: str | Path | None = None,
    valid: int | None = None,
    seed: int = 0,
    download: bool = False,
    size: int | None = None,
    grey: bool = False,
    watch: Watcher | None = None,
) -> Dataset:
    """A data set in memory, as training, validation and test split.

    A name is one of `NAMES`. The files of published sets are looked for in `folder`, by default
    what the environment variable ORNSTEIN_DATA says, else "data"; with `download` those that are
    missing are fetched first, and `watch` is told how far it is. A path is an .npz or .npy file, a
    folder of such, or a folder of images.

    `valid` examples are held out of the training examples where the files have no validation
    split, never out of the test set. Which ones depends on `seed` for your own data; it is always
    the same for published sets. The seed also draws the toys. `size` crops images to a square and
    resizes them, `grey` makes them one channel.
    """
    if valid is not None:
        check_count(valid)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}; expected a whole number.")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"size={size!r}; expected the side of the images in pixels, such as 32.")
    name = name_or_path.strip().lower().replace("-", "_") if isinstance(name_or_path, str) else ""
    if name == "digits" or name in TOYS:
        if size is not None or grey:
            raise ValueError(
                f"size={size}, grey={grey} for {name}; expected neither: they are for images of "
                "256 levels."
            )
        return digits(valid) if name == "digits" else toy(name, seed, valid)
    if name in published.NAMES:
        where = Path(folder or os.environ.get("ORNSTEIN_DATA") or "data").expanduser()
        found = published.read_published(name, where, download, watch)
        most = published.MOST[name]
        return completed(_refitted(found, size, grey), name, valid=valid, seed=_SEED, most=most)
    path = Path(name_or_path).expanduser()
    found = _own(path, str(name_or_path), size, grey)
    own = path.absolute()
    return completed(found, own.stem if own.is_file() else own.name, valid=valid, seed=seed)


def _own(path: Path, given: str, size: int | None, grey: bool) -> Found:
    """A file or folder of the user's."""
    if path.is_dir():
        shards = [file for file in path.iterdir() if file.suffix.lower() in ARRAYS]
        shards = [file for file in shards if not file.name.startswith(".")]
        images = pictures.images_in(path)
        if shards and images:
            raise ValueError(
                f"{path} has arrays ({shards[0].name}) and images ({images[0].name}); expected one "
                "kind. Keep them in folders of their own."
            )
        if shards:
            return _refitted(arrays.read_shards(shards, str(path)), size, grey)
        if images:
            return pictures.read_folder(path, size, grey)
        raise ValueError(
            f"{path} has neither .npz or .npy files nor images; expected some of them. A published "
            f"set is loaded by its name, with folder=: {', '.join(published.NAMES)}."
        )
    if path.suffix.lower() in ARRAYS and path.is_file():
        return _refitted(arrays.read_file(path), size, grey)
    if path.exists():
        raise ValueError(
            f"{path} is a file of an unknown kind; expected .npz or .npy, or a folder of such or "
            "of images."
        )
    if os.sep in given or path.suffix.lower() in ARRAYS:
        raise ValueError(
            f"there is no {given}, seen from {Path.cwd()}; expected an .npz or .npy file, a folder "
            f"of such or of images, or one of {', '.join(NAMES)}."
        )
    close = difflib.get_close_matches(given.lower(), NAMES, n=1)
    hint = f" Perhaps you meant {close[0]!r}." if close else ""
    raise ValueError(
        f"there is no data set {given!r}; expected one of {', '.join(NAMES)}, or the path of an "
        f".npz or .npy file or of a folder.{hint}"
    )


def _refitted(found: Found, size: int | None, grey: bool) -> Found:
    """The same with images of another size or without colours."""
    if size is None and not grey:
        return found
    some = next(iter(found.splits.values())).x
    if found.levels != 256 or some.dim() != 4:
        raise ValueError(
            f"size={size}, grey={grey} for {found.source}; expected neither: they are for images "
            "of 256 levels."
        )
    splits = {
        name: Split(pictures.refitted(split.x, size, grey), split.labels)
        for name, split in found.splits.items()
    }
    return Found(splits, found.levels, found.source, found.notes)
