"""The simulator's engine on a real clock: nothing is waited for that is not done.

`moesim.engine.core.Engine` keeps the state, asks the policy and obeys the rules. Here its lanes and links hand their work to
threads; one thread, the caller's, takes in what is done and goes on from there. What is done between two looks counts as one
instant, told in the order of rule 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from moesim.engine.core import Engine
from moesim.engine.stuck import explain
from moesim.errors import DeadlockError, LiveError, describe_exception
from moesim.live.calls import Calls, dense_devices
from moesim.live.lanes import LiveLane, LiveLink
from moesim.policy import Routed
from moesim.records import DecisionRecord

if TYPE_CHECKING:
    from moesim.engine.devices import DeviceLane, DeviceState
    from moesim.engine.links import LinkState, Medium
    from moesim.hardware import Link
    from moesim.live.machine import LiveMachine


class WallClock:
    """Nanoseconds since the run began; what the engine asks of SimPy's environment, without a heap."""

    def __init__(self) -> None:
        self.zero = perf_counter_ns()

    def start(self) -> None:
        """Let the run begin now."""
        self.zero = perf_counter_ns()

    @property
    def now(self) -> int:
        return perf_counter_ns() - self.zero


class Observed:
    """A policy, and how long it took to answer each Routed."""

    def __init__(self, policy: Any, engine: LiveEngine) -> None:
        self._policy: Any = policy
        self._engine = engine
        self.exact = policy.exact
        self.listens = policy.listens
        self.needs = policy.needs
        self.place = policy.place
        self.evict = policy.evict

    def decide(self, event: Any, view: Any) -> Iterable[Any]:
        if type(event) is not Routed:
            answer: Iterable[Any] = self._policy.decide(event, view)
            return answer
        clock = self._engine.env
        began = clock.now
        actions = list(self._policy.decide(event, view) or ())
        self._engine.records.decisions.append(DecisionRecord(began, clock.now, event.step, event.layer))
        return actions


class LiveEngine(Engine):
    """One run in real time.

    Parameters
    ----------
    machine : LiveMachine
        Workers and memory, prepared for the model.
    arguments
        As for `moesim.engine.core.Engine`.
    """

    names_rows = True

    def __init__(self, machine: LiveMachine, *arguments: Any) -> None:
        self.machine = machine
        self.done: SimpleQueue[Any] = machine.done
        self.under_way = 0  # calls handed to workers and not yet taken in
        super().__init__(*arguments)
        self.thread = None  # the real one submits, and takes the time it takes
        self.policy = Observed(self.policy, self)
        slots = {d.name: self._slots_of(d) for d in self.devices if not d.backing}
        machine.prepare(self.model, self.workload, self.costs.transfer, slots=slots, dense=dense_devices(self))
        self.calls = Calls(self, machine)

    def _slots_of(self, device: DeviceState) -> int:
        """Experts for which the placement has room on a device."""
        largest = max(self.expert_bytes)
        pools = device.memory.pools.values()
        return sum(sum(pool.capacity) // largest for pool in pools)

    def make_clock(self) -> WallClock:
        return WallClock()

    def make_lane(self, device: DeviceState, name: str) -> DeviceLane:
        return LiveLane(self, device, name)

    def make_link(self, link: Link, to: DeviceState, medium: Medium) -> LinkState:
        return LiveLink(self, link, to, medium)

    def hand(self, worker: Any, key: int, call: Callable[[], Any], tag: Any) -> None:
        """Give a call to a worker; its end comes back to ``tag.taken_in(done)``."""
        self.under_way += 1
        worker.submit(key, call, tag)

    def next_instant(self) -> None:
        """Wait for the next thing to be done, and go on from all that is done by then."""
        if not self.under_way:
            raise DeadlockError(explain(self))
        done = [self.done.get()]
        while not self.done.empty():
            done.append(self.done.get())
        self.under_way -= len(done)
        self.now = self.env.now
        for one in done:
            if one.error is not None:
                raise LiveError(f"{one.tag.name}: {describe_exception(one.error)}; see the memory and the shape of the model")
            one.tag.taken_in(one)
        self.flush()
        if self.done.empty():
            self.calls.foresee()

    def drain(self) -> None:
        """Wait for what is still under way, so that the next run finds the machine idle."""
        while self.under_way:
            self.done.get()
            self.under_way -= 1
