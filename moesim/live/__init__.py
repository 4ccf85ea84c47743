"""Live replay: a policy's decisions carried out for real, on the clock of the wall.

The engine is the simulator's own: the same events, view, rules and records. Only what takes time is real: experts and dense
parts are computed on the devices, weights are copied over the links, activations cross between devices.
"""

from moesim.live.entry import replay
from moesim.live.machine import LiveMachine

__all__ = ["LiveMachine", "replay"]
