"""Replay of a policy on the real clock.

The engine's rules keep the state and decide what starts; work is handed to threads, and the caller's thread takes in what is
done. What is done between two looks counts as one instant, reported in the order of rule 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from moesim.engine import lanes, links
from moesim.engine.loop import run
from moesim.engine.memory import Unit
from moesim.engine.setup import connect, place, put
from moesim.engine.state import Crossing, DeviceState, EngineOptions, Group, Lane, LinkState, State, Task, Transfer, fail
from moesim.engine.visit import Visit, rows_of
from moesim.errors import InputError, LiveError, describe_exception
from moesim.live.kernels.experts import serve
from moesim.live.kernels.host import pinned
from moesim.live.kernels.memory import copy_rows
from moesim.live.kernels.workers import one_thread
from moesim.live.machine import LiveMachine, Slots
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


class DeviceTensors:
    """Tensors of a step on one device, with one line a row of the step."""

    # `hidden` is the residual stream, `normed` what the experts read, `sums` their outputs. A group of
    # Runs on another device has sums of its own, handed back when its outputs cross; the next dense
    # part adds all.

    def __init__(self, machine: LiveMachine, device: str, rows: int) -> None:
        self.hidden = machine.zeros(device, rows)
        self.normed = machine.zeros(device, rows)
        self.sums = machine.zeros(device, rows)
        self.handed: list[Any] = []  # sums of groups that have come back from other devices
        self.kept: list[Any] = []  # those of this step that have been added: a stream may still be reading them

    def begin(self) -> None:
        self.sums.zero_()
        self.handed.clear()
        self.kept.clear()

    def settle(self) -> None:
        self.hidden.add_(self.sums)
        self.sums.zero_()
        while self.handed:
            n_rows, sums = self.handed.pop()
            self.hidden[:n_rows].add_(sums)
            self.kept.append(sums)


def dense_devices(run: State) -> dict[str, int]:
    """Name the devices that run other parts than experts, with the number of their layers."""
    [layout, *_] = run.layouts
    layered = {d.name for d in (*layout.attention_at, *layout.dense_at, *layout.shared_at)}
    once = {d.name for d in layout.step_parts.values()}
    return {name: run.model.n_layers if name in layered else 1 for name in sorted(layered | once)}


class RoutedRows:
    """Rows of a layer and their gate weights by expert; one tensor a device for all experts."""

    # `experts`: of each routed micro-batch, (n, top_k), with `weights` or None; `otherwise` is the
    # unrecorded gate weight.

    def __init__(self, experts: Sequence[Any], weights: Sequence[Any], otherwise: float) -> None:
        self.rows: dict[int, list[int]] = {}
        self._gates: dict[int, list[float]] = {}
        self._otherwise = otherwise
        self._tensors: dict[str, tuple[Any, Any]] = {}
        self._first: dict[int, int] = {}
        row = 0
        for table, gates in zip(experts, weights, strict=True):
            known = [[otherwise] * table.shape[1]] * len(table) if gates is None else gates.tolist()
            for chosen, beside in zip(table.tolist(), known, strict=True):
                for expert, gate in zip(chosen, beside, strict=True):
                    self.rows.setdefault(expert, []).append(row)
                    self._gates.setdefault(expert, []).append(gate)
                row += 1

    def gate(self, expert: int, row: int) -> float:
        """Gate weight of an expert for a row; where it was not routed, one over top_k."""
        rows = self.rows.get(expert, [])
        return self._gates[expert][rows.index(row)] if row in rows else self._otherwise

    def of_expert(self, expert: int, machine: LiveMachine, device: str) -> tuple[Any, Any]:
        if device not in self._tensors:
            rows = [row for expert_rows in self.rows.values() for row in expert_rows]
            gates = [gate for expert_gates in self._gates.values() for gate in expert_gates]
            self._tensors[device] = machine.index(device, rows), machine.gates(device, gates)
            first = 0
            for one, expert_rows in self.rows.items():
                self._first[one] = first
                first += len(expert_rows)
        index, gates = self._tensors[device]
        first, n = self._first[expert], len(self.rows[expert])
        return index[first : first + n], gates[first : first + n]


class Calls:
    """Turns what the engine's rules start into calls for workers."""

    def __init__(self, run: State, machine: LiveMachine) -> None:
        self.run = run
        self.machine = machine
        model = run.model
        rows = max(1, run.workload.max_tokens)
        self.states = {d.name: DeviceTensors(machine, d.name, rows) for d in run.devices.values() if d.computes}
        self.slots = {d.name: Slots(d, machine.n_buffers(d.name)) for d in run.devices.values() if not d.backing}
        self._transit: dict[tuple[int, int], Any] = {}  # fetch, hop -> what lies on its way
        self._groups: dict[int, Any] = {}  # id of a group or task elsewhere -> its sums
        self._routed: dict[tuple[int, int], RoutedRows] = {}  # layer, micro-batches routed so far -> who serves which rows
        self._step = -1
        self._gate = 1.0 / model.top_k
        self.dense = {name: machine.store.dense(name) for name in dense_devices(run)}
        for device in run.devices.values():
            if not device.backing:
                for unit in device.memory.copies:  # placed at the start
                    machine.store.place(device.name, self.slots[device.name].take(unit), self._number(unit))

    def _number(self, unit: Unit) -> int:
        return unit.layer * self.run.model.n_experts + unit.expert

    def of_task(self, task: Task, device: DeviceState) -> Callable[[], Any]:
        if task.group is not None:
            return self._expert(task, task.group, device)
        make: Callable[[Task, DeviceState], Callable[[], Any]] = getattr(self, f"_{task.kind}")
        return make(task, device)

    def _expert(self, task: Task, group: Group, device: DeviceState) -> Callable[[], Any]:
        layer, expert, _ = task.unit
        if group.into is not group.visit:
            what = f"Run(L{layer}/E{expert}, {device.name}, late)"
            fail(self.run, f"{what}: a replay adds outputs to their own layer only", "replay the policy with nothing late")
        state = self.states[device.name]
        at_home = device is self.run.forward.layout.dense_at[layer]
        sums = state.sums if at_home else self._sums_of(group, device.name)
        rows, gates = self._rows_of(group.visit, task, device.name)
        weights = self._weights(device, task.unit)
        return partial(serve, self.machine.store.kernel(device.name), weights, state.normed, rows, gates, sums)

    def _weights(self, device: DeviceState, unit: Unit) -> Any:
        if device.backing:
            return self.machine.backing_weights(device.name, self._number(unit))
        return self.machine.store.weights(device.name, self.slots[device.name].of(unit))

    def _routing(self, step: int, layer: int, experts: Sequence[Any], weights: Sequence[Any]) -> RoutedRows:
        if step != self._step:
            self._step, self._routed = step, {}
        routed = self._routed.get((layer, len(experts)))
        if routed is None:
            routed = self._routed[layer, len(experts)] = RoutedRows(experts, weights, self._gate)
        return routed

    def foresee(self) -> None:
        """Look up the rows of a layer while its dense part is computed."""
        forward = self.run.forward
        visit = forward.visit
        if visit is None or len(forward.micro) != 1 or not visit.mbs_left or visit.step != forward.step.index:
            return
        experts, weights, _, _, active = forward.micro[0].layers[visit.layer]
        if (visit.layer, 1) not in self._routed or self._step != visit.step:
            routed = self._routing(visit.step, visit.layer, (experts,), (weights,))
            routed.of_expert(active[0], self.machine, forward.layout.dense_at[visit.layer].name)

    def _rows_of(self, visit: Visit, task: Task, device: str) -> tuple[Any, Any]:
        """Rows of a Run and their gates: those assigned at its issue, or all of the expert."""
        routed = self._routing(visit.step, visit.layer, visit.experts, visit.weights)
        rows = rows_of(task.served)
        expert = task.unit.expert
        if rows == routed.rows.get(expert):
            return routed.of_expert(expert, self.machine, device)
        gates = [routed.gate(expert, row) for row in rows]
        return self.machine.index(device, rows), self.machine.gates(device, gates)

    def _sums_of(self, of: Group | Task, device: str) -> Any:
        sums = self._groups.get(id(of))
        if sums is None:
            sums = self._groups[id(of)] = self.machine.zeros(device, self.run.step.n_tokens)
        return sums

    def _part(self, task: Task) -> tuple[slice, list[tuple[int, int]]]:
        micro = self.run.forward.micro[task.mb]
        first, last = micro.first_row, micro.first_row + micro.n_rows
        sequences, row = [], 0
        for n_rows, context in self.run.step.sequences:
            if first <= row < last:
                sequences.append((n_rows, context))
            row += n_rows
        return slice(first, last), sequences

    def _dense(self, task: Task, device: DeviceState) -> Callable[[], Any]:
        kernel, state = self.dense[device.name], self.states[device.name]
        rows, sequences = self._part(task)
        with_attention = self.run.forward.layout.attention_at[task.unit.layer] is device
        first = task.mb == 0

        def call() -> None:
            if first and with_attention:
                state.settle()
            hidden = state.hidden[rows]
            if with_attention:
                hidden = kernel.attention(task.unit.layer, hidden, sequences)
                state.hidden[rows] = hidden
            state.normed[rows], _ = kernel.router(task.unit.layer, hidden)

        return call

    def _attention(self, task: Task, device: DeviceState) -> Callable[[], Any]:
        kernel, state = self.dense[device.name], self.states[device.name]
        rows, sequences = self._part(task)
        first = task.mb == 0

        def call() -> None:
            if first:
                state.settle()
            state.hidden[rows] = kernel.attention(task.unit.layer, state.hidden[rows], sequences)

        return call

    def _shared(self, task: Task, device: DeviceState) -> Callable[[], Any]:
        kernel, state = self.dense[device.name], self.states[device.name]
        rows, _ = self._part(task)
        home = self.run.forward.layout.dense_at[task.unit.layer]
        sums = state.sums if device is home else self._sums_of(task, device.name)

        def call() -> None:
            sums[rows].add_(kernel.shared(task.unit.layer, state.normed[rows]))

        return call

    def _embedding(self, task: Task, device: DeviceState) -> Callable[[], Any]:
        kernel, state, n_rows = self.dense[device.name], self.states[device.name], task.rows
        states = list(self.states.values())
        ids = self.machine.index(device.name, self.run.step.rows % self.run.model.vocab)

        def call() -> None:
            for other in states:
                other.begin()
            state.hidden[:n_rows] = kernel.embed(ids)

        return call

    def _leading(self, task: Task, device: DeviceState) -> Callable[[], Any]:
        kernel, state, n_rows = self.dense[device.name], self.states[device.name], task.rows
        sequences, n_layers = list(self.run.step.sequences), self.run.model.n_dense_layers

        def call() -> None:
            hidden = state.hidden[:n_rows]
            for layer in range(n_layers):
                hidden = kernel.leading(layer, hidden, sequences)
            state.hidden[:n_rows] = hidden

        return call

    def _head(self, task: Task, device: DeviceState) -> Callable[[], Any]:
        kernel, state, n_rows = self.dense[device.name], self.states[device.name], task.rows
        step, all_rows = self.run.step.index, self.run.step.n_tokens

        def call() -> None:
            state.settle()
            if self.machine.keep_outputs:
                self.machine.outputs[step] = state.hidden[:all_rows].float().cpu().numpy().copy()
            kernel.head(state.hidden[:n_rows])

        return call

    def _predict(self, task: Task, device: DeviceState) -> Callable[[], Any]:
        kernel = self.dense.get(device.name)
        if kernel is None:
            raise LiveError(
                f"a prediction on {device.name}: expected a device that runs routers, got none; predict where the dense part runs"
            )
        return partial(kernel.predict, task.unit.layer, self.states[device.name].normed[: task.rows])

    def of_transfer(self, link: LinkState, transfer: Transfer, n_bytes: int) -> Callable[[], Any]:
        offset = transfer.n_bytes - transfer.left
        source = link.link.src
        if transfer.dst is None:  # a message
            return self.machine.copy_message(link.name, n_bytes)
        if not transfer.last_hop:
            target = self._transit.get((transfer.fetch, transfer.hop))
            if target is None:
                target = self._transit[transfer.fetch, transfer.hop] = self.machine.transit(link.name)
        elif transfer.dst.backing:
            target = self.machine.backing(transfer.dst.name, self._number(transfer.unit))
        else:
            slots = self.slots[transfer.dst.name]
            if transfer.fetch not in slots.coming:
                slots.coming.add(transfer.fetch)
                slots.take(transfer.unit)
            if n_bytes == transfer.left:
                slots.coming.discard(transfer.fetch)
            target = self.machine.buffer(transfer.dst.name, slots.of(transfer.unit))
        if transfer.hop:
            origin = self._transit[transfer.fetch, transfer.hop - 1]
            if n_bytes == transfer.left:  # the call keeps it until it is done
                del self._transit[transfer.fetch, transfer.hop - 1]
        elif self.run.devices[source].backing:
            origin = self.machine.backing(source, self._number(transfer.unit))
        else:
            origin = self.machine.buffer(source, self.slots[source].of(transfer.unit))
        return self.machine.copy(link.name, target, origin, offset, n_bytes)

    def cross(self, link: LinkState, rows: int, direction: str, of: Group | Task | None) -> None:
        """Copy the rows of a group, a task or a whole step over a link, now."""
        src, dst = self.states[link.link.src], self.states[link.link.dst]
        n_rows = self.run.step.n_tokens
        if direction == "hidden":
            src.settle()
            copy_rows(dst.hidden[:n_rows], src.hidden[:n_rows])
        elif direction == "in" and rows == n_rows:
            copy_rows(dst.normed[:n_rows], src.normed[:n_rows])
        elif direction == "in":
            copy_rows(dst.normed, src.normed, self._chosen(of, rows))
        else:
            sums = self.machine.bring(link.link.dst, self._groups.pop(id(of)))
            assert of is not None
            if link.link.dst == self.run.forward.layout.dense_at[of.visit.layer if isinstance(of, Group) else of.unit.layer].name:
                dst.handed.append((n_rows, sums))
            else:  # it goes on from there
                self._groups[id(of)] = sums

    def _chosen(self, of: Group | Task | None, rows: int) -> Iterable[int]:
        if isinstance(of, Group):
            return [row for row in range(of.union.bit_length()) if of.union >> row & 1]
        assert of is not None
        first = self.run.forward.micro[of.mb].first_row
        return range(first, first + rows)


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
        parts = sorted({part for part, _ in streams[0].source})
        raise InputError(
            f"policy {state.policy_name}: expected parts that stay where they run, since a replay streams no weights, got "
            f"{', '.join(parts)} streamed in some step; set op_offload: false of llama-cpp, replay another policy, or "
            f"simulate this one with moesim run"
        )
    kept = costs.hardware.backing
    if moved := [name for name, device in state.devices.items() if device.backing and name not in kept]:
        raise InputError(
            f"policy {state.policy_name}: expected the experts on {', '.join(kept)}, where a replay keeps those of "
            f"{costs.hardware.name}, got {', '.join(moved)}; replay it with a profile whose `backing` names that"
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
        # Another engine's code, or a table look-up on an idle thread: it is there.
        if task.kind == "host" or (task.kind == "predict" and not task.work):
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
