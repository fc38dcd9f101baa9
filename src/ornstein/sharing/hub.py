"""Models on the Hugging Face Hub, where `huggingface_hub` is installed."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def located(folder: str | Path, names: Sequence[str]) -> Path:
    """A folder here; or the copy of a model on the Hub, of which these files are wanted."""
    path = Path(folder).expanduser()
    is_name = isinstance(folder, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", folder)
    if path.exists() or not is_name:
        return path
    hub = _hub(f"there is no folder {folder} here; to look for it on the Hugging Face Hub")
    try:
        return Path(hub.snapshot_download(str(folder), allow_patterns=list(names)))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"there is no folder {folder} here, and the Hugging Face Hub gave no model of this "
            f"name ({error}); expected a folder, or the name of a model such as 'user/model'."
        ) from error


def push(name: str, save: Callable[[Path], object], private: bool) -> str:
    """Upload what `save` writes into a folder; returns the address."""
    hub = _hub("to share a model on the Hugging Face Hub")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        save(folder)
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="A model of ornstein")
    return str(address)


def _hub(purpose: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            f"{purpose}, huggingface_hub is expected, and it is not installed. Install it: pip "
            "install 'ornstein[hub]'."
        ) from error
