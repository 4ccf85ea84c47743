"""Numbers that tables show of a result row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moesim.metrics.fresh import is_exact

Row = Mapping[str, Any]


def number(row: Row, key: str, scale: float = 1.0) -> float | None:
    """Give a value of a row times a scale; None if it is no finite number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value * scale


def fresh_share(row: Row) -> float | None:
    """Give the share of gate weight served as routed while decoding (of the whole run if nothing was decoded)."""
    share = number(row, "fidelity_fresh_decode")
    return number(row, "fidelity_fresh") if share is None else share


def is_lossy(row: Row) -> bool:
    """Tell whether a run computed anything else than the model asked for, in prefill or decoding."""
    shares = (number(row, "fidelity_fresh"), number(row, "fidelity_fresh_decode"))
    return any(share is not None and not is_exact(share) for share in shares) or bool(number(row, "n_inexact_slots"))


def moved_mb(row: Row, *causes: str) -> float | None:
    """Give the MB over the links for each generated token, of some causes."""
    tokens = number(row, "n_generated_tokens")
    known = [part for cause in causes if (part := number(row, f"bytes_{cause}")) is not None]
    return sum(known) / tokens / 1e6 if tokens and known else None


def busy_percent(row: Row, kind: str) -> float | None:
    """Give the mean busy share of the devices of a kind, in percent."""
    names = [key for key in row if key.startswith(f"utilisation.{kind}") and "->" not in key]
    shares = [share for name in names if (share := number(row, name, 100)) is not None]
    return sum(shares) / len(shares) if shares else None
