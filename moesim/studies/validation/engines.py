"""Cache engines and hybrids against measured speeds: each row predicted, errors, intervals, and the order of engines."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from moesim.core.processes import usable_cores
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.units import NS_PER_S, digits
from moesim.errors import ConfigError, MoesimError
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment, written_key
from moesim.experiment.workers import Workers
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.engines import why_not
from moesim.policies.registry import make_policy
from moesim.studies.advice.others import routings
from moesim.studies.advice.question import Asked, Routing
from moesim.studies.identify.bench import LONGEST
from moesim.studies.identify.cases import shape_of, steps_after
from moesim.studies.identify.fit import two_devices
from moesim.studies.identify.model_error import shipped, time_shares
from moesim.studies.validation.engine_rows import Row, grouped, read_rows
from moesim.studies.validation.public import plain, shipped_table
from moesim.trace import Trace

FILE: Final = "engines.csv"
DIFFER: Final = 1.15
"""Ratio of two measured speeds from which on their order is checked."""
_PROMPT, _DECODE, _STEPS = 256, 512, 8
"""Most tokens that are simulated: of a prompt, decoded, and decoded where nothing moves."""


@dataclass(frozen=True)
class EngineResult:
    """Predicted and measured speeds of engines."""

    # a row a prediction: ``place``, words of the row, ``measured``, ``predicted``, ``low``, ``high`` (tokens/s), ``error``,
    # ``hit``, ``hit_measured``, ``with_hits`` (tokens/s at the measured hit rate), ``routing``, ``label``
    frame: pd.DataFrame
    skipped: Sequence[tuple[str, str, str]]  # place, row, reason
    ignored: Sequence[str]  # columns
    orders: Sequence[tuple[str, str, int, int, str]]  # machine, model, pairs that differ, in the right order, the wrong ones


def engines_file() -> Path:
    """Return the shipped table of measured engines. Raises `ConfigError` if there is none."""
    return shipped_table(FILE, "the table of measured engines")


_Run = tuple[Routing, Any, HardwareProfile]


def run_engines(path: Path, *, jobs: int | None = None, progress: bool = False) -> EngineResult:
    """Predict every row of a file that can be predicted.

    Raises `ConfigError` if the file is no table, or no row of it can be predicted.
    """
    rows, skipped, ignored = read_rows(path)
    made: dict[Any, list[Routing]] = {}
    runs: list[tuple[Row, Routing, Experiment]] = []
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder, Progress(len(rows), enabled=progress) as bar:
        for row in rows:
            bar.describe(f"routing, {row.engine}")
            try:
                runs += [(row, one, _experiment(row, one, Path(folder))) for one in _routings(row, made)]
            except MoesimError as error:
                skipped.append((row.place, row.engine, _reason(error, row)))
            bar.advance(1)
        with Workers(jobs or usable_cores()) as workers:
            all_runs = Experiment.joined([(experiment, experiment.specs[0]) for *_, experiment in runs]) if runs else None
            outcomes = run_experiment(all_runs, workers=workers, may_fail=True, progress=progress).outcomes if all_runs else []
    done: dict[Row, list[_Run]] = {}
    for (row, routing, experiment), outcome in zip(runs, outcomes, strict=True):
        done.setdefault(row, []).append((routing, outcome, experiment.specs[0].hardware))
    for row, own in done.items():
        if own[0][1].failure is not None:
            skipped.append((row.place, row.engine, _reason(own[0][1].failure, row)))
        else:
            records.append(_record(row, own))
    skipped.sort(key=lambda one: int(one[0].rpartition(":")[2]))
    if not records:
        said = "; ".join(list(grouped(skipped))[:3]) or "no row"
        raise ConfigError(f"{path}: expected a row that can be predicted, got {len(skipped)} that cannot: {said}")
    frame = pd.DataFrame(records)
    return EngineResult(frame, skipped, ignored, orders(frame))


def _reason(error: Exception, row: Row) -> str:
    return str(error).replace(f"{row.place}: ", "").partition(" [policy=")[0]


def _routings(row: Row, made: dict[Any, list[Routing]]) -> list[Routing]:
    """Return routing to predict a row with, and other routing for its interval."""
    case, one = row.case, row.case.observation
    if one.kind == "prefill" and one.context > LONGEST:
        raise ConfigError(f"a prompt of more than {LONGEST} tokens takes minutes to simulate")
    if case.static:
        return [Routing("any", "synthetic", steps_after(shape_of(case.model), one.batch, _STEPS, one.context))]
    prompt = one.context if one.kind == "prefill" else min(one.context, _PROMPT) or 1
    decode = 1 if one.kind == "prefill" else min(one.decode, _DECODE)
    key = (str(case.spec), one.batch, prompt, decode, one.context)
    if key not in made:
        asked = Asked(case.spec, row.hardware, batch=one.batch, prompt=prompt, decode=decode)
        made[key] = [_after(each, one.context - prompt) for each in routings(case.model, asked)]
    return made[key]


def _after(routing: Routing, offset: int) -> Routing:
    """Return routing whose prompts begin after so many tokens."""
    made = routing.trace
    if offset <= 0:
        return routing
    trace = Trace.build(
        experts=made.experts, tables=made.tables, n_prompt=made.requests.n_prompt, n_decode=made.requests.n_decode,
        n_experts=made.n_experts, model=made.model, label=made.label, prompt_offset=offset,
    )  # fmt: skip
    return Routing(routing.label, routing.origin, trace)


def _experiment(row: Row, routing: Routing, folder: Path) -> Experiment:
    case, one = row.case, row.case.observation
    requests = routing.trace.requests
    most = _STEPS if case.static else 1 if one.kind == "prefill" else _DECODE
    path = folder / f"{routing.trace.digest[:32]}+{requests.prompt_offset[0]}.safetensors"
    if not path.is_file():
        routing.trace.write(path)
    decode = int(min(most, one.decode, *requests.n_decode))
    config = {
        "model": case.spec, "hardware": row.hardware, "trace": [str(path)],
        "workload": {
            "batch_size": one.batch, "prefill_chunk": one.ubatch, "decode_tokens": decode,
            "prompt_tokens": int(min(one.context, *(requests.prompt_offset + requests.n_prompt))),
        },
        "cache": _cache(row), "policies": [dict(case.setting.policy)], "timeline": None,
    }  # fmt: skip
    experiment = Experiment(parse_config(config, row.place), row.place, known={written_key(str(path)): routing.trace})
    policy: Any = make_policy(case.setting.policy)
    if why := why_not(policy.engine, experiment.specs[0].hardware):
        raise ConfigError(why)
    return experiment


def _cache(row: Row) -> dict[str, Any]:
    """Return the cache of a row; of an engine whose setting names no size, all of the GPU that is left."""
    if row.case.static or row.case.setting.cache != {"ratio": 1.0}:
        return dict(row.case.setting.cache)
    hardware = load_hardware(row.hardware, row.place)
    return {"budget": hardware.devices[two_devices(hardware)[0]].memory_bytes}


def _record(row: Row, own: Sequence[_Run]) -> dict[str, Any]:
    """Sum up the runs of a row: the first is the prediction, the others widen its interval."""
    one, (first, outcome, hardware) = row.case.observation, own[0]
    done = [(each.label, run.row) for each, run, _ in own if run.failure is None]
    speeds = {label: _speed(row, found) for label, found in done}
    speed = speeds[first.label]
    spread = max(abs(math.log(other / speed)) for other in speeds.values())
    factors = shipped().factors(hardware, time_shares(outcome.row, hardware), prompt=one.kind == "prefill")
    low, high = (math.hypot(math.log(factor), spread) for factor in factors)
    hits = {label: float(found.get("hit_rate_decode_warm") or found.get("hit_rate_decode") or 0) for label, found in done}
    return {
        "place": row.place, "machine": row.machine, "model": row.case.model.name, "bits": row.case.bits, "kind": one.kind,
        "batch": one.batch, "context": one.context, "engine": row.engine, "setting": row.setting,
        "policy": row.case.setting.policy["name"], "measured": one.value, "predicted": speed, "low": speed * math.exp(-low),
        "high": speed * math.exp(high), "error": speed / one.value - 1, "hit": None if row.case.static else hits[first.label],
        "hit_measured": row.hit, "with_hits": _at_hits(row.hit, hits, speeds), "routing": first.label,
        "label": outcome.row.get("source_label"), "source": one.source,
    }  # fmt: skip


def _speed(row: Row, found: Mapping[str, Any]) -> float:
    """Return tokens a second: of a cache by its median token, since benchmarks leave out what warms up."""
    one = row.case.observation
    if one.kind == "prefill" or row.case.static:
        return float(found["prefill_tokens_per_s" if one.kind == "prefill" else "decode_tokens_per_s"])
    return one.batch * NS_PER_S / float(found["tpot_p50_ns"])


def _at_hits(hit: float | None, hits: Mapping[str, float], speeds: Mapping[str, float]) -> float | None:
    """Return the speed at a measured hit rate, by the line of a token's time over hits on all routing; None without one."""
    if hit is None or max(hits.values()) - min(hits.values()) < _APART:
        return None
    slope, level = np.polyfit([hits[label] for label in speeds], [1 / speed for speed in speeds.values()], 1)
    time = level + slope * hit
    return float(1 / time) if time > 0 else None


_APART: Final = 0.02
"""Hit rates of a row's runs that are nearer give no line."""

_SAME: Final = ("machine", "model", "bits", "kind", "batch")


def orders(frame: pd.DataFrame) -> list[tuple[str, str, int, int, str]]:
    """Count, for each machine and model, pairs of engines or settings that differ, and those in the right order."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in plain(frame):
        groups.setdefault(tuple(str(record[key]) for key in _SAME), []).append(record)
    found = []
    for (machine, model, *_), rows in groups.items():
        pairs, wrong = 0, []
        for one, two in combinations(rows, 2):
            fast, slow = (one, two) if one["measured"] > two["measured"] else (two, one)
            if fast["measured"] < DIFFER * slow["measured"] or _setting(one) == _setting(two):
                continue
            pairs += 1
            if fast["predicted"] <= slow["predicted"]:
                wrong.append(f"{_line(fast)} over {_line(slow)}")
        if pairs:
            found.append((machine, model, pairs, pairs - len(wrong), ", ".join(wrong)))
    return found


def _setting(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["engine"], record["setting"]


def _line(record: Mapping[str, Any]) -> str:
    return str(record["place"]).rpartition(":")[2]


_HEADINGS: Final = (
    "line", "model", "machine", "engine", "setting", "measured", "predicted", "interval of 90 %", "error", "hits",
    "measured hits", "at these hits",
)  # fmt: skip
_ORDER_HEADINGS: Final = ("machine", "model", "pairs", "in the right order", "wrong: faster over slower line")


def table(result: EngineResult, form: Format) -> str:
    """Write predicted and measured speeds, the order of engines, and what was skipped."""
    if form.for_programs:
        skipped = [{"place": place, "engine": name, "skipped": reason} for place, name, reason in result.skipped]
        return render_records(plain(pd.concat([result.frame, pd.DataFrame(skipped)])), form)
    rows = [_cells(record) for record in plain(result.frame)]
    parts = [render(_HEADINGS, rows, form, (_HEADINGS[0], *_HEADINGS[5:]))]
    if result.orders:
        cells = [[machine, model, str(n), str(right), wrong] for machine, model, n, right, wrong in result.orders]
        parts.append(render(_ORDER_HEADINGS, cells, form, _ORDER_HEADINGS[2:4]))
    return "\n".join(parts)


def _cells(one: Mapping[str, Any]) -> list[str]:
    shares = ["" if one[key] is None else f"{100 * one[key]:.0f} %" for key in ("hit", "hit_measured")]
    return [
        _line(one), f"{one['model']} {one['bits']}", one["machine"], one["engine"], one["setting"], digits(one["measured"]),
        digits(one["predicted"]), f"{digits(one['low'])} to {digits(one['high'])}", f"{100 * one['error']:+.0f} %", *shares,
        "" if one["with_hits"] is None else digits(one["with_hits"]),
    ]  # fmt: skip


def summary(result: EngineResult) -> list[str]:
    """Say in a few lines how near predictions are, and which rows have none."""
    frame = result.frame
    n_pairs, right = sum(one[2] for one in result.orders), sum(one[3] for one in result.orders)
    lines = [_errors(f"{len(frame)} rows predicted", frame["error"], frame)]
    if (hits := frame[frame["with_hits"].notna()]).shape[0]:
        lines.append(_errors(f"{len(hits)} at their measured hit rates", hits["with_hits"] / hits["measured"] - 1))
    lines.append(f"order right in {right} of {n_pairs} pairs of one machine and model that differ by more than {DIFFER - 1:.0%}")
    lines += [f"columns not read: {', '.join(result.ignored)}"] if result.ignored else []
    lines.append(f"{len(result.skipped)} rows skipped")
    return [*lines, *grouped(result.skipped)]


def _errors(what: str, errors: pd.Series, frame: pd.DataFrame | None = None) -> str:
    size = errors.astype(float).abs()
    said = f"{what}: median error {100 * size.median():.0f} %, nine of ten within {100 * size.quantile(0.9):.0f} %"
    if frame is None:
        return said
    inside = ((frame["low"] <= frame["measured"]) & (frame["measured"] <= frame["high"])).mean()
    return f"{said}, {100 * inside:.0f} % inside the interval of 90 %"
