"""Matrices on the command line: nested lists as JSON."""

from __future__ import annotations

from typing import Any

import tyro

from ornstein.cli import naming
from ornstein.training.experiment import Rows

REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _rows(info: Any) -> Any:
    """How the parser reads an option that is a matrix or nothing."""
    if info.type not in (Rows, Rows | None):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda text: _matrix(text[0]),
        is_instance=lambda value: value is None or isinstance(value, tuple),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def _matrix(text: str) -> Rows:
    rows = naming.matrix(text, "Q")
    try:
        return tuple(tuple(float(v) for v in row) for row in rows)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r} has an entry that is no number ({error})") from error
