"""`ornstein train`: from options to a trained model, in a folder that can be gone on with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console

from ornstein import viz
from ornstein.cli.live import Live
from ornstein.cli.reading import NoHint
from ornstein.cli.words import of_bytes, of_count, of_time
from ornstein.data import NAMES, Dataset
from ornstein.ledger import processes
from ornstein.quality import cost
from ornstein.sampling import Exponential
from ornstein.score import ScoreModel
from ornstein.training import Experiment, fit, preset
from ornstein.training.checkpoints import Checkpoints
from ornstein.training.distribution import device_of, joined
from ornstein.training.estimating import estimate
from ornstein.training.keeping import run_record
from ornstein.training.run import Run
from ornstein.training.tensorboard import Events

HELP = """Train a model. Repeating a command goes on with its run; other options are refused.

data:      digits, mnist, fashion_mnist, cifar10, imagenet32; points in the plane: moons, rings,
           checkerboard, swissroll, mixture; files and folders of your own
processes: vpsde, subvpsde, vesde, cld, psld, alda, malda, learned-1, learned-2, …, own;
           learned-cld, learned-alda, …, which start from a preset

What is left out is taken from a preset for the data set, or from a file (--config), which may be
the config.json of another run, or from a recipe (--recipe), such as those of the paper's tables.

examples:
  ornstein train
  ornstein train --data mnist --data-folder data --steps 2000
  ornstein train --data mnist --process learned-1 --parametrisation joint --out runs/learned
  ornstein train --data photos/ --size 32 --process cld --dry-run
  ornstein train --recipe mnist/joint-learned-1 --data-folder data
  ornstein train --data digits --process own --Q '[[0,-1],[1,0]]' --D '[[0,0],[0,1]]'
  torchrun --nproc-per-node 8 -m ornstein train --data cifar10 --batch 512"""

Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class Train:
    """Train a model."""

    experiment: Experiment = field(default_factory=lambda: preset("digits"))
    out: Annotated[Path | None, NoHint] = None
    """Folder of the run (default: runs/DATA-PARAMETRISATION-PROCESS)."""
    config: Annotated[Path | None, NoHint] = None
    """A JSON file with options; those on the command line come on top."""
    recipe: Annotated[str | None, NoHint] = None
    """A recipe, by its name (mnist/channel, …) or path; options come on top here, too."""
    smoke: Flag = False
    """Of a recipe: in miniature, to see that it runs."""
    dry_run: Flag = False
    """Print what would be done, with parameters, memory and time, and stop."""
    device: Annotated[str | None, NoHint] = None
    """cpu, cuda or cuda:N (default: CUDA where there is one)."""
    tensorboard: Flag = False
    """Write TensorBoard events to the run, too (needs the extra: ornstein[tensorboard])."""

    @property
    def folder(self) -> Path:
        """Of the run."""
        if self.out is not None:
            return self.out
        if self.recipe is not None:
            name = self.recipe.removesuffix(".toml").replace("/", "-").strip("-.")
            return Path("runs") / (f"{name}-smoke" if self.smoke else name)
        data = Path(self.experiment.data.data).stem
        model, process = self.experiment.model, self.experiment.process
        return Path("runs") / f"{data}-{model.parametrisation}-{process.process}"

    def run(self) -> None:
        if self.smoke and self.recipe is None:
            raise ValueError("--smoke is for a --recipe; give one, or fewer --steps.")
        device = device_of(self.device)
        experiment = _anywhere(self.experiment)
        data = experiment.data.load()
        with joined(device):
            model = experiment.build(data, device)
            if self.dry_run:
                self._describe(experiment, model, data, device)
                return
            run(experiment, model, data, self.folder, self.tensorboard)

    def _describe(
        self, experiment: Experiment, model: ScoreModel, data: Dataset, device: torch.device
    ) -> None:
        """What would happen."""
        training = self.experiment.training
        console = Console(highlight=False, soft_wrap=True)
        record = run_record(model, data, training, experiment.to_record())
        known = Run(self.folder).check(record)
        found = estimate(model, data, training)
        done = max((step for step, _ in Checkpoints(self.folder / "checkpoints").all()), default=0)
        seconds = found.seconds_per_step * max(training.steps - done, 0)
        lines = {
            "run": f"{self.folder} ({_standing(known, done, training.steps)})",
            "data": f"{data.name}: {len(data.train):,} for training, {len(data.valid):,} for "
            f"validation, {len(data.test):,} for test; shape {data.shape}",
            "process": f"{model.process.name}, K = {model.process.n_vars}"
            + (f", {found.process} parameters to learn" if found.process else ""),
            "model": f"{model.parametrisation}, {model.likelihood!r}"
            + ("" if model.histogram is None else ", begins with the histogram of the data")
            + (", sees waves of one and two bins" if model.features else ""),
            "network": f"{type(model.network).__name__}, {found.network:,} parameters",
            "training": f"{training.steps:,} steps of {training.batch}, "
            f"{training.steps * training.batch / max(len(data.train), 1):.1f} epochs, "
            f"{training.objective.objective}",
            "memory": f"{of_bytes(found.memory)}: {of_bytes(found.state_bytes)} weights, moments, "
            f"{of_bytes(found.activation_bytes)} activations, {of_bytes(found.data_bytes)} data",
            "time": f"{of_time(seconds)} on {device} "
            f"({1e3 * found.seconds_per_step:.0f} ms a step, tried with {found.trial} examples"
            + (", not compiled; compiled it is faster)" if training.compiled_on(device) else ")"),
        }
        for name, text in lines.items():
            console.print(f"{name:9s} {text}")
        console.print("nothing was done (--dry-run)", style="dim")


def _standing(known: bool, done: int, total: int) -> str:
    if not known:
        return "new"
    return "finished" if done >= total else f"goes on after step {done:,}"


def _anywhere(experiment: Experiment) -> Experiment:
    """The same with the full path of its data, so that the run can be used from anywhere."""
    data, path = experiment.data, Path(experiment.data.data)
    if data.data in NAMES or not path.exists():
        return experiment
    return replace(experiment, data=replace(data, data=str(path.resolve())))


def run(
    experiment: Experiment,
    model: ScoreModel,
    data: Dataset,
    folder: Path,
    tensorboard: bool = False,
) -> None:
    """Train with a live line and sample grids."""
    first = processes()[0] == 0
    steps = fit(model, data, experiment.training, folder=folder, record=experiment.to_record())
    count = of_count(sum(p.numel() for p in model.network.parameters()))
    heading = f"{data.name}, {model.parametrisation}, {model.process.name}, {count}"
    writer = Events(folder / "tensorboard") if tensorboard and first else None
    if first and experiment.training.compiled_on(model.process.device):
        note = "compiling the first steps takes a minute or two (--compile off starts at once)"
        Console(highlight=False, soft_wrap=True).print(note, style="dim")
    if experiment.training.watch.quality_every:
        note = _price(experiment, model, data)
        if first:
            Console(highlight=False, soft_wrap=True).print(note, style="dim")
    with Live(heading, experiment.training.steps, quiet=not first) as live:
        for step in steps:
            live.show(step)
            if not first:
                continue
            if step.metrics is not None and writer is not None:
                writer.write(step)
            if step.samples is not None:
                path = folder / "samples" / f"step-{step.number:08d}.png"
                viz.picture(step.samples, data.levels, path, data.valid.x)
    if writer is not None:
        writer.close()


def _price(experiment: Experiment, model: ScoreModel, data: Dataset) -> str:
    """What looking at the samples' quality will cost."""
    watch, steps = experiment.training.watch, experiment.training.steps
    solver, looks = Exponential(watch.quality_steps), -(-steps // watch.quality_every)
    guess = cost(model, watch.quality_samples, solver, shape=data.shape)
    each = "" if guess.seconds is None else f": about {of_time(guess.seconds)} each"
    return (
        f"quality of {watch.quality_samples:,} samples at {guess.evaluations} network evaluations, "
        f"{looks:,} times{each}"
    )
