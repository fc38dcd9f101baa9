"""The folder itself: written whole or not at all, and read with every check.

In a folder that exists and may hold other things all three files are first written under other
names. Then config.json takes its place: that is the moment of change, since it has the checksum of
its weights. The weights follow; should something stop just between, they are found under their
other name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ornstein import files
from ornstein.parts import Record
from ornstein.provenance import provenance
from ornstein.sharing.card import card
from ornstein.sharing.hub import located

FORMAT = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
NEW = ".new"  # ends the other name of a file that is about to take its place


@dataclass(frozen=True)
class Shared:
    """What a folder holds."""

    folder: Path
    model: Record  # its description
    tensors: dict[str, Tensor]  # its state dict
    plan: list[float] | None  # the panels of a learned process: see Process.follow
    data: Any
    figures: Any
    version: str  # of the ornstein that wrote it

    @property
    def config(self) -> Path:
        return self.folder / CONFIG

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


# ---------------------------------------------------------------- writing


def write(
    folder: str | Path,
    model: nn.Module,
    description: Record,
    *,
    figures: Any = None,
    data: Any = None,
    text: str | None = None,
    address: str | None = None,
) -> Path:
    """Write the three files; `text` opens the card, which says to load the model from `address`."""
    target = Path(folder).expanduser()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; expected a folder to write the model into.")
    tensors, twins = numbers_of(model)
    process: Any = model.get_submodule("process")
    learned = any(True for _ in process.parameters())
    config: Record = {
        "format": FORMAT,
        "library": "ornstein",
        "version": _version(),
        "model": description,
        "plan": process.plan().tolist() if learned else None,
        "data": _for_json(data, "data"),
        "figures": _for_json(figures, "figures"),
        "provenance": _made_with(),
    }
    page = card(config, model, process, text, address)

    def put(place: Path, end: str) -> None:
        weights = place / (WEIGHTS + end)
        files.write_tensors(weights, tensors)
        config["weights"] = {"sha256": files.digest(weights), "twins": twins}
        files.write_text(place / (CONFIG + end), _json(config))
        files.write_text(place / (CARD + end), page)

    if not target.exists():
        with files.whole_folder(target) as part:
            put(part, "")
        return target
    _finish(target)
    try:
        put(target, NEW)
    except BaseException:
        _clear(target)
        raise
    try:
        os.replace(target / (CONFIG + NEW), target / CONFIG)
    except OSError:  # of an interrupt it is not known whether it came before or after
        _clear(target)
        raise
    for name in (WEIGHTS, CARD):
        os.replace(target / (name + NEW), target / name)
    return target


def _clear(folder: Path) -> None:
    for name in (WEIGHTS, CONFIG, CARD):
        (folder / (name + NEW)).unlink(missing_ok=True)


def numbers_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Its state dict without repetitions, and for each name left out the one that has its tensor.

    One module in two places (`rate_q` and `rate_d` may be one) has its tensors twice in a state
    dict, and a safetensors file refuses tensors that share memory.
    """
    tensors: dict[str, Tensor] = {}
    twins: dict[str, str] = {}
    names: dict[Any, str] = {}
    storages: set[Any] = set()
    for long_name, value in module.state_dict().items():
        name = plain(long_name)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} of the model's state dict is of type {type(value).__name__}; expected "
                "tensors only, which a file can hold. Keep it as a buffer, or out of the state."
            )
        storage = (value.device, value.untyped_storage().data_ptr())
        place = (*storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in names:
            twins[name] = names[place]
            continue
        tensors[name] = value.clone() if storage in storages else value  # views may overlap
        names[place] = name
        storages.add(storage)
    return tensors, twins


def plain(name: str) -> str:
    """The name of a tensor, whether or not a module around it is compiled."""
    return name.replace("_orig_mod.", "")


def _finish(folder: Path) -> None:
    """Let weights take their place that an interrupted save left under their other name."""
    waiting = folder / (WEIGHTS + NEW)
    with contextlib.suppress(ValueError):  # of a config that is not there
        if waiting.exists() and files.digest(waiting) == _weights(_config(folder)).get("sha256"):
            os.replace(waiting, folder / WEIGHTS)


def _for_json(value: Any, what: str) -> Any:
    """Numbers, strings, lists and mappings as JSON has them; a number that is none is None."""
    if hasattr(value, "tolist"):  # a tensor, an array, a number of numpy's
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _for_json(v, f"{what}[{key!r}]") for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(v, f"{what}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    raise ValueError(
        f"{what} is of type {type(value).__name__}; expected numbers, strings, lists and mappings "
        "of them, which JSON can hold. An Evaluation has to_dict()."
    )


def _json(config: Record) -> str:
    """Indented, with lists of numbers on one line; strings can't hold the newline looked for."""
    text = json.dumps(config, indent=1, allow_nan=False, ensure_ascii=False)
    numbers = re.compile(r"\[\n([^][{}\"]*)\n *\]")
    return numbers.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def _version() -> str:
    """Of this package, which is imported before any of its modules."""
    return str(getattr(sys.modules[__name__.split(".")[0]], "__version__", "unknown"))


@functools.cache
def _made_with() -> dict[str, str]:
    return {"ornstein": _version(), **provenance()}


# ---------------------------------------------------------------- reading


def read(folder: str | Path) -> Shared:
    """What a folder, or a model on the Hugging Face Hub, holds."""
    path = located(folder, [CONFIG, WEIGHTS, CARD])
    for _ in range(3):  # someone may be writing at this moment
        config = _config(path)
        for weights in (path / WEIGHTS, path / (WEIGHTS + NEW)):
            if _fits(weights, _weights(config).get("sha256")):
                return _shared(path, config, _tensors(weights))
    if not (path / WEIGHTS).exists():
        raise ValueError(
            f"{path} has a {CONFIG} and no {WEIGHTS}; expected both. Copy the whole folder, or "
            "write it again with model.save_pretrained(folder)."
        )
    _tensors(path / WEIGHTS)  # a file that is cut off says so
    raise ValueError(
        f"{path / WEIGHTS} is not the file that {CONFIG} was written with: its checksum differs. "
        "Expected both from one save. Copy the whole folder again; if you changed the weights on "
        f"purpose, remove 'sha256' from {CONFIG}."
    )


def _fits(weights: Path, checksum: str | None) -> bool:
    try:
        return weights.exists() and checksum in (None, files.digest(weights))
    except FileNotFoundError:  # it has just taken its place
        return False


def _tensors(weights: Path) -> dict[str, Tensor]:
    try:
        return files.read_tensors(weights)
    except ValueError as error:
        raise ValueError(
            f"{error} Copy the folder again, or write it again with model.save_pretrained(folder)."
        ) from error


def _shared(path: Path, config: Record, tensors: dict[str, Tensor]) -> Shared:
    twins = _weights(config).get("twins", {})
    lost = [name for name in twins.values() if name not in tensors]
    if lost:
        raise ValueError(
            f"{path / WEIGHTS} has no tensor {lost[0]!r}, which {CONFIG} speaks of; expected both "
            "from one save. Copy the whole folder again."
        )
    plan = config.get("plan")
    return Shared(
        folder=path,
        model=config["model"],
        tensors={**tensors, **{name: tensors[other] for name, other in twins.items()}},
        plan=[float(v) for v in plan] if isinstance(plan, list) else None,
        data=config.get("data"),
        figures=config.get("figures"),
        version=str(config.get("version")),
    )


def _weights(config: Record) -> Record:
    """What the config says about the weights."""
    found = config.get("weights")
    return found if isinstance(found, dict) else {}


def _config(path: Path) -> Record:
    """config.json, checked."""
    file = path / CONFIG
    written = "as model.save_pretrained(folder) writes it"
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}; expected a model's, {written}.")
    if not file.exists():
        raise ValueError(f"{path} has no {CONFIG}; expected a model's folder, {written}.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file} can't be read ({error}); expected JSON, {written}. Copy the folder again."
        ) from error
    if not isinstance(config, dict) or config.get("library") != "ornstein":
        raise ValueError(
            f"{file} is not about a model of this library; expected 'library': 'ornstein' in it, "
            f"{written}."
        )
    if config.get("format") != FORMAT:
        raise ValueError(
            f"{file} has format {config.get('format')!r} of ornstein {config.get('version')}; "
            f"expected format {FORMAT}, all that ornstein {_version()} reads. Upgrade: pip install "
            "--upgrade ornstein."
        )
    if not isinstance(config.get("model"), dict):
        raise ValueError(f"{file} describes no model; expected an object at 'model', {written}.")
    return config
