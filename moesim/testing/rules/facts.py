"""Facts of a run in the order in which they happened, for rules that are replayed."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.policy import CACHE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.hardware.costs import CostModel
    from moesim.model import ModelSpec
    from moesim.policy import Placement
    from moesim.records import EvictionRecord, Records, StepRecord, TaskRecord, TransferRecord
    from moesim.trace.predictors import Predictor
    from moesim.trace.workload import Workload
    from moesim.trace.workload.compose import LayerRouting

Unit = tuple[int, int]  # layer, expert
Copied = tuple[int, ...]  # the same, and the bits of a copy that has not the full width


def copied(record: TransferRecord | EvictionRecord) -> Copied:
    """Return which copy a record is about."""
    return (record.layer, record.expert, *(() if record.bits is None else (int(record.bits),)))


class Visit(NamedTuple):
    """A routed micro-batch of a layer: what the router chose, and what was on a GPU when it had."""

    time: int
    step: int
    layer: int
    mb: int
    phase: str
    routing: LayerRouting
    hits: frozenset[int]  # experts on a GPU
    coming: frozenset[int]  # experts on their way to one

    @property
    def units(self) -> list[Unit]:
        """The active experts with their layer, ascending."""
        return [(self.layer, expert) for expert in self.routing.active]


class Load(NamedTuple):
    """A copy of an expert to a GPU, from its order to its arrival."""

    submitted: int
    start: int
    end: int  # of its last chunk, or of what the end of the run left of it
    unit: Unit
    cause: str
    fetch: int
    pool: str
    n_bytes: int
    copy: Copied


@dataclass(frozen=True)
class Facts:
    """A run on one GPU: its inputs, where weights were at the start, and its records."""

    records: Records
    workload: Workload
    placement: Placement
    model: ModelSpec
    costs: CostModel
    tables: Mapping[str, Any]
    predictors: Mapping[str, Predictor]
    cache: str = ""  # the device whose cache is judged, if it is not the GPU

    @cached_property
    def gpu(self) -> str:
        return self.cache or next(name for name, device in self.costs.hardware.devices.items() if device.role == "accelerator")

    @property
    def hosts(self) -> Sequence[str]:
        return [name for name, device in self.costs.hardware.devices.items() if device.role != "accelerator"]

    @property
    def cpu(self) -> str:
        return self.hosts[0]

    def waits(self, visit: Visit, expert: int, load_ns: int) -> int:
        """Return the time from a visit until an expert is on the GPU if it is loaded at once."""
        if expert in visit.hits:
            return 0
        if expert not in visit.coming:
            return load_ns
        under_way = (load for load in self.loads if load.unit == (visit.layer, expert) and load.start <= visit.time < load.end)
        return next((load.end - visit.time for load in under_way), load_ns)

    @cached_property
    def visits(self) -> list[Visit]:
        found = []
        for look in self.records.lookups:
            step = self.workload.steps[look.step]
            routing = step.micro[look.mb].layers[look.layer]
            hits, coming = (
                frozenset(e for e, yes in zip(look.active, flags, strict=True) if yes) for flags in (look.hits, look.in_flight)
            )
            found.append(Visit(look.time, look.step, look.layer, look.mb, step.phase, routing, hits, coming))
        return found

    @cached_property
    def departures(self) -> list[EvictionRecord]:
        return [gone for gone in self.records.evictions if gone.device == self.gpu]

    @cached_property
    def loads(self) -> list[Load]:
        """All copies of experts to the GPU, by start."""
        pieces = defaultdict(list)
        for piece in self.records.transfers:
            if piece.expert >= 0 and piece.cause in ("demand", "prefetch", "update") and piece.link.endswith(self.gpu):
                pieces[piece.fetch].append(piece)
        pools = {gone.fetch: gone.pool for gone in self.departures}
        found = []
        for fetch, parts in pieces.items():
            first, last = parts[0], parts[-1]
            # A copy for one use is dropped after it, so that a copy that stays is the cache's, unless it was a guess.
            pool = pools.get(fetch, CACHE if first.cause != "prefetch" or self._only_cache else "")
            n_bytes = self.model.expert_bytes(first.layer, first.bits)
            unit, copy = (first.layer, first.expert), copied(first)
            found.append(Load(first.submitted, first.start, last.end, unit, last.cause, fetch, pool, n_bytes, copy))
        return sorted(found, key=lambda load: (load.start, load.fetch))

    @cached_property
    def _only_cache(self) -> bool:
        return all(pool.name == CACHE for pool in self.placement.pools if pool.device == self.gpu)

    @cached_property
    def per_layer(self) -> bool:
        return any(pool.per_layer for pool in self.placement.pools if (pool.device, pool.name) == (self.gpu, CACHE))

    @cached_property
    def capacity(self) -> list[int]:
        """Bytes of each cache: of each layer, or of the only one."""
        n_layers = self.model.n_layers
        sizes = [p.sizes(n_layers) for p in self.placement.pools if (p.device, p.name) == (self.gpu, CACHE)]
        return [sum(each) for each in zip(*sizes, strict=True)] if sizes else []

    @cached_property
    def start(self) -> list[Unit]:
        """Members of the cache at the start, in the order of the placement."""
        copies = [copy for copy in self.placement.copies if (copy.device, copy.pool) == (self.gpu, CACHE)]
        return [(copy.layer, expert) for copy in copies for expert in copy.experts]

    @cached_property
    def tasks(self) -> list[TaskRecord]:
        return [task for task in self.records.tasks if task.kind == "expert"]

    @cached_property
    def _uses(self) -> dict[Unit, list[tuple[int, int]]]:
        found = defaultdict(list)
        for task in self.tasks:
            if task.device == self.gpu:
                found[task.layer, task.expert].append((task.submitted, task.end))
        return found

    def wanted_at(self, load: Load) -> int:
        """Return when the visit was routed for which a copy was ordered, present or next."""
        times = [visit.time for visit in self.visits]
        at = bisect_right(times, load.submitted) - 1
        if at >= 0 and load.unit in self.visits[at].units:
            return times[at]
        return next((visit.time for visit in self.visits[at + 1 :] if load.unit in visit.units), load.end)

    @cached_property
    def _lives(self) -> dict[int, list[tuple[int, int, int]]]:
        gone = {d.fetch if d.fetch >= 0 else (d.layer, d.expert): d.time for d in self.departures}
        never, lives = self.records.makespan_ns + 1, defaultdict(list)
        for copy in self.placement.copies:
            for e in copy.experts if copy.device == self.gpu else ():
                lives[copy.layer].append((e, -1, gone.get((copy.layer, e), never)))
        for load in self.loads:
            lives[load.unit[0]].append((load.unit[1], load.submitted, gone.get(load.fetch, never)))
        return lives

    def held(self, layer: int, time: int) -> set[int]:
        """Return a layer's experts on the GPU, or ordered before a time, with those just leaving."""
        return {expert for expert, begin, end in self._lives[layer] if begin < time <= end}

    def in_use(self, unit: Unit, time: int) -> bool:
        """Whether an execution on the GPU, waiting or under way, reads a copy."""
        return any(begin <= time < end for begin, end in self._uses.get(unit, ()))

    @cached_property
    def _begins(self) -> list[int]:
        return [step.begin for step in self.records.steps]

    def step(self, time: int) -> StepRecord:
        return self.records.steps[max(0, bisect_right(self._begins, time) - 1)]

    def phase(self, time: int) -> str:
        return self.step(time).phase

    @cached_property
    def _layers(self) -> tuple[list[int], list[Any]]:
        spans = sorted(self.records.layers, key=lambda one: one.begin)
        return [one.begin for one in spans], spans

    def visit_end(self, layer: int, time: int) -> int:
        """Return when the present visit of a layer ends; the given time if there is none."""
        begins, spans = self._layers
        at = bisect_right(begins, time) - 1
        return spans[at].end if at >= 0 and spans[at].layer == layer and spans[at].end >= time else time

    def next_visit(self, layer: int, time: int) -> int:
        """Return when a layer is routed next; the end of the run if it is not."""
        return next((v.time for v in self.visits if v.layer == layer and v.time > time), self.records.makespan_ns)

    def busy_until_the_end(self, time: int) -> bool:
        """Whether no link to the GPU pauses from a time on, so that waiting copies may never start."""
        pieces = sorted((piece.start, piece.end) for piece in self.records.transfers if piece.link.endswith(self.gpu))
        for start, end in pieces:
            if start > time:
                return False
            time = max(time, end)
        return time >= self.records.makespan_ns

    @cached_property
    def next_steps(self) -> dict[Unit, list[int]]:
        """Steps in which each expert is active, ascending: the future that oracles know."""
        found = defaultdict(list)
        for step in self.workload.steps:
            for layer in range(self.model.n_layers):
                for expert in np.unique(np.concatenate([micro.experts[:, layer].ravel() for micro in step.micro])).tolist():
                    found[layer, expert].append(step.index)
        return found

    def next_use(self, unit: Unit, visit: Visit) -> int:
        """Return the step of the next use of an expert after a visit, counting this one as over."""
        steps = self.next_steps.get(unit, [])
        after = visit.step if unit[0] <= visit.layer else visit.step - 1
        at = bisect_right(steps, after)
        return steps[at] if at < len(steps) else 1 << 62
