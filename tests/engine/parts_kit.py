"""Random compositions of the parts that the native engine has, decided by Python and by the native engine itself.

Some runs end in an error or a deadlock; then all say the same.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from fractions import Fraction
from random import Random
from typing import Any

from moesim.engine import EngineOptions, simulate
from moesim.errors import MoesimError
from moesim.hardware.costs import CostModel
from moesim.policies.composed import IN_CPP, Composed, in_python
from moesim.policies.options import options_of
from moesim.policies.parts.prefetch import NoPrefetch
from moesim.policies.registry import part_class
from moesim.policies.systems.hybrimoe import GATES, ImpactDriven, Queues
from moesim.records import Records
from moesim.testing.traces import synthetic_trace
from moesim.trace.predictors import FutureUse, PredictorSet
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.engine_kit import assert_same, cpu, gpu, link, machine, pair, sure, tiny_model

GATE_SIGNALS = [f"{GATES}{n}" for n in (1, 2, 3)]
SOURCES = ("signal:near", "signal:far", "signal:near:top3", "oracle", "synthetic:0.5", "frequency", "coactivation")
PLACEMENTS = ("none", "random", "lowest-ids", "highest-ids", "frequency-per-layer", "frequency-global")


def drawn(schema: dict[str, Any], rng: Random) -> Any:
    """Draw a value that an option allows."""
    if "anyOf" in schema:
        return drawn(rng.choice(schema["anyOf"]), rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    bounded = low is not None or high is not None
    if schema["type"] == "integer":
        return (
            min(int(low or 0) + rng.choice([0, 0, 1, 2, 5]), high or sys.maxsize) if bounded else rng.choice([0, 7, -3, 1 << 40])
        )
    if schema["type"] == "number":
        return rng.choice([0, 0.5, 3.0, 70] if high is None else [low, high, 0.5, 1 / 3])
    if schema["type"] == "boolean":
        return rng.random() < 0.5
    return rng.choice(SOURCES) if schema["type"] == "string" else None


def part(kind: str, name: str, rng: Random) -> Any:
    cls = part_class(kind, name)
    chosen = {one.name: drawn(one.schema, rng) for one in options_of(cls).values() if one.required or rng.random() < 0.7}
    return cls(**chosen)


def composition(rng: Random) -> Composed:
    parts = {kind: part(kind, rng.choice(names), rng) for kind, names in IN_CPP.items()}
    if not parts["replacement"].admits and rng.random() < 0.9:  # what goes to the cache would be refused
        if hasattr(parts["prefetch"], "pool"):
            parts["prefetch"].pool = "transient"
        elif not isinstance(parts["prefetch"], NoPrefetch):
            parts["replacement"] = part("replacement", "mrs", rng)
    if isinstance(parts["prefetch"], ImpactDriven) and isinstance(parts["assignment"], Queues):
        parts["prefetch"].reading = parts["assignment"].reading
    placed = rng.choice(PLACEMENTS)
    parts["placement"] = part_class("placement", placed)()
    return Composed(
        **parts,
        scope="global" if placed == "frequency-global" else rng.choice(["per-layer", "global"]),
        slots_split=rng.choice(["spread", "equal"]),
        staging_slots=rng.choice([None, None, 1, 3]),
        load_order=rng.choice(["id", "rows", "plan"]),
        cache_only=rng.random() < 0.3,
    )


def toy(rng: Random) -> Any:
    disk, medium = rng.random() < 0.05, rng.choice([None, None, "root"])
    share, latency = rng.random() < 0.3, rng.choice([0, 7])
    predict = {source.removesuffix(":top3"): rng.choice([0, 20, 300]) for source in (*SOURCES, *GATE_SIGNALS)} | {"synthetic": 10}
    devices: dict[str, Any] = {
        "gpu0": gpu(
            predict=predict, expert_ns=rng.choice([40, 100]), first_extra_ns=rng.choice([0, 0, 9]),
            more_rows=rng.choice([(), (), (5, 8, 6)]),
        ),
        "cpu0": cpu(
            first_extra_ns=rng.choice([0, 0, 11]), expert_ns=rng.choice([20, 300]), per_row_ns=rng.choice([5, 100, 400]),
            predict=predict,
        ),
    }  # fmt: skip
    if disk:
        devices["disk0"] = {"kind": "disk", "memory_bytes": sure(10**6)}
    ends = [("cpu0", "gpu0"), *([("disk0", "cpu0")] if disk else [])]
    ways = [way for x, y in ends for way in (f"{x}->{y}", f"{y}->{x}")]
    links = {way: link(rng.choice([1, 3, 10]), latency, medium=medium, share_link=share) for way in ways}
    contention = [pair("gpu0.experts", "gpu0.side", 0.7, 0.6)] if rng.random() < 0.5 else []
    contention += [pair("cpu0.experts", "cpu0->gpu0", 1 / 3, 0.8)] if rng.random() < 0.3 else []
    found = machine(devices, links, compute="cpu0" if rng.random() < 0.1 else "gpu0",
                    backing=["disk0" if disk else "cpu0"], contention=contention)  # fmt: skip
    thread = rng.choice([{}, {}, {"host_expert_us": Fraction(13, 1000)}, {"host_shared": True}])
    return dataclasses.replace(found, **thread)


def outcomes(seed: int) -> Iterator[tuple[Any, Composed]]:
    """Play one run with SimPy, natively with Python's decisions, and natively altogether; give records or error, and policy."""
    for engine, python in (("simpy", False), ("native", True), ("native", False)):
        rng = Random(seed)
        layers, experts, k = rng.randint(2, 5), rng.choice([4, 5, 8, 70]), rng.choice([1, 2, 2, 4])
        batch = rng.choice([1, 1, 2, 3, 8])
        trace = synthetic_trace(
            layers, experts, k, batch + 2, rng.choice([1, 4, 70]), rng.randint(1, 6), seed=seed % 97, skew=rng.choice([0.1, 1.0]),
            scores=rng.random() < 0.5, calibration=True, signals={"near": 0.8, "far": 0.5} | dict.fromkeys(GATE_SIGNALS, 0.7),
        )  # fmt: skip
        work = compose(
            trace,
            WorkloadSpec(
                batch_size=batch, n_batches=rng.choice([1, 1, 2]) if batch < 3 else 1, micro_batches=rng.randint(1, batch),
                prefill_chunk=rng.choice([None, None, 3]),
            ),
        )  # fmt: skip
        shared = rng.choice([{}, {}, {"n_shared": 1, "shared_intermediate": 10}])
        model = tiny_model(n_layers=layers, n_experts=experts, top_k=k, low_bits=rng.choice([(), (4.0,)]), **shared)
        policy = composition(rng)
        costs = CostModel(model, toy(rng), chunk_bytes=rng.choice([None, None, 300]))
        if "oracle:routing" in policy.needs:
            policy.bind_oracle(FutureUse(work))
        found: Any
        try:
            found = simulate(
                model=model, costs=costs, workload=work, policy=in_python(policy) if python else policy,
                cache_slots={"gpu0": rng.randint(1, layers * experts)}, predictors=PredictorSet(trace, work, {}, 0),
                tables=trace.tables, options=EngineOptions(rng.choice([0, 0, 13])), policy_name="drawn", engine=engine,
            )  # fmt: skip
        except MoesimError as error:
            found = type(error), str(error)
        yield found, policy


def assert_alike(seed: int) -> tuple[Records | None, Composed]:
    """Play a run in all three ways; give the records, if it came to its end, and the policy."""
    (expected, policy), *others = outcomes(seed)
    for found, _ in others:
        if isinstance(expected, Records) and isinstance(found, Records):
            assert_same(expected, found)
        else:
            assert expected == found
    return (expected if isinstance(expected, Records) else None), policy
