"""SGLang: prompts before answers, in chunks, and memory reserved for a share of the answers to come.

| step of the server | here |
|---|---|
| prompts run whenever some can, alone; running requests wait | the same; `mixed_chunk`: their rows run with the prompts' |
| the prompt that was cut continues first, then requests that wait, first come first served, while `chunked_prefill_size` and `max_prefill_tokens` last; both less the running rows if mixed | the same |
| a prompt that does not fit the chunk is cut, on the page's grid, and ends the pass | the same |
| admission: tokens to compute, the answer to come (4,096 at most) and a page fit what is free and evictable, less the answers to come of running requests times `new_token_ratio` | the same |
| a request that does not fit closes admission until one leaves | the same |
| `new_token_ratio`: 0.7 x conservativeness, down to 0.14 of that in 600 passes of answers; back when idle | the same |
| no page for the next tokens: requests with the fewest tokens, then the longest prompts, return to the end of the queue; the ratio becomes (tokens + 20 each) / (asked for + 1) | the same; also before a mixed pass, where the server has no check |
| radix tree: pages of prompts and answers, least recently used first | blocks of a page, found by the hashes of a request trace, or by a request that was retracted |
| KV cache: what the weights leave of the memory | `kv_tokens`; by default the longest request, `max_running_requests` times or as often as requests can be there at once |

Read: python/sglang/srt/managers/schedule_policy.py at 00550cd1, scheduler.py at 0003215c, of sgl-project/sglang; retraction in
schedule_batch.py at 000eaffa, an older version; the constants of the ratio in srt/environ.py. The server picks
`chunked_prefill_size` by the GPU's memory, and `max_running_requests` by the pool; these defaults were not looked up.
Missing: the overlapped loop (an end by a stop word is seen a pass late), other orders of the queue (`lpm`, `dfs-weight`, ...), priorities,
states of hybrid models, pools of windows, the limits of Paged Experts, which belong to a policy, and no chunks at all. The length of
an answer is known, as if every client asked for exactly what it gets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from moesim.core.units import ceil_div
from moesim.serving.scheduler import Pooled, Rows, asked, scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moesim.serving.requests import Request

CLIP: Final = 4096  # tokens of an answer that are reserved at most
INITIAL, LEAST, DECAY = 0.7, 0.14, 600  # of the ratio: at the start, its least as a share of that, passes in between
RETRACT_STEPS: Final = 20


@scheduler
@dataclass
class Sglang(Pooled):
    """SGLang: prompts before answers, memory for a share of the answers to come."""

    name = "sglang"
    chunked_prefill_size: int = asked(8192, "tokens of prompts in a pass")
    max_prefill_tokens: int = asked(16384, "tokens of prompts after which no other is admitted to a pass")
    max_running_requests: int = asked(2048, "requests at once")
    mixed_chunk: bool = asked(False, "rows of answers run with those of prompts (--enable-mixed-chunk)")
    page_size: int = asked(1, "tokens of a page of KV cache")
    schedule_conservativeness: float = asked(1.0, "factor of the share of answers that is reserved", least=0)
    radix_cache: bool = asked(True, "pages stay cached, and are shared by prompts that begin alike")
    running: list[Request] = field(default_factory=list, init=False)
    chunked: Request | None = field(default=None, init=False)  # whose prompt is read on
    full: bool = field(default=False, init=False)  # nobody is admitted before a request leaves
    ratio: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.ratio = self.first_ratio

    @property
    def first_ratio(self) -> float:
        return min(INITIAL * self.schedule_conservativeness, 1.0)

    @property
    def most_requests(self) -> int:
        return min(self.max_running_requests, self.at_once)

    @property
    def most_rows(self) -> int:
        return max(self.chunked_prefill_size, self.most_requests * self.window)

    @property
    def block(self) -> int:
        return self.page_size

    @property
    def caching(self) -> bool:
        return self.radix_cache

    @property
    def each(self) -> int:
        return super().each + 2  # admission wants a page more for each, and more than it needs

    @property
    def longest_possible(self) -> int:
        return self.capacity - self.page_size - 1

    @property
    def n_running(self) -> int:
        return len(self.running) + (self.chunked is not None)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        found = self._prompts() or self._answers()
        if not found:
            self.ratio = self.first_ratio
        return found

    def _prompts(self) -> list[Rows]:
        if self.chunked is None and (self.full or not self.waiting):
            return []
        mixed = sum(one.window for one in self.running) if self.mixed_chunk else 0
        chunk, inputs = self.chunked_prefill_size - mixed, self.max_prefill_tokens - mixed
        reserved = mixed + sum(min(one.answer - one.generated, CLIP) for one in self.running) * self.ratio
        found: list[Rows] = []
        if self.chunked is not None and chunk > 0:
            request = self.chunked
            n = min(chunk, request.known - request.computed)
            self._retract(lambda: self.blocks.more(request, request.computed + n))
            self.blocks.grow(request, request.computed + n)
            found.append(Rows(request, n))
            whole = request.computed + n == request.known
            self.chunked = None if whole else request
            chunk, inputs = chunk - self._paged(n), inputs - self._paged(n)
            reserved += (min(request.answer, CLIP) if whole else 0) + self.page_size
        while self.waiting and chunk > 0 and inputs > 0 and not self.full and self.chunked is None:
            request = self.waiting[0]
            pages = self.blocks.match(request, request.known - 1)
            cached = pages * self.page_size
            n = request.known - cached
            room = (self.blocks.available - self.blocks.idle(request, pages)) * self.page_size - reserved
            most = len(self.running) + len(found) >= self.max_running_requests
            if most or n + min(request.answer - request.generated, CLIP) + self.page_size >= room:
                self.full = True
                break
            whole = self._paged(n) <= chunk
            if not whole:
                n = (cached + chunk) // self.page_size * self.page_size - cached
            if n <= 0 or not self.blocks.admit(request, pages, cached + n):
                break
            request.find(cached)
            found.append(Rows(self.waiting.popleft(), n))
            self.chunked = None if whole else request
            chunk, inputs = chunk - self._paged(n), inputs - self._paged(n)
            reserved += (min(request.answer, CLIP) if whole else 0) + self.page_size
        if not found:
            return []
        answers: list[Rows] = []
        if self.mixed_chunk and self.running:
            self._retract(self._next_pages)
            answers = self._step()
        self.running += [one.request for one in found if one.request is not self.chunked]
        return found + answers

    def _paged(self, n: int) -> int:
        return ceil_div(n, self.page_size) * self.page_size

    def _answers(self) -> list[Rows]:
        if not self.running:
            return []
        if not self._retract(self._next_pages):
            least = self.first_ratio * LEAST
            self.ratio = max(self.ratio - (self.first_ratio - least) / DECAY, least)
        return self._step()

    def _step(self) -> list[Rows]:
        """Return the rows of each running request, in pages of their own."""
        for request in self.running:
            self.blocks.grow(request, request.known)
        return [Rows(request, request.window) for request in self.running]

    def _next_pages(self) -> int:
        return sum(self.blocks.more(request, request.known) for request in self.running)

    def _retract(self, need: Callable[[], int]) -> bool:
        """Let running requests give up their cache until what is needed is there; False if it was."""
        if need() <= self.blocks.available:
            return False
        order = sorted(self.running, key=lambda one: (one.generated, -one.prompt), reverse=True)
        while order and need() > self.blocks.available:
            request = order.pop()
            self.running.remove(request)
            self.blocks.release(request)
            request.give_up()
            self.waiting.append(request)
            self.full = False
        done = sum(one.generated for one in order) + RETRACT_STEPS * len(order)
        self.ratio = min(1.0, done / (sum(one.answer for one in order) + 1))
        return True

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
        self.full = False
