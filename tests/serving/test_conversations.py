"""Sessions, whose turns wait for each other and share their context, and texts of ShareGPT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import moesim.serving.conversations as conversations
from moesim.errors import WorkloadError
from moesim.serving.request_file import RequestFile
from tests.serving.serving_kit import experiment, run
from tests.serving.test_request_files import check_refusal, lines, read, shared

MS = 10**6


def llmservingsim(name: str, ns: int, *turns: tuple[int, int, int]) -> dict[str, Any]:
    keys = "input_toks", "output_toks", "tool_duration_ns"
    return {"session_id": name, "arrival_time_ns": ns, "sub_requests": [dict(zip(keys, turn, strict=True)) for turn in turns]}


def turn(t: float, prompt: int, answer: int, ids: Any, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": prompt, "out": answer, "hash_ids": ids, **more}


def weka(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": 4, "hash_id_scope": "local", "requests": list(requests), **more}


SESSIONS = lines(
    llmservingsim("a", 5, (100, 30, 2 * MS), (150, 10, 0), (80, 5, 0)), llmservingsim("b", 9 * MS, (16, 16, 0), (40, 4, 0))
)  # fmt: skip
WEKA = lines(
    weka(turn(0, 8, 3, [1, 2]), turn(2.5, 13, 2, [1, 2, 3, 4]), turn(3, 12, 1, [1, 5, 6])),
    weka(turn(0, 8, 1, [1, 2])),
)


def table(found: RequestFile) -> list[tuple[int, int, int, float, int]]:
    """Return session, tokens, wait in ms and known tokens of the answer of each turn."""
    assert found.sessions is not None
    session, wait, follows = (one.tolist() for one in found.sessions)
    return list(zip(session, found.prompt.tolist(), found.answer.tolist(), [ns / MS for ns in wait], follows, strict=True))


def test_a_turn_begins_with_the_context_before_it_unless_it_is_shorter(tmp_path: Path):
    found = read(tmp_path, SESSIONS)
    assert table(found) == [(0, 100, 30, 2, 30), (0, 150, 10, 0, 10), (0, 80, 5, 0, 5), (1, 16, 16, 0, 16), (1, 40, 4, 0, 4)]
    assert found.ns is not None and found.ns.tolist() == [0, 0, 0, 9 * MS - 5, 9 * MS - 5]
    assert found.block == 16 and [len(found.blocks(i)) for i in range(5)] == [9, 10, 6, 2, 3]
    assert shared(found, 0, 1) == 9 and shared(found, 1, 2) == 0 and shared(found, 3, 4) == 2
    assert not set(found.blocks(1)) & set(found.blocks(3))


def test_blocks_of_weka_say_what_an_answer_becomes(tmp_path: Path):
    found = read(tmp_path, WEKA)
    assert table(found) == [(0, 8, 3, 2500, 3), (0, 13, 2, 500, 0), (0, 12, 1, 0, 0), (1, 8, 1, 0, 0)]
    assert found.ns is None and found.block == 4
    assert [len(found.blocks(i)) for i in range(4)] == [3, 4, 3, 2]
    assert shared(found, 0, 1) == 3 and shared(found, 0, 2) == 1 and shared(found, 0, 3) == 0, "numbers are of a session"
    everywhere = read(tmp_path, WEKA.replace("local", "global"))
    assert shared(everywhere, 0, 3) == 2


def test_time_to_think_is_the_gap_less_the_recorded_service(tmp_path: Path):
    agent = {"t": 4, "type": "subagent", "requests": [turn(9, 4, 1, [7]), turn(9.5, 5, 1, [7, 8])]}
    text = lines(weka(turn(0, 8, 3, [], api_time=1.5), turn(2, 9, 2, [], api_time=1), agent, turn(30, 9, 2, [], think_time=0.25)))
    assert [row[3] for row in table(read(tmp_path, text))] == [500, 0, 500, 250, 0]


TWO = {"sub_requests": [{"input_toks": 8, "output_toks": 3, "tool_duration_ns": 7 * MS}, {"input_toks": 14, "output_toks": 2}]}


@pytest.mark.parametrize(
    ("scheduler", "cached"),
    [
        (
            {"name": "vllm", "block_size": 2},
            10,
        ),  # of prompt and answer 10 tokens have KV cache: the last token of an answer has none
        ({"name": "vllm", "block_size": 4}, 8),
        ({"name": "sglang"}, 10),
        ("llama-server", 10),
    ],
)
@pytest.mark.parametrize("engine", ["simpy", "native"])
def test_a_later_turn_arrives_after_the_answer_and_finds_its_context(tmp_path: Path, scheduler: Any, cached: int, engine: str):
    path = tmp_path / "s.jsonl"
    path.write_text(lines({**TWO, "arrival_time_ns": 3}, {**TWO, "arrival_time_ns": 3 + 10**12}))
    served = run({"arrivals": str(path), "scheduler": scheduler}, engine=engine).served
    assert served is not None and served.unfinished == 0
    a, b, c, d = served.requests
    assert (a.arrival, c.arrival) == (0, 10**12)
    assert b.arrival == a.end + 7 * MS and d.arrival == c.end + 7 * MS
    assert [one.cached for one in (a, b, c, d)] == [0, cached, 0, cached]


def test_sessions_at_random_and_of_users(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    path.write_text(lines(*[{**TWO, "arrival_time_ns": 0}] * 3))
    served = run({"closed": 2, "think_s": 2.0, "lengths": str(path), "scheduler": "vllm"}).served
    assert served is not None
    assert [(one.user, one.arrival) for one in served.requests[:2]] == [(0, 0), (1, 0)]
    last = served.requests[4]
    assert (last.prompt, last.arrival) == (8, min(one.end for one in served.requests[2:4]) + 2 * 10**9)
    served = run({"arrivals": "poisson", "rate": 0.001, "lengths": str(path), "n_requests": 5, "scheduler": "vllm"}).served
    assert served is not None
    assert [one.prompt for one in served.requests] == [8, 14, 8, 14, 8]
    assert served.requests[1].arrival == served.requests[0].end + 7 * MS


def chat(*said: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in said]}


CHATS = [
    chat(("human", "How do I sort a list?"), ("gpt", "Use sorted(values)."), ("human", "And in reverse?")),
    chat(("human", "Nobody answers.")),
    chat(("gpt", "before"), ("system", "x"), ("human", "ä"), ("gpt", "12345678")),
]


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_texts_of_sharegpt_have_a_token_for_four_bytes(indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = read(tmp_path, json.dumps(CHATS, indent=indent, ensure_ascii=False))
    assert list(zip(found.prompt.tolist(), found.answer.tolist(), strict=True)) == [(6, 5), (1, 2)]
    assert found.failed == 1 and found.ns is None
    two = read(tmp_path, json.dumps([*CHATS, "unread"], indent=indent), most=2)
    assert two.prompt.tolist() == [6, 1]


def test_estimated_tokens_are_labelled(tmp_path: Path):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(CHATS))
    found = experiment({"arrivals": "poisson", "rate": 1.0, "lengths": str(path)})
    (spec,) = found.specs
    assert spec.assumes
    assert f"tokens of {path}: {conversations.ASSUMED}" in found.workload(spec).labels
    with pytest.raises(WorkloadError, match=r"expected times of arrival in .*, got lengths alone"):
        experiment({"arrivals": str(path)})


WRONG = {
    "no list": (lines({"sub_requests": []}, {"a": 1}), ":2: expected a session with a list of sub_requests, got"),
    "no turns": (lines({"sub_requests": []}), ": expected a request that was answered, got none"),
    "turn": (lines({"arrival_time_ns": 0, "sub_requests": [{"input_toks": 4}]}), ":1: turn 0: expected an answer of 1 to"),
    "wait": (
        lines(llmservingsim("a", 0, (4, 4, -1))),
        ":1: turn 0: expected tool_duration_ns, a time that is not negative, got -1",
    ),
    "sessions backwards": (
        lines(llmservingsim("a", 9, (4, 4, 0)), llmservingsim("b", 5, (4, 4, 0))),
        ":2: turn 0: expected times that do not go backwards, got 5 after 9",
    ),
    "block": (lines(weka(block_size=True)), ":1: expected block_size, tokens of a block, got True"),
    "other block": (lines(weka(), weka(block_size=8)), ":2: expected block_size 4, as before, got 8"),
    "too many blocks": (lines(weka(turn(0, 4, 1, [1, 2]))), ":1: request 0: expected at most 1 hash_ids"),
    "time": (lines(weka(turn(0, 4, 1, []), turn("b", 4, 1, []))), "expected t, a time that is not negative, got 'b'"),
    "agent": (lines(weka({"requests": [{"requests": []}]})), ":1: request 0: expected a list of requests of a sub-agent"),
    "no texts": ('[{"id": 1}]', ": conversation 0: expected conversations, a list of {from, value}, got {'id': 1}"),
    "cut list": (json.dumps(CHATS)[:-30], ": expected a list of conversations, got , {"),
    "end": (json.dumps(CHATS)[:-1], "got no end of it; check its end"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused_in_one_line(what: str, tmp_path: Path):
    check_refusal(tmp_path, *WRONG[what])
