"""How far means of rows reach over the intervals of the profile's numbers, where an experiment had ``intervals: true``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import mean
from typing import Final

import pandas as pd

from moesim.plots.means import over_draws
from moesim.plots.rows import varying

OVER: Final = " % over "
"""In notes that say how far a run moves over an interval, before the number's name."""
_OVER: Final = re.compile(rf"{OVER}(.+?)(?=; |, |$)")


def with_ends(data: pd.DataFrame, frame: pd.DataFrame, by: Sequence[str], metric: str) -> pd.DataFrame:
    """Add the least and the most of a metric to its means; nan where a row has none, or the bar is a mean over settings."""
    columns = [f"{metric}_{end}" for end in ("least", "most")]
    if not all(name in frame and frame[name].notna().any() for name in columns):
        return data
    frame = frame[pd.to_numeric(frame[metric], errors="coerce").notna()]
    ends = [_ends(part, columns) for _, part in frame.groupby(list(by), sort=False, dropna=False)]  # in the order of the means
    return data.assign(least=[least for least, _ in ends], most=[most for _, most in ends])


def _ends(part: pd.DataFrame, columns: Sequence[str]) -> tuple[float, float]:
    if part[list(columns)].isna().any(axis=None) or (len(part) > 1 and varying(part)):
        return math.nan, math.nan
    least, most = (mean(over_draws(part, part[name].astype(float).tolist())) for name in columns)
    return least, most


def not_drawn(frame: pd.DataFrame, why: str = "`decode_speed` draws those of decoding") -> str:
    """Say in a figure without them that runs were repeated over the intervals of the profile; empty where none was."""
    varied = any(frame[name].notna().any() for name in frame.columns.astype(str) if name.endswith("_least"))
    return f"Intervals of the profile are not drawn: {why}." if varied else ""


def varied_numbers(frame: pd.DataFrame, *, power: bool) -> list[str]:
    """List the numbers and intervals over which runs were repeated, as their notes name them; watts only if asked for."""
    notes = frame["notes"].dropna().astype(str).tolist() if "notes" in frame else []
    found = dict.fromkeys(number for text in notes for number in _OVER.findall(text))
    return [number for number in found if power or not number.partition(" ")[0].endswith("_w")]
