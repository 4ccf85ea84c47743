"""Numbers of everything that can be copied: each routed expert, at each width that the model has."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.model import ModelSpec


class Weights:
    """Units are dense integers. At full width a unit is ``layer * n_experts + expert``; the other widths follow in blocks."""

    def __init__(self, model: ModelSpec) -> None:
        self.n_layers, self.n_experts = model.n_layers, model.n_experts
        self.widths: Sequence[float] = model.widths
        self.block = model.n_layers * model.n_experts  # units of one width
        # Of each shelf, which is a layer at a width.
        self.n_bytes = [model.expert_bytes(layer, bits) for bits in self.widths for layer in range(model.n_layers)]

    def __len__(self) -> int:
        return self.block * len(self.widths)

    def first(self, bits: float | None) -> int:
        """Return the unit of layer 0's expert 0 at a width. Raises ValueError if the model has none of these bits."""
        return 0 if bits is None else self.block * self.widths.index(bits)

    def bits(self, unit: int) -> float | None:
        """Return the width of a unit; None if it is the full one."""
        return self.widths[unit // self.block] if unit >= self.block else None
