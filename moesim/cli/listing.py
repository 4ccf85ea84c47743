"""``moesim list``: what there is to choose from."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from moesim.cli.options import Printed
from moesim.core.table import Format, render, render_records
from moesim.core.text import shown_lines
from moesim.core.units import format_bytes
from moesim.errors import ConfigError, unknown_name
from moesim.hardware import hardware_names, load_hardware
from moesim.model import builtin_models
from moesim.policies.declare import option_parameters
from moesim.policies.importing import check_target, import_class
from moesim.policies.moot import describe_rules
from moesim.policies.options import describe_options
from moesim.policies.part_hints import class_as_policy, lacking_of_a_policy
from moesim.policies.part_names import PARTS
from moesim.policies.registry import policy_class, policy_info, policy_names
from moesim.trace import Trace, find_trace, trace_names
from moesim.trace.formats.detect import formats

Rows = list[dict[str, Any]]
_fill = partial(textwrap.fill, break_on_hyphens=False)  # a name stays one word
_WIDEST = 48  # characters of a column that others follow, where the table goes to a file or a pipe


Kind = StrEnum("Kind", ["policies", "parts", "models", "hardware", "traces", "predictors", "parameters", "formats"])


def listing(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Policies or parts of which each option is explained.", show_default=False),
    ] = None,
    form: Printed = Format.TABLE,
) -> None:
    """List policies, parts, models, hardware profiles, traces, predictors, parameters of synthetic routing, or import formats.

    Example: moesim list policies dali
    """
    if names and kind not in (Kind.policies, Kind.parts):
        raise ConfigError(f"list {kind.value}: expected no name, got {names[0]}; names are for policies and parts")
    rows = _explained(kind, names) if names else _LISTS[kind]()
    if form in (Format.JSON, Format.JSONL):
        sys.stdout.write(render_records(rows, form))
        return
    if names and form is Format.TABLE:
        sys.stdout.write(shown_lines("\n".join(_explanation(row) for row in rows)))
        return
    if kind is Kind.policies and form is Format.TABLE:
        sys.stdout.write(shown_lines("\n".join(_card(row) for row in rows)))
        return
    columns = list(rows[0]) if rows else ["name"]
    sys.stdout.write(render(columns, [[_cell(row[c]) for c in columns] for row in rows], form, widest=_WIDEST))


def _explained(kind: Kind, names: list[str]) -> Rows:
    """Describe each option of some policies or parts."""
    places = [("", name, _policy(name)) for name in names] if kind is Kind.policies else []
    if kind is Kind.parts:
        known = {name for parts in PARTS.values() for name in parts}
        for name in names:
            if name not in known and ":" not in name:
                raise ConfigError(
                    f"list parts: {_a_policy(name) if name in policy_names() else unknown_name('part', name, known)}"
                )
        places = [(of, name, parts[name]) for name in names for of, parts in PARTS.items() if name in parts]
        places += [("own part", name, _own_part(name)) for name in names if ":" in name]
    return [
        {
            "name": name,
            **({"kind": of} if of else {}),
            "summary": (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " "),
            "options": [option._asdict() for option in describe_options(cls)],
        }
        for of, name, cls in places
    ]


def _policy(name: str) -> type:
    """Find a policy; what is a user's part is named as one."""
    cls = policy_class(name, "list policies")
    if lacking_of_a_policy(cls) and class_as_policy(name, cls):
        raise ConfigError(f"list policies: expected a policy, got {name}, a part; `moesim list parts {name}` explains it")
    return cls


def _own_part(name: str) -> type:
    """Import a user's part; what is a policy is named as one."""
    cls = import_class(check_target(name, "list parts"), "list parts")
    if not lacking_of_a_policy(cls):
        raise ConfigError(f"list parts: {_a_policy(name)}")
    return cls


def _a_policy(name: str) -> str:
    return f"expected a part, got {name}, a policy; `moesim list policies {name}` explains it"


def _explanation(row: dict[str, Any]) -> str:
    """Write a policy or part with a paragraph for each option."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    what = f"{row['kind']} {row['name']}" if "kind" in row else row["name"]
    lines = [_fill(f"{what}: {row['summary']}", width, subsequent_indent="  ")]
    for one in row["options"]:
        start = "required" if one["required"] else f"default {_cell(one['default'])}"
        lines.append(_fill(f"  {one['name']}: {one['type']}; {start}", width, subsequent_indent="      "))
        told = [one["meaning"].replace("``", ""), one["moot"] and f"({one['moot']})"]
        lines += [_fill(f"      {text}", width, subsequent_indent="      ") for text in told if text]
    return "\n".join(lines) + "\n"


def _card(row: dict[str, Any]) -> str:
    """Write a policy as a paragraph: its texts are too long for columns."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    lines = [f"{row['name']}: {row['summary']}", *(f"{key}: {_cell(row[key])}" for key in ("paper", "missing", "options"))]
    rules = dict.fromkeys(row["moot"].values())
    lines += ["options that matter under a condition only, and are refused otherwise:"] if rules else []
    lines += [f"{', '.join(name for name, text in row['moot'].items() if text == rule)}: {rule}" for rule in rules]
    if not row["exact"]:
        lines.append("not exact: what it runs may differ from what was routed")
    wrapped = [_fill(lines[0], width, subsequent_indent="  ")]
    wrapped += [_fill(f"  {line}", width, subsequent_indent="    ") for line in lines[1:] if not line.endswith(": -")]
    return "\n".join(wrapped) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_cell(one)}" for key, one in value.items()) or "-"
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value)) or "-"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _policies() -> Rows:
    return [
        {
            "name": info.name,
            "exact": info.exact,
            "summary": info.summary,
            "paper": info.paper or "-",
            "missing": list(info.missing),
            "options": {
                key: value if isinstance(value, str | int | float | bool | None) else repr(value)
                for key, value in info.options.items()
            },
            "moot": dict(info.moot),
        }
        for info in policy_info()
    ]


def _parts() -> Rows:
    return [
        {
            "kind": kind,
            "name": name,
            "options": [
                (key if one.default is one.empty else f"{key}={_cell(one.default)}")
                + (f" ({rules[key]})" if key in rules else "")
                for key, one in option_parameters(part).items()
            ],
            "summary": (inspect.getdoc(part) or "").split("\n\n")[0].replace("\n", " "),
        }
        for kind, parts in PARTS.items()
        for name, part in parts.items()
        for rules in (describe_rules(part),)
    ]


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
    Kind.policies: _policies,
    Kind.parts: _parts,
    Kind.models: _models,
    Kind.hardware: _hardware,
    Kind.traces: _traces,
    Kind.predictors: _predictors,
    Kind.parameters: _parameters,
    Kind.formats: _formats,
}
