"""Student's t, by which the interval of a mean of few values is wide."""

from __future__ import annotations

from functools import cache


@cache
def student_t(level: float, n: int) -> float:
    """Give the factor by which a standard error is multiplied for a two-sided interval of the mean of n values; n >= 2.

    >>> round(student_t(0.95, 5), 3)
    2.776
    """
    from scipy.special import stdtrit  # a third of a second to import, where scipy.stats takes two

    return float(stdtrit(n - 1, (1 + level) / 2))
