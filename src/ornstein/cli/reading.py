"""How the parser reads options that may be left out, and matrices, which are JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from ornstein.cli import naming
from ornstein.training.choices import Rows

#: the hint would say "(default: none)"; what none means is in the help of each
NoHint = tyro.conf.arg(help_behavior_hint="")
REGISTRY = tyro.constructors.ConstructorRegistry()
#: options that may be none, by what they are otherwise: the word in the help, and how to read them
PERHAPS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("INT", int),
    float: ("FLOAT", float),
    str: ("STR", str),
    Path: ("PATH", Path),
    Rows: ("JSON", lambda text: _matrix(text)),
}


@REGISTRY.primitive_rule
def _perhaps(info: Any) -> Any:
    """An option that is a single value or nothing."""
    for kind, (word, read) in PERHAPS.items():
        if info.type == kind | None:
            return _reader(tuple if kind is Rows else kind, word, read)
    return None


def _reader(kind: type, word: str, read: Callable[[str], Any]) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=word,
        instance_from_str=lambda texts: None if texts[0] == "none" else read(texts[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def _matrix(text: str) -> Rows:
    rows = naming.matrix(text, "Q")
    try:
        return tuple(tuple(float(v) for v in row) for row in rows)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r} has an entry that is no number ({error})") from error
