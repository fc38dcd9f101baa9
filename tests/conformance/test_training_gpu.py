"""Training on a GPU computes what it computes on a CPU, eager and compiled, and can be resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ornstein
from ornstein.data import Dataset, Split
from ornstein.training import Experiment, Watch, fit, preset
from ornstein.training.loop import Job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = {
    "channel": ("channel", "vpsde", "guessed"),
    "joint-learned": ("joint", "learned-1", "guessed"),
    "joint-told": ("joint", "malda", "told"),
}


def experiment(case: str, compile_: str = "off", steps: int = 20) -> Experiment:
    base = preset("digits")
    parametrisation, process, known = CASES[case]
    watch = Watch(log_every=5, valid_every=0, sample_every=0, save_every=7)
    return replace(
        base,
        process=replace(base.process, process=process),
        model=replace(base.model, parametrisation=parametrisation, known_noise=known),
        training=replace(base.training, steps=steps, batch=32, compile=compile_, watch=watch),
    )


def losses(options: Experiment, device: str, folder: Path | None = None) -> list[float]:
    """Of all steps that are left."""
    data = options.data.load()
    model = options.build(data, torch.device(device))
    return [step.loss for step in fit(model, data, options.training, folder=folder)]


@pytest.fixture(autouse=True)
def full_float32() -> None:
    """Convolutions in TF32 would be another arithmetic."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_the_cpu(case: str) -> None:
    """To 1e-4: rounding of float32 sums, which twenty steps of Adam make larger."""
    wanted = losses(experiment(case), "cpu")
    assert losses(experiment(case), "cuda") == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str) -> None:
    wanted = losses(experiment(case), "cuda")
    assert losses(experiment(case, "on"), "cuda") == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("process", ["vpsde", "cld", "malda", "learned-2"])
@pytest.mark.parametrize("side", [28, 23])
def test_compiled_at_any_size(process: str, side: int) -> None:
    """Sizes that a compiler would like to pad: torch 2.11 then read other numbers than it wrote."""
    options = experiment("channel")
    options = replace(
        options,
        process=replace(options.process, process=process),
        model=replace(options.model, parametrisation="joint", bins="on"),
        training=replace(options.training, batch=16, steps=6),
    )
    pixels = torch.randint(0, 16, (64, 1, side, side), generator=torch.Generator().manual_seed(1))
    splits = [Split(part.to(torch.uint8)) for part in pixels.split([32, 16, 16])]
    data = Dataset("noise", *splits, 16, "drawn")
    found = []
    for how in ("off", "on"):
        model = options.build(data, torch.device("cuda"))
        with torch.no_grad():
            for p in model.network.parameters():  # that is zero in places
                p.add_(
                    0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)).cuda()
                )
        job = Job(model, data, replace(options.training, compile=how), None, None)
        model.train()
        found.append([job.step().loss for _ in range(6)])
        assert job.runner.captured == (how == "on")
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("precision, most", [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_two_hundred_steps_in_a_graph(precision: str, most: float) -> None:
    """The same curve; bfloat16 within what it differs from float32 by itself."""
    options = experiment("channel", steps=200)
    training = replace(options.training, batch=64, precision=precision)
    wanted = losses(replace(options, training=training), "cuda")
    found = losses(replace(options, training=replace(training, compile="on")), "cuda")
    assert found == pytest.approx(wanted, rel=most)


@pytest.mark.parametrize("case", CASES)
def test_a_step_becomes_a_graph(case: str) -> None:
    """In parts, with flips and clipping, and still the numbers of single operations."""
    options = experiment(case)
    options = replace(options, training=replace(options.training, accumulate=2, flips=True))
    data = options.data.load()
    found = []
    for how in ("off", "on"):
        training = replace(options.training, compile=how)
        model = options.build(data, torch.device("cuda"))
        job = Job(model, data, training, None, None)
        model.train()
        found.append([job.step().loss for _ in range(8)])
        assert job.runner.captured == (how == "on")
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("how", ["off", "on"])
@pytest.mark.parametrize("case", CASES)
def test_resumed(case: str, how: str, tmp_path: Path) -> None:
    whole = losses(experiment(case, how), "cuda")
    options = experiment(case, how)
    data = options.data.load()
    model = options.build(data, torch.device("cuda"))
    for step in fit(model, data, options.training, folder=tmp_path):
        if step.number == 11:
            break
    assert losses(options, "cuda", tmp_path) == pytest.approx(whole[11:], rel=1e-5)


def test_bfloat16_is_close() -> None:
    """It keeps 3 digits of what the network computes."""
    options = experiment("channel")
    half = replace(options, training=replace(options.training, precision="bfloat16"))
    assert losses(half, "cuda") == pytest.approx(losses(options, "cuda"), rel=3e-2)


def test_samples_are_those_of_the_cpu() -> None:
    options = experiment("channel")
    data = options.data.load()
    model = options.build(data)
    trained = [step.averaged for step in fit(model, data, options.training)][-1]
    here = ornstein.sample(trained, 8, ornstein.Ancestral(10), seed=3)
    there = ornstein.sample(trained.cuda(), 8, ornstein.Ancestral(10), seed=3).cpu()
    assert (here.int() - there.int()).abs().max() <= 1  # a level, where rounding decides
    assert (here == there).float().mean() > 0.99
