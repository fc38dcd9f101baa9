"""What a run would take, before it is started: parameters, memory, time.

Memory is counted, not guessed: weights, gradients, moments and averages by their sizes, activations
by what a forward pass of a few examples keeps for the backward pass. Time is that of a few steps on
this machine, on a copy of the model.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ornstein.data import Dataset
from ornstein.ledger import processes
from ornstein.score import ScoreModel
from ornstein.training.distribution import share
from ornstein.training.loop import Job
from ornstein.training.loss import Loss
from ornstein.training.options import Training

FEW = 16  # examples by which activations are counted
WHOLE = 4 * 2**30  # bytes of activations up to which whole steps are tried
TRIALS = 3


@dataclass(frozen=True)
class Estimate:
    """Of one process of the run."""

    network: int  # parameters
    process: int
    state_bytes: int  # weights, gradients, moments, averages
    data_bytes: int  # the training split, where it is kept on the device
    activation_bytes: int  # of one part of a batch
    seconds_per_step: float  # not compiled
    trial: int  # examples of the steps it was measured with

    @property
    def memory(self) -> int:
        """Bytes of tensors in all."""
        return self.state_bytes + self.data_bytes + self.activation_bytes


def estimate(model: ScoreModel, data: Dataset, training: Training) -> Estimate:
    """Count and measure; the model is left as it is."""
    model = copy.deepcopy(model)
    micro = share(training.batch, training.accumulate)
    few = min(FEW, micro)
    activations = _activations(model, data, training, few) * micro // few
    world = processes()[1]
    batch = training.batch if activations <= WHOLE else few * world
    parts = training.accumulate if batch == training.batch else 1
    seconds = _seconds(model, data, replace(training, batch=batch, accumulate=parts))
    copies = 4 + (1 if training.ema > 0 else 0)  # weight, gradient, two moments, average
    return Estimate(
        network=_count(model.network),
        process=_count(model.process),
        state_bytes=copies * sum(p.numel() * p.element_size() for p in model.parameters()),
        data_bytes=data.train.x.numel() * data.train.x.element_size(),
        activation_bytes=activations,
        seconds_per_step=seconds * training.batch / batch,
        trial=batch,
    )


def _activations(model: ScoreModel, data: Dataset, training: Training, few: int) -> int:
    """Bytes that a forward pass of a few examples keeps."""
    loss = Loss(model, training.objective, training.seed, training.precision == "bfloat16")
    device = model.process.device
    x = data.train.x[torch.arange(few) % len(data.train)].to(device)
    kept = _Kept(model)
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        loss(x, torch.arange(few, device=device))[0].backward()
    model.zero_grad(set_to_none=True)
    return kept.bytes


def _seconds(model: ScoreModel, data: Dataset, training: Training) -> float:
    """Of a step, by the fastest of a few."""
    job = Job(model, data, replace(training, compile="off"), None, None)
    model.train()
    times = []
    for _ in range(1 + TRIALS):
        start = time.perf_counter()
        job.step()
        if model.process.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


class _Kept:
    """Counts what autograd keeps, each storage once, parameters apart."""

    def __init__(self, model: ScoreModel) -> None:
        self.seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in self.seen:
            self.seen.add(where)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
