"""llama.cpp's llama-server: slots, continuous batching, prompts and answers in one batch.

| step of the server | here |
|---|---|
| a task takes an idle slot: the one with the longest common prefix, else the one used least recently | the lowest idle slot |
| without an idle slot it waits, first come first served | the same |
| every slot that generates adds a row, in slot order, whatever `n_batch` is | the same |
| then slots with prompt left add tokens in slot order until the batch has `n_batch` | the same |
| the batch runs in pieces of `n_ubatch` rows; tokens come once all of it is done | passes of `n_ubatch` rows, as a step each |
| KV cache: `-c` tokens, a share for each slot | `kv_tokens`, a share for each slot |

Read: tools/server/server-context.cpp of ggml-org/llama.cpp at 001d906a.
Missing: the prompt cache in host memory (`-cram`), shifts of cached chunks (`--cache-reuse`), context checkpoints, which cut
prompts of hybrid models before their end, and a retry with half a batch when the cache is full.
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
class LlamaServer(Scheduler):
    """Slots with continuous batching."""

    name = "llama-server"
    parallel: int = asked(4, "slots (-np)")
    batch: int = asked(2048, "tokens of a batch (-b)")
    ubatch: int = asked(512, "rows of a pass (-ub)")
    slots: list[Request | None] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.slots = [None] * self.parallel

    @property
    def most_requests(self) -> int:
        return self.parallel

    @property
    def most_rows(self) -> int:
        return self.ubatch

    @property
    def pass_rows(self) -> int:
        return self.ubatch

    @property
    def longest_possible(self) -> int:
        return self.capacity // self.parallel

    @property
    def n_running(self) -> int:
        return sum(request is not None for request in self.slots)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        for i, there in enumerate(self.slots):
            if there is None and self.waiting:
                self.slots[i] = self.waiting.popleft()
        active = [request for request in self.slots if request is not None]
        found = [Rows(request, request.known - request.computed) for request in active if request.decodes]
        room = self.batch - sum(one.n for one in found)
        for request in active:
            if not request.decodes and room > 0:
                n = min(room, request.known - request.computed)
                found.append(Rows(request, n))
                room -= n
        return found

    def leave(self, request: Request) -> None:
        self.slots[self.slots.index(request)] = None
