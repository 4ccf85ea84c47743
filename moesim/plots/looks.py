"""What each policy looks like: no two share colour and hatch, or colour and marker; what is alike in grey differs in hatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from moesim.core.colours import BLACK, SERIES
from moesim.errors import ConfigError
from moesim.plots.style import OPTIMUM

_MARKERS: Final = "osD^vPX<>"
_DASHES: Final = ("-", "--", "-.", ":")
_HATCHES: Final = (
    "", "////", "\\\\\\\\", "....", "----", "xxxx", "oo", "||||",
    "++", "**", "//..", "\\\\..", "--..", "//oo", "\\\\oo", "||..",
)  # fmt: skip
_SHIFT: Final = 4  # two colours this far apart in their order differ in lightness by 9 of 100 at least


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
    most = 2 * len(_HATCHES)
    if len(others) > most:
        raise ConfigError(f"plot: expected at most {most} policies in one figure, got {len(others)}; choose some with --policies")
    looks = {policy: look(i) for i, policy in enumerate(others)}
    return {policy: looks.get(policy, Look(BLACK, "", "*", "-")) for policy in policies}


def look(number: int) -> Look:
    """Give the look of the n-th series, from 0."""
    cycle, place = divmod(number, len(SERIES))
    hatch = (place + _SHIFT * (cycle % 2)) % len(SERIES) + len(SERIES) * (cycle // 2)
    dash = _DASHES[(number + cycle) % len(_DASHES)]
    return Look(SERIES[place], _HATCHES[hatch], _MARKERS[number % len(_MARKERS)], dash)
