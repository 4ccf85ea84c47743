"""FreeToken: prompts before answers, never mixed; room for the whole answer before a request is admitted.

| step of the server | here |
|---|---|
| a pass has prompts if any can run, else a row of every running request, by number | the same |
| a prompt that was cut continues first, then requests that wait, first come first served, while `max_prefill_length` tokens last | the same |
| a prompt that does not fit is cut | the same |
| admission: pages for what is not cached and the whole answer fit what is free and evictable, less the tokens to come of running requests and, for each, a page less one token; the first that does not fit ends it | the same |
| at most `max_running_requests`, those whose prompt is read on included | the same |
| no preemption | the same |
| KV cache: a pool of pages | `kv_tokens`; by default the longest request, `max_running_requests` times or as often as requests can be there at once |

Read: python/freetoken/scheduler/prefill.py of FlashML-org/FreeToken at 128b4292, decode.py in a version whose commit is not recorded;
the defaults of 8,192 tokens and 4 requests as its manual has them.
Missing: the overlapped loop, state slots of hybrid models (three a request), pools of windows, other sizes of caches when idle. The
length of an answer is known; the server reserves what a client asks for, by default 32,768 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.core.units import ceil_div
from moesim.serving.scheduler import Pooled, Rows, asked, scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.serving.requests import Request


@scheduler
@dataclass
class FreeToken(Pooled):
    """FreeToken: prompts before answers, room for whole answers."""

    name = "freetoken"
    drafts = False
    max_prefill_length: int = asked(8192, "tokens of prompts in a pass")
    max_running_requests: int = asked(4, "requests at once")
    page_size: int = asked(1, "tokens of a page of KV cache")
    running: list[Request] = field(default_factory=list, init=False)
    chunked: Request | None = field(default=None, init=False)  # whose prompt is read on

    @property
    def most_requests(self) -> int:
        return min(self.max_running_requests, self.at_once)

    @property
    def most_rows(self) -> int:
        return max(self.max_prefill_length, self.most_requests * self.window)

    @property
    def block(self) -> int:
        return self.page_size

    @property
    def each(self) -> int:
        return super().each + 1  # admission counts up to a page less one token more for each that runs

    @property
    def n_running(self) -> int:
        return len(self.running) + (self.chunked is not None)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        found = self._prompts()
        if found:
            return found
        self.running.sort(key=lambda request: request.number)
        for request in self.running:
            self.blocks.grow(request, request.known)
        return [Rows(request, request.window) for request in self.running]

    def _prompts(self) -> list[Rows]:
        budget, found = self.max_prefill_length, list[Rows]()
        reserved = sum(one.answer - one.generated + self.page_size - 1 for one in self.running)
        if self.chunked is not None:
            request, self.chunked = self.chunked, None
            n = min(budget, request.prompt - request.computed)
            self.blocks.grow(request, request.computed + n)
            reserved += self._pages(request, request.computed + n)
            found.append(self._read(request, n))
            budget -= n
        while self.waiting and budget > 0 and len(self.running) < self.max_running_requests:
            request = self.waiting[0]
            pages = self.blocks.match(request, request.prompt - 1)
            cached = pages * self.page_size
            n = min(budget, request.prompt - cached)
            room = (self.blocks.available - self.blocks.idle(request, pages)) * self.page_size - reserved
            if self._pages(request, cached) > room or not self.blocks.admit(request, pages, cached + n):
                break
            request.find(cached)
            reserved += self._pages(request, cached + n)
            found.append(self._read(self.waiting.popleft(), n))
            budget -= n
        return found

    def _read(self, request: Request, n: int) -> Rows:
        """Return rows of a prompt, which continues in the next pass, or runs from then on."""
        if request.computed + n < request.prompt:
            self.chunked = request
        else:
            self.running.append(request)
        return Rows(request, n)

    def _pages(self, request: Request, computed: int) -> int:
        """Return the tokens of the pages that it will still take."""
        whole = ceil_div(request.prompt + request.answer, self.page_size)
        return (whole - ceil_div(computed, self.page_size)) * self.page_size

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
