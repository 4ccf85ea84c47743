"""One run of a result folder with its records: as they were kept, or simulated once more from what the folder says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moesim.core.manifest import read_verified
from moesim.errors import ConfigError
from moesim.experiment.config import parse_config
from moesim.experiment.keys import run_keys
from moesim.experiment.resolve import Experiment
from moesim.experiment.result import read_summary
from moesim.experiment.runner import run_one
from moesim.experiment.store import Store
from moesim.metrics.breakdown import breakdown
from moesim.metrics.machine import Machine
from moesim.metrics.naming import LIVE
from moesim.metrics.outcome import Outcome
from moesim.records import Records

RESOLVED = "config.resolved.yaml"


def outcome_of(folder: Path, run: int) -> Outcome:
    """Give a run of a result folder with its records."""
    rows = read_summary(folder)["runs"]
    if not 0 <= run < len(rows):
        raise ConfigError(f"{folder}: expected a run from 0 to {len(rows) - 1}, got {run}")
    row = rows[run]
    if row["error"]:
        raise ConfigError(f"{folder}: run {run} ({row['policy']}): expected a run that succeeded, got: {row['error']}")
    if LIVE in str(row.get("notes")):
        raise ConfigError(f"{folder}: run {run} ({row['policy']}): expected a simulated run, got a replay without records")
    experiment = _experiment(folder, imports=False)
    records = _kept(folder, experiment, rows, run)
    if records is None and experiment.not_imported:
        experiment = _experiment(folder, imports=True)
        records = _kept(folder, experiment, rows, run)
    if len(experiment.specs) != len(rows):
        n = len(experiment.specs)
        raise ConfigError(f"{folder}/{RESOLVED}: expected {len(rows)} runs as in the summary, got {n}; run the experiment again")
    spec = experiment.specs[run]
    if records is None:
        outcome = run_one(experiment, spec, keep=True)
        changed = [key for key, value in outcome.row.items() if key in row and row[key] != value]
        if changed:
            raise ConfigError(
                f"{folder}: run {run} ({row['policy']}): expected the same result when simulated again, got another "
                f"{changed[0]}: {row[changed[0]]} before, {outcome.row[changed[0]]} now; an input or moesim changed; run it again"
            )
        records = outcome.records
        assert records is not None
    machine = Machine.of(spec.hardware)
    return Outcome(row, machine, records, breakdown(records, machine.kinds, machine.media))


def _kept(folder: Path, experiment: Experiment, rows: Sequence[Mapping[str, Any]], run: int) -> Records | None:
    """Read records of the run's own inputs: with others, they would tell of a machine that never was."""
    key = rows[run].get("key")
    if len(experiment.specs) != len(rows) or run_keys(experiment)[run] != key:
        return None
    return Store(folder, read_only=True).records(str(key))


def _experiment(folder: Path, *, imports: bool) -> Experiment:
    path = folder / RESOLVED
    try:
        resolved: Any = yaml.safe_load(read_verified(path).decode())
        written = resolved["experiment"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: expected the configuration of a result, got: {reason}; run the experiment again") from None
    return Experiment(parse_config(written, str(path)), str(path), imports=imports)
