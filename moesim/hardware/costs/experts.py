"""Time of an expert that is linear in its rows, one case of several: `CostModel.expert_ns` in model.py chooses."""

from __future__ import annotations

import math
from fractions import Fraction

from moesim.core.units import NS_PER_S
from moesim.hardware.types import ExpertCost


def linear_ns(cost: ExpertCost, n_bytes: int, operations: int, n_rows: int, flops: int = 0) -> int:
    """Evaluate the time of one expert.

    t(n) = per_expert + max(bytes / read_rate, operations / flops) + (n - 1) (per_row + operations / few_row_rate) for n up to the
    crossover c, and t(c) + (n - c) operations / many_row_rate beyond it. Reading the weights hides the first row's operations,
    unless unpacking few bits takes longer than reading them. Kernels made for one row read or unpack the weights again for each
    further row, so that these cost far more than the processor's peak says; kernels made for many rows take over at the
    crossover. The time is continuous there, and it never falls.

    >>> cost = ExpertCost(Fraction(65), Fraction(63), 79 * 10**9, 90 * 10**9)
    >>> [linear_ns(cost, 99_090_432, 352_321_536, n) for n in (1, 2)]
    [1319310, 5296993]
    """
    crossover = cost.crossover_rows or n_rows
    few, many = min(n_rows, crossover) - 1, max(0, n_rows - crossover)
    ns = (cost.per_expert_us + few * cost.per_row_us) * 1000
    reading = Fraction(n_bytes * NS_PER_S, cost.read_bytes_per_s)
    ns += max(reading, Fraction(operations * NS_PER_S, flops)) if flops else reading
    ns += Fraction(few * operations * NS_PER_S, cost.few_row_flops)
    if many:
        ns += Fraction(many * operations * NS_PER_S, cost.many_row_flops)
    return math.ceil(ns)
