"""Runs that are killed, told to stop, damaged, shared by processes, or out of disk.

The truth of each is a run that nothing happened to. What was hit and then repeated must come to the
same metrics, weights, moments and pictures, bit for bit.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ornstein.training.checkpoints import Checkpoints
from ornstein.training.opening import open_model
from tests import training_helpers as helpers
from tests.training_helpers import QUIET, TINY, check_same, checkpoint, run, steps_kept

STEPS = 12
WATCH = (
    *("--steps", str(STEPS), "--log-every", "3", "--save-every", "2"),
    *("--valid-every", "5", "--valid-examples", "8", "--valid-draws", "1"),
    *("--sample-every", "4", "--samples", "4", "--sample-steps", "3"),
)
CASES = {
    "channel, dropout": ("--dropout", "0.3"),
    "joint, learned rates": (
        *("--parametrisation", "joint", "--process", "learned-1", "--learn-rates", "separate"),
        *("--learn-v0", "--process-lr", "0.3", "--warmup", "2"),
    ),
    "joint, from CLD on": (
        *("--parametrisation", "joint", "--process", "learned-cld-full", "--process-lr", "0.3"),
    ),
    "accumulated, adaptive times": (
        *("--accumulate", "2", "--times", "adaptive", "--dropout", "0.2", "--warmup", "0"),
    ),
    "no average, tweedie, flips": (
        *("--ema", "0", "--likelihood", "tweedie", "--draws", "2", "--flips", "--dropout", "0.1"),
    ),
}
HIT = "tests.training_helpers:signalled"
ONE_HIT = "tests.training_helpers:one_signalled"


def train(case: str) -> tuple[str, ...]:
    return ("train", *TINY, *WATCH, *CASES[case])


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A run that nothing happened to, for each case, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("truths")

    class Truths(dict[str, Path]):
        def __missing__(self, case: str) -> Path:
            name = str(len(self))
            found = run(*train(case), "--out", name, cwd=folder)
            assert found.code == 0, found.err
            self[case] = folder / name
            return self[case]

    yield Truths()


# ---------------------------------------------------------------- killed


@pytest.mark.parametrize("case", CASES)
def test_killed_at_a_random_step_and_repeated(
    case: str, truths: dict[str, Path], tmp_path: Path
) -> None:
    truth = truths[case]
    step = random.Random(case).randrange(3, STEPS)
    killed = run("9", str(step), *train(case), "--out", "r", cwd=tmp_path, call=HIT)
    assert killed.code == -signal.SIGKILL
    assert steps_kept(tmp_path / "r")[-1] < step  # so that something was lost
    path = tmp_path / "r" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "bits_per')  # as if in the middle of a line
    repeated = run(*train(case), "--out", "r", cwd=tmp_path)
    assert repeated.code == 0, repeated.err
    check_same(tmp_path / "r", truth)


def test_killed_from_outside_as_a_user_would(truths: dict[str, Path], tmp_path: Path) -> None:
    case = "channel, dropout"
    process = helpers.typed(*train(case), "--out", "r", cwd=tmp_path)
    helpers.waited(lambda: helpers.reached(tmp_path / "r", 3) or process.poll() is not None)
    process.kill()
    killed = helpers.ended(process)
    assert killed.code == -signal.SIGKILL, killed.err
    repeated = helpers.ended(helpers.typed(*train(case), "--out", "r", cwd=tmp_path))
    assert repeated.code == 0, repeated.err
    check_same(tmp_path / "r", truths[case])
    drawn = {}
    for name, folder in (("killed", tmp_path / "r"), ("whole", truths[case])):
        options = ("--n", "5", "--steps", "4", "--out", f"{name}.npz")
        assert run("sample", str(folder), *options, cwd=tmp_path).code == 0
        drawn[name] = np.load(tmp_path / f"{name}.npz")
    assert set(drawn["whole"].files) == {"samples", "number", "seed"}
    for key in drawn["whole"].files:
        assert np.array_equal(drawn["killed"][key], drawn["whole"][key])


def test_plan_of_a_learned_process_is_restored_not_made_anew(truths: dict[str, Path]) -> None:
    """The panels depend on the run's past; made anew they would be others, so this case counts."""
    folder = truths["joint, learned rates"]
    kept = load_file(checkpoint(folder) / "training.safetensors")
    process = open_model(folder, "last").model.process
    own = {k[len("model.process.") :]: v for k, v in kept.items() if k.startswith("model.process.")}
    process.load_state_dict(own)
    process.replan()
    fresh = process.plan()
    assert fresh.shape != kept["plan"].shape or not torch.equal(fresh, kept["plan"])
    process.follow(kept["plan"])
    assert torch.equal(process.plan(), kept["plan"])


def test_killed_while_writing(tmp_path: Path) -> None:
    """Again and again, at any sync, rename or removal of any file; each start goes on."""
    options = ("train", *TINY, *QUIET, "--steps", "4", "--save-every", "1", "--log-every", "2")
    options = (*options, "--dropout", "0.1", "--keep", "1")  # a checkpoint is 12 changes and more
    assert run(*options, "--out", "whole", cwd=tmp_path).code == 0
    chosen = random.Random(0)
    kills = 0
    for _ in range(40):
        number = str(chosen.randrange(5, 40))
        found = run(
            *("kill", number, *options, "--out", "r"),
            cwd=tmp_path,
            call="tests.training_helpers:hit_writing",
        )
        assert "damaged" not in found.err  # whole, or not there
        assert found.code in (0, -signal.SIGKILL), found.err
        if found.code == 0:
            break
        kills += 1
    assert kills >= 3
    # the last kill may have come before older checkpoints were removed
    check_same(tmp_path / "r", tmp_path / "whole", but=("checkpoints",))


@pytest.mark.long
def test_killed_at_every_change_of_the_disk(tmp_path: Path) -> None:
    """One after the other, from the first sync to the last removal of a run."""
    call = "tests.training_helpers:hit_fitting"
    assert run("0", "whole", cwd=tmp_path, call=call).code == 0
    number, code = 0, -9
    while code != 0:
        number += 1
        code = run(str(number), "r", cwd=tmp_path, call=call).code
        if code:
            repeated = run("0", "r", cwd=tmp_path, call=call)
            assert (repeated.code, repeated.err) == (0, ""), number
        check_same(tmp_path / "r", tmp_path / "whole", but=("checkpoints",))
        shutil.rmtree(tmp_path / "r")
    assert number > 30


# ---------------------------------------------------------------- told to stop


@pytest.mark.parametrize(
    ("number", "code", "step"),
    [(signal.SIGTERM, 143, 7), (signal.SIGINT, 130, 4), (signal.SIGTERM, 143, STEPS)],
    ids=["SIGTERM", "SIGINT at a step with samples", "SIGTERM in the last step"],
)
def test_told_to_stop_it_saves_and_goes_on_at_the_very_step(
    number: signal.Signals, code: int, step: int, truths: dict[str, Path], tmp_path: Path
) -> None:
    case = "channel, dropout"
    command = (*train(case), "--out", "r")
    stopped = run(str(int(number)), str(step), *command, cwd=tmp_path, call=HIT)
    assert stopped.code == code
    assert stopped.err == (
        f"stopped by {number.name} after step {step}; everything is saved. Repeat the command to "
        "go on.\n"
    )
    assert steps_kept(tmp_path / "r")[-1] == step
    repeated = run(*command, cwd=tmp_path)
    assert repeated.code == 0, repeated.err
    starts = (tmp_path / "r" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, step]
    # one more checkpoint was written when it stopped
    check_same(tmp_path / "r", truths[case], but=("checkpoints",))


def test_second_signal_acts_at_once(tmp_path: Path) -> None:
    """A user who presses Ctrl-C twice wants out."""
    command = ("train", *TINY, *QUIET, "--steps", "100000", "--log-every", "1", "--out", "r")
    process = helpers.start(
        *command,
        *("--sample-every", "1", "--samples", "64", "--sample-steps", "100000"),
        cwd=tmp_path,
    )
    helpers.waited(lambda: helpers.reached(tmp_path / "r", 1))  # now it samples, for hours
    process.tell(signal.SIGTERM)
    time.sleep(0.3)
    assert process.code is None
    process.tell(signal.SIGTERM)
    assert process.wait(20).code == -signal.SIGTERM


# ---------------------------------------------------------------- damaged


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    # somewhere in the weights; in a text it is a digit that becomes another digit
    at = content.find(b'"count": ') + 9 if path.name == "state.json" else len(content) // 2
    changed = {
        "cut off": content[: len(content) - 3],
        "empty": b"",
        "one bit": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
    }
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(changed[how])


@pytest.mark.parametrize("how", ["cut off", "empty", "one bit", "gone"])
@pytest.mark.parametrize(
    "name", ["training.safetensors", "model.safetensors", "state.json", "config.json"]
)
def test_damage_is_seen_and_the_checkpoint_before_is_used(
    name: str, how: str, truths: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(truths["channel, dropout"] / "checkpoints", folder)
    before, last = sorted(folder.iterdir())[-2:]
    damaged(last / name, how)
    with pytest.warns(UserWarning, match=f"{last.name} is damaged .*going on with the checkpoint"):
        found = Checkpoints(folder).latest()
    assert found is not None
    assert found.folder == before


def test_damaged_run_goes_on_from_the_checkpoint_before_it(
    truths: dict[str, Path], tmp_path: Path
) -> None:
    case = "joint, learned rates"
    shutil.copytree(truths[case], tmp_path / "r")
    last = checkpoint(tmp_path / "r")
    damaged(last / "training.safetensors", "cut off")
    repeated = run(*train(case), "--out", "r", cwd=tmp_path)
    assert repeated.code == 0
    assert repeated.err.startswith("warning: ")
    assert f"{last.name} is damaged (training.safetensors is not what was written)" in repeated.err
    check_same(tmp_path / "r", truths[case])


def test_all_damaged_is_an_error_that_touches_nothing(
    truths: dict[str, Path], tmp_path: Path
) -> None:
    case = "channel, dropout"
    shutil.copytree(truths[case], tmp_path / "r")
    for folder in (tmp_path / "r" / "checkpoints").iterdir():
        damaged(folder / "model.safetensors", "one bit")
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    repeated = run(*train(case), "--out", "r", cwd=tmp_path)
    assert repeated.code == 2
    names = ", ".join(f"step-{n:08d}" for n in reversed(steps_kept(tmp_path / "r")))
    assert f"all checkpoints in r/checkpoints are damaged ({names}); expected" in repeated.err
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


def test_leftovers_of_a_kill_are_ignored(truths: dict[str, Path], tmp_path: Path) -> None:
    case = "channel, dropout"
    shutil.copytree(truths[case], tmp_path / "r")
    last = checkpoint(tmp_path / "r")
    part = last.with_name("step-00000099.1234.part")
    shutil.copytree(last, part)
    damaged(part / "training.safetensors", "cut off")
    (tmp_path / "r" / "metrics.jsonl.99.part").write_text('{"step": 99, "bits')
    repeated = run(*train(case), "--out", "r", cwd=tmp_path)
    assert (repeated.code, repeated.err) == (0, "")
    check_same(tmp_path / "r", truths[case])


def test_newer_checkpoints_that_are_damaged_never_push_out_good_ones(tmp_path: Path) -> None:
    options = ("train", *TINY, *QUIET, "--out", "r", "--steps", "6", "--keep")
    assert run(*options, "3", "--save-every", "2", cwd=tmp_path).code == 0
    for step in (4, 6):
        damaged(checkpoint(tmp_path / "r", step) / "model.safetensors", "cut off")
    command = (*options, "2", "--save-every", "1")
    run("9", "4", *command, cwd=tmp_path, call=HIT)  # step 3 is done by then, and saved
    assert Checkpoints(tmp_path / "r" / "checkpoints").latest().step == 3  # type: ignore[union-attr]


# ---------------------------------------------------------------- a full disk


def test_disk_that_says_it_is_full(truths: dict[str, Path], tmp_path: Path) -> None:
    case = "channel, dropout"
    command = (*train(case), "--out", "r")
    hit = "tests.training_helpers:hit_writing"
    full = run("full", "40", *command, cwd=tmp_path, call=hit)
    assert full.code == 2
    assert full.err.startswith("error: ") and "No space left on device" in full.err
    assert len(full.err.splitlines()) == 1
    assert not list((tmp_path / "r").rglob("*.part"))
    found = Checkpoints(tmp_path / "r" / "checkpoints").latest()
    assert found is not None  # that of before is intact
    repeated = run(*command, cwd=tmp_path)
    assert repeated.code == 0, repeated.err
    check_same(tmp_path / "r", truths[case])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=2m", "ornstein-test", str(folder)]
    try:
        made = subprocess.run(options, capture_output=True, check=False).returncode == 0
    except OSError:
        made = False
    if not made:
        pytest.skip("a file system can't be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_disk_that_is_full(small_disk: Path, truths: dict[str, Path], tmp_path: Path) -> None:
    """A real one: whatever part of a file fits is there, and the rest is not."""
    case = "channel, dropout"
    command = (*train(case), "--out", str(small_disk / "r"))
    assert run("9", "4", *command, cwd=tmp_path, call=HIT).code == -signal.SIGKILL
    kept = steps_kept(small_disk / "r")
    filler = small_disk / "filler"
    with filler.open("wb") as file:
        free = shutil.disk_usage(small_disk).free
        file.write(b"0" * (free - 120_000))  # less than one more checkpoint
    full = run(*command, cwd=tmp_path)
    assert full.code == 2
    assert full.err.startswith("error: ")
    assert "No space left" in full.err or "os error 28" in full.err
    found = Checkpoints(small_disk / "r" / "checkpoints").latest()
    assert found is not None and found.step == kept[-1]
    filler.unlink()
    assert run(*command, cwd=tmp_path).code == 0
    check_same(small_disk / "r", truths[case])


# ---------------------------------------------------------------- shared by processes


def one_and_two(options: tuple[str, ...], folder: Path, *ways: tuple[str, ...]) -> float:
    """Train alone and by two processes; the largest relative difference of anything logged."""
    assert run(*options, "--out", "one", cwd=folder).code == 0
    truth = helpers.lines(folder / "one")
    weights = load_file(checkpoint(folder / "one") / "model.safetensors")
    worst = 0.0
    for number, more in enumerate(ways):
        out = f"two-{number}"
        for process in helpers.together(*options, *more, "--out", out, cwd=folder):
            found = process.wait()
            assert found.code == 0, found.err
        lines = helpers.lines(folder / out)
        assert [line["step"] for line in lines] == [line["step"] for line in truth]
        for line, expected in zip(lines, truth, strict=True):
            assert line.keys() == expected.keys()
            for key in line.keys() - {*helpers.TIMES, "step"}:
                one, other = np.array(line[key]), np.array(expected[key])
                worst = max(worst, float((np.abs(one - other) / np.abs(other).max()).max()))
        shared = load_file(checkpoint(folder / out) / "model.safetensors")
        assert shared.keys() == weights.keys()
        for name, value in weights.items():
            if not name.endswith("attention.key.bias"):  # has no effect: its gradient is rounding
                torch.testing.assert_close(shared[name], value, rtol=1e-5, atol=1e-6, msg=name)
    return worst


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """To 1e-5: sums over a batch are taken in another order, and float32 keeps 7 digits."""
    options = ("train", *TINY, "--steps", "50", "--log-every", "1", "--keep", "1")
    looks = ("--valid-every", "20", "--valid-examples", "9", "--sample-every", "50")
    options = (*options, *looks, "--samples", "5", "--sample-steps", "3")
    assert one_and_two(options, tmp_path, ()) < 1e-5
    for name in ("one", "two-0"):
        assert [path.name for path in (tmp_path / name / "samples").iterdir()] == [
            "step-00000050.png"
        ]


def test_two_processes_accumulate_like_one(tmp_path: Path) -> None:
    options = ("train", *TINY, *QUIET, "--steps", "50", "--log-every", "1", "--keep", "1")
    assert one_and_two(options, tmp_path, ("--accumulate", "2")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rates", ["no", "separate"])
def test_two_processes_learn_a_process_like_one(rates: str, tmp_path: Path) -> None:
    options = ("train", *TINY, "--steps", "50", "--log-every", "1", "--learn-rates", rates)
    options = (*options, "--parametrisation", "joint", "--process", "learned-1", "--learn-v0")
    looks = ("--valid-every", "25", "--valid-examples", "8", "--sample-every", "0")
    assert one_and_two((*options, *looks), tmp_path, ()) < 1e-5


@pytest.mark.slow
def test_two_processes_slow_a_clock_down_like_one(tmp_path: Path) -> None:
    """∫‖A‖ is 600 to 700 at first, and 512 after the look at step 100; so is the mean's."""
    options = ("train", *TINY, *QUIET, "--steps", "103", "--log-every", "1", "--keep", "1")
    fast = ("--parametrisation", "joint", "--process", "learned-1", "--rate", "0.1", "1200")
    assert run(*options, *fast, "--out", "one", cwd=tmp_path).code == 0
    for process in helpers.together(*options, *fast, "--out", "two", cwd=tmp_path):
        assert process.wait().code == 0
    one, two = (helpers.lines(tmp_path / name) for name in ("one", "two"))
    for line, expected in zip(two, one, strict=True):
        for key in ("bits_per_dim", "Q", "D"):
            np.testing.assert_allclose(line[key], expected[key], rtol=1e-5, atol=1e-12)
    trace = [float(np.trace(line["D"])) for line in one]
    assert trace[100] < 0.95 * trace[99] and trace[99] > 0.99 * trace[98]
    means = [load_file(checkpoint(tmp_path / n) / "model.safetensors") for n in ("one", "two")]
    for name in ("process.make_Q.raw", "process.make_D.raw"):
        torch.testing.assert_close(means[1][name], means[0][name], rtol=1e-5, atol=1e-12)
    of_mean = float(means[0]["process.make_D.raw"].square().sum())
    assert of_mean == pytest.approx(trace[-1], rel=0.02)


def test_processes_draw_times_and_noise_of_their_own(tmp_path: Path) -> None:
    """Together they draw what one process draws, and no number twice."""
    options = ("train", *TINY, *QUIET, "--steps", "3")
    call = "tests.training_helpers:listening"
    assert run("one", *options, "--out", "a", cwd=tmp_path, call=call).code == 0
    for process in helpers.together("two", *options, "--out", "b", cwd=tmp_path, call=call):
        assert process.wait().code == 0
    whole, *parts = (np.load(tmp_path / f"{name}.npz") for name in ("one-0", "two-0", "two-1"))
    assert whole["place"].tolist() == list(range(3 * helpers.BATCH))
    shares = [[n for n in range(24) if n % 8 // 4 == rank] for rank in range(2)]
    for part, share in zip(parts, shares, strict=True):
        first = len(part["place"]) - len(share)  # a trial may have come before the first step
        assert part["place"][first:].tolist() == share
        for key in ("noise", "logsnr"):
            assert np.array_equal(part[key][first:], whole[key][share])
            assert len(np.unique(whole[key][:, 0])) == 24


def test_batch_that_cannot_be_shared_evenly(tmp_path: Path) -> None:
    command = ("train", *TINY, *QUIET, "--steps", "2", "--batch", "10", "--accumulate", "2")
    for process in helpers.together(*command, cwd=tmp_path):
        found = process.wait()
        assert found.code == 2
        assert found.err == (
            "error: a batch of 10 can't be shared evenly by 2 processes in 2 parts each; expected "
            "a multiple of 4, such as 8.\n"
        )
    assert not (tmp_path / "runs").exists()


def test_adaptive_times_are_for_one_process(tmp_path: Path) -> None:
    for process in helpers.together("train", *TINY, "--times", "adaptive", cwd=tmp_path):
        found = process.wait()
        assert found.code == 2
        assert "expected another proposal, such as 'natural'" in found.err


def test_one_of_two_processes_is_told_and_both_stop_after_the_same_step(tmp_path: Path) -> None:
    command = ("train", *TINY, *QUIET, "--steps", "9", "--log-every", "2", "--dropout", "0.2")
    for process in helpers.together(*command, "--out", "whole", cwd=tmp_path):
        assert process.wait().code == 0
    told = helpers.together("15", "5", *command, "--out", "r", cwd=tmp_path, call=ONE_HIT)
    for process in told:
        found = process.wait()
        assert found.code == 143, found.err
        assert "after step 5; everything is saved" in found.err
    for process in helpers.together(*command, "--out", "r", cwd=tmp_path):
        assert process.wait().code == 0
    starts = (tmp_path / "r" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, 5]
    check_same(tmp_path / "r", tmp_path / "whole", but=("checkpoints",))


def test_processes_that_leave_each_other_do_not_wait_for_ever(tmp_path: Path) -> None:
    """A model held longer than its group: in torch, one such end in some ten never comes."""
    for process in helpers.together("40", cwd=tmp_path, call="tests.training_helpers:leaving"):
        assert process.wait(60).code == 0


@pytest.mark.slow
def test_torchrun_told_to_stop(tmp_path: Path) -> None:
    """As a user or a cluster does it: SIGTERM to torchrun, which tells its processes."""
    command = ("train", *TINY, *QUIET, "--log-every", "1", "--out", "r", "--decay", "constant")
    many = ("--nproc-per-node", "2", "--master-port", str(helpers.free_port()), "-m", "ornstein")
    process = helpers.typed(
        *many, *command, "--steps", "100000", cwd=tmp_path, module="torch.distributed.run"
    )
    helpers.waited(lambda: helpers.reached(tmp_path / "r", 3), 120)
    process.terminate()
    found = helpers.ended(process)
    assert found.code != 0
    assert found.err.count("everything is saved. Repeat the command to go on.") == 2
    step = steps_kept(tmp_path / "r")[-1]
    assert f"stopped by SIGTERM after step {step};" in found.err
    # and two processes go on from there
    assert step > 2
    for started in helpers.together(
        "15", str(step + 2), *command, "--steps", "100000", cwd=tmp_path, call=HIT
    ):
        assert started.wait().code == 143
    starts = (tmp_path / "r" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, step]
    assert steps_kept(tmp_path / "r")[-1] == step + 2
