"""Experts of a prompt's layers that pass through a few slots, copied ahead of their products."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.policies.parts import Unit
from moesim.policy import PREFETCH, Action, Drop, Fetch, Fetched, Routed, Run


class StreamedAhead:
    """Copies whole layers in order into the free room of a pool; each expert leaves after its use."""

    # A copy begins as soon as an expert before it has left: so the pool's room is a ring of slots, and bounds how far ahead it goes.

    def __init__(self, gpu: str, pool: str, ahead: int) -> None:
        self._gpu, self._pool, self._ahead = gpu, pool, ahead
        self._layers: Sequence[Sequence[int]] = ()
        self._next = 0  # first layer whose copies are not ordered
        self._now = -1  # last layer that was routed
        self._there: set[Unit] = set()  # arrived before their layer was routed
        self.unwanted: set[Unit] = set()  # on their way, though no row of their layer wants them

    def begin(self, layers: Sequence[Sequence[int]]) -> list[Action]:
        """Begin a step with the experts to copy in each layer."""
        self._layers, self._next, self._now = layers, 0, -1
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
        copied = set(self._layers[layer])
        used = [e for e in event.active if e in copied]
        self.unwanted.difference_update((layer, e) for e in used)
        if layer != self._now:
            self._now = layer
            idle = [e for e in self._layers[layer] if not event.rows[e]]
            done = [e for e in idle if (layer, e) in self._there]
            self.unwanted.update((layer, e) for e in idle if (layer, e) not in self._there)
            self._there = {unit for unit in self._there if unit[0] > layer}
        else:
            done = []  # of a further micro-batch: what has left by now is copied again
        fetch, drop = Fetch(layer, used, gpu, PREFETCH, self._pool), Drop(layer, [*used, *done], gpu)
        return [fetch, Run(layer, event.active, gpu), drop, *self._reach(layer + self._ahead)]

    def arrived(self, event: Fetched) -> list[Action]:
        """Note an arrival; forget what nobody wants."""
        unit = event.layer, event.expert
        if unit in self.unwanted:
            self.unwanted.discard(unit)
            return [Drop(event.layer, [event.expert], self._gpu)]
        if event.layer > self._now:
            self._there.add(unit)
        return []
