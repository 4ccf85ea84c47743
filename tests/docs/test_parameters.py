"""A parameter of a run is named in few files on its way from an experiment file to the engine, a row and a key."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from moesim.experiment.sweep import Point
from moesim.trace.workload import WorkloadSpec

PACKAGE = Path(__file__).resolve().parents[2] / "moesim"
MOST = 5
WAY = "experiment/* engine/* hardware/* metrics/* trace/workload/* trace/predictors.py trace/made.py policy.py fits.py"
INPUTS = ("model", "hardware", "trace", "workload", "policy")  # fields of a run that are whole things, not parameters
ALSO = {"budget_bytes": "budget", "chunk_bytes": "chunk", "curve": "transfer_curve"}  # other names for the same value

OTHERS = {  # where the word means another thing
    "curve": "hardware/build.py hardware/costs/model.py hardware/costs/curves.py hardware/costs/provenance.py "
    "hardware/costs/model.py metrics/bounds.py",  # any curve of a profile
    "engine_profile": "engine/entry.py experiment/report.py experiment/store.py hardware/engines.py "
    "hardware/load.py hardware/rates.py hardware/schema.py hardware/costs/operations.py "
    "experiment/runner.py",  # the simulator's; of a profile
    "chunk_bytes": "experiment/store.py trace/workload/*",  # of a table; of a prefill
    "predictors": "engine/* experiment/runner.py",  # all sources that a policy may ask; here those that stand in for others
    "rate": "engine/* experiment/routing.py hardware/*",  # of work under contention; of a link; of bytes
    "n_requests": "engine/* fits.py hardware/*",  # of a step; that have a cache
    "seed": "experiment/routing.py trace/made.py",  # of routing that is made up
    "refill": "metrics/frames.py",  # of a cache
    "repeat": "metrics/frames.py metrics/hits.py trace/workload/compose.py",  # of an array
    "intervals": "hardware/costs/model.py metrics/utilisation.py",  # of numbers of a profile; of time
    "requests": "engine/steps.py experiment/resolve.py experiment/runner.py experiment/routing.py "
    "metrics/bounds.py policy.py trace/made.py trace/workload/compose.py "
    "experiment/folder.py experiment/store.py metrics/frames.py metrics/serving.py",
}  # those of a step, those that were drawn, how many are made up, what became of them

EXCEPTIONS = {  # files, and why
    "seed": (6, "it draws requests and also seeds predictors that are made up, whose interface names it"),
}


class Parameter(NamedTuple):
    name: str
    words: frozenset[str]


def parameters() -> Iterator[Parameter]:
    for one in fields(Point):
        if one.name not in INPUTS:
            words = {one.name, one.metadata.get("key"), one.metadata.get("column"), ALSO.get(one.name)}
            yield Parameter(one.name, frozenset(word for word in words if word))
    for one in fields(WorkloadSpec):
        yield Parameter(one.name, frozenset({one.name, f"workload.{one.name}"}))


def words_of(path: Path) -> set[str]:
    """Names and whole strings of a file's code; its texts and remarks do not count."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
                found.add(word)
            case ast.Constant(value=str(word)):
                found.add(word)
    return found


def fits(path: str, patterns: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns.split())


@cache
def files() -> dict[str, set[str]]:
    """Words of the files on the way."""
    names = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: words_of(path) for name, path in names.items() if fits(name, WAY)}


PARAMETERS = {one.name: one for one in parameters()}


def naming(one: Parameter) -> list[str]:
    return [path for path, words in files().items() if words & one.words]


def test_all_parameters_are_there():
    assert {"ratio", "decision_us", "batch_size", "reuse", "predictors"} <= set(PARAMETERS)
    assert set(OTHERS) | set(EXCEPTIONS) | set(ALSO) <= set(PARAMETERS)


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_a_parameter_is_named_in_few_files(name: str):
    found = [path for path in naming(PARAMETERS[name]) if not fits(path, OTHERS.get(name, ""))]
    assert "experiment/sweep.py" in found or "trace/workload/spec.py" in found  # where it is declared
    if name in EXCEPTIONS:
        assert len(found) == EXCEPTIONS[name][0], f"{name}: {found}"
    else:
        assert len(found) <= MOST, f"{name}: {found}; pass it inside Point, RunSpec, WorkloadSpec or EngineOptions"


@pytest.mark.parametrize("name", list(OTHERS))
def test_words_with_another_meaning_are_still_there(name: str):
    found = naming(PARAMETERS[name])
    for pattern in OTHERS[name].split():
        assert any(fnmatch(path, pattern) for path in found), f"{name}: {pattern}"
