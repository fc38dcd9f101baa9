"""`evaluate` as it is used: every kind of loader, interrupted, over processes, and with mistakes.

The networks here act on each number by itself. What an example costs then does not depend on the
batch it was in, not even in the last bit, and results are compared bit by bit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ornstein
from ornstein import (
    Continuous,
    Discrete,
    Evaluation,
    FromRate,
    Information,
    LogSNR,
    NoiseLevel,
    Process,
    ScoreModel,
    Tweedie,
    evaluate,
)
from tests.test_errors import message, says

ROOT = Path(__file__).resolve().parents[2]
LEVELS = 8
COUNT, DIMS = 40, 6
PILOT = COUNT * 8  # network evaluations that fit a proposal to this data
NUMBERS = ("bits_per_dim", "standard_error", "draw_error", "prior", "diffusion", "reconstruction")
WORDS = ("examples", "draws", "dims", "bound", "process", "parametrisation", "truncation")


class Bent(nn.Module):
    """A small network, elementwise; counts what it is asked and stops when told to."""

    def __init__(self, scale: float = 0.3, stop_at: int = 0, pause: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.sizes: list[int] = []
        self.stop_at, self.pause = stop_at, pause

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        if self.pause:
            time.sleep(self.pause)
        if len(self.sizes) + 1 == self.stop_at:
            raise KeyboardInterrupt
        self.sizes.append(len(x))
        return self.scale * torch.tanh(x)

    @property
    def calls(self) -> int:
        """Network evaluations so far."""
        return sum(self.sizes)


def build(network: nn.Module | None = None, process: Process | None = None) -> ScoreModel:
    """A model of pixels."""
    network = Bent() if network is None else network
    process = ornstein.vpsde() if process is None else process
    return ScoreModel(network, process, Discrete(LEVELS), data_std=0.6)


def pixels(count: int = COUNT, seed: int = 0) -> Tensor:
    """Examples: (count, 6)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LEVELS, (count, DIMS), generator=generator)


def quiet(model: ScoreModel, data: Any, **options: Any) -> Evaluation:
    return evaluate(model, data, quiet=True, **options)


def as_numbers(found: Evaluation) -> dict[str, Any]:
    """All of an evaluation, to the last bit, as JSON keeps it; None for NaN."""

    def known(values: list[float]) -> list[float | None]:
        return [None if math.isnan(value) else value for value in values]

    record = {key: getattr(found, key) for key in (*WORDS, "density")}
    record |= {key: known([getattr(found, key)])[0] for key in NUMBERS}
    record["per_example"] = known(found.per_example.tolist())
    record["curve"] = {key: known(value.tolist()) for key, value in vars(found.curve).items()}
    return record


def same(one: Evaluation, other: Evaluation) -> None:
    """Equal to the last bit."""
    assert as_numbers(one) == as_numbers(other)


def of_folder(folder: Path) -> dict[str, Any]:
    """result.json, read by the letter of JSON: without NaN and Infinity."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    text = (folder / "result.json").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=refuse)


def rows_in(folder: Path) -> int:
    """How many examples and passes are on disk."""
    files = [np.load(file) for file in sorted(folder.glob("rows-*.npz"))]
    return sum(len(file["index"]) for file in files)


# ------------------------------------------------------------------ how the data comes


class Loader:
    """A loader that is nothing but iterable, in batches of given sizes."""

    def __init__(self, x: Tensor, sizes: list[int], fail_at: int = -1) -> None:
        self.parts, self.fail_at = x.split(sizes), fail_at

    def __iter__(self) -> Iterator[Tensor]:
        for number, part in enumerate(self.parts):
            if number == self.fail_at:
                raise OSError("the disk is gone")
            yield part


def labelled(x: Tensor) -> TensorDataset:
    return TensorDataset(x, torch.arange(len(x)))


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: list(x.split(7)),
    "one batch": lambda x: [x],
    "ragged": lambda x: Loader(x, [1, 20, 0, 3, 16]),
    "tuples": lambda x: [(part, part.sum(1)) for part in x.split(9)],
    "lists": lambda x: [[part, None, "name"] for part in x.split(9)],
    "DataLoader": lambda x: DataLoader(x, batch_size=11),  # type: ignore[arg-type]
    "labels": lambda x: DataLoader(labelled(x), batch_size=6),
    "not contiguous": lambda x: x.T.contiguous().T,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_data_does_not_matter(form: str) -> None:
    x, model = pixels(), build()
    same(quiet(model, FORMS[form](x)), quiet(model, x))


@pytest.mark.parametrize("batch_size", [1, 3, 64, 1000])
@pytest.mark.parametrize("form", ["tensor", "ragged"])
def test_the_batch_size_does_not_matter(batch_size: int, form: str) -> None:
    x, model = pixels(), build(process=ornstein.cld())
    data = x if form == "tensor" else FORMS[form](x)
    same(quiet(model, data, batch_size=batch_size), quiet(model, x))


def test_matrices_in_a_network_round_and_no_more() -> None:
    """A real network adds in an order of its own: 1e-6 of float32, not 1e-2 of other draws."""
    network = nn.Sequential(nn.Linear(DIMS, 32), nn.SiLU(), nn.Linear(32, DIMS))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return self.inner(x)

    x, model = pixels(), build(Net())
    one, other = quiet(model, x), quiet(model, x, batch_size=5)
    torch.testing.assert_close(one.per_example, other.per_example, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_size", [8, 32])
def test_the_batch_size_is_kept_to(batch_size: int) -> None:
    """Also while a proposal is fitted: there are networks that fill the memory."""
    network = Bent()
    quiet(build(network), pixels(), draws=4, batch_size=batch_size)
    assert max(network.sizes) <= batch_size


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_real_numbers_of_any_type(kind: torch.dtype) -> None:
    """The same numbers cost the same in every type that holds them, up to float32's rounding."""
    model = ScoreModel(Bent(), ornstein.vpsde(), Continuous())
    x = torch.randn(COUNT, DIMS).to(kind)
    found, wide = quiet(model, x), quiet(model, x.float())
    torch.testing.assert_close(found.per_example, wide.per_example, rtol=1e-4, atol=1e-4)


def test_the_limit_takes_the_first_examples() -> None:
    x, model = pixels(), build()
    for data in (x, FORMS["ragged"](x)):
        same(quiet(model, data, limit=13), quiet(model, x[:13]))
    same(quiet(model, x, limit=1000), quiet(model, x))


def test_the_draws_are_the_number_of_network_evaluations() -> None:
    network = Bent()
    quiet(build(network), pixels(), draws=3)
    assert network.calls == PILOT + 3 * COUNT
    network = Bent()
    quiet(build(network), pixels(), draws=3, times=Information())
    assert network.calls == 3 * COUNT


def test_seeds_differ_and_repeat() -> None:
    x, model = pixels(), build()
    same(quiet(model, x, seed=7), quiet(model, x, seed=7))
    assert quiet(model, x, seed=7).bits_per_dim != quiet(model, x, seed=8).bits_per_dim


# ------------------------------------------------------------------ until an error is reached


def test_a_target_is_reached_and_no_more() -> None:
    x, model = pixels(), build()
    found = quiet(model, x, draws=4, target_error=0.05)
    assert found.draw_error <= 0.05
    assert found.draws % 4 == 0
    before = quiet(model, x, draws=4, target_error=1e-9, max_draws=found.draws - 4)
    assert before.draw_error > 0.05  # one pass less would not do
    assert before.draws == found.draws - 4


def test_a_target_that_is_met_at_once_takes_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    network = Bent()
    found = evaluate(build(network), pixels(), draws=3, target_error=100.0)
    assert found.draws == 3
    assert network.calls == PILOT + 3 * COUNT
    assert capsys.readouterr().out == found.line + "\n"
    same(found, quiet(build(), pixels(), draws=3))


def test_a_target_that_is_not_met_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(build(), pixels(), draws=3, target_error=1e-7, max_draws=8)
    assert found.draws == 6  # whole passes
    line, more = capsys.readouterr().out.splitlines()
    assert line == found.line
    assert "above 1e-07 after 6 draws" in more
    assert "max_draws" in more


def test_passes_are_averaged() -> None:
    """Two passes of two draws: new draws, and the mean over all of them."""
    x, model = pixels(), build()
    first = quiet(model, x, draws=2)
    both = quiet(model, x, draws=2, target_error=1e-9, max_draws=4)
    second = 2 * both.per_example - first.per_example
    assert both.draws == 4
    assert not torch.allclose(first.per_example, second)
    assert both.draw_error == pytest.approx(first.draw_error / math.sqrt(2), rel=0.5)


# ------------------------------------------------------------------ interrupted


def worker(role: str, folder: str) -> None:
    """What a process of its own does; see below."""
    if role == "slow":  # until it is killed
        quiet(build(Bent(pause=0.05)), pixels(), draws=2, batch_size=8, folder=folder, save_every=0)
    else:
        one_of_two(int(role), Path(folder))


def start(role: str, folder: Path) -> subprocess.Popen[str]:
    """A process that runs `worker`, with the same ornstein as here."""
    source = Path(ornstein.__file__).resolve().parents[1]
    paths = [str(source), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment["PYTHONIOENCODING"] = "utf-8"
    if sys.platform == "linux":  # two processes meet without a network
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    code = f"import {__name__} as here; here.worker({role!r}, {str(folder)!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
        cwd=ROOT,
    )


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    process = start("slow", tmp_path)
    try:
        limit = time.monotonic() + 60
        while rows_files(tmp_path) < 3 and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
    finally:
        process.kill()
    said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, said
    done = rows_in(tmp_path)
    assert 0 < done < COUNT
    network = Bent()
    again = quiet(build(network), pixels(), draws=2, batch_size=8, folder=tmp_path)
    assert network.calls == 2 * (COUNT - done)  # nor is the proposal fitted again
    same(again, quiet(build(), pixels(), draws=2, batch_size=8))


def rows_files(folder: Path) -> int:
    return len(list(folder.glob("rows-*.npz")))


def interrupted(folder: Path, stop_at: int, **options: Any) -> int:
    """How many rows a run leaves that is stopped in its so-manieth call of the network."""
    options = {"draws": 2, "batch_size": 8, **options}
    with pytest.raises(KeyboardInterrupt):
        quiet(build(Bent(stop_at=stop_at)), pixels(), folder=folder, **options)
    return rows_in(folder)


def test_an_interrupt_loses_nothing(tmp_path: Path) -> None:
    """Forty calls fit the proposal and each one after that does four examples."""
    assert interrupted(tmp_path, stop_at=45, save_every=1e9) == 4 * 4
    network = Bent()
    again = quiet(build(network), pixels(), draws=2, batch_size=8, folder=tmp_path)
    assert network.calls == 2 * (COUNT - 16)
    same(again, quiet(build(), pixels(), draws=2))


def test_many_interrupts_add_up(tmp_path: Path) -> None:
    """Each run does two chunks of four examples, and the last one all others."""
    counts = [interrupted(tmp_path, stop_at=43)]
    counts += [interrupted(tmp_path, stop_at=3) for _ in range(3)]
    assert counts == [8, 16, 24, 32]
    network = Bent()
    same(
        quiet(build(network), pixels(), draws=2, folder=tmp_path), quiet(build(), pixels(), draws=2)
    )
    assert network.calls == 2 * 8


def test_an_interrupt_in_a_later_pass_loses_nothing(tmp_path: Path) -> None:
    """A pass is ten calls; it stops in the third."""
    passes = {"target_error": 1e-9, "max_draws": 8}
    assert interrupted(tmp_path, stop_at=40 + 20 + 4, **passes) == 2 * COUNT + 3 * 4
    network = Bent()
    again = quiet(build(network), pixels(), draws=2, batch_size=8, folder=tmp_path, **passes)
    assert network.calls == 2 * (4 * COUNT - 2 * COUNT - 12)
    same(again, quiet(build(), pixels(), draws=2, **passes))


def test_more_passes_can_be_asked_for_later(tmp_path: Path) -> None:
    quiet(build(), pixels(), draws=2, folder=tmp_path)
    network, passes = Bent(), {"target_error": 1e-9, "max_draws": 8}
    more = quiet(build(network), pixels(), draws=2, folder=tmp_path, **passes)
    assert network.calls == 2 * 3 * COUNT
    same(more, quiet(build(), pixels(), draws=2, **passes))


def test_a_loader_that_fails_loses_nothing(tmp_path: Path) -> None:
    x, sizes = pixels(), [8] * 5
    times = Information()  # so that the loader is read once
    with pytest.raises(OSError, match="the disk is gone"):
        quiet(build(), Loader(x, sizes, fail_at=3), folder=tmp_path, times=times)
    assert rows_in(tmp_path) == 24
    network = Bent()
    again = quiet(build(network), Loader(x, sizes), folder=tmp_path, times=times)
    assert network.calls == 4 * (COUNT - 24)
    same(again, quiet(build(), x, times=times))


def test_a_network_that_fails_loses_nothing(tmp_path: Path) -> None:
    """Not a number in the example that is all sevens."""
    x = pixels()
    x[33] = LEVELS - 1

    class Fragile(Bent):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            bad = (x.detach().amin(1) > 0.5) & (logsnr > 4)
            return super().forward(x, logsnr) + torch.where(bad, math.nan, 0.0).unsqueeze(-1)

    Fragile.__name__ = "Bent"  # or it would be refused as another network
    options: dict[str, Any] = {"times": LogSNR(), "draws": 8, "batch_size": 8, "folder": tmp_path}
    text = message(lambda: quiet(build(Fragile()), x, **options))
    says(text, "example 33", "not a number", "finite")
    assert rows_in(tmp_path) == 33
    network = Bent()
    same(quiet(build(network), x, **options), quiet(build(), x, times=LogSNR(), draws=8))
    assert network.calls == 8 * (COUNT - 33)


def test_a_finished_evaluation_is_only_read(tmp_path: Path) -> None:
    first = quiet(build(), pixels(), folder=tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    network = Bent()
    same(quiet(build(network), pixels(), folder=tmp_path), first)
    same(first, quiet(build(), pixels()))  # and it is as if there were no folder
    assert network.calls == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_the_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "today"
    quiet(build(), pixels(), folder=str(folder))
    assert (folder / "result.json").exists()


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize("count", [1, COUNT])
def test_the_result_is_json(tmp_path: Path, draws: int, count: int) -> None:
    """Also where an error can't be known."""
    found = quiet(build(), pixels(count), draws=draws, folder=tmp_path)
    record = of_folder(tmp_path)
    assert record["bits_per_dim"] == found.bits_per_dim
    assert record["draws"] == draws
    assert record["examples"] == count
    assert (record["draw_error"] is None) == (draws == 1)
    assert (record["standard_error"] is None) == (count == 1)
    assert record["curve"]["bits"] == found.curve.bits.tolist()
    assert {"torch", "numpy", "python", "cpu", "commit", "date"} <= set(record["provenance"])


def test_an_evaluation_can_be_saved_elsewhere(tmp_path: Path) -> None:
    found = quiet(build(), pixels())
    found.save(tmp_path / "deep" / "result.json")
    assert of_folder(tmp_path / "deep")["diffusion"] == found.diffusion


# ------------------------------------------------------------------ another evaluation's folder


def joint() -> ScoreModel:
    return ScoreModel(Bent(), ornstein.vpsde(), Discrete(LEVELS), "joint", data_std=0.6)


def unconditioned() -> ScoreModel:
    return ScoreModel(Bent(), ornstein.vpsde(), Discrete(LEVELS), data_std=0.6, precondition=False)


def rated(slope: float) -> ScoreModel:
    return build(process=ornstein.vpsde(rate=FromRate(lambda s: 1 + slope * s)))


CHANGES: dict[str, tuple[Callable[[], ScoreModel], dict[str, Any], str]] = {
    "weights": (lambda: build(Bent(0.4)), {}, "model"),
    "moments": (
        lambda: ScoreModel(Bent(), ornstein.vpsde(), Discrete(LEVELS), data_std=0.5),
        {},
        "model",
    ),
    "process": (lambda: build(process=ornstein.cld()), {}, "process: 'vpsde' there, 'cld' now"),
    "constants": (lambda: build(process=ornstein.vpsde(rate=3.0)), {}, "model"),
    "horizon": (lambda: build(process=ornstein.vpsde(horizon=2.0)), {}, "model"),
    "parametrisation": (joint, {}, "parametrisation: 'channel' there, 'joint' now"),
    "precondition": (unconditioned, {}, "precondition: True there, False now"),
    "seed": (build, {"seed": 1}, "seed: 0 there, 1 now"),
    "draws": (build, {"draws": 5}, "draws: 4 there, 5 now"),
    "limit": (build, {"limit": 10}, "limit: None there, 10 now"),
    "times": (build, {"times": LogSNR()}, "times: 'fitted' there, \"LogSNR("),
    "likelihood": (build, {"likelihood": Tweedie(LEVELS)}, "likelihood: 'Discrete(8)' there"),
    "truncation": (build, {"truncation": NoiseLevel(0.1)}, "truncation: 'NoiseLevel("),
    "given": (build, {"given": "state"}, "given: 'x' there, 'state' now"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_evaluation_is_refused(change: str, tmp_path: Path) -> None:
    quiet(build(), pixels(), folder=tmp_path)
    kept = (tmp_path / "result.json").read_bytes()
    model, options, named = CHANGES[change]
    text = message(lambda: quiet(model(), pixels(), folder=tmp_path, **options))
    says(text, str(tmp_path), "another evaluation", named, "another folder")
    assert (tmp_path / "result.json").read_bytes() == kept


def test_another_rate_function_is_refused(tmp_path: Path) -> None:
    """A rate given as a function has no numbers to compare but its values."""
    quiet(rated(1.0), pixels(), folder=tmp_path)
    says(message(lambda: quiet(rated(5.0), pixels(), folder=tmp_path)), "another evaluation")


@pytest.mark.parametrize("done", ["part", "all"])
def test_other_data_is_refused(done: str, tmp_path: Path) -> None:
    if done == "all":
        quiet(build(), pixels(), draws=2, folder=tmp_path)
    else:
        interrupted(tmp_path, stop_at=43)
    x = pixels()
    x[3, 2] = (x[3, 2] + 1) % LEVELS
    text = message(lambda: quiet(build(), x, draws=2, folder=tmp_path))
    says(text, "example 3 is not what it was", "same order", "another folder")


def test_less_data_is_refused(tmp_path: Path) -> None:
    """Or evaluated; but the figure of 40 examples is not that of 10."""
    quiet(build(), pixels(), folder=tmp_path)
    try:
        found = quiet(build(), pixels()[:10], folder=tmp_path)
    except ValueError as error:
        says(str(error), "10", "40")
    else:
        assert found.examples == 10


def test_data_that_is_shuffled_between_passes_is_refused() -> None:
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(labelled(pixels()), batch_size=8, shuffle=True, generator=order)
    text = message(lambda: quiet(build(), loader, target_error=1e-9, max_draws=8))
    says(text, "is not what it was", "same order", "shuffling")


def test_data_that_is_augmented_between_runs_is_refused(tmp_path: Path) -> None:
    class Noisy:
        generator = torch.Generator().manual_seed(1)

        def __iter__(self) -> Iterator[Tensor]:
            yield torch.randint(LEVELS, (8, DIMS), generator=self.generator)

    says(message(lambda: quiet(build(), Noisy())), "not what it was", "random")  # the pilot saw it
    quiet(build(), Noisy(), folder=tmp_path, times=Information())
    text = message(lambda: quiet(build(), Noisy(), folder=tmp_path, times=Information()))
    says(text, "not what it was", "random")


@pytest.mark.parametrize("how", ["truncated", "empty", "other"])
def test_a_broken_file_of_rows_is_named(how: str, tmp_path: Path) -> None:
    """And without it, the evaluation is what it was."""
    whole = quiet(build(), pixels(), draws=2, batch_size=8, folder=tmp_path, save_every=0)
    file = sorted(tmp_path.glob("rows-*.npz"))[2]
    content = {"truncated": file.read_bytes()[:-100], "empty": b"", "other": b"some text"}[how]
    file.write_bytes(content)

    def again(network: nn.Module) -> Evaluation:
        return quiet(build(network), pixels(), draws=2, folder=tmp_path)

    says(message(lambda: again(Bent())), str(file), "can't be read", "Delete this file")
    file.unlink()
    network = Bent()
    same(again(network), whole)
    assert network.calls == 2 * 4  # the four examples of this file


def test_what_replaces_a_lost_file_takes_nothing_else_away(tmp_path: Path) -> None:
    """Files are only added: a third run finds all rows of the first and the second."""
    options: dict[str, Any] = {"draws": 2, "batch_size": 8, "folder": tmp_path, "save_every": 0}
    quiet(build(), pixels(), **options)
    sorted(tmp_path.glob("rows-*.npz"))[0].unlink()
    quiet(build(), pixels(), **options)
    assert rows_in(tmp_path) == COUNT
    network = Bent()
    quiet(build(network), pixels(), **options)
    assert network.calls == 0


@pytest.mark.parametrize("name", ["settings.json", "pilot.npz"])
def test_other_broken_files_are_named(name: str, tmp_path: Path) -> None:
    quiet(build(), pixels(), folder=tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:20])
    says(message(lambda: quiet(build(), pixels(), folder=tmp_path)), name)


# ------------------------------------------------------------------ two processes

PASSES: dict[str, Any] = {"draws": 2, "target_error": 1e-9, "max_draws": 6}
Two = tuple[Path, list[dict[str, Any]], list[str]]


def one_of_two(rank: int, folder: Path) -> None:
    """Evaluate as one of two processes, in several ways; write down what was found."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2
    )
    x, found = pixels(), {}
    batches = list(x.split(4))
    found["tensor"] = evaluate(build(), x, draws=2, batch_size=8)  # this one is printed
    found["quiet"] = quiet(build(process=ornstein.cld()), batches, draws=2)
    found["passes"] = quiet(build(), batches, **PASSES, folder=folder / "passes")
    found["repeated"] = quiet(build(), batches, **PASSES, folder=folder / "passes")
    found["idle"] = quiet(build(), [x], draws=2)
    network = Bent()
    found["begun by one"] = quiet(build(network), batches, draws=2, folder=folder / "by one")
    calls = network.calls
    stopped = Bent(stop_at=5)  # in the third call after the proposal, if it isn't found made
    with contextlib.suppress(KeyboardInterrupt):
        quiet(build(stopped), batches, draws=2, folder=folder / "by two")
    said = {}
    share = x[rank * COUNT // 2 : (rank + 1) * COUNT // 2]
    failing = Bent(stop_at=3 if rank == 1 else 0)
    for name, model, data in [("share", build(), share), ("failing", build(failing), x)]:
        try:
            quiet(model, data, draws=2, batch_size=8, times=Information())
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            said[name] = f"{type(error).__name__}: {error}"
    record = {name: as_numbers(value) for name, value in found.items()}
    text = json.dumps({"found": record, "calls": calls, "said": said, "sizes": stopped.sizes})
    (folder / f"rank-{rank}.json").write_text(text, encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    """The folder, what both processes found, and what they said."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = tmp_path_factory.mktemp("two")
    with pytest.raises(KeyboardInterrupt):
        quiet(build(Bent(stop_at=5)), list(pixels().split(4)), draws=2, folder=folder / "by one")
    both = [start(str(rank), folder) for rank in range(2)]
    try:
        said = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    records = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return folder, records, [out for out, _ in said]


WAYS: dict[str, tuple[Callable[[], ScoreModel], dict[str, Any]]] = {
    "tensor": (build, {"draws": 2, "batch_size": 8}),
    "quiet": (lambda: build(process=ornstein.cld()), {"draws": 2}),
    "passes": (build, PASSES),
    "repeated": (build, PASSES),
    "idle": (build, {"draws": 2}),
    "begun by one": (build, {"draws": 2}),
}


def of_both(two: Two, way: str, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one of two processes found, and what a single one does."""
    model, options = WAYS[way]
    return two[1][rank]["found"][way], as_numbers(quiet(model(), pixels(), **options))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_find_what_one_does(two: Two, way: str, rank: int) -> None:
    found, alone = of_both(two, way, rank)
    assert {**found, "curve": None} == {**alone, "curve": None}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_of_the_data_is_refused(two: Two, rank: int) -> None:
    """Nothing is silently left out or doubled."""
    text = two[1][rank]["said"]["share"]
    assert text.startswith("ValueError")
    says(text, "different data", "same loader", "DistributedSampler")


def test_one_that_fails_does_not_leave_the_other_waiting(two: Two) -> None:
    assert two[1][1]["said"]["failing"].startswith("KeyboardInterrupt")
    assert "another process" in two[1][0]["said"]["failing"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_find_the_curve_that_one_does(two: Two, way: str, rank: int) -> None:
    found, alone = of_both(two, way, rank)
    assert found["curve"] == alone["curve"]


def test_two_processes_share_what_one_left(two: Two) -> None:
    """Two batches of ten were done, and each of the others by one process."""
    calls = [record["calls"] for record in two[1]]
    assert sum(calls) == 2 * (COUNT - 8)
    assert min(calls) >= 2 * 12


def test_one_process_goes_on_where_two_were(two: Two) -> None:
    folder = two[0] / "by two"
    rows = rows_in(folder)
    sizes = [record["sizes"] for record in two[1]]
    assert all(len(each) == 4 for each in sizes)
    assert rows == 4 * sum(each.count(2 * 4) for each in sizes)  # all that each had done
    assert {file.name[:9] for file in folder.glob("rows-*")} == {"rows-0000", "rows-0001"}
    network = Bent()
    found = quiet(build(network), list(pixels().split(4)), draws=2, folder=folder)
    assert network.calls == 2 * (COUNT - rows)
    same(found, quiet(build(), pixels(), draws=2))


def test_one_process_reads_what_two_finished(two: Two) -> None:
    network = Bent()
    found = quiet(build(network), pixels(), **PASSES, folder=two[0] / "passes")
    assert network.calls == 0
    same(found, quiet(build(), pixels(), **PASSES))


def test_only_the_first_process_speaks(two: Two) -> None:
    assert two[2][0] == quiet(build(), pixels(), draws=2).line + "\n"
    assert two[2][1] == ""


# ------------------------------------------------------------------ what is printed


def test_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(build(process=ornstein.cld()), pixels())
    said = capsys.readouterr().out
    assert said == found.line + "\n" == str(found) + "\n"
    for words in ("bits/dim", "discrete bound", "cld", "channel", "4 draws × 40 examples"):
        assert words in said
    assert "truncated at standard error 0.0417" in said
    assert f"±{found.draw_error:.2g} from draws alone" in said
    assert "density" not in said
    match = re.match(r"(\d+\.(\d+)) ± (\d+\.(\d+)) bits/dim", said)
    assert match
    assert len(match[2]) == len(match[4])
    assert float(match[1]) == pytest.approx(found.bits_per_dim, abs=0.51 * 10 ** -len(match[2]))
    assert float(match[3]) == pytest.approx(found.standard_error, rel=0.05)  # two digits


def test_the_line_of_a_density() -> None:
    model = ScoreModel(Bent(), ornstein.vpsde(), Continuous(), data_std=0.6)
    line = quiet(model, torch.randn(16, 3), times=Information()).line
    assert "bits/dim of a density (continuous bound, vpsde, channel;" in line
    state = quiet(build(process=ornstein.cld()), pixels(), given="state")
    assert "given the state" in state.line


def test_the_line_of_one_example() -> None:
    found = quiet(build(), pixels(1))
    assert math.isnan(found.standard_error)
    assert "nan" not in found.line
    assert "4 draws × 1 example," in found.line


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(build(), pixels(), target_error=1e-9, max_draws=4)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (2.91304, 0.01234, "2.913 ± 0.012 bits/dim"),
        (2.91304, 0.00996, "2.9130 ± 0.0100 bits/dim"),
        (2.91304, 0.000031, "2.913040 ± 0.000031 bits/dim"),
        (12.3456, 0.3, "12.35 ± 0.30 bits/dim"),
        (-1.5, 2.5, "-1.50 ± 2.50 bits/dim"),
    ],
)
def test_digits(value: float, error: float, expected: str) -> None:
    found = quiet(build(), pixels())
    changed = {**vars(found), "bits_per_dim": value, "standard_error": error}
    assert Evaluation(**changed).line.startswith(expected)


def test_two_processes_are_compared_in_pairs() -> None:
    """The same network, draws and noise: what is left is where times are placed, and the ends."""
    model, x = build(), pixels(256)
    one, other = quiet(model, x), quiet(model.with_process(ornstein.cld()), x)
    difference, error = one.difference(other)
    paired = one.per_example - other.per_example
    assert difference == pytest.approx(one.bits_per_dim - other.bits_per_dim, abs=1e-12)
    assert error == pytest.approx(paired.std().item() / 16, rel=1e-12)
    assert error < 0.5 * math.hypot(one.standard_error, other.standard_error)
    assert abs(difference) < 3 * error + 1e-3  # the processes' own priors cost about 1e-4
    assert one.difference(one) == (0.0, 0.0)
    says(message(lambda: one.difference(quiet(model, x[:9]))), "256 and 9 examples", "same data")


# ------------------------------------------------------------------ what is left alone


class Parted(nn.Module):
    """A part that is trained, with dropout, and one that is frozen."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.drop, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5)
        self.scale, self.fail = nn.Parameter(torch.tensor(0.3)), fail
        self.frozen.eval()

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        if self.fail:
            raise RuntimeError("out of memory")
        return self.scale * torch.tanh(self.frozen(self.drop(x)))


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("fail", [False, True], ids=["done", "failed"])
def test_modes_are_restored(fail: bool) -> None:
    model = build(Parted(fail))
    before = flags(model)
    assert True in before
    assert False in before
    if fail:
        with pytest.raises(RuntimeError, match="out of memory"):
            quiet(model, pixels())
    else:
        same(quiet(model, pixels()), quiet(build(), pixels()))  # without dropout
    assert flags(model) == before


def test_modes_are_restored_after_a_mistake() -> None:
    model = build(Parted())
    before = flags(model)
    message(lambda: quiet(model, iter([pixels()])))
    message(lambda: quiet(model, []))
    assert flags(model) == before


def test_a_proposal_that_learns_stays_as_it_is() -> None:
    times = ornstein.Adaptive(bins=8)
    quiet(build(), pixels(), times=times)
    assert times.training
    assert not times.seen.any()


def test_no_graph_is_kept() -> None:
    model = build()
    found = quiet(model, pixels())
    tensors = [found.per_example, *vars(found.curve).values()]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()
    assert found.per_example.dtype == torch.float64


@pytest.mark.parametrize("form", ["tensor", "list", "DataLoader"])
def test_the_global_generator_is_left_alone(form: str) -> None:
    data = pixels() if form == "tensor" else FORMS[form](pixels())
    before, others = torch.get_rng_state(), np.random.get_state()[1].copy()
    quiet(build(), data)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], others)


# ------------------------------------------------------------------ mistakes


def test_data_of_other_kinds() -> None:
    model, x = build(), pixels()
    says(message(lambda: quiet(model, iter([x]))), "iterator", "only once", "DataLoader")
    says(message(lambda: quiet(model, (part for part in [x]))), "iterator", "list of batches")
    says(message(lambda: quiet(model, 3)), "given as int", "tensor (N, *shape)")
    says(message(lambda: quiet(model, labelled(x))), "TensorDataset", "loader of batches")
    says(message(lambda: quiet(model, "train")), "type str", "tensor")
    same(quiet(model, x.numpy()), quiet(model, x))
    says(message(lambda: quiet(model, [{"x": x}])), "type dict", "begins with one")
    says(message(lambda: quiet(model, [(None, x)])), "type tuple", "begins with one")
    says(message(lambda: quiet(model, [()])), "type tuple")


@pytest.mark.parametrize("times", [None, Information()], ids=["fitted", "given"])
def test_no_data(times: Information | None) -> None:
    for data in (pixels(0), [], [pixels(0), pixels(0)], DataLoader(labelled(pixels(0)))):
        says(message(lambda data=data: quiet(build(), data, times=times)), "empty", "one example")


def test_data_that_does_not_fit() -> None:
    model = build()
    says(message(lambda: quiet(model, pixels().float())), "torch.float32", "integer", "Continuous")
    says(message(lambda: quiet(model, pixels() + 1)), "from 1 to 8", "0 … 7")
    says(message(lambda: quiet(model, pixels()[:, 0])), "shape (", "(batch, *data)")
    other = ScoreModel(Bent(), ornstein.vpsde(), Continuous())
    says(message(lambda: quiet(other, pixels())), "torch.int64", "Discrete")


@pytest.mark.parametrize("times", [None, Information()], ids=["fitted", "given"])
def test_batches_of_different_shapes(times: Information | None) -> None:
    """Bits per dimension of which dimension?"""
    says(message(lambda: quiet(build(), [pixels(8), pixels(8)[:, :4]], times=times)), "shape")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draws": 0}, ["draws=0", "whole number"]),
        ({"draws": 2.5}, ["draws=2.5", "whole number"]),
        ({"draws": True}, ["draws=True", "whole number"]),
        ({"draws": "4"}, ["draws='4'", "whole number"]),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"limit": 0}, ["limit=0"]),
        ({"limit": -3}, ["limit=-3"]),
        ({"curve_bins": 0}, ["curve_bins=0"]),
        ({"max_draws": -1}, ["max_draws=-1"]),
        ({"target_error": 0.0}, ["target_error=0", "positive"]),
        ({"target_error": math.nan}, ["target_error=nan", "positive"]),
        ({"target_error": "low"}, ["target_error='low'"]),
        ({"target_error": 0.1, "draws": 8, "max_draws": 4}, ["max_draws=4", "draws=8"]),
        ({"seed": "one"}, ["seed='one'", "whole number"]),
        ({"seed": 1.5}, ["seed=1.5", "whole number"]),
        ({"save_every": "often", "folder": "here"}, ["save_every='often'"]),
        ({"given": "y"}, ["given='y'", "'state'"]),
        ({"times": "uniform"}, ["times='uniform'", "Uniform()"]),
        ({"likelihood": "discrete"}, ["likelihood='discrete'", "Discrete"]),
        ({"likelihood": Discrete(16)}, ["Discrete(8)", "Discrete(16)"]),
        ({"truncation": 0.01}, ["truncation=0.01", "NoiseLevel"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options(
    options: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    says(message(lambda: quiet(build(), pixels(), **options)), *words)


def test_a_network_is_not_a_model() -> None:
    says(message(lambda: quiet(Bent(), pixels())), "Bent", "ScoreModel(network")  # type: ignore


def test_not_a_number() -> None:
    """Each example has its own number, also from the middle of a loader."""
    text = message(lambda: quiet(build(Bent(math.nan)), FORMS["list"](pixels())))
    says(text, "example 0", "not a number", "network")


def test_a_network_that_returns_something_else() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return x[:, :3]

    says(message(lambda: quiet(build(Half()), pixels())), "returned", "(256, 3)", "(256, 6)")


def test_folders_that_can_not_be(tmp_path: Path) -> None:
    """The system's own error is as good as ours if it says where."""
    file = tmp_path / "file"
    file.write_text("here I am", encoding="utf-8")
    for folder in (file, file / "inside"):
        with pytest.raises((OSError, ValueError)) as caught:
            quiet(build(), pixels(), folder=folder)
        assert str(file) in str(caught.value)
    assert file.read_text(encoding="utf-8") == "here I am"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises((OSError, ValueError)) as caught:
        quiet(build(), pixels(), folder=tmp_path / "inside")
    tmp_path.chmod(0o700)
    assert str(tmp_path) in str(caught.value)


def test_a_system_that_lends_no_folder() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    with pytest.raises((OSError, ValueError)) as caught:
        quiet(build(), pixels(), folder="/proc/self/evaluation")
    assert "/proc/self/evaluation" in str(caught.value)
