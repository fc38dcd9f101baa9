"""What every score model must keep: its parts to itself, its moments when loaded, and its types."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Continuous, Discrete, NoiseLevel, ScoreModel
from ornstein.answers import View
from ornstein.networks import MLP
from ornstein.terms import joint_error
from tests.test_errors import message, says


class Scaled(nn.Module):
    """A multiple of its input."""

    def __init__(self, by: float = 0.1) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return self.by * x


class Joining(nn.Module):
    """Takes log SNR as one more number of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return self.layer(torch.cat([x, logsnr[:, None]], 1))


def test_models_made_of_a_model_are_their_own() -> None:
    model = ScoreModel(Scaled(), ornstein.cld())
    moved = model.with_truncation(NoiseLevel(0.01))
    moved.process = ornstein.alda()
    other = model.with_process(ornstein.vpsde())
    other.network = Scaled(0.5)
    assert model.process.name == "cld"
    assert float(model.network.by.detach()) == pytest.approx(0.1)
    assert moved.truncation == NoiseLevel(0.01)
    assert model.truncation == NoiseLevel(2 / 256 / 6)


def test_a_swapped_process_shares_the_network() -> None:
    model = ScoreModel(Scaled(), ornstein.cld())
    assert model.with_process(ornstein.alda()).network is model.network


def test_loaded_moments_set_the_truncation() -> None:
    """Built with defaults and then loaded, a model has the bound of the one that was saved."""
    small = ScoreModel(Scaled(), ornstein.cld(), Continuous(), data_std=0.01)
    plain = ScoreModel(Scaled(), ornstein.cld(), Continuous())
    plain.load_state_dict(small.state_dict())
    assert plain.truncation == small.truncation
    assert plain.data_std == pytest.approx(0.01)
    again = copy.deepcopy(plain)
    again.load_state_dict(ScoreModel(Scaled(), ornstein.cld(), Continuous()).state_dict())
    assert again.truncation == NoiseLevel(1e-3) and plain.truncation == small.truncation


def test_a_network_in_half_precision_is_told_about_log_snr() -> None:
    model = ScoreModel(Joining().bfloat16(), ornstein.cld(), Discrete(16))
    x = torch.randint(16, (3, 4))
    says(message(lambda: ornstein.elbo(model, x)), "bfloat16", "float32", "autocast")


def test_half_precision_is_near() -> None:
    """Three digits of a bfloat16, in a network whose output is a tenth of its input."""
    x = torch.randint(16, (64, 4), generator=torch.Generator().manual_seed(0))
    found = []
    for network in (Scaled(), Scaled().bfloat16()):
        model = ScoreModel(network, ornstein.alda(), Discrete(16), data_std=0.6)
        found.append(ornstein.elbo(model, x, random=0, draws=4).bits_per_dim.detach())
    assert float((found[0] - found[1]).abs().max()) <= 0.02 * float(found[0].abs().max())
    assert not torch.equal(*found)


def test_one_number_for_all_examples() -> None:
    model = ScoreModel(Scaled(), ornstein.cld(), Continuous())
    x = torch.randn(3, 4)
    each = torch.full((3,), -1.5)
    assert torch.equal(model.predict(x, -1.5), model.predict(x, each))
    assert torch.equal(model.denoise(x, -1.5), model.denoise(x, each))
    says(message(lambda: model.predict(x, each[:2])), "(2,)", "batch of 3")


def test_moments_per_channel_fit() -> None:
    x = torch.randint(256, (50, 3, 4, 4), dtype=torch.uint8)
    x[:, 1] //= 4
    likelihood = Discrete(256)
    mean, std = likelihood.moments(x, per_channel=True)
    assert mean.shape == std.shape == (3, 1, 1)
    values = likelihood.values(x, None, torch.float64)
    assert torch.allclose(mean[1, 0, 0], values[:, 1].mean(), atol=1e-6)
    assert torch.allclose(std[1, 0, 0], values[:, 1].std(correction=0), atol=1e-6)
    model = ScoreModel(Scaled(), ornstein.cld(), likelihood, data_mean=mean, data_std=std)
    whole = ScoreModel(  # the same numbers, written out for every pixel
        model.network,
        ornstein.cld(),
        likelihood,
        data_mean=mean.expand(3, 4, 4),
        data_std=std.expand(3, 4, 4),
    )
    found = [ornstein.elbo(m, x, random=0).nats for m in (model, whole)]
    assert torch.allclose(*found, rtol=1e-6)
    flat = mean.flatten()
    bad = ScoreModel(Scaled(), ornstein.cld(), likelihood, data_mean=flat, data_std=std)
    says(message(lambda: ornstein.elbo(bad, x)), "(3,)", "(3, 1, 1)", "per_channel=True")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32, torch.int64])
def test_pixels_of_twelve_bits(dtype: torch.dtype) -> None:
    x = torch.randint(4096, (4, 6), generator=torch.Generator().manual_seed(0))
    model = ScoreModel(Scaled(), ornstein.cld(), Discrete(4096), data_std=0.6)
    found = ornstein.elbo(model, x.to(dtype), random=1).nats
    assert torch.equal(found, ornstein.elbo(model, x, random=1).nats)


# ---------------------------------------------------------------- features of joint models


class Heard(nn.Module):
    """Remembers what it was given; its answer depends on all of it."""

    def __init__(self, variables: int) -> None:
        super().__init__()
        self.variables, self.inputs = variables, torch.zeros(())

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        self.inputs = x.detach()
        return x[:, : self.variables] * x[:, self.variables :].sum(1, keepdim=True)


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda", "malda", "psld"])
@pytest.mark.parametrize("given", ["x", "z"])
def test_features_are_of_what_knows_x(name: str, given: str) -> None:
    """Sines and cosines of x̃ = x + σ ε_∥, or of z, in the bound and from a state alone."""
    process = ornstein.processes.PRESETS[name]()
    K, frequency = process.n_vars, 4.0
    model = ScoreModel(
        Heard(K), process, Continuous(), "joint", features=[frequency], features_of=given
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    eps = torch.randn(6, K, 3, dtype=torch.float64, generator=generator)
    s = torch.linspace(0.02, 0.3, 6, dtype=torch.float64)
    kernel = process.transition(s)
    view = View.of(kernel)
    y, _ = kernel.sample(x, noise=eps)
    error = joint_error(model, kernel, view, x, eps)
    first = model.network.inputs[:, K:]
    known = x + view.sigma[:, None] * (view.direction[..., None] * eps).sum(1)
    seen = known if given == "x" else y[:, 0]
    truth = torch.stack([(frequency * seen).sin(), (frequency * seen).cos()], 1)
    if given == "x":  # faded out where the noise is longer than the wave
        truth = truth * torch.exp(-((frequency * view.sigma) ** 2) / 8)[:, None, None]
    assert torch.allclose(first, truth, rtol=0, atol=1e-9)
    noise = model.noise(y, s)  # whitens the state to find the same
    assert torch.allclose(model.network.inputs[:, K:], truth, rtol=0, atol=1e-6)
    assert torch.allclose(eps - noise, error, rtol=0, atol=1e-5)
    model.estimate(y, s)
    assert torch.allclose(model.network.inputs[:, K:], truth, rtol=0, atol=1e-6)
    again = model.joint_residual(y, kernel, view)  # where x̃ is not known
    assert torch.allclose(model.network.inputs[:, K:], truth, rtol=0, atol=1e-6)
    assert torch.isfinite(again).all()


def test_features_of_are_remembered_and_old_models_keep_theirs() -> None:
    network = MLP((3,), variables=2, features=1, width=8)
    for given in ("x", "z"):
        model = ScoreModel(
            network, ornstein.cld(), Continuous(), "joint", features=[2.0], features_of=given
        )
        record = model.describe()
        assert record["features_of"] == given
        assert ScoreModel.rebuild(record).features_of == given
    del record["features_of"]  # as models were written before there was a choice
    assert ScoreModel.rebuild(record).features_of == "z"
    plain = ScoreModel(MLP((3,), features=1), ornstein.cld(), Continuous(), features=[2.0])
    assert "features_of" not in plain.describe()  # x̃ in any case
    says(
        message(lambda: ScoreModel(network, ornstein.cld(), features_of="y")),  # type: ignore[arg-type]
        "features_of='y'",
        "'x'",
        "'z'",
    )
