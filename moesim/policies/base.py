"""Base of every policy: defaults of the contract, helpers for `place`, and native twins."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast, get_args

import numpy as np

from moesim.errors import CapacityError, HardwareError
from moesim.policies.options import Declared, options_of
from moesim.policy import CACHE as CACHE
from moesim.policy import Action, Copies, Drop, Event, Fetch, LayerEnd, Placement, Pool, Predicted, Routed, Run, Victim, View

if TYPE_CHECKING:
    from moesim.model import ModelSpec


STAGING = "staging"  # demand loads that do not enter the cache; dropped at the end of their layer


_METHODS = {event: "on" + re.sub("([A-Z])", r"_\1", event.__name__).lower() for event in get_args(Event)}


class Future(Protocol):
    """The routing that is still to come, for oracle policies."""

    def next_use(self, layer: int, expert: int, step: int) -> int:
        """Return the first step after ``step`` in which a layer routes to ``expert``; huge if none."""


class PolicyBase(Declared):
    """Defaults of the contract, from which a policy need not derive; the ones shipped here do.

    Its options are attributes with a value of `option`, see `moesim.policies.options`. A constructor only stores them. What a run needs is
    built in `place`, which the engine calls once at the start of each run, so that one object can serve several runs.

    Attributes
    ----------
    paper : str
        What the system is called and where it is published; empty for a baseline without a paper.
    missing : tuple of str
        What the paper or its released code does and this class does not.
    profile : str
        A shipped hardware profile with the devices that the policy needs, on which checks and benchmarks run it; empty if
        any machine with a CPU and a GPU will do.
    engine : str
        The engine that it is a part of, whose costs it has (``moesim list engines``); empty: those of the machine's profile.
    low_bits : tuple of float
        Lower widths of experts that the policy needs of a model, as of the one on which checks run it; empty if it needs none.
    each_layer : tuple of str
        What code on the host does in each layer between the router's result and the decision (`moesim.hardware.types.OPERATIONS`).
    oracles : mapping of str to mapping
        ``"replacement"`` and ``"assignment"``: the options with which that decision is made by its oracle. What has no
        entry cannot be replaced. Predictions need none: any source can be answered by the true routing.
    """

    paper: ClassVar[str] = ""
    missing: ClassVar[tuple[str, ...]] = ()
    profile: ClassVar[str] = ""
    engine: str = ""
    low_bits: ClassVar[tuple[float, ...]] = ()
    each_layer: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = True
    oracles: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    def __init_subclass__(cls, **rest: Any) -> None:
        before = cls._fields.keys()
        super().__init_subclass__(**rest)
        fixed = before - cls._fields.keys()
        if fixed and "oracles" not in vars(cls):  # what cannot be set cannot be given to an oracle
            kept = {made: options for made, options in cls.oracles.items() if options.keys().isdisjoint(fixed)}
            cls.oracles = MappingProxyType(kept)

    @property
    def listens(self) -> frozenset[type]:
        """Events it wants: those that it has a method for."""
        return frozenset(event for event, name in _METHODS.items() if hasattr(self, name))

    @property
    def prefetches(self) -> bool:
        """Whether it fetches by predictions, so that a run in which it never does gets a note."""
        return Predicted in self.listens

    @property
    def prompt_rows(self) -> int | None:
        """Most rows of a prefill step that its engine takes: longer prompts go in several.

        Unless the workload's ``prefill_chunk`` says how many. None: any number.
        """
        return None

    @property
    def routing_free(self) -> bool:
        """Whether a step of one row costs the same for any routing, since whole layers stay where they are."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that it reads from trace and profile."""
        return frozenset()

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts of the latest run beyond the records; a result has each as ``count_<name>``."""
        return {}

    def place(self, view: View) -> Placement:
        """Return where everything is at the start: nothing beyond the backing copies, and no pool."""
        return Placement()

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Answer an event by the method of its name (``on_routed``), with the same arguments."""
        actions: Iterable[Action] = getattr(self, _METHODS[type(event)])(event, view)
        return actions

    def evict(self, fetch: Fetch, view: View) -> Victim | None:
        """Name no victim: the fetch waits until the policy drops something."""
        return None

    def bind_oracle(self, future: Future) -> None:
        """Receive the future; only policies whose ``needs`` contains ``"oracle:routing"`` keep it."""

    def transfer(self, model: ModelSpec) -> Copies | None:
        """Return the system's own way to copy weights; None: the experiment's."""
        return None

    def __repr__(self) -> str:
        known = options_of(type(self))
        given = {name: value for name, value in self.options().items() if value != known[name].default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


class Costs(Protocol):
    """Anything that gives a cost for a number of rows in square brackets."""

    def __getitem__(self, rows: int, /) -> float: ...


class CostTable(dict[int, int]):
    """Time in ns of one expert on a device by its rows, read from the cost model when needed.

    Not the model's whole table: a profile need not know costs for numbers of rows that no expert gets.
    """

    def __init__(self, view: View, device: str) -> None:
        super().__init__({0: 0})
        self._costs = view.costs
        self._device = device

    def __missing__(self, rows: int) -> int:
        found = self[rows] = self._costs.expert_ns(self._device, rows)
        return found


def gpu_of(view: View, policy: str) -> str:
    """Return the GPU a one-GPU policy uses: the compute device if it is one, else the first."""
    if not view.gpus:
        raise HardwareError(f"policy {policy}: expected a GPU in the hardware profile, got none; choose a profile with one")
    return view.compute if view.compute in view.gpus else view.gpus[0]


def cpu_of(view: View, policy: str) -> str:
    """Return the CPU that computes experts: the first that holds them all."""
    if not view.cpus:
        raise HardwareError(f"policy {policy}: expected a CPU in the hardware profile, got none; choose a profile with one")
    backing = view.costs.hardware.backing
    cpu = next((name for name in backing if name in view.cpus), None)
    if cpu is None:
        raise HardwareError(
            f"policy {policy}: expected a CPU among the backing devices, got {', '.join(backing)}; "
            f"the CPU computes experts that lie in its memory: choose a profile whose `backing` names it"
        )
    return cpu


def disk_of(view: View, policy: str) -> str:
    """Return the disk that has all experts, for a policy that keeps some of them in memory."""
    hardware = view.costs.hardware
    disk = next((name for name, device in hardware.devices.items() if device.role == "storage"), None)
    if disk is None:
        raise HardwareError(
            f"policy {policy}: expected a disk in {hardware.name}, got {', '.join(hardware.devices)}; choose a profile with one, "
            f"or add one to the parts, such as '+ nvme4'"
        )
    return disk


SlotsSplit = Literal["spread", "equal"]


def deal_slots(n_slots: int, n_layers: int, n_experts: int, split: SlotsSplit = "spread") -> list[int]:
    """Deal cache slots out to the layers.

    ``spread`` deals out all: the remainder of an equal share goes, one each, to layers that are evenly spaced over the stack.
    ``equal`` leaves it unused, as published systems do. No layer gets more slots than it has experts.

    >>> deal_slots(19, 8, 8), deal_slots(19, 8, 8, "equal"), deal_slots(9, 4, 2)
    ([2, 3, 2, 3, 2, 2, 3, 2], [2, 2, 2, 2, 2, 2, 2, 2], [2, 2, 2, 2])
    """
    share, rest = divmod(min(n_slots, n_layers * n_experts), n_layers)
    if split == "equal":
        return [share] * n_layers
    dealt = [(layer * rest + n_layers // 2) // n_layers for layer in range(n_layers + 1)]  # of the rest, before each layer
    return [share + after - before for before, after in pairwise(dealt)]


def slot_bytes(view: View) -> int:
    """Return the bytes of one expert slot: the largest expert of any layer, so that each fits."""
    return max(view.model.expert_bytes(layer) for layer in range(view.model.n_layers))


def staging_pool(view: View, gpu: str, slots: int | None) -> Pool:
    """Return the pool for demand loads: ``slots`` experts, by default top_k but at least 2."""
    # Of two, one computes and one loads.
    return Pool(gpu, STAGING, staging_bytes(view, slots))


def staging_bytes(view: View, slots: int | None) -> int:
    """Return the bytes of such a pool."""
    return min(slots if slots is not None else max(2, view.model.top_k), view.model.n_experts) * slot_bytes(view)


def slots_per_layer(
    view: View, gpu: str, policy: str, at_least: int = 1, *, split: SlotsSplit = "spread", at_most: int | None = None
) -> list[int]:
    """Return the cache slots of each layer: the granted ones, dealt out by `deal_slots`.

    `CapacityError` if a layer's share is smaller than ``at_least``; no layer gets more than ``at_most``.
    """
    layers, experts = view.model.n_layers, view.model.n_experts
    granted = view.cache_slots(gpu)
    slots = deal_slots(granted, layers, experts if at_most is None else at_most, split)
    if min(slots) < at_least:
        raise CapacityError(
            f"policy {policy} on {gpu}: expected at least {at_least} cache slots a layer, got {min(slots)} "
            f"({granted} slots over {layers} layers); "
            f"set cache.ratio to at least {at_least}/{experts}"
        )
    return slots


def layer_residents(view: View, device: str, pool: str, layer: int) -> list[int]:
    """Return the experts of one layer that are in a pool, ascending."""
    return cast("list[int]", view.residents(device, pool, layer))


def idle_resident(view: View, fetch: Fetch) -> tuple[int, int] | None:
    """Return the lowest expert of a fetch's layer and pool that nothing uses, or None.

    What sits idle in a staging pool has been used, because its Run was queued together with its Fetch.
    """
    layer, device, pool = fetch.layer, fetch.device, fetch.pool
    for expert in layer_residents(view, device, pool, layer):
        if not view.is_in_use(layer, expert, device):
            return layer, expert
    return None


class ForOneUse(PolicyBase):
    """Copies experts for one use, through a pool that is emptied as a layer ends."""

    _gpu = ""
    _pool = STAGING

    def on_layer_end(self, event: LayerEnd, view: View) -> Iterable[Action]:
        held = layer_residents(view, self._gpu, self._pool, event.layer)
        return (Drop(event.layer, held, self._gpu),) if held else ()

    def evict(self, fetch: Fetch, view: View) -> Victim | None:
        return idle_resident(view, fetch) if fetch.pool == self._pool else None


def micro_batch_runs(event: Routed, experts: Iterable[int], device: str) -> list[Run]:
    """Return a Run for each expert with the rows of one micro-batch only."""
    top_k, chosen = event.experts.shape[1], event.experts.ravel()
    runs = []
    for expert in experts:
        if event.rows[expert]:
            rows = np.flatnonzero(chosen == expert) // top_k + event.first_row  # a row's experts are distinct
            runs.append(Run(event.layer, (expert,), device, rows.tolist()))
    return runs


Function = TypeVar("Function", bound=Callable[..., object])


def twin(reference: Function, view: View) -> Function:
    """Return a function's native twin for a run, or itself where the engine has none."""
    return cast(Function, getattr(getattr(view, "algorithms", None), reference.__name__, reference))


_WORD = (1 << 64) - 1


def scramble(x: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64; Steele, Lea, Flood, OOPSLA 2014).

    >>> hex(scramble(0)), hex(scramble(1))
    ('0xe220a8397b1dcdaf', '0x910a2dec89025cc1')
    """
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def sample(population: int, n: int, seed: int, place: int) -> list[int]:
    """Draw distinct numbers below ``population`` by ``seed`` and ``place`` (below 2 ** 32).

    >>> sample(8, 3, seed=0, place=5) == sample(8, 3, seed=0, place=5), len(set(sample(8, 20, 0, 5)))
    (True, 8)
    """
    numbers = list(range(population))
    state = scramble((seed << 32) + place)
    for i in range(min(n, population)):  # Fisher and Yates's shuffle, its first n exchanges
        state = scramble(state)
        j = i + state % (population - i)
        numbers[i], numbers[j] = numbers[j], numbers[i]
    return numbers[:n]
