"""A network and a process make a score model.

Given x, y_s = r x + L ε with r = Φ(1, c). Whitened, L⁻¹y = a x + ε with a = L⁻¹r: only the part
along â = a/‖a‖ knows x, the rest of ε can be read off y. With σ = 1/‖a‖

    x̃ = âᵀL⁻¹y σ = x + σ ε_∥,     λ = log SNR = −2 log σ,     E[ε | y] = w_⊥ + â E[ε_∥ | x̃]

`channel` (the default): the network is an ordinary denoiser, of x̃ at λ, and with this formula the
score of every process. `joint` (the paper's): it sees all K variables and predicts all K noises.
Both add to the answer that is right for Gaussian data N(m, ς²), so that a network that returns zero
is exact there, and both ends of time are right for any data:

    channel   ε̂_∥ = g + ς/√(ς²+σ²)·network((x̃ − m)/√(ς²+σ²), λ),      g = σ(x̃ − m)/(ς²+σ²)
    joint     ε̂ = w_⊥ + â g + ς/√(ς²+σ²)·network((y − r m)/√(r²ς² + diag Σ), λ)

and the score is −L⁻ᵀ ε̂. Of all that a joint network says, w_⊥ was known; with known_noise="told"
only what it says of x is taken, ε̂ = w_⊥ + â(g + what was read; see `answers`), and its bound no
longer charges for the rest. With a histogram of pixels g = (x̃ − x̂)/σ, x̂ the guess of `histogram`:
then a network that returns zero is exact for independent pixels.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ornstein import sharing
from ornstein.answers import (
    LARGEST,
    GaussianAnswer,
    Moments,
    NoAnswer,
    View,
    contract,
    expand,
    over,
)
from ornstein.likelihood import Discrete, Likelihood
from ornstein.parts import Record, described, part, rebuilt
from ornstein.process import Process
from ornstein.residuals import Residual, as_frequencies, as_histogram, data_dtype
from ornstein.transition import Transition
from ornstein.truncation import NoiseLevel, Truncation, check_truncation

Figures = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Parametrisation = Literal["channel", "joint"]
FeaturesOf = Literal["x", "z"]
KnownNoise = Literal["guessed", "told"]
CLEAR = 1e-6  # of a bin, noise that leaves nothing open about a dequantised pixel


@part("score-model")
class ScoreModel(nn.Module):
    """A network under a process: predicts noise, denoises, and gives the score of y_s."""

    def __init__(
        self,
        network: nn.Module,
        process: Process,
        likelihood: Likelihood | None = None,
        parametrisation: Parametrisation = "channel",
        data_mean: Tensor | float = 0.0,
        data_std: Tensor | float = 1.0,
        truncation: Truncation | None = None,
        features: Sequence[float] | Literal["bins"] | None = None,
        precondition: bool = True,
        features_of: FeaturesOf = "x",
        histogram: Tensor | None = None,
        known_noise: KnownNoise = "guessed",
    ) -> None:
        """
        data_mean, data_std: of the numbers that diffuse; likelihood.moments(x) gives them.
        truncation: NoiseLevel or FixedTime; by default a sixth of a pixel's bin, or a thousandth
            of the data's standard deviation.
        features: frequencies whose sines and cosines (of x̃) the network gets as further entries of
            axis 1; "bins" stands for two bins and one bin of the pixels.
        precondition: False leaves out all answers and all scaling: the network gets x̃ (or y) as it
            is, and its output is the noise.
        features_of: "z" for a joint model whose features are of the noised data alone, y's first
            variable, which knows x less well than all of them together.
        histogram: of pixels, likelihood.histogram(x). Then the network adds to what is right for
            independent pixels, and gets four further entries for each number of the data (as many
            as of two features).
        known_noise: of a joint model, "told" if what can be read off y is no part of its guess;
            "guessed" is the paper's way.
        """
        super().__init__()
        if parametrisation not in ("channel", "joint"):
            raise ValueError(
                f"parametrisation={parametrisation!r}; expected 'channel' (an ordinary denoiser) "
                "or 'joint' (the network sees and predicts all variables)."
            )
        if not isinstance(process, Process):
            raise ValueError(
                f"process was given as {type(process).__name__}; expected a process, for example "
                "ornstein.cld()."
            )
        if not callable(network) or isinstance(network, type):
            raise ValueError(
                f"network was given as {type(network).__name__}; expected a module that maps "
                "(x, logsnr) to a tensor like x."
            )
        self.network, self.process = network, process
        self.likelihood = Discrete() if likelihood is None else likelihood
        if not isinstance(self.likelihood, Likelihood):
            raise ValueError(
                f"likelihood={likelihood!r}; expected ornstein.Discrete(levels), "
                "ornstein.Tweedie(levels) or ornstein.Continuous()."
            )
        self.parametrisation: Parametrisation = parametrisation
        self.moments = Moments(data_mean, data_std)
        self._truncation = self._checked(truncation)
        self._renew()
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]
        self.features = as_frequencies(features, self.likelihood)
        self.precondition = precondition
        if features_of not in ("x", "z"):
            raise ValueError(
                f"features_of={features_of!r}; expected 'x' (what all variables say about the "
                "data) or 'z' (the noised data alone)."
            )
        self.features_of: FeaturesOf = features_of
        self.histogram = as_histogram(histogram, self.likelihood, precondition)
        self.known_noise: KnownNoise = self._checked_known(known_noise)

    # ---------------------------------------------------------------- what users call

    def with_process(self, other: Process) -> ScoreModel:
        """The same network under another diffusion; nothing is copied or trained."""
        if self.parametrisation != "channel":
            raise ValueError(
                f"a joint model belongs to its process ({self.process.name!r}); expected "
                "parametrisation='channel', whose network serves every process."
            )
        if not isinstance(other, Process):
            raise ValueError(
                f"with_process got {type(other).__name__}; expected a process, for example "
                "ornstein.cld()."
            )
        model = self._copy()
        model.process = other
        return model

    def with_truncation(self, truncation: Truncation | None) -> ScoreModel:
        """The same model, its bounds truncated elsewhere."""
        model = self._copy()
        model._truncation = self._checked(truncation)
        return model

    @property
    def truncation(self) -> Truncation:
        """Where bounds are truncated: what was asked for, or what suits the data."""
        return self._natural_truncation if self._truncation is None else self._truncation

    def truncation_for(self, likelihood: Likelihood) -> Truncation:
        """Where `evaluate` truncates a bound of this likelihood, if nobody says otherwise.

        As the model is, but for dequantised pixels with a histogram: their place in a bin is known
        in closed form however little noise there is, and a bound on the density of all variables
        loses what it is truncated by, 1.3 bits·σ/bin and, with auxiliary variables, much more.
        """
        if self._truncation is not None or self.histogram is None or not likelihood.dequantised:
            return self.truncation
        return NoiseLevel(max(CLEAR * self.histogram.width, self.process.least_noise()))

    def predict(self, x_noisy: Tensor, logsnr: Tensor | float) -> Tensor:
        """E[ε_∥ | x̃]: the noise in x̃ = x + σ ε_∥ of a channel model, (B, *shape)."""
        self._only_channel("predict")
        times = self._expanded(logsnr, x_noisy)
        answer = self.answer((-times / 2).exp(), x_noisy)
        return answer.noise(x_noisy) + self.residual(x_noisy, times, answer)

    def denoise(self, x_noisy: Tensor, logsnr: Tensor | float) -> Tensor:
        """E[x | x̃] = x̃ − σ ε̂ of a channel model: (B, *shape)."""
        self._only_channel("denoise")
        times = self._expanded(logsnr, x_noisy)
        sigma = (-times / 2).exp().clamp(max=LARGEST)
        answer = self.answer(sigma, x_noisy)
        return answer.data(x_noisy) - over(sigma, x_noisy) * self.residual(x_noisy, times, answer)

    def estimate(self, y: Tensor, s: Tensor | float) -> Tensor:
        """x̂ = E[x | y_s], the data behind a state: (B, *shape).

        The state is whitened in float64; where noise reaches the data through other variables, y
        itself should be float64 too.
        """
        times = self._expanded(s, y)
        kernel = self.process.transition(times)
        zero = torch.zeros_like(y[:, 0], dtype=torch.float64)
        white = kernel.noise(y.to(torch.float64), zero)
        return self.estimate_from(white, y, kernel, self.view(kernel, times))

    def view(self, kernel: Transition, s: Tensor) -> View:
        """What the kernel at times s says about x, and how to read this model's guesses there."""
        joint = self.parametrisation == "joint"
        return View.of(kernel, self.process.noise_factor(s) if joint else None)

    def view_of_noise(self, kernel: Transition, s: Tensor) -> View:
        """The same for a guess of all noise, which is read only if known noise is told."""
        return self.view(kernel, s) if self.known_noise == "told" else View.of(kernel)

    def estimate_from(self, white: Tensor, y: Tensor, kernel: Transition, view: View) -> Tensor:
        """The same where L⁻¹y is known, (B, K, *shape) float64; reads nothing from the device.

        Of the noise that a joint model predicts only what it says about x is used (see `answers`):
        the rest is known.
        """
        kind = torch.promote_types(y.dtype, torch.float32)
        along = contract(view.direction, white)
        sigma = over(view.sigma.clamp(max=LARGEST), along)
        if self.parametrisation == "channel":
            return self.denoise((along * sigma).to(kind), view.logsnr).to(y.dtype)
        residual = self.joint_residual(y, kernel, view, along * sigma).to(along.dtype)
        if not self.precondition:  # it is all of the noise
            residual = residual - (white - expand(view.direction, along))
        guess = view.read(residual)
        answer = self.answer(view.sigma, along)
        return (answer.data(along * sigma) - sigma * guess).to(y.dtype)

    def noise(self, y: Tensor, s: Tensor | float) -> Tensor:
        """E[ε | y_s], the noise in all variables: (B, K, *shape).

        The state is whitened in float64; where noise reaches the data through other variables, y
        itself should be float64 too. Of a joint model the bound trains only what noise enters,
        Gᵀ score: `estimate` reads x̂ from that.
        """
        times = self._expanded(s, y)
        return self._noise(y, times, self.process.transition(times))

    def score(self, y: Tensor, s: Tensor | float) -> Tensor:
        """∇ log p(y_s) = −L⁻ᵀ ε̂: (B, K, *shape)."""
        times = self._expanded(s, y)
        kernel = self.process.transition(times)
        return kernel.noise_to_score(self._noise(y, times, kernel).to(torch.float64)).to(y.dtype)

    def _noise(self, y: Tensor, s: Tensor, kernel: Transition) -> Tensor:
        view = self.view_of_noise(kernel, s)
        zero = torch.zeros_like(y[:, 0], dtype=torch.float64)
        white = kernel.noise(y.to(torch.float64), zero)  # L⁻¹y = a x + ε
        along = contract(view.direction, white)
        x_noisy = along * over(view.sigma, along)
        if self.parametrisation == "channel":
            parallel = self.predict(x_noisy.to(y.dtype), view.logsnr).to(along.dtype)
            return (white + expand(view.direction, parallel - along)).to(y.dtype)
        guess = self.joint_residual(y, kernel, view, x_noisy)
        if not self.precondition:
            return guess
        gaussian = self.answer(view.sigma, x_noisy).noise(x_noisy)
        return (white + expand(view.direction, gaussian - along) + guess).to(y.dtype)

    # ---------------------------------------------------------------- to share

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        figures: Figures | None = None,
        data: Mapping[str, Any] | None = None,
        card: str | None = None,
    ) -> Path:
        """Write config.json, model.safetensors and README.md; other files there are left alone.

        figures: what was measured, for the card: evaluate(…).to_dict(), or several of them.
        data: what the model was trained on, as a mapping. card: text of your own that opens it.
        """
        return sharing.write(folder, self, self.describe(), figures=figures, data=data, text=card)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        process: Process | None = None,
        network: nn.Module | None = None,
        device: torch.device | str | None = None,
    ) -> ScoreModel:
        """A saved model, in eval mode, from a folder or by its name on the Hugging Face Hub.

        process, network: needed where they are code of one's own, which no file can hold; the
            numbers are loaded into them, so they must be as they were.
        """
        shared = sharing.read(folder)
        with sharing.building(shared):
            model = cls._rebuilt(shared.model, process, network)
        sharing.load(model, shared)
        if device is not None:
            model.to(device)
        if shared.plan is None:
            model.process.replan()
        else:
            model.process.follow(torch.tensor(shared.plan, dtype=torch.float64, device="cpu"))
        return model.eval()

    def push_to_hub(
        self,
        name: str,
        *,
        figures: Figures | None = None,
        data: Mapping[str, Any] | None = None,
        card: str | None = None,
        private: bool = False,
    ) -> str:
        """Save the model to the Hugging Face Hub as "user/model"; returns its address."""
        about: Any = {"figures": figures, "data": data, "text": card, "address": name}
        write = functools.partial(sharing.write, model=self, description=self.describe(), **about)
        return sharing.push(name, write, private)

    def choices(self) -> Record:
        """What a joint model sees and guesses, where it is not the usual: of folders of figures.

        What is usual goes without saying there, since there are folders from before one could
        choose.
        """
        found: Record = {"known_noise": "told"} if self.known_noise == "told" else {}
        if self.parametrisation == "joint" and self.features and self.features_of == "z":
            found["features_of"] = "z"
        return found

    def describe(self) -> Record:
        """What the model is, for JSON; code of the user's own is named, with kind None."""
        two_kinds = self.parametrisation == "joint" and self.features  # of features
        return {
            "network": sharing.name_or_description(self.network),
            "process": sharing.name_or_description(self.process),
            "likelihood": described(self.likelihood),
            "parametrisation": self.parametrisation,
            "truncation": None if self._truncation is None else described(self._truncation),
            "features": list(self.features),
            **({"features_of": self.features_of} if two_kinds else {}),
            **({"known_noise": self.known_noise} if self.known_noise == "told" else {}),
            "precondition": bool(self.precondition),
            **({} if self.histogram is None else {"histogram": list(self.histogram.logs.shape)}),
            "data_mean_shape": list(self.moments.mean.shape),
            "data_std_shape": list(self.moments.std.shape),
        }

    @classmethod
    def rebuild(cls, fields: Record) -> ScoreModel:
        return cls._rebuilt(fields, None, None)

    @classmethod
    def _rebuilt(
        cls, fields: Record, process: Process | None, network: nn.Module | None
    ) -> ScoreModel:
        truncation = fields["truncation"]
        return cls(
            sharing.given_or_rebuilt(network, fields["network"], "network", nn.Module),
            sharing.given_or_rebuilt(process, fields["process"], "process", Process),
            rebuilt(fields["likelihood"], "the likelihood", Likelihood),  # type: ignore[type-abstract]
            fields["parametrisation"],
            torch.zeros(fields["data_mean_shape"]),  # their values are in the state dict
            torch.ones(fields["data_std_shape"]),
            None if truncation is None else rebuilt(truncation, "the truncation", object),  # type: ignore[arg-type]
            fields["features"] or None,
            fields["precondition"],
            fields.get("features_of", "z"),  # what they were of before one could choose
            torch.ones(fields["histogram"]) if "histogram" in fields else None,
            fields.get("known_noise", "guessed"),
        )

    # ---------------------------------------------------------------- for the objectives

    @property
    def data_std(self) -> float:
        """One standard deviation for all coordinates: root of the mean variance."""
        return self.moments.scale

    @property
    def dtype(self) -> torch.dtype:
        """The type of the data's numbers outside the network: at least float32."""
        return data_dtype(self.network)

    def answer(self, sigma: Tensor, like: Tensor) -> GaussianAnswer | NoAnswer:
        """What is known without the network, at standard errors sigma: (B,)."""
        return GaussianAnswer.of(self.moments, sigma, like) if self.precondition else NoAnswer()

    def residual(
        self, x_noisy: Tensor, logsnr: Tensor, answer: GaussianAnswer | NoAnswer
    ) -> Tensor:
        """What a channel model knows beyond this answer: (B, *shape)."""
        return self._residual.channel(x_noisy, logsnr, answer)

    def joint_residual(
        self, y: Tensor, kernel: Transition, view: View, x_noisy: Tensor | None = None
    ) -> Tensor:
        """What a joint model knows beyond the Gaussian answer: (B, K, *shape).

        view: that of `view_of_noise`, or of `view`. x_noisy: x̃, (B, *shape); found from y where it
        is not known.
        """
        guess = self._residual.joint(y, kernel, view, x_noisy)
        if self.known_noise == "guessed":
            return guess
        return expand(view.direction, view.read(guess))

    def seeing(self, likelihood: Likelihood) -> ScoreModel:
        """The same model for data as this likelihood has them, at their levels or dequantised."""
        if self.histogram is None or self.histogram.even == likelihood.dequantised:
            return self
        model = self._copy()
        model.histogram = self.histogram.spread(likelihood.dequantised)
        return model

    def check_data(self, x: Tensor, likelihood: Likelihood) -> None:
        """Raise if this can't be a batch for this model under this likelihood."""
        if not likelihood.same_space(self.likelihood):
            raise ValueError(
                f"the model was built for {self.likelihood!r} and the bound is {likelihood!r}: its "
                "network knows other numbers than these. Expected the same levels and logit map."
            )
        likelihood.check(x)
        own = f"({x.shape[1]}{', 1' * (x.dim() - 2)}"
        for name, value in (("data_mean", self.moments.mean), ("data_std", self.moments.std)):
            if not _fits(value.shape, x):
                raise ValueError(
                    f"a batch of shape {tuple(x.shape)} does not fit {name} of shape "
                    f"{tuple(value.shape)}; expected one number, or a shape that broadcasts to "
                    f"{tuple(x.shape[1:])}, such as {own}) for one number per channel. "
                    "likelihood.moments(x, per_channel=True) gives it."
                )
        if self.histogram is not None and not _fits(self.histogram.logs.shape[:-1], x):
            *_, levels = found = tuple(self.histogram.logs.shape)
            raise ValueError(
                f"a batch of shape {tuple(x.shape)} does not fit a histogram of shape {found}; "
                f"expected ({levels},), or {own}, {levels}) for one histogram per channel. "
                "likelihood.histogram(x, per_channel=True) gives it."
            )
        if x.device != self.process.device:
            raise ValueError(
                f"the data is on {x.device} and the process on {self.process.device}; expected one "
                "device. Move both: model.to(device) and x.to(device)."
            )

    # ---------------------------------------------------------------- inside

    @property
    def _residual(self) -> Residual:
        """Made anew for each call, since its parts may be replaced."""
        return Residual(
            network=self.network,
            variables=self.process.n_vars if self.parametrisation == "joint" else None,
            moments=self.moments,
            frequencies=self.features,
            of_x=self.features_of == "x",
            histogram=self.histogram,
            precondition=self.precondition,
        )

    def _expanded(self, value: Tensor | float, like: Tensor) -> Tensor:
        """One number for each example, float64: (B,)."""
        numbers = torch.as_tensor(value, dtype=torch.float64, device=self.process.device)
        if numbers.dim() > 1 or (numbers.dim() == 1 and len(numbers) not in (1, len(like))):
            raise ValueError(
                f"{tuple(numbers.shape)} numbers were given for a batch of {len(like)}; expected "
                "one time (or log SNR) for each example, or a single one."
            )
        return numbers.expand(len(like))

    def _copy(self) -> ScoreModel:
        """Another model of the same parts."""
        model = copy.copy(self)
        model._modules = dict(self._modules)
        return model

    def _only_channel(self, what: str) -> None:
        if self.parametrisation != "channel":
            raise ValueError(
                f"{what} is for parametrisation='channel'; this model is joint. Use noise(y, s) or "
                "score(y, s)."
            )

    def _renew(self) -> None:
        """What depends on the moments, which may have been loaded."""
        self._natural_truncation = NoiseLevel(self.likelihood.noise_level(self.data_std))

    def _checked_known(self, given: KnownNoise) -> KnownNoise:
        if given not in ("guessed", "told"):
            raise ValueError(
                f"known_noise={given!r}; expected 'guessed' (the network predicts all noise) or "
                "'told' (what can be read off the state is no part of its guess)."
            )
        if given == "told" and not (self.parametrisation == "joint" and self.precondition):
            what = (
                "parametrisation='channel', which guesses no noise that is known"
                if self.parametrisation == "channel"
                else "precondition=False, where the network says all of the noise by itself"
            )
            raise ValueError(
                f"known_noise='told' and {what}; expected a joint model with precondition=True, or "
                "known_noise left out."
            )
        return given

    def _checked(self, given: Truncation | None) -> Truncation | None:
        return None if given is None else check_truncation(given)

    def extra_repr(self) -> str:
        return (
            f"{self.parametrisation!r}, likelihood={self.likelihood!r}, "
            f"truncation={self.truncation!r}"
            + ("" if self.histogram is None else ", with a histogram")
            + (", told what noise is known" if self.known_noise == "told" else "")
        )


def _fits(shape: torch.Size, x: Tensor) -> bool:
    """Whether numbers of this shape broadcast to each example of a batch."""
    try:
        return torch.broadcast_shapes(shape, x.shape[1:]) == x.shape[1:]
    except RuntimeError:
        return False


def _loaded(model: ScoreModel, _: object) -> None:
    """After a state dict was loaded into the model."""
    model._renew()
