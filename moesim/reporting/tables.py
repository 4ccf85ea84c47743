"""The tables of a report: results, settings, and notes with the runs they are about."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moesim.core.units import NS_PER_MS
from moesim.experiment.report import CI, Row, aggregate, busy_percent, fresh_share, is_lossy, moved_mb, number, repeated, served
from moesim.metrics.fidelity import fresh_percent
from moesim.metrics.naming import CACHE_SETTINGS, COLUMNS, SETTINGS, setting_in_words, value_in_words
from moesim.reporting.answer import setting_of

NOTHING: Final = "–"
_MOVED_OTHER: Final = ("update", "write_back", "message", "activation")


@dataclass(frozen=True)
class Column:
    """A column of the table of results."""

    # heading, title: heading with its unit, and what it means, shown where the mouse rests
    heading: str
    title: str
    value: Callable[[Row], Any]  # row -> number, or text, or None if it has none
    decimals: int | None = None  # of numbers; None: as many as are needed for three digits of the smallest
    half: Callable[[Row], float | None] | None = None  # row -> half the width of the 95 % interval of a mean over repeats
    short: bool = False  # whether to write numbers as short as they are, such as 0.5, and not all with the same decimals


@dataclass(frozen=True)
class Cell:
    """Text of a cell; `numeric` cells are aligned to the right."""

    text: str
    numeric: bool = False


@dataclass(frozen=True)
class Line:
    """A line of the table of results."""

    policy: str  # its first cell
    cells: list[Cell]  # of a failed run those of its settings only
    error: str | None  # why it failed
    lossy: bool  # whether it computed anything else than the model asked for
    place: str  # whether it is the best of its setting
    found_by: str  # what a filter is compared with


@dataclass(frozen=True)
class ResultTable:
    """Headings, the policy's first, and lines; `n_settings` columns are settings."""

    headings: list[tuple[str, str, bool]]
    lines: list[Line]
    n_settings: int


def _scaled(key: str, scale: float) -> Callable[[Row], float | None]:
    return lambda row: number(row, key, scale)


def _fresh(row: Row) -> float | None:
    share = fresh_share(row)
    return None if share is None else fresh_percent(share)


_CAUSES: Final = "megabytes over all links for each generated token, prefill included: "


def _metric(heading: str, key: str, words: str, scale: float = 1.0, decimals: int | None = None) -> Column:
    return Column(heading, f"{key}: {words}", _scaled(key, scale), decimals, _scaled(CI + key, scale))


_OF_BATCHES: Final = (
    _metric("TTFT (ms)", "ttft_mean_ns", "mean time to the first token", 1 / NS_PER_MS),
    _metric("TPOT (ms)", "tpot_mean_ns", "mean time per output token", 1 / NS_PER_MS),
    _metric("prefill tok/s", "prefill_tokens_per_s", "of the whole batch"),
    _metric("decode tok/s", "decode_tokens_per_s", "of the whole batch"),
)
_OF_REQUESTS: Final = (
    _metric("TTFT p50 (ms)", "ttft_p50_ns", "time to the first token", 1 / NS_PER_MS),
    _metric("TTFT p99 (ms)", "ttft_p99_ns", "time to the first token", 1 / NS_PER_MS),
    _metric("TPOT p50 (ms)", "tpot_p50_ns", "time per output token of a request", 1 / NS_PER_MS),
    _metric("tok/s", "answer_tokens_per_s", "of all answers"),
    _metric("req/s", "requests_per_s", "requests that ended"),
    _metric("good/s", "goodput_per_s", "requests within the limits"),
    _metric("queue", "queue_mean", "requests that wait for their first step, on average"),
)
"""In their place where requests arrive."""
METRICS: Final = (
    Column(
        "fresh %",
        "fidelity_fresh_decode: share of decoding's gate weight served by the routed expert on fresh inputs; "
        "* not exact: routing is replayed as recorded, whatever the policy computed",
        _fresh,
        1,
    ),
    _metric(
        "hit %",
        "hit_rate",
        "lookups whose expert a GPU ran from a copy that was there when the router's result was known",
        100,
        1,
    ),
    _metric("decode hit %", "hit_rate_decode", "the same, of decode steps only", 100, 1),
    _metric("resident %", "resident_rate", "lookups whose expert was on a GPU by then, whether or not a GPU ran it", 100, 1),
    Column("MB/token demand", _CAUSES + "demand fetches", lambda row: moved_mb(row, "demand"), 1),
    Column("MB/token prefetch", _CAUSES + "prefetches that were used", lambda row: moved_mb(row, "prefetch_used"), 1),
    Column("MB/token wasted", _CAUSES + "prefetches that were not", lambda row: moved_mb(row, "prefetch_wasted"), 1),
    Column(
        "MB/token other",
        _CAUSES + "cache updates, write-backs, messages, activations",
        lambda row: moved_mb(row, *_MOVED_OTHER),
        1,
    ),
    Column("GPU busy %", "utilisation.gpu*: mean over GPUs", lambda row: busy_percent(row, "gpu"), 1),
    Column("CPU busy %", "utilisation.cpu*: mean over CPUs", lambda row: busy_percent(row, "cpu"), 1),
    _metric("link busy %", "pcie_share", "busy share of the links to and from GPUs", 100, 1),
    _metric("J/token", "energy_j_per_token", "energy for each generated token"),
)
"""Columns of metrics; docs/reference/metrics.md defines them."""

_CACHE: Final = (
    Column("cache ratio", "cache_ratio: share of all experts that the GPU cache holds", _scaled("cache_ratio", 1), short=True),
    Column(
        "budget (GiB)",
        "cache_budget_bytes: memory of a GPU for everything",
        _scaled("cache_budget_bytes", 1 / (1 << 30)),
        short=True,
    ),
)

_REPEATS: Final = Column("repeats", "repeats: runs with other seeds that the line is the mean of", _scaled("repeats", 1), 0)


def found_by(row: Row) -> str:
    """Write what a filter is compared with: a run's names, and each setting behind its name, as shown and as in files.

    >>> found_by({"run": 3, "policy": "Ours", "policy_name": "dali", "batch_size": 8, "cache_ratio": 0.25})
    'run 3 ours dali cache 25% batch 8 batch size 8 cache 0.25 cache ratio 0.25'
    """
    share, options = number(row, "cache_ratio"), value_in_words(row.get("policy_options") or "")
    words = [f"run {row.get('run')}", row["policy"], row.get("policy_name") or "", options]
    words += [] if share is None else [f"cache {100 * share:g}%"]
    for name in COLUMNS:
        if row.get(name) is not None:
            words += [setting_in_words(row[name], name), f"{name} {value_in_words(row[name], name)}"]
    words += ["not exact"] if is_lossy(row) else [f"failed {row['error']}"] if row.get("error") else []
    return " ".join(re.sub(r"[_=:,]", " ", " ".join(map(str, words))).lower().split())


NAMES: Final = frozenset(re.split("[_ ]", " ".join(f"{name} {column.word.lower()}" for name, column in COLUMNS.items()) + " run"))
"""Words that a filter reads together with the word behind them."""


def result_table(rows: Sequence[Row], best: Mapping[tuple[str, str], bool]) -> ResultTable:
    """Make the table of results; `best` is that of `moesim.reporting.answer.Answer`."""
    several = repeated(rows)
    if several:
        rows = [*aggregate([row for row in rows if not row.get("error")]), *(row for row in rows if row.get("error"))]
    done = [row for row in rows if not row.get("error")]
    settings = [_setting_column(key) for key in SETTINGS if len({str(row.get(key)) for row in rows}) > 1]
    settings += [column for column in _CACHE if any(column.value(row) is not None for row in rows)]
    settings += [_REPEATS] if several else []
    of = _OF_REQUESTS if served(rows) else _OF_BATCHES
    metrics = [column for column in (*of, *METRICS) if any(column.value(row) is not None for row in done)]
    labels = [
        Column("label", "source_label: the weakest source among the numbers used", lambda row: _text(row.get("source_label")))
    ]
    columns = [*settings, *metrics, *(labels if done else [])]
    form = [_format(column, rows) for column in columns]
    lines = []
    for row in rows:
        failed = bool(row.get("error"))
        shown = form[: len(settings)] if failed else form
        alone = None if failed else best.get((str(row["policy"]), str(setting_of(row, several=several))))
        place = "" if alone is None else "best" if alone else "among the best"
        error, cells = str(row["error"]) if failed else None, [one(row) for one in shown]
        lines.append(Line(str(row["policy"]), cells, error, is_lossy(row), place, f"{found_by(row)} {place}"))
    numeric = [any(isinstance(column.value(row), int | float) for row in rows) for column in columns]
    headings = [(column.heading, column.title, right) for column, right in zip(columns, numeric, strict=True)]
    if not done:
        headings.append(("error", "why the run failed", False))
    return ResultTable([("policy", "policy with the options that were given", False), *headings], lines, 1 + len(settings))


def _setting_column(key: str) -> Column:
    return Column(key.replace("_", " "), f"{key}: differs between runs", lambda row: _setting(row.get(key), key), 0)


def _setting(value: Any, key: str) -> Any:
    value = str(value).lower() if isinstance(value, bool) else value_in_words(value, key)
    return value if value is None or isinstance(value, int) else str(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _format(column: Column, rows: Sequence[Row]) -> Callable[[Row], Cell]:
    values = [column.value(row) for row in rows]
    numbers = [abs(value) for value in values if isinstance(value, int | float) and value]
    decimals = column.decimals
    if decimals is None:
        decimals = min(max(2 - math.floor(math.log10(min(numbers))), 0), 4) if numbers else 0

    def cell(row: Row) -> Cell:
        value = column.value(row)
        if value is None:
            return Cell(NOTHING)
        if isinstance(value, str):
            return Cell(value)
        mark = "*" if column.value is _fresh and is_lossy(row) else ""
        half = None if column.half is None else column.half(row)
        interval = "" if half is None else f" ± {half:.{decimals}f}"
        return Cell(f"{value:g}" if column.short else f"{value:.{decimals}f}{mark}{interval}", True)

    return cell


def notes_of(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List what qualifies results, with the runs of each note, by first occurrence."""
    done = [row for row in rows if not row.get("error")]
    found: dict[str, list[Row]] = {}
    for row in done:
        for note in dict.fromkeys(str(row.get("notes") or "").split(", ")):
            if note:
                found.setdefault(note, []).append(row)
    listed = []
    n_policies = len({str(row["policy"]) for row in done})
    for note, about in found.items():
        policies = list(dict.fromkeys(str(row["policy"]) for row in about))
        who = "all runs" if len(about) == len(done) else f"{len(about)} of {len(done)} runs"
        listed.append((note, f"{who}: {shortened(policies)}" if len(policies) < n_policies else who))
    return listed


def settings_of(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """List each setting's name and values, without those left alone."""
    listed = []
    alone = ("batch_size", "n_batches", "micro_batches") if served(rows) else ()  # of batches
    for key in dict.fromkeys(("policy", "model", "hardware", "trace", *CACHE_SETTINGS, *SETTINGS)):
        values = list(dict.fromkeys(_plain(row[key], key) for row in rows if row.get(key) is not None))
        if values and values != ["false"] and key not in alone:
            listed.append((key.replace("_", " "), shortened(values)))
    return listed


def _plain(value: Any, key: str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(_setting(value, key))


def shortened(values: Sequence[str], most: int = 12) -> str:
    """Join values with commas; of more than `most` the first, and how many there are."""
    shown = ", ".join(values[:most])
    return shown if len(values) <= most else f"{shown}, … ({len(values)} in all)"
