"""Every option of every shipped policy and part changes what happens; one that nothing here shows to do so fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.policies.options import options_of
from moesim.policies.registry import PARTS, make_policy, part_class, policy_class
from moesim.records import Records
from moesim.testing import run_tiny, tiny_workload
from moesim.testing.runs import N_DECODE
from tests.policies.options_kit import BESIDE, GOLDEN, POLICY_SUBJECTS, Subject, results

PREDICTED = {"name": "predicted", "source": "oracle", "size": 2}
Changes = dict[str, tuple[dict[str, Any], dict[str, Any]]]

DAOP: Changes = {
    "swap_buffers": ({"swap_buffers": 0}, {"swap_cost": "overlapped"}),
    "precalculate": ({"precalculate": False}, {"first_predict_layer": 1}),
    "degrade": ({"degrade": False}, {"first_predict_layer": 1}),
    "cpu_experts": ({"cpu_experts": 0}, {"first_predict_layer": 1}),
    "source": ({"source": "synthetic:0.2"}, {"first_predict_layer": 1}),
    "first_on_cpu": ({"first_on_cpu": "next"}, {"first_predict_layer": 1}),
}
KT_EXPERT: Changes = {
    "seed": ({"seed": 1}, {"strategy": "random"}), "dynamic_update": ({"dynamic_update": True}, {"prefill_threshold": 5}),
}  # fmt: skip
OFTEN = {"swap_interval": 1, "swap_floor": 0.0, "swap_hysteresis": 1.0}  # within a generation of 8 steps
OP_OFFLOAD: Changes = {
    "op_offload_rule": ({"op_offload_rule": "rows-per-expert"}, {"op_offload_min_rows": 9}),
    "op_offload_per_byte": ({"op_offload_per_byte": 1.0}, {"op_offload_rule": "rows-per-expert"}),
}
ONE_STEP = {"cached_rows": 4}  # the runs here decode four tokens a step
POOLED: Changes = {name: ({name: value}, ONE_STEP) for name, value in (("admit_free", 1), ("admit_full", 2), ("inserts", 1))}

# Policy -> option -> what it is changed to, and (second) what is set on both sides; where golden results do not show it.
CHANGES: dict[str, Changes] = {
    "daop-code": DAOP,
    "daop-paper": DAOP,
    "background-cache": {
        "share": ({"share": 0.9}, {"copied_now": "share"}),
        "later": ({"later": False}, {"copied_now": "share"}),
        "admit_free": ({"admit_free": 1}, {"admission": "demand"}),
        "admit_full": ({"admit_full": 2}, {"admission": "demand", "admit_free": 1}),
        "kappa": ({"kappa": 0.5}, {"admission": "score"}),
        "half_life": ({"half_life": 0.5}, {"victim": "score", "admission": "score"}),
    },
    "pooled-cache": POOLED,
    "turboquant-cache": {**POOLED, "hot": ({"hot": 0}, {"admit_full": 1, **ONE_STEP})},
    "two-uploads-lru": {"inserts": ({"inserts": 1}, ONE_STEP), "overlap": ({"overlap": True}, ONE_STEP)},
    "dfa-cache": {"source": ({"source": "synthetic:0.2"}, {"prefetch_size": 1})},
    "adapmoe": {"recall": ({"recall": 0.0}, {})},
    "llama-cpp": OP_OFFLOAD,
    "llama-cpp-fit": OP_OFFLOAD,
    "exllamav3": {
        "stream_threshold": ({"stream_threshold": 1}, {"stream_min_rows": 5}),
        "swap_interval": ({"swap_interval": 1}, {**OFTEN, "swap_interval": 2}),
    },
    "heat-cache": {"decay": ({"decay": 0.5}, {}), "hyst": ({"hyst": 5.0}, {}), "dwell": ({"dwell": 50}, {})},
    "kt-expert": KT_EXPERT,
    "kt-expert-deferral": KT_EXPERT,
}
# The test file that shows what it does: policy or part, and options.
ELSEWHERE: dict[str, dict[str, str]] = {
    "test_adapmoe": {"adapmoe": "source"},
    "../serving/test_memory_moves": {"vllm-expert-cache": "moves_memory"},
    "test_composed": {"lfu": "ties"},
    "test_daop": dict.fromkeys(("daop-code", "daop-paper"), "reset swap_chunk swap_if") | {"frequency-global": "phase"},
    "test_exllamav3": {"exllamav3": "stream_rule stream_decode stream_decode_cpu"},
    "test_freetoken": {"freetoken": "prefill_overlap prefill_hit_d2d"},
    "test_heat_cache": {"heat-cache": "move_mode"},
    "test_hybrimoe": {
        "hybrimoe-code": "prefetch_size wait_prefetch", "queues": "timeline ties count_compute overtake shared_in_plan",
        "hss": "cached_from costs cpu_per_row multi_row", "mrs": "alpha credit p tokens",
        "mrs-score": "alpha credit p tokens size over", "impact-driven": "source lookahead budget candidates lane",
    },
    "test_llama_cpp_split": {"llama-cpp": "split_mode tensor_split mmap", "llama-cpp-fit": "mmap"},
    "test_mixtral_offloading_spec": {"mixtral-offloading-spec": "bits"},
    "test_moe_infinity": {"moe-infinity-paper": "online"},
    "test_parts_more": {"greedy": "shared_in_plan", "arc": "variant", "activation-aware": "capacity"},
    "test_strata": {"strata": "adapt_decay prefill_ring"},
    "../experiment/test_prompt_rows": {"strata": "prefill"},
    "test_vllm_expert_cache": {"vllm-expert-cache": "decay"},
    "test_policies": {"all-gpu": "assume_fits"},
    "test_policies_by_hand": {"predicted": "lane"},
    "test_pooled_cache": dict.fromkeys(("pooled-cache", "turboquant-cache"), "overlap_cpu_rows"),
    "test_prescope": {"cross-layer": "source size order prior_hit lane"},
    "test_released": dict.fromkeys(("adapmoe", "fiddler", "klotski", "kt-expert", "kt-expert-deferral"), "released"),
    "../studies/test_others": {"all-gpu": "engine"},
    "../engine/test_engine_caches": {"lru": "use_order", "lfu": "victims", "belady": "victims"},
    "test_colibri": {"colibri": "cap policy hot warmup pins pilot guard source exchange warm"},
    "test_llama_cpp_ssd": {"llama-cpp-ssd": "preload"},
    "test_two_uploads_lru": {"two-uploads-lru": "dup_upload early admit window"},
    "../engine/test_host_operations": {"two-uploads-lru": "mmap"},
}  # fmt: skip

PREFETCH_CHANGES: dict[str, dict[str, Any]] = {
    "source": {"source": "synthetic:0.2"},
    "size": {"size": 3},
    "pool": {"pool": "cache"},
    "buffers": {"buffers": 3},
    "over": {"over": "non-resident"},
    "lookahead": {"lookahead": 2},
    "nearer": {"lookahead": 3, "nearer": "ask"},
    "residents": {"size": 2, "pool": "cache", "residents": "used"},
}
# Part -> option -> changed value; those of the workload-aware cache are DALI's.
PART_CHANGES: dict[tuple[str, str], dict[str, Any]] = {
    ("placement", "random"): {"seed": 3},
    ("replacement", "fifo"): {"victims": "idle"},
    ("replacement", "mrs"): {"victims": "unrouted-first"},
    ("replacement", "arc"): {"victims": "idle"},
    ("replacement", "s3-fifo"): {"victims": "idle"},
    ("replacement", "random"): {"seed": 3, "victims": "idle"},
    ("replacement", "activation-aware"): {"reading": "code", "victims": "idle"},
    ("replacement", "least-stale"): {"distance": "absolute", "victims": "idle"},
    ("replacement", "least-stale-2gen"): {"prefetched": "stale"},
    ("prefetch", "random"): {"size": 3, "seed": 3, "pool": "cache", "buffers": 3, "lookahead": 2},
    ("assignment", "beam"): {"width": 1},
    ("assignment", "fixed-threshold"): {"cpu_ms": 9, "load_ms": 40},
    ("placement", "frequency-per-layer"): {"phase": "decode"},
}


PART_BOTH: dict[tuple[str, str], dict[str, Any]] = {  # set on both sides
    ("replacement", "least-stale"): {"scope": "global"},
    ("replacement", "least-stale-2gen"): {"prefetch": {**PREDICTED, "pool": "cache"}},
}


def happened(name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """Run a policy on the tiny machine; return all that the records say happened."""
    spec = {"name": name, **options}
    batch, decode = (1, 40) if name == "heat-cache" else (4, N_DECODE)  # which counts steps of one token
    records: Records = run_tiny(make_policy(spec), tiny_workload(make_policy(spec), batch, decode=decode), 13)
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
    without = {name: value for name, value in changed.items() if name != option} | {
        name: value for name, value in PREDICTED.items() if name == option
    }
    assert happened("lru", {"prefetch": changed}) != happened("lru", {"prefetch": without})


@pytest.mark.parametrize(
    ("kind", "name", "option"), [(*part, option) for part, options in PART_CHANGES.items() for option in options]
)
def test_an_option_of_a_part_changes_what_happens(kind: str, name: str, option: str) -> None:
    changed = {"name": name, option: PART_CHANGES[kind, name][option]}
    both = PART_BOTH.get((kind, name), {})
    assert happened("composed", {**both, kind: changed}) != happened("composed", {**both, kind: name})


def shown_by_golden(subject: Subject) -> set[str]:
    """Return the options with which a golden result differs from the one without them."""
    known: dict[str, list[str]] = json.loads(GOLDEN.read_text()).get(subject.name, {})
    found = set()
    for options in map(json.loads, list(known)):
        for name in options:
            without = {other: value for other, value in options.items() if other != name}
            if without == BESIDE.get((subject.name, name), {}):
                plain = json.dumps(without, sort_keys=True)
                known = known if plain in known else known | results(subject, [without])
                if known[plain] != known[json.dumps(options, sort_keys=True)]:
                    found.add(name)
    return found


def elsewhere(name: str) -> set[str]:
    return {option for of in ELSEWHERE.values() for option in of.get(name, "").split()}


@pytest.mark.parametrize("subject", POLICY_SUBJECTS, ids=lambda subject: subject.name)
def test_no_option_of_a_policy_is_left_out(subject: Subject) -> None:
    assert set(options_of(subject.cls)) == shown_by_golden(subject) | set(CHANGES.get(subject.name, ())) | elsewhere(subject.name)


def test_no_option_of_a_part_is_left_out() -> None:
    for kind, parts in PARTS.items():
        for name in parts:
            known = set(PART_CHANGES.get((kind, name), ())) | elsewhere(name)
            known |= set(PREFETCH_CHANGES) if name == "predicted" else set()
            known |= set(options_of(policy_class("dali"))) if name == "workload-aware" else set()
            assert set(options_of(part_class(kind, name))) <= known, name


@pytest.mark.parametrize("test", ELSEWHERE)
def test_what_is_shown_elsewhere_is_there(test: str) -> None:
    text = Path(__file__).parent.joinpath(f"{test}.py").read_text()
    assert not [option for options in ELSEWHERE[test].values() for option in options.split() if option not in text]
