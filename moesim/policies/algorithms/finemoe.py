"""FineMoE's choices: which stored iteration is like the present one, what that selects, in which order it is fetched, what leaves.

FineMoE (fMoE; IntelliSys-Lab/FineMoE-EuroSys26 at 5c58468) keeps expert maps of past iterations, the probability of each expert in
each layer, and looks up the one that is like the present iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.trace.stats.calibration import DECIMALS, closest, cosines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

DISTANCE = 6
"""Layers between the one that is routed and the first whose experts are predicted, in the released code."""
CAPACITY = 1000
EVERY = 1e-6  # priority of all experts of the band, selected or not


def closest_map(maps: NDArray[Any], observed: NDArray[Any], layer: int) -> tuple[int, float]:
    """Find the stored iteration whose trajectory so far is most like the present one's.

    Parameters
    ----------
    maps : ndarray of float, (n, n_layers, n_experts)
        Expert maps of past iterations: the probability of each expert.
    observed : ndarray of float, (n_layers, n_experts)
        That of the present iteration, of which rows 0 .. l count.
    layer : int
        The layer that was routed last, l.

    Returns
    -------
    (int, float)
        Index of the largest cosine of rows 0 .. l, flattened, of equals (to 12 decimals) the first; and that cosine.

    Examples
    --------
    >>> past = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.6, 0.8], [0.0, 1.0]]])
    >>> closest_map(past, np.array([[0.6, 0.8], [0.0, 0.0]]), 0)
    (1, 1.0)
    """
    return _closest(maps[:, : layer + 1].reshape(len(maps), -1), observed[: layer + 1].ravel())


def closest_embedding(embeddings: NDArray[Any], embedding: NDArray[Any]) -> tuple[int, float]:
    """Find the stored iteration whose embedding is most like the present one's, for the layers before the first trajectory.

    Parameters
    ----------
    embeddings : ndarray of float, (n, hidden)
        Of the prompts or tokens of past iterations.
    embedding : ndarray of float, (hidden,)
        Of the present one.

    Returns
    -------
    (int, float)
        Index of the largest cosine, of equals (to 12 decimals) the first; and that cosine.
    """
    return _closest(embeddings, embedding)


def selected(probability: NDArray[Any], similarity: float, top_k: int) -> list[int]:
    """Select experts of one predicted layer: the less alike the iterations, the more.

    Parameters
    ----------
    probability : ndarray of float, (n_experts,)
        Row of the map that was found.
    similarity : float
        Its cosine with the present iteration.
    top_k : int
        Experts that a row uses.

    Returns
    -------
    list of int
        Experts by descending probability, of equals the lower id first: as many as there are prefix sums of at most
        ``1 - similarity`` (held between 0 and 1), but at least ``top_k`` and at most all. The expert with which the sum passes
        the threshold is not among them.

    Examples
    --------
    >>> p = np.array([0.35, 0.25, 0.15, 0.10, 0.06, 0.04, 0.03, 0.02])
    >>> [len(selected(p, similarity, 2)) for similarity in (0.2, 0.5, 0.9)]
    [3, 2, 2]
    """
    row = np.asarray(probability, np.float64)[None]
    place, sums = map_ranks(row)
    chosen = _selected(place, sums, similarity, top_k)
    return [int(expert) for expert in place[0].argsort()[: chosen.sum()]]


def layer_decay(layer: int, start: int, end: int) -> float:
    """Weigh a layer j of the band [start, end): ``1 - (j - start) / (end + 1)``.

    Parameters
    ----------
    layer, start, end : int
        The layer, the first of the band, and the first after it.

    Returns
    -------
    float
        1 for the first layer, less for each further one.

    Examples
    --------
    >>> [round(layer_decay(layer, 7, 24), 2) for layer in (7, 8, 15, 23)]
    [1.0, 0.96, 0.68, 0.36]
    """
    return 1 - (layer - start) / (end + 1)


class MapRanks(NamedTuple):
    """How an expert map ranks the experts of each layer; it depends on neither the band nor the similarity."""

    place: NDArray[np.int64]  # of each expert by descending probability, of equals the lower id first, (n_layers, n_experts)
    sums: NDArray[np.float64]  # of the probabilities up to each place, (n_layers, n_experts)


def map_ranks(expert_map: NDArray[Any]) -> MapRanks:
    """Rank the experts of each layer of a map, (n_layers, n_experts).

    >>> map_ranks(np.array([[0.25, 0.5, 0.25]]))
    MapRanks(place=array([[1, 0, 2]]), sums=array([[0.5 , 0.75, 1.  ]]))
    """
    rows = np.asarray(expert_map, np.float64)
    order = np.argsort(-rows, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(rows.shape[1]), rows.shape), axis=1)
    return MapRanks(place, np.cumsum(np.take_along_axis(rows, order, axis=1), axis=1))


def prefetch_priorities(
    expert_map: NDArray[Any], start: int, end: int, similarity: float, top_k: int
) -> NDArray[np.float64]:  # fmt: skip
    """Rank all experts of a band of layers for prefetching.

    Parameters
    ----------
    expert_map : ndarray of float, (n_layers, n_experts)
        The map that was found.
    start, end : int
        The band [start, end).
    similarity : float
        Cosine of the map with the present iteration.
    top_k : int
        Experts that a row uses.

    Returns
    -------
    ndarray of float64, (n_layers, n_experts)
        Probability x `layer_decay` of those `selected`, 0 for others, plus 1e-6 for every expert of the band; 0 outside it.

    Examples
    --------
    >>> prefetch_priorities(np.array([[0.5, 0.5], [0.7, 0.3], [0.2, 0.8]]), 1, 3, 1.0, 1).round(6).tolist()
    [[0.0, 0.0], [0.700001, 1e-06], [1e-06, 0.600001]]
    """
    return largest_priorities([expert_map], [map_ranks(expert_map)], start, end, [similarity], top_k)


def largest_priorities(
    maps: Sequence[NDArray[Any]], ranks: Sequence[MapRanks], start: int, end: int, similarities: Sequence[float], top_k: int
) -> NDArray[np.float64]:
    """Return the largest of the `prefetch_priorities` of several maps, whose ranks are known; each has its similarity."""
    band = np.array([one[start:end] for one in maps], np.float64)
    place, sums = (np.array([of[start:end] for of in column]) for column in zip(*ranks, strict=True))
    chosen = _selected(place, sums, np.reshape(similarities, (-1, 1, 1)), top_k)
    decay = np.array([layer_decay(layer, start, end) for layer in range(start, end)])
    found = np.zeros(np.shape(maps[0]))
    # Rounding keeps order, so that the largest of the products is the product with the largest.
    found[start:end] = np.where(chosen, band, 0.0).max(axis=0) * decay[:, None] + EVERY
    return found


def eviction_scores(probability: NDArray[Any], visits: NDArray[Any]) -> NDArray[np.int64]:
    """Score cached experts: probability x visits while cached, truncated to an integer as the released code stores it.

    Parameters
    ----------
    probability : ndarray of float, (n_layers, n_experts)
        What was predicted last of each expert.
    visits : ndarray of int, (n_layers, n_experts)
        How often each was used since it is cached.

    Returns
    -------
    ndarray of int64, (n_layers, n_experts)
        The lowest leaves first; every product below 1 is 0.

    Examples
    --------
    >>> eviction_scores(np.array([[0.3, 0.6, 0.5]]), np.array([[3, 3, 4]])).tolist()
    [[0, 1, 2]]
    """
    return np.asarray(np.asarray(probability, np.float64) * visits).astype(np.int64)


def evicted(scores: NDArray[Any], may_go: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Name the expert with the lowest score; of equals the lowest layer, then the lowest id.

    Parameters
    ----------
    scores : ndarray of int or float, (n_layers, n_experts)
        See `eviction_scores`.
    may_go : ndarray of bool, (n_layers, n_experts)
        Which experts are cached, and are no candidates of the last prediction, nor in use or locked.

    Returns
    -------
    (int, int) or None
        Layer and expert; None if none may go. The released code sorts without a rule for ties.

    Examples
    --------
    >>> evicted(np.array([[1, 0], [0, 0]]), np.array([[True, False], [True, True]]))
    (1, 0)
    """
    values = np.where(may_go, scores, np.inf).ravel()
    at = int(values.argmin())
    if values[at] == np.inf:
        return None
    layer, expert = divmod(at, may_go.shape[1])
    return layer, expert


def replaced_entry(
    embeddings: NDArray[Any], maps: NDArray[Any], embedding: NDArray[Any], expert_map: NDArray[Any], distance: int = DISTANCE
) -> int:  # fmt: skip
    """Choose the entry of a full store that a new one replaces: the most redundant beside it.

    Parameters
    ----------
    embeddings : ndarray of float, (n, hidden)
        Of the stored iterations.
    maps : ndarray of float, (n, n_layers, n_experts)
        Their expert maps.
    embedding : ndarray of float, (hidden,)
        Of the new iteration.
    expert_map : ndarray of float, (n_layers, n_experts)
        Its map.
    distance : int
        Layers whose experts are predicted by embeddings, d.

    Returns
    -------
    int
        Index of the largest ``w c_e + (1 - w) c_m`` with the cosines of embeddings and of flattened maps and w = d / L; of
        equals (to 12 decimals) the first.

    Examples
    --------
    >>> maps = np.array([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    >>> replaced_entry(np.array([[1.0, 0.0], [0.0, 1.0]]), maps, np.array([1.0, 0.0]), maps[1], 0)
    1
    >>> replaced_entry(np.array([[1.0, 0.0], [0.0, 1.0]]), maps, np.array([1.0, 0.0]), maps[1], 2)
    0
    """
    weight = distance / maps.shape[1]
    of_embeddings = cosines(embeddings, embedding[None])[0]
    of_maps = cosines(maps.reshape(len(maps), -1), expert_map.reshape(1, -1))[0]
    return int((weight * of_embeddings + (1 - weight) * of_maps).round(DECIMALS).argmax())


def _selected(place: NDArray[Any], sums: NDArray[Any], similarity: Any, top_k: int) -> NDArray[np.bool_]:
    """Return which experts of each row are selected."""
    threshold = np.clip(1 - similarity, 0.0, 1.0)
    n = np.clip((sums <= threshold).sum(axis=-1), top_k, sums.shape[-1])
    return np.asarray(place < n[..., None])


def _closest(past: NDArray[Any], present: NDArray[Any]) -> tuple[int, float]:
    index, cosine = closest(past, present[None])
    return int(index[0]), float(cosine[0])
