"""What a table's runs have found, as one record, and as tables in Markdown.

The record has everything that a figure rests on: the recipe and its command, the seed, the budget,
the parameters, both errors, the parts, and versions, machine and commit of training and evaluation.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ornstein.evaluation import with_error, without_nan
from ornstein.parts import rebuilt
from ornstein.processes import PRESETS
from ornstein.provenance import provenance
from ornstein.reproduce import pairing
from ornstein.reproduce.recipe import Plan
from ornstein.reproduce.running import Errand
from ornstein.training.opening import open_model
from ornstein.training.reading import MODEL, RunSummary, read_run

Record = dict[str, Any]
AVERAGED = "the best step, averaged"  # what the matrices of a run are of, where they are told
FIGURES = (
    "asked",
    "bits_per_dim",
    "standard_error",
    "draw_error",
    "prior",
    "diffusion",
    "reconstruction",
    "known",
    "examples",
    "draws",
    "bound",
    "process",
    "truncation",
    "split",
    "which",
    "step",
    "curve",
    "provenance",
)


def collected(
    plan: Plan, errands: Sequence[Errand], command: str, smoke: bool, before: Path | None = None
) -> Record:
    """All that is there by now.

    before: an earlier record of this table. A run of it, with a recipe that is still the same,
    stays where the folder of the runs has less of it. A run whose files can't be read is as good as
    not there.
    """
    fresh = [_readable(errand) for errand in errands]
    older = {run["name"]: run for run in _kept(before)}  # last: another command may write it, too
    found = []
    for errand, run in zip(errands, fresh, strict=True):
        known = older.get(errand.name)
        if known is not None and known.get("rests_on") == errand.rests_on():
            run = known if run is None or _worth(known) > _worth(run) else run
        if run is not None:
            found.append((errand, run, run is not known))
    runs = [_portable(run, f"{Path.cwd()}{os.sep}") for run in pairing.compared(found)]
    return {
        "table": plan.name,
        "title": plan.title,
        "about": plan.about,
        "command": command,
        "smoke": smoke,
        "complete": len(runs) == len(errands) and all(run["complete"] for run in runs),
        "runs": runs,
        "provenance": provenance(),
    }


def _worth(run: Record) -> tuple[bool, int, bool]:
    """What a run has, first what would be missed most."""
    averaged = (run.get("learned") or {}).get("of") == AVERAGED
    return run["complete"], len(run["figures"]), run["complete"] and averaged


def outdated(errands: Sequence[Errand], before: Path) -> list[str]:
    """Runs of an earlier record that will leave it: their recipes, or their bounds, are others."""
    older = {run["name"]: run.get("rests_on") for run in _kept(before) if run["figures"]}
    return [e.name for e in errands if e.name in older and older[e.name] != e.rests_on()]


def unreadable(path: Path) -> str:
    """What is wrong with a file of results; nothing where it can be read, or is not there."""
    try:
        _kept_in(path)
    except ValueError as error:
        return str(error)
    return ""


def _portable(value: Any, here: str) -> Any:
    """Without the folder of this machine in its paths."""
    if isinstance(value, str):
        return value.replace(here, "")
    if isinstance(value, Mapping):
        return {key: _portable(one, here) for key, one in value.items()}
    return [_portable(one, here) for one in value] if isinstance(value, list) else value


def _kept(path: Path | None) -> list[Record]:
    """The runs of an earlier record; none, where there is none that can be read."""
    try:
        return [] if path is None else _kept_in(path)
    except ValueError:  # it will be written anew: see `unreadable`
        return []


def _kept_in(path: Path) -> list[Record]:
    if not path.is_file():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    runs = record.get("runs") if isinstance(record, dict) else None
    needed = {"name", "complete", "figures"}
    if not (isinstance(runs, list) and all(isinstance(r, dict) and needed <= set(r) for r in runs)):
        raise ValueError("it is no record of runs")
    return runs


def _readable(errand: Errand) -> Record | None:
    """One run; None where nothing is there yet, or nothing that can be read."""
    try:
        return _run(errand)
    except (ValueError, OSError) as error:
        warnings.warn(
            f"{errand.folder} can't be read and is left out ({error}). Restore it from a copy, or "
            "move it away: the command then begins it anew.",
            stacklevel=2,
        )
        return None


def _run(errand: Errand) -> Record | None:
    """One run; None where nothing is there yet."""
    if not (errand.folder / "config.json").is_file():
        return None
    run = read_run(errand.folder, errand.name)
    training = run.config.get("training", {})
    done = errand.finished()
    figures = _figures(errand)
    finished = done == len(errand.commands)
    return {
        "name": errand.name,
        "recipe": errand.recipe.name,
        "about": errand.recipe.about,
        "seed": errand.seed,
        "paper": errand.planned.paper,
        "complete": finished and len(figures) == errand.figures(),
        "rests_on": errand.rests_on(),
        "commands": errand.typed(),
        "parametrisation": run.parametrisation,
        "process": _called(errand, run.process),
        "variables": run.n_vars,
        "parameters": _parameters(run),
        "steps": run.steps,
        "planned_steps": run.total,
        "batch": training.get("batch"),
        "images": run.steps * int(training.get("batch") or 0),
        "seconds": run.seconds,
        "precision": training.get("precision"),
        "data": run.config.get("data"),
        "experiment": run.config.get("experiment"),
        **without_nan(_along(run)),
        "learned": _learned(run, trained=done > 0),
        "model": run.config.get("model"),
        "provenance": _origin(run),
        "figures": figures,
    }


def _along(run: RunSummary) -> Record:
    """The last mean of the loss, and the looks at the validation split."""
    names = ("step", "valid_bits_per_dim", "valid_standard_error")
    looks = [{n.removeprefix("valid_"): line.get(n) for n in names} for line in run.validation]
    loss = run.training[-1].get("bits_per_dim") if run.training else None
    return {"loss": loss, "validation": looks}


def _parameters(run: RunSummary) -> int | None:
    """Numbers of the network; of a run whose weights are elsewhere, as its description has it."""
    if run.parameters is not None:
        return run.parameters
    try:
        with torch.device("meta"):
            network: nn.Module = rebuilt(run.config["model"]["network"], "the network", nn.Module)
    except (KeyError, TypeError, ValueError):  # code of the user's own, or an older run
        return None
    return sum(p.numel() for p in network.parameters())


def _origin(run: RunSummary) -> Record:
    """Versions, machine and commit of the last start that made a step."""
    made = [start for start in run.starts if start.get("step", 0) < run.steps]
    return dict(made[-1] if made else run.provenance)


def _learned(run: RunSummary, trained: bool) -> Record | None:
    """Q and D where they were learned: of the model that is evaluated, its averaged best.

    Until it is trained, and where its weights can't be read, the last of its log.
    """
    lines = [line for line in run.training if "Q" in line and "D" in line]
    if not lines:
        return None
    last = {"Q": lines[-1]["Q"], "D": lines[-1]["D"], "of": "the last step, not averaged"}
    if not (trained and any(run.folder.glob(f"checkpoints/*/{MODEL}"))):
        return last
    try:
        process: Any = open_model(run.folder).model.process  # a Diffusion, with matrices
    except (ValueError, OSError):  # damaged, or half copied: its own command says so
        return last
    with torch.no_grad():
        return {"Q": process.Q.tolist(), "D": process.D.tolist(), "of": AVERAGED}


def _figures(errand: Errand) -> list[Record]:
    """Of the commands that are done."""
    found = []
    for look in errand.looks_done():
        for path in errand.files(look).values():
            record = json.loads(path.read_text(encoding="utf-8"))
            figure = {"look": look, **{key: record.get(key) for key in FIGURES}}
            found.append({**figure, "process": _called(errand, figure["process"])})
    return found


def _called(errand: Errand, process: str | None) -> str | None:
    """A process by its name; matrices of a recipe's own by that of its file."""
    return errand.recipe.name.rpartition("/")[2] if process == "own" else process


# ---------------------------------------------------------------- tables


def table(record: Mapping[str, Any]) -> list[str]:
    """Bits per dimension of all runs, one line for each process: lines of Markdown."""
    looks = list(dict.fromkeys(f["look"] for run in record["runs"] for f in run["figures"]))
    paper = any(run["paper"] is not None for run in record["runs"])
    base = _base(record)
    heads = [
        "",
        "K",
        *map(_head, looks),
        *([f"{worded(base[0])}, minus {base[1]}"] if base else []),
    ]
    heads += [*(["the paper"] if paper else []), "weights", "budget"]
    lines = [row(heads), row(["---"] * len(heads))]
    titles = [_title(run, run["process"], 1) for run in record["runs"]]
    for run, title in zip(record["runs"], titles, strict=True):
        processes = {f["asked"]: f["process"] for f in run["figures"]}
        name = f" ({run['name']})" if titles.count(title) > 1 else ""
        for asked, process in (processes or {"own": run["process"]}).items():
            cells = [_title(run, process, len(processes)) + name, _variables(run, process)]
            cells += [_cell(run["figures"], look, asked) for look in looks]
            if base:
                pairs = [f.get("against") for f in run["figures"] if f["asked"] == asked]
                own = [one for one in pairs if one and one["run"] == base[1]]
                cells.append(pairing.shown(own[0]) if own else "")
            if paper:
                cells.append("" if run["paper"] is None else f"{run['paper']:.2f}")
            cells += [_count(run["parameters"]), _budget(run)]
            lines.append(row(cells))
    return lines


def _base(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """The look and the run that others are compared with, where there are any."""
    found = [(f, run) for run in record["runs"] for f in run["figures"] if f.get("against")]
    if not any(figure["against"]["run"] != run["name"] for figure, run in found):
        return None
    figure, _ = found[0]
    return figure["look"], figure["against"]["run"]


def where(record: Mapping[str, Any]) -> str:
    """On what, with what: half a line."""
    kinds: dict[str, None] = {}
    for run in record["runs"]:
        p = run["provenance"]
        machine = p.get("gpu") or p.get("cpu")
        kinds[f"{machine}, PyTorch {p.get('torch')}, {p.get('date')}, commit {p.get('commit')}"] = (
            None
        )
    return "; ".join(kinds)


def _title(run: Mapping[str, Any], process: str | None, count: int) -> str:
    seed = f", seed {run['seed']}" if run["seed"] else ""
    if run["parametrisation"] == "channel":
        return f"channel, under {process}{seed}" if count > 1 else f"channel, {process}{seed}"
    told = (run.get("model") or {}).get("known_noise") == "told"
    return f"{run['parametrisation']}{', told' if told else ''}, {process}{seed}"


def _variables(run: Mapping[str, Any], process: str | None) -> str:
    """K of a process: the run's own, or a preset."""
    if process == run["process"]:
        return str(run["variables"] or "")
    return str(PRESETS[process]().n_vars) if process in PRESETS else ""


def worded(look: str) -> str:
    """A look's title as people read it."""
    parts = [part.replace("time", "from s = ").replace("level", "from σ = ") for part in _cut(look)]
    return ", ".join(parts)


def _cut(look: str) -> list[str]:
    bound, *rest = look.split("-")
    return [*([] if bound == "own" else [bound]), *rest]


def _head(look: str) -> str:
    return ", ".join(filter(None, ("bits/dim", worded(look))))


def _cell(figures: Iterable[Mapping[str, Any]], look: str, asked: str) -> str:
    for one in figures:
        if one["look"] == look and one["asked"] == asked:
            return with_error(one["bits_per_dim"], one["standard_error"] or math.nan)
    return ""


def _budget(run: Mapping[str, Any]) -> str:
    short = "" if run["complete"] else " (not finished)"
    images = f"{run['images'] / 1e6:.3g} M images" if run["images"] >= 1e5 else f"{run['images']:,}"
    minutes = "" if not run["seconds"] else f", {run['seconds'] / 60:.1f} min"
    return images + minutes + short


def _count(parameters: int | None) -> str:
    return "" if parameters is None else f"{parameters:,}"


def row(cells: Iterable[str]) -> str:
    """A line of Markdown's tables."""
    return "| " + " | ".join(cells) + " |"
