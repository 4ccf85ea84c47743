"""Where along a knob the limit changes: coarse steps to the first change, then bisection."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from moesim.errors import InputError, MoesimError
from moesim.studies.whatif.knobs import knob_of
from moesim.studies.whatif.limits import Limits
from moesim.studies.whatif.settings import Base, Changed
from moesim.studies.whatif.shots import Runs

REACH = Fraction(8)
"""The search goes from the machine as it is to eight times as much, or an eighth."""
CLOSE = 1.05
"""It ends when the factors before and after the change differ by no more than 5 %."""


@dataclass(frozen=True)
class Answer:
    """What a simulation at one factor says."""

    limit: str | None  # what limits it; None if it could not be carried out
    factor: Fraction  # the factor that was simulated; of whole numbers it may be another than was asked for
    error: str = ""  # why it could not be carried out


@dataclass(frozen=True)
class Crossing:
    """Where the limit changes."""

    limit: str | None  # the next limit; None if there is no change as far as the search went
    factor: Fraction  # the smallest change at which the next limit was seen; without one, how far the search went
    error: str = ""  # why it went no further, if that was not for its reach


def search(limit: str, up: bool, reach: Fraction = REACH) -> Generator[Fraction, Answer, Crossing]:
    """Look for the factor at which a limit changes.

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


def search_all(
    base: Base,
    wanted: Mapping[tuple[str, str, bool], Fraction],
    index: Mapping[str, int],
    limits: Mapping[str, Limits | None],
    runs: Runs,
) -> dict[tuple[str, str, bool], Crossing]:
    """Carry out searches side by side: each round simulates the next factor of every one."""
    found: dict[tuple[str, str, bool], Crossing] = {}
    going: dict[tuple[str, str, bool], Generator[Fraction, Answer, Crossing]] = {}
    asked: dict[tuple[str, str, bool], Fraction] = {}
    for key, reach in wanted.items():
        policy, name, up = key
        highest, before = knob_of(name).highest, limits[policy]
        assert before is not None
        if up and highest is not None:
            reach = min(reach, highest(base))
        if reach <= 1:
            found[key] = Crossing(None, Fraction(1))
            continue
        going[key] = search(before.limit, up, reach)
        asked[key] = next(going[key])
    while going:
        changes: dict[tuple[str, str, bool], Changed | MoesimError] = {}
        for key in going:
            scale = knob_of(key[1]).scale
            assert scale is not None
            try:
                changes[key] = scale(base, asked[key])
            except InputError as error:
                changes[key] = error
        works = {key: (c.raw, index[key[0]]) for key, c in changes.items() if isinstance(c, Changed)}
        shots = dict(zip(works, runs.shots(list(works.values())), strict=True))
        for key in list(going):
            changed = changes[key]
            if isinstance(changed, Changed):
                shot = shots[key]
                actual = changed.factor if changed.factor is not None else asked[key]
                answer = Answer(shot.limits.limit if shot.limits else None, actual, str(shot.error or ""))
            else:
                answer = Answer(None, asked[key], str(changed))
            try:
                asked[key] = going[key].send(answer)
            except StopIteration as end:
                found[key] = end.value
                del going[key]
    return found
