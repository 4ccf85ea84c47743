"""Device lanes: one task at a time, first in first out among those that are ready (rule 4)."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from moesim.engine.contention import Lane
from moesim.engine.memory import DeviceMemory
from moesim.records import TaskRecord

if TYPE_CHECKING:
    from moesim.engine.core import Engine
    from moesim.engine.layer import Group, Visit

_new = tuple.__new__
AHEAD = -(1 << 60)  # added to the number of a task that goes ahead of everything queued (Predict on the main lane)


class Task:
    """One occupation of a device lane, from submission to completion."""

    __slots__ = (
        "argument", "expert", "group", "key", "kind", "layer", "mb", "ready", "rows", "start", "step", "submitted", "then", "unit", "visit",
        "waits", "work",
    )  # fmt: skip

    def __init__(self, key: int, kind: str, step: int, layer: int, mb: int, expert: int, unit: int, rows: int, work: int,
                 submitted: int, visit: Visit | None, group: Group | None, then: Any,
                 argument: Any = None) -> None:  # fmt: skip
        self.key = key  # submission order
        self.kind = kind
        self.step = step
        self.layer = layer
        self.mb = mb
        self.expert = expert
        self.unit = unit  # -1 if it needs no expert's weights
        self.rows = rows
        self.work = work  # ns
        self.submitted = submitted
        self.ready = submitted
        self.start = 0
        self.visit = visit
        self.group = group
        self.then = then  # called at completion, with `argument` unless that is None; None for experts
        self.argument = argument
        self.waits = 0  # weights and inputs still missing


class DeviceLane:
    """A main or side lane: a heap of ready tasks in submission order."""

    __slots__ = ("current", "dense_activity", "device", "engine", "expert_activity", "heap", "lane", "name", "n_waiting")

    def __init__(self, engine: Engine, device: DeviceState, name: str) -> None:
        self.engine = engine
        self.device = device
        self.name = name
        self.expert_activity = f"{device.name}.experts" if name == "main" else f"{device.name}.side"
        self.dense_activity = f"{device.name}.dense" if name == "main" else f"{device.name}.side"
        self.heap: list[tuple[int, Task]] = []
        self.current: Task | None = None
        self.n_waiting = 0
        self.lane = Lane(engine.env, engine.contention)
        self.lane.on_done = self._done

    def submit(self, task: Task) -> None:
        if task.waits:
            self.n_waiting += 1
        else:
            heappush(self.heap, (task.key, task))

    def wake(self, task: Task, now: int) -> None:
        """One thing that the task waited for is there."""
        task.waits -= 1
        if not task.waits:
            self.n_waiting -= 1
            task.ready = now
            heappush(self.heap, (task.key, task))

    def start_next(self) -> None:
        task = heappop(self.heap)[1]
        self.current = task
        task.start = self.engine.env.now
        if task.unit >= 0:
            copy = self.device.memory.copies[task.unit]
            if not copy.used:
                copy.used = True
                if copy.fetch >= 0:
                    self.engine.records.used_fetches.add(copy.fetch)
            group = task.group
            if group is not None and group.first_extra:
                task.work += group.first_extra
                group.first_extra = 0
            self.lane.begin(self.expert_activity, task.work)
        else:
            self.lane.begin(self.dense_activity, task.work)

    def _done(self, event: Any) -> None:
        engine = self.engine
        if event is not None:
            task = self.current
            assert task is not None
            self.current = None
            self.lane.finish()
            engine.records.tasks.append(
                _new(
                    TaskRecord,
                    (task.start, engine.env.now, self.device.name, self.name, task.kind, task.step, task.layer, task.mb,
                     task.expert, task.rows, task.work, task.submitted, task.ready),
                )
            )  # fmt: skip
            engine.finished.append((self.device, task))
        engine.flush_if_last()


class DeviceState:
    """A device: its memory, its lanes and its expert costs."""

    __slots__ = ("backing", "first_extra", "index", "is_gpu", "main", "memory", "name", "pending", "side", "waiting")

    def __init__(self, engine: Engine, name: str, index: int, is_gpu: bool, backing: bool, memory: DeviceMemory) -> None:
        self.name = name
        self.index = index
        self.is_gpu = is_gpu
        self.backing = backing
        self.memory = memory
        self.first_extra = engine.costs.first_extra_ns(name)
        self.pending: dict[int, Any] = {}  # unit -> Transfer on its way here
        self.main = DeviceLane(engine, self, "main")
        self.side = DeviceLane(engine, self, "side")
