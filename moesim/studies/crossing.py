"""Where along a knob the limit changes: coarse steps to the first change, then bisection."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from fractions import Fraction

REACH = Fraction(8)
"""The search goes from the machine as it is to eight times as much, or an eighth."""
CLOSE = 1.05
"""It ends when the factors before and after the change differ by no more than 5 %."""


@dataclass(frozen=True)
class Answer:
    """What a simulation at one factor says.

    Attributes
    ----------
    limit : str or None
        What limits it; None if it could not be carried out.
    factor : Fraction
        The factor that was simulated; of whole numbers it may be another than was asked for.
    error : str
        Why it could not be carried out.
    """

    limit: str | None
    factor: Fraction
    error: str = ""


@dataclass(frozen=True)
class Crossing:
    """Where the limit changes.

    Attributes
    ----------
    limit : str or None
        The next limit; None if there is no change as far as the search went.
    factor : Fraction
        The smallest change at which the next limit was seen; without one, how far the search went.
    error : str
        Why it went no further, if that was not for its reach.
    """

    limit: str | None
    factor: Fraction
    error: str = ""


def search(limit: str, up: bool, reach: Fraction = REACH) -> Generator[Fraction, Answer, Crossing]:
    """Look for the factor at which a limit changes.

    Parameters
    ----------
    limit : str
        What limits at factor 1.
    up : bool
        Whether to look towards larger factors.
    reach : Fraction
        Largest factor, or the inverse of the smallest; above 1.

    Yields
    ------
    Fraction
        A factor to simulate; send an `Answer`.

    Returns
    -------
    Crossing
        The first change on a grid of factors of 2, to 5 %. A limit that changes and changes back between two factors of the
        grid is not seen.

    Examples
    --------
    >>> def run(asking):
    ...     factor = next(asking)
    ...     while True:
    ...         factor = asking.send(Answer("link" if factor < 3 else "CPU", factor))
    >>> try:
    ...     run(search("link", up=True))
    ... except StopIteration as end:
    ...     print(end.value.limit, 3 <= end.value.factor <= 3 * 1.05)
    CPU True
    """
    before = Fraction(1)
    found: Answer | None = None
    step = Fraction(1)
    while step < reach and found is None:
        step = min(step * 2, reach)
        answer = yield step if up else 1 / step
        if answer.limit is None:
            return Crossing(None, before, answer.error)
        if answer.limit != limit:
            found = answer
        else:
            before = answer.factor
    if found is None:
        return Crossing(None, before)
    assert found.limit is not None
    while max(found.factor / before, before / found.factor) > CLOSE:
        middle = Fraction(math.sqrt(found.factor * before)).limit_denominator(10_000)
        answer = yield middle
        if answer.limit is None or answer.factor in (before, found.factor):
            break  # between two whole numbers
        if answer.limit != limit:
            found = answer
        else:
            before = answer.factor
    assert found.limit is not None
    return Crossing(found.limit, found.factor)
