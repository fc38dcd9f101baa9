"""The command line. One file per command: a frozen dataclass of options with `run()`.

Commands parse, call the library, print and write files; nothing is computed here. A new command
is a new file and one more line in `Command`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from ornstein.cli import inspecting, quickstart
from ornstein.cli.inspecting import Inspect
from ornstein.cli.quickstart import Quickstart

Command = (
    Annotated[Quickstart, tyro.conf.subcommand("quickstart", description=quickstart.HELP)]
    | Annotated[Inspect, tyro.conf.subcommand("inspect", description=inspecting.HELP)]
)

HELP = """Multivariate diffusion models with any linear noising process.

examples:
  ornstein quickstart
  ornstein inspect cld alda
  ornstein inspect --Q '[[0,-1],[1,0]]' --D '[[0,0],[0,1]]'
  ornstein inspect --help"""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and the exit code 2."""
    args = sys.argv[1:] if args is None else args
    if wrong := _wrong_case(args):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    command = tyro.cli(
        Command,
        prog="ornstein",
        description=HELP,
        args=args,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
    )
    try:
        command.run()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _wrong_case(args: Sequence[str]) -> str | None:
    """--q for --Q, which the parser would take for a misspelt --rate-q."""
    fields = [field for kind in (Quickstart, Inspect) for field in dataclasses.fields(kind)]
    options = {f"--{field.name.replace('_', '-')}" for field in fields}
    spelt = {option.lower(): option for option in options}
    for given in (arg.split("=")[0] for arg in args):
        right = spelt.get(given.lower())
        if right and given not in options:
            return f"there is no option {given}; perhaps you meant {right}."
    return None
