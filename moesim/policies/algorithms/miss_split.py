"""How many misses of a layer visit are copied now, so that the link and the CPU share them."""

from __future__ import annotations

SHARE_UNIT = 1 << 16


def copies_by_time(n_misses: int, copy: float, gpu: float, cpu: float, cpu_first: float = 0, both: float = 0) -> int:
    """Return how many misses to copy and compute on the GPU, by the times of both ways.

    Parameters
    ----------
    n_misses : int
        Experts that are not cached, n.
    copy : float
        Time of one expert over the link; all times in one unit.
    gpu : float
        What the GPU adds.
    cpu : float
        Time of one expert on the CPU.
    cpu_first : float
        What the CPU takes before its first expert.
    both : float
        Time of one expert if link and CPU read the host's memory together.

    Returns
    -------
    int
        The f with the least max(f copy + gpu; cpu_first + (n - f) cpu if n > f; n both if 0 < f < n); of equals the largest
        (moe-speed-of-light, rule of its FETCH table).

    Examples
    --------
    >>> [copies_by_time(n, copy=530, gpu=37, cpu=220.8, cpu_first=20, both=176.7) for n in range(5)]
    [0, 0, 0, 1, 1]
    """

    def time(f: int) -> float:
        on_cpu = n_misses - f
        return max(f * copy + gpu, cpu_first + on_cpu * cpu if on_cpu else 0, n_misses * both if 0 < f < n_misses else 0)

    return min(range(n_misses, -1, -1), key=time)


def copies_by_share(n_misses: int, share: float) -> int:
    """Return how many misses to copy, by the link's share of the rates of link and CPU.

    Parameters
    ----------
    n_misses : int
        Experts that are not cached, m.
    share : float
        p: the link's rate over the sum of both, measured while both run; counted in 1/65536.

    Returns
    -------
    int
        Of floor(m p) and the next the one with the smaller max(f (1 - p), (m - f) p); of equals the smaller (FreeToken).

    Examples
    --------
    >>> [copies_by_share(m, 0.281) for m in range(11)]
    [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]
    """
    p = round(share * SHARE_UNIT)
    low = n_misses * p // SHARE_UNIT
    return min((low, min(low + 1, n_misses)), key=lambda f: max(f * (SHARE_UNIT - p), (n_misses - f) * p))
