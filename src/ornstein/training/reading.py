"""A run as it can be read at any time: while it trains, when it is done, or after an interruption.

`read_run` takes what is there. Nothing is computed and no weights are loaded: parameters are
counted from the header of the newest checkpoint's safetensors file. What is not there yet is None
or empty; what is there but damaged is left out with a warning, or refused if it is the config.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from ornstein.processes import PRESETS
from ornstein.training.checkpoints import STATE, Checkpoints
from ornstein.training.choices import as_learned
from ornstein.training.run import CONFIG, STARTS, read_config, read_metrics

Line = Mapping[str, Any]

MODEL = "model.safetensors"
NETWORK = "network."  # how the names of a network's tensors begin


@dataclass(frozen=True)
class RunSummary:
    """What a run's folder says."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    training: tuple[Line, ...]  # lines of metrics, means over some steps
    validation: tuple[Line, ...]
    evaluations: tuple[Line, ...]  # as their files have them, with the file's stem as "name"
    pictures: tuple[tuple[str, Path], ...]  # titles and files: by step, then by name
    starts: tuple[Line, ...]  # step, versions, machine and commit of each
    best: Line | None  # step, bits_per_dim and standard_error of the best on validation
    parameters: int | None  # of the network
    steps: int  # done so far …
    total: int | None  # … of so many
    seconds: float | None  # of training, over all starts
    data: str | None
    process: str | None
    parametrisation: str | None
    n_vars: int | None

    @property
    def learned(self) -> bool:
        """Whether Q and D were learned, and written down along the way."""
        return any("Q" in line and "D" in line for line in self.training)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Versions, machine and commit of the last start."""
        return self.starts[-1] if self.starts else _record(self.config.get("provenance"))

    @property
    def options(self) -> dict[str, str]:
        """All options as text, by dotted names; in the user's words where the run has them."""
        asked, config = _record(self.config.get("experiment")), self.config
        parts = {part: asked.get(part, config.get(part)) for part in ("data", "process", "model")}
        return dict(_flat({**parts, "training": config.get("training")}))


def read_run(folder: str | Path, name: str | None = None) -> RunSummary:
    """The summary of a run; its name is that of the folder unless one is given."""
    path = Path(folder).expanduser()
    _check_folder(path)
    config = read_config(path)
    try:
        lines = read_metrics(path)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path / 'metrics.jsonl'} is not text ({error}); expected lines of JSON. It is "
            "damaged: restore it from a copy, or move it away."
        ) from error
    training = [line for line in lines if not _validates(line) and not _measures(line)]
    validation = [line for line in lines if _validates(line)]
    checkpoint, state = _newest(path)
    steps = [line["step"] for line in lines] + [_whole(state.get("step")) or 0]
    seconds = [_number(line.get("seconds")) for line in (*training[-1:], state)]
    known = [value for value in seconds if value is not None]
    evaluations = _evaluations(path)
    return RunSummary(
        name=name or names([path])[0],
        folder=path,
        config=config,
        training=tuple(training),
        validation=tuple(validation),
        evaluations=evaluations,
        pictures=_pictures(path),
        starts=_starts(path),
        best=_best(state, validation),
        parameters=_parameters(checkpoint),
        steps=max(steps),
        total=_whole(_record(config.get("training")).get("steps")),
        seconds=max(known) if known else None,
        data=_text(_record(config.get("data")).get("name"))
        or _text(_experiment(config, "data").get("data")),
        process=_process(config, evaluations),
        parametrisation=_text(_record(config.get("model")).get("parametrisation"))
        or _text(_experiment(config, "model").get("parametrisation"))
        or _agreed(evaluations, "parametrisation"),
        n_vars=_n_vars(config, training),
    )


def read_runs(folders: Sequence[str | Path]) -> list[RunSummary]:
    """The summaries of several runs, under names that tell them apart."""
    return [read_run(f, name) for f, name in zip(folders, names(folders), strict=True)]


def names(folders: Sequence[str | Path]) -> list[str]:
    """Short names that differ: the ends of the paths, as long as they must be."""
    paths = [Path(os.path.abspath(Path(folder).expanduser())) for folder in folders]
    parts = [path.parts[1:] or path.parts for path in paths]  # without the root, unless it is that
    lengths = [1] * len(paths)
    while True:
        found = ["/".join(part[-n:]) for part, n in zip(parts, lengths, strict=True)]
        same = Counter(found)
        longer = [
            min(n + 1, len(part)) if same[name] > 1 else n
            for name, part, n in zip(found, parts, lengths, strict=True)
        ]
        if longer == lengths:
            break
        lengths = longer
    seen: Counter[str] = Counter()
    for i, name in enumerate(found):  # what is left is one folder that was given several times
        seen[name] += 1
        found[i] = f"{name} ({seen[name]})" if same[name] > 1 else name
    return found


# ---------------------------------------------------------------- files


def _check_folder(path: Path) -> None:
    if (path / CONFIG).is_file():
        if (path / STATE).exists() and path.parent.name == "checkpoints":
            raise ValueError(
                f"{path} is a checkpoint; expected the folder of its run, {path.parent.parent}."
            )
        return
    expected = f"expected the folder of a run, as `ornstein train` writes it, with a {CONFIG}"
    if not path.exists():
        raise ValueError(f"{path} does not exist; {expected}. Is the name right?")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; {expected}.")
    inside = sorted(found.parent.name for found in path.glob(f"*/{CONFIG}"))
    hint = f" These in it do: {', '.join(inside[:8])}." if inside else ""
    raise ValueError(f"{path} has no {CONFIG}; {expected}.{hint}")


def _newest(path: Path) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint whose state can be read, and that state."""
    for _, folder in reversed(Checkpoints(path / "checkpoints").all()):
        try:
            return folder, _object(folder / STATE)
        except (OSError, ValueError) as error:
            warnings.warn(f"{folder} can't be read ({error}); passed over.", stacklevel=3)
    return None, {}


def _parameters(checkpoint: Path | None) -> int | None:
    """Numbers in the network's tensors, or in all where none is said to be the network's."""
    if checkpoint is None or not (checkpoint / MODEL).is_file():
        return None
    try:
        with safetensors.safe_open(checkpoint / MODEL, framework="pt") as file:
            sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        warnings.warn(f"{checkpoint / MODEL} can't be read ({error}).", stacklevel=3)
        return None
    own = [size for name, size in sizes.items() if name.startswith(NETWORK)]
    return sum(own) if own else sum(sizes.values())


def _evaluations(path: Path) -> tuple[Line, ...]:
    found = []
    for file in sorted((path / "evaluations").glob("*.json")):
        try:
            record = _object(file)
            if "bits_per_dim" not in record:
                raise ValueError("it has no bits_per_dim")
        except (OSError, ValueError) as error:
            warnings.warn(f"{file} is not an evaluation ({error}); left out.", stacklevel=3)
            continue
        found.append({**record, "name": file.stem})
    return tuple(found)


def _pictures(path: Path) -> tuple[tuple[str, Path], ...]:
    """Those that were made along the way, by step, then the others by name."""
    by_step, others = [], []
    for file in sorted((path / "samples").glob("*.png")):
        step = re.fullmatch(r"step-(\d+)", file.stem)
        if step:
            by_step.append((int(step[1]), file))
        else:
            others.append((file.stem, file))
    return (*((f"step {step:,}", file) for step, file in sorted(by_step)), *others)


def _starts(path: Path) -> tuple[Line, ...]:
    """One record for each start; a line that is not whole is passed over."""
    file, found = path / STARTS, []
    for text in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return tuple(found)


def _object(file: Path) -> dict[str, Any]:
    record = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return record


# ---------------------------------------------------------------- what they say


def _validates(line: Line) -> bool:
    return "valid_bits_per_dim" in line


def _measures(line: Line) -> bool:
    """Whether it is about the samples' quality."""
    return any(key.startswith("quality_") for key in line)


def _best(state: Line, validation: Sequence[Line]) -> Line | None:
    """The best of the lines that were written, or of the checkpoint where there is no line."""
    known = [line for line in validation if _number(line["valid_bits_per_dim"]) is not None]
    if known:
        line = min(known, key=lambda line: float(line["valid_bits_per_dim"]))
        figures = {k: line.get(f"valid_{k}") for k in ("bits_per_dim", "standard_error")}
        return {"step": line["step"], **figures}
    best = _record(state.get("best"))
    return best if _number(best.get("bits_per_dim")) is not None else None


def _process(config: Mapping[str, Any], evaluations: Sequence[Line]) -> str | None:
    described = _record(config.get("model")).get("process")
    return (
        _text(_record(described).get("name"))
        or _text(described)
        or _text(_experiment(config, "process").get("process"))
        or _agreed(evaluations, "process")
    )


def _n_vars(config: Mapping[str, Any], training: Sequence[Line]) -> int | None:
    """K, from whatever matrix of the process is there."""
    process = _record(_record(config.get("model")).get("process"))
    lines = [line["Q"] for line in training if "Q" in line]
    for matrix in (process.get("S"), process.get("prior"), *lines[-1:]):
        if isinstance(matrix, list) and matrix:
            return len(matrix)
    found = as_learned(str(_experiment(config, "process").get("process")))
    if found is None:
        return None
    first, _ = found
    return first + 1 if isinstance(first, int) else PRESETS[first]().n_vars


def _flat(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of all options, nested ones with dots."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{where}.{key}" if where else str(key))
    elif value is not None:
        yield where, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    elif "." in where:
        yield where, "not set"


def _experiment(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    return _record(_record(config.get("experiment")).get(part))


def _agreed(evaluations: Sequence[Line], key: str) -> str | None:
    """What all evaluations say, if they do."""
    said = {_text(record.get(key)) for record in evaluations}
    return said.pop() if len(said) == 1 else None


def _record(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if good and math.isfinite(value) else None
