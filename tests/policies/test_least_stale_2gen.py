"""Least stale by generations: LRU without prefetches, and what prefetches change."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesim.policies.composed import Composed
from moesim.policies.registry import make_policy
from moesim.policy import Fetch, StepBegin
from moesim.testing import FakeView, routed, run_tiny, tiny_workload
from tests.engine.engine_kit import Oracle, cpu, gpu, machine, play, workload


def copied(replacement: Any, prefetch: Any, slots: int = 13) -> list[tuple[int, int, int]]:
    policy = make_policy({"name": "composed", "scope": "global", "replacement": replacement, "prefetch": prefetch})
    records = run_tiny(policy, tiny_workload(policy), slots)
    return [(t.start, t.layer, t.expert) for t in records.transfers]


def test_in_a_run_it_is_lru_until_something_is_prefetched() -> None:
    lru: Any = {"name": "lru", "use_order": "id"}
    ahead = {"name": "predicted", "source": "frequency", "size": 2, "pool": "cache"}
    assert copied("least-stale-2gen", "none") == copied(lru, "none")
    assert copied("least-stale-2gen", ahead) != copied(lru, ahead)


def test_what_is_prefetched_and_then_used_keeps_its_place_and_may_come_in_stale() -> None:
    found = {}
    for prefetched in ("fresh", "stale"):
        policy = Composed(
            replacement={"name": "least-stale-2gen", "prefetched": prefetched}, scope="global", placement="lowest-ids",
            prefetch={"name": "random", "pool": "cache"},
        )  # fmt: skip
        view = FakeView()
        view.use(policy.place(view))
        part: Any = policy.parts.replacement
        cached = list(part.of(0))
        part.step_begin(StepBegin(0, "decode", np.array([0]), True))
        part.inserted(1, [6])
        view.put(1, [6], "gpu0")
        part.used(routed([[0, 0]], layer=0))
        part.used(routed([[6, 6]], layer=1))
        found[prefetched] = list(part.of(0))
        rest = [unit for unit in cached if unit != (0, 0)]
        assert found[prefetched][: len(rest)] == rest
        assert policy.evict(Fetch(2, [5], "gpu0"), view) == rest[0]
    assert found["fresh"][-2:] == [(1, 6), (0, 0)]  # since its prefetch
    assert found["stale"][-2:] == [(0, 0), (1, 6)]  # since its use


def test_the_policy_prefetches_by_the_next_gate() -> None:
    # Layer 0 loads 0 and 2; the prediction says 0 and 1 for layer 1, which then hits.
    hardware = machine({"gpu0": gpu(dense_ns=4940, predict={"told": 10}), "cpu0": cpu()})
    policy = make_policy({"name": "least-stale-2gen", "prefetch_source": "told"})
    records = play(policy, workload([[[[0, 2], [1, 0]]]]), hardware, slots={"gpu0": 4}, predictors={"told": Oracle()})
    assert [f"{t.cause} {t.layer}/{t.expert}" for t in records.transfers] == [
        "demand 0/0", "demand 0/2", "prefetch 1/0", "prefetch 1/1",
    ]  # fmt: skip
