"""`ornstein reproduce` as a user types it, in miniature: real processes, killed and resumed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ornstein.training.run import read_metrics
from tests import training_helpers as helpers
from tests.data_files import cifar, write_idx
from tests.training_helpers import Said

SMOKE = ("--jobs", "2", "--smoke", "--device", "cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def written(here: Path, **recipes: str) -> Path:
    """A table of one's own, `mine`, with these recipes."""
    table = here / "mine"
    table.mkdir()
    runs = "".join(f'[[run]]\nrecipe = "{name}"\n' for name in recipes)
    (table / "table.toml").write_text(f'title = "Mine"\n{runs}')
    for name, text in recipes.items():
        (table / f"{name}.toml").write_text(text)
    return table


def test_dry_run(here: Path, said: Said) -> None:
    code, out, err = said("reproduce", "mnist", "--data-folder", "data", "--dry-run")
    assert code == 0, err
    assert "9 runs" in out and "nothing was done" in out
    assert "on one H200, 9 side by side, about 21 min" in out
    assert "how long it takes here can't be told: mnist is not in data/mnist" in out
    assert (
        "ornstein train --recipe mnist/joint-learned-2 --seed 1 --out "
        "runs/reproduce/mnist/joint-learned-2-seed1 --data-folder data\n"
    ) in out
    assert "--out runs/reproduce/mnist/joint-learned-2 --data-folder data\n" in out
    only = ("--only", "joint-malda", "channel", "joint-cld", "channel")
    code, out, err = said("reproduce", "mnist", "--dry-run", *only)
    assert code == 0, err
    begun = [line.split()[3] for line in out.splitlines() if line.startswith("ornstein train")]
    assert begun == ["mnist/joint-malda", "mnist/channel", "mnist/joint-cld"]  # as they were asked
    assert not list(here.iterdir())


def test_how_long_it_takes_here(here: Path, said: Said) -> None:
    """Measured, since the data is there; and whether the table is meant for such a machine."""
    write_idx(here / "data" / "mnist")
    for name, meant in (("mnist", False), ("mnist-short", True)):
        code, out, err = said("reproduce", name, "--dry-run", "--device", "cpu")
        assert code == 0, err
        assert "here, on cpu about " in out
        advice = "made for a GPU: `ornstein reproduce mnist-short` is for a CPU"
        assert (advice in out) != meant
    assert [path.name for path in here.iterdir()] == ["data"]
    mine = written(here, a='about = "a"\n[data]\ndata = "moons"\n')  # made for who knows what
    (mine / "table.toml").write_text('title = "M"\nminutes = 5\n[[run]]\nrecipe = "a"\n')
    code, out, err = said("reproduce", "mine", "--dry-run", "--device", "cpu")
    assert code == 0, err
    assert "on its machine, 1 side by side, about 5 min" in out and "for a GPU" not in out


def test_a_table_of_the_digits(here: Path, said: Said) -> None:
    """Figures are those of the evaluations; what is done is not done again."""
    command = ("reproduce", "digits", "--only", "channel", "joint-learned-1", *SMOKE)
    code, _, err = said(*command)
    assert code == 0, err
    record, folder = read(here / "results" / "digits-smoke.json"), here / "runs/reproduce-smoke"
    assert record["smoke"] and record["table"] == "digits"
    assert not record["complete"]  # there are five more
    assert all(run["complete"] for run in record["runs"])
    assert record["command"] == "ornstein " + " ".join(command)
    channel, learned = record["runs"]
    assert [f["process"] for f in channel["figures"]] == 2 * ["vpsde", "cld", "malda", "alda"]
    assert [f["look"] for f in learned["figures"]] == ["discrete", "tweedie"]
    assert (channel["steps"], channel["batch"], channel["images"]) == (3, 4, 12)
    assert learned["variables"] == 2 and channel["variables"] == 1
    lines = read_metrics(folder / "digits" / "channel")
    looks = [line for line in lines if "valid_bits_per_dim" in line]
    assert [look["step"] for look in channel["validation"]] == [line["step"] for line in looks]
    assert channel["validation"][-1]["bits_per_dim"] == looks[-1]["valid_bits_per_dim"]
    assert channel["validation"][-1]["standard_error"] == looks[-1]["valid_standard_error"] > 0
    assert channel["loss"] == [line for line in lines if "bits_per_dim" in line][-1]["bits_per_dim"]
    assert channel["learned"] is None
    q = learned["learned"]["Q"]
    assert q[0][1] == -q[1][0] != 0
    for run in record["runs"]:
        assert run["provenance"]["commit"] == "0123456789ab"
        assert run["commands"][0].startswith(f"ornstein train --recipe {run['recipe']} --seed 0")
        for figure in run["figures"]:
            place = folder / "digits" / run["name"] / "table" / figure["look"]
            files = [read(path) for path in place.glob("*.json")]
            (same,) = [file for file in files if file["process"] == figure["process"]]
            assert figure["bits_per_dim"] == same["bits_per_dim"]
            parts = [figure[part] for part in ("prior", "diffusion", "reconstruction")]
            assert figure["bits_per_dim"] == pytest.approx(sum(parts), abs=1e-9)
            assert (figure["draws"], figure["examples"], figure["split"]) == (2, 4, "test")
    own = learned["figures"][0]
    for figure in channel["figures"][:4]:  # paired with the first joint run that there is
        apart, against = figure["bits_per_dim"] - own["bits_per_dim"], figure["against"]
        assert against["run"] == "joint-learned-1" and against["examples"] == 4
        assert against["difference"] == pytest.approx(apart, abs=1e-12) != 0
        assert against["standard_error"] > 0
    assert (own["against"]["difference"], own["against"]["standard_error"]) == (0, 0)
    assert all("against" not in figure for figure in channel["figures"][4:])  # of the first look
    table = (here / "results" / "digits-smoke.md").read_text(encoding="utf-8")
    assert "| bits/dim, tweedie | discrete, minus joint-learned-1 |" in table
    assert "| channel, under alda | 3 |" in table and "| joint, learned-1 | 2 |" in table
    log = folder / "digits" / "channel" / "log.txt"
    before = log.read_text()
    code, again, err = said(*command)
    assert code == 0, err
    assert log.read_text() == before and "training" not in again
    assert read(here / "results" / "digits-smoke.json")["runs"] == record["runs"]


def test_a_table_in_parts(here: Path, said: Said) -> None:
    """What was found elsewhere stays, as long as its recipe does."""
    recipe = 'about = "one of two"\n[[evaluate]]\nbound = "discrete"\n'
    table = written(here, first=recipe, second=recipe)
    result = here / "results" / "mine-smoke.json"

    def after(*options: str) -> list[dict[str, Any]]:
        code, _, err = said("reproduce", "mine", *SMOKE, *options)
        assert code == 0, err
        found: list[dict[str, Any]] = read(result)["runs"]
        return found

    (first,) = after("--only", "first", "--runs", "here")
    shutil.copytree(here / "here", here / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    (copied,) = after("--only", "first", "--runs", "copy")  # without weights, which are counted
    assert copied["parameters"] == first["parameters"] > 0
    first = copied
    both = after("--only", "second", "--runs", "there")  # where there is nothing of the first
    assert [run["name"] for run in both] == ["first", "second"]
    assert both[0] == first and read(result)["complete"]
    (table / "first.toml").write_text(recipe + 'split = "valid"\n')
    assert [run["name"] for run in after("--only", "second", "--runs", "there")] == ["second"]
    again = after("--only", "first", "--runs", "here")  # where it was finished for another split
    assert again[0]["figures"][0]["split"] == "valid"
    now, then = (run["figures"][0].pop("against") for run in (again[1], both[1]))
    assert again[1] == both[1]
    assert (then["run"], now["run"]) == ("first", "second")  # whose examples are others by now


def test_a_process_of_a_recipes_own(here: Path, said: Said) -> None:
    """Is called as its file is."""
    recipe = 'about = "it"\n[process]\nprocess = "own"\nQ = [[0, -1], [1, 0]]\n'
    recipe += 'D = [[0, 0], [0, 2]]\n[model]\nparametrisation = "{}"\n[[evaluate]]\n'
    written(here, swing=recipe.format("joint"), swung=recipe.format("channel"))
    assert said("reproduce", "mine", *SMOKE)[0] == 0
    runs = read(here / "results" / "mine-smoke.json")["runs"]
    assert [run["process"] for run in runs] == ["swing", "swung"]
    assert [run["figures"][0]["process"] for run in runs] == ["swing", "swung"]
    lines = (here / "results" / "mine-smoke.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[:2] for line in lines[6:8]] == [
        ["| joint, swing", "2"],
        ["| channel, swung", "2"],
    ]


def test_trained_here_and_evaluated_there(here: Path, said: Said) -> None:
    """Without what only training needs, three quarters of the files: the same figures."""
    recipe = 'about = "taken along"\n[process]\nprocess = "learned-1"\n[model]\n'
    recipe += 'parametrisation = "joint"\n[[sample]]\nn = 4\nsteps = 2\n[[evaluate]]\n'
    written(here, one=recipe + 'bound = "discrete"\n')
    result = here / "results" / "mine-smoke.json"

    def after(runs: str, *options: str) -> dict[str, Any]:
        code, out, err = said("reproduce", "mine", *SMOKE, "--runs", runs, *options)
        assert (code, err) == (0, "") and ("the rest waits" in out) == bool(options)
        (found,) = read(result)["runs"]
        assert found["complete"] != bool(options)
        return found  # type: ignore[no-any-return]

    trained = after("first", "--through", "train")
    assert trained["steps"] == 3 and trained["figures"] == []
    log = here / "first" / "one" / "log.txt"
    assert log.read_text().count("$ ornstein") == 1 and not (here / "first/one/table").exists()
    assert after("first", "--through", "train") == trained  # once
    assert log.read_text().count("$ ornstein") == 1
    code, out, _ = said("reproduce", "mine", *SMOKE, "--dry-run", "--through", "sample")
    assert code == 0 and out.count("\nornstein ") == 2 and "ornstein sample" in out
    bare = shutil.ignore_patterns("training.safetensors")
    shutil.copytree(here / "first", here / "second", ignore=bare)
    after("first", "--through", "sample")
    assert "ornstein evaluate" not in log.read_text()
    whole = after("first")
    result.unlink()
    copied = after("second")
    for run in (whole, copied):
        for key in ("commands", "experiment"):
            del run[key]
        for figure in run["figures"]:
            del figure["provenance"]
    assert copied == whole
    pictures = [here / name / "one/table/ancestral-2.png" for name in ("first", "second")]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    # it can't be trained on, and says so
    code, _, err = said("train", "--recipe", "mine/one.toml", "--smoke", "--out", "second/one")
    assert code == 2 and "training.safetensors is missing, without which it can't be trained" in err
    # nothing waits for another command once all is done
    code, out, _ = said("reproduce", "mine", *SMOKE, "--runs", "first", "--through", "train")
    assert code == 0 and "the rest waits" not in out and read(result)["complete"]
    # where the weights are gone, the matrices that were learned stay as they were
    learned = read(result)["runs"][0]["learned"]
    assert learned["of"] == "the best step, averaged"
    shutil.rmtree(here / "second" / "one" / "checkpoints")
    assert said("reproduce", "mine", *SMOKE, "--runs", "second")[0] == 0
    assert read(result)["runs"][0]["learned"] == learned
    # a picture that is gone is drawn again, and the figure is not found again
    pictures[0].unlink()
    before, written_log = read(result)["runs"], log.read_text()
    code, _, _ = said("reproduce", "mine", *SMOKE, "--runs", "first", "--through", "train")
    assert code == 0 and log.read_text() == written_log
    assert read(result)["runs"][0]["figures"] == before[0]["figures"]
    code, _, _ = said("reproduce", "mine", *SMOKE, "--runs", "first")
    assert code == 0 and read(result)["runs"] == before
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert log.read_text()[len(written_log) :].count("$ ornstein") == 1


def test_differences_of_a_table_in_parts(here: Path, said: Said) -> None:
    """Example by example where both are at hand, else of the figures; never to one that is gone."""
    recipe = 'about = "a part"\n[process]\nprocess = "{}"\n[[evaluate]]\nbound = "discrete"\n'
    written(here, first=recipe.format("vpsde"), second=recipe.format("cld"))
    result = here / "results" / "mine-smoke.json"

    def after(*options: str) -> list[dict[str, Any]]:
        code, _, err = said("reproduce", "mine", *SMOKE, *options)
        assert code == 0, err
        return [run["figures"][0] for run in read(result)["runs"]]

    after("--only", "first", "--runs", "here")
    first, second = after("--only", "second", "--runs", "there")
    apart = second["bits_per_dim"] - first["bits_per_dim"]
    error = math.hypot(first["draw_error"], second["draw_error"])
    drawn = {"run": "first", "difference": apart, "draw_error": error, "examples": 4}
    assert second["against"] == drawn and apart != 0
    assert "(draws) |" in (here / "results" / "mine-smoke.md").read_text(encoding="utf-8")

    record = read(result)  # as if the first had been another model's
    older = record["runs"][0]["figures"][0]
    older["bits_per_dim"] += 1
    record["runs"][1]["figures"][0]["against"]["difference"] -= 1
    result.write_text(json.dumps(record), encoding="utf-8")
    kept = after("--only", "second", "--runs", "there")[1]["against"]
    assert kept["difference"] == pytest.approx(apart - 1, abs=1e-12)
    first, second = after("--only", "first", "--runs", "here")
    assert second["against"] == drawn
    none = {"run": "first", "difference": 0, "standard_error": 0, "examples": 4}
    assert first["against"] == none

    paired = after("--runs", "there")[1]["against"]
    assert paired["difference"] == pytest.approx(apart, abs=1e-12)
    assert paired["standard_error"] > 0 and "draw_error" not in paired
    shutil.rmtree(here / "there")
    # the first is done once more, and is what it was: what was found out about the two still holds
    assert after("--only", "first", "--runs", "here")[1]["against"] == paired


def test_a_run_that_is_damaged_and_one_that_is_not(here: Path, said: Said) -> None:
    """As after a copy that was not finished: the other run is done all the same."""
    recipe = 'about = "learned"\n[process]\nprocess = "learned-1"\n[model]\n'
    recipe += 'parametrisation = "joint"\n[[evaluate]]\nbound = "discrete"\n'
    written(here, first=recipe, second=recipe + "draws = 4\n")
    only = ("--only", "first", "--through", "train")
    assert said("reproduce", "mine", *SMOKE, *only)[0] == 0
    for path in (here / "runs/reproduce-smoke/mine/first").glob("checkpoints/*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    code, _, err = said("reproduce", "mine", *SMOKE)
    assert code == 2 and "1 of 2 runs failed:" in err and "first: " in err and "damaged" in err
    first, second = read(here / "results" / "mine-smoke.json")["runs"]
    assert (first["complete"], second["complete"]) == (False, True)
    assert first["learned"]["of"] == "the last step, not averaged"
    assert second["learned"]["of"] == "the best step, averaged"


@pytest.mark.parametrize("what", ["config.json", "metrics.jsonl", "done.json", "figure", "rows"])
def test_one_file_that_is_damaged(what: str, here: Path, said: Said) -> None:
    """The other run is done, and what was found before stays."""
    recipe = 'about = "{}"\n[[evaluate]]\nbound = "discrete"\n'
    written(here, first=recipe.format("first"), second=recipe.format("second"))
    folder, result = here / "runs/reproduce-smoke/mine/first", here / "results/mine-smoke.json"
    assert said("reproduce", "mine", *SMOKE, "--only", "first")[0] == 0
    (before,) = read(result)["runs"]
    inside = {"figure": "table/discrete/*.json", "rows": "table/discrete/*/rows-*.npz"}
    (file,) = (p for p in folder.glob(inside.get(what, what)) if p.name != "settings.json")
    content = {"done.json": b"5", "metrics.jsonl": b"\xff\xfe"}
    file.write_bytes(content.get(what, file.read_bytes()[:40]))
    code, _, err = said("reproduce", "mine", *SMOKE, "--only", "second")
    assert code == 0, err
    unread = what in ("config.json", "metrics.jsonl")
    assert ("first can't be read and is left out" in err) == unread
    first, second = read(result)["runs"]
    for run in (first, before):
        run["figures"][0].pop("against")
    assert first == before and second["complete"]
    assert said("reproduce", "mine", *SMOKE)[0] == 0
    first, second = read(result)["runs"]
    assert first["figures"][0]["bits_per_dim"] == before["figures"][0]["bits_per_dim"]
    assert first["complete"] and second["complete"]


def test_results_that_would_be_lost(here: Path, said: Said) -> None:
    """What can't be read is copied first; what is not finished stays where its run is elsewhere."""
    recipe = 'about = "{}"\n[[evaluate]]\nbound = "discrete"\n[[evaluate]]\nbound = "tweedie"\n'
    written(here, first=recipe.format("first"), second=recipe.format("second"))
    result = here / "results" / "mine-smoke.json"
    assert said("reproduce", "mine", *SMOKE, "--only", "first", "--runs", "here")[0] == 0
    done = json.loads((here / "here/first/done.json").read_text())
    (here / "here/first/done.json").write_text(json.dumps(done[:2]))  # as if stopped in between
    only = ("--only", "first", "--runs", "here", "--through", "train")
    assert said("reproduce", "mine", *SMOKE, *only)[0] == 0
    result.unlink()
    assert said("reproduce", "mine", *SMOKE, *only)[0] == 0
    (first,) = read(result)["runs"]
    assert not first["complete"] and len(first["figures"]) == 1
    only = ("--only", "second", "--runs", "there", "--through", "train")
    assert said("reproduce", "mine", *SMOKE, *only)[0] == 0
    assert read(result)["runs"][0] == first and len(read(result)["runs"]) == 2
    text = "<<<<<<< HEAD\n" + result.read_text()
    result.write_text(text)
    code, out, _ = said("reproduce", "mine", *SMOKE, *only)
    assert code == 0 and "can't be read" in out and "mine-smoke-before.json keeps" in out
    assert result.with_stem("mine-smoke-before").read_text() == text
    assert [run["name"] for run in read(result)["runs"]] == ["second"]


def test_what_is_trained_anew_does_not_replace_figures(here: Path, said: Said) -> None:
    """Of two copies of a run that are not finished, the one with more figures is in the table."""
    looks = '[[evaluate]]\nbound = "discrete"\n[[evaluate]]\nbound = "tweedie"\n'
    written(here, mine=f'about = "mine"\n{looks}')
    result = here / "results" / "mine-smoke.json"
    assert said("reproduce", "mine", *SMOKE, "--runs", "here")[0] == 0
    done = json.loads((here / "here/mine/done.json").read_text())
    (here / "here/mine/done.json").write_text(json.dumps(done[:2]))  # as if stopped in between
    result.unlink()
    for folder, figures in (("here", 1), ("there", 1)):  # there it is only trained
        code = said("reproduce", "mine", *SMOKE, "--runs", folder, "--through", "train")[0]
        assert code == 0
        (run,) = read(result)["runs"]
        assert (run["complete"], len(run["figures"])) == (False, figures)


def test_a_run_that_fails_and_one_that_does_not(here: Path, said: Said) -> None:
    good = 'about = "good"\n[[evaluate]]\nbound = "discrete"\n'
    written(here, bad=good + 'process = ["mine"]\n', good=good)  # a folder, but no run
    pixels = np.random.default_rng(0).integers(17, size=(30, 8, 8), dtype=np.uint8)
    np.savez(here / "own.npz", train=pixels[:20], test=pixels[20:], levels=17)
    code, _, err = said("reproduce", "mine", *SMOKE, "--data", "own.npz")
    assert code == 2
    assert "1 of 2 runs failed" in err and "  bad: " in err and "mine" in err
    record = read(here / "results" / "mine-smoke.json")
    assert not record["complete"]
    bad, fine = record["runs"]
    assert (bad["complete"], len(bad["figures"])) == (False, 0)
    assert (fine["complete"], len(fine["figures"])) == (True, 1)
    assert fine["data"]["source"] == "own.npz"
    assert str(here) not in json.dumps(record)  # paths of this machine concern nobody
    # figures of another recipe are not this one's, and are not lost
    file = here / "results" / "mine-smoke.json"
    table, before = here / "mine" / "good.toml", file.read_bytes()
    table.write_text(good + "[training.optimiser]\nlr = 0.5\n")
    code, out, err = said("reproduce", "mine", *SMOKE, "--data", "own.npz", "--only", "good")
    assert code == 2 and "holds a run with other options" in err
    assert "have changed since: good. They leave the table" in " ".join(out.split())
    assert (here / "results" / "mine-smoke-before.json").read_bytes() == before
    _, changed = read(file)["runs"]
    assert (changed["complete"], changed["figures"]) == (False, [])
    # nor by the next change
    for content in (before, before + b"\n", before):
        file.write_bytes(content)
        code, _, _ = said("reproduce", "mine", *SMOKE, "--data", "own.npz", "--only", "good")
        assert code == 2
    kept = sorted((here / "results").glob("mine-smoke-before*.json"), key=lambda p: len(p.name))
    assert [path.read_bytes() for path in kept] == [before, before + b"\n"]


def test_killed_and_gone_on_with(here: Path) -> None:
    """SIGTERM reaches the runs, which save; the same command finishes them."""
    table = here / "mine"
    table.mkdir()
    (table / "table.toml").write_text(
        'title = "Mine"\n[[run]]\nrecipe = "short"\n[[run]]\nrecipe = "long"\n'
    )
    recipe = 'about = "long"\n[training]\nsteps = 2000\nbatch = 4\n'
    recipe += '[model]\nnetwork = "unet-tiny"\nwidth = 8\nmultipliers = [1, 1]\n'
    recipe += "[training.watch]\nlog_every = 1\nvalid_every = 0\nsample_every = 0\n"
    (table / "long.toml").write_text(recipe)
    short = recipe.replace("2000", "2") + "[[sample]]\nn = 4\nsteps = 2\n"
    (table / "short.toml").write_text(short)
    command = ("reproduce", "mine", "--device", "cpu")
    first = helpers.start(*command, cwd=here)
    run = here / "runs/reproduce/mine/long"
    helpers.waited(lambda: helpers.reached(run, 5))
    (early,) = read(here / "results/mine.json")["runs"]  # written as soon as a run is done
    assert early["name"] == "short" and early["complete"] and early["steps"] == 2
    drawn = here / "results/mine-short-ancestral-2.png"  # its picture, too
    picture = here / "runs/reproduce/mine/short/table/ancestral-2.png"
    assert drawn.read_bytes() == picture.read_bytes()
    first.tell(signal.SIGTERM)
    ended = first.wait()
    assert ended.code == 143
    assert "everything is saved" in ended.err
    done = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert 5 <= done < 2000
    short, found = read(here / "results/mine.json")["runs"]
    assert short == early
    assert not found["complete"] and found["steps"] == done
    over = helpers.start(*command, "--minutes", "1e-6", cwd=here).wait()
    assert over.code == 0 and "the time is over; repeat the command to go on" in over.out
    # going on, its terminal is closed: nobody can be told, and the runs save all the same
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "ornstein", *command]
    second = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=here, env=helpers.environment()
    )
    os.close(theirs)
    helpers.waited(lambda: helpers.reached(run, done + 5))
    os.close(ours)
    second.send_signal(signal.SIGHUP)
    assert second.wait(60) != 0
    assert _free(run.parent / "reproduce.lock")  # nobody was left behind
    starts = (run / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, done]
    end = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    short, found = read(here / "results/mine.json")["runs"]
    assert short == early
    assert not found["complete"] and done + 5 <= found["steps"] == end < 2000


def test_one_at_a_time(here: Path, said: Said) -> None:
    """A lock that commands inherit; a command that was killed says so."""
    table = here / "mine"
    table.mkdir()
    (table / "table.toml").write_text('title = "Mine"\n[[run]]\nrecipe = "long"\n')
    watch = "[training.watch]\nlog_every = 1\nvalid_every = 0\nsample_every = 0\n"
    (table / "long.toml").write_text(f'about = "long"\n[training]\nsteps = 100000\n{watch}')
    command = ("reproduce", "mine", "--device", "cpu")
    first = helpers.start(*command, cwd=here)
    run = here / "runs/reproduce/mine/long"
    helpers.waited(lambda: helpers.reached(run, 2))
    first.tell(signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL
    code, _, err = said(*command)  # what it had started goes on
    assert code == 2 and "another process is at work in runs/reproduce/mine" in err
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(here) in os.readlink(path.parent / "cwd") and b"train" in words:
                os.kill(int(path.parent.name), signal.SIGTERM)
    second = helpers.waited(lambda: _free(here / "runs/reproduce/mine/reproduce.lock"))
    assert second


def _free(lock: Path) -> bool:
    """Whether nobody holds it."""
    import fcntl

    with lock.open() as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    ("table", "only"),
    [
        pytest.param("mnist", "joint-alda", marks=pytest.mark.long),
        pytest.param("cifar10", "joint-malda", marks=pytest.mark.slow),
    ],
)
def test_published_sets_in_miniature(table: str, only: str, here: Path, said: Said) -> None:
    """Recipes of the paper's tables, from files as they are published to a picture."""
    write_idx(here / "data")
    _, _, batches = cifar(8)
    (here / "data" / "cifar-10-batches-bin").mkdir()
    for name, content in batches.items():
        (here / "data" / "cifar-10-batches-bin" / name).write_bytes(content)
    code, _, err = said("reproduce", table, *SMOKE, "--data-folder", "data", "--only", only)
    assert code == 0, err
    (run,) = read(here / "results" / f"{table}-smoke.json")["runs"]
    assert run["paper"] in (124.6, 3.13) and run["complete"]
    assert all(figure["bits_per_dim"] > 0 for figure in run["figures"])
    if table == "cifar10":
        picture = here / "runs/reproduce-smoke/cifar10/joint-malda/table/ancestral-2.png"
        assert picture.read_bytes()[1:4] == b"PNG"


def test_mistakes(here: Path, said: Said) -> None:
    for words, wrong in (
        (("reproduce", "mnst"), "there is no table 'mnst'"),
        (("reproduce", "runtme"), "Perhaps you meant 'runtime'"),
        (("reproduce", "digits", "--only", "joint-cdl"), "--only joint-cdl; expected some of"),
        (("reproduce", "digits", "--jobs", "0"), "--jobs 0; expected a whole number ≥ 1"),
        (("reproduce", "mnist", "--data-folder", "nowhere"), "nowhere"),
        (("train", "--recipe", "digits/channl"), "Perhaps you meant 'digits/channel'"),
        (("train", "--recipe", "digits/channel", "--config", "x.json"), "expected one of them"),
        (("train", "--smoke"), "--smoke is for a --recipe"),
    ):
        code, _, err = said(*words)
        assert code == 2 and wrong in err, err
    assert not (here / "runs").exists()
