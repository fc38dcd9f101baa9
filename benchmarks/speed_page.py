"""The figures on docs/speed.md, from the JSON files that `ornstein bench` wrote.

Places on the page are those of `way_page`: `<!-- figures: NAME -->`. A part that was not measured
says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.way_page import PLACE, tabled
from ornstein.bench import Figures, Part

PARTS = ("step", "rest", "learned", "kernel", "sampling", "scaling")
NAMES = ("limits", *PARTS, "roofline", "cpu", "before", "where")
MISSING = "Not measured yet."


def of_part(part: Part, cuda: bool) -> Iterable[str]:
    """Its tables, with their notes."""
    for table in part.tables:
        yield f"{table.title[0].upper()}{table.title[1:]}:"
        yield ""
        yield from tabled(*table.shown(cuda))
        yield ""
        if table.notes:
            yield f"({'; '.join(table.notes)})"
            yield ""
    p = part.provenance
    if p:
        yield f"({p['date']}, commit {p['commit']})"


def ratios(part: Part) -> Iterable[str]:
    """Its tables without times, which mean little on a machine that others use."""
    for table in part.tables:
        (first, *_, last), rows = table.shown(False)
        if table.ratio:
            yield f"{table.title[0].upper()}{table.title[1:]}:"
            yield ""
            yield from tabled([first, last], [[row[0], row[-1]] for row in rows])
            yield ""


def limits(found: Figures) -> Iterable[str]:
    """All figures that have a limit."""
    checks = [check for part in found.parts.values() for check in part.checks]
    rows = [
        [
            check.name,
            f"{check.value:.3g}",
            f"{'≤' if check.most else '≥'} {check.limit:g}",
            "yes" if check.holds else "**no**",
        ]
        for check in checks
    ]
    yield from tabled(["", "measured", "limit", "holds"], rows)


def where(found: Figures) -> str:
    """On what it was measured, part by part if they differ."""
    origins = dict.fromkeys(
        f"{p['date']}, commit {p['commit']}" for p in (q.provenance for q in found.parts.values())
    )
    p, top = found.provenance, found.ceilings
    machine = p["gpu"] if found.device == "cuda" else p["cpu"]
    stock = "our own U-Net, not compiled" if found.stock == "plain" else found.stock
    return (
        f"({machine}, PyTorch {p['torch']}, Python {p['python']}; {'; '.join(origins)}. Ceilings: "
        f"{top.flops / 1e12:.3g} TFLOP/s, {top.matmul}; {top.bytes / 1e9:,.4g} GB/s, {top.copy}. "
        f"Stock: {stock}.)"
    )


def against(before: dict[str, Any]) -> str:
    """The step of the quick start, in two states of this repository."""
    cases = [
        f"{found['this / other']:.2f} ({name})" for name, found in before.items() if "," in name
    ]
    p = before["provenance"]
    return (
        f"A training step of the quick start takes {'; '.join(cases)} times as long as it did "
        f"at commit {before['other']}, before this page and before there were histograms. "
        f"(`python -m benchmarks.checkouts`; PyTorch {p['torch']}, {p['date']}, "
        f"commit {p['commit']})"
    )


def lines(
    name: str,
    gpu: Figures | None,
    cpu: Figures | None,
    picture: Path,
    before: dict[str, Any] | None,
) -> Iterable[str]:
    """What stands in one place."""
    if name == "before":
        yield MISSING if before is None else against(before)
    elif name == "cpu":
        if cpu is None:
            yield MISSING
            return
        for part in cpu.parts.values():
            yield from ratios(part)
        yield where(cpu)
    elif gpu is None or (name in PARTS and name not in gpu.parts):
        yield MISSING
    elif name in PARTS:
        yield from of_part(gpu.parts[name], cuda=True)
    elif name == "limits":
        yield from limits(gpu)
    elif name == "where":
        yield where(gpu)
    elif picture.exists():
        yield f"![Pieces of a training step under the roofline of the GPU](images/{picture.name})"
    else:
        yield MISSING


def filled(
    text: str,
    gpu: Figures | None,
    cpu: Figures | None,
    picture: Path,
    before: dict[str, Any] | None = None,
) -> str:
    """The page with its figures renewed."""

    def renew(found: re.Match[str]) -> str:
        shown = "".join(f"{line}\n" for line in lines(found[2], gpu, cpu, picture, before))
        return found[1] + shown.rstrip("\n") + "\n" + found[3]

    return PLACE.sub(renew, text)
