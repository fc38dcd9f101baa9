"""ornstein: multivariate diffusion models with any linear noising process."""

from ornstein import adapters, data, networks, quality
from ornstein.diagnostics import Diagnosis, diagnose
from ornstein.diffusion import Diffusion, LinearSDE
from ornstein.draws import Counted, Draws, Generated
from ornstein.evaluation import Curve, Evaluation, evaluate
from ornstein.likelihood import Continuous, Discrete, Likelihood, Tweedie
from ornstein.objectives import elbo, mism, noise_prediction, score_matching
from ornstein.ode import OdeBound, OdeEvaluation, evaluate_ode, ode_likelihood
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
    Heun,
    PredictorCorrector,
    ProbabilityFlow,
    SamplingStep,
    Solver,
    Splitting,
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
from ornstein.wayback import (
    LearnedWay,
    SampleLaw,
    Spectrum,
    learn_process,
    learn_times,
    sample_law,
)

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
    "Heun",
    "Importance",
    "Information",
    "LearnedWay",
    "Likelihood",
    "Linear",
    "LinearSDE",
    "LogSNR",
    "Monotone",
    "NoiseLevel",
    "Objective",
    "OdeBound",
    "OdeEvaluation",
    "Optimiser",
    "PredictorCorrector",
    "ProbabilityFlow",
    "Process",
    "SampleLaw",
    "SamplingStep",
    "Schedule",
    "ScoreModel",
    "Solver",
    "Spectrum",
    "Splitting",
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
    "evaluate_ode",
    "fit",
    "learn_process",
    "learn_times",
    "learned",
    "malda",
    "mism",
    "networks",
    "noise_prediction",
    "ode_likelihood",
    "psld",
    "quality",
    "sample",
    "sample_law",
    "score_matching",
    "subvpsde",
    "vesde",
    "vpsde",
]
