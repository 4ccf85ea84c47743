"""The pool of experts that are fetched ahead and never enter a cache: used in their layer or by nobody."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.policies.base import layer_residents, slot_bytes
from moesim.policies.parts import Unit
from moesim.policy import DEMAND, PREFETCH, Fetch, Pool, View

PREFETCHED = "prefetch"


class Transient:
    """What was fetched ahead to a device, by layer, until that layer ends."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._ahead: dict[int, list[int]] = {}
        self._late: dict[int, list[int]] = {}  # what was on its way when its layer ended, which a slow link may bring yet

    def pool(self, slots: int, view: View) -> Pool:
        """Return the pool, with no more slots than a layer has experts."""
        return Pool(self._device, PREFETCHED, min(slots, view.model.n_experts) * slot_bytes(view))

    def fetch(self, layer: int, experts: Sequence[int]) -> Fetch:
        """Fetch experts of a later layer."""
        self._ahead.setdefault(layer, []).extend(experts)
        return Fetch(layer, experts, self._device, PREFETCH, PREFETCHED)

    def demand(self, layer: int, misses: Sequence[int], view: View) -> tuple[list[Fetch], Sequence[int]]:
        """Make what is on its way more urgent, in the pool it was meant for; return that, and what is still to be loaded."""
        if late := self._late.pop(layer, []):
            late = [e for e in late if view.is_pending(layer, e, self._device)]
            if again := [e for e in late if e in misses]:
                self._ahead.setdefault(layer, []).extend(again)
            if others := [e for e in late if e not in again]:
                self._late[layer] = others
        if layer not in self._ahead:
            return [], misses
        ahead = self._ahead[layer]
        early = [e for e in misses if e in ahead and view.is_pending(layer, e, self._device)]
        rest = [e for e in misses if e not in early]
        return [Fetch(layer, early, self._device, DEMAND, PREFETCHED)] if early else [], rest

    def layer_end(self, layer: int, view: View) -> list[int]:
        """Return what is to be dropped of a layer that ends: what is there, and what is on its way to this pool, for nobody."""
        if (ahead := self._ahead.pop(layer, None)) is None:
            return []
        held = layer_residents(view, self._device, PREFETCHED, layer)
        late = [e for e in ahead if view.is_pending(layer, e, self._device)]
        if late:
            self._late[layer] = list(dict.fromkeys([*self._late.get(layer, ()), *late]))
        return held + late

    def forget(self, layer: int, experts: Sequence[int]) -> None:
        """Leave experts on their way to another pool."""
        if layer in self._late:
            self._late[layer] = [e for e in self._late[layer] if e not in experts]

    def spent(self, fetch: Fetch, routed: int, view: View) -> Unit | None:
        """Return a prefetched expert whose layer is routed and that nothing uses; for a demand load, any idle one."""
        for layer, experts in self._ahead.items():
            if layer <= routed or fetch.urgency == DEMAND:
                for expert in experts:
                    if view.is_resident(layer, expert, self._device) and not view.is_in_use(layer, expert, self._device):
                        experts.remove(expert)
                        return layer, expert
        return None
