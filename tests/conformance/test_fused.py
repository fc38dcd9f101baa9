"""The kernels of networks and of the optimiser against the tensor operations they stand for.

On a CUDA device; or on the CPU by Triton's interpreter, TRITON_INTERPRET=1.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ornstein import gpu
from ornstein.networks import UNet, fused
from ornstein.training import updating
from ornstein.training.options import Optimiser
from ornstein.training.updating import Numbers, Update

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not gpu.usable(torch.ones(1, device=DEVICE)),
    reason="needs a CUDA device, or Triton and TRITON_INTERPRET=1",
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IMAGES = {  # examples, channels, height, width, groups
    "even": (2, 128, 8, 8, 32),
    "groups of twelve": (2, 384, 4, 4, 32),
    "odd sizes": (3, 48, 7, 5, 4),
    "large": (1, 96, 32, 24, 8),
}


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def normed(images: tuple[int, ...], kind: torch.dtype) -> tuple[Tensor, nn.GroupNorm, Tensor]:
    """Channels far from zero next to their spread, where sums of squares would cancel."""
    N, C, H, W, G = images
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(N, C, H, W, generator=generator)
    x = x + 30 * torch.randn(C, generator=generator)[:, None, None]
    norm = nn.GroupNorm(G, C, eps=1e-6)
    nn.init.normal_(norm.weight, 1, 0.3, generator=generator)
    nn.init.normal_(norm.bias, generator=generator)
    shift = torch.randn(N, C, generator=generator).to(DEVICE)
    x = x.to(DEVICE, kind).contiguous(memory_format=torch.channels_last)
    return x.requires_grad_(), norm.to(DEVICE), shift.requires_grad_()


# ---------------------------------------------------------------- norms


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("drop", [0.0, 0.2])
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize("images", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_norm(kind: torch.dtype, images: tuple[int, ...], silu: bool, drop: float) -> None:
    """Output and all gradients, against float64; a half type rounds what is stored."""
    if kind is torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("an instruction of the GPU")
    x, norm, shift = normed(images, kind)
    seed = torch.tensor(0x123456789ABCDEF, device=DEVICE)
    y = fused.norm_act(x, norm, shift, silu, drop, seed)
    gradient = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, norm.weight, norm.bias, shift], gradient)
    wide = copy.deepcopy(norm).double()
    X, S = (t.detach().double().requires_grad_() for t in (x, shift))
    truth = fused.plain(X, wide, S, silu, drop, seed)
    wanted = torch.autograd.grad(truth, [X, wide.weight, wide.bias, S], gradient.double())
    most = 5e-6 if kind is torch.float32 else 5e-3
    assert relative(y, truth) < most
    assert torch.equal(y == 0, truth == 0)  # the same are dropped
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < most


def test_what_is_dropped() -> None:
    """As many as asked for, without relation to their neighbours or to another seed's."""
    x = torch.zeros(16, 128, 16, 16)
    n = x.numel()
    for drop in (0.1, 0.5):
        kept = [fused.kept(x, drop, torch.tensor(seed)) for seed in (7, 7 + 2**40 + 12345)]
        places = [k.permute(0, 2, 3, 1).flatten().double() for k in kept]  # as they lie in memory
        for place in places:
            assert abs(float(place.mean()) - (1 - drop)) < 4 * math.sqrt(drop * (1 - drop) / n)
        z = [(p - p.mean()) / p.std() for p in places]
        for lag in (1, 2, 8, 128, 2048):
            assert abs(float((z[0][:-lag] * z[0][lag:]).mean())) < 0.012
        assert abs(float((z[0] * z[1]).mean())) < 0.012


def test_plain_is_what_modules_do() -> None:
    x = torch.randn(3, 16, 5, 4)
    norm, shift = nn.GroupNorm(4, 16), torch.randn(3, 16)
    nn.init.normal_(norm.weight)
    moved = x + shift[:, :, None, None]
    assert torch.equal(fused.plain(x, norm, shift), nn.functional.silu(norm(moved)))
    assert torch.equal(fused.plain(x, norm, silu=False), norm(x))
    seed = torch.tensor(5)
    kept = fused.kept(x, 0.5, seed)
    wanted = torch.where(kept, 2 * nn.functional.silu(norm(x)), 0.0)
    torch.testing.assert_close(fused.plain(x, norm, drop=0.5, seed=seed), wanted)


# ---------------------------------------------------------------- networks


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 7, 9)], ids=str)
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_compiled_network(shape: tuple[int, ...], narrow: bool) -> None:
    """Forward and backward with the kernels, against float64 without; weights stay float32."""
    torch.backends.cudnn.allow_tf32, before = False, torch.backends.cudnn.allow_tf32
    torch.manual_seed(0)
    network = UNet(shape, 2, 2, 32, (1, 2), 1, (shape[1] // 2,), 0.0).to(DEVICE)
    for p in network.parameters():
        nn.init.normal_(p, std=0.1)
    wide = copy.deepcopy(network).double()
    x = torch.randn(4, 6, *shape, device=DEVICE)
    logsnr = torch.linspace(-8, 8, 4, device=DEVICE)
    compiled = torch.compile(network, fullgraph=True, dynamic=False)
    with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
        y = compiled(x, logsnr)
    gradient = torch.randn(y.shape, device=DEVICE)
    y.backward(gradient.to(y.dtype))
    wanted = wide(x.double(), logsnr.double())
    wanted.backward(gradient.double())
    torch.backends.cudnn.allow_tf32 = before
    most = 0.05 if narrow else 2e-5
    assert relative(y, wanted) < most
    found = torch.cat([p.grad.flatten() for p in network.parameters()])
    truth = torch.cat([p.grad.flatten() for p in wide.parameters()])
    assert relative(found, truth) < most
    assert {p.grad.dtype for p in network.parameters()} == {torch.float32}


# ---------------------------------------------------------------- the optimiser


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_update_is_torchs_adam(kind: str, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps: weights in either layout, of even and odd sizes, two types; and their means."""
    monkeypatch.setattr(updating, "BLOCK", 64)
    options: Any = Optimiser(optimiser=kind, clip=clip, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=kind).to(DEVICE)

    last = drawn(4, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    network = [nn.Parameter(t) for t in (drawn(5, 8), last, drawn(200), drawn(6))]
    process = [nn.Parameter(drawn(2, 2, kind=torch.float64))]
    copies = [[nn.Parameter(p.detach().clone()) for p in some] for some in (network, process)]
    ours, theirs = (_optimiser(kind, options, *some) for some in ((network, process), copies))
    every, twins = network + process, copies[0] + copies[1]
    means = [p.detach().clone() for p in every]
    average: Any = SimpleNamespace(groups={0: list(zip(means, every, strict=True))})
    wanted = [m.clone() for m in means]
    update = Update(ours, average, options)
    for n in range(20):
        for p, twin in zip(every, twins, strict=True):
            p.grad = drawn(*p.shape, kind=p.dtype).contiguous(memory_format=_layout(p))
            twin.grad = p.grad.clone()
        part = 1 - min(0.9, (1 + n) / (10 + n))
        numbers = Numbers((1e-2, 3e-3), n, part).listed(options)
        update.point()
        norms = update.use(torch.tensor(numbers, dtype=torch.float64, device=DEVICE))
        most = clip if clip > 0 else math.inf
        truth = [nn.utils.clip_grad_norm_(g["params"], most) for g in theirs.param_groups]
        theirs.step()
        for mean, twin in zip(wanted, twins, strict=True):
            mean.lerp_(twin.detach(), part)
        assert norms.tolist() == pytest.approx([float(t) for t in truth], rel=1e-6)
    for p, twin in zip([*every, *means], [*twins, *wanted], strict=True):
        assert relative(p, twin) < 1e-6
    for p, twin in zip(every, twins, strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):  # where a rounded β would show
            assert relative(ours.state[p][moment], theirs.state[twin][moment]) < 2e-6


def _optimiser(kind: str, options: Any, network: Any, process: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": network, "lr": 1e-2, "weight_decay": options.weight_decay},
        {"params": process, "lr": 3e-3, "weight_decay": 0.0},
    ]
    maker = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return maker(groups, betas=options.betas)


def _layout(p: Tensor) -> torch.memory_format:
    last = p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
