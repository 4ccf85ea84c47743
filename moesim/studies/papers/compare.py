"""Published results next to simulated ones, with those that have no counterpart.

They are data (`moesim.studies.papers.published`); nothing is fitted to a figure. An order is which design is better: values,
ratios over a common baseline and chains of ratios are put on one scale, and systems ranked on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from moesim.errors import ConfigError, unknown_name
from moesim.experiment.config import Config
from moesim.experiment.sweep import expand
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS, policy_label
from moesim.model import load_model
from moesim.studies.papers.answers import check_cost, check_figure, decision_share, machine_cost, routing_figure
from moesim.studies.papers.published import BOUNDS, PUBLISHED, RATIOS, RUNS, SHARED, Published

Row = Mapping[str, Any]
NEAR = 0.1
"""Figures whose ratio is within this share of 1 need no reason why they differ."""

# What makes two runs the same setting, so that a ratio compares like with like: a baseline may have a machine of its own, with
# what belongs to it.
_SETTING = (*(key for key in SETTINGS if key not in ("hardware", "trace", "predictors")), *CACHE_SETTINGS)
_NS_PER_S = 1e9


@dataclass(frozen=True)
class Compared:
    """A printed figure and its simulated counterpart."""

    published: Published
    simulated: float | None = None  # mean of the runs' figures, or the geometric mean of their ratios; None if there is no run
    # low, high: the smallest and the largest among those runs
    low: float | None = None
    high: float | None = None
    n_runs: int = 0  # how many; 1 for a statistic or a cost
    # costs, routing: labels of the inputs: the weakest source of the costs that were used, and where the routing comes from
    costs: str = ""
    routing: str = ""
    label: str = ""  # weakest source labels of the results, joined
    policies: tuple[str, ...] = ()  # registered names of the policies that were run
    notes: str = ""  # remarks of the results

    @property
    def ratio(self) -> float | None:
        """Simulated over published; of gains in percent, the ratio of the two speed-ups."""
        if self.simulated is None:
            return None
        if self.published.kind == "gain":
            return (100 + self.simulated) / (100 + self.published.published)
        return self.simulated / self.published.published

    @property
    def agrees(self) -> bool | None:
        """Whether a bound holds, or the ratio is within `NEAR` of 1; None without a counterpart."""
        if self.simulated is None or self.ratio is None:
            return None
        if self.published.kind in BOUNDS:
            return self.simulated < self.published.published if self.published.kind == "below" else (
                self.simulated > self.published.published
            )  # fmt: skip
        return abs(self.ratio - 1) <= NEAR

    def record(self) -> dict[str, Any]:
        found = asdict(self.published) | {"simulated": self.simulated, "low": self.low, "high": self.high}
        found |= {"ratio": self.ratio, "agrees": self.agrees, "n_runs": self.n_runs}
        found |= {"costs": self.costs, "routing": self.routing, "label": self.label}
        return found | {"policies": ", ".join(self.policies), "notes": self.notes}


def _moe_time(row: Row) -> float:
    return float(row["makespan_ns"]) - float(row["time_dense_ns"])


DERIVED: dict[str, Callable[[Row], float]] = {
    "throughput": lambda row: float(row["n_generated_tokens"]) * _NS_PER_S / float(row["makespan_ns"]),
    "moe_time_ns": _moe_time,
    "moe_time_s": lambda row: _moe_time(row) / _NS_PER_S,
    "gpu_memory_gb": lambda row: sum(v for k, v in row.items() if k.startswith("peak_memory_bytes.") and "gpu" in k and v) / 1e9,
    "hit_or_coming": lambda row: float(row["resident_rate"]) + float(row["in_flight_share"]),
    "ttft_ms": lambda row: float(row["ttft_mean_ns"]) / 1e6,
    "step_s": lambda row: float(row["tpot_mean_ns"]) / _NS_PER_S,
    "tokens_per_kj": lambda row: 1000 / float(row["energy_j_per_token"]),
    "decision_share": decision_share,
}
"""Tokens generated over the whole time, prefill included; the time that is not the dense part's, in ns and s; peak memory of all
GPUs together; share of lookups whose expert is on a GPU or on its way to one; time to the first token; time of a decode step;
tokens generated per kilojoule; share of the time that decisions take (of runs with a clock around them)."""


_OF_ENERGY = ("tokens_per_kj", "energy_j", "energy_j_per_token")


def compare(published: Published, results: Mapping[str, Sequence[Row]], place: str = "papers") -> Compared:
    """Find what answers a printed figure."""
    place = f"{place}: {published.name}"
    if published.source not in RUNS:
        if not published.source:
            return Compared(published)
        of_trace = published.source == "trace"
        answer = routing_figure if of_trace else machine_cost
        value, label = answer(published.input, published.metric, published.arguments(), place)
        return Compared(published, value, value, value, 1, *(("none", label) if of_trace else (label, "none")), label)
    where, other_where, apart = sides(published.where)
    mine = select(results.get(published.experiment, ()), published.policy, where, place)
    if published.kind in RATIOS:
        rows = select(results.get(published.baseline_experiment, ()), published.baseline, other_where, place)
        others = {_setting(row, apart): row for row in rows}
        pairs: list[tuple[Row, ...]] = [(row, others[_setting(row, apart)]) for row in mine if _setting(row, apart) in others]
        figures = [_figure(a, published.metric, place) / _figure(b, published.metric, place) for a, b in pairs]
    else:
        pairs = [(row,) for row in mine]
        figures = [_figure(row, published.metric, place) for row in mine]
    if not pairs:
        return Compared(published)
    if published.kind == "place":
        every = [row for row in results[published.experiment] if row["error"] is None]
        same = [[_figure(other, published.metric) for other in every if _setting(other) == _setting(row)] for row in mine]
        figures = [1.0 + sum(one > figure for one in others) for others, figure in zip(same, figures, strict=True)]
    mean = geometric_mean(figures) if published.kind in RATIOS else fmean(figures)
    low, high = min(figures), max(figures)
    if published.kind == "gain":
        mean, low, high = (100 * (figure - 1) for figure in (mean, low, high))
    used = [row for pair in pairs for row in pair]
    watts = ("energy_label",) if published.metric in _OF_ENERGY else ()
    costs, routing, label = (
        ", ".join(sorted({str(row[key]) for row in used for key in keys if row.get(key)}))
        for keys in (("cost_label", *watts), ("routing",), ("source_label", *watts))
    )
    policies = tuple(dict.fromkeys(str(row["policy_name"]) for row in used))
    notes = "; ".join(dict.fromkeys(str(row["notes"]) for row in used))
    return Compared(published, mean, low, high, len(pairs), costs, routing, label, policies, notes)


def select(rows: Iterable[Row], policy: str, where: str, place: str = "papers") -> list[Row]:
    """Choose runs."""
    wanted = {key: values.split("|") for key, values in (part.split("=", 1) for part in where.split(";") if part)}
    found = []
    for row in rows:
        for key in wanted:
            if key not in row:
                raise ConfigError(f"{place}: where: {unknown_name('setting', key, [*SETTINGS, *CACHE_SETTINGS])}")
        right = row["policy"] == policy and row.get("error") is None
        if right and all(_written(row[key]) in values for key, values in wanted.items()):
            found.append(row)
    return found


def _written(value: Any) -> str:
    """Write a setting as in ``where``; of a model its name only."""
    return f"{value:g}" if isinstance(value, float) else str(value).split(" (")[0]


def sides(where: str) -> tuple[str, str, frozenset[str]]:
    """Divide ``where`` into a system's and its baseline's, with the settings that differ.

    >>> sides("model=mixtral-8x7b;cache_ratio=0.25>0")
    ('model=mixtral-8x7b;cache_ratio=0.25', 'model=mixtral-8x7b;cache_ratio=0', frozenset({'cache_ratio'}))
    """
    parts = [part.split("=", 1) for part in where.split(";") if part]
    sides = [";".join(f"{key}={values.split('>')[end]}" for key, values in parts) for end in (0, -1)]
    return sides[0], sides[1], frozenset(key for key, values in parts if ">" in values)


def _setting(row: Row, apart: Collection[str] = ()) -> tuple[Any, ...]:
    return tuple(_written(row[key]) if key == "model" else row.get(key) for key in _SETTING if key not in apart)


def _figure(row: Row, metric: str, place: str = "papers") -> float:
    name = metric.removeprefix("1/")
    if name not in DERIVED and row.get(name) is None:
        numbers = [key for key, value in row.items() if isinstance(value, int | float) and "." not in key]
        raise ConfigError(f"{place}: {unknown_name('metric', name, [*DERIVED, *numbers])}")
    found = DERIVED[name](row) if name in DERIVED else float(row[name])
    return 1 / found if metric.startswith("1/") else found


@dataclass(frozen=True)
class Variant:
    """A policy of an experiment against the experiment's first."""

    experiment: str
    policy: str
    n_settings: int  # settings in which both ran
    # decode, prefill: geometric mean over them of its decode speed, and of its time to the first token turned into a speed, as
    # shares of the first policy's; None where a run has none
    decode: float | None
    prefill: float | None
    # low, high: smallest and largest share of the decode speed
    low: float | None
    high: float | None
    fidelity: float | None  # least share of gate weight served as routed


def variants(experiment: str, rows: Sequence[Row]) -> list[Variant]:
    """Compare every policy of an experiment with its first."""
    names = list(dict.fromkeys(str(row["policy"]) for row in rows))
    done = {name: {_setting(row): row for row in select(rows, name, "")} for name in names}
    return [_variant(experiment, name, done[name], done[names[0]]) for name in names]


def _variant(experiment: str, policy: str, mine: Mapping[Any, Row], first: Mapping[Any, Row]) -> Variant:
    both = [(mine[setting], first[setting]) for setting in mine if setting in first]
    decode = _shares(both, "decode_tokens_per_s")
    prefill = _shares(both, "1/ttft_mean_ns")
    fidelity = [float(row["fidelity_fresh_decode"]) for row, _ in both if row.get("fidelity_fresh_decode") is not None]
    return Variant(
        experiment, policy, len(both), geometric_mean(decode) if decode else None,
        geometric_mean(prefill) if prefill else None, min(decode, default=None), max(decode, default=None),
        min(fidelity, default=None),
    )  # fmt: skip


def _shares(pairs: Sequence[tuple[Row, Row]], metric: str) -> list[float]:
    column = metric.removeprefix("1/")
    return [_figure(a, metric) / _figure(b, metric) for a, b in pairs if a.get(column) and b.get(column)]


@dataclass(frozen=True)
class Figure:
    """A figure or table of a paper, or an experiment to which no printed number belongs."""

    paper: str
    name: str
    ref: str
    rows: tuple[Published, ...]  # its printed numbers
    experiments: tuple[str, ...]  # what is run for it, as paper and file name without suffix


def figures(rows: Sequence[Published], folder: Path) -> list[Figure]:
    """List the figures of all papers, and experiments without printed numbers."""
    found = []
    for paper in dict.fromkeys(row.paper for row in rows):
        mine = [row for row in rows if row.paper == paper]
        there = [f"{paper}/{path.stem}" for path in sorted((folder / paper).glob("*.yaml")) if path.stem[0] != SHARED]
        for name in dict.fromkeys(row.figure for row in mine):
            of = tuple(row for row in mine if row.figure == name)
            runs = tuple(dict.fromkeys(e for row in of for e in (row.experiment, row.baseline_experiment) if e))
            for experiment in runs:
                if experiment not in there:
                    known = unknown_name("experiment", experiment, there)
                    raise ConfigError(f"{folder / PUBLISHED}: {paper}/{name}: input: {known}")
            found.append(Figure(paper, name, next((row.ref for row in of if row.ref), ""), of, runs))
        named = {experiment for figure in found for experiment in figure.experiments}
        found += [Figure(paper, e.partition("/")[2], "", (), (e,)) for e in there if e not in named]
    return found


def choose(known: Sequence[Figure], names: Iterable[str]) -> list[Figure]:
    """Choose figures by the names of papers or as ``"paper/figure"``; no name chooses all."""
    wanted = list(names)
    possible = {figure.paper for figure in known} | {f"{figure.paper}/{figure.name}" for figure in known}
    for name in wanted:
        if name not in possible:
            paper = name.partition("/")[0]
            near = {one for one in possible if one.startswith(f"{paper}/")} or {one for one in possible if "/" not in one}
            raise ConfigError(f"papers: {unknown_name('figure' if '/' in name else 'paper', name, near)}")
    return [one for one in known if not wanted or one.paper in wanted or f"{one.paper}/{one.name}" in wanted]


def check_answers(rows: Iterable[Published], configs: Mapping[str, Config], place: str) -> None:
    """Check that rows name policies, settings, statistics and costs that there are."""
    grids = {name: _grid(config, f"{name}.yaml") for name, config in configs.items()}
    for row in rows:
        where = f"{place}: {row.name}"
        if row.source == "trace":
            check_figure(row.metric, row.arguments(), where)
        elif row.source == "costs":
            check_cost(row.metric, row.arguments(), where)
        mine, theirs, _ = sides(row.where) if row.experiment else ("", "", None)
        for name, policy, side in ((row.experiment, row.policy, mine), (row.baseline_experiment, row.baseline, theirs)):
            if not name:
                continue
            known = {str(one["policy"]) for one in grids[name]}
            if policy not in known:
                raise ConfigError(f"{where}: {unknown_name(f'policy of {name}.yaml', policy, known)}")
            if not select(grids[name], policy, side, where):
                raise ConfigError(f"{where}: where: expected settings of some run of {name}.yaml, got '{side}'")


def _grid(config: Config, place: str) -> list[dict[str, Any]]:
    return [
        {"policy": policy_label(point.policy), "model": load_model(point.model, f"{place}: model").name, **point.row()}
        for point in expand(config, place)
    ]


Scores = tuple[float, float]  # logarithms of what is printed and of what is simulated, on a scale of their own
_ABSOLUTE = ""  # the node that values are ratios over


@dataclass(frozen=True)
class Agreement:
    """The order of the systems of one figure and setting."""

    # paper, figure, quantity, setting, reading: what is ranked, as in the table
    paper: str
    figure: str
    quantity: str
    setting: str
    reading: str
    systems: tuple[str, ...]  # in the printed order, the largest figure first
    order: str  # the same in words, with `=` between systems whose printed figures are equal
    # Kendall's tau-b of printed and simulated figures; None for two systems, whose one pair says it all, and where all are
    # simulated to be equal
    tau: float | None
    pairs: int  # pairs of systems whose printed figures differ
    # wrong, tied: those of them that are simulated in the other order, and those simulated to be equal: the one that is printed
    # to be larger first
    wrong: tuple[tuple[str, str], ...]
    tied: tuple[tuple[str, str], ...]

    @property
    def verdict(self) -> str:
        if self.pairs == 1:
            return "1 pair, disagrees" if self.wrong else "1 pair, simulated equal" if self.tied else "1 pair, agrees"
        tau = "" if self.tau is None else f"tau {self.tau:.2f}, "
        return f"{tau}{self.pairs - len(self.wrong) - len(self.tied)} of {self.pairs} pairs agree"

    @property
    def amiss(self) -> str:
        return "; ".join([*(f"{a} > {b}" for a, b in self.wrong), *(f"{a} > {b} (simulated equal)" for a, b in self.tied)])

    def record(self) -> dict[str, Any]:
        return {
            "paper": self.paper, "figure": self.figure, "quantity": self.quantity, "setting": self.setting,
            "reading": self.reading, "n_systems": len(self.systems), "systems": self.order, "tau": self.tau,
            "pairs": self.pairs, "pairs_wrong": len(self.wrong), "pairs_tied": len(self.tied), "wrong": self.amiss,
            "verdict": self.verdict,
        }  # fmt: skip


def agreements(compared: Iterable[Compared]) -> list[Agreement]:
    """Rank the systems of each figure and setting with at least two figures on both sides."""
    groups: dict[tuple[str, str, str, str], list[Compared]] = {}
    for one in compared:
        row = one.published
        if one.simulated is not None and row.kind != "place" and row.source != "costs":  # costs are inputs, not systems
            groups.setdefault((row.paper, row.figure, row.quantity, row.setting), []).append(one)
    found = []
    for key, rows in groups.items():
        readings = list(dict.fromkeys(one.published.reading for one in rows if one.published.reading)) or [""]
        for reading in readings:
            mine = [one for one in rows if one.published.reading in ("", reading)]
            found += [_agreement(key, reading, scores) for scores in _scales(mine)]
    return found


def _agreement(key: tuple[str, str, str, str], reading: str, scores: Mapping[str, Scores]) -> Agreement:
    systems = sorted(scores, key=lambda name: -scores[name][0])
    pairs = [(a, b) for a, b in combinations(systems, 2) if scores[a][0] > scores[b][0]]
    wrong = tuple((a, b) for a, b in pairs if scores[a][1] < scores[b][1])
    tied = tuple((a, b) for a, b in pairs if scores[a][1] == scores[b][1])
    tau = None
    if len(systems) > 2 and pairs:
        from scipy.stats import kendalltau  # SciPy takes most of a second to import

        found = float(kendalltau(*zip(*(scores[name] for name in systems), strict=True)).statistic)
        tau = None if math.isnan(found) else found
    order = systems[0] + "".join(f" {'>' if (a, b) in pairs else '='} {b}" for a, b in pairwise(systems))
    return Agreement(*key, reading, tuple(systems), order, tau, len(pairs), wrong, tied)


def _scales(rows: Sequence[Compared]) -> list[dict[str, Scores]]:
    """Put systems on common scales: sets connected by values and ratios, not all alike in print."""
    edges: dict[str, list[tuple[str, Scores]]] = {}
    for one in sorted(rows, key=lambda one: bool(one.published.over)):  # a value counts before what ratios would make of it
        step = _step(one)
        system, other = one.published.system, one.published.over or _ABSOLUTE
        edges.setdefault(other, []).append((system, step))
        edges.setdefault(system, []).append((other, (-step[0], -step[1])))
    bounds = {one.published.system: one.published.kind for one in rows if one.published.kind in BOUNDS}
    scales, left = [], sorted(edges, key=lambda name: name != _ABSOLUTE)
    while left:
        scale = _reach(edges, left[0])
        left = [name for name in left if name not in scale]
        scale.pop(_ABSOLUTE, None)
        known = _without_useless_bounds({name: (round(a, 9), round(b, 9)) for name, (a, b) in scale.items()}, bounds)
        if len({printed for printed, _ in known.values()}) > 1:
            scales.append(known)
    return scales


def _reach(edges: Mapping[str, Sequence[tuple[str, Scores]]], start: str) -> dict[str, Scores]:
    scale, waiting = {start: (0.0, 0.0)}, [start]
    while waiting:
        here = waiting.pop(0)
        for there, step in edges[here]:
            if there not in scale:
                scale[there] = (scale[here][0] + step[0], scale[here][1] + step[1])
                waiting.append(there)
    return scale


def _step(one: Compared) -> Scores:
    factors = [one.published.published, one.simulated or 0.0]
    if one.published.kind == "gain":
        factors = [1 + factor / 100 for factor in factors]
    printed, simulated = (math.log(factor) if factor > 0 else -math.inf for factor in factors)
    return printed, simulated


def _without_useless_bounds(scale: Mapping[str, Scores], bounds: Mapping[str, str]) -> dict[str, Scores]:
    """Leave out systems with only a printed bound, unless it ranks them against all others."""
    values = [printed for name, (printed, _) in scale.items() if name not in bounds]
    told = {"below": lambda at: all(at <= value for value in values), "above": lambda at: all(at >= value for value in values)}
    return {name: found for name, found in scale.items() if name not in bounds or told[bounds[name]](found[0])}
