"""The law of a solver's samples in closed form, and the process that is learned from it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import (
    Ancestral,
    Continuous,
    Discrete,
    EulerMaruyama,
    Exponential,
    Heun,
    PredictorCorrector,
    Process,
    ScoreModel,
    Spectrum,
    Splitting,
    learn_process,
    sample_law,
)
from ornstein.sampling import TableSolver, Way
from ornstein.sampling.collocation import gauss_rule
from ornstein.wayback.law import law_of, solver_times
from ornstein.wayback.learning import best_preset

F64 = torch.float64

PROCESSES: dict[str, Process] = {
    "vpsde": ornstein.vpsde(),
    "vesde": ornstein.vesde(sigma_max=20.0),
    "cld": ornstein.cld(),
    "psld": ornstein.psld(),
    "alda": ornstein.alda(),
    "malda": ornstein.malda(),
    "coupled": ornstein.Diffusion(
        [[0, -1, 0.3], [1, 0, -0.7], [-0.3, 0.7, 0]],
        [[0.3, 0.1, 0], [0.1, 0.5, 0], [0, 0, 0.2]],
        v0_coupling=[0.4, -0.2],
    ),
}
SOLVERS: dict[str, TableSolver] = {
    "ancestral": Ancestral(7),
    "euler": EulerMaruyama(60),
    "splitting": Splitting(40),
    "corrector": PredictorCorrector(5, corrections=2),
    "heun": Heun(6),
    "exponential-1": Exponential(6, order=1),
    "exponential-3": Exponential(8, order=3),
    "exponential-noise": Exponential(8, order=3, extrapolate="noise"),
    "exponential-half": Exponential(8, order=2, stochasticity=0.5),
}
WIDE = Spectrum.given(torch.logspace(math.log10(0.003), math.log10(4), 24, dtype=F64))


class Anisotropic(nn.Module):
    """The exact denoiser of N(mean, diag std²), as noise: σ(x̃ − m)/(ς² + σ²)."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        sigma = (-logsnr / 2).exp()[:, None]
        return sigma * (x - self.mean) / (self.std.square() + sigma.square())


def exact(process: Process, mean: Tensor, std: Tensor) -> ScoreModel:
    """The exact model, of float64."""
    scale = (mean.square() + std.square()).mean().sqrt()
    return ScoreModel(
        Anisotropic(mean, std), process, Continuous(), data_std=scale, precondition=False
    )


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_law_is_that_of_the_samples(name: str, solver: str) -> None:
    """The same walk as `sample`'s, with one unit of noise at a time: no Monte Carlo.

    Euler's steps amplify what is rounded on VESDE; the others agree to 1e-9.
    """
    process, way_back = PROCESSES[name], SOLVERS[solver]
    mean, std = torch.tensor([0.3, -0.6, 0.0], dtype=F64), torch.tensor([1.0, 0.1, 0.02], dtype=F64)
    model = exact(process, mean, std)
    spectrum, K = Spectrum.given(std, mean), process.n_vars
    level = model.truncation.standard_error  # type: ignore[union-attr]
    with torch.no_grad():
        found = sample_law(process, way_back, spectrum, level)
        grid = solver_times(process, way_back, spectrum, level)
        way = Way.of(model, grid, (3,), way_back.looks(grid))
        asked: list[tuple[str, int, int]] = []

        def silent(purpose: str, step: int, rows: int) -> Tensor:
            asked.append((purpose, step, rows))
            return torch.zeros(1, rows, 3, dtype=F64)

        list(way_back.prepare(way)(torch.zeros(1, K, 3, dtype=F64), silent))
        size = 1 + K + sum(rows for *_, rows in asked)
        first = {}
        place = 1 + K
        for purpose, step, rows in asked:
            first[purpose, step], place = place, place + rows

        def unit(purpose: str, step: int, rows: int) -> Tensor:
            noise = torch.zeros(size, rows, 3, dtype=F64)
            at = first[purpose, step]
            noise[at : at + rows] = torch.eye(rows, dtype=F64).unsqueeze(-1)
            return noise

        y = torch.zeros(size, K, 3, dtype=F64)
        y[1 : 1 + K] = torch.linalg.cholesky(process.prior_covariance).mT.unsqueeze(-1)
        *_, stop = way_back.prepare(way)(y, unit)
        x = way.look(len(way.times) - 1, stop.y).x
    torch.testing.assert_close(found.mean, x[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.std, (x[1:] - x[0]).norm(dim=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", ["ancestral", "splitting", "heun", "exponential-half"])
def test_real_samples_have_its_moments(solver: str) -> None:
    """4,000 samples: means within 4 standard errors s/√n, deviations within 4·s/√(2n)."""
    mean, std = torch.tensor([0.3, -0.6], dtype=F64), torch.tensor([1.0, 0.2], dtype=F64)
    process, n = PROCESSES["cld"], 4000
    model = exact(process, mean, std)
    level = model.truncation.standard_error  # type: ignore[union-attr]
    law = sample_law(process, SOLVERS[solver], Spectrum.given(std, mean), level)
    x = ornstein.sample(model, n, SOLVERS[solver], shape=(2,), raw=True, batch_size=n).to(F64)
    assert ((x.mean(0) - law.mean).abs() < 4 * law.std / math.sqrt(n)).all()
    assert ((x.std(0) - law.std).abs() < 4 * law.std / math.sqrt(2 * n)).all()


@pytest.mark.parametrize("solver", ["ancestral", "splitting", "corrector", "exponential-half"])
def test_its_gradient_is_the_slope(solver: str) -> None:
    """In the times and in Q and D, against central differences (error of order h², rounding/h)."""
    process = ornstein.Diffusion(
        ornstein.matrices.Skew(torch.tensor([[0.0, 0.3], [-0.5, 0.0]], dtype=F64)),
        ornstein.matrices.Semidefinite(torch.tensor([[0.5, 0.0], [0.2, 0.7]], dtype=F64)),
        learn_v0_variance=True,
    )
    way_back, spectrum = replace(SOLVERS[solver], steps=5), Spectrum.given([0.1, 0.7], [0.2, 0.0])
    grid = solver_times(process, way_back, spectrum, 0.01).clone().requires_grad_()
    numbers = [grid, *(p for p in process.parameters() if p.requires_grad)]
    slopes = torch.autograd.grad(
        law_of(process, way_back, grid, spectrum, 0.01).error("path").log(), numbers
    )
    for number, slope in zip(numbers, slopes, strict=True):
        for place in range(number.numel()):
            h = 1e-5 * max(abs(number.detach().view(-1)[place].item()), 0.01)
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    number.view(-1)[place] += sign * h
                    if not (number is grid and place == 0 and sign == 1):  # the horizon is fixed
                        law = law_of(process, way_back, grid, spectrum, 0.01)
                        values.append(law.error("path").log().item())
                    number.view(-1)[place] -= sign * h
            if len(values) == 2:
                measured = (values[0] - values[1]) / (2 * h)
                assert slope.reshape(-1)[place].item() == pytest.approx(
                    measured, rel=1e-4, abs=1e-5
                )


@pytest.mark.parametrize("solver", ["ancestral", "heun", "exponential-1", "splitting"])
@pytest.mark.parametrize("n_aux", [0, 1])
def test_what_is_learned_beats_the_best_preset(solver: str, n_aux: int) -> None:
    """On its best rule, in the error that was minimised, with five network evaluations."""
    way_back = SOLVERS[solver].within(5)
    learned = learn_process(WIDE, way_back, n_aux=n_aux, noise_level=0.01, iterations=25)  # type: ignore[arg-type]
    _, _, error = best_preset(WIDE, way_back, learned.metric, noise_level=0.01)  # type: ignore[arg-type]
    assert learned.error < error
    assert learned.solver.evaluations == 5
    assert learned.process.n_vars == 1 + n_aux


def test_a_sketch_made_before_is_reached() -> None:
    """The first-order deterministic step over deviations 0.003–4: VPSDE on its best times had an
    error of 0.207 at 5 evaluations and 0.170 at 10, if it may begin with less noise than the prior;
    both to 5 %, since its spectrum had other places."""
    for evaluations, known in ((5, 0.207), (10, 0.170)):
        solver = Exponential(order=1).within(evaluations)
        learned = learn_process(
            WIDE, solver, noise_level=1e-5, most_gap=9.0, iterations=300, metric="relative"
        )  # type: ignore[arg-type]
        assert learned.error == pytest.approx(known, rel=0.05)


def test_what_is_learned_can_be_used_and_kept(tmp_path: object) -> None:
    """The process goes into a channel model, which is saved and read; the times into a solver."""
    mean, std = torch.zeros(2, dtype=F64), torch.tensor([1.0, 0.2], dtype=F64)
    way = learn_process(Spectrum.given(std), Exponential(order=1).within(6), n_aux=1)  # type: ignore[arg-type]
    model = exact(ornstein.vpsde(), mean, std).with_process(way.process)
    n = 3000
    x = ornstein.sample(model, n, way.solver, shape=(2,), raw=True, batch_size=n).to(F64)
    assert ((x.std(0) - way.law.std).abs() < 4 * way.law.std / math.sqrt(2 * n)).all()
    kept = ScoreModel(ornstein.networks.MLP((2,)), way.process, Continuous())
    again = ScoreModel.from_pretrained(kept.save_pretrained(str(tmp_path)))
    s = torch.tensor([0.01, 0.3, 1.0], dtype=F64)
    torch.testing.assert_close(
        again.process.transition(s).covariance, way.process.transition(s).covariance
    )


@pytest.mark.parametrize("name", ["vpsde", "cld"])
def test_times_for_a_trained_model(name: str) -> None:
    """As `learn_process` with the model's process, data and truncation; the process is its own."""
    process = PROCESSES[name]
    model = ScoreModel(ornstein.networks.UNet.tiny(), process, Discrete(17), data_std=0.7)
    x = ornstein.data.load("digits").train.x
    solver = Exponential(5)
    way = ornstein.learn_times(model, x, solver)
    level = model.truncation.standard_error  # type: ignore[union-attr]
    spectrum = Spectrum.of(x, model.likelihood)
    by_hand = learn_process(spectrum, solver, process=process, noise_level=level)
    assert way.solver.grid == pytest.approx(by_hand.solver.grid, rel=1e-9)  # a level's last digit
    assert replace(way.solver, grid="curvature") == solver and way.process is process
    _, _, best = best_preset(spectrum, solver, noise_level=level)
    assert way.error < way.preset_error and (name != "vpsde" or way.error < best)
    with pytest.raises(ValueError, match="no closed form"):
        ornstein.learn_times(model, x, ornstein.ProbabilityFlow())  # type: ignore[arg-type]


def test_a_spectrum_is_the_data_s() -> None:
    """Of points with a known covariance and mean, and of pixels."""
    generator = torch.Generator().manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=generator))
    x = torch.randn(500, 3, dtype=F64, generator=generator)
    x = x - x.mean(0)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.mT @ x / len(x))).mT  # covariance 1, exactly
    std, mean = torch.tensor([2.0, 0.5, 0.1], dtype=F64), torch.tensor([0.3, -1.0, 0.2], dtype=F64)
    found = Spectrum.of((x * std + mean) @ turn.mT, Continuous())
    torch.testing.assert_close(found.std, std)
    torch.testing.assert_close(found.mean.abs(), mean.abs())
    assert found.scale == pytest.approx(math.sqrt((std**2 + mean**2).mean().item()))
    pixels = torch.tensor([[[0, 3]], [[1, 3]]], dtype=torch.uint8)
    of_pixels = Spectrum.of(pixels, Discrete(4))  # −¾ and −¼ in one, ¾ in the other
    torch.testing.assert_close(of_pixels.std, torch.tensor([0.25], dtype=F64))
    values = torch.tensor([-0.75, -0.25, 0.75, 0.75], dtype=F64)
    assert of_pixels.scale == pytest.approx(values.square().mean().sqrt().item())
    assert of_pixels.spread == pytest.approx(values.std(correction=0).item())
    assert of_pixels.brief(1).scale == of_pixels.scale


def test_a_brief_spectrum_stands_for_the_whole() -> None:
    """As many directions and the same mean squares of log-deviations to the width of a group."""
    brief = WIDE.brief(6)
    assert len(brief.std) == 6 and torch.equal(brief.weight, torch.full((6,), 4.0, dtype=F64))
    mean = (brief.weight * brief.std.log()).sum() / 24
    assert mean.item() == pytest.approx(WIDE.std.log().mean().item())
    process, solver = PROCESSES["vpsde"], SOLVERS["exponential-1"]
    whole, short = (
        sample_law(process, solver, s, 0.01).error("relative") for s in (WIDE, WIDE.brief(16))
    )
    assert short.item() == pytest.approx(whole.item(), rel=0.05)


def test_after_inference_mode() -> None:
    """What is kept between calls was not made for inference alone."""
    gauss_rule.cache_clear()
    process, spectrum = PROCESSES["cld"], Spectrum.given([1.0, 0.1])
    with torch.inference_mode():
        sample_law(process, Exponential(4), spectrum)
    assert learn_process(spectrum, Exponential(4), iterations=2).error > 0


def test_mistakes() -> None:
    spectrum = Spectrum.given([1.0, 0.1])
    with pytest.raises(ValueError, match=r"no closed form on Gaussian data; expected Ancestral"):
        learn_process(spectrum, ornstein.ProbabilityFlow())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected ornstein\.Spectrum\.of"):
        learn_process([1.0, 0.1], Ancestral(5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"metric='fid'; expected one of relative, path"):
        learn_process(spectrum, Ancestral(5), metric="fid")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_aux=-1"):
        learn_process(spectrum, Ancestral(5), n_aux=-1)
    with pytest.raises(ValueError, match="noise_level=0; expected a positive number"):
        learn_process(spectrum, Ancestral(5), noise_level=0)
    with pytest.raises(ValueError, match="most_gap=0"):
        learn_process(spectrum, Ancestral(5), most_gap=0)
    with pytest.raises(ValueError, match="steps=0"):
        learn_process(spectrum, Ancestral(5), 0)
    with pytest.raises(ValueError, match="positive standard deviations"):
        Spectrum.given([1.0, 0.0])
    with pytest.raises(ValueError, match="1 means for 2 standard deviations"):
        Spectrum.given([1.0, 0.1], [0.0])
