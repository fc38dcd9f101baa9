"""The small matrices of a process: checked when given, or learned within their constraints.

`Fixed` holds a matrix, `Skew` learns Q = Q̃ − Q̃ᵀ, `Semidefinite` learns D = D̃D̃ᵀ, `Auxiliary` is
the law v₀ ~ N(c·x, Σ_v) of the auxiliary variables at time 0. Each is a module called without
arguments that returns the matrix as it is now, always in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ornstein.linalg import semidefinite_factor
from ornstein.parts import Record, part
from ornstein.schedules import Float64Module

Matrix = Tensor | np.ndarray | Sequence[Sequence[float]]
Vector = Tensor | np.ndarray | Sequence[float]


@part("fixed")
class Fixed(Float64Module):
    """A matrix that does not change."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self) -> Tensor:
        return self.value

    def factor(self) -> Tensor:
        """C with C Cᵀ = value, for a positive semi-definite one: (K, K), zero columns included."""
        return semidefinite_factor(self.value)

    def describe(self) -> Record:
        return {"value": self.value.tolist()}

    @classmethod
    def rebuild(cls, fields: Record) -> Fixed:
        return cls(as_square(fields["value"], "a matrix"))


@part("skew")
class Skew(Float64Module):
    """Q = Q̃ − Q̃ᵀ with Q̃ learned."""

    def __init__(self, raw: Tensor) -> None:
        super().__init__()
        self.raw = nn.Parameter(raw.to(torch.float64))

    def forward(self) -> Tensor:
        return self.raw - self.raw.mT

    def describe(self) -> Record:
        return {"shape": list(self.raw.shape)}  # the numbers are in the state dict

    @classmethod
    def rebuild(cls, fields: Record) -> Skew:
        """Each variable turns into the next, so that noise in any of them reaches all."""
        raw = torch.zeros(fields["shape"], dtype=torch.float64, device="cpu")
        raw.diagonal(-1).fill_(0.5)
        return cls(raw)


@part("semidefinite")
class Semidefinite(Float64Module):
    """D = D̃D̃ᵀ with D̃ learned: diagonal if raw is a vector, full if it is a matrix."""

    def __init__(self, raw: Tensor) -> None:
        super().__init__()
        self.raw = nn.Parameter(raw.to(torch.float64))

    def forward(self) -> Tensor:
        factor = self.factor()
        return factor @ factor.mT

    def factor(self) -> Tensor:
        """D̃: (K, K)."""
        return torch.diag_embed(self.raw) if self.raw.dim() == 1 else self.raw

    def describe(self) -> Record:
        return {"shape": list(self.raw.shape)}  # diagonal or full; the numbers are elsewhere

    @classmethod
    def rebuild(cls, fields: Record) -> Semidefinite:
        """Noise in every variable, until the numbers are loaded."""
        raw = torch.zeros(fields["shape"], dtype=torch.float64, device="cpu")
        (raw if raw.dim() == 1 else raw.diagonal()).fill_(0.5**0.5)
        return cls(raw)


@part("auxiliary")
class Auxiliary(Float64Module):
    """v₀ ~ N(c·x, Σ_v), per data coordinate; Σ_v's scale and c can be learned."""

    root: Tensor
    coupling: Tensor
    _factor: Tensor  # both padded, kept for what is not learned: a launch each otherwise
    _direction: Tensor

    def __init__(
        self,
        variance: float | Vector | Matrix,
        coupling: float | Vector | None,
        n_aux: int,
        learn_variance: bool = False,
        learn_coupling: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("root", _variance_root(variance, n_aux))  # Σ_v = root rootᵀ
        if learn_variance and not bool((torch.diagonal(self.root) > 0).all()):
            raise ValueError(
                f"a learned variance of v₀ must start positive; got v0_variance={variance!r}. "
                "Give a positive number, for example v0_variance=0.04."
            )
        self.log_scale = (
            nn.Parameter(torch.zeros(n_aux, dtype=torch.float64, device="cpu"))
            if learn_variance
            else None
        )
        c = as_float64(0.0 if coupling is None else coupling, "v0_coupling")
        c = c.expand(n_aux).clone() if c.dim() == 0 else c
        if c.shape != (n_aux,):
            raise ValueError(
                f"v0_coupling has shape {tuple(c.shape)}; expected ({n_aux},), one number per "
                "auxiliary variable."
            )
        if learn_coupling:
            self.coupling = nn.Parameter(c)
        else:
            self.register_buffer("coupling", c)
        self._keep()

    def _keep(self) -> None:
        factor = torch.nn.functional.pad(self.root, (0, 0, 1, 0))
        direction = torch.nn.functional.pad(self.coupling.detach(), (1, 0), value=1.0)
        self.register_buffer("_factor", factor, persistent=False)
        self.register_buffer("_direction", direction, persistent=False)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._keep()

    def factor(self) -> Tensor:
        """A factor of Cov(y_0 | x): (K, K−1), first row zero."""
        if self.log_scale is None:
            return self._factor
        root = self.log_scale.exp()[:, None] * self.root
        return torch.nn.functional.pad(root, (0, 0, 1, 0))

    def direction(self) -> Tensor:
        """E[y_0 | x] / x = (1, c): (K,)."""
        if not isinstance(self.coupling, nn.Parameter):
            return self._direction
        return torch.nn.functional.pad(self.coupling, (1, 0), value=1.0)

    def describe(self) -> Record:
        learned = isinstance(self.coupling, nn.Parameter)  # then it is in the state dict
        return {
            "root": self.root.tolist(),
            "coupling": None if learned else self.coupling.tolist(),
            "learn_variance": self.log_scale is not None,
            "learn_coupling": learned,
        }

    @classmethod
    def rebuild(cls, fields: Record) -> Auxiliary:
        """From the root itself, since a factor of its square would be rounded anew."""
        root = as_float64(fields["root"], "the root of v0_variance")
        n_aux = len(root)
        found = cls(
            1.0, fields["coupling"], n_aux, fields["learn_variance"], fields["learn_coupling"]
        )
        found.root = root.reshape(n_aux, n_aux)
        found._keep()
        return found


def _variance_root(variance: float | Vector | Matrix, n_aux: int) -> Tensor:
    value = as_float64(variance, "v0_variance")
    if value.dim() == 0:
        value = value.expand(n_aux)
    if value.dim() == 1:
        value = torch.diag_embed(value)
    if value.shape != (n_aux, n_aux):
        raise ValueError(
            f"v0_variance has shape {tuple(value.shape)}; expected a number, ({n_aux},) or "
            f"({n_aux}, {n_aux}) for {n_aux} auxiliary variables."
        )
    if n_aux == 0:
        return value
    check_semidefinite(value, "v0_variance")
    return semidefinite_factor(value)


# ---------------------------------------------------------------- checks of what users give


def as_float64(value: Any, what: str) -> Tensor:
    """A fresh, finite float64 tensor of what was given."""
    try:
        if isinstance(value, Tensor):
            value = value.detach()
            is_complex = value.is_complex()
        else:
            is_complex = np.iscomplexobj(value)
        if is_complex:
            raise TypeError("it has complex entries")
        tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu").clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} was given as {type(value).__name__} ({error}); expected numbers: a tensor, "
            "an array or nested lists of equal lengths."
        ) from error
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"{what} has an entry that is NaN or infinite: {tensor.tolist()}; expected finite "
            "numbers."
        )
    return tensor


def as_square(value: Any, what: str) -> Tensor:
    """A K×K float64 tensor; a single number is 1×1."""
    matrix = as_float64(value, what)
    if matrix.dim() == 0:
        matrix = matrix.reshape(1, 1)
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(
            f"{what} has shape {tuple(matrix.shape)}; expected (K, K), one row and one column "
            "per variable."
        )
    return matrix


def as_symmetric(value: Any, what: str, definite: bool = False) -> Tensor:
    """A symmetric positive (semi-)definite K×K matrix, to the rounding of the type it came in."""
    matrix = as_square(value, what)
    check_semidefinite(matrix, what, definite, _rounding(value))
    return (matrix + matrix.mT) / 2


def _rounding(value: Any) -> float:
    """How far off a matrix may be for its type: float64 unless it came in a smaller one."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return max(1e-12, 32 * torch.finfo(value.dtype).eps)
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
        return max(1e-12, 32 * float(np.finfo(value.dtype).eps))
    return 1e-12


def check_semidefinite(
    matrix: Tensor, what: str, definite: bool = False, rounding: float = 1e-12
) -> None:
    """Symmetric, and positive semi-definite (definite) to rounding."""
    scale = float(matrix.abs().max())
    asymmetry = float((matrix - matrix.mT).abs().max())
    kind = "definite" if definite else "semi-definite"
    if asymmetry > rounding * scale:
        raise ValueError(
            f"{what} is not symmetric: |{what} − {what}ᵀ| reaches {asymmetry:g} in "
            f"{matrix.tolist()}. Expected a symmetric positive {kind} matrix; use "
            f"({what} + {what}ᵀ)/2 if that is what you mean."
        )
    smallest = float(torch.linalg.eigvalsh(matrix)[0])
    bound = 1e-12 * scale if definite else -rounding * scale
    if smallest < bound or (definite and smallest <= 0):
        raise ValueError(
            f"{what} has the eigenvalue {smallest:g} in {matrix.tolist()}; expected a positive "
            f"{kind} matrix. {what} = M Mᵀ is one for any M"
            + (" of full rank." if definite else ".")
        )


def check_stationary(Q: Tensor, D: Tensor, S: Tensor) -> None:
    """Sizes that fit, Q skew, and N(0, S⁻¹) the only stationary law."""
    K = Q.shape[0]
    for name, matrix in (("D", D), ("S", S)):
        if matrix.shape != Q.shape:
            raise ValueError(
                f"Q is {K}×{K} and {name} is {matrix.shape[0]}×{matrix.shape[1]}; expected one "
                "size, K×K for K variables."
            )
    symmetric = float((Q + Q.mT).abs().max())
    if symmetric > 1e-12 * float(Q.abs().max()):
        raise ValueError(
            f"Q is not skew-symmetric: |Q + Qᵀ| reaches {symmetric:g} in {Q.tolist()}. Expected "
            "Qᵀ = −Q; use Q̃ − Q̃ᵀ of any matrix Q̃, and put the symmetric part into D."
        )
    # In the coordinates √S y the drift is −(Q' + D') with Q' skew, D' ≥ 0: no eigenvalue may
    # have a real part of zero, else a direction is never damped and the prior never reached.
    values, vectors = torch.linalg.eig((Q + D) @ S)
    slowest = int(values.real.argmin())
    if float(values.real[slowest]) > 1e-13 * float(values.abs().max()):
        return
    frozen = [i for i in range(K) if not bool((Q + D)[i].any())]
    if frozen:
        raise ValueError(
            f"variable {frozen[0]} is frozen: row {frozen[0]} of Q + D is zero in "
            f"{(Q + D).tolist()}, so it never moves and N(0, S⁻¹) is not the only stationary law. "
            "Expected Q + D of full rank; couple the variable through Q or give it noise in D."
        )
    direction = [round(float(v), 3) for v in vectors[:, slowest].abs()]
    raise ValueError(
        f"the direction with weights {direction} on the variables is never damped (an eigenvalue "
        f"of (Q + D)S is {complex(values[slowest]):.3g}), so N(0, S⁻¹) is not the only stationary "
        "law. Expected noise to reach every variable through Q; add noise in D or couple it in Q."
    )
