"""Flaws that may have spoilt a published figure, each of which can be switched on alone.

    kernel    Kernels in float32 by the paper's formula. With M = ∫A, N = ∫GGᵀ and Σ₀ = Cov(y₀|·)

                  C = first rows of exp[[M, N], [0, −Mᵀ]] (Σ₀, I),  Σ = C H⁻¹,  H⁻¹ = exp Mᵀ,

              Σ is symmetrised and its Cholesky factor L taken in float32. Where that fails for one
              element of a batch, 1e-4·I is added to the Σ of *all* its elements, and ten times as
              much until it works. This L is the one that noise is multiplied by and the one that
              scores are taken with, given x and given the state, at ε, at T and in between: what is
              jittered is the covariance of the kernel, consistently. G, ∫tr A, the prior and the
              law of v₀ are exact. What is done with L afterwards is float64, as in the library.
    time      Truncation at the time 0.001 in place of a noise level.
    density   Times from the importance density of VPSDE with the same rate, with its own weights.
    plain     The network's output is the noise, with no Gaussian answer to add to.
    rounded   (of the tweedie bound, which decodes y₀ from y_ε) Both are float32 numbers, and so are
              the means Φy₀ and Φ⁻¹(y_ε + Σs_θ), by float32 copies of exact matrices. log q(y_ε|y₀)
              and log p(y₀|y_ε) are Gaussians of the differences, whose deviation in z is 3e-10 for
              ALDA at s = 0.001, where float32 holds z to 1e-7. It matters at evaluation only.

A kernel with jitter changes nothing else: its bound is truncated at the time at which the sound
kernel has the wanted noise level, and times come from the sound kernel.

Figures are made by `written`, the bound with all terms as the paper writes them, since a closed
form that holds for an exact kernel, ∫½tr(Σ⁻¹GGᵀ) + tr A = ½log|Σ_T| − ½log|Σ_ε|, is one that jitter
breaks.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

import ornstein
from ornstein import Diffusion, Discrete, FixedTime, Importance, Linear, ScoreModel, Tweedie, vpsde
from ornstein.likelihood import Likelihood
from ornstein.linalg import lower_inverse
from ornstein.process import Process
from ornstein.terms import joint_error, mix, natural_times, root_entropy, total, whitening
from ornstein.times import Span, Times
from ornstein.transition import Given, Transition

JITTER, MOST = 1e-4, 1e3
EPSILON = 1e-3  # the fixed time
BATCH = 256  # examples that share their jitter, as in training


@dataclass(frozen=True)
class Flaws:
    """Which of them are on."""

    kernel: bool = False
    time: bool = False
    density: bool = False
    plain: bool = False
    scaled: bool = False  # the integral's estimate, multiplied by 1 − ε once more

    def names(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name)]


def sources() -> str:
    """A checksum of all code that figures depend on, so that those of two versions don't mix."""
    found, here = hashlib.sha256(), Path(__file__).parent
    library = sorted(Path(ornstein.__file__).parent.rglob("*.py"))
    for path in (*library, here / "flaws.py", here / "ablation.py"):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


# ---------------------------------------------------------------- the kernel


def cholesky(covariance: Tensor) -> tuple[Tensor, float]:
    """Its factor in its own type, and what had to be added to all elements: (B, K, K)."""
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    added = 0.0
    while added <= MOST:
        found, failed = torch.linalg.cholesky_ex(covariance + added * eye)
        if not bool(failed.any()) and bool(found.isfinite().all()):
            return found, added
        added = 10 * added or JITTER
    raise ValueError(
        f"a covariance has no factor with {MOST:g}·I added; expected finite numbers. The process "
        "is too stiff for float32: choose a slower rate."
    )


class InFloat32(Diffusion):
    """A process whose kernels are the paper's formula in float32, jittered where that fails."""

    def __init__(self, sound: Process) -> None:
        if not isinstance(sound, Diffusion) or sound.ratio is None:
            raise ValueError(
                f"{sound.name!r} does not run on one clock, and the paper's formula does; expected "
                "a process with Q, D and one rate, such as ornstein.alda()."
            )
        sound = copy.deepcopy(sound).to("cpu")
        super().__init__(
            sound.make_Q,
            sound.make_D,
            S=sound.S,
            rate_q=sound.rate_q,
            rate_d=sound.rate_d,
            horizon=sound.horizon,
            name=sound.name,
        )
        self.auxiliary = sound.auxiliary

    def moved(self, times: Tensor) -> Tensor:
        """M = ∫A in float32: (B, K, K)."""
        drift = -((self.ratio or 1.0) * self.Q + self.D) @ self.S
        return self._clock(times).to(torch.float32)[:, None, None] * drift.to(torch.float32)

    def covariance32(self, times: Tensor, given: Given = "x") -> Tensor:
        """Σ in float32, as it comes: (B, K, K)."""
        if len(times) == 1:  # torch takes fewer terms of exp for a single matrix than for several
            return self.covariance32(times.expand(2), given)[:1]
        K, M = self.n_vars, self.moved(times)
        N = self._clock(times).to(torch.float32)[:, None, None] * (2 * self.D).to(torch.float32)
        rows = torch.cat([M, N], -1), torch.cat([torch.zeros_like(M), -M.mT], -1)
        root = self.auxiliary.factor().to(torch.float32)
        first = root @ root.mT if given == "x" else torch.zeros_like(M[0])
        start = torch.cat([first, torch.eye(K, device=M.device)])
        C = (torch.linalg.matrix_exp(torch.cat(rows, -2)) @ start)[:, :K]
        found = C @ torch.linalg.matrix_exp(M.mT)
        return (found + found.mT) / 2

    def fails(self, times: Tensor, given: Given = "x") -> Tensor:
        """Where the factor can't be taken without jitter: (B,)."""
        return torch.linalg.cholesky_ex(self.covariance32(times, given))[1] != 0

    @torch.no_grad()
    def transition(
        self, s: Tensor | float, given: Given = "x", start: Tensor | float = 0.0
    ) -> Transition:
        if isinstance(start, Tensor) or start != 0:
            raise ValueError(f"start={start!r}; expected 0: bounds need no other.")
        times, shape = self._times(s)
        K = self.n_vars
        factor, _ = cholesky(self.covariance32(times, given))
        return Transition(
            propagator=torch.linalg.matrix_exp(self.moved(times)).double().reshape(*shape, K, K),
            cholesky=factor.double().reshape(*shape, K, K),
            direction=self.auxiliary.direction(),
            given=given,
            error=torch.zeros(shape, dtype=torch.float64, device=times.device),
        )


# ---------------------------------------------------------------- models and times with flaws


class Of(Times):
    """A proposal that looks at this process, whatever the model's is."""

    def __init__(self, base: Times, process: Process) -> None:
        super().__init__(base.spread)
        self.base, self.process = base, process

    def place(self, u: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        return self.base.place(u, Span(self.process, span.start, span.data_std))


def vp_times(process: Process) -> Times:
    """VPSDE's importance density, for the rate of this process, on [ε, T]."""
    rate = process.rate_d if isinstance(process, Diffusion) else Linear(horizon=process.horizon)
    return Importance(vpsde(rate, process.horizon))


def times_of(model: ScoreModel, flaws: Flaws) -> Times:
    """Where times are drawn, for a model with a sound process."""
    if flaws.density:
        return vp_times(copy.deepcopy(model.process).to("cpu")).to(model.process.device)
    return Of(natural_times(model), model.process)


def with_flaws(model: ScoreModel, flaws: Flaws) -> ScoreModel:
    """The same network in a model with these flaws; `model` has a sound process."""
    process, truncation = model.process, model.truncation
    if flaws.kernel:  # whose noise level is another one at the same time
        truncation = FixedTime(truncation.time(process).item())
        process = InFloat32(process).to(process.device)
    if flaws.time:
        truncation = FixedTime(EPSILON)
    return ScoreModel(
        model.network,
        process,
        model.likelihood,
        model.parametrisation,
        model.moments.mean.cpu(),
        model.moments.std.cpu(),
        truncation,
        model.features or None,
        model.precondition and not flaws.plain,
        model.features_of,
        known_noise=model.known_noise,
    ).to(process.device)


# ---------------------------------------------------------------- the bound, term by term


@dataclass(frozen=True)
class Written:
    """One draw of the bound for every example, in nats: (B,) each."""

    prior: Tensor  # log π(y_T)
    known: Tensor  # of the integral: ½tr(Σ⁻¹GGᵀ) + tr A, the network not asked
    error: Tensor  # of the integral: −½‖s_θ − s_φ‖²
    end: Tensor  # from y_ε to the data, and the entropies
    s: Tensor  # where the integrand was looked at

    @property
    def nats(self) -> Tensor:
        return self.prior + self.known + self.error + self.end


@torch.no_grad()
def written(
    model: ScoreModel,
    pixels: Tensor,
    likelihood: Likelihood,
    times: Times,
    scaled: bool = False,
    rounded: bool = False,
) -> Written:
    """One draw of a joint model's bound with all its terms, each example at a time of its own."""
    process, K = model.process, model.process.n_vars
    B, d = len(pixels), pixels[0].numel()
    u = torch.rand(pixels.shape, device=pixels.device) if likelihood.dequantised else None
    x = likelihood.values(pixels, u, torch.float32)
    start = model.truncation.time(process)

    def normal(count: int) -> Tensor:
        return torch.randn((B, count, *x.shape[1:]), device=x.device)

    # log π(y_T), y_T ~ q(y_T | x)
    white = torch.linalg.inv(process.prior_factor)
    last = process.transition(torch.full_like(start, process.horizon).expand(B))
    y = mix(white.expand(B, K, K), last.sample(x, noise=normal(K))[0])
    log_prior = d * (white.diagonal().log().sum() - K / 2 * math.log(2 * math.pi))
    # the integrand at one time
    place = torch.rand(B, dtype=torch.float64, device=x.device)
    s, weight = times.place(place, Span(process, start, model.data_std))
    weight = weight * (1 - start / process.horizon) if scaled else weight
    kernel = process.transition(s)
    metric = torch.linalg.solve_triangular(kernel.cholesky, process.noise_factor(s), upper=False)
    error = joint_error(model, kernel, model.view_of_noise(kernel, s), x, normal(K))
    trace = torch.diagonal(process.drift(s), dim1=-2, dim2=-1).sum(-1)
    return Written(
        prior=log_prior - total(y**2) / 2,
        known=weight * d * (metric.square().sum((-2, -1)) / 2 + trace),
        error=-weight * total(mix(metric.mT, error) ** 2) / 2,
        end=_end(model, pixels, x, likelihood, start, rounded) + likelihood.log_jacobian(pixels, u),
        s=s,
    )


def _end(
    model: ScoreModel,
    pixels: Tensor,
    x: Tensor,
    likelihood: Likelihood,
    start: Tensor,
    rounded: bool,
) -> Tensor:
    """E log P(x|y_ε) + H(q(y_ε|x)), or with Tweedie log p(y₀|y_ε) − log q(y_ε|y₀) + H(v₀|x)."""
    process, K = model.process, model.process.n_vars
    B, d = len(x), x[0].numel()
    kernel = process.transition(start.expand(B))
    if isinstance(likelihood, Discrete):
        sigma = kernel.snr[0].rsqrt().item()
        entropy = kernel.logdet / 2 + K / 2 * math.log(2 * math.pi * math.e)
        return likelihood.reconstruction(pixels, sigma) + d * entropy
    if not isinstance(likelihood, Tweedie):
        raise ValueError(f"likelihood={likelihood!r}; expected Discrete or Tweedie.")
    known = process.transition(start.expand(B), given="state")
    white = whitening(process, kernel, known)
    inner = torch.randn((B, 2 * K - 1, *x.shape[1:]), device=x.device)  # given the state, and v₀
    eps = mix(white, inner)
    view = model.view_of_noise(kernel, start.expand(B))
    guess = mix(white[:, :, :K].mT, eps - joint_error(model, kernel, view, x, eps))
    if rounded:  # −Lᵀs_θ of the kernel given the state is `guess`
        root = process.auxiliary.factor()
        decoded = in_float32(known, root, x, inner, guess)
    else:
        found = inner[:, :K] - guess
        decoded = total((inner[:, :K] - found) * (inner[:, :K] + found)) / 2
    return decoded + d * (process.log_volume(start) + root_entropy(process.auxiliary.factor()))


def in_float32(known: Transition, root: Tensor, x: Tensor, inner: Tensor, guess: Tensor) -> Tensor:
    """½‖L⁻¹(y_ε − Φy₀)‖² − ½‖L⁻¹Φ(y₀ − Φ⁻¹(y_ε − L guess))‖², states in float32: (B,).

    known: the kernel given the state; inner: its noise and that of v₀; guess: like the former.
    """
    B, K = len(x), known.cholesky.shape[-1]
    L, Phi = (m.expand(B, K, K) for m in (known.cholesky, known.propagator))
    back = torch.linalg.inv(Phi)
    first = torch.nn.functional.pad(x.unsqueeze(1), (0, 0) * (x.dim() - 1) + (0, K - 1))
    first = first + mix(root.expand(B, K, K - 1), inner[:, K:]) if K > 1 else first  # y₀
    mean = mix(Phi, first)
    y = mean + mix(L, inner[:, :K])
    decoded = mix(back, y) - mix(back @ L, guess)
    white = lower_inverse(L)
    there, again = mix(white, (y - mean).double()), mix(white @ Phi, (first - decoded).double())
    return (total(there**2) - total(again**2)) / 2
