"""Machines with several GPUs: those that a policy leaves idle, and layers split over them."""

from __future__ import annotations

from pathlib import Path

from moesim.experiment.report import footer
from moesim.experiment.runner import run_one
from tests.experiment.experiment_kit import resolve

TWO = "rtx3090x2-epyc7532"
IDLE = "gpu1 is idle (this is the speed without it)"


def test_a_gpu_that_a_policy_leaves_idle_is_named(tmp_path: Path) -> None:
    both = {"name": "dali-multi-gpu", "prefetch_size": 0}
    found = resolve(tmp_path, hardware=TWO, policies=["lru", both, {**both, "n_gpus": 1}])
    rows = [run_one(found, spec).row for spec in found.specs]
    assert [IDLE in str(row["notes"]).split(", ") for row in rows] == [True, False, True]
    assert sum(line.startswith(f"{IDLE}: lru, dali-multi-gpu") for line in footer(rows, rows, "")) == 1


def test_a_machine_with_one_gpu_has_no_such_note(tmp_path: Path) -> None:
    found = resolve(tmp_path, policies=["lru"])
    assert "idle" not in str(run_one(found, found.specs[0]).row["notes"])
