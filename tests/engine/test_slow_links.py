"""Where a copy takes longer than a step, what a policy asked for a step ago is still on its way."""

from __future__ import annotations

import pytest

from moesim.engine import simulate
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.trace import Trace, find_trace
from moesim.trace.predictors import PredictorSet
from moesim.trace.workload import WorkloadSpec, compose


@pytest.mark.parametrize("slots", [32, 64, 128])
def test_dali_does_not_take_a_late_prefetch_for_a_cached_expert(slots: int):
    """A prefetch of the step before, still under way, must not count as the newcomer that a swap asks for."""
    hardware = load_hardware("odmoe-10x3090")
    model = load_model({"base": "mixtral-8x7b", "expert_bits": 4.5})
    trace = Trace.read(find_trace("mini-mixtral"))
    workload = compose(trace, WorkloadSpec(prompt_tokens=64, decode_tokens=16), require_signals=frozenset({"residual"}))
    records = simulate(
        model=model,
        costs=CostModel(model, hardware),
        workload=workload,
        policy=make_policy("dali"),
        cache_slots={hardware.compute: slots},
        predictors=PredictorSet(trace, workload, {}, 0),
        policy_name="dali",
    )
    assert len(records.steps) == 17
    assert records.pool_peak_bytes[hardware.compute, "cache"] <= slots * model.expert_bytes(0)
