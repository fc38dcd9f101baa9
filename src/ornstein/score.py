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

and the score is −L⁻ᵀ ε̂. With a histogram of pixels g = (x̃ − x̂)/σ, x̂ the guess of `histogram`: then
a network that returns zero is exact for independent pixels.
"""

from __future__ import annotations

import copy
import functools
import math
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
from ornstein.histogram import Histogram
from ornstein.likelihood import Discrete, Likelihood, OfPixels
from ornstein.parts import Record, described, part, rebuilt
from ornstein.process import Process
from ornstein.transition import Transition
from ornstein.truncation import NoiseLevel, Truncation, check_truncation

Figures = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Parametrisation = Literal["channel", "joint"]
FeaturesOf = Literal["x", "z"]


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
        self.features = self._as_features(features)
        self.precondition = precondition
        if features_of not in ("x", "z"):
            raise ValueError(
                f"features_of={features_of!r}; expected 'x' (what all variables say about the "
                "data) or 'z' (the noised data alone)."
            )
        self.features_of: FeaturesOf = features_of
        self.histogram = self._as_histogram(histogram)

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
        kernel = self.process.transition(self._expanded(s, y))
        zero = torch.zeros_like(y[:, 0], dtype=torch.float64)
        white = kernel.noise(y.to(torch.float64), zero)
        return self.estimate_from(white, y, kernel, View.of(kernel))

    def estimate_from(self, white: Tensor, y: Tensor, kernel: Transition, view: View) -> Tensor:
        """The same where L⁻¹y is known, (B, K, *shape) float64; reads nothing from the device.

        Of the noise that a joint model predicts only the part along â is used: the rest is known.
        """
        kind = torch.promote_types(y.dtype, torch.float32)
        along = contract(view.direction, white)
        sigma = over(view.sigma.clamp(max=LARGEST), along)
        if self.parametrisation == "channel":
            return self.denoise((along * sigma).to(kind), view.logsnr).to(y.dtype)
        residual = self.joint_residual(y, kernel, view, along * sigma)
        guess = contract(view.direction, residual.to(along.dtype))
        answer = self.answer(view.sigma, along)
        return (answer.data(along * sigma) - sigma * guess).to(y.dtype)

    def noise(self, y: Tensor, s: Tensor | float) -> Tensor:
        """E[ε | y_s], the noise in all variables: (B, K, *shape).

        The state is whitened in float64; where noise reaches the data through other variables, y
        itself should be float64 too.
        """
        return self._noise(y, self.process.transition(self._expanded(s, y)))

    def score(self, y: Tensor, s: Tensor | float) -> Tensor:
        """∇ log p(y_s) = −L⁻ᵀ ε̂: (B, K, *shape)."""
        kernel = self.process.transition(self._expanded(s, y))
        return kernel.noise_to_score(self._noise(y, kernel).to(torch.float64)).to(y.dtype)

    def _noise(self, y: Tensor, kernel: Transition) -> Tensor:
        view = View.of(kernel)
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

    def describe(self) -> Record:
        """What the model is, for JSON; code of the user's own is named, with kind None."""
        return {
            "network": sharing.name_or_description(self.network),
            "process": sharing.name_or_description(self.process),
            "likelihood": described(self.likelihood),
            "parametrisation": self.parametrisation,
            "truncation": None if self._truncation is None else described(self._truncation),
            "features": list(self.features),
            **({"features_of": self.features_of} if self._looks_at_bins else {}),
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
        )

    # ---------------------------------------------------------------- for the objectives

    @property
    def data_std(self) -> float:
        """One standard deviation for all coordinates: root of the mean variance."""
        return self.moments.scale

    @property
    def dtype(self) -> torch.dtype:
        """The type of the data's numbers outside the network: at least float32."""
        found = self._network_dtype()
        if found is None:
            return torch.get_default_dtype()
        return torch.float32 if found.itemsize < 4 else found

    def answer(self, sigma: Tensor, like: Tensor) -> GaussianAnswer | NoAnswer:
        """What is known without the network, at standard errors sigma: (B,)."""
        return GaussianAnswer.of(self.moments, sigma, like) if self.precondition else NoAnswer()

    def residual(
        self, x_noisy: Tensor, logsnr: Tensor, answer: GaussianAnswer | NoAnswer
    ) -> Tensor:
        """What a channel model knows beyond this answer: (B, *shape)."""
        if isinstance(answer, NoAnswer):
            return self._call(x_noisy, self._waves(x_noisy, logsnr), logsnr)
        state, extras = answer.normalised(x_noisy), self._waves(x_noisy, logsnr)
        if self.histogram is None:
            return answer.scale * self._call(state, extras, logsnr)
        beyond, more = self._beyond(self.histogram, x_noisy, (-logsnr / 2).exp(), answer)
        return beyond + answer.scale * self._call(state, [*extras, *more], logsnr)

    def _beyond(
        self, histogram: Histogram, x_noisy: Tensor, sigma: Tensor, answer: GaussianAnswer
    ) -> tuple[Tensor, list[Tensor]]:
        """The noise that a histogram sees beyond this answer, and what the network is told."""
        seen = histogram.seen(x_noisy.to(self.dtype), sigma)
        return seen.beyond(answer.data(x_noisy)).to(x_noisy.dtype), seen.extras(self.moments)

    def joint_residual(
        self, y: Tensor, kernel: Transition, view: View, x_noisy: Tensor | None = None
    ) -> Tensor:
        """What a joint model knows beyond the Gaussian answer: (B, K, *shape).

        x_noisy: x̃, (B, *shape); found from y where it is not known.
        """
        if x_noisy is None and self._looks_at_x:
            white = kernel.noise(y.to(torch.float64), torch.zeros_like(y[:, 0]).double())
            along = contract(view.direction, white)
            x_noisy = along * over(view.sigma.clamp(max=LARGEST), along)
        if x_noisy is not None:
            x_noisy = x_noisy.to(torch.promote_types(y.dtype, torch.float32))
        raw = y[:, 0] if x_noisy is None or self.features_of == "z" else x_noisy
        extras = self._waves(raw, view.logsnr)
        if not self.precondition:
            return self._call(y, [extra.unsqueeze(1) for extra in extras], view.logsnr)
        x = y[:, 0]
        mean, std = self.moments.mean.to(y.dtype), self.moments.std.to(y.dtype)
        response = kernel.response.to(y.dtype)
        spread = kernel.cholesky.square().sum(-1).to(y.dtype)
        centred = y - expand(response, mean.expand_as(x))
        wide = (expand(response.square(), (std**2).expand_as(x)) + over(spread, y)).sqrt()
        answer = GaussianAnswer.of(self.moments, view.sigma, x)
        beyond = None
        if self.histogram is not None and x_noisy is not None:
            beyond, more = self._beyond(self.histogram, x_noisy, view.sigma, answer)
            beyond, extras = beyond.to(y.dtype), [*extras, *more]
        extras = [extra.unsqueeze(1) for extra in extras]
        scale = answer.scale.expand_as(x)
        guess = scale.unsqueeze(1) * self._call(centred / wide, extras, view.logsnr)
        return guess if beyond is None else guess + expand(view.direction, beyond)

    @property
    def _looks_at_x(self) -> bool:
        """Whether a joint model needs x̃ beside its state."""
        return self.histogram is not None or (bool(self.features) and self.features_of == "x")

    @property
    def _looks_at_bins(self) -> bool:
        """Whether it is a joint model with features, of which there are two kinds."""
        return self.parametrisation == "joint" and bool(self.features)

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

    def _waves(self, raw: Tensor, logsnr: Tensor) -> list[Tensor]:
        """Sines and cosines of x̃, or of the noised data: (B, *shape) each."""
        waves: list[Tensor] = []
        for frequency in self.features:
            wide = raw.to(torch.promote_types(raw.dtype, torch.float32))
            angle = wide.clamp(-(LARGEST**0.5), LARGEST**0.5) * frequency
            both = [angle.sin(), angle.cos()]
            if self.histogram is not None or (self._looks_at_bins and self.features_of == "x"):
                both = [self._damped(wave, frequency, logsnr) for wave in both]
            waves += both
        return waves

    def _call(self, state: Tensor, extras: Sequence[Tensor], logsnr: Tensor) -> Tensor:
        """The network on its normalised input, checked: like `state`."""
        inputs = torch.cat([state, *(e.to(state.dtype) for e in extras)], 1) if extras else state
        kind = self._network_dtype() or state.dtype
        output = self._ask(inputs.to(kind), logsnr.to(torch.promote_types(kind, torch.float32)))
        if not isinstance(output, Tensor) or output.shape != state.shape:
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"the network returned {found} for an input of shape {tuple(inputs.shape)}; "
                f"expected {tuple(state.shape)}, "
                + (
                    "the data's own shape."
                    if self.parametrisation == "channel"
                    else f"noise for all {self.process.n_vars} variables (parametrisation='joint')."
                )
            )
        return output.to(state.dtype)

    def _damped(self, wave: Tensor, frequency: float, logsnr: Tensor) -> Tensor:
        """A wave of x̃, faded out where noise is longer than it, by exp(−(fσ)²/8).

        It says nothing there, and its derivative by σ, which a learned process sees, would grow.
        """
        size = (-((frequency**2) / 8) * (-logsnr).exp()).exp()
        return wave * over(size, wave, wave.dtype)

    def _ask(self, inputs: Tensor, logsnr: Tensor) -> Any:
        try:
            return self.network(inputs, logsnr)
        except RuntimeError as error:
            if "dtype" in str(error) and inputs.dtype != logsnr.dtype:
                raise ValueError(
                    f"the network failed on an input of type {inputs.dtype} and log SNR of type "
                    f"{logsnr.dtype} ({error}); log SNR stays float32, since half types blur it. "
                    "Expected a network that embeds it first and casts the embedding to its own "
                    "type; or keep the network in float32 and use torch.autocast."
                ) from error
            raise

    def _network_dtype(self) -> torch.dtype | None:
        if not isinstance(self.network, nn.Module):
            return None
        kinds = (p.dtype for p in self.network.parameters() if p.is_floating_point())
        return next(kinds, None)

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

    def _checked(self, given: Truncation | None) -> Truncation | None:
        return None if given is None else check_truncation(given)

    def _as_features(self, given: Sequence[float] | str | None) -> tuple[float, ...]:
        if given is None:
            return ()
        if given == "bins":
            if not isinstance(self.likelihood, OfPixels) or self.likelihood.density:
                raise ValueError(
                    "features='bins' needs pixels; expected likelihood=Discrete(levels) or "
                    "Tweedie(levels). Give frequencies, or leave features out."
                )
            width = self.likelihood.pixels.finest()
            return (math.pi / width, 2 * math.pi / width)
        try:
            frequencies = () if isinstance(given, str) else tuple(float(f) for f in given)
        except (TypeError, ValueError):
            frequencies = ()
        if not frequencies or not all(math.isfinite(f) for f in frequencies):
            raise ValueError(
                f"features={given!r}; expected 'bins', a list of finite frequencies, or None."
            )
        return frequencies

    def _as_histogram(self, given: Tensor | None) -> Histogram | None:
        if given is None:
            return None
        if not isinstance(self.likelihood, Discrete):
            raise ValueError(
                f"a histogram was given with {self.likelihood!r}; expected Discrete(levels), whose "
                "pixels are at the numbers of their levels. Leave the histogram out."
            )
        if not self.precondition:
            raise ValueError(
                "a histogram was given with precondition=False, which leaves all answers to the "
                "network; expected one of the two."
            )
        pixels = self.likelihood.pixels
        return Histogram(pixels.centres(), given, pixels.edges())

    def extra_repr(self) -> str:
        return (
            f"{self.parametrisation!r}, likelihood={self.likelihood!r}, "
            f"truncation={self.truncation!r}"
            + ("" if self.histogram is None else ", with a histogram")
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
