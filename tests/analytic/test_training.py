"""The training loop against what it must compute: written out by hand, step by step."""

from __future__ import annotations

import gc
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ornstein
from ornstein import Counted, Objective, Optimiser, ScoreModel, Training, Watch, compiling, fit
from ornstein.data import Dataset, Split, Stream
from ornstein.networks import MLP
from ornstein.terms import natural_times
from ornstein.training import Diverged, preset
from ornstein.training.keeping import run_record
from ornstein.training.run import _decisive
from tests.training_helpers import checkpoint, lines, resident, state, steps_kept

QUIET = Watch(log_every=1000, valid_every=0, sample_every=0, save_minutes=1e6)
BATCH = 8


def data(seed: int = 1, test: float | None = None) -> Dataset:
    """Real numbers: (64, 3) to train on."""
    generator = torch.Generator().manual_seed(seed)
    train, valid, tests = (
        Split(1 + 2 * torch.randn(count, 3, generator=generator)) for count in (64, 12, 12)
    )
    if test is not None:
        tests = Split(torch.full_like(tests.x, test))
    return Dataset("toy", train, valid, tests, None, "drawn")


def model(
    process: ornstein.Process | None = None, kind: str = "channel", dropout: float = 0.0
) -> ScoreModel:
    """A small network with weights that are not zero anywhere, so that all gradients are there."""
    torch.manual_seed(5)
    process = process or ornstein.vpsde()
    network = MLP((3,), process.n_vars if kind == "joint" else None, 0, 16, 1, dropout)
    nn.init.normal_(network.leave.weight, std=0.1)
    return ScoreModel(network, process, ornstein.Continuous(), kind, 1.0, 2.0)  # type: ignore[arg-type]


def learned() -> ornstein.Process:
    return ornstein.learned(1, learn_rates="shared", learn_v0_variance=True, seed=3)


def training(steps: int = 6, watch: Watch = QUIET, **options: Any) -> Training:
    defaults: dict[str, Any] = {"ema": 0.9, "optimiser": Optimiser(warmup=0)}
    return Training(steps=steps, batch=BATCH, watch=watch, **(defaults | options))


def losses(start: ScoreModel, options: Training, **more: Any) -> list[float]:
    return [step.loss for step in fit(start, more.pop("data", None) or data(), options, **more)]


def own(start: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in start.named_parameters()}


def by_hand(start: ScoreModel, step: int, seed: int = 0, **options: Any) -> Tensor:
    """The loss of a step as the docs have it: examples, times and noise by their place."""
    places = torch.arange(step * BATCH, (step + 1) * BATCH)
    x = Stream(data().train.x, seed).take(step * BATCH, BATCH)
    options = {"times": natural_times(start)} | options
    bound = ornstein.elbo(start, x, random=Counted(seed, places), **options)
    return bound.bits_per_dim.mean()


def gradients(start: ScoreModel, step: int = 0) -> dict[str, Tensor]:
    start.zero_grad()
    by_hand(start, step).backward()
    found = {n: p.grad.clone() for n, p in start.named_parameters() if p.grad is not None}
    start.zero_grad()
    return found


def norm(grads: dict[str, Tensor], kind: str) -> float:
    return math.sqrt(sum(g.double().square().sum() for n, g in grads.items() if n.startswith(kind)))


# ---------------------------------------------------------------- one step


def test_loss_is_the_bound_of_the_next_examples() -> None:
    start, other = model(), model()
    steps = fit(start, data(), training(4, seed=7))
    for number in range(4):
        other.load_state_dict(start.state_dict())  # as it is before the step
        step = next(steps)
        assert step.number == number + 1
        assert step.loss == pytest.approx(by_hand(other, number, seed=7).item(), rel=1e-12)
        assert step.epoch == (number + 1) * BATCH / 64
        assert sum(step.parts.values()) == pytest.approx(step.loss, rel=1e-12)


@pytest.mark.parametrize("kind", ["channel", "joint"])
def test_first_step_is_that_of_adam(kind: str) -> None:
    """−rate · g/(|g| + 1e-8): the learning rate, where the gradient is not tiny."""
    start = model(learned(), kind)
    grads, before = gradients(start), own(start)
    optimiser = Optimiser(lr=1e-3, process_lr=0.07, warmup=0, clip=0.0)
    next(fit(start, data(), training(optimiser=optimiser)))
    clear = 0
    for name, after in own(start).items():
        rate = 0.07 if name.startswith("process") else 1e-3
        grad = grads.get(name, torch.zeros_like(after))  # none where a rate cancels
        expected = -rate * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(after - before[name], expected, rtol=1e-4, atol=1e-7)
        clear += int((grad.abs() > 1e-6).sum())
    assert clear > 0.9 * sum(p.numel() for p in start.parameters())


def test_weight_decay_is_for_the_network_alone() -> None:
    ends = {}
    for decay in (0.0, 0.5):
        start = model(learned(), "joint")
        before = own(start)
        optimiser = Optimiser(lr=1e-2, process_lr=1e-2, warmup=0, weight_decay=decay)
        next(fit(start, data(), training(optimiser=optimiser)))
        ends[decay] = own(start)
    for name, free in ends[0.0].items():
        pulled = 0.5 * 1e-2 * before[name] if name.startswith("network") else torch.zeros(())
        torch.testing.assert_close(ends[0.5][name], free - pulled, rtol=1e-5, atol=1e-7)


def test_network_and_process_are_clipped_apart_and_norms_are_those_before(tmp_path: Path) -> None:
    start = model(learned(), "joint")
    grads = gradients(start)
    norms = {kind: norm(grads, kind) for kind in ("network", "process")}
    clip = math.sqrt(norms["network"] * norms["process"])  # one of them is above, one below
    optimiser = Optimiser(warmup=0, clip=clip)
    options = training(1, optimiser=optimiser, watch=replace(QUIET, log_every=1))
    (step,) = fit(start, data(), options, folder=tmp_path)
    for kind, size in norms.items():
        assert step.metrics is not None
        assert step.metrics[f"gradient_{kind}"] == pytest.approx(size, rel=1e-5)
    moments = load_file(checkpoint(tmp_path) / "training.safetensors")
    for name, grad in grads.items():
        factor = min(1.0, clip / norms[name.split(".")[0]])
        found = moments[f"exp_avg.{name}"] / (1 - 0.9)
        torch.testing.assert_close(found, factor * grad, rtol=2e-5, atol=1e-8)
    factors = [min(1.0, clip / size) for size in norms.values()]
    assert min(factors) < 0.9 and max(factors) == 1.0


@pytest.mark.parametrize("parts", [2, 8])
def test_parts_of_a_batch_have_its_gradient(parts: int, tmp_path: Path) -> None:
    """Float32 sums in another order: 1e-5 of the largest entry."""
    grads = gradients(model(learned(), "joint"))
    options = training(1, accumulate=parts, optimiser=Optimiser(warmup=0, clip=0.0))
    (step,) = fit(model(learned(), "joint"), data(), options, folder=tmp_path)
    assert step.loss == pytest.approx(by_hand(model(learned(), "joint"), 0).item(), rel=1e-6)
    moments = load_file(checkpoint(tmp_path) / "training.safetensors")
    for name, grad in grads.items():
        found = moments[f"exp_avg.{name}"] / (1 - 0.9)
        torch.testing.assert_close(found, grad, rtol=0, atol=1e-5 * grad.abs().max().item())


def test_losses_do_not_depend_on_the_parts() -> None:
    whole = losses(model(), training(12))
    for parts in (2, 4):
        assert losses(model(), training(12, accumulate=parts)) == pytest.approx(whole, rel=1e-5)


# ---------------------------------------------------------------- the seed


def test_seed_decides_everything() -> None:
    first = losses(model(dropout=0.3), training(6, seed=1))
    torch.rand(100)  # what the user draws in between changes nothing
    assert losses(model(dropout=0.3), training(6, seed=1)) == first
    other = losses(model(dropout=0.3), training(6, seed=2))
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_what_is_dropped_is_new_in_every_step_and_part() -> None:
    start, masks = model(dropout=0.5), []
    dropout = next(m for m in start.network.modules() if isinstance(m, nn.Dropout))
    dropout.register_forward_hook(
        lambda _, given, kept: masks.append((kept == 0) & (given[0] != 0))
    )
    runs = []
    for _ in range(2):
        masks.clear()
        for _ in fit(start, data(), training(3, accumulate=2, optimiser=Optimiser(lr=1e-12))):
            pass
        runs.append([mask.clone() for mask in masks])
    assert len(masks) == 3 * 2 * 2  # a part asks at a time and at the decoder's end
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
        assert 0.3 < one.double().mean() < 0.7
    for number, one in enumerate(masks):
        assert not any(torch.equal(one, other) for other in masks[:number])


def test_user_may_draw_in_the_loop() -> None:
    plain = losses(model(dropout=0.3), training())
    found = []
    for step in fit(model(dropout=0.3), data(), training()):
        torch.rand(7)
        found.append(step.loss)
    assert found == plain


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_watching_changes_no_number(ema: float) -> None:
    """Not even without an average, where it is the trained model that is looked at."""
    plain = losses(model(dropout=0.3), training(10, ema=ema))
    watch = Watch(2, 3, 8, 1, sample_every=4, samples=3, sample_steps=3)
    assert losses(model(dropout=0.3), training(10, watch, ema=ema)) == plain


def test_looks_at_a_learned_process_change_no_number() -> None:
    optimiser = Optimiser(process_lr=0.3, warmup=0)  # so large that panels are planned anew
    plain = losses(model(learned(), "joint"), training(10, optimiser=optimiser, ema=0.0))
    watch = Watch(2, 3, 8, 1, sample_every=4, samples=3, sample_steps=3)
    options = training(10, watch, optimiser=optimiser, ema=0.0)
    assert losses(model(learned(), "joint"), options) == plain


def test_grids_are_samples_of_the_averaged_model_from_fixed_noise() -> None:
    watch = replace(QUIET, sample_every=2, samples=5, sample_steps=4)
    seen = 0
    for step in fit(model(), data(), training(4, watch, seed=3)):
        if step.number % 2:
            assert step.samples is None
            continue
        # in batches of another size, with a float32 network: equal up to rounding
        options: dict[str, Any] = {"seed": 3, "shape": (3,), "batch_size": 2}
        again = ornstein.sample(step.averaged, 5, ornstein.Ancestral(4), **options)
        torch.testing.assert_close(step.samples, again, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(
            again,
            ornstein.sample(step.model, 5, ornstein.Ancestral(4), **options),
            rtol=1e-4,
            atol=1e-5,
        )
        seen += 1
    assert seen == 2


def test_grid_that_cannot_be_drawn_does_not_end_the_run() -> None:
    """A learned process may be far from its prior for a while: then there is no grid."""
    process = ornstein.learned(1, rate=0.5, seed=3)
    watch = replace(QUIET, sample_every=2, samples=5, sample_steps=4)
    with pytest.raises(ValueError, match="does not reach its prior"):
        ornstein.sample(model(process, "joint"), 2, shape=(3,))
    with pytest.warns(UserWarning, match="does not reach its prior"):
        steps = [*fit(model(process, "joint"), data(), training(4, watch))]
    assert [step.samples for step in steps] == [None] * 4


# ---------------------------------------------------------------- averages


@pytest.mark.parametrize("memory", [0.5, 0.999])
def test_average_is_the_weighted_mean_of_all_states(memory: float) -> None:
    """θ̄ₙ = Σₖ wₖ θₖ with wₖ = (1 − mₖ) Π_{j>k} mⱼ, of the process's parameters too."""
    start = model(learned(), "joint")
    states, keep = [own(start)], [1.0]
    optimiser = Optimiser(lr=1e-2, process_lr=1e-2, warmup=0)
    for step in fit(start, data(), training(30, ema=memory, optimiser=optimiser)):
        states.append(own(start))
        keep.append(min(memory, step.number / (step.number + 9)))
        averaged = step.averaged
    weights = [
        (1.0 if k == 0 else 1 - keep[k]) * math.prod(keep[k + 1 :]) for k in range(len(states))
    ]
    assert sum(weights) == pytest.approx(1, rel=1e-12)
    for name, mean in averaged.named_parameters():
        expected = sum(w * s[name].double() for w, s in zip(weights, states, strict=True))
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(dict(start.named_parameters())[name], states[-1][name])
        assert not mean.requires_grad
    assert {n for n, _ in averaged.named_parameters() if n.startswith("process")}


def test_checkpoint_holds_the_averages_and_the_trained_weights(tmp_path: Path) -> None:
    start = model(learned(), "joint")
    for step in fit(start, data(), training(5), folder=tmp_path):
        averaged = step.averaged
    found = ScoreModel.from_pretrained(checkpoint(tmp_path))
    trained = load_file(checkpoint(tmp_path) / "training.safetensors")
    for name, mean in averaged.named_parameters():
        assert torch.equal(dict(found.named_parameters())[name], mean)
        assert torch.equal(trained[f"model.{name}"], dict(start.named_parameters())[name])
    assert any(
        not torch.equal(mean, trained[f"model.{name}"]) for name, mean in found.named_parameters()
    )


def test_without_memory_the_average_is_the_model(tmp_path: Path) -> None:
    start = model()
    for step in fit(start, data(), training(3, ema=0.0), folder=tmp_path):
        assert step.averaged is start
    found = ScoreModel.from_pretrained(checkpoint(tmp_path))
    for name, value in start.named_parameters():
        assert torch.equal(dict(found.named_parameters())[name], value)


# ---------------------------------------------------------------- learning rates


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_learning_rates_follow_their_formulas(final: float) -> None:
    lr, warmup, steps = 3e-4, 5, 25
    constant = Optimiser(lr=lr, warmup=warmup)
    cosine = Optimiser(lr=lr, warmup=warmup, decay="cosine", final=final)
    rates = {
        name: [s.learning_rate for s in fit(model(), data(), training(steps, optimiser=optimiser))]
        for name, optimiser in (("constant", constant), ("cosine", cosine))
    }
    rise = [lr * min(1, (step + 1) / warmup) for step in range(steps)]
    assert rates["constant"] == pytest.approx(rise, rel=1e-12)
    assert rates["constant"][0] == pytest.approx(lr / warmup) and rates["constant"][-1] == lr
    fall = [
        final + (1 - final) * (1 + math.cos(math.pi * max(0, step - warmup) / (steps - warmup))) / 2
        for step in range(steps)
    ]
    expected = [a * b for a, b in zip(rise, fall, strict=True)]
    assert rates["cosine"] == pytest.approx(expected, rel=1e-12)
    assert rates["cosine"][warmup] == lr
    assert cosine.factor(steps, steps) == pytest.approx(final, abs=1e-15)  # where it goes to
    assert rates["cosine"][-1] < lr * (final + 0.01)


def test_learning_rates_without_a_rise() -> None:
    for optimiser in (Optimiser(warmup=0), Optimiser(warmup=0, decay="cosine")):
        assert optimiser.factor(0, 10) == 1.0
    assert Optimiser(warmup=0, decay="cosine").factor(5, 10) == pytest.approx(0.5)
    late = Optimiser(warmup=20, decay="cosine")  # longer than the run: it only rises
    assert [late.factor(step, 10) for step in range(10)] == pytest.approx(
        [(step + 1) / 20 for step in range(10)]
    )


def test_process_has_a_rate_of_its_own_that_rises_too() -> None:
    """With a constant gradient sign Adam's first steps are the rates themselves."""
    start = model(learned(), "joint")
    optimiser = Optimiser(lr=1e-9, process_lr=1e-2, warmup=4, betas=(0.0, 0.0), clip=0.0)
    before = own(start.process)
    for number, _ in enumerate(fit(start, data(), training(4, optimiser=optimiser)), 1):
        after = own(start.process)
        moved = torch.cat([(after[n] - before[n]).abs().flatten() for n in after])
        moved = moved[moved > 0]
        torch.testing.assert_close(
            moved, torch.full_like(moved, 1e-2 * number / 4), rtol=1e-3, atol=0
        )
        before = after


# ---------------------------------------------------------------- validation, and what is kept


def watched(steps: int = 12, keep: int = 1, **options: Any) -> Training:
    """With a rate so large that the best is not the last."""
    watch = replace(QUIET, valid_every=2, valid_examples=12, valid_draws=4, keep=keep)
    optimiser = Optimiser(lr=1.0, warmup=0)
    return training(steps, watch, ema=0.0, optimiser=optimiser, **options)


def test_best_on_validation_is_kept_and_recorded(tmp_path: Path) -> None:
    seen = {}
    for step in fit(model(), data(), watched(), folder=tmp_path):
        assert (step.validation is not None) == (step.number % 2 == 0)
        if step.validation is not None:
            seen[step.number] = step.validation
            # that of the averaged model on the validation split, with the seed of the run
            again = ornstein.evaluate(step.averaged, data().valid.x, draws=4, seed=0, quiet=True)
            assert step.validation.bits_per_dim == pytest.approx(again.bits_per_dim, rel=1e-12)
    best = min(seen, key=lambda number: seen[number].bits_per_dim)
    assert best < 12  # else this shows nothing
    assert steps_kept(tmp_path) == [best, 12]
    assert state(tmp_path)["best"] == {
        "step": best,
        "bits_per_dim": seen[best].bits_per_dim,
        "standard_error": seen[best].standard_error,
    }
    found = ScoreModel.from_pretrained(checkpoint(tmp_path, best))
    again = ornstein.evaluate(found, data().valid.x, draws=4, seed=0, quiet=True)
    assert again.bits_per_dim == pytest.approx(seen[best].bits_per_dim, rel=1e-12)
    noted = {n["step"]: n for n in lines(tmp_path) if "valid_bits_per_dim" in n}
    assert {n: line["valid_bits_per_dim"] for n, line in noted.items()} == {
        n: evaluation.bits_per_dim for n, evaluation in seen.items()
    }


def test_only_so_many_checkpoints_are_kept(tmp_path: Path) -> None:
    options = training(9, replace(QUIET, save_every=2, keep=3))
    newest = None
    for step in fit(model(), data(), options, folder=tmp_path):
        # what is written after a step is there at the next one
        assert step.checkpoint == newest
        done = list(range(2, step.number, 2))
        assert steps_kept(tmp_path) == done[-3:]
        if step.number % 2 == 0:
            newest = tmp_path / "checkpoints" / f"step-{step.number:08d}"
    assert steps_kept(tmp_path) == [6, 8, 9]


def test_nothing_depends_on_the_test_split(tmp_path: Path) -> None:
    found = []
    for number, test in enumerate((None, math.nan)):
        folder = tmp_path / str(number)
        told = losses(model(), watched(), data=data(test=test), folder=folder)
        weights = (checkpoint(folder) / "training.safetensors").read_bytes()
        notes = [{**line, "seconds": 0, "examples_per_second": 0} for line in lines(folder)]
        found.append((told, weights, notes, steps_kept(folder)))
    assert found[0] == found[1]


# ---------------------------------------------------------------- numbers that are none


class Breaking(nn.Module):
    """Returns NaN after so many steps; a step asks it twice, at a time and at the decoder's end."""

    def __init__(self, last: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.network, self.calls, self.last = MLP((3,), None, 0, 16, 1), 0, last

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        self.calls += self.training
        return (
            self.changed(self.network(x, logsnr))
            if self.calls > 2 * self.last
            else (self.network(x, logsnr))
        )

    def changed(self, output: Tensor) -> Tensor:
        return output * math.nan


class Growing(Breaking):
    """Wrong by far instead."""

    def changed(self, output: Tensor) -> Tensor:
        return output + 100.0


def breaking(last: int, process: ornstein.Process | None = None) -> ScoreModel:
    return ScoreModel(Breaking(last), process or ornstein.vpsde(), ornstein.Continuous())


LOOKS = {
    "log": replace(QUIET, log_every=5),
    "validation": replace(QUIET, valid_every=5),
    "samples": replace(QUIET, sample_every=5, samples=2, sample_steps=2),
    "a checkpoint": replace(QUIET, save_every=5),
}


@pytest.mark.parametrize("look", LOOKS)
def test_nan_is_an_error_with_the_step_and_the_place(look: str, tmp_path: Path) -> None:
    """Whatever looks at the model first, it is the step of the NaN that is named."""
    with pytest.raises(Diverged) as caught:
        losses(breaking(7), training(40, LOOKS[look]), folder=tmp_path)
    text = str(caught.value)
    assert text.startswith("step 8: the loss is nan, not a number to go on with; its largest error")
    assert " s = " in text and "where the kernel's condition is " in text
    if look in ("validation", "a checkpoint"):  # the first look is the best so far
        assert text.endswith("The last good checkpoint is that of step 5.")
        assert steps_kept(tmp_path) == [5]
    else:
        assert text.endswith("There is no checkpoint yet.")


def test_good_checkpoint_stays_and_can_be_gone_on_with(tmp_path: Path) -> None:
    options = training(12, replace(QUIET, log_every=2, save_every=3))
    truth = breaking(99)
    losses(truth, options, folder=tmp_path / "whole")
    with pytest.raises(Diverged, match="last good checkpoint is that of step 6"):
        losses(breaking(7), options, folder=tmp_path / "hit")
    assert steps_kept(tmp_path / "hit") == [3, 6]
    again = breaking(99)
    numbers = [s.number for s in fit(again, data(), options, folder=tmp_path / "hit")]
    assert numbers == list(range(7, 13))
    for name, value in truth.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert [line["step"] for line in lines(tmp_path / "hit")] == [2, 4, 6, 8, 10, 12]


def test_condition_of_the_kernel_is_that_of_the_process(tmp_path: Path) -> None:
    """The message's figures belong together: at this s the log SNR and the factor are these."""
    process = ornstein.alda()
    with pytest.raises(Diverged) as caught:
        losses(breaking(2, process), training(9, replace(QUIET, log_every=1)))
    words = str(caught.value).replace(",", "").replace(". Lower", " Lower").split()
    logsnr = float(words[words.index("SNR") + 1])
    s = float(words[words.index("s") + 2])
    condition = float(words[words.index("condition") + 2])
    kernel = process.transition(s)
    diagonal = kernel.cholesky.diagonal(dim1=-2, dim2=-1)
    assert kernel.logsnr.item() == pytest.approx(logsnr, abs=0.01)  # s is given with 4 digits
    assert (diagonal.max() / diagonal.min()).item() == pytest.approx(condition, rel=0.05)


def test_rate_that_is_far_too_large_diverges() -> None:
    optimiser = Optimiser(lr=1e6, warmup=0)
    with pytest.raises(Diverged, match=r"^step [0-9]+: "):
        losses(model(), training(400, replace(QUIET, log_every=10), optimiser=optimiser))


def test_loss_that_runs_away_is_an_error(tmp_path: Path) -> None:
    """Finite, but more than ten times its smallest, in a window of 50 steps."""
    start = ScoreModel(Growing(150), ornstein.vpsde(), ornstein.Continuous(), "channel", 1.0, 2.0)
    watch = replace(QUIET, log_every=7, save_every=100)
    with pytest.raises(Diverged, match=r"^step 200: .* last good checkpoint is that of step 100"):
        losses(start, training(400, watch), folder=tmp_path)


def test_noise_of_small_batches_is_no_divergence() -> None:
    x = 1 + 2 * torch.randn(64, 3)
    options = replace(training(200, replace(QUIET, log_every=1)), batch=2)
    assert len(list(fit(model(), x, options))) == 200


# ---------------------------------------------------------------- the loop as a user has it


def test_exactly_so_many_steps_and_the_last_once_more_when_it_is_done(tmp_path: Path) -> None:
    first = [*fit(model(), data(), training(5), folder=tmp_path)]
    assert [(s.number, s.total) for s in first] == [(n, 5) for n in range(1, 6)]
    before = (checkpoint(tmp_path) / "state.json").read_bytes()
    again = model()
    (step,) = fit(again, data(), training(5), folder=tmp_path)  # for its model; nothing is trained
    assert (step.number, step.loss, step.parts) == (5, first[-1].loss, first[-1].parts)
    trained = load_file(checkpoint(tmp_path) / "training.safetensors")
    for name, value in again.state_dict().items():
        assert torch.equal(trained[f"model.{name}"], value)
    for one, other in zip(step.averaged.parameters(), first[-1].averaged.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (checkpoint(tmp_path) / "state.json").read_bytes() == before
    assert steps_kept(tmp_path) == [5]


def test_leaving_the_loop_saves(tmp_path: Path) -> None:
    plain = losses(model(dropout=0.2), training(7), folder=tmp_path / "whole")
    found = []
    for step in fit(model(dropout=0.2), data(), training(7), folder=tmp_path / "left"):
        found.append(step.loss)
        if step.number == 4:
            break
    assert steps_kept(tmp_path / "left") == [4]
    found += losses(model(dropout=0.2), training(7), folder=tmp_path / "left")
    assert found == plain


def test_error_of_the_user_s_saves_too(tmp_path: Path) -> None:
    steps = fit(model(), data(), training(7), folder=tmp_path)
    with pytest.raises(ZeroDivisionError):
        for step in steps:
            1 / (step.number - 3)
    steps.close()
    assert steps_kept(tmp_path) == [3]


def test_mode_of_the_model_is_put_back() -> None:
    start = model().eval()
    for step in fit(start, data(), training(2)):
        assert step.model.training
        assert not step.averaged.training
    assert not start.training


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    watch = Watch(1, 2, 8, 1, sample_every=2, samples=2, sample_steps=2, save_every=1)
    steps = [*fit(model(), data(), training(4, watch))]
    assert not list(tmp_path.iterdir())
    assert all(step.metrics is not None for step in steps)
    assert [step.checkpoint for step in steps] == [None] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_data_may_be_a_plain_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    x = data().train.x.to(dtype)
    steps = [*fit(model(), x, training(3, Watch(valid_every=1, sample_every=0)), folder=tmp_path)]
    assert [step.validation for step in steps] == [None] * 3  # there is no such split
    if dtype == torch.float32:
        assert [step.loss for step in steps] == losses(model(), training(3))


def test_pixels_as_a_plain_tensor() -> None:
    torch.manual_seed(0)
    x = torch.randint(256, (32, 4), dtype=torch.uint8)
    start = ScoreModel(MLP((4,), None, 0, 16, 1), ornstein.cld(), ornstein.Discrete(256))
    assert [step.number for step in fit(start, x, training(3))] == [1, 2, 3]


def test_more_steps_may_be_asked_for_later(tmp_path: Path) -> None:
    watch = replace(QUIET, log_every=3, valid_every=3, valid_examples=8)
    plain = losses(model(dropout=0.2), training(12, watch), folder=tmp_path / "whole")
    found = []
    for steps in (6, 12):
        found += losses(model(dropout=0.2), training(steps, watch), folder=tmp_path / "more")
    assert found == plain
    for name in ("training.safetensors", "model.safetensors"):
        one, other = (checkpoint(tmp_path / folder) / name for folder in ("whole", "more"))
        assert one.read_bytes() == other.read_bytes()
    noted = [
        [{**line, "seconds": 0, "examples_per_second": 0} for line in lines(tmp_path / folder)]
        for folder in ("whole", "more")
    ]
    assert noted[0] == noted[1]
    with pytest.raises(ValueError, match=r"training.steps: before 12, now 9"):
        fit(model(dropout=0.2), data(), training(9, watch), folder=tmp_path / "more")
    falling = Optimiser(warmup=0, decay="cosine")
    losses(model(), training(4, optimiser=falling), folder=tmp_path / "cosine")
    with pytest.raises(ValueError, match=r"training.steps: before 4, now 8"):
        fit(model(), data(), training(8, optimiser=falling), folder=tmp_path / "cosine")


def test_watch_for_divergence_goes_on_where_it_was(tmp_path: Path) -> None:
    """It looks at windows of steps, and an interruption within one must not shift them."""
    for _ in fit(model(), data(), training(120), folder=tmp_path / "whole"):
        pass
    for step in fit(model(), data(), training(120), folder=tmp_path / "left"):
        if step.number == 70:
            break
    for _ in fit(model(), data(), training(120), folder=tmp_path / "left"):
        pass
    whole, left = (state(tmp_path / name) for name in ("whole", "left"))
    assert whole["first"] is not None and whole["smallest"] < whole["first"]
    assert {k: left[k] for k in ("first", "smallest")} == {
        k: whole[k] for k in ("first", "smallest")
    }
    one, other = (checkpoint(tmp_path / n) / "training.safetensors" for n in ("whole", "left"))
    assert one.read_bytes() == other.read_bytes()


def test_mistakes_are_named() -> None:
    for call, words in (
        (lambda: fit(nn.Linear(1, 1), data()), r"type Linear; expected ornstein.ScoreModel"),  # type: ignore[arg-type]
        (lambda: fit(model(), [1, 2]), r"type list; expected a Dataset"),  # type: ignore[arg-type]
        (lambda: fit(model(), data(), {"steps": 3}), r"expected ornstein.Training\(steps"),  # type: ignore[arg-type]
        (lambda: fit(model(), torch.randn(8, 4, 4), training()), r"does not fit|was built for"),
        (lambda: fit(model(), data(), training(accumulate=3)), "multiple of 3, such as 9"),
        (lambda: fit(model().requires_grad_(False), data(), training()), "something to train"),
    ):
        with pytest.raises(ValueError, match=words):
            next(call())


# ---------------------------------------------------------------- that it learns

COVARIANCE = torch.tensor([[1.0, 0.45], [0.45, 0.25]], dtype=torch.float64)  # correlation 0.9
MEAN = torch.tensor([0.5, -1.0], dtype=torch.float64)


def gaussian(count: int, seed: int) -> Tensor:
    """Correlated: (count, 2) float32."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(count, 2, dtype=torch.float64, generator=generator)
    return (MEAN + white @ torch.linalg.cholesky(COVARIANCE).mT).float()


def plane(process: ornstein.Process, kind: str) -> ScoreModel:
    """A model that knows the mean and the deviation of each coordinate, but not their relation."""
    torch.manual_seed(0)
    network = MLP((2,), process.n_vars if kind == "joint" else None, 0, 32, 2)
    std = COVARIANCE.diagonal().sqrt()
    return ScoreModel(network, process, ornstein.Continuous(), kind, MEAN, std)  # type: ignore[arg-type]


def excess(start: ScoreModel) -> tuple[float, float]:
    """Bits per dimension above −log₂ p of the very same examples, before and after training …"""
    x = gaussian(2000, seed=2)
    law = torch.distributions.MultivariateNormal(MEAN, COVARIANCE)
    exact = -law.log_prob(x.double()).mean().item() / (2 * math.log(2))
    found = ornstein.evaluate(start, x, draws=8, quiet=True)
    return found.bits_per_dim - exact, found.draw_error


def taught(start: ScoreModel, steps: int, **options: Any) -> ScoreModel:
    optimiser = Optimiser(lr=1e-2, process_lr=1e-2, warmup=20, decay="cosine", clip=1.0)
    how = Training(steps, 256, ema=0.98, optimiser=optimiser, watch=QUIET, **options)
    for step in fit(start, gaussian(8192, seed=1), how):
        last = step.averaged
    return last


INDEPENDENT = -math.log2(1 - 0.9**2) / 4  # bits/dim that the correlation is worth: 0.599


@pytest.mark.parametrize(
    ("kind", "make", "left"),
    [
        pytest.param("channel", ornstein.vpsde, 0.02, id="channel"),
        pytest.param(
            "joint", lambda: ornstein.learned(1, seed=3), 0.05, id="learned", marks=pytest.mark.slow
        ),
    ],
)
def test_bound_reaches_the_entropy(kind: str, make: Any, left: float) -> None:
    """From 0.6 bits/dim above it to nearly nothing, and never below it."""
    start = plane(make(), kind)
    before, error = excess(start)
    assert before == pytest.approx(INDEPENDENT, abs=0.02 + 3 * error)  # the Gaussian answer
    after, error = excess(taught(start, 300))
    assert -3 * error < after < left


SIMPLE = {
    "mism": lambda *a, **k: -ornstein.mism(*a, **k).nats,
    "score_matching": ornstein.score_matching,
    "noise_prediction": ornstein.noise_prediction,
}


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "mism" else pytest.mark.long)
        for name in SIMPLE
    ],
)
def test_other_objectives_teach_the_same(objective: str) -> None:
    """Their own loss falls on examples never seen, and what they learn is a score: a good bound."""
    start = plane(ornstein.vpsde(), "channel")
    x, random = gaussian(1000, seed=4), Counted(9, torch.arange(1000))
    before = SIMPLE[objective](start, x, draws=4, random=random).mean().item()
    last = taught(start, 250, objective=Objective(objective))  # type: ignore[arg-type]
    after = SIMPLE[objective](last, x, draws=4, random=random).mean().item()
    assert after < before
    assert excess(last)[0] < INDEPENDENT / 2  # score matching looks at small noise most of all


def test_q_and_d_are_logged_as_they_are(tmp_path: Path) -> None:
    start = model(learned(), "joint")
    watch, optimiser = replace(QUIET, log_every=2), Optimiser(process_lr=0.1, warmup=0)
    seen = {}
    for step in fit(start, data(), training(6, watch, optimiser=optimiser), folder=tmp_path):
        process = start.process
        assert isinstance(process, ornstein.Diffusion)
        seen[step.number] = process.Q.tolist(), process.D.tolist()
        if step.metrics is not None:
            assert (step.metrics["Q"], step.metrics["D"]) == seen[step.number]
    noted = {line["step"]: (line["Q"], line["D"]) for line in lines(tmp_path)}
    assert noted == {n: seen[n] for n in (2, 4, 6)}
    assert seen[2] != seen[4] != seen[6]
    for Q, D in seen.values():
        assert torch.equal(torch.tensor(Q), -torch.tensor(Q).mT)
        assert torch.linalg.eigvalsh(torch.tensor(D)).min() >= 0


def test_metrics_are_means_since_the_last_line() -> None:
    steps = [*fit(model(), data(), training(7, replace(QUIET, log_every=3)))]
    for first, last in ((0, 3), (3, 6), (6, 7)):
        line = steps[last - 1].metrics
        assert line is not None and line["step"] == last
        mean = sum(step.loss for step in steps[first:last]) / (last - first)
        assert line["bits_per_dim"] == pytest.approx(mean, rel=1e-12)
        for key in ("prior", "diffusion", "reconstruction"):
            mean = sum(step.parts[key] for step in steps[first:last]) / (last - first)
            assert line[key] == pytest.approx(mean, rel=1e-12)
        assert line["epoch"] == pytest.approx(last * BATCH / 64)


# ---------------------------------------------------------------- precision, graphs, memory


@pytest.mark.parametrize("kind", ["channel", "joint"])
def test_bfloat16_is_close_to_float32(kind: str) -> None:
    """8 bits of the network's output are 0.4 %, and the losses are of the order of one."""
    process = learned if kind == "joint" else ornstein.vpsde
    full = losses(model(process(), kind), training(10))
    start = model(process(), kind)
    half = losses(start, training(10, precision="bfloat16"))
    assert half != full
    assert half == pytest.approx(full, rel=4e-3, abs=0.02)
    assert {p.dtype for p in start.network.parameters()} == {torch.float32}
    assert {p.dtype for p in start.process.parameters()} <= {torch.float64}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("channel", marks=pytest.mark.long),
        pytest.param("joint", marks=pytest.mark.long),
    ],
)
def test_compiled_is_eager(kind: str) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on the CPU")
    process = (lambda: ornstein.learned(1, seed=3)) if kind == "joint" else ornstein.vpsde
    eager = losses(model(process(), kind), training(20, compile="off"))
    compiled = losses(model(process(), kind), training(20, compile="on"))
    assert compiled == pytest.approx(eager, rel=1e-5)


class Mistaken(nn.Module):
    """What a compiler that is wrong makes of a loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self._orig_mod = loss

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        loss, told = self._orig_mod(0 * x, index)
        return loss, told


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_compiler_that_is_wrong_is_found_out(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step, before anything was done with its gradients; dropout draws as ever."""
    options = {"accumulate": accumulate}
    plain = losses(model(dropout=0.1), training(6, compile="off", **options))
    monkeypatch.setattr(compiling, "compiled", lambda loss, dynamic: Mistaken(loss))
    with pytest.warns(UserWarning, match="which is a mistake of torch .*; going on without"):
        found = losses(model(dropout=0.1), training(6, compile="on", **options))
    assert found[0] != plain[0]  # other values are dropped: the first ones were drawn before
    quiet = losses(model(), training(6, compile="off", **options))
    with pytest.warns(UserWarning, match="going on without"):
        assert losses(model(), training(6, compile="on", **options)) == quiet
    monkeypatch.setattr(compiling, "compiled", lambda loss, dynamic: loss)  # is right
    assert losses(model(dropout=0.1), training(6, compile="on", **options)) == plain


def living() -> int:
    """Tensors that Python knows of."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def check_memory(kind: str, steps: int, folder: Path) -> None:
    """After the first 200 steps: no more tensors, and less than 4 MiB, 5 kB a step."""
    process = learned() if kind == "joint" else ornstein.vpsde()
    network = MLP((3,), process.n_vars if kind == "joint" else None, 0, 128, 1)
    start = ScoreModel(network, process, ornstein.Continuous(), kind, 1.0, 2.0)  # type: ignore[arg-type]
    watch = replace(QUIET, log_every=50, save_every=100, valid_every=100, sample_every=100)
    watch = replace(watch, valid_examples=4, samples=2, sample_steps=2)
    if kind == "joint":  # a process on its way is not always near its prior
        watch = replace(watch, sample_every=0)
    counts, sizes = [], []
    for step in fit(start, data(), training(steps, watch), folder=folder):
        if step.number in (201, steps - 99):
            counts.append(living())
            sizes.append(resident())
    assert counts[0] == counts[1]
    assert sizes[1] - sizes[0] < 4 * 2**20


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        pytest.param("channel", 1000, marks=pytest.mark.long),
        pytest.param("joint", 250, marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow(kind: str, steps: int, tmp_path: Path) -> None:
    """In a process of its own: the heap of one that ran other tests moves by itself."""
    call = f"check_memory({kind!r}, {steps}, Path({str(tmp_path)!r}))"
    code = f"from pathlib import Path; from {__name__} import check_memory; {call}"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
def test_runs_from_before_a_choice_of_features(parametrisation: str) -> None:
    """A channel run goes on; a joint one does as what it was, and not as the other kind."""
    data = ornstein.data.load("digits")

    def decisive(bins_of: Any, old: bool = False) -> dict[str, Any]:
        base = preset("digits")
        modelling = replace(base.model, parametrisation=parametrisation, bins_of=bins_of)
        experiment = replace(base, model=modelling)
        model = experiment.build(data)
        record = run_record(model, data, experiment.training, experiment.to_record())
        if old:
            del record["experiment"]["model"]["bins_of"]
            record["model"].pop("features_of", None)
        return _decisive(record)

    before = decisive("z", old=True)
    assert before == decisive("z")
    assert (before == decisive("x")) == (parametrisation == "channel")
