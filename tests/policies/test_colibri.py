"""colibri: worked examples of memory's slots, pins and guesses, and of the GPU's; and a published finding on real routing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.errors import CapacityError, HardwareError
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.policies.systems import colibri
from moesim.records import Records
from moesim.trace import Trace
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.engine_kit import Oracle, cpu, gpu, link, machine, play, sure, tiny_model, workload
from tests.policies.caches_kit import FAST, run, served

DISK = {"kind": "disk", "memory_bytes": sure(1_000_000)}


def with_disk(rate: float = 100, memory: int = 1_000_000) -> Any:
    links = {"cpu0->gpu0": link(100), "gpu0->cpu0": link(), "disk0->cpu0": link(rate)}
    return machine({"gpu0": gpu(predict={"told": 20}), "cpu0": cpu(memory=memory), "disk0": DISK}, links)


def go(steps: list[Any], slots: int = 0, hardware: Any = None, **options: Any) -> Records:
    return run({"name": "colibri", **options}, steps, slots, hardware=hardware or with_disk())


def read(records: Records) -> list[int]:
    return [t.expert for t in records.transfers if t.link == "disk0->cpu0"]


def test_an_expert_that_the_visit_has_not_come_to_leaves_memory() -> None:
    # In the third step 0 replaces 1, used longest ago, which is read again in place of 2. The CPU computes each as it is read.
    records = go([[0, 1], [1, 2], [0, 1]], cap=2)
    assert read(records) == [0, 1, 2, 0, 1]
    assert [gone.expert for gone in records.evictions] == [0, 1, 2]
    ran = [(task.start, task.end) for task in records.tasks if task.step == 2 and task.kind == "expert"]
    starts = [t.start for t in records.transfers if t.link == "disk0->cpu0"][3:]
    assert starts[0] < ran[0][0] and starts[1] == ran[0][1]


@pytest.mark.parametrize(("policy", "leaves"), [("lru", 0), ("lfru", 1), ("auto", 1)])
def test_lfru_keeps_what_has_more_rows(policy: str, leaves: int) -> None:
    assert [gone.expert for gone in go([[0], [0], [1], [2]], cap=2, policy=policy).evictions] == [leaves]


def test_auto_is_lru_with_more_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colibri, "AUTO_SLOTS", 1)
    assert [gone.expert for gone in go([[0], [0], [1], [2]], cap=2, policy="auto").evictions] == [0]


def test_lfru_takes_the_older_of_equals_and_counts_no_rows_once_pins_are_chosen() -> None:
    assert [gone.expert for gone in go([[1], [0], [2]], cap=2, policy="lfru").evictions] == [1]
    # 0 is pinned after the first token. 1 then has no rows, like 2 and 3, however often it is used: the older leaves.
    records = go([[0], [1], [1], [2], [3]], cap=3, policy="lfru", hot=1, warmup=1)
    assert [gone.expert for gone in records.evictions] == [1]


def test_pins_stay_until_there_is_nothing_else() -> None:
    steps = [[0], [0], [1], [2], [3]]
    assert [gone.expert for gone in go(steps, cap=2, hot=1, warmup=2).evictions] == [1, 2]
    assert [gone.expert for gone in go(steps, cap=1, hot=1, warmup=2).evictions] == [0, 1, 2]


def test_the_gpu_takes_what_is_much_hotter_every_16_tokens_or_as_it_passes() -> None:
    # The GPU begins with expert 0, which nobody uses. From a heat of 5 on 1 may take its place.
    assert [0 in step or 1 in step for step in served(go([[1]] * 18, 1))] == [False] * 16 + [True] * 2
    assert [0 in step or 1 in step for step in served(go([[1]] * 8, 1, exchange="passing"))] == [False] * 5 + [True] * 3
    records = go([[1]] * 8 + [[0]], 1, exchange="passing")
    assert served(records)[8] == [], "the CPU computes what has left"
    assert (read(records), [t.expert for t in records.transfers if t.link == "cpu0->gpu0"]) == ([1, 0], [1])


def test_heat_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    # At the fourth token a heat of 4 becomes 2, so that 5 is reached at the seventh.
    monkeypatch.setattr(colibri, "DECAY_TOKENS", 4)
    assert [step for step, experts in enumerate(served(go([[1]] * 8, 1, exchange="passing"))) if experts] == [7]


def test_without_a_warm_start_used_experts_take_free_room() -> None:
    assert served(go([[1], [1], [2], [2]], 1, warm="none")) == [[], [1], [], []]


def test_a_table_of_a_run_before_chooses_pins_and_what_the_gpu_begins_with() -> None:
    # By the table 3 is the most used, then 2. With a pin, 0 and 1 take each other's slot and leave 3 alone.
    table = np.array([[0.1, 0.1, 0.2, 0.6, 0, 0, 0, 0]])
    for options, slots, steps, leave in (
        ({"pins": "table", "hot": 1, "cap": 2}, 0, [3, 0, 1, 0], [0, 1]),
        ({"warm": "table"}, 2, [3, 2, 0], []),
    ):
        work = workload([[[[e]] for e in steps]], n_experts=8, weights=[1.0])
        model = tiny_model(n_layers=1, n_experts=8, top_k=1)
        policy, tables = make_policy({"name": "colibri", **options}), {"activation_frequency": table}
        records = play(policy, work, with_disk(), model=model, slots={"gpu0": slots}, tables=tables)
        assert [gone.expert for gone in records.evictions] == leave
        assert served(records) == [[e] if slots and e in (2, 3) else [] for e in steps]


def pilot(slots: int, steps: list[Any], **options: Any) -> Records:
    policy = make_policy({"name": "colibri", "cap": slots, "pilot": True, "source": "told", **options})
    model = tiny_model(n_layers=2, n_experts=8, top_k=1)
    work = workload([steps], n_experts=8, weights=[1.0])
    return play(policy, work, with_disk(1), model=model, predictors={"told": Oracle()})


def test_the_next_layers_experts_are_read_while_this_layer_computes() -> None:
    records = pilot(2, [[[0], [1]]])
    asked = {t.layer: t for t in records.transfers if t.link == "disk0->cpu0"}
    begun = next(look.time for look in records.lookups if look.layer == 1)
    assert asked[1].cause == "prefetch" and asked[1].submitted < begun


@pytest.mark.parametrize(("guard", "prefetched"), [(True, 1), (False, 2)])
def test_a_guess_replaces_only_what_is_scored_much_lower(guard: bool, prefetched: int) -> None:
    # The second step's guess finds the one slot of layer 1 taken by an expert of as many rows.
    records = pilot(1, [[[0], [1]], [[0], [2]]], guard=guard)
    assert sum(t.cause == "prefetch" for t in records.transfers) == prefetched


def test_what_it_refuses() -> None:
    with pytest.raises(HardwareError, match="policy colibri: expected a disk in toy"):
        go([[0]], hardware=FAST)
    with pytest.raises(
        CapacityError, match="policy colibri: expected memory for an expert of each layer, got cpu0 of toy with 500"
    ):
        go([[0]], hardware=with_disk(memory=500))


OLMOE = Path(__file__).parents[3] / "shared" / "traces" / "olmoe" / "olmoe-1b-7b_299.jsonl"


@pytest.mark.skipif(not OLMOE.exists(), reason=f"{OLMOE} is not here")
def test_lfru_misses_less_often_than_lru_with_8_slots_and_more_often_with_16() -> None:
    # docs/experiments/olmoe-tier-caching-2026-09-29.md: 7.7 % fewer at 8 slots, 3.2 to 4.1 points worse from 16 on. This
    # routing has each token's experts by id, of another prompt.
    rows = np.array([json.loads(line)["layers"] for line in OLMOE.read_text().splitlines()], np.uint8)
    trace = Trace.build(
        experts=rows, weights=np.full(rows.shape, 1 / 8, np.float16), n_prompt=[0], n_decode=[len(rows)], n_experts=64,
        model="olmoe", label="measured", prompt_offset=1,
    )  # fmt: skip
    work = compose(trace, WorkloadSpec(batch_size=1, requests="all"))
    hardware = load_hardware("RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200 + nvme4")

    def misses(cap: int, policy: str) -> int:
        spec = {"name": "colibri", "cap": cap, "policy": policy}
        return len(read(play(make_policy(spec), work, hardware, model=load_model("olmoe"))))

    assert misses(8, "lfru") < misses(8, "lru")
    assert misses(16, "lfru") > 1.05 * misses(16, "lru")
