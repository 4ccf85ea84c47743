"""Compositions of parts on a fake view with literal events, and DALI, which is one."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from moesim.errors import CapacityError, ConfigError
from moesim.policies.composed import Composed
from moesim.policies.parts import Setup, Unit
from moesim.policies.registry import PARTS, make_part, make_policy
from moesim.policies.systems.caches import LRU, Belady
from moesim.policies.systems.dali import Dali
from moesim.policy import Drop, Fetch, LayerEnd, Move, Predict, Predicted, Routed, Run
from moesim.testing import FakeView, check_policy, routed, tiny_model

EXPERT = tiny_model().expert_bytes(0)
FREQUENCY = {"activation_frequency": np.tile(np.arange(8) / 8, (4, 1)) + np.arange(4)[:, None] / 100}


def start(policy: Any, **options: Any) -> FakeView:
    """Start a policy on a fake view of 4 layers with 8 experts."""
    view = FakeView(**options)
    view.use(policy.place(view))
    return view


def predicted(layer: int, ids: list[list[int]], step: int = 0, mb: int = 0) -> Predicted:
    """Build a prediction."""
    return Predicted(step, layer, mb, np.array(ids), None, "signal:residual")


# --------------------------------------------------------------------------------------------------------------- parts
@pytest.mark.parametrize(
    ("name", "layer0", "layer3"),
    [
        ("none", [], []),
        ("lowest-ids", [0, 1], [0, 1]),
        ("highest-ids", [6, 7], [6, 7]),
        ("frequency-per-layer", [6, 7], [6, 7]),
    ],
)
def test_placement_per_layer(name: str, layer0: list[int], layer3: list[int]) -> None:
    view = FakeView(slots=11, tables=FREQUENCY)
    chosen = make_part("placement", name).choose(Setup(view, "gpu0", "", [2] * 4, True))
    assert (chosen[0], chosen[3]) == (layer0, layer3)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("lowest-ids", [[0], [0, 1], [0], [0]]),
        ("highest-ids", [[7], [6, 7], [7], [7]]),
        ("frequency-global", [[7], [7], [7], [6, 7]]),
        ("frequency-per-layer", [[7], [7], [7], [6, 7]]),
    ],
)
def test_placement_in_a_global_pool(name: str, chosen: list[list[int]]) -> None:
    view = FakeView(tables=FREQUENCY)
    assert make_part("placement", name).choose(Setup(view, "gpu0", "", [5], False)) == chosen


@pytest.mark.parametrize("per_layer", [True, False])
def test_random_placement_is_seeded_and_fills_the_slots(per_layer: bool) -> None:
    setup = Setup(FakeView(), "gpu0", "", [3] * 4 if per_layer else [3], per_layer)
    chosen = make_part("placement", {"name": "random", "seed": 5}).choose(setup)
    assert chosen == make_part("placement", {"name": "random", "seed": 5}).choose(setup)
    assert chosen != make_part("placement", {"name": "random", "seed": 6}).choose(setup)
    assert sum(len(set(experts)) for experts in chosen) == (12 if per_layer else 3)


def test_global_frequency_needs_a_global_pool() -> None:
    with pytest.raises(ConfigError, match="frequency-global: expected scope 'global'"):
        start(Composed(placement="frequency-global"), tables=FREQUENCY)


def test_prefetch_into_a_static_cache_is_refused() -> None:
    prefetch = {"name": "predicted", "source": "oracle", "pool": "cache"}
    with pytest.raises(ConfigError, match=r"expected pool 'transient' with replacement Static.*; set pool: transient"):
        start(Composed(replacement="static", prefetch=prefetch))
    with pytest.raises(ConfigError, match="choose a replacement such as lru"):  # it has no pool to set
        start(Composed(replacement="static", prefetch="mrs-score"))


@pytest.mark.parametrize(
    ("spec", "slots", "landing"),
    [
        ({"name": "composed"}, 12, 2),
        ({"name": "composed", "staging_slots": 3}, 12, 3),
        ({"name": "composed", "staging_slots": 9}, 12, 8),
        ({"name": "composed"}, 32, 0),
        ({"name": "composed", "scope": "global"}, 32, 0),
        ({"name": "composed", "scope": "global"}, 31, 2),
        ({"name": "hybrimoe-code"}, 12, 2),
        ({"name": "dali"}, 12, 0),
    ],
)
def test_slots_next_to_a_cache_for_copies_whose_victims_are_still_to_run(spec: dict[str, Any], slots: int, landing: int) -> None:
    view = FakeView(slots=slots)
    (pool,) = (pool for pool in make_policy(spec).place(view).pools if pool.name == "cache")
    assert pool.landing == landing * view.model.expert_bytes(0)


# --------------------------------------------------------------------------------------------------------- replacement
def test_lru_evicts_what_was_used_longest_ago_whether_it_is_idle_or_not() -> None:
    policy = LRU()
    view = start(policy, slots=12)  # residents 0, 1, 2 of each layer
    actions = list(policy.decide(routed([[0, 5]]), view))
    assert actions == [Fetch(0, [5], "gpu0", 0, "cache"), Run(0, [0, 5], "gpu0")]
    view.hold(0, [1, 0], "gpu0")
    assert [policy.evict(Fetch(0, [5], "gpu0"), view) for _ in range(4)] == [(0, 1), (0, 2), (0, 0), None]
    assert policy.evict(Fetch(1, [6], "gpu0"), view) == (1, 0)


def test_a_global_lru_evicts_across_layers() -> None:
    policy = LRU(scope="global")
    view = start(policy, slots=8)
    policy.decide(routed([[0, 1]], layer=0), view)
    assert policy.evict(Fetch(0, [6], "gpu0"), view) == (1, 0)


@pytest.mark.parametrize(
    ("name", "victim", "idle"),
    [("lru", (0, 2), (0, 2)), ("fifo", (0, 2), (0, 0)), ("lfu", (0, 2), (0, 1)), ("static", None, None)],
    ids=lambda x: str(x),
)
def test_replacements_differ_in_their_victim(name: str, victim: Unit | None, idle: Unit | None) -> None:
    """Only expert 2 is not routed to now; it is neither the first that came in nor the one used least."""
    for options, expected in (({}, victim), ({"victims": "idle"}, idle)):
        policy = Composed(replacement={"name": name, **(options if name in ("fifo", "lfu") else {})})
        view = start(policy, slots=12)
        for step, rows in enumerate([[[0, 2]], [[2, 0]], [[0, 1]]]):
            policy.decide(routed(rows, step=step), view)
        assert policy.evict(Fetch(0, [6], "gpu0"), view) == expected


@pytest.mark.parametrize(("ties", "victim"), [("last-use", 1), ("id", 0)])
def test_of_experts_used_as_often_lfu_takes_the_one_used_longest_ago_or_the_lowest_id(ties: str, victim: int) -> None:
    policy = make_policy({"name": "lfu", "ties": ties})
    view = start(policy, slots=12)
    for step, expert in enumerate([1, 0, 2]):
        policy.decide(routed([[expert]], step=step), view)
    assert policy.evict(Fetch(0, [6], "gpu0"), view) == (0, victim)


def test_what_the_visit_uses_goes_last_and_in_the_order_of_the_rule() -> None:
    """Three slots, 0 and 1 routed to: first 2, then those, of which LRU takes 1, of the lower rank."""
    for name, order in (("lru", [2, 1, 0]), ("fifo", [2, 0, 1]), ("lfu", [2, 1, 0])):
        policy = Composed(replacement=name)
        view = start(policy, slots=12)
        policy.decide(routed([[2, 0]]), view)
        policy.decide(routed([[1, 0]], step=1), view)
        found = []
        while (unit := policy.evict(Fetch(0, [6], "gpu0"), view)) is not None:
            found.append(unit[1])
            view.remove(0, [unit[1]], "gpu0")
        assert found == order, name


def test_a_visit_ends_when_another_layer_is_routed() -> None:
    """In a pool for all layers; several micro-batches of a layer are one visit."""
    policy = Composed(replacement="fifo", scope="global")
    view = start(policy, slots=8)  # experts 0 and 1 of each layer, in the order of layers
    policy.decide(routed([[0, 0]]), view)
    policy.decide(routed([[1, 1]], mb=1, first_row=1), view)
    assert policy.evict(Fetch(0, [6], "gpu0"), view) == (1, 0)
    policy.decide(routed([[1, 1]], layer=1), view)
    assert policy.evict(Fetch(1, [6], "gpu0"), view) == (0, 0)
    assert policy.evict(Fetch(1, [6], "gpu0"), view) == (0, 1)
    policy.decide(routed([[1, 1]], layer=1, step=1), view)
    policy.decide(routed([[1, 1]], layer=0, step=1), view)
    assert policy.evict(Fetch(1, [6], "gpu0"), view) == (1, 1)


def test_random_victims_are_the_same_in_every_run_and_differ_between_seeds() -> None:
    def victims(seed: int) -> list[tuple[int, int] | None]:
        policy = Composed(replacement={"name": "random", "seed": seed}, placement="lowest-ids")
        view = start(policy, slots=32)
        return [policy.evict(Fetch(0, [0], "gpu0"), view) for _ in range(8)]

    assert victims(1) == victims(1) != victims(2)
    assert sorted(e for _, e in victims(1)) == list(range(8))  # type: ignore[misc]


class _Future:
    """Uses written down by hand."""

    def __init__(self, uses: dict[tuple[int, int], list[int]]) -> None:
        self.uses = uses

    def next_use(self, layer: int, expert: int, step: int) -> int:
        return next((use for use in self.uses.get((layer, expert), []) if use > step), 1 << 62)


def test_belady_evicts_what_is_needed_last() -> None:
    policy = Belady()
    policy.bind_oracle(_Future({(0, 0): [1], (0, 1): [9], (0, 2): [4]}))
    view = start(policy, slots=12)
    policy.decide(routed([[0, 5]]), view)
    assert policy.evict(Fetch(0, [5], "gpu0"), view) == (0, 1)


def test_belady_counts_layers_still_to_come_in_this_step() -> None:
    policy = Belady(scope="global")
    policy.bind_oracle(_Future({(0, 0): [4], (1, 0): [4, 5], (2, 0): [3], (3, 0): [3, 9]}))
    view = start(policy, slots=4)  # expert 0 of each layer
    policy.decide(routed([[0, 5]], layer=1, step=3), view)
    view.hold(1, [0], "gpu0")
    assert policy.evict(Fetch(1, [5], "gpu0"), view) == (0, 0)  # layers 2 and 3 use theirs in step 3


def test_a_cache_without_a_slot_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"set cache\.ratio to at least 1/8"):
        start(LRU(), slots=3)
    with pytest.raises(CapacityError, match="expected at least 1 cache slot, got 0"):
        start(LRU(scope="global"), slots=0)


# ------------------------------------------------------------------------------------------------ DALI, event by event
def dali(**options: Any) -> Dali:
    """DALI with fixed residents: experts 0 and 1 of each layer where there are 8 slots."""
    fixed: dict[str, Any] = {"placement": "lowest-ids", "prefetch_size": 0}
    return Dali(**(fixed | options))


def test_dali_splits_a_layer_greedily_and_stages_what_it_loads() -> None:
    """The worked example: A(1) B(1) C(5) uncached, D(4) E(1) cached; here D, E are 0, 1 and A, B, C are 2, 3, 4."""
    policy = dali()
    view = start(policy, slots=8)
    event = routed([[4, 0], [4, 0], [4, 0], [4, 0], [4, 1], [2, 3]])
    assert event.rows == [4, 1, 1, 1, 5, 0, 0, 0]
    assert list(policy.decide(event, view)) == [
        # differences 2, 1, 2, 2, 2: taken in the order 0, 2, 3, 4, 1
        Run(0, (2, 3, 1), "cpu0"),
        Fetch(0, [4], "gpu0", 0, "staging"),
        Run(0, [0, 4], "gpu0"),
    ]


def test_dali_loads_the_busiest_first_and_runs_residents_before_them() -> None:
    policy = dali(assignment="all-gpu")
    view = start(policy, slots=8)
    actions = list(policy.decide(routed([[2, 3], [3, 0], [3, 1]]), view))
    assert actions == [Fetch(0, [3, 2], "gpu0", 0, "staging"), Run(0, [0, 1, 3, 2], "gpu0")]
    view.put(0, [2, 3], "gpu0", "staging")
    assert list(policy.decide(LayerEnd(0, 0), view)) == [Drop(0, [2, 3], "gpu0")]


def test_dali_counts_what_is_left_of_a_transfer_under_way() -> None:
    """Alone on the CPU 3 rows take 3 us; the GPU needs 3 us with a whole transfer, 2 us if 1 us of it is left."""
    for remaining, on_gpu in ((3000, (2,)), (3001, ())):
        policy = dali()
        view = start(policy, slots=8)
        view.pend(0, [2], "gpu0", remaining)
        event = routed([[2, 2]])._replace(rows=[0, 0, 3, 0, 0, 0, 0, 0])
        ran = [a for a in policy.decide(event, view) if isinstance(a, Run)]
        assert [tuple(a.experts) for a in ran if a.device == "gpu0"] == ([on_gpu] if on_gpu else [])


def test_dali_asks_for_the_next_layer_and_prefetches_the_busiest_that_is_not_there() -> None:
    policy = dali(prefetch_size=2)
    view = start(policy, slots=8)
    first = next(iter(policy.decide(routed([[0, 1]]), view)))
    assert first == Predict(0, 1, "signal:residual", "gpu0", "main")
    ids = [[0, 5, 7], [0, 5, 7], [0, 6, 7]]  # top_k is 2: the third column does not count
    assert list(policy.decide(predicted(1, ids), view)) == [Fetch(1, [5], "gpu0", 1, "prefetch")]
    last_layer = [a for a in policy.decide(routed([[0, 1]], layer=3), view) if isinstance(a, Predict)]
    assert last_layer == []


def test_dali_may_take_the_top_of_what_is_not_there() -> None:
    policy = dali(prefetch_size=2, prefetch_over="non-resident")
    view = start(policy, slots=8)
    policy.decide(routed([[0, 1]]), view)
    ids = [[0, 5], [0, 5], [0, 6]]
    assert list(policy.decide(predicted(1, ids), view)) == [Fetch(1, [5, 6], "gpu0", 1, "prefetch")]


def test_dali_prefetches_its_size_over_all_micro_batches() -> None:
    policy = dali(prefetch_size=2)
    view = start(policy, slots=8)
    policy.decide(routed([[0, 1]]), view)
    assert list(policy.decide(predicted(1, [[5, 6]]), view)) == [Fetch(1, [5, 6], "gpu0", 1, "prefetch")]
    assert list(policy.decide(predicted(1, [[7, 4], [7, 4]], mb=1), view)) == []


def test_a_late_prediction_is_ignored() -> None:
    policy = dali(prefetch_size=2)
    view = start(policy, slots=8)
    policy.decide(routed([[0, 1]], layer=1), view)
    assert list(policy.decide(predicted(1, [[5, 6]]), view)) == []


@pytest.mark.parametrize(("nearer", "first"), [("skip", [2]), ("ask", [1, 2])])
def test_the_first_layer_asks_about_nearer_ones(nearer: str, first: list[int]) -> None:
    prefetch = {"name": "predicted", "source": "oracle", "lookahead": 2, **({"nearer": "ask"} if nearer == "ask" else {})}
    policy = Composed(prefetch=prefetch)
    view = start(policy, slots=8)
    asked = [
        [a.layer for a in policy.decide(routed([[0, 1]], layer=layer), view) if isinstance(a, Predict)] for layer in range(3)
    ]
    assert asked == [first, [3], []]  # of four layers


def test_predictions_of_two_layers_do_not_disturb_each_other() -> None:
    # Of each layer one expert at most, however the micro-batches of predictions come.
    policy = Composed(prefetch={"name": "predicted", "source": "oracle", "lookahead": 2, "nearer": "ask"})
    view = start(policy, slots=8)
    fetched = [
        [(a.layer, *a.experts) for a in policy.decide(predicted(layer, ids, mb=mb), view) if isinstance(a, Fetch)]
        for layer, ids, mb in [(1, [[5, 6]], 0), (2, [[7, 6]], 0), (1, [[4, 6]], 1), (2, [[5, 4]], 1)]
    ]
    assert fetched == [[(1, 5)], [(2, 6)], [], []]


def test_dali_makes_a_prefetch_under_way_a_demand_and_drops_it_after_its_layer() -> None:
    policy = dali(prefetch_size=1, assignment="all-gpu")
    view = start(policy, slots=8)
    policy.decide(routed([[0, 1]]), view)
    policy.decide(predicted(1, [[5, 5]]), view)
    view.pend(1, [5], "gpu0")
    actions = [a for a in policy.decide(routed([[5, 6]], layer=1), view) if not isinstance(a, Predict)]
    assert actions == [
        Fetch(1, [5], "gpu0", 0, "prefetch"),
        Fetch(1, [6], "gpu0", 0, "staging"),
        Run(1, [5, 6], "gpu0"),
    ]
    view.put(1, [5], "gpu0", "prefetch")
    view.put(1, [6], "gpu0", "staging")
    assert policy.evict(Fetch(2, [3], "gpu0", 1, "prefetch"), view) == (1, 5)  # it has been used
    assert list(policy.decide(LayerEnd(0, 1), view)) == [Drop(1, [6, 5], "gpu0")]


def test_dali_keeps_a_prefetched_expert_until_its_layer_unless_a_demand_needs_the_room() -> None:
    policy = dali(prefetch_size=1)
    view = start(policy, slots=8)
    policy.decide(routed([[0, 1]]), view)
    policy.decide(predicted(1, [[5, 5]]), view)
    view.put(1, [5], "gpu0", "prefetch")
    assert policy.evict(Fetch(1, [6], "gpu0", 1, "prefetch"), view) is None
    assert policy.evict(Fetch(0, [6], "gpu0", 0, "prefetch"), view) == (1, 5)


def window(policy: Dali, view: FakeView, loads: list[int], visits: int) -> list[list[Any]]:
    """Visit layer 0 some times with these loads; return the actions at each layer end."""
    ends = []
    for step in range(visits):
        active = [e for e, w in enumerate(loads) if w]
        policy.decide(routed([[0, 0]], step=step)._replace(rows=loads, active=active), view)
        ends.append(list(policy.decide(LayerEnd(step, 0), view)))
    return ends


def test_dali_replaces_the_idlest_at_the_end_of_a_window() -> None:
    """The worked example: in four visits the scores sum to 5 0 1 7 4 0 6 2 (here: the same loads, four times)."""
    policy = dali(w_size=4, u_size=2, assignment="all-cpu")
    view = start(policy, slots=16)
    ends = window(policy, view, [5, 0, 1, 7, 4, 0, 6, 2], 4)
    assert ends == [[], [], [], [Drop(0, [1, 2], "gpu0"), Fetch(0, [6, 4], "gpu0", 2, "cache")]]


def test_dali_as_printed_fires_after_the_first_visit() -> None:
    policy = dali(w_size=4, u_size=1, assignment="all-cpu", firing="printed")
    view = start(policy, slots=16)
    ends = window(policy, view, [5, 0, 1, 7, 4, 0, 6, 2], 5)
    assert [bool(actions) for actions in ends] == [True, False, False, False, True]


def test_dali_updates_may_block_or_keep_a_copy_that_is_there() -> None:
    loads = [5, 0, 1, 7, 4, 0, 6, 2]
    policy = dali(w_size=1, u_size=1, assignment="all-cpu", blocking=True)
    assert window(policy, start(policy, slots=16), loads, 1)[0][-1] == Fetch(0, [6], "gpu0", 0, "cache")
    policy = dali(w_size=1, u_size=2, assignment="all-cpu", relabel=True)
    view = start(policy, slots=16)
    view.put(0, [6, 7], "gpu0", "staging")
    assert window(policy, view, loads, 1)[0] == [
        Drop(0, [1, 2], "gpu0"),
        Move(0, [6], "gpu0", "cache"),
        Drop(0, [7], "gpu0"),
        Fetch(0, [4], "gpu0", 2, "cache"),
    ]


def test_dali_takes_the_published_sizes_by_the_number_of_experts() -> None:
    for n_experts, sizes in ((8, (1, 1)), (64, (8, 4))):
        policy = Dali()
        view = FakeView(tiny_model(n_experts=n_experts), slots=64)
        pools = {pool.name: sum(pool.sizes(4)) // EXPERT for pool in policy.place(view).pools}
        assert (policy.parts.replacement.u_size, pools["prefetch"]) == sizes  # type: ignore[attr-defined]


def test_dali_needs_its_signal_only_if_it_prefetches() -> None:
    assert "signal:residual" in Dali().needs
    assert "signal:residual" not in Dali(prefetch_size=0).needs


# ------------------------------------------------------------------------------------------------ compositions at large
def test_random_compositions_pass_the_common_checks() -> None:
    rng = random.Random(11)
    for _ in range(8):
        replacement = rng.choice(list(PARTS["replacement"]))
        pools = ["transient"] if replacement in ("static", "workload-aware") else ["transient", "cache"]
        prefetch = {
            "name": "predicted",
            "source": rng.choice(["oracle", "synthetic:0.4"]),
            "size": rng.choice([1, 3]),
            "pool": rng.choice(pools),
            **rng.choice([{"lookahead": 1}, {"lookahead": 2}, {"lookahead": 3, "nearer": "ask"}]),
        }
        spec = {
            "name": "composed",
            "replacement": replacement,
            "prefetch": rng.choice(["none", prefetch]),
            "placement": rng.choice(["none", "random", "highest-ids", "frequency-per-layer"]),
            "assignment": rng.choice(["all-gpu", "greedy", "threshold", "beam"]),
            "scope": "global" if replacement == "least-stale" else rng.choice(["per-layer", "global"]),
            "staging_slots": rng.choice([None, 1]) if pools == ["transient"] else None,
        }
        check_policy(partial(make_policy, spec), slots=(12,))


def test_a_routed_layer_is_planned_the_same_after_a_restart() -> None:
    policy = Dali()
    view = FakeView(slots=16)
    event: Routed = routed([[1, 2], [3, 2]])
    plans = []
    for _ in range(2):
        policy.place(view)
        plans.append(list(policy.decide(event, view)))
    assert plans[0] == plans[1]


def test_what_is_cached_from_its_issue_on_contradicts_the_cache_alone() -> None:
    with pytest.raises(ConfigError, match=r"cache_only: expected false with assignment TwoEnded.*set cached_from: start"):
        start(Composed(assignment="hss", cache_only=True))
    start(Composed(assignment={"name": "hss", "cached_from": "start"}, cache_only=True))
