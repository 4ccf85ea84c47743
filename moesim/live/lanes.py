"""Lanes and links that do what they are told: tasks on workers, copies between buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesim.engine.devices import DeviceLane, Task
from moesim.engine.links import LinkState, Transfer
from moesim.records import ActivationRecord, TaskRecord

if TYPE_CHECKING:
    from moesim.engine.devices import DeviceState
    from moesim.engine.links import Medium
    from moesim.hardware import Link
    from moesim.live.engine import LiveEngine


class LiveLane(DeviceLane):
    """A lane whose tasks a worker carries out, in order of submission among those that are ready (rule 4)."""

    engine: LiveEngine

    def __init__(self, engine: LiveEngine, device: DeviceState, name: str) -> None:
        super().__init__(engine, device, name)
        self.worker = engine.machine.worker(device.name, name)

    def submit(self, task: Task) -> None:
        task.lane = self
        if task.waits:
            self.n_waiting += 1
        else:
            self._hand(task)

    def wake(self, task: Task) -> None:
        task.waits -= 1
        if not task.waits:
            self.n_waiting -= 1
            task.ready = self.engine.now
            self._hand(task)

    def start_next(self) -> None:
        """Nothing: the worker goes on by itself."""

    def _hand(self, task: Task) -> None:
        engine = self.engine
        if task.kind == "predict" and not task.work:  # a table look-up on an idle thread: it is there
            engine.finished.append(task)
            return
        if task.unit >= 0:
            self._work(task)  # notes that the copy is read
        engine.hand(self.worker, task.key, engine.calls.of_task(task, self.device), _Task(self, task))

    def taken_in(self, task: Task, start: int, end: int) -> None:
        """Record a task that is done; the engine will tell who must know."""
        took = end - start
        self.engine.records.tasks.append(
            TaskRecord(
                start, end, self.device.name, self.name, task.kind, task.step, task.layer, task.mb, task.expert, task.rows, took,
                min(task.submitted, start), min(task.ready, start),
            )
        )  # fmt: skip
        if task.then is None and task.unit < 0:
            self.engine.routed.append(task.mb)
        else:
            self.engine.finished.append(task)


class _Task:
    """What a worker returns with a task."""

    __slots__ = ("lane", "task")

    def __init__(self, lane: LiveLane, task: Task) -> None:
        self.lane = lane
        self.task = task

    @property
    def name(self) -> str:
        return f"{self.lane.device.name}, {self.task.kind} of layer {self.task.layer}"

    def taken_in(self, done: Any) -> None:
        zero = self.lane.engine.env.zero
        self.lane.taken_in(self.task, done.start_ns - zero, done.end_ns - zero)


class LiveLink(LinkState):
    """A link over which bytes really go; which one goes next is decided as in the simulator (rule 5)."""

    engine: LiveEngine

    def __init__(self, engine: LiveEngine, link: Link, to: DeviceState, medium: Medium) -> None:
        super().__init__(engine, link, to, medium)
        self.plain = True  # how long it takes is not for a table of contention to say
        self.worker = engine.machine.carrier(link.name)

    def set_off(self, transfer: Transfer, n_bytes: int, work: int) -> None:
        self.end = self.engine.now + work  # what a policy is told of the time that is left: the profile's estimate
        self.engine.hand(self.worker, transfer.fetch, self.engine.calls.of_transfer(self, transfer, n_bytes), self)

    def taken_in(self, done: Any) -> None:
        zero = self.engine.env.zero
        self.start = done.start_ns - zero
        self.complete(done.end_ns - zero)

    def send_activation(self, layer: int, rows: int, direction: str, submitted: int, then: Any, of: Any = None) -> None:
        """Move activations at once: they are small, and nothing else could be done before they are there."""
        engine = self.engine
        clock = engine.env
        start = clock.now
        engine.calls.cross(self, rows, direction, of)
        n_bytes = engine.model.activation_bytes(rows)
        step = engine.step.index
        engine.records.activations.append(
            ActivationRecord(start, clock.now, self.name, step, layer, rows, n_bytes, direction, submitted)
        )
        engine.now = clock.now  # what waited for the rows begins after they have crossed
        engine.deferred.append(then)
