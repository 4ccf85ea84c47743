"""Published results beside simulated ones: every printed figure that the simulator can speak to, and those it cannot.

Which they are is data (`moesim.studies.papers.published`). Nothing is fitted to a figure: this is a report, whatever comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean
from typing import Any

from moesim.errors import ConfigError, unknown_name
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.studies.papers.cost_figures import machine_cost
from moesim.studies.papers.decision_time import decision_share
from moesim.studies.papers.published import BOUNDS, RATIOS, RUNS, Published
from moesim.studies.papers.routing_figures import routing_figure

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
    notes: str = ""  # what the results carry beside their labels

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
        """Give everything by name."""
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
    if published.source not in RUNS:
        return _told(published, f"{place}: {published.name}") if published.source else Compared(published)
    place = f"{place}: {published.name}"
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
        figures = [float(_place(row, every, published.metric)) for row in mine]
    mean = geometric_mean(figures) if published.kind in RATIOS else fmean(figures)
    low, high = min(figures), max(figures)
    if published.kind == "gain":
        mean, low, high = (100 * (figure - 1) for figure in (mean, low, high))
    used = [row for pair in pairs for row in pair]
    watts = ("energy_label",) if published.metric in _OF_ENERGY else ()
    costs, routing, label = (
        _joined(row.get(key) for row in used for key in keys)
        for keys in (("cost_label", *watts), ("routing",), ("source_label", *watts))
    )
    policies = tuple(dict.fromkeys(str(row["policy_name"]) for row in used))
    notes = "; ".join(dict.fromkeys(str(row["notes"]) for row in used))
    return Compared(published, mean, low, high, len(pairs), costs, routing, label, policies, notes)


def _told(row: Published, place: str) -> Compared:
    """Answer from a trace or a hardware profile, without a run."""
    if row.source == "trace":
        value, label = routing_figure(row.input, row.metric, row.arguments(), place)
        return Compared(row, value, value, value, 1, "none", label, label)
    value, label = machine_cost(row.input, row.metric, row.arguments(), place)
    return Compared(row, value, value, value, 1, label, "none", label)


def _joined(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value) for value in values if value}))


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
    """Write a setting as in ``where``; of a model only its name, not what was changed in it."""
    return f"{value:g}" if isinstance(value, float) else str(value).split(" (")[0]


def sides(where: str) -> tuple[str, str, frozenset[str]]:
    """Divide ``where`` into that of a system and that of its baseline, and name the settings in which they differ.

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


def _place(row: Row, every: Sequence[Row], metric: str) -> int:
    mine = _figure(row, metric)
    return 1 + sum(_figure(other, metric) > mine for other in every if _setting(other) == _setting(row))


@dataclass(frozen=True)
class Variant:
    """A policy of an experiment beside the experiment's first."""

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
        experiment,
        policy,
        len(both),
        geometric_mean(decode) if decode else None,
        geometric_mean(prefill) if prefill else None,
        min(decode, default=None),
        max(decode, default=None),
        min(fidelity, default=None),
    )


def _shares(pairs: Sequence[tuple[Row, Row]], metric: str) -> list[float]:
    column = metric.removeprefix("1/")
    return [_figure(a, metric) / _figure(b, metric) for a, b in pairs if a.get(column) and b.get(column)]
