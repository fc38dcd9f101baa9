"""Compiled, filled up and narrowed, a network says what it says as it is; what fails, falls back.

Most tests compile with a backend that runs what was traced as it is, which takes no time: traced,
guarded and filled up it is all the same. One with the real compiler is slow.
"""

from __future__ import annotations

import functools
import gc
import os
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ornstein
from ornstein import (
    Ancestral,
    Continuous,
    Discrete,
    Exponential,
    Heun,
    ProbabilityFlow,
    ScoreModel,
    Solver,
    Tweedie,
    compiling,
    evaluate,
    sample,
)
from ornstein.compiling import FEW, SHARE, Captured, Compiled, Quick, batch_within, wanted
from ornstein.networks import MLP
from ornstein.sampling.sampler import EVEN, _Job, _prior, evenly
from ornstein.sampling.way import Way
from tests.test_errors import message, says

CPU = torch.device("cpu")
LEVELS = 8
SOLVERS: dict[str, Solver] = {
    "ancestral": Ancestral(4),
    "exponential": Exponential(4),
    "heun": Heun(2),
    "flow": ProbabilityFlow(steps=2, method="midpoint"),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """torch.compile without its compiler, and with a cache of this test's own."""
    monkeypatch.setenv("ORNSTEIN_CACHE", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


class Bent(nn.Module):
    """Elementwise, so that an example's answer can't depend on its batch; notes the sizes."""

    def __init__(self, room: int = 10**9) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.room = room
        self.sizes: list[int] = []

    @torch.compiler.disable
    def noted(self, x: Tensor) -> None:
        self.sizes.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError("no room for it\nand more lines")

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        self.noted(x)
        rate = logsnr.reshape(-1, *[1] * (x.dim() - 1))
        return self.scale * torch.tanh(x) + 0.01 * torch.tanh(rate)


def build(network: nn.Module | None = None, likelihood: Any = None) -> ScoreModel:
    network = Bent() if network is None else network
    return ScoreModel(network, ornstein.cld(), likelihood or Discrete(LEVELS), data_std=0.6)


def pixels(count: int) -> Tensor:
    return torch.randint(LEVELS, (count, 3), generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- what is wanted


def test_when_to_compile() -> None:
    assert not wanted("auto", CPU) and not wanted("auto", CPU, 10**9)
    assert wanted("on", CPU, 1) and not wanted("off", CPU)
    says(message(lambda: wanted("yes", CPU)), "compile='yes'", "'auto', 'on' or 'off'")  # type: ignore[arg-type]
    model = build()
    for call in (sample, evaluate):
        about = 4 if call is sample else pixels(4)
        asked = functools.partial(call, model, about)  # type: ignore[arg-type]
        says(message(functools.partial(asked, compile="yes")), "compile='yes'")
        says(message(functools.partial(asked, precision="half")), "precision='half'", "'bfloat16'")


def test_nothing_is_wrapped_where_nothing_is_wanted() -> None:
    """On a CPU a network is asked as it ever was."""
    network = MLP((3,))
    for choice in ("auto", "off"):
        assert compiling.quick(network, 4, CPU, choice, "auto") is None  # type: ignore[arg-type]
        assert compiling.quick(network, 4, CPU, choice, "float32") is None  # type: ignore[arg-type]
    narrow = compiling.quick(network, 4, CPU, "off", "bfloat16")
    assert narrow is not None and not narrow.fixed


@pytest.mark.parametrize("precision, tf32", [("float32", False), ("tf32", True)])
def test_tf32_is_put_back(precision: Any, tf32: bool) -> None:
    switches: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [switch.allow_tf32 for switch in switches]
    with pytest.raises(KeyError), compiling.arithmetic(precision):
        assert [switch.allow_tf32 for switch in switches] == [tf32, tf32]
        raise KeyError
    assert [switch.allow_tf32 for switch in switches] == before
    for other in ("auto", "bfloat16"):
        with compiling.arithmetic(other):  # type: ignore[arg-type]
            assert [switch.allow_tf32 for switch in switches] == before


# ---------------------------------------------------------------- the cache

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No variable is set, and home is here."""
    for name in (*VARIABLES, "ORNSTEIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def where() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in VARIABLES)


@pytest.mark.parametrize("base", ["home", "xdg", "own"])
def test_kernels_are_kept(bare: Path, monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    if base != "home":
        monkeypatch.setenv({"xdg": "XDG_CACHE_HOME", "own": "ORNSTEIN_CACHE"}[base], f"{bare}/at")
    parts = {"home": ".cache/ornstein", "xdg": "at/ornstein", "own": "at"}
    folder = bare / parts[base] / "compiled"
    assert compiling.cache() == folder and folder.is_dir()
    assert where() == (str(folder), str(folder / "triton"))


def test_what_the_user_has_set_stays(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(bare / "mine"))
    assert compiling.cache() == bare / "mine"
    assert where() == (str(bare / "mine"), str(bare / ".cache/ornstein/compiled/triton"))
    assert compiling.cache() == bare / "mine"  # and again


def test_torch_sets_its_variable_itself(bare: Path) -> None:
    """As soon as an optimiser is made; nobody has chosen that folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()
    assert where()[0] and compiling.cache() == bare / ".cache/ornstein/compiled"
    assert cache_dir() == str(bare / ".cache/ornstein/compiled")


def test_a_cache_that_can_not_be_written(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "taken").write_text("a file")
    monkeypatch.setenv("ORNSTEIN_CACHE", str(bare / "taken"))
    with pytest.warns(UserWarning, match="can't be written.*Set ORNSTEIN_CACHE"):
        assert compiling.cache() is None
    assert where() == (None, None)


# ---------------------------------------------------------------- a network


@pytest.mark.parametrize("count", [1, 7, 8, 9, 30])
def test_batches_of_one_size(traced: None, count: int) -> None:
    network = Bent()
    quick = Quick(network, 8, compile=True, capture=False, narrow=False)
    x, logsnr = torch.randn(count, 2, 3), torch.randn(1).expand(count)
    with torch.no_grad():
        expected = network(x, logsnr)
        network.sizes.clear()
        assert torch.equal(quick(x, logsnr), expected)
    assert network.sizes == [8] * (1 + -(-count // 8))  # and once, to check the compiler
    network.sizes.clear()
    assert torch.equal(quick(x, logsnr), expected)  # with gradients it is asked as it is
    assert network.sizes == [count]


def test_copies_share_what_was_compiled(traced: None) -> None:
    """Not compiled again for the average of a network, nor in the next call."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    x, logsnr = torch.randn(6, 3), torch.randn(6)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        counted = functools.partial(torch.compile.func, backend=lambda *of, **_: counter(*of))  # type: ignore[attr-defined]
        patch.setattr(torch, "compile", counted)
        for _ in range(3):
            network = MLP((3,), width=16).eval()
            nn.init.normal_(network.leave.weight)
            quick = Quick(network, 4, compile=True, capture=False, narrow=False)
            # the same operations on the same numbers
            assert torch.allclose(quick(x, logsnr), network(x, logsnr), rtol=0, atol=1e-6)
    assert counter.frame_count == 1


def asked(
    monkeypatch: pytest.MonkeyPatch, compile_: Any, size: int, count: int
) -> tuple[Quick, Tensor, Tensor, list[str]]:
    """A network behind a compiler of ours: what it says, what it says by itself, and warnings."""
    monkeypatch.setattr(torch, "compile", compile_)
    quick = Quick(Bent(), size, compile=True, capture=False, narrow=False)
    x, logsnr = torch.randn(count, 3), torch.zeros(count)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, plain = quick(x, logsnr), quick.network(x, logsnr)
    return quick, found, plain, [str(warning.message) for warning in caught]


def test_what_can_not_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def broken(function: Any, **_: Any) -> Any:
        def raising(*inputs: Any) -> Any:
            calls.append(1)
            raise RuntimeError("no such kernel\nand a long trace")

        return raising

    _, found, plain, said = asked(monkeypatch, broken, 4, 9)
    assert torch.equal(found, plain)
    assert len(said) == 1 and len(calls) == 1  # once, not for each batch
    assert "can't be compiled (RuntimeError: no such kernel)" in said[0]
    assert "--compile off" in said[0]


@pytest.mark.parametrize(
    "factor, of, kept",
    [
        (1.01, slice(None), True),
        (2.0, slice(None), False),
        (float("nan"), slice(None), False),
        (0.0, slice(7, 9), False),  # two examples
        (0.0, slice(17, 20), False),  # the last ones
    ],
)
def test_a_compiler_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, factor: float, of: slice, kept: bool
) -> None:
    """What it makes is compared before it is believed, once for each shape."""
    calls: list[int] = []

    def compile_(function: Any, **_: Any) -> Any:
        def wrong(*inputs: Any) -> Any:
            calls.append(1)
            found = tuple(t.clone() for t in function(*inputs))
            for t in found:
                t[of] *= factor
            return found

        return wrong

    quick, found, plain, said = asked(monkeypatch, compile_, 20, 50)
    if kept:
        assert torch.equal(found, factor * plain) and not said and len(calls) == 3
        assert quick.network.sizes == [20, 16, 20, 20, 50]
    else:
        assert torch.equal(found, plain) and len(calls) == 1
        assert len(said) == 1 and "once it is compiled; going on without" in said[0]


def test_mistakes_of_a_network_are_its_own(traced: None) -> None:
    """What fails as it is, too, is raised as it is; and so is a want of memory."""

    def wrong(x: Tensor) -> tuple[Tensor, ...]:
        raise ValueError("expected three channels")

    for error, text in ((ValueError, "three channels"), (torch.OutOfMemoryError, "no room")):
        function: Any = wrong if error is ValueError else Bent(0)
        inputs = (torch.ones(2),) if error is ValueError else (torch.ones(2, 1), torch.ones(2))
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            with pytest.raises(error, match=text):
                Compiled(function)(*inputs)


def test_a_network_in_bfloat16() -> None:
    """Its products are rounded to 8 bits, what comes back is the model's own type."""

    class Product(nn.Linear):
        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    network = Product(3, 3)
    quick = compiling.quick(network, 4, CPU, "off", "bfloat16")
    assert quick is not None
    x, logsnr = torch.randn(5, 3), torch.zeros(5)
    with torch.no_grad():
        found, wide = quick(x, logsnr), network(x, logsnr)
        assert found.dtype == torch.bfloat16
        expected = nn.functional.linear(
            x.bfloat16(), network.weight.bfloat16(), network.bias.bfloat16()
        )
    assert torch.equal(found, expected) and not torch.equal(found.float(), wide)
    samples = [
        sample(build(network), 6, Ancestral(5), shape=(3,), raw=True, precision=how)  # type: ignore[arg-type]
        for how in ("float32", "bfloat16")
    ]
    assert samples[1].dtype == torch.float32
    # five looks of relative error 2⁻⁸ each, of numbers of size 1 that the network adds
    assert 0 < float((samples[0] - samples[1]).abs().max()) <= 5 * 2**-8


def test_on_a_cpu_nothing_is_captured() -> None:
    function = Captured(lambda x: (x + 1,))
    with torch.no_grad():
        assert torch.equal(function(torch.ones(2))[0], torch.full((2,), 2.0))
    assert not function.graphs


# ---------------------------------------------------------------- sizes


@given(
    free=st.floats(1.0, 1e12), each=st.floats(1.0, 1e9), most=st.sampled_from([1, 64, 1000, 4096])
)
def test_the_largest_batch_that_fits(free: float, each: float, most: int) -> None:
    size = batch_within(free, each, most)
    assert size & (size - 1) == 0 and 1 <= size <= most
    assert size == 1 or size * each <= SHARE * free
    assert 2 * size > most or 2 * size * each > SHARE * free  # no larger one would


@given(n=st.integers(0, 20_000), most=st.integers(1, 2000))
def test_even_batches(n: int, most: int) -> None:
    """As few as there must be, and hardly anything filled up."""
    size = evenly(n, most)
    assert 1 <= size <= most
    count = -(-n // most)
    assert count * size >= n  # no more batches than with the largest
    assert size - -(-max(n, 1) // max(count, 1)) < EVEN


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("name", SOLVERS)
def test_samples_are_the_same(traced: None, name: str) -> None:
    """Compiled, in batches of any size, filled up or not: a function of (seed, number)."""
    network, solver = Bent(), SOLVERS[name]
    options: dict[str, Any] = {"shape": (2, 3), "raw": True, "seed": 4}
    plain = sample(build(network), 11, solver, **options, compile="off")
    for size in (None, 11, 4, 1):
        network.sizes.clear()
        found = sample(build(network), 11, solver, **options, compile="on", batch_size=size)
        assert torch.equal(found, plain)
        assert len(set(network.sizes)) == 1  # nothing is compiled a second time
    part = sample(build(network), 3, solver, **options, compile="on", batch_size=2, start=5)
    assert torch.equal(part, plain[5:8])


@pytest.mark.parametrize("name", ["ancestral", "exponential", "heun"])
def test_a_way_back_in_one_piece(name: str) -> None:
    """What is captured on a GPU: from the second batch on, all filled up to one size."""
    model, solver = build().eval(), SOLVERS[name]
    plain = sample(model, 11, solver, shape=(3,), raw=True, seed=2, start=3)
    with torch.no_grad():
        grid = solver.times(model, (3,))
        way = Way.of(model, grid, (3,), solver.looks(grid))
        job = _Job(way, solver.prepare(way), _prior(model), 2, None, True, None)
        model.network.sizes.clear()  # type: ignore[operator, union-attr]
        found = torch.cat(list(job.batches(range(3, 14), 4, whole=True)))
    assert torch.equal(found, plain)
    assert set(model.network.sizes) == {4}  # type: ignore[arg-type]


def test_the_callback_sees_every_look(traced: None) -> None:
    seen: list[Any] = []
    x = sample(
        build(), 5, Ancestral(3), shape=(2,), batch_size=3, compile="on", callback=seen.append
    )
    assert [(step.number, step.samples) for step in seen] == [
        (number, numbers) for numbers in (range(3), range(3, 5)) for number in (1, 2, 3)
    ]
    assert [len(step.y) for step in seen] == [3] * 3 + [2] * 3 and len(x) == 5


def test_too_little_memory_for_samples(traced: None) -> None:
    network = Bent(room=3)
    with pytest.warns(UserWarning, match="going on with 2 samples at a time"):
        found = sample(
            build(network), 9, Ancestral(3), shape=(2,), batch_size=5, raw=True, compile="on"
        )
    assert set(network.sizes) == {5, 2}
    assert torch.equal(found, sample(build(), 9, Ancestral(3), shape=(2,), raw=True))


# ---------------------------------------------------------------- evaluations

LIKELIHOODS = {"discrete": Discrete(LEVELS), "tweedie": Tweedie(LEVELS), "density": Continuous()}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_bits_are_the_same(traced: None, name: str) -> None:
    """Compiled and filled up, from a tensor and from a loader."""
    x = pixels(21)
    x = x.float() / LEVELS if name == "density" else x
    plain = evaluate(build(likelihood=LIKELIHOODS[name]), x, draws=3, quiet=True, compile="off")
    for data in (x, list(x.split(6))):
        for size in (None, 16, 1):
            network = Bent()
            model = build(network, LIKELIHOODS[name])
            found = evaluate(model, data, draws=3, batch_size=size, quiet=True, compile="on")
            assert torch.equal(found.per_example, plain.per_example)
            first = network.sizes[0]
            assert set(network.sizes) == {first, min(FEW, first)}  # these to check the compiler


@pytest.mark.parametrize("compile_", ["off", "on"])
def test_too_little_memory_for_bits(traced: None, compile_: Any, tmp_path: Path) -> None:
    """In the pilot, with 8 draws, it is halved; nothing is lost, and nothing is done twice."""
    network, x = Bent(room=20), pixels(30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = evaluate(
            build(network), x, draws=2, batch_size=64, quiet=True, compile=compile_, folder=tmp_path
        )
    said = [str(warning.message) for warning in caught if "memory" in str(warning.message)]
    assert said == [
        f"not enough memory (no room for it); going on with {size} examples times draws at a time"
        for size in (32, 16)
    ]
    assert torch.equal(found.per_example, evaluate(build(), x, draws=2, quiet=True).per_example)


def test_memory_for_not_even_one_example() -> None:
    with (
        pytest.warns(UserWarning, match="going on with 4 examples times draws"),
        pytest.raises(torch.OutOfMemoryError, match="no room"),
    ):
        evaluate(build(Bent(room=1)), pixels(5), draws=4, batch_size=8, quiet=True)


@pytest.mark.parametrize("first, second", [("bfloat16", "auto"), ("auto", "bfloat16")])
def test_another_precision_is_another_evaluation(first: Any, second: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"quiet": True, "folder": tmp_path}
    evaluate(build(), pixels(5), precision=first, **options)
    told = message(lambda: evaluate(build(), pixels(5), precision=second, **options))
    says(told, "holds another evaluation", "bfloat16")
    evaluate(build(), pixels(5), precision=first, compile="off", **options)  # how does not matter


# ---------------------------------------------------------------- with the real compiler


@pytest.mark.slow
def test_the_real_compiler() -> None:
    """An MLP by C++: samples and bits, up to the rounding of float32."""
    torch._dynamo.reset()
    network = MLP((3,), width=32)
    nn.init.normal_(network.leave.weight, std=0.1)
    model, x = build(network), pixels(50)
    plain, fast = (
        sample(model, 20, Ancestral(10), raw=True, batch_size=8, compile=how)  # type: ignore[arg-type]
        for how in ("off", "on")
    )
    # ten looks with sums in another order
    assert 0 <= float((plain - fast).abs().max()) <= 1e-5
    bits = [evaluate(model, x, quiet=True, compile=how) for how in ("off", "on")]  # type: ignore[arg-type]
    assert abs(bits[0].bits_per_dim - bits[1].bits_per_dim) <= 1e-5
    assert float((bits[0].per_example - bits[1].per_example).abs().max()) <= 1e-5


@pytest.mark.parametrize("compile_", [False, True])
def test_a_quick_network_goes_at_once(compile_: bool) -> None:
    """With the memory of its graphs: nothing waits for the garbage collector."""
    network = MLP((3,), width=8)
    quick = Quick(network, 4, compile_, capture=True, narrow=False)
    gone = weakref.ref(quick._call)
    gc.disable()
    try:
        del quick
        assert gone() is None
    finally:
        gc.enable()
