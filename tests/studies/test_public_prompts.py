"""Prompts with whole layers on the CPU, against llama.cpp's speeds on an RX 6700 XT: what attention on that side costs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import moesim

PUBLISHED = Path(__file__).parents[2] / "experiments" / "validation" / "public_sweeps.csv"


def seconds(setting: str) -> float:
    """Return the published time of a prompt's token in one setting of this machine."""
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["machine"] == "rx6700xt-ryzen5800x" and row["context"] == "pp512"]
    (found,) = [1 / float(row["measured"]) for row in rows if row["setting"] == setting]
    return found


@pytest.mark.long
@pytest.mark.parametrize(("n_gpu_layers", "on_cpu", "below", "above"), [(8, 41, 40, 48), (16, 33, 32, 40), (20, 29, 24, 32)])
def test_attention_of_cpu_layers_costs_prompts_a_few_percent(n_gpu_layers: int, on_cpu: int, below: int, above: int) -> None:
    """Against as many layers whose experts alone are there, between two that were measured. On the CPU it would cost 80 %."""
    ends = [seconds(f"-ngl 99 -ncmoe {n} of 48") for n in (below, above)]
    without = ends[0] + (ends[1] - ends[0]) * (on_cpu - below) / (above - below)
    published = without / seconds(f"-ngl {n_gpu_layers}")
    results = moesim.run(
        {
            "model": {"base": "qwen3-30b-a3b", "expert_bits": 4.85, "other_bits": 5.35},
            "hardware": "rx6700xt-ryzen5800x",
            "trace": {"synthesize": "qwen3-30b-a3b", "requests": 2, "prompt": 512, "decode": 1},
            "workload": {"prompt_tokens": 512, "decode_tokens": 1},
            "cache": {"ratio": 1},
            "policies": [{"name": "llama-cpp", "n_gpu_layers": n_gpu_layers}, {"name": "llama-cpp", "n_cpu_moe": on_cpu}],
        },
        progress=False,
    )
    whole, experts = results.table["prefill_tokens_per_s"]
    assert 0.94 < published < 0.96
    assert whole / experts == pytest.approx(published, abs=0.03)
