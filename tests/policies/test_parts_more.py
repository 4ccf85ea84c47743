"""ARC, activation-aware and least-stale replacement, random prefetch, the resident split, and DALI with parts exchanged."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.errors import ConfigError
from moesim.hardware.costs import CostModel
from moesim.policies.base import sample
from moesim.policies.composed import Composed
from moesim.policies.parts import Setup
from moesim.policies.parts.adaptive import Arc, ArcVictim, FateArc
from moesim.policies.parts.assignment import Greedy, greedy_assignment
from moesim.policies.parts.prefetch import NoPrefetch, RandomAhead, TopPredicted, Transient, most_absent
from moesim.policies.parts.replacement import Belady, WorkloadAware
from moesim.policies.registry import make_policy
from moesim.policies.systems.dali import Dali
from moesim.policy import DEMAND, PREFETCH, UPDATE, Fetch, Run, StepBegin
from moesim.records import Records
from moesim.testing import FakeView, check_policy, routed, run_tiny, tiny_model, tiny_workload
from moesim.testing.rules.caches import ArcLists
from moesim.testing.traces import synthetic_trace
from moesim.trace.workload import Workload, WorkloadSpec, compose
from tests.engine.engine_kit import cpu, gpu, machine, play, tasks, transfers
from tests.engine.engine_kit import workload as toy_workload

KEYS = st.lists(st.integers(0, 9), max_size=120)


def start(policy: Composed, **options: Any) -> FakeView:
    """Start a policy on a fake view of 4 layers with 8 experts."""
    view = FakeView(**options)
    view.use(policy.place(view))
    return view


# ----------------------------------------------------------------------------------------------------------------- ARC
@pytest.mark.parametrize(("ours", "fate"), [(Arc, False), (FateArc, True)])
@given(keys=KEYS, capacity=st.integers(1, 6))
def test_arc_is_the_papers_figure_and_fates_the_described_one(
    ours: type[Arc[Any]], fate: bool, keys: list[int], capacity: int
) -> None:
    reference, found = ArcLists(capacity, fate), ours(capacity)
    for key in ((0, key) for key in keys):
        assert (key in found) == reference.holds(key)
        assert found.request(key) == reference.request(key, ())
        assert found.lists() == tuple(map(list, (reference.t1, reference.t2, reference.b1, reference.b2)))
        assert found.target == reference.p


def test_arc_hits_what_libcachesims_hits() -> None:
    libcachesim = pytest.importorskip("libcachesim")
    request = libcachesim.Request()
    for seed, capacity in ((0, 8), (1, 2), (2, 20), (3, 3)):
        draw = random.Random(seed)
        keys = [int(draw.expovariate(0.1)) for _ in range(4000)]
        theirs, ours = libcachesim.ARC(cache_size=capacity, hashpower=8), Arc[int](capacity)
        for key in keys:
            request.obj_id = key
            assert theirs.get(request) == (key in ours)
            ours.request(key)


# Requests to a cache of 3 under Fate's rule, by hand: key, victim, T1, T2, B1, B2 (oldest first), target.
BY_HAND = [
    ("A", None, "A", "", "", "", 0),
    ("B", None, "AB", "", "", "", 0),
    ("C", None, "ABC", "", "", "", 0),
    ("A", None, "BC", "A", "", "", 0),
    ("D", "B", "CD", "A", "B", "", 0),  # 2 in T1 and B1, 3 in all: one leaves, of T1, as 2 > 0
    ("B", "A", "CD", "B", "", "A", 2),  # of B1: 0 + 2 in T1; T1 is not longer than 2
    ("A", "C", "D", "BA", "C", "", 1),  # of B2: 2 - 1 in T2; T1 is longer than 1
    ("C", "B", "D", "AC", "", "B", 2),  # of B1: 1 + 1
    ("E", "A", "DE", "C", "", "BA", 2),
    ("F", "C", "DEF", "", "", "BAC", 2),
    ("B", "D", "EF", "B", "D", "AC", 2),  # of B2: 2 - 0
    ("G", "B", "EFG", "", "", "ACB", 2),  # 3 in T1 and B1: D is forgotten
    ("A", "E", "FG", "A", "E", "CB", 2),
    ("F", None, "G", "AF", "E", "CB", 2),
    ("H", "A", "GH", "F", "", "CBA", 2),  # 6 in all: E of B1 is forgotten, not C of B2
]


def test_fates_arc_by_hand() -> None:
    arc = FateArc[str](3)
    found = []
    for key, *_ in BY_HAND:
        victim = arc.request(key)
        found.append((key, victim, *("".join(one) for one in arc.lists()), arc.target))
    assert found == BY_HAND


def test_fates_arc_takes_from_t1_where_t2_has_nothing_to_give() -> None:
    arc = FateArc[str](2)
    for key in "ABACBDACE":
        arc.request(key)
    assert (arc.lists(), arc.target) == ((["D", "E"], [], [], ["A", "C"]), 2)
    assert arc.request("A") == "D"  # the target stays 2, and T1 is not longer


def routes(top_k: int) -> tuple[Any, Workload]:
    """One request of 200 decode steps."""
    trace = synthetic_trace(n_requests=1, prompt=1, decode=200, top_k=top_k, seed=5, skew=1.0)
    return trace, compose(trace, WorkloadSpec(prompt_tokens=1, decode_tokens=200))


def hits(records: Records) -> list[list[tuple[int, ...]]]:
    return [[found.hits for found in records.lookups if found.layer == layer] for layer in range(4)]


@pytest.mark.parametrize("variant", ["canonical", "fate"])
@pytest.mark.parametrize("scope", ["per-layer", "global"])
def test_the_engine_with_arc_hits_what_the_reference_hits(scope: str, variant: str) -> None:
    """One expert a token: every lookup is a request of its own, in the order of the run."""
    work = routes(1)
    replacement = {"name": "arc", "variant": variant}
    policy = make_policy({"name": "composed", "replacement": replacement, "scope": scope, "placement": "none"})
    records = run_tiny(policy, work, 12, top_k=1)
    fate, expected = variant == "fate", []
    caches = [ArcLists(3, fate) for _ in range(4)] if scope == "per-layer" else [ArcLists(12, fate)] * 4
    for cache, unit in ((caches[x.layer], (x.layer, x.active[0])) for x in records.lookups):
        expected.append(cache.holds(unit))
        cache.request(unit, ())
    assert [x.hits == (1,) for x in records.lookups] == expected
    assert 100 < sum(expected) < 700


def test_arc_differs_from_lru_and_between_its_variants() -> None:
    found = []
    for replacement in ("lru", "arc", {"name": "arc", "variant": "fate"}):
        policy = make_policy({"name": "composed", "replacement": replacement, "scope": "global"})
        found.append(hits(run_tiny(policy, routes(2), 12)))
    assert found[0] != found[1] != found[2]


def test_arc_keeps_a_victim_that_is_asked_for_before_it_has_left() -> None:
    policy = Composed(replacement="arc")
    view = start(policy, slots=8)  # experts 0 and 1 of each layer, 0 asked for first
    policy.decide(routed([[2, 2]]), view)  # lets 0 go
    view.pend(0, [2], "gpu0")
    assert policy.evict(Fetch(0, [2], "gpu0"), view) == (0, 0)
    view.remove(0, [0], "gpu0")
    view.put(0, [2], "gpu0")
    policy.decide(routed([[3, 3]], step=1), view)  # lets 1 go
    policy.decide(routed([[1, 1]], step=2), view)  # but 1 is wanted again before the copy of 3 could start: 2 goes
    assert policy.evict(Fetch(0, [3], "gpu0"), view) == (0, 2)
    assert policy.evict(Fetch(0, [3], "gpu0"), view) is None


def test_arc_names_who_leaves_whether_it_is_idle_or_not() -> None:
    policy = Composed(replacement="arc")
    view = start(policy, slots=8)
    policy.decide(routed([[2, 3]]), view)
    view.hold(0, [0], "gpu0")
    assert policy.evict(Fetch(0, [2], "gpu0"), view) == (0, 0)
    assert policy.evict(Fetch(0, [3], "gpu0"), view) == (0, 1)
    assert policy.evict(Fetch(0, [3], "gpu0"), view) is None


def test_arc_finds_room_for_a_load_that_later_ones_have_displaced() -> None:
    """One slot a layer: 3 displaces 2 before it came; the copy of 2 still gets the slot, and then that of 3."""
    policy = Composed(replacement=ArcVictim())
    view = start(policy, slots=4)  # expert 0 of each layer
    policy.decide(routed([[2, 3]]), view)
    assert policy.evict(Fetch(0, [3], "gpu0"), view) == (0, 0)
    view.remove(0, [0], "gpu0")
    view.put(0, [3], "gpu0")
    assert policy.evict(Fetch(0, [2], "gpu0"), view) == (0, 3)


@pytest.mark.parametrize("name", ["dali", "dali-multi-gpu"])
def test_dalis_victim_was_replaced_on_its_way_and_is_idle(name: str) -> None:
    """Three others have come for a window that is over, and the first of them is computed."""
    policy = make_policy(name)
    view = FakeView(slots=8)
    view.use(policy.place(view))
    members = [e for e in range(8) if view.is_resident(1, e, "gpu0")]
    others = [e for e in range(8) if e not in members]
    assert len(members) == 2
    fetch = Fetch(1, members[:1], "gpu0", UPDATE)
    assert policy.evict(fetch, view) is None
    view.put(1, others[:3], "gpu0")
    view.put(2, others[3:], "gpu0")
    view.hold(1, others[:1], "gpu0")
    assert policy.evict(fetch, view) == (1, others[1])
    view.hold(1, others[:3], "gpu0")
    assert policy.evict(fetch, view) is None


def test_newcomers_that_are_there_get_the_slots_that_are_free_or_left_by_residents() -> None:
    policy = Composed(replacement="workload-aware")
    view = start(policy, slots=12)  # three of a layer
    here = [e for e in range(8) if view.is_resident(1, e, "gpu0")]
    assert len(here) == 3
    there = [e for e in range(8) if e not in here][:4]
    for n_free in range(3):
        for n_victims in range(3 - n_free):
            victims = [*here[n_free:][:n_victims], there[-1]]  # the last is on its way
            assert policy._relabelled(1, victims, there[:3], view) == there[: n_free + n_victims]
        view.remove(1, here[n_free : n_free + 1], "gpu0")


# ----------------------------------------------------------------------------------------------------- activation-aware
def test_the_lowest_count_goes_and_ties_are_scanned_expert_by_expert() -> None:
    policy = Composed(replacement={"name": "activation-aware", "reading": "code", "victims": "idle"}, scope="global")
    view = start(policy, slots=9)  # experts 0 and 1 of each layer, and 2 of layer 1
    policy.decide(routed([[0, 1]], layer=0), view)
    policy.decide(routed([[0, 0]], layer=1), view)
    order = []
    while (unit := policy.evict(Fetch(3, [7], "gpu0"), view)) is not None:
        order.append(unit)
        view.remove(*(unit[0], [unit[1]]), "gpu0")
    # Unused: expert 0 of layers 2 and 3, 1 of layers 1 to 3, 2 of layer 1; then those used once, in the same order.
    assert order == [(2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (1, 2), (0, 0), (1, 0), (0, 1)]


def test_counts_survive_eviction() -> None:
    policy = Composed(replacement={"name": "activation-aware", "reading": "code", "victims": "idle"})
    view = start(policy, slots=8)
    for step in range(3):
        policy.decide(routed([[0, 0]], step=step), view)
    policy.decide(routed([[1, 1]], step=3), view)
    assert policy.evict(Fetch(0, [2], "gpu0"), view) == (0, 1)
    view.remove(0, [1], "gpu0")
    view.put(0, [2], "gpu0")
    policy.parts.replacement.inserted(0, [2])
    policy.decide(routed([[2, 2]], step=4), view)
    policy.decide(routed([[2, 2]], step=5), view)
    policy.parts.replacement.inserted(0, [1])  # 1 is back; its visit still counts: 0 has 3, 1 has 1, 2 has 2
    view.put(0, [1], "gpu0")
    assert policy.evict(Fetch(0, [3], "gpu0"), view) == (0, 1)


def test_experts_of_layers_passed_go_first_and_then_the_farthest() -> None:
    """Without a past sequence, by the counts of the present one; among equals expert by expert."""
    policy = Composed(replacement="activation-aware", scope="global")
    view = start(policy, slots=8)
    policy.decide(StepBegin(0, "decode", np.array([0]), True), view)
    for layer in range(4):
        policy.decide(routed([[0, 0]], layer=layer), view)
    policy.decide(StepBegin(1, "decode", np.array([0]), True), view)
    policy.decide(routed([[0, 0]], layer=0, step=1), view)
    policy.decide(routed([[0, 0]], layer=1, step=1), view)
    order = []
    while (unit := policy.evict(Fetch(3, [7], "gpu0"), view)) is not None:
        order.append(unit)
        view.remove(*(unit[0], [unit[1]]), "gpu0")
    # Layer 0 is passed. Expert 1 was never used: 1e-8, less in farther layers. Expert 0 always: 1, likewise.
    assert order == [(0, 0), (0, 1), (3, 1), (2, 1), (1, 1), (3, 0), (2, 0), (1, 0)]


def test_the_store_holds_requests_that_are_over_and_no_more_than_asked_for() -> None:
    trace = synthetic_trace(n_requests=6, prompt=4, decode=6, seed=2)
    work = trace, compose(trace, WorkloadSpec(prompt_tokens=4, decode_tokens=6, n_batches=6, requests=None))
    found = []
    for capacity in (1, 1000):
        policy = Composed(replacement={"name": "activation-aware", "capacity": capacity}, scope="global")
        found.append(hits(run_tiny(policy, work, 12)))
        past = policy.parts.replacement._past  # type: ignore[attr-defined]
        assert (past._n_stored, len(past._shares)) == (5, min(5, capacity))  # the last one is not over
        assert np.allclose(past._shares.sum(axis=2), 1)
    assert found[0] != found[1]


# ---------------------------------------------------------------------------------------------------------- least-stale
@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"victims": "idle"}, [2, 2, 1, 1, 0, 0, 3, 3]),
        ({"victims": "unrouted-first"}, [2, 1, 1, 0, 0, 3, 3, 2]),
        ({"distance": "absolute"}, [0, 0, 1, 1, 3, 3, 2, 2]),
    ],
    ids=str,
)
def test_the_farthest_layer_goes_first(options: dict[str, str], layers: list[int]) -> None:
    policy = Composed(replacement={"name": "least-stale", **options}, scope="global")
    view = start(policy, slots=8)  # experts 0 and 1 of each layer
    policy.decide(routed([[0, 0]], layer=1), view)
    policy.decide(routed([[0, 5]], layer=2), view)
    order = []
    while (unit := policy.evict(Fetch(2, [5], "gpu0"), view)) is not None:
        order.append(unit)
        view.remove(unit[0], [unit[1]], "gpu0")
    assert [layer for layer, _ in order] == layers
    assert [e for layer, e in order if layer == 2] == [1, 0]  # within a layer, the least recently used
    assert [e for layer, e in order if layer == 0] == [0, 1]


def test_least_stale_needs_a_global_pool() -> None:
    with pytest.raises(ConfigError, match="replacement least-stale: expected scope 'global', got 'per-layer'"):
        start(Composed(replacement="least-stale"))


# ----------------------------------------------------------------------------------------------- all of them, all round
@pytest.mark.parametrize(
    ("replacement", "slots"),
    [
        ("arc", (1, 12)),
        ("activation-aware", (12,)),
        ({"name": "activation-aware", "reading": "code"}, (1,)),
        ("least-stale", (1, 12)),
    ],
    ids=str,
)
def test_new_parts_pass_the_common_checks(replacement: Any, slots: tuple[int, ...]) -> None:
    spec = {
        "name": "composed",
        "replacement": replacement,
        "scope": "global",
        "prefetch": {"name": "random", "size": 2, "pool": "cache"},
    }
    check_policy(partial(make_policy, spec), slots=slots)
    if replacement != "least-stale":
        check_policy(partial(make_policy, {**spec, "scope": "per-layer", "assignment": "resident"}), slots=(4,))


# ------------------------------------------------------------------------------------------------------ random prefetch
@given(population=st.integers(1, 40), n=st.integers(1, 50), seed=st.integers(-5, 5), place=st.integers(0, 10**6))
def test_a_draw_is_distinct_and_depends_on_its_place_only(population: int, n: int, seed: int, place: int) -> None:
    drawn = sample(population, n, seed, place)
    assert len(drawn) == len(set(drawn)) == min(n, population)
    assert set(drawn) <= set(range(population))
    assert drawn[: n - 1] == sample(population, n - 1, seed, place)


def test_draws_are_even() -> None:
    counts = np.zeros((8, 3))
    for place in range(4000):
        counts[sample(8, 3, 1, place), range(3)] += 1
    assert abs(counts / 500 - 1).max() < 0.2  # every expert as often at every place; 0.2 is over 4 deviations


def test_random_prefetch_skips_what_is_there_and_asks_for_no_prediction() -> None:
    policy = Composed(prefetch={"name": "random", "size": 8})
    view = start(policy, slots=8)
    actions = list(policy.decide(routed([[0, 1]], step=3), view))
    drawn = sample(8, 8, 0, 3 * 4 + 1)
    assert actions == [Run(0, (0, 1), "gpu0"), Fetch(1, [e for e in drawn if e > 1], "gpu0", PREFETCH, "prefetch")]
    assert not any(isinstance(a, Fetch) for a in policy.decide(routed([[0, 1]], layer=3, step=3), view))
    assert not any(isinstance(a, Fetch) for a in policy.decide(routed([[0, 1]], step=3, mb=1), view))


def test_random_prefetch_waits_for_demand_on_the_link() -> None:
    """Drawn for layer 1, which uses 0 and 1, are 2 in step 0 and 3 in step 1; the copy of 3 is still under way at the end."""
    assert [sample(4, 1, 0, step * 2 + 1) for step in range(2)] == [[2], [3]]
    policy = {"name": "composed", "placement": "lowest-ids", "prefetch": {"name": "random", "size": 1}}
    records = play(make_policy(policy), toy_workload([TOKENS[:2]]), TOY, slots={"gpu0": 4})
    assert transfers(records) == [
        (100, 1100, "cpu0->gpu0", "demand 0/2"),
        (1100, 2100, "cpu0->gpu0", "prefetch 1/2"),
        (2100, 3100, "cpu0->gpu0", "demand 0/3"),
        (3100, 3500, "cpu0->gpu0", "prefetch 1/3"),
    ]
    assert [(e.pool, e.layer, e.expert, e.used) for e in records.evictions if e.pool == "prefetch"] == [("prefetch", 1, 2, False)]


# --------------------------------------------------------------------------------------------------------- resident split
TOKENS = [[[0, 2], [1, 0]], [[2, 3], [0, 1]], [[0, 3], [2, 3]]]  # token, layer: experts
TOY = machine({"gpu0": gpu(), "cpu0": cpu()})


def test_the_resident_split_moves_nothing() -> None:
    """Experts 0 and 1 are on the GPU (100 each), the others take 400 on the CPU, and 20 each way for the row."""
    policy = {"name": "composed", "placement": "lowest-ids", "assignment": "resident", "replacement": "static"}
    records = play(make_policy(policy), toy_workload([TOKENS]), TOY, slots={"gpu0": 4})
    assert transfers(records) == []
    assert [t for t in tasks(records) if t[3] != "dense"] == [
        (100, 200, "gpu0", "E0x1"),
        (120, 520, "cpu0", "E2x1"),
        (640, 740, "gpu0", "E0x1"),
        (740, 840, "gpu0", "E1x1"),
        (960, 1360, "cpu0", "E2x1"),
        (1360, 1760, "cpu0", "E3x1"),
        (1880, 1980, "gpu0", "E0x1"),
        (1980, 2080, "gpu0", "E1x1"),
        (2180, 2280, "gpu0", "E0x1"),
        (2200, 2600, "cpu0", "E3x1"),
        (2740, 3140, "cpu0", "E2x1"),
        (3140, 3540, "cpu0", "E3x1"),
    ]
    assert [s.end for s in records.steps] == [840, 2080, 3560]


# ------------------------------------------------------------------------------------------------------------------ DALI
def test_the_plan_may_know_of_shared_experts() -> None:
    """Two rows of expert 0: 2 on the CPU; resident, 2 on the GPU, which is taken on a tie, but not after shared experts."""
    assert greedy_assignment([2], [2]).gpu == (0,)
    assert greedy_assignment([2], [2], 1).cpu == (0,)
    model = tiny_model(n_shared=1, shared_intermediate=256)
    view = FakeView(model)
    assert CostModel(model, view.costs.hardware).shared_ns("gpu0", 2) > 0
    plans = []
    for part in (Greedy(), Greedy(shared_in_plan=True)):
        part.start(Setup(view, "gpu0", "cpu0", [2] * 4, True))
        plans.append(part.assign(0, [2, 0, 0, 0, 0, 0, 0, 0], [0] * 8))
    assert (plans[0].gpu, plans[1].cpu) == ((0,), (0,))
    assert plans[1].gpu_total == view.costs.shared_ns("gpu0", 1)  # two slots are one row of a top-2 model


def test_dali_is_its_own_parts_unless_others_are_named() -> None:
    own = Dali()
    assert isinstance(own.parts.prefetch, TopPredicted)
    assert isinstance(own.parts.replacement, WorkloadAware)
    assert (own.prefetch, own.replacement) == (None, None)
    other = Dali(prefetch={"name": "random", "size": 2}, replacement="belady")
    assert isinstance(other.parts.prefetch, RandomAhead)
    assert isinstance(other.parts.replacement, Belady)
    assert isinstance(Dali(prefetch="none").parts.prefetch, NoPrefetch)
    assert "oracle:routing" in other.needs
    assert "signal:residual" not in other.needs


def test_the_published_sizes_do_not_touch_parts_that_are_named() -> None:
    policy = Dali(
        replacement={"name": "workload-aware", "u_size": 3}, prefetch={"name": "predicted", "source": "oracle", "size": 5}
    )
    policy.place(FakeView(tiny_model(n_experts=64), slots=64))
    assert policy.parts.replacement.u_size == 3  # type: ignore[attr-defined]
    assert policy.parts.prefetch.slots == 5


def test_spelling_the_papers_parts_out_is_dali() -> None:
    spelt = Dali(
        replacement={"name": "workload-aware", "w_size": 4, "u_size": 1},
        prefetch={"name": "predicted", "source": "signal:residual", "size": 1},
    )
    work = tiny_workload(Dali(), 4)
    assert run_tiny(spelt, work, 12) == run_tiny(Dali(), work, 12)


@pytest.mark.parametrize("decision", ["replacement", "assignment"])
def test_the_oracles_of_dali_are_options_it_takes(decision: str) -> None:
    options = Dali.oracles[decision]
    policy = make_policy({"name": "dali", "w_size": 2, **options})
    assert type(getattr(policy.parts, decision)).__name__ == {"replacement": "Belady", "assignment": "Exact"}[decision]  # type: ignore[attr-defined]
    records = run_tiny(policy, tiny_workload(Dali(), 4), 12)
    assert records != run_tiny(Dali(w_size=2), tiny_workload(Dali(), 4), 12)


def test_without_its_parts_dali_moves_less_and_less() -> None:
    """Removed one after the other: cache updates, prefetches, and, with everything on the CPU, all transfers."""
    moved = []
    removed: list[dict[str, Any]] = [{}, {"replacement": "static"}, {"replacement": "static", "prefetch": "none"}]
    for options in (*removed, {"assignment": "all-cpu"}):
        records = run_tiny(Dali(prefetch_size=2, **options), tiny_workload(Dali(), 4), 12)
        moved.append({t.urgency for t in records.transfers if t.urgency != DEMAND})
    assert moved == [{1, 2}, {1}, set(), {1, 2}]
    bare = Dali(assignment="all-cpu", prefetch="none", replacement="static")
    assert run_tiny(bare, tiny_workload(Dali(), 4), 12).transfers == []


def test_dali_reports_the_peak_of_what_was_transient() -> None:
    records = run_tiny(Dali(assignment="all-gpu"), tiny_workload(Dali(), 4), 12)
    assert records.pool_peak_bytes["gpu0", "staging"] == 2 * tiny_model().expert_bytes(0)
    assert records.pool_peak_bytes["gpu0", "prefetch"] == tiny_model().expert_bytes(0)


def test_copies_that_are_late_are_remembered_from_visit_to_visit() -> None:
    """Two prefetches are still on their way when their layer ends, in two visits; the next visit misses both, and wants them."""
    view, ahead = FakeView(tiny_model(), slots=8), Transient("gpu0")
    for expert in (5, 6):
        ahead.fetch(1, [expert])
        view.pend(1, [expert], "gpu0")
        assert ahead.layer_end(1, view) == [expert]
    fetches, rest = ahead.demand(1, [5, 6, 7], view)
    assert [(f.experts, f.urgency) for f in fetches] == [([5, 6], DEMAND)] and list(rest) == [7]


def test_no_more_experts_can_be_absent_than_rows_want_and_than_are_not_resident() -> None:
    assert [most_absent(FakeView(max_tokens=rows)) for rows in (1, 3, 64)] == [2, 6, 8]
    assert most_absent(FakeView(), [[0, 1, 2], [4, 5]]) == 6
    assert most_absent(FakeView(), [range(8)] * 4) == 1
