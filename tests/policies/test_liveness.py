"""A sample of the runs of `tests/long/campaign_liveness.py`, and runs that once did not end."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.policies.registry import POLICIES
from tests.policies.liveness_kit import MACHINES, PLAIN, SUBJECTS, Case, draw, verdict

SEED = 2
ONE_ROUND = range(len(SUBJECTS))  # policies and parts in turn


@pytest.mark.parametrize("number", ONE_ROUND, ids=lambda number: f"{number}-{SUBJECTS[number].name}")
def test_a_run_with_random_options_machine_and_workload_ends(number: int) -> None:
    case = draw(SEED, number)
    _, finding = verdict(case, both=number % 4 == 0)
    assert not finding, f"{case}: {finding}"


def test_the_sample_covers_all_policies_and_machines() -> None:
    cases = [draw(SEED, number) for number in ONE_ROUND]
    assert {case.subject.name for case in cases} >= set(POLICIES)
    assert {case.machine for case in cases} == set(MACHINES)
    assert sum(case.numbers["decision_ns"] > 0 for case in cases) > len(cases) / 2


# Policy, options, machine, and in which numbers the run differs from `PLAIN`.
FOUND: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    # Answers to what happened during a decision took effect before it.
    ("adapmoe", {"single": 1, "source": "synthetic:0.2"}, "two GPUs",
     {"layers": 7, "experts": 16, "ratio": 0.1, "batches": 2, "prompt": 0, "decode": 7, "decision_ns": 7500, "trace_seed": 35,
      "load_us": 3.0, "cpu_us": 0.3, "latency_us": 5.0}),
    ("mixtral-offloading-spec", {"n_ahead": 3, "writeback": False}, "one GPU",
     {"layers": 2, "experts": 4, "ratio": 0.75, "batches": 2, "prompt": 40, "decode": 7, "prefill_chunk": 5, "pieces": 3,
      "contention": True, "trace_seed": 79, "load_us": 3.0, "cpu_us": 30.0}),
    ("moe-gen", {"launch_tokens": 2}, "one GPU",
     {"layers": 1, "experts": 16, "top_k": 1, "batches": 2, "prompt": 40, "decode": 7, "prefill_chunk": 5,
      "decision_ns": 100000, "contention": True, "trace_seed": 9, "cpu_us": 30.0, "latency_us": 5.0, "share_link": True,
      "host_expert_us": 1.0}),
    # A decision fetched again what it dropped, and waited for its arrival.
    ("pre-gated", {"source": "frequency", "cache": "lru"}, "one GPU",
     {"layers": 5, "experts": 4, "shared": 1, "ratio": 0.5, "batches": 3, "decode": 1, "prefill_chunk": 16, "pieces": 3,
      "contention": True, "trace_seed": 54, "cpu_us": 0.3, "one_medium": True}),
    # What the arena had taken in, but whose place was not free, or what it had given up on its way.
    ("pre-gated", {"source": "synthetic:0.2", "cache": "lifo"}, "one GPU",
     {"layers": 1, "top_k": 1, "ratio": 0.5, "batch": 3, "batches": 3, "micro_batches": 2, "prompt": 40, "decode": 7,
      "prefill_chunk": 5, "pieces": 3, "trace_seed": 87, "gpu_us": 10.0, "share_link": True, "host_expert_us": 1.0}),
    ("pre-gated", {"cache": "lfu", "source": "synthetic:0.2"}, "shipped",
     {"layers": 5, "experts": 16, "top_k": 4, "ratio": 0.75, "batch": 2, "batches": 3, "prompt": 40, "decode": 1,
      "prefill_chunk": 16, "decision_ns": 0, "pieces": 100, "trace_seed": 27}),
    # A copy that was dropped in use was fetched again, stayed, and kept the place for which another one waited.
    ("windowed-belady", {}, "one GPU",
     {"layers": 5, "experts": 4, "top_k": 1, "batch": 5, "batches": 2, "micro_batches": 2, "prompt": 12, "decode": 1,
      "contention": True, "trace_seed": 15, "share_link": True, "host_expert_us": 1.0}),
    ("mixtral-offloading-spec", {"buffer_size": 2}, "one GPU",
     {"layers": 2, "top_k": 1, "shared": 1, "batch": 5, "batches": 3, "micro_batches": 2, "prompt": 0, "refill": True,
      "contention": True, "trace_seed": 70, "gpu_us": 10.0, "one_medium": True}),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "options", "machine", "numbers"), FOUND)
def test_a_run_that_once_did_not_end(policy: str, options: dict[str, Any], machine: str, numbers: dict[str, Any]) -> None:
    subject = next(one for one in SUBJECTS if one.name == policy)
    assert verdict(Case(subject, options, machine, PLAIN | numbers), both=True) == ("ended, on both engines", "")
