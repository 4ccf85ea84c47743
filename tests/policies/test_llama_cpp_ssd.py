"""llama.cpp with experts on an SSD: worked examples of who leaves, of waves, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import CapacityError, HardwareError
from moesim.policies.registry import make_policy
from moesim.policies.systems import llama_cpp_ssd
from moesim.records import Records
from tests.engine.engine_kit import cpu, gpu, link, machine, play, sure, tiny_model, workload
from tests.policies.caches_kit import FAST, run


def with_disk(rate: float) -> Any:
    """A host whose memory has room for four experts on their way, and a disk of so many bytes a ns."""
    disk = {"kind": "disk", "memory_bytes": sure(1_000_000)}
    links = {"cpu0->gpu0": link(100), "gpu0->cpu0": link(), "disk0->cpu0": link(rate)}
    return machine({"gpu0": gpu(), "cpu0": cpu(memory=4000), "disk0": disk}, links)


QUICK, SLOW = with_disk(100), with_disk(1)


def read(records: Records) -> list[int]:
    return [t.expert for t in records.transfers if t.link == "disk0->cpu0"]


def gone(records: Records) -> list[int]:
    return [one.expert for one in records.evictions]


def prompt(spec: Any, rows: list[int], *more: int, slots: int = 4, hardware: Any = QUICK) -> Records:
    """Run a prompt whose rows choose one expert each, and decode steps."""
    work = workload([[[[e]] for e in (*rows, *more)]], n_experts=8, weights=[1.0], prompt=len(rows))
    return play(make_policy(spec), work, hardware, model=tiny_model(n_layers=1, n_experts=8, top_k=1), slots={"gpu0": slots})


def test_the_expert_chosen_least_leaves() -> None:
    # 2 replaces 1, chosen once, and not 0, chosen twice. Then 1 replaces 2.
    records = run("llama-cpp-ssd", [[0], [1], [0], [2], [1]], 2, hardware=QUICK)
    assert (read(records), gone(records)) == ([0, 1, 2, 1], [1, 2])
    assert {task.device for task in records.tasks if task.kind == "expert"} == {"gpu0"}
    assert {t.link for t in records.transfers} == {"disk0->cpu0", "cpu0->gpu0"}


def test_counts_are_halved_before_victims_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the sixth call 3 and 2 counts become 1 and 1, and the one used longer ago leaves: 0. Without, 1 leaves.
    steps = [[0], [0], [0], [1], [1], [2]]
    assert gone(run("llama-cpp-ssd", steps, 2, hardware=QUICK)) == [1]
    monkeypatch.setattr(llama_cpp_ssd, "HALVING_CALLS", 6)
    assert gone(run("llama-cpp-ssd", steps, 2, hardware=QUICK)) == [0]


def test_what_a_call_needs_later_can_leave_and_is_read_again() -> None:
    # 0 and 2 have two counts as 3 is looked at, and 0 was used longer ago; then 0 is looked at, and 2 leaves.
    records = run("llama-cpp-ssd", [[0, 1], [1, 2], [1, 2], [3, 0]], 3, hardware=QUICK)
    assert (read(records), gone(records)) == ([0, 1, 2, 3, 0], [0, 2])


def test_a_call_computes_once_all_of_its_experts_are_there() -> None:
    records = run("llama-cpp-ssd", [[0, 1], [0, 2]], 3, hardware=SLOW)
    arrived = max(t.end for t in records.transfers if t.expert == 2)
    assert [task.start for task in records.tasks if task.step == 1 and task.kind == "expert"] == [arrived, arrived + 100]


@pytest.mark.parametrize("preload", [True, False])
def test_a_prompt_that_could_need_more_slots_goes_in_waves(preload: bool) -> None:
    # Five rows could choose five experts, of which four have slots: waves of (4 - 1) / 2, that is, one. The read of each
    # begins as the wave before it does, or else once that has been computed.
    records = prompt({"name": "llama-cpp-ssd", "preload": preload}, [0, 1, 2, 0, 3], hardware=SLOW)
    ran = {task.expert: task for task in records.tasks if task.kind == "expert"}
    assert [ran[e].rows for e in range(4)] == [2, 1, 1, 1]
    asked = {t.expert: t for t in records.transfers if t.link == "disk0->cpu0"}
    assert [asked[e].submitted for e in range(1, 4)] == (
        [asked[0].submitted, ran[0].end, ran[1].end] if preload else [ran[e].end for e in range(3)]
    )


def test_waves_count_nothing_so_the_first_one_leaves() -> None:
    assert gone(prompt("llama-cpp-ssd", [3, 1, 2, 0, 3], 4, 4)) == [3]
    # Four rows cannot need more than four slots: one call, which counts each expert once. 3 leaves, since it was used first.
    assert gone(prompt("llama-cpp-ssd", [3, 1, 2, 0], 3, 4)) == [1], "two counts keep 3"


def test_what_it_refuses() -> None:
    with pytest.raises(HardwareError, match=r"policy llama-cpp-ssd: expected a disk in toy, got gpu0, cpu0; .* '\+ nvme4'"):
        run("llama-cpp-ssd", [[0]], 2, hardware=FAST)
    with pytest.raises(CapacityError, match="expected at least 3 cache slots a layer for steps of 3 tokens, got 2"):
        prompt("llama-cpp-ssd", [0, 1, 2], slots=2)
