"""What a comparison has done so far, as a folder: settings, and records that are only added.

Every file is whole or not there. Under `torch.distributed` the first process writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ornstein.files import write_text
from ornstein.ledger import processes

SETTINGS = "settings.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Kept:
    """A folder of records; without one, nothing is kept."""

    folder: Path | None

    def check(self, settings: dict[str, Any]) -> None:
        """Refuse a folder that was begun with other settings."""
        before = self.read(SETTINGS, "the settings of a comparison", dict)
        changed = [
            f"{key}: {before.get(key)!r} there, {settings.get(key)!r} now"
            for key in dict.fromkeys([*settings, *(before or {})])
            if before is not None and before.get(key) != settings.get(key)
        ]
        if changed:
            raise ValueError(
                f"{self.folder} holds another comparison ({'; '.join(changed)}); expected the same "
                "model, data and options to go on with it. Use another folder, or delete this one."
            )

    def read(self, name: str, what: str, made: Callable[[dict[str, Any]], T]) -> T | None:
        """What a file holds; None where there is none."""
        path = None if self.folder is None else self.folder / name
        if path is None or not path.exists():
            return None
        try:
            return made(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} can't be read ({error}); expected {what}. Delete this file and repeat the "
                "command: only what it held is computed again."
            ) from error

    def keep(self, name: str, record: dict[str, Any]) -> None:
        """Write a file."""
        if self.folder is not None and processes()[0] == 0:
            write_text(self.folder / name, as_json(record))


def as_json(record: dict[str, Any]) -> str:
    """Of numbers that are all finite."""
    return json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
