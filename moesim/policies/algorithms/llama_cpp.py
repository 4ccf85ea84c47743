"""llama.cpp's choice of layers for the GPU, by its two options or by its search in memory, and when it copies weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import ceil
from typing import Literal, NamedTuple


def first_layers_on_gpu(n_layers: int, n_gpu_layers: int | None, n_cpu_moe: int = 0) -> tuple[int, int]:
    """Find the first layer that is on the GPU, and the first of which the experts are there, too.

    Parameters
    ----------
    n_layers : int
        Layers of the model, dense ones included.
    n_gpu_layers : int or None
        Layers for the GPU, from the end, of which the output layer is the first; None: all.
    n_cpu_moe : int
        First layers whose experts stay on the CPU, wherever the rest of the layer is.

    Returns
    -------
    tuple of int
        Layer numbers; ``n_layers`` where there is no such layer.

    Examples
    --------
    >>> [first_layers_on_gpu(4, n) for n in (0, 1, 2, 5, 9)]
    [(4, 4), (4, 4), (3, 3), (0, 0), (0, 0)]
    >>> first_layers_on_gpu(4, None, 3), first_layers_on_gpu(4, 3, 1), first_layers_on_gpu(4, 3, 9)
    ((0, 3), (2, 2), (2, 4))
    """
    first = 0 if n_gpu_layers is None else min(max(n_layers + 1 - n_gpu_layers, 0), n_layers)
    return first, max(first, min(n_cpu_moe, n_layers))


class Fit(NamedTuple):
    """What `--fit` puts on one GPU."""

    dense: int  # layers whose dense part is there, counted from the last
    full: int  # layers whose experts are there, too, counted from the first
    fraction: Literal["none", "up", "gate and up"]  # matrices of the next layer's experts that are there


def fitted(dense: Sequence[int], experts: Sequence[int], rest: int, target: int, n_mats: int = 3) -> Fit:
    """Search what fits on one GPU, as llama.cpp's ``--fit`` does for a Mixture-of-Experts model.

    Parameters
    ----------
    dense, experts : sequence of int, bytes
        Of each layer: what is no routed expert, its KV cache included, and all its routed experts.
    rest : int, bytes
        What is on the GPU in any case: the output layer, buffers.
    target : int, bytes
        Memory that may be used: what is free less the margin.
    n_mats : int
        Matrices of an expert; without a gate, "gate and up" is all but the last.

    Returns
    -------
    Fit

    Notes
    -----
    If all fits, nothing is searched. Else all experts begin on the host; dense parts come to the GPU from the last layer on, and
    then, if all of them fit, experts from the first layer on. Both counts use at most the target. Of the next layer's experts a
    part comes too, if what is used stays strictly below it: up, and if that fits, gate and up.

    References
    ----------
    ggml-org/llama.cpp, ``common/fit.cpp`` at 08033df02c.

    Examples
    --------
    >>> fitted([10] * 4, [90] * 4, rest=5, target=250), fitted([10] * 4, [90] * 4, rest=5, target=34)
    (Fit(dense=4, full=2, fraction='none'), Fit(dense=2, full=0, fraction='none'))
    >>> fitted([10] * 4, [90] * 4, rest=5, target=256), fitted([10] * 4, [90] * 4, rest=5, target=286)
    (Fit(dense=4, full=2, fraction='up'), Fit(dense=4, full=2, fraction='gate and up'))
    """
    n_layers = len(dense)
    by_dense = list(accumulate(reversed(dense), initial=rest))
    by_full = list(accumulate(experts, initial=by_dense[-1]))
    if by_full[-1] <= target:
        return Fit(n_layers, n_layers, "none")
    n_dense = false_position(by_dense.__getitem__, target, n_layers)
    if n_dense < n_layers:
        return Fit(n_dense, 0, "none")
    full = false_position(by_full.__getitem__, target, n_layers)

    def joins(mats: int) -> bool:
        return by_full[full] + ceil(experts[full] * mats / n_mats) < target

    return Fit(n_dense, full, "gate and up" if joins(max(1, n_mats - 1)) else "up" if joins(1) else "none")


def false_position(memory: Callable[[int], int], target: int, high: int) -> int:
    """Find the largest count up to ``high`` that uses at most a target, asking for the memory of few counts.

    Each next count is interpolated between one that fits and one that does not, at least one away from either. 0 is returned
    whether it fits or not. ``memory`` must not fall with the count.

    >>> asked = []
    >>> false_position(lambda n: asked.append(n) or 100 * n, 730, 48), asked
    (7, [48, 0, 7, 8])
    """
    over = memory(high)
    if over <= target:
        return high
    low, used = 0, memory(0)
    while high - low > 1 and used <= target:
        gap = high - low
        step = min(max(gap * (target - used) // (over - used), 1), gap - 1)
        found = memory(low + step)
        if found <= target:
            low, used = low + step, found
        else:
            high, over = low + step, found
    return low


def rows_to_offload(n_experts: int, top_k: int, per_expert: int) -> int:
    """Return from how many rows on ik_llama.cpp copies experts: those with which each expert gets so many on average.

    References
    ----------
    ikawrakow/ik_llama.cpp, PR #520: rows x top-k >= 32 x experts.

    Examples
    --------
    DeepSeek-V3, Qwen3-30B-A3B, gpt-oss-120b and Mixtral:

    >>> [rows_to_offload(*model, 32) for model in ((256, 8), (128, 8), (128, 4), (8, 2))]
    [1024, 512, 1024, 128]
    """
    return -(-per_expert * n_experts // top_k)
