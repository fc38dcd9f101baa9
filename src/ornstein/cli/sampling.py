"""`ornstein sample`: samples of a trained model as a picture, arrays, or a folder of pictures."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from rich.console import Console

from ornstein import viz
from ornstein.cli.opening import data_of, under
from ornstein.cli.reading import NoHint
from ornstein.cli.solving import Computing, Solving, progress
from ornstein.cli.words import of_time
from ornstein.files import write_arrays
from ornstein.ledger import processes
from ornstein.likelihood import OfPixels
from ornstein.sampling import sample
from ornstein.training.distribution import device_of, joined
from ornstein.training.opening import Which, open_model

HELP = """Sample from a trained model. Sample i is a function of the seed and of i alone.

examples:
  ornstein sample runs/digits-channel-vpsde
  ornstein sample runs/digits-channel-vpsde --process cld --steps 200 --out cld.png
  ornstein sample runs/digits-channel-vpsde --solver exponential --steps 20
  ornstein sample runs/digits-channel-vpsde --solver exponential --steps 9 --grid learned
  ornstein sample runs/mnist-channel-vpsde --n 10000 --out samples.npz
  ornstein sample runs/cifar10-channel-vpsde --n 50000 --precision bfloat16 --out samples.npz
  ornstein sample runs/mnist-channel-vpsde --n 100 --start 500 --seed 1 --out pictures/"""


@dataclass(frozen=True)
class Sample:
    """Sample from a trained model."""

    model: Annotated[str, tyro.conf.Positional]
    """Folder of a run or of a saved model."""
    n: int = 64
    """How many."""
    process: Annotated[str | None, NoHint] = None
    """Put a channel model under this process (default: its own)."""
    solving: Solving = field(default_factory=Solving)
    """How to go back."""
    seed: int = 0
    """Of all samples."""
    start: int = 0
    """Number of the first sample."""
    batch_size: Annotated[int | None, NoHint] = None
    """Samples at a time; they do not depend on it (default: 256, on CUDA what memory allows)."""
    which: Which = "best"
    """Of a run: its best checkpoint on validation, or its last."""
    out: Annotated[Path | None, NoHint] = None
    """A .png grid, an .npz file, or a folder for one picture each (default: samples in the run)."""
    data: Annotated[str | None, NoHint] = None
    """For --grid learned: other data than the model was trained on."""
    data_folder: Annotated[str | None, NoHint] = None
    """For --grid learned: where the files of a named set are."""
    device: Annotated[str | None, NoHint] = None
    """cpu, cuda or cuda:N (default: CUDA where there is one)."""
    computing: Computing = field(default_factory=Computing)
    """How the network is asked."""

    def run(self) -> None:
        device = device_of(self.device)
        console = Console(highlight=False, soft_wrap=True)
        with joined(device):
            opened = open_model(self.model, self.which, device)
            model = opened.model if self.process is None else under(opened.model, self.process)
            out = self.out or self._default(opened.run or opened.folder, model.process.name)
            likelihood = model.likelihood
            levels = likelihood.pixels.levels if isinstance(likelihood, OfPixels) else None
            layout = getattr(model.network, "layout", None)
            images = levels is not None and (layout is None or len(layout.shape) == 3)
            self._check(out, images)
            load = partial(data_of, opened, self.data, self.data_folder)
            if self.solving.grid == "learned" and processes()[0] == 0:
                console.print("learning the times …", style="dim")
            solver = self.solving.fitted(model, lambda: load().data)
            if processes()[0] == 0:
                rows = self.n * (solver.evaluations or 1)
                self.computing.announce(console, device, rows)
            began = time.perf_counter()
            with progress(console, self.n, processes()[1]) as told:
                found = sample(
                    model,
                    self.n,
                    solver,
                    seed=self.seed,
                    start=self.start,
                    batch_size=self.batch_size,
                    callback=told if console.is_terminal else None,
                    compile=self.computing.compile,
                    precision=self.computing.precision,
                ).cpu()
            seconds = time.perf_counter() - began
            if processes()[0] != 0:
                return
            self._write(found, levels, out)
        console.print(
            f"{self.n} samples under {model.process.name} in {of_time(seconds)} "
            f"({self.n / seconds:,.1f}/s)"
        )
        console.print(f"wrote {out}", style="dim")

    def _default(self, folder: Path, process: str) -> Path:
        parts = [process.replace(" ", "-"), self.solving.title(), self.computing.title]
        for name in ("seed", "start"):
            value = getattr(self, name)
            parts.append(f"{name}{value}" if value else "")
        return folder / "samples" / ("-".join(part for part in parts if part) + ".png")

    def _check(self, out: Path, images: bool) -> None:
        """Before the work, so that a name that can't be used costs nothing."""
        if self.solving.grid != "learned" and (self.data, self.data_folder) != (None, None):
            raise ValueError("--data and --data-folder are for --grid learned; leave them out.")
        if out.suffix not in (".png", ".npz", ""):
            raise ValueError(
                f"--out {out} ends with {out.suffix!r}; expected .png for a grid, .npz for arrays, "
                "or a folder's name for one picture each."
            )
        if out.suffix == "" and not images:
            raise ValueError(f"--out {out} is a folder of pictures; expected .npz for vectors.")
        (out.parent if out.suffix else out).mkdir(parents=True, exist_ok=True)

    def _write(self, found: torch.Tensor, levels: int | None, out: Path) -> None:
        if out.suffix == ".npz":
            numbers = np.arange(self.start, self.start + self.n)
            write_arrays(out, {"samples": found.numpy(), "number": numbers, "seed": self.seed})
        elif out.suffix == ".png":
            viz.picture(found, levels, out)
        else:
            for i, one in enumerate(found, self.start):
                array = viz.grid(one.unsqueeze(0), levels or 256, gap=0, scale=1)
                viz.save_image(array, out / f"{self.seed}-{i:06d}.png")
