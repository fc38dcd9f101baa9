"""The terms of one bound: what a call shares, the exact parts, and errors without cancellation.

A `Job` is one call of an objective: its data as numbers, its draws, both ends of its times. It adds
the prior and the reconstruction, which `objectives` explains, to a diffusion part found elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ornstein import transition
from ornstein.answers import LARGEST, View, contract, expand, over
from ornstein.diagnostics import prior_gap
from ornstein.draws import Counted, Draws, Generated
from ornstein.likelihood import Continuous, Discrete, Likelihood, Tweedie, bits_per_dim
from ornstein.linalg import in_graph, lower_solve
from ornstein.process import Process
from ornstein.score import ScoreModel
from ornstein.times import Importance, Information, Span, Times
from ornstein.transition import Given, Transition
from ornstein.truncation import NoiseLevel, Truncation, check_truncation, ends

Weighting = Callable[[Tensor], Tensor]
Random = Draws | torch.Generator | int | None  # draws, a generator, a seed, or the global generator


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
    known: Tensor | None = None  # (B, draws) of a joint model's errors, those in noise it was told

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
        return self.less(part * self.control)

    def less(self, amount: Tensor) -> Bound:
        """The same bound with amounts (B, draws), of mean zero, taken from its errors."""
        moved = amount.mean(1)
        return replace(
            self,
            nats=self.nats + moved,
            diffusion=self.diffusion + moved,
            samples=self.samples + amount,
            errors=self.errors - amount,
        )


def natural_times(model: ScoreModel, given: Given = "x") -> Times:
    """The proposal that is taken where none is given."""
    return Information() if model.precondition and given == "x" else Importance()


def knows_no_times(model: ScoreModel, given: Given) -> bool:
    """Whether log SNR is all that the error depends on, so that it can be drawn by itself."""
    return model.parametrisation == "channel" and given == "x"


class Job:
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
        self.model = model.seeing(self.likelihood)
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
        self._places: Tensor | None = None
        self.with_control = with_control
        self.control: Tensor | None = None
        self.known: Tensor | None = None

    # -- ends

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
        low, high = ends(self.truncation, self.process, self.last)
        if not in_graph() and (not self.process.learned or not bool(high > low)):
            _ = self.start  # says what is wrong; it is kept for a fixed process
        return low, high

    # -- draws

    @property
    def places(self) -> Tensor:
        """Where the draws are, (B·draws,) in [0, 1)."""
        if self._places is None:
            self._places = self.random.places(self.draws, self.times.spread).flatten()
        return self._places

    def heard(self, errors: Tensor) -> Tensor:
        """The errors, of which the proposal may learn."""
        self.times.observe(self.places, errors.detach() / self.dims)
        return errors

    def place_logsnr(self) -> tuple[Tensor, Tensor] | None:
        """log SNR and weights, or None where the proposal has to go through times."""
        return self.times.place_logsnr(self.places, *self.ends(), self.model.data_std)

    def normal(self, purpose: str, *variables: int) -> Tensor:
        """(B·draws, *variables, *shape)."""
        shape = (self.draws, *variables, *self.shape)
        return self.random.normal(purpose, shape, self.dtype).flatten(0, 1)

    def place(self) -> tuple[Tensor, Tensor]:
        """Times and weights; where ε depends on the process, the gradient moves them with it."""
        start = self.start
        s, weight = self.times.place(self.places, Span(self.process, start, self.model.data_std))
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

    def set_known(self, view: View, metric: Tensor, error: Tensor, weight: Tensor) -> None:
        """weight·‖e − âρ‖²_C of a joint model's error (see `answers`), C = metric·metricᵀ."""
        if not self.with_control:
            return
        with torch.no_grad():
            rest = error - expand(view.direction, view.with_reading(metric).read(error))
            self.known = weight * total(mix(metric.mT, rest).square())

    # -- terms

    def bound(self, logsnr: Tensor, errors: Tensor, how: str) -> Bound:
        """All terms together; the denoising errors are (B·draws,)."""
        self.heard(errors)
        prior = self.process.prior_factor
        power = self.each(lambda x: total(x.square()) / self.dims, self.x)
        top = -self.dims * prior_gap(self.last, prior, power)
        middle = self.state_entropy() - errors
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
            known=None if self.known is None else self.known.reshape(self.batch, self.draws),
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
        start = self.start.expand(len(noise))
        kernel = self.process.transition(start)
        view = model.view(kernel, start)
        # the rest of the noise is independent of ε_∥ = âᵀε
        eps = self.normal("end, across", self.process.n_vars)
        eps = eps + expand(view.direction, noise - contract(view.direction, eps))
        error = joint_error(model, kernel, view, self.x, eps)
        return base, view.read(error), expected

    def _tweedie(self) -> Tensor:
        """E[log p(y₀|y_ε) − log q(y_ε|y₀)] + H(q(v₀|x)) − H(q(y_ε|x)), the paper's theorem.

        = d[log|Φ| + ½K − ½log|Σ| − ½K log 2πe] + H(v₀|x) − ½E‖ε_s − Mᵀε̂‖², with ε_s the noise given
        the state and M = L⁻¹L_s. The last term for the answer ε̂_∥ = 0 is a closed form, too; only
        the difference is sampled.
        """
        process, K, d = self.process, self.process.n_vars, self.dims
        kernel = process.transition(self.start)
        known = process.transition(self.start, given="state")
        view = self.model.view_of_noise(kernel, self.start)
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


# ---------------------------------------------------------------- errors


def joint_error(
    model: ScoreModel, kernel: Transition, view: View, x: Tensor, eps: Tensor
) -> Tensor:
    """ε − ε̂ in all variables at y = r x + L ε, without cancellation: (B, K, *shape)."""
    y, _ = kernel.sample(x, noise=eps)
    noise = contract(view.direction, eps)
    x_noisy = x + over(view.sigma.clamp(max=LARGEST), x) * noise
    guess = model.joint_residual(y, kernel, view, x_noisy)
    if not model.precondition:
        return eps - guess
    along = model.answer(view.sigma, x).error(x, noise)
    return expand(view.direction, along) - guess


def channel_error(model: ScoreModel, x: Tensor, noise: Tensor, logsnr: Tensor) -> Tensor:
    """ε_∥ − ε̂_∥ at x̃ = x + σ ε_∥, without cancellation: (B, *shape)."""
    sigma = (-logsnr / 2).exp().clamp(max=LARGEST)
    answer = model.answer(sigma, x)
    x_noisy = x + over(sigma, x) * noise
    return answer.error(x, noise) - model.residual(x_noisy, logsnr, answer)


def whitening(process: Process, kernel: Transition, known: Transition) -> Tensor:
    """ε = whitening·(ε_s, ξ): the noise given x from that given the state and that of v₀.

    L⁻¹[L_s, Φ·root], (..., K, 2K − 1), with orthonormal rows.
    """
    moved = kernel.propagator @ process.auxiliary.factor()
    return solved(kernel, torch.cat([known.cholesky, moved], -1))


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


def solved(kernel: Transition, right: Tensor) -> Tensor:
    """L⁻¹ right: (B, K, ...)."""
    return lower_solve(kernel.cholesky, right)


def mix(matrix: Tensor, state: Tensor) -> Tensor:
    """Σ_j matrix[:, i, j] state[:, j]: (B, I, *shape), in the state's type."""
    mixed = transition.mix(matrix.to(state.dtype), state.flatten(2))
    return mixed.reshape(len(state), matrix.shape[1], *state.shape[2:])


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
