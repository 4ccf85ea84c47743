"""Experts of a prompt's layers that pass through a few slots, copied ahead of their products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesim.policies.parts import Unit
from moesim.policy import DEMAND, PREFETCH, Action, Drop, Fetch, Fetched, Ran, Routed, Run


class StreamedAhead:
    """Copies whole layers in order into the free room of a pool; each expert leaves after its use."""

    # A copy begins as soon as an expert before it has left: the pool's room is a ring of slots, and bounds how far ahead it goes.

    def __init__(self, gpu: str, pool: str, ahead: int) -> None:
        self._gpu, self._pool, self._ahead = gpu, pool, ahead
        self._layers: Sequence[Sequence[int]] = ()
        self._copied: list[set[int]] = []
        self._next = 0  # first layer whose copies are not ordered
        self._now = -1  # last layer that was routed
        self._there: set[Unit] = set()  # arrived, and their layer is not routed
        self.unwanted: set[Unit] = set()  # on their way, though no row of their layer wants them

    def begin(self, layers: Sequence[Sequence[int]]) -> list[Action]:
        """Begin a step with the experts to copy in each layer, ascending."""
        self._layers, self._next, self._now = layers, 0, -1
        self._copied = [set(experts) for experts in layers]
        self._there.clear()
        return self._reach(self._ahead)

    def _reach(self, layer: int) -> list[Action]:
        end = min(layer + 1, len(self._layers))
        found: list[Action] = []
        for i in range(self._next, end):
            self.unwanted.difference_update((i, e) for e in self._layers[i])
            found.append(Fetch(i, self._layers[i], self._gpu, PREFETCH, self._pool))
        self._next = max(self._next, end)
        return found

    def serve(self, event: Routed) -> list[Action]:
        """Run what is routed on the GPU; forget what was copied for it once it has run."""
        layer, gpu = event.layer, self._gpu
        used = [e for e in event.active if e in self._copied[layer]]
        again = layer == self._now  # of a further micro-batch: what has left by now is copied again
        done: list[int] = []
        if not again:
            self._now = layer
            idle = [e for e in self._layers[layer] if not event.rows[e]]
            done = [e for e in idle if (layer, e) in self._there]
            self.unwanted.update((layer, e) for e in idle if (layer, e) not in self._there)
            self._there = {unit for unit in self._there if unit[0] > layer}
        self.unwanted.difference_update((layer, e) for e in used)
        fetch = Fetch(layer, used, gpu, DEMAND if again else PREFETCH, self._pool)
        drop = Drop(layer, [*used, *done], gpu)
        return [fetch, Run(layer, event.active, gpu), drop, *self._reach(layer + self._ahead)]

    def arrived(self, event: Fetched) -> list[Action]:
        """Note an arrival; forget what nobody wants."""
        layer, expert, _ = event
        if (layer, expert) in self.unwanted:
            self.unwanted.discard((layer, expert))
            return [Drop(layer, [expert], self._gpu)]
        if self._now < layer < self._next and expert in self._copied[layer]:
            self._there.add((layer, expert))
        return []

    def evict(self, fetch: Fetch) -> Unit | None:
        """Return who makes room for a further micro-batch: the last of a later layer, to be copied again."""
        if fetch.layer > self._now or not self._there:
            return None
        last = max(self._there)
        self._there.discard(last)
        return last


@dataclass
class _Group:
    """Experts of a layer that are computed and forgotten together."""

    layer: int
    experts: Sequence[int]
    coming: set[int]
    wanted: set[int]
    running: set[int] = field(default_factory=set)


class StreamedInGroups(StreamedAhead):
    """The same in groups of experts: each is computed once all of it is there, and leaves when it is done."""

    # A group stands for a tensor with one matrix of every expert: as many bytes, as much to compute.

    def __init__(self, gpu: str, pool: str, ahead: int, size: int) -> None:
        super().__init__(gpu, pool, ahead)
        self._size = size
        self._groups: list[_Group] = []  # that are not done

    def begin(self, layers: Sequence[Sequence[int]]) -> list[Action]:
        """Begin a step with the experts to copy in each layer, ascending; what is still on its way is among them."""
        self._groups.clear()
        return super().begin(layers)

    def serve(self, event: Routed) -> list[Action]:
        """Let groups run as they arrive; of a further micro-batch what has left by now is copied again."""
        layer, gpu, actions = event.layer, self._gpu, list[Action]()
        if layer != self._now:
            self._now = layer
            ids = self._layers[layer]
            actions.append(Fetch(layer, ids, gpu, PREFETCH, self._pool))
            for at in range(0, len(ids), self._size):
                part = ids[at : at + self._size]
                self._groups.append(_Group(layer, part, {e for e in part if (layer, e) not in self._there}, set()))
            self._there = {unit for unit in self._there if unit[0] > layer}
        late = set(event.active)
        for group in self._groups:
            if group.layer == layer:
                mine = late.intersection(group.experts)
                late -= mine
                if group.running and mine:
                    actions.append(Run(layer, sorted(mine), gpu))
                else:
                    group.wanted |= mine
        again = sorted(late)
        actions += [Fetch(layer, again, gpu, DEMAND, self._pool), Run(layer, again, gpu), Drop(layer, again, gpu)]
        return [*actions, *self._go_on(), *self._reach(layer + self._ahead)]

    def _go_on(self) -> list[Action]:
        """Run the groups that are there; forget those that nobody wants."""
        actions: list[Action] = []
        for group in [group for group in self._groups if not group.coming and not group.running]:
            if group.wanted:
                group.running = group.wanted
                actions.append(Run(group.layer, sorted(group.running), self._gpu))
            else:
                self._groups.remove(group)
                actions.append(Drop(group.layer, group.experts, self._gpu))
        return actions

    def arrived(self, event: Fetched) -> list[Action]:
        """Note an arrival; return what may run now."""
        layer, expert, _ = event
        if self._now < layer < self._next:
            self._there.add((layer, expert))
        for group in self._groups:
            if group.layer == layer:
                group.coming.discard(expert)
        return self._go_on()

    def ran(self, event: Ran) -> list[Action]:
        """Forget a group that is done."""
        actions: list[Action] = []
        for group in [group for group in self._groups if group.layer == event.layer and group.running]:
            group.running.difference_update(event.experts)
            if not group.running:
                self._groups.remove(group)
                actions.append(Drop(group.layer, group.experts, self._gpu))
        return actions
