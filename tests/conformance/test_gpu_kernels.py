"""The kernels of `gpu` against the tensor operations that they stand for.

On a CUDA device; or on the CPU by Triton's interpreter, TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import ornstein
from ornstein import Diffusion, gpu
from ornstein.clock import Clock, _look_up, earlier, panel_count
from ornstein.linalg import EPS, _reflect
from ornstein.transition import Transition

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F64 = torch.float64

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not gpu.usable(torch.ones(1, device=DEVICE)),
        reason="needs a CUDA device, or Triton and TRITON_INTERPRET=1",
    ),
]


def fixed(K: int, total: float = 10.0, noises: int = 1) -> Diffusion:
    """A chain: noise enters the last variables and reaches the data through all others."""
    Q, D = torch.zeros(K, K, dtype=F64), torch.zeros(K, K, dtype=F64)
    for i in range(K - 1):
        Q[i, i + 1], Q[i + 1, i] = -1.0 - 0.1 * i, 1.0 + 0.1 * i
    for i in range(K - noises, K):
        D[i, i] = 1.5 - 0.2 * i
    return Diffusion(Q, D, rate=ornstein.Linear(0.02 * total, 1.98 * total)).to(DEVICE)


def solved(process: Diffusion) -> Clock:
    found = process._solved
    assert isinstance(found, Clock)
    return found


def places(clock: Clock) -> Tensor:
    """Short times, both sides of panels' ends, and the horizon."""
    assert clock.table is not None
    width = clock.table.width
    ends = width * torch.tensor([1.0, 1 - 1e-15, 1 + 1e-15, clock.count / 2], device=DEVICE)
    short = torch.tensor([1e-6, 1e-3, 0.3], dtype=F64, device=DEVICE) * width
    return torch.cat([short, ends.to(F64), clock.total.reshape(1)]).clamp(max=float(clock.total))


def diagonal(L: Tensor) -> Tensor:
    return L.diagonal(dim1=-2, dim2=-1)


def compare(found: tuple[Tensor, ...], wanted: Any) -> None:
    Phi, L, error = found
    scale = wanted.Phi.abs().amax((-2, -1))
    assert bool(((Phi - wanted.Phi).abs().amax((-2, -1)) <= 1e-13 * scale).all())
    # another order of the same sums: what rounding can do to L comes with it
    room = (10 * wanted.error).clamp(min=1e-13).unsqueeze(-1)
    assert bool(((diagonal(L) - diagonal(wanted.L)).abs() <= room * diagonal(wanted.L)).all())
    rows = torch.linalg.vector_norm(wanted.L, dim=-1, keepdim=True)
    assert bool(((L - wanted.L).abs() <= 1e-12 * rows).all())
    assert torch.equal(L, torch.tril(L))
    good = wanted.error < 1e-8
    assert bool((error[good] < 1e-7).all())


@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("K, N", [(1, 1), (2, 16), (3, 41), (5, 55)])
def test_a_reduction(K: int, N: int, with_rows: bool) -> None:
    columns = torch.randn(5, K, N, dtype=F64, device=DEVICE)
    columns *= torch.logspace(0, -9, N, dtype=F64, device=DEVICE)  # columns that shrink
    columns[2, 0] = 0.0
    columns[3, K - 1, 0] = float("nan")
    L, rows, error = gpu.reduce(columns, with_rows, EPS)
    wanted_L, wanted_rows, wanted_error = _reflect(columns, with_rows)
    pairs = [(L, wanted_L), (error, wanted_error)] + [(rows, wanted_rows)] * with_rows
    for here, there in pairs:
        good = [0, 1, 2, 4]
        scale = there[good].abs().reshape(4, -1).amax(1)
        assert bool(((here - there)[good].abs().reshape(4, -1).amax(1) <= 1e-13 * scale).all())
    assert bool(error[3].isnan())


@pytest.mark.parametrize("given_x", [True, False])
@pytest.mark.parametrize(
    "K, noises", [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (5, 1)]
)
def test_a_look_into_the_table(K: int, noises: int, given_x: bool) -> None:
    process = fixed(K, noises=noises)
    clock = solved(process)
    initial = process.auxiliary.factor() if given_x else None
    tau = places(clock)
    assert clock.parts is not None and clock.table is not None
    assert gpu.looks_up(tau, *clock.table.sizes, initial)
    found = gpu.look_up(tau, None, clock.parts, initial, EPS)
    compare(found, _look_up(clock.table, tau, initial, False))


@pytest.mark.parametrize("count", [1, 2, 64, 2048])
def test_any_number_of_panels(count: int) -> None:
    generator = torch.tensor([[0.0, -1.0], [1.0, 2.0]], dtype=F64, device=DEVICE)
    size = float(torch.linalg.vector_norm(generator))
    total = torch.tensor(1.9 * count / size, dtype=F64, device=DEVICE)
    assert panel_count(float(total) * size) == count
    G = torch.tensor([[0.0], [2.0]], dtype=F64, device=DEVICE)
    table = earlier(count, 2, DEVICE)
    constants = solved(fixed(2)).constants
    clock = Clock(-generator, G, total, count, table, constants).kept()
    tau = places(clock)
    assert clock.parts is not None and clock.table is not None
    for initial in (None, torch.tensor([[0.0], [0.2]], dtype=F64, device=DEVICE)):
        found = gpu.look_up(tau, None, clock.parts, initial, EPS)
        compare(found, _look_up(clock.table, tau, initial, False))


def test_hypoelliptic_at_short_times() -> None:
    """Chains given the state: L_zz² = (∏ q)² 2D s^(2K−1)/((2K−1) (K−1)!²) (1 + O(s))."""
    for K in (2, 3, 4):
        process = fixed(K)
        clock = solved(process)
        tau = torch.tensor([1e-6], dtype=F64, device=DEVICE)
        assert clock.parts is not None
        L = gpu.look_up(tau, None, clock.parts, None, EPS)[1]
        product = math.prod(1.0 + 0.1 * i for i in range(K - 1))
        noise = 2 * (1.5 - 0.2 * (K - 1))
        wanted = product * math.sqrt(noise * 1e-6 ** (2 * K - 1) / (2 * K - 1))
        wanted /= math.factorial(K - 1)
        assert float(L[0, 0, 0]) == pytest.approx(wanted, rel=1e-5)  # O(s)


def test_times_in_and_nan_outside() -> None:
    """`guarded` is `at` on the clock's own line, and NaN where a kernel would be wrong."""
    process = fixed(2)
    span = torch.tensor([0.2, 9.8, 1.0, 2e-8], dtype=F64, device=DEVICE)
    built = process._build()
    assert isinstance(built, Clock)
    clock, initial = built.kept(span), process.auxiliary.factor()
    s = torch.tensor([1e-3, 0.2, 1.0, 1.0 + 1e-9, -1e-9, math.nan, 0.7], dtype=F64, device=DEVICE)
    found, wanted = clock.guarded(s, initial), clock.at(s * (0.2 + 9.8 * s), initial)
    assert found is not None
    good, bad = [0, 1, 2, 6], [3, 4, 5]
    for here, there in (
        (found.propagator, wanted.propagator),
        (found.cholesky, wanted.cholesky),
    ):
        gap = (here - there)[good].abs().amax()
        assert float(gap) <= 1e-14
        assert bool(here[bad].isnan().all())
    assert bool(found.error[bad].isnan().all())
    strict = built.kept(span * torch.tensor([1, 1, 1, 1e-12], device=DEVICE))
    lost = strict.guarded(s[:3], initial)
    assert lost is not None and bool(lost.cholesky.isnan().all())
    assert clock.guarded(s.clone().requires_grad_(), initial) is None
    assert built.guarded(s, initial) is None  # nothing kept


def test_a_table_that_does_not_fit_is_nan() -> None:
    built = fixed(2)._build()
    assert isinstance(built, Clock)
    fast = Clock(50 * built.drift, built.G, built.total, 1, built.earlier, built.constants).kept()
    at = fast.at(built.total.reshape(1), None)
    assert bool(at.propagator.isnan().all()) and bool(diagonal(at.cholesky).isnan().all())


def test_a_learned_process_without_gradient() -> None:
    process = ornstein.learned(1).to(DEVICE)
    s = torch.tensor([1e-3, 0.1, 0.6], dtype=F64, device=DEVICE)
    with_grad = process.transition(s)
    assert with_grad.cholesky.requires_grad
    with torch.no_grad():
        without = process.transition(s)
    for here, there in (
        (without.propagator, with_grad.propagator),
        (without.cholesky, with_grad.cholesky),
    ):
        assert torch.allclose(here, there, rtol=1e-11, atol=1e-15)


# ---------------------------------------------------------------------------------- noise


def kernel(K: int, times: int, given: str = "x") -> Transition:
    s = torch.linspace(0.1, 0.9, times, dtype=F64, device=DEVICE)
    return fixed(K).transition(s, given)  # type: ignore[arg-type]


def test_the_noise_is_standard_normal() -> None:
    x = torch.zeros(3, 6000, device=DEVICE)
    _, noise = kernel(2, 3).sample(x)
    flat = noise.double().cpu()
    assert stats.kstest(flat.flatten().numpy(), "norm").pvalue > 1e-3
    n = flat.numel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((flat**power).mean()) - moment) < 4.5 * math.sqrt(variance / n)
    # no relation between examples, variables and neighbours; squares too
    for what in (flat, flat.square()):
        rows = what.reshape(6, -1)
        assert float((torch.corrcoef(rows) - torch.eye(6)).abs().max()) < 5 / math.sqrt(6000)
        lanes = what.reshape(-1, 8).T
        bound = 5 / math.sqrt(lanes.shape[1])
        assert float((torch.corrcoef(lanes) - torch.eye(8)).abs().max()) < bound


def test_every_quarter_of_the_circle() -> None:
    """Pairs of one draw of Box and Muller's: angles uniform, radii independent of them."""
    _, noise = kernel(1, 1).sample(torch.zeros(1, 16384, device=DEVICE))
    quads = noise.double().cpu().reshape(-1, 4)
    for one, other in ((0, 2), (1, 3)):
        angle = torch.atan2(quads[:, other], quads[:, one]) / (2 * math.pi) + 0.5
        assert stats.kstest(angle.numpy(), "uniform").pvalue > 1e-3
        radius = (quads[:, one] ** 2 + quads[:, other] ** 2).div(-2).exp()
        assert stats.kstest(radius.numpy(), "uniform").pvalue > 1e-3
        signs = torch.sign(quads[:, one]) * torch.sign(quads[:, other])
        assert abs(float(signs.mean())) < 4.5 / math.sqrt(len(quads))


@pytest.mark.parametrize("given", ["x", "state"])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_y_is_made_of_the_noise_returned(K: int, given: str) -> None:
    shape = (3, 5, 7) if given == "x" else (3, K, 5, 7)
    for times in (3, 1):  # one for each, one for all
        q, x = kernel(K, times, given), torch.randn(shape, device=DEVICE)
        y, noise = q.sample(x)
        wanted, _ = q.sample(x, noise=noise)
        assert y.shape == noise.shape == (3, K, 5, 7) and y.dtype == noise.dtype == torch.float32
        # float32 sums of K + 1 terms
        assert torch.allclose(y, wanted, rtol=0, atol=4e-7 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    q, x = kernel(2, 3), torch.randn(3, 40, device=DEVICE).to(dtype)
    y, noise = q.sample(x)
    assert y.dtype == noise.dtype == dtype
    wanted, _ = q.sample(x, noise=noise)
    assert torch.allclose(y, wanted, rtol=torch.finfo(dtype).eps, atol=0)


def test_seeds() -> None:
    q, x = kernel(2, 3), torch.randn(3, 1500, device=DEVICE)
    torch.manual_seed(5)
    first, second = q.sample(x)[1], q.sample(x)[1]
    torch.manual_seed(5)
    assert torch.equal(q.sample(x)[1], first)
    assert not bool((first == second).any(-1).all())
    own = torch.Generator(DEVICE).manual_seed(7)
    drawn = q.sample(x, generator=own)[1]
    own.manual_seed(7)
    assert torch.equal(q.sample(x, generator=own)[1], drawn)
    # fewer coordinates, in smaller tiles, have the same noise
    own.manual_seed(7)
    assert torch.equal(q.sample(x[:, :100], generator=own)[1], drawn[..., :100])


def test_what_the_kernel_can_not_do() -> None:
    """float64, many variables, a gradient: torch's own noise, and the gradient is there."""
    for K, dtype, learned in ((2, F64, False), (5, torch.float32, False), (2, torch.float32, True)):
        q = kernel(K, 3)
        x = torch.randn(3, 6, device=DEVICE, dtype=dtype).requires_grad_(learned)
        torch.manual_seed(1)
        y, noise = q.sample(x)
        torch.manual_seed(1)
        wanted = torch.randn(3, K, 6, dtype=dtype, device=DEVICE)
        assert torch.equal(noise, wanted)
        if learned:
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert torch.allclose(grad, q.response.sum(-1, keepdim=True).float().expand(3, 6))
    y, noise = kernel(2, 3).sample(torch.randn(3, 0, device=DEVICE))
    assert y.shape == noise.shape == (3, 2, 0)


# ---------------------------------------------------------------------------------- compiled


def test_compiled_is_eager() -> None:
    process = fixed(2)
    s = torch.linspace(0.05, 1.0, 3, dtype=F64, device=DEVICE)
    x = torch.randn(3, 2, 4, device=DEVICE)

    def draw(s: Tensor) -> tuple[Tensor, ...]:
        q = process.transition(s)
        return *q.sample(x), q.propagator, q.cholesky

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    torch.manual_seed(2)
    wanted = draw(s)
    torch.manual_seed(2)
    for here, there in zip(compiled(s), wanted, strict=True):
        assert torch.allclose(here, there, rtol=1e-6, atol=1e-12)
    outside = s.clone()
    outside[1] = 1.5
    y, _, Phi, L = compiled(outside)
    for found in (y, Phi, L):
        assert bool(found[1].isnan().all()) and not bool(found[[0, 2]].isnan().any())


def test_two_draws_of_one_graph_differ() -> None:
    """A compiler that merges equal expressions must not merge draws."""
    process, x = fixed(2), torch.randn(3, 8, device=DEVICE)
    s = torch.linspace(0.05, 1.0, 3, dtype=F64, device=DEVICE)
    weight = torch.ones((), device=DEVICE, requires_grad=True)

    def difference(weight: Tensor) -> Tensor:
        q = process.transition(s)
        return (weight * (q.sample(x)[1] - q.sample(x)[1])).abs().amin()

    compiled = torch.compile(difference, fullgraph=True, backend="aot_eager_decomp_partition")
    smallest = compiled(weight)
    smallest.backward()
    assert float(smallest.detach()) > 0


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_sample(compiled: bool) -> None:
    """Each replay has its own noise, and takes the times and data that are there."""
    process = ornstein.cld().to(DEVICE)
    s = torch.linspace(0.05, 0.9, 16, dtype=F64, device=DEVICE)
    x = torch.randn(16, 3, 8, 8, device=DEVICE)

    def draw(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return process.transition(s).sample(x)

    work = torch.compile(draw, fullgraph=True) if compiled else draw
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be making s and x
    with torch.cuda.stream(stream):
        for _ in range(3):
            work(s, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, noise = work(s, x)
    seen = []
    for _ in range(3):
        s.uniform_(0.01, 1.0)
        x.normal_()
        graph.replay()
        seen.append(noise.clone())
        wanted, _ = process.transition(s).sample(x, noise=noise)
        assert torch.allclose(y, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    assert not bool((seen[0] == seen[1]).any(-1).all()) and not torch.equal(seen[1], seen[2])
    s[3] = 1.5
    graph.replay()
    assert bool(y[3].isnan().all()) and not bool(y[4].isnan().any())


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 5, 7), (20,)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_what_a_histogram_says(shape: tuple[int, ...], per_channel: bool) -> None:
    """Against float64, from far below a bin to far above the data."""
    levels, sizes = 16, torch.logspace(-4, 6, 21, dtype=F64, device=DEVICE)
    centres = (2 * torch.arange(levels, dtype=F64) + 1) / levels - 1
    own = (shape[0], *[1] * (len(shape) - 1)) if per_channel else ()
    counts = torch.rand(*own, levels, dtype=F64) ** 6 + 1e-6
    counts[..., 0] += 3.0
    histogram = ornstein.histogram.Histogram(centres, counts).to(DEVICE)
    x = torch.rand(len(sizes), *shape, dtype=F64, device=DEVICE) * 2 - 1
    x = x + sizes.reshape(-1, *[1] * len(shape)) * torch.randn_like(x)
    wanted = histogram.seen(x, sizes)
    found = histogram.seen(x.float(), sizes)
    assert gpu.weighs(x.float()) and not gpu.weighs(x)
    # float32 rounds x̃ itself, and the answer moves by v/σ² for each unit of it
    open_ = wanted.scale.square()
    room = 1e-6 + 2 * x.abs() * 2**-23 * (1 + open_) + 1e-4 * wanted.deviation
    assert bool(((found.mean - wanted.mean).abs() <= room).all())
    clear = wanted.deviation > 1e-3
    assert bool(((found.deviation / wanted.deviation - 1).abs()[clear] < 2e-3).all())
    assert bool((found.deviation[~clear] < 1.1e-3).all())


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("levels", [2, 16, 256])
def test_gradients_of_what_a_histogram_says(levels: int, even: bool) -> None:
    """By central moments, against float64; near levels alone, or all of them; and once more."""
    sizes = torch.logspace(-3, 2, 11, dtype=F64, device=DEVICE)
    centres = (2 * torch.arange(levels, dtype=F64) + 1) / levels - 1
    centres = centres if even else centres + 0.3 * centres**3
    histogram = ornstein.histogram.Histogram(centres, torch.rand(levels, dtype=F64) ** 4 + 1e-5)
    histogram = histogram.to(DEVICE)
    assert histogram.regular is (even or levels == 2)
    x = centres.to(DEVICE)[torch.randint(levels, (len(sizes), 2, 3), device=DEVICE)]
    x = x + sizes.reshape(-1, 1, 1) * torch.randn_like(x)
    x, sizes = x.float().double(), sizes.float().double()  # the same numbers for both
    weights = torch.randn(2, *x.shape, dtype=F64, device=DEVICE)
    found = []
    for kind in (F64, torch.float32):
        at, sigma = (v.to(kind).detach().requires_grad_() for v in (x, sizes))
        seen = histogram.seen(at, sigma)
        told = seen.mean, seen.deviation.square()
        total = sum(
            (value / sigma.reshape(-1, 1, 1) ** power * weight.to(kind)).sum()
            for power, value, weight in zip((1, 2), told, weights, strict=True)
        )
        first = torch.autograd.grad(total, (at, sigma), create_graph=True)
        unit = sizes.reshape(-1, 1, 1).to(kind)
        (second,) = torch.autograd.grad((first[0] * unit).sin().sum(), at, retain_graph=True)
        plain = torch.autograd.grad(total, (at, sigma))
        slopes = plain[0] * unit, plain[1] * sizes, first[0] * unit, first[1] * sizes
        found.append([value.detach().double() for value in (*told, *slopes, second * unit)])
    for wanted, value in zip(*found, strict=True):
        torch.testing.assert_close(value, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("K", [1, 2, 3, 8])
def test_powers_of_a_matrix(K: int) -> None:
    """Against products one by one, to rounding."""
    A = torch.randn(K, K, dtype=F64, device=DEVICE) / K
    wanted = [torch.eye(K, dtype=F64, device=DEVICE)]
    for _ in range(24):
        wanted.append(wanted[-1] @ A)
    assert gpu.raises(A, 25) and not gpu.raises(A, 65)
    assert not gpu.raises(torch.zeros(9, 9, dtype=F64, device=DEVICE), 25)
    torch.testing.assert_close(gpu.raised(A, 25), torch.stack(wanted), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("sigma", [1e-9, 1e-6, 1e-4, 0.01, 1.0, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("levels", [2, 5, 256])
@pytest.mark.parametrize("law", ["even", "peaked", "rare"])
def test_a_histogram_anywhere(law: str, levels: int, sigma: float) -> None:
    """Half-way between levels, on them and far outside, against float64: nothing is lost."""
    centres = (2 * torch.arange(levels, dtype=F64) + 1) / levels - 1
    counts = torch.ones(levels, dtype=F64)
    if law != "even":
        counts[1:] = 1e-9 if law == "peaked" else 1e-40
    histogram = ornstein.histogram.Histogram(centres, counts).to(DEVICE)
    few = [0, levels // 3, levels - 2]  # of the levels, and of the middles after them
    middle = (centres[1:] + centres[:-1]).float()[few] / 2
    near = torch.cat([centres.float()[few], middle, middle.nextafter(torch.tensor(9.0))])
    near = torch.cat([near, middle.nextafter(torch.tensor(-9.0)), torch.tensor([-30.0, 1.1, 30.0])])
    near = torch.cat([near, min(sigma, 1e25) * torch.randn(7)]).reshape(-1, 1, 1).to(DEVICE)
    sizes = torch.full((len(near),), sigma, dtype=torch.float32, device=DEVICE)
    found = []
    for kind in (F64, torch.float32):
        at, size = near.to(kind).requires_grad_(), sizes.to(kind).requires_grad_()
        seen = histogram.seen(at, size)
        slopes = torch.autograd.grad(seen.mean.sum() + seen.deviation.square().sum(), (at, size))
        values = seen.mean, seen.deviation, slopes[0] * sigma, slopes[1] * sigma
        found.append([value.detach().double().flatten() for value in values])
    # float32 rounds x̃ − x_k. Between two levels that moves exponents by `doubt`, and derivatives
    # have (step/σ)² as a factor: where this decides, only being finite can be asked for
    x, step = near.double().flatten(), float(centres[1] - centres[0])
    away = (x - centres.to(DEVICE).unsqueeze(-1)).abs().sort(0).values
    margin = (away[1] ** 2 - away[0] ** 2) / 2 / sigma**2
    doubt = 2**-23 * x.abs().clamp(1, 30) * step / sigma**2
    told = (doubt * (1 + (step / sigma) ** 2) < 1e-3) | (margin > 200 + 10 * doubt)
    for wanted, value in zip(*found, strict=True):
        assert bool(value.isfinite().all())
        assert bool(((value - wanted).abs() <= 1e-5 + 1e-3 * wanted.abs())[told].all())
    assert bool(told[: len(few)].all())
