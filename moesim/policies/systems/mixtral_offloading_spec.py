"""Mixtral-Offloading's report: speculative loading, and experts of a low width.

A. Eliseev, D. Mazur, "Fast Inference of Mixture-of-Experts Language Models with Offloading", arXiv:2312.17238, 2023.

| point | paper says | released code does | we do |
|---|---|---|---|
| who is guessed | the next layer's gate on the present hidden state | not in the repository | ``source``, that gate's recorded answer |
| how many | one or two, once the present layer's loads are done | not in the repository | ``n_ahead`` by predicted rows, behind demand loads |
| where they wait | in buffers of their own; the cache stays as it is | not in the repository | a pool of two layers' guesses |
| a right guess | takes the place of the least recently used when its layer uses it | not in the repository | the same; the victim is copied back as for any miss |
| a wrong guess | given up | not in the repository | dropped when its layer is routed |
| bits | experts of 2 or 3 bits, attention of 4 | HQQ experts of 2 bits | ``bits``: a width of the model, or the full one |
| all else | - | ``mixtral-offloading`` | the same |
"""

from __future__ import annotations

from typing import ClassVar

from moesim.errors import ConfigError
from moesim.policies.base import CACHE
from moesim.policies.options import option
from moesim.policies.parts import Unit, source_needs
from moesim.policies.parts.prefetch import Source, top_by_count
from moesim.policies.systems.mixtral_offloading import MixtralOffloading
from moesim.policy import (
    DEMAND,
    PREFETCH,
    Action,
    Drop,
    Fetch,
    Fetched,
    Move,
    Placement,
    Pool,
    Predict,
    Predicted,
    Routed,
    View,
)

AHEAD = "ahead"


class MixtralOffloadingSpec(MixtralOffloading):
    """LRU cache per layer and buffers for likely experts of the next (Eliseev and Mazur, 2023)."""

    missing: ClassVar[tuple[str, ...]] = (
        "copies in both directions queue behind kernels on one CUDA stream in the released code; here they overlap",
    )
    slots_split = "spread"
    n_ahead: int = option(2, "Experts of the next layer that are loaded on a guess.", ge=1)
    source: Source = option("signal:gate_next1")
    bits: float | None = option(
        None, "Width at which all experts are kept, copied and run, one of the model's; None: the full one."
    )

    @property
    def exact(self) -> bool:  # type: ignore[override]  # as written in a class, or as asked for
        return self.bits is None

    @property
    def needs(self) -> frozenset[str]:
        return source_needs(self.source)

    def place(self, view: View) -> Placement:
        if self.bits is not None and self.bits not in view.model.widths:
            has = " or ".join(f"{width:g}" for width in view.model.widths)
            raise ConfigError(
                f"policy mixtral-offloading-spec: bits: expected a width of the model, {has}, got {self.bits:g}; "
                f"choose one of these, or set model.expert_bits to a list with {self.bits:g}"
            )
        self._bits = self.bits
        self._ahead: dict[int, list[int]] = {}  # layer -> guesses, until it is routed
        self._used: set[Unit] = set()  # right guesses on their way, or not in the cache yet
        self._layer = -1
        placement = super().place(view)
        n_bytes = max(view.model.expert_bytes(layer, self._bits) for layer in range(view.model.n_layers))
        slots = 2 * min(self.n_ahead, view.model.n_experts)
        return Placement(placement.copies, [*placement.pools, Pool(self._gpu, AHEAD, slots * n_bytes)])

    def on_routed(self, event: Routed, view: View) -> list[Action]:
        """Sort the guesses out, serve the layer, and ask about the next one."""
        layer = self._layer = event.layer
        wrong = self._sort_out(event)
        actions: list[Action] = [Drop(layer, wrong, self._gpu, self._bits), *super().on_routed(event, view)]
        if self._asks(event) and layer + 1 < view.model.n_layers:
            actions.append(Predict(event.step, layer + 1, self.source, view.dense_device(layer)))
        return actions

    def _asks(self, event: Routed) -> bool:
        return event.mb == 0

    def on_predicted(self, event: Predicted, view: View) -> list[Action]:
        layer = event.layer
        if layer <= self._layer or event.mb:  # routed meanwhile, or guessed
            return []
        counts = [0] * view.model.n_experts
        for row in event.ids[:, : view.model.top_k].tolist():
            for expert in row:
                counts[expert] += 1
        cached = self._order[layer]
        ahead = [e for e in top_by_count(counts, self.n_ahead) if e not in cached and not self._leaves((layer, e), view)]
        self._ahead[layer] = ahead
        return [Fetch(layer, ahead, self._gpu, PREFETCH, AHEAD, bits=self._bits)]

    def _leaves(self, unit: Unit, view: View) -> bool:
        """Whether a victim is still there, which would stay in its buffer if fetched again."""
        return view.is_resident(*unit, self._gpu, self._bits)

    def _sort_out(self, event: Routed) -> list[int]:
        """Return wrong guesses; right ones wait for their swap."""
        ahead = self._ahead.pop(event.layer, [])
        self._used.update((event.layer, e) for e in ahead if e in event.active)
        return [e for e in ahead if e not in event.active]

    def _blocked(self, unit: Unit, view: View) -> bool:
        return unit not in self._used and super()._blocked(unit, view)

    def _bring(self, unit: Unit, view: View) -> Action:
        """Take a right guess from its buffer, or wait for it there."""
        layer, expert = unit
        if unit not in self._used:
            return super()._bring(unit, view)
        if view.is_resident(layer, expert, self._gpu, self._bits):
            self._used.discard(unit)
            return Move(layer, (expert,), self._gpu, CACHE, self._bits)
        self._loading.add(unit)
        return Fetch(layer, (expert,), self._gpu, DEMAND, AHEAD, bits=self._bits)

    def on_fetched(self, event: Fetched, view: View) -> list[Action]:
        """Move a right guess that its swap has waited for."""
        unit, moved = (event.layer, event.expert), list[Action]()
        if event.device == self._gpu and unit in self._used and unit in self._loading:
            self._used.discard(unit)
            moved = [Move(event.layer, (event.expert,), self._gpu, CACHE, self._bits)]
        return [*moved, *super().on_fetched(event, view)]
