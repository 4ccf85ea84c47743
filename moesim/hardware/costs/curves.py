"""Times from cost curves: exact, in whole nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from moesim.core.units import NS_PER_S, ceil_div
from moesim.hardware.types import CostCurve, Transfer, between


def curve_ns(curve: CostCurve, n_rows: int) -> int:
    """Evaluate a curve."""
    return _nearest_ns(curve.us(n_rows))


def points_ns(points: Sequence[tuple[int, Fraction]], size: int) -> int:
    """Evaluate points of (size, us)."""
    return _nearest_ns(between(points, size))


def copy_ns(curve: Transfer, n_bytes: int) -> int:
    """Evaluate the time of a copy: latency + bytes / rate, rounded up, or measured points, continued outside their range."""
    if curve.points:
        return points_ns(curve.points, n_bytes)
    return round(curve.latency_us * 1000) + ceil_div(n_bytes * NS_PER_S, curve.bytes_per_s)


def _nearest_ns(us: Fraction) -> int:
    return max(0, math.floor(us * 1000 + Fraction(1, 2)))


def covers(curve: CostCurve, n_rows: int) -> bool:
    """Tell whether the curve holds for this number of rows."""
    return curve.first <= n_rows <= curve.last


def nearest(curves: Sequence[CostCurve], n_rows: int) -> CostCurve:
    """Choose the curve to continue outside of all ranges: the one whose range ends nearest."""
    return min(curves, key=lambda curve: max(curve.first - n_rows, n_rows - curve.last))


def range_text(curves: Sequence[CostCurve]) -> str:
    """Write the ranges of some curves for a message, such as ``1..64``."""
    return ", ".join(f"{curve.first}..{curve.last}" for curve in curves)
