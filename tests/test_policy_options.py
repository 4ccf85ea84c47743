"""Every option of every shipped policy and part changes what happens; one that has no table entry here fails."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.policies.base import option_parameters
from moesim.policies.part_names import PARTS
from moesim.policies.registry import POLICIES, make_policy, policy_class
from moesim.records import Records
from moesim.testing import run_tiny, tiny_workload

PREDICTED = {"name": "predicted", "source": "oracle", "size": 2}
STATIC = {"replacement": "static", "assignment": "greedy"}
CACHES = {  # what all caches share
    "placement": {"placement": "highest-ids"},
    "assignment": {"assignment": "greedy"},
    "prefetch": {"prefetch": PREDICTED},
    "scope": {"scope": "global"},
}

# Policy -> option -> what it is changed to, and (second) what is set on both sides.
CHANGES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "belady": {key: (value, {}) for key, value in CACHES.items()},
    "fifo": {key: (value, {}) for key, value in CACHES.items()},
    "lfu": {key: (value, {}) for key, value in CACHES.items()},
    "lru": {key: (value, {}) for key, value in CACHES.items()},
    "random": {key: (value, {}) for key, value in {**CACHES, "seed": {"seed": 1}}.items()},
    "static": {
        "placement": ({"placement": "lowest-ids"}, {}),
        "assignment": ({"assignment": "greedy"}, {}),
        "prefetch": ({"prefetch": PREDICTED}, {}),
        "scope": ({"scope": "per-layer"}, {"placement": "random"}),
        "staging_slots": ({"staging_slots": 1}, {}),
    },
    "composed": {
        **{key: (value, {}) for key, value in CACHES.items()},
        "replacement": ({"replacement": "lfu"}, {}),
        "staging_slots": ({"staging_slots": 1}, {"replacement": "static"}),
        "load_order": ({"load_order": "rows"}, {}),
        "cache_only": ({"cache_only": True}, {**STATIC, "prefetch": PREDICTED}),
    },
    "on-demand": {"staging_slots": ({"staging_slots": 1}, {})},
    "mixtral-offloading": {"buffer_size": ({"buffer_size": 2}, {}), "writeback": ({"writeback": False}, {})},
    "fiddler": {
        "rule": ({"rule": "code"}, {}),
        "serial": ({"serial": True}, {}),
        "placeholders": ({"placeholders": 3}, {}),
    },
    "llama-cpp": {
        "n_gpu_layers": ({"n_gpu_layers": 2}, {"op_offload": False}),
        "n_cpu_moe": ({"n_cpu_moe": 4}, {"op_offload": False}),
        "op_offload": ({"op_offload": False}, {"op_offload_min_rows": 1}),
        "op_offload_min_rows": ({"op_offload_min_rows": 5}, {}),
        "staging_slots": ({"staging_slots": 1}, {"op_offload_min_rows": 1}),
    },
    "dali": {
        "assignment": ({"assignment": "all-gpu"}, {}),
        "w_size": ({"w_size": 1}, {}),
        "u_size": ({"u_size": 0}, {}),
        "firing": ({"firing": "printed"}, {}),
        "only_if_better": ({"only_if_better": True}, {"u_size": 3}),
        "blocking": ({"blocking": True}, {"w_size": 1, "u_size": 2}),
        "relabel": ({"relabel": True}, {"w_size": 1, "u_size": 2}),
        "prefetch_size": ({"prefetch_size": 2}, {}),
        "prefetch_source": ({"prefetch_source": "synthetic:0.2"}, {}),
        "prefetch_over": ({"prefetch_over": "non-resident"}, {}),
        "prefetch_buffers": ({"prefetch_buffers": 2}, {"prefetch_size": 2}),
        "cache_only": ({"cache_only": True}, {"prefetch_size": 3}),
        "placement": ({"placement": "lowest-ids"}, {}),
        "staging_slots": ({"staging_slots": 1}, {"assignment": "all-gpu"}),
    },
}
ELSEWHERE = {
    ("all-gpu", "assume_fits"),  # tests/test_policies.py: the placement says so, and tests/test_experiment.py: the label
    ("dali", "lane"),  # tests/test_policies_by_hand.py: needs a machine with a side lane
    ("predicted", "lane"),
}

PREFETCH_CHANGES: dict[str, dict[str, Any]] = {
    "source": {"source": "synthetic:0.2"},
    "size": {"size": 3},
    "pool": {"pool": "cache"},
    "buffers": {"buffers": 3},
    "over": {"over": "non-resident"},
    "lookahead": {"lookahead": 2},
}
# Part -> option -> changed value; those of the workload-aware cache are DALI's.
PART_CHANGES: dict[tuple[str, str], dict[str, Any]] = {
    ("placement", "random"): {"seed": 3},
    ("replacement", "random"): {"seed": 3},
    ("assignment", "beam"): {"width": 1},
}


def happened(name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """Run a policy on the tiny machine; return all that the records say happened."""
    spec = {"name": name, **options}
    records: Records = run_tiny(make_policy(spec), tiny_workload(make_policy(spec), 4), 12)
    return records.tasks, records.transfers, records.evictions


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, options in CHANGES.items() for option in options], ids=lambda x: str(x)
)
def test_an_option_changes_what_happens(name: str, option: str) -> None:
    changed, both = CHANGES[name][option]
    assert set(changed) == {option}
    assert happened(name, {**both, **changed}) != happened(name, both)


@pytest.mark.parametrize("option", PREFETCH_CHANGES)
def test_an_option_of_prefetching_changes_what_happens(option: str) -> None:
    changed = {**PREDICTED, **PREFETCH_CHANGES[option]}
    assert happened("lru", {"prefetch": changed}) != happened("lru", {"prefetch": PREDICTED})


@pytest.mark.parametrize(("kind", "name"), PART_CHANGES)
def test_an_option_of_a_part_changes_what_happens(kind: str, name: str) -> None:
    changed = {"name": name, **PART_CHANGES[kind, name]}
    assert happened("composed", {kind: changed}) != happened("composed", {kind: name})


def test_no_option_is_left_out() -> None:
    for name in POLICIES:
        known = set(CHANGES.get(name, ())) | {option for policy, option in ELSEWHERE if policy == name}
        assert set(option_parameters(policy_class(name))) == known, name
    for kind, parts in PARTS.items():
        for name, part in parts.items():
            known = set(PART_CHANGES.get((kind, name), ())) | {option for of, option in ELSEWHERE if of == name}
            known |= set(PREFETCH_CHANGES) if name == "predicted" else set()
            known |= set(CHANGES["dali"]) if name == "workload-aware" else set()
            assert set(option_parameters(part)) <= known, name
