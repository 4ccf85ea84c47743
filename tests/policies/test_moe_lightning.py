"""MoE-Lightning: its residents, and the double buffer to the nanosecond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesim.errors import CapacityError
from moesim.policies.registry import make_policy
from moesim.records import Records
from tests.engine.engine_kit import cpu, crossings, gpu, machine, play, tasks, tiny_model, transfers, workload

# -------------------------------------------------------------------------------------------------------------- run time
TOKEN = [[0, 2], [1, 0]]  # layer: experts


def run(requests: Any = ((TOKEN,),), *, slots: int = 2, links: Any = None, prompt: int = 0, micro_batches: int = 1,
        n_layers: int = 2, expert_ns: int = 100, **options: Any) -> Records:  # fmt: skip
    policy = make_policy({"name": "moe-lightning", "attention": "gpu", **options})
    toy = machine({"gpu0": gpu(expert_ns=expert_ns), "cpu0": cpu()}, links)
    work = workload(requests, prompt=prompt, micro_batches=micro_batches)
    return play(policy, work, toy, model=tiny_model(n_layers=n_layers), slots={"gpu0": slots})


def test_whole_layers_are_streamed_while_the_one_before_computes() -> None:
    # One of four experts of each layer stays: expert 0.
    # gpu0       |DDDDD|                   |00|22|DDDDD|                |00|11|
    # cpu0->gpu0 |0/1      |0/2  |0/3      |1/1      |1/2      |1/3      |0/1 ...    the next pass, which does not come
    #            0    100                  3000  3200 3300              6000
    records = run()
    down = [*((layer, e) for layer in (0, 1) for e in (1, 2, 3)), (0, 1)]
    assert [(t.start, t.layer, t.expert) for t in records.transfers] == [(1000 * i, *unit) for i, unit in enumerate(down)]
    assert tasks(records) == [
        (0, 100, "gpu0", "dense"), (3000, 3100, "gpu0", "E0x1"), (3100, 3200, "gpu0", "E2x1"),
        (3200, 3300, "gpu0", "dense"), (6000, 6100, "gpu0", "E0x1"), (6100, 6200, "gpu0", "E1x1"),
    ]  # fmt: skip
    assert records.pool_peak_bytes["gpu0", "pages"] <= 6000


@pytest.mark.parametrize(("expert_ns", "layer_ns"), [(100, 3000), (2000, 100 + 2 * 2000)])
def test_a_layer_takes_the_longer_of_copying_and_computing(expert_ns: int, layer_ns: int) -> None:
    records = run([[[[0, 1]] * 10] * 3], slots=10, n_layers=10, expert_ns=expert_ns)
    ends = [visit.end for visit in records.layers]
    assert set(np.diff(ends)[3:].tolist()) == {layer_ns}  # over the steps' borders as well


@pytest.mark.parametrize("each", [29, 57, 58])
def test_cache_slots_are_counted_exactly(each: int) -> None:
    """As a share, 0.29 of 100 experts would make 28."""
    policy = make_policy({"name": "moe-lightning", "attention": "gpu"})
    work = workload([[TOKEN]], n_experts=100)
    records = play(policy, work, model=tiny_model(n_experts=100), slots={"gpu0": 2 * each + 1})
    assert min(t.expert for t in records.transfers) == each


def test_micro_batches_run_one_after_another() -> None:
    """Both are routed before the layer is there; each expert has a kernel for each of them."""
    records = run([[TOKEN], [[[2, 3], [1, 0]]]], micro_batches=2)
    assert tasks(records)[2:6] == [
        (3000, 3100, "gpu0", "E0x1"), (3100, 3200, "gpu0", "E2x1"), (3200, 3300, "gpu0", "E2x1"), (3300, 3400, "gpu0", "E3x1"),
    ]  # fmt: skip


def test_the_planned_share_decides_and_must_be_granted() -> None:
    assert len({t.expert for t in run(slots=8, expert_share=0.5).transfers}) == 2
    assert run(slots=8, expert_share=1.0).transfers == []
    with pytest.raises(CapacityError, match="expected at most 2 experts on the GPU, as the cache slots allow, got 4"):
        run(expert_share=0.5)


def test_the_cpu_reads_the_cache_while_decoding() -> None:
    records = run([[TOKEN] * 4], prompt=2, attention="cpu")
    by_step = [{(t.device, t.kind) for t in records.tasks if t.step == step and t.expert < 0} for step in range(3)]
    assert by_step[0] == {("gpu0", "dense")}
    assert by_step[1] == by_step[2] == {("gpu0", "attention"), ("cpu0", "attention"), ("gpu0", "dense")}
    assert len(crossings(records)) == 2 * 2 * 2  # steps, layers, there and back
    assert [t for t in transfers(records) if t[2] == "gpu0->cpu0"] == [
        (100, 116, "gpu0->cpu0", "write-back"), (3300, 3316, "gpu0->cpu0", "write-back")
    ]  # fmt: skip


def test_a_model_of_one_layer_is_copied_anew_in_each_pass() -> None:
    records = run([[[[0, 1]]] * 2], n_layers=1, slots=0)
    assert [t.expert for t in records.transfers] == [0, 1, 2, 3] * 2
