"""What a sweep would do: its grid, how much of it is there already, and about how long the rest takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moesim.core.units import format_s, format_size
from moesim.experiment.estimate import chunks, seconds, worth_processes
from moesim.experiment.failed_runs import describe_run
from moesim.experiment.keys import run_keys
from moesim.experiment.resolve import Experiment
from moesim.experiment.store import Store
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS
from moesim.policies.imports import WouldImport, would_import


def describe_grid(experiment: Experiment, folder: Path | None, jobs: int | None, cores: int) -> str:
    """Describe an experiment without running it, but for a few seconds of trying how fast it is."""
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
