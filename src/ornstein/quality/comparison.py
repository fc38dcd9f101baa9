"""What a comparison has found: points of quality against network evaluations."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ornstein.files import write_text
from ornstein.provenance import provenance
from ornstein.quality.keeping import as_json
from ornstein.quality.referring import Against, Figures

MORE = ("precision", "recall")  # of which more is better

FigureName = Literal["frechet", "sliced_wasserstein", "kernel_distance", "precision", "recall"]


@dataclass(frozen=True)
class Point:
    """One solver under one process, with one number of network evaluations."""

    process: str
    solver: str
    label: str  # the solver as it was, steps and all
    evaluations: int  # at most so many were asked for …
    made: int  # … and so many were made
    figures: Figures | None  # None where there are no samples, and then the note says why
    seconds: float | None  # of the sampling
    note: str = ""
    way: dict[str, Any] | None = None  # how it was learned

    def value(self, name: str) -> float | None:
        """One of its figures."""
        return None if self.figures is None else getattr(self.figures, name)

    def error(self, name: str) -> float | None:
        """Its standard error, where that is known."""
        return None if self.figures is None else getattr(self.figures, f"{name}_error", None)

    @staticmethod
    def read(record: dict[str, Any]) -> Point:
        """From what JSON holds."""
        figures = record["figures"]
        return Point(**{**record, "figures": None if figures is None else Figures(**figures)})


@dataclass(frozen=True)
class LeftOut:
    """What was asked for and can't be done."""

    solver: str
    evaluations: int | None  # None: whatever their number
    why: str


@dataclass(frozen=True)
class Comparison:
    """Quality against network evaluations."""

    points: tuple[Point, ...]
    left_out: tuple[LeftOut, ...]
    against: Against
    samples: int
    seed: int
    settings: dict[str, Any] = field(repr=False)

    @property
    def figure(self) -> FigureName:
        """The figure that says most here."""
        return "sliced_wasserstein" if self.against.features == "none" else "frechet"

    @property
    def evaluations(self) -> tuple[int, ...]:
        """The numbers that were asked for, rising."""
        return tuple(sorted({point.evaluations for point in self.points}))

    @property
    def lines(self) -> dict[tuple[str, str], tuple[Point, ...]]:
        """The points by process and solver."""
        found: dict[tuple[str, str], tuple[Point, ...]] = {}
        for point in self.points:
            key = (point.process, point.solver)
            found[key] = (*found.get(key, ()), point)
        return found

    def best(self, evaluations: int, figure: FigureName | None = None) -> Point:
        """The best point within so many network evaluations."""
        name = self.figure if figure is None else figure
        sign = -1.0 if name in MORE else 1.0
        known = [
            (sign * value, number)
            for number, point in enumerate(self.points)
            if point.evaluations == evaluations and (value := point.value(name)) is not None
        ]
        if not known:
            raise ValueError(
                f"no point has a figure {name!r} within {evaluations} evaluations; expected one of "
                f"the numbers {', '.join(map(str, self.evaluations))}, and a figure that was "
                "measured there."
            )
        return self.points[min(known)[1]]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)

    def save(self, path: str | Path, **more: Any) -> None:
        """Write it as JSON, with versions, machine and commit."""
        write_text(Path(path), as_json({**self.to_dict(), **more, "provenance": provenance()}))
