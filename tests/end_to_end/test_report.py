"""Runs as their folders tell them, and the report: whole HTML that says what the files say."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections import Counter
from decimal import ROUND_HALF_EVEN, Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import safetensors.torch
import torch
from matplotlib.figure import Figure

import ornstein
from ornstein import viz
from ornstein.data import Dataset, Split
from ornstein.networks import MLP
from ornstein.training import Training, Watch, fit
from ornstein.training.reading import RunSummary, names, read_run, read_runs

# ---------------------------------------------------------------- folders


CONFIG: dict[str, Any] = {
    "format": 1,
    "experiment": {
        "data": {"data": "digits"},
        "process": {"process": "cld"},
        "model": {"parametrisation": "channel"},
        "training": {"steps": 400},
    },
    "training": {"steps": 400, "optimiser": {"lr": 0.004}},
    "model": {
        "parametrisation": "channel",
        "process": {"kind": "diffusion", "name": "cld", "S": [[1, 0], [0, 4]]},
    },
    "data": {"name": "digits", "levels": 17, "fingerprint": "abc"},
    "provenance": {"torch": "2.13.0", "commit": "0123456789ab"},
}


def lines_of(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def metrics(steps: int = 8, learned: bool = False) -> list[dict[str, Any]]:
    """Lines such as training writes."""
    found: list[dict[str, Any]] = []
    for i in range(1, steps + 1):
        line = {"step": 50 * i, "bits_per_dim": 2 + 1 / i, "seconds": 3.0 * i}
        line |= {"prior": 0.01, "diffusion": 1.9 + 1 / i, "reconstruction": 0.09}
        if learned:
            line["Q"] = [[0, -i / 8, 0.5], [i / 8, 0, -1], [-0.5, 1, 0]]
            line["D"] = [[0.1 * i, 0, 0], [0, 1, 0.2], [0, 0.2, 2]]
        found.append(line)
        if i % 4 == 0:
            seen = {"valid_bits_per_dim": 2.1 + 1 / i, "valid_standard_error": 0.0321}
            found.append({"step": 50 * i, **seen, "valid_diffusion": 2.0})
    return found


def evaluation(**more: Any) -> dict[str, Any]:
    """A record such as `ornstein evaluate` writes."""
    edges = np.linspace(-5, 5, 11)
    bits = np.exp(-(((edges[1:] + edges[:-1]) / 2) ** 2) / 4)
    record = {
        "bits_per_dim": 2.08319,
        "standard_error": 0.02847,
        "draw_error": 0.0213,
        "prior": 2e-5,
        "diffusion": float(bits.sum()),
        "reconstruction": 0.00788,
        "examples": 1000,
        "draws": 8,
        "dims": 64,
        "bound": "discrete",
        "process": "cld",
        "parametrisation": "channel",
        "truncation": "standard error 0.0196",
        "density": False,
        "curve": {
            "logsnr": edges.tolist(),
            "bits": bits.tolist(),
            "errors": [None, *(0.1 * bits[1:]).tolist()],
        },
        "split": "test",
        "step": 400,
        "which": "best",
    }
    return {**record, **more}


def make_run(
    folder: Path,
    records: list[dict[str, Any]] | None = None,
    evaluations: dict[str, dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """A run's folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    if records is not None:
        (folder / "metrics.jsonl").write_text(lines_of(*records))
    for name, record in (evaluations or {}).items():
        (folder / "evaluations").mkdir(exist_ok=True)
        (folder / "evaluations" / f"{name}.json").write_text(json.dumps(record))
    return folder


def add_checkpoint(folder: Path, step: int = 400, state: str | None = None) -> Path:
    place = folder / "checkpoints" / f"step-{step:08d}"
    place.mkdir(parents=True)
    tensors = {"network.a": torch.zeros(30, 4), "network.b": torch.zeros(7), "mean": torch.zeros(9)}
    safetensors.torch.save_file(tensors, place / "model.safetensors")
    best = {"step": 400, "bits_per_dim": 2.0, "standard_error": 0.01}
    record = {"format": 1, "step": step, "best": best, "seconds": 25.5, "files": {}}
    (place / "state.json").write_text(state or json.dumps(record))
    return place


# ---------------------------------------------------------------- reading


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A real run of a learned process: the summary has the very lines that the loop gave."""
    x = torch.randn(96, 2)
    nothing = Split(x[:0])
    data = Dataset("points", Split(x[:64]), Split(x[64:]), nothing, None, "here")
    process = ornstein.learned(1)
    model = ornstein.ScoreModel(
        MLP((2,), width=8, depth=1, variables=2), process, ornstein.Continuous(), "joint"
    )
    watch = Watch(log_every=2, valid_every=3, valid_examples=16, sample_every=0)
    training = Training(steps=6, batch=8, compile="off", watch=watch)
    told, seen = [], []
    for step in fit(model, data, training, folder=tmp_path / "run"):
        told += [step.metrics] if step.metrics else []
        seen += [(step.number, step.validation.bits_per_dim)] if step.validation else []
    run = read_run(tmp_path / "run")
    assert [dict(line) for line in run.training] == told
    assert [(line["step"], line["valid_bits_per_dim"]) for line in run.validation] == seen
    assert run.best is not None
    assert (run.best["step"], run.best["bits_per_dim"]) == min(seen, key=lambda pair: pair[1])
    assert run.parameters == sum(p.numel() for p in model.network.parameters())
    assert (run.steps, run.total) == (6, 6)
    assert run.seconds is not None and run.seconds >= told[-1]["seconds"]
    assert (run.data, run.process, run.parametrisation) == ("points", process.name, "joint")
    assert (run.n_vars, run.learned, run.name) == (2, True, "run")
    assert run.training[-1]["Q"] == process.Q.tolist()
    assert run.provenance["torch"] == str(torch.__version__)
    text = viz.report([run])
    check(text)
    assert measured_in(text, run.best["bits_per_dim"], run.best["standard_error"])


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "new"))
    assert (run.training, run.validation, run.evaluations, run.pictures) == ((), (), (), ())
    assert (run.steps, run.total, run.seconds, run.best, run.parameters) == (
        0,
        400,
        None,
        None,
        None,
    )
    assert (run.process, run.n_vars, run.parametrisation) == ("cld", 2, "channel")
    assert run.provenance == CONFIG["provenance"]


def test_what_a_folder_holds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", metrics(learned=True), {"b": evaluation(), "a": evaluation()})
    add_checkpoint(folder, 300)
    add_checkpoint(folder, 400)
    (folder / "starts.jsonl").write_text(
        lines_of({"step": 0, "commit": "x"}, {"step": 3, "commit": "y"}) + '{"step": 4, "com'
    )
    (folder / "samples").mkdir()
    for name in ("step-00000900", "step-00001000", "cld", "alda"):
        (folder / "samples" / f"{name}.png").touch()
    run = read_run(folder)
    assert run.parameters == 30 * 4 + 7
    assert run.seconds == 25.5
    assert [start["commit"] for start in run.starts] == ["x", "y"]
    assert [record["name"] for record in run.evaluations] == ["a", "b"]
    assert [title for title, _ in run.pictures] == ["step 900", "step 1,000", "alda", "cld"]
    assert run.best == {"step": 400, "bits_per_dim": 2.1 + 1 / 8, "standard_error": 0.0321}


def test_a_cut_last_line_is_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", metrics())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 450, "bits_per_d')
    run = read_run(folder)
    assert [line["step"] for line in run.training] == list(range(50, 401, 50))


def test_damaged_parts_are_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", metrics(), {"good": evaluation(), "other": {"loss": 1.0}})
    (folder / "evaluations" / "torn.json").write_text('{"bits_per_dim": 1.')
    add_checkpoint(folder, 300)
    add_checkpoint(folder, 400, state="{")
    with pytest.warns(UserWarning) as caught:
        run = read_run(folder)
    said = " ".join(str(warning.message) for warning in caught)
    for name in ("other.json", "torn.json", "step-00000400"):
        assert name in said
    assert [record["name"] for record in run.evaluations] == ["good"]
    assert run.parameters == 127  # of the one before


def test_a_damaged_model_file_has_no_count(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (add_checkpoint(folder) / "model.safetensors").write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match=r"model\.safetensors can't be read"):
        assert read_run(folder).parameters is None


def test_what_is_no_run_is_explained(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    (tmp_path / "file").touch()
    broken = make_run(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    binary = make_run(tmp_path / "binary")
    (binary / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    checkpoint = add_checkpoint(tmp_path / "runs" / "a")
    (checkpoint / "config.json").write_text("{}")
    for path, message in (
        (tmp_path / "nowhere", "does not exist; expected the folder of a run"),
        (tmp_path / "file", "is a file; expected the folder of a run"),
        (tmp_path / "runs", r"has no config\.json; .* These in it do: a\."),
        (broken, "can't be read"),
        (binary, "is not text"),
        (checkpoint, f"is a checkpoint; expected the folder of its run, {tmp_path / 'runs' / 'a'}"),
    ):
        with pytest.raises(ValueError, match=message):
            read_run(path)


def test_a_partial_description_is_no_obstacle(tmp_path: Path) -> None:
    """A network of one's own: what the evaluations agree on is all that is known."""
    bare = {"experiment": None, "model": {"network": "Mine"}, "data": None}
    run = read_run(make_run(tmp_path / "a", metrics(), {"e": evaluation()}, bare))
    assert (run.process, run.parametrisation, run.n_vars, run.data) == (
        "cld",
        "channel",
        None,
        None,
    )
    for name, count in (("learned-cld", 2), ("learned-alda-full", 3), ("learned-3-full", 4)):
        asked = {"model": {}, "experiment": {"process": {"process": name}}}
        run = read_run(make_run(tmp_path / name, config=asked))
        assert (run.process, run.n_vars) == (name, count)
    check(viz.report([run]))


def test_names_are_short_and_differ() -> None:
    assert names(["runs/a", "runs/b"]) == ["a", "b"]
    assert names(["x/1/run", "x/2/run", "y"]) == ["1/run", "2/run", "y"]
    assert names(["/p/a/c/run", "/p/b/c/run", "/p/b/d/run"]) == ["a/c/run", "b/c/run", "d/run"]
    assert names(["/p/a", "/p/a/../a"]) == ["p/a (1)", "p/a (2)"]
    assert names(["/run", "/p/run"]) == ["run", "p/run"]
    assert names(["."]) == [Path.cwd().name]


# ---------------------------------------------------------------- curves


def panel(figure: Figure, title: str) -> Any:
    return next(axes for axes in figure.axes if title in axes.get_title(loc="left"))


def drawn(axes: Any) -> list[list[list[float]]]:
    return [line.get_xydata().tolist() for line in axes.lines]


def test_training_curves_carry_the_data(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", metrics()))
    figure = viz.training([run])
    steps, times = panel(figure, "over steps"), panel(figure, "over time")
    assert [[50.0 * i, 2 + 1 / i] for i in range(1, 9)] in drawn(steps)
    assert [[3.0 * i, 2 + 1 / i] for i in range(1, 9)] in drawn(times)
    assert [[200.0, 2.35], [400.0, 2.225]] in drawn(steps)  # validation
    assert [[12.0, 2.35], [24.0, 2.225]] in drawn(times)  # at the time of the training line
    (bars,) = steps.collections
    assert [segment.tolist() for segment in bars.get_segments()] == [
        [[200.0, 2.35 - 0.0321], [200.0, 2.35 + 0.0321]],
        [[400.0, 2.225 - 0.0321], [400.0, 2.225 + 0.0321]],
    ]
    low, high = steps.get_ylim()
    assert low < 2.125 and high > 2.35


def test_hours_and_minutes(tmp_path: Path) -> None:
    slow = [{"step": i, "bits_per_dim": 1.0, "seconds": 3600.0 * i} for i in (1, 2, 3)]
    times = panel(viz.training([read_run(make_run(tmp_path / "a", slow))], ["seconds"]), "time")
    assert times.get_xlabel() == "hours of training"
    assert drawn(times) == [[[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]]]


def test_values_above_the_frame_are_told(tmp_path: Path) -> None:
    high = [{"step": i, "bits_per_dim": 1 + 1000.0 * (i == 1), "seconds": i} for i in range(1, 30)]
    for name, records, said in (("a", high, True), ("b", metrics(), True), ("c", high[1:], False)):
        figure = viz.training([read_run(make_run(tmp_path / name, records))], ["step"])
        words = " ".join(text.get_text() for text in figure.axes[0].texts)
        top = figure.axes[0].get_ylim()[1]
        above = any(record.get("bits_per_dim", 0) > top for record in records)
        assert above == ("above the frame" in words) == said


def test_a_loss_that_is_no_bound_has_its_own_panel(tmp_path: Path) -> None:
    simple = [{"step": i, "loss": 0.5 / i, "seconds": i} for i in (1, 2, 3)]
    run = read_run(make_run(tmp_path / "a", simple))
    figure = viz.training([run], ["step"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Loss over steps"]
    assert drawn(figure.axes[0])[0] == [[1.0, 0.5], [2.0, 0.25], [3.0, 0.5 / 3]]
    both = viz.training([run, read_run(make_run(tmp_path / "b", metrics()))], ["step"])
    titles = [axes.get_title(loc="left") for axes in both.axes]
    assert titles == ["Bits/dim over steps", "Loss over steps"]


def test_parts_carry_the_data(tmp_path: Path) -> None:
    (axes,) = viz.parts(read_run(make_run(tmp_path / "a", metrics()))).axes
    for expected in (
        [[50.0 * i, 0.01] for i in range(1, 9)],
        [[50.0 * i, 1.9 + 1 / i] for i in range(1, 9)],
        [[200.0, 2.0], [400.0, 2.0]],
    ):
        assert expected in drawn(axes)


def test_matrices_carry_the_data(tmp_path: Path) -> None:
    figure = viz.matrices(read_run(make_run(tmp_path / "a", metrics(learned=True))))
    Q, D = panel(figure, "Entries of Q"), panel(figure, "Entries of D")
    assert [[50.0 * i, -i / 8] for i in range(1, 9)] in drawn(Q)
    assert [[50.0 * i, 0.5] for i in range(1, 9)] in drawn(Q)
    assert [[50.0 * i, 0.1 * i] for i in range(1, 9)] in drawn(D)
    assert [[50.0 * i, 0.2] for i in range(1, 9)] in drawn(D)
    assert len(Q.lines) == 3 + 1  # above the diagonal, and zero
    assert len(D.lines) == 4 + 1  # the diagonal, what is not always zero, and zero
    numbers = [text.get_text() for text in panel(figure, "Q at step 400").texts]
    assert numbers == ["0", "−1.00", "0.50", "1.00", "0", "−1.00", "−0.50", "1.00", "0"]


def test_matrices_of_a_process_that_is_not_learned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a run whose process is learned"):
        viz.matrices(read_run(make_run(tmp_path / "a", metrics())))


def test_the_area_under_a_curve_is_the_diffusion() -> None:
    record = evaluation()
    (axes,) = viz.where({"a$b$": record}).axes
    assert np.sum(axes.lines[0].get_ydata()) * 1.0 == pytest.approx(record["diffusion"], rel=1e-12)
    (axes,) = viz.shares({"a": record, "b": record}).axes
    total = sum(bar.get_width() for bar in axes.patches) / 2
    assert total == pytest.approx(2e-5 + record["diffusion"] + 0.00788, rel=1e-12)
    with pytest.raises(ValueError, match="'torn'; expected records"):
        viz.where({"torn": {**record, "curve": None}})
    with pytest.raises(ValueError, match="no evaluation"):
        viz.shares({})


# ---------------------------------------------------------------- the page

EMPTY = {"meta", "img", "br"}


class Page(HTMLParser):
    """Reads a document strictly: what is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.images: list[bytes] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.look(tag, attributes)
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "br" and self.rows and "tr" in self.open:
            self.rows[-1][-1] += "\n"

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.look(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if "tr" in self.open:
            self.rows[-1][-1] += data.replace("\xa0", " ")

    def look(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for key, value in attributes:
            value = value or ""
            assert not key.startswith("on"), f"a script in {key}"
            if key == "id":
                self.ids[value] += 1
            if key in ("src", "srcset", "data", "action", "poster"):
                head, _, content = value.partition(",")
                assert head == "data:image/png;base64"
                self.images.append(base64.b64decode(content, validate=True))
            if key.endswith("href"):
                self.links.append(value)
            self.links += re.findall(r"url\(([^)]*)\)", value)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def check(text: str) -> Page:
    """Everything that must hold for every report."""
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(page.tags)
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert max(page.ids.values()) == 1, "an id is used twice"
    for link in page.links:
        inside = link.startswith("data:image/png;base64,")  # of pixels inside a drawing
        assert inside or (link.startswith("#") and link[1:] in page.ids), link[:80]
    for image in page.images:
        assert image[:8] == b"\x89PNG\r\n\x1a\n"
    for name in set(re.findall(r"var\(--([\w-]+)\)", text)):
        assert len(re.findall(rf"--{name}: #", text)) == 2, f"{name} has no light or no dark colour"
    return page


def two_digits(value: float, error: float) -> str:
    """By decimal arithmetic: the error to two digits, the value to as many places."""
    spread = Decimal(error)
    spread = spread.quantize(Decimal(1).scaleb(spread.adjusted() - 1), ROUND_HALF_EVEN)
    unit = Decimal(1).scaleb(min(spread.adjusted() - 1, 0))
    number = Decimal(value).quantize(unit) + 0  # no minus before zero
    return f"{number} ± {spread.quantize(unit)}".replace("-", "−")


def measured_in(text: str, value: float, error: float) -> bool:
    return two_digits(value, error) in "\n".join(cell for row in Page(text).rows for cell in row)


@pytest.mark.parametrize("value", [2.08319, -0.00091, 0.0, 123.456])
@pytest.mark.parametrize("error", [0.02847, 0.0073, 0.0996, 0.00999, 1.26, 0.000123])
def test_two_digits_of_the_error(value: float, error: float) -> None:
    assert viz.measured(value, error) == two_digits(value, error)


def test_numbers_without_an_error() -> None:
    assert viz.measured(1.23456) == "1.2346"
    assert viz.measured(-1.5, None) == "−1.5000"
    assert viz.measured(-1e-9, 0.1) == "0.00 ± 0.10"
    assert viz.measured(None, 0.1) == viz.measured(float("nan")) == "not a number"


def test_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    own = evaluation()
    other = evaluation(
        process="alda",
        bits_per_dim=2.0872,
        standard_error=0.0291,
        pair={"against": "own", "difference": -0.00401, "standard_error": 0.00783},
    )
    folder = make_run(tmp_path / "a", metrics(), {"own": own, "other": other})
    add_checkpoint(folder)
    page = check(viz.report([read_run(folder)], title="Two figures"))
    (head,) = [row for row in page.rows if row[0] == "run"]
    (row,) = [row for row in page.rows if row[0] == "a"]
    told = dict(zip(head, row, strict=True))
    assert told["evaluations"] == "2.083 ± 0.028 test cld\n2.087 ± 0.029 test alda"
    assert told["best validation"] == "2.225 ± 0.032\nat step 400"
    assert (told["K"], told["parameters"], told["steps"]) == ("2", "127", "400")
    assert (told["time"], told["commit"]) == ("26 s", "0123456789ab")
    (head,) = [row for row in page.rows if row[0] == "evaluation"]
    first, second = (
        row for row in page.rows if row[0] in ("cld", "alda") and len(row) == len(head)
    )
    told = dict(zip(head, first, strict=True))
    assert (told["bits/dim"], told["difference"]) == ("2.083 ± 0.028", "—")
    assert told["from draws alone"] == "± 0.021"
    assert told["reconstruction"] == "0.0079"
    told = dict(zip(head, second, strict=True))
    assert told["difference"] == "−0.0040 ± 0.0078\nto cld"
    assert "Test split, 1,000 examples × 8 draws. The discrete bound" in page.text
    assert page.tags["svg"] == 5  # steps, time, parts; log SNR, shares


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    page = check(viz.report([read_run(make_run(tmp_path / "a"))]))
    for words in ("not validated yet", "Not evaluated yet", "Not sampled yet"):
        assert words in page.text
    assert page.tags["svg"] == 2  # two empty frames
    some = [make_run(tmp_path / "b", metrics()), make_run(tmp_path / "c", [], {"e": evaluation()})]
    page = check(viz.report(read_runs(some)))
    assert "Not evaluated yet: b." in page.text


def test_figures_that_differ_in_kind_come_with_a_warning(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", None, {"e": evaluation()}),
        make_run(tmp_path / "b", None, {"e": evaluation(bound="tweedie", split="valid")}),
    ]
    text = check(viz.report(read_runs(folders))).text
    assert (
        "differ in more than the model, in split (test, valid); bound (discrete, tweedie)" in text
    )
    other = make_run(tmp_path / "c", None, {}, {"data": {"name": "moons", "levels": None}})
    text = check(viz.report(read_runs([folders[0], other]))).text
    assert "about different data" in text and "may be negative" in text


def test_names_and_words_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&\"$a$"
    folder = make_run(tmp_path / "a", metrics(learned=True))
    (folder / "evaluations").mkdir()
    record = evaluation(process=evil, bound=evil, truncation=evil, split=evil, which=evil)
    (folder / "evaluations" / "e.json").write_text(json.dumps(record))
    config = {**CONFIG, "training": {evil: evil}, "data": {"name": evil}}
    (folder / "config.json").write_text(json.dumps(config))
    run = read_run(folder, name=evil)
    table = viz.Table((evil, evil), ((evil, evil),))
    extra = viz.Section(evil, evil, table, evil, [(evil, Figure())], folded=[(evil, table)])
    text = viz.report([run], evil, evil, [extra])
    page = check(text)
    assert "<script" not in text
    assert page.text.count("<script>alert") >= 12


def test_many_runs(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{i}" / "run", metrics(4 + i, learned=i < 2), {"e": evaluation()})
        for i in range(11)
    ]
    page = check(viz.report(read_runs(folders)))
    assert [row[0] for row in page.rows if len(row) == 11][1:] == [f"{i}/run" for i in range(11)]
    assert page.tags["svg"] == 2 + 2 * 2 + 2  # training; eight evaluations at a time; Q and D
    titles = " ".join(page.text.split())
    assert "The runs have the same options" in titles


def test_options_that_differ_are_shown(tmp_path: Path) -> None:
    fast = {"training": {"steps": 400, "optimiser": {"lr": 0.1}}}
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", config=fast)]
    page = check(viz.report(read_runs(folders)))
    start = page.rows.index(["option", "a", "b"])
    assert page.rows[start + 1] == ["training.optimiser.lr", "0.004", "0.1"]
    assert page.rows[start + 2][0] == ""  # the versions: nothing else differs
    assert read_run(folders[1]).options == {
        "data.data": "digits",
        "process.process": "cld",
        "model.parametrisation": "channel",
        "model.histogram": "false",  # what went without saying when such a run was made
        "model.bins": "on",
        "model.bins_of": "z",
        "model.known_noise": "guessed",
        "training.steps": "400",
        "training.optimiser.lr": "0.1",
    }


def test_pictures_are_inside(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    for i, name in enumerate(("step-00000100", "step-00000200", "cld")):
        x = torch.full((4, 1, 8, 8), 5 * i)
        viz.picture(x, 17, folder / "samples" / f"{name}.png")
    (folder / "samples" / "torn.png").write_bytes(b"no picture")
    page = check(viz.report([read_run(folder)]))
    files = [(folder / "samples" / f"{n}.png").read_bytes() for n in ("step-00000200", "cld")]
    assert page.images == files  # the newest, and those with names
    assert "not a PNG file" in page.text
    assert "step 200" in page.text and "step 100" not in page.text


def test_sections_of_ones_own(tmp_path: Path) -> None:
    wide, crowded = Figure(figsize=(12, 4)), Figure(figsize=(5, 4))
    wide.subplots().plot([0, 1], [0, 1])
    points = np.random.default_rng(0).normal(size=(20_000, 2))
    crowded.subplots().scatter(*points.T)
    section = viz.Section(
        "Mine",
        "First.\n\nSecond.",
        viz.Table(("what", "how much"), (("x", "1.5 ± 0.1"),)),
        figures=[("A line.", wide), ("A crowd.", crowded)],
    )
    page = check(viz.report([read_run(make_run(tmp_path / "a"))], sections=[section]))
    assert ["x", "1.5 ± 0.1"] in page.rows
    assert page.tags["svg"] == 3 and len(page.images) == 1  # what is large is kept as pixels
    assert page.text.index("Samples") < page.text.index("Mine")
    with pytest.raises(ValueError, match="1 cells and its head 2"):
        viz.report(
            [read_run(tmp_path / "a")], sections=[viz.Section("x", table=viz.Table("ab", ["c"]))]
        )


def test_reports_of_nothing_or_of_one_name(tmp_path: Path) -> None:
    run: RunSummary = read_run(make_run(tmp_path / "a"))
    with pytest.raises(ValueError, match="no run"):
        viz.report([])
    with pytest.raises(ValueError, match="expected names that differ"):
        viz.report([run, run])
    with pytest.raises(ValueError, match="no run"):
        viz.training([])


def test_a_report_is_the_same_each_time(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    run = read_run(make_run(tmp_path / "a", metrics(learned=True), {"e": evaluation()}))
    assert viz.report([run]) == viz.report([run])
    assert dict(matplotlib.rcParams) == before


def test_the_command(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", metrics(), {"e": evaluation()})
    out = tmp_path / "page.html"
    command = [sys.executable, "-m", "ornstein", "report", str(folder), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(ornstein.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert measured_in(out.read_text(encoding="utf-8"), 2.08319, 0.02847)


def test_the_library_does_without_matplotlib() -> None:
    code = "import sys, ornstein, ornstein.training.reading; print('matplotlib' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(ornstein.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout.strip() == "False", done.stderr
    assert callable(viz.curves)  # a function, though a file has its name
