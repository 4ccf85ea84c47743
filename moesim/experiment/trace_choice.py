"""Which routing fits a model: a trace of its shape, or parameters to make routing of its shape up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moesim.errors import TraceError
from moesim.experiment.config import Config, WorkloadConfig, parse_config
from moesim.experiment.forms import listed
from moesim.experiment.needs import wants_of
from moesim.experiment.sweep import each_model, entries_of, expand
from moesim.model import load_model
from moesim.policies.imports import foreign
from moesim.trace import Trace, find_trace, trace_names
from moesim.trace.format import read_facts
from moesim.trace.made import MADE, MAX_TOKENS
from moesim.trace.workload.spec import LEAST, size_of

if TYPE_CHECKING:
    from pathlib import Path

    from moesim.model import ModelSpec

_SIGNALS = frozenset({"signal:gate_next1", "signal:gate_next2", "signal:gate_next3", "signal:residual"})
"""Signals of routing that is made up; a policy that reads others needs a recorded trace."""
_SHAPE = ("n_layers", "n_experts", "top_k")
_TRUER = frozenset({"mixtral-8x7b"})
"""Models whose parameters have the locality of recordings, while the shipped miniature flatters caches: with it lru is 5 to 14 %
and fiddler 14 to 29 % faster in the six settings of the quickstart. Where a cache's worth is asked, it comes second."""
_LEAST = 16
"""Requests that are made up at least, and twice as many as a workload takes: other seeds draw others."""
_TOKENS = 64  # of a prompt and of a decode whose length is left to the trace
_ORIGINS = ("recorded", "miniature", "synthetic")  # what is taken first


def shape_of(what: ModelSpec | Trace) -> str:
    """Write the shape of a model's routing, or of a trace.

    >>> from moesim.model import load_model
    >>> shape_of(load_model("mixtral-8x7b"))
    '32 layers of 8 experts, top 2'
    """
    return f"{what.n_layers} layers of {what.n_experts} experts, top {what.top_k}"


def fits(trace: Trace, model: ModelSpec) -> bool:
    """Whether a trace has the shape of a model's routing."""
    return all(getattr(trace, name) == getattr(model, name) for name in _SHAPE)


def traces_of_shape(model: ModelSpec) -> Iterator[tuple[str, Trace]]:
    """Give the traces that fit a model by name: its own first, then recordings, then miniatures, then synthetic ones."""
    found = []
    for name in trace_names():
        with suppress(TraceError):  # damaged, or being written: it is not asked for by name
            path = find_trace(name)
            if _may_fit(path, model) and fits(trace := Trace.read(path, verify=False), model):
                own = model.name in (trace.model, trace.header.get("miniature_of"))
                found.append((not own, _ORIGINS.index(trace.origin), name, trace))
    for *_, name, trace in sorted(found, key=lambda one: one[:3]):
        yield name, trace


def _may_fit(path: Path, model: ModelSpec) -> bool:
    """Whether the header of a file says the shape of a model's routing; arrays take most of a second to unpack."""
    facts = {} if path.is_dir() else read_facts(path)
    return all(facts.get(name, wanted) == wanted for name in _SHAPE for wanted in (getattr(model, name),))


def parameters_of_shape(model: ModelSpec) -> str | None:
    """Name the shipped parameters that make routing up of a model's shape, its own first; None if there are none."""
    from moesim.trace.synthesis import parameter_names, read_parameters  # SciPy takes most of a second to import

    for name in sorted(parameter_names(), key=lambda name: (name != model.name, name)):
        parameters = read_parameters(name)
        if (parameters.n_layers, parameters.n_experts, parameters.top_k) == (model.n_layers, model.n_experts, model.top_k):
            return name
    return None


def flatters(trace: Trace, model: ModelSpec) -> bool:
    """Whether routing that is made up by the model's own parameters is nearer to recordings than this trace."""
    return trace.origin == "miniature" and model.name in _TRUER and parameters_of_shape(model) == model.name


def choose_trace(
    model: ModelSpec, sizes: Mapping[str, int | bool], place: str, *, recorded: bool = False
) -> tuple[str | dict[str, Any], str]:
    """Choose routing for a model."""
    parameters = parameters_of_shape(model)
    for name, trace in traces_of_shape(model):
        truer = flatters(trace, model)
        if truer and not recorded:
            written = {MADE: parameters, **sizes}
            return written, f"trace {_yaml(written)}, made up with the statistics of {parameters}; {name} flatters caches"
        of = trace.header.get("miniature_of", trace.model) if trace.origin == "miniature" else trace.model
        what = {"miniature": "a miniature in the shape of ", "synthetic": "synthetic routing of "}.get(trace.origin, "")
        why = "; it flatters caches, but has the signals that are needed" if truer else ""
        return name, f"trace {name}, routing of {what}{of}; it fits {model.name}: {shape_of(model)}{why}"
    if parameters is not None:
        written = {MADE: parameters, **sizes}
        return written, f"trace {_yaml(written)}, made up: no recorded one fits {model.name}: {shape_of(model)}"
    raise TraceError(f"{place}: expected routing of {model.name} ({shape_of(model)}), got none, and {how_to_get(model)}")


def choose_traces(raw: dict[str, Any], place: str, *, imports: bool = True) -> list[str]:
    """Give an experiment without a trace one for each of its models, and let the two vary together where they differ."""
    config = parse_config({**raw, "trace": "to be chosen"}, place)
    models = [one for model in listed(config.model) for one in each_model(model)]
    sizes = _sizes(config.workload)
    recorded = _needs_recording(config, place, imports)
    found = [choose_trace(load_model(model, f"{place}: model"), sizes, place, recorded=recorded) for model in models]
    traces = [written for written, _ in found]
    if all(written == traces[0] for written in traces):
        raw["trace"] = traces[0]
    else:
        raw |= {"model": models, "trace": traces, "zip": [*config.zip, ["model", "trace"]]}
    return list(dict.fromkeys(why for _, why in found))


def _needs_recording(config: Config, place: str, imports: bool) -> bool:
    """Whether any policy reads a signal that only recordings have."""
    seen: set[str] = set()
    entries = entries_of(config, place, imports=imports)
    for point in expand(config, place, imports=imports):
        written, entry = repr(point.reading), entries[repr(point.policy)]
        if written in seen or (not imports and foreign(point.policy)):
            continue
        seen.add(written)
        needs = wants_of(point, place, entry).needs
        if any(need.startswith("signal:") and need not in _SIGNALS for need in needs):
            return True
    return False


def _sizes(workload: WorkloadConfig) -> dict[str, int | bool]:
    """Requests, and tokens of each, that suffice for every workload of a sweep."""

    def most(values: Any) -> int:
        return max(_TOKENS if value is None else int(value) for value in listed(values))

    largest = size_of({name: most(getattr(workload, name)) for name in LEAST})
    tokens = (largest.prompt or 0) + (largest.decode or 0)
    requests = max(_LEAST, 2 * largest.requests)
    if requests * tokens > MAX_TOKENS:
        requests = largest.requests
    return {"requests": requests, "prompt": largest.prompt or 0, "decode": largest.decode or 0, "scores": True}


def fitting(model: ModelSpec) -> str:
    """Say which routing fits a model, as the remedy of a message."""
    for name, _ in traces_of_shape(model):
        return f"choose one of that shape, such as {name}"
    if (parameters := parameters_of_shape(model)) is not None:
        return f"make one of that shape up: trace: {_yaml({MADE: parameters, 'requests': 8, 'prompt': 64, 'decode': 64})}"
    return how_to_get(model)


def how_to_get(model: ModelSpec) -> str:
    """Name the commands that make a trace for a model that nothing fits."""
    return (
        "no parameters to make it up; record some with 'moesim trace record MODEL --prompts FILE --out NAME.safetensors', or "
        f"import it with 'moesim trace import FILE --model {model.name} --out NAME.safetensors', and name it as the trace"
    )


def _yaml(written: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {str(value).lower() if value is True else value}" for key, value in written.items()) + "}"
