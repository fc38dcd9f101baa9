"""What is measured on which device: the real sizes on a GPU, small ones on a CPU.

Data are random pixels: how long a step takes does not depend on what they show.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ornstein.bench.counting import TRAINING, Cost, network_cost
from ornstein.bench.racing import Race, Tell, Work, race
from ornstein.data import Dataset, Split, load
from ornstein.training.experiment import Experiment, preset
from ornstein.training.loop import Job

GPU_BATCHES, CPU_BATCHES = (128, 512), (16,)
FOREVER = 10**9  # steps


@dataclass(frozen=True)
class Case:
    """Something to train."""

    name: str
    experiment: Experiment
    data: Dataset

    @property
    def batch(self) -> int:
        return self.experiment.training.batch

    @property
    def narrow(self) -> bool:
        return self.experiment.training.precision == "bfloat16"

    def under(self, process: str) -> Case:
        """The same as a joint model of another process."""
        known = replace(self.experiment.process, process=process)
        joint = replace(self.experiment.model, parametrisation="joint")
        return replace(self, experiment=replace(self.experiment, process=known, model=joint))

    def job(self, device: torch.device) -> Job:
        """A run that only steps: nothing is looked at in between, nothing is kept."""
        training = self.experiment.training
        watch = replace(training.watch, valid_every=0, sample_every=0, quality_every=0)
        training = replace(training, steps=FOREVER, watch=watch)
        model = self.experiment.build(self.data, device)
        stirred(model.network)
        return Job(model, self.data, training, None, None)


@dataclass(frozen=True)
class Setting:
    """Where and how thoroughly; the same for all parts."""

    device: torch.device
    quick: bool = False
    batches: tuple[int, ...] = ()
    until: float = float("inf")  # no race begins after this time
    tell: Tell = field(default=lambda text: None)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batches."""
        usual = GPU_BATCHES if self.cuda else CPU_BATCHES
        return self.batches or (usual[:1] if self.quick else usual)

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 7 if self.cuda else 5

    def out_of_time(self) -> bool:
        return time.monotonic() > self.until

    def race(
        self,
        works: dict[str, Work],
        budget: float | None = None,
        rounds: int | None = None,
        **options: Any,
    ) -> Race:
        """A race on this device."""
        usual = 0.3 if self.cuda else 0.1 if self.quick else 0.3
        warm = 5 if self.cuda else 2  # a step is captured after a few
        options = {"tell": self.tell, "until": self.until, "warm": warm, **options}
        return race(
            works,
            self.device,
            rounds or self.rounds,
            usual if budget is None else budget,
            **options,
        )

    def joint(self, batch: int) -> Case:
        """That network for two variables, under CLD."""
        return self.large(batch).under("cld")

    def large(self, batch: int) -> Case:
        """The network that time goes into."""
        if self.cuda:
            count = 10_000 if self.quick else 50_000
            return case("35.7 M U-Net, CIFAR-size", "cifar10", (count, 3, 32, 32), batch)
        if self.quick:
            return replace(self.digits(batch), name="0.2 M U-Net, digits")
        return case("1.1 M U-Net, MNIST-size", "mnist", (10_000, 1, 28, 28), batch)

    def small(self, batch: int | None = None, narrow: bool = True) -> Case:
        """The network of MNIST, on a GPU in bfloat16; for a look on a CPU that of the digits."""
        if self.quick and not self.cuda:
            return self.digits(batch or 16)
        batch = batch or (256 if self.cuda else 16)
        found = case("1.1 M U-Net, MNIST-size", "mnist", (10_000, 1, 28, 28), batch)
        if not (self.cuda and narrow):
            return found
        training = replace(found.experiment.training, precision="bfloat16")
        experiment = replace(found.experiment, training=training)
        return replace(found, name=f"{found.name}, bfloat16", experiment=experiment)

    def digits(self, batch: int = 64) -> Case:
        """What the quick start trains."""
        return Case("quick start, digits", _with_batch(preset("digits"), batch), load("digits"))


def case(name: str, known: str, shape: tuple[int, ...], batch: int) -> Case:
    """The experiment of a known data set, on random pixels of its shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    data = Dataset("random", Split(x), Split(x[:0]), Split(x[:0]), 256, "drawn")
    return Case(name, _with_batch(preset(known), batch), data)


def _with_batch(experiment: Experiment, batch: int) -> Experiment:
    return replace(experiment, training=replace(experiment.training, batch=batch))


def inputs_of(network: Any, device: torch.device) -> Callable[[int], tuple[Tensor, ...]]:
    """Images and log SNR as a U-Net of ours is given them, for so many examples."""
    layout = network.layout
    channels = layout.shape[0]
    lead = (layout.inputs // channels, channels)
    axes = (layout.inputs,) if layout.variables is None else lead

    def inputs(n: int) -> tuple[Tensor, ...]:
        x = torch.randn(n, *axes, *layout.shape[1:], device=device)
        return x, torch.linspace(-10, 10, n, device=device)

    return inputs


def cost_of(network: nn.Module, batch: int, narrow: bool, passes: int = TRAINING) -> Cost:
    """FLOPs and bytes of a U-Net of ours, forward and backward."""
    inputs = inputs_of(network, torch.device("cpu"))
    return network_cost(network, inputs, batch, 2 if narrow else 4, passes)


@torch.no_grad()
def stirred(network: Any) -> None:
    """Fresh networks have layers of zeros, and a GPU multiplies zeros faster than numbers."""
    generator = torch.Generator().manual_seed(0)
    for p in network.parameters():
        p.add_(0.01 * torch.randn(p.shape, generator=generator).to(p.device))


def weights(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def tidy(device: torch.device) -> None:
    """Give back what the last race held."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
