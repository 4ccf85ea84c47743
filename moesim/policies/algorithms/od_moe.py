"""OD-MoE's rules: who loads what, what a wrong prediction costs, when the shadow is aligned, mini-batches, how fast it can get.

Pure functions over plain lists. Times may be in any one unit; integers stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


def longest_hidden_load(main: int, worker: int, n_groups: int) -> int:
    """Return the load time up to which loading costs nothing (OD-MoE, eq. 1, with the number of groups).

    A group loads while the others' layers are computed: ``n_groups`` dense parts ``main``, with the hops over the network, and
    ``n_groups - 1`` expert parts ``worker``.

    Equation 1 is printed with the size of a group in place of the number of groups; the paper's own example, four dense and three
    expert parts for 8 workers in groups of 2, is this formula.

    Examples
    --------
    >>> longest_hidden_load(3, 2, 4)
    18
    """
    return n_groups * main + (n_groups - 1) * worker


def steady_period(load: int, main: int, worker: int, n_groups: int) -> Fraction:
    """Return the time of a layer once the pipeline is full, every prediction right and in time.

    It is ``max(main + worker, (load + worker) / n_groups)``: a mean over layers in the second case, in which every ``n_groups``-th waits.

    Examples
    --------
    >>> steady_period(18, 3, 2, 4), steady_period(20, 3, 2, 4)
    (Fraction(5, 1), Fraction(11, 2))
    """
    return max(Fraction(main + worker), Fraction(load + worker, n_groups))


def by_rank(ids: Sequence[Sequence[int]]) -> list[int]:
    """Order the experts of some rows: by the best rank that any row gives them, then by id.

    Examples
    --------
    >>> by_rank([[5, 2]]), by_rank([[5, 2], [2, 7], [3, 5]])
    ([5, 2], [2, 3, 5, 7])
    """
    best: dict[int, int] = {}
    for row in ids:
        for rank, expert in enumerate(row):
            best[expert] = min(rank, best.get(expert, rank))
    return sorted(best, key=lambda expert: (best[expert], expert))


class Loads(NamedTuple):
    """What the workers of a layer hold."""

    queues: list[list[int]]  # of each worker, what it holds or is to load, in load order
    dropped: list[tuple[int, int]]  # (worker, expert) that are not needed after all


def assign_loads(queues: Sequence[Sequence[int]], wanted: Sequence[int], *, final: bool = True) -> Loads:
    """Give workers what is predicted or, once the truth is known, what is missing; nothing that is there is loaded again.

    Parameters
    ----------
    queues : sequence of sequence of int, shape (n_workers, ...)
        What each worker holds or is to load, in load order; no expert twice. At first all are empty.
    wanted : sequence of int
        Distinct experts, best first.
    final : bool
        Whether ``wanted`` is all that the layer needs; if not, nothing is dropped.

    Returns
    -------
    Loads
        Each missing expert goes to the worker with the fewest left, the lowest first: predictions in turn, and in a group
        with one expert each a correction to the workers whose prediction was wrong.

    Examples
    --------
    Experts 5 and 2 are predicted, in this order; the router says 2 and 7, so worker 0 alone loads again:

    >>> assign_loads([[], []], [5, 2], final=False).queues
    [[5], [2]]
    >>> assign_loads([[5], [2]], [2, 7])
    Loads(queues=[[7], [2]], dropped=[(0, 5)])

    More experts than workers:

    >>> assign_loads([[], []], [3, 1, 6], final=False).queues
    [[3, 6], [1]]
    """
    needed = set(wanted)
    kept = [[expert for expert in queue if expert in needed or not final] for queue in queues]
    dropped = [(w, expert) for w, queue in enumerate(queues) for expert in queue if final and expert not in needed]
    there = {expert for queue in kept for expert in queue}
    for expert in wanted:
        if expert not in there:
            min(kept, key=len).append(expert)
    return Loads(kept, dropped)


def mini_batches(ids: Sequence[Sequence[int]], n_parts: int) -> list[dict[int, list[int]]]:
    """Split the rows of a prefill step evenly, in order (OD-MoE, Fig. 7b), and return the rows of every expert in each part.

    Examples
    --------
    Three rows in two parts:

    >>> mini_batches([[5, 2], [2, 7], [3, 5]], 2)
    [{5: [0], 2: [0]}, {2: [1], 7: [1], 3: [2], 5: [2]}]
    """
    n_rows, n_parts = len(ids), min(n_parts, len(ids))
    parts: list[dict[int, list[int]]] = []
    for part in range(n_parts):
        rows: dict[int, list[int]] = {}
        for row in range(part * n_rows // n_parts, (part + 1) * n_rows // n_parts):
            for expert in ids[row]:
                rows.setdefault(expert, []).append(row)
        parts.append(rows)
    return parts


def is_due(token: int, period: int | None) -> bool:
    """Say whether the shadow is aligned before a decoded token.

    Tokens count from 0, the first after the prompt, in which the first alignment falls; a period of None: never.

    Examples
    --------
    Tokens every 2, the KV cache every 4, as pairs:

    >>> [(is_due(i, 2), is_due(i, 4)) for i in range(5)]
    [(True, True), (False, False), (True, False), (False, False), (True, True)]
    """
    return period is not None and token % period == 0
