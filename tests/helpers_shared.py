"""Recorded data of others, which may lie in a folder `shared` next to the checkout; no part of the project."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from moesim.trace import Trace
from moesim.trace.formats.contract import Options
from moesim.trace.formats.importing import import_trace

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared_file(*parts: str) -> Path:
    """Find a file, or skip the test by the file's name."""
    path = SHARED.joinpath(*parts)
    if not path.is_file():
        pytest.skip(f"{'/'.join(('shared', *parts))} is not next to the checkout")
    return path


@cache
def gpt_oss() -> Trace:
    """Import 96 recorded sequences of gpt-oss-20b; their prompts have a length but no routing."""
    source = shared_file("traces", "gpt-oss-20b", "decode_routing.npz")
    columns = {"expert": "topk_ids", "weight": "topk_probs", "offsets": "seq_offsets", "name": "names"}
    options = Options(model="gpt-oss-20b", phase="decode", columns=columns)
    with TemporaryDirectory() as folder:  # what is mapped stays readable when its name is gone
        return import_trace([source], Path(folder, "gpt-oss-20b.safetensors"), options, label="measured").trace
