"""The event loop: steps, layers, and the order of things within one instant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

from simpy import Environment
from simpy.core import Infinity
from simpy.events import Timeout

from moesim import collector
from moesim.engine.actions import Actions
from moesim.engine.build import build
from moesim.engine.contention import ContentionTable
from moesim.engine.delivery import Delivery
from moesim.engine.devices import DeviceLane, DeviceState, Task
from moesim.engine.host_thread import HostThread
from moesim.engine.layer import Group, Visit
from moesim.engine.links import LinkState, Medium, Transfer, victim_question
from moesim.engine.stepping import Stepper
from moesim.engine.stuck import explain
from moesim.engine.view import EngineView
from moesim.errors import DeadlockError, HardwareError
from moesim.policy import Fetched, Ran, Sent, SharedRan
from moesim.records import Records

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.costs import CostModel
    from moesim.engine.entry import EngineOptions
    from moesim.hardware import Link
    from moesim.model import ModelSpec
    from moesim.policy import Policy
    from moesim.predictors import Predictor
    from moesim.workload import MicroBatch, Step, Workload

_new = tuple.__new__


def _submission(task: Task) -> int:
    return task.key


_completion = itemgetter(1, 0, 2, 3)  # end, start, device, lane of a TaskRecord


def _fetch_number(transfer: Transfer) -> int:
    return transfer.fetch


class Engine:
    """State of one run. Policies never see it; they see `EngineView`."""

    names_rows = False  # whether tasks must say which rows they serve, not only how many

    def __init__(
        self, model: ModelSpec, costs: CostModel, workload: Workload, policy: Policy, cache_slots: Mapping[str, int],
        predictors: Mapping[str, Predictor], tables: Mapping[str, NDArray[Any]], options: EngineOptions, policy_name: str,
        progress: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self.model = model
        self.costs = costs
        self.workload = workload
        self.policy = policy
        self.policy_name = policy_name
        self.cache_slots = dict(cache_slots)
        self.predictors = predictors
        self.tables = tables
        self.options = options
        self.progress = progress
        self.records = Records()
        self.env: Any = self.make_clock()  # SimPy's is typed int | float; ours is int only
        self.contention = ContentionTable(costs.hardware)
        self.listens = policy.listens
        self._wants_fetched = Fetched in self.listens
        self._wants_ran = Ran in self.listens
        self._wants_shared_ran = SharedRan in self.listens
        submit_ns, shared = costs.host_expert_ns(), costs.host_shared()
        self.thread = HostThread(self, submit_ns, shared) if submit_ns or shared else None
        self.expert_bytes = [model.expert_bytes(layer) for layer in range(model.n_layers)]
        self.number = 0  # of the latest task
        self.fetch_number = 0  # of the latest transfer
        # What has been completed at this instant and is not yet told; see `flush`.
        self.now = 0  # the clock, read once an instant
        self.arrived: list[Transfer] = []
        self.finished: list[Task] = []
        self.deferred: list[Callable[[], None]] = []
        self.routed: list[int] = []  # micro-batches
        self.predicted: list[tuple[int, int, str, Predictor]] = []
        self.sent: list[str] = []
        self.lanes_to_start: list[DeviceLane] = []  # idle lanes that may have something to start
        self.media_to_start: list[Medium] = []
        self.blocked: list[Medium] = []  # media whose queue waits for memory; tried again at every instant
        # The present step and layer; `Stepper` moves them on.
        self.step: Step = None  # type: ignore[assignment]
        self.step_rows = 0
        self.micro: tuple[MicroBatch, ...] = ()
        self.n_mbs = 1
        self.mb = 0  # micro-batch of the event being answered
        self.visit: Visit | None = None
        self.reached = -1  # the layer begun last in this step
        self.future: dict[int, Visit] = {}  # layers of this step that have early Runs
        self.state_waiters: dict[int, list[Callable[[], None]]] = {}  # layer -> calls once its gate input exists
        self.over = False  # the last step has ended
        # Filled by `build`.
        self.by_name: dict[str, DeviceState] = {}
        self.devices: list[DeviceState] = []
        self.gpus: list[DeviceState] = []
        self.links: list[LinkState] = []
        self.media: list[Medium] = []
        self.attention_at: list[DeviceState] = []
        self.dense_at: list[DeviceState] = []
        self.shared_at: list[DeviceState] = []
        self.step_parts: dict[str, DeviceState] = {}
        self.kv_layers: dict[str, int] = {}  # attention layers of each device
        self._paths: dict[tuple[str, str], tuple[LinkState, ...]] = {}
        self._sources: dict[str, list[DeviceState]] = {}
        self.view = EngineView(self)
        self.actions = Actions(self)
        build(self)
        self.stepper = Stepper(self)
        self.delivery = Delivery(self)

    # ------------------------------------------------- what a run in real time has otherwise, see `moesim.live.engine`
    def make_clock(self) -> Any:
        """Make what tells the time and calls back."""
        return Environment()

    def make_lane(self, device: DeviceState, name: str) -> DeviceLane:
        """Make what carries out the tasks of a device."""
        return DeviceLane(self, device, name)

    def make_link(self, link: Link, to: DeviceState, medium: Medium) -> LinkState:
        """Make what carries out the transfers of a link."""
        return LinkState(self, link, to, medium)

    # ------------------------------------------------------------------------------------------------------- small helpers
    def next_number(self) -> int:
        """Number a task: the submission order on its lane."""
        self.number += 1
        return self.number

    def next_fetch(self) -> int:
        """Number a transfer: the submission order on its links."""
        self.fetch_number += 1
        return self.fetch_number

    def expert_ns(self, device: DeviceState, rows: int) -> int:
        ns = device.expert_ns[rows] = self.costs.expert_ns(device.name, rows)
        return ns

    def path(self, src: str, dst: str) -> tuple[LinkState, ...]:
        path = self._paths.get((src, dst))
        if path is None:
            states = {link.name: link for link in self.links}
            path = self._paths[src, dst] = tuple(states[link.name] for link in self.costs.path(src, dst))
        return path

    def sources(self, device: DeviceState, name: str | None) -> list[DeviceState]:
        """Devices from which weights can come to `device`, nearest first, then by name."""
        if name is not None:
            return [self.by_name[name]] if name in self.by_name else []
        found = self._sources.get(device.name)
        if found is None:
            reach = []
            for other in self.devices:
                if other is not device:
                    with suppress(HardwareError):  # no way from there
                        reach.append((len(self.costs.path(other.name, device.name)), other.name))
            found = self._sources[device.name] = [self.by_name[n] for _, n in sorted(reach)]
        return found

    def cross(
        self,
        src: DeviceState,
        dst: DeviceState,
        layer: int,
        rows: int,
        direction: str,
        then: Callable[[], None],
        of: Group | Task | None = None,
    ) -> None:
        """Move the activations of `rows` rows from one device to another, hop by hop, then call ``then()``.

        ``of`` is the group of Runs, or the task, whose rows they are: time does not depend on it.
        """
        path = self.path(src.name, dst.name)

        def hop(i: int) -> None:
            if i == len(path):
                then()
            else:
                path[i].send_activation(layer, rows, direction, self.now, lambda: hop(i + 1), of)

        hop(0)

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Do something after a time, among the completions of that instant."""

        def due(_: Any) -> None:
            self.deferred.append(call)

        Timeout(self.env, delay_ns).callbacks.append(due)

    def future_visit(self, layer: int) -> Visit:
        visit = self.future.get(layer)
        if visit is None:
            visit = Visit(self.step.index, layer, layer * self.model.n_experts, self.model.top_k, self.n_mbs, self.n_mbs)
            self.future[layer] = visit
        return visit

    def state_is_there(self, layer: int) -> bool:
        """Whether the gate input of a layer exists in this step, for all rows."""
        visit = self.visit
        if visit is None:  # before the first layer, between two, or after the last
            return layer <= self.reached
        return layer < visit.layer or (layer == visit.layer and not visit.mbs_left)

    def when_state(self, layer: int, call: Callable[[], None]) -> None:
        self.state_waiters.setdefault(layer, []).append(call)

    def ask_victims(self, transfer: Transfer) -> bool:
        """Ask the policy for victims until the transfer fits; False: it waits."""
        pool = transfer.pool
        assert pool is not None
        memory = transfer.dst.memory
        n_experts = memory.n_experts
        question = victim_question(transfer)
        while transfer.n_bytes > pool.free(transfer.layer):
            victim = self.policy.evict(question, self.view)
            if victim is None:
                return False
            layer, expert = victim
            unit = layer * n_experts + expert
            copy = memory.copies.get(unit)
            if (
                copy is None
                or copy.pool is not pool
                or copy.pins
                or not 0 <= expert < n_experts
                or (pool.per_layer and layer != transfer.layer)
            ):
                self._refuse_victim(transfer, layer, expert)
            memory.remove(unit, "evict", self.now)
        return True

    def _refuse_victim(self, transfer: Transfer, layer: int, expert: int) -> NoReturn:
        pool = transfer.pool
        assert pool is not None
        memory = transfer.dst.memory
        copy = memory.copies.get(layer * memory.n_experts + expert)
        what = f"evict(L{transfer.layer}/E{transfer.expert}, {memory.name}) named L{layer}/E{expert}"
        if copy is None or copy.pool is not pool or not 0 <= expert < memory.n_experts:
            self.actions.fail(f"{what}: not resident in pool '{pool.name}'", "name a resident of the pool that is full")
        if copy.pins:
            self.actions.fail(f"{what}: it is in use", "check view.is_pinned, or return None to wait")
        self.actions.fail(f"{what}: another layer's pool", f"name an expert of layer {transfer.layer}")

    # ------------------------------------------------------------------------------------------------------- one instant
    def flush(self) -> None:
        """Tell what happened at this instant, in the order of rule 2, and start what can start."""
        while True:
            if self.finished or self.arrived or self.deferred or self.sent:
                self._complete()
            visit = self.visit
            if visit is not None and visit.open <= 0:
                self.stepper.end_layer(visit)
            elif self.routed:
                mbs = self.routed
                if len(mbs) == 1:
                    self.delivery.routed(mbs.pop())
                else:
                    self.routed = []
                    for mb in sorted(mbs):
                        self.delivery.routed(mb)
            elif self.predicted:
                found, self.predicted = self.predicted, []
                for prediction in found:
                    self.delivery.predicted(*prediction)
            elif not (self.finished or self.arrived or self.deferred or self.sent):
                break
        if self.blocked:
            self.media_to_start += self.blocked
            self.blocked = []
        if self.media_to_start:
            self._start_media()
        lanes = self.lanes_to_start
        if lanes:
            for lane in lanes:
                lane.start_next()
            lanes.clear()

    def _start_media(self) -> None:
        media, self.media_to_start = self.media_to_start, []
        for medium in media:
            if not medium.start_next() and medium not in self.blocked:
                self.blocked.append(medium)

    def _complete(self) -> None:
        """Take in completions: first all states and memory, then Fetched and Ran."""
        now = self.now
        finished = self.finished
        if finished:
            self.finished = []
            if len(finished) > 1:
                finished.sort(key=_submission)
            for task in finished:
                unit = task.unit
                if unit >= 0:
                    memory = task.lane.memory
                    copy = memory.copies[unit]
                    copy.pins -= 1
                    if copy.doomed and not copy.pins:
                        memory.remove(unit, "drop", now)
                    task.visit.open -= 1  # type: ignore[union-attr]
                    if task.group is not None:
                        self._group_progress(task.group)
                    if self.thread is not None:
                        self.thread.done(task)
                else:
                    task.then()
        arrived = self.arrived
        if arrived:
            self.arrived = []
            if len(arrived) > 1:
                arrived.sort(key=_fetch_number)
            for transfer in arrived:
                self._arrive(transfer, now)
        if self.deferred:
            deferred, self.deferred = self.deferred, []
            for call in deferred:
                call()
        if arrived and self._wants_fetched:
            for transfer in arrived:
                if transfer.unit >= 0:
                    self.tell(_new(Fetched, (transfer.layer, transfer.expert, transfer.dst.name)))
        if finished and self._wants_ran:
            for task in finished:
                if task.unit >= 0:
                    self.tell(_new(Ran, (task.step, task.layer, (task.expert,), task.lane.device.name)))
        if finished and self._wants_shared_ran:
            for task in finished:
                if task.kind == "shared":
                    self.tell(_new(SharedRan, (task.step, task.layer, task.mb, task.lane.device.name)))
        if self.sent:
            sent, self.sent = self.sent, []
            for tag in sent:
                if Sent in self.listens:
                    self.tell(_new(Sent, (tag,)))

    def _arrive(self, transfer: Transfer, now: int) -> None:
        unit = transfer.unit
        if unit < 0:
            transfer.on_arrival()
            return
        dst = transfer.dst
        if transfer.transit is not None:
            transfer.transit.memory.hold(-transfer.n_bytes, now)
        del dst.pending[unit]
        self.by_name[transfer.src].memory.unpin(unit, now)
        if dst.backing:
            return
        copy = dst.memory.arrive(unit, transfer.pool, transfer.fetch)
        copy.pins = transfer.pins
        for task in transfer.waiting:
            copy.pins += 1
            dst.main.wake(task)
        if transfer.drop_on_arrival:
            dst.memory.drop(unit, now)

    def _group_progress(self, group: Group) -> None:
        """One run of a group is done; with the last, its outputs go back."""
        group.left -= 1
        if group.left:
            return
        visit = group.visit
        home = self.dense_at[visit.layer]

        def back() -> None:
            visit.open -= 1

        if group.device is home:
            back()
        else:
            self.cross(group.device, home, visit.layer, group.rows, "out", back, group)

    def tell(self, event: Any) -> None:
        actions = self.policy.decide(event, self.view)
        if actions:
            self.actions.apply(actions)

    def next_instant(self) -> None:
        """Step through all events of the next instant, then tell and start."""
        env = self.env
        now = env.peek()
        if now == Infinity:
            raise DeadlockError(explain(self))
        self.now = now
        while env.peek() == now:
            env.step()
        self.flush()

    def run(self) -> Records:
        self.stepper.next_step()
        self.flush()
        with collector.paused():
            while not self.over:
                self.next_instant()
        if len({(task[2], task[3]) for task in self.records.tasks}) > 1:
            self.records.tasks.sort(key=_completion)  # independent of which completion of an instant came first
        self.records.makespan_ns = self.records.steps[-1].end
        for device in self.devices:
            self.records.peak_bytes[device.name] = device.memory.peak
            for pool in device.memory.pools.values():
                self.records.pool_peak_bytes[device.name, pool.name] = pool.peak
        return self.records
