"""All statistics of a trace, by question; None, with the reason, where it has no numbers.

``docs/reference/statistics.md`` defines the keys.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.trace.stats.balance import Context, activation_frequency, balance, batching, main_phase, select
from moesim.trace.stats.caches import caches, check_uniform_rows
from moesim.trace.stats.locality import NULL_LAYERS, NULL_ROWS, locality
from moesim.trace.stats.prediction import prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from moesim.trace import Trace
    from moesim.trace.stats.balance import Sample

QUESTIONS = ("balance", "locality", "prediction", "caches", "batching")
"""The groups of figures, in order."""

_MAKERS: dict[str, Callable[[Context], dict[str, Any]]] = {
    "balance": balance, "locality": locality, "prediction": prediction, "caches": caches, "batching": batching,
}  # fmt: skip
_STEPS = 23  # the makers count them


def report(trace: Trace, phase: str | None = None, *, max_rows: int | None = None, show_progress: bool = False) -> dict[str, Any]:
    """Compute all statistics of a trace."""
    check_uniform_rows(NULL_ROWS, NULL_LAYERS, trace.n_experts)  # before the work that comes first
    sample = select(trace, phase or main_phase(trace), max_rows)
    result: dict[str, Any] = {**facts(sample), **dict.fromkeys(QUESTIONS), "absent": {}}
    frequency = activation_frequency(sample.experts, trace.n_experts)
    with Progress(_STEPS, enabled=show_progress) as progress:
        for question, make in _MAKERS.items():
            context = Context(sample, frequency, progress)
            result[question] = plain(make(context))
            result["absent"] |= {f"{question}.{figure}": reason for figure, reason in context.absent.items()}
    return result


def facts(sample: Sample) -> dict[str, Any]:
    """Describe what was looked at."""
    trace = sample.trace
    return {
        "model": trace.model, "label": trace.label, "remarks": list(trace.remarks),
        "shape": {"n_layers": trace.n_layers, "n_experts": trace.n_experts, "top_k": trace.top_k},
        "phase": sample.phase, "n_rows": len(sample.rows), "n_requests": sample.n_requests,
        "sampled": sample.sampled,
    }  # fmt: skip


def plain(value: Any) -> Any:
    """Turn arrays into lists and nan into None, throughout."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return None if isinstance(value, float) and math.isnan(value) else value


_LAGS = (1, 2, 4, 8, 16)
_SHARES = (0.25, 0.5, 0.75)
_SEGMENT = 16
_BATCH = 8
UNIFORM = "uniform router"
_ABSENT = {
    "reuse": "reuse of experts",
    "prefill_decode_similarity": "prefill-decode cosine",
    "window_similarity": "prefill cosine with decode windows",
    "segments": "SRP and SCH of segments",
    "workload": "recall of the busiest experts of a batch",
    "states": "cosine of h[l] with h[l+1]",
    "states.residual": "cosine of h[l] + res[l] with h[l+1]",
    "distinct.larger": "distinct experts a layer, larger batches",
}


class Row(NamedTuple):
    """One figure."""

    question: str
    figure: str
    value: float | None
    beside: float | None = None
    """Value to compare it with."""
    which_is: str = ""
    """Name of that value."""
    note: str = ""


def summary(report: Mapping[str, Any], *, full: bool = False) -> list[Row]:
    """List the figures of a report."""
    makers = {
        "balance": _balance_rows(report["balance"]),
        "locality": _locality_rows(report["locality"], full),
        "prediction": _prediction_rows(report["prediction"], full),
        "caches": _cache_rows(report["caches"], full),
        "batching": _batching_rows(report["batching"]),
    }
    rows = []
    for question, made in makers.items():
        rows += [Row(question, *row) for row in made]
        missing = {n.split(".", 1)[1]: why for n, why in report["absent"].items() if n.startswith(f"{question}.")}
        rows += [Row(question, _words(name), None, note=why) for name, why in missing.items()]
    return rows


def _words(name: str) -> str:
    group, _, rest = name.partition(".")
    if group == "activated":
        return f"recall of {rest}"
    if group == "hit_rate":
        return f"{rest} hit rate"
    return _ABSENT.get(name, name.replace("_", " ").replace(".", ": "))


def _balance_rows(found: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    words = {"entropy": "popularity: normalised entropy", "top_over_uniform": "popularity: top / uniform", "gini": "skew: Gini"}
    for name, text in words.items():
        null = found[name]["null"]
        interval = f"95 % of its draws: {null['low']:.4f} to {null['high']:.4f}"
        yield text, found[name]["value"], null["mean"], UNIFORM, interval
    load = found["prefill_load"]
    if load is not None:
        of = f"{load['n_prompts']} prompts of {round(load['mean_tokens'])} tokens on average"
        yield "prefill load: largest / mean", load["max_over_mean"], load["null_max_over_mean"], UNIFORM, of
        yield "prefill load: share of idle experts", load["idle_share"], load["null_idle_share"], UNIFORM, of


def _locality_rows(found: Mapping[str, Any], full: bool) -> Iterator[tuple[Any, ...]]:
    reuse = found["reuse"]
    if reuse is not None:
        for lag, value in zip(reuse["lags"], reuse["value"], strict=True):
            if value is not None and (full or lag in _LAGS):
                yield f"reuse@{lag}", value, reuse["baseline"], "independent tokens"
    ranked = found["reuse_by_rank"]
    if ranked is not None:
        values = ranked["value"]
        ranks = range(1, len(values) + 1)
        shown = ranks if full else [rank for rank in dict.fromkeys((1, 2, len(values) // 2, len(values))) if rank in ranks]
        for rank in shown:
            yield f"reuse of the expert of rank {rank}", values[rank - 1], ranked["uniform"], UNIFORM, ranked["basis"]
    load = found["workload_correlation"]
    if load is not None:
        of = f"batch {load['batch_size']}"
        apart = f"steps {load['distant_from']} or more apart"
        yield "workload correlation of adjacent steps", load["adjacent"], load["distant"], apart, of
        yield "busiest top_k experts still busiest in the next step", load["kept"], load["kept_by_chance"], UNIFORM, of
    alike = found["prefill_decode_similarity"]
    if alike is not None:
        of = f"{len(alike['by_request'])} requests"
        yield "prefill-decode cosine", alike["value"], alike["other_requests"], "another request's decode", of
    windows = found["window_similarity"]
    if windows is not None:
        values, others = windows["value"], windows["other_requests"]
        for i in range(len(values)) if full else sorted({0, len(values) - 1}):
            of = f"{windows['n_requests'][i]} requests"
            yield (
                f"prefill cosine with decode window {i + 1} of {windows['window']} tokens",
                values[i],
                others[i],
                "another request's decode",
                of,
            )
    if found["segments"] is not None:
        yield from _segment_rows(found["segments"], full)


def _segment_rows(found: Mapping[str, Any], full: bool) -> Iterator[tuple[Any, ...]]:
    lengths = found["lengths"]
    for i in range(len(lengths)) if full else [_nearest(lengths, _SEGMENT)]:
        at = f"segments of {lengths[i]} tokens"
        yield f"SRP, {at}", found["srp"][i], found["srp_uniform"][i], UNIFORM, "our reading of the definition"
        for size, ours, null in zip(found["cache_sizes"], found["sch"], found["sch_uniform"], strict=True):
            yield f"SCH, cache of {size}, {at}", ours[i], null[i], UNIFORM, "our reading of the definition"


def _prediction_rows(found: Mapping[str, Any], full: bool) -> Iterator[tuple[Any, ...]]:
    for name, recall in found["activated"].items():
        if recall is not None:
            of = f"{_ahead(recall['lookahead'])}, {recall['n_rows']} rows"
            yield f"recall of {name}", recall["value"], found["uniform"], UNIFORM, of
    for name, entries in found["workload"].items():
        sizes = sorted({entry["batch_size"] for entry in entries})
        for entry in entries:
            if full or entry["batch_size"] == sizes[_nearest(sizes, _BATCH)]:
                figure = f"recall of {name}, top {entry['n']} by workload, batch {entry['batch_size']}"
                yield figure, entry["value"], entry["chance"], "chance", f"{entry['n_steps']} steps"
    states = found["states"]
    if states is not None:
        plain = states["gate_reuse"]["value"]
        yield "cosine of h[l] with h[l+1]", plain, None, "", f"{states['n_rows']} rows"
        if states["residual"] is not None:
            yield "cosine of h[l] + res[l] with h[l+1]", states["residual"]["value"], plain, "without res[l]"


def _ahead(lookahead: int) -> str:
    """Describe when a signal is known; 0 stands for a shadow model."""
    if lookahead == 0:
        return "ahead of all layers"
    return f"{lookahead} layer{'s' if lookahead > 1 else ''} ahead"


def _cache_rows(found: Mapping[str, Any], full: bool) -> Iterator[tuple[Any, ...]]:
    shares = found["shares"]
    notes = {
        "mrs": found["mrs_basis"],
        "workload-aware": "every {w_size} tokens, {u_size} replaced".format(**found["workload_aware"]),
        "static": f"by the table {found['static_table']}",
        "static-hindsight": "by these very rows",
        "belady": "the best of those that start empty",
        "belady-visit": "the best of those that hold a token's experts at once",
    }
    for policy, rates in found["hit_rate"].items():
        if rates is None:
            continue
        null = found[{"belady": "uniform_belady", "belady-visit": "uniform_belady_visit"}.get(policy, "uniform")]
        for i in range(len(shares)) if full else sorted({_nearest(shares, share) for share in _SHARES}):
            yield f"{policy} hit rate at {100 * shares[i]:.3g} %", rates[i], null[i], UNIFORM, notes.get(policy, "")


def _batching_rows(found: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for i, size in enumerate(found["batch_sizes"]):
        yield f"distinct experts a layer, batch {size}", found["distinct"][i], found["uniform"][i], UNIFORM


def _nearest(values: Sequence[float], wanted: float) -> int:
    return min(range(len(values)), key=lambda i: abs(values[i] - wanted))


def table(result: dict[str, Any], form: Format) -> str:
    """Write all statistics of a trace for people, or for programs; JSON has every layer."""
    if form is Format.JSON:
        return json.dumps(result, indent=2) + "\n"
    if form.for_programs:
        return render_records([row._asdict() for row in summary(result, full=True)], form)
    rows = [["trace", figure, value, "", ""] for figure, value in _facts(result)]
    rows += [_cells(row) for row in summary(result)]
    for i in range(len(rows) - 1, 0, -1):  # the name of a group stands in its first row
        if rows[i][0] == rows[i - 1][0]:
            rows[i][0] = ""
    return render(["", "figure", "value", "beside", "note"], rows, form, ["value", "beside"])


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    shape = result["shape"]
    return [
        ("name", result["trace"]),
        ("routing of", f"{result['model']} ({result['label']})"),
        *(("next to what was recorded", remark) for remark in result["remarks"]),
        ("layers x experts, top_k", f"{shape['n_layers']} x {shape['n_experts']}, {shape['top_k']}"),
        (f"{result['phase']} tokens", str(result["n_rows"]) + (" (a sample)" if result["sampled"] else "")),
        ("requests", str(result["n_requests"])),
    ]


def _cells(row: Row) -> list[str]:
    note = "; ".join(part for part in (row.which_is and f"beside: {row.which_is}", row.note) if part)
    return [row.question, row.figure, _number(row.value), _number(row.beside) if row.which_is else "", note]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:z.4f}"
