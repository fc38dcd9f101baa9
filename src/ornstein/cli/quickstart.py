"""`ornstein quickstart`: the whole of it on embedded data, in a few minutes on two cores."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

import ornstein
from ornstein import Process, viz
from ornstein.cli.evaluating import Row, pairing, table
from ornstein.cli.training import run
from ornstein.cli.words import of_time
from ornstein.data import Dataset
from ornstein.evaluation import Evaluation, evaluate
from ornstein.files import write_arrays, write_text
from ornstein.sampling import Ancestral, sample
from ornstein.score import Parametrisation, ScoreModel
from ornstein.training import Experiment, preset
from ornstein.training.choices import Diffusing
from ornstein.training.opening import open_model
from ornstein.training.reading import read_runs

HELP = """Train on real 8×8 digits that come with the package, evaluate, sample, and write a report.

One channel denoiser is trained and put under five diffusions; then VPSDE and a learned process are
trained the paper's way and compared. Repeating the command goes on where it was.

examples:
  ornstein quickstart
  ornstein quickstart --out runs/digits --seed 1"""

DRAWS = 16
TITLE = "One denoiser, every diffusion"
INTRO = (
    "One ordinary denoiser was trained on 8×8 digits and evaluated under five diffusions: its "
    "bound does not depend on the process, beyond errors. Then two joint models, in which the "
    "network sees and predicts all variables, were trained with equal budgets: VPSDE, and a "
    "process whose matrices Q and D were learned with the network. All figures are upper bounds "
    "on bits per dimension of the test images, without dequantisation."
)


@dataclass(frozen=True)
class Quickstart:
    """Train, evaluate and sample on embedded digits."""

    steps: int = 2000
    """Of the channel model; the joint ones get half of it each."""
    draws: int = DRAWS
    """Times per test image at which a bound is looked at."""
    seed: int = 0
    """Of everything."""
    out: Path = Path("runs/quickstart")
    """Folder for the runs, pictures and the report."""

    def run(self) -> None:
        if self.steps < 2 or self.draws < 1:
            raise ValueError(
                f"--steps {self.steps} --draws {self.draws}; expected at least 2 steps and 1 draw."
            )
        began = time.perf_counter()
        self.out.mkdir(parents=True, exist_ok=True)
        console = Console(highlight=False, soft_wrap=True)
        data = preset("digits").data.load()
        channel = self._trained("channel", "vpsde", self.steps, data, console)
        names = ("vpsde", "cld", "alda", "malda")
        zoo = [channel, *(channel.with_process(Diffusing(name).build()) for name in names[1:])]
        zoo.append(channel.with_process(_random(self.seed)))
        rows = self._evaluated("channel", zoo, data, console)
        samples = self._sampled("channel", zoo, data, console)
        rivals = [
            self._trained("joint", name, self.steps // 2, data, console)
            for name in ("vpsde", "learned-1")
        ]
        first: Row | None = None
        for model in rivals:
            folder = f"joint-{model.process.name}"
            rows += self._evaluated(folder, [model], data, console, first)
            first = first or rows[-1]
            self._sampled(folder, [model], data, console)
        console.print(table(rows))
        self._overview(rows, samples, data)
        report = self._report()
        console.print(f"\n{of_time(time.perf_counter() - began)}; wrote {report}")

    def _trained(
        self,
        parametrisation: Parametrisation,
        process: str,
        steps: int,
        data: Dataset,
        console: Console,
    ) -> ScoreModel:
        """A model trained for so many steps, in a run of its own."""
        experiment = self._experiment(parametrisation, process, steps)
        name = "channel" if parametrisation == "channel" else f"joint-{process}"
        run(experiment, experiment.build(data), data, self.out / name)
        return open_model(self.out / name, "last").model

    def _experiment(self, parametrisation: Parametrisation, process: str, steps: int) -> Experiment:
        base = preset("digits")
        watch = replace(base.training.watch, sample_every=0, valid_every=max(1, steps // 2))
        return replace(
            base,
            process=replace(base.process, process=process),
            model=replace(base.model, parametrisation=parametrisation),
            training=replace(base.training, steps=steps, seed=self.seed, watch=watch),
        )

    def _evaluated(
        self,
        run_name: str,
        models: list[ScoreModel],
        data: Dataset,
        console: Console,
        first: Row | None = None,
    ) -> list[Row]:
        """The test split under each model, paired with the first."""
        rows: list[Row] = []
        folder = self.out / run_name / "evaluations"
        for model in models:
            name = model.process.name
            stem = f"test-{name}" + ("" if self.draws == DRAWS else f"-draws{self.draws}")
            with console.status(f"evaluating under {name} …"):
                found = evaluate(
                    model,
                    data.test.x,
                    draws=self.draws,
                    seed=self.seed,
                    folder=folder / stem,
                    quiet=True,
                )
            pair = None if first is None else pairing(first, found)
            row = Row(f"{model.parametrisation}, {name}", found, folder / f"{stem}.json", pair)
            more = {} if pair is None else {"pair": pair}
            found.save(row.file, split="test", which="last", data=data.describe(), **more)
            rows.append(row)
            first = first or row
        return rows

    def _sampled(
        self, run_name: str, models: list[ScoreModel], data: Dataset, console: Console
    ) -> dict[str, Tensor]:
        """A grid of samples from each."""
        samples = {}
        for model in models:
            name = model.process.name
            path = self.out / run_name / "samples" / f"{name}.png"
            kept = path.with_suffix(".npz")
            if kept.exists():  # by the same command, which was interrupted or is repeated
                with np.load(kept) as arrays:
                    samples[name] = torch.from_numpy(arrays["samples"])
                continue
            with console.status(f"sampling under {name} …"):
                samples[name] = sample(model, 48, Ancestral(60), seed=self.seed)
            viz.picture(samples[name], data.levels, path)
            write_arrays(kept, {"samples": samples[name].numpy()})
        return samples

    def _overview(self, rows: list[Row], samples: dict[str, Tensor], data: Dataset) -> None:
        """All results in one picture."""
        groups: dict[str, list[tuple[str, Evaluation]]] = {}
        titles = {
            "channel": f"one channel denoiser, {self.steps:,} steps",
            "joint": f"joint models, {self.steps // 2:,} steps each",
        }
        for row in rows:
            kind = titles[row.found.parametrisation]
            groups.setdefault(kind, []).append((row.found.process, row.found))
        shown = {f"channel, {name}": samples[name] for name in ("vpsde", "cld", "alda")}
        below = (
            f"8×8 digits, {len(data.test)} test images, discrete bound. "
            "The channel model was trained once and put under each process afterwards."
        )
        figure = viz.gallery(groups, shown, data.levels or 256, TITLE, below)
        viz.save(figure, self.out / "overview.png")

    def _report(self) -> Path:
        """One HTML file about all three runs."""
        folders = [self.out / name for name in ("channel", "joint-vpsde", "joint-learned-1")]
        text = viz.report(read_runs(folders), title="ornstein: quick start", intro=INTRO)
        path = self.out / "report.html"
        write_text(path, text)
        return path


def _random(seed: int) -> Process:
    """Three variables, a random skew Q and a random full D; its slowest mode is as VPSDE's."""
    generator = torch.Generator().manual_seed(seed + 1)
    raw = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator)
    Q, D = raw[0] - raw[0].mT, raw[1] @ raw[1].mT
    slowest = 2 * torch.linalg.eigvals(Q + D).real.min()
    return ornstein.Diffusion(Q / slowest, D / slowest, name="random")
