"""The likelihood of the probability flow against closed forms: Gaussians, mixtures, pixels.

With the exact denoiser p_ε is the density of y_ε but for the prior, which is not met exactly: the
part `prior` says by how much for each draw, and nats − prior is the data's own log-density.
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
from ornstein import (
    Continuous,
    Counted,
    Discrete,
    Exponential,
    Linear,
    NoiseLevel,
    Process,
    ScoreModel,
    Tweedie,
    elbo,
)
from ornstein.ode import OdeBound, evaluate_ode, ode_likelihood
from ornstein.ode.likelihood import Flow
from tests.analytic.test_bound_mixture import Exact, ExactJoint, Residual, ResidualJoint, mixture
from tests.analytic.test_bound_mixture import model_of as mixture_model
from tests.analytic.test_bound_valid import PMF4, Flat, best, independent, model_of, normalised
from tests.analytic.test_exponential import PROCESSES, gaussian
from tests.end_to_end.test_evaluate import Bent, build, pixels

F64 = torch.float64
MEAN, STD = 0.3, 0.5
FAST = Linear(0.1, 60)  # a clock with which the prior is met

NEAR_THE_PRIOR: dict[str, Process] = {
    "vpsde": ornstein.vpsde(FAST),
    "vesde": ornstein.vesde(sigma_max=5000.0),
    "cld": ornstein.cld(),
    "psld": ornstein.psld(rate=FAST),
    "alda": ornstein.alda(),
    "malda": ornstein.malda(rate=FAST),
    "learned-2": ornstein.learned(2, full=True, seed=3, rate=FAST).requires_grad_(False),
    "two clocks": ornstein.Diffusion(
        [[0, -1], [1, 0]], [[0.5, 0], [0, 1]], rate=FAST, rate_q=Linear(1, 5)
    ),
}


def log_normal(x: Tensor) -> Tensor:
    """log N(x; MEAN, STD²), summed: (B,)."""
    return -(((x - MEAN) / STD) ** 2 / 2 + math.log(STD * math.sqrt(2 * math.pi))).sum(1)


def some() -> Tensor:
    """Numbers near and far: (5, 2)."""
    return torch.tensor([[-1.2, 0.3], [1.0, 0.0], [2.5, -0.4], [0.3, 0.3], [0.9, 1.4]], dtype=F64)


def parts_add_up(found: OdeBound) -> None:
    total = found.prior + found.flow + found.reconstruction + found.weighting
    torch.testing.assert_close(found.nats, total, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- Gaussian data


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("draws", [1, 3])
def test_gaussian_data(name: str, draws: int) -> None:
    """Every draw gives log N(x; m, ς²) but for the prior; the flow of u stands still."""
    x = some()
    found = ode_likelihood(gaussian(PROCESSES[name]), x, draws=draws, random=0)
    parts_add_up(found)
    if draws == 1:
        torch.testing.assert_close(found.nats - found.prior, log_normal(x), rtol=1e-8, atol=1e-8)
    prior = found.samples - log_normal(x).unsqueeze(-1)  # what the prior adds to each draw
    assert torch.allclose(found.nats, log_normal(x) + prior.exp().mean(1).log(), atol=1e-8)
    assert prior.abs().max() < 0.7  # "two clocks" is a bad process


@pytest.mark.parametrize("name", NEAR_THE_PRIOR)
def test_gaussian_data_and_the_right_prior(name: str) -> None:
    """To 1e-3 nats per coordinate, and much better."""
    x = some()
    found = ode_likelihood(gaussian(NEAR_THE_PRIOR[name]), x, random=1)
    assert (found.nats - log_normal(x)).abs().max() / 2 < 1e-3
    torch.testing.assert_close(
        found.bits_per_dim, -found.nats / (2 * math.log(2)), rtol=1e-14, atol=0
    )


class Correlated(nn.Module):
    """The noise in x̃ for data N(m, C): ε̂ = σ(C + σ²)⁻¹(x̃ − m)."""

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        super().__init__()
        self.mean, self.covariance = mean, covariance

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        sigma = (-logsnr / 2).exp()
        whole = self.covariance + torch.diag_embed((sigma**2).unsqueeze(-1).expand(-1, 3))
        solved = torch.linalg.solve(whole, (x - self.mean).unsqueeze(-1)).squeeze(-1)
        return sigma.unsqueeze(-1) * solved


@pytest.mark.parametrize("trace", ["exact", "hutchinson"])
@pytest.mark.parametrize("name", ["vpsde", "cld", "alda"])
def test_correlated_gaussian_data(name: str, trace: str) -> None:
    """Three dimensions, the field linear with a trace that is far from zero.

    The decoder knows one standard deviation only: (σ/ς)² of 1e-6 is lost.
    """
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 3, dtype=F64, generator=generator)
    law = torch.distributions.MultivariateNormal(
        torch.tensor([0.5, -1.0, 0.2], dtype=F64), root @ root.mT + 0.3 * torch.eye(3)
    )
    x = law.mean + torch.randn(16, 3, dtype=F64, generator=generator) @ law.scale_tril.mT
    std = law.variance.mean().sqrt()
    model = ScoreModel(
        Correlated(law.mean, law.covariance_matrix),
        NEAR_THE_PRIOR[name],
        Continuous(),
        data_mean=law.mean,
        data_std=std,
        precondition=False,
    )
    flow = Flow(model, trace="exact", rtol=1e-7, atol=1e-7)
    path = flow.path(x)
    probes = None if trace == "exact" else 16
    found = ode_likelihood(model, x, trace=trace, probes=probes, path=path, random=0)  # type: ignore[arg-type]
    error = found.nats - found.prior - law.log_prob(x)
    if trace == "exact":
        assert error.abs().max() < 1e-4
        assert found.flow.std() > 0.1
    else:  # noise of mean zero, which is there
        noise = float(error.std())
        assert noise > 1e-4
        assert abs(float(error.mean())) < 4 * noise / math.sqrt(16)


# ---------------------------------------------------------------- mixtures


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Residual) for name in NEAR_THE_PRIOR),
        ("cld", Exact),
        ("cld", ResidualJoint),
        ("alda", ExactJoint),
    ],
)
def test_a_mixture(name: str, kind: type[nn.Module]) -> None:
    """Two dimensions, three modes: log p(x) to 5e-4 nats per coordinate in every draw.

    What is left is the decoder's Gaussian, off by (σ/τ)² = 1e-4 in single draws.
    """
    data, process = mixture(2), NEAR_THE_PRIOR[name]
    joint = kind in (ResidualJoint, ExactJoint)
    network = kind(data, process) if joint else kind(data)
    model = mixture_model(data, process, network, "joint" if joint else "channel")
    model = model.with_truncation(NoiseLevel(0.003))
    x = data.sample(24)
    found = ode_likelihood(model, x, rtol=1e-6, atol=1e-6, random=0)
    error = (found.nats - found.prior - data.log_prob(x)) / 2
    assert error.abs().max() < 5e-4
    assert error.mean().abs() < 5e-5


def test_smaller_tolerances_smaller_errors() -> None:
    """Of the same draws, against tolerances of 1e-8, in the mean of 12 examples."""
    data = mixture(2)
    model, x = mixture_model(data, PROCESSES["cld"], Residual(data)), data.sample(12)
    fine = ode_likelihood(model, x, rtol=1e-8, atol=1e-8, random=0)
    steps = []
    for tolerance in (1e-3, 1e-4, 1e-5):
        found = ode_likelihood(model, x, rtol=tolerance, atol=tolerance, random=0)
        assert (found.nats - fine.nats).abs().mean() / 2 < 20 * tolerance
        steps.append(len(found.path.times))
    assert steps == sorted(set(steps))


def test_more_draws_tighter() -> None:
    """Decoded from much noise, a mixture's bound is loose, and rises with the draws."""
    data = mixture(2)
    model = mixture_model(data, NEAR_THE_PRIOR["cld"], Residual(data))
    model = model.with_truncation(NoiseLevel(0.5))
    x = data.sample(64)
    found = ode_likelihood(model, x, draws=64, random=0)
    parts_add_up(found)
    means = []
    for draws in (1, 4, 16, 64):  # of the same draws in groups: Jensen leaves no chance
        groups = found.samples.reshape(64, -1, draws)
        means.append(float((torch.logsumexp(groups, -1) - math.log(draws)).mean()))
    assert float(found.nats.mean()) == pytest.approx(means[-1], abs=1e-12)
    assert means == sorted(means) and means[-1] > means[0] + 0.05
    # it can't get above the entropy of the data by more than chance
    assert means[-1] < float(data.log_prob(x).mean()) + 0.1


# ---------------------------------------------------------------- pixels


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda", "learned-2"])
def test_probabilities_of_pixels(name: str) -> None:
    """Two pixels of four levels, all sixteen of them: P(x) itself, to 2 %, and their sum."""
    pmf, likelihood = normalised(PMF4), Discrete(4)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    truth = pmf.log()[pairs].sum(1)
    data, process = independent(PMF4, 16, 2), NEAR_THE_PRIOR[name]
    model = best(process, likelihood, data, pmf, NoiseLevel(0.5 / 20))
    found = ode_likelihood(model, pairs, random=3)
    parts_add_up(found)
    assert (found.nats - truth).abs().max() < 0.02
    assert float(found.nats.exp().sum()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", ["vpsde", "cld"])
def test_probabilities_of_pixels_decoded_from_much_noise(name: str) -> None:
    """σ half a bin: one draw is a bound, many draws a law of its own, whose sum is 1."""
    pmf, likelihood = normalised(PMF4), Discrete(4)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    truth = pmf.log()[pairs].sum(1)
    data = independent(PMF4, 16, 2)
    model = best(NEAR_THE_PRIOR[name], likelihood, data, pmf, NoiseLevel(0.25))
    many = ode_likelihood(model, pairs, draws=256, random=0)
    assert float(many.nats.exp().sum()) == pytest.approx(1, abs=0.05)
    mean = many.samples.mean(1)
    assert (mean < many.nats).all()  # Jensen
    gap = (truth.exp() * (mean - truth)).sum()  # of the bound, over the law of the data
    best_gap = (truth.exp() * (many.nats - truth)).sum()
    assert gap < best_gap < 0
    # with the exact denoiser the bound by denoising has the same mean
    bound = elbo(model, pairs, draws=4096, random=0)
    spread = bound.samples.std(1) / math.sqrt(4096) + many.samples.std(1) / math.sqrt(256)
    assert ((bound.nats - mean).abs() < 4 * spread).all()


@pytest.mark.parametrize("name", ["vpsde", "cld", "malda"])
@pytest.mark.parametrize("levels", [None, 4])
def test_the_papers_decoder(name: str, levels: int | None) -> None:
    """`Tweedie`, of numbers and of dequantised pixels: its mean is that of the other bound.

    With the exact denoiser both are E[log p_ε(y) + log p(y₀|y) − log q(y|y₀) − log q(v₀|x)].
    """
    process, likelihood = NEAR_THE_PRIOR[name], Tweedie(levels)
    if levels is None:
        x, model = some()[:2], gaussian(process)
    else:
        pmf, data = normalised(PMF4), independent(PMF4, 4, 3)
        x = data.x
        cut = NoiseLevel(0.1)
        model = model_of(Flat(pmf), process, likelihood, data, cut, precondition=False)
    found = ode_likelihood(model, x, draws=400, likelihood=likelihood, random=0)
    with torch.no_grad():
        bound = elbo(model, x, draws=8192, likelihood=likelihood, random=1)
    for mine, other in zip(found.samples, bound.samples, strict=True):
        error = mine.std() / math.sqrt(len(mine)) + other.std() / math.sqrt(len(other))
        assert abs(float(mine.mean() - other.mean())) < 4 * float(error)
    assert found.evaluations == found.path.evaluations + 1


# ---------------------------------------------------------------- probes


def test_probes_are_unbiased() -> None:
    """Paired with the exact trace on the same draws: noise of mean zero, less with more probes."""
    data = mixture(3)
    model, x = mixture_model(data, PROCESSES["cld"], Residual(data)), data.sample(8)
    x = x.repeat_interleave(40, 0)
    flow = Flow(model, trace="exact")
    path = flow.path(x)
    exact = ode_likelihood(model, x, trace="exact", path=path, random=0)
    spreads = []
    for probes in (1, 4):
        found = ode_likelihood(model, x, trace="hutchinson", probes=probes, path=path, random=0)
        error = found.nats - exact.nats
        spreads.append(float(error.std()))
        assert abs(float(error.mean())) < 4 * spreads[-1] / math.sqrt(len(x))
        torch.testing.assert_close(found.prior, exact.prior, rtol=1e-12, atol=1e-12)
    assert spreads[0] > 0.01
    assert spreads[1] == pytest.approx(spreads[0] / 2, rel=0.4)


def test_weighing_by_probes_stays_a_bound() -> None:
    """With several draws its mean is at most that of the exact weights; exp of noise would not be.

    The network's Jacobian is full, so that two probes have much noise.
    """
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, dtype=F64, generator=generator)

    class Turning(nn.Module):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return torch.tanh(x @ root) @ root.mT / 3

    model = ScoreModel(Turning(), PROCESSES["cld"], Continuous(), truncation=NoiseLevel(0.3))
    x = torch.randn(1, 6, dtype=F64, generator=generator).expand(200, 6)
    path = Flow(model, trace="exact", rtol=1e-3, atol=1e-3).path(x)
    options: dict[str, Any] = {"draws": 8, "path": path, "random": 0}
    exact = ode_likelihood(model, x, trace="exact", **options)
    found = ode_likelihood(model, x, trace="hutchinson", **options)
    parts_add_up(found)
    paired = found.nats - exact.nats
    error = float(paired.std()) / math.sqrt(len(x))
    assert float(paired.mean()) < 2 * error
    naive = torch.logsumexp(found.samples, 1) - math.log(8) - exact.nats
    assert float(naive.mean()) > 4 * float(naive.std()) / math.sqrt(len(x))


# ---------------------------------------------------------------- a data set


def same(one: Any, other: Any) -> None:
    """Equal to the last bit."""
    assert one.to_dict() == other.to_dict()
    assert torch.equal(one.per_example, other.per_example)
    assert torch.equal(one.marks, other.marks)


def quietly(model: ScoreModel, x: Any, **options: Any) -> Any:
    return evaluate_ode(model, x, quiet=True, **{"rtol": 1e-3, "atol": 1e-3, **options})


@pytest.mark.parametrize("options", [{}, {"draws": 3, "trace": "hutchinson"}])
def test_an_example_does_not_depend_on_its_batch(options: dict[str, Any]) -> None:
    """But for the order of sums in the solver; and its figure is that of one batch."""
    x, model = pixels(), build(process=ornstein.cld())
    whole = quietly(model, x, **options)
    for other in (
        quietly(model, x, batch_size=3, **options),
        quietly(model, list(x.split(7)), **options),
    ):
        torch.testing.assert_close(other.per_example, whole.per_example, rtol=1e-12, atol=1e-12)
    same(quietly(model, x, limit=11, **options), quietly(model, x[:11], **options))
    found = ode_likelihood(
        model, x[3:9], path=Flow(model, rtol=1e-3, atol=1e-3, **options).path(x),
        random=Counted(0, torch.arange(3, 9)), **options,
    )  # fmt: skip
    torch.testing.assert_close(found.bits_per_dim, whole.per_example[3:9], rtol=1e-12, atol=1e-12)


def test_the_figures_of_a_data_set() -> None:
    x, model = pixels(), build()
    found = quietly(model, x)
    each = found.per_example
    assert found.bits_per_dim == pytest.approx(float(each.mean()), rel=1e-14)
    assert found.standard_error == pytest.approx(float(each.std()) / math.sqrt(len(x)), rel=1e-12)
    assert found.prior + found.flow + found.reconstruction == pytest.approx(found.bits_per_dim)
    bound = ornstein.evaluate(model, x, draws=64, quiet=True)
    difference, error = found.difference(bound)
    assert difference == pytest.approx(found.bits_per_dim - bound.bits_per_dim, rel=1e-9)
    assert error < math.hypot(found.standard_error, bound.standard_error)
    less = quietly(model, x, limit=20).difference(bound)[0]
    assert less == pytest.approx(float((each - bound.per_example)[:20].mean()), rel=1e-9)
    with pytest.raises(ValueError, match="not the same can't be paired"):
        found.difference(ornstein.evaluate(model, pixels(seed=1), quiet=True))
    assert f"{found.evaluations} network evaluations" in found.line and "exact trace" in found.line


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    """What was done is not done again, and the figure is the same to the last bit."""
    x = pixels()
    whole = quietly(build(), x, batch_size=8)
    counted = Bent()
    path = Flow(build(counted), rtol=1e-3, atol=1e-3).path(x)
    looks = len(counted.sizes)
    stop = Bent(stop_at=looks + 2 * path.evaluations + 3)
    with pytest.raises(KeyboardInterrupt):
        quietly(build(stop), x, batch_size=8, folder=tmp_path, save_every=1e9)
    network = Bent()
    again = quietly(build(network), x, batch_size=8, folder=tmp_path)
    assert network.calls == path.evaluations * (len(x) - 16)  # nor are the steps chosen again
    same(again, whole)
    assert np.load(tmp_path / "steps.npz")["times"].tolist() == path.times.tolist()
    with pytest.raises(ValueError, match="another evaluation"):
        quietly(build(), x, folder=tmp_path, draws=2)
    with pytest.raises(ValueError, match="is not what it was"):
        quietly(build(), pixels(seed=1), folder=tmp_path)


def test_the_cost_is_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    x, network = pixels(), Bent()
    found = evaluate_ode(build(network), x, rtol=1e-3, atol=1e-3, limit=30)
    cost, line = capsys.readouterr().out.splitlines()
    assert line == found.line
    assert f"{found.evaluations} network evaluations" in cost and "30 examples" in cost
    assert "6 backward passes" in cost  # the exact trace, of six coordinates


# ---------------------------------------------------------------- mistakes


def test_a_learned_process_and_training_mode() -> None:
    """Nothing is left behind: no gradient, no mode, no hook."""
    model = build(process=ornstein.learned(1)).train()
    found = ode_likelihood(model, pixels(4), rtol=1e-3, atol=1e-3, random=0)
    assert not found.nats.requires_grad
    quietly(model, pixels(4))
    assert model.network.training
    assert not model.network._forward_hooks
    assert all(p.grad is None for p in model.parameters())


class Detached(nn.Module):
    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return x.detach().tanh()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trace": "trace"}, "trace='trace'; expected 'exact'"),
        ({"probes": 0}, "probes=0"),
        ({"draws": 0}, "draws=0"),
        ({"draws": 2, "probes": 1, "trace": "hutchinson"}, "would not be a bound"),
        ({"rtol": 0.0}, "rtol=0.0; expected a positive number"),
        ({"method": "rk4"}, "does not estimate its error"),
        ({"random": "seed"}, "random='seed'"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ode_likelihood(build(), pixels(4), **options)


def test_more_mistakes() -> None:
    x = pixels(4)
    with pytest.raises(ValueError, match="carries no gradient"):
        ode_likelihood(build(Detached()), x)
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        ode_likelihood(build(), x)
    path = Flow(build(), rtol=1e-3, atol=1e-3).path(x)
    with pytest.raises(ValueError, match="expected a path of the same model"):
        ode_likelihood(build(process=ornstein.cld()), x, path=path)
    with pytest.raises(ValueError, match=r"expected ornstein\.ScoreModel"):
        evaluate_ode(Exponential(3), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole pixels"):
        ode_likelihood(build(), x.double())
