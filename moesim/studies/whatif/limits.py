"""Limits of a run: time of its decode steps by the part that would have to be faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from moesim.hardware.costs import CostModel
from moesim.metrics.breakdown import CAUSES, task_cause
from moesim.records import TaskRecord
from moesim.studies.whatif.machines import ONE, faster_device

if TYPE_CHECKING:
    from moesim.core.record_table import RecordTable
    from moesim.experiment.runner import Inputs
    from moesim.experiment.sweep import RunSpec
    from moesim.metrics.outcome import Outcome

RESOURCES: Final = {
    "link": "link", "CPU memory": "CPU", "CPU compute": "CPU", "CPU start-up": "CPU", "GPU memory": "GPU",
    "GPU compute": "GPU", "GPU launches": "GPU", "activations": "activations", "decisions": "decisions",
    "predictor": "predictor", "host code": "host code", "waiting": "waiting",
}  # fmt: skip
"""What time is charged to, and the part of the machine that it belongs to."""

_OF_CAUSE: Final = {
    "exposed_demand": "link", "exposed_prefetch": "link", "exposed_other_transfer": "link",
    "activation": "activations", "decision": "decisions", "predict": "predictor", "host": "host code", "idle": "waiting",
}  # fmt: skip
"""Causes that are one resource; the others are tasks of devices, which are split."""

_FASTER = Fraction(10**9)
_REST = {"CPU": "CPU start-up", "GPU": "GPU launches"}
_PARTS = ("memory", "compute")


@dataclass(frozen=True)
class Limits:
    """Shares of the time of decoding by resource."""

    shares: Mapping[str, float]  # share of the time by resource, in the order of `RESOURCES`; they add up to 1

    @property
    def by_part(self) -> dict[str, float]:
        parts: dict[str, float] = {}
        for resource, share in self.shares.items():
            parts[RESOURCES[resource]] = parts.get(RESOURCES[resource], 0.0) + share
        return parts

    @property
    def limit(self) -> str:
        """The largest resource of the part with the largest share; of equals the first."""
        parts = self.by_part
        largest = max(parts, key=lambda part: parts[part])
        return max((r for r in self.shares if RESOURCES[r] == largest), key=lambda r: self.shares[r])

    def text(self, least: float = 0.05, most: int = 3) -> str:
        """Write the largest shares.

        >>> Limits({"link": 0.7, "GPU memory": 0.26, "GPU launches": 0.04}).text()
        'link 70 %, GPU memory 26 %'
        """
        chosen = sorted((r for r in self.shares if self.shares[r] >= least), key=lambda r: -self.shares[r])[:most]
        return ", ".join(f"{resource} {100 * self.shares[resource]:.0f} %" for resource in chosen)


def limits_of(inputs: Inputs, spec: RunSpec, outcome: Outcome) -> Limits:
    """Compute the limits of a run."""
    # Transfers, activations, decisions and predictors are resources as they are. The time of tasks is
    # divided among devices by how long each worked for that cause; on one, what stays if memory and
    # compute took no time is launches and the router's way, and the rest is split in proportion to what
    # either would save.
    records, split = outcome.records, outcome.split
    assert records is not None and split is not None
    steps = {step.step for step in records.steps if step.phase == "decode"} or {step.step for step in records.steps}
    times = split.select(steps)
    found = dict.fromkeys(RESOURCES, 0.0)
    whole = sum(times.values())
    tasks = _Tasks(inputs, spec)
    worked: dict[str, dict[str, float]] = {}
    for task, took in _alike(records.tasks, steps):
        by_resource = worked.setdefault(task_cause(task, outcome.machine.kinds), {})
        for resource, share in tasks.split(task, outcome.machine.kinds[task.device]).items():
            by_resource[resource] = by_resource.get(resource, 0.0) + share * took
    for cause in CAUSES:
        if not times[cause]:
            continue
        # A task of a step before may reach into these; then nothing of its kind was begun in them.
        by_resource = {_OF_CAUSE[cause]: 1.0} if cause in _OF_CAUSE else worked.get(cause, {"waiting": 1.0})
        total = sum(by_resource.values())
        for resource, ns in by_resource.items():
            found[resource] += times[cause] * ns / total
    return Limits({resource: ns / whole if whole else 0.0 for resource, ns in found.items()})


_BY_CONTEXT: Final = ("attention", "dense", "leading")
"""Kinds of task whose cost depends on their step and micro-batch: on the tokens that their requests have had."""


_APART: Final = ("predict", "host")


def _alike(tasks: RecordTable[TaskRecord], steps: set[int]) -> Iterator[tuple[TaskRecord, int]]:
    """Yield one task of each sort of equal cost, and the time of all of its sort in ns."""
    (device, _), (kind, kinds) = tasks.texts("device"), tasks.texts("kind")
    step, ns = tasks.column("step"), tasks.column("end") - tasks.column("start")
    places = np.flatnonzero(np.isin(step, list(steps)) & (ns > 0) & ~np.isin(kind, [_code(kinds, one) for one in _APART]))
    by_context = np.isin(kind, [_code(kinds, one) for one in _BY_CONTEXT])
    sort = np.zeros(len(places), np.int64)
    for column in (
        device, kind, tasks.column("rows"), tasks.column("work"), tasks.column("expert") >= 0,
        np.where(by_context, step, -1), np.where(by_context, tasks.column("mb"), -1),
    ):  # fmt: skip
        values, codes = np.unique(column[places], return_inverse=True)
        sort = np.unique(sort * len(values) + codes, return_inverse=True)[1]
    firsts = places[np.unique(sort, return_index=True)[1]]
    total = np.zeros(len(firsts), np.int64)
    np.add.at(total, sort, ns[places])
    return zip(tasks.some(firsts), total.tolist(), strict=True)


def _code(texts: tuple[str, ...], text: str) -> int:
    return texts.index(text) if text in texts else -1


class _Tasks:
    """A task's cost on the machine, and where memory, compute or both take no time."""

    def __init__(self, inputs: Inputs, spec: RunSpec) -> None:
        self._steps = inputs.workload(spec).steps
        self._costs = {
            "whole": self._model(spec, ONE, ONE),
            "memory": self._model(spec, _FASTER, ONE),
            "compute": self._model(spec, ONE, _FASTER),
            "both": self._model(spec, _FASTER, _FASTER),
        }

    def _model(self, spec: RunSpec, memory: Fraction, compute: Fraction) -> CostModel:
        devices = {
            name: device if device.role == "storage" else faster_device(device, memory, compute)
            for name, device in spec.hardware.devices.items()
        }
        hardware = replace(spec.hardware, devices=devices)
        return CostModel(spec.model, hardware, transfer=spec.transfer(None)[0], extrapolate=True)

    def split(self, task: TaskRecord, kind: str) -> dict[str, float]:
        """Return the shares of a task's time by resource; they add up to 1."""
        part = kind.upper()
        whole = self._ns(self._costs["whole"], task)
        fixed = min(whole, self._ns(self._costs["both"], task))  # whatever is faster, this stays
        if not whole or fixed == whole:
            return {_REST[part]: 1.0}
        saved = {name: max(0, whole - self._ns(self._costs[name], task)) for name in _PARTS}
        total = sum(saved.values())
        # Where reading and computing take equally long, neither saves anything alone: half is charged to each.
        weight = {name: ns / total if total else 1 / len(_PARTS) for name, ns in saved.items()}
        shares = {f"{part} {name}": (whole - fixed) / whole * weight[name] for name in _PARTS} | {_REST[part]: fixed / whole}
        return {resource: share for resource, share in shares.items() if share}

    def _ns(self, costs: CostModel, task: TaskRecord) -> int:
        device, rows = task.device, task.rows
        if task.expert >= 0:
            return costs.expert_ns(device, rows)
        if task.kind in ("embedding", "head"):
            return (costs.embedding_ns if task.kind == "embedding" else costs.head_ns)(device, rows)
        if task.kind == "shared":
            return costs.shared_ns(device, rows, task.layer)
        context = self._context(task)
        if task.kind == "leading":
            return costs.leading_ns(device, rows, *context)
        if task.kind == "attention":
            return costs.attention_ns(device, rows, *context, task.layer)
        # A dense task is the rest of the layer, or that and the attention, if both are on one device.
        rest = costs.dense_ns(device, rows, task.layer)
        alone = task.work == self._costs["whole"].dense_ns(device, rows, task.layer)
        return rest if alone else rest + costs.attention_ns(device, rows, *context, task.layer)

    def _context(self, task: TaskRecord) -> tuple[int, int]:
        """Query-key pairs and requests of the rows of a task, as the engine counts them."""
        step = self._steps[task.step]
        if task.kind == "leading":
            return step.work2, len(set(step.requests.tolist()))
        micro = step.micro[task.mb]
        return micro.work2, len(set(step.requests[micro.first_row : micro.first_row + micro.n_rows].tolist()))
