"""The key of a run: a hash of all that its result depends on."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from moesim.hardware import HardwareProfile
from moesim.metrics.naming import fingerprint
from moesim.policies.registry import code_names
from moesim.policies.user_code import sources_digest
from moesim.trace.workload.compose import drawn

if TYPE_CHECKING:
    from moesim.experiment.resolve import Experiment
    from moesim.experiment.spec import RunSpec
    from moesim.model import ModelSpec

_ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "engine", "experiment", "hardware", "metrics", "model", "policies", "trace")
"""Packages of moesim that a run goes through; with them count the modules next to the packages, such as ``policy.py``."""
_SOURCES = (".py", ".cpp", ".hpp")
_COMPUTING = ("numpy", "scipy", "simpy")


@cache
def code_digest() -> str:
    """Hash the source of `PACKAGES`, and versions of the libraries that they compute with."""
    files = [*_ROOT.glob("*.py"), *(one for name in PACKAGES for one in _files(name))]
    return _digest(files, " ".join(f"{name} {version(name)}" for name in _COMPUTING))


@cache
def package_digest(name: str) -> str:
    """Hash the source of one package of moesim."""
    return _digest(_files(name))


def _files(package: str) -> list[Path]:
    return [one for one in (_ROOT / package).rglob("*") if one.suffix in _SOURCES]


def _digest(files: list[Path], more: str = "") -> str:
    digest = hashlib.sha256(more.encode())
    for path in sorted(files):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_keys(experiment: Experiment) -> list[str]:
    """Return the key of every run."""
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
    """Return what was drawn, which often does not change with the signals that others need."""
    workload = experiment.workload(spec)
    return [list(workload.requests), drawn(experiment.trace(spec), workload, experiment.signals(spec))]
