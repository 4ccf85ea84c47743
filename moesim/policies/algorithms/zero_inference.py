"""ZeRO-Inference's look-ahead: how many tensors are copied before they are used."""

from __future__ import annotations

from collections.abc import Sequence


def tensors_ahead(
    sizes: Sequence[int], live: int, *, bucket: int = 50_000_000, max_live: int = 1_000_000_000,
) -> int:  # fmt: skip
    """Return how many of the tensors that follow are copied ahead: until the window is filled, the last may exceed it.

    Parameters
    ----------
    sizes : sequence of int, elements
        Of the tensors that follow in recorded order.
    live : int, elements
        That are on the GPU.
    bucket : int, elements
        ``stage3_prefetch_bucket_size``.
    max_live : int, elements
        ``stage3_max_live_parameters``.

    Returns
    -------
    int
        Number of tensors.

    References
    ----------
    DeepSpeed, ``partitioned_param_coordinator.py``.

    Examples
    --------
    One matrix of a Mixtral expert fills the window; while a layer's experts are there, nothing is copied ahead.

    >>> matrix = 4096 * 14336
    >>> tensors_ahead([matrix] * 24, 0), tensors_ahead([matrix] * 24, 8 * 3 * matrix)
    (1, 0)
    """
    window = min(max_live - live, bucket)
    n = ahead = 0
    while n < len(sizes) and ahead < window:
        ahead += sizes[n]
        n += 1
    return n
