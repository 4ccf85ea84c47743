"""Which functions have a native twin in a run: those for which the engine's view brings one.

The view of the native engine has compiled twins of some functions of this package, by their names; that of the SimPy engine has
none. So a run on SimPy, also the one that ``--verify`` plays beside a native one, calls the Python references only. A twin takes
all its arguments by position. It answers for integers from 0 to 2**50 and lists of up to 1024 experts, and asks its reference about
all else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from moesim.policy import View

Function = TypeVar("Function", bound=Callable[..., object])


def twin(reference: Function, view: View) -> Function:
    """Return what to call in a run instead of a function: its twin, or itself where the engine brings none."""
    return cast(Function, getattr(getattr(view, "algorithms", None), reference.__name__, reference))
