"""Rates b(s) > 0 and their clocks τ(s) = ∫₀ˢ b.

A rate says how fast a process runs at time s; the transition needs only its integral. Each
schedule knows both in closed form; for a function of the user's own one of the two is enough:
`FromRate` integrates numerically, `FromIntegral` differentiates (the paper's two ways).
`Monotone` is learned: its clock is a polynomial that rises for any value of its parameters and
keeps both ends, τ(0) = 0 and τ(T), exactly.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ornstein.linalg import EPS, gauss_legendre, powers
from ornstein.parts import Record, described, part, rebuilt


class Float64Module(nn.Module):
    """A module whose numbers stay float64 when the model around it is cast to another type."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float64Module:
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.is_floating_point() and moved.dtype != tensor.dtype:
                return tensor.to(device=moved.device)  # the device of the cast, not its type
            return moved

        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        return self

    def _pin(self, **numbers: float) -> None:
        """Put fixed numbers into the state dict, so that loading into other ones is refused."""
        self._pinned = numbers
        self.register_buffer(
            "pinned", torch.tensor(list(numbers.values()), dtype=torch.float64, device="cpu")
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in [*self._parameters, *self._buffers]:
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.is_floating_point():
                state_dict[prefix + name] = value.to(torch.float64)
        pinned = state_dict.get(prefix + "pinned")
        if pinned is not None and hasattr(self, "_pinned") and not pinned.is_meta:
            own = list(self._pinned.values())
            if pinned.tolist() != own:
                names = ", ".join(self._pinned)
                rest[-1].append(
                    f"{prefix[:-1] or type(self).__name__} has ({names}) = {own} and the state "
                    f"dict {pinned.tolist()}; expected the same. Build it with these numbers "
                    "before loading."
                )
                state_dict[prefix + "pinned"] = self._buffers["pinned"]
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Schedule(Float64Module, ABC):
    """A positive rate on [0, horizon] with its integral; subclasses give `rate` and `integral`."""

    horizon: float

    def __init__(self, horizon: float = 1.0) -> None:
        super().__init__()
        self.horizon = positive_number(horizon, "horizon")

    @abstractmethod
    def rate(self, s: Tensor) -> Tensor:
        """b(s), float64, of the shape of s."""

    @abstractmethod
    def integral(self, s: Tensor) -> Tensor:
        """τ(s) = ∫₀ˢ b."""

    def between(self, r: Tensor, s: Tensor) -> Tensor:
        """∫ᵣˢ b; overridden where the difference of two integrals would lose digits."""
        return self.integral(s) - self.integral(r)

    def lost_between(self, r: Tensor, s: Tensor) -> Tensor:
        """The relative rounding error of `between`."""
        if type(self).between is not Schedule.between:
            return torch.zeros_like(s)
        whole = self.integral(s)
        return (EPS * whole / (whole - self.integral(r))).nan_to_num(0.0).detach()

    def line(self) -> tuple[float, float] | None:
        """(a, b) of a clock τ = s(a + b s), for GPU kernels; None for any other."""
        return None

    def sound(self) -> Tensor | None:
        """Whether it still is a rate; None where it can't cease to be one."""
        return None

    def check(self) -> None:
        """Raise if it has ceased to be a rate."""

    def shape(self) -> tuple[Any, ...] | None:
        """What must be equal for two schedules to be proportional; None if that can't be known."""
        return None

    def size(self) -> float:
        """The factor that goes with `shape`."""
        return 1.0


@part("constant")
class Constant(Schedule):
    """b(s) = value."""

    def __init__(self, value: float = 1.0, horizon: float = 1.0) -> None:
        super().__init__(horizon)
        self.value = positive_number(value, "a constant rate")
        self._pin(value=self.value, horizon=self.horizon)

    def rate(self, s: Tensor) -> Tensor:
        return torch.full_like(s, self.value)

    def integral(self, s: Tensor) -> Tensor:
        return self.value * s

    def between(self, r: Tensor, s: Tensor) -> Tensor:
        return self.value * (s - r)

    def line(self) -> tuple[float, float]:
        return self.value, 0.0

    def shape(self) -> tuple[Any, ...]:
        return ("linear", 1.0, self.horizon)

    def size(self) -> float:
        return self.value

    def describe(self) -> Record:
        return {"value": self.value, "horizon": self.horizon}

    @classmethod
    def rebuild(cls, fields: Record) -> Constant:
        return cls(**fields)

    def extra_repr(self) -> str:
        return f"{self.value:g}"


@part("linear")
class Linear(Schedule):
    """b(s) = start + (end − start)·s/horizon."""

    def __init__(self, start: float = 0.1, end: float = 20.0, horizon: float = 1.0) -> None:
        super().__init__(horizon)
        self.start = positive_number(start, "the start of a linear rate")
        self.end = positive_number(end, "the end of a linear rate")
        self._pin(start=self.start, end=self.end, horizon=self.horizon)

    def rate(self, s: Tensor) -> Tensor:
        return self.start + (self.end - self.start) / self.horizon * s

    def integral(self, s: Tensor) -> Tensor:
        return s * (self.start + (self.end - self.start) / (2 * self.horizon) * s)

    def between(self, r: Tensor, s: Tensor) -> Tensor:
        return (s - r) * (self.start + (self.end - self.start) / (2 * self.horizon) * (s + r))

    def line(self) -> tuple[float, float]:
        return self.start, (self.end - self.start) / (2 * self.horizon)

    def shape(self) -> tuple[Any, ...]:
        return ("linear", self.end / self.start, self.horizon)

    def size(self) -> float:
        return self.start

    def describe(self) -> Record:
        return {"start": self.start, "end": self.end, "horizon": self.horizon}

    @classmethod
    def rebuild(cls, fields: Record) -> Linear:
        return cls(**fields)

    def extra_repr(self) -> str:
        return f"{self.start:g}, {self.end:g}"


@part("cosine")
class Cosine(Schedule):
    """exp(−τ(s)) = cos²a(s)/cos²a(0), a(s) linear: the cosine schedule, ended at a finite clock.

    `offset` is the small angle at the start (as a fraction of the horizon) that keeps the rate
    positive there; `total` is τ(horizon), by default that of `Linear()`.
    """

    def __init__(self, total: float = 10.05, offset: float = 0.008, horizon: float = 1.0) -> None:
        super().__init__(horizon)
        self.total = positive_number(total, "the total of a cosine schedule")
        self.offset = positive_number(offset, "the offset of a cosine schedule")
        self._pin(total=self.total, offset=self.offset, horizon=self.horizon)
        self._first = self.offset / (1 + self.offset) * math.pi / 2
        self._last = math.acos(math.cos(self._first) * math.exp(-self.total / 2))
        self._slope = (self._last - self._first) / self.horizon

    def rate(self, s: Tensor) -> Tensor:
        return 2 * self._slope * torch.tan(self._first + self._slope * s)

    def integral(self, s: Tensor) -> Tensor:
        return self.between(torch.zeros_like(s), s)

    def between(self, r: Tensor, s: Tensor) -> Tensor:
        # −2 log(cos b / cos a) = −2 log1p(−2 sin²(δ/2) − tan a·sin δ), δ = b − a: no cancellation
        a, delta = self._first + self._slope * r, self._slope * (s - r)
        return -2 * torch.log1p(-2 * torch.sin(delta / 2) ** 2 - torch.tan(a) * torch.sin(delta))

    def shape(self) -> tuple[Any, ...]:
        return ("cosine", self.total, self.offset, self.horizon)

    def describe(self) -> Record:
        return {"total": self.total, "offset": self.offset, "horizon": self.horizon}

    @classmethod
    def rebuild(cls, fields: Record) -> Cosine:
        return cls(**fields)

    def extra_repr(self) -> str:
        return f"total={self.total:g}, offset={self.offset:g}"


@part("monotone")
class Monotone(Schedule):
    """A learned clock: τ(s) = τ_T·w(τ_base(s)/τ_T), w a rising polynomial with w(0)=0, w(1)=1.

    In Bernstein form w = Σ_j c_j b_j / c_n with 0 = c_0 < c_1 < … (sums of exponentials of the
    parameters), so it rises for any parameters and both ends are exact in floating point. It
    starts equal to the base schedule.
    """

    def __init__(self, base: Schedule | float | None = None, degree: int = 8) -> None:
        base = Linear() if base is None else base
        base = base if isinstance(base, Schedule) else as_schedule(base, 1.0)
        super().__init__(base.horizon)
        if not isinstance(degree, int) or degree < 1:
            raise ValueError(f"Monotone got degree={degree!r}; expected a whole number ≥ 1.")
        if any(True for _ in base.parameters()):
            raise ValueError(
                f"Monotone got a base with parameters of its own, {base!r}; expected a fixed "
                "schedule such as Linear(0.1, 20.0). Learn one of the two."
            )
        self.base = base
        self.degree = degree
        end = torch.tensor(self.horizon, dtype=torch.float64, device="cpu")
        self.total = float(base.integral(end))
        self.logits = nn.Parameter(torch.zeros_like(end).expand(degree).clone())
        binomials = [[math.comb(n, j) for j in range(n + 1)] for n in (degree, degree - 1)]
        nodes = np.stack(np.polynomial.legendre.leggauss(degree))
        self.register_buffer("_up", torch.tensor(binomials[0], dtype=torch.float64, device="cpu"))
        self.register_buffer("_down", torch.tensor(binomials[1], dtype=torch.float64, device="cpu"))
        self.register_buffer("_nodes", torch.from_numpy(nodes))  # on [−1, 1], with weights
        self._up: Tensor
        self._down: Tensor
        self._nodes: Tensor

    def _bernstein(self, binomials: Tensor, u: Tensor) -> Tensor:
        """All Bernstein polynomials of a degree at u: (...,) -> (..., degree + 1)."""
        degree = binomials.shape[0] - 1
        return binomials * powers(u, degree) * powers(1 - u, degree).flip(-1)

    def rate(self, s: Tensor) -> Tensor:
        return self.base.rate(s) * self._slope(self.base.integral(s) / self.total)

    def _slope(self, u: Tensor) -> Tensor:
        """w′(u)."""
        steps = self.degree * torch.softmax(self.logits, 0)
        return self._bernstein(self._down, u) @ steps

    def integral(self, s: Tensor) -> Tensor:
        heights = torch.cumsum(torch.exp(self.logits - self.logits.detach().amax()), 0)
        heights = heights / heights[-1]
        u = self.base.integral(s) / self.total
        return self.total * (self._bernstein(self._up, u)[..., 1:] @ heights)

    def between(self, r: Tensor, s: Tensor) -> Tensor:
        """The integral of a polynomial, by a quadrature that is exact for it."""
        u = (self.base.integral(r) / self.total).unsqueeze(-1)
        length = self.base.between(r, s)
        x, weights = (self._nodes[0] + 1) / 2, self._nodes[1] / 2
        slope = self._slope(u + (length / self.total).unsqueeze(-1) * x)
        return length * (slope @ weights)

    def describe(self) -> Record:
        return {"base": described(self.base), "degree": self.degree}

    @classmethod
    def rebuild(cls, fields: Record) -> Monotone:
        return cls(rebuilt_rate(fields["base"], "the base of a rate"), fields["degree"])


@part("from-rate")
class FromRate(Schedule):
    """A positive function of the user's own, integrated by Gauss–Legendre quadrature.

    `function` maps a tensor of times to the rates there and should be smooth: the quadrature is
    checked at construction, and refused where it has fewer than ten digits.
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], horizon: float = 1.0, nodes: int = 64
    ) -> None:
        super().__init__(horizon)
        self.function = function
        x, w = gauss_legendre(nodes)
        self.register_buffer("_nodes", torch.from_numpy(x.copy()))
        self.register_buffer("_weights", torch.from_numpy(w.copy()))
        self._nodes: Tensor
        self._weights: Tensor
        self.check()

    def check(self) -> None:
        check_rate(self)
        error = float(self._quadrature_error())
        if not error < 1e-10:
            raise ValueError(
                f"FromRate could not integrate the given rate on [0, {self.horizon:g}]: "
                f"{len(self._nodes)} Gauss nodes and twice as many differ by {error:.1e} "
                "(relative); expected less than 1e-10, which a smooth function reaches. Raise "
                "nodes=, smooth the rate, or give its integral: FromIntegral(function)."
            )

    def sound(self) -> Tensor | None:
        if next(self.parameters(), None) is None:
            return None
        return (self._quadrature_error() < 1e-9) & (self.rate(_grid(self, 65)).detach() >= 0).all()

    def _quadrature_error(self) -> Tensor:
        """Of the quadrature against one on two halves, relatively: ()."""
        s = _grid(self, 33)
        with torch.no_grad():
            whole, halves = self.integral(s), self.integral(s / 2) + self.between(s / 2, s)
        return ((whole - halves).abs() / halves.abs().clamp(min=1e-300))[1:].amax()

    def rate(self, s: Tensor) -> Tensor:
        return self.function(s)

    def integral(self, s: Tensor) -> Tensor:
        return self.between(torch.zeros_like(s), s)

    def between(self, r: Tensor, s: Tensor) -> Tensor:
        length = (s - r).unsqueeze(-1)
        return (self.rate(r.unsqueeze(-1) + length * self._nodes) * self._weights * length).sum(-1)

    def describe(self) -> Record:
        function = describe_function(self.function, "the rate of FromRate")
        return {"function": function, "horizon": self.horizon, "nodes": len(self._nodes)}

    @classmethod
    def rebuild(cls, fields: Record) -> FromRate:
        function = rebuilt(fields["function"], "the function of a rate", nn.Module)
        return cls(function, fields["horizon"], fields["nodes"])


@part("from-integral")
class FromIntegral(Schedule):
    """A rising function τ of the user's own, τ(0) = 0; the rate is its derivative (autograd)."""

    def __init__(self, function: Callable[[Tensor], Tensor], horizon: float = 1.0) -> None:
        super().__init__(horizon)
        self.function = function
        start = float(check_values(self.integral, self, "clock")[0])
        if not abs(start) < 1e-12:
            raise ValueError(
                f"FromIntegral got a clock with τ(0) = {start:g}; expected τ(0) = 0. "
                "Subtract the value at 0 from your function."
            )
        self.check()

    def check(self) -> None:
        check_rate(self)

    def sound(self) -> Tensor | None:
        if next(self.parameters(), None) is None:
            return None
        return (self.rate(_grid(self, 65)).detach() >= 0).all()

    def rate(self, s: Tensor) -> Tensor:
        learned = any(p.requires_grad for p in self.parameters())
        create = torch.is_grad_enabled() and (s.requires_grad or learned)
        with torch.inference_mode(False), torch.enable_grad():
            at = s if create and s.requires_grad else s.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.integral(at).sum(), at, create_graph=create)
        return slope

    def integral(self, s: Tensor) -> Tensor:
        return self.function(s)

    def describe(self) -> Record:
        function = describe_function(self.function, "the clock of FromIntegral")
        return {"function": function, "horizon": self.horizon}

    @classmethod
    def rebuild(cls, fields: Record) -> FromIntegral:
        function = rebuilt(fields["function"], "the function of a clock", nn.Module)
        return cls(function, fields["horizon"])


def rebuilt_rate(record: Any, what: str) -> Schedule:
    """A schedule from its description."""
    return rebuilt(record, what, Schedule)  # type: ignore[type-abstract]


def describe_function(function: object, what: str) -> Record:
    """A function of the user's own for a file: a module whose class is listed in `parts`."""
    try:
        return described(function)
    except ValueError as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise ValueError(
            f"{what} is code of your own ({name}), which a file can't hold; expected a module "
            "whose class is listed with ornstein.parts.part(name), with describe() and rebuild(). "
            "Without it keep the code, build the process with it, and load the model with "
            "ScoreModel.from_pretrained(folder, process=process)."
        ) from error


def as_schedule(rate: Schedule | Callable[[Tensor], Tensor] | float, horizon: float) -> Schedule:
    """A schedule as it is, a number as `Constant`, a function as `FromRate`."""
    if isinstance(rate, Schedule):
        if not math.isclose(rate.horizon, horizon):
            raise ValueError(
                f"the schedule {rate!r} runs to {rate.horizon:g} and the process to {horizon:g}; "
                "expected one horizon. Pass the same horizon= to both."
            )
        return rate
    if isinstance(rate, type):
        raise ValueError(
            f"a rate was given as the class {rate.__name__}; expected an instance, such as "
            "ornstein.Linear(0.1, 20.0)."
        )
    if isinstance(rate, Tensor) and rate.dim() == 0 and not rate.requires_grad:
        return Constant(float(rate), horizon)
    if isinstance(rate, numbers.Real) and not isinstance(rate, bool):
        return Constant(float(rate), horizon)
    if callable(rate):
        return FromRate(rate, horizon)
    raise ValueError(
        f"a rate was given as {type(rate).__name__}; expected a Schedule such as "
        "ornstein.Linear(0.1, 20.0), a positive number, or a function of a tensor of times."
    )


def proportion(first: Schedule, second: Schedule) -> float | None:
    """first / second where the two rates are known to be proportional at all times, else None."""
    if first is second:
        return 1.0
    if first.shape() is None or first.shape() != second.shape():
        return None
    return first.size() / second.size()


def _grid(schedule: Schedule, count: int) -> Tensor:
    """Times from 0 to the horizon, where the schedule lives."""
    places = [t.device for t in [*schedule.parameters(), *schedule.buffers()]]
    device = places[0] if places else torch.device("cpu")
    return torch.linspace(0, schedule.horizon, count, dtype=torch.float64, device=device)


def check_values(function: Callable[[Tensor], Tensor], schedule: Schedule, what: str) -> Tensor:
    """What a user's function gives on a grid of times, or a ValueError that says what is wrong."""
    s = _grid(schedule, 257)
    try:
        value = function(s)
        if not isinstance(value, Tensor):
            raise TypeError(f"it returned {type(value).__name__}, not a tensor")
    except (TypeError, RuntimeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"the {what} function failed on a float64 tensor of 257 times ({error}); expected a "
            "function that maps a tensor of times to a tensor of the same shape, with functions of "
            "torch, not of math."
        ) from error
    if value.shape != s.shape:
        raise ValueError(
            f"the {what} function maps times of shape {tuple(s.shape)} to {tuple(value.shape)}; "
            "expected the same shape. Return one value per time."
        )
    if value.dtype != torch.float64:
        raise ValueError(
            f"the {what} function maps float64 times to {value.dtype}; expected float64, since "
            "kernels need its digits."
        )
    if value.requires_grad and next(schedule.parameters(), None) is None:
        raise ValueError(
            f"the {what} function depends on a tensor that requires a gradient, which the schedule "
            "can't see. Expected an nn.Module that owns its parameters; pass one as the function."
        )
    return value.detach()


def check_rate(schedule: Schedule) -> None:
    """Refuse a rate that is negative or not finite somewhere on a grid of its horizon."""
    s, rate = _grid(schedule, 257), check_values(schedule.rate, schedule, "rate")
    bad = ~(torch.isfinite(rate) & (rate >= 0)) | ((rate == 0) & (s > 0) & (s < schedule.horizon))
    if bad.any():
        where = int(bad.nonzero()[0])
        raise ValueError(
            f"the rate is {rate[where].item():g} at s = {s[where].item():g}; expected a positive, "
            f"finite rate on [0, {schedule.horizon:g}]. Add a positive floor or change its range."
        )


def positive_number(value: float, what: str) -> float:
    """value as a float, or a ValueError that says what was expected."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} was given as {value!r}; expected a positive number.") from error
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{what} was given as {number:g}; expected a positive, finite number.")
    return number
