"""Files of requests: each format by a small sample, and each thing that may be wrong with one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import moesim.serving.files as files
import moesim.serving.request_file as request_file
from moesim.core.gate import Form
from moesim.errors import WorkloadError
from moesim.serving.files import RequestFile, read_requests

S = 10**9
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 10:00:00.0000001,812,40
2023-11-16 10:00:03.2500000,1490,12
2023-11-16 10:00:03.9000000,95,300
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,812,40
2024-05-10 00:00:03+00:00,1490,12
2024-05-09 23:00:03.90-02:00,95,300
"""
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,812,40\n3.75,1490,12\n4.4,95,300\n"
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,11,3.2,ChatGPT,420,90,510,Conversation log
45,,1.1,GPT-4,88,0,88,API log
46,11,6.0,ChatGPT,540,200,740,Conversation log
118,,0.0,ChatGPT,300,0,300,API log
"""
PLAIN = "\ufeffrequest, arrival_ms ,Prompt,Output-Tokens\r\na,10,100,5\r\nb,10,7.0,6\r\n"


def lines(*entries: Any) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def mooncake(ms: float, prompt: int, answer: int, ids: Any) -> dict[str, Any]:
    return {"timestamp": ms, "input_length": prompt, "output_length": answer, "hash_ids": ids}


def bailian(chat: int, s: float, prompt: int, answer: int, ids: list[int]) -> dict[str, Any]:
    about = {"chat_id": chat, "parent_chat_id": -1, "timestamp": s, "type": "text", "turn": 1}
    return {**about, "input_length": prompt, "output_length": answer, "hash_ids": ids}


def aiperf(start: int, prompt: int, answer: int, **changes: Any) -> dict[str, Any]:
    lengths = {"input_sequence_length": {"value": prompt, "unit": "tokens"}, "output_sequence_length": {"value": answer}}
    metadata = {"request_start_ns": start, "benchmark_phase": "profiling", "was_cancelled": False}
    return {"metadata": metadata | changes.pop("metadata", {}), "metrics": lengths, "error": None, **changes}


MOONCAKE = lines(mooncake(0, 1300, 60, [7, 8, 9]), mooncake(0, 1700, 12, [7, 3, 4, 5]), mooncake(3000, 500, 5, [8]))
BAILIAN = lines(
    bailian(1, 0.5, 40, 20, [1, 2, 3]), bailian(2, 1.0, 33, 90, [4, 2, 3]), bailian(3, 9.75, 75, 31, [1, 2, 3, 6, 7])
)  # fmt: skip
LLMSERVINGSIM = lines(
    {"input_toks": 10, "output_toks": 4, "arrival_time_ns": 5, "input_tok_ids": [1]},
    {"input_toks": 11, "output_toks": 1, "arrival_time_ns": 1_700_000_000_123_456_789},
)
AIPERF = lines(
    aiperf(2_000_000_300, 100, 5), aiperf(2_000_000_000, 7, 6), aiperf(1, 9, 9, metadata={"benchmark_phase": "warmup"}),
    aiperf(2_000_000_400, 1, 1, metadata={"was_cancelled": True}), {"metadata": {"request_start_ns": 9}, "error": {"code": 500}},
)  # fmt: skip
GUIDELLM = {
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    {"request_start_time": 1.75e9 + 2, "prompt_tokens": 30, "output_tokens": 4},
                    {"info": {"timings": {"request_start": 1.75e9}}, "prompt_tokens": 20, "output_tokens": 3},
                    {"start_time": 1.75e9 + 1, "prompt_tokens": 25, "output_tokens": None},
                ]
            }
        }
    ]
}
VLLM = {"num_prompts": 3, "duration": 4.0, "input_lens": [100, 90, 80], "output_lens": [10, 0, 20], "ttfts": [0.2, 0, 0.6]}

EXPECTED: dict[str, tuple[str, list[int] | None, list[tuple[int, int]], int]] = {
    "azure": (AZURE, [0, 3 * S + 249_999_900, 3 * S + 899_999_900], [(812, 40), (1490, 12), (95, 300)], 0),
    "azure-2024": (AZURE_2024, [0, 2_990_070_000, 3603 * S + 890_070_000], [(812, 40), (1490, 12), (95, 300)], 0),
    "vidur": (VIDUR, [0, 3_250_000_000, 3_900_000_000], [(812, 40), (1490, 12), (95, 300)], 0),
    "burstgpt": (BURSTGPT, [0, 41 * S], [(420, 90), (540, 200)], 2),
    "plain": (PLAIN, [0, 0], [(100, 5), (7, 6)], 0),
    "lengths": ("prompt,answer\n3,4\n5,6", None, [(3, 4), (5, 6)], 0),
    "semicolons": ("time_s;prompt;answer\n1;3;4\n2.5;5;6\n", [0, 1_500_000_000], [(3, 4), (5, 6)], 0),
    "tabs": ("prompt\tanswer\n3\t4\n", None, [(3, 4)], 0),
    "comments": ("# a log\n#\nprompt,answer\n3,4\n", None, [(3, 4)], 0),
    "headings in a comment": ("# a log\n# time_s,prompt,answer\n1,3,4\n2,5,6\n", [0, S], [(3, 4), (5, 6)], 0),
    "mooncake": (MOONCAKE, [0, 0, 3 * S], [(1300, 60), (1700, 12), (500, 5)], 0),
    "bailian": (BAILIAN, [0, 500_000_000, 9_250_000_000], [(40, 20), (33, 90), (75, 31)], 0),
    "llmservingsim": (LLMSERVINGSIM, [0, 1_700_000_000_123_456_784], [(10, 4), (11, 1)], 0),
    "aiperf": (AIPERF, [0, 300], [(7, 6), (100, 5)], 3),
    "guidellm": (json.dumps(GUIDELLM, indent=1), [0, 2 * S], [(20, 3), (30, 4)], 1),
    "vllm": (json.dumps(VLLM), None, [(100, 10), (80, 20)], 1),
}


def read(folder: Path, text: str | bytes, most: int | None = None, name: str = "requests.txt") -> RequestFile:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_requests(str(path), most)


def check_refusal(folder: Path, text: str | bytes, words: str) -> None:
    """Check that a file is refused in one line with these words."""
    with pytest.raises(WorkloadError) as error:
        read(folder, text)
    message = str(error.value)
    assert message.startswith(str(folder / "requests.txt")) and words in message and "\n" not in message
    assert len(message) < len(str(folder)) + 320


@pytest.mark.parametrize("form", sorted(set(EXPECTED) - {"llmservingsim"}))
def test_a_format_is_recognised_by_its_keys(form: str, tmp_path: Path):
    text, ns, lengths, failed = EXPECTED[form]
    found = read(tmp_path, text)
    assert (None if found.ns is None else found.ns.tolist()) == ns
    assert list(zip(found.prompt.tolist(), found.answer.tolist(), strict=True)) == lengths
    assert found.failed == failed
    again = pickle.loads(pickle.dumps(found))
    assert again == found and hash(again) == hash(found) and again.blocks(0) == found.blocks(0)


def test_nanoseconds_are_exact_and_last_no_longer_than_a_year(tmp_path: Path):
    with pytest.raises(WorkloadError, match=r"expected times within a year, got 1\.7e\+09 s; check their unit"):
        read(tmp_path, LLMSERVINGSIM)
    late = LLMSERVINGSIM.replace("5,", "1700000000000000001,", 1)
    assert read(tmp_path, late).ns.tolist() == [0, 123_456_788]  # type: ignore[union-attr]
    table = "time_ns,prompt,answer\n1700000000000000001,1,1\n1700000000123456789,1,1\n"
    assert read(tmp_path, table).ns.tolist() == [0, 123_456_788]  # type: ignore[union-attr]


def shared(found: RequestFile, i: int, j: int) -> int:
    """Count the blocks at the beginning of two prompts that are the same."""
    pairs = list(zip(found.blocks(i), found.blocks(j), strict=False))
    return next((k for k, (one, other) in enumerate(pairs) if one != other), len(pairs))


def test_blocks_stand_for_all_before_them(tmp_path: Path):
    found = read(tmp_path, MOONCAKE)
    assert found.block == 512
    assert [len(found.blocks(i)) for i in range(3)] == [3, 4, 1]
    assert shared(found, 0, 1) == 1
    assert found.blocks(2) == (found.blocks(0)[1],)  # as the file has it
    found = read(tmp_path, BAILIAN)
    assert found.block == 16
    assert shared(found, 0, 2) == 3
    assert not set(found.blocks(0)) & set(found.blocks(1)), "blocks 2 and 3 come after another first block"
    assert read(tmp_path, AZURE).blocks(0) == ()


def test_no_more_is_read_than_is_needed(tmp_path: Path):
    all_of_it, two = read(tmp_path, AZURE), read(tmp_path, AZURE + "not a row\n", most=2)
    assert two.prompt.tolist() == [812, 1490] and len(two) == 2
    assert two != all_of_it
    assert two == read(tmp_path, AZURE, most=2), "what is not read does not count"
    assert two != read(tmp_path, AZURE.replace("1490", "1491"), most=2)


WRONG = {
    "nothing": ("", ": expected requests, got an empty file"),
    "headings": ("time_s,prompt,answer\n", ": expected a request that was answered, got none"),
    "failures": (BURSTGPT.replace(",90,", ",0,").replace(",200,", ",0,"), "got 4 that failed"),
    "columns": ("when,prompt,answer,answer_tokens\n1,2,3,4\n", ":1: expected one column for each of time, prompt and answer"),
    "no prompt": ("time_s,answer\n1,2\n", "got time_s,answer; rename them"),
    "two times": ("time_s,time_ms,prompt,answer\n1,2,3,4\n", "got time_s,time_ms,prompt,answer"),
    "fields after comments": ("# a\nprompt;answer\n1\n", ":3: expected 2 fields, got 1; quote fields that contain a ';'"),
    "comments alone": ("# a\n# b\n", ":2: expected one column for each of time, prompt and answer"),
    "decimal commas": ("time_s;prompt;answer\n1,5;3;4\n", ":2: expected a time as a number or a date, got 1,5"),
    "fields": (AZURE + "2023-11-16 10:00:04,3\n", ":5: expected 3 fields, got 2"),
    "backwards": (VIDUR.replace("4.4", "3.5"), ":4: expected times that do not go backwards, got 3.5 after 3.75; sort"),
    "backwards in lines": (MOONCAKE + lines(mooncake(2999, 5, 5, [])), ":4: expected times that do not go backwards, got 2999"),
    "negative": ("prompt,answer\n5,-1\n", ":2: expected an answer of 1 to 1,000,000,000 tokens, got -1"),
    "zero": ("prompt,answer\n4,4\n0,5\n", ":3: expected a prompt of 1 to 1,000,000,000 tokens, got 0"),
    "zero answer": (AZURE.replace(",40", ",0"), ":2: expected an answer of 1 to"),
    "fraction": ("prompt,answer\n4.5,4\n", "tokens, got 4.5"),
    "word": ("prompt,answer\nlong,4\n", "tokens, got long"),
    "empty": ("prompt,answer\n,4\n", "tokens, got nothing"),
    "infinite": ("prompt,answer\ninf,4\n", "tokens, got inf"),
    "many digits": (f"prompt,answer\n{'9' * 5000},4\n", "tokens, got 9999"),
    "true": (lines(mooncake(0, True, 5, [])), "tokens, got True"),
    "time": ("time_s,prompt,answer\nsoon,1,1\n", ":2: expected a time as a number or a date, got soon"),
    "time nan": ("time_s,prompt,answer\nnan,1,1\n", "expected a time as a number or a date, got nan"),
    "time huge": ("time_s,prompt,answer\n1e300,1,1\n", "expected a time as a number or a date, got 1e300"),
    "date": (AZURE.replace("11-16", "13-16"), ":2: expected a time as a number or a date, got 2023-13-16"),
    "blocks": (lines(mooncake(0, 512, 5, [1, 2])), ":1: expected at most 1 hash_ids, numbers of blocks of 512 tokens"),
    "blocks of lists": (lines(mooncake(0, 512, 5, [[1]])), "got [[1]]"),
    "blocks no list": (lines(mooncake(0, 512, 5, "a")), "got a"),
    "cut line": (MOONCAKE[:-30], ':3: expected a JSON object, got {"timestamp'),
    "other line": (MOONCAKE + lines({"a": 1}), ":4: expected the key timestamp, got a"),
    "deep": ("[" * 100_000, "expected a list of conversations, got [[[["),
    "list": ("[1]", "conversation 0: expected conversations, a list of {from, value}, got 1; write a table"),
    "other keys": ('{"a": 1}', "got a; write a table with the columns time_s,prompt,answer"),
    "summary of vllm": (json.dumps({"input_lens": [1], "output_lens": None}), "save it with --save-detailed"),
    "lengths of vllm": (json.dumps({"input_lens": [1, "x"], "output_lens": [1, 1]}), ": request 1: expected a prompt of"),
    "sweep of guidellm": (json.dumps({"benchmarks": [{}, {}]}), "expected one benchmark of GuideLLM, got 2"),
    "summary of guidellm": (json.dumps({"benchmarks": [{"metrics": {}}]}), "expected the key benchmarks[0].requests.successful"),
    "request of guidellm": (
        json.dumps({"benchmarks": [{"requests": {"successful": [{"prompt_tokens": 4}]}}]}),
        ": request 0: expected request_start_time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused_in_one_line(what: str, tmp_path: Path):
    check_refusal(tmp_path, *WRONG[what])


def test_what_is_no_text_or_not_there_is_refused(tmp_path: Path):
    with pytest.raises(WorkloadError, match=r"requests\.txt: expected a file of requests, got not UTF-8 text; check the path"):
        read(tmp_path, AZURE.encode() + b"\xff\xfe,1,1\n")
    with pytest.raises(WorkloadError, match=r"gone\.csv: expected a file of requests, got No such file or directory; check"):
        read_requests(str(tmp_path / "gone.csv"))
    with pytest.raises(WorkloadError, match="expected a file of requests, got Is a directory"):
        read_requests(str(tmp_path))


def test_sizes_are_checked_before_there_is_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_file, "MOST", 2)
    with pytest.raises(WorkloadError, match=r":4: expected at most 2 requests, got more; set workload.n_requests"):
        read(tmp_path, AZURE)
    assert len(read(tmp_path, AZURE, most=3)) == 3
    monkeypatch.setattr(files, "RESULT", Form("a result", 100))
    with pytest.raises(WorkloadError, match="got more than the 100 B that a result may have"):
        read(tmp_path, json.dumps(GUIDELLM))
    monkeypatch.setattr(files, "TABLE", Form("a file of requests", 60))
    with pytest.raises(WorkloadError, match="got more than the 60 B that a file of requests may have"):
        read(tmp_path, AZURE)
