"""A process: its drift and diffusion, its prior and its transition.

    dy = A(s) y ds + G(s) dB

`Diffusion` has A = −(b_q Q + b_d D) S and GGᵀ = 2 b_d D, hence the stationary law N(0, S⁻¹), its
prior. Q and D are matrices, or modules of `matrices` that learn them. When the two rates are
proportional the process runs on one clock (`clock`); otherwise A(s) does not commute with itself
and time-ordered series are used (`panels`). `LinearSDE` takes A and GGᵀ as functions and a prior
covariance.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ornstein import panels
from ornstein.clock import Clock, Solved, earlier, panel_count
from ornstein.linalg import lower_solve, semidefinite_factor
from ornstein.matrices import (
    Auxiliary,
    Fixed,
    Matrix,
    Semidefinite,
    Skew,
    Vector,
    as_square,
    as_symmetric,
    check_semidefinite,
    check_stationary,
)
from ornstein.panels import Panels
from ornstein.parts import Record, described, part, rebuilt
from ornstein.process import HEADROOM, TOLERANCE, Process
from ornstein.schedules import (
    Float64Module,
    Linear,
    Schedule,
    as_schedule,
    describe_function,
    proportion,
    rebuilt_rate,
)

FASTEST = 512.0  # ∫‖A‖ of a learned process; presets stay below 70, and 4096 is refused
SPENT = 1e-6  # of y₀ at the horizon: the most that a process may have left, once slowed down
HALVINGS = 7  # of the logarithm, in search of the slowest clock that leaves no more
WORTH = 0.95  # what it is slowed down to at most, or a clock at the edge would be at every look

Rate = Schedule | Callable[[Tensor], Tensor] | float
MatrixFunction = Callable[[Tensor], Tensor]


@part("diffusion")
class Diffusion(Process):
    """dy = −(b_q Q + b_d D) S y ds + √(2 b_d D) dB, with stationary law and prior N(0, S⁻¹)."""

    S: Tensor

    def __init__(
        self,
        Q: Matrix | Skew | Fixed,
        D: Matrix | Semidefinite | Fixed,
        S: Matrix | None = None,
        rate: Rate | None = None,
        rate_q: Rate | None = None,
        rate_d: Rate | None = None,
        v0_variance: float | Vector | Matrix = 0.04,
        v0_coupling: float | Vector | None = None,
        horizon: float = 1.0,
        name: str = "diffusion",
        learn_v0_variance: bool = False,
        learn_v0_coupling: bool = False,
    ) -> None:
        make_Q = Q if isinstance(Q, (Skew, Fixed)) else Fixed(as_square(Q, "Q"))
        make_D = D if isinstance(D, (Semidefinite, Fixed)) else Fixed(as_symmetric(D, "D"))
        q, d = make_Q().detach(), make_D().detach()
        eye = torch.eye(len(q), dtype=torch.float64, device="cpu")
        precision = eye if S is None else as_symmetric(S, "S", definite=True)
        check_stationary(q, d, precision)
        super().__init__(name, len(q), horizon)
        base = as_schedule(Linear(horizon=self.horizon) if rate is None else rate, self.horizon)
        self.make_Q, self.make_D = make_Q, make_D
        self.rate_q = base if rate_q is None else as_schedule(rate_q, self.horizon)
        self.rate_d = base if rate_d is None else as_schedule(rate_d, self.horizon)
        self.register_buffer("S", precision)
        self.auxiliary = Auxiliary(
            v0_variance, v0_coupling, self.n_vars - 1, learn_v0_variance, learn_v0_coupling
        )
        turns = isinstance(make_Q, Skew) or bool(q.any())
        #: b_q / b_d where the two rates are proportional, None where they are not
        self.ratio = proportion(self.rate_q, self.rate_d) if turns else 1.0
        self._columns: list[int] | None = None  # the columns of D's factor that are not zero
        self.replan()

    @property
    def Q(self) -> Tensor:
        """The skew-symmetric matrix as it is now: (K, K)."""
        return self.make_Q()

    @property
    def D(self) -> Tensor:
        """The positive semi-definite matrix as it is now: (K, K)."""
        return self.make_D()

    @property
    def prior_covariance(self) -> Tensor:
        covariance = torch.linalg.inv(self.S)
        return (covariance + covariance.mT) / 2

    @property
    def commutes(self) -> bool:
        """Whether the two rates are known to be proportional, so that one clock is enough."""
        return self.ratio is not None

    def drift(self, s: Tensor | float) -> Tensor:
        return self._drift()(self._inside(s))

    def diffusion(self, s: Tensor | float) -> Tensor:
        return 2 * self.rate_d.rate(self._inside(s))[..., None, None] * self.D

    def _noise_at(self, s: Tensor) -> Tensor:
        return self.rate_d.rate(s).sqrt()[..., None, None] * self._noise()

    def log_volume(self, s: Tensor | float) -> Tensor:
        return -self.rate_d.integral(self._inside(s)) * (self.D * self.S).sum()  # tr QS = 0

    def _sizes(self, s: Tensor) -> Tensor:
        return torch.stack([self.rate_q.rate(s), self.rate_d.rate(s)])

    def _sound(self, solution: Clock | Panels) -> Tensor:
        sound = solution.sound
        for rate in {self.rate_q, self.rate_d}:
            rate_sound = rate.sound()
            sound = sound if rate_sound is None else sound & rate_sound
        return sound

    def _span(self) -> Tensor | None:
        line = self.rate_d.line()
        if line is None:
            return None
        numbers = [*line, self.horizon, TOLERANCE]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def _check_rates(self) -> None:
        for rate in (self.rate_q, self.rate_d):
            rate.check()

    def _drift(self) -> MatrixFunction:
        turn, damp = -self.Q @ self.S, -self.D @ self.S

        def drift(s: Tensor) -> Tensor:
            b_q, b_d = self.rate_q.rate(s), self.rate_d.rate(s)
            return b_q[..., None, None] * turn + b_d[..., None, None] * damp

        return drift

    def _noise(self) -> Tensor:
        """Ĝ with ĜĜᵀ = 2D: (K, R)."""
        factor = math.sqrt(2.0) * self.make_D.factor()
        return factor if self._columns is None else factor[:, self._columns]

    def _total(self) -> Tensor:
        """The clock at the horizon: ()."""
        return self.rate_d.integral(
            torch.full((), self.horizon, dtype=torch.float64, device=self.device)
        )

    @torch.no_grad()
    def restraint(self) -> float:
        """What brings ∫‖A‖ back to FASTEST, where it has passed that; 1 where it may stay.

        If y_T would then have more than SPENT left of y₀, it is what comes nearest to that without:
        some variables may need time that others don't. Never raises: what can't be solved is for
        others to tell.
        """
        if self._raw() is None:
            return 1.0
        size = self._stiffness()
        if not FASTEST * (1 + 1e-9) < size < math.inf:  # to rounding; NaN is for others, too
            return 1.0
        try:
            by = self._slowest(FASTEST / size)
            if by < 1:
                self._slower(by).transition(self.horizon)  # can it be solved?
            return by
        except (ValueError, RuntimeError):  # RuntimeError: of a copy, while gradients are wanted
            return 1.0

    def _slowest(self, least: float) -> float:
        """The smallest factor, from this one to WORTH, that leaves no more than SPENT; or 1."""
        slow, fast = least, 1.0
        if self._left(slow) <= SPENT:
            return slow
        if self._left(fast) > SPENT:
            return 1.0
        for _ in range(HALVINGS):
            middle = math.sqrt(slow * fast)
            slow, fast = (slow, middle) if self._left(middle) <= SPENT else (middle, fast)
        return fast if fast < WORTH else 1.0

    def _slower(self, by: float) -> Diffusion:
        """A copy that is slowed down."""
        slower = copy.deepcopy(self)
        slower.restrain(by)
        return slower

    def restrain(self, by: float | None = None) -> float:
        """Where Q and D are both learned, multiply both by `restraint()`, or by what is given.

        On one clock that is the same process, slower. As y_T has next to nothing of y₀ afterwards,
        a bound that begins at a noise level is next to no worse by it; one that begins at a fixed
        time begins with less noise. Nothing else would keep Q and D from growing until the process
        is too stiff to be solved. Where the two rates differ it is another process.
        """
        raw = self._raw()
        if raw is None:
            return 1.0
        if by is None:
            by = self.restraint() if all(each.requires_grad for each in raw) else 1.0
        if not 0 < by < math.inf:
            raise ValueError(f"by={by}; expected a finite number > 0, as `restraint()` gives.")
        if by != 1:
            with torch.no_grad():
                raw[0].mul_(by)
                raw[1].mul_(math.sqrt(by))
            self.replan()
        return by

    def _raw(self) -> tuple[Tensor, Tensor] | None:
        """What Q is linear in, and D quadratic, if neither is fixed."""
        Q, D = self.make_Q, self.make_D
        return (Q.raw, D.raw) if isinstance(Q, Skew) and isinstance(D, Semidefinite) else None

    @torch.no_grad()
    def _left(self, by: float = 1.0) -> float:
        """What y_T has left of y₀, slowed down: Σ_T − S⁻¹ is no more than this of Σ₀ − S⁻¹.

        Both in units of the prior, since Σ_T − S⁻¹ = Φ (Σ₀ − S⁻¹) Φᵀ.
        """
        if self.ratio is None:
            propagator = self._slower(by).transition(self.horizon).propagator
        else:  # on one clock no panels are needed for it
            drift = (self.ratio * self.Q + self.D) @ self.S
            propagator = torch.linalg.matrix_exp(-by * self._total() * drift)
        unit = torch.linalg.cholesky(self.prior_covariance)
        moved = lower_solve(unit, propagator @ unit)
        return float(torch.linalg.matrix_norm(moved, ord=2).square())

    def _renew(self) -> None:
        super()._renew()
        if isinstance(self.make_D, Fixed):
            self._columns = self.make_D.factor().any(0).nonzero().flatten().tolist()

    def _plan(self) -> None:
        if self.ratio is not None:
            headroom = HEADROOM if self._parameters_exist() else 1.0
            generator = (self.ratio * self.Q + self.D) @ self.S
            self._count = panel_count(
                float(self._total() * torch.linalg.vector_norm(generator)), headroom
            )
            self._earlier = earlier(self._count, self.n_vars, self.device)
        else:
            self._refine()

    def _planned(self) -> Tensor:
        if self.ratio is None:
            return super()._planned()
        return torch.tensor([self._count], dtype=torch.float64, device="cpu")

    def _follow(self, plan: Tensor) -> None:
        if self.ratio is None:
            super()._follow(plan)
        else:
            self._count = int(plan[0])
            self._earlier = earlier(self._count, self.n_vars, self.device)

    def _build(self) -> Clock | Panels:
        if self.ratio is not None:
            drift = -(self.ratio * self.Q + self.D) @ self.S
            G, total = self._noise(), self._total()
            return Clock(drift, G, total, self._count, self._earlier, self._tables())
        noise = panels.rated(self._noise(), self.rate_d.rate)
        return panels.varying(self._drift(), noise, self._edges, self._tables())

    def _clock(self, s: Tensor) -> Tensor:
        return s if self.ratio is None else self.rate_d.integral(s)

    def _from(self, solution: Clock | Panels, start: Tensor, s: Tensor) -> Solved:
        if self.ratio is not None:  # a shorter clock from zero is the same law
            tau, lost = self.rate_d.between(start, s), self.rate_d.lost_between(start, s)
            solved = solution.at(tau, None)
            return replace(solved, error=torch.maximum(solved.error, lost))
        noise = panels.rated(self._noise(), self.rate_d.rate)
        return panels.between(self._drift(), noise, self._edges, start, s, self._tables())

    def describe(self) -> Record:
        rates: Record = {"rate": described(self.rate_d)}
        if self.rate_q is not self.rate_d:
            shared = _common_parts(self.rate_q, self.rate_d)
            rates = {"rate_q": described(self.rate_q), "rate_d": described(self.rate_d)}
            rates["shared"] = shared
        return {
            "name": self.name,
            "Q": described(self.make_Q),
            "D": described(self.make_D),
            "S": self.S.tolist(),
            **rates,
            "v0": described(self.auxiliary),
            "horizon": self.horizon,
        }

    @classmethod
    def rebuild(cls, fields: Record) -> Diffusion:
        if "rate" in fields:
            rate_q = rate_d = rebuilt_rate(fields["rate"], "the rate")
        else:
            rate_q, rate_d = (rebuilt_rate(fields[name], name) for name in ("rate_q", "rate_d"))
            rate_d = _joined(rate_q, rate_d, fields["shared"])
        Q: Any = rebuilt(fields["Q"], "Q", Float64Module)
        D: Any = rebuilt(fields["D"], "D", Float64Module)
        process = cls(
            Q,
            D,
            S=fields["S"],
            rate_q=rate_q,
            rate_d=rate_d,
            horizon=fields["horizon"],
            name=fields["name"],
        )
        process.auxiliary = rebuilt(fields["v0"], "v0", Auxiliary)
        return process


@part("linear-sde")
class LinearSDE(Process):
    """dy = A(s) y ds + G(s) dB with A and GGᵀ given as functions, and a prior N(0, Σ_π).

    `drift` and `diffusion` map a float64 tensor of times, of any shape, to (*shape, K, K); for
    K = 1 they may return (*shape) as well. They should be smooth on [0, horizon]. Functions that
    are modules become submodules, and their parameters are learned.
    """

    prior: Tensor

    def __init__(
        self,
        drift: MatrixFunction,
        diffusion: MatrixFunction,
        prior_covariance: Matrix | float,
        v0_variance: float | Vector | Matrix = 0.04,
        v0_coupling: float | Vector | None = None,
        horizon: float = 1.0,
        name: str = "linear SDE",
        learn_v0_variance: bool = False,
        learn_v0_coupling: bool = False,
    ) -> None:
        prior = as_symmetric(prior_covariance, "prior_covariance", definite=True)
        super().__init__(name, len(prior), horizon)
        self._drift_function, self._diffusion_function = drift, diffusion
        self.register_buffer("prior", prior)
        self.auxiliary = Auxiliary(
            v0_variance, v0_coupling, self.n_vars - 1, learn_v0_variance, learn_v0_coupling
        )
        grid = torch.linspace(0, self.horizon, 65, dtype=torch.float64, device="cpu")
        self._check_function(drift, grid, "drift")
        for s, matrix in zip(grid, self._check_function(diffusion, grid, "diffusion"), strict=True):
            check_semidefinite(matrix, f"diffusion({s.item():g})")
        self.replan()

    @property
    def prior_covariance(self) -> Tensor:
        return self.prior

    def drift(self, s: Tensor | float) -> Tensor:
        return self._matrices(self._drift_function, s)

    def diffusion(self, s: Tensor | float) -> Tensor:
        return self._matrices(self._diffusion_function, s)

    def _noise_at(self, s: Tensor) -> Tensor:
        return semidefinite_factor(self._values(self._diffusion_function, s))

    def log_volume(self, s: Tensor | float) -> Tensor:
        times, table, edges = self._inside(s), self._tables(), self._edges

        def integral(start: Tensor, end: Tensor) -> Tensor:
            nodes = start.unsqueeze(-1) + (end - start).unsqueeze(-1) * table.nodes
            trace = torch.diagonal(self.drift(nodes), dim1=-2, dim2=-1).sum(-1)
            return (end - start) * (trace * table.weights).sum(-1)

        before = torch.nn.functional.pad(integral(edges[:-2], edges[1:-1]).cumsum(0), (1, 0))
        index = (times.detach().unsqueeze(-1) > edges[1:-1]).sum(-1)
        return before[index] + integral(edges[index], times)

    def _matrices(self, function: MatrixFunction, s: Tensor | float) -> Tensor:
        return self._values(function, self._inside(s))

    def _values(self, function: MatrixFunction, times: Tensor) -> Tensor:
        value = function(times)
        if self.n_vars == 1 and value.shape == times.shape:
            return value[..., None, None]
        return value

    def _check_function(self, function: MatrixFunction, grid: Tensor, what: str) -> Tensor:
        try:
            value = function(grid)
            if not isinstance(value, Tensor):
                raise TypeError(f"it returned {type(value).__name__}, not a tensor")
        except (TypeError, RuntimeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(
                f"{what} failed on a float64 tensor of {len(grid)} times ({error}); expected a "
                "function that maps times of any shape to (*shape, K, K)."
            ) from error
        expected = (*grid.shape, self.n_vars, self.n_vars)
        if self.n_vars == 1 and value.shape == grid.shape:
            value = value[..., None, None]
        if value.dtype != torch.float64:
            raise ValueError(
                f"{what} maps float64 times to {value.dtype}; expected float64, since kernels need "
                "its digits. Build its matrices with dtype=torch.float64."
            )
        if value.requires_grad and not self._parameters_exist():
            raise ValueError(
                f"{what} depends on a tensor that requires a gradient, which the process can't "
                "see. Expected an nn.Module that owns its parameters; pass one as the function."
            )
        value = value.detach()
        if value.shape != expected:
            raise ValueError(
                f"{what} maps {len(grid)} times to shape {tuple(value.shape)}; expected "
                f"{expected}, the size of prior_covariance at each time."
            )
        if not bool(torch.isfinite(value).all()):
            where = grid[~torch.isfinite(value).flatten(1).all(1)][0].item()
            raise ValueError(
                f"{what} is NaN or infinite at s = {where:g}; expected finite matrices on "
                f"[0, {self.horizon:g}]."
            )
        return value

    def _plan(self) -> None:
        self._refine()

    def _build(self) -> Clock | Panels:
        return panels.varying(
            self.drift, panels.general(self.diffusion), self._edges, self._tables()
        )

    def _clock(self, s: Tensor) -> Tensor:
        return s

    def _from(self, solution: Clock | Panels, start: Tensor, s: Tensor) -> Solved:
        noise = panels.general(self.diffusion)
        return panels.between(self.drift, noise, self._edges, start, s, self._tables())

    def describe(self) -> Record:
        drift, diffusion = self._drift_function, self._diffusion_function
        return {
            "name": self.name,
            "drift": describe_function(drift, f"the drift of {self.name!r}"),
            "diffusion": describe_function(diffusion, f"the diffusion of {self.name!r}"),
            "shared": _common_parts(drift, diffusion),
            "prior": self.prior.tolist(),
            "v0": described(self.auxiliary),
            "horizon": self.horizon,
        }

    @classmethod
    def rebuild(cls, fields: Record) -> LinearSDE:
        drift = rebuilt(fields["drift"], "the drift", nn.Module)
        diffusion = rebuilt(fields["diffusion"], "the diffusion", nn.Module)
        process = cls(
            drift,
            _joined(drift, diffusion, fields["shared"]),
            fields["prior"],
            horizon=fields["horizon"],
            name=fields["name"],
        )
        process.auxiliary = rebuilt(fields["v0"], "v0", Auxiliary)
        return process


def _common_parts(first: object, second: object) -> dict[str, str]:
    """Modules inside the second that are inside the first too, by their names in both."""
    if not isinstance(first, nn.Module) or not isinstance(second, nn.Module):
        return {}
    known = {id(module): name for name, module in first.named_modules()}
    found: dict[str, str] = {}
    for name, module in second.named_modules(remove_duplicate=False):
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if id(module) in known and not inside:  # what is inside comes with its owner
            found[name] = known[id(module)]
    return found


def _joined(first: Any, second: Any, shared: dict[str, str]) -> Any:
    """The second with these parts of the first in place of its own."""
    for name, other in shared.items():
        common = first.get_submodule(other)
        if not name:
            return common
        second.set_submodule(name, common)
    return second
