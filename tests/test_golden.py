"""Literal results on the shipped trace. A change that moves one of them must say why.

``pytest tests/test_golden.py --regenerate`` writes ``tests/data/golden.json`` anew; read the difference in review.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesim.costs import CostModel
from moesim.engine import simulate
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.predictors.chosen import PredictorSet
from moesim.predictors.future import FutureUse
from moesim.trace import Trace, find_trace
from moesim.workload import WorkloadSpec, compose

GOLDEN = Path(__file__).parent / "data" / "golden.json"
POLICIES = ["belady", "dali", "fiddler", "lfu", "llama-cpp", "lru", "mixtral-offloading", "on-demand", "random", "static"]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.read(find_trace("mini-mixtral"))


def result(trace: Trace, name: str, batch: int) -> dict[str, int]:
    model = load_model({"base": "mixtral-8x7b", "expert_bits": 4})
    spec = WorkloadSpec(batch_size=batch, prompt_tokens=64, decode_tokens=6)
    workload = compose(trace, spec, require_signals=frozenset({"residual"}))
    policy = make_policy(name)
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(workload))  # type: ignore[attr-defined]
    records = simulate(
        model=model,
        costs=CostModel(model, load_hardware("rtx3090-epyc7532")),
        workload=workload,
        policy=policy,
        cache_slots={"gpu0": 128},
        predictors=PredictorSet(trace, workload, {}, 0),
        tables=trace.tables,
        policy_name=name,
    )
    return {
        "makespan_ns": records.makespan_ns,
        "hits": sum(sum(visit.hits) for visit in records.lookups),
        "lookups": sum(len(visit.hits) for visit in records.lookups),
        "bytes": sum(transfer.n_bytes for transfer in records.transfers),
        "evictions": len(records.evictions),
    }


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_golden(name: str, batch: int, trace: Trace, request: pytest.FixtureRequest):
    key = f"{name}, batch {batch}"
    found = result(trace, name, batch)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--regenerate"):  # one process only
        golden[key] = found
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    assert found == golden.get(key), f"{key}: regenerate with --regenerate if the change is meant, and say why"
