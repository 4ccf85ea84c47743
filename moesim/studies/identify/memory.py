"""What a row's setting needs of the GPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.capacity import required_bytes
from moesim.core.units import parse_bytes
from moesim.errors import InputError
from moesim.experiment.budget import initial_placement, slots_within
from moesim.hardware import HardwareProfile
from moesim.hardware.costs import CostModel
from moesim.policies.registry import make_policy
from moesim.studies.identify.cases import STATIC, Case, decode_workload, placement_of, routing, shape_of
from moesim.trace.workload import WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.policy import Placement


def needed_bytes(case: Case, hardware: HardwareProfile, gpu: str) -> int | None:
    """Count what a case needs on the GPU, buffers of the engine and a policy's cache included; None where it cannot be told."""
    name, one = case.setting.policy["name"], case.observation
    tokens = (one.context + (one.decode if one.kind == "decode" else 0)) * one.batch
    plain = name in STATIC and (name != "composed" or case.setting.family == "gpu_experts")
    try:
        placement = placement_of(case, hardware, decode_workload(case)) if plain else _with_cache(case, hardware)
    except InputError:
        return None  # what is wrong is told where the row is predicted
    need = required_bytes(case.model, hardware, tokens, placement)
    return sum(need[gpu].values())


def _with_cache(case: Case, hardware: HardwareProfile) -> Placement:
    """Ask a policy with a cache where everything is at the start, and which pools it sets up."""
    model, policy = case.model, make_policy(case.setting.policy, case.observation.place)
    trace = routing(shape_of(model), case.observation.batch, 1, 1)
    workload = compose(trace, WorkloadSpec(batch_size=case.observation.batch, prompt_tokens=1, decode_tokens=1))
    tables = {name: table for name, table in trace.tables.items() if f"table:{name}" in policy.needs}
    own: Any = policy.transfer(model) if hasattr(policy, "transfer") else None
    curve, chunk = own or ("pinned", None)
    costs = CostModel(model, hardware, transfer=curve, chunk_bytes=chunk, extrapolate=True)
    if (budget := case.setting.cache.get("budget")) is not None:
        n_bytes = parse_bytes(budget, f"{case.observation.place}: setting: cache")
        slots = slots_within(n_bytes, model, costs, workload, policy, tables, str(case.setting.policy["name"]))
    else:
        slots = round(case.setting.cache.get("ratio", 1.0) * model.n_layers * model.n_experts)
    gpus = {name: slots for name, device in hardware.devices.items() if device.role == "accelerator"}
    return initial_placement(model, costs, workload, policy, gpus, tables)
