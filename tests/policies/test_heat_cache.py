"""Decayed heat with hysteresis (llama.cpp PRs 26563 and 26824): the worked example, and exact exchanges."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.policies.registry import make_policy
from moesim.policies.systems.heat_cache import Heat, period, target_rate
from tests.engine.engine_kit import play, tiny_model, workload
from tests.policies.caches_kit import FAST, run, served


@pytest.mark.parametrize(("heat_of_3", "leaves", "enters"), [(9.0, 1, 3), (7.5, None, None)])
def test_the_coldest_leaves_if_the_newcomer_is_hotter_by_the_factor(
    heat_of_3: float, leaves: int | None, enters: int | None
) -> None:
    # 9 is above 1.3 x 6 = 7.8, and 7.5 is not.
    one = Heat(4, 2)
    one.heat = [10.0, 6.0, 7.5, heat_of_3]
    assert (one.leaves(1.3, 0), one.enters()) == (leaves, None)
    if leaves is not None:
        del one.there[leaves]
    assert one.enters() == enters


def test_none_leaves_unless_one_on_the_cpu_is_hotter_than_one_on_the_gpu() -> None:
    one = Heat(3, 2)
    one.there, one.heat = {1: 0, 2: 0}, [5.0, 5.0, 5.0]
    assert one.leaves(0.5, 0) is None, "2 is not among the two hottest, but 0 is not hotter"
    one.there = {0: 0, 1: 0}
    one.heat = [5.0, 4.0, 4.5]
    assert one.leaves(1.0, 0) == one.leaves(1.125, 0) == 1, "exactly so many times as hot is enough"
    assert one.leaves(1.0, 1) is None, "it has not been there for an exchange"


def test_the_better_the_hit_rate_the_rarer_the_exchanges() -> None:
    assert [target_rate(slots, n) for slots, n in ((2, 8), (1, 64), (8, 8), (0, 8))] == pytest.approx(
        [0.348, 0.2, 0.8, 0.2], abs=1e-3
    )
    given = ((5, 0), (5, 1), (5, 1.19), (5, 5), (10, 5), (10, 9))
    assert [period(floor, ratio) for floor, ratio in given] == [5, 5, 6, 26, 31, 32]
    policy = make_policy("heat-cache")  # three of four slots: the target is 0.673, and with hits alone the period 7
    work = workload([[[[0]]] * 42], n_experts=4, weights=[1])
    play(policy, work, FAST, model=tiny_model(n_layers=1, n_experts=4, top_k=1), slots={"gpu0": 3})
    assert policy.counters == {"exchanges": 6}


def test_one_exchange_at_a_time_and_the_slot_is_empty_between() -> None:
    # The slots have 0 and 1. At the fifth step's end 0 leaves and 2 is copied; that counts from the tenth's on, when 1 gives way
    # to 3, which counts from the fifteenth's on.
    records = run("heat-cache", [[2, 3]] * 17, 2)
    assert [sorted(step) for step in served(records)] == [[]] * 10 + [[2]] * 5 + [[2, 3]] * 2
    assert [(e.expert, e.time) for e in records.evictions] == [(0, records.steps[5].begin), (1, records.steps[10].begin)]
    assert [(t.expert, t.submitted) for t in records.transfers] == [(2, records.steps[5].begin), (3, records.steps[10].begin)]


def test_in_move_mode_the_one_that_leaves_is_copied_back_first() -> None:
    records = run({"name": "heat-cache", "move_mode": "move"}, [[2, 3]] * 31, 2)
    at = {step.begin: step.step for step in records.steps}
    found = [(at[t.submitted], t.link, t.expert) for t in records.transfers]
    assert sorted(found) == [(10, "gpu0->cpu0", 0), (20, "cpu0->gpu0", 2), (20, "gpu0->cpu0", 1), (30, "cpu0->gpu0", 3)]
    assert [(e.expert, at[e.time]) for e in records.evictions] == [(0, 20), (1, 30)]
    assert [sorted(step) for step in served(records)] == [[]] * 30 + [[2]]


def test_steps_of_several_tokens_change_nothing_but_add_heat() -> None:
    two = workload([[[[2, 3]]] * 12, [[[2, 3]]] * 12], n_experts=8)
    records = play(make_policy("heat-cache"), two, FAST, model=tiny_model(n_layers=1, n_experts=8), slots={"gpu0": 2})
    assert list(records.transfers) == [] and {t.device for t in records.tasks if t.expert >= 0} == {"cpu0"}
    # A prompt's 6 rows of 4 make it hotter than 2 and 3, of which the first three tokens count 15.
    prompt = workload([[[[4, 5]]] * 20 + [[[2, 3]]] * 6], prompt=20, n_experts=8)
    records = play(make_policy("heat-cache"), prompt, FAST, model=tiny_model(n_layers=1, n_experts=8), slots={"gpu0": 2})
    assert [t.expert for t in records.transfers if t.cause == "update"] == [4]


@pytest.mark.parametrize(("rows", "device"), [(31, "cpu0"), (32, "gpu0")])
def test_prompts_use_what_is_there_and_copy_the_rest_from_32_tokens_on(rows: int, device: str) -> None:
    work = workload([[[[0, 5]]] * rows + [[[0, 1]]]], prompt=rows, n_experts=8)
    records = play(make_policy("heat-cache"), work, FAST, model=tiny_model(n_layers=1, n_experts=8), slots={"gpu0": 2})
    assert {t.expert: t.device for t in records.tasks if t.expert >= 0 and t.step == 0} == {0: "gpu0", 5: device}
    assert [t.expert for t in records.transfers if t.expert >= 0] == ([5] if device == "gpu0" else [])


# --------------------------------------------------------------------------------------------------------------- restated


@pytest.mark.parametrize("options", [{"decay": 0.5}, {"hyst": 4.0}, {"dwell": 3}, {"move_mode": "move"}], ids=str)
def test_an_option_changes_what_happens(options: dict[str, Any]) -> None:
    steps = [[2, 3]] * 7 + [[4, 2]] * 13 + [[5, 6], [1, 4]] * 15  # what is hot changes
    changed, plain = (run({"name": "heat-cache", **more}, steps, 2) for more in (options, {}))
    assert list(changed.transfers) != list(plain.transfers)
