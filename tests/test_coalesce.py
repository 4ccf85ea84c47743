"""Coalescing is an optimisation only: with it and without it, every shipped policy leaves the same records."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.costs import CostModel
from moesim.engine import EngineOptions, simulate
from moesim.errors import InputError
from moesim.policies.registry import POLICIES, make_policy
from moesim.predictors.chosen import PredictorSet
from moesim.predictors.future import FutureUse
from moesim.testing.traces import synthetic_trace
from moesim.workload import WorkloadSpec, compose
from tests.engine_kit import EXPERT_BYTES, assert_same, cpu, gpu, link, machine, pair, tiny_model

LAYERS, EXPERTS, SLOTS = 4, 8, 12
TRACE = synthetic_trace(
    n_layers=LAYERS, n_experts=EXPERTS, n_requests=6, prompt=5, decode=12, scores=True, calibration=True,
    signals={"gate_next1": 0.8, "gate_next2": 0.7, "gate_next3": 0.6, "residual": 0.8},
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "single": {"batch_size": 1},
    "batch": {"batch_size": 4},
    "micro": {"batch_size": 4, "micro_batches": 2},
}
MACHINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fast": {"links": {"cpu0->gpu0": link(20), "gpu0->cpu0": link(20)}},
    "contended": {"contention": [pair("cpu0.experts", "cpu0->gpu0", 0.6, 0.8), pair("gpu0.experts", "gpu0.side", 0.8, 0.5)]},
}


def _run(name: str, shape: str, toy: str, coalesce: bool, decision_ns: int) -> Any:
    devices = {"gpu0": gpu(memory=EXPERT_BYTES * 100, predict={"gate": 15}), "cpu0": cpu(first_extra_ns=9)}
    hardware = machine(devices, **MACHINES[toy])
    model = tiny_model(n_layers=LAYERS, n_experts=EXPERTS)
    work = compose(TRACE, WorkloadSpec(decode_tokens=12, prompt_tokens=5, **SHAPES[shape]))
    policy = make_policy(name)
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(work))  # type: ignore[attr-defined]
    costs = CostModel(model, hardware)
    return simulate(
        model=model, costs=costs, workload=work, policy=policy, cache_slots={"gpu0": SLOTS},
        predictors=PredictorSet(TRACE, work, {}, 0),
        tables=TRACE.tables, options=EngineOptions(decision_ns, coalesce), policy_name=name,
    )  # fmt: skip


@pytest.mark.parametrize("toy", MACHINES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_same_records(name: str, shape: str, toy: str) -> None:
    decision_ns = 11 if shape == "batch" else 0
    try:
        on = _run(name, shape, toy, True, decision_ns)
    except InputError as error:
        pytest.skip(f"{name} does not run here: {error}")
    assert_same(on, _run(name, shape, toy, False, decision_ns))
