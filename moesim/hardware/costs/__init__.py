"""What everything takes on a machine, in integer nanoseconds."""

from moesim.hardware.costs.fitting import NO_CURVE
from moesim.hardware.costs.model import CostModel

__all__ = ["NO_CURVE", "CostModel"]
