"""The paper's run times, appendix B and figures: closed forms, and what the pictures show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import same_color
from matplotlib.figure import Figure

import ornstein
from ornstein import Constant, Diffusion, Linear, Process
from ornstein.bench import Race
from ornstein.bench.kernels import by_hand
from ornstein.data import load
from ornstein.evaluation import with_error
from ornstein.networks import UNet
from ornstein.reproduce import auxiliary as appendix
from ornstein.reproduce import runtime as times
from ornstein.viz import paper, style
from ornstein.viz.turns import take_turns
from tests.conformance.zoo import moved

F64 = torch.float64
CPU = torch.device("cpu")
TURN = [[0.0, -1.0], [1.0, 0.0]]


# ---------------------------------------------------------------- run times


def test_three_ways_to_the_kernel_of_cld() -> None:
    """By hand, ours and the paper's, where none of them loses digits."""
    s = torch.linspace(0.1, 0.6, 23, dtype=F64)
    ours, theirs = ornstein.cld().transition(s), times.paper_kernel(ornstein.cld(), s)
    response, factor = by_hand(s)
    assert float((ours.response - response).abs().max()) < 1e-9
    assert float((ours.cholesky - factor).abs().max()) < 1e-9
    assert float((theirs.response - response).abs().max()) < 1e-9
    assert float((theirs.cholesky - factor).abs().max()) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize(
    "process",
    [
        ornstein.alda(),
        ornstein.malda(),
        moved(ornstein.learned(2, full=True)),
        Diffusion(TURN, [[0.5, 0.2], [0.2, 0.7]], rate_q=Constant(3.0), rate_d=Constant(1.5)),
        Diffusion(TURN, [[0.5, 0.2], [0.2, 0.7]], v0_coupling=0.4, v0_variance=0.3),
    ],
    ids=["alda", "malda", "learned", "proportional rates", "coupled v0"],
)
def test_the_papers_algorithm_is_the_same_kernel(process: Diffusion) -> None:
    s = torch.linspace(0.1, 0.6, 23, dtype=F64)
    ours, theirs = process.transition(s), times.paper_kernel(process, s)
    assert float((ours.propagator - theirs.propagator).abs().max()) < 1e-9
    assert float((ours.response - theirs.response).abs().max()) < 1e-9
    assert float((ours.cholesky - theirs.cholesky).abs().max()) < 1e-9


def test_the_papers_algorithm_needs_one_clock() -> None:
    process = Diffusion(
        TURN, [[0.5, 0.2], [0.2, 0.7]], rate_q=Constant(5.0), rate_d=Linear(0.1, 10.0)
    )
    with pytest.raises(ValueError, match="not proportional"):
        times.paper_kernel(process, torch.ones(2, dtype=F64))


def test_a_kernel_of_another_process_is_refused() -> None:
    found = times.agree(ornstein.cld(), 16, CPU)
    assert set(found) == {times.BY_HAND, times.PAPER} and max(found.values()) < 1e-9
    with pytest.raises(ValueError, match="derived by hand differ"):
        times.agree(ornstein.cld(mass=0.5), 16, CPU)


def test_the_table_of_run_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own: milliseconds, ratios of the same round, what is published."""
    clock = {times.BY_HAND: 2.0, times.AUTOMATIC: 3.0, times.PAPER: 6.0, times.COPY: 1.0}
    drift = (1.0, 10.0, 0.5)  # of the machine from round to round

    def race(works: dict[str, Any], *rest: object, **options: object) -> Race:
        for work in works.values():
            work()
        return Race({name: tuple(1e-3 * clock[name] * f for f in drift) for name in works})

    monkeypatch.setattr(times, "race", race)
    record = json.loads(json.dumps(times.runtime(CPU, smoke=True), allow_nan=False))
    assert record["provenance"]["torch"] == str(torch.__version__)
    assert [(line["process"], line["data"]) for line in record["lines"]] == [
        ("cld", "cifar10"),
        ("cld", "mnist"),
        ("alda", "cifar10"),
        ("alda", "mnist"),
    ]
    for line in record["lines"]:
        for a, b in ((a, b) for a in line["ratios"] for b in line["ratios"]):
            assert math.isclose(line["ratios"][a][b], clock[a] / clock[b])
        assert (times.BY_HAND in line["seconds"]) == (line["process"] == "cld")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in times.rows(record)]
    assert all(len(row) == len(cells[0]) for row in cells)
    assert cells[2] == ["CLD, cifar10, plain calls", "2", "3", "6", "1", "1.5", "3", "2", "3"]
    assert cells[5] == ["ALDA, mnist, plain calls", "", "3", "6", "1", "", "", "2", "3"]
    assert cells[6] == ["published: CLD, cifar10", "27", "", "29", "", "", "1.07", "", ""]
    assert cells[7] == ["published: CLD, mnist", "6.2", "", "7", "", "", "1.13", "", ""]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_run_times_on_a_gpu() -> None:
    """Plain calls and graphs; the paper's algorithm waits for the host and can't be captured."""
    record = times.runtime(torch.device("cuda"), smoke=True)
    assert len(record["lines"]) == 8
    for line in record["lines"]:
        assert (times.PAPER in line["seconds"]) == (line["how"] == "plain calls")
        assert line["ratios"][times.AUTOMATIC][times.COPY] > 0.5  # nothing beats half a copy
    graphs = [line for line in record["lines"] if line["how"] != "plain calls"]
    assert [line["process"] for line in graphs] == ["cld", "cld", "alda", "alda"]


def test_what_races_returns_the_same_law() -> None:
    """z and v of every way have the mean and spread of the kernel: 40,000 numbers an image."""
    process, batch = ornstein.cld(), 6
    s = times._times(process, batch, CPU)
    x = torch.full((batch, 1, 200, 200), 1.5)
    kernel = process.transition(s)
    for sampled in (
        lambda: times.sampled_by_hand(s, x),
        lambda: times.paper_kernel(process, s).sample(x),
        lambda: process.transition(s).sample(x),
    ):
        y = sampled()[0].double()
        mean = 1.5 * kernel.response[..., None, None, None]
        spread = kernel.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        off = (y - mean).flatten(2).mean(-1) / spread * 200  # standard normal
        assert float(off.abs().max()) < 5
        assert float(((y - mean).flatten(2).std(-1) / spread - 1).abs().max()) < 5 / (200 * 1.4)


# ---------------------------------------------------------------- appendix B


def test_the_papers_example() -> None:
    """exp(−s)(cos s, −sin s): 0.9003 and −0.0903, where the paper prints −0.090."""
    found = appendix.example_mean()
    assert np.allclose(found["mean"], found["exact"], rtol=0, atol=1e-15)
    assert np.allclose(found["mean"], [0.9003, -0.0903], rtol=0, atol=5e-5)
    assert np.allclose(found["printed"], found["exact"], rtol=0, atol=5e-4)


@pytest.mark.parametrize("variance", [1.0, 0.25])
def test_the_example_over_time(variance: float) -> None:
    """Φ is e^(−s) times a rotation and v₀ ~ N(0, 1), so that Σ = I − r rᵀ: all by hand."""
    found = appendix.auxiliary({"it": appendix.example()}, variance)["processes"]["it"]
    s = np.array(found["times"])
    z, v = np.exp(-s) * np.cos(s), -np.exp(-s) * np.sin(s)

    def known(square: np.ndarray) -> np.ndarray:
        return 0.5 * np.log1p(variance * square / (1 - square))

    assert np.allclose(found["response"], [v], rtol=1e-13)
    assert np.allclose(found["information"], known(v**2), rtol=1e-12)
    assert np.allclose(found["whole"], known(z**2 + v**2), rtol=1e-12)
    added = known(z**2 + v**2) - known(z**2)  # cancels: absolute
    assert np.allclose(found["added"], added, rtol=0, atol=1e-14)
    correlation = math.sqrt(variance) * v / np.sqrt(1 - v**2 + variance * v**2)
    assert np.allclose(found["correlation"], [correlation], rtol=1e-12)
    assert abs(found["most_at"] - math.pi / 4) <= 1 / appendix.TIMES  # e^(−s) sin s is largest
    assert math.isclose(found["most"], known(v**2).max(), rel_tol=1e-12)
    assert math.isclose(found["left"]["information"], known(v[-1:] ** 2)[0], rel_tol=1e-12)
    even = found["even_at"]  # ρ/(1 − ρ) = 1/ς² with ρ = e^(−2s)
    assert math.isclose(even, 0.5 * math.log1p(variance), rel_tol=1e-12)


def test_who_knows_nothing() -> None:
    """One variable has no v; Q = 0 with D diagonal never tells v anything: exactly zero."""
    idle: dict[str, Process] = {
        "vpsde": ornstein.vpsde(),
        "vesde": ornstein.vesde(),
        "counter-example": appendix.counter_example(),
        "counter-example, K = 4": appendix.counter_example(3),
        "apart": appendix.apart(),
    }
    for name, found in appendix.auxiliary(idle, 1.0)["processes"].items():
        assert not found["knows"] and not found["adds"], name
        assert set(found["information"]) == set(found["added"]) == {0.0}
        assert found["most"] == found["largest_response"] == found["largest_correlation"] == 0.0
        assert found["most_at"] is None
        assert found["added_there"] == 0.0
    whole = appendix.auxiliary(idle, 1.0)["processes"]["vpsde"]["whole"]
    assert math.isclose(whole[-1], 0.5 * -math.log1p(-math.exp(-10.05)), rel_tol=1e-9)


def test_a_matrix_that_is_not_diagonal_is_not_enough() -> None:
    """Q + D upper triangular: v never hears of x, and still helps to undo the noise in z."""
    process = appendix.one_way()
    found = appendix.auxiliary({"it": process}, 1.0)["processes"]["it"]
    assert (process.Q + process.D).tolist() == [[1.0, -1.0], [0.0, 1.0]]
    assert not found["knows"] and found["adds"]
    assert set(found["information"]) == {0.0}
    assert found["added_there"] > 0.02  # its value: `test_against_the_joint_gaussian`


ASKED: dict[str, Process] = {
    **appendix.known(),
    "learned-1": moved(ornstein.learned(1)),
    "learned-2-full": moved(ornstein.learned(2, full=True)),
    "coupled": Diffusion(np.zeros((2, 2)), 0.5 * np.eye(2), v0_coupling=0.5),
}


@pytest.mark.parametrize("name", [name for name, process in ASKED.items() if process.n_vars > 1])
def test_against_the_joint_gaussian(name: str) -> None:
    """I(x; ·) = ½ log(|Cov x||Cov ·|/|Cov (x, ·)|) for v, z and y, where nothing is singular."""
    process, variance = ASKED[name], 0.3
    found = appendix.auxiliary({"it": process}, variance)["processes"]["it"]
    places = [9, 39, 99, 199]
    for i in places:
        kernel = process.transition(found["times"][i])
        r, noise = kernel.response.detach().numpy(), kernel.covariance.detach().numpy()

        def known(which: list[int], r: np.ndarray = r, noise: np.ndarray = noise) -> float:
            own = noise[np.ix_(which, which)]
            both = own + variance * np.outer(r[which], r[which])
            return 0.5 * float(np.linalg.slogdet(both)[1] - np.linalg.slogdet(own)[1])

        rest = list(range(1, process.n_vars))
        z, v, y = known([0]), known(rest), known([0, *rest])
        # numpy forms Σ and loses digits of its least direction
        assert math.isclose(found["information"][i], v, rel_tol=1e-7, abs_tol=1e-11)
        assert math.isclose(found["whole"][i], y, rel_tol=1e-7, abs_tol=1e-11)
        assert math.isclose(found["added"][i], y - z, rel_tol=1e-6, abs_tol=1e-8)
        if process.n_vars == 2:
            square = found["correlation"][0][i] ** 2
            assert math.isclose(v, -0.5 * math.log1p(-square), rel_tol=1e-7, abs_tol=1e-11)


def test_the_first_column_decides() -> None:
    """v knows x if x moves v, or if v₀ knew it."""
    for name, found in appendix.auxiliary(ASKED, 1.0)["processes"].items():
        if found["column"] is not None:
            moves = any(entry != 0 for entry in found["column"])
            assert found["knows"] == (moves or name == "coupled"), name


def test_the_table_of_appendix_b() -> None:
    record = json.loads(json.dumps(appendix.auxiliary(ASKED, 0.25), allow_nan=False))
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in appendix.rows(record)]
    assert len(rows) == 2 + len(ASKED) and all(len(row) == 10 for row in rows)
    shown = {row[0]: row[1:] for row in rows[2:]}
    assert shown["vpsde"][:6] == ["1", "no", "no", "0", "", "0"]
    assert shown["Q + D diagonal"][:6] == ["2", "no", "no", "0", "", "0"]
    assert shown["cld"][:3] == ["2", "yes", "yes"]
    assert float(shown["cld"][3]) == pytest.approx(record["processes"]["cld"]["most"], rel=5e-3)


def test_the_process_of_a_saved_model(tmp_path: Path) -> None:
    process = moved(ornstein.learned(1))
    network = UNet.tiny((1, 8, 8), variables=2)
    model = ornstein.ScoreModel(network, process, parametrisation="joint", data_std=1.0)
    model.save_pretrained(tmp_path / "model")
    read = appendix.of_run(tmp_path / "model")
    a, b = (appendix.auxiliary({"it": p}, 1.0)["processes"]["it"] for p in (process, read))
    assert a["information"] == b["information"]


@pytest.mark.parametrize(
    ("processes", "variance", "words"),
    [({}, 1.0, "no process"), ({"a": ornstein.vpsde()}, 0.0, "data_variance=0.0")],
)
def test_mistakes(processes: dict[str, Process], variance: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        appendix.auxiliary(processes, variance)


# ---------------------------------------------------------------- pictures


@pytest.fixture(scope="module")
def evaluations() -> dict[str, dict[str, Any]]:
    """Two joint models of the digits, and a channel model under two processes; by both bounds."""
    digits = load("digits")
    x = digits.test.x[:24]
    found = {}
    torch.manual_seed(0)
    for name in ("vpsde", "cld"):
        process = ornstein.PRESETS[name]()
        for kind in ("joint", "channel"):
            variables = {"variables": process.n_vars} if kind == "joint" else {}
            network = UNet.tiny((1, 8, 8), **variables)
            with torch.no_grad():  # fresh ones answer zero; a channel model is the same each time
                generator = torch.Generator().manual_seed(1)
                for p in network.parameters():
                    p.add_(0.02 * torch.randn(p.shape, generator=generator))
            for bound in (ornstein.Discrete(17), ornstein.Tweedie(17)):
                model = ornstein.ScoreModel(
                    network, process, likelihood=bound, parametrisation=kind, features=None
                )
                result = ornstein.evaluate(model, x, draws=4, quiet=True, curve_bins=12)
                found[f"{kind}, {name}, {bound.name}"] = result.to_dict()
    return json.loads(json.dumps(found))


def panel(figure: Figure, title: str) -> Axes:
    """The axes under a title."""
    return next(axes for axes in figure.axes if title in axes.get_title(loc="left"))


def labels(axes: Axes) -> list[str]:
    """The words beside lines."""
    return [text.get_text() for text in axes.texts if text.get_path_effects()]


def written(figure: Figure) -> list[tuple[str, Any]]:
    """All words of a figure that are seen, and where they stand."""
    figure.canvas.draw()
    found = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = axis.get_major_ticks()
            found += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
    return [(t.get_text(), t.get_window_extent()) for t in found if t.get_text()]


def check_clear(figure: Figure) -> None:
    """No word leaves the page, and no two lie on each other."""
    words = written(figure)
    for legend in figure.legends:
        words += [(t.get_text(), t.get_window_extent()) for t in legend.get_texts()]
    for i, (text, box) in enumerate(words):
        inside = figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert inside and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
        for other, there in words[i + 1 :]:
            apart = (
                min(box.x1, there.x1) - max(box.x0, there.x0) < 1
                or min(box.y1, there.y1) - max(box.y0, there.y0) < 2
            )
            assert apart, f"{text!r} lies on {other!r}"


def of_bound(evaluations: dict[str, dict[str, Any]], bound: str) -> dict[str, dict[str, Any]]:
    return {
        name.removesuffix(f", {bound}"): record
        for name, record in evaluations.items()
        if record["bound"] == bound
    }


@pytest.mark.parametrize("bound", ["discrete", "tweedie"])
def test_where_the_bits_are(evaluations: dict[str, dict[str, Any]], bound: str) -> None:
    """The area under each line is the diffusion part; bars add up to the whole."""
    records = of_bound(evaluations, bound)
    figure = paper.where_bits(records)
    check_clear(figure)
    for kind in ("joint", "channel"):
        axes = panel(figure, f"Denoising error, {kind}")
        shown = [record for name, record in records.items() if name.startswith(kind)]
        assert sorted(labels(axes)) == ["cld", "vpsde"]
        bands = [one for one in axes.collections if isinstance(one, PolyCollection)]
        assert len(axes.lines) == len(bands) == 2
        for line, record in zip(axes.lines, shown, strict=True):
            edges = np.array(record["curve"]["logsnr"])
            heights = np.asarray(line.get_ydata())
            area = float((heights * np.diff(edges)).sum())
            assert math.isclose(area, record["diffusion"], rel_tol=1e-12)
            assert np.allclose(line.get_xdata(), (edges[1:] + edges[:-1]) / 2)
        assert axes.get_xlim()[0] < axes.get_xlim()[1]  # from much noise to little
    heights = {a.get_ylim() for a in figure.axes if "Denoising" in a.get_title(loc="left")}
    assert len(heights) == 1
    bars = panel(figure, "Parts").patches
    assert len(bars) == 3 * len(records)
    for i, (name, record) in enumerate(records.items()):
        widths = [bar.get_width() for bar in bars[3 * i : 3 * i + 3]]  # type: ignore[attr-defined]
        assert np.allclose(widths, [record[part] for part in paper.PARTS])
        assert math.isclose(sum(widths), record["bits_per_dim"], rel_tol=1e-9)
        total = with_error(record["bits_per_dim"], record["standard_error"])
        assert f"{name}:  {total}" in labels(panel(figure, "Parts"))


def test_channel_models_coincide(evaluations: dict[str, dict[str, Any]]) -> None:
    """One network under two processes: the same bits, up to draws and the prior."""
    a, b = (evaluations[f"channel, {name}, discrete"] for name in ("vpsde", "cld"))
    spread = math.hypot(a["draw_error"], b["draw_error"])
    assert abs(a["bits_per_dim"] - b["bits_per_dim"]) < 4 * spread
    figure = paper.where_bits(of_bound(evaluations, "discrete"))
    axes = panel(figure, "channel")
    first, second = (shown_alone(axes, str(line.get_color())) for line in axes.lines)
    assert 0.8 < first / second < 1.25  # each is on top along half of the way


def shown_alone(axes: Axes, colour: str) -> float:
    """Pixels along which pieces of this colour lie on the other lines."""
    pieces = [
        axes.transData.transform(piece)
        for one in axes.collections
        if isinstance(one, LineCollection) and same_color(one.get_colors()[0], colour)
        for piece in one.get_segments()
    ]
    return float(sum(np.hypot(*np.diff(piece, axis=0).T).sum() for piece in pieces))


def test_lines_take_turns_only_where_they_coincide() -> None:
    """Two are one for the first half and part; a third is far away from both."""
    figure = style.blank(6.0, 4.0)
    axes = figure.subplots()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    x = np.linspace(0, 1, 401)
    heights = (0.2 + 0 * x, 0.2 + np.maximum(x - 0.5, 0), 0.9 + 0 * x)
    lines = [style.Line(x, y, "", c) for y, c in zip(heights, style.COLOURS, strict=False)]
    take_turns(axes, lines)
    found = {line.colour: shown_alone(axes, line.colour) for line in lines}
    half = 0.5 * axes.bbox.width
    one, two, far = found.values()
    assert far == 0
    assert one + two == pytest.approx(half, rel=0.1) and 0.8 < one / two < 1.25
    places: list[list[tuple[float, float]]] = []
    for collection in axes.collections:
        assert isinstance(collection, LineCollection)
        ends = [(piece[0, 0], piece[-1, 0]) for piece in collection.get_segments()]
        assert max(right for _, right in ends) < 0.55
        places.append(ends)
    for left, right in places[0]:
        for low, high in places[1]:  # never at once: a point more, where one hands over
            assert min(right, high) - max(left, low) < 0.01


def of_process(process: str, edges: np.ndarray, height: float) -> dict[str, Any]:
    """A record with the same height in all bins, and next to no prior."""
    bits = height * np.diff(edges)
    return {
        "process": process,
        "parametrisation": "joint",
        "bits_per_dim": float(bits.sum()) + 0.05,
        "standard_error": 0.01,
        "prior": 1e-5,
        "diffusion": float(bits.sum()),
        "reconstruction": 0.05,
        "curve": {
            "logsnr": edges.tolist(),
            "bits": bits.tolist(),
            "errors": (0.01 * bits).tolist(),
        },
    }


def test_wide_bins_are_steps() -> None:
    """Constant in each bin, named as what they are, pale and thin, and in no one's turn."""
    fine, wide = np.linspace(-10, 13, 41), np.linspace(-87, 13, 41)
    noise = np.concatenate([[-87.0], np.linspace(-10, 13, 40)])  # a single bin of mere noise
    figure = paper.where_bits(
        {
            "joint, vpsde": of_process("vpsde", fine, 0.09),
            "joint, learned-1": of_process("learned-1", wide, 0.08),
            "joint, cld": of_process("cld", noise, 0.07),
        },
        "Where the bits of toys are lost",
    )
    check_clear(figure)
    axes = panel(figure, "joint")
    assert set(labels(axes)) == {"vpsde", "learned-1 (wide bins)", "cld"}
    plain, steps, other = axes.lines
    x, y = (np.asarray(v) for v in (steps.get_xdata(), steps.get_ydata()))
    assert np.array_equal(x[::2], wide[:-1]) and np.array_equal(x[1::2], wide[1:])
    assert np.array_equal(y[::2], y[1::2])  # flat in each bin
    assert np.trapezoid(y, x) == pytest.approx(0.08 * 100)  # its area is still the diffusion part
    alpha = steps.get_alpha()
    assert alpha is not None and alpha < 1 and steps.get_linewidth() < plain.get_linewidth() / 2
    assert len(plain.get_xdata()) == len(other.get_xdata()) == 40  # type: ignore[arg-type]
    assert shown_alone(axes, style.PROCESSES["learned-1"]) == 0


def test_only_parts_that_can_be_seen_have_names() -> None:
    edges = np.linspace(-10, 13, 41)
    record = of_process("vpsde", edges, 0.1)  # 2.3 bits/dim and 0.05 of reconstruction
    keys = {
        (0.0, 0.05): "dark: diffusion,  light: reconstruction",
        (0.004, 0.05): "dark: diffusion,  light: reconstruction",
        (0.006, 0.05): "dark: prior,  middle: diffusion,  light: reconstruction",
        (-0.1, 0.05): "dark: prior,  middle: diffusion,  light: reconstruction",
        (0.1, 0.0): "dark: prior,  light: diffusion",
        (0.0, 0.001): "diffusion",
    }
    for (prior, reconstruction), words in keys.items():
        one = {**record, "prior": prior, "reconstruction": reconstruction}
        figure = paper.where_bits({"joint, vpsde": one})
        assert panel(figure, "Parts").get_xlabel() == words


def test_a_process_has_one_colour_in_all_pictures(evaluations: dict[str, dict[str, Any]]) -> None:
    """The curves, their words and the bars of one picture, and the curves of others."""
    figure = paper.where_bits(of_bound(evaluations, "discrete"))
    found: dict[str, set[str]] = {}
    for kind in ("joint", "channel"):
        for text in panel(figure, f"error, {kind}").texts:
            if text.get_path_effects():
                found.setdefault(text.get_text(), set()).add(str(text.get_color()))
    bars = panel(figure, "Parts").patches
    for name, bar in zip(of_bound(evaluations, "discrete"), bars[::3], strict=True):
        colour = style.PROCESSES[name.split(", ")[1]]
        assert same_color(bar.get_facecolor()[:3], colour)
    known = appendix.auxiliary({**appendix.known(), "strange": ornstein.cld(mass=1.0)}, 0.25)
    figure = paper.auxiliary_used(known)
    for title in ("What v alone knows", "What v adds"):
        for text in panel(figure, title).texts:
            if text.get_path_effects():
                found.setdefault(text.get_text(), set()).add(str(text.get_color()))
    assert {"vpsde", "cld", "malda", "alda", "psld", "strange"} <= set(found)
    assert all(len(colours) == 1 for colours in found.values())
    for name, (colour,) in found.items():
        assert colour == style.PROCESSES.get(name, colour)
    assert len(set().union(*found.values())) == len(found)


@pytest.mark.parametrize("table", ["mnist", "cifar10", "digits"])
def test_the_heading_says_of_which_data(table: str) -> None:
    file = Path(__file__).resolve().parents[2] / "results" / f"{table}.json"
    record = json.loads(file.read_text())
    data = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "the digits"}[table]
    figures = paper.pictures_of(record)
    assert list(figures) == ["bits", "where"]
    for figure in figures.values():
        check_clear(figure)
    assert figures["where"].texts[0].get_text() == f"Where the bits of {data} are lost"
    figure = paper.pictures_of({**record, "title": "Damping"})["where"]
    assert figure.texts[0].get_text() == "Damping: where the bits are lost"


@pytest.mark.parametrize("table", ["mnist", "digits"])
def test_learned_processes_are_those_of_the_results(table: str) -> None:
    """Rebuilt without its weights: where its log SNR ends, the curve of its evaluation began."""
    file = Path(__file__).resolve().parents[2] / "results" / f"{table}.json"
    runs = {run["name"]: run for run in json.loads(file.read_text())["runs"] if run["learned"]}
    found = appendix.of_results(file)
    assert list(found) == [f"{table}, {name}" for name in runs] and found
    for process, run in zip(found.values(), runs.values(), strict=True):
        ends = run["figures"][0]["curve"]["logsnr"][0]
        assert process.transition(process.horizon).logsnr.item() == pytest.approx(ends, rel=1e-9)
    assert appendix.of_results(file.parent / "none.json") == {}


def test_all_tables_but_those_of_settings_have_their_learned_processes(tmp_path: Path) -> None:
    """Whatever their runs are called; results of runs that were tuned are left out."""
    results = Path(__file__).resolve().parents[2] / "results"
    record = json.loads((results / "mnist.json").read_text())
    run = next(run for run in record["runs"] if run["learned"])
    for table, there in (("starts", True), ("told", True), ("own", True), ("tuning", False)):
        file = tmp_path / f"{table}.json"
        file.write_text(json.dumps({"table": table, "runs": [{**run, "name": "from-cld"}]}))
        assert list(appendix.of_results(file)) == ([f"{table}, from-cld"] if there else [])
    assert appendix.of_results(results / "tuning.json") == {}


def test_auxiliary_variables_in_a_picture() -> None:
    record = appendix.auxiliary(appendix.known(), 0.25)
    figure = paper.auxiliary_used(record)
    check_clear(figure)
    left, right = panel(figure, "What v alone knows"), panel(figure, "What v adds")
    several = {n: one for n, one in record["processes"].items() if one["n_vars"] > 1}
    for axes, flag in ((left, "knows"), (right, "adds")):
        assert set(labels(axes)) == {name for name, one in several.items() if one[flag]}
        assert len(axes.lines) == len(labels(axes)) + 1  # and the line at zero
    curve = np.asarray(left.lines[1 + list(several).index("cld")].get_ydata())
    assert curve.max() == record["processes"]["cld"]["most"]
    shares = np.concatenate([np.asarray(line.get_ydata()) for line in right.lines])
    assert np.nanmin(shares) >= 0 and np.nanmax(shares) <= 1
    _, about = (text.get_text() for text in figure.texts)  # the rest is in the table
    assert about == "Gaussian data of variance 0.25"
    hardly = Diffusion([[0.0, -1e-3], [1e-3, 0.0]], [[1.0, 0.0], [0.0, 1.0]])
    figure = paper.auxiliary_used(appendix.auxiliary({**ASKED, "hardly": hardly}, 1.0))
    check_clear(figure)
    assert not any("hardly" in labels(axes) for axes in figure.axes)
    idle = {"it": appendix.counter_example()}
    figure = paper.auxiliary_used(appendix.auxiliary(idle, 1.0))  # nothing at all is known
    assert not any(labels(axes) for axes in figure.axes)
    with pytest.raises(ValueError, match="K ≥ 2"):
        paper.auxiliary_used(appendix.auxiliary({"vpsde": ornstein.vpsde()}, 1.0))


def row(name: str, published: float | None, *figures: tuple[float, float | None]) -> dict[str, Any]:
    kinds = ("discrete", "tweedie")
    bounds = {
        kind: {"bits_per_dim": value, "standard_error": error}
        for kind, (value, error) in zip(kinds, figures, strict=False)
    }
    return {"name": name, "published": published, "bounds": bounds}


ROWS = [
    row("VPSDE", 1.26, (0.96, 0.006), (1.21, 0.006)),
    row("learned, K = 3", 1.33, (0.975, 0.012), (1.25, 0.006)),
    row("CLD", 1.35, (0.99, 0.013), (1.31, 0.03)),
    row("ALDA", 124.6, (1.05, 0.006), (1.62, None)),
]


def test_bounds_beside_published_figures() -> None:
    figure = paper.bound_bars(ROWS)
    check_clear(figure)
    near, far = figure.axes
    assert near.get_xlim()[1] < 3 and far.get_xlim()[0] < 124.6 < far.get_xlim()[1]
    assert far.get_xlabel() == "(axis broken)"
    assert [text.get_text() for text in far.texts] == ["124.60"]
    words = [text.get_text() for text in near.texts]
    assert len(words) == 11 and {"0.9600 ± 0.0060", "1.310 ± 0.030", "1.6200", "1.26"} <= set(words)
    marks = [float(np.asarray(line.get_xdata())[0]) for line in near.lines[:-1]]  # the last: break
    assert marks == [0.96, 1.21, 1.26, 0.975, 1.25, 1.33, 0.99, 1.31, 1.35, 1.05, 1.62]
    bars = [c.get_segments()[0][:, 0] for c in near.collections]  # type: ignore[attr-defined]
    assert np.allclose(bars[0], [0.954, 0.966]) and len(bars) == 7  # one has no error
    names = [label.get_text() for label in near.get_yticklabels()]
    assert names == [one["name"] for one in ROWS]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "ours, discrete bound",
        "ours, the paper's bound near no noise (tweedie)",
        "the paper, as published",
    ]


@pytest.mark.parametrize(
    ("look", "truncation", "words"),
    [
        ("discrete", "standard error 0.0013", "ours, discrete bound"),
        ("discrete-valid", "standard error 0.0013", "ours, discrete bound, valid"),
        ("tweedie", "standard error 7.81e-09", "ours, the paper's bound near no noise (tweedie)"),
        ("tweedie", "standard error 0.0013", "ours, the paper's bound from σ = 0.0013"),
        ("tweedie", "s = 0.001", "ours, the paper's bound from s = 0.001"),
        ("tweedie", "s = 1e-05", "ours, the paper's bound from s = 0.00001"),
        ("tweedie-time0.001", "s = 0.001", "ours, the paper's bound from s = 0.001"),
        (
            "tweedie-valid",
            "standard error 1.2e-06",
            "ours, the paper's bound near no noise (tweedie), valid",
        ),
        ("own", "standard error 0.0196", "ours, own bound"),
        ("own-time0.1", "s = 0.1", "ours, own bound, from s = 0.1"),
    ],
)
def test_the_legend_says_where_the_papers_bound_is_truncated(
    look: str, truncation: str, words: str
) -> None:
    """By what was done: a look may leave it to the model."""
    figure = {"look": look, "truncation": truncation, "process": "vpsde"}
    figure |= {"bits_per_dim": 1.0, "standard_error": 0.1}  # type: ignore[dict-item]
    run = {"parametrisation": "joint", "paper": None, "seed": 0, "figures": [figure]}
    (legend,) = paper.bound_bars(paper.bars_of({"runs": [run]})).legends
    assert [text.get_text() for text in legend.get_texts()] == [words]


def test_no_break_where_nothing_is_far() -> None:
    for rows in (ROWS[:3], [row("a density", None, (-1.2, 0.1))], [row("VPSDE", 1.26)]):
        figure = paper.bound_bars(rows)
        check_clear(figure)
        assert len(figure.axes) == 1
    with pytest.raises(ValueError, match="no figure"):
        paper.bound_bars([])


def test_the_record_of_a_table(evaluations: dict[str, dict[str, Any]]) -> None:
    """Rows and curves from runs with several looks, processes and seeds."""

    def run(kind: str, seed: int, published: float | None, *names: str) -> dict[str, Any]:
        figures = [
            {"look": record["bound"], **record}
            for name in names
            for record in (evaluations[f"{kind}, {name}, {b}"] for b in ("discrete", "tweedie"))
        ]
        for figure in figures:
            del figure["parametrisation"]
        return {
            "name": f"{kind}-{seed}",
            "seed": seed,
            "paper": published,
            "parametrisation": kind,
            "figures": figures,
        }

    runs = [run("joint", 0, 1.35, "cld"), run("joint", 1, 1.35, "cld")]
    record = {"runs": [*runs, run("channel", 0, None, "vpsde", "cld")]}
    rows = paper.bars_of(record)
    assert [one["name"] for one in rows] == [
        "joint, cld",
        "joint, cld, seed 1",
        "channel, vpsde",
        "channel, cld",
    ]
    assert [one["published"] for one in rows] == [1.35, 1.35, None, None]
    found = evaluations["channel, cld, tweedie"]
    assert found["truncation"] == "standard error 0.0196"  # which the look does not say
    assert rows[3]["bounds"]["tweedie-level0.0196"]["bits_per_dim"] == found["bits_per_dim"]
    check_clear(paper.bound_bars(rows))
    curves = paper.evaluations_of(record, "tweedie")
    assert list(curves) == [one["name"] for one in rows]
    assert curves["channel, cld"]["curve"] == found["curve"]
    figure = paper.where_bits(paper.evaluations_of(record))
    assert sorted(labels(panel(figure, "joint"))) == ["cld", "cld, seed 1"]
    with pytest.raises(ValueError, match="discrete, tweedie"):
        paper.evaluations_of(record, "ode")
