"""Slots of a pool by number, and scores of experts that fade, for caches that name who leaves when a copy is issued."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.policies.parts import Unit


class Bank:
    """Slots of one pool: who has which, the one used longest ago first."""

    def __init__(self, slots: int) -> None:
        self.slot: dict[Unit, int] = {}  # of those that are there or on their way
        self.there: set[Unit] = set()  # those that count as there
        self.free = list(range(slots))  # a heap

    def enter(self, unit: Unit, slot: int) -> None:
        """Give a unit a slot, at the recent end; it does not count as there yet."""
        self.slot[unit] = slot

    def touch(self, unit: Unit) -> None:
        """Move it to the recent end."""
        self.slot[unit] = self.slot.pop(unit)

    def leave(self, unit: Unit) -> int:
        """Take the slot from a unit, and return it."""
        self.there.discard(unit)
        return self.slot.pop(unit)


class DecayedScores:
    """Uses of each expert, each half as much after so many visits of its layer."""

    def __init__(self, n_layers: int, half_life: float) -> None:
        self._half_life = half_life
        self._visits = [0] * n_layers
        self._scores: dict[Unit, tuple[float, int]] = {}  # score, and the visit at which it was that

    def used(self, layer: int, experts: Sequence[int], *, begins: bool) -> None:
        """Count one use of each in this visit, which ``begins`` or goes on with another micro-batch."""
        self._visits[layer] += begins
        for unit in ((layer, expert) for expert in experts):
            self._scores[unit] = self.of(unit) + 1, self._visits[layer]

    def of(self, unit: Unit) -> float:
        """Return the score of now."""
        score, at = self._scores.get(unit, (0.0, 0))
        return score * 2 ** ((at - self._visits[unit[0]]) / self._half_life)
