"""The routing that is still to come, for oracle policies only."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesim.trace.workload import Workload

NEVER = 2**62
"""What `FutureUse.next_use` answers for an expert that is not used again."""


class FutureUse:
    """When each expert will be used."""

    def __init__(self, workload: Workload) -> None:
        self._steps: dict[tuple[int, int], list[int]] = {}
        for step in workload.steps:
            for mb in step.micro:
                for layer, routing in enumerate(mb.layers):
                    for expert in routing.active:
                        uses = self._steps.setdefault((layer, expert), [])
                        if not uses or uses[-1] != step.index:
                            uses.append(step.index)

    def uses(self, n_layers: int, n_experts: int) -> list[list[int]]:
        """List the steps in which each expert is used, layer after layer."""
        return [self._steps.get((layer, expert), []) for layer in range(n_layers) for expert in range(n_experts)]

    def next_use(self, layer: int, expert: int, step: int) -> int:
        """Say when an expert is used next."""
        uses = self._steps.get((layer, expert), [])
        at = bisect_right(uses, step)
        return uses[at] if at < len(uses) else NEVER
