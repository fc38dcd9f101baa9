"""`ornstein evaluate`: bits per dimension with errors, under one process or many."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ornstein import truncation
from ornstein.cli.opening import data_of, under
from ornstein.cli.reading import NoHint
from ornstein.cli.solving import Computing
from ornstein.evaluation import Evaluation, evaluate
from ornstein.ledger import processes
from ornstein.likelihood import Discrete, Likelihood, OfPixels, Tweedie
from ornstein.ode import OdeEvaluation, evaluate_ode
from ornstein.score import ScoreModel
from ornstein.training.distribution import device_of, joined
from ornstein.training.opening import Opened, Which, open_model
from ornstein.work import USUAL

HELP = """Bits per dimension of trained models, with errors: a table and JSON files.

A model is the folder of a run, one of its checkpoints, or a saved model. What is interrupted goes
on when the command is repeated.

examples:
  ornstein evaluate runs/digits-channel-vpsde
  ornstein evaluate runs/digits-channel-vpsde --process vpsde cld alda malda
  ornstein evaluate runs/a runs/b --draws 16 --split test
  ornstein evaluate saved/model --data mnist --data-folder data --target-error 0.005
  ornstein evaluate runs/digits-channel-cld --ode --ode-limit 100 --ode-draws 4
  torchrun --nproc-per-node 8 -m ornstein evaluate runs/cifar10-channel-vpsde"""

Models = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL ...")]

Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]


@dataclass(frozen=True)
class Evaluate:
    """Bits per dimension of trained models."""

    models: Models
    """Folders of runs or saved models."""
    process: Names = ()
    """Processes to put a channel model under: presets, learned-N, learned-PRESET, or runs (default:
    its own)."""
    split: Literal["test", "valid", "train"] = "test"
    """Which examples."""
    which: Which = "best"
    """Of a run: its best checkpoint on validation, or its last."""
    bound: Literal["own", "discrete", "tweedie"] = "own"
    """Which bound on log P of pixels; own is the one that was trained."""
    draws: int = 8
    """Times per example; with --target-error in passes of so many."""
    target_error: Annotated[float | None, NoHint] = None
    """Go on until the error from draws alone, in bits/dim, is no larger."""
    limit: Annotated[int | None, NoHint] = None
    """Only so many examples, from the first."""
    batch_size: Annotated[int | None, NoHint] = None
    """Examples times draws at a time; the result does not depend on it (default: 256, on CUDA what
    memory allows)."""
    fixed_time: Annotated[float | None, NoHint] = None
    """Truncate at this time (default: as the model was trained)."""
    noise_level: Annotated[float | None, NoHint] = None
    """Truncate where x is known to this standard error instead."""
    seed: int = 0
    """Of times and noise."""
    ode: bool = False
    """Bits per dimension of the probability flow, too, by an ODE solver."""
    ode_draws: int = 1
    """Of the noise for the flow, weighed by importance."""
    ode_limit: Annotated[int | None, NoHint] = None
    """Only so many examples for the flow, from the first (default: those of the bound)."""
    data: Annotated[str | None, NoHint] = None
    """Other data than the model was trained on."""
    data_folder: Annotated[str | None, NoHint] = None
    """Where the files of a named set are."""
    out: Annotated[Path | None, NoHint] = None
    """Folder for the results (default: evaluations in the run, or in the model's folder)."""
    device: Annotated[str | None, NoHint] = None
    """cpu, cuda or cuda:N (default: CUDA where there is one)."""
    computing: Computing = field(default_factory=Computing)
    """How the network is asked."""

    def run(self) -> None:
        device = device_of(self.device)
        if not self.models:
            raise ValueError("no model was named; expected the folder of a run or a saved model.")
        if not self.ode and (self.ode_draws != 1 or self.ode_limit is not None):
            raise ValueError(
                "--ode-draws and --ode-limit are about the probability flow; add --ode, or leave "
                "them out."
            )
        for name, value in (("--ode-draws", self.ode_draws), ("--ode-limit", self.ode_limit)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}; expected a whole number ≥ 1.")
        rows: list[Row] = []
        with joined(device):
            for path in self.models:
                rows += self._evaluated(open_model(path, self.which, device))
            if processes()[0] == 0:
                Console().print(table(rows))

    def _evaluated(self, opened: Opened) -> list[Row]:
        source = data_of(opened, self.data, self.data_folder)
        data, x = source.data, getattr(source.data, self.split).x
        if source.other and opened.data is not None and processes()[0] == 0:
            print(f"{data.name!r} is other data than {opened.name} was trained on")
        if not len(x):
            raise ValueError(f"{data.name!r} has no {self.split} split; choose another --split.")
        folder = self.out or (opened.run or opened.folder) / "evaluations"
        rows: list[Row] = []
        how, work = self.computing, len(x[: self.limit]) * self.draws
        if processes()[0] == 0:
            console = Console(highlight=False, soft_wrap=True)
            how.announce(console, opened.model.process.device, work)
        for name in self.process or ("own",):
            model = under(opened.model, name)
            title = model.process.name if name == "own" else name
            title = f"{opened.name}, {title}" if len(self.models) > 1 else title
            stem = self._stem(opened, model, name, data.name if source.other else "")
            found = evaluate(
                model,
                x,
                draws=self.draws,
                target_error=self.target_error,
                likelihood=self._likelihood(model),
                truncation=truncation.chosen(self.noise_level, self.fixed_time),
                limit=self.limit,
                batch_size=self.batch_size,
                seed=self.seed,
                folder=folder / stem,
                quiet=True,
                compile=how.compile,
                precision=how.precision,
            )
            pair = pairing(rows[0], found) if rows else None
            ode = None
            if self.ode:
                about = data.name if source.other else ""
                place = folder / self._stem(opened, model, name, about, flow=True)
                ode = self._by_flow(model, x, title, place)
            row = Row(title, found, folder / f"{stem}.json", pair, ode)
            more: dict[str, Any] = {"asked": name, "split": self.split}
            more |= {"which": self.which, "step": opened.step}
            more["data"] = data.describe()
            if pair is not None:
                more["pair"] = pair
            if ode is not None:
                more["ode"] = {**ode.to_dict(), "difference": against(ode, found)}
            if processes()[0] == 0:
                found.save(row.file, **more)
            rows.append(row)
        return rows

    def _by_flow(self, model: ScoreModel, x: Tensor, title: str, folder: Path) -> OdeEvaluation:
        """The same by the probability flow; says before what it costs."""
        return evaluate_ode(
            model,
            x,
            draws=self.ode_draws,
            likelihood=self._likelihood(model),
            limit=self._flow_limit(),
            batch_size=USUAL if self.batch_size is None else self.batch_size,
            seed=self.seed,
            folder=folder,
            on_cost=lambda cost: print(f"{title}, probability flow: {cost.line}"),
            quiet=True,
        )

    def _flow_limit(self) -> int | None:
        """The flow is paired with the bound, so that it can't have more examples."""
        limits = [limit for limit in (self.limit, self.ode_limit) if limit is not None]
        return min(limits, default=None)

    def _stem(
        self, opened: Opened, model: ScoreModel, name: str, data: str, flow: bool = False
    ) -> str:
        """The name of a result's files: what it is about."""
        own = model.process.name if name == "own" else Path(name).name
        parts = [data, self.split, own, "" if self.bound == "own" else self.bound]
        parts.append("" if opened.step is None else f"step{opened.step}")
        usual = {field.name: field.default for field in fields(self)}
        chosen: dict[str, float | None]
        chosen = {"draws": self.draws, "limit": self.limit, "seed": self.seed}
        if not flow:
            chosen |= {"fixed_time": self.fixed_time, "noise_level": self.noise_level}
        if flow:
            parts.append("ode")
            chosen |= {"draws": self.ode_draws, "limit": self._flow_limit()}
            usual["draws"] = usual["ode_draws"]
        elif self.computing.precision not in ("auto", "float32"):  # which are the same here
            parts.append(self.computing.precision)
        for option, value in chosen.items():  # other numbers are another evaluation
            parts.append("" if value == usual[option] else f"{option}{value}")
        parts.insert(0, opened.name if self.out is not None else "")
        return "-".join(re.sub(r"[^\w.]+", "-", part) for part in parts if part)

    def _likelihood(self, model: ScoreModel) -> Likelihood | None:
        if self.bound == "own":
            return None
        own = model.likelihood
        if not isinstance(own, OfPixels) or own.density:
            raise ValueError(
                f"--bound {self.bound} is about pixels, and this model is about {own!r}; leave "
                "--bound out."
            )
        kind = Discrete if self.bound == "discrete" else Tweedie
        return kind(own.pixels.levels, own.pixels.logit)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    found: Evaluation
    file: Path
    pair: dict[str, Any] | None
    ode: OdeEvaluation | None = None


def against(ode: OdeEvaluation, found: Evaluation) -> dict[str, Any]:
    """How the flow's figure differs from the bound's, on the same examples."""
    difference, error = ode.difference(found)
    known = None if math.isnan(error) else error
    return {"difference": difference, "standard_error": known}


def pairing(first: Row, other: Evaluation) -> dict[str, Any]:
    """The paired difference to the first of a table."""
    difference, error = other.difference(first.found)
    known = None if math.isnan(error) else error
    return {"against": first.file.stem, "difference": difference, "standard_error": known}


def table(rows: list[Row]) -> Table:
    """All results."""
    flows = any(row.ode is not None for row in rows)
    shown = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        caption=(
            "± standard error over examples and draws; draws: what more of them would remove\n"
            "prior: the part of bits/dim that no network can win back\n"
            "difference: to the first of its kind, on the same examples"
            + (
                "\nby the flow: likelihood of the ODE; difference: to the bound above it"
                if flows
                else ""
            )
        ),
        caption_justify="left",
    )
    shown.add_column("model", style="bold", overflow="fold", min_width=18)
    for column in ("bits/dim", "draws", "prior", "difference"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        found, pair = row.found, row.pair
        shown.add_row(
            row.name,
            f"{found.bits_per_dim:.4f}{_error(found.standard_error)}",
            _error(found.draw_error).strip() or "—",
            f"{found.prior:.4f}",
            "" if pair is None else f"{pair['difference']:+.4f}{_error(pair['standard_error'])}",
        )
        if row.ode is not None:
            apart = against(row.ode, found)
            shown.add_row(
                "  by the flow",
                f"{row.ode.bits_per_dim:.4f}{_error(row.ode.standard_error)}",
                "—",
                "",  # what it has there depends on the network
                f"{apart['difference']:+.4f}{_error(apart['standard_error'])}",
            )
    kinds = dict.fromkeys(_kind(row.found) for row in rows)
    kinds |= dict.fromkeys(_of_flow(row.ode) for row in rows if row.ode is not None)
    shown.title, shown.title_justify = "; ".join(kinds), "left"
    return shown


def _error(error: float | None) -> str:
    """With its sign, or nothing where it is not known."""
    return "" if error is None or math.isnan(error) else f" ± {error:.4f}"


def _kind(found: Evaluation) -> str:
    """What a figure is about."""
    about = ", of a density" if found.density else ""
    return f"{found.bound} bound{about}, {found.examples} examples × {found.draws} draws"


def _of_flow(ode: OdeEvaluation) -> str:
    """What a figure of the flow is about."""
    many = f" × {ode.draws} draws" if ode.draws > 1 else ""
    return f"flow: {ode.examples} examples{many}"
