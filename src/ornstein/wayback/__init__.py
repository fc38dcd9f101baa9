"""Learn the way back: the law of a solver's samples in closed form, and the process that suits it.

On Gaussian data every table solver is a linear map, so that the law of its samples is known without
a network (`sample_law`), differentiable in the process and the times; `learn_process` makes it as
close to the data's as a number of network evaluations allows.
"""

from ornstein.wayback.law import Metric, SampleLaw, sample_law
from ornstein.wayback.learning import LearnedWay, learn_process, learn_times
from ornstein.wayback.spectrum import Spectrum

__all__ = [
    "LearnedWay",
    "Metric",
    "SampleLaw",
    "Spectrum",
    "learn_process",
    "learn_times",
    "sample_law",
]
