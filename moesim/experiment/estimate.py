"""How long a sweep takes, and what it would do."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.core.units import format_s, format_size
from moesim.engine import chosen
from moesim.errors import MoesimError, WorkloadError
from moesim.experiment.keys import run_keys
from moesim.experiment.resolve import Experiment
from moesim.experiment.rows import describe_run
from moesim.experiment.runner import run_one
from moesim.experiment.spec import RunSpec
from moesim.experiment.store import Store
from moesim.hardware.costs.model import most_chunks
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.policies.user_code import WouldImport, would_import
from moesim.trace.workload.spec import WorkloadSpec, shortened

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.spec import RunSpec


_S_PER_LOOKUP = {"simpy": 50e-6, "native": 5e-6}  # lru; mean of the quickstart's policies
_CHUNK = 0.17  # of a lookup's time: 17.5 us against 101 us, lru on Mixtral's shape with 16, 64 and 256 chunks a transfer
_TRIED_TOKENS, _TRIED_CHUNKS = (4, 16), 64
_TRYING_S = 2.0  # at most, before the runs
_START_S = 2.0  # of a process: interpreter, imports, traces


class Estimate(NamedTuple):
    """How long some runs take."""

    seconds: float  # s: one after another; 0 if no policy could be tried
    n_tried: int  # policies of which a short run succeeded
    failures: tuple[str, ...] = ()  # why other short runs failed, beginning with the policy


class _Pace(NamedTuple):
    """How long the runs of a policy take: s each, and s a lookup."""

    start: float
    each: float


def lookups(experiment: Experiment, spec: RunSpec) -> int:
    """Count how many experts a run has to see to."""
    model = spec.model
    seen = np.minimum(model.n_experts, experiment.workload(spec).steps.n_tokens * model.top_k)
    return model.n_layers * int(seen.sum())


def chunks(experiment: Experiment, spec: RunSpec) -> tuple[int, int]:
    """Count the chunks of a run's transfers."""
    each = most_chunks(spec.model, experiment.transfer(spec)[1])
    return each, each * round(lookups(experiment, spec) * spec.point.share_outside)


def _work(experiment: Experiment, spec: RunSpec) -> float:
    """Count lookups, and chunks beyond the first of a transfer in lookups."""
    each, total = chunks(experiment, spec)
    return lookups(experiment, spec) + _CHUNK * (total - total // each)


def before(experiment: Experiment, specs: Sequence[RunSpec]) -> float:
    """Estimate the seconds of some runs one after another; short ones are tried if it is worth it."""
    took = _S_PER_LOOKUP[chosen()] * sum(_work(experiment, spec) for spec in specs)
    if took <= _START_S:
        return took
    return seconds(experiment, specs, limit_s=_TRYING_S).seconds or took


def worth_processes(took_s: float, n_runs: int, cores: int) -> int:
    """Return how many processes are worth starting for such runs."""
    return min(cores, n_runs) if took_s > _START_S else 1


def seconds(experiment: Experiment, specs: Sequence[RunSpec], *, limit_s: float = 10.0) -> Estimate:
    """Estimate how long some runs take one after another."""
    firsts: dict[str, RunSpec] = {}
    for spec in specs:
        if spec.policy_name not in experiment.not_imported and spec.refusal is None:
            firsts.setdefault(spec.policy_name, spec)
    began = time.perf_counter()
    paces: dict[str, _Pace] = {}
    failures = []
    for name, spec in firsts.items():
        if time.perf_counter() - began > limit_s:
            break
        pace = _pace(experiment, spec)
        if isinstance(pace, MoesimError):
            failures.append(f"{name}: {pace}")
        else:
            paces[name] = pace
    return Estimate(_scaled(experiment, specs, paces) if paces else 0.0, len(paces), tuple(failures))


def _pace(experiment: Experiment, spec: RunSpec) -> _Pace | MoesimError:
    """Time two short runs, of which the longer one has more to do; one if they are the same."""
    times: dict[float, float] = {}
    for tokens in _TRIED_TOKENS:
        tried = spec.in_pieces(_TRIED_CHUNKS)
        short = replace(tried, workload=WorkloadSpec(**shortened(vars(spec.workload), tokens)))
        try:
            tried, work = short, _work(experiment, short)
        except WorkloadError:  # requests that short are not in the trace: try the whole
            work = _work(experiment, tried)
        if work in times:
            continue
        began = time.perf_counter()
        outcome = run_one(experiment, tried)
        times[work] = time.perf_counter() - began
        if outcome.failure is not None:
            return outcome.failure
    (least, first), *more = sorted(times.items())
    if not more:
        return _Pace(0.0, first / least)
    each = max(0.0, (more[0][1] - first) / (more[0][0] - least))
    return _Pace(max(0.0, first - each * least), each)


def _scaled(experiment: Experiment, specs: Sequence[RunSpec], paces: Mapping[str, _Pace]) -> float:
    mean = _Pace(*(sum(values) / len(paces) for values in zip(*paces.values(), strict=True)))
    found = [(paces.get(spec.policy_name, mean), _work(experiment, spec)) for spec in specs]
    return sum(pace.start + pace.each * work for pace, work in found)


def describe_grid(experiment: Experiment, folder: Path | None, jobs: int | None, cores: int) -> str:
    """Describe an experiment without running it, but for a few seconds of short runs."""
    rows = [spec.row() for spec in experiment.specs]
    lines = [f"{name}: {', '.join(values)}" for name, values in _varying(rows)]
    policies = {spec.policy_name: spec.point.policy for spec in experiment.specs}
    found = [would_import(policies[name], entry) for name, entry in experiment.not_imported.items()]
    lines += [_would_import(one) for one in dict.fromkeys(found) if one is not None]
    n_points = len({tuple(map(repr, spec.point.setting)) for spec in experiment.specs})
    n_policies = len({spec.policy_name for spec in experiment.specs})
    of = f" ({n_policies} policies at {n_points} settings)" if len(rows) == n_policies * n_points else ""
    if experiment.not_imported:
        missing = experiment.specs
        lines.append(f"{_counted(len(rows), 'run')}{of}; how many of them are done shows once the policies are imported")
    else:
        there = Store(folder, read_only=True).read() if folder is not None else {}
        missing = [spec for spec, key in zip(experiment.specs, run_keys(experiment), strict=True) if key not in there]
        lines.append(f"{_counted(len(rows), 'run')}{of}, {len(rows) - len(missing)} of them done, {len(missing)} to do")
    lines += [f"cannot run: {describe_run(spec.row())}: {spec.refusal}" for spec in experiment.specs if spec.refusal]
    counts = [chunks(experiment, spec) for spec in missing]
    if any(each > 1 for each, _ in counts):
        each, total = max(each for each, _ in counts), sum(total for each, total in counts if each > 1)
        lines.append(f"chunks: {each:,} a transfer at most, about {total:,} in all")
    if missing:
        estimate = seconds(experiment, missing)
        lines += [f"a short run failed: {why}" for why in estimate.failures]
        n = jobs or worth_processes(estimate.seconds, len(missing), cores)
        n = min(n, cores, len(missing))
        if estimate.n_tried:
            basis = f"from short runs of {_counted(estimate.n_tried, 'policy')}"
            lines.append(f"estimated time: {format_s(estimate.seconds / n)} on {_counted(n, 'process')} ({basis})")
        else:
            lines.append("estimated time: unknown, since no policy could be tried")
    return "\n".join(lines) + "\n"


def _would_import(one: WouldImport) -> str:
    files = " and ".join(str(path) for path in one.files) or "which comes from no file"
    return f"would import and run {one.module} ({files}); its policies are neither checked nor tried here"


def _varying(rows: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    found = []
    for name in ("policy", *SETTINGS, *CACHE_SETTINGS):
        values = list(dict.fromkeys(row[name] for row in rows))
        if len(values) > 1 or name == "policy":
            shown = [value for value in values if value is not None or name not in CACHE_SETTINGS]  # each has one of the two
            found.append((name, [_written(name, value) for value in shown]))
    return found


def _written(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # as in the file
    return format_size(value) if name == "cache_budget_bytes" else f"{value:g}" if isinstance(value, float) else str(value)


def _counted(n: int, what: str) -> str:
    many = {"policy": "policies", "process": "processes"}.get(what, f"{what}s")
    return f"{n} {what if n == 1 else many}"
