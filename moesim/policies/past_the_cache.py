"""Prompts that a cache beside the CPU does not serve: which they are, and who computes them."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

from moesim.policies.base import STAGING, layer_residents
from moesim.policies.parts import Unit
from moesim.policy import CACHE, DEMAND, Action, Drop, Fetch, LayerEnd, Routed, Run, StepBegin, View

Prompts = Literal["bypass", "read-only", "fitting", "cached"]
STREAMED: tuple[Prompts, ...] = ("read-only", "fitting")
"""With these the GPU computes what is copied for one use."""
LLAMA_CPP_OFFLOAD_ROWS = 32
"""From which on llama.cpp copies weights of the host for one use (op-offload; ggml-org/llama.cpp PR 18535)."""
LLAMA_CPP_PROMPT_ROWS = 512
"""Rows of a micro-batch of llama.cpp (``--ubatch-size``): longer prompts go in several."""


class PastTheCache:
    """Says which visits pass by a cache, and serves them; the cache learns nothing of them.

    The GPU computes micro-batches from ``offload_rows`` rows on only, if it is to compute any.
    """

    def __init__(self, prompts: Prompts, cached_rows: int | None, gpu: str, cpu: str, offload_rows: int = 1) -> None:
        self._prompts = prompts
        self._cached_rows = cached_rows
        self._offload_rows = offload_rows
        self._gpu, self._cpu = gpu, cpu
        self._large = False
        self.stages = prompts in STREAMED  # through a pool of its own
        self._unfit = (-1, -1)  # step and layer of the latest visit that did not fit

    def step_begin(self, event: StepBegin) -> bool:
        """Say whether all of a step passes by."""
        rows = self._cached_rows
        self._large = event.phase == "prefill" if rows is None else len(event.requests) > rows
        self._large &= self._prompts != "cached"
        return self._large and self._prompts != "fitting"

    def passes(self, event: Routed, slots: int) -> bool:
        """Say whether a visit passes by; of several micro-batches the first decides."""
        if not self._large or self._prompts != "fitting":
            return self._large
        if event.mb == 0 and len(event.active) > slots:
            self._unfit = event.step, event.layer
        return self._unfit == (event.step, event.layer)

    def serve(self, event: Routed, slotted: Container[Unit]) -> list[Action]:
        """Leave a visit to the CPU, or to the GPU by what has a slot, maybe on its way to it, and copies for one use."""
        layer = event.layer
        if self._prompts == "bypass" or len(event.experts) < self._offload_rows:
            return [Run(layer, event.active, self._cpu)]
        own = [e for e in event.active if (layer, e) in slotted]
        others = [e for e in event.active if (layer, e) not in slotted]
        fetches = [Fetch(layer, own, self._gpu, DEMAND, CACHE), Fetch(layer, others, self._gpu, DEMAND, STAGING)]
        return [*fetches, Run(layer, [*own, *others], self._gpu)]

    def layer_end(self, event: LayerEnd, view: View) -> list[Action]:
        """Drop what was copied for one use."""
        held = layer_residents(view, self._gpu, STAGING, event.layer)
        return [Drop(event.layer, held, self._gpu)] if held else []
