"""Which functions of the metrics are called: the compiled twins, by the names of their references, where the native engine runs.

Without the native engine, and where SimPy's is forced, the references are called. A twin takes all its arguments by position, and
gives equal whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])


def twin(reference: Function) -> Function:
    """Return what to call instead of a function: its twin, or itself."""
    from moesim.engine.choice import chosen  # SimPy comes with the engine, and is not needed to read results

    if chosen() == "simpy":
        return reference
    from moesim.engine.native._native import metrics

    return cast(Function, getattr(metrics, reference.__name__))
