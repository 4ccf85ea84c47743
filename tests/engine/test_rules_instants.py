"""Rules 1 and 2: time in whole nanoseconds, the same at each repeat, and the order within one instant.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from typing import Any

import pytest

from moesim.policy import PREFETCH, UPDATE, Copy, Drop, Fetch, Move, Pool, Predict, Routed, Run, Send
from moesim.records import DecisionRecord
from tests.engine.engine_kit import (
    ALL,
    ONE,
    Oracle,
    Script,
    cpu,
    gpu,
    link,
    machine,
    on_demand,
    on_gpu,
    play,
    tasks,
    transfers,
    workload,
)


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


def test_rule_2_copies_that_arrive_as_the_embedding_ends_are_there_when_the_first_layer_begins() -> None:
    # gpu0       |eeeee|DDDDD|00000|11111|...
    # cpu0->gpu0 |P0000|      the copy and the embedding both end at 100
    toy = machine({"gpu0": gpu(embedding_ns=100), "cpu0": cpu()}, {"cpu0->gpu0": link(10), "gpu0->cpu0": link()})
    on = {
        ("StepBegin", 0): [Fetch(0, [0], "gpu0", PREFETCH)],
        ("LayerBegin", 0, 0): [Fetch(0, [0], "gpu0"), Move(0, [0], "gpu0", "cache")],  # it is there: nothing to fetch
        ("Routed", 0, 0, 0): [Fetch(0, [1], "gpu0"), Run(0, [0, 1], "gpu0")],
    }
    script = Script(on, copies=ALL[1:], routed=on_gpu, hear=["Fetched"])
    records = play(script, ONE, toy)
    assert script.log[:3] == [
        (0, ("StepBegin", 0)), (100, ("Fetched", 0, 0, "gpu0")), (100, ("LayerBegin", 0, 0))
    ]  # fmt: skip
    assert [(t.start, t.end, t.expert) for t in records.transfers] == [(0, 100, 0), (200, 300, 1)]


def test_rule_2_copies_that_arrive_as_the_head_ends_are_told_before_the_step_ends() -> None:
    toy = machine({"gpu0": gpu(head_ns=100), "cpu0": cpu()}, {"cpu0->gpu0": link(10), "gpu0->cpu0": link()})
    script = Script({("LayerEnd", 0, 1): [Fetch(0, [3], "gpu0")]}, copies=[Copy(0, range(3), "gpu0"), ALL[1]], routed=on_gpu,
                    hear=["Fetched", "StepEnd"])  # fmt: skip
    records = play(script, ONE, toy)
    assert script.log[-2:] == [(records.makespan_ns, ("Fetched", 0, 3, "gpu0")), (records.makespan_ns, ("StepEnd", 0))]


def test_rule_1_costs_round_once_to_whole_ns() -> None:
    # 1000 bytes at 0.3 bytes/ns are 3333.33 ns: 3334.
    toy = machine(links={"cpu0->gpu0": link(0.3), "gpu0->cpu0": link()})
    records = play(Script({("Routed", 0, 0, 0): on_demand}, copies=ALL[1:], routed=on_gpu), ONE, toy)
    assert transfers(records) == [(100, 3434, "cpu0->gpu0", "demand 0/0"), (3434, 6768, "cpu0->gpu0", "demand 0/1")]


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
    assert fetched([drop, fetch]) == [(0, 600, "cpu0->gpu0", "update 1/0")]  # 1000 ns: on its way when the run is over
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


def test_rule_2_what_happens_while_a_decision_is_taken_is_heard_once_it_has_taken_effect() -> None:
    # gpu0       |DDDDD|dddddddddddddd|00000|11111|    d: decision, 300 ns
    # cpu0->gpu0 |1/0*******|                          it ends at 200, and is heard at 400
    # cpu0       |PPPPPPP|                             a prediction, ready at 150
    script = Script(
        {
            ("LayerBegin", 0, 0): [Fetch(1, [0], "gpu0", PREFETCH), Predict(0, 1, "told", "cpu0")],
            ("Fetched", 1, 0, "gpu0"): [Drop(1, [0], "gpu0")],
        },
        copies=[ALL[0], Copy(1, [2, 3], "gpu0")], routed=on_gpu, hear=["Predicted"],
    )  # fmt: skip
    toy = machine({"gpu0": gpu(), "cpu0": cpu(predict={"told": 150})}, {"cpu0->gpu0": link(5), "gpu0->cpu0": link()})
    records = play(script, ONE, toy, decision_ns=300, predictors={"told": Oracle(None)})
    assert script.log[1:4] == [
        (100, ("Routed", 0, 0, 0)), (400, ("Predicted", 0, 1, 0)), (400, ("Fetched", 1, 0, "gpu0")),
    ]  # fmt: skip
    assert [(e.time, e.layer, e.expert) for e in records.evictions] == [(400, 1, 0)]
    assert tasks(records)[2:4] == [(400, 500, "gpu0", "E0x1"), (500, 600, "gpu0", "E1x1")]


def test_rule_2_micro_batches_are_decided_in_their_order_though_one_is_routed_as_a_decision_ends() -> None:
    # gpu0       |DDDDD|DDDDD|DDDDD|       the third micro-batch is routed at 300
    # decisions        |ddddddddddd|ddddddddddd|ddddddddddd|
    script = Script(copies=ALL, routed=on_gpu)
    play(script, workload([[[[0, 1], [2, 3]]]] * 3, micro_batches=3), decision_ns=200)
    assert script.log[:3] == [(time, ("Routed", 0, 0, mb)) for mb, time in enumerate((100, 300, 500))]


@pytest.mark.parametrize("decision_ns", [0, 30])
def test_rule_2_a_decision_that_drops_and_fetches_a_copy_copies_it_anew(decision_ns: int) -> None:
    # A policy that waits for Fetched before it runs the expert would wait for ever if the copy had just been kept.
    answer = [Drop(0, [1], "gpu0"), Fetch(0, [0, 1], "gpu0"), Run(0, [0], "gpu0")]
    script = Script(
        {("Routed", 0, 0, 0): answer, ("Fetched", 0, 1, "gpu0"): [Run(0, [1], "gpu0")]}, copies=ALL, routed=on_gpu
    )  # fmt: skip
    records = play(script, ONE, decision_ns=decision_ns)
    begin = 100 + decision_ns
    assert transfers(records) == [(begin, begin + 1000, "cpu0->gpu0", "demand 0/1")]


@pytest.mark.parametrize(("where", "gone"), [("gpu0", 700), ("cpu0", 600)])
def test_rule_2_what_was_dropped_before_a_decision_stays_until_it_may_have_run_it(where: str, gone: int) -> None:
    # gpu0       |DDDDD|DDDDD|       |00000|11111|  |11111|22222|     both micro-batches read expert 1; the first answer drops it
    # decisions        |ddddddddddddd|ddddddddddddd|                  nobody reads it from 550 to 600
    first = [Run(0, [0, 1], "gpu0"), Drop(0, [1], "gpu0")]
    second = [Run(0, [1], where), Run(0, [2], "gpu0")]
    script = Script({("Routed", 0, 0, 0): first, ("Routed", 0, 0, 1): second}, copies=ALL, routed=on_gpu)
    both = workload([[[[0, 1], [2, 3]]], [[[1, 2], [2, 3]]]], micro_batches=2)
    records = play(script, both, decision_ns=250)
    runs = [(t.start, t.end, t.expert) for t in records.tasks if t.kind == "expert" and t.layer == 0 and t.device == "gpu0"]
    second_runs = [(600, 700, 1), (700, 800, 2)] if where == "gpu0" else [(600, 700, 2)]
    assert runs == [(350, 450, 0), (450, 550, 1), *second_runs]
    assert [(e.time, e.expert, e.reason) for e in records.evictions] == [(gone, 1, "drop")]
