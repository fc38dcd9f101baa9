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


def preset(name: str, rate: Ends | None = None, horizon: float = 1.0) -> Process:
    """A preset by its name, or learned-N: one to be learned, with N auxiliary variables."""
    options: dict[str, Any] = {"horizon": horizon}
    if rate is not None:
        options["rate"] = Linear(*rate, horizon)
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
    if rate is not None and "rate" not in inspect.signature(make).parameters:
        raise ValueError(f"--rate was given, but {name!r} has no rate to set; leave --rate out.")
    return make(**options)


def own(
    Q: str,
    D: str,
    S: str | None = None,
    rate: Ends | None = None,
    rate_q: Ends | None = None,
    rate_d: Ends | None = None,
    v0_variance: str | None = None,
    horizon: float = 1.0,
) -> Process:
    """A process of the user's own, from matrices written as JSON."""
    options: dict[str, Any] = {} if v0_variance is None else {"v0_variance": variance(v0_variance)}
    return ornstein.Diffusion(
        matrix(Q, "Q"),
        matrix(D, "D"),
        None if S is None else matrix(S, "S"),
        rate=None if rate is None else Linear(*rate, horizon),
        rate_q=None if rate_q is None else Linear(*rate_q, horizon),
        rate_d=None if rate_d is None else Linear(*rate_d, horizon),
        horizon=horizon,
        name="own",
        **options,
    )


def matrix(text: str, what: str) -> list[list[float]]:
    """Nested lists from JSON; that they are a matrix is for the process to check."""
    expected = f"a list of rows such as --{what} '[[0,-1],[1,0]]'"
    value = _json(text, what, expected)
    if not (isinstance(value, list) and value and all(isinstance(row, list) for row in value)):
        raise ValueError(f"--{what} was given as {text!r}; expected {expected}.")
    return value


def variance(text: str) -> Any:
    """The variance of v₀: a number, a list with one for each variable, or a matrix."""
    expected = "a number, a list such as '[0.04,0.1]' or a matrix such as '[[0.04,0],[0,0.1]]'"
    value = _json(text, "v0-variance", expected)
    if isinstance(value, bool) or not isinstance(value, (int, float, list)):
        raise ValueError(f"--v0-variance was given as {text!r}; expected {expected}.")
    return value


def _json(text: str, what: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--{what} was given as {text!r}, which is not JSON ({error}); expected {expected}."
        ) from error
