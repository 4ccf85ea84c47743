"""HybriMoE: its plans, its cache and its prefetch as pure functions, and both policies on the engine to the nanosecond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.metrics import summarise
from moesim.policies.algorithms.hybrimoe import (
    CODE_COSTS,
    Ahead,
    PerRow,
    Reading,
    Timings,
    impact_driven,
    queue_plan,
    replay,
    two_ended_plan,
)
from moesim.policies.options import options_of
from moesim.policies.parts import Plan, Setup
from moesim.policies.registry import PARTS, make_part, make_policy, part_class
from moesim.policies.systems.hybrimoe import Credit, HybriMoECode, HybriMoEPaper, RecentScores
from moesim.policy import Fetch, Predicted, Routed, StepBegin
from moesim.records import Records
from moesim.testing import FakeView, routed, run_tiny, tiny_workload
from tests.engine.engine_kit import Oracle, cpu, gpu, link, machine, pair, play, tasks, transfers, workload

A, B, C, D, E = range(5)
FIGURE = ([D, E], [A, B, C], [1, 1, 5, 4, 1], Timings(3, PerRow(2), PerRow(0, 1)))
ROWS = (1, 1, 1, 2, 2, 3, 4, 6, 9, 14)


# --------------------------------------------------------------------------------------------------------------- plans
def test_the_queues_reproduce_the_figure() -> None:
    plan = queue_plan(*FIGURE)
    assert plan == Plan((D, C), (A, B, E), 5, 3, (C,))
    assert plan.makespan == 5


def test_the_two_ended_list_cannot_steal_while_an_expert_is_to_be_transferred() -> None:
    cached, _, loads, costs = FIGURE
    plan = two_ended_plan(range(5), cached, loads, costs)
    assert (plan.gpu, plan.cpu, plan.makespan, plan.loads) == ((D, E, C), (B, A), 6, (C,))


@pytest.mark.parametrize("n_cached", range(7))
def test_the_constants_of_the_code_send_one_of_six_experts_to_the_cpu(n_cached: int) -> None:
    ranked = [3, 1, 5, 0, 4, 2]
    plan = two_ended_plan(ranked, ranked[:n_cached], [1] * 6, CODE_COSTS)
    assert plan.cpu == ((2, 4) if n_cached == 0 else (2,))


class Instance(NamedTuple):
    """A layer."""

    loads: list[int]
    cached: list[int]
    missing: list[int]
    costs: Timings


@st.composite
def instances(draw: Any, extras: bool = True) -> Instance:
    loads = draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=9))
    there = draw(st.lists(st.booleans(), min_size=len(loads), max_size=len(loads)))
    first = st.sampled_from([0, 3]) if extras else st.just(0)
    costs = Timings(
        draw(st.sampled_from([2, 3, 6])), PerRow(draw(st.sampled_from([0.5, 1, 2]))), PerRow(0, 1), draw(first), draw(first)
    )
    cached = [e for e, here in enumerate(there) if here]
    return Instance(loads, cached, [e for e, here in enumerate(there) if not here], costs)


READINGS = st.builds(
    Reading,
    st.sampled_from(["completion", "free"]),
    st.sampled_from(["gpu", "cpu", "link"]),
    st.booleans(),
    st.booleans(),
)


@given(instances(), READINGS, st.data())
def test_a_queue_plan_serves_every_expert_once_and_is_its_own_replay(one: Instance, reading: Reading, data: Any) -> None:
    late = {e: data.draw(st.integers(1, 9)) for e in one.cached if data.draw(st.booleans())}
    begin = data.draw(st.integers(0, 4))
    plan = queue_plan(one.cached, one.missing, one.loads, one.costs, late, begin, reading=reading)
    assert sorted(plan.gpu + plan.cpu) == list(range(len(one.loads)))
    assert set(one.missing) & set(plan.gpu) <= set(plan.loads) <= set(one.missing)
    ends = replay(plan, one.loads, one.costs, dict.fromkeys(one.cached, 0) | late, begin)
    assert (ends.gpu, ends.cpu) == (plan.gpu_total, plan.cpu_total)
    assert ends.link == begin + one.costs.transfer * len(plan.loads)


def test_an_expert_on_its_way_is_overtaken_or_waited_for() -> None:
    """0 has the most rows and arrives at 5; 1 is there."""
    loads, costs = [9, 2], Timings(9, PerRow(2), PerRow(100))
    plan = queue_plan([0, 1], [], loads, costs, {0: 5})
    assert (plan.gpu, plan.gpu_total) == ((1, 0), 7)
    plan = queue_plan([0, 1], [], loads, costs, {0: 5}, reading=Reading(overtake=False))
    assert (plan.gpu, plan.gpu_total) == ((0, 1), 9)
    plan = queue_plan([0, 1], [], loads, costs, {0: 5, 1: 3})
    assert (plan.gpu, plan.gpu_total) == ((1, 0), 7)  # none is there: the first to arrive


def test_shared_experts_and_a_busy_link_delay_the_plan() -> None:
    costs = Timings(3, PerRow(2), PerRow(100))
    assert queue_plan([0], [], [1], costs, gpu_free=5).gpu_total == 7
    assert queue_plan([], [0], [1], costs, link_free=4).gpu_total == 9


# --------------------------------------------------------------------------------------------------------------- impact
def slowest(layer: int, cached: tuple[int, ...], missing: tuple[int, ...]) -> float:
    """A made-up plan: missing experts cost 10 a row and 1 more in layer 1, cached ones 1 a row."""
    return sum(cached) + (10 + (layer == 1)) * sum(missing)


def test_impact_takes_the_largest_gain_then_the_nearer_layer_more_rows_and_the_lower_id() -> None:
    ahead = [Ahead(1, (), ((5, 1), (4, 1))), Ahead(2, (3,), ((1, 2), (0, 1), (3, 2)))]
    # gains: layer 1: 10 each; layer 2: 18, 18 and 9
    assert impact_driven(ahead, slowest, 2, 100) == [(2, 1), (2, 3), (1, 4), (1, 5), (2, 0)]
    equal = [Ahead(2, (), ((1, 1),)), Ahead(3, (), ((0, 1),))]
    assert impact_driven(equal, slowest, 2, 2) == [(2, 1)]


@pytest.mark.parametrize(
    ("budget", "idle", "n"),
    [("ends", 3, 0), ("ends", 4, 1), ("ends", 7, 1), ("ends", 8, 2), ("begins", 0, 0), ("begins", 4, 1), ("begins", 5, 2),
     ("none", -9, 3)],
)  # fmt: skip
def test_impact_stops_where_the_link_would_be_busy_past_the_layer(budget: Any, idle: int, n: int) -> None:
    ahead = [Ahead(1, (), ((0, 1), (1, 1), (2, 1)))]
    assert impact_driven(ahead, slowest, 4, idle, budget) == [(1, 0), (1, 1), (1, 2)][:n]


# --------------------------------------------------------------------------------------------------------------- scores
def scored(scores: list[list[float]], experts: list[list[int]], layer: int = 0) -> Routed:
    event = routed(experts, layer=layer, n_experts=len(scores[0]))
    return event._replace(scores=np.array(scores, np.float16))


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(1, 8), st.sampled_from([0.25, 0.5, 1.0]), st.sampled_from(["mean", "first"]), st.data())
def test_recent_scores_follow_the_equation(n_rows: int, p: int, alpha: float, tokens: Any, data: Any) -> None:
    found = RecentScores(1, 8, 2, alpha, p, tokens)
    s = [0.0] * 8
    for _ in range(4):
        rows = [data.draw(st.permutations([i / 64 for i in (1, 2, 3, 5, 7, 11, 13, 22)])) for _ in range(n_rows)]
        found.update(scored(rows, [[0, 1]] * n_rows))
        top = [[v if sorted(row)[-p] <= v else 0.0 for v in row] for row in (rows[:1] if tokens == "first" else rows)]
        now = [sum(column) / len(top) for column in zip(*top, strict=True)]
        s = [alpha * new + (1 - alpha) * old for new, old in zip(now, s, strict=True)]
        assert found.of(0) == pytest.approx(s, rel=1e-6)


# Visits of a layer with 6 experts: p, alpha, scores of each visit; S afterwards where each is credited with its own score,
# and where the p highest scores are dealt out by id. By hand.
CREDITS: list[tuple[int, float, list[list[float]], list[float], list[float]]] = [
    (3, 1, [[0.1, 0, 0, 0.6, 0, 0.3]], [0.1, 0, 0, 0.6, 0, 0.3], [0.6, 0, 0, 0.3, 0, 0.1]),
    (2, 0.5, [[0, 0.5, 0, 0.25, 0.125, 0.125]], [0, 0.25, 0, 0.125, 0, 0], [0, 0.25, 0, 0.125, 0, 0]),
    (  # 3 has .125 from the visit before, and gets half of .5, or of .25
        2,
        0.5,
        [[0, 0.5, 0, 0.25, 0.125, 0.125], [0.125, 0, 0.25, 0.5, 0.125, 0]],
        [0, 0.125, 0.125, 0.3125, 0, 0],
        [0, 0.125, 0.25, 0.1875, 0, 0],
    ),
    (1, 0.25, [[0, 0, 0, 0.5, 0.5, 0]], [0, 0, 0, 0.125, 0.125, 0], [0, 0, 0, 0.125, 0, 0]),  # the code keeps p, eq. 3 equals
    (4, 0.5, [[0, 0, 0.75, 0, 0.25, 0]], [0, 0, 0.375, 0, 0.125, 0], [0.375, 0.125, 0, 0, 0, 0]),  # zeros are among the 4
    (6, 1, [[0.25, 0.5, 0.0625, 0.125, 0, 0.0625]], [0.25, 0.5, 0.0625, 0.125, 0, 0.0625], [0.5, 0.25, 0.125, 0.0625, 0.0625, 0]),
]


@pytest.mark.parametrize(("p", "alpha", "visits", "own", "by_id"), CREDITS)
def test_the_credit_for_scores_by_hand(
    p: int, alpha: float, visits: list[list[float]], own: list[float], by_id: list[float]
) -> None:
    expected: dict[Credit, list[float]] = {"own": own, "by-id": by_id}
    for credit, s in expected.items():
        found = RecentScores(1, 6, 2, alpha, p, "first", credit)
        for scores in visits:
            found.update(scored([scores, scores[::-1]], [[0, 1]] * 2))  # the second row does not count
        assert found.of(0) == pytest.approx(s, abs=1e-3), credit  # the trace has 16-bit scores


def test_each_system_credits_as_its_source_does() -> None:
    def credit(policy: Any) -> tuple[str, str | None]:
        _, _, prefetch, replacement = policy.parts
        return replacement.credit, getattr(prefetch, "credit", None)

    assert credit(HybriMoECode(prefetch_size=1)) == ("by-id", "by-id")
    assert credit(HybriMoECode(prefetch_size=1, credit="own")) == ("own", "own")
    assert credit(HybriMoEPaper()) == ("own", None)


def start(part: Any, view: FakeView, slots: int = 2, residents: Sequence[Sequence[int]] = ()) -> Any:
    setup = Setup(view, "gpu0", "cpu0", [slots] * view.model.n_layers, True)
    if residents:
        part.start(setup, residents)
        for layer, experts in enumerate(residents):
            view.put(layer, experts, "gpu0")
    else:
        part.start(setup)
    return part


def test_the_victim_has_the_smallest_score_and_ties_go_to_the_least_recently_used() -> None:
    view = FakeView()
    part = start(make_part("replacement", "mrs"), view, 4, [[0, 1, 2, 3]])
    part.used(scored([[0.1, 0.4, 0, 0, 0.3, 0.2, 0, 0]], [[1, 4]]))
    part.used(scored([[0.1, 0.4, 0, 0, 0.3, 0.2, 0, 0]], [[2, 4]]))  # 2 is used, though it is not among the top p
    asked = Fetch(0, (4,), "gpu0")
    view.hold(0, [3], "gpu0")
    assert part.victim(asked, view) == (0, 3)  # used before 2, and both have score 0; it leaves when it is idle
    view.remove(0, [2], "gpu0")
    assert part.victim(asked, view) == (0, 0)
    view.remove(0, [1], "gpu0")
    assert part.victim(asked, view) is None


def predicted(layer: int, ids: list[list[int]], source: str = "signal:gate_next1") -> Predicted:
    return Predicted(0, layer, 0, np.array(ids), None, source)


def test_the_code_prefetches_by_score_in_steps_of_one_row_if_the_gpu_has_work() -> None:
    view = FakeView()
    part = start(make_part("prefetch", {"name": "mrs-score", "size": 2}), view)
    view.put(1, [1], "gpu0")
    part.ask(scored([[0, 0.1, 0.4, 0.2, 0, 0.3, 0, 0]], [[2, 5]], layer=1), view)
    event, busy = routed([[0, 1]]), Plan((0,), (1,), 0, 0)
    assert part.ahead(event, busy, view) == [(1, 2)]  # 1 gets .4 and 2 gets .3
    own = start(make_part("prefetch", {"name": "mrs-score", "size": 2, "credit": "own"}), view)
    own.ask(scored([[0, 0.1, 0.4, 0.2, 0, 0.3, 0, 0]], [[2, 5]], layer=1), view)
    assert own.ahead(event, busy, view) == [(1, 2), (1, 5)]
    assert part.ahead(event, Plan((), (0, 1), 0, 0), view) == ()
    assert part.ahead(routed([[0, 1]], layer=3), busy, view) == ()
    part.step_begin(StepBegin(0, "decode", np.array([0, 1]), True))
    assert part.ahead(event, busy, view) == ()
    over = start(make_part("prefetch", {"name": "mrs-score", "size": 2, "over": "non-resident"}), view)
    over.ask(scored([[0, 0.1, 0.4, 0.2, 0, 0.3, 0, 0]], [[2, 5]], layer=1), view)
    assert over.ahead(event, busy, view) == [(1, 2), (1, 3)]


def test_impact_asks_for_the_next_layer_last_and_chooses_then() -> None:
    """Transfer 3000, GPU 2000, CPU 1000 a row: experts with 9 rows are worth moving, and the layer leaves time for one."""
    view = FakeView()
    part = start(make_part("prefetch", "impact-driven"), view)
    assert part.needs == {"signal:gate_next1", "signal:gate_next2", "signal:gate_next3"}
    view.put(0, [0, 1], "gpu0")
    event = routed([[0, 1]] * 9)
    asked = [(p.layer, p.source) for p in part.ask(event, view)]
    assert asked == [(3, "signal:gate_next3"), (2, "signal:gate_next2"), (1, "signal:gate_next1")]
    part.ahead(event, Plan((0, 1), (), 0, 0), view)  # ends at 4000
    assert not part.choose(predicted(2, [[3, 4]] * 9), view)
    assert part.choose(predicted(1, [[5, 6]] * 9), view) == [(1, 5)]
    view.pend(1, [5], "gpu0")
    assert not part.choose(predicted(1, [[5, 6]] * 9), view)  # the link is busy for 3000 of 4000
    assert [p.layer for p in part.ask(routed([[0, 1]], layer=2), view)] == [3]
    assert part.ask(routed([[0, 1]], layer=3), view) == []


# ------------------------------------------------------------------------------------------------ policies on the engine
TOKENS = [[[0, 2], [1, 0]], [[2, 3], [0, 1]], [[0, 3], [2, 3]]]  # token, layer: experts; weights 0.75 and 0.25
FAST = machine(links={"cpu0->gpu0": link(5), "gpu0->cpu0": link(5)})  # an expert in 200


def run(policy: Any, slots: int, tokens: Any = TOKENS, hardware: Any = FAST, **more: Any) -> Records:
    return play(make_policy(policy), workload([tokens]), hardware, slots={"gpu0": slots}, **more)


def loads(records: Records) -> list[tuple[int, int, str]]:
    return [(start, end, what) for start, end, _, what in transfers(records)]


def experts(records: Records) -> list[tuple[Any, ...]]:
    return [task for task in tasks(records) if task[3].startswith("E")]


def test_hybrimoe_paper_by_hand() -> None:
    """Residents 0 and 1. In the last layer visit both experts are missing: the link takes 3, the CPU 2."""
    records = run({"name": "hybrimoe-paper", "prefetch": "none"}, 4)
    assert loads(records) == [(100, 300, "demand 0/2"), (800, 1000, "demand 0/3"), (1500, 1700, "demand 0/0"),
                              (1900, 2100, "demand 1/3")]  # fmt: skip
    # Scores of layer 0 at the third: 0 .469, 3 .188, 2 .219; 3 runs before it leaves. Of layer 1: 1 .156, 0 .219.
    assert [(e.time, e.layer, e.expert) for e in records.evictions] == [(100, 0, 1), (800, 0, 0), (1600, 0, 3), (1900, 1, 1)]
    assert experts(records) == [
        (100, 200, "gpu0", "E0x1"), (300, 400, "gpu0", "E2x1"), (500, 600, "gpu0", "E0x1"), (600, 700, "gpu0", "E1x1"),
        (800, 900, "gpu0", "E2x1"), (1000, 1100, "gpu0", "E3x1"), (1200, 1300, "gpu0", "E0x1"), (1300, 1400, "gpu0", "E1x1"),
        (1500, 1600, "gpu0", "E3x1"), (1700, 1800, "gpu0", "E0x1"), (2100, 2200, "gpu0", "E3x1"), (1920, 2320, "cpu0", "E2x1"),
    ]  # fmt: skip
    assert [s.end for s in records.steps] == [700, 1400, 2340]
    assert summarise(records, FAST)["hit_rate"] == 7 / 12


def test_hybrimoe_code_by_hand() -> None:
    """As the paper's until 1500: then the victim is 3, which is in use, and 2 ranks before 3 in the last layer visit."""
    policy = HybriMoECode()
    records = run("hybrimoe-code", 4)
    assert loads(records) == [(100, 300, "demand 0/2"), (800, 1000, "demand 0/3"), (1600, 1800, "demand 0/0"),
                              (2000, 2200, "demand 1/2")]  # fmt: skip
    assert [(e.time, e.layer, e.expert, e.reason) for e in records.evictions] == [
        (100, 0, 1, "drop"), (800, 0, 0, "drop"), (1600, 0, 3, "drop"), (2000, 1, 1, "drop"),
    ]  # fmt: skip
    assert experts(records)[2:4] == [(500, 600, "gpu0", "E1x1"), (600, 700, "gpu0", "E0x1")]  # as the gate ranks them
    assert experts(records)[8:] == [
        (1500, 1600, "gpu0", "E3x1"), (1800, 1900, "gpu0", "E0x1"), (2200, 2300, "gpu0", "E2x1"), (2020, 2420, "cpu0", "E3x1"),
    ]  # fmt: skip
    assert [s.end for s in records.steps] == [700, 1400, 2440]
    play(policy, workload([TOKENS]), FAST, slots={"gpu0": 4})
    assert policy.counters == {"overwrites": 1}


def test_hybrimoe_code_runs_several_rows_on_the_gpu() -> None:
    """A prompt of three rows: six experts of which two are there, in two slots; loads in ascending id, one place at a time."""
    policy = HybriMoECode()
    records = play(policy, workload([TOKENS], prompt=3), FAST, slots={"gpu0": 4})
    assert {task[2] for task in experts(records)} == {"gpu0"}
    assert [what for _, _, what in loads(records)] == ["demand 0/2", "demand 0/3", "demand 1/2", "demand 1/3"]
    # Layer 0 needs 0, 2 and 3, so 1 goes for 2, and 3 takes the place of 0, which is in use; layer 1 needs all four.
    assert policy.counters == {"overwrites": 3}


WAIT = [[[0, 3], [1, 2]]]
SLOW = machine(links={"cpu0->gpu0": link(4), "gpu0->cpu0": link(4)})  # an expert in 250


@pytest.mark.parametrize("engine", [None, "simpy"])
@pytest.mark.parametrize(("wait", "begin"), [(True, 600), (False, 550)])
def test_hybrimoe_code_waits_for_a_prefetch_that_nobody_needs(wait: bool, begin: int, engine: str | None) -> None:
    """The prefetch of 1/3 takes 350 - 600; layer 1 is routed at 550 and has its two experts."""
    prefetch = {"name": "mrs-score", "size": 1, "over": "non-resident"}
    policy = {"name": "hybrimoe-code", "prefetch": prefetch, "wait_prefetch": wait}
    records = run(policy, 6, WAIT, SLOW, engine=engine)
    assert loads(records) == [(100, 350, "demand 0/3"), (350, 600, "prefetch 1/3")]
    assert [(e.time, e.layer, e.expert) for e in records.evictions] == [(100, 0, 1), (100, 1, 0)]  # both when issued
    assert experts(records)[2:] == [(begin, begin + 100, "gpu0", "E1x1"), (begin + 100, begin + 200, "gpu0", "E2x1")]


@pytest.mark.parametrize(("cached_from", "n_cpu"), [("issue", 1), ("start", 2)])
def test_hss_counts_what_is_queued_as_cached(cached_from: str, n_cpu: int) -> None:
    """The constants of the code give the CPU two of six experts if none is cached and else the last; 6 is ranked last."""
    ranked = [3, 1, 5, 0, 4, 6]
    view = FakeView()
    part = start(make_part("assignment", {"name": "hss", "costs": "code", "cached_from": cached_from}), view)
    waiting = [view.costs.fetch_ns(view.host, "gpu0", None, 0)] * 8
    view.pend(0, [6], "gpu0", waiting[6])
    part.routed(routed([ranked]))
    plan = part.assign(0, [int(e in ranked) for e in range(8)], waiting)
    assert plan.cpu == ((4,) if cached_from == "issue" else (6, 4))
    assert len(plan.cpu) == n_cpu
    assert plan.gpu[0] == (6 if cached_from == "issue" else 3)  # the head of the list
    assert 6 not in plan.loads


@pytest.mark.parametrize("multi_row", ["gpu", "cpu-and-gpu"])
def test_hss_splits_several_rows_only_if_it_is_asked_to(multi_row: str) -> None:
    """By the constants of the code the CPU gets the two of six missing experts that have the fewest rows."""
    view = FakeView()
    part = start(make_part("assignment", {"name": "hss", "costs": "code", "multi_row": multi_row}), view)
    loads = [3, 1, 1, 3, 3, 3, 0, 0]
    part.step_begin(StepBegin(0, "decode", np.array([0, 1]), True))
    part.routed(routed([[0, 1], [2, 3]]))
    plan = part.assign(0, loads, [view.costs.fetch_ns(view.host, "gpu0", None, 0)] * 8)
    split = two_ended_plan([0, 1, 2, 3, 4, 5], (), loads, CODE_COSTS)
    assert split.cpu == (2, 1)
    assert (plan.gpu, plan.cpu) == ((split.gpu, split.cpu) if multi_row == "cpu-and-gpu" else ((0, 1, 2, 3, 4, 5), ()))


@pytest.mark.parametrize("cached_from", ["issue", "start"])
def test_hybrimoe_code_sends_a_queued_prefetch_to_the_gpu(cached_from: str) -> None:
    """Layer 1 is routed at 400: one prefetch has 34 to go, the other is queued.

    A transfer and a GPU run take 434, a CPU run 400. The GPU waits until 768, when both prefetches have arrived.
    """
    slow = machine(links={"cpu0->gpu0": link(3), "gpu0->cpu0": link(3)})
    prefetch = {"name": "mrs-score", "size": 2, "over": "non-resident"}
    assignment = {"name": "hss", "cached_from": cached_from}
    records = run({"name": "hybrimoe-code", "assignment": assignment, "prefetch": prefetch}, 4, [[[0, 1], [2, 3]]], slow)
    assert loads(records) == [(100, 434, "prefetch 1/2"), (434, 768, "prefetch 1/3")]
    of_3 = (868, 968, "gpu0", "E3x1") if cached_from == "issue" else (420, 820, "cpu0", "E3x1")
    assert sorted(experts(records)[2:]) == sorted([(768, 868, "gpu0", "E2x1"), of_3])


AHEAD = [[[0, 1], [2, 3]]]


@pytest.mark.parametrize(
    ("ns", "budget", "fetched"), [(100, "ends", True), (600, "ends", False), (600, "begins", True), (1000, "begins", False)]
)
def test_hybrimoe_paper_prefetches_what_shortens_the_next_layer(ns: int, budget: str, fetched: bool) -> None:
    """Layer 0 hits twice and ends at 700, 590 after the prediction; layer 1 is predicted to miss 2 and 3.

    With transfers of 100 either expert saves 100, both no more than one: one is fetched, the lower id. With 600, one saves
    100 too, but its transfer would end after the layer. With 1000, neither saves anything against the CPU.
    """
    devices = {"gpu0": gpu(expert_ns=300, predict={"told": 10}), "cpu0": cpu(expert_ns=900)}
    wires = machine(devices, {"cpu0->gpu0": link(1000 / ns), "gpu0->cpu0": link(1)})
    prefetch = {"name": "impact-driven", "source": "told", "lookahead": 1, "budget": budget}
    records = run({"name": "hybrimoe-paper", "prefetch": prefetch}, 4, AHEAD, wires, predictors={"told": Oracle()})
    assert [t for t in tasks(records) if t[3] == "predict"] == [(100, 110, "gpu0", "predict")]
    assert experts(records)[:2] == [(110, 410, "gpu0", "E0x1"), (410, 710, "gpu0", "E1x1")]
    ahead = [load for load in loads(records) if load[2].startswith("prefetch")]
    assert ahead == ([(110, 110 + ns, "prefetch 1/2")] if fetched else [])
    if ns == 100:
        assert loads(records)[1:] == [(810, 910, "demand 1/3")]
        assert experts(records)[2:] == [(810, 1110, "gpu0", "E2x1"), (1110, 1410, "gpu0", "E3x1")]
        assert [(e.layer, e.expert) for e in records.evictions] == [(1, 0), (1, 1)]


# ------------------------------------------------------------------------------------------------------ checks, options


def test_the_code_without_free_places_counts_and_goes_on() -> None:
    policy = HybriMoECode(prefetch_size=3)
    run_tiny(policy, tiny_workload(policy), 4)
    once = policy.counters["overwrites"]
    assert once > 0
    run_tiny(policy, tiny_workload(policy), 4)
    assert policy.counters["overwrites"] == once  # counted afresh in each run


def test_the_prefetch_plans_as_the_assignment_reads_the_paper() -> None:
    policy = HybriMoEPaper(assignment={"name": "queues", "timeline": "free", "ties": "cpu"})
    policy.place(FakeView())
    assert policy.parts.prefetch.reading == Reading("free", "cpu")  # type: ignore[attr-defined]


RANDOM = {"prefetch": {"name": "random", "size": 2, "pool": "cache"}}
SHARED = {"n_shared": 1, "shared_intermediate": 256}
# (part, option) -> changed value, what is set on both sides, other parts of the system, and how it is run.
OPTIONS: dict[tuple[str, str], tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    ("queues", "timeline"): ("free", {}, {}, {}),
    ("queues", "ties"): ("link", {}, {}, {}),
    ("queues", "count_compute"): (True, {}, {}, {}),
    ("queues", "overtake"): (False, {}, RANDOM, {}),
    ("queues", "shared_in_plan"): (True, {}, {}, SHARED),
    ("hss", "costs"): ("code", {}, {}, {}),
    ("hss", "cpu_per_row"): ("mixtral", {"costs": "code"}, {}, {}),
    ("hss", "cached_from"): ("start", {}, {"prefetch_size": 6}, {}),
    ("hss", "multi_row"): ("cpu-and-gpu", {}, {}, {"batch": 4}),
    ("mrs", "alpha"): (0.05, {}, {}, {}),
    ("mrs", "p"): (1, {}, {}, {}),
    ("mrs", "tokens"): ("first", {}, {}, {}),
    ("mrs", "credit"): ("by-id", {}, {}, {}),
    ("mrs-score", "size"): (3, {}, {}, {}),
    ("mrs-score", "over"): ("non-resident", {}, {}, {}),
    ("mrs-score", "alpha"): (0.05, {"over": "non-resident"}, {}, {}),
    ("mrs-score", "p"): (1, {"over": "non-resident"}, {}, {}),
    ("mrs-score", "tokens"): ("mean", {"over": "non-resident"}, {}, {}),
    ("mrs-score", "credit"): ("own", {"over": "non-resident"}, {}, {}),
    ("impact-driven", "source"): ("synthetic:0.1", {"budget": "none"}, {}, {}),
    ("impact-driven", "lookahead"): (1, {"budget": "none"}, {}, {}),
    ("impact-driven", "budget"): ("none", {}, {}, {}),
    ("impact-driven", "candidates"): (1, {}, {}, {"slots": 35, "batch": 3, "n_experts": 16, "top_k": 4}),
}


def happened(part: str, options: dict[str, Any], others: dict[str, Any], how: dict[str, Any]) -> Any:
    """Run the system of a part with it, on the rows that it has something to say about."""
    kind = next(kind for kind, parts in PARTS.items() if part in parts)
    system, batch = ("hybrimoe-code", 1) if part in ("hss", "mrs-score") else ("hybrimoe-paper", 4)
    how = {"batch": batch, **how}
    policy = make_policy({"name": system, kind: {"name": part, **options}, **others})
    shape = {name: how[name] for name in ("n_experts", "top_k") if name in how}
    records = run_tiny(policy, tiny_workload(policy, how.pop("batch"), **shape), **{"slots": 12, **how})
    return records.tasks, records.transfers, records.evictions


@pytest.mark.parametrize(("part", "option"), OPTIONS)
def test_an_option_of_a_part_changes_what_happens(part: str, option: str) -> None:
    value, common, others, how = OPTIONS[part, option]
    assert happened(part, {**common, option: value}, others, how) != happened(part, common, others, how)


def test_the_side_lane_takes_the_predictions() -> None:
    """The GPU's experts begin at once; the prediction is done 10 later, as before."""
    devices = {"gpu0": gpu(predict={"told": 10}), "cpu0": cpu()}
    wires = machine(devices, contention=[pair("gpu0.side", "gpu0.experts", 1, 1)])
    prefetch = {"name": "impact-driven", "source": "told", "lookahead": 1, "lane": "side"}
    records = run({"name": "hybrimoe-paper", "prefetch": prefetch}, 4, AHEAD, wires, predictors={"told": Oracle()})
    assert tasks(records)[1:3] == [(100, 110, "gpu0*", "predict"), (100, 200, "gpu0", "E0x1")]


def test_no_option_of_a_part_is_left_out() -> None:
    for kind, part in (("assignment", "queues"), ("assignment", "hss"), ("replacement", "mrs"), ("prefetch", "mrs-score"),
                       ("prefetch", "impact-driven")):  # fmt: skip
        known = {option for name, option in OPTIONS if name == part}
        assert set(options_of(part_class(kind, part))) - {"lane", "victims"} == known, part  # those: test_policy_options.py
