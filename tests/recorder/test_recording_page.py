"""The table of the guide on recordings layer by layer: what four models need, by bytes and operations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moesim.model import ModelSpec, load_model
from moesim.recorder import streaming
from moesim.recorder.checkpoint import LayeredModel, Parameters
from moesim.recorder.recording import Plan
from moesim.recorder.signals import SignalPlan

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guide" / "recording.md").read_text(encoding="utf-8")
N_TEXTS, TOKENS = 100, 1024
MODELS = {  # as the table calls them: our name, and whether experts are in MXFP4
    "Mixtral-8x7B": ("mixtral-8x7b", False),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", False),
    "gpt-oss-20b, MXFP4": ("gpt-oss-20b", True),
    "DeepSeek-V2-Lite": ("deepseek-v2-lite", False),
}
EXPERTS = {"mixtral": ("block_sparse_moe", "w1 w3", "w2"), None: ("mlp", "gate_proj up_proj", "down_proj")}
"""What the shards call the parts of an expert."""


class Names:
    """Shards of which the names are known, and nothing else is asked for."""

    def __init__(self, model: Any, mxfp4: bool) -> None:
        kind = model.config.model_type
        block, up, down = EXPERTS.get(kind, EXPERTS[None])
        self.names: list[str] = []
        self._mxfp4 = mxfp4
        for name, weight in model.state_dict().items():
            before, stack, what = name.partition(".mlp.experts.")
            if not stack or kind == "gpt_oss":
                self.names.append(name)
                continue
            parts = up if what == "gate_up_proj" else down
            self.names += [f"{before}.{block}.experts.{n}.{part}.weight" for n in range(len(weight)) for part in parts.split()]

    def check(self, names: Iterable[str]) -> None:
        pass

    def is_quantised(self, name: str) -> bool:
        return self._mxfp4 and name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def layerwise(name: str, mxfp4: bool) -> streaming.Layerwise:
    """A recording of the table's texts with a model that has its shape and no weights."""
    raw = json.loads((ROOT / "tests" / "model" / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layered: Any = LayeredModel.__new__(LayeredModel)  # without the routers' weights
    Parameters.__init__(layered, model, Names(model, mxfp4), torch.device("meta"), name)
    spec = load_model(name)
    routers = [SimpleNamespace(hidden=config.hidden_size)] * spec.n_layers
    recorder: Any = SimpleNamespace(top_k=spec.top_k, n_experts=spec.n_experts, routers=routers)
    plan = Plan(scores=spec.n_experts <= 16, signals=SignalPlan(spec.top_k, 3))
    return streaming.Layerwise(layered, recorder, [range(TOKENS)] * N_TEXTS, [128] * N_TEXTS, plan, Path("nowhere"))


def stated_rates() -> tuple[float, ...]:
    """Bytes or operations a second: disk, a laptop's processor, to the GPU, of the GPU."""
    text = " ".join(PAGE.split())
    found = re.search(r"They are (\S+) GB/s of a disk, (\S+) TFLOP/s .*?, (\S+) GB/s to the GPU and (\S+) TFLOP/s", text)
    assert found is not None
    disk, laptop, link, gpu = map(float, found.groups())
    return disk * 1e9, laptop * 1e12, link * 1e9, gpu * 1e12


def read_bytes(spec: ModelSpec, mxfp4: bool) -> float:
    """Embedding and layers in 16 bits; of MXFP4, each of 32 weights has 4 bits, and a scale of 8 bits is theirs."""
    bias = spec.expert_params - spec.n_mats * spec.hidden * spec.expert_intermediate
    expert = 2 * spec.expert_params if not mxfp4 else 2 * bias + (spec.expert_params - bias) * (4 + 8 / 32) / 8
    return 2 * (spec.total_params - spec.head_params - spec.experts_params_total) + expert * spec.n_experts * spec.n_layers


def duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"


@pytest.mark.parametrize("row", MODELS)
def test_the_table_of_what_is_needed(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mxfp4 = MODELS[row]
    base = re.search(r"from (\S+) GB of Python and libraries up", " ".join(PAGE.split()))
    assert base is not None
    monkeypatch.setattr(streaming, "_resident_bytes", lambda: int(float(base[1]) * 1e9))
    recording, spec = layerwise(name, mxfp4), load_model(name)
    read = read_bytes(spec, mxfp4)
    operations = 2 * (spec.active_params - spec.embedding_params - spec.head_params) * N_TEXTS * TOKENS
    disk, laptop, link, gpu = stated_rates()
    copied = read_bytes(spec, False)  # as they are dequantised
    wanted = [
        row, f"{recording.memory_needed() / 1e9:.1f} GB", f"{read / 1e9:.0f} GB",
        duration(read / disk + operations / laptop), duration(read / disk + copied / link + operations / gpu),
    ]  # fmt: skip
    assert f"| {' | '.join(wanted)} |" in PAGE.splitlines()
