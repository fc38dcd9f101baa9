"""One HTML file about one run or many: what was measured, with errors, and how it was made.

A report is a list of sections, those of the runs and one's own. It says nothing that the runs'
folders do not say; what was not measured is named as such.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ornstein.training.reading import Line as Record
from ornstein.training.reading import RunSummary
from ornstein.viz import html
from ornstein.viz.bits import PARTS
from ornstein.viz.curves import drawable, matrices, parts, shares, training, where
from ornstein.viz.html import NONE, Section, Table, decimal, finite, measured, tag
from ornstein.viz.summary import numbered

TOGETHER = 8  # evaluations in one figure
VERSIONS = ("date", "python", "torch", "numpy", "cuda", "system", "cpu", "gpu", "commit")
PLUS_MINUS = (
    "± is one standard error: how far the mean over all such examples, and all draws of times and "
    "noise, may be from the mean over these. Numbers are rounded to two digits of it."
)


def report(
    runs: Sequence[RunSummary],
    title: str = "Comparison of runs",
    intro: str | None = None,
    sections: Sequence[Section] = (),
) -> str:
    """A self-contained page: the runs' own sections, then those given, then how it was made."""
    if not runs:
        raise ValueError("report was given no run; expected one or more, from read_runs.")
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(
            f"the runs are named {', '.join(run.name for run in runs)}; expected names that "
            "differ, as read_runs gives them."
        )
    own = [_runs(runs), _evaluations(runs), _progress(runs), _where(runs), _learned(runs)]
    own += [_samples(runs)]
    every = [*(s for s in own if s is not None), *sections, _made(runs)]
    links = [tag("a", s.title, href=f"#section-{i}") for i, s in enumerate(every, 1)]
    top = [tag("h1", title), html.paragraphs(intro or "")]
    body = [html.rendered(section, f"section-{i}") for i, section in enumerate(every, 1)]
    return html.page(title, tag("header", *top, tag("nav", *links)), *body)


# ---------------------------------------------------------------- sections of the runs


def _runs(runs: Sequence[RunSummary]) -> Section:
    head = ("run", "data", "process", "K", "model", "parameters", "steps", "best validation",
            "evaluations", "time", "commit")  # fmt: skip
    rows = []
    for run in runs:
        results = [
            f"{measured(record['bits_per_dim'], record.get('standard_error'))} "
            f"{_kind(record, run, always=True)}"
            for record in _ordered(run)
        ]
        rows.append(
            (
                run.name,
                run.data or NONE,
                run.process or NONE,
                NONE if run.n_vars is None else str(run.n_vars),
                run.parametrisation or NONE,
                NONE if run.parameters is None else f"{run.parameters:,}",
                _steps(run),
                _best(run),
                "\n".join(results) or "not evaluated yet",
                NONE if run.seconds is None else html.lasting(run.seconds),
                str(run.provenance.get("commit") or NONE).replace(" with ", "\nwith "),
            )
        )
    text = (
        "Figures are bits per dimension, upper bounds on the negative log-likelihood: lower is "
        "better. Those of validation were looked at during training, to choose the best weights."
    )
    described = [run.config.get("data") for run in runs]
    known = [data for data in described if isinstance(data, dict)]
    if any("levels" in data and data["levels"] is None for data in known):
        text += " Those of real-valued data are of a density, and may be negative."
    if len({(data.get("name"), data.get("fingerprint")) for data in known}) > 1:
        text += " Take care: the runs are about different data, and so are their figures."
    return Section(
        "The run" if len(runs) == 1 else "The runs",
        text,
        Table(head, rows, cards=True),
        f"{PLUS_MINUS} K is the number of variables per data coordinate, the data included. Time "
        "is that of training with its looks at validation and samples, over all starts.",
    )


def _evaluations(runs: Sequence[RunSummary]) -> Section:
    """All evaluations, with paired differences where they were recorded."""
    title = "Evaluations"
    named = _named(runs)
    if not named:
        return Section(title, "Not evaluated yet: no run has an evaluation in its folder.")
    columns: dict[str, list[str]] = {"evaluation": [name for name, _, _ in named]}
    records = [record for _, _, record in named]
    columns["split"] = [str(r.get("split") or NONE) for r in records]
    columns["bits/dim"] = [measured(r["bits_per_dim"], r.get("standard_error")) for r in records]
    columns["from draws alone"] = [html.deviation(r.get("draw_error")) for r in records]
    for part in PARTS:
        columns[part] = [_part(r.get(part)) for r in records]
    columns["difference"] = [_difference(r.get("pair"), run) for _, run, r in named]
    columns["examples × draws"] = [
        f"{html.counted(r.get('examples'))} × {html.counted(r.get('draws'))}" for r in records
    ]
    columns["weights of"] = [_weights(r) for r in records]
    said = []  # what is the same for all needs no column
    first = records[0]
    shared = {"split": f"{first.get('split')} split"}
    shared["examples × draws"] = (
        f"{html.counted(first.get('examples'))} examples × {html.counted(first.get('draws'))} draws"
    )
    for name, words in shared.items():
        if len(set(columns[name])) == 1 and NONE not in columns[name][0]:
            said.append(words)
            del columns[name]
    text = f"{', '.join(said).capitalize()}. " if said else ""
    text += _comparable(records)
    paired = set(columns["difference"]) != {NONE}
    if not paired:
        del columns["difference"]
    note = "± as above. From draws alone: the part of it that more draws would remove."
    if paired:
        note += (
            " A difference is that to the evaluation it names, taken example by example, with a "
            "standard error of its own: what two models find equally hard cancels."
        )
    missing = [run.name for run in runs if not run.evaluations]
    if missing:
        note += f" Not evaluated yet: {', '.join(missing)}."
    rows = list(zip(*columns.values(), strict=True))
    return Section(title, text, Table(list(columns), rows, cards=True), note)


def _comparable(records: Sequence[Record]) -> str:
    """What the figures are bounds on, and whether they may be compared."""
    said = []
    for key in ("data", "split", "bound", "truncation", "examples"):
        found = list(dict.fromkeys(_shown(record.get(key)) for record in records))
        if len(found) > 1:
            said.append(f"{key} ({', '.join(found)})")
    first = records[0]
    kind = "a density" if first.get("density") else "the probability of the data"
    if said:
        return f"Take care: these figures differ in more than the model, in {'; '.join(said)}."
    bound, cut = first.get("bound"), first.get("truncation")
    text = f"The {bound} bound on {kind}" if bound else f"A bound on {kind}"
    text += f", truncated at {cut}" if cut else ""
    return text + (", the same for all." if len(records) > 1 else ".")


def _shown(value: Any) -> str:
    """A word for what an evaluation says; data is known by its name and its fingerprint."""
    if isinstance(value, dict):
        return " ".join(str(value[k]) for k in ("name", "fingerprint") if k in value)
    return NONE if value is None else str(value)


def _progress(runs: Sequence[RunSummary]) -> Section:
    figures = [
        (
            "Bits/dim over steps. Thin: means over training steps, with the weights of the moment. "
            "Points: the averaged model on the validation split, ± one standard error.",
            training(runs, ["step"]),
        ),
        ("The same over the time that training took.", training(runs, ["seconds"])),
    ]
    if any("loss" in line for run in runs for line in run.training):
        also = " Below: losses that are no bound, of the runs that minimise one."
        figures = [(caption + also, figure) for caption, figure in figures]
    bounds = [run for run in runs if any("diffusion" in line for line in run.training)]
    if len(runs) == 1 and bounds:
        figures.append(("What the bound is made of, over steps.", parts(runs[0])))
    return Section("Training", figures=figures)


def _where(runs: Sequence[RunSummary]) -> Section | None:
    named = {name: record for name, _, record in _named(runs) if drawable(record)}
    if not named:
        return None
    figures, items = [], list(named.items())
    for first in range(0, len(items), TOGETHER):
        some = dict(items[first : first + TOGETHER])
        figures += [
            (
                "Denoising error over log SNR, from noise on the left to data on the right, ± one "
                "standard error. The area under a curve is its diffusion part.",
                where(some),
            ),
            ("The parts of each bound and their sum, in bits/dim.", shares(some)),
        ]
    return Section("Where the bits are", figures=figures)


def _learned(runs: Sequence[RunSummary]) -> Section | None:
    figures = [
        (f"{run.name}: z is the data, v its auxiliary variables.", matrices(run))
        for run in runs
        if run.learned
    ]
    text = (
        "Q, skew-symmetric, says which variable turns into which; D, positive semi-definite, says "
        "where noise enters. Left: their entries over the steps of training. Right: the last ones."
    )
    return Section("Learned Q and D", text, figures=figures) if figures else None


def _samples(runs: Sequence[RunSummary]) -> Section:
    """The newest grid of each run, and every picture with a name."""
    images = []
    for run in runs:
        by_step = [p for p in run.pictures if re.fullmatch(r"step-\d+", p[1].stem)]
        chosen = by_step[-1:] + [p for p in run.pictures if p not in by_step]
        images += [(f"{run.name}, {title}", path) for title, path in chosen]
    if not images:
        return Section("Samples", "Not sampled yet: no run has a picture in its folder.")
    text = (
        "The newest picture that each run made during training, and those that were made "
        "afterwards, under their names."
    )
    return Section("Samples", text, images=images)


def _made(runs: Sequence[RunSummary]) -> Section:
    """Options that differ, versions, machines; everything else to be opened."""
    options = {run.name: run.options for run in runs}
    keys = list(dict.fromkeys(key for found in options.values() for key in found))
    differ = [k for k in keys if len({found.get(k, NONE) for found in options.values()}) > 1]
    table = None
    text = "All options are in the tables that open at the end."
    if differ:
        rows = [(key, *(options[run.name].get(key, NONE) for run in runs)) for key in differ]
        table = Table(("option", *(run.name for run in runs)), rows)
        text = "Options that differ between the runs. " + text
    elif len(runs) > 1:
        text = "The runs have the same options. " + text
    folded = [("Versions and machine", _versions(runs))]
    folded += [
        (f"All options of {name}", Table(("option", "value"), list(found.items())))
        for name, found in options.items()
    ]
    return Section("How it was made", text, table, folded=folded)


def _versions(runs: Sequence[RunSummary]) -> Table:
    keys = [k for k in VERSIONS if any(k in run.provenance for run in runs)]
    columns = [[str(run.provenance.get(k, NONE)) for k in keys] for run in runs]
    starts = [str(len(run.starts) or NONE) for run in runs]
    rows = [(k, *values) for k, *values in zip(keys, *columns, strict=True)]
    return Table(("", *(run.name for run in runs)), [*rows, ("starts", *starts)])


# ---------------------------------------------------------------- what runs say, as text


def _named(runs: Sequence[RunSummary]) -> list[tuple[str, RunSummary, Record]]:
    """Every evaluation under a short name that no other has."""
    found = []
    for run in runs:
        for record in _ordered(run):
            inner = _kind(record, run)
            pieces = [run.name, inner] if len(runs) > 1 else [inner or run.name]
            found.append((", ".join(filter(None, pieces)), run, record))
    names = numbered([name for name, _, _ in found])
    return [(name, run, record) for name, (_, run, record) in zip(names, found, strict=True)]


def _ordered(run: RunSummary) -> list[Record]:
    """What others are compared with comes first."""
    return sorted(run.evaluations, key=lambda record: "pair" in record)


def _kind(record: Record, run: RunSummary, always: bool = False) -> str:
    """What an evaluation is called within its run; nothing needs to be said of an only one."""

    def told(other: Record) -> tuple[str, str]:
        return str(other.get("split", "")), str(other.get("process", ""))

    split, process = told(record)
    if len(run.evaluations) == 1 and process == run.process and not always:
        return ""
    if sum(told(other) == (split, process) for other in run.evaluations) > 1:
        return str(record["name"])
    several = len({told(other)[0] for other in run.evaluations}) > 1
    return " ".join(filter(None, (split if several or always else "", process)))


def _difference(pair: Any, run: RunSummary) -> str:
    if not isinstance(pair, dict) or finite(pair.get("difference")) is None:
        return NONE
    against = str(pair.get("against", ""))
    other = [_kind(r, run) for r in run.evaluations if r["name"] == against]
    text = measured(pair["difference"], pair.get("standard_error"))
    return f"{text}\nto {other[0] if other else against}"


def _weights(record: Record) -> str:
    step, which = record.get("step"), record.get("which")
    said = [f"step {html.counted(step)}"] if step is not None else []
    return " ".join([*said, *([f"({which})"] if which else [])]) or NONE


def _best(run: RunSummary) -> str:
    if run.best is None:
        return "not validated yet"
    text = measured(run.best["bits_per_dim"], run.best.get("standard_error"))
    return f"{text}\nat step {html.counted(run.best.get('step'))}"


def _steps(run: RunSummary) -> str:
    if run.total is None or run.steps >= run.total:
        return f"{run.steps:,}"
    return f"{run.steps:,} of {run.total:,}"


def _part(value: Any) -> str:
    number = finite(value)
    return NONE if number is None else decimal(number, 4)
