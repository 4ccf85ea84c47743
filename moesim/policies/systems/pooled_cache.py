"""leloch's pooled cache: the CPU never waits for a miss, and frequent ones are copied.

ggml-org/llama.cpp PR 24524 and discussion 24528, branch v2, as carried by a fork (moe-cache.cu); TheTom/llama-cpp-turboquant PRs
284 and 300 (merged).

| decision | code | ours |
|---|---|---|
| token embedding | on the CPU, as of llama.cpp | the same |
| prompts, as of llama.cpp | micro-batches of 512 rows | the same |
| key | (tensor, expert): gate, up and down apart | whole experts, planned three times; matrices apart with a trace of ``moesim trace split`` |
| pool | one for each size and type, for all layers of a device; at least 64 slots | one for all layers; the granted slots |
| hits | in use while the call goes on, to the recent end; the GPU computes them | the same |
| misses | the CPU computes them at the same time, also what is on its way | the same |
| admission | missed rows an expert since its latest copy: 2 while a slot is free, 8 in a full pool; 8 copies a node | the same (``admit_free``, ``admit_full``, ``inserts``), of a layer visit |
| queue | 128 jobs, 512 MiB; else no copy | the same |
| who leaves | used longest ago of those nobody reads, as the copy is issued | the same |
| a copy counts | once it has ended | the same |
| all rows hit | ``overlap_cpu_rows`` of them go to the CPU | the same; the last ones, those of an expert together |
| larger calls | more than 1 token, later 8, or more than 64 rows: past the cache | the same (``cached_rows``); from 32 tokens on the GPU computes them, as in llama.cpp, else the CPU |
| TurboQuant: admission | 1 miss if the pool holds every entry, else as above | the same (``turboquant-cache``) |
| TurboQuant: who leaves | first of those with at most 4 hits since their copy, else of all | the same (``hot``) |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from moesim.policies.base import slot_bytes
from moesim.policies.cpu_cache import LLAMA_CPP_OFFLOAD_ROWS, LLAMA_CPP_PROMPT_ROWS, BackgroundCache, Bank, PastTheCache
from moesim.policies.options import option
from moesim.policies.parts import Unit
from moesim.policy import Action, View

MAX_ROWS = 64
"""Of a node that the cache serves."""
QUEUE_JOBS, QUEUE_BYTES = 128, 512 << 20
"""Copies on their way, at most."""


class PooledCache(BackgroundCache, fixed=True):
    """Pool over all layers; the CPU computes misses, frequent ones are copied (leloch's cache)."""

    paper = "leloch's expert cache for llama.cpp (ggml-org/llama.cpp PR 24524, branch v2)"
    engine = "llama.cpp"
    missing: ClassVar[tuple[str, ...]] = (
        "a pool for each size and type of tensors, and the 64 visits that count them first",
        "pools of fewer than 64 slots and entries of less than 1 MiB, which are switched off: they work here",
        "several devices, each with a pool for some of the layers",
        "three joins of an expert's layer, one for each matrix: whole experts join once",
        "from 32 tokens on experts that are cached are copied again: here they are read from the cache",
        "of version 1: one of eight misses admitted in a full pool, prefetch that fills it up, a saved hot set",
    )
    admission = "demand"
    scope = "global"
    prefill = "read-only"
    _name = "pooled-cache"
    _embedding_on_cpu = True
    each_layer = ("readback", *("plan",) * 3)  # each matrix has entries of its own
    prompt_rows = LLAMA_CPP_PROMPT_ROWS

    admit_free: int = option(2, "Rows missed before an expert is copied into a free slot.", ge=1)
    admit_full: int = option(8, "The same in a full pool, since its last copy; never fewer than ``admit_free``.", ge=1)
    inserts: int = option(8, "At most so many copies a layer visit.", ge=1)
    overlap_cpu_rows: int = option(
        0, "So many rows go to the CPU if all of a visit's experts are there, so that it computes, too.", ge=0
    )
    cached_rows: int = option(1, "Steps of more tokens pass by the cache (later versions: 8).", ge=1)

    def _prompts(self, view: View, slots: int) -> PastTheCache:
        self._entry_bytes = slot_bytes(view)
        self._whole = slots >= view.model.n_layers * view.model.n_experts
        rows = min(self.cached_rows, MAX_ROWS // view.model.top_k)
        return PastTheCache("read-only", rows, self._gpu, self._cpu, LLAMA_CPP_OFFLOAD_ROWS)

    def _admitted(self, unit: Unit, bank: Bank) -> bool:
        jobs = len(self._issued) + 1
        return jobs <= QUEUE_JOBS and jobs * self._entry_bytes <= QUEUE_BYTES and super()._admitted(unit, bank)

    def _lent(self, hits: Sequence[int], rows: Sequence[int]) -> list[int]:
        lent: list[int] = []
        for expert in reversed(hits):
            if sum(rows[e] for e in lent) + rows[expert] > self.overlap_cpu_rows:
                break
            lent.append(expert)
        return lent


class TurboQuantCache(PooledCache):
    """leloch's pooled cache, which spares entries that were hit often (the TurboQuant fork)."""

    paper = "TurboQuant fork of llama.cpp (TheTom/llama-cpp-turboquant, PRs 284 and 300)"
    missing = (*PooledCache.missing, "ports to Metal and SYCL, where a copy is waited for")
    _name = "turboquant-cache"

    hot: int = option(
        4, "Entries with more hits since their copy leave only if there are no others (``GGML_CUDA_MOE_CACHE_HOT_USES``).", ge=0
    )

    def _prompts(self, view: View, slots: int) -> PastTheCache:
        self._uses: dict[Unit, int] = {}  # hits since the copy
        return super()._prompts(view, slots)

    def _hit(self, unit: Unit, bank: Bank, rows: int) -> None:
        super()._hit(unit, bank, rows)
        self._uses[unit] += rows

    def _wanted_misses(self, bank: Bank) -> int:
        return 1 if self._whole else super()._wanted_misses(bank)

    def _victim(self, bank: Bank) -> Unit | None:
        cold = (unit for unit in self._idle(bank) if self._uses[unit] <= self.hot)
        return next(cold, None) or super()._victim(bank)

    def _take(self, unit: Unit, urgency: int) -> list[Action]:
        taken = super()._take(unit, urgency)
        if taken:
            self._uses[unit] = 0
        return taken
