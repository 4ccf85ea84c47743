"""Every policy on varied settings of shipped routing, each run audited from its records alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from moesim.engine import EngineOptions, simulate
from moesim.errors import CapacityError
from moesim.experiment.runner import initial_placement
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.metrics.bounds import run_bounds
from moesim.model import load_model
from moesim.policies.registry import POLICIES, make_policy, policy_class
from moesim.studies.regret import pool_slots
from moesim.testing.conformance import CheckError, check_slots
from moesim.trace import Trace, find_trace
from moesim.trace.predictors import FutureUse, PredictorSet
from moesim.trace.workload import WorkloadSpec, compose
from tests.long.audit import faults
from tests.long.kit import Tally
from tests.policies.golden_kit import COMPOSITIONS, MACHINES, MODELS, NODES, ONE_GPU, OPTIONS, newer_tables


def setting(rng: random.Random) -> dict[str, Any]:
    """Choose a workload and a machine's details at random."""
    trace = rng.choice(sorted(MODELS))
    batch = rng.choice([1, 1, 2, 4])
    return {
        "trace": trace, "batch": batch, "micro_batches": rng.choice([1, 2]) if batch > 1 else 1,
        "prompt": rng.choice([16, 48]), "decode": rng.choice([4, 9]), "prefill_chunk": rng.choice([None, 32]),
        "slots": rng.choice([70, 100, 153, 205]), "chunk_bytes": rng.choice([None, None, 4 << 20]),
        "decision_ns": rng.choice([0, 0, 50_000]), "contention": rng.random() < 0.7, "first": rng.randrange(4),
    }  # fmt: skip


def test_audited_runs(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    seed, only = request.config.getoption("--campaign-seed"), request.config.getoption("--only-kinds")
    policies: list[tuple[str, Any]] = [(name, {"name": name, **OPTIONS.get(name, {})}) for name in sorted(POLICIES)]
    policies += list(COMPOSITIONS.items())
    tally, traces = (
        Tally("audits", request.config.getoption("--campaign-log")),
        {name: Trace.read(find_trace(name)) for name in MODELS},
    )
    for number in range(request.config.getoption("--audits")):
        name, spec = policies[number % len(policies)]
        if not only or name in only:
            chosen = setting(random.Random(f"{seed} {number}"))
            outcome, found = audited(name, spec, chosen, traces[chosen["trace"]])
            tally.add(name, outcome, found and f"{spec} on {chosen}: {found}")
    tally.finish(capsys)


def audited(name: str, spec: Any, chosen: dict[str, Any], trace: Trace) -> tuple[str, str]:
    """Run a policy twice, and audit it."""
    machine = MACHINES.get(name, ONE_GPU)
    hardware = load_hardware(machine)
    if not chosen["contention"]:
        hardware = replace(hardware, contention=())
    precision = dict.fromkeys(("expert_bits", "other_bits", "kv_bits", "act_bits"), 32) if machine == NODES else {}
    model = load_model(MODELS[chosen["trace"]] | precision)
    if policy_class(spec["name"]).low_bits:  # type: ignore[attr-defined]
        model = replace(model, low_bits=(model.expert_bits / 2,))
    gpus = [device for device in hardware.devices if hardware.devices[device].kind == "gpu"]
    slots = dict.fromkeys(gpus, chosen["slots"] // len(gpus))
    needs = make_policy(spec).needs
    signals = frozenset(need.removeprefix("signal:") for need in needs if need.startswith("signal:"))
    workload = compose(trace, WorkloadSpec(
        batch_size=chosen["batch"], prompt_tokens=chosen["prompt"], decode_tokens=chosen["decode"],
        micro_batches=chosen["micro_batches"], prefill_chunk=chosen["prefill_chunk"],
        requests=tuple(range(chosen["first"], chosen["first"] + chosen["batch"])),
    ), require_signals=signals)  # fmt: skip

    tables = {**trace.tables, **newer_tables(trace, tuple(range(chosen["first"], chosen["first"] + chosen["batch"])))}

    def costs() -> CostModel:
        return CostModel(model, hardware, chunk_bytes=chosen["chunk_bytes"])

    def fresh() -> Any:
        policy: Any = make_policy(spec)
        if "oracle:routing" in policy.needs:
            policy.bind_oracle(FutureUse(workload))
        return policy

    def run() -> Any:
        return simulate(
            model=model, costs=costs(), workload=workload, policy=fresh(), cache_slots=slots,
            predictors=PredictorSet(trace, workload, {}, 0), tables=tables,
            options=EngineOptions(decision_ns=chosen["decision_ns"]), policy_name=name,
        )  # fmt: skip

    try:
        records = run()
    except CapacityError as error:
        return "does not fit", "" if str(error) else "no reason"
    placement = initial_placement(model, costs(), workload, fresh(), slots, tables)
    found = faults(records, hardware, model, placement)
    if records != run():
        found.append("a second run differs")
    try:
        check_slots(fresh(), (trace, workload), records)
    except CheckError as error:
        found.append(str(error))
    if fresh().exact and not hasattr(fresh(), "transfer"):
        bound = run_bounds(workload, costs(), pool_slots(placement, gpus, model)).makespan_ns
        if records.makespan_ns < bound:
            found.append(f"{records.makespan_ns} ns, below the bound of {bound} ns")
    return "audited", "; ".join(found)
