"""Rules 6 and 7: slots, pools, pins, drops and moves; a run never loads.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import PolicyError
from moesim.policy import DEMAND, PREFETCH, UPDATE, Copy, Drop, Fetch, Move, Pool, Run
from tests.engine.engine_kit import (
    ALL,
    ONE,
    Script,
    idle,
    link,
    machine,
    on_demand,
    on_gpu,
    play,
    tiny_model,
    transfers,
    workload,
)


def test_rule_6_memory_is_taken_at_the_start_of_a_transfer_and_freed_by_a_drop() -> None:
    # cpu0->gpu0 |     |0/0       |0/1       |
    # memory           +1000      +1000            -2000 at 2200, the end of the layer
    script = {("Routed", 0, 0, 0): on_demand, ("LayerEnd", 0, 0): [Drop(0, [0, 1], "gpu0")]}
    records = play(Script(script, copies=[ALL[1]], routed=on_gpu), ONE)
    level = records.memory[4].n_bytes  # the placed copies and the KV cache are in
    assert [(m.time, m.n_bytes - level) for m in records.memory[5:]] == [(100, 1000), (1100, 2000), (2200, 1000), (2200, 0)]
    assert [(e.time, e.expert, e.reason, e.used) for e in records.evictions] == [(2200, 0, "drop", True), (2200, 1, "drop", True)]
    assert records.pool_peak_bytes["gpu0", "cache"] == 6000


def test_rule_6_kv_of_the_final_length_is_held_from_the_start() -> None:
    work = workload([[[[0, 1], [2, 3]]] * 3])  # a prompt of 1 unrecorded token, 3 decode rows
    model = tiny_model()
    records = play(Script(copies=ALL, routed=on_gpu), work, model=model)
    assert work.peak_kv_tokens == 4
    kv = 2 * 4 * model.kv_bytes(0, 1)
    steps = [m for m in records.memory if m.time == 0][-1]
    assert steps.n_bytes == model.non_expert_bytes + 8000 + kv
    assert records.peak_bytes["gpu0"] == steps.n_bytes


def test_rule_6_more_experts_than_slots_go_in_waves() -> None:
    # Two slots, four active experts; a column is 100 ns:
    # cpu0->gpu0 | |0/0.......|0/1.......|0/2.......|0/3.......|
    # gpu0       |D          |0|        |1|        |2|        |3|
    #            0 1         11         21         31         41
    # victims                            0 at 2100  1 at 3100
    work = workload([[[[0, 1], [0, 1]]], [[[2, 3], [0, 1]]]])
    script = Script({("Routed", 0, 0, 0): on_demand}, copies=[], slots=2, routed=on_demand, evict=idle)
    records = play(script, work)
    assert [t[:2] for t in transfers(records)[:4]] == [(100, 1100), (1100, 2100), (2100, 3100), (3100, 4100)]
    assert [(e.time, e.layer, e.expert) for e in records.evictions[:2]] == [(2100, 0, 0), (3100, 0, 1)]
    assert script.asked[:2] == [(2100, 0, 2, DEMAND), (3100, 0, 3, DEMAND)]
    assert records.layers[0].end == 4200


def test_rule_6_none_means_wait() -> None:
    # One slot. At 1100 expert 0 is queued to run, hence pinned: wait; asked again at 1200.
    # cpu0->gpu0 |  |0/0 1000|   |0/1 1000|
    # gpu0       |D |        |0  |        |1 |
    #            0 100     1100 1200    2200 2300
    script = Script({("Routed", 0, 0, 0): on_demand}, slots=1, routed=on_demand, evict=idle)
    records = play(script, ONE)
    assert transfers(records)[:2] == [(100, 1100, "cpu0->gpu0", "demand 0/0"), (1200, 2200, "cpu0->gpu0", "demand 0/1")]
    assert [t.waited_memory for t in records.transfers[:2]] == [False, True]
    assert script.asked[:2] == [(1100, 0, 1, DEMAND), (1200, 0, 1, DEMAND)]


def test_rule_6_only_the_head_of_each_class_asks_and_the_rest_may_pass_it() -> None:
    # Pool "a" is full for ever, "b" has room: 0/2 and 1/2 pass 0/0. Of class 0 only 0/0 asks, of class 1 only 1/0.
    script = Script(
        {("LayerBegin", 0, 0): [
            Fetch(0, [2, 3], "gpu0", DEMAND, "a"), Fetch(0, [1], "gpu0", DEMAND, "b"),
            Fetch(1, [0, 1], "gpu0", PREFETCH, "a"), Fetch(1, [2], "gpu0", PREFETCH, "b"),
        ]},
        copies=[Copy(0, [0], "gpu0", "a"), Copy(1, [3], "gpu0", "b")],
        pools=[Pool("gpu0", "a", 1000), Pool("gpu0", "b", 3000)], routed=on_gpu,
    )  # fmt: skip
    records = play(script, ONE, machine(links={"cpu0->gpu0": link(100), "gpu0->cpu0": link()}))
    assert transfers(records) == [(0, 10, "cpu0->gpu0", "demand 0/1"), (10, 20, "cpu0->gpu0", "prefetch 1/2")]
    assert {(layer, expert) for _, layer, expert, _ in script.asked} == {(0, 2), (1, 0)}
    assert script.asked[:1] == [(0, 0, 2, DEMAND)]
    assert script.asked[1:3] == [(10, 0, 2, DEMAND), (10, 1, 0, PREFETCH)]


def test_rule_6_a_queued_run_pins_and_a_dropped_copy_goes_when_it_is_idle() -> None:
    # gpu0 |DDDDD|00000|11111|       dropped at 100 with their Runs: 0 goes at 200, 1 at 300
    script = {("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Drop(0, [0, 1, 2], "gpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), ONE)
    assert [(e.time, e.expert, e.used) for e in records.evictions] == [(100, 2, False), (200, 0, True), (300, 1, True)]


@pytest.mark.parametrize("landing", [0, 1000])
def test_rule_6_a_victim_in_use_leaves_when_it_is_idle_and_the_copy_lands_next_to_the_pool_or_waits(landing: int) -> None:
    # gpu0       |DDDDD|00000|11111|22222|     2 is loaded in the place of 1, which is still to run
    # cpu0->gpu0       |3333333333333 (with room next to the pool) or, from 300 on, |3333333333333
    #            0    100   200   300
    script = {("Routed", 0, 0, 0): [Fetch(0, [3], "gpu0"), Run(0, [0, 1], "gpu0")]}
    free = []

    def name(fetch: Fetch, view: Any) -> tuple[int, int]:
        free.append(view.free_bytes("gpu0", "cache"))
        return 0, 1

    pools = [Pool("gpu0", "cache", 2000, landing=landing), Pool("gpu0", "b", 4000)]
    records = play(
        Script(script, copies=[Copy(0, [0, 1], "gpu0"), ALL[1]._replace(pool="b")], pools=pools, routed=on_gpu, evict=name), ONE
    )
    end = records.makespan_ns  # which cuts the copy off
    assert transfers(records) == [(100 if landing else 300, end, "cpu0->gpu0", "demand 0/3")]
    assert [(e.time, e.expert, e.reason) for e in records.evictions] == [(300, 1, "evict")]
    assert free == [0] and records.pool_peak_bytes["gpu0", "cache"] == 2000 + landing


def test_rule_6_write_back_is_a_transfer_and_pins_its_source() -> None:
    # gpu0->cpu0 |     |0/2 write-back  |        dropped at 100 too: its memory is free at 1100
    script = {("Routed", 0, 0, 0): [Fetch(0, [2], "cpu0", UPDATE), Drop(0, [2], "gpu0"), Run(0, [0, 1], "gpu0")]}
    work = workload([[[[0, 1], [2, 3]]] * 3])
    script |= {("Routed", s, 0, 0): [Run(0, [0, 1], "gpu0")] for s in (1, 2)}
    records = play(Script(script, copies=ALL, routed=on_gpu, hear=["Fetched"]), work)
    assert transfers(records) == [(100, 1100, "gpu0->cpu0", "write-back 0/2")]
    assert [(e.time, e.expert) for e in records.evictions] == [(1100, 2)]


def test_rule_6_drop_cancels_what_is_queued_but_not_what_is_in_flight_or_awaited() -> None:
    # 1/0 is in flight at 100 and goes as it arrives; 1/1 is cancelled; 1/2 arrives at 2000.
    script = {
        ("LayerBegin", 0, 0): [Fetch(1, [0, 1, 2], "gpu0", PREFETCH)],
        ("Routed", 0, 0, 0): [Drop(1, [0, 1], "gpu0"), Run(0, [0, 1], "gpu0")],
    }
    records = play(Script(script, copies=[ALL[0], Copy(1, [3], "gpu0")], routed=on_gpu), ONE)
    assert transfers(records) == [(0, 1000, "cpu0->gpu0", "prefetch 1/0"), (1000, 2000, "cpu0->gpu0", "prefetch 1/2")]
    assert [(e.time, e.layer, e.expert, e.reason) for e in records.evictions] == [(1000, 1, 0, "drop")]
    assert records.makespan_ns == 2100


def test_rule_6_pools_per_layer_are_separate_and_global_ones_shared() -> None:
    per_layer = False

    def asked(pool: Pool) -> list[Any]:
        nonlocal per_layer
        per_layer = pool.per_layer
        script = Script(copies=[Copy(1, [0, 1], "gpu0")], pools=[pool], routed=on_demand, evict=last)
        play(script, ONE)
        return [question[1:3] for question in script.asked]

    def last(fetch: Fetch, view: Any) -> tuple[int, int] | None:
        held = reversed(view.residents("gpu0", "cache"))
        idle = (x for x in held if not view.is_in_use(*x, "gpu0"))
        return next((x for x in idle if x[0] == fetch.layer or not per_layer), None)

    # Two slots for each layer: layer 0 fits, layer 1 must give up its own. Three for all: layer 0 needs one more.
    assert asked(Pool("gpu0", "cache", 2000, True)) == [(1, 2), (1, 3)]
    assert asked(Pool("gpu0", "cache", 4000)) == [(1, 2), (1, 3)]
    assert asked(Pool("gpu0", "cache", 3000)) == [(0, 1), (1, 2), (1, 3)]
    # Layers of different sizes: room for one and three, then for three and two.
    assert asked(Pool("gpu0", "cache", [1000, 3000], True)) == [(0, 1), (0, 1), (1, 3)]  # asked again when 0/0 has run
    assert asked(Pool("gpu0", "cache", [3000, 2000], True)) == [(1, 2), (1, 3)]


def test_rule_6_move_relabels_and_copies_nothing() -> None:
    free = []

    def look(event: Any, view: Any) -> list[Any]:
        free.append((view.free_bytes("gpu0", "cache"), view.free_bytes("gpu0", "other"), view.residents("gpu0", "other")))
        return []

    script = Script(
        {("StepBegin", 0): look, ("LayerBegin", 0, 0): [Move(0, [0, 1], "gpu0", "other")], ("LayerBegin", 0, 1): look},
        copies=[*ALL], pools=[Pool("gpu0", "cache", 8000), Pool("gpu0", "other", 2000)], routed=on_gpu,
    )  # fmt: skip
    records = play(script, ONE)
    assert free[:2] == [(0, 2000, []), (2000, 0, [(0, 0), (0, 1)])]
    assert records.transfers == [] and records.makespan_ns == 600
    assert records.pool_peak_bytes["gpu0", "other"] == 2000


@pytest.mark.parametrize("at", [("Routed", 0, 0, 0), ("LayerBegin", 0, 0)])
def test_rule_6_what_is_on_its_way_may_be_moved_and_arrives_elsewhere(at: tuple[Any, ...]) -> None:
    # The copy of 1/2 takes from 0 to 1000; at 0 it is queued, at 100 in flight.
    begin, fetch = ("LayerBegin", 0, 0), Fetch(1, [2], "gpu0", PREFETCH, "b")
    move = [Move(1, [2], "gpu0", "cache")]
    script = {begin: [fetch, *move]} if at == begin else {begin: [fetch], at: [*move, Run(0, [0, 1], "gpu0")]}
    seen = []

    def look(event: Any, view: Any) -> list[Any]:
        seen.append((view.residents("gpu0", "cache", 1), view.residents("gpu0", "b"), view.free_bytes("gpu0", "b")))
        return []

    pools = [Pool("gpu0", "cache", 6000), Pool("gpu0", "b", 1000)]
    copies = [ALL[0], Copy(1, [3], "gpu0")]
    script[("LayerEnd", 0, 1)] = look
    records = play(Script(script, copies=copies, pools=pools, routed=on_gpu), ONE)
    assert transfers(records) == [(0, 1000, "cpu0->gpu0", "prefetch 1/2")]
    assert seen == [([2, 3], [], 1000)]
    assert records.pool_peak_bytes["gpu0", "b"] == (0 if at == begin else 1000)


def test_rule_6_pins_on_the_backing_device_are_of_the_copy_that_is_read() -> None:
    seen = []

    def look(event: Any, view: Any) -> list[Any]:
        seen.append([view.is_in_use(0, e, "cpu0") for e in range(4)])
        return []

    script = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [1], "gpu0")], ("Ran", 0, 0, 1, "gpu0"): look}
    play(Script(script, copies=ALL, routed=on_gpu), ONE)
    assert seen == [[True, False, False, False]]


def test_rule_7_run_never_loads() -> None:
    with pytest.raises(PolicyError) as error:
        play(Script(routed=on_gpu), ONE, name="lru")
    assert str(error.value) == (
        "t=100 ns, step 0, layer 0: Run(L0/E0, gpu0): not resident and no fetch pending; return Fetch(L0/E0, gpu0) before it "
        "[policy=lru]"
    )
