"""The flaws of `benchmarks.flaws` are what they are said to be; without them nothing changes."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ornstein
from benchmarks import ablation, rounding
from benchmarks.flaws import (
    EPSILON,
    JITTER,
    Flaws,
    InFloat32,
    cholesky,
    in_float32,
    times_of,
    vp_times,
    with_flaws,
    written,
)
from ornstein import Discrete, FixedTime, Linear, ScoreModel, Tweedie, elbo
from ornstein.likelihood import Likelihood
from ornstein.terms import natural_times
from ornstein.times import Span

F64 = torch.float64
ROOT = Path(__file__).resolve().parents[2]
NEAR = torch.linspace(EPSILON, 1.1 * EPSILON, 256, dtype=F64)  # times of a batch
SINGLE = torch.finfo(torch.float32).eps


class Zero(nn.Module):
    """Knows nothing beyond the Gaussian answer."""

    def forward(self, y: Tensor, logsnr: Tensor) -> Tensor:
        return torch.zeros_like(y)


def model(name: str) -> ScoreModel:
    """A joint model without a network; the paper's rate."""
    process = ornstein.PRESETS[name](rate=Linear(0.1, 10.0))
    return ScoreModel(Zero(), process, Discrete(16), "joint", data_mean=0.1, data_std=0.5)


def pixels(count: int = 256) -> Tensor:
    return torch.randint(16, (count, 1, 4, 4), generator=torch.Generator().manual_seed(1))


def options(**given: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {"data": "digits", "data_folder": None, "process": "alda", "steps": 3}
    usual |= {"batch": None, "draws": 2, "examples": 8, "seed": 0, "smoke": True, "out": Path("a")}
    return argparse.Namespace(**usual | given)


# ---------------------------------------------------------------- the kernel in float32


@pytest.mark.parametrize("given", ["x", "state"])
def test_the_formula_is_right_where_it_is_mild(given: Any) -> None:
    """CLD at s = 0.5: float32 with a few roundings."""
    exact = ornstein.cld()
    sound, found = exact.transition(0.5, given), InFloat32(exact).transition(0.5, given)
    for name in ("propagator", "cholesky", "covariance"):
        truth = getattr(sound, name)
        torch.testing.assert_close(getattr(found, name), truth, rtol=1e-4, atol=1e-4 * truth.max())


def test_alda_needs_more_digits_than_float32_has() -> None:
    """Given x and v₁ is known from it to more digits than float32 keeps of their covariance."""
    L = ornstein.alda().transition(EPSILON).cholesky
    part = L[1, 1] ** 2 / L[1].square().sum()  # of the variance of v₁, what x leaves open
    assert 0 < part < SINGLE


def test_the_factor_of_alda_fails_and_that_of_cld_does_not() -> None:
    failed = InFloat32(ornstein.alda()).fails(NEAR)
    assert failed.any()
    assert not InFloat32(ornstein.cld()).fails(NEAR).any()
    assert (ornstein.alda().transition(NEAR).error < 1e-8).all()  # no trouble in float64


def test_jitter_makes_the_noise_on_x_wrong_by_ten_million() -> None:
    """σ is √1e-4 in place of 2.6e-10, at s = 0.001, for every element of a batch."""
    sound = ornstein.alda()
    exact, found = sound.transition(NEAR), InFloat32(sound).transition(NEAR)
    r = exact.response.unsqueeze(-1)
    spoilt = exact.covariance + JITTER * torch.eye(3, dtype=F64)
    sigma = (r.mT @ torch.linalg.solve(spoilt, r)).flatten().rsqrt()
    torch.testing.assert_close(found.snr.rsqrt(), sigma, rtol=1e-4, atol=0.0)
    assert sigma[0].item() == pytest.approx(math.sqrt(JITTER), rel=1e-3)
    assert (found.snr.rsqrt() / exact.snr.rsqrt())[0].item() == pytest.approx(3.9e7, rel=0.01)


def test_one_element_spoils_its_batch() -> None:
    """What is added for a failing time is added to a harmless one."""
    process = InFloat32(ornstein.alda())
    bad = NEAR[process.fails(NEAR)][:1]
    mild = torch.full((1,), 0.2, dtype=F64)
    alone, both = process.transition(mild), process.transition(torch.cat([mild, bad]))
    added = both.covariance[0] - alone.covariance[0]
    torch.testing.assert_close(added, JITTER * torch.eye(3, dtype=F64), rtol=0.0, atol=1e-6)


def test_jitter_grows_until_it_works() -> None:
    """An eigenvalue of −0.005 needs 0.01: 1e-4 and 1e-3 are tried before."""
    matrix = torch.diag(torch.tensor([1.0, -0.005])).unsqueeze(0)
    factor, added = cholesky(matrix)
    assert added == pytest.approx(0.01)
    torch.testing.assert_close(factor @ factor.mT, matrix + 0.01 * torch.eye(2))
    with pytest.raises(ValueError, match="expected finite numbers"):
        cholesky(matrix * math.nan)


def test_a_process_without_one_clock_is_refused() -> None:
    with pytest.raises(ValueError, match="one clock"):
        InFloat32(ornstein.vesde())


# ---------------------------------------------------------------- VPSDE's times


def test_vp_density() -> None:
    """b/(1 − exp(−∫b)) over its integral on [ε, T], which is log(exp ∫b − 1)."""
    process = ornstein.alda(rate=Linear(0.1, 10.0))
    start = torch.tensor(EPSILON, dtype=F64)
    count = 200_000
    u = (torch.arange(count, dtype=F64) + 0.5) / count
    s, weight = vp_times(process).place(u, Span(process, start))

    def clock(at: Tensor) -> Tensor:
        return 0.1 * at + 9.9 * at**2 / 2

    norm = clock(torch.ones((), dtype=F64)).expm1().log() - clock(start).expm1().log()
    density = (0.1 + 9.9 * s) / -torch.expm1(-clock(s)) / norm
    assert (weight * density).mean().item() == pytest.approx(1.0, abs=1e-4)  # ∫ density ds
    assert weight.mean().item() == pytest.approx(1 - EPSILON, abs=1e-4)  # ∫ ds
    # between the nodes of its table the density is even in log s
    torch.testing.assert_close(1 / weight, density, rtol=0.05, atol=0.0)


# ---------------------------------------------------------------- the bound term by term


def sampled(
    found: ScoreModel, x: Tensor, likelihood: Likelihood, flaws: Flaws, draws: int
) -> tuple[float, float]:
    """Mean and its error over draws of the mean over x, in nats."""
    flawed, times = with_flaws(found, flaws), times_of(found, flaws)
    values = [written(flawed, x, likelihood, times).nats.mean() for _ in range(draws)]
    both = torch.stack(values)
    return both.mean().item(), both.std().item() / math.sqrt(draws)


@pytest.mark.parametrize("likelihood", [Discrete(16), Tweedie(16)], ids=["discrete", "tweedie"])
@pytest.mark.parametrize("flaw", ["none", "time", "density"])
@pytest.mark.parametrize("name", ["cld", "alda"])
def test_the_terms_add_up(name: str, flaw: str, likelihood: Likelihood) -> None:
    """With an exact kernel, wherever it is truncated and times are drawn, it is the same bound.

    Without a network the library's error is the Gaussian's, whose noise its control takes away.
    """
    sound, x, flaws = model(name), pixels(), ablation.CASES[flaw]
    cut = FixedTime(EPSILON) if flaws.time else None
    bound = elbo(sound, x, draws=64, likelihood=likelihood, truncation=cut, random=0, control=True)
    exact = bound.controlled(torch.ones_like(bound.errors)).nats.mean().item()
    mean, error = sampled(sound, x, likelihood, flaws, 64)
    assert abs(mean - exact) < 4 * error
    assert error < (1.5 if flaws.time else 0.6)  # nats of 16 coordinates, in terms of hundreds


@pytest.mark.parametrize("likelihood", [Discrete(16), Tweedie(16)], ids=["discrete", "tweedie"])
def test_a_float32_kernel_that_does_not_fail_changes_little(likelihood: Likelihood) -> None:
    """CLD truncated at its noise level, the same draws: all parts to float32's rounding.

    Times are even, since large weights would blow the rounding up.
    """
    sound, x = model("cld"), pixels()
    flawed, times = with_flaws(sound, Flaws(kernel=True)), ornstein.Uniform()
    assert isinstance(flawed.process, InFloat32)
    both = []
    for one in (sound, flawed):
        torch.manual_seed(3)
        both.append(written(one, x, likelihood, times))
    for part in ("prior", "known", "error", "end"):
        truth = getattr(both[0], part)
        torch.testing.assert_close(
            getattr(both[1], part), truth, rtol=1e-3, atol=1e-3 * truth.abs().max().item()
        )


def test_scaling_shrinks_the_integral_alone() -> None:
    sound, x = model("cld").with_truncation(FixedTime(0.25)), pixels()
    both = []
    for scaled in (False, True):
        torch.manual_seed(3)
        both.append(written(sound, x, Discrete(16), natural_times(sound), scaled))
    for part, factor in (("prior", 1.0), ("known", 0.75), ("error", 0.75), ("end", 1.0)):
        torch.testing.assert_close(getattr(both[1], part), factor * getattr(both[0], part))


# ---------------------------------------------------------------- states in float32


@pytest.mark.parametrize("name", ["vpsde", "cld", "alda"])
def test_states_in_float64_decode_as_they_should(name: str) -> None:
    """½‖ε‖² − ½‖ε − guess‖², whatever y₀ and v₀ are; ALDA at s = 0.01 has lost 6 of 16 digits."""
    process = ornstein.PRESETS[name]()
    K, generator = process.n_vars, torch.Generator().manual_seed(0)
    x = torch.randn((3, 5, 5), dtype=F64, generator=generator)
    inner = torch.randn((3, 2 * K - 1, 5, 5), dtype=F64, generator=generator)
    guess = torch.randn((3, K, 5, 5), dtype=F64, generator=generator)
    known = process.transition(torch.full((3,), 0.01, dtype=F64), given="state")
    found = in_float32(known, process.auxiliary.factor(), x, inner, guess)
    eps = inner[:, :K]
    truth = (eps**2 - (eps - guess) ** 2).flatten(1).sum(1) / 2
    torch.testing.assert_close(found, truth, rtol=0.0, atol=1e-3 if name == "alda" else 1e-8)


def test_rounding_follows_the_spacing_of_float32() -> None:
    """From 2 to 4 it is twice that from 1 to 2, and what ALDA's decoder makes of it four times."""
    process = ornstein.alda(rate=Linear(0.1, 10.0))
    large = 2 + 2 * torch.rand((64, 400), generator=torch.Generator().manual_seed(0))
    ratio = (
        rounding.cost(process, large, EPSILON)[0] / rounding.cost(process, large / 2, EPSILON)[0]
    )
    assert 3 < ratio < 5
    # a spacing of 2.4e-7, of which a part is off by one, over L of z: 2.6e-10
    L = process.transition(EPSILON, given="state").cholesky[0, 0].item()
    one = (2**-22 / L) ** 2 / 2 / math.log(2)
    assert 0.1 * one < rounding.cost(process, large, EPSILON)[0] < 10 * one


def test_when_rounding_costs_so_much() -> None:
    """Before the times that are found all cost more, after them less; float32 fails up to one."""
    process = rounding.processes()["alda, γ = ξ = 1"]
    pixels = torch.randint(256, (64, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    x = rounding.dequantised(pixels.byte(), 256)
    for above in (50.0, 500.0):  # costs fall like s⁻⁸, in jumps
        first, last = rounding.matched(process, x, above)
        assert first < last < 1.25 * first
        for part in torch.linspace(0.75, 0.95, 9).tolist():
            assert rounding.cost(process, x, part * first)[0] > above
            assert rounding.cost(process, x, last / part)[0] < above
    with pytest.raises(ValueError, match=r"costs 'cld' less than 123 .*expected a crossing.*Widen"):
        rounding.matched(rounding.processes()["cld"], x, 123.0)
    last = rounding.unfactored(process) or 0.0
    assert last > 0
    times = torch.tensor([last, 1.01 * last, 2 * last], dtype=torch.float64)
    assert InFloat32(process).fails(times).tolist() == [True, False, False]
    assert rounding.unfactored(rounding.processes()["cld"]) is None


def test_rounding_is_nothing_where_noise_is_large_enough() -> None:
    """CLD at s = 0.001 loses hundredths of a bit; ALDA at its noise level, nothing."""
    x = 4 * torch.rand((64, 400), generator=torch.Generator().manual_seed(0)) - 2
    rate = Linear(0.1, 10.0)
    assert 0 < rounding.cost(ornstein.cld(rate=rate), x, EPSILON)[0] < 0.1
    alda = ornstein.alda(rate=rate)
    assert abs(rounding.cost(alda, x, alda.time_of_noise(1 / 768).item())[0]) < 1e-3


def test_written_with_rounded_states() -> None:
    """The same draws: nothing but the end changes, by the cost of rounding; none at its ε."""
    sound, x = model("alda"), pixels(64)
    for cut, most in ((sound.truncation, 1e-2), (FixedTime(EPSILON), math.inf)):
        both = []
        for rounded in (False, True):
            torch.manual_seed(3)
            cut_model = sound.with_truncation(cut)
            both.append(written(cut_model, x, Tweedie(16), natural_times(sound), rounded=rounded))
        assert torch.equal(both[0].error, both[1].error)
        less = (both[0].end - both[1].end) / 16  # nats of a coordinate
        assert less.abs().max().item() < most
        assert most < math.inf or less.mean().item() > 1e4


# ---------------------------------------------------------------- without flaws


def test_none_is_evaluate() -> None:
    sound, x = model("alda"), pixels(32)
    truth = ornstein.evaluate(sound, x, draws=4, seed=5, quiet=True)
    found = ablation.sound(sound, x, 4, 5)
    assert found["bits_per_dim"] == truth.bits_per_dim
    assert found["standard_error"] == truth.standard_error
    same = ornstein.evaluate(with_flaws(sound, Flaws()), x, draws=4, seed=5, quiet=True)
    assert torch.equal(same.per_example, truth.per_example)
    u, span = torch.rand(9, dtype=F64), Span(sound.process, torch.tensor(0.1, dtype=F64), 0.5)
    for one, other in zip(
        times_of(sound, Flaws()).place(u, span), natural_times(sound).place(u, span), strict=True
    ):
        assert torch.equal(one, other)


def test_none_is_fit() -> None:
    """The same network, bit for bit."""
    run = ablation.experiment(options(), "none")
    data = run.data.load()
    found, _ = ablation.train(run, data, Flaws(), torch.device("cpu"))
    for step in ornstein.fit(run.build(data), data, run.training):
        truth = step.averaged.network.state_dict()
    for key, value in found.network.state_dict().items():
        assert torch.equal(value, truth[key])


def test_training_sees_the_flaws() -> None:
    """Each of them that matters at these times gives another network."""
    run = ablation.experiment(options(), "three")
    data, device = run.data.load(), torch.device("cpu")
    networks = []
    for case in ("none", "time", "density", "kernel-time", "plain"):
        trained, _ = ablation.train(run, data, ablation.CASES[case], device)
        networks.append(torch.cat([p.flatten() for p in trained.network.parameters()]))
        assert type(trained.process) is ornstein.Diffusion  # evaluated with a sound one
    for i, one in enumerate(networks):
        assert all(not torch.equal(one, other) for other in networks[:i])


# ---------------------------------------------------------------- files and tables


def test_a_case_is_kept_only_for_the_same_options(tmp_path: Path) -> None:
    given = options(out=tmp_path / "a.json")
    assert ablation.kept(given, "time") is None
    record: dict[str, Any] = {"settings": ablation.settings(given), "case": "time"}
    (tmp_path / "a-time.json").write_text(json.dumps(record))
    assert ablation.kept(given, "time") == record
    with pytest.raises(ValueError, match="Delete it"):
        ablation.kept(options(out=tmp_path / "a.json", steps=4), "time")
    record["settings"]["sources"] = "of another version"
    (tmp_path / "a-time.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="Delete it"):
        ablation.kept(given, "time")


def test_rows() -> None:
    figure = {"bits_per_dim": 1.234, "standard_error": 0.012, "deviation of one draw": 0.51}
    gone = {"bits_per_dim": None, "standard_error": None, "deviation of one draw": None}
    both = {"discrete": figure, "tweedie": gone, ablation.ROUNDED: gone}
    case = {"sound": figure, "reported": both}
    found = ablation.rows(
        {"cases": {"none": {**case, "alone": {"time": both}}, "three": {"diverged": "step 7"}}}
    )
    assert (
        found[2] == "| nothing | 1.234 ± 0.012 | 1.234 ± 0.012 | not finite | not finite | ±0.51 |"
    )
    assert found[3] == "| all three | diverged | | | | |"
    assert (
        found[-1] == "| truncated at s = 0.001 | 1.234 ± 0.012 | not finite | not finite | ±0.51 |"
    )


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("none", "three"), marks=pytest.mark.slow),
        pytest.param(tuple(ablation.CASES), marks=pytest.mark.long),
    ],
    ids=["two", "all"],
)
def test_cases_end_to_end(cases: tuple[str, ...], tmp_path: Path) -> None:
    """Within a minute of computing; a second call does none of them again."""
    out = tmp_path / "a.json"
    command = [sys.executable, "-m", "benchmarks.ablation", "--smoke", "--out", str(out)]
    command += ["--cases", ",".join(cases)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # of which others on the machine take none
    assert ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime < 60
    record = json.loads(out.read_text())
    assert tuple(record["cases"]) == cases
    for name, case in record["cases"].items():
        assert case["settings"]["steps"] == 3
        assert case["provenance"]["torch"] == str(torch.__version__)
        for part in (case["sound"], case["reported"]["discrete"], case["reported"]["tweedie"]):
            assert math.isfinite(part["bits_per_dim"])
        assert ("draws that failed" in case["reported"]["discrete"]) == ablation.CASES[name].kernel
        # of 16 draws none may have failed; of the times that they are from, many do
        assert case["kernel"]["given x"]["part of 0.001 … 0.01 that fails"] > 0.1
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("a-*.json")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("a-*.json")} == times
