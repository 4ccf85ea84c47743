"""Widths of figures: that of each kind, or one that is asked for, which is one setting of a block of drawing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from moesim.errors import ConfigError

COLUMN: Final = 3.35
"""Width of a figure for one column of a paper, in inches."""
TEXT: Final = 7.0
"""Width of a figure for both columns, in inches."""
WIDTHS: Final = {"column": COLUMN, "page": TEXT, "slide": 20 / 3}
"""Widths by name, in inches. That of a slide is half of one of 13.33 inches: enlarged to fill it, text has 13 points and more."""
_LIMITS: Final = (2.5, 20.0)  # inches
_width: ContextVar[float | None] = ContextVar("width", default=None)
_NARROW: Final = 5.0  # inches: a narrower figure has its panels one above another, and its legend above them


@contextmanager
def drawn_wide(width: float | None) -> Iterator[None]:
    """Draw the figures of a block as wide as this, in inches; None: as wide as each kind is by itself."""
    token = _width.set(width)
    try:
        yield
    finally:
        _width.reset(token)


def parse_width(asked: str | float, place: str) -> float:
    """Read the width of a figure: a name of `WIDTHS`, or inches."""
    if asked in WIDTHS:
        return WIDTHS[str(asked)]
    low, high = _LIMITS
    try:
        inches = float(asked)
    except ValueError:
        inches = math.nan
    if not low <= inches <= high:
        raise ConfigError(f"{place}: expected {', '.join(WIDTHS)}, or {low:g} to {high:g} inches, got '{asked}'")
    return inches


def width_for(natural: float) -> float:
    """Give the width of a figure: the one asked for, else its own."""
    asked = _width.get()
    return natural if asked is None else asked


def is_narrow(width: float) -> bool:
    """Whether a figure is too narrow for panels side by side, or for a legend beside its axes."""
    return width < _NARROW
