"""Draw the pictures of the pages from the JSON files of the results.

python -m benchmarks.pictures
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.page import RESULTS, ROOT
from ornstein import viz
from ornstein.quality import Against, Comparison, LeftOut, Point

SHOWN = ("ancestral", "exponential-1", "exponential-2", "exponential-3", "sde-2", "heun", "euler")


def comparison(name: str) -> Comparison:
    """What `benchmarks.solvers` has measured."""
    record: dict[str, Any] = json.loads((RESULTS / name).read_text())
    points = tuple(Point.read(point) for point in record["points"] if point["solver"] in SHOWN)
    return Comparison(
        points,
        tuple(LeftOut(**one) for one in record["left_out"]),
        Against.read(record["against"]),
        record["samples"],
        record["seed"],
        record["settings"],
    )


def tables() -> None:
    """The pictures of the tables that have some."""
    for path in (ROOT / "results").glob("*.json"):
        for what, figure in pictures_of(path).items():
            file = path.with_name(f"{path.stem}-{what}.png")
            if file.exists():
                viz.save(figure, file)


def pictures_of(path: Path) -> dict[str, Figure]:
    """Of a file that is a table's."""
    record = json.loads(path.read_text())
    return viz.pictures_of(record) if "table" in record else {}


def auxiliary() -> None:
    """What auxiliary variables know."""
    path = ROOT / "results" / "auxiliary.json"
    viz.save(viz.auxiliary_used(json.loads(path.read_text())), path.with_suffix(".png"))


def main() -> None:
    tables()
    auxiliary()
    title = "Fréchet distance of samples against network evaluations: one network, three processes"
    figure = viz.solvers(comparison("solvers-digits.json"), title=title)
    figure.savefig(ROOT / "docs" / "images" / "solvers.png", dpi=110)


if __name__ == "__main__":
    main()
