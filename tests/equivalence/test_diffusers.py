"""Models of `diffusers` under any process, against what `diffusers` itself says of them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Continuous, Discrete, NoiseLevel, Process, ScoreModel
from ornstein.adapters import Diffusers, from_diffusers
from ornstein.adapters.frames import Table, amplitudes, frame_of
from ornstein.parts import described, rebuilt
from tests.families import draw
from tests.test_errors import message, says

diffusers = pytest.importorskip("diffusers")

PREDICTIONS = ["epsilon", "sample", "v_prediction"]
BYTES = 256 / 255
SHAPE = (3, 8, 8)


def unet(**options: Any) -> nn.Module:
    """A small U-Net with random weights."""
    settings: dict[str, Any] = {
        "sample_size": 8,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
        "attention_head_dim": 4,
    }
    return diffusers.UNet2DModel(**{**settings, **options}).eval()


def transformer(**options: Any) -> nn.Module:
    """A small transformer with random weights, conditioned on one of 10 classes."""
    settings: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": 2,
        "norm_num_groups": 1,
        "sample_size": 8,
        "num_embeds_ada_norm": 10,
    }
    return diffusers.DiTTransformer2DModel(**{**settings, **options}).eval()


def conditional(**options: Any) -> nn.Module:
    """A small U-Net that looks at a sequence of features."""
    settings: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
        "attention_head_dim": 4,
        "cross_attention_dim": 6,
    }
    return diffusers.UNet2DConditionModel(**{**settings, **options}).eval()


# name: a model, and what it is given besides
MODELS: dict[str, Any] = {
    "unet": lambda: (unet(), {}),
    "transformer": lambda: (transformer(), {"class_labels": torch.tensor([3])}),
    "variances": lambda: (unet(out_channels=6), {}),
    "conditional": lambda: (conditional(), {"encoder_hidden_states": torch.randn(1, 5, 6)}),
}


def ddpm(prediction: str = "epsilon", exact: bool = False, **options: Any) -> Any:
    """A scheduler that changes nothing of what its model says; its arithmetic float64 if exact."""
    found = diffusers.DDPMScheduler(prediction_type=prediction, clip_sample=False, **options)
    if exact:
        found.alphas_cumprod = found.alphas_cumprod.double()
        found.one = found.one.double()
    return found


def logsnr_of(scheduler: Any) -> Tensor:
    """log SNR of the steps, in the numbers of the model."""
    return torch.logit(scheduler.alphas_cumprod.to(torch.float64))


def pixels(count: int = 2) -> tuple[Tensor, Tensor]:
    """Pixels as numbers: ours, and those that models of diffusers are trained on."""
    k = torch.randint(256, (count, *SHAPE), generator=torch.Generator().manual_seed(1))
    return Discrete().values(k, None, torch.float64), k.to(torch.float64) / 127.5 - 1


def repeated(conditioning: dict[str, Tensor], count: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """For a batch, real numbers in this type."""
    typed = {k: v.to(dtype) if v.is_floating_point() else v for k, v in conditioning.items()}
    return {k: v.expand(count, *v.shape[1:]) for k, v in typed.items()}


def relative(found: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(found).all() and found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return error.item()


def both(model: nn.Module, scheduler: Any, process: Process, **options: Any) -> list[ScoreModel]:
    """The two ways to ask: by the velocity, and by the noise without preconditioning."""
    likelihood = options.pop("likelihood", Discrete())
    first = from_diffusers(model, scheduler, process, likelihood=likelihood, **options)
    options.setdefault("scale", first.network.scale)
    second = Diffusers(model, scheduler, **options)
    return [first, ScoreModel(second, process, likelihood, precondition=False)]


# ---------------------------------------------------------------- one step, as the peer has it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_steps_are_those_of_the_scheduler(name: str, prediction: str, dtype: torch.dtype) -> None:
    """x̂ and ε̂ of noisy pixels, at log SNRs of the table, to rounding."""
    model, conditioning = MODELS[name]()
    model.to(dtype)
    variance = "learned_range" if name == "variances" else "fixed_small"
    exact = dtype == torch.float64
    scheduler = ddpm(prediction, exact, variance_type=variance)
    ours, theirs = pixels()
    noise = torch.randn(ours.shape, dtype=torch.float64)
    tolerance = 1e-11 if exact else 1e-5
    for t in (0, 1, 437, 998, 999):
        z = scheduler.add_noise(theirs, noise, torch.tensor([t, t])).to(dtype)
        output = model(z, torch.tensor([t, t]), **repeated(conditioning, 2, dtype)).sample
        expected = scheduler.step(output, t, z).pred_original_sample  # in their numbers
        a, s = amplitudes(logsnr_of(scheduler)[t])
        logsnr = logsnr_of(scheduler)[t] + 2 * math.log(BYTES)
        x_noisy = (ours + (-logsnr / 2).exp() * noise).to(dtype)
        for found in both(model, scheduler, ornstein.cld(), conditioning=conditioning):
            estimate = found.predict(x_noisy, logsnr)
            by_hand = (z.double() - a * expected.double()) / s
            # what x̂ says of ε is only known to the digits of x̂ times its slope
            lost = 2 * torch.finfo(dtype).eps * float(a / s)
            assert relative(estimate, by_hand) <= tolerance + lost
            denoised = found.denoise(x_noisy, logsnr) * BYTES
            # and the noise form takes x̂ as a small difference of large numbers
            lost = 0 if found.precondition else 4 * torch.finfo(dtype).eps * float(s / a)
            assert relative(denoised, expected) <= tolerance + lost


@torch.no_grad()
def test_pixels_are_moved_to_their_numbers() -> None:
    ours, theirs = pixels()
    assert torch.allclose(ours * BYTES, theirs, rtol=0, atol=1e-15)
    model = from_diffusers(unet(), ddpm(), likelihood=Discrete(32))
    assert model.network.scale == 32 / 31 and model.data_std == pytest.approx(31 / 32, abs=1e-15)
    assert from_diffusers(unet(), ddpm(), likelihood=Continuous()).network.scale == 1.0


@torch.no_grad()
def test_truncated_where_levels_can_not_be_seen() -> None:
    """A denoiser of real numbers, below its first step: ½ nat for each unit of log SNR, against
    the decoder's table. Wide Gaussian pixels; the part above is shared, noise and all."""
    scheduler, likelihood = ddpm(), Discrete(256)
    assert from_diffusers(unet(), scheduler).truncation == NoiseLevel(0.4 * 2 / 256)
    options = {"likelihood": likelihood, "truncation": None}
    model = from_diffusers(Perfect(scheduler, 0.0, 0.3), scheduler, **options)
    sixth = model.with_truncation(NoiseLevel(2 / 256 / 6))
    k = (127.5 + 0.3 * 127.5 * torch.randn(500, 8)).round().clamp(0, 255).long()
    bits = [ornstein.elbo(each, k, draws=64, random=0).bits_per_dim for each in (model, sixth)]
    sigma = [each.truncation.standard_error for each in (model, sixth)]
    table = [likelihood.reconstruction(k, each) / 8 for each in sigma]
    expected = (math.log(sigma[0] / sigma[1]) + table[0] - table[1]) / math.log(2)
    found = bits[1] - bits[0]
    error = (found - expected).std() / math.sqrt(len(found))
    # the score that is kept below the first step is worth (σ₀/ς)², a thousandth
    assert float((found - expected).mean().abs()) <= 4 * float(error) + 2e-3
    assert 0.5 < float(expected.mean()) < 0.6


@torch.no_grad()
@pytest.mark.parametrize("name", ["DDIM", "EulerDiscrete", "DPMSolverMultistep", "PNDM"])
def test_any_scheduler_of_the_same_training(name: str) -> None:
    """How one wants to sample does not matter: the table is that of the training."""
    options = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    scheduler = getattr(diffusers, f"{name}Scheduler")(prediction_type="v_prediction", **options)
    scheduler.set_timesteps(20)
    model, x, logsnr = unet(), torch.randn(3, *SHAPE), torch.tensor([-4.0, 0.3, 5.0])
    expected = Diffusers(model, ddpm("v_prediction", **options))(x, logsnr)
    assert torch.equal(Diffusers(model, scheduler)(x, logsnr), expected)


@torch.no_grad()
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_preconditioned_as_edm(prediction: str) -> None:
    scheduler = diffusers.EDMEulerScheduler(prediction_type=prediction)
    model = unet().double()
    found = both(model, scheduler, ornstein.alda(), likelihood=Continuous())
    x = torch.randn(2, *SHAPE, dtype=torch.float64)
    for sigma in (0.002, 0.3, 5.0, 80.0):
        x_noisy = x + sigma * torch.randn_like(x)
        time = scheduler.precondition_noise(torch.tensor([sigma, sigma], dtype=torch.float64))
        output = model(scheduler.precondition_inputs(x_noisy, sigma), time).sample
        expected = scheduler.precondition_outputs(x_noisy, output, sigma)
        for each in found:
            assert relative(each.denoise(x_noisy, -2 * math.log(sigma)), expected) <= 1e-6


@torch.no_grad()
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flows(shift: float) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    model = unet().double()
    found = both(model, scheduler, ornstein.alda(), likelihood=Continuous())
    x = torch.randn(1, *SHAPE, dtype=torch.float64)
    noise = torch.randn_like(x)
    for i in (1, 400, 990):
        time, u = scheduler.timesteps[i : i + 1], scheduler.sigmas[i].double()
        z = scheduler.scale_noise(x, time, noise)
        velocity = model(z, time).sample
        logsnr = 2 * torch.log((1 - u) / u)
        x_noisy = x + (-logsnr / 2).exp() * noise
        for each in found:
            assert relative(each.denoise(x_noisy, logsnr), z - u * velocity) <= 1e-5
            assert relative(each.predict(x_noisy, logsnr), z + (1 - u) * velocity) <= 1e-5


# ---------------------------------------------------------------- under a process


def time_at(process: Process, logsnr: float) -> float:
    """When a process has this log SNR."""
    low, high = 1e-6 * process.horizon, process.horizon
    for _ in range(80):
        middle = (low + high) / 2
        below = float(process.transition(middle).logsnr) < logsnr
        low, high = (low, middle) if below else (middle, high)
    assert abs(float(process.transition(low).logsnr) - logsnr) <= 1e-9, "it never gets there"
    return low


def as_trained() -> tuple[Process, Any]:
    """VPSDE, and the DDPM whose steps are that process at s = 1/1000, 2/1000, …"""
    process = ornstein.vpsde()
    clock = process.rate_d.integral(torch.arange(1001, dtype=torch.float64) / 1000)
    return process, -torch.expm1(-clock.diff())


PROCESSES: dict[str, Any] = {
    "vpsde": ornstein.vpsde,
    "cld": ornstein.cld,
    "alda": ornstein.alda,
    "random-2": lambda: draw(np.random.default_rng(3), 2, full_S=True).process(),
    "random-3": lambda: draw(np.random.default_rng(4), 3, "last", stiffness=90.0).process(),
}


@torch.no_grad()
def test_times_of_a_vpsde_are_steps() -> None:
    """With the betas of a VPSDE, time s of the process is step 1000 s − 1 of the model."""
    process, betas = as_trained()
    frame = Table(torch.cumprod(1 - betas, 0), "epsilon", "fractional")
    s = torch.tensor([0.001, 0.002, 0.1, 0.5, 1.0], dtype=torch.float64)
    asked = frame.question(process.transition(s).logsnr)
    assert torch.allclose(asked.time, 1000 * s - 1, rtol=0, atol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", PROCESSES)
def test_score_by_hand(name: str, prediction: str) -> None:
    """The sufficient statistic and diffusers' own x̂ make Σ⁻¹(r x̂ − y)."""
    process = PROCESSES[name]()
    options = {"trained_betas": as_trained()[1].tolist()} if name == "vpsde" else {}
    scheduler, model = ddpm(prediction, exact=True, **options), unet().double()
    x, _ = pixels()
    for t in (3, 250, 900):
        target = logsnr_of(scheduler)[t]
        kernel = process.transition(
            time := time_at(process, float(target) + 2 * math.log(BYTES)), given="x"
        )
        y = kernel.sample(x)[0]
        covariance, response = kernel.covariance, kernel.response
        weight = torch.linalg.solve(covariance, response)  # Σ⁻¹r
        x_noisy = torch.einsum("k,bk...->b...", weight / (weight @ response), y)
        a, _ = amplitudes(target)
        z = a * BYTES * x_noisy
        output = model(z, torch.tensor([t, t])).sample
        estimate = scheduler.step(output, t, z).pred_original_sample / BYTES
        rest = torch.einsum("k,b...->bk...", response, estimate) - y
        expected = torch.einsum("kl,bl...->bk...", torch.linalg.inv(covariance), rest)
        for found in both(model, scheduler, process):
            assert relative(found.score(y, time), expected) <= 1e-8  # Σ is inverted by hand here


class Perfect(nn.Module):
    """Poses as a model of diffusers, and knows the answer for data N(mean, std²)."""

    def __init__(self, scheduler: Any, mean: float, std: float) -> None:
        super().__init__()
        self.prediction, self.mean, self.std = scheduler.config.prediction_type, mean, std
        self.table = logsnr_of(scheduler)
        self.asked: list[Tensor] = []

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        self.asked.append(timestep)
        steps = np.arange(len(self.table))
        logsnr = torch.from_numpy(np.interp(timestep.numpy(), steps, self.table.numpy()))
        a, s = (v.reshape(-1, *[1] * (sample.dim() - 1)) for v in amplitudes(logsnr))
        gain = a * self.std**2 / ((a * self.std) ** 2 + s**2)
        x = self.mean + gain * (sample - a * self.mean)
        if self.prediction == "sample":
            return x
        noise = (sample - a * x) / s
        return noise if self.prediction == "epsilon" else a * noise - s * x


@torch.no_grad()
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", PROCESSES)
def test_perfect_denoiser_is_the_exact_score(name: str, prediction: str) -> None:
    """p(y_s) = N(r m, Σ + r rᵀς²) for Gaussian data, at times between steps, too.

    The model is told its step in float32, hence six digits.
    """
    process, scheduler, scale = PROCESSES[name](), ddpm(prediction), 16 / 15
    mean, std = 0.2, 0.4
    model = Perfect(scheduler, mean * scale, std * scale)
    x = mean + std * torch.randn(4, 5, dtype=torch.float64)
    for logsnr in (8.9, 4.03, 0.123, -2.2, -7.3):
        time = time_at(process, logsnr)
        kernel = process.transition(time, given="x")
        y, r = kernel.sample(x)[0], kernel.response
        rest = y - mean * r.reshape(1, -1, 1)
        whole = kernel.covariance + std**2 * torch.outer(r, r)
        expected = -torch.einsum("kl,bld->bkd", torch.linalg.inv(whole), rest)
        for found in both(model, scheduler, process, likelihood=Discrete(16)):
            assert found.network.scale == scale
            assert relative(found.score(y, time), expected) <= 1e-6


# ---------------------------------------------------------------- between and beyond the steps


@torch.no_grad()
def test_steps_between() -> None:
    """Fractional steps are linear in log SNR; the nearest is nearest in log SNR; both hit steps."""
    scheduler = ddpm()
    table = logsnr_of(scheduler)
    between = table[[7, 500]] + 0.3 * (table[[8, 501]] - table[[7, 500]])
    fractional, nearest = frame_of(scheduler), frame_of(scheduler, "nearest")
    expected = torch.tensor([7.3, 500.3], dtype=torch.float64)
    assert torch.allclose(fractional.question(between).time, expected, rtol=0, atol=1e-9)
    asked = nearest.question(between).time
    assert asked.dtype == torch.int64 and asked.tolist() == [7, 500]
    assert torch.equal(nearest.question(table).time, torch.arange(1000))
    found = fractional.question(table).time
    assert torch.allclose(found, torch.arange(1000.0, dtype=torch.float64), rtol=0, atol=1e-9)


@torch.no_grad()
def test_nearest_steps_by_hand() -> None:
    """v̂ of the nearest step, from that step's own ᾱ, is kept at the noise that there is."""
    scheduler, model = ddpm(), unet().double()
    table = logsnr_of(scheduler)
    logsnr = (0.7 * table[7] + 0.3 * table[8]).expand(2)
    (a, s), (at, st) = amplitudes(logsnr[0]), amplitudes(table[7])
    z = torch.randn(2, *SHAPE, dtype=torch.float64)
    noise = model(z, torch.tensor([7, 7])).sample
    expected = (noise - st * z) / at
    network = Diffusers(model, scheduler, scale=1.0, steps="nearest", answers="velocity")
    assert relative(network(z, logsnr), expected) <= 1e-12
    network = Diffusers(model, scheduler, scale=1.0, steps="nearest")
    assert relative(network(z / a, logsnr), a * expected + s * z) <= 1e-12
    exact = Diffusers(model, scheduler, scale=1.0)(z / a, logsnr)
    assert relative(exact, a * expected + s * z) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_more_noise_than_the_model_knows(prediction: str) -> None:
    """x̂ is that of the last step: exact for data in one point, at any noise."""
    scheduler = ddpm(prediction)
    model = Perfect(scheduler, 0.3, 1e-9)
    noise = torch.randn(5, 7, dtype=torch.float64)
    for logsnr in (-10.0, -12.0, -33.0, -100.0):
        sigma = math.exp(-logsnr / 2)
        for found in both(model, scheduler, ornstein.cld(), likelihood=Continuous()):
            x_noisy = 0.3 + sigma * noise
            assert relative(found.predict(x_noisy, logsnr), noise) <= 1e-7
            if found.precondition:  # the other form has x̂ as a difference of large numbers
                one = torch.full_like(noise, 0.3)
                assert relative(found.denoise(x_noisy, logsnr), one) <= 1e-6
    assert max(float(t.max()) for t in model.asked) == 999.0


@torch.no_grad()
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_less_noise_than_the_model_knows(prediction: str) -> None:
    """The score of the first step is kept, so that ε̂ fades; it never costs more than knowing
    nothing does, for Gaussian data of any size."""
    scheduler = ddpm(prediction)
    first = float(logsnr_of(scheduler)[0])
    known = math.exp(-first / 2)
    noise = torch.randn(4000, 2, dtype=torch.float64)
    for std in (1e-3, 0.01, 0.5):
        model = Perfect(scheduler, 0.1, std)
        x = 0.1 + std * torch.randn_like(noise)
        for logsnr in (first + 0.5, 13.3, 20.0):
            sigma = math.exp(-logsnr / 2)
            x_noisy = x + sigma * noise
            gaussian = known * (x_noisy - 0.1) / (std**2 + known**2)  # at the first step
            expected = sigma / known * gaussian
            for found in both(model, scheduler, ornstein.cld(), likelihood=Continuous()):
                guess = found.predict(x_noisy, logsnr)
                assert relative(guess, expected) <= 1e-6
                # over x and the noise, E(ε − ε̂)² ≤ 1
                error = (noise - guess).square().mean()
                assert float(error) <= float(noise.square().mean()) + 0.03
    assert min(float(t.min()) for t in model.asked) == 0.0


@torch.no_grad()
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("steps", ["fractional", "nearest"])
def test_a_last_step_without_signal(prediction: str, steps: Any) -> None:
    """ᾱ = 0 at the end of a schedule divides nothing by zero; other steps are where they were."""
    scheduler = ddpm(prediction, rescale_betas_zero_snr=True)
    assert scheduler.alphas_cumprod[-1] == 0
    network = Diffusers(unet(), scheduler, steps=steps, answers="velocity")
    z = torch.randn(6, *SHAPE)
    logsnr = torch.tensor([-690.0, -138.0, -40.0, -19.0, 0.0, 30.0])
    assert torch.isfinite(network(z, logsnr)).all()
    frame = frame_of(scheduler, steps)
    table = logsnr_of(scheduler)[:-1]
    assert torch.allclose(frame.question(table).time.double(), torch.arange(999.0).double())


@torch.no_grad()
def test_one_network_two_forms() -> None:
    """Noise and velocity say the same, at any log SNR where float64 can tell."""
    for scheduler in (
        *(ddpm(prediction) for prediction in PREDICTIONS),
        diffusers.EDMEulerScheduler(),
        diffusers.FlowMatchEulerDiscreteScheduler(),
    ):
        velocity, noise = both(unet().double(), scheduler, ornstein.cld())
        x = torch.randn(6, *SHAPE, dtype=torch.float64)
        logsnr = torch.tensor([-33.0, -12.0, -3.0, 2.0, 9.0, 15.0], dtype=torch.float64)
        x_noisy = x * (1 + (-logsnr / 2).exp()).reshape(-1, 1, 1, 1)
        found = [model.predict(x_noisy, logsnr) for model in (velocity, noise)]
        assert relative(*found) <= 1e-12


# ---------------------------------------------------------------- bounds, gradients, types


@torch.no_grad()
@pytest.mark.parametrize("name", ["cld", "random-3"])
def test_the_bound_is_one_and_is_near(name: str) -> None:
    """Gaussian data, a perfect denoiser: below log p(x), by the prior's gap and the ends alone."""
    scheduler, mean, std = ddpm(), 0.2, 0.4
    x = mean + std * torch.randn(4000, 3, dtype=torch.float64)
    model = from_diffusers(
        Perfect(scheduler, mean, std),
        scheduler,
        PROCESSES[name](),
        likelihood=Continuous(),
        truncation=NoiseLevel(math.exp(-4.5)),  # within the table
    )
    torch.set_default_dtype(torch.float64)
    try:
        found = ornstein.elbo(model, x, draws=8, random=0)
    finally:
        torch.set_default_dtype(torch.float32)
    truth = torch.distributions.Normal(mean, std).log_prob(x).sum(1)
    gap = truth - found.nats
    error = float(gap.std()) / math.sqrt(len(gap))
    assert -4 * error <= float(gap.mean()) <= 4 * error + 0.01, (float(gap.mean()), error)


def test_gradients_are_those_of_the_model() -> None:
    """d‖ε̂ − ε‖² by the parameters, as if the model had been asked directly."""
    scheduler, model = ddpm("v_prediction"), unet().double()
    a, s = amplitudes(logsnr_of(scheduler)[300])
    noise, z = torch.randn(2, 2, *SHAPE, dtype=torch.float64)
    wanted = a * model(z, torch.tensor([300, 300])).sample + s * z
    (wanted - noise).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    for found in both(model, scheduler, ornstein.cld(), likelihood=Continuous()):
        model.zero_grad()
        guess = found.predict(z / a, logsnr_of(scheduler)[300])
        (guess - noise).square().sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert relative(grads, expected) <= 1e-10


def test_training_goes_through() -> None:
    """A few steps on the bound itself lower it, and reach every parameter."""
    model = from_diffusers(unet(), ddpm(), ornstein.cld())
    x = torch.randint(100, 140, (8, *SHAPE), generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for step in range(12):
        loss = ornstein.elbo(model, x, random=step % 2, draws=2).bits_per_dim.mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.network.parameters())
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.network.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(math.isfinite(loss) for loss in losses)
    assert max(losses[-2:]) < min(losses[:2])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["unet", "transformer", "conditional"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Three digits of the model's output are left, and none are lost to overflow: σ reaches 2e7."""
    model, conditioning = MODELS[name]()
    scheduler = ddpm("v_prediction")
    options = {"conditioning": conditioning}
    wide = from_diffusers(model, scheduler, ornstein.cld(), **options)
    x = torch.randn(5, *SHAPE)
    logsnr = torch.tensor([-33.0, -9.0, -1.0, 4.0, 9.0])
    x_noisy = x * (1 + (-logsnr / 2).exp()).reshape(-1, 1, 1, 1)
    expected = wide.predict(x_noisy, logsnr)
    pixel = torch.randint(256, (2, *SHAPE))
    bits = ornstein.elbo(wide, pixel, random=0, draws=4).bits_per_dim
    half = wide.to(dtype)
    assert half.network.frame.table.dtype == torch.float64
    found = half.predict(x_noisy, logsnr)
    assert found.dtype == torch.float32
    assert 0 < relative(found, expected) <= 8 * torch.finfo(dtype).eps
    again = ornstein.elbo(half, pixel, random=0, draws=4).bits_per_dim
    assert torch.allclose(again, bits, rtol=16 * torch.finfo(dtype).eps)


class Listening(nn.Module):
    """Keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        self.sample, self.timestep = sample, timestep
        return self.weight * sample


@torch.no_grad()
def test_steps_are_never_half_numbers() -> None:
    """The nearest bfloat16 to step 437 is 436: the sample is cast, the step is not."""
    model, scheduler = Listening().bfloat16(), ddpm()
    network = Diffusers(model, scheduler, scale=1.0)
    network(torch.randn(1, 3), logsnr_of(scheduler)[437:438].float())
    assert model.sample.dtype == torch.bfloat16 and model.timestep.dtype == torch.float32
    assert abs(model.timestep.item() - 437) <= 1e-3


@torch.no_grad()
def test_whole_graph() -> None:
    """Nothing is read back to the host: one graph, with the same answer."""
    network = Diffusers(unet(), ddpm())
    x, logsnr = torch.randn(3, *SHAPE), torch.tensor([-12.0, 1.0, 12.0])
    torch.compiler.reset()
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    assert relative(compiled(x, logsnr), network(x, logsnr)) <= 1e-6


# ---------------------------------------------------------------- conditions


@torch.no_grad()
def test_conditions_are_passed_on() -> None:
    """A class, a sequence, and a dict of both kinds of numbers, for every example of a batch."""
    options = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 6 + 2 * 4,
    }
    model, scheduler = conditional(**options), ddpm()
    sequence, text = torch.randn(1, 5, 6), torch.randn(1, 6)
    added = {"text_embeds": text, "time_ids": torch.tensor([[8, 8]])}
    given = {"encoder_hidden_states": sequence, "added_cond_kwargs": added}
    network = Diffusers(model, scheduler, scale=1.0, conditioning=given)
    logsnr, z = logsnr_of(scheduler)[250].expand(3), torch.randn(3, *SHAPE)
    expected = model(
        z,
        torch.full((3,), 250),
        encoder_hidden_states=sequence.expand(3, 5, 6),
        added_cond_kwargs={k: v.expand(3, -1) for k, v in added.items()},
    ).sample
    a, _ = amplitudes(logsnr)
    x_noisy = z / a.float().reshape(-1, 1, 1, 1)
    assert relative(network(x_noisy, logsnr), expected) <= 1e-5
    given["encoder_hidden_states"] = torch.randn(1, 5, 6)
    assert relative(network(x_noisy, logsnr), expected) <= 1e-5  # it has its own copy
    other = Diffusers(model, scheduler, scale=1.0, conditioning=given)
    assert relative(other(x_noisy, logsnr), expected) > 1e-3


def test_conditions_that_are_none() -> None:
    model = transformer()
    for given, words in (
        ({"class_labels": torch.tensor([1, 2])}, ["class_labels", "(2,)", "first axis of 1"]),
        ({"class_labels": 3}, ["int"]),
        ({"training": torch.zeros(1)}, ["training"]),
        ({"not a name": torch.zeros(1)}, ["not a name"]),
    ):
        says(message(lambda given=given: Diffusers(model, ddpm(), conditioning=given)), *words)
    one = Diffusers(model, ddpm(), conditioning={"class_labels": torch.tensor(3)})
    same = Diffusers(model, ddpm(), conditioning={"class_labels": torch.tensor([3])})
    x, logsnr = torch.randn(2, *SHAPE), torch.zeros(2)
    with torch.no_grad():
        assert torch.equal(one(x, logsnr), same(x, logsnr))


# ---------------------------------------------------------------- mistakes


def test_mistakes() -> None:
    model = unet()
    odd = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True
    )
    says(message(lambda: Diffusers(model, odd)), "flow_prediction", "epsilon, sample, v_prediction")
    says(message(lambda: Diffusers(model, diffusers.ScoreSdeVeScheduler())), "ScoreSdeVeScheduler")
    says(message(lambda: Diffusers(model, None)), "NoneType", "trained with")
    says(message(lambda: Diffusers(model, ddpm(trained_betas=[0.1]))), "0.9", "two steps")
    says(message(lambda: Diffusers(model, ddpm(), steps="all")), "'all'", "nearest")
    says(message(lambda: Diffusers(model, ddpm(), scale=0.0)), "scale=0.0", "levels")
    says(message(lambda: Diffusers(model, ddpm(), answers="x")), "'x'", "velocity")
    says(message(lambda: Diffusers("folder", ddpm())), "str", "from_diffusers")
    says(message(lambda: Diffusers(nn.Linear(2, 2), ddpm())), "Linear", "timestep")
    says(message(lambda: from_diffusers(model)), "UNet2DModel", "scheduler")
    says(message(lambda: from_diffusers(3, ddpm())), "int", "pipeline")
    says(message(lambda: from_diffusers(model, ddpm(), likelihood=3)), "likelihood=3")
    says(
        message(lambda: from_diffusers(model, ddpm(), likelihood=Discrete(256, logit=0.05))),
        "logit",
        "scale=",
    )
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    says(message(lambda: Diffusers(model, flow, steps="nearest")), "FlowMatch", "fractional")


@torch.no_grad()
def test_steps_that_are_embedded_one_by_one() -> None:
    options = {"time_embedding_type": "learned", "num_train_timesteps": 1000}
    model, scheduler = unet(**options), ddpm()
    says(message(lambda: Diffusers(model, scheduler)), "UNet2DModel", "steps='nearest'")
    network = Diffusers(model, scheduler, scale=1.0, steps="nearest")
    z, logsnr = torch.randn(2, *SHAPE), logsnr_of(scheduler)[250].expand(2)
    a, _ = amplitudes(logsnr)
    expected = model(z, torch.tensor([250, 250])).sample
    assert relative(network(z / a.float().reshape(-1, 1, 1, 1), logsnr), expected) <= 1e-5

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 1)

        def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
            return sample * self.table(timestep)

    found = Diffusers(Embedded(), scheduler)
    says(message(lambda: found(torch.randn(2, 3), torch.zeros(2))), "Embedded", "steps='nearest'")


# ---------------------------------------------------------------- files


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_described_and_rebuilt(name: str) -> None:
    """Through JSON and a state dict, equal to the last bit."""
    model, conditioning = MODELS[name]()
    scheduler = ddpm("v_prediction", trained_betas=np.linspace(1e-4, 0.02, 500))
    options = {"steps": "nearest", "answers": "velocity", "scale": 1.5}
    network = Diffusers(model, scheduler, conditioning=conditioning, **options)
    record = json.loads(json.dumps(described(network)))
    assert (record["kind"], record["library"]) == ("diffusers", "diffusers")
    again = rebuilt(record, "the network", nn.Module).eval()
    again.load_state_dict(network.state_dict())
    x, logsnr = torch.randn(3, *SHAPE), torch.tensor([-12.0, 0.5, 11.0])
    assert torch.equal(again(x, logsnr), network(x, logsnr))
    assert described(again) == described(network)


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    """The whole model, as users save it."""
    options = {"conditioning": {"class_labels": torch.tensor([3])}}
    model = from_diffusers(transformer(), ddpm("sample"), ornstein.alda(), **options)
    model.save_pretrained(tmp_path / "model")
    again = ScoreModel.from_pretrained(tmp_path / "model")
    x, logsnr = torch.randn(3, *SHAPE), torch.tensor([-12.0, 0.5, 11.0])
    assert torch.equal(again.predict(x, logsnr), model.predict(x, logsnr))
    assert again.truncation == model.truncation and again.process.name == "alda"


def test_half_precision_is_described() -> None:
    network = Diffusers(unet().bfloat16(), ddpm())
    again = rebuilt(described(network), "the network", Diffusers)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


def test_only_parts_of_diffusers_are_built() -> None:
    record = described(Diffusers(unet(), ddpm()))

    def without(**changes: Any) -> str:
        return message(lambda: rebuilt({**record, **changes}, "the network", nn.Module))

    for name in ("DDPMPipeline", "DDPMScheduler", "os", "__name__", "ConfigMixin", 3, None):
        says(without(**{"class": name}), repr(name), "UNet2DModel")
    for name in ("UNet2DModel", "ModelMixin", "subprocess"):
        says(without(scheduler_class=name), repr(name))
    says(without(config="google/ddpm-cifar10-32"), "UNet2DModel", "str", "object")
    says(without(library="other"), "library")
    says(without(dtype="load"), "'load'")
    says(without(more=1), "more")

    class Mine(diffusers.DiTTransformer2DModel):
        pass

    class Bound(diffusers.DDPMScheduler):
        pass

    says(message(lambda: described(Diffusers(Mine(2, 8, num_layers=1), ddpm()))), "Mine", "own")
    says(message(lambda: described(Diffusers(unet(), Bound()))), "Bound", "own")


@torch.no_grad()
def test_from_a_folder(tmp_path: Path) -> None:
    """A pipeline as diffusers saves it, the pipeline itself, and a folder of a model alone."""
    model, scheduler = unet(), ddpm("v_prediction", beta_schedule="squaredcos_cap_v2")
    pipeline = diffusers.DDPMPipeline(model, scheduler)
    pipeline.save_pretrained(tmp_path / "pipeline")
    model.save_pretrained(tmp_path / "model")
    x, logsnr = torch.randn(3, *SHAPE), torch.tensor([-9.0, 0.5, 11.0])
    expected = from_diffusers(model, scheduler, ornstein.alda()).predict(x, logsnr)
    for found in (
        from_diffusers(tmp_path / "pipeline", process=ornstein.alda()),
        from_diffusers(str(tmp_path / "pipeline")),
        from_diffusers(pipeline),
        from_diffusers(tmp_path / "model", scheduler),
    ):
        assert torch.equal(found.predict(x, logsnr), expected)
    other = from_diffusers(tmp_path / "pipeline", ddpm("sample"))
    assert relative(other.predict(x, logsnr), expected) > 1e-2
    says(message(lambda: from_diffusers(tmp_path / "model")), "UNet2DModel", "scheduler")


def test_folders_that_can_not_be_read(tmp_path: Path) -> None:
    pipeline = diffusers.DDPMPipeline(unet(), ddpm())
    pipeline.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    says(message(lambda: from_diffusers(tmp_path / "pickled")), "UNet2DModel", "safetensors")
    (tmp_path / "empty").mkdir()
    says(message(lambda: from_diffusers(tmp_path / "empty")), "empty", "model_index.json")
    pipeline.save_pretrained(tmp_path / "foreign")
    index = tmp_path / "foreign" / "model_index.json"
    text = json.loads(index.read_text())
    index.write_text(json.dumps({**text, "unet": ["mine", "Evil"]}))
    says(message(lambda: from_diffusers(tmp_path / "foreign")), "unet", "pipeline")


def test_the_library_does_without() -> None:
    """ornstein.adapters imports where diffusers is not, and says what is missing when asked."""
    code = (
        "import sys, ornstein.adapters\n"
        "print('diffusers' in sys.modules)\n"
        "sys.modules['diffusers'] = None\n"
        "try:\n    ornstein.adapters.from_diffusers('a/b')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, text = found.stdout.splitlines()
    assert imported == "False"
    assert "pip install 'ornstein[diffusers]'" in text


# ---------------------------------------------------------------- the page


PAGE = Path(__file__).resolve().parents[2] / "docs" / "diffusers.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are one program."""
    assert BLOCKS
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(BLOCKS), "docs/diffusers.md", "exec"), {"__name__": "page"})
