"""Figures of a report, the folder's or drawn from its rows, and files inside a page."""

from __future__ import annotations

import base64
import gzip
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pandas as pd

from moesim.core.files import Manifest, listing, read_verified
from moesim.core.progress import Progress
from moesim.errors import ConfigError
from moesim.reporting.folder import ResultFolder

MAX_PLAIN: Final = 1_000_000
"""Bytes of a CSV that is offered as it is; more is compressed, since browsers refuse to save data URIs of more than 2 MB."""


def data_uri(data: bytes, kind: str) -> str:
    """Write bytes as a data URI.

    >>> data_uri(b"a", "text/plain")
    'data:text/plain;base64,YQ=='
    """
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def csv_uri(name: str, data: bytes) -> tuple[str, str]:
    """Write a CSV as a data URI, compressed if it is large."""
    if len(data) <= MAX_PLAIN:
        return f"{name}.csv", data_uri(data, "text/csv")
    return f"{name}.csv.gz", data_uri(gzip.compress(data, mtime=0), "application/gzip")


MAX_BYTES: Final = 4_000_000
"""Of all pictures together; a third more in the page. The first ones are kept."""

MOST_OF_A_KIND: Final = 4
"""Figures of each kind that are drawn for the page: a sweep over many settings has one for each combination."""

_OF_VARIANTS: Final = ("ladder",)  # compare a policy with the one before it, which only says something of variants of one
_SWEPT: Final = {"throughput": "batch_size", "speed_by_context": "prompt_tokens", "speedup_lines": ""}
"""Lines over a setting, left out where it has one value; those of `speedup_lines` are in `speedup` as well."""
_NUMBER: Final = re.compile(r"-\d+$")  # of a further figure of a kind
_SAID: Final = re.compile(r" ?(?:\b\w+(?: and \w+)?; weakest source among |\bNotes: |\* not exact).*$")
"""The end of a caption, which the page has elsewhere, for all of its figures: sources, notes, and the meaning of a star."""
_DENSITY: Final = 2  # pixels of a picture for each pixel of the page
_WIDE: Final = 750  # pixels of the page; wider figures get a row of their own

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class PageFigure:
    """A figure in the page."""

    name: str  # of its file, without a suffix
    # title, caption: what kind of figure it is, and the sentences below it; the latter may be empty
    title: str
    caption: str
    uri: str  # the picture
    # csv_name, csv_uri: file with the data; both are empty if they were not written down
    csv_name: str
    csv_uri: str
    # width, height: in the page
    width: int
    height: int
    wide: bool  # whether it needs a row of its own


def page_figures(folder: ResultFolder, first: str, *, progress: bool = False) -> tuple[list[PageFigure], list[str]]:
    """Collect the figures of a page; one of the kind `first`, which is drawn if the folder has none, leads."""
    from moesim.plots.catalogue import KINDS  # Matplotlib takes most of a second to import

    titles = {name: kind.title for name, kind in KINDS.items()}
    plots = folder.path / "plots"
    pictures = sorted(path for path in plots.iterdir() if path.suffix == ".png") if plots.is_dir() else []
    notes: list[str] = []
    if Manifest(folder.path).marked and (others := [path for path in pictures if listing(path) is None]):
        pictures = [path for path in pictures if path not in others]
        notes.append(f"Left out, since moesim did not draw them: {', '.join(path.name for path in others)}.")
    found = [*(_read(pictures) if pictures else _drawn(folder, notes, progress=progress))]
    if first and not any(_kind(name) == first for name, _ in found):
        found = [*_drawn(folder, notes, [first], progress=progress), *found]
    found.sort(key=lambda one: _kind(one[0]) != first)
    figures: list[PageFigure] = []
    left_out = []
    n_bytes = 0
    for name, files in found:
        n_bytes += len(files["png"])
        if n_bytes > MAX_BYTES:
            left_out.append(name)
            continue
        figures.append(_figure(name, files, titles, plots))
    if left_out:
        size = f"{MAX_BYTES / 1e6:g} MB"
        notes.append(f"Left out, to keep the page small (pictures of {size} at most): {', '.join(left_out)}.")
    return figures, notes


def _kind(name: str) -> str:
    return _NUMBER.sub("", name.partition(".")[0])


def _figure(name: str, files: Files, titles: Mapping[str, str], place: Path) -> PageFigure:
    begin, _, variant = name.partition(".")
    kind = _kind(name)
    title = titles.get(kind, kind.replace("_", " ")) + begin.removeprefix(kind).replace("-", " ")
    text = re.sub(r"\.(?=[a-z_]+=)", ", ", variant).replace("=", " ").replace("_", " ")
    png = files["png"]
    if not png.startswith(b"\x89PNG\r\n\x1a\n") or len(png) < 24:
        raise ConfigError(f"{place / name}.png: expected a picture, got something else; remove it or run the experiment again")
    width, height = (n // _DENSITY for n in struct.unpack(">II", png[16:24]))
    csv_name, data = csv_uri(name, files["csv"]) if "csv" in files else ("", "")
    return PageFigure(
        name=name,
        title=f"{title[0].upper()}{title[1:]}" + (f" ({text})" if text else ""),
        caption=_SAID.sub("", " ".join(files.get("txt", b"").decode("utf-8", "replace").split())),
        uri=data_uri(png, "image/png"),
        csv_name=csv_name,
        csv_uri=data,
        width=width,
        height=height,
        wide=width > _WIDE,
    )


def _read(pictures: list[Path]) -> Iterator[tuple[str, Files]]:
    for picture in pictures:
        name = picture.name.removesuffix(".png")
        beside = {suffix: picture.with_name(f"{name}.{suffix}") for suffix in ("png", "csv", "txt")}
        try:
            yield name, {suffix: read_verified(path) for suffix, path in beside.items() if path.is_file()}
        except OSError as error:
            raise ConfigError(f"{picture}: expected a figure that can be read, got: {error.strerror}") from None


def _drawn(
    folder: ResultFolder, notes: list[str], wanted: Sequence[str] = (), *, progress: bool
) -> Iterator[tuple[str, Files]]:  # fmt: skip
    """Draw what the rows allow for; a note names the kinds that they do not."""
    from moesim.plots.catalogue import KINDS, figures_of
    from moesim.plots.drawing import files_of
    from moesim.plots.style import drawn_among

    done = [row for row in folder.rows if not row.get("error")]
    one_policy = len({row.get("policy_name", row["policy"]) for row in done}) == 1
    kinds = [name for name, kind in KINDS.items() if kind.source == "rows" and (one_policy or name not in _OF_VARIANTS)]
    frame, among = pd.DataFrame(done), list(dict.fromkeys(str(row["policy"]) for row in folder.rows))
    kinds = [name for name in kinds if name not in _SWEPT or (_SWEPT[name] in frame and frame[_SWEPT[name]].nunique() > 1)]
    kinds = [*wanted] or kinds if done else []
    with Progress(len(kinds), enabled=progress) as bar:
        for kind in kinds:
            bar.describe(f"drawing {kind}")
            n = 0
            try:
                for n, (name, part) in enumerate(figures_of(kind, frame, {}), start=1):
                    if n <= MOST_OF_A_KIND:
                        with drawn_among(among):
                            files = files_of(kind, name, [part], {}, suffixes=["png"])
                        yield name, {file.removeprefix(f"{name}."): data for file, data in files.items()}
            except ConfigError as error:
                notes.append(f"Not drawn: {error}.")
            if n > MOST_OF_A_KIND:
                notes.append(f"Of {n} figures of the kind {kind} the first {MOST_OF_A_KIND} are shown; moesim plot draws all.")
            bar.advance(1)
