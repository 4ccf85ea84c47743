"""A cache that is filled in the background: what each of its options does, and exact timelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moesim.policies.registry import describe_policy, make_policy
from moesim.records import Records
from moesim.testing import FakeView
from tests.engine.engine_kit import cpu, gpu, machine, play, tiny_model, transfers, workload
from tests.policies.caches_kit import FAST, copied, served
from tests.policies.caches_kit import run as decoded


def run(options: dict[str, Any], steps: Sequence[Any], slots: int, **more: Any) -> Records:
    """Decode one token a step."""
    return decoded({"name": "background-cache", **options}, steps, slots, **more)


# ------------------------------------------------------------------------------------------------ admission, publication


@pytest.mark.parametrize(("options", "at"), [({}, 13), ({"half_life": 32.0}, 14)])
def test_admission_by_score_halves_in_sixteen_visits_unless_asked(options: dict[str, Any], at: int) -> None:
    # Of eight uses 5.33 are left after six more visits, when 1 has 5.41; with 32, 6.38 after seven, when 1 has 6.57.
    records = run({"admission": "score", "victim": "score", **options}, [[0]] * 8 + [[1]] * 8, 1)
    assert copied(records) == [(0, 0), (at, 1)]


@pytest.mark.parametrize(("inserts", "copies"), [(1, [2]), (2, [2, 1]), (None, [2, 1, 0])])
def test_the_newest_misses_of_a_step_are_copied_as_the_next_begins(inserts: int | None, copies: list[int]) -> None:
    found = copied(run({"admission": "newest", "inserts": inserts}, [[0, 1, 2], [3, 4, 5]], 4))
    assert found == [(1, expert) for expert in copies]


def test_between_batches_of_requests() -> None:
    rows = [[[0, 1]]] * 3  # one token of a prompt, two generated
    work = workload([rows, rows], prompt=1, n_experts=8, batch_size=1)
    policy = make_policy({"name": "background-cache", "publish": "batch"})
    records = play(policy, work, FAST, model=tiny_model(n_layers=1, n_experts=8), slots={"gpu0": 2})
    assert served(records) == [[], [], [], [], [0, 1], [0, 1]]
    assert policy.counters == {"cache_hits": 4, "cache_misses": 4}


# ------------------------------------------------------------------------------------------------------------- timelines
def test_the_link_and_the_cpu_share_the_misses() -> None:
    # Half of four misses: the two first by rank are copied, 1000 ns each, while the CPU computes the others.
    slow = machine({"gpu0": gpu(), "cpu0": cpu()})
    work = [[0, 1, 2, 3]]
    model = tiny_model(n_layers=1, n_experts=8, top_k=4)
    policy = make_policy({"name": "background-cache", "copied_now": "share", "share": 0.5})
    found = play(policy, workload([[work]], n_experts=8, weights=[0.25] * 4), slow, model=model, slots={"gpu0": 2})
    assert transfers(found)[:2] == [(100, 1100, "cpu0->gpu0", "demand 0/0"), (1100, 2100, "cpu0->gpu0", "demand 0/1")]
    assert {t.expert for t in found.tasks if t.device == "cpu0" and t.expert >= 0} == {2, 3}
    assert len(found.transfers) == 2, "no slot is left for later"


def test_micro_batches_do_not_put_each_other_out() -> None:
    requests = [[[[0, 1]]] * 2, [[[2, 3]]] * 2]
    policy = make_policy({"name": "background-cache", "copied_now": "all"})
    work = workload(requests, n_experts=8, micro_batches=2)
    records = play(policy, work, FAST, model=tiny_model(n_layers=1, n_experts=8), slots={"gpu0": 2})
    assert {t.expert for t in records.tasks if t.device == "cpu0" and t.expert >= 0 and t.step == 0} == {2, 3}
    assert records.inexact == []


# ---------------------------------------------------------------------------------------------- publication and sequence
def test_a_copy_counts_once_it_has_arrived_and_its_slot_is_dead_until_then() -> None:
    # One slot, which has 0. The copy of 1 takes 1000 from the first visit on; a step takes 940, so that it spans the second.
    records = run({"warm": True}, [[1, 2], [0, 1], [0, 1]], 1, hardware=machine({"gpu0": gpu(), "cpu0": cpu()}))
    (copy, *_) = records.transfers
    assert (copy.expert, copy.start, copy.end) == (1, 100, 1100)
    assert [step.begin + 100 for step in records.steps] == [100, 1040, 1980]
    assert served(records) == [[], [], [1]]


def test_one_after_the_other() -> None:
    # Half of the two misses, 2, is copied, 1000 ns; 0 is there; the CPU computes 3. Outputs cross in 20 ns after it.
    warm = {"copied_now": "share", "warm": True}
    work = workload([[[[0, 2, 3]]]], n_experts=8, weights=[0.5, 0.25, 0.25])
    model = tiny_model(n_layers=1, n_experts=8, top_k=3)
    found = {}
    for overlap in (True, False):
        policy = make_policy({"name": "background-cache", "overlap": overlap, **warm})
        records = play(policy, work, machine({"gpu0": gpu(), "cpu0": cpu()}), model=model, slots={"gpu0": 2})
        found[overlap] = {task.expert: (task.start, task.end) for task in records.tasks if task.expert >= 0}
    assert found[True] == {0: (100, 200), 2: (1100, 1200), 3: (120, 520)}
    assert found[False] == {0: (1100, 1200), 2: (1200, 1300), 3: (1320, 1720)}


# ---------------------------------------------------------------------------------------------------------------- orders


def test_of_those_used_at_once_the_lowest_slot_leaves_whatever_the_order_of_the_hits() -> None:
    steps = [[5, 2], [2, 5], [7, 8]]  # by rank 2 has been used longer ago
    left = [run({"copied_now": "all", "hit_order": order}, steps, 3).evictions[0].expert for order in ("rank", "equal")]
    assert left == [2, 5]


# --------------------------------------------------------------------------------------------------------------- prompts
PROMPT = [[[2, 3]], [[4, 5]]]  # of two tokens, which use four experts
NARROW_PROMPT = [[[2, 3]], [[2, 3]]]


def two_requests(options: dict[str, Any], prompt: Sequence[Any], slots: int = 2) -> Records:
    """Fill the cache with experts 0 and 1, then run a prompt of two tokens, then use 0 and 1 again."""
    work = workload([[*PROMPT, [[0, 1]], [[0, 1]]], [*prompt, [[0, 1]]]], prompt=2, n_experts=8, batch_size=1)
    policy = make_policy({"name": "background-cache", "copied_now": "all", **options})
    return play(policy, work, FAST, model=tiny_model(n_layers=1, n_experts=8), slots={"gpu0": slots})


@pytest.mark.parametrize(
    ("options", "prompt", "on_gpu", "stay"),
    [
        ({"prefill": "bypass"}, PROMPT, [], True),
        ({"prefill": "read-only"}, PROMPT, [2, 3, 4, 5], True),
        ({"prefill": "read-only"}, [[[0, 3]], [[4, 5]]], [0, 3, 4, 5], True),
        ({"prefill": "fitting"}, PROMPT, [2, 3, 4, 5], True),
        ({"prefill": "fitting"}, NARROW_PROMPT, [2, 3], False),
        ({"prefill": "read-only", "cached_rows": 2}, NARROW_PROMPT, [2, 3], False),
        ({"prefill": "bypass", "cached_rows": 1}, NARROW_PROMPT, [], True),
        ({"prefill": "cached"}, NARROW_PROMPT, [2, 3], False),
    ],
)
def test_who_computes_prompts_and_what_becomes_of_the_cache(
    options: dict[str, Any], prompt: Sequence[Any], on_gpu: list[int], stay: bool
) -> None:
    records = two_requests(options, prompt)
    *_, of_prompt, last = served(records)
    assert sorted(of_prompt) == on_gpu
    assert sorted(last) == [0, 1]
    begin = records.steps[-1].begin
    assert [t.expert for t in records.transfers if t.expert >= 0 and t.submitted >= begin] == ([] if stay else [0, 1])


def test_a_prompt_waits_for_what_is_on_its_way_to_the_cache() -> None:
    # The copy of 1 takes 1000; the prompt of the second request needs it, so that it becomes the most urgent.
    slow = machine({"gpu0": gpu(), "cpu0": cpu()})
    work = workload([[[[6, 7]], [[0, 1]]], [[[1, 5]], [[1, 0]]]], prompt=1, n_experts=8, batch_size=1)
    policy = make_policy({"name": "background-cache", "prefill": "read-only"})
    records = play(policy, work, slow, model=tiny_model(n_layers=1, n_experts=8), slots={"gpu0": 2})
    copies = [(t.expert, t.cause) for t in records.transfers if t.expert >= 0]
    assert sorted(copies) == [(0, "update"), (1, "demand"), (5, "demand"), (6, "demand"), (7, "demand")]
    assert [sorted(step) for step in served(records)[2:]] == [[1, 5], [0, 1]]


@pytest.mark.parametrize(
    ("names", "there"),
    [
        (["llama-cpp", "llama-cpp-fit", "llama-cpp-cache", "pooled-cache", "turboquant-cache", "two-uploads-lru", "heat-cache",
          "fabric-lru", "dfa-cache", "pipeshard", "exllamav3"], {("embedding", -1): "cpu0"}),
        (["background-cache", "freetoken", "kt-layer"], {}),
    ],
)  # fmt: skip
def test_where_tokens_are_looked_up(names: list[str], there: dict[tuple[str, int], str]) -> None:
    view = FakeView(slots=16)
    assert {name: dict(make_policy(name).place(view).parts) for name in names} == dict.fromkeys(names, there)


CACHES = [
    "background-cache",
    "two-uploads-lru",
    "heat-cache",
    "pooled-cache",
    "exllamav3",
    "dfa-cache",
    "moe-gen",
    "zero-inference",
]


@pytest.mark.parametrize("overlap", [None, False, True])
@pytest.mark.parametrize("name", CACHES)
def test_each_device_runs_the_experts_of_a_visit_by_id(name: str, overlap: bool | None) -> None:
    if overlap is None or "overlap" in describe_policy(name).options:
        steps = [[9, 4, 6, 1]] * 4 + [[20, 4, 6, 17], [4, 20, 9, 33], [20, 9, 4, 1]] * 3
        records = decoded(name if overlap is None else {"name": name, "overlap": overlap}, steps, 4, least=40)
        found: dict[tuple[str, int], list[int]] = {}
        for task in sorted(t for t in records.tasks if t.expert >= 0):
            found.setdefault((task.device, task.step), []).append(task.expert)
        assert max(map(len, found.values())) > 1 and all(ids == sorted(ids) for ids in found.values())
