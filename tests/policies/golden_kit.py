"""What the golden results are results of: every policy on six settings, every part in some composition; and their digests.

All settings replay the first requests of a shipped trace, which have every signal and table that a policy may want. Where a
cache has slots for each layer, 153 and 100 over 32 layers and 205 over 26 leave a remainder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from moesim.core.record_table import RecordTable
from moesim.engine import EngineOptions, simulate
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.policies.registry import POLICIES, make_policy, policy_class
from moesim.records import Records
from moesim.trace import Trace, find_trace
from moesim.trace.calibrating import LATER, Additions, extend
from moesim.trace.derived import subset
from moesim.trace.predictors import FutureUse, PredictorSet
from moesim.trace.workload import Workload, WorkloadSpec, compose


@dataclass(frozen=True)
class Setting:
    """On what a policy runs."""

    requests: tuple[int, ...] = (0, 1, 2, 3)
    batch: int = 4
    slots: int = 153  # of all GPUs together
    micro_batches: int = 1
    prefill_chunk: int | None = None
    refill: bool = False
    contention: bool = True
    chunk_bytes: int | None = None
    decision_ns: int = 0
    trace: str = "mini-mixtral"


SETTINGS = {
    "contention": Setting(),
    "no contention": Setting(contention=False),
    "chunks": Setting(requests=(0,), batch=1, chunk_bytes=16 << 20),
    "two micro-batches": Setting(micro_batches=2),
    "decision time": Setting(requests=(4,), batch=1, slots=100, decision_ns=200_000),
    "fine-grained": Setting(
        requests=(0, 1, 2), batch=2, slots=205, prefill_chunk=64, refill=True, trace="mini-deepseek-v2-lite"
    ),
}  # fmt: skip

ONE_GPU = "rtx3090-epyc7532"
TWO_GPUS = "rtx3090x2-epyc7532"
NODES = "odmoe-10x3090"  # its costs are those of FP32
WITH_DISK = "RTX 3090 + EPYC 7532 + 256GB DDR4-3200 + nvme4"
MODELS = {"mini-mixtral": {"base": "mixtral-8x7b", "expert_bits": 4}, "mini-deepseek-v2-lite": {"base": "deepseek-v2-lite"}}
# What the policies use several GPUs, nodes or a disk of; the others run on one GPU and one CPU.
MACHINES = {
    "all-gpu": TWO_GPUS, "dali-multi-gpu": TWO_GPUS, "od-moe": NODES, "llama-cpp-ssd": WITH_DISK, "colibri": WITH_DISK
}  # fmt: skip
LEAST = {"llama-cpp-ssd": 3}
"""Cache slots that each expert of a token needs in a layer."""
OPTIONS: dict[str, dict[str, Any]] = {"all-gpu": {"gpus": "all"}}


def _composed(placement: str, assignment: Any, prefetch: Any, replacement: Any, **more: Any) -> dict[str, Any]:
    return {"name": "composed", "placement": placement, "assignment": assignment, "prefetch": prefetch,
            "replacement": replacement, **more}  # fmt: skip


PREDICTED = {"name": "predicted", "source": "residual", "size": 2}
INTO_CACHE = {**PREDICTED, "pool": "cache"}
GLOBAL = {"scope": "global"}
# Compositions in which every part that has a name occurs.
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "none + all-gpu + random + lru": _composed("none", "all-gpu", "random", "lru"),
    "random + greedy + predicted + lfu": _composed("random", "greedy", PREDICTED, "lfu"),
    "lowest-ids + exact + predicted into the cache + belady": _composed("lowest-ids", "exact", INTO_CACHE, "belady"),
    "highest-ids + beam + none + fifo": _composed("highest-ids", {"name": "beam", "width": 4}, "none", "fifo", load_order="rows"),
    "frequency-global + threshold + none + static": _composed("frequency-global", "threshold", "none", "static", **GLOBAL),
    "frequency-global + all-gpu + predicted + least-stale": _composed(
        "frequency-global", "all-gpu", INTO_CACHE, "least-stale", **GLOBAL
    ),
    "frequency-global + all-gpu + predicted + least-stale-2gen": _composed(
        "frequency-global", "all-gpu", INTO_CACHE, "least-stale-2gen", **GLOBAL
    ),
    "frequency-per-layer + fixed-threshold + none + random": _composed(
        "frequency-per-layer", "fixed-threshold", "none", "random"
    ),
    "frequency-per-layer + resident + predicted + static": _composed("frequency-per-layer", "resident", PREDICTED, "static"),
    "frequency-global + resident-in-decode + none + static": _composed(
        "frequency-global", "resident-in-decode", "none", "static", **GLOBAL
    ),
    "random + all-cpu + none + static": _composed("random", "all-cpu", "none", "static", **GLOBAL),
    "highest-ids + queues + impact-driven + mrs": _composed("highest-ids", "queues", "impact-driven", "mrs", load_order="plan"),
    "random + hss + mrs-score + mrs": _composed("random", "hss", "mrs-score", "mrs"),
    "lowest-ids + greedy + cross-layer + lru": _composed("lowest-ids", "greedy", "cross-layer", "lru"),
    "random + greedy + predicted + workload-aware": _composed(
        "random", "greedy", PREDICTED, "workload-aware", cache_only=True, staging_slots=3
    ),
    "lowest-ids + all-gpu + none + arc": _composed("lowest-ids", "all-gpu", "none", "arc"),
    "lowest-ids + all-gpu + none + s3-fifo": _composed("lowest-ids", "all-gpu", "none", "s3-fifo"),
    "lowest-ids + all-gpu + none + arc, global": _composed("lowest-ids", "all-gpu", "none", "arc", **GLOBAL),
    "none + all-gpu + predicted into the cache + activation-aware": _composed("none", "all-gpu", INTO_CACHE, "activation-aware"),
}
OF_COMPOSITIONS = ("contention", "fine-grained")


@dataclass(frozen=True)
class Case:
    """One golden result."""

    policy: Mapping[str, Any]
    machine: str
    setting: str


CASES = {
    **{f"{name}, {setting}": Case({"name": name, **OPTIONS.get(name, {})}, MACHINES.get(name, ONE_GPU), setting)
       for name in sorted(POLICIES) for setting in SETTINGS},
    **{f"{name}, {setting}": Case(spec, ONE_GPU, setting) for name, spec in COMPOSITIONS.items() for setting in OF_COMPOSITIONS},
}  # fmt: skip


@cache
def _inputs(setting: Setting) -> tuple[Trace, Workload]:
    trace = Trace.read(find_trace(setting.trace))
    spec = WorkloadSpec(
        batch_size=setting.batch, prompt_tokens=48, decode_tokens=9, micro_batches=setting.micro_batches,
        prefill_chunk=setting.prefill_chunk, refill=setting.refill, requests=setting.requests,
    )  # fmt: skip
    return replace(trace, tables={**trace.tables, **newer_tables(trace, setting.requests)}), compose(trace, spec)


def newer_tables(trace: Trace, simulated: tuple[int, ...]) -> dict[str, Any]:
    """Count the tables that the shipped traces lack, from requests that are not simulated."""
    others = [request for request in range(8, 40) if request not in simulated]
    held = extend(subset(trace, others), Additions(share=0.99), "golden")
    return {name: held.tables[name] for name in LATER}


def run_case(case: Case, engine: str | None = None, **more: Any) -> Records:
    """Simulate one case."""
    setting = SETTINGS[case.setting]
    trace, workload = _inputs(setting)
    hardware = load_hardware(case.machine)
    precision = dict.fromkeys(("expert_bits", "other_bits", "kv_bits", "act_bits"), 32) if case.machine == NODES else {}
    model = load_model(MODELS[setting.trace] | precision)
    if getattr(policy_class(case.policy["name"]), "low_bits", ()):  # a policy for two widths gets half of the full one, too
        model = replace(model, low_bits=(model.expert_bits / 2,))
    if not setting.contention:
        hardware = replace(hardware, contention=())
    gpus = [name for name, device in hardware.devices.items() if device.kind == "gpu"]
    policy: Any = make_policy(case.policy)
    least = LEAST.get(case.policy["name"], 0) * model.top_k * model.n_layers
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(workload))
    return simulate(
        model=model,
        costs=CostModel(model, hardware, chunk_bytes=setting.chunk_bytes),
        workload=workload,
        policy=policy,
        cache_slots=dict.fromkeys(gpus, max(setting.slots // len(gpus), least)),
        predictors=PredictorSet(trace, workload, {}, 0),
        tables=trace.tables,
        options=EngineOptions(decision_ns=setting.decision_ns),
        policy_name=case.policy["name"],
        engine=engine,
        **more,
    )


def golden(records: Records) -> dict[str, Any]:
    """Return what is kept of a run: numbers for people, and for each list of records their count and a digest."""
    kept: dict[str, Any] = {
        "makespan_ns": records.makespan_ns,
        "hits": sum(sum(visit.hits) for visit in records.lookups),
        "lookups": sum(len(visit.hits) for visit in records.lookups),
        "bytes": sum(transfer.n_bytes for transfer in records.transfers),
        "evictions": len(records.evictions),
    }
    return kept | {f"records.{name}": f"{len(rows)} {digest(rows)}" for name, rows in _lists(records) if rows}


def _lists(records: Records) -> Iterable[tuple[str, list[Any]]]:
    for name, value in vars(records).items():
        if isinstance(value, dict):
            yield name, sorted(value.items())
        elif isinstance(value, set):
            yield name, sorted(value)
        elif isinstance(value, RecordTable):
            yield name, list(value)


_PLAIN = {int, str, type(None)}  # most columns, and what is in most tuples: written as they are


def digest(rows: list[Any]) -> str:
    """Return the start of the SHA-256 of a list of records, column by column and by the names of the columns.

    Numbers are written in decimal, and floats, which sums of gate weights are, with six digits: the same everywhere.
    """
    names = getattr(rows[0], "_fields", ("",))
    columns = zip(*rows, strict=True) if names != ("",) else (rows,)
    found = hashlib.sha256()
    for name, column in zip(names, columns, strict=True):
        if name in ("bits", "left") and not any(column):  # nothing but full widths, nothing cut off: as before there were such
            continue
        inside = chain.from_iterable(column) if {tuple}.issuperset(map(type, column)) else column
        plain = column if _PLAIN.issuperset(map(type, inside)) else [_plain(value) for value in column]
        found.update(f"{name}:{json.dumps(plain, separators=(',', ':'))}\n".encode())
    return found.hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, str):
        return value
    return format(value, ".6g") if isinstance(value, float) else int(value)
