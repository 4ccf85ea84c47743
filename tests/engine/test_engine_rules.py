"""The ten rules of the engine, each with exact timelines: literal ns, drawn by hand beside the test.

In the drawings a column is 20 ns unless a scale is given; costs are those of `engine_kit`.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from moesim.errors import DeadlockError, PolicyError
from moesim.policy import (
    DEMAND,
    PREFETCH,
    UPDATE,
    Action,
    Copy,
    Drop,
    Fetch,
    Move,
    Pool,
    Predict,
    Routed,
    Run,
    Send,
    Skip,
)
from moesim.records import DecisionRecord, InexactRecord
from tests.engine.engine_kit import (
    Oracle,
    Script,
    assert_same,
    cpu,
    crossings,
    gpu,
    link,
    machine,
    pair,
    play,
    tasks,
    tiny_model,
    transfers,
    workload,
)

ALL = [Copy(layer, range(4), "gpu0") for layer in (0, 1)]
ONE = workload([[[[0, 1], [2, 3]]]])  # one request, one decode step: layer 0 -> 0, 1; layer 1 -> 2, 3
TWO = workload([[[[0, 1], [2, 3]]], [[[1, 2], [2, 3]]]])  # row 1: layer 0 -> 1, 2


def on_gpu(event: Routed, view: Any) -> list[Any]:
    return [Run(event.layer, event.active, "gpu0")]


def on_demand(event: Routed, view: Any) -> list[Any]:
    return [Fetch(event.layer, event.active, "gpu0"), Run(event.layer, event.active, "gpu0")]


def idle(fetch: Fetch, view: Any) -> tuple[int, int] | None:
    """Name the first idle resident of the pool."""
    for layer, expert in view.residents(fetch.device, fetch.pool):
        if not view.is_in_use(layer, expert, fetch.device):
            return layer, expert
    return None


# ------------------------------------------------------------------------------------------------- 1: integers, determinism


def test_rule_1_time_is_integer_and_repeatable() -> None:
    # gpu0 |DDDDD00000|11111|DDDDD|22222|33333|
    #      0    100  200   300   400   500   600
    def run() -> Any:
        return play(Script(copies=ALL, routed=on_gpu), ONE)

    records = run()
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (100, 200, "gpu0", "E0x1"), (200, 300, "gpu0", "E1x1"),
        (300, 400, "gpu0", "dense"), (400, 500, "gpu0", "E2x1"), (500, 600, "gpu0", "E3x1"),
    ]  # fmt: skip
    assert records.makespan_ns == 600
    assert all(type(t.start) is int and type(t.end) is int for t in records.tasks)
    assert records == run()


def test_rule_1_costs_round_once_to_whole_ns() -> None:
    # 1000 bytes at 0.3 bytes/ns are 3333.33 ns: 3334.
    toy = machine(links={"cpu0->gpu0": link(0.3), "gpu0->cpu0": link()})
    records = play(Script({("Routed", 0, 0, 0): on_demand}, copies=ALL[1:], routed=on_gpu), ONE, toy)
    assert transfers(records) == [(100, 3434, "cpu0->gpu0", "demand 0/0"), (3434, 6768, "cpu0->gpu0", "demand 0/1")]


# -------------------------------------------------------------------------------------------------- 2: within an instant


def test_rule_2_an_expert_that_arrives_as_the_router_is_done_is_a_hit() -> None:
    # cpu0->gpu0 |0/0**|0/1**|          10 bytes/ns: 100 each
    # gpu0       |DDDDD|00000|11111|    at 100: Fetched(0/0), then Routed: 0 is a hit, 1 in flight
    script = Script(
        {("LayerBegin", 0, 0): [Fetch(0, [0, 1], "gpu0", PREFETCH)], ("Routed", 0, 0, 0): on_gpu},
        copies=ALL[1:], routed=on_gpu, hear=["Fetched"],
    )  # fmt: skip
    records = play(script, ONE, machine(links={"cpu0->gpu0": link(10), "gpu0->cpu0": link()}))
    assert (records.lookups[0].time, records.lookups[0].active) == (100, (0, 1))
    assert (records.lookups[0].hits, records.lookups[0].in_flight) == ((1, 0), (0, 1))
    assert script.log[1:3] == [(100, ("Fetched", 0, 0, "gpu0")), (100, ("Routed", 0, 0, 0))]
    assert tasks(records)[1:3] == [(100, 200, "gpu0", "E0x1"), (200, 300, "gpu0", "E1x1")]


def test_rule_2_order_of_facts_at_one_instant() -> None:
    # gpu0       |DDDDD|00000|11111|DDDDD|...     at 300: Fetched, Ran, LayerEnd, LayerBegin
    # cpu0->gpu0 |     |1/2********|              at 400: Routed, then Predicted
    # cpu0       |                 |PPPPP|
    script = Script(
        {
            ("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Fetch(1, [2], "gpu0", PREFETCH)],
            ("LayerBegin", 0, 1): [Predict(0, 1, "told", "cpu0")],
        },
        copies=[Copy(0, range(4), "gpu0"), Copy(1, [3], "gpu0")], routed=on_gpu,
        hear=["Fetched", "Ran", "LayerEnd", "LayerBegin", "Predicted"],
    )  # fmt: skip
    toy = machine({"gpu0": gpu(), "cpu0": cpu(predict={"told": 100})}, {"cpu0->gpu0": link(5), "gpu0->cpu0": link()})
    play(script, ONE, toy, predictors={"told": Oracle(None)})
    assert [key for now, key in script.log if now == 300] == [
        ("Fetched", 1, 2, "gpu0"), ("Ran", 0, 0, 1, "gpu0"), ("LayerEnd", 0, 0), ("LayerBegin", 0, 1),
    ]  # fmt: skip
    assert [key for now, key in script.log if now == 400] == [("Routed", 0, 1, 0), ("Predicted", 0, 1, 0)]


def test_rule_2_completions_of_one_instant_are_told_in_submission_order() -> None:
    # gpu0       |DDDDD|22222|        the fetches end together at 200; 1/1 was submitted first
    # cpu0->gpu0 |     |1/1**|
    # cpu0->gpu1 |     |1/0**|
    fast = {"cpu0->gpu0": link(10), "gpu0->cpu0": link(), "cpu0->gpu1": link(10), "gpu1->cpu0": link()}
    script = Script(
        {("Routed", 0, 0, 0): [Fetch(1, [1], "gpu1"), Fetch(1, [0], "gpu0"), Run(0, [0, 1], "gpu0")]},
        copies=[ALL[0], Copy(1, [2, 3], "gpu0")], pools=[Pool("gpu0", "cache", 8000), Pool("gpu1", "cache", 8000)],
        routed=on_gpu, hear=["Fetched"],
    )  # fmt: skip
    play(script, ONE, machine({"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu()}, fast))
    assert script.log[1:3] == [(200, ("Fetched", 1, 1, "gpu1")), (200, ("Fetched", 1, 0, "gpu0"))]


def test_rule_2_actions_take_effect_in_the_order_returned() -> None:
    def fetched(actions: list[Any]) -> list[Any]:
        script = Script({("LayerBegin", 0, 0): actions}, copies=ALL, routed=on_gpu)
        return transfers(play(script, ONE))

    drop, fetch = Drop(1, [0], "gpu0"), Fetch(1, [0], "gpu0", UPDATE)
    assert fetched([drop, fetch]) == []  # 1000 ns: still on its way when the run is over at 600
    fast = machine(links={"cpu0->gpu0": link(10), "gpu0->cpu0": link()})
    for order, found in (([drop, fetch], [(0, 100, "cpu0->gpu0", "update 1/0")]), ([fetch, drop], [])):
        script = Script({("LayerBegin", 0, 0): order}, copies=ALL, routed=on_gpu)
        assert transfers(play(script, ONE, fast)) == found  # the fetch of a resident is nothing


def test_rule_2_a_generator_is_collected_before_anything_takes_effect() -> None:
    seen = []

    def lazily(event: Routed, view: Any) -> Any:
        yield Drop(1, [0], "gpu0")
        seen.append(view.is_resident(1, 0, "gpu0"))
        yield Run(0, event.active, "gpu0")

    play(Script({("Routed", 0, 0, 0): lazily}, copies=ALL, routed=on_gpu), ONE)
    assert seen == [True]


def test_old_names_of_the_contract_hold_for_one_version() -> None:
    seen = []

    def look(event: Routed, view: Any) -> list[Any]:
        seen.append((event.loads, [view.is_pinned(0, e, "gpu0") for e in range(2)]))
        assert seen[-1] == (event.rows, [view.is_in_use(0, e, "gpu0") for e in range(2)])
        return [Run(event.layer, event.active, "gpu0")]

    play(Script({("Routed", 0, 0, 0): look}, copies=ALL, routed=on_gpu), ONE)
    assert [(list(rows), used) for rows, used in seen] == [([1, 1, 0, 0], [False, False])]


def test_rule_2_a_decision_delays_its_effect_is_recorded_and_pins_what_is_routed() -> None:
    # gpu0       |DDDDD|dd|00000|11111|DDDDD|dd|22222|33333|   d: decision, 30 ns
    #            0    100 130                      A message leaves the link at 110, and a victim is asked for:
    # cpu0->gpu0 |message~~|       1/0 ...         0 and 1 are pinned, 2 is not
    pins = []

    def evict(fetch: Fetch, view: Any) -> None:
        pins.append((view.now_ns, [view.is_in_use(0, e, "gpu0") for e in range(3)]))

    script = Script(
        {("LayerBegin", 0, 0): [Send(110, "cpu0", "gpu0", "m"), Fetch(1, [0], "gpu0", PREFETCH, "small")]},
        copies=[*ALL[:1], Copy(1, [2, 3], "gpu0"), Copy(1, [1], "gpu0", "small")],
        pools=[Pool("gpu0", "cache", 8000), Pool("gpu0", "small", 1000)], routed=on_gpu, evict=evict,
    )  # fmt: skip
    records = play(script, ONE, decision_ns=30)
    assert records.decisions == [DecisionRecord(100, 130, 0, 0), DecisionRecord(430, 460, 0, 1)]
    assert tasks(records)[1:4] == [(130, 230, "gpu0", "E0x1"), (230, 330, "gpu0", "E1x1"), (330, 430, "gpu0", "dense")]
    assert records.makespan_ns == 660
    assert (110, [True, True, False]) in pins  # deciding
    assert (130, [True, True, False]) in pins  # queued
    assert (230, [False, True, False]) in pins  # 0 is done


# ------------------------------------------------------------------------------------------------------------ 3: a layer


def test_rule_3_attention_and_dense_part_on_different_devices() -> None:
    # gpu0       |       |        |DD|00000|11111|DDDDD...
    # cpu0       | AAAAAA|        |                           attention of layer 0: 120
    # gpu0->cpu0 |h      |
    # cpu0->gpu0 |       |h                                   the hidden state crosses: 20 each way
    #            0  20  140 160  200   300   400   500
    records = play(Script(copies=ALL, parts={("attention", 0): "cpu0"}, routed=on_gpu), ONE)
    assert tasks(records)[:5] == [
        (20, 140, "cpu0", "attention"), (160, 200, "gpu0", "dense"), (200, 300, "gpu0", "E0x1"),
        (300, 400, "gpu0", "E1x1"), (400, 500, "gpu0", "dense"),
    ]  # fmt: skip
    assert crossings(records) == [(0, 20, "gpu0->cpu0", "hidden", 1), (140, 160, "cpu0->gpu0", "hidden", 1)]


def test_rule_3_whole_layer_on_the_cpu_and_back() -> None:
    # gpu0       |DDDDD|00000|11111|                                 |head
    # gpu0->cpu0 |                 |h                               h|
    # cpu0       |                  |DDDDDDDDDD|22222....|33333....|
    #            0    100   200   300 320     520       920      1320 1340
    parts = {("attention", 1): "cpu0", ("dense", 1): "cpu0"}
    script = Script({("Routed", 0, 1, 0): [Run(1, [2, 3], "cpu0")]}, copies=ALL, parts=parts, routed=on_gpu)
    toy = machine({"gpu0": gpu(head_ns=70), "cpu0": cpu()})
    records = play(script, ONE, toy)
    assert tasks(records)[3:] == [
        (320, 520, "cpu0", "dense"), (520, 920, "cpu0", "E2x1"), (920, 1320, "cpu0", "E3x1"), (1340, 1410, "gpu0", "head")
    ]  # fmt: skip
    assert crossings(records) == [(300, 320, "gpu0->cpu0", "hidden", 1), (1320, 1340, "cpu0->gpu0", "hidden", 1)]


def test_rule_3_micro_batches_overlap_within_a_layer_and_meet_at_its_end() -> None:
    # Request 0 -> 0, 1 on the CPU; request 1 -> 2, 3 on the GPU. Layer 1 waits for both.
    # gpu0       |D0000|D1111|22222|33333|                              |D0...
    # gpu0->cpu0 |     |i
    # cpu0       |      |0000000000 400 ns |1111111111 400 ns |
    # cpu0->gpu0 |                                            |o
    #            0    100 120            520                 920 940
    work = workload([[[[0, 1], [0, 1]]], [[[2, 3], [2, 3]]]], micro_batches=2)
    script = {("Routed", 0, 0, 0): [Run(0, [0, 1], "cpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), work)
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (100, 200, "gpu0", "dense"), (200, 300, "gpu0", "E2x1"), (300, 400, "gpu0", "E3x1"),
        (120, 520, "cpu0", "E0x1"), (520, 920, "cpu0", "E1x1"),
        (940, 1040, "gpu0", "dense"), (1040, 1140, "gpu0", "dense"),
        (1140, 1240, "gpu0", "E0x1"), (1240, 1340, "gpu0", "E1x1"), (1340, 1440, "gpu0", "E2x1"), (1440, 1540, "gpu0", "E3x1"),
    ]  # fmt: skip
    assert crossings(records) == [(100, 120, "gpu0->cpu0", "in", 1), (920, 940, "cpu0->gpu0", "out", 1)]
    assert [(x.begin, x.end) for x in records.layers] == [(0, 940), (940, 1540)]
    assert [(x.mb, x.active, x.time) for x in records.lookups[:2]] == [(0, (0, 1), 100), (1, (2, 3), 200)]


def test_rule_3_each_micro_batch_takes_its_own_rows_only() -> None:
    # Both micro-batches use 0 and 1 on the CPU: two groups, a row each; no row crosses twice.
    # gpu0->cpu0 |i(mb0) at 100|   |i(mb1) at 200|
    # cpu0        120 |0  520|1  920|0 1320|1 1720|     experts of mb 0, then of mb 1
    work = workload([[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    on_cpu = {("Routed", 0, 0, mb): [Run(0, [0, 1], "cpu0")] for mb in (0, 1)}
    records = play(Script(on_cpu, copies=ALL, routed=on_gpu), work)
    assert crossings(records) == [
        (100, 120, "gpu0->cpu0", "in", 1), (200, 220, "gpu0->cpu0", "in", 1),
        (920, 940, "cpu0->gpu0", "out", 1), (1720, 1740, "cpu0->gpu0", "out", 1),
    ]  # fmt: skip
    assert [t for t in tasks(records) if t[2] == "cpu0"] == [
        (120, 520, "cpu0", "E0x1"), (520, 920, "cpu0", "E1x1"), (920, 1320, "cpu0", "E0x1"), (1320, 1720, "cpu0", "E1x1"),
    ]  # fmt: skip


def test_rule_3_shared_experts_run_before_routed_ones() -> None:
    # gpu0 |DDDDD|sss|00000|11111|DDDDD|sss|22222|33333|      s: 50
    model = tiny_model(n_shared=1, shared_intermediate=10)
    records = play(Script(copies=ALL, routed=on_gpu), ONE, model=model)
    assert tasks(records)[:4] == [
        (0, 100, "gpu0", "dense"), (100, 150, "gpu0", "shared"), (150, 250, "gpu0", "E0x1"), (250, 350, "gpu0", "E1x1")
    ]  # fmt: skip
    assert records.makespan_ns == 700


def test_the_end_of_shared_experts_is_told_for_each_micro_batch() -> None:
    model = tiny_model(n_shared=1, shared_intermediate=10)
    script = Script(copies=ALL, routed=on_gpu, hear=("SharedRan",))
    work = workload([[[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    records = play(script, work, model=model)
    told = [event for event in script.log if event[1][0] == "SharedRan"][:4]  # of the first of two runs
    assert told == [(t.end, ("SharedRan", 0, t.layer, t.mb, "gpu0")) for t in records.tasks if t.kind == "shared"]
    assert told[:2] == [(250, ("SharedRan", 0, 0, 0, "gpu0")), (500, ("SharedRan", 0, 0, 1, "gpu0"))]


def test_rule_3_shared_experts_elsewhere_delay_only_the_end_of_the_layer() -> None:
    # gpu0       |DDDDD|00000|11111|                 |DDDDD
    # gpu0->cpu0 |     |i
    # cpu0       |      |sssssssssssssssss 500|
    # cpu0->gpu0 |                            |o
    #            0    100 120                620 640
    model = tiny_model(n_shared=1, shared_intermediate=10)
    parts = {("shared", 0): "cpu0"}
    records = play(Script(copies=ALL, parts=parts, routed=on_gpu), ONE, model=model)
    assert (120, 620, "cpu0", "shared") in tasks(records)
    assert crossings(records) == [(100, 120, "gpu0->cpu0", "in", 1), (620, 640, "cpu0->gpu0", "out", 1)]
    assert [(x.begin, x.end) for x in records.layers] == [(0, 640), (640, 990)]


def test_rule_3_embedding_leading_layers_and_head_are_tasks_of_the_step() -> None:
    # gpu0 |e 30|leading 200 + attention 60|D...600 ns of layers...|head 70|      and the same again
    model = tiny_model(n_dense_layers=1, dense_intermediate=10)
    toy = machine({"gpu0": gpu(embedding_ns=30, leading_ns=200, head_ns=70), "cpu0": cpu()})
    work = workload([[[[0, 1], [2, 3]]] * 2])
    records = play(Script(copies=ALL, routed=on_gpu), work, toy, model=model)
    kinds = [t for t in tasks(records) if t[3] in ("embedding", "leading", "head")]
    assert kinds == [
        (0, 30, "gpu0", "embedding"), (30, 290, "gpu0", "leading"), (890, 960, "gpu0", "head"),
        (960, 990, "gpu0", "embedding"), (990, 1250, "gpu0", "leading"), (1850, 1920, "gpu0", "head"),
    ]  # fmt: skip
    assert [(s.begin, s.end) for s in records.steps] == [(0, 960), (960, 1920)]
    assert all(t.layer == -1 for t in records.tasks if t.kind in ("embedding", "leading", "head"))


def test_rule_3_the_head_runs_for_the_sequences_that_produce_a_token() -> None:
    # Two prompts of two rows in chunks of two rows: the first step ends one prompt, the second the other.
    rows = [[[0, 1], [2, 3]]] * 2
    work = workload([rows, rows], prompt=2, prefill_chunk=2)
    toy = machine({"gpu0": gpu(head_ns=70), "cpu0": cpu()})
    records = play(Script(copies=ALL, routed=on_gpu), work, toy)
    assert [t.rows for t in records.tasks if t.kind == "head"] == [1, 1]
    whole = workload([[[[0, 1], [2, 3]]] * 4], prompt=4, prefill_chunk=2)
    records = play(Script(copies=ALL, routed=on_gpu), whole, toy)
    assert [(t.start, t.rows) for t in records.tasks if t.kind == "head"] == [(1200, 1)]  # after the last chunk only


# ---------------------------------------------------------------------------------------------------------- 4: devices


def test_rule_4_a_device_skips_what_is_not_ready() -> None:
    # cpu0->gpu0 |     |0/0 1000 ns ............|
    # gpu0       |DDDDD|11111|                  |00000|     Run(0) was submitted before Run(1)
    #            0    100   200               1100  1200
    script = {("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0, 1], "gpu0")]}
    records = play(Script(script, copies=[Copy(0, [1], "gpu0"), ALL[1]], routed=on_gpu), ONE)
    assert tasks(records)[1:3] == [(100, 200, "gpu0", "E1x1"), (1100, 1200, "gpu0", "E0x1")]
    late = records.tasks[2]
    assert (late.submitted, late.ready) == (100, 1100)


def test_rule_4_a_prediction_on_the_main_lane_goes_ahead_of_queued_runs() -> None:
    # gpu0 |DDDDD|P|00000|11111|      returned together: P, 20 ns, is first though it was returned last
    on = {("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Predict(0, 1, "told", "gpu0")]}
    toy = machine({"gpu0": gpu(predict={"told": 20}), "cpu0": cpu()})
    script = Script(on, copies=ALL, routed=on_gpu, hear=["Predicted"])
    records = play(script, ONE, toy, predictors={"told": Oracle(None)})
    assert tasks(records)[1:4] == [(100, 120, "gpu0", "predict"), (120, 220, "gpu0", "E0x1"), (220, 320, "gpu0", "E1x1")]


@pytest.mark.parametrize(("message", "ahead_of"), [(50, 1), (100, 1), (101, 2), (200, 2)])
def test_rule_4_a_prediction_goes_behind_what_runs_also_in_a_chain(message: int, ahead_of: int) -> None:
    # A message arrives at 150, 200, 201 or 300, and its answer is a prediction.
    # gpu0 |DDDDD|00000|P|11111|22222|33333|    at 150, and at 200, when 1 has not started yet
    # gpu0 |DDDDD|00000|11111|P|22222|33333|    at 201, and at 300
    work = workload([[[[0, 1], [2, 3]]], [[[2, 3], [2, 3]]]])
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1, 2, 3], "gpu0"), Send(message, "cpu0", "gpu0", "now")],
        ("Sent", "now"): [Predict(0, 1, "told", "gpu0")],
    }
    toy = machine({"gpu0": gpu(predict={"told": 20}), "cpu0": cpu()})
    records = play(Script(script, copies=ALL, routed=on_gpu), work, toy, predictors={"told": Oracle(None)})
    names = [t[3] for t in tasks(records)[1:6]]
    expected = ["E0x1", "E1x1", "E2x1", "E3x1"]
    assert names == [*expected[:ahead_of], "predict", *expected[ahead_of:]]
    assert records.tasks[1 + ahead_of][:2] == (100 + 100 * ahead_of, 120 + 100 * ahead_of)


def test_rule_4_a_waiting_prediction_that_wakes_goes_ahead_of_a_chain() -> None:
    # The dense part is on the CPU, and there are two micro-batches of two rows, which cross in 30. The first runs
    # 0, 1, 2, 3 on gpu0. A prediction is asked for at 330; it needs all of the layer, which is routed at 430.
    # cpu0 |h |D(mb0) 200|D(mb1) 200|
    # gpu0               |in|00000|11111|P|22222|33333|
    #      0  30        230 260   360   460   580   680
    work = workload([[[[0, 1], [2, 3]]], [[[2, 3], [2, 3]]], [[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]]], micro_batches=2)
    parts = {(part, 0): "cpu0" for part in ("attention", "dense")}
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1, 2, 3], "gpu0"), Send(100, "cpu0", "gpu0", "now")],
        ("Sent", "now"): [Predict(0, 1, "told", "gpu0")],
    }
    toy = machine({"gpu0": gpu(predict={"told": 20}), "cpu0": cpu()})
    records = play(Script(script, copies=ALL, parts=parts, routed=on_gpu), work, toy, predictors={"told": Oracle(1)})
    assert [t for t in tasks(records) if t[2] == "gpu0"][:5] == [
        (260, 360, "gpu0", "E0x1"), (360, 460, "gpu0", "E1x1"), (460, 480, "gpu0", "predict"),
        (480, 580, "gpu0", "E2x1"), (580, 680, "gpu0", "E3x1"),
    ]  # fmt: skip


def test_rule_4_the_side_lane_runs_beside_the_main_one_at_its_measured_rate() -> None:
    # gpu0  |DDDDD|000000 120|11111|    0 at 0.8 while P runs: 80 of 100 by 200, the rest by 220
    # gpu0* |     |PPPPP|               50 ns of work at rate 0.5
    #       0    100   200 220    320
    pairs = [pair("gpu0.experts", "gpu0.side", 0.8, 0.5)]
    toy = machine({"gpu0": gpu(predict={"told": 50}), "cpu0": cpu()}, contention=pairs)
    script = {("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Predict(0, 1, "told", "gpu0", "side")]}
    records = play(Script(script, copies=ALL, routed=on_gpu, hear=["Predicted"]), ONE, toy, predictors={"told": Oracle(1)})
    assert tasks(records)[1:4] == [(100, 200, "gpu0*", "predict"), (100, 220, "gpu0", "E0x1"), (220, 320, "gpu0", "E1x1")]


@pytest.mark.parametrize("when", [("LayerBegin", 0, 0), ("Routed", 0, 0, 0), ("LayerEnd", 0, 0)])
def test_rule_4_a_prediction_waits_for_the_state_it_needs_and_no_longer(when: tuple[Any, ...]) -> None:
    # The state of layer 0 exists from 100 on, also between two layers (at LayerEnd, 300).
    toy = machine({"gpu0": gpu(), "cpu0": cpu(predict={"told": 10})})
    actions = [Predict(0, 1, "told", "cpu0")]
    script = Script(
        {when: [Run(0, [0, 1], "gpu0"), *actions] if when[0] == "Routed" else actions},
        copies=ALL, routed=on_gpu, hear=["Predicted"],
    )  # fmt: skip
    play(script, ONE, toy, predictors={"told": Oracle(1)})
    told = [now for now, key in script.log if key[0] == "Predicted"]
    assert told == [310 if when[0] == "LayerEnd" else 110]


# ------------------------------------------------------------------------------------------------------------ 5: links


def test_rule_5_demand_goes_first_but_what_is_in_flight_completes() -> None:
    # cpu0->gpu0 |1/0 prefetch|0/0 demand|1/1 prefetch|     submitted at 0, 100, 0
    #            0          1000       2000         3000
    script = {
        ("LayerBegin", 0, 0): [Fetch(1, [0, 1], "gpu0", PREFETCH)],
        ("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0, 1], "gpu0")],
        ("Routed", 0, 1, 0): [Run(1, [0, 1], "gpu0")],
    }
    work = workload([[[[0, 1], [0, 1]]]])
    records = play(Script(script, copies=[Copy(0, [1], "gpu0")]), work)
    assert transfers(records) == [
        (0, 1000, "cpu0->gpu0", "prefetch 1/0"),
        (1000, 2000, "cpu0->gpu0", "demand 0/0"),
        (2000, 3000, "cpu0->gpu0", "prefetch 1/1"),
    ]
    assert records.makespan_ns == 3100


@pytest.mark.parametrize(("repeat", "order"), [(DEMAND, [0, 2, 1]), (PREFETCH, [0, 1, 2]), (UPDATE, [0, 1, 2])])
def test_rule_5_a_repeat_may_only_lower_the_urgency(repeat: int, order: list[int]) -> None:
    script = {
        ("LayerBegin", 0, 0): [Fetch(1, [0, 1, 2], "gpu0", PREFETCH)],
        ("Routed", 0, 0, 0): [Fetch(1, [2], "gpu0", repeat), Run(0, [0, 1], "gpu0")],
    }
    work = workload([[[[0, 1], [1, 2]]]])
    records = play(Script(script, copies=[ALL[0]], routed=on_gpu), work)
    assert [t.expert for t in records.transfers] == order
    assert [t.end for t in records.transfers] == [1000, 2000, 3000]
    assert [t.cause for t in records.transfers if t.expert == 2] == ["demand" if repeat == DEMAND else "prefetch"]


def test_rule_5_chunks_let_a_demand_fetch_in_and_each_pays_the_latency() -> None:
    # chunks of 400 bytes and a latency of 10: 410, 410, 210
    # cpu0->gpu0 |1/0 a|0/0 a|0/0 b|0/0 c|1/0 b|1/0 c|      0/0 is wanted from 100 on
    #            0    410   820  1230  1440  1850  2060
    toy = machine(links={"cpu0->gpu0": link(latency_ns=10), "gpu0->cpu0": link()})
    script = {
        ("LayerBegin", 0, 0): [Fetch(1, [0], "gpu0", PREFETCH)],
        ("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0, 1], "gpu0")],
    }
    work = workload([[[[0, 1], [0, 1]]]])
    records = play(Script(script, copies=[Copy(0, [1], "gpu0"), Copy(1, [1], "gpu0")], routed=on_gpu), work, toy,
                   chunk_bytes=400)  # fmt: skip
    assert [(t.start, t.end, t.layer, t.n_bytes, t.last) for t in records.transfers] == [
        (0, 410, 1, 400, False), (410, 820, 0, 400, False), (820, 1230, 0, 400, False), (1230, 1440, 0, 200, True),
        (1440, 1850, 1, 400, False), (1850, 2060, 1, 200, True),
    ]  # fmt: skip
    assert len({t.fetch for t in records.transfers}) == 2


def _two_gpus(**links: Any) -> Any:
    names = ("cpu0->gpu0", "gpu0->cpu0", "cpu0->gpu1", "gpu1->cpu0", "gpu0->gpu1", "gpu1->gpu0")
    return machine({"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu()}, {n: links[n] for n in names if n in links})


POOLS = [Pool("gpu0", "cache", 8000), Pool("gpu1", "cache", 8000)]


def test_rule_5_links_of_one_medium_are_serial_together() -> None:
    # cpu0->gpu0 |0/0       |          |0/1      |      one root complex
    # cpu0->gpu1 |          |1/0 demand|               1/1 (prefetch) comes last
    #            100      1100       2100      3100
    root = link(medium="root")
    toy = _two_gpus(**{"cpu0->gpu0": root, "cpu0->gpu1": root, "gpu0->cpu0": link(), "gpu1->cpu0": link()})
    script = {
        ("Routed", 0, 0, 0): [
            Fetch(1, [1], "gpu1", PREFETCH), Fetch(0, [0], "gpu0"), Fetch(1, [0], "gpu1"), Fetch(0, [1], "gpu0"),
            Run(0, [0, 1], "gpu0"),
        ],
        ("Routed", 0, 1, 0): [Run(1, [0, 1], "gpu1")],
    }  # fmt: skip
    work = workload([[[[0, 1], [0, 1]]]])
    records = play(Script(script, pools=POOLS), work, toy)
    assert transfers(records) == [
        (100, 1100, "cpu0->gpu0", "demand 0/0"), (1100, 2100, "cpu0->gpu1", "demand 1/0"),
        (2100, 3100, "cpu0->gpu0", "demand 0/1"), (3100, 4100, "cpu0->gpu1", "prefetch 1/1"),
    ]  # fmt: skip


def test_rule_5_no_victim_is_asked_for_a_transfer_that_another_link_of_the_medium_precedes() -> None:
    root = link(medium="root")
    toy = _two_gpus(**{"cpu0->gpu0": root, "cpu0->gpu1": root, "gpu0->cpu0": link(), "gpu1->cpu0": link()})

    script = Script(
        {
            ("LayerBegin", 0, 0): [Fetch(1, [0], "gpu0", PREFETCH), Fetch(1, [1], "gpu1", DEMAND)],
            ("Routed", 0, 1, 0): [Run(1, [0], "gpu0"), Run(1, [1], "gpu1")],
        },
        copies=[Copy(0, [0, 1], "gpu0")], pools=[Pool("gpu0", "cache", 2000), Pool("gpu1", "cache", 2000)],
        routed=on_gpu, evict=idle,
    )  # fmt: skip
    records = play(script, workload([[[[0, 1], [0, 1]]]]), toy)
    assert transfers(records)[0] == (0, 1000, "cpu0->gpu1", "demand 1/1")
    assert script.asked == [(1000, 1, 0, PREFETCH)]  # gpu0 was full at 0 too, but its turn came at 1000
    assert [(e.time, e.expert) for e in records.evictions] == [(1000, 0)]


def test_rule_5_the_source_is_the_nearest_copy_then_the_first_by_name() -> None:
    near = {"cpu0->gpu1": link(), "gpu1->cpu0": link(), "gpu1->gpu0": link(4), "gpu0->gpu1": link()}  # no cpu0->gpu0
    both_ways = near | {"cpu0->gpu0": link(2), "gpu0->cpu0": link()}

    def first(links: dict[str, Any], copies: list[Copy], source: str | None = None) -> str:
        script = {("Routed", 0, 0, 0): [Fetch(0, [0, 1], "gpu0", source=source), Run(0, [0, 1], "gpu0")]}
        records = play(Script(script, copies=[*copies, ALL[1]], pools=POOLS, routed=on_gpu), ONE, _two_gpus(**links))
        return records.transfers[0].link

    there = [Copy(0, [0, 1], "gpu1")]
    assert first(near, there) == "gpu1->gpu0"  # one hop, against two from cpu0
    assert first(near, []) == "cpu0->gpu1"  # the only copy, over gpu1
    assert first(both_ways, there) == "cpu0->gpu0"  # one hop each: by name, though gpu1 is faster
    assert first(both_ways, there, "gpu1") == "gpu1->gpu0"


def test_rule_5_several_hops_store_and_forward_and_hold_memory_at_each() -> None:
    # cpu0->gpu1 |     |0/0       |0/1       |
    # gpu1->gpu0 |                |0/0       |0/1       |
    #            0    100       1100       2100       3100      on gpu1: 1000 from 100, 2000 from 1100, 1000 from 2100
    toy = _two_gpus(**{n: link() for n in ("cpu0->gpu1", "gpu1->cpu0", "gpu1->gpu0", "gpu0->gpu1")})
    records = play(Script({("Routed", 0, 0, 0): on_demand}, copies=[ALL[1]], pools=POOLS[:1], routed=on_gpu), ONE, toy)
    assert transfers(records) == [
        (100, 1100, "cpu0->gpu1", "demand 0/0"), (1100, 2100, "cpu0->gpu1", "demand 0/1"),
        (1100, 2100, "gpu1->gpu0", "demand 0/0"), (2100, 3100, "gpu1->gpu0", "demand 0/1"),
    ]  # fmt: skip
    assert [t.last for t in records.transfers] == [False, False, True, True]
    assert [(m.time, m.n_bytes) for m in records.memory if m.device == "gpu1"] == [
        (100, 1000), (1100, 2000), (2100, 1000), (3100, 0)
    ]  # fmt: skip
    level = [m.n_bytes for m in records.memory if m.device == "gpu0" and m.time == 0][-1]
    assert [(m.time, m.n_bytes - level) for m in records.memory if m.device == "gpu0" and m.time > 0] == [
        (1100, 1000), (2100, 2000)
    ]  # fmt: skip


def test_rule_5_a_hop_waits_for_memory_that_nobody_claims() -> None:
    # gpu1 has 1000 bytes to spare beside its empty pool: one copy in transit at a time.
    # cpu0->gpu1 |     |0/0       |          |0/1       |
    # gpu1->gpu0 |                |0/0       |          |0/1      |
    devices = {"gpu0": gpu(), "gpu1": gpu(memory=5000), "cpu0": cpu()}
    names = ("cpu0->gpu1", "gpu1->cpu0", "gpu1->gpu0", "gpu0->gpu1")
    toy = machine(devices, {n: link() for n in names})
    pools = [POOLS[0], Pool("gpu1", "cache", 4000)]
    records = play(Script({("Routed", 0, 0, 0): on_demand}, copies=[ALL[1]], pools=pools, routed=on_gpu), ONE, toy)
    assert [t[:3] for t in transfers(records)] == [
        (100, 1100, "cpu0->gpu1"), (1100, 2100, "gpu1->gpu0"), (2100, 3100, "cpu0->gpu1"), (3100, 4100, "gpu1->gpu0")
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- 6: memory


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
    kv = 2 * 4 * model.kv_bytes_per_token_per_layer
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


def test_rule_6_pins_on_the_backing_device_are_of_the_copy_that_is_read() -> None:
    seen = []

    def look(event: Any, view: Any) -> list[Any]:
        seen.append([view.is_in_use(0, e, "cpu0") for e in range(4)])
        return []

    script = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [1], "gpu0")], ("Ran", 0, 0, 1, "gpu0"): look}
    play(Script(script, copies=ALL, routed=on_gpu), ONE)
    assert seen == [[True, False, False, False]]


# ------------------------------------------------------------------------------------------------- 7: Run never loads


def test_rule_7_run_never_loads() -> None:
    with pytest.raises(PolicyError) as error:
        play(Script(routed=on_gpu), ONE, name="lru")
    assert str(error.value) == (
        "t=100 ns, step 0, layer 0: Run(L0/E0, gpu0): not resident and no fetch pending; return Fetch(L0/E0, gpu0) before it "
        "[policy=lru]"
    )


# ------------------------------------------------------------------------------------------------------ 8: activations


def test_rule_8_a_group_crosses_once_for_the_union_of_its_rows() -> None:
    # Rows 0 -> 0, 1 and 1 -> 1, 2. On the CPU: 0 and 1, of rows 0 and 1; on the GPU: 2.
    # gpu0->cpu0 |     |in 30|                                          10 + 2 x 10
    # cpu0       |           |0 400     |1 500 (two rows) |
    # cpu0->gpu0 |                                        |out 30|
    #            0    100   130        530              1030   1060
    script = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [2], "gpu0"), Run(0, [1], "cpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), TWO)
    assert crossings(records) == [(100, 130, "gpu0->cpu0", "in", 2), (1030, 1060, "cpu0->gpu0", "out", 2)]
    assert [t for t in tasks(records) if t[2] == "cpu0"] == [(130, 530, "cpu0", "E0x1"), (530, 1030, "cpu0", "E1x2")]
    assert records.layers[0].end == 1060
    assert [a.n_bytes for a in records.activations] == [20, 20]


def test_rule_8_runs_returned_apart_cross_apart_and_queue_on_the_control_lane() -> None:
    # Both answers come at 100 ns: Routed, and a message that has arrived. 0: rows {0}; 1: rows {0, 1}.
    # gpu0->cpu0 |     |in 20|in 30|
    script = {
        ("LayerBegin", 0, 0): [Send(100, "cpu0", "gpu0", "m")],
        ("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [2], "gpu0"), Send(5, "cpu0", "gpu0", "n")],
        ("Sent", "n"): [Run(0, [1], "cpu0")],
    }
    records = play(Script(script, copies=ALL, routed=on_gpu), TWO)
    assert crossings(records)[:2] == [(100, 120, "gpu0->cpu0", "in", 1), (120, 150, "gpu0->cpu0", "in", 2)]


def test_rule_8_the_first_expert_of_a_group_pays_the_extra() -> None:
    # cpu0 |0 400 + 35|1 500|
    toy = machine({"gpu0": gpu(), "cpu0": cpu(first_extra_ns=35)})
    script = {("Routed", 0, 0, 0): [Run(0, [0, 1], "cpu0"), Run(0, [2], "gpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), TWO, toy)
    assert [t for t in tasks(records) if t[2] == "cpu0"] == [(130, 565, "cpu0", "E0x1"), (565, 1065, "cpu0", "E1x2")]


def test_rule_8_share_link_queues_activations_behind_weights() -> None:
    # cpu0->gpu0 |     |1/0 prefetch 1000    |out 20|1/1 ...    the outputs wait for what is in flight, not for 1/1
    # cpu0       |      |0 400   |
    #            0    100 120   520        1100   1120
    shared = machine(links={"cpu0->gpu0": link(share_link=True, latency_ns=7, act_latency_ns=10), "gpu0->cpu0": link()})
    script = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [1], "gpu0"), Fetch(1, [0, 1], "gpu0", PREFETCH)]}
    records = play(Script(script, copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu), ONE, shared)
    moved = [t[:3] for t in records.transfers]
    assert moved == [(100, 1107, "cpu0->gpu0"), (1107, 1127, "cpu0->gpu0")]  # the run is over before 1/1 arrives
    assert records.transfers[1].cause == "activation" and records.transfers[1].n_bytes == 10
    assert records.layers[0].end == 1127


# ------------------------------------------------------------------------------------------------------- 9: contention


def test_rule_9_overlapping_activities_slow_each_other_down_and_work_is_conserved() -> None:
    # CPU experts at 0.5 and the link at 0.8 while both go on:
    # cpu0->gpu0 |20 of 1000 alone|640 at 0.8 until 920        |340 alone |
    # cpu0                        |1: 400 at 0.5               |
    #           100              120                          920       1260
    toy = machine(contention=[pair("cpu0.experts", "cpu0->gpu0", 0.5, 0.8)])
    script = {("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0], "gpu0"), Run(0, [1], "cpu0")]}
    records = play(Script(script, copies=[ALL[1]], routed=on_gpu), ONE, toy)
    assert transfers(records) == [(100, 1260, "cpu0->gpu0", "demand 0/0")]
    assert tasks(records)[1:3] == [(120, 920, "cpu0", "E1x1"), (1260, 1360, "gpu0", "E0x1")]
    assert records.tasks[1].work == 400


@pytest.mark.parametrize(
    ("base", "cpu_end", "link_end"),
    [
        (0, 1750, 1206),  # 400 of 1600 ns are reading: at half the rate it still hides. The link: 50 + 950 / (1 - 0.2 * 0.5)
        (300, 950, 1260),  # 400 of 700: reading at half the rate takes 800, drawing all it can; 50 + 800 * 0.8 + 310
    ],
)
def test_rule_9_an_expert_of_many_rows_is_slowed_only_where_reading_its_weights_takes_longer(
    base: int, cpu_end: int, link_end: int
) -> None:
    per_row = 400 if base == 0 else 100
    toy = machine(
        {"gpu0": gpu(), "cpu0": cpu(expert_ns=base, per_row_ns=per_row)},
        contention=[pair("cpu0.experts", "cpu0->gpu0", 0.5, 0.8)],
    )
    script = {("Routed", 0, 0, 0): [Fetch(0, [0], "gpu0"), Run(0, [0], "gpu0"), Run(0, [1], "cpu0")]}
    four = workload([[[[0, 1], [2, 3]]]] * 4)
    records = play(Script(script, copies=[ALL[1]], routed=on_gpu), four, toy)
    assert transfers(records)[0][1] == link_end
    assert (150, cpu_end, "cpu0", "E1x4") in tasks(records)


def test_rule_9_with_several_overlaps_the_smallest_rate_counts() -> None:
    # cpu0->gpu0 |1/0 1000    |            slows CPU experts to 0.5
    # gpu0->cpu0 |1/3 back 500|            at 2 bytes/ns; slows them to 0.25
    # cpu0        |0: 120-600: 120 of 400; 600-1100: 250; then 30 alone: 1130|
    pairs = [pair("cpu0.experts", "cpu0->gpu0", 0.5, 1.0), pair("cpu0.experts", "gpu0->cpu0", 0.25, 1.0)]
    toy = machine(links={"cpu0->gpu0": link(), "gpu0->cpu0": link(2)}, contention=pairs)
    script = {
        ("Routed", 0, 0, 0): [
            Run(0, [0], "cpu0"), Run(0, [1], "gpu0"), Fetch(1, [0], "gpu0", PREFETCH), Fetch(1, [3], "cpu0", UPDATE),
        ]
    }  # fmt: skip
    records = play(Script(script, copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu), ONE, toy)
    assert transfers(records) == [(100, 600, "gpu0->cpu0", "write-back 1/3"), (100, 1100, "cpu0->gpu0", "prefetch 1/0")]
    assert (120, 1130, "cpu0", "E0x1") in tasks(records)


def test_rule_9_rates_are_parts_per_million_and_completions_round_up() -> None:
    # 400 ns at 333333 ppm: 1200.0012 ns, so 1201.
    toy = machine(contention=[pair("cpu0.experts", "cpu0->gpu0", 1 / 3, 1.0)])
    script = {("Routed", 0, 0, 0): [Run(0, [0], "cpu0"), Run(0, [1], "gpu0"), Fetch(1, [0, 1], "gpu0", PREFETCH)]}
    records = play(Script(script, copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu), ONE, toy)
    assert (120, 1321, "cpu0", "E0x1") in tasks(records)


# --------------------------------------------------------------------------------------------------------- 10: deadlock


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (Script(hear=["Routed"]), ["layer 0 has 2 unserved slots of experts [0, 1]: no Run or Skip names them"]),
        (
            Script({("Routed", 0, 0, 0): on_demand}, copies=[Copy(1, [0], "gpu0")], slots=1),
            [
                "Fetch(L0/E0, gpu0, urgency=0) waits for memory in pool 'cache' (1 kB of 1 kB used, evict returned None)",
                "Run(L0/E0, gpu0) waits for its fetch",
            ],
        ),
        (
            Script({("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Run(1, [3], "cpu0", [0])], ("Routed", 0, 1, 0): []}, copies=ALL,
                   exact=False),
            ["layer 1 has 1 unserved slots of experts [2]"],
        ),
    ],
)  # fmt: skip
def test_rule_10_a_deadlock_says_who_waits_for_what(script: Script, says: list[str]) -> None:
    with pytest.raises(DeadlockError) as error:
        play(script, ONE, name="lazy")
    message = str(error.value)
    assert message.startswith("t=") and "nothing can happen and work remains" in message
    assert message.endswith("[policy=lazy]") and "\n" not in message
    for part in says:
        assert part in message


# ----------------------------------------------------------------------------------------------------------- settlement


def _inexact(on: dict[Any, Any], work: Any = ONE, **more: Any) -> Any:
    return play(Script(on, copies=ALL, routed=on_gpu, exact=False, **more), work)


def test_settlement_fresh_rows_leave_no_record() -> None:
    # Expert 1 serves both rows, one on each device.
    script = {("Routed", 0, 0, 0): [Run(0, [0, 2], "gpu0"), Run(0, [1], "cpu0", [1]), Run(0, [1], "gpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), TWO)
    assert records.inexact == []
    assert [t.rows for t in records.tasks if t.expert == 1] == [1, 1]


def test_settlement_a_substitute_takes_the_next_open_slot_in_rank_order() -> None:
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(0, [3], "gpu0", [0])]}
    records = _inexact(script)
    assert records.inexact == [InexactRecord(0, 0, "substituted", 1, 0.25)]  # the slot of expert 1
    assert records.steps[0].gate_mass == 2.0
    records = _inexact({("Routed", 0, 0, 0): [Run(0, [3, 2], "gpu0", [0])]})
    assert records.inexact == [InexactRecord(0, 0, "substituted", 2, 1.0)]


def test_settlement_stale_runs_start_early_and_delay_only_their_own_layer() -> None:
    # Expert 2 of layer 1 for row 0, on the state of layer 0, from 100 on:
    # gpu0       |DDDDD|00000|11111|DDDDD|33333|       layer 0 ends at 300
    # cpu0       |      |2: 400          |
    # cpu0->gpu0 |                             |out      layer 1 ends at 540
    #            0    100   200   300   400   500 520 540
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Run(1, [2], "cpu0", [0], inputs_from=0)],
        ("Routed", 0, 1, 0): [Run(1, [3], "gpu0")],
    }
    records = _inexact(script)
    assert crossings(records) == [(100, 120, "gpu0->cpu0", "in", 1), (520, 540, "cpu0->gpu0", "out", 1)]
    assert [(x.begin, x.end) for x in records.layers] == [(0, 300), (300, 540)]
    assert records.inexact == [InexactRecord(0, 1, "stale", 1, 0.75)]


def test_settlement_a_stale_run_at_the_end_of_the_layer_before() -> None:
    # At LayerEnd(0) the state of layer 0 is there: nothing to wait for.
    script = {
        ("LayerEnd", 0, 0): [Run(1, [2], "cpu0", [0], inputs_from=0)],
        ("Routed", 0, 1, 0): [Run(1, [3], "gpu0")],
    }
    records = _inexact(script)
    assert (320, 720, "cpu0", "E2x1") in tasks(records)
    assert records.makespan_ns == 740


def test_settlement_stale_and_not_routed() -> None:
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0"), Run(1, [1], "cpu0", [0], inputs_from=0)],
        ("Routed", 0, 1, 0): [Run(1, [2], "gpu0")],
    }
    assert _inexact(script).inexact == [InexactRecord(0, 1, "substituted-stale", 1, 0.25)]


def test_settlement_an_early_run_on_its_own_layers_state_is_fresh() -> None:
    # Asked for at 0, before layer 0 is routed; its inputs are there at 100.
    script = {("LayerBegin", 0, 0): [Run(0, [1], "gpu0", [0])], ("Routed", 0, 0, 0): [Run(0, [0], "gpu0")]}
    records = play(Script(script, copies=ALL, routed=on_gpu), ONE)
    assert tasks(records)[1:3] == [(100, 200, "gpu0", "E1x1"), (200, 300, "gpu0", "E0x1")]
    assert records.inexact == []


def test_settlement_fresh_and_stale_runs_of_one_answer_cross_apart() -> None:
    # Both on the CPU at Routed(1): 2 reads layer 0's state, 3 its own.
    script = {("Routed", 0, 1, 0): [Run(1, [2], "cpu0", [0], inputs_from=0), Run(1, [3], "cpu0")]}
    records = _inexact(script)
    assert [c[3:] for c in crossings(records)] == [("in", 1), ("in", 1), ("out", 1), ("out", 1)]
    same = {("Routed", 0, 1, 0): [Run(1, [2], "cpu0", [0], inputs_from=1), Run(1, [3], "cpu0")]}
    assert [c[3:] for c in crossings(_inexact(same))] == [("in", 1), ("out", 1)]


def test_settlement_skip() -> None:
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Skip(0, [1])]}
    records = _inexact(script)
    assert records.inexact == [InexactRecord(0, 0, "skipped", 1, 0.25)]
    assert records.layers[0].end == 200
    one_row = {("Routed", 0, 0, 0): [Skip(0, [1], [1]), Run(0, [0, 1, 2], "gpu0")]}
    records = _inexact(one_row, TWO)
    assert records.inexact == [InexactRecord(0, 0, "skipped", 1, 0.75)]
    assert [t.rows for t in records.tasks if t.layer == 0 and t.expert == 1] == [1]


def test_settlement_rows_none_after_rows_marks_the_rest() -> None:
    # Row 0: 0 by rows, 1 by rows=None: no slot is left for 3.
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0", [0]), Run(0, [1], "gpu0"), Run(0, [3], "gpu0", [0])]}
    with pytest.raises(PolicyError, match=r"Run\(E3\) for row 0: every slot of that row is served already"):
        _inexact(script)


def test_settlement_with_micro_batches_keeps_what_earlier_ones_took() -> None:
    # Both micro-batches use expert 1; skipping it in the second leaves the first's run alone.
    work = workload([[[[0, 1], [2, 3]]], [[[2, 1], [2, 3]]]], micro_batches=2)
    script = {
        ("Routed", 0, 0, 0): [Run(0, [0, 1], "gpu0")],
        ("Routed", 0, 0, 1): [Run(0, [2], "gpu0"), Skip(0, [1])],
    }
    records = _inexact(script, work)
    assert records.inexact == [InexactRecord(0, 0, "skipped", 1, 0.25)]


def test_settlement_rows_may_be_numpy_integers() -> None:
    n = 70  # beyond 63 bits
    work = workload([[[[0, 1], [2, 3]]]] * n)
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(0, [1], "cpu0", np.arange(n))]}
    records = play(Script(script, copies=ALL, routed=on_gpu), work)
    assert [c[4] for c in crossings(records)] == [n, n]


@pytest.mark.parametrize(
    ("actions", "kinds"),
    [
        ([Run(0, [0], "gpu0"), Run(0, [3], "gpu0", [0])], "1 substituted"),
        ([Run(0, [0], "gpu0"), Skip(0, [1])], "1 skipped"),
    ],
)
def test_settlement_an_exact_policy_must_be_exact(actions: list[Any], kinds: str) -> None:
    with pytest.raises(PolicyError) as error:
        play(Script({("Routed", 0, 0, 0): actions}, copies=ALL, routed=on_gpu), ONE, name="liar")
    assert "step 0, layer 0" in str(error.value) and kinds in str(error.value) and "[policy=liar]" in str(error.value)


# ------------------------------------------------------------------------------------------------------- empty actions

EMPTY = {
    "run on the CPU": Run(0, [], "cpu0"),
    "run on the GPU": Run(0, [], "gpu0"),
    "run of no rows": Run(0, [0], "cpu0", []),
    "run of a later layer": Run(1, (), "cpu0", [0], inputs_from=0),
    "run of NumPy's nothing": Run(0, np.array([], dtype=np.int64), "cpu0", np.array([], dtype=np.int64)),
    "run elsewhere": Run(7, [], "tpu"),
    "fetch": Fetch(1, [], "gpu0"),
    "fetch from nowhere": Fetch(0, [], "gpu9", pool="other", source="disk"),
    "drop": Drop(0, (), "gpu0"),
    "drop on the backing device": Drop(0, [], "cpu0"),
    "move": Move(0, [], "gpu0", "cache"),
    "move elsewhere": Move(0, [], "gpu0", "other"),
    "skip": Skip(0, []),
    "skip of no rows": Skip(0, [0], []),
    "skip of a later layer": Skip(1, []),
}


def test_every_kind_of_action_about_experts_is_tried_empty() -> None:
    tried = {type(action) for action in EMPTY.values()}
    assert tried == {kind for kind in get_args(Action) if "experts" in kind._fields}


@pytest.mark.parametrize("where", ["before", "after", "alone"])
@pytest.mark.parametrize("decision_ns", [0, 30])
@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_action_is_ignored(name: str, decision_ns: int, where: str) -> None:
    # One expert of each layer on each device: groups, crossings and copies are what an empty action could disturb.
    def split(event: Routed, view: Any) -> list[Any]:
        first, *rest = event.active
        return [Fetch(event.layer, rest, "gpu0"), Run(event.layer, rest, "gpu0"), Run(event.layer, [first], "cpu0")]

    def script(extra: tuple[Any, ...]) -> Script:
        def routed(event: Routed, view: Any) -> list[Any]:
            real = split(event, view)
            return [*extra, *real] if where == "before" else [*real, *extra] if where == "after" else real

        moments = [("StepBegin", 0), ("LayerBegin", 0, 0), ("LayerEnd", 0, 0), ("LayerBegin", 0, 1), ("StepEnd", 0)]
        moments += [("Fetched", 0, 1, "gpu0"), ("Ran", 0, 0, 0, "cpu0")]
        on = dict.fromkeys(moments, extra) if where == "alone" else {}
        return Script(on, copies=ALL[1:], routed=routed)

    for work in (ONE, TWO, workload([[[[0, 1], [2, 3]]], [[[1, 2], [2, 3]]]], micro_batches=2)):
        without = play(script(()), work, decision_ns=decision_ns)
        assert_same(play(script((EMPTY[name],)), work, decision_ns=decision_ns), without)


# ---------------------------------------------------------------------------------------------- several GPUs and hosts


def test_several_gpus_share_a_layer() -> None:
    # gpu0->gpu1 |     |i
    # gpu0       |DDDDD|00000|
    # gpu1       |      |11111|       resident there
    # gpu1->gpu0 |            |o      the layer ends at 240
    toy = _two_gpus(**{n: link() for n in ("cpu0->gpu0", "gpu0->cpu0", "cpu0->gpu1", "gpu1->cpu0", "gpu0->gpu1", "gpu1->gpu0")})
    script = {("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(0, [1], "gpu1")]}
    records = play(Script(script, copies=[*ALL, Copy(0, [1], "gpu1")], pools=POOLS, routed=on_gpu), ONE, toy)
    assert tasks(records)[1:3] == [(100, 200, "gpu0", "E0x1"), (120, 220, "gpu1", "E1x1")]
    assert crossings(records) == [(100, 120, "gpu0->gpu1", "in", 1), (220, 240, "gpu1->gpu0", "out", 1)]
    assert [(x.begin, x.end) for x in records.layers] == [(0, 240), (240, 540)]
    assert records.lookups[0].hits == (1, 1)


def _two_hosts() -> Any:
    eth = link(0.5, 50, medium="eth", act_bytes_per_ns=0.5, act_latency_ns=50)
    links = {
        "cpu0->gpu0": link(),
        "gpu0->cpu0": link(),
        "cpu1->gpu1": link(),
        "gpu1->cpu1": link(),
        "cpu0->cpu1": eth,
        "cpu1->cpu0": eth,
    }
    devices = {"gpu0": gpu(), "cpu0": cpu(), "gpu1": gpu(host="host1"), "cpu1": cpu(host="host1")}
    return machine(devices, links, backing=("cpu0", "cpu1"))


def test_several_hosts_over_a_network() -> None:
    # in:  gpu0->cpu0 100-120, cpu0->cpu1 (50 + 20) 120-190, cpu1->gpu1 190-210
    # gpu1 loads 1 from its own host: cpu1->gpu1 100-1100, and runs it 1100-1200; out: 1200-1220-1290-1310
    script = {("Routed", 0, 0, 0): [Fetch(0, [1], "gpu1"), Run(0, [0], "gpu0"), Run(0, [1], "gpu1")]}
    records = play(Script(script, copies=ALL, pools=POOLS, routed=on_gpu), ONE, _two_hosts())
    assert transfers(records) == [(100, 1100, "cpu1->gpu1", "demand 0/1")]
    assert crossings(records) == [
        (100, 120, "gpu0->cpu0", "in", 1), (120, 190, "cpu0->cpu1", "in", 1), (190, 210, "cpu1->gpu1", "in", 1),
        (1200, 1220, "gpu1->cpu1", "out", 1), (1220, 1290, "cpu1->cpu0", "out", 1), (1290, 1310, "cpu0->gpu0", "out", 1),
    ]  # fmt: skip
    assert records.layers[0].end == 1310


def test_several_hosts_messages_over_one_network_card_are_serial() -> None:
    # eth: 100 bytes 0 -> 1: 50 + 200 = 250; then 100 bytes back.
    script = Script(
        {("LayerBegin", 0, 0): [Send(100, "cpu0", "cpu1", "there"), Send(100, "cpu1", "cpu0", "back")]},
        copies=ALL, routed=on_gpu, hear=["Sent"],
    )  # fmt: skip
    records = play(script, ONE, _two_hosts())
    assert [t[:3] for t in transfers(records)] == [(0, 250, "cpu0->cpu1"), (250, 500, "cpu1->cpu0")]
    assert [(now, key) for now, key in script.log if key[0] == "Sent"] == [(250, ("Sent", "there")), (500, ("Sent", "back"))]
