"""The table of published figures: ``experiments/papers/published.csv``, one number a row.

A row has what is printed where, and what answers it: runs of an experiment in the paper's folder, a statistic of a trace, a
cost of a machine, or nothing yet, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moesim.core.data import data_dirs
from moesim.core.gate import read_lines
from moesim.errors import ConfigError, unknown_name

FOLDER = "papers"  # below experiments
PUBLISHED = "published.csv"
SHARED = "_"  # how the names of files begin that others include
COLUMNS = (
    "paper", "figure", "ref", "quantity", "setting", "system", "over", "reading", "kind", "unit", "published",
    "source", "input", "policy", "baseline_input", "baseline", "metric", "where", "remark", "why",
)  # fmt: skip
RATIOS = ("speedup", "gain")
BOUNDS = ("below", "above")
KINDS = ("value", *RATIOS, *BOUNDS, "place")
"""A figure as it is; a ratio of two systems; a ratio given as the percentage gained; an upper or a lower bound; the place of a
policy among all of its experiment, 1 being the best."""
RUNS = ("runs", "decisions")
SOURCES = (*RUNS, "trace", "costs")
"""Runs of an experiment; the same with a clock around each policy's decisions; a statistic of a trace; a cost of a machine."""


@dataclass(frozen=True)
class Published:
    """One printed number, and what answers it."""

    # paper, figure, ref: folder of the paper, short name of the figure, and its place in the paper (empty where that is not known
    # here)
    paper: str
    figure: str
    ref: str
    # quantity, setting: what is given, and for which model, batch and so on. Rows of a figure that agree in both may be ranked
    quantity: str
    setting: str
    # system, over: whose figure, and of a ratio its baseline
    system: str
    over: str
    reading: str  # what the row takes the paper to mean where it can mean several things; empty: any of them
    kind: str  # one of "value", "speedup", "gain", "below", "above", "place": see `KINDS`
    unit: str  # `"tokens/s"`, `"x"`, `"%"` and so on
    published: float  # as printed
    source: str  # one of "runs", "decisions", "trace", "costs", "": see `SOURCES`; empty: not comparable yet
    input: str  # experiment (file name without suffix, in the paper's folder), trace (as in an experiment), or hardware profile
    policy: str  # of runs: the policy with its options as in result tables
    # baseline_input, baseline: the same for the other side of a ratio; the input is the same one if empty
    baseline_input: str
    baseline: str
    # of runs: a column of the results, or one of `moesim.studies.papers.compare.DERIVED`; `"1/"` before it turns
    # "less is better" into a speed. Else the name of a statistic or of a cost
    metric: str
    # `"model=mixtral-8x7b;batch_size=4|16"`: settings of the runs that count (empty: all), or arguments of the statistic or cost.
    # `cache_ratio=0.25>0` names the settings of a system and of its baseline, where they differ
    where: str
    # remark, why: what differs from the paper's set-up, or why there is no counterpart; and why the figures differ, as far as it
    # is known
    remark: str
    why: str

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.figure}"

    @property
    def experiment(self) -> str:
        """Paper and experiment in one word; empty if no runs answer this."""
        return f"{self.paper}/{self.input}" if self.source in RUNS else ""

    @property
    def baseline_experiment(self) -> str:
        return f"{self.paper}/{self.baseline_input or self.input}" if self.source in RUNS and self.baseline else ""

    @property
    def what(self) -> str:
        words = f"{self.quantity}: {self.system}" + (f" over {self.over}" if self.over else "")
        words += f", {self.setting}" if self.setting else ""
        return words + (f" [{self.reading}]" if self.reading else "")

    def arguments(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in self.where.split(";") if part)


def paper_folder() -> Path:
    """Return the folder of the papers' experiments."""
    for folder in data_dirs("experiments"):
        if (folder / FOLDER / PUBLISHED).is_file():
            return folder / FOLDER
    raise ConfigError(f"experiments/{FOLDER}/{PUBLISHED}: expected the table of published results, got no such file")


def read_published(path: Path) -> list[Published]:
    """Read the printed figures."""
    return [_published(*line) for line in read_lines(path, COLUMNS, "the table of published results")]


def _published(row: Mapping[str, str], place: str) -> Published:
    texts = {key: value.strip() for key, value in row.items()}
    try:
        number = float(texts.pop("published"))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{place}: published: expected a number, got {row['published']!r}")
    found = Published(published=number, **texts)
    _check_names(found, place)
    _check_answer(found, place)
    return found


def _check_names(row: Published, place: str) -> None:
    for key in ("paper", "figure", "quantity", "system"):
        if not getattr(row, key):
            raise ConfigError(f"{place}: {key}: expected a name, got nothing")
    if row.kind not in KINDS:
        raise ConfigError(f"{place}: {unknown_name('kind', row.kind, KINDS)}")
    if row.source and row.source not in SOURCES:
        raise ConfigError(f"{place}: {unknown_name('source', row.source, SOURCES)}")
    least = -100 if row.kind == "gain" else 0
    if row.published <= least:
        raise ConfigError(f"{place}: published: expected more than {least}, got {row.published:g}")
    if (row.kind in RATIOS) != bool(row.over):
        expected = "the other system of the ratio" if row.kind in RATIOS else f"nothing for a {row.kind}"
        raise ConfigError(f"{place}: over: expected {expected}, got '{row.over}'")


def _check_answer(row: Published, place: str) -> None:
    """Check that an answer is named completely, without columns that have no effect."""
    runs = row.source in RUNS
    needed = {"input": bool(row.source), "metric": bool(row.source), "policy": runs, "baseline": runs and row.kind in RATIOS}
    allowed = {**needed, "where": bool(row.source), "baseline_input": needed["baseline"], "remark": True}
    needed["remark"] = not row.source
    for key, may in allowed.items():
        if needed.get(key, False) and not getattr(row, key):
            raise ConfigError(f"{place}: {key}: expected it for source '{row.source}' and kind '{row.kind}', got nothing")
        if not may and getattr(row, key):
            raise ConfigError(
                f"{place}: {key}: expected nothing for source '{row.source}' and kind '{row.kind}', got '{getattr(row, key)}'"
            )
    if row.source in ("trace", "costs") and row.kind in (*RATIOS, "place"):
        raise ConfigError(f"{place}: kind: expected value, below or above for source '{row.source}', got {row.kind}")
    for part in row.where.split(";"):
        if part and not all(part.partition("=")):
            raise ConfigError(f"{place}: where: expected key=value parts with ; between them, got '{part}'")
