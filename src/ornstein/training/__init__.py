"""Training: the loop, its options, and the folder of a run.

`fit` trains a model that you built; `Experiment` describes a whole run, data and model included, in
typed options that a command line or a file can set.
"""

from ornstein.training.experiment import Experiment, preset
from ornstein.training.loop import fit
from ornstein.training.options import Objective, Optimiser, Training, Watch
from ornstein.training.step import Step
from ornstein.training.stopping import Diverged, Interrupted

__all__ = [
    "Diverged",
    "Experiment",
    "Interrupted",
    "Objective",
    "Optimiser",
    "Step",
    "Training",
    "Watch",
    "fit",
    "preset",
]
