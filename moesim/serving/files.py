"""Files of requests: traces of services, results of load generators, and plain tables.

| file | when a request arrives | its tokens | blocks |
|---|---|---|---|
| Azure 2023 and 2024, Splitwise (CSV) | `TIMESTAMP`, a date | `ContextTokens`, `GeneratedTokens` | |
| Vidur (CSV) | `arrived_at`, s | `num_prefill_tokens`, `num_decode_tokens` | |
| BurstGPT (CSV) | `Timestamp`, s | `Request tokens`, `Response tokens` | |
| any table (CSV) | `time_s`, `time_ms`, ... | `prompt`, `answer`, ... | |
| Mooncake (JSONL) | `timestamp`, ms | `input_length`, `output_length` | `hash_ids` of 512 tokens and all before them |
| Qwen at Bailian (JSONL) | `timestamp`, s | the same | `hash_ids` of 16 tokens alone |
| LLMServingSim (JSONL) | `arrival_time_ns` | `input_toks`, `output_toks` | |
| AIPerf (JSONL) | `request_start_ns` | `input_sequence_length`, `output_sequence_length` | |
| GuideLLM (JSON) | `request_start_time`, s | `prompt_tokens`, `output_tokens` | |
| `vllm bench serve` (JSON) | not in it | `input_lens`, `output_lens` | |

A request without an answer failed in BurstGPT and in the results of load generators: it is left out and counted.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from moesim.core.data import shipped
from moesim.core.gate import MADE, SMALLER, Form, TooLargeError, lines, read_bytes, why_not
from moesim.core.limits import RUN_NS, TOKENS
from moesim.core.units import NS_PER_S
from moesim.errors import WorkloadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TABLE: Final = Form("a file of requests", 2**32)
"""A week of Azure's conversations (2024) is a quarter of it; it is read line by line."""
RESULT: Final = Form("a result of a load generator, or one line", 2**28)
"""It is read as a whole, which takes some times as much memory; a result is often one line."""
MOST: Final = 10_000_000
"""Requests of a file: more than anybody waits for."""

_MS: Final = NS_PER_S // 1000
_TIMES: Final = {  # names of columns, in lower case with _ -> ns of their unit
    **dict.fromkeys(("time_s", "arrival_s", "timestamp_s", "arrival_time_s", "time", "arrival", "timestamp", "arrived_at",
                     "arrival_time"), NS_PER_S),
    **dict.fromkeys(("time_ms", "arrival_ms", "timestamp_ms", "arrival_time_ms"), _MS),
    **dict.fromkeys(("time_ns", "arrival_ns", "timestamp_ns", "arrival_time_ns"), 1),
}  # fmt: skip
_PROMPTS: Final = (
    "prompt", "prompt_tokens", "prompt_length", "prompt_len", "input", "input_tokens", "input_length", "input_len",
    "contexttokens", "request_tokens", "num_prefill_tokens", "input_toks",
)  # fmt: skip
_ANSWERS: Final = (
    "answer", "answer_tokens", "output", "output_tokens", "output_length", "output_len", "generatedtokens", "response_tokens",
    "num_decode_tokens", "output_toks", "completion_tokens",
)  # fmt: skip
_BURSTGPT: Final = {"request_tokens", "response_tokens", "log_type"}
_DATE: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


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

    def __len__(self) -> int:
        return len(self.prompt)

    def blocks(self, i: int) -> tuple[int, ...]:
        """Return the blocks of a prompt."""
        if not self.block:
            return ()
        begin = int(self.block_ends[i - 1]) if i else 0
        return tuple(self.block_ids[begin : self.block_ends[i]].tolist())


class _Read(NamedTuple):
    """One request as a file has it."""

    place: str  # for messages: a line, or the number of the request
    time: Any
    unit: int  # ns of the time; 0: it is none
    prompt: Any
    answer: Any
    blocks: Any = ()


class _Form(NamedTuple):
    """What a format says of all its requests."""

    block: int = 0
    alone: bool = False  # a block's number stands for its tokens alone
    fails: bool = False  # an answer without tokens stands for a request that failed
    ordered: bool = True


def read_requests(name: str, most: int | None = None) -> RequestFile:
    """Read a file of requests, whose format is recognised by its keys; of a table `most` rows; WorkloadError has the line."""
    digest = hashlib.sha256()
    path = shipped(Path(name))
    try:
        with path.open("rb") as file:
            text = _text(file, digest)
            first = next(text, "")
            if not first:
                raise _wrong(name, "requests", "an empty file", "check the path")
            if (lined := _lined(name, first, text)) is not None:
                return _collected(name, *lined, most, digest)
        data = read_bytes(path, RESULT)
        return _collected(name, *_result(name, _json(data)), most, hashlib.sha256(data))
    except TooLargeError as wrong:
        raise _wrong(name, "a file of requests", why_not(wrong), SMALLER) from None
    except (OSError, UnicodeDecodeError) as wrong:
        raise _wrong(name, "a file of requests", why_not(wrong), "check the path") from None
    except csv.Error as wrong:
        raise _wrong(name, "a table of requests", str(wrong), "check the path") from None


def _wrong(place: str, expected: str, got: str, remedy: str) -> WorkloadError:
    return WorkloadError(f"{place}: expected {expected}, got {got}; {remedy}")


def _text(file: IO[bytes], digest: Any) -> Iterator[str]:
    """Yield the lines of a file, which count in its digest and against its largest size."""
    n_bytes = 0
    for line in lines(file, RESULT):
        n_bytes += len(line)
        if n_bytes > TABLE.most:
            raise TooLargeError(Path(file.name), TABLE)
        digest.update(line)
        yield line.decode("utf-8-sig" if n_bytes == len(line) else "utf-8")


def _lined(name: str, first: str, rest: Iterator[str]) -> tuple[_Form, Iterable[_Read]] | None:
    """Recognise a format with a request a line by the first line; None: it is none of them."""
    if first.lstrip()[:1] not in "{[":
        return _table(name, csv.reader(itertools.chain([first], rest)))
    entry = _json(first)
    for one in _JSONL:
        if isinstance(entry, dict) and all(_inside(entry, key) is not None for key in one.known):
            return one.form, one.read(name, itertools.chain([first], rest))
    if isinstance(entry, dict) and "sub_requests" in entry:
        raise _wrong(name, "requests", "sessions of LLMServingSim", "write its flat form, one request a line")
    return None


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# ------------------------------------------------------------ tables
def _table(name: str, reader: Any) -> tuple[_Form, Iterator[_Read]]:
    """Read a CSV table with a line of headings."""
    written = next(reader)
    columns = [re.sub(r"[\s()-]+", "_", one.strip().lower()).strip("_") for one in written]
    times, prompts, answers = ([i for i, one in enumerate(columns) if one in known] for known in (_TIMES, _PROMPTS, _ANSWERS))
    if len(times) > 1 or len(prompts) != 1 or len(answers) != 1:
        raise _wrong(
            f"{name}:1", "one column for each of time, prompt and answer, such as time_s,prompt,answer",
            ",".join(written)[:100], "rename them",
        )  # fmt: skip
    unit = _TIMES[columns[times[0]]] if times else 0

    def rows() -> Iterator[_Read]:
        for row in reader:
            place = f"{name}:{reader.line_num}"
            if not row:
                continue
            if len(row) != len(columns):
                raise _wrong(place, f"{len(columns)} fields", str(len(row)), "quote fields that contain a comma")
            yield _Read(place, row[times[0]].strip() if times else None, unit, row[prompts[0]], row[answers[0]])

    return _Form(fails=set(columns) >= _BURSTGPT), rows()


# ------------------------------------------------------------ a request a line
class _Jsonl(NamedTuple):
    """A format with a JSON object a line."""

    time: str
    unit: int  # ns of the time
    prompt: str
    answer: str
    form: _Form = _Form()
    also: tuple[str, ...] = ()  # keys by which it is recognised
    failed: Callable[[Any], bool] = lambda entry: False

    @property
    def known(self) -> tuple[str, ...]:
        return self.time, self.prompt, self.answer, *self.also

    def read(self, name: str, text: Iterable[str]) -> Iterator[_Read]:
        for number, line in enumerate(text, 1):
            place = f"{name}:{number}"
            if not line.strip():
                continue
            entry = _json(line)
            if not isinstance(entry, dict):
                raise _wrong(place, "a JSON object", line.strip()[:40], "a line is cut off, or from another file")
            if self.failed(entry):
                yield _Read(place, None, 0, None, 0)
                continue
            values = [_inside(entry, key) for key in (self.time, self.prompt, self.answer)]
            for key, value in zip((self.time, self.prompt, self.answer), values, strict=True):
                if value is None:
                    raise _wrong(place, f"the key {key}", ", ".join(entry)[:60] or "none", "remove this line, or add the key")
            yield _Read(place, values[0], self.unit, values[1], values[2], entry.get("hash_ids", ()) if self.form.block else ())


def _inside(entry: Any, key: str) -> Any:
    """Return the value under ``a.b``; None if there is none."""
    for step in key.split("."):
        entry = entry.get(step) if isinstance(entry, dict) else None
    return entry


def _aiperf_failed(entry: Any) -> bool:
    about = entry.get("metadata")
    skipped = isinstance(about, dict) and (about.get("was_cancelled") or about.get("benchmark_phase") == "warmup")
    return bool(entry.get("error") or skipped)


_LENGTHS: Final = ("input_length", "output_length")
_METRICS: Final = ("metrics.input_sequence_length.value", "metrics.output_sequence_length.value")
_JSONL: Final = (
    _Jsonl("timestamp", NS_PER_S, *_LENGTHS, _Form(block=16, alone=True), ("chat_id",)),
    _Jsonl("timestamp", _MS, *_LENGTHS, _Form(block=512)),
    _Jsonl("arrival_time_ns", 1, "input_toks", "output_toks"),
    _Jsonl("metadata.request_start_ns", 1, *_METRICS, _Form(fails=True, ordered=False), failed=_aiperf_failed),
)


# ------------------------------------------------------------ whole results
def _result(name: str, document: Any) -> tuple[_Form, list[_Read]]:
    """Read a result of a load generator, which has its requests in a list."""
    form = _Form(fails=True, ordered=False)
    if isinstance(document, dict) and "input_lens" in document:
        prompts, answers = document["input_lens"], document.get("output_lens")
        if not isinstance(prompts, list) or not isinstance(answers, list) or len(prompts) != len(answers):
            raise _wrong(name, "as many input_lens as output_lens", "others", "save it with --save-detailed")
        return form, [
            _Read(f"{name}: request {i}", None, 0, prompt, answer)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
    runs = document.get("benchmarks") if isinstance(document, dict) else None
    if isinstance(runs, list):
        if len(runs) != 1:
            raise _wrong(name, "one benchmark of GuideLLM", f"{len(runs)}", "write each to a file of its own")
        found = _inside(runs[0], "requests.successful")
        if not isinstance(found, list):
            raise _wrong(name, "the key benchmarks[0].requests.successful", "none", "write the whole result, not a summary")
        return form, [_of_guidellm(f"{name}: request {i}", one) for i, one in enumerate(found)]
    got = ", ".join(document)[:60] if isinstance(document, dict) else "no JSON document" if document is None else "a list"
    raise _wrong(
        name, "a CSV table, JSON lines of Azure, Mooncake, Bailian, AIPerf or LLMServingSim, or a result of vLLM or GuideLLM",
        got or "nothing in it", "write a table with the columns time_s,prompt,answer",
    )  # fmt: skip


def _of_guidellm(place: str, entry: Any) -> _Read:
    starts = ("request_start_time", "info.timings.request_start", "scheduler_info.request_timings.request_start", "start_time")
    start = next((value for key in starts if (value := _inside(entry, key)) is not None), None)
    prompt, answer = _inside(entry, "prompt_tokens"), _inside(entry, "output_tokens")
    if start is None or prompt is None:
        raise _wrong(
            place, "request_start_time, prompt_tokens and output_tokens", "less", "write the whole result, not a summary"
        )
    return _Read(place, start, NS_PER_S, prompt, answer or 0)


# ------------------------------------------------------------ checks
def _collected(name: str, form: _Form, found: Iterable[_Read], most: int | None, digest: Any) -> RequestFile:
    """Check requests and put them into arrays."""
    ns, prompts, answers, ids, ends = (array("q") for _ in range(5))
    failed, timed, chains, last = 0, False, dict[tuple[int, Any], int](), ""
    for one in found:
        if form.fails and one.answer in (0, "0"):
            failed += 1
            continue
        prompt, answer = _tokens(one.place, "a prompt", one.prompt), _tokens(one.place, "an answer", one.answer)
        timed = one.unit > 0
        now = _ns(one) if timed else 0
        if timed and form.ordered and ns and now < ns[-1]:
            raise _wrong(one.place, "times that do not go backwards", f"{one.time} after {last}", "sort the file by time")
        last = str(one.time)
        ns.append(now)
        prompts.append(prompt)
        answers.append(answer)
        if form.block:
            ids.extend(_blocks(one, prompt, form, chains))
            ends.append(len(ids))
        if len(prompts) == most:
            break
        if len(prompts) > MOST or ids.itemsize * len(ids) > MADE:
            raise _wrong(one.place, f"at most {MOST:,} requests", "more", "set workload.n_requests, which takes the first")
    if not prompts:
        got = f"{failed} that failed" if failed else "headings alone"
        raise _wrong(name, "a request that was answered", got, "check the file")
    arrays = [np.frombuffer(one, np.int64) if one else np.zeros(0, np.int64) for one in (ns, prompts, answers, ids, ends)]
    if not form.ordered:
        order = np.argsort(arrays[0], kind="stable")
        arrays[:3] = [one[order] for one in arrays[:3]]
    times = arrays[0] - arrays[0][0] if timed else None
    if times is not None and times[-1] > RUN_NS:
        raise _wrong(name, "times within a year", f"{times[-1] / NS_PER_S:g} s", "check their unit")
    return RequestFile(name, digest.hexdigest(), failed, times, arrays[1], arrays[2], form.block, arrays[3], arrays[4])


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
        raise _wrong(place, f"{what} of 1 to {TOKENS.most:,} tokens", got, "correct it, or remove this request")
    return number


def _ns(one: _Read) -> int:
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
        raise _wrong(one.place, "a time as a number or a date", str(one.time)[:40] or "nothing", "correct it") from None


def _offset_s(zone: str) -> int:
    """Return by how much the clock of a time zone is ahead: ``Z``, or hours and minutes."""
    if zone == "Z":
        return 0
    return (1 if zone[0] == "+" else -1) * (3600 * int(zone[1:3]) + 60 * int(zone[4:]))


def _blocks(one: _Read, prompt: int, form: _Form, chains: dict[tuple[int, Any], int]) -> Sequence[int]:
    """Return the blocks of a prompt by numbers that stand for all before them, too."""
    given, most = one.blocks, -(-prompt // form.block)
    if not isinstance(given, list | tuple) or len(given) > most or not all(type(found) in (int, str) for found in given):
        raise _wrong(
            one.place, f"at most {most} hash_ids, numbers of blocks of {form.block} tokens, for a prompt of {prompt}",
            str(given)[:40], "correct it",
        )  # fmt: skip
    numbers, before = [], -1
    for found in given:
        key = (before if form.alone else -1, found)
        before = chains.setdefault(key, len(chains))
        numbers.append(before)
    return numbers
