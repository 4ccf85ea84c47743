"""DAOP's decoding: what is predicted of the next layer, as the CPU's share and the GPU's."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.policies.algorithms.daop import degraded
from moesim.policy import Predicted


class Ahead:
    """Collects the predictions about the next layer, degrades them, and keeps the GPU's share until that layer is routed."""

    def __init__(self, on_gpu: Sequence[Sequence[int]], top_k: int, allowed: int | None) -> None:
        self._on_gpu = on_gpu
        self._top_k = top_k
        self._allowed = allowed  # experts of a row that may be on the CPU; None: any number
        self.answered = False  # whether a prediction has come in this run
        self.begin_step(0)

    def begin_step(self, n_rows: int) -> None:
        """Forget what was predicted."""
        self._n_rows = n_rows
        self._told: list[Predicted] = []  # about the next layer, by micro-batch
        self._planned: dict[tuple[int, int], dict[int, list[int]]] = {}  # (layer, micro-batch) -> GPU expert -> rows

    def take(self, layer: int, mb: int) -> dict[int, list[int]] | None:
        """Return the GPU's share of a micro-batch by expert; None: the layer's own gate decides."""
        return self._planned.pop((layer, mb), None)

    def add(self, event: Predicted, routed: int) -> dict[int, list[int]] | None:
        """Return the CPU's share by expert once all rows are predicted; None: not yet, too late or not for every row."""
        if not event.mb:
            self._told = []
        if event.layer <= routed or event.mb != len(self._told) or event.ids.shape[1] < self._top_k:
            return None
        self._told.append(event)
        if sum(len(one.ids) for one in self._told) < self._n_rows:
            return None
        self.answered = True
        on_gpu = self._on_gpu[event.layer]
        ahead: dict[int, list[int]] = {}
        first = 0
        for told in self._told:
            rows_of: dict[int, list[int]] = {}
            for row, chosen in enumerate(self._chosen(told, on_gpu), first):
                for expert in chosen:
                    (rows_of if on_gpu[expert] else ahead).setdefault(expert, []).append(row)
            self._planned[event.layer, told.mb] = dict(sorted(rows_of.items()))
            first += len(told.ids)
        return dict(sorted(ahead.items()))

    def _chosen(self, event: Predicted, on_gpu: Sequence[int]) -> list[list[int]]:
        """Return the experts of each row, degraded where too many are on the CPU."""
        found: list[list[int]] = event.ids.tolist()
        chosen = [ids[: self._top_k] for ids in found]
        if self._allowed is None:
            return chosen
        for row, ids in enumerate(chosen):
            if sum(not on_gpu[e] for e in ids) > self._allowed:
                if event.scores is not None and event.scores.shape[1] == len(on_gpu):
                    scores = event.scores[row].tolist()
                else:  # in the order of the ids that were given, then all others alike
                    scores = [0] * len(on_gpu)
                    for place, expert in enumerate(found[row]):
                        scores[expert] = len(found[row]) - place
                chosen[row] = degraded(ids, scores, on_gpu, self._allowed)
        return chosen
