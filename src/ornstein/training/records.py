"""Typed options to and from plain records, as JSON holds them.

Reading is strict: an unknown key is refused with the nearest known one, a value must be of the
type that its field says. `differences` compares two records key by key.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_record(options: Any) -> dict[str, Any]:
    """Nested dicts of plain values; tuples become lists."""
    return typing.cast(dict[str, Any], _plain(options))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def from_record(cls: type[T], record: Any, base: T | None = None, where: str = "") -> T:
    """Options from a record; what it leaves out is taken from `base`, or is the default."""
    title = where or cls.__name__.lower()
    if not isinstance(record, dict):
        raise ValueError(f"{title} is {record!r}; expected an object with named options.")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in record:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
            hint = f" Perhaps you meant {close[0]!r}." if close else ""
            raise ValueError(
                f"{title} has the unknown option {key!r}; expected some of "
                f"{', '.join(names)}.{hint}"
            )
    values: dict[str, Any] = {}
    for name in names:
        inner = f"{where}.{name}" if where else name
        given = getattr(base, name) if base is not None else None
        if dataclasses.is_dataclass(hints[name]):
            if name in record:
                kind = typing.cast(type[Any], hints[name])
                values[name] = from_record(kind, record[name], given, inner)
            elif base is not None:
                values[name] = given
        elif name in record:
            values[name] = _typed(record[name], hints[name], inner)
        elif base is not None:
            values[name] = given
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in values:
            raise ValueError(f"{title} has no {field.name}; expected one.")
    return cls(**values)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """The value as its field wants it, or a ValueError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _typed(value, option, where)
            except ValueError:
                continue
    elif origin is typing.Literal:
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_typed(v, arguments[0], where) for v in value)
        if len(value) == len(arguments):
            return tuple(_typed(v, a, where) for v, a in zip(value, arguments, strict=True))
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{where}={value!r}; expected {_shown(hint)}.")


def _shown(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_shown(a) for a in arguments)
    if origin is tuple:
        return "a list"
    if hint is type(None):
        return "null"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(hint, str(hint))


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """What differs between two records, one line each."""
    if isinstance(before, dict) and isinstance(now, dict):
        lines = []
        for key in dict.fromkeys([*before, *now]):
            inner = f"{where}.{key}" if where else str(key)
            if key not in before:
                lines.append(f"{inner}: not there before, now {now[key]!r}")
            elif key not in now:
                lines.append(f"{inner}: before {before[key]!r}, not there now")
            else:
                lines += differences(before[key], now[key], inner)
        return lines
    return [] if before == now else [f"{where}: before {before!r}, now {now!r}"]
