"""What a run would take, before it is started: parameters, memory, time.

Memory is counted, not guessed: weights, gradients, moments and averages by their sizes, activations
by what a forward pass of a few examples keeps for the backward pass. Time is that of a few such
steps on this machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.data import Dataset
from ornstein.score import ScoreModel
from ornstein.training.distribution import share
from ornstein.training.loss import Loss
from ornstein.training.options import Training

FEW = 16  # examples of the trial


@dataclass(frozen=True)
class Estimate:
    """Of one process of the run."""

    network: int  # parameters
    process: int
    state_bytes: int  # weights, gradients, moments, averages
    data_bytes: int  # the training split, where it is kept on the device
    activation_bytes: int  # of one part of a batch
    seconds_per_step: float  # not compiled
    trial: int  # examples it was measured with

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return self.state_bytes + self.data_bytes + self.activation_bytes


def estimate(model: ScoreModel, data: Dataset, training: Training) -> Estimate:
    """Count and measure; the model's weights are left as they are."""
    micro = share(training.batch, training.accumulate)
    few = min(FEW, micro, len(data.train))
    device = model.process.device
    loss = Loss(model, training.objective, training.seed, training.precision == "bfloat16")
    x = data.train.x[:few].to(device)
    index = torch.arange(few, device=device)
    kept = _Kept(model)
    was_training = model.training
    model.train()
    try:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
            loss(x, index)[0].backward()
        seconds = min(_timed(loss, x, index) for _ in range(2))
    finally:
        model.train(was_training)
        model.zero_grad(set_to_none=True)
    copies = 4 + (1 if training.ema > 0 else 0)  # weight, gradient, two moments, average
    return Estimate(
        network=_count(model.network),
        process=_count(model.process),
        state_bytes=copies * sum(p.numel() * p.element_size() for p in model.parameters()),
        data_bytes=data.train.x.numel() * data.train.x.element_size(),
        activation_bytes=kept.bytes * micro // few,
        seconds_per_step=seconds * micro * training.accumulate / few,
        trial=few,
    )


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


def _timed(loss: Loss, x: Tensor, index: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    loss(x, index)[0].backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
