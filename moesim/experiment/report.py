"""What the terminal shows of an experiment: one line a run, with the label that says what the numbers rest on."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from enum import StrEnum
from html import escape
from itertools import zip_longest
from shutil import get_terminal_size
from typing import Any, NamedTuple

from moesim.core.table import Format, render, render_records
from moesim.experiment.repeats import aggregate, count_repeats
from moesim.experiment.report_columns import SHOWN, Column, batch
from moesim.experiment.report_notes import footer
from moesim.experiment.row_values import Row, number
from moesim.metrics.naming import CACHE_SETTINGS, COLUMNS, HOW, WORKLOAD, cache_asked

_ORDER = ("model", "hardware", "trace", *WORKLOAD[1:], *sorted(HOW, key=lambda name: COLUMNS[name].missing is str))  # texts last
_SETTINGS = {name: COLUMNS[name].head or COLUMNS[name].word for name in _ORDER}
"""Settings that get a column where they differ between runs."""


class By(StrEnum):
    """What a table may be sorted by."""

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
    """A table of results in texts."""

    names: list[str]
    cells: list[list[str]]
    right: list[str]  # columns of numbers
    best: list[int]  # rows that are the fastest at their setting
    below: list[str]  # lines that hold for all rows


def result_table(rows: Sequence[Row], form: Format, *, wide: bool = False, by: By | None = None) -> str:
    """Write the results of an experiment; a table that is not wide leaves columns out until its lines fit the terminal."""
    if form.for_programs:
        return render_records(_sorted(rows, by), form)
    terminal = sys.stdout.isatty()
    width = None if wide or form is Format.MD else get_terminal_size().columns if terminal else LINE
    shown = _shown(rows, by, wide=wide, width=width, bar=terminal and form is Format.TABLE)
    separator = "\n\n" if form is Format.MD else "\n"
    below = (
        [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in shown.below]
        if terminal and width
        else shown.below
    )
    return render(shown.names, shown.cells, form, shown.right, bold=shown.best) + "\n" + separator.join(below) + "\n"


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
    """Sort rows, failed ones last."""
    if by is None:
        return rows
    key, sign = _BY[by]
    values = [number(row, key) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (values[i] is None, sign * (values[i] or 0)))
    return [rows[i] for i in order]


def _shown(rows: Sequence[Row], by: By | None, *, wide: bool, width: int | None, bar: bool) -> _Shown:
    n_repeats = count_repeats(rows)
    rows = _sorted(aggregate(rows) if n_repeats > 1 else rows, by)
    done = [row for row in rows if not row.get("error")]
    settings = {key: name for key, name in _SETTINGS.items() if len({str(row.get(key)) for row in rows}) > 1}
    columns = [Column(name, _of_setting(key), right=False) for key, name in settings.items()]
    columns += [one for one in SHOWN if wide or (not one.wide and _tells(one, rows, done))]
    cells = {one.name: [one.text(row) if _has(one, row) else _instead(one) for row in rows] for one in columns}
    if bar and len(done) > 1:
        place = [one.name for one in columns].index("tok/s") + 1
        columns.insert(place, Column(" ", str, right=False, spare=1))
        cells[" "] = _bars(rows)
    names = [one.name for one in columns]
    if width is not None:
        others = sum(_width(name, cells[name]) + 2 for name in names if name != "policy")
        cells["policy"] = [broken_name(policy, max(_NAME, width - others)) for policy in cells["policy"]]
    spare = sorted((one for one in columns if one.spare), key=lambda one: one.spare)
    left_out = []
    while width is not None and spare and sum(_width(name, cells[name]) + 2 for name in names) - 2 > width:
        name = spare.pop(0).name
        names.remove(name)
        left_out += [name] if name.strip() else []
    below = footer(rows, done, f"mean of {n_repeats} seeds ± half the 95 % interval (Student's t)" if n_repeats > 1 else "")
    if left_out:
        below.append(f"left out for want of room: {', '.join(left_out)}; --wide shows all")
    right = [one.name for one in columns if one.right]
    lines = [[part.split("\n") for part in row] for row in zip(*(cells[name] for name in names), strict=True)]
    fastest = _best(rows)
    whole = [(list(line), i in fastest) for i, parts in enumerate(lines) for line in zip_longest(*parts, fillvalue="")]
    return _Shown(names, [line for line, _ in whole], right, [i for i, (_, best) in enumerate(whole) if best], below)


def broken_name(policy: str, room: int) -> str:
    """Break the name of a policy into lines between its options, if it is longer than its column has room for.

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
    "label": lambda row: row.get("source_label"),
}
"""Columns that stand once below the table where all rows have the same."""


def _tells(column: Column, rows: Sequence[Row], done: Sequence[Row]) -> bool:
    """Whether a column tells rows apart."""
    if column.name not in _SAID_ONCE:
        return True
    asked = _SAID_ONCE[column.name]
    return len({str(asked(row)) for row in (done if column.name == "label" else rows)}) > 1


def _has(column: Column, row: Row) -> bool:
    return not row.get("error") or column.name not in {one.name for one in SHOWN} or column.name in _ASKED


def _instead(column: Column) -> str:
    return "failed" if column.name == "tok/s" else ""


def _width(name: str, cells: Sequence[str]) -> int:
    return max(len(line) for text in (name, *cells) for line in text.split("\n"))


def _bars(rows: Sequence[Row]) -> list[str]:
    """Draw speeds as bars, the fastest of all over the whole width."""
    speeds = [number(row, "decode_tokens_per_s") or 0.0 for row in rows]
    eighths = [round(8 * _BAR * speed / (max(speeds) or 1)) for speed in speeds]
    return [_EIGHTHS[-1] * (n // 8) + _EIGHTHS[n % 8].strip() for n in eighths]


def _best(rows: Sequence[Row]) -> list[int]:
    """Find the fastest row of each setting that has more than one policy; an oracle is a bound, and not among them."""
    names = (*_SETTINGS, *CACHE_SETTINGS, *WORKLOAD)
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if number(row, "decode_tokens_per_s") is not None and row.get("source_label") != "oracle":
            groups.setdefault(str([row.get(name) for name in names]), []).append(i)
    return [max(group, key=lambda i: number(rows[i], "decode_tokens_per_s") or 0) for group in groups.values() if len(group) > 1]


def _setting(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
