"""Which routing an advice rests on: a trace that is given, a shipped one of the model's shape, or synthetic by its parameters.

The requests are cut into groups, one trace each, so that every candidate sees the same requests, group by group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from moesim.errors import TraceError
from moesim.model import ModelSpec
from moesim.trace import Trace, find_trace
from moesim.trace.trace import trace_names
from moesim.workload import WorkloadSpec, compose

GROUPS: Final = 5
"""Groups of requests that are simulated one by one, for the spread between them."""


@dataclass(frozen=True)
class Routing:
    """Routing for an advice.

    Attributes
    ----------
    label : str
        Name in results.
    origin : str
        ``recorded``, ``miniature`` or ``synthetic``.
    groups : tuple of Trace
        One for each group of requests, of one batch each.
    written : str or mapping
        What to write into an experiment file for routing like this.
    why : str
        Why this one, if it is not the first choice; else empty.
    """

    label: str
    origin: str
    groups: tuple[Trace, ...]
    written: str | Mapping[str, Any]
    why: str = ""

    def has(self, needs: frozenset[str]) -> str | None:
        """Name the first thing that a policy needs and this routing has not for every request; None if it has all."""
        for need in sorted(needs):
            kind, _, name = need.partition(":")
            for trace in self.groups:
                if kind == "signal" and not all(name in names for names in trace.requests.signals):
                    return need
                if kind == "table" and name not in trace.tables:
                    return need
                if need == "scores" and trace.scores is None:
                    return need
                if need == "scores-or-weights" and trace.scores is None and trace.weights is None:
                    return need
        return None

    def write(self, folder: Path) -> list[Path]:
        """Write one trace a group into a folder."""
        return [trace.write(folder / f"group{number}.safetensors") for number, trace in enumerate(self.groups)]


def fits(trace: Trace, model: ModelSpec) -> bool:
    """Whether a trace has the shape of a model's routing."""
    return (trace.n_layers, trace.n_experts, trace.top_k) == (model.n_layers, model.n_experts, model.top_k)


def find_routing(model: ModelSpec, trace: str | None, batch: int, prompt: int, decode: int, place: str) -> Routing:
    """Choose routing for a model.

    Parameters
    ----------
    model : ModelSpec
    trace : str or None
        Name or path, or None to choose.
    batch, prompt, decode : int
        Requests at once, and tokens of each.
    place : str
        For messages.

    Returns
    -------
    Routing
        Of `GROUPS` groups; fewer if a trace was given that has fewer requests.

    Raises
    ------
    InputError
        If the trace has another shape or no request that is long enough, or if there is none for the model.
    """
    if trace is not None:
        return _given(model, trace, batch, prompt, decode, place)
    short: list[str] = []
    for name in trace_names():
        found = Trace.read(find_trace(name), verify=False)
        if not fits(found, model):
            continue
        chosen = _long_enough(found, prompt, decode)
        if len(chosen) >= GROUPS * batch:
            return Routing(name, found.origin, _split(found, chosen, batch), name)
        short.append(
            f"{name} has {len(chosen)} of the {GROUPS * batch} requests of {prompt} + {decode} tokens that are simulated"
        )
    made = synthetic(model, batch, prompt, decode)
    if made is not None:
        return replace(made, why="; ".join(short))
    shape = f"{model.n_layers} layers, {model.n_experts} experts, top {model.top_k}"
    got = f"none that is long enough: {'; '.join(short)}" if short else "none, and no parameters to make it up"
    raise TraceError(
        f"{place}: expected routing of {model.name} ({shape}), got {got}; record some with 'moesim trace record MODEL --prompts "
        "FILE --out FILE' or import it with 'moesim trace import', and give it with --trace"
    )


def synthetic(model: ModelSpec, batch: int, prompt: int, decode: int) -> Routing | None:
    """Make routing up by the parameters of a model of this shape, its own first; None if there are none."""
    from moesim.synthesis import parameter_names, read_parameters, synthesize  # SciPy takes most of a second to import

    shape = (model.n_layers, model.n_experts, model.top_k)
    names = sorted(parameter_names(), key=lambda name: (name != model.name, name))
    for name in names:
        parameters = read_parameters(name)
        if (parameters.n_layers, parameters.n_experts, parameters.top_k) != shape:
            continue
        n_requests = GROUPS * batch
        trace = synthesize(parameters, n_requests=n_requests, n_prompt=prompt, n_decode=decode, scores=True)
        written = {"synthesize": name, "requests": n_requests, "prompt": prompt, "decode": decode}
        return Routing(f"synthetic {name}", "synthetic", _split(trace, list(range(n_requests)), batch), written)
    return None


def other_routing(model: ModelSpec, routing: Routing, batch: int, prompt: int, decode: int) -> Routing | None:
    """Find other routing of the same shape, to see how much hangs on it; prompts may be shorter.

    Parameters
    ----------
    model, routing : ModelSpec, Routing
        What is being advised on, and the routing that is used; for a recording of the model itself there is no need.
    batch, prompt, decode : int
        As for `find_routing`.
    """
    if routing.origin == "recorded":
        return None
    if routing.origin == "miniature":
        return synthetic(model, batch, prompt, decode)
    for name in trace_names():
        found = Trace.read(find_trace(name), verify=False)
        if fits(found, model) and found.origin != "synthetic":
            chosen = _long_enough(found, 1, decode)
            if len(chosen) >= GROUPS * batch:
                return Routing(name, found.origin, _split(found, chosen, batch), name)
    return None


def shortest_prompt(trace: Trace) -> int:
    """Give the tokens of the shortest prompt of a trace."""
    return int((trace.requests.n_prompt + trace.requests.prompt_offset).min())


def _given(model: ModelSpec, name: str, batch: int, prompt: int, decode: int, place: str) -> Routing:
    found = Trace.read(find_trace(name))
    if not fits(found, model):
        has = f"{found.n_layers} layers, {found.n_experts} experts, top {found.top_k}"
        raise TraceError(
            f"{place}: --trace {name}: expected {model.n_layers} layers, {model.n_experts} experts, top {model.top_k}, "
            f"as {model.name} has, got {has}; leave --trace out or give another"
        )
    chosen = _long_enough(found, prompt, decode)[: GROUPS * batch]
    if len(chosen) < batch:
        compose(found, WorkloadSpec(batch_size=batch, prompt_tokens=prompt, decode_tokens=decode))  # says what is lacking
        raise TraceError(f"{place}: --trace {name}: expected {batch} requests of {prompt} + {decode} tokens, got {len(chosen)}")
    return Routing(name, found.origin, _split(found, chosen, batch), name)


def _long_enough(trace: Trace, prompt: int, decode: int) -> list[int]:
    """List requests that will do: those with more signals first, then those whose prompt is not cut, then by number."""
    requests = trace.requests
    length = requests.n_prompt + requests.prompt_offset
    will_do = np.flatnonzero((length >= prompt) & (requests.n_decode >= decode)).tolist()
    return sorted(will_do, key=lambda r: (-len(requests.signals[r]), int(length[r]) != prompt, r))


def _split(trace: Trace, chosen: list[int], batch: int) -> tuple[Trace, ...]:
    n_groups = min(GROUPS, len(chosen) // batch)
    return tuple(subset(trace, sorted(chosen[group * batch : (group + 1) * batch])) for group in range(n_groups))


def subset(trace: Trace, requests: list[int]) -> Trace:
    """Take some requests out of a trace, with all that was recorded of them but the gate inputs.

    Parameters
    ----------
    trace : Trace
        A trace.
    requests : list of int
        Ascending.

    Returns
    -------
    Trace
        With the label and the calibration of the whole one.
    """
    table = trace.requests
    length = table.n_prompt + table.n_decode
    rows = np.concatenate([np.arange(table.first_row[r], table.first_row[r] + length[r]) for r in requests])
    signals = {}
    for name, signal in trace.signals.items():
        at = np.isin(signal.rows, rows)
        if at.any():
            ids = None if signal.ids is None else signal.ids[at]
            new_rows = np.searchsorted(rows, signal.rows[at]).astype(np.int32)
            signals[name] = replace(signal, rows=new_rows, scores=signal.scores[at], ids=ids)
    return Trace.build(
        experts=trace.experts[rows],
        weights=None if trace.weights is None else trace.weights[rows],
        scores=None if trace.scores is None else trace.scores[rows],
        n_prompt=table.n_prompt[requests],
        n_decode=table.n_decode[requests],
        prompt_offset=table.prompt_offset[requests],
        n_experts=trace.n_experts,
        model=trace.model,
        label=trace.label,
        signals=signals,
        tables=trace.tables,
        header={key: value for key, value in trace.header.items() if key not in ("signals", "sha256")},
    )
