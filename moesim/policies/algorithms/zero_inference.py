"""ZeRO-Inference's choices: how many tensors are copied before they are used, and which leave after use."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

PERSISTENCE_THRESHOLD = 100_000
"""``stage3_param_persistence_threshold``, elements."""


def tensors_ahead(
    sizes: Sequence[int], live: int, *, bucket: int = 50_000_000, max_live: int = 1_000_000_000, moving: Container[int] = (),
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
    moving : container of int
        Positions in ``sizes`` of tensors that are still on their way from NVMe; the first of them ends the look-ahead.

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
    while n < len(sizes) and ahead < window and n not in moving:
        ahead += sizes[n]
        n += 1
    return n


def released(
    used: Mapping[str, int], later: Sequence[Mapping[str, int]], *, persistence_threshold: int = PERSISTENCE_THRESHOLD,
    max_reuse_distance: int = 1_000_000_000,
) -> list[str]:  # fmt: skip
    """Return which tensors of a submodule leave the GPU after it: those that are neither small nor used again soon.

    Parameters
    ----------
    used : mapping of str to int, elements
        Tensors of the submodule.
    later : sequence of mapping of str to int, elements
        Tensors of the submodules that follow in recorded order.
    persistence_threshold : int, elements
        ``stage3_param_persistence_threshold``: tensors up to this size stay.
    max_reuse_distance : int, elements
        ``stage3_max_reuse_distance``: what a later submodule uses stays, if those between have fewer elements.

    Returns
    -------
    list of str
        In the order of ``used``.

    References
    ----------
    DeepSpeed, ``partitioned_param_coordinator.py``.

    Examples
    --------
    >>> tied = {"embedding": 131_072_000, "norm": 4096}
    >>> released(tied, [{"layers": 900_000_000}, tied]), released(tied, [{"layers": 46_700_000_000}, tied])
    ([], ['embedding'])
    """
    again: set[str] = set()
    passed = 0
    for tensors in later:
        if passed >= max_reuse_distance:
            break
        again.update(tensors)
        passed += sum(tensors.values())
    return [name for name, n in used.items() if n > persistence_threshold and name not in again]
