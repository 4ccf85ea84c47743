"""The steps of a workload: which rows of which requests run together, when each request comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesim.trace.workload.routing import MicroBatch, RoutingSource, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from moesim.trace.workload.selection import Admitted
    from moesim.trace.workload.spec import WorkloadSpec


class _Part(NamedTuple):
    """The rows of one request in one step."""

    slot: int  # place in Workload.requests
    rows: NDArray[np.int64]
    context: int  # tokens before them
    begins: bool
    produces: bool  # a token comes of it: not so for a prompt's earlier chunks
    ends: bool


class _Planned(NamedTuple):
    phase: str
    batch: int
    parts: list[_Part]
    last_chunk: bool
    kv_tokens: int


class Step:
    """One prefill chunk or one decode step of the whole batch."""

    __slots__ = (
        "_spans", "batch", "begins", "ends", "index", "kv_tokens", "last_chunk", "n_sequences", "phase",
        "requests", "rows", "sequences", "source", "work2",
    )  # fmt: skip

    def __init__(self, index: int, planned: _Planned, micro_batches: int) -> None:
        parts = planned.parts
        self.index = index  # number of the step, from 0
        self.phase = planned.phase  # `"prefill"` or `"decode"`
        self.batch = planned.batch  # number of the batch; 0 throughout under `refill`
        # final length of all requests active in this step, added up: what was reserved for them
        self.kv_tokens = planned.kv_tokens
        self.last_chunk = planned.last_chunk  # the last prefill chunk of the requests admitted together; True for decode
        # request of each row, as its place in `Workload.requests` (a request used twice has two places)
        self.requests = np.repeat(np.array([p.slot for p in parts], np.int32), [len(p.rows) for p in parts])
        self.rows = np.concatenate([p.rows for p in parts])  # row of the trace of each row
        # rows of each sequence, in the order of the rows, and the tokens before them
        self.sequences = tuple((len(p.rows), p.context) for p in parts)
        # begins, ends: requests admitted at this step, and those that leave at its end
        self.begins = tuple(p.slot for p in parts if p.begins)
        self.ends = tuple(p.slot for p in parts if p.ends)
        self._spans = _spans(parts, micro_batches)
        self.n_sequences = sum(s.n_sequences for s in self._spans)  # sequences that produce a token: rows of the LM head
        self.work2 = sum(s.work2 for s in self._spans)  # attention: sum over its sequences of n * (2 * context + n)
        # where the routing comes from, shared by all steps
        self.source: RoutingSource | None = None  # set once the size of the whole workload is known

    @property
    def n_tokens(self) -> int:
        """Rows of the step."""
        return len(self.rows)

    @property
    def n_micro(self) -> int:
        """Micro-batches of the step."""
        return len(self._spans)

    @property
    def micro(self) -> tuple[MicroBatch, ...]:
        """The micro-batches with their routing, looked up at the first use."""
        assert self.source is not None
        return self.source.micro_batches(self.index, self.rows, self._spans)


def schedule(admitted: Sequence[Admitted], spec: WorkloadSpec) -> Iterator[Step]:
    """Lay the requests out in steps."""
    for index, planned in enumerate(_plan(admitted, spec)):
        yield Step(index, planned, spec.micro_batches)


def _plan(admitted: Sequence[Admitted], spec: WorkloadSpec) -> Iterator[_Planned]:
    waiting = list(range(len(admitted)))
    active: dict[int, int] = {}  # place -> decode rows done, in the order of admission
    batch = -1
    while waiting or active:
        if waiting and (not active or (spec.refill and len(active) < spec.batch_size)):
            n_new = spec.batch_size - len(active)
            new, waiting = waiting[:n_new], waiting[n_new:]
            batch = 0 if spec.refill else batch + 1
            yield from _prefill(admitted, new, list(active), batch, spec.prefill_chunk)
            active |= {slot: 0 for slot in new if len(admitted[slot].decode_rows)}
        if active:
            kv_tokens = sum(admitted[slot].final_tokens for slot in active)
            parts = [_decode_part(admitted[slot], slot, done) for slot, done in active.items()]
            yield _Planned("decode", batch, parts, True, kv_tokens)
            active = {s: n + 1 for s, n in active.items() if n + 1 < len(admitted[s].decode_rows)}


def _decode_part(request: Admitted, slot: int, done: int) -> _Part:
    n_prompt, n_decode = len(request.prompt_rows), len(request.decode_rows)
    begins = done == 0 and n_prompt == 0
    rows = request.decode_rows[done : done + 1]
    return _Part(slot, rows, request.context + n_prompt + done, begins, True, done + 1 == n_decode)


def _prefill(
    admitted: Sequence[Admitted], new: Sequence[int], active: Sequence[int], batch: int, chunk: int | None
) -> Iterator[_Planned]:
    """Plan the prefill steps of requests admitted together; those without prompt rows have none."""
    left = sum(len(admitted[slot].prompt_rows) for slot in new)
    started = list(active)
    parts: list[_Part] = []
    room = chunk or left
    for slot in new:
        request, done = admitted[slot], 0
        n_prompt = len(request.prompt_rows)
        while done < n_prompt:
            n = min(room, n_prompt - done)
            last = done + n == n_prompt
            rows = request.prompt_rows[done : done + n]
            ends = last and not len(request.decode_rows)
            parts.append(_Part(slot, rows, request.context + done, done == 0, last, ends))
            started += [slot] if done == 0 else []
            done, room, left = done + n, room - n, left - n
            if room == 0 or left == 0:
                kv_tokens = sum(admitted[s].final_tokens for s in started)
                yield _Planned("prefill", batch, parts, left == 0, kv_tokens)
                ended = {p.slot for p in parts if p.ends}
                started = [s for s in started if s not in ended]
                parts, room = [], chunk or left


def _spans(parts: Sequence[_Part], micro_batches: int) -> tuple[Span, ...]:
    """Split a step into micro-batches of whole requests, as even in requests as can be."""
    groups = min(micro_batches, len(parts))
    spans, first_row = [], 0
    for g in range(groups):
        group = parts[g * len(parts) // groups : (g + 1) * len(parts) // groups]
        n_rows = sum(len(p.rows) for p in group)
        work2 = sum(len(p.rows) * (2 * p.context + len(p.rows)) for p in group)
        spans.append(Span(first_row, n_rows, work2, sum(p.produces for p in group)))
        first_row += n_rows
    return tuple(spans)
