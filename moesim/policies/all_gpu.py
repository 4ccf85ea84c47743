"""All experts on the GPU: no offloading, the upper bound of speed where the model fits.

| point | we do |
|---|---|
| placement | every expert resident on one GPU; the cache ratio is ignored |
| model does not fit | an error; ``assume_fits`` runs as if it did, and labels the result |
| transfers | none |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moesim.policies.base import CACHE, PolicyBase, gpu_of
from moesim.policy import Action, Copy, Placement, Pool, Routed, Run, View


class AllGpu(PolicyBase):
    """Every expert on one GPU, nothing offloaded.

    Parameters
    ----------
    assume_fits : bool
        Run as if the GPU's memory were large enough; labels the result ``assumes-memory``.
    """

    listens = frozenset({Routed})

    def __init__(self, *, assume_fits: bool = False) -> None:
        self.assume_fits = assume_fits

    def place(self, view: View) -> Placement:
        """Put every expert on the GPU."""
        self._gpu = gpu_of(view, "all-gpu")
        everyone = tuple(range(view.model.n_experts))
        n_bytes = len(everyone) * sum(view.model.expert_bytes(layer) for layer in range(view.model.n_layers))
        return Placement(
            copies=[Copy(layer, everyone, self._gpu) for layer in range(view.model.n_layers)],
            pools=[Pool(self._gpu, CACHE, n_bytes)],
            enforce_capacity=not self.assume_fits,
        )

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Run what is active."""
        return (Run(event.layer, event.active, self._gpu),)
