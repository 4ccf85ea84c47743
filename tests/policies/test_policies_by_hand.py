"""Whole runs of policies on the toy machine of `tests.engine.engine_kit`, worked out by hand to the nanosecond.

Three tokens of one request, two layers of four experts, two for each token. An expert takes 100 on the GPU, 400 on the CPU
(one row) and 1000 over the link; a dense part takes 100, a row 20 across.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.metrics import summarise
from moesim.metrics.breakdown import breakdown
from moesim.policies.registry import make_policy
from moesim.records import Records, activities
from tests.engine.engine_kit import Oracle, cpu, gpu, machine, pair, play, tasks, transfers, workload

TOKENS = [[[0, 2], [1, 0]], [[2, 3], [0, 1]], [[0, 3], [2, 3]]]  # token, layer: experts
TOY_DEVICES = {"gpu0": gpu(predict={"told": 10}), "cpu0": cpu()}
TOY = machine(TOY_DEVICES)
KINDS = {"gpu0": "gpu", "cpu0": "cpu"}


def run(policy: Any, slots: int, **more: Any) -> tuple[Records, dict[str, Any]]:
    """Run a policy; return its records and metrics."""
    records = play(make_policy(policy), workload([TOKENS]), TOY, slots={"gpu0": slots}, **more)
    return records, summarise(records, TOY)


def causes(records: Records) -> dict[str, int]:
    """Time by cause, what took none left out."""
    return {cause: ns for cause, ns in breakdown(records, KINDS).total().items() if ns}


def down(*times: tuple[int, str]) -> list[tuple[int, int, str, str]]:
    """Transfers of 1000 ns to the GPU."""
    return [(start, start + 1000, "cpu0->gpu0", what) for start, what in times]


def test_lru() -> None:
    """Residents 0 and 1; each layer visit of layer 0 misses once, the last one of layer 1 twice."""
    records, row = run("lru", 4)
    assert transfers(records) == down(
        (100, "demand 0/2"), (1600, "demand 0/3"), (3100, "demand 0/0"), (4300, "demand 1/2"), (5300, "demand 1/3")
    )
    assert [(e.layer, e.expert) for e in records.evictions] == [(0, 1), (0, 0), (0, 2), (1, 0), (1, 1)]
    assert [s.end for s in records.steps] == [1500, 3000, 6400]
    assert row["hit_rate"] == 7 / 12
    assert row["tpot_mean_ns"] == pytest.approx(6400 / 3)
    assert row["decode_tokens_per_s"] == pytest.approx(3e9 / 6400)
    assert (row["bytes_demand"], row["bytes_total"]) == (5000, 5000)
    assert causes(records) == {"dense": 600, "gpu_experts": 800, "exposed_demand": 5000}


def test_mixtral_offloading() -> None:
    """Residents 2 and 3; every load is mirrored by a write-back on the other link at the same time."""
    records, row = run("mixtral-offloading", 4)
    starts = [100, 1300, 2300, 3500, 5000, 6200, 7200]
    loads = ["0/0", "1/0", "1/1", "0/3", "0/0", "1/2", "1/3"]
    victims = ["0/3", "1/2", "1/3", "0/0", "0/2", "1/0", "1/1"]
    found = transfers(records)
    assert [t for t in found if t[2] == "cpu0->gpu0"] == down(*zip(starts, [f"demand {e}" for e in loads], strict=True))
    back = [(at, at + 1000, "gpu0->cpu0", f"write-back {e}") for at, e in zip(starts, victims, strict=True)]
    assert [t for t in found if t[2] == "gpu0->cpu0"] == back
    assert [s.end for s in records.steps] == [3400, 4900, 8300]
    assert row["hit_rate"] == 5 / 12
    assert (row["bytes_demand"], row["bytes_write_back"]) == (7000, 7000)
    assert sum(causes(records).values()) == 8300


def test_fiddler() -> None:
    """Expert 0 of layer 0 and 1 of layer 1 are on the GPU; a single row is never worth 1000 + 100 against 400."""
    table = {"activation_frequency": np.array([[0.9, 0.1, 0.1, 0.1], [0.1, 0.8, 0.1, 0.1]])}
    records, row = run("fiddler", 2, tables=table)
    assert transfers(records) == []
    assert [s.end for s in records.steps] == [1080, 2560, 4040]
    assert [t for t in tasks(records) if t[2] == "cpu0"][:4] == [
        (120, 520, "cpu0", "E2x1"),
        (660, 1060, "cpu0", "E0x1"),
        (1200, 1600, "cpu0", "E2x1"),
        (1600, 2000, "cpu0", "E3x1"),
    ]
    assert row["hit_rate"] == 4 / 12
    assert row["gpu_run_share"] == 4 / 12
    assert causes(records) == {"dense": 600, "cpu_experts": 3200, "activation": 240}


def test_dali() -> None:
    """Residents 0 and 1, windows of two visits, one expert replaced; the prediction is always of a resident or on its way."""
    policy = {"name": "dali", "placement": "lowest-ids", "w_size": 2, "u_size": 1, "prefetch_size": 1, "prefetch_source": "told"}
    records, row = run(policy, 4, predictors={"told": Oracle()})
    # Layer 0 swaps 1 for 2 (scores 1 0 2 1), layer 1 swaps 0 for 2 (2 2 0 0, ties by id), whose copy the end cuts off.
    assert transfers(records) == [*down((1780, "update 0/2")), (2780, 3560, "cpu0->gpu0", "update 1/2")]
    assert [t.left for t in records.transfers] == [0, 220]
    assert [(e.layer, e.expert) for e in records.evictions] == [(0, 1), (1, 0)]
    assert [t for t in tasks(records) if t[3] == "predict"] == [
        (100, 110, "gpu0", "predict"),
        (940, 950, "gpu0", "predict"),
        (2180, 2190, "gpu0", "predict"),
    ]
    assert [s.end for s in records.steps] == [840, 2080, 3560]
    assert row["hit_rate"] == 6 / 12
    assert row["bytes_update"] == 1000 + 780
    assert causes(records) == {"dense": 600, "gpu_experts": 400, "cpu_experts": 2400, "activation": 160}


@pytest.mark.parametrize(("lane", "side"), [("main", set()), ("side", {"gpu0.side"})])
def test_activities_name_the_lanes_that_were_used(lane: str, side: set[str]) -> None:
    """`moesim.hardware.costs.CostModel.labels` counts a pair of contention only if both of its activities are among these."""
    policy = {"name": "dali", "placement": "lowest-ids", "w_size": 2, "u_size": 1, "prefetch_source": "told", "lane": lane}
    toy = machine(TOY_DEVICES, contention=[pair("gpu0.side", "gpu0.experts", 1, 1)])
    records = play(make_policy(policy), workload([TOKENS]), toy, slots={"gpu0": 4}, predictors={"told": Oracle()})
    assert activities(records) == {"gpu0.dense", "gpu0.experts", "cpu0.experts", "cpu0->gpu0"} | side


@pytest.mark.parametrize("assignment", ["greedy", "exact", "beam"])
@pytest.mark.parametrize(("first_extra_ns", "on_gpu"), [(0, 0), (700, 1)])
def test_plans_count_what_the_first_expert_on_the_cpu_takes(assignment: str, first_extra_ns: int, on_gpu: int) -> None:
    """Nothing is cached: a transfer takes 1000, an expert of one row 400 on the CPU; two of them 800, or 1500."""
    policy = {"name": "dali", "assignment": assignment, "prefetch": "none", "replacement": "static", "placement": "none"}
    hardware = machine({"gpu0": gpu(), "cpu0": cpu(first_extra_ns=first_extra_ns)})
    records = play(make_policy(policy), workload([[[[0, 1], [2, 3]]]]), hardware, slots={"gpu0": 4})
    devices = [task.device for task in records.tasks if task.kind == "expert"]
    assert (len(devices), devices.count("gpu0")) == (4, 2 * on_gpu)
