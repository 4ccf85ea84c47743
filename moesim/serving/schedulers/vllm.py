"""vLLM V1: one token budget for prompts and answers, blocks of KV cache, preemption by recomputation.

| step of the server | here |
|---|---|
| requests that run, in the order of admission: tokens they know and have not computed, while the budget lasts | the same |
| blocks are allocated for them; without any left the last admitted gives its own up, and begins again | the same |
| then, if nothing was preempted, requests that wait, in order, up to `max_num_seqs`, until one does not fit | the same |
| a request whose computed tokens reach the known ones samples one | the same |
| asynchronous scheduling: step t + 1 is planned before t is sampled | left out; it costs a row after an early end only |

Read: vllm/v1/core/sched/scheduler.py of vllm-project/vllm at 00024d31.
Missing: the prefix cache, priorities, encoder inputs, structured output, remote caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.core.units import ceil_div
from moesim.serving.scheduler import Rows, Scheduler, asked, scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.serving.requests import Request


@scheduler
@dataclass
class Vllm(Scheduler):
    """Continuous batching under a token budget."""

    name = "vllm"
    max_num_batched_tokens: int = asked(2048, "token budget of a step")
    max_num_seqs: int = asked(256, "requests at once")
    block_size: int = asked(16, "tokens of a block of KV cache")
    long_prefill_token_threshold: int = asked(0, "most tokens of one prompt in a step; 0: no such limit", least=0)
    running: list[Request] = field(default_factory=list, init=False)
    held: dict[Request, int] = field(default_factory=dict, init=False)  # blocks of each

    @property
    def most_requests(self) -> int:
        return self.max_num_seqs

    @property
    def most_rows(self) -> int:
        return self.max_num_batched_tokens

    @property
    def n_blocks(self) -> int:
        return ceil_div(self.capacity, self.block_size) if self.kv_tokens is None else self.kv_tokens // self.block_size

    @property
    def n_running(self) -> int:
        return len(self.running)

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return self.n_blocks - sum(self.held.values())

    def plan(self, now_ns: int) -> Sequence[Rows]:
        found: list[Rows] = []
        budget, free, preempted, i = self.max_num_batched_tokens, self.free, False, 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            n = self._tokens(request, budget)
            while (need := self._more_blocks(request, n)) > free:
                victim = self.running.pop()
                free += self.held.pop(victim, 0)
                victim.computed, victim.preempted, preempted = 0, victim.preempted + 1, True
                self.waiting.appendleft(victim)
                if victim is request:
                    return found
            free -= need
            self.held[request] = self.held.get(request, 0) + need
            found.append(Rows(request, n))
            budget -= n
            i += 1
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            n = self._tokens(request, budget)
            need = self._more_blocks(request, n)
            if need > free:
                break
            free -= need
            self.held[request] = need
            self.running.append(self.waiting.popleft())
            found.append(Rows(request, n))
            budget -= n
        return found

    def _tokens(self, request: Request, budget: int) -> int:
        most = self.long_prefill_token_threshold or budget
        return min(request.known - request.computed, most, budget)

    def _more_blocks(self, request: Request, n: int) -> int:
        return ceil_div(request.computed + n, self.block_size) - self.held.get(request, 0)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        del self.held[request]
