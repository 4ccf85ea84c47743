"""A replay is the simulation carried out: same decisions, same bytes, and the same numbers come out of the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from live_kit import experiment

from moesim.experiment.runner import Execution, Outcome, run_one
from moesim.live import LiveMachine, replay

CLOCKLESS = ["all-cpu", "on-demand", "static", "fiddler", "lru", "lfu", "llama-cpp"]
OTHERS = [
    "dali",
    "hybrimoe-paper",
    "hybrimoe-code",
    "prescope",
    "mixtral-offloading",
    "belady",
    "fifo",
    {"name": "composed", "replacement": "arc"},
]


def carried_out(folder: Path, policy: Any, *, keep: bool = True, **changes: Any) -> tuple[Outcome, Outcome, dict[int, Any]]:
    """Simulate and replay one policy; also the outputs of each step."""
    setup = experiment(folder, policies=[policy], **changes)
    spec = setup.specs[0]
    simulated = run_one(setup, spec, keep=True)
    with LiveMachine(spec.hardware, memory_bytes=200_000_000, disk=folder, keep_outputs=keep) as machine:
        live = run_one(setup, spec, keep=True, execution=Execution(partial(replay, machine), True))
        outputs = dict(machine.outputs)
    assert simulated.failure is None, simulated.failure
    assert live.failure is None, live.failure
    return simulated, live, outputs


@pytest.mark.parametrize("policy", CLOCKLESS)
def test_same_hits_and_bytes_where_no_clock_decides(policy: str, tmp_path: Path) -> None:
    simulated, live, _ = carried_out(tmp_path, policy)
    assert simulated.records is not None
    assert live.records is not None
    assert [lookup[1:] for lookup in live.records.lookups] == [lookup[1:] for lookup in simulated.records.lookups]
    moved = [sorted((t.link, t.cause, t.layer, t.expert, t.n_bytes) for t in r.records.transfers) for r in (simulated, live)]
    assert moved[0] == moved[1]
    ran = [sorted((t.device, t.kind, t.step, t.layer, t.expert, t.rows) for t in r.records.tasks) for r in (simulated, live)]
    assert ran[0] == ran[1]


def test_every_exact_policy_computes_the_same(tmp_path: Path) -> None:
    """Weights in the right slots, rows on the right devices, gates and sums: else the hidden state would differ."""
    _, _, reference = carried_out(tmp_path, "on-demand")
    assert len(reference) == 5
    for policy in [*CLOCKLESS, *OTHERS]:
        _, live, outputs = carried_out(tmp_path, policy)
        for step, hidden in reference.items():
            np.testing.assert_allclose(outputs[step], hidden, rtol=2e-4, atol=2e-5, err_msg=f"{policy}, step {step}")
        assert live.row["source_label"] in ("synthetic", "oracle")
