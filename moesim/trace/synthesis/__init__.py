"""Synthetic traces: routing of models too large to record, from fitted causes."""

from moesim.trace.synthesis.generate import synthesize
from moesim.trace.synthesis.parameter_set import ParameterSet, parameter_names, read_parameters

__all__ = ["ParameterSet", "parameter_names", "read_parameters", "synthesize"]
