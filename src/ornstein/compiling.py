"""A network as fast as its device allows: compiled, captured, asked in batches of one size.

    compiled    torch.compile fuses what a network does between its matrix products
    captured    a CUDA graph launches all of it at once; small networks are mostly launches

Both want fixed shapes, so a `Quick` network fills a batch up, or cuts it into several. Neither
changes what is computed, only its rounding. What can't be compiled or captured is asked as it is,
and a warning says why. Gradients are never captured: this is for sampling and evaluation.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from ornstein import gpu

Compile = Literal["auto", "on", "off"]
Precision = Literal["auto", "float32", "tf32", "bfloat16"]
Tensors = tuple[Tensor, ...]
M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])

#: for commands to print; the library prints nothing
MESSAGE = "compiling the network, a minute or two the first time (--compile off starts at once)"

WORTH = 200_000  # examples through the network from which "auto" takes the time to compile
MOST_NETWORKS = 64  # that one process compiles
MOST_GRAPHS = 4  # of one function; each has memory of its own shapes
WARM = 2  # calls before a capture, in which libraries set themselves up
FEW = 16  # examples by which memory is measured, and a compiler is checked
CLOSE = 0.1  # of what a network says: rounding in bfloat16 is a tenth of it, or less
SHARE = 0.6  # of the free memory that a batch may take
#: torch 2.11 and others write a buffer with some strides and read it with padded ones, silently
#: (pytorch/pytorch#194281): nothing is padded
OPTIONS = {"comprehensive_padding": False}


# ---------------------------------------------------------------- what is wanted


def wanted(compile: Compile, device: torch.device, rows: int | None = None) -> bool:
    """Whether to compile; "auto" does for CUDA with Triton, and for `rows` enough examples."""
    if compile not in get_args(Compile):
        raise ValueError(f"compile={compile!r}; expected 'auto', 'on' or 'off'.")
    if compile != "auto":
        return compile == "on"
    return _has_triton(device) and (rows is None or rows >= WORTH)


def check_precision(precision: object) -> None:
    if precision not in get_args(Precision):
        known = ", ".join(repr(name) for name in get_args(Precision))
        raise ValueError(f"precision={precision!r}; expected one of {known}.")


def _has_triton(device: torch.device) -> bool:
    if device.type != "cuda" or gpu.triton is None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 0)


def ready() -> None:
    """Before something is compiled: where kernels are kept, and how many networks there may be.

    torch compiles a function for eight kinds of input and then, silently, no more; all losses, and
    all networks that are asked, are one function.
    """
    cache()
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_NETWORKS)


def compiled(function: F, **how: Any) -> F:
    """torch.compile, with options by which it computes the same."""
    ready()
    found: Any = torch.compile(function, options=dict(OPTIONS), **how)
    return found


def cache() -> Path | None:
    """Let compiled kernels be kept from run to run; where, or None if they can't be.

    The folder is $ORNSTEIN_CACHE/compiled, or compiled in ~/.cache/ornstein. Variables of torch and
    Triton that are set already are left alone.
    """
    given, base = os.environ.get("ORNSTEIN_CACHE"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = (Path(given) if given else Path(base) / "ornstein").expanduser() / "compiled"
    places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton"}
    missing = [name for name in places if _unset(os.environ.get(name))]
    if not missing:
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    try:
        places["TRITON_CACHE_DIR"].mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        warnings.warn(
            f"{folder} can't be written ({error}); what is compiled will not be kept there. Set "
            "ORNSTEIN_CACHE to a folder that can.",
            stacklevel=2,
        )
        return None
    for name in missing:
        os.environ[name] = str(places[name])
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def _unset(value: str | None) -> bool:
    """torch sets its variable itself, to a folder that is gone after a restart."""
    own = Path(tempfile.gettempdir()) / "torchinductor_"
    return not value or value.startswith(str(own))


@contextlib.contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """TF32 off for "float32", on for "tf32"; otherwise as torch is set."""
    switches: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before: list[bool] = []
    if precision in ("float32", "tf32"):
        with contextlib.suppress(RuntimeError):  # torch's newer switches are in use: leave them
            before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches[: len(before)]:
            switch.allow_tf32 = precision == "tf32"
        yield
    finally:
        for switch, value in zip(switches, before, strict=False):
            switch.allow_tf32 = value


# ---------------------------------------------------------------- how it is asked


class Compiled:
    """A function of a module and tensors by torch.compile; as it is, where that fails.

    What was compiled is compared with the function itself, on a few examples of the first batch of
    each shape: a compiler that is wrong says nothing.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self.function = function
        self._compiled: Callable[..., Tensors] | None = compiled(function, dynamic=False)
        self._trusted: set[Any] = set()

    def __call__(self, *inputs: Any) -> Tensors:
        if self._compiled is None:
            return self.function(*inputs)
        try:
            found = self._compiled(*inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways
            found = self.function(*inputs)  # a mistake of the function's own is raised here
            self._go_on_without(f"can't be compiled ({first_line(error)})")
            return found
        key = tuple((t.shape, t.dtype) for t in inputs if isinstance(t, Tensor))
        if key not in self._trusted and not _capturing(found):
            if not self._off(found, inputs) <= CLOSE:
                self._go_on_without("says something else once it is compiled")
                return self.function(*inputs)
            self._trusted.add(key)
        return found

    def _off(self, found: Tensors, inputs: tuple[Any, ...]) -> float:
        """The largest error of an example, as a part of what the examples are."""
        count = len(found[0])
        few = torch.linspace(0, count - 1, min(FEW, count), device=found[0].device).round().long()
        plain = self.function(*(t[few] if isinstance(t, Tensor) else t for t in inputs))
        wanted, given = (
            torch.cat([t.flatten(1).double() for t in side], 1)
            for side in (plain, [t[few] for t in found])
        )
        size = float(wanted.square().sum(1).mean().sqrt())
        error = float((given - wanted).square().sum(1).max().sqrt())
        if not math.isfinite(size):  # of no use, compiled or not
            return 0.0
        return error / size if size else math.inf if error else 0.0

    def _go_on_without(self, why: str) -> None:
        self._compiled = None
        warnings.warn(
            f"the network {why}; going on without. Use compile='off' (--compile off) not to try.",
            stacklevel=3,
        )


def _capturing(tensors: Tensors) -> bool:
    return any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing()


@dataclass
class Graph:
    """A captured call: where it reads, and where it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Tensors

    def __call__(self, *inputs: Tensor) -> Tensors:
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


@dataclass
class Captured:
    """A function of tensors as CUDA graphs, one for each of its shapes; as it is elsewhere.

    It must read nothing from the device, and compute in eval mode. What else it uses must stay
    where it is in memory. warm: calls before a capture; none, if it was called before.
    """

    function: Callable[..., Tensors]
    warm: int = WARM
    graphs: dict[Any, Graph] = field(default_factory=dict)
    possible: bool = True

    def __call__(self, *inputs: Tensor) -> Tensors:
        if not self.possible or not all(t.is_cuda for t in inputs) or _busy():
            return self.function(*inputs)
        key = tuple((t.shape, t.stride(), t.dtype) for t in inputs)
        if key not in self.graphs:
            with torch.cuda.device(inputs[0].device):
                graph = self._captured(inputs)
            if graph is None:
                return self.function(*inputs)
            while len(self.graphs) >= MOST_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[key] = graph
        return self.graphs[key](*inputs)

    def forget(self) -> None:
        """Give the memory of all graphs back."""
        self.graphs.clear()

    def _captured(self, inputs: Tensors) -> Graph | None:
        static, here = [t.clone() for t in inputs], torch.cuda.current_stream()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(here)
        warm = False
        try:
            with torch.cuda.stream(side):
                for number in range(self.warm):
                    with waiting_refused(number > 0):  # a capture that fails leaves more behind
                        self.function(*static)
            here.wait_stream(side)
            warm = True
            # other threads may use the device meanwhile, to load data for one
            with capturing(graph, capture_error_mode="thread_local"):
                outputs = self.function(*static)
        except Exception as error:
            torch.cuda.set_stream(here)  # where a failed capture does not come back to
            here.wait_stream(side)
            if not warm and isinstance(error, torch.OutOfMemoryError):
                raise  # the plain call would need as much
            self.possible = False
            self.graphs.clear()
            warnings.warn(
                f"no CUDA graph could be captured ({first_line(error)}); going on without, which "
                "is slower for small networks.",
                stacklevel=3,
            )
            return None
        return Graph(graph, static, outputs)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record into a graph that has workspaces of its own.

    torch keeps one of cuBLAS for every stream, wherever it was first wanted: inside a graph, that
    graph's memory. The next graph would use it too, and read what is gone after the first.
    Older graphs that nobody holds any more give their memory back before it begins.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Quick(nn.Module):
    """A network that is asked in batches of `size` examples, whatever it is given.

    compile: by torch.compile. capture: in CUDA graphs; images are then given to it with their
    channels last. narrow: its arithmetic is bfloat16.
    """

    def __init__(
        self, network: nn.Module, size: int, compile: bool, capture: bool, narrow: bool
    ) -> None:
        super().__init__()
        self.network, self.size, self.narrow = network, size, narrow
        self.fixed = compile or capture
        self._call = Captured(_once(network, compile, narrow), possible=capture)
        self.training = False

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not self.fixed or len(x) == 0:
            return _ask(self.network, self.narrow, x, logsnr)[0]
        parts = zip(x.split(self.size), logsnr.split(self.size), strict=True)
        found = [self._part(*part) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def resize(self, size: int) -> None:
        """Another number of examples; what was captured is forgotten."""
        self.size = size
        self._call.forget()

    @property
    def captured(self) -> bool:
        """Whether it is asked in CUDA graphs."""
        return self._call.possible and bool(self._call.graphs)

    def _part(self, x: Tensor, logsnr: Tensor) -> Tensor:
        count, missing = len(x), self.size - len(x)
        if missing:  # by the last example, so that nothing unusual is asked
            x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
            logsnr = torch.cat([logsnr, logsnr[-1:].expand(missing)])
        images = x.is_cuda and x.dim() == 4
        form = torch.channels_last if images else torch.contiguous_format
        return self._call(x.contiguous(memory_format=form), logsnr.contiguous())[0][:count]


def _ask(network: nn.Module, narrow: bool, x: Tensor, logsnr: Tensor) -> Tensors:
    """One function for all networks, so that what was compiled for one serves its copies."""
    if not narrow:
        return (network(x, logsnr),)
    # without its cache of cast weights, which a graph would find gone
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        return (network(x, logsnr),)


def _once(network: nn.Module, compile: bool, narrow: bool) -> Callable[..., Tensors]:
    """What a graph captures; it knows nothing of its owner, whose memory goes when it does."""
    asked = Compiled(_ask) if compile else _ask

    def once(x: Tensor, logsnr: Tensor) -> Tensors:
        return asked(network, narrow, x, logsnr)

    return once


def quick(
    network: nn.Module,
    size: int,
    device: torch.device,
    compile: Compile,
    precision: Precision,
    rows: int | None = None,
) -> Quick | None:
    """The network compiled, captured and narrowed as asked for; None where nothing is to be done.

    rows: examples it will be asked about, if that is known; for a few, "auto" only captures.
    """
    compiled, narrow = wanted(compile, device, rows), precision == "bfloat16"
    captured = compile != "off" and device.type == "cuda"
    if not (compiled or captured or narrow):
        return None
    return Quick(network, size, compiled, captured, narrow)


def with_network(model: M, network: nn.Module) -> M:
    """The same model, its network asked in another way; nothing is copied."""
    other = copy.copy(model)
    other._modules = dict(model._modules)
    other.add_module("network", network)
    return other


# ---------------------------------------------------------------- memory


def largest_batch(run: Callable[[int], object], device: torch.device, most: int) -> int:
    """Examples that a GPU has memory for, a power of two ≤ most: from what a few of them take."""
    try:
        run(FEW)  # what is set up once only
    except torch.OutOfMemoryError:
        return 1
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run(FEW)
    each = max(1, torch.cuda.max_memory_allocated(device) - before) / FEW
    return batch_within(_free(device), each, most)


def _free(device: torch.device) -> float:
    """Bytes that torch could still give out, within the share of the GPU that it is allowed."""
    taken = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)  # torch 2.8
    return min(free + torch.cuda.memory_reserved(device) - taken, share(device) * total - taken)


def batch_within(free: float, each: float, most: int) -> int:
    """The largest power of two of examples that take a part of what is free: 1 … most."""
    count = min(most, int(SHARE * free / each))
    return 1 << max(0, count.bit_length() - 1)


@contextlib.contextmanager
def waiting_refused(on: bool) -> Iterator[None]:
    """What would wait for the device raises an error."""
    before = torch.cuda.get_sync_debug_mode()
    if on:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _busy() -> bool:
    """Whether gradients are wanted, or something larger is being captured."""
    return torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing()


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
