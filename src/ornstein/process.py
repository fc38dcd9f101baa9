"""What every process offers: times in, a checked transition out; and how its panels are planned.

A kind of process (`diffusion` has two) supplies its matrices and builds its solution on panels,
whose number must be known on the host. In eager mode every call is checked and mistakes raise.
Inside `torch.compile` or a CUDA graph nothing may be read back, so a kernel that would be wrong is
filled with NaN instead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ornstein.clock import MOST_PANELS, STIFFNESS, Clock, Solved, constants, panel_count
from ornstein.linalg import EPS, Tables, in_graph, lower_solve, product
from ornstein.matrices import Auxiliary, as_float64
from ornstein.panels import Panels
from ornstein.schedules import Float64Module, positive_number
from ornstein.transition import LEAST_SNR, Given, Transition

TOLERANCE = 2e-8  # of the error estimate, which is cautious: what is returned is good to 1e-8
EARLIEST = math.log(1e-12)  # of the times, as parts of the horizon, at which noise is looked for
NEWTON_STEPS, MOST_STEPS = 6, 60  # in a graph, and in eager mode, where it ends earlier
FINER = 256  # parts of the cell of `_ladder` that a time lies in
HEADROOM = 1.5  # by which a learned process may grow inside one compiled graph, at least


class Process(Float64Module, ABC):
    """What every linear diffusion offers; `Diffusion` and `LinearSDE` are the two kinds."""

    name: str
    n_vars: int
    horizon: float
    auxiliary: Auxiliary
    _edges: Tensor  # of the panels, where the matrices vary in s

    def __init__(self, name: str, n_vars: int, horizon: float) -> None:
        super().__init__()
        self.name, self.n_vars = name, n_vars
        self.horizon = positive_number(horizon, "horizon")
        self._count = 1  # panels
        self._table: Tables | None = None
        self._solved: Clock | Panels | None = None
        self._noise_times: dict[float, Tensor] = {}  # of a fixed process
        self._prior_factor: Tensor | None = None
        self._held: Clock | Panels | None = None  # see `hold`

    # ---------------------------------------------------------------- what a kind supplies

    @abstractmethod
    def drift(self, s: Tensor | float) -> Tensor:
        """A(s): (..., K, K) float64."""

    @abstractmethod
    def diffusion(self, s: Tensor | float) -> Tensor:
        """G Gᵀ(s): (..., K, K) float64."""

    @abstractmethod
    def _noise_at(self, s: Tensor) -> Tensor:
        """G(s) at times that are known to be inside: (..., K, R)."""

    @abstractmethod
    def log_volume(self, s: Tensor | float) -> Tensor:
        """log|Φ(s, 0)| = ∫₀ˢ tr A: (...) float64."""

    @abstractmethod
    def _build(self) -> Clock | Panels:
        """The panels of the process as it is now."""

    @abstractmethod
    def _clock(self, s: Tensor) -> Tensor:
        """What the panels are a function of."""

    @abstractmethod
    def _from(self, solution: Clock | Panels, start: Tensor, s: Tensor) -> Solved:
        """Given the state at `start`, both (B,)."""

    @abstractmethod
    def _plan(self) -> None:
        """Choose the panels on the host."""

    # ---------------------------------------------------------------- what users call

    @property
    @abstractmethod
    def prior_covariance(self) -> Tensor:
        """Covariance of the prior π = N(0, ·): (K, K) float64."""

    @property
    def prior_factor(self) -> Tensor:
        """Its lower factor, kept, since a graph can't wait for a factorisation: (K, K)."""
        if self._prior_factor is None:
            self.replan()
        return self._prior_factor  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.auxiliary.root.device

    @property
    def learned(self) -> bool:
        """Whether anything about the process has a gradient."""
        return any(p.requires_grad for p in self.parameters())

    def transition(
        self, s: Tensor | float, given: Given = "x", start: Tensor | float = 0.0
    ) -> Transition:
        """q(y_s | x), or q(y_s | y_start) with given="state", for times s of any shape."""
        if given not in ("x", "state"):
            raise ValueError(
                f"given={given!r}; expected 'x' (the auxiliary variables integrated out) or "
                "'state' (all variables known)."
            )
        times, shape = self._times(s)
        eager = not in_graph()
        if eager:
            self._check_times(times, "s")
        solution = self._solution(eager)
        starts: Tensor | float = 0.0
        guarded: Solved | None = None
        if self._is_zero(start, eager):
            initial = self.auxiliary.factor() if given == "x" else None
            if not eager and isinstance(solution, Clock):
                guarded = solution.guarded(times, initial)
            solved = guarded or solution.at(self._clock(times), initial)
        else:
            starts = self._starts(start, given, times, shape, eager)
            solved = self._from(solution, starts, times)
        if eager:
            self._check_digits(solved, times, given)
        elif guarded is None:
            inside = (times >= starts) & (times <= self.horizon) & (solved.error <= TOLERANCE)
            solved = _poison(solved, inside & self._sound(solution))
        K = self.n_vars
        return Transition(
            propagator=solved.propagator.reshape(*shape, K, K),
            cholesky=solved.cholesky.reshape(*shape, K, K),
            direction=self.auxiliary.direction(),
            given=given,
            error=solved.error.reshape(shape),
        )

    def between(self, start: Tensor, s: Tensor) -> Solved:
        """Φ and L from `start` to `s`, both (B,), with the error of L; its digits are not checked.

        For those who add L Lᵀ to something larger, next to which lost digits are nothing.
        """
        return self._from(self._solution(not in_graph()), start, s)

    def noise_factor(self, s: Tensor | float) -> Tensor:
        """G(s) with G Gᵀ the diffusion: (..., K, R) float64."""
        return self._noise_at(self._inside(s))

    def time_of_noise(self, standard_error: Tensor | float) -> Tensor:
        """The time at which y_s tells x up to this standard error, SNR(s)^(-1/2): float64.

        For a learned process the time depends on its parameters, and so does its gradient.
        """
        key = standard_error if isinstance(standard_error, (int, float)) else None
        if key is not None and key in self._noise_times:
            return self._noise_times[key]
        targets, shape = self._times(standard_error)
        eager = not in_graph()
        if eager and not bool((targets > 0).all() & targets.isfinite().all()):
            raise ValueError(
                f"standard_error={_shown(standard_error)}; expected a positive, finite number, in "
                "units of the data."
            )
        wanted = -2 * targets.log()
        with torch.no_grad():
            solution, known = self._solution(eager), wanted.detach()
            grid = self._ladder()
            ladder = self._log_snr(solution, grid)[0]  # falling
            inside = (known < ladder[0]) & (known >= ladder[-1] - 1e-9)
            if eager and not bool(inside.all()):
                self._refuse_noise(targets[~inside][0].item(), ladder)
            above = (ladder > known.unsqueeze(-1)).sum(-1).clamp(1, grid.shape[0] - 1)
            low, high = grid[above - 1].log(), grid[above].log()
            first, last = ladder[above - 1], ladder[above]
            steps = MOST_STEPS if eager else NEWTON_STEPS
            if not eager and len(known) == 1:  # a second look at many costs as much as a step
                finer = low + (high - low) * torch.linspace(
                    0.0, 1.0, FINER + 1, dtype=torch.float64, device=self.device
                )
                ladder = self._log_snr(solution, finer.exp())[0]
                above = (ladder > known).sum(-1, keepdim=True).clamp(1, FINER)
                low, high = finer[above - 1], finer[above]
                first, last, steps = ladder[above - 1], ladder[above], 2
            at = low + (high - low) * (first - known) / (first - last)
            for _ in range(steps):  # nearly linear in log s
                value, slope = self._log_snr(solution, at.exp())
                low, high = (
                    torch.where(value > known, at, low),
                    torch.where(value > known, high, at),
                )
                step = at - (value - known) / slope
                within = (step >= low) & (step <= high)
                at = torch.where(within, step, (low + high) / 2)
                if eager and bool(
                    (((value - known).abs() <= 1e-13 * (1 + known.abs())) | ~inside).all()
                ):
                    break
            times = at.exp().clamp(max=self.horizon)
        if torch.is_grad_enabled() and (self.learned or wanted.requires_grad):
            # one more step of Newton's, of size zero, carries the implicit gradient
            value, slope = self._log_snr(self._solution(eager), times)
            times = times * (1 - (value - wanted - (value - wanted).detach()) / slope.detach())
        times = torch.where(inside, times, math.nan).reshape(shape)
        if eager and key is not None and not self._parameters_exist():
            self._noise_times[key] = times
        return times

    def least_noise(self) -> float:
        """The smallest standard error of x that `time_of_noise` finds a time for."""
        with torch.no_grad():
            first = self._log_snr(self._solution(True), self._ladder()[:1])[0]
        return (-first / 2).exp().item() * (1 + 1e-9)

    def _ladder(self) -> Tensor:
        """Times to look at first: even in log s, and even in s."""
        even = torch.linspace(0.0, 1.0, 129, dtype=torch.float64, device=self.device)
        both = torch.cat([(EARLIEST * (1 - even)).exp(), even[2:-1]])
        return self.horizon * both.sort().values

    def _log_snr(self, solution: Clock | Panels, times: Tensor) -> tuple[Tensor, Tensor]:
        """log SNR and its derivative in log s: (B,) each."""
        solved = solution.at(self._clock(times), self.auxiliary.factor())
        response = product(solved.propagator, self.auxiliary.direction().unsqueeze(-1))
        signal = lower_solve(solved.cholesky, response)
        noise = lower_solve(solved.cholesky, self._noise_at(times))
        snr = signal.square().sum((-2, -1)).clamp(min=LEAST_SNR)
        return snr.log(), -times * product(noise.mT, signal).square().sum((-2, -1)) / snr

    def _refuse_noise(self, target: float, ladder: Tensor) -> None:
        least, most = (-ladder[0] / 2).exp().item(), (-ladder[-1] / 2).exp().item()
        raise ValueError(
            f"a standard error of {target:g} can't be met by {self.name!r}: it goes from "
            f"{least:.3g} shortly after the start to {most:.3g} at the horizon. Expected a number "
            "between them; choose another noise level, or a longer horizon."
        )

    def replan(self) -> None:
        """Choose the panels anew for the matrices as they are now.

        Eager calls do it by themselves. Call it now and then while a *learned* process trains
        inside a compiled graph, whose panels can't change; the graph is then compiled again if
        the matrices have outgrown it.
        """
        with torch.inference_mode(False), torch.no_grad():  # what is kept may meet autograd later
            self._renew()
            self._plan()
            if not self._parameters_exist():
                solution = self._build()
                if isinstance(solution, Clock):
                    solution = solution.kept(self._span())
                self._solved = solution

    def restraint(self) -> float:
        """By what a clock should be slowed down that has run far past all data; 1 if it has not.

        Here nothing is known to be too fast; `Diffusion` knows.
        """
        return 1.0

    def restrain(self, by: float | None = None) -> float:
        """Slow a learned process down if its clock has run far past all data.

        Returns what Q and D were multiplied by: 1 where nothing was done. A loop of your own may
        call it now and then; `fit` does. With `by` they are multiplied by that, as those of another
        copy were.
        """
        return 1.0

    def hold(self) -> None:
        """Build the panels once, for all calls until `release`; nothing may change meanwhile.

        A learned process builds them in every call otherwise, of which a bound has several.
        """
        held = self._solution(not in_graph())
        self._held = held.tabulated() if isinstance(held, Clock) else held

    def release(self) -> None:
        """The end of `hold`."""
        self._held = None

    def plan(self) -> Tensor:
        """The panels as they are now, as numbers for a checkpoint: see `follow`."""
        if self._table is None:
            self.replan()
        return self._planned()

    def follow(self, plan: Tensor) -> None:
        """Use the panels of an earlier `plan`.

        A learned process plans anew only when it has outgrown its panels, so that they depend on
        its history. A run that goes on from a checkpoint needs the same ones to repeat its numbers
        bit for bit.
        """
        if not self._parameters_exist():
            self.replan()
            return
        with torch.inference_mode(False), torch.no_grad():
            self._renew()
            self._follow(plan)  # also where a new plan would be refused: the run was not

    # ---------------------------------------------------------------- inside

    def _renew(self) -> None:
        """Everything that is kept, but for the panels, for the parameters as they are now."""
        self._solved = None
        self._noise_times = {}
        self._prior_factor = torch.linalg.cholesky(self.prior_covariance)
        self._table = constants(self.device)

    def _planned(self) -> Tensor:
        return self._edges.detach().cpu()

    def _follow(self, plan: Tensor) -> None:
        self._edges = plan.to(device=self.device, dtype=torch.float64)

    def _starts(
        self, start: Tensor | float, given: Given, times: Tensor, shape: torch.Size, eager: bool
    ) -> Tensor:
        """The starts of a kernel given the state, checked: (B,)."""
        if given == "x":
            raise ValueError(
                f"given='x' with start={start!r}; expected start=0, since x is known at time 0 "
                "only. Use given='state' to start from a state at a later time."
            )
        starts, start_shape = self._times(start)
        if start_shape not in (torch.Size(), shape):
            raise ValueError(
                f"start has shape {tuple(start_shape)} and s {tuple(shape)}; expected equal "
                "shapes or a single start."
            )
        starts = starts.expand_as(times)
        if eager:
            self._check_times(starts, "start")
            if bool((starts > times).any()):
                raise ValueError(
                    f"start reaches {starts.max().item():g}, later than s; expected start ≤ s "
                    "for every pair. Swap them to go forward in time."
                )
        return starts

    def _solution(self, eager: bool) -> Clock | Panels:
        """The panels: kept for a fixed process, rebuilt for a learned one (re-planned in eager)."""
        if self._held is not None:
            return self._held
        if self._solved is not None:
            return self._solved
        if self._table is None:
            self.replan()
        if self._solved is not None:
            return self._solved
        solution = self._build()
        if eager and not bool(self._sound(solution)):
            self._check_finite()
            self._check_rates()
            self.replan()
            solution = self._build()
        return solution

    def _sound(self, solution: Clock | Panels) -> Tensor:
        """Whether the plan still fits the process: ()."""
        return solution.sound

    def _span(self) -> Tensor | None:
        """(a, b, horizon, tolerance) where the clock is τ = s(a + b s): see `Clock.guarded`."""
        return None

    def _check_rates(self) -> None:
        """Raise if a learned rate has left what a rate may be."""

    def _check_finite(self) -> None:
        for name, parameter in self.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise ValueError(
                    f"the parameter {name} of {self.name!r} is not a number (NaN or infinite): "
                    f"{parameter.tolist()}; expected finite numbers. Go back to an earlier state, "
                    "and lower the learning rate."
                )

    def _is_zero(self, start: Tensor | float, eager: bool) -> bool:
        if isinstance(start, Tensor):
            return eager and start.dim() == 0 and not start.requires_grad and not bool(start)
        return isinstance(start, (int, float)) and start == 0

    def _tables(self) -> Tables:
        if self._table is None:
            self._table = constants(self.device)
        return self._table

    def _times(self, s: Tensor | float) -> tuple[Tensor, torch.Size]:
        """Times as a flat float64 tensor on the process's device, and their shape."""
        if isinstance(s, Tensor) and not s.is_complex():
            times = s.to(device=self.device, dtype=torch.float64)
        elif isinstance(s, (int, float)):
            times = torch.full((), float(s), dtype=torch.float64, device=self.device)
        else:
            times = as_float64(s, "the times s").to(self.device)
        return times.reshape(-1), times.shape

    def _inside(self, s: Tensor | float) -> Tensor:
        """Times for the matrices, of the shape of s; the last panel may round past the horizon."""
        times, shape = self._times(s)
        if not in_graph():
            self._check_times(times, "s", slack=1e-12)
        return times.reshape(shape)

    def _check_times(self, times: Tensor, what: str, slack: float = 0.0) -> None:
        if times.numel() == 0:
            return
        low, high = (float(t) for t in times.detach().aminmax())
        if not (low >= 0 and high <= self.horizon * (1 + slack)):
            value = high if low >= 0 else low
            raise ValueError(
                f"{what} = {value:g} is outside the process's time; expected "
                f"0 ≤ {what} ≤ {self.horizon:g}. Clamp the times, or build the process with a "
                "longer horizon=."
            )

    def _check_digits(self, solved: Solved, times: Tensor, given: Given) -> None:
        """Never return noise: say which time can't be had, and by how many digits."""
        if bool((solved.error <= TOLERANCE).all()):
            return
        self._check_finite()
        which = int(solved.error.nan_to_num(math.inf).argmax())
        error, at = solved.error[which].item(), times[which].item()
        if math.isnan(error):
            raise ValueError(
                f"the kernel of {self.name!r} at s = {at:g} is not a number; expected finite "
                "matrices. Look for a parameter of the process that is NaN or infinite."
            )
        digits = 16 if math.isinf(error) else min(16, round(math.log10(error / EPS)))
        raise ValueError(
            f"the factor of {self.name!r} given {given} at s = {at:.6g} has lost {digits} of 16 "
            "digits: its directions differ by more orders of magnitude than float64 can hold. "
            f"Expected a relative error ≤ {TOLERANCE:g}. Use a larger s"
            + (" or given='x'." if given == "state" else ".")
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Process:
        super()._apply(fn, recurse)
        if self._table is not None:
            self._table = self._solved = self._prior_factor = None
            self._noise_times = {}
            if not any(p.is_meta for p in [*self.parameters(), *self.buffers()]):
                self.replan()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._table = self._solved = self._prior_factor = None  # others now, perhaps
        self._noise_times = {}

    def _refine(self) -> None:
        """For matrices that vary in s: double the panels until twice as many agree."""
        headroom = HEADROOM if self._parameters_exist() else 1.0
        times = torch.linspace(0, self.horizon, 34, dtype=torch.float64, device=self.device)[1:]
        edges = self._first_edges(headroom)
        coarse: tuple[Tensor, Solved] | None = None
        difference = math.inf
        while edges.shape[0] <= MOST_PANELS + 1:
            self._edges = edges
            solution = self._build()
            fine = solution.at(times, None)
            if coarse is not None:
                before, difference = difference, _distance(coarse[1], fine)
                # once it is small and no longer shrinks, what is left is rounding
                if difference < 1e-12 or (difference < 1e-10 and difference > before / 4):
                    self._edges = coarse[0]
                    return
            if bool(solution.sound):
                coarse = edges, fine
            middle = (edges[:-1] + edges[1:]) / 2
            edges = torch.cat([edges[:1], torch.stack([middle, edges[1:]], 1).flatten()])
        if not bool((fine.cholesky.diagonal(dim1=-2, dim2=-1) > 0).all()):
            raise ValueError(
                f"the noise of {self.name!r} never reaches some variable: L has a zero on its "
                "diagonal at every time. Expected a diffusion that enters each variable, itself or "
                "through the drift."
            )
        raise ValueError(
            f"the kernel of {self.name!r} did not converge: {MOST_PANELS} panels and half as many "
            f"differ by {difference:.1e} (relative), expected less than 1e-12. Its drift, "
            "diffusion or rates are not smooth on the horizon; smooth kinks and jumps, or end the "
            "horizon before a singularity."
        )

    def _stiffness(self) -> float:
        """∫‖A‖ over the horizon."""
        grid = self._grid()
        return float(torch.trapezoid(torch.linalg.matrix_norm(self.drift(grid)), grid))

    def _grid(self) -> Tensor:
        return torch.linspace(0, self.horizon, 4097, dtype=torch.float64, device=self.device)

    def _first_edges(self, headroom: float) -> Tensor:
        """2ᵐ panels that share out ∫‖A‖, the e-folds of the matrices' sizes, and a little time."""
        grid = self._grid()
        sizes = self._sizes(grid)  # (m, 4097)
        norm = torch.linalg.matrix_norm(self.drift(grid))
        work = torch.cumulative_trapezoid(norm, grid) * headroom / STIFFNESS
        folds = (sizes / sizes.amax(-1, keepdim=True).clamp(min=1e-300)).clamp(min=1e-12).log()
        folds = folds.diff().abs().sum(0).cumsum(0)
        share = work + folds / 2 + 2 * grid[1:] / self.horizon
        share = torch.cat([torch.zeros_like(share[:1]), share])
        count = panel_count(STIFFNESS * float(share[-1]))
        places = torch.linspace(0, 1, count + 1, dtype=torch.float64, device=self.device)[1:-1]
        places = places * share[-1]
        above = torch.searchsorted(share, places).clamp(1, grid.shape[0] - 1)
        part = (places - share[above - 1]) / (share[above] - share[above - 1])
        inner = grid[above - 1] + part * (grid[above] - grid[above - 1])
        return torch.cat([grid[:1], inner, grid[-1:]])

    def _sizes(self, s: Tensor) -> Tensor:
        """Positive functions whose variation the panels must resolve: (m, len(s))."""
        return torch.stack([torch.linalg.matrix_norm(f(s)) for f in (self.drift, self.diffusion)])

    def _parameters_exist(self) -> bool:
        return next(self.parameters(), None) is not None

    def extra_repr(self) -> str:
        return f"{self.name!r}, n_vars={self.n_vars}, horizon={self.horizon:g}"


def _shown(value: Tensor | float) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def _poison(solved: Solved, good: Tensor) -> Solved:
    """NaN wherever the kernel would be wrong: (B,)."""
    whole = good[:, None, None]
    return Solved(
        torch.where(whole, solved.propagator, math.nan),
        torch.where(whole, solved.cholesky, math.nan),
        torch.where(good, solved.error, math.nan),
    )


def _distance(first: Solved, second: Solved) -> float:
    """Largest difference of two solutions: of Φ relative to its size, of Σ to its deviations.

    (Not of L: its small entries differ by rounding, which no panels can mend.)
    """
    phi = (first.propagator - second.propagator).abs().amax((-2, -1))
    phi = phi / second.propagator.abs().amax((-2, -1)).clamp(min=1e-280)
    deviation = torch.linalg.vector_norm(second.cholesky, dim=-1, keepdim=True)
    a, b = first.cholesky / deviation, second.cholesky / deviation
    covariance = (a @ a.mT - b @ b.mT).abs().amax((-2, -1))
    return float(torch.maximum(phi, covariance).max())
