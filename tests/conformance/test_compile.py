"""torch.compile(fullgraph=True): the same kernel and the same gradients, and NaN for an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from ornstein import Process
from tests.conformance.zoo import ZOO
from tests.families import draw

F64 = torch.float64


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No graph of another test is reused."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def reader(process: Process, given: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Times to Φ and L."""

    def read(s: Tensor) -> tuple[Tensor, Tensor]:
        kernel = process.transition(s, given)  # type: ignore[arg-type]
        return kernel.propagator, kernel.cholesky

    return read


def check(name: str, given: str, backend: str) -> None:
    """Value, gradients with respect to s and to each parameter, and NaN outside the horizon."""
    process = ZOO[name]()
    read = reader(process, given)
    compiled = torch.compile(read, fullgraph=True, backend=backend)
    s = process.horizon * torch.tensor([1e-2, 0.1, 0.5, 1.0], dtype=F64)
    inputs = [s.clone().requires_grad_(), s.clone().requires_grad_()]
    grads = []
    for function, at in zip((read, compiled), inputs, strict=True):
        Phi, L = function(at)
        weights = torch.linspace(0.5, 1.5, Phi[0].numel(), dtype=F64).reshape(Phi[0].shape)
        value = (weights * Phi).sum() + (weights * L).sum()
        parameters = list(process.parameters())
        grads.append(torch.autograd.grad(value, [at, *parameters], allow_unused=True))
    with torch.no_grad():
        for found, expected in zip(compiled(s), read(s), strict=True):
            # fused kernels add in another order: a few ε of the largest entry
            scale = expected.abs().flatten(1).amax(1)[:, None, None]
            assert bool(((found - expected).abs() <= 1e-13 * scale).all())
    for plain, fused in zip(*grads, strict=True):
        assert (plain is None) == (fused is None)
        if plain is not None:
            assert torch.allclose(plain, fused, rtol=1e-9, atol=1e-10 * float(plain.abs().max()))
    outside = process.horizon * torch.tensor([0.5, 1.01, -0.01, 1.0], dtype=F64)
    with torch.no_grad():
        for matrix in compiled(outside):
            assert bool(torch.isnan(matrix[1:3]).all())
            assert bool(torch.isfinite(matrix[[0, 3]]).all())


@pytest.mark.parametrize("name", ["cld", "learned-2-full", "constant-against-linear"])
def test_traced_in_one_graph(name: str) -> None:
    """One graph, no break, run by autograd as it is."""
    check(name, "x", "aot_eager")


def test_compiled() -> None:
    """Generated code, on the way forward (its compilation takes longer than everything here)."""
    process = ZOO["vpsde"]()
    read = reader(process, "x")
    s = torch.tensor([1e-3, 0.1, 1.0, 1.5], dtype=F64)
    with torch.no_grad():
        found, expected = torch.compile(read, fullgraph=True)(s), read(s[:3])
    for fused, plain in zip(found, expected, strict=True):
        assert torch.allclose(fused[:3], plain, rtol=1e-13, atol=0.0)
        assert bool(torch.isnan(fused[3]).all())


KINDS = ("cld", "learned-2-full", "learned-separate-rates", "constant-against-linear", "vesde")


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow if n in KINDS[:1] else pytest.mark.long])
        for n in KINDS
    ],
)
def test_compiled_at_length(name: str, given: str) -> None:
    """Generated code for every kind: fixed, learned, learned rates, two clocks, general."""
    check(name, given, "inductor")


def test_start_after_the_end_is_nan() -> None:
    """What raises in eager mode is NaN in a graph."""
    process = ZOO["cld"]()

    def read(start: Tensor, s: Tensor) -> Tensor:
        return process.transition(s, "state", start).cholesky

    compiled = torch.compile(read, fullgraph=True, backend="aot_eager")
    start, s = torch.tensor([0.1, 0.6], dtype=F64), torch.tensor([0.5, 0.5], dtype=F64)
    found = compiled(start, s)
    expected = process.transition(0.5, "state", 0.1).cholesky
    assert torch.allclose(found[0], expected, rtol=1e-13, atol=1e-15)
    assert bool(torch.isnan(found[1]).all())


def test_a_lost_factor_is_nan() -> None:
    """Where eager mode says how many digits are lost."""
    process = draw(np.random.default_rng(60), 5, "last").process()
    compiled = torch.compile(reader(process, "state"), fullgraph=True, backend="aot_eager")
    Phi, L = compiled(torch.tensor([1e-5, 1.0], dtype=F64))
    assert bool(torch.isnan(L[0]).all()) and bool(torch.isnan(Phi[0]).all())
    assert bool(torch.isfinite(L[1]).all())
