"""The thread that submits experts, with timelines drawn by hand; costs are those of `engine_kit`, times in ns."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from moesim.policy import Copy, Fetch, Run
from tests.engine.engine_kit import Script, crossings, machine, play, tasks, transfers, workload

ALL = [Copy(layer, range(4), "gpu0") for layer in (0, 1)]
ONE = workload([[[[0, 1], [2, 3]]]])  # one request, one decode step: layer 0 -> 0, 1; layer 1 -> 2, 3


def host(ns: int = 0, *, shared: bool = False) -> Any:
    return replace(machine(), host_expert_us=Fraction(ns, 1000), host_shared=shared)


def on_gpu(event: Any, view: Any) -> list[Any]:
    return [Run(event.layer, event.active, "gpu0")]


def test_experts_are_submitted_one_after_the_other():
    # thread      |0 |1 |              each 30; the GPU computes the first while the second waits for nothing any more
    # gpu0   DDDDD   |00000|11111|
    records = play(Script(copies=ALL, routed=on_gpu), ONE, host(30))
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (130, 230, "gpu0", "E0x1"), (230, 330, "gpu0", "E1x1"),
        (330, 430, "gpu0", "dense"), (460, 560, "gpu0", "E2x1"), (560, 660, "gpu0", "E3x1"),
    ]  # fmt: skip
    assert [(d.start, d.end) for d in records.decisions] == [(100, 130), (130, 160), (430, 460), (460, 490)]


def test_a_thread_slower_than_the_gpu_sets_the_pace():
    # thread      |0000000|1111111|        150 each, experts 100
    records = play(Script(copies=ALL, routed=on_gpu), ONE, host(150))
    assert tasks(records)[1:3] == [(250, 350, "gpu0", "E0x1"), (400, 500, "gpu0", "E1x1")]
    assert records.makespan_ns == 2 * (100 + 150 + 150 + 100)


def test_copies_do_not_wait_for_the_thread():
    def on_demand(event: Any, view: Any) -> list[Any]:
        return [Fetch(event.layer, event.active, "gpu0"), Run(event.layer, event.active, "gpu0")]

    records = play(Script(routed=on_demand), ONE, host(150))
    assert transfers(records)[0][:2] == (100, 1100)  # begins at Routed
    assert tasks(records)[1] == (1100, 1200, "gpu0", "E0x1")  # submitted at 250, its weights are there at 1100


def cpu_first(event: Any, view: Any) -> list[Any]:
    return [Run(event.layer, event.active[:1], "cpu0"), Run(event.layer, event.active[1:], "gpu0")]


def gpu_first(event: Any, view: Any) -> list[Any]:
    return cpu_first(event, view)[::-1]


def test_a_thread_of_its_own_lets_both_devices_work():
    # gpu0   DDDDD|11111|                      cpu0 from 120 to 520, its rows back at 540
    for order in (cpu_first, gpu_first):
        records = play(Script(copies=ALL, routed=order), ONE, machine())
        assert tasks(records)[1:3] == [(100, 200, "gpu0", "E1x1"), (120, 520, "cpu0", "E0x1")]


def test_a_shared_thread_submits_nothing_while_it_computes():
    # cpu0         |in|0000000000|out|
    # gpu0   DDDDD               |11111|
    records = play(Script(copies=ALL, routed=cpu_first), ONE, host(shared=True))
    assert tasks(records)[1:3] == [(120, 520, "cpu0", "E0x1"), (520, 620, "gpu0", "E1x1")]
    assert records.steps[-1].end == 2 * 620
    assert crossings(records)[:2] == [(100, 120, "gpu0->cpu0", "in", 1), (520, 540, "cpu0->gpu0", "out", 1)]


def test_a_shared_thread_that_submits_the_gpus_experts_first_loses_nothing():
    records = play(Script(copies=ALL, routed=gpu_first), ONE, host(shared=True))
    assert tasks(records)[1:3] == [(100, 200, "gpu0", "E1x1"), (120, 520, "cpu0", "E0x1")]


def test_both_add_up():
    # thread      |0 |---computes 0---|1 |     E0: submitted at 130, its rows are there at 120, computed until 530; E1 at 560
    records = play(Script(copies=ALL, routed=cpu_first), ONE, host(30, shared=True))
    assert tasks(records)[1:3] == [(130, 530, "cpu0", "E0x1"), (560, 660, "gpu0", "E1x1")]
