"""Small served workloads, run at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moesim.engine import simulate
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.policies.registry import make_policy
from moesim.records import Records

MADE = {"synthesize": "mixtral-8x7b", "requests": 3, "prompt": 6, "decode": 5}


def experiment(workload: dict[str, Any], policy: Any = "on-demand", **changes: Any) -> Experiment:
    raw = {
        "model": "mixtral-8x7b", "hardware": "rtx3090-epyc7532", "trace": MADE, "workload": workload, "cache": {"ratio": 0.125},
        "policies": [policy],
    }  # fmt: skip
    return Experiment(parse_config(raw | changes, "a.yaml"), "a.yaml")


def run(workload: dict[str, Any], policy: str = "on-demand", engine: str | None = None, **changes: Any) -> Records:
    """Run one policy over a served workload."""
    found = experiment(workload, policy, **changes)
    (spec,) = found.specs
    made: Any = make_policy(spec.point.policy)
    slots = {"gpu0": spec.cache_slots or 0}
    return simulate(
        model=spec.model, costs=spec.costs(made), workload=found.workload(spec), policy=made, cache_slots=slots, engine=engine
    )  # fmt: skip


def own_module(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Write `my_module.py` of a user into the current folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    (folder / "my_module.py").write_text(text)
