"""Provenance of a figure's numbers: a line below it on the screen, its caption on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from moesim.hardware import weakest
from moesim.metrics.naming import COLUMNS, LIVE, notes_of
from moesim.plots.result_rows import (
    DRAW,
    MADE,
    OVER,
    REPEATS,
    cache_column,
    group_name,
    inexact,
    levels,
    meaning,
    named,
    over_draws,
    policies_of,
    settings_in,
    varying,
)
from moesim.plots.style import add_corner

_WHERE: Final = ("model", "hardware", "trace")
_ALWAYS: Final = ("batch_size", "prompt_tokens", "decode_tokens", "n_batches")
_USUAL: Final = {name: column.usual for name, column in COLUMNS.items() if column.usual}
"""Usual values of settings, which a caption leaves out."""
ORACLE: Final = "oracle"
"""Label of numbers that need knowledge of the future."""
_FEW: Final = 3
"""Cache sizes of a policy that are listed one by one."""


def corner_label(frame: pd.DataFrame, group: str | None = None) -> str:
    """Name the subject of a figure: model, hardware, trace, and the weakest source label.

    Parameters
    ----------
    frame : DataFrame
        Result rows.
    group : str, optional
        The column that is on an axis, and so not repeated here.

    Returns
    -------
    str
        One line, with batch size and cache ratio or budget where all rows have the same; the columns that the
        frame lacks are left out.
    """
    parts = []
    for column in _WHERE:
        if column in frame:
            parts.append(_listed(frame, column))
    if "routing" in frame:
        origins = sorted({str(v) for v in frame["routing"].dropna()} - {"recorded"})
        parts += [f"{' and '.join(origins)} routing"] if origins else []
    for column in ("batch_size", cache_column(frame)):
        if column != group and column in frame and frame[column].nunique() == 1:
            parts.append(named(frame[column].dropna().iloc[0], column))
    parts.append(weakest_source(frame, how(frame)))
    return " · ".join(part for part in parts if part)


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
    parts += [f"{text[0].upper()}{text[1:]}." for text in _swept(frame, shown)]
    return " ".join(part for part in [*parts, *_slots(frame), *_labels(frame), _sentence(meaning(inexact(frame)))] if part)


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
        if column in _WHERE or column in shown or len(values) != 1:
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
            word = how(frame)
            sentences.append(f"{word[0].upper()}{word[1:]}; weakest source among the numbers used: {', '.join(parts)}.")
    if "notes" in frame:
        notes = notes_of(map(str, frame["notes"].dropna()))
        kept = [note for note in notes if OVER not in note]  # `moesim.plots.result_rows` draws and words these
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


def _sentence(text: str) -> str:
    return f"{text}." if text else ""
