"""The native engine: the ten rules in C++, file by file as in `moesim.engine`.

Python's setup makes the machine and places the weights; then the compiled module takes the run over and fills in the records.
"""

from __future__ import annotations

from importlib.util import find_spec

AVAILABLE = find_spec("moesim.engine.native._native") is not None
"""Whether the compiled module is there; a pure wheel, or a checkout without a C++ compiler, has none."""
