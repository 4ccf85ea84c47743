"""KTransformers' balance_serve: chunks of prompts and rows of answers in one run.

| step of the server | here |
|---|---|
| a request takes pages for its prompt and its whole answer, first come first served; without room it waits for one to end | the same |
| at most `max_batch_size` requests, of which two are in their prompts, or one (`FCFS-single-prefill`) | the same; `single_prefill` |
| a run has a row of each request that answers, and prompts: c = (`chunk_size` - `max_batch_size` + 2) / 2 tokens of each of two, or of one next to more than `max_batch_size` - 2 that answer; 2 c tokens of one alone | the same |
| pages with the same prefix are not computed again, but for a prompt's last token | the same, by the hashes of a request trace |
| KV cache: `cache_lens` tokens in pages of 256 | `kv_tokens`; by default the longest request, `max_batch_size` times or as often as requests can be there at once |

Read: csrc/balance_serve/sched/scheduler.cpp of kvcache-ai/ktransformers at 0599a642, where the chunk's size comes from
(balance_serve/settings.py, in a version whose commit is not recorded), doc/en/balance-serve.md at 17922683.
Missing: the plan of the next run is made while one runs, so that a request joins one run later; pages on disk and in host memory. The
order of rows in a run is that of addresses there, of admission here: prompts, then answers. The length of an answer is known; the
server reserves `max_new_tokens`. It has no drafts; those of a workload come on top of a run's rows. SGLang with kt-kernel is the scheduler `sglang`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.errors import ConfigError
from moesim.serving.scheduler import Pooled, Rows, asked, scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.serving.requests import Request


@scheduler
@dataclass
class KTransformers(Pooled):
    """KTransformers' balance_serve: chunks and answers in one run."""

    name = "ktransformers"
    drafts = False
    chunk_size: int = asked(256, "rows of a run")
    max_batch_size: int = asked(4, "requests at once")
    page_size: int = asked(256, "tokens of a page of KV cache")
    single_prefill: bool = asked(False, "one request at a time is in its prompt (FCFS-single-prefill)")
    active: list[Request] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.chunk_size < self.max_batch_size:
            raise ConfigError(
                f"chunk_size: expected at least max_batch_size = {self.max_batch_size}, got {self.chunk_size}; raise it"
            )

    @property
    def most_requests(self) -> int:
        return min(self.max_batch_size, self.at_once)

    @property
    def most_rows(self) -> int:
        return self.chunk_size + self.most_requests * (self.window - 1)

    @property
    def block(self) -> int:
        return self.page_size

    @property
    def n_running(self) -> int:
        return len(self.active)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        reading = [request for request in self.active if not request.decodes]
        while self.waiting and len(reading) < 2 - self.single_prefill and len(self.active) < self.max_batch_size:
            request = self.waiting[0]
            pages = self.blocks.match(request, request.prompt)
            cached = min(pages * self.page_size, request.prompt - 1)
            if not self.blocks.admit(request, pages, request.prompt + request.answer, written=cached):
                break
            request.find(cached)
            reading.append(self.waiting.popleft())
            self.active.append(request)
        answers = [Rows(request, request.window) for request in self.active if request.decodes]
        chunk = (self.chunk_size - self.max_batch_size + 2) // 2
        if len(reading) == 1 and len(answers) <= self.max_batch_size - 2:
            chunk *= 2
        prompts = [Rows(request, min(chunk, request.prompt - request.computed)) for request in reading]
        for request, n in prompts:
            self.blocks.grow(request, request.computed + n, written=request.computed + n)
        return prompts + answers

    def leave(self, request: Request) -> None:
        self.active.remove(request)
        self.blocks.release(request)
