"""From what a user types to a process: the name of a preset, or matrices as JSON."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import ornstein
from ornstein import Linear, Process

PRESETS: Mapping[str, Any] = ornstein.PRESETS
Ends = tuple[float, float]  # a linear rate, at time 0 and at the horizon


def preset(name: str, rate: Ends | None = None) -> Process:
    """A preset by its name, or learned-N: one to be learned, with N auxiliary variables."""
    options: dict[str, Any] = {} if rate is None else {"rate": Linear(*rate)}
    learned = re.fullmatch(r"learned-(\d+)(-full)?", name)
    if learned:
        return ornstein.learned(int(learned[1]), full=bool(learned[2]), **options)
    if name not in PRESETS:
        known = [*PRESETS, "learned-1", "learned-2"]
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" Perhaps you meant {close[0]!r}." if close else ""
        raise ValueError(
            f"there is no preset {name!r}; expected one of {', '.join(PRESETS)}, or "
            f"learned-N with N auxiliary variables.{hint}"
        )
    make: Callable[..., Process] = PRESETS[name]
    if options and "rate" not in inspect.signature(make).parameters:
        raise ValueError(f"--rate was given, but {name!r} has no rate to set; leave --rate out.")
    return make(**options)


def own(
    Q: str,
    D: str,
    S: str | None = None,
    rate: Ends | None = None,
    rate_q: Ends | None = None,
    rate_d: Ends | None = None,
    name: str = "own",
) -> Process:
    """A process of the user's own, from matrices written as JSON."""
    return ornstein.Diffusion(
        matrix(Q, "Q"),
        matrix(D, "D"),
        None if S is None else matrix(S, "S"),
        rate=None if rate is None else Linear(*rate),
        rate_q=None if rate_q is None else Linear(*rate_q),
        rate_d=None if rate_d is None else Linear(*rate_d),
        name=name,
    )


def matrix(text: str, what: str) -> list[list[float]]:
    """Nested lists from JSON; that they are a matrix is for the process to check."""
    example = f"--{what} '[[0,-1],[1,0]]'"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--{what} was given as {text!r}, which is not JSON ({error}); expected nested lists "
            f"such as {example}."
        ) from error
    if not (isinstance(value, list) and value and all(isinstance(row, list) for row in value)):
        raise ValueError(
            f"--{what} was given as {text!r}; expected a list of rows such as {example}."
        )
    return value
