"""Options of a solver, as `sample`, `quality` and `compare` take them, and how to compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ornstein import compiling
from ornstein.cli.reading import NoHint
from ornstein.compiling import Compile, Precision
from ornstein.data import Dataset
from ornstein.sampling import (
    Ancestral,
    EulerMaruyama,
    Exponential,
    Heun,
    PredictorCorrector,
    ProbabilityFlow,
    SamplingStep,
    Solver,
    Splitting,
    TableSolver,
)
from ornstein.sampling.grids import Rule
from ornstein.sampling.solvers import SolverName
from ornstein.score import ScoreModel
from ornstein.wayback import learn_times

SOLVERS: dict[str, Callable[[], Solver]] = {
    "ancestral": Ancestral,
    "exponential": Exponential,
    "sde-2": partial(Exponential, stochasticity=1.0),
    "heun": Heun,
    "flow": ProbabilityFlow,
    "splitting": Splitting,
    "corrector": PredictorCorrector,
    "euler": EulerMaruyama,
}

MOST_LEARNED = 50  # steps whose times are learned; with more it takes long and gains little

# options that only some solvers have
OWN = ("order", "stochasticity", "extrapolate", "method", "rtol", "reference", "corrections")


@dataclass(frozen=True)
class Solving:
    """How to go back."""

    solver: SolverName = "ancestral"
    """ancestral: exact Gaussian steps given x̂. exponential: steps that extrapolate x̂, of which
    fewer will do. sde-2: the same with --stochasticity 1. heun: Heun's rule. flow: the probability
    flow by torchdiffeq. splitting: that of CLD, for every process. corrector: ancestral, with
    Langevin corrections. euler: Euler–Maruyama."""
    steps: Annotated[int | None, NoHint] = None
    """Of the solver (default: its own, flow: adaptive)."""
    grid: Annotated[Rule | Literal["learned"] | None, NoHint] = None
    """How its times are spread (default: curvature, euler and splitting: logsnr); learned finds the
    times that suit the solver, its steps and the data."""
    order: Annotated[Literal[1, 2, 3] | None, NoHint] = None
    """Exponential: how many looks it extrapolates over (default: 2)."""
    stochasticity: Annotated[float | None, NoHint] = None
    """Exponential: 0 for the probability flow, 1 for the reverse SDE (default: 0)."""
    extrapolate: Annotated[Literal["data", "noise"] | None, NoHint] = None
    """Exponential: what is extrapolated (default: data)."""
    method: Annotated[str | None, NoHint] = None
    """Flow: of torchdiffeq (default: dopri5)."""
    rtol: Annotated[float | None, NoHint] = None
    """Flow: error allowed in its adaptive steps (default: 1e-4)."""
    reference: Annotated[Literal["data", "prior"] | None, NoHint] = None
    """Splitting: the law that is solved exactly (default: data)."""
    corrections: Annotated[int | None, NoHint] = None
    """Corrector: Langevin steps after each step (default: 1)."""

    def chosen(self) -> Solver:
        """The solver that these options describe."""
        solver = SOLVERS[self.solver]()
        has = _names(solver)
        given = {name: getattr(self, name) for name in ("steps", "grid", *OWN)}
        for name, value in given.items():
            if value is None or (name, value) == ("grid", "learned"):
                continue
            if name not in has:
                owners = [key for key, make in SOLVERS.items() if name in _names(make())]
                raise ValueError(
                    f"--{name} is for --solver {' or '.join(owners)}, not for {self.solver}; "
                    "leave it out."
                )
            solver = replace(solver, **{name: value})
        if self.solver == "flow" and self.steps is None and self.grid is not None:
            raise ValueError("--grid is for a number of --steps; the flow chooses its own without.")
        return solver

    def fitted(self, model: ScoreModel, load: Callable[[], Dataset]) -> Solver:
        """The same with learned times, if they were asked for; only then the data is loaded."""
        solver = self.chosen()
        if self.grid != "learned":
            return solver
        if not isinstance(solver, TableSolver):
            raise ValueError(
                f"--grid learned is not for --solver {self.solver}, whose steps are not linear; "
                "choose another of them."
            )
        if solver.steps > MOST_LEARNED:
            raise ValueError(
                f"--grid learned is for few steps, and this would be {solver.steps}; give --steps "
                f"of at most {MOST_LEARNED}."
            )
        return learn_times(model, load().train.x, solver).solver

    def title(self) -> str:
        """For file names: what was not left at its default."""
        parts: list[str] = ["" if self.solver == "ancestral" else self.solver]
        for name in ("steps", "grid", *OWN):
            value = getattr(self, name)
            parts.append("" if value is None else f"{name}{value}")
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Computing:
    """How the network is asked."""

    compile: Compile = "auto"
    """Compile the network; auto does on CUDA where there is much to do, and captures CUDA graphs in
    any case; off does neither."""
    precision: Precision = "auto"
    """Of the network's arithmetic. float32: without TF32; auto: the same for bits per dimension,
    torch's own default for samples. tf32 and bfloat16 are faster, and round more."""

    def announce(self, console: Console, device: torch.device, rows: int) -> None:
        """Say that it takes a while before anything is to be seen."""
        if compiling.wanted(self.compile, device, rows):
            console.print(compiling.MESSAGE, style="dim")

    @property
    def title(self) -> str:
        """For file names."""
        return "" if self.precision == "auto" else self.precision


def _names(solver: Solver) -> set[str]:
    return {field.name for field in fields(solver)}


@contextlib.contextmanager
def progress(
    console: Console, n: int, world: int = 1, title: str = "sampling"
) -> Iterator[Callable[[SamplingStep], None]]:
    """A bar on a terminal while samples are made; elsewhere nothing. Gives the callback."""
    with Progress(
        TextColumn(title),
        BarColumn(bar_width=30),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        own = -(-n // world)  # what the first process makes
        task = bar.add_task("starting …", total=own)
        first: list[int] = []

        def told(step: SamplingStep) -> None:
            first[:] = first or [step.samples.start]
            done, size = step.samples.start - first[0], len(step.samples)
            text = f"{min(done + size, own):,} of {own:,}, look {step.number} of {step.total}"
            bar.update(task, completed=done + size * step.number / step.total, description=text)

        yield told


#: solvers by the names that `compare` knows them by; their steps follow from the evaluations
VARIANTS: dict[str, Solver] = {
    "ancestral": Ancestral(),
    "exponential-1": Exponential(order=1),
    "exponential-2": Exponential(order=2),
    "exponential-3": Exponential(order=3),
    "exponential-noise-2": Exponential(order=2, extrapolate="noise"),
    "sde-2": Exponential(order=2, stochasticity=1.0),
    "heun": Heun(),
    "rk4": ProbabilityFlow(steps=1, method="rk4"),
    "splitting": Splitting(),
    "corrector": PredictorCorrector(),
    "euler": EulerMaruyama(),
}
