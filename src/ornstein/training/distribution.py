"""Several processes as one: who does what, and how they agree.

`torchrun` starts the processes and says who they are in the environment. The batch is that of the
whole run; every process takes an equal share of it, and gradients are averaged. Since noise is a
function of an example's place in the run, no process repeats another's.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ornstein.ledger import processes


def device_of(name: str | None) -> torch.device:
    """A device by its name; by default CUDA where there is one, each process its own."""
    if name is not None:
        return _named(name)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"there is no device {name!r}; expected cpu, cuda or cuda:N.") from error
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= there:
            raise ValueError(
                f"device {name!r} was asked for and this machine has {there} CUDA devices; "
                "expected cpu" + (f", or cuda:0 to cuda:{there - 1}." if there else ".")
            )
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ValueError(f"device {name!r} was asked for; expected cpu, cuda or cuda:N.")
    return device


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Join the other processes if torchrun started this one, and leave them at the end."""
    wanted = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not wanted or torch.distributed.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    _groups.append(torch.distributed.group.WORLD)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# A group whose last owner is the reducer of a DistributedDataParallel waits, in its destructor and
# with the interpreter's lock held, for a thread that needs that lock to free its last tensor: the
# process never ends. So groups live as long as it.
_groups: list[Any] = []


def share(batch: int, accumulate: int) -> int:
    """Examples that this process does at a time."""
    world = processes()[1]
    if batch % (world * accumulate):
        near = max(1, round(batch / (world * accumulate))) * world * accumulate
        who = f"{world} process{'es' if world > 1 else ''}"
        raise ValueError(
            f"a batch of {batch} can't be shared evenly by {who} in {accumulate} "
            f"part{'s' if accumulate > 1 else ''} each; expected a multiple of "
            f"{world * accumulate}, such as {near}."
        )
    return batch // (world * accumulate)


def agreed(numbers: Sequence[float], device: torch.device) -> tuple[float, ...]:
    """The first process's numbers, for all."""
    if processes()[1] == 1:
        return tuple(numbers)
    shared = torch.tensor(numbers, dtype=torch.float64, device=device)
    torch.distributed.broadcast(shared, 0)
    return tuple(shared.tolist())


def wrapped(loss: nn.Module, device: torch.device, unused: bool) -> nn.Module:
    """The loss with gradients averaged over the processes."""
    if processes()[1] == 1 or not any(p.requires_grad for p in loss.parameters()):
        return loss
    kind: Any = nn.parallel.DistributedDataParallel
    known = inspect.signature(kind.__init__).parameters
    # no buffer changes but those of a proposal that is refused; the option has two names
    quiet = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    shared: nn.Module = kind(
        loss,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=unused,
        gradient_as_bucket_view=True,
        **{quiet: False},
    )
    return shared


def unsynchronised(loss: nn.Module, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Gradients stay with their process for now: all parts of a step but the last."""
    inside = getattr(loss, "_orig_mod", loss)  # where it is compiled
    if wanted and isinstance(inside, nn.parallel.DistributedDataParallel):
        return inside.no_sync()
    return contextlib.nullcontext()
