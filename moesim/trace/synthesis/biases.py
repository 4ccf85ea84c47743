"""Router biases of the shipped parameters, found once: that takes seconds, and its last bits hang on the machine."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Final

from safetensors.numpy import load

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moesim.trace.synthesis.parameter_set import ParameterSet

SEED: Final = 0
"""Of the models whose biases are kept."""
FILE: Final = resources.files("moesim.trace.synthesis") / "parameters" / "biases.safetensors"


def key_of(p: ParameterSet) -> str:
    """Name all that biases follow from, but the seed: other parameters never get the biases of these."""
    numbers = {"n_layers": p.n_layers, "n_experts": p.n_experts, "top_k": p.top_k, **p.values()}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def kept_biases(p: ParameterSet, seed: int) -> NDArray[np.float32] | None:
    """Give the biases that make loads as wanted, (n_layers, n_experts) float32; None if they are not kept."""
    return load(FILE.read_bytes()).get(key_of(p)) if seed == SEED else None
