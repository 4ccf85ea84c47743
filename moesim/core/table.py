"""Tables for people and for other programs: rich on a terminal, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from moesim.core.text import cell, shown
from moesim.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from pandas import DataFrame

_WIDE = 1000  # columns; what is piped to a file is not cut


class Format(StrEnum):
    """How to print a table."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"

    @property
    def for_programs(self) -> bool:
        """Whether it holds every value unrounded, for `render_records`."""
        return self in (Format.CSV, Format.JSON, Format.JSONL)

    @classmethod
    def named(cls, name: str) -> Format:
        """Look one up. Raises `ConfigError`."""
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
    """Write a table of texts; off a terminal, columns but the last are at most `widest` characters wide, if that is given.

    No word is broken: a table with long words may be wider than the terminal. Rows by number are bold.

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

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    terminal, n_least = sys.stdout.isatty(), 0
    for place, column in enumerate(columns, 1):
        most = None if terminal or place == len(columns) else widest
        longest = max((len(word) for one in (column, *(row[place - 1] for row in rows)) for word in one.split()), default=0)
        least = longest if terminal else None
        table.add_column(column, justify="right" if column in right else "left", overflow="fold", max_width=most, min_width=least)
        n_least += 2 + longest
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number in bold else None)
    text = io.StringIO()
    width = max(get_terminal_size().columns, n_least) if terminal else _WIDE
    console = Console(file=text, force_terminal=terminal, width=width, highlight=False, markup=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


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
    """Write a frame as CSV, its texts as `moesim.core.text.cell` does; options of ``DataFrame.to_csv``."""
    guarded = frame.rename(columns=cell)
    for name in guarded.select_dtypes(exclude="number").columns:
        guarded[name] = guarded[name].map(cell)
    written: str = guarded.to_csv(index=False, lineterminator="\n", **options)
    return written.encode()
