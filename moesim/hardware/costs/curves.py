"""Exact times of curves, constants linear in rows, and rooflines, in whole nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from moesim.core.limits import COST_NS
from moesim.core.units import NS_PER_S, ceil_div
from moesim.errors import HardwareError
from moesim.hardware.types import CostCurve, Device, ExpertCost, Transfer, between


def curve_ns(curve: CostCurve, n_rows: int) -> int:
    """Evaluate a curve."""
    return _nearest_ns(curve.us(n_rows))


def points_ns(points: Sequence[tuple[int, Fraction]], size: int) -> int:
    """Evaluate points of (size, us)."""
    return _nearest_ns(between(points, size))


def copy_ns(curve: Transfer, n_bytes: int) -> int:
    """Evaluate a copy: latency + bytes / rate, rounded up, or points, continued at their ends."""
    if curve.points:
        return points_ns(curve.points, n_bytes)
    return round(curve.latency_us * 1000) + ceil_div(n_bytes * NS_PER_S, curve.bytes_per_s)


def _nearest_ns(us: Fraction) -> int:
    return max(0, math.floor(us * 1000 + Fraction(1, 2)))


def covers(curve: CostCurve, n_rows: int) -> bool:
    """Whether the curve holds for this number of rows."""
    return curve.first <= n_rows <= curve.last


def nearest(curves: Sequence[CostCurve], n_rows: int) -> CostCurve:
    """Choose the curve to continue outside of all ranges: the one that ends nearest."""
    return min(curves, key=lambda curve: max(curve.first - n_rows, n_rows - curve.last))


def range_text(curves: Sequence[CostCurve]) -> str:
    """Write the ranges of some curves for a message, such as ``1..64``."""
    return ", ".join(f"{curve.first}..{curve.last}" for curve in curves)


def linear_ns(cost: ExpertCost, n_bytes: int, operations: int, n_rows: int, flops: int = 0) -> int:
    """Evaluate the time of one expert.

    t(n) = per_expert + max(bytes / read_rate, operations / flops) + (n - 1) (per_row + operations / few_row_rate) for n up to
    the crossover c, and t(c) + (n - c) operations / many_row_rate beyond it. Reading hides the first row's operations, unless
    unpacking few bits takes longer. Kernels for one row read or unpack the weights again for each further row; kernels for many
    rows take over at the crossover. The time is continuous there, and never falls.

    >>> cost = ExpertCost(Fraction(65), Fraction(63), 79 * 10**9, 90 * 10**9)
    >>> [linear_ns(cost, 99_090_432, 352_321_536, n) for n in (1, 2)]
    [1319310, 5296993]
    """
    crossover = cost.crossover_rows or n_rows
    few, many = min(n_rows, crossover) - 1, max(0, n_rows - crossover)
    ns = (cost.per_expert_us + few * cost.per_row_us) * 1000
    reading = cost.reading_s(n_bytes) * NS_PER_S
    ns += max(reading, Fraction(operations * NS_PER_S, flops)) if flops else reading
    ns += Fraction(few * operations * NS_PER_S, cost.few_row_flops)
    if many:
        ns += Fraction(many * operations * NS_PER_S, cost.many_row_flops)
    return math.ceil(ns)


class Roofline:
    """Time of a part on a device: launch + max(bytes / rate, operations / rate, other launches)."""

    # Launches run ahead of the device: they hide behind long kernels and dominate short ones.

    __slots__ = ("first_ns", "floor_ns", "flops", "place", "rate")

    def __init__(self, device: Device, launches: int, place: str, chain_us: Fraction | None = None) -> None:
        self.place = place
        counted = chain_us is not None
        self.first_ns = round(chain_us * 1000) if chain_us is not None else round(device.launch_us * 1000) if launches else 0
        self.floor_ns = 0 if counted else round(device.launch_us * 1000 * max(0, launches - 1))
        self.rate = device.memory_bytes_per_s
        self.flops = device.flops

    def ns(self, n_bytes: int, operations: int) -> int:
        reading = ceil_div(n_bytes * NS_PER_S, self.rate)
        return within_a_day(self.first_ns + max(reading, ceil_div(operations * NS_PER_S, self.flops), self.floor_ns), self.place)


def within_a_day(ns: int, place: str) -> int:
    """Return a time, unless it is longer than any single task or copy."""
    if ns > COST_NS:
        raise HardwareError(
            f"{place}: expected at most a day for a single task or copy, got {ns / COST_NS:.3g} days; correct the rate or time "
            "there, or ask for less at once"
        )
    return ns
