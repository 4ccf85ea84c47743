"""DAOP's prefill: where each expert belongs, and which change places once the rows of a prompt are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moesim.policies.algorithms.daop import prefill_swaps, swaps_from
from moesim.policies.main_thread import Pair
from moesim.policy import Routed, StepBegin


class SwapRule(NamedTuple):
    """When experts change places."""

    factor: float
    strict: bool
    mixed: bool
    in_last_chunk: bool
    reset: bool


class PromptSwaps:
    """Keeps the placement, which copies under way may still have to reach, and decides the swaps of a prompt."""

    def __init__(self, rule: SwapRule, initial: Sequence[bytes], top_k: int) -> None:
        self._rule = rule
        self._initial = initial
        self._top_k = top_k
        self.on_gpu = [bytearray(row) for row in initial]
        self._counts = [[0] * len(row) for row in initial]  # rows of the present prompt, chunk by chunk
        self._first_chunk, self._last_chunk = True, True

    def begin_step(self, event: StepBegin) -> None:
        """Count afresh if a prompt begins."""
        self._first_chunk, self._last_chunk = self._last_chunk, event.last_chunk
        if self._first_chunk and event.phase != "decode":
            self._counts = [[0] * len(counts) for counts in self._counts]

    def decide(self, event: Routed, may_swap: Callable[[int, int], bool]) -> list[Pair]:
        """Count the rows of a layer; decide its swaps once, with the first micro-batch of one of its chunks.

        Experts that are still moving stay where they are going.
        """
        layer, rule = event.layer, self._rule
        loads = self._counts[layer] = [old + new for old, new in zip(self._counts[layer], event.rows, strict=True)]
        if event.mb or not (self._last_chunk if rule.in_last_chunk else self._first_chunk):
            return []
        on_gpu = self.on_gpu[layer]
        start = self._initial[layer] if rule.reset else on_gpu
        tokens = sum(loads) // self._top_k
        pairs = prefill_swaps(loads, start, factor=rule.factor, strict=rule.strict, mixed=rule.mixed, prompt_tokens=tokens)
        if rule.reset:
            pairs = swaps_from(on_gpu, start, pairs, loads)
        found = []
        for new, old in pairs:
            if may_swap(new, old):
                on_gpu[new], on_gpu[old] = 1, 0
                found.append((new, old))
        return found
