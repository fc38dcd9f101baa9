"""Parts that can say what they are, and be built again from that.

A class with a name in this register has `describe()`, a dict that JSON can hold, and `rebuild`, a
class method that makes an equal one from it (weights apart, which go into a state dict). So a model
can be saved as a description and tensors, and loaded without any code of the one who saved it.
Only what is listed here can be built: a file never names code to import.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

Record = dict[str, Any]
T = TypeVar("T")

KINDS: dict[str, type] = {}


def part(kind: str) -> Callable[[type[T]], type[T]]:
    """List a class under this name."""

    def listed(cls: type[T]) -> type[T]:
        if kind in KINDS and KINDS[kind].__qualname__ != cls.__qualname__:
            raise ValueError(
                f"the name {kind!r} is taken by {KINDS[kind].__name__}; expected a name of its own "
                f"for {cls.__name__}."
            )
        KINDS[kind] = cls
        return cls

    return listed


def described(thing: object) -> Record:
    """What a part is, for JSON: its kind and what it says of itself."""
    names = [name for name, cls in KINDS.items() if cls is type(thing)]
    if not names:
        raise ValueError(
            f"{type(thing).__name__} can't be described in a file; expected one of "
            f"{', '.join(sorted(KINDS))}. List a class of your own with ornstein.parts.part(name) "
            "and give it describe() and rebuild()."
        )
    return {"kind": names[0], **thing.describe()}  # type: ignore[attr-defined]


def rebuilt(record: Any, what: str, base: type[T]) -> T:
    """A part from its description; `what` names it in messages, `base` is what it must be."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError(f"{what} is described by {record!r}; expected an object with a 'kind'.")
    fields = dict(record)
    kind = fields.pop("kind")
    if kind not in KINDS or not issubclass(KINDS[kind], base):
        known = sorted(name for name, cls in KINDS.items() if issubclass(cls, base))
        close = difflib.get_close_matches(kind, known, n=1)
        hint = f" Perhaps you meant {close[0]!r}." if close else ""
        raise ValueError(
            f"{what} is described as {kind!r}; expected one of {', '.join(known)}.{hint} A class "
            "of your own must be imported, and listed with ornstein.parts.part(name), beforehand."
        )
    try:
        return KINDS[kind].rebuild(fields)  # type: ignore[attr-defined]
    except TypeError as error:
        raise ValueError(f"{what} of kind {kind!r} can't be built ({error}).") from error
