"""All parts of the benchmark in one run, within a time if one is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ornstein.bench.counting import ceilings
from ornstein.bench.figures import Figures, Part
from ornstein.bench.kernels import kernel
from ornstein.bench.racing import Tell
from ornstein.bench.sampled import sampling
from ornstein.bench.scaling import scaling
from ornstein.bench.sizes import Setting, tidy
from ornstein.bench.steps import learned, rest, step
from ornstein.bench.stock import stock_name
from ornstein.provenance import provenance

PARTS: dict[str, Callable[[Setting], Part]] = {
    "step": step,
    "rest": rest,
    "learned": learned,
    "kernel": kernel,
    "sampling": sampling,
    "scaling": scaling,
}


def bench(
    device: torch.device | str = "cpu",
    parts: Sequence[str] = tuple(PARTS),
    quick: bool = False,
    batches: Sequence[int] = (),
    minutes: float | None = None,
    out: Path | None = None,
    tell: Tell = lambda text: None,
    done: Callable[[str, Part], None] = lambda name, part: None,
) -> Figures:
    """Measure the parts.

    batches: of the large network (default: 128 and 512 on a GPU, 16 on a CPU).
    minutes: no race begins after so long; what was left out is missing from the figures.
    out: a file to keep the figures in, after every part; those of other parts stay in it.
    tell: is told what is being measured; done: is given every part as soon as it is there.
    """
    _check(parts, batches, minutes)
    older = Figures.read(out) if out is not None and out.exists() else None
    device = torch.device(device)
    until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    found: dict[str, Part] = {}
    origin = provenance()
    with _arithmetic(device):
        tell("ceilings")
        figures = Figures(device.type, stock_name(), quick, ceilings(device, quick), {}, origin)
        if older is not None:
            figures.merged(older)  # refused before anything is measured
        for name in parts:
            setting = Setting(device, quick, tuple(batches), until, _within(tell, name))
            if setting.out_of_time():
                break
            found[name] = replace(PARTS[name](setting), provenance=origin)
            tidy(device)
            figures = replace(figures, parts=found)
            if out is not None:
                (figures if older is None else figures.merged(older)).save(out)
            done(name, found[name])
    figures = figures if older is None else figures.merged(older)
    if out is not None:
        figures.save(out)
    return figures


def _within(tell: Tell, part: str) -> Tell:
    return lambda text: tell(f"{part}: {text}")


@contextmanager
def _arithmetic(device: torch.device) -> Iterator[None]:
    """TF32, the fastest convolutions, and as many compiled forms of a step as are raced."""
    before, searched = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    try:
        with torch._dynamo.config.patch(recompile_limit=64):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.benchmark = searched


def _check(parts: Sequence[str], batches: Sequence[int], minutes: float | None) -> None:
    unknown = [name for name in parts if name not in PARTS]
    if unknown or not parts:
        given = f"there is no part {unknown[0]!r}" if unknown else "no part was given"
        raise ValueError(f"{given}; expected some of {', '.join(PARTS)}.")
    if any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in batches):
        raise ValueError(f"batches={tuple(batches)!r}; expected whole numbers ≥ 1.")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes={minutes!r}; expected a number > 0.")
