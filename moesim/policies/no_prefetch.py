"""Prefetch part that does nothing, by itself so that conditions on it can stand beside the options of the others."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.policies.algorithms.assignment import Plan
from moesim.policies.parts import Part, Unit
from moesim.policy import Predict, Predicted, Routed, View


class NoPrefetch(Part):
    """Nothing is prefetched."""

    transient = False
    slots = 0
    predicts = False

    def ask(self, event: Routed, view: View) -> Sequence[Predict]:
        """Ask for no prediction."""
        return ()

    def ahead(self, event: Routed, plan: Plan, view: View) -> Sequence[Unit]:
        """Choose no expert."""
        return ()

    def choose(self, event: Predicted, view: View) -> Sequence[Unit]:
        """Choose no expert."""
        return ()
