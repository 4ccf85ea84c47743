"""Student's t, geometric means with their intervals, and straight lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@cache
def student_t(level: float, n: int) -> float:
    """Return the factor of a standard error for a two-sided interval of a mean of n >= 2.

    >>> round(student_t(0.95, 5), 3)
    2.776
    """
    from scipy.special import stdtrit  # a third of a second to import, where scipy.stats takes two

    return float(stdtrit(n - 1, (1 + level) / 2))


@dataclass(frozen=True)
class Mean:
    """A geometric mean of speeds, or of ratios."""

    value: float  # the mean
    factor: float  # the interval goes from value / factor to value * factor; 1 if there is one value only, and nothing is known
    n: int  # values


def mean(values: Sequence[float], level: float) -> Mean:
    """Average positive numbers, on the scale of their logarithms.

    >>> one = mean([10.0, 10.0, 10.0], 0.8)
    >>> round(one.value, 6), one.factor, one.n
    (10.0, 1.0, 3)
    """
    logs = [math.log(value) for value in values]
    n = len(logs)
    middle = sum(logs) / n
    if n < 2:
        return Mean(math.exp(middle), 1.0, n)
    variance = sum((one - middle) ** 2 for one in logs) / (n - 1)
    return Mean(math.exp(middle), math.exp(student_t(level, n) * math.sqrt(variance / n)), n)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a straight line by least squares, the same on every processor: offset and slope.

    >>> line([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
    (1.0, 2.0)
    """
    x, y = (math.fsum(values) / len(points) for values in zip(*points, strict=True))
    slope = math.fsum((a - x) * (b - y) for a, b in points) / math.fsum((a - x) ** 2 for a, _ in points)
    return y - slope * x, slope
