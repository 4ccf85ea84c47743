"""Style, widths, looks of policies, legends, corner labels and files of all figures.

A figure is drawn for the screen, with a title and the source of its numbers, or for a paper, where the
caption has both. `drawn_for` chooses; `title`, `legend_above` and `add_corner` read the choice, and no figure
asks for it.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import update_wrapper, wraps
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from moesim.core.colours import BLACK, GREY, SERIES
from moesim.core.files import write_bytes
from moesim.core.table import frame_csv
from moesim.errors import ConfigError
from moesim.plots.layout import extent, settle, wrapped

COLUMN: Final = 3.35
"""Width of a figure for one column of a paper, in inches."""
TEXT: Final = 7.0
"""Width of a figure for both columns, in inches."""
WIDTHS: Final = {"column": COLUMN, "page": TEXT, "slide": 20 / 3}
"""Widths by name, in inches. That of a slide is half of one of 13.33 inches: enlarged to fill it, text has 13 points and more."""
_LIMITS: Final = (2.5, 20.0)  # inches
_PAGE: Final = 8.0  # inches that panels one above another may take
_LEAST: Final = 1.6  # inches that the narrowest panel takes
_width: ContextVar[float | None] = ContextVar("width", default=None)
_NARROW: Final = 5.0  # inches: a narrower figure has its panels one above another, and its legend above them


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def drawn_wide(width: float | None) -> AbstractContextManager[None]:
    """Draw the figures of a block this wide, in inches."""
    return _set(_width, width)


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
    """Return the width of a figure: the one asked for, else its own."""
    return _width.get() or natural


def is_narrow(width: float) -> bool:
    """Whether a figure is too narrow for things side by side."""
    return width < _NARROW


STYLE: Final[Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 8.5,  # _TITLE
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "figure.dpi": 100,
    "savefig.dpi": 240,  # `_PAPER_DPI` for a paper
    "text.parse_math": False,  # a name with dollar signs is a name
    "pdf.fonttype": 42,  # TrueType: text stays text, and the font comes with the file
    "ps.fonttype": 42,
}

MAP: Final = "cividis"
"""Colours of heat maps, even in lightness: they read the same in grey."""
_PAPER_DPI: Final = 300  # what publishers ask of pictures
SMALL: Final = 6.5
"""The smallest text, in points."""
_TITLE: Final = 8.5  # points, in bold
_CHARACTER: Final = 0.0082  # inches that a character is wide, for each point of its size; a cautious mean
_LINE: Final = 0.115  # inches that a line of the smallest text is high

Medium = Literal["screen", "paper"]
MEDIA: Final = get_args(Medium)
_medium: ContextVar[Medium] = ContextVar("medium", default="screen")

OPTIMUM: Final = "belady"
"""The policy that is drawn in black."""

NOT_EXACT: Final = "* not exact"
"""Beginning of the line that explains the star; every figure with a star has it, also on paper."""
_NO_BREAK: Final = "\N{NO-BREAK SPACE}"
_P = ParamSpec("_P")
_T = TypeVar("_T")


def drawn_for(medium: Medium) -> AbstractContextManager[None]:
    """Draw the figures of a block for the screen, or for a paper."""
    return _set(_medium, medium)


def for_paper() -> bool:
    """Whether figures are drawn for a paper."""
    return _medium.get() == "paper"


def title(axes: Axes, text: str) -> None:
    """Set the title of a figure of one panel; on paper it has none."""
    figure = axes.get_figure(root=True)
    if not for_paper() and figure is not None:
        axes.set_title("\n".join(_titled(figure, text)))


def _titled(figure: Figure, text: str) -> list[str]:
    return textwrap.wrap(text, int(figure.get_figwidth() / (1.06 * _TITLE * _CHARACTER)))


def text_width(text: str, size: float = SMALL) -> float:
    """Measure the width of a text, in inches."""
    return max(extent(line, size)[0] for line in text.split("\n"))


@contextmanager
def _in_style() -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def styled(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a figure, or what has one, under `STYLE`."""

    @wraps(make)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _in_style():
            made = make(*args, **kwargs)
            figure = made if isinstance(made, Figure) else made.figure  # type: ignore[attr-defined]
            FigureCanvasAgg(figure)
            settle(figure)
            return made

    return wrapper


def new_figure(width: float, height: float, grid: str | None = None, *, square: bool = False) -> tuple[Figure, Axes]:
    """Make a figure, in inches, with axes and grid; other widths keep the height, if not square."""
    asked = width_for(width)
    figure = Figure(figsize=(asked, height * min(1.0, asked / width) if square else height), layout="constrained")
    axes = figure.add_subplot()
    if grid is not None:
        grid_of(axes, grid)
    return figure, axes


def grid_of(axes: Axes, which: str) -> None:
    """Draw the lines of a grid across the ``x`` axis, or of ``both``."""
    axes.grid(visible=True, axis=which)  # type: ignore[arg-type]
    if which == "x":
        axes.grid(visible=False, axis="y")


def panels_of(
    n: int, n_columns: int, width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained",
    *, sharey: bool = False,
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Make a figure of n panels in rows of as many columns."""
    figure = Figure(figsize=(width, height), layout=layout)
    grid = figure.subplots(-(-n // n_columns), n_columns, squeeze=False, sharey=sharey).ravel().tolist()
    for axes in grid[n:]:
        axes.remove()
    return figure, grid[:n]


def columns_of(n_panels: int, fit: int, width: float, row: float) -> int:
    """Choose how many panels stand side by side: those that fit, or more where the figure would be taller than a page."""
    few = max(1, min(fit, n_panels))
    return next(
        (n for n in range(few, int(width / _LEAST) + 1) if -(-n_panels // n) * row <= _PAGE), max(few, int(width / _LEAST))
    )


def panel_title(axes: Axes, text: str, **changes: Any) -> None:
    """Name one of several panels."""
    axes.set_title(text, **{"fontsize": 7.5, "fontweight": "normal", **changes})


def swatch(colour: str, label: str, hatch: str = "", linewidth: float = 0.5, edge: str = BLACK) -> Patch:
    """Make the entry of a legend for a filled area."""
    return Patch(facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=linewidth, label=label)


def capital(text: str) -> str:
    """Begin a text with a capital letter."""
    return f"{text[0].upper()}{text[1:]}" if text else ""


def sentence(text: str) -> str:
    """Make a sentence of a text, if there is any."""
    return f"{capital(text)}." if text else ""


def numbers_between(low: int, high: int) -> str:
    """Write two numbers as an interval, or as one if they are equal."""
    return f"{low}" if low == high else f"{low} to {high}"


def add_corner(figure: Figure, text: str, notes: Sequence[str] = ()) -> None:
    """Write notes and the corner label under a figure."""
    width = int(figure.get_figwidth() / (SMALL * _CHARACTER))
    listed = [note.partition("; ")[0] for note in notes if note.startswith(NOT_EXACT)]
    lines = [line for part in (listed if for_paper() else (*notes, text)) if part for line in _wrapped(part, width)]
    if lines:
        figure.supxlabel("\n".join(lines), x=0.99, ha="right", fontsize=SMALL, color="#555555")
        _add_height(figure, _LINE * len(lines))


def _add_height(figure: Figure, inches: float) -> None:
    figure.set_figheight(figure.get_figheight() + inches)


def _wrapped(text: str, width: int) -> list[str]:
    parts = [part if len(part) > width - 2 else part.replace(" ", _NO_BREAK) for part in text.split(" · ")]
    whole = f"{_NO_BREAK}· ".join(parts)
    widths = range(width, max(map(len, whole.split(" "))) - 1, -1)
    ways = [_lines(whole, one) for one in widths] or [_lines(whole, width)]
    return next((lines for lines in ways if len(lines) == len(ways[0]) and 3 * len(lines[-1]) >= len(lines[0])), ways[0])


def _lines(text: str, width: int) -> list[str]:
    return [line.replace(_NO_BREAK, " ") for line in textwrap.wrap(text, width, break_on_hyphens=False)]


def need(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    """Check that a frame has columns and rows; raises `ConfigError`."""
    missing = [column for column in columns if column not in frame]
    if missing:
        near = [name for name in map(str, frame) if name.startswith(f"{missing[0]}_")][:4]
        hint = f"; it has {', '.join(near)}" if near else ""
        raise ConfigError(f"plot {what}: expected the columns {', '.join(missing)} in the results, got none of them{hint}")
    if frame.empty:
        raise ConfigError(f"plot {what}: expected at least one result, got none")


def short(value: float) -> str:
    """Write a single number: three figures, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def alike(values: Iterable[float]) -> list[str]:
    """Write numbers of one figure with as many decimals: three figures of the largest, two of the least, five at most.

    >>> alike([9.87, 45.21, math.nan]), alike([0.0121, 0.5, 96]), alike([1234.5, 3.4])
    (['9.9', '45.2', ''], ['0.01', '0.50', '96.00'], ['1,234', '3'])
    """
    listed = list(values)
    sizes = [math.floor(math.log10(abs(one))) for one in listed if one and math.isfinite(one)] or [0]
    whole = all(one == round(one) for one in listed if math.isfinite(one))
    decimals = 0 if whole else max(0, min(max(2 - max(sizes), 1 - min(sizes)), 3 - max(sizes)))
    return ["" if math.isnan(one) else f"{one:,.{decimals}f}" for one in listed]


def legend_beside(axes: Axes, names: Sequence[str]) -> None:
    """Put the legend to the right, or above if there is no room."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: names.index(labels[i]) if labels[i] in names else len(names))
    figure = axes.get_figure(root=True)
    if figure is not None and is_narrow(figure.get_figwidth()):
        text = axes.get_title("left")
        axes.set_title("")
        legend_above(figure, [handles[i] for i in order], text)
        return
    axes.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.5
    )


def legend_above(figure: Figure, handles: Sequence[Artist], text: str = "") -> None:
    """Put the legend above a figure, under the title."""
    room = figure.get_figwidth() - 0.1
    labels = [wrapped(str(handle.get_label()), room - 0.36, 7.0) for handle in handles]
    for handle, label in zip(handles, labels, strict=True):
        handle.set_label(label)

    def needed(n_columns: int) -> float:  # as Matplotlib fills columns
        columns = np.array_split(np.array([text_width(label, 7.0) for label in labels]), n_columns)
        return sum(0.36 + float(column.max()) for column in columns)

    lines = [] if for_paper() or not text else _titled(figure, text)
    n_columns = next((n for n in range(len(labels), 1, -1) if needed(n) <= room), 1)
    legend = figure.legend(
        handles=list(handles), loc="outside upper left", ncols=n_columns, alignment="left", borderaxespad=0.2,
        columnspacing=1.0, handlelength=1.7, handletextpad=0.5, labelspacing=0.35,
        title="\n".join(lines) or None, title_fontproperties={"weight": "bold", "size": _TITLE},
    )  # fmt: skip
    estimated = 1.2 * _LINE * (-(-len(labels) // n_columns) + (1.5 * len(lines)))
    _add_height(
        figure, max(estimated, legend.get_window_extent().height / figure.dpi if any("\n" in one for one in labels) else 0)
    )


# Parts of a font with which text is set, such as ligatures and kerning. A PDF says where each glyph stands, so its readers use
# none of them; and to cut them down to the glyphs of a figure takes longer than to draw it.
_FOR_SETTING: Final = ("GDEF", "GPOS", "GSUB", "BASE", "JSTF", "kern", "MATH")


@contextmanager
def _glyphs_alone() -> Iterator[None]:
    """Embed fonts without `_FOR_SETTING`: Matplotlib has no option for it."""
    from fontTools.subset import Options  # takes a sixth of a second to import

    usual = Options._drop_tables_default
    Options._drop_tables_default = [*usual, *_FOR_SETTING]
    try:
        yield
    finally:
        Options._drop_tables_default = usual


_METADATA: Final[dict[str, dict[str, None]]] = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None}}


def save(figure: Figure, path_base: str | Path) -> list[Path]:
    """Write a figure as PNG and PDF, atomically; the same figure gives the same bytes.

    Parameters
    ----------
    figure : Figure
    path_base : str or Path
        The path without a suffix.

    Returns
    -------
    list of Path
        The PNG and the PDF.
    """
    return [write_bytes(Path(f"{path_base}.{suffix}"), data) for suffix, data in rendered(figure).items()]


def pictures(figure: Figure, name: str) -> dict[str, bytes]:
    """Return the files that `save` writes, by name."""
    return {f"{name}.{suffix}": data for suffix, data in rendered(figure).items()}


def rendered(figure: Figure, suffixes: Sequence[str] = ("png", "pdf")) -> dict[str, bytes]:
    """Return the bytes of a figure as ``png`` and ``pdf``."""
    found, engine = {}, figure.get_layout_engine()
    with _in_style():
        matplotlib.rcParams.update({"savefig.dpi": _PAPER_DPI} if for_paper() else {})
        _lay_out(figure)
        for suffix in suffixes:
            buffer = io.BytesIO()
            with _glyphs_alone() if suffix == "pdf" else nullcontext():
                figure.savefig(buffer, format=suffix, metadata=_METADATA[suffix])
            found[suffix] = buffer.getvalue()
    figure.set_layout_engine(engine)
    return found


def _lay_out(figure: Figure) -> None:
    """Lay a figure out once, unless it is as `settle` left it: each saving would do it once more."""
    engine, dpi = figure.get_layout_engine(), figure.dpi
    if engine is not None and figure.stale:
        figure.dpi = matplotlib.rcParams["savefig.dpi"]
        engine.execute(figure)
        figure.dpi = dpi
    figure.set_layout_engine(None)


_MARKERS: Final = "osD^vPX<>"
_DASHES: Final = ("-", "--", "-.", ":")
_HATCHES: Final = (
    "", "////", "\\\\\\\\", "....", "----", "xxxx", "oo", "||||", "++", "**",
    "///...", "\\\\\\...", "---...", "///oo", "\\\\\\oo", "|||...", "///---", "\\\\\\|||", "OO", "xxx...",
)  # fmt: skip


class Look(NamedTuple):
    """Colour of a policy, and marks that distinguish policies without colour."""

    colour: str
    hatch: str
    marker: str
    dash: str


_all: ContextVar[Sequence[str]] = ContextVar("all", default=())


def drawn_among(policies: Sequence[str]) -> AbstractContextManager[None]:
    """Draw the figures of a block with the looks of these policies."""
    return _set(_all, _all.get() or policies)


_HOMES: Final = {name: place for place, name in enumerate((
    "on-demand", "lru", "fiddler", "dali", "mixtral-offloading-spec", "prescope", "llama-cpp", "hybrimoe-paper", "daop-paper",
    "llama-cpp-cache", "mixtral-offloading", "llama-cpp-fit", "pooled-cache", "exllamav3", "kt-layer", "kt-expert", "lfu", "fifo",
    "moe-infinity-paper", "pre-gated", "adapmoe", "hybrimoe-code", "daop-code", "vllm-expert-cache",
))}  # fmt: skip
"""Places of the looks of well-known policies, the same in all results."""


def looks_of(policies: Sequence[str]) -> dict[str, Look]:
    """Return the look of every policy: that of its name, else by its place in the whole result.

    >>> with drawn_among(["ours", "lru", "belady"]):
    ...     looks_of(["lru"]) == {"lru": series_look(1)}, looks_of(["ours", "belady"])["belady"]
    (True, Look(colour='#000000', hatch='', marker='*', dash='-'))
    """
    others = [policy for policy in policies if policy != OPTIMUM]
    most = len(SERIES)
    if len(others) > most:
        raise ConfigError(f"plot: expected at most {most} policies in one figure, got {len(others)}; choose some with --policies")
    known = [policy for policy in dict.fromkeys([*_all.get(), *policies]) if policy != OPTIMUM]
    own = {policy: _HOMES[policy] for policy in known if policy in _HOMES}
    free = [place for place in range(most) if place not in own.values()]
    own |= dict(zip((policy for policy in known if policy not in own), free, strict=False))
    left = (place for place in range(most) if place not in {own.get(policy) for policy in others})
    looks = {policy: series_look(own[policy] if policy in own else next(left)) for policy in others}
    return {policy: looks.get(policy, Look(BLACK, "", "*", "-")) for policy in policies}


_CLASS: Final = re.compile(r"(?:(?<=[=(])|^)[a-z_][\w.]*:(?=[A-Z])")  # the module before a class
_PARTS: Final = re.compile(r"composed\((.+)\)")
_KINDS_OF_PARTS: Final = r"(?:placement|assignment|prefetch|replacement)="


def display_names(policies: Sequence[str]) -> dict[str, str]:
    """Shorten names that are Python paths or compositions, unless two would be the same.

    >>> display_names(["lru", "my.caches:Newest", "composed(replacement=my.caches:Newest,prefetch=lfu(n=1,m=2),scope=global)"])
    {'my.caches:Newest': 'Newest', \
'composed(replacement=my.caches:Newest,prefetch=lfu(n=1,m=2),scope=global)': 'Newest + lfu(n=1,m=2) + scope=global'}
    """
    found = {}
    for policy in policies:
        name = _CLASS.sub("", policy)
        if parts := _PARTS.fullmatch(name):
            name = " + ".join(re.sub(rf"^{_KINDS_OF_PARTS}", "", one) for one in re.split(r",(?![^()]*\))", parts[1]))
        found[policy] = name
    names = list(found.values())
    return {policy: name for policy, name in found.items() if name != policy and names.count(name) == 1}


def series_look(number: int) -> Look:
    """Return the look of the n-th series, from 0."""
    marker, dash = number % len(_MARKERS), number % len(_DASHES)  # lengths without common factor: 36 pairs
    return Look(SERIES[number], _HATCHES[number % len(_HATCHES)], _MARKERS[marker], _DASHES[dash])


class Drawing(NamedTuple):
    """One figure."""

    data: pd.DataFrame  # tidy, with exactly what is drawn
    figure: Figure
    caption: str  # for a paper: what is shown, on what, the labels of the numbers, and what is not exact


def written(drawing: Drawing, name: str, suffixes: Sequence[str] = ("png", "pdf")) -> dict[str, bytes]:
    """Return the files of a figure by name: pictures, data, caption."""
    files = {f"{name}.{suffix}": content for suffix, content in rendered(drawing.figure, suffixes).items()}
    files[f"{name}.csv"] = frame_csv(drawing.data)
    files[f"{name}.txt"] = (drawing.caption.strip() + "\n").encode()
    return files


class Kind(Generic[_P]):
    """A kind of figure; its function takes data of `source`, then options."""

    __name__: str

    def __init__(self, make: Callable[_P, Drawing], source: str, title: str) -> None:
        self.drawing = styled(_among_its_policies(make))
        # what it draws: a name of `moesim.plots.catalogue.SOURCES`
        self.source = source
        self.title = title  # one line, for listings
        update_wrapper(self, make)

    def __call__(self, *args: _P.args, **options: _P.kwargs) -> Figure:
        """Return the picture alone."""
        return self.drawing(*args, **options).figure


def _among_its_policies(make: Callable[_P, Drawing]) -> Callable[_P, Drawing]:
    """Draw policies by their short names, and with the looks of all."""

    @wraps(make)
    def wrapper(*args: _P.args, **options: _P.kwargs) -> Drawing:
        given: Any = args[0] if args else None
        framed = isinstance(given, pd.DataFrame) and "policy" in given
        whole = [str(one) for one in given["policy"]] if framed else given if isinstance(given, Mapping) else ()
        among = list(dict.fromkeys([*_all.get(), *whole]))
        names = display_names(among)
        if names and framed:
            given = given.assign(policy=given["policy"].map(lambda one: names.get(one, one)))
        elif names:
            given = {names.get(policy, policy): run for policy, run in given.items()}
        more: Any = {name: names.get(str(one), one) if name == "baseline" else one for name, one in options.items()}
        with _set(_all, [names.get(policy, policy) for policy in among]):
            drawn = make(given, *args[1:], **more) if args else make(*args, **more)  # type: ignore[arg-type]
        if not names:
            return drawn
        longer = {name: policy for policy, name in names.items()}
        data = (
            drawn.data.assign(policy=drawn.data["policy"].map(lambda one: longer.get(one, one)))
            if "policy" in drawn.data
            else drawn.data
        )
        listed = "; ".join(f"{name}: {policy}" for name, policy in longer.items() if policy in set(whole))
        return Drawing(data, drawn.figure, f"{drawn.caption.strip()} {listed}." if listed else drawn.caption)

    return wrapper


def kind(source: str, title: str) -> Callable[[Callable[_P, Drawing]], Kind[_P]]:
    """Make a `Kind` of a function."""
    return lambda make: Kind(make, source, title)


_MARKED: Final = 18  # points of a line with as many markers; of more only some have one


def marked_line(axes: Axes, x: Sequence[float], y: Sequence[float | None], number: int, label: str, **changes: Any) -> None:
    """Draw a line whose number decides colour, marker and dash."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    every = 1 + len(points) // _MARKED
    look: dict[str, Any] = {
        "color": SERIES[number % len(SERIES)], "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number % len(_DASHES)], "linewidth": 1.4, "markersize": 4.5, "markeredgecolor": BLACK,
        "markeredgewidth": 0.4, "markevery": (number * every // 4 % every, every),  # not all at the same places
    }  # fmt: skip
    axes.plot([a for a, _ in points], [b for _, b in points], label=label, **(look | changes))


def level(axes: Axes, y: float | None, label: str, **changes: Any) -> None:
    """Draw a horizontal line to compare with, if it has a value."""
    look: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.6, "zorder": 1}
    if y is not None:
        axes.axhline(y, label=label, **(look | changes))


def doubling_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    """Make the x axis logarithmic with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [str(v) for v in values])
    axes.minorticks_off()
    axes.set_xlabel(label)


def whole_numbers(*axes: Axis) -> None:
    """Have ticks at whole numbers only."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))
