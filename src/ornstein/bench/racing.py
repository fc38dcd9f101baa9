"""Races: works in alternation, round after round, so that a restless machine disturbs them all.

    seconds(a) = median over rounds of t_a,        ratio(a, b) = median over rounds of t_a / t_b

On a GPU a round is timed between two events, behind as many calls as fill its budget; what the
host takes to launch them is in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from ornstein.compiling import capturing

Work = Callable[[], object]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Race:
    """The times of all rounds, in seconds per call, and who could not take part."""

    times: Mapping[str, tuple[float, ...]]
    left_out: Mapping[str, str] = field(default_factory=dict)  # and why
    starts: Mapping[str, float] = field(default_factory=dict)  # seconds of the first call

    def seconds(self, name: str) -> float:
        return statistics.median(self.times[name])

    def ratio(self, name: str, other: str) -> float:
        """How many times as long the first takes."""
        pairs = zip(self.times[name], self.times[other], strict=True)
        return statistics.median(a / b for a, b in pairs)


def race(
    works: Mapping[str, Work],
    device: torch.device,
    rounds: int,
    budget: float,
    tell: Tell = lambda text: None,
    may_fail: Collection[str] = (),
    warm: int = 3,
    until: float = float("inf"),
) -> Race:
    """Time all works; the first call of each may compile it, and is no part of its time.

    budget: seconds per work and round; 0 for one call in each. may_fail: rivals that are left out
    then. warm: calls before it counts. until: a time (monotonic) after which no work starts but the
    first.
    """
    repeats: dict[str, int] = {}
    left_out: dict[str, str] = {}
    starts: dict[str, float] = {}
    for name, work in works.items():
        if repeats and time.monotonic() > until:
            left_out[name] = "out of time"
            continue
        tell(name)
        try:
            starts[name] = timed(work, 1, device)
            timed(work, warm - 1, device)
            once = timed(work, 1, device) if budget else 1.0
        except RuntimeError as error:  # too little memory is one, too
            if name not in may_fail:
                raise
            left_out[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
            continue
        repeats[name] = max(1, int(budget / max(once, 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in repeats}
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        for name, count in repeats.items():
            times[name].append(timed(works[name], count, device))
    return Race({name: tuple(found) for name, found in times.items()}, left_out, starts)


def timed(work: Work, repeats: int, device: torch.device) -> float:
    """Seconds per call, until the device is done; 0 for no calls."""
    if not repeats:
        return 0.0
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / 1e3 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def captured(work: Work, device: torch.device, calls: int = 1) -> Work:
    """The same work, so many times, as a CUDA graph: captured at the first call, then replayed.

    On other devices it is the work itself, once.
    """
    return _Captured(work, device, calls) if device.type == "cuda" else work


class _Captured:
    """A work that becomes a graph when it is first called."""

    def __init__(self, work: Work, device: torch.device, calls: int) -> None:
        self.work, self.device, self.calls = work, device, calls
        self.replay: Work | None = None

    def __call__(self) -> object:
        if self.replay is None:
            self.replay = self._graph().replay
        return self.replay()

    def _graph(self) -> torch.cuda.CUDAGraph:
        here, aside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(3):  # compiles, and takes the memory that it needs
                self.work()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            for _ in range(self.calls):
                self.work()
        return graph
