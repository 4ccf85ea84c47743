"""Device lanes: one task at a time, first in first out among those that are ready (rule 4).

Where several ready Runs of one layer follow each other and nobody asks about the moments in between, they are *chained*:
one alarm at the end of the last instead of one for each. Whoever looks at the engine's state in between sees it as if each
had been completed on its own (`catch_up`); whatever could come between them undoes the rest of the chain (`break_chain`).
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from simpy.events import Timeout

from moesim.engine.contention import Lane
from moesim.engine.memory import DeviceMemory
from moesim.records import TaskRecord

if TYPE_CHECKING:
    from moesim.engine.core import Engine
    from moesim.engine.layer import Group, Visit

_new = tuple.__new__
AHEAD = -(1 << 60)  # added to the number of a task that goes ahead of everything queued (Predict on the main lane)
NEVER = 1 << 62


class Task:
    """One occupation of a device lane, from submission to completion. Class attributes are what most tasks have."""

    unit = -1  # the unit whose weights it reads
    expert = -1
    visit: Visit | None = None
    group: Group | None = None
    then: Any = None  # called at completion, with `argument` unless that is None; None for experts
    argument: Any = None
    waits = 0  # weights and inputs still missing
    start = 0
    end = 0

    def __init__(self, key: int, kind: str, step: int, layer: int, mb: int, rows: int, work: int, submitted: int) -> None:
        self.key = key  # submission order
        self.kind = kind
        self.step = step
        self.layer = layer
        self.mb = mb
        self.rows = rows
        self.work = work  # ns
        self.submitted = self.ready = submitted


class DeviceLane:
    """A main or side lane: a heap of ready tasks in submission order."""

    def __init__(self, engine: Engine, device: DeviceState, name: str) -> None:
        self.engine = engine
        self.device = device
        self.name = name
        suffix = ("experts", "dense") if name == "main" else ("side", "side")
        self.expert_activity = f"{device.name}.{suffix[0]}"
        self.dense_activity = f"{device.name}.{suffix[1]}"
        partners = engine.contention.partners
        self.plain = self.expert_activity not in partners and self.dense_activity not in partners
        self.may_chain = self.plain and engine.may_chain
        self.heap: list[tuple[int, Task]] = []
        self.current: Task | None = None
        self.n_waiting = 0
        self.first_waiting = NEVER  # no task that waits has a smaller number than this
        self.chain: list[Task] = []  # what follows `current` without an alarm of its own
        self.chain_number = 0
        self.lane = Lane(engine.env, engine.contention)
        self.lane.on_done = self._contended_done
        self._tasks = engine.records.tasks
        self._copies = device.memory.copies

    # ------------------------------------------------------------------------------------------------------------- queue
    def submit(self, task: Task) -> None:
        if task.waits:
            self.n_waiting += 1
            if task.key < self.first_waiting:
                self.first_waiting = task.key
            return
        heappush(self.heap, (task.key, task))
        if self.current is None:
            self.engine.lanes_to_start.append(self)
        elif self.chain and task.key < self.chain[-1].key:
            self.break_chain()

    def wake(self, task: Task) -> None:
        """One thing that the task waited for is there."""
        task.waits -= 1
        if not task.waits:
            self.n_waiting -= 1
            if not self.n_waiting:
                self.first_waiting = NEVER
            task.ready = self.engine.now
            heappush(self.heap, (task.key, task))
            if self.current is None:
                self.engine.lanes_to_start.append(self)

    # ------------------------------------------------------------------------------------------------------------- start
    def start_next(self) -> None:
        """Start the first ready task, and chain what may follow it."""
        heap = self.heap
        if self.current is not None or not heap:
            return
        engine = self.engine
        task = heappop(heap)[1]
        self.current = task
        now = task.start = engine.now
        work = self._work(task) if task.unit >= 0 else task.work
        if not self.plain:
            self.lane.begin(self.expert_activity if task.unit >= 0 else self.dense_activity, work)
            return
        end = task.end = now + work
        if heap and self.may_chain and task.unit >= 0 and not engine.blocked:
            visit, group, limit = task.visit, task.group, self.first_waiting
            chain = self.chain
            while heap:
                key, follower = heap[0]
                if key > limit or follower.visit is not visit or follower.group is not group or follower.unit < 0:
                    break
                heappop(heap)
                follower.start = end
                end = follower.end = end + self._work(follower)
                chain.append(follower)
            if chain:
                self.chain_number += 1
                engine.chained.append(self)
                Timeout(engine.env, end - now, self.chain_number).callbacks.append(self._chain_done)
                return
        Timeout(engine.env, work).callbacks.append(self._done)

    def _work(self, task: Task) -> int:
        """Note that the copy is read, and return the task's work, with the extra of a group's first expert."""
        copy = self._copies[task.unit]
        if not copy.used:
            copy.used = True
            if copy.fetch >= 0:
                self.engine.records.used_fetches.add(copy.fetch)
        group = task.group
        if group is not None and group.first_extra:
            task.work += group.first_extra
            group.first_extra = 0
        return task.work

    # -------------------------------------------------------------------------------------------------------------- done
    def _done(self, _: Any) -> None:
        engine = self.engine
        env = engine.env
        now = engine.now = env.now
        task = self.current
        self.current = None
        if self.heap:
            engine.lanes_to_start.append(self)
        self._tasks.append(
            _new(
                TaskRecord,
                (task.start, now, self.device.name, self.name, task.kind, task.step, task.layer, task.mb, task.expert,  # type: ignore[union-attr]
                 task.rows, task.work, task.submitted, task.ready),  # type: ignore[union-attr]
            )
        )  # fmt: skip
        engine.finished.append((self, task))
        if env.peek() > now:
            engine.flush()

    def _contended_done(self, event: Any) -> None:
        if event is not None:
            self.lane.finish()
            self._done(event)
        else:
            self.engine.flush_if_last()

    def _chain_done(self, event: Any) -> None:
        if event.value == self.chain_number and self.current is not None:
            engine = self.engine
            engine.now = engine.env.now
            if self.chain:
                self._advance(self.chain[-1])
            engine.chained.remove(self)
            self._done(event)
        else:
            self.engine.flush_if_last()

    def _advance(self, upto: Task) -> None:
        """Complete the chained tasks before `upto`, which becomes the current one."""
        engine = self.engine
        chain = self.chain
        task = self.current
        while task is not upto:
            assert task is not None
            engine.records.tasks.append(
                _new(
                    TaskRecord,
                    (task.start, task.end, self.device.name, self.name, task.kind, task.step, task.layer, task.mb, task.expert,
                     task.rows, task.work, task.submitted, task.ready),
                )
            )  # fmt: skip
            self.device.memory.unpin(task.unit, task.end)
            task.visit.outstanding -= 1  # type: ignore[union-attr]
            if task.group is not None:
                task.group.left -= 1  # never the group's last: that one ends the chain
            task = chain.pop(0)
        self.current = task

    def catch_up(self) -> None:
        """Complete the chained tasks that have ended by now, all but the last."""
        now = self.engine.now
        upto = self.current
        for task in self.chain:
            if upto.end > now:  # type: ignore[union-attr]
                break
            upto = task
        if upto is not self.current:
            assert upto is not None
            self._advance(upto)

    def break_chain(self) -> None:
        """Put back what has not started; the current task ends with an alarm of its own."""
        engine = self.engine
        self.catch_up()
        for task in self.chain:
            heappush(self.heap, (task.key, task))
        self.chain.clear()
        self.chain_number += 1
        engine.chained.remove(self)
        task = self.current
        assert task is not None
        Timeout(engine.env, task.end - engine.now).callbacks.append(self._done)


class DeviceState:
    """A device: its memory, its lanes and what is on its way to it."""

    def __init__(self, engine: Engine, name: str, index: int, is_gpu: bool, backing: bool, memory: DeviceMemory) -> None:
        self.name = name
        self.index = index
        self.is_gpu = is_gpu
        self.backing = backing
        self.memory = memory
        self.first_extra = engine.costs.first_extra_ns(name)
        self.expert_ns: dict[int, int] = {}  # rows -> ns, filled as needed
        self.pending: dict[int, Any] = {}  # unit -> Transfer on its way here
        self.main = DeviceLane(engine, self, "main")
        self.side = DeviceLane(engine, self, "side")
