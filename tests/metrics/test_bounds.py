"""Lower bounds of whole runs: by hand, reached where they can be, and never beaten by any policy."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest

from moesim.errors import CapacityError
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.metrics.bounds import most_hits, run_bounds
from moesim.policies.registry import POLICIES, make_policy
from moesim.policy import Copy, Fetch, Placement, Run
from moesim.studies.regret import pool_slots
from moesim.testing import run_tiny, tiny_machine, tiny_workload
from moesim.testing import tiny_model as spec
from tests.cache_replay import replay_belady
from tests.engine.engine_kit import Script, cpu, device, flat, gpu, link, machine, play, sure, tiny_model, workload

ONE_LAYER = {"n_layers": 1}


def host(ns: int, *, shared: bool = False) -> Any:
    return replace(machine(), host_expert_us=Fraction(ns, 1000), host_shared=shared)


def bounds(work: Any, slots: int, hardware: Any = None, **changes: Any) -> Any:
    return run_bounds(work, CostModel(tiny_model(**changes), hardware or machine()), slots)


# ---------------------------------------------------------------------------------------------------------------- by hand


def test_compute_by_hand():
    """Dense part 100, then two experts of 100 on the GPU or 400 on the CPU: 160 if they could be split."""
    found = bounds(workload([[[[0, 1]]]]), 4, **ONE_LAYER)
    assert found == (260, 0, 0)
    assert found.makespan_ns == 260


def test_what_one_kind_of_device_cannot_do_the_other_does():
    """All on the GPU of a machine that has nothing else but a disk, and all on two hosts without a GPU."""
    disk = {"kind": "disk", "memory_bytes": sure(10**6)}
    two = machine({"gpu0": gpu(), "disk0": disk}, {"disk0->gpu0": link(), "gpu0->disk0": link()}, backing=["disk0"])
    assert bounds(workload([[[[0, 1]]]]), 4, two, **ONE_LAYER).compute_ns == 100 + 2 * 100
    hosts = machine({"cpu0": cpu(), "cpu1": cpu()}, {"cpu0->cpu1": link(), "cpu1->cpu0": link()}, compute="cpu0")
    assert bounds(workload([[[[0, 1]]]]), 4, hosts, **ONE_LAYER).compute_ns == 200 + 400


def test_a_step_with_two_layers_and_an_lm_head_adds_up():
    hardware = machine({"gpu0": gpu(head_ns=30, embedding_ns=5), "cpu0": cpu(head_ns=1000, embedding_ns=1000)})
    found = bounds(workload([[[[0, 1], [2, 3]], [[0, 1], [2, 3]]]]), 8, hardware)
    assert found.compute_ns == 2 * (2 * 260 + 35)


def test_the_thread_that_submits_by_hand():
    """Four experts a step at 150 each, or, if it computes the CPU's experts too, at 100 each next to what the CPU takes on."""
    work = workload([[[[0, 1], [2, 3]]]])
    assert bounds(work, 8, host(100)).compute_ns == 2 * 260  # as without: it may submit before a layer is routed
    assert bounds(work, 8, host(150)).compute_ns == 600
    # Four experts of 100 on the GPU, or 400 each on the thread, which has 400 of its own to do: the GPU alone is done sooner.
    assert bounds(work, 8, host(100, shared=True)).compute_ns == 2 * 260
    # 260 each: 1040 on the thread if it computes none.
    assert bounds(work, 8, host(260, shared=True)).compute_ns == 1040
    slow = machine({"gpu0": gpu(expert_ns=400), "cpu0": cpu(expert_ns=300)})  # 400 on either: two on each are 800
    tied = replace(slow, host_expert_us=Fraction(1, 10), host_shared=True)
    assert bounds(work, 8, slow).compute_ns == 2 * (100 + 400)
    assert bounds(work, 8, tied).compute_ns == 1000  # 4 x 400 and 4 x 100 on two lanes


def test_micro_batches_share_the_lanes():
    """Two micro-batches of one row: the second's dense part may run next to the first's experts, but not on the same lane."""
    two = workload([[[[0, 1]]], [[[0, 1]]]], micro_batches=2)
    hardware = machine({"gpu0": gpu(), "cpu0": cpu(expert_ns=10**6, attention_ns=10**6, dense_ns=10**6)})
    found = bounds(two, 4, hardware, **ONE_LAYER)
    # Each part of the dense work 200 in all on the GPU, and two experts of 100; a CPU may read the caches, for 1 each.
    assert found.compute_ns == 398


def test_experts_may_begin_after_the_shorter_micro_batch():
    """Rows take 100 each on either side; the experts, 600 on the GPU, wait for the micro-batch of one row only."""
    parts = [
        flat(0, 100 * (part == "dense"), model="tiny", part=part)
        for part in ("dense", "attention", "head", "embedding", "leading")
    ]
    gpu0, cpu0 = (one | {"parts": parts} for one in (gpu(expert_ns=300), cpu(expert_ns=10**6)))
    work = workload([[[[0, 1]]]] * 3, micro_batches=2)
    assert bounds(work, 4, machine({"gpu0": gpu0, "cpu0": cpu0}), **ONE_LAYER).compute_ns == 100 + 1 + 600


def test_the_fastest_device_of_a_kind_counts_and_each_micro_batch_for_its_own_requests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        CostModel, "attention_ns", lambda self, device, rows, work2, requests, layer: 10 ** (5 * (device == "cpu0")) * requests
    )
    gpus = {"gpu0": gpu(expert_ns=100, dense_ns=0), "gpu1": gpu(expert_ns=50, dense_ns=0)}
    links = {f"{a}->{b}": link() for a, b in permutations((*gpus, "cpu0"), 2)}
    work = workload([[[[0]]]] * 4, prompt=1, micro_batches=2, weights=[1.0])
    found = bounds(work, 4, machine({**gpus, "cpu0": cpu(expert_ns=10**6, dense_ns=0)}, links), n_layers=1, top_k=1)
    assert found.compute_ns == (2 + 2 + 50) / 2, "two requests in either half, and the expert, shared by both GPUs"


def test_rows_count_at_the_best_rate_of_any_run():
    """An expert of 4 rows that takes 1000 alone, but 100 for up to two rows, can be run in two halves."""
    curve = {
        "form": "points", "range": [1, 8],
        "points": {"value": [[1, 0.1], [2, 0.1], [4, 1.0], [8, 2.0]], "source": "assumed", "why": "x"},
        "shape": {"hidden": 5, "intermediate": 50, "bits": 16.0},
    }  # fmt: skip
    hardware = machine({"gpu0": gpu() | {"experts": [curve]}, "cpu0": cpu(expert_ns=10**9)})
    found = bounds(workload([[[[0]]]] * 4, weights=[1.0]), 4, hardware, n_layers=1, top_k=1)
    assert found.compute_ns == 100 + 200


def test_transfers_by_hand():
    """Six uses of six units, room for two, the first content free: four fetches of 1000 if the CPU is too slow to help."""
    hardware = machine({"gpu0": gpu(), "cpu0": cpu(expert_ns=10**6)})
    steps = workload([[[[0, 1]], [[2, 3]], [[4, 5]]]], n_experts=6)
    found = bounds(steps, 2, hardware, n_experts=6, **ONE_LAYER)
    assert found == (3 * 300, 4000, 4)
    assert (found.without_link_time_ns, found.makespan_ns) == (3 * 300, 4000)
    quick = machine({"gpu0": gpu(), "cpu0": cpu(expert_ns=300)})  # 400 a row
    assert bounds(steps, 2, quick, n_experts=6, **ONE_LAYER).transfer_ns == 300 + 3 * 400  # three there; or two, and 2 fetches


def test_a_cpu_takes_what_it_does_soonest():
    """The first step has two rows, the others one: of four fetches the CPU saves one in 2100; the first would take 4200."""
    hardware = machine({"gpu0": gpu(), "cpu0": cpu(expert_ns=0, per_row_ns=2100)})
    steps = workload([[[[0, 1]], [[2, 3]], [[4, 5]]], [[[0, 1]]]], n_experts=6)
    assert bounds(steps, 2, hardware, n_experts=6, **ONE_LAYER).transfer_ns == 3000


def test_a_copy_may_be_measured_points():
    """An expert has 1000 bytes: halfway between the points that were measured, and beyond them."""
    steps = workload([[[[0, 1]], [[2, 3]], [[4, 5]]]], n_experts=6)
    for points, fetch_ns in (([[500, 1.0], [1500, 3.0]], 2000), ([[100, 0.1], [200, 0.2]], 1000)):
        links = {name: {"any": {"points": _sure(points)}} for name in ("cpu0->gpu0", "gpu0->cpu0")}
        hardware = machine({"gpu0": gpu(), "cpu0": cpu(expert_ns=10**6)}, links)
        assert bounds(steps, 2, hardware, n_experts=6, **ONE_LAYER).transfer_ns == 4 * fetch_ns


def test_links_of_two_gpus_work_at_once_unless_they_share_a_medium():
    devices = {"gpu0": gpu(), "gpu1": gpu(), "cpu0": cpu(expert_ns=10**6)}
    steps = workload([[[[0, 1]], [[2, 3]], [[0, 1]]]])
    for medium, expected in ((None, 2000), ("root", 4000)):
        links = {
            f"{a}->{b}": {"medium": medium, "any": {"latency_us": _sure(0), "bytes_per_s": _sure(1e9)}}
            for a, b in (("cpu0", "gpu0"), ("cpu0", "gpu1"), ("gpu0", "cpu0"), ("gpu1", "cpu0"))
        }
        found = bounds(steps, 1, machine(devices, links), **ONE_LAYER)
        assert (found.fewest_fetches, found.transfer_ns) == (4, expected)


def _sure(value: Any) -> dict[str, Any]:
    return {"value": value, "source": "assumed", "why": "a test"}


def test_the_best_hits_by_hand():
    """One slot, kept for expert 0; with none nothing hits."""
    steps = workload([[[[0, 1]], [[0, 2]], [[0, 3]]]])
    assert most_hits(steps, tiny_model(**ONE_LAYER), 1) == (3, 6)
    assert most_hits(steps, tiny_model(**ONE_LAYER), 0) == (0, 6)


def test_a_run_can_reach_the_bound():
    """Everything resident, nothing worth doing on the CPU: the engine takes exactly the bound."""
    hardware = machine({"gpu0": gpu(), "cpu0": device("cpu", expert_ns=10**8)})
    steps = workload([[[[0, 1], [2, 3]], [[1, 2], [0, 3]]]])
    script = Script(
        copies=[Copy(layer, range(4), "gpu0") for layer in (0, 1)],
        routed=lambda event, view: [Run(event.layer, event.active, "gpu0")],
    )
    assert play(script, steps, hardware).makespan_ns == bounds(steps, 8, hardware).makespan_ns == 1200


def test_a_run_can_reach_the_bound_of_the_links():
    """One slot, four units in turn, little work: as long as the fetches, and each step's work, as nothing overlaps."""
    hardware = machine({"gpu0": gpu(expert_ns=1, attention_ns=2, dense_ns=1), "cpu0": device("cpu", expert_ns=10**8)})
    steps = workload([[[[0]], [[1]], [[2]], [[3]]]], weights=[1.0])
    script = Script(
        routed=lambda event, view: [Fetch(0, event.active, "gpu0"), Run(0, event.active, "gpu0")],
        evict=lambda fetch, view: (0, fetch.experts[0] - 1),
        copies=[Copy(0, [0], "gpu0")],
        slots=1,
    )
    found = bounds(steps, 1, hardware, n_layers=1, top_k=1)
    records = play(script, steps, hardware, model=tiny_model(n_layers=1, top_k=1))
    assert found.transfer_ns == 3000
    assert records.makespan_ns == 3000 + 4 * 4


# ----------------------------------------------------------------------------------------------------------- every policy


@pytest.mark.parametrize(
    "thread",
    [None, pytest.param((2000, False), marks=pytest.mark.long), pytest.param((300, True), marks=pytest.mark.long)],
    ids=["free", "submits", "computes"],
)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_policy_beats_the_bounds(name: str, thread: tuple[int, bool] | None):
    """Random tiny runs: prefill and decode, several requests and micro-batches, two shapes, small and large caches."""
    ran = 0
    shapes = ({"n_layers": 3, "n_experts": 6, "top_k": 3}, {"top_k": 1}, {"n_layers": 2, "n_experts": 12, "top_k": 2})
    sizes = [(1, 1, 8, {}), (4, 2, 12, {}), (3, 1, 16, shapes[0]), (4, 1, 32, shapes[1]), (2, 1, 4, {}), (2, 2, 24, shapes[2])]
    for seed, (batch, micro_batches, slots, shape) in enumerate(sizes):
        policy: Any = make_policy(name)
        if not policy.exact:
            continue
        placed: list[Placement] = []
        place = policy.place
        policy.place = lambda view, place=place, placed=placed: placed.append(place(view)) or placed[-1]
        work = tiny_workload(policy, batch, micro_batches, seed=seed, **shape)
        try:
            hardware = load_hardware(policy.profile) if policy.profile else tiny_machine()
            if thread is not None:
                hardware = replace(hardware, host_expert_us=Fraction(thread[0], 1000), host_shared=thread[1])
            records = run_tiny(policy, work, slots, hardware=hardware, **shape)
        except CapacityError:
            continue
        model = spec(**shape)
        gpus = [device for device, found in hardware.devices.items() if found.kind == "gpu"]
        found = run_bounds(work[1], CostModel(model, hardware), pool_slots(placed[0], gpus, model))
        assert records.makespan_ns >= found.makespan_ns > 0
        ran += 1
    assert ran or not make_policy(name).exact


@pytest.mark.parametrize("name", ["lru", "lfu", "fifo", "random", "belady"])
@pytest.mark.parametrize("scope", ["per-layer", "global"])
def test_no_cache_that_fetches_on_demand_hits_more_than_the_best(name: str, scope: str):
    policy = make_policy({"name": name, "scope": scope})
    work = tiny_workload(policy, 2)
    records = run_tiny(policy, work, 8)
    hits = sum(sum(lookup.hits) for lookup in records.lookups)
    best, lookups = most_hits(work[1], spec(), 8)
    assert hits <= best < lookups == sum(len(lookup.active) for lookup in records.lookups)


@pytest.mark.parametrize("slots", range(13))
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_best_hits_are_those_of_the_reference(slots: int, batch_size: int):
    policy = make_policy({"name": "lru", "scope": "global"})
    work = tiny_workload(policy, batch_size)
    visits = [[(lookup.layer, expert) for expert in lookup.active] for lookup in run_tiny(policy, work, 8).lookups]
    model = spec()
    everything = [(layer, expert) for layer in range(model.n_layers) for expert in range(model.n_experts)]
    hits = replay_belady([everything, *visits], slots)
    assert most_hits(work[1], model, slots) == (sum(hits), len(hits) - len(everything))
