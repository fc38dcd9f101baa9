"""What goes on from step to step: weights, moments, means since the last line, the best so far.

All of it can be written to a checkpoint and restored, so that a run that was interrupted computes
what one would have that never was.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ornstein import sharing
from ornstein.training.average import Average
from ornstein.training.checkpoints import Checkpoint
from ornstein.training.loss import VALUES, Loss
from ornstein.training.options import Training
from ornstein.training.updating import Numbers

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class State:
    """The state of a run in memory."""

    def __init__(self, loss: Loss, average: Average, training: Training) -> None:
        self.loss, self.model, self.average, self.training = loss, loss.model, average, training
        self.step = 0
        self.best: dict[str, Any] | None = None
        self.saved = 0  # the step of the last checkpoint
        self.first: float | None = None  # the first mean of what is watched for divergence
        self.smallest = math.inf
        self.network = _trained(self.model.network, "network")
        self.process = _trained(self.model.process, "process")
        self.optimiser = self._optimiser()
        self.rates = [group["lr"] for group in self.optimiser.param_groups]
        device = self.model.process.device
        self.last = torch.zeros(len(VALUES), dtype=torch.float64, device=device)
        self.sums = torch.zeros(len(VALUES) + 2, dtype=torch.float64)  # of the steps that were read
        self.by_kernels = False  # whether Adam's are ours
        self.count = 0  # steps in `sums`
        self._window, self._window_count = self.sums.new_zeros(()), 0
        self.recent = math.nan
        self.checkpoint: Path | None = None  # the newest
        self._unread: list[Tensor] = []  # rows of steps, still on the device …
        self._recent: list[Tensor] = []  # … and tables of those not looked at yet
        self._before = 0.0  # seconds of earlier starts
        self.started()

    def _optimiser(self) -> torch.optim.Optimizer:
        options = self.training.optimiser
        groups: list[dict[str, Any]] = []
        if self.network:
            decay = {"lr": options.lr, "weight_decay": options.weight_decay}
            groups.append({"params": list(self.network.values()), **decay})
        if self.process:
            decay = {"lr": options.process_lr, "weight_decay": 0.0}
            groups.append({"params": list(self.process.values()), **decay})
        if not groups:
            raise ValueError(
                "neither the network nor the process has a parameter that requires a gradient; "
                "expected something to train."
            )
        kind = torch.optim.AdamW if options.optimiser == "adamw" else torch.optim.Adam
        return kind(groups, betas=options.betas, fused=True)

    # ---------------------------------------------------------------- a step

    def numbers(self) -> Numbers:
        """What is different in the next step."""
        factor = self.training.optimiser.factor(self.step, self.training.steps)
        rates = tuple(rate * factor for rate in self.rates)
        return Numbers(rates, self.step, self.average.part(self.step))

    def clip_and_step(self, numbers: Numbers) -> Tensor:
        """Clip the gradients of network and process, and use them; their norms: (groups,)."""
        options, optimiser = self.training.optimiser, self.optimiser
        most = options.clip if options.clip > 0 else math.inf
        norms = [
            nn.utils.clip_grad_norm_(group["params"], most) for group in optimiser.param_groups
        ]
        for group, rate in zip(optimiser.param_groups, numbers.rates, strict=True):
            group["lr"] = rate
        optimiser.step()
        return torch.stack([norm.detach().to(torch.float64) for norm in norms])

    def count_for_torch(self) -> None:
        """Let torch's Adam go on where the kernels were, which don't keep count."""
        if self.by_kernels:
            for moments in self.optimiser.state.values():
                moments["step"].fill_(float(self.step))
        self.by_kernels = False

    def rate(self, step: int) -> float:
        """The first learning rate, the network's if it is trained, at a step."""
        return self.rates[0] * self.training.optimiser.factor(step, self.training.steps)

    def heard(self, row: Tensor) -> None:
        """A step's VALUES and norms; nothing is read from the device until somebody asks."""
        self.last = row[: len(VALUES)]
        self._unread.append(row)
        self.count += 1
        self._window_count += 1

    def _read(self) -> None:
        """Fetch what the steps since the last time said, all at once, and add it up."""
        if not self._unread:
            return
        table = torch.stack(self._unread).cpu()
        self._unread = []
        self._recent.append(table)
        for values in table:
            self.sums += values
            self._window = self._window + values[0 if self._simple() else 2]  # loss, or diffusion

    def first_bad(self) -> tuple[int, Tensor] | None:
        """The first step since the last look with a loss or gradient that is no number."""
        self._read()
        if not self._recent:
            return None
        table = torch.cat(self._recent)
        bad = ~torch.cat([table[:, :1], table[:, len(VALUES) :]], 1).isfinite().all(1)
        if not bool(bad.any()):
            self._recent = []
            return None
        at = int(bad.nonzero()[0])
        return self.step - len(table) + at + 1, table[at, : len(VALUES)]

    def mean_loss(self) -> dict[str, float]:
        """Means since the last line, by name."""
        self._read()
        means = (self.sums / max(self.count, 1)).tolist()
        names = ("loss",) if self._simple() else VALUES[:4]
        return dict(zip(names, means, strict=False))

    def gradient_norms(self) -> dict[str, float]:
        """Mean norms of the gradients, before clipping, since the last line."""
        self._read()
        trained = (("network", self.network), ("process", self.process))
        names = [name for name, some in trained if some]
        means = (self.sums[len(VALUES) :] / max(self.count, 1)).tolist()
        return {f"gradient_{name}": value for name, value in zip(names, means, strict=False)}

    def ran_away(self, window: int, times: float) -> bool:
        """Whether the error's mean over the last steps is far above the smallest so far.

        Windows are of so many steps whatever is logged when: what is logged changes nothing.
        """
        if self._window_count < window:
            return False
        self._read()
        self.recent = (self._window / self._window_count).item()
        self._window, self._window_count = torch.zeros_like(self._window), 0
        first = self.first
        self.first = self.recent if first is None else first
        self.smallest = min(self.smallest, self.recent)
        return first is not None and self.recent > max(times * self.smallest, first) > 0

    def forget(self) -> None:
        """After a line of metrics."""
        self._read()
        self.sums.zero_()
        self.count = 0
        self._speed_from = time.monotonic(), self.step

    def _simple(self) -> bool:
        return not self.training.objective.bound

    # ---------------------------------------------------------------- time

    def started(self) -> None:
        """Begin to count time."""
        self._since = self.saved_at = time.monotonic()
        self._speed_from = self._since, self.step

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Something else than training: its time does not count for the speed."""
        began = time.monotonic()
        try:
            yield
        finally:
            at, step = self._speed_from
            self._speed_from = at + time.monotonic() - began, step

    def seconds(self) -> float:
        """Of training, over all starts."""
        return self._before + time.monotonic() - self._since

    def speed(self, batch: int) -> float:
        """Examples per second since the last line."""
        at, step = self._speed_from
        return (self.step - step) * batch / max(time.monotonic() - at, 1e-9)

    # ---------------------------------------------------------------- checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is a tensor, by name."""
        self._read()
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"times.{name}": value for name, value in self.loss.times.state_dict().items()}
        for name, parameter in {**self.network, **self.process}.items():
            moments = self.optimiser.state.get(parameter, {})
            for moment in MOMENTS:
                if moment in moments:
                    found[f"{moment}.{name}"] = moments[moment]
            if moments and self.by_kernels:  # which take it from the host, and don't keep count
                found[f"step.{name}"] = torch.full_like(moments["step"], float(self.step))
        found["sums"], found["plan"] = self.sums, self.model.process.plan()
        found["window"], found["last"] = self._window, self.last
        return {name: value.clone() for name, value in found.items()}

    def record(self) -> dict[str, Any]:
        """Everything else, for JSON."""
        return {
            "best": self.best,
            "count": self.count,
            "window": self._window_count,
            "first": self.first,
            "smallest": None if math.isinf(self.smallest) else self.smallest,
            "seconds": self.seconds(),
        }

    def restore(self, found: Checkpoint) -> None:
        """Go on from a checkpoint."""
        tensors, state = found.tensors, found.state
        own = {name[6:]: value for name, value in tensors.items() if name.startswith("model.")}
        try:
            self.model.load_state_dict(own)
        except RuntimeError as error:
            raise ValueError(
                f"{found.folder} is of another model ({error}); expected the network and the "
                "process of this run."
            ) from error
        times = {name[6:]: value for name, value in tensors.items() if name.startswith("times.")}
        self.loss.times.load_state_dict(times)
        for name, parameter in {**self.network, **self.process}.items():
            moments = {m: tensors[f"{m}.{name}"] for m in MOMENTS if f"{m}.{name}" in tensors}
            if moments:
                self.optimiser.state[parameter] = {
                    m: _laid_out(v, parameter) for m, v in moments.items()
                }
        if self.average.memory > 0:
            self.average.model.load_state_dict(sharing.read(found.folder).tensors)
        self.sums.copy_(tensors["sums"])
        self._window = tensors["window"].cpu()
        self.last = tensors["last"].to(self.last.device)
        self._window_count = state["window"]
        self.model.process.follow(tensors["plan"])
        self.step, self.count, self.best = found.step, state["count"], state["best"]
        self.first = state["first"]
        self.smallest = math.inf if state["smallest"] is None else state["smallest"]
        self.saved, self.checkpoint, self._before = found.step, found.folder, state["seconds"]

    # ---------------------------------------------------------------- explaining

    def explained(self, number: int, values: Tensor) -> str:
        """What went wrong at a step."""
        told = dict(zip(VALUES, values.tolist(), strict=True))
        line = f"step {number}: the loss is {told['loss']:g}, not a number to go on with"
        logsnr = told["worst_logsnr"]
        if self.training.objective.bound and math.isfinite(logsnr):
            line += f"; its largest error ({told['worst_error']:g} bits/dim) is at log SNR "
            line += f"{logsnr:.3f}{self._conditioning(logsnr)}"
        return line + ". Lower the learning rate, or clip more."

    def _conditioning(self, logsnr: float) -> str:
        """Where on the process's clock a log SNR is, and how its kernel is there."""
        process = self.model.process
        if any(not bool(p.isfinite().all()) for p in process.parameters()):
            return ", where the process itself is not finite any more"
        with torch.no_grad():
            try:
                s = process.time_of_noise(math.exp(-logsnr / 2))
                diagonal = process.transition(s).cholesky.diagonal(dim1=-2, dim2=-1)
            except ValueError as error:
                return f", where the kernel fails: {error}"
        worst = (diagonal.max() / diagonal.min()).item()
        return f", s = {s.item():.4g}, where the kernel's condition is {worst:.2g}"


def _trained(module: object, kind: str) -> dict[str, nn.Parameter]:
    """What of a module is trained, by name."""
    if not isinstance(module, nn.Module):
        return {}
    return {f"{kind}.{n}": p for n, p in module.named_parameters() if p.requires_grad}


def _laid_out(moment: Tensor, parameter: Tensor) -> Tensor:
    """A moment in its parameter's memory layout, which a fused optimiser takes for granted."""
    if moment.dim() == 0:
        return moment.to(parameter.device)
    return torch.empty_like(parameter, requires_grad=False).copy_(moment)
