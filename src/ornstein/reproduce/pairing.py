"""Figures of several runs, compared on the same examples.

An example that is hard for one model is hard for all. So most of the standard error of a figure is
no error of a difference of two: that is found example by example. Where the examples' own figures
are elsewhere by now, the two means are still of the same examples, and what is left of the error is
that of the draws; it says nothing of other examples.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ornstein.reproduce.running import Errand

Record = dict[str, Any]
Found = tuple[Errand, Record, bool]  # the last: whether it is in the folder of runs by now


@dataclass(frozen=True, eq=False)
class Bits:
    """An evaluation, example by example."""

    bits: np.ndarray  # (N,) per dimension
    marks: np.ndarray  # (N,) a checksum of each example


def read(file: Path) -> Bits | None:
    """Of the evaluation that this JSON file sums up; None where its rows are elsewhere.

    Or damaged: the figure itself is in the JSON file.
    """
    pieces = []
    for path in sorted((file.parent / file.stem).glob("rows-*.npz")):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                pieces.append({key: arrays[key] for key in ("number", "index", "mark", "samples")})
                dims = int(arrays["dims"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
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


# ---------------------------------------------------------------- the runs of a table


def compared(found: Sequence[Found]) -> list[Record]:
    """With each figure of a run's first look beside that of the first joint run that has one."""
    runs = []
    for one in found:
        errand, run, _ = one
        look = next(iter(errand.looks()), None)
        base = _base_of(found, look)
        figures = []
        for figure in run["figures"]:
            known = figure.get("against")  # of a run that was found elsewhere
            figure = {key: value for key, value in figure.items() if key != "against"}
            if base is not None and figure["look"] == look:
                apart = known if _still(known, figure, base) else _apart(one, base, figure)
                figure |= {"against": apart} if apart else {}
            figures.append(figure)
        runs.append({**run, "figures": figures})
    return runs


def _base_of(found: Sequence[Found], look: str | None) -> Found | None:
    """The run to compare with: the first joint one with a figure of this look, or the first."""
    having = [one for one in found if any(f["look"] == look for f in one[1]["figures"])]
    joint = [one for one in having if one[1]["parametrisation"] == "joint"]
    return next(iter([*joint, *having]), None)


def _of(base: Found, look: str) -> Record:
    """Its first figure of a look."""
    found: Record = next(f for f in base[1]["figures"] if f["look"] == look)
    return found


def _still(known: Record | None, figure: Record, base: Found) -> bool:
    """Whether a difference from before is that of these two figures: its base may be new."""
    if known is None or known["run"] != base[1]["name"]:
        return False
    now = figure["bits_per_dim"] - _of(base, figure["look"])["bits_per_dim"]
    return math.isclose(known["difference"], now, rel_tol=0, abs_tol=1e-9)


def _apart(one: Found, base: Found, figure: Record) -> Record | None:
    """How far a figure is from the base's: example by example, or else as two figures are."""
    look, other = figure["look"], _of(base, figure["look"])
    rows = [
        read(errand.files(look)[f["asked"]]) if fresh else None
        for (errand, _, fresh), f in ((one, figure), (base, other))
    ]
    apart = difference(*rows) or difference_of_figures(
        {**figure, "data": one[1]["data"]}, {**other, "data": base[1]["data"]}
    )
    return {"run": base[1]["name"], **apart} if apart else None
