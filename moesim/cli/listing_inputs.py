"""What ``moesim list`` shows beside policies and parts: models, machines, traces, predictors, parameters, formats.

Each function imports what it lists: one is asked for at a time.
"""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]


def models() -> Rows:
    """List models."""
    from moesim.model import builtin_models

    return [{**model.facts(), "name": name} for name, model in builtin_models().items()]


def hardware() -> Rows:
    """List hardware."""
    from moesim.hardware import hardware_names, load_hardware

    return [load_hardware(name).facts() for name in hardware_names()]


def traces() -> Rows:
    """List traces."""
    from moesim.trace import Trace, find_trace, trace_names

    return [{"name": name, **Trace.read(find_trace(name), verify=False).facts()} for name in trace_names()]


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
    from moesim.trace.formats.importing import formats as known

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
