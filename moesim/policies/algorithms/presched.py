"""PreSched: one plan for a layer's loads and the next layer's prefetches, as pure functions.

Experts are listed by tokens, fewest first, without residents and those on their way. Numbers may be integers (ns, as the
policy passes them) or floats (as the paper prints them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from moesim.policies.base import Costs
from moesim.policies.parts.prefetch import prefetch_count

NoneBetter = Literal["printed", "sentinel", "eq2"]


class Timing(NamedTuple):
    """Costs of the machine as the plan knows them, in one unit of time."""

    cpu: Costs  # c(w), time of one expert with w tokens on the CPU
    load: float  # x, transfer of one expert of the present layer
    load_next: float  # the same of the next layer; the paper's experts are all of one size
    gpu: float  # g, time of one expert on the GPU
    dense: float  # t_attn, what the next layer does before its experts
    in_flight: float = 0  # alpha, what is left of the transfer under way


class CrossLayerPlan(NamedTuple):
    """PreSched's decisions in one layer."""

    first: int  # i': the CPU computes current[:first], the GPU loads and computes current[first:]
    gap: float  # T_gap: link idle until the CPU is done; negative if the loads take longer
    queue: tuple[int, int]  # how many of the current and of the next layer's experts are in GPU_Q: always the busiest
    share: float  # f: transfers that fit into the gap and the next layer's dense part
    n_prefetch: int  # of the next layer's busiest experts; 0 where GPU_Q has none of them


def gpu_queue(current: Sequence[int], upcoming: Sequence[int], timing: Timing) -> tuple[int, int]:
    """Count the experts of two layers that are worth a transfer (PreSched step 1, equation 4).

    >>> timing = Timing(cpu=[0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5], load=3, load_next=3, gpu=0.5, dense=1)
    >>> gpu_queue([1, 2, 6], [1, 5], timing)
    (1, 1)
    """
    # Both lists are merged by tokens, ascending, this layer first among equals. Member k is in the queue if loading
    # k and all busier ones (TG) is done before the CPU has computed k and all others (TC, k and the dense part
    # included). TG falls and TC rises with k, so the queue is an upper segment; this is asserted.
    cpu, load, load_next, gpu, dense, in_flight = timing
    merged = sorted([(w, False) for w in current] + [(w, True) for w in upcoming])
    left = len(current) * load + len(upcoming) * load_next  # transfers of k and all busier ones
    computed = dense
    passes = []
    for tokens, is_next in merged:
        computed += cpu[tokens]
        passes.append(in_flight + left + gpu < computed)
        left -= load_next if is_next else load
    n_upper = sum(passes)
    queue = merged[len(merged) - n_upper :]
    assert all(passes[len(passes) - n_upper :]), "GPU_Q is no upper segment"
    n_next = sum(is_next for _, is_next in queue)
    return n_upper - n_next, n_next


def first_load(current: Sequence[int], n_queued: int, timing: Timing, none_better: NoneBetter = "eq2") -> int:
    """Return where the loads of the present layer begin (step 2, equation 5), or its length.

    >>> timing = Timing(cpu=[0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5], load=3, load_next=3, gpu=0.5, dense=1)
    >>> first_load([1, 2, 6], 1, timing)
    2
    >>> [first_load([6], 1, timing, rule) for rule in ("printed", "sentinel", "eq2")]
    [0, 1, 0]
    """
    # Index i passes if its loads and those after it are done before the CPU has computed those before it, i
    # excluded. So index 0 never passes, and the expert with the fewest tokens stays on the CPU however slow that
    # is: with hundreds of rows a layer then takes seconds where loads take a tenth.
    # Where none passes, `printed` loads the busiest all the same, as the printed loop does, `sentinel` loads none,
    # `eq2` takes the one of these two with the smaller max(TG, TC), none if equal; `eq2` also loads all experts
    # where all are in GPU_Q, index 1 passes, and equation 2 says so.
    cpu, load, _, gpu, _, in_flight = timing
    n = len(current)
    computed = sum([cpu[w] for w in current[: n - n_queued]])
    for i in range(n - n_queued, n):
        loading = in_flight + (n - i) * load + gpu
        if loading < computed:
            all_better = i == 1 and n_queued == n and loading + load < computed
            return 0 if none_better == "eq2" and all_better else i
        computed += cpu[current[i]]
    if none_better == "sentinel" or not n:
        return n
    if none_better == "printed":
        return n - 1
    every = sum([cpu[w] for w in current])
    with_one = max(in_flight + load + gpu, every - cpu[current[-1]])
    return n - 1 if with_one < every else n


def certain_for_cpu(current: Sequence[int], timing: Timing, none_better: NoneBetter = "eq2") -> int:
    """Count the experts, from the list's start, that the CPU computes whatever is predicted.

    >>> timing = Timing(cpu=[0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5], load=3, load_next=3, gpu=0.5, dense=1)
    >>> certain_for_cpu([1, 2, 6], timing), certain_for_cpu([6], timing)
    (2, 0)
    """
    # A prediction can only take experts out of GPU_Q, and a transfer under way only delays loads. So the first index
    # that passes equation 5 without either is the smallest there can be; if none passes, at most the busiest loads.
    free = timing._replace(in_flight=0)
    rule: NoneBetter = "eq2" if none_better == "eq2" else "sentinel"
    return max(0, min(first_load(current, len(current), free, rule), len(current) - 1))


def link_gap(current: Sequence[int], first: int, timing: Timing) -> float:
    """Return the link's idle time before the CPU is done (equation 6's T_gap); may be negative.

    >>> timing = Timing(cpu=[0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5], load=3, load_next=3, gpu=0.5, dense=1)
    >>> link_gap([1, 2, 6], 2, timing)
    1.0
    """
    computed = sum([timing.cpu[w] for w in current[:first]])
    return computed - timing.in_flight - (len(current) - first) * timing.load


def cross_layer_plan(
    current: Sequence[int],
    upcoming: Sequence[int],
    timing: Timing,
    hit_rate: Callable[[int], float],
    none_better: NoneBetter = "eq2",
) -> CrossLayerPlan:
    """Plan a layer and the prefetches of the next as PreSched does (its Algorithm 1).

    ``current`` and ``upcoming`` are the tokens, ascending, of each expert of this layer and, as predicted, of the next, that is
    neither on the GPU nor on its way. ``hit_rate`` is as in `prefetch_count`, ``none_better`` as in `first_load`.

    >>> timing = Timing(cpu=[0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5], load=3, load_next=3, gpu=0.5, dense=1)
    >>> plan = cross_layer_plan([1, 2, 6], [1, 5], timing, hit_rate=lambda rank: 0.5)
    >>> plan.first, plan.gap, plan.queue, round(plan.share, 3), plan.n_prefetch
    (2, 1.0, (1, 1), 0.667, 1)
    """
    queue = gpu_queue(current, upcoming, timing)
    first = first_load(current, queue[0], timing, none_better)
    gap = link_gap(current, first, timing)
    share = (gap + timing.dense) / timing.load_next
    n_prefetch = prefetch_count(share, len(upcoming), hit_rate) if queue[1] else 0
    return CrossLayerPlan(first, gap, queue, share, n_prefetch)
