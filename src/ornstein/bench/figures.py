"""What `ornstein bench` finds: tables of lines, checks against limits, all as JSON and back.

A file may be filled by several calls: parts that are measured again replace what was there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ornstein.bench.counting import Ceilings, Cost
from ornstein.bench.racing import Race
from ornstein.files import write_text


@dataclass(frozen=True)
class Line:
    """One thing that was timed."""

    name: str
    seconds: float  # per call
    ratio: float | None = None  # to what the table says
    items: int = 0  # images or steps in a call
    flops: float = 0.0  # in a call
    bytes: float = 0.0  # the least that a call moves; 0: not on the roofline

    @property
    def rate(self) -> float:
        """Items per second."""
        return self.items / self.seconds


@dataclass(frozen=True)
class Table:
    """Lines that belong together."""

    title: str
    ratio: str  # what the ratios are
    lines: tuple[Line, ...]
    unit: str = "images"  # what items are
    share: bool = False  # ratios are parts of a whole
    notes: tuple[str, ...] = ()

    def shown(self, cuda: bool) -> tuple[list[str], list[list[str]]]:
        """Heads and rows, as people read them; a column that says nothing is left out."""
        counted = any(line.flops for line in self.lines)
        heads = ["", "ms", f"{self.unit}/s"]
        heads += ["TFLOP/s" if cuda else "GFLOP/s"] if counted else []
        heads += [self.ratio] if self.ratio else []
        return heads, [self._row(line, counted, 1e12 if cuda else 1e9) for line in self.lines]

    def _row(self, line: Line, counted: bool, unit: float) -> list[str]:
        cells = [line.name, _digits(1e3 * line.seconds), _digits(line.rate) if line.items else ""]
        if counted:
            cells.append(_digits(line.flops / line.seconds / unit) if line.flops else "")
        if self.ratio:
            form = ".1%" if self.share else ".3g"
            cells.append("" if line.ratio is None else format(line.ratio, form))
        return cells


@dataclass(frozen=True)
class Check:
    """A figure that has a limit."""

    name: str
    value: float
    limit: float
    most: bool = True  # the limit is the most, or the least

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.most else self.value >= self.limit

    def shown(self) -> str:
        """As a sentence."""
        sign, verdict = "≤" if self.most else "≥", "holds" if self.holds else "missed"
        return f"{self.name}: {self.value:.3g} ({sign} {self.limit:g}: {verdict})"


@dataclass(frozen=True)
class Part:
    """What one part of the benchmark found."""

    tables: tuple[Table, ...]
    checks: tuple[Check, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """A whole file."""

    device: str  # cuda or cpu
    stock: str  # what stands for a stock U-Net
    quick: bool
    ceilings: Ceilings
    parts: Mapping[str, Part]
    provenance: Mapping[str, str]

    def merged(self, older: Figures) -> Figures:
        """With the parts of an older file that were not measured again."""
        for name in ("device", "quick"):
            here, there = getattr(self, name), getattr(older, name)
            if here != there:
                raise ValueError(
                    f"the figures of this call have {name}={here!r} and the file has {there!r}; "
                    "expected the same. Write to another file with --out."
                )
        parts = {**older.parts, **self.parts}
        return Figures(self.device, self.stock, self.quick, self.ceilings, parts, self.provenance)

    def points(self) -> list[Line]:
        """What can be put on the roofline."""
        return [
            line
            for part in self.parts.values()
            for table in part.tables
            for line in table.lines
            if line.bytes and line.flops
        ]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"library": "ornstein", **asdict(self)}
        for name, part in self.parts.items():
            for check, kept in zip(part.checks, record["parts"][name]["checks"], strict=True):
                kept["holds"] = check.holds
        write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    @staticmethod
    def read(path: Path) -> Figures:
        """A file that `save` wrote."""
        try:
            return Figures.from_record(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} can't be read ({error!r}); expected a file that `ornstein bench --out` "
                "wrote. Remove it, or choose another."
            ) from error

    @staticmethod
    def from_record(record: dict[str, Any]) -> Figures:
        parts = {name: _part(part) for name, part in record["parts"].items()}
        return Figures(
            record["device"],
            record["stock"],
            record["quick"],
            Ceilings(**record["ceilings"]),
            parts,
            record["provenance"],
        )


def _digits(value: float) -> str:
    """Three or more of them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _part(record: dict[str, Any]) -> Part:
    tables = tuple(
        Table(
            table["title"],
            table["ratio"],
            tuple(Line(**line) for line in table["lines"]),
            table["unit"],
            table["share"],
            tuple(table["notes"]),
        )
        for table in record["tables"]
    )
    names = ("name", "value", "limit", "most")
    checks = tuple(Check(*(check[name] for name in names)) for check in record["checks"])
    return Part(tables, checks, record["provenance"])


def lines_of(
    found: Race,
    to: str,
    items: int = 0,
    costs: Mapping[str, Cost] | None = None,
    flops: Mapping[str, float] | None = None,
) -> tuple[Line, ...]:
    """The lines of a race, with ratios to one of them.

    costs: FLOPs and bytes, of what is put on the roofline. flops: of what is not.
    """
    lines = []
    for name in found.times:
        cost = (costs or {}).get(name, Cost((flops or {}).get(name, 0.0), 0.0))
        ratio = found.ratio(name, to)
        lines.append(Line(name, found.seconds(name), ratio, items, cost.flops, cost.bytes))
    return tuple(lines)


def notes_of(found: Race) -> tuple[str, ...]:
    """Who was left out, and what a start takes."""
    lines = [f"left out: {name} ({why})" for name, why in found.left_out.items()]
    slow = [f"{name} {took:.0f} s" for name, took in found.starts.items() if took >= 5]
    return tuple([*lines, f"first calls, compiled there: {', '.join(slow)}"] if slow else lines)
