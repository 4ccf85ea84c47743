"""Options of kinds of figures as they are typed: ``layers=15,16``, ``smooth=9``, ``phase=prefill``."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from moesim.errors import ConfigError, unknown_name
from moesim.plots.catalogue import kind_of, options_of
from moesim.plots.kinds import Kind


def read_options(name: str, given: Mapping[str, str], elsewhere: Collection[str] = ()) -> dict[str, Any]:
    """Read the options that a kind takes, and refuse others, but for those of kinds that are drawn with it."""
    kind = kind_of(name)
    known = options_of(kind)
    for option in given:
        if option not in known and option not in elsewhere:
            uses = ", ".join(known) or "none"
            raise ConfigError(f"plot {name}: expected no option {option}, which changes nothing in it; its options: {uses}")
    return {option: parse_option(kind, option, text) for option, text in given.items() if option in known}


def parse_option(kind: Kind[...], name: str, text: str) -> Any:
    """Read the value of an option by what the kind takes.

    >>> from moesim.plots.catalogue import KINDS
    >>> parse_option(KINDS["gantt"], "layers", "15,16"), parse_option(KINDS["hit_rate_by_token"], "smooth", "9")
    ([15, 16], 9)
    """
    known = {key: str(p.annotation) for key, p in list(inspect.signature(kind).parameters.items())[1:]}
    if name not in known:
        raise ConfigError(f"plot: {unknown_name('option', name, known)}")
    takes = known[name]
    parts = [part.strip() for part in text.split(",")]
    if "Sequence[int]" in takes:
        return [_whole(name, part) for part in parts]
    if "Sequence[str]" in takes:
        return parts
    return _whole(name, text) if takes.startswith("int") else text


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"plot: {name}: expected a whole number, got '{text}'") from None
