"""`ornstein compare`: quality against network evaluations, for several solvers of one model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ornstein.cli.measuring import about, cache_folder
from ornstein.cli.opening import data_of, under
from ornstein.cli.reading import NoHint
from ornstein.cli.solving import VARIANTS, Computing
from ornstein.data import Dataset
from ornstein.ledger import processes as ranks
from ornstein.process import Process
from ornstein.quality import WORDS, Figures, cached_as, classifier_cost, usual_features
from ornstein.quality.comparing import EVALUATIONS, LEARNED, Work
from ornstein.quality.comparison import MORE, Comparison, FigureName, Point
from ornstein.training.distribution import device_of, joined
from ornstein.training.opening import Opened, Which, open_model
from ornstein.viz import save
from ornstein.viz.solvers import solvers as picture

HELP = """Which solver, and how many network evaluations? Quality of a trained model's samples for
several solvers, under one process or many: a table, a plot and JSON. Costs are said before it
starts. What is interrupted goes on when the command is repeated; solvers, processes and numbers of
evaluations can be added later.

solvers:
  ancestral, corrector, splitting, euler       with noise in every step
  exponential-1, -2, -3, exponential-noise-2   without noise; 1 is DDIM
  sde-2                                        exponential with noise
  heun, rk4                                    several evaluations in a step, without noise

examples:
  ornstein compare runs/digits-channel-vpsde
  ornstein compare runs/digits-channel-vpsde --process vpsde cld malda --solver exponential-2 sde-2
  ornstein compare runs/digits-channel-vpsde --solver exponential-2 --evaluations 5 10 --learned
  ornstein compare runs/mnist-channel-vpsde --n 5000 --out comparisons/mnist"""

WIDEST = 500  # columns that a table may have
USUAL = ("ancestral", "sde-2", "exponential-1", "exponential-2", "exponential-3", "heun")
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]
Counts = Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT ...")]


@dataclass(frozen=True)
class Compare:
    """Quality against network evaluations."""

    model: Annotated[str, tyro.conf.Positional]
    """Folder of a run or of a saved model."""
    process: Names = ()
    """Processes to put a channel model under: presets, or runs (default: its own)."""
    solver: Names = ()
    """Solvers, see above (default: ancestral, sde-2, exponential-1, -2 and -3, heun)."""
    evaluations: Counts = EVALUATIONS
    """Network evaluations that a solver may make for a sample."""
    n: int = 1000
    """Samples for each point; those of all points have the same seed."""
    learned: bool = False
    """Also the times and processes that are learned for a solver, up to 30 evaluations."""
    figure: Annotated[
        Literal["frechet", "sliced_wasserstein", "precision", "recall"] | None, NoHint
    ] = None
    """What table and plot show (default: frechet, or sliced_wasserstein without features)."""
    split: Literal["train", "valid", "test"] = "train"
    """What samples are compared with."""
    features: Literal["auto", "classifier", "raw", "none"] = "auto"
    """What is compared: with auto a classifier's where there are labels, else vectors as they are,
    and of images only the sliced Wasserstein distance."""
    data: Annotated[str | None, NoHint] = None
    """Other data than the model was trained on."""
    data_folder: Annotated[str | None, NoHint] = None
    """Where the files of a named set are."""
    seed: int = 0
    """Of the samples."""
    batch_size: Annotated[int | None, NoHint] = None
    """Samples at a time; they do not depend on it (default: 256, on CUDA what memory allows)."""
    which: Which = "best"
    """Of a run: its best checkpoint on validation, or its last."""
    out: Annotated[Path | None, NoHint] = None
    """Folder for the results (default: compare in the run, or in the model's folder)."""
    cache: Annotated[Path | None, NoHint] = None
    """Folder of classifiers, trained once (default: ornstein in $XDG_CACHE_HOME or ~/.cache)."""
    device: Annotated[str | None, NoHint] = None
    """cpu, cuda or cuda:N (default: CUDA where there is one)."""
    computing: Computing = field(default_factory=Computing)
    """How the network is asked."""

    def run(self) -> None:
        device = device_of(self.device)
        console = Console(highlight=False, soft_wrap=True)
        chosen = {name: VARIANTS[_known(name)] for name in self.solver or USUAL}
        if self.features == "none" and self.figure not in (None, "sliced_wasserstein"):
            raise ValueError(
                f"--figure {self.figure} needs features; expected sliced_wasserstein with "
                "--features none."
            )
        with joined(device):
            opened = open_model(self.model, self.which, device)
            source = data_of(opened, self.data, self.data_folder)
            folder = self.out or (opened.run or opened.folder) / "compare"
            work = Work(
                opened.model,
                source.data,
                chosen,
                self.evaluations,
                processes=self._processes(opened),
                learn=self.learned,
                n=self.n,
                seed=self.seed,
                features=None if self.features == "auto" else self.features,
                split=self.split,
                batch_size=self.batch_size,
                folder=folder,
                cache=self.cache or cache_folder(),
                compile=self.computing.compile,
                precision=self.computing.precision,
            )
            first = ranks()[0] == 0
            self._announce(work, source.data, console if first else Console(quiet=True))
            found = compared(work, console if first else Console(quiet=True))
            if not first:
                return
        name: FigureName = self.figure or found.figure
        more = {"which": self.which, "step": opened.step, "data_set": source.data.describe()}
        found.save(folder / "comparison.json", figure=name, **more)
        show(found, name, console)
        for line in notes(found):
            console.print(line, style="dim")
        written = [folder / "comparison.json"]
        if any(point.value(name) is not None for point in found.points):
            title = f"{opened.name}: {WORDS[name]} against evaluations"
            written.append(save(picture(found, name, title), folder / "comparison.png"))
        console.print(f"wrote {' and '.join(map(str, written))}", style="dim")

    def _processes(self, opened: Opened) -> dict[str, Process]:
        found: dict[str, Process] = {}
        for given in self.process or ("own",):
            process = under(opened.model, given).process
            name = process.name if given == "own" else Path(given).name
            name = given if name in found else name
            found[f"{name}, trained" if self.learned and name in LEARNED else name] = process
        return found

    def _announce(self, work: Work, data: Dataset, console: Console) -> None:
        """What it costs."""
        left, guess = work.left, work.cost()
        if not left:
            console.print(f"all {len(work.jobs)} points are there already")
            return
        kept = len(work.jobs) - len(left)
        there = f" ({kept} more are there already)" if kept else ""
        total, seconds = self.n * (guess.evaluations or 0), guess.seconds or 0.0
        console.print(
            f"{len(left)} points of {self.n:,} samples{there}: {total:,} network evaluations, "
            f"{about(seconds)}"
        )
        self.computing.announce(console, work.model.process.device, work.most_rows)
        if count := sum(job.n_aux is not None for job in left):
            console.print(f"{count} ways back are learned besides: seconds to a minute each")
        kind = usual_features(data) if self.features == "auto" else self.features
        if kind == "classifier" and not (Path(work.cache or "") / cached_as(data, 0)).exists():
            cost = classifier_cost(data, work.model.process.device)
            console.print(f"a classifier of {data.name} is trained, once: {about(cost)}")


def compared(work: Work, console: Console) -> Comparison:
    """The comparison, with a bar on a terminal; elsewhere a line for each point."""
    left = work.left
    with Progress(
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("starting …", total=sum(job.made for job in left) or 1)

        def made(point: Point) -> None:
            bar.advance(task, point.made)
            if not console.is_terminal:
                found = "no samples" if point.figures is None else _line(point)
                console.print(f"{point.process}, {point.solver}, {point.made}: {found}")

        def told(text: str) -> None:
            bar.update(task, description=text)

        return work.run(told if console.is_terminal else None, made)


def _line(point: Point) -> str:
    shown = (
        f"{word} {point.figures.shown(name)}"
        for name, word in WORDS.items()
        if point.figures is not None and point.value(name) is not None
    )
    return ", ".join(shown)


def show(found: Comparison, name: FigureName, console: Console) -> None:
    """The table, without errors on a terminal that is too narrow for them."""
    shown = table(found, name)
    wanted = console.measure(shown, options=console.options.update(width=WIDEST)).maximum
    if console.is_terminal and wanted > console.width:
        shown = table(found, name, errors=False)
    elif wanted > console.width:  # a file has no width
        console = Console(highlight=False, soft_wrap=True, width=wanted)
    console.print("", shown)


def table(found: Comparison, name: FigureName, errors: bool = True) -> Table:
    """Rows: process and solver; columns: evaluations; the best of each bold."""
    against = found.against
    shown = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        title=(
            f"{WORDS[name]} of {found.samples:,} samples against {against.real:,} of "
            f"{against.data} {against.split}, by network evaluations"
        ),
        title_justify="left",
        caption="\n".join(_caption(found, name, errors)),
        caption_justify="left",
    )
    shown.add_column("", no_wrap=True)
    for count in found.evaluations:
        shown.add_column(f"{count:,}", justify="right", no_wrap=True)
    several = len({process for process, _ in found.lines}) > 1
    before = ""
    for (process, solver), points in found.lines.items():
        if several and process != before:
            shown.add_row(f"[bold]{process}[/bold]")
        before = process
        cells = {point.evaluations: point for point in points}
        row = [_cell(found, cells.get(count), name, errors) for count in found.evaluations]
        shown.add_row(f"  {solver}" if several else solver, *row)
    return shown


def _caption(found: Comparison, name: FigureName, errors: bool) -> Iterator[str]:
    """What the numbers are, and what nothing is better than."""
    against, floor = found.against, found.against.floor
    yield ("± standard error over samples; " if errors else "") + "bold: the best of its column"
    if against.title:
        yield f"features: {against.title}"
    if floor is not None:
        few = against.floor_samples < found.samples and name not in MORE
        held = f"{against.floor_samples:,} of {against.floor_split}"
        worse = "; fewer, so that it looks worse than it is" if few else ""
        yield f"new data: {floor.shown(name)} ({held} in place of samples{worse})"


def _cell(found: Comparison, point: Point | None, name: FigureName, errors: bool) -> str:
    if point is None:
        return ""
    if point.figures is None or point.value(name) is None:
        return "—"
    text = _shown(point.figures, name, errors)
    return f"[bold]{text}[/bold]" if found.best(point.evaluations, name) is point else text


def _shown(figures: Figures, name: str, errors: bool) -> str:
    text = figures.shown(name)
    return text if errors else text.split(" ±")[0]


def notes(found: Comparison) -> list[str]:
    """What is missing from a table, and why."""
    lines = []
    for one in found.left_out:
        count = "" if one.evaluations is None else f" with {one.evaluations} evaluations"
        lines.append(f"left out: {one.solver}{count}: {one.why}")
    for point in found.points:
        if point.note:
            where = f"{point.process}, {point.solver}, {point.made} evaluations"
            lines.append(f"— {where}: {point.note}")
    return lines


def _known(name: str) -> str:
    if name not in VARIANTS:
        close = difflib.get_close_matches(name, VARIANTS, n=1)
        hint = f" Perhaps you meant {close[0]}." if close else ""
        raise ValueError(f"--solver {name}; expected some of {', '.join(VARIANTS)}.{hint}")
    return name
