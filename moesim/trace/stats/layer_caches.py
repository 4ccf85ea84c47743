"""One cache a layer, of several sizes at once: hit rates of LRU, LFU and Belady over the rows of a trace.

Every lookup of a row is answered before its cache changes. All layers and sizes go through NumPy together, which a trace of some
ten thousand rows needs; the tests compare it with a cache that is replayed one lookup at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Worth = Callable[[int, NDArray[np.int64]], NDArray[np.float64]]

_CHUNK_CELLS = 2**24  # cells of the largest temporary array


def layer_hit_rates(
    experts: NDArray[Any], n_experts: int, capacities: Sequence[int], policies: Sequence[str] = ("lru", "lfu", "belady")
) -> dict[str, NDArray[np.float64]]:
    """Replay rows through one cache a layer.

    Each row is one visit of every layer: batch 1. The caches start empty and live on from one request to the
    next.

    >>> rows = np.array([[[0]], [[1]], [[0]]])
    >>> {name: rate.item() for name, rate in layer_hit_rates(rows, 2, [2]).items()}
    {'lru': 0.3333333333333333, 'lfu': 0.3333333333333333, 'belady': 0.3333333333333333}
    """
    sizes = np.asarray(capacities, np.int64)
    lookups = max(1, experts.shape[0] * experts.shape[2])
    replays = {"lru": _lru, "lfu": _lfu, "belady": _belady, "belady-visit": _belady_visit}
    return {name: replays[name](experts, n_experts, sizes) / lookups for name in policies}


def _chunks(experts: NDArray[Any], n_experts: int) -> Iterator[slice]:
    n_rows, n_layers, top_k = experts.shape
    step = max(1, _CHUNK_CELLS // (n_layers * n_experts * top_k))
    return (slice(a, min(a + step, n_rows)) for a in range(0, n_rows, step))


def _lru(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count hits at all sizes in one pass: a lookup hits if fewer than `size` experts were used more recently."""
    _, n_layers, top_k = experts.shape
    histogram = np.zeros((n_layers, n_experts + 1), np.int64)  # the last bin: never used before
    before = np.full((n_layers, n_experts), -1, np.int32)
    layer = np.arange(n_layers)[:, None]
    for part in _chunks(experts, n_experts):
        ids = experts[part].astype(np.int64)
        n = len(ids)
        last = np.full((n + 1, n_layers, n_experts), -1, np.int32)
        last[0] = before
        when = ((part.start + np.arange(n))[:, None, None] * top_k + np.arange(top_k)).astype(np.int32)
        np.put_along_axis(last[1:], ids, when, axis=2)
        np.maximum.accumulate(last, axis=0, out=last)
        mine = np.take_along_axis(last[:-1], ids, axis=2)
        distance = np.stack([(last[:-1] > mine[:, :, i, None]).sum(axis=2, dtype=np.uint32) for i in range(top_k)], axis=2)
        distance[mine < 0] = n_experts
        np.add.at(histogram, (np.broadcast_to(layer, ids.shape), distance), 1)
        before = last[-1].copy()
    within = histogram.cumsum(axis=1)
    return np.stack([within[:, min(c, n_experts) - 1] if c else within[:, 0] * 0 for c in sizes])


def _lfu(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    uses = np.zeros((experts.shape[1], n_experts), np.float64)
    layers = np.arange(experts.shape[1])[:, None]

    def rank(row: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        uses[layers, ids] += 1
        return uses[layers, ids]

    return _keep_visit(experts, n_experts, sizes, rank)


def _belady(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    upcoming = _next_rows(experts, n_experts)
    worth = np.zeros((experts.shape[1], n_experts), np.float64)
    layers = np.arange(experts.shape[1])[:, None]

    def value(row: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        worth[layers, ids] = -upcoming[row]
        return worth

    return keep_worthiest(experts, n_experts, sizes, value)


def _belady_visit(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    upcoming = _next_rows(experts, n_experts)
    return _keep_visit(experts, n_experts, sizes, lambda row, ids: -upcoming[row])


def _keep_visit(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64], rank: Worth) -> NDArray[np.int64]:
    """Let go by ``rank(row, ids)``, (n_layers, top_k), then by last use; what the row itself uses goes last."""
    n_rows, n_layers, top_k = experts.shape
    lookups = n_rows * top_k
    last = np.arange(top_k)
    present = 4.0 * lookups * lookups  # above all ranks
    worth = np.zeros((n_layers, n_experts), np.float64)
    layers = np.arange(n_layers)[:, None]
    before: NDArray[np.int64] | None = None

    def value(row: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        nonlocal before
        if before is not None:
            worth[layers, before] -= present
        worth[layers, ids] = rank(row, ids) * lookups + (row * top_k + last) + present  # exact: below 2**53
        before = ids
        return worth

    return keep_worthiest(experts, n_experts, sizes, value)


def _next_rows(experts: NDArray[Any], n_experts: int) -> NDArray[np.float64]:
    """For each lookup, the next row that uses the same expert of the same layer."""
    n_rows, n_layers, top_k = experts.shape
    result = np.empty(experts.shape, np.float64)
    for layer in range(n_layers):
        ids = experts[:, layer].astype(np.int64).ravel()
        order = np.argsort(ids, kind="stable")  # by expert, then by row
        same = ids[order][1:] == ids[order][:-1]
        upcoming = np.full(len(ids), 2.0 * n_rows)
        upcoming[order[:-1][same]] = order[1:][same] // top_k
        result[:, layer] = upcoming.reshape(n_rows, top_k)
    return result


def keep_worthiest(experts: NDArray[Any], n_experts: int, sizes: NDArray[np.int64], value: Worth) -> NDArray[np.int64]:
    """Let the least worthy go after each row, until every cache is back at its size."""
    n_rows, n_layers, top_k = experts.shape
    # 0 for what is held, infinite for what is not: adding it to the worth is several times faster than a mask.
    away = np.full((len(sizes), n_layers, n_experts), np.inf)
    worth = np.empty(away.shape, np.float64)
    away_flat, worth_flat = away.reshape(-1, n_experts), worth.reshape(-1, n_experts)
    n_held = np.zeros((len(sizes), n_layers), np.int64)
    hits = np.zeros((len(sizes), n_layers), np.int64)
    layers = np.arange(n_layers)[:, None]
    for row in range(n_rows):
        ids = experts[row].astype(np.int64)
        found = (away[:, layers, ids] == 0).sum(axis=2)
        hits += found
        n_held += top_k - found
        away[:, layers, ids] = 0
        np.add(away, value(row, ids), out=worth)
        excess = (n_held - sizes[:, None]).ravel()
        over = np.flatnonzero(excess > 0)
        while len(over):
            worst = worth_flat[over].argmin(axis=1)
            away_flat[over, worst] = worth_flat[over, worst] = np.inf
            excess[over] -= 1
            over = over[excess[over] > 0]
        np.minimum(n_held, sizes[:, None], out=n_held)
    return hits
