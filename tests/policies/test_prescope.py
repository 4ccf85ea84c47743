"""PreScope: its plan as a pure function, and whole runs worked out by hand to the nanosecond.

The toy machine of `tests.engine.engine_kit` with a faster link: an expert takes 400 over it, 100 on the GPU,
300 + 100 a row on the CPU; a prediction 10, a dense part 100, rows 10 + 10 each across.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from moesim.engine import EngineOptions, simulate
from moesim.errors import PolicyError
from moesim.hardware.costs import CostModel
from moesim.policies.algorithms.presched import (
    Timing,
    certain_for_cpu,
    cross_layer_plan,
    first_load,
    gpu_queue,
)
from moesim.policies.parts import Plan, Setup
from moesim.policies.parts.prefetch import CrossLayer, Foresight, prefetch_count
from moesim.policies.registry import make_policy
from moesim.policies.systems.prescope import PREDICTOR_BYTES, PreScope, Turns, Visit
from moesim.policy import DEMAND, PREFETCH, Drop, Fetch, Fetched, Predict, Predicted, Ran, Run, StepBegin
from moesim.records import Records
from moesim.testing import FakeView, routed, run_tiny, tiny_model, tiny_workload
from tests.engine import engine_kit as kit

# ------------------------------------------------------------------------------------------------------------ the plan
CPU = [0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]  # beta 1, C 0.5
TIMING = Timing(CPU, 3, 3, 0.5, 1)


def test_the_plan_of_the_worked_example() -> None:
    """E_all = 1c 1n 2c 5n 6c; TG 15.5 12.5 9.5 6.5 3.5, TC 2.5 4 6.5 12 18.5."""
    plan = cross_layer_plan([1, 2, 6], [1, 5], TIMING, lambda rank: 0.34)
    assert (plan.first, plan.gap, plan.queue, plan.n_prefetch) == (2, 1, (1, 1), 1)
    assert plan.share == pytest.approx(2 / 3)
    assert cross_layer_plan([1, 2, 6], [1, 5], TIMING, lambda rank: 0.33).n_prefetch == 0


def test_what_is_under_way_delays_every_load() -> None:
    assert first_load([1, 2, 6], 1, TIMING._replace(in_flight=0.49)) == 2
    plan = cross_layer_plan([1, 2, 6], [1, 5], TIMING._replace(in_flight=0.5), lambda rank: 1)
    assert plan.first == 2, "the passing test is strict, and eq. 2 prefers the load"
    assert plan.gap == 0.5
    assert first_load([1, 2, 6], 1, TIMING._replace(in_flight=0.5), "sentinel") == 3


@pytest.mark.parametrize(("rule", "first"), [("printed", 0), ("sentinel", 1), ("eq2", 0)])
def test_one_expert_never_passes(rule: Any, first: int) -> None:
    """The CPU has nothing else to do; computing 6 tokens takes 6.5, loading them 3.5."""
    assert first_load([6], 1, TIMING, rule) == first


@pytest.mark.parametrize(("rule", "first"), [("printed", 0), ("sentinel", 1), ("eq2", 1)])
def test_none_is_loaded_where_that_is_better_except_as_printed(rule: Any, first: int) -> None:
    assert first_load([2], 0, TIMING, rule) == first
    assert first_load([], 0, TIMING, rule) == 0


def test_a_cpu_slower_than_all_loads_gets_nothing() -> None:
    slow = TIMING._replace(cpu=[0, 100, 200])
    assert [first_load([1, 2], 2, slow, rule) for rule in ("eq2", "printed", "sentinel")] == [0, 1, 1]
    assert [certain_for_cpu([1, 2], slow, rule) for rule in ("eq2", "printed")] == [0, 1]
    assert first_load([1, 2], 1, slow) == 1, "the first is not worth a transfer"


def test_equal_ends_need_no_transfer() -> None:
    assert first_load([3], 1, TIMING) == 1, "3 + 0.5 against 3.5"


def test_the_last_prefetch_needs_a_likely_hit_only_when_rounded_up() -> None:
    assert prefetch_count(1.5, 3, lambda rank: 0.5) == 1, "half up to 2, but a hit is not more likely than not"
    assert prefetch_count(1.5, 3, lambda rank: 0.51) == 2
    assert prefetch_count(1.4, 3, lambda rank: 0.01) == 1
    assert prefetch_count(1.6, 3, [0.0, 0.5].__getitem__) == 2, "the rank of the last one is asked"


def test_the_queue_counts_transfers_of_both_sizes() -> None:
    """TG of 4c, 4n: 2 + 5 + 1 = 8 and 5 + 1 = 6; TC 4, 8."""
    timing = Timing(range(9), load=2, load_next=5, gpu=1, dense=0)
    assert gpu_queue([4], [4], timing) == (0, 1)
    assert gpu_queue([4], [4], timing._replace(load_next=7)) == (0, 0)
    assert cross_layer_plan([4], [4], timing, lambda rank: 1, "sentinel").share == 4 / 5


# ---------------------------------------------------------------------------------------------------------- hit rates
def test_the_hit_rate_of_a_rank_is_the_share_of_its_predictions_that_came_true() -> None:
    """The prior counts for one visit."""
    foresight = Foresight(tiny_model(), prior_hit=0.5)
    for step, (said, experts) in enumerate([([4, 6], [4, 1]), ([5, 2, 0], [0, 5]), ([7], [1, 2])]):
        foresight.step_begin(StepBegin(step, "decode", np.zeros(1), True))
        foresight.say(1, said)
        assert foresight.routed(routed([experts], layer=1, step=step))
    hit_rate = foresight.say(1, [])
    assert [hit_rate(rank) for rank in range(4)] == [2.5 / 4, 0.5 / 3, 1.5 / 2, 0.5]
    assert foresight.say(2, [])(0) == 0.5, "layers are told apart"


def test_predictions_count_once_all_micro_batches_are_in() -> None:
    foresight = Foresight(tiny_model(), 0.5)
    foresight.step_begin(StepBegin(0, "decode", np.zeros(3), True))
    ids = np.array([[1, 2], [1, 3]])
    assert foresight.predicted(Predicted(0, 1, 0, ids, None, "oracle")) is None
    assert foresight.predicted(Predicted(0, 1, 1, ids[:1], None, "oracle")) == {1: 3, 2: 2, 3: 1}
    assert not foresight.routed(routed([[0, 1], [2, 3]]))
    assert foresight.routed(routed([[0, 4]], mb=1))


# ------------------------------------------------------------------------------------------------------- runs by hand
MODEL = kit.tiny_model(n_layers=3, n_experts=6)
ROWS = [[0, 2], [1, 2], [1, 2]]  # of layer 0: E0 1, E1 2, E2 3


class Told:
    """Predicts what a table says of a layer."""

    name, label = "told", ""

    def __init__(self, says: Mapping[int, Sequence[Sequence[int]]], lookahead: int = 1) -> None:
        self.says = says
        self.lookahead = lookahead

    def needs_layer(self, layer: int) -> int:
        return layer - self.lookahead

    def predict(self, step: Any, mb: int, layer: int) -> tuple[Any, None] | None:
        return (np.array(self.says[layer]), None) if layer in self.says else None


def toy(link: float = 2.5, cpu_row_ns: int = 100, contention: Sequence[Any] = (), **gpu: Any) -> Any:
    devices = {"gpu0": kit.gpu(predict={"told": 10}, **gpu), "cpu0": kit.cpu(per_row_ns=cpu_row_ns)}
    return kit.machine(devices, {"cpu0->gpu0": kit.link(link), "gpu0->cpu0": kit.link()}, contention=contention)


def run(
    says: Mapping[int, Any], *layers: Sequence[Sequence[int]], options: Mapping[str, Any] | None = None, steps: int = 1,
    **more: Any,
) -> Records:  # fmt: skip
    """Run one step, or several alike: for each layer the experts of each row. Unless told else, the CPU waits for the plan."""
    spec = {"name": "prescope", "placement": "none", "predictor": "told", "head_start": False, **(options or {})}
    requests = [[list(row) for _ in range(steps)] for row in zip(*layers, strict=True)]
    work = kit.workload(requests, n_experts=6)
    fields: dict[str, Any] = {"hardware": toy(), "model": MODEL, "slots": {"gpu0": 0}, "predictors": {"told": Told(says)}}
    return kit.play(make_policy(spec), work, **(fields | more))


def down(*times: tuple[int, int, str]) -> list[tuple[int, int, str, str]]:
    return [(start, end, "cpu0->gpu0", what) for start, end, what in times]


def on(device: str, records: Records) -> list[tuple[int, int, str]]:
    return [(start, end, what) for start, end, where, what in kit.tasks(records) if where == device]


def test_a_cross_layer_prefetch_arrives_and_is_used() -> None:
    """At 110 the prediction is in: TG 2100 1700 1300 900 500, TC 500 1000 1600 2200 2800 of 1c 2c 3c 3n 3n.

    E2 is loaded (500 < 400 + 500), T_gap = 900 - 400, f = (500 + 100) / 400 = 1.5, rounded to 2: both. At layer 1 the second is
    still under way, 110 ns at 1200: f = (0 - 110 + 100) / 400 is nothing. Layer 2, the last, is planned as it is routed.
    """
    records = run({1: [[3, 4]] * 3, 2: [[0, 5]] * 3}, ROWS, [[3, 4]] * 3, [[0, 5]] * 3)
    assert kit.transfers(records) == down(
        (110, 510, "demand 0/2"), (510, 910, "prefetch 1/3"), (910, 1310, "prefetch 1/4"), (1510, 1910, "demand 2/5")
    )
    assert on("cpu0", records) == [(150, 550, "E0x1"), (550, 1050, "E1x2"), (1550, 2150, "E0x3")]
    assert on("gpu0", records) == [
        (0, 100, "dense"), (100, 110, "predict"), (510, 610, "E2x3"),
        (1090, 1190, "dense"), (1190, 1200, "predict"), (1200, 1300, "E3x3"), (1310, 1410, "E4x3"),
        (1410, 1510, "dense"), (1910, 2010, "E5x3"),
    ]  # fmt: skip
    assert records.makespan_ns == 2190
    assert [(look.hits, look.in_flight) for look in records.lookups][1] == ((1, 0), (0, 1))


def test_buffers_are_emptied_with_their_layer_and_never_kept() -> None:
    """The same step twice: what layer 1 used was gone, and is fetched again."""
    once = run({1: [[3, 4]] * 3, 2: [[0, 5]] * 3}, ROWS, [[3, 4]] * 3, [[0, 5]] * 3)
    twice = run({1: [[3, 4]] * 3, 2: [[0, 5]] * 3}, ROWS, [[3, 4]] * 3, [[0, 5]] * 3, steps=2)
    assert twice.makespan_ns == 2 * once.makespan_ns
    first = kit.transfers(once)
    assert kit.transfers(twice) == first + [(a + 2190, b + 2190, link, what) for a, b, link, what in first]
    gone = [(e.time, e.pool, e.layer, e.expert, e.used) for e in once.evictions]
    assert gone == [
        (1090, "staging", 0, 2, True), (1410, "prefetch-odd", 1, 3, True), (1410, "prefetch-odd", 1, 4, True),
        (2190, "staging", 2, 5, True),
    ]  # fmt: skip


def test_residents_run_while_the_prediction_is_made() -> None:
    """E1 and E2 are the hot table. The GPU has them after the prediction; E0 waits for it, and goes to the CPU."""
    table = {"activation_frequency": np.array([[0, 0.9, 0.8, 0, 0, 0], [0] * 6, [0] * 6])}
    options = {"placement": "frequency-global"}
    records = run({1: [[3, 4]] * 3}, ROWS, [[3, 4]] * 3, [[0, 5]] * 3, options=options, slots={"gpu0": 2}, tables=table)
    assert on("gpu0", records)[:4] == [(0, 100, "dense"), (100, 110, "predict"), (110, 210, "E1x2"), (210, 310, "E2x3")]
    assert on("cpu0", records)[0] == (130, 530, "E0x1")  # 10 + 10 for its one row
    assert not [e for e in records.evictions if e.pool == "cache"]


def test_the_cpu_begins_with_what_every_plan_gives_it() -> None:
    """Whatever the prediction will say, E0 and E1 are not loaded, so the CPU has them at 100.

    The plan is made at 110, and counts from 100: TG of E2 is 10 + 500 < 900, T_gap = 900 - 10 - 400, f = 590 / 400 is one expert.
    A single expert, as E5 in layer 1, is in doubt until the prediction is in, at 1180 + 10.
    """
    says = {1: [[3, 4]] * 3, 2: [[0, 1]] * 3}
    records = run(says, ROWS, [[3, 5]] * 3, [[0, 1]] * 3, options={"head_start": True})
    assert on("cpu0", records)[:2] == [(140, 540, "E0x1"), (540, 1040, "E1x2")]
    assert kit.transfers(records)[:3] == down((110, 510, "demand 0/2"), (510, 910, "prefetch 1/3"), (1190, 1590, "demand 1/5"))
    assert records.layers[0].end == 1080


def test_shared_experts_count_as_part_of_the_dense_part() -> None:
    """As above, with 50 more: f = 640 / 400, two experts."""
    model = kit.tiny_model(n_layers=3, n_experts=6, n_shared=1, shared_intermediate=50)
    says = {1: [[3, 4]] * 3}
    records = run(says, ROWS, [[3, 5]] * 3, [[0, 1]] * 3, options={"head_start": True}, model=model)
    assert kit.transfers(records)[1:3] == down((510, 910, "prefetch 1/3"), (910, 1310, "prefetch 1/4"))


def test_what_is_under_way_may_make_a_load_too_late() -> None:
    """E4 was predicted, E1 is routed. Nothing is predicted for layer 2, so layer 1 is planned when routed, at 1190.

    Until 1310 the link goes on: E1 would be done 620 later on the GPU, on the CPU 600 later. Without prefetch it is worth a load.
    """
    layers = ROWS, [[3, 1]] * 3, [[0, 5]] * 3
    records = run({1: [[3, 4]] * 3}, *layers)
    assert kit.transfers(records)[:3] == down((110, 510, "demand 0/2"), (510, 910, "prefetch 1/3"), (910, 1310, "prefetch 1/4"))
    assert "1/1" not in str(kit.transfers(records))
    assert on("cpu0", records)[2] == (1230, 1830, "E1x3")
    assert [(e.time, e.expert, e.used) for e in records.evictions if e.layer == 1] == [(1870, 3, True), (1870, 4, False)]
    fewer = run({1: [[3, 4]] * 3}, *layers, options={"prefetch_size": 1})
    assert kit.transfers(fewer)[2] == (1190, 1590, "cpu0->gpu0", "demand 1/1")


SLOW = {"dense_ns": 440}  # a dense part of 500


@pytest.mark.parametrize(
    ("cancel", "last"),
    [
        ("layer-end", (2000, 2400, "demand 1/5")),  # nobody fetches it any more when it is wanted
        ("next-gate", (1710, 2110, "prefetch 1/5")),  # it goes on in the next dense part, for which f counts it
    ],
)
def test_what_is_only_queued_is_given_up(cancel: str, last: tuple[int, int, str]) -> None:
    """f = (500 + 500) / 400 = 2.5, rounded to 3; two begin before layer 0 ends at 1490. Layer 1 is routed at 1990."""
    options = {"cancel": cancel}
    says = {1: [[3, 4], [3, 4], [3, 5]], 2: [[0, 1]] * 3}
    layers = ROWS, [[3, 5], [3, 5], [5, 0]], [[0, 1]] * 3
    records = run(says, *layers, options=options, hardware=toy(**SLOW))
    assert kit.transfers(records)[:4] == down(
        (510, 910, "demand 0/2"), (910, 1310, "prefetch 1/3"), (1310, 1710, "prefetch 1/4"), last
    )
    assert [layer.begin for layer in records.layers][:2] == [0, 1490]


@pytest.mark.parametrize("chunk_bytes", [None, 500])
def test_a_transfer_that_outlives_its_layer_is_dropped_when_it_arrives(chunk_bytes: int | None) -> None:
    """A slow link and CPU: 10000 an expert, 300 + 4000 a row. Layer 1 finds its experts in the hot table, and ends soon.

    Layer 0: E1 is loaded while the CPU has E0 for 12300. Layer 2 is planned at 12890, when 7220 are left of 1/3: both experts
    take the CPU 24600, a load behind 1/3 is done after 17320.
    """
    table = {"activation_frequency": np.array([[0] * 6, [0.9, 0.8, 0, 0, 0, 0], [0] * 6])}
    options = {"prefetch_size": 1, "placement": "frequency-global"}
    slow = toy(link=0.1, cpu_row_ns=4000)
    layers = [[[0, 1]] * 3] * 3
    more = {"slots": {"gpu0": 2}, "tables": table, "chunk_bytes": chunk_bytes}
    records = run({1: [[3, 4]] * 3}, *layers, hardware=slow, options=options, **more)
    assert [layer.end for layer in records.layers] == [12490, 12790, 30210]
    ends = [(t.end, t.layer, t.expert) for t in records.transfers if t.last]
    assert ends == [(10110, 0, 1), (20110, 1, 3), (30110, 2, 1)]
    assert [(e.time, e.layer, e.expert) for e in records.evictions if e.pool == "prefetch-odd"] == [(20110, 1, 3)]


def test_chunks_of_what_is_under_way_go_before_the_loads() -> None:
    """500 an expert, in thirds of 167, 167 and 166. Layer 1 is routed at 1190, and 1/4 is not wanted: E1 comes after it."""
    layers = ROWS, [[1, 2], [1, 2], [1, 0]], [[0, 5]] * 3
    options = {"prefetch_size": 2, "cancel": "next-gate"}  # 1/4 begins between the end of layer 0, at 1090, and the gate
    records = run({1: [[3, 4]] * 3}, *layers, hardware=toy(link=2), chunk_bytes=334, options=options)
    found = [t for t in kit.transfers(records) if " 1/" in t[3]]
    assert found[3:] == down(
        (1110, 1277, "demand 1/4"), (1277, 1444, "demand 1/4"), (1444, 1610, "demand 1/4"),
        (1610, 1777, "demand 1/1"), (1777, 1944, "demand 1/1"), (1944, 2110, "demand 1/1"),
    )  # fmt: skip
    assert found[:3] == down((610, 777, "prefetch 1/3"), (777, 944, "prefetch 1/3"), (944, 1110, "prefetch 1/3"))


def test_a_layer_that_nothing_is_said_about_is_not_waited_for() -> None:
    """No prediction is paid for either."""
    records = run({}, ROWS, [[3, 4]] * 3, [[0, 5]] * 3)
    assert kit.transfers(records)[0] == (100, 500, "cpu0->gpu0", "demand 0/2")
    assert "predict" not in {t.kind for t in records.tasks}


def test_a_misspelt_predictor_is_not_taken_for_one_that_says_nothing() -> None:
    with pytest.raises(PolicyError, match=r"unknown source 'tol'; did you mean 'told'.*policy=script"):
        run({}, ROWS, [[3, 4]] * 3, [[0, 5]] * 3, options={"predictor": "tol"})


def test_the_window_looks_at_the_layer_after_the_next() -> None:
    """Layer 1 is predicted to use residents only; so is step 4 done for layer 2 when its prediction is in, at 120.

    T_gap = 500 and f = 1.5 as ever: both experts; the second is under way when layer 0 ends and goes on.
    """
    table = {"activation_frequency": np.array([[0] * 6, [0, 0, 0, 0.9, 0.8, 0], [0] * 6])}
    options = {"placement": "frequency-global", "window": "next2", "next2_predictor": "told2"}
    predictors = {"told": Told({1: [[3, 4]] * 3}), "told2": Told({2: [[0, 5]] * 3}, 2)}
    layers = ROWS, [[3, 4]] * 3, [[0, 5]] * 3
    records = run({}, *layers, options=options, slots={"gpu0": 2}, tables=table, predictors=predictors)
    assert kit.transfers(records) == down((110, 510, "demand 0/2"), (510, 910, "prefetch 2/0"), (910, 1310, "prefetch 2/5"))
    assert [layer.end for layer in records.layers] == [1090, 1390, 1690]


@pytest.mark.parametrize(
    ("event", "awaits", "further", "asked"),
    [
        ((4, 2, "told"), True, True, ""), ((5, 2, "told"), True, True, "next"), ((5, 2, "told2"), True, True, ""),
        ((5, 2, "told"), False, True, ""), ((5, 3, "told2"), False, True, "after the next"), ((5, 3, "told2"), False, False, ""),
        ((5, 4, "told2"), False, True, ""), ((5, 3, "told"), True, False, ""),
    ],
)  # fmt: skip
def test_late_predictions_are_taken_for_no_others(event: tuple[int, int, str], awaits: bool, further: bool, asked: str) -> None:
    """Layer 1 of step 5 is routed; a prediction is of a step, a layer and a source."""
    heard: list[str] = []

    class Says:
        def __init__(self, name: str) -> None:
            self.name = name

        def predicted(self, event: Predicted) -> None:
            heard.append(self.name)

    policy: Any = make_policy(
        {"name": "prescope", "placement": "none", "window": "next2", "predictor": "told", "next2_predictor": "told2"}
    )
    view = FakeView()
    policy.place(view)
    policy._foresight, policy._foresight2 = Says("next"), Says("after the next")
    policy._visit = visit = Visit(5, 1)
    visit.awaits, visit.looks_further = awaits, further
    step, layer, source = event
    assert policy.on_predicted(Predicted(step, layer, 0, np.zeros((1, 2), int), None, source), view) == []
    assert heard == [asked] * bool(asked) and (visit.awaits, visit.looks_further) == (awaits, further)


def test_micro_batches_are_planned_together() -> None:
    """The rows of layer 0 come in two portions; the plan is the one of all of them."""
    work = kit.workload([[[ROWS[0], [3, 4]]], [[ROWS[1], [3, 4]]], [[ROWS[2], [3, 4]]]], n_experts=6, micro_batches=3)
    says = {1: [[3, 4]]}
    records = kit.play(
        make_policy({"name": "prescope", "placement": "none", "predictor": "told", "head_start": False}),
        work, toy(), model=kit.tiny_model(n_experts=6), slots={"gpu0": 0}, predictors={"told": Told(says)},
    )  # fmt: skip
    assert on("cpu0", records)[:2] == [(350, 750, "E0x1"), (750, 1250, "E1x2")]
    assert kit.transfers(records)[:2] == down((310, 710, "demand 0/2"), (710, 1110, "prefetch 1/3"))


def in_micro_batches(options: Mapping[str, Any], *steps: Sequence[Sequence[Sequence[int]]], **more: Any) -> Records:
    """Run steps, of each layer the experts of each row, with a micro-batch for each row."""
    rows, layers = range(len(steps[0][0])), range(len(steps[0]))
    work = kit.workload(
        [[[list(step[layer][row]) for layer in layers] for step in steps] for row in rows], n_experts=6, micro_batches=len(rows)
    )
    return kit.play(make_policy({"name": "prescope", **options}), work, model=MODEL, **more)


def test_without_a_predictor_another_micro_batch_runs_what_the_first_one_loads() -> None:
    """E0 and E2 are asked for at 100, E1 at 200, when E2 is on its way: there is no buffer that it could be prefetched to."""
    layers = [[0, 2], [1, 2]], [[3, 4]] * 2, [[0, 5]] * 2
    options = {"placement": "none", "predictor": None, "scheduler": "all-gpu"}
    records = in_micro_batches(options, layers, hardware=toy(), slots={"gpu0": 0})
    assert kit.transfers(records)[:3] == down((100, 500, "demand 0/0"), (500, 900, "demand 0/2"), (900, 1300, "demand 0/1"))
    assert on("gpu0", records)[2:6] == [(500, 600, "E0x1"), (900, 1000, "E2x1"), (1000, 1100, "E2x1"), (1300, 1400, "E1x1")]
    assert [t[3] for t in kit.transfers(records)[3:]] == ["demand 1/3", "demand 1/4", "demand 2/0", "demand 2/5"]


# -------------------------------------------------------------------------------------------- transfers and computation in turns
def test_without_async_io_copies_and_computation_take_turns() -> None:
    """The first example of this section: the same loads and prefetches, then everything that computes, layer by layer."""
    records = run({1: [[3, 4]] * 3, 2: [[0, 5]] * 3}, ROWS, [[3, 4]] * 3, [[0, 5]] * 3, options={"async_io": False})
    assert kit.transfers(records) == down(
        (110, 510, "demand 0/2"), (510, 910, "prefetch 1/3"), (910, 1310, "prefetch 1/4"), (2700, 3100, "demand 2/5")
    )
    assert on("cpu0", records) == [(1350, 1750, "E0x1"), (1750, 2250, "E1x2"), (3140, 3740, "E0x3")]
    assert on("gpu0", records) == [
        (0, 100, "dense"), (100, 110, "predict"), (1310, 1410, "E2x3"),
        (2290, 2390, "dense"), (2390, 2400, "predict"), (2400, 2500, "E3x3"), (2500, 2600, "E4x3"),
        (2600, 2700, "dense"), (3100, 3200, "E5x3"),
    ]  # fmt: skip
    assert records.makespan_ns == 3780


# -------------------------------------------------------------------------------------------------- parts and options
def test_another_scheduler_keeps_the_count_of_prefetches() -> None:
    """Fiddler's threshold loads E1 and E2, which take the CPU 500 and 600 and the GPU 400 + 100, and not E0.

    T_gap = 400 - 800: nothing is prefetched, unless a fixed number is asked for.
    """
    layers = ROWS, [[3, 4]] * 3, [[0, 5]] * 3
    records = run({1: [[3, 4]] * 3}, *layers, options={"scheduler": "threshold"})
    assert kit.transfers(records)[:2] == down((100, 500, "demand 0/1"), (500, 900, "demand 0/2"))
    assert "prefetch" not in str(kit.transfers(records))
    records = run({1: [[3, 4]] * 3}, *layers, options={"scheduler": "threshold", "prefetch_size": 4})
    assert kit.transfers(records)[2] == (900, 1300, "cpu0->gpu0", "prefetch 1/3")


def test_asynchronous_transfers_are_in_three_parts() -> None:
    model = kit.tiny_model()
    assert PreScope().transfer(model) == ("chunked", 334, 0)
    assert PreScope(async_io=False).transfer(model) is None
    mixed = kit.tiny_model(expert_bytes_by_layer=(1000, 700))
    for one in (model, mixed):
        curve, chunk, _ = PreScope().transfer(one) or ("", None, 0)
        costs = CostModel(one, toy(), transfer=curve, chunk_bytes=chunk)
        work = kit.workload([[[[0, 2], [3, 1]]]] * 4)
        policy = make_policy({"name": "prescope", "placement": "none", "predictor": None, "scheduler": "all-gpu"})
        records = simulate(model=one, costs=costs, workload=work, policy=policy, cache_slots={}, options=EngineOptions())
        parts = [[t.fetch for t in records.transfers].count(n) for n in {t.fetch for t in records.transfers}]
        assert set(parts) == {3}


def test_the_learned_predictor_takes_memory() -> None:
    view = FakeView()
    view.tables = {"activation_frequency": np.ones((4, 8))}
    placement = PreScope().place(view)
    assert placement.reserved == {"gpu0": 4 * PREDICTOR_BYTES}
    size = view.model.expert_bytes(0)
    assert {p.name: p.n_bytes // size for p in placement.pools} == {
        "cache": 8, "staging": 2, "prefetch-even": 8, "prefetch-odd": 8
    }  # fmt: skip
    assert not PreScope(predictor="oracle").place(view).reserved
    assert len(PreScope(predictor=None).place(view).pools) == 2


# --------------------------------------------------------------------------------------------------- the part by itself
def test_the_part_fits_prefetches_behind_any_assignment() -> None:
    """All on the CPU: the link is free, f = (1500 + 100) / 400 = 4; the greedy rule loads two, and less is left."""
    layers = ROWS, [[3, 4], [3, 4], [5, 4]], [[0, 5]] * 3

    def fetched(assignment: str, **part: Any) -> list[tuple[int, int, str, str]]:
        spec = {
            "placement": "none", "replacement": "static", "assignment": assignment,
            "prefetch": {"name": "cross-layer", "source": "told", **part},
        }  # fmt: skip
        options = {"name": "composed", **spec}
        requests = [[list(row)] for row in zip(*layers, strict=True)]
        records = kit.play(
            make_policy(options), kit.workload(requests, n_experts=6), toy(), model=MODEL, slots={"gpu0": 0},
            predictors={"told": Told({1: layers[1]})},
        )  # fmt: skip
        return kit.transfers(records)

    assert fetched("all-cpu")[:3] == down((110, 510, "prefetch 1/4"), (510, 910, "prefetch 1/3"), (910, 1310, "prefetch 1/5"))
    assert [t[3] for t in fetched("all-cpu", order="printed")[:3]] == ["prefetch 1/5", "prefetch 1/3", "prefetch 1/4"]
    assert [t[3] for t in fetched("all-cpu", size=1)[:2]] == ["prefetch 1/4"]
    assert [t[3] for t in fetched("all-gpu")[:3]] == ["demand 0/0", "demand 0/1", "demand 0/2"]
    assert "prefetch" not in str(fetched("all-gpu")), "the link is busy for longer than the CPU"


def _chosen(part: CrossLayer, view: FakeView, layer: int, plan: Plan) -> int:
    """Let a part see a layer of two rows, planned somehow, and a prediction of five experts for the next; count its choice."""
    part.step_begin(StepBegin(0, "decode", np.zeros(2), True))
    event = routed([[1, 2], [1, 2]], layer=layer)._replace(rows=[0, 2, 6, 0, 0, 0, 0, 0])
    part.ask(event, view)
    assert part.ahead(event, plan, view) == ()
    ids = np.array([[3, 4], [5, 6]])
    return len(part.choose(Predicted(0, layer + 1, 0, ids, None, "oracle"), view))


@pytest.mark.parametrize(("left", "size"), [(2400, 2), (2600, 1), (None, 1), (0, 2)])
def test_the_part_charges_the_loads_of_the_layer(left: int | None, size: int) -> None:
    """The CPU takes 6000 for E2, a load 3000, the dense part 1000: f = (7000 - what the link has to do for E1) / 3000."""
    view = FakeView()
    part = CrossLayer(source="oracle")
    part.start(Setup(view, "gpu0", "cpu0", [8] * view.model.n_layers, True))
    if left == 0:
        view.put(0, [1], "gpu0")
    elif left is not None:
        view.pend(0, [1], "gpu0", left)
    assert _chosen(part, view, 0, Plan((1,), (2,), 0, 0)) == size


@pytest.mark.parametrize(("left", "size"), [(2400, 2), (2600, 1), (3000, 2)])
def test_the_part_charges_what_is_under_way_for_nothing(left: int, size: int) -> None:
    """E3 was chosen for layer 1, which does not need it. What has all its time left is only queued, behind any load."""
    view = FakeView()
    part = CrossLayer(source="oracle")
    part.start(Setup(view, "gpu0", "cpu0", [8] * view.model.n_layers, True))
    assert _chosen(part, view, 0, Plan((), (2,), 0, 0)) == 2
    view.pend(1, [3], "gpu0", left)
    assert _chosen(part, view, 1, Plan((), (2,), 0, 0)) == size


def test_the_part_charges_what_is_under_way_and_used_once() -> None:
    """E3 was chosen for layer 1, which needs it: f = (7000 - 1800) / 3000, and not 3400 / 3000."""
    view = FakeView()
    part = CrossLayer(source="oracle")
    part.start(Setup(view, "gpu0", "cpu0", [8] * view.model.n_layers, True))
    assert _chosen(part, view, 0, Plan((), (2,), 0, 0)) == 2
    view.pend(1, [3], "gpu0", 1800)
    assert _chosen(part, view, 1, Plan((3,), (2,), 0, 0)) == 2


@pytest.mark.parametrize("change", [{"source": "oracle"}, {"size": 1}, {"order": "printed"}, {"prior_hit": 0.0}], ids=str)
def test_an_option_of_the_part_changes_what_happens(change: dict[str, Any]) -> None:
    found = []
    for options in ({}, change):
        policy = make_policy({"name": "composed", "assignment": "greedy", "prefetch": {"name": "cross-layer", **options}})
        found.append(run_tiny(policy, tiny_workload(policy, 4), 12).transfers)
    assert found[0] != found[1]


def test_the_part_predicts_in_the_lane_it_is_told() -> None:
    view = FakeView()
    for lane in ("main", "side"):
        part = CrossLayer(source="oracle", lane=lane)
        part.start(Setup(view, "gpu0", "cpu0", [8] * view.model.n_layers, True))
        assert part.ask(routed([[1, 2]]), view) == (Predict(0, 1, "oracle", "gpu0", lane),)
        assert part.ask(routed([[1, 2]], layer=3), view) == ()


def test_turns_of_copies_and_of_computation_by_hand() -> None:
    """Room for two loads: 1 and 2 come, run and leave beside 5 on the CPU, then 3 and 4 with a prefetch; each expert once."""
    turns = Turns("gpu0", 2)
    ask, ahead = Predict(0, 1, "told", "gpu0"), Fetch(1, [7], "gpu0", PREFETCH, "prefetch-odd")
    assert turns.hold(0, [ask, Fetch(0, [1, 2, 3], "gpu0", DEMAND, "staging"), Run(0, [1, 2], "gpu0"), ahead]) == [ask]
    assert turns.hold(0, [Fetch(0, [2, 4], "gpu0", DEMAND, "staging"), Run(0, [2, 4, 3], "gpu0"), Run(0, [5], "cpu0")]) == []
    assert turns.go_on() == [Fetch(0, [1, 2], "gpu0", DEMAND, "staging")] and turns.go_on() == []
    turns.happened(Fetched(0, 1, "gpu0"))
    assert turns.go_on() == []
    turns.happened(Fetched(0, 2, "gpu0"))
    computed = [Run(0, [5], "cpu0"), Run(0, [1, 2], "gpu0"), Drop(0, [1, 2], "gpu0")]
    assert turns.go_on() == computed and turns.go_on() == []
    for device, experts in (("gpu0", (1, 2)), ("cpu0", (5,))):
        assert turns.go_on() == []
        turns.happened(Ran(0, 0, experts, device))
    assert turns.go_on() == [Fetch(0, [3, 4], "gpu0", DEMAND, "staging"), ahead]
    for layer, expert in ((0, 3), (0, 4), (1, 7)):
        assert turns.go_on() == []
        turns.happened(Fetched(layer, expert, "gpu0"))
    assert turns.go_on() == [Run(0, [4, 3], "gpu0")] and turns.go_on() == []
