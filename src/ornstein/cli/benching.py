"""`ornstein bench`: how fast it is here, as ratios measured in one run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table as Shown

from ornstein.bench import PARTS, Figures, Part, Table, bench
from ornstein.cli.reading import NoHint
from ornstein.training.distribution import device_of
from ornstein.viz import save
from ornstein.viz.roofline import roofline

HELP = """How fast it is on this machine: tables on the screen, JSON, and a roofline plot. All
ratios are of things measured in alternation in this run. On a GPU the sizes are those of CIFAR-10,
and most of the time goes into compiling; on a CPU they are small, and it takes two minutes.

parts:
  step      the whole training step against a stock diffusers U-Net (our own where it is missing)
  rest      what of a step is not the network
  learned   learned against fixed processes, of one to three variables
  kernel    transition and sample against a kernel derived by hand, and against a copy
  sampling  images per second of several solvers
  scaling   several training processes that share the GPU, or the cores

examples:
  ornstein bench
  ornstein bench --quick
  ornstein bench --parts step rest --batch 128 --out bench.json --plot roofline.png
  ornstein bench --parts kernel --out bench.json"""

Name = Literal["step", "rest", "learned", "kernel", "sampling", "scaling"]
ALL: tuple[Name, ...] = ("step", "rest", "learned", "kernel", "sampling", "scaling")


@dataclass(frozen=True)
class Bench:
    """How fast it is here."""

    parts: tuple[Name, ...] = ALL
    """What to measure."""
    device: Annotated[str | None, NoHint] = None
    """cpu, cuda or cuda:N (default: CUDA where there is one)."""
    quick: bool = False
    """Few rounds and fewer sizes, for a look."""
    batch: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT ...", help_behavior_hint="")] = ()
    """Of the large network (default: 128 512 on a GPU, 16 on a CPU)."""
    minutes: Annotated[float | None, NoHint] = None
    """Begin nothing new after so long (default: measure all)."""
    out: Annotated[Path | None, NoHint] = None
    """JSON file to write; other parts that it holds already stay there."""
    plot: Annotated[Path | None, NoHint] = None
    """PNG file for the roofline plot."""

    def run(self) -> None:
        device = device_of(self.device)
        console = Console(highlight=False, soft_wrap=True)
        with console.status("measuring …") as status:

            def tell(text: str) -> None:
                if console.is_terminal:
                    status.update(f"measuring {text} …")
                elif ": round " not in text:  # a log: compiling takes minutes
                    console.print(f"{time.strftime('%H:%M:%S')}  measuring {text}", style="dim")

            found = bench(
                device,
                self.parts,
                quick=self.quick,
                batches=self.batch,
                minutes=self.minutes,
                out=self.out,
                tell=tell,
                done=lambda name, part: show(part, device.type == "cuda", console),
            )
        for name in self.parts:
            if name not in found.parts:
                console.print(f"{name}: left out, the time was over")
        console.print(ceilings(found), style="dim")
        written = [path for path in (self.out,) if path is not None]
        if self.plot is not None:
            written.append(save(roofline(found), self.plot))
        for path in written:
            console.print(f"wrote {path}", style="dim")


def show(part: Part, cuda: bool, console: Console) -> None:
    """The tables and checks of a part."""
    for table in part.tables:
        console.print(_table(table, cuda))
        for note in table.notes:
            console.print(note, style="dim")
        console.print()
    for check in part.checks:
        console.print(check.shown(), style="green" if check.holds else "bold red")
    if part.checks:
        console.print()


def _table(table: Table, cuda: bool) -> Shown:
    shown = Shown(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    (first, *heads), rows = table.shown(cuda)
    shown.add_column(first, overflow="fold")
    for head in heads:
        shown.add_column(head, justify="right")
    for row in rows:
        shown.add_row(*row)
    return shown


def ceilings(found: Figures) -> str:
    """What the machine reaches at best, and what stands for a stock network."""
    top = found.ceilings
    stock = "our own U-Net, not compiled" if found.stock == "plain" else found.stock
    return (
        f"ceilings: {top.flops / 1e12:.3g} TFLOP/s ({top.matmul}), {top.bytes / 1e9:,.3g} GB/s "
        f"({top.copy}); stock: {stock}"
    )


if set(ALL) != set(PARTS):
    raise RuntimeError(f"the parts of the command are {ALL}, those of the library {tuple(PARTS)}")
