"""What can be said about routing in advance, and the routing to come for oracles."""

from moesim.trace.predictors.contract import Predictor
from moesim.trace.predictors.recorded import Oracle, RecordedSignal, make_predictor
from moesim.trace.predictors.statistical import Coactivation, Frequency
from moesim.trace.predictors.synthetic import Synthetic

__all__ = [
    "Coactivation",
    "Frequency",
    "Oracle",
    "Predictor",
    "RecordedSignal",
    "Synthetic",
    "make_predictor",
]
