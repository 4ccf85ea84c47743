"""Every model by name through the card, a comparison, a what-if and a recommendation; with the routing chosen for it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.model import load_model
from moesim.model.card import Card
from moesim.model.load import model_names
from moesim.testing.traces import synthetic_trace

pytestmark = pytest.mark.long
MACHINE = {
    "base": "rtx3090-epyc7532", "devices.gpu0.memory_bytes": "640GiB", "devices.cpu0.memory_bytes": "16TiB",
}  # fmt: skip
POLICIES = ["all-cpu", "llama-cpp", "lru", "on-demand"]


@pytest.mark.parametrize("name", model_names())
def test_a_model_by_name(name: str, tmp_path: Path) -> None:
    model = load_model(name)
    assert Card(model).text()
    trace = tmp_path / "made.safetensors"
    synthetic_trace(model.n_layers, model.n_experts, model.top_k, 5, prompt=3, decode=2).write(trace)
    asked: dict[str, Any] = {"jobs": 1, "progress": False}
    rows = moesim.compare(
        POLICIES, model=name, hardware=MACHINE, trace=trace, cache=0.25, prompt=3, decode=2, **asked
    ).rows  # fmt: skip
    assert [row["error"] for row in rows] == [None] * len(POLICIES)
    assert all(row["decode_tokens_per_s"] > 0 for row in rows)
    experiment = {
        "name": "one", "model": name, "hardware": MACHINE, "trace": str(trace), "cache": {"ratio": 0.25},
        "policies": ["llama-cpp"], "workload": {"batch_size": 1, "prompt_tokens": 3, "decode_tokens": 2},
    }  # fmt: skip
    assert moesim.whatif(experiment, ["link.bytes_per_s x2"], look=False, **asked).text()
    advice = moesim.recommend(name, MACHINE, vram="640GiB", ram="16TiB", trace=trace, prompt=3, decode=2, **asked)
    assert (advice.decode is not None and advice.decode.value > 0) or advice.doubt, "llama.cpp has it, or it is said"
    assert len(advice.text().splitlines()) <= 40


@pytest.mark.parametrize("name", model_names())
def test_a_model_with_the_routing_that_is_chosen_for_it(name: str) -> None:
    chosen = {"model": name, "hardware": MACHINE, "cache": 0.25, "decode": 2, "jobs": 1, "progress": False}
    (fixed,) = moesim.compare(["llama-cpp"], prompt=0, **chosen).rows
    lifts = moesim.compare(["lru"], prompt=2, **chosen).rows
    assert len(lifts) == 1 or all("assumed routing" in row["notes"] for row in lifts)
    assert len(lifts) in (1, 3) and ("no routing assumed" in fixed["notes"]) == (len(lifts) == 3)
    for row in (fixed, *lifts):
        assert row["error"] is None and row["decode_tokens_per_s"] > 0
