"""Runs that failed, in figures of bars: what stands where their bar would, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd

from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS

_RUN: Final = ("policy", *SETTINGS, *CACHE_SETTINGS, "repeat")
_NUMBER: Final = re.compile(r"\d[\d.,]*")
_MOST: Final = 4
"""Reasons that are told in words."""


def failing(frame: pd.DataFrame) -> pd.Series:
    """Tell which rows are of runs that failed."""
    return frame["error"].notna() if "error" in frame else pd.Series(False, frame.index, dtype=bool)


def without_retried(frame: pd.DataFrame) -> pd.DataFrame:
    """Leave out failed runs that another row repeats, such as one of a second folder that succeeded."""
    columns = [name for name in _RUN if name in frame]
    texts = frame[columns].astype(object).map(str)
    order = failing(frame).sort_values(kind="stable").index  # those that succeeded first
    again = texts.loc[order].duplicated().reindex(frame.index)
    return frame[~(again & failing(frame))]


def with_failed(data: pd.DataFrame, lost: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Add runs that failed to means of rows.

    ``failed`` is the number of failed runs of a bar; a bar of which all runs failed has no other numbers.
    """
    if lost.empty:
        return data
    records: list[dict[Any, Any]] = data.to_dict("records")
    known = {tuple(str(row[name]) for name in by): row for row in records}
    for key, part in lost.groupby(list(by), sort=False, dropna=False):
        row = known.get(tuple(str(value) for value in key))
        if row is None:
            row = {**dict(zip(by, key, strict=True)), "n": 0}
            records.append(row)
        kinds = {_kind(why): why for why in reversed([_why(error) for error in part["error"]])}  # the first of each
        row |= {"failed": len(part), "why": " / ".join(reversed(kinds.values()))}
    told = pd.DataFrame(records, columns=[*data.columns, "failed", "why"])
    return told.assign(failed=told["failed"].fillna(0).astype(int))


def _why(error: object) -> str:
    return str(error).split("; ")[0]  # the rest is the remedy


def codes_of(data: pd.DataFrame) -> dict[str, str]:
    """Give each reason its mark: nothing if there is one, else a number; reasons that differ in numbers alone share one."""
    if "why" not in data:
        return {}
    kinds = list(dict.fromkeys(_kind(why) for why in data["why"].dropna()))
    return {why: f" ({1 + kinds.index(_kind(why))})" if len(kinds) > 1 else "" for why in data["why"].dropna()}


def _kind(why: str) -> str:
    return _NUMBER.sub("#", why)


def reasons(data: pd.DataFrame) -> list[str]:
    """Write why runs failed, a line for each mark.

    >>> reasons(pd.DataFrame({"why": ["2 of 3 fit", None, "1 of 3 fit"], "failed": [1, 0, 5]}))
    ['failed, 6 runs, such as: 2 of 3 fit']
    """
    codes = codes_of(data)
    found: dict[str, list[str]] = {}
    for why, code in codes.items():
        found.setdefault(code, []).append(why)
    lines = []
    for code, whys in found.items():
        n = int(data.loc[data["why"].isin(whys), "failed"].sum())
        lines.append(f"failed{code}, {f'{n} runs, such as' if n > 1 else '1 run'}: {whys[0]}")
    more = len(lines) - _MOST
    return lines if more <= 0 else [*lines[:_MOST], f"{more} more reasons: see the column `why` of the data"]


def not_shown(frame: pd.DataFrame) -> list[str]:
    """Say which runs failed and why, for figures that have no place for them; nothing if none did."""
    frame = without_retried(frame.reset_index(drop=True))
    data = with_failed(pd.DataFrame(columns=["policy", "n"]), frame[failing(frame)], ["policy"])
    if data.empty:
        return []
    counts = [f"{row['policy']} ({row['failed']} run{'s' if row['failed'] > 1 else ''})" for _, row in data.iterrows()]
    return [f"not shown: {', '.join(counts)}", *reasons(data)]


def not_shown_sentences(frame: pd.DataFrame) -> str:
    """Say the same as `not_shown` in a caption."""
    return " ".join(f"{line[0].upper()}{line[1:]}." for line in not_shown(frame))


def mark(row: pd.Series | Mapping[str, Any], codes: Mapping[str, str]) -> str:
    """Write what stands at a bar of which runs failed: that it did, or how many of its repeats did; else nothing.

    >>> mark({"why": "x", "failed": 1, "n": 0}, {"x": " (2)"}), mark({"why": "x", "failed": 1, "n": 4}, {"x": ""})
    ('failed (2)', '1 failed')
    """
    why = row.get("why")
    if not isinstance(why, str):
        return ""
    return f"{row['failed']} failed{codes[why]}" if row["n"] else f"failed{codes[why]}"
