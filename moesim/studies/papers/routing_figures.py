"""Printed figures of routing itself: what a trace answers without a run, by name and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, InputError, TraceError, unknown_name
from moesim.experiment.routing import read_trace
from moesim.trace.parts import Signal
from moesim.trace.stats.balance import phase_rows, select, spans
from moesim.trace.stats.batches import distinct_experts
from moesim.trace.stats.caches import layer_hit_rates, mrs_hits, mrs_scores
from moesim.trace.stats.locality import phase_similarity
from moesim.trace.stats.prediction import coactivation_scores, conditional, signal_recall, workload_recall

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

Arguments = Mapping[str, str]


def routing_figure(trace: str, name: str, arguments: Arguments, place: str) -> tuple[float, str]:
    """Compute a figure of a trace."""
    check_figure(name, arguments, place)
    try:
        read = _read(trace, place)
        return float(FIGURES[name][0](read, arguments)), read.origin
    except InputError as error:
        message = str(error)
        raise type(error)(message if message.startswith(place) else f"{place}: {name}: {message}") from None


def check_figure(name: str, arguments: Arguments, place: str) -> None:
    """Check that a figure of this name takes these arguments."""
    if name not in FIGURES:
        raise ConfigError(f"{place}: {unknown_name('statistic of a trace', name, FIGURES)}")
    needed = FIGURES[name][1]
    if set(arguments) != set(needed):
        expected = ", ".join(needed) or "none"
        raise ConfigError(f"{place}: {name}: expected the arguments {expected}, got {', '.join(arguments) or 'none'}")


@lru_cache(maxsize=2)  # the figures of a table mostly follow each other
def _read(trace: str, place: str) -> Trace:
    return read_trace(read_yaml_value(trace, place), place)


def _number(arguments: Arguments, key: str) -> int:
    if not arguments[key].isdecimal() or int(arguments[key]) < 1:
        raise ConfigError(f"{key}: expected an integer of at least 1, got '{arguments[key]}'")
    return int(arguments[key])


COACTIVATION = "coactivation"
"""Named as a signal: what the calibration table of pairs of experts says of the next layer."""


def _signal(trace: Trace, arguments: Arguments) -> Signal:
    if arguments["signal"] == COACTIVATION and COACTIVATION in trace.tables:
        return _by_coactivation(trace)
    if arguments["signal"] not in trace.signals:
        raise TraceError(unknown_name("signal", arguments["signal"], trace.signals))
    return trace.signals[arguments["signal"]]


def _by_coactivation(trace: Trace) -> Signal:
    """Score the experts of each layer by those of the layer before."""
    experts = np.asarray(trace.experts)
    scores = np.zeros((len(experts), trace.n_layers, trace.n_experts))
    for layer, counts in enumerate(np.asarray(trace.tables[COACTIVATION])[: trace.n_layers - 1]):
        scores[:, layer + 1] = coactivation_scores(conditional(counts), experts[:, layer])
    return Signal(COACTIVATION, np.arange(len(experts)), scores)


def _workload_recall(trace: Trace, arguments: Arguments) -> float:
    size, n = _number(arguments, "batch_size"), _number(arguments, "n")
    found = workload_recall(trace, _signal(trace, arguments), phase_rows(trace, "decode"), [size], [n])
    if not found:
        raise TraceError(f"expected {size} requests with signal '{arguments['signal']}', and more than {n} experts; got fewer")
    return 100 * float(np.nanmean(found[0].by_layer))


def _recall(trace: Trace, arguments: Arguments) -> float:
    value = signal_recall(trace, _signal(trace, arguments), phase_rows(trace, "decode"))
    if np.isnan(value):
        raise TraceError(f"signal '{arguments['signal']}' covers no decode rows")
    return 100 * value


def _similarity(trace: Trace, arguments: Arguments) -> float:
    found = phase_similarity(trace)
    if found is None:
        raise TraceError("no request has both prefill and decode rows")
    return 100 * float(found.own.mean())


def _prefills(trace: Trace, arguments: Arguments) -> Iterator[NDArray[Any]]:
    """Give the expert ids of the first tokens of every prompt that is long enough, (tokens, n_layers, top_k)."""
    tokens, rows = _number(arguments, "tokens"), phase_rows(trace, "prefill")
    first, length = spans(np.asarray(trace.request)[rows])
    found = [rows[start : start + tokens] for start, n in zip(first, length, strict=True) if n >= tokens]
    if not found:
        raise TraceError(f"tokens: expected prompts of at least {tokens} tokens, got none")
    return (np.asarray(trace.experts)[one] for one in found)


def _active_experts(trace: Trace, arguments: Arguments) -> float:
    batch = [np.arange(_number(arguments, "tokens"))[None]]
    return float(np.mean([distinct_experts(ids, batch, trace.n_experts) for ids in _prefills(trace, arguments)]))


def _all_active(trace: Trace, arguments: Arguments) -> float:
    batch = [np.arange(_number(arguments, "tokens"))[None]]
    counts = [distinct_experts(ids, batch, trace.n_experts) for ids in _prefills(trace, arguments)]
    return 100 * float(np.mean(np.array(counts) == trace.n_experts))


def _hit_rate(trace: Trace, arguments: Arguments) -> float:
    sample = select(trace, "decode")
    n_experts = trace.n_experts
    try:
        capacities = [round(float(arguments["share"]) * n_experts)]
    except ValueError:
        raise ConfigError(f"share: expected a number, got '{arguments['share']}'") from None
    if not 0 < capacities[0] < n_experts:
        raise ConfigError(f"share: expected some of the {n_experts} experts and not all, got {arguments['share']}")
    policy = arguments["policy"]
    if policy == "mrs":
        scores, basis = mrs_scores(trace, sample.rows)
        if scores is None:
            raise TraceError(basis)
        p = trace.top_k if trace.recorded_scores is None else 2 * trace.top_k
        return float(mrs_hits(sample.experts, scores, min(n_experts, p), capacities).mean())
    if policy not in ("lru", "lfu", "belady"):
        raise ConfigError(unknown_name("policy", policy, ["lru", "lfu", "belady", "mrs"]))
    return float(layer_hit_rates(sample.experts, n_experts, capacities, [policy])[policy].mean())


FIGURES: dict[str, tuple[Callable[[Trace, Arguments], float], tuple[str, ...]]] = {
    "workload_recall": (_workload_recall, ("signal", "batch_size", "n")),
    "recall": (_recall, ("signal",)),
    "prefill_decode_similarity": (_similarity, ()),
    "active_experts": (_active_experts, ("tokens",)),
    "all_active": (_all_active, ("tokens",)),
    "hit_rate": (_hit_rate, ("policy", "share")),
}
"""Name -> how it is computed, and its arguments. Of decode rows, in per cent, and defined in ``docs/reference/statistics.md``:
busiest n experts of a batch that a signal names; activated experts that it names; cosine of a request's prefill and decode.
Of the first tokens of a prompt: experts of a layer that they activate; per cent of layers and prompts where these are all.
And the share of hits of a layer's cache."""
