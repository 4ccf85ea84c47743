"""Every policy, with its defaults and with other options, keeps the contract: the common checks pass."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from moesim.policies.registry import make_policy, policy_info
from moesim.testing import check_policy
from moesim.testing.conformance import SLOTS

SIZES = {"background-cache": (12,), "colibri": (9,), "dali": (4, 8, 16), "daop-code": (9, 32), "daop-paper": (9, 32),
         "dfa-cache": (12,), "freetoken": (8, 17), "heat-cache": (12,), "hybrimoe-code": (4,), "hybrimoe-paper": (4,),
         "llama-cpp-cache": (12,), "llama-cpp-ssd": (28,), "od-moe": (32,), "prescope": (8,), "turboquant-cache": (12,),
         "two-uploads-lru": (12,)}  # fmt: skip
"""Cache slots at which other options are checked, where these are not `SLOTS`."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adapmoe": [{"source": "oracle"}, {"sensitivity": 0.02}, {"buffer_size": 2, "source": "synthetic:0.5"}],
    "background-cache": [
        {"copied_now": "all", "scope": "global", "overlap": False, "miss_order": "id", "prefill": "read-only", "cached_rows": 32},
        {"copied_now": "share", "later": False, "scope": "global", "hit_order": "equal", "miss_order": "recent"},
        {"copied_now": "time", "victim": "score", "prefill": "fitting"},
        {"admission": "score", "victim": "score", "publish": "two-steps"},
        {"admission": "demand", "inserts": 8, "cached_rows": 1},
        {"admission": "newest", "inserts": 1, "publish": "step", "overlap": False},
    ],
    "colibri": [
        {"cap": 2, "policy": "lfru", "hot": 1, "warmup": 13, "exchange": "passing"},
        {"cap": 1, "pilot": True, "source": "oracle", "guard": False, "warm": "none"},
        {"cap": 5, "pilot": True, "policy": "auto", "hot": 2, "pins": "table", "warm": "table"},
    ],
    "dali": [
        {"prefetch_size": 4, "prefetch_source": "synthetic:0.3", "relabel": True, "w_size": 1, "u_size": 8},
        {"prefetch_size": 8, "blocking": True, "firing": "printed", "assignment": "threshold"},
        {"prefetch_size": 2, "cache_only": True, "only_if_better": True, "w_size": 2},
        {"assignment": "exact", "prefetch_over": "non-resident", "placement": "none"},
        {"assignment": "all-cpu", "prefetch": "none", "replacement": "static"},  # the paper's "naive"
        {"replacement": "belady", "assignment": "exact", "prefetch": {"name": "predicted", "source": "oracle", "pool": "cache"}},
        {"replacement": "arc", "prefetch": {"name": "random", "size": 3}},
    ],
    "daop-code": [
        {"first_predict_layer": 1},
        {"first_predict_layer": 2, "first_on_cpu": "next", "reset": True, "swap_if": "at-least", "swap_factor": 0},
        {"first_predict_layer": 1, "swap_cost": "overlapped", "swap_buffers": 3, "assignment": "exact", "source": "frequency"},
        {"writeback": False, "placement": "random", "swap_cost": "overlapped", "cpu_experts": 0},
    ],
    "daop-paper": [
        {"first_predict_layer": 1, "swap_buffers": 3, "assignment": "exact", "source": "frequency"},
        {"first_predict_layer": 2, "first_on_cpu": "next", "reset": True, "swap_if": "at-least", "swap_factor": 0},
    ],
    "exllamav3": [{"cpu_layers": 3, "stream_decode": True, "stream_decode_cpu": 1}],
    "dfa-cache": [{"rule": "lru", "prefetch_size": 2}, {"fetch": "rates"}, {"fetch": "0,1,1", "prefetch_size": 1}],
    "fiddler": [{"rule": "code", "serial": True}],
    "finemoe": [{"prefetch_distance": 1, "selected_only": True}, {"first_layers": "embedding", "prefetch_distance": 2}],
    "freetoken": [{"backend": "hybrid"}, {"backend": "offload", "prefill_overlap": False}],
    "heat-cache": [{"move_mode": "move", "overlap": True, "hyst": 0.0}],
    "hybrimoe-code": [
        {"prefetch_size": 2},
        {"prefetch_size": 3, "assignment": {"name": "hss", "costs": "code"}, "wait_prefetch": False},
        {"assignment": "all-gpu", "prefetch": {"name": "impact-driven", "budget": "none"}},
    ],
    "hybrimoe-paper": [
        {"assignment": "resident", "scope": "global"},
        {"prefetch": {"name": "impact-driven", "source": "oracle", "budget": "none"}},
    ],
    "klotski": [{"n_hot": 3, "merged": True}],
    "kt-expert": [
        {"strategy": strategy, "prefill_threshold": 3, "dynamic_update": True}
        for strategy in ("uniform", "front-loading", "random", "frequency")
    ],
    "kt-expert-deferral": [{"prefill_threshold": 3, "dynamic_update": True, "max_deferred": 1}],
    "kt-layer": [{"prefill_threshold": 3, "side": "last"}],
    "least-stale-2gen": [{"prefetched": "stale"}],
    "llama-cpp": [
        {"n_gpu_layers": 2},
        {"n_cpu_moe": 4, "op_offload_min_rows": 1},
        {"n_gpu_layers": 0, "op_offload": False},
        {"n_cpu_moe": 4, "op_offload_min_rows": 1, "prefetch_experts_slots": 2},
    ],
    "llama-cpp-ssd": [{"preload": False}],
    "llama-cpp-cache": [{"eviction": "class-lru"}],
    "lru": [{"scope": "global", "assignment": "greedy", "placement": "none"}],
    "mixtral-offloading": [{"buffer_size": 2}, {"writeback": False}],
    "mixtral-offloading-spec": [{"source": "oracle"}, {"source": "synthetic:0.5", "n_ahead": 1}, {"buffer_size": 2}],
    "moe-infinity-code": [{"victims": "idle"}],
    "moe-infinity-paper": [{"mask": "later", "online": True}, {"replaces": "any", "begin": "next", "capacity": 1}],
    "moe-lightning": [{"attention": "gpu"}],
    "od-moe": [
        {"release": "worker", "prefill_load": "ahead", "token_period": 4, "kv_period": 2, "prompt_kv": "sent"},
        {"group_size": 1, "prediction_source": "frequency"},
        {"group_size": 8, "prediction_source": "none"},
        {"prediction_source": "random"},
        {"prediction_source": "random", "release": "worker", "prefill_load": "ahead", "mini_batches": 3},
    ],
    "on-demand": [{"staging_slots": 1}],
    "strata": [{"adapt": "any-layer", "adapt_every": 1, "prefill_stream_min": 4}, {"adapt": "fetch-admit", "pcie_frac": 0.5}],
    "vllm-expert-cache": [{"split": "expert"}, {"eviction": "ewma"}],
    "pre-gated": [
        *({"cache": cache, "source": source} for cache, source in product(("lfu", "lru", "lifo"), ("oracle", "synthetic:0.5"))),
        {"cache": "lfu", "method": "prefetch-all", "prompts_on_demand": True},
    ],
    "prescope": [
        {"predictor": None},
        {"predictor": None, "scheduler": "threshold"},
        {"predictor": None, "scheduler": "all-gpu", "placement": "none"},
        {"predictor": "synthetic:0.5", "cancel": "next-gate", "scheduler": "greedy", "prefetch_size": 5},
        {"window": "next2", "next2_predictor": "oracle"},
        {"placement": "none", "demand_slots": 1, "prefetch_slots": 2, "none_better": "printed", "prefetch_order": "printed"},
    ],
    "turboquant-cache": [{"cached_rows": 4, "admit_full": 1, "overlap_cpu_rows": 1}],
    "two-uploads-lru": [{"dup_upload": False, "cached_rows": 4}, {"overlap": True, "admit": 3}, {"early": True, "admit": 2}],
    "zero-inference": [{"depth": 1, "kv": "host", "persistence_threshold": 0}],
}  # fmt: skip


PRESETS = "moesim.policies.systems.as_compared:"
"""Systems as other papers ran them, whose classes are checked under their own names."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(info.name, marks=[pytest.mark.long] if info.target.startswith(PRESETS) else [])
        for info in policy_info()
        if info.target.startswith("moesim.")
    ],
)
@pytest.mark.parametrize("slots", [SLOTS[1::2], pytest.param(SLOTS[::2], marks=pytest.mark.long)], ids=str)
def test_with_its_defaults(name: str, slots: tuple[int, ...]) -> None:
    check_policy(type(make_policy(name)), slots=slots)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(name, one, id=f"{name}-{one}") for name, some in OPTIONS.items() for one in some]
)
def test_with_other_options(name: str, options: dict[str, Any]) -> None:
    check_policy(lambda: make_policy({"name": name, **options}), slots=SIZES.get(name, SLOTS))
