"""All data of a run: its inputs, the machine, the present step and what has just happened.

Rules are functions over it, in the other files. At the end: checks that what an action names exists, and places in errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from moesim.core.units import format_ns
from moesim.engine.memory import DeviceMemory, PoolState, Unit
from moesim.engine.visit import Visit
from moesim.errors import PolicyError, unknown_name, unknown_width
from moesim.hardware.costs import CostModel
from moesim.hardware.types import Device, Link
from moesim.model import ModelSpec
from moesim.policy import DEMAND, PREFETCH, Placement, Policy, View
from moesim.records import Records
from moesim.trace.workload import MicroBatch, Step, Workload
from moesim.trace.workload.compose import Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.predictors import Predictor

Call = Callable[[], None]
FULL = 1_000_000
"""A rate, or a share, of 1 in millionths."""
PIECE = 50_000
"""Tasks of a piece of records at least; some 10 MB, which is little enough for a processor's caches."""
Sink = Callable[[Records, int], None]
"""Takes the records piece by piece, and with each the time before which no record of a later piece starts."""


# --------------------------------------------------------------------------------------------------- what goes on: work
@dataclass(slots=True, eq=False)
class Task:
    """One occupation of a lane, from submission to completion."""

    key: int  # submission order
    kind: str
    step: int
    unit: Unit  # the expert, or only the layer
    mb: int
    rows: int
    work: int  # ns
    submitted: int
    ready: int
    then: Call | None = None  # called at completion; None for experts, and for dense parts, which are followed by Routed
    group: Group | None = None  # of an expert
    served: int = 0  # of an expert: the rows, as bits
    waits: int = 0  # weights and inputs still missing
    start: int = 0
    lane: Any = None  # `Lane`, once submitted
    reads: Any = None  # the use of streamed weights that it reads


@dataclass(slots=True, eq=False)
class Group:
    """Runs returned together for one device: rows cross once, outputs come back once (rule 8)."""

    visit: Visit
    into: Visit  # the visit that waits for the outputs: the next layer's if they come late
    device: DeviceState
    inputs_from: int  # the layer whose hidden state is read
    first_extra: int  # ns that its first expert takes besides
    more_rows: Sequence[int]  # and, of so many rows that take part
    tasks: list[Task] = field(default_factory=list)
    union: int = 0  # rows of the step that take part, as bits
    left: int = 0  # tasks that are not done


@dataclass(slots=True, eq=False)
class Transfer:
    """One fetch of one expert on its way, or a message."""

    fetch: int  # number, also the submission order
    unit: Unit
    n_bytes: int
    left: int  # bytes that this hop has still to move
    path: tuple[LinkState, ...]
    urgency: int
    submitted: int
    cause: str = ""  # of a message; of a copy it depends on the urgency
    src: DeviceState | None = None  # of an expert
    dst: DeviceState | None = None  # of an expert
    pool: PoolState | None = None
    waiting: list[Task] = field(default_factory=list)  # tasks that need it
    hop: int = 0
    first_chunk: bool = True  # the next chunk is the first of its hop: memory is not reserved yet
    transit: DeviceState | None = None  # intermediate device that holds it after a hop
    in_use: int = 0  # decisions under way that need the copy once it is there
    drop_on_arrival: bool = False
    waited_memory: bool = False
    on_arrival: Call | None = None  # of a message
    rows: int = 0  # of activations that share the link

    @property
    def link(self) -> LinkState:
        return self.path[self.hop]

    @property
    def last_hop(self) -> bool:
        return self.hop == len(self.path) - 1

    @property
    def started(self) -> bool:
        return self.hop > 0 or not self.first_chunk

    def why(self) -> str:
        if self.cause:
            return self.cause
        if self.dst is not None and self.dst.memory.backing:
            return "write-back"
        return {DEMAND: "demand", PREFETCH: "prefetch"}.get(self.urgency, "update")


class Crossing(NamedTuple):
    """Activations that go from one device to another (rule 8)."""

    layer: int  # -1 outside the MoE layers
    rows: int
    direction: str  # as in `ActivationRecord`
    of: Group | Task | None  # whose rows they are; None: those of the hidden state


# --------------------------------------------------------------------------------------------------------- the machine
@dataclass(slots=True, eq=False, kw_only=True)
class Server:
    """A lane or a link, which does one thing at a time, and its progress (rule 9)."""

    activity: str = ""  # what it does at present
    end: int = 0  # when that ends, as things stand
    left: int = 0  # work left at `last`, in millionths of ns
    last: int = 0
    rate: int = FULL
    share: int = FULL  # of its time that reading memory takes, in millionths
    alarm: Any = None  # the valid alarm, an event of SimPy

    def take_up(self, activity: str, work_ns: int, now: int, share: int = FULL) -> None:
        """Begin what takes so long alone."""
        self.activity, self.share, self.rate = activity, share, FULL
        self.left, self.last, self.end = work_ns * FULL, now, now + work_ns


@dataclass(slots=True, eq=False)
class Lane(Server):
    """The main or side lane of a device: ready tasks, and the task that runs."""

    device: DeviceState
    name: str
    queue: list[Task] = field(default_factory=list)
    n_waiting: int = 0  # tasks that lack weights or inputs
    task: Task | None = None


@dataclass(slots=True, eq=False)
class DeviceState:
    """A device: its memory, its lanes and what is on its way to it."""

    device: Device
    memory: DeviceMemory
    pending: dict[Unit, Transfer] = field(default_factory=dict)  # what is on its way here
    name: str = field(init=False)
    is_gpu: bool = field(init=False)
    computes: bool = field(init=False)
    backing: bool = field(init=False)
    main: Lane = field(init=False)
    side: Lane = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.backing = self.device.name, self.memory.backing
        self.is_gpu, self.computes = self.device.role == "accelerator", self.device.role != "storage"
        self.main, self.side = Lane(self, "main"), Lane(self, "side")


@dataclass(slots=True, eq=False)
class Medium:
    """Links that are serial together; a link without a named medium has one of its own."""

    busy: bool = False
    queue: list[Transfer] = field(default_factory=list)  # the most urgent first, then the oldest


@dataclass(slots=True, eq=False)
class LinkState(Server):
    """A directed link: what is in flight, and its control lane."""

    link: Link
    to: DeviceState
    medium: Medium
    name: str = field(init=False)
    current: Transfer | None = None
    current_bytes: int = 0
    start: int = 0
    control_free: int = 0  # when the control lane has no activations any more

    def __post_init__(self) -> None:
        self.name = self.link.name


@dataclass(slots=True, eq=False)
class HostThread:
    """The thread that submits Runs one after another, each for the same time."""

    submit_ns: int
    shared: bool  # whether it also computes the host's experts: it submits nothing until such a Run is done
    queue: list[Task] = field(default_factory=list)
    busy: bool = False
    computing: Task | None = None


@dataclass(slots=True, eq=False)
class Layout:
    """Which device runs which part of the model that is no expert."""

    attention_at: list[DeviceState]
    dense_at: list[DeviceState]
    shared_at: list[DeviceState]
    step_parts: dict[str, DeviceState]
    core_at: dict[int, DeviceState]  # layer -> device that reads its KV cache while decoding
    streams: Any  # `moesim.engine.streams.Streams` of parts that are copied for each use; None if there are none


class Carrier(Protocol):
    """Runs tasks and transfers: a clock that is simulated, or the machine itself."""

    def ready(self, task: Task) -> None: ...
    def begin(self, lane: Lane, task: Task) -> None: ...
    def set_off(self, link: LinkState, transfer: Transfer, n_bytes: int, work: int) -> None: ...
    def send_rows(self, link: LinkState, crossing: Crossing, then: Call) -> None: ...
    def after(self, delay_ns: int, call: Call) -> None: ...
    def next_instant(self) -> bool: ...


# ------------------------------------------------------------------------------------------------------------- the run
@dataclass(slots=True)
class Instant:
    """Unreported events of this instant, and what may have something to start (rule 2)."""

    finished: list[Task] = field(default_factory=list)
    arrived: list[Transfer] = field(default_factory=list)
    deferred: list[Call] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    goes_on: Call | None = None  # what follows embedding, leading layers or the head
    routed: list[int] = field(default_factory=list)  # micro-batches
    predicted: list[tuple[int, int, str, Predictor]] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    media: list[Medium] = field(default_factory=list)
    blocked: list[Medium] = field(default_factory=list)  # their queues wait for memory; tried again at every instant


@dataclass(slots=True)
class Pass:
    """The present step's forward pass."""

    step: Step
    layout: Layout
    began: int
    hidden_at: DeviceState
    reached: int = -1  # the layer begun last
    visit: Visit | None = None
    mb: int = 0  # micro-batch of the event being answered
    future: dict[int, Visit] = field(default_factory=dict)  # layers that have early Runs
    gate_input_waiters: defaultdict[int, list[Call]] = field(default_factory=lambda: defaultdict(list))  # layer -> calls
    gate_mass: float = 0.0
    micro: tuple[MicroBatch, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.micro = self.step.micro

    def gate_input_exists(self, layer: int) -> bool:
        """Whether the gate input of a layer exists, for all rows."""
        if self.visit is None:  # before the first layer, between two, or after the last
            return layer <= self.reached
        return layer < self.visit.layer or (layer == self.visit.layer and not self.visit.mbs_left)

    def visit_of(self, layer: int) -> Visit:
        """Return the visit of a layer that has not begun, which only early Runs may know as yet."""
        if layer not in self.future:
            self.future[layer] = Visit(self.step.index, layer, len(self.micro))
        return self.future[layer]


@dataclass(slots=True)
class Deciding:
    """Whether a decision is being charged: until it takes effect the policy hears nothing."""

    under_way: bool = False
    unheard: list[Call] = field(default_factory=list)  # what happened meanwhile, each a call that reports it
    undecided: list[int] = field(default_factory=list)  # micro-batches routed meanwhile: decisions are taken one at a time


@dataclass(frozen=True)
class EngineOptions:
    """How the engine runs.

    Attributes
    ----------
    decision_ns : int
        Time charged between Routed and the effect of the actions it causes, in nanoseconds.
    """

    decision_ns: int = 0


@dataclass(slots=True, eq=False)
class State:
    """All of one run; policies never see it, they see `EngineView`."""

    # What it was given.
    model: ModelSpec
    costs: CostModel
    workload: Workload
    policy: Policy
    cache_slots: Mapping[str, int]
    predictors: Mapping[str, Predictor]
    tables: Mapping[str, NDArray[Any]]
    options: EngineOptions = EngineOptions()
    policy_name: str = ""
    progress: Callable[[int], None] | None = None
    sink: Sink | None = None
    piece: int = PIECE
    placed: Callable[[Placement], None] | None = None
    # The machine, and where the parts of the model are.
    devices: dict[str, DeviceState] = field(default_factory=dict)
    links: dict[str, LinkState] = field(default_factory=dict)
    thread: HostThread | None = None
    layouts: tuple[Layout, ...] = ()  # of all steps, or of those with fewer rows than `offload_from` and of the others
    offload_from: int = 1
    kv_at: Callable[[int, int], Mapping[str, int]] = field(init=False)  # bytes of KV cache by device, of tokens and requests
    # What goes on.
    view: View = None  # type: ignore[assignment]  # made with the machine
    carrier: Carrier = None  # type: ignore[assignment]  # set before the run begins
    steps: Source = field(init=False)
    listens: frozenset[type] = field(init=False)
    records: Records = field(default_factory=Records)
    task_numbers: Iterator[int] = field(default_factory=lambda: count(1))  # the submission order on lanes
    fetch_numbers: Iterator[int] = field(default_factory=lambda: count(1))  # the same of transfers
    now: int = 0
    instant: Instant = field(default_factory=Instant)
    forward: Pass = None  # type: ignore[assignment]  # of the present step
    deciding: Deciding = field(default_factory=Deciding)
    over: bool = False  # the last step has ended

    def __post_init__(self) -> None:
        self.policy_name = self.policy_name or type(self.policy).__name__
        self.steps, self.listens = self.workload.steps.begin(), self.policy.listens

    @property
    def step(self) -> Step:
        return self.forward.step

    @property
    def gpus(self) -> list[DeviceState]:
        return [device for device in self.devices.values() if device.is_gpu]

    def new_task(self, kind: str, layer: int, mb: int, rows: int, work: int, then: Call | None = None) -> Task:
        """Make a task of the present step that is no expert's."""
        return Task(
            next(self.task_numbers), kind, self.step.index, Unit(layer, -1), mb, rows, work, self.now, self.now, then
        )  # fmt: skip


# ---------------------------------------------------------------------------------- what an action names must be there
def fail(state: State, what: str, remedy: str) -> NoReturn:
    """Raise the error of a policy at this moment."""
    forward = state.forward
    step = 0 if forward is None else forward.step.index
    layer = -1 if forward is None else forward.reached if forward.visit is None else forward.visit.layer
    fail_at(state.now, step, layer, what, remedy, state.policy_name)


def fail_at(now: int, step: int, layer: int, what: str, remedy: str, policy_name: str) -> NoReturn:
    """Raise the error of a policy at a moment of a run."""
    raise PolicyError(f"t={format_ns(now)}, step {step}, layer {layer}: {what}; {remedy} [policy={policy_name}]")


def short_repr(value: object) -> str:
    """Write a value in one short line."""
    return " ".join(repr(value).split())[:80]


def device_of(state: State, name: str, what: str) -> DeviceState:
    """Find a device by name."""
    if name not in state.devices:
        fail(state, f"{what}: {unknown_name('device', name, state.devices)}", "name a device of the profile")
    return state.devices[name]


def unit_of(state: State, layer: int, expert: int, what: str, bits: float | None = None) -> Unit:
    """Name an expert at a width."""
    n_layers, n_experts = state.model.n_layers, state.model.n_experts
    if not (0 <= layer < n_layers and 0 <= expert < n_experts):
        allowed = f"layers are 0..{n_layers - 1}, experts 0..{n_experts - 1}"
        fail(state, f"{what}(L{layer}/E{expert}): no such unit", allowed)
    return Unit(layer, expert, width_of(state, bits, f"{what}(L{layer}/E{expert})"))


def width_of(state: State, bits: float | None, what: str) -> float | None:
    """Return a width of the model's; None of the full one."""
    if bits is None:
        return None
    full, *others = state.model.widths
    if bits == full:
        return None
    if bits not in others:
        found, remedy = unknown_width(bits, state.model.widths)
        fail(state, f"{what}: {found}", remedy)
    return bits


def pool_of(state: State, device: DeviceState, name: str, what: str) -> PoolState:
    """Find a pool of a device by name."""
    if name not in device.memory.pools:
        known = unknown_name("pool", name, device.memory.pools)
        fail(state, f"{what}: {known}", f"declare Pool('{device.name}', '{name}', ...) in place()")
    return device.memory.pools[name]
