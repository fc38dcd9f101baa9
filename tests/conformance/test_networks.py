"""What every network must satisfy: the published sizes, the shapes of a model, and its types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import Discrete, ScoreModel
from ornstein.networks import MLP, UNet
from tests.test_errors import message, says

NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "unet-small": (UNet.small, (1, 28, 28)),
    "unet-tiny": (UNet.tiny, (1, 8, 8)),
    "unet-odd": (UNet.tiny, (3, 9, 7)),
    "mlp": (MLP, (5,)),
}


def stirred(network: nn.Module) -> nn.Module:
    """With no layer left at zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return network.eval()


def size(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    "variables, count",
    [(None, 35_746_307), (1, 35_746_307), (2, 35_753_222), (3, 35_760_137)],
)
def test_the_papers_number_of_parameters(variables: int | None, count: int) -> None:
    with torch.device("meta"):
        assert size(UNet((3, 32, 32), variables)) == count


def test_small_ones_are_small() -> None:
    with torch.device("meta"):
        assert 1_000_000 < size(UNet.small(features=2)) <= 1_120_000
        assert size(UNet.tiny(features=2)) <= 250_000


@pytest.mark.parametrize("variables", [None, 1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_bounds_of_every_network(name: str, variables: int | None) -> None:
    """In a model with features, it starts as the Gaussian answer and has gradients everywhere."""
    make, shape = NETWORKS[name]
    process = ornstein.learned((variables or 1) - 1)
    kind = "channel" if variables is None else "joint"
    x = torch.randint(256, (3, *shape), dtype=torch.uint8)

    def bits(network: nn.Module) -> Tensor:
        model = ScoreModel(network, process, Discrete(256), kind, features="bins")  # type: ignore[arg-type]
        return ornstein.elbo(model, x, random=0).bits_per_dim

    network = make(shape, variables, 2)
    state = (3, *shape) if variables is None else (3, variables, *shape)

    class Zero(nn.Module):
        def forward(self, inputs: Tensor, logsnr: Tensor) -> Tensor:
            return torch.zeros(state)

    assert torch.allclose(bits(network), bits(Zero()))
    bits(stirred(network)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_an_example_does_not_see_the_others(name: str) -> None:
    make, shape = NETWORKS[name]
    network, x, logsnr = stirred(make(shape)), torch.randn(4, *shape), torch.linspace(-9, 12, 4)
    alone = torch.cat([network(x[i : i + 1], logsnr[i : i + 1]) for i in range(4)])
    assert torch.allclose(network(x, logsnr), alone, atol=1e-5)
    assert not torch.allclose(network(x, logsnr), network(x, logsnr + 1), atol=1e-3)


@pytest.mark.parametrize("name", ["unet-tiny", "mlp"])
def test_half_precision_and_compilation(name: str) -> None:
    """bfloat16 has three digits; a compiled graph is the same function."""
    make, shape = NETWORKS[name]
    network, x, logsnr = stirred(make(shape)), torch.randn(4, *shape), torch.linspace(-9, 12, 4)
    wanted = network(x, logsnr)
    traced = torch.compile(network, fullgraph=True, backend="aot_eager")
    assert torch.allclose(traced(x, logsnr), wanted, atol=1e-5)
    found = network.bfloat16()(x.bfloat16(), logsnr)
    assert float((found.float() - wanted).norm() / wanted.norm()) < 0.05


def test_dropout_works() -> None:
    network, x, logsnr = UNet.tiny(dropout=0.5), torch.randn(2, 1, 8, 8), torch.zeros(2)
    stirred(network)
    assert torch.equal(network(x, logsnr), network(x, logsnr))
    network.train()
    assert not torch.allclose(network(x, logsnr), network(x, logsnr), atol=1e-3)


def test_mistakes_are_explained() -> None:
    says(message(lambda: UNet((28, 28))), "(28, 28)", "(channels, height, width)")
    says(message(lambda: MLP((1, 8, 8))), "(1, 8, 8)", "(size,)")
    says(message(lambda: MLP((8,), variables=0)), "variables=0", "n_vars")
    says(message(lambda: MLP((8,), features="bins")), "features='bins'", "2 for")  # type: ignore[arg-type]
    model = ScoreModel(UNet.tiny(), ornstein.cld(), Discrete(256), features="bins")
    x = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    says(message(lambda: ornstein.elbo(model, x)), "(2, 5, 8, 8)", "features=", "2 for 'bins'")
