"""Numbers into a model: only if they are its own, in the types and ties that they had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ornstein.parts import Record, described, rebuilt
from ornstein.process import Process
from ornstein.schedules import Float64Module
from ornstein.sharing.folder import Shared, numbers_of, plain

SAME = 1e-9  # relative: fixed matrices that differ by less were rounded by another machine


def name_or_description(thing: object) -> Record:
    """What a part is; of code that a file can't hold only the name, with kind None."""
    thing = getattr(thing, "_orig_mod", thing)  # what torch.compile was given
    try:
        return described(thing)
    except ValueError:
        name = str(getattr(thing, "__qualname__", type(thing).__qualname__))
        more = f" {thing.name!r}" if isinstance(thing, Process) else ""
        return {"kind": None, "name": name + more}


def given_or_rebuilt(given: Any, record: Any, name: str, base: type) -> Any:
    """A part as it was given, else from its description; of a name alone nothing can be built."""
    if given is not None:
        return given
    if isinstance(record, dict) and record.get("kind", "") is None:
        raise ValueError(
            f"the {name} of this model was {record.get('name')}, code that a file can't hold; "
            "expected it as an argument. Build it as it was and pass it: "
            f"from_pretrained(folder, {name}={name})."
        )
    return rebuilt(record, f"the {name}", base)


@contextlib.contextmanager
def building(shared: Shared) -> Iterator[None]:
    """Where a described model is built: on the CPU, without a draw of the user's generator.

    Whatever is wrong with the description is said with the name of its file.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield
    except KeyError as error:
        raise ValueError(
            f"{shared.config} lacks {error} in the description of the model; expected all that "
            "model.save_pretrained(folder) writes. Copy the folder again."
        ) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{shared.config}: {error}") from error


def load(model: nn.Module, shared: Shared) -> None:
    """Put the numbers into a model of network, process and moments; strict in every way."""
    names = {plain(name): name for name in model.state_dict()}
    own = {name: model.state_dict()[long_name] for name, long_name in names.items()}
    _check_names(own, shared)
    _check_finite(shared)
    _check_process(model.get_submodule("process"), shared)
    for name, other in numbers_of(model)[1].items():
        if not torch.equal(shared.tensors[name], shared.tensors[other]):
            raise ValueError(
                f"{name} and {other} are one tensor of this model and differ in {shared.weights}; "
                "expected equal ones. Build the network as it was when the model was saved."
            )
    network: Any = getattr(model, "network", None)
    if isinstance(network, nn.Module):
        _cast(network, {n[8:]: t for n, t in shared.tensors.items() if n.startswith("network.")})
    with torch.device("cpu"):
        model.load_state_dict({long: shared.tensors[name] for name, long in names.items()})


def _check_names(own: Mapping[str, Tensor], shared: Shared) -> None:
    """Refuse tensors that are missing, not known, or of another shape."""
    found = shared.tensors
    shapes = [
        f"{name} has the shape {tuple(found[name].shape)} there and {tuple(own[name].shape)} in "
        "the model"
        for name in own
        if name in found and own[name].shape != found[name].shape
    ]
    differ = (
        [f"{name} is missing there" for name in own if name not in found],
        [f"{name} is not known to the model" for name in found if name not in own],
        shapes,
    )
    said = [w[0] + (f" (and {len(w) - 1} more such)" if len(w) > 1 else "") for w in differ if w]
    if said:
        raise ValueError(
            f"{shared.weights} does not fit the model: {'; '.join(said)}. Expected the tensors of "
            "this very model. Build network= and process= as they were when it was saved, or leave "
            f"out what {shared.config.name} describes."
        )


def _check_finite(shared: Shared) -> None:
    for name, value in shared.tensors.items():
        ours = name.startswith(("process.", "moments.", "histogram."))
        if ours and not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"{name} in {shared.weights} is NaN or infinite: {value.tolist()}; expected finite "
                "numbers. Load the model of an earlier step."
            )


def _check_process(process: nn.Module, shared: Shared) -> None:
    """Refuse a process whose fixed numbers are others than those of the file."""

    def refuse(what: str, here: object, there: object) -> None:
        raise ValueError(
            f"{what} is {here} in the process and {there} in {shared.weights}; expected the "
            "process that the model was saved with. Leave process= out, or build it with the "
            "numbers of the file. A channel model goes under another process once it is loaded: "
            "model.with_process(process)."
        )

    for path, module in process.named_modules(prefix="process"):
        pinned = getattr(module, "_pinned", {})
        there = shared.tensors[f"{path}.pinned"].tolist() if pinned else []
        for (name, here), other in zip(pinned.items(), there, strict=True):
            if here != other:
                refuse(f"{name} of {path}", here, other)
        if not isinstance(module, Float64Module):
            continue  # buffers of the user's own may be anything
        for name, buffer in module.named_buffers(recurse=False):
            if name == "pinned" or f"{path}.{name}" not in shared.tensors or not buffer.numel():
                continue
            saved = shared.tensors[f"{path}.{name}"].to(buffer.device, torch.float64)
            if float((buffer - saved).abs().max()) > SAME * float(saved.abs().max()):
                refuse(f"{path}.{name}", buffer.tolist(), saved.tolist())


def _cast(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The network in the types of the file; tied weights stay tied and strides as they are."""
    real = {name: value for name, value in tensors.items() if value.is_floating_point()}
    own = {plain(name): value for name, value in network.state_dict(keep_vars=True).items()}
    if all(own[name].dtype == value.dtype for name, value in real.items()):
        return
    kinds = {value.dtype for value in real.values()}
    if len(kinds) == 1:
        network.to(kinds.pop())  # with what is not in the state dict
        return
    for name, value in real.items():
        own[name].data = own[name].data.to(value.dtype)
