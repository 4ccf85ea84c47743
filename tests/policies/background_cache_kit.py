"""Caches of engines as options of `background-cache`, as the guide to one's own policy has them."""

from __future__ import annotations

from typing import Any

BLOCKING = {"copied_now": "all", "scope": "global", "overlap": False}
ENGINES: dict[str, dict[str, Any]] = {
    "llama.cpp #29887": {**BLOCKING, "miss_order": "id", "prefill": "read-only", "cached_rows": 32},
    "QVAC #232": {**BLOCKING, "hit_order": "id", "miss_order": "id", "prefill": "fitting"},
    "FreeToken, offload": {**BLOCKING, "hit_order": "equal", "miss_order": "id", "prefill": "read-only"},
    "FreeToken, hybrid": {
        "copied_now": "share", "later": False, "scope": "global", "hit_order": "equal", "miss_order": "recent",
        "prefill": "read-only",
    },
    "moe-speed-of-light, FETCH": {"copied_now": "time", "later": False, "victim": "score"},
    "moe-speed-of-light, DFA": {"admission": "score", "victim": "score", "publish": "two-steps"},
    "llama.cpp #24524": {"scope": "global", "admission": "demand", "inserts": 8, "cached_rows": 1},
    "llama.cpp #27861": {"admission": "newest", "inserts": 2, "publish": "step", "overlap": False, "cached_rows": 1},
}  # fmt: skip
