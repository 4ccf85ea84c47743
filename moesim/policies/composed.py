"""A policy made of parts: placement x assignment x prefetch x replacement.

Many systems are such a composition, and an ablation swaps one part::

    policies:
      - {name: composed, placement: random, assignment: greedy, replacement: lru}
      - {name: composed, assignment: {name: beam, width: 4}, prefetch: {name: predicted, source: frequency, size: 2}}

What happens at each event:

* Routed: predictions for later layers are asked for; the assignment plans; what the GPU lacks is fetched, into the cache
  if the replacement admits demand loads, else through a small staging pool. A load's victim is named by the replacement when
  the load could start; if it is still to run, it leaves after that, and the load lands in as small a pool next to the cache,
  so that what stays depends on the rule and not on which expert became idle first. Both devices run their experts, on the GPU the
  ones already there first and the others by arrival.
* Predicted: the prefetch part's choice is fetched, unless that layer has been routed meanwhile.
* LayerEnd: transient copies of the layer are dropped, and the replacement may swap experts; a newcomer that is on its way as
  a transient copy becomes the cache's.

The native engine decides by itself where all parts are moesim's own and are there in C++ as well; else it asks the object.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from operator import itemgetter
from types import FunctionType, MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from moesim.errors import CapacityError, ConfigError
from moesim.policies.base import (
    CACHE,
    STAGING,
    Future,
    PolicyBase,
    SlotsSplit,
    cpu_of,
    gpu_of,
    idle_resident,
    layer_residents,
    slot_bytes,
    slots_per_layer,
    staging_bytes,
    staging_pool,
)
from moesim.policies.options import option
from moesim.policies.parts import (
    AssignmentOption,
    AssignmentPart,
    PlacementOption,
    PlacementPart,
    Plan,
    PrefetchOption,
    PrefetchPart,
    ReplacementOption,
    ReplacementPart,
    Setup,
    Unit,
)
from moesim.policies.parts.prefetch import PREFETCHED, NoPrefetch, Transient
from moesim.policies.registry import make_part, part_name
from moesim.policy import (
    DEMAND,
    PREFETCH,
    Action,
    Copy,
    Drop,
    Fetch,
    LayerEnd,
    Move,
    Placement,
    Pool,
    Predicted,
    Routed,
    Run,
    StepBegin,
    View,
)

Scope = Annotated[Literal["per-layer", "global"], Field(description="Cache slots for each layer, or one pool for all.")]
Split = Annotated[
    SlotsSplit,
    Field(
        description="What becomes of slots beyond an equal share of each layer: one more for some layers, evenly spaced, or unused, "
        "as published systems have it. For ``scope: per-layer``."
    ),
]
StagingSlots = Annotated[
    int | None,
    Field(
        ge=1,
        description="Experts that lie next to the cache: all demand loads of a replacement that admits none, and of others those "
        "whose victim is still to run; None: the model's top_k, but at least 2.",
    ),
]
IN_CPP = {
    "assignment": ("all-gpu", "greedy", "queues"),
    "prefetch": ("none", "predicted", "impact-driven"),
    "replacement": ("lru", "mrs", "workload-aware"),
}
"""Parts that are in C++, too: those of LRU, DALI and HybriMoE; placements are asked once, in Python."""


class Parts(NamedTuple):
    """The four parts of a composition."""

    placement: PlacementPart
    assignment: AssignmentPart
    prefetch: PrefetchPart
    replacement: ReplacementPart


class Composed(PolicyBase):
    """Any combination of placement, assignment, prefetch and replacement parts."""

    oracles = MappingProxyType({"replacement": {"replacement": "belady"}, "assignment": {"assignment": "exact"}})

    placement: PlacementOption = option("lowest-ids")
    assignment: AssignmentOption = option("all-gpu")
    prefetch: PrefetchOption = option("none")
    replacement: ReplacementOption = option("lru")
    scope: Scope = option("per-layer")
    slots_split: Split = option("spread")
    staging_slots: StagingSlots = option(None)
    load_order: Literal["id", "rows", "plan"] = option(
        "id",
        "Demand loads in ascending id, or by rows, most first, or in the order of the assignment's plan, in which the GPU then "
        "also executes; in the other orders it executes what is there first.",
    )
    cache_only: bool = option(False, "The assignment counts only cached experts as being on the GPU, not prefetched ones.")

    # ------------------------------------------------------------------------------------------------------ the parts
    def compose(self) -> Parts:
        """Return the parts that the options name; a system returns its own where none is named."""
        return Parts(*(self.named(kind) for kind in Parts._fields))

    def named(self, kind: str, own: Any = None) -> Any:
        """Return the part that an option names, or the system's own if the option is None."""
        given = getattr(self, kind)
        return own if given is None else make_part(kind, given)

    def adjust(self, view: View) -> None:
        """Set what parts take from the model or from each other; a hook for systems."""

    @cached_property
    def parts(self) -> Parts:
        return self.compose()

    @property
    def listens(self) -> frozenset[type]:
        """Routing, and predictions, layer ends or steps as far as the parts need them."""
        _, _, prefetch, replacement = self.parts
        events: set[type] = {Routed}
        if prefetch.predicts:
            events.add(Predicted)
        if not replacement.admits or prefetch.transient:
            events.add(LayerEnd)
        if any(hasattr(part, "step_begin") for part in self.parts):
            events.add(StepBegin)
        return frozenset(events)

    @property
    def prefetches(self) -> bool:
        return not isinstance(self.parts.prefetch, NoPrefetch)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(part.needs for part in self.parts))

    def bind_oracle(self, future: Future) -> None:
        for part in self.parts:
            if hasattr(part, "bind_oracle"):
                part.bind_oracle(future)

    # ------------------------------------------------------------------------------------------------------ the start
    def place(self, view: View) -> Placement:
        placement, assignment, prefetch, replacement = self.parts
        self._check()
        self.adjust(view)
        name = type(self).__name__
        gpu = self._gpu = gpu_of(view, name)
        self._cpu = cpu_of(view, name) if assignment.uses_cpu else ""
        per_layer = self.scope == "per-layer"
        slots = self._cache_slots(view, per_layer)
        setup = Setup(view, gpu, self._cpu, slots, per_layer)
        residents = self._residents = placement.choose(setup)
        assignment.start(setup)
        prefetch.start(setup)
        replacement.start(setup, residents)
        self._per_layer = per_layer
        self._load_ns = [view.costs.fetch_ns(view.host, gpu, None, layer) for layer in range(view.model.n_layers)]
        self._now = (-1, -1)  # step and layer routed last
        self._ahead = not isinstance(prefetch, NoPrefetch)
        self._transient = Transient(gpu)
        n_bytes = slot_bytes(view)
        sizes = [n * n_bytes for n in slots] if per_layer else slots[0] * n_bytes
        full = min(slots) == view.model.n_experts * (1 if per_layer else view.model.n_layers)
        landing = staging_bytes(view, self.staging_slots) if replacement.admits and not full else 0
        pools = [Pool(gpu, CACHE, sizes, per_layer, landing)]
        if not replacement.admits:
            pools.append(staging_pool(view, gpu, self.staging_slots))
        if prefetch.transient:
            pools.append(self._transient.pool(prefetch.slots, view))
        copies = [Copy(layer, experts, gpu) for layer, experts in enumerate(residents) if experts]
        return Placement(copies=copies, pools=pools)

    def _check(self) -> None:
        _, _, prefetch, replacement = self.parts
        into_cache = not isinstance(prefetch, NoPrefetch) and not prefetch.transient
        if into_cache and not replacement.admits:
            remedy = "set pool: transient" if hasattr(prefetch, "pool") else "choose a replacement such as lru"
            raise ConfigError(
                f"prefetch {prefetch!r}: expected pool 'transient' with replacement {replacement!r}, which admits "
                f"nothing to the cache, got pool 'cache'; {remedy}"
            )
        if self.cache_only and getattr(self.parts.assignment, "counts_issued", False):
            raise ConfigError(
                f"cache_only: expected false with assignment {self.parts.assignment!r}, which counts an expert as cached from the "
                "issue of its copy on, got true; leave it out, or set cached_from: start"
            )

    def _cache_slots(self, view: View, per_layer: bool) -> list[int]:
        """Return the slots of each layer, or the one number of a global pool."""
        least = 1 if self.parts.replacement.admits else 0
        if per_layer:
            return slots_per_layer(view, self._gpu, type(self).__name__, least, split=self.slots_split)
        slots = min(view.cache_slots(self._gpu), view.model.n_layers * view.model.n_experts)
        if slots < least:
            raise CapacityError(
                f"policy {type(self).__name__} on {self._gpu}: expected at least 1 cache slot, got 0; raise cache.ratio"
            )
        return [slots]

    # ------------------------------------------------------------------------------------------------------ events
    def on_step_begin(self, event: StepBegin, view: View) -> Iterable[Action]:
        for part in self.parts:
            if hasattr(part, "step_begin"):
                part.step_begin(event)
        return ()

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        step, layer, gpu = event.step, event.layer, self._gpu
        _, assignment, prefetch, replacement = self.parts
        self._now = (step, layer)
        # Predictions first: they are computed ahead of the Runs below.
        actions: list[Action] = list(prefetch.ask(event, view)) if self._ahead else []
        replacement.used(event)
        resident = view.residency(layer, gpu)
        if assignment.uses_cpu:
            if hasattr(assignment, "routed"):
                assignment.routed(event)
            plan = assignment.assign(layer, event.rows, self._waiting(layer, event.active, resident, view))
        else:
            plan = Plan(tuple(event.active), ())
        if plan.cpu:
            actions.append(Run(layer, plan.cpu, self._cpu))
        if plan.gpu:
            planned: Sequence[int] = plan.gpu
            misses = [e for e in planned if not resident[e]]
            if misses:
                misses = self._in_order(misses, plan, event.rows)
                actions += self._load(layer, misses, view)
                if self.load_order != "plan":
                    planned = [e for e in planned if resident[e]] + misses
            actions.append(Run(layer, planned, gpu))
        if self._ahead:
            units = prefetch.ahead(event, plan, view)
            actions += self._prefetch(units, step, view) if units else ()
        return actions

    def _in_order(self, misses: list[int], plan: Plan, loads: Sequence[int]) -> list[int]:
        if self.load_order == "plan":
            return [*(e for e in plan.loads if e in misses), *(e for e in misses if e not in plan.loads)]
        misses.sort()
        if self.load_order == "rows":
            misses.sort(key=lambda e: -loads[e])
        return misses

    def _waiting(self, layer: int, active: Sequence[int], resident: bytes, view: View) -> list[int]:
        """Return the time until each active expert could be on the GPU, at most a whole transfer."""
        gpu, load_ns = self._gpu, self._load_ns[layer]
        waiting = [0] * len(resident)
        cached = set(layer_residents(view, gpu, CACHE, layer)) if self.cache_only else None
        for expert in active:
            if cached is not None:
                waiting[expert] = 0 if expert in cached else load_ns
            elif not resident[expert]:
                pending = view.is_pending(layer, expert, gpu)
                waiting[expert] = view.remaining_ns(layer, expert, gpu) if pending else load_ns
        return waiting

    def _load(self, layer: int, misses: Sequence[int], view: View) -> list[Action]:
        """Fetch what the GPU lacks; what is on its way becomes more urgent, in its own pool."""
        early, rest = self._transient.demand(layer, misses, view) if self._ahead else ((), misses)
        actions: list[Action] = [*early]
        replacement = self.parts.replacement
        if rest and replacement.admits:
            replacement.inserted(layer, rest)
            actions.append(Fetch(layer, rest, self._gpu, DEMAND, CACHE))
        elif rest:
            actions.append(Fetch(layer, rest, self._gpu, DEMAND, STAGING))
        return actions

    def on_predicted(self, event: Predicted, view: View) -> Iterable[Action]:
        step, now = self._now
        if step == event.step and now >= event.layer:
            return ()  # too late: that layer is routed
        units = self.parts.prefetch.choose(event, view)
        return self._prefetch(units, event.step, view) if units else ()

    def _prefetch(self, units: Sequence[Unit], step: int, view: View) -> list[Action]:
        """Fetch what the prefetch part chose, one Fetch for each run of a layer not routed yet."""
        gpu = self._gpu
        now_step, now = self._now
        wanted = [u for u in units if (now_step != step or u[0] > now) and not view.is_pending(*u, gpu)]
        actions: list[Action] = []
        for layer, group in groupby(wanted, key=itemgetter(0)):
            experts = [expert for _, expert in group]
            if self.parts.prefetch.transient:
                actions.append(self._transient.fetch(layer, experts))
            else:
                self.parts.replacement.inserted(layer, experts)
                if lacking := [expert for expert in experts if not view.is_resident(layer, expert, gpu)]:
                    actions.append(Fetch(layer, lacking, gpu, PREFETCH, CACHE))
        return actions

    def on_layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        layer, gpu = event.layer, self._gpu
        replacement = self.parts.replacement
        held = [] if replacement.admits else layer_residents(view, gpu, STAGING, layer)
        held += self._transient.layer_end(layer, view)
        swap = replacement.layer_end(event.step, layer)
        actions: list[Action] = []
        newcomers: Sequence[int] = ()
        if swap is not None:
            newcomers = swap.newcomers
            actions.append(Drop(layer, swap.victims, gpu))
            if coming := [e for e in newcomers if view.is_pending(layer, e, gpu)]:  # late, or from a window before
                self._transient.forget(layer, coming)
                actions.append(Move(layer, coming, gpu, CACHE))
            held = [e for e in held if e not in coming and e not in swap.victims]
            if swap.relabel:
                kept = self._relabelled(layer, swap.victims, [e for e in newcomers if e in held], view)
                newcomers = [e for e in newcomers if e not in kept]
                held = [e for e in held if e not in kept]
                if kept:
                    actions.append(Move(layer, kept, gpu, CACHE))
        if held:
            actions.append(Drop(layer, held, gpu))
        if swap is not None and newcomers:
            actions.append(Fetch(layer, newcomers, gpu, swap.urgency, CACHE))
        return actions

    def _relabelled(self, layer: int, victims: Sequence[int], there: list[int], view: View) -> list[int]:
        """Return the arrived newcomers for which the cache has room; a victim on its way has a slot."""
        free = view.free_bytes(self._gpu, CACHE, layer) // view.model.expert_bytes(layer)
        return there[: free + sum(view.is_resident(layer, e, self._gpu) for e in victims)]

    def evict(self, fetch: Fetch, view: View) -> tuple[int, int] | None:
        """Name a victim: by the replacement in the cache, whatever has been used elsewhere."""
        if fetch.pool == CACHE:
            return self.parts.replacement.victim(fetch, view)
        if fetch.pool == STAGING:
            return idle_resident(view, fetch)
        return self._transient.spent(fetch, self._now[1], view)

    # ------------------------------------------------------------------------------------------------------ the native engine
    def native_parts(self) -> dict[str, Any] | None:
        """Describe the placed composition for the native engine; None: it has to ask this object."""
        parts = _parts_as_shipped(self.parts) if _decides_as_shipped(self) else None
        if parts is None:
            return None
        return parts | {
            "gpu": self._gpu, "cpu": self._cpu or None, "cache": CACHE,
            "staging": None if self.parts.replacement.admits else STAGING,
            "prefetched": PREFETCHED if self.parts.prefetch.transient else None, "per_layer": self._per_layer,
            "residents": self._residents, "load_ns": self._load_ns, "load_order": self.load_order, "cache_only": self.cache_only,
            "exact": self.exact,
        }  # fmt: skip


def _parts_as_shipped(parts: Parts) -> dict[str, Any] | None:
    """Name the parts with their options; None if one is not in C++, or not as shipped."""
    if hasattr(parts.placement, "step_begin"):
        return None
    found: dict[str, Any] = {}
    for kind, names in IN_CPP.items():
        part = getattr(parts, kind)
        name = part_name(kind, type(part))
        if name not in names or not _as_shipped(part):
            return None
        state = part.native_state() if hasattr(part, "native_state") else {}
        if state is None:
            return None
        options = {option: getattr(part, option) for base in type(part).__mro__ for option in getattr(base, "_fields", ())}
        found[kind] = {"name": name, **options, **state}
    return found


def _as_shipped(part: Any) -> bool:
    """Whether no method is replaced, and no option is too large for C++ or for a double."""
    return not any(
        callable(getattr(type(part), name, None)) or (isinstance(value, int) and abs(value) >> 53)
        for name, value in vars(part).items()
    )


def _decides_as_shipped(policy: Composed) -> bool:
    """Whether no subclass or attribute replaces how a composition decides in a run."""
    deciding = {name for name, one in vars(Composed).items() if isinstance(one, FunctionType | property)}
    deciding = deciding - {"adjust", "compose", "named"} | {"decide"}
    own = takewhile(lambda cls: cls is not Composed, type(policy).__mro__)
    return all(vars(one).keys().isdisjoint(deciding) for one in (policy, *own))


def in_python(policy: Any) -> Any:
    """Have the native engine ask this policy at every event, to compare; return it."""
    policy.native_parts = None
    return policy
