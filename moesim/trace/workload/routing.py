"""The routing of a step as the engine and the policies read it: NumPy once a step, then plain integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from moesim.trace import Trace

# Bytes of prepared routing that a workload may keep, so that several runs over it do not prepare it again.
KEEP_BYTES = 256 * 2**20
_POINTER_BYTES = 8


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
    layers: list[LayerRouting]


class Span(NamedTuple):
    """The extent of a micro-batch, before its routing is looked up."""

    first_row: int
    n_rows: int
    work2: int
    n_sequences: int


class RoutingSource:
    """Looks routing up in a trace, keeping what it prepared while that is small enough."""

    def __init__(self, trace: Trace, n_rows: int, n_visits: int) -> None:
        self._trace = trace
        slot_bytes = trace.experts.itemsize + (0 if trace.weights is None else trace.weights.itemsize)
        bytes_per_row = trace.n_layers * trace.top_k * slot_bytes
        if trace.scores is not None:
            bytes_per_row += trace.n_layers * trace.n_experts * trace.scores.itemsize
        bytes_per_visit = trace.n_layers * trace.n_experts * _POINTER_BYTES
        self.keep = n_rows * bytes_per_row + n_visits * bytes_per_visit <= KEEP_BYTES
        self._kept: dict[int, tuple[MicroBatch, ...]] = {}

    def micro_batches(self, step: int, rows: NDArray[Any], spans: Sequence[Span]) -> tuple[MicroBatch, ...]:
        """Look up the routing of a step."""
        kept = self._kept.get(step)
        if kept is None:
            kept = self._look_up(rows, spans)
            if not self.keep:
                self._kept.clear()  # the latest step stays: engine and predictors ask for it repeatedly
            self._kept[step] = kept
        return kept

    def _look_up(self, rows: NDArray[Any], spans: Sequence[Span]) -> tuple[MicroBatch, ...]:
        trace = self._trace
        experts = trace.experts[rows]
        weights = None if trace.weights is None else trace.weights[rows]
        scores = None if trace.scores is None else trace.scores[rows]
        for array in (experts, weights, scores):
            if array is not None:
                array.flags.writeable = False
        found = []
        for span in spans:
            part = slice(span.first_row, span.first_row + span.n_rows)
            used = None if weights is None else weights[part]
            dense = None if scores is None else scores[part]
            routed = layer_routing(experts[part], used, dense, trace.n_experts)
            found.append(MicroBatch(*span, routed))
        return tuple(found)


def layer_routing(
    experts: NDArray[Any], weights: NDArray[Any] | None, scores: NDArray[Any] | None, n_experts: int
) -> list[LayerRouting]:
    """Split the routing of some rows into layers, with loads and active experts as plain integers.

    >>> import numpy as np
    >>> ids = np.array([[[2, 0]], [[2, 1]]], dtype=np.uint8)
    >>> layer = layer_routing(ids, np.ones((2, 1, 2), np.float16), None, 4)[0]
    >>> layer.rows, layer.active
    ((1, 1, 2, 0), (0, 1, 2))
    """
    n_layers = experts.shape[1]
    loads, active = _count(experts, n_experts)
    layers = zip(experts.swapaxes(0, 1), _by_layer(weights, n_layers), _by_layer(scores, n_layers), loads, active, strict=True)
    return [LayerRouting(*layer) for layer in layers]


def _by_layer(values: NDArray[Any] | None, n_layers: int) -> Iterable[NDArray[Any] | None]:
    return [None] * n_layers if values is None else values.swapaxes(0, 1)


def _count(experts: NDArray[Any], n_experts: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    # One bincount over (layer, expert) pairs; counting in Python was slower for every shape and batch tried.
    n_layers = experts.shape[1]
    offsets = np.arange(n_layers, dtype=np.int64) * n_experts
    counts = np.bincount((experts + offsets[:, None]).ravel(), minlength=n_layers * n_experts)
    present = np.flatnonzero(counts)
    ends = np.searchsorted(present, offsets + n_experts).tolist()
    ids = tuple((present % n_experts).tolist())
    active = [ids[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return [tuple(row) for row in counts.reshape(n_layers, n_experts).tolist()], active
