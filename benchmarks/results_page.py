"""The figures of docs/results.md and experiments.md, and of the README, from results/*.json.

Places on the page are those of `way_page`: `<!-- figures: NAME -->`. What was not measured says so.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, isnan, nan, sqrt
from pathlib import Path
from typing import Any

from benchmarks import ablation, known_noise, reading, rounding
from benchmarks.way_page import PLACE, tabled
from ornstein.evaluation import with_error
from ornstein.reproduce import auxiliary, pairing, results, runtime

Record = dict[str, Any]
TABLES = (
    "mnist",
    "mnist-short",
    "starts-short",
    "cifar10",
    "tinyimagenet32",
    "digits",
    "answers",
)
SETTINGS = (
    "tuning",
    "damping",
    "paper-digits",
    "paper-short",
)  # tables of settings, several seeds each
MEASURES: dict[str, Callable[[Record], Iterable[str]]] = {
    "runtime": runtime.rows,
    "auxiliary": auxiliary.rows,
    "ablation": ablation.rows,
    "ablation-mnist": ablation.rows,
    "known": known_noise.rows,
    "reading": reading.rows,
    "rounding": lambda record: [
        *rounding.rows(record),
        *rounding.ratios(record),
        *rounding.times(record),
    ],
}
PICTURES = {
    "mnist": ("mnist-bits.png", "Bits per dimension of MNIST, ours and the paper's"),
    "mnist-short": (
        "mnist-short-bits.png",
        "Bits per dimension of MNIST after a short training, ours and the paper's",
    ),
    "cifar10": ("cifar10-bits.png", "Bits per dimension of CIFAR-10, ours and the paper's"),
    "tinyimagenet32": (
        "tinyimagenet32-channel-ancestral-500.png",
        "Samples of the channel model, 500 ancestral steps",
    ),
    "auxiliary": ("auxiliary.png", "What auxiliary variables know of x, over time"),
    "digits": ("digits-bits.png", "Bits per dimension of the digits"),
}
#: curves of where the bits are, by the table they belong to
CURVES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "tinyimagenet32": "Tiny ImageNet",
    "digits": "the digits",
}
#: places, and their tables
REPEATS = {"repeats": "mnist", "repeats-short": "mnist-short", "repeats-cifar10": "cifar10"}
SAMPLES = {"samples": "cifar10", "samples-short": "mnist-short"}  # the same
OTHERS = ("efficiency", "where", "halves", "flaws")
NAMES = (*TABLES, *SETTINGS, *REPEATS, *SAMPLES, *OTHERS, *MEASURES)
FLAWS = {"the digits": "ablation", "MNIST": "ablation-mnist"}
PAGES = ("results.md", "experiments.md")
README = ("tables",)
MISSING = "Not measured yet."
ENOUGH = 4  # runs of a setting that tell how far one is from the next
SEEN = 5e-4  # bits/dim by which prior parts differ where they have a column
#: published bits/dim of larger networks (Song et al. 2021, Dockhorn et al. 2022; Table 2)
LARGE = (("VPSDE-large", 1, 108_000_000, 3.08), ("CLD-large", 2, 108_000_000, 3.31))

#: rows of the README: a table's data, and the smallest bits/dim of the paper's Table 1 (VPSDE;
#: learned, K = 2)
HEADLINES = {
    "mnist": ("MNIST", 1.26),
    "mnist-short": ("MNIST, a short training", 1.26),
    "cifar10": ("CIFAR-10", 3.07),
}
UNDER = ("vpsde", "cld", "malda", "alda")  # that a channel model is put under


def read(folder: Path) -> dict[str, Record]:
    """All files of results, by their names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def of_table(record: Record) -> Iterable[str]:
    """A table of the paper, with its origin."""
    yield heading(record)
    yield ""
    yield from results.table(record)
    yield ""
    yield f"({results.where(record)})"


def heading(record: Record) -> str:
    """What a table is of, and the command that makes it."""
    # of the whole, whose parts may have been done in turn
    command = re.sub(r" --(only|through)( (?!--)\S+)+", "", record["command"])
    return f"{record['title']}. {record['about']} `{command}`"


def origin(record: Record) -> str:
    """The command, and on what it ran."""
    p = record["provenance"]
    machine = p.get("gpu") or p["cpu"]
    where = f"{machine}, PyTorch {p['torch']}, {p['date']}, commit {p['commit']}"
    return f"(`{record['command']}`; {where})"


@dataclass(frozen=True)
class Group:
    """Runs of one recipe: by other seeds, or once more."""

    runs: list[Record]
    bits: list[float]
    priors: list[float]  # the prior part of each

    @property
    def mean(self) -> float:
        return sum(self.bits) / len(self.bits)

    @property
    def prior(self) -> float:
        return sum(self.priors) / len(self.priors)

    @property
    def shown(self) -> list[str]:
        """Cells of a table: how many, each, and their mean."""
        return [str(len(self.bits)), ", ".join(f"{b:.4f}" for b in self.bits), f"{self.mean:.4f}"]


def grouped(runs: Iterable[Record], look: str) -> list[Group]:
    """By their recipes, in their order; those that are evaluated, of a recipe as it first was."""
    found: dict[str, list[Record]] = {}
    for run in runs:
        if all(figure["look"] != look for figure in run["figures"]):
            continue
        group = found.setdefault(run["recipe"], [])
        if not group or _seedless(group[0]) == _seedless(run):
            group.append(run)
    firsts = [[_first(run["figures"], look) for run in group] for group in found.values()]
    return [
        Group(group, [float(f["bits_per_dim"]) for f in first], [float(f["prior"]) for f in first])
        for group, first in zip(found.values(), firsts, strict=True)
    ]


def chance(groups: Iterable[Group]) -> float:
    """The standard deviation of one run about the mean of its recipe, of all groups together.

    NaN where no recipe was run twice yet.
    """
    several = [group for group in groups if len(group.bits) > 1]
    squares = sum((b - group.mean) ** 2 for group in several for b in group.bits)
    return sqrt(squares / sum(len(group.bits) - 1 for group in several)) if several else nan


def repeats(found: dict[str, Record], name: str, look: str) -> Iterable[str]:
    """One recipe, trained several times: by other seeds, or once more (NAME-repeat*.json)."""
    records = [record for key, record in found.items() if key.split("-repeat")[0] == name]
    all_ = grouped((run for record in records for run in record["runs"]), look)
    groups = [group for group in all_ if len(group.bits) > 1]
    if not groups:
        return
    rows = [
        [f"{group.runs[0]['parametrisation']}, {group.runs[0]['process']}", *group.shown]
        for group in groups
    ]
    yield from tabled(["", "runs", f"bits/dim, {results.worded(look)}", "mean"], rows)
    yield ""
    used = [run for group in groups for run in group.runs]
    other = " (The same seed gives another run: sums on a GPU are not in a fixed order.)"
    yield (
        f"The standard deviation of one run, of all of these together: {chance(groups):.4f}."
        + (other if any("gpu" in run["provenance"] for run in used) else "")
    )
    yield ""
    parts = [{**record, "runs": [r for r in record["runs"] if r in used]} for record in records]
    yield f"(In turn: {'. And: '.join(results.where(part) for part in parts if part['runs'])})"


def settings(record: Record) -> Iterable[str]:
    """A table of settings with several seeds each: their means, beside that of the first.

    Errors are by each setting's own runs where all have enough of them, else by all together.
    """
    looks = {figure["look"] for run in record["runs"] for figure in run["figures"]}
    if not looks:  # nothing is evaluated yet
        return
    (look,) = looks
    groups = grouped(record["runs"], look)
    own = all(len(group.bits) >= ENOUGH for group in groups)
    ones = [chance([group] if own else groups) for group in groups]
    first, priors = groups[0], [group.prior for group in groups]
    apart = max(priors) - min(priors) > SEEN  # settings whose prior parts differ
    rows = []
    for group, one in zip(groups, ones, strict=True):
        error = sqrt(one**2 / len(group.bits) + ones[0] ** 2 / len(first.bits))
        minus = {
            "difference": group.mean - first.mean,
            "standard_error": None if isnan(error) else error,
        }
        cells = [group.runs[0]["about"], str(group.runs[0]["variables"]), *group.shown]
        cells += [f"{group.prior:.4f}"] if apart else []
        rows.append([*cells, "" if group is first else pairing.shown(minus)])
    yield heading(record)
    yield ""
    heads = ["", "K", "runs", f"bits/dim, {results.worded(look)}", "mean"]
    heads += ["of it, prior part"] if apart else []
    yield from tabled([*heads, "minus the first"], rows)
    yield ""
    figures = [figure for group in groups for run in group.runs for figure in run["figures"]]
    drawn = max(figure["draw_error"] for figure in figures)
    deviation = (
        f"is {min(ones):.4f} to {max(ones):.4f}; errors in the last column are by those of the two"
        if own
        else f"of all of these together, is {ones[0]:.4f}; errors in the last column are by it"
    )
    by_chance = (
        f"The standard deviation of one run about the mean of its setting{' ' if own else ', '}"
        f"{deviation}. Not in them is"
    )
    unknown = "What chance in training does can't be said of single runs. Not in the figures is"
    yield (
        f"All on the same {figures[0]['examples']} examples. "
        f"{unknown if isnan(ones[0]) else by_chance} the error of the draws, which all seeds of a "
        f"setting share: up to {drawn:.4f} in a figure, and in a difference the less, the more "
        "alike the processes are."
    )
    yield ""
    yield f"({results.where(record)})"


def _first(figures: list[Record], look: str) -> Record:
    """The figure of a look; of a channel model's, under its first process."""
    return next(f for f in figures if f["look"] == look)


def _seedless(run: Record) -> Record:
    """What was asked for, with whatever seed."""
    asked = run["experiment"]
    return {**asked, "training": {**asked["training"], "seed": None}}


def efficiency(record: Record) -> Iterable[str]:
    """Table 2: how many weights it takes."""
    rows = [[name, str(K), f"{n / 1e6:.0f} M", "", "", f"{b:.2f}"] for name, K, n, b in LARGE]
    for run in record["runs"]:
        if not run["figures"]:  # not finished
            continue
        own = {f["look"]: f for f in run["figures"] if f["process"] == run["process"]}
        name = f"{run['parametrisation']}, {run['process']}"
        cells = [name, str(run["variables"]), f"{run['parameters'] / 1e6:.1f} M"]
        for figure in (own.get("discrete"), own.get("tweedie")):  # what there is by now
            known = figure and with_error(figure["bits_per_dim"], figure["standard_error"])
            cells.append(known or "")
        rows.append([*cells, "" if run["paper"] is None else f"{run['paper']:.2f}"])
    yield from tabled(["", "K", "weights", "discrete", "tweedie", "published"], rows)


def samples(table: str, pictures: Path) -> Iterable[str]:
    """Grids of a table that are there, of first seeds."""
    for path in sorted(pictures.glob(f"{table}-*-ancestral-*.png")):
        name, steps = path.stem.removeprefix(f"{table}-").split("-ancestral-")
        if "-seed" in name:
            continue
        yield f"{name}, {steps} ancestral steps:"
        yield ""
        yield f"![Samples of {name}](../results/{path.name})"
        yield ""


def headlines(found: dict[str, Record]) -> Iterable[str]:
    """For the README: one denoiser, all processes, beside the best of the paper."""
    rows = []
    for name, (data, best) in HEADLINES.items():
        runs = found[name]["runs"] if name in found else []
        run = next((run for run in runs if run["name"] == "channel" and run["complete"]), None)
        if run is None:
            continue
        if {f["process"] for f in run["figures"]} != set(UNDER):
            raise ValueError(f"the channel model of {name} is not under {', '.join(UNDER)} alone")
        cells = [f"{data}, {run['parameters'] / 1e6:.1f} M weights"]
        for look in ("discrete", "tweedie"):
            figures = [f for f in run["figures"] if f["look"] == look]
            bits = [f["bits_per_dim"] for f in figures]
            error = max(f["standard_error"] for f in figures)
            cells.append(f"{min(bits):.4f} to {max(bits):.4f} ± {error:.4f}")
        machine = run["provenance"].get("gpu") or run["provenance"]["cpu"]
        rows.append([*cells, f"{best:.2f}", f"{run['seconds'] / 60:.1f} min, {machine}"])
    heads = ["bits/dim", f"under {', '.join(UNDER).upper()}", "the paper's bound, near no noise"]
    if rows:
        yield from tabled([*heads, "the paper's best", "training"], rows)


def where(pictures: Path) -> Iterable[str]:
    """Curves that are there."""
    for name, data in CURVES.items():
        file = f"{name}-where.png"
        if (pictures / file).exists():
            yield f"![Bits per unit of log SNR, over log SNR, of {data}](../results/{file})"
            yield ""


def half(curve: Record) -> float:
    """The log SNR above which half of a diffusion part lies."""
    edges, bits = curve["logsnr"], curve["bits"]
    left = sum(bits) / 2
    for number in reversed(range(len(bits))):
        if bits[number] >= left:
            part = left / bits[number]
            return float(edges[number + 1] + part * (edges[number] - edges[number + 1]))
        left -= bits[number]
    raise ValueError("a curve of nothing has no half")


def halves(found: dict[str, Record]) -> Iterable[str]:
    """Where the bits of channel models are, under their first process."""
    rows = []
    for name, data in CURVES.items():
        runs = found[name]["runs"] if name in found else []
        for run in runs:
            looks = [f for f in run["figures"] if f["look"].split("-")[0] == "discrete"]
            if run["name"] != "channel" or not looks:
                continue
            curve, levels = looks[0]["curve"], run["data"]["levels"]
            wide = [b - a for a, b in itertools.pairwise(curve["logsnr"])]
            each = [b / w for b, w in zip(curve["bits"], wide, strict=True)]
            top, middle = each.index(max(each)), half(curve)
            bins = [exp(-at / 2) * levels / 2 for at in (middle, curve["logsnr"][top])]
            whole = with_error(looks[0]["diffusion"], looks[0]["standard_error"])
            cells = [data, whole, f"{middle:.1f}, {bins[0]:.1f} bins", f"{max(each):.2f}"]
            rows.append([*cells, f"{curve['logsnr'][top]:.1f}, {bins[1]:.1f} bins"])
    heads = ["", "diffusion part", "half of it above log SNR, noise", "most per unit of log SNR"]
    if rows:
        yield from tabled([*heads, "from log SNR, noise"], rows)


def lines(name: str, found: dict[str, Record], pictures: Path) -> Iterable[str]:
    """What stands in one place."""
    if name in TABLES and name in found:
        yield from of_table(found[name])
    elif name in SETTINGS and name in found:
        yield from settings(found[name])
    elif name in MEASURES and name in found:
        yield from MEASURES[name](found[name])
        yield ""
        yield origin(found[name])
    elif name == "efficiency" and "cifar10" in found:
        yield from efficiency(found["cifar10"])
    elif name in REPEATS:
        yield from repeats(found, REPEATS[name], "discrete")
    elif name == "tables":
        yield from headlines(found)
    elif name in SAMPLES:
        yield from samples(SAMPLES[name], pictures)
    elif name == "where":
        yield from where(pictures)
    elif name == "halves":
        yield from halves(found)
    elif name == "flaws" and set(FLAWS.values()) <= set(found):
        yield from ablation.short({data: found[file] for data, file in FLAWS.items()})
    if name in PICTURES and (pictures / PICTURES[name][0]).exists():
        file, text = PICTURES[name]
        yield ""
        yield f"![{text}](../results/{file})"


def filled(text: str, folder: Path) -> str:
    """The page with its figures and pictures renewed; places of other names stay as they are."""
    found = read(folder)

    def renew(place: re.Match[str]) -> str:
        if place[2] not in (*NAMES, *README):
            return place[0]
        shown = "".join(f"{line}\n" for line in lines(place[2], found, folder)).strip("\n")
        return place[1] + (shown or MISSING) + "\n" + place[3]

    return PLACE.sub(renew, text)
