"""The engine's caches against references that know nothing of time, lookup for lookup, on made-up and on recorded routing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest

from moesim.engine import native, simulate
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.policies.base import deal_slots
from moesim.policies.registry import make_policy
from moesim.records import Records
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace, find_trace
from moesim.trace.formats.contract import Options
from moesim.trace.formats.importing import import_trace
from moesim.trace.predictors import FutureUse
from moesim.trace.stats.caches import layer_hit_rates
from moesim.trace.workload import Workload, WorkloadSpec, compose
from tests.engine.conftest import NOT_BUILT
from tests.helpers_shared import gpt_oss, shared_file

pytestmark = pytest.mark.parametrize(  # rules that other tests compare between the engines
    "engine",
    [pytest.param("simpy", marks=[pytest.mark.long] if native.AVAILABLE else []),
     pytest.param("native", marks=pytest.mark.skipif(not native.AVAILABLE, reason=NOT_BUILT))],
    indirect=True,
)  # fmt: skip
RULES = ("lru", "lfu", "belady")
Found = list[tuple[int, ...]]


class Ran(NamedTuple):
    """A run of the engine, and what it ran on."""

    records: Records
    workload: Workload
    slots: list[int]  # of each layer

    @property
    def hits(self) -> Found:
        return [visit.hits for visit in self.records.lookups]


def run(trace: Trace, name: str, slots: int, policy: dict[str, Any] | None = None, width: int = 256, **spec: Any) -> Ran:
    """Simulate a policy on gpt-oss-20b with experts of some width, and the trace's layers, experts and experts a token."""
    shape = {"n_layers": trace.n_layers, "n_experts": trace.n_experts, "top_k": trace.top_k}
    model = load_model({"base": "qwen3-30b-a3b", "expert_bits": 4.25, "expert_intermediate": width, **shape})
    made: Any = make_policy({"name": name, **(policy or {})})
    work = compose(trace, WorkloadSpec(**spec))
    if "oracle:routing" in made.needs:
        made.bind_oracle(FutureUse(work))
    costs = CostModel(model, load_hardware("rtx3090-epyc7532"))
    records = simulate(model=model, costs=costs, workload=work, policy=made, cache_slots={"gpu0": slots}, policy_name=name)
    return Ran(records, work, deal_slots(slots, trace.n_layers, trace.n_experts))


# ------------------------------------------------------------------------------------------------- a plain reference
def used(workload: Workload) -> Iterator[tuple[int, int, list[int], bool]]:
    """Go through visits without micro-batches: step, layer, experts, and whether these are one row's, by rank, or by id."""
    for step in workload.steps:
        (micro,) = step.micro
        for layer, routing in enumerate(micro.layers):
            rows = routing.experts.tolist()
            one = len(rows) == 1
            yield step.index, layer, rows[0] if one else sorted({expert for row in rows for expert in row}), one


def reference(rule: str, ran: Ran, start: bool = True) -> Found:
    """Look a layer visit up, then let its misses in; out goes what the visit does not use and the rule ranks lowest."""
    visits = list(used(ran.workload))
    uses: dict[tuple[int, int], list[int]] = {}
    for step, layer, experts, _ in visits:
        for expert in experts:
            uses.setdefault((layer, expert), []).append(step)
    held = [list(range(n)) if start else [] for n in ran.slots]
    last = [{expert: expert - 1000 for expert in here} for here in held]
    count = [dict.fromkeys(here, 0) for here in held]
    found = []
    for at, (step, layer, experts, by_rank) in enumerate(visits):
        here = held[layer]
        found.append(tuple(int(expert in here) for expert in sorted(experts)))
        if rule == "lru" and not by_rank:  # what is loaded counts as used after what was there
            experts = [e for e in experts if e in here] + [e for e in experts if e not in here]
        for i, expert in enumerate(experts):
            last[layer][expert] = at * 1000 + i
            count[layer][expert] = count[layer].get(expert, 0) + 1

        def rank(expert: int, layer: int = layer, step: int = step) -> tuple[int, ...]:
            coming = [at for at in uses.get((layer, expert), ()) if at > step]
            first = {"lru": 0, "lfu": count[layer][expert], "belady": -coming[0] if coming else -(10**9)}
            return first[rule], last[layer][expert]

        for expert in [expert for expert in experts if expert not in here]:
            if len(here) == ran.slots[layer]:
                here.remove(min((other for other in here if other not in experts), key=rank))
            here.append(expert)
    return found


def total(found: Found) -> int:
    return sum(map(sum, found))


# ------------------------------------------------------------------------------------------------- recorded routing
@cache
def recorded(name: str) -> Trace:
    if name == "gpt-oss-20b":
        return gpt_oss()
    if name == "bigmoe-on-edge":
        source = shared_file("traces", "bigmoe-on-edge", "qwen.route.csv")
        with TemporaryDirectory() as folder:
            return import_trace([source], Path(folder, "edge.safetensors"), Options(incomplete="layers"), label="measured").trace
    try:
        return Trace.read(find_trace(name))
    except Exception:
        pytest.skip(f"the shipped trace {name} is not here")


SHIPPED = ("mini-mixtral", "mini-deepseek-v2-lite", "mini-qwen3")
TRACES = (*SHIPPED, "gpt-oss-20b")
SHARES = (0.25, 0.5, 0.75, 0.3)  # the last leaves a remainder: layers of two sizes
OFTEN = [pytest.param(share, marks=[pytest.mark.long] if share in (0.5, 0.75) else []) for share in SHARES]


def decode_of(trace: Trace, n_batches: int = 2) -> dict[str, Any]:
    """Ask for requests one by one, with prompts of a token at a time: every visit is one row."""
    prompt = {"prompt_tokens": 3, "prefill_chunk": 1} if trace.phase.min() == 0 else {"prompt_tokens": None}
    return {"batch_size": 1, "decode_tokens": 30 if trace.top_k < 4 else 15, "n_batches": n_batches, **prompt}


@pytest.mark.parametrize("share", OFTEN)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == "mini-qwen3" else []) for name in TRACES]
)
def test_the_engine_equals_a_plain_replay_of_recorded_routing(name: str, rule: str, share: float) -> None:
    trace = recorded(name)
    ran = run(trace, rule, int(share * trace.n_layers * trace.n_experts), **decode_of(trace))
    assert min(ran.slots) >= trace.top_k
    expected = reference(rule, ran)
    assert len(expected) == len(ran.workload.steps) * trace.n_layers
    assert ran.hits == expected
    assert 0.2 < total(expected) / sum(map(len, expected)) < 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [TRACES[0], *(pytest.param(name, marks=pytest.mark.long) for name in TRACES[1:])])
def test_the_engine_equals_trace_stats(name: str, rule: str) -> None:
    """Layer by layer, from an empty start, at sizes with and without a remainder."""
    trace = recorded(name)
    for share in SHARES:
        slots = int(share * trace.n_layers * trace.n_experts)
        ran = run(trace, rule, slots, {"placement": "none"}, **decode_of(trace))
        rows = np.stack([np.stack([routing.experts[0] for routing in step.micro[0].layers]) for step in ran.workload.steps])
        statistic = "belady-visit" if rule == "belady" else rule
        rates = layer_hit_rates(rows, trace.n_experts, sorted(set(ran.slots)), [statistic])[statistic]
        n_lookups = len(rows) * trace.top_k
        found = np.zeros(trace.n_layers, int)
        for visit in ran.records.lookups:
            found[visit.layer] += sum(visit.hits)
        at = [sorted(set(ran.slots)).index(n) for n in ran.slots]
        assert found.tolist() == np.rint(rates[at, range(trace.n_layers)] * n_lookups).astype(int).tolist()


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_the_engine_equals_a_plain_replay_of_an_edge_devices_routing(rule: str) -> None:
    """A prompt, four rows at a time, and its answer; recorded on an engine with a cache of its own."""
    trace = recorded("bigmoe-on-edge")
    spec: dict[str, Any] = {"batch_size": 1, "prompt_tokens": None, "decode_tokens": None, "prefill_chunk": 4}
    ran = run(trace, rule, trace.n_layers * trace.n_experts // 4, **spec)
    assert trace.top_k < max(len(visit.active) for visit in ran.records.lookups) <= min(ran.slots)
    assert ran.hits == reference(rule, ran)


# ------------------------------------------------------------------------------------------------- made-up routing
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("per_layer", "batch"), [(6, 1), (8, 1), (12, 1), (12, 2)])  # as many slots as a visit needs
def test_the_engine_equals_a_plain_replay_with_several_rows(rule: str, per_layer: int, batch: int) -> None:
    trace = synthetic_trace(6, 16, 3, 4, prompt=2, decode=60, seed=5)
    ran = run(trace, rule, per_layer * 6, batch_size=batch, prompt_tokens=2, decode_tokens=60, n_batches=2)
    assert all(len(visit.active) <= per_layer for visit in ran.records.lookups)
    assert ran.hits == reference(rule, ran)


def test_lru_by_id_marks_what_is_cached_before_what_is_loaded() -> None:
    """The order of Mixtral-Offloading's code."""
    trace = synthetic_trace(6, 16, 3, 4, prompt=2, decode=60, seed=5)
    spec: dict[str, Any] = {"batch_size": 1, "prompt_tokens": 2, "decode_tokens": 60, "n_batches": 2}
    ran = run(trace, "lru", 36, {"use_order": "id"}, **spec)
    caches = [list(range(6)) for _ in range(6)]  # oldest first; at the start the lowest ids
    found = []
    for visit in ran.records.lookups:
        here = caches[visit.layer]
        hits = [e for e in visit.active if e in here]
        misses = [e for e in visit.active if e not in here]
        found.append(tuple(int(e in hits) for e in visit.active))
        here[:] = [e for e in here if e not in hits] + hits
        here[:] = here[len(misses) :] + misses
    assert ran.hits == found
    assert run(trace, "mixtral-offloading", 36, **spec).hits != ran.hits  # it begins with the highest ids
    assert run(trace, "lru", 36, **spec).hits != ran.hits


@pytest.mark.parametrize("name", ["lru", "lfu", "fifo", "random", "belady", "activation-aware", "arc"])
def test_what_a_visit_uses_stays_while_the_cache_is_large_enough(name: str) -> None:
    """Nothing that a layer visit is routed to is evicted before the layer is visited again."""
    trace = synthetic_trace(6, 16, 3, 4, prompt=2, decode=60, seed=5)
    spec: dict[str, Any] = {"batch_size": 1, "prompt_tokens": 1, "decode_tokens": 60, "n_batches": 2}
    early = {}
    for victims in ("unrouted-first", "idle"):
        part = {"name": name, **({"victims": victims} if name != "lru" else {})}
        ran = run(trace, "composed", 3 * 6, {"replacement": part}, width=2880, **spec)  # copies take longer than Runs
        looked = [(visit.time, visit.layer, set(visit.active)) for visit in ran.records.lookups]
        early[victims] = sum(
            eviction.expert in [x for time, layer, x in looked if layer == eviction.layer and time <= eviction.time][-1]
            for eviction in ran.records.evictions
        )
    assert early["unrouted-first"] == 0
    assert early["idle"] > 0 or name == "lru"  # which marks them as recent anyway
