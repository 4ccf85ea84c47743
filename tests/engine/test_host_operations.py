"""Operations of an engine's code on the host, with timelines drawn by hand; costs are those of `engine_kit`, times in ns."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from moesim.errors import HardwareError
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.hardware.engines import load_engine, transfer_of
from moesim.hardware.types import OPERATIONS
from moesim.policies.registry import make_policy
from moesim.policy import Copy, Run, Work
from tests.engine.engine_kit import Script, machine, play, tasks, tiny_model, workload

ALL = [Copy(layer, range(4), "gpu0") for layer in (0, 1)]
ONE = workload([[[[0, 1], [2, 3]]]])  # one request, one decode step: layer 0 -> 0, 1; layer 1 -> 2, 3


def host(**ns: int) -> Any:
    return replace(machine(), host_us={name: Fraction(one, 1000) for name, one in ns.items()})


def test_a_layer_waits_for_the_host():
    # gpu0   DDDDD|LL|00000|11111|          two look-ups of 30
    def routed(event: Any, view: Any) -> list[Any]:
        return [Work("lookup", "gpu0", 2), Run(event.layer, event.active, "gpu0")]

    records = play(Script(copies=ALL, routed=routed), ONE, host(lookup=30))
    assert tasks(records)[:4] == [
        (0, 100, "gpu0", "dense"), (100, 160, "gpu0", "host"), (160, 260, "gpu0", "E0x1"), (260, 360, "gpu0", "E1x1"),
    ]  # fmt: skip
    assert records.makespan_ns == 2 * (100 + 60 + 200)


def test_a_helper_thread_is_asked_while_the_gpu_computes():
    # gpu0   DDDDD|00000|
    # cpu0        |HH|       |1111|         its rows cross meanwhile
    def routed(event: Any, view: Any) -> list[Any]:
        on_gpu, on_cpu = event.active
        return [Work("handover", "cpu0"), Run(event.layer, [on_gpu], "gpu0"), Run(event.layer, [on_cpu], "cpu0")]

    plain = play(Script(copies=ALL, routed=routed), ONE, host())
    asked = play(Script(copies=ALL, routed=routed), ONE, host(handover=500))
    cpu = [[task for task in tasks(records) if task[2] == "cpu0"] for records in (plain, asked)]
    assert [task[3] for task in cpu[1]][:2] == ["host", "E1x1"]
    assert (cpu[1][0][0], cpu[1][0][1], cpu[1][1][0]) == (100, 600, 600)
    assert cpu[0][0][0] < 600  # and without an operation's time nothing is recorded of it


def test_a_step_begins_after_the_host():
    def routed(event: Any, view: Any) -> list[Any]:
        return [Run(event.layer, event.active, "gpu0")]

    script = Script({("StepBegin", 0): [Work("table", "gpu0", 3)]}, copies=ALL, routed=routed)
    records = play(script, ONE, host(table=50))
    assert tasks(records)[:2] == [(0, 150, "gpu0", "host"), (150, 250, "gpu0", "dense")]


def test_an_unknown_operation_names_the_known_ones():
    with pytest.raises(HardwareError, match="unknown operation 'lookups'; did you mean 'lookup'"):
        CostModel(tiny_model(), host()).operation_ns("lookups")


def costs(policy: str, **options: Any) -> CostModel:
    hardware = load_hardware("RTX 5070 + Ryzen 9 7950X + 64GB DDR5-6000", engine="llama.cpp")
    made, model = make_policy({"name": policy, **options}), tiny_model(hidden=1024, expert_intermediate=512)
    return CostModel.of(made, model, hardware, transfer_of(made, model, hardware))


def test_copies_take_the_waits_of_their_system():
    plain, three, mapped = costs("lru"), costs("two-uploads-lru", mmap=False), costs("two-uploads-lru")
    times = [one.fetch_ns("cpu0", "gpu0") for one in (plain, three)]
    assert times[1] - times[0] == 26_000  # 13 us for each wait after the first, which the latency has
    assert mapped.fetch_ns("cpu0", "gpu0") > times[1]


def test_while_a_copy_is_waited_for_the_cpu_has_its_memory_alone():
    systems = costs("lru"), costs("two-uploads-lru", mmap=False), costs("two-uploads-lru")
    rates = [next(pair for pair in one.contention if pair.a == "cpu0.experts") for one in systems]
    assert rates[0].a_rate_ppm < rates[1].a_rate_ppm < 1_000_000
    assert {pair.b_rate_ppm for pair in rates} == {rates[0].b_rate_ppm}


def test_the_host_works_between_router_and_decision():
    # gpu0   DDDDD|HH|00000|11111|          and nothing else is asked for before
    def routed(event: Any, view: Any) -> list[Any]:
        return [Run(event.layer, event.active, "gpu0")]

    script = Script(copies=ALL, routed=routed)
    plain = CostModel(tiny_model(), host(readback=7, plan=20), each_layer=("readback", "plan", "plan"))
    assert (plain.layer_host_ns("gpu0"), plain.layer_host_ns("cpu0")) == (47, 0)
    records = play(script, ONE, host(readback=7, plan=20), each_layer=("readback", "plan", "plan"))
    assert tasks(records)[:3] == [(0, 100, "gpu0", "dense"), (100, 147, "gpu0", "host"), (147, 247, "gpu0", "E0x1")]
    assert records.makespan_ns == 2 * (100 + 47 + 200)


def test_an_engine_on_another_has_its_costs_and_its_own():
    base, own, split = (load_engine(name, "here").file for name in ("llama.cpp", "mosl", "moe-speed-of-light@split"))
    assert own.costs[: len(base.costs)] == base.costs and own.costs == split.costs
    machines = [load_hardware("rtx5070-ryzen9600x", engine=name) for name in ("llama.cpp", "mosl", "mosl@split")]
    latencies = [float(one.link("gpu0->cpu0").activation.latency_us) for one in machines]
    assert latencies == [17.3, 0, 17.3]
    assert [float(one.host_us["split"]) for one in machines] == [26.3, 0, 26.3]
    assert [float(one.host_us["lookup"]) for one in machines] == [4.6, 31.4, 31.4]


def test_every_operation_is_known_to_some_engine():
    known = {name for one in ("llama.cpp", "mosl", "vllm") for name in load_hardware("rtx5070-ryzen9600x", engine=one).host_us}
    assert known == OPERATIONS.keys()
