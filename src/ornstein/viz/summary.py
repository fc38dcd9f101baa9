"""The few numbers that say whether a process is worth a GPU.

Information is in nats per data coordinate unless the name says bits. Times are those of the
process, and None where the thing never happens before the horizon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ornstein.diagnostics import Diagnosis

BIN = 2 / 255  # an 8-bit pixel, with data in [−1, 1]
SHARP = BIN / 6  # the standard error at which a pixel's value is still certain
FORGOTTEN = 0.01


@dataclass(frozen=True)
class Summary:
    """One row of the table."""

    name: str
    n_vars: int
    commutes: bool | None  # None: given as functions, there are no two rates to compare
    slowest_rate: float | None
    prior_gap_bits: float  # at the horizon, bits per dimension
    sharp_until: float | None  # x is known to a sixth of an 8-bit pixel bin
    forgotten_at: float | None  # 99 % of any start is gone
    auxiliary_information: float  # the most that v_s ever tells about x
    condition: float  # the worst one of the factor L


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
