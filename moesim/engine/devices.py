"""Device lanes: one task at a time, first in first out among those that are ready (rule 4).

A lane plans ahead where the next moments are certain and nobody listens to them: ready Runs of one layer that follow each
other share one alarm; the dense part of the next layer joins them if the layer ends with them; and Runs on which nothing
depends yet have no alarm at all. Before the engine looks at its state it brings every plan up to the present (`catch_up`),
so the state is as if each task had had an alarm of its own; whatever could come between cuts the plan short. The records
are the same with `EngineOptions(coalesce=False)`.
"""

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
NEVER = 1 << 62


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
    end: int = 0
    lane: Any = None  # DeviceLane, once submitted


class DeviceLane:
    """A main or side lane: a heap of ready tasks in submission order, and the plan of what runs.

    ``plan`` holds the task that runs and those that follow it without question. It has an alarm at its end if it is
    `armed`; else (`lazy`) nothing depends on when it ends, until somebody asks or something queues behind it.
    """

    def __init__(self, engine: Engine, device: DeviceState, name: str) -> None:
        self.engine = engine
        self.device = device
        self.name = name
        self._name = device.name
        suffix = ("experts", "dense") if name == "main" else ("side", "side")
        self.expert_activity = f"{device.name}.{suffix[0]}"
        self.dense_activity = f"{device.name}.{suffix[1]}"
        partners = engine.contention.partners
        self.plain = self.expert_activity not in partners and self.dense_activity not in partners
        self.may_chain = self.plain and engine.may_chain
        self.heap: list[tuple[int, Task]] = []
        self.n_waiting = 0
        self.first_waiting = NEVER  # no task that waits has a smaller number than this
        self.plan: list[Task] = []
        self.armed = False
        self.alarm = 0  # number of the valid alarm
        self.lane = Lane(engine.env, engine.contention)
        self.lane.on_done = self._contended_done
        self.memory = device.memory
        self._copies = device.memory.copies
        self._records = engine.records.tasks
        self._used = engine.records.used_fetches

    # ------------------------------------------------------------------------------------------------------------- queue
    def submit(self, task: Task) -> None:
        task.lane = self
        if task.waits:
            self.n_waiting += 1
            if task.key < self.first_waiting:
                self.first_waiting = task.key
            return
        self._queue(task)

    def wake(self, task: Task) -> None:
        """One thing that the task waited for is there."""
        task.waits -= 1
        if not task.waits:
            self.n_waiting -= 1
            if not self.n_waiting:
                self.first_waiting = NEVER
            task.ready = self.engine.now
            self._queue(task)

    def _queue(self, task: Task) -> None:
        """Queue a ready task; the plan gives way where the task comes before what is planned, or needs to know its end."""
        heappush(self.heap, (task.key, task))
        plan = self.plan
        if not plan:
            self.engine.lanes_to_start.append(self)
        elif len(plan) > 1 and (task.key < plan[-1].key or plan[-1].unit < 0):
            self.cut_short()
        elif not self.armed:
            self.arm()

    # ------------------------------------------------------------------------------------------------------------- start
    def start_next(self) -> None:
        """Start the first ready task, and plan what follows it."""
        heap = self.heap
        plan = self.plan
        if plan or not heap:
            return
        engine = self.engine
        task = heappop(heap)[1]
        plan.append(task)
        now = task.start = engine.now
        is_expert = task.unit >= 0
        work = self._work(task) if is_expert else task.work
        if not self.plain:
            self.armed = True
            if is_expert:
                self.lane.begin(self.expert_activity, work, self.device.reading_share(task.rows))
            else:
                self.lane.begin(self.dense_activity, work)
            return
        end = task.end = now + work
        if is_expert and self.may_chain and not engine.blocked:
            visit, group, limit = task.visit, task.group, self.first_waiting
            while heap:
                key, follower = heap[0]
                if key > limit or follower.visit is not visit or follower.group is not group or follower.unit < 0:
                    break
                heappop(heap)
                follower.start = end
                end = follower.end = end + self._work(follower)
                plan.append(follower)
            if not heap and group is None and visit is engine.visit:
                if visit.open > len(plan):  # type: ignore[union-attr]
                    engine.planned.append(self)  # lazy; `Engine.flush` arms it if the layer comes to wait for it
                    return
                if not self.n_waiting:
                    dense = engine.stepper.foresee_dense(self.device)
                    if dense is not None:
                        dense.start = end
                        end = dense.end = end + dense.work
                        plan.append(dense)
            if len(plan) > 1:
                engine.planned.append(self)
        self.armed = True
        self.alarm += 1
        Timeout(engine.env, end - now, self.alarm).callbacks.append(self._ring)

    def arm(self) -> None:
        """Give the plan an alarm at its end."""
        self.armed = True
        self.alarm += 1
        engine = self.engine
        Timeout(engine.env, self.plan[-1].end - engine.now, self.alarm).callbacks.append(self._ring)

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

    # -------------------------------------------------------------------------------------------------------------- done
    def _ring(self, event: Any) -> None:
        if event._value != self.alarm:
            self.engine.flush_if_last()  # a stale alarm may still be the last event of this instant
            return
        engine = self.engine
        env = engine.env
        now = engine.now = env.now
        plan = self.plan
        if len(plan) > 1:
            self.complete_until(now)
            engine.planned.remove(self)
        self._finish(plan.pop(), now)
        if env.peek() > now:
            engine.flush()

    def _contended_done(self, event: Any) -> None:
        if event is not None:
            self.lane.finish()
            self.engine.now = self.engine.env.now
            self._finish(self.plan.pop(), self.engine.now)
        self.engine.flush_if_last()

    def _finish(self, task: Task, now: int) -> None:
        """The last task of the plan is done; the engine will tell who must know."""
        engine = self.engine
        self.armed = False
        if self.heap:
            engine.lanes_to_start.append(self)
        self._records.append(
            _new(
                TaskRecord,
                (task.start, now, self._name, self.name, task.kind, task.step, task.layer, task.mb, task.expert,
                 task.rows, task.work, task.submitted, task.ready),
            )
        )  # fmt: skip
        if task.then is None and task.unit < 0:
            engine.routed.append(task.mb)  # a dense part: its layer is routed
        else:
            engine.finished.append(task)

    def complete_until(self, now: int) -> None:
        """Complete the planned Runs that have ended by now, as of those moments; of an armed plan all but the last."""
        plan = self.plan
        keep = 1 if self.armed else 0
        done = 0
        while len(plan) - done > keep and plan[done].end <= now:
            task = plan[done]
            done += 1
            end = task.end
            self._records.append(
                _new(
                    TaskRecord,
                    (task.start, end, self._name, self.name, task.kind, task.step, task.layer, task.mb, task.expert,
                     task.rows, task.work, task.submitted, task.ready),
                )
            )  # fmt: skip
            copy = self._copies[task.unit]
            copy.pins -= 1
            if copy.doomed and not copy.pins:
                self.memory.remove(task.unit, "drop", end)
            visit: Visit = task.visit  # type: ignore[assignment]  # a planned Run has one
            visit.open -= 1
            if task.group is not None:
                task.group.left -= 1  # never the group's last: a plan with groups is armed
            elif not visit.open:
                self.engine.stepper.enter_foreseen(visit, plan[done], end)
        del plan[:done]

    def catch_up(self) -> None:
        """Bring the plan up to now, so that the state is as if every task had had its own alarm."""
        engine = self.engine
        now = engine.now
        self.complete_until(now - 1)
        plan = self.plan
        if plan and plan[0].end == now and not (self.armed and len(plan) == 1):
            # One ends at this very instant. Starts come last, so what follows it has not started: it queues again.
            for task in plan[1:]:
                if task.unit >= 0:
                    heappush(self.heap, (task.key, task))
            del plan[1:]
            self.alarm += 1
            engine.planned.remove(self)
            self._finish(plan.pop(), now)
        elif len(plan) <= 1 and (self.armed or not plan):
            engine.planned.remove(self)
            if not plan and self.heap:
                engine.lanes_to_start.append(self)

    def cut_short(self) -> None:
        """Put back what has not started; what runs gets an alarm of its own."""
        engine = self.engine
        self.complete_until(engine.now)
        plan = self.plan
        for task in plan[1:]:
            if task.unit >= 0:  # a dense part that was foreseen is forgotten
                heappush(self.heap, (task.key, task))
        del plan[1:]
        if self in engine.planned:
            engine.planned.remove(self)
        if plan:
            self.arm()
        elif self.heap:
            engine.lanes_to_start.append(self)


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
