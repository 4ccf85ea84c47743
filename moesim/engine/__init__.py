"""The engine: devices, links, memory and time; it knows no policy or model by name.

`state` and `memory` are plain data, all else are functions over them; read `entry`, `loop` and `state` first. Its ten rules
are in ``docs/reference/engine.md``, with an exact timeline for each in ``tests/engine/test_rules_*.py``; `native` is the same
engine in C++.
"""

from moesim.engine.entry import chosen, empty_view, simulate
from moesim.engine.state import EngineOptions

__all__ = ["EngineOptions", "chosen", "empty_view", "simulate"]
