"""Router biases of the shipped parameters, which take seconds to find."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from moesim.trace.format import read_container

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.synthesis.parameter_set import ParameterSet

SEED: Final = 0
"""Of the models whose biases are kept."""
FILE: Final = Path(str(resources.files("moesim.trace.synthesis"))) / "parameters" / "biases.safetensors"


def key_of(p: ParameterSet) -> str:
    """Name all that biases follow from, but the seed: other parameters never get the biases of these."""
    numbers = {"n_layers": p.n_layers, "n_experts": p.n_experts, "top_k": p.top_k, **p.values()}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def kept_biases(p: ParameterSet, seed: int) -> NDArray[np.float32] | None:
    """Return the biases that make loads as wanted, (n_layers, n_experts) float32; None if they are not kept."""
    if seed != SEED:
        return None
    arrays, _ = read_container(FILE)
    kept = arrays.get(key_of(p))
    return None if kept is None else np.array(kept)  # not a view of the file: it is changed in place
