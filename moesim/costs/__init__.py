"""What everything takes on a machine, in integer nanoseconds."""

from moesim.costs.fitting import NO_CURVE
from moesim.costs.model import CostModel

__all__ = ["NO_CURVE", "CostModel"]
