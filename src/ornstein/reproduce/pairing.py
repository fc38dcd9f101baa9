"""Figures of several runs, compared on the same examples.

An example that is hard for one model is hard for all. So most of the standard error of a figure is
no error of a difference of two: that is found example by example. Where the examples' own figures
are elsewhere by now, the two means are still of the same examples, and what is left of the error is
that of the draws; it says nothing of other examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Bits:
    """An evaluation, example by example."""

    bits: np.ndarray  # (N,) per dimension
    marks: np.ndarray  # (N,) a checksum of each example


def read(file: Path) -> Bits | None:
    """Of the evaluation that this JSON file sums up; None where its rows are elsewhere."""
    pieces = []
    for path in sorted((file.parent / file.stem).glob("rows-*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            pieces.append({key: arrays[key] for key in ("number", "index", "mark", "samples")})
            dims = int(arrays["dims"])
    if not pieces:
        return None
    number, index, mark = (
        np.concatenate([p[key] for p in pieces]) for key in ("number", "index", "mark")
    )
    nats = np.concatenate([p["samples"].mean(1) for p in pieces])
    order = np.lexsort((index, number))
    passes = np.bincount(index)
    if len(set(passes.tolist())) != 1:  # still under way
        return None
    bits = -nats[order].reshape(passes[0], -1).mean(0) / (dims * math.log(2))
    return Bits(bits, mark[order][: len(passes)])


def difference(one: Bits | None, other: Bits | None) -> Record | None:
    """one − other with its standard error; None where they are not of the same examples."""
    if one is None or other is None or not np.array_equal(one.marks, other.marks):
        return None
    apart = one.bits - other.bits
    count = len(apart)
    error = float(apart.std(ddof=1)) / math.sqrt(count) if count > 1 else None
    return {"difference": float(apart.mean()), "standard_error": error, "examples": count}


def difference_of_figures(one: Record, other: Record) -> Record | None:
    """The same of two figures alone, with the error of their draws.

    None where they are not of the same examples: those of a split of the same data.
    """
    same = all(one[key] == other[key] for key in ("examples", "split"))
    prints = [(figure["data"] or {}).get("fingerprint") for figure in (one, other)]
    if not same or prints[0] is None or prints[0] != prints[1]:
        return None
    errors = [figure["draw_error"] for figure in (one, other)]
    known = 0.0 if one == other else None if None in errors else math.hypot(*errors)
    return {
        "difference": one["bits_per_dim"] - other["bits_per_dim"],
        "draw_error": known,
        "examples": one["examples"],
    }


def shown(against: Mapping[str, Any] | None) -> str:
    """A difference as it stands in a table."""
    if not against:
        return ""
    drawn = "draw_error" in against
    value, error = against["difference"], against["draw_error" if drawn else "standard_error"]
    if not error:
        return f"{value:+.4f}" if error is None else "0"
    digits = max(1, 1 - math.floor(math.log10(error)))  # two of the error's
    value = round(value, digits) + 0.0  # which makes −0 a 0
    text = f"{value:+.{digits}f} ± {error:.{digits}f}".replace("-", "−")
    return f"{text} (draws)" if drawn else text
