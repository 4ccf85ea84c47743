"""Counting the rows that predictions give each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray


def add_rows(counts: dict[int, int], ids: NDArray[Any], top_k: int) -> dict[int, int]:
    """Count the rows of each expert among the best ``top_k`` of every row of ids, on top of what is counted; return the counts.

    >>> import numpy as np
    >>> add_rows({3: 1}, np.array([[1, 3, 0], [1, 2, 0]]), 2)
    {3: 2, 1: 2, 2: 1}
    """
    for row in ids[:, :top_k].tolist():
        for expert in row:
            counts[expert] = counts.get(expert, 0) + 1
    return counts


def top_counted(counts: Mapping[int, int], size: int) -> list[int]:
    """Return up to ``size`` experts with the most rows, most first, ties to the lower id.

    >>> top_counted({3: 3, 2: 1, 1: 3}, 2)
    [1, 3]
    """
    return sorted(counts, key=lambda expert: (-counts[expert], expert))[:size]
