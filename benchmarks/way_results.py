"""What was measured about solvers and ways back, read from the JSON files: `Results`.

A figure is the Fréchet distance of samples to the training data, in features of a classifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COUNTS = (5, 10, 20, 50, 100)  # network evaluations
FEW = (5, 10, 20)  # for which times were learned


@dataclass(frozen=True)
class Figure:
    """A Fréchet distance, its standard error, and where it is from."""

    value: float
    error: float
    solver: str
    evaluations: int  # at most

    def __str__(self) -> str:
        places = 2 if self.value < 10 else 1
        return f"{self.value:.{places}f} ± {self.error:.{places}f}"


@dataclass(frozen=True)
class Results:
    """What was measured."""

    digits: dict[str, Any]
    mnist: dict[str, Any]
    wayback: dict[str, Any]

    def compared(self, data: str) -> dict[str, Any]:
        """The comparison of solvers on rules."""
        return self.digits if data == "digits" else self.mnist

    def ruled(self, data: str, process: str, solver: str, count: int) -> Figure | None:
        """Samples of a solver on a rule; None where there are none."""
        for p in self.compared(data)["points"]:
            if (p["process"], p["solver"], p["evaluations"]) == (process, solver, count):
                found = p["figures"]
                return found and Figure(found["frechet"], found["frechet_error"], solver, count)
        return None

    def best(self, data: str, process: str, count: int) -> Figure:
        """The best of all solvers on rules."""
        names = self.solvers(data)
        known = [self.ruled(data, process, name, count) for name in names]
        return min((f for f in known if f is not None), key=lambda f: f.value)

    def solvers(self, data: str) -> tuple[str, ...]:
        """Their names."""
        return tuple(dict.fromkeys(p["solver"] for p in self.compared(data)["points"]))

    def row(
        self, solver: str, count: int, way: str, metric: str = "path", spectrum: str = "digits"
    ) -> dict[str, Any] | None:
        """What was learned for a solver; None where nothing was."""
        wanted = (spectrum, solver, count, way, metric)
        keys = ("spectrum", "solver", "evaluations", "way", "metric")
        for row in self.wayback["rows"]:
            if tuple(row[key] for key in keys) == wanted:
                return dict(row)
        return None

    def learned(
        self, solver: str, count: int, way: str, metric: str = "path", spectrum: str = "digits"
    ) -> Figure | None:
        """Samples of a way that was learned."""
        row = self.row(solver, count, way, metric, spectrum)
        if row is None or "frechet" not in row:
            return None
        return Figure(row["frechet"], row["frechet_error"], solver, count)

    def sampled(self, solver: str, count: int, way: str, metric: str = "path") -> Figure:
        """The same of the digits, where there must be some."""
        found = self.learned(solver, count, way, metric)
        if found is None:
            raise ValueError(f"no samples of {solver!r}, {count} evaluations, way {way!r}")
        return found

    def error(
        self, solver: str, count: int, way: str, metric: str = "path", spectrum: str = "digits"
    ) -> float:
        """Of the law of the samples, on Gaussian data."""
        row = self.row(solver, count, way, metric, spectrum)
        if row is None:
            raise ValueError(f"no row of {solver!r} with {count} evaluations and way {way!r}")
        return float(row["error"])

    def shortest(self, process: str, data: str = "digits") -> Figure:
        """The best within 20 evaluations, on rules or on learned times."""
        own = {"vpsde": ("0", "times:vpsde")}.get(process, (f"times:{process}",))
        found = [self.best(data, process, count) for count in FEW]
        learned = (
            self.learned(solver, count, way, spectrum=data)
            for solver in ways(self)
            for count in FEW
            for way in own
        )
        found += [f for f in learned if f is not None]
        return min(found, key=lambda f: f.value)


def ways(results: Results) -> tuple[str, ...]:
    """The solvers for which times were learned, in the order of the other tables."""
    known = {row["solver"] for row in results.wayback["rows"]}
    return tuple(name for name in results.solvers("digits") if name in known)


def sliced(results: Results, count: int) -> list[tuple[float, str]]:
    """Sliced Wasserstein distances on learned times, with their solvers, the smallest first."""
    rows = ((results.row(solver, count, "0"), solver) for solver in ways(results))
    return sorted((row["sliced_wasserstein"], solver) for row, solver in rows if row is not None)
