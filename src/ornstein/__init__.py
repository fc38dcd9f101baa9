"""ornstein: multivariate diffusion models with any linear noising process."""

from ornstein import adapters, data, networks
from ornstein.diagnostics import Diagnosis, diagnose
from ornstein.diffusion import Diffusion, LinearSDE
from ornstein.draws import Counted, Draws, Generated
from ornstein.evaluation import Curve, Evaluation, evaluate
from ornstein.likelihood import Continuous, Discrete, Likelihood, Tweedie
from ornstein.objectives import elbo, mism, noise_prediction, score_matching
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
from ornstein.sampling import (
    Ancestral,
    EulerMaruyama,
    Exponential,
    SamplingStep,
    Solver,
    sample,
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
from ornstein.score import ScoreModel
from ornstein.terms import Bound
from ornstein.times import Adaptive, Importance, Information, LogSNR, Times, Uniform
from ornstein.training import Objective, Optimiser, Step, Training, Watch, fit
from ornstein.transition import Transition
from ornstein.truncation import FixedTime, NoiseLevel

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Adaptive",
    "Ancestral",
    "Bound",
    "Constant",
    "Continuous",
    "Cosine",
    "Counted",
    "Curve",
    "Diagnosis",
    "Diffusion",
    "Discrete",
    "Draws",
    "EulerMaruyama",
    "Evaluation",
    "Exponential",
    "FixedTime",
    "FromIntegral",
    "FromRate",
    "Generated",
    "Importance",
    "Information",
    "Likelihood",
    "Linear",
    "LinearSDE",
    "LogSNR",
    "Monotone",
    "NoiseLevel",
    "Objective",
    "Optimiser",
    "Process",
    "SamplingStep",
    "Schedule",
    "ScoreModel",
    "Solver",
    "Step",
    "Times",
    "Training",
    "Transition",
    "Tweedie",
    "Uniform",
    "Watch",
    "adapters",
    "alda",
    "cld",
    "data",
    "diagnose",
    "elbo",
    "evaluate",
    "fit",
    "learned",
    "malda",
    "mism",
    "networks",
    "noise_prediction",
    "psld",
    "sample",
    "score_matching",
    "subvpsde",
    "vesde",
    "vpsde",
]
