"""A guess at how long a measurement takes, from rates of ordinary machines; no result depends on it."""

from __future__ import annotations

from typing import Final

from moesim.live.profiler.needs import subject_of
from moesim.live.profiler.plan import Plan, pair_runs
from moesim.live.profiler.probes import LIMIT_US, Probe

_RATES: Final = {"cpu": (1e10, 1.5e11), "gpu": (5e11, 3e13)}  # bytes/s, operations/s of one thread or GPU
_COPY_RATE, _DISK_RATE, _STEP_S, _FLUSH_S = 1e10, 1e9, 50e-6, 6e-3
_LONG_S = 0.25  # what takes longer is not carried out once more to warm up


def estimate_s(plan: Plan) -> float:
    """Guess how long a plan takes, in seconds."""
    total = sum(_all_repeats_s(plan, probe) for probe in plan.probes) + 2 * len(plan.sentinels) * plan.repeats * 0.01
    return total + 1.0 * len(plan.blocks) + plan.file_bytes / _DISK_RATE


def _all_repeats_s(plan: Plan, probe: Probe) -> float:
    one = _once_s(plan, probe)
    if one > LIMIT_US.get(probe.unit, 1e12) / 1e6:
        return 0.0
    return one * (1 + plan.repeats * (1 if one > _LONG_S else 2))


def _once_s(plan: Plan, probe: Probe) -> float:
    if probe.kind in ("copy", "disk_read", "disk_write", "activation"):
        return _STEP_S + probe.size / (_DISK_RATE if probe.kind.startswith("disk") else _COPY_RATE)
    if probe.kind == "pair":
        return 2 * pair_runs(plan.mode) * plan.wanted[0].shapes[0].n_bytes / _RATES["cpu"][0]
    if probe.kind in ("power", "runtime"):
        return 1.0 if probe.kind == "power" else _STEP_S
    device = plan.layout.devices[probe.device]
    rate, flops = (each * (probe.threads or 1) for each in _RATES[device.kind])
    params, n_bytes = _weights(plan, probe)
    rows = probe.size if probe.unit == "rows" else 1
    return _STEP_S + _FLUSH_S + n_bytes / rate + 2 * rows * params / flops


def _weights(plan: Plan, probe: Probe) -> tuple[int, int]:
    """Number and bytes of the weights that a probe reads."""
    if probe.bits is not None:
        shapes = {(subject_of(shape), shape.bits): shape for each in plan.wanted for shape in each.shapes}
        shape = shapes[probe.subject, probe.bits]
        return shape.n_mats * shape.hidden * shape.intermediate, shape.n_bytes
    model = next(each.model for each in plan.wanted if each.model.name == probe.subject)
    params = {
        "head": model.head_params, "shared": model.shared_params, "embedding": 0, "dense": model.dense_params,
        "leading": model.leading_params, "predict": model.dense_params,
    }.get(probe.kind, model.attention_params)  # fmt: skip
    return params, 2 * params
