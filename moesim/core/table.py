"""Tables for people and for other programs: rich on a terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from html import escape
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from moesim.core.text import cell, shown
from moesim.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from pandas import DataFrame


_WIDE = 1000  # columns; what is piped to a file is not cut
_GAP = 2  # between columns


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
    bold: Collection[int] = (),
) -> str:  # fmt: skip
    """Write a table of texts; off a terminal, columns but the last are cut at `widest`.

    No word is broken. Rows whose numbers are in `bold` are bold.

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
    terminal = sys.stdout.isatty()
    widths = _widths(list(zip(columns, *rows, strict=True)), get_terminal_size().columns) if terminal else None
    for place, column in enumerate(columns):
        most = None if terminal or place == len(columns) - 1 else widest
        exact = None if widths is None else widths[place]
        table.add_column(column, justify="right" if column in right else "left", overflow="fold", max_width=most, width=exact)
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number in bold else None)
    text = io.StringIO()
    width = _WIDE if widths is None else sum(widths) + _GAP * len(widths)
    console = Console(file=text, force_terminal=terminal, width=width, highlight=False, markup=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _widths(columns: Sequence[Sequence[str]], terminal: int) -> list[int]:
    """Shrink the widest columns until the terminal holds all, none below its longest word."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in columns]
    least = [max((cell_len(word) for one in column for word in one.split()), default=0) for column in columns]
    while sum(widths) + _GAP * (len(widths) - 1) > terminal:
        place = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        if widths[place] <= least[place]:
            break
        widths[place] -= 1
    return [max(one, 1) for one in widths]


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
