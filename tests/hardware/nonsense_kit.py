"""A profile that is right, to be made wrong."""

from __future__ import annotations

import json
from typing import Any


def number(value: Any) -> dict[str, Any]:
    return {"value": value, "source": "assumed", "why": "a test"}


def good() -> dict[str, Any]:
    """Make a profile with one of everything: two halves of a processor, a GPU and a disk."""
    shape = {"hidden": 64, "intermediate": 128, "bits": 16}
    other = {"hidden": 32, "intermediate": 64, "bits": 4}
    rates = {"memory_bytes_per_s": number(1e10), "flops": number(1e11)}
    line = {"form": "linear", "range": [1, 64], "base_us": number(10), "per_token_us": number(0.5)}
    points = {"form": "points", "range": [1, 8], "points": number([[1, 10], [4, 16], [8, 15]])}
    bent = {"form": "flat_linear", "range": [1, 512], "flat_us": number(7), "knee_tokens": number(8), "per_token_us": number(1)}
    copies = {
        "pinned": {"latency_us": number(10), "bytes_per_s": number(1e10)},
        "activation": {"points": number([[64, 2], [4096, 3]])},
    }
    reads = {"any": {"points": number([[4096, 90], [1048576, 600], [16777216, 8000]])}}
    machine = {
        "name": "mine",
        "description": "a machine for tests",
        "machine": {"processor": "one"},
        "compute": "gpu0",
        "backing": ["core1", "disk0"],
        "devices": {
            "gpu0": {
                "kind": "gpu", "memory_bytes": number("4 GiB"), "workspace_bytes": number("1 GiB"), **rates,
                "launch_us": number(5), "launches": {"attention": number(9)}, "router_us": number(4), "first_extra_us": number(2),
                "wake_us": number(1), "more_rows": number([[2, 5], [4, 6]]),
                "experts": [{"shape": shape, **line}, {"shape": other, **points}],
                "parts": [{"model": "tiny", "part": "attention", **line}, {"model": "tiny", "part": "context", **bent}],
                "predict": {"gate": dict(bent)}, "idle_w": number(20), "busy_w": number(300),
            },
            "core0": {
                "kind": "cpu", "role": "accelerator", "cores": [0], "memory_bytes": number("2 GB"), **rates,
                "expert_cost": {
                    "read_rates": [{"bytes": 10**6, "bytes_per_s": number(5e9)}, {"bytes": 10**8, "bytes_per_s": number(8e9)}],
                    "few_row_flops": number(1e10),
                },
            },
            "core1": {"kind": "cpu", "cores": [1, 2], "memory_bytes": number("64 GB"), **rates},
            "disk0": {"kind": "disk", "memory_bytes": number("1 TB")},
        },
        "links": {
            "core1->gpu0": dict(copies), "gpu0->core1": dict(copies), "core1->core0": {**copies, "cores": [1]},
            "core0->core1": {**copies, "cores": [1]}, "disk0->core1": reads, "core1->disk0": dict(reads),
        },
        "contention": [{"a": "core1.experts", "b": "core1->gpu0", "a_rate": number(0.75), "b_rate": number(0.5)}],
        "platform_w": number(40),
    }  # fmt: skip
    return json.loads(json.dumps(machine))  # type: ignore[no-any-return]  # no part is shared
