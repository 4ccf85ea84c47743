"""How the cost of a simulation grows: with tokens, batch, experts and layers, one at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moesim.core import collector
from moesim.engine import simulate
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.records import Records
from moesim.studies.bench import HARDWARE
from moesim.testing.traces import synthetic_trace
from moesim.trace.workload import WorkloadSpec, compose

AXES = {
    "tokens": (256, 1024, 4096, 16384, 65536),
    "batch": (1, 4, 16, 64, 128),
    "experts": (8, 32, 128, 256),
    "layers": (8, 16, 32, 64),
}
"""What varies, and its values; the rest is as in `_BASE`."""
_BASE = {"tokens": 256, "batch": 1, "experts": 32, "layers": 16}
_TOP_K = 2
_SMALL = {"base": "qwen3-30b-a3b", "expert_bits": 4, "top_k": _TOP_K, "expert_intermediate": 256}  # half of them fit


@dataclass(frozen=True)
class Growth:
    """What was measured at one value."""

    varied: str
    value: int
    n_runs: int  # experts executed
    n_slots: int  # experts chosen by rows: a run serves all rows of a step that chose its expert
    cpu_s: float  # of this process, for routing and simulation
    # ns_per_run, ns_per_slot: of that; ratio: of the first of them to the first value's
    ns_per_run: float
    ns_per_slot: float
    ratio: float

    def record(self) -> dict[str, Any]:
        """Give all figures by name."""
        return asdict(self)

    def cells(self) -> list[str]:
        """Write the figures for the table."""
        counts = (self.value, self.n_runs, self.n_slots)
        times = (f"{self.cpu_s:.2f} s", f"{self.ns_per_run:,.0f}", f"{self.ns_per_slot:,.0f}", f"{self.ratio:.2f}")
        return [self.varied, *(f"{count:,}" for count in counts), *times]


def measure_growth(repeats: int, most_tokens: int) -> Iterator[Growth]:
    """Measure every axis with `lru`; the least time of the repeats counts."""
    _run(**_BASE)  # what is imported and remembered once
    for varied, values in AXES.items():
        first = 0.0
        for value in values:
            if varied == "tokens" and value > most_tokens:
                continue
            found = [_run(**(_BASE | {varied: value})) for _ in range(repeats)]
            n_runs, cpu_s = found[0][0], min(cpu for _, cpu in found)
            size = _BASE | {varied: value}
            n_slots = (size["tokens"] + 1) * size["batch"] * size["layers"] * _TOP_K
            each = cpu_s / n_runs * 1e9
            first = first or each
            yield Growth(varied, value, n_runs, n_slots, cpu_s, each, cpu_s / n_slots * 1e9, each / first)


def _run(tokens: int, batch: int, experts: int, layers: int) -> tuple[int, float]:
    """Return how many experts ran, and the CPU time; records are counted and dropped."""
    model = load_model({**_SMALL, "n_experts": experts, "n_layers": layers})
    trace = synthetic_trace(layers, experts, model.top_k, batch, 1, tokens)
    n_runs = 0

    def count(records: Records, _: int) -> None:
        nonlocal n_runs
        n_runs += int(np.count_nonzero(records.tasks.column("expert") >= 0))

    gc.collect()
    with collector.paused():
        began = time.process_time()
        simulate(
            model=model, costs=CostModel(model, load_hardware(HARDWARE)), workload=compose(trace, WorkloadSpec(batch_size=batch)),
            policy=make_policy("lru"), cache_slots={"gpu0": layers * experts // 2}, sink=count,
        )  # fmt: skip
        return n_runs, time.process_time() - began
