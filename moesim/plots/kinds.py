"""What a kind of figure is: what it draws, on what, and what a paper says below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Kind:
    """A kind of figure; its three functions take the same arguments: a frame (or what `source` says), then options by name.

    Attributes
    ----------
    title : str
        One line, for listings.
    source : str
        What it draws: ``"rows"``, ``"steps"``, ``"layers"``, ``"records"``, ``"trace"``, ``"validation"``, ``"regret"`` or
        ``"whatif"``.
    data : callable
        To a tidy frame with exactly what is drawn.
    draw : callable
        To a Matplotlib figure of that frame.
    caption : callable
        To the caption for a paper: what is shown, on what, the labels of the numbers, and what is not exact.
    """

    title: str
    source: str
    data: Callable[..., pd.DataFrame]
    draw: Callable[..., Figure]
    caption: Callable[..., str]
