"""vLLM V1: one token budget for prompts and answers, blocks of KV cache, preemption by recomputation.

| step of the server | here |
|---|---|
| requests that run, in the order of admission: tokens they know and have not computed, while the budget lasts | the same |
| blocks are allocated for them; without any left the last admitted gives its own up, and begins again | the same; it waits in front |
| then, if nothing was preempted, requests that wait, in order, up to `max_num_seqs`, until one does not fit | the same |
| full blocks that are cached are not computed again, of at most all known tokens but one | the same, by the hashes of a request trace; after a preemption by its own blocks |
| blocks that nobody uses are reused least recently used first, a request's last block before its first | the same |
| without chunked prefill a prompt larger than the budget left ends the admission | `chunked: false`; one larger than the whole budget is refused |
| a request whose computed tokens reach the known ones samples; drafts beyond the budget are dropped | the same |
| KV cache: what the weights leave of the memory | `kv_tokens`; by default the longest request, `max_num_seqs` times or as often as requests can be there at once |

Read: vllm/v1/core/sched/scheduler.py of vllm-project/vllm at 00024d31. The size of a block and the budget's default, which depends on
the GPU (2,048 to 16,384), were not looked up there.
Missing: asynchronous scheduling (one row after an early end), priorities, encoder inputs, structured output, adapters, remote caches,
and the alignment of chunks to blocks for hybrid models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.serving.scheduler import Pooled, Rows, asked, scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.serving.requests import Request


@scheduler
@dataclass
class Vllm(Pooled):
    """vLLM V1: a token budget, preemption by recomputation."""

    name = "vllm"
    max_num_batched_tokens: int = asked(2048, "token budget of a step")
    max_num_seqs: int = asked(256, "requests at once")
    block_size: int = asked(16, "tokens of a block of KV cache")
    long_prefill_token_threshold: int = asked(0, "most tokens of one prompt in a step; 0: no such limit", least=0)
    chunked: bool = asked(True, "prompts are cut where the budget ends")
    prefix_caching: bool = asked(True, "full blocks stay cached, and are shared by prompts that begin alike")
    running: list[Request] = field(default_factory=list, init=False)

    @property
    def most_requests(self) -> int:
        return min(self.max_num_seqs, self.at_once)

    @property
    def most_rows(self) -> int:
        return self.max_num_batched_tokens

    @property
    def block(self) -> int:
        return self.block_size

    @property
    def caching(self) -> bool:
        return self.prefix_caching

    @property
    def longest_possible(self) -> int:
        return self.capacity if self.chunked else min(self.capacity, self.max_num_batched_tokens)

    @property
    def n_running(self) -> int:
        return len(self.running)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        found: list[Rows] = []
        budget, preempted, i = self.max_num_batched_tokens, False, 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            n = request.cut(min(self._wanted(request, request.computed), budget))
            while not self.blocks.grow(request, request.computed + n):
                victim = self.running.pop()
                self.blocks.release(victim)
                victim.give_up()
                self.waiting.appendleft(victim)
                preempted = True
                if victim is request:
                    return found
            found.append(Rows(request, n))
            budget -= n
            i += 1
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            blocks = self.blocks.match(request, request.known - 1)
            cached = blocks * self.block_size
            n = self._wanted(request, cached)
            if n > budget and not self.chunked:
                break
            n = min(n, budget)
            if not self.blocks.admit(request, blocks, cached + n):
                break
            request.find(cached)
            self.running.append(self.waiting.popleft())
            found.append(Rows(request, n))
            budget -= n
        return found

    def _wanted(self, request: Request, computed: int) -> int:
        left = request.known - computed
        return min(left, self.long_prefill_token_threshold or left)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
