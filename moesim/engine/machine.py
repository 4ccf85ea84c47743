"""What is of the machine: devices, lanes, links, and the tasks and transfers that occupy them. Plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

from moesim.engine.contention import Server
from moesim.engine.memory import DeviceMemory, PoolState
from moesim.engine.visit import Visit
from moesim.hardware.costs import CostModel
from moesim.hardware.types import Device, Link
from moesim.policy import DEMAND, PREFETCH

AHEAD = -(1 << 60)  # added to the number of a task that goes ahead of everything queued (Predict on the main lane)
_CAUSE = {DEMAND: "demand", PREFETCH: "prefetch"}


@dataclass(slots=True, eq=False)
class Task:
    """One occupation of a lane, from submission to completion."""

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
    served: int = 0  # of an expert: the rows, as bits
    start: int = 0
    lane: Any = None  # Lane, once submitted
    reads: Any = None  # the use of streamed weights that it reads
    bits: float | None = None  # width of its weights; None: the full one


class Group:
    """Runs returned together for one device: their rows cross once, their outputs come back once (rule 8)."""

    __slots__ = ("device", "first_extra", "inputs_from", "into", "left", "rows", "tasks", "union", "visit")

    def __init__(self, visit: Visit, into: Visit, device: DeviceState, inputs_from: int) -> None:
        self.visit = visit
        self.into = into  # the visit that waits for the outputs: the next layer's if they come late
        self.device = device
        self.first_extra = device.first_extra
        self.inputs_from = inputs_from  # the layer whose hidden state is read
        self.tasks: list[Task] = []
        self.left = 0
        self.union = 0  # bit r set: row r of the step takes part
        self.rows = 0


class Crossing(NamedTuple):
    """Activations that go from one device to another (rule 8)."""

    layer: int  # -1 outside the MoE layers
    rows: int
    direction: str  # as in `ActivationRecord`
    of: Group | Task | None  # whose rows they are; None: those of the hidden state


class Lane(Server):
    """The main or side lane of a device: ready tasks in submission order, and the task that runs."""

    __slots__ = ("dense_activity", "device", "expert_activity", "n_waiting", "name", "plain", "queue", "task")

    def __init__(self, device: DeviceState, name: str, contended: Collection[str]) -> None:
        super().__init__()
        self.device = device
        self.name = name
        experts, dense = ("experts", "dense") if name == "main" else ("side", "side")
        self.expert_activity = f"{device.name}.{experts}"
        self.dense_activity = f"{device.name}.{dense}"
        self.plain = self.expert_activity not in contended and self.dense_activity not in contended
        self.queue: list[tuple[int, Task]] = []  # a heap
        self.n_waiting = 0  # tasks that lack weights or inputs
        self.task: Task | None = None


class DeviceState:
    """A device: its memory, its lanes and what is on its way to it."""

    def __init__(self, device: Device, index: int, memory: DeviceMemory, costs: CostModel, contended: Collection[str]):
        self.name = device.name
        self.index = index
        self.is_gpu = device.role == "accelerator"
        self.computes = device.role != "storage"
        self.backing = memory.backing
        self.memory = memory
        self.first_extra = costs.first_extra_ns(device.name)  # for the first expert of a group
        widths = (None, *costs.model.low_bits)
        self.expert_ns = {bits: cache(partial(costs.at_bits(bits).expert_ns, device.name)) for bits in widths}  # of rows
        self.reading: dict[tuple[float | None, int], int] = {}  # width, rows -> part of an expert's time that reading takes
        self.pending: dict[int, Transfer] = {}  # unit -> what is on its way here
        self.main = Lane(self, "main", contended)
        self.side = Lane(self, "side", contended)


@dataclass(slots=True, eq=False)
class Transfer:
    """One fetch of one expert on its way, or a message."""

    fetch: int  # number, also the submission order
    unit: int  # -1: a message
    layer: int
    expert: int
    n_bytes: int
    left: int  # bytes that this hop has still to move
    path: tuple[LinkState, ...]
    urgency: int
    submitted: int
    link: LinkState  # where it is queued or under way
    src: str = "message"  # name of the source device; of a message, its cause; of streamed weights empty
    dst: Any = None  # DeviceState of the destination; None for messages
    pool: PoolState | None = None
    waiting: list[Task] = field(default_factory=list)  # tasks that need it
    hop: int = 0
    started: bool = False
    first_chunk: bool = True  # the next chunk is the first of its hop: memory is not reserved yet
    transit: Any = None  # intermediate device that holds it after a hop
    in_use: int = 0  # decisions under way that need the copy once it is there
    drop_on_arrival: bool = False
    waited_memory: bool = False
    on_arrival: Any = None  # for messages
    rows: int = 0  # of activations that share the link
    bits: float | None = None  # width of the copy; None: the full one

    @property
    def cause(self) -> str:
        if self.unit < 0 and self.src:
            return self.src
        if self.dst is not None and self.dst.backing:
            return "write-back"
        return _CAUSE.get(self.urgency, "update")


class Medium:
    """Links that are serial together. A link without a named medium has one of its own."""

    def __init__(self) -> None:
        self.busy = False
        self.links: list[LinkState] = []


class LinkState(Server):
    """A directed link: its queue, what is in flight, and its control lane."""

    def __init__(self, link: Link, to: DeviceState, medium: Medium, costs: CostModel, contended: Collection[str]) -> None:
        super().__init__()
        self.link = link
        self.name = link.name
        self.to = to
        self.medium = medium
        self.transfer_ns = cache(partial(costs.transfer_ns, link))  # of bytes
        self.plain = link.name not in contended
        self.queue: list[tuple[int, int, Transfer]] = []  # (urgency, fetch number, transfer), ascending
        self.current: Transfer | None = None
        self.current_bytes = 0
        self.start = 0
        self.control_free = 0  # when the control lane has no activations any more
