"""Compare llama.cpp's cache with uploads between steps (PR 27861) with a real machine: its collapse, and a token's cost by terms.

everett6/moe-prefetch measured it on an RTX 5070 and a Ryzen 9 7950X with Qwen3-30B-A3B Q4_K_M, 29 GB of memory. A line through
42 of its runs has ms a token = A + B misses + C uploads. The waits of copies were identified with two of these rows;
nothing else was.

    python -m experiments.research.tables.upload_cache           # settings, measured and simulated
    python -m experiments.research.tables.upload_cache --terms   # the line's terms: some two minutes
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

import moesim
from experiments.research.tables import command
from moesim.core.table import render

MODEL: Final = {"base": "qwen3-30b-a3b", "expert_bits": 4.85, "other_bits": 5.35}
_READ: Final = {
    "value": 81.1e9, "source": "published",
    "ref": "24.5 MB of 8 experts in 343 us, over the 0.88 that products of one row reach (everett6/moe-prefetch, anatomy)",
}  # fmt: skip
MACHINE: Final = {
    "base": "RTX 5070 + Ryzen 9 7950X + 2x16GB DDR5", "devices.gpu0.workspace_bytes": 500_000_000,
    "devices.cpu0.memory_bytes_per_s": _READ,
}  # fmt: skip
EXPERTS: Final = 128
SLOTS: Final = 66
UPLOADS: Final = "two-uploads-lru"
EARLY: Final = {"name": UPLOADS, "early": True}
ROWS: Final[Sequence[tuple[str, Mapping[str, Any], float, str]]] = (  # setting, policy, tokens/s and hits as measured
    ("no cache", {"name": "llama-cpp", "n_cpu_moe": 48}, 44.9, "-"),
    ("66 slots, --moe-expert-cache-inserts 1", {"name": UPLOADS, "inserts": 1}, 105.7, "84.9"),
    ("66 slots as shipped, inserts 2", {"name": UPLOADS}, 33.1, "15.7 to 23.4"),
    ("66 slots, inserts 4", {"name": UPLOADS, "inserts": 4}, 31.7, "3.1"),
    ("66 slots, copies issued early", EARLY, 104.0, "91.0"),
)
TERMS: Final = (
    ("all else", "ms", 6.79, 6.46, 6.93),
    ("a miss", "ms", 0.0386, 0.0336, 0.0469),
    ("an upload", "ms", 0.0256, 0.0212, 0.0306),
)
"""Terms of the measured line, each with its 95 % interval."""


def experiment(policies: Sequence[Mapping[str, Any]], slots: Sequence[int], seeds: Sequence[int], tokens: int) -> dict[str, Any]:
    """Return an experiment with these policies and slots of each layer."""
    routing = [{"synthesize": "qwen3-30b-a3b", "requests": 1, "prompt": 16, "decode": tokens, "seed": seed} for seed in seeds]
    return {
        "name": "upload-cache", "model": MODEL, "hardware": MACHINE, "trace": routing, "plots": [], "timeline": None,
        "workload": {"batch_size": 1, "prompt_tokens": 16, "decode_tokens": tokens},
        "cache": {"ratio": [one / EXPERTS for one in slots]}, "policies": [dict(one) for one in policies],
    }  # fmt: skip


def settings(tokens: int = 512) -> list[tuple[str, float, float, str, float]]:
    """Return setting, measured and simulated tokens/s, and hits in %."""
    rows = moesim.run(experiment([one[1] for one in ROWS], [SLOTS], [0], tokens)).table.to_dict("records")
    return [
        (name, measured, 1e9 / row["tpot_mean_ns"], hits, 100 * row["hit_rate"])
        for (name, _, measured, hits), row in zip(ROWS, rows, strict=True)
    ]  # fmt: skip


def terms(
    slots: Sequence[int] = (32, 40, 48, 56, 64), seeds: Sequence[int] = (0, 1), tokens: int = 256
) -> tuple[list[float], float]:
    """Return A, B and C of a line through simulated runs, in ms, and what is left over (root of the mean square)."""
    gated = {**EARLY, "mmap": False, "admit": 2, "window": 8}
    frame = moesim.run(experiment([{**EARLY, "mmap": False}, gated], slots, seeds, tokens)).table
    n_bytes = 3 * 2048 * 768 * MODEL["expert_bits"] / 8  # type: ignore[operator]
    misses, uploads = frame["count_cache_misses"] / tokens, frame["bytes_update"] / n_bytes / tokens
    given, ms = np.column_stack([np.ones(len(frame)), misses, uploads]), frame["tpot_mean_ns"].to_numpy() / 1e6
    found = np.linalg.lstsq(given, ms, rcond=None)[0]
    return found.tolist(), float(np.sqrt(np.mean((given @ found - ms) ** 2)))


def show(given: Namespace) -> None:
    """Print what was asked for."""
    if given.terms:
        found, left = terms()
        head = ["of a token", "measured, ms", "95 %", "simulated, ms"]
        cells = [[name, f"{measured:g}", f"{low:g} to {high:g}", f"{own:.3g}"]
                 for (name, _, measured, low, high), own in zip(TERMS, found, strict=True)]  # fmt: skip
        sys.stdout.write(render(head, cells, given.form, head[1:]) + f"\nleft over: measured 0.06 ms, simulated {left:.2g} ms\n")
        return
    head = ["setting", "measured, tokens/s", "hits, %", "simulated, tokens/s", "hits, % "]
    cells = [[name, f"{measured:g}", hits, f"{own:.3g}", f"{rate:.3g}"] for name, measured, own, hits, rate in settings()]
    sys.stdout.write(render(head, cells, given.form, head[1:]) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    options = command.parser("experiments.research.tables.upload_cache", __doc__)
    options.add_argument("--terms", action="store_true", help="the terms of a line through runs")
    return command.run(show, options, arguments)


if __name__ == "__main__":
    sys.exit(main())
