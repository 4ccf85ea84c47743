"""Read rates of experts by size: from rates of one size to others, by hosts whose rates are known at several."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from moesim.studies.identify.cases import Case
from moesim.studies.identify.fit import Machine

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


def expert_size(case: Case) -> int:
    """Return the bytes of an expert of a row's model, the mean over layers."""
    sizes = [case.model.expert_bytes(layer) for layer in range(case.model.n_layers)]
    return round(sum(sizes) / len(sizes))


def knows_sizes(machine: Machine) -> bool:
    """Whether the profile has the host's rates by size, none of them assumed."""
    points = machine.points
    return bool(points) and all(machine.base.numbers[key].source != "assumed" for key in points)


def rates_by_size(machine: Machine, number: dict[str, Any], seen: Collection[int]) -> list[dict[str, Any]]:
    """Write the host's one rate at the sizes that rows had, and at others with the spread of known hosts."""
    if machine.points or machine.base.devices[machine.cpu].role != "host":
        return []
    rates = []
    smallest, largest = known_sizes()
    for size in sorted({*seen, min(smallest, *seen), max(largest, *seen)}):
        if size in seen:
            rates.append({"bytes": size, "bytes_per_s": number})
            continue
        low, high = (float(f"{end * math.exp(by):.6g}") for end, by in zip(number["interval"], widening(size, seen), strict=True))
        why = "moesim calibrate: no row has experts of this size; the rate of others, as far as known hosts differ by size"
        other = {"value": number["value"], "source": "assumed", "why": why, "interval": [low, high]}
        rates.append({"bytes": size, "bytes_per_s": other})
    return rates if len(rates) > 1 else []


def sizes_seen(cases: Sequence[Case], status: Sequence[str]) -> list[int]:
    """List the sizes of experts of the rows that were used."""
    return sorted({expert_size(case) for case, one in zip(cases, status, strict=True) if one == "used"})
