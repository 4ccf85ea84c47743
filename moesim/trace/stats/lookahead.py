"""Misses of caches that know the routing of some steps ahead.

One cache a layer, empty at the start. A miss may pass the cache by; beyond the window decayed frequency
decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HALF_GAP = (0.51, 1.39)
"""Factor and exponent of (slots / top-k) that give the window that closes half of the gap: medians of nine models
(moe-speed-of-light, prereg/policy_study_outcome.md at 3a742000)."""

_NEVER = 2**40  # beyond all windows


def misses_by_window(
    experts: NDArray[Any],
    n_experts: int,
    slots: Sequence[int],
    windows: Sequence[int],
    *,
    half_life: float = 16.0,
    kappa: float = 0.0,
) -> NDArray[np.int64]:
    """Count the misses of windowed Belady with bypass.

    Parameters
    ----------
    experts : array of int, shape (n_steps, n_layers, top_k)
        Experts of each step and layer; those of one are distinct.
    n_experts : int
        Experts of a layer.
    slots : sequence of int
        Sizes of the cache of a layer.
    windows : sequence of int, steps
        How far the future is known; one as long as the trace makes it MIN with bypass, the fewest misses that
        there can be.
    half_life : float, steps
        An expert's score counts its uses, each half as much after so many steps.
    kappa : float
        By how much a miss that the window does not use again must have a higher score than who leaves.

    Returns
    -------
    array of int, shape (len(windows), len(slots), n_layers)
        Over all steps.

    Notes
    -----
    Misses of a step are taken by ascending id. One that is used in the window takes the place of a resident that is not, the one
    with the lowest score, or of the one used last if it is used sooner itself. One that is not used in the window only takes the
    place of a resident that is not, either. Of equals the lowest id leaves.

    References
    ----------
    moe-speed-of-light, ``mosl/cachesim.py`` at 009be858.

    Examples
    --------
    >>> steps = np.array([[0, 1], [0, 2], [0, 3], [1, 0], [2, 0], [0, 1], [3, 0], [0, 1]])[:, None]
    >>> misses_by_window(steps, 4, [2], [0, 2, len(steps)]).ravel().tolist()
    [8, 6, 6]
    """
    n_steps, n_layers, _ = experts.shape
    ids = np.sort(experts.astype(np.int64), axis=-1)
    upcoming = _next_steps(ids, n_experts)
    sight = np.minimum(np.asarray(windows, np.int64), n_steps)[:, None, None]
    shape = len(windows), len(slots), n_layers
    n_caches = len(windows) * len(slots) * n_layers
    sizes = np.broadcast_to(np.asarray(slots, np.int64)[:, None], shape).ravel()
    cache, layer = np.arange(n_caches), np.tile(np.arange(n_layers), len(windows) * len(slots))
    each = np.arange(n_layers)[:, None]
    # 0 for what is held, infinite for what is not: adding it to the worth is faster than a mask.
    away = np.full((n_caches, n_experts), np.inf)
    held = np.zeros(n_caches, np.int64)
    misses = np.zeros(n_caches, np.int64)
    known = np.full((n_layers, n_experts), _NEVER, np.int64)  # next use of each
    scores = np.zeros((n_layers, n_experts))
    decay = 0.5 ** (1 / half_life)
    soon = 4.0 * n_steps + 2 * (half_life + 1)  # above all scores, minus any step
    for step in range(n_steps):
        used = ids[step]
        scores *= decay
        scores[each, used] += 1
        known[each, used] = upcoming[step]
        inside = known <= step + sight
        worth = np.broadcast_to(np.where(inside, soon - known, scores)[:, None], (*shape, n_experts)).reshape(n_caches, n_experts)
        value = worth[cache[:, None], used[layer]]
        needed = value if not kappa else value - np.where(value < soon - 2 * n_steps, kappa, 0.0)
        absent = away[cache[:, None], used[layer]] > 0
        misses += absent.sum(axis=1)
        ranked = away + worth
        for place in np.flatnonzero(absent.any(axis=0)):
            mine = used[layer, place]
            victim = ranked.argmin(axis=1)
            free = held < sizes
            enters = absent[:, place] & (free | (needed[:, place] > ranked[cache, victim]))
            leaves = np.flatnonzero(enters & ~free)
            away[leaves, victim[leaves]] = ranked[leaves, victim[leaves]] = np.inf
            enters = np.flatnonzero(enters)
            away[enters, mine[enters]] = 0
            ranked[enters, mine[enters]] = value[enters, place]
            held[enters] += free[enters]
    return misses.reshape(shape)


def _next_steps(ids: NDArray[np.int64], n_experts: int) -> NDArray[np.int64]:
    """Return for each use the next step that uses the same expert, or `_NEVER`."""
    n_steps, n_layers, _ = ids.shape
    found = np.empty(ids.shape, np.int64)
    last = np.full((n_layers, n_experts), _NEVER, np.int64)
    layers = np.arange(n_layers)[:, None]
    for step in range(n_steps - 1, -1, -1):
        found[step] = last[layers, ids[step]]
        last[layers, ids[step]] = step
    return found
