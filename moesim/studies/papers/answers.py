"""Answers other than runs: statistics of traces, costs of profiles, time of decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.progress import Progress
from moesim.core.yaml_reader import read_yaml_value
from moesim.engine import simulate
from moesim.errors import ConfigError, InputError, TraceError, unknown_name
from moesim.experiment.resolve import Experiment
from moesim.experiment.routing import read_trace
from moesim.experiment.runner import Execution, run_one
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.policy import Policy
from moesim.records import Records
from moesim.studies.bench import Clocked
from moesim.trace.parts import Signal
from moesim.trace.stats.balance import distinct_experts, phase_rows, select, spans
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
    return 100 * float(found["value"])


def _prefills(trace: Trace, arguments: Arguments) -> Iterator[NDArray[Any]]:
    """Yield the first expert ids of long enough prompts, (tokens, n_layers, top_k)."""
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
    "workload_recall": (_workload_recall, ("signal", "batch_size", "n")), "recall": (_recall, ("signal",)),
    "prefill_decode_similarity": (_similarity, ()), "active_experts": (_active_experts, ("tokens",)),
    "all_active": (_all_active, ("tokens",)), "hit_rate": (_hit_rate, ("policy", "share")),
}  # fmt: skip
"""Name -> how it is computed, and its arguments. Of decode rows, in per cent, and defined in ``docs/reference/statistics.md``:
busiest n experts of a batch that a signal names; activated experts that it names; cosine of a request's prefill and decode.
Of the first tokens of a prompt: experts of a layer that they activate; per cent of layers and prompts where these are all.
And the share of hits of a layer's cache."""


_CONTEXT = 256  # tokens that the attention of a block looks back on; it is a small part of the block
_NS_PER_MS = 1e6
_DEFAULTS = {"model": "", "rows": "1", "device": "", "transfer": "pinned"}


@dataclass(frozen=True)
class _Question:
    costs: CostModel
    rows: int
    device: str

    @property
    def host(self) -> str:
        return self.costs.hardware.backing[0]

    @property
    def gpu(self) -> str:
        return self.costs.hardware.compute

    def copy_ns(self) -> int:
        return self.costs.fetch_ns(self.host, self.gpu)

    def expert_ns(self, device: str) -> int:
        return self.costs.expert_ns(device, self.rows)


def machine_cost(hardware: str, name: str, arguments: Mapping[str, str], place: str) -> tuple[float, str]:
    """Look up a cost."""
    check_cost(name, arguments, place)
    given = _DEFAULTS | dict(arguments)
    profile = load_hardware(hardware, place)
    device = given["device"] or profile.compute
    if device not in profile.devices:
        raise ConfigError(f"{place}: {name}: {unknown_name('device', device, profile.devices)}")
    model = load_model(read_yaml_value(given["model"], place), place)
    costs = CostModel(model, profile, transfer=given["transfer"], extrapolate=True)
    value = COSTS[name](_Question(costs, int(given["rows"]), device))
    return value, costs.label(()) if costs.provenance() else "published"


def check_cost(name: str, arguments: Mapping[str, str], place: str) -> None:
    """Check that a cost of this name takes these arguments."""
    if name not in COSTS:
        raise ConfigError(f"{place}: {unknown_name('cost', name, COSTS)}")
    for key in arguments:
        if key not in _DEFAULTS:
            raise ConfigError(f"{place}: {name}: {unknown_name('argument', key, _DEFAULTS)}")
    if "model" not in arguments:
        raise ConfigError(f"{place}: {name}: expected the argument model, got none")
    rows = arguments.get("rows", "1")
    if not rows.isdecimal() or int(rows) < 1:
        raise ConfigError(f"{place}: {name}: rows: expected an integer of at least 1, got '{rows}'")


def _block_ns(q: _Question) -> int:
    costs, n = q.costs, q.rows
    work = n * (2 * _CONTEXT + n)
    return costs.attention_ns(q.device, n, work, 1) + costs.dense_ns(q.device, n) + costs.model.top_k * q.expert_ns(q.device)


COSTS: dict[str, Callable[[_Question], float]] = {
    "expert_ms": lambda q: q.expert_ns(q.device) / _NS_PER_MS,
    "block_ms": lambda q: _block_ns(q) / _NS_PER_MS,
    "copy_ms": lambda q: q.copy_ns() / _NS_PER_MS,
    "activation_ms": lambda q: sum(q.costs.activation_ns(link, q.rows) for link in q.costs.path(q.gpu, q.host)) / _NS_PER_MS,
    "copied_over_cpu": lambda q: (q.copy_ns() + q.expert_ns(q.gpu)) / q.expert_ns(q.host),
    "expert_mib": lambda q: q.costs.model.expert_bytes(0) / 2**20,
}
"""Name -> how it is looked up: one expert with some rows on a device; attention, router and the top_k experts of a row; a copy
of an expert to the GPU, and of its activations from there; an expert copied and computed there over the same on the CPU; its
size."""


COLUMN = "decision_cpu_ns"
NOTE = "decisions measured on this machine, in Python"


def run_clocked(experiment: Experiment) -> list[dict[str, Any]]:
    """Run an experiment in this process with a clock around decisions."""
    rows = []
    with Progress(len(experiment.specs), enabled=True) as bar:
        for spec in experiment.specs:
            bar.describe(spec.policy_name)
            clocks: list[Clocked] = []

            def clocked(*, policy: Policy, clocks: list[Clocked] = clocks, **rest: Any) -> Records:
                clocks.append(Clocked(policy, time.process_time_ns))
                return simulate(policy=clocks[-1], **rest)

            row = dict(run_one(experiment, spec, execution=Execution(clocked, notes=lambda: [NOTE])).row)
            rows.append(row | {COLUMN: sum(clock.decide_ns + clock.evict_ns for clock in clocks)})
            bar.advance(1)
    return rows


def decision_share(row: Mapping[str, Any]) -> float:
    """Compute the decisions' share of decision and simulated time, of a row of `run_clocked`.

    >>> decision_share({"makespan_ns": 3_000, "decision_cpu_ns": 1_000})
    0.25
    """
    spent = float(row[COLUMN])
    return spent / (spent + float(row["makespan_ns"]))
