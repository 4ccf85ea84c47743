"""What a kind of figure is: what it draws, on what, and what a paper says below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Kind:
    """A kind of figure; its three functions take the same arguments: a frame (or what `source` says), then options by name."""

    title: str  # one line, for listings
    # what it draws: `"rows"`, `"steps"`, `"layers"`, `"records"`, `"trace"`, `"validation"`, `"regret"` or `"whatif"`
    source: str
    data: Callable[..., pd.DataFrame]  # to a tidy frame with exactly what is drawn
    draw: Callable[..., Figure]  # to a Matplotlib figure of that frame
    # to the caption for a paper: what is shown, on what, the labels of the numbers, and what is not exact
    caption: Callable[..., str]
