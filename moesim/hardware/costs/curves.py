"""Times from cost curves: exact, in whole nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from moesim.core.units import NS_PER_S, ceil_div
from moesim.hardware.types import CostCurve, Transfer


def curve_ns(curve: CostCurve, n_rows: int) -> int:
    """Evaluate a curve.

    ``linear``: base + slope n. ``flat_linear``: base + slope max(0, n - knee). ``points``: linear interpolation on
    linear axes, since interpolating logarithms is wrong for a cost that is a sum.
    """
    if curve.form == "points":
        return points_ns(curve.points, n_rows)
    if curve.form == "linear":
        us = curve.base_us + curve.slope_us * n_rows
    else:
        us = curve.base_us + curve.slope_us * max(0, n_rows - curve.knee)
    return _nearest_ns(us)


def points_ns(points: Sequence[tuple[int, Fraction]], size: int) -> int:
    """Interpolate between points of (size, us) on linear axes; outside them the nearest segment is continued."""
    upper = next((i for i, (n, _) in enumerate(points) if n >= size), len(points) - 1)
    upper = max(upper, 1)
    (n0, us0), (n1, us1) = points[upper - 1], points[upper]
    return _nearest_ns(us0 + (us1 - us0) * (size - n0) / (n1 - n0))


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
