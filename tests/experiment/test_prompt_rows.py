"""Prompts that a policy's engine splits, whatever the workload says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import run_one
from tests.experiment.experiment_kit import resolve

FIT = "llama-cpp-fit"


def experiment(folder: Path, *policies: Any, chunk: int | None = None, prompt: int = 6) -> Experiment:
    workload = {"batch_size": 2, "prompt_tokens": prompt, "decode_tokens": 2, "prefill_chunk": chunk}
    return resolve(folder, workload=workload, policies=list(policies))


def rows(found: Experiment) -> list[list[int]]:
    """Rows of each prefill step of each run."""
    return [[s.n_tokens for s in found.workload(spec).steps if s.phase == "prefill"] for spec in found.specs]


@pytest.mark.parametrize("name", ["llama-cpp", FIT])
def test_longer_prompts_go_in_several_steps_of_this_policy_alone(name: str, tmp_path: Path) -> None:
    found = experiment(tmp_path, "lru", {"name": name, "n_ubatch": 5}, name)
    assert rows(found) == [[12], [5, 5, 2], [12]], "12 rows are less than the usual 512"
    split, whole = (run_one(found, spec).row for spec in found.specs[1:])
    assert split["error"] is None and split["prefill_chunk"] is None, "a row says what was asked of all"
    assert split["ttft_mean_ns"] != whole["ttft_mean_ns"]
    assert "prompts in steps of 5 rows at most" in str(split["notes"]) and "prompts in" not in str(whole["notes"])


def test_the_smaller_of_both_counts(tmp_path: Path) -> None:
    found = experiment(tmp_path, {"name": FIT, "n_ubatch": 5}, {"name": FIT, "n_ubatch": 3}, "lru", chunk=4)
    assert rows(found) == [[4, 4, 4], [3, 3, 3, 3], [4, 4, 4]]
    first, split, other = (found.workload(spec).digest for spec in found.specs)
    assert first == other != split


@pytest.mark.parametrize(
    ("name", "most"),
    [("llama-cpp-cache", 512), ("pooled-cache", 512), ("turboquant-cache", 512), ("two-uploads-lru", 512), ("heat-cache", 512),
     ("fabric-lru", 512), ("dfa-cache", 512), ("fiddler", None)],
)  # fmt: skip
def test_engines_that_come_from_llama_cpp_do_as_it_does(name: str, most: int | None, tmp_path: Path) -> None:
    (spec,) = experiment(tmp_path, name).specs
    assert spec.prompt_rows == most
