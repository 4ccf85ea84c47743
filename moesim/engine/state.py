"""All of a run: the workload's present step and layer, the machine, and what has just happened. Rules are functions over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from moesim.engine.machine import Crossing, DeviceState, Lane, LinkState, Medium, Task, Transfer
from moesim.engine.visit import Visit
from moesim.engine.weights import Weights
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec
from moesim.policy import Placement, Policy, View
from moesim.records import Records
from moesim.trace.workload import MicroBatch, Step, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.predictors import Predictor


class Carrier(Protocol):
    """What carries out tasks and transfers: a clock that is simulated, or the machine itself."""

    def ready(self, task: Task) -> None: ...
    def begin(self, lane: Lane, task: Task) -> None: ...
    def set_off(self, link: LinkState, transfer: Transfer, n_bytes: int, work: int) -> None: ...
    def send_rows(self, link: LinkState, crossing: Crossing, then: Callable[[], None]) -> None: ...
    def after(self, delay_ns: int, call: Callable[[], None]) -> None: ...
    def next_instant(self) -> bool: ...


class Streaming(Protocol):
    """What copies streamed parts for each use: `moesim.engine.streams.Streams`."""

    parts: list[str]

    def begin_step(self, state: State) -> None: ...
    def begin_layer(self, state: State, layer: int) -> None: ...
    def holds(self, part: str, layer: int) -> bool: ...
    def read(self, state: State, task: Task, *parts: str) -> None: ...
    def read_by(self, state: State, task: Task) -> None: ...


@dataclass(slots=True, eq=False)
class HostThread:
    """The thread that submits Runs one after another, each for the same time."""

    submit_ns: int
    shared: bool  # whether it also computes the host's experts: it submits nothing until such a Run is done
    queue: list[tuple[int, Task]] = field(default_factory=list)  # a heap
    busy: bool = False
    computing: Task | None = None


Sink = Callable[[Records, int], None]
"""Takes the records piece by piece, and with each the time before which no record of a later piece starts."""
PIECE = 50_000
"""Tasks of a piece of records at least; some 10 MB, which is little enough for a processor's caches."""


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
class Layout:
    """Which device runs which part of the model that is no expert."""

    attention_at: list[DeviceState] = field(default_factory=list)
    dense_at: list[DeviceState] = field(default_factory=list)
    shared_at: list[DeviceState] = field(default_factory=list)
    step_parts: dict[str, DeviceState] = field(default_factory=dict)
    core_at: dict[int, DeviceState] = field(default_factory=dict)  # layer -> device that reads its KV cache while decoding
    streams: Streaming | None = None  # of parts that are copied for each use, if there are any


@dataclass(slots=True, eq=False)
class State:
    """All of one run. Policies never see it; they see `EngineView`."""

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
    view: View = None  # type: ignore[assignment]  # made with the machine
    carrier: Carrier = None  # type: ignore[assignment]  # set before the run begins
    thread: HostThread | None = None
    listens: frozenset[type] = field(init=False)
    weights: Weights = field(init=False)
    steps: Iterator[Step] = field(init=False)
    records: Records = field(default_factory=Records)
    # The machine and where the parts of the model are.
    by_name: dict[str, DeviceState] = field(default_factory=dict)
    devices: list[DeviceState] = field(default_factory=list)
    gpus: list[DeviceState] = field(default_factory=list)
    links: dict[str, LinkState] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)  # of the present step
    layouts: tuple[Layout, ...] = ()  # of all steps, or of those with fewer rows than `offload_from` and of the others
    offload_from: int = 1
    kv_layers: dict[str, int] = field(default_factory=dict)  # layers whose KV cache is in each device's memory
    paths: dict[tuple[str, str], tuple[LinkState, ...]] = field(default_factory=dict)
    sources: dict[str, list[DeviceState]] = field(default_factory=dict)
    # Completed at this instant and not yet told.
    now: int = 0
    arrived: list[Transfer] = field(default_factory=list)
    finished: list[Task] = field(default_factory=list)
    deferred: list[Callable[[], None]] = field(default_factory=list)
    goes_on: Callable[[], None] | None = None  # what follows embedding, leading layers or the head
    routed: list[int] = field(default_factory=list)  # micro-batches
    predicted: list[tuple[int, int, str, Predictor]] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    # What may have something to start.
    lanes_to_start: list[Lane] = field(default_factory=list)
    media_to_start: list[Medium] = field(default_factory=list)
    blocked: list[Medium] = field(default_factory=list)  # their queues wait for memory; tried again at every instant
    # The present step and layer.
    task_numbers: Iterator[int] = field(default_factory=lambda: count(1))  # the submission order on lanes
    fetch_numbers: Iterator[int] = field(default_factory=lambda: count(1))  # the same of transfers
    step: Step = None  # type: ignore[assignment]
    step_rows: int = 0
    micro: tuple[MicroBatch, ...] = ()
    n_mbs: int = 1
    mb: int = 0  # micro-batch of the event being answered
    visit: Visit | None = None
    reached: int = -1  # the layer begun last in this step
    future: dict[int, Visit] = field(default_factory=dict)  # layers of this step that have early Runs
    gate_input_waiters: dict[int, list[Callable[[], None]]] = field(default_factory=dict)  # layer -> calls once it exists
    hidden_at: DeviceState = None  # type: ignore[assignment]
    step_began: int = 0
    gate_mass: float = 0.0
    dense_memo: dict[tuple[int, int], int] = field(default_factory=dict)  # (device, micro-batch) -> ns of a whole dense part
    deciding: bool = False  # a decision is being charged
    unheard: list[Callable[[], None]] = field(default_factory=list)  # what happened meanwhile, each a call that reports it
    undecided: list[int] = field(default_factory=list)  # micro-batches routed meanwhile: decisions are taken one at a time
    over: bool = False  # the last step has ended

    def __post_init__(self) -> None:
        self.policy_name = self.policy_name or type(self.policy).__name__
        self.listens = self.policy.listens
        self.weights = Weights(self.model)
        self.steps = iter(self.workload.steps)


def gate_input_exists(state: State, layer: int) -> bool:
    """Whether the gate input of a layer exists in this step, for all rows."""
    visit = state.visit
    if visit is None:  # before the first layer, between two, or after the last
        return layer <= state.reached
    return layer < visit.layer or (layer == visit.layer and not visit.mbs_left)


def when_gate_input(state: State, layer: int, call: Callable[[], None]) -> None:
    """Do something once the gate input of a layer exists."""
    state.gate_input_waiters.setdefault(layer, []).append(call)


def new_task(state: State, kind: str, layer: int, mb: int, rows: int, work: int, then: Callable[[], None] | None = None) -> Task:
    """Make a task of the present step that is no expert's."""
    task = Task(next(state.task_numbers), kind, state.step.index, layer, mb, rows, work, state.now, state.now)
    task.then = then
    return task


def new_visit(state: State, layer: int) -> Visit:
    """Make the visit of a layer in the present step."""
    model = state.model
    return Visit(state.step.index, layer, layer * model.n_experts, model.top_k, state.n_mbs)
