"""Questions to ``moesim recommend`` about a model of four layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesim.studies.advice.candidates import Space
from moesim.studies.advice.others import routings
from moesim.studies.advice.question import Asked, look_up
from moesim.testing.traces import synthetic_trace

MODEL = {"base": "mixtral-8x7b", "n_layers": 4}
GIB = 2**30


def four_layers(folder: Path) -> str:
    """Write routing of the model into a folder."""
    made = synthetic_trace(n_layers=4, n_experts=8, top_k=2, n_requests=6, prompt=8, decode=6, calibration=True)
    return str(made.write(folder / "four-layers.safetensors"))


def asked(trace: str | None = None, **changes: Any) -> Asked:
    """Ask about the model on a machine with 3 GiB on the GPU."""
    base = {"vram": "3GiB", "ram": "64GiB", "prompt": 8, "decode": 6, "context": 14, "bits": "4.5", "trace": trace}
    return Asked(**{"model": MODEL, "hardware": "rtx3090-epyc7532", **base, **changes})


def space_of(question: Asked, folder: Path) -> Space:
    """Return the candidates of a question."""
    setting = look_up(question, folder)
    return Space(setting, routings(setting.model, question)[0])


def four_layer_gguf(path: Path) -> None:
    """Write a GGUF file of a small Mixtral."""
    from tests.model.gguf_kit import Q8_0, attention, basic, ends, experts

    w = basic(path, "llama", 4)
    for layer in range(4):
        attention(w, layer)
        experts(w, layer, 8, 512, Q8_0)
    ends(w)
    w.close()
