"""The work of an evaluation: what is computed for an example, and how a pass goes over the data.

Times are fitted to the first examples (`pilot`) before the first pass. A pass is shared out over
the processes of `torch.distributed`, and what is done is kept in a `Ledger`.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ornstein import compiling, pilot
from ornstein.compiling import Compile, Precision, Quick
from ornstein.draws import Counted
from ornstein.examples import Source, as_bytes, marks_of
from ornstein.ledger import Ledger, agree, processes
from ornstein.likelihood import Continuous, Likelihood
from ornstein.objectives import elbo
from ornstein.process import Process
from ornstein.score import ScoreModel
from ornstein.terms import Bound, knows_no_times, natural_times
from ornstein.times import Span, Times
from ornstein.transition import Given
from ornstein.truncation import Truncation, ends

FORMAT = 2  # of the files that an evaluation leaves behind
USUAL = 256  # examples times draws at a time on a CPU
MOST = 4096  # on a GPU, at most
STEPS = 64  # in which a bin of a proposal is seen, for a curve
PILOT_SEED = 0x70696C6F74  # sets it apart: even the turn of all places must be another

Part = tuple[Tensor, Bound]  # which examples of a batch, and their bounds


@dataclass
class Work:
    """What is computed for an example."""

    model: ScoreModel
    given: Given
    likelihood: Likelihood
    truncation: Truncation
    seed: int
    draws: int
    batch_size: int
    times: Times | None = None
    quick: Quick | None = None  # its network, where that is not asked as it is

    def hasten(self, source: Source, compile: Compile, precision: Precision) -> None:
        """Let the network be compiled and captured, as asked for."""
        network, where, size = self.model.network, self.model.process.device, self.batch_size
        rows = 0  # of a loader nobody knows
        if isinstance(source.data, Tensor):
            rows = len(source.data[: source.limit]) * self.draws
        self.quick = compiling.quick(network, size, where, compile, precision, rows)
        if self.quick is not None:
            _, first = next(source.batches(size))  # of a loader none is larger
            self.quick.resize(min(size, len(first) * self.draws))
            self.model = compiling.with_network(self.model, self.quick)

    def halve(self, error: torch.OutOfMemoryError) -> None:
        """Go on with half as much at a time."""
        if self.batch_size <= self.draws:
            raise error
        self.batch_size = max(self.draws, self.batch_size // 2)
        if self.quick is not None:
            self.quick.resize(min(self.quick.size, self.batch_size))
        warnings.warn(
            f"not enough memory ({str(error).splitlines()[0]}); going on with {self.batch_size} "
            "examples times draws at a time",
            stacklevel=4,
        )

    def bounds(self, x: Tensor, index: Tensor, first: int, number: int) -> Iterator[Part]:
        """Of these examples of a batch, a few at a time; of less where memory is short."""
        while len(index):
            chunk = index[: max(1, self.batch_size // self.draws)]
            try:
                bound = self.bound(x[chunk], first + chunk, number)
            except torch.OutOfMemoryError as error:
                self.halve(error)
                continue
            index = index[len(chunk) :]
            yield chunk, bound

    def bound(self, x: Tensor, index: Tensor, number: int) -> Bound:
        """Of these examples in this pass."""
        fitted, random = self.fitted, self._random(index, number)
        joint = self.model.parametrisation == "joint"  # which says what known noise costs it
        found = self._elbo(x, random, self.draws, self.times, fitted is not None or joint)
        if fitted is None:
            return found
        places = random.places(self.draws, fitted.spread)
        excess = fitted.excess(places.flatten()).view_as(places)
        return found.controlled(fitted.control(found.logsnr)).less(found.dims * excess)

    @property
    def fitted(self) -> pilot.Fitted | None:
        """The proposal, if it is the pilot's."""
        return self.times if isinstance(self.times, pilot.Fitted) else None

    def look(self, x: Tensor, index: Tensor, times: Times) -> Bound:
        """For the pilot, before the first pass, with numbers that have nothing to do with it."""
        random = Counted(self.seed ^ PILOT_SEED, index.to(self.model.process.device))
        return self._elbo(x, random, pilot.DRAWS, times, True)

    def _elbo(
        self,
        x: Tensor,
        random: Counted,
        draws: int,
        times: Times | None,
        control: bool,
    ) -> Bound:
        return elbo(
            self.model,
            x.to(self.model.process.device),
            draws=draws,
            times=times,
            given=self.given,
            likelihood=self.likelihood,
            truncation=self.truncation,
            random=random,
            control=control,
        )

    def _random(self, index: Tensor, number: int) -> Counted:
        return Counted(self.seed, index.to(self.model.process.device), number)

    def expected(self, edges: np.ndarray) -> np.ndarray | float:
        """What the pilot expects between these values of log SNR, rising: nats per dimension."""
        if self.fitted is None:
            return 0.0
        model, process, base = self.model, self.model.process, self.fitted.base
        count = STEPS * self.fitted.bins
        places = torch.arange(count + 1, dtype=torch.float64, device=process.device) / count
        low, high = ends(self.truncation, process)
        direct = None
        if knows_no_times(model, self.given):
            direct = base.place_logsnr(places, low, high, model.data_std)
        if direct is None:
            span = Span(process, self.truncation.time(process), model.data_std)
            logsnr = process.transition(base.place(places, span)[0]).logsnr
        else:
            logsnr = direct[0]
        steps = self.fitted.line((places[1:] + places[:-1]) / 2) / count
        above = torch.cat([steps.new_zeros(1), steps.cumsum(0)])  # log SNR falls with places
        found = np.interp(edges, logsnr.flip(0).cpu().numpy(), above.flip(0).cpu().numpy())
        found[0], found[-1] = float(above[-1]), 0.0
        return -np.diff(found)

    @property
    def name(self) -> str:
        """Of the bound."""
        return self.likelihood.name + (" given the state" if self.given == "state" else "")

    def entropies(self, logsnr: np.ndarray) -> np.ndarray | float:
        """Given the state: bits/dim by which entropies change the error in each bin."""
        if self.given == "x":
            return 0.0
        process = self.model.process
        inner = torch.from_numpy(np.exp(-logsnr[1:-1] / 2)).to(process.device)
        first = self.truncation.time(process).reshape(1)
        last = torch.full_like(first, process.horizon)
        times = torch.cat([last, process.time_of_noise(inner), first])
        less = process.transition(times, given="state").logdet - process.transition(times).logdet
        return -less.diff().cpu().numpy() / 2 / math.log(2)

    def settings(self, source: Source, times: Times | None) -> dict[str, Any]:
        """What must not change when an evaluation goes on."""
        joint = self.model.parametrisation == "joint"
        return {
            "format": FORMAT,
            "model": fingerprint(self.model),
            "network": network_print(self.model.network),
            "process": self.model.process.name,
            "kernel": kernel_print(self.model.process),
            "parametrisation": self.model.parametrisation,
            "precondition": self.model.precondition,
            "features": list(self.model.features),
            "likelihood": repr(self.likelihood),
            "truncation": repr(self.truncation),
            "given": self.given,
            "times": "fitted" if times is None else f"{times!r} {fingerprint(times)}",
            "seed": self.seed,
            "draws": self.draws,
            "limit": source.limit,
            **self.model.choices(),
            # rows from before joint models were read in the metric of their bound are others'
            **({"decoder": "read"} if joint and isinstance(self.likelihood, Continuous) else {}),
        }


def one_pass(work: Work, source: Source, store: Ledger, number: int, share: int) -> int:
    """Do what is left of one pass, shared out so many at a time; the number of examples."""
    where, (rank, world) = work.model.process.device, processes()
    count, seen = 0, 0
    with store.flushed(where):
        for batch_number, (first, batch) in enumerate(source.batches(share)):
            count = first + len(batch)
            mine = batch_number % world == rank
            if not mine and number > 0:
                continue
            marks = marks_of(batch)
            left = store.left(number, first, marks)
            seen = zlib.crc32(marks.tobytes(), seen)  # everybody must see the same data
            if not mine:
                continue
            for chunk, bound in work.bounds(batch, left, first, number):
                store.add(number, first + chunk, marks[chunk.numpy()], bound)
    if number == 0 and not agree([count, seen], where):
        raise ValueError(
            "the processes were given different data; expected the same loader in each of them, "
            "unshuffled: examples are shared out here. Don't use a DistributedSampler."
        )
    return count


def batch_by_memory(work: Work, source: Source) -> int:
    """What the GPU of every process has memory for."""
    device, draws = work.model.process.device, pilot.DRAWS
    base, head = natural_times(work.model, work.given), source.head(compiling.FEW // draws)

    def run(rows: int) -> None:
        index = torch.arange(rows // draws)
        work.look(head[index % len(head)], index, base)

    size = compiling.largest_batch(run, device, MOST)
    if processes()[1] > 1:
        nccl = torch.distributed.get_backend() == "nccl"
        least = torch.tensor([size], device=device if nccl else "cpu")
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        size = int(least)
    return max(size, work.draws)


def fit_times(work: Work, source: Source, times: Times | None, store: Ledger) -> Times:
    """The given one, held fixed, or one fitted to the first examples."""
    if times is not None:
        return copy.deepcopy(times).eval()
    base, found = natural_times(work.model, work.given), store.pilot()
    if found is None:
        x = source.head(pilot.EXAMPLES)
        store.left(0, 0, marks_of(x), keep=True)  # the first pass must see the same
        while found is None:
            try:
                found = pilot.fit(work.look, x, base, max(1, work.batch_size // pilot.DRAWS))
            except torch.OutOfMemoryError as error:
                work.halve(error)
        store.keep_pilot(found)
    return pilot.Fitted(base, found, work.model.process.device)


# ---------------------------------------------------------------- what it is of


def fingerprint(module: nn.Module) -> str:
    """A checksum of all numbers of a module."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(as_bytes(value.detach().cpu()))
    return digest.hexdigest()


def network_print(network: Any) -> str:
    """What a network is, beside its numbers."""
    if isinstance(network, nn.Module):
        return hashlib.blake2b(repr(network).encode(), digest_size=8).hexdigest()
    return str(getattr(network, "__qualname__", type(network).__qualname__))


def kernel_print(process: Process) -> list[str]:
    """A few numbers of the kernel, which rates that are functions don't show elsewhere."""
    times = process.horizon * torch.tensor([0.1, 0.4, 1.0], dtype=torch.float64)
    return [f"{v:.6e}" for v in process.transition(times).snr.detach().tolist()]
