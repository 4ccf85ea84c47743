"""Recorded data of others, which may lie in a folder `shared` beside the checkout; no part of the project."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesim.trace import Trace

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared_file(*parts: str) -> Path:
    """Find a file, or skip the test by the file's name."""
    path = SHARED.joinpath(*parts)
    if not path.is_file():
        pytest.skip(f"{'/'.join(('shared', *parts))} is not beside the checkout")
    return path


def gpt_oss() -> Trace:
    """Read 96 recorded sequences of gpt-oss-20b; their prompts have a length but no routing."""
    data = np.load(shared_file("traces", "gpt-oss-20b", "decode_routing.npz"), allow_pickle=False)
    n_decode = np.diff(data["seq_offsets"])
    return Trace.build(
        experts=data["topk_ids"],
        weights=data["topk_probs"],
        n_prompt=np.zeros_like(n_decode),
        n_decode=n_decode,
        prompt_offset=data["n_prompt"],
        n_experts=32,
        model="gpt-oss-20b",
        label="measured",
    )
