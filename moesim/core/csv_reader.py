"""CSV tables with fixed columns, written by hand: one-line errors that name the line."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moesim.core.gate import TABLE, read_text
from moesim.errors import ConfigError


class Line(NamedTuple):
    """One row of a table."""

    texts: dict[str, str]  # by column
    place: str  # file and line, for messages


def read_lines(path: Path, columns: Sequence[str], what: str) -> list[Line]:
    """Read a table."""
    lines = []
    try:
        reader = csv.DictReader(io.StringIO(read_text(path, TABLE, what)))
        if list(reader.fieldnames or ()) != list(columns):
            raise ConfigError(f"{path}: expected the columns {','.join(columns)}, got {','.join(reader.fieldnames or ())}")
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                n = len(columns)
                raise ConfigError(f"{place}: expected {n} fields, got another number; quote fields that contain a comma")
            lines.append(Line(dict(row), place))
    except csv.Error as error:
        raise ConfigError(f"{path}: expected {what}, got: {error}; check the path") from None
    return lines
