"""Batches: so many requests together, all prompts first, then all answers until the last one ends.

| step | here |
|---|---|
| requests that have arrived form a batch, `size` at most, when the one before has ended | nobody waits for a batch to fill |
| prompts of the whole batch in one step, or in steps of `prefill_chunk` tokens, first come first served | the same |
| then a row of every request that has not ended | the same |
| KV cache: the longest request, `size` times | `kv_tokens`, a share for each |

Those of `workload: {batch_size, prompt_tokens, decode_tokens}`, to the nanosecond, where all requests are there from the start; an
answer has a token more than `decode_tokens`, which comes with the prompt.
Missing: micro-batches and refill of that workload.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.serving.scheduler import Rows, Scheduler, asked, scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.serving.requests import Request


@scheduler
@dataclass
class Static(Scheduler):
    """Batches: all prompts, then all answers until the last ends."""

    name = "static"
    size: int = asked(1, "requests of a batch")
    prefill_chunk: int = asked(0, "tokens of prompts in a step; 0: all", least=0)
    batch: list[Request] = field(default_factory=list, init=False)

    @property
    def most_requests(self) -> int:
        return min(self.size, self.at_once)

    @property
    def most_rows(self) -> int:
        return max(self.prefill_chunk or self.most_requests * self.longest, self.most_requests * self.window)

    @property
    def n_running(self) -> int:
        return len(self.batch)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        if not self.batch:
            self.batch = [self.waiting.popleft() for _ in range(min(self.size, len(self.waiting)))]
        reading = [request for request in self.batch if not request.decodes]
        if not reading:
            return [Rows(request, request.window) for request in self.batch]
        found, room = [], self.prefill_chunk or sum(request.prompt for request in reading)
        for request in reading:
            if room:
                n = min(room, request.prompt - request.computed)
                found.append(Rows(request, n))
                room -= n
        return found

    def ends_prompts(self, rows: Sequence[Rows]) -> bool:
        done = {request.number for request, n in rows if request.computed + n == request.known}
        return all(request.decodes or request.number in done for request in self.batch)

    def leave(self, request: Request) -> None:
        self.batch.remove(request)
