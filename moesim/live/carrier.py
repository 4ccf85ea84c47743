"""Replay of a policy on the real clock.

The engine's rules keep the state, ask the policy and decide what starts. Work is handed to threads; the caller's thread takes
in what is done. What is done between two looks counts as one instant, reported in the order of rule 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from moesim.engine import lanes, links
from moesim.engine.loop import run
from moesim.engine.setup import connect, place, put
from moesim.engine.state import Crossing, EngineOptions, Lane, LinkState, State, Task, Transfer
from moesim.errors import InputError, LiveError, describe_exception
from moesim.live.calls import Calls, dense_devices
from moesim.live.kernels.host import pinned
from moesim.live.kernels.workers import one_thread
from moesim.live.machine import LiveMachine
from moesim.policy import Routed
from moesim.records import ActivationRecord, DecisionRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.hardware.costs import CostModel
    from moesim.model import ModelSpec
    from moesim.policy import Policy
    from moesim.records import Records
    from moesim.trace.predictors import Predictor
    from moesim.trace.workload import Workload


_SWITCH_S = 1e-5
"""How long the thread that decides may keep a worker from its next operator: the interpreter's default is 5 ms."""


def replay(
    machine: LiveMachine, *, model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy,
    cache_slots: Mapping[str, int], predictors: Mapping[str, Predictor] | None = None,
    tables: Mapping[str, NDArray[Any]] | None = None, options: EngineOptions | None = None, policy_name: str = "",
    progress: Callable[[int], None] | None = None,
) -> Records:  # fmt: skip
    """Run one policy over one workload on this machine.

    Parameters
    ----------
    machine : LiveMachine
        Its profile must be that of ``costs``.
    model, costs, workload, policy, cache_slots, predictors, tables, policy_name, progress
        As for `moesim.engine.simulate`; the costs are only what the policy sees.
    options : EngineOptions, optional
        Decisions take the time they take: ``decision_ns`` must be 0.

    Returns
    -------
    Records
        As of a simulation, with measured times. `TaskRecord.work` is the task's own time, and ``decisions`` holds how long
        the policy took at each Routed.

    Raises
    ------
    InputError
        If a decision time is set, or the model does not fit.
    SimulationError
        As for `moesim.engine.simulate`, or if a call on the machine fails.
    """
    if options is not None and options.decision_ns:
        raise InputError(
            f"decision time: expected none in a replay, where decisions take the time they take, got {options.decision_ns} ns"
        )
    if model.low_bits:
        widths = ", ".join(f"{bits:g}" for bits in model.widths)
        raise InputError(f"model.expert_bits: expected one width, since a replay holds experts at one, got {widths}; name one")
    machine.outputs.clear()
    state = State(
        model, costs, workload, policy, cache_slots, predictors or {}, tables or {}, EngineOptions(), policy_name, progress
    )
    connect(state)
    put(state, place(state))
    streams = [one.streams for one in state.layouts if one.streams is not None]
    if streams:
        raise InputError(
            f"policy {state.policy_name}: expected parts that stay where they run, since a replay streams no weights, got "
            f"{', '.join(streams[0].parts)} streamed in some step; set op_offload: false of llama-cpp, replay another policy, or "
            f"simulate this one with moesim run"
        )
    live = Live(state, machine)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        with pinned(machine.spare_cores), one_thread():
            live.start()
            return run(state)
    finally:
        sys.setswitchinterval(interval)
        live.drain()


class Live:
    """A carrier (`moesim.engine.state.Carrier`) on a real clock, after placement."""

    def __init__(self, state: State, machine: LiveMachine) -> None:
        self.state = state
        self.zero = perf_counter_ns()
        self.done: SimpleQueue[Any] = machine.done
        self.under_way = 0  # calls handed to workers and not yet taken in
        self._lanes = {lane: machine.worker(d.name, lane.name) for d in state.devices.values() for lane in (d.main, d.side)}
        self._links = {link: machine.carrier(link.name) for link in state.links.values()}
        state.carrier = self
        state.thread = None  # the real one submits, and takes the time it takes
        state.policy = Observed(state.policy, self)
        largest = max(state.model.expert_bytes(layer) for layer in range(state.model.n_layers))
        slots = {
            name: sum(sum(pool.capacity) // largest for pool in device.memory.pools.values())
            for name, device in state.devices.items() if not device.backing
        }  # fmt: skip
        machine.prepare(state.model, state.workload, state.costs.transfer, slots=slots, dense=dense_devices(state))
        self.calls = Calls(state, machine)

    def start(self) -> None:
        self.zero = perf_counter_ns()

    def clock(self) -> int:
        return perf_counter_ns() - self.zero

    def ready(self, task: Task) -> None:
        """Hand a task to the worker of its lane, which keeps the order of submission (rule 4)."""
        lane: Lane = task.lane
        if task.kind == "predict" and not task.work:  # a table look-up on an idle thread: it is there
            self.state.instant.finished.append(task)
            return
        if task.group is not None:
            lanes.read_copy(self.state, task)
        self._hand(self._lanes[lane], task.key, self.calls.of_task(task, lane.device), task)

    def begin(self, lane: Lane, task: Task) -> None:
        """Do nothing: the worker goes on by itself."""

    def set_off(self, link: LinkState, transfer: Transfer, n_bytes: int, work: int) -> None:
        """Copy bytes over a link; the order of transfers is the simulator's (rule 5)."""
        link.take_up(link.name, work, self.state.now)  # what a policy is told of the time that is left is the profile's estimate
        self._hand(self._links[link], transfer.fetch, self.calls.of_transfer(link, transfer, n_bytes), link)

    def send_rows(self, link: LinkState, crossing: Crossing, then: Callable[[], None]) -> None:
        """Move activations at once: they are small, and nothing else can be done before."""
        state, (layer, rows, direction, of) = self.state, crossing
        start, submitted = self.clock(), state.now
        self.calls.cross(link, rows, direction, of)
        n_bytes, step = state.model.activation_bytes(rows), state.step.index
        state.records.activations.append(
            ActivationRecord(start, self.clock(), link.name, step, layer, rows, n_bytes, direction, submitted)
        )
        state.now = self.clock()  # what waited for the rows begins after they have crossed
        state.instant.deferred.append(then)

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        raise AssertionError("a replay charges no decision and has no thread of a profile")

    def _hand(self, worker: Any, key: int, call: Callable[[], Any], tag: Task | LinkState) -> None:
        self.under_way += 1
        worker.submit(key, call, tag)

    def next_instant(self) -> bool:
        """Wait for the next call to end, and take in all that ended; False if none is under way."""
        if not self.under_way:
            return False
        if self.done.empty():
            self.calls.foresee()
        done = [self.done.get()]
        while not self.done.empty():
            done.append(self.done.get())
        self.under_way -= len(done)
        self.state.now = self.clock()
        for one in done:
            what: Task | LinkState = one.tag
            if one.error is not None:
                name = f"{what.lane.device.name}, {what.kind} of layer {what.unit.layer}" if isinstance(what, Task) else what.name
                raise LiveError(f"{name}: {describe_exception(one.error)}; see the memory and the shape of the model")
            what.start, end = one.start_ns - self.zero, one.end_ns - self.zero
            if isinstance(what, Task):
                what.work = end - what.start
                what.submitted, what.ready = min(what.submitted, what.start), min(what.ready, what.start)
                lanes.done(self.state, what, end)
            else:
                links.complete(self.state, what, end)
        return True

    def drain(self) -> None:
        """Wait for what is still under way, so that the next run finds the machine idle."""
        while self.under_way:
            self.done.get()
            self.under_way -= 1


class Observed:
    """A policy whose time to answer each Routed is recorded."""

    def __init__(self, policy: Any, live: Live) -> None:
        self._policy, self._live = policy, live
        self.exact, self.listens, self.needs = policy.exact, policy.listens, policy.needs
        self.place, self.evict = policy.place, policy.evict

    def decide(self, event: Any, view: Any) -> Iterable[Any]:
        if type(event) is not Routed:
            answer: Iterable[Any] = self._policy.decide(event, view)
            return answer
        live = self._live
        began = live.clock()
        actions = list(self._policy.decide(event, view) or ())
        live.state.records.decisions.append(DecisionRecord(began, live.clock(), event.step, event.layer))
        return actions
