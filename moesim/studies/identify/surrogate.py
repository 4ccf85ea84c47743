"""A steady decode step in closed form, where nothing moves: a sum of the same costs as the engine's.

Everything that constants do not change - who is where, how many rows each expert gets - is looked up once for each case.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from moesim.hardware import HardwareProfile
from moesim.hardware.costs import CostModel
from moesim.studies.identify.cases import Case, decode_workload, placement_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.workload import Workload


class Surrogate:
    """The closed form of one case."""

    def __init__(self, case: Case, hardware: HardwareProfile) -> None:
        self.case = case
        model = case.model
        workload = decode_workload(case)
        placement = placement_of(case, hardware, workload)
        compute = hardware.compute
        self._at = {
            part: [placement.parts.get((part, layer), compute) for layer in range(model.n_layers)]
            for part in ("attention", "dense", "shared")
        }
        self._ends = {part: placement.parts.get((part, -1), compute) for part in ("embedding", "leading", "head")}
        gpu = placement.pools[0].device if placement.pools else compute
        on_gpu = np.zeros((model.n_layers, model.n_experts), bool)
        for copy in placement.copies:
            on_gpu[copy.layer, list(copy.experts)] = True
        self.devices = {True: gpu, False: hardware.backing[0]}
        self.batch = case.observation.batch
        self.work2 = round(sum(step.micro[0].work2 for step in workload.steps) / len(workload.steps))
        self._members: dict[tuple[str, str, str], list[int]] = {}
        for layer, where in enumerate(zip(*(self._at[part] for part in ("attention", "dense", "shared")), strict=True)):
            self._members.setdefault((where[0], where[1], where[2]), []).append(layer)
        self._groups = {where: len(layers) for where, layers in self._members.items()}
        self._counts = {where: self._count(workload, on_gpu, where) for where in (True, False)}

    def _count(self, workload: Workload, on_gpu: NDArray[np.bool_], where: bool) -> NDArray[np.int64]:
        """Count experts by rows: (step, layer, rows), of those on the GPU or of the others."""
        steps = workload.steps
        n_layers = len(on_gpu)
        found = np.zeros((len(steps), n_layers, self.batch + 1), np.int64)
        for s, step in enumerate(steps):
            for layer in range(n_layers):
                routed = step.micro[0].layers[layer]
                for expert, load in zip(routed.active, (routed.rows[e] for e in routed.active), strict=True):
                    if bool(on_gpu[layer, expert]) is where:
                        found[s, layer, load] += 1
        return found

    def log_time(self, costs: CostModel) -> float:
        """Give the logarithm of the mean time of a decode step, ns, with these costs."""
        model, rows, work2 = costs.model, self.batch, self.work2
        at = self._ends["embedding"]
        time = float(costs.embedding_ns(at, rows))
        leading = costs.leading_ns(self._ends["leading"], rows, work2, rows)
        if leading:
            time += self._cross(costs, at, self._ends["leading"]) + leading
            at = self._ends["leading"]
        for (attention, rest, _), n_layers in self._groups.items():
            each = costs.attention_ns(attention, rows, work2, rows) + costs.dense_ns(rest, rows)
            time += n_layers * (each + self._cross(costs, attention, rest))
        for layer in range(model.n_layers):
            attention = self._at["attention"][layer]
            if at != attention:
                time += self._cross(costs, at, attention)
            at = self._at["dense"][layer]
        head = self._ends["head"]
        return math.log(time + self._layers(costs) + self._cross(costs, at, head) + costs.head_ns(head, rows))

    def _layers(self, costs: CostModel) -> float:
        """Time of shared and routed experts of all layers, mean of the steps: lanes of their devices run beside each other."""
        experts = {where: self._experts(costs, where) for where in (True, False)}
        total = 0.0
        for (_, home, shared), layers in self._members.items():
            lanes = {shared: np.full((len(experts[True]), len(layers)), float(costs.shared_ns(shared, self.batch)))}
            for where, works in experts.items():
                work, device = works[:, layers], self.devices[where]
                away = device != home
                there = self._cross(costs, home, device) if away else 0.0
                back = self._cross(costs, device, home) if away else 0.0
                free = np.maximum(lanes.get(device, np.zeros_like(work)), there)
                lanes[device] = np.where(work > 0, free + work + back, lanes.get(device, np.zeros_like(work)))
            total += float(np.max(np.stack(list(lanes.values())), axis=0).sum())
        return total / len(experts[True])

    def _experts(self, costs: CostModel, where: bool) -> NDArray[np.float64]:
        """Time of the experts of each step and layer on one side; 0 where there are none."""
        counts = self._counts[where]
        n = counts.sum(axis=2)
        if not n.any():
            return np.zeros(n.shape)
        device, submit = self.devices[where], costs.host_expert_ns()
        most = int(np.flatnonzero(counts.sum(axis=(0, 1)))[-1])
        here = counts[:, :, : most + 1] @ np.asarray(costs.expert_table(device, most)[: most + 1], float)
        if submit:
            if costs.host_shared() and not where:
                here = here + n * submit
            else:
                here = np.maximum(here + submit, n * submit + here / np.maximum(n, 1))
        return np.where(n > 0, here + costs.first_extra_ns(device), 0.0)

    def _cross(self, costs: CostModel, src: str, dst: str) -> float:
        return 0.0 if src == dst else float(sum(costs.activation_ns(link, self.batch) for link in costs.path(src, dst)))
