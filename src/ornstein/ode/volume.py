"""The flow from data to noise, with the volume that it gains or loses on the way.

In the coordinates u of `sampling.frames` the flow is du/dlog s = push ρ(u), ρ = x̂ − x̂_G, and

    log p_ε(u_ε) = log p_T(u_T) + ∫ ∇·(push ρ) dlog s,      ∇·(push ρ) = Σ_k push_k tr ∂ρ/∂u_k:

only what the model knows beyond the Gaussian answer has a divergence. The trace over the d
coordinates of the data is exact, one backward pass for each of them, or Hutchinson's estimate
ηᵀ(Σ_k push_k ∂ρ/∂u_k)η with random signs η, one pass for each η; d signs are enough for all K
variables. The way of u does not depend on them. So every look takes new ones: the mean stays what
the exact traces at these looks would give, and their noise averages out along the way.

Steps are chosen for the worst of a few examples. With the exact trace that is the error of u and of
log p. With probes it is that of u: the derivative of a network that knows single levels of pixels
changes its sign with every level that u passes, hundreds of times where there is much noise. No
step would be short enough; but at an example's looks these are as random as the probes, and their
noise is in the standard error over examples, too.

The way ends where σ = 300 ς, or at the horizon if that is earlier. Beyond it the flow is that of
the Gaussian answer, in which u stands still: of what data has beyond its mean and variance nothing
is left but correlations, (ς/σ)² = 1e-5 in log p of a draw. The density is exact for this flow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ornstein.draws import Counted
from ornstein.sampling.flow import (
    EMBEDDED,
    PILOT,
    STAGES,
    Field,
    Method,
    check_finite,
    chosen_steps,
    stages,
    stepped,
    worst,
)
from ornstein.sampling.frames import Frames
from ornstein.score import ScoreModel

Trace = Literal["auto", "exact", "hutchinson"]
EXACT_UP_TO = 32  # coordinates of the data for which "auto" takes the exact trace
QUIET = 300.0  # σ/ς from which on there is nothing left to know beyond the Gaussian answer

Probes = Callable[[int], Tensor]
Flowing = tuple[Tensor, Tensor]  # states (B, K, d), and nats per coordinate gained so far (B, P)


@dataclass(frozen=True)
class Path:
    """The steps of the flow from ε to where nothing is left to know, the same for all examples."""

    times: Tensor  # (n + 1,) float64, rising
    method: Method

    @property
    def evaluations(self) -> int:
        """Looks at the model, each with its backward passes."""
        stages = STAGES.get(self.method) or EMBEDDED[self.method]
        return stages * (len(self.times) - 1) + (self.method in EMBEDDED)


class Volume(Field):
    """The flow's field, and its divergence per coordinate of the data."""

    def __init__(self, frames: Frames, probes: Probes | None) -> None:
        """probes: signs (B, P, d) for a look by its number; None for the exact trace, P = 1."""
        super().__init__(frames)
        self.probes, self.looks = probes, 0

    def look(self, place: float, u: Flowing) -> tuple[Tensor, Flowing]:
        frame, state = self.frames.at(place), u[0]
        with torch.enable_grad():
            at = state.detach().requires_grad_()
            x = self.frames.estimate(at, frame)
            check_finite(x, place)
            beyond = self.frames.beyond(x, at, frame)
        slopes = [
            ((frame.push.unsqueeze(-1) * back).sum(1) * probe).sum(1)
            for probe, back in self._pulled(beyond, at)
        ]
        if self.probes is None:
            slopes = [torch.stack(slopes).sum(0)]
        slope = torch.stack(slopes, 1) / self.frames.dims
        velocity = frame.push.unsqueeze(-1) * beyond.detach().unsqueeze(1)
        self.looks += 1
        return x.detach(), (velocity, slope)

    def _pulled(self, value: Tensor, at: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every probe η, (B, d), and ηᵀ∂ρ/∂u, (B, K, d)."""
        if self.probes is None:
            basis = torch.eye(self.frames.dims).to(value)
            probes = [row.expand_as(value) for row in basis]
        else:
            probes = list(self.probes(self.looks).unbind(1))
        for i, probe in enumerate(probes):
            more = i + 1 < len(probes)
            yield probe, torch.autograd.grad(value, at, probe, retain_graph=more)[0]

    def along(self, u: Tensor, count: int, path: Path) -> Flowing:
        """u at the end and what log p has gained per coordinate: (B, K, d), (B, count)."""
        places = path.times.log().tolist()
        self.frames.learn([*stages(path.method, places), *places])
        flowing = (u, u.new_zeros(len(u), count))
        for start, end in pairwise(places):
            flowing = stepped(self, flowing, start, end, path.method)
        return flowing


def ends_of(frames: Frames) -> tuple[float, float]:
    """log s where the way begins and ends."""
    process, most = frames.process, QUIET * frames.std
    if not bool(process.transition(process.horizon).snr.rsqrt() > most):
        return frames.first, frames.last
    return frames.first, float(process.time_of_noise(most).log())


def worst_of_both(error: Flowing) -> Tensor:
    """The norm that steps are chosen by: of the worst example, of the state or of log p."""
    return torch.maximum(worst(error[0]), error[1].abs().max())


def find_path(
    frames: Frames, x: Tensor, exact: bool, method: Method, rtol: float, atol: float
) -> Path:
    """Choose the steps on a few examples, (B, d) numbers that diffuse, with draws of their own."""
    if method not in EMBEDDED:
        raise ValueError(
            f"method={method!r} does not estimate its error; expected one of "
            f"{', '.join(EMBEDDED)}, which can choose their steps."
        )
    x = x[:PILOT]
    random = Counted(0, torch.arange(len(x), device=x.device))
    noise = random.normal("pilot", (frames.process.n_vars, frames.dims), torch.float64)
    u = frames.drawn(x, noise, frames.at(frames.first))
    none = u.new_zeros(len(u), 1)
    with _watched(frames.model) as network:
        Volume(frames, lambda _: torch.ones_like(u[:, :1])).look(frames.first, (u, none))
        network.check()
    ends = ends_of(frames)
    if exact:
        field: Field = Volume(frames, None)
        places = chosen_steps(field, (u, none), ends, method, rtol, atol, worst_of_both)
    else:
        places = chosen_steps(Field(frames), u, ends, method, rtol, atol, worst)
    times = torch.tensor(places, dtype=torch.float64, device=x.device).exp()
    return Path(times.clamp(max=frames.process.horizon), method)


# ---------------------------------------------------------------- networks without derivatives


class _Watch:
    """What a network was asked last, and what it said."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.output: Tensor | None = None

    def note(self, _: nn.Module, inputs: Any, output: Any) -> None:
        self.inputs, self.output = inputs, output

    def check(self) -> None:
        """Raise if its output depends on its input but carries no gradient."""
        inputs, output = self.inputs, self.output
        if inputs is None or output is None or output.requires_grad:
            return
        with torch.no_grad():
            moved = self.network(inputs[0].detach() * 1.25 + 0.125, inputs[1])
        if not torch.equal(moved, output):
            raise ValueError(
                "the likelihood of a flow needs derivatives of the network, whose output depends "
                "on its input but carries no gradient; expected a network that does not run under "
                "no_grad or detach what it returns. Use elbo, which needs none."
            )


@contextlib.contextmanager
def _watched(model: ScoreModel) -> Iterator[_Watch]:
    watch, network = _Watch(model.network), model.network
    if not isinstance(network, nn.Module):
        yield watch
        return
    handle = network.register_forward_hook(watch.note)
    try:
        yield watch
    finally:
        handle.remove()
