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

and the score is −L⁻ᵀ ε̂.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ornstein.likelihood import Discrete, Likelihood, _OfPixels
from ornstein.matrices import as_float64
from ornstein.process import Process
from ornstein.schedules import Float64Module
from ornstein.transition import Transition
from ornstein.truncation import FixedTime, NoiseLevel, Truncation

Parametrisation = Literal["channel", "joint"]


class Moments(Float64Module):
    """Mean and standard deviation of the data: numbers, or tensors that broadcast to it."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor | float, std: Tensor | float) -> None:
        super().__init__()
        self.register_buffer("mean", as_float64(mean, "data_mean"))
        self.register_buffer("std", as_float64(std, "data_std"))
        if not bool((self.std > 0).all()):
            raise ValueError(
                f"data_std has an entry {self.std.min().item():g}; expected the data's standard "
                "deviation, a positive number, or one per channel. likelihood.moments(x) gives it."
            )
        self.scale = self._scale()  # on the host, since a proposal for times asks for it

    def _scale(self) -> float:
        return self.std.square().mean().sqrt().item()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if not self.std.is_meta:
            self.scale = self._scale()


@dataclass(frozen=True)
class View:
    """What a kernel given x says about x: (B,) and (B, K), float64."""

    direction: Tensor  # (B, K) â, the part of the whitened noise that hides x
    sigma: Tensor  # (B,) standard error of x
    logsnr: Tensor  # (B,)

    def expand(self, size: int) -> View:
        """One view for a whole batch."""
        K = self.direction.shape[-1]
        return View(
            self.direction.expand(size, K), self.sigma.expand(size), self.logsnr.expand(size)
        )

    @staticmethod
    def of(kernel: Transition) -> View:
        """From a kernel given x."""
        signal = kernel.signal
        snr = signal.square().sum(-1)
        return View(signal * snr.rsqrt().unsqueeze(-1), snr.rsqrt(), snr.log())


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
    ) -> None:
        """
        data_mean, data_std: of the numbers that diffuse; likelihood.moments(x) gives them.
        truncation: NoiseLevel or FixedTime; by default a sixth of a pixel's bin, or a thousandth
            of the data's standard deviation.
        features: frequencies whose sines and cosines (of x̃, or of z for "joint") the network gets
            as further entries of axis 1; "bins" stands for two bins and one bin of the pixels.
        precondition: False leaves out the Gaussian answer and all scaling: the network gets x̃ (or
            y) as it is, and its output is the noise.
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
        if not callable(network):
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
        self.truncation = self._as_truncation(truncation)
        self.features = self._as_features(features)
        self.precondition = precondition

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
        model = copy.copy(self)
        model._modules = {**self._modules, "process": other}
        return model

    def with_truncation(self, truncation: Truncation | None) -> ScoreModel:
        """The same model, its bounds truncated elsewhere."""
        model = copy.copy(self)
        model.truncation = self._as_truncation(truncation)
        return model

    def predict(self, x_noisy: Tensor, logsnr: Tensor) -> Tensor:
        """E[ε_∥ | x̃]: the noise in x̃ = x + σ ε_∥ of a channel model, (B, *shape)."""
        self._only_channel("predict")
        sigma = (-logsnr.to(torch.float64) / 2).exp()
        return self._gaussian_noise(x_noisy, sigma) + self.residual(x_noisy, logsnr, sigma)

    def denoise(self, x_noisy: Tensor, logsnr: Tensor) -> Tensor:
        """E[x | x̃] = x̃ − σ ε̂ of a channel model: (B, *shape)."""
        sigma = (-logsnr.to(torch.float64) / 2).exp()
        return x_noisy - over(sigma, x_noisy) * self.predict(x_noisy, logsnr)

    def noise(self, y: Tensor, s: Tensor | float) -> Tensor:
        """E[ε | y_s], the noise in all variables: (B, K, *shape).

        The state is whitened in float64; where noise reaches the data through other variables, y
        itself should be float64 too.
        """
        kernel = self.process.transition(self._expanded(s, y.shape[0]), given="x")
        view = View.of(kernel)
        zero = torch.zeros_like(y[:, 0], dtype=torch.float64)
        white = kernel.noise(y.to(torch.float64), zero)  # L⁻¹y = a x + ε
        along = contract(view.direction, white)
        x_noisy = along * over(view.sigma, along)
        if self.parametrisation == "channel":
            parallel = self.predict(x_noisy.to(y.dtype), view.logsnr).to(along.dtype)
            return (white + expand(view.direction, parallel - along)).to(y.dtype)
        guess = self.joint_residual(y, kernel, view)
        if not self.precondition:
            return guess
        gaussian = self._gaussian_noise(x_noisy, view.sigma)
        return (white + expand(view.direction, gaussian - along) + guess).to(y.dtype)

    def score(self, y: Tensor, s: Tensor | float) -> Tensor:
        """∇ log p(y_s) = −L⁻ᵀ ε̂: (B, K, *shape)."""
        kernel = self.process.transition(self._expanded(s, y.shape[0]), given="x")
        return kernel.noise_to_score(self.noise(y, s).to(torch.float64)).to(y.dtype)

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

    def residual(self, x_noisy: Tensor, logsnr: Tensor, sigma: Tensor) -> Tensor:
        """What the network adds to the Gaussian answer of a channel model: (B, *shape)."""
        if not self.precondition:
            return self._call(x_noisy, x_noisy, logsnr)
        mean, std = self._moments(x_noisy)
        wide = (std**2 + over(sigma, x_noisy) ** 2).sqrt()
        return std / wide * self._call((x_noisy - mean) / wide, x_noisy, logsnr)

    def joint_residual(self, y: Tensor, kernel: Transition, view: View) -> Tensor:
        """What the network adds to the Gaussian answer of a joint model: (B, K, *shape)."""
        if not self.precondition:
            return self._call(y, y[:, :1], view.logsnr)
        mean, std = self._moments(y[:, 0])
        response = kernel.response.to(y.dtype)
        spread = kernel.cholesky.square().sum(-1).to(y.dtype)
        centred = y - expand(response, mean.expand_as(y[:, 0]))
        wide = (expand(response.square(), (std**2).expand_as(y[:, 0])) + over(spread, y)).sqrt()
        scale = std / (std**2 + over(view.sigma, y[:, 0]) ** 2).sqrt()
        return scale.unsqueeze(1) * self._call(centred / wide, y[:, :1], view.logsnr)

    def gaussian_error(self, x: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """ε_∥ − g, the error of the Gaussian answer, without cancellation: (B, *shape)."""
        if not self.precondition:
            return noise
        mean, std = self._moments(x)
        width = over(sigma, x)
        return (std**2 * noise - width * (x - mean)) / (std**2 + width**2)

    def gaussian_square(self, x: Tensor, sigma: Tensor) -> Tensor:
        """E(ε_∥ − g)² over the noise: (B, *shape)."""
        if not self.precondition:
            return torch.ones_like(x)
        mean, std = self._moments(x)
        width = over(sigma, x) ** 2
        return (std**4 + width * (x - mean) ** 2) / (std**2 + width) ** 2

    def check_data(self, x: Tensor, likelihood: Likelihood) -> None:
        """Raise if this can't be a batch for this model under this likelihood."""
        if not likelihood.same_space(self.likelihood):
            raise ValueError(
                f"the model was built for {self.likelihood!r} and the bound is {likelihood!r}: its "
                "network knows other numbers than these. Expected the same levels and logit map."
            )
        likelihood.check(x)
        for name, value in (("data_mean", self.moments.mean), ("data_std", self.moments.std)):
            try:
                fits = torch.broadcast_shapes(value.shape, x.shape[1:]) == x.shape[1:]
            except RuntimeError:
                fits = False
            if not fits:
                raise ValueError(
                    f"a batch of shape {tuple(x.shape)} does not fit {name} of shape "
                    f"{tuple(value.shape)}; expected data of a shape (batch, *data) that it "
                    "broadcasts to."
                )
        if x.device != self.process.device:
            raise ValueError(
                f"the data is on {x.device} and the process on {self.process.device}; expected one "
                "device. Move the data with .to(device)."
            )

    # ---------------------------------------------------------------- inside

    def _call(self, state: Tensor, raw: Tensor, logsnr: Tensor) -> Tensor:
        """The network on its normalised input, checked: like `state`."""
        inputs = state
        if self.features:
            parts = [state]
            for frequency in self.features:
                angle = raw.to(torch.promote_types(raw.dtype, torch.float32)) * frequency
                parts += [angle.sin().to(state.dtype), angle.cos().to(state.dtype)]
            inputs = torch.cat(parts, 1)
        kind = self._network_dtype() or state.dtype
        output = self.network(inputs.to(kind), logsnr.to(torch.promote_types(kind, torch.float32)))
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

    def _network_dtype(self) -> torch.dtype | None:
        if not isinstance(self.network, nn.Module):
            return None
        kinds = (p.dtype for p in self.network.parameters() if p.is_floating_point())
        return next(kinds, None)

    def _gaussian_noise(self, x_noisy: Tensor, sigma: Tensor) -> Tensor:
        """g = E[ε_∥ | x̃] for Gaussian data."""
        if not self.precondition:
            return torch.zeros_like(x_noisy)
        mean, std = self._moments(x_noisy)
        width = over(sigma, x_noisy)
        return width * (x_noisy - mean) / (std**2 + width**2)

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.moments.mean.to(like.dtype), self.moments.std.to(like.dtype)

    def _expanded(self, s: Tensor | float, size: int) -> Tensor:
        times = torch.as_tensor(s, dtype=torch.float64, device=self.process.device)
        return times.expand(size) if times.dim() == 0 else times

    def _only_channel(self, what: str) -> None:
        if self.parametrisation != "channel":
            raise ValueError(
                f"{what} is for parametrisation='channel'; this model is joint. Use noise(y, s) or "
                "score(y, s)."
            )

    def _as_truncation(self, given: Truncation | None) -> Truncation:
        if given is None:
            return NoiseLevel(self.likelihood.noise_level(self.data_std))
        if not isinstance(given, (NoiseLevel, FixedTime)):
            raise ValueError(
                f"truncation={given!r}; expected ornstein.NoiseLevel(standard_error) or "
                "ornstein.FixedTime(s)."
            )
        return given

    def _as_features(self, given: Sequence[float] | str | None) -> tuple[float, ...]:
        if given is None:
            return ()
        if given == "bins":
            if not isinstance(self.likelihood, _OfPixels) or not hasattr(self.likelihood, "pixels"):
                raise ValueError(
                    "features='bins' needs pixels; expected likelihood=Discrete(levels) or "
                    "Tweedie(levels). Give frequencies, or leave features out."
                )
            width = self.likelihood.pixels.finest()
            return (math.pi / width, 2 * math.pi / width)
        if isinstance(given, str):
            raise ValueError(f"features={given!r}; expected 'bins', frequencies, or None.")
        return tuple(float(f) for f in given)

    def extra_repr(self) -> str:
        return (
            f"{self.parametrisation!r}, likelihood={self.likelihood!r}, "
            f"truncation={self.truncation!r}"
        )


# ---------------------------------------------------------------- (B,) and (B, K) over the data


def over(value: Tensor, like: Tensor) -> Tensor:
    """(B,) or (B, K) as something that multiplies a tensor of the data's size, in its type."""
    return value.to(like.dtype).reshape(*value.shape, *[1] * (like.dim() - value.dim()))


def expand(vector: Tensor, data: Tensor) -> Tensor:
    """(B, K) times (B, *shape): (B, K, *shape)."""
    return over(vector, data.unsqueeze(1)) * data.unsqueeze(1)


def contract(vector: Tensor, state: Tensor) -> Tensor:
    """Σ_k vector[:, k] state[:, k]: (B, *shape)."""
    return (over(vector, state) * state).sum(1)
