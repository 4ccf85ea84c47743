"""leloch's pooled cache and the TurboQuant fork: who is admitted, and who leaves."""

from __future__ import annotations

import pytest

from moesim.policies.registry import make_policy
from moesim.policies.systems import pooled_cache
from tests.engine.engine_kit import cpu, gpu, machine, play, tiny_model, workload
from tests.policies.caches_kit import FAST, copied, run, served

SLOW = machine({"gpu0": gpu(), "cpu0": cpu()})  # a copy takes 1000 ns, a step of one layer with a miss about 500


def test_a_free_slot_asks_for_two_misses_and_a_full_pool_for_eight() -> None:
    steps = [[0], [1], [0], [1], *[[2]] * 8, [2]]
    records = run("pooled-cache", steps, 2)
    assert copied(records) == [(2, 0), (3, 1), (11, 2)]
    assert served(records)[-1] == [2]
    assert [e.expert for e in records.evictions] == [0]


def test_what_is_on_its_way_runs_on_the_cpu() -> None:
    # The copy of 0 takes 1000 from 100 on; the second step routes at 640, the third at 1180.
    records = run({"name": "pooled-cache", "admit_free": 1}, [[0], [0], [0]], 4, hardware=SLOW)
    assert served(records) == [[], [], [0]]
    assert copied(records) == [(0, 0)]


def test_rows_that_the_cpu_takes_although_all_are_there() -> None:
    steps = [[0, 1, 2], [0, 1, 2], [2, 1, 0], [2, 1, 3]]
    ids = {}
    for rows in (0, 1, 2):
        ids[rows] = [sorted(step) for step in served(run({"name": "pooled-cache", "overlap_cpu_rows": rows}, steps, 4))]
    assert ids == {0: [[], [], [0, 1, 2], [1, 2]], 1: [[], [], [1, 2], [1, 2]], 2: [[], [], [2], [1, 2]]}


@pytest.mark.parametrize(
    ("rows", "top_k", "cached", "device"),
    [
        (2, 1, 1, "cpu0"),
        (2, 1, 2, "gpu0"),
        (16, 4, 64, "gpu0"),
        (17, 4, 64, "cpu0"),  # more than 64 rows of experts
        (32, 1, 1, "gpu0"),  # op-offload
    ],
)
def test_larger_steps_pass_by(rows: int, top_k: int, cached: int, device: str) -> None:
    # The second request's prompt, whose experts are cached by then.
    requests = [[[[*range(top_k)]]] * (rows + 3), [[[*range(top_k)]]] * (rows + 1)]
    work = workload(requests, prompt=rows, n_experts=8, weights=[1 / top_k] * top_k, batch_size=1)
    model = tiny_model(n_layers=1, n_experts=8, top_k=top_k)
    policy = make_policy({"name": "pooled-cache", "cached_rows": cached})
    records = play(policy, work, FAST, model=model, slots={"gpu0": 4})
    second = next(step.step for step in records.steps if step.phase == "prefill" and step.step > 0)
    assert {t.device for t in records.tasks if t.expert >= 0 and t.step == second} == {device}


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"name": "pooled-cache", "admit_free": 1}
    steps = [[0, 1, 2, 3]]
    monkeypatch.setattr(pooled_cache, "QUEUE_JOBS", 3)
    assert copied(run(spec, steps, 8)) == [(0, 0), (0, 1), (0, 2)]
    monkeypatch.setattr(pooled_cache, "QUEUE_BYTES", 2999)  # an expert has 1000 bytes
    assert copied(run(spec, steps, 8)) == [(0, 0), (0, 1)]


def test_turboquant_spares_what_has_been_hit_often() -> None:
    # 0 is hit five times, 1 once and later. With hot 4 the entry of 0, used longest ago, is passed over; 3 needs 8 misses.
    steps = [[0], [0], *[[0]] * 5, [1], [1], [1], *[[3]] * 8, [4]]
    for hot, leaves in ((4, 1), (5, 0), (0, 0)):  # with 0 both have been hit
        records = run({"name": "turboquant-cache", "hot": hot}, steps, 2)
        assert [e.expert for e in records.evictions] == [leaves], hot


def test_turboquant_admits_at_once_if_the_pool_holds_all() -> None:
    assert copied(run("turboquant-cache", [[0], [0]], 8)) == [(0, 0)]
    assert copied(run("turboquant-cache", [[0], [0]], 7)) == [(1, 0)]
