"""All experts on the CPU: attention and everything else that is not a routed expert on the GPU, no expert there.

What KTransformers' first engine does by default, and what DALI's ablation calls "naive". The cache slots are not used.

| point | we do |
|---|---|
| placement | no expert on the GPU |
| execution | every active expert on the CPU, ascending id; rows cross once there and once back |
| shared experts | on the GPU, while the CPU works |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moesim.policies.base import PolicyBase, cpu_of
from moesim.policy import Action, Placement, Routed, Run, View


class AllCpu(PolicyBase):
    """Every expert computed on the CPU, nothing transferred."""

    listens = frozenset({Routed})

    def place(self, view: View) -> Placement:
        """Put no expert anywhere but on the host."""
        self._cpu = cpu_of(view, "all-cpu")
        return Placement()

    def decide(self, event: Any, view: View) -> Iterable[Action]:
        """Run what is active."""
        return (Run(event.layer, event.active, self._cpu),)
