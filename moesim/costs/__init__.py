"""What everything takes on a machine, in integer nanoseconds."""

from moesim.costs.model import (
    CostModel,
)

__all__ = [
    "CostModel",
]
