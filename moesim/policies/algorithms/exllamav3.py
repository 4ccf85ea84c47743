"""exllamav3's choices: which experts change places, and from how many rows on one is streamed."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def swaps(
    counts: Sequence[float], on_gpu: Collection[int], budget: int, *, floor: float = 8.0, hysteresis: float = 2.0
) -> list[tuple[int, int]]:
    """Choose the experts of a layer that change places at a sweep.

    Parameters
    ----------
    counts : sequence of float, shape (n_experts,)
        Selections of each expert, halved at each sweep.
    on_gpu : collection of int
        Experts that are there; all others are on the CPU.
    budget : int
        Most pairs.
    floor : float
        So many times the mean count an expert of the CPU must have.
    hysteresis : float
        So many times the count of its partner, or of 1 if that is less, it must have.

    Returns
    -------
    list of (int, int)
        The one that leaves the GPU and the one that comes: the least and the most selected first, of equals the lower id of those
        that leave, the higher of those that come. The first pair that is not far enough apart ends it.

    References
    ----------
    turboderp-org/exllamav3, ``block_sparse_mlp_cpu.py`` at 0cec381390, and of the wheel 1.6.5.

    Examples
    --------
    >>> counts = [2.0] * 64
    >>> for expert, count in {5: 90, 20: 60, 50: 400, 60: 120, 63: 30}.items():
    ...     counts[expert] = count
    >>> swaps(counts, range(48), 64), swaps(counts, range(48), 384, floor=2.0, hysteresis=1.25)
    ([(0, 50), (1, 60)], [(0, 50), (1, 60), (2, 63)])
    """
    least = floor * sum(counts) / len(counts)
    there = sorted((counts[e], e) for e in on_gpu)
    others = sorted(((count, e) for e, count in enumerate(counts) if e not in on_gpu), reverse=True)
    found: list[tuple[int, int]] = []
    for (cold, out), (hot, new) in zip(there, others, strict=False):
        if len(found) >= budget or hot < max(hysteresis * max(cold, 1.0), least):
            break
        found.append((out, new))
    return found


def rows_to_stream(gb_per_s: float, rule: str = "root") -> int:
    """Return from how many rows on an expert of the CPU is streamed to the GPU, by the measured rate of the link.

    Parameters
    ----------
    gb_per_s : float, 1e9 bytes/s
        From pinned memory to the GPU.
    rule : {"root", "linear"}
        8 rows times the root of 25 over the rate, rounded, and at least 8 (wheel 1.6.5); or 16 times 25 over the rate, rounded down,
        and at least 16 (commit 0cec381390).

    Examples
    --------
    >>> [rows_to_stream(rate, "linear") for rate in (25, 12, 55)], [rows_to_stream(rate) for rate in (57, 29, 6.7)]
    ([16, 33, 16], [8, 8, 15])
    """
    deficit = 25.0 / max(gb_per_s, 0.5)
    return max(8, round(8 * deficit**0.5)) if rule == "root" else max(16, int(16 * deficit))
