"""Candidates written down: as an experiment, and as a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesim.studies.advice.candidates import Candidate
from moesim.studies.advice.setting import PREFILL_CHUNK, Setting


def experiment_of(setting: Setting, trace: Any, candidates: Sequence[Candidate], decode: int) -> dict[str, Any]:
    """Write candidates of one class as an experiment."""
    asked = setting.asked
    # A runnable placement says itself what is on the GPU: all slots are granted, and the machine's memory, which is --vram,
    # bounds it. A paper's cache is filled up to what --vram leaves beside everything else.
    if candidates[0].runnable:
        cache: dict[str, Any] = {"ratio": 1.0}
    else:
        cache = {"budget": setting.vram_bytes - setting.spare_kv_bytes}
    return {
        "model": setting.model_ref,
        "hardware": setting.hardware_ref,
        "trace": trace,
        "workload": {
            "batch_size": asked.batch, "prompt_tokens": asked.prompt, "decode_tokens": decode, "prefill_chunk": PREFILL_CHUNK
        },
        "cache": cache,
        "policies": [dict(one.policy) for one in candidates],
        "timeline": None,
    }  # fmt: skip


def title(candidate: Candidate) -> str:
    """Name a candidate in a word and its number."""
    return candidate.family if candidate.number is None else f"{candidate.family} {candidate.number}"
