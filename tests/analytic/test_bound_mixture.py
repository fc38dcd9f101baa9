"""The bound and the score on mixtures of Gaussians, where the best network is known.

Data Σ_k p_k N(μ_k, τ_k²I) in d dimensions. With j over coordinates, y_s has the density
Σ_k p_k Π_j N(r μ_kj, Σ + r rᵀτ_k²), its score is a matter of differentiation, and

    E[ε_∥ | x̃] = σ Σ_k P(k|x̃) (x̃ − μ_k)/(τ_k² + σ²),     E[ε | y] = −Lᵀ ∇ log q_s(y).

With these as networks bound(x) = log p(x) + E_{q(y_T|x)}[log π − log q_T], up to the decoder's
Gaussian at the truncation. A network that is off by δ loses ½∫ E‖δ‖² dλ of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ornstein import (
    Continuous,
    Discrete,
    Importance,
    Information,
    LogSNR,
    NoiseLevel,
    Process,
    ScoreModel,
    elbo,
    mism,
)
from ornstein.transition import Transition
from tests.analytic.test_bound_gaussian import (
    MEAN,
    STD,
    deviation,
    gaussian_model,
    made,
    rows,
)
from tests.analytic.test_bound_gaussian import seed as seed  # a fixture
from tests.conformance.zoo import ZOO

F64 = torch.float64
LEVEL = 0.02  # where the bound is truncated: the decoder's gap is about (σ/τ)⁴/4 = 1e-5
PRESETS = ["vpsde", "cld", "psld", "alda", "malda", "vesde", "subvpsde"]
LEARNED = [name for name in ZOO if "learned" in name]
RANDOM = [f"random-{i}" for i in range(24)]
SOME = ["vpsde", "vesde", "cld", "alda", "malda", "learned-v0", "random-3", "random-6", "random-13"]


@dataclass(frozen=True)
class Mixture:
    """Of Gaussians that are equally wide in all directions."""

    weights: Tensor  # (k,)
    means: Tensor  # (k, d)
    stds: Tensor  # (k,)

    @property
    def dims(self) -> int:
        return self.means.shape[1]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each coordinate: (d,)."""
        mean = self.weights @ self.means
        second = self.weights @ (self.means**2 + self.stds[:, None] ** 2)
        return mean, (second - mean**2).sqrt()

    def sample(self, count: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        which = torch.multinomial(self.weights, count, True, generator=generator)
        noise = torch.randn(count, self.dims, dtype=F64, generator=generator)
        return self.means[which] + self.stds[which, None] * noise

    def log_prob(self, x: Tensor, sigma: Tensor | float = 0.0) -> Tensor:
        """Of x + σ·noise: (B,); sigma a number or (B,)."""
        return torch.logsumexp(self._logs(x, torch.as_tensor(sigma, dtype=F64)), 1)

    def noise(self, x_noisy: Tensor, sigma: Tensor) -> Tensor:
        """E[ε_∥ | x̃]: (B, d); sigma (B,)."""
        part = torch.softmax(self._logs(x_noisy, sigma), 1)
        pull = part / (self.stds**2 + sigma[:, None] ** 2)
        away = x_noisy.unsqueeze(1) - self.means
        return sigma[:, None] * (pull.unsqueeze(-1) * away).sum(1)

    def state_log_prob(self, y: Tensor, kernel: Transition) -> Tensor:
        """log q_s(y): (B,) from (B, K, d) and a kernel for (B,) times, or one."""
        return torch.logsumexp(self._state_logs(y, kernel)[0], 1)

    def state_noise(self, y: Tensor, kernel: Transition) -> Tensor:
        """E[ε | y] = −Lᵀ ∇ log q_s(y): (B, K, d)."""
        logs, white, factor = self._state_logs(y, kernel)
        score = -torch.linalg.solve_triangular(factor.mT, white, upper=True)
        score = (torch.softmax(logs, 1)[..., None, None] * score).sum(1)
        return -kernel.cholesky.mT @ score

    def _logs(self, x: Tensor, sigma: Tensor) -> Tensor:
        """log of each component's part: (B, k)."""
        variance = self.stds**2 + sigma.expand(len(x))[:, None] ** 2
        square = (x.unsqueeze(1) - self.means).square().sum(-1)
        logs = -square / variance / 2 - self.dims / 2 * (2 * math.pi * variance).log()
        return self.weights.log() + logs

    def _state_logs(self, y: Tensor, kernel: Transition) -> tuple[Tensor, Tensor, Tensor]:
        """(B, k) logs, whitened states (B, k, K, d), and factors of Σ + r rᵀτ² (B, k, K, K)."""
        K = y.shape[1]
        L, r = kernel.cholesky.expand(len(y), K, K), kernel.response.expand(len(y), K)
        columns = r[:, None, :, None] * self.stds[:, None, None]
        both = torch.cat([L.unsqueeze(1).expand(-1, len(self.stds), -1, -1), columns], -1)
        factor = torch.linalg.qr(both.mT)[1].mT  # by QR: the square would lose half of the digits
        away = y.unsqueeze(1) - r[:, None, :, None] * self.means[:, None, :]
        white = torch.linalg.solve_triangular(factor, away, upper=False)
        volume = torch.diagonal(factor, dim1=-2, dim2=-1).abs().log().sum(-1)
        constant = self.dims * (volume + K / 2 * math.log(2 * math.pi))
        return self.weights.log() - white.square().sum((-2, -1)) / 2 - constant, white, factor


def mixture(dims: int) -> Mixture:
    """Three components of different widths."""
    generator = torch.Generator().manual_seed(dims)
    means = 1.5 * torch.randn(3, dims, dtype=F64, generator=generator)
    weights, stds = torch.tensor([0.5, 0.2, 0.3], dtype=F64), torch.tensor([0.3, 0.8, 0.4])
    return Mixture(weights, means, stds.to(F64))


# ---------------------------------------------------------------- networks that know


class Exact(nn.Module):
    """The noise itself: for a channel model without preconditioning."""

    def __init__(self, data: Mixture, off: float = 0.0) -> None:
        super().__init__()
        self.data, self.off = data, off

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return self.data.noise(x, (-logsnr / 2).exp()) + self.off * bump(logsnr)[:, None]


class Residual(nn.Module):
    """What a channel model adds to the Gaussian answer, from its normalised input."""

    def __init__(self, data: Mixture) -> None:
        super().__init__()
        self.data = data

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        sigma = (-logsnr / 2).exp()
        mean, std = self.data.moments()
        wide = (std**2 + sigma[:, None] ** 2).sqrt()
        x_noisy = mean + wide * x
        gaussian = sigma[:, None] * x / wide
        return (self.data.noise(x_noisy, sigma) - gaussian) * wide / std


class ExactJoint(nn.Module):
    """The noise of all variables: for a joint model without preconditioning."""

    def __init__(self, data: Mixture, process: Process, off: float = 0.0) -> None:
        super().__init__()
        self.data, self.off = data, off
        self.process = [process]  # not as a submodule: the model has it already

    def kernel(self, logsnr: Tensor) -> Transition:
        with torch.no_grad():
            process = self.process[0]
            return process.transition(process.time_of_noise((-logsnr / 2).exp()))

    def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
        off = self.off * bump(logsnr)[:, None, None] * pattern(self.process[0]).unsqueeze(-1)
        return self.data.state_noise(y, self.kernel(logsnr)) + off


class ResidualJoint(ExactJoint):
    """What a joint model adds to the Gaussian answer, from its normalised input."""

    def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
        kernel = self.kernel(logsnr)
        mean, std = self.data.moments()
        sigma, r = (-logsnr / 2).exp()[:, None], kernel.response.unsqueeze(-1)
        spread = torch.diagonal(kernel.covariance, dim1=-2, dim2=-1).unsqueeze(-1)
        y = r * mean + (r**2 * std**2 + spread).sqrt() * y
        white = torch.linalg.solve_triangular(kernel.cholesky, y, upper=False)
        direction = kernel.signal.unsqueeze(-1) * sigma[..., None]
        along = (direction * white).sum(1)  # x̃/σ
        gaussian = sigma * (sigma * along - mean) / (std**2 + sigma**2)
        answer = white + direction * (gaussian - along).unsqueeze(1)
        scale = (std / (std**2 + sigma**2).sqrt()).unsqueeze(1)
        return (self.data.state_noise(y, kernel) - answer) / scale


def bump(logsnr: Tensor) -> Tensor:
    """What the wrong networks are wrong by, over log SNR."""
    return torch.exp(-((logsnr + 1) ** 2) / 8)


def bump_integral(process: Process) -> float:
    """∫ bump² dλ from the horizon to the truncation."""
    low = float(process.transition(process.horizon).snr.log())
    high = -2 * math.log(LEVEL)
    return math.sqrt(math.pi) * (math.erf((high + 1) / 2) - math.erf((low + 1) / 2))


def pattern(process: Process) -> Tensor:
    """… and over variables: (K,)."""
    return torch.linspace(1.0, -0.5, process.n_vars, dtype=F64)


def model_of(
    data: Mixture, process: Process, network: nn.Module, parametrisation: str = "channel"
) -> ScoreModel:
    """With preconditioning for the networks that expect it."""
    mean, std = data.moments()
    return ScoreModel(
        network,
        process,
        Continuous(),
        parametrisation,  # type: ignore[arg-type]
        data_mean=mean,
        data_std=std,
        truncation=NoiseLevel(LEVEL),
        precondition=isinstance(network, (Residual, ResidualJoint)),
    )


def prior_difference(data: Mixture, process: Process, x: Tensor, count: int = 64) -> Tensor:
    """log π(y_T) − log q_T(y_T), averaged over draws of y_T given x: (B,).

    In expectation what the bound loses; of so little variance that a few draws are enough.
    """
    kernel = process.transition(process.horizon)
    generator = torch.Generator().manual_seed(99)
    y, _ = kernel.sample(x.repeat_interleave(count, 0), generator=generator)
    prior = Transition(
        propagator=torch.zeros_like(kernel.propagator),
        cholesky=torch.linalg.cholesky(process.prior_covariance),
        direction=kernel.direction,
        given="x",
        error=kernel.error,
    )
    difference = prior.log_prob(y, torch.zeros_like(y[:, 0])) - data.state_log_prob(y, kernel)
    return difference.reshape(len(x), count).mean(1)


# ---------------------------------------------------------------- the bound


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", SOME)
def test_channel_bound(name: str, dims: int, seed: int) -> None:
    """One standard error is about 0.05 nats per dimension, and 0.01 with ε integrated out."""
    data, process = mixture(dims), made(name)
    x = data.sample(128)
    with torch.no_grad():
        expected = data.log_prob(x) + prior_difference(data, process, x)
        plain, known = (model_of(data, process, n(data)) for n in (Exact, Residual))
        bound = elbo(plain, x, draws=64, times=Information(), random=rows(x, seed))
        implicit = mism(known, x, draws=32, times=Information(), random=rows(x, seed))
    for found, most in ((bound.nats, 0.1), (implicit.nats, 0.05)):
        number, error = deviation(found, expected)
        assert error <= most * dims
        assert abs(number) <= 3


@pytest.mark.parametrize("name", SOME)
def test_joint_bound(name: str, seed: int) -> None:
    """The paper's parametrisation, likewise; its usual proposal is a worse one."""
    data, process = mixture(2), made(name)
    x = data.sample(96)
    with torch.no_grad():
        expected = data.log_prob(x) + prior_difference(data, process, x)
        plain, known = (
            model_of(data, process, n(data, process), "joint") for n in (ExactJoint, ResidualJoint)
        )
        bound = elbo(plain, x, draws=16, times=Importance(), random=rows(x, seed))
        implicit = mism(known, x, draws=16, times=Importance(), random=rows(x, seed))
    for found, most in ((bound.nats, 0.5), (implicit.nats, 0.25)):
        number, error = deviation(found, expected)
        assert error <= most * 2
        assert abs(number) <= 3


@pytest.mark.parametrize("name", ["vpsde", "alda", "random-6"])
def test_given_the_state(name: str, seed: int) -> None:
    data, process = mixture(2), made(name)
    x = data.sample(128)
    models = [
        model_of(data, process, Exact(data)),
        model_of(data, process, ExactJoint(data, process), "joint"),
    ]
    with torch.no_grad():
        expected = data.log_prob(x) + prior_difference(data, process, x)
        for model in models:
            bound = elbo(model, x, draws=32, given="state", random=rows(x, seed))
            number, error = deviation(bound.nats, expected)
            assert error <= 1
            assert abs(number) <= 3


def test_points(seed: int) -> None:
    """Pixels: a table of probabilities over 8×8 pairs, and the decoder's gap by its definition."""
    levels, process = 8, made("malda")
    generator = torch.Generator().manual_seed(5)
    table = torch.rand(levels, levels, dtype=F64, generator=generator) ** 3
    table = table / table.sum()
    centres = (2 * torch.arange(levels, dtype=F64) + 1) / levels - 1
    pairs = torch.cartesian_prod(torch.arange(levels), torch.arange(levels))
    data = Mixture(table.flatten(), centres[pairs], torch.zeros(levels**2, dtype=F64))
    even = Mixture(torch.full((levels**2,), 1 / levels**2, dtype=F64), data.means, data.stds)
    sigma = 2 / levels / 4  # a fourth of a bin, so that the gap is there to be seen
    model = ScoreModel(
        Exact(data), process, Discrete(levels), truncation=NoiseLevel(sigma), precondition=False
    )
    which = torch.multinomial(table.flatten(), 256, True, generator=generator)
    pixels, x = pairs[which], data.means[which]
    with torch.no_grad():
        near = x.repeat_interleave(100, 0)
        noise = torch.randn(near.shape, dtype=F64, generator=generator)
        near = near + sigma * noise
        # log P(k|x̃) − log P̂(k|x̃): the two posteriors differ by p_k and their normalisers
        flat = even.log_prob(near, sigma) - data.log_prob(near, sigma) + math.log(levels**2)
        gap = flat.reshape(-1, 100).mean(1) + table.flatten()[which].log()
        expected = table.flatten()[which].log() + prior_difference(data, process, x, 16) - gap
        bound = elbo(model, pixels, draws=32, times=Information(), random=rows(pixels, seed))
    assert float(gap.mean()) > 0.01
    number, error = deviation(bound.nats, expected)
    assert error <= 0.1
    assert abs(number) <= 3


# ---------------------------------------------------------------- preconditioning


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda", "random-6"])
def test_preconditioning_is_only_a_change_of_variables(name: str, seed: int) -> None:
    """The same noise, score and errors, to rounding.

    (Not the same reconstruction draw by draw: its control variate is another one.)
    """
    data, process = mixture(2), made(name)
    x = data.sample(64)
    pairs = [
        [model_of(data, process, n(data)) for n in (Exact, Residual)],
        [model_of(data, process, n(data, process), "joint") for n in (ExactJoint, ResidualJoint)],
    ]
    with torch.no_grad():
        for pair in pairs:
            first, second = (
                elbo(m, x, draws=4, times=LogSNR(), random=rows(x, seed)) for m in pair
            )
            assert torch.equal(first.logsnr, second.logsnr)
            assert torch.allclose(first.errors, second.errors, rtol=1e-10, atol=1e-10)
            assert torch.equal(first.prior, second.prior)
            number, error = deviation(first.reconstruction, second.reconstruction)
            assert abs(number) <= 3 and error <= 0.2
            for level in (LEVEL, 0.3, 1.0):
                s = process.time_of_noise(level)
                y, _ = process.transition(s).sample(x)
                assert relative(*(m.score(y, s) for m in pair)) <= 1e-10
        sigma = torch.rand(64, dtype=F64)
        first, second = (m.predict(x, -2 * sigma.log()) for m in pairs[0])
        assert relative(first, second) <= 1e-10


# ---------------------------------------------------------------- wrong networks


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda", "random-13"])
def test_an_error_costs_its_square(name: str, seed: int) -> None:
    """δ(λ) for all coordinates loses ½d∫δ² dλ: over data, and with ±δ in every single draw."""
    data, process = mixture(2), made(name)
    x, size = data.sample(512), 0.7
    with torch.no_grad():
        right, more, less = (
            elbo(
                model_of(data, process, Exact(data, off)),
                x,
                draws=8,
                times=LogSNR(),
                random=rows(x, seed),
            )
            for off in (0.0, size, -size)
        )
        expected = torch.full((len(x),), size**2 * bump_integral(process), dtype=F64)  # ½d = 1
        number, error = deviation(right.nats - more.nats, expected)
        assert error <= 0.1 * float(expected[0]) and abs(number) <= 3
        # the linear term cancels: nothing is left but the times
        range_ = float(-2 * math.log(LEVEL) - process.transition(process.horizon).snr.log())
        each = range_ * (size * bump(right.logsnr)) ** 2
        found = (more.errors + less.errors) / 2 - right.errors
        assert torch.allclose(found, each, rtol=1e-9, atol=1e-9)
        number, error = deviation(right.nats - (more.nats + less.nats) / 2, expected)
        assert error <= 0.03 * float(expected[0]) and abs(number) <= 3


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda", "random-13"])
def test_an_error_of_all_variables_costs_its_square(name: str, seed: int) -> None:
    """For a joint model ½d∫δᵀCδ ds with C = L⁻¹GGᵀL⁻ᵀ, here by quadrature in log s."""
    data, process = mixture(2), made(name)
    x, size = data.sample(128), 0.7
    with torch.no_grad():
        right, more, less = (
            elbo(
                model_of(data, process, ExactJoint(data, process, off), "joint"),
                x,
                draws=16,
                random=rows(x, seed),
            )
            for off in (0.0, size, -size)
        )
        start = process.time_of_noise(LEVEL)
        step = torch.linspace(0, 1, 4001, dtype=F64)
        s = (start.log() + step * (math.log(process.horizon) - start.log())).exp()
        s = s.clamp(max=process.horizon)
        kernel = process.transition(s)
        W = torch.linalg.solve_triangular(kernel.cholesky, process.noise_factor(s), upper=False)
        delta = size * bump(kernel.snr.log())[:, None] * pattern(process)
        square = (W.mT @ delta.unsqueeze(-1)).square().sum((-2, -1))
        expected = torch.trapezoid(square, s).expand(len(x))  # ½d = 1
        number, error = deviation(right.nats - (more.nats + less.nats) / 2, expected)
        assert error <= 0.05 * float(expected[0]) and abs(number) <= 3
        number, error = deviation(right.nats - more.nats, expected)
        assert error <= 0.2 * float(expected[0]) and abs(number) <= 3


# ---------------------------------------------------------------- the score


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest error of an example, against the size of what is expected there."""
    rest = (found - expected).flatten(1).norm(dim=1)
    return float((rest / expected.flatten(1).norm(dim=1)).max())


def looked_at(process: Process) -> Tensor:
    """Times from a standard error of 1e-3 to the horizon."""
    levels = torch.tensor([1e-3, 1e-2, 0.1, 0.5, 1.0], dtype=F64)
    early = process.time_of_noise(levels).detach()
    late = process.horizon * torch.tensor([0.7, 1.0], dtype=F64)
    return torch.cat([early, late])


@pytest.mark.parametrize("name", [*PRESETS, *LEARNED, *RANDOM])
def test_score(name: str) -> None:
    """∇ log of the mixture by autograd; 1e-6, since whitening loses digits where noise is small.

    In units of y, and in units of the noise, where no variable drowns another.
    """
    data, process = mixture(2), made(name)
    times = looked_at(process)
    kernel = process.transition(times.repeat_interleave(3))
    kernel = Transition(
        kernel.propagator.detach(),
        kernel.cholesky.detach(),
        kernel.direction.detach(),
        kernel.given,
        kernel.error,
    )
    y, _ = kernel.sample(data.sample(len(times) * 3))
    y.requires_grad_()
    (expected,) = torch.autograd.grad(data.state_log_prob(y, kernel).sum(), y)
    y = y.detach()
    s = times.repeat_interleave(3)
    with torch.no_grad():
        for network in (Exact(data), Residual(data)):
            model = model_of(data, process, network)
            found = model.score(y, s)
            assert relative(found, expected) <= 1e-6
            white = kernel.cholesky.mT @ expected
            assert relative(kernel.cholesky.mT @ found, white) <= 1e-6
            assert relative(model.noise(y, s), -white) <= 1e-6
            # x̃ by least squares; Tweedie: E[r x | y] = y + Σ·score, up to rounding of y
            signal = kernel.signal.unsqueeze(-1)
            white_y = torch.linalg.solve_triangular(kernel.cholesky, y, upper=False)
            x_noisy = (signal * white_y).sum(1) / kernel.snr[:, None]
            clean = model.denoise(x_noisy, kernel.snr.log())
            told = y + kernel.cholesky @ (kernel.cholesky.mT @ expected)
            rest = kernel.response.unsqueeze(-1) * clean.unsqueeze(1) - told
            assert relative(y + rest, y) <= 1e-10
        early = s < process.horizon  # where a network can look the time up
        for network in (ExactJoint(data, process), ResidualJoint(data, process)):
            model = model_of(data, process, network, "joint")
            assert relative(model.score(y[early], s[early]), expected[early]) <= 1e-6


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
@pytest.mark.parametrize("name", [*PRESETS, *LEARNED, *RANDOM])
def test_score_of_gaussian_data(name: str, parametrisation: str) -> None:
    """−(Σ + r rᵀς²)⁻¹(y − r m) of a network that returns zero."""
    process = made(name)
    model = gaussian_model(process, parametrisation)
    with torch.no_grad():
        s = looked_at(process).repeat_interleave(3)
        kernel = process.transition(s)
        y, _ = kernel.sample(MEAN + STD * torch.randn(len(s), 4, dtype=F64))
        expected = torch.empty_like(y)
        for j, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
            one = Mixture(torch.ones(1, dtype=F64), mean.reshape(1, 1), std.reshape(1))
            expected[:, :, j : j + 1] = one.state_noise(y[:, :, j : j + 1], kernel)
        assert relative(model.noise(y, s), expected) <= 1e-6
        score = -torch.linalg.solve_triangular(kernel.cholesky.mT, expected, upper=True)
        assert relative(model.score(y, s), score) <= 1e-6
