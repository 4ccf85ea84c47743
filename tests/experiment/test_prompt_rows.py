"""Prompts that a policy's engine splits, where the workload does not say how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.errors import ConfigError
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import run_one
from moesim.policies.systems.caches import LRU
from tests.experiment.experiment_kit import resolve


class Fives(LRU):
    """An engine that takes five rows of prompts at once."""

    prompt_rows: Any = 5  # a property of what it derives from


class Wrong(LRU):
    """One that says so in words."""

    prompt_rows: Any = "5"


FIVES, WRONG = (f"{__name__}:{cls.__name__}" for cls in (Fives, Wrong))


def experiment(folder: Path, *policies: Any, chunk: int | None = None, **workload: Any) -> Experiment:
    asked = {"batch_size": 2, "prompt_tokens": 6, "decode_tokens": 2, "prefill_chunk": chunk, **workload}
    return resolve(folder, workload=asked, policies=list(policies))


def rows(found: Experiment) -> list[list[int]]:
    """Rows of each prefill step of each run."""
    return [[s.n_tokens for s in found.workload(spec).steps if s.phase == "prefill"] for spec in found.specs]


def test_longer_prompts_go_in_several_steps_of_this_policy_alone(tmp_path: Path) -> None:
    found = experiment(tmp_path, "lru", FIVES, "llama-cpp")
    assert rows(found) == [[12], [5, 5, 2], [12]], "12 rows are less than the usual 512"
    whole, split, other = (run_one(found, spec).row for spec in found.specs)
    assert split["error"] is None and split["prefill_chunk"] is None, "a row says what was asked of all"
    assert split["ttft_mean_ns"] != whole["ttft_mean_ns"]
    said = [{note for note in str(row["notes"]).split(", ") if "prompts in" in note} for row in (whole, split, other)]
    assert said == [set(), {"prompts in steps of at most 5 rows (its engine's)"}, set()]


@pytest.mark.parametrize("chunk", [4, 7, 100])
def test_what_the_workload_says_counts(chunk: int, tmp_path: Path) -> None:
    found = experiment(tmp_path, FIVES, "lru", chunk=chunk)
    assert rows(found)[0] == rows(found)[1]
    assert len({found.workload(spec).digest for spec in found.specs}) == 1


def test_a_policy_that_says_it_wrongly_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policies\[0\]: prompt_rows: expected a number of at least 1, or None, got '5'"):
        experiment(tmp_path, WRONG)


@pytest.mark.parametrize(
    ("name", "most"),
    [("llama-cpp", 512), ("llama-cpp-fit", 512), ("llama-cpp-cache", 512), ("pooled-cache", 512), ("turboquant-cache", 512),
     ("two-uploads-lru", 512), ("heat-cache", 512), ("fabric-lru", 512), ("dfa-cache", 512), ("fiddler", None), ("strata", 4096),
     ({"name": "strata", "prefill": 1024}, 1024)],
)  # fmt: skip
def test_engines_take_as_many_rows_as_they_do(name: Any, most: int | None, tmp_path: Path) -> None:
    (spec,) = experiment(tmp_path, name).specs
    assert spec.prompt_rows == most
