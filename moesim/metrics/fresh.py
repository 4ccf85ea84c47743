"""The share of gate weight computed as routed, as tables and figures print it: one rule for all of them."""

from __future__ import annotations

import math
from typing import Final

_EXACT: Final = 1 - 1e-9  # sums of gate weights are rounded


def is_exact(share: float) -> bool:
    """Whether a share of gate weight is all of it."""
    return share >= _EXACT


def fresh_percent(share: float) -> float:
    """Give the share in per cent, with one decimal, rounded down: never 100 of what is not exact.

    >>> fresh_percent(0.9567), fresh_percent(0.99999), fresh_percent(0.568), fresh_percent(1.0)
    (95.6, 99.9, 56.8, 100.0)
    """
    return 100.0 if is_exact(share) else math.floor(1000 * share + 1e-7) / 10  # 1000 * 0.568 is 567.99...


def fresh_cell(share: float) -> str:
    """Write the cell of a table under ``fresh %``; an asterisk marks what is not exact.

    >>> fresh_cell(0.99999), fresh_cell(1.0)
    ('99.9*', '100')
    """
    return "100" if is_exact(share) else f"{fresh_percent(share):.1f}*"
