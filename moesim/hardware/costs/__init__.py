"""Costs on a machine, in integer nanoseconds."""

from moesim.hardware.costs.model import CostModel
from moesim.hardware.costs.provenance import NO_CURVE

__all__ = ["NO_CURVE", "CostModel"]
