"""Repeats of one run with other seeds: how they are drawn, and one row of them with means and their 95 % intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Final

from moesim.core.student import student_t
from moesim.errors import ConfigError
from moesim.experiment.config import Config
from moesim.experiment.forms import listed
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS

Row = Mapping[str, Any]

CI: Final = "ci95."
"""Beginning of the name of a column that holds half the width of an interval."""
_SEEDED = ("seed", "trace")  # what differs between repeats; of a trace only if it is made up
_DRAWN_FROM: Final = ("workload", "trace")  # fields of a run that have a seed
_DRAWN = ("trace", "requests_drawn")  # two repeats with the same ones are no two draws
_APART = ("run", "repeat", "key", "group", "workload_digest", "requests_drawn", *_SEEDED)


def repeats_of(config: Config) -> dict[str, range]:
    """Give the repeats of an experiment, as values of a field of a run."""
    return {"repeat": range(config.repeat)}


def check_one_seed(config: Config, place: str) -> None:
    """Refuse to repeat a sweep over seeds."""
    seeds: list[tuple[str, Any]] = [("workload.seed", config.workload.seed)]
    seeds += [("trace.seed", trace.get("seed")) for trace in listed(config.trace) if isinstance(trace, Mapping)]
    for field, seed in seeds:
        if config.repeat > 1 and isinstance(seed, list):
            raise ConfigError(f"{place}: repeat: expected one {field}, the first of {config.repeat}, got {seed}; remove either")


def reseeded(setting: dict[str, Any]) -> dict[str, Any]:
    """Draw other requests for a repeat, and other routing where it is made up."""
    for name in _DRAWN_FROM if setting["repeat"] else ():
        if isinstance(written := setting[name], Mapping):
            setting[name] = {**written, "seed": written.get("seed", 0) + setting["repeat"]}
    return setting


def seedless(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Give what a run and its repeats have in common."""
    common = {name: value for name, value in setting.items() if name != "repeat"}
    for name in _DRAWN_FROM:
        if isinstance(written := common[name], Mapping):
            common[name] = {key: value for key, value in written.items() if key != "seed"}
    return common


def count_repeats(rows: Sequence[Row]) -> int:
    """Count the repeats of a run."""
    return 1 + max((int(row.get("repeat") or 0) for row in rows), default=0)


def repeated(rows: Sequence[Row]) -> bool:
    """Whether there are repeats among rows."""
    return any(row.get("repeat") for row in rows)


def aggregate(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Put the repeats of each run together.

    In the order of the first repeats: settings and labels as in the first one, ``repeats`` (how many succeeded), and for every
    metric its mean and, under its name with `CI` before it, half the width of the 95 % interval by Student's t. Repeats that
    drew the same requests from a trace count as one draw, with their mean; fewer than two draws have no interval (None). If any
    repeat failed, ``error`` says how many did.
    """
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
    return json.dumps([row["policy"], made_up, *(row.get(name) for name in names)], default=str)


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
        told = {value for row in done if (value := row.get(name)) is not None}
        if name in settings or name.startswith("policy") or not told or not all(_is_number(value) for value in told):
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def half_width(values: Sequence[float]) -> float | None:
    """Give half the width of the 95 % interval of a mean, by Student's t.

    >>> round(half_width([1.0, 2.0, 3.0]), 3)
    2.484
    """
    n = len(values)
    return None if n < 2 else student_t(0.95, n) * stdev(values) / sqrt(n)
