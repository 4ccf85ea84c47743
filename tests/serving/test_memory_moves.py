"""A budget that moves between the expert slots of vLLM's cache and its KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import WorkloadError
from moesim.policies.systems.vllm_expert_cache import MovingBudget
from moesim.serving.steps import KvUse
from tests.engine.engine_kit import assert_same
from tests.serving.serving_kit import experiment, run

MOVES = {"name": "vllm-expert-cache", "moves_memory": True}


def budget(**changes: int) -> MovingBudget:
    return MovingBudget(**{"slots": 10, "least": 2, "most": 64, "slot_bytes": 100, "token_bytes": 1, **changes})


def idle(one: MovingBudget, used: int, *, tokens: int = 3000, steps: int = 8, widest: int = 64, least: int = 0) -> int | None:
    one.steps, one.widest = one.steps + steps, max(one.widest, widest)
    return one.tokens(KvUse(tokens, used, least))


def test_two_moments_that_agree_move_what_the_kv_cache_does_not_need():
    """4,000 bytes. 1,000 tokens and 15 % leave 2,850, 28 slots; 1,200 leave 2,620, 26: the smaller move is made."""
    one = budget()
    assert idle(one, 1000) is None, "the first to say so"
    assert idle(one, 1200) == 4000 - 26 * 100
    assert one.slots == 26


def test_slots_go_back_to_a_kv_cache_that_is_used_more():
    one = budget()
    assert [idle(one, used) for used in (2900, 3000)] == [None, 4000 - 6 * 100], "1.15 * 2,900 leaves 6 slots, 3,000 leave 5"


def test_what_is_widest_limits_the_slots_and_the_longest_request_the_move():
    one = budget()
    assert [idle(one, 100, widest=20) for _ in range(2)] == [None, 4000 - 20 * 100]
    one = budget()
    assert [idle(one, 100, least=2500) for _ in range(2)] == [None, 4000 - 15 * 100]


@pytest.mark.parametrize(
    ("uses", "why"),
    [
        ([2400, 2400], "12 slots less 10 are two, 1.15 * 2,400 leaves 1,240: 12"),
        ([2500, 2500], "11 slots: one is too few"),
        ([1000, 3100], "more, then fewer"),
    ],
)
def test_small_moves_and_moments_that_differ_change_nothing(uses: list[int], why: str):
    one = budget()
    moved = [idle(one, used) for used in uses]
    assert moved == ([None, 4000 - 12 * 100] if uses[0] == 2400 else [None, None]), why


def test_moments_soon_after_another_count_together():
    """Three and five steps are one epoch, whose most is 2,000 tokens."""
    one = budget()
    assert idle(one, 1000) is None
    assert idle(one, 2000, steps=3) is None
    assert idle(one, 500, steps=5) == 4000 - 17 * 100, "1.15 * 2,000 leaves 17 slots; before, 28"


ASKED = {
    "arrivals": "poisson", "rate": 0.02, "n_requests": 12, "prompt_tokens": 6, "answer_tokens": 8, "seed": 1,
    "scheduler": {"name": "vllm", "kv_tokens": 65_536, "max_num_seqs": 4},
}  # fmt: skip
MODEL = {"model": {"base": "mixtral-8x7b", "expert_bits": 4}, "cache": {"ratio": 0.25}}


def test_memory_moves_in_a_run_and_none_is_used_twice():
    plain, moved = run(ASKED, "vllm-expert-cache", **MODEL), run(ASKED, MOVES, "simpy", **MODEL)
    assert_same(moved, run(ASKED, MOVES, "native", **MODEL))
    (spec,) = experiment({"closed": 1}, **MODEL).specs
    slots, size = spec.model.n_layers * 2, spec.model.expert_bytes(0)
    before, after = (records.pool_peak_bytes["gpu0", "cache"] for records in (plain, moved))
    assert before <= slots * size < after
    assert moved.peak_bytes["gpu0"] <= plain.peak_bytes["gpu0"] + slots * size - before


def test_a_move_takes_its_time_before_the_next_step():
    found = experiment(ASKED, **MODEL)
    serving: Any = found.workload(found.specs[0]).steps.begin()
    seen: list[KvUse] = []
    serving.let_move(lambda use: (seen.append(use), (32_768, 10**15))[1], "a policy")
    now, step = 0, serving.after(0)
    while not seen:
        now = step if isinstance(step, int) else now + 1000
        step = serving.after(now)
    assert seen == [KvUse(65_536, 16, 14)], "a request of 6 + 8 tokens has one block of 16"
    assert step == now + 10**15
    assert serving.after(step).kv_tokens == 32_768


def test_a_scheduler_without_blocks_is_refused():
    with pytest.raises(
        WorkloadError,
        match=r"with KV cache in blocks next to VllmExpertCache, which moves its memory, got llama-server; take vllm",
    ):
        run({"closed": 1, "n_requests": 1}, MOVES, **MODEL)
