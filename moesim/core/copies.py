"""How a system copies weights."""

from __future__ import annotations

from typing import NamedTuple


class Copies(NamedTuple):
    """How a system copies weights."""

    kind: str = "pinned"  # of the links' curves (`moesim.hardware.types.TRANSFERS`)
    piece: int | None = None  # bytes of a piece of a copy; None: in one
    syncs: int = 0  # times that the host waits for the GPU during one copy of an expert
