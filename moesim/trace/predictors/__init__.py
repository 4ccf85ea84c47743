"""Predictions of routing, and the routing to come for oracles."""

from moesim.trace.predictors.sources import Coactivation, Frequency, Oracle, Predictor, RecordedSignal, Synthetic, make_predictor

__all__ = [
    "Coactivation",
    "Frequency",
    "Oracle",
    "Predictor",
    "RecordedSignal",
    "Synthetic",
    "make_predictor",
]
