"""Simulated time: SimPy's clock, where overlapping activities slow each other (rules 1, 9).

Work is in millionths of a nanosecond at full rate and rates in parts per million, so arithmetic is exact in integers:
``work`` ns left at rate ``r`` end after ``ceil(work * 10**6 / r)`` ns. Rates of a processor and a link are those of experts
that only read weights; one with many rows reads for the ``share`` of its time, is slowed only where reading at the reduced
rate takes longer than computing, and takes from the link in proportion to what it reads.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from simpy import Environment
from simpy.core import Infinity

from moesim.engine import lanes, links
from moesim.engine.state import FULL, Call, Crossing, Lane, LinkState, Server, State, Task, Transfer
from moesim.policy import DEMAND
from moesim.records import ActivationRecord


class Clock:
    """A carrier (`moesim.engine.state.Carrier`) on a simulated clock."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.env: Any = Environment()  # SimPy's clock is typed int | float; ours is int only
        # Of activities that contend: {activity: {other: rate of the activity while the other goes on}}, and what goes on.
        self.rates: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.active: defaultdict[str, list[Server]] = defaultdict(list)
        for pair in state.costs.contention:
            self.rates[pair.a][pair.b] = pair.a_rate_ppm
            self.rates[pair.b][pair.a] = pair.b_rate_ppm

    # ------------------------------------------------------------------------------------------------- what is run
    def ready(self, task: Task) -> None:
        """Queue a task that lacks nothing any more."""
        lane: Lane = task.lane
        lane.queue.append(task)
        if lane.task is None:
            self.state.instant.lanes.append(lane)

    def begin(self, lane: Lane, task: Task) -> None:
        of = lane.name if lane.name == "side" else "dense" if task.group is None else "experts"
        self._begin(lane, f"{lane.device.name}.{of}", task.work, self._reading_share(lane, task))

    def set_off(self, link: LinkState, transfer: Transfer, n_bytes: int, work: int) -> None:
        self._begin(link, link.name, work)

    def send_rows(self, link: LinkState, crossing: Crossing, then: Call) -> None:
        """Move activations on the link's control lane, or among the weights if the profile says so."""
        state, (layer, rows, direction, _) = self.state, crossing
        n_bytes = state.model.activation_bytes(rows)
        if link.link.share_link:
            links.send_message(state, (link,), n_bytes, DEMAND, then, cause="activation", layer=layer, rows=rows)
            return
        start = max(link.control_free, state.now)
        end = link.control_free = start + state.costs.activation_ns(link.link, rows)
        step = state.step.index
        state.records.activations.append(
            ActivationRecord(start, end, link.name, step, layer, rows, n_bytes, direction, state.now)
        )
        self.after(end - state.now, then)

    def after(self, delay_ns: int, call: Call) -> None:
        """Do something after a time, among the completions of that instant."""
        self.env.timeout(delay_ns).callbacks.append(lambda _: self.state.instant.deferred.append(call))

    def next_instant(self) -> bool:
        """Step through all events of the next instant; False if there is none."""
        now = self.env.peek()
        if now == Infinity:
            return False
        self.state.now = now
        self.env.step()
        while self.env.peek() == now:
            self.env.step()
        return True

    def _over(self, server: Server) -> None:
        if isinstance(server, LinkState):
            links.complete(self.state, server, self.state.now)
            return
        assert isinstance(server, Lane) and server.task is not None
        task, server.task = server.task, None
        if server.queue:
            self.state.instant.lanes.append(server)
        lanes.done(self.state, task, self.state.now)

    # ----------------------------------------------------------------------------------------------------------- contention
    def _begin(self, server: Server, activity: str, work_ns: int, share: int = FULL) -> None:
        server.take_up(activity, work_ns, self.env.now, share)
        if activity not in self.rates:  # nothing slows it down, nor it anything
            self._schedule(server)
            return
        server.rate = self._rate_of(server)
        self._schedule(server)
        self.active[activity].append(server)
        self._touch(activity)

    def _schedule(self, server: Server) -> None:
        """Set the alarm of an end; an earlier alarm still rings, and is passed over."""
        delay = -(-server.left // server.rate)
        server.end = server.last + delay
        server.alarm = self.env.timeout(delay, server)
        server.alarm.callbacks.append(self._on_alarm)

    def _on_alarm(self, alarm: Any) -> None:
        server = alarm.value
        if alarm is not server.alarm:
            return
        if server.activity in self.rates:
            self.active[server.activity].remove(server)
            self._touch(server.activity)
        self._over(server)

    def _touch(self, activity: str) -> None:
        """Change the rates of what goes on with an activity that has begun or ended."""
        now = self.env.now
        for server in [one for name in self.rates[activity] for one in self.active[name]]:
            rate = self._rate_of(server)
            if rate != server.rate:
                server.left -= (now - server.last) * server.rate
                server.last, server.rate = now, rate
                if server.left > 0:  # else its end is due at this very instant
                    self._schedule(server)

    def _rate_of(self, server: Server) -> int:
        """Return the smallest rate that the other activities leave a server."""
        rate, activity, all_links = FULL, server.activity, self.state.links
        for other, slowed in self.rates[activity].items():
            others = self.active[other]
            if not others or slowed >= rate:
                continue
            if other in all_links:
                slowed = slowed * FULL // server.share
            elif activity in all_links:
                reading = self.rates[other][activity]  # what of its full rate a partner that only reads keeps
                drawn = min(reading, max(one.share for one in others))
                slowed = FULL - (FULL - slowed) * drawn // reading
            rate = min(rate, slowed)
        return rate

    def _reading_share(self, lane: Lane, task: Task) -> int:
        """Return the share of an expert's time that reading its weights takes, in millionths."""
        # Of a processor only: the effect of busy links on a GPU's experts has not been measured by rows.
        if task.group is None or lane.device.is_gpu or task.rows <= 1:
            return FULL
        costs = self.state.costs.at_bits(task.unit.bits)
        one, all_rows = (costs.expert_ns(lane.device.name, rows) for rows in (1, task.rows))
        return max(1, min(FULL, one * FULL // max(1, all_rows)))
