"""The transition kernel and its sample, against one derived by hand and against a copy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ornstein import compiling
from ornstein.bench.counting import sample_cost
from ornstein.bench.figures import Check, Part, Table, lines_of
from ornstein.bench.racing import Work, captured
from ornstein.bench.sizes import Setting
from ornstein.processes import cld

IMAGE = (3, 32, 32)
AUTOMATIC, BY_HAND = "automatic kernel and sample", "derived by hand"
COPY, COPIES = "copy of y", "copy of y and ε"
MOST = 3.0  # copies of its output, y and ε, that the kernel and its sample may take
CALLS = 16  # in a graph: as inside a step, where it is one of many


def by_hand(s: Tensor, mass: float = 0.25, v0: float = 0.01) -> tuple[Tensor, Tensor]:
    """CLD at critical damping, rate 0.1 … 20: response (B, 2), factor (B, 2, 2).

    A has the double eigenvalue −w, w = 1/√M, so Φ = e^(−wτ)(I + τ(A + wI)), and
    Σ = diag(1, M) + Φ(diag(0, v₀) − diag(1, M))Φᵀ is written out entry by entry.
    """
    tau = s * (0.1 + 9.95 * s)
    w = mass**-0.5
    decay = torch.exp(-w * tau)
    zz, zv = decay * (1 + w * tau), decay * tau / mass
    vz, vv = -decay * tau, decay * (1 - w * tau)
    gap = v0 - mass
    l_zz = (1 - zz * zz + gap * zv * zv).sqrt()
    l_vz = (gap * zv * vv - zz * vz) / l_zz
    l_vv = (mass - vz * vz + gap * vv * vv - l_vz * l_vz).sqrt()
    factor = torch.stack([l_zz, torch.zeros_like(l_zz), l_vz, l_vv], -1)
    return torch.stack([zz, vz], -1), factor.reshape(-1, 2, 2)


def sampled_by_hand(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """y and ε as one writes them for two variables."""
    noise = torch.randn(x.shape[0], 2, *x.shape[1:], dtype=x.dtype, device=x.device)
    r, f = (entry.to(x.dtype)[..., None, None, None] for entry in by_hand(s))
    z = r[:, 0] * x + f[:, 0, 0] * noise[:, 0]
    v = r[:, 1] * x + f[:, 1, 0] * noise[:, 0] + f[:, 1, 1] * noise[:, 1]
    return torch.stack([z, v], 1), noise


def kernel(setting: Setting) -> Part:
    """Transition and sample for CLD; on a GPU compiled and captured."""
    device, batch = setting.device, 32 if setting.quick and not setting.cuda else 256
    process = cld().to(device)
    s = torch.linspace(0.02, 1, batch, dtype=torch.float64, device=device)
    x = torch.randn(batch, *IMAGE, device=device)
    check(process.transition(s).cholesky, by_hand(s)[1])

    def automatic(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return process.transition(s).sample(x)

    ours, theirs = automatic, sampled_by_hand
    if setting.cuda:
        ours, theirs = (compiling.compiled(f, fullgraph=True) for f in (ours, theirs))
    source = torch.randn(2, batch, 2, *IMAGE, device=device)  # y and ε
    target = torch.empty_like(source)
    works: dict[str, Work] = {
        AUTOMATIC: lambda: ours(s, x),
        BY_HAND: lambda: theirs(s, x),
        COPY: lambda: target[0].copy_(source[0]),
        COPIES: lambda: target.copy_(source),
    }
    calls = CALLS if setting.cuda else 1
    runs = {name: captured(work, device, calls) for name, work in works.items()}
    found = setting.race(runs, budget=0.05)
    found = replace(
        found, times={name: tuple(t / calls for t in times) for name, times in found.times.items()}
    )
    cost = sample_cost(batch, 2, x[0].numel())
    how = f", compiled, {calls} in a CUDA graph" if setting.cuda else ""
    table = Table(
        f"transition and sample, CLD, {batch} CIFAR-size images{how}",
        "× the automatic one",
        lines_of(found, AUTOMATIC, batch, {AUTOMATIC: cost}),
    )
    checks = (
        Check(
            "kernel and sample, automatic / derived by hand", found.ratio(AUTOMATIC, BY_HAND), 1.0
        ),
        Check(f"kernel and sample / {COPIES}", found.ratio(AUTOMATIC, COPIES), MOST),
    )
    return Part((table,), checks if setting.cuda else ())


def check(ours: Tensor, theirs: Tensor) -> None:
    """The two agree; by hand it cancels at short times: 7e-10 at s = 0.02."""
    worst = float((ours - theirs).abs().max())
    if not worst < 1e-8:
        raise ValueError(f"the kernel derived by hand differs by {worst:g}; expected < 1e-8.")
