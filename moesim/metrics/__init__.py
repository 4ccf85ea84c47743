"""Pure functions over the records of a run."""

from moesim.metrics.summary import (
    StepLike,
    Value,
    bytes_moved,
    counts,
    fidelity,
    fidelity_fresh_decode,
    summarise,
)

__all__ = [
    "StepLike",
    "Value",
    "bytes_moved",
    "counts",
    "fidelity",
    "fidelity_fresh_decode",
    "summarise",
]
