"""The few numbers that say whether a process is worth a GPU.

Information is in nats per data coordinate unless the name says bits. Times are those of the
process, and None where the thing does not happen between the first time and the horizon.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ornstein.diagnostics import Diagnosis

BIN = 2 / 255  # an 8-bit pixel, with data in [−1, 1]
SHARP = BIN / 6  # the standard error at which a pixel's value is still certain
FORGOTTEN = 0.01
FLOOR = 1e-16  # below it a Kullback–Leibler divergence in float64 is rounding


@dataclass(frozen=True)
class Summary:
    """One row of the table."""

    name: str
    n_vars: int
    commutes: bool | None  # None: given as functions, there are no two rates to compare
    slowest_rate: float | None
    prior_gap_bits: float  # at the horizon, bits per dimension
    sharp_until: float | None  # x is known to a sixth of an 8-bit pixel bin; None: no such time
    forgotten_at: float | None  # 99 % of any start is gone
    auxiliary_information: float  # the most that v_s ever tells about x
    condition: float  # the worst one of the factor L

    def gap_text(self, form: str = ".1e") -> str:
        """The prior gap as text that promises no more than float64 can know."""
        if self.prior_gap_bits < FLOOR:
            return f"< {FLOOR:.0e}"
        return format(self.prior_gap_bits, form)


def summarise(diagnosis: Diagnosis) -> Summary:
    """Read the figures off the curves."""
    return Summary(
        name=diagnosis.name,
        n_vars=diagnosis.n_vars,
        commutes=diagnosis.commutes,
        slowest_rate=diagnosis.slowest_rate,
        prior_gap_bits=diagnosis.final_gap / math.log(2),
        sharp_until=diagnosis.time_of_noise(SHARP),
        forgotten_at=diagnosis.forgotten_at(FORGOTTEN),
        auxiliary_information=float(diagnosis.auxiliary_information.max()),
        condition=float(diagnosis.condition.max()),
    )


def numbered(names: Sequence[str]) -> list[str]:
    """The same names, those that are repeated with a number."""
    repeated = {name for name, count in Counter(names).items() if count > 1}
    seen: Counter[str] = Counter()
    told = []
    for name in names:
        seen[name] += 1
        told.append(f"{name} ({seen[name]})" if name in repeated else name)
    return told


def curves(diagnosis: Diagnosis) -> dict[str, list[float]]:
    """What the pictures show, as lists for a JSON file."""
    named = {
        "times": diagnosis.times,
        "snr": diagnosis.snr,
        "prior_gap": diagnosis.prior_gap,
        "distance": diagnosis.distance,
        "memory": diagnosis.memory,
        "auxiliary_information": diagnosis.auxiliary_information,
        "condition": diagnosis.condition,
    }
    return {
        name: torch.nan_to_num(curve.detach().cpu(), posinf=1e300, neginf=-1e300).tolist()
        for name, curve in named.items()
    }
