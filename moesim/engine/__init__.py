"""The engine: devices, links, memory and time. It knows no policy, no phase and no model by name.

Its ten rules are in ``docs/reference/engine.md``, with the file of each; ``tests/engine/test_rules_*.py`` have an exact timeline
for each. Begin with `entry`, `loop` and `state`: `state` and `machine` are plain data, all else are functions over them.
`native` is the same engine in C++, file by file; it leaves the same records.
"""

from moesim.engine.entry import chosen, empty_view, simulate
from moesim.engine.state import EngineOptions

__all__ = ["EngineOptions", "chosen", "empty_view", "simulate"]
