"""Strata: one request alone, or slots that decode together between the chunks of the next prompt.

| step of the server | here |
|---|---|
| one request at a time by default; `"parallel": N` keeps up to N | `parallel` |
| a request alone decodes in windows of a token and its drafts, while their probability is at least `--spec-min-p` | the same, with the drafts of the workload and their `proposed` |
| in a slot it has no drafts, or one (`--batch-mtp`) | the same; `batch_mtp` |
| a second request stops the first, which continues in a slot; nothing is read again | the same: it costs nothing |
| admissions one at a time, by chunks of `--prefill` tokens; between two that took t each, the slots decode for `decode_share` x t | the same; whether they also decode after the last chunk, with others waiting, is not said: not here |
| a prompt shorter than a chunk is not interrupted | the same |
| a prompt more than twice as long as one that waits gives way to it at a chunk's end, at most twice, if a slot is free | the same; to the first such one |
| a window has the rows of every slot, at most 8; further slots rotate | the same |
| a request left alone in a slot, with none waiting, returns to the path alone, at most twice | the same |
| a conversation's next turn takes its slot, a new one the slot used longest ago | by common prefix, as the hashes of a request trace say |
| KV cache: each slot has room for the whole context | `kv_tokens`; by default the longest request in every slot |

Read: docs/BATCHING.md of Niko1221/Strata at 045219a1.
Missing: groups of slots that flow through several GPUs as a pipeline, conversations parked in host memory, the copies of a state to and from a slot (50 to 60 ms for a short one).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from moesim.serving.scheduler import Rows, Scheduler, asked, scheduler
from moesim.serving.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.serving.requests import Request

WINDOW: Final = 8  # rows
YIELDS: Final = 2  # times that a long prompt gives way
RETURNS: Final = 2  # times that a request leaves its slot for the path alone


@scheduler
@dataclass
class Strata(Scheduler):
    """Strata: alone, or slots that decode between chunks of prompts."""

    name = "strata"
    parallel: int = asked(1, 'conversations at once ("parallel", --batch)')
    prefill: int = asked(2048, "tokens of a prompt's chunk (--prefill)")
    decode_share: float = asked(0.5, "time to decode after a chunk, as a share of its time (STRATA_BATCH_DECODE_SHARE)", least=0)
    batch_mtp: bool = asked(False, "one draft for each slot (--batch-mtp)")
    slots: Slots = field(init=False)
    reading: list[Request] = field(default_factory=list, init=False)  # prompts; the last is read, the others gave way
    gave_way: Counter[int] = field(default_factory=Counter, init=False)  # times, by request
    returned: dict[int, int] = field(default_factory=dict, init=False)  # times, of requests that were in slots
    alone: Request | None = field(default=None, init=False)
    began_ns: int | None = field(default=None, init=False)  # of the chunk that is read
    decode_until_ns: int = field(default=0, init=False)
    first: int = field(default=0, init=False)  # of the next window, among more slots than it has rows

    def __post_init__(self) -> None:
        self.slots = Slots(self.parallel)

    @property
    def most_requests(self) -> int:
        return self.parallel

    @property
    def most_rows(self) -> int:
        return max(self.prefill, WINDOW, self.window)

    @property
    def n_running(self) -> int:
        return len(self.slots.requests)

    def plan(self, now_ns: int) -> Sequence[Rows]:
        if self.began_ns is not None:
            if not self.reading[-1].decodes:
                self.decode_until_ns = now_ns + round((now_ns - self.began_ns) * self.decode_share)
            self.began_ns = None
        decoding = [request for request in self.slots.requests if request.decodes]
        if not (decoding and now_ns < self.decode_until_ns):
            self._admit()
            if self.reading:
                self.began_ns = now_ns
                request = self.reading[-1]
                return [Rows(request, min(self.prefill, request.known - request.computed))]
        self._choose_path()
        most = WINDOW // (1 + self.batch_mtp)
        if len(decoding) > most:
            self.first %= len(decoding)
            decoding = (decoding + decoding)[self.first : self.first + most]
            self.first += most
        for one in decoding:
            if one is not self.alone:
                one.limit_drafts(int(self.batch_mtp))
        return [Rows(one, one.window) for one in decoding]

    def _choose_path(self) -> None:
        """Let a request decode alone, or all in slots."""
        present = self.slots.requests
        if len(present) > 1 or (self.waiting and self.parallel > 1):
            self.alone = None
            for request in present:
                self.returned.setdefault(request.number, 0)
        elif present and self.alone is not present[0]:
            number = present[0].number
            if self.returned.get(number, 0) < RETURNS:
                self.alone = present[0]
                if number in self.returned:
                    self.returned[number] += 1

    def _admit(self) -> None:
        while self.reading and self.reading[-1].decodes:
            self.reading.pop()
        if not self.waiting or not self.slots.idle:
            return
        if not self.reading:
            self._read(self.waiting.popleft())
            return
        long = self.reading[-1]
        short = next((one for one in self.waiting if 2 * one.prompt < long.prompt), None)
        if short is not None and self.gave_way[long.number] < YIELDS:
            self.gave_way[long.number] += 1
            self.waiting.remove(short)
            self._read(short)

    def _read(self, request: Request) -> None:
        self.slots.take(request, similarity=0)
        self.reading.append(request)

    def leave(self, request: Request) -> None:
        self.slots.leave(request)
        del self.gave_way[request.number]
        self.returned.pop(request.number, None)
        if self.alone is request:
            self.alone = None
