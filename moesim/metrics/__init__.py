"""Pure functions over the records of a run."""

from moesim.metrics.fidelity import fidelity, fidelity_fresh_decode
from moesim.metrics.summary import StepLike, Summary, Value, counts, summarise
from moesim.metrics.traffic import bytes_moved

__all__ = ["StepLike", "Summary", "Value", "bytes_moved", "counts", "fidelity", "fidelity_fresh_decode", "summarise"]
