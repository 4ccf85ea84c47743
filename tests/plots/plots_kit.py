"""Rows of results for the tests of figures."""

from __future__ import annotations

import pandas as pd

BASE = {
    "model": "m", "hardware": "h", "trace": "t", "batch_size": 1, "cache_ratio": 0.25, "cache_budget_bytes": None, "seed": 0,
    "repeat": 0, "prompt_tokens": 8, "source_label": "measured", "routing": "recorded", "notes": "", "error": None,
    "n_decode_tokens": 4, "fidelity_fresh_decode": 1.0, "policy_options": "{}",
}  # fmt: skip


def rows(*changes):
    """Rows that differ from the base in some values; one may name its speed first."""
    found = []
    for policy, speed, change in changes:
        name = policy.partition("(")[0]
        found.append({**BASE, "run": len(found), "policy": policy, "policy_name": name, "decode_tokens_per_s": speed} | change)
    return pd.DataFrame(found)
