"""Files of conversations: sessions of agents, whose turns wait for each other, and ShareGPT's texts.

A turn of a session arrives a time after the answer to the one before, and begins with the whole context before it: prompt and
answer. In WEKA's traces blocks say so. LLMServingSim's sessions have no blocks: there a turn whose prompt is no shorter than the
context before it begins with it, and one that is shorter, after a summary perhaps, shares nothing (an assumption). Sub-agents of
WEKA's, for whom the session waits, are turns at their place, one after another.

The time between an answer and the next turn is `tool_duration_ns` of LLMServingSim, and `think_time` of WEKA. Without the latter
it is the gap between two begins less `api_time`, or the whole gap, which counts the recorded service too, without `api_time`.

ShareGPT has texts, of which a token is four bytes of UTF-8 (`ASSUMED`). The first message of a person is the prompt, what follows
it the answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from json import JSONDecoder
from typing import Any, Final, NamedTuple

from moesim.core.units import NS_PER_S
from moesim.serving.request_file import Format, Read, parsed, wrong

_BETWEEN: Final = re.compile(r"[\s,\[]*")
ASSUMED: Final = "a token for each four bytes of text (assumed; 3 to 5)"
_BYTES: Final = 4
_MADE_BLOCK: Final = 16
"""Tokens of a block that is made up for a session without blocks."""
_ELEMENT: Final = 2**26
"""Characters of one conversation, or of a list on one line."""


def sessions(name: str, first: Mapping[str, Any], text: Iterable[str]) -> tuple[Format, Iterator[Read]] | None:
    """Recognise sessions by the first line of a file; None: it has none."""
    if isinstance(first.get("sub_requests"), list):
        return Format(block=_MADE_BLOCK), _of_llmservingsim(name, text)
    requests, block = first.get("requests"), first.get("block_size")
    if not isinstance(requests, list) or block is None:
        return None
    if not isinstance(block, int) or isinstance(block, bool) or not 1 <= block <= 2**20:
        raise wrong(f"{name}:1", "block_size, tokens of a block", f"{block!r}"[:40], "correct it")
    return Format(block=block, alone=True, fails=True), _of_weka(name, text, block)


def _entries(name: str, text: Iterable[str], key: str) -> Iterator[tuple[str, int, dict[str, Any], list[Any]]]:
    """Yield place, number and turns of each session."""
    number = 0
    for at, line in enumerate(text, 1):
        if not line.strip():
            continue
        place, entry = f"{name}:{at}", parsed(line)
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get(key), list)
            or not all(isinstance(e, dict) for e in entry[key])
        ):
            raise wrong(place, f"a session with a list of {key}", line.strip()[:40], "a line is cut off, or from another file")
        yield place, number, entry, entry[key]
        number += bool(entry[key])


def _of_llmservingsim(name: str, text: Iterable[str]) -> Iterator[Read]:
    block = first = 0  # the first number of the blocks of this context
    for place, number, entry, turns in _entries(name, text, "sub_requests"):
        context = 0
        for i, turn in enumerate(turns):
            where = f"{place}: turn {i}"
            prompt, answer = turn.get("input_toks"), turn.get("output_toks")
            sizes = [one if type(one) is int and 0 < one < 2**40 else 0 for one in (prompt, answer)]
            if not context or sizes[0] < context:
                first = block
            context = sum(sizes)
            n_blocks = -(-context // _MADE_BLOCK)
            block = max(block, first + n_blocks)
            wait = _seconds(where, "tool_duration_ns", turn.get("tool_duration_ns", 0), 1)
            yield Read(
                where, entry.get("arrival_time_ns"), 1, prompt, answer, range(first, first + n_blocks), number, wait, sizes[1]
            )


def _of_weka(name: str, text: Iterable[str], block: int) -> Iterator[Read]:
    for place, number, entry, requests in _entries(name, text, "requests"):
        if entry.get("block_size") != block:
            raise wrong(place, f"block_size {block}, as before", f"{entry.get('block_size')!r}"[:40], "split the file")
        scope = -1 if entry.get("hash_id_scope") == "global" else -2 - number
        turns = list(_turns(place, requests, block))
        for turn, following in itertools.zip_longest(turns, turns[1:]):
            wait = 0 if following is None else _wait(turn, following)
            yield Read(
                turn.place, None, 0, turn.said.get("in"), turn.said.get("out"), turn.blocks, number, wait, turn.follows, scope
            )


class _Turn(NamedTuple):
    place: str
    of: int  # whose turn: the session's, or a sub-agent's
    said: dict[str, Any]
    blocks: Any  # of its prompt, or of its context
    follows: int  # tokens of its answer in them


def _turns(place: str, requests: Sequence[dict[str, Any]], block: int) -> Iterator[_Turn]:
    """Yield the turns of a session with blocks, those of sub-agents at their place."""
    own = [one for one in requests if "requests" not in one]
    after = {id(one): following for one, following in pairwise(own)}
    for i, one in enumerate(requests):
        where, nested = f"{place}: request {i}", one.get("requests")
        if "requests" not in one:
            yield _Turn(where, id(requests), one, *_context(one, after.get(id(one), {}), block))
        elif isinstance(nested, list) and all(isinstance(inner, dict) and "requests" not in inner for inner in nested):
            yield from _turns(where, nested, block)
        else:
            raise wrong(where, "a list of requests of a sub-agent", f"{nested!r}"[:40], "correct it")


def _context(turn: Mapping[str, Any], following: Mapping[str, Any], block: int) -> tuple[Any, int]:
    """Return the blocks of a turn, with those of its answer if the next turn begins with both; and how long this is."""
    ids, later = turn.get("hash_ids", []), following.get("hash_ids")
    prompt, answer, longer = (one if type(one) is int else 0 for one in (turn.get("in"), turn.get("out"), following.get("in")))
    whole = prompt // block
    if not isinstance(ids, list) or not isinstance(later, list) or later[:whole] != ids[:whole]:
        return ids, 0
    if not 0 < whole <= len(ids) or not 0 < answer <= longer - prompt:
        return ids, 0
    return later[: -(-(prompt + answer) // block)], answer


def _wait(turn: _Turn, following: _Turn) -> int:
    """Return the ns between the answer of a turn and the next."""
    if "think_time" in following.said:
        return _seconds(following.place, "think_time", following.said["think_time"])
    if turn.of != following.of:  # their clocks may differ
        return 0
    begin, end = (_seconds(one.place, "t", one.said.get("t")) for one in (turn, following))
    return max(0, end - begin - _seconds(turn.place, "api_time", turn.said.get("api_time")))


def _seconds(place: str, key: str, value: Any, unit: int = NS_PER_S) -> int:
    """Return a time in ns; nothing stands for none."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value * unit < 2**62:
        raise wrong(place, f"{key}, a time that is not negative", f"{value!r}"[:40], "correct it")
    return round(value * unit)


# ------------------------------------------------------------ texts
def sharegpt(name: str, text: Iterable[str]) -> tuple[Format, Iterator[Read]]:
    """Read the first question and answer of each conversation."""
    return Format(fails=True, assumed=ASSUMED), _of_sharegpt(name, text)


def _of_sharegpt(name: str, text: Iterable[str]) -> Iterator[Read]:
    for i, element in enumerate(_elements(name, text)):
        place = f"{name}: conversation {i}"
        said = element.get("conversations") if isinstance(element, dict) else None
        if not isinstance(said, list) or not all(isinstance(one, dict) and isinstance(one.get("value"), str) for one in said):
            raise wrong(
                place, "conversations, a list of {from, value}", f"{element!r}"[:40], "write a table of time_s,prompt,answer"
            )
        pair = next(
            ((ask, reply) for ask, reply in pairwise(said) if ask.get("from") in _PERSONS and reply.get("from") in _MODELS), None
        )  # fmt: skip
        sizes = [0, 0] if pair is None else [-(-len(one["value"].encode("utf-8", "replace")) // _BYTES) for one in pair]
        yield Read(place, None, 0, *(sizes if all(sizes) else (0, 0)))


_PERSONS: Final = ("human", "user")
_MODELS: Final = ("gpt", "assistant", "chatgpt", "bing", "bard")


def _elements(name: str, text: Iterable[str]) -> Iterator[Any]:
    """Yield the elements of a JSON list, which is not read as a whole."""
    decoder, buffer, tried = JSONDecoder(), "", 0
    for line in itertools.chain(text, [""]):
        buffer += line
        if line and len(buffer) < 1.1 * tried:  # so that an element is not parsed again and again
            continue
        at = 0
        with suppress(ValueError, RecursionError):  # it goes on in the next lines
            while True:
                element, end = decoder.raw_decode(buffer, _BETWEEN.match(buffer, at).end())  # type: ignore[union-attr]
                yield element
                at = end
        buffer = buffer[at:]
        tried = len(buffer)
        if tried > _ELEMENT:
            break
    if buffer.strip() != "]":
        raise wrong(name, "a list of conversations", buffer.strip()[:40] or "no end of it", "check its end")
