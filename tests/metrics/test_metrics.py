"""Metrics over hand-made records, with exact expected integers; times are in ns."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import SimulationError
from moesim.metrics import bytes_moved, counts, fidelity, fidelity_fresh_decode, summarise
from moesim.metrics.breakdown import CAUSES, breakdown, cut_windows
from moesim.metrics.chain import Chain
from moesim.metrics.hits import default_warm_up, hit_rates
from moesim.metrics.latency import mean, percentile, token_times
from moesim.metrics.machine import Machine
from moesim.metrics.timeline import check_timeline, timeline_events
from moesim.metrics.utilisation import busy, common_ns, energy_j, union, utilisation
from moesim.policies.registry import make_policy
from moesim.policy import Copy, Run
from moesim.records import (
    ActivationRecord,
    DecisionRecord,
    InexactRecord,
    LayerRecord,
    LookupRecord,
    Records,
    StepRecord,
    TaskRecord,
    TransferRecord,
)  # fmt: skip
from moesim.testing import run_tiny, tiny_machine, tiny_workload
from tests.effort import lines_run
from tests.engine.engine_kit import Script, cpu, gpu, machine, play, sure, tiny_model, workload

KINDS = {"gpu0": "gpu", "cpu0": "cpu"}
H2D, D2H = "cpu0->gpu0", "gpu0->cpu0"
MACHINE = Machine(KINDS, (H2D, D2H))


def task(
    start, end, kind="expert", expert=-1, *, device="gpu0", lane="main", step=0, layer=0, submitted=None, ready=None, rows=1
):
    """A task; by default submitted and ready when it starts."""
    submitted = start if submitted is None else submitted
    ready = submitted if ready is None else ready
    return TaskRecord(start, end, device, lane, kind, step, layer, 0, expert, rows, end - start, submitted, ready)


def transfer(
    start, end, expert, cause="demand", *, layer=0, link=H2D, submitted=None, fetch=None, last=True, n_bytes=100, waited=False
):
    """A transfer; by default submitted when it starts."""
    urgency = {"demand": 0, "prefetch": 1}.get(cause, 2)
    submitted = start if submitted is None else submitted
    number = 1000 + expert if fetch is None else fetch
    return TransferRecord(start, end, link, cause, layer, expert, n_bytes, urgency, submitted, number, last, waited)


def one_layer(end, *tasks, transfers=(), activations=(), decisions=(), begin=0):
    """Records of one decode step with one layer."""
    run = Records(makespan_ns=end)
    run.tasks.extend(tasks)
    run.transfers.extend(transfers)
    run.activations.extend(activations)
    run.decisions.extend(decisions)
    run.layers.append(LayerRecord(begin, end, 0, 0))
    run.steps.append(StepRecord(0, end, 0, "decode", 0, 1, 1, 1.0))
    return run


def charged(run, media=None):
    """Causes with any time."""
    total = breakdown(run, KINDS, media).total()
    assert sum(total.values()) == run.makespan_ns
    return {cause: ns for cause, ns in total.items() if ns}


# --------------------------------------------------------------------------------------- time by cause


def test_everything_resident_is_dense_and_gpu_experts():
    """
    gpu0 |dense 10|E1 5|E2 5|
    """
    run = one_layer(20, task(0, 10, "dense"), task(10, 15, expert=1), task(15, 20, expert=2, submitted=10, ready=10))
    assert charged(run) == {"dense": 10, "gpu_experts": 10}


def test_demand_fetch_is_exposed_only_after_what_hides_it():
    """
    gpu0 |dense 10|E1 5|...........|E2 5|
    link .........|E2 demand 20        |
         0        10   15          30  35
    """
    late = task(30, 35, expert=2, submitted=10, ready=30)
    run = one_layer(35, task(0, 10, "dense"), task(10, 15, expert=1), late, transfers=[transfer(10, 30, 2)])
    # The walk goes back along what E2 waited for, its fetch, and does not see E1 in its shadow.
    assert charged(run) == {"dense": 10, "gpu_experts": 5, "exposed_demand": 20}


def test_demand_waits_behind_a_prefetch_in_flight():
    """
    gpu0 |dense 10|............|E2 5|
    link |E9 prefetch 16 |E2 10 |
         0        10     16     26  31
    """
    copies = [transfer(0, 16, 9, "prefetch"), transfer(16, 26, 2, submitted=10)]
    run = one_layer(31, task(0, 10, "dense"), task(26, 31, expert=2, submitted=10, ready=26), transfers=copies)
    # The prefetch stands in the way from its own start, which is the begin of the layer.
    assert charged(run) == {"gpu_experts": 5, "exposed_demand": 10, "exposed_prefetch": 16}


def test_late_prefetch_is_clipped_to_its_layer():
    """
    layer  |   L0     |        L1           |
    gpu0   |dense 10  |dense 10 |....|E2 5  |
    link   ....|L1/E2 prefetch 20    |
           0   4      10        20   24     29
    """
    run = Records(makespan_ns=29)
    run.tasks += [task(0, 10, "dense"), task(10, 20, "dense", layer=1), task(24, 29, expert=2, layer=1, submitted=20, ready=24)]
    run.transfers.append(transfer(4, 24, 2, "prefetch", layer=1))
    run.layers += [LayerRecord(0, 10, 0, 0), LayerRecord(10, 29, 0, 1)]
    run.steps.append(StepRecord(0, 29, 0, "decode", 0, 1, 1, 2.0))
    split = breakdown(run, KINDS)
    assert split.ns.sum(axis=1).tolist() == [10, 19]
    assert charged(run) == {"dense": 10, "gpu_experts": 5, "exposed_prefetch": 14}


def test_what_the_end_of_the_run_cuts_off_moves_bytes_and_is_charged_for_nothing():
    """
    gpu0 |dense 10|E2 8   |..|         nobody waited for the copy, though it alone is under way from 18 on
    link |E3 prefetch ...    |         60 of 100 bytes have moved
         0       10     18  20
    """
    run = one_layer(20, task(0, 10, "dense"), task(10, 18, expert=2))
    run.transfers.append(transfer(0, 20, 3, "prefetch", last=False, n_bytes=60)._replace(left=40))
    assert charged(run) == {"dense": 10, "gpu_experts": 8, "idle": 2}
    moved = bytes_moved(run)
    assert (moved["bytes_prefetch_wasted"], moved["bytes_total"], moved["bytes_per_decode_token"]) == (60, 60, 60)
    shares = utilisation(busy(run, KINDS, [H2D]))
    assert shares[f"utilisation.{H2D}"] == shares["pcie_share"] == 1
    assert shares["overlap_share"] == 0.9


def test_update_on_the_link_is_other_transfer():
    """
    gpu0 |dense 10|............|E2 5|
    link ....|E9 update 12|E2 8|
         0   4        10  16   24   29
    """
    copies = [transfer(4, 16, 9, "update"), transfer(16, 24, 2, submitted=10)]
    run = one_layer(29, task(0, 10, "dense"), task(24, 29, expert=2, submitted=10, ready=24), transfers=copies)
    # Before 4 nothing that the update waited for is known, and nothing ended: idle.
    assert charged(run) == {"gpu_experts": 5, "exposed_demand": 8, "exposed_other_transfer": 12, "idle": 4}


def test_cpu_experts_and_activations():
    """
    gpu0    |dense 10|E1 5|
    control .........|in 2|......|out 3|
    cpu0    ..............|E7 20 |
            0        10  12      32    35
    """
    states = [ActivationRecord(10, 12, D2H, 0, 0, 1, 8, "in", 10), ActivationRecord(32, 35, H2D, 0, 0, 1, 8, "out", 32)]
    on_cpu = task(12, 32, expert=7, device="cpu0", submitted=10, ready=12)
    run = one_layer(35, task(0, 10, "dense"), task(10, 15, expert=1), on_cpu, activations=states)
    assert charged(run) == {"dense": 10, "cpu_experts": 20, "activation": 5}


@pytest.mark.parametrize("cpu_end", [19, 20, 21])
def test_a_tie_at_the_layer_end_goes_to_the_gpu(cpu_end):
    """
    gpu0 |dense 10|E1 10    |
    cpu0 .........|E7 9..11 |
    """
    run = one_layer(max(20, cpu_end), task(0, 10, "dense"), task(10, 20, expert=1), task(10, cpu_end, expert=7, device="cpu0"))
    expected = {"cpu_experts": 11} if cpu_end == 21 else {"gpu_experts": 10}
    assert charged(run) == {"dense": 10, **expected}


def test_a_prefetch_that_ends_with_the_layer_does_not_count():
    """
    gpu0 |dense 10|........|
    cpu0 .........|E7 10   |
    link ....|E9 prefetch 16 |   ends at the same time by chance
    """
    copies = [transfer(4, 20, 9, "prefetch", layer=1)]
    run = one_layer(20, task(0, 10, "dense"), task(10, 20, expert=7, device="cpu0"), transfers=copies)
    assert charged(run) == {"dense": 10, "cpu_experts": 10}


def test_decision_time_lies_between_the_router_and_the_runs():
    """
    gpu0     |dense 10|........|E1 5|
    decision .........|3|
    """
    run = one_layer(18, task(0, 10, "dense"), task(13, 18, expert=1), decisions=[DecisionRecord(10, 13, 0, 0)])
    assert charged(run) == {"dense": 10, "gpu_experts": 5, "decision": 3}


@pytest.mark.parametrize(("decisions", "gpu", "cpu"), [([], 10, 5), ([DecisionRecord(15, 20, 0, 0)], 0, 15)])
def test_what_runs_as_soon_as_asked_waited_for_its_device_only_if_a_decision_ended_then(decisions, gpu: int, cpu: int):
    """
    gpu0 |dense 10|E1 10|
    cpu0 .........|E2 10|E3 5|
    """
    runs = (task(10, 20, expert=1), task(10, 20, expert=2, device="cpu0"), task(20, 25, expert=3, device="cpu0"))
    found = charged(one_layer(25, task(0, 10, "dense"), *runs, decisions=decisions))
    assert found == {"dense": 10, "cpu_experts": cpu} | ({"gpu_experts": gpu} if gpu else {})


def test_prediction_on_the_main_lane_delays_the_device():
    """
    gpu0 |dense 10|predict 4|E1 5|
    """
    run = one_layer(19, task(0, 10, "dense"), task(10, 14, "predict", layer=1), task(14, 19, expert=1, submitted=10, ready=10))
    assert charged(run) == {"dense": 10, "gpu_experts": 5, "predict": 4}


def test_waves_wait_for_memory():
    """The second fetch waits until E1 has run and made room: what it waited for is the GPU.

    gpu0 |dense 10|......|E1 6|......|E2 6|
    link .........|E1 10 |....|E2 10 |
         0        10     20   26     36   42
    """
    experts = (task(20, 26, expert=1, submitted=10, ready=20), task(36, 42, expert=2, submitted=10, ready=36))
    copies = [transfer(10, 20, 1), transfer(26, 36, 2, submitted=10, waited=True)]
    run = one_layer(42, task(0, 10, "dense"), *experts, transfers=copies)
    assert charged(run) == {"dense": 10, "gpu_experts": 12, "exposed_demand": 20}


def test_links_of_one_medium_wait_for_each_other():
    """
    gpu0        |dense 10|...............|E1 5|
    nic0->gpu1  .........|E8 update 6|
    cpu0->gpu0  .....................|E1 4|
                0        10          16  20  25
    """
    machine = {**KINDS, "gpu1": "gpu"}
    by_chance = task(10, 16, "dense", device="cpu0")  # it ends with the update
    copies = [transfer(10, 16, 8, "update", link="cpu0->gpu1"), transfer(16, 20, 1, submitted=10)]
    run = one_layer(25, task(0, 10, "dense"), by_chance, task(20, 25, expert=1, submitted=10, ready=20), transfers=copies)
    split = breakdown(run, machine, {H2D: "root", "cpu0->gpu1": "root"}).total()
    assert (split["exposed_other_transfer"], split["exposed_demand"]) == (6, 4)
    assert breakdown(run, machine).total()["exposed_other_transfer"] == 0  # unrelated links


def test_two_hops_are_followed_back():
    """
    disk->cpu0 .........|E1 8 |
    cpu0->gpu0 ...............|E1 4|
    gpu0       |dense 10|..........|E1 5|
    """
    tasks = (task(0, 10, "dense"), task(5, 18, "dense", device="cpu0"), task(22, 27, expert=1, submitted=10, ready=22))
    hops = [transfer(10, 18, 1, link="disk->cpu0", fetch=1, last=False), transfer(18, 22, 1, submitted=10, fetch=1)]
    run = one_layer(27, *tasks, transfers=hops)
    assert charged(run) == {"dense": 10, "gpu_experts": 5, "exposed_demand": 12}


def test_activations_that_share_the_link_are_activations():
    """
    gpu0 |dense 10|..........|
    cpu0 ............|E7 8  |
    links .........|in 2|....|out 2|   as transfers
    """
    there = transfer(10, 12, -1, "activation", link=D2H, fetch=1, n_bytes=8)
    back = transfer(20, 22, -1, "activation", fetch=2, n_bytes=8)
    on_cpu = task(12, 20, expert=7, device="cpu0", submitted=10, ready=12)
    run = one_layer(22, task(0, 10, "dense"), on_cpu, transfers=[there, back])
    assert charged(run) == {"dense": 10, "cpu_experts": 8, "activation": 4}
    moved = bytes_moved(run)
    assert (moved["bytes_activation"], moved["bytes_total"]) == (16, 0)


def test_outside_the_layers_and_between_steps():
    """
    step  |      0               |gap|     1      |
    gpu0  |embed 2|dense 10|head 3|...|embed 2|dense 10|head 3|
    """
    run = Records(makespan_ns=34)
    for step, at in ((0, 0), (1, 19)):
        run.tasks.append(task(at, at + 2, "embedding", step=step, layer=-1))
        run.tasks.append(task(at + 2, at + 12, "dense", step=step))
        run.tasks.append(task(at + 12, at + 15, "head", step=step, layer=-1))
        run.layers.append(LayerRecord(at + 2, at + 12, step, 0))
        run.steps.append(StepRecord(at, at + 15, step, "decode", 0, 1, 1, 1.0))
    first, second = [(0, 2, 0, -1), (2, 12, 0, 0), (12, 15, 0, -1)], [(19, 21, 1, -1), (21, 31, 1, 0), (31, 34, 1, -1)]
    assert [tuple(w) for w in cut_windows(run)] == [*first, (15, 19, -1, -1), *second]
    assert charged(run) == {"dense": 30, "idle": 4}
    split = breakdown(run, KINDS)
    assert sum(split.select({1}).values()) == 15


def test_pools_stand_in_the_order_of_their_names():
    peaks = {("gpu0", "staging"): 1, ("gpu0", "cache"): 2, ("cpu0", "shadow"): 3, ("gpu0", "buffer"): 4}
    row = summarise(Records(makespan_ns=1, pool_peak_bytes=peaks), MACHINE)
    found = [(key, value) for key, value in row.items() if key.startswith("peak_pool_bytes.")]
    names = ("cpu0.shadow", "gpu0.buffer", "gpu0.cache", "gpu0.staging")
    assert found == [(f"peak_pool_bytes.{name}", n) for name, n in zip(names, (3, 4, 2, 1), strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_windows_are_in_time_order_in_whatever_order_layers_and_steps_are_recorded(seed: int):
    """
    step  |0          |gap|1     |2|
    layer | 0 | 1 |       | 0 |      and visits of no step, one of them beyond all numbers of steps
    """
    rng, run = random.Random(seed), Records(makespan_ns=50)
    steps = [(0, 20, 0), (25, 35, 1), (35, 40, 2)]
    layers = [(2, 8, 0, 0), (8, 8, 0, 2), (8, 15, 0, 1), (26, 30, 1, 0), (31, 33, 9, 0), (45, 46, -2, 0)]
    for begin, end, step in rng.sample(steps, len(steps)):
        run.steps.append(StepRecord(begin, end, step, "decode", 0, 1, 1, 1.0))
    for layer in rng.sample(layers, len(layers)):
        run.layers.append(LayerRecord(*layer))
    assert [tuple(w) for w in cut_windows(run)] == [
        (0, 2, 0, -1), (2, 8, 0, 0), (8, 15, 0, 1), (15, 20, 0, -1), (20, 25, -1, -1), (25, 26, 1, -1), (26, 30, 1, 0),
        (30, 35, 1, -1), (35, 40, 2, -1), (40, 50, -1, -1),
    ]  # fmt: skip


def test_overlapping_layers_are_refused():
    run = one_layer(20, task(0, 20, "dense"))
    run.layers.append(LayerRecord(5, 15, 0, 1))
    with pytest.raises(SimulationError, match="expected windows in time order"):
        breakdown(run, KINDS)
    assert charged(Records()) == {}


@st.composite
def schedules(draw):
    """Records of a tiny list scheduler: dense parts, then experts on both devices, some fetched or late."""
    run, duration = Records(), st.integers(0, 9)
    now = link_free = n_fetches = 0
    for step in range(draw(st.integers(1, 3))):
        begin = now
        embed = draw(duration)
        run.tasks.append(task(now, now + embed, "embedding", step=step, layer=-1))
        now += embed
        for layer in range(draw(st.integers(1, 3))):
            start = now
            routed = now + draw(duration)
            run.tasks.append(task(start, routed, "dense", step=step, layer=layer))
            decided = routed + draw(st.sampled_from([0, 0, 3]))
            run.decisions.append(DecisionRecord(routed, decided, step, layer))
            free = {"gpu0": decided, "cpu0": decided}
            for expert in range(draw(st.integers(0, 4))):
                device = draw(st.sampled_from(["gpu0", "cpu0"]))
                ready = decided
                if device == "gpu0" and draw(st.booleans()):
                    cause = draw(st.sampled_from(["demand", "prefetch", "update"]))
                    submitted = draw(st.integers(start, decided)) if cause != "demand" else decided
                    at = max(link_free, submitted)
                    link_free = at + draw(st.integers(1, 9))
                    n_fetches += 1
                    copy = transfer(at, link_free, expert, cause, layer=layer, submitted=submitted, fetch=n_fetches)
                    run.transfers.append(copy)
                    ready = max(ready, link_free)
                begins = max(free[device], ready)
                free[device] = begins + draw(duration)
                place = {"expert": expert, "device": device, "step": step, "layer": layer}
                run.tasks.append(task(begins, free[device], **place, submitted=decided, ready=ready))
            now = max(free.values()) + draw(st.sampled_from([0, 0, 0, 2]))
            run.layers.append(LayerRecord(start, now, step, layer))
        run.steps.append(StepRecord(begin, now, step, "decode", 0, 1, 1, 1.0))
    run.makespan_ns = now
    return run


@settings(max_examples=150)
@given(schedules())
def test_the_causes_always_add_up(run):
    split = breakdown(run, KINDS)
    assert int(split.ns.min(initial=0)) >= 0
    assert [w.end - w.begin for w in split.windows] == split.ns.sum(axis=1).tolist()
    total = split.total()
    assert list(total) == list(CAUSES)
    assert sum(total.values()) == run.makespan_ns
    # No cause is charged more than its devices or links were busy.
    gpu = sum(t.end - t.start for t in run.tasks if t.expert >= 0 and t.device == "gpu0")
    assert total["gpu_experts"] <= gpu
    demand = sum(t.end - t.start for t in run.transfers if t.cause == "demand")
    assert total["exposed_demand"] <= demand


def of_visits(n):
    """So many layer visits of four records each."""
    run, now = Records(), 0
    for i in range(n):
        run.tasks.append(task(now, now + 10, "dense", layer=i))
        run.tasks.append(task(now + 30, now + 35, expert=1, layer=i, submitted=now + 10, ready=now + 30))
        run.transfers.append(transfer(now + 10, now + 30, 1, layer=i))
        run.layers.append(LayerRecord(now, now + 35, 0, i))
        now += 35
    run.steps.append(StepRecord(0, now, 0, "decode", 0, 1, 1, 1.0))
    run.makespan_ns = now
    return run


def test_a_run_twice_as_long_is_twice_the_work():
    few, many = of_visits(200), of_visits(400)
    assert breakdown(many, KINDS).total()["exposed_demand"] == 400 * 20
    assert lines_run(lambda: breakdown(many, KINDS)) < 2.1 * lines_run(lambda: breakdown(few, KINDS))


# ------------------------------------------------------------------------------------------- hit rates


def looked(step, layer, active, hits, *, at=0, mb=0, loads=None, in_flight=None):
    """A lookup record."""
    n = len(active)
    return LookupRecord(at, step, layer, mb, tuple(active), tuple(loads or [1] * n), tuple(hits), tuple(in_flight or [0] * n))


def run_what_is_there(run):
    """Let the GPU run what lookups find."""
    for r in run.lookups:
        run.tasks += [
            task(r.time, r.time + 1, expert=e, step=r.step, layer=r.layer)
            for e, hit in zip(r.active, r.hits, strict=True) if hit
        ]  # fmt: skip


def test_hit_rates_by_convention():
    run = Records(makespan_ns=100)
    for number, phase in enumerate(["prefill", "decode", "decode", "decode"]):
        run.steps.append(StepRecord(number * 25, number * 25 + 25, number, phase, 0, 4, 1, 1.0))
    run.lookups += [
        looked(0, 0, [1, 2, 3], [0, 0, 1], loads=[6, 1, 1]),
        looked(1, 0, [1, 4], [1, 0], in_flight=[0, 1]),
        looked(2, 0, [1], [1]),
        looked(3, 0, [1, 2], [1, 1]),
    ]
    run_what_is_there(run)
    rates = hit_rates(run, KINDS)
    assert rates["warm_up_steps"] == 1
    assert rates["n_lookups"] == 8
    assert rates["hit_rate"] == 5 / 8
    assert rates["hit_rate_prefill"] == rates["hit_rate_cold"] == 1 / 3
    assert rates["hit_rate_decode"] == rates["hit_rate_warm"] == rates["hit_rate_decode_warm"] == 4 / 5
    assert rates["hit_rate_per_token"] == 5 / 13  # 1 of 8 slots in the prefill, 4 of 5 after it
    assert rates["in_flight_share"] == 1 / 8
    assert hit_rates(run, KINDS, warm_up_steps=0)["hit_rate_cold"] is None
    assert [default_warm_up(n) for n in (0, 3, 4, 64, 65, 1000)] == [0, 0, 1, 16, 16, 16]


def test_an_expert_counts_once_a_visit_whatever_the_micro_batches():
    run = Records(makespan_ns=10)
    run.steps.append(StepRecord(0, 10, 0, "decode", 0, 4, 4, 1.0))
    run.lookups += [looked(0, 0, [1, 2], [0, 1], mb=0), looked(0, 0, [1, 3], [1, 0], mb=1, loads=[3, 1])]
    run_what_is_there(run)
    rates = hit_rates(run, KINDS)
    assert rates["n_lookups"] == 3
    assert rates["hit_rate"] == 1 / 3  # E1 missed when it was first wanted
    assert rates["hit_rate_per_token"] == 4 / 6


def test_a_hit_is_what_a_gpu_ran_from_a_copy_that_was_there():
    """Of ten lookups eight find a copy, and three of these experts run from it."""
    kinds = {"gpu0": "gpu", "gpu1": "gpu", "cpu0": "cpu"}
    run = Records(makespan_ns=100)
    run.steps += [StepRecord(0, 50, 0, "prefill", 0, 4, 1, 1.0), StepRecord(50, 100, 1, "decode", 0, 1, 1, 1.0)]
    run.lookups += [
        looked(0, 0, [0, 1, 2, 3, 4], [1, 1, 1, 1, 0], at=10, loads=[1, 2, 4, 8, 16]),
        looked(0, 0, [4], [1], at=15, mb=1, loads=[32]),
        looked(1, 0, [0, 1, 2], [1, 1, 1], at=60, loads=[1, 2, 4]),
        looked(1, 1, [0, 1], [1, 0], at=80, loads=[1, 2]),
    ]
    run.tasks += [
        task(10, 11, expert=0),  # a hit
        task(11, 12, expert=1, device="cpu0"),  # there, and not used
        task(30, 31, expert=2),  # from the copy that comes at 30: the one that was there has left
        task(31, 32, expert=3, device="gpu1"),  # from that GPU's copy, which is new
        task(14, 15, expert=4),  # a miss, but a hit for the rows of the second micro-batch
        task(16, 17, expert=4),
        task(60, 61, expert=0, step=1),  # a hit: what comes at 70 comes later
        task(70, 71, expert=0, step=1),
        task(66, 67, expert=1, step=1),  # a hit: a prefetch came once more
        # 2 is there, and nobody runs it; 0 of layer 1 is there, and the GPU runs another layer's
    ]
    run.transfers += [
        transfer(4, 14, 4), transfer(20, 30, 2), transfer(20, 31, 3, link="cpu0->gpu1"), transfer(50, 60, 0),
        transfer(61, 70, 0), transfer(62, 66, 1, "prefetch"),
    ]  # fmt: skip
    rates = hit_rates(run, kinds)
    assert rates["n_lookups"] == 10
    assert (rates["hit_rate"], rates["resident_rate"]) == (3 / 10, 8 / 10)
    assert (rates["hit_rate_prefill"], rates["resident_rate_prefill"]) == (1 / 5, 4 / 5)
    assert (rates["hit_rate_decode"], rates["resident_rate_decode"]) == (2 / 5, 4 / 5)
    assert rates["hit_rate_per_token"] == (1 + 32 + 1 + 2) / (31 + 32 + 7 + 3)


def test_prefetched_hits_of_decoding_are_over_its_lookups():
    """Prefetches serve one of two lookups of the prompt and two of four of decoding; the fourth is a hit of the cache."""
    run = Records(makespan_ns=100)
    run.steps += [StepRecord(0, 50, 0, "prefill", 0, 4, 1, 1.0), StepRecord(50, 100, 1, "decode", 0, 1, 1, 1.0)]
    run.transfers += [transfer(0, 10, 1, "prefetch"), transfer(20, 30, 3, "prefetch"), transfer(30, 40, 4, "prefetch")]
    run.lookups += [looked(0, 0, [1, 2], [1, 0], at=10), looked(1, 0, [1, 2, 3, 4], [1, 0, 1, 1], at=55)]
    run_what_is_there(run)
    rates = hit_rates(run, KINDS)
    assert (rates["hit_rate"], rates["hit_rate_decode"]) == (4 / 6, 3 / 4)
    assert (rates["prefetch_hit_share"], rates["prefetch_hit_share_decode"]) == (3 / 6, 2 / 4)


def test_prefetched_and_arrived_and_without_demand():
    run = Records(makespan_ns=100)
    run.steps += [StepRecord(0, 50, 0, "decode", 0, 1, 1, 1.0), StepRecord(50, 100, 1, "decode", 0, 1, 1, 1.0)]
    run.transfers += [
        transfer(0, 10, 1, "prefetch"),  # in time for the lookup at 10
        transfer(10, 20, 2, "demand"),
        transfer(20, 60, 3, "prefetch"),  # wanted at 55, comes at 60
    ]
    run.tasks += [task(10, 12, expert=1), task(20, 22, expert=2), task(55, 57, expert=1, step=1)]
    run.tasks += [task(57, 59, expert=2, step=1), task(60, 62, expert=3, step=1)]  # 2 is still there: it needs no fetch
    run.tasks.append(task(55, 90, expert=9, step=1, device="cpu0"))
    run.lookups += [looked(0, 0, [1, 2], [1, 0], at=10), looked(1, 0, [1, 2, 3, 9], [1, 1, 0, 0], at=55, in_flight=[0, 0, 1, 0])]
    rates = hit_rates(run, KINDS)
    assert rates["prefetch_hit_share"] == 1 / 6
    assert rates["no_demand_share"] == 4 / 5
    assert counts(run, KINDS)["gpu_run_share"] == 5 / 6


def test_a_fetch_for_a_later_micro_batch_counts_in_its_own_visit():
    """E1 comes twice in the first step, for each micro-batch, and is a plain hit in the second."""
    run = Records(makespan_ns=100)
    run.steps += [StepRecord(0, 50, 0, "decode", 0, 2, 2, 1.0), StepRecord(50, 100, 1, "decode", 0, 1, 1, 1.0)]
    run.transfers += [transfer(0, 10, 1, "demand", fetch=1), transfer(20, 30, 1, "demand", fetch=2)]
    run.tasks += [task(10, 12, expert=1), task(30, 32, expert=1), task(60, 62, expert=1, step=1)]
    assert hit_rates(run, KINDS)["no_demand_share"] == 1 / 2


# --------------------------------------------------------------------------------------------- latency


def steps(*rows):
    """Steps (phase, duration, tokens, sequences, batch) one after another."""
    run = Records()
    for number, (phase, duration, tokens, sequences, batch) in enumerate(rows):
        begin = run.makespan_ns
        run.makespan_ns += duration
        run.steps.append(StepRecord(begin, run.makespan_ns, number, phase, batch, tokens, sequences, 1.0))
    return run


def test_latency_of_two_batches():
    run = steps(
        ("prefill", 100, 32, 0, 0),  # first of two chunks
        ("prefill", 60, 20, 2, 0),
        ("decode", 10, 2, 2, 0),
        ("decode", 30, 1, 1, 0),
        ("prefill", 40, 8, 1, 1),
        ("decode", 20, 1, 1, 1),
    )
    ttft, between = token_times(run)
    assert ttft == [(160, 2), (40, 1)]
    assert between == [(10, 2), (30, 1), (20, 1)]
    row = summarise(run, MACHINE)
    assert row["ttft_mean_ns"] == (2 * 160 + 40) / 3
    assert row["tpot_mean_ns"] == 70 / 4
    assert (row["tpot_p50_ns"], row["tpot_p90_ns"], row["tpot_p99_ns"]) == (10, 30, 30)
    assert row["prefill_tokens_per_s"] == 60 * 1e9 / 200
    assert row["decode_tokens_per_s"] == 4 * 1e9 / 60
    assert row["decode_tokens_per_s_request"] == 1e9 / 17.5
    assert row["n_generated_tokens"] == 7


def test_latency_under_refill():
    """A request that stays waits for the prefill of the one that is admitted."""
    run = steps(("prefill", 50, 8, 2, 0), ("decode", 10, 2, 2, 0), ("prefill", 30, 4, 1, 0), ("decode", 12, 2, 2, 0))
    ttft, between = token_times(run)
    assert ttft == [(50, 2), (30, 1)]
    assert between == [(10, 2), (12, 1), (42, 1)]
    run = steps(("prefill", 50, 8, 1, 0), ("prefill", 30, 4, 1, 0))  # last chunks tell apart prompts without decoding
    assert token_times(run)[0] == [(80, 2)]
    assert token_times(run, {0, 1})[0] == [(50, 1), (30, 1)]


def test_decode_without_a_prompt():
    run = steps(("decode", 10, 1, 1, 0), ("decode", 30, 1, 1, 0))
    assert token_times(run) == ([], [(10, 1), (30, 1)])
    row = summarise(run, MACHINE)
    assert row["ttft_mean_ns"] is row["prefill_tokens_per_s"] is percentile([], 50) is mean([]) is None


# ------------------------------------------------------------------------ bytes, time shares, fidelity


def test_bytes_by_cause():
    run = steps(("prefill", 100, 8, 1, 0), ("decode", 100, 1, 1, 0))
    run.transfers += [
        transfer(0, 10, 1, n_bytes=7), transfer(10, 20, 2, "prefetch", fetch=2, n_bytes=11),
        transfer(100, 120, 3, "prefetch", fetch=3, n_bytes=13), transfer(120, 130, 4, "update", n_bytes=17),
        transfer(130, 140, 5, "write-back", link=D2H, n_bytes=19), transfer(140, 150, -1, "message", n_bytes=23),
    ]  # fmt: skip
    run.used_fetches.add(2)
    run.activations.append(ActivationRecord(0, 1, H2D, 0, 0, 1, 5, "out", 0))
    assert bytes_moved(run) == {
        "bytes_demand": 7, "bytes_prefetch_used": 11, "bytes_prefetch_wasted": 13, "bytes_update": 17, "bytes_write_back": 19,
        "bytes_message": 23, "bytes_activation": 5, "bytes_total": 90, "bytes_per_token": 45.0, "bytes_per_decode_token": 72.0,
    }  # fmt: skip
    assert counts(run, KINDS)["prefetch_used_share"] == 0.5


def test_utilisation_overlap_and_energy():
    """
    gpu0 |10|.....|5|....|   of 100
    cpu0 .....|20     |
    link ..|10 | .....    |20: beyond the end is cut to 10
    """
    tasks = (task(0, 10, "dense"), task(30, 35, expert=1), task(15, 35, expert=2, device="cpu0"))
    aside = task(31, 41, "predict", lane="side")
    run = one_layer(100, *tasks, aside, transfers=[transfer(5, 20, 1), transfer(90, 110, 2)])
    times = busy(run, KINDS, MACHINE.links)
    shares = utilisation(times)
    assert shares["utilisation.gpu0"] == 0.21  # the side lane counts, together once
    assert shares["utilisation.cpu0"] == 0.20
    assert shares[f"utilisation.{H2D}"] == shares["pcie_share"] == 0.25
    assert shares[f"utilisation.{D2H}"] == shares[f"control_utilisation.{H2D}"] == 0
    assert shares["overlap_share"] == 10 / 25  # 5..10 and 15..20 of 25
    joules = energy_j(times, {"gpu0": (20.0, 120.0), "cpu0": (50.0, 100.0)}, 30.0)
    assert joules * 1e9 == pytest.approx(100 * 100 + 100 * 21 + 50 * 20)
    row = summarise(run, Machine(KINDS, MACHINE.links, {}, {"gpu0": (20.0, 120.0), "cpu0": (50.0, 100.0)}, 30.0, "spec-sheet"))
    assert (row["energy_j_per_token"], row["energy_label"]) == (joules, "spec-sheet")
    assert summarise(run, MACHINE)["energy_j"] is None
    half = Machine.of(machine({"gpu0": gpu() | {"idle_w": sure(20.0)}, "cpu0": cpu() | {"busy_w": sure(100.0)}}))
    assert (half.power_w, half.energy_label) == ({}, None)


def test_unions():
    assert union([], 10).tolist() == []
    assert union([(5, 7), (0, 2), (2, 3), (6, 20)], 10).tolist() == [[0, 3], [5, 10]]
    assert common_ns(union([], 10), union([(0, 5)], 10)) == 0


def test_fidelity_adds_up_to_one():
    run = steps(("decode", 10, 2, 2, 0), ("decode", 10, 2, 2, 0))
    run.inexact += [InexactRecord(0, 0, "stale", 1, 0.25), InexactRecord(0, 0, "substituted-stale", 1, 0.125)]
    run.inexact.append(InexactRecord(1, 0, "skipped", 2, 0.5))
    assert fidelity(run) == {
        "fidelity_fresh": 0.5625, "fidelity_stale": 0.125, "fidelity_substituted": 0.0, "fidelity_substituted_stale": 0.0625,
        "fidelity_skipped": 0.25, "fidelity_late": 0.0, "fidelity_reduced": 0.0, "n_inexact_slots": 4,
    }  # fmt: skip
    assert fidelity(Records())["fidelity_fresh"] is None


def test_the_fidelity_of_decoding_leaves_the_prompt_out():
    run = steps(("prefill", 10, 6, 1, 0), ("decode", 10, 2, 2, 0))
    run.inexact.append(InexactRecord(1, 0, "stale", 1, 0.5))
    assert fidelity(run)["fidelity_fresh"] == 1 - 0.5 / sum(s.gate_mass for s in run.steps)
    assert fidelity_fresh_decode(run) == 1 - 0.5 / run.steps[1].gate_mass
    run.inexact.append(InexactRecord(0, 0, "stale", 1, 0.5))
    assert fidelity_fresh_decode(run) == 1 - 0.5 / run.steps[1].gate_mass
    assert fidelity_fresh_decode(steps(("prefill", 10, 6, 1, 0))) is None
    assert fidelity_fresh_decode(steps(("decode", 10, 2, 2, 0))) == 1


def test_summary_has_the_same_keys_for_any_run():
    busy_run = one_layer(10, task(0, 10, "dense"))
    assert list(summarise(busy_run, MACHINE)) == list(summarise(Records(), MACHINE))
    for value in summarise(busy_run, MACHINE).values():
        assert value is None or isinstance(value, (int, float, str))
        assert not isinstance(value, float) or math.isfinite(value)


def test_every_key_is_on_the_page_of_metrics():
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_.<>-]+)`", page))
    for key in summarise(Records(), MACHINE):
        general = re.sub(r"\.(gpu0->cpu0|cpu0->gpu0)$", ".<link>", key)
        general = re.sub(r"\.(gpu0|cpu0)$", ".<device>", general)
        general = re.sub(r"^(decode_)?time_(\w+)_ns$", r"\1time_<cause>_ns", general)
        assert general in named, key
    assert set(CAUSES) <= named


# ------------------------------------------------------------------------------- records of the engine


@pytest.mark.parametrize("name", ["on-demand", "fiddler", "dali", "mixtral-offloading"])
@pytest.mark.parametrize(("batch", "micro_batches", "decision_ns"), [(1, 1, 0), (4, 2, 0), (4, 1, 700)])
def test_real_records_leave_nothing_unexplained(name, batch, micro_batches, decision_ns):
    policy = make_policy(name)
    workload = tiny_workload(policy, batch, micro_batches)
    run = run_tiny(policy, workload, 8, decision_ns)
    machine = Machine.of(tiny_machine())
    split = breakdown(run, machine.kinds, machine.media)
    total = split.total()
    assert sum(total.values()) == run.makespan_ns
    assert total["idle"] == 0
    assert (total["decision"] > 0) == (decision_ns > 0)
    row = summarise(run, machine, steps=workload[1].steps)
    assert row == summarise(run, machine)  # the steps tell nothing new without refill
    assert row["fidelity_fresh"] == 1
    assert check_timeline(timeline_events(run, machine)) == []
    assert sum(split.select({s.step for s in run.steps}).values()) == run.makespan_ns


def test_the_walk_back_goes_by_ends_whatever_the_kinds_of_records():
    """What a CPU has computed is back at 540; an expert on the GPU ends last, at 1100, and nothing was waited for."""
    slow = machine({"gpu0": gpu(expert_ns=1000), "cpu0": cpu()})
    script = Script({("Routed", 0, 0, 0): [Run(0, [0], "gpu0"), Run(0, [1], "cpu0")]}, copies=[Copy(0, [0], "gpu0")])
    records = play(script, workload([[[[0, 1]]]]), slow, model=tiny_model(n_layers=1))
    found = {cause: ns for cause, ns in Chain(records, KINDS, {}).split([0]).items() if ns}
    assert found == {"dense": 100, "gpu_experts": 1000}
    assert records.makespan_ns == 1100


LAST = task(80, 100, expert=0)
NEEDS = {  # what runs from 60 to 80, asked for at 30, its cause, and all that it can have waited for until 60
    "expert": (task(60, 80, expert=0, submitted=30), "gpu_experts", {
        "exposed_demand": transfer(0, 60, 0), "exposed_other_transfer": transfer(0, 60, 0, "update"),
        "activation": transfer(0, 60, -1, "activation", link="cpu1->gpu0"),
        "gpu_experts": task(0, 60, expert=2), "decision": DecisionRecord(0, 60, 0, 0),
        "dense": task(0, 60, "dense", device="cpu0"),
    }),
    "dense": (task(60, 80, "dense", submitted=30), "dense", {
        "exposed_demand": transfer(0, 60, -1), "cpu_experts": task(0, 60, expert=0, device="cpu0"),
        "predict": task(0, 60, "predict"), "activation": ActivationRecord(0, 60, D2H, 0, 0, 0, 5, "out", 0),
    }),
    "copy": (transfer(60, 80, 0, submitted=30, fetch=7), "exposed_demand", {
        "exposed_prefetch": transfer(0, 60, 9, "prefetch"), "exposed_demand": transfer(0, 60, 0, link="disk->cpu0", fetch=7),
        "decision": DecisionRecord(0, 60, 0, 0),
    }),
    "crossing": (ActivationRecord(60, 80, "cpu0->gpu0", 0, 0, 0, 5, "out", 30), "activation", {
        "cpu_experts": task(0, 60, expert=2, device="cpu0", lane="side"), "decision": DecisionRecord(0, 60, 0, 0),
        "activation": ActivationRecord(0, 60, "cpu0->gpu0", 0, 0, 0, 5, "out", 0),
    }),
    "decision": (DecisionRecord(60, 80, 0, 0), "decision", {
        "dense": task(0, 60, "dense"), "decision": DecisionRecord(0, 60, 0, 0),
    }),
}  # fmt: skip
QUESTIONS = {  # what had happened before it was asked for held nothing up, but what led to the question
    "as it is asked for": ({"gpu_experts": 80, "dense": 20}, task(0, 60, expert=2), DecisionRecord(20, 60, 0, 0),
                           task(60, 80, "dense")),
    "before": ({"decision": 60, "waiting": 10, "dense": 10, "gpu_experts": 20}, DecisionRecord(0, 60, 0, 0),
               DecisionRecord(62, 70, 0, 1), task(0, 20, expert=2), task(70, 80, "dense", submitted=60)),
    "for memory": ({"gpu_experts": 80, "exposed_demand": 20}, task(0, 60, expert=2), transfer(0, 20, 4),
                   transfer(60, 80, 0, submitted=30, waited=True)),
    "for no part of a copy": ({"gpu_experts": 90, "waiting": 10}, task(0, 60, expert=2), transfer(0, 70, 0, last=False),
                              transfer(62, 70, -1, "update"), task(62, 70, expert=0, device="cpu0"),
                              task(70, 80, expert=0, submitted=60)),
}  # fmt: skip


def walked(*records) -> Counter[str]:
    """Follow what a run until 100 waited for; nothing waited for a task elsewhere, one of no time and a copy that was cut off."""
    run = one_layer(100, task(0, 30, "head", device="cpu1", layer=1), task(60, 60, "head"))
    run.transfers.append(transfer(0, 60, 0)._replace(left=1))
    for record in records:
        {TaskRecord: run.tasks, TransferRecord: run.transfers, ActivationRecord: run.activations,
         DecisionRecord: run.decisions}[type(record)].append(record)  # fmt: skip
    return +Counter(Chain(run, KINDS, {}).split([0]))


@pytest.mark.parametrize(("what", "cause"), [(what, cause) for what, (*_, needs) in NEEDS.items() for cause in needs])
def test_the_walk_back_finds_each_thing_that_can_be_waited_for(what: str, cause: str):
    record, its_cause, needs = NEEDS[what]
    assert walked(needs[cause], record, LAST) == Counter({cause: 60}) + Counter({its_cause: 20}) + Counter(gpu_experts=20)


@pytest.mark.parametrize("why", QUESTIONS)
def test_the_walk_back_goes_on_with_what_led_to_a_question(why: str):
    expected, *records = QUESTIONS[why]
    assert walked(*records, LAST) == expected


def test_the_walk_back_begins_with_what_ended_the_layer():
    crossing = ActivationRecord(70, 100, "cpu0->gpu0", 0, 0, 0, 5, "out", 70)
    assert walked(task(0, 70, expert=0, device="cpu0"), DecisionRecord(80, 100, 0, 1), crossing) == {
        "cpu_experts": 70,
        "activation": 30,
    }
