"""Time of the runtime itself, apart from computing and copying, by replays of a model.

Taking in what is done, asking the policy and handing calls to workers lies between a router and the first expert, the last
expert and the next layer, and two copies: some tenths of a millisecond a layer. The model's experts are of a middling size:
they hide the handing over behind those that run, as real ones do.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.hardware import HardwareProfile, build_profile
from moesim.hardware.costs import CostModel
from moesim.live.carrier import replay
from moesim.live.machine import LiveMachine
from moesim.live.profiler.probes import RUNTIME_BYTES, Tier
from moesim.model import ModelSpec
from moesim.policy import Copy, Drop, Fetch, LayerEnd, Placement, Pool, Routed, Run, View
from moesim.trace import Trace
from moesim.trace.workload import WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.records import Records, TaskRecord


_LAYERS, _N_EXPERTS, _TOP_K, _WARM_UP = 8, 16, 4, 4


class _Probe:
    """Runs every expert in one place: resident, on the host, or fetched and dropped."""

    exact = True
    needs: frozenset[str] = frozenset()

    def __init__(self, variant: str) -> None:
        self._variant = variant
        self.listens = frozenset({Routed, LayerEnd} if variant == "fetched" else {Routed})
        self._fetched: tuple[int, ...] = ()

    def place(self, view: View) -> Placement:
        fast, model = view.gpus[0], view.model
        pool = Pool(fast, "cache", model.n_layers * model.n_experts * model.expert_bytes(0))
        copies = [Copy(layer, range(model.n_experts), fast) for layer in range(model.n_layers)]
        return Placement([] if self._variant == "fetched" else copies, [pool])

    def decide(self, event: Any, view: View) -> Iterable[Any]:
        fast = view.gpus[0]
        if isinstance(event, LayerEnd):
            return [Drop(event.layer, self._fetched, fast)]
        self._fetched = event.active
        run = Run(event.layer, event.active, view.host if self._variant == "host" else fast)
        return [Fetch(event.layer, event.active, fast), run] if self._variant == "fetched" else [run]

    def evict(self, fetch: Fetch, view: View) -> None:
        return None


def runtime_gaps(machine: LiveMachine, hardware: HardwareProfile, variant: str, steps: int = 24) -> dict[str, list[float]]:
    """Measure the gaps of a runtime in decode steps of one row, in us, by name."""
    # "resident" and "host": time of a layer in which nothing ran (the latter with the crossing of
    # activations); "between" two experts; "fetched": from the end of a copy to the start of one that
    # waits for it.
    model = ModelSpec(
        name="middling", n_layers=_LAYERS, n_experts=_N_EXPERTS, top_k=_TOP_K, hidden=1024, expert_intermediate=1024, n_heads=8,
        n_kv_heads=8, head_dim=128, vocab=1024,
    )  # fmt: skip
    n_rows = steps + _WARM_UP
    chosen = np.random.default_rng(0).permuted(np.tile(np.arange(_N_EXPERTS), (n_rows, _LAYERS, 1)), axis=2)[..., :_TOP_K]
    trace = Trace.build(
        experts=chosen.astype(np.uint8), n_prompt=[1], n_decode=[n_rows - 1], n_experts=_N_EXPERTS, model="middling",
        label="synthetic",
    )  # fmt: skip
    workload = compose(trace, WorkloadSpec())
    costs = CostModel(model, hardware, extrapolate=True)
    slots = dict.fromkeys((d.name for d in hardware.devices.values() if d.role == "accelerator"), _LAYERS * _N_EXPERTS)
    records = replay(
        machine, model=model, costs=costs, workload=workload, policy=_Probe(variant), cache_slots=slots, policy_name="middling"
    )
    if variant == "fetched":
        return {variant: _between_copies(records)}
    layers, between = _idle(records)
    return {variant: layers, "between" if variant == "resident" else f"between {variant}": between}


def _idle(records: Records) -> tuple[list[float], list[float]]:
    """Return idle times of layers less those between two experts, and the latter one by one."""
    busy: dict[tuple[int, int], list[TaskRecord]] = {}
    for task in records.tasks:
        busy.setdefault((task.step, task.layer), []).append(task)
    layers, between = [], []
    for visit in records.layers:
        if visit.step < _WARM_UP:
            continue
        tasks = sorted(busy[visit.step, visit.layer])
        gaps = [b.start - a.end for a, b in pairwise(tasks) if a.expert >= 0]
        idle = tasks[0].start - visit.begin + sum(b.start - a.end for a, b in pairwise(tasks)) + visit.end - tasks[-1].end
        layers.append((idle - sum(gaps)) / 1000)
        between += [gap / 1000 for gap in gaps]
    return layers, between


def _between_copies(records: Records) -> list[float]:
    copies = sorted(t for t in records.transfers if t.expert >= 0)
    after = records.steps[_WARM_UP - 1].end
    return [
        (b.start - a.end) / 1000 for a, b in pairwise(copies) if a.layer == b.layer and a.start > after and b.submitted < a.end
    ]


class Runtime:
    """Replays on the machine of one tier."""

    def __init__(self, tier: Tier, disk: Path | None, seed: int) -> None:
        self._hardware = skeleton(tier)
        backend = "cuda" if any(device.place not in ("cpu", "disk") for device in tier.devices) else "cpu"
        gpus = [int(device.place.partition(":")[2]) for device in tier.devices if device.place not in ("cpu", "disk")]
        self._machine = LiveMachine(
            self._hardware, backend=backend, memory_bytes=RUNTIME_BYTES, disk=disk if "disk" in self._places(tier) else None,
            seed=seed, first_gpu=min(gpus, default=0),
        )  # fmt: skip

    @staticmethod
    def _places(tier: Tier) -> set[str]:
        return {device.place for device in tier.devices}

    def gaps_us(self, variant: str) -> dict[str, float]:
        return {name: median(gaps) for name, gaps in runtime_gaps(self._machine, self._hardware, variant).items()}

    def close(self) -> None:
        self._machine.close()


def skeleton(tier: Tier) -> HardwareProfile:
    """Make a profile of a tier's devices and links, with meaningless costs that no policy uses."""

    def some(value: Any) -> dict[str, Any]:
        return {"value": value, "source": "assumed", "why": "needed to run, and decides nothing"}

    def device(kind: str, role: str, cores: tuple[int, ...]) -> dict[str, Any]:
        rates = {} if kind == "disk" else {"memory_bytes_per_s": some(1e10), "flops": some(1e11)}
        return {"kind": kind, "role": role, "memory_bytes": some("1 TB"), **rates, **({"cores": list(cores)} if cores else {})}

    copies = {"latency_us": some(10), "bytes_per_s": some(1e10)}
    return build_profile(
        {
            "name": "skeleton", "description": "devices and links only", "compute": tier.compute, "backing": [tier.backing],
            "devices": {d.name: device(d.kind, d.role, d.cores) for d in tier.devices},
            "links": {
                link.name: {"any": copies, **({"cores": list(link.cores)} if link.cores else {}),
                            **({"medium": link.medium} if link.medium else {})}
                for link in tier.links
            },
        },
        "profile measure",
    )  # fmt: skip
