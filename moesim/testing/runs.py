"""Small runs for tests of policies: a made-up workload on a tiny machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from moesim.engine import EngineOptions, simulate
from moesim.errors import ConfigError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.costs import CostModel
from moesim.records import Records
from moesim.testing.fakes import tiny_machine, tiny_model
from moesim.testing.traces import synthetic_trace
from moesim.trace.predictors import FutureUse, PredictorSet
from moesim.trace.workload import Workload, WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.trace import Trace

N_PROMPT, N_DECODE = 12, 8  # tokens of each request of `tiny_workload`


def tiny_workload(
    policy: Any, batch_size: int = 1, micro_batches: int = 1, *, decode: int = N_DECODE, **shape: Any
) -> tuple[Trace, Workload]:  # fmt: skip
    """Return a made-up trace that holds what a policy needs, and a small workload of it.

    Parameters
    ----------
    policy : Policy
        Its ``needs`` decide which signals, tables and scores the trace holds.
    batch_size, micro_batches : int
        Of the workload, whose prompts have 12 tokens.
    decode : int
        Decode steps.
    **shape
        Arguments of `moesim.testing.traces.synthetic_trace`, for another model than `tiny_model`.
    """
    signals = {need.removeprefix("signal:"): 0.8 for need in sorted(policy.needs) if need.startswith("signal:")}
    trace = synthetic_trace(
        prompt=N_PROMPT,
        decode=decode,
        scores=not policy.needs.isdisjoint(("scores", "scores-or-weights")),
        calibration=True,
        signals=signals,
        **shape,
    )
    tables = {need.removeprefix("table:") for need in policy.needs if need.startswith("table:")}
    if not tables <= trace.tables.keys():
        missing = ", ".join(sorted(tables - trace.tables.keys()))
        raise ConfigError(
            f"policy {type(policy).__name__}: needs table:{missing}, which no made-up trace holds (known: "
            f"{', '.join(sorted(trace.tables))}); check it on a trace that does, with moesim compare"
        )
    spec = WorkloadSpec(
        batch_size=batch_size, prompt_tokens=N_PROMPT, decode_tokens=decode, micro_batches=micro_batches, prefill_chunk=24
    )
    return trace, compose(trace, spec, require_signals=frozenset(signals))


def run_tiny(
    policy: Any,
    workload: tuple[Trace, Workload],
    slots: int = 16,
    decision_ns: int = 0,
    *,
    hardware: HardwareProfile | None = None,
    **changes: Any,
) -> Records:
    """Simulate a tiny workload on the tiny machine, or the policy's profile; return the records.

    Parameters
    ----------
    policy : Policy
        Whose decisions.
    workload : tuple of Trace and Workload
        From `tiny_workload`.
    slots : int
        Cache slots of each GPU, of 32 experts in all.
    decision_ns : int
        Time charged for each decision at Routed.
    hardware : HardwareProfile or None
        Another machine.
    **changes
        Fields of the model other than `tiny_model`'s.
    """
    trace, steps = workload
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(steps))
    return simulate(
        **run_inputs(policy, workload, slots, hardware, changes),
        predictors=PredictorSet(trace, steps, {}, 0),
        options=EngineOptions(decision_ns=decision_ns),
        policy_name=type(policy).__name__,
    )


def run_inputs(
    policy: Any, workload: tuple[Trace, Workload], slots: int, hardware: HardwareProfile | None, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what `simulate` and `initial_placement` have in common."""
    trace, steps = workload
    machine = hardware or machine_of(policy)
    model = tiny_model(**{"low_bits": getattr(policy, "low_bits", ()), **changes})
    return {
        "model": model, "costs": CostModel(model, machine), "workload": steps, "policy": policy,
        "cache_slots": {name: slots for name, device in machine.devices.items() if device.kind == "gpu"},
        "tables": {name: table for name, table in trace.tables.items() if f"table:{name}" in policy.needs},
    }  # fmt: skip


def machine_of(policy: Any) -> HardwareProfile:
    """Return a policy's machine for checks: the profile that it names, else `tiny_machine`."""
    return _machine(getattr(policy, "profile", ""))


@cache
def _machine(profile: str) -> HardwareProfile:
    return load_hardware(profile) if profile else tiny_machine()
