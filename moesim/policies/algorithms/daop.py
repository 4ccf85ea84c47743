"""DAOP's two decisions: which experts to swap in prefill, and which predicted experts a decode step can afford.

Pure functions over plain lists; "on the GPU" is one truth value an expert. Ties go to the lower expert id.
"""

from __future__ import annotations

from collections.abc import Sequence

SWAP_FACTOR = 1.05  # SwapInOut of Algorithm 1 and of the released code


def prefill_swaps(
    loads: Sequence[int],
    on_gpu: Sequence[int],
    *,
    factor: float = SWAP_FACTOR,
    strict: bool = True,
    mixed: bool = False,
    prompt_tokens: int = 1,
) -> list[tuple[int, int]]:
    """Pair hot experts on the CPU with cold ones on the GPU (DAOP, Algorithm 1).

    Parameters
    ----------
    loads : sequence of int, shape (n_experts,)
        Rows of each expert in the prompt.
    on_gpu : sequence of int, shape (n_experts,)
        1 where the expert is on the GPU.
    factor : float
        By how much the hot expert must be busier.
    strict : bool
        Swap only if ``hot > factor * cold``, as the released code does; else already if they are equal, as printed.
        Then two idle experts are swapped.
    mixed : bool
        The cold list as the released code builds it, over all experts with the key ``load * (1 if on the GPU else
        prompt_tokens)``: an idle expert on the CPU has key 0 and takes a place whose pair is then passed over.
    prompt_tokens : int
        Rows of the prompt, for ``mixed``.

    Returns
    -------
    list of (int, int)
        (hot, cold) to be swapped, hottest first; at most half of the experts.

    Notes
    -----
    Both lists hold ``n_experts // 2`` experts if there are as many; the pairs end with the shorter one.

    Examples
    --------
    >>> loads, on_gpu = [30, 2, 10, 8, 0, 25, 5, 16], [0, 1, 1, 1, 0, 0, 0, 1]
    >>> prefill_swaps(loads, on_gpu)
    [(0, 1), (5, 3)]

    In the released code the idle expert 4 takes the place opposite the hottest, which then stays on the CPU:

    >>> prefill_swaps(loads, on_gpu, mixed=True, prompt_tokens=48)
    [(5, 1)]
    """
    ids = range(len(loads))
    hot = [e for e in ids if not on_gpu[e]]
    cold = list(ids) if mixed else [e for e in ids if on_gpu[e]]
    size = len(loads) // 2
    hot = sorted(hot, key=lambda e: -loads[e])[:size]
    cold = sorted(cold, key=lambda e: loads[e] * (1 if on_gpu[e] else prompt_tokens))[:size]
    pairs = []
    for busy, idle in zip(hot, cold, strict=False):
        least = factor * loads[idle]
        if on_gpu[idle] and (loads[busy] > least if strict else loads[busy] >= least):
            pairs.append((busy, idle))
    return pairs


def swaps_from(
    present: Sequence[int], start: Sequence[int], pairs: Sequence[tuple[int, int]], loads: Sequence[int]
) -> list[tuple[int, int]]:
    """Reach the outcome of swaps that were chosen for another placement than the present one.

    ``start`` is the placement in which ``pairs`` of (hot, cold) were chosen. Returns (newcomer, leaver) for all that ``present`` and
    the outcome do not share, busiest newcomer and idlest leaver first.

    Examples
    --------
    >>> swaps_from([0, 0, 1, 1], [1, 1, 0, 0], [(2, 1)], [4, 0, 5, 1])
    [(0, 3)]
    """
    wanted = list(start)
    for hot, cold in pairs:
        wanted[hot], wanted[cold] = 1, 0
    ids = range(len(loads))
    new = sorted((e for e in ids if wanted[e] > present[e]), key=lambda e: -loads[e])
    old = sorted((e for e in ids if wanted[e] < present[e]), key=lambda e: loads[e])
    return list(zip(new, old, strict=True))


def degraded(predicted: Sequence[int], scores: Sequence[float], on_gpu: Sequence[int], allowed: int) -> list[int]:
    """Replace predicted experts of which too many are on the CPU (DAOP, "graceful degradation").

    Parameters
    ----------
    predicted : sequence of int, shape (top_k,)
        Experts predicted for a row, best first.
    scores : sequence of float, shape (n_experts,)
        The prediction's scores.
    on_gpu : sequence of int, shape (n_experts,)
        1 where the expert is on the GPU.
    allowed : int
        Predicted experts that may stay on the CPU: 1 of 2 in the paper.

    Returns
    -------
    list of int, shape (top_k,)
        The predicted experts; of those on the CPU the lowest beyond ``allowed`` give way to the best-scored experts on the
        GPU that were not predicted, as far as there are any.

    Notes
    -----
    The paper and the code speak of two predicted experts only: if both are on the CPU and the layer has any expert on
    the GPU, the lower one is replaced. ``allowed = top_k // 2`` is that rule for two.

    Examples
    --------
    >>> degraded([4, 0], [0.2, 0.1, 0.15, 0.05, 0.5], [0, 1, 1, 0, 0], allowed=1)
    [4, 2]
    >>> degraded([1, 4], [0.2, 0.3, 0.15, 0.05, 0.25], [0, 1, 1, 0, 0], allowed=1)
    [1, 4]
    """
    absent = [place for place, expert in enumerate(predicted) if not on_gpu[expert]]
    n_extra = len(absent) - allowed
    if n_extra <= 0:
        return list(predicted)
    free = [e for e, here in enumerate(on_gpu) if here and e not in predicted]
    best = sorted(free, key=lambda e: -scores[e])[:n_extra]
    chosen = list(predicted)
    for place, expert in zip(absent[len(absent) - len(best) :], best, strict=True):
        chosen[place] = expert
    return chosen
