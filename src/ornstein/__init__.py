"""ornstein: multivariate diffusion models with any linear noising process."""

from ornstein.diagnostics import Diagnosis, diagnose
from ornstein.diffusion import Diffusion, LinearSDE
from ornstein.process import Process
from ornstein.processes import (
    PRESETS,
    alda,
    cld,
    learned,
    malda,
    psld,
    subvpsde,
    vesde,
    vpsde,
)
from ornstein.schedules import (
    Constant,
    Cosine,
    FromIntegral,
    FromRate,
    Linear,
    Monotone,
    Schedule,
)
from ornstein.transition import Transition

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Constant",
    "Cosine",
    "Diagnosis",
    "Diffusion",
    "FromIntegral",
    "FromRate",
    "Linear",
    "LinearSDE",
    "Monotone",
    "Process",
    "Schedule",
    "Transition",
    "alda",
    "cld",
    "diagnose",
    "learned",
    "malda",
    "psld",
    "subvpsde",
    "vesde",
    "vpsde",
]
