"""Metrics of a run as TensorBoard events: an extra."""

from __future__ import annotations

from pathlib import Path

from ornstein.training.step import Step


class Events:
    """Writes what a step has to say; metrics and validation as scalars."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"TensorBoard is not installed ({error}); install it with "
                "`pip install ornstein[tensorboard]`, or leave --tensorboard out."
            ) from error
        self.writer = SummaryWriter(str(folder))

    def write(self, step: Step) -> None:
        """After a step for which metrics were due."""
        for name, value in (step.metrics or {}).items():
            if isinstance(value, (int, float)) and name != "step":
                self.writer.add_scalar(f"train/{name}", value, step.number)
            elif isinstance(value, list):
                for i, row in enumerate(value):
                    for j, entry in enumerate(row):
                        self.writer.add_scalar(f"process/{name}{i + 1}{j + 1}", entry, step.number)
        if step.validation is not None:
            found = step.validation.bits_per_dim
            self.writer.add_scalar("valid/bits_per_dim", found, step.number)

    def close(self) -> None:
        """Everything on disk."""
        self.writer.close()
