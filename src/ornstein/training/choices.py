"""Data, process and model in a user's words, as typed options that build them."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ornstein.data import Dataset, load
from ornstein.diffusion import Diffusion
from ornstein.histogram import FEATURES
from ornstein.likelihood import Continuous, Discrete, Likelihood, Tweedie
from ornstein.networks import MLP, UNet
from ornstein.process import Process
from ornstein.processes import PRESETS, STARTS, learned
from ornstein.schedules import Linear
from ornstein.score import FeaturesOf, KnownNoise, Parametrisation, ScoreModel
from ornstein.truncation import chosen

Rows = tuple[tuple[float, ...], ...]  # a matrix
Ends = tuple[float, float]  # a linear rate, at time 0 and at the horizon


@dataclass(frozen=True)
class Data:
    """What is learned from."""

    data: str = "digits"
    """A named set (see above), an .npz or .npy file, or a folder of images."""
    data_folder: str | None = None
    """Where the files of a named set are (default: $ORNSTEIN_DATA, or data)."""
    valid: int | None = None
    """Examples taken from the training split for validation (default: what suits the set)."""
    download: bool = False
    """Fetch a named set if it is not there."""
    size: int | None = None
    """Crop and resize a folder's images to so many pixels."""
    grey: bool = False
    """Read a folder's images in grey."""

    def load(self) -> Dataset:
        """The data set."""
        return load(
            self.data,
            folder=self.data_folder,
            valid=self.valid,
            download=self.download,
            size=self.size,
            grey=self.grey,
        )


@dataclass(frozen=True)
class Diffusing:
    """How the data is noised."""

    process: str = "vpsde"
    """A preset; learned-N with N auxiliary variables, or learned-PRESET, which starts from a preset
    with Q and D (both also with -full); or own, with Q and D."""
    Q: Rows | None = None
    """Skew-symmetric matrix of a process of your own."""
    D: Rows | None = None
    """Its positive semi-definite matrix."""
    S: Rows | None = None
    """The inverse of its stationary covariance (default: the identity)."""
    rate: Ends | None = None
    """Linear rate, its value at time 0 and at the horizon (default: 0.1 20)."""
    rate_q: Ends | None = None
    """The same for Q alone."""
    rate_d: Ends | None = None
    """The same for D alone."""
    v0_variance: float | None = None
    """Variance of the auxiliary variables at time 0 (default: that of the preset)."""
    horizon: float = 1.0
    """The time at which the process ends."""
    learn_rates: Literal["no", "shared", "separate"] = "no"
    """Of a learned process: learn its rates too, one clock for Q and D or one each."""
    learn_v0: bool = False
    """Of a learned process: learn the variance of the auxiliary variables at time 0."""

    def build(self, seed: int = 0) -> Process:
        """The process; seed is for a learned one that starts at random."""
        options: dict[str, Any] = {"horizon": self.horizon}
        if self.rate is not None:
            options["rate"] = Linear(*self.rate, self.horizon)
        if self.v0_variance is not None:
            options["v0_variance"] = self.v0_variance
        chosen = as_learned(self.process)
        self._check(chosen is not None)
        if chosen is not None:
            first, full = chosen
            if isinstance(first, str):
                options = {"start": named(first, options, self.process)}
            return learned(
                first if isinstance(first, int) else None,
                full=full,
                learn_rates=self.learn_rates,
                learn_v0_variance=self.learn_v0,
                seed=seed,
                **options,
            )
        if self.process == "own":
            return self._own(options)
        return named(self.process, options)

    def _check(self, learned: bool) -> None:
        """Options that would be ignored are refused."""
        if not learned and (self.learn_rates != "no" or self.learn_v0):
            raise ValueError(
                f"learn_rates and learn_v0 are for learned processes, and this is "
                f"{self.process!r}; expected learned-N or learned-PRESET, or none of the two."
            )
        own = {k: getattr(self, k) for k in ("Q", "D", "S", "rate_q", "rate_d")}
        given = [name for name, value in own.items() if value is not None]
        if self.process != "own" and given:
            raise ValueError(
                f"{', '.join(given)} and process={self.process!r} were given; expected "
                "process='own' with matrices of your own."
            )
        if self.process == "own" and (self.Q is None or self.D is None):
            raise ValueError(
                "a process of your own needs both Q and D, for example [[0,-1],[1,0]] and "
                "[[0,0],[0,1]]."
            )

    def _own(self, options: dict[str, Any]) -> Process:
        for name, ends in (("rate_q", self.rate_q), ("rate_d", self.rate_d)):
            if ends is not None:
                options[name] = Linear(ends[0], ends[1], self.horizon)
        return Diffusion(self.Q or (), self.D or (), S=self.S, name="own", **options)


def as_learned(name: str) -> tuple[int | str, bool] | None:
    """Of learned-FIRST and learned-FIRST-full: how many auxiliary variables, or which preset."""
    found = re.fullmatch(rf"learned-(\d+|{'|'.join(STARTS)})(-full)?", name)
    if found is None:
        return None
    return int(found[1]) if found[1].isdecimal() else found[1], bool(found[2])


def hint_of(name: str, others: Sequence[str] = ()) -> str:
    """The process that may have been meant; others: names that would do as well."""
    learnt = [f"learned-{first}{full}" for first in (1, 2, *STARTS) for full in ("", "-full")]
    close = difflib.get_close_matches(name.lower(), [*PRESETS, *learnt, *others], n=1)
    return f" Perhaps you meant {close[0]!r}." if close else ""


def named(name: str, options: Mapping[str, Any], typed: str | None = None) -> Process:
    """A preset by its name, with the options that it has; typed: what was asked for, in errors."""
    if name not in PRESETS:
        raise ValueError(
            f"there is no preset {name!r}; expected one of {', '.join(PRESETS)}, or learned-N "
            f"with N auxiliary variables, or learned-P with P one of {', '.join(STARTS)}."
            f"{hint_of(name, ('own',))}"
        )
    make: Callable[..., Process] = PRESETS[name]
    known = list(inspect.signature(make).parameters)
    for option in options:
        if option not in known:
            raise ValueError(
                f"{option} was given, but {(typed or name)!r} has no {option} to set; expected "
                f"none. Leave {option} out."
            )
    return make(**options)


@dataclass(frozen=True)
class Modelling:
    """The network, and what it predicts."""

    parametrisation: Parametrisation = "channel"
    """channel: an ordinary denoiser, good for every process; joint: the paper's, all variables."""
    likelihood: Literal["natural", "discrete", "tweedie", "continuous"] = "natural"
    """What the bound is about; natural is discrete for pixels and continuous for other numbers."""
    logit: float | None = None
    """Margin of the logit map of pixels (the paper's: 0.05); without it they are centred."""
    noise_level: float | None = None
    """Truncate where x is known to this standard error (default: what suits the likelihood)."""
    fixed_time: float | None = None
    """Truncate at this time instead."""
    histogram: bool = True
    """Begin with what the histogram of the pixels says (discrete bound, up to 256 levels)."""
    bins: Literal["auto", "on", "off"] = "auto"
    """Let the network see where in its bin a pixel is; auto: where there is no histogram."""
    bins_of: FeaturesOf = "x"
    """joint: see it by what all variables say about x, or by the noised data z alone."""
    known_noise: KnownNoise = "guessed"
    """joint: let the network guess all noise (the paper's way), or tell it what is known."""
    per_channel: bool = True
    """Mean, standard deviation and histogram of the data for each channel."""
    network: Literal["natural", "unet", "unet-small", "unet-tiny", "mlp"] = "natural"
    """natural is what suits the size of the data."""
    width: int | None = None
    """Of the network (unet: 128, mlp: 256)."""
    multipliers: tuple[int, ...] | None = None
    """unet: of the width, one per resolution (1 2 2 2)."""
    blocks: int | None = None
    """unet: residual blocks per resolution (2)."""
    attention: tuple[int, ...] | None = None
    """unet: image heights with attention (16)."""
    depth: int | None = None
    """mlp: residual blocks (3)."""
    dropout: float | None = None
    """Part of the activations that is dropped in training (unet: 0.1, others: 0)."""

    def build(self, data: Dataset, process: Process) -> ScoreModel:
        """The model, with the moments of the training split."""
        likelihood = self._likelihood(data)
        x, per_channel = data.train.x, self.per_channel and data.train.x.dim() > 2
        counts = self._histogram(likelihood, x, per_channel)
        pixels = isinstance(likelihood, (Discrete, Tweedie)) and not likelihood.density
        bins = pixels and (counts is None if self.bins == "auto" else self.bins == "on")
        mean, std = likelihood.moments(_some(x), per_channel)
        variables = process.n_vars if self.parametrisation == "joint" else None
        features = (2 if bins else 0) + (0 if counts is None else FEATURES)
        return ScoreModel(
            self._network(data.shape, variables, features),
            process,
            likelihood,
            self.parametrisation,
            data_mean=mean,
            data_std=std,
            truncation=chosen(self.noise_level, self.fixed_time),
            features="bins" if bins else None,
            features_of=self.bins_of,
            histogram=counts,
            known_noise=self.known_noise,
        )

    def _histogram(self, likelihood: Likelihood, x: Tensor, per_channel: bool) -> Tensor | None:
        if not self.histogram or not isinstance(likelihood, Discrete):
            return None
        few = likelihood.pixels.levels <= MOST_LEVELS
        return likelihood.histogram(_some(x), per_channel) if few else None

    def _likelihood(self, data: Dataset) -> Likelihood:
        kind = self.likelihood
        if kind == "natural":
            kind = "continuous" if data.levels is None else "discrete"
        if kind == "continuous":
            if self.logit is not None:
                raise ValueError("logit is a map of pixels; expected a discrete likelihood.")
            if data.levels is not None:
                raise ValueError(
                    f"likelihood='continuous' with the pixels of {data.name!r}; expected "
                    "'discrete' or 'tweedie', whose bound is on log P of pixels."
                )
            return Continuous()
        if data.levels is None:
            raise ValueError(
                f"likelihood={kind!r} with the real numbers of {data.name!r}; expected "
                "'continuous' or 'natural'."
            )
        if kind == "discrete":
            return Discrete(data.levels, self.logit)
        return Tweedie(data.levels, self.logit)

    def _network(self, shape: tuple[int, ...], variables: int | None, features: int) -> nn.Module:
        kind = _natural_network(shape) if self.network == "natural" else self.network
        wanted = {"mlp": 1}.get(kind, 3)
        if len(shape) != wanted:
            raise ValueError(
                f"network={kind!r} with data of shape {shape}; expected "
                + ("'mlp' for vectors." if len(shape) == 1 else "a unet for images.")
            )
        names = ("width", "depth", "dropout") if kind == "mlp" else IMAGE_OPTIONS
        options = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        unused = {*IMAGE_OPTIONS, "depth"} - set(names)
        for name in sorted(unused):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} was given, but {kind!r} has none; leave {name} out.")
        if kind == "mlp":
            return MLP(shape, variables, features, **options)
        return UNet(shape, variables, features, **{**SIZES[kind], **options})


MOST_LEVELS = 256  # of a histogram: each costs as much as the others, at every pixel
IMAGE_OPTIONS = ("width", "multipliers", "blocks", "attention", "dropout")
SIZES: dict[str, dict[str, Any]] = {
    "unet": {},
    "unet-small": {
        "width": 32,
        "multipliers": (1, 2, 2),
        "blocks": 1,
        "attention": (7, 8),
        "dropout": 0.0,
    },
    "unet-tiny": {
        "width": 16,
        "multipliers": (1, 2),
        "blocks": 1,
        "attention": (4,),
        "dropout": 0.0,
    },
}


def _natural_network(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "mlp"
    largest = max(shape[-2:])
    return "unet-tiny" if largest <= 12 else "unet-small" if largest <= 28 else "unet"


def _some(x: Tensor) -> Tensor:
    """The training split, or its first part if it is large."""
    return x[: max(1, 50_000_000 // max(1, x[0].numel()))]
