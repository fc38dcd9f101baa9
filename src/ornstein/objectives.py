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
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ornstein.answers import LARGEST, View, contract, expand, over
from ornstein.likelihood import Likelihood
from ornstein.linalg import in_graph
from ornstein.score import ScoreModel
from ornstein.terms import (
    Bound,
    Job,
    Random,
    Weighting,
    channel_error,
    joint_error,
    knows_no_times,
    mix,
    solved,
    total,
    whitening,
)
from ornstein.times import Times
from ornstein.transition import Given, Transition
from ornstein.truncation import Truncation

Divergence = Literal["auto", "exact", "rademacher", "gaussian"]
EXACT_UP_TO = 32  # coordinates of the state for which a divergence is taken one by one


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
    control: whether to return a control variate, too, and how much of a joint model's errors is in
        noise that it was told (both cost a little).
    """
    job = Job(model, x, draws, times, given, likelihood, truncation, random, control)
    direct = job.place_logsnr() if knows_no_times(model, given) else None
    if direct is not None:
        logsnr, errors = _channel_errors(job, *direct)
    else:
        logsnr, errors = _errors(job, lambda s, kernel: job.half_noise(s))
    return job.bound(logsnr, errors, "")


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
    job = Job(model, x, draws, times, "x", likelihood, truncation, random)
    if model.parametrisation == "channel":
        logsnr, errors = _channel_implicit(job, divergence)
    else:
        logsnr, errors = _joint_implicit(job, divergence)
    return job.bound(logsnr, errors, ", implicit")


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
    job = Job(model, x, draws, times, given, None, truncation, random)

    def factor(s: Tensor, kernel: Transition) -> Tensor:
        eye = torch.eye(model.process.n_vars, dtype=torch.float64, device=s.device)
        return job.weight(weighting, s)[:, None, None] * eye

    return job.mean(job.heard(_errors(job, factor)[1]))


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
    job = Job(model, x, draws, times, given, None, truncation, random)

    def factor(s: Tensor, kernel: Transition) -> Tensor:
        return job.weight(weighting, s)[:, None, None] * kernel.cholesky

    return job.mean(job.heard(_errors(job, factor)[1]))


# ---------------------------------------------------------------- denoising errors


def _channel_errors(job: Job, logsnr: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """½∫‖ε_∥ − ε̂_∥‖² dλ, drawn in λ: the process is not even asked."""
    noise = job.normal("noise")
    errors = weight * total(channel_error(job.model, job.x, noise, logsnr).square()) / 2
    job.set_control(noise, (-logsnr / 2).exp(), weight / 2)
    return logsnr, errors


def _errors(job: Job, factor: Callable[[Tensor, Transition], Tensor]) -> tuple[Tensor, Tensor]:
    """∫ ‖Fᵀ(s_θ − s_φ)‖² ds with F = factor(s, kernel given what is given): (B·draws,)."""
    model, process, x = job.model, job.process, job.x
    s, weight = job.place()
    kernel = process.transition(s)
    view = model.view_of_noise(kernel, s)
    if job.given == "x":
        metric = solved(kernel, factor(s, kernel))  # L⁻¹F: ‖Fᵀ L⁻ᵀ e‖ = ‖metricᵀ e‖
        along = _along(metric, view)
        if model.parametrisation == "channel":
            noise = job.normal("noise")
            errors = along * total(channel_error(model, x, noise, view.logsnr).square())
        else:
            eps = job.normal("noise", process.n_vars)
            noise = contract(view.direction, eps)
            error = joint_error(model, kernel, view, x, eps)
            errors = total(mix(metric.mT, error).square())
            job.set_known(view, metric, error, weight)
    else:
        known = process.transition(s, given="state")
        F, white = factor(s, known), whitening(process, kernel, known)
        metric = solved(kernel, F)
        along = _along(metric, view)
        inner = job.normal("noise", 2 * process.n_vars - 1)
        eps = mix(white, inner)
        noise = contract(view.direction, eps)
        if model.parametrisation == "channel":
            error = expand(view.direction, channel_error(model, x, noise, view.logsnr))
        else:
            error = joint_error(model, kernel, view, x, eps)
        known_part = mix(solved(known, F).mT, inner[:, : process.n_vars])
        errors = total((known_part - mix(metric.mT, eps - error)).square())
    job.set_control(noise, view.sigma, weight * along)
    return view.logsnr, weight * errors


def _along(metric: Tensor, view: View) -> Tensor:
    """‖metricᵀ â‖²: (B,)."""
    return (metric.mT @ view.direction.unsqueeze(-1)).square().sum((-2, -1))


def _channel_implicit(job: Job, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """∫ [½d + ½‖ε̂‖² − σ∇·ε̂] dλ, the Gaussian answer's part in closed form."""
    model, x = job.model, job.x
    direct = job.place_logsnr()
    if direct is not None:
        logsnr, weight = direct
    else:
        s, weight = job.place()
        kernel = job.process.transition(s)
        view = View.of(kernel)
        metric = solved(kernel, job.process.noise_factor(s))
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
    return logsnr, weight * (closed + sampled)


def _joint_implicit(job: Job, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """∫ [½d tr C + ½‖ε̂‖²_C − tr(C ∂ε̂/∂w)] ds, C = WWᵀ, W = L⁻¹G."""
    model, process, x = job.model, job.process, job.x
    s, weight = job.place()
    kernel = process.transition(s)
    view = model.view_of_noise(kernel, s)
    G = process.noise_factor(s)
    W = solved(kernel, G)
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
    return view.logsnr, weight * (closed + total(white * (answer + white / 2)) - slope)


def _divergence(
    job: Job,
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
    # fused attention has no second derivative
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
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
