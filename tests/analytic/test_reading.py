"""What a joint model says about x is read where its bound trains it, and nowhere else.

The bound sees an error e as Wᵀe, W = L⁻¹G: of noise in K variables only as many numbers as noise
enters. A network may say anything in the rest, the null space of Wᵀ, and bound, estimates and
samples must not change.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Ancestral, Continuous, Exponential, Heun, ProbabilityFlow, Process, Solver
from ornstein.answers import LEAST_SHARE, View, contract, expand
from ornstein.linalg import lower_solve
from ornstein.terms import joint_error
from tests.test_errors import message, says

F64 = torch.float64
LOW = ["cld", "alda", "malda"]  # rank of the noise: 1 of 2, 1 of 3, 2 of 3
ALL = ["vpsde", *LOW, "psld"]
SOLVERS: dict[str, Solver] = {
    "ancestral": Ancestral(12),
    "exponential": Exponential(8),
    "heun": Heun(6),
    "flow": ProbabilityFlow(steps=6, method="midpoint"),
}


def made(name: str) -> Process:
    return ornstein.processes.PRESETS[name]()


def whitened(process: Process, s: Tensor) -> Tensor:
    """W = L⁻¹G: (B, K, R)."""
    return lower_solve(process.transition(s).cholesky, process.noise_factor(s))


class Untrained(nn.Module):
    """Says a lot, all of it where the bound does not hear it."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self.loud = nn.Parameter(torch.tensor(3.0, dtype=F64))
        self.asked = 0

    def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
        self.asked += 1
        with torch.no_grad():
            s = self.process.time_of_noise((-logsnr / 2).exp())
            W = whitened(self.process, s)
            null = torch.linalg.svd(W).U[:, :, W.shape[-1] :]  # (B, K, K − R)
        said = torch.tanh(2 * y.sum(1)) + torch.cos(3 * y[:, 0])
        return self.loud * expand(null.sum(-1), said)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros((), dtype=F64))

    def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
        return self.zero * y


def model(network: nn.Module, process: Process) -> ornstein.ScoreModel:
    return ornstein.ScoreModel(network, process, Continuous(), "joint", data_mean=0.3, data_std=0.7)


@pytest.mark.parametrize("name", ALL)
def test_an_error_is_what_is_read_and_what_was_known(name: str) -> None:
    """‖e‖²_C = (âᵀCâ) ρ² + ‖e − âρ‖²_C, and nothing along â is nearer to e than âρ."""
    process = made(name)
    s = torch.logspace(-3, 0, 24, dtype=F64)
    view = View.of(process.transition(s), process.noise_factor(s))
    W = whitened(process, s)
    e = torch.randn(len(s), process.n_vars, 5, dtype=F64)

    def size(error: Tensor) -> Tensor:
        return (W.mT @ error).square().sum((-2, -1))

    rho = view.read(e)
    along, rest = expand(view.direction, rho), e - expand(view.direction, rho)
    torch.testing.assert_close(size(e), size(along) + size(rest), rtol=1e-10, atol=0)
    for other in (0.9, 1.1):
        assert bool((size(e - other * along) >= size(rest)).all())
    ones = contract(view.reading, view.direction.unsqueeze(-1))  # type: ignore[arg-type]
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOW)
def test_what_is_not_trained_changes_neither_bound_nor_estimate(name: str) -> None:
    process = made(name)
    noisy, plain = model(Untrained(process), process), model(Silent(), process)
    x = 0.3 + 0.7 * torch.randn(40, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    one, two = (ornstein.elbo(m, x, draws=4, random=0).nats for m in (noisy, plain))
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)

    s = process.time_of_noise(torch.logspace(-2, 2, 40, dtype=F64))
    kernel = process.transition(s)
    y, eps = kernel.sample(x)
    said = joint_error(noisy, kernel, View.of(kernel), x, eps)
    silent = joint_error(plain, kernel, View.of(kernel), x, eps)
    assert bool(((said - silent).flatten(1).norm(dim=1) > 1e-3).all())  # it does say something
    noise, view = torch.full_like(s, 0.7), View.of(kernel)
    known = x + view.sigma[:, None] * contract(view.direction, eps)  # x̃, and E[x | x̃]:
    truth = 0.3 + (known - 0.3) * (noise**2 / (noise**2 + view.sigma**2))[:, None]
    for m in (noisy, plain):
        torch.testing.assert_close(m.estimate(y, s), truth, rtol=1e-7, atol=1e-7)


class Reader(nn.Module):
    """Another network, of which only what it says about x is passed on."""

    def __init__(self, network: nn.Module, process: Process) -> None:
        super().__init__()
        self.network, self.process = network, process

    def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
        s = self.process.time_of_noise((-logsnr / 2).exp())
        view = View.of(self.process.transition(s), self.process.noise_factor(s))
        return expand(view.direction, view.read(self.network(y, logsnr)))


@pytest.mark.parametrize("name", ALL)
def test_what_a_bound_loses_to_noise_that_was_known(name: str) -> None:
    """What it gains when the network is read first: nothing where noise enters one variable."""
    torch.manual_seed(0)
    process = made(name)
    network = ornstein.networks.MLP((3,), process.n_vars, width=8, depth=1).to(F64)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=F64))
    x = 0.3 + 0.7 * torch.randn(20, 3, dtype=F64)
    asked = {"draws": 4, "random": 1, "control": True, "times": ornstein.LogSNR()}
    with torch.no_grad():
        whole = ornstein.elbo(model(network, process), x, **asked)  # type: ignore[arg-type]
        read = ornstein.elbo(model(Reader(network, process), process), x, **asked)  # type: ignore[arg-type]
    assert whole.known is not None and read.known is not None
    scale = whole.errors.abs().mean().item()
    torch.testing.assert_close(
        whole.errors - whole.known, read.errors, rtol=1e-7, atol=1e-9 * scale
    )
    torch.testing.assert_close(read.known, torch.zeros_like(read.known), rtol=0, atol=1e-9 * scale)
    once = process.noise_factor(0.5).shape[-1] == 1
    assert bool((whole.known.abs() < 1e-9 * scale).all()) == once
    channel = ornstein.ScoreModel(Silent(), process, Continuous())
    assert ornstein.elbo(channel, x, control=True).known is None


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", LOW)
def test_nor_samples(name: str, solver: str) -> None:
    process = made(name)
    network = Untrained(process)
    noisy, plain = model(network, process), model(Silent(), process)
    one, two = (
        ornstein.sample(m, n=8, solver=SOLVERS[solver], seed=3, shape=(3,), raw=True)
        for m in (noisy, plain)
    )
    assert network.asked
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_a_network_without_an_answer_is_read_too() -> None:
    """It says all of the noise, of which what was known is no news."""
    process = made("cld")
    x = torch.randn(6, 3, dtype=F64)
    s = torch.linspace(0.05, 0.9, 6, dtype=F64)
    kernel = process.transition(s)
    y, eps = kernel.sample(x)

    class Knows(nn.Module):
        """All of the noise, and more where nobody listens."""

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones((), dtype=F64))

        def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
            null = torch.linalg.svd(whitened(process, s)).U[:, :, 1:].sum(-1)
            return self.one * (eps + expand(null, torch.sin(y.sum(1))))

    found = ornstein.ScoreModel(Knows(), process, Continuous(), "joint", precondition=False)
    torch.testing.assert_close(found.estimate(y, s), x, rtol=0, atol=1e-9)


def test_where_x_stands_still_a_guess_is_read_along_it() -> None:
    """A turn alone moves no information: C says nothing along â, and m is â."""
    still = torch.tensor([[0.6, 0.8]], dtype=F64)
    view = View(still, torch.ones(1), torch.zeros(1))
    across = torch.tensor([[[0.8], [-0.6]]], dtype=F64)
    assert torch.equal(view.with_reading(across).reading, still)
    leaning = across + 1e-9 * still.unsqueeze(-1)
    m = view.with_reading(leaning).reading
    assert m is not None and float((m - still).norm()) < 1e-6 / LEAST_SHARE
    nothing = torch.zeros(1, 2, 1, dtype=F64)
    assert torch.equal(view.with_reading(nothing).reading, still)  # type: ignore[arg-type]


def test_an_evaluation_says_what_was_lost_to_known_noise(tmp_path: Path) -> None:
    """The mean of what each draw says, kept with the rows; nothing of a channel model."""
    torch.manual_seed(0)
    process = made("malda")
    network = ornstein.networks.MLP((3,), 3, width=8, depth=1).to(F64)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=F64))
    joint = model(network, process)
    x = 0.3 + 0.7 * torch.randn(60, 3, dtype=F64)
    found = ornstein.evaluate(joint, x, draws=64, quiet=True, folder=tmp_path)
    each = [ornstein.elbo(joint, x, draws=64, random=seed, control=True).known for seed in range(4)]
    truth = torch.stack([k for k in each if k is not None]).mean((0, 2)) / (3 * math.log(2))
    assert found.known == pytest.approx(truth.mean().item(), rel=0.05)
    assert 0 < found.known < found.diffusion
    assert found.to_dict()["known"] == found.known
    again = ornstein.evaluate(joint, x, draws=64, quiet=True, folder=tmp_path)
    assert again.known == found.known
    file = next(tmp_path.glob("rows-*.npz"))
    older = {key: value for key, value in np.load(file).items() if key != "known"}
    np.savez(file, **older)  # as they were written before there was such a figure
    assert math.isnan(ornstein.evaluate(joint, x, draws=64, quiet=True, folder=tmp_path).known)
    channel = ornstein.ScoreModel(Silent(), process, Continuous(), data_mean=0.3, data_std=0.7)
    plain = ornstein.evaluate(channel, x, quiet=True)
    assert math.isnan(plain.known) and plain.to_dict()["known"] is None


def loud(process: Process, known_noise: str = "guessed") -> ornstein.ScoreModel:
    """A network that says something about all noise."""
    torch.manual_seed(0)
    network = ornstein.networks.MLP((3,), process.n_vars, width=8, depth=1).to(F64)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=F64))
    return ornstein.ScoreModel(
        network,
        process,
        Continuous(),
        "joint",
        data_mean=0.3,
        data_std=0.7,
        truncation=ornstein.NoiseLevel(0.1),
        known_noise=known_noise,  # type: ignore[arg-type]
    )


def points(count: int = 20) -> Tensor:
    return 0.3 + 0.7 * torch.randn(count, 3, dtype=F64, generator=torch.Generator().manual_seed(7))


FULL = {f"learned-{n}": n for n in (1, 2)}


def any_made(name: str) -> Process:
    return ornstein.learned(FULL[name], full=True) if name in FULL else made(name)


@pytest.mark.parametrize("name", [*ALL, *FULL])
def test_a_bound_that_is_told_is_the_bound_without_what_was_known(name: str) -> None:
    """Draw by draw: another bound, never a worse one, and the same where noise enters once."""
    process, x = any_made(name), points()
    whole = ornstein.elbo(loud(process), x, draws=4, random=1, control=True)
    told = ornstein.elbo(loud(process, "told"), x, draws=4, random=1, control=True)
    assert whole.known is not None and told.known is not None
    scale = whole.errors.mean().item()
    near = {"rtol": 1e-7, "atol": 1e-9 * scale}
    torch.testing.assert_close(told.errors, whole.errors - whole.known, **near)
    torch.testing.assert_close(told.known, torch.zeros_like(told.known), **near)
    torch.testing.assert_close(
        told.nats, whole.nats + whole.known.mean(1) + told.reconstruction - whole.reconstruction
    )
    torch.testing.assert_close(told.reconstruction, whole.reconstruction, rtol=1e-9, atol=1e-9)
    if process.noise_factor(0.5).shape[-1] > 1:
        assert bool((told.nats > whole.nats).all())


@pytest.mark.parametrize("name", [*ALL, *FULL])
def test_a_model_that_is_told_says_what_is_known(name: str) -> None:
    """ε̂ is w_⊥ but for its part along â, and that part is what estimates are made of."""
    process, x = any_made(name), points(24)
    s = torch.logspace(-2, 0, 24, dtype=F64)
    kernel = process.transition(s)
    y, eps = kernel.sample(x)
    guessed, told = loud(process), loud(process, "told")
    view = told.view(kernel, s)
    noise = told.noise(y, s)
    across = noise - expand(view.direction, contract(view.direction, noise))
    truth = eps - expand(view.direction, contract(view.direction, eps))
    torch.testing.assert_close(across, truth, rtol=0, atol=1e-6)
    x_noisy = x + view.sigma[:, None] * contract(view.direction, eps)
    estimate = x_noisy - view.sigma[:, None] * contract(view.direction, noise)
    torch.testing.assert_close(told.estimate(y, s), estimate, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(told.estimate(y, s), guessed.estimate(y, s), rtol=1e-7, atol=1e-7)
    score = -torch.linalg.solve_triangular(kernel.cholesky.mT, noise.flatten(2), upper=True)
    torch.testing.assert_close(told.score(y, s), score.reshape(y.shape), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["malda", "learned-1", "learned-2"])
def test_other_forms_of_the_bound_are_told_too(name: str) -> None:
    """Given the state, and by implicit score matching with an exact divergence: one expectation."""
    process, x = any_made(name), points(4)
    told = loud(process, "told")
    with torch.no_grad():
        ways = [
            ornstein.elbo(told, x, draws=4000, random=1).samples,
            ornstein.elbo(told, x, draws=40000, random=2, given="state").samples,
            ornstein.mism(told, x, draws=4000, random=3, divergence="exact").samples,
        ]
        whole = ornstein.elbo(loud(process), x, draws=4000, random=1).samples
    means, errors = ([getattr(w, f)(1) for w in ways] for f in ("mean", "std"))
    errors = [e / math.sqrt(w.shape[1]) for e, w in zip(errors, ways, strict=True)]
    for mean, error in zip(means[1:], errors[1:], strict=True):
        assert bool(((mean - means[0]).abs() < 5 * torch.hypot(error, errors[0])).all())
        assert bool((mean - whole.mean(1) > 5 * error).any())  # and it is no other bound


@pytest.mark.parametrize("likelihood", ["discrete", "tweedie"])
@pytest.mark.parametrize("name", ["cld", "malda", "learned-2"])
def test_pixels_are_told_too(name: str, likelihood: str) -> None:
    """Diffusion parts differ by what was known. The paper's decoder takes all of a guess: its part
    is that of the same network, read first."""
    process = any_made(name)
    network = loud(process).network
    kind = ornstein.Discrete(8) if likelihood == "discrete" else ornstein.Tweedie(8)
    x = torch.randint(8, (10, 3), generator=torch.Generator().manual_seed(3)).byte()
    bounds = []
    for net, known_noise in (
        (network, "guessed"),
        (network, "told"),
        (Reader(network, process), "guessed"),
    ):
        made = ornstein.ScoreModel(
            net,
            process,
            kind,
            "joint",
            data_std=0.6,
            known_noise=known_noise,  # type: ignore[arg-type]
        )
        with torch.no_grad():
            bounds.append(ornstein.elbo(made, x, draws=4, random=1, control=True))
    whole, told, read = bounds
    assert whole.known is not None
    scale = whole.errors.mean().item()
    near = {"rtol": 1e-5, "atol": 1e-6 * scale}
    torch.testing.assert_close(told.errors, whole.errors - whole.known, **near)
    torch.testing.assert_close(told.errors, read.errors, **near)
    torch.testing.assert_close(told.reconstruction, read.reconstruction, rtol=1e-4, atol=1e-4)
    same = torch.allclose(told.reconstruction, whole.reconstruction, rtol=1e-6)
    assert same == (likelihood == "discrete")


def test_evaluations_of_one_network_are_kept_apart(tmp_path: Path) -> None:
    """The rows of one that guesses are not taken for those of one that is told, nor the others."""
    process, x = made("malda"), points(60)
    alone = ornstein.evaluate(loud(process, "told"), x, draws=4, quiet=True)
    guessed, told = (
        ornstein.evaluate(loud(process, kind), x, draws=4, quiet=True, folder=tmp_path / kind)
        for kind in ("guessed", "told")
    )
    assert told.bits_per_dim == alone.bits_per_dim < guessed.bits_per_dim
    assert told.known == pytest.approx(0.0, abs=1e-9) and guessed.known > 0.1
    for kind, other in (("guessed", "told"), ("told", "guessed")):
        folder: Any = {"draws": 4, "quiet": True, "folder": tmp_path / other}
        with pytest.raises(ValueError, match=r"holds another evaluation.*known_noise"):
            ornstein.evaluate(loud(process, kind), x, **folder)
    assert "told" in repr(loud(process, "told")) and "told" not in repr(loud(process))


class Hears(nn.Module):
    """A network that hears its features: (B, K + the features of x, 3) in, (B, K, 3) out."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.part = nn.Parameter(torch.tensor(0.7, dtype=F64))

    def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
        return torch.tanh(self.part * y[:, : self.count] + y[:, self.count :].sum(1, keepdim=True))


def test_evaluations_by_what_features_are_of_are_kept_apart(tmp_path: Path) -> None:
    process, network = made("malda"), Hears(3)
    x = torch.randint(8, (20, 3), generator=torch.Generator().manual_seed(1)).byte()
    models = {
        kind: ornstein.ScoreModel(
            network,
            process,
            ornstein.Discrete(8),
            "joint",
            data_std=0.6,
            features="bins",
            features_of=kind,  # type: ignore[arg-type]
        )
        for kind in ("x", "z")
    }
    found = {
        kind: ornstein.evaluate(one, x, draws=4, quiet=True, folder=tmp_path / kind)
        for kind, one in models.items()
    }
    assert abs(found["x"].bits_per_dim - found["z"].bits_per_dim) > 0.1
    for kind, other in (("x", "z"), ("z", "x")):
        folder: Any = {"draws": 4, "quiet": True, "folder": tmp_path / other}
        with pytest.raises(ValueError, match=r"holds another evaluation.*features_of"):
            ornstein.evaluate(models[kind], x, **folder)


def test_who_is_told_is_kept_and_checked() -> None:
    process = made("malda")
    told, guessed = loud(process, "told"), loud(process)
    assert told.describe()["known_noise"] == "told" and "known_noise" not in guessed.describe()
    for one in (told, guessed):
        assert ornstein.ScoreModel.rebuild(one.describe()).known_noise == one.known_noise
    silent = Silent()
    says(
        message(lambda: ornstein.ScoreModel(silent, process, known_noise="said")),  # type: ignore[arg-type]
        "known_noise='said'",
        "'guessed'",
        "'told'",
    )
    says(
        message(lambda: ornstein.ScoreModel(silent, process, known_noise="told")),
        "parametrisation='channel'",
        "expected a joint model",
    )
    plain = {"parametrisation": "joint", "precondition": False}
    says(
        message(lambda: ornstein.ScoreModel(silent, process, **plain, known_noise="told")),  # type: ignore[arg-type]
        "precondition=False",
        "expected a joint model",
    )


def test_known_noise_is_told_whatever_the_times_are() -> None:
    torch.manual_seed(0)
    network = ornstein.networks.MLP((3,), 3, width=8, depth=1).to(F64)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=F64))
    joint, x = model(network, made("malda")), 0.3 + 0.7 * torch.randn(60, 3, dtype=F64)
    one, two = (
        ornstein.evaluate(joint, x, draws=64, quiet=True, times=times).known
        for times in (None, ornstein.LogSNR())
    )
    assert one == pytest.approx(two, rel=0.05)


def test_a_view_that_can_not_read_says_so() -> None:
    process = made("cld")
    kernel = process.transition(torch.tensor([0.5], dtype=F64))
    says(
        message(lambda: View.of(kernel).read(torch.ones(1, 2, 3, dtype=F64))),
        "kernel alone",
        "expected",
        "noise_factor(s)",
    )
    channel = ornstein.ScoreModel(Silent(), process, Continuous())
    assert channel.view(kernel, torch.tensor([0.5], dtype=F64)).reading is None
