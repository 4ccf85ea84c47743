"""What each policy looks like: no two share a colour, or marker and dash; of 20, no two share a hatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

from moesim.core.colours import BLACK, SERIES
from moesim.errors import ConfigError
from moesim.plots.style import OPTIMUM

_MARKERS: Final = "osD^vPX<>"
_DASHES: Final = ("-", "--", "-.", ":")
_HATCHES: Final = (
    "", "////", "\\\\\\\\", "....", "----", "xxxx", "oo", "||||", "++", "**",
    "///...", "\\\\\\...", "---...", "///oo", "\\\\\\oo", "|||...", "///---", "\\\\\\|||", "OO", "xxx...",
)  # fmt: skip


class Look(NamedTuple):
    """Colour, and what tells policies apart where there is none."""

    colour: str
    hatch: str
    marker: str
    dash: str


_all: ContextVar[Sequence[str]] = ContextVar("all", default=())


@contextmanager
def drawn_among(policies: Sequence[str]) -> Iterator[None]:
    """Draw the figures of a block with the looks that policies have among these, all of a result; a block within keeps them."""
    token = _all.set(_all.get() or policies)
    try:
        yield
    finally:
        _all.reset(token)


def looks_of(policies: Sequence[str]) -> dict[str, Look]:
    """Give every policy its look: that of its place in the whole result, whichever others are in the figure.

    A result may have more policies than there are colours. One that comes too late for its own has one that the figure has left.

    >>> with drawn_among(["fifo", "lru", "belady"]):
    ...     looks_of(["lru"]) == {"lru": look(1)}, looks_of(["lru", "belady"])["belady"]
    (True, Look(colour='#000000', hatch='', marker='*', dash='-'))
    """
    others = [policy for policy in policies if policy != OPTIMUM]
    most = len(SERIES)
    if len(others) > most:
        raise ConfigError(f"plot: expected at most {most} policies in one figure, got {len(others)}; choose some with --policies")
    known = [policy for policy in dict.fromkeys([*_all.get(), *policies]) if policy != OPTIMUM]
    own = {policy: place for place, policy in enumerate(known[:most]) if policy in others}
    left = (place for place in range(most) if place not in own.values())
    looks = {policy: look(own[policy] if policy in own else next(left)) for policy in others}
    return {policy: looks.get(policy, Look(BLACK, "", "*", "-")) for policy in policies}


def look(number: int) -> Look:
    """Give the look of the n-th series, from 0."""
    marker, dash = number % len(_MARKERS), number % len(_DASHES)  # lengths without common factor: 36 pairs
    return Look(SERIES[number], _HATCHES[number % len(_HATCHES)], _MARKERS[marker], _DASHES[dash])
