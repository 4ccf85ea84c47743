"""Every option of every shipped policy and part changes what happens; one that has no table entry here fails."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.policies.options import options_of
from moesim.policies.registry import PARTS, POLICIES, make_policy, part_class, policy_class
from moesim.records import Records
from moesim.testing import run_tiny, tiny_workload

PREDICTED = {"name": "predicted", "source": "oracle", "size": 2}
STATIC = {"replacement": "static", "assignment": "greedy"}
EQUAL = {"slots_split": "equal"}  # the runs here have 13 slots over 4 layers
CACHES = {  # what all caches share
    "placement": {"placement": "highest-ids"},
    "assignment": {"assignment": "greedy"},
    "prefetch": {"prefetch": PREDICTED},
    "scope": {"scope": "global"},
    "slots_split": EQUAL,
}
TEXTBOOK = {**CACHES, "victims": {"victims": "idle"}}

DAOP = {
    "placement": ({"placement": "lowest-ids"}, {}),
    "swap": ({"swap": False}, {}),
    "swap_factor": ({"swap_factor": 2}, {}),
    "swap_cost": ({"swap_cost": "serial"}, {"swap_cost": "overlapped"}),
    "swap_buffers": ({"swap_buffers": 0}, {"swap_cost": "overlapped"}),
    "writeback": ({"writeback": False}, {}),
    "assignment": ({"assignment": "all-cpu"}, {}),
    "serial": ({"serial": True}, {"serial": False}),
    "first_predict_layer": ({"first_predict_layer": 2}, {"first_predict_layer": 1}),
    "precalculate": ({"precalculate": False}, {"first_predict_layer": 1}),
    "degrade": ({"degrade": False}, {"first_predict_layer": 1}),
    "cpu_experts": ({"cpu_experts": 0}, {"first_predict_layer": 1}),
    "source": ({"source": "synthetic:0.2"}, {"first_predict_layer": 1}),
    "first_on_cpu": ({"first_on_cpu": "next"}, {"first_predict_layer": 1}),
}

KT_EXPERT = {
    "prefill_threshold": ({"prefill_threshold": 5}, {}),
    "strategy": ({"strategy": "frequency"}, {}),
    "seed": ({"seed": 1}, {"strategy": "random"}),
    "dynamic_update": ({"dynamic_update": True}, {"prefill_threshold": 5}),
    "gpu_experts": ({"gpu_experts": 1}, {}),
}

OFTEN = {"swap_interval": 1, "swap_floor": 0.0, "swap_hysteresis": 1.0}  # within a generation of 8 steps
OP_OFFLOAD = {
    "op_offload_min_rows": ({"op_offload_min_rows": 5}, {}),
    "op_offload_rule": ({"op_offload_rule": "rows-per-expert"}, {"op_offload_min_rows": 9}),
    "op_offload_per_byte": ({"op_offload_per_byte": 1.0}, {"op_offload_rule": "rows-per-expert"}),
}

ONE_STEP = {"cached_rows": 4}  # the runs here decode four tokens a step
POOLED = {
    "admit_free": ({"admit_free": 1}, ONE_STEP),
    "admit_full": ({"admit_full": 2}, ONE_STEP),
    "inserts": ({"inserts": 1}, ONE_STEP),
    "cached_rows": ({"cached_rows": 4}, {}),
}

# Policy -> option -> what it is changed to, and (second) what is set on both sides.
CHANGES: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "daop-code": DAOP,
    "daop-paper": DAOP,
    "belady": {key: (value, {}) for key, value in CACHES.items()},
    "fifo": {key: (value, {}) for key, value in TEXTBOOK.items()},
    "lfu": {key: (value, {}) for key, value in CACHES.items()},
    "lru": {key: (value, {}) for key, value in CACHES.items()},
    "s3-fifo": {key: (value, {}) for key, value in TEXTBOOK.items()},
    "windowed-belady": {
        "window": ({"window": 0}, {}),
        "half_life": ({"half_life": 0.5}, {"window": 0}),
        "kappa": ({"kappa": 0.5}, {"window": 0}),
    },
    "random": {key: (value, {}) for key, value in {**TEXTBOOK, "seed": {"seed": 1}}.items()},
    "static": {
        "placement": ({"placement": "lowest-ids"}, {}),
        "assignment": ({"assignment": "greedy"}, {}),
        "prefetch": ({"prefetch": PREDICTED}, {}),
        "scope": ({"scope": "per-layer"}, {"placement": "random"}),
        "slots_split": (EQUAL, {"placement": "random", "scope": "per-layer"}),
    },
    "background-cache": {
        "copied_now": ({"copied_now": "all"}, {}),
        "share": ({"share": 0.9}, {"copied_now": "share"}),
        "later": ({"later": False}, {"copied_now": "share"}),
        "admission": ({"admission": "demand"}, {}),
        "inserts": ({"inserts": 1}, {}),
        "admit_free": ({"admit_free": 1}, {"admission": "demand"}),
        "admit_full": ({"admit_full": 2}, {"admission": "demand", "admit_free": 1}),
        "kappa": ({"kappa": 0.5}, {"admission": "score"}),
        "half_life": ({"half_life": 0.5}, {"victim": "score", "admission": "score"}),
        "victim": ({"victim": "score"}, {}),
        "publish": ({"publish": "two-steps"}, {}),
        "hit_order": ({"hit_order": "id"}, {}),
        "miss_order": ({"miss_order": "id"}, {"inserts": 1}),
        "scope": ({"scope": "global"}, {}),
        "overlap": ({"overlap": False}, {}),
        "prefill": ({"prefill": "cached"}, {}),
        "cached_rows": ({"cached_rows": 1}, {}),
        "warm": ({"warm": True}, {}),
    },
    "pooled-cache": POOLED,
    "turboquant-cache": {**POOLED, "hot": ({"hot": 0}, {"admit_full": 1, **ONE_STEP})},
    "two-uploads-lru": {
        "inserts": ({"inserts": 1}, ONE_STEP),
        "overlap": ({"overlap": True}, ONE_STEP),
        "cached_rows": ({"cached_rows": 4}, {}),
    },
    "dfa-cache": {
        "rule": ({"rule": "lru"}, {}),
        "half_life": ({"half_life": 0.5}, {}),
        "kappa": ({"kappa": 2.0}, {}),
        "inserts": ({"inserts": 1}, {}),
        "fetch": ({"fetch": "rates"}, {}),
        "prefetch_size": ({"prefetch_size": 1}, {}),
        "source": ({"source": "synthetic:0.2"}, {"prefetch_size": 1}),
    },
    "freetoken": {
        "backend": ({"backend": "offload"}, {}),
        "max_fetch": ({"max_fetch": 1}, {"backend": "hybrid"}),
        "fetch_order": ({"fetch_order": "lowest-id"}, {"backend": "hybrid"}),
    },
    "heat-cache": {"overlap": ({"overlap": True}, {})},
    "llama-cpp-cache": {"eviction": ({"eviction": "class-lru"}, {})},
    "composed": {
        **{key: (value, {}) for key, value in CACHES.items()},
        "replacement": ({"replacement": "lfu"}, {}),
        "staging_slots": ({"staging_slots": 1}, {"replacement": "static"}),
        "load_order": ({"load_order": "rows"}, {}),
        "cache_only": ({"cache_only": True}, {**STATIC, "prefetch": PREDICTED}),
    },
    "od-moe": {
        "token_period": ({"token_period": 4}, {}),
        "kv_period": ({"kv_period": None}, {}),
        "prediction_source": ({"prediction_source": "none"}, {}),
        "prompt_kv": ({"prompt_kv": "sent"}, {}),
        "release": ({"release": "worker"}, {"group_size": 8}),
        "mini_batches": ({"mini_batches": 1}, {}),
        "prefill_load": ({"prefill_load": "ahead"}, {}),
        "group_size": ({"group_size": 4}, {}),
        "main": ({"main": "worker0"}, {}),
        "shadow": ({"shadow": "shadow1"}, {}),
        "workers": ({"workers": "worker1"}, {"group_size": 1}),
    },
    "dali-multi-gpu": {
        "n_gpus": ({"n_gpus": 1}, {}),
        "w_size": ({"w_size": 1}, {}),
        "u_size": ({"u_size": 0}, {}),
        "prefetch_size": ({"prefetch_size": 2}, {}),
        "prefetch_source": ({"prefetch_source": "synthetic:0.2"}, {}),
        "seed": ({"seed": 1}, {}),
        "slots_split": (EQUAL, {}),
    },
    "hybrimoe-paper": {
        **{key: (value, {}) for key, value in CACHES.items()},
        "prefetch": ({"prefetch": "none"}, {}),
        "replacement": ({"replacement": "lfu"}, {}),
    },
    "hybrimoe-code": {
        "placement": ({"placement": "highest-ids"}, {}),
        "assignment": ({"assignment": "greedy"}, {}),
        "prefetch": ({"prefetch": PREDICTED}, {}),
        "replacement": ({"replacement": "lfu"}, {}),
        "slots_split": (EQUAL, {}),
    },
    "on-demand": {"staging_slots": ({"staging_slots": 1}, {})},
    "prescope": {
        "placement": ({"placement": "none"}, {}),
        "predictor": ({"predictor": None}, {}),
        "head_start": ({"head_start": False}, {}),
        "scheduler": ({"scheduler": "threshold"}, {}),
        "prefetch_size": ({"prefetch_size": 4}, {}),
        "none_better": ({"none_better": "printed"}, {}),
        "limit_to_queue": ({"limit_to_queue": True}, {}),
        "prefetch_order": ({"prefetch_order": "printed"}, {}),
        "window": ({"window": "next2"}, {}),
        "next2_predictor": ({"next2_predictor": "oracle"}, {"window": "next2"}),
        "prior_hit": ({"prior_hit": 0.0}, {}),
        "demand_slots": ({"demand_slots": 1}, {}),
        "prefetch_slots": ({"prefetch_slots": 1}, {}),
        "cancel": ({"cancel": "next-gate"}, {"prefetch_size": 5}),
    },
    "mixtral-offloading": {
        "buffer_size": ({"buffer_size": 2}, {}),
        "writeback": ({"writeback": False}, {}),
        "slots_split": (EQUAL, {}),
    },
    "adapmoe": {
        "buffer_size": ({"buffer_size": 2}, {}),
        "single": ({"single": 1.0}, {}),
        "recall": ({"recall": 0.0}, {}),
    },
    "mixtral-offloading-spec": {
        "buffer_size": ({"buffer_size": 2}, {}),
        "writeback": ({"writeback": False}, {}),
        "n_ahead": ({"n_ahead": 1}, {}),
        "source": ({"source": "synthetic:0.2"}, {}),
    },
    "fiddler": {
        "rule": ({"rule": "code"}, {}),
        "serial": ({"serial": True}, {}),
    },
    "llama-cpp": {
        "n_gpu_layers": ({"n_gpu_layers": 2}, {"op_offload": False}),
        "n_cpu_moe": ({"n_cpu_moe": 4}, {"op_offload": False}),
        "op_offload": ({"op_offload": False}, {"op_offload_min_rows": 1}),
        **OP_OFFLOAD,
    },
    "llama-cpp-fit": {"op_offload": ({"op_offload": False}, {"op_offload_min_rows": 1}), **OP_OFFLOAD},
    "exllamav3": {
        "cpu_layers": ({"cpu_layers": 3}, {}),
        "cpu_split": ({"cpu_split": 6}, {}),
        "placement": ({"placement": "frequency"}, {}),
        "stream_min_rows": ({"stream_min_rows": 5}, {"stream_threshold": 1}),
        "stream_threshold": ({"stream_threshold": 1}, {"stream_min_rows": 5}),
        "swap_interval": ({"swap_interval": 1}, {**OFTEN, "swap_interval": 2}),
        "swap_budget": ({"swap_budget": 1}, OFTEN),
        "swap_floor": ({"swap_floor": 1.5}, OFTEN),
        "swap_hysteresis": ({"swap_hysteresis": 4.0}, OFTEN),
    },
    "edgemoe": {
        "placement": ({"placement": "highest-ids"}, {}),
        "assignment": ({"assignment": "greedy"}, {}),
        "prefetch": ({"prefetch": PREDICTED}, {}),
        "replacement": ({"replacement": "lfu"}, {}),
        "distance": ({"distance": "absolute"}, {}),
        "victims": ({"victims": "idle"}, {}),
        "prefetch_source": ({"prefetch_source": "frequency"}, {}),
        "prefetch_size": ({"prefetch_size": 1}, {}),
    },
    "least-stale-2gen": {
        "placement": ({"placement": "highest-ids"}, {}),
        "assignment": ({"assignment": "greedy"}, {}),
        "prefetch": ({"prefetch": {"name": "random", "pool": "cache"}}, {}),
        "scope": ({"scope": "per-layer"}, {}),
        "prefetched": ({"prefetched": "stale"}, {}),
        "prefetch_source": ({"prefetch_source": "synthetic:0.2"}, {}),
        "prefetch_size": ({"prefetch_size": 1}, {}),
    },
    "finemoe": {
        "prefetch_distance": ({"prefetch_distance": 0}, {}),
        "first_layers": ({"first_layers": "embedding"}, {}),
        "selected_only": ({"selected_only": True}, {"prefetch_distance": 0}),
        "float_score": ({"float_score": True}, {"prefetch_distance": 1}),
    },
    "fate": {
        "compression": ({"compression": False}, {}),
        "low_share": ({"low_share": 0.0}, {}),
        "source": ({"source": "synthetic:0.2"}, {}),
        "shallow_layers": ({"shallow_layers": 1}, {}),
    },
    "hobbit": {
        "low_precision": ({"low_precision": False}, {}),
        "high_weight": ({"high_weight": 1.5}, {}),
        "low_weight": ({"low_weight": 0.5}, {}),
        "depth": ({"depth": 1}, {}),
        "source": ({"source": "synthetic:0.2"}, {}),
        "lru_weight": ({"lru_weight": 5.0}, {}),
        "lfu_weight": ({"lfu_weight": 5.0}, {}),
        "lhu_weight": ({"lhu_weight": 5.0}, {}),
        "fld_weight": ({"fld_weight": 5.0}, {}),
    },
    "moe-infinity-paper": {
        "mask": ({"mask": "later"}, {}),
        "begin": ({"begin": "next"}, {}),
        "replaces": ({"replaces": "any"}, {}),
        "capacity": ({"capacity": 1}, {}),
    },
    "klotski": {
        "n_hot": ({"n_hot": 1}, {}),
        "calibrated": ({"calibrated": False}, {}),
        "hot_table": ({"hot_table": True}, {}),
    },
    "moe-gen": {
        "buffers": ({"buffers": 2}, {}),
        "launch_tokens": ({"launch_tokens": 1}, {}),
        "attention": ({"attention": "cpu"}, {}),
    },
    "moe-lightning": {"expert_share": ({"expert_share": 0.2}, {}), "attention": ({"attention": "gpu"}, {})},
    "zero-inference": {
        "depth": ({"depth": 1}, {}),
        "persistence_threshold": ({"persistence_threshold": 0}, {}),
        "kv": ({"kv": "host"}, {}),
    },
    "pre-gated": {
        "method": ({"method": "prefetch-all"}, {}),
        "source": ({"source": "synthetic:0.2"}, {}),
        "prompts_on_demand": ({"prompts_on_demand": True}, {}),
        "cache": ({"cache": "lfu"}, {}),
    },
    "kt-layer": {"side": ({"side": "last"}, {}), "prefill_threshold": ({"prefill_threshold": 5}, {})},
    "kt-expert": KT_EXPERT,
    "kt-expert-deferral": {**KT_EXPERT, "max_deferred": ({"max_deferred": 1}, {})},
    "dali": {
        "assignment": ({"assignment": "all-gpu"}, {}),
        "replacement": ({"replacement": "static"}, {}),
        "prefetch": ({"prefetch": "random"}, {}),
        "w_size": ({"w_size": 1}, {}),
        "u_size": ({"u_size": 0}, {}),
        "firing": ({"firing": "printed"}, {}),
        "only_if_better": ({"only_if_better": True}, {"u_size": 3}),
        "blocking": ({"blocking": True}, {"w_size": 1, "u_size": 2}),
        "relabel": ({"relabel": True}, {"w_size": 1, "u_size": 2}),
        "prefetch_size": ({"prefetch_size": 2}, {}),
        "prefetch_source": ({"prefetch_source": "synthetic:0.2"}, {}),
        "prefetch_over": ({"prefetch_over": "non-resident"}, {}),
        "cache_only": ({"cache_only": True}, {"prefetch_size": 3}),
        "placement": ({"placement": "lowest-ids"}, {}),
        "slots_split": (EQUAL, {}),
    },
}
ELSEWHERE = {
    *(
        (name, "overlap_cpu_rows") for name in ("pooled-cache", "turboquant-cache")
    ),  # test_pooled_cache.py: needs steps of hits only
    ("two-uploads-lru", "dup_upload"),  # tests/policies/test_two_uploads_lru.py: needs uploads longer than steps
    *(("freetoken", f"prefill_{option}") for option in ("overlap", "hit_d2d")),  # test_freetoken.py: need two layers' slots
    *(("heat-cache", option) for option in ("decay", "hyst", "dwell", "move_mode")),  # test_heat_cache.py: steps of one token
    ("lfu", "ties"),  # tests/policies/test_composed.py: needs equal counts
    ("lru", "use_order"),  # tests/engine/test_engine_caches.py: needs one row a step
    *((name, "victims") for name in ("lfu", "belady")),  # tests/engine/test_engine_caches.py: need copies longer than Runs
    ("greedy", "shared_in_plan"),  # tests/policies/test_parts_more.py: needs a model with shared experts
    ("arc", "variant"),  # tests/policies/test_parts_more.py: needs a longer run
    ("activation-aware", "capacity"),  # tests/policies/test_parts_more.py: needs requests that are over
    ("prescope", "async_io"),  # tests/policies/test_prescope.py: changes how all transfers are made
    ("zero-inference", "pinned"),  # tests/policies/test_zero_inference.py: changes how all transfers are made
    ("exllamav3", "stream_rule"),  # tests/policies/test_exllamav3.py: needs a link of another rate
    ("fiddler", "pageable"),  # tests/policies/test_policies.py: changes how all transfers are made
    *((name, "released") for name in ("adapmoe", "fiddler", "klotski", "kt-expert", "kt-expert-deferral")),  # test_released.py
    ("klotski", "merged"),  # tests/policies/test_klotski.py: needs several micro-batches
    ("mixtral-offloading-spec", "bits"),  # test_mixtral_offloading_spec.py: needs a model of two widths
    *(("adapmoe", option) for option in ("sensitivity", "source")),  # test_adapmoe.py: one row a step
    *(("cross-layer", option) for option in ("source", "size", "order", "prior_hit", "lane")),  # tests/policies/test_prescope.py
    *(
        (name, option)
        for name in ("daop-code", "daop-paper")
        for option in ("cold_list", "pageable", "reset", "swap_chunk", "swap_if")
    ),  # test_daop.py
    ("frequency-global", "phase"),  # tests/policies/test_daop.py
    ("all-gpu", "gpus"),  # tests/policies/test_od_moe.py: needs a machine with several
    *(("hybrimoe-code", option) for option in ("credit", "prefetch_size", "wait_prefetch")),  # test_hybrimoe.py: steps of one row
    *(("queues", option) for option in ("timeline", "ties", "count_compute", "overtake", "shared_in_plan")),  # test_hybrimoe.py
    *(("hss", option) for option in ("cached_from", "costs", "cpu_per_row", "multi_row")),  # test_hybrimoe.py
    *(
        (name, option) for name in ("mrs", "mrs-score") for option in ("alpha", "credit", "p", "tokens", "size", "over")
    ),  # the same
    *(("impact-driven", option) for option in ("source", "lookahead", "budget", "candidates", "lane")),  # the same
    (
        "all-gpu",
        "assume_fits",
    ),  # tests/policies/test_policies.py: the placement says so, and test_experiment.py: the label
    ("moe-infinity-code", "victims"),  # tests/policies/test_moe_infinity.py: needs a layer of several misses
    ("fate", "lane"),  # tests/policies/test_fate.py: needs a machine with a side lane
    ("moe-infinity-paper", "online"),  # tests/policies/test_moe_infinity.py: needs requests that are over
    ("od-moe", "precision"),  # tests/policies/test_od_moe.py: the tiny model takes as long at any precision
    ("dali", "lane"),  # tests/policies/test_policies_by_hand.py: needs a machine with a side lane
    ("predicted", "lane"),
}

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
    records: Records = run_tiny(make_policy(spec), tiny_workload(make_policy(spec), 4), 13)
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


def test_no_option_is_left_out() -> None:
    for name in POLICIES:
        known = set(CHANGES.get(name, ())) | {option for policy, option in ELSEWHERE if policy == name}
        assert set(options_of(policy_class(name))) == known, name
    for kind, parts in PARTS.items():
        for name in parts:
            known = set(PART_CHANGES.get((kind, name), ())) | {option for of, option in ELSEWHERE if of == name}
            known |= set(PREFETCH_CHANGES) if name == "predicted" else set()
            known |= set(CHANGES["dali"]) if name == "workload-aware" else set()
            assert set(options_of(part_class(kind, name))) <= known, name
