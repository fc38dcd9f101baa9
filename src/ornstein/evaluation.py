"""Bits per dimension over a data set: an estimate with its errors, its parts and a curve over time.

Two errors are told apart. With x_i the mean of example i's draws and N examples,

    standard_error   std(x_i)/√N: how far the mean over *all* such data may be from this one
    draw_error       what more draws would remove: the spread of the draws of the same examples

Draws are stratified in time over all examples, which takes away what comes from time alone. So the
draws' variance is estimated from neighbours in time: how much two draws at nearly the same log SNR
differ, each measured from its own example's mean. Where no proposal for times is given, one is
fitted to the first examples and then held fixed, so that the estimate stays unbiased. The same
holds for two control variates, whose means are known: the noise in the Gaussian answer's error, and
what error is to be expected at a time.

Every random number is a function of (seed, pass, example). A run that was interrupted goes on where
it was, and several processes under `torch.distributed` share the examples, with the same result.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ornstein import compiling
from ornstein.compiling import Compile, Precision
from ornstein.examples import Source
from ornstein.files import write_text
from ornstein.ledger import Ledger, Rows, gathered
from ornstein.likelihood import Likelihood
from ornstein.provenance import provenance
from ornstein.score import ScoreModel
from ornstein.times import Times
from ornstein.transition import Given
from ornstein.truncation import Truncation, check_truncation, ends
from ornstein.work import USUAL, Work, batch_by_memory, fit_times, one_pass

MERE = 4.0  # units of log SNR below where coordinates that are all the same would be seen


@dataclass(frozen=True)
class Curve:
    """Where in time the bits are lost: bits/dim in bins of log SNR, which sum to the diffusion."""

    logsnr: Tensor  # (bins + 1,) edges, rising: the data's end is last
    bits: Tensor  # (bins,)
    errors: Tensor  # (bins,) standard errors over examples and draws; NaN where no draw fell


class Result(ABC):
    """What evaluations share: they can be paired example by example, and saved."""

    examples: int
    per_example: Tensor  # (N,) float64, bits/dim
    marks: Tensor  # (N,) a checksum of each example

    @property
    @abstractmethod
    def line(self) -> str:
        """The result in one honest line."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything but the examples, for JSON."""

    def difference(self, other: Result) -> tuple[float, float]:
        """self − other on the same examples, and the standard error of the paired difference.

        The other may have seen more examples; it is compared on those that both have.
        """
        count = len(self.marks)
        if not torch.equal(self.marks, other.marks[:count]):
            raise ValueError(
                f"{self.examples} and {other.examples} examples that are not the same can't be "
                "paired; expected two evaluations of the same data in the same order."
            )
        paired = self.per_example - other.per_example[:count]
        error = paired.std().item() / math.sqrt(count) if count > 1 else math.nan
        return paired.mean().item(), error

    def save(self, path: str | Path, **more: Any) -> None:
        """Write it as JSON, with versions, machine and commit."""
        record = {**self.to_dict(), **more, "provenance": provenance()}
        write_text(Path(path), json.dumps(record, indent=1, allow_nan=False))

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True)
class Evaluation(Result):
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
    marks: Tensor  # (N,) a checksum of each example
    curve: Curve
    #: of the diffusion, what a joint model pays for noise it was told; NaN for a channel model,
    #: given the state, and where rows of an older version are among its own
    known: float = math.nan

    @property
    def line(self) -> str:
        """The result in one honest line."""
        noise = "" if math.isnan(self.draw_error) else f", ±{self.draw_error:.2g} from draws alone"
        kind = "of a density " if self.density else ""
        return (
            f"{with_error(self.bits_per_dim, self.standard_error)} bits/dim {kind}"
            f"({self.bound} bound, {self.process}, {self.parametrisation}; truncated at "
            f"{self.truncation}; {self.draws} draw{'s' if self.draws > 1 else ''} × "
            f"{self.examples} example{'s' if self.examples > 1 else ''}{noise})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the examples, for JSON."""
        record = {k: v for k, v in asdict(self).items() if not isinstance(v, (Tensor, dict))}
        record["curve"] = {k: v.tolist() for k, v in vars(self.curve).items()}
        return without_nan(record)


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
    batch_size: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    save_every: float = 30.0,
    curve_bins: int = 40,
    quiet: bool = False,
    compile: Compile = "auto",
    precision: Precision = "auto",
) -> Evaluation:
    """Bits per dimension of a data set, an upper bound: estimate ± standard error. Prints one line.

    data: a tensor (N, *shape), or a loader of batches (tensors, or tuples that begin with one) that
        gives the same examples in the same order each time it is iterated.
    draws: times per example at which the network is asked; with target_error, in passes of that
        many until `draw_error` (bits/dim) is no larger, or max_draws is reached.
    times: a proposal; by default one fitted to the first examples, then fixed.
    truncation: by default the model's, and next to none for dequantised pixels with a histogram.
    batch_size: examples times draws for the network at a time (at least one example's), by default
        256, and on a GPU what its memory allows, up to 4096; halved where there is not enough. The
        result does not depend on it.
    folder: where to keep what is done, at most save_every seconds behind; the same call goes on
        from there. Under torch.distributed every process takes its share of the batches.
    compile: the network, by torch.compile; "auto" does on CUDA where there is much to do, and
        captures CUDA graphs in any case; "off" does neither. The result is the same, up to
        rounding.
    precision: of the network's arithmetic. "auto" is "float32", with TF32 off; "tf32" and
        "bfloat16" are faster, and are the bound of a network that rounds more.
    """
    _check_arguments(model, target_error, seed, save_every, times, truncation)
    precision = _checked_precision(precision)
    compiling.wanted(compile, model.process.device)  # which says what is wrong
    likelihood = model.likelihood if likelihood is None else likelihood
    if isinstance(likelihood, Likelihood):  # (else the bound says what is wrong)
        model = model.seeing(likelihood)
        truncation = model.truncation_for(likelihood) if truncation is None else truncation
    truncation = model.truncation if truncation is None else truncation
    _check_counts(draws, max_draws, batch_size, limit, curve_bins, target_error)
    was_training = {module: module.training for module in model.modules()}
    generator = torch.random.get_rng_state()  # a loader may draw from it
    model.eval()
    try:
        source = Source(data, limit)
        work = Work(model, given, likelihood, truncation, seed, draws, batch_size or USUAL)
        settings = work.settings(source, times)
        if precision != "float32":
            settings["network"] += f", {precision}"
        store = Ledger(folder, settings, save_every)
        with torch.no_grad(), compiling.arithmetic(precision):
            if batch_size is None and model.process.device.type == "cuda":
                work.batch_size = batch_by_memory(work, source)
            work.hasten(source, compile, precision)
            share = max(1, work.batch_size // draws)  # the same for all processes
            work.times = fit_times(work, source, times, store)
            passes = 1 if target_error is None else max_draws // draws
            for number in range(passes):
                count = one_pass(work, source, store, number, share)
                # a folder may know more than was asked for
                rows = store.rows.part(number, count)
                rows = gathered(rows, draws, model.process.device).ordered()
                result = _summary(work, rows, count, curve_bins)
                if target_error is None or result.draw_error <= target_error:
                    break
    finally:
        torch.random.set_rng_state(generator)
        for module, training in was_training.items():
            module.training = training
    if store.first_process:
        if store.folder is not None:
            result.save(store.folder / "result.json", settings=settings)
        if not quiet:
            print(result.line)
            if target_error is not None and not result.draw_error <= target_error:
                print(
                    f"  the draws' error is still above {target_error:g} after {result.draws} "
                    "draws per example (max_draws)"
                )
    return result


def _summary(work: Work, rows: Rows, n: int, curve_bins: int) -> Evaluation:
    """A pure function of the rows of n examples, which are in order."""
    model, dims = work.model, rows.dims
    counts = np.bincount(rows.index, minlength=n)
    if len(set(counts.tolist())) != 1:
        raise ValueError(
            f"{int((counts == 0).sum())} of {n} examples are missing from this evaluation; "
            "expected every process to see the same loader. Delete its folder to start anew."
        )
    scale = dims * math.log(2)

    def cost(values: np.ndarray) -> np.ndarray:
        """Bits/dim of each example: (n,)."""
        return -values.reshape(-1, n).mean(0) / scale

    bits = cost(rows.samples.mean(1))
    return Evaluation(
        bits_per_dim=float(bits.mean()),
        standard_error=float(bits.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan,
        draw_error=_draw_error(work, rows, n) / scale,
        prior=float(cost(rows.prior).mean()),
        diffusion=float(cost(rows.diffusion).mean()),
        reconstruction=float(cost(rows.reconstruction).mean()),
        examples=n,
        draws=int(counts[0]) * rows.samples.shape[1],
        dims=dims,
        bound=work.name,
        process=model.process.name,
        parametrisation=model.parametrisation,
        truncation=str(work.truncation),
        density=work.likelihood.density,
        per_example=torch.from_numpy(bits),
        marks=torch.from_numpy(rows.mark[:n].astype(np.int64)),
        curve=_curve(work, rows, n, curve_bins),
        known=float(-cost(rows.known).mean()),
    )


def _draw_error(work: Work, rows: Rows, n: int) -> float:
    """The standard error, from draws alone, of the mean over examples, in nats; NaN if unknown."""
    passes, m = len(rows.index) // n, rows.samples.shape[1]
    samples = rows.samples.reshape(passes, n, m).transpose(1, 0, 2)  # (n, passes, m)
    places = rows.logsnr.reshape(passes, n, m).transpose(1, 0, 2)
    spread = "stratified" if work.times is None else work.times.spread
    if spread == "antithetic":  # a pair counts as one draw
        if m == 1:
            n -= n % 2  # of two examples
            samples = samples[:n].reshape(n // 2, 2, passes).mean(1)
        else:
            half = m // 2
            samples = (samples[..., :half] + samples[..., m - half :]) / 2
    samples = samples.reshape(len(samples), -1)
    n, draws = samples.shape
    if draws < 2 or n < 1:
        return math.nan
    rest = samples - samples.mean(1, keepdims=True)
    if spread == "stratified":
        rest = rest.ravel()[np.argsort(places.ravel(), kind="stable")]
        square = (np.diff(rest) ** 2).mean() / 2  # of one draw
    else:
        square = (rest**2).mean()
    return math.sqrt(square * draws / (draws - 1) / (n * draws))


def _curve(work: Work, rows: Rows, n: int, bins: int) -> Curve:
    edges = _edges(work, bins, rows.dims)
    place = np.clip(np.searchsorted(edges, rows.logsnr, side="right") - 1, 0, bins - 1)
    draws = rows.logsnr.size // n
    key = (rows.index[:, None] * bins + place).ravel()
    mean = 0.0 if work.fitted is None else work.fitted.mean
    values = (rows.errors / rows.dims - mean) / (draws * math.log(2))  # above what was expected
    each = np.bincount(key, values.ravel(), minlength=n * bins).reshape(n, bins)  # of each example
    errors = each.std(0, ddof=1) / math.sqrt(n) if n > 1 else np.full(bins, math.nan)
    errors[np.bincount(place.ravel(), minlength=bins) == 0] = math.nan
    known = work.expected(edges) / math.log(2)
    return Curve(
        logsnr=torch.from_numpy(edges),
        bits=torch.from_numpy(each.mean(0) + known - work.entropies(edges)),
        errors=torch.from_numpy(errors),
    )


def _edges(work: Work, bins: int, dims: int) -> np.ndarray:
    """log SNR, rising, even where there is anything to know: what is mere noise is one bin.

    Even d coordinates that were all the same would tell of themselves from SNR·ς² = 1/d on only;
    some processes go on for a hundred units of log SNR below that.
    """
    low, high = (float(v) for v in ends(work.truncation, work.model.process))
    least = -MERE - math.log(dims) - 2 * math.log(work.model.data_std)
    if bins == 1 or low >= least or least >= high:
        return np.linspace(low, high, bins + 1)
    return np.concatenate([[low], np.linspace(least, high, bins)])


# ---------------------------------------------------------------- small tools


def without_nan(value: Any) -> Any:
    """NaN, which JSON does not know, as None."""
    if isinstance(value, dict):
        return {key: without_nan(v) for key, v in value.items()}
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_error(value: float, error: float) -> str:
    """'2.913 ± 0.012': as many digits as two of the error's."""
    if not math.isfinite(error) or error <= 0:
        return f"{value:.4f}"
    digits = min(max(1 - math.floor(math.log10(error)), 2), 10)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _check_arguments(
    model: Any, target_error: Any, seed: Any, save_every: Any, times: Any, truncation: Any
) -> None:
    if not isinstance(model, ScoreModel):
        raise ValueError(
            f"model was given as {type(model).__name__}; expected ornstein.ScoreModel(network, "
            "process)."
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}; expected a whole number.")
    if target_error is not None and not (_is_number(target_error) and target_error > 0):
        raise ValueError(f"target_error={target_error!r}; expected a positive number of bits/dim.")
    if not (_is_number(save_every) and save_every >= 0):
        raise ValueError(f"save_every={save_every!r}; expected a number of seconds ≥ 0.")
    if times is not None and not isinstance(times, Times):
        raise ValueError(
            f"times={times!r}; expected None, Uniform(), Importance(), LogSNR(), Information() or "
            "Adaptive()."
        )
    if truncation is not None:
        check_truncation(truncation)


def _checked_precision(precision: Precision) -> Precision:
    compiling.check_precision(precision)
    return "float32" if precision == "auto" else precision


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _check_counts(
    draws: Any, max_draws: Any, batch_size: Any, limit: Any, curve_bins: Any, target_error: Any
) -> None:
    counts = {"draws": draws, "max_draws": max_draws, "curve_bins": curve_bins}
    given = {"batch_size": batch_size, "limit": limit}
    counts |= {name: value for name, value in given.items() if value is not None}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}; expected a whole number ≥ 1.")
    if target_error is not None and max_draws < draws:
        raise ValueError(
            f"max_draws={max_draws} is less than draws={draws}, the number of one pass; expected "
            "at least one pass."
        )
