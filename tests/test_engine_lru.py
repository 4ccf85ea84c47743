"""The engine's caches against references that know nothing of time: LRU lookup for lookup, Belady as a bound."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.costs import CostModel
from moesim.engine import simulate
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.predictors.future import FutureUse
from moesim.records import Records
from moesim.stats.cache_replay import replay_belady
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from moesim.workload import WorkloadSpec, compose
from tests.helpers_shared import gpt_oss


def run(trace: Trace, name: str, per_layer: int, **spec: Any) -> Records:
    """Simulate a policy on gpt-oss-20b's costs, with the trace's number of layers, experts and experts a token."""
    shape = {"n_layers": trace.n_layers, "n_experts": trace.n_experts, "top_k": trace.top_k}
    model = load_model({"base": "gpt-oss-20b", **shape})
    policy = make_policy(name)
    work = compose(trace, WorkloadSpec(**spec))
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(work))  # type: ignore[attr-defined]
    costs = CostModel(model, load_hardware("rtx3090-epyc7532"))
    slots = {"gpu0": per_layer * trace.n_layers}
    return simulate(model=model, costs=costs, workload=work, policy=policy, cache_slots=slots, policy_name=name)


def set_wise_lru(records: Records, n_layers: int, capacity: int) -> list[tuple[int, ...]]:
    """Look all experts of a visit up, refresh the hits, then let the misses in, evicting what was used longest ago."""
    caches = [list(range(capacity)) for _ in range(n_layers)]  # oldest first; at the start the lowest ids
    found = []
    for visit in records.lookups:
        cache = caches[visit.layer]
        hits = [e for e in visit.active if e in cache]
        misses = [e for e in visit.active if e not in cache]
        found.append(tuple(int(e in hits) for e in visit.active))
        for expert in hits:
            cache.remove(expert)
            cache.append(expert)
        for expert in misses:
            cache.pop(0)
            cache.append(expert)
    return found


def total(found: list[tuple[int, ...]]) -> int:
    return sum(map(sum, found))


@pytest.mark.parametrize(("per_layer", "batch"), [(6, 1), (8, 1), (12, 1), (12, 2)])  # as many slots as a visit needs
def test_the_engines_lru_is_set_wise_lru(per_layer: int, batch: int):
    trace = synthetic_trace(6, 16, 3, 4, prompt=2, decode=60, seed=5)
    records = run(trace, "lru", per_layer, batch_size=batch, prompt_tokens=2, decode_tokens=60, n_batches=2)
    assert all(len(visit.active) <= per_layer for visit in records.lookups)
    assert [visit.hits for visit in records.lookups] == set_wise_lru(records, 6, per_layer)


def test_the_engines_lru_is_set_wise_lru_on_recorded_routing():
    records = run(gpt_oss(), "lru", 8, decode_tokens=150, prompt_tokens=None, n_batches=3)
    found = [visit.hits for visit in records.lookups]
    assert found == set_wise_lru(records, 24, 8)
    assert 0.5 < total(found) / sum(map(len, found)) < 0.8


def test_belady_on_the_engine_is_between_lru_and_the_optimum():
    trace = synthetic_trace(6, 16, 3, 4, prompt=2, decode=60, seed=5)
    spec: dict[str, Any] = {"batch_size": 1, "prompt_tokens": 2, "decode_tokens": 60, "n_batches": 4}
    lru, best = (run(trace, name, 6, **spec) for name in ("lru", "belady"))
    hits = total([visit.hits for visit in best.lookups])
    assert hits > total([visit.hits for visit in lru.lookups])
    optimum = 0
    for layer in range(6):  # the first visit puts the experts in place that both caches begin with
        visits = [list(range(6)), *(list(visit.active) for visit in best.lookups if visit.layer == layer)]
        optimum += sum(replay_belady(visits, 6))
    assert hits <= optimum
