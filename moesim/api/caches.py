"""Caches without costs, from Python: hit rates of policies, and the worth of routing known ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moesim.api.arguments import checked, written
from moesim.api.run import routing_of
from moesim.api.studies import Study
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.errors import ConfigError
from moesim.experiment.report import at_lifts, range_of_lifts, uncertain_orders
from moesim.experiment.routing import read_trace
from moesim.experiment.workers import Workers
from moesim.hardware import HardwareProfile
from moesim.model import ModelSpec, load_model
from moesim.studies.cache_rules import CacheRates, cache_rates
from moesim.trace import Trace
from moesim.trace.made import trace_label

if TYPE_CHECKING:
    from moesim.studies.lookahead import Line, Relation, Sight

_RATES: Final = {"hit %": "hit_rate_decode", "warm %": "hit_rate_decode_warm"}
_SHOWN: Final = (1, 4, 16, 64)  # windows in the table


@checked("trace.caches", batch="count", requests="count", prompt="whole", decode="count", jobs="count")
def caches(
    trace: str | Path | Mapping[str, Any] | Trace | None = None, *,
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None, hit_rate: str | None = None,
    policies: Any = ("lru", "lfu", "belady", "static"), slots: Sequence[float | str] = (0.125, 0.25, 0.375, 0.5),
    batch: int = 1, requests: int = 8, prompt: int = 0, decode: int = 256, jobs: int | None = None, progress: bool = True,
) -> Study:  # fmt: skip
    """Count the hits of policies' caches while decoding: no machine, no costs.

    Parameters
    ----------
    trace : str, Path, mapping or Trace, optional
        As of `moesim.compare`.
    model, hit_rate : optional
        As of `moesim.compare`: routing for this model, instead of a trace.
    policies : sequence
        As of `moesim.compare`.
    slots : sequence of float or str
        Slots of a layer, or shares of its experts.
    batch, requests : int
        Requests at once; batches, one after another.
    prompt, decode : int
        Tokens of each request that is made up.
    jobs, progress
        As of `moesim.compare`.

    Returns
    -------
    Study
        ``table`` with rates in percent, and ``text()``; ``notes`` has the policies without a rate, and why.

    Raises
    ------
    InputError
        If what was asked for is wrong.
    """
    known: dict[str, Trace] = {}
    spec = model if model is None or isinstance(model, ModelSpec) else load_model(model, "trace caches: --model")
    asked = written([policies] if isinstance(policies, str) else policies, "trace caches: --policies")
    found = cache_rates(
        asked, model=spec, trace=None if trace is None else routing_of(trace, known, "trace caches: trace"), hit_rate=hit_rate,
        slots=written(slots, "trace caches: --slots"), batch=batch, requests=requests, prompt=prompt, decode=decode, jobs=jobs,
        progress=progress, known=known,
    )  # fmt: skip
    rows = []
    for row in found.rows:
        rates = {name: at_lifts(row, key, 100) for name, key in _RATES.items()}
        middle = {name: values[len(values) // 2] for name, values in rates.items()}
        size = {"policy": row["policy"], "slots": float(row["cache_slots"]) / found.n_layers}
        rows.append({**size, **middle, "over lifts": range_of_lifts(row, "hit_rate_decode_warm", 100)})
    notes = [found.routing, *uncertain_orders(found.rows, _RATES["warm %"])]
    notes += [f"{name}: {why}" for name, why in found.refused.items()]
    return Study(
        found, [], "trace caches", rows, lambda form: _rate_table(found, rows, form),
        lambda: {"caches.csv": render_records(rows, Format.CSV).encode()}, notes,
    )  # fmt: skip


def _rate_table(found: CacheRates, rows: Sequence[Mapping[str, Any]], form: Format) -> str:
    if form.for_programs:
        return render_records(rows, form)
    names = [name for name in ("policy", "slots", *_RATES, "over lifts") if name != "over lifts" or found.assumed]
    cells = [
        [f"{row[name]:.1f}" if name in _RATES else f"{row[name]:g}" if name == "slots" else row[name] for name in names]
        for row in rows
    ]
    return render(names, cells, form, names[1:])


@checked("trace.lookahead", max_tokens="count", jobs="count")
def lookahead(
    traces: Any, *, max_tokens: int = 1024, hardware: str | Path | Mapping[str, Any] | HardwareProfile | None = None,
    jobs: int | None = None, progress: bool = True,
) -> Study:  # fmt: skip
    """Count the misses of caches that know the routing of some tokens ahead.

    Parameters
    ----------
    traces : str, Path, mapping or Trace, or sequence of them
        As of `moesim.compare`.
    max_tokens : int
        Decoded tokens of each that are counted, at least 2.
    hardware : str, Path, mapping or HardwareProfile, optional
        Simulate there, too, what knowing some layers ahead is worth.
    jobs, progress
        As of `moesim.compare`.

    Returns
    -------
    Study
        ``table`` (a row a trace, size and window; with `hardware` a row a number of layers), ``text()`` and ``save(folder)``;
        ``notes`` has what could not run.

    Raises
    ------
    InputError
        If a trace or the machine is wrong.
    """
    from moesim.studies.lookahead import look_ahead, records, relation, see_layers

    if max_tokens < 2:
        raise ConfigError(f"--max-tokens: expected a whole number of at least 2, got {max_tokens}; raise it")
    machine = None if hardware is None else written(hardware, "trace lookahead: --hardware")
    lines: list[Line] = []
    sights: list[Sight] = []
    missing: list[str] = []
    asked = [traces] if isinstance(traces, str | Path | Mapping | Trace) else traces
    with Progress(len(asked), lines=True, enabled=progress) as bar, Workers(jobs) as workers:
        for one in asked:
            given: dict[str, Trace] = {}
            name = routing_of(one, given, "trace lookahead")
            bar.describe(trace_label(name))
            trace = one if isinstance(one, Trace) else read_trace(name, "trace lookahead")
            lines += look_ahead(trace, trace_label(name), max_tokens=max_tokens)
            if machine is not None:
                more, lacking = see_layers(name, trace, machine, workers)
                sights, missing = [*sights, *more], [*missing, *lacking]
            bar.advance(1)
    found = relation(lines)
    rows = records(lines) if machine is None else [one.record() for one in sights]

    def text(form: Format) -> str:
        if form.for_programs:
            return render_records(rows, form)
        return lookahead_table(lines, found, form) + ("" if machine is None else layers_table(sights, missing, form))

    return Study((lines, sights), [], "trace lookahead", rows, text, lambda: _lookahead_files(lines, sights), missing)


def _lookahead_files(lines: Sequence[Line], sights: Sequence[Sight]) -> dict[str, bytes]:
    import pandas as pd

    from moesim.plots.studies import lookahead as figure  # Matplotlib takes most of a second to import
    from moesim.plots.style import pictures
    from moesim.studies.lookahead import records

    drawing = figure.drawing(pd.DataFrame(records(lines)))
    files = {"lookahead.csv": render_records(records(lines), Format.CSV).encode()}
    if sights:
        files["layers.csv"] = render_records([one.record() for one in sights], Format.CSV).encode()
    return files | {"lookahead.txt": f"{drawing.caption}\n".encode(), **pictures(drawing.figure, "lookahead")}


def lookahead_table(lines: Sequence[Line], found: Relation | None, form: Format) -> str:
    """Write misses by size of the cache, and the relation."""
    from moesim.trace.stats.lookahead import HALF_GAP  # NumPy takes a while to import

    head = ["trace", "slots", "slots / k", "misses a token", "fewest", *(f"closed by {n}" for n in _SHOWN), "half at"]
    rows = [
        [
            one.trace, str(one.slots), f"{one.slots / one.top_k:.2g}", f"{one.misses[0] / one.tokens:.3g}",
            f"{one.fewest / one.tokens:.3g}", *(_percent(one.closed(n)) for n in _SHOWN), _half(one),
        ]
        for one in lines
    ]  # fmt: skip
    notes = [
        "misses a token: over all layers, of a cache that goes by decayed frequency; fewest: of one that knows everything",
        "closed by N: share of the gap that knowing N tokens ahead closes; half at: tokens ahead that close half of it",
    ]
    if found is not None:
        verdict = "within" if found.confirms else "outside"
        notes.append(
            f"half at {found.factor:.2g} (slots / k)^{found.exponent:.2f}, 95 % interval of the exponent {found.low:.2f} to "
            f"{found.high:.2f} ({found.n} sizes; models drawn with replacement)",
        )
        notes.append(f"published: {HALF_GAP[0]} (slots / k)^{HALF_GAP[1]}, whose exponent is {verdict} that interval")
    between = "\n\n" if form is Format.MD else "\n"
    return render(head, rows, form, head[1:]) + "\n" + between.join(notes) + "\n"


def layers_table(sights: Sequence[Sight], missing: Sequence[str], form: Format) -> str:
    """Write the share of the gap that each number of layers ahead closes."""
    by_line: dict[tuple[str, float], list[Sight]] = {}
    for one in sights:
        by_line.setdefault((one.trace, one.share), []).append(one)
    head = [
        "trace",
        "cached",
        "on demand",
        *(f"closed by {n} layer{'s' if n > 1 else ''}" for n in dict.fromkeys(one.layers for one in sights)),
    ]
    rows = [
        [trace, _percent(share), f"{mine[0].on_demand:.3g} tok/s", *(_percent(one.closed) for one in mine)]
        for (trace, share), mine in by_line.items()
    ]
    notes = [
        *(
            [f"on {sights[0].hardware}, experts of 4 bits, batch 1, an oracle; weakest source: {sights[0].label}"]
            if sights
            else []
        ),
        "closed: share of the gap between the time on demand and the time in which the busier of link and GPU works",
        *missing,
    ]
    return "\n" + render(head, rows, form, head[1:]) + "\n" + ("\n\n" if form is Format.MD else "\n").join(notes) + "\n"


def _half(one: Line) -> str:
    return "-" if one.half is None else f"{one.half:.2g}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"
