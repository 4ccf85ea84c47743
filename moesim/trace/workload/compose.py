"""Requests of a trace -> batched steps: prefill, decode, chunks, micro-batches.

A token's routing does not depend on its batch. A step has one phase, and a request's rows in it are contiguous, in token order.

* A request qualifies with at least ``decode_tokens`` decode rows and a prompt of at least ``prompt_tokens``.
  Exact prompts come first; of longer ones the *last* tokens are used, with contexts from there: ``prompt-truncated``.
* A prompt whose routing was not recorded has a length but no rows: such a request starts in decode.
* ``reuse: shifted`` fills up with copies: copy c of C reads prompt and decode rows rotated by c/C of their number, and rows
  repeat if no request is long enough. Both are labelled ``reuse-shifted``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np

from moesim.errors import WorkloadError, unknown_name
from moesim.trace.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from moesim.hardware.costs import CostModel
    from moesim.trace import Trace

REUSE_SHIFTED = "reuse-shifted"
PROMPT_TRUNCATED = "prompt-truncated"
MAX_REQUESTS = 100_000
"""Of a workload, copies included."""


class Admitted(NamedTuple):
    """A request as it takes part in a workload."""

    request: int  # its number in the trace
    prompt_rows: NDArray[np.int64]  # rows of the trace, prefill
    decode_rows: NDArray[np.int64]  # rows of the trace, decode
    context: int  # tokens before the first of these rows

    @property
    def final_tokens(self) -> int:
        return self.context + len(self.prompt_rows) + len(self.decode_rows)


class _Recorded(NamedTuple):
    """Recorded parts of each request, (n_requests,) each."""

    first_row: NDArray[np.int64]
    n_prompt: NDArray[np.int64]
    n_decode: NDArray[np.int64]
    prompt_offset: NDArray[np.int64]  # prompt tokens before the first row, whose routing was not recorded
    covered: NDArray[np.bool_]  # by all signals that are needed

    @property
    def prompt(self) -> NDArray[np.int64]:
        return self.prompt_offset + self.n_prompt


def select(trace: Trace, spec: WorkloadSpec, require_signals: Collection[str]) -> tuple[list[Admitted], tuple[str, ...]]:
    """Choose requests and rows."""
    recorded = _read_table(trace, require_signals)
    exact, longer = _qualifying(recorded, spec)
    wrapped = False
    if spec.reuse == "shifted" and spec.requests is None and not (exact | longer).any():
        exact, wrapped = _repeatable(recorded, spec), True
    if spec.requests is None:
        order = _choose(exact, longer, spec)
        want = spec.size.requests
    elif spec.requests == "all":
        order = np.flatnonzero(exact | longer).tolist()
        want = max(1, len(order))
    else:
        assert isinstance(spec.requests, tuple)
        order = list(spec.requests)
        want = len(order)
        qualify = exact | longer | (_repeatable(recorded, spec) if spec.reuse == "shifted" else False)
        _check_named(order, qualify, recorded, spec, require_signals)
    if want > MAX_REQUESTS:
        raise WorkloadError(f"workload: expected at most {MAX_REQUESTS} requests, got {want}; lower batch_size or n_batches")
    if len(order) < want and not (spec.reuse == "shifted" and order):
        raise WorkloadError(_too_few(want, len(order), recorded, spec, require_signals))
    order = [order[i % len(order)] for i in range(want)]
    admitted = _cut(order, recorded, spec)
    long_enough = exact | longer
    shifted = wrapped or len(set(order)) < want or not all(long_enough[r] for r in order)
    truncated = spec.prompt_tokens is not None and bool((recorded.prompt[order] > spec.prompt_tokens).any())
    labels = ((PROMPT_TRUNCATED,) if truncated else ()) + ((REUSE_SHIFTED,) if shifted else ())
    return admitted, labels


def _read_table(trace: Trace, require_signals: Collection[str]) -> _Recorded:
    table = trace.requests
    for name in sorted(require_signals):
        if name not in trace.signals:
            raise WorkloadError(unknown_name("signal", name, trace.signals))
    wanted = frozenset(require_signals)
    covered = np.array([wanted.issubset(names) for names in table.signals], bool)
    return _Recorded(table.first_row, table.n_prompt, table.n_decode, table.prompt_offset, covered)


def _qualifying(r: _Recorded, spec: WorkloadSpec) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    decode = r.n_decode if spec.decode_tokens is None else spec.decode_tokens
    enough = r.covered & (r.n_decode >= decode) & (_used_prompt(r, spec) + decode > 0)
    if spec.prompt_tokens is None:
        return enough, np.zeros_like(enough)
    return enough & (r.prompt == spec.prompt_tokens), enough & (r.prompt > spec.prompt_tokens)


def _repeatable(r: _Recorded, spec: WorkloadSpec) -> NDArray[np.bool_]:
    has_decode = (r.n_decode > 0) | (spec.decode_tokens in (0, None))
    decode = 0 if spec.decode_tokens == 0 else r.n_decode
    result: NDArray[np.bool_] = r.covered & has_decode & (_used_prompt(r, spec) + decode > 0)
    return result


def _used_prompt(r: _Recorded, spec: WorkloadSpec) -> NDArray[np.int64]:
    return r.n_prompt if spec.prompt_tokens is None else np.minimum(r.n_prompt, spec.prompt_tokens)


def _choose(exact: NDArray[np.bool_], longer: NDArray[np.bool_], spec: WorkloadSpec) -> list[int]:
    rng = np.random.default_rng(spec.seed)
    order = [int(r) for tier in (exact, longer) for r in rng.permutation(np.flatnonzero(tier))]
    return order[: spec.size.requests]


def _cut(order: Sequence[int], r: _Recorded, spec: WorkloadSpec) -> list[Admitted]:
    copies, seen = Counter(order), Counter[int]()
    admitted = []
    for request in order:
        copy, n_copies = seen[request], copies[request]
        seen[request] += 1
        n_prompt, n_decode = int(r.n_prompt[request]), int(r.n_decode[request])
        prompt = int(r.prompt[request]) if spec.prompt_tokens is None else spec.prompt_tokens
        decode = n_decode if spec.decode_tokens is None else spec.decode_tokens
        starts = n_decode if decode else n_prompt
        if n_copies > max(1, starts):
            raise WorkloadError(
                f"workload: expected at most {starts} copies of request {request}, which has no more rows "
                f"to start from, got {n_copies}; ask for fewer requests"
            )
        used = min(prompt, n_prompt)
        # Only rows that exist can repeat (prompt > recorded): without any, the prompt has just a length.
        n_prefill = prompt if n_prompt and prompt > int(r.prompt[request]) else used
        first_prompt = int(r.first_row[request]) + n_prompt - used
        admitted.append(
            Admitted(
                request,
                _rotated(first_prompt, used, n_prefill, copy, n_copies),
                _rotated(int(r.first_row[request]) + n_prompt, n_decode, decode, copy, n_copies),
                prompt - n_prefill,
            )
        )
    return admitted


def _rotated(first: int, n_recorded: int, n: int, copy: int, n_copies: int) -> NDArray[Any]:
    if not n:
        return np.zeros(0, np.int64)
    return first + (np.arange(n, dtype=np.int64) + copy * n_recorded // n_copies) % n_recorded


def _check_named(
    named: Sequence[int],
    qualify: NDArray[np.bool_],
    r: _Recorded,
    spec: WorkloadSpec,
    require_signals: Collection[str],
) -> None:
    for request in named:
        if not 0 <= request < len(qualify):
            raise WorkloadError(f"workload.requests: request {request} is not in the trace, which holds 0..{len(qualify) - 1}")
        if not qualify[request]:
            raise WorkloadError(
                f"workload.requests: request {request} has a prompt of {r.prompt[request]} and "
                f"{r.n_decode[request]} decode tokens; expected {_conditions(r, spec, require_signals)}"
            )


def _conditions(r: _Recorded, spec: WorkloadSpec, require_signals: Collection[str]) -> str:
    wanted = ["at least one row"]
    if spec.prompt_tokens is not None:
        wanted.append(f"a prompt of at least {spec.prompt_tokens} tokens")
    if spec.decode_tokens is not None:
        wanted.append(f"at least {spec.decode_tokens} decode tokens")
    if require_signals:
        names = ", ".join(sorted(require_signals))
        wanted.append(f"covered by signal {names}, as {int(r.covered.sum())} are")
    return ", ".join(wanted[1:] or wanted)


def _too_few(want: int, found: int, r: _Recorded, spec: WorkloadSpec, require_signals: Collection[str]) -> str:
    remedy = "ask for fewer or shorter ones" + ("" if spec.reuse else ", or set workload.reuse: shifted")
    return (
        f"workload: expected {want} distinct requests (batch_size {spec.batch_size} x n_batches "
        f"{spec.n_batches}), but {found} of the {len(r.prompt)} recorded qualify "
        f"({_conditions(r, spec, require_signals)}); the trace holds prompts of {_span(r.prompt)} and "
        f"decodes of {_span(r.n_decode)} tokens; {remedy}"
    )


def _span(values: NDArray[np.int64]) -> str:
    if not len(values):
        return "no"
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low}..{high}"


class Stretch(NamedTuple):
    """Steps on end with the same requests: one of prefill, or several of decode."""

    phase: str  # `"prefill"` or `"decode"`
    batch: int
    n_steps: int
    # requests of the stretch as places in Workload.requests, rows of this phase that each has had before, rows in each step
    slots: NDArray[np.int64]
    done: NDArray[np.int64]
    counts: NDArray[np.int64]
    last_chunk: bool
    kv_tokens: int  # in each of its steps
    n_active: int  # requests that hold a cache

    @property
    def n_tokens(self) -> int:
        return int(self.counts.sum())


class Progress(NamedTuple):
    """How far the requests of a stretch are, one entry each."""

    before: NDArray[np.int64]  # rows that it has had before, prompt and decode
    begins: NDArray[np.bool_]  # it is admitted at the first step
    produces: NDArray[np.bool_]  # a token comes of each step: not so for a prompt's earlier chunks
    ends: NDArray[np.bool_]  # it leaves at the end of the last step


class Requests:
    """The admitted requests as columns, one entry each."""

    def __init__(self, admitted: Sequence[Admitted]) -> None:
        self.admitted = admitted
        self.context = np.array([one.context for one in admitted], np.int64)
        self.n_prompt = np.array([len(one.prompt_rows) for one in admitted], np.int64)
        self.n_decode = np.array([len(one.decode_rows) for one in admitted], np.int64)
        self.final_tokens = self.context + self.n_prompt + self.n_decode

    def progress(self, stretch: Stretch) -> Progress:
        n_prompt, n_decode = self.n_prompt[stretch.slots], self.n_decode[stretch.slots]
        done, new = stretch.done, stretch.counts * stretch.n_steps
        if stretch.phase == "decode":
            everywhere = np.ones(len(done), bool)
            return Progress(n_prompt + done, (done == 0) & (n_prompt == 0), everywhere, done + new == n_decode)
        whole = done + new == n_prompt
        return Progress(done, done == 0, whole, whole & (n_decode == 0))


def plan(requests: Requests, spec: WorkloadSpec) -> Iterator[Stretch]:
    """Lay requests out in stretches: in order of admission, each batch prefill first."""
    n, begun = len(requests.admitted), 0
    slots = done = np.empty(0, np.int64)  # those active, in the order of admission, and the decode rows that they have had
    batch = -1
    while begun < n or len(slots):
        if begun < n and (not len(slots) or (spec.refill and len(slots) < spec.batch_size)):
            new = np.arange(begun, min(n, begun + spec.batch_size - len(slots)))
            begun = int(new[-1]) + 1
            batch = 0 if spec.refill else batch + 1
            yield from _prefill(requests, new, slots, batch, spec.prefill_chunk)
            new = new[requests.n_decode[new] > 0]
            slots, done = np.concatenate([slots, new]), np.concatenate([done, np.zeros_like(new)])
        if len(slots):
            n_steps = int((requests.n_decode[slots] - done).min())
            if begun < n and spec.refill and len(slots) < spec.batch_size:
                n_steps = 1
            kv_tokens = int(requests.final_tokens[slots].sum())
            yield Stretch("decode", batch, n_steps, slots, done, np.ones_like(slots), True, kv_tokens, len(slots))
            done = done + n_steps
            going_on = done < requests.n_decode[slots]
            slots, done = slots[going_on], done[going_on]


def _prefill(
    requests: Requests, new: NDArray[np.int64], active: NDArray[np.int64], batch: int, chunk: int | None
) -> Iterator[Stretch]:
    new = new[requests.n_prompt[new] > 0]
    if not len(new):
        return
    ends = np.cumsum(requests.n_prompt[new])  # of each prompt, in rows of all of them
    starts = ends - requests.n_prompt[new]
    total = int(ends[-1])
    held, n_held = int(requests.final_tokens[active].sum()), len(active)
    for first in range(0, total, chunk or total):
        last = min(first + (chunk or total), total)
        here = slice(int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(starts, last)))
        slots, done = new[here], np.maximum(first - starts[here], 0)
        counts = np.minimum(ends[here], last) - starts[here] - done
        held += int(requests.final_tokens[slots[done == 0]].sum())
        n_held += int((done == 0).sum())
        yield Stretch("prefill", batch, 1, slots, done, counts, last == total, held, n_held)
        over = (ends[here] <= last) & (requests.n_decode[slots] == 0)
        held -= int(requests.final_tokens[slots[over]].sum())
        n_held -= int(over.sum())


# Bytes of prepared routing that a workload may keep, so that several runs over it do not prepare it again.
KEEP_BYTES = 256 * 2**20
# Places of rows and experts of layers that are looked up at once: more would leave the processor's caches.
BLOCK = 2**18
_POINTER_BYTES = 8
_VISIT_BYTES = 512  # a `LayerRouting` with its views and tuples, without what they hold
_COUNTED = 2**22  # places that are counted at once


class LayerRouting(NamedTuple):
    """Choices of one router for a micro-batch's rows; read-only tuples, since runs share them."""

    experts: NDArray[Any]  # (n_rows, top_k) ids in rank order
    weights: NDArray[Any] | None  # (n_rows, top_k) as the model uses them; None if not recorded
    scores: NDArray[Any] | None  # (n_rows, n_experts) full softmax; None if not recorded
    rows: tuple[int, ...]  # (n_experts,) rows of each expert
    active: tuple[int, ...]  # experts with rows, ascending


class MicroBatch(NamedTuple):
    """A contiguous run of a step's rows that holds whole requests (or whole chunks of them)."""

    first_row: int  # row of the step at which it begins
    n_rows: int
    work2: int  # attention: sum over its sequences of n * (2 * context + n)
    n_sequences: int  # sequences that produce a token
    layers: Layers
    experts: NDArray[Any]  # (n_rows, n_layers, top_k) the ids of all layers


def may_keep(trace: Trace, n_rows: int, n_visits: int) -> bool:
    """Return whether the routing of so much is small enough to be kept."""
    slot_bytes = trace.experts.itemsize + (0 if trace.weights is None else trace.weights.itemsize)
    row_bytes = trace.top_k * slot_bytes + (0 if trace.scores is None else trace.n_experts * trace.scores.itemsize)
    visit_bytes = trace.n_experts * _POINTER_BYTES + _VISIT_BYTES
    return trace.n_layers * (n_rows * row_bytes + n_visits * visit_bytes) <= KEEP_BYTES


def steps_at_once(trace: Trace, n_rows: int, n_visits: int) -> int:
    """Return how many steps to look up together."""
    return max(1, BLOCK // (trace.n_layers * (n_rows * trace.top_k + n_visits * trace.n_experts)))


def look_up(trace: Trace, rows: NDArray[Any], sizes: Sequence[int]) -> list[tuple[Layers, NDArray[Any]]]:
    """Look up the routing of steps: layers of each micro-batch, and all ids."""
    block = _Block(trace, rows.ravel(), list(sizes) * len(rows))
    ids = block.experts
    return [(Layers(block, i), ids[first:end]) for i, (first, end) in enumerate(pairwise(block.edges))]


class Layers(Sequence[LayerRouting]):
    """The routing of a micro-batch by layer, made when it is asked for."""

    __slots__ = ("_block", "_number")

    def __init__(self, block: _Block, number: int) -> None:
        self._block, self._number = block, number

    def __len__(self) -> int:
        return self._block.trace.n_layers

    @overload
    def __getitem__(self, index: int) -> LayerRouting: ...
    @overload
    def __getitem__(self, index: slice) -> list[LayerRouting]: ...
    def __getitem__(self, index: int | slice) -> LayerRouting | list[LayerRouting]:
        return self._block.routed[self._number][index]

    def __iter__(self) -> Iterator[LayerRouting]:
        return iter(self._block.routed[self._number])

    @property
    def weights(self) -> NDArray[Any] | None:
        return self._mine(self._block.weights)

    @property
    def scores(self) -> NDArray[Any] | None:
        return self._mine(self._block.scores)

    def _mine(self, values: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if values is None else values[self._block.edges[self._number] : self._block.edges[self._number + 1]]


class _Block:
    """Micro-batches of neighbouring steps, whose routing is made together."""

    def __init__(self, trace: Trace, rows: NDArray[Any], sizes: Sequence[int]) -> None:
        self.trace = trace
        self._rows, self._sizes = rows, sizes
        self.edges = list(accumulate(sizes, initial=0))  # rows at which the micro-batches begin, and the end
        self.experts = self._of(trace.experts)

    @cached_property
    def weights(self) -> NDArray[Any] | None:
        return None if self.trace.weights is None else self._of(self.trace.weights)

    @cached_property
    def scores(self) -> NDArray[Any] | None:
        return None if self.trace.scores is None else self._of(self.trace.scores)

    def _of(self, values: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = values[self._rows]
        found.flags.writeable = False
        return found

    @cached_property
    def routed(self) -> list[list[LayerRouting]]:
        trace, n_layers = self.trace, self.trace.n_layers
        visit_of = np.repeat(np.arange(len(self._sizes)), self._sizes)
        counts = _count(self.experts, visit_of, len(self._sizes), trace.n_experts)
        views = [_views(values, self.edges, n_layers) for values in (self.experts, self.weights, self.scores)]
        parts = zip(*views, _tuples(counts), _present(counts), strict=True)
        routed = list(map(partial(tuple.__new__, LayerRouting), parts))
        return [routed[i : i + n_layers] for i in range(0, len(routed), n_layers)]


def _count(experts: NDArray[Any], visit_of: NDArray[np.int64], n_visits: int, n_experts: int) -> NDArray[np.int64]:
    n_rows, n_layers, top_k = experts.shape
    n_places = n_visits * n_layers * n_experts
    offsets = np.arange(n_layers) * n_experts
    at_once = max(1, _COUNTED // (n_layers * top_k))
    counts = np.zeros(n_places, np.int64)
    for first in range(0, n_rows, at_once):
        part = slice(first, first + at_once)
        of_row = visit_of[part, None] * (n_layers * n_experts) + offsets
        counts += np.bincount((experts[part] + of_row[:, :, None]).ravel(), minlength=n_places)
    return counts.reshape(-1, n_experts)


def _views(values: NDArray[Any] | None, edges: Sequence[int], n_layers: int) -> Iterable[NDArray[Any] | None]:
    if values is None:
        return [None] * ((len(edges) - 1) * n_layers)
    found: list[NDArray[Any] | None] = []
    for first, end in pairwise(edges):
        found.extend(values[first:end].swapaxes(0, 1))
    return found


def _tuples(counts: NDArray[np.int64]) -> Iterable[tuple[int, ...]]:
    """Return the rows of a table as tuples, in half the time of lists of integers."""
    largest = int(counts.max(initial=0))
    code = next(code for code in "BHQ" if largest < 256 ** struct.calcsize(code))
    return struct.iter_unpack(f"={counts.shape[1]}{code}", counts.astype(f"u{struct.calcsize(code)}").tobytes())


def _present(counts: NDArray[np.int64]) -> list[tuple[int, ...]]:
    counted = counts > 0
    ids = tuple((np.flatnonzero(counted) % counts.shape[1]).tolist())
    ends = np.cumsum(np.count_nonzero(counted, axis=1)).tolist()
    return [ids[first:end] for first, end in zip([0, *ends], ends, strict=False)]


_T = TypeVar("_T")

_FEW = 2  # stretches, and blocks of steps in each, that are held of a workload whose routing is too large to be kept


class Steps(Sequence["Step"]):
    """Steps in order, each made when it is asked for."""

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

    def begin(self) -> Source:
        """Begin a run over them."""
        return InOrder(iter(self))

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


class Source(Protocol):
    """Where a run takes its steps from."""

    def after(self, now_ns: int) -> Step | int | None:
        """Return the step that begins now, or the time in ns at which to ask again; None: all is done."""
        ...


class InOrder:
    """Steps that are known from the start, one after another."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps

    def after(self, now_ns: int) -> Step | int | None:
        """Return the step that begins now; None: all is done."""
        return next(self._steps, None)


def _recall(held: dict[int, _T], key: int, make: Callable[[int], _T], most: int | None) -> _T:
    if key not in held:
        if most is not None and len(held) >= most:
            del held[next(iter(held))]
        held[key] = make(key)
    return held[key]


class _Shared:
    """Common parts of the steps of a stretch."""

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
        stretch, admitted = self.stretch, self._admitted
        parts = zip(stretch.slots.tolist(), stretch.done.tolist(), self.counts, strict=True)
        if stretch.phase == "decode":
            found = np.stack([admitted[slot].decode_rows[done : done + stretch.n_steps] for slot, done, _ in parts], axis=1)
        else:
            found = np.concatenate([admitted[slot].prompt_rows[done : done + n] for slot, done, n in parts])[None]
        found.flags.writeable = False
        return found

    def work2(self, offset: int) -> list[int]:
        return [work2 + 2 * offset * n for work2, n in zip(self._work2, self.sizes, strict=True)]

    def micro(self, offset: int) -> tuple[MicroBatch, ...]:
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
        "_offset", "_shared", "batch", "index", "kv_tokens", "last_chunk", "n_active", "n_head_rows", "n_sequences", "n_tokens",
        "phase", "requests",
    )  # fmt: skip

    def __init__(self, shared: _Shared, offset: int) -> None:
        stretch = shared.stretch
        self._shared, self._offset = shared, offset
        self.index = shared.start + offset  # number of the step, from 0
        self.phase = stretch.phase  # `"prefill"` or `"decode"`
        self.batch = stretch.batch  # number of the batch; 0 throughout under `refill`
        # final length of all requests active in this step, added up: what was reserved for them
        self.kv_tokens = stretch.kv_tokens
        self.n_active = stretch.n_active  # requests that hold a cache
        self.last_chunk = stretch.last_chunk  # the last prefill chunk of the requests admitted together; True for decode
        self.n_tokens = shared.n_tokens  # rows of the step
        # request of each row, as its place in `Workload.requests` (a request used twice has two places)
        self.requests = shared.requests
        self.n_sequences = self.n_head_rows = shared.n_sequences  # sequences that produce a token: rows of the LM head

    def draft_ns(self, costs: CostModel, device: str) -> int:
        """Return the time of drafts that the step verifies: there are none."""
        return 0

    @property
    def rows(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._shared.rows[self._offset]
        return found

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Rows of each sequence, in the order of the rows, and the tokens before them."""
        shared, offset = self._shared, self._offset
        return tuple([(n, context + offset) for n, context in zip(shared.counts, shared.contexts, strict=True)])

    @property
    def begins(self) -> tuple[int, ...]:
        return () if self._offset else self._shared.begins

    @property
    def ends(self) -> tuple[int, ...]:
        return self._shared.ends if self._offset == self._shared.stretch.n_steps - 1 else ()

    @property
    def work2(self) -> int:
        """Attention: sum over its sequences of n * (2 * context + n)."""
        return sum(self._shared.work2(self._offset))

    @property
    def n_micro(self) -> int:
        return len(self._shared.sizes)

    @property
    def micro(self) -> tuple[MicroBatch, ...]:
        """The micro-batches with their routing, looked up at the first use."""
        return self._shared.micro(self._offset)


@dataclass(frozen=True)
class Workload:
    """The steps of a workload, in order.

    Attributes
    ----------
    spec : WorkloadSpec
        What was asked for.
    steps : sequence of Step
        The steps, each made when it is asked for.
    admitted : tuple of Admitted
        The requests in the order of their admission; `Step.requests` counts in it.
    labels : tuple of str
        ``"prompt-truncated"`` and ``"reuse-shifted"``, as far as they hold.
    digest : str
        sha256 of the specification and the trace.
    """

    spec: WorkloadSpec
    steps: Steps
    admitted: tuple[Admitted, ...]
    labels: tuple[str, ...]
    digest: str

    @property
    def requests(self) -> tuple[int, ...]:
        """Trace request of each admitted one."""
        return tuple(a.request for a in self.admitted)

    @property
    def label(self) -> str:
        """The labels in one string, empty if there are none."""
        return ", ".join(self.labels)

    @property
    def max_tokens(self) -> int:
        """Rows of the largest step."""
        return max(s.n_tokens for s in self.steps.stretches)

    def within(self, prompt_rows: int | None) -> WorkloadSpec:
        """Ask for the same with prefill steps of so many rows at most."""
        if prompt_rows is None or self.spec.prefill_chunk is not None:
            return self.spec
        longer = any(s.n_tokens > prompt_rows for s in self.steps.stretches if s.phase == "prefill")
        return replace(self.spec, prefill_chunk=prompt_rows) if longer else self.spec

    @property
    def draft_head(self) -> bool:
        """Whether one more layer of the model is there, which proposes tokens."""
        return False

    @property
    def peak_requests(self) -> int:
        """Requests that are active together when they are longest."""
        return max(self.steps.stretches, key=lambda s: s.kv_tokens).n_active

    @property
    def takes_memory(self) -> str:
        """Name for messages the settings that take less memory if they are lowered."""
        return "the batch or the context"

    @property
    def peak_kv_tokens(self) -> int:
        """Most tokens of KV cache reserved at once."""
        return max(s.kv_tokens for s in self.steps.stretches)


def compose(trace: Trace, spec: WorkloadSpec, *, require_signals: Collection[str] = frozenset()) -> Workload:
    """Compose requests of a trace into batched steps.

    Parameters
    ----------
    trace : Trace
        What was recorded.
    spec : WorkloadSpec
        What is asked for.
    require_signals : collection of str
        Signals of the trace that must cover every request chosen; of one that covers no prompt at all, the
        decode rows.

    Returns
    -------
    Workload
        The steps, whose routing is looked up when first used.

    Raises
    ------
    WorkloadError
        If too few requests qualify; the message has how many do, and what the trace holds.
    """
    admitted, labels = select(trace, spec, require_signals)
    asked = {**spec.of_batches(), "require_signals": sorted(require_signals), "trace": trace.digest}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return Workload(spec, Steps(admitted, spec, trace), tuple(admitted), labels, digest)


def drawn(trace: Trace, workload: Workload, signals: Collection[str]) -> str:
    """Describe how many requests were drawn, and signals that leave others out."""
    n_drawn, recorded = len(set(workload.requests)), trace.requests.signals
    n_covered = sum(set(signals).issubset(names) for names in recorded)
    text = f"{n_drawn} request{'s' if n_drawn > 1 else ''} of "
    if n_covered == len(recorded):
        return f"{text}{n_covered}"
    which = f"signal {' and '.join(sorted(signals))}" if len(signals) < 3 else f"the {len(signals)} signals needed"
    return f"{text}the {n_covered} with {which}"
