"""Least-stale replacement: an expert of the layer that comes last from here on is the one to go.

Layers are passed in a fixed order, so that an expert cannot be used before the pass comes to its layer again. With layer l just
routed, layer l + 1 is 1 away, and so on round the model; what layer l itself does not use now is a whole pass away, the farthest
of all, and the layer before it one less. The least stale entry, of the layer passed last, is thus the one with the longest wait;
the stalest, of layer l + 1, is needed next.

EdgeMoE is described as evicting experts of the layers farthest from the present one first, which can also be read as plain
distance in the stack: then both ends of the model go before its neighbours, and layer l goes last.

Another reading, by generations, is `moesim.policies.systems.two_generations`.

Experts that layer l uses now go last in either reading, unless ``victims`` is ``idle``: then they are named with their layer, and
leave after their run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from moesim.errors import ConfigError
from moesim.policies.algorithms.layers import farthest_layers
from moesim.policies.parts import Setup, Unit
from moesim.policies.parts.replacement import LRU
from moesim.policies.visit import UNROUTED_FIRST, Victims
from moesim.policy import Fetch, Routed, View


class LeastStale(LRU, fixed=("use_order",)):
    """The one whose layer is farthest in the order of layers; needs a global pool.

    Within a layer, the one whose last use is longest ago.
    """

    distance: Literal["next-pass", "absolute"] = "next-pass"
    """How far a layer is: until the pass comes to it again, or in the stack, either way (ties: the one passed already)."""
    victims: Victims = UNROUTED_FIRST
    """Routed experts of the present layer visit are named only if there are no others, or with their layer, which by the
    absolute distance goes last anyway; they leave after their run."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin before layer 0."""
        if setup.per_layer:
            raise ConfigError(
                "replacement least-stale: expected scope 'global', got 'per-layer', where all have one distance; "
                "choose lru, or scope: global in a policy that has that option"
            )
        super().start(setup._replace(per_layer=True), residents)  # its lists are kept by layer, each in order of use
        n_layers = setup.view.model.n_layers
        self._orders = [farthest_layers(layer, n_layers, self.distance) for layer in range(n_layers)]
        self._now = n_layers - 1  # the layer routed last

    def used(self, event: Routed) -> None:
        """Note the layer, and the use of its cached experts."""
        self._now = event.layer
        super().used(event)

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the first, layer after layer, and forget it."""
        found = self.first_resident((unit for layer in self._orders[self._now] for unit in self._members[layer]), view)
        if found is not None:
            del self._members[found[0]][found]
        return found
