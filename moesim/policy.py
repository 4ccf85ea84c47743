"""The contract between policies and the engine: events in, actions out, without behaviour.

A policy places weights once (`place`), answers reported events with actions (`decide`) and names a victim when a transfer that
could start needs memory (`evict`). It sees the simulation through a read-only `View` only; an action that names no expert, or no
row, is ignored and leaves no record.

Layers ``0 .. n_layers - 1`` are the MoE layers, experts ``0 .. n_experts - 1``; the hardware profile names devices (``"gpu0"``);
times are integer nanoseconds, sizes integer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from moesim.core.copies import Copies as Copies

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.hardware.costs import CostModel
    from moesim.model import ModelSpec

# Urgency classes of a Fetch, which also name its cause in the bytes moved. Any class above 2 counts as an update too.
DEMAND = 0  # somebody waits for it
PREFETCH = 1  # expected to be wanted soon
UPDATE = 2  # the cache is re-arranged; nobody waits

# ------------------------------------------------------------------------------------------------------------- events


class StepBegin(NamedTuple):
    """A step starts: one prefill chunk, one decode step of the whole batch, or both mixed, where a scheduler does that."""

    step: int
    phase: str  # "prefill" | "decode" | "mixed": rows of prompts and of answers
    requests: NDArray[Any]  # (n_tokens,) request of each row
    last_chunk: bool  # the last prefill chunk of its batch; True for decode and mixed


class LayerBegin(NamedTuple):
    """A layer starts: its dense part is submitted now."""

    step: int
    layer: int


class Routed(NamedTuple):
    """The router of a layer has chosen."""

    step: int
    layer: int
    mb: int  # micro-batch, 0 unless the workload has several
    experts: NDArray[Any]  # (n_tokens, top_k) ids in rank order
    weights: NDArray[Any] | None  # (n_tokens, top_k) as the model uses them; None if not recorded
    scores: NDArray[Any] | None  # (n_tokens, n_experts) full softmax; None if not recorded
    rows: Sequence[int]  # (n_experts,) rows of each expert in this micro-batch, plain ints
    active: Sequence[int]  # ids of the experts that have rows, ascending
    first_row: int  # row of the step at which this micro-batch begins


class Predicted(NamedTuple):
    """A prediction about a layer's routing is ready and paid for."""

    step: int
    layer: int  # the layer it speaks about
    mb: int
    ids: NDArray[Any]  # (n_tokens, k) predicted ids, best first
    scores: NDArray[Any] | None  # (n_tokens, k) next to ids, or (n_tokens, n_experts) if dense; None: ids only
    source: str


class Fetched(NamedTuple):
    """A copy has arrived on a device."""

    layer: int
    expert: int
    device: str


class Ran(NamedTuple):
    """Experts have been executed."""

    step: int
    layer: int
    experts: tuple[int, ...]
    device: str


class SharedRan(NamedTuple):
    """The shared experts of a micro-batch have run; not reported of a model without any."""

    step: int
    layer: int
    mb: int
    device: str


class Sent(NamedTuple):
    """A message has arrived."""

    tag: str


class LayerEnd(NamedTuple):
    """Every top-k slot is served or skipped, runs are done and their outputs are back."""

    step: int
    layer: int


class StepEnd(NamedTuple):
    """A step is over, the LM head included."""

    step: int


Event = StepBegin | LayerBegin | Routed | Predicted | Fetched | Ran | SharedRan | Sent | LayerEnd | StepEnd

# ------------------------------------------------------------------------------------------------------------ actions

LAYER_PARTS = ("attention", "dense", "shared")
STEP_PARTS = ("embedding", "leading", "head")
"""Parts of the model that `Placement.parts` may put on other devices: of a layer, and of a step."""
KV = "kv"
"""The KV cache of a layer, which `Placement` may put on another device than attention: `parts`, to be read there while decoding,
or `streamed`, to be copied for each use."""

CACHE = "cache"  # the pool that the experiment's cache slots count


class Fetch(NamedTuple):
    """Copy experts to a device; a repeat of a queued fetch may only lower its urgency number.

    A Fetch of a resident does nothing; one to a device that backs the weights is a write-back: a real transfer.
    """

    layer: int
    experts: Sequence[int]
    device: str
    urgency: int = DEMAND
    pool: str = CACHE
    source: str | None = None  # None: the nearest copy by hops, then by name
    bits: float | None = None  # which of the model's widths; None: the full one


class Drop(NamedTuple):
    """Forget copies as soon as they are idle; what is still queued is cancelled."""

    layer: int
    experts: Sequence[int]
    device: str
    bits: float | None = None


class Move(NamedTuple):
    """Relabel copies on a device, or on their way there, as members of another of its pools."""

    layer: int
    experts: Sequence[int]
    device: str
    pool: str
    bits: float | None = None


class Run(NamedTuple):
    """Execute experts. Never loads: each must be resident there, or its fetch pending.

    ``rows=None``: every row routed to each expert that no Run has taken yet. Runs returned together for one device form
    a group: their rows cross to that device once, and their outputs come back once. Those of another ``part`` are another
    group, which crosses after the groups before it, while these compute.

    With ``late`` the output is added to the next layer's, so that its own layer does not wait for it.
    """

    layer: int
    experts: Sequence[int]
    device: str
    rows: Sequence[int] | None = None  # rows of the step; needed when the layer is not routed yet
    inputs_from: int | None = None  # layer of the hidden state it reads; None: its own
    bits: float | None = None  # at which of the model's widths; None: the full one
    late: bool = False
    part: int = 0


class Skip(NamedTuple):
    """Leave rows unserved by these experts, on purpose. ``rows=None``: every row routed to them."""

    layer: int
    experts: Sequence[int]
    rows: Sequence[int] | None = None


class Predict(NamedTuple):
    """Pay for a prediction about ``layer``, which arrives as `Predicted` once its state exists."""

    step: int
    layer: int
    source: str
    device: str
    lane: str = "main"  # "main": before any Run that waits; "side": next to them, as slowed as the profile says


class Send(NamedTuple):
    """Send any other message over the link between two devices; arrives as `Sent`."""

    n_bytes: int
    src: str
    dst: str
    tag: str


class Work(NamedTuple):
    """Let the host do ``n`` operations of a kind, while the device's main lane takes nothing submitted later.

    An engine's code for a cache: the engine profile says what an operation takes (`moesim.hardware.types.OPERATIONS`); without
    a number it takes no time.
    """

    operation: str
    device: str
    n: int = 1


Victim = tuple[int, int] | tuple[int, int, float | None]
"""Layer and expert of a copy, and its bits unless it has the full width."""

Action = Fetch | Drop | Move | Run | Skip | Predict | Send | Work

# ---------------------------------------------------------------------------------------------------------- placement


class Pool(NamedTuple):
    """Memory of a device with one purpose.

    With ``per_layer`` every layer has one of its own: of ``n_bytes`` each, or, for layers of different sizes, of what a
    sequence says of each layer. ``landing`` bytes next to it, shared by all layers, hold copies whose victims are still in use.
    """

    device: str
    name: str
    n_bytes: int | Sequence[int]
    per_layer: bool = False
    landing: int = 0

    def sizes(self, n_layers: int) -> list[int]:
        """Return the bytes of each layer's pool, or, without ``per_layer``, of the only one."""
        if isinstance(self.n_bytes, Sequence):
            return list(self.n_bytes)
        return [self.n_bytes] * (n_layers if self.per_layer else 1)


class Copy(NamedTuple):
    """Experts of a layer that are on a device at the start, in a pool of it."""

    layer: int
    experts: Sequence[int]
    device: str
    pool: str = CACHE
    bits: float | None = None  # which of the model's widths; None: the full one


@dataclass(frozen=True)
class Placement:
    """Where everything is at the start.

    Attributes
    ----------
    copies : sequence of Copy
        Expert copies beyond those on the backing devices, which have all of them and always will.
    pools : sequence of Pool
        The pools of each device that receives experts.
    parts : mapping of (part, layer) to device
        Exceptions for what is not an expert: part is ``"attention"``, ``"dense"`` or ``"shared"`` of a layer, or, with
        layer -1, ``"embedding"``, ``"leading"`` or ``"head"``. The rest is on the profile's compute device. The part `KV` of
        a layer names the device that keeps its cache and, in decode steps, computes what reads it: queries, keys and values
        cross to it, its outputs back. In prefill attention's own device does that, and new entries go to the cache.
    enforce_capacity : bool
        False runs as if the devices' memory were large enough, and labels the result ``assumes-memory``.
    lent : mapping of device to int, bytes
        Room of its pools that the KV cache has at the start: a policy that moves memory between both does not fill it before.
    reserved : mapping of device to int, bytes
        What the policy holds there besides experts for the whole run, such as a predictor or a second model.
    workspace : mapping of device to int, bytes
        What the engine needs there to compute, counted from the model; the profile's ``workspace_bytes`` if that is more.
    streamed : mapping of (part, layer) to device
        Parts whose weights lie in the memory of another device, and are copied to that of the part for each use. Parts are
        named as in ``parts``, or `KV`: the cache that attention reads, to which what it adds goes back.
    kv_resident : int
        Tokens of each request, the newest, whose streamed cache stays with attention: only older ones are copied.
    stream_depth : int
        How many uses ahead they are copied: 0 copies a part once it is reached. Each device has a buffer for one use more.
    offloaded : mapping of (part, layer) to device
        Exceptions from ``parts`` in large steps: their weights stay where they are, and are copied to this device for each use.
        The KV cache of attention stays, too: prefill copies it to this device, decoding reads it where it lies. That of leading
        layers is not copied. Parts are named as in ``parts``, but not `KV`.
    offload_from : int
        Rows of its largest micro-batch from which on a step is large.
    host_experts : {"all", "others", "mapped"}
        Experts that backing devices keep in memory: all, or those without a copy elsewhere at the start, which must then not
        run there; ``"mapped"``: the others, in pages of a file that the system can drop and read again. Disks keep all.
    backing : sequence of str
        Devices that back the others in this run; those that the profile names if it is empty. A disk that backs a host whose
        memory has a pool, which in turn is the source of copies to a GPU, makes three tiers.
    """

    copies: Sequence[Copy] = ()
    pools: Sequence[Pool] = ()
    parts: Mapping[tuple[str, int], str] = field(default_factory=dict)
    enforce_capacity: bool = True
    lent: Mapping[str, int] = field(default_factory=dict)
    reserved: Mapping[str, int] = field(default_factory=dict)
    workspace: Mapping[str, int] = field(default_factory=dict)
    streamed: Mapping[tuple[str, int], str] = field(default_factory=dict)
    kv_resident: int = 0
    stream_depth: int = 0
    offloaded: Mapping[tuple[str, int], str] = field(default_factory=dict)
    offload_from: int = 1
    host_experts: Literal["all", "others", "mapped"] = "all"
    backing: Sequence[str] = ()


# --------------------------------------------------------------------------------------------------- view and policy


class View(Protocol):
    """The present state, read-only, without the future; in constant time unless said otherwise."""

    @property
    def now_ns(self) -> int: ...
    @property
    def model(self) -> ModelSpec: ...
    @property
    def costs(self) -> CostModel:
        """The engine's own cost model."""

    @property
    def devices(self) -> Sequence[str]:
        """Names of all devices, in the profile's order."""

    @property
    def gpus(self) -> Sequence[str]:
        """Names of the accelerators: the devices of kind ``gpu``, unless the profile says otherwise."""

    @property
    def cpus(self) -> Sequence[str]:
        """Names of the hosts: the devices of kind ``cpu`` that are no accelerator."""

    @property
    def compute(self) -> str:
        """The profile's default device of everything that is not an expert."""

    @property
    def host(self) -> str:
        """The first backing device of the profile."""

    @property
    def tables(self) -> Mapping[str, NDArray[Any]]:
        """Calibration tables of the trace, from other requests; only those in `Policy.needs`."""

    @property
    def max_tokens(self) -> int:
        """Rows of the largest step of this workload (a size, not a look ahead at routing)."""

    def cache_slots(self, device: str) -> int:
        """Expert cache slots that the experiment grants to a device, over all layers."""

    def is_resident(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        """Whether a copy is there, at the full width or at one with fewer bits."""

    def is_pending(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool: ...
    def is_in_use(self, layer: int, expert: int, device: str, bits: float | None = None) -> bool:
        """Whether a Run or a copy, waiting or under way, reads the copy: one that is evicted leaves when it is idle."""

    def residency(self, layer: int, device: str, bits: float | None = None) -> bytes:
        """One byte an expert, 1 = resident: a copy of the present, (n_experts,)."""

    def remaining_ns(self, layer: int, expert: int, device: str, bits: float | None = None) -> int:
        """Time to the arrival of a transfer; 0 if resident, its full time if only queued."""

    def residents(
        self, device: str, pool: str, layer: int | None = None, bits: float | None = None
    ) -> list[int] | list[tuple[int, int]]:
        """Sorted residents of a pool at one width, of one layer or as (layer, expert). O(answer)."""

    def free_bytes(self, device: str, pool: str, layer: int = 0) -> int: ...
    def dense_device(self, layer: int) -> str:
        """The device that runs the router of a layer."""

    def dense_ns(self, layer: int) -> int:
        """Time of a layer's dense part with attention, for all rows of the step, if run alone."""

    def foresees(self, source: str, layer: int) -> bool:
        """Whether (not what) a source can predict of a layer of the present step; free of cost."""


class Policy(Protocol):
    """The contract of a policy; ``moesim check my_module:MyPolicy`` runs the common checks."""

    @property
    def exact(self) -> bool:
        """True: a run fails if a row is served by other experts or on another layer's state."""

    @property
    def listens(self) -> frozenset[type]:
        """Which events it gets; of others it hears nothing."""

    @property
    def needs(self) -> frozenset[str]:
        """Its inputs: ``"scores"``, ``"signal:<name>"``, ``"table:<name>"``, ``"oracle:routing"``.

        ``"scores-or-weights"`` asks for scores, or, where a trace has none, the weights of the chosen experts, which labels
        the result.
        """

    def place(self, view: View) -> Placement: ...
    def decide(self, event: Any, view: View) -> Iterable[Action]: ...
    def evict(self, fetch: Fetch, view: View) -> Victim | None:
        """Name the victim for a fetch of one expert that could start now; None: wait.

        A victim that is in use leaves as soon as it is idle. The fetch starts then, or at once next to the pool, if the pool's
        ``landing`` has room.
        """
