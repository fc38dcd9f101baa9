"""`ornstein quality`: how near a model's samples are to data, beside what new data is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from ornstein.cli.opening import data_of, under
from ornstein.cli.reading import NoHint
from ornstein.cli.solving import Computing, Solving, progress
from ornstein.cli.words import of_time
from ornstein.data import Dataset, arrays
from ornstein.ledger import processes
from ornstein.quality import (
    WORDS,
    Features,
    Figures,
    Quality,
    cached_as,
    classifier_cost,
    cost,
    features_cost,
    inception,
    measure,
    usual_features,
)
from ornstein.quality.classifier import classes_of
from ornstein.quality.distances import NEIGHBOURS
from ornstein.quality.referring import MOST, OTHER, SplitName
from ornstein.sampling import sample
from ornstein.training.distribution import device_of, joined
from ornstein.training.opening import Opened, Which, open_model

HELP = """How near a model's samples are to data: Fréchet distance, kernel distance, precision and
recall in the features of a small classifier that is trained on the data's labels, and the sliced
Wasserstein distance. Beside each is the same figure for held-out data in place of the samples:
nothing is better than that. Needs no network; --fid adds FID and KID through torch-fidelity.

examples:
  ornstein quality runs/digits-channel-vpsde
  ornstein quality runs/mnist-channel-vpsde --n 5000 --solver exponential --steps 20
  ornstein quality runs/mnist-channel-vpsde --process cld --split test
  ornstein quality runs/digits-channel-vpsde --samples samples.npz
  ornstein quality runs/cifar10-channel-vpsde --n 10000 --fid --weights inception.pth"""

USUAL = 1000  # samples, where as many examples were held out


@dataclass(frozen=True)
class Measure:
    """How near samples are to data."""

    model: Annotated[str, tyro.conf.Positional]
    """Folder of a run or of a saved model."""
    n: Annotated[int | None, NoHint] = None
    """Samples (default: as many as there are held-out examples, at most 1000)."""
    samples: Annotated[Path | None, NoHint] = None
    """An .npz file that `ornstein sample` wrote, in place of new samples."""
    process: Annotated[str | None, NoHint] = None
    """Put a channel model under this process (default: its own)."""
    solving: Solving = field(default_factory=Solving)
    split: Literal["train", "valid", "test"] = "train"
    """What samples are compared with; train is usual, test can't be won by repeating examples."""
    features: Literal["auto", "classifier", "raw", "none"] = "auto"
    """What is compared: with auto a classifier's where there are labels, else vectors as they are,
    and of images only the sliced Wasserstein distance."""
    fid: bool = False
    """FID and KID too, in Inception features (needs ornstein[fidelity])."""
    weights: Annotated[Path | None, NoHint] = None
    """File with the weights of Inception, where there is no network to fetch them."""
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
    """A .json file for the result (default: quality in the run, or in the model's folder)."""
    cache: Annotated[Path | None, NoHint] = None
    """Folder of classifiers, trained once (default: ornstein in $XDG_CACHE_HOME or ~/.cache)."""
    device: Annotated[str | None, NoHint] = None
    """cpu, cuda or cuda:N (default: CUDA where there is one)."""
    computing: Computing = field(default_factory=Computing)
    """How the network is asked."""

    def run(self) -> None:
        device = device_of(self.device)
        console = Console(highlight=False, soft_wrap=True)
        self._check()
        with joined(device):
            opened = open_model(self.model, self.which, device)
            source = data_of(opened, self.data, self.data_folder)
            job = _Job.of(self, source.data, device)
            found = self._samples(opened, job, console)
            first_process = processes()[0] == 0
        if not first_process:
            return
        measured = job.measured(found, console)
        own = "" if not source.other else source.data.name
        file = self.out or self._default(opened, own, len(found))
        first, *more = measured
        record: dict[str, Any] = {quality.features: quality.to_dict() for quality in more}
        record |= {"which": self.which, "step": opened.step, "sampling": self._made(opened)}
        first.save(file, data_set=source.data.describe(), **record)
        console.print("", table(measured))
        console.print(f"wrote {file}", style="dim")

    def _check(self) -> None:
        """Before the work, so that a mistake costs nothing."""
        if self.out is not None and self.out.suffix != ".json":
            raise ValueError(f"--out {self.out}; expected a name that ends with .json.")
        if self.n is not None and self.n <= NEIGHBOURS:
            raise ValueError(f"--n {self.n}; expected more samples, at least {NEIGHBOURS + 1}.")
        if self.weights is not None and not self.fid:
            raise ValueError("--weights is for --fid; expected both, or neither.")
        if self.samples is not None and (self.process, self.solving) != (None, Solving()):
            raise ValueError(
                f"--samples {self.samples} are there already; expected no --process and no options "
                "of a solver. Leave out one or the other."
            )
        self.solving.chosen()

    def _made(self, opened: Opened) -> dict[str, Any]:
        """How the samples were made, for JSON."""
        if self.samples is not None:
            return {"file": str(self.samples)}
        solver = self.solving.chosen()
        return {
            "process": self._process(opened),
            "solver": repr(solver),
            "grid": self.solving.grid or solver.grid,
            "evaluations": solver.evaluations,
            "seed": self.seed,
            "precision": self.computing.precision,
        }

    def _process(self, opened: Opened) -> str:
        return opened.model.process.name if self.process is None else self.process

    def _samples(self, opened: Opened, job: _Job, console: Console) -> torch.Tensor:
        """From the file, or new ones; what everything will cost is printed first."""
        if self.samples is not None:
            found = self._read(self.samples)
            job.announce(len(found), console)
            return found
        model = opened.model if self.process is None else under(opened.model, self.process)
        solver, shape = self.solving.fitted(model, lambda: job.data), job.data.shape
        n = (min(USUAL, job.held) or USUAL) if self.n is None else self.n
        how = self.computing
        guess = cost(
            model, n, solver, shape=shape, batch_size=self.batch_size, precision=how.precision
        )
        if processes()[0] == 0:
            asked = "as many network evaluations as it takes"
            if guess.evaluations is not None and guess.seconds is not None:
                asked = f"{guess.evaluations:,} network evaluations each: {about(guess.seconds)}"
            console.print(f"{n:,} samples under {model.process.name}, {asked}")
            job.announce(n, console)
            how.announce(console, job.device, n * (guess.evaluations or 1))
        with progress(console, n, processes()[1]) as told:
            return sample(
                model,
                n,
                solver,
                seed=self.seed,
                shape=shape,
                batch_size=self.batch_size,
                callback=told if console.is_terminal else None,
                compile=how.compile,
                precision=how.precision,
            )

    def _read(self, path: Path) -> torch.Tensor:
        if path.suffix != ".npz" or not path.is_file():
            raise ValueError(
                f"--samples {path} is no .npz file; expected what `ornstein sample MODEL --out "
                "samples.npz` writes."
            )
        with arrays.opened(path) as file:
            if "samples" not in file.files:
                raise ValueError(
                    f"{path} holds {', '.join(file.files) or 'nothing'}; expected an array "
                    "'samples', as `ornstein sample` writes it."
                )
            found = torch.from_numpy(arrays.member(file, path, "samples"))
        if self.n is not None and len(found) < self.n:
            raise ValueError(f"{path} has {len(found)} samples; expected --n of at most so many.")
        return found[: self.n]

    def _default(self, opened: Opened, data: str, n: int) -> Path:
        """The name of the result: what it is about."""
        if self.samples is not None:
            parts = [self.samples.stem]
        else:
            parts = [Path(self._process(opened)).name, self.solving.title()]
            parts += ["" if self.seed == 0 else f"seed{self.seed}", self.computing.title]
        parts = [data, self.split, *parts, "" if self.features == "auto" else self.features]
        parts += ["fid" if self.fid else "", "" if opened.step is None else f"step{opened.step}"]
        parts.append(f"n{n}")
        stem = "-".join(re.sub(r"[^\w.]+", "-", part) for part in parts if part)
        return (opened.run or opened.folder) / "quality" / f"{stem}.json"


@dataclass(frozen=True)
class _Job:
    """What is compared with what; made before any sample, so that what is missing costs nothing."""

    data: Dataset
    split: SplitName
    kind: Literal["classifier", "raw", "none"]
    extractor: Features | None  # for FID
    cache: Path
    device: torch.device

    @staticmethod
    def of(options: Measure, data: Dataset, device: torch.device) -> _Job:
        """As the options ask for."""
        if not len(getattr(data, options.split)):
            raise ValueError(
                f"{data.name!r} has no {options.split} split; expected one. Choose another --split."
            )
        kind = usual_features(data) if options.features == "auto" else options.features
        if kind == "classifier":
            classes_of(data)
        extractor = inception(data, options.weights, device) if options.fid else None
        return _Job(data, options.split, kind, extractor, options.cache or cache_folder(), device)

    @property
    def held(self) -> int:
        """Examples that were held out."""
        return len(getattr(self.data, OTHER[self.split]))

    def announce(self, n: int, console: Console) -> None:
        """What the figures will cost."""
        known = (self.cache / cached_as(self.data, 0)).exists()
        if self.kind == "classifier" and not known:
            seconds = classifier_cost(self.data, self.device)
            console.print(f"a classifier of {self.data.name} is trained, once: {about(seconds)}")
        if self.extractor is not None:
            images = min(len(getattr(self.data, self.split)), MOST) + n + min(self.held, n)
            seconds = features_cost(self.extractor, self.data.train.x, images, self.device)
            console.print(f"Inception features of {images:,} images: {about(seconds)}")

    def measured(self, samples: torch.Tensor, console: Console) -> list[Quality]:
        """By the features that were asked for, and by Inception's."""
        kinds = (self.kind,) if self.extractor is None else (self.kind, self.extractor)
        with console.status("measuring …") as status:
            return [
                measure(
                    samples,
                    self.data,
                    each,
                    split=self.split,
                    folder=self.cache,
                    device=self.device,
                    tell=lambda text: status.update(f"measuring … {text}"),
                )
                for each in kinds
            ]


def about(seconds: float) -> str:
    """A guess, in words."""
    return "less than a second" if seconds < 0.5 else f"about {of_time(seconds)}"


def cache_folder() -> Path:
    """Where classifiers are kept: they depend on the data alone, and serve all runs."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ornstein"


def table(measured: list[Quality]) -> Table:
    """All figures; of Inception's those that have names of their own."""
    first = measured[0]
    shown = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
        title=f"{first.samples:,} samples against {first.real:,} of {first.data} {first.split}",
        title_justify="left",
        caption="\n".join(_notes(measured)),
        caption_justify="left",
    )
    shown.add_column("", style="bold")
    shown.add_column("samples", justify="right", no_wrap=True)
    shown.add_column("new data", justify="right", no_wrap=True)
    for quality in measured:
        for name, word in WORDS.items():
            if quality.features == "inception":
                if name == "sliced_wasserstein":  # it is about the data itself, and there already
                    continue
                word = {"frechet": "FID", "kernel_distance": "KID"}.get(name, f"{word}, Inception")
            if getattr(quality.figures, name) is not None:
                shown.add_row(word, quality.figures.shown(name), _floor(quality.floor, name))
    return shown


def _floor(floor: Figures | None, name: str) -> str:
    return "—" if floor is None else floor.shown(name)


def _notes(measured: list[Quality]) -> list[str]:
    first = measured[0]
    notes = ["± standard error over samples; distances: less is better, 1 is best for the others"]
    if first.floor is None:
        notes.append(f"new data: {first.floor_split} has too few examples")
    else:
        few = first.floor_samples < first.samples
        notes.append(
            f"new data: {first.floor_samples:,} examples of {first.floor_split} in place of samples"
            + (
                "; fewer, so that its distances look larger than they are"
                if few
                else "; as good as it gets"
            )
        )
    notes += [f"features: {quality.title}" for quality in measured if quality.title]
    return notes
