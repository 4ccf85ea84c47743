"""The sentence that a report begins with: never a winner that random repetitions do not set apart."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.explore.results import filter_patterns
from moesim.reporting.answer import answer_of
from moesim.reporting.tables import found_by
from tests.report.report_kit import failed, row


def speeds(**by_policy: float) -> list[dict[str, Any]]:
    return [row(i, name, decode_tokens_per_s=speed) for i, (name, speed) in enumerate(by_policy.items())]


def repeats(policy: str, *found: float, drawn: bool = True) -> list[dict[str, Any]]:
    return [
        row(i, policy, seed=i, repeat=i, requests_drawn=str(i if drawn else 0), decode_tokens_per_s=speed)
        for i, speed in enumerate(found)
    ]


def served(policy: str, **changes: Any) -> dict[str, Any]:
    return row(0, policy, decode_tokens_per_s=None, n_requests_arrived=9, **changes)


SENTENCES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "one winner": (
        speeds(lru=10.0, dali=13.0, fiddler=12.0),
        "dali decodes fastest: 13 tokens/s, 1.08 times as fast as fiddler.",
    ),
    "two within 2 %": (
        speeds(lru=10.0, dali=10.1, fiddler=5.0),
        "No policy is clearly ahead: dali (10.1 tokens/s) and lru (10 tokens/s) cannot be told apart, "
        "with less than 2 % between them.",
    ),
    "repetitions set apart": (  # geometric mean of 1.2, 1.21, 1.2
        repeats("lru", 10, 20, 30) + repeats("dali", 12, 24.2, 36),
        "dali decodes fastest: 24.1 tokens/s, 1.2 times (95 % interval 1.19 to 1.22) as fast as lru.",
    ),
    "repetitions do not": (
        repeats("lru", 10, 10, 10) + repeats("dali", 11, 11, 14),
        "No policy is clearly ahead: dali (12 tokens/s) and lru (10 tokens/s) cannot be told apart, "
        "given the variation between random repetitions.",
    ),
    "repetitions of the same requests": (
        repeats("lru", 10, 10, drawn=False) + repeats("dali", 11, 11, drawn=False),
        "dali decodes fastest: 11 tokens/s, 1.1 times as fast as lru.",
    ),
    "several machines": (
        [
            row(0, name, hardware=machine, batch_size=batch, decode_tokens_per_s=speed * batch)
            for machine, of in (("fast", {"lru": 2.0, "dali": 1.0}), ("slow", {"lru": 1.0, "dali": 1.5}))
            for batch in (1, 8)
            for name, speed in of.items()
        ],
        "lru decodes fastest in 2 of 4 settings (fast: 2 times as fast as dali) and dali in 2 (slow: 1.5 times).",
    ),
    "batch sizes, and a tie": (
        [row(0, "lru", batch_size=b, decode_tokens_per_s=10.0) for b in (1, 4, 8)] +
        [row(0, "dali", batch_size=b, decode_tokens_per_s=speed) for b, speed in ((1, 12.0), (4, 13.0), (8, 10.1))],
        "dali decodes fastest in 2 of 3 settings (batch 1 and 4: 1.2 to 1.3 times as fast as lru) and in 1 (batch 8) no policy "
        "is clearly ahead, with less than 2 % between them.",
    ),
    "everywhere": (
        [row(0, name, batch_size=b, decode_tokens_per_s=speed) for b in (1, 4) for name, speed in (("lru", 1.0), ("dali", 2.0))],
        "dali decodes fastest in all 2 settings (2 times as fast as lru).",
    ),
    "no winner anywhere": (
        [row(0, name, batch_size=b, decode_tokens_per_s=1.0) for b in (1, 4) for name in ("lru", "dali")],
        "No policy is clearly ahead in 2 settings, with less than 2 % between them.",
    ),
    "one where others failed": (
        [*speeds(lru=1.0, dali=2.0), row(2, "lru", batch_size=4), failed(3, "dali", "no memory", batch_size=4)],
        "dali decodes fastest in 1 of 2 settings (batch 1: 2 times as fast as lru) and in 1 only one policy ran.",
    ),
    "one policy": (
        [row(i, "lru", batch_size=b, decode_tokens_per_s=2.0 * b) for i, b in enumerate((1, 8))],
        "lru decodes from 2 (batch 1) to 16 (batch 8) tokens/s.",
    ),
    "one run": (speeds(lru=10.25), "lru decodes 10.2 tokens/s."),
    "good requests": (
        [served("lru", goodput_per_s=0.5, ttft_p50_ns=2e9), served("dali", goodput_per_s=0.75, ttft_p50_ns=1e9)],
        "dali serves the most requests within the limits: 0.75 good requests/s, first token after 1 s, 1.5 times as many as lru.",
    ),
    "good requests of one alone": (
        [served("lru", goodput_per_s=0.0), served("dali", goodput_per_s=0.5)],
        "dali serves the most requests within the limits: 0.5 good requests/s, lru none.",
    ),
    "served without limits": (
        [served("lru", e2e_p50_ns=6e9), served("dali", e2e_p50_ns=3e9)],
        "dali completes answers soonest: 3 s from request to end of answer (median), 2 times as fast as lru.",
    ),
    "prompts alone": (
        [row(0, name, decode_tokens_per_s=None, prefill_tokens_per_s=speed) for name, speed in (("lru", 50.0), ("dali", 75.0))],
        "dali reads prompts fastest: 75 prompt tokens/s, 1.5 times as fast as lru.",
    ),
    "without costs": (
        [
            row(0, name, decode_tokens_per_s=None, prefill_tokens_per_s=None, hit_rate=rate)
            for name, rate in (("lru", 0.25), ("lfu", 0.5))
        ],
        "lfu finds most experts on the GPU: 50 % of lookups, 2 times as many as lru.",
    ),
    "all failed": (
        [failed(0, "lru", "no memory; lower the cache"), failed(1, "dali", "no memory")],
        "All 2 runs failed, the first: no memory; lower the cache.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_sentence(case: str):
    rows, expected = SENTENCES[case]
    assert answer_of(rows).sentence == expected


def test_what_sees_the_future_or_is_not_exact_does_not_win():
    rows = [*speeds(lru=10.0, dali=12.0), row(2, "belady", decode_tokens_per_s=50.0, source_label="oracle")]
    rows.append(row(3, "daop", decode_tokens_per_s=40.0, fidelity_fresh_decode=0.5))
    found = answer_of(rows)
    assert found.sentence.startswith("dali decodes fastest")
    assert found.below == "Not ranked: belady (an oracle), daop (not exact)."


def test_a_lead_that_the_machines_intervals_undo_is_said():
    ends = [{"decode_tokens_per_s_least": low, "decode_tokens_per_s_most": high} for low, high in ((11.0, 13.0), (9.0, 11.5))]
    rows = [row(0, "dali", decode_tokens_per_s=12.0, **ends[0]), row(1, "lru", decode_tokens_per_s=10.0, **ends[1])]
    assert answer_of(rows).below == "Within the intervals of the machine's numbers the next policy may be as fast."
    rows[1]["decode_tokens_per_s_most"] = 10.5
    assert answer_of(rows).below == ""


def finds(typed: str, **changes: Any) -> bool:
    text = found_by(row(0, "Ours", policy_name="dali", policy_options='{"u_size": 2}', batch_size=8, **changes))
    return all(pattern.search(text) for pattern in filter_patterns(typed))


@pytest.mark.parametrize(
    "typed",
    ["batch 8", "batch_size=8", "Batch size 8", "dali", "ours", "dali batch 8", "8 batch", "cache 0.25", "cache 25%",
     "cache ratio 0.25", "u_size 2", "model mix", "batch", "", "run 0"],
)  # fmt: skip
def test_a_filter_finds(typed: str):
    assert finds(typed)


@pytest.mark.parametrize("typed", ["batch 80", "batch 0.8", "lru batch 8", "dali batch 4", "cache 0.2", "run 1", "a(b"])
def test_a_filter_leaves_out(typed: str):
    assert not finds(typed)


def test_a_mapping_is_found_by_its_words():
    assert finds("kv 50 %", kv='{"host": 0.5}') and finds("in host", kv='{"host": 0.5}') and not finds("kv", kv=None)
