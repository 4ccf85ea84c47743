"""What a read rate of experts of one size says of other sizes, by hosts whose rates are known at several."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

FILE: Final = "read_rates.csv"


@cache
def _rates() -> dict[str, list[tuple[float, float]]]:
    """Read the sizes (MB) and rates (GB/s) of each known host."""
    hosts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with (Path(__file__).parent / FILE).open(newline="") as file:
        for row in csv.DictReader(file):
            hosts[row["host"]].append((float(row["mb"]), float(row["gb_per_s"])))
    return hosts


@cache
def exponents() -> tuple[float, float]:
    """Return the least and the most power of an expert's size by which the rate of a known host changes.

    >>> [round(one, 2) for one in exponents()]
    [-0.09, 0.15]
    """
    logs = [np.log(points) for points in _rates().values()]
    slopes = [float(np.polyfit(one[:, 0], one[:, 1], 1)[0]) for one in logs]
    return min(slopes), max(slopes)


def known_sizes() -> tuple[int, int]:
    """Return the smallest and the largest expert of any known host, bytes."""
    sizes = [mb for points in _rates().values() for mb, _ in points]
    return round(1e6 * min(sizes)), round(1e6 * max(sizes))


def widening(n_bytes: float, seen: Collection[float]) -> tuple[float, float]:
    """Return the logarithms by which a rate may lie below and above that of the nearest size that was seen.

    >>> widening(3e6, [3e6])
    (0.0, 0.0)
    """
    away = min((math.log(n_bytes / size) for size in seen), key=abs, default=0.0)
    ends = [0.0, *(one * away for one in exponents())]
    return min(ends), max(ends)
