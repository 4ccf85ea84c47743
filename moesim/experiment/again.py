"""One run of a result folder with its records: as they were kept, or simulated once more from what the folder says of it.

Machines and models are in the folder. A trace is looked for, and is the right one if its digest is; code of policies that are not
moesim's own is imported only if the reader trusts it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moesim.core.data import noting
from moesim.core.manifest import read_verified
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, TraceError
from moesim.experiment.config import Config, parse_config
from moesim.experiment.resolve import Experiment, written_key
from moesim.experiment.result import read_summary
from moesim.experiment.runner import Kept, run_one
from moesim.experiment.small_inputs import SmallInputs
from moesim.experiment.store import Store
from moesim.experiment.sweep import each_machine, expand
from moesim.experiment.traces import GIVEN
from moesim.hardware import load_hardware
from moesim.metrics.breakdown import breakdown
from moesim.metrics.machine import Machine
from moesim.metrics.naming import LIVE, hardware_label
from moesim.metrics.outcome import Outcome
from moesim.policies.importing import NOT_TRUSTED, reading
from moesim.policies.imports import foreign
from moesim.records import Records
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.shards import PARTS_SUFFIX

RESOLVED = "config.resolved.yaml"


def outcome_of(folder: Path, run: int, *, wanted: Kept = True, trust: bool = False, inputs: Path | None = None) -> Outcome:
    """Give a run of a result folder with its records, or those of so many first steps as are wanted.

    `inputs` is a folder with traces, and with modules of policies that are trusted.
    """
    rows = read_summary(folder)["runs"]
    if not 0 <= run < len(rows):
        raise ConfigError(f"{folder}: expected a run from 0 to {len(rows) - 1}, got {run}")
    row = rows[run]
    place = f"{folder}: run {run} ({row['policy']})"
    if row["error"]:
        raise ConfigError(f"{place}: expected a run that succeeded, got: {row['error']}")
    if LIVE in str(row.get("notes")):
        raise ConfigError(f"{place}: expected a simulated run, got a replay without records")
    config, resolved = _resolved(folder / RESOLVED)
    small = SmallInputs.read(folder)
    with reading(trust=trust):
        if trust and inputs is not None:
            sys.path.append(str(inputs.absolute()))  # last, and for good, as the current folder
        records = Store(folder, read_only=True).records(str(row.get("key")), wanted)
        machine = None if records is None else _machine(config, str(folder / RESOLVED), small, row)
        if records is None or machine is None:
            machine, records = _again(folder, config, resolved, small, rows, run, trust=trust, inputs=inputs)
    whole = records.first_steps is None
    return Outcome(row, machine, records, breakdown(records, machine.kinds, machine.media) if whole else None)


def _resolved(path: Path) -> tuple[Config, dict[str, Any]]:
    try:
        resolved: Any = read_yaml_value(read_verified(path).decode(), str(path))
        written = resolved["experiment"]
    except (OSError, UnicodeDecodeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: expected the configuration of a result, got: {reason}; run the experiment again") from None
    return parse_config(written, str(path)), resolved


def _machine(config: Config, place: str, small: SmallInputs, row: Mapping[str, Any]) -> Machine | None:
    """Find the machine that a row names; None if the experiment has several of that name."""
    with noting(small.texts):
        found = [load_hardware(written, f"{place}: hardware") for written in each_machine(config)]
    named = [Machine.of(one) for one in found if hardware_label(one) == row["hardware"]]
    return named[0] if named and all(one == named[0] for one in named) else None


def _again(
    folder: Path, config: Config, resolved: Mapping[str, Any], small: SmallInputs, rows: list[dict[str, Any]], run: int, *,
    trust: bool, inputs: Path | None,
) -> tuple[Machine, Records]:  # fmt: skip
    """Simulate a run once more, with the others on its trace: what these need decides which requests are drawn."""
    row, file = rows[run], f"{folder}/{RESOLVED}"
    place = f"{folder}: run {run} ({row['policy']})"
    points = expand(config, file, imports=trust)
    others = [] if trust else list(dict.fromkeys(name for point in points for name in foreign(point.policy)))
    needed = foreign(points[run].policy) if len(points) == len(rows) else others
    if needed and not trust:
        raise ConfigError(
            f"{place}: expected its records in the folder, got none, and to simulate it again takes {', '.join(needed)}, "
            f"{NOT_TRUSTED}"
        )
    if len(points) != len(rows):
        raise ConfigError(f"{file}: expected {len(rows)} runs as in the summary, got {len(points)}; run the experiment again")
    written = points[run].trace
    known = {written_key(written): _trace(written, resolved, folder, inputs, place)} if isinstance(written, str) else {}
    same = [point for point in points if point.trace == written]
    experiment = Experiment(config, file, imports=trust, known=known, small=small, points=same)
    spec = experiment.specs[sum(point.trace == written for point in points[:run])]
    outcome = run_one(experiment, spec, keep=True)
    changed = [key for key, value in outcome.row.items() if key in row and row[key] != value and key != "run"]
    changed.sort(key=lambda key: isinstance(row[key], str))  # a number says more than notes
    if changed:
        why = "an input, code of a policy or moesim changed"
        why += f", or it depends on what {', '.join(others)} needs (--trust)" if others else ""
        raise ConfigError(
            f"{place}: expected the same result when simulated again, got another "
            f"{changed[0]}: {row[changed[0]]} before, {outcome.row[changed[0]]} now; {why}; run it again"
        )
    assert outcome.records is not None
    return Machine.of(spec.hardware), outcome.records


def _trace(written: str, resolved: Mapping[str, Any], folder: Path, inputs: Path | None, place: str) -> Trace:
    """Find the trace of a run by its name and digest."""
    try:
        digest = str(resolved["inputs"]["traces"][written]["sha256"])
    except (KeyError, TypeError):
        raise ConfigError(f"{folder}/{RESOLVED}: expected the sha256 of trace {written}, got none; run it again") from None
    got = ""
    for name in dict.fromkeys(map(str, _places(written, folder, inputs))):
        with suppress(TraceError):
            path = find_trace(name)
            got = got or f"another in {path}"
            if (trace := Trace.read(path)).digest == digest:
                return trace
    raise ConfigError(
        f"{place}: expected the trace {written} (sha256 {digest[:16]}) to simulate it again, got {got or 'none of that name'}; "
        f"put it next to {folder}, or name its folder with --inputs DIR (in Python inputs=DIR)"
    )


def _places(written: str, folder: Path, inputs: Path | None) -> Iterator[str | Path]:
    """Give what may be a trace: where the experiment had it, if that moved together with the result, and next to the result."""
    if written.startswith(GIVEN):  # an object of Python, which may have been written since
        yield from sorted(inputs.glob(f"*{SUFFIX}")) if inputs is not None else []
        return
    own = folder.absolute()
    by_path = written.endswith((SUFFIX, PARTS_SUFFIX)) or Path(written).name != written
    below = Path(written) if by_path else Path("traces", f"{written}{SUFFIX}")
    near = [own, own.parent] if inputs is None else [inputs, own, own.parent]
    yield from () if inputs is None else (inputs / below, inputs / below.name)
    yield written
    yield from (above / below for above in (own, *own.parents))
    yield from (place / below.name for place in near)
