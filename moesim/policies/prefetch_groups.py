"""Two groups of buffers for experts fetched ahead, and what of it the link has begun.

One group belongs to the present layer, the other to the next. A group is emptied when its layer ends: what is in it has been
used or was wanted by nobody, and never becomes part of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesim.policies.base import layer_residents, slot_bytes
from moesim.policies.parts import Unit
from moesim.policy import DEMAND, PREFETCH, Action, Drop, Fetch, Pool, View

GROUPS = ("prefetch-even", "prefetch-odd")  # by the number of the layer


class PrefetchGroups:
    """Fetches experts ahead; a transfer that has begun is never given up, one that is only queued may be cancelled.

    Each group has buffers of ``slots`` experts on ``gpu``.
    """

    def __init__(self, gpu: str, slots: int, view: View) -> None:
        self._gpu = gpu
        self._slots = slots
        model, chunk = view.model, view.costs.chunk_bytes
        sizes = [model.expert_bytes(layer) for layer in range(model.n_layers)]
        self._load_ns = [view.costs.fetch_ns(view.host, gpu, size) for size in sizes]
        last = [size if chunk is None else (size - 1) % chunk + 1 for size in sizes]
        self._last_ns = [view.costs.fetch_ns(view.host, gpu, size) for size in last]  # of the last chunk
        self._ahead: list[Unit] = []  # may still be queued or under way
        self._over: set[Unit] = set()  # under way, though their layer has ended; dropped when they arrive

    def pools(self, view: View) -> list[Pool]:
        """Return the two pools."""
        return [Pool(self._gpu, group, self._slots * slot_bytes(view)) for group in GROUPS]

    def fetch(self, layer: int, experts: Sequence[int]) -> Fetch:
        """Fetch experts of a later layer, in this order."""
        self._ahead += [(layer, expert) for expert in experts]
        return Fetch(layer, experts, self._gpu, PREFETCH, GROUPS[layer % 2])

    def keep(self, layer: int, experts: Sequence[int]) -> list[Action]:
        """Want what is on its way: what was to be dropped when it arrives stays until its layer ends once more."""
        again = [expert for expert in experts if (layer, expert) in self._over]
        self._over.difference_update([(layer, expert) for expert in again])
        return [Fetch(layer, again, self._gpu, PREFETCH, GROUPS[layer % 2])] if again else []

    def under_way(self, view: View) -> dict[Unit, int]:
        """Return the transfers that have begun, with the time that is left; what is only queued has all of it left."""
        found: dict[Unit, int] = {}
        for layer, expert in self._ahead:
            if view.is_pending(layer, expert, self._gpu):
                left = view.remaining_ns(layer, expert, self._gpu)
                if left < self._load_ns[layer]:
                    found[layer, expert] = left
        return found

    def busy_ns(self, view: View) -> int:
        """Return how long the link goes on with what it has begun."""
        return max(self.under_way(view).values(), default=0) if self._ahead else 0

    def finish_first(self, view: View) -> list[Action]:
        """Let nothing cut in between the chunks of what has begun: as urgent as a load, and before it."""
        actions: list[Action] = []
        begun = self.under_way(view) if self._ahead else {}
        for (layer, expert), left in begun.items():
            if left <= self._last_ns[layer]:
                continue  # there is nothing between
            actions.append(Fetch(layer, (expert,), self._gpu, DEMAND, GROUPS[layer % 2]))
            if (layer, expert) in self._over:
                actions.append(Drop(layer, (expert,), self._gpu))
        return actions

    def layer_end(self, layer: int, view: View) -> list[Action]:
        """Empty the group of a layer that has ended."""
        gone = layer_residents(view, self._gpu, GROUPS[layer % 2], layer)
        if self._ahead:
            begun = self.under_way(view)
            gone += [e for at, e in self._ahead if at == layer and view.is_pending(at, e, self._gpu)]
            self._ahead = [unit for unit in self._ahead if unit in begun or unit[0] != layer]
            self._over = {unit for unit in begun if unit[0] == layer or unit in self._over}
        else:
            self._over.clear()
        return [Drop(layer, gone, self._gpu)] if gone else []

    def cancel_queued(self, view: View) -> list[Drop]:
        """Cancel what the link has not begun."""
        if not self._ahead:
            return []
        begun = self.under_way(view)
        queued: dict[int, list[int]] = {}
        for layer, expert in self._ahead:
            if (layer, expert) not in begun and view.is_pending(layer, expert, self._gpu):
                queued.setdefault(layer, []).append(expert)
        self._ahead = list(begun)
        return [Drop(layer, experts, self._gpu) for layer, experts in queued.items()]
