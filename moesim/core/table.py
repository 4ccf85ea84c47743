"""Tables for people and for other programs: rich on a terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from html import escape
from operator import gt
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from moesim.core.text import cell, shown
from moesim.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from pandas import DataFrame


_WIDE = 1000  # columns; what is piped to a file is not cut
_GAP = 2  # between columns
_PIECE = r"[^\s\-_/,:;=+]+[\-_/,:;=+]*|[\-_/,:;=+]+"  # of a word, with the signs behind which a line may end
_PAINT = re.compile(r"\x1b\[[0-9;]*m")


class Format(StrEnum):
    """How to print a table."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"

    @property
    def for_programs(self) -> bool:
        return self in (Format.CSV, Format.JSON, Format.JSONL)

    @classmethod
    def named(cls, name: str) -> Format:
        if name not in list(cls):
            raise ConfigError(unknown_name("format", name, list(cls)))
        return cls(name)


def written(value: Any) -> str:
    """Write any value as the text of a cell."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={written(one)}" for key, one in value.items()) or "-"
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value)) or "-"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def render(
    columns: Sequence[str], rows: Sequence[Sequence[str]], form: Format, right: Sequence[str] = (), widest: int | None = None,
    bold: Collection[int] = (), whole: bool = False,
) -> str:  # fmt: skip
    """Write a table of texts; off a terminal, columns but the last are cut at `widest`.

    A terminal gets what fits it, unless the `whole` is wanted: words are broken where no space is enough, then columns are left
    out from the last on, and named below. Rows whose numbers are in `bold` are bold.

    >>> print(render(["policy", "hits"], [["lru", "41 %"]], Format.MD, right=["hits"]), end="")
    | policy | hits |
    |---|---:|
    | lru | 41 % |
    """
    assert all(len(row) == len(columns) for row in rows)
    if form is Format.CSV:
        return _csv(columns, rows)
    columns, rows, right = [shown(c) for c in columns], [[shown(c) for c in row] for row in rows], [shown(c) for c in right]
    if form is Format.MD:
        head = "|" + "|".join("---:" if column in right else "---" for column in columns) + "|"
        lines = ["| " + " | ".join(one.replace("|", "\\|") for one in row) + " |" for row in (columns, *rows)]
        return "\n".join([lines[0], head, *lines[1:]]) + "\n"
    from rich.console import Console  # most commands print no table
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
    numeric, terminal, gone, widths = [column in right for column in columns], sys.stdout.isatty(), list[str](), None
    if terminal:
        cells, widths = _fitted(list(zip(columns, *rows, strict=True)), None if whole else get_terminal_size().columns)
        gone = columns[len(cells) :]
        columns, *rows = ([one[i] for one in cells] for i in range(len(rows) + 1))
    for place, column in enumerate(columns):
        most = None if terminal or place == len(columns) - 1 else widest
        exact = None if widths is None else widths[place]
        justify: Literal["left", "right"] = "right" if numeric[place] else "left"
        table.add_column(column, justify=justify, overflow="fold", max_width=most, width=exact)
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number in bold else None)
    text = io.StringIO()
    width = _WIDE if widths is None else sum(widths) + _GAP * len(widths)
    console = Console(file=text, force_terminal=terminal, width=width, highlight=False, markup=False)
    console.print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    if gone:
        lines += wrapped(f"not shown: {', '.join(gone)}; a wider terminal or a pipe shows them").splitlines()
    return "\n".join(lines) + "\n"


def _fitted(columns: Sequence[Sequence[str]], terminal: int | None) -> tuple[list[list[str]], list[int]]:
    """Return the columns that fit a terminal, with their widths."""
    from rich.cells import cell_len

    widths = [max(1, *map(cell_len, column)) for column in columns]
    for pattern in (r"\S+", _PIECE):
        least = [max((cell_len(one) for cell in column for one in re.findall(pattern, cell)), default=1) for column in columns]
        while terminal is not None and _across(widths) > terminal and any(map(gt, widths, least)):
            widths[max((i for i, one in enumerate(widths) if one > least[i]), key=widths.__getitem__)] -= 1
    while terminal is not None and len(widths) > 1 and _across(widths) > terminal:
        widths.pop()
    return [[_broken(cell, width) for cell in column] for column, width in zip(columns, widths, strict=False)], widths


def _across(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _broken(text: str, width: int) -> str:
    """Break the words that are longer than a line behind their signs."""
    if len(text) <= width:
        return text
    lines = [""]
    for word in text.split(" "):
        pieces = [word] if len(word) <= width else re.findall(_PIECE, word)
        for number, piece in enumerate(pieces):
            joined = f"{lines[-1]} {piece}" if number == 0 and lines[-1] else lines[-1] + piece
            if len(joined) <= width or not lines[-1]:
                lines[-1] = joined
            else:
                lines.append(piece)
    return "\n".join(lines)


def wrapped(text: str, more: str = "") -> str:
    """Wrap lines that are too long for the terminal, with `more` before further lines; off a terminal leave them."""
    if not sys.stdout.isatty():
        return text
    width = get_terminal_size().columns
    return "\n".join(
        line
        if len(_PAINT.sub("", line)) <= width or line.lstrip().startswith("moesim ")
        else fill(line, width, subsequent_indent=re.sub(r"\S.*", "", line) + more, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


def render_records(rows: Sequence[Mapping[str, Any]], form: Format) -> str:
    """Write rows with all their keys, for other programs."""
    if form is Format.JSON:
        return json.dumps(list(rows), indent=2) + "\n"
    if form is Format.JSONL:
        return "".join(json.dumps(row) + "\n" for row in rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return _csv(columns, [["" if (v := row.get(key)) is None else v for key in columns] for row in rows])


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([cell(column) for column in columns])
    writer.writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()


def frame_csv(frame: DataFrame, **options: Any) -> bytes:
    """Write a frame as CSV with harmless texts; options of ``DataFrame.to_csv``."""
    guarded = frame.rename(columns=cell)
    for name in guarded.select_dtypes(exclude="number").columns:
        guarded[name] = guarded[name].map(cell)
    written: str = guarded.to_csv(index=False, lineterminator="\n", **options)
    return written.encode()


class Facts:
    """Something that states its facts."""

    __slots__ = ()

    def facts(self) -> dict[str, Any]:
        """State them by name, as ``moesim list`` shows them."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        def cell(value: Any) -> str:
            return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))

        rows = "".join(f"<tr><th>{escape(name)}</th><td>{cell(value)}</td></tr>" for name, value in self.facts().items())
        return f'<table style="text-align: left"><tbody>{rows}</tbody></table>'
