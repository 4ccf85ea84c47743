"""Numbers and curves of a hardware profile from samples, each with how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression

from moesim.live.profiler.fits import medians, pair_rates
from moesim.live.profiler.needs import Wanted

_FALL = 0.5  # the format takes no time of an expert below this share of an earlier one


@dataclass(frozen=True)
class Facts:
    """What a profile says besides times."""

    # name, date: name of the first profile, and the day of the measurement
    name: str
    date: str
    machine: Mapping[str, str]  # what was measured, in words
    memory_bytes: Mapping[str, int]  # capacity of each place of the layout
    notes: Sequence[str] = ()  # what is not as might be expected


class Numbers:
    """The medians of a measurement, and numbers and curves of them with their proof."""

    def __init__(self, samples: pd.DataFrame, wanted: Sequence[Wanted], facts: Facts) -> None:
        self.table = medians(samples)
        self.pairs = pair_rates(samples)
        self.wanted, self.facts = wanted, facts

    # ------------------------------------------------------------------------------------------------------------ numbers

    def points_at(self, kind: str, device: str, **which: Any) -> pd.DataFrame:
        """Medians of a curve by size; empty if it was not measured."""
        rows = self.table[(self.table["kind"] == kind) & (self.table["device"] == device)]
        for column, value in which.items():
            rows = rows[rows[column].isna()] if value is None else rows[rows[column] == value]
        return rows.sort_values("size")

    def measured(self, value: Any, rows: pd.DataFrame, method: str) -> dict[str, Any]:
        """Write a number with its proof."""
        return {
            "value": value, "source": "measured", "date": self.facts.date, "method": method,
            "repeats": int(rows["n"].min()), "spread": _spread(rows),
        }  # fmt: skip

    def read_off(self, value: Any, method: str) -> dict[str, Any]:
        """Write what the system says, once."""
        return {
            "value": value, "source": "measured", "date": self.facts.date, "method": method, "repeats": 1, "spread": "none",
        }  # fmt: skip

    def curve(self, sizes: Any, times: Any, rows: pd.DataFrame, method: str) -> dict[str, Any]:
        """Write a curve of points."""
        us = np.maximum(np.asarray(times, dtype=float), 0)
        if (us < _FALL * np.maximum.accumulate(us)).any():
            us, method = monotone(us), f"{method}; made monotone, since times fell to less than half"
        points = [[int(n), us_of(t)] for n, t in zip(sizes, us, strict=True)]
        return {"form": "points", "range": [points[0][0], points[-1][0]], "points": self.measured(points, rows, method)}

    def transfer(self, rows: pd.DataFrame, times: Any, method: str) -> dict[str, Any]:
        rising = monotone(times)
        how = "medians" if np.array_equal(times, rising) else "medians, made monotone"
        points = [[int(n), us_of(us)] for n, us in zip(rows["size"], rising, strict=True)]
        return {"points": self.measured(points, rows, f"{method}; {how}")}


def us_of(value: float) -> float | int:
    """Round a time to nanoseconds."""
    rounded = round(float(value), 3)
    return int(rounded) if rounded.is_integer() else rounded


def monotone(times: Any) -> Any:
    """Find the nearest times that do not fall, those of equal relative distance weighing the same."""
    weights = 1 / np.maximum(times, 1e-3) ** 2
    found: Any = np.asarray(isotonic_regression(times, weights=weights).x)
    return times if (np.diff(times) >= 0).all() else found


def _spread(rows: pd.DataFrame) -> str:
    """Say how far repeats lie apart."""
    spread = 100 * rows["spread"].to_numpy(float)
    if len(rows) == 1:
        return f"interquartile range / median {spread[0]:.2g} %"
    at = int(rows["size"].iloc[int(spread.argmax())])
    unit = str(rows["unit"].iloc[0])
    return f"interquartile range / median {np.median(spread):.2g} % in the middle, at most {spread.max():.2g} % (at {at} {unit})"
