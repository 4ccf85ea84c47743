"""llama.cpp's llama-server: slots, continuous batching, prompts and answers in one batch.

| step of the server | here |
|---|---|
| a task takes the idle slot with the longest common prefix, if that is more than `slot_prompt_similarity` of its prompt | the same; the prefix by the hashes of a request trace, so down to its blocks |
| else the slot used least recently, of several never used the last | the same |
| the slot keeps what is common; at least one token is computed again | the same |
| without an idle slot it waits, first come first served | the same |
| every slot that generates adds a row, in slot order, whatever `n_batch` is | the same |
| then slots with prompt left add tokens in slot order until the batch has `n_batch` | the same |
| the batch runs in pieces of `n_ubatch` rows; tokens come once all of it is done | passes of `n_ubatch` rows, as a step each |
| KV cache: `-c` tokens, a share for each slot, reserved at the start | `kv_tokens`; by default the longest request in every slot |

Read: tools/server/server-context.cpp of ggml-org/llama.cpp at 001d906a. The defaults of `-b`, `-ub` and the similarity were not
looked up there.
Missing: the prompt cache in host memory (`-cram`), shifts of cached chunks (`--cache-reuse`), one cache for all slots
(`--kv-unified`), which is the default with an automatic `-np`, context checkpoints, which cut prompts of hybrid models before their
end, a retry with half a batch when the cache is full, and the common prefix with the answer of an earlier request, which no traces but
sessions say. The version read also holds up answers while a slot restores a checkpoint; that is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.serving.scheduler import Rows, Scheduler, asked, scheduler
from moesim.serving.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.serving.requests import Request


@scheduler
@dataclass
class LlamaServer(Scheduler):
    """llama.cpp: slots, prompts and answers in one batch."""

    name = "llama-server"
    parallel: int = asked(4, "slots (-np)")
    batch: int = asked(2048, "tokens of a batch (-b)")
    ubatch: int = asked(512, "rows of a pass (-ub)")
    slot_prompt_similarity: float = asked(
        0.1, "share of a prompt that a slot must have more of, to be chosen for it; 0: none is", least=0
    )
    slots: Slots = field(init=False)

    def __post_init__(self) -> None:
        self.slots = Slots(self.parallel)

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
    def n_running(self) -> int:
        return len(self.slots.requests)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        while self.waiting and self.slots.idle:
            self.slots.take(self.waiting.popleft(), self.slot_prompt_similarity or 1)  # 0 turns the search off
        active = self.slots.requests
        found = [Rows(request, request.window) for request in active if request.decodes]
        room = self.batch - sum(one.n for one in found)
        for request in active:
            if not request.decodes and room > 0:
                n = min(room, request.known - request.computed)
                found.append(Rows(request, n))
                room -= n
        return found

    def leave(self, request: Request) -> None:
        self.slots.leave(request)
