"""Bits per weight by the names that engines print: of experts, and of the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from moesim.core.limits import BITS
from moesim.errors import ConfigError

QUANTS: Final[Mapping[str, tuple[float, float]]] = {
    "F32": (32, 32),
    "F16": (16, 16),
    "BF16": (16, 16),
    "FP8": (8, 8),
    "Q8_0": (8.5, 8.5),
    "Q6_K": (6.5625, 6.5625),
    "Q5_K_M": (5.69, 5.9),
    "Q5_K_S": (5.5, 5.6),
    "Q4_K_M": (4.85, 5.35),
    "Q4_K_S": (4.5, 4.8),
    "Q4_0": (4.5, 4.7),
    "IQ4_XS": (4.25, 5.17),
    "IQ4_NL": (4.5, 4.98),
    "Q3_K_M": (3.9, 4.6),
    "Q2_K": (2.96, 4.0),
    "MXFP4": (4.25, 8.5),
}
"""By the block formats of ggml and the mixtures that llama.cpp's quantiser takes by name; files differ by some per cent."""

_TYPES: Final = re.compile(r"(IQ\d_\w+|Q\d_\w+|BF16|F16|F32|MXFP4|FP8)", re.IGNORECASE)


def read_bits(text: str, place: str) -> list[dict[str, Any]]:
    """Read bits per weight.

    >>> read_bits("4.5|Q8_0", "")
    [{'expert_bits': 4.5, 'other_bits': 4.5}, {'expert_bits': 8.5, 'other_bits': 8.5}]
    """
    if not text:
        return [{}]
    return [_one(choice.strip(), place) for choice in text.split("|")]


def _one(text: str, place: str) -> dict[str, Any]:
    if text.upper() in QUANTS:
        experts, rest = QUANTS[text.upper()]
        return {"expert_bits": experts, "other_bits": rest}
    parts = text.split("/")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(BITS.hold(number) for number in numbers):
        raise ConfigError(
            f"{place}: bits: expected bits such as 4.5, experts/rest such as 4.85/5.35, several joined by |, or one of "
            f"{', '.join(QUANTS)}, got '{text}'; correct it"
        )
    return {"expert_bits": numbers[0], "other_bits": numbers[-1]}


def bits_in(text: str) -> str:
    """Find the name of a quantisation in a type or file name; empty if there is none that is known.

    >>> bits_in("qwen3moe 30B.A3B Q4_K - Medium"), bits_in("gpt-oss 20B MXFP4 MoE")
    ('Q4_K_M', 'MXFP4')
    """
    words = re.sub(r"_K - (Small|Medium|Large)", lambda found: f"_K_{found[1][0]}", text, flags=re.IGNORECASE)
    for found in _TYPES.findall(words):
        name = found.upper()
        while name and name not in QUANTS:
            name = name.rpartition("_")[0]
        if name:
            return str(name)
    return ""
