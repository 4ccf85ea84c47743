"""Rows of results: numbers, failures in few words, repeats as means, the printed table."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import combinations, zip_longest
from math import sqrt
from shutil import get_terminal_size
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

from moesim.core.colours import LABEL
from moesim.core.student import student_t
from moesim.core.table import Format, render, render_records
from moesim.core.units import NS_PER_MS, NS_PER_S
from moesim.experiment.runner import LEAST, MOST
from moesim.hardware.costs import NO_CURVE
from moesim.metrics import Value
from moesim.metrics.breakdown import CAUSES
from moesim.metrics.fidelity import fresh_cell, is_exact
from moesim.metrics.naming import CACHE_SETTINGS, COLUMNS, HOW, LIVE, NOT_VARIED, SETTINGS, WORKLOAD, cache_asked, notes_of
from moesim.metrics.serving import GREW
from moesim.trace.workload.spec import SERVED as ASKED_OF_SERVED

Row = Mapping[str, Any]


def number(row: Row, key: str, scale: float = 1.0) -> float | None:
    """Return a value of a row times a scale; None if it is no finite number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value * scale


def fresh_share(row: Row) -> float | None:
    """Return the share of gate weight served as routed while decoding, else in the whole run."""
    share = number(row, "fidelity_fresh_decode")
    return number(row, "fidelity_fresh") if share is None else share


def is_lossy(row: Row) -> bool:
    """Return whether a run computed anything else than the model asked for."""
    shares = (number(row, "fidelity_fresh"), number(row, "fidelity_fresh_decode"))
    return any(share is not None and not is_exact(share) for share in shares) or bool(number(row, "n_inexact_slots"))


def moved_mb(row: Row, *causes: str) -> float | None:
    """Return the MB over the links for each generated token, of some causes."""
    tokens = number(row, "n_generated_tokens")
    known = [part for cause in causes if (part := number(row, f"bytes_{cause}")) is not None]
    return sum(known) / tokens / 1e6 if tokens and known else None


def busy_percent(row: Row, kind: str) -> float | None:
    """Return the mean busy share of the devices of a kind, in percent."""
    names = [key for key in row if key.startswith(f"utilisation.{kind}") and "->" not in key]
    shares = [share for name in names if (share := number(row, name, 100)) is not None]
    return sum(shares) / len(shares) if shares else None


_NUMBER: Final = re.compile(r"\d[\d.,]*")


def describe_run(row: Mapping[str, Any]) -> str:
    """Describe in a few words which run a row is of.

    >>> describe_run({"run": 3, "policy": "lru", "cache_ratio": 0.5, "cache_budget_bytes": None, "batch_size": 4})
    'run 3 (lru, cache 0.5, batch 4)'
    """
    return f"run {row['run']} ({row['policy']}, {_asked(row)})"


def failure_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line for each run that failed, or for a policy's runs that failed alike.

    >>> cases = [{"run": run, "policy": "lru", "cache_ratio": 0.5, "batch_size": run + 1} for run in range(3)]
    >>> failure_lines([case | {"error": f"needs {case['run']} GB"} for case in cases])
    ['3 runs of lru, the first run 0 (cache 0.5, batch 1): needs 0 GB']
    """
    lines = []
    for alike in _alike(rows):
        first = alike[0]
        many = f"{len(alike)} runs of {first['policy']}, the first run {first['run']} ({_asked(first)})"
        lines.append(f"{many if len(alike) > 1 else describe_run(first)}: {first['error']}")
    return lines


def failure_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the same for the foot of a table, without remedies."""
    notes = []
    for alike in _alike(rows):
        first = alike[0]
        many = f", {len(alike)} runs, the first {_asked(first)}" if len(alike) > 1 else ""
        notes.append(f"failed: {first['policy']}{many}: {str(first['error']).split('; ')[0]}")
    return notes


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("error"):
            found.setdefault((str(row["policy"]), _NUMBER.sub("#", str(row["error"]))), []).append(row)
    return list(found.values())


def _asked(row: Mapping[str, Any]) -> str:
    load = next((f"{COLUMNS[key].word} {row[key]}" for key in ("closed", "rate", "arrivals") if row.get(key) is not None), None)
    return f"cache {cache_asked(row)}, {load or 'batch ' + str(row.get('batch_size'))}"


CI: Final = "ci95."
"""Beginning of the name of a column that holds half the width of an interval."""
_SEEDED = ("seed", "trace")  # what differs between repeats; of a trace only if it is made up
_DRAWN = ("trace", "requests_drawn")  # two repeats with the same ones are no two draws
_APART = ("run", "repeat", "key", "group", "workload_digest", "requests_drawn", *_SEEDED)


def count_repeats(rows: Sequence[Row]) -> int:
    """Count the repeats of a run."""
    return 1 + max((int(row.get("repeat") or 0) for row in rows), default=0)


def repeated(rows: Sequence[Row]) -> bool:
    """Whether there are repeats among rows."""
    return any(row.get("repeat") for row in rows)


def aggregate(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Put the repeats of each run together, in the order of the first ones."""
    # Settings and labels are the first one's; "repeats" counts successes. Each metric has its mean and,
    # as `CI` + name, half the 95 % interval by Student's t. Repeats with the same requests of a trace
    # are one draw; fewer than two have no interval. If any repeat failed, "error" has how many.
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_identity(row), []).append(row)
    return [_together(group) for group in groups.values()]


def _identity(row: Row) -> str:
    if row.get("group"):
        return str(row["group"])
    names = [name for name in (*SETTINGS, *CACHE_SETTINGS) if name not in _SEEDED]
    trace = str(row.get("trace"))
    made_up = trace.rpartition("-seed")[0] if trace.startswith("synthetic-") else trace
    return json.dumps([row["policy"], made_up, *(row.get(name) for name in names)])


def _together(group: Sequence[Row]) -> dict[str, Any]:
    done = [row for row in group if not row.get("error")]
    first = (done or group)[0]
    n_failed = len(group) - len(done)
    whole: dict[str, Any] = {"repeats": len(done)}
    draws: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(done):
        draws.setdefault(tuple(row.get(name) for name in _DRAWN), []).append(i)
    n_draws = len(draws)
    settings = {*SETTINGS, *CACHE_SETTINGS, *_APART}
    for name in dict.fromkeys(name for row in done or group for name in row):
        values = {value for row in done if (value := row.get(name)) is not None}
        if name in settings or name.startswith("policy") or not values or not all(_is_number(value) for value in values):
            whole[name] = first.get(name)
        else:  # a metric may have no meaning in some of the repeats
            found = [[value for i in draw if (value := done[i].get(name)) is not None] for draw in draws.values()]
            means = [fmean(values) for values in found if values]
            whole[name], whole[CI + name] = fmean(means), half_width(means)
    if 0 < n_draws < len(done):
        sets = "the same requests" if n_draws == 1 else f"{n_draws} different sets of requests"
        whole["notes"] = ", ".join(part for part in (str(whole.get("notes") or ""), f"{len(done)} seeds drew {sets}") if part)
    whole["error"] = f"{n_failed} of {len(group)} repeats failed" if n_failed else None
    return whole


LIFTS: Final = "lifts"
"""Where a row has the rows of all assumed lifts, in rising order."""
_LIFT: Final = re.compile(r"-lift(\d+(?:\.\d+)?)")


def over_lifts(rows: Sequence[Row]) -> list[Row]:
    """Put the runs over assumed lifts of the routing together: the middle one, with the speeds at all."""
    groups: dict[str, list[tuple[float, Row]]] = {}
    for number, row in enumerate(rows):
        trace = str(row.get("trace"))
        found = _LIFT.search(trace)
        names = [row.get(name) for name in (*SETTINGS, *CACHE_SETTINGS, "repeat") if name != "trace"]
        key = json.dumps([row["policy"], _LIFT.sub("", trace), names]) if found else str(number)
        groups.setdefault(key, []).append((float(found[1]) if found else 0.0, row))
    return [_over_lifts(sorted(group, key=lambda one: one[0])) for group in groups.values()]


def _over_lifts(group: Sequence[tuple[float, Row]]) -> Row:
    middle = group[len(group) // 2][1]
    return middle if len(group) < 2 else {**middle, LIFTS: tuple(row for _, row in group)}


def at_lifts(row: Row, key: str, scale: float = 1.0) -> list[float | None]:
    """Return a number at all assumed lifts; of a row that has none, its own."""
    return [number(one, key, scale) for one in row.get(LIFTS) or (row,)]


def range_of_lifts(row: Row, key: str = "decode_tokens_per_s", scale: float = 1.0) -> str:
    """Write the least and the largest value over the assumed lifts."""
    values = [value for value in at_lifts(row, key, scale) if value is not None]
    low, high = (f"{end:.3g}" for end in (min(values), max(values))) if values else ("-", "-")
    return low if low == high else f"{low} to {high}"


def order_changes(one: Row, other: Row, key: str = "decode_tokens_per_s") -> bool:
    """Whether two rows swap places between assumed lifts; a run that is missing has no place."""
    mine, theirs = ({str(run.get("trace")): number(run, key) for run in row.get(LIFTS) or (row,)} for row in (one, other))
    pairs = [(a, b) for lift, a in mine.items() if a is not None and (b := theirs.get(lift)) is not None]
    return len({(a > b) - (a < b) for a, b in pairs}) > 1


def uncertain_orders(rows: Sequence[Row], key: str = "decode_tokens_per_s") -> list[str]:
    """Name policies of one setting whose order changes with the assumed lift."""
    found: dict[str, list[str]] = {}
    for group in _comparable(rows):
        swept = [rows[i] for i in group if rows[i].get(LIFTS)]
        for one, other in combinations(swept, 2):
            if order_changes(one, other, key):
                found.setdefault(f"{one['policy']} and {other['policy']}", []).append(f"cache {cache_asked(one)}")
    if not found:
        return []
    words = [f"{pair} ({', '.join(dict.fromkeys(where))})" for pair, where in found.items()]
    return [f"order not certain over the assumed lifts: {'; '.join(words)}"]


def _merit(row: Row) -> str:
    """Name the number by which runs of one setting are ranked: goodput of a served workload, else the speed of decoding."""
    return "goodput_per_s" if row.get("n_requests_arrived") else "decode_tokens_per_s"


def _comparable(rows: Sequence[Row]) -> list[list[int]]:
    """Group the rows of one setting that have a speed; oracles are no candidates."""
    names = (*_SETTINGS, *CACHE_SETTINGS, *WORKLOAD)
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if number(row, _merit(row)) is not None and row.get("source_label") != "oracle":
            groups.setdefault(str([row.get(name) for name in names]), []).append(i)
    return list(groups.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of a mean, by Student's t.

    >>> round(half_width([1.0, 2.0, 3.0]), 3)
    2.484
    """
    n = len(values)
    return None if n < 2 else student_t(0.95, n) * stdev(values) / sqrt(n)


def _time(row: Row, key: str) -> str:
    ns = number(row, key)
    if ns is None:
        return "-"
    unit, size = ("s", NS_PER_S) if ns >= NS_PER_S else ("ms", NS_PER_MS)
    return f"{ns / size:.3g}{_interval(row, key, 1 / size)} {unit}"


def _interval(row: Row, key: str, scale: float = 1.0) -> str:
    """Write half the width of a mean's interval over repeats, if there is one."""
    half = number(row, CI + key)
    return "" if half is None else f" ±{half * scale:.2g}"


def _percent(row: Row, key: str) -> str:
    share = number(row, key)
    return "-" if share is None else f"{100 * share:.1f}{_interval(row, key, 100)}"


def fresh(row: Row) -> str:
    """Write the share of gate weight that was computed as routed, in percent."""
    share = fresh_share(row)
    return "-" if share is None else fresh_cell(share)


def _speed(row: Row, key: str = "decode_tokens_per_s") -> str:
    value = number(row, key)
    if value is None:
        return "-*" if is_lossy(row) else "-"
    mark = "*" if is_lossy(row) else ""
    return (f"{value:.2f}" if value < 100 else f"{value:.0f}") + _interval(row, key) + mark


_MARK: Final = "+"


def _grew(row: Row) -> str:
    return _MARK if GREW in str(row.get("notes")) else ""


def _per_s(row: Row, key: str) -> str:
    value = number(row, key)
    return "-" if value is None else f"{value:.3g}{_interval(row, key)}"


def _over_intervals(row: Row) -> str:
    ends = [number(row, name) for name in (LEAST, MOST)]
    return "-" if None in ends else " to ".join(f"{end:.3g}" for end in ends)


def _slots(row: Row) -> str:
    """Write the slots of the cache, and how many are used if not all are."""
    granted, used = number(row, "cache_slots"), number(row, "cache_slots_used")
    if granted is None:
        return "-"
    return f"{used:g} of {granted:g}" if used is not None and used != granted else f"{granted:g}"


def batch(row: Row) -> Value:
    """Return the requests at once."""
    return row.get("batch_size")


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    name: str
    text: Callable[[Row], str]
    right: bool = True  # numbers
    wide: bool = False  # only in the wide table
    spare: bool = False  # left out where the lines would be too long, from the left


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def waited(row: Row, phase: str | None = None) -> str:
    """Name what took most time of ``"decode"`` or ``"prompt"``; by default of decoding, if any."""
    decode = phase == "decode" or (phase is None and bool(number(row, "n_decode_tokens")))
    found = {cause: number(row, f"{'decode_' * decode}time_{cause}_ns") or 0 for cause in CAUSES}
    if phase == "prompt":
        found = {cause: ns - (number(row, f"decode_time_{cause}_ns") or 0) for cause, ns in found.items()}
    most = max(found, key=lambda cause: found[cause])
    return f"{LABEL[most]} {100 * found[most] / total:.0f}%" if (total := sum(found.values())) else "-"


_ENDLESS: Final = f"{_MARK} the queue grew: requests come faster than they are served, so times depend on the run's length"
_ANSWERED, _GOOD = "answer_tokens_per_s", "good/s"
SHOWN = (
    Column("policy", lambda row: str(row["policy"]), right=False),
    Column("cache", cache_asked),
    Column("slots", _slots, wide=True),
    Column("batch", lambda row: str(batch(row))),
    Column("tok/s", _speed),
    Column("over lifts", range_of_lifts),
    Column("over intervals", _over_intervals),
    Column("TTFT", lambda row: _time(row, "ttft_mean_ns"), spare=True),
    Column("TPOT", lambda row: _time(row, "tpot_mean_ns"), spare=True),
    Column("hit %", lambda row: _percent(row, "hit_rate"), spare=True),
    Column("resident %", lambda row: _percent(row, "resident_rate"), wide=True),
    Column("waited for", waited, right=False),
    Column("MB/token demand", lambda row: _whole(moved_mb(row, "demand")), wide=True),
    Column("prefetched", lambda row: _whole(moved_mb(row, "prefetch_used")), wide=True),
    Column("wasted", lambda row: _whole(moved_mb(row, "prefetch_wasted")), wide=True),
    Column("other", lambda row: _whole(moved_mb(row, "update", "write_back", "message")), wide=True),
    Column("busy % GPU", lambda row: _whole(busy_percent(row, "gpu")), wide=True),
    Column("CPU", lambda row: _whole(busy_percent(row, "cpu")), wide=True),
    Column("link", lambda row: _whole(number(row, "pcie_share", 100)), wide=True),
    Column("fresh %", fresh, wide=True),
    Column("source", lambda row: str(row.get("source_label") or "-"), right=False),
)


SERVED = (  # a total and the time that requests wait for it stand together
    *SHOWN[:3],
    Column("TTFT p50", lambda row: _time(row, "ttft_p50_ns") + _grew(row)),
    Column("p99", lambda row: _time(row, "ttft_p99_ns") + _grew(row)),
    Column("TPOT p50", lambda row: _time(row, "tpot_p50_ns")),
    Column("tok/s", lambda row: _speed(row, _ANSWERED)),
    Column("req/s", lambda row: _per_s(row, "requests_per_s"), spare=True),
    Column(_GOOD, lambda row: _per_s(row, "goodput_per_s")),
    Column("queue", lambda row: _per_s(row, "queue_mean"), wide=True),
    Column("in slots %", lambda row: _percent(row, "slots_used"), wide=True),
    Column("waited for", lambda row: waited(row, "all"), right=False, spare=True),
    *(
        column
        for column in SHOWN
        if column.name == "resident %" or column.name.startswith(("MB", "busy", "CPU", "link", "fresh"))
    ),
    SHOWN[-1],
)
"""Columns of a table whose runs all have served workloads."""


def served(rows: Sequence[Row]) -> bool:
    """Whether all runs that succeeded have a served workload."""
    done = [row for row in rows if not row.get("error")]
    return bool(done) and all(row.get("n_requests_arrived") for row in done)


_OF_COSTS = (NO_CURVE, NOT_VARIED)
"""How notes begin that are long, and stand once below a table."""


def split_notes(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Divide the notes of a result."""
    notes = [note for note in str(row.get("notes") or "").split(", ") if note]
    return [n for n in notes if not n.startswith(_OF_COSTS)], [n for n in notes if n.startswith(_OF_COSTS)]


def cost_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the notes about costs of all rows, each once."""
    return notes_of(note for row in rows for note in split_notes(row)[1])


def _common_notes(done: Sequence[Row]) -> list[str]:
    notes = [split_notes(row)[0] for row in done]
    return [note for note in notes[0] if all(note in one for one in notes)] if notes else []


def _other_notes(done: Sequence[Row], common: Sequence[str]) -> list[str]:
    notes = [split_notes(row)[0] for row in done]
    found = dict.fromkeys(note for one in notes for note in one if note not in common)
    return [f"{note}: {_whose([row for row, one in zip(done, notes, strict=True) if note in one], done)}" for note in found]


_TOLD_BY: Mapping[str, Callable[[Row], Any]] = {"": lambda row: row["policy"], "batch ": batch, "cache ": cache_asked}


def _whose(rows: Sequence[Row], done: Sequence[Row]) -> str:
    """Name the policies or the setting that distinguish some runs from all others."""
    ours = {id(row) for row in rows}
    others = [row for row in done if id(row) not in ours]
    for word, value in _TOLD_BY.items():
        values = dict.fromkeys(str(value(row)) for row in rows)
        if not any(str(value(row)) in values for row in others):
            return word + ", ".join(values)
    policies = {str(row["policy"]): None for row in rows}
    return "some runs" + (f" of {', '.join(policies)}" if any(row["policy"] not in policies for row in done) else "")


def _freshness(rows: Sequence[Row]) -> str:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(str(row["policy"]), []).append(fresh(row).rstrip("*"))
    ends = {policy: dict.fromkeys((min(shares, key=float), max(shares, key=float))) for policy, shares in found.items()}
    ranges = ", ".join(f"{' to '.join(shares)} % ({policy})" for policy, shares in ends.items())
    return f"of the gate weight, computed as routed: {ranges}"


_NO_RESULTS = {
    *COLUMNS, "run", "repeat", "policy", "policy_name", "policy_options", "key", "group", "notes", "engine", "source_label",
    "cost_label", "energy_label", "own_transfer", "prefetches",
}  # fmt: skip
"""Columns of a row that do not come of its records."""
_MOST_SAME = 5  # lines


def _settings_of(row: Row) -> dict[str, str]:
    """Return what a run was asked for, by name: settings, the policy and its options."""
    options = json.loads(str(row.get("policy_options") or "{}"))
    asked = {column: row.get(column) for column in COLUMNS} | {f"option {name}": value for name, value in options.items()}
    written = {name: json.dumps(value) for name, value in asked.items()}
    return {"policy": str(row.get("policy_name", row["policy"])), **written}


def same_results(done: Sequence[Row]) -> list[str]:
    """Name runs that differ in one setting, option or policy but not in any result."""
    asked = [_settings_of(row) for row in done]
    results = [frozenset((name, str(value)) for name, value in row.items() if value and name not in _NO_RESULTS) for row in done]
    lines = []
    for name in dict.fromkeys(name for one in asked for name in one):
        groups: dict[Any, dict[Any, dict[str, str | None]]] = {}  # all else -> results -> runs, with the value
        word = COLUMNS[name].word if name in COLUMNS else name.removeprefix("option ")
        for row, one, result in zip(done, asked, results, strict=True):
            own = ("policy", "option ") if name == "policy" else name  # a policy's options are its own
            rest = frozenset(pair for pair in one.items() if not pair[0].startswith(own))
            run = f"{row['policy']} with {word} {one[name]}" if name in COLUMNS else str(row["policy"])
            groups.setdefault(rest, {}).setdefault(result, {})[run] = one.get(name)
        alike = [tuple(runs) for group in groups.values() for runs in group.values() if len(set(runs.values())) > 1]
        for runs, n in Counter(alike).items():
            of = sum(set(runs) <= {run for some in group.values() for run in some} for group in groups.values())
            where = f" in {n} of {of} settings" if n < of else ""
            lines.append(f"{word} changed nothing here: {', '.join(runs)} have the same results{where}")
    more = len(lines) - _MOST_SAME
    return [*lines[:_MOST_SAME], *([f"{more} more settings changed nothing"] if more > 0 else [])]


def footer(rows: Sequence[Row], done: Sequence[Row], seeds: str) -> list[str]:
    """Write the lines below a table, the most important first."""
    said = {"model": "model", "hardware": "on", "trace": "routing"}
    lengths = {"prompt_tokens": "prompt"} | (
        {name: COLUMNS[name].word for name in ("arrivals", "closed", *ASKED_OF_SERVED)}
        if served(rows)
        else {"decode_tokens": "decode"}
    )
    said |= {name: word for name, word in lengths.items() if any(row.get(name) is not None for row in rows)}
    values: dict[str, list[Any]] = {word: [row.get(key) for row in rows] for key, word in said.items()}
    values |= {"cache": [cache_asked(row) for row in rows]}
    values |= {} if served(rows) else {"batch": [batch(row) for row in rows]}
    shared = [f"{word} {_bare(found[0])}" for word, found in values.items() if len(set(found)) == 1]
    sources = {row.get("source_label") for row in done}
    labels = [f"weakest source of its numbers: {source}" for source in sources if source and len(sources) == 1]
    if common := _common_notes(done):
        labels.append(f"notes: {', '.join(common)}")
    live = bool(done) and all(LIVE in str(row["notes"]) for row in done)
    lines = [", ".join(shared), "; ".join(["replayed on this machine" if live else "simulated", *labels])]
    lines += [seeds] if seeds else []
    lines += failure_notes(rows)
    if inexact := [row for row in done if is_lossy(row)]:
        lines.append(f"* not exact: {_freshness(inexact)}; routing is replayed as recorded, whatever the policy computed")
    lines += [_ENDLESS] if any(map(_grew, done)) else []
    lines += uncertain_orders(done)
    idle = [(why, row) for row in done if row.get("prefetches") and row.get("n_prefetches") == 0 for why in _never(row)]
    for why in dict.fromkeys(why for why, _ in idle):
        lines.append(f"nothing was prefetched, as {why}: {_whose([row for one, row in idle if one == why], done)}")
    lines += same_results(done)
    lines += [note for note in _other_notes(done, common) if not note.startswith(GREW)]
    return lines + cost_notes(done)


def _never(row: Row) -> Iterator[str]:
    """Yield why a policy that prefetches did not, if the records of its run prove it."""
    if row.get("resident_rate") == 1:
        yield "all experts were in the cache already"
    elif (row.get("pcie_share") or 0) >= _BUSY:
        yield "the link was busy all the time"


_BUSY: Final = 0.99  # share of the time


def _bare(value: Any) -> str:
    return re.sub(r'[{}"]', "", str(value))  # of limits, which are a mapping


_ORDER = ("model", "hardware", "trace", *WORKLOAD[1:], *sorted(HOW, key=lambda name: COLUMNS[name].missing is str))  # texts last
_SETTINGS = {name: COLUMNS[name].head or COLUMNS[name].word for name in _ORDER}
"""Settings that get a column where they differ between runs."""


class By(StrEnum):
    """Columns by which a table may be sorted."""

    SPEED = "tok/s"
    TTFT = "TTFT"
    TPOT = "TPOT"
    HITS = "hit"


_BY = {
    By.SPEED: ("decode_tokens_per_s", -1), By.TTFT: ("ttft_mean_ns", 1), By.TPOT: ("tpot_mean_ns", 1), By.HITS: ("hit_rate", -1),
}  # fmt: skip
"""A column of the rows, and 1 if less is better."""
LINE = 80  # characters; what is no terminal gets lines for one
_NAME = 24  # characters that names of policies may take, whatever that leaves for other columns
_BAR = 6  # characters
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class _Shown(NamedTuple):
    names: list[str]
    cells: list[list[str]]
    right: list[str]  # columns of numbers
    best: list[int]  # rows that are the fastest at their setting
    below: list[str]  # lines that hold for all rows


_NOTES: Final = 5  # lines below a table
_ASSUMED_ONLY: Final = "some costs are intervals, of which one value was used: {where} them"
_LEFT_OUT: Final = "left out for want of room"


def in_short(lines: Sequence[str], where: str = "--notes lists") -> list[str]:
    """Replace the list of costs that are intervals by one line, which says where it is."""
    return [_ASSUMED_ONLY.format(where=where) if line.startswith(NOT_VARIED) else line for line in lines]


def result_table(
    rows: Sequence[Row], form: Format, *, wide: bool = False, by: By | None = None, notes: bool = True
) -> str:  # fmt: skip
    """Write the results; unless `wide`, columns are left out until lines fit the terminal; without `notes` few lines follow."""
    if form.for_programs:
        return render_records(_sorted(rows, by), form)
    terminal = sys.stdout.isatty()
    width = None if wide or form is Format.MD else get_terminal_size().columns if terminal else LINE
    shown = _shown(rows, by, wide=wide, width=width, bar=terminal and form is Format.TABLE)
    separator = "\n\n" if form is Format.MD else "\n"
    if not notes:
        shown.below[:] = in_short(shown.below)
    if not notes and (n_more := len(shown.below) - _NOTES + 1) > 1:
        dropped = [line for line in shown.below if line.startswith(_LEFT_OUT)]  # a table that lacks columns says so
        shown.below[_NOTES - 1 - len(dropped) :] = [f"{n_more} more notes: --notes shows them", *dropped]
    below = (
        [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in shown.below]
        if terminal and width
        else shown.below
    )
    table = render(shown.names, shown.cells, form, shown.right, bold=shown.best, whole=wide)
    return table + "\n" + separator.join(below) + "\n"


def result_html(rows: Sequence[Row]) -> str:
    """Write the results of an experiment as a piece of HTML, for notebooks."""
    shown = _shown(rows, None, wide=False, width=None, bar=False)
    head = "".join(f"<th>{escape(name)}</th>" for name in shown.names)
    right = [' style="text-align: right"' if name in shown.right else ' style="text-align: left"' for name in shown.names]
    body = ""
    for i, cells in enumerate(shown.cells):
        b, e = ("<b>", "</b>") if i in shown.best else ("", "")
        body += "<tr>" + "".join(f"<td{how}>{b}{escape(one)}{e}</td>" for how, one in zip(right, cells, strict=True)) + "</tr>"
    below = "<br>".join(escape(line) for line in shown.below)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{below}</p>"


def _sorted(rows: Sequence[Row], by: By | None) -> Sequence[Row]:
    if by is None:
        return rows
    key, sign = (_ANSWERED, -1) if by is By.SPEED and served(rows) else _BY[by]
    values = [number(row, key) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (values[i] is None, sign * (values[i] or 0)))
    return [rows[i] for i in order]


def _shown(rows: Sequence[Row], by: By | None, *, wide: bool, width: int | None, bar: bool) -> _Shown:
    n_repeats = count_repeats(rows)
    rows = _sorted(over_lifts(aggregate(rows) if n_repeats > 1 else rows), by)
    done = [row for row in rows if not row.get("error")]
    settings = {key: name for key, name in _SETTINGS.items() if len({str(row.get(key)) for row in rows}) > 1}
    columns = [Column(name, _of_setting(key), right=False) for key, name in settings.items()]
    limited = any(number(row, "goodput_per_s") is not None for row in rows)
    known = [one for one in SERVED if one.name != _GOOD or limited] if served(rows) else SHOWN
    ranges = {"over lifts": LIFTS, "over intervals": LEAST}
    shown = [one for one in known if one.name not in ranges or any(row.get(ranges[one.name]) for row in rows)]
    columns += [one for one in shown if wide or (not one.wide and _tells(one, rows, done))]
    cells = {one.name: [one.text(row) if _has(one, row) else _instead(one) for row in rows] for one in columns}
    if bar and len(done) > 1 and known is SHOWN:
        place = [one.name for one in columns].index("tok/s") + 1
        columns.insert(place, Column(" ", str, right=False, spare=True))
        cells[" "] = _bars(rows)
    names = [one.name for one in columns]
    if width is not None:
        others = sum(_width(name, cells[name]) + 2 for name in names if name != "policy")
        cells["policy"] = [broken_name(policy, max(_NAME, width - others)) for policy in cells["policy"]]
    spare = [one.name for one in columns if one.spare]
    left_out = []
    while width is not None and spare and sum(_width(name, cells[name]) + 2 for name in names) - 2 > width:
        name = spare.pop(0)
        names.remove(name)
        left_out += [name] if name.strip() else []
    below = footer(rows, done, f"mean of {n_repeats} seeds ± half the 95 % interval (Student's t)" if n_repeats > 1 else "")
    if left_out:
        below.append(f"{_LEFT_OUT}: {', '.join(left_out)}; --wide shows all")
    right = [one.name for one in columns if one.right]
    lines = [[part.split("\n") for part in row] for row in zip(*(cells[name] for name in names), strict=True)]
    fastest = _best(rows)
    whole = [(list(line), i in fastest) for i, parts in enumerate(lines) for line in zip_longest(*parts, fillvalue="")]
    return _Shown(names, [line for line, _ in whole], right, [i for i, (_, best) in enumerate(whole) if best], below)


def broken_name(policy: str, room: int) -> str:
    """Break a policy's name between its options if it is longer than its column has room for.

    >>> print(broken_name("dali(u_size=2,w_size=1)", 14))
    dali(u_size=2,
      w_size=1)
    """
    lines = [""]
    for part in re.findall(r"[^,(]+[,(]?", policy) if len(policy) > room else [policy]:
        if lines[-1].strip() and len(lines[-1]) + len(part) > room:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def _of_setting(key: str) -> Callable[[Row], str]:
    return lambda row: _setting(row.get(key))


_ASKED = ("policy", "cache", "batch")  # what a run that failed has, too
_SAID_ONCE: dict[str, Callable[[Row], Any]] = {
    "cache": cache_asked,
    "batch": batch,
    "source": lambda row: row.get("source_label"),
}
"""Columns that stand once below the table where all rows have the same."""


def _tells(column: Column, rows: Sequence[Row], done: Sequence[Row]) -> bool:
    if column.name not in _SAID_ONCE:
        return True
    asked = _SAID_ONCE[column.name]
    return len({str(asked(row)) for row in (done if column.name == "source" else rows)}) > 1


def _has(column: Column, row: Row) -> bool:
    return not row.get("error") or column.name not in {one.name for one in (*SHOWN, *SERVED)} or column.name in _ASKED


def _instead(column: Column) -> str:
    return "failed" if column.name == "tok/s" else ""


def _width(name: str, cells: Sequence[str]) -> int:
    return max(len(line) for text in (name, *cells) for line in text.split("\n"))


def _bars(rows: Sequence[Row]) -> list[str]:
    speeds = [number(row, "decode_tokens_per_s") or 0.0 for row in rows]
    eighths = [round(8 * _BAR * speed / (max(speeds) or 1)) for speed in speeds]
    return [_EIGHTHS[-1] * (n // 8) + _EIGHTHS[n % 8].strip() for n in eighths]


def _best(rows: Sequence[Row]) -> list[int]:
    """Find the fastest row of each setting with several policies, if it is the fastest at all assumed lifts."""
    return [best for group in _comparable(rows) if len(group) > 1 and (best := _fastest(rows, group)) is not None]


def _fastest(rows: Sequence[Row], group: Sequence[int]) -> int | None:
    """Return which row is the fastest at every lift; None if none is alone."""
    speeds: dict[str, list[tuple[float, int]]] = {}
    for i in group:
        for run in rows[i].get(LIFTS) or (rows[i],):
            speeds.setdefault(str(run.get("trace")), []).append((number(run, _merit(run)) or 0.0, i))
    found = {i for one in speeds.values() for speed, i in one if speed == max(one)[0]}
    return found.pop() if len(found) == 1 else None


def _setting(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str) and value.startswith("{"):  # a mapping
        return _bare(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
