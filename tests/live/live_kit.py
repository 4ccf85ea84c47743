"""A machine that is this one: two devices of kind cpu, one of them in the place of an accelerator, or a disk; tiny widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.policy import Action, Drop, Fetch, LayerEnd, Move, Placement, Pool, Routed, Run, Skip, View
from moesim.testing.traces import synthetic_trace
from tests.experiment.experiment_kit import SIGNALS

MODEL: dict[str, Any] = {
    "base": "mixtral-8x7b", "n_layers": 4, "n_experts": 8, "top_k": 2, "hidden": 64, "expert_intermediate": 32, "n_heads": 4,
    "n_kv_heads": 2, "head_dim": 16, "vocab": 100, "expert_bits": 32, "other_bits": 32, "act_bits": 32, "kv_bits": 32,
}  # fmt: skip


def sure(value: Any) -> dict[str, Any]:
    return {"value": value, "source": "assumed", "why": "a test"}


def device(**more: Any) -> dict[str, Any]:
    rates = {"memory_bytes_per_s": sure(1e10), "flops": sure(1e11), "launch_us": sure(20)}
    return {"kind": "cpu", "memory_bytes": sure("1 GB"), **rates, **more}


def two_parts(**changes: Any) -> dict[str, Any]:
    """Give a profile of an accelerator made of cores, and a host with all experts in memory."""
    copies = {"any": {"latency_us": sure(50), "bytes_per_s": sure(5e9)}}
    base = {
        "name": "two-parts", "description": "a test", "compute": "fast", "backing": ["host"],
        "devices": {"fast": device(role="accelerator"), "host": device()},
        "links": {"host->fast": copies, "fast->host": copies},
        "contention": [{"a": "fast.side", "b": "fast.experts", "a_rate": sure(1.0), "b_rate": sure(1.0)}],
    }  # fmt: skip
    return base | changes


def with_disk() -> dict[str, Any]:
    """Give a profile of cores with a bounded memory, and a disk that holds all experts."""
    reads = {"any": {"latency_us": sure(100), "bytes_per_s": sure(1e9)}}
    return {
        "name": "with-disk", "description": "a test", "compute": "fast", "backing": ["disk"],
        "devices": {"fast": device(role="accelerator"), "disk": {"kind": "disk", "memory_bytes": sure("1 GB")}},
        "links": {"disk->fast": reads, "fast->disk": reads},
    }  # fmt: skip


def experiment(folder: Path, **changes: Any) -> Experiment:
    """Resolve an experiment on a tiny model: 2 requests at once, 6 + 4 tokens, half of the experts cached."""
    trace = folder / "tiny.safetensors"
    if not trace.exists():
        synthetic_trace(
            n_layers=4, n_experts=8, top_k=2, n_requests=8, prompt=6, decode=4, calibration=True, signals=SIGNALS
        ).write(trace)
    profile = folder / "machine.yaml"
    profile.write_text(yaml.safe_dump(changes.pop("profile", two_parts())))
    base: dict[str, Any] = {
        "model": MODEL, "hardware": str(profile), "trace": str(trace),
        "workload": {"prompt_tokens": 6, "decode_tokens": 4, "batch_size": 2}, "cache": {"ratio": 0.5},
        "policies": ["lru"], "predictors": {"gate_next2": "oracle", "gate_next3": "oracle", "learned": "oracle"},
    }  # fmt: skip
    return Experiment(parse_config(base | changes, "tiny.yaml"), "tiny.yaml")


class Divided:
    """Run the first active expert of a layer on the host and fetch the others; with ``empty`` also return empty actions."""

    listens = frozenset({Routed, LayerEnd})
    needs: frozenset[str] = frozenset()

    def __init__(self, empty: bool = False, late: bool = False) -> None:
        self.empty = empty
        self.late = late
        self.exact = not late

    def place(self, view: View) -> Placement:
        return Placement(pools=[Pool("fast", "staging", view.model.n_experts * view.model.expert_bytes(0))])

    def decide(self, event: Any, view: View) -> list[Action]:
        layer = event.layer
        empty: list[Action] = [Run(layer, [], "host"), Run(layer, [], "fast"), Run(layer, [0], "host", []), Skip(layer, [])]
        empty += [Fetch(layer, [], "fast"), Drop(layer, [], "fast"), Move(layer, [], "fast", "staging")]
        if type(event) is LayerEnd:
            real: list[Action] = [Drop(layer, held, "fast")] if (held := view.residents("fast", "staging", layer)) else []
        else:
            first, *rest = event.active
            late = self.late and layer + 1 < view.model.n_layers
            real = [Run(layer, [first], "host", late=late), Fetch(layer, rest, "fast", pool="staging"), Run(layer, rest, "fast")]
        return [*empty, *real, *empty] if self.empty else real

    def evict(self, fetch: Fetch, view: View) -> None:
        """Wait for the end of the layer."""
