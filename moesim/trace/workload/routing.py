"""The routing of steps as the engine and the policies read it: NumPy over many steps at once, then plain integers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace import Trace

# Bytes of prepared routing that a workload may keep, so that several runs over it do not prepare it again.
KEEP_BYTES = 256 * 2**20
# Places of rows and experts of layers that are looked up at once: more would leave the processor's caches.
BLOCK = 2**18
_POINTER_BYTES = 8
_VISIT_BYTES = 512  # a `LayerRouting` with its views and tuples, beside what they hold
_COUNTED = 2**22  # places that are counted at once


class LayerRouting(NamedTuple):
    """What the router of one layer chose for the rows of one micro-batch.

    All of it is read-only, since it is kept and shared between runs. Tuples of integers also cost the garbage
    collector nothing, which with lists took as long as all the rest here.
    """

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
    """Tell whether the routing of so many rows, in so many micro-batches, is small enough to be kept."""
    slot_bytes = trace.experts.itemsize + (0 if trace.weights is None else trace.weights.itemsize)
    row_bytes = trace.top_k * slot_bytes + (0 if trace.scores is None else trace.n_experts * trace.scores.itemsize)
    visit_bytes = trace.n_experts * _POINTER_BYTES + _VISIT_BYTES
    return trace.n_layers * (n_rows * row_bytes + n_visits * visit_bytes) <= KEEP_BYTES


def steps_at_once(trace: Trace, n_rows: int, n_visits: int) -> int:
    """Tell how many steps of so many rows and micro-batches to look up together."""
    return max(1, BLOCK // (trace.n_layers * (n_rows * trace.top_k + n_visits * trace.n_experts)))


def look_up(trace: Trace, rows: NDArray[Any], sizes: Sequence[int]) -> list[tuple[Layers, NDArray[Any]]]:
    """Look up the routing of steps: for each micro-batch of each its layers, and the ids of all layers in one array.

    The rows of the trace are (n_steps, n_rows), of which the micro-batches of a step have so many each.

    >>> from moesim.trace import Trace
    >>> trace = Trace.build(
    ...     experts=np.array([[[2, 0]], [[2, 1]]]), n_prompt=[1], n_decode=[1], n_experts=4, model="tiny", label="synthetic"
    ... )
    >>> [([layer], experts)] = look_up(trace, np.array([[0, 1]]), [2])
    >>> layer.rows, layer.active
    ((1, 1, 2, 0), (0, 1, 2))
    """
    block = _Block(trace, rows.ravel(), list(sizes) * len(rows))
    ids = block.experts
    return [(Layers(block, i), ids[first:end]) for i, (first, end) in enumerate(pairwise(block.edges))]


class Layers(Sequence[LayerRouting]):
    """The routing of a micro-batch by layer: an engine that reads the ids alone never has it made."""

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
        """Gate weights of all layers, (n_rows, n_layers, top_k), if they are recorded."""
        return self._mine(self._block.weights)

    @property
    def scores(self) -> NDArray[Any] | None:
        """Softmax of all layers, (n_rows, n_layers, n_experts), if it is recorded."""
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
        """Gate weights of all rows."""
        return None if self.trace.weights is None else self._of(self.trace.weights)

    @cached_property
    def scores(self) -> NDArray[Any] | None:
        """Softmax of all rows."""
        return None if self.trace.scores is None else self._of(self.trace.scores)

    def _of(self, values: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = values[self._rows]
        found.flags.writeable = False
        return found

    @cached_property
    def routed(self) -> list[list[LayerRouting]]:
        """The layers of each micro-batch."""
        trace, n_layers = self.trace, self.trace.n_layers
        visit_of = np.repeat(np.arange(len(self._sizes)), self._sizes)
        counts = _count(self.experts, visit_of, len(self._sizes), trace.n_experts)
        views = [_views(values, self.edges, n_layers) for values in (self.experts, self.weights, self.scores)]
        parts = zip(*views, _tuples(counts), _present(counts), strict=True)
        routed = list(map(partial(tuple.__new__, LayerRouting), parts))
        return [routed[i : i + n_layers] for i in range(0, len(routed), n_layers)]


def _count(experts: NDArray[Any], visit_of: NDArray[np.int64], n_visits: int, n_experts: int) -> NDArray[np.int64]:
    """Count the rows of each expert, (n_visits * n_layers, n_experts)."""
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
    """View the rows of each micro-batch by layer."""
    if values is None:
        return [None] * ((len(edges) - 1) * n_layers)
    found: list[NDArray[Any] | None] = []
    for first, end in pairwise(edges):
        found.extend(values[first:end].swapaxes(0, 1))
    return found


def _tuples(counts: NDArray[np.int64]) -> Iterable[tuple[int, ...]]:
    """Give the rows of a table as tuples: unpacking bytes takes half as long as lists of integers."""
    largest = int(counts.max(initial=0))
    code = next(code for code in "BHQ" if largest < 256 ** struct.calcsize(code))
    return struct.iter_unpack(f"={counts.shape[1]}{code}", counts.astype(f"u{struct.calcsize(code)}").tobytes())


def _present(counts: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Give the columns of each row of a table in which something was counted, ascending."""
    counted = counts > 0
    ids = tuple((np.flatnonzero(counted) % counts.shape[1]).tolist())
    ends = np.cumsum(np.count_nonzero(counted, axis=1)).tolist()
    return [ids[first:end] for first, end in zip([0, *ends], ends, strict=False)]
