"""The bound in a compiled graph and on a GPU: the numbers of eager mode on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Continuous, Counted, Discrete, FixedTime, Likelihood, ScoreModel, Tweedie
from ornstein.truncation import Truncation

F64 = torch.float64
LIKELIHOODS: dict[str, Likelihood] = {
    "discrete": Discrete(16),
    "tweedie": Tweedie(16),
    "tweedie-logit": Tweedie(16, logit=0.05),
    "continuous": Continuous(),
}
PROCESSES = {
    "cld": ornstein.cld,
    "alda": ornstein.alda,
    "learned": lambda: ornstein.learned(1, full=True, learn_v0_variance=True),
    "two-rates": lambda: ornstein.learned(1, learn_rates="separate"),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No graph of another test is reused."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Perceptron(nn.Module):
    """A small network of the state's shape."""

    def __init__(self, size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(size + 1, 16, dtype=F64)
        self.last = nn.Linear(16, size, dtype=F64)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=F64))

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        flat = torch.cat([x.flatten(1), logsnr[:, None] / 10], 1)
        return self.last(torch.tanh(self.first(flat))).reshape(x.shape)


def build(
    parametrisation: str, process: str, likelihood: str, truncation: Truncation | None = None
) -> tuple[ScoreModel, Tensor]:
    """A model and a batch for it."""
    made = PROCESSES[process]()
    kind = LIKELIHOODS[likelihood]
    size = 6 * (made.n_vars if parametrisation == "joint" else 1)
    model = ScoreModel(
        Perceptron(size),
        made,
        kind,
        parametrisation,  # type: ignore[arg-type]
        0.1,
        0.6,
        truncation,
    )
    generator = torch.Generator().manual_seed(2)
    if likelihood == "continuous":
        return model, torch.randn(5, 6, dtype=F64, generator=generator)
    return model, torch.randint(0, 16, (5, 6), dtype=torch.uint8, generator=generator)


def loss(model: ScoreModel, x: Tensor) -> Tensor:
    """A number with gradients to everything, the same on every device."""
    index = torch.arange(len(x), device=x.device)
    return -ornstein.elbo(model, x, draws=2, random=Counted(3, index)).nats.mean()


def with_gradients(function: object, model: ScoreModel, x: Tensor) -> list[Tensor]:
    value = function(model, x)  # type: ignore[operator]
    wanted = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(value, wanted, allow_unused=True)
    return [value.detach(), *(g for g in grads if g is not None)]


def close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    assert len(found) == len(wanted)
    # relative to the largest entry; gradients that are zero but for rounding, to 1e-12
    for here, there in zip(wanted, found, strict=True):
        scale = float(here.abs().max())
        assert float((here - there.cpu()).abs().max()) <= tolerance * max(scale, 1e-3)


CASES = [
    ("channel", "cld", "discrete", None),
    ("channel", "learned", "discrete", None),
    ("channel", "learned", "tweedie-logit", FixedTime(0.01)),
    ("channel", "alda", "continuous", None),
    ("joint", "cld", "tweedie", None),
    ("joint", "learned", "discrete", None),
    ("joint", "learned", "tweedie", FixedTime(0.01)),
    ("joint", "two-rates", "discrete", None),
    ("joint", "alda", "discrete", None),
]
QUICK = 0  # tracing takes many seconds


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if i == QUICK else pytest.mark.long)
        for i, case in enumerate(CASES)
    ],
    ids=lambda case: "-".join(str(c) for c in case[:3]),
)
def test_compiled_is_eager(case: tuple[str, str, str, Truncation | None]) -> None:
    model, x = build(*case)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    # the same operations in float64; gradients through a solve for the truncation lose some digits
    close(with_gradients(compiled, model, x), with_gradients(loss, model, x), 1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(c) for c in case[:3]))
def test_a_gpu_is_the_cpu(case: tuple[str, str, str, Truncation | None]) -> None:
    model, x = build(*case)
    wanted = with_gradients(loss, model, x)
    close(with_gradients(loss, model.cuda(), x.cuda()), wanted, 1e-9)
    compiled = torch.compile(loss, fullgraph=True)
    close(with_gradients(compiled, model, x.cuda()), wanted, 1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_evaluate_on_a_gpu_is_the_cpu() -> None:
    model, x = build("channel", "cld", "discrete")
    here = ornstein.evaluate(model, x, draws=4, quiet=True)
    there = ornstein.evaluate(model.cuda(), x, draws=4, quiet=True)
    assert abs(here.bits_per_dim - there.bits_per_dim) <= 1e-9 * abs(here.bits_per_dim)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
def test_no_synchronisation_in_a_compiled_step(parametrisation: str) -> None:
    model, x = build(parametrisation, "learned", "discrete")
    model, x = model.cuda(), x.cuda()

    def step(images: Tensor) -> Tensor:
        return -ornstein.elbo(model, images).nats.mean()

    compiled = torch.compile(step, fullgraph=True)
    for _ in range(3):
        compiled(x).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        value = compiled(x)
        value.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(value.isfinite())
