"""Likelihoods by the probability flow: exact densities at the truncation, a bound on the data's."""

from ornstein.ode.evaluating import Cost, OdeEvaluation, evaluate_ode
from ornstein.ode.likelihood import OdeBound, ode_likelihood
from ornstein.ode.volume import Path

__all__ = ["Cost", "OdeBound", "OdeEvaluation", "Path", "evaluate_ode", "ode_likelihood"]
