"""Pre-gated MoE on the toy machine, to the nanosecond: two buffers, and copies one layer ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.policies.algorithms.arena import Arena
from moesim.policies.registry import make_policy
from moesim.records import Records
from moesim.testing import check_policy
from tests.engine.engine_kit import Oracle, cpu, gpu, link, machine, pair, play, tasks, transfers, workload

TOY = {"gpu0": gpu(predict={"told": 10}), "cpu0": cpu()}
TOKEN = [[0, 2], [1, 0]]  # layer: experts


def run(requests: Any, predictor: Any = None, links: Any = None, **more: Any) -> Records:
    policy = make_policy({"name": "pre-gated", "source": "told"})
    predictors = {"told": predictor or Oracle()}
    return play(policy, workload(requests), machine(TOY, links), predictors=predictors, **more)


def test_the_next_layer_is_copied_while_this_one_computes() -> None:
    # gpu0       |DDDDD|P|            |00|22|DDDDD|           |00|11|
    # cpu0->gpu0 |     |0/0    |0/2   |1/0    |1/1           |
    #            0    100    1100   2100     3100          4100  4300
    records = run([[TOKEN]])
    down = [(100, "demand 0/0"), (1100, "demand 0/2"), (2100, "demand 1/0"), (3100, "demand 1/1")]
    assert transfers(records) == [(at, at + 1000, "cpu0->gpu0", what) for at, what in down]
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (100, 110, "gpu0", "predict"), (2100, 2200, "gpu0", "E0x1"), (2200, 2300, "gpu0", "E2x1"),
        (2300, 2400, "gpu0", "dense"), (4100, 4200, "gpu0", "E0x1"), (4200, 4300, "gpu0", "E1x1"),
    ]  # fmt: skip
    assert [t.submitted for t in records.transfers] == [100, 100, 110, 110]


def test_with_a_fast_link_the_copies_are_there_when_the_layer_is_routed() -> None:
    records = run([[TOKEN]], links={"cpu0->gpu0": link(100), "gpu0->cpu0": link()})
    assert [t.cause for t in records.transfers] == ["demand", "demand", "prefetch", "prefetch"]
    assert [(v.hits, v.in_flight) for v in records.lookups] == [((0, 0), (0, 0)), ((1, 1), (0, 0))]


def test_nothing_stays() -> None:
    """Every layer visit copies all of its experts, each once, whatever was used before."""
    records = run([[TOKEN, TOKEN, TOKEN]])
    assert len(records.transfers) == 3 * 4
    assert records.pool_peak_bytes["gpu0", "even"] == records.pool_peak_bytes["gpu0", "odd"] == 2000
    assert records.evictions[-1].reason == "drop"


class Wrong(Oracle):
    """Always says experts 2 and 3."""

    def predict(self, step: Any, mb: int, layer: int) -> tuple[Any, None]:
        return np.full_like(step.micro[mb].layers[layer].experts, 2) + np.arange(2), None


def test_wrong_guesses_are_copied_too_and_dropped() -> None:
    records = run([[TOKEN]], Wrong())
    assert {(t.layer, t.expert) for t in records.transfers} == {(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)} | {
        (t.layer, t.expert) for t in records.transfers if t.expert == 3
    }
    assert {(t.layer, t.expert) for t in records.tasks if t.kind == "expert"} == {(0, 0), (0, 2), (1, 0), (1, 1)}
    assert records.inexact == []


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_expert_is_copied_once_for_all_micro_batches(micro_batches: int) -> None:
    requests = [[TOKEN], [[[2, 3], [0, 3]]]]
    policy = make_policy({"name": "pre-gated", "source": "told"})
    records = play(policy, workload(requests, micro_batches=micro_batches), machine(TOY), predictors={"told": Oracle()})
    assert sorted((t.layer, t.expert) for t in records.transfers) == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 3)]


def test_predictions_may_be_computed_beside_the_experts() -> None:
    beside = machine(TOY, contention=[pair("gpu0.side", "gpu0.experts", 1, 1)])
    policy = make_policy({"name": "pre-gated", "source": "told", "lane": "side"})
    records = play(policy, workload([[TOKEN]]), beside, predictors={"told": Oracle()})
    assert (100, 110, "gpu0*", "predict") in tasks(records)


@pytest.mark.parametrize("seed", range(60))
def test_the_cache_is_the_one_described(seed: int) -> None:
    draw = np.random.default_rng(seed)
    capacity, rule = int(draw.integers(0, 6)), ("lfu", "lru", "lifo")[seed % 3]
    arena = Arena[int](capacity, rule)  # type: ignore[arg-type]
    held: dict[int, dict[str, int]] = {}
    for now, key in enumerate(draw.integers(0, 9, size=60).tolist()):
        left = arena.request(key)
        if key in held:
            assert left is None
            held[key]["count"] += 1
            held[key]["used"] = now
        elif capacity == 0:
            assert left == key
        else:
            expected = None
            if len(held) == capacity:
                by = {"lfu": ("count", "used"), "lru": ("used",), "lifo": ("came",)}[rule]
                ranked = sorted(held, key=lambda one: [held[one][field] for field in by])
                expected = ranked[-1] if rule == "lifo" else ranked[0]
                del held[expected]
            assert left == expected
            held[key] = {"count": 1, "used": now, "came": now}
        assert all((one in arena) == (one in held) for one in range(9))


def test_what_is_cached_is_not_copied_again() -> None:
    # 4 slots hold all. With 3, 1/1 takes the place of 0/0, which layer 0 still needs: it goes to the buffer. In the next token
    # each expert is asked for just after it has left.
    policy = make_policy({"name": "pre-gated", "source": "told", "cache": "lru"})
    records = play(policy, workload([[TOKEN, TOKEN]]), machine(TOY), predictors={"told": Oracle()}, slots={"gpu0": 4})
    assert [(t.layer, t.expert) for t in records.transfers] == [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert records.pool_peak_bytes["gpu0", "cache"] == 4000 and records.pool_peak_bytes["gpu0", "even"] == 0
    policy = make_policy({"name": "pre-gated", "source": "told", "cache": "lru"})
    tight = play(policy, workload([[TOKEN, TOKEN]]), machine(TOY), predictors={"told": Oracle()}, slots={"gpu0": 3})
    assert [(t.layer, t.expert) for t in tight.transfers] == [(0, 0), (0, 2), (1, 0), (1, 1)] * 2
    assert tight.pool_peak_bytes["gpu0", "even"] > 0
    assert tight.inexact == []


@pytest.mark.parametrize("cache", [None, "lfu", "lru", "lifo"])
def test_it_keeps_the_contract(cache: str | None) -> None:
    for source in ("oracle", "synthetic:0.5"):
        check_policy(lambda source=source: make_policy({"name": "pre-gated", "cache": cache, "source": source}))
