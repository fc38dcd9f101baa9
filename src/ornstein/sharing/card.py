"""The card: what the model is, how to use it, and what was measured; nothing that was not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ornstein.diffusion import Diffusion
from ornstein.parts import Record
from ornstein.process import Process

HERE = "path/to/this/folder"
FRONT = """---
library_name: ornstein
license: other  # whoever shares the model chooses
tags:
- ornstein
- diffusion
---"""


def card(
    config: Record, model: nn.Module, process: Process, text: str | None, address: str | None
) -> str:
    """The page, in Markdown."""
    about: Record = config["model"]
    parts = [
        FRONT,
        f"# A score model under `{process.name}`",
        text.strip() if text else "",
        _table(_facts(about, model, process)),
        "## The process",
        _process(about["process"], process),
        "## The data",
        _data(config["data"]),
        "## Use",
        _use(about, address or HERE),
        "## Measured",
        _figures(config["figures"]),
        "## Made with",
        _made(config["provenance"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _facts(about: Record, model: nn.Module, process: Process) -> dict[str, str]:
    learned = sum(p.numel() for p in process.parameters())
    total = sum(p.numel() for p in model.parameters())
    joint = f"all {process.n_vars} variables" if process.n_vars > 1 else "the one variable"
    sees = "the data's shape" if about["parametrisation"] == "channel" else joint
    told = ", and is told what noise is known" if about.get("known_noise") == "told" else ""
    facts = {
        "network": in_words(about["network"]),
        "parameters": f"{total:,}" + (f", {learned:,} of them the process's" if learned else ""),
        "parametrisation": f"{about['parametrisation']}: the network sees {sees}{told}",
        "likelihood": in_words(about["likelihood"]),
        "truncation": str(getattr(model, "truncation", "–")),
    }
    if about["features"]:
        facts["features"] = "frequencies " + ", ".join(f"{f:.6g}" for f in about["features"])
    if about.get("histogram"):
        facts["adds to"] = "what the histogram of the pixels says"
    if not about["precondition"]:
        facts["precondition"] = "no"
    return facts


def _process(record: Record, process: Process) -> str:
    K = process.n_vars
    kind = f"`{type(process).__name__}` of {K} variable{'s' if K > 1 else ''}"
    lines = [f"{kind}, {'learned' if process.learned else 'fixed'}, on [0, {process.horizon:g}]."]
    matrices: dict[str, Tensor] = {}
    if isinstance(process, Diffusion):
        matrices = {"Q": process.Q, "D": process.D, "S": process.S}
    matrices["prior covariance"] = process.prior_covariance
    if K > 1:
        factor = process.auxiliary.factor()[1:]
        matrices["covariance of v0"] = factor @ factor.mT
        matrices["mean of v0 / x"] = process.auxiliary.coupling.unsqueeze(0)
    shown = [_matrix(name, value.detach().cpu()) for name, value in matrices.items()]
    lines.append("```\n" + "\n".join(shown) + "\n```")
    told = ("rate", "rate_q", "rate_d", "drift", "diffusion")
    parts = {name: in_words(record[name]) for name in told if name in record}
    if parts:
        lines.append(_table(parts))
    return "\n\n".join(lines)


def _matrix(name: str, value: Tensor) -> str:
    """Rows under each other, in columns."""
    cells = [[f"{number:.5g}" for number in row] for row in value.tolist()]
    width = max(len(cell) for row in cells for cell in row)
    rows = ["[" + ", ".join(cell.rjust(width) for cell in row) + "]" for row in cells]
    return f"{name} = [" + (",\n" + " " * (len(name) + 4)).join(rows) + "]"


def _data(data: Any) -> str:
    if not data:
        return "Nothing is said about it."
    return _table(data) if isinstance(data, Mapping) else _shown(data)


def _use(about: Record, address: str) -> str:
    wanted = {name: about[name] for name in ("network", "process") if about[name]["kind"] is None}
    arguments = "".join(f", {name}={name}" for name in wanted)
    lines = [
        "```python",
        "import ornstein",
        "",
        f'model = ornstein.ScoreModel.from_pretrained("{address}"{arguments})',
        "samples = ornstein.sample(model, n=16, seed=0)",
        "```",
    ]
    needs = [
        f"Its {name} is code that is not in this folder, `{record['name']}`: build one as it was "
        f"and pass it as `{name}=`."
        for name, record in wanted.items()
    ]
    return "\n".join(lines) + "".join(f"\n\n{need}" for need in needs)


def _figures(figures: Any) -> str:
    if not figures:
        return "Nothing was measured when this model was saved."
    rows = [figures] if isinstance(figures, Mapping) else list(figures)
    if not all(isinstance(row, Mapping) for row in rows):
        return _shown(figures)
    flat = [{k: v for k, v in row.items() if not isinstance(v, (dict, list))} for row in rows]
    if len(flat) == 1:
        page = _table(flat[0])
    else:
        names = list(dict.fromkeys(name for row in flat for name in row))
        head = [_line(names), _line("---" for _ in names)]
        body = [_line(_shown(row.get(name, "")) for name in names) for row in flat]
        page = "\n".join(head + body)
    more = any(len(row) < len(whole) for row, whole in zip(flat, rows, strict=True))
    return page + ("\n\n`config.json` has the rest." if more else "")


def _made(record: Mapping[str, str]) -> str:
    names = ("ornstein", "commit", "torch", "numpy", "python", "system", "gpu", "cuda", "date")
    return _table({name: record[name] for name in names if name in record})


def in_words(record: Any) -> str:
    """A description in one line: linear (start 0.1, end 20, horizon 1)."""
    if isinstance(record, Mapping) and "kind" in record:
        if record["kind"] is None:
            return f"`{record['name']}`"
        said = {k: v for k, v in record.items() if k != "kind" and v is not None}
        inside = ", ".join(f"{k} {in_words(v)}" for k, v in said.items())
        return str(record["kind"]) + (f" ({inside})" if inside else "")
    return _shown(record)


def _table(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(_line((k, _shown(v))) for k, v in rows.items())])


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_shown(v) for v in value) + ")"
    return str(value)
