"""Which repeats drew other requests: only those are independent, so that means and intervals are over draws, not over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd

from moesim.core.student import student_t

DRAW: Final = "draw"
"""Column made of the trace and the requests drawn from it; rows in which it is equal are one draw."""
_DRAWN: Final = "requests_drawn"
_CONFIDENCE: Final = 0.95


def with_draws(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the column `DRAW` to result rows that say which requests were drawn; None in rows that do not."""
    if DRAW in frame or _DRAWN not in frame or "trace" not in frame:
        return frame
    drawn = zip(frame["trace"].tolist(), frame[_DRAWN].tolist(), strict=True)
    named = [f"{trace}: {requests}" if isinstance(requests, str) else None for trace, requests in drawn]
    return frame.assign(**{DRAW: pd.Series(named, frame.index, dtype=object)})


def over_draws(part: pd.DataFrame, values: Sequence[float]) -> list[float]:
    """Average the values of rows that are one draw."""
    names = part[DRAW].tolist() if DRAW in part else [None] * len(part)
    found: dict[object, list[float]] = {}
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        found.setdefault(name if isinstance(name, str) else i, []).append(value)
    return [float(np.mean(values)) for values in found.values()]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Give the mean and its 95 % interval by Student's t; nan for the bounds of one value.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return mean, math.nan, math.nan
    half = student_t(_CONFIDENCE, n) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half
