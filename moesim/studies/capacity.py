"""Capacity: the largest load at which a share of all requests keeps within limits, by policy.

Load is a Poisson rate, or a number of users of whom each asks again once the answer is there. For each policy and seed the
largest load is enclosed by doubling and bisection; the arrivals of a seed are the same at every rate, only closer together. The
seeds' answers give a mean, of rates on the scale of logarithms, with an interval by Student's t (95 %) from the lower ends of the
enclosures to the upper ones; it is called one of 90 %, since that is how often it contained known capacities. Runs begin with
an empty server, so finite ones find somewhat more than an endless one: at 100 requests 8 % more for random service times (M/M/1),
11 % for equal ones (M/D/1). A run at a rate lasts ten times the longest limit, and the interval reaches down to the requests
that ended while others came, since an endless queue grows beyond these.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

from moesim.core.limits import REPEATS
from moesim.core.progress import Progress
from moesim.core.student import student_t
from moesim.core.table import Format, render, render_records
from moesim.core.units import NS_PER_S
from moesim.errors import ConfigError
from moesim.experiment.report import cost_notes, in_short, number, split_notes
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.experiment.sweep import RunSpec
from moesim.experiment.workers import Workers
from moesim.metrics.naming import cache_asked
from moesim.metrics.serving import GREW, Times
from moesim.serving.steps import Served

WITHIN: Final = 1.1
"""Rates are enclosed until the upper end is at most so many times the lower one; users until they are neighbours."""
MOST: Final = 1024
"""Users, or rates times the time of a lone request, beyond which no upper end is looked for."""
_LONG: Final = 10  # times the longest limit that requests come, so that a rate an eighth above what is served exceeds it
_ROUNDS: Final = 7  # of runs that a search takes, about
_ALONE: Final = 8  # requests of a user alone
_EACH: Final = 6  # requests of each user at least, of which the first is not counted


@dataclass
class Search:
    """The largest load that is good, between two that have been tried."""

    whole: bool  # loads are whole numbers
    start: float  # the first load to try
    good: float = 0.0  # the largest load that was found good; 0: none was
    bad: float = math.inf  # the smallest load that was found bad
    tried: dict[float, Any] = field(default_factory=dict)  # what was found at each load

    @property
    def next(self) -> float | None:
        """The load to try next; None: it is enclosed, or there is no end."""
        if self.bad == math.inf:
            load = max(self.start, 2 * self.good)
            return load if load <= MOST * (1 if self.whole else self.start) else None
        if self.whole:
            return (self.good + self.bad) // 2 if self.bad - self.good > 1 else None
        if self.good == 0:
            return self.bad / 2 if self.bad > self.start / MOST else None
        return math.sqrt(self.good * self.bad) if self.bad > WITHIN * self.good else None

    def found(self, load: float, good: bool, what: Any = None) -> None:
        self.tried[load] = what
        if good:
            self.good = max(self.good, load)
        else:
            self.bad = min(self.bad, load)


class Estimate(NamedTuple):
    """The largest load over several seeds."""

    value: float
    low: float  # with `high`: 90 % interval of the mean over seeds; nan with one seed
    high: float
    bound: str  # "at least": no end was found; "none": no load is good; "": neither


def estimate(searches: Sequence[Search]) -> Estimate:
    """Average the answers of several seeds."""
    if any(one.bad == math.inf for one in searches):
        return Estimate(min(one.good for one in searches), math.nan, math.nan, "at least")
    goods, bads = [one.good for one in searches], [one.bad for one in searches]
    if searches[0].whole:
        low, high = _interval(goods)
        known = not math.isnan(low)
        low, high = (max(0, math.floor(low)), math.ceil(high)) if known else (low, high)
        return Estimate(math.floor(fmean(goods)), low, high, "" if any(goods) else "none")
    if not all(goods):
        return NONE
    (low, _), (_, high) = (_interval([math.log(end) for end in found]) for found in (goods, bads))
    middle = fmean(math.log(good * bad) / 2 for good, bad in zip(goods, bads, strict=True))
    return Estimate(math.exp(middle), math.exp(low), math.exp(high), "")


NONE: Final = Estimate(0.0, math.nan, math.nan, "none")


def _interval(values: Sequence[float]) -> tuple[float, float]:
    n = len(values)
    half = student_t(0.95, n) * stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return fmean(values) - half, fmean(values) + half


Ask = Callable[[Sequence[tuple[Any, float]]], Sequence[tuple[bool, Any] | None]]
"""Tries loads, each for the key of its search: whether it is good, and what was found there; None: it cannot be tried."""


def enclose(searches: Mapping[Any, Search], ask: Ask, done: Callable[[Search], None] = lambda one: None) -> None:
    """Enclose the largest good loads, those of all searches at once; what cannot be tried is given up."""
    failed: set[Any] = set()
    while asked := [(key, load) for key, one in searches.items() if key not in failed and (load := one.next) is not None]:
        for (key, load), answer in zip(asked, ask(asked), strict=True):
            if answer is None:
                failed.add(key)
            else:
                searches[key].found(load, *answer)
            done(searches[key])


@dataclass(frozen=True)
class Asked:
    """The question of a study of capacity."""

    users: bool  # whether loads are numbers of users
    share: float  # of requests that must keep within limits
    seeds: int
    requests: int  # of a run at least; with users `_EACH` of each, at a rate those that come in `_LONG` times the longest limit

    @property
    def unit(self) -> str:
        return "users" if self.users else "requests/s"


class Trial(NamedTuple):
    """One run at one load."""

    row: Mapping[str, Any]
    share: float  # of its requests within limits
    missed: Counter[str]  # requests that missed each limit
    ended_per_s: float  # requests that ended while others came


@dataclass(frozen=True)
class Capacity:
    """The capacity of one policy."""

    policy: str
    found: Estimate | None  # None: it cannot run
    at: tuple[Trial, ...] = ()  # of each seed at the largest load that is good; of one user alone if none is
    missed: str = ""  # the limit that most requests miss just beyond
    error: str | None = None

    def mean(self, key: str, scale: float = 1.0) -> float | None:
        """Average a number of the rows at the largest load over seeds."""
        values = [value for trial in self.at if (value := number(trial.row, key, scale)) is not None]
        return fmean(values) if values else None


def judge(served: Served, limits: Mapping[str, float], users: int) -> tuple[float, Counter[str]]:
    """Return the share of requests within limits, and how many missed each; the first of each user is left out."""
    counted = [one for one in served.requests if one.request >= users]
    times = Times.of(served._replace(requests=counted))
    missed = Counter({name: int((~times.good({name: most})).sum()) for name, most in limits.items()})
    return (float(times.good(limits).sum()) / len(counted) if counted else 0.0), missed


def ended_per_s(served: Served) -> float:
    """Return the requests a second that ended until the last one arrived."""
    last = max((one.arrival for one in served.requests), default=0)
    return sum(0 <= one.end <= last for one in served.requests) * NS_PER_S / last if last else 0.0


def capacities(experiment: Experiment, asked: Asked, *, jobs: int | None = None, progress: bool = False) -> list[Capacity]:
    """Search the capacity of each policy of an experiment, whose workload is one user with limits."""
    specs = {spec.policy_name: spec for spec in experiment.specs}
    if len(specs) < len(experiment.specs):
        n = len(experiment.specs) // len(specs)
        raise ConfigError(f"{experiment.place}: expected one setting of each policy, got {n}; give one value of each key")
    with Progress(len(specs) * (1 + asked.seeds * _ROUNDS), enabled=progress) as bar, Workers(jobs) as workers:
        bar.describe("one user alone")
        alone = dict(
            zip(specs, _tried(experiment, [_loaded(one, asked, None, 0) for one in specs.values()], workers), strict=True)
        )
        bar.advance(len(specs))
        errors = {name: trial for name, trial in alone.items() if isinstance(trial, str)}
        searches: dict[tuple[str, int], Search] = {}
        for name, trial in alone.items():
            if isinstance(trial, str) or trial.share < asked.share:
                bar.leave_out(asked.seeds * _ROUNDS)
                continue
            start = 1.0 if asked.users else NS_PER_S / float(trial.row["e2e_mean_ns"])
            searches |= {(name, seed): Search(asked.users, start) for seed in range(asked.seeds)}

        def ask(loads: Sequence[tuple[tuple[str, int], float]]) -> list[tuple[bool, Any] | None]:
            bar.describe(f"{len(loads)} loads of {', '.join(dict.fromkeys(name for (name, _), _ in loads))}")
            trials = _tried(experiment, [_loaded(specs[name], asked, load, seed) for (name, seed), load in loads], workers)
            errors.update((name, one) for ((name, _), _), one in zip(loads, trials, strict=True) if isinstance(one, str))
            return [None if isinstance(one, str) else (one.share >= asked.share, one) for one in trials]

        def done(one: Search) -> None:
            n = len(one.tried)
            bar.advance(n <= _ROUNDS)  # who would have known that it takes more
            if one.next is None and n < _ROUNDS:
                bar.leave_out(_ROUNDS - n)

        enclose(searches, ask, done)
    by_policy = {name: [one for (of, _), one in searches.items() if of == name] for name in specs}
    return [_capacity(name, alone[name], by_policy[name], errors.get(name)) for name in specs]


def _loaded(spec: RunSpec, asked: Asked, load: float | None, seed: int) -> RunSpec:
    """Return the run of a policy at a load; None: of one user alone."""
    workload = replace(spec.workload, seed=spec.workload.seed + seed)
    if load is None:
        workload = replace(workload, n_requests=_ALONE)
    elif asked.users:
        workload = replace(workload, closed=int(load), n_requests=max(asked.requests, _EACH * int(load)))
    else:
        longest = max((most for name, most in workload.limit_seconds.items() if name != "tpot_s"), default=0.0)
        n = max(asked.requests, min(int(REPEATS.most), math.ceil(_LONG * longest * load)))
        workload = replace(workload, arrivals="poisson", rate=load, closed=None, think_s=None, n_requests=n)
    return replace(spec, workload=workload)


def _tried(experiment: Experiment, specs: Sequence[RunSpec], workers: Workers) -> list[Trial | str]:
    """Run some runs; return what was found, or why one cannot run."""
    trials: list[Trial | str] = []
    for outcome, spec in zip(run_experiment(experiment.of(specs), workers=workers, may_fail=True).outcomes, specs, strict=True):
        served = None if outcome.records is None else outcome.records.served
        users = spec.workload.closed or 0
        trials.append(
            str(outcome.failure) if served is None
            else Trial(outcome.row, *judge(served, spec.workload.limit_seconds, users if users > 1 else 0), ended_per_s(served))
        )  # fmt: skip
    return trials


def _capacity(policy: str, alone: Trial | str, searches: Sequence[Search], error: str | None) -> Capacity:
    if error is not None or isinstance(alone, str):
        return Capacity(policy, None, error=error)
    found = estimate(searches) if searches else NONE
    at = tuple(one.tried[one.good] for one in searches if one.good) or (alone,)
    beyond = [one.tried[one.bad] for one in searches if one.bad in one.tried] or [alone]
    missed = sum((one.missed for one in beyond), Counter[str]())
    if not math.isnan(found.low) and not searches[0].whole:
        found = found._replace(low=min(found.low, fmean(one.ended_per_s for one in at)))
    return Capacity(policy, found, at, max(missed, key=lambda name: missed[name]) if missed.total() else "")


def records(found: Sequence[Capacity], asked: Asked) -> list[dict[str, Any]]:
    """Return a row a policy: `capacity.csv`."""
    rows = []
    for one in found:
        capacity, row = one.found or NONE._replace(value=math.nan, bound=""), one.at[0].row if one.at else {}
        rows.append({
            "policy": one.policy, "unit": asked.unit, "capacity": capacity.value, "low": capacity.low, "high": capacity.high,
            "bound": capacity.bound, "ttft_p50_s": one.mean("ttft_p50_ns", 1 / NS_PER_S),
            "ttft_p99_s": one.mean("ttft_p99_ns", 1 / NS_PER_S), "tpot_p50_s": one.mean("tpot_p50_ns", 1 / NS_PER_S),
            "answer_tokens_per_s": one.mean("answer_tokens_per_s"), "requests_per_s": one.mean("requests_per_s"),
            "share": asked.share, "missed_beyond": one.missed, "seeds": asked.seeds, "requests": asked.requests,
            "asked": _question(row, asked) if row else None, "label": row.get("source_label"), "notes": row.get("notes"),
            "error": one.error,
        })  # fmt: skip
    return rows


def _question(row: Mapping[str, Any], asked: Asked) -> str:
    limits = str(row["limits"]).translate(str.maketrans("", "", '{}"'))
    think = f", {row['think_s']:g} s to think" if asked.users and row.get("think_s") else ""
    return (
        f"{row['model']} on {row['hardware']}, {row['scheduler']}, prompt {row['prompt_tokens']}, answer {row['answer_tokens']}"
        f"{think}, cache {cache_asked(row)}; {100 * asked.share:g} % within {limits}"
    )


_OF_A_RUN: Final = re.compile(rf"{GREW}|\d+ requests of ")  # notes that change with the load
_HEAD: Final = ("policy", "90 % interval", "TTFT p50", "p99", "TPOT p50", "tok/s", "req/s", "missed beyond", "label")


def table(found: Sequence[Capacity], asked: Asked, form: Format) -> str:
    """Write the capacities: the load, and next to it how long requests wait there."""
    rows = records(found, asked)
    if form.for_programs:
        return render_records(rows, form)
    names = [_HEAD[0], asked.unit, *_HEAD[1:]]
    cells = [[row["policy"], *_answer(row), *_there(row)] for row in rows]
    questions = dict.fromkeys(row["asked"] for row in rows if row["asked"])
    method = "Student's t" + (
        "" if asked.users else " of logarithms, the last step of the search, and what ended while others came"
    )
    done = [one.at[0].row for one in found if one.at]
    shared = dict.fromkeys(note for row in done for note in split_notes(row)[0] if not _OF_A_RUN.match(note))
    notes = [
        *questions,
        f"{asked.seeds} seeds of {asked.requests} requests or more, at first none inside; interval of the mean: {method}",
        "times and tokens: at that load; where it is none, of one user alone",
        *([f"notes: {', '.join(shared)}"] if shared else []),
        *in_short(cost_notes(done), "capacity.csv of --out lists"),
        *(f"failed: {one.policy}: {one.error}" for one in found if one.error),
    ]
    return render(names, cells, form, names[1:8]) + "\n" + ("\n\n" if form is Format.MD else "\n").join(notes) + "\n"


def _answer(row: Mapping[str, Any]) -> list[str]:
    if row["error"]:
        return ["failed", ""]
    value = "none" if row["bound"] == "none" else f"{row['bound']} {row['capacity']:.3g}".strip()
    return [value, "-" if math.isnan(row["low"]) else f"{row['low']:.3g} to {row['high']:.3g}"]


def _there(row: Mapping[str, Any]) -> list[str]:
    def cell(key: str, unit: str = "") -> str:
        return "-" if row[key] is None else f"{row[key]:.3g}{unit}"

    times = [cell(key, " s") for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s")]
    missed = str(row["missed_beyond"]).removesuffix("_s").upper() or "-"
    return [*times, cell("answer_tokens_per_s"), cell("requests_per_s"), missed, str(row["label"] or "-")]


def files_of(found: Sequence[Capacity], asked: Asked) -> dict[str, bytes]:
    """Return ``capacity.csv`` and the figure."""
    import pandas as pd

    from moesim.plots.serving import capacity as figure  # Matplotlib takes most of a second to import
    from moesim.plots.style import written

    rows = records(found, asked)
    files = {"capacity.csv": render_records(rows, Format.CSV).encode()}
    drawn = [row for row in rows if not row["error"]]
    return files | (written(figure.drawing(pd.DataFrame(drawn)), "capacity") if drawn else {})
