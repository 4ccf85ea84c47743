"""What each policy looks like: no two share a colour, or marker and dash; of 20, no two share a hatch."""

from __future__ import annotations

from collections.abc import Sequence
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


def looks_of(policies: Sequence[str]) -> dict[str, Look]:
    """Give every policy its look, the same in all figures of one set of policies.

    >>> looks_of(["lru", "belady"])["belady"]
    Look(colour='#000000', hatch='', marker='*', dash='-')
    """
    others = [policy for policy in policies if policy != OPTIMUM]
    most = len(SERIES)
    if len(others) > most:
        raise ConfigError(f"plot: expected at most {most} policies in one figure, got {len(others)}; choose some with --policies")
    looks = {policy: look(i) for i, policy in enumerate(others)}
    return {policy: looks.get(policy, Look(BLACK, "", "*", "-")) for policy in policies}


def look(number: int) -> Look:
    """Give the look of the n-th series, from 0."""
    marker, dash = number % len(_MARKERS), number % len(_DASHES)  # lengths without common factor: 36 pairs
    return Look(SERIES[number], _HATCHES[number % len(_HATCHES)], _MARKERS[marker], _DASHES[dash])
