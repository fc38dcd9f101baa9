"""What `ornstein bench` counts and how it compares, against formulas and a clock of our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ornstein.bench import (
    Ceilings,
    Check,
    Cost,
    Figures,
    Line,
    Part,
    Race,
    Table,
    bench,
    network_cost,
    optimiser_cost,
    race,
    racing,
    sample_cost,
)
from ornstein.bench.figures import lines_of
from ornstein.bench.kernels import by_hand, check, sampled_by_hand
from ornstein.bench.sizes import Setting, cost_of, weights
from ornstein.bench.steps import loss_alone, network_alone
from ornstein.bench.stock import Stock, StockSampling, StockStep, stock_name
from ornstein.networks import UNet
from ornstein.processes import cld
from ornstein.training.loss import Loss
from ornstein.viz.roofline import roofline

CPU = torch.device("cpu")


# ---------------------------------------------------------------- counting


def test_a_convolution_and_a_product() -> None:
    """2·k²·in·out FLOPs for a place; each factor read once, the result written once."""
    network = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Flatten(), nn.Linear(5 * 64, 7))
    found = network_cost(network, lambda n: (torch.randn(n, 3, 8, 8),), batch=11, width=2)
    convolution, product = 2 * 9 * 3 * 5 * 64, 2 * 320 * 7
    assert found.flops == 3 * 11 * (convolution + product)
    weights_read = (5 * 3 * 9 + 5) + (7 * 320 + 7)
    moved = 11 * (3 * 64 + 5 * 64 + 320 + 7) + weights_read
    assert found.bytes == 3 * 2 * moved


def macs(network: UNet) -> int:
    """Products in a forward pass of one image, layer by layer as the architecture says."""
    size, width = network.describe(), network.describe()["width"]
    attention, blocks, height = size["attention"], size["blocks"], size["shape"][1]
    time = 4 * width
    total = width * time + time * time + 9 * network.layout.inputs * width * height**2

    def stage(inside: int, outside: int, side: int, attends: bool) -> int:
        places = side**2
        found = places * (9 * inside * outside + 9 * outside**2) + time * outside
        found += places * inside * outside if inside != outside else 0
        return found + (places * 4 * outside**2 + 2 * places**2 * outside if attends else 0)

    channels, kept, sides = width, [width], []
    for level, multiplier in enumerate(size["multipliers"]):
        for _ in range(blocks):
            total += stage(channels, width * multiplier, height, height in attention)
            channels = width * multiplier
            kept.append(channels)
        sides.append(height)
        if level < len(size["multipliers"]) - 1:
            height = (height + 1) // 2
            total += 9 * channels**2 * height**2
            kept.append(channels)
    total += stage(channels, channels, height, True) + stage(channels, channels, height, False)
    for level, multiplier in reversed(list(enumerate(size["multipliers"]))):
        for _ in range(blocks + 1):
            height = sides[level]
            inside = channels + kept.pop()
            total += stage(inside, width * multiplier, height, height in attention)
            channels = width * multiplier
        if level:
            total += 9 * channels**2 * sides[level - 1] ** 2
    return total + 9 * channels * network.layout.outputs * height**2


@pytest.mark.parametrize(
    "make",
    [
        lambda: UNet.tiny((1, 8, 8), features=2),
        lambda: UNet.small((1, 28, 28), variables=3),
        lambda: UNet((3, 32, 32)),
    ],
    ids=["tiny", "small", "cifar"],
)
def test_the_u_nets(make: Callable[[], UNet]) -> None:
    with torch.device("meta"):
        network = make()
    assert cost_of(network, batch=1, narrow=False, passes=1).flops == 2 * macs(network)
    one, many = (cost_of(network, batch=n, narrow=True) for n in (1, 128))
    assert many.flops == 128 * one.flops == 128 * 6 * macs(network)
    assert one.bytes > 3 * 2 * weights(network) / 1.1  # convolutions and products hold nearly all


def test_optimiser_and_sample() -> None:
    assert optimiser_cost(1000).bytes == 40 * 1000  # ten float32 for each weight
    for K in (1, 2, 3):
        found = sample_cost(batch=5, variables=K, size=12)
        assert found.flops == 60 * (K * K + 2 * K)  # y = r x + L ε with L lower triangular
        assert found.bytes == 60 * 4 * (1 + 2 * K)
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)


# ---------------------------------------------------------------- races


def test_ratios_are_medians_over_rounds() -> None:
    found = Race({"a": (1.0, 2.0, 9.0), "b": (2.0, 1.0, 3.0)})
    assert found.seconds("a") == 2.0
    assert found.ratio("a", "b") == 2.0  # of 0.5, 2 and 3; the ratio of medians would be 1
    assert [line.ratio for line in lines_of(found, "b")] == [2.0, 1.0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only works move."""
    now = [0.0]
    fake = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(racing, "time", fake)
    return now


def test_a_race(clock: list[float]) -> None:
    """A slower machine in one round, a first call that compiles: ratios do not see them."""
    calls = {"slow": 0, "quick": 0}

    def work(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            calls[name] += 1
            restless = 7.0 if clock[0] > 3 else 1.0
            clock[0] += seconds * (100 if calls[name] == 1 else restless)

        return call

    works = {"slow": work("slow", 2**-7), "quick": work("quick", 2**-9)}
    found = race(works, CPU, rounds=5, budget=2**-5)
    assert found.ratio("slow", "quick") == pytest.approx(4.0, rel=1e-12)
    assert found.starts == {"slow": 100 * 2**-7, "quick": 100 * 2**-9}
    assert calls == {"slow": 4 + 5 * 4, "quick": 4 + 5 * 16}  # a round fills its budget


def test_rivals_may_fail_and_time_may_run_out(clock: list[float]) -> None:
    def good() -> None:
        clock[0] += 1.0

    def bad() -> None:
        raise RuntimeError("out of memory\nand so on")

    works = {"ours": good, "rival": bad, "other": good, "late": good}
    found = race(works, CPU, 2, 0, may_fail=("rival",), warm=1, until=1.5)
    assert set(found.times) == {"ours", "other"}
    assert found.left_out == {"rival": "out of memory", "late": "out of time"}
    with pytest.raises(RuntimeError, match="out of memory"):
        race(works, CPU, 2, 0)


# ---------------------------------------------------------------- what is raced


def test_the_kernel_by_hand() -> None:
    """It is CLD's; and its sample has the kernel's mean and covariance in the noise it says."""
    s = torch.linspace(0.05, 1, 7, dtype=torch.float64)
    kernel, (response, factor) = cld().transition(s), by_hand(s)
    torch.testing.assert_close(kernel.response, response, rtol=0, atol=1e-9)
    torch.testing.assert_close(kernel.cholesky, factor, rtol=0, atol=1e-9)
    x = torch.randn(7, 3, 4, 4, dtype=torch.float64)
    y, noise = sampled_by_hand(s, x)
    wanted = torch.einsum("bk,bchw->bkchw", response, x)
    wanted = wanted + torch.einsum("bkj,bjchw->bkchw", factor, noise)
    torch.testing.assert_close(y, wanted)
    with pytest.raises(ValueError, match="differs by"):
        check(kernel.cholesky, 2 * factor)


def test_pieces_of_a_step() -> None:
    """The network alone has its own gradients; the loss alone that of a model that says zero."""
    case = Setting(CPU, quick=True).digits(batch=4)
    job = case.job(CPU)
    gradients = network_alone(job, case)()
    trained = [p for p in job.model.network.parameters() if p.requires_grad]  # type: ignore[union-attr]
    assert isinstance(gradients, tuple)
    assert [g.shape for g in gradients] == [p.shape for p in trained]
    (found,) = loss_alone(job, case)()  # type: ignore[misc]
    options = case.experiment.training
    said = torch.zeros(4, 1, 8, 8, requires_grad=True)

    class Zero(nn.Module):
        layout = job.model.network.layout  # type: ignore[union-attr]

        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            return said

    job.model.network = Zero()
    loss = Loss(job.model, options.objective, options.seed, narrow=False)
    value = loss(job.stream.take(0, 4), torch.arange(4))[0]
    (wanted,) = torch.autograd.grad(value, said)
    torch.testing.assert_close(found, wanted)


# ---------------------------------------------------------------- the stock network


def test_the_stock_network_is_as_large() -> None:
    """With the paper's sizes it has the paper's weights, and the arithmetic of ours."""
    pytest.importorskip("diffusers")
    with torch.device("meta"):  # shapes alone
        ours = UNet((3, 32, 32))
        stock = Stock(ours, 3)
    assert stock.name == stock_name() and stock.name.startswith("diffusers ")
    assert weights(stock) == weights(ours) == 35_746_307
    assert network_cost(stock, stock.inputs, 2, 4).flops == cost_of(ours, 2, False).flops


def test_without_diffusers_our_own_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ornstein.bench.stock._diffusers", lambda: None)
    stock = Stock(UNet.tiny(features=2), 3)
    assert stock.name == stock_name() == "plain"
    x, t = stock.inputs(2)
    assert stock(x, t).shape == x.shape == (2, 3, 8, 8)


def test_a_stock_step_is_one_of_adam() -> None:
    """After the first step of Adam every weight with a gradient has moved by the rate."""
    stock = Stock(UNet.tiny(), 1)
    before = [p.detach().clone() for p in stock.parameters()]
    work = StockStep(stock, torch.randn(4, 1, 8, 8), narrow=False)
    work()
    for old, new in zip(before, work.parameters, strict=True):
        assert new.grad is not None
        moved = (new - old * (1 - 2e-4 * 0.01)).abs()[new.grad.abs() > 1e-5]
        torch.testing.assert_close(moved, torch.full_like(moved, 2e-4), rtol=2e-3, atol=1e-7)
    norm = torch.stack([p.grad.norm() for p in work.parameters if p.grad is not None]).norm()
    assert float(norm) <= 1.0 + 1e-5


def test_the_plain_loop_samples() -> None:
    """With the exact answer for one image, its samples are that image, to the last noise level."""
    stock = Stock(UNet.tiny(), 1)
    work = StockSampling(stock, n=5, evaluations=10, device=CPU)
    image = torch.rand(1, 1, 8, 8) * 1.6 - 0.8

    def exact(y: Tensor, t: Tensor) -> Tensor:
        here = int(t[0])
        found: Tensor = (y - work.signal[here] * image) / work.noise[here]
        return found

    work.network.forward = exact  # type: ignore[method-assign,assignment]
    found = work().float() / 127.5 - 1
    assert found.shape == (5, 1, 8, 8)
    # the last state is y at step 0, whose noise is 0.01; the largest of 320 draws is under 5
    assert float((found - image).abs().max()) < 5 * 0.01 + 1 / 127.5


# ---------------------------------------------------------------- figures


def figures(device: str = "cpu", **parts: Part) -> Figures:
    top = Ceilings(1e12, 1e11, "product", "copy")
    return Figures(device, "plain", False, top, parts, {"cpu": "a CPU", "commit": "0"})


def part(seconds: float) -> Part:
    lines = (Line("a", seconds, 1.0, 8, 2e9, 1e9), Line("b", 3.0, 1.5))
    table = Table("title", "× a", lines, notes=("a note",))
    return Part((table,), (Check("fast", 2.0, 3.0), Check("slow", 2.0, 3.0, most=False)))


def test_files_are_read_and_merged(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "bench.json"
    first = figures(step=part(1.0), kernel=part(2.0))
    first.save(path)
    assert Figures.read(path) == first
    holds = [c["holds"] for c in json.loads(path.read_text())["parts"]["step"]["checks"]]
    assert holds == [True, False]
    again = figures(step=part(5.0)).merged(Figures.read(path))
    assert again.parts == {"step": part(5.0), "kernel": part(2.0)}
    with pytest.raises(ValueError, match=r"device='cuda' and the file has 'cpu'.*--out"):
        figures("cuda", step=part(1.0)).merged(first)
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a file that `ornstein bench --out` wrote"):
        Figures.read(path)


def test_the_roofline() -> None:
    """A piece of 2 FLOPs a byte is under the slope: at most 2e11 of 1e12."""
    drawn = roofline(figures(step=part(0.1)))
    (axes,) = drawn.axes
    slant, flat, point = (line.get_xydata() for line in axes.lines)
    assert slant[-1].tolist() == flat[0].tolist() == [10.0, 1e12]
    assert point[0].tolist() == [2.0, 2e10]
    (label,) = (text.get_text() for text in axes.get_legend().get_texts())
    assert label == "a: 10% of the roof"
    with pytest.raises(ValueError, match="none of these figures"):
        roofline(figures())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ("steps",)}, "there is no part 'steps'; expected some of step, rest"),
        ({"parts": ()}, "no part was given"),
        ({"batches": (0,)}, "expected whole numbers ≥ 1"),
        ({"minutes": -1.0}, "minutes=-1.0; expected a number > 0"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench("cpu", **options)  # type: ignore[arg-type]
