"""A folder of results: rows as a table, those that a person's words mean, and a figure of them."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moesim.api.result import Result
from moesim.api.run import load
from moesim.core.units import NS_PER_MS, digits
from moesim.errors import ConfigError
from moesim.metrics.naming import CACHE_SETTINGS, COLUMNS, SETTINGS, value_in_words
from moesim.reporting.tables import NAMES, found_by

_METRICS: Final = {
    "decode_tokens_per_s": ("decode, tokens/s", 1.0), "prefill_tokens_per_s": ("prompt, tokens/s", 1.0),
    "ttft_mean_ns": ("first token, ms", 1 / NS_PER_MS), "tpot_mean_ns": ("per token, ms", 1 / NS_PER_MS),
    "hit_rate": ("hit rate, %", 100.0), "bytes_per_token": ("moved, MB/token", 1e-6),
}  # fmt: skip
FIGURES: Final = ("decode_speed", "prefill_speed", "speedup", "breakdown", "hit_rate", "vram", "throughput")
"""Kinds that need the table of a result alone."""


class Opened:
    """A folder that was opened."""

    def __init__(self, folder: str) -> None:
        self.result = load(Path(folder).expanduser())
        rows = self.result.rows
        if not rows:
            raise ConfigError(f"{folder}: expected runs, got none")
        known = [name for name in (*SETTINGS, *CACHE_SETTINGS) if name in rows[0]]
        self.settings = [name for name in known if len({str(row.get(name)) for row in rows}) > 1]
        self.metrics = [name for name in _METRICS if any(row.get(name) is not None for row in rows)]
        self._texts = [found_by(row) for row in rows]

    @property
    def columns(self) -> list[dict[str, Any]]:
        """Columns of the table, in the library's words."""
        names = {"run": "run", "policy": "policy", **{name: _head(name) for name in self.settings}}
        names |= {name: _METRICS[name][0] for name in self.metrics}
        names |= {"error": "failed"} if self.result.failures else {}
        return [
            {"name": name, "label": label, "field": name, "sortable": True, "align": "right" if name in self.metrics else "left"}
            for name, label in names.items()
        ]

    def found(self, words: str) -> list[int]:
        """Return the runs that words mean: ``batch 8`` a setting with its value, ``lru`` any part of a name; all must fit."""
        patterns = filter_patterns(words)
        return [at for at, text in enumerate(self._texts) if all(pattern.search(text) for pattern in patterns)]

    def rows(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows of the table."""
        return [self._row(self.result.rows[at]) for at in places]

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {"run": row["run"], "policy": row["policy"], "error": row.get("error") or ""}
        shown |= {name: "" if row.get(name) is None else value_in_words(row[name], name) for name in self.settings}
        for name in self.metrics:
            value = row.get(name)
            shown[name] = None if value is None else float(digits(float(value) * _METRICS[name][1], 4).replace(",", ""))
        return shown

    def figure(self, kind: str, places: Sequence[int]) -> list[tuple[str, str]]:
        """Draw runs: data for an image, and its caption; one for each combination that a figure does not show."""
        part = Result([self.result.rows[at] for at in places], None)
        figures: list[Any] = list(part.plots(kind).values())
        return [(_image(one), one.caption) for one in figures]


def _image(figure: Any) -> str:
    return "data:image/png;base64," + b64encode(figure._repr_png_()).decode()


def filter_patterns(typed: str) -> list[re.Pattern[str]]:
    """Read a filter as the page's script does: names of settings with their value, other words alone; all must be found."""
    words = [word for word in re.split(r"[\s=_:,]+", typed[:200].lower()) if word]
    found, named = list[re.Pattern[str]](), list[str]()
    for at, word in enumerate(words, 1):
        named.append(re.escape(word))
        if word in NAMES and at < len(words):
            continue
        ends = ("(?<![\\w.])", "(?![\\w.])" if word[:1].isdigit() else "") if len(named) > 1 else ("", "")
        found.append(re.compile(ends[0] + " ".join(named) + ends[1]))
        named = []
    return found


def _head(name: str) -> str:
    return str(COLUMNS[name].word)
