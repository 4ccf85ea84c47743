"""What a run's result depends on, as one hash: results of another trace, profile, option or version are never taken for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.hardware import HardwareProfile
from moesim.metrics.naming import fingerprint
from moesim.policies.imports import code_names
from moesim.policies.sources import sources_digest
from moesim.trace.workload.compose import drawn

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.spec import RunSpec
    from moesim.model import ModelSpec

CODE = (
    "__init__.py", "capacity.py", "errors.py", "policy.py", "records.py", "core/collector.py", "core/colours.py",
    "core/data.py", "core/limits.py", "core/record_table.py", "core/text.py", "core/threads.py", "core/units.py",
    "core/yaml_reader.py", "engine", "experiment/beginning.py", "experiment/budget.py", "experiment/intervals.py",
    "experiment/needs.py", "experiment/runner.py", "experiment/spec.py", "experiment/traces.py", "hardware", "metrics", "model",
    "policies", "trace",
)  # fmt: skip
"""Files and packages of moesim that a run goes through; what draws, prints or stores is not among them."""
_SOURCES = (".py", ".cpp", ".hpp")
_PACKAGES = ("numpy", "scipy", "simpy")


@cache
def code_digest() -> str:
    """Hash the source of all that a run goes through (`CODE`), and the versions of the packages that it computes with."""
    return source_digest(CODE, " ".join(f"{name} {version(name)}" for name in _PACKAGES))


@cache
def source_digest(names: Sequence[str], more: str = "") -> str:
    """Hash the source of files and packages of moesim, after some text."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(more.encode())
    for name in names:
        for path in _sources(root / name):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _sources(path: Path) -> list[Path]:
    """List a file, or the Python and C++ files of a package."""
    return sorted(one for one in path.rglob("*") if one.suffix in _SOURCES) if path.is_dir() else [path]


def run_keys(experiment: Experiment) -> list[str]:
    """Give the key of every run."""
    hashes: dict[int, str] = {}  # by identity: runs share models and machines

    def content(thing: ModelSpec | HardwareProfile) -> str:
        if id(thing) not in hashes:
            hashes[id(thing)] = fingerprint(thing.figures())
        return hashes[id(thing)]

    used = {code_names(spec.point.policy) for spec in experiment.specs}
    sources = {names: sources_digest(names) for names in used}

    def key(spec: RunSpec) -> str:
        inputs = {
            "code": code_digest(),
            "model": content(spec.model),
            "hardware": content(spec.hardware),
            "trace": experiment.trace(spec).digest,
            "requests": _requests(experiment, spec),
            "policy_source": sources[code_names(spec.point.policy)],
        }
        return fingerprint({**inputs, **spec.asked()})

    return [key(spec) for spec in experiment.specs]


def _requests(experiment: Experiment, spec: RunSpec) -> list[object]:
    """What was drawn, rather than the signals that other policies of the experiment need: often those change nothing."""
    workload = experiment.workload(spec)
    return [list(workload.requests), drawn(experiment.trace(spec), workload, experiment.signals(spec))]
