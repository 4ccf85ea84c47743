"""Systems as other papers describe them: each is the composition that its text says, and has no options."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.policies.options import options_of
from moesim.policies.registry import POLICIES, make_policy, policy_class, policy_info
from moesim.policies.systems import as_compared
from moesim.testing import run_tiny, tiny_workload

HOT = {"placement": "frequency-global", "scope": "global", "replacement": "static"}
WRITTEN_OUT: dict[str, Any] = {
    "hybrimoe-in-dali": {"name": "hybrimoe-paper", "assignment": "threshold"},
    "ktransformers-in-dali": {"name": "kt-layer", "side": "last"},
    "llama-cpp-in-dali": {"name": "llama-cpp", "op_offload": False},
    "fiddler-in-dali": {"name": "fiddler", "serial": True},
    "ktransformers-in-hybrimoe": {"name": "composed", **HOT, "assignment": "resident-in-decode"},
    "hybrimoe-in-prescope": {
        "name": "hybrimoe-paper", **HOT, "prefetch": {"name": "predicted", "source": "signal:gate_next1", "size": 4},
    },
    "fate-in-prescope": {"name": "fate", "compression": False},
    "deepspeed-mii-in-daop": "zero-inference",
    "llama-cpp-in-od-moe": {"name": "llama-cpp", "n_gpu_layers": 0, "op_offload": False},
}  # fmt: skip


def test_each_is_written_out_here() -> None:
    ours = {name for name, target in POLICIES.items() if target.startswith(f"{as_compared.__name__}:")}
    assert ours == set(WRITTEN_OUT)
    assert all(f"``{name}``" in str(as_compared.__doc__) for name in ours)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_it_is_what_its_text_says(name: str) -> None:
    work = tiny_workload(make_policy(name), 4)
    found, expected = (run_tiny(make_policy(spec), work, 13) for spec in (name, WRITTEN_OUT[name]))
    assert (found.tasks, found.transfers, found.evictions) == (expected.tasks, expected.transfers, expected.evictions)
    assert not options_of(policy_class(name))
    assert all("compared with" in info.paper for info in policy_info([name]))


def test_the_cpu_computes_in_decode_only() -> None:
    work = tiny_workload(make_policy("ktransformers-in-hybrimoe"), 4)
    records = run_tiny(make_policy("ktransformers-in-hybrimoe"), work, 13)
    phase = {step.step: step.phase for step in records.steps}
    assert {phase[t.step] for t in records.tasks if t.expert >= 0 and t.device == "cpu0"} == {"decode"}
    assert {phase[s] for s in {t.step for t in records.tasks if t.expert >= 0 and t.device == "gpu0"}} == {"prefill", "decode"}
    copied = {phase[step.step] for step in records.steps for t in records.transfers if step.begin <= t.submitted < step.end}
    assert copied == {"prefill"}
