"""All experts on the CPU, all else on the GPU: KTransformers' first engine, DALI's "naive".

| point | we do |
|---|---|
| placement | no expert on the GPU; the cache slots are not used |
| execution | active experts on the CPU, ascending id; rows cross once each way |
| shared experts | on the GPU, during the CPU's work |
"""

from __future__ import annotations

from collections.abc import Iterable

from moesim.policies.base import PolicyBase, cpu_of
from moesim.policy import Action, Placement, Routed, Run, View


class AllCpu(PolicyBase):
    """Every expert computed on the CPU, nothing transferred."""

    routing_free = True

    def place(self, view: View) -> Placement:
        self._cpu = cpu_of(view, "all-cpu")
        return Placement()

    def on_routed(self, event: Routed, view: View) -> Iterable[Action]:
        return (Run(event.layer, event.active, self._cpu),)
