"""Coordinates in which the probability flow of Gaussian data stands still.

With N(m, ς²) for the data, y_s is Gaussian: mean r m and covariance C = Σ + ς²rrᵀ = M Mᵀ. Whitened,
n = M⁻¹(y − r m), the flow dy/ds = A y + ½GGᵀΣ⁻¹(y − r x̂) is

    dn/ds = K n − ½ W b (√(ς² + σ²)/σ²)(x̂ − x̂_G),       W = M⁻¹GGᵀM⁻ᵀ,   b = M⁻¹r √(ς² + σ²),

where b has length 1 and bᵀn = (x̃ − m)/√(ς² + σ²) is the normalised view of x, x̂_G is the Gaussian
answer, and K = H⁺ − H⁺ᵀ with H⁺ what is strictly above the diagonal of H = M⁻¹AM + ½W: skew. So n
is of size 1 at all times, and for Gaussian data it only turns. The turn V, dV/ds = K V with V = 1
at the horizon, is a matter of the process alone (20 radians for CLD, 32 for ALDA); it is solved
beforehand. What is left of the flow in u = Vᵀn is what the model knows beyond the Gaussian answer:

    du/dlog s = push (x̂ − x̂_G),      y = r m + M V u

Nothing here is stiff or small, and the linear part adds nothing to the divergence. The mean m is
that of the model; ς is one number for all coordinates, the root of the mean variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.answers import View
from ornstein.linalg import lower_inverse, orthogonal_reduction
from ornstein.sampling.collocation import collocated, gauss_rule
from ornstein.score import ScoreModel
from ornstein.transition import Transition, mix

LENGTH = 0.3  # of a panel, in radians that are turned and half e-folds of time
MOST_PANELS = 4096
LOOK = 2049  # times at which the speed of the turn is looked at, to share out the panels


@dataclass(frozen=True)
class Frame:
    """The coordinates at one time."""

    state: Tensor  # (1, K, K) M V: y = r m + M V u
    inverse: Tensor  # (1, K, K) VᵀM⁻¹
    white: Tensor  # (1, K, K) L⁻¹M V: L⁻¹y = a m + L⁻¹M V u
    along: Tensor  # (1, K): x̃ = m + along·u
    gain: Tensor  # (1,) ς²/(ς² + σ²): x̂_G = m + gain (x̃ − m)
    push: Tensor  # (1, K)
    volume: Tensor  # (1,) log|M|
    kernel: Transition  # given x, of one time, as the view
    view: View


class Frames:
    """The coordinates of a model's flow between two times, found once for each place log s."""

    def __init__(self, model: ScoreModel, shape: tuple[int, ...], start: Tensor) -> None:
        self.model, self.shape, self.process = model, shape, model.process
        self.mean = model.moments.mean.expand(shape).flatten()
        self.std = model.data_std
        self.first, self.last = float(start.log()), math.log(self.process.horizon)
        self._known: dict[float, Frame] = {}
        with torch.no_grad():
            self._edges, self._turned = self._panels()

    @property
    def dims(self) -> int:
        """Coordinates of the data."""
        return len(self.mean)

    def at(self, place: float) -> Frame:
        """The coordinates at log s."""
        if place not in self._known:
            self.learn([place])
        return self._known[place]

    def learn(self, places: Iterable[float]) -> None:
        """Find the coordinates at all of these places at once."""
        new = [place for place in dict.fromkeys(places) if place not in self._known]
        if new:
            with torch.no_grad():
                self._known.update(zip(new, self._frames(new), strict=True))

    # ---------------------------------------------------------------- states

    def into(self, y: Tensor, frame: Frame) -> Tensor:
        """u of states: (B, K, d)."""
        return mix(frame.inverse, y - frame.kernel.response.unsqueeze(-1) * self.mean)

    def drawn(self, x: Tensor, noise: Tensor, frame: Frame) -> Tensor:
        """u of y = r x + L ε, without the cancellation in y − r m: (B, K, d)."""
        data = frame.inverse @ frame.kernel.response.unsqueeze(-1)
        start = mix(data, (x - self.mean).unsqueeze(1))
        return mix(frame.inverse @ frame.kernel.cholesky, noise, start)

    def state(self, u: Tensor, frame: Frame) -> Tensor:
        """y again: (B, K, d)."""
        return mix(frame.state, u) + frame.kernel.response.unsqueeze(-1) * self.mean

    def estimate(self, u: Tensor, frame: Frame) -> Tensor:
        """x̂: (B, d)."""
        white = mix(frame.white, u) + frame.kernel.signal.unsqueeze(-1) * self.mean
        wide, y = (v.unflatten(-1, self.shape) for v in (white, self.state(u, frame)))
        x = self.model.estimate_from(wide, y, frame.kernel, frame.view.expand(len(u)))
        return x.flatten(1)

    def beyond(self, x: Tensor, u: Tensor, frame: Frame) -> Tensor:
        """x̂ − x̂_G of an estimate: (B, d)."""
        away = (frame.along.unsqueeze(-1) * u).sum(1)
        return x - self.mean - frame.gain.unsqueeze(-1) * away

    # ---------------------------------------------------------------- matrices

    def _frames(self, places: list[float]) -> Iterator[Frame]:
        at = torch.tensor(places, dtype=torch.float64, device=self.process.device)
        s = self._times(at)
        kernel, M = self._factor(s)
        V = self._turn(at)
        view = self.model.view(kernel, s)
        wide = torch.hypot(view.sigma, torch.full_like(view.sigma, self.std))
        inverse = lower_inverse(M)
        b = (inverse @ kernel.response.unsqueeze(-1)).squeeze(-1)
        b = b / torch.linalg.vector_norm(b, dim=-1, keepdim=True).clamp(min=1e-300)
        G = inverse @ self.process.noise_factor(s)
        pull = (G @ (G.mT @ b.unsqueeze(-1))).squeeze(-1)  # W b
        scale = -s / 2 * (wide / view.sigma) / view.sigma
        state = M @ V
        found = {
            "state": state,
            "inverse": V.mT @ inverse,
            "white": torch.linalg.solve_triangular(kernel.cholesky, state, upper=False),
            "along": wide.unsqueeze(-1) * _turned(V.mT, b),
            "gain": (self.std / wide) ** 2,
            "push": scale.unsqueeze(-1) * _turned(V.mT, pull),
            "volume": M.diagonal(dim1=-2, dim2=-1).log().sum(-1),
        }
        for i in range(len(places)):
            one = slice(i, i + 1)
            yield Frame(
                **{name: value[one] for name, value in found.items()},
                kernel=Transition(
                    kernel.propagator[one],
                    kernel.cholesky[one],
                    kernel.direction,
                    kernel.given,
                    kernel.error[one],
                ),
                view=view.part(one),
            )

    def _times(self, places: Tensor) -> Tensor:
        return places.exp().clamp(max=self.process.horizon)

    def _factor(self, s: Tensor) -> tuple[Transition, Tensor]:
        """The kernel, and M from the columns of L and ς r: the square would lose digits."""
        kernel = self.process.transition(s)
        columns = torch.cat([kernel.cholesky, self.std * kernel.response.unsqueeze(-1)], -1)
        return kernel, orthogonal_reduction(columns, with_rows=False)[0]

    def _speed(self, places: Tensor) -> Tensor:
        """s K, the turn per unit of log s: (…, K, K)."""
        s = self._times(places.flatten())
        _, M = self._factor(s)
        G = torch.linalg.solve_triangular(M, self.process.noise_factor(s), upper=False)
        inside = torch.linalg.solve_triangular(M, self.process.drift(s) @ M, upper=False)
        upper = (inside + G @ G.mT / 2).triu(1)
        speed = s[:, None, None] * (upper - upper.mT)
        return speed.reshape(*places.shape, *speed.shape[1:])

    def _panels(self) -> tuple[Tensor, Tensor]:
        """Edges of panels, falling from log T, and V there: (n + 1,), (n + 1, K, K)."""
        K = self.process.n_vars
        part = torch.linspace(0, 1, LOOK, dtype=torch.float64, device=self.process.device)
        look = self.last + part * (self.first - self.last)
        whole = torch.eye(K, dtype=torch.float64, device=part.device).unsqueeze(0)
        if K == 1:  # nothing turns
            return look[:: LOOK - 1], whole.expand(2, 1, 1)
        size = torch.linalg.matrix_norm(self._speed(look)) / math.sqrt(2) + 0.5
        share = torch.cumulative_trapezoid(size, look).abs()
        share = torch.nn.functional.pad(share, (1, 0)) / LENGTH
        count = math.ceil(share[-1].item())
        if count > MOST_PANELS:
            raise ValueError(
                f"the flow of {self.process.name!r} turns by {share[-1].item() * LENGTH:.3g} "
                f"radians on its way; expected at most {MOST_PANELS * LENGTH:.3g}. Use a slower "
                "rate, or a process with a smaller Q."
            )
        place = torch.arange(1, count, dtype=torch.float64, device=part.device)
        place = place * (share[-1] / count)
        above = torch.searchsorted(share, place).clamp(1, LOOK - 1)
        inside = (place - share[above - 1]) / (share[above] - share[above - 1])
        inner = torch.lerp(look[above - 1], look[above], inside)
        edges = torch.cat([look[:1], inner, look[-1:]])
        turned = [whole[0]]
        for turn in self._collocated(edges[:-1], edges[1:]):
            turned.append(turn @ turned[-1])
        return edges, torch.stack(turned)

    def _turn(self, places: Tensor) -> Tensor:
        """V at these places: (n, K, K)."""
        if self.process.n_vars == 1:
            return torch.ones_like(places)[:, None, None]
        panel = torch.searchsorted(-self._edges, -places, right=True) - 1
        panel = panel.clamp(0, len(self._edges) - 2)
        return self._collocated(self._edges[panel], places) @ self._turned[panel]

    def _collocated(self, start: Tensor, end: Tensor) -> Tensor:
        """V from start to end, each within a panel, by collocation: (n, K, K), orthogonal."""
        rule = gauss_rule(start.device)
        width = (end - start)[:, None]
        field = self._speed(start[:, None] + width * rule.nodes) * width[..., None, None]
        return collocated(field, None, rule)[0]


def _turned(V: Tensor, vector: Tensor) -> Tensor:
    """A matrix for each of the vectors (n, K)."""
    return (V @ vector.unsqueeze(-1)).squeeze(-1)
