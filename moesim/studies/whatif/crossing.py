"""Where along a knob the limit changes: coarse steps to the first change, then bisection."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from moesim.errors import InputError
from moesim.studies.whatif.knobs import knob_of
from moesim.studies.whatif.limits import Limits
from moesim.studies.whatif.settings import Base, Changed
from moesim.studies.whatif.shots import Runs

REACH = Fraction(8)
"""The search goes from the machine as it is to eight times as much, or an eighth."""
CLOSE = 1.05
"""It ends when the factors before and after the change differ by no more than 5 %."""


@dataclass(frozen=True)
class Crossing:
    """What limits a run at a factor: where the search asked, and in the end where the limit changes."""

    limit: str | None  # what limits it; None if it could not be carried out, or in the end if there is no change in reach
    # the factor that was simulated, which of whole numbers may be another than was asked for; in the end the smallest change at
    # which the next limit was seen, or how far the search went
    factor: Fraction
    error: str = ""  # why it could not be carried out, or why the search went no further, if that was not for its reach


Asking = Generator[Fraction, Crossing, Crossing]
Axis = tuple[str, str, bool]
"""A policy, a knob, and whether the knob goes up."""


def search(limit: str, up: bool, reach: Fraction = REACH) -> Asking:
    """Look for the factor at which a limit changes.

    >>> def run(asking):
    ...     factor = next(asking)
    ...     while True:
    ...         factor = asking.send(Crossing("link" if factor < 3 else "CPU", factor))
    >>> try:
    ...     run(search("link", up=True))
    ... except StopIteration as end:
    ...     print(end.value.limit, 3 <= end.value.factor <= 3 * 1.05)
    CPU True
    """
    before = step = Fraction(1)
    found: Crossing | None = None
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
    while max(found.factor / before, before / found.factor) > CLOSE:
        answer = yield Fraction(math.sqrt(found.factor * before)).limit_denominator(10_000)
        if answer.limit is None or answer.factor in (before, found.factor):
            break  # between two whole numbers
        if answer.limit != limit:
            found = answer
        else:
            before = answer.factor
    return found


def search_all(
    base: Base, wanted: Mapping[Axis, Fraction], index: Mapping[str, int], limits: Mapping[str, Limits | None], runs: Runs
) -> dict[Axis, Crossing]:
    """Carry out searches side by side: each round simulates the next factor of every one."""
    found: dict[Axis, Crossing] = {}
    going: dict[Axis, Asking] = {}
    asked: dict[Axis, Fraction] = {}
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
        answers: dict[Axis, Crossing] = {}
        changes: dict[Axis, Changed] = {}
        for key in going:
            scale = knob_of(key[1]).scale
            assert scale is not None
            try:
                changes[key] = scale(base, asked[key])
            except InputError as error:
                answers[key] = Crossing(None, asked[key], str(error))
        shots = runs.shots([(changed.raw, index[key[0]]) for key, changed in changes.items()])
        for (key, changed), shot in zip(changes.items(), shots, strict=True):
            limit = shot.limits.limit if shot.limits else None
            answers[key] = Crossing(limit, asked[key] if changed.factor is None else changed.factor, str(shot.error or ""))
        for key, answer in answers.items():
            try:
                asked[key] = going[key].send(answer)
            except StopIteration as end:
                found[key] = end.value
                del going[key]
    return found
