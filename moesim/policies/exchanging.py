"""Experts that live in one place: a newcomer and the one that leaves change places, and what leaves is copied back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesim.policies.base import CACHE
from moesim.policies.parts import Unit
from moesim.policy import DEMAND, UPDATE, Action, Drop, Fetch, Move, Run, View

LEAVING = "leaving"  # pool of experts on their way back to the host


class Exchange:
    """Copies between a GPU's cache and the host.

    What leaves is copied back if ``writeback``, else forgotten at once. In the pool `LEAVING`, ``n_buffers`` experts make room before
    they are gone.
    """

    def __init__(self, gpu: str, host: str, writeback: bool, n_buffers: int) -> None:
        self._gpu, self._host = gpu, host
        self._writeback = writeback
        self._n_buffers = n_buffers
        self._leaving: dict[Unit, list[Run]] = {}  # -> Runs on the host that wait for it
        self._buffered: set[Unit] = set()

    def is_leaving(self, layer: int, expert: int) -> bool:
        """Say whether the host has not got an expert yet."""
        return (layer, expert) in self._leaving

    def start(self, layer: int, pairs: Iterable[tuple[int, int]], view: View) -> list[Action]:
        """Copy experts in and others out, pair by pair.

        A pair is a newcomer and an expert on the GPU that leaves; neither may be under way.
        """
        actions: list[Action] = []
        for new, old in pairs:
            if self._writeback:
                self._leaving[layer, old] = []
                actions += self._to_buffers(view)
                actions.append(Fetch(layer, (old,), self._host, UPDATE, source=self._gpu))
            actions.append(Drop(layer, (old,), self._gpu))
            actions.append(Fetch(layer, (new,), self._gpu, DEMAND, CACHE))
        return actions

    def arrived(self, layer: int, expert: int, view: View) -> list[Action]:
        """Return what an arrival on the host sets free: a buffer for the next that leaves, and Runs there."""
        self._buffered.discard((layer, expert))
        runs = self._leaving.pop((layer, expert))
        return [*self._to_buffers(view), *runs]

    def when_there(self, runs: Sequence[Run]) -> list[Action]:
        """Return Runs on the host, each of one expert, but keep those whose expert is still leaving the GPU."""
        if not self._leaving:
            return list(runs)
        now: list[Action] = []
        for run in runs:
            kept = self._leaving.get((run.layer, run.experts[0]))
            if kept is None:
                now.append(run)
            elif run.rows is not None or run not in kept:  # without rows, the one that is kept takes all
                kept.append(run)
        return now

    def _to_buffers(self, view: View) -> list[Action]:
        """Give buffers to who leaves; an expert that has left while a decision was taken needs none."""
        actions: list[Action] = []
        for layer, expert in self._leaving:
            if len(self._buffered) >= self._n_buffers:
                break
            if (layer, expert) not in self._buffered and view.is_resident(layer, expert, self._gpu):
                self._buffered.add((layer, expert))
                actions.append(Move(layer, (expert,), self._gpu, LEAVING))
        return actions
