"""Nominal rates of PCI Express."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

_EIGHT_OF_TEN, _CODED = Fraction(8, 10), Fraction(128, 130)  # bits on the wire that are data, up to generation 2 and from 3 on

LANE: Final = {
    gen: gigatransfers * coded * 10**9 / 8
    for gen, gigatransfers, coded in (
        (1, Fraction(5, 2), _EIGHT_OF_TEN), (2, 5, _EIGHT_OF_TEN), (3, 8, _CODED), (4, 16, _CODED), (5, 32, _CODED)
    )
}  # fmt: skip
"""Bytes a second of one lane and direction by generation (PCI-SIG: 2.5 to 32 GT/s, 8b/10b, then 128b/130b)."""
