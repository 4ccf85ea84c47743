"""What carries out tasks and transfers in a simulation: SimPy's clock, which runs on for as long as they take."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any

from simpy import Environment
from simpy.core import Infinity
from simpy.events import Timeout

from moesim.engine import lanes, links
from moesim.engine.contention import FULL, Contention
from moesim.engine.machine import Crossing, Lane, LinkState, Task, Transfer
from moesim.engine.state import State
from moesim.policy import DEMAND
from moesim.records import ActivationRecord


class Simulated:
    """A carrier (`moesim.engine.state.Carrier`) on a simulated clock."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.env: Any = Environment()  # SimPy's clock is typed int | float; ours is int only
        self.contention = Contention(state.costs.hardware, self.env)

    def ready(self, task: Task) -> None:
        """Queue a task that lacks nothing any more."""
        lane: Lane = task.lane
        heappush(lane.queue, (task.key, task))
        if lane.task is None:
            self.state.lanes_to_start.append(lane)

    def begin(self, lane: Lane, task: Task) -> None:
        """Be busy with a task."""
        if lane.plain:
            Timeout(self.env, task.work, lane).callbacks.append(self._task_over)
            return
        activity, share = lane.dense_activity, FULL
        if task.unit >= 0:
            activity, share = lane.expert_activity, lanes.reading_share(lane.device, task.rows, task.bits)
        self.contention.begin(lane, activity, task.work, self._task_over, share)

    def set_off(self, link: LinkState, transfer: Transfer, n_bytes: int, work: int) -> None:
        """Be busy with some bytes of a transfer."""
        if link.plain:
            link.end = self.state.now + work
            Timeout(self.env, work, link).callbacks.append(self._transfer_over)
        else:
            self.contention.begin(link, link.name, work, self._transfer_over)

    def _task_over(self, alarm: Any) -> None:
        state, lane = self.state, alarm._value
        task = lane.task
        lane.task = None
        if lane.queue:
            state.lanes_to_start.append(lane)
        lanes.done(state, task, state.now)

    def _transfer_over(self, alarm: Any) -> None:
        links.complete(self.state, alarm._value, self.state.now)

    def send_rows(self, link: LinkState, crossing: Crossing, then: Callable[[], None]) -> None:
        """Move activations on the link's control lane, beside the weights, or among them if the profile says so."""
        state, rows = self.state, crossing.rows
        n_bytes = state.model.activation_bytes(rows)
        if link.link.share_link:
            links.send_message(state, (link,), n_bytes, DEMAND, then, crossing)
            return
        start = max(link.control_free, state.now)
        end = link.control_free = start + state.costs.activation_ns(link.link, rows)
        state.records.activations.append(
            ActivationRecord(
                start, end, link.name, state.step.index, crossing.layer, rows, n_bytes, crossing.direction, state.now
            )
        )
        self.after(end - state.now, then)

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Do something after a time, among the completions of that instant."""
        Timeout(self.env, delay_ns, call).callbacks.append(self._due)

    def _due(self, event: Any) -> None:
        self.state.deferred.append(event._value)

    def next_instant(self) -> bool:
        """Step through all events of the next instant; False if there is none."""
        env = self.env
        now = env.peek()
        if now == Infinity:
            return False
        self.state.now = now
        while env.peek() == now:
            env.step()
        return True
