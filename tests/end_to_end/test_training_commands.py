"""`train`, `evaluate`, `sample`, `inspect` and `report` as a user types them, and their options."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ornstein
from ornstein import Ancestral, Objective, Optimiser, Training, Watch
from ornstein.data import NAMES, Stream, load
from ornstein.training import Experiment, preset
from ornstein.training.estimating import estimate
from ornstein.training.opening import open_model
from tests import training_helpers as helpers
from tests.training_helpers import QUIET, TINY, Said, checkpoint, run, steps_kept

CHANNEL = ("train", *TINY, "--log-every", "5", "--valid-every", "5", "--valid-examples", "8")
CHANNEL = (*CHANNEL, "--steps", "20", "--warmup", "5", "--sample-every", "10", "--samples", "4")
CHANNEL = (*CHANNEL, "--sample-steps", "3")
JOINT = ("train", *TINY, *QUIET, "--steps", "6", "--log-every", "2", "--warmup", "0")
JOINT = (*JOINT, "--parametrisation", "joint", "--process", "learned-1", "--process-lr", "0.1")


pytestmark = pytest.mark.usefixtures("terminal")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a channel run and a joint one, named by default."""
    folder = tmp_path_factory.mktemp("commands")
    for command in (CHANNEL, JOINT):
        found = run(*command, cwd=folder)
        assert found.code == 0, found.err
    return folder / "runs"


@pytest.fixture
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own, with copies of the runs in it."""
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CHANNEL_RUN, JOINT_RUN = "runs/digits-channel-vpsde", "runs/digits-joint-learned-1"


# ---------------------------------------------------------------- what a run is


def test_run_has_what_it_says(runs: Path) -> None:
    folder = runs / "digits-channel-vpsde"
    lines = helpers.lines(folder)
    assert [line["step"] for line in lines if "bits_per_dim" in line] == [5, 10, 15, 20]
    assert [line["step"] for line in lines if "valid_bits_per_dim" in line] == [5, 10, 15, 20]
    config = json.loads((folder / "config.json").read_text())
    assert config["experiment"]["training"]["steps"] == config["training"]["steps"] == 20
    assert config["data"]["fingerprint"] == load("digits").fingerprint
    assert config["model"]["process"]["name"] == "vpsde"
    for picture in ("step-00000010", "step-00000020"):
        with Image.open(folder / "samples" / f"{picture}.png") as image:
            assert len(np.unique(np.asarray(image))) > 5
    (start,) = (folder / "starts.jsonl").read_text().splitlines()
    assert json.loads(start)["step"] == 0 and json.loads(start)["torch"] == torch.__version__


def test_finished_run_is_left_alone(here: Path, said: Said) -> None:
    before = helpers.outcome(here / CHANNEL_RUN)
    code, out, err = said(*CHANNEL)
    assert (code, err) == (0, "")
    assert not re.search(r"^ +[0-9]+  ", out, re.MULTILINE)  # no step was done
    assert helpers.outcome(here / CHANNEL_RUN) == before


def test_config_of_a_run_repeats_it_elsewhere(here: Path, said: Said) -> None:
    config = f"{JOINT_RUN}/config.json"
    assert said("train", "--config", config, "--out", "again")[0] == 0
    helpers.check_same(here / "again", here / JOINT_RUN)


@pytest.mark.parametrize(
    ("process", "matrices"),
    [("own", ("--Q", "[[0,-1],[1,0]]", "--D", "[[0,0],[0,1]]")), ("cld", ())],
)
def test_matrices_of_ones_own(
    process: str, matrices: tuple[str, ...], said: Said, tmp_path: Path
) -> None:
    out = str(tmp_path / "r")
    command = ("train", *TINY, *QUIET, "--steps", "1", "--process", process, "--out", out)
    assert said(*command, *matrices)[0] == 0
    found = open_model(out).model.process
    assert isinstance(found, ornstein.Diffusion)
    if process == "own":
        assert found.Q.tolist() == [[0.0, -1.0], [1.0, 0.0]]
        assert found.D.tolist() == [[0.0, 0.0], [0.0, 1.0]]
    else:
        assert torch.equal(found.Q, ornstein.cld().Q)


@pytest.mark.parametrize("objective", ["mism", "score_matching", "noise_prediction"])
def test_objectives_with_a_network_for_images(objective: str, said: Said, tmp_path: Path) -> None:
    """Its attention must be differentiated twice for one of them. The first loss is known."""
    command = ("train", *TINY, *QUIET, "--steps", "2", "--log-every", "1", "--out", str(tmp_path))
    code, _, err = said(*command, "--objective", objective)
    assert (code, err) == (0, "")
    experiment = Experiment.read(tmp_path / "config.json")
    data = experiment.data.load()
    model, seed = experiment.build(data).train(), experiment.training.seed
    x = Stream(data.train.x, seed).take(0, experiment.training.batch)
    random = ornstein.Counted(seed, torch.arange(len(x)))
    found = getattr(ornstein, objective)(model, x, random=random)
    wanted = found.bits_per_dim.mean() if objective == "mism" else found.mean() / x[0].numel()
    key = "bits_per_dim" if objective == "mism" else "loss"
    first, second = (line[key] for line in helpers.lines(tmp_path))
    assert first == pytest.approx(wanted.item(), rel=1e-12)
    assert second != first


def test_one_example_for_validation(said: Said, tmp_path: Path) -> None:
    """Has no standard error, and is no reason to stop."""
    command = ("train", *TINY, "--steps", "2", "--valid-examples", "1", "--sample-every", "0")
    code, _, err = said(*command, "--out", str(tmp_path))
    assert (code, err) == (0, "")
    (line,) = [n for n in helpers.lines(tmp_path) if "valid_bits_per_dim" in n]
    opened, data = open_model(tmp_path, "last"), ornstein.data.load("digits")
    wanted = ornstein.evaluate(opened.model, data.valid.x[:1], draws=2, quiet=True)
    assert line["valid_bits_per_dim"] == pytest.approx(wanted.bits_per_dim, rel=1e-12)
    assert line["valid_standard_error"] is None


# ---------------------------------------------------------------- refused


def test_other_options_are_refused_with_the_difference(here: Path, said: Said) -> None:
    before = helpers.outcome(here / CHANNEL_RUN)
    code, _, err = said(*CHANNEL, "--lr", "0.5", "--seed", "3", "--dropout", "0.1")
    assert code == 2
    assert f"error: {CHANNEL_RUN} holds a run with other options:\n" in err
    assert "  training.optimiser.lr: before 0.004, now 0.5\n" in err
    assert "  training.seed: before 0, now 3\n" in err
    assert "model.network.dropout: before 0.0, now 0.1\n" in err
    assert err.endswith("Repeat them, or use another folder.\n")
    assert helpers.outcome(here / CHANNEL_RUN) == before
    for more in (("--dry-run",), ()):  # a dry run says it, too
        assert said(*CHANNEL, "--lr", "0.5", *more)[0] == 2


def test_what_is_watched_may_change(here: Path, said: Said) -> None:
    code, _, err = said(*CHANNEL, "--log-every", "7", "--keep", "3", "--valid-every", "0")
    assert (code, err) == (0, "")


def test_fewer_steps_or_more_with_a_falling_rate_are_refused(here: Path, said: Said) -> None:
    for steps in ("10", "30"):
        code, _, err = said(*CHANNEL, "--steps", steps)
        assert code == 2
        assert f"training.steps: before 20, now {steps}" in err


def test_other_data_under_the_same_name_is_refused(said: Said, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    command = ("train", "--data", str(tmp_path / "x.npy"), "--width", "8", "--depth", "1", *QUIET)
    command = (*command, "--batch", "8", "--steps", "2", "--out", str(tmp_path / "r"))
    assert said(*command)[0] == 0
    x[3, 1] += 1e-3
    np.save(tmp_path / "x.npy", x)
    code, _, err = said(*command)
    assert code == 2
    assert re.search(r"data\.fingerprint: before '[0-9a-f]{16}', now '[0-9a-f]{16}'", err)
    code, _, err = said("evaluate", str(tmp_path / "r"))  # and so is a figure about it
    assert code == 2
    assert "is not what r was trained on" in err
    code, _, err = said("sample", str(tmp_path / "r"), "--out", str(tmp_path / "pictures"))
    assert code == 2
    assert "expected .npz for vectors" in err


@pytest.mark.parametrize("other", ["psld", "alda"])
def test_checkpoint_of_another_process_is_refused(other: str, said: Said, tmp_path: Path) -> None:
    """Of as many variables, where every tensor would fit, or of more."""
    options = ("train", *TINY, *QUIET, "--steps", "2")
    for process in ("cld", other):
        assert said(*options, "--process", process, "--out", str(tmp_path / process))[0] == 0
    shutil.rmtree(tmp_path / "cld" / "checkpoints")
    shutil.copytree(tmp_path / other / "checkpoints", tmp_path / "cld" / "checkpoints")
    code, _, err = said(*options, "--process", "cld", "--out", str(tmp_path / "cld"))
    assert code == 2
    assert "is of another model" in err
    assert f"'{other}'" in err and "'cld'" in err


def test_renamed_checkpoint_is_refused(here: Path, said: Said) -> None:
    folder = here / CHANNEL_RUN / "checkpoints"
    checkpoint(here / CHANNEL_RUN).rename(folder / "step-00000099")
    code, _, err = said(*CHANNEL)
    assert code == 2
    assert "says it is of step 20; was it renamed?" in err


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    command = ("train", *TINY, *QUIET, "--steps", "100000", "--log-every", "1", "--out", "r")
    first = helpers.start(*command, cwd=tmp_path)
    helpers.waited(lambda: helpers.reached(tmp_path / "r", 1))
    second = run(*command, cwd=tmp_path)
    assert second.code == 2
    assert second.err == (
        "error: another process is training in r; expected one at a time. Wait for it or stop it, "
        "or use another folder.\n"
    )
    assert first.code is None
    first.tell(signal.SIGKILL)  # the lock goes with its process
    assert first.wait().code == -signal.SIGKILL
    third = helpers.start(*command, cwd=tmp_path)
    starts = tmp_path / "r" / "starts.jsonl"
    helpers.waited(lambda: len(starts.read_text().splitlines()) == 2 or third.code is not None)
    third.tell(signal.SIGTERM)
    assert third.wait().code == 143


def test_diverged_run_ends_with_one(said: Said, tmp_path: Path) -> None:
    command = ("train", *TINY, *QUIET, "--steps", "400", "--log-every", "4", "--save-every", "2")
    command = (*command, "--out", str(tmp_path / "r"), "--lr", "1e6", "--warmup", "0")
    for _ in range(2):  # repeated, it goes on from the good checkpoint
        code, _, err = said(*command)
        assert code == 1
        step = re.match(r"error: step (\d+): ", err)
        assert step is not None
        found = re.search(r"The last good checkpoint is that of step (\d+)\.\n$", err)
        assert found is not None
        assert int(found[1]) == steps_kept(tmp_path / "r")[-1] < int(step[1])
        assert open_model(tmp_path / "r", "last").step == int(found[1])
    starts = (tmp_path / "r" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, int(found[1])]


# ---------------------------------------------------------------- before a run


def test_dry_run_says_what_would_be_done_and_writes_nothing(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("train", *TINY, "--steps", "70", "--parametrisation", "joint")
    code, out, err = said(*command, "--process", "learned-2", "--dry-run")
    assert (code, err) == (0, "")
    assert not list(tmp_path.iterdir())
    words = dict(line.split(maxsplit=1) for line in out.splitlines())
    data = load("digits")
    experiment = replace(preset("digits"), model=replace(preset("digits").model, width=8))
    experiment = replace(
        experiment,
        process=replace(experiment.process, process="learned-2"),
        model=replace(
            experiment.model, parametrisation="joint", width=8, multipliers=(1,), blocks=1
        ),
    )
    model = experiment.build(data)
    count = sum(p.numel() for p in model.network.parameters())
    assert words["network"] == f"UNet, {count:,} parameters"
    own = sum(p.numel() for p in model.process.parameters())
    assert words["process"] == f"learned-2, K = 3, {own} parameters to learn"
    assert words["model"] == "joint, Discrete(17), begins with the histogram of the data"
    assert words["run"] == "runs/digits-joint-learned-2 (new)"
    assert words["training"] == f"70 steps of 8, {70 * 8 / len(data.train):.1f} epochs, elbo"
    assert "activations" in words["memory"] and "data" in words["memory"]
    assert "ms a step" in words["time"]


def test_estimates_are_right(tmp_path: Path) -> None:
    """Bytes that are counted against bytes that the process has, in a process of its own."""
    found = run(cwd=tmp_path, call="tests.training_helpers:measured")
    assert found.code == 0, found.err
    counted, held = json.loads(found.out)
    assert 0.9 < counted / held < 1.1, (counted, held)


def test_estimated_state_is_that_of_adam_and_an_average() -> None:
    data = load("digits")
    experiment = preset("digits")
    model = experiment.build(data)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = estimate(model, data, experiment.training)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert found.network == sum(p.numel() for p in model.network.parameters())
    assert found.state_bytes == 5 * weights  # weight, gradient, two moments, average
    assert found.data_bytes == data.train.x.numel()
    assert found.memory == found.state_bytes + found.data_bytes + found.activation_bytes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    half = estimate(model, data, replace(experiment.training, accumulate=2))
    assert half.activation_bytes == pytest.approx(found.activation_bytes / 2, rel=0.01)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name", [*NAMES, "photos/"])
def test_options_survive_json(name: str) -> None:
    experiment = preset(name)
    record = json.loads(json.dumps(experiment.to_record()))
    assert Experiment.from_record(record) == experiment
    assert Experiment.from_record({"data": {"data": name}}) == experiment
    odd = replace(
        experiment,
        process=replace(
            experiment.process, process="own", Q=((0.0, -1.0), (1.0, 0.0)), rate_q=(0.1, 2.0)
        ),
        model=replace(experiment.model, attention=(4, 8), logit=0.05, bins="off"),
        training=replace(
            experiment.training,
            precision="bfloat16",
            objective=Objective("mism", draws=3, times="adaptive", spread="antithetic"),
            optimiser=Optimiser("adam", betas=(0.5, 0.75), decay="cosine", final=0.1),
            watch=Watch(keep=7, save_minutes=0.5),
        ),
    )
    assert Experiment.from_record(json.loads(json.dumps(odd.to_record()))) == odd


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"trainning": {}}, r"unknown option 'trainning'; .*Perhaps you meant 'training'"),
        ({"training": {"step": 3}}, r"training has the unknown .*Perhaps you meant 'steps'"),
        (
            {"training": {"watch": {"log_evry": 3}}},
            r"training.watch .*Perhaps you meant 'log_every'",
        ),
        ({"process": {"q": None}}, r"process has the unknown option 'q'"),
        ({"model": {"drop_out": 0.1}}, r"Perhaps you meant 'dropout'"),
        ({"data": {"name": "digits"}}, r"data has the unknown option 'name'"),
        ({"training": {"steps": 3.5}}, r"training.steps=3.5; expected a whole number"),
        ({"training": {"steps": "3"}}, r"training.steps='3'; expected a whole number"),
        ({"training": {"steps": True}}, r"training.steps=True; expected a whole number"),
        ({"training": {"flips": 1}}, r"training.flips=1; expected true or false"),
        ({"training": {"optimiser": {"betas": [0.9]}}}, r"betas=\[0.9\]; expected a list"),
        ({"training": {"optimiser": {"lr": None}}}, r"optimiser.lr=None; expected a number"),
        ({"training": {"precision": "half"}}, r"expected one of float32, bfloat16"),
        ({"training": []}, r"training is \[\]; expected an object"),
        ([], r"expected an object with named options"),
        ({"model": {"attention": [4, "8"]}}, r"model.attention=\[4, '8'\]"),
    ],
)
def test_records_are_read_strictly(record: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Experiment.from_record(record)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Training(steps=0), "steps=0; expected a whole number ≥ 1"),
        (lambda: Training(batch=-1), "batch=-1; expected a whole number ≥ 1"),
        (lambda: Training(ema=1.0), "ema=1.0; expected a number ≥ 0 and < 1"),
        (lambda: Training(seed=1.5), "seed=1.5; expected a whole number"),
        (lambda: Training(compile="yes"), "expected one of auto, on, off"),
        (lambda: Training(objective={}), "objective={}"),
        (lambda: Training(optimiser=None), "optimiser=None"),
        (lambda: Training(watch=3), "watch=3"),
        (lambda: Training(flips="yes"), "flips='yes'"),
        (lambda: Optimiser(lr=0.0), "lr=0.0; expected a number > 0"),
        (lambda: Optimiser(lr=math.inf), "lr=inf; expected a number > 0"),
        (lambda: Optimiser(process_lr=math.nan), "process_lr=nan"),
        (lambda: Optimiser(clip=-1.0), "clip=-1.0; expected a number ≥ 0"),
        (lambda: Optimiser(final=1.5), "final=1.5; expected a number ≥ 0 and ≤ 1"),
        (lambda: Optimiser(betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\); expected two numbers"),
        (lambda: Optimiser(betas=None), "betas=None; expected two numbers"),
        (lambda: Optimiser(betas=("a", "b")), "expected two numbers"),
        (lambda: Watch(log_every=0), "log_every=0; expected a whole number ≥ 1"),
        (lambda: Watch(save_minutes=-1), "save_minutes=-1"),
        (lambda: Objective("elob"), "objective='elob'; expected one of elbo, mism"),
        (lambda: Objective(draws=0), "draws=0"),
        (lambda: Objective("mism", given="state"), "given='state' with objective='mism'"),
    ],
)
def test_ranges_of_options(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--process", "vpdse"), "Perhaps you meant 'vpsde'"),
        (("--data", "digitz"), "Perhaps you meant 'digits'"),
        (("--process", "vpsde", "--learn-v0"), "are for learned processes"),
        (("--process", "own"), "needs both Q and D"),
        (("--Q", "[[0,-1],[1,0]]", "--D", "[[0,0],[0,1]]"), "expected process='own'"),
        (("--process", "vpsde", "--v0-variance", "0.1"), "v0_variance was given, but 'vpsde'"),
        (("--network", "mlp"), "expected a unet for images"),
        (("--depth", "2"), "depth was given, but 'unet-tiny' has none"),
        (("--noise-level", "0.1", "--fixed-time", "0.1"), "expected one way to truncate"),
        (("--likelihood", "continuous"), "with the pixels of 'digits'"),
        (("--data", "moons", "--likelihood", "discrete"), "with the real numbers of 'moons'"),
        (("--data", "moons", "--flips"), "expected images"),
        (("--accumulate", "3"), "a batch of 64 can't be shared evenly"),
        (("--config", "nothere.json"), "nothere.json"),
    ],
)
def test_mistakes_on_the_command_line(
    args: tuple[str, ...], words: str, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = said("train", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and words in err
    assert not list(tmp_path.iterdir())


def test_unknown_key_in_a_file(said: Said, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"training": {"optimizer": {"lr": 1}}}))
    code, _, err = said("train", "--config", str(path), "--out", str(tmp_path / "r"))
    assert code == 2
    assert f"{path}: training has the unknown option 'optimizer'" in err
    assert "Perhaps you meant 'optimiser'" in err
    path.write_text("{")
    code, _, err = said("train", "--config", str(path))
    assert code == 2
    assert f"{path} can't be read" in err and "expected a JSON file with options" in err


@pytest.mark.parametrize("command", ["train", "evaluate", "sample", "report", "inspect"])
def test_help_shows_examples(command: str, said: Said) -> None:
    code, out, err = said(command, "--help")
    assert (code, err) == (0, "")
    examples = out.split("examples:\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) >= 2
    assert all(f"ornstein {command}" in line for line in examples)


# ---------------------------------------------------------------- after a run


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """JSON files of an evaluation, by process."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {record["process"]: record for record in found}


def test_evaluate_under_several_processes(here: Path, said: Said) -> None:
    names = ("vpsde", "cld", "alda", "malda")
    options = ("--draws", "4", "--limit", "40", "--process", *names)
    code, out, err = said("evaluate", CHANNEL_RUN, *options)
    assert (code, err) == (0, "")
    found = results(here / CHANNEL_RUN / "evaluations")
    assert set(found) == set(names)
    opened = open_model(CHANNEL_RUN)
    x = load("digits").test.x
    for name, record in found.items():
        process = ornstein.PRESETS[name]()
        truth = ornstein.evaluate(
            opened.model.with_process(process), x, draws=4, limit=40, quiet=True
        )
        assert record["bits_per_dim"] == pytest.approx(truth.bits_per_dim, rel=1e-9)
        assert record["standard_error"] == pytest.approx(truth.standard_error, rel=1e-6)
        assert (record["split"], record["examples"], record["draws"]) == ("test", 40, 4)
        assert record["data"]["fingerprint"] == load("digits").fingerprint
        row = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert f"{truth.bits_per_dim:.4f}" in row
        if name == "vpsde":
            assert "pair" not in record
            continue
        pair = record["pair"]
        assert pair["difference"] == pytest.approx(
            record["bits_per_dim"] - found["vpsde"]["bits_per_dim"], rel=1e-9
        )
        assert f"{pair['difference']:+.4f}" in row
        # one denoiser, every diffusion: the figures are equal within their errors
        assert abs(pair["difference"]) < 4 * pair["standard_error"]


def test_evaluate_may_be_repeated_and_asked_for_more(here: Path, said: Said) -> None:
    command = ("evaluate", CHANNEL_RUN, "--limit", "10", "--draws")
    first, again, more = (said(*command, draws) for draws in ("2", "2", "3"))
    assert first == again
    assert (more[0], more[2]) == (0, "")


def test_evaluate_elsewhere_and_other_splits(here: Path, said: Said) -> None:
    options = ("--draws", "1", "--limit", "5", "--out", "figures")
    assert said("evaluate", JOINT_RUN, "--split", "valid", *options)[0] == 0
    (record,) = results(here / "figures").values()
    truth = ornstein.evaluate(
        open_model(JOINT_RUN).model, load("digits").valid.x, draws=1, limit=5, quiet=True
    )
    assert record["bits_per_dim"] == pytest.approx(truth.bits_per_dim, rel=1e-9)
    assert record["split"] == "valid"
    tweedie = said("evaluate", CHANNEL_RUN, "--bound", "tweedie", *options)
    assert tweedie[0] == 0 and "tweedie bound" in tweedie[1]


def test_two_processes_evaluate_and_sample_like_one(here: Path) -> None:
    commands = {
        "evaluate": ("evaluate", CHANNEL_RUN, "--limit", "9", "--draws", "2", "--out"),
        "sample": ("sample", CHANNEL_RUN, "--n", "5", "--steps", "3", "--out"),
    }
    for name, command in commands.items():
        for out in ("one", "two"):
            where = f"{out}.npz" if name == "sample" else out
            processes = helpers.together(*command, where, cwd=here, count=1 if out == "one" else 2)
            for process in processes:
                found = process.wait()
                assert (found.code, found.err) == (0, "")
    (one,), (two,) = (results(here / out).values() for out in ("one", "two"))
    for key in ("bits_per_dim", "standard_error", "prior", "diffusion", "reconstruction"):
        assert two[key] == pytest.approx(one[key], rel=1e-6)  # other batches, rounded differently
    assert two["examples"] == 9
    samples = [np.load(here / f"{out}.npz")["samples"] for out in ("one", "two")]
    assert np.array_equal(*samples)


def test_joint_model_belongs_to_its_process(here: Path, said: Said) -> None:
    for verb in ("evaluate", "sample"):
        code, _, err = said(verb, JOINT_RUN, "--process", "cld")
        assert code == 2
        assert "a joint model belongs to its process ('learned-1')" in err


@pytest.mark.parametrize("verb", ["evaluate", "sample", "report"])
def test_missing_folder(verb: str, said: Said, tmp_path: Path) -> None:
    code, _, err = said(verb, str(tmp_path / "nothere"))
    assert code == 2
    assert "nothere" in err and "expected" in err
    assert err.startswith("error: ") and len(err.splitlines()) == 1


def test_run_without_a_checkpoint(here: Path, said: Said) -> None:
    shutil.rmtree(here / CHANNEL_RUN / "checkpoints")
    for verb in ("evaluate", "sample", "inspect"):
        code, _, err = said(verb, CHANNEL_RUN)
        assert code == 2
        assert "is a run without a checkpoint" in err


def test_damaged_best_checkpoint_is_named(here: Path, said: Said) -> None:
    best = helpers.state(here / CHANNEL_RUN)["best"]["step"]
    path = checkpoint(here / CHANNEL_RUN, best) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = said("sample", CHANNEL_RUN, "--n", "1", "--steps", "2")
    assert f"step-{best:08d}" in err
    assert code == 0 or "--which last" in err


def test_samples_are_a_function_of_seed_and_number(here: Path, said: Said) -> None:
    """Whatever the batch; a float32 network rounds a little differently in other batches."""
    options = ("--steps", "4", "--seed", "3", "--out")
    ways: dict[str, tuple[str, ...]] = {
        "all": ("--n", "6"),
        "two": ("--n", "6", "--batch-size", "2"),
        "late": ("--n", "2", "--start", "4"),
    }
    drawn = {}
    for name, way in ways.items():
        assert said("sample", CHANNEL_RUN, *way, *options, f"{name}.npz")[0] == 0
        drawn[name] = np.load(here / f"{name}.npz")
    assert drawn["all"]["samples"].shape == (6, 1, 8, 8)
    assert drawn["all"]["number"].tolist() == list(range(6)) and int(drawn["all"]["seed"]) == 3
    assert drawn["late"]["number"].tolist() == [4, 5]
    truth = ornstein.sample(open_model(CHANNEL_RUN).model, 6, Ancestral(4), seed=3)
    for name, rows in (("all", slice(0, 6)), ("two", slice(0, 6)), ("late", slice(4, 6))):
        assert np.array_equal(drawn[name]["samples"], truth.numpy()[rows])


def test_samples_of_every_solver(here: Path, said: Said) -> None:
    """The command asks for what its options say."""
    model = open_model(CHANNEL_RUN).model
    ways: dict[tuple[str, ...], ornstein.Solver] = {
        ("--solver", "ancestral"): Ancestral(4),
        ("--solver", "exponential"): ornstein.Exponential(4),
        ("--solver", "exponential", "--order", "3"): ornstein.Exponential(4, order=3),
        ("--solver", "exponential", "--stochasticity", "0.5", "--grid", "logsnr"): (
            ornstein.Exponential(4, "logsnr", stochasticity=0.5)
        ),
        ("--solver", "exponential", "--extrapolate", "noise"): (
            ornstein.Exponential(4, extrapolate="noise")
        ),
        ("--solver", "heun", "--grid", "quadratic"): ornstein.Heun(4, "quadratic"),
        ("--solver", "splitting", "--reference", "prior"): (
            ornstein.Splitting(4, reference="prior")
        ),
        ("--solver", "corrector", "--corrections", "2"): (
            ornstein.PredictorCorrector(4, corrections=2)
        ),
        ("--solver", "flow", "--method", "midpoint"): (
            ornstein.ProbabilityFlow(4, method="midpoint")
        ),
        ("--solver", "euler"): ornstein.EulerMaruyama(4),
        ("--solver", "sde-2"): ornstein.Exponential(4, stochasticity=1.0),
        ("--solver", "exponential", "--grid", "learned"): (
            ornstein.learn_times(
                model, ornstein.data.load("digits").train.x, ornstein.Exponential(4)
            ).solver
        ),
    }
    for way, solver in ways.items():
        assert (
            said("sample", CHANNEL_RUN, *way, "--n", "2", "--steps", "4", "--out", "s.npz")[0] == 0
        )
        truth = ornstein.sample(model, 2, solver)
        assert np.array_equal(np.load(here / "s.npz")["samples"], truth.numpy())
    code, _, err = said("sample", CHANNEL_RUN, "--order", "2")
    assert code == 2 and "--order is for --solver exponential" in err
    code, _, err = said("sample", CHANNEL_RUN, "--solver", "flow", "--grid", "uniform")
    assert code == 2 and "--grid is for a number of --steps" in err
    code, _, err = said(
        "sample", CHANNEL_RUN, "--solver", "flow", "--steps", "4", "--grid", "learned"
    )
    assert code == 2 and "--grid learned is not for --solver flow" in err


def test_samples_as_pictures(here: Path, said: Said) -> None:
    options = ("--n", "4", "--steps", "3")
    code, out, _ = said("sample", CHANNEL_RUN, *options)
    assert code == 0
    path = re.search(rf"wrote ({CHANNEL_RUN}/samples/vpsde.*\.png)\n", out)
    assert path is not None
    with Image.open(here / path[1]) as image:
        assert min(image.size) >= 16
    assert said("sample", CHANNEL_RUN, *options, "--start", "5", "--out", "pictures")[0] == 0
    names = sorted(file.name for file in (here / "pictures").iterdir())
    assert names == [f"0-{n:06d}.png" for n in range(5, 9)]
    truth = ornstein.sample(open_model(CHANNEL_RUN).model, 4, Ancestral(3), start=5)
    for name, one in zip(names, truth, strict=True):
        with Image.open(here / "pictures" / name) as image:
            pixels = np.asarray(image.convert("L")).astype(float)
        assert pixels.shape == (8, 8)
        assert np.array_equal(pixels, np.round(one[0].double().numpy() * 255 / 16))  # 17 levels


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--out", "x.gif"), "expected .png for a grid, .npz for arrays"),
        (("--n", "0"), "n=0"),
        (("--steps", "-1"), "steps"),
        (("--batch-size", "0"), "batch_size"),
        (("--process", "nothere"), "there is no preset 'nothere'"),
    ],
)
def test_bad_outputs(args: tuple[str, ...], words: str, here: Path, said: Said) -> None:
    before = sorted(path for path in here.rglob("*"))
    code, _, err = said("sample", CHANNEL_RUN, *args)
    assert code == 2
    assert words in err
    assert sorted(path for path in here.rglob("*")) == before


def test_inspect_shows_the_trained_process(here: Path, said: Said) -> None:
    code, _, err = said("inspect", JOINT_RUN, "learned-1", "--out", "pages")
    assert (code, err) == (0, "")
    rows = json.loads((here / "pages" / "figures.json").read_text())["processes"]
    assert len(rows) == 2
    rates = []
    for row, process in zip(
        rows, (open_model(JOINT_RUN).model.process, ornstein.learned(1)), strict=True
    ):
        assert isinstance(process, ornstein.Diffusion)
        decay = torch.linalg.eigvals((process.Q + process.D) @ process.S).real
        assert row["slowest_rate"] == pytest.approx(decay.min().item(), rel=1e-9)
        rates.append(row["slowest_rate"])
    assert rates[0] != rates[1]


def test_report_has_all_runs_and_their_figures(here: Path, said: Said) -> None:
    options = ("--draws", "1", "--limit", "5")
    assert said("evaluate", CHANNEL_RUN, *options)[0] == 0
    code, out, err = said("report", CHANNEL_RUN, JOINT_RUN, "--out", "r.html", "--title", "Two")
    assert (code, err) == (0, "")
    assert "wrote r.html" in out
    text = (here / "r.html").read_text(encoding="utf-8")
    assert "<title>Two" in text
    for name in ("digits-channel-vpsde", "digits-joint-learned-1"):
        assert name in text
    figure = results(here / CHANNEL_RUN / "evaluations")["vpsde"]["bits_per_dim"]
    assert f"{figure:.3f}" in text or f"{figure:.2f}" in text
    assert not re.search(r"(src|href)=.https?://", text)  # self-contained
    assert said("report")[0] == 2
