"""Draw the pictures of the pages from the JSON files of the results.

python -m benchmarks.pictures
"""

from __future__ import annotations

import json
from typing import Any

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


def main() -> None:
    title = "Fréchet distance of samples against network evaluations: one network, three processes"
    figure = viz.solvers(comparison("solvers-digits.json"), title=title)
    figure.savefig(ROOT / "docs" / "images" / "solvers.png", dpi=110)


if __name__ == "__main__":
    main()
