"""Fate's choices: cache slots of each layer, and which predicted experts are copied at the lower width."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from moesim.policies.algorithms.caching import SlotsSplit, deal_slots, top_by_count


def shallow_favoring(
    n_slots: int, n_layers: int, n_experts: int, n_shallow: int = 4, split: SlotsSplit = "spread"
) -> list[int]:  # fmt: skip
    """Deal cache slots out to the layers as Fate does: the first layers are kept whole, the others share what is left.

    Parameters
    ----------
    n_slots : int
        Slots of all layers together.
    n_layers, n_experts : int
        Layers with experts, and experts of each.
    n_shallow : int
        First layers that are kept whole. If there are not slots for all of them, layers are filled one after another from
        the first on, and the rest have none.
    split : {"spread", "equal"}
        What becomes of a remainder of the deeper layers' equal share: dealt out among them, or unused.

    Returns
    -------
    list of int
        Slots of each layer.

    Notes
    -----
    Fate (2025), the rule of its port to MindSpore.

    Examples
    --------
    >>> shallow_favoring(45, 8, 8), shallow_favoring(19, 8, 8)
    ([8, 8, 8, 8, 3, 4, 3, 3], [8, 8, 3, 0, 0, 0, 0, 0])
    """
    n_shallow = min(n_shallow, n_layers)
    whole = n_shallow * n_experts
    if n_slots < whole:
        return [max(0, min(n_experts, n_slots - layer * n_experts)) for layer in range(n_layers)]
    deep = n_layers - n_shallow
    return [n_experts] * n_shallow + (deal_slots(n_slots - whole, deep, n_experts, split) if deep else [])


def by_frequency(counts: Sequence[int], low_share: float) -> tuple[list[int], list[int]]:
    """Split the experts to prefetch by how often they are predicted: the least frequent ones get the lower width.

    Parameters
    ----------
    counts : sequence of int, (n_experts,)
        Rows for which each expert that is to be copied is predicted; 0 for all others.
    low_share : float
        Share of all counts that experts of the lower width may have together.

    Returns
    -------
    high, low : list of int
        Experts of the full and of the lower width, the most frequent first; of equals the lower id first.

    Notes
    -----
    Fate (2025), the rule of its port to MindSpore, with a share of 0.3. Its order of equals is not known.

    Examples
    --------
    >>> by_frequency([5, 0, 1, 2, 2], 0.3)
    ([0, 3], [4, 2])
    """
    order = top_by_count(counts, len(counts))
    allowed = Fraction(str(low_share)) * sum(counts)  # as the decimal number says
    n_high, covered = len(order), 0
    while n_high and covered + counts[order[n_high - 1]] <= allowed:
        n_high -= 1
        covered += counts[order[n_high]]
    return order[:n_high], order[n_high:]
