"""The live line of a run: bits/dim with its parts, examples a second, time left.

On a terminal it is one line that changes; elsewhere a line is printed whenever metrics are due.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ornstein.cli.words import of_time
from ornstein.training import Step

WIDE = 150  # columns that a line on a terminal needs with all of its parts


class Live:
    """Shows steps as they come."""

    def __init__(self, title: str, total: int, quiet: bool = False) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.title, self.total, self.quiet = title, total, quiet
        self.valid = ""
        self.first = True
        self.bar: Progress | None = None
        if self.console.is_terminal and not quiet:
            self.bar = Progress(
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                console=self.console,
                transient=True,
            )

    def __enter__(self) -> Live:
        if not self.quiet:
            self.console.print(self.title, style="bold")
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("starting …", total=self.total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, step: Step) -> None:
        """After a step."""
        if self.quiet:
            return
        if self.first and step.metrics is None and step.number == step.total:
            self._print(f"finished before: all {self.total:,} steps are done")
        elif self.first and step.number > 1:
            self._print(f"going on after step {step.number - 1:,}")
        self.first = False
        if step.validation is not None:
            found = step.validation
            self.valid = f", valid {found.bits_per_dim:.3f}"
            if found.standard_error > 0:
                self.valid += f" ± {found.standard_error:.3f}"
            if self.bar is None or step.number == step.total:
                self._print(f"{step.number:>7,}  validation {found.line}")
        if step.quality is not None:
            self._print(f"{step.number:>7,}  {step.quality.line}")
        if self.bar is not None:
            text = None if step.metrics is None else self._line(step)
            self.bar.update(self.task, completed=step.number, description=text)
            if step.metrics is not None and step.number == step.total:
                self._print(f"{step.number:>7,}  {self._line(step)}")
        elif step.metrics is not None:
            self._print(f"{step.number:>7,}  {self._line(step)}")

    def _print(self, text: str) -> None:
        self.console.print(text)

    def _line(self, step: Step) -> str:
        metrics = step.metrics or {}
        if "bits_per_dim" in metrics:
            text = f"{metrics['bits_per_dim']:.3f} bits/dim"
            if self.console.width >= WIDE or self.bar is None:
                text += (
                    f" (prior {metrics['prior']:.3f}, diffusion {metrics['diffusion']:.3f}, "
                    f"reconstruction {metrics['reconstruction']:.3f})"
                )
        else:
            text = f"loss {metrics['loss']:.4g}"
        speed = metrics["examples_per_second"]
        left = ""
        if step.number < step.total:  # at the pace of the whole run so far
            pace = metrics["seconds"] / step.number
            left = f", {of_time((step.total - step.number) * pace)} left"
        return f"{text}{self.valid}, {speed:,.0f} examples/s{left}"
