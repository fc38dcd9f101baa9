"""Sample quality: how near samples are to data, beside what new data of the same number is.

`measure` gives the Fréchet distance, kernel distance, precision and recall in the features of a
small classifier that is trained on the data's own labels, and the sliced Wasserstein distance of
the data itself. `inception` gives the features for FID and KID, through torch-fidelity.
"""

from ornstein.quality.classifier import Classifier, cached_as, classifier
from ornstein.quality.comparing import compare
from ornstein.quality.comparison import Comparison, LeftOut, Point
from ornstein.quality.costing import Cost, classifier_cost, cost, features_cost
from ornstein.quality.distances import (
    frechet,
    frechet_with_error,
    kernel_distance,
    precision_recall,
    sliced_wasserstein,
    sliced_wasserstein_with_error,
)
from ornstein.quality.features import Features, Raw, Scale
from ornstein.quality.fidelity import Inception, inception
from ornstein.quality.measuring import WORDS, Quality, measure
from ornstein.quality.referring import Against, Figures, Reference, usual_features

__all__ = [
    "WORDS",
    "Against",
    "Classifier",
    "Comparison",
    "Cost",
    "Features",
    "Figures",
    "Inception",
    "LeftOut",
    "Point",
    "Quality",
    "Raw",
    "Reference",
    "Scale",
    "cached_as",
    "classifier",
    "classifier_cost",
    "compare",
    "cost",
    "features_cost",
    "frechet",
    "frechet_with_error",
    "inception",
    "kernel_distance",
    "measure",
    "precision_recall",
    "sliced_wasserstein",
    "sliced_wasserstein_with_error",
    "usual_features",
]
