"""Requests of a file in arrays, checked, whatever its format."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.core.gate import MADE
from moesim.core.limits import RUN_NS, TOKENS
from moesim.core.units import NS_PER_S
from moesim.errors import WorkloadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST: Final = 10_000_000
"""Requests of a file: more than anybody waits for."""
_DATE: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


class Sessions(NamedTuple):
    """Turns of conversations, each of which waits for the answer to the one before; arrays of shape (n_requests,)."""

    session: NDArray[np.int64]  # of each request, from 0 in the order of the file
    wait_ns: NDArray[np.int64]  # between its answer and the next turn
    follows: NDArray[np.int64]  # tokens of its answer whose content is known by blocks, as the next turn begins with them


@dataclass(frozen=True)
class RequestFile:
    """Requests of a file, in the order in which they arrived; equal if the same was read under the same name."""

    name: str  # as the experiment has it
    sha256: str  # of what was read
    failed: int  # requests that were left out, since they have no answer
    ns: NDArray[np.int64] | None = field(compare=False)  # of arrival after the first, (n_requests,); None: the file has no times
    prompt: NDArray[np.int64] = field(compare=False)  # tokens, (n_requests,)
    answer: NDArray[np.int64] = field(compare=False)
    block: int = field(compare=False)  # tokens of a block of a prompt; 0: the file has none
    block_ids: NDArray[np.int64] = field(compare=False)  # of all prompts; equal ones have the same tokens before them, too
    block_ends: NDArray[np.int64] = field(compare=False)  # where the blocks of a prompt end, (n_requests,)
    sessions: Sessions | None = field(compare=False)
    assumed: str = field(compare=False)  # how its tokens were estimated; empty: they were counted

    def __len__(self) -> int:
        return len(self.prompt)

    def blocks(self, i: int) -> tuple[int, ...]:
        """Return the blocks of a prompt."""
        if not self.block:
            return ()
        begin = int(self.block_ends[i - 1]) if i else 0
        return tuple(self.block_ids[begin : self.block_ends[i]].tolist())


class Read(NamedTuple):
    """One request as a file has it."""

    place: str  # for messages: a line, or the number of the request
    time: Any
    unit: int  # ns of the time; 0: it is none
    prompt: Any
    answer: Any
    blocks: Any = ()
    session: int = -1  # whose turn it is
    wait_ns: int = 0  # after its answer, until the session's next turn
    follows: int = 0  # tokens after its prompt whose blocks are in `blocks`, too
    scope: int = -1  # equal blocks are the same within it


class Format(NamedTuple):
    """Properties of a format, which all its requests have."""

    block: int = 0
    alone: bool = False  # a block's number stands for its tokens alone
    fails: bool = False  # an answer without tokens stands for a request that failed
    ordered: bool = True
    assumed: str = ""  # how its tokens were estimated


def wrong(place: str, expected: str, got: str, remedy: str) -> WorkloadError:
    """Make an error of one line."""
    return WorkloadError(f"{place}: expected {expected}, got {got}; {remedy}")


def parsed(text: str | bytes) -> Any:
    """Return what a JSON text has; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def collected(name: str, form: Format, found: Iterable[Read], most: int | None, digest: Any) -> RequestFile:
    """Check requests and put them into arrays."""
    ns, prompts, answers, ids, ends = (array("q") for _ in range(5))
    turns = [array("q") for _ in range(3)]
    failed, timed, chains, last = 0, False, dict[tuple[int, Any], int](), ""
    for one in found:
        if form.fails and one.answer in (0, "0"):
            failed += 1
            continue
        prompt, answer = _tokens(one.place, "a prompt", one.prompt), _tokens(one.place, "an answer", one.answer)
        timed = one.unit > 0
        now = _ns(one) if timed else 0
        if timed and form.ordered and ns and now < ns[-1]:
            raise wrong(one.place, "times that do not go backwards", f"{one.time} after {last}", "sort the file by time")
        last = str(one.time)
        ns.append(now)
        prompts.append(prompt)
        answers.append(answer)
        for values, value in zip(turns, (one.session, one.wait_ns, one.follows), strict=True):
            if one.session >= 0:
                values.append(value)
        if form.block:
            ids.extend(_blocks(one, prompt, form, chains))
            ends.append(len(ids))
        if len(prompts) == most:
            break
        if len(prompts) > MOST or ids.itemsize * len(ids) > MADE:
            raise wrong(one.place, f"at most {MOST:,} requests", "more", "set workload.n_requests, which takes the first")
    if not prompts:
        got = f"{failed} that failed" if failed else "none"
        raise wrong(name, "a request that was answered", got, "check the file")
    arrays = [np.frombuffer(one, np.int64) if one else np.zeros(0, np.int64) for one in (ns, prompts, answers, ids, ends)]
    if not form.ordered:
        order = np.argsort(arrays[0], kind="stable")
        arrays[:3] = [one[order] for one in arrays[:3]]
    times = arrays[0] - arrays[0][0] if timed else None
    if times is not None and times[-1] > RUN_NS:
        raise wrong(name, "times within a year", f"{times[-1] / NS_PER_S:g} s", "check their unit")
    held = Sessions(*(np.frombuffer(one, np.int64) for one in turns)) if turns[0] else None
    return RequestFile(
        name, digest.hexdigest(), failed, times, arrays[1], arrays[2], form.block, arrays[3], arrays[4], held, form.assumed
    )


def _tokens(place: str, what: str, value: Any) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        try:
            number = float(value)
        except ValueError:
            number = value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= TOKENS.most:
        got = str(value)[:40] or "nothing"
        raise wrong(place, f"{what} of 1 to {TOKENS.most:,} tokens", got, "correct it, or remove this request")
    return number


def _ns(one: Read) -> int:
    """Return a time in ns: of a date, or of a number in its unit."""
    try:
        if isinstance(one.time, str) and (date := _DATE.fullmatch(one.time)):
            day, clock, fraction, zone = date.groups()
            seconds = int(np.datetime64(f"{day}T{clock}", "s").astype(np.int64)) - _offset_s(zone or "Z")
            return seconds * NS_PER_S + int((fraction or "0").ljust(9, "0"))
        if isinstance(one.time, bool) or not isinstance(one.time, str | int | float):
            raise ValueError
        whole = isinstance(one.time, int) or (isinstance(one.time, str) and one.time.isdecimal())
        found = int(one.time) if whole else float(one.time)
        if not abs(found) * one.unit < 2**62:  # nor a number
            raise ValueError
        return round(found * one.unit)
    except (ValueError, OverflowError):
        raise wrong(one.place, "a time as a number or a date", str(one.time)[:40] or "nothing", "correct it") from None


def _offset_s(zone: str) -> int:
    """Return by how much the clock of a time zone is ahead: ``Z``, or hours and minutes."""
    if zone == "Z":
        return 0
    return (1 if zone[0] == "+" else -1) * (3600 * int(zone[1:3]) + 60 * int(zone[4:]))


def _blocks(one: Read, prompt: int, form: Format, chains: dict[tuple[int, Any], int]) -> Sequence[int]:
    """Return the blocks of a prompt by numbers that stand for all before them, too."""
    if isinstance(one.blocks, range):  # made up
        return one.blocks
    given, most = one.blocks, -(-(prompt + one.follows) // form.block)
    if not isinstance(given, list | tuple) or len(given) > most or not all(type(found) in (int, str) for found in given):
        raise wrong(
            one.place, f"at most {most} hash_ids, numbers of blocks of {form.block} tokens, for a prompt of {prompt}",
            str(given)[:40], "correct it",
        )  # fmt: skip
    numbers, before = [], one.scope
    for found in given:
        key = (before if form.alone else one.scope, found)
        before = chains.setdefault(key, len(chains))
        numbers.append(before)
    return numbers
