"""What a kind of figure is: a function that gives data, picture and caption together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper, wraps
from typing import Generic, NamedTuple, ParamSpec

import pandas as pd
from matplotlib.figure import Figure

from moesim.core.table import frame_csv
from moesim.plots.looks import drawn_among
from moesim.plots.style import rendered, styled

_P = ParamSpec("_P")


class Drawing(NamedTuple):
    """One figure."""

    data: pd.DataFrame  # tidy, with exactly what is drawn
    figure: Figure
    caption: str  # for a paper: what is shown, on what, the labels of the numbers, and what is not exact


def written(drawing: Drawing, name: str, suffixes: Sequence[str] = ("png", "pdf")) -> dict[str, bytes]:
    """Give the files of a figure by name: pictures, data, caption."""
    files = {f"{name}.{suffix}": content for suffix, content in rendered(drawing.figure, suffixes).items()}
    files[f"{name}.csv"] = frame_csv(drawing.data)
    files[f"{name}.txt"] = (drawing.caption.strip() + "\n").encode()
    return files


class Kind(Generic[_P]):
    """A kind of figure; its function takes a frame (or what `source` says), then options by name."""

    __name__: str

    def __init__(self, make: Callable[_P, Drawing], source: str, title: str) -> None:
        self.drawing = styled(_among_its_policies(make))
        # what it draws: a name of `moesim.plots.catalogue.SOURCES`
        self.source = source
        self.title = title  # one line, for listings
        update_wrapper(self, make)

    def __call__(self, *args: _P.args, **options: _P.kwargs) -> Figure:
        """Give the picture alone."""
        return self.drawing(*args, **options).figure


def _among_its_policies(make: Callable[_P, Drawing]) -> Callable[_P, Drawing]:
    """Draw a frame with the looks that its policies have among all of it, also those that failed or are a baseline."""

    @wraps(make)
    def wrapper(*args: _P.args, **options: _P.kwargs) -> Drawing:
        frame = args[0] if args else None
        whole = frame["policy"].astype(str).tolist() if isinstance(frame, pd.DataFrame) and "policy" in frame else []
        with drawn_among(list(dict.fromkeys(whole))):
            return make(*args, **options)

    return wrapper


def kind(source: str, title: str) -> Callable[[Callable[_P, Drawing]], Kind[_P]]:
    """Make a `Kind` of a function."""
    return lambda make: Kind(make, source, title)
