"""The command line. One file per command: a frozen dataclass of options with `run()`.

Commands parse, call the library, print and write files; nothing is computed here. A new command
is a new file and one more line in `COMMANDS`.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union

import torch
import tyro

from ornstein.cli import (
    benching,
    comparing,
    evaluating,
    inspecting,
    measuring,
    quickstart,
    reporting,
    reproducing,
    sampling,
    training,
)
from ornstein.cli.reading import REGISTRY
from ornstein.reproduce import recipe
from ornstein.training import Diverged, Experiment, Interrupted, preset
from ornstein.training.options import check_all, unchecked

COMMANDS: dict[str, tuple[Any, str]] = {
    "quickstart": (quickstart.Quickstart, quickstart.HELP),
    "train": (training.Train, training.HELP),
    "evaluate": (evaluating.Evaluate, evaluating.HELP),
    "sample": (sampling.Sample, sampling.HELP),
    "quality": (measuring.Measure, measuring.HELP),
    "compare": (comparing.Compare, comparing.HELP),
    "inspect": (inspecting.Inspect, inspecting.HELP),
    "report": (reporting.Report, reporting.HELP),
    "bench": (benching.Bench, benching.HELP),
    "reproduce": (reproducing.Reproduce, reproducing.HELP),
}

# what torch says to those who write networks, not to those who train them
ADVICE = (".*TensorFloat32 tensor cores.*", ".*torch._prims_common.check.*")

HELP = """Multivariate diffusion models with any linear noising process.

examples:
  ornstein quickstart
  ornstein train --data mnist --data-folder data --process cld
  ornstein evaluate runs/mnist-channel-cld --process vpsde cld alda
  ornstein sample runs/mnist-channel-cld --solver exponential --steps 20
  ornstein quality runs/mnist-channel-cld
  ornstein compare runs/mnist-channel-cld --evaluations 5 10 20 50
  ornstein report runs/*
  ornstein inspect cld alda
  ornstein bench --quick
  ornstein reproduce digits
  ornstein train --help"""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and the exit code 2.

    A run that diverged exits with 1, one that was told to stop with 128 + the signal's number.
    """
    args = list(sys.argv[1:] if args is None else args)
    warnings.showwarning = _warned  # type: ignore[assignment]
    for message in ADVICE:
        warnings.filterwarnings("ignore", message=message)
    try:
        if wrong := _wrong_case(args):
            raise ValueError(wrong)
        with unchecked():
            command: Any = tyro.cli(
                _commands(args),
                prog="ornstein",
                description=HELP,
                args=args,
                config=(
                    tyro.conf.OmitArgPrefixes,
                    tyro.conf.HelptextFromCommentsOff,
                ),
                registry=REGISTRY,
            )
        check_all(command)
        command.run()
    except Interrupted as stopped:
        _say(f"{stopped}; everything is saved. Repeat the command to go on.")
        return 128 + stopped.signal
    except KeyboardInterrupt:
        _say("stopped; what was kept so far stays. Repeat the command to go on.")
        return 130
    except Diverged as error:
        _say(f"error: {error}")
        return 1
    except torch.OutOfMemoryError as error:
        _say(f"error: {error}\nUse a smaller --batch, or --accumulate to do it in parts.")
        return 1
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        return 2
    return 0


def _commands(args: Sequence[str]) -> Any:
    """All commands as one type; `train` begins with the preset of its data, or with a file."""
    kinds = []
    for name, (kind, text) in COMMANDS.items():
        options: dict[str, Any] = {"description": text}
        if name == "train" and args[:1] == ["train"]:
            options["default"] = training.Train(experiment=_start(args[1:]))
        kinds.append(Annotated[kind, tyro.conf.subcommand(name, **options)])
    return Union[tuple(kinds)]  # noqa: UP007


def _start(args: Sequence[str]) -> Experiment:
    """The options to begin with, as --data, --config and --recipe ask for."""
    file, data, name = (_value(args, option) for option in ("--config", "--data", "--recipe"))
    base = None if data is None else preset(data)
    if name is not None:
        if file is not None:
            raise ValueError("--recipe and --config were both given; expected one of them.")
        chosen = recipe.read(name)
        found = (chosen.smoke() if "--smoke" in args else chosen).experiment
    elif file is not None:
        found = Experiment.read(file, base)
    else:
        return preset("digits") if base is None else base
    return (
        found
        if data is None
        else dataclasses.replace(found, data=dataclasses.replace(found.data, data=data))
    )


def _value(args: Sequence[str], option: str) -> str | None:
    """What an option was given on the command line."""
    for arg, after in zip(args, [*args[1:], ""], strict=True):
        if arg == option:
            return after
        if arg.startswith(f"{option}="):
            return arg.split("=", 1)[1]
    return None


def _wrong_case(args: Sequence[str]) -> str | None:
    """--q for --Q, which the parser would take for a misspelt --rate-q."""
    kind = COMMANDS.get(args[0], (None, ""))[0] if args else None
    options = set() if kind is None else {f"--{name.replace('_', '-')}" for name in _fields(kind)}
    spelt = {option.lower(): option for option in options}
    for given in (arg.split("=")[0] for arg in args):
        right = spelt.get(given.lower())
        if right and given not in options:
            return f"there is no option {given}; perhaps you meant {right}."
    return None


def _fields(kind: Any) -> Iterator[str]:
    """Names of all options, those of nested values too."""
    default = kind() if kind is training.Train else None
    for field in dataclasses.fields(kind):
        value = getattr(default, field.name, None)
        if default is not None and dataclasses.is_dataclass(value):
            yield from _nested(value)
        else:
            yield field.name


def _nested(value: Any) -> Iterator[str]:
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from _nested(inner)
        else:
            yield field.name


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _warned(message: Any, *_: Any) -> None:
    """A warning as one line."""
    _say(f"warning: {message}")
