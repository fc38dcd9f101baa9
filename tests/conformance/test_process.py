"""What every process must satisfy, whatever its matrices: parametrised over the zoo.

Each tolerance is the error of the check itself (of a difference quotient, of a sum of n random
terms, of a type's rounding), since the kernel is exact to about 1e-13 on these processes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ornstein import Diffusion, Process, Transition
from tests.conformance.zoo import ZOO

F64 = torch.float64
GIVENS = ("x", "state")


@pytest.fixture(params=list(ZOO), scope="module")
def process(request: pytest.FixtureRequest) -> Process:
    """Each process of the zoo in turn."""
    return ZOO[request.param]()


def close(found: Tensor, expected: Tensor, relative: float, absolute: float = 0.0) -> bool:
    """Whether each entry agrees, relative to the largest entry of its matrix."""
    found, expected = found.detach(), expected.detach()
    scale = expected.abs().flatten(-2).amax(-1)[..., None, None]
    return bool(((found - expected).abs() <= relative * scale + absolute).all())


def times_of(process: Process, *fractions: float) -> Tensor:
    """Times as fractions of the horizon."""
    return process.horizon * torch.tensor(fractions, dtype=F64)


def central(function: Callable[[Tensor], Tensor], s: Tensor, h: Tensor) -> Tensor:
    """Derivative by two central differences and a Richardson step: error O(h⁴) and ε/h."""

    def quotient(step: Tensor) -> Tensor:
        high, low = s + step, s - step
        width = (high - low).reshape(*s.shape, *(1,) * (function(s).dim() - s.dim()))
        return (function(high) - function(low)) / width

    with torch.no_grad():
        return (4 * quotient(h / 2) - quotient(h)) / 3


def inverse(matrix: Tensor) -> Tensor:
    """The inverse of a matrix that is well-conditioned where it is used here."""
    return torch.linalg.inv(matrix)


# ------------------------------------------------------------------ the flow


def test_drift_and_diffusion_have_the_shape_of_the_times(process: Process) -> None:
    """And their values at one time are those at that time in a batch."""
    K = process.n_vars
    grid = process.horizon * torch.rand(2, 3, dtype=F64)
    for function in (process.drift, process.diffusion):
        batch = function(grid)
        assert batch.shape == (2, 3, K, K) and batch.dtype == F64
        # the type's rounding, in functions of the user's own
        assert close(function(float(grid[1, 2])), batch[1, 2], 1e-15)
    noise = process.diffusion(grid)
    assert torch.equal(noise, noise.mT)


def test_diffusion_of_a_stationary_process(process: Process) -> None:
    """GGᵀ = 2 b_d D, A = −(b_q Q + b_d D)S, from the rates and matrices by themselves."""
    if not isinstance(process, Diffusion):
        pytest.skip("no stationary law")
    s = times_of(process, 0.1, 0.7)
    b_q, b_d = process.rate_q.rate(s), process.rate_d.rate(s)
    for i in range(2):
        drift = -(b_q[i] * process.Q + b_d[i] * process.D) @ process.S
        assert close(process.drift(s)[i], drift, 1e-15)
        assert close(process.diffusion(s)[i], 2 * b_d[i] * process.D, 1e-15)
    assert torch.equal(process.Q, -process.Q.mT)
    assert float(torch.linalg.eigvalsh(process.D)[0]) >= -1e-15
    assert close(process.S @ process.prior_covariance, torch.eye(process.n_vars, dtype=F64), 1e-14)


def test_semigroup(process: Process) -> None:
    """Φ(t,r) = Φ(t,s)Φ(s,r), Σ(t,r) = Φ(t,s)Σ(s,r)Φ(t,s)ᵀ + Σ(t,s) for all pairs of a batch."""
    r, s, t = times_of(process, 0.0, 0.1, 0.33), times_of(process, 0.02, 0.4, 0.5), process.horizon
    for end in (t, 0.7 * t):
        last = torch.full((3,), end, dtype=F64)
        whole = process.transition(last, "state", start=r)
        early, late = process.transition(s, "state", start=r), process.transition(last, "state", s)
        # products of two factors rounded each: a few ε times the stiffness
        assert close(late.propagator @ early.propagator, whole.propagator, 3e-11)
        sum_ = late.propagator @ early.covariance @ late.propagator.mT + late.covariance
        assert close(sum_, whole.covariance, 3e-11)


def test_chapman_kolmogorov_given_x(process: Process) -> None:
    """q(y_t|x) = ∫ q(y_t|y_s) q(y_s|x) dy_s, also for one start and many ends."""
    s, t = 0.2 * process.horizon, times_of(process, 0.3, 0.6, 1.0)
    first = process.transition(s, "x")
    second = process.transition(t, "state", start=s)
    direct = process.transition(t, "x")
    assert close(second.propagator @ first.propagator, direct.propagator, 3e-11)
    covariance = second.propagator @ first.covariance @ second.propagator.mT + second.covariance
    assert close(covariance, direct.covariance, 3e-11)
    mean = (second.propagator @ first.response.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(mean, direct.response, rtol=1e-9, atol=1e-13)


def test_a_start_at_zero_is_no_start(process: Process) -> None:
    """start = 0 as a number and as a tensor, and start = s, the empty interval."""
    s = times_of(process, 1e-3, 0.5, 1.0)
    plain, given = process.transition(s, "state"), process.transition(s, "state", torch.zeros(3))
    assert close(given.propagator, plain.propagator, 3e-11)
    assert close(given.cholesky, plain.cholesky, 3e-11)


def test_propagator_solves_its_equation(process: Process) -> None:
    """dΦ/ds = AΦ, by autograd through s and by differences."""
    s = times_of(process, 1e-3, 0.2, 0.6, 0.99)
    expected = process.drift(s) @ process.transition(s).propagator
    h = 2e-4 * torch.minimum(s, process.horizon - s)
    slope = central(lambda at: process.transition(at).propagator, s, h)
    size = 1 / h[:, None, None]  # of the difference's rounding, ε/h
    assert bool(((slope - expected).abs() <= 1e-8 * expected.abs().max() + 2e-15 * size).all())
    assert close(time_derivative(process, s, lambda k: k.propagator), expected, 1e-10, 1e-10)


def test_covariance_solves_the_lyapunov_equation(process: Process) -> None:
    """dΣ/ds = AΣ + ΣAᵀ + GGᵀ, by autograd through s and by differences."""
    s = times_of(process, 1e-3, 0.2, 0.5, 0.6, 0.99)
    for given in GIVENS:
        covariance = process.transition(s, given).covariance
        drift = process.drift(s)
        expected = drift @ covariance + covariance @ drift.mT + process.diffusion(s)
        found = time_derivative(process, s, lambda k: k.covariance, given)
        # AΣ cancels against GGᵀ near the prior: compare with the size of the terms
        size = float(process.diffusion(s).abs().max())
        assert close(found, expected, 1e-10, 1e-10 * size)
        h = 2e-4 * torch.minimum(s, process.horizon - s)
        slope = central(lambda at, g=given: process.transition(at, g).covariance, s, h)
        rounding = 2e-15 * covariance.abs().flatten(1).amax(1) / h
        limit = 1e-7 * size + rounding[:, None, None]
        assert bool(((slope - expected).abs() <= limit).all())


def time_derivative(
    process: Process, s: Tensor, read: Callable[[Transition], Tensor], given: str = "x"
) -> Tensor:
    """d/ds of a K×K matrix of the kernel at each time, by autograd."""
    at = s.clone().requires_grad_()
    value = read(process.transition(at, given))
    K = value.shape[-1]
    slope = torch.zeros_like(value)
    for i in range(K):
        for j in range(K):
            (grad,) = torch.autograd.grad(value[:, i, j].sum(), at, retain_graph=True)
            slope[:, i, j] = grad
    return slope


def test_log_determinant_of_the_propagator(process: Process) -> None:
    """log|Φ| = ∫ tr A, the integral by 200 Gauss–Legendre nodes on four intervals, A known."""
    x, w = np.polynomial.legendre.leggauss(200)
    nodes, weights = torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2)
    for fraction in (1e-3, 0.1, 0.5):
        s = fraction * process.horizon
        total = torch.zeros((), dtype=F64)
        for i in range(4):
            at = s / 4 * (i + nodes)
            trace = process.drift(at).diagonal(dim1=-2, dim2=-1).sum(-1)
            total = total + s / 4 * (weights * trace).sum()
        propagator = process.transition(s).propagator
        condition = float(torch.linalg.cond(propagator))
        if condition > 1e8:
            break  # a determinant loses the condition number, which only grows from here
        found = float(torch.linalg.slogdet(propagator).logabsdet)
        # 1e-10 of the integral is what numerical rates promise
        assert math.isclose(found, float(total), rel_tol=1e-10, abs_tol=1e-14 * condition)


def test_log_determinant_of_the_covariance(process: Process) -> None:
    """d/ds log|Σ| = 2 tr A + tr(Σ⁻¹GGᵀ), the slope by autograd.

    Round fractions of the horizon lie on the seams of what the library tabulates.
    """
    s = times_of(process, 0.01, 0.2, 0.25, 0.5, 0.7, 0.75, 1.0).requires_grad_()
    for given in GIVENS:
        kernel = process.transition(s, given)
        (found,) = torch.autograd.grad(kernel.logdet.sum(), s)
        with torch.no_grad():
            noise = noise_factor(process, s)
            white = torch.linalg.solve_triangular(kernel.cholesky, noise, upper=False)
            trace = process.drift(s).diagonal(dim1=-2, dim2=-1).sum(-1)
            first, second = 2 * trace, white.square().sum((-2, -1))
        # the two parts cancel near the prior: compare with their size
        assert bool(((found - first - second).abs() <= 1e-8 * (first.abs() + second)).all())


def noise_factor(process: Process, s: Tensor) -> Tensor:
    """C with CCᵀ = GGᵀ(s), from its eigenvectors."""
    values, vectors = torch.linalg.eigh(process.diffusion(s))
    return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def test_stationary_law(process: Process) -> None:
    """Started in the prior, the process stays there: ΦΣ_πΦᵀ + Σ = Σ_π."""
    if not isinstance(process, Diffusion):
        pytest.skip("no stationary law")
    prior = process.prior_covariance
    kernel = process.transition(times_of(process, 1e-3, 0.1, 0.5, 1.0), "state")
    after = kernel.propagator @ prior @ kernel.propagator.mT + kernel.covariance
    # products rounded, and the twelve columns that stand for the noise of a panel: 4e-12
    assert close(after, prior, 1e-11)
    drift, noise = process.drift(0.3), process.diffusion(0.3)
    lyapunov = drift @ prior + prior @ drift.mT + noise
    assert close(lyapunov, torch.zeros_like(prior), 0.0, 1e-13 * float(drift.abs().max()))


@pytest.mark.parametrize("given", GIVENS)
def test_long_time_formula(process: Process, given: str) -> None:
    """Σ = S⁻¹ + Φ(Σ₀ − S⁻¹)Φᵀ, exact for every Diffusion, to rounding where Σ is not small."""
    if not isinstance(process, Diffusion):
        pytest.skip("no stationary law")
    kernel = process.transition(times_of(process, 0.2, 0.6, 1.0), given)
    start = torch.zeros_like(process.prior_covariance)
    if given == "x":
        start = process.auxiliary.factor() @ process.auxiliary.factor().mT
    prior, Phi = process.prior_covariance, kernel.propagator
    assert close(kernel.covariance, prior + Phi @ (start - prior) @ Phi.mT, 1e-11)


def test_prior_at_a_long_time(process: Process) -> None:
    """Run until its slowest mode has decayed by e⁻⁴⁰, the process has forgotten its start."""
    if not isinstance(process, Diffusion):
        pytest.skip("no stationary law")
    Q, D = process.Q.detach(), process.D.detach()
    slowest = float(torch.linalg.eigvals((Q + D) @ process.S).real.min())
    kernel = Diffusion(Q, D, process.S, rate=40.0 / slowest).transition(1.0)
    # e⁻⁴⁰ = 4e-18 times at most a quadratic in 40 (a triple eigenvalue) and a condition number
    assert float(kernel.propagator.abs().max()) <= 1e-13
    assert close(kernel.covariance, process.prior_covariance, 1e-11)


# ------------------------------------------------------------------ the factor


@pytest.mark.parametrize("given", GIVENS)
def test_cholesky_is_one(process: Process, given: str) -> None:
    """Lower triangular, positive on the diagonal, and its square is the covariance."""
    kernel = process.transition(times_of(process, 1e-3, 0.05, 0.4, 1.0), given)
    L = kernel.cholesky
    assert torch.equal(L, torch.tril(L))
    assert bool((L.diagonal(dim1=-2, dim2=-1) > 0).all())
    assert torch.equal(L @ L.mT, kernel.covariance)
    assert torch.equal(kernel.logdet, 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1))
    assert L.dtype == kernel.propagator.dtype == F64


def test_at_time_zero(process: Process) -> None:
    """Φ = 1 and, given x, Σ = Cov(y₀|x): the factor of a matrix with a zero row."""
    kernel = process.transition(0.0)
    assert torch.equal(kernel.propagator, torch.eye(process.n_vars, dtype=F64))
    start = process.auxiliary.factor() @ process.auxiliary.factor().mT
    assert torch.allclose(kernel.covariance, start, rtol=1e-15, atol=1e-17)


def test_signal_to_noise(process: Process) -> None:
    """SNR = rᵀΣ⁻¹r, which falls with time."""
    kernel = process.transition(times_of(process, 0.05, 0.2, 0.5, 1.0))
    response = kernel.response.unsqueeze(-1)
    direct = (response.mT @ torch.linalg.solve(kernel.covariance, response))[:, 0, 0]
    assert torch.allclose(kernel.snr, direct, rtol=1e-8, atol=0.0)  # cond Σ ≤ 1e7 here
    assert bool((kernel.snr.diff() < 0).all())


# ------------------------------------------------------------------ densities


def state_for(process: Process, given: str, B: int, d: int) -> tuple[Tensor, Tensor]:
    """An origin and noise, (B, d) or (B, K, d), and (B, K, d)."""
    K = process.n_vars
    origin = torch.randn((B, d) if given == "x" else (B, K, d), dtype=F64)
    return origin, torch.randn(B, K, d, dtype=F64)


@pytest.mark.parametrize("given", GIVENS)
def test_log_prob_and_score(process: Process, given: str) -> None:
    """log_prob is torch's Gaussian; score is its gradient, and −L⁻ᵀε of the noise of `sample`."""
    s = times_of(process, 0.1, 0.5, 1.0)
    kernel = process.transition(s, given)
    origin, noise = state_for(process, given, 3, 4)
    y, back = kernel.sample(origin, noise=noise)
    assert torch.equal(back, noise)
    y = y.detach().requires_grad_()
    log_prob = kernel.log_prob(y, origin)
    mean = kernel.mean(origin)
    assert mean.shape == y.shape
    gaussian = torch.distributions.MultivariateNormal(
        mean.transpose(1, 2), scale_tril=kernel.cholesky.unsqueeze(1)
    )
    expected = gaussian.log_prob(y.transpose(1, 2)).sum(-1)
    # y − mean cancels to ε·|y|/L_ii before it is whitened
    lost = 1e-15 * float(1 / kernel.cholesky.diagonal(dim1=-2, dim2=-1).min())
    assert torch.allclose(log_prob, expected, rtol=1e-12, atol=1e3 * lost)
    (gradient,) = torch.autograd.grad(log_prob.sum(), y)
    score = kernel.score(y, origin)
    assert torch.allclose(score, gradient, rtol=1e-10, atol=1e-10 * float(gradient.abs().max()))
    direct = -(inverse(kernel.cholesky).mT @ noise)
    limit = (1e-10 + 1e2 * lost) * float(direct.abs().max())
    assert float((score - direct).abs().max()) <= limit
    plain = kernel.noise_to_score(noise)
    assert float((plain - direct).abs().max()) <= 1e-12 * float(direct.abs().max())
    assert torch.allclose(kernel.noise(y, origin), noise, rtol=0.0, atol=1e-10 + 1e2 * lost)


@pytest.mark.parametrize("given", GIVENS)
def test_sample_has_the_moments_of_the_kernel(process: Process, given: str) -> None:
    """Mean and covariance of 40,000 draws within five standard errors."""
    n, K = 40_000, process.n_vars
    kernel = process.transition(0.3 * process.horizon, given)
    known = torch.linspace(-1, 1, K, dtype=F64)[None, :, None]
    origin = torch.tensor([[1.5]], dtype=F64) if given == "x" else known
    y, noise = kernel.sample(origin.expand(*origin.shape[:-1], n))
    draws, standard = y[0].detach(), noise[0].detach()  # (K, n)
    Sigma, L = kernel.covariance.detach(), kernel.cholesky.detach()
    mean = kernel.mean(origin).detach()[0, :, 0]
    if given == "x":
        start = torch.cat([origin[0], origin[0] * process.auxiliary.coupling.detach()])
    else:
        start = origin[0, :, 0]
    expected = kernel.propagator.detach() @ start
    assert torch.allclose(mean, expected, rtol=1e-12, atol=1e-14)
    variance = Sigma.diagonal()
    off = (draws.mean(1) - mean).abs() / (variance / n).sqrt()
    assert float(off.max()) <= 5
    found = torch.cov(draws)
    spread = ((variance[:, None] * variance + Sigma**2) / n).sqrt()
    assert float(((found - Sigma).abs() / spread).max()) <= 5
    # and the noise that comes with a draw is the one that made it
    assert torch.allclose(mean[:, None] + L @ standard, draws, rtol=1e-12, atol=1e-12)


def test_samples_have_a_seed(process: Process) -> None:
    """A generator gives the same draw twice, and shapes of data are kept."""
    kernel = process.transition(times_of(process, 0.2, 0.9))
    x = torch.randn(2, 3, 5, 4)
    first, noise = kernel.sample(x, generator=torch.Generator().manual_seed(3))
    second, _ = kernel.sample(x, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, second)
    assert first.shape == noise.shape == (2, process.n_vars, 3, 5, 4)
    flat, _ = kernel.sample(x.flatten(1), noise=noise.flatten(2))
    assert torch.equal(flat, first.flatten(2))


# ------------------------------------------------------------------ gradients


def scalar_of(process: Process, s: Tensor, given: str) -> Tensor:
    """A fixed smooth function of Φ and L that sees every entry, scaled to order one."""
    kernel = process.transition(s, given)
    K = process.n_vars
    weights = torch.linspace(0.3, 1.7, K * K, dtype=F64).reshape(K, K)
    logs = kernel.cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    lower = (weights * torch.tril(kernel.cholesky, -1)).sum((-2, -1))
    value = (weights * kernel.propagator).sum((-2, -1)) + 0.1 * logs + lower
    return (value + (kernel.direction * weights[0]).sum()).sum()


def entries(process: Process) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Each number among the parameters."""
    for name, parameter in process.named_parameters():
        for index in range(parameter.numel()):
            yield name, parameter, index


@pytest.mark.parametrize("given", GIVENS)
@pytest.mark.parametrize("fraction", [0.01, 0.4, 1.0])
def test_gradients(process: Process, given: str, fraction: float) -> None:
    """Every parameter, and s, against central differences with a Richardson step in float64.

    Error O(h⁴) + ε/h, h = 1e-3: a few 1e-12 each times derivatives of order one to ten.
    """
    s = torch.tensor(fraction * process.horizon, dtype=F64, requires_grad=True)
    parameters = [p for p in process.parameters() if p.requires_grad]
    value = scalar_of(process, s, given)
    grads = torch.autograd.grad(value, [s, *parameters], allow_unused=True)
    scale = max([1.0, *(float(g.abs().max()) for g in grads if g is not None)])

    h = 1e-3 * float(s)

    def at(time: float) -> float:
        moved = torch.tensor(time, dtype=F64)
        return float(scalar_of(process, moved, given))

    now = float(s)
    with torch.no_grad():
        if fraction < 1:
            rough = (at(now + h) - at(now - h)) / (2 * h)
            fine = (at(now + h / 2) - at(now - h / 2)) / h
            slope = (4 * fine - rough) / 3
            assert math.isclose(float(grads[0]), slope, rel_tol=1e-6, abs_tol=1e-11 / h)
        else:  # one-sided, O(h⁴), and short: a cosine rate has its pole 4e-3 past the horizon
            h = 2e-5 * float(s)
            coefficients = (25 / 12, -4.0, 3.0, -4 / 3, 1 / 4)
            values = (c * at(now - k * h) for k, c in enumerate(coefficients))
            slope = sum(values) / h
            assert math.isclose(float(grads[0]), slope, rel_tol=1e-6, abs_tol=1e-13 / h)

        found = dict(zip((id(p) for p in parameters), grads[1:], strict=True))
        for name, parameter, index in entries(process):
            flat, step = parameter.view(-1), 1e-3
            keep = float(flat[index])
            samples = {}
            for k in (-1.0, -0.5, 0.5, 1.0):
                flat[index] = keep + k * step
                samples[k] = float(scalar_of(process, s.detach(), given))
            flat[index] = keep
            rough = (samples[1.0] - samples[-1.0]) / (2 * step)
            fine = (samples[0.5] - samples[-0.5]) / step
            slope = (4 * fine - rough) / 3
            grad = found[id(parameter)]
            value_here = 0.0 if grad is None else float(grad.reshape(-1)[index])
            assert abs(value_here - slope) <= 1e-8 * scale, (name, index, value_here, slope)


@pytest.mark.parametrize("name", ["cld", "learned-2", "cosine-against-linear", "linear-sde"])
def test_gradcheck_of_a_batch(name: str) -> None:
    """torch's own check, for a batch of times given x and for pairs (start, s)."""
    process = ZOO[name]()
    weights = torch.linspace(0.5, 1.5, process.n_vars**2, dtype=F64).reshape(process.n_vars, -1)

    def kernel(s: Tensor) -> Tensor:
        k = process.transition(s)
        return ((k.propagator + k.cholesky) * weights).sum((-2, -1))

    def pair(start: Tensor, s: Tensor) -> Tensor:
        k = process.transition(s, "state", start)
        return ((k.propagator + k.cholesky) * weights).sum((-2, -1))

    s = times_of(process, 0.1, 0.5, 0.9).requires_grad_()
    start = times_of(process, 0.03, 0.2, 0.5).requires_grad_()
    # differences with h = 1e-6: rounding ε/h = 2e-10 times derivatives up to about 100
    assert torch.autograd.gradcheck(kernel, (s,), eps=1e-6, atol=1e-6, rtol=1e-6)
    assert torch.autograd.gradcheck(pair, (start, s), eps=1e-6, atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------ batches, shapes, types


def same(first: Transition, second: Transition, tolerance: float = 0.0) -> bool:
    """Whether two kernels are equal, bit by bit or to a tolerance."""
    pairs = ((first.propagator, second.propagator), (first.cholesky, second.cholesky))
    if tolerance == 0.0:
        return all(torch.equal(a, b) for a, b in pairs)
    return all(close(a, b, tolerance) for a, b in pairs)


@pytest.mark.parametrize("given", GIVENS)
def test_a_batch_is_a_loop(process: Process, given: str) -> None:
    """Each element by itself, as a tensor and as a number."""
    s = times_of(process, 1e-3, 0.1, 0.34, 0.71, 1.0)
    batch = process.transition(s, given)
    for i, at in enumerate(s):
        for one in (at, float(at)):
            single = process.transition(one, given)
            assert single.propagator.shape == (process.n_vars,) * 2
            # matrix products of other sizes add in another order: a few ε
            assert close(single.propagator, batch.propagator[i], 1e-14)
            assert close(single.cholesky, batch.cholesky[i], 1e-14)
            ratio = single.cholesky.diagonal() / batch.cholesky[i].diagonal()
            assert float((ratio - 1).abs().max()) <= 1e-9  # the tiny entries too
    pairs = process.transition(s, "state", start=0.5 * s)
    for i, at in enumerate(s):
        single = process.transition(float(at), "state", start=float(0.5 * at))
        assert close(single.propagator, pairs.propagator[i], 1e-13)
        assert close(single.cholesky, pairs.cholesky[i], 1e-13)


def test_times_of_any_shape(process: Process) -> None:
    """(2, 1, 3) times give (2, 1, 3) kernels, those of the flat times; float32 and lists too."""
    s = process.horizon * torch.rand(2, 1, 3, dtype=F64)
    shaped, flat = process.transition(s), process.transition(s.flatten())
    assert shaped.error.shape == shaped.snr.shape == shaped.logdet.shape == s.shape
    assert torch.equal(shaped.propagator.flatten(0, 2), flat.propagator)
    assert torch.equal(shaped.cholesky.flatten(0, 2), flat.cholesky)
    half = torch.tensor([0.5, 0.25])  # exact in float32
    assert same(process.transition(half), process.transition(half.double()))
    assert same(process.transition([0.5, 0.25]), process.transition(half.double()))
    none = process.transition(torch.zeros(0))
    assert none.propagator.shape == none.cholesky.shape == (0, process.n_vars, process.n_vars)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_data_of_other_types(process: Process, dtype: torch.dtype) -> None:
    """Values agree with float64 to the type's own rounding; the K×K part stays float64."""
    K = process.n_vars
    s = times_of(process, 0.1, 0.5, 1.0)
    for given in GIVENS:
        kernel = process.transition(s, given)
        origin, noise = state_for(process, given, 3, 6)
        origin, noise = origin.to(dtype), noise.to(dtype)
        exact, _ = kernel.sample(origin.double(), noise=noise.double())
        found, _ = kernel.sample(origin, noise=noise)
        assert found.dtype == dtype and kernel.cholesky.dtype == F64
        # 2K rounded products in the working type, and one rounding to the type of the data
        working = torch.finfo(torch.float32).eps * (2 * K + 2)
        terms = (
            kernel.cholesky.abs() @ noise.double().abs()
            + (
                kernel.response.abs().unsqueeze(-1) * origin.double().abs().unsqueeze(1)
                if given == "x"
                else kernel.propagator.abs() @ origin.double().abs()
            )
        ).detach()
        limit = torch.finfo(dtype).eps * exact.abs() + working * terms + torch.finfo(dtype).tiny
        assert bool(((found.double() - exact).abs() <= limit).all())
        score, direct = kernel.score(found, origin), kernel.score(found.double(), origin.double())
        assert score.dtype == dtype
        biggest = torch.finfo(dtype).max
        inside = direct.abs() < biggest
        limit = torch.finfo(dtype).eps * direct.abs() + torch.finfo(dtype).tiny
        assert bool((((score.double() - direct).abs() <= limit) | ~inside).all())
        log_prob = kernel.log_prob(found, origin)
        assert log_prob.dtype == F64
        assert torch.equal(log_prob, kernel.log_prob(found.double(), origin.double()))


def test_casts_of_the_model_leave_the_process_alone(process: Process) -> None:
    """half, bfloat16, float and double of a module around it: the same kernel, bit by bit."""
    own = copy.deepcopy(process)
    own.replan()  # a cast plans anew: bits can be compared where the plan is the current one
    s = times_of(process, 1e-3, 0.3, 1.0)
    before = process.transition(s)
    model = nn.ModuleDict({"network": nn.Linear(2, 2), "process": own})
    for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.float, nn.Module.double):
        cast(model)
        assert all(t.dtype == F64 for t in [*own.parameters(), *own.buffers()])
        assert same(own.transition(s), before)
    model.to(torch.bfloat16)
    assert model["network"].weight.dtype == torch.bfloat16
    assert same(own.transition(s), before)


def test_state_dict_and_copies(process: Process) -> None:
    """A fresh process loads the numbers of another; a copy is equal and its own."""
    s = times_of(process, 1e-2, 0.3, 1.0)
    before = process.transition(s)
    copied = copy.deepcopy(process)
    assert same(copied.transition(s), before)
    state = {name: value.clone() for name, value in process.state_dict().items()}
    assert all(value.dtype == F64 for value in state.values())
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.9).add_(0.01)
    if list(process.parameters()):
        assert not same(copied.transition(s), before)
    assert same(process.transition(s), before)  # the copy is not tied to it
    copied.load_state_dict(state)
    assert same(copied.transition(s), before)


def test_nothing_is_learned_where_there_is_nothing_to_learn(process: Process) -> None:
    """`learned` says whether a kernel carries a gradient."""
    kernel = process.transition(0.5 * process.horizon)
    assert process.learned == bool(list(process.parameters()))
    assert kernel.cholesky.requires_grad == process.learned
