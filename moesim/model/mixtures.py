"""Bits of routed experts by the name of a llama.cpp quantisation: rows that blocks of 256 weights do not fill take other types.

Read in llama.cpp's ``src/llama-quant.cpp`` at commit 007dbbf3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moesim.model.spec import ModelSpec

BLOCK: Final = 256
"""Weights of a row that a K-quant packs together."""
_WIDER: Final = {
    "Q2_K": 4.5 - 2.625, "Q3_K": 4.5 - 3.4375, "Q4_K": 5.5 - 4.5, "Q5_K": 6.0 - 5.5, "Q6_K": 8.5 - 6.5625, "IQ4_XS": 4.5 - 4.25,
}  # fmt: skip
"""Bits by which the type with blocks of 32 is wider: Q4_0, Q4_0, Q5_0, Q5_1, Q8_0, IQ4_NL."""
_MIXED: Final[Mapping[str, tuple[str, Mapping[str, float]]]] = {
    "Q2_K": ("Q2_K", {"Q3_K": 1}), "Q3_K_M": ("Q3_K", {"Q4_K": 15 / 16, "Q5_K": 1 / 16}), "Q4_K_S": ("Q4_K", {"Q4_K": 1}),
    "Q4_K_M": ("Q4_K", {"Q4_K": 1 / 2, "Q6_K": 1 / 2}), "Q5_K_S": ("Q5_K", {"Q5_K": 1}),
    "Q5_K_M": ("Q5_K", {"Q5_K": 1 / 2, "Q6_K": 1 / 2}), "Q6_K": ("Q6_K", {"Q6_K": 1}), "IQ4_XS": ("IQ4_XS", {"IQ4_XS": 1}),
}  # fmt: skip
"""Type of the matrices into an expert's middle, and shares of layers by the type of the one out of it."""


def wider_bits(name: str, model: ModelSpec) -> float:
    """Return the bits that a weight of an expert takes on average beyond those of a model whose rows fill blocks.

    >>> from moesim.model import load_model
    >>> wider_bits("Q2_K", load_model("glm-4.5-air")), wider_bits("Q2_K", load_model("qwen3-30b-a3b"))
    (0.3541666666666667, 0.0)
    """
    if name not in _MIXED:
        return 0.0
    into, out = _MIXED[name]
    shape = model.shape
    wide, middle = (model.hidden, model.expert_intermediate) if shape is None else (shape.expert_input, shape.expert_width)
    first = _WIDER[into] if wide % BLOCK else 0.0
    last = sum(share * _WIDER[each] for each, share in out.items()) if middle % BLOCK else 0.0
    return ((model.n_mats - 1) * first + last) / model.n_mats
