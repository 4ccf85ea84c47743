"""Questions to ``moesim recommend`` about a model of four layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesim.studies.advice.candidates import Space
from moesim.studies.advice.question import Asked, find_routing, look_up
from moesim.testing.traces import synthetic_trace

MODEL = {"base": "mixtral-8x7b", "n_layers": 4}
GIB = 2**30


def four_layers(folder: Path) -> str:
    """Write routing of the model into a folder."""
    signals = {"gate_next1": 0.8, "gate_next2": 0.7, "gate_next3": 0.7, "residual": 0.7}
    made = synthetic_trace(n_layers=4, n_experts=8, top_k=2, n_requests=6, prompt=8, decode=6, calibration=True, signals=signals)
    return str(made.write(folder / "four-layers.safetensors"))


def asked(trace: str, **changes: Any) -> Asked:
    """Ask about the model on a machine with 3 GiB on the GPU."""
    base = {"vram": "3GiB", "ram": "64GiB", "prompt": 8, "decode": 6, "trace": trace}
    return Asked(**{"model": MODEL, "hardware": "rtx3090-epyc7532", **base, **changes})


def space_of(question: Asked, folder: Path) -> Space:
    """Give the candidates of a question."""
    setting = look_up(question, folder)
    return Space(setting, find_routing(setting.model, question, "test")[0])
