"""Published results beside simulated ones: every printed figure that the simulator can speak to, and those it cannot.

``experiments/papers/published.csv`` holds the printed figures, one a row, and says which runs of which experiment in that
folder answer it. Nothing is fitted to a figure: this is a report, whatever comes out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from moesim.data import data_dirs
from moesim.errors import ConfigError, unknown_name
from moesim.experiment.naming import CACHE_SETTINGS, SETTINGS

Row = Mapping[str, Any]
FOLDER = "papers"  # below experiments
PUBLISHED = "published.csv"
COLUMNS = (
    "paper", "ref", "what", "kind", "unit", "published", "experiment", "policy", "baseline_experiment", "baseline",
    "metric", "where", "remark",
)  # fmt: skip
KINDS = ("value", "speedup", "gain")
"""A figure as it is; a ratio of two systems; a ratio given as the percentage gained."""

# What makes two runs the same setting, so that a ratio compares like with like: a baseline may have a machine of its own, with
# what belongs to it.
_SETTING = (*(key for key in SETTINGS if key not in ("hardware", "trace", "predictors")), *CACHE_SETTINGS)
_NS_PER_S = 1e9


@dataclass(frozen=True)
class Published:
    """One printed figure, and where its simulated counterpart is found.

    Attributes
    ----------
    paper, ref, what : str
        Name, place in the paper, and what the figure says.
    kind : {"value", "speedup", "gain"}
        See `KINDS`.
    unit : str
        ``"tokens/s"``, ``"x"``, ``"%"`` and so on.
    published : float
        As printed.
    experiment, policy : str
        File name without suffix, and the policy's name with its options as in result tables; empty: not yet comparable.
    baseline_experiment, baseline : str
        The same for the other side of a ratio; the experiment is the same one if empty.
    metric : str
        Column of the results, or one of `DERIVED`; ``"1/"`` before it turns "less is better" into a speed.
    where : str
        Settings of the runs that count: ``"model=mixtral-8x7b;batch_size=4|16"``; empty: all.
    remark : str
        What differs from the paper, or why there is no counterpart.
    """

    paper: str
    ref: str
    what: str
    kind: str
    unit: str
    published: float
    experiment: str
    policy: str
    baseline_experiment: str
    baseline: str
    metric: str
    where: str
    remark: str


@dataclass(frozen=True)
class Compared:
    """A printed figure and its simulated counterpart.

    Attributes
    ----------
    published : Published
    simulated : float or None
        Mean of the runs' figures, or the geometric mean of their ratios; None if there is no run.
    low, high : float or None
        The smallest and the largest among those runs.
    n_runs : int
        How many.
    label : str
        Weakest source labels of the runs, joined.
    """

    published: Published
    simulated: float | None
    low: float | None
    high: float | None
    n_runs: int
    label: str

    @property
    def ratio(self) -> float | None:
        """Simulated over published; of gains in percent, the ratio of the two speed-ups."""
        if self.simulated is None:
            return None
        if self.published.kind == "gain":
            return (100 + self.simulated) / (100 + self.published.published)
        return self.simulated / self.published.published

    def record(self) -> dict[str, Any]:
        """Give everything by name."""
        found = asdict(self.published) | {"simulated": self.simulated, "low": self.low, "high": self.high}
        return found | {"ratio": self.ratio, "n_runs": self.n_runs, "label": self.label}


def _throughput(row: Row) -> float:
    return float(row["n_generated_tokens"]) * _NS_PER_S / float(row["makespan_ns"])


def _moe_time(row: Row) -> float:
    return float(row["makespan_ns"]) - float(row["time_dense_ns"])


def _gpu_memory(row: Row) -> float:
    return float(sum(v for k, v in row.items() if k.startswith("peak_memory_bytes.") and "gpu" in k and v is not None)) / 1e9


def _ttft_ms(row: Row) -> float:
    return float(row["ttft_mean_ns"]) / 1e6


DERIVED = {"throughput": _throughput, "moe_time_ns": _moe_time, "gpu_memory_gb": _gpu_memory, "ttft_ms": _ttft_ms}
"""Tokens generated over the whole time, prefill included; the time that is not the dense part's; peak memory of all GPUs
together; time to the first token."""


def paper_folder() -> Path:
    """Return the folder of the papers' experiments.

    Raises
    ------
    ConfigError
        If there is none.
    """
    for folder in data_dirs("experiments"):
        if (folder / FOLDER / PUBLISHED).is_file():
            return folder / FOLDER
    raise ConfigError(f"experiments/{FOLDER}/{PUBLISHED}: expected the table of published results, got no such file")


def read_published(path: Path) -> list[Published]:
    """Read the printed figures.

    Parameters
    ----------
    path : Path
        A CSV file with the columns of `COLUMNS`.

    Returns
    -------
    list of Published
        In the order of the file.

    Raises
    ------
    ConfigError
        If a column, a kind or a number is wrong.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ConfigError(f"{path}: expected the columns {','.join(COLUMNS)}, got {','.join(reader.fieldnames or ())}")
        return [_published(row, f"{path}:{reader.line_num}") for row in reader]


def _published(row: dict[str, str | None], place: str) -> Published:
    if None in row or None in row.values():
        raise ConfigError(f"{place}: expected {len(COLUMNS)} fields, got another number; quote fields that contain a comma")
    texts = {key: value or "" for key, value in row.items()}
    if texts["kind"] not in KINDS:
        raise ConfigError(f"{place}: {unknown_name('kind', texts['kind'], KINDS)}")
    try:
        number = float(texts.pop("published"))
    except ValueError:
        raise ConfigError(f"{place}: published: expected a number, got {row['published']!r}") from None
    return Published(published=number, **texts)


def compare(published: Published, results: Mapping[str, Sequence[Row]]) -> Compared:
    """Find what was simulated for a printed figure.

    Parameters
    ----------
    published : Published
        The figure.
    results : mapping of str to sequence of mapping
        Result rows of each experiment that was run.

    Returns
    -------
    Compared
    """
    mine = _select(results.get(published.experiment, ()), published.policy, published.where)
    if published.kind == "value":
        pairs: list[tuple[Row, Row | None]] = [(row, None) for row in mine]
    else:
        other = published.baseline_experiment or published.experiment
        others = {_setting(r): r for r in _select(results.get(other, ()), published.baseline, published.where)}
        pairs = [(row, others[_setting(row)]) for row in mine if _setting(row) in others]
    if not pairs:
        return Compared(published, None, None, None, 0, "")
    figures = [_figure(row, base, published.metric) for row, base in pairs]
    mean = fmean(figures) if published.kind == "value" else geometric_mean(figures)
    low, high = min(figures), max(figures)
    if published.kind == "gain":
        mean, low, high = (100 * (figure - 1) for figure in (mean, low, high))
    labels = sorted({str(r["source_label"]) for pair in pairs for r in pair if r is not None})
    return Compared(published, mean, low, high, len(pairs), ", ".join(labels))


def _select(rows: Iterable[Row], policy: str, where: str) -> list[Row]:
    if not policy:
        return []
    wanted = dict(part.split("=", 1) for part in where.split(";") if part)
    return [
        row
        for row in rows
        if row["policy"] == policy
        and row["error"] is None
        and all(_written(row[key]) in values.split("|") for key, values in wanted.items())
    ]


def _written(value: Any) -> str:
    """Write a setting as in ``where``; of a model only its name, not what was changed in it."""
    return f"{value:g}" if isinstance(value, float) else str(value).split(" (")[0]


def _setting(row: Row) -> tuple[Any, ...]:
    return tuple(_written(row[key]) if key == "model" else row[key] for key in _SETTING)


def _figure(row: Row, base: Row | None, metric: str) -> float:
    name = metric.removeprefix("1/")

    def value(of: Row) -> float:
        found = DERIVED[name](of) if name in DERIVED else float(of[name])
        return 1 / found if metric.startswith("1/") else found

    return value(row) if base is None else value(row) / value(base)


@dataclass(frozen=True)
class Variant:
    """A policy of an experiment beside the experiment's first.

    Attributes
    ----------
    experiment, policy : str
    n_settings : int
        Settings in which both ran.
    decode, prefill : float or None
        Geometric mean over them of its decode speed, and of its time to the first token turned into a speed, as shares of
        the first policy's; None where a run has none.
    low, high : float or None
        Smallest and largest share of the decode speed.
    fidelity : float or None
        Least share of gate weight served as routed.
    """

    experiment: str
    policy: str
    n_settings: int
    decode: float | None
    prefill: float | None
    low: float | None
    high: float | None
    fidelity: float | None


def variants(experiment: str, rows: Sequence[Row]) -> list[Variant]:
    """Compare every policy of an experiment with its first.

    Parameters
    ----------
    experiment : str
        Its name.
    rows : sequence of mapping
        Its results.

    Returns
    -------
    list of Variant
        In the experiment's order.
    """
    names = list(dict.fromkeys(str(row["policy"]) for row in rows))
    done = {name: {_setting(row): row for row in _select(rows, name, "")} for name in names}
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
    return [_figure(a, b, metric) for a, b in pairs if a.get(column) and b.get(column)]
