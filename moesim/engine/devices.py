"""Device lanes: one task at a time, first in first out among those that are ready (rule 4)."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from simpy.events import Timeout

from moesim.engine.contention import FULL, Lane
from moesim.engine.memory import DeviceMemory
from moesim.records import TaskRecord

if TYPE_CHECKING:
    from moesim.engine.core import Engine
    from moesim.engine.layer import Group, Visit

_new = tuple.__new__
AHEAD = -(1 << 60)  # added to the number of a task that goes ahead of everything queued (Predict on the main lane)


@dataclass(slots=True, eq=False)
class Task:
    """One occupation of a device lane, from submission to completion."""

    key: int  # submission order
    kind: str
    step: int
    layer: int
    mb: int
    rows: int
    work: int  # ns
    submitted: int
    ready: int
    expert: int = -1
    unit: int = -1  # the unit whose weights it reads
    visit: Visit | None = None
    group: Group | None = None
    then: Any = None  # called at completion; None for experts, and for dense parts, which are followed by Routed
    waits: int = 0  # weights and inputs still missing
    row_ids: Any = None  # rows of the step, where the Run named them
    start: int = 0
    lane: Any = None  # DeviceLane, once submitted


class DeviceLane:
    """A main or side lane: a heap of ready tasks in submission order, and the task that runs."""

    def __init__(self, engine: Engine, device: DeviceState, name: str) -> None:
        self.engine = engine
        self.device = device
        self.name = name
        suffix = ("experts", "dense") if name == "main" else ("side", "side")
        self.expert_activity = f"{device.name}.{suffix[0]}"
        self.dense_activity = f"{device.name}.{suffix[1]}"
        partners = engine.contention.partners
        self.plain = self.expert_activity not in partners and self.dense_activity not in partners
        self.heap: list[tuple[int, Task]] = []
        self.n_waiting = 0
        self.task: Task | None = None  # what runs
        self.lane = Lane(engine.env, engine.contention)
        self.lane.on_done = self._contended_done
        self.memory = device.memory
        self._copies = device.memory.copies
        self._records = engine.records.tasks
        self._used = engine.records.used_fetches

    def submit(self, task: Task) -> None:
        task.lane = self
        if task.waits:
            self.n_waiting += 1
        else:
            self._queue(task)

    def wake(self, task: Task) -> None:
        """One thing that the task waited for is there."""
        task.waits -= 1
        if not task.waits:
            self.n_waiting -= 1
            task.ready = self.engine.now
            self._queue(task)

    def _queue(self, task: Task) -> None:
        heappush(self.heap, (task.key, task))
        if self.task is None:
            self.engine.lanes_to_start.append(self)

    def start_next(self) -> None:
        """Start the first ready task, unless one runs."""
        if self.task is not None or not self.heap:
            return
        engine = self.engine
        task = self.task = heappop(self.heap)[1]
        task.start = engine.now
        is_expert = task.unit >= 0
        work = self._work(task) if is_expert else task.work
        if self.plain:
            Timeout(engine.env, work).callbacks.append(self._done)
        elif is_expert:
            self.lane.begin(self.expert_activity, work, self.device.reading_share(task.rows))
        else:
            self.lane.begin(self.dense_activity, work)

    def _work(self, task: Task) -> int:
        """Note that the copy is read, and return the task's work, with the extra of a group's first expert."""
        copy = self._copies[task.unit]
        if not copy.used:
            copy.used = True
            if copy.fetch >= 0:
                self._used.add(copy.fetch)
        group = task.group
        if group is not None and group.first_extra:
            task.work += group.first_extra
            group.first_extra = 0
        return task.work

    def _contended_done(self, event: Any) -> None:
        self.lane.finish()
        self._done(event)

    def _done(self, _: Any) -> None:
        """Record the task that ran; the engine will tell who must know."""
        engine = self.engine
        task = self.task
        assert task is not None
        self.task = None
        if self.heap:
            engine.lanes_to_start.append(self)
        self._records.append(
            _new(
                TaskRecord,
                (task.start, engine.now, self.device.name, self.name, task.kind, task.step, task.layer, task.mb, task.expert,
                 task.rows, task.work, task.submitted, task.ready),
            )
        )  # fmt: skip
        if task.then is None and task.unit < 0:
            engine.routed.append(task.mb)  # a dense part: its layer is routed
        else:
            engine.finished.append(task)


class DeviceState:
    """A device: its memory, its lanes and what is on its way to it."""

    def __init__(self, engine: Engine, name: str, index: int, role: str, backing: bool, memory: DeviceMemory) -> None:
        self.name = name
        self.index = index
        self.is_gpu = role == "accelerator"
        self.computes = role != "storage"
        self.backing = backing
        self.memory = memory
        self.first_extra = engine.costs.first_extra_ns(name)
        self.nearest: tuple[DeviceState, Any] | None = None  # the only possible source and the path from it, if just one
        self.expert_ns: dict[int, int] = {}  # rows -> ns, filled as needed
        self._reading: dict[int, int] = {}  # rows -> millionths
        self._costs = engine.costs
        self.pending: dict[int, Any] = {}  # unit -> Transfer on its way here
        self.main = engine.make_lane(self, "main")
        self.side = engine.make_lane(self, "side")

    def reading_share(self, rows: int) -> int:
        """Return the part of an expert's time that reading its weights takes, in millionths: all of it with one row.

        Of a processor only: what slows a GPU's experts beside its links has not been told apart by rows.
        """
        if self.is_gpu or rows <= 1:
            return FULL
        share = self._reading.get(rows)
        if share is None:
            share = self._costs.expert_ns(self.name, 1) * FULL // max(1, self._costs.expert_ns(self.name, rows))
            share = self._reading[rows] = max(1, min(FULL, share))
        return share
