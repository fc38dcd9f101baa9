"""`ProbabilityFlow`: the deterministic way back, by the Runge–Kutta methods of torchdiffeq.

Solved is du/dlog s = push (x̂ − x̂_G) in the coordinates of `frames`, in which the linear part of the
flow is gone and Gaussian data stands still: errors are those of what the network adds, in units of
the state's own law. A step takes as many looks at the model as its method has stages; methods
whose last stage is the first of the next step share it.

With a number of steps, they go along a grid. Without one, they are chosen by an embedded method's
estimate of its error on a few states drawn from the prior, the worst of which counts; then every
sample takes the same steps. So a sample is a function of its seed and number here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from ornstein.draws import Counted
from ornstein.sampling.frames import Frames
from ornstein.sampling.grids import as_grid, whole
from ornstein.sampling.solvers import Solver
from ornstein.sampling.way import Noise, Stop, Walk, Way
from ornstein.score import ScoreModel
from ornstein.transition import mix

Method = Literal["euler", "midpoint", "heun2", "heun3", "rk4", "bosh3", "dopri5", "dopri8"]
METHODS = cast(tuple[str, ...], get_args(Method))
STAGES = {"euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}
EMBEDDED = {"bosh3": 3, "dopri5": 6, "dopri8": 13}  # stages without the one that is shared
PILOT = 16  # states on which steps are chosen
FIRST = 0.05  # the first step that is tried, as a part of the way
MOST_STEPS = 2000

State = Any  # what is integrated: a tensor, or a tuple of them
Norm = Callable[[State], Tensor]


@dataclass(frozen=True)
class ProbabilityFlow(Solver):
    """The probability flow with fixed steps, or with steps chosen for an error; deterministic.

    steps: on the grid; None chooses them, once for all samples (then the grid does not matter).
    method: of torchdiffeq; bosh3, dopri5 and dopri8 can choose their steps.
    rtol, atol: error allowed in a step, of the whitened state, whose numbers are of size 1; atol is
        as rtol unless it is given.
    """

    steps: int | None = None  # type: ignore[assignment]
    method: Method = "dopri5"
    rtol: float = 1e-4
    atol: float | None = None

    def __post_init__(self) -> None:
        check_method(self.method, self.rtol, self.rtol if self.atol is None else self.atol)
        object.__setattr__(self, "grid", as_grid(self.grid))
        if self.steps is not None or isinstance(self.grid, tuple):
            super().__post_init__()
        elif self.method not in EMBEDDED:
            raise ValueError(
                f"method={self.method!r} does not estimate its error; expected steps=, a number, "
                f"or one of {', '.join(EMBEDDED)}, which can choose their steps."
            )

    @property
    def looks_per_step(self) -> int:
        return STAGES.get(self.method) or EMBEDDED[self.method]

    @property
    def evaluations(self) -> int | None:
        if self.steps is None:
            return None
        return self.looks_per_step * self.steps + 1 + (self.method in EMBEDDED)

    def within(self, evaluations: int) -> ProbabilityFlow:
        """The same method with as many steps as so many network evaluations allow."""
        rest = 1 + (self.method in EMBEDDED)
        whole(evaluations, "evaluations", rest + self.looks_per_step)
        fixed = replace(self, steps=1)
        super(ProbabilityFlow, fixed).within(evaluations)  # for its checks
        return replace(self, steps=(evaluations - rest) // self.looks_per_step)

    def times(self, model: ScoreModel, shape: Sequence[int]) -> Tensor:
        if self.steps is not None:
            return super().times(model, shape)
        frames = Frames(model, tuple(shape), model.truncation.time(model.process))
        index = torch.arange(PILOT, device=model.process.device)
        K = model.process.n_vars
        normal = Counted(0, index).normal("pilot", (K, frames.dims), torch.float64)
        prior = model.process.prior_factor
        u = frames.into(mix(prior.unsqueeze(0), normal), frames.at(frames.last))
        ends = (frames.last, frames.first)
        atol = self.rtol if self.atol is None else self.atol
        places = chosen_steps(Field(frames), u, ends, self.method, self.rtol, atol, worst)
        times = torch.tensor(places, dtype=torch.float64, device=index.device).exp()
        times[0], times[-1] = model.process.horizon, model.truncation.time(model.process)
        return times

    def prepare(self, way: Way) -> Walk:
        frames = Frames(way.model, way.shape, way.grid[-1])
        places = way.grid.log().tolist()
        frames.learn([*stages(self.method, places), *places])

        def walk(y: Tensor, draw: Noise) -> Iterator[Stop]:
            field = Field(frames)
            u = frames.into(y, frames.at(places[0]))
            for start, end in pairwise(places):
                u = stepped(field, u, start, end, self.method)
                yield Stop(frames.state(u, frames.at(end)), field.x)

        return walk


class Field:
    """du/dlog s of states (B, K, d)."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.x: Tensor  # the first estimate of this step
        self._last: tuple[Tensor, State]  # the newest estimate and field
        self._shared: tuple[Tensor, State] | None = None
        self._new = True

    def __call__(self, place: Tensor, u: State) -> State:
        if self._shared is not None:  # the last stage of the step before
            (self.x, value), self._shared, self._new = self._shared, None, False
            return value
        x, value = self.look(float(place), u)
        if self._new:
            self.x, self._new = x, False
        self._last = x, value
        return value

    def look(self, place: float, u: State) -> tuple[Tensor, State]:
        """x̂ and the field."""
        frame = self.frames.at(place)
        x = self.frames.estimate(u, frame)
        check_finite(x, place)
        beyond = self.frames.beyond(x, u, frame)
        return x, frame.push.unsqueeze(-1) * beyond.unsqueeze(1)

    def begin(self, shared: bool) -> None:
        """Another step; `shared` if it begins with what the last one ended with."""
        self._shared = self._last if shared and hasattr(self, "_last") else None
        self._new = True


def stepped(field: Any, u: State, start: float, end: float, method: str) -> State:
    """One step of a method, from one place log s to another."""
    first = u[0] if isinstance(u, tuple) else u
    places = torch.tensor([start, end], dtype=torch.float64, device=first.device)
    options: dict[str, Any] = {}
    if method in EMBEDDED:  # a step that is longer than the way, and cut there; it can't fail
        far = 2 * abs(end - start)
        options = {"options": {"first_step": far, "step_t": places[1:]}, "atol": math.inf}
    field.begin(method in EMBEDDED)
    found = _odeint(field, u, places, method=method, rtol=0.0, **options)
    return tuple(part[-1] for part in found) if isinstance(found, tuple) else found[-1]


def stages(method: str, places: list[float]) -> list[float]:
    """The places at which steps between these ask for the field."""
    seen: list[float] = []

    class Seen:
        def __call__(self, place: Tensor, u: Tensor) -> Tensor:
            seen.append(float(place))
            return torch.zeros_like(u)

        def begin(self, shared: bool) -> None: ...

    u = torch.zeros(1, dtype=torch.float64)
    for start, end in pairwise(places):
        stepped(Seen(), u, start, end, method)
    return seen


def chosen_steps(
    field: Field,
    u: State,
    ends: tuple[float, float],
    method: str,
    rtol: float,
    atol: float,
    norm: Norm,
) -> list[float]:
    """Places from one end to the other between which a step's error is allowed."""
    taken: list[float] = []

    class Noting:
        def __call__(self, place: Tensor, u: State) -> State:
            return field.look(float(place), u)[1]

        def callback_accept_step(self, place: Tensor, u: State, width: Tensor) -> None:
            taken.append(float(place))

    first = u[0] if isinstance(u, tuple) else u
    places = torch.tensor(ends, dtype=torch.float64, device=first.device)
    options = {
        "norm": norm,
        "first_step": FIRST * abs(ends[1] - ends[0]),
        "step_t": places[1:],  # or the last step would go past the end
        "max_num_steps": MOST_STEPS,
    }
    try:
        _odeint(Noting(), u, places, method=method, rtol=rtol, atol=atol, options=options)
    except AssertionError as error:  # how torchdiffeq says that its steps became too short
        reached = math.exp(taken[-1] if taken else ends[0])
        raise ValueError(
            f"the flow can't be solved with rtol={rtol:g} and atol={atol:g}: near s = "
            f"{reached:.6g} its steps became too short ({error}). Expected tolerances above the "
            "rounding of the network, about 1e-6 in float32; take larger ones."
        ) from error
    return [*taken, ends[1]]


def _odeint(*args: Any, **options: Any) -> Any:
    """Imported when it is needed: it brings SciPy, which takes its time."""
    from torchdiffeq import odeint

    return odeint(*args, **options)


def worst(u: Tensor) -> Tensor:
    """The root mean square of each state's numbers, and the largest of these."""
    return u.flatten(1).square().mean(1).sqrt().max()


def check_method(method: object, rtol: object, atol: object) -> None:
    if method not in METHODS:
        raise ValueError(f"method={method!r}; expected one of {', '.join(METHODS)}.")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < math.inf
        ):
            raise ValueError(f"{name}={value!r}; expected a positive number, such as 1e-4.")


def check_finite(x: Tensor, place: float) -> None:
    """Here, since a step that is chosen by its error would never end."""
    if not bool(x.isfinite().all()):
        raise ValueError(
            f"the model's estimate of x is not finite at s = {math.exp(place):.6g}; expected "
            "finite numbers. Look for NaN in the network's weights and for overflow in its type; "
            "a fixed number of steps may be too small."
        )
