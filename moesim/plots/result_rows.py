"""Result rows made ready for figures: groups, means with intervals, failed runs, exactness."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from moesim.core.student import student_t
from moesim.core.units import format_size
from moesim.errors import ConfigError
from moesim.metrics.fidelity import is_exact as all_fresh
from moesim.metrics.naming import CACHE_SETTINGS, COLUMNS, SETTINGS
from moesim.plots.style import need

REPEATS: Final = ("repeat", "seed")
"""Columns in which rows differ that repeat one setting."""
CACHE: Final = "cache"
"""Column made for results of which some have a ratio and others a budget."""
WARM_UP: Final = "warm_up"
"""Column made for results that differ in nothing but the steps that count as cold."""
RUNS_OF: Final = "policy_and_options"
"""Column made for heat maps: the policy, and its options but the two that are shown."""
_GROUP: Final = "group"  # equal in rows that repeat one setting, and in no others
_ORDER: Final = "order"  # attribute of frames that had failed runs: values by column, in the order of the experiment
WORDS: Final = {name: column.word for name, column in COLUMNS.items()}
"""Words for the columns of settings."""

MADE: Final = re.compile(r"(synthetic-.*-seed)(\d+)")
"""Names of made-up routing: what is before the seed, and the seed. `prepared` names that of repeats as that of the first."""
_CACHES: Final = (*CACHE_SETTINGS, CACHE)


def prepared(frame: pd.DataFrame, what: str, columns: Sequence[str] = (), *, failed: bool = False) -> pd.DataFrame:
    """Prepare result rows for a figure."""
    # `cache_ratio` is the share that was cached where a budget was asked for; where some runs have a
    # ratio and others a budget, a column `cache` has either in words.
    need(frame, ("policy", *columns), what)
    frame = without_retried(frame.reset_index(drop=True)).reset_index(drop=True)
    if failing(frame).all() and not failed:
        raise ConfigError(f"plot {what}: expected at least one run that succeeded, got none; `error` in runs.parquet says why")
    if "cache_budget_bytes" in frame and "cache_ratio" in frame:
        budgets = frame["cache_budget_bytes"].notna()
        if CACHE not in frame and budgets.any() and not budgets.all():
            asked = [
                group_name(budget, "cache_budget_bytes") if has else group_name(ratio)
                for has, budget, ratio in zip(budgets, frame["cache_budget_bytes"], frame["cache_ratio"], strict=True)
            ]
            frame = frame.assign(**{CACHE: asked})
        if "cache_share" in frame:
            frame = frame.assign(cache_ratio=frame["cache_ratio"].astype(float).fillna(frame["cache_share"].astype(float)))
    frame = with_draws(frame)  # before repeats of made-up routing get one name
    if "repeat" in frame and "trace" in frame:
        frame = frame.assign(trace=[_first(str(name), n) for name, n in zip(frame["trace"], frame["repeat"], strict=True)])
    done = _unambiguous(frame[~failing(frame)], what)
    frame = frame.assign(**{WARM_UP: done[WARM_UP]}) if WARM_UP in done and WARM_UP not in frame else frame
    if failing(frame).any():
        frame.attrs = {_ORDER: {name: _appearing(frame[name]) for name in ("policy", *settings_in(frame))}, **frame.attrs}
    return frame if failed else frame[~failing(frame)].reset_index(drop=True)


def _appearing(column: pd.Series) -> list[Any]:
    return list(dict.fromkeys(column.dropna().tolist()))


def _first(trace: str, repeat: Any) -> str:
    made = MADE.fullmatch(trace)
    return trace if made is None or _missing(repeat) else f"{made[1]}{max(0, int(made[2]) - int(repeat))}"


def _unambiguous(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Refuse two results of one run with other inputs."""
    if "workload_digest" not in frame:  # no whole rows of results
        return frame
    same = [column for column in ("policy", *settings_in(frame)) if column in frame]
    texts = pd.DataFrame({name: _texts(frame, name) for name in (*same, *REPEATS, _GROUP) if name in frame})
    twice = texts.drop(columns=_GROUP, errors="ignore").duplicated().to_numpy()
    if _GROUP in texts:
        twice = twice | (texts[_GROUP] != texts.groupby(same, sort=False)[_GROUP].transform("first")).to_numpy()
    if twice.any() and WARM_UP not in frame and "warm_up_steps" in frame:  # mostly it follows from the workload
        return _unambiguous(frame.assign(**{WARM_UP: frame["warm_up_steps"]}), what)
    if twice.any():
        row = frame[twice].iloc[0]
        where = ", ".join(f"{WORDS.get(c, c)} {group_name(row[c], c)}" for c in ("batch_size", cache_column(frame)) if c in frame)
        raise ConfigError(
            f"plot {what}: expected one result a setting, got two of {row['policy']} ({where}) with other inputs; "
            "draw one folder, of an experiment that has one of them"
        )
    return frame


def column_of(frame: pd.DataFrame, name: str) -> str:
    """Return the column of a setting, which may be named in short."""
    column = {"batch": "batch_size", "cache": cache_column(frame)}.get(name, name)
    return column if column in frame else name


def cache_column(frame: pd.DataFrame) -> str:
    """Return the column of the cache size that was asked for."""
    if CACHE in frame:
        return CACHE
    has_budgets = "cache_budget_bytes" in frame and frame["cache_budget_bytes"].notna().all()
    return "cache_budget_bytes" if has_budgets else "cache_ratio"


def settings_in(frame: pd.DataFrame) -> list[str]:
    """List the columns of settings."""
    names = [*(name for name in SETTINGS if name not in REPEATS), cache_column(frame), WARM_UP, RUNS_OF]
    return [name for name in dict.fromkeys(names) if name in frame]


def varying(frame: pd.DataFrame, given: Sequence[str] = ()) -> list[str]:
    """List the settings with several values though the given columns have one."""
    found: list[str] = []
    written: dict[str, list[str]] = {}

    def texts(name: str) -> list[str]:
        if name not in written:
            written[name] = _texts(frame, name)
        return written[name]

    for name in settings_in(frame):
        fixed = list(dict.fromkeys([*given, *found]))
        if name in fixed or (name in _CACHES and any(g in _CACHES for g in fixed)):  # a budget has its own ratio for each policy
            continue
        first: dict[tuple[str, ...], str] = {}
        for value, *place in zip(*(texts(one) for one in (name, *fixed)), strict=True):
            if first.setdefault(tuple(place), value) != value:
                found.append(name)
                break
    return found


def split(frame: pd.DataFrame, shown: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Divide rows by what varies and is not shown."""
    others = varying(frame, shown)
    if not others:
        yield {}, frame
        return
    for _, part in frame.groupby([pd.Series(_texts(frame, name), frame.index) for name in others], sort=False):
        yield {name: part[name].iloc[0] for name in others}, part


def first_setting(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Keep the runs at the first setting and repeat."""
    frame = prepared(frame, what)
    _, rows = next(split(frame, []))
    for name in REPEATS:
        if name in rows:
            rows = rows[rows[name] == rows[name].iloc[0]]
    return rows


def shared_setting(frame: pd.DataFrame, what: str) -> tuple[pd.DataFrame, list[str]]:
    """Keep the setting and repeat at which most policies ran; name the others."""
    asked = policies_of(prepared(frame, what, failed=True))
    repeats = [name for name in REPEATS if name in frame]
    found: list[pd.DataFrame] = []
    for _, rows in split(prepared(frame, what), []):
        found += [part for _, part in rows.groupby(repeats, sort=False, dropna=False)] if repeats else [rows]
    rows = max(found, key=lambda rows: rows["policy"].nunique())  # the first of them
    return rows, [name for name in asked if name not in set(rows["policy"])]


def _texts(frame: pd.DataFrame, column: str) -> list[str]:
    return ["-" if _missing(value) else str(value) for value in frame[column].tolist()]


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value)) or value is pd.NA


def levels(frame: pd.DataFrame, column: str) -> list[Any]:
    """List values: numbers by size, names in the order of the experiment."""
    values = _appearing(frame[column])
    if all(isinstance(v, int | float | np.number) for v in values):
        return sorted(values)
    known = frame.attrs.get(_ORDER, {}).get(column, [])
    return [value for value in known if value in values] + [value for value in values if value not in known]


def summarised(frame: pd.DataFrame, by: Sequence[str], metric: str) -> pd.DataFrame:
    """Average a metric over the rows of each combination of columns."""
    # `low` and `high`: 95 % interval of the mean over `n` draws (repeats with other requests), else
    # nan. `source_label` is the weakest.
    frame = frame[pd.to_numeric(frame[metric], errors="coerce").notna()]
    rows = []
    for key, part in frame.groupby(list(by), sort=False, dropna=False):
        values = part[metric].astype(float).tolist()
        mixed = len(part) > 1 and bool(varying(part))
        values = values if mixed else over_draws(part, values)
        value, low, high = interval(values)
        if mixed:  # a mean over settings is no estimate of one of them
            low = high = math.nan
        rows.append(
            {**dict(zip(by, key, strict=True)), metric: value, "low": low, "high": high, "n": len(values), **qualified(part)}
        )
    return pd.DataFrame(rows, columns=[*by, metric, "low", "high", "n", "fresh", "source_label"])


def qualified(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the share computed as routed, and the weakest label, of a mean."""
    from moesim.hardware import weakest

    labels = [str(v) for v in frame["source_label"].dropna()] if "source_label" in frame else []
    fresh = mean(frame, FRESH) if FRESH in frame else None
    return {"fresh": math.nan if fresh is None else fresh, "source_label": weakest(labels) if labels else None}


def mean(frame: pd.DataFrame, column: str) -> float | None:
    """Average a column; None if no row has a value."""
    values = pd.to_numeric(frame[column], errors="coerce").dropna()
    return float(values.mean()) if len(values) else None


def policies_of(frame: pd.DataFrame) -> list[str]:
    """List the policies in the order of the experiment."""
    return [str(name) for name in levels(frame, "policy")]


def group_name(value: Any, column: str = "") -> str:
    """Write the value of a group; bytes with a unit."""
    if column in COLUMNS and column.endswith("_bytes") and not _missing(value):
        return _bytes(int(value))
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, str) and value.startswith("{"):  # a mapping, as a sweep writes it
        return re.sub(r'[{}"]', "", value).replace(": ", " ")
    return "-" if _missing(value) else f"{value:g}" if isinstance(value, int | float | np.number) else str(value)


def named(value: Any, column: str) -> str:
    """Write a setting and its value: ``batch 4``; a model by its name."""
    if column in ("model", "hardware", "trace"):
        return str(value)
    if column == "n_batches" and value != "":
        return f"{group_name(value)} batch{'' if value == 1 else 'es'} a run"
    word = "cache" if column in _CACHES else WORDS.get(column, column)
    return f"{word} {group_name(value, column)}"


def _bytes(value: int) -> str:
    """Write a budget in the unit in which it was probably typed."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value >= size and value * 4 % size == 0:
            return f"{value / size:g} {unit}"
    return format_size(value)


DRAW: Final = "draw"
"""Column made of the trace and the requests drawn from it; rows in which it is equal are one draw."""
_DRAWN: Final = "requests_drawn"
_CONFIDENCE: Final = 0.95


def with_draws(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the column `DRAW`; None where the drawn requests are not recorded."""
    if DRAW in frame or _DRAWN not in frame or "trace" not in frame:
        return frame
    drawn = zip(frame["trace"].tolist(), frame[_DRAWN].tolist(), strict=True)
    named = [f"{trace}: {requests}" if isinstance(requests, str) else None for trace, requests in drawn]
    return frame.assign(**{DRAW: pd.Series(named, frame.index, dtype=object)})


def over_draws(part: pd.DataFrame, values: Sequence[float]) -> list[float]:
    """Average the values of rows that are one draw."""
    names = part[DRAW].tolist() if DRAW in part else [None] * len(part)
    found: dict[object, list[float]] = {}
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        found.setdefault(name if isinstance(name, str) else i, []).append(value)
    return [float(np.mean(values)) for values in found.values()]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return mean, math.nan, math.nan
    half = student_t(_CONFIDENCE, n) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


_RUN: Final = ("policy", *SETTINGS, *CACHE_SETTINGS, "repeat")


def failing(frame: pd.DataFrame) -> pd.Series:
    """Return which rows are of failed runs."""
    return frame["error"].notna() if "error" in frame else pd.Series(False, frame.index, dtype=bool)


def without_retried(frame: pd.DataFrame) -> pd.DataFrame:
    """Leave out failed runs that another row repeats."""
    columns = [name for name in _RUN if name in frame]
    texts = frame[columns].astype(object).map(str)
    order = failing(frame).sort_values(kind="stable").index  # those that succeeded first
    again = texts.loc[order].duplicated().reindex(frame.index)
    return frame[~(again & failing(frame))]


def with_failed(data: pd.DataFrame, lost: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Add the number of failed runs, and bars of which all failed."""
    if lost.empty:
        return data
    records: list[dict[Any, Any]] = data.to_dict("records")
    known = {tuple(str(row[name]) for name in by): row for row in records}
    for key, part in lost.groupby(list(by), sort=False, dropna=False):
        row = known.get(tuple(str(value) for value in key))
        if row is None:
            row = {**dict(zip(by, key, strict=True)), "n": 0}
            records.append(row)
        kinds = {numberless(why): why for why in reversed([_why(error) for error in part["error"]])}  # the first of each
        row |= {"failed": len(part), "why": " / ".join(reversed(kinds.values()))}
    table = pd.DataFrame(records, columns=[*data.columns, "failed", "why"])
    return table.assign(failed=table["failed"].fillna(0).astype(int))


_NUMBER: Final = re.compile(r"\d[\d.,]*")


def numberless(why: str) -> str:
    """Write a reason without its numbers, in which alone some differ."""
    return _NUMBER.sub("#", why)


def _why(error: object) -> str:
    return str(error).split("; ")[0]  # the rest is the remedy


FRESH: Final = "fidelity_fresh_decode"
"""Column of the share of decoding's gate mass that was computed as routed, on fresh inputs."""


def is_exact(fresh: float) -> bool:
    """Whether decoding was computed as routed, as far as is known."""
    return math.isnan(fresh) or all_fresh(fresh)


def star(fresh: float) -> str:
    """Mark what is not exact.

    >>> star(0.99999), star(1.0)
    ('*', '')
    """
    return "" if is_exact(fresh) else "*"


def inexact(frame: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return the least and largest share as routed of each inexact policy."""
    if FRESH not in frame:
        return {}
    shares = pd.to_numeric(frame[FRESH], errors="coerce")
    ends = {str(name): (float(part.min()), float(part.max())) for name, part in shares.groupby(frame["policy"], sort=False)}
    return {name: (low, high) for name, (low, high) in ends.items() if not is_exact(low)}


def with_ends(data: pd.DataFrame, frame: pd.DataFrame, by: Sequence[str], metric: str) -> pd.DataFrame:
    """Add the least and the most of a metric to its means."""
    columns = [f"{metric}_{end}" for end in ("least", "most")]
    if not all(name in frame and frame[name].notna().any() for name in columns):
        return data
    frame = frame[pd.to_numeric(frame[metric], errors="coerce").notna()]
    ends = [_ends(part, columns) for _, part in frame.groupby(list(by), sort=False, dropna=False)]  # in the order of the means
    return data.assign(least=[least for least, _ in ends], most=[most for _, most in ends])


def _ends(part: pd.DataFrame, columns: Sequence[str]) -> tuple[float, float]:
    if part[list(columns)].isna().any(axis=None) or (len(part) > 1 and varying(part)):
        return math.nan, math.nan
    least, most = (statistics.mean(over_draws(part, part[name].astype(float).tolist())) for name in columns)
    return least, most
