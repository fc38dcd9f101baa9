"""On a GPU: the numbers of the CPU, no synchronisation, and capture in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ornstein import Process
from ornstein.linalg import _reflect, orthogonal_reduction
from tests.conformance.zoo import ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

F64 = torch.float64
CAPTURED = ("cld", "alda", "learned-2", "learned-separate-rates", "constant-against-linear")


def value(process: Process, s: Tensor, given: str) -> tuple[Tensor, list[Tensor]]:
    """A scalar of the kernel, and its gradients to s and all parameters."""
    kernel = process.transition(s, given)  # type: ignore[arg-type]
    total = kernel.propagator.square().sum() + kernel.cholesky.log1p().sum()
    wanted = [s, *process.parameters()]
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    return total, [g for g in grads if g is not None]


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize("name", ZOO)
def test_the_numbers_of_the_cpu(name: str, given: str) -> None:
    process = ZOO[name]()
    times = process.horizon * torch.tensor([1e-3, 0.03, 0.4, 1.0], dtype=F64)
    results = []
    for device in ("cpu", "cuda"):
        process = process.to(device)
        s = times.to(device).requires_grad_()
        kernel = process.transition(s, given)  # type: ignore[arg-type]
        results.append([kernel.propagator, kernel.cholesky, *value(process, s, given)[1]])
    for here, there in zip(*results, strict=True):
        # another order of the same sums: a few ε of the largest entry
        scale = float(here.detach().abs().max())
        assert float((here - there.cpu()).detach().abs().max()) <= 1e-11 * scale


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize("name", ZOO)
def test_the_numbers_of_the_cpu_without_gradient(name: str, given: str) -> None:
    """Where none is wanted a single kernel looks the times up; every digit of diag L counts."""
    process = ZOO[name]()
    times = process.horizon * torch.tensor([1e-4, 1e-3, 0.03, 0.4, 1.0], dtype=F64)
    with torch.no_grad():
        here = process.transition(times, given)  # type: ignore[arg-type]
        there = process.to("cuda").transition(times.cuda(), given)  # type: ignore[arg-type]
    scale = here.propagator.abs().amax((-2, -1), keepdim=True)
    assert bool(((here.propagator - there.propagator.cpu()).abs() <= 1e-11 * scale).all())
    L, other = here.cholesky, there.cholesky.cpu()
    assert bool(((L - other).abs() <= 1e-11 * L.norm(dim=-1, keepdim=True)).all())
    own, others = (m.diagonal(dim1=-2, dim2=-1) for m in (L, other))
    room = (10 * here.error).clamp(min=1e-11).unsqueeze(-1)  # what rounding can do
    assert bool(((own - others).abs() <= room * own).all())


@pytest.mark.parametrize("K, N", [(1, 1), (2, 16), (3, 41), (3, 96), (5, 55), (6, 600)])
def test_the_reduction_of_the_cpu(K: int, N: int) -> None:
    """The kernel written for the GPU: L, rows, error estimate, zero rows and NaN."""
    size = torch.logspace(0, -9, N, dtype=F64)  # columns that shrink
    columns = torch.randn(7, K, N, dtype=F64) * size
    columns[2, 0] = 0.0
    columns[3, K - 1, 0] = float("nan")
    found = orthogonal_reduction(columns.cuda())
    wanted = _reflect(columns, True)
    for here, there in zip(wanted, found, strict=True):
        good = [0, 1, 2, 4, 5, 6]
        scale = here[good].abs().reshape(len(good), -1).amax(1)
        gap = (here - there.cpu())[good].abs().reshape(len(good), -1).amax(1)
        assert bool((gap <= 1e-13 * scale).all())
    assert bool(torch.isnan(found[2][3]))
    L, rows = found[0].cpu(), found[1].cpu()
    assert torch.allclose(
        (L @ rows)[0], columns[0], rtol=0.0, atol=1e-14 * float(columns[0].abs().max())
    )


@pytest.mark.parametrize("name", CAPTURED)
def test_no_synchronisation_inside_a_graph(name: str) -> None:
    """Captured, replayed on new times and new parameters, forward and backward."""
    process = ZOO[name]().to("cuda")
    s = torch.rand(64, dtype=F64, device="cuda").mul_(0.9 * process.horizon).add_(0.05)
    s.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            value(process, s, "x")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, grads = value(process, s, "x")
    with torch.no_grad():
        s.copy_(torch.linspace(0.06, 0.97, 64, dtype=F64) * process.horizon)
        for parameter in process.parameters():
            parameter.mul_(1.05)
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_grads = value(process, s, "x")
    assert torch.allclose(total, expected, rtol=1e-12)
    for found, wanted in zip(grads, expected_grads, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-11 * float(wanted.abs().max()))
    with torch.no_grad():
        s[3] = 1.5 * process.horizon  # outside: poisoned, not wrong
    graph.replay()
    assert bool(torch.isnan(total))


@pytest.mark.parametrize("name", ["cld", "learned-2", "constant-against-linear"])
def test_compiled_with_graphs(name: str) -> None:
    """torch.compile in its graph mode gives the same."""
    process = ZOO[name]().to("cuda")
    s = torch.linspace(0.05, 0.9, 64, dtype=F64, device="cuda") * process.horizon

    def read(s: Tensor) -> tuple[Tensor, Tensor]:
        kernel = process.transition(s)
        return kernel.propagator, kernel.cholesky

    compiled = torch.compile(read, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            found = [t.clone() for t in compiled(s)]
        for a, b in zip(found, read(s), strict=True):
            assert float((a - b).abs().max()) <= 1e-12 * float(b.abs().max())
