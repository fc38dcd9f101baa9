"""Bits per dimension over a data set: an estimate with its errors, its parts and a curve over time.

Two errors are told apart. With x_i the mean of example i's draws and N examples,

    standard_error   std(x_i)/√N: how far the mean over *all* such data may be from this one
    draw_error       what more draws would remove: the spread of the draws of the same examples

Draws of one example are stratified in time, so their variance is estimated from differences of
neighbours, which is never too small in expectation. Where no proposal for times is given, one is
fitted to the first examples and then held fixed, so that the estimate stays unbiased.

Every random number is a function of (seed, pass, example). A run that was interrupted goes on where
it was, and several processes under `torch.distributed` share the examples, with the same result.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ornstein.draws import Counted
from ornstein.ledger import Ledger, Rows, gathered, processes, write_text
from ornstein.likelihood import Continuous, Likelihood
from ornstein.objectives import Bound, elbo, natural_times
from ornstein.provenance import provenance
from ornstein.score import ScoreModel
from ornstein.times import Adaptive, Times
from ornstein.transition import Given
from ornstein.truncation import NoiseLevel, Truncation

PILOT_EXAMPLES = 256
PILOT_DRAWS = 8
PILOT_CHUNK = 32
PILOT_BINS = 32
FORMAT = 1  # of the files that an evaluation leaves behind


@dataclass(frozen=True)
class Curve:
    """Where in time the bits are lost: bits/dim in bins of log SNR, which sum to the diffusion."""

    logsnr: Tensor  # (bins + 1,) edges, rising: the data's end is last
    bits: Tensor  # (bins,)
    errors: Tensor  # (bins,) standard errors


@dataclass(frozen=True)
class Evaluation:
    """Bits per dimension of a data set, an upper bound; the parts are costs in bits/dim too."""

    bits_per_dim: float
    standard_error: float  # over examples and draws
    draw_error: float  # of the draws alone; NaN with a single draw
    prior: float
    diffusion: float
    reconstruction: float
    examples: int
    draws: int
    dims: int
    bound: str
    process: str
    parametrisation: str
    truncation: str
    density: bool  # whether the data is real-valued, so that this is a density's
    per_example: Tensor  # (N,) float64, bits/dim
    curve: Curve

    @property
    def line(self) -> str:
        """The result in one honest line."""
        noise = "" if math.isnan(self.draw_error) else f", ±{self.draw_error:.2g} from draws alone"
        kind = "of a density " if self.density else ""
        return (
            f"{_with_error(self.bits_per_dim, self.standard_error)} bits/dim {kind}"
            f"({self.bound} bound, {self.process}, {self.parametrisation}; truncated at "
            f"{self.truncation}; {self.draws} draw{'s' if self.draws > 1 else ''} × "
            f"{self.examples} examples{noise})"
        )

    def difference(self, other: Evaluation) -> tuple[float, float]:
        """self − other on the same examples, and the standard error of the paired difference."""
        if self.per_example.shape != other.per_example.shape:
            raise ValueError(
                f"{self.examples} and {other.examples} examples can't be paired; expected two "
                "evaluations of the same data."
            )
        paired = self.per_example - other.per_example
        return paired.mean().item(), paired.std().item() / math.sqrt(len(paired))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the examples, for JSON."""
        record = {k: v for k, v in asdict(self).items() if k not in ("per_example", "curve")}
        record["draw_error"] = None if math.isnan(self.draw_error) else self.draw_error
        record["curve"] = {k: v.tolist() for k, v in vars(self.curve).items()}
        return record

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with versions, machine and commit."""
        write_text(Path(path), json.dumps({**self.to_dict(), "made by": provenance()}, indent=1))

    def __str__(self) -> str:
        return self.line


def evaluate(
    model: ScoreModel,
    data: Tensor | Iterable[Any],
    *,
    draws: int = 4,
    target_error: float | None = None,
    max_draws: int = 1024,
    times: Times | None = None,
    given: Given = "x",
    likelihood: Likelihood | None = None,
    truncation: Truncation | None = None,
    batch_size: int = 256,
    limit: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    save_every: float = 30.0,
    curve_bins: int = 40,
    quiet: bool = False,
) -> Evaluation:
    """Bits per dimension of a data set, an upper bound: estimate ± standard error. Prints one line.

    data: a tensor (N, *shape), or a loader of batches (tensors, or tuples that begin with one) that
        gives the same examples in the same order each time it is iterated.
    draws: times per example at which the network is asked; with target_error, in passes of that
        many until `draw_error` (bits/dim) is no larger, or max_draws is reached.
    times: a proposal; by default one fitted to the first examples, then fixed.
    batch_size: examples times draws for the network at a time; the result does not depend on it.
    folder: where to keep what is done, at most save_every seconds behind; the same call goes on
        from there. Under torch.distributed every process takes its share of the batches.
    """
    _check_arguments(model, draws, target_error, max_draws, batch_size, limit, curve_bins)
    likelihood = model.likelihood if likelihood is None else likelihood
    truncation = model.truncation if truncation is None else truncation
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        source = _Source(data, model.process.device, limit)
        work = _Work(model, given, likelihood, truncation, seed, draws, batch_size)
        settings = work.settings(source, times)
        store = Ledger(folder, settings, save_every)
        with torch.no_grad():
            work.times = _proposal(work, source, times, store)
            passes = 1 if target_error is None else max(1, max_draws // draws)
            for number in range(passes):
                try:
                    count = _one_pass(work, source, store, number)
                finally:
                    store.flush()
                # a folder may know more than was asked for
                rows = store.rows.part(number, count)
                rows = gathered(rows, draws, model.process.device)
                result = _summary(work, rows, count, curve_bins)
                if target_error is None or result.draw_error <= target_error:
                    break
    finally:
        for module, training in was_training.items():
            module.training = training
    if store.first_process:
        if store.folder is not None:
            result.save(store.folder / "result.json")
        if not quiet:
            print(result.line)
            if target_error is not None and not result.draw_error <= target_error:
                print(
                    f"  the draws' error is still above {target_error:g} after {result.draws} "
                    "draws per example (max_draws)"
                )
    return result


# ---------------------------------------------------------------- the work


@dataclass
class _Work:
    """What is computed for an example."""

    model: ScoreModel
    given: Given
    likelihood: Likelihood
    truncation: Truncation
    seed: int
    draws: int
    batch_size: int
    times: Times | None = None

    def bound(self, x: Tensor, index: Tensor, number: int, draws: int) -> Bound:
        return elbo(
            self.model,
            x,
            draws=draws,
            times=self.times,
            given=self.given,
            likelihood=self.likelihood,
            truncation=self.truncation,
            random=Counted(self.seed * 1_000_003 + number, index),
        )

    def settings(self, source: _Source, times: Times | None) -> dict[str, Any]:
        """What must not change when an evaluation goes on."""
        return {
            "format": FORMAT,
            "model": _fingerprint(self.model),
            "process": self.model.process.name,
            "parametrisation": self.model.parametrisation,
            "precondition": self.model.precondition,
            "features": list(self.model.features),
            "likelihood": repr(self.likelihood),
            "truncation": repr(self.truncation),
            "given": self.given,
            "times": "fitted" if times is None else f"{times!r} {_fingerprint(times)}",
            "seed": self.seed,
            "draws": self.draws,
            "limit": source.limit,
        }


def _one_pass(work: _Work, source: _Source, store: Ledger, number: int) -> int:
    """Do what is left of one pass; the number of examples."""
    count = 0
    rank, world = processes()
    size = max(1, work.batch_size // work.draws)
    for batch_number, (first, batch) in enumerate(source.batches(work.batch_size)):
        count = first + len(batch)
        if batch_number % world != rank:
            continue
        marks = _marks(batch)
        left = store.left(number, first, marks)
        for chunk in left.split(size) if len(left) else ():
            x = batch[chunk].to(work.model.process.device)
            index = (first + chunk).to(x.device)
            store.add(number, index, marks[chunk.numpy()], work.bound(x, index, number, work.draws))
    return count


def _proposal(work: _Work, source: _Source, times: Times | None, store: Ledger) -> Times:
    """The given one, held fixed, or one fitted to the first examples."""
    if times is not None:
        return copy.deepcopy(times).eval()
    base = natural_times(work.model, work.given)
    fitted = Adaptive(base, bins=PILOT_BINS).to(work.model.process.device)
    known = store.proposal()
    if known is not None:
        second, seen = known
        fitted.second.copy_(second)
        fitted.seen.copy_(seen)
        return fitted.eval()
    work.times = fitted.train()
    x = source.head(PILOT_EXAMPLES)
    for index in torch.arange(len(x)).split(PILOT_CHUNK):  # the same for every batch size
        where = work.model.process.device
        work.bound(x[index].to(where), index.to(where), -1, PILOT_DRAWS)
    store.keep_proposal(fitted.second, fitted.seen)
    return fitted.eval()


def _summary(work: _Work, rows: Rows, n: int, curve_bins: int) -> Evaluation:
    """A pure function of the rows of n examples."""
    model, dims = work.model, rows.dims
    counts = np.bincount(rows.index, minlength=n)
    if len(set(counts.tolist())) != 1:
        raise ValueError(
            f"{int((counts == 0).sum())} of {n} examples are missing from this evaluation; "
            "expected every process to see the same loader. Delete its folder to start anew."
        )
    passes = int(counts[0])

    def per_example(values: np.ndarray) -> np.ndarray:
        return np.bincount(rows.index, values, minlength=n) / passes / dims / math.log(2)

    samples = rows.samples  # (rows, draws)
    bits = -per_example(samples.mean(1))
    m = samples.shape[1]
    if m > 1:  # neighbours in stratified time
        squares = np.diff(samples, axis=1) ** 2
        variance = squares.sum(1) / (2 * m * (m - 1))
        noise = np.bincount(rows.index, variance, minlength=n) / passes**2
    elif passes > 1:
        mean = np.bincount(rows.index, samples[:, 0], minlength=n) / passes
        spread = np.bincount(rows.index, (samples[:, 0] - mean[rows.index]) ** 2, minlength=n)
        noise = spread / (passes - 1) / passes
    else:
        noise = np.full(n, math.nan)
    draw_error = float(np.sqrt(noise.sum())) / n / dims / math.log(2)
    error = float(bits.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Evaluation(
        bits_per_dim=float(bits.mean()),
        standard_error=error,
        draw_error=draw_error,
        prior=float(-per_example(rows.prior).mean()),
        diffusion=float(-per_example(rows.diffusion).mean()),
        reconstruction=float(-per_example(rows.reconstruction).mean()),
        examples=n,
        draws=passes * m,
        dims=dims,
        bound=rows.name,
        process=model.process.name,
        parametrisation=model.parametrisation,
        truncation=str(work.truncation),
        density=isinstance(work.likelihood, Continuous)
        or getattr(work.likelihood, "levels", 0) is None,
        per_example=torch.from_numpy(bits),
        curve=_curve(work, rows, curve_bins),
    )


def _curve(work: _Work, rows: Rows, bins: int) -> Curve:
    process = work.model.process
    low = float(process.transition(process.horizon).snr.log())
    if isinstance(work.truncation, NoiseLevel):
        high = -2 * math.log(work.truncation.standard_error)
    else:
        high = float(process.transition(work.truncation.time(process)).snr.log())
    edges = np.linspace(low, high, bins + 1)
    place = np.clip(np.searchsorted(edges, rows.logsnr.ravel(), side="right") - 1, 0, bins - 1)
    values = rows.errors.ravel() / rows.dims / math.log(2)
    count = len(values)
    mean = np.bincount(place, values, minlength=bins) / count
    square = np.bincount(place, values**2, minlength=bins) / count
    spread = np.sqrt(np.maximum(square - mean**2, 0) / count)
    return Curve(*(torch.from_numpy(v) for v in (edges, mean, spread)))


# ---------------------------------------------------------------- data


class _Source:
    """Examples in a fixed order, with their numbers."""

    def __init__(
        self, data: Tensor | Iterable[Any], device: torch.device, limit: int | None
    ) -> None:
        self.data, self.device, self.limit = data, device, limit
        if not isinstance(data, Tensor) and not isinstance(data, Iterable):
            raise ValueError(
                f"data was given as {type(data).__name__}; expected a tensor (N, *shape) or a "
                "loader of batches."
            )
        if isinstance(data, Iterator):
            raise ValueError(
                "data is an iterator, which can be read only once; expected a tensor or a loader, "
                "such as a torch DataLoader or a list of batches."
            )

    def batches(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """The number of the first example, and the batch, on the CPU or where it was."""
        done = 0
        parts: Iterable[Any]
        parts = self.data.split(size) if isinstance(self.data, Tensor) else self.data
        for part in parts:
            x = part[0] if isinstance(part, (tuple, list)) and len(part) else part
            if not isinstance(x, Tensor):
                raise ValueError(
                    f"the loader gave a batch of type {type(part).__name__}; expected a tensor "
                    "(batch, *data), or a tuple or list that begins with one."
                )
            if self.limit is not None:
                x = x[: self.limit - done]
            if len(x):
                yield done, x
            done += len(x)
            if self.limit is not None and done >= self.limit:
                return
        if not done:
            raise ValueError("the data is empty; expected at least one example.")

    def head(self, count: int) -> Tensor:
        """The first examples."""
        parts, found = [], 0
        for _, x in self.batches(count):
            parts.append(x[: count - found])
            found += len(parts[-1])
            if found == count:
                break
        return torch.cat(parts)


def _marks(batch: Tensor) -> np.ndarray:
    """A checksum of each example: (B,) uint32."""
    array = batch.detach().cpu().contiguous().numpy()
    return np.array([zlib.crc32(row.tobytes()) for row in array], dtype=np.uint32)


# ---------------------------------------------------------------- small tools


def _fingerprint(module: nn.Module) -> str:
    """A checksum of all numbers of a module."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        if isinstance(value, Tensor):
            flat = torch.empty(value.numel(), dtype=value.dtype)
            flat.copy_(value.detach().reshape(-1))
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _with_error(value: float, error: float) -> str:
    """'2.913 ± 0.012': as many digits as two of the error's."""
    if not math.isfinite(error) or error <= 0:
        return f"{value:.4f}"
    digits = min(max(1 - math.floor(math.log10(error)), 2), 10)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _check_arguments(
    model: Any,
    draws: Any,
    target_error: Any,
    max_draws: Any,
    batch_size: Any,
    limit: Any,
    curve_bins: Any,
) -> None:
    if not isinstance(model, ScoreModel):
        raise ValueError(
            f"model was given as {type(model).__name__}; expected ornstein.ScoreModel(network, "
            "process)."
        )
    counts = {"draws": draws, "max_draws": max_draws, "batch_size": batch_size}
    counts |= {"curve_bins": curve_bins} | ({} if limit is None else {"limit": limit})
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}; expected a whole number ≥ 1.")
    if target_error is not None and not (
        isinstance(target_error, (int, float)) and math.isfinite(target_error) and target_error > 0
    ):
        raise ValueError(f"target_error={target_error!r}; expected a positive number of bits/dim.")
    if target_error is not None and max_draws < draws:
        raise ValueError(
            f"max_draws={max_draws} is less than draws={draws}, the number of one pass; expected "
            "at least one pass."
        )
