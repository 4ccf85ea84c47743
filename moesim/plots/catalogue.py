"""All kinds of figures by name, what each needs, and which figures a kind makes of a sweep."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from moesim.errors import ConfigError, unknown_name
from moesim.plots import bars, best_setting, distributions, heatmap, lines, serving, stacks, studies, trace_maps, validation
from moesim.plots.gantt import gantt
from moesim.plots.result_rows import RUNS_OF, cache_column, failing, group_name, prepared, settings_in, split
from moesim.plots.style import Kind

_KINDS: Final[Sequence[Kind[...]]] = (
    bars.decode_speed, bars.prefill_speed, bars.speedup, lines.speedup_lines, lines.throughput, lines.speed_by_context,
    lines.hit_rate, stacks.breakdown, bars.ladder, heatmap.heatmap, best_setting.best_setting, bars.energy, lines.vram,
    studies.tornado, studies.regret, studies.crossover, validation.validation, validation.printed,
    serving.latency_by_load, serving.goodput, serving.request_gantt, serving.slots_over_time, serving.capacity,
    lines.hit_rate_by_token, distributions.latency_cdf, distributions.balance_cdf, stacks.time_by_layer, gantt,
    trace_maps.signal_accuracy, trace_maps.signal_accuracy_by_layer, trace_maps.popularity_drift, studies.lookahead,
    trace_maps.reuse_map, trace_maps.coactivation, trace_maps.coactivation_ranks,
)  # fmt: skip
KINDS: Final[Mapping[str, Kind[...]]] = {kind.__name__: kind for kind in _KINDS}
"""Name -> kind, in the order of listings."""

SOURCES: Final[Mapping[str, str]] = {
    "rows": "a folder of `moesim run --out`",
    "steps": "a folder of `moesim run --out` of an experiment with `frames: true`",
    "layers": "a folder of `moesim run --out` of an experiment with `frames: true`",
    "records": "a folder of `moesim run --out`",
    "requests": "a folder of `moesim run --out` of a served workload",
    "capacity": "a folder of `moesim capacity --out`",
    "trace": "the name or path of a trace",
    "validation": "a folder of `moesim validate --out`",
    "papers": "papers.csv or results.csv of `moesim papers --out`, or the folder of the first",
    "regret": "a folder of `moesim regret --out`",
    "whatif": "a folder of `moesim whatif --out`",
    "league": "a folder of `moesim league --out`",
    "lookahead": "a folder of `moesim trace lookahead --out`",
}
"""Source of a kind -> what the user names."""

IN_EXPERIMENTS: Final = ("rows", "steps", "layers", "records", "requests")
"""Sources of the figures that an experiment may ask for."""


def kind_of(name: str) -> Kind[...]:
    """Find a kind; raises `ConfigError` for an unknown name."""
    if name not in KINDS:
        raise ConfigError(f"plot: {unknown_name('kind of figure', name, KINDS)}")
    return KINDS[name]


def options_of(kind: Kind[...]) -> list[str]:
    """List the options of a kind."""
    names = list(inspect.signature(kind).parameters)
    return [name for name in names[2 if kind.source == "records" else 1 :] if name != "label"]


def figures_of(name: str, frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Divide a frame into those of single figures, by what is swept and not shown."""
    kind = kind_of(name)
    if name in _WHOLE:
        yield name, frame
        return
    if name in _OF_ONE and "policy" in frame:
        frame = frame.assign(**{RUNS_OF: frame["policy"]})
    lost = aside = frame.iloc[:0]
    if kind.source in IN_EXPERIMENTS:
        done = prepared(frame, name)  # refuses results in which nothing succeeded
        whole = prepared(frame, name, failed=True)
        frame = whole if name in _FAILED else done
        lost = whole[failing(whole)].reindex(columns=done.columns) if name in _NAMED else lost
    if name == "heatmap":
        rows = _as_one_policy(frame, options)
        frame, aside = rows, frame[frame["policy"].isin(heatmap.left_out(frame, rows))]  # the caption names them
    shown = _SHOWN[name](frame, options) if name in _SHOWN else ()
    parts = list(split(frame, shown))
    homes = _homes(lost, [values for values, _ in parts])
    for place, (values, part) in enumerate(parts):
        text = ".".join(f"{column.replace(RUNS_OF, 'policy')}={group_name(value, column)}" for column, value in values.items())
        part = part.drop(columns=RUNS_OF, errors="ignore")
        safe = re.sub(r"[^A-Za-z0-9=._-]+", "-", text)
        more = [rows for rows in (aside, lost[[home == place for home in homes]]) if len(rows)]
        yield (f"{name}.{safe}" if text else name), pd.concat([part, *more], ignore_index=True) if more else part


_WHOLE: Final = ("speedup", "validation", "printed", "crossover", "lookahead")  # they show all settings
_OF_ONE: Final = ("time_by_layer",)  # they show one policy
_FAILED: Final = ("decode_speed", "prefill_speed", "energy", "ladder", "goodput")  # they mark what failed
_NAMED: Final = (
    "breakdown", "hit_rate", "heatmap", "vram", "speedup_lines", "throughput", "speed_by_context", "latency_by_load",
)  # fmt: skip  # they name it below


def _homes(lost: pd.DataFrame, settings: Sequence[Mapping[str, Any]]) -> list[int]:
    def fits(row: Mapping[Any, Any], values: Mapping[str, Any]) -> bool:
        return all(group_name(row[column]) == group_name(value) for column, value in values.items() if column in row)

    return [next((i for i, values in enumerate(settings) if fits(row, values)), 0) for row in lost.to_dict("records")]


def _axes(what: str) -> _Shown:
    return lambda frame, options: lines.shown_in(frame, what, options.get("x"), options.get("panel"))


def _swept(what: str, x: str) -> _Shown:
    def shown(frame: pd.DataFrame, options: Mapping[str, Any]) -> Sequence[str]:
        return lines.shown_in(frame, what, x, options.get("panel")) if x in frame else ()  # the figure says what is missing

    return shown


def _loaded(frame: pd.DataFrame, options: Mapping[str, Any]) -> Sequence[str]:
    return lines.shown_in(frame, "plot", serving.load_of(frame, options.get("x")), options.get("panel"))


def _cached(what: str, *more: str) -> _Shown:
    return lambda frame, options: [*more, cache_column(frame), *lines.panel_in(frame, what, options.get("panel"))]


_Shown = Callable[[pd.DataFrame, Mapping[str, Any]], Sequence[str]]
_SHOWN: Final[Mapping[str, _Shown]] = {
    **{name: _axes(name) for name in ("decode_speed", "prefill_speed", "energy", "ladder", "speedup_lines")},
    "latency_by_load": _loaded,
    "goodput": _loaded,
    "throughput": _swept("throughput", lines.STREAMS),
    "speed_by_context": _swept("speed_by_context", lines.CONTEXT),
    "breakdown": lambda frame, options: _axes("breakdown")(frame, options)[: 1 + (options.get("panel") is not None)],
    "hit_rate": lambda frame, options: [
        "cache_ratio",
        cache_column(frame),
        *lines.panel_in(frame, "hit_rate", options.get("panel")),
    ],
    "vram": lambda frame, options: [cache_column(frame), *lines.panel_in(frame, "vram", options.get("panel"))],
    "best_setting": lambda frame, options: [name for name in settings_in(frame) if name not in best_setting.APART],
    "heatmap": lambda frame, options: [str(name) for name in (options.get("x"), options.get("y")) if name in frame],
}
"""Columns that a kind shows next to the policy; no other may vary in one figure."""


def _as_one_policy(frame: pd.DataFrame, options: Mapping[str, Any]) -> pd.DataFrame:
    defaults = inspect.signature(heatmap.heatmap).parameters
    asked = {name: options.get(name, defaults[name].default) for name in ("x", "y", "metric")}
    rows, x, y = heatmap.asked(frame, **asked)
    columns = [name for name in rows.columns.astype(str) if name.startswith(heatmap.OPTION)]
    others = [name for name in columns if name not in (x, y)]
    listed = []
    for policy, *values in rows[["policy_name", *others]].astype(object).itertuples(index=False):
        given = [
            f"{name.removeprefix(heatmap.OPTION)}={group_name(v)}" for name, v in zip(others, values, strict=True) if pd.notna(v)
        ]
        listed.append(",".join([str(policy), *given]))
    return rows.drop(columns=columns).assign(**{RUNS_OF: listed})
