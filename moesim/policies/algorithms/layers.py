"""How far layers are from each other in a forward pass."""

from __future__ import annotations

from typing import Literal


def farthest_layers(layer: int, n_layers: int, distance: Literal["next-pass", "absolute"]) -> list[int]:
    """Order all layers by their distance from one, farthest first.

    The distance is the number of layers until the pass comes there, or the difference of the numbers (``absolute``). Of two equally
    far layers the one that has been passed comes first.

    >>> farthest_layers(2, 5, "next-pass"), farthest_layers(2, 5, "absolute")
    ([2, 1, 0, 4, 3], [0, 4, 1, 3, 2])
    """
    waits = [(j - layer - 1) % n_layers + 1 for j in range(n_layers)]
    if distance == "next-pass":
        return sorted(range(n_layers), key=lambda j: -waits[j])
    return sorted(range(n_layers), key=lambda j: (-abs(j - layer), -waits[j]))
