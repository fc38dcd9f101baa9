"""The bound on log p(x), and the simpler losses.

With y_s given x ("hybrid": auxiliary variables integrated out), s_φ = −L⁻ᵀε the score of the
transition and s_θ = −L⁻ᵀε̂ that of the model, on [ε, T]:

    log p(x) ≥ −KL(q(y_T|x) ‖ π) − ½∫ E‖s_θ − s_φ‖²_{GGᵀ} ds + reconstruction        (L^mdsm)
                 prior              diffusion

The paper's integrand has ½‖s_φ‖²_{GGᵀ} + ∇·f besides; it is ½ d/ds log|Σ|, and what it integrates
to has become part of the entropies in the prior and the reconstruction. Those two are closed forms
(or tables; see `likelihood`): only the denoising error is sampled. For a channel model

    ½∫ E‖s_θ − s_φ‖²_{GGᵀ} ds = ½∫ E‖ε_∥ − ε̂_∥‖² dλ,       λ = log SNR,

in which the process appears in the two ends alone. By Stein's identity ε_∥ can be integrated out:

    ½E‖ε_∥ − ε̂_∥‖² = E[½d + ½‖ε̂_∥‖² − σ ∇·ε̂_∥],                                      (L^mism)

and for all K variables with C = L⁻¹GGᵀL⁻ᵀ, ½E‖ε − ε̂‖²_C = E[½d tr C + ½‖ε̂‖²_C − tr(C ∂ε̂/∂w)].

Given the state (v₀ known) the bound has the same expectation, and a larger variance. All of it is
differentiable in the network and in the process. Where the truncation depends on a learned process,
so do the times, in the gradient too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ornstein.diagnostics import prior_gap
from ornstein.draws import Counted, Draws, Generated
from ornstein.likelihood import Continuous, Discrete, Likelihood, Tweedie, bits_per_dim
from ornstein.linalg import in_graph
from ornstein.process import Process
from ornstein.score import LARGEST, ScoreModel, View, contract, expand, over
from ornstein.times import Importance, Information, Span, Times
from ornstein.transition import Given, Transition
from ornstein.truncation import NoiseLevel, Truncation, check_truncation

Divergence = Literal["auto", "exact", "rademacher", "gaussian"]
Weighting = Callable[[Tensor], Tensor]
Random = Draws | torch.Generator | int | None  # draws, a generator, a seed, or the global generator
EXACT_UP_TO = 32  # coordinates of the state for which a divergence is taken one by one


@dataclass(frozen=True)
class Bound:
    """A lower bound on log p(x), per example: (B,) float64, in nats; prior + diffusion +
    reconstruction = nats."""

    nats: Tensor
    prior: Tensor  # −KL(q(y_T|x) ‖ π)
    diffusion: Tensor  # minus the denoising error
    reconstruction: Tensor  # of the data from y_ε, and the map from data to numbers
    dims: int
    name: str  # of the bound
    samples: Tensor  # (B, draws) the bound of each draw; nats is their mean
    logsnr: Tensor  # (B, draws) where the error was sampled …
    errors: Tensor  # (B, draws) … and each weighted sample; −mean is the sampled part of diffusion
    control: Tensor | None = None  # (B, draws) of mean zero; see `controlled`

    @property
    def bits_per_dim(self) -> Tensor:
        """−nats / (dims·log 2): an upper bound on the bits of a coordinate, (B,)."""
        return bits_per_dim(self.nats, self.dims)

    def controlled(self, part: Tensor) -> Bound:
        """The same bound with a part (B, draws) of its control variate taken from the errors.

        The control is what the Gaussian answer's error, with this noise at this time, is above its
        mean, a closed form. As long as `part` does not depend on the noise nothing is biased; where
        the network's error has much in common with the Gaussian's, most of its noise is gone.
        """
        if self.control is None:
            raise ValueError("this bound has no control variate; call elbo(..., control=True).")
        less = part * self.control
        moved = less.mean(1)
        return replace(
            self,
            nats=self.nats + moved,
            diffusion=self.diffusion + moved,
            samples=self.samples + less,
            errors=self.errors - less,
        )


def elbo(
    model: ScoreModel,
    x: Tensor,
    *,
    draws: int = 1,
    times: Times | None = None,
    given: Given = "x",
    likelihood: Likelihood | None = None,
    truncation: Truncation | None = None,
    random: Random = None,
    control: bool = False,
) -> Bound:
    """The bound L^mdsm on log p(x) for a batch x: (B, *shape).

    draws: times per example at which the network is asked (Tweedie and Continuous ask it once more
    each, at the truncation). times: where they are, by default Information() (Importance() given
    the state, or without preconditioning). likelihood, truncation: by default those of the model.
    control: whether to return a control variate, too.
    """
    job = _Job(model, x, draws, times, given, likelihood, truncation, random, control)
    if model.parametrisation == "channel" and given == "x" and job.times.in_logsnr:
        logsnr, errors = _channel_errors(job)
    else:
        logsnr, errors = _errors(job, lambda s, kernel: job.half_noise(s))
    return job.bound(-errors, logsnr, errors, "")


def mism(
    model: ScoreModel,
    x: Tensor,
    *,
    draws: int = 1,
    divergence: Divergence = "auto",
    times: Times | None = None,
    likelihood: Likelihood | None = None,
    truncation: Truncation | None = None,
    random: Random = None,
) -> Bound:
    """The same bound by implicit score matching: ε is integrated out, a divergence comes in.

    divergence: "exact" (one backward pass per coordinate and noise), "rademacher" or "gaussian"
    probes (Hutchinson); "auto" is exact for up to 32 coordinates of the state.
    """
    if divergence not in ("auto", "exact", "rademacher", "gaussian"):
        raise ValueError(
            f"divergence={divergence!r}; expected 'auto', 'exact', 'rademacher' or 'gaussian'."
        )
    job = _Job(model, x, draws, times, "x", likelihood, truncation, random)
    if model.parametrisation == "channel":
        logsnr, errors = _channel_implicit(job, divergence)
    else:
        logsnr, errors = _joint_implicit(job, divergence)
    return job.bound(-errors, logsnr, errors, ", implicit")


def score_matching(
    model: ScoreModel,
    x: Tensor,
    *,
    weighting: Weighting | None = None,
    draws: int = 1,
    times: Times | None = None,
    given: Given = "x",
    truncation: Truncation | None = None,
    random: Random = None,
) -> Tensor:
    """∫ λ(s) E‖s_θ − s_φ‖² ds per example (paper, appendix A): (B,) float64.

    weighting maps times (n,) to positive numbers (n,); None is λ = 1.
    """
    job = _Job(model, x, draws, times, given, None, truncation, random)

    def factor(s: Tensor, kernel: Transition) -> Tensor:
        eye = torch.eye(model.process.n_vars, dtype=torch.float64, device=s.device)
        return job.weight(weighting, s)[:, None, None] * eye

    return job.mean(_errors(job, factor)[1])


def noise_prediction(
    model: ScoreModel,
    x: Tensor,
    *,
    weighting: Weighting | None = None,
    draws: int = 1,
    times: Times | None = None,
    given: Given = "x",
    truncation: Truncation | None = None,
    random: Random = None,
) -> Tensor:
    """∫ λ(s) E‖ε̂ − ε‖² ds per example (paper, appendix A, where λ = 1): (B,) float64.

    ε is the noise of the kernel that is `given`: y_s = mean + L ε.
    """
    job = _Job(model, x, draws, times, given, None, truncation, random)

    def factor(s: Tensor, kernel: Transition) -> Tensor:
        return job.weight(weighting, s)[:, None, None] * kernel.cholesky

    return job.mean(_errors(job, factor)[1])


def natural_times(model: ScoreModel, given: Given = "x") -> Times:
    """The proposal that is taken where none is given."""
    return Information() if model.precondition and given == "x" else Importance()


# ---------------------------------------------------------------- one call


class _Job:
    """What all terms of one call share."""

    def __init__(
        self,
        model: ScoreModel,
        x: Tensor,
        draws: int,
        times: Times | None,
        given: Given,
        likelihood: Likelihood | None,
        truncation: Truncation | None,
        random: Random,
        with_control: bool = False,
    ) -> None:
        if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
            raise ValueError(f"draws={draws!r}; expected a whole number ≥ 1.")
        if given not in ("x", "state"):
            raise ValueError(
                f"given={given!r}; expected 'x' (the auxiliary variables integrated out) or "
                "'state' (all variables known)."
            )
        if not isinstance(model, ScoreModel):
            raise ValueError(
                f"model was given as {type(model).__name__}; expected ornstein.ScoreModel(network, "
                "process)."
            )
        self.model, self.process, self.draws, self.given = model, model.process, draws, given
        self.likelihood = model.likelihood if likelihood is None else likelihood
        if not isinstance(self.likelihood, Likelihood):
            raise ValueError(
                f"likelihood={likelihood!r}; expected Discrete, Tweedie or Continuous."
            )
        model.check_data(x, self.likelihood)
        self.truncation = model.truncation if truncation is None else check_truncation(truncation)
        self.times = natural_times(model, given) if times is None else times
        if not isinstance(self.times, Times):
            raise ValueError(
                f"times={times!r}; expected Uniform(), Importance(), LogSNR(), Information() "
                "or Adaptive()."
            )
        random = _as_draws(random, x)
        if random.size != x.shape[0]:
            raise ValueError(
                f"random is for {random.size} examples and the batch has {x.shape[0]}; expected "
                "equal numbers."
            )
        self.random = random
        self.batch, self.shape = x.shape[0], tuple(x.shape[1:])
        self.dims = math.prod(self.shape)
        self.dtype = model.dtype
        if x.is_floating_point():
            self.dtype = torch.promote_types(self.dtype, x.dtype)
        if x.dtype in (torch.uint16, torch.uint32, torch.uint64):  # few operations know these
            x = x.to(torch.int64)
        self.data = x.repeat_interleave(draws, 0) if draws > 1 else x
        self.u: Tensor | None = None
        if self.likelihood.dequantised:
            self.u = self.random.uniform("dequantise", (draws, *self.shape)).flatten(0, 1)
        self.x = self.likelihood.values(self.data, self.u, self.dtype)  # (B·draws, *shape)
        self._start: Tensor | None = None
        self._last: Transition | None = None
        self.with_control = with_control
        self.control: Tensor | None = None

    # -- ends

    @property
    def data_std(self) -> float:
        """One number for all coordinates."""
        return self.model.data_std

    @property
    def start(self) -> Tensor:
        """ε: () float64."""
        if self._start is None:
            self._start = self.truncation.time(self.process)
        return self._start

    @property
    def last(self) -> Transition:
        """The kernel at the horizon."""
        if self._last is None:
            self._last = self.process.transition(self.process.horizon)
        return self._last

    @property
    def sigma(self) -> Tensor | float:
        """The standard error of x at the truncation."""
        if isinstance(self.truncation, NoiseLevel):
            return self.truncation.standard_error
        sigma = self.process.transition(self.start).snr.rsqrt()
        return sigma if sigma.requires_grad or in_graph() else sigma.item()

    def ends(self) -> tuple[Tensor, Tensor]:
        """log SNR at the horizon and at the truncation: () each."""
        low = self.last.logsnr
        if isinstance(self.truncation, NoiseLevel):
            high = torch.full_like(low, -2 * math.log(self.truncation.standard_error))
            if not in_graph() and (not self.process.learned or not bool(high > low)):
                self.truncation.time(self.process)  # says what is wrong; kept for a fixed process
        else:
            high = self.process.transition(self.start).logsnr
        return low, high

    # -- draws

    def places(self) -> Tensor:
        """(B·draws,) in [0, 1)."""
        return self.random.places(self.draws, self.times.spread).flatten()

    def normal(self, purpose: str, *variables: int) -> Tensor:
        """(B·draws, *variables, *shape)."""
        shape = (self.draws, *variables, *self.shape)
        return self.random.normal(purpose, shape, self.dtype).flatten(0, 1)

    def place(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Times and weights; where ε depends on the process, the gradient moves them with it."""
        start = self.start
        s, weight = self.times.place(u, Span(self.process, start, self.data_std))
        if not start.requires_grad:
            return s, weight
        # s ↦ s·(ε/ε₀)^part keeps T fixed and takes ε₀ to ε; at ε = ε₀ it is the identity
        whole = math.log(self.process.horizon) - start.detach().log()
        part = (math.log(self.process.horizon) - s.log()) / whole
        moved = start.log() - start.detach().log()
        ratio = (part * moved).exp()
        return (s * ratio).clamp(max=self.process.horizon), weight * ratio * (1 - moved / whole)

    def half_noise(self, s: Tensor) -> Tensor:
        """G/√2, so that ½‖·‖²_{GGᵀ} = ‖(G/√2)ᵀ ·‖²."""
        return self.process.noise_factor(s) / math.sqrt(2.0)

    def weight(self, weighting: Weighting | None, s: Tensor) -> Tensor:
        """√λ(s): (B·draws,)."""
        if weighting is None:
            return torch.ones_like(s)
        if not callable(weighting):
            raise ValueError(
                f"weighting={weighting!r}; expected a function of times, (n,) to (n,), or None."
            )
        value = weighting(s)
        try:
            value = torch.as_tensor(value, dtype=torch.float64, device=s.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"weighting returned {type(value).__name__} for times of shape {tuple(s.shape)}; "
                "expected a tensor with one number per time."
            ) from error
        if value.shape not in (torch.Size(), s.shape):
            raise ValueError(
                f"weighting maps times of shape {tuple(s.shape)} to {tuple(value.shape)}; expected "
                "one number per time."
            )
        value = value.expand_as(s)
        if not in_graph() and not bool(((value >= 0) & (value < math.inf)).all()):
            worst = value[~((value >= 0) & (value < math.inf))][0].item()
            kind = "negative" if worst < 0 else "not finite"
            raise ValueError(f"weighting is {kind} ({worst:g}); expected finite numbers ≥ 0.")
        return value.sqrt()

    def each(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """Of every draw, computed once per example where its draws have the same data."""
        if self.draws == 1 or self.u is not None:
            return function(values)
        return function(values[:: self.draws]).repeat_interleave(self.draws, 0)

    def mean(self, values: Tensor) -> Tensor:
        """Over draws: (B,)."""
        return values.reshape(self.batch, self.draws).mean(1)

    def set_control(self, noise: Tensor, sigma: Tensor, weight: Tensor) -> None:
        """weight·(‖ε_∥ − g‖² − its mean), g the Gaussian answer."""
        if not self.with_control:
            return
        with torch.no_grad():
            answer = self.model.answer(sigma, self.x)
            less = answer.error(self.x, noise).square() - answer.square(self.x)
            self.control = weight * total(less)

    # -- terms

    def bound(self, diffusion: Tensor, logsnr: Tensor, errors: Tensor, how: str) -> Bound:
        """All terms together; diffusion is (B·draws,)."""
        prior = torch.linalg.cholesky(self.process.prior_covariance)
        power = self.each(lambda x: total(x.square()) / self.dims, self.x)
        top = -self.dims * prior_gap(self.last, prior, power)
        middle = diffusion + self.state_entropy()
        bottom = self.reconstruction() + self.likelihood.log_jacobian(self.data, self.u)
        samples = top + middle + bottom
        return Bound(
            nats=self.mean(samples),
            prior=self.mean(top),
            diffusion=self.mean(middle),
            reconstruction=self.mean(bottom),
            dims=self.dims,
            name=self.likelihood.name + how + (" given the state" if self.given == "state" else ""),
            samples=samples.detach().reshape(self.batch, self.draws),
            logsnr=logsnr.detach().reshape(self.batch, self.draws),
            errors=errors.detach().reshape(self.batch, self.draws),
            control=None if self.control is None else self.control.reshape(self.batch, self.draws),
        )

    def state_entropy(self) -> Tensor | float:
        """What given the state the entropies change by, from ε to T, against given x."""
        if self.given == "x":
            return 0.0
        ends = [self.start, torch.full_like(self.start, self.process.horizon)]
        s = torch.stack(ends)
        less = self.process.transition(s, given="state").logdet - self.process.transition(s).logdet
        return self.dims / 2 * (less[1] - less[0])

    def reconstruction(self) -> Tensor:
        """(B·draws,) float64."""
        if isinstance(self.likelihood, Discrete):
            likelihood = self.likelihood
            return self.each(lambda k: likelihood.reconstruction(k, self.sigma), self.data)
        if isinstance(self.likelihood, Continuous):
            return self._continuous()
        if isinstance(self.likelihood, Tweedie):
            return self._tweedie()
        raise ValueError(f"no reconstruction is known for {self.likelihood!r}")

    def _continuous(self) -> Tensor:
        """E log N(x; x̂, σ²ς²/(σ²+ς²)). The Gaussian answer's part is a closed form."""
        model, x = self.model, self.x
        sigma = torch.as_tensor(self.sigma, dtype=torch.float64, device=x.device).expand(len(x))
        ratio = (over(sigma, x, torch.float64) / model.moments.std) ** 2
        precise = 1 + ratio  # σ² over the decoder's variance
        base, error, expected = self._end_errors(self.normal("end"), sigma)
        sampled = precise.to(x.dtype) * (expected + (error - base) * (error + base))
        logs = 2 * over(sigma, x, torch.float64).log() - precise.log() + math.log(2 * math.pi)
        return -(total(sampled) + total(logs.expand_as(x))) / 2

    def _end_errors(self, noise: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """At the truncation: ε_∥ minus the Gaussian answer, minus the model's, and the mean square
        of the first."""
        model = self.model
        answer = model.answer(sigma, self.x)
        base, expected = answer.error(self.x, noise), answer.square(self.x)
        if model.parametrisation == "channel":
            x_noisy = self.x + over(sigma, noise) * noise
            return base, base - model.residual(x_noisy, -2 * sigma.log(), answer), expected
        kernel = self.process.transition(self.start.expand(len(noise)))
        view = View.of(kernel)
        # the rest of the noise is independent of ε_∥ = âᵀε
        eps = self.normal("end, across", self.process.n_vars)
        eps = eps + expand(view.direction, noise - contract(view.direction, eps))
        error = joint_error(model, kernel, view, self.x, eps)
        return base, contract(view.direction, error), expected

    def _tweedie(self) -> Tensor:
        """E[log p(y₀|y_ε) − log q(y_ε|y₀)] + H(q(v₀|x)) − H(q(y_ε|x)), the paper's theorem.

        = d[log|Φ| + ½K − ½log|Σ| − ½K log 2πe] + H(v₀|x) − ½E‖ε_s − Mᵀε̂‖², with ε_s the noise given
        the state and M = L⁻¹L_s. The last term for the answer ε̂_∥ = 0 is a closed form, too; only
        the difference is sampled.
        """
        process, K, d = self.process, self.process.n_vars, self.dims
        kernel = process.transition(self.start)
        known = process.transition(self.start, given="state")
        view = View.of(kernel)
        white = whitening(process, kernel, known)
        M = white[:, :K]
        entropy = root_entropy(process.auxiliary.factor())
        along = (view.direction @ M).square().sum()
        closed = (
            process.log_volume(self.start)
            + K / 2
            - kernel.logdet / 2
            - K / 2 * math.log(2 * math.pi * math.e)
            + entropy
            - (K - M.square().sum() + along) / 2
        )
        count = len(self.x)
        inner = self.normal("end", 2 * K - 1)  # (ε_s, ξ)
        eps = mix(white.expand(count, K, -1), inner)
        views = view.expand(count)
        noise = contract(views.direction, eps)
        if self.model.parametrisation == "channel":
            error = channel_error(self.model, self.x, noise, views.logsnr)
            error = expand(views.direction, error)
        else:
            kernels = process.transition(self.start.expand(count))
            error = joint_error(self.model, kernels, views, self.x, eps)
        turned = M.mT.expand(count, K, K)
        rest = inner[:, :K] - mix(turned, eps)
        plain = rest + mix(turned, expand(views.direction, noise))  # ε̂_∥ = 0
        found = rest + mix(turned, error)
        return d * closed + total((plain - found) * (plain + found)) / 2


def joint_error(
    model: ScoreModel, kernel: Transition, view: View, x: Tensor, eps: Tensor
) -> Tensor:
    """ε − ε̂ in all variables at y = r x + L ε, without cancellation: (B, K, *shape)."""
    y, _ = kernel.sample(x, noise=eps)
    guess = model.joint_residual(y, kernel, view)
    if not model.precondition:
        return eps - guess
    along = model.answer(view.sigma, x).error(x, contract(view.direction, eps))
    return expand(view.direction, along) - guess


def channel_error(model: ScoreModel, x: Tensor, noise: Tensor, logsnr: Tensor) -> Tensor:
    """ε_∥ − ε̂_∥ at x̃ = x + σ ε_∥, without cancellation: (B, *shape)."""
    sigma = (-logsnr / 2).exp().clamp(max=LARGEST)
    answer = model.answer(sigma, x)
    x_noisy = x + over(sigma, x) * noise
    return answer.error(x, noise) - model.residual(x_noisy, logsnr, answer)


# ---------------------------------------------------------------- denoising errors


def _channel_errors(job: _Job) -> tuple[Tensor, Tensor]:
    """½∫‖ε_∥ − ε̂_∥‖² dλ, drawn in λ: the process is not even asked."""
    u, x = job.places(), job.x
    logsnr, weight = job.times.place_logsnr(u, *job.ends(), job.data_std)
    noise = job.normal("noise")
    errors = weight * total(channel_error(job.model, x, noise, logsnr).square()) / 2
    job.set_control(noise, (-logsnr / 2).exp(), weight / 2)
    job.times.observe(u, errors.detach() / job.dims)
    return logsnr, errors


def _errors(job: _Job, factor: Callable[[Tensor, Transition], Tensor]) -> tuple[Tensor, Tensor]:
    """∫ ‖Fᵀ(s_θ − s_φ)‖² ds with F = factor(s, kernel given what is given): (B·draws,)."""
    model, process, x = job.model, job.process, job.x
    u = job.places()
    s, weight = job.place(u)
    kernel = process.transition(s)
    view = View.of(kernel)
    if job.given == "x":
        metric = _solved(kernel, factor(s, kernel))  # L⁻¹F: ‖Fᵀ L⁻ᵀ e‖ = ‖metricᵀ e‖
        along = _along(metric, view)
        if model.parametrisation == "channel":
            noise = job.normal("noise")
            errors = along * total(channel_error(model, x, noise, view.logsnr).square())
        else:
            eps = job.normal("noise", process.n_vars)
            noise = contract(view.direction, eps)
            errors = total(mix(metric.mT, joint_error(model, kernel, view, x, eps)).square())
    else:
        known = process.transition(s, given="state")
        F, white = factor(s, known), whitening(process, kernel, known)
        metric = _solved(kernel, F)
        along = _along(metric, view)
        inner = job.normal("noise", 2 * process.n_vars - 1)
        eps = mix(white, inner)
        noise = contract(view.direction, eps)
        if model.parametrisation == "channel":
            error = expand(view.direction, channel_error(model, x, noise, view.logsnr))
        else:
            error = joint_error(model, kernel, view, x, eps)
        known_part = mix(_solved(known, F).mT, inner[:, : process.n_vars])
        errors = total((known_part - mix(metric.mT, eps - error)).square())
    job.set_control(noise, view.sigma, weight * along)
    errors = weight * errors
    job.times.observe(u, errors.detach() / job.dims)
    return view.logsnr, errors


def whitening(process: Process, kernel: Transition, known: Transition) -> Tensor:
    """ε = whitening·(ε_s, ξ): the noise given x from that given the state and that of v₀.

    L⁻¹[L_s, Φ·root], (..., K, 2K − 1), with orthonormal rows.
    """
    moved = kernel.propagator @ process.auxiliary.factor()
    return _solved(kernel, torch.cat([known.cholesky, moved], -1))


def _along(metric: Tensor, view: View) -> Tensor:
    """‖metricᵀ â‖²: (B,)."""
    return (metric.mT @ view.direction.unsqueeze(-1)).square().sum((-2, -1))


def _channel_implicit(job: _Job, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """∫ [½d + ½‖ε̂‖² − σ∇·ε̂] dλ, the Gaussian answer's part in closed form."""
    model, x, u = job.model, job.x, job.places()
    if job.times.in_logsnr:
        logsnr, weight = job.times.place_logsnr(u, *job.ends(), job.data_std)
    else:
        s, weight = job.place(u)
        kernel = job.process.transition(s)
        view = View.of(kernel)
        metric = _solved(kernel, job.process.noise_factor(s))
        logsnr = view.logsnr
        weight = weight * _along(metric, view)
    sigma = (-logsnr / 2).exp().clamp(max=LARGEST)
    x_noisy = x + over(sigma, x) * job.normal("noise")
    known = model.answer(sigma, x)

    def network(at: Tensor) -> Tensor:
        return model.residual(at, logsnr, known)

    guess, slope = _divergence(job, network, x_noisy, None, None, divergence)
    closed = job.dims / 2 + total(known.size(x) / 2 - known.slope(x))
    sampled = total(guess * (known.noise(x_noisy) + guess / 2)) - sigma * slope
    errors = weight * (closed + sampled)
    job.times.observe(u, errors.detach() / job.dims)
    return logsnr, errors


def _joint_implicit(job: _Job, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """∫ [½d tr C + ½‖ε̂‖²_C − tr(C ∂ε̂/∂w)] ds, C = WWᵀ, W = L⁻¹G."""
    model, process, x, u = job.model, job.process, job.x, job.places()
    s, weight = job.place(u)
    kernel = process.transition(s)
    view = View.of(kernel)
    G = process.noise_factor(s)
    W = _solved(kernel, G)
    eps = job.normal("noise", process.n_vars)
    y, _ = kernel.sample(x, noise=eps)

    def network(at: Tensor) -> Tensor:
        return model.joint_residual(at, kernel, view)

    # tr(C ∂n/∂w) = tr(C ∂n/∂y L) = E (Wη)ᵀ ∂n/∂y (Gη)
    guess, slope = _divergence(job, network, y, W, G, divergence)
    all_ = W.square().sum((-2, -1))  # tr C
    along = _along(W, view)  # âᵀCâ
    if model.precondition:
        known = model.answer(view.sigma, x)
        across = job.dims * (all_ - along)  # of w_⊥: ½ in the square, 1 in the divergence
        closed = job.dims * all_ / 2 - across / 2
        closed = closed + along * total(known.size(x) / 2 - known.slope(x))
        error = known.error(x, contract(view.direction, eps))
        linear = eps - expand(view.direction, error)
    else:
        closed, linear = job.dims * all_ / 2, torch.zeros_like(eps)
    white, answer = mix(W.mT, guess), mix(W.mT, linear)
    errors = weight * (closed + total(white * (answer + white / 2)) - slope)
    job.times.observe(u, errors.detach() / job.dims)
    return view.logsnr, errors


def _divergence(
    job: _Job,
    network: Callable[[Tensor], Tensor],
    at: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    how: Divergence,
) -> tuple[Tensor, Tensor]:
    """n(at), and Σ over coordinates of tr(right leftᵀ ∂n/∂at): (B,) float64.

    left and right are (B, K, R), or None for a plain divergence.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "mism was called under torch.inference_mode(), where no derivative can be taken; "
            "expected torch.no_grad(), or gradients enabled."
        )
    if how == "auto":
        how = "exact" if at[0].numel() <= EXACT_UP_TO else "rademacher"
    wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        at = at.detach().requires_grad_() if not at.requires_grad else at
        value = network(at)
        if not value.requires_grad:
            _check_constant(network, at, value)
            return value, torch.zeros(len(at), dtype=torch.float64, device=at.device)

        def pull(probe: Tensor, along: Tensor) -> Tensor:
            """probeᵀ ∂n/∂at along: (B,)."""
            (back,) = torch.autograd.grad(
                value,
                at,
                probe.to(value.dtype),
                create_graph=wanted,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            return total(back * along)

        shape = at.shape[1:] if left is None else (left.shape[-1], *at.shape[2:])
        if how == "exact":
            basis = torch.eye(math.prod(shape), dtype=at.dtype, device=at.device)
            probes = [row.reshape(1, *shape).expand(len(at), *shape) for row in basis]
        else:
            draw = job.random.signs if how == "rademacher" else job.random.normal
            probes = [draw("probe", (job.draws, *shape), at.dtype).flatten(0, 1)]
        slope = torch.zeros(len(at), dtype=torch.float64, device=at.device)
        for probe in probes:
            if left is None or right is None:
                slope = slope + pull(probe, probe)
            else:
                slope = slope + pull(mix(left, probe), mix(right, probe))
    return (value, slope) if wanted else (value.detach(), slope.detach())


def _check_constant(network: Callable[[Tensor], Tensor], at: Tensor, value: Tensor) -> None:
    """A network without a gradient must not depend on its input."""
    with torch.no_grad():
        moved = network(at.detach() * 1.25 + 0.125)
    if not in_graph() and not torch.equal(moved, value):
        raise ValueError(
            "mism needs derivatives of the network, whose output depends on its input but carries "
            "no gradient; expected a network that does not run under no_grad or detach what it "
            "returns. Use elbo, which needs none."
        )


# ---------------------------------------------------------------- small tools


def _as_draws(random: Random, x: Tensor) -> Draws:
    if isinstance(random, Draws):
        return random
    if isinstance(random, int) and not isinstance(random, bool):
        return Counted(random, torch.arange(len(x), device=x.device))
    if random is not None and not isinstance(random, torch.Generator):
        raise ValueError(
            f"random={random!r}; expected a seed, a torch.Generator, ornstein.Counted(seed, index) "
            "or None."
        )
    if random is not None and random.device.type != x.device.type:
        raise ValueError(
            f"the generator is on {random.device} and the data on {x.device}; expected one device. "
            "Make it with torch.Generator(device)."
        )
    return Generated(x.shape[0], x.device, random)


def _solved(kernel: Transition, right: Tensor) -> Tensor:
    """L⁻¹ right: (B, K, ...)."""
    return torch.linalg.solve_triangular(kernel.cholesky, right, upper=False)


def mix(matrix: Tensor, state: Tensor) -> Tensor:
    """Σ_j matrix[:, i, j] state[:, j]: (B, I, *shape), in the state's type."""
    flat = state.flatten(2)
    matrix = matrix.to(flat.dtype)
    parts = [matrix[:, :, j, None] * flat[:, j : j + 1] for j in range(flat.shape[1])]
    return sum(parts[1:], parts[0]).reshape(len(state), matrix.shape[1], *state.shape[2:])


def total(values: Tensor) -> Tensor:
    """Summed over all but the batch, float64: (B,)."""
    return values.flatten(1).sum(1, dtype=torch.float64)


def root_entropy(root: Tensor) -> Tensor:
    """H(q(v₀|x)) per data coordinate; root is (K, K−1) with first row zero."""
    n = root.shape[-1]
    if n == 0:
        return root.new_zeros(())
    logabsdet = torch.linalg.slogdet(root[1:])[1]
    if not in_graph() and not bool(torch.isfinite(logabsdet)):
        raise ValueError(
            "the tweedie bound needs the entropy of v₀, and Var v₀ is singular; expected a "
            "positive v0_variance. Give one, or use the discrete bound, which does not need it."
        )
    return logabsdet + n / 2 * math.log(2 * math.pi * math.e)
