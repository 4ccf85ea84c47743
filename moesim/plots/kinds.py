"""What a kind of figure is: a function that gives data, picture and caption together."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, NamedTuple, ParamSpec

import pandas as pd
from matplotlib.figure import Figure

from moesim.plots.style import styled

_P = ParamSpec("_P")


class Drawing(NamedTuple):
    """One figure."""

    data: pd.DataFrame  # tidy, with exactly what is drawn
    figure: Figure
    caption: str  # for a paper: what is shown, on what, the labels of the numbers, and what is not exact


class Kind(Generic[_P]):
    """A kind of figure; its function takes a frame (or what `source` says), then options by name."""

    __name__: str

    def __init__(self, make: Callable[_P, Drawing], source: str, title: str) -> None:
        self.drawing = styled(make)
        # what it draws: a name of `moesim.plots.catalogue.SOURCES`
        self.source = source
        self.title = title  # one line, for listings
        update_wrapper(self, make)

    def __call__(self, *args: _P.args, **options: _P.kwargs) -> Figure:
        """Give the picture alone."""
        return self.drawing(*args, **options).figure


def kind(source: str, title: str) -> Callable[[Callable[_P, Drawing]], Kind[_P]]:
    """Make a `Kind` of a function."""
    return lambda make: Kind(make, source, title)
