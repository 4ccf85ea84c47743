"""The steps of a workload: made when they are asked for, from what the steps of a stretch have in common."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np

from moesim.trace.workload.plan import Requests, Stretch, plan
from moesim.trace.workload.routing import MicroBatch, look_up, may_keep, steps_at_once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace
    from moesim.trace.workload.selection import Admitted
    from moesim.trace.workload.spec import WorkloadSpec

_T = TypeVar("_T")

_FEW = 2  # stretches, and blocks of steps in each, that are held of a workload whose routing is too large to be kept


class Steps(Sequence["Step"]):
    """Steps in order, each made anew when it is asked for; their routing is kept while it is small enough."""

    def __init__(self, admitted: Sequence[Admitted], spec: WorkloadSpec, trace: Trace) -> None:
        self._requests = Requests(admitted)
        self._trace = trace
        self.shape = trace.n_layers, trace.n_experts, trace.top_k
        self._micro_batches = spec.micro_batches
        self.stretches = list(plan(self._requests, spec))
        self._starts = list(accumulate((s.n_steps for s in self.stretches), initial=0))
        n_rows = sum(s.n_steps * s.n_tokens for s in self.stretches)
        n_visits = sum(s.n_steps * min(spec.micro_batches, len(s.slots)) for s in self.stretches)
        self._most = None if may_keep(trace, n_rows, n_visits) else _FEW
        self._held: dict[int, _Shared] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        number = bisect_right(self._starts, place) - 1
        return Step(self._shared(number), place - self._starts[number])

    def __iter__(self) -> Iterator[Step]:
        for number, stretch in enumerate(self.stretches):
            shared = self._shared(number)
            for offset in range(stretch.n_steps):
                yield Step(shared, offset)

    def of_prefill(self) -> Iterator[Step]:
        """Go through the steps of prefill alone."""
        for start, stretch in zip(self._starts, self.stretches, strict=False):
            if stretch.phase == "prefill":
                yield self[start]

    @property
    def n_tokens(self) -> NDArray[np.int64]:
        """Rows of each step, (n_steps,)."""
        return np.repeat([s.n_tokens for s in self.stretches], [s.n_steps for s in self.stretches])

    def _shared(self, number: int) -> _Shared:
        return _recall(self._held, number, self._share, self._most)

    def _share(self, number: int) -> _Shared:
        return _Shared(
            self._starts[number], self.stretches[number], self._requests, self._micro_batches, self._trace, self._most
        )  # fmt: skip


def _recall(held: dict[int, _T], key: int, make: Callable[[int], _T], most: int | None) -> _T:
    """Give what is held under a key, or make it; of what is held the oldest makes room."""
    if key not in held:
        if most is not None and len(held) >= most:
            del held[next(iter(held))]
        held[key] = make(key)
    return held[key]


class _Shared:
    """What the steps of a stretch have in common, and the rows of all of them in one array."""

    def __init__(
        self, start: int, stretch: Stretch, requests: Requests, micro_batches: int, trace: Trace, most: int | None
    ) -> None:  # fmt: skip
        self.start = start  # number of the first step
        self.stretch = stretch
        self._admitted = requests.admitted
        self._trace = trace
        self._most = most
        self._blocks: dict[int, list[tuple[MicroBatch, ...]]] = {}
        slots, counts = stretch.slots, stretch.counts
        self.n_tokens = stretch.n_tokens
        self.requests = np.repeat(slots.astype(np.int32), counts)
        self.requests.flags.writeable = False
        self.counts: list[int] = counts.tolist()
        before, begins, produces, ends = requests.progress(stretch)
        contexts = requests.context[slots] + before
        self.contexts: list[int] = contexts.tolist()  # at the first step
        self.begins, self.ends = tuple(slots[begins].tolist()), tuple(slots[ends].tolist())
        # Micro-batches of whole requests, as even in requests as can be; work2 at the first step.
        n_groups = min(micro_batches, len(slots))
        firsts = np.arange(n_groups) * len(slots) // n_groups
        self.sizes: list[int] = np.add.reduceat(counts, firsts).tolist()
        self._work2: list[int] = np.add.reduceat(counts * (2 * contexts + counts), firsts).tolist()
        self._sequences: list[int] = np.add.reduceat(produces.astype(np.int64), firsts).tolist()
        self._first_rows = list(accumulate(self.sizes[:-1], initial=0))
        self.n_sequences = sum(self._sequences)
        self._at_once = steps_at_once(trace, self.n_tokens, n_groups)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Rows of the trace, (n_steps, n_tokens)."""
        stretch, admitted = self.stretch, self._admitted
        parts = zip(stretch.slots.tolist(), stretch.done.tolist(), self.counts, strict=True)
        if stretch.phase == "decode":
            found = np.stack([admitted[slot].decode_rows[done : done + stretch.n_steps] for slot, done, _ in parts], axis=1)
        else:
            found = np.concatenate([admitted[slot].prompt_rows[done : done + n] for slot, done, n in parts])[None]
        found.flags.writeable = False
        return found

    def work2(self, offset: int) -> list[int]:
        """Give the attention work of each micro-batch: each step of decode has one token more before each of its rows."""
        return [work2 + 2 * offset * n for work2, n in zip(self._work2, self.sizes, strict=True)]

    def micro(self, offset: int) -> tuple[MicroBatch, ...]:
        """Give the micro-batches of a step; the routing of its neighbours is looked up with its own."""
        begin = offset - offset % self._at_once
        return _recall(self._blocks, begin, self._look_up, self._most)[offset - begin]

    def _look_up(self, begin: int) -> list[tuple[MicroBatch, ...]]:
        found, n = look_up(self._trace, self.rows[begin : begin + self._at_once], self.sizes), len(self.sizes)
        parts = (zip(*found[i : i + n], strict=True) for i in range(0, len(found), n))
        return [
            tuple(map(MicroBatch, self._first_rows, self.sizes, self.work2(offset), self._sequences, *part))
            for offset, part in enumerate(parts, begin)
        ]


class Step:
    """One prefill chunk or one decode step of the whole batch."""

    __slots__ = (
        "_offset", "_shared", "batch", "index", "kv_tokens", "last_chunk", "n_sequences", "n_tokens", "phase", "requests",
    )  # fmt: skip

    def __init__(self, shared: _Shared, offset: int) -> None:
        stretch = shared.stretch
        self._shared, self._offset = shared, offset
        self.index = shared.start + offset  # number of the step, from 0
        self.phase = stretch.phase  # `"prefill"` or `"decode"`
        self.batch = stretch.batch  # number of the batch; 0 throughout under `refill`
        # final length of all requests active in this step, added up: what was reserved for them
        self.kv_tokens = stretch.kv_tokens
        self.last_chunk = stretch.last_chunk  # the last prefill chunk of the requests admitted together; True for decode
        self.n_tokens = shared.n_tokens  # rows of the step
        # request of each row, as its place in `Workload.requests` (a request used twice has two places)
        self.requests = shared.requests
        self.n_sequences = shared.n_sequences  # sequences that produce a token: rows of the LM head

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row of the trace of each row."""
        found: NDArray[np.int64] = self._shared.rows[self._offset]
        return found

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Rows of each sequence, in the order of the rows, and the tokens before them."""
        shared, offset = self._shared, self._offset
        return tuple([(n, context + offset) for n, context in zip(shared.counts, shared.contexts, strict=True)])

    @property
    def begins(self) -> tuple[int, ...]:
        """Requests admitted at this step."""
        return () if self._offset else self._shared.begins

    @property
    def ends(self) -> tuple[int, ...]:
        """Requests that leave at its end."""
        return self._shared.ends if self._offset == self._shared.stretch.n_steps - 1 else ()

    @property
    def work2(self) -> int:
        """Attention: sum over its sequences of n * (2 * context + n)."""
        return sum(self._shared.work2(self._offset))

    @property
    def n_micro(self) -> int:
        """Micro-batches of the step."""
        return len(self._shared.sizes)

    @property
    def micro(self) -> tuple[MicroBatch, ...]:
        """The micro-batches with their routing, looked up at the first use."""
        return self._shared.micro(self._offset)
