"""What ``moesim list`` shows beside policies and parts: models, machines, traces, predictors, parameters, formats.

Each function imports what it lists: one is asked for at a time.
"""

from __future__ import annotations

from typing import Any

from moesim.core.units import format_bytes

Rows = list[dict[str, Any]]


def models() -> Rows:
    """List models."""
    from moesim.model import builtin_models

    return [
        {
            "name": name,
            "layers": model.n_layers + model.n_dense_layers,
            "MoE layers": model.n_layers,
            "experts": model.n_experts,
            "top_k": model.top_k,
            "shared": model.n_shared,
            "bytes per expert": format_bytes(model.expert_bytes(0)),
            "all experts": format_bytes(sum(model.expert_bytes(i) for i in range(model.n_layers)) * model.n_experts),
            "the rest": format_bytes(model.non_expert_bytes),
            "source": model.source,
        }
        for name, model in builtin_models().items()
    ]


def hardware() -> Rows:
    """List hardware."""
    from moesim.hardware import hardware_names, load_hardware

    rows = []
    for name in hardware_names():
        profile = load_hardware(name)
        gpus = [device for device in profile.devices.values() if device.kind == "gpu"]
        rows.append(
            {
                "name": name,
                "devices": list(profile.devices),
                "GPU memory": format_bytes(max((gpu.memory_bytes for gpu in gpus), default=0)),
                "links": len(profile.links),
                "sources": list(profile.labels),
                "description": " ".join(profile.description.split()),
            }
        )
    return rows


def traces() -> Rows:
    """List traces."""
    from moesim.trace import Trace, find_trace, trace_names

    rows = []
    for name in trace_names():
        trace = Trace.read(find_trace(name), verify=False)
        table = trace.requests
        rows.append(
            {
                "name": name,
                "routing of": trace.model,
                "label": trace.label,
                "layers": trace.n_layers,
                "experts": trace.n_experts,
                "top_k": trace.top_k,
                "requests": trace.n_requests,
                "prompt tokens": _span(table.prompt_offset + table.n_prompt),
                "decode tokens": _span(table.n_decode),
                "signals": list(trace.signals),
                "tables": list(trace.tables),
            }
        )
    return rows


def _span(values: Any) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low}..{high}"


_MADE = {
    "oracle": ("oracle", "the true routing, known from the start"),
    "synthetic:<recall>": ("synthetic", "the true routing, spoilt to a stated recall, or to one a layer: 0.4,0.7,0.8"),
    "frequency": ("-", "the experts used most often: from the calibration table or, with :running, so far"),
    "coactivation": ("-", "the experts that follow those of the layer before, from the same sources"),
}
"""Predictors that need no recorded signal: label, and what they say."""


def predictors() -> Rows:
    """List predictors."""
    from moesim.trace import Trace, find_trace, trace_names

    rows: Rows = [{"name": name, "label": label, "what it is": text} for name, (label, text) in _MADE.items()]
    for name in trace_names():
        trace = Trace.read(find_trace(name), verify=False)
        for signal in trace.signals.values():
            about = f"recorded in {name}: {signal.about or 'a prediction'}"
            rows.append({"name": f"signal:{signal.name}", "label": "-", "what it is": about})
    return rows


def parameters() -> Rows:
    """List parameters."""
    from moesim.trace.synthesis import parameter_names, read_parameters

    return [
        {
            "name": name,
            "routing of": found.model,
            "layers": found.n_layers,
            "experts": found.n_experts,
            "top_k": found.top_k,
            "fitted to": found.fitted_to,
        }
        for name in parameter_names()
        for found in (read_parameters(name),)
    ]


def formats() -> Rows:
    """List formats."""
    from moesim.trace.formats.detect import formats as known

    found = known().values()
    return [{"name": one.name, "label": one.label or "to be given", "what it is": one.about} for one in found]


LISTS = {
    "models": models,
    "hardware": hardware,
    "traces": traces,
    "predictors": predictors,
    "parameters": parameters,
    "formats": formats,
}
