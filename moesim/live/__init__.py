"""Live replay: a policy's decisions run for real, on the real clock.

The engine is the simulator's: the same events, view, rules and records. Only computing, copies and activations are real.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesim.live.carrier import replay
    from moesim.live.machine import LiveMachine

__all__ = ["LiveMachine", "replay"]

_HOMES = {"LiveMachine": "moesim.live.machine", "replay": "moesim.live.carrier"}


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch on first use: the command line reads profiles without it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
