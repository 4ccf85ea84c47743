"""``moesim list``: what there is to choose from; each function imports what it lists."""

from __future__ import annotations

import json
import re
import sys
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any

import typer

from moesim.cli.options import Printed, name_or_mapping
from moesim.cli.outputs import show
from moesim.core.table import Format, render, render_records, written
from moesim.core.text import shown_lines
from moesim.core.units import digits, format_memory
from moesim.errors import ConfigError

Rows = list[dict[str, Any]]


def parts(words: list[str] | None = None) -> Rows:
    """List GPUs and CPUs of the catalogue whose names have all the words."""
    from moesim.hardware.parts import Cpu, Gpu, parts_of

    found: list[Any] = [
        (one, "gpu", f"{one.vram_GiB:g} GiB", one.memory_bandwidth_GBps, f"{one.fp16_dense_TFLOPs:g} TFLOP/s")
        for one in parts_of(Gpu)
    ]
    for cpu in parts_of(Cpu):
        memory, rate = f"{cpu.memory_channels} x {'/'.join(cpu.memory_types)}", cpu.memory_channels * cpu.max_MTps * 8 / 1000
        found.append((cpu, "cpu", memory, rate, f"{cpu.cores} cores"))
    return [
        {"name": one.name, "kind": kind, "memory": memory, "GB/s": f"{rate:.4g}", "computes": computes,
         "PCIe": f"{one.pcie_gen} x{one.pcie_lanes}" if one.pcie_gen else "-"}
        for one, kind, memory, rate, computes in found
        if _have(words, one.name, *one.aliases)
    ]  # fmt: skip


def models() -> Rows:
    """List models."""
    from moesim.model import load_model
    from moesim.model.load import model_names

    found = ((name, load_model(name)) for name in model_names())
    return [
        {
            "name": name, "params": f"{digits(model.total_params / 1e9, 3)} B",
            "active": f"{digits(model.active_params / 1e9, 3)} B",
            "experts": f"{model.n_layers} x {model.n_experts}", "k": model.top_k, "expert": format_memory(model.expert_bytes(0)),
            "as released": format_memory(model.n_bytes),
        }
        for name, model in found
    ]  # fmt: skip


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


def engines() -> Rows:
    """List engine profiles."""
    from moesim.hardware.engines import engine_profiles

    return [
        {
            "name": one.name, "also": ", ".join(one.aliases), "builds": ", ".join(one.builds), "runs on": ", ".join(one.backends),
            "what it is": one.description,
        }
        for one in engine_profiles()
    ]  # fmt: skip


def schedulers(names: list[str] | None = None) -> Rows:
    """List schedulers of served workloads, or the options of some."""
    from moesim.serving import SCHEDULERS
    from moesim.serving.scheduler import options_of, scheduler_class

    if names:
        return [
            {"name": name, "option": key, "default": _default(one.default), "what it is": one.metadata["words"]}
            for name in names
            for key, one in options_of(scheduler_class(name, "list schedulers")).items()
        ]
    return [
        {
            "name": name, "what it is": (found.__doc__ or "").splitlines()[0].rstrip("."),
            "options": ", ".join(f"{key} {_default(one.default)}" for key, one in options_of(found).items()),
        }
        for name, found in sorted(SCHEDULERS.items())
    ]  # fmt: skip


def _default(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "-" if value is None else f"{value}"


LISTS = {
    "models": models,
    "hardware": hardware,
    "parts": parts,
    "engines": engines,
    "traces": traces,
    "predictors": predictors,
    "parameters": parameters,
    "formats": formats,
    "schedulers": schedulers,
}


_WIDEST = 48  # characters of a column that others follow, where the table goes to a file or a pipe

Kind = StrEnum(
    "Kind",
    {
        "policies": "policies", "policy_parts": "policy-parts", "models": "models", "hardware": "hardware", "parts": "parts",
        "engines": "engines", "traces": "traces", "predictors": "predictors", "parameters": "parameters", "formats": "formats",
        "schedulers": "schedulers",
    },
)  # fmt: skip
_ELSEWHERE = {Kind.hardware: "`moesim list parts` has the GPUs and CPUs that a machine can be made of"}
_EXPLAINED = (Kind.policies, Kind.policy_parts)


def listing(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Policies and schedulers whose options are explained; of other kinds, words that rows have.",
            show_default=False,
        ),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Policies with paper, what is missing, and options.")] = False,
    form: Printed = Format.TABLE,
) -> None:
    """List policies, models, hardware, traces and other names.

    Example: moesim list parts rtx 30
    """
    long = long and not names and kind is Kind.policies and form is Format.TABLE  # all else is long
    if kind in _EXPLAINED:
        from moesim.cli import listing_policies as of_policies  # only what is listed is imported

        rows = of_policies.EXPLAIN[kind.value](names) if names else of_policies.LISTS[kind.value]()
        if form is Format.TABLE and (names or kind is Kind.policies):
            write = of_policies.explanations if names else of_policies.cards if long else of_policies.brief
            show(shown_lines(write(rows)))
            return
    else:
        from moesim.cli.listing import LISTS

        named = {Kind.parts: parts, Kind.schedulers: schedulers}
        rows = named[kind](names) if kind in named else [row for row in LISTS[kind.value]() if _have(names, *row.values())]
    if form in (Format.JSON, Format.JSONL):
        sys.stdout.write(render_records(rows, form))
        return
    if names and not rows:
        near = next((found for name in names if (found := _near(name, kind))), "")
        got, remedy = " ".join(names), f"did you mean {near}?" if near else _ELSEWHERE.get(kind, "leave some out")
        raise ConfigError(f"list {kind.value}: expected words that a row has, got {got}; {remedy}")
    columns = list(rows[0]) if rows else ["name"]
    if kind is Kind.hardware and form is Format.TABLE:  # CSV and JSON have all
        columns = ["name", "GPU memory", "description"]
        rows = [{**row, "description": re.split(r", (?![^(]*\))", row["description"])[0].rstrip(".")} for row in rows]
    sys.stdout.write(render(columns, [[written(row[c]) for c in columns] for row in rows], form, widest=_WIDEST))


def _near(word: str, kind: Kind) -> str:
    """Find a word of the rows that is spelled almost so."""
    words = {part for row in LISTS[kind.value]() for part in re.split(r"[^a-z]+", str(row["name"]).lower())}
    return next(iter(get_close_matches(word.lower(), words, n=1)), "")


def _have(words: list[str] | None, *values: Any) -> bool:
    text = " ".join(map(str, values)).lower()
    return all(word.lower() in text for word in words or ())


CardForm = StrEnum("CardForm", ["text", "json"])


def model(
    source: Annotated[str, typer.Argument(metavar="X", help="A name, a checkpoint's folder, config.json, GGUF file or YAML.")],
    output: Annotated[CardForm, typer.Option("--output", "-o", help="As text, or all figures as JSON.")] = CardForm.text,
) -> None:
    """Print a model's card: layers, parameters, bytes, KV cache.

    Example: moesim model qwen3.5-35b-a3b
    """
    from moesim.model import Card, load_model

    card = Card(load_model(name_or_mapping(source, "model"), "model"))
    sys.stdout.write(card.text() if output is CardForm.text else json.dumps(card.to_dict(), indent=2) + "\n")
