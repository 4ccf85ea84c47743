"""Which experts to keep: cache plans and placements as pure functions over plain lists.

Nothing here knows an engine or a view. Ties always go to the lower expert id (then the lower layer) unless a function
says otherwise.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

SlotsSplit = Literal["spread", "equal"]


def deal_slots(n_slots: int, n_layers: int, n_experts: int, split: SlotsSplit = "spread") -> list[int]:
    """Deal cache slots out to the layers.

    ``spread`` deals out all: the remainder of an equal share goes, one each, to layers that are evenly spaced over the stack.
    ``equal`` leaves it unused, as published systems do. No layer gets more slots than it has experts.

    >>> deal_slots(19, 8, 8), deal_slots(19, 8, 8, "equal"), deal_slots(9, 4, 2)
    ([2, 3, 2, 3, 2, 2, 3, 2], [2, 2, 2, 2, 2, 2, 2, 2], [2, 2, 2, 2])
    """
    share, rest = divmod(min(n_slots, n_layers * n_experts), n_layers)
    if split == "equal":
        return [share] * n_layers
    dealt = [(layer * rest + n_layers // 2) // n_layers for layer in range(n_layers + 1)]  # of the rest, before each layer
    return [share + after - before for before, after in pairwise(dealt)]


class SwapPlan(NamedTuple):
    """What Mixtral-Offloading does in one layer visit."""

    compute: tuple[int, ...]  # active experts in execution order
    order: tuple[int, ...]  # residents afterwards, least recently used first
    swaps: tuple[tuple[int, int], ...]  # (victim, newcomer) in the order in which they start
    window: int  # swaps that may be under way at a time


def mixtral_offloading_plan(
    order: Sequence[int], active: Sequence[int], buffer_size: int, prefetched: Container[int] = ()
) -> SwapPlan:
    """Plan a layer visit as Mixtral-Offloading's expert cache does; ``order`` lists residents, least recently used first.

    All active residents are marked as used before the first load. One of them leaves only where the others do not suffice for the
    misses; a reference taken earlier then keeps it computable. Misses that are ``prefetched`` take their places before those that
    are loaded on demand, as in AdapMoE's code. Of the ``buffer_size`` device buffers one fewer loads may be under way.

    >>> mixtral_offloading_plan([4, 5, 6, 7], [0, 1, 4, 5, 6, 7], buffer_size=4)
    SwapPlan(compute=(4, 5, 6, 7, 0, 1), order=(6, 7, 0, 1), swaps=((4, 0), (5, 1)), window=2)
    """
    resident = set(order)
    hits = [expert for expert in active if expert in resident]
    misses = [expert for expert in active if expert not in resident]
    misses.sort(key=lambda expert: expert not in prefetched)
    if misses and not order:
        raise ValueError(
            f"mixtral_offloading_plan: expected a resident that can be swapped for expert {misses[0]}, got an empty cache"
        )
    used = set(hits)
    queue = [expert for expert in order if expert not in used] + hits
    swaps = []
    for newcomer in misses:
        swaps.append((queue.pop(0), newcomer))
        queue.append(newcomer)
    window = min(buffer_size - 1, len(order), len(misses))
    return SwapPlan((*hits, *misses), tuple(queue), tuple(swaps), window)


def workload_aware_swap(
    scores: Sequence[int], resident: Iterable[int], u_size: int, only_if_better: bool = False
) -> tuple[list[int], list[int]]:
    """Choose the replacements of DALI's Algorithm 2 at the end of a window, by the rows that each expert served in it.

    The victims are the lowest residents (lowest first), the newcomers the highest non-residents (highest first), ``u_size`` pairs or
    fewer. ``only_if_better`` keeps a resident unless its newcomer's score is higher; the paper swaps in any case.

    >>> workload_aware_swap([5, 0, 1, 7, 4, 0, 6, 2], [0, 1, 2, 3], u_size=2)
    ([1, 2], [6, 4])
    """
    inside = sorted(set(resident))
    member = set(inside)
    outside = [expert for expert in range(len(scores)) if expert not in member]
    count = min(u_size, len(inside), len(outside))
    victims = sorted(inside, key=lambda expert: scores[expert])[:count]
    newcomers = sorted(outside, key=lambda expert: -scores[expert])[:count]
    if only_if_better:
        better = [(out, new) for out, new in zip(victims, newcomers, strict=True) if scores[new] > scores[out]]
        return [out for out, _ in better], [new for _, new in better]
    return victims, newcomers


def global_top(frequency: Sequence[Sequence[float]], n_slots: int) -> list[list[int]]:
    """Fill slots with the most frequent (layer, expert) pairs of the model; of equals the lower layer first, then the lower id.

    >>> global_top([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]], 3)
    [[1, 3], [2]]
    """
    chosen: list[list[int]] = [[] for _ in frequency]
    for layer, expert in _by_frequency(frequency)[: max(n_slots, 0)]:
        chosen[layer].append(expert)
    return [sorted(experts) for experts in chosen]


def per_layer_top(frequency: Sequence[Sequence[float]], slots: Sequence[int]) -> list[list[int]]:
    """Take the most frequent experts of every layer, as many as it has slots; ties to the lower id; each layer ascending.

    >>> per_layer_top([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]], [1, 2])
    [[3], [1, 2]]
    """
    return [sorted(sorted(range(len(row)), key=lambda e: -row[e])[:n]) for row, n in zip(frequency, slots, strict=True)]


def per_layer_top_with_remainder(frequency: Sequence[Sequence[float]], n_slots: int) -> list[list[int]]:
    """Give every layer an equal share of the slots, and what is left to the globally most frequent pairs (DAOP).

    >>> per_layer_top_with_remainder([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]], 3)
    [[1, 3], [2]]
    """
    chosen = per_layer_top(frequency, deal_slots(n_slots, len(frequency), len(frequency[0]), "equal"))
    left = n_slots - sum(len(experts) for experts in chosen)
    for layer, expert in _by_frequency(frequency):
        if left <= 0:
            break
        if expert not in chosen[layer]:
            chosen[layer].append(expert)
            left -= 1
    return [sorted(experts) for experts in chosen]


def top_by_count(counts: Sequence[int], size: int) -> list[int]:
    """Return up to ``size`` ids with the highest positive counts, highest first, ties to the lower id.

    >>> top_by_count([0, 3, 1, 3, 0], 4)
    [1, 3, 2]
    """
    positive = [expert for expert, count in enumerate(counts) if count > 0]
    return sorted(positive, key=lambda expert: -counts[expert])[: max(size, 0)]


def _by_frequency(frequency: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    pairs = [(layer, expert) for layer, row in enumerate(frequency) for expert in range(len(row))]
    return sorted(pairs, key=lambda pair: -frequency[pair[0]][pair[1]])  # stable: already in (layer, expert) order
