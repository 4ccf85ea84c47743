"""Data of a figure that are worked out once for the picture, the table and the caption."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import pandas as pd

_P = ParamSpec("_P")
_T = TypeVar("_T")
_FOUND: Final[ContextVar[dict[Any, Any] | None]] = ContextVar("found", default=None)


@contextmanager
def worked_out_once() -> Iterator[None]:
    """Keep what functions under `once` return until the end; frames that they are given must not change meanwhile."""
    token = _FOUND.set({})
    try:
        yield
    finally:
        _FOUND.reset(token)


def once(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Call a function once for the same arguments while `worked_out_once` is on; nobody may change what it gives."""
    signature = inspect.signature(make)

    @wraps(make)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        found = _FOUND.get()
        if found is None:
            return make(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        key = (make, *(id(v) if isinstance(v, pd.DataFrame) else repr(v) for v in given.arguments.values()))  # not by all rows
        if key not in found:
            found[key] = make(*args, **kwargs), given  # with the arguments, so that no other frame gets their identity
        result: _T = found[key][0]
        return result

    return wrapper
