"""Steps of each scheduler, worked by hand: rows of each request, and the tokens at the end of the step.

Requests of most tables: A has a prompt of 10 tokens and an answer of 3, B 6 and 2 from step 2 on, C 9 and 2 from step 3 on.
"""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import ConfigError, SimulationError
from moesim.serving import SCHEDULERS, make_scheduler
from moesim.serving.drafts import Drafts
from moesim.serving.scheduler import Pooled, Rows, Scheduler
from tests.serving.stepping_kit import Asked, run, table

ABC = [Asked(0, 10, 3), Asked(1, 6, 2), Asked(2, 9, 2)]

WORKED: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "llama-server": (  # of slots that nobody had, the last is taken; rows are in the order of slots
        {"name": "llama-server", "parallel": 2, "batch": 8, "ubatch": 8},
        [("A8", ""), ("B6 A2", "B1 A1"), ("B1 A1", "B2 A2"), ("A1 C7", "A3"), ("C2", "C1"), ("C1", "C2")],
    ),
    "vllm": (
        {"name": "vllm", "max_num_batched_tokens": 8, "max_num_seqs": 2},
        [("A8", ""), ("A2 B6", "A1 B1"), ("A1 B1", "A2 B2"), ("A1 C7", "A3"), ("C2", "C1"), ("C1", "C2")],
    ),
    "sglang": (
        {"name": "sglang", "chunked_prefill_size": 8},
        [("A8", ""), ("A2 B6", "A1 B1"), ("C8", ""), ("C1", "C1"), ("A1 B1 C1", "A2 B2 C2"), ("A1", "A3")],
    ),
    "sglang mixed": (
        {"name": "sglang", "chunked_prefill_size": 8, "mixed_chunk": True},
        [("A8", ""), ("A2 B6", "A1 B1"), ("C6 A1 B1", "A2 B2"), ("C3 A1", "C1 A3"), ("C1", "C2")],
    ),
    "freetoken": (
        {"name": "freetoken", "max_prefill_length": 8},
        [("A8", ""), ("A2 B6", "A1 B1"), ("C8", ""), ("C1", "C1"), ("A1 B1 C1", "A2 B2 C2"), ("A1", "A3")],
    ),
    "static": (
        {"name": "static", "size": 2},
        [("A10", "A1"), ("A1", "A2"), ("A1", "A3"), ("B6 C9", "B1 C1"), ("B1 C1", "B2 C2")],
    ),
}


@pytest.mark.parametrize("name", WORKED)
def test_three_requests(name: str):
    options, steps = WORKED[name]
    assert table(run(options, ABC)) == steps


def test_ktransformers_reads_a_prompt_next_to_two_answers():
    found = run({"name": "ktransformers"}, [Asked(0, 10, 9), Asked(0, 10, 9), Asked(1, 600, 3)])
    assert table(found, 5) == [
        ("A10 B10", "A1 B1"), ("C254 A1 B1", "A2 B2"), ("C254 A1 B1", "A3 B3"), ("C92 A1 B1", "C1 A4 B4"),
        ("A1 B1 C1", "A5 B5 C2"),
    ]  # fmt: skip


def test_ktransformers_reads_half_as_much_next_to_three_answers_and_of_two_prompts():
    three = [Asked(0, 10, 9), Asked(0, 10, 9), Asked(1, 10, 9)]
    assert table(run({"name": "ktransformers"}, [*three, Asked(2, 130, 2)]), 4)[2:] == [
        ("D127 A1 B1 C1", "A3 B3 C2"), ("D3 A1 B1 C1", "D1 A4 B4 C3"),
    ]  # fmt: skip
    two = [Asked(0, 200, 2), Asked(0, 200, 2)]
    assert table(run({"name": "ktransformers"}, two), 2) == [("A127 B127", ""), ("A73 B73", "A1 B1")]
    single = {"name": "ktransformers", "single_prefill": True}
    assert table(run(single, two), 3) == [("A200", "A1"), ("B200 A1", "B1 A2"), ("B1", "B2")]


def test_ktransformers_waits_for_pages_of_whole_answers():
    options = {"name": "ktransformers", "page_size": 4, "kv_tokens": 24, "chunk_size": 16}
    found = run(options, [Asked(0, 4, 8), Asked(0, 4, 8), Asked(0, 1, 1)])
    assert table(found, 3) == [("A4 B4", "A1 B1"), ("A1 B1", "A2 B2"), ("A1 B1", "A3 B3")]
    assert found.free[:3] == [0, 0, 0]  # 3 pages each from the start, so that C waits
    assert found.records[2].start == 8


# ------------------------------------------------------------------------------------------------------------- llama-server
def test_llama_server_cuts_a_step_in_passes_and_emits_after_the_last():
    found = run({"name": "llama-server", "parallel": 2, "batch": 16, "ubatch": 4}, [Asked(0, 3, 3), Asked(1, 9, 1)])
    # B has the first slot, and A's row comes before its prompt.
    assert [(step.rows, step.ns) for step in found.steps] == [("A3", 0), ("A1 B3", 1), ("B4", 2), ("B2", 3), ("A1", 4)]
    assert [(one.first, one.end) for one in found.records] == [(1, 5), (4, 4)]
    assert found.served.gaps.tolist() == [3, 1]


def test_llama_server_takes_the_slot_with_the_longest_common_prefix():
    asked = [
        Asked(0, 8, 1, (1, 2)), Asked(0, 8, 1, (1, 3)),  # slots 1 and 0
        Asked(5, 12, 1, (1, 2, 9)),  # 8 of 12 tokens are in slot 1, 4 in slot 0
        Asked(9, 8, 1, (1, 3)),  # all are in slot 0, and the last is computed again
        Asked(12, 8, 1, (7, 8)),  # nothing is: slot 1 left earlier
        Asked(15, 8, 1, (1, 3)),
    ]  # fmt: skip
    found = run({"name": "llama-server", "parallel": 2}, asked)
    assert [one.cached for one in found.records] == [0, 0, 8, 7, 0, 7]
    assert [step.rows for step in found.steps] == ["B8 A8", "C4", "D1", "E8", "F1"]


def test_llama_server_needs_a_share_of_the_prompt():
    asked = [Asked(0, 8, 1, (1, 2)), Asked(2, 12, 1, (1, 5, 6))]  # 4 of 12 tokens, in slot 1
    shares = {0.3: 4, 0.4: 0, 0: 0}  # else it takes slot 0, which nobody had
    for share, cached in shares.items():
        found = run({"name": "llama-server", "parallel": 2, "slot_prompt_similarity": share}, asked)
        assert found.records[1].cached == cached


# --------------------------------------------------------------------------------------------------------------------- vLLM
@pytest.mark.parametrize(("caching", "again"), [(True, "B1"), (False, "B9")])
def test_vllm_preempts_the_last_admitted(caching: bool, again: str):
    options = {
        "name": "vllm", "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4, "kv_tokens": 20,
        "prefix_caching": caching,
    }  # fmt: skip
    found = run(options, [Asked(0, 7, 5), Asked(0, 7, 5)])
    assert table(found, 6) == [
        ("A7 B7", "A1 B1"), ("A1 B1", "A2 B2"), ("A1", "A3"), ("A1", "A4"), ("A1", "A5"), (again, "B3"),
    ]  # fmt: skip
    assert found.free[:6] == [1, 1, 2, 2, 5, 2]
    assert [one.preempted for one in found.records] == [0, 1]


def test_vllm_admits_a_preempted_request_before_those_that_wait():
    options = {"name": "vllm", "block_size": 4, "kv_tokens": 20}
    found = run(options, [Asked(0, 7, 5), Asked(0, 7, 5), Asked(2, 3, 1)])
    # Two blocks are free from step 3 on, and C needs one: it waits behind B, which needs three.
    assert found.steps[5][:2] == ("B1 C3", "B3 C1")


def test_vllm_finds_full_blocks_but_never_the_last_token():
    options = {"name": "vllm", "block_size": 4, "max_num_seqs": 8}
    asked = [Asked(0, 8, 2, (1, 2)), Asked(0, 8, 1, (1, 2)), Asked(5, 10, 1, (1, 2, 3)), Asked(5, 6, 1, (1, 4))]
    found = run(options, asked)
    # B finds the block that A computes in the same step, and not the second, which has its last token.
    assert table(found) == [("A8 B4", "A1 B1"), ("A1", "A2"), ("C2 D2", "C1 D1")]
    assert [one.cached for one in found.records] == [0, 4, 8, 4]


def test_vllm_blocks_found_count_against_the_room_if_nobody_uses_them():
    options = {"name": "vllm", "block_size": 4, "kv_tokens": 16}
    asked = [Asked(0, 8, 1, (1, 2)), Asked(1, 8, 4, (8, 9)), Asked(1, 12, 2, (1, 2, 3))]
    # C finds both blocks of A, which nobody uses, and wants a third: there are two. B then writes over A's second.
    assert table(run(options, asked)) == [
        ("A8", "A1"), ("B8", "B1"), ("B1", "B2"), ("B1", "B3"), ("B1", "B4"), ("C8", "C1"), ("C1", "C2"),
    ]  # fmt: skip


def test_vllm_limits_long_prompts():
    options = {"name": "vllm", "max_num_batched_tokens": 8, "long_prefill_token_threshold": 3}
    assert table(run(options, [Asked(0, 5, 1), Asked(0, 7, 1)])) == [("A3 B3", ""), ("A2 B3", "A1"), ("B1", "B1")]


def test_vllm_without_chunks_lets_a_prompt_wait_for_the_whole_budget():
    options = {"name": "vllm", "max_num_batched_tokens": 8, "chunked": False}
    found = run(options, [Asked(0, 5, 1), Asked(0, 7, 1), Asked(0, 2, 1), Asked(0, 8, 1)])
    assert table(found) == [("A5", "A1"), ("B7", "B1"), ("C2", "C1")]
    assert found.records[3].refused  # 8 and 1 tokens are more than any step has


# ------------------------------------------------------------------------------------------------------------------- SGLang
def test_sglang_retracts_the_request_with_the_fewest_tokens():
    options = {"name": "sglang", "kv_tokens": 24, "schedule_conservativeness": 0}
    found = run(options, [Asked(0, 5, 12), Asked(1, 5, 12)])
    # Both have 12 tokens of 24 when the next two find no room: B, the last admitted, returns to the queue with its 12.
    assert table(found, 10)[8:] == [("A1 B1", "A8 B8"), ("A1", "A9")]
    assert [one.preempted for one in found.records] == [0, 1]
    assert table(found)[13] == ("B5", "B9")  # of 13 known tokens it finds 8: A has written over the last 4 of 12


def test_sglang_retracts_the_longest_of_prompts_with_as_many_tokens():
    options = {"name": "sglang", "kv_tokens": 24, "schedule_conservativeness": 0}
    found = run(options, [Asked(0, 9, 9), Asked(1, 2, 9)])
    assert [one.preempted for one in found.records] == [1, 0]  # A, which was admitted first, has the longer one


@pytest.mark.parametrize(("prompt", "start"), [(21, 1), (22, 3)])
def test_sglang_leaves_a_token_free(prompt: int, start: int):
    options = {"name": "sglang", "kv_tokens": 40, "schedule_conservativeness": 0}
    found = run(options, [Asked(0, 5, 3), Asked(1, prompt, 12)])  # 35 tokens are free, for the prompt, 12 and a page
    assert found.records[1].start == start


def test_sglang_reserves_a_share_of_the_answers_to_come():
    def begins(conservativeness: float) -> int:
        options = {"name": "sglang", "kv_tokens": 40, "schedule_conservativeness": conservativeness}
        return run(options, [Asked(0, 5, 20), Asked(1, 5, 12)]).records[1].start

    # B asks for 5 + 12 + 1 tokens, and must leave one. At 1 ns A has 5 tokens and waits for 19 more: 0.7 x 19 = 13.3 are
    # reserved, and 21.7 left. At a share of 1, 19 are reserved and 16 left; more tokens of A make no difference, its end does.
    assert begins(1.0) == 1
    assert begins(10.0) == 20


def test_sglang_closes_admission_until_a_request_leaves():
    options = {"name": "sglang", "max_running_requests": 2}
    found = run(options, [Asked(0, 4, 2), Asked(0, 4, 4), Asked(0, 4, 1)])
    assert table(found, 3) == [("A4 B4", "A1 B1"), ("A1 B1", "A2 B2"), ("C4", "C1")]


def test_sglang_cuts_on_the_grid_of_pages():
    options = {"name": "sglang", "chunked_prefill_size": 10, "page_size": 4}
    assert table(run(options, [Asked(0, 5, 1), Asked(0, 9, 1)])) == [("A5", "A1"), ("B8", ""), ("B1", "B1")]


# ----------------------------------------------------------------------------------------------------------------- FreeToken
def test_freetoken_reserves_whole_answers():
    options = {"name": "freetoken", "kv_tokens": 29}
    found = run(options, [Asked(0, 10, 10), Asked(0, 5, 4), Asked(1, 2, 1)])
    # A and B ask for 20 and 9 tokens; C's 3 do not fit next to what A and B may still take, until B has ended.
    assert table(found, 6) == [
        ("A10 B5", "A1 B1"), ("A1 B1", "A2 B2"), ("A1 B1", "A3 B3"), ("A1 B1", "A4 B4"), ("C2", "C1"), ("A1", "A5"),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------------- Strata
def test_strata_decodes_for_half_a_chunk_between_chunks():
    options = {"name": "strata", "parallel": 2, "prefill": 10}
    found = run(options, [Asked(0, 10, 9), Asked(14, 15, 3)], lasts=lambda step: {"prefill": 20, "decode": 5}[step.phase])
    assert [(step.ns, step.rows) for step in found.steps] == [
        (0, "A10"), (20, "B10"), (40, "A1"), (45, "A1"), (50, "B5"), (70, "B1 A1"), (75, "B1 A1"), (80, "A1"), (85, "A1"),
        (90, "A1"), (95, "A1"),
    ]  # fmt: skip


def test_strata_alone_takes_one_request_after_the_other():
    found = run({"name": "strata"}, [Asked(0, 3, 2), Asked(0, 3, 2)])
    assert table(found) == [("A3", "A1"), ("A1", "A2"), ("B3", "B1"), ("B1", "B2")]


def test_strata_lets_a_short_prompt_go_first_at_most_twice():
    options = {"name": "strata", "parallel": 4, "prefill": 4, "decode_share": 0}
    asked = [Asked(0, 12, 1), Asked(1, 6, 1), Asked(1, 5, 1), Asked(1, 4, 1), Asked(1, 3, 1)]
    # B has half of A's tokens, not less. C and D go before, E does not: A gave way twice.
    assert [step.rows for step in run(options, asked).steps] == ["A4", "C4", "C1", "D4", "A4", "A4", "B4", "B2", "E3"]


def test_strata_rotates_more_slots_than_a_window_has_rows():
    found = run({"name": "strata", "parallel": 9, "prefill": 100}, [Asked(0, 1, 3)] * 9)
    counts = [len(step.rows.split()) for step in found.steps if step.phase == "decode"]
    assert counts == [8, 8, 2]


ACCEPTED = Drafts(3, (1.0, 1.0, 1.0))


def test_strata_alone_has_drafts_and_slots_one_or_none():
    asked = [Asked(0, 4, 13), Asked(2, 4, 3)]
    found = run({"name": "strata", "parallel": 2}, asked, drafts=ACCEPTED)
    # A alone gains 4 tokens a window, one next to B, and 4 again when B has ended.
    assert [step.rows for step in found.steps] == ["A4", "A4", "B4", "B1 A1", "B1 A1", "A4", "A2"]
    found = run({"name": "strata", "parallel": 2, "batch_mtp": True}, asked, drafts=ACCEPTED)
    assert [step.rows for step in found.steps] == ["A4", "A4", "B4", "B2 A2", "A4", "A2"]


def test_strata_leaves_its_slot_twice():
    asked = [Asked(0, 1, 30), *[Asked(at, 1, 2) for at in (3, 8, 13)]]
    found = run({"name": "strata", "parallel": 2}, asked, drafts=Drafts(1, (0.0,)))
    alone = [(step.ns, step.rows) for step in found.steps if step.rows.startswith("A") and " " not in step.rows]
    assert [rows for ns, rows in alone if 5 <= ns < 8] == ["A2", "A2", "A2"]
    assert [rows for ns, rows in alone if 10 <= ns < 13] == ["A2", "A2", "A2"]
    assert {rows for ns, rows in alone if ns >= 15} == {"A1"}


def test_vllm_drops_drafts_beyond_its_budget():
    found = run({"name": "vllm", "max_num_batched_tokens": 6}, [Asked(0, 3, 9), Asked(0, 3, 9)], drafts=ACCEPTED)
    assert [step.rows for step in found.steps] == ["A3 B3", "A4 B2", "A4 B2", "B4"]


# -------------------------------------------------------------------------------------------------------------------- static
def test_static_reads_chunks_of_all_prompts():
    found = run({"name": "static", "size": 3, "prefill_chunk": 8}, [Asked(0, *one[1:3]) for one in ABC])
    assert table(found) == [
        ("A8", ""), ("A2 B6", "A1 B1"), ("C8", ""), ("C1", "C1"), ("A1 B1 C1", "A2 B2 C2"), ("A1", "A3"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- what is promised
def test_a_pool_is_no_larger_than_requests_can_be_there():
    for name in SCHEDULERS:
        made = make_scheduler({"name": name})
        made.longest, made.at_once = 100, 3
        if isinstance(made, Pooled):
            assert made.most_requests == 3
            assert 300 <= made.capacity <= 3 * 3 * made.block + 300
        assert made.longest_possible >= 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "vlm"}, "unknown scheduler 'vlm'"),
        ({"name": "vllm", "np": 3}, "unknown option of vllm 'np'"),
        ({"name": "vllm", "chunked": 1}, "workload.scheduler.chunked: expected true or false, got 1"),
        ({"name": "vllm", "max_num_seqs": 0}, "workload.scheduler.max_num_seqs: expected an integer of at least 1, got 0"),
        ({"name": "strata", "decode_share": -0.5}, "expected a number of at least 0, got -0.5"),
        ({"name": "strata", "decode_share": float("inf")}, "expected a number of at least 0, got inf"),
        ({"name": "ktransformers", "chunk_size": 2}, "ktransformers: chunk_size: expected at least max_batch_size = 4, got 2"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        make_scheduler(options)


class Greedy(Scheduler):
    """A scheduler that breaks one promise."""

    name = "greedy"
    wrong = ""
    most_requests = 2
    most_rows = 8
    n_running = 0

    def plan(self, now_ns: int) -> list[Rows]:
        self.n_running += len(self.waiting)
        first = self.waiting.popleft()
        self.waiting.clear()
        n = {"rows": 9, "past": first.known + 1, "none": 0}.get(self.wrong, 1)
        if self.wrong == "lost":
            self.n_running -= 1
        return [Rows(first, n)] * (2 if self.wrong == "twice" else 1)


@pytest.mark.parametrize(
    ("wrong", "n", "words"),
    [
        ("rows", 1, "expected at most 8 rows in a step, got 9"),
        ("twice", 1, "expected each request once in a step, got one twice"),
        ("past", 1, "expected 1 to 4 rows of request 0, got 5"),
        ("none", 1, "expected 1 to 4 rows of request 0, got 0"),
        ("", 3, "expected at most 2 requests, got 3"),
        ("lost", 2, "expected 2 requests that run or wait, got 1 and 0"),
    ],
)
def test_a_plan_that_breaks_a_promise_is_an_error(monkeypatch: pytest.MonkeyPatch, wrong: str, n: int, words: str):
    monkeypatch.setitem(SCHEDULERS, "greedy", Greedy)
    monkeypatch.setattr(Greedy, "wrong", wrong)
    with pytest.raises(SimulationError, match=f"scheduler greedy: {words}"):
        run({"name": "greedy"}, [Asked(0, 4, 6)] * n)
