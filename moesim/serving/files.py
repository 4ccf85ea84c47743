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
| LLMServingSim, sessions (JSONL) | the same, of a session | the same, in `sub_requests` | of the session, made up |
| WEKA, sessions (JSONL) | not in it | `in`, `out`, in `requests` | `hash_ids` of `block_size` tokens alone |
| ShareGPT (JSON) | not in it | texts of `conversations` | |
| AIPerf (JSONL) | `request_start_ns` | `input_sequence_length`, `output_sequence_length` | |
| GuideLLM (JSON) | `request_start_time`, s | `prompt_tokens`, `output_tokens` | |
| `vllm bench serve` (JSON) | not in it | `input_lens`, `output_lens` | |

Tables are separated by commas, semicolons or tabs.
A request without an answer failed in BurstGPT and in the results of load generators: it is left out and counted.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from moesim.core.data import shipped
from moesim.core.gate import SMALLER, TooLargeError, lines, read_bytes, why_not
from moesim.core.gate import Form as Size
from moesim.core.units import NS_PER_S
from moesim.serving.conversations import sessions, sharegpt
from moesim.serving.request_file import Format, Read, RequestFile, collected, parsed, wrong

TABLE: Final = Size("a file of requests", 2**32)
"""A week of Azure's conversations (2024) is a quarter of it; it is read line by line."""
RESULT: Final = Size("a result of a load generator, or one line", 2**28)
"""It is read as a whole, which takes some times as much memory; a result is often one line."""

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


def read_requests(name: str, most: int | None = None) -> RequestFile:
    """Read a file of requests, whose format is recognised by its keys; of a table `most` rows; WorkloadError has the line."""
    digest = hashlib.sha256()
    path = shipped(Path(name))
    try:
        with path.open("rb") as file:
            text = _text(file, digest)
            first = next(text, "")
            if not first:
                raise wrong(name, "requests", "an empty file", "check the path")
            if (lined := _lined(name, first, text)) is not None:
                return collected(name, *lined, most, digest)
        data = read_bytes(path, RESULT)
        return collected(name, *_result(name, parsed(data)), most, hashlib.sha256(data))
    except TooLargeError as error:
        raise wrong(name, "a file of requests", why_not(error), SMALLER) from None
    except (OSError, UnicodeDecodeError) as error:
        where = "" if path.is_absolute() or path.exists() else f", looked for from {Path.cwd()}"
        raise wrong(name, "a file of requests", why_not(error) + where, "check the path") from None
    except csv.Error as error:
        raise wrong(name, "a table of requests", str(error), "check the path") from None


def _text(file: IO[bytes], digest: Any) -> Iterator[str]:
    """Yield the lines of a file, which count in its digest and against its largest size."""
    n_bytes = 0
    for line in lines(file, RESULT):
        n_bytes += len(line)
        if n_bytes > TABLE.most:
            raise TooLargeError(Path(file.name), TABLE)
        digest.update(line)
        yield line.decode("utf-8-sig" if n_bytes == len(line) else "utf-8")


def _lined(name: str, first: str, rest: Iterator[str]) -> tuple[Format, Iterable[Read]] | None:
    """Recognise a format with a request a line by the first line; None: it is none of them."""
    begin = first.lstrip()[:1]
    if begin not in "{[":
        return _table(name, first, rest)
    if begin == "[":
        return sharegpt(name, itertools.chain([first], rest))
    entry = parsed(first)
    for one in _JSONL:
        if isinstance(entry, dict) and all(_inside(entry, key) is not None for key in one.known):
            return one.form, one.read(name, itertools.chain([first], rest))
    return sessions(name, entry, itertools.chain([first], rest)) if isinstance(entry, dict) else None


# ------------------------------------------------------------ tables
def _table(name: str, first: str, rest: Iterator[str]) -> tuple[Format, Iterator[Read]]:
    """Read a CSV table with a line of headings, after lines of comments that begin with #."""
    above: list[str] = []
    while first.startswith("#"):
        above.append(first)
        first = next(rest, "")
    if above and not re.search("[a-zA-Z]", first.partition(",")[0]):  # the headings are the last comment
        rest = itertools.chain([first], rest)
        first = above.pop().lstrip("# ")
    delimiter = next((mark for mark in ";\t" if mark in first and "," not in first), ",")
    reader = csv.reader(itertools.chain([first], rest), delimiter=delimiter)
    written = next(reader, [])
    columns = [re.sub(r"[\s()-]+", "_", one.strip().lower()).strip("_") for one in written]
    times, prompts, answers = ([i for i, one in enumerate(columns) if one in known] for known in (_TIMES, _PROMPTS, _ANSWERS))
    if len(times) > 1 or len(prompts) != 1 or len(answers) != 1:
        raise wrong(
            f"{name}:{len(above) + 1}", "one column for each of time, prompt and answer, such as time_s,prompt,answer",
            ",".join(written)[:100], "rename them, or add a line with their names",
        )  # fmt: skip
    unit = _TIMES[columns[times[0]]] if times else 0

    def rows() -> Iterator[Read]:
        for row in reader:
            place = f"{name}:{len(above) + reader.line_num}"
            if not row:
                continue
            if len(row) != len(columns):
                raise wrong(place, f"{len(columns)} fields", str(len(row)), f"quote fields that contain a {delimiter!r}")
            yield Read(place, row[times[0]].strip() if times else None, unit, row[prompts[0]], row[answers[0]])

    return Format(fails=set(columns) >= _BURSTGPT), rows()


# ------------------------------------------------------------ a request a line
class _Jsonl(NamedTuple):
    """A format with a JSON object a line."""

    time: str
    unit: int  # ns of the time
    prompt: str
    answer: str
    form: Format = Format()
    also: tuple[str, ...] = ()  # keys by which it is recognised
    failed: Callable[[Any], bool] = lambda entry: False

    @property
    def known(self) -> tuple[str, ...]:
        return self.time, self.prompt, self.answer, *self.also

    def read(self, name: str, text: Iterable[str]) -> Iterator[Read]:
        for number, line in enumerate(text, 1):
            place = f"{name}:{number}"
            if not line.strip():
                continue
            entry = parsed(line)
            if not isinstance(entry, dict):
                raise wrong(place, "a JSON object", line.strip()[:40], "a line is cut off, or from another file")
            if self.failed(entry):
                yield Read(place, None, 0, None, 0)
                continue
            values = [_inside(entry, key) for key in (self.time, self.prompt, self.answer)]
            for key, value in zip((self.time, self.prompt, self.answer), values, strict=True):
                if value is None:
                    raise wrong(place, f"the key {key}", ", ".join(entry)[:60] or "none", "remove this line, or add the key")
            yield Read(place, values[0], self.unit, values[1], values[2], entry.get("hash_ids", ()) if self.form.block else ())


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
    _Jsonl("timestamp", NS_PER_S, *_LENGTHS, Format(block=16, alone=True), ("chat_id",)),
    _Jsonl("timestamp", _MS, *_LENGTHS, Format(block=512)),
    _Jsonl("arrival_time_ns", 1, "input_toks", "output_toks"),
    _Jsonl("metadata.request_start_ns", 1, *_METRICS, Format(fails=True, ordered=False), failed=_aiperf_failed),
)


# ------------------------------------------------------------ whole results
def _result(name: str, document: Any) -> tuple[Format, list[Read]]:
    """Read a result of a load generator, which has its requests in a list."""
    form = Format(fails=True, ordered=False)
    if isinstance(document, dict) and "input_lens" in document:
        prompts, answers = document["input_lens"], document.get("output_lens")
        if not isinstance(prompts, list) or not isinstance(answers, list) or len(prompts) != len(answers):
            raise wrong(name, "as many input_lens as output_lens", "others", "save it with --save-detailed")
        return form, [
            Read(f"{name}: request {i}", None, 0, prompt, answer)
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
    runs = document.get("benchmarks") if isinstance(document, dict) else None
    if isinstance(runs, list):
        if len(runs) != 1:
            raise wrong(name, "one benchmark of GuideLLM", f"{len(runs)}", "write each to a file of its own")
        found = _inside(runs[0], "requests.successful")
        if not isinstance(found, list):
            raise wrong(name, "the key benchmarks[0].requests.successful", "none", "write the whole result, not a summary")
        return form, [_of_guidellm(f"{name}: request {i}", one) for i, one in enumerate(found)]
    got = ", ".join(document)[:60] if isinstance(document, dict) else "no JSON document" if document is None else "a list"
    raise wrong(
        name, "a CSV table, JSON of Mooncake, Bailian, AIPerf, LLMServingSim, WEKA or ShareGPT, or a result of vLLM or GuideLLM",
        got or "nothing in it", "write a table with the columns time_s,prompt,answer",
    )  # fmt: skip


def _of_guidellm(place: str, entry: Any) -> Read:
    starts = ("request_start_time", "info.timings.request_start", "scheduler_info.request_timings.request_start", "start_time")
    start = next((value for key in starts if (value := _inside(entry, key)) is not None), None)
    prompt, answer = _inside(entry, "prompt_tokens"), _inside(entry, "output_tokens")
    if start is None or prompt is None:
        raise wrong(place, "request_start_time, prompt_tokens and output_tokens", "less", "write the whole result, not a summary")
    return Read(place, start, NS_PER_S, prompt, answer or 0)
