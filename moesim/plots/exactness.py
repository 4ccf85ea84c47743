"""Marks of policies that are not exact: a star at the name, and one line that says what it means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import pandas as pd

from moesim.metrics.fresh import fresh_percent
from moesim.metrics.fresh import is_exact as all_fresh

FRESH: Final = "fidelity_fresh_decode"
"""Column of the share of decoding's gate mass that was computed as routed, on fresh inputs."""
NOT_EXACT: Final = "* not exact"
"""Beginning of the line that says what a star means; it is in every figure that has one, also on paper."""


def is_exact(fresh: float) -> bool:
    """Whether all of the decoding was computed as routed, as far as is known."""
    return math.isnan(fresh) or all_fresh(fresh)


def star(fresh: float) -> str:
    """Mark what is not exact.

    >>> star(0.99999), star(1.0)
    ('*', '')
    """
    return "" if is_exact(fresh) else "*"


def inexact(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Give the least and the largest share computed as routed of each policy of result rows that is not exact somewhere."""
    if FRESH not in frame:
        return {}
    shares = pd.to_numeric(frame[FRESH], errors="coerce")
    ends = {str(name): (float(part.min()), float(part.max())) for name, part in shares.groupby(frame["policy"], sort=False)}
    return {name: (low, high) for name, (low, high) in ends.items() if not is_exact(low)}


def meaning(shares: Mapping[str, tuple[float, float]]) -> str:
    """Say what a star means, with the shares of the policies that have one; nothing without any.

    >>> meaning({"a": (0.5, 0.5), "b": (0.25, 0.99999)}).partition(";")[0]
    "* not exact, share of decoding's gate weight computed as routed: a 50 %, b 25 to 99.9 %"
    """
    told = []
    for name, (low, high) in shares.items():
        ends = list(dict.fromkeys(f"{fresh_percent(share):g}" for share in (low, high) if not math.isnan(share)))
        told.append(f"{name} {' to '.join(ends)} %" if ends else f"{name} unknown")
    if not told:
        return ""
    return (
        f"{NOT_EXACT}, share of decoding's gate weight computed as routed: {', '.join(told)}; the rest is approximated, and the "
        "replayed routing ignores it"
    )
