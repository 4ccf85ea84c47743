"""Provenance of a figure's numbers: a line below it on the screen, its caption on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure

from moesim.hardware import weakest
from moesim.metrics.fidelity import fresh_percent
from moesim.metrics.naming import COLUMNS, LIVE, notes_of
from moesim.plots.result_rows import (
    DRAW,
    MADE,
    REPEATS,
    cache_column,
    failing,
    group_name,
    inexact,
    levels,
    named,
    numberless,
    over_draws,
    policies_of,
    settings_in,
    varying,
    with_failed,
    without_retried,
)
from moesim.plots.style import NOT_EXACT, add_corner, capital, sentence

_WHERE: Final = ("model", "hardware", "trace")
_LOADS: Final = ("rate", "closed", "scheduler")
_BATCHES: Final = ("batch_size", "n_batches")
_ALWAYS: Final = (*_BATCHES, "prompt_tokens", "decode_tokens")
_USUAL: Final = {name: column.usual for name, column in COLUMNS.items() if column.usual}
"""Usual values of settings, which a caption leaves out."""
ORACLE: Final = "oracle"
"""Label of numbers that need knowledge of the future."""
_FEW: Final = 3
"""Cache sizes of a policy that are listed one by one."""


def corner_label(frame: pd.DataFrame, group: str | None = None) -> str:
    """Name model, hardware, trace, weakest source, and what all rows have alike, but for the column of the axis."""
    parts = []
    for column in _WHERE:
        if column in frame:
            parts.append(_listed(frame, column))
    if "routing" in frame:
        origins = sorted({str(v) for v in frame["routing"].dropna()} - {"recorded"})
        parts += [f"{' and '.join(origins)} routing"] if origins else []
    for column in (*(_LOADS if _served(frame) else _BATCHES[:1]), cache_column(frame)):
        if column != group and column in frame and frame[column].nunique() == 1:
            parts.append(named(frame[column].dropna().iloc[0], column))
    parts.append(weakest_source(frame, how(frame)))
    return " · ".join(part for part in parts if part)


def _served(frame: pd.DataFrame) -> bool:
    return "n_requests_arrived" in frame and bool(frame["n_requests_arrived"].notna().all())


def label_below(figure: Figure, rows: pd.DataFrame, shown: Sequence[str], *notes: str, axis: str | None = None) -> None:
    """Write notes under a figure."""
    add_corner(figure, corner_label(rows, axis), [*averaged(rows, shown), *notes, meaning(inexact(rows))])


def setting_label(frame: pd.DataFrame, missing: Sequence[str]) -> str:
    """Name the subject of a figure of one setting."""
    return corner_label(frame) + (f" · did not run here: {', '.join(missing)}" if missing else "")


def weakest_source(frame: pd.DataFrame, how: str) -> str:
    """Name the weakest source label, the oracles apart."""
    if "source_label" not in frame or frame["source_label"].isna().all():
        return ""
    oracle = frame["source_label"] == ORACLE
    labels = [str(v) for v in frame.loc[~oracle, "source_label"].dropna()]
    if not labels:
        return f"{how}, weakest source: {ORACLE}"
    known = policies_of(frame[~oracle & frame["source_label"].notna()])
    listed = [name if name not in known else f"{name} at some settings" for name in policies_of(frame[oracle])]
    return f"{how}, weakest source: {weakest(labels)}" + (f" · oracle: {', '.join(listed)}" if listed else "")


def how(frame: pd.DataFrame) -> str:
    """Return whether the numbers are simulated, replayed, or both."""
    live = frame["notes"].astype(str).str.contains(LIVE, regex=False) if "notes" in frame else pd.Series([False])
    return "replayed" if live.all() else "simulated and replayed" if live.any() else "simulated"


def averaged(frame: pd.DataFrame, shown: Sequence[str]) -> list[str]:
    """List what a figure averages over."""
    found = _swept(frame, shown)
    if n_repeats(frame):
        found.append(f"mean of {seeds_words(frame)}")
    return found


def _swept(frame: pd.DataFrame, shown: Sequence[str]) -> list[str]:
    found = []
    for column in varying(frame, shown):
        values = ", ".join(group_name(value, column) for value in levels(frame, column))
        found.append(f"mean over {named('', column).strip() or column} {values}")
    return found


def n_repeats(frame: pd.DataFrame) -> int:
    """Count the repeats of each setting; 0 if there is one only."""
    most = max((frame[column].nunique() for column in REPEATS if column in frame), default=0)
    return most if most > 1 else 0


def caption(what: str, frame: pd.DataFrame, shown: Sequence[str] = (), *sentences: str) -> str:
    """Write the caption of a figure of result rows."""
    parts = [what, *sentences, *_settings(frame, shown)]
    parts += map(sentence, _swept(frame, shown))
    return " ".join(part for part in [*parts, *_slots(frame), *_labels(frame), sentence(meaning(inexact(frame)))] if part)


def n_draws(frame: pd.DataFrame) -> tuple[int, int] | None:
    """Count the sets of requests that the repeats of a setting drew."""
    if DRAW not in frame:
        return None
    counts = []
    by = ["policy", *settings_in(frame)]
    runs = frame.drop_duplicates([*by, *(name for name in (*REPEATS, DRAW) if name in frame)])  # of steps
    for _, part in runs.groupby(by, sort=False, dropna=False):
        if len(part) > 1:
            counts.append((len(over_draws(part, [0.0] * len(part))), len(part)))
    if all(n == rows for n, rows in counts):
        return None
    return min(n for n, _ in counts), max(n for n, _ in counts)


def seeds_words(frame: pd.DataFrame) -> str:
    """Write the number of seeds, and of sets of requests if fewer."""
    words, drawn = f"{n_repeats(frame)} seeds", n_draws(frame)
    if drawn is None:
        return words
    if drawn == (1, 1):
        return f"{words} that drew the same requests"
    low, high = drawn
    return f"{words} that drew {high if low == high else f'{low} to {high}'} different sets of requests"


def repeats_sentence(frame: pd.DataFrame, what: str = "Means", how: str | None = "Student's t") -> str:
    """Explain the error bars, or why there are none."""
    if not n_repeats(frame):
        return ""
    drawn = n_draws(frame)
    text = f"{what} over {seeds_words(frame)}"
    if how is None:
        return f"{text}."
    if drawn == (1, 1):
        return f"{text}: no interval."
    where = "" if drawn is None else " over these" + (", where there is more than one" if drawn[0] == 1 else "")
    return f"{text}; error bars: 95 % interval of the mean ({how}){where}."


def _listed(frame: pd.DataFrame, column: str) -> str:
    names = [str(v) for v in levels(frame, column)]
    if column == "trace" and "repeat" in frame:
        names = [_with_seeds(name, frame.loc[frame["trace"] == name, "repeat"]) for name in names]
    return ", ".join(dict.fromkeys(names))


def _with_seeds(trace: str, repeats: pd.Series) -> str:
    made = MADE.fullmatch(trace)
    return trace if made is None or repeats.nunique() < 2 else f"{trace} to {int(made[2]) + int(repeats.max())}"


def _settings(frame: pd.DataFrame, shown: Sequence[str]) -> list[str]:
    listed = []
    words = {"model": "Model: {}", "hardware": "machine: {}", "trace": "routing: {}"}
    for column in _WHERE:
        if column in frame:
            text = words[column].format(_listed(frame, column))
            if column == "trace" and "routing" in frame:
                text += f" ({' and '.join(sorted({str(v) for v in frame['routing'].dropna()}))})"
            listed.append(text)
    for column in settings_in(frame):
        values = frame[column].dropna().unique()
        if column in _WHERE or column in shown or len(values) != 1 or (column in _BATCHES and _served(frame)):
            continue
        if column in _ALWAYS or column == cache_column(frame) or str(values[0]) != _USUAL.get(column, "None"):
            listed.append(named(values[0], column))
    return ["; ".join(listed) + "."] if listed else []


def _labels(frame: pd.DataFrame) -> list[str]:
    sentences = []
    if "source_label" in frame:
        by_label: dict[str, list[str]] = {}
        for policy in policies_of(frame):
            labels = [str(v) for v in frame.loc[frame["policy"] == policy, "source_label"].dropna()]
            if labels:
                by_label.setdefault(weakest(labels), []).append(policy)
        several = len(by_label) > 1
        parts = [label + (f" ({', '.join(names)})" if several else "") for label, names in by_label.items()]
        if parts:
            sentences.append(f"{capital(how(frame))}; weakest source among the numbers used: {', '.join(parts)}.")
    if "notes" in frame:
        notes = notes_of(map(str, frame["notes"].dropna()))
        kept = [note for note in notes if OVER not in note]  # bars are drawn of these
        if kept:
            sentences.append(f"Notes: {', '.join(kept)}.")
    return sentences


def _slots(frame: pd.DataFrame) -> list[str]:
    if "cache_slots" not in frame or "cache_slots_used" not in frame:
        return []
    listed = []
    for policy in policies_of(frame):
        rows = frame.loc[frame["policy"] == policy, ["cache_slots_used", "cache_slots"]].dropna().astype(float)
        rows = rows[rows["cache_slots_used"] != rows["cache_slots"]].drop_duplicates().sort_values("cache_slots")
        if len(rows) and not rows["cache_slots_used"].any():
            listed.append(f"{policy} none")
        elif len(rows) > _FEW:
            used, granted = (f"{rows[name].min():g} to {rows[name].max():g}" for name in rows)
            listed.append(f"{policy} {used} of {granted}")
        elif len(rows):
            listed.append(
                f"{policy} " + " and ".join(f"{used:g} of {granted:g}" for used, granted in rows.itertuples(index=False))
            )
    return [f"Cache slots used, where these are not the granted ones: {', '.join(listed)}."] if listed else []


_MOST: Final = 4
"""Reasons that are listed."""
OVER: Final = " % over "
"""Text before a number's name in notes of how far a run moves over its interval."""
_OVER: Final = re.compile(rf"{OVER}(.+?)(?=; |, |$)")


def codes_of(data: pd.DataFrame) -> dict[str, str]:
    """Number the reasons if there are several; equal but for numbers: one."""
    if "why" not in data:
        return {}
    kinds = list(dict.fromkeys(numberless(why) for why in data["why"].dropna()))
    return {why: f" ({1 + kinds.index(numberless(why))})" if len(kinds) > 1 else "" for why in data["why"].dropna()}


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
    """List which runs failed and why."""
    frame = without_retried(frame.reset_index(drop=True))
    data = with_failed(pd.DataFrame(columns=["policy", "n"]), frame[failing(frame)], ["policy"])
    if data.empty:
        return []
    counts = [f"{row['policy']} ({row['failed']} run{'s' if row['failed'] > 1 else ''})" for _, row in data.iterrows()]
    return [f"not shown: {', '.join(counts)}", *reasons(data)]


def not_shown_sentences(frame: pd.DataFrame) -> str:
    """Write `not_shown` as sentences of a caption."""
    return " ".join(map(sentence, not_shown(frame)))


def mark(row: pd.Series | Mapping[str, Any], codes: Mapping[str, str]) -> str:
    """Write at a bar that its runs failed, or how many of them did.

    >>> mark({"why": "x", "failed": 1, "n": 0}, {"x": " (2)"}), mark({"why": "x", "failed": 1, "n": 4}, {"x": ""})
    ('failed (2)', '1 failed')
    """
    why = row.get("why")
    if not isinstance(why, str):
        return ""
    return f"{row['failed']} failed{codes[why]}" if row["n"] else f"failed{codes[why]}"


def meaning(shares: Mapping[str, tuple[float, float]]) -> str:
    """Explain the star, with the shares of the policies that have one.

    >>> meaning({"a": (0.5, 0.5), "b": (0.25, 0.99999)}).partition(";")[0]
    "* not exact, share of decoding's gate weight computed as routed: a 50 %, b 25 to 99.9 %"
    """
    listed = []
    for name, (low, high) in shares.items():
        ends = list(dict.fromkeys(f"{fresh_percent(share):g}" for share in (low, high) if not math.isnan(share)))
        listed.append(f"{name} {' to '.join(ends)} %" if ends else f"{name} unknown")
    if not listed:
        return ""
    return (
        f"{NOT_EXACT}, share of decoding's gate weight computed as routed: {', '.join(listed)}; the rest is approximated, "
        "and the replayed routing ignores it"
    )


def not_drawn(frame: pd.DataFrame, why: str = "`decode_speed` draws those of decoding") -> str:
    """Note in a figure without them that profiles' intervals were run."""
    varied = any(frame[name].notna().any() for name in frame.columns.astype(str) if name.endswith("_least"))
    return f"Intervals of the profile are not drawn: {why}." if varied else ""


def varied_numbers(frame: pd.DataFrame, *, power: bool) -> list[str]:
    """List the numbers over whose intervals runs were repeated."""
    notes = frame["notes"].dropna().astype(str).tolist() if "notes" in frame else []
    found = dict.fromkeys(number for text in notes for number in _OVER.findall(text))
    return [number for number in found if power or not number.partition(" ")[0].endswith("_w")]
