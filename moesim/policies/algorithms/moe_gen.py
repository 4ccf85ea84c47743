"""MoE-Gen's table of how many queries each module takes at a time."""

from __future__ import annotations

from typing import NamedTuple


class ModuleBatches(NamedTuple):
    """Queries that a module takes at a time; the experts' part of decoding takes the whole batch."""

    attention_prefill: int
    experts_prefill: int
    attention_decode: int


def module_batches(gpu_gb: float, context: int) -> ModuleBatches:
    """Look up the sizes for Mixtral-8x7B.

    Parameters
    ----------
    gpu_gb : float, GB
        Memory of the GPU: twice the sizes for 47 to 49 GB, three times from 78 GB on.
    context : int, tokens
        Longest sequence; beyond 544 attention takes fewer queries while decoding.

    References
    ----------
    EfficientMoE/MoE-Gen at f83b812f81.

    Examples
    --------
    >>> module_batches(24, 544)
    ModuleBatches(attention_prefill=200, experts_prefill=400, attention_decode=400)
    >>> module_batches(80, 1088).attention_decode
    600
    """
    factor = 3 if gpu_gb >= 78 else 2 if 47 <= gpu_gb <= 49 else 1
    return ModuleBatches(200 * factor, 400 * factor, 400 * factor * 544 // max(544, context))
