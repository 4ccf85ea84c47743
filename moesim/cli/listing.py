"""``moesim list``: what there is to choose from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from moesim.cli.listing_policies import (
    Rows,
    brief,
    cards,
    explain_parts,
    explain_policies,
    explanations,
    list_parts,
    list_policies,
    written,
)
from moesim.cli.options import Printed
from moesim.core.table import Format, render, render_records
from moesim.core.text import shown_lines
from moesim.core.units import format_bytes
from moesim.errors import ConfigError
from moesim.hardware import hardware_names, load_hardware
from moesim.model import builtin_models
from moesim.trace import Trace, find_trace, trace_names
from moesim.trace.formats.detect import formats

_WIDEST = 48  # characters of a column that others follow, where the table goes to a file or a pipe


Kind = StrEnum("Kind", ["policies", "parts", "models", "hardware", "traces", "predictors", "parameters", "formats"])


def listing(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Policies or parts of which each option is explained.", show_default=False),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Policies with paper, what is missing, and options.")] = False,
    form: Printed = Format.TABLE,
) -> None:
    """List policies, parts, models, hardware profiles, traces, predictors, parameters of synthetic routing, or import formats.

    Example: moesim list policies dali
    """
    if names and kind not in _EXPLAIN:
        raise ConfigError(f"list {kind.value}: expected no name, got {names[0]}; names are for policies and parts")
    if long and (names or kind is not Kind.policies or form is not Format.TABLE):
        raise ConfigError(
            f"list {kind.value}: --long: expected policies without a name, as a table; all else is long; leave it out"
        )
    rows = _EXPLAIN[kind](names) if names else _LISTS[kind]()
    if form in (Format.JSON, Format.JSONL):
        sys.stdout.write(render_records(rows, form))
        return
    if form is Format.TABLE and (names or kind is Kind.policies):
        text = explanations(rows) if names else cards(rows) if long else brief(rows)
        sys.stdout.write(shown_lines(text))
        return
    columns = list(rows[0]) if rows else ["name"]
    sys.stdout.write(render(columns, [[written(row[c]) for c in columns] for row in rows], form, widest=_WIDEST))


def _models() -> Rows:
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


def _hardware() -> Rows:
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


def _traces() -> Rows:
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


def _predictors() -> Rows:
    rows: Rows = [{"name": name, "label": label, "what it is": text} for name, (label, text) in _MADE.items()]
    for name in trace_names():
        trace = Trace.read(find_trace(name), verify=False)
        for signal in trace.signals.values():
            about = f"recorded in {name}: {signal.about or 'a prediction'}"
            rows.append({"name": f"signal:{signal.name}", "label": "-", "what it is": about})
    return rows


def _parameters() -> Rows:
    from moesim.trace.synthesis import parameter_names, read_parameters  # SciPy takes most of a second to import

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


def _formats() -> Rows:
    found = formats().values()
    return [{"name": one.name, "label": one.label or "to be given", "what it is": one.about} for one in found]


_LISTS: dict[Kind, Callable[[], Rows]] = {
    Kind.policies: list_policies,
    Kind.parts: list_parts,
    Kind.models: _models,
    Kind.hardware: _hardware,
    Kind.traces: _traces,
    Kind.predictors: _predictors,
    Kind.parameters: _parameters,
    Kind.formats: _formats,
}
_EXPLAIN: dict[Kind, Callable[[list[str]], Rows]] = {Kind.policies: explain_policies, Kind.parts: explain_parts}
