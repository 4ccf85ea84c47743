"""Arguments from Python that are of another type are refused in one line, before anything is done with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from typing import Any, Final, ParamSpec, TypeVar

from moesim.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


KINDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "flag": (lambda value: isinstance(value, bool), "True or False"),
    "count": (_is_count, "a whole number of at least 1"),
    "number": (_is_number, "a number"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "size": (lambda value: isinstance(value, str), "a text with a unit, such as '12GiB'"),
    "width": (lambda value: isinstance(value, str) or _is_number(value), "'column', 'page', 'slide', or a number of inches"),
    "path": (_is_path, "a path"),
    "experiment": (lambda value: _is_path(value) or isinstance(value, Mapping), "a path or a mapping"),
    "names": (_are_names, "a list of texts"),
    "mapping": (lambda value: isinstance(value, Mapping), "a mapping"),
    "overrides": (lambda value: isinstance(value, str | Mapping) or _are_names(value), "a mapping, or a list of 'key=value'"),
}
"""What an argument may be: a test, and words for it."""


def checked(place: str, **kinds: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check arguments of a function by `KINDS`; None is allowed where it is the default. Raises `ConfigError`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = signature(function)

        @wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> T:
            for name, value in known.bind(*arguments, **options).arguments.items():
                if name not in kinds or (value is None and known.parameters[name].default is None):
                    continue
                fits, words = KINDS[kinds[name]]
                if not fits(value):
                    raise ConfigError(f"{place}: {name}: expected {words}, got {value!r}; give one")
            return function(*arguments, **options)

        return call

    return decorate
