"""How alike the states are that the routers of neighbouring layers read: why gate reuse and residuals predict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def state_cosine(inputs: NDArray[Any], residual: NDArray[Any] | None = None) -> NDArray[np.float64]:
    """Compute the cosine of what one router reads with what the next one reads (DALI, 2026, Table 8)."""
    n_layers = inputs.shape[1]
    result = np.empty(n_layers - 1)
    for layer in range(n_layers - 1):
        here, there = (np.asarray(inputs[:, at], np.float32) for at in (layer, layer + 1))
        if residual is not None:
            here = here + np.asarray(residual[layer], np.float32)
        length = np.linalg.norm(here, axis=1) * np.linalg.norm(there, axis=1)
        product = np.einsum("nh,nh->n", here, there)
        result[layer] = np.divide(product, length, out=np.zeros_like(product), where=length > 0).mean(dtype=np.float64)
    return result
