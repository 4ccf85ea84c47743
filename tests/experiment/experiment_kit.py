"""A small experiment in a temporary folder: Mixtral's shape, made-up routing, a few tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.testing.traces import synthetic_trace

SIGNALS = {"gate_next1": 0.8, "residual": 0.7}


def write_trace(path: Path, **changes: Any) -> Path:
    """Write a synthetic trace of Mixtral's shape, 8 requests of 6 + 4 tokens."""
    shape: dict[str, Any] = {"n_layers": 32, "n_experts": 8, "top_k": 2, "n_requests": 8, "prompt": 6, "decode": 4}
    options: dict[str, Any] = {"calibration": True, "signals": SIGNALS} | changes
    return synthetic_trace(**shape | options).write(path)


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    """Give a small experiment as a mapping; its trace is written into `folder` unless it is there."""
    trace = folder / "small.safetensors"
    if not trace.exists():
        write_trace(trace)
    base: dict[str, Any] = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4},
        "hardware": "rtx3090-epyc7532",
        "trace": str(trace),
        "workload": {"prompt_tokens": 6, "decode_tokens": 3},
        "cache": {"ratio": 0.25},
        "policies": ["on-demand", "lru"],
    }
    return copy.deepcopy(base | changes)


def resolve(folder: Path, **changes: Any) -> Experiment:
    """Resolve a small experiment."""
    return Experiment(parse_config(small(folder, **changes), "small.yaml"), "small.yaml")


def write_yaml(folder: Path, **changes: Any) -> Path:
    """Write a small experiment as a file."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(small(folder, **changes)))
    return path
