"""The plan of Pipelined Sharding: which shards of a model are pinned in the GPU's memory, streamed to it, or left to the CPU.

deepshnv/pipeshard-mlsys26-ae at 7794a3f024 (``src/llama-plan-builder.cpp``, ``llama-pipeline-executor.cpp``), a fork of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

State = Literal["pinned", "streamed", "cpu"]

SCRATCH = 1.5
"""Times the buffer of a pass that are left free."""
PARALLEL_TIERS = (4, 16, 64)


class Shard(NamedTuple):
    """A part of a layer, or the output layer, in the order of execution."""

    kind: Literal["attention", "ffn", "output"]
    n_bytes: int  # of weights; of an FFN those of all experts
    # gpu, cpu: time of one pass on either, any unit
    gpu: float
    cpu: float
    kv_bytes: int = 0  # of the cache that it reads
    new_kv_bytes: int = 0  # what a pass adds to it


class ShardPlan(NamedTuple):
    """What becomes of each shard."""

    strategy: str
    states: tuple[State, ...]
    slots: int  # buffers that shards are streamed to
    time: float  # predicted, of one pass


def tier_of(rows: int, parallel: bool) -> int:
    """Return the batch size that a pass is planned for: the least tier that holds it.

    Tiers are 1, with several sequences also 4, 16 and 64, and 512, 1024, 2048 ... for prompts.

    >>> [tier_of(rows, True) for rows in (1, 2, 5, 65, 513)], tier_of(5, False)
    ([1, 4, 16, 512, 1024], 512)
    """
    if rows <= 1:
        return 1
    fit = next((tier for tier in PARALLEL_TIERS if parallel and rows <= tier), 0)
    return fit or max(512, 1 << (rows - 1).bit_length())


def predicted_time(shards: Sequence[Shard], states: Sequence[State], bytes_per_time: float, cpu_rate: float = 1.0) -> float:
    """Predict the time of a pass.

    Parameters
    ----------
    shards : sequence of Shard
        In the order of execution.
    states : sequence of {"pinned", "streamed", "cpu"}
        Of each.
    bytes_per_time : float
        Of the link, in the unit of the shards' times.
    cpu_rate : float
        Share of its speed that the CPU keeps while something is streamed.

    Returns
    -------
    float
        Over all splits the longer of computing and of copying the next streamed split, with the cache that it reads, and the
        time in which what is added to streamed caches comes back.

    Notes
    -----
    A split is a streamed shard, or a run of shards that are pinned or on the CPU. A copy begins with the streamed split before, or
    with the first split, and is counted there; the copy of the first split itself hides behind nothing.

    Examples
    --------
    One shard of 6 ms on the CPU and two of 1 ms and 300 MB that are streamed at 25 GB/s; bytes per ms:

    >>> streamed = Shard("ffn", 300_000_000, 1, 9)
    >>> predicted_time([Shard("ffn", 0, 1, 6), streamed, streamed], ["cpu", "streamed", "streamed"], 25e6)
    25.0
    """
    splits: list[tuple[State, float, float]] = []  # state, computing, copying
    download = 0.0
    for shard, state in zip(shards, states, strict=True):
        time = shard.cpu if state == "cpu" else shard.gpu
        if state == "streamed":
            splits.append((state, time, (shard.n_bytes + shard.kv_bytes) / bytes_per_time))
            download += shard.new_kv_bytes / bytes_per_time
        elif splits and splits[-1][0] == state:
            splits[-1] = (state, splits[-1][1] + time, 0.0)
        else:
            splits.append((state, time, 0.0))
    total = splits[0][2] if splits else 0.0
    for i, (state, time, _) in enumerate(splits):
        begins = i == 0 or state == "streamed"
        copy = next((copying for later, _, copying in splits[i + 1 :] if later == "streamed"), 0.0) if begins else 0.0
        total += max(time / cpu_rate if state == "cpu" and copy else time, copy)
    return total + download


def shard_plan(
    shards: Sequence[Shard], budget: int, bytes_per_time: float, *, scratch: int = 0, cpu_rate: float = 1.0
) -> ShardPlan:
    """Choose the plan with the least predicted time among the best of five strategies.

    Parameters
    ----------
    shards : sequence of Shard
        Attention and FFN of each layer in turn, then the output layer if there is a choice about it.
    budget : int, bytes
        Of the GPU's memory.
    bytes_per_time : float
        Of the link, in the unit of the shards' times.
    scratch : int, bytes
        Buffer of a pass.
    cpu_rate : float
        Share of its speed that the CPU keeps while something is streamed.

    Returns
    -------
    ShardPlan
        Of equals the first, in this order; "static attention" if none fits.

    Notes
    -----
    ``all``: everything is pinned. ``all but output``: the output layer is the CPU's. ``static attention``: attention is pinned from
    the first layer on, then the output layer, then FFNs from the first layer on; the rest is the CPU's. ``streamed attention``: the
    same with one buffer; attention that is not pinned is streamed, and once all of it is pinned, the FFNs that are not. ``all
    streamed``: the first shards are pinned, all others streamed through two buffers. Of each the longest prefix is taken for which
    1.5 times the scratch, what is pinned with its caches, and the buffers, each as large as the largest shard that is streamed
    with its cache, fit the budget. What takes no memory counts as pinned.

    Examples
    --------
    >>> layers = [Shard("attention", 1, 1, 9), Shard("ffn", 8, 1, 20)] * 4
    >>> [shard_plan([*layers, Shard("output", 2, 1, 9)], budget, 1.0).strategy for budget in (40, 36, 20)]
    ['all', 'all but output', 'streamed attention']
    """
    found = [_planned(name, options, shards, budget, scratch, bytes_per_time, cpu_rate) for name, options in _options(shards)]
    fitting = [plan for plan, fits in found if fits]
    if not fitting:
        return next(plan for plan, _ in found if plan.strategy == "static attention")
    return min(fitting, key=lambda plan: plan.time)


_Options = tuple[list[Sequence[State]], int, int]  # states by the length of the prefix, buffers, bytes of each


def _options(shards: Sequence[Shard]) -> list[tuple[str, list[_Options]]]:
    """List the choices of each strategy, those that are preferred first."""
    kinds = [shard.kind for shard in shards]
    attention, ffn = ([i for i, kind in enumerate(kinds) if kind == one] for one in ("attention", "ffn"))
    output = [i for i, kind in enumerate(kinds) if kind == "output"]
    attention_first = [*attention, *output, *ffn]
    sizes = [shard.n_bytes + shard.kv_bytes for shard in shards]

    def largest(of: Sequence[int]) -> int:
        return max((sizes[i] for i in of), default=0)

    def prefixes(order: Sequence[int], low: int, high: int, rest: Callable[[str], State]) -> list[Sequence[State]]:
        pinned = [{*order[:n], *(i for i, size in enumerate(sizes) if not size)} for n in range(low, high + 1)]
        return [["pinned" if i in these else rest(kind) for i, kind in enumerate(kinds)] for these in pinned]

    n, n_attention = len(shards), len(attention)
    streamed_ffn = prefixes(attention_first, n_attention, n, lambda kind: "streamed" if kind == "ffn" else "cpu")
    streamed_attention = prefixes(attention_first, 0, n_attention - 1, lambda kind: "streamed" if kind == "attention" else "cpu")
    return [
        ("all", [([["pinned"] * n], 0, 0)]),
        ("all but output", [([["cpu" if kind == "output" else "pinned" for kind in kinds]], 0, 0)]),
        ("static attention", [(prefixes(attention_first, 0, n, lambda kind: "cpu"), 0, 0)]),
        ("streamed attention", [(streamed_ffn, 1, largest(ffn)), (streamed_attention, 1, largest(attention))]),
        ("all streamed", [(prefixes(range(n), 0, n, lambda kind: "streamed"), 2, largest(range(n)))]),
    ]


def _planned(
    name: str, options: Sequence[_Options], shards: Sequence[Shard], budget: int, scratch: int, bytes_per_time: float,
    cpu_rate: float,
) -> tuple[ShardPlan, bool]:  # fmt: skip
    """Take the longest prefix that fits of the first choice of which one does."""

    def fits(states: Sequence[State], buffers: int) -> bool:
        pinned = sum(s.n_bytes + s.kv_bytes for s, state in zip(shards, states, strict=True) if state == "pinned")
        return SCRATCH * scratch + pinned + buffers <= budget

    for by_length, slots, size in options:
        low, high = -1, len(by_length) - 1
        while low < high:  # the longest that fits is in low .. high
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(by_length[middle], slots * size) else (low, middle - 1)
        if low >= 0:
            break
    states = tuple(by_length[max(low, 0)])
    return ShardPlan(name, states, slots, predicted_time(shards, states, bytes_per_time, cpu_rate)), low >= 0
