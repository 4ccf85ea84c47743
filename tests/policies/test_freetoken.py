"""FreeToken: both backends by hand, and whole layers for prompts."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import CapacityError
from moesim.policies.registry import make_policy
from moesim.policies.systems.freetoken import FreeToken
from moesim.records import Records
from tests.engine.engine_kit import cpu, gpu, link, machine, pair, play, tiny_model, transfers, workload
from tests.policies.caches_kit import FAST, copied, happened, run, served

OFFLOAD, HYBRID = ({"name": "freetoken", "backend": backend} for backend in ("offload", "hybrid"))


def rates(cpu_ns: int, link_ns: int, cpu_share: float = 1, link_share: float = 1) -> Any:
    """Make a machine by the times of an expert."""
    devices = {"gpu0": gpu(), "cpu0": cpu(expert_ns=cpu_ns, per_row_ns=0)}
    links = {"cpu0->gpu0": link(1000 / link_ns), "gpu0->cpu0": link()}
    return machine(devices, links, contention=[pair("cpu0.experts", "cpu0->gpu0", cpu_share, link_share)])


@pytest.mark.parametrize(("link_ns", "hybrid"), [(801, True), (800, False)])
def test_the_backend_by_rates(link_ns: int, hybrid: bool) -> None:
    # The CPU takes 400 for an expert. Hybrid takes no share of one miss then; offload copies it.
    records = run("freetoken", [[0]], 8, hardware=rates(400, link_ns))
    assert served(records) == [[] if hybrid else [0]]


@pytest.mark.parametrize(
    ("machine_", "share", "table"),
    [
        (rates(1567, 4016), 24.9 / (24.9 + 63.8), [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]),  # ns for 100 kB at 63.8 and 24.9 GB/s
        (rates(1399, 6757), 14.8 / (14.8 + 71.5), [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]),
        (rates(500, 1000, 0.5, 1), 0.5, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]),  # alone the CPU is twice as fast
    ],
)
def test_how_many_misses_the_link_takes(machine_: Any, share: float, table: list[int]) -> None:
    policy = FreeToken(backend="hybrid")
    steps = [[*range(10)]]
    model = tiny_model(n_layers=1, n_experts=10, top_k=10)
    records = play(policy, workload([[steps]], n_experts=10, weights=[0.1] * 10), machine_, model=model, slots={"gpu0": 10})
    assert policy._p == pytest.approx(share, abs=1e-3)
    assert [policy._n_now(0, range(m), ()) for m in range(11)] == table
    assert len(served(records)[0]) == table[10]


def test_the_link_takes_what_was_used_last_wherever_it_ran() -> None:
    # One miss a visit. 3 ran on the CPU in the second step, so that it goes before 1, which ran there in the first.
    steps = [[0, 1], [2, 3], [1, 3]]
    assert copied(run(HYBRID | {"max_fetch": 1}, steps, 8)) == [(0, 0), (1, 2), (2, 3)]
    assert copied(run(HYBRID | {"max_fetch": 1, "fetch_order": "lowest-id"}, steps, 8)) == [(0, 0), (1, 2), (2, 1)]


def test_the_cpu_computes_beside_the_copies_and_the_gpu_after_them() -> None:
    # 0 is there. Of 1, 2 and 3 the link takes 1 for 1000 ns; the rows of the others cross to the CPU in 20 ns.
    hardware = machine({"gpu0": gpu(), "cpu0": cpu()})
    records = run(HYBRID | {"max_fetch": 1}, [[0, 4, 5], [0, 1, 2]], 8, hardware=hardware)
    begin = records.steps[1].begin
    found = {t.expert: (t.start - begin, t.end - begin, t.device) for t in records.tasks if t.expert >= 0 and t.step == 1}
    assert found == {0: (1100, 1200, "gpu0"), 1: (1200, 1300, "gpu0"), 2: (120, 520, "cpu0")}


def test_fewer_slots_than_a_layer_has_experts_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"freetoken on gpu0: expected at least 8 cache slots, .* got 7; set cache.ratio"):
        run("freetoken", [[0]], 7)


# ---------------------------------------------------------------------------------------------------------------- prompts
def prompted(spec: Any, slots: int, *, layers: int = 2) -> Records:
    """Fill the cache with 0 and 1 of each layer, run a prompt that uses 2 and 3, then use 0 and 1 again."""
    first = [[[2, 3]] * layers, [[0, 1]] * layers]
    work = workload([[*first], [[[2, 3]] * layers, [[0, 1]] * layers]], prompt=1, n_experts=4, batch_size=1)
    model = tiny_model(n_layers=layers, n_experts=4)
    return play(make_policy(spec), work, machine({"gpu0": gpu(), "cpu0": cpu()}), model=model, slots={"gpu0": slots})


def test_whole_layers_are_streamed_the_next_beside_this_one() -> None:
    # Copies take 1000 each: of layer 0 until 4100, of layer 1 until 8100, while layer 0 is computed until 4300.
    records = prompted(OFFLOAD, 8)
    in_prompt = [t for t in transfers(records) if t[0] < records.steps[0].end]
    assert [t[3].partition(" ")[2] for t in in_prompt] == [f"{layer}/{e}" for layer in (0, 1) for e in range(4)]
    assert [(t.start, t.expert) for t in records.tasks if t.expert >= 0 and t.step == 0] == [
        (4100, 2), (4200, 3), (8100, 2), (8200, 3),
    ]  # fmt: skip


def copies_in(records: Records, step: int) -> list[tuple[int, int]]:
    return happened(records, max(t.layer for t in records.tasks) + 1)[step].copies


def test_what_the_buffers_held_is_lost_and_the_rest_is_sent_again() -> None:
    # The first request's decode step put 0 and 1 of three layers into slots 0 to 5. Two buffers are 8 slots, one is 4.
    records = prompted(OFFLOAD, 8, layers=3)
    assert copies_in(records, 3) == [(layer, e) for layer in range(3) for e in (0, 1)], "all were in buffers"
    one = prompted(OFFLOAD | {"prefill_overlap": False}, 8, layers=3)  # slots 4 and 5 hold layer 2
    assert copies_in(one, 3) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    sent = [t.n_bytes for t in one.transfers if t.cause == "message"]
    assert sent == [2000], "layer 2's residents cross the link again"
    inside = prompted(OFFLOAD | {"prefill_overlap": False, "prefill_hit_d2d": True}, 8, layers=3)
    assert [t for t in inside.transfers if t.cause == "message"] == []
    assert copies_in(inside, 3) == copies_in(one, 3)


def test_buffers_are_emptied_before_a_prompt_asks_for_what_they_held() -> None:
    # While a decision takes time, what it is about is in use.
    routing = [[[0, 1]], [[0, 1]]]
    work = workload([routing, routing], prompt=1, n_experts=4, batch_size=1)
    model = tiny_model(n_layers=1, n_experts=4)
    records = play(make_policy(OFFLOAD), work, FAST, model=model, slots={"gpu0": 4}, decision_ns=50)
    assert [sorted(step) for step in served(records)] == [[0, 1]] * 4
    assert [t.expert for t in records.transfers if t.expert >= 0] == [0, 1, 2, 3, 0, 1] * 2


# --------------------------------------------------------------------------------------------------------------- restated
