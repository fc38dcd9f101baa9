"""Ways for a run to end early: a signal, or numbers that are no numbers any more."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """The run was told to stop, and has been saved."""

    def __init__(self, step: int, number: int, what: str = "step") -> None:
        self.step, self.signal = step, number
        super().__init__(f"stopped by {signal.Signals(number).name} after {what} {step}")


class Diverged(RuntimeError):
    """The loss is not a number, or has run away."""


class Signals:
    """Remembers the first SIGINT or SIGTERM; a second one acts as it always does."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[Signals]:
        """For as long as the run lasts. Only the main thread can listen."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        try:
            yield self
        finally:
            self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}
